"""One iteration on disk, to be repeated under another layout or dtype and compared tensor by tensor (--record-step).

A record is a directory:

    record.json            flags, layout, samples, losses, gradient norm, sizes and hashes of all files
    weights.safetensors    the full model at the start, with the expert bias, under Megatron-Core's names
    gradients.safetensors  reduced and not clipped, fp32, same names
    rank_RRRRR.safetensors data of rank R: batches, projections of its tokens, routing, states of delayed scaling
    random_RRRRR.pt        its generators at the start

It is written to a staging directory that is renamed when complete. `Record.open` finds later damage by the hashes.

Projections do not depend on the layout. Every token of a layer's output is stored as 8 projections on fixed random
signs and its norm, computed in fp64 and stored in fp32 (36 bytes). A difference between two outputs appears in the
projections with its own norm on average, since the signs are independent, so a relative distance is known without the
output itself. A routing choice is stored with its margin. A rank writes its tokens with their samples and positions;
readers join them in the order of the global batch. Rejected alternative: full outputs, H / 9 times the size.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from arguments.regular_file import regular_file

FORMAT = 1
_OWN_HASH = "blake2b"
HEAD, WEIGHTS, GRADIENTS = "record.json", "weights.safetensors", "gradients.safetensors"
SIGNS = 8
"""Projections of a token."""
SAMPLES, TRACE, CHOICE, MARGIN, BATCH, SCALING = "samples", "trace/", "choice/", "margin/", "batch/", "scaling/"
_POSITIONS = "positions/"
_CHUNK_BYTES = 2**24


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def random_file(rank: int) -> str:
    return f"random_{rank:05d}.pt"


def random_signs(width: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the signs on which tokens are projected: fp64 [width, SIGNS] of +1 and -1, the same everywhere."""
    drawn = np.random.Generator(np.random.PCG64(width)).integers(0, 2, (width, SIGNS))
    return torch.from_numpy(drawn * 2 - 1).double().to(device)


@torch.no_grad()
def project_tokens(x: Tensor, signs: Tensor) -> Tensor:
    """Return projections and norm of tokens: [..., width] -> [..., SIGNS + 1] fp32; signs of `random_signs(width)`."""
    wide = x.detach().double()
    return torch.cat([wide @ signs, wide.norm(dim=-1, keepdim=True)], dim=-1).float()


def pack(chosen: Tensor) -> Tensor:
    """Pack choices into bits: bool [..., E] -> uint8 [..., ceil(E / 8)]."""
    return torch.from_numpy(np.packbits(chosen.bool().cpu().numpy(), axis=-1))


def tensors_of_rank(
    samples: Tensor, positions: Iterable[Tensor], by_token: Mapping[str, Sequence[Tensor]], others: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Collect what a rank writes.

    Args:
        samples: indices into the global batch, int64 [microbatches, B].
        positions: sequence positions of the rank's tokens, one tensor for every possible number of them.
        by_token: name -> [positions, B, K] per microbatch.
        others: written as they are.
    """
    tensors = {SAMPLES: samples.contiguous(), **{f"{_POSITIONS}{len(each)}": each.clone() for each in positions}}
    tensors |= {name: torch.stack([each.cpu() for each in passes]) for name, passes in by_token.items()}
    return tensors | {name: tensor.cpu().contiguous() for name, tensor in others.items()}


def write_rank(folder: Path, rank: int, tensors: Mapping[str, Tensor], generators: Mapping[str, Any]) -> None:
    """Write the two files of a rank.

    Raises:
        ValueError: if a file cannot be written.
    """
    try:
        save_file(dict(tensors), folder / rank_file(rank))
    except SafetensorError as error:
        raise ValueError(f"cannot write {folder / rank_file(rank)}: {error}") from error
    torch.save(dict(generators), folder / random_file(rank))


def make_staging_dir(folder: Path) -> Path:
    """Return an empty new directory for a record that is not complete."""
    staging_dir = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(staging_dir, ignore_errors=True)
    staging_dir.mkdir(parents=True)
    return staging_dir


def finalize_record(staging_dir: Path, folder: Path, head: Mapping[str, Any], files: Iterable[str]) -> int:
    """Complete the record in the staging directory, whose files are written, and rename it over an older one.

    Returns:
        Its size in bytes.
    """
    sizes = {name: (staging_dir / name).stat().st_size for name in files}
    table = {name: {"bytes": num_bytes, "blake2b": _hash_file(staging_dir / name)} for name, num_bytes in sizes.items()}
    (staging_dir / HEAD).write_text(head_text({"format": FORMAT, **head, "files": table}), encoding="utf-8")
    for path in staging_dir.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    older = folder.with_name(f"{folder.name}.older")
    shutil.rmtree(older, ignore_errors=True)
    if folder.exists():
        folder.rename(older)
    staging_dir.rename(folder)
    shutil.rmtree(older, ignore_errors=True)
    return sum(sizes.values())


def head_text(head: Mapping[str, Any]) -> str:
    """Return the text of a head, which ends with a hash of the rest."""
    rest = {name: value for name, value in head.items() if name != _OWN_HASH}
    return json.dumps({**rest, _OWN_HASH: _hash_head(rest)}, indent=1)


def _hash_head(head: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(head).encode(), digest_size=16).hexdigest()


def _hash_file(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Record:
    """A complete record. Tensors are read on access."""

    folder: Path
    head: Mapping[str, Any]

    @staticmethod
    def open(folder: Path | str) -> Record:
        """Open and verify a record.

        Raises:
            ValueError: naming the folder or file that is wrong.
        """
        folder = Path(folder)
        path = folder / HEAD
        if not folder.is_dir():
            raise ValueError(f"{folder}: there is no such folder")
        try:
            head = json.loads(regular_file(path).read_text(encoding="utf-8"))
            stored_hash = head.pop(_OWN_HASH, None)
            files = {str(name): (int(entry["bytes"]), str(entry["blake2b"])) for name, entry in head["files"].items()}
        except FileNotFoundError:
            raise ValueError(
                f"{path}: there is no such file; {folder} is no record of --record-step, or one that was not finished"
            ) from None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path}: this is not the head of a record ({type(error).__name__}: {error})") from error
        if head.get("format") != FORMAT:
            raise ValueError(f"{path}: format {head.get('format')}, this version reads {FORMAT}")
        if stored_hash != _hash_head(head):
            raise ValueError(f"{path}: damaged (its text is not the one written)")
        for name, (size, digest) in files.items():
            if Path(name).name != name:
                raise ValueError(f"{path}: it names the file {name!r}, outside its folder")
            try:
                actual_size = (folder / name).stat().st_size
                is_intact = actual_size == size and _hash_file(folder / name) == digest
            except OSError as error:
                raise ValueError(f"{folder / name}: cannot be read ({error.strerror})") from error
            if not is_intact:
                suffix = ", which are not those written" if actual_size == size else ""
                raise ValueError(f"{folder / name}: damaged ({actual_size} of {size} bytes{suffix})")
        return Record(folder, head)

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS

    def ranks(self) -> list[int]:
        return list(range(self.head["world_size"]))

    def _rank_files(self) -> Iterator[safe_open]:
        for rank in self.ranks():
            with safe_open(self.folder / rank_file(rank), "pt") as file:
                yield file

    def names(self, prefix: str) -> list[str]:
        """Return the distinct names that ranks wrote under a prefix, without it."""
        names = (name for file in self._rank_files() for name in file.keys() if name.startswith(prefix))  # noqa: SIM118
        return [name.removeprefix(prefix) for name in dict.fromkeys(names)]

    def joined(self, name: str) -> Tensor:
        """Return all tokens of a quantity in the order of the global batch: [samples, sequence, K].

        Raises:
            ValueError: if tokens are missing or occur more than once.
        """
        full: Tensor | None = None
        counts = torch.zeros(self.head["samples"], self.head["seq_length"], dtype=torch.int64)
        for file in self._rank_files():
            if name not in file.keys():  # noqa: SIM118 - not a mapping
                continue
            local_MSBK, samples_MB = file.get_tensor(name), file.get_tensor(SAMPLES)
            positions_S = file.get_tensor(f"{_POSITIONS}{local_MSBK.shape[1]}")
            if full is None:
                full = torch.zeros(*counts.shape, local_MSBK.shape[-1], dtype=local_MSBK.dtype)
            index = (samples_MB[:, None, :], positions_S[None, :, None])
            full[index] = local_MSBK
            counts.index_put_(index, torch.ones(1, dtype=torch.int64), accumulate=True)
        if full is None or not bool((counts == 1).all()):
            tokens = "for no token" if full is None else "not exactly once for every token"
            raise ValueError(f"{self.folder}: {name} is there {tokens}")
        return full

    def batch(self) -> dict[str, Tensor]:
        """Return the iteration's batches by field, [samples, sequence] in the order of the global batch."""
        fields: dict[str, Tensor] = {}
        for file in self._rank_files():
            samples = file.get_tensor(SAMPLES).flatten()
            for key in (key for key in file.keys() if key.startswith(BATCH)):  # noqa: SIM118
                local = file.get_tensor(key).flatten(0, 1)
                empty = torch.zeros(self.head["samples"], *local.shape[1:], dtype=local.dtype)
                fields.setdefault(key.removeprefix(BATCH), empty)[samples] = local
        return fields

    def scaling(self) -> dict[str, Tensor]:
        """Return the states of delayed scaling by name; they are equal on all ranks that have them."""
        return {
            key.removeprefix(SCALING): file.get_tensor(key)
            for file in self._rank_files()
            for key in file.keys()  # noqa: SIM118 - safe_open is not iterable
            if key.startswith(SCALING)
        }

    def generators(self, rank: int) -> dict[str, Any]:
        """Return the state of a rank's generators at the start.

        Raises:
            ValueError: naming the file.
        """
        path = self.folder / random_file(rank)
        try:
            states = torch.load(regular_file(path), weights_only=True)
        except Exception as error:  # of many types: it depends on the damaged byte
            raise ValueError(f"{path}: this is no file of random states ({type(error).__name__}: {error})") from error
        if not isinstance(states, dict):
            raise ValueError(f"{path}: this is no file of random states (it holds a {type(states).__name__})")
        return states

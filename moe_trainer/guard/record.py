"""One iteration on disk, so that it can be run again under another mapping or dtype and compared tensor by tensor (--record-step).

A record is a folder:

    record.json            flags, mapping, samples, losses, gradient norm, sizes and digests of the other files and of itself
    weights.safetensors    the whole model at the beginning, with the expert bias, under Megatron-Core's names
    gradients.safetensors  reduced and not clipped, fp32, same names
    rank_RRRRR.safetensors what rank R saw: its batches, traces of its tokens, its routing, scaling states of 8 bits
    random_RRRRR.pt        its generators at the beginning

It is written into a folder beside it that is renamed when everything is there: a folder with the name of a record is whole, or it has
been damaged afterwards, which `Record.open` finds (sizes and digests of all files).

Traces do not depend on the mapping. Of a layer's output every token keeps 8 projections on fixed random signs and its norm, computed in
fp64 and kept in fp32 (36 bytes); a difference between two outputs shows in the projections with its own norm (on average: the signs are
independent), so that a relative distance can be told without the output itself. Of a choice of experts there is also how clear it was. A rank writes the rows that it holds, and which positions
of which samples they are; readers put them together in the order of the global batch. Kept outputs, rejected: H / 9 times the size.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterable, Mapping, Sequence
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
_CHUNK = 2**24
_LOAD_ERRORS = (OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, EOFError, ArithmeticError, AssertionError,
                pickle.UnpicklingError)
"""What torch.load raises for damaged bytes; which of them depends on the byte."""


def rank_file(rank: int) -> str:
    """Name of the file of a rank."""
    return f"rank_{rank:05d}.safetensors"


def random_file(rank: int) -> str:
    """Name of the file of a rank's generators."""
    return f"random_{rank:05d}.pt"


def signs_of(width: int, device: torch.device | str = "cpu") -> Tensor:
    """The signs on which tokens of `width` numbers are projected: fp64 [width, SIGNS] of +1 and -1, the same everywhere."""
    drawn = np.random.Generator(np.random.PCG64(width)).integers(0, 2, (width, SIGNS))
    return torch.from_numpy(drawn * 2 - 1).double().to(device)


@torch.no_grad()
def digest(x: Tensor, signs: Tensor) -> Tensor:
    """The trace of tokens: x [..., width] -> [..., SIGNS + 1] fp32, projections and norm. signs: of `signs_of(width)`."""
    wide = x.detach().double()
    return torch.cat([wide @ signs, wide.norm(dim=-1, keepdim=True)], dim=-1).float()


def pack(chosen: Tensor) -> Tensor:
    """Choices as bits: bool [..., E] -> uint8 [..., ceil(E / 8)]."""
    return torch.from_numpy(np.packbits(chosen.bool().cpu().numpy(), axis=-1))


def tensors_of_rank(samples: Tensor, positions: Iterable[Tensor], by_token: Mapping[str, Sequence[Tensor]],
                    others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a rank writes.

    samples: places in the global batch, int64 [microbatches, B]. positions: where in the sequence its rows lie, one tensor for every
    number of rows that it may hold. by_token: name -> [rows, B, K] of every microbatch. others: written as they are.
    """
    found = {SAMPLES: samples.contiguous(), **{f"{_POSITIONS}{len(each)}": each.clone() for each in positions}}
    found |= {name: torch.stack([each.cpu() for each in passes]) for name, passes in by_token.items()}
    return found | {name: tensor.cpu().contiguous() for name, tensor in others.items()}


def write_rank(folder: Path, rank: int, tensors: Mapping[str, Tensor], generators: Mapping[str, Any]) -> None:
    """Write the two files of a rank. Raises: OSError, ValueError."""
    try:
        save_file(dict(tensors), folder / rank_file(rank))
    except SafetensorError as error:
        raise ValueError(f"cannot write {folder / rank_file(rank)}: {error}") from error
    torch.save(dict(generators), folder / random_file(rank))


def unfinished(folder: Path) -> Path:
    """Where a record is written before it is whole; empty and new. Raises: OSError."""
    beside = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def seal(beside: Path, folder: Path, head: Mapping[str, Any], files: Iterable[str]) -> int:
    """Complete the record in `beside`, whose files are written, and give it its name; an older one of that name goes.

    Returns: its size in bytes. Raises: OSError.
    """
    table = {name: {"bytes": (beside / name).stat().st_size, "blake2b": _hash(beside / name)} for name in files}
    (beside / HEAD).write_text(head_text({"format": FORMAT, **head, "files": table}), encoding="utf-8")
    for path in beside.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    older = folder.with_name(f"{folder.name}.older")
    shutil.rmtree(older, ignore_errors=True)
    if folder.exists():
        folder.rename(older)
    beside.rename(folder)
    shutil.rmtree(older, ignore_errors=True)
    return sum(entry["bytes"] for entry in table.values())


def head_text(head: Mapping[str, Any]) -> str:
    """The file of a head, which ends with a hash of the rest."""
    rest = {name: value for name, value in head.items() if name != _OWN_HASH}
    return json.dumps({**rest, _OWN_HASH: _hash_of_head(rest)}, indent=1)


def _hash_of_head(head: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(head).encode(), digest_size=16).hexdigest()


def _hash(path: Path) -> str:
    found = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while data := file.read(_CHUNK):
            found.update(data)
    return found.hexdigest()


@dataclass(frozen=True)
class Record:
    """A record that has been found whole. Tensors are read when they are asked for."""

    folder: Path
    head: Mapping[str, Any]

    @staticmethod
    def open(folder: Path | str) -> Record:
        """Look at a record. Raises: ValueError that names the folder or the file with which something is wrong."""
        folder = Path(folder)
        path = folder / HEAD
        if not folder.is_dir():
            raise ValueError(f"{folder}: there is no such folder")
        try:
            head = json.loads(regular_file(path).read_text(encoding="utf-8"))
            own = head.pop(_OWN_HASH, None)
            files = {str(name): (int(entry["bytes"]), str(entry["blake2b"])) for name, entry in head["files"].items()}
        except FileNotFoundError:
            raise ValueError(f"{path}: there is no such file; {folder} is no record of --record-step, or one that was not finished") from None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path}: this is not the head of a record ({type(error).__name__}: {error})") from error
        if head.get("format") != FORMAT:
            raise ValueError(f"{path}: format {head.get('format')}, this version reads {FORMAT}")
        if own != _hash_of_head(head):
            raise ValueError(f"{path}: damaged (its text is not the one written)")
        for name, (size, digest_of_file) in files.items():
            if Path(name).name != name:
                raise ValueError(f"{path}: it names the file {name!r}, outside its folder")
            try:
                found = (folder / name).stat().st_size
                whole = found == size and _hash(folder / name) == digest_of_file
            except OSError as error:
                raise ValueError(f"{folder / name}: cannot be read ({error.strerror})") from error
            if not whole:
                raise ValueError(f"{folder / name}: damaged ({found} of {size} bytes" + (", which are not those written)" if found == size else ")"))
        return Record(folder, head)

    @property
    def weights(self) -> Path:
        """The file of the weights."""
        return self.folder / WEIGHTS

    def ranks(self) -> list[int]:
        """The ranks that wrote it."""
        return list(range(self.head["world_size"]))

    def names(self, prefix: str) -> list[str]:
        """Names of what the ranks wrote under a prefix, without it, each once."""
        found = dict.fromkeys(name for rank in self.ranks() for name in self._keys(rank) if name.startswith(prefix))
        return [name.removeprefix(prefix) for name in found]

    def joined(self, name: str) -> Tensor:
        """All tokens of what ranks wrote by token, in the order of the global batch: [samples, sequence, K].

        Raises: ValueError when tokens are missing, or there more than once.
        """
        whole: Tensor | None = None
        seen = torch.zeros(self.head["samples"], self.head["seq_length"], dtype=torch.int64)
        for rank in self.ranks():
            with safe_open(self.folder / rank_file(rank), "pt") as file:
                if name not in file.keys():  # noqa: SIM118 - it is no mapping
                    continue
                mine_MSBK, samples_MB = file.get_tensor(name), file.get_tensor(SAMPLES)
                positions_S = file.get_tensor(f"{_POSITIONS}{mine_MSBK.shape[1]}")
            if whole is None:
                whole = torch.zeros(*seen.shape, mine_MSBK.shape[-1], dtype=mine_MSBK.dtype)
            rows, columns = samples_MB[:, None, :], positions_S[None, :, None]
            whole[rows, columns] = mine_MSBK
            seen.index_put_((rows, columns), torch.ones(1, dtype=torch.int64), accumulate=True)
        if whole is None or not bool((seen == 1).all()):
            raise ValueError(f"{self.folder}: {name} is there {'for no token' if whole is None else 'not exactly once for every token'}")
        return whole

    def batch(self) -> dict[str, Tensor]:
        """The iteration's batches by field, [samples, sequence] in the order of the global batch."""
        found: dict[str, Tensor] = {}
        for rank in self.ranks():
            with safe_open(self.folder / rank_file(rank), "pt") as file:
                samples = file.get_tensor(SAMPLES).flatten()
                for key in (key for key in file.keys() if key.startswith(BATCH)):  # noqa: SIM118
                    mine = file.get_tensor(key).flatten(0, 1)
                    field = found.setdefault(key.removeprefix(BATCH), torch.zeros(self.head["samples"], *mine.shape[1:], dtype=mine.dtype))
                    field[samples] = mine
        return found

    def scaling(self) -> dict[str, Tensor]:
        """States of delayed scaling by name, the same on all ranks that have them."""
        found: dict[str, Tensor] = {}
        for rank in self.ranks():
            with safe_open(self.folder / rank_file(rank), "pt") as file:
                found |= {key.removeprefix(SCALING): file.get_tensor(key) for key in file.keys() if key.startswith(SCALING)}  # noqa: SIM118
        return found

    def generators(self, rank: int) -> dict[str, Any]:
        """The state of a rank's generators at the beginning. Raises: ValueError that names the file."""
        path = self.folder / random_file(rank)
        try:
            found = torch.load(regular_file(path), weights_only=True)
        except _LOAD_ERRORS as error:
            raise ValueError(f"{path}: this is no file of random states ({type(error).__name__}: {error})") from error
        if not isinstance(found, dict):
            raise ValueError(f"{path}: this is no file of random states (it holds a {type(found).__name__})")
        return found

    def _keys(self, rank: int) -> list[str]:
        with safe_open(self.folder / rank_file(rank), "pt") as file:
            return list(file.keys())

"""The safetensors files of a Hugging Face model folder, read tensor by tensor.

Weights in fp8, fp4 and int4 (encodings.py) are read as bf16:

* block fp8 as DeepSeek-V3 is published: `NAME` and `NAME_scale_inv`;
* MXFP4 experts as gpt-oss is published: `NAME_blocks` and `NAME_scales`, read as a stack NAME of experts, each
  transposed, as in the model's bf16 form;
* MXFP4 and NVFP4 as compressed-tensors writes them: `weight_packed`, `weight_scale`, and for NVFP4
  `weight_global_scale`, to divide by;
* int4 as compressed-tensors writes it (Kimi-K2-Thinking and K2.5): `weight_packed` in int32, `weight_scale`,
  `weight_shape`;
* MXFP4 and NVFP4 as ModelOpt and Quark write them: `weight` in bytes, `weight_scale`, and for NVFP4 `weight_scale_2`,
  to multiply by.

Scales of activations (`input_scale`, `input_global_scale`) are left out.
"""

# A file is eight bytes with the length of a table, the table as JSON (name, dtype, shape, offsets), then the elements.
# They are read into new memory: the pages of mapped files, as the safetensors library returns them, count as memory of
# the process until they are closed, and a folder may be larger than any host. The table is checked against the file's
# size before the first element is read, so a truncated file is found at once, with the tensor that it lacks.

import json
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arguments.regular_file import regular_file
from moe_trainer.checkpoint.errors import CheckpointError, DamagedError
from moe_trainer.checkpoint.folder_format import HF_CONFIG as CONFIG
from moe_trainer.checkpoint.folder_format import HF_INDEX as INDEX
from moe_trainer.checkpoint.hf.encodings import MXFP4, NVFP4, decode_block_fp8, decode_fp4, decode_int4
from moe_trainer.checkpoint.safetensors_format import DTYPES

SINGLE = "model.safetensors"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
GENERATION_CONFIG = "generation_config.json"
SCALE = "_scale_inv"
BLOCKS, BLOCK_SCALES = "_blocks", "_scales"
WEIGHT, PACKED, GROUP_SCALE = ".weight", ".weight_packed", ".weight_scale"
DIVISOR, MULTIPLIER = ".weight_global_scale", ".weight_scale_2"
STORED_SHAPE, ZERO_POINT = ".weight_shape", ".weight_zero_point"
PARTS = (GROUP_SCALE, DIVISOR, MULTIPLIER, STORED_SHAPE, ZERO_POINT, ".input_scale", ".input_global_scale")
"""What a module of a weight in four bits has next to its values."""
_FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_MAX_TABLE_BYTES = 100 * 2**20  # the limit of the format


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in one file.

    Attributes:
        start: where its elements begin, in bytes from the beginning of the file.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def lacks_files(folder: Path) -> bool:
    """Return whether the config.json of a folder is of a Hugging Face model, and files of its weights are missing."""
    if "model_type" not in read_json(folder / CONFIG):
        return False
    if not (folder / INDEX).is_file():
        return not any(folder.glob("*.safetensors"))
    return not all((folder / file).is_file() for file in set(listed_tensors(folder).values()))


def listed_tensors(folder: Path) -> dict[str, str]:
    """Return the files of the tensors that the index lists, none without an index.

    Raises:
        DamagedError: if it is no table.
    """
    if not (folder / INDEX).is_file():
        return {}
    listed = read_json(folder / INDEX).get("weight_map")
    if not (isinstance(listed, dict) and listed and all(isinstance(name, str) for name in listed.values())):
        raise DamagedError(f"{folder / INDEX}: weight_map must be a table of tensors and files")
    return listed


def _untagged(table: dict[str, Any]) -> Any:
    """Return the number of {"__float__": "Infinity"}, as transformers writes numbers that JSON lacks."""
    return float(table["__float__"]) if table.keys() == {"__float__"} else table


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: naming the file.
    """
    try:
        value = json.loads(regular_file(path).read_text(encoding="utf-8"), object_hook=_untagged)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


class SafetensorsFolder:
    """All tensors of a folder; `names` has the weights only, since `read` applies their scales.

    Attributes:
        scales: names of the scales of weights in block fp8.
        unlisted: names of further files that the index does not list.
    """

    def __init__(self, folder: Path, rename: Callable[[str], str | None] | None = None):
        """Read the tables of all files. `rename` gives tensors other names; None leaves one out.

        Raises:
            DamagedError: if a file is missing, truncated or contradicts the index; the message names a tensor.
        """
        self.folder = folder
        self._tensors: dict[str, StoredTensor] = {}
        index = listed_tensors(folder) or None
        present = {path.name for path in folder.glob("*.safetensors")}
        listed = present if index is None else set(index.values())
        self.unlisted = sorted(present - listed)
        for name in sorted(listed):
            self._read_table(folder / name, index)
        for tensor, file in (index or {}).items():
            if tensor not in self._tensors or self._tensors[tensor].path.name != file:
                raise DamagedError(f"{tensor}: {folder / INDEX} lists it in {file}, which does not contain it")
        unlisted = sorted(self._tensors.keys() - index.keys()) if index is not None else []
        if unlisted:
            more = f" and {len(unlisted) - 1} more" if len(unlisted) > 1 else ""
            raise DamagedError(
                f"{unlisted[0]}{more}: in {self._tensors[unlisted[0]].path}, but not listed in {folder / INDEX}. "
                "Add them to weight_map, or remove them from the file"
            )
        if rename is not None:
            renamed = ((rename(name), stored) for name, stored in self._tensors.items())
            self._tensors = {name: stored for name, stored in renamed if name is not None}
        self.scales = {
            name
            for name in self._tensors
            if name.endswith(SCALE)
            and (of := self._tensors.get(name.removesuffix(SCALE))) is not None
            and of.dtype in _FP8_DTYPES
        }
        self._packed = {
            name.removesuffix(BLOCKS)
            for name, stored in self._tensors.items()
            if name.endswith(BLOCKS) and stored.dtype == torch.uint8 and len(stored.shape) == 4
        }
        self._four_bits = {
            name.removesuffix(ending) + WEIGHT: stored
            for ending, dtypes in ((PACKED, (torch.uint8, torch.int32)), (WEIGHT, (torch.uint8,)))
            for name, stored in self._tensors.items()
            if name.endswith(ending) and stored.dtype in dtypes and len(stored.shape) == 2
        }

    def _read_table(self, path: Path, index: dict[str, str] | None) -> None:
        inside = next((tensor for tensor, file in (index or {}).items() if file == path.name), None)
        named = f" ({inside} is in it)" if inside else ""
        if path.name != os.path.basename(path.name) or path.parent != self.folder:
            raise DamagedError(f"{self.folder / INDEX} names the file {path}, outside its folder")
        try:
            size = path.stat().st_size
            with open(regular_file(path), "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(size - 8, _MAX_TABLE_BYTES):
                    raise ValueError(f"a table of {length} bytes in a file of {size}")
                table = json.loads(file.read(length))
                if not isinstance(table, dict):
                    raise ValueError("its table is not a JSON object")
        except FileNotFoundError as error:
            raise DamagedError(f"{path} is missing{named}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise DamagedError(f"{path} is damaged{named}: {error}") from error
        base, stored_tensors = 8 + length, []
        for name, entry in table.items():
            if name != "__metadata__":
                stored_tensors.append((self._tensor(path, name, entry, base, size), name))
                self._add(name, stored_tensors[-1][0])
        end, before = base, "the table"  # the format has neither gaps nor overlaps
        for stored, name in sorted(stored_tensors, key=lambda pair: (pair[0].start, pair[0].num_bytes)):
            if stored.start != end:
                raise DamagedError(
                    f"{path} is damaged: {name} begins at byte {stored.start}, and {before} ends at {end}"
                )
            end, before = stored.start + stored.num_bytes, name

    def _tensor(self, path: Path, name: str, entry: Any, base: int, size: int) -> StoredTensor:
        try:
            dtype, shape, (begin, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
                raise ValueError("integers are needed")
            stored = StoredTensor(path, dtype, shape, base + begin)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{path} is damaged: {name} is described by {entry!r}") from error
        if end - begin != stored.num_bytes:
            raise DamagedError(
                f"{path} is damaged: {name} has {end - begin} bytes, and {list(shape)} {entry['dtype']} needs "
                f"{stored.num_bytes}"
            )
        if stored.start + stored.num_bytes > size:
            raise DamagedError(
                f"{path} is damaged: {name} ends at byte {stored.start + stored.num_bytes}, and the file has "
                f"{size}: it is truncated"
            )
        return stored

    def _add(self, name: str, stored: StoredTensor) -> None:
        if name in self._tensors:
            raise DamagedError(f"{name} is in {self._tensors[name].path} and in {stored.path}")
        self._tensors[name] = stored

    @property
    def names(self) -> list[str]:
        parts = {name + end for name in self._packed for end in (BLOCKS, BLOCK_SCALES)}
        parts |= {name.removesuffix(WEIGHT) + end for name in self._four_bits for end in (WEIGHT, PACKED, *PARTS)}
        plain = [name for name in self._tensors if name not in self.scales and name not in parts]
        return plain + sorted(self._packed) + list(self._four_bits)

    @property
    def encodings(self) -> dict[str, int]:
        """Number of the tensors in each encoding, without plain ones."""
        counts = Counter(map(self._four_bit_encoding, self._four_bits))
        counts += Counter({"block fp8": len(self.scales), "MXFP4": len(self._packed)})
        return {name: counts[name] for name in ("block fp8", "MXFP4", "NVFP4", "int4") if counts[name]}

    def _four_bit_encoding(self, name: str) -> str:
        if self._four_bits[name].dtype == torch.int32:
            return "int4"
        scales = self._tensors.get(name.removesuffix(WEIGHT) + GROUP_SCALE)
        return "NVFP4" if scales is not None and scales.dtype in _FP8_DTYPES else "MXFP4"

    @property
    def files(self) -> list[Path]:
        return sorted({stored.path for stored in self._tensors.values()})

    def __contains__(self, name: str) -> bool:
        return name in self._packed or name in self._four_bits or (name in self._tensors and name not in self.scales)

    def tensor(self, name: str) -> StoredTensor:
        """Return where a weight is, or where its values are."""
        return self._four_bits.get(name) or self._tensors[name + BLOCKS if name in self._packed else name]

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self.tensor(name).shape
        if name in self._four_bits:
            return shape[0], 2 * self._four_bits[name].dtype.itemsize * shape[1]
        if name not in self._packed:
            return shape
        experts, rows, groups, size = shape
        return experts, groups * size * 2, rows

    def dtype(self, name: str) -> torch.dtype:
        """Return the type that `read` returns: bf16 for fp8, fp4 and int4 weights."""
        if name in self._packed or name in self._four_bits:
            return torch.bfloat16
        dtype = self._tensors[name].dtype
        return torch.bfloat16 if dtype in _FP8_DTYPES else dtype

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return a tensor, or one slice along its first dimension.

        Raises:
            DamagedError: if the file ends early or values are not finite.
        """
        if name in self._packed:
            return self._unpacked(name, index)
        if name in self._four_bits:
            return self._int4(name) if self._four_bits[name].dtype == torch.int32 else self._grouped(name)
        stored = self._tensors[name]
        value = read_values(stored, index)
        if stored.dtype in _FP8_DTYPES:
            value = self._scaled(name, value, index)
        sum_dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
        # the sum is a cheap test; it may overflow although all values are finite
        if (
            value.is_floating_point()
            and not math.isfinite(value.sum(dtype=sum_dtype))
            and not torch.isfinite(value).all()
        ):
            raise DamagedError(f"{stored.path} is damaged: {name} holds values that are not finite")
        return value

    def _unpacked(self, name: str, index: int | None) -> Tensor:
        blocks, scales = self.tensor(name), self._tensors.get(name + BLOCK_SCALES)
        if scales is None:
            raise CheckpointError(f"{name + BLOCKS} is stored in fp4, and its scales {name + BLOCK_SCALES} are missing")
        if scales.shape != blocks.shape[:3] or scales.dtype != torch.uint8:
            raise CheckpointError(
                f"{name + BLOCK_SCALES} has the shape {list(scales.shape)}, and {list(blocks.shape[:3])} in "
                "uint8 is needed"
            )
        experts = range(blocks.shape[0]) if index is None else (index,)
        values = [decode_fp4(read_values(blocks, each).flatten(1), read_values(scales, each)).t() for each in experts]
        if not all(torch.isfinite(value).all() for value in values):
            raise DamagedError(f"{scales.path} is damaged: {name + BLOCK_SCALES} yields values that are not finite")
        return torch.stack(values) if index is None else values[0]

    def _grouped(self, name: str) -> Tensor:
        stored, module = self._four_bits[name], name.removesuffix(WEIGHT)
        scales = self._tensors.get(module + GROUP_SCALE)
        if scales is None:
            raise CheckpointError(f"{name} is stored in fp4, and its scales {module + GROUP_SCALE} are missing")
        if scales.dtype not in (torch.uint8, torch.float8_e4m3fn):
            raise CheckpointError(
                f"{module + GROUP_SCALE} is stored as {scales.dtype}; E4M3 (NVFP4) or uint8 (MXFP4) is needed"
            )
        rows, columns = self.shape(name)
        size = (MXFP4 if scales.dtype == torch.uint8 else NVFP4).cols
        if scales.shape != (rows, columns // size) or columns % size:
            raise CheckpointError(
                f"{module + GROUP_SCALE} has the shape {list(scales.shape)}, and one scale for {size} of the "
                f"{columns} columns of each of {rows} rows is needed"
            )
        factor = ending = None
        if scales.dtype != torch.uint8:
            ending = next((end for end in (DIVISOR, MULTIPLIER) if module + end in self._tensors), None)
            if ending is None:
                raise CheckpointError(
                    f"{name} is stored in NVFP4, and its scale {module + DIVISOR} or {module + MULTIPLIER} is missing"
                )
            factor = read_values(self._tensors[module + ending]).float().flatten()
            if len(factor) != 1:
                raise CheckpointError(f"{module + ending} has {len(factor)} elements, and one is needed")
            factor = 1 / factor if ending == DIVISOR else factor
        for end in (DIVISOR, MULTIPLIER, ZERO_POINT):
            if end != ending and module + end in self._tensors:
                raise CheckpointError(f"{module + end}: {name} is stored in fp4 and read without it")
        value = decode_fp4(read_values(stored), read_values(scales), factor)
        if not torch.isfinite(value).all():
            raise DamagedError(f"{scales.path} is damaged: the scales of {name} yield values that are not finite")
        return value

    def _int4(self, name: str) -> Tensor:
        stored, module = self._four_bits[name], name.removesuffix(WEIGHT)
        if module + ZERO_POINT in self._tensors:
            raise CheckpointError(f"{name} is stored with zero points ({module + ZERO_POINT}); int4 without is read")
        for ending in (GROUP_SCALE, STORED_SHAPE):
            if module + ending not in self._tensors:
                raise CheckpointError(f"{name} is stored in int4, and {module + ending} is missing")
        shape, scales = self.shape(name), self._tensors[module + GROUP_SCALE]
        original = tuple(read_values(self._tensors[module + STORED_SHAPE]).flatten().tolist())
        if original != shape:
            raise CheckpointError(
                f"{module + STORED_SHAPE} is {list(original)}, and {list(stored.shape)} packed integers hold "
                f"{list(shape)} weights of 4 bits; other widths are not read"
            )
        if len(scales.shape) != 2 or scales.shape[0] != shape[0] or not scales.shape[1] or shape[1] % scales.shape[1]:
            raise CheckpointError(
                f"{module + GROUP_SCALE} has the shape {list(scales.shape)}, and equal groups of the {shape[1]} "
                f"columns of each of {shape[0]} rows are needed"
            )
        value = decode_int4(read_values(stored), read_values(scales))
        if not torch.isfinite(value).all():
            raise DamagedError(f"{scales.path} is damaged: the scales of {name} yield values that are not finite")
        return value

    def _scaled(self, name: str, value: Tensor, index: int | None) -> Tensor:
        if name + SCALE not in self._tensors:
            raise CheckpointError(f"{name} is stored in fp8, and its scales {name + SCALE} are missing")
        scales = read_values(self._tensors[name + SCALE], index).float()
        try:
            return decode_block_fp8(value, scales)
        except ValueError as error:
            raise CheckpointError(f"{name + SCALE}: {error}") from error


def read_values(stored: StoredTensor, index: int | None = None) -> Tensor:
    """Read the elements of a tensor, or of one slice, as they are stored."""
    shape, start = stored.shape, stored.start
    if index is not None:
        shape = shape[1:]
        start += index * math.prod(shape) * stored.dtype.itemsize
    raw = torch.empty(math.prod(shape) * stored.dtype.itemsize, dtype=torch.uint8)
    view = memoryview(raw.numpy())  # type: ignore[arg-type]
    with open(stored.path, "rb", buffering=0) as file:
        file.seek(start)
        filled = 0
        while filled < len(view):
            count = file.readinto(view[filled:])
            if not count:
                raise DamagedError(f"{stored.path} is damaged: it ends {len(view) - filled} bytes early")
            filled += count
        if hasattr(os, "posix_fadvise"):  # read once: it must not push other files out of the cache
            os.posix_fadvise(file.fileno(), start, len(view), os.POSIX_FADV_DONTNEED)
    return raw.view(stored.dtype).view(shape)

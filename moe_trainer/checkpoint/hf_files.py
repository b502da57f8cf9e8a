"""The safetensors files of a Hugging Face model folder: what is in them, read tensor by tensor.

A file is eight bytes with the length of a table, the table as JSON (name, dtype, shape, place), then the elements. They are read
here with plain reads into fresh memory: mapped files, as the safetensors library gives them, count as memory of the process page by
page until they are closed, and a folder may be larger than any host. Everything a table says is checked against the file's size
before the first element is read, so a file that was cut off is found at once, with the tensor that it lacks.

Weights in 8 bits with one scale per block (`NAME_scale_inv`, as DeepSeek-V3 is published) are seen as the bf16 weights that they
stand for. So are experts in 4 bits (`NAME_blocks` and `NAME_scales`, as gpt-oss is published): a stack of them has the name NAME there,
and each is transposed, as it is in the model's bf16 form.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from arguments.regular_file import regular_file
from moe_trainer.checkpoint.errors import CheckpointError, DamagedError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SCALE = "_scale_inv"
BLOCKS, BLOCK_SCALES = "_blocks", "_scales"
DTYPES = MappingProxyType({
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool})
NAMES = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1, without its sign
_LONGEST_TABLE = 100 * 2**20  # bytes, the limit of the format
_ALIGNMENT = 8


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in one file. start: of its elements, in bytes from the beginning of the file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def is_folder(folder: Path) -> bool:
    """Whether this looks like a Hugging Face model: a config.json beside safetensors files or their index."""
    return (folder / CONFIG).is_file() and ((folder / INDEX).is_file() or any(folder.glob("*.safetensors")))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises: CheckpointError naming the file.
    """
    try:
        value = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


class Folder:
    """All tensors of a folder. `names` has those that stand for weights: scales are behind them."""

    def __init__(self, folder: Path):
        """Raises: DamagedError when a file is missing, cut off, or contradicts the index; the message names a tensor."""
        self.folder = folder
        self._tensors: dict[str, StoredTensor] = {}
        index = read_json(folder / INDEX).get("weight_map") if (folder / INDEX).is_file() else None
        if (folder / INDEX).is_file() and not (isinstance(index, dict) and index and all(isinstance(name, str) for name in index.values())):
            raise DamagedError(f"{folder / INDEX}: weight_map must be a table of tensors and files")
        files = sorted(set(index.values())) if index is not None else sorted(path.name for path in folder.glob("*.safetensors"))
        for name in files:
            self._read_table(folder / name, index)
        for tensor, file in (index or {}).items():
            if tensor not in self._tensors or self._tensors[tensor].path.name != file:
                raise DamagedError(f"{tensor}: {folder / INDEX} says that it is in {file}, and it is not")
        unlisted = sorted(self._tensors.keys() - index.keys()) if index is not None else []
        if unlisted:
            more = f" and {len(unlisted) - 1} more" if len(unlisted) > 1 else ""
            raise DamagedError(f"{unlisted[0]}{more}: in {self._tensors[unlisted[0]].path}, and {folder / INDEX} does not list them: which of the two is "
                               "right? Add them to weight_map, or take them out of the file")
        self._scales = {name for name in self._tensors if name.endswith(SCALE) and (of := self._tensors.get(name.removesuffix(SCALE))) is not None
                        and of.dtype in _EIGHT_BITS}
        self._packed = {name.removesuffix(BLOCKS) for name, stored in self._tensors.items()
                        if name.endswith(BLOCKS) and stored.dtype == torch.uint8 and len(stored.shape) == 4}

    def _read_table(self, path: Path, index: dict[str, str] | None) -> None:
        inside = next((tensor for tensor, file in (index or {}).items() if file == path.name), None)
        named = f" ({inside} is in it)" if inside else ""
        if path.name != os.path.basename(path.name) or path.parent != self.folder:
            raise DamagedError(f"{self.folder / INDEX} names the file {path}, outside its folder")
        try:
            size = path.stat().st_size
            with open(regular_file(path), "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(size - 8, _LONGEST_TABLE):
                    raise ValueError(f"a table of {length} bytes in a file of {size}")
                table = json.loads(file.read(length))
                if not isinstance(table, dict):
                    raise ValueError("its table is no JSON object")
        except FileNotFoundError as error:
            raise DamagedError(f"{path} is missing{named}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise DamagedError(f"{path} is damaged{named}: {error}") from error
        base, found = 8 + length, []
        for name, entry in table.items():
            if name != "__metadata__":
                found.append((self._tensor(path, name, entry, base, size), name))
                self._add(name, found[-1][0])
        end, before = base, "the table"  # the format knows neither gaps nor bytes of two tensors
        for stored, name in sorted(found, key=lambda pair: (pair[0].start, pair[0].num_bytes)):
            if stored.start != end:
                raise DamagedError(f"{path} is damaged: {name} begins at byte {stored.start}, and {before} ends at {end}")
            end, before = stored.start + stored.num_bytes, name

    def _tensor(self, path: Path, name: str, entry: Any, base: int, size: int) -> StoredTensor:
        try:
            dtype, shape, (begin, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
                raise ValueError("whole numbers are needed")
            stored = StoredTensor(path, dtype, shape, base + begin)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{path} is damaged: {name} is described by {entry!r}") from error
        if end - begin != stored.num_bytes:
            raise DamagedError(f"{path} is damaged: {name} has {end - begin} bytes, and {list(shape)} {entry['dtype']} needs {stored.num_bytes}")
        if stored.start + stored.num_bytes > size:
            raise DamagedError(f"{path} is damaged: {name} ends at byte {stored.start + stored.num_bytes}, and the file has {size}: it was cut off")
        return stored

    def _add(self, name: str, stored: StoredTensor) -> None:
        if name in self._tensors:
            raise DamagedError(f"{name} is in {self._tensors[name].path} and in {stored.path}")
        self._tensors[name] = stored

    @property
    def names(self) -> list[str]:
        parts = {name + end for name in self._packed for end in (BLOCKS, BLOCK_SCALES)}
        return [name for name in self._tensors if name not in self._scales and name not in parts] + sorted(self._packed)

    @property
    def files(self) -> list[Path]:
        return sorted({stored.path for stored in self._tensors.values()})

    def __contains__(self, name: str) -> bool:
        return name in self._packed or (name in self._tensors and name not in self._scales)

    def tensor(self, name: str) -> StoredTensor:
        return self._tensors[name + BLOCKS if name in self._packed else name]

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self.tensor(name).shape
        if name not in self._packed:
            return shape
        experts, rows, groups, size = shape
        return experts, groups * size * 2, rows

    def dtype(self, name: str) -> torch.dtype:
        """What `read` gives: bf16 for weights in 8 or 4 bits."""
        if name in self._packed:
            return torch.bfloat16
        dtype = self._tensors[name].dtype
        return torch.bfloat16 if dtype in _EIGHT_BITS else dtype

    def read(self, name: str, index: int | None = None) -> Tensor:
        """A tensor, or one slice along its first dimension.

        Raises: DamagedError when the file ends early, or the values are not finite.
        """
        if name in self._packed:
            return self._unpacked(name, index)
        stored = self._tensors[name]
        value = read_values(stored, index)
        if stored.dtype in _EIGHT_BITS:
            value = self._scaled(name, value, index)
        if value.is_floating_point() and not math.isfinite(value.sum(dtype=torch.float64 if value.dtype == torch.float64 else torch.float32)):
            if not torch.isfinite(value).all():
                raise DamagedError(f"{stored.path} is damaged: {name} holds numbers that are not finite")
        return value

    def _unpacked(self, name: str, index: int | None) -> Tensor:
        blocks, scales = self.tensor(name), self._tensors.get(name + BLOCK_SCALES)
        if scales is None:
            raise CheckpointError(f"{name + BLOCKS} is stored in 4 bits, and {name + BLOCK_SCALES}, its scales, are missing")
        if scales.shape != blocks.shape[:3] or scales.dtype != torch.uint8:
            raise CheckpointError(f"{name + BLOCK_SCALES} has the shape {list(scales.shape)}, and {list(blocks.shape[:3])} in 8 bits is needed")
        experts = range(blocks.shape[0]) if index is None else (index,)
        values = [dequantize_four_bits(read_values(blocks, each), read_values(scales, each)).t() for each in experts]
        if not all(torch.isfinite(value).all() for value in values):
            raise DamagedError(f"{scales.path} is damaged: {name + BLOCK_SCALES} makes numbers that are not finite")
        return torch.stack(values) if index is None else values[0]

    def _scaled(self, name: str, value: Tensor, index: int | None) -> Tensor:
        if name + SCALE not in self._tensors:
            raise CheckpointError(f"{name} is stored in 8 bits, and {name + SCALE}, its scales, are missing")
        scales = read_values(self._tensors[name + SCALE], index).float()
        try:
            return dequantize(value, scales)
        except ValueError as error:
            raise CheckpointError(f"{name + SCALE}: {error}") from error


def dequantize(value: Tensor, scales: Tensor, block: int = 128) -> Tensor:
    """value [M, N] in 8 bits times its scale per block [ceil(M / block), ceil(N / block)] -> bf16 [M, N].

    Raises: ValueError when the scales are of another shape.
    """
    needed = tuple(-(-size // block) for size in value.shape)
    if value.dim() != 2 or tuple(scales.shape) != needed:
        raise ValueError(f"{list(scales.shape)} scales, and {list(needed)} are needed for a weight {list(value.shape)} in blocks of {block}")
    out = torch.empty(value.shape, dtype=torch.bfloat16)
    for row in range(needed[0]):  # one row of blocks at a time: fp32 values of all would be four times the source
        rows = slice(row * block, (row + 1) * block)
        wide = scales[row].repeat_interleave(block)[:value.shape[1]]
        out[rows] = (value[rows].float() * wide).to(torch.bfloat16)
    return out


def dequantize_four_bits(blocks: Tensor, scales: Tensor) -> Tensor:
    """Two values per byte, the first in the lower half, times 2^(scale - 127) per block of 16 bytes -> bf16 [M, N].

    Shapes: blocks [M, N / 32, 16] and scales [M, N / 32], bytes. Source: OCP Microscaling Formats 1.0 (MXFP4).
    """
    table = torch.tensor(_FOUR_BITS + tuple(-value for value in _FOUR_BITS))
    out = torch.empty(*blocks.shape, 2, dtype=torch.bfloat16)
    for rows in torch.arange(len(blocks)).split(1024):  # fp32 values of all would be eight times the source
        codes = torch.stack([blocks[rows] & 15, blocks[rows] >> 4], -1)
        powers = torch.where(scales[rows] == 255, torch.nan, torch.ldexp(torch.ones(scales[rows].shape), scales[rows].int() - 127))
        out[rows] = (table[codes.int()] * powers[..., None, None]).to(torch.bfloat16)
    return out.flatten(1)


def read_values(stored: StoredTensor, index: int | None = None) -> Tensor:
    """The elements as they are stored."""
    shape, start = stored.shape, stored.start
    if index is not None:
        shape = shape[1:]
        start += index * math.prod(shape) * stored.dtype.itemsize
    raw = torch.empty(math.prod(shape) * stored.dtype.itemsize, dtype=torch.uint8)
    view = memoryview(raw.numpy())
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


def table_of(entries: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """The head of a safetensors file whose tensors lie one behind the other, in this order."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in entries:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def bytes_of(value: Tensor) -> memoryview:
    """The elements of a tensor, to be written."""
    return memoryview(value.detach().contiguous().view(-1).view(torch.uint8).numpy())

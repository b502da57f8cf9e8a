"""The safetensors format as it is written: names of data types, the header of a file, the elements of a tensor."""

import json
import math
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

DTYPES = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
_NAMES = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
_ALIGNMENT = 8


def safetensors_header(entries: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """Return the header of a safetensors file of these tensors (name, dtype, shape) in this order, without gaps."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in entries:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(value: Tensor) -> memoryview:
    """Return the bytes of a tensor's elements, on the host."""
    return memoryview(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]

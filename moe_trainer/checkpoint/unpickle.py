"""Read pickles written by others without running what they ask for.

Megatron's common state is a pickle with its own classes in it, and `.metadata` is one too. A pickle may call any
importable function, so we look names up in a list: known harmless constructors act, every other name becomes an inert
stand-in that keeps the arguments it was called with. `plain` then reduces an object to plain types.
"""

import argparse
import enum
import io
import pickle
import struct
import zipfile
from typing import IO, Any

import torch

_SAFE = frozenset({
    ("argparse", "Namespace"), ("collections", "OrderedDict"), ("collections", "defaultdict"), ("_codecs", "encode"),
    ("builtins", "set"), ("builtins", "frozenset"), ("builtins", "slice"), ("builtins", "complex"),
    ("builtins", "bytearray"), ("builtins", "range"), ("builtins", "dict"), ("builtins", "list"), ("builtins", "tuple"),
    ("datetime", "datetime"), ("datetime", "timedelta"), ("signal", "Signals"),
    ("pathlib", "Path"), ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib._local", "PosixPath"),
    ("numpy", "ndarray"), ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"), ("numpy._core.multiarray", "scalar"),
    ("torch", "Size"), ("torch", "device"), ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter"),
    ("torch.serialization", "_get_layout"),
})
_SAFE_MODULES = frozenset({"torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner",
                           "torch.distributed.checkpoint.filesystem"})
_SAFE_CLASSES = frozenset({
    "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
    "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING", "SavePlan", "WriteItem", "WriteItemType",
    "TensorWriteData", "BytesIOWriteData", "_StorageInfo", "_StoragePrefix",
})
_SMALL_PICKLE_BYTES = 1 << 18

# what decoding damaged bytes may raise; which of them depends on the byte
DECODE_ERRORS = (OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, EOFError, ArithmeticError,
                 AssertionError, ImportError, MemoryError, struct.error, pickle.UnpicklingError, zipfile.BadZipFile)


class Foreign:
    """Stands for an object of a class that we do not know; never runs its code."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """A stand-in for a dict subclass: its items are dropped."""

    def append(self, value: Any) -> None:
        """A stand-in for a list subclass: its items are dropped."""

    def extend(self, values: Any) -> None:
        """A stand-in for a list subclass: its items are dropped."""


class _SafeNames:
    """Resolves names by the list above."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _SAFE or (module in _SAFE_MODULES and name in _SAFE_CLASSES):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "torch" and name.endswith("Storage"):
            return super().find_class(module, name)
        return type(name, (Foreign,), {"__module__": module})


class SafeUnpickler(_SafeNames, pickle.Unpickler):
    """The fast unpickler."""


class _CarefulUnpickler(_SafeNames, pickle._Unpickler):
    """The unpickler in Python: slow, but a damaged byte cannot make it allocate gigabytes as the fast one may."""


def load_pickle(content: bytes) -> Any:
    """Decode a plain pickle.

    Raises: one of DECODE_ERRORS when it is damaged.
    """
    kind = _CarefulUnpickler if len(content) < _SMALL_PICKLE_BYTES else SafeUnpickler
    return kind(io.BytesIO(content)).load()


class PickleModule:
    """What torch.load wants as `pickle_module`."""

    __name__ = "safe pickle"
    Unpickler = SafeUnpickler
    UnpicklingError = pickle.UnpicklingError

    @staticmethod
    def load(file: IO[bytes], **kwargs: Any) -> Any:
        return SafeUnpickler(file, **kwargs).load()


def load_object(content: bytes) -> Any:
    """Decode what torch.save wrote.

    Raises: one of DECODE_ERRORS when it is damaged.
    """
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False, pickle_module=PickleModule)


def plain(value: Any) -> Any:
    """Reduce to plain types: dtypes become their names, enum members and stand-ins their value."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.Tensor)):
        return value
    if isinstance(value, (argparse.Namespace, dict)):
        items = vars(value) if isinstance(value, argparse.Namespace) else value
        return {key: plain(item) for key, item in items.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, (list, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, Foreign):
        return plain(value.args[0]) if len(value.args) == 1 else None
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value)

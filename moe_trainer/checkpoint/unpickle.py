"""Read untrusted pickles without running their code.

Megatron's common state is a pickle with its own classes in it, and `.metadata` is one too. A pickle may call any
importable function, so names are looked up in a table: known harmless constructors act, every other name becomes an
inert placeholder that keeps the arguments it was called with. Nothing is imported for a pickle. `to_builtin` then
reduces an object to plain types.

A pickle may also set attributes of everything it has a name for. So placeholders and constructors are created for each
pickle, or have no attributes, and the torch classes that are used directly (`_INDEX_CLASSES`) are compared afterwards.
"""

import argparse
import collections
import datetime
import enum
import io
import itertools
import pathlib
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from types import MappingProxyType
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint import filesystem, metadata

_SMALL_PICKLE_BYTES = 1 << 18
_MAX_VALUES = 1 << 18
_MAX_DEPTH = 100

# what decoding damaged bytes may raise; which of them depends on the byte
DECODE_ERRORS = (
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    EOFError,
    ArithmeticError,
    AssertionError,
    ImportError,
    MemoryError,
    struct.error,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)


class UnknownObject:
    """Placeholder for an object of an unknown class, whose code never runs."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Drop an item of a dict subclass."""

    def append(self, value: Any) -> None:
        """Drop an item of a list subclass."""

    def extend(self, values: Any) -> None:
        """Drop the items of a list subclass."""


class _Namespace(argparse.Namespace):
    """A Namespace whose state can only be a dict of names."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({str(name): value for name, value in dict(state).items()})


class StorageType:
    """Placeholder for a class of storages, which determines the dtype."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a class of storages has no state")


@dataclass(frozen=True)
class StoredElements:
    """A storage that a pickle refers to, with its dtype."""

    storage: torch.UntypedStorage
    dtype: torch.dtype


def _tensor(
    elements: StoredElements, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...], *others: Any
) -> torch.Tensor:
    """Return the tensor over part of a storage.

    Raises:
        ValueError: if it would exceed the storage.
    """
    numbers = (offset, *sizes, *strides)
    if (
        not isinstance(elements, StoredElements)
        or len(sizes) != len(strides)
        or not all(type(one) is int and one >= 0 for one in numbers)
    ):
        raise pickle.UnpicklingError("a tensor is described by something else than a storage and whole numbers")
    end = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides)) + 1 if all(sizes) else 0
    if end * elements.dtype.itemsize > elements.storage.nbytes():
        raise pickle.UnpicklingError(f"a tensor of {list(sizes)} is over {elements.storage.nbytes()} bytes")
    return torch.empty(0, dtype=elements.dtype).set_(elements.storage, offset, tuple(sizes), tuple(strides))


def _typed_tensor(
    elements: StoredElements,
    offset: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    gradient: bool,
    hooks: Any,
    dtype: torch.dtype,
    *others: Any,
) -> torch.Tensor:
    """As `_tensor`, for a dtype without a storage class."""
    if not isinstance(elements, StoredElements) or not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError("a tensor is described by something else than a storage and a type")
    return _tensor(StoredElements(elements.storage, dtype), offset, sizes, strides)


def _parameter(data: torch.Tensor, *others: Any) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        raise pickle.UnpicklingError("a parameter is no tensor")
    return data


def _attributed_tensor(build: Callable[..., Any], kind: Any, args: tuple[Any, ...], attributes: Any) -> torch.Tensor:
    """Return a tensor without the attributes that it was saved with, as Megatron-LM's main parameters have."""
    return _parameter(build(*args))


def _encode(text: str, encoding: str) -> bytes:
    """Return bytes as pickles of old protocols store them."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"bytes are stored as {encoding!r}")
    return text.encode("latin1")


class _NumpyType:
    """Placeholder for numpy.dtype during unpickling: numbers only, so that no element is an address."""

    def __init__(self, name: str, *flags: Any):
        self.type = numpy.dtype(name) if isinstance(name, str) and name[:1] in "biufc?" and len(name) < 12 else None

    def __setstate__(self, state: tuple) -> None:
        if self.type is not None and state[1] in ("<", ">"):
            self.type = self.type.newbyteorder(state[1])

    def checked(self) -> numpy.dtype:
        if self.type is None or self.type.kind not in "biufc":
            raise pickle.UnpicklingError("an array of numpy holds something else than numbers")
        return self.type


class _NumpyArray(numpy.ndarray):
    """A numpy array whose state is checked before numpy gets it."""

    def __new__(cls, *args: Any) -> "_NumpyArray":
        return super().__new__(cls, (0,), numpy.uint8)

    def __setstate__(self, state: tuple) -> None:
        version, shape, kind, in_columns, content = state
        raw = content if isinstance(content, bytes) else content.encode("latin1")
        super().__setstate__((int(version), shape, kind.checked(), bool(in_columns), raw))  # type: ignore[arg-type]


def _numpy_scalar(kind: _NumpyType, content: bytes | str) -> Any:
    return numpy.frombuffer(content if isinstance(content, bytes) else content.encode("latin1"), kind.checked())[0]


def _bytes(*args: Any) -> bytes:
    return bytes(args[0]) if args and isinstance(args[0], (bytes, list, tuple)) else _encode(*args) if args else b""


def _enum_member(kind: Any, name: Any) -> Any:
    """Return a member of an enum by name, as Python 3.11.0 to 3.11.3 pickle it; no other attribute of anything."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    return UnknownObject(name)


def _layout(name: str) -> torch.layout:
    value = vars(torch).get(str(name).removeprefix("torch."))
    if not isinstance(value, torch.layout):
        raise pickle.UnpicklingError(f"torch has no layout {name!r}")
    return value


# types whose attributes cannot be set, and classes with a __setstate__, which takes the place of setting attributes
_TYPES = MappingProxyType(
    {
        (kind.__module__, kind.__name__): kind
        for kind in (
            collections.OrderedDict,
            collections.defaultdict,
            set,
            frozenset,
            slice,
            complex,
            dict,
            list,
            tuple,
            datetime.datetime,
            datetime.timedelta,
            torch.Size,
            torch.device,
        )
    }
)
_CLASSES = MappingProxyType(
    {("argparse", "Namespace"): _Namespace, ("numpy", "dtype"): _NumpyType, ("numpy", "ndarray"): _NumpyArray}
)
_FUNCTIONS: Mapping[tuple[str, str], Callable[..., Any]] = MappingProxyType(
    {
        ("_codecs", "encode"): _encode,
        ("builtins", "getattr"): _enum_member,
        ("builtins", "bytearray"): _bytes,
        ("signal", "Signals"): int,
        ("pathlib", "Path"): pathlib.PurePosixPath,
        ("pathlib", "PosixPath"): pathlib.PurePosixPath,
        ("pathlib", "PurePosixPath"): pathlib.PurePosixPath,
        ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
        ("numpy.core.multiarray", "_reconstruct"): _NumpyArray,
        ("numpy._core.multiarray", "_reconstruct"): _NumpyArray,
        ("numpy.core.multiarray", "scalar"): _numpy_scalar,
        ("numpy._core.multiarray", "scalar"): _numpy_scalar,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch._utils", "_rebuild_tensor_v3"): _typed_tensor,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): _attributed_tensor,
        ("torch.serialization", "_get_layout"): _layout,
    }
)
_STORAGES = MappingProxyType(
    {
        "UntypedStorage": torch.uint8,
        "DoubleStorage": torch.float64,
        "FloatStorage": torch.float32,
        "HalfStorage": torch.float16,
        "BFloat16Storage": torch.bfloat16,
        "LongStorage": torch.int64,
        "IntStorage": torch.int32,
        "ShortStorage": torch.int16,
        "CharStorage": torch.int8,
        "ByteStorage": torch.uint8,
        "BoolStorage": torch.bool,
        "ComplexFloatStorage": torch.complex64,
        "ComplexDoubleStorage": torch.complex128,
    }
)
_INDEX_CLASSES = (
    *tuple(
        getattr(metadata, name)
        for name in (
            "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
            "StorageMeta _MEM_FORMAT_ENCODING".split()
        )
    ),
    filesystem._StorageInfo,
)
# the index of core_v0.15, which has a field more
_MEGATRON_INDEX = ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata")


class _SafeNames:
    """Resolves names by the tables above, and references to storages with the given function."""

    persistent: Callable[[Any], StoredElements] | None = None

    def find_class(self, module: str, name: str) -> Any:
        place = (module, name)
        if place in _TYPES or place in _CLASSES:
            return _TYPES.get(place) or _CLASSES[place]
        if place in _FUNCTIONS:  # as a new function, so that a pickle cannot change it for others
            return lambda *args: _FUNCTIONS[place](*args)
        if place == _MEGATRON_INDEX:
            return metadata.Metadata
        for kind in _INDEX_CLASSES:
            if place == (kind.__module__, kind.__name__):
                return kind
        if module == "torch" and isinstance(value := vars(torch).get(name), torch.dtype):
            return value
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return StorageType(_STORAGES[name])
        return type(name, (UnknownObject,), {"__module__": module})

    def persistent_load(self, saved: Any) -> StoredElements:
        if self.persistent is None:
            raise pickle.UnpicklingError("a plain pickle refers to a storage")
        return self.persistent(saved)


# the unpickler in Python is not in the type stubs
_PythonUnpickler: Any = pickle._Unpickler


class SafeUnpickler(_SafeNames, pickle.Unpickler):
    """The fast unpickler."""


def _counted(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return the function of an opcode, which also counts the values of a tuple that it makes."""

    def load_and_count(unpickler: Any) -> None:
        load(unpickler)
        if isinstance(unpickler.stack[-1], tuple):
            unpickler.count(unpickler.stack[-1])

    return load_and_count


def _counting_opcodes() -> dict[int, Callable[[Any], None]]:
    opcodes = pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3 + pickle.REDUCE + pickle.NEWOBJ
    return {opcode: _counted(_PythonUnpickler.dispatch[opcode]) for opcode in opcodes + pickle.NEWOBJ_EX}


class _CarefulUnpickler(_SafeNames, _PythonUnpickler):
    """The unpickler in Python: slow, but a damaged byte cannot make it allocate gigabytes as the fast one may.

    A key is hashed while it is read, and the hash of a tuple follows every reference in it: tuples that each hold the
    previous one twice would never end, and deep nesting would overflow the stack. So values of tuples are counted as
    they are made.
    """

    def load(self) -> Any:
        self._sizes: dict[int, tuple[int, int]] = {}  # of tuples and objects by id: values inside, and how deep
        self._made: list[Any] = []  # the counted objects, kept so that no id is reused
        return super().load()

    def count(self, parts: Iterable[Any]) -> None:
        """Count the values below the top of the stack, which holds `parts`.

        Raises:
            UnpicklingError: if there are too many or they are nested too deeply.
        """
        sizes = [self._sizes.get(id(part), (1, 0)) for part in parts]
        values, depth = 1 + sum(size for size, _ in sizes), 1 + max((deep for _, deep in sizes), default=0)
        if values > _MAX_VALUES or depth > _MAX_DEPTH:
            raise pickle.UnpicklingError(
                f"its values are nested more than {_MAX_DEPTH} deep, or are more than {_MAX_VALUES}"
            )
        self._sizes[id(self.stack[-1])] = values, depth
        self._made.append(self.stack[-1])

    def _build(self) -> None:
        state = self.stack[-1]
        _PythonUnpickler.load_build(self)
        self.count(state.values() if isinstance(state, dict) else (state,))

    dispatch = MappingProxyType({**_PythonUnpickler.dispatch, **_counting_opcodes(), pickle.BUILD[0]: _build})


def load_pickle(content: bytes, persistent: Callable[[Any], StoredElements] | None = None) -> Any:
    """Decode a pickle; `persistent` resolves the storages that it refers to, None if it has none.

    Raises:
        DECODE_ERRORS: if it is damaged.
    """
    unpickler = (_CarefulUnpickler if len(content) < _SMALL_PICKLE_BYTES else SafeUnpickler)(io.BytesIO(content))
    unpickler.persistent = persistent
    with _unchanged_classes():
        return unpickler.load()


@contextmanager
def _unchanged_classes() -> Iterator[None]:
    """Restore the attributes of the index classes afterwards.

    Raises:
        UnpicklingError: if the enclosed pickle changed one.
    """
    guarded = [*_INDEX_CLASSES, *(member for kind in _INDEX_CLASSES if issubclass(kind, enum.Enum) for member in kind)]
    before = [dict(vars(one)) for one in guarded]
    changed = False
    try:
        yield
    finally:
        for one, had in zip(guarded, before):
            for name in vars(one).keys() | had.keys():
                if name not in had:
                    delattr(one, name)
                elif vars(one).get(name) is not had[name]:
                    setattr(one, name, had[name])
                else:
                    continue
                changed = True
    if changed:
        raise pickle.UnpicklingError("it sets attributes of a class")


def to_builtin(value: Any) -> Any:
    """Reduce to plain types: dtypes become their names, enum members and placeholders their value.

    Raises:
        ValueError: for values nested too deeply, or too many of them, since objects may reference one another.
    """
    return _reduced(value, 0, itertools.count())


def _reduced(value: Any, depth: int, count: Iterator[int]) -> Any:
    if depth > _MAX_DEPTH or next(count) > _MAX_VALUES:
        raise ValueError(f"its values are nested more than {_MAX_DEPTH} deep, or are more than {_MAX_VALUES}")

    def inside(item: Any) -> Any:
        return _reduced(item, depth + 1, count)

    if isinstance(value, enum.Enum):
        return inside(value.value)
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.Tensor)):
        return value
    if isinstance(value, (argparse.Namespace, dict)):
        items = vars(value) if isinstance(value, argparse.Namespace) else value
        return {key: inside(item) for key, item in items.items()}
    if isinstance(value, tuple):
        return tuple(inside(item) for item in value)
    if isinstance(value, (list, set, frozenset)):
        return [inside(item) for item in value]
    if isinstance(value, UnknownObject):
        args: tuple[Any, ...] = getattr(value, "args", ())
        return inside(args[0]) if len(args) == 1 else None
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, slice):
        return str(slice(inside(value.start), inside(value.stop), inside(value.step)))
    # the text of an object would hold all that is in it
    return type(value).__name__ if is_dataclass(value) else str(value)

"""Stand in for torch.cuda in a process that `start` has made one with emulated devices (device.cpp).

`start` comes before any use of CUDA in the process; there is no way back. Streams, events, random states, memory figures and graphs have
torch's names and meanings; what the host waits for, kernels and bytes are counted by source line while `Ledger` is on.
"""

import contextlib
import ctypes
import functools
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

# torch looks for CUDA once, when it is imported
assert "torch" not in sys.modules, "emulation comes before torch"


def _load(path: str) -> ctypes.CDLL:
    """Load the library; torch's warning that the collectives of a device are registered a second time goes nowhere."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


_LIBRARY = _load(os.environ["EMULATED_CUDA_LIBRARY"])

import torch  # noqa: E402

LAUNCH, WAIT, ALLOCATE, FREE = range(4)
_EVENT = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.c_char_p, ctypes.c_int64)
_RECORD = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_DESCRIBE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.POINTER(ctypes.c_char), ctypes.c_int)
_OWN = tuple(
    str(Path(__file__).with_name(f"{name}.py"))
    for name in ("emulation", "operators", "process_groups", "triton_kernels", "run", "record_step")
)
_PRODUCT = f"{Path(__file__).parents[2] / 'moe_trainer'}{os.sep}"


NAMES = {8: "NVIDIA A100-SXM4-80GB", 9: "NVIDIA H100 80GB HBM3", 10: "NVIDIA GB200"}


class Device:
    """The emulated devices of this process. capability: a process may change it before it reads it."""

    def __init__(self, devices: int, capability: tuple[int, int], memory: int):
        self.lib = lib = _LIBRARY
        for name in (
            "ec_launches",
            "ec_waits",
            "ec_new_stream",
            "ec_current_stream",
            "ec_record",
            "ec_allocated",
            "ec_peak",
        ):
            getattr(lib, name).restype = ctypes.c_int64
        for name, types in {
            "ec_set_stream": [ctypes.c_int, ctypes.c_int64],
            "ec_record": [ctypes.c_int, ctypes.c_int64, ctypes.c_int64],
            "ec_wait_event": [ctypes.c_int, ctypes.c_int64, ctypes.c_int64],
            "ec_drop_event": [ctypes.c_int64],
            "ec_kernel_begin": [ctypes.c_char_p, ctypes.c_int64],
            "ec_host_wait": [ctypes.c_char_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64],
            "ec_is_complete": [ctypes.c_int64],
            "ec_record_stream": [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64],
            "ec_resize": [ctypes.c_void_p, ctypes.c_size_t],
            "ec_share_generator": [ctypes.c_int, ctypes.c_void_p],
            "ec_graph_begin": [ctypes.c_void_p, ctypes.c_int],
            "ec_graph_delete": [ctypes.c_void_p],
            "ec_graph_steps": [ctypes.c_void_p],
            "ec_graph_replay": [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int],
            "ec_graph_register": [ctypes.c_void_p, ctypes.c_void_p],
            "ec_graph_call": [ctypes.CFUNCTYPE(None, ctypes.c_int64), ctypes.c_int64],
        }.items():
            getattr(lib, name).argtypes = types
        lib.ec_graph_new.restype = ctypes.c_void_p
        lib.ec_devices(devices)
        self.capability, self.memory = capability, memory
        self.ledger: Ledger | None = None
        self.libraries: list[torch.library.Library] = []
        self.recorder: Callable[[str], None] | None = None
        self._record_callback = _RECORD()
        self._lines: dict[str, int] = {}
        self._replay = ctypes.CFUNCTYPE(None, ctypes.c_int64)(lambda number: self.captured[number]())
        self.captured: dict[int, Callable[[], None]] = {}
        self._callbacks = (_EVENT(self._event), _DESCRIBE(self._describe))
        self.watch(False)

    def watch(self, on: bool) -> None:
        """Call back into Python at every launch, wait and allocation."""
        self._watching = on
        self.lib.ec_callbacks(self._callbacks[0] if on else _EVENT(), self._callbacks[1])

    def record(self, recorder: Callable[[str], None] | None) -> None:
        """Report every operator that has run.

        Its name and, each after a |, the tensors that it reads (r), writes (w) and makes (o, and all of a Triton
        kernel) as "role,dtype,AxBxC,bytes". None: report nothing.
        """
        self.recorder = recorder
        self._record_callback = _RECORD() if recorder is None else _RECORD(lambda text: recorder(text.decode()))
        self.lib.ec_recorder(self._record_callback)

    def shapes_only(self, on: bool) -> None:
        """Compute nothing from now on; see device.cpp."""
        self.lib.ec_shapes_only(on)

    def _event(self, kind: int, what: bytes, size: int) -> int:
        line = "" if kind == FREE else source_line()
        number = self._lines.setdefault(line, len(self._lines))
        if self.ledger is not None:
            self.ledger.enter(kind, what.decode(), size, line)
        return number

    def _describe(self, number: int, out, size: int) -> None:
        text = next((line for line, known in self._lines.items() if known == number), "?")
        data = text.encode()[: size - 1] + b"\0"
        ctypes.memmove(out, data, len(data))

    def kernel(self, what: str, tensors: Sequence[torch.Tensor], run: Callable[..., None]) -> None:
        """Launch a kernel that is written in Python: `run` takes the same bytes as tensors of the host."""
        torch.ops.emulated_cuda.touch_all(tensors, what)
        if self.lib.ec_is_shapes_only():
            return
        aliases = [torch.ops.emulated_cuda.host_alias(x) for x in tensors]
        run(*aliases)
        if self.lib.ec_is_capturing():
            number = len(self.captured)
            self.captured[number] = functools.partial(run, *aliases)
            self.lib.ec_graph_call(self._replay, number)

    def wait(self, what: str, device: int, stream: int = -1, event: int = 0) -> None:
        """The host waits for an event, a stream, or all (-1)."""
        refused = self.lib.ec_host_wait(what.encode(), device, stream, event)
        if refused == 1:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")
        if refused:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")


class Ledger:
    """Counts of what happened inside a `with`, by source line: host waits, kernels, bytes; and the memory at its peak."""

    def __init__(self, device: "Device"):
        self._device = device
        self.waits, self.kernels, self.bytes = Counter(), Counter(), Counter()
        self.operators, self.launches = Counter(), Counter()  # kernels by operator; by operator and line
        self._held: dict[str, tuple[int, str]] = {}
        self._now = self.peak = 0
        self.peak_by_line: Counter = Counter()

    def enter(self, kind: int, what: str, size: int, line: str) -> None:
        if kind == LAUNCH:
            self.kernels[line] += 1
            self.bytes[line] += size
            self.operators[what] += 1
            self.launches[what, line] += 1
        elif kind == WAIT:
            self.waits[what, line] += 1
        elif kind == ALLOCATE:
            if self.peak_by_line is None and self._device.lib.ec_is_nested():
                self._summarize()
            self._held[what] = size, line
            self._now += size
            self._look()
        else:
            self._look()
            if self.peak_by_line is None:
                self._summarize()
            self._now -= self._held.pop(what, (0, ""))[0]

    def _look(self) -> None:
        """Is this the most so far? Inside an operator that is computed from several here there are tensors that a device does not have."""
        if self._now > self.peak and not self._device.lib.ec_is_nested():
            self.peak, self.peak_by_line = self._now, None

    def _summarize(self) -> None:
        self.peak_by_line = Counter()
        for size, line in self._held.values():
            self.peak_by_line[line] += size

    def __enter__(self) -> "Ledger":
        self._device.ledger = self
        self._device.watch(True)
        return self

    def __exit__(self, *unused) -> None:
        self._device.ledger = None
        self._device.watch(False)
        if self.peak_by_line is None:
            self._summarize()


@functools.cache
def _shown(file: str) -> tuple[bool, str]:
    """Whether a file is of the program under test, and how lines name it; "" if it is the device's or a library's."""
    if file.startswith(_PRODUCT):
        return True, file.removeprefix(_PRODUCT)
    hidden = file.startswith((*_OWN, "<")) or "/torch/" in file or "importlib" in file
    return False, "" if hidden else Path(file).name


def source_line() -> str:
    """The innermost line of the program under test (or of a test), "moe/router.py:31 forward", behind the node of a backward pass."""
    frame = sys._getframe()
    fallback = "?"
    node = torch._C._current_autograd_node()
    backward = "" if node is None else f"{node.name()}: "
    while frame is not None:
        in_product, name = _shown(frame.f_code.co_filename)
        if name and (in_product or fallback == "?"):
            line = f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
            if in_product:
                return backward + line
            fallback = line
        frame = frame.f_back
    return backward + fallback


def _index(device) -> int:
    if device is None:
        return DEVICE().lib.ec_current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return DEVICE().lib.ec_current_device() if index is None else index


@functools.cache
def _started() -> dict:
    return {}


def DEVICE() -> Device:  # noqa: N802 - the one device object of the process
    return _started()["device"]


class Stream:
    """As torch.cuda.Stream."""

    def __init__(self, device=None, priority=0, *, number: int | None = None, **unused):
        index = _index(device)
        self.device, self.priority = torch.device("cuda", index), priority
        self.cuda_stream = DEVICE().lib.ec_new_stream(index) if number is None else number
        self.stream_id, self.device_index, self.device_type = self.cuda_stream, index, 1
        self._before = []

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        DEVICE().wait("Stream.synchronize", self.device.index, self.cuda_stream)

    def query(self) -> bool:
        return self.record_event().query()

    def __enter__(self):
        self._before.append(current_stream(self.device))
        set_stream(self)
        return self

    def __exit__(self, *unused) -> None:
        set_stream(self._before.pop())

    def __eq__(self, other) -> bool:
        return isinstance(other, Stream) and (self.device, self.cuda_stream) == (other.device, other.cuda_stream)

    def __hash__(self) -> int:
        return hash((self.device, self.cuda_stream))


class Event:
    """As torch.cuda.Event."""

    def __init__(self, device=None, enable_timing=False, **unused):
        self._number, self._timing, self.device = 0, enable_timing, None

    def record(self, stream: Stream | None = None) -> "Event":
        stream = current_stream() if stream is None else stream
        self.device = stream.device
        self._number = DEVICE().lib.ec_record(stream.device.index, stream.cuda_stream, self._number)
        return self

    def wait(self, stream: Stream | None = None) -> None:
        stream = current_stream() if stream is None else stream
        if self._number:
            DEVICE().lib.ec_wait_event(stream.device.index, stream.cuda_stream, self._number)

    def query(self) -> bool:
        if DEVICE().lib.ec_capture_refuses():
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing: Event.query")
        return not self._number or bool(DEVICE().lib.ec_is_complete(self._number))

    def synchronize(self) -> None:
        if self._number:
            DEVICE().wait("Event.synchronize", 0, -1, self._number)

    def elapsed_time(self, other: "Event") -> float:
        assert self._timing and other._timing, "events without enable_timing have no times"
        return 1.0

    def __del__(self):
        if self._number and "device" in _started():
            DEVICE().lib.ec_drop_event(self._number)


class CUDAGraph:
    """As torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False):
        self._graph = DEVICE().lib.ec_graph_new()
        self._pool = None

    def capture_begin(self, pool=None, capture_error_mode="global") -> None:
        if DEVICE().lib.ec_graph_begin(self._graph, capture_error_mode == "thread_local"):
            raise RuntimeError("CUDA error: a capture is in progress")
        self._pool = pool or graph_pool_handle()

    def capture_end(self) -> None:
        if DEVICE().lib.ec_graph_end():
            raise RuntimeError("CUDA error: capturing stream has unjoined work")

    def replay(self) -> None:
        error = ctypes.create_string_buffer(4096)
        if DEVICE().lib.ec_graph_replay(self._graph, error, len(error)):
            raise RuntimeError(error.value.decode(errors="replace"))

    def register_generator_state(self, generator: torch.Generator) -> None:
        DEVICE().lib.ec_graph_register(self._graph, generator._cdata)

    def pool(self):
        return self._pool

    def reset(self) -> None:
        DEVICE().lib.ec_graph_delete(self._graph)
        self._graph = DEVICE().lib.ec_graph_new()


_pools = iter(range(1, 1 << 30))


def graph_pool_handle() -> tuple[int, int]:
    return (0, next(_pools))


@contextlib.contextmanager
def graph(cuda_graph: CUDAGraph, pool=None, stream=None, capture_error_mode="global"):
    torch.cuda.synchronize()
    side = Stream() if stream is None else stream
    with side:
        cuda_graph.capture_begin(*(() if pool is None else (pool,)), capture_error_mode=capture_error_mode)
        try:
            yield
        finally:
            cuda_graph.capture_end()


def current_stream(device=None) -> Stream:
    index = _index(device)
    return Stream(index, number=DEVICE().lib.ec_current_stream(index))


def default_stream(device=None) -> Stream:
    return Stream(_index(device), number=0)


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        DEVICE().lib.ec_set_stream(stream.device.index, stream.cuda_stream)


@contextlib.contextmanager
def stream_context(stream: Stream | None):
    if stream is None:
        yield
        return
    with stream, device_context(stream.device):
        yield


class device_context:  # noqa: N801 - as torch.cuda.device
    """As torch.cuda.device."""

    def __init__(self, device):
        self._index = None if device is None else _index(device)

    def __enter__(self):
        self._before = DEVICE().lib.ec_current_device()
        if self._index is not None and self._index >= 0:
            DEVICE().lib.ec_set_device(self._index)

    def __exit__(self, *unused) -> None:
        DEVICE().lib.ec_set_device(self._before)


def _set_device(device) -> None:
    index = _index(device)
    if not 0 <= index < torch.cuda.device_count():
        raise RuntimeError(f"CUDA error: invalid device ordinal {index}")
    DEVICE().lib.ec_set_device(index)


def _synchronize(device=None) -> None:
    DEVICE().wait("torch.cuda.synchronize", _index(device))


def start(devices: int = 1, capability: tuple[int, int] = (9, 0), memory: int = 80 << 30) -> Device:
    """Give this process emulated devices; see the module's head."""
    assert "device" not in _started(), "the devices are there already"
    device = Device(devices, capability, memory)
    _started()["device"] = device
    generators = _started()["generators"] = tuple(torch.Generator() for _ in range(devices))
    for index, generator in enumerate(generators):
        generator.manual_seed(torch.random.initial_seed())
        device.lib.ec_share_generator(index, generator._cdata)
    lib, cuda = device.lib, torch.cuda

    def properties(index=None):
        major, minor = device.capability
        return SimpleNamespace(
            multi_processor_count=132,
            total_memory=memory,
            major=major,
            minor=minor,
            name=NAMES[major],
            uuid="emulated",
            gcnArchName="",
            warp_size=32,
            L2_cache_size=50 << 20,
            max_threads_per_multi_processor=2048,
            regs_per_multiprocessor=65536,
            shared_memory_per_block_optin=232448,
            shared_memory_per_multiprocessor=233472,
        )

    def statistics(index=None):
        return {
            "allocated_bytes.all.current": lib.ec_allocated(_index(index)),
            "allocated_bytes.all.peak": lib.ec_peak(_index(index)),
            "reserved_bytes.all.current": lib.ec_allocated(_index(index)),
            "reserved_bytes.all.peak": lib.ec_peak(_index(index)),
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def random_state(device="cuda"):
        return _started()["generators"][_index(device)].get_state()

    def set_random_state(new_state, device="cuda"):
        _started()["generators"][_index(device)].set_state(new_state.cpu())

    def seed_all(seed):
        for generator in _started()["generators"]:
            generator.manual_seed(seed)

    def set_debug_mode(mode):
        lib.ec_wait_mode({"default": 0, "warn": 1, "error": 2}.get(mode, mode))

    replaced = {
        "default_generators": generators,
        "is_available": lambda: lib.ec_device_count() > 0,
        "device_count": lambda: lib.ec_device_count(),
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "current_device": lambda: lib.ec_current_device(),
        "set_device": _set_device,
        "get_device_capability": lambda d=None: device.capability,
        "get_device_name": lambda d=None: NAMES[device.capability[0]],
        "get_device_properties": properties,
        "is_bf16_supported": lambda *a, **k: True,
        "get_arch_list": lambda: ["sm_{}{}".format(*device.capability)],
        "synchronize": _synchronize,
        "Event": Event,
        "Stream": Stream,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "stream": stream_context,
        "StreamContext": stream_context,
        "device": device_context,
        "device_of": lambda t: device_context(t.device),
        "is_current_stream_capturing": lambda: bool(lib.ec_is_capturing()),
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": graph_pool_handle,
        "memory_allocated": lambda d=None: lib.ec_allocated(_index(d)),
        "max_memory_allocated": lambda d=None: lib.ec_peak(_index(d)),
        "memory_reserved": lambda d=None: lib.ec_allocated(_index(d)),
        "max_memory_reserved": lambda d=None: lib.ec_peak(_index(d)),
        "mem_get_info": lambda d=None: (memory - lib.ec_allocated(_index(d)), memory),
        "reset_peak_memory_stats": lambda d=None: lib.ec_reset_peak(_index(d)),
        "empty_cache": lambda: None,
        "memory_stats": statistics,
        "ipc_collect": lambda: None,
        "get_rng_state": random_state,
        "set_rng_state": set_random_state,
        "manual_seed": lambda s: _started()["generators"][_index(None)].manual_seed(s),
        "manual_seed_all": seed_all,
        "set_sync_debug_mode": set_debug_mode,
        "get_sync_debug_mode": lambda: lib.ec_get_wait_mode(),
        "cudart": lambda: SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0),
    }
    for key, value in replaced.items():
        setattr(cuda, key, value)
    torch.version.cuda = "13.0"
    cuda.random.get_rng_state, cuda.random.set_rng_state = random_state, set_random_state
    cuda.graphs.CUDAGraph, cuda.graphs.graph, cuda.graphs.graph_pool_handle = CUDAGraph, graph, graph_pool_handle
    torch.accelerator.current_stream = lambda device=None: current_stream(device)

    def record_stream(tensor, stream):
        lib.ec_record_stream(tensor.untyped_storage().data_ptr(), tensor.device.index or 0, stream.cuda_stream)

    torch.Tensor.record_stream = record_stream
    resize = torch.UntypedStorage.resize_

    def resize_storage(storage, size):
        if storage.device.type != "cuda":
            return resize(storage, size)
        lib.ec_resize(storage._cdata, size)
        return storage

    torch.UntypedStorage.resize_ = resize_storage
    return device


def dump_stacks(file) -> None:
    """Write the stack of every thread (a test that hangs)."""
    for number, frame in sys._current_frames().items():
        file.write(f"thread {number}\n{''.join(traceback.format_stack(frame))}\n")

"""Random numbers: layout-independent initialization, dropout, stochastic rounding.

Initial values depend on (seed, global name) only, not on the layout, the order of construction or the device. Each
named tensor is drawn on a CPU generator in blocks of rows of the full tensor, each from its own (seed, name, block)
stream; a rank draws the blocks that overlap its shard.
"""

import contextlib
import hashlib
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from moe_trainer.parallel.params import ParamInfo, get_param_info, named_slices, part_lengths

BLOCK_NUMEL = 1 << 16
_BLOCKS_PER_DRAW = 16
_NUMEL_PER_THREAD = 1 << 21  # below, starting a thread gains little
_MAX_THREADS = 16  # more would wait for Python's lock
LOG_RANGE = (1.0, 16.0)
STEP_RANGE = (1e-3, 0.1)


def name_seed(seed: int, *parts: str | int) -> int:
    """Return a 63-bit seed for the stream named by `parts`, equal on every machine and Python version."""
    text = "\x1f".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def named_generator(seed: int, *parts: str | int) -> torch.Generator:
    """Return a CPU generator for the stream named by `parts`."""
    return torch.Generator(device="cpu").manual_seed(name_seed(seed, *parts))


@torch.no_grad()
def init_parameters(params: Iterable[Parameter], seed: int) -> None:
    """Initialize this rank's shards of parameters; values are drawn in fp32. No effect on meta parameters.

    Many are drawn by all cores of the process, since torch draws a stream of random numbers on one.
    """
    draws = [draw for param in params if not param.is_meta for draw in _prepare(param, seed)]
    num_threads = min(_count_cores(), _MAX_THREADS, sum(draw.target.numel() for draw in draws) // _NUMEL_PER_THREAD)
    if num_threads < 2:
        for draw in draws:
            draw.fill()
        return
    threads_of_torch = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(num_threads, "weights", _prepare_thread, (draws[0].target.device,)) as pool:
            for _ in pool.map(_Draw.fill, draws):  # raises what a thread raised
                pass
    finally:
        torch.set_num_threads(threads_of_torch)


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prepare_thread(device: torch.device) -> None:
    torch.set_num_threads(1)  # else each of them would have a team of threads for its copies
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a new thread starts on GPU 0


class _Draw(NamedTuple):
    """Some blocks of a named tensor that are to be drawn into the slice `target`, which begins at `offset` of it."""

    target: Tensor
    full_shape: list[int]
    offset: list[int]
    name: str
    info: ParamInfo
    seed: int
    block_rows: int
    blocks: range

    def fill(self) -> None:
        """Draw every block and copy what belongs to the slice."""
        target, full_shape, offset = self.target, self.full_shape, self.offset
        stop = offset[0] + target.shape[0]
        for block in self.blocks:
            start = block * self.block_rows
            num_rows = min(self.block_rows, full_shape[0] - start)
            values = torch.empty([num_rows, *full_shape[1:]], dtype=torch.float32)
            _fill(values, full_shape, self.info, named_generator(self.seed, self.name, block))
            low, high = max(start, offset[0]), min(start + num_rows, stop)
            values = values[low - start : high - start]
            for dim in range(1, len(full_shape)):
                values = values.narrow(dim, offset[dim], target.shape[dim])
            target[low - offset[0] : high - offset[0]].copy_(values)


def _prepare(param: Parameter, seed: int) -> Iterator[_Draw]:
    """Set the constant slices of a parameter, and yield what is to be drawn of the others."""
    info = get_param_info(param)
    for name, local in named_slices(info, param.data):
        if info.init == "zeros":
            local.zero_()
        elif info.init == "ones":
            local.fill_(1.0)
        elif info.init == "constant":
            local.fill_(info.init_value)
        else:
            yield from _draws(local, name, info, seed)


def _draws(local: Tensor, name: str, info: ParamInfo, seed: int) -> Iterator[_Draw]:
    """Yield what is to be drawn of a shard, part by part (ParamInfo.parts)."""
    full_shape = list(local.shape)
    if info.sharded_dim is None:
        yield from _draws_of_slice(local, full_shape, [0] * len(full_shape), name, info, seed)
        return
    dim = info.sharded_dim
    full_shape[dim] *= info.shard_count
    local_start = 0
    for part in local.split(part_lengths(info, local.shape[dim]), dim):
        offset = [0] * len(full_shape)
        offset[dim] = local_start * info.shard_count + info.shard_rank * part.shape[dim]
        local_start += part.shape[dim]
        yield from _draws_of_slice(part, full_shape, offset, name, info, seed)


def _draws_of_slice(
    target: Tensor, full_shape: list[int], offset: list[int], name: str, info: ParamInfo, seed: int
) -> Iterator[_Draw]:
    """Yield the blocks that overlap the slice at `offset` of the tensor of shape `full_shape`, some at a time."""
    block_rows = max(1, BLOCK_NUMEL // max(1, math.prod(full_shape[1:])))
    stop = -(-(offset[0] + target.shape[0]) // block_rows)
    for first in range(offset[0] // block_rows, stop, _BLOCKS_PER_DRAW):
        blocks = range(first, min(first + _BLOCKS_PER_DRAW, stop))
        yield _Draw(target, full_shape, offset, name, info, seed, block_rows, blocks)


def _fill(values: Tensor, full_shape: list[int], info: ParamInfo, generator: torch.Generator) -> None:
    if info.init == "normal":
        values.normal_(0.0, info.init_std, generator=generator)
    elif info.init == "uniform":
        values.uniform_(-math.sqrt(3.0) * info.init_std, math.sqrt(3.0) * info.init_std, generator=generator)
    elif info.init == "log_uniform":
        values.uniform_(*LOG_RANGE, generator=generator).log_()
    elif info.init == "log_step":
        low, high = STEP_RANGE
        values.uniform_(math.log(low), math.log(high), generator=generator).exp_()
        values.add_(torch.log(-torch.expm1(-values)))  # the inverse of softplus
    else:
        fan_out, fan_in = full_shape[:2] if len(full_shape) > 1 else (full_shape[0], full_shape[0])
        bound = math.sqrt(6.0 / (fan_in + fan_out))
        values.uniform_(-bound, bound, generator=generator)


class ShardRNG:
    """The RNG of this tensor-parallel rank, for dropout of sharded tensors.

    Replicated tensors use torch's global generator, which is equal on all ranks of the group.

    Args:
        seed: of the run.
        parts: name of the stream, unique to the rank.
    """

    def __init__(self, seed: int, *parts: str | int):
        self._seed = name_seed(seed, *parts)
        self._generators: dict[torch.device, torch.Generator] = {}

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of a device; checkpoints save its state."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    @contextlib.contextmanager
    def fork_rng(self, device: torch.device) -> Iterator[None]:
        """Use this RNG as torch's global generator: attention's dropout takes no generator."""
        shard, default = self.generator(device), _default_generator(device)
        default_state = default.get_state()
        default.set_state(shard.get_state())
        try:
            yield
        finally:
            shard.set_state(default.get_state())
            default.set_state(default_state)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


class StochasticRoundingRNG:
    """The RNG of one layer's stochastic rounding: a function of seed, name, iteration, role and draws of that role.

    So it needs no state in checkpoints. Each role has a generator, because a weight gradient may be deferred; CUDA
    graphs register it.

    Args:
        seed: of the run.
        name: the layer's name and what distinguishes this rank; equal on ranks that must round alike (tp replicas).
    """

    def __init__(self, seed: int, *name: str | int):
        self._seed, self._name = seed, name
        self._iteration = 0
        self._generators: dict[tuple[str, torch.device], torch.Generator] = {}

    def begin(self, iteration: int) -> None:
        self._iteration = iteration
        for (role, _), generator in self._generators.items():
            generator.manual_seed(self._role_seed(role))

    def generator(self, role: str, device: torch.device) -> torch.Generator:
        """Return the generator for the tensors of this role."""
        if (role, device) not in self._generators:
            self._generators[role, device] = torch.Generator(device).manual_seed(self._role_seed(role))
        return self._generators[role, device]

    def _role_seed(self, role: str) -> int:
        return name_seed(self._seed, "rounding", *self._name, self._iteration, role)

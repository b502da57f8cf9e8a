"""Random numbers: layout-independent initialization, dropout, stochastic rounding.

Initial values depend on (seed, global name) only, not on the layout, the order of construction or the device. Each
named tensor is drawn on a CPU generator in blocks of rows of the full tensor, each from its own (seed, name, block)
stream; a rank draws the blocks that overlap its shard.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Parameter

from moe_trainer.parallel.params import ParamInfo, get_param_info, named_slices, part_lengths

BLOCK_NUMEL = 1 << 16
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
def init_parameter(param: Parameter, seed: int) -> None:
    """Initialize this rank's shard of a parameter; values are drawn in fp32. No effect on a meta parameter."""
    info = get_param_info(param)
    if param.is_meta:
        return
    for name, local in named_slices(info, param.data):
        if info.init == "zeros":
            local.zero_()
        elif info.init == "ones":
            local.fill_(1.0)
        elif info.init == "constant":
            local.fill_(info.init_value)
        else:
            _draw(local, name, info, seed)


def _draw(local: Tensor, name: str, info: ParamInfo, seed: int) -> None:
    """Initialize a shard, part by part (ParamInfo.parts)."""
    full_shape = list(local.shape)
    if info.sharded_dim is None:
        _draw_slice(local, full_shape, [0] * len(full_shape), name, info, seed)
        return
    dim = info.sharded_dim
    full_shape[dim] *= info.shard_count
    local_start = 0
    for part in local.split(part_lengths(info, local.shape[dim]), dim):
        offset = [0] * len(full_shape)
        offset[dim] = local_start * info.shard_count + info.shard_rank * part.shape[dim]
        local_start += part.shape[dim]
        _draw_slice(part, full_shape, offset, name, info, seed)


def _draw_slice(
    target: Tensor, full_shape: list[int], offset: list[int], name: str, info: ParamInfo, seed: int
) -> None:
    """Initialize the slice at `offset` of the tensor of shape `full_shape`."""
    row_shape = full_shape[1:]
    block_rows = max(1, BLOCK_NUMEL // max(1, math.prod(row_shape)))
    stop = offset[0] + target.shape[0]
    for block in range(offset[0] // block_rows, -(-stop // block_rows)):
        start = block * block_rows
        num_rows = min(block_rows, full_shape[0] - start)
        values = torch.empty([num_rows, *row_shape], dtype=torch.float32)
        _fill(values, full_shape, info, named_generator(seed, name, block))
        low, high = max(start, offset[0]), min(start + num_rows, stop)
        values = values[low - start : high - start]
        for dim in range(1, len(full_shape)):
            values = values.narrow(dim, offset[dim], target.shape[dim])
        target[low - offset[0] : high - offset[0]].copy_(values)


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

"""Layout-independent random numbers: a tensor's initial values depend on (seed, its global name) and nothing else.

Each named tensor is drawn on its full shape by a CPU generator in blocks of rows, every block from its own
(seed, name, block) stream, and only then cut. So any cut over ranks, any order of construction, any device and the
meta device give the same weights, and a rank draws only the row blocks it holds.

Dropout is another matter: it draws from streams that move (`ShardRNG`). Noise of stochastic rounding belongs to a layer, an iteration
and a draw in it (`StochasticRoundingRNG`), so nothing of it has to be saved.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Parameter

from moe_trainer.parallel.params import ParamInfo, get_param_info, part_lengths

BLOCK_NUMEL = 1 << 16
LOG_RANGE = (1.0, 16.0)


def name_seed(seed: int, *parts: str | int) -> int:
    """A 63-bit seed for a stream named by `parts`: equal on every machine and Python version."""
    text = "\x1f".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def named_generator(seed: int, *parts: str | int) -> torch.Generator:
    """A CPU generator for the stream named by `parts`."""
    return torch.Generator(device="cpu").manual_seed(name_seed(seed, *parts))


@torch.no_grad()
def init_parameter(param: Parameter, seed: int) -> None:
    """Fill a parameter (this rank's shard, any device and dtype) as its `info` says.

    Values are drawn in fp32 and rounded to the parameter's dtype. A meta parameter is left alone.
    """
    info = get_param_info(param)
    if param.is_meta:
        return
    tensors = param.data.unbind(0) if info.stacked else (param.data,)
    for name, local in zip(info.names, tensors):
        if info.init == "zeros":
            local.zero_()
        elif info.init == "ones":
            local.fill_(1.0)
        else:
            _draw(local, name, info, seed)


def _draw(local: Tensor, name: str, info: ParamInfo, seed: int) -> None:
    """Fill `local`, this rank's cut of the tensor called `name`: its piece of every part, one after the other."""
    full = list(local.shape)
    if info.sharded_dim is None:
        _draw_piece(local, full, [0] * len(full), name, info, seed)
        return
    dim = info.sharded_dim
    full[dim] *= info.shard_count
    begin = 0
    for piece in local.split(part_lengths(info, local.shape[dim]), dim):
        first = [0] * len(full)
        first[dim] = begin * info.shard_count + info.shard_rank * piece.shape[dim]
        begin += piece.shape[dim]
        _draw_piece(piece, full, first, name, info, seed)


def _draw_piece(piece: Tensor, full: list[int], first: list[int], name: str, info: ParamInfo, seed: int) -> None:
    """Fill `piece`, which begins at `first` in the whole tensor of shape `full`, block of rows by block of rows."""
    row_shape = full[1:]
    row_numel = math.prod(row_shape)
    block_rows = max(1, BLOCK_NUMEL // max(1, row_numel))
    stop = first[0] + piece.shape[0]
    for block in range(first[0] // block_rows, -(-stop // block_rows)):
        start = block * block_rows
        rows = min(block_rows, full[0] - start)
        values = torch.empty([rows, *row_shape], dtype=torch.float32)
        _fill(values, full, info, named_generator(seed, name, block))
        low, high = max(start, first[0]), min(start + rows, stop)
        values = values[low - start : high - start]
        for dim in range(1, len(full)):
            values = values.narrow(dim, first[dim], piece.shape[dim])
        piece[low - first[0] : high - first[0]].copy_(values)


def _fill(values: Tensor, full: list[int], info: ParamInfo, generator: torch.Generator) -> None:
    if info.init == "normal":
        values.normal_(0.0, info.init_std, generator=generator)
    elif info.init == "uniform":
        values.uniform_(-math.sqrt(3.0) * info.init_std, math.sqrt(3.0) * info.init_std, generator=generator)
    elif info.init == "log_uniform":
        values.uniform_(*LOG_RANGE, generator=generator).log_()
    else:
        # the bounds need the whole tensor's fans, of which this block is a part
        fan_out, fan_in = (full[0], full[1]) if len(full) > 1 else (full[0], full[0])
        bound = math.sqrt(6.0 / (fan_in + fan_out))
        values.uniform_(-bound, bound, generator=generator)


class ShardRNG:
    """Random numbers for tensors that are cut over the tensor-parallel group: each of its ranks has its own.

    Replicated tensors use torch's global generator, which is equal on all ranks of the group. Operators that take no generator
    (attention's dropout) read the global one, so inside `fork_rng` it stands where this stream stands.
    """

    def __init__(self, seed: int, *parts: str | int):
        """parts: name the stream; they must tell it from that of every other rank."""
        self._seed = name_seed(seed, *parts)
        self._generators: dict[torch.device, torch.Generator] = {}

    def generator(self, device: torch.device) -> torch.Generator:
        """Where the stream stands on a device; what a checkpoint keeps. Made on first use."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    @contextlib.contextmanager
    def fork_rng(self, device: torch.device) -> Iterator[None]:
        """Inside, torch's global generator of the device continues this stream; afterwards it is what it was before."""
        mine, shared = self.generator(device), _default_generator(device)
        before = shared.get_state()
        shared.set_state(mine.get_state())
        try:
            yield
        finally:
            mine.set_state(shared.get_state())
            shared.set_state(before)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


class StochasticRoundingRNG:
    """Noise of one layer's stochastic rounding: a function of seed, place, iteration, role and how often that role drew since.

    A resumed run draws what the uninterrupted one would have drawn. Roles count apart, so a weight's gradient may be computed later than
    that of the input. Ranks that must round alike (replicas of a layer within tp) are made with the same place.
    """

    def __init__(self, seed: int, *place: str | int):
        """place: the layer's name and what tells its noise from that of other ranks."""
        self._seed, self._place = seed, place
        self._iteration = 0
        self._drawn: dict[str, int] = {}

    def begin(self, iteration: int) -> None:
        """Begin an iteration."""
        self._iteration = iteration
        self._drawn.clear()

    def generator(self, role: str, device: torch.device) -> torch.Generator:
        """A generator for the next tensor of this role."""
        number = self._drawn.get(role, 0)
        self._drawn[role] = number + 1
        return torch.Generator(device).manual_seed(
            name_seed(self._seed, "rounding", *self._place, self._iteration, role, number)
        )

"""Gradients and optimizer state of parameters that torch's fully_shard keeps in shards (parallel/fsdp.py applies it).

What is expected of the parameters: a DTensor each, fp32, with its ParamInfo, cut along one of the first two dimensions over the ranks that
reduce it (dense: dp_cp, experts: edp; or the part of them in one instance), and their reductions are sums without any
factor (`set_force_sum_reduction_for_comms(True)`, `set_gradient_divide_factor(1.0)`): gloo can do no other, and the mean
over dp_cp, which experts take too, is one pass here. The forward gathers parameters in the run's own format, so the shards
are the main parameters, and there is nothing to copy or to gather after a step.

torch reduces every micro-batch and adds the results up in `.grad`, in fp32: holding whole gradients back until the last
micro-batch would need the memory that sharding saves. Norms, groups, clipping and the update are those of Optimizer.

Sums in bf16 (--megatron-fsdp-main-grads-dtype) are fp32 sums that are rounded to bf16 behind every micro-batch: the numbers of a bf16
buffer, in the memory of an fp32 one, since torch gives a parameter's gradient the parameter's own dtype.
"""

import bisect
import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Parameter

from arguments.optimizer import OptimizerArgs
from moe_trainer.optim.flat import Slot
from moe_trainer.optim.kept_state import Held, KeptState, Piece, Run
from moe_trainer.optim.param_groups import group_of
from moe_trainer.optim.state_plan import MAIN, StatePlan
from moe_trainer.parallel.params import info_of, is_counted, unique_params
from moe_trainer.parallel.shards import held_parts, part_at, whole
from moe_trainer.parallel.state import ParallelState


class ShardedGrads:
    """The gradients of fully sharded parameters, with the face of grad_buffer.DataParallelGrads.

    After finish(), `.grad` of every parameter is this rank's part of the mean over dp_cp (or of the sum, with per_token_loss).
    """

    def __init__(self, params: Iterable[Parameter], ps: ParallelState, *, per_token_loss: bool, narrow: bool = False):
        """`params` in order of use. narrow: sums in bf16. Raises: ValueError when a parameter carries no ParamInfo."""
        self.finished = 0  # iterations
        self.narrow = narrow
        self.factor = 1.0 if per_token_loss else 1.0 / ps.dp_cp.size
        self.params = [param for param in unique_params(params) if param.requires_grad]
        self.slots = tuple(Slot(param, position, start, stop) for position, param in enumerate(self.params)
                           for _, start, stop in held_parts(param))
        for param in self.params:
            name = info_of(param).names[0]
            assert param.dtype == torch.float32, f"{name}: shards are main parameters, and fp32"

    def zero(self) -> None:
        """Begin an iteration."""
        for param in self.params:
            param.grad = None

    def accumulate(self) -> contextlib.AbstractContextManager:
        """Around the backward of a micro-batch before the last one."""
        return self._rounding() if self.narrow else contextlib.nullcontext()

    @contextlib.contextmanager
    def _rounding(self) -> Iterator[None]:
        yield
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for slot in self.slots:
            if slot.param.grad is not None:
                view = part_at(slot.param.grad, slot.start)
                view.copy_(view.bfloat16())

    @torch.no_grad()
    def finish(self) -> None:
        """Take the mean. Every reduction is complete when its backward is."""
        for param in self.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        if self.narrow:
            self._round()
        self.finished += 1
        self.scale(self.factor)

    def owned_views(self) -> Iterator[tuple[Slot, Tensor]]:
        """This rank's part of every gradient, flat, in one order on every rank; may be empty."""
        return ((slot, part_at(slot.param.grad, slot.start)) for slot in self.slots)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the reduced gradients, in place."""
        if factor != 1.0:
            for _, view in self.owned_views():
                view.mul_(factor)

    def gather(self) -> None:
        """Give every parameter its whole gradient as `main_grad`, after finish(). Collective over its ranks."""
        for param in self.params:
            param.main_grad = whole(param.grad)


class ShardedState(KeptState):
    """Main parameters (the shards themselves), gradients and moments."""

    def __init__(self, grads: ShardedGrads, settings: OptimizerArgs, plan: StatePlan, ps: ParallelState, device: torch.device, half: bool):
        """half: the model computes in bf16 or fp16, so that checkpoints name the fp32 shards apart from its weights."""
        self.device = device
        self._half = half
        self.pieces = []
        offset = 0
        for slot in grads.slots:
            if slot.stop > slot.start:
                outer = ps.edp_outer if info_of(slot.param).kind == "expert" else ps.dp_cp_outer
                group = group_of(slot.param, settings, ps.ep.size > 1)
                self.pieces.append(Piece(slot, slot.start, slot.stop, offset, group, outer.rank == 0 and is_counted(info_of(slot.param), ps)))
                offset = self.pieces[-1].end
        # one run a piece: shards of different parameters lie apart
        self.runs = [Run(piece.group, piece.counted, piece.offset, piece.end) for piece in self.pieces]
        self._offsets = [piece.offset for piece in self.pieces]
        self.lay_out(plan, offset, torch.float32)

    def model_at(self, start: int, stop: int) -> Tensor:
        """The shard's elements of a range inside a piece; live."""
        piece = self._piece_at(start)
        return _param_of(piece)[start - piece.offset:stop - piece.offset]

    def grad_at(self, start: int, stop: int) -> Tensor:
        """The gradients of a range inside a piece, at this moment; empty before the first backward."""
        piece = self._piece_at(start)
        param = piece.slot.param
        if param.grad is None:
            return torch.empty(0, device=self.device)
        return part_at(param.grad, piece.start)[start - piece.offset:stop - piece.offset]

    def kept_of(self, piece: Piece) -> Iterator[Held]:
        """What is kept of a piece. NOTE: fp32_param is the parameter's own storage."""
        if self._half:
            yield Held(MAIN, piece.offset, piece.end, _param_of(piece), None)
        yield from super().kept_of(piece)

    def _piece_at(self, start: int) -> Piece:
        return self.pieces[bisect.bisect_right(self._offsets, start) - 1]


def _param_of(piece: Piece) -> Tensor:
    return part_at(piece.slot.param, piece.start)

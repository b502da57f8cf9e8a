"""Gradients and optimizer state of parameters that torch's fully_shard keeps in shards (parallel/fsdp.py applies it).

What is expected of the parameters: a DTensor each, fp32, with its ParamInfo, cut along one of the first two dimensions over the ranks that
reduce it (dense: dp_cp, experts: edp; or the part of them in one instance), and their reductions are sums without any
factor (`set_force_sum_reduction_for_comms(True)`, `set_gradient_divide_factor(1.0)`): gloo can do no other, and the mean
over dp_cp, which experts take too, is one pass here. The forward gathers parameters in the run's own format, so the shards
are the main parameters, and there is nothing to copy or to gather after a step.

torch reduces every micro-batch and adds the results up in `.grad`, in fp32: holding whole gradients back until the last
micro-batch would need the memory that sharding saves. Norms, groups, clipping and the update are those of Optimizer.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from arguments.optimizer import OptimizerArgs
from moe_trainer.optim.flat import Slot
from moe_trainer.optim.flat_state import MOMENTS, Piece, Segment
from moe_trainer.optim.param_groups import group_of
from moe_trainer.parallel.params import info_of, is_counted, unique_params
from moe_trainer.parallel.shards import held_parts, part_at, whole
from moe_trainer.parallel.state import ParallelState


class ShardedGrads:
    """The gradients of fully sharded parameters, with the face of grad_buffer.DataParallelGrads.

    After finish(), `.grad` of every parameter is this rank's part of the mean over dp_cp (or of the sum, with per_token_loss).
    """

    def __init__(self, params: Iterable[Parameter], ps: ParallelState, *, per_token_loss: bool):
        """`params` in order of use. Raises: ValueError when a parameter carries no ParamInfo."""
        self.finished = 0  # iterations
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
        """Nothing is different in the micro-batches before the last one."""
        return contextlib.nullcontext()

    @torch.no_grad()
    def finish(self) -> None:
        """Take the mean. Every reduction is complete when its backward is."""
        for param in self.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
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


class ShardedState:
    """Main parameters (the shards themselves), gradients and moments: an optimizer.StateShard."""

    def __init__(self, grads: ShardedGrads, settings: OptimizerArgs, ps: ParallelState, device: torch.device, half: bool):
        """half: the model computes in bf16 or fp16, so that checkpoints name the fp32 shards apart from its weights."""
        self.device = device
        self._half = half
        self._moments: dict[Piece, dict[str, Tensor]] = {}
        for slot in grads.slots:
            if slot.stop > slot.start:
                outer = ps.edp_outer if info_of(slot.param).kind == "expert" else ps.dp_cp_outer
                group = group_of(slot.param, settings, ps.ep.size > 1)
                piece = Piece(slot, slot.start, slot.stop, 0, group, outer.rank == 0 and is_counted(info_of(slot.param), ps))
                flat = part_at(slot.param, slot.start)
                self._moments[piece] = {name: torch.zeros_like(flat) for name in MOMENTS[settings.optimizer]}

    @property
    def pieces(self) -> Sequence[Piece]:
        return list(self._moments)

    @property
    def segments(self) -> Sequence[Segment]:
        """One per piece: shards of different parameters lie apart. The gradients are those of this moment."""
        return [Segment(piece.group, piece.counted, _param_of(piece), self.grad_of(piece), moments)
                for piece, moments in self._moments.items()]

    def grad_of(self, piece: Piece) -> Tensor:
        """The gradient of a piece; empty before the first backward."""
        param = piece.slot.param
        return part_at(param.grad, piece.start) if param.grad is not None else torch.empty(0, device=self.device)

    def kept_of(self, piece: Piece) -> Iterator[tuple[str, Tensor]]:
        """What is kept of a piece, by its checkpoint name. NOTE: fp32_param is the parameter's own storage."""
        if self._half:
            yield "fp32_param", _param_of(piece)
        yield from self._moments[piece].items()

    def scale_grads(self, factor: float) -> None:
        """Multiply this rank's gradients."""
        for piece in self.pieces:
            self.grad_of(piece).mul_(factor)

    def copy_main_to_model(self) -> None:
        """They are one."""

    def copy_model_to_main(self) -> None:
        """They are one."""


def _param_of(piece: Piece) -> Tensor:
    return part_at(piece.slot.param, piece.start)

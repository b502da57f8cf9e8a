"""The update rules on stretches of the flat state: AdamW, SGD and Lion in fp32, whatever the formats. Whole matrices are muon.py's.

Every stretch is opened (its gradients unscaled and clipped on the way), updated by torch's fused kernels, closed, and copied to the model. No
fp32 copy outlives its portion of the state. Adam's kernel leaves fp32 gradients as it has scaled them: after a step they are undefined. Stretches whose state the host updates come last: the
device works on its own while the host works on these.

FusedAdam of TransformerEngine or apex has no place here. It is a class that keeps the state: an entry a parameter, scales as it finds them, one
step count a group; here stretches of flat storage are opened for a moment, in formats that do not depend on the mapping. torch's kernel takes
lists of tensors, as the function beneath theirs does, whose signature is not public, and moves the same bytes in one pass.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from arguments.optimizer import OptimizerArgs
from moe_trainer.optim.flat import Bucket
from moe_trainer.optim.flat_state import FlatState
from moe_trainer.optim.host_copies import HostLane
from moe_trainer.optim.kept_state import KeptState, Stretch
from moe_trainer.optim.muon import Muon
from moe_trainer.optim.param_groups import ParamGroup, adam_eps
from moe_trainer.optim.state_plan import StatePlan, rule_of
from moe_trainer.parallel.state import ParallelState

_TOGETHER = 64  # stretches in one call: small parameters share it

Rates = Callable[[ParamGroup], tuple[float, float]]


class Updater:
    """Updates all states of a rank."""

    def __init__(self, states: Sequence[KeptState], settings: OptimizerArgs, plan: StatePlan, device: torch.device, ps: ParallelState):
        self._settings = settings
        self._rule, self._muon = rule_of(settings), Muon(settings, ps)
        self._matrices = [(state.param_at(stretch.start), stretch) for state in states if state.whole for stretch in state.stretches]
        stretches = [stretch for state in states if not state.whole for stretch in state.stretches]
        self._on_host = [stretch for stretch in stretches if stretch.store.by_host]
        self._on_device = sorted((stretch for stretch in stretches if not stretch.store.by_host), key=lambda stretch: stretch.group)
        self._first: list[Stretch] = []
        self.lane = HostLane(device, pinned_grads=plan.pinned_grads, pinned_params=plan.pinned, overlap=plan.overlap)

    def put_first(self, buckets: Sequence[Bucket]) -> None:
        """Update these buckets before all others from now on; `step` then reports when they are done."""
        found = {id(bucket) for bucket in buckets}
        first = [isinstance(stretch.state, FlatState) and id(stretch.state.bucket_at(stretch.start)) in found for stretch in self._on_device]
        self._first = [stretch for stretch, is_first in zip(self._on_device, first) if is_first]
        self._on_device = [stretch for stretch, is_first in zip(self._on_device, first) if not is_first]

    @torch.no_grad()
    def step(self, rates: Rates, factor: float, step_count: int, first_done: Callable[[], None] = lambda: None) -> None:
        """One step.

        Args:
            rates: (learning rate, weight decay) of a group.
            factor: on every gradient.
            step_count: of this step, from 1.
            first_done: is called when what was put first is updated.
        """
        self._update_on_device(self._first, rates, factor, step_count)
        first_done()
        self._update_on_device(self._on_device, rates, factor, step_count)
        self._update_others(rates, factor, step_count)

    def _update_on_device(self, stretches: Sequence[Stretch], rates: Rates, factor: float, step_count: int) -> None:
        for together in _portions(stretches):
            grads = [stretch.grad for stretch in together]
            for stretch, values in zip(together, self._update(together, grads, rates(together[0].group), step_count, factor)):
                stretch.state.take(stretch.start, stretch.stop, values)

    def _update_others(self, rates: Rates, factor: float, step_count: int) -> None:
        """Whole matrices, and what the host updates."""
        for param, stretch in self._matrices:
            main, moments = stretch.open()
            self._muon.update(param, main, _scaled(stretch.grad, factor), moments["momentum_buffer"], *rates(stretch.group))
            stretch.state.take(stretch.start, stretch.stop, stretch.close(main, moments))
        if self._on_host:
            for stretch, grad in self.lane.gradients(self._on_host):
                values, = self._update([stretch], [grad], rates(stretch.group), step_count, factor)
                if not stretch.state.stored:
                    self.lane.send(stretch.model, values)
            self.lane.finish()

    def _update(self, stretches: Sequence[Stretch], grads: list[Tensor], rates: tuple[float, float], step_count: int,
                factor: float) -> list[Tensor]:
        """Returns: what the model must become. factor: on the gradients."""
        # Adam's kernel applies it, on devices and the host, to gradients of every format: numbers must not depend on the place of a state
        before, inside = (1.0, factor) if self._rule == "adam" else (factor, 1.0)
        grads = [_scaled(grad, before) for grad in grads]
        opened = [stretch.open() for stretch in stretches]
        params, moments = [param for param, _ in opened], [moment for _, moment in opened]
        if self._rule == "adam":
            self._adam(params, grads, moments, *rates, step_count, adam_eps(self._settings, stretches[0].group), inside)
        else:
            {"sgd": self._sgd, "lion": self._lion}[self._rule](params, grads, moments, *rates)
        return [stretch.close(param, moment) for stretch, (param, moment) in zip(stretches, opened)]

    def _adam(self, params: list[Tensor], grads: list[Tensor], moments: list[dict[str, Tensor]], lr: float, weight_decay: float,
              step_count: int, eps: float, factor: float) -> None:
        # the fused kernel reads one step counter per tensor; it does not advance them
        steps = [torch.full((), float(step_count), device=params[0].device)] * len(params)
        divisor = None if factor == 1.0 else torch.full((), 1.0 / factor, device=params[0].device)
        torch._fused_adamw_(params, grads, [moment["exp_avg"] for moment in moments], [moment["exp_avg_sq"] for moment in moments], [],
                            steps, lr=lr, beta1=self._settings.adam_beta1, beta2=self._settings.adam_beta2, weight_decay=weight_decay,
                            eps=eps, amsgrad=False, maximize=False, grad_scale=divisor)

    def _sgd(self, params: list[Tensor], grads: list[Tensor], moments: list[dict[str, Tensor]], lr: float, weight_decay: float) -> None:
        # a zeroed momentum buffer makes the first step no special case; without momentum the kernel refuses buffers
        buffers = [moment["momentum_buffer"] for moment in moments if self._settings.sgd_momentum]
        if params[0].device.type == "cpu":
            # the fused kernel rounds the last values of a stretch, which fill no vector, otherwise than those before: numbers would
            # depend on where the ranks' shares end
            grads = torch._foreach_add(grads, params, alpha=weight_decay) if weight_decay else grads
            if buffers:
                torch._foreach_mul_(buffers, self._settings.sgd_momentum)
                torch._foreach_add_(buffers, grads)
            torch._foreach_add_(params, buffers or grads, alpha=-lr)
            return
        torch._fused_sgd_(params, grads, buffers, weight_decay=weight_decay, momentum=self._settings.sgd_momentum, lr=lr, dampening=0.0,
                          nesterov=False, maximize=False, is_first_step=False)

    def _lion(self, params: list[Tensor], grads: list[Tensor], moments: list[dict[str, Tensor]], lr: float, weight_decay: float) -> None:
        """Along the sign of a mean of the gradient and the momentum, which follows more slowly (arXiv 2302.06675)."""
        averages, beta1, beta2 = [moment["exp_avg"] for moment in moments], self._settings.lion_beta1, self._settings.lion_beta2
        signs = [average.sign_() for average in torch._foreach_lerp(averages, grads, 1.0 - beta1)]
        torch._foreach_mul_(params, 1.0 - lr * weight_decay)
        torch._foreach_add_(params, signs, alpha=-lr)
        torch._foreach_lerp_(averages, grads, 1.0 - beta2)


def _scaled(grad: Tensor, factor: float) -> Tensor:
    """grad * factor in fp32; itself where that changes nothing."""
    if grad.dtype == torch.float32:
        return grad if factor == 1.0 else grad * factor
    return grad.float().mul_(factor)


def _portions(stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
    """Neighbours of one group that together are no more than the longest of them all, and no more than a handful."""
    longest = max((stretch.stop - stretch.start for stretch in stretches), default=0)
    together: list[Stretch] = []
    elements = 0
    for stretch in stretches:
        size = stretch.stop - stretch.start
        if together and (stretch.group != together[0].group or elements + size > longest or len(together) == _TOGETHER):
            yield together
            together, elements = [], 0
        together.append(stretch)
        elements += size
    if together:
        yield together

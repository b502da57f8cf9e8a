"""Choice and weights by one kernel: ours (ops/triton_router.py) or TransformerEngine's (--moe-router-fusion).

Shape letters: T tokens, E experts.
"""

from torch import Tensor

from moe_trainer.moe.dispatch.base import CacheFn
from moe_trainer.moe.selections.selection import Choice, ExpertSelection, FusedTopK, RoutingInputs


class FusedSelection(ExpertSelection):
    """A plain selection, computed by a kernel.

    Args:
        plain: the selection.
        kernel: takes logits_TE and expert_bias, returns probs_TE and routing_TE.
        cache_fn: see SelectionContext.
    """

    def __init__(self, plain: ExpertSelection, kernel: FusedTopK, cache_fn: CacheFn):
        self.plain, self.kernel, self.cache_fn = plain, kernel, cache_fn

    def with_kernel(self, kernel: FusedTopK | None) -> ExpertSelection:
        return self.plain.with_kernel(kernel)

    def route(self, logits_TE: Tensor, choice: Choice | None, inputs: RoutingInputs) -> tuple[Tensor, Tensor]:
        bias_E = inputs.expert_bias_E
        if bias_E is not None:
            # the kernel cannot be given a selection, so a recomputed layer gives it the same numbers
            bias_E = self.cache_fn(bias_E.clone)
        return self.kernel(logits_TE, expert_bias=bias_E)

    def margin(self, logits_TE: Tensor, expert_bias_E: Tensor | None) -> Tensor | None:
        return self.plain.margin(logits_TE, expert_bias_E)

"""The choice of how the experts of a layer receive tokens."""

from arguments.moe import MoEArgs
from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.moe.receive.budget import ReceiveBudget
from moe_trainer.moe.receive.exact import ExactBuffer
from moe_trainer.moe.receive.fixed_buffer import FixedBuffer, StashedBuffer
from moe_trainer.moe.receive.policy import ReceivePolicy


def build_receive_policy(moe: MoEArgs, name: str, etp_size: int, activations: ActivationPolicy) -> ReceivePolicy:
    """Build what the flags ask for; `name` is that of the experts, for the log."""
    factor = moe.moe_expert_rank_capacity_factor
    if factor is None:
        return ExactBuffer()
    budget = ReceiveBudget(name, factor, moe.moe_router_topk, etp_size)
    return FixedBuffer(budget) if activations.stash is None else StashedBuffer(budget)

"""One Mixture-of-Experts layer: route -> dispatch -> experts -> combine, plus shared experts."""

from collections.abc import Iterator

from torch import Tensor, nn

from moe_trainer.layers.kit import Kit
from moe_trainer.moe.dispatch.choose import choose_dispatcher
from moe_trainer.moe.experts import Experts, SharedExperts
from moe_trainer.moe.router import TopKRouter
from moe_trainer.parallel.state import ParallelState


class MoELayer(nn.Module):
    """The feed-forward part of a block, made of experts.

    Parameters (global names under layer_name): router.weight, experts.local_experts.{e}.linear_fc1 / linear_fc2 (stacked in
    memory), shared_experts.linear_fc1 / linear_fc2 / gate_weight.
    """

    def __init__(self, args, ps: ParallelState, layer_name: str, layer_number: int, kit: Kit):
        """args: Arguments. layer_name: e.g. "decoder.layers.3.mlp". layer_number: from 1; MTP layers follow the decoder's."""
        super().__init__()
        self.layer_number = layer_number
        self.router = TopKRouter(args, ps, f"{layer_name}.router", layer_number)
        self.dispatcher = choose_dispatcher(args.moe, ps)
        self.experts = Experts(args, ps, f"{layer_name}.experts")
        self.shared_experts = None
        if args.moe.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExperts(args, ps, f"{layer_name}.shared_experts", kit)

    def forward(self, x_SBH: Tensor, grad_scale: float | Tensor = 1.0) -> Tensor:
        """Run the layer. grad_scale: factor by which the auxiliary losses enter the gradient.

        Shapes: x_SBH [S, B, hidden] -> y_SBH.
        """
        probs_TE, routing_TE = self.router(x_SBH, grad_scale)
        x_TH = x_SBH.reshape(-1, x_SBH.shape[-1])
        sent = self.dispatcher.dispatch(x_TH, probs_TE, routing_TE)
        y_RH = self.experts(sent.x_RH, sent.probs_R, sent.tokens_per_expert_e)
        y_SBH = self.dispatcher.combine(y_RH, sent).view(x_SBH.shape)
        if self.shared_experts is not None:
            y_SBH = y_SBH + self.shared_experts(x_SBH)
        return y_SBH

    def named_state_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that a checkpoint must keep, by global name: the expert bias."""
        if self.router.expert_bias is not None:
            yield f"{self.router.name}.expert_bias", self.router.expert_bias

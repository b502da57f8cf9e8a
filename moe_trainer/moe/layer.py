"""One Mixture-of-Experts layer: route -> dispatch -> experts -> combine, plus shared experts.

Under tensor parallelism every rank routes and dispatches tokens of its own. With sequence parallelism the rows that arrive are
such already; without it all ranks of tp hold the same rows, so the layer takes its share of them first and gathers the results
after. The shared experts are an ordinary feed-forward cut over tp and take the rows as they come; with
--moe-shared-expert-overlap they run while the rows of the routed experts are under way. With --overlap-moe-expert-parallel-comm
the pass of another microbatch runs meanwhile (parallel/baton.py).
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, nn

from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from moe_trainer.layers.kit import Kit
from moe_trainer.moe.budget import ReceiveBudget, place
from moe_trainer.moe.cloning import HotExperts, Redirect
from moe_trainer.moe.dispatch.base import Dispatched, TokenDispatcher
from moe_trainer.moe.experts import Experts, SharedExperts
from moe_trainer.moe.padding import pad_routing
from moe_trainer.moe.router import TopKRouter
from moe_trainer.parallel.baton import hand_over
from moe_trainer.parallel.mappings import gather_rows_replicated, scatter_rows_to_group
from moe_trainer.parallel.state import Group, ParallelState


class MoELayer(nn.Module):
    """The feed-forward part of a block, made of experts.

    Parameters (global names under `name`): router.weight, experts.local_experts.{e}.linear_fc1 / linear_fc2 (stacked in
    memory), shared_experts.linear_fc1 / linear_fc2 / gate_weight.
    `dispatcher` is shared by the layers of a model (it holds no state of a layer) and set before the first forward pass; see
    dispatch/choose.py. `budget`: None where the experts' buffers are as long as there are rows.
    """

    def __init__(self, model: ModelArgs, moe: MoEArgs, ps: ParallelState, *, name: str, layer_number: int, kit: Kit,
                 sequence_parallel: bool = False, per_token_loss: bool = False):
        """name: e.g. "decoder.layers.3.mlp". layer_number: from 1; MTP layers follow the decoder's."""
        super().__init__()
        self.layer_number = layer_number
        self.router = TopKRouter(model, moe, ps, f"{name}.router", layer_number, per_token_loss=per_token_loss,
                                 stream=kit.stream, activations=kit.activations)
        low = kit.precision if moe.moe_router_padding_for_quantization else None
        self.row_multiple = 1 if low is None else low.recipe.alignment
        self.experts = Experts(model, moe, ps, f"{name}.experts", kit.queue, kit.activations, kit.quantize, kit.kernels,
                               kit.grouped_linear)
        self.shared_experts = None
        if moe.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExperts(model, moe, ps, f"{name}.shared_experts", kit, sequence_parallel)
        self.overlap_shared = self.shared_experts is not None and moe.moe_shared_expert_overlap
        self.dispatcher: TokenDispatcher | None = None
        self.budget = None
        if moe.moe_expert_rank_capacity_factor is not None:
            self.budget = ReceiveBudget(f"{name}.experts", moe.moe_expert_rank_capacity_factor, moe.moe_router_topk, ps.etp.size)
        self.hot = None
        if moe.moe_clone_hot_experts and ps.ep.size > 1:
            self.hot = HotExperts(ps, moe.num_experts, moe.moe_clone_hot_experts)
        self.baton, self.queue, self.activations = kit.baton, kit.queue, kit.activations
        # the group over which rows must be dealt out: all its ranks hold the same ones
        self.replicas = Group.single("tp", ps.tp.ranks[ps.tp.rank]) if sequence_parallel else ps.tp

    def forward(self, x_SBH: Tensor, grad_scale: float | Tensor = 1.0) -> Tensor:
        """Run the layer. grad_scale: factor by which the auxiliary losses enter the gradient.

        Shapes: x_SBH [S, B, hidden] -> y_SBH.
        Raises: ValueError without sequence parallelism when the ranks of tp do not divide S.
        """
        own_SBH = scatter_rows_to_group(x_SBH, self.replicas)
        probs_TE, routing_TE = self.router(own_SBH, grad_scale)
        dispatcher, shared_SBH = self.dispatcher, None
        if self.row_multiple > 1 and dispatcher.takes_padding:
            routing_TE = pad_routing(routing_TE, self.row_multiple)
        redirect = None if self.hot is None else self.activations.once(lambda: self.hot.plan(routing_TE))
        if redirect is not None:
            probs_TE, routing_TE = redirect.apply(probs_TE, routing_TE)
        order = () if redirect is None else (redirect.expert_V,)
        sent = dispatcher.start_exchange(
            dispatcher.preprocess(own_SBH.reshape(-1, own_SBH.shape[-1]), probs_TE, routing_TE, *order))
        if self.overlap_shared:
            shared_SBH = self._run_shared(x_SBH)
        x_RH, probs_R = hand_over(self.baton, self.queue, sent.x_RH, sent.probs_R)
        sent = dispatcher.postprocess(dispatcher.finish_exchange(replace(sent, x_RH=x_RH, probs_R=probs_R)))
        y_RH = self._run_experts(sent, own_SBH.shape[0] * own_SBH.shape[1], redirect)
        y_RH, under_way = dispatcher.start_exchange_back(dispatcher.regroup(y_RH, sent), sent)
        y_RH, = hand_over(self.baton, self.queue, y_RH)
        y_TH = dispatcher.restore(dispatcher.finish_exchange_back(y_RH, under_way, sent), sent)
        y_SBH = gather_rows_replicated(y_TH.view(own_SBH.shape), self.replicas)
        if self.shared_experts is None:
            return y_SBH
        return y_SBH + (self._run_shared(x_SBH) if shared_SBH is None else shared_SBH)

    def _run_experts(self, sent: Dispatched, num_tokens: int, redirect: Redirect | None) -> Tensor:
        """The routed experts, and clones of others, on the rows that have arrived. num_tokens: this rank's own."""
        x_RH, probs_R, counts_e = sent.x_RH, sent.probs_R, sent.tokens_per_expert_e
        trip = None if redirect is None else self.hot.trip(redirect, self.activations.keeping)
        if self.budget is None:
            return self.experts(x_RH, probs_R, counts_e, trip=trip)
        received = x_RH.shape[0]
        # the budget may have grown when a region runs again
        rows = self.activations.once(lambda: self.budget.rows(num_tokens, received))
        with self.activations.stashing(rows, received, self.budget.even):
            return self.experts(place(x_RH, rows), place(probs_R, rows), counts_e, rows - received, trip)[:received]

    def _run_shared(self, x_SBH: Tensor) -> Tensor:
        return self.activations.region("shared_experts", self.shared_experts, x_SBH)

    def named_state_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that a checkpoint must keep, by global name: the expert bias."""
        if self.router.expert_bias is not None:
            yield f"{self.router.name}.expert_bias", self.router.expert_bias

"""One Mixture-of-Experts layer: route -> dispatch -> experts -> combine, plus shared experts.

Under tensor parallelism every rank routes and dispatches tokens of its own. With sequence parallelism the rows that arrive are
such already; without it all ranks of tp hold the same rows, so the layer takes its share of them first and gathers the results
after. The shared experts are an ordinary feed-forward cut over tp and take the rows as they come; with
--moe-shared-expert-overlap they run while the rows of the routed experts are under way. With --overlap-moe-expert-parallel-comm
the pass of another microbatch runs meanwhile (parallel/baton.py).

LatentMoE (--moe-latent-size): what is dispatched is a projection of the tokens to fewer channels, which is where the experts live, and
what comes back is projected up; router and shared experts read and write whole tokens. Every rank projects the rows that it dispatches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from moe_trainer.layers.init import hidden_init, residual_init
from moe_trainer.layers.kit import Kit
from moe_trainer.moe.budget import ReceiveBudget, place
from moe_trainer.moe.cloning import HotExperts, Redirect
from moe_trainer.moe.dispatch.base import Dispatched, Hints, Known, TokenDispatcher
from moe_trainer.moe.experts import Experts, SharedExperts
from moe_trainer.moe.padding import pad_routing
from moe_trainer.moe.router import TopKRouter, expert_capacity
from moe_trainer.parallel.baton import hand_over
from moe_trainer.parallel.mappings import gather_rows_replicated, scatter_rows_to_group
from moe_trainer.parallel.state import Group, ParallelState


@dataclass(frozen=True)
class Routed:
    """What stands before the exchange of tokens. shape: of this rank's rows [S, B, H].

    Either own_SBH (as experts read them), probs_TE and routing_TE, or `sent`, where the rows are ordered for sending already. shared_SBH:
    of the shared experts, None where they run later.
    """

    shape: torch.Size
    own_SBH: Tensor | None
    probs_TE: Tensor | None
    routing_TE: Tensor | None
    sent: Dispatched | None = None
    shared_SBH: Tensor | None = None


class MoELayer(nn.Module):
    """The feed-forward part of a block, made of experts.

    Parameters (global names under `name`): router.weight, experts.local_experts.{e}.linear_fc1 / linear_fc2 (stacked in
    memory), shared_experts.linear_fc1 / linear_fc2 / gate_weight, fc1_latent_proj / fc2_latent_proj.
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
        self.capacity = moe.moe_expert_capacity_factor if moe.moe_pad_expert_input_to_capacity else None
        self.drops = moe.moe_expert_capacity_factor is not None and moe.moe_expert_capacity_factor >= 0
        self.row_multiple = 1 if low is None else low.recipe.alignment
        self.experts = Experts(model, moe, ps, f"{name}.experts", kit.queue, kit.activations, kit.quantize, kit.kernels,
                               kit.grouped_linear)
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if moe.moe_latent_size is not None:
            self._make_projections(model, moe.moe_latent_size, ps, name, kit)
        self.shared_experts = None
        if moe.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExperts(model, moe, ps, f"{name}.shared_experts", kit, sequence_parallel)
        self.overlap_shared = self.shared_experts is not None and moe.moe_shared_expert_overlap
        self.dispatcher: TokenDispatcher | None = None
        self.budget = None
        if moe.moe_expert_rank_capacity_factor is not None:
            self.budget = ReceiveBudget(f"{name}.experts", moe.moe_expert_rank_capacity_factor, moe.moe_router_topk, ps.etp.size)
        self.hot, self.cloned_rows = None, 0  # rows that clones took over since they were last read, on all ranks of tp_ep
        if moe.moe_clone_hot_experts and ps.ep.size > 1:
            self.hot = HotExperts(ps, moe.num_experts, moe.moe_clone_hot_experts)
        self.baton, self.queue, self.activations, self.graphs = kit.baton, kit.queue, kit.activations, kit.graphs
        # the group over which rows must be dealt out: all its ranks hold the same ones
        self.replicas = Group.single("tp", ps.tp.ranks[ps.tp.rank]) if sequence_parallel else ps.tp

    def _make_projections(self, model: ModelArgs, latent: int, ps: ParallelState, name: str, kit: Kit) -> None:
        # rows are a rank's own, with or without sequence parallelism between blocks
        options = {"group": ps.tp, "bias": model.add_bias_linear, "sequence_parallel": True}
        self.fc1_latent_proj = kit.replicated_linear(model.hidden_size, latent, name=f"{name}.fc1_latent_proj", init=hidden_init(model), **options)
        self.fc2_latent_proj = kit.replicated_linear(latent, model.hidden_size, name=f"{name}.fc2_latent_proj", init=residual_init(model), **options)

    def draw_logits(self, x_SBH: Tensor) -> tuple[Tensor, ...]:
        """Draw random logits for the tokens of x_SBH that this rank routes, where the router wants them; else nothing.

        This happens outside captured parts, which take them as an input: a graph has no random stream of a tensor-parallel rank.
        """
        drawn_TE = self.router.draw_logits(x_SBH.shape[0] * x_SBH.shape[1] // self.replicas.size, x_SBH.device)
        return () if drawn_TE is None else (drawn_TE,)

    def forward(self, x_SBH: Tensor | None, grad_scale: float | Tensor = 1.0, routed: Routed | None = None,
                drawn_TE: Tensor | None = None) -> Tensor:
        """Run the layer. grad_scale: factor by which the auxiliary losses enter the gradient. routed: of `route`, if that has run; then
        x_SBH is read by shared experts that run beside the exchange only. drawn_TE: of `draw_logits`.

        Shapes: x_SBH [S, B, hidden] -> y_SBH.
        Raises: ValueError without sequence parallelism when the ranks of tp do not divide S.
        """
        if routed is None:
            routed = self._routed(x_SBH, grad_scale, drawn_TE)
        dispatcher, redirect, sent, shared_SBH = self.dispatcher, None, routed.sent, routed.shared_SBH
        if sent is None:
            probs_TE, routing_TE = routed.probs_TE, routed.routing_TE
            known = self._known(routed.shape)
            if self.hot is not None:
                redirect, known = self.activations.once(lambda: self._plan(routing_TE))
            if redirect is not None:
                probs_TE, routing_TE = redirect.apply(probs_TE, routing_TE)
            own_TH = routed.own_SBH.flatten(0, 1)
            captured = self.graphs.captures("moe", "layer", "iteration")
            hints = Hints(None if redirect is None else redirect.expert_V, known, captured, self._buffer_rows(routed.shape))
            sent = dispatcher.preprocess(own_TH, probs_TE, routing_TE, hints)
        sent = dispatcher.start_exchange(sent, self.activations.once)
        if self.overlap_shared:
            shared_SBH = self._run_shared(x_SBH)
        x_RH, probs_R = hand_over(self.baton, self.queue, sent.x_RH, sent.probs_R)
        sent = dispatcher.postprocess(dispatcher.finish_exchange(replace(sent, x_RH=x_RH, probs_R=probs_R)))
        y_RH = self._run_experts(sent, routed.shape[0] * routed.shape[1], redirect)
        y_RH, under_way = dispatcher.start_exchange_back(dispatcher.regroup(y_RH, sent), sent)
        y_RH, = hand_over(self.baton, self.queue, y_RH)
        y_TH = dispatcher.restore(dispatcher.finish_exchange_back(y_RH, under_way, sent), sent)
        y_SBH = y_TH.view(*routed.shape[:2], y_TH.shape[1])
        if self.fc2_latent_proj is not None:
            y_SBH = self.fc2_latent_proj(y_SBH)
        y_SBH = gather_rows_replicated(y_SBH, self.replicas)
        if self.shared_experts is None:
            return y_SBH
        return y_SBH + (self._run_shared(x_SBH) if shared_SBH is None else shared_SBH)

    def route(self, x_SBH: Tensor, grad_scale: float | Tensor = 1.0, drawn_TE: Tensor | None = None) -> Routed:
        """The part of the layer that is captured by itself: routing, with what prepares the exchange if that is captured too, and the
        shared experts unless they run beside the exchange. Nothing in it waits for other ranks' rows. drawn_TE: of `draw_logits`."""
        routed = self._routed(x_SBH, grad_scale, drawn_TE)
        known = self._known(routed.shape)
        if known is not None and self.graphs.captures("moe_preprocess"):
            own_TH = routed.own_SBH.flatten(0, 1)
            sent = self.dispatcher.preprocess(own_TH, routed.probs_TE, routed.routing_TE, Hints(known=known, captured=True))
            routed = Routed(routed.shape, None, None, None, sent)
        if self.shared_experts is not None and not self.overlap_shared:
            routed = replace(routed, shared_SBH=self._run_shared(x_SBH))
        return routed

    @property
    def routing_modules(self) -> list[nn.Module]:
        """Whose parameters `route` reads."""
        beside = self.shared_experts is None or self.overlap_shared
        modules = (self.router, self.fc1_latent_proj, None if beside else self.shared_experts)
        return [module for module in modules if module is not None]

    def _routed(self, x_SBH: Tensor, grad_scale: float | Tensor, drawn_TE: Tensor | None) -> Routed:
        own_SBH = scatter_rows_to_group(x_SBH, self.replicas)
        probs_TE, routing_TE = self.router(own_SBH, grad_scale, drawn_TE)
        if self.row_multiple > 1 and self.dispatcher.takes_padding:
            routing_TE = pad_routing(routing_TE, self.row_multiple)
        read_SBH = own_SBH if self.fc1_latent_proj is None else self.fc1_latent_proj(own_SBH)
        return Routed(own_SBH.shape, read_SBH, probs_TE, routing_TE)

    def _known(self, shape: torch.Size) -> Known | None:
        """What can be told of the rows beforehand, to dispatchers that use it, so that they need not ask."""
        padded = self.row_multiple > 1 and self.dispatcher.takes_padding
        if not self.dispatcher.takes_known or padded or self.hot is not None:
            return None
        num_tokens = shape[0] * shape[1]
        if self.capacity is not None:
            rows = expert_capacity(num_tokens, self.router.topk, self.router.num_experts, self.capacity)
            return Known(rows * self.router.num_experts, rows)
        return None if self.drops else Known(num_tokens * self.router.topk)

    def keep_counts_on_device(self) -> str | None:
        """Let the counts of received rows stay on the device where a budget fixes the buffer. Returns: why not, None if they stay."""
        problem = "pages of --moe-paged-stash are dealt out there" if self.activations.stash is not None else self.experts.needs_host_counts()
        self.budget.may_stay = problem is None
        return problem

    def _buffer_rows(self, shape: torch.Size) -> int | None:
        """The size of the buffer to receive into; None where it has the size of what is received."""
        return self.budget.fixed_rows(shape[0] * shape[1]) if self.budget is not None and self.budget.on_device else None

    def _plan(self, routing_TE: Tensor) -> tuple[Redirect | None, Known | None]:
        redirect, known = self.hot.plan(routing_TE)
        if redirect is not None and self.training and torch.is_grad_enabled():
            self.cloned_rows += sum(clone.rows for clone in redirect.clones)
        return redirect, known if self.dispatcher.takes_known else None

    def _run_experts(self, sent: Dispatched, num_tokens: int, redirect: Redirect | None) -> Tensor:
        """The routed experts, and clones of others, on the rows that have arrived. num_tokens: this rank's own."""
        x_RH, probs_R, counts_e = sent.x_RH, sent.probs_R, sent.tokens_per_expert_e
        if self.budget is None:
            trip = None if redirect is None else self.hot.trip(redirect, self.activations.keeping)
            return self.experts(x_RH, probs_R, counts_e, trip=trip)
        if isinstance(counts_e, Tensor):
            if not self.activations.replaying:
                self.budget.note(sent.overflow)
            return self.experts(x_RH, probs_R, counts_e)
        received = x_RH.shape[0]
        # the budget may have grown when a region runs again
        rows = self.activations.once(lambda: self.budget.rows(num_tokens, received))
        with self.activations.stashing(rows, received, self.budget.even):
            return self.experts(place(x_RH, rows), place(probs_R, rows), counts_e, rows - received)[:received]

    def _run_shared(self, x_SBH: Tensor) -> Tensor:
        return self.activations.region("shared_experts", self.shared_experts, x_SBH)

    def named_state_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that a checkpoint must keep, by global name: the expert bias, the bias of quantile balancing."""
        if self.router.expert_bias is not None:
            yield f"{self.router.name}.expert_bias", self.router.expert_bias
        if self.router.quantile is not None:
            yield f"{self.router.name}.qb_beta", self.router.quantile.bias_E

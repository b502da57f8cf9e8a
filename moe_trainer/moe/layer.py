"""One Mixture-of-Experts layer: route -> dispatch -> experts -> combine, plus shared experts.

Under tensor parallelism every rank routes and dispatches different tokens. With sequence parallelism they arrive that
way; without it all ranks of tp hold the same tokens, so the layer scatters them first and gathers the results. Shared
experts are an ordinary MLP sharded over tp; with --moe-shared-expert-overlap they run while routed tokens are in
flight. With --overlap-moe-expert-parallel-comm another microbatch computes meanwhile (parallel/overlap_threads.py).

LatentMoE (--moe-latent-size): tokens are projected to fewer channels before dispatch, and results projected back
after combine; router and shared experts use the full hidden size. Every rank projects the tokens that it dispatches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from moe_trainer.layers.init import hidden_init, residual_init
from moe_trainer.layers.layer_factory import LayerFactory
from moe_trainer.layers.pass_inputs import PLAIN_PASS, PassInputs
from moe_trainer.memory.paged_stash import StashGroup, join_stash
from moe_trainer.moe.capacity import expert_capacity
from moe_trainer.moe.cloning import CloneRouting, ExpertCloner
from moe_trainer.moe.dispatch.base import DispatchHints, DispatchState, KnownCounts, TokenDispatcher
from moe_trainer.moe.experts import Experts, SharedExperts
from moe_trainer.moe.padding import pad_routing
from moe_trainer.moe.receive_buffer import ReceiveBudget, pad_to_buffer
from moe_trainer.moe.router import TopKRouter
from moe_trainer.parallel.mappings import gather_rows_replicated, scatter_rows_to_group
from moe_trainer.parallel.overlap_threads import yield_point
from moe_trainer.parallel.state import Group, ParallelState


@dataclass(frozen=True)
class RoutingOutput:
    """Router output and state before token_dispatch.

    Attributes:
        shape: of this rank's tokens, [S, B, H].
        x_SBH: tokens as the experts read them; None if `state` is set, as probs_TE and routing_TE.
        probs_TE: routing probabilities.
        routing_TE: routing map.
        state: output of dispatch_preprocess, if that has run.
        shared_SBH: output of the shared experts, None if they run later.
    """

    shape: torch.Size
    x_SBH: Tensor | None
    probs_TE: Tensor | None
    routing_TE: Tensor | None
    state: DispatchState | None = None
    shared_SBH: Tensor | None = None


class MoELayer(nn.Module):
    """The MLP sublayer of a block, made of experts.

    Parameters (global names under `name`): router.weight, experts.local_experts.{e}.linear_fc1 / linear_fc2 (stacked in
    memory), shared_experts.linear_fc1 / linear_fc2 / gate_weight, fc1_latent_proj / fc2_latent_proj, and what
    multiplies the output (MoEArgs.output_projection).

    Attributes:
        dispatcher: shared by the layers of a model; set by `set_dispatcher` before the first forward pass.
        budget: of received tokens; None if the experts' buffers are as long as what is received.
        sent_tokens_P: routed tokens of this rank that the experts and clones of each rank of ep have received since the
            last read, after drops and with padding; int64 on the device. None without --moe-per-layer-logging, and
            without expert parallelism.
        cloned_tokens_2P: routed tokens of all ranks of tp_ep that clones have computed since the last read, by the rank
            of ep that hosts the clone and by the one whose expert it is; int64 on the device, None without clones.
    """

    def __init__(
        self,
        model: ModelArgs,
        moe: MoEArgs,
        ps: ParallelState,
        *,
        name: str,
        layer_number: int,
        factory: LayerFactory,
        sequence_parallel: bool = False,
        per_token_loss: bool = False,
    ):
        """Build the layer; `name` is global (decoder.layers.3.mlp), `layer_number` counts from 1, MTP layers last."""
        super().__init__()
        self.layer_number = layer_number
        self.router = (factory.router or TopKRouter)(
            model,
            moe,
            ps,
            f"{name}.router",
            layer_number,
            per_token_loss=per_token_loss,
            stream=factory.stream,
            activations=factory.activations,
        )
        quantization = factory.precision if moe.moe_router_padding_for_quantization else None
        self.capacity = moe.moe_expert_capacity_factor if moe.moe_pad_expert_input_to_capacity else None
        self.drops_tokens = moe.moe_expert_capacity_factor is not None and moe.moe_expert_capacity_factor >= 0
        self.experts = Experts(
            model,
            moe,
            ps,
            f"{name}.experts",
            queue=factory.queue,
            activations=factory.activations,
            quantize=factory.quantize,
            kernels=factory.kernels,
            grouped_linear=factory.grouped_linear,
            expert_mlp=factory.expert_mlp,
        )
        self.padding_multiple = 1
        if quantization is not None:
            multiple = 1 if self.experts.pipeline is None else self.experts.pad_multiple
            self.padding_multiple = max(quantization.recipe.alignment, multiple)
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if moe.moe_latent_size is not None:
            self._build_latent_projections(model, moe.moe_latent_size, ps, name, factory)
        self.projection_name = moe.output_projection
        if self.projection_name is not None:
            projection = factory.replicated_linear(
                model.hidden_size,
                model.hidden_size,
                name=f"{name}.{self.projection_name}",
                init=hidden_init(model),
                group=ps.tp,
                bias=False,
                sequence_parallel=True,  # as below
            )
            self.add_module(self.projection_name, projection)
        self.shared_experts = None
        if moe.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExperts(model, moe, ps, f"{name}.shared_experts", factory, sequence_parallel)
        self.overlap_shared = self.shared_experts is not None and moe.moe_shared_expert_overlap
        self.dispatcher: TokenDispatcher | None = None
        self.budget = None
        if moe.moe_expert_rank_capacity_factor is not None:
            self.budget = ReceiveBudget(
                f"{name}.experts", moe.moe_expert_rank_capacity_factor, moe.moe_router_topk, ps.etp.size
            )
        self.cloner, self.sent_tokens_P, self.cloned_tokens_2P = None, None, None
        if moe.moe_clone_hot_experts and ps.ep.size > 1:
            self.cloner = ExpertCloner(ps, moe.num_experts, moe.moe_clone_hot_experts)
        self.overlap_executor, self.queue, self.activations, self.graphs = (
            factory.overlap_executor,
            factory.queue,
            factory.activations,
            factory.graphs,
        )
        # the group over which tokens must be scattered, because all its ranks hold the same ones
        self.replicas = Group.single("tp", ps.tp.ranks[ps.tp.rank]) if sequence_parallel else ps.tp

    def _build_latent_projections(
        self, model: ModelArgs, latent: int, ps: ParallelState, name: str, factory: LayerFactory
    ) -> None:
        # tokens differ between ranks of tp, with or without sequence parallelism between blocks
        options = {"group": ps.tp, "bias": model.add_bias_linear, "sequence_parallel": True}
        self.fc1_latent_proj = factory.replicated_linear(
            model.hidden_size,
            latent,
            name=f"{name}.fc1_latent_proj",
            init=hidden_init(model),
            save_original_input=True,  # the router saves it too
            **options,
        )
        self.fc2_latent_proj = factory.replicated_linear(
            latent, model.hidden_size, name=f"{name}.fc2_latent_proj", init=residual_init(model), **options
        )

    def draw_forced_logits(self, x_SBH: Tensor) -> tuple[Tensor, ...]:
        """Draw random logits for the tokens that this rank routes, if the router forces them; else return nothing.

        This happens outside captured parts, which take them as an input: a graph cannot use a tensor-parallel rank's
        random stream.
        """
        num_tokens = x_SBH.shape[0] * x_SBH.shape[1] // self.replicas.size
        forced_TE = self.router.draw_forced_logits(num_tokens, x_SBH.device)
        return () if forced_TE is None else (forced_TE,)

    def forward(
        self,
        x_SBH: Tensor | None,
        inputs: PassInputs = PLAIN_PASS,
        routed: RoutingOutput | None = None,
    ) -> Tensor:
        """Run the layer.

        Args:
            x_SBH: input; with `routed` only overlapped shared experts read it.
            inputs: what the router reads.
            routed: output of `route`, if that has run.

        Raises:
            ValueError: without sequence parallelism, if tp does not divide S.

        Shapes: x_SBH [S, B, hidden] -> y_SBH.
        """
        if routed is None:
            routed = self._route_tokens(x_SBH, inputs)
        if self.activations.mlp_chunks == 1:
            y_SBH, shared_SBH = self._run_routed(routed, x_SBH)
        else:
            tables = (table.unflatten(0, routed.shape[:2]) for table in (routed.probs_TE, routed.routing_TE))
            y_SBH = self.activations.run_in_chunks("moe", self._run_chunk, routed.x_SBH, *tables)
            shared_SBH = routed.shared_SBH
        y_SBH = gather_rows_replicated(y_SBH, self.replicas)
        if self.shared_experts is None:
            return y_SBH
        return y_SBH + (self._run_shared(x_SBH) if shared_SBH is None else shared_SBH)

    def _run_chunk(self, x_SBH: Tensor, probs_SBE: Tensor, routing_SBE: Tensor) -> Tensor:
        """Run the experts on a chunk of the sequence. It was routed with all tokens, so balancing sees no chunks."""
        probs_TE, routing_TE = probs_SBE.flatten(0, 1), routing_SBE.flatten(0, 1)
        if self._pads_routing:
            routing_TE = pad_routing(routing_TE, self.padding_multiple)
        return self._run_routed(RoutingOutput(x_SBH.shape, x_SBH, probs_TE, routing_TE), None)[0]

    def _run_routed(self, routed: RoutingOutput, x_SBH: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Run dispatch, experts and combine.

        Returns:
            The results of this rank's tokens, and those of the shared experts, None if they have not run.
        """
        dispatcher, clone_routing, state, shared_SBH = self.dispatcher, None, routed.state, routed.shared_SBH
        if state is None:
            probs_TE, routing_TE = routed.probs_TE, routed.routing_TE
            known = self._known_counts(routed.shape)
            if self.cloner is not None:
                clone_routing, known = self.activations.cached_for_recompute(lambda: self._plan_clones(routing_TE))
                probs_TE, routing_TE = clone_routing.apply(probs_TE, routing_TE)
            self._count_sent_tokens(routing_TE)
            hints = DispatchHints(
                None if clone_routing is None else clone_routing.expert_V,
                known,
                self.captures_experts,
                *self._fixed_buffer(routed.shape),
            )
            state = dispatcher.dispatch_preprocess(routed.x_SBH.flatten(0, 1), probs_TE, routing_TE, hints)
        state = dispatcher.start_token_dispatch(state, self.activations.cached_for_recompute)
        if self.overlap_shared:
            shared_SBH = self._run_shared(x_SBH)
        x_RH, probs_R = yield_point(self.overlap_executor, self.queue, state.x_RH, state.probs_R)
        state = dispatcher.finish_token_dispatch(replace(state, x_RH=x_RH, probs_R=probs_R))
        state = dispatcher.dispatch_postprocess(state)
        y_RH, group = self._run_experts(state, routed.shape[0] * routed.shape[1], clone_routing)
        y_RH, handle = dispatcher.start_token_combine(dispatcher.combine_preprocess(y_RH, state), state)
        (y_RH,) = yield_point(self.overlap_executor, self.queue, y_RH)
        y_TH = dispatcher.combine_postprocess(dispatcher.finish_token_combine(y_RH, handle, state), state)
        y_TH = join_stash(y_TH, group)
        y_SBH = y_TH.view(*routed.shape[:2], y_TH.shape[1])
        if self.fc2_latent_proj is not None:
            y_SBH = self.fc2_latent_proj(y_SBH)
        if self.projection_name is not None:
            y_SBH = self.get_submodule(self.projection_name)(y_SBH)
        return y_SBH, shared_SBH

    def route(self, x_SBH: Tensor, inputs: PassInputs = PLAIN_PASS) -> RoutingOutput:
        """Run the part that can be captured apart from the experts; nothing in it waits for other ranks' tokens.

        This is routing, dispatch_preprocess if that is captured too, and the shared experts unless they overlap the
        dispatch.
        """
        routed = self._route_tokens(x_SBH, inputs)
        known = self._known_counts(routed.shape)
        if known is not None and self.dispatcher.uses_known_counts and self.graphs.is_captured("moe_preprocess"):
            self._count_sent_tokens(routed.routing_TE)
            state = self.dispatcher.dispatch_preprocess(
                routed.x_SBH.flatten(0, 1),
                routed.probs_TE,
                routed.routing_TE,
                DispatchHints(None, known, True, *self._fixed_buffer(routed.shape)),
            )
            routed = RoutingOutput(routed.shape, None, None, None, state)
        if self.shared_experts is not None and not self.overlap_shared:
            routed = replace(routed, shared_SBH=self._run_shared(x_SBH))
        return routed

    @property
    def routing_modules(self) -> list[nn.Module]:
        """Modules whose parameters `route` reads."""
        modules = [self.router, self.fc1_latent_proj, None if self.overlap_shared else self.shared_experts]
        return [module for module in modules if module is not None]

    def _route_tokens(self, x_SBH: Tensor, inputs: PassInputs) -> RoutingOutput:
        x_SBH = scatter_rows_to_group(x_SBH, self.replicas)
        probs_TE, routing_TE = self.router(x_SBH, inputs)
        if self._pads_routing and self.activations.mlp_chunks == 1:
            routing_TE = pad_routing(routing_TE, self.padding_multiple)
        shape = x_SBH.shape
        if self.fc1_latent_proj is not None:
            x_SBH = self.fc1_latent_proj(x_SBH)
        return RoutingOutput(shape, x_SBH, probs_TE, routing_TE)

    @property
    def _pads_routing(self) -> bool:
        return self.padding_multiple > 1 and self.dispatcher.supports_routing_padding

    def _known_counts(self, shape: torch.Size) -> KnownCounts | None:
        """Return what is known of the counts before routing, for dispatchers that use it."""
        num_tokens = shape[0] * shape[1]
        if self._pads_routing or self.cloner is not None:
            return None
        if self.capacity is not None:
            per_expert = expert_capacity(num_tokens, self.router.topk, self.router.num_experts, self.capacity)
            return KnownCounts(per_expert * self.router.num_experts, per_expert)
        if self.drops_tokens or not self.dispatcher.uses_known_counts:
            return None
        return KnownCounts(num_tokens * self.router.topk)

    def set_dispatcher(self, dispatcher: TokenDispatcher) -> str | None:
        """Set the dispatcher. Return why token counts are on the host in spite of a budget, None if they need not be.

        Raises:
            ValueError: if a CUDA graph holds dropless experts whose counts are on the host.
        """
        self.dispatcher, device, problem = dispatcher, self.router.weight.device, None
        ep_size = self.router.ps.ep.size
        if self.router.moe.moe_per_layer_logging and ep_size > 1:
            self.sent_tokens_P = torch.zeros(ep_size, dtype=torch.int64, device=device)
        if self.cloner is not None:
            self.cloned_tokens_2P = torch.zeros(2, ep_size, dtype=torch.int64, device=device)
        if self.budget is not None:
            problem = dispatcher.fixed_buffer_problem or self.experts.why_host_counts()
            if problem is None and self.activations.stash is not None:
                problem = self.activations.stash.why_host_counts()
            self.budget.allows_device_counts = problem is None
            if problem is None:
                self.budget.allocate_flag(device)
        if self.captures_experts and self.capacity is None and not self.has_device_counts:
            raise ValueError(
                f"CUDA graphs of dropless experts need their token counts on the device, but they are on the host: "
                f"{problem or 'the dispatcher has no fixed receive buffer'}; leave the experts out of "
                "--cuda-graph-modules, or pad them to capacity"
            )
        return problem

    @property
    def has_device_counts(self) -> bool:
        """Whether token counts may stay on the device."""
        return self.budget is not None and self.budget.allows_device_counts

    @property
    def captures_experts(self) -> bool:
        """Whether a CUDA graph holds the experts, so the number of their tokens must be fixed."""
        return self.graphs.is_captured("moe", "layer", "iteration")

    def _fixed_buffer(self, shape: torch.Size) -> tuple[int | None, int]:
        """Return the size of the fixed receive buffer and the padding of experts in it; None, 1 without one."""
        budget = self.budget
        if budget is None or not budget.counts_on_device:
            return None, 1
        # cached, because a larger microbatch may have come when a region is recomputed
        size = self.activations.cached_for_recompute(lambda: budget.fixed_size(shape[0] * shape[1]))
        return size, self.experts.pad_multiple

    def _plan_clones(self, routing_TE: Tensor) -> tuple[CloneRouting, KnownCounts | None]:
        on_device = self.budget is not None and self.budget.counts_on_device
        clone_routing, known = self.cloner.plan(routing_TE, on_device)
        if self.training and torch.is_grad_enabled():
            self.cloner.count(clone_routing.plan, self.cloned_tokens_2P)
        return clone_routing, known if self.dispatcher.uses_known_counts else None

    def _count_sent_tokens(self, routing_TV: Tensor) -> None:
        """Count what the dispatcher sends, by destination, without a wait; columns are those of `CloneRouting`."""
        if self.sent_tokens_P is None or self.activations.is_recomputing:
            return
        if self.training and torch.is_grad_enabled():
            self.sent_tokens_P += routing_TV.unflatten(1, (len(self.sent_tokens_P), -1)).sum((0, 2))

    def _run_experts(
        self, state: DispatchState, num_tokens: int, clone_routing: CloneRouting | None
    ) -> tuple[Tensor, StashGroup | None]:
        """Run the local experts and clones on the received tokens; `num_tokens` is the number of local ones.

        Returns:
            The results, and the group of join_stash.
        """
        x_RH, probs_R, counts_e = state.x_RH, state.probs_R, state.tokens_per_expert_e
        clone_weights = None
        if clone_routing is not None:
            clone_weights = self.cloner.clone_weights(clone_routing, self.activations.is_saving)
            if clone_weights is None:
                counts_e = counts_e[: self.cloner.num_local]  # no slot has tokens, on any rank
        if self.budget is None:
            return self.experts(x_RH, probs_R, counts_e, clone_weights=clone_weights), None
        if isinstance(counts_e, Tensor):
            if not self.activations.is_recomputing:
                self.budget.note_overflow(state.overflow)
            with self.activations.stash_scope(
                x_RH.shape[0], counts_e.sum(0, keepdim=True), self.budget.balanced_size
            ) as group:
                return self.experts(x_RH, probs_R, counts_e, clone_weights=clone_weights), group
        num_received = x_RH.shape[0]
        needed = max(num_received, state.fixed_size if self.budget.allows_device_counts else 0)
        # cached, because the budget may have grown when a region is recomputed
        size = self.activations.cached_for_recompute(lambda: self.budget.size_for(num_tokens, needed))
        with self.activations.stash_scope(size, num_received, self.budget.balanced_size) as group:
            y_CH = self.experts(
                pad_to_buffer(x_RH, size), pad_to_buffer(probs_R, size), counts_e, size - num_received, clone_weights
            )
            return y_CH[:num_received], group

    def _run_shared(self, x_SBH: Tensor) -> Tensor:
        return self.activations.run_in_chunks("shared_experts", self.shared_experts, x_SBH)

    def named_state_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that a checkpoint stores, by global name: biases of the choice, table of hash routing."""
        for name, buffer in self.router.state_buffers():
            yield f"{self.router.name}.{name}", buffer

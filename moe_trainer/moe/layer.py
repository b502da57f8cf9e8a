"""One Mixture-of-Experts layer: route -> dispatch -> experts -> combine, plus shared experts.

Under tensor parallelism every rank routes and dispatches different tokens. With sequence parallelism they arrive that
way; without it all ranks of tp hold the same tokens, so the layer scatters them first and gathers the results. Shared
experts are an ordinary MLP sharded over tp; with --moe-shared-expert-overlap they run while routed tokens are in
flight. With --overlap-moe-expert-parallel-comm another microbatch computes meanwhile (parallel/overlap_threads.py).

How the experts receive their tokens (receive/), and which ranks compute the tokens of an expert (placement/), is chosen
when the layer is built.

LatentMoE (--moe-latent-size): tokens are projected to fewer channels before dispatch, and results projected back
after combine; router and shared experts use the full hidden size. Every rank projects the tokens that it dispatches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from arguments.model import ModelArgs
from arguments.moe import MoEArgs, is_padded_to_capacity
from moe_trainer.layers.init import hidden_init, residual_init
from moe_trainer.layers.layer_factory import LayerFactory
from moe_trainer.layers.pass_inputs import PLAIN_PASS, PassInputs
from moe_trainer.memory.paged_stash import join_stash
from moe_trainer.moe.dispatch.base import DispatchHints, DispatchState, TokenDispatcher
from moe_trainer.moe.experts import Experts, SharedExperts
from moe_trainer.moe.placement.build import build_placement
from moe_trainer.moe.placement.own import PlacedRouting
from moe_trainer.moe.receive.build import build_receive_policy
from moe_trainer.moe.receive.capacity import CountsFn, counts_before_routing, unknown_counts
from moe_trainer.moe.receive.padding import pad_routing, unpadded
from moe_trainer.moe.router import TopKRouter
from moe_trainer.parallel.mappings import gather_rows_replicated, scatter_rows_to_group
from moe_trainer.parallel.overlap_threads import yield_point
from moe_trainer.parallel.state import Group, ParallelState


@dataclass(frozen=True)
class _RoutingOutput:
    """Router output and state before token_dispatch.

    Attributes:
        shape: of this rank's tokens, [S, B, H].
        shared_SBH: output of the shared experts, None if they run later.
    """

    shape: torch.Size
    shared_SBH: Tensor | None


@dataclass(frozen=True)
class RoutedTokens(_RoutingOutput):
    """Output of the router.

    Attributes:
        x_SBH: tokens as the experts read them.
        probs_TE: routing probabilities.
        routing_TE: routing map.
    """

    x_SBH: Tensor
    probs_TE: Tensor
    routing_TE: Tensor


@dataclass(frozen=True)
class PreprocessedTokens(_RoutingOutput):
    """Output of dispatch_preprocess, in `state`."""

    state: DispatchState


RoutingOutput = RoutedTokens | PreprocessedTokens


class MoELayer(nn.Module):
    """The MLP sublayer of a block, made of experts.

    Parameters (global names under `name`): router.weight, experts.local_experts.{e}.linear_fc1 / linear_fc2 (stacked in
    memory), shared_experts.linear_fc1 / linear_fc2 / gate_weight, fc1_latent_proj / fc2_latent_proj, and what
    multiplies the output (MoEArgs.output_projection).

    Attributes:
        dispatcher: shared by the layers of a model; set by `set_dispatcher` before the first forward pass.
        receive: how the experts receive tokens.
        placement: which ranks compute an expert's tokens.
        known_counts: what the host knows of the counts before routing.
        pad_routing: pads the tokens of each expert for quantized GEMMs, if the dispatcher sends them padded.
        sent_tokens_P: routed tokens of this rank that each rank of ep has received since the last read, after drops and
            with padding; int64 on the device. None without --moe-per-layer-logging, and without expert parallelism.
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
        self.experts = Experts(model, moe, ps, f"{name}.experts", factory)
        self.padding_multiple = 1
        if quantization is not None:
            multiple = 1 if self.experts.pipeline is None else self.experts.pad_multiple
            self.padding_multiple = max(quantization.recipe.alignment, multiple)
        self.fc1_latent_proj: nn.Module | None = None
        self.fc2_latent_proj: nn.Module | None = None
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
        self.shared_experts: SharedExperts | None = None
        if moe.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = SharedExperts(model, moe, ps, f"{name}.shared_experts", factory, sequence_parallel)
        self.overlap_shared = self.shared_experts is not None and moe.moe_shared_expert_overlap
        self.dispatcher: TokenDispatcher
        self.receive = build_receive_policy(moe, f"{name}.experts", ps.etp.size, factory.activations)
        self.placement = build_placement(moe, ps)
        self.known_counts: CountsFn = unknown_counts
        self.pad_routing: Callable[[Tensor], Tensor] = unpadded
        self.sent_tokens_P: Tensor | None = None
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
        x_SBH: Tensor,
        inputs: PassInputs = PLAIN_PASS,
        routed: RoutingOutput | None = None,
    ) -> Tensor:
        """Run the layer.

        Args:
            x_SBH: input; with `routed` only overlapped shared experts read it, without them it may be any tensor.
            inputs: what the router reads.
            routed: output of `route`, if that has run.

        Raises:
            ValueError: without sequence parallelism, if tp does not divide S.

        Shapes: x_SBH [S, B, hidden] -> y_SBH.
        """
        if routed is None:
            routed = self._route_tokens(x_SBH, inputs)
        if self.activations.mlp_chunks > 1 and isinstance(routed, RoutedTokens):
            tables = (table.unflatten(0, routed.shape[:2]) for table in (routed.probs_TE, routed.routing_TE))
            y_SBH = self.activations.run_in_chunks("moe", self._run_chunk, routed.x_SBH, *tables)
            shared_SBH = routed.shared_SBH
        else:
            y_SBH, shared_SBH = self._run_routed(routed, x_SBH)
        y_SBH = gather_rows_replicated(y_SBH, self.replicas)
        if shared_SBH is None:
            shared_SBH = self._run_shared(x_SBH)
        return y_SBH if shared_SBH is None else y_SBH + shared_SBH

    def _run_chunk(self, x_SBH: Tensor, probs_SBE: Tensor, routing_SBE: Tensor) -> Tensor:
        """Run the experts on a chunk of the sequence. It was routed with all tokens, so balancing sees no chunks."""
        probs_TE, routing_TE = probs_SBE.flatten(0, 1), routing_SBE.flatten(0, 1)
        routed = RoutedTokens(x_SBH.shape, None, x_SBH, probs_TE, self.pad_routing(routing_TE))
        return self._run_routed(routed, x_SBH)[0]

    def _run_routed(self, routed: RoutingOutput, x_SBH: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run dispatch, experts and combine.

        Args:
            routed: what the experts read.
            x_SBH: what overlapped shared experts read.

        Returns:
            The results of this rank's tokens, and those of the shared experts, None if they have not run.
        """
        dispatcher, plan, shared_SBH = self.dispatcher, None, routed.shared_SBH
        num_tokens = routed.shape[0] * routed.shape[1]
        if isinstance(routed, PreprocessedTokens):
            state = routed.state
        else:
            placed = self.placement.place(
                routed.probs_TE,
                routed.routing_TE,
                self.known_counts(num_tokens),
                counts_on_device=self.receive.counts_on_device,
                is_training=self.training and torch.is_grad_enabled(),
                cache_fn=self.activations.cached_for_recompute,
            )
            plan, state = placed.plan, self._preprocess(routed, placed, self.captures_experts)
        state = dispatcher.start_token_dispatch(state, self.activations.cached_for_recompute)
        if self.overlap_shared:
            shared_SBH = self._run_shared(x_SBH)
        x_RH, probs_R = yield_point(self.overlap_executor, self.queue, state.x_RH, state.probs_R)
        state = dispatcher.finish_token_dispatch(replace(state, x_RH=x_RH, probs_R=probs_R))
        state = dispatcher.dispatch_postprocess(state)
        weights = self.placement.weights(plan, self.activations.is_saving)
        y_RH, group = self.receive.run(self.experts, state, num_tokens, weights)
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
        tokens = self._route_tokens(x_SBH, inputs)
        routed: RoutingOutput = tokens
        known = self.known_counts(tokens.shape[0] * tokens.shape[1])
        if known is not None and self.dispatcher.uses_known_counts and self.graphs.is_captured("moe_preprocess"):
            placed = PlacedRouting(tokens.probs_TE, tokens.routing_TE, known)
            routed = PreprocessedTokens(tokens.shape, None, self._preprocess(tokens, placed, True))
        return routed if self.overlap_shared else replace(routed, shared_SBH=self._run_shared(x_SBH))

    @property
    def routing_modules(self) -> list[nn.Module]:
        """Modules whose parameters `route` reads."""
        modules = [self.router, self.fc1_latent_proj, None if self.overlap_shared else self.shared_experts]
        return [module for module in modules if module is not None]

    def _route_tokens(self, x_SBH: Tensor, inputs: PassInputs) -> RoutedTokens:
        x_SBH = scatter_rows_to_group(x_SBH, self.replicas)
        probs_TE, routing_TE = self.router(x_SBH, inputs)
        if self.activations.mlp_chunks == 1:
            routing_TE = self.pad_routing(routing_TE)
        shape = x_SBH.shape
        if self.fc1_latent_proj is not None:
            x_SBH = self.fc1_latent_proj(x_SBH)
        return RoutedTokens(shape, None, x_SBH, probs_TE, routing_TE)

    def _preprocess(self, routed: RoutedTokens, placed: PlacedRouting, is_captured: bool) -> DispatchState:
        """Count what is sent, and sort it by destination."""
        self._count_sent_tokens(placed.routing_TV)
        buffer = self.receive.fixed_buffer(routed.shape[0] * routed.shape[1], self.experts)
        hints = DispatchHints(placed.expert_V, placed.known, is_captured, *buffer)
        return self.dispatcher.dispatch_preprocess(
            routed.x_SBH.flatten(0, 1), placed.probs_TV, placed.routing_TV, hints
        )

    def set_dispatcher(self, dispatcher: TokenDispatcher) -> str | None:
        """Set the dispatcher. Return why token counts are on the host in spite of a budget, None if they need not be.

        Raises:
            ValueError: if a CUDA graph holds dropless experts whose counts are on the host.
        """
        self.dispatcher, device, moe = dispatcher, self.router.weight.device, self.router.moe
        ep_size = self.router.ps.ep.size
        if moe.moe_per_layer_logging and ep_size > 1:
            self.sent_tokens_P = torch.zeros(ep_size, dtype=torch.int64, device=device)
        problem = self.receive.set_dispatcher(dispatcher, self.experts, device)
        self.placement.set_dispatcher(dispatcher, device)
        pads = self.padding_multiple > 1 and dispatcher.supports_routing_padding
        self.pad_routing = partial(pad_routing, multiple=self.padding_multiple) if pads else unpadded
        is_padded = is_padded_to_capacity(moe)
        self.known_counts = unknown_counts
        if not pads and not self.placement.declaration.is_planned and (is_padded or dispatcher.uses_known_counts):
            self.known_counts = counts_before_routing(moe, self.router.topk, self.router.num_experts)
        if self.captures_experts and not is_padded and not self.receive.has_device_counts:
            raise ValueError(
                f"CUDA graphs of dropless experts need their token counts on the device, but they are on the host: "
                f"{problem or 'the dispatcher has no fixed receive buffer'}; leave the experts out of "
                "--cuda-graph-modules, or pad them to capacity"
            )
        return problem

    @property
    def captures_experts(self) -> bool:
        """Whether a CUDA graph holds the experts, so the number of their tokens must be fixed."""
        return self.graphs.is_captured("moe", "layer", "iteration")

    def _count_sent_tokens(self, routing_TV: Tensor) -> None:
        """Count what the dispatcher sends, by destination, without a wait; columns are those of PlacedRouting."""
        if self.sent_tokens_P is None or self.activations.is_recomputing:
            return
        if self.training and torch.is_grad_enabled():
            self.sent_tokens_P += routing_TV.unflatten(1, (len(self.sent_tokens_P), -1)).sum((0, 2))

    def _run_shared(self, x_SBH: Tensor) -> Tensor | None:
        """Return the output of the shared experts; None without them."""
        if self.shared_experts is None:
            return None
        return self.activations.run_in_chunks("shared_experts", self.shared_experts, x_SBH)

    def named_state_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that a checkpoint stores, by global name: biases of the choice, table of hash routing."""
        for name, buffer in self.router.state_buffers():
            yield f"{self.router.name}.{name}", buffer

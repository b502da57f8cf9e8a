"""MoEArgs: experts, router, balancing, dispatch.

A field is a flag: its name is Megatron's destination, its annotation the type and the choices, the string below it
the help text. schema.py turns fields into options.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from arguments.flag_properties import MAX_EXPERTS, MAX_SIZE, LayerNumbers
from arguments.mechanisms.dispatchers import BACKENDS, TYPES
from arguments.mechanisms.selection_kinds.declaration import SelectionCapability
from arguments.mechanisms.selections import BALANCING_KINDS, expert_split, output_slices
from arguments.mechanisms.sublayer_kinds.declaration import SublayerCapability
from arguments.schema import Section, flag, layer_pattern

if TYPE_CHECKING:
    BalancingType = str
    DispatcherType = str
    FlexBackend = str
else:
    BalancingType, DispatcherType, FlexBackend = Literal[BALANCING_KINDS], Literal[TYPES], Literal[tuple(BACKENDS)]


_FINERMOE = "finermoe_intermediate_granularity or finermoe_output_granularity"
_HYBRIDEP = "moe_flex_dispatcher_backend=hybridep"


def is_padded_to_capacity(moe: Any) -> bool:
    """Return whether every expert gets as many tokens as its capacity; `moe` has the fields of MoEArgs."""
    return moe.moe_pad_expert_input_to_capacity and moe.moe_expert_capacity_factor is not None


@dataclass(frozen=True, repr=False, eq=False)
class MoEArgs(Section):
    """Experts, router, balancing, dispatch."""

    # ---- experts
    num_experts: int | None = flag(None, restore="always", bounds=">=0", most=MAX_EXPERTS, role="size")
    """Number of routed experts of an MoE layer. Unset or 0: a dense model."""
    moe_layer_freq: int | list[int] = flag(
        1, parse=layer_pattern, restore="always", needs="num_experts", role="size", layers="kinds"
    )
    """Layers with experts: N means every N-th from the first on, a pattern such as ([0]*3+[1]*58) has 1 for each of
    them."""
    moe_ffn_hidden_size: int | None = flag(
        None, restore="always", bounds=">0", most=MAX_SIZE, unset="ffn_hidden_size", role="size"
    )
    """Width of one expert. Unset: --ffn-hidden-size."""
    moe_shared_expert_intermediate_size: int | None = flag(
        None, restore="always", needs="num_experts", most=MAX_SIZE, role="size"
    )
    """Total width of the shared experts (number of them x width of one). Unset: none."""
    moe_shared_expert_gate: bool = flag(
        False, restore="always", needs=("num_experts", "moe_shared_expert_intermediate_size")
    )
    """Multiply the shared expert's output by a sigmoid gate of the token."""
    moe_shared_expert_overlap: bool = flag(
        False, restore="never", needs=("num_experts", "moe_shared_expert_intermediate_size"), role="method"
    )
    """Compute the shared expert while tokens are exchanged between expert ranks."""
    moe_shared_expert_glu_interleave_size: int | None = flag(None, restore="never", bounds=">0")
    """Interleave gate and linear channels of the shared expert in blocks of this number of channels."""
    moe_mlp_glu_interleave_size: int | None = flag(
        None, restore="never", needs="use_transformer_engine_op_fuser", bounds=">0"
    )
    """Interleave gate and linear channels of the routed experts in blocks of this number of channels."""
    moe_latent_size: int | None = flag(None, restore="always", role="size")
    """Project tokens down to this width before the routed experts and up again after them (LatentMoE)."""
    finermoe_intermediate_granularity: int | None = flag(
        None, "--finermoe-intermediate-granularity", "--G-I", restore="always", bounds=">0", role="size"
    )
    """FineRMoE: number of experts that share the width of a dense layer (--ffn-hidden-size). A flag of this program, as
    the next three."""
    finermoe_output_granularity: int | None = flag(
        None, "--finermoe-output-granularity", "--G-O", restore="always", bounds=">0", role="size"
    )
    """FineRMoE: number of slices the output is split into; an expert computes one of them."""
    finermoe_intermediate_expansion: int = flag(
        0, "--finermoe-intermediate-expansion", "--R-I", restore="always", needs=_FINERMOE, bounds=">=0", role="size"
    )
    """FineRMoE: number of dense-layer widths in a group of experts. 0: --finermoe-intermediate-granularity."""
    finermoe_output_expansion: int = flag(
        0, "--finermoe-output-expansion", "--R-O", restore="always", needs=_FINERMOE, bounds=">=0", role="size"
    )
    """FineRMoE: number of expert groups that a slice of the output chooses from. 0: the number of slices."""
    moe_concat_proj: bool = flag(False, restore="always", needs=_FINERMOE)
    """FineRMoE: multiply the concatenated slices by a square matrix, before the shared expert is added. A flag of
    FineRMoE's code."""
    moe_apply_probs_on_input: bool = flag(False, restore="always", needs="num_experts")
    """Multiply the router's probability into the expert's input instead of its activation (top-1 only)."""
    moe_grouped_gemm: bool = flag(False, restore="storage", needs="num_experts", role="method")
    """Compute all local experts in one grouped GEMM."""
    moe_use_grouped_tensor: bool = flag(False, restore="never")
    """Store expert weights as TransformerEngine grouped tensors."""
    moe_single_grouped_weight: bool = flag(False, restore="never")
    """Store all local expert weights in one tensor."""
    moe_single_grouped_bias: bool = flag(False, restore="never")
    """Store all local expert biases in one tensor."""

    # ---- router
    moe_router_topk: int = flag(2, restore="always", needs="num_experts", role="size")
    """Number of routed experts that each token chooses."""
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = flag(
        "softmax", restore="always", needs="num_experts", demands=SelectionCapability.OTHER_SCORES
    )
    """Function that turns router logits into scores."""
    moe_router_pre_softmax: bool = flag(
        False, restore="always", needs="num_experts", demands=SelectionCapability.PRE_SOFTMAX
    )
    """Take the softmax over all experts before choosing the top k, instead of over the chosen ones."""
    moe_router_sparsemixer_jitter: float | None = flag(
        None, restore="always", needs="num_experts", bounds=">=0", demands=SelectionCapability.LARGEST_LOGITS
    )
    """Weigh each of the two chosen experts by a separate softmax (SparseMixer, Phi-3.5-MoE): over the logits within
    twice this relative distance of it, without the better expert. Unset: one softmax. A flag of this program."""
    moe_router_topk_scaling_factor: float | None = flag(
        None, restore="always", needs="num_experts", bounds=">0", unset=1.0, demands=SelectionCapability.SCALING_FACTOR
    )
    """Multiply the chosen probabilities by this factor. Unset: 1."""
    moe_router_num_groups: int | None = flag(
        None,
        restore="always",
        needs=("num_experts", "moe_router_group_topk"),
        bounds=">0",
        role="size",
        demands=SelectionCapability.GROUPS,
    )
    """Number of groups that the experts are divided into for group-limited routing."""
    moe_router_group_topk: int | None = flag(
        None, restore="always", needs="num_experts", role="size", demands=SelectionCapability.GROUPS
    )
    """Number of groups that a token may choose its experts from."""
    moe_router_group_score_topk: int | None = flag(
        None,
        restore="always",
        needs=("num_experts", "moe_router_group_topk"),
        bounds=">0",
        role="size",
        demands=SelectionCapability.GROUPS,
    )
    """Number of a group's best experts whose scores sum to the score of the group; 1 as in DeepSeek-V2. Unset:
    --moe-router-topk divided by --moe-router-group-topk, as in Megatron-LM. A flag of this program."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = flag(None, restore="unless given", needs="num_experts")
    """Format of the router's GEMM and scores. Unset: the format of the activations."""
    moe_router_enable_expert_bias: bool = flag(
        False, restore="always", needs="num_experts", demands=SelectionCapability.EXPERT_BIAS
    )
    """Balance without a loss: a bias per expert, which affects the choice only, follows the load."""
    moe_router_bias_update_rate: float = flag(
        0.001, restore="never", needs="moe_router_enable_expert_bias", bounds=">=0"
    )
    """Amount by which the expert bias changes after every global batch."""
    moe_router_quantile_balancing_ema: float = flag(
        0.0, restore="never", needs="moe_router_load_balancing_type=quantile_balancing", bounds="[0,1]"
    )
    """Quantile balancing: share of the old bias in the new one after every global batch. 0: the last estimate alone."""
    moe_router_force_load_balancing: bool = flag(False, restore="never", needs="num_experts", role="noise")
    """Replace router logits by random ones, for benchmarks."""
    moe_router_force_biased: float | None = flag(None, restore="never", needs="num_experts", bounds="any", role="noise")
    """Skew the routing for benchmarks: standard deviation of a random bias per expert, drawn in every step (once if
    negative)."""
    moe_n_hash_layers: int = flag(
        0,
        restore="always",
        needs="num_experts",
        bounds=">=0",
        role="size",
        demands=SelectionCapability.HASH_LAYERS,
        layers=LayerNumbers("experts", unset=0, entry=lambda number, first: int(number <= first), counts=True),
    )
    """Number of first layers, dense ones included, that choose experts by token id from a fixed table instead of by
    score (DeepSeek-V4). The weights of the chosen experts still come from the router."""
    moe_input_jitter_eps: float | None = flag(None, restore="never", needs="num_experts", bounds=">=0", role="noise")
    """Multiply the router's input by uniform noise from 1 - X to 1 + X in training."""
    moe_router_padding_for_quantization: bool = flag(False, restore="never", needs="num_experts", role="quantization")
    """Pad each expert's token count to the block size of the quantized GEMM."""
    moe_router_padding_for_fp8: bool = flag(False, restore="never", role="quantization")
    """Deprecated spelling of --moe-router-padding-for-quantization."""
    moe_enable_routing_replay: bool = flag(
        False, restore="never", needs="moe_routing_replay_path", role="size", demands=SelectionCapability.REPLAY
    )
    """Take the experts of every token from outside; see --moe-routing-replay-path."""
    moe_routing_replay_path: str | None = flag(None, restore="never", needs="num_experts", path="read", role="size")
    """Directory with the experts of every token: a routing trace of an equal run, or arrays per sample (npz or
    safetensors). Weights of experts still come from the router. A flag of this program."""

    # ---- balancing and capacity
    moe_router_load_balancing_type: BalancingType | list[BalancingType] = flag(
        "aux_loss", restore="always", needs="num_experts"
    )
    """Load-balancing method, or several; each has its own --moe-aux-loss-coeff."""
    moe_aux_loss_coeff: float | list[float] = flag(0.0, restore="never", needs="num_experts", bounds=">=0")
    """Weight of the balancing loss in the total loss; one per load-balancing method."""
    moe_z_loss_coeff: float | None = flag(None, restore="never", needs="num_experts", bounds=">=0")
    """Weight of the z-loss, which keeps router logits small. Unset: none."""
    moe_expert_capacity_factor: float | None = flag(None, restore="capacity", needs="num_experts", bounds="any")
    """Number of tokens that an expert accepts, as a multiple of an even share; the others are dropped. Unset or
    negative: no limit."""
    moe_pad_expert_input_to_capacity: bool = flag(False, restore="capacity", needs="num_experts")
    """Pad every expert's input to its capacity."""
    moe_token_drop_policy: Literal["probs", "position"] = flag(
        "probs", restore="capacity", needs=("num_experts", "moe_expert_capacity_factor")
    )
    """Tokens to drop beyond the capacity: the least probable (probs) or the last ones (position)."""
    moe_expert_rank_capacity_factor: float | None = flag(
        None, restore="never", needs="num_experts", bounds=">0", role="method"
    )
    """Number of tokens that the receive buffer of a rank holds, as a multiple of an even share; the buffer grows if
    more arrive, and no token is lost. Token counts stay on the device in training, and no MoE layer
    synchronizes with the host; an iteration whose buffer was too small is rerun."""
    moe_clone_hot_experts: int = flag(0, restore="never", bounds=">=0", role="method")
    """Number of experts a rank hosts for overloaded ranks: clones of hot experts, planned for every microbatch (ECHO).
    Same results, balanced load. 0: none. A flag of this program."""
    moe_per_layer_logging: bool = flag(
        False,
        restore="never",
        needs=("num_experts", "save or tensorboard_dir or metrics_file or wandb_project or expert_model_parallel_size"),
        role="output",
    )
    """Write balancing losses of every layer to TensorBoard, and routing statistics (loads, entropy, dead experts,
    drops, bias drift, tokens between expert-parallel ranks) to metrics.jsonl and the dashboard."""

    # ---- dispatch
    moe_token_dispatcher_type: DispatcherType = flag(
        "allgather", restore="capacity", needs="num_experts", role="method"
    )
    """Method of sending tokens to the ranks that hold their experts: gather all, all-to-all, or a library (flex)."""
    moe_flex_dispatcher_backend: FlexBackend = flag(
        "deepep", restore="never", needs="moe_token_dispatcher_type=flex", role="method"
    )
    """Communication library of --moe-token-dispatcher-type flex. hierarchical, of this program, needs none: it sends a
    token once to every node that holds one of its experts, and distributes it there."""
    moe_hierarchical_domain_size: int | None = flag(
        None,
        restore="never",
        needs=("moe_token_dispatcher_type=flex", "moe_flex_dispatcher_backend=hierarchical"),
        bounds=">0",
    )
    """Number of consecutive ranks with fast links between them, for --moe-flex-dispatcher-backend hierarchical. Unset:
    the environment's NVLINK_DOMAIN_SIZE, else the launcher's ranks per node. A flag of this program."""
    moe_enable_deepep: bool = flag(False, restore="never")
    """Deprecated spelling of --moe-flex-dispatcher-backend deepep."""
    moe_flex_dispatcher_num_sms: int | None = flag(
        None, restore="never", needs="moe_token_dispatcher_type=flex", bounds=">0"
    )
    """Number of streaming multiprocessors that the flex dispatcher may occupy."""
    moe_deepep_num_sms: int | None = flag(None, restore="never", bounds=">0")
    """Deprecated spelling of --moe-flex-dispatcher-num-sms."""
    moe_hybridep_num_sms: int | None = flag(None, restore="never", bounds=">0")
    """Deprecated spelling of --moe-flex-dispatcher-num-sms."""
    moe_hybridep_num_blocks_permute: int | None = flag(
        None, restore="never", needs=("moe_token_dispatcher_type=flex", _HYBRIDEP), bounds=">0"
    )
    """Number of thread blocks of HybridEP's permutation."""
    moe_hybridep_num_blocks_unpermute: int | None = flag(
        None, restore="never", needs=("moe_token_dispatcher_type=flex", _HYBRIDEP), bounds=">0"
    )
    """Number of thread blocks of HybridEP's inverse permutation."""
    moe_hybridep_num_sms_preprocessing: int = flag(
        108, restore="never", needs=("moe_token_dispatcher_type=flex", _HYBRIDEP), bounds=">0"
    )
    """Number of streaming multiprocessors of HybridEP's preprocessing."""
    moe_hybridep_pad_uneven_dispatch_inputs: bool = flag(
        False, restore="never", needs=("moe_token_dispatcher_type=flex", _HYBRIDEP)
    )
    """Pad ranks to equal token counts for HybridEP."""
    moe_permute_fusion_into_hybridep: bool = flag(
        False, restore="never", needs=("moe_token_dispatcher_type=flex", _HYBRIDEP)
    )
    """Let HybridEP permute tokens during the exchange."""
    moe_ncclep_zero_copy: bool = flag(
        False, restore="never", needs=("moe_token_dispatcher_type=flex", "moe_flex_dispatcher_backend=ncclep")
    )
    """Let the ncclep backend write directly into receive buffers in memory that is registered with NCCL; needs
    --moe-expert-rank-capacity-factor."""
    moe_dispatch_fwd_dtype: Literal["bf16", "mxfp8"] = flag(
        "bf16", restore="never", needs="num_experts", role="quantization"
    )
    """Format in which tokens are sent in the forward dispatch by alltoall and flex with deepep or hybridep."""
    moe_combine_bwd_dtype: Literal["bf16", "mxfp8"] = flag(
        "bf16", restore="never", needs="num_experts", role="quantization"
    )
    """Format in which gradients are sent in the backward of combine by alltoall and flex with deepep or hybridep."""
    moe_permute_fusion: bool = flag(False, restore="never", needs="num_experts")
    """Use fused kernels for the permutation of tokens."""
    moe_router_fusion: bool = flag(
        False, restore="never", needs="num_experts", demands=SelectionCapability.FUSED_KERNEL
    )
    """Use fused kernels for the router."""
    moe_paged_stash: bool = flag(False, restore="never", needs="num_experts", role="method")
    """Store expert activations in pages between forward and backward, so that only the tokens in use take memory. The
    memory is fixed after the first iteration; an iteration for which it is too small is repeated."""
    moe_paged_stash_page_size: int = flag(64, restore="never", needs="moe_paged_stash", bounds=">0", role="method")
    """Page size of --moe-paged-stash, in tokens."""
    moe_paged_stash_buffer_size_factor_cuda: float = flag(
        1.1, restore="never", needs="moe_paged_stash", bounds=">0", role="method"
    )
    """Size of the pages on the device, as a multiple of an even share of tokens of every layer in flight."""
    moe_paged_stash_buffer_size_factor_cpu: float = flag(
        0.0, restore="never", needs="moe_paged_stash", bounds=">=0", role="method"
    )
    """Size of the pages in pinned host memory, used when the device's run out, as a multiple of an even share of tokens
    of every layer in flight; 0: none."""
    moe_layer_recompute: bool = flag(False, restore="never")
    """Deprecated spelling of --recompute-modules moe."""

    # ---- upcycling
    moe_use_upcycling: bool = flag(
        False, restore="never", role="size", demands=(SelectionCapability.UPCYCLING, SublayerCapability.UPCYCLING)
    )
    """Turn the dense checkpoint of --load into a MoE model and save it before training."""
    moe_upcycling_granularity: int = flag(1, restore="never", needs="moe_use_upcycling", bounds=">0", role="size")
    """Number of experts that one dense feed-forward layer is split into."""
    moe_upcycling_expert_init: Literal["dense", "normal"] = flag(
        "dense", restore="never", needs="moe_use_upcycling", role="size"
    )
    """Weights of the routed experts that upcycling makes: of the dense layer, or random ones as the router's. A flag of
    this program."""

    # ---- routing traces
    moe_routing_trace_path: str | None = flag(None, restore="never", needs="num_experts", path="write", role="output")
    """Directory for a trace of routing decisions: the experts of every token in every iteration, one file per rank.
    Unset: no trace."""
    moe_routing_trace_max_training_iters: int | None = flag(
        None, restore="never", needs="moe_routing_trace_path", bounds=">0", role="output"
    )
    """Stop the trace after this many iterations of a start or resume."""
    moe_routing_trace_capture_logits: bool = flag(False, restore="never", needs="moe_routing_trace_path", role="output")
    """Put router logits into the trace, in bf16."""
    moe_routing_trace_capture_hidden_states: bool = flag(
        False, restore="never", needs="moe_routing_trace_path", role="output"
    )
    """Put the router's inputs into the trace, in bf16."""
    moe_routing_trace_dump_weights: bool = flag(False, restore="never", needs="moe_routing_trace_path", role="output")
    """Save the router's weights at the start of the trace next to it."""

    @property
    def expert_count(self) -> int:
        """Number of routed experts of an MoE layer; 0 of a dense model."""
        return self.num_experts or 0

    @property
    def output_projection(self) -> str | None:
        """Name of the square matrix that multiplies the output of a layer; None without one."""
        split = expert_split(self)
        return None if split is None or not getattr(self, split.projection) else split.projection_name

    def expert_widths(self, hidden_size: int) -> tuple[int, int]:
        """Return the widths of a routed expert's input and output: the model's, the latent's, or a slice."""
        width = self.moe_latent_size or hidden_size
        return width, width // output_slices(vars(self))

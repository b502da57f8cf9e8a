"""MoEArgs: experts, router, balancing, dispatch.

A field is a flag: its name is Megatron's destination, its annotation the type and the choices, the string under
it the help text. How a field becomes an option stands in schema.py.
"""

from dataclasses import dataclass
from typing import Literal

from arguments.schema import flag, layer_pattern


BalancingType = Literal[
    "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"
]


@dataclass(frozen=True)
class MoEArgs:
    """Experts, router, balancing, dispatch."""

    # ---- flags
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_shared_expert_overlap: bool = False
    moe_shared_expert_glu_interleave_size: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 2
    moe_enable_routing_replay: bool = False
    moe_router_padding_for_quantization: bool = False
    moe_router_padding_for_fp8: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_pre_softmax: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 0.001
    moe_router_quantile_balancing_ema: float = 0.0
    moe_router_force_load_balancing: bool = False
    moe_router_force_biased: float | None = None
    moe_grouped_gemm: bool = False
    moe_use_grouped_tensor: bool = False
    moe_single_grouped_weight: bool = False
    moe_single_grouped_bias: bool = False
    moe_z_loss_coeff: float | None = None
    moe_input_jitter_eps: float | None = None
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "allgather"
    moe_enable_deepep: bool = False
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep", "ncclep"] = "deepep"
    moe_permute_fusion_into_hybridep: bool = False
    moe_hybridep_pad_uneven_dispatch_inputs: bool = False
    moe_per_layer_logging: bool = False
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    moe_layer_recompute: bool = False
    moe_permute_fusion: bool = False
    moe_router_fusion: bool = False
    moe_apply_probs_on_input: bool = False
    moe_latent_size: int | None = None
    moe_flex_dispatcher_num_sms: int | None = None
    moe_deepep_num_sms: int | None = None
    moe_hybridep_num_sms: int | None = None
    moe_hybridep_num_blocks_permute: int | None = None
    moe_hybridep_num_blocks_unpermute: int | None = None
    moe_hybridep_num_sms_preprocessing: int = 108
    moe_ncclep_zero_copy: bool = False
    moe_dispatch_fwd_dtype: Literal["bf16", "mxfp8"] = "bf16"
    moe_combine_bwd_dtype: Literal["bf16", "mxfp8"] = "bf16"
    moe_mlp_glu_interleave_size: int | None = None
    moe_expert_rank_capacity_factor: float | None = None
    moe_paged_stash: bool = False
    moe_paged_stash_page_size: int = 64
    moe_paged_stash_buffer_size_factor_cuda: float = 1.1
    moe_paged_stash_buffer_size_factor_cpu: float = 0.0
    num_experts: int | None = None
    moe_layer_freq: int | list[int] = flag(1, parse=layer_pattern)
    moe_use_upcycling: bool = False
    moe_router_load_balancing_type: BalancingType | list[BalancingType] = "aux_loss"
    moe_aux_loss_coeff: float | list[float] = 0.0
    moe_upcycling_granularity: int = 1
    moe_routing_trace_path: str | None = None
    moe_routing_trace_max_training_iters: int | None = None
    moe_routing_trace_capture_logits: bool = False
    moe_routing_trace_capture_hidden_states: bool = False
    moe_routing_trace_dump_weights: bool = False

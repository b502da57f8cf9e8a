"""The flags of Megatron-LM's own MoE recipes (dev branch, examples/moe_recipes at d48bd6be), as facts: names of flags and their values.

(model and file, our preset of the model, ranks, the recipe's flags besides the model's architecture, data and optimizer). A test writes
them as files of the same shape.
"""

SHARED = "expert_tensor_parallel_size=1 sequence_parallel moe_permute_fusion moe_router_fusion moe_router_force_load_balancing moe_token_dispatcher_type=flex"
HYBRIDEP = f"{SHARED} moe_flex_dispatcher_backend=hybridep"
DEEPEP = f"{SHARED} moe_flex_dispatcher_backend=deepep"
GATHERED = "fp8_format=e4m3 fp8_param_gather use_distributed_optimizer"
NARROW = "use_precision_aware_optimizer main_grads_dtype=fp32 main_params_dtype=fp32 exp_avg_dtype=bf16 exp_avg_sq_dtype=bf16"
OVERLAPPED = "overlap_grad_reduce overlap_param_gather"
MXFP8 = f"{GATHERED} fp8_recipe=mxfp8 reuse_grad_buf_for_mxfp8_param_ag {NARROW} {OVERLAPPED} moe_router_padding_for_quantization"
BLOCKWISE = f"{GATHERED} fp8_recipe=blockwise {NARROW}"
EXCHANGE = "overlap_moe_expert_parallel_comm delay_wgrad_compute"
RECOMPUTE = "recompute_granularity=selective recompute_modules="
GRAPHS = "cuda_graph_impl=transformer_engine te_rng_tracker cuda_graph_scope="
WHOLE = (
    "cuda_graph_impl=local cuda_graph_scope=full_iteration no_check_for_nan_in_loss_and_grad "
    "use_transformer_engine_op_fuser "
    "moe_paged_stash moe_pad_experts_for_cuda_graph_inference moe_mlp_glu_interleave_size=32"
)
SPLIT = "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split"
V4 = (
    "experimental_attention_variant=dsv4_hybrid csa_window_size=128 csa_compress_rotary_base=40000 "
    "moe_n_hash_layers=3 enable_hyper_connections "
    "mhc_sinkhorn_iterations=20 use_fused_mhc o_lora_rank=1024 original_max_position_embeddings=65536 "
    "dsa_indexer_n_heads=64 dsa_indexer_head_dim=128 dsa_indexer_loss_coeff=1e-2 dsa_indexer_use_sparse_loss"
)
FIVE_PP4 = "pipeline_model_parallel_layout=Et*4|(tttt|)*14tmL"


def _read(table: str) -> tuple[tuple[str, str, int, str], ...]:
    rows = (line.split(" | ") for line in table.strip().splitlines())
    return tuple((name, preset, int(ranks), settings) for name, preset, ranks, settings in rows)


RECIPES = _read(f"""
deepseek_v3/b200 MXFP8 | deepseek_v3 | 256 | {DEEPEP} {MXFP8} {EXCHANGE} pipeline_model_parallel_size=8 expert_model_parallel_size=32 {FIVE_PP4} moe_deepep_num_sms=24 {RECOMPUTE}mla_up_proj,mlp global_batch_size=2048
deepseek_v3/gb200 MXFP8 | deepseek_v3 | 256 | {HYBRIDEP} {MXFP8} {EXCHANGE} pipeline_model_parallel_size=4 expert_model_parallel_size=64 {FIVE_PP4} moe_hybridep_num_sms=32 {RECOMPUTE}mla_up_proj, {GRAPHS}attn,moe_router,moe_preprocess cuda_graph_warmup_steps=1 chunked_optimizer_state_offload optimizer_state_offload_chunk_size_mb=256 fine_grained_activation_offloading offload_modules=expert_fc1, delay_offload_until_cuda_graph
deepseek_v3/gb300 MXFP8 | deepseek_v3 | 256 | {HYBRIDEP} {MXFP8} {EXCHANGE} pipeline_model_parallel_size=4 expert_model_parallel_size=64 {FIVE_PP4} moe_hybridep_num_sms=32 {GRAPHS}attn,moe_router,moe_preprocess cuda_graph_warmup_steps=1
deepseek_v3/h100 BF16 | deepseek_v3 | 1024 | {SHARED} moe_enable_deepep {OVERLAPPED} use_distributed_optimizer pipeline_model_parallel_size=16 expert_model_parallel_size=64
deepseek_v3/h100 FP8 | deepseek_v3 | 1024 | {DEEPEP} {BLOCKWISE} {EXCHANGE} moe_router_padding_for_fp8 tensor_model_parallel_size=2 pipeline_model_parallel_size=8 expert_model_parallel_size=64 pipeline_model_parallel_layout=Et*3|(tt|)*29m|L {RECOMPUTE}mla_up_proj,mlp
deepseek_v4_flash/gb200 MXFP8 | deepseek_v3 | 128 | {HYBRIDEP} {MXFP8} {V4} csa_compress_ratios=([0,0,4]+[128,4]*20+[0]) o_groups=8 num_layers=43 moe_layer_freq=1 dsa_indexer_topk=512 expert_model_parallel_size=64 {WHOLE} moe_expert_rank_capacity_factor=1.5 {RECOMPUTE}mla_up_proj, global_batch_size=2048
deepseek_v4_pro/gb300 MXFP8 | deepseek_v3 | 256 | {HYBRIDEP} {MXFP8} {V4} csa_compress_ratios=([128,128,4]+[128,4]*29+[0]) o_groups=16 dsa_indexer_topk=1024 pipeline_model_parallel_size=4 expert_model_parallel_size=64 {FIVE_PP4} {WHOLE} moe_expert_rank_capacity_factor=1.5 {RECOMPUTE}mla_up_proj,mhc fine_grained_activation_offloading offload_modules=core_attn, fine_grained_offloading_max_inflight_offloads=2 global_batch_size=4096
qwen3_235b/b200 MXFP8 | qwen3_235b_a22b | 128 | {DEEPEP} {MXFP8} {EXCHANGE} {SPLIT} tensor_model_parallel_size=2 pipeline_model_parallel_size=4 num_layers_per_virtual_pipeline_stage=2 expert_model_parallel_size=16 moe_deepep_num_sms=20 overlap_p2p_comm micro_batch_size=3 global_batch_size=3072
qwen3_235b/b300 MXFP8 | qwen3_235b_a22b | 128 | {HYBRIDEP} {MXFP8} {EXCHANGE} {SPLIT} tensor_model_parallel_size=2 expert_model_parallel_size=16 moe_hybridep_num_sms=32 {GRAPHS}attn,moe_router cuda_graph_warmup_steps=2 micro_batch_size=3 global_batch_size=9216
qwen3_235b/gb200 MXFP8, full iteration | qwen3_235b_a22b | 128 | {HYBRIDEP} {MXFP8} {EXCHANGE} {SPLIT} expert_model_parallel_size=64 {WHOLE} moe_expert_rank_capacity_factor=1.2 moe_paged_stash_buffer_size_factor_cuda=1.0 moe_paged_stash_buffer_size_factor_cpu=0.8 global_batch_size=8192
qwen3_235b/gb200 MXFP8 | qwen3_235b_a22b | 128 | {HYBRIDEP} {MXFP8} {EXCHANGE} {SPLIT} expert_model_parallel_size=64 moe_hybridep_num_sms=32 {GRAPHS}attn,moe_router,moe_preprocess cuda_graph_warmup_steps=2 global_batch_size=8192
qwen3_235b/gb300 MXFP8, full iteration | qwen3_235b_a22b | 128 | {HYBRIDEP} {MXFP8} {EXCHANGE} {SPLIT} expert_model_parallel_size=64 {WHOLE} moe_expert_rank_capacity_factor=1.2 moe_paged_stash_buffer_size_factor_cuda=1.0 global_batch_size=8192
qwen3_235b/h100 BF16 | qwen3_235b_a22b | 256 | {HYBRIDEP} {EXCHANGE} {SPLIT} tensor_model_parallel_size=2 pipeline_model_parallel_size=8 num_layers_per_virtual_pipeline_stage=3 expert_model_parallel_size=32 {RECOMPUTE}moe_act,layernorm {GRAPHS}moe_router,moe_preprocess global_batch_size=2048
qwen3_30b/gb200 BF16 | qwen3_30b_a3b | 16 | {HYBRIDEP} expert_model_parallel_size=16 micro_batch_size=4 global_batch_size=512
qwen3_30b/gb200 MXFP8, full iteration | qwen3_30b_a3b | 16 | {HYBRIDEP} fp8_format=e4m3 fp8_recipe=mxfp8 expert_model_parallel_size=16 {WHOLE} moe_expert_rank_capacity_factor=1.5 moe_paged_stash_buffer_size_factor_cuda=1.1 micro_batch_size=4 global_batch_size=512
qwen3_30b/gb200 MXFP8 | qwen3_30b_a3b | 16 | {HYBRIDEP} fp8_format=e4m3 fp8_recipe=mxfp8 expert_model_parallel_size=16 external_cuda_graph te_rng_tracker cuda_graph_scope=attn,moe_router,moe_preprocess micro_batch_size=4 global_batch_size=512
qwen3_30b/h100 BF16 | qwen3_30b_a3b | 32 | {HYBRIDEP} {OVERLAPPED} use_distributed_optimizer expert_model_parallel_size=8 global_batch_size=256
qwen3_30b/h100 FP8 | qwen3_30b_a3b | 32 | {HYBRIDEP} {BLOCKWISE} {OVERLAPPED} expert_model_parallel_size=8 {GRAPHS}attn,moe_router,moe_preprocess global_batch_size=256
""")
PLAIN = f"{OVERLAPPED} use_distributed_optimizer"
PARTIAL = f"{GRAPHS}attn,moe_router,moe_preprocess"
PP8 = "pipeline_model_parallel_size=8 pipeline_model_parallel_layout=Et|(tt|)*30mL"
TABLE_11 = _read(f"""
table 11: DeepSeek-V3, GB300, MXFP8 | deepseek_v3 | 256 | {HYBRIDEP} {MXFP8} {EXCHANGE} pipeline_model_parallel_size=4 expert_model_parallel_size=64 {FIVE_PP4} {PARTIAL} global_batch_size=8192
table 11: DeepSeek-V3, GB200, MXFP8 | deepseek_v3 | 256 | {HYBRIDEP} {MXFP8} pipeline_model_parallel_size=4 expert_model_parallel_size=64 {FIVE_PP4} {PARTIAL} {RECOMPUTE}mlp, offload_optimizer_states global_batch_size=8192
table 11: DeepSeek-V3, GB200, BF16 | deepseek_v3 | 256 | {HYBRIDEP} {PLAIN} {NARROW} {PP8} expert_model_parallel_size=32 {PARTIAL} offload_optimizer_states global_batch_size=4096
table 11: DeepSeek-V3, H100, FP8 | deepseek_v3 | 1024 | {DEEPEP} {BLOCKWISE} {EXCHANGE} tensor_model_parallel_size=2 {PP8} expert_model_parallel_size=64 {RECOMPUTE}mla_up_proj,mlp,moe_act,layernorm global_batch_size=8192
table 11: Qwen3-235B, GB300, MXFP8 | qwen3_235b_a22b | 256 | {HYBRIDEP} {MXFP8} {SPLIT} pipeline_model_parallel_size=4 num_virtual_stages_per_pipeline_rank=6 expert_model_parallel_size=64 {PARTIAL} micro_batch_size=2 global_batch_size=3072
table 11: Qwen3-235B, GB200, MXFP8 | qwen3_235b_a22b | 256 | {HYBRIDEP} {MXFP8} {EXCHANGE} {SPLIT} pipeline_model_parallel_size=4 num_virtual_stages_per_pipeline_rank=6 expert_model_parallel_size=64 {PARTIAL} {RECOMPUTE}moe_act,layernorm fine_grained_activation_offloading offload_modules=expert_fc1,moe_act delay_offload_until_cuda_graph micro_batch_size=3 global_batch_size=3072
table 11: Qwen3-235B, GB200, BF16 | qwen3_235b_a22b | 256 | {HYBRIDEP} {PLAIN} {EXCHANGE} {SPLIT} pipeline_model_parallel_size=4 num_virtual_stages_per_pipeline_rank=12 expert_model_parallel_size=32 {PARTIAL} {RECOMPUTE}moe_act,layernorm global_batch_size=8192
table 11: Qwen3-235B, GB200, MXFP8, 128K | qwen3_235b_a22b | 128 | {HYBRIDEP} {MXFP8} {SPLIT} tensor_model_parallel_size=4 context_parallel_size=4 pipeline_model_parallel_size=4 num_virtual_stages_per_pipeline_rank=12 expert_model_parallel_size=32 seq_length=131072 max_position_embeddings=131072 {RECOMPUTE}moe_act,layernorm global_batch_size=1024
table 11: Qwen3-235B, H100, BF16 | qwen3_235b_a22b | 256 | {DEEPEP} {PLAIN} {EXCHANGE} {SPLIT} tensor_model_parallel_size=2 pipeline_model_parallel_size=8 num_virtual_stages_per_pipeline_rank=4 expert_model_parallel_size=32 {RECOMPUTE}moe_act,layernorm {PARTIAL} global_batch_size=2048
""")
"""The nine rows of table 11 of arXiv 2603.07685 (mappings: tables 11, 17 and 20; further flags: the public model zoo)."""
REFUSED = {
    "deepseek_v3/h100 BF16": "--num-layers 61 must be a multiple of --pipeline-model-parallel-size 16",  # upstream, too
    "deepseek_v4_flash/gb200 MXFP8": (
        "--original-max-position-embeddings",
        "its indexers do not learn yet",
        "dsv4_hybrid cannot be combined with --mtp-num-layers",
        "its blocks are not captured",
        "dsv4_hybrid cannot be combined with --fp8-format",
        "--recompute-modules mla_up_proj",
        "--enable-hyper-connections cannot be combined with --mtp-num-layers",
        "captured parts have one stream",
    ),
    "deepseek_v4_pro/gb300 MXFP8": (
        "--original-max-position-embeddings",
        "its indexers do not learn yet",
        "dsv4_hybrid cannot be combined with --mtp-num-layers",
        "dsv4_hybrid cannot be combined with --fine-grained-activation-offloading",
        "its blocks are not captured",
        "dsv4_hybrid cannot be combined with --fp8-format",
        "--recompute-modules mla_up_proj",
        "--enable-hyper-connections cannot be combined with --mtp-num-layers",
        "captured parts have one stream",
        "--recompute-modules mhc: a layer with such a module",
    ),
}
"""Those that are refused -> the reason, or several."""


def as_file(preset_text: str, settings: str) -> str:
    """A recipe in Megatron-LM's shape: the architecture of a preset's file, and settings of RECIPES on top."""
    import yaml

    table = {
        key.lstrip("-").replace("-", "_"): value for key, value in yaml.safe_load(preset_text)["MODEL_ARGS"].items()
    }
    for word in settings.split():
        name, equals, value = word.partition("=")
        # ratios of layers hold commas, too
        table[name] = (
            True
            if not equals
            else [each for each in value.split(",") if each]
            if "," in value and "[" not in value
            else value
        )
    return yaml.safe_dump(
        {
            "DEPENDENCIES": {"dockerfile": "FROM scratch\n"},
            "ENV_VARS": {"NVTE_FUSED_ATTN": "1"},
            "ARGS": table | {"mock_data": True},
        }
    )


COMMIT = "d48bd6be0a85cc0d6d3cc71e8750cf357cc6bdb1"
DATE = "2026-08-21"
FILES = tuple(
    """
    deepseek_v3/b200/mxfp8_256GPU_TP1PP8EP32 deepseek_v3/gb200/mxfp8_256GPU_TP1PP4EP64
    deepseek_v3/gb300/mxfp8_256GPU_TP1PP4EP64 deepseek_v3/h100/bf16_1024GPU_TP1PP16EP64
    deepseek_v3/h100/fp8_1024GPU_TP2PP8EP64 deepseek_v4_flash/gb200/mxfp8_SL4K_128GPU_TP1PP1EP64
    deepseek_v4_pro/gb300/mxfp8_SL4K_256GPU_TP1PP4EP64 qwen3_235b/b200/mxfp8_128GPU_TP2PP4EP16
    qwen3_235b/b300/mxfp8_128GPU_TP2PP1EP16_partial_cg
    qwen3_235b/gb200/mxfp8_128GPU_TP1PP1EP64_paged_stash_fullcg_overlap
    qwen3_235b/gb200/mxfp8_128GPU_TP1PP1EP64_partial_cg_overlap
    qwen3_235b/gb300/mxfp8_128GPU_TP1PP1EP64_paged_stash_full_cg qwen3_235b/h100/bf16_256GPU_TP2PP8EP32
    qwen3_30b/gb200/bf16_16GPU_TP1PP1EP16 qwen3_30b/gb200/mxfp8_16GPU_TP1PP1EP16_paged_stash
    qwen3_30b/gb200/mxfp8_16GPU_TP1PP1EP16_partial_cg qwen3_30b/h100/bf16_32GPU_TP1PP1EP8
    qwen3_30b/h100/fp8_32GPU_TP1PP1EP8
    """.split()
)
"""The file of each of RECIPES in examples/moe_recipes, without .yaml."""

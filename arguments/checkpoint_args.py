"""--use-checkpoint-args: the architecture comes from the checkpoint and overrides the command line.

Reading a checkpoint needs torch, which this package does not import. So there are two steps: `find_source` returns the
checkpoint to read, before any rule runs; the caller reads its recorded flags and passes them to `parse_args`.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from arguments.container import OPTIONS
from arguments.settings import Settings

SHAPE = tuple(
    """
    num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels group_query_attention
    num_query_groups max_position_embeddings position_embedding_type rotary_base rotary_percent
    rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor
    rope_scaling_high_freq_factor rope_type attn_temperature_tuning attn_temperature_scale attn_temperature_floor
    rotary_scaling_factor mscale mscale_all_dim yarn_original_max_position_embeddings yarn_beta_fast
    yarn_beta_slow yarn_correction_range_round_to_int no_rope_freq window_size attention_chunk_size
    window_attn_skip_freq rotary_base_per_layer window_rotary_percent window_rope_unscaled
    window_num_query_groups window_softmax_type value_channels attention_value_scale
    qk_l2_norm_rope_layers_only
    normalization layernorm_epsilon attention_latent_norm_epsilon layernorm_zero_centered_gamma
    apply_residual_connection_post_layernorm
    pre_layernorm post_self_attn_layernorm post_mlp_layernorm
    qk_layernorm qk_layernorm_all_heads qk_layernorm_after_rope qk_l2_norm swiglu squared_relu quick_geglu
    glu_linear_offset activation_func_clamp_value embedding_multiplier residual_multiplier attention_multiplier
    logits_scaling add_bias_linear add_qkv_bias add_attention_output_bias add_output_layer_bias
    untie_embeddings_and_output_weights
    experimental_attention_variant linear_attention_freq linear_conv_kernel_dim linear_key_head_dim
    linear_value_head_dim linear_num_key_heads linear_num_value_heads
    csa_compress_ratios csa_window_size csa_compress_rotary_base csa_dense_mode o_groups o_lora_rank
    kda_gate_rank kda_decay_lower_bound
    enable_hyper_connections num_residual_streams mhc_sinkhorn_iterations
    hybrid_layer_pattern mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads mamba_step_size_min
    mamba_step_size_max
    dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
    dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
    dsa_indexer_k_norm_epsilon attention_output_gate head_wise_attn_gate softmax_type multi_latent_attention q_lora_rank
    kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim mtp_num_layers mtp_use_repeated_layer num_experts
    moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
    moe_apply_probs_on_input
    moe_router_topk moe_router_score_function moe_router_pre_softmax moe_router_num_groups moe_router_group_topk
    moe_router_group_score_topk moe_router_sparsemixer_jitter
    moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_n_hash_layers moe_grouped_gemm moe_latent_size
    finermoe_intermediate_granularity finermoe_output_granularity finermoe_intermediate_expansion
    finermoe_output_expansion moe_concat_proj vocab_size padded_vocab_size make_vocab_size_divisible_by
    """.split()
)
"""Flags that define the model of the weights."""

LORA = ("lora_dim", "lora_alpha", "lora_target_modules")
"""Taken from a checkpoint with adapters; one without them may be the base of new ones."""

MUP = tuple(
    """
    use_mup mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim mup_attn_scale_power
    """.split()
)
"""Taken for --skip-train unless given. Part of the model too, but Megatron-LM takes them from the command line only."""

WHERE_NOT_GIVEN = ("seq_length",)
"""Taken unless given: a run may continue with longer sequences."""

DROPOUT = ("attention_dropout", "hidden_dropout")
"""Taken from a Hugging Face model's config.json unless given: no such model has Megatron's default of 0.1."""

CONVERSION = ("bf16", "fp16", "optimizer")
"""Taken for --ckpt-convert-format unless given: they determine what is stored of a parameter."""

EVALUATION = tuple(
    """
    micro_batch_size eval_micro_batch_size bf16 fp16 seed eval_iters full_validation eod_mask_loss
    reset_position_ids reset_attention_mask create_attention_mask_in_dataloader
    dataloader_inter_document_masking
    """.split()
)
"""Taken for --skip-train unless given: with these and DATA, an evaluation reads what the run's validations read."""

CAPACITY = (
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
    "moe_token_dispatcher_type",
)
"""Taken for --skip-train from a run that drops tokens, unless given: the losses depend on them."""

DATA = tuple(
    """
    data_path split data_args_path train_data_path valid_data_path test_data_path per_split_data_args_path
    mock_data multiple_validation_sets validation_set_names
    """.split()
)
"""Taken for --skip-train if the command line names no data at all."""

TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern", "special_tokens")
"""Taken too, unless --no-use-tokenizer-model-from-checkpoint-args. A tokenizer of the command line wins over that of a
Hugging Face folder, and with --sft over that of a run, which need not have read conversations."""

MAPPING = tuple(
    """
    tensor_model_parallel_size pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage
    num_virtual_stages_per_pipeline_rank pipeline_model_parallel_layout decoder_first_pipeline_num_layers
    decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    expert_model_parallel_size expert_tensor_parallel_size
    """.split()
)
"""Taken with --use-mp-args-from-checkpoint-args: how the model is sharded. Context and data parallelism depend on the
number of ranks available."""


@dataclass(frozen=True)
class ArgumentGroup:
    """Flags that are taken together.

    Attributes:
        asked: whether the settings ask for them.
        recorded: whether the checkpoint provides them.
        overrides: whether they override the command line.
    """

    dests: tuple[str, ...]
    asked: Callable[[Settings], bool] = lambda settings: True
    recorded: Callable[[Settings, Mapping[str, object]], bool] = lambda settings, recorded: True
    overrides: bool = False


def _evaluates(settings: Settings) -> bool:
    return settings.is_eval_only


def _takes_tokenizer(settings: Settings) -> bool:
    return settings.use_tokenizer_model_from_checkpoint_args


def _keeps_tokenizer(settings: Settings, recorded: Mapping[str, object]) -> bool:
    """Whether a tokenizer of the command line stays."""
    return "tokenizer_type" in settings.typed and (settings.sft or bool(recorded.get("hf_model_type")))


def _no_data_given(settings: Settings, _recorded: Mapping[str, object]) -> bool:
    return not any(settings.given(dest) for dest in DATA)


GROUPS = (
    ArgumentGroup(SHAPE, overrides=True),
    ArgumentGroup(LORA, recorded=lambda settings, recorded: recorded.get("lora_dim") is not None, overrides=True),
    ArgumentGroup(TOKENIZER, _takes_tokenizer, _keeps_tokenizer),
    ArgumentGroup(TOKENIZER, _takes_tokenizer, lambda *both: not _keeps_tokenizer(*both), overrides=True),
    ArgumentGroup(("sft_tokenizer_prompt_format",), _takes_tokenizer),
    ArgumentGroup(MAPPING, lambda settings: settings.use_mp_args_from_checkpoint_args, overrides=True),
    ArgumentGroup(WHERE_NOT_GIVEN),
    ArgumentGroup(DROPOUT, recorded=lambda settings, recorded: bool(recorded.get("hf_model_type"))),
    ArgumentGroup(CONVERSION, lambda settings: settings.ckpt_convert_format is not None),
    ArgumentGroup(MUP + EVALUATION, _evaluates),
    ArgumentGroup(
        CAPACITY, _evaluates, lambda settings, recorded: recorded.get("moe_expert_capacity_factor") is not None
    ),
    ArgumentGroup(DATA, _evaluates, _no_data_given),
    # `_for_evaluation` makes one of the other
    ArgumentGroup(("global_batch_size", "eval_global_batch_size"), _evaluates, lambda settings, recorded: False),
)
"""All that a checkpoint may set."""


@dataclass(frozen=True)
class CheckpointArgsSource:
    """Reference to the checkpoint whose flags are used.

    Attributes:
        folder: the checkpoint directory; None with --auto-resume alone.
        may_come: whether the run itself writes it, so that it may not exist at the first start.
        own: with --auto-resume, the directory whose newest complete checkpoint takes precedence.
        hf_mapping: mapping file of the folder's Hugging Face family.
    """

    folder: str | None
    step: int | None
    may_come: bool
    own: str | None = None
    hf_mapping: str | None = None


def find_source(settings: Settings) -> CheckpointArgsSource | None:
    """Return the checkpoint whose flags are used, or None."""
    folder = settings.load if settings.load is not None else settings.pretrained_checkpoint
    resumed = settings.save if settings.auto_resume else None
    if not settings.use_checkpoint_args or (folder is None and resumed is None):
        return None
    if folder is None:
        return CheckpointArgsSource(None, None, True, resumed)
    own = settings.save is not None and os.path.abspath(settings.save) == os.path.abspath(folder)
    may_come = own and settings.ckpt_step is None
    return CheckpointArgsSource(folder, settings.ckpt_step, may_come, resumed, settings.hf_mapping)


def suppliable(settings: Settings) -> frozenset[str]:
    """Return the destinations that a checkpoint may set under these flags."""
    return frozenset(dest for group in GROUPS if group.asked(settings) for dest in group.dests)


def apply(settings: Settings, recorded: Mapping[str, object]) -> None:
    """Write the recorded architecture over the settings, and note what it overrides on the command line."""
    if not recorded:
        settings.set_derived("use_checkpoint_args", False, "there is no checkpoint yet")
        settings.note("--use-checkpoint-args: there is no checkpoint yet; the command line is used.")
        return
    # the checkpoint of --moe-use-upcycling is of a dense model, whose experts the command line describes
    names = [
        dest
        for group in GROUPS
        if group.asked(settings) and group.recorded(settings, recorded)
        for dest in group.dests
        if group.overrides or not settings.given(dest)
    ]
    if settings.moe_use_upcycling:
        names = [dest for dest in names if not dest.startswith(("num_experts", "moe_", "finermoe_"))]
    if settings.is_eval_only:
        names = _for_evaluation(settings, recorded, names)
    if _repads(settings, recorded):
        names = [dest for dest in names if dest != "padded_vocab_size"]
    for dest in names:
        value = recorded.get(dest)
        if dest not in OPTIONS or dest not in recorded or value == settings.values[dest]:
            continue
        if dest in settings.typed:
            settings.note(
                f"{settings.shown(dest)}: overridden by the checkpoint's value {value} (--use-checkpoint-args)"
            )
        settings.forget(dest)
        settings.set_derived(dest, value, "from the checkpoint")


def _repads(settings: Settings, recorded: Mapping[str, object]) -> bool:
    """Return whether the tensor-parallel size needs another vocabulary padding than the checkpoint's."""
    rows, ranks = recorded.get("padded_vocab_size"), settings.tensor_model_parallel_size
    apart = settings.use_mp_args_from_checkpoint_args or "padded_vocab_size" in settings.typed
    return not apart and isinstance(rows, int) and isinstance(ranks, int) and ranks > 0 and rows % ranks != 0


def _for_evaluation(settings: Settings, recorded: Mapping[str, object], names: list[str]) -> list[str]:
    """Return what an evaluation takes; set its batch size, which a run may record under another name."""
    if settings.bf16 or settings.fp16:
        names = [dest for dest in names if dest not in ("bf16", "fp16")]
    size = recorded.get("eval_global_batch_size") or recorded.get("global_batch_size")
    if (
        isinstance(size, int)
        and size > 0
        and not settings.given("global_batch_size")
        and not settings.given("eval_global_batch_size")
    ):
        settings.set_derived("eval_global_batch_size", size, "from the checkpoint")
    if settings.given("data_path") and not settings.given("split"):
        names = [*names, "split"]
    if _no_data_given(settings, recorded):
        taken = [
            f"{OPTIONS[dest].spellings[0]} {_text(recorded[dest])}".strip()
            for dest in DATA
            if recorded.get(dest) and _is_value(dest, recorded[dest])
        ]
        if taken:
            settings.note(f"no data was given: the evaluation takes the checkpoint's, {', '.join(taken)}")
    checked = {*MUP, *EVALUATION, *CAPACITY, *DATA}
    return [dest for dest in names if dest not in checked or _is_value(dest, recorded.get(dest))]


def _is_value(dest: str, value: object) -> bool:
    """Return whether the flag could have this value; None could not."""
    option = OPTIONS[dest]
    kinds: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "bool": bool}
    kind = kinds.get(option.type_name, str)
    if option.is_list:
        return isinstance(value, list | tuple) and all(isinstance(item, kind) for item in value)
    return isinstance(value, kind)


def _text(value: object) -> str:
    """Return what follows a flag's name on a command line: nothing for a switch, a list separated by spaces."""
    if isinstance(value, bool):
        return ""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

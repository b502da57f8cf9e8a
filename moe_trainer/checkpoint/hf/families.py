"""The families of Hugging Face models that can be converted: the mapping files of this package, and one of the user."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.converters.converter import Config
from moe_trainer.checkpoint.hf.family import Family
from moe_trainer.checkpoint.hf.mapping_file import read_family

Families = Mapping[str, Family]
NAMES = tuple(
    """
    llama
    mistral
    qwen2
    qwen3
    mixtral
    phimoe
    minimax_m2
    olmoe
    qwen2_moe
    finer_moe
    qwen3_moe
    qwen3_vl_moe_text
    flint
    qwen3_next
    qwen3_5_moe_text
    granite
    granitemoe
    granitemoeshared
    granitemoehybrid
    nemotron_h
    gpt_oss
    deepseek_v2
    deepseek_v3
    deepseek_v32
    deepseek_v4
    glm_moe_dsa
    glm4_moe
    flex_olmo
    afmoe
    glm4_moe_lite
    exaone_moe
    ernie4_5_moe
    hunyuan_v1_moe
    hy_v3
    solar_open
    dots1
    deepseek
    llama4_text
    aria_text
    mistral4
    ministral3
    mellum
    granitemoe_swa
    mimo_v2_flash
    bailing_hybrid
    kimi_linear
    lfm2_moe
    """.split()
)
"""In the order in which an export tries them: the first one that expresses a model is written."""
# keys without influence on the function of the model
IGNORED = tuple(
    "_name_or_path architectures auto_map aux_loss_alpha bos_token_id dtype ep_size eos_token_id id2label "
    "label2id max_window_layers model_type output_router_logits pad_token_id pretraining_tp "
    "quantization_config rope_parameters rope_scaling rope_theta full_attention_interval router_aux_loss_coef "
    "router_jitter_noise seq_aux torch_dtype transformers_version use_cache unsloth_version problem_type "
    "return_dict output_attentions output_hidden_states chunk_size_feed_forward is_encoder_decoder "
    "num_key_value_heads head_dim qk_head_dim num_local_experts num_mtp_layers num_experts n_group topk_group "
    "layer_types sliding_window use_sliding_window tie_word_embeddings partial_rotary_factor norm_topk_prob "
    "decoder_sparse_step mlp_only_layers first_k_dense_replace n_shared_experts num_nextn_predict_layers "
    "topk_method scoring_func use_mtp mlp_layer_types use_return_dict torchscript sep_token_id "
    "original_max_position_embeddings "
    "decoder_start_token_id is_decoder add_cross_attention cross_attention_hidden_size num_return_sequences "
    "task_specific_params finetuning_task tokenizer_class prefix pruned_heads per_layer_config "
    # of generation, which older releases of transformers wrote here
    "do_sample temperature top_k top_p typical_p max_length min_length num_beams num_beam_groups diversity_penalty "
    "length_penalty repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids early_stopping "
    "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens "
    "remove_invalid_values output_scores return_dict_in_generate tie_encoder_decoder tf_legacy_loss "
    "use_bfloat16".split()
)
ALIASES = MappingProxyType(
    {
        "num_experts": "num_local_experts",
        "num_local_experts": "num_experts",
        "n_routed_experts": "num_local_experts",
        "moe_num_experts": "num_experts",
        "moe_k": "num_experts_per_tok",
    }
)
"""Other spellings of keys."""


def _read_built_in() -> Families:
    folder = Path(__file__).with_name("families")
    families: dict[str, Family] = {}

    def get(name: str) -> Family | None:
        if name not in families and name in NAMES:
            families[name] = read_family(folder / f"{name}.yaml", get)
        return families.get(name)

    return {name: family for name in NAMES if (family := get(name)) is not None}


FAMILIES: Families = MappingProxyType(_read_built_in())


def families_with(mapping_file: str | Path | None) -> Families:
    """Return the built-in families, and before them that of a user's mapping file.

    Raises:
        CheckpointError: naming the line of the file that is wrong.
    """
    if mapping_file is None:
        return FAMILIES
    family = read_family(Path(mapping_file), FAMILIES.get)
    return MappingProxyType(
        {family.name: family} | {name: each for name, each in FAMILIES.items() if name != family.name}
    )


def get_family(config: Config, source: str, families: Families = FAMILIES) -> Family:
    """Return the family of a config.json; of several with the same model around them, the one that it contains.

    Raises:
        CheckpointError: for an unknown model type.
    """
    kind = config.get("model_type")
    found = [family for family in families.values() if kind in family.model_types]
    if len(found) > 1:
        parts = (family.text_parts.get(str(kind)) for family in found)
        contained = [((part and part.read(config)) or {}).get("model_type") for part in parts]
        if any(contained):
            kind = f"{kind} of {next(filter(None, contained))}"
            found = [
                family
                for family, name in zip(found, contained, strict=True)
                if name in (family.name, *family.other_names)
            ]
    if found:
        return found[0]
    known = ", ".join(dict.fromkeys(name for family in families.values() for name in family.model_types))
    raise CheckpointError(
        f"{source}: the model type {kind!r} cannot be converted; there are {known}. A mapping file (--hf-mapping FILE, "
        "docs/add_a_family.md) describes another one"
    )

"""Every flag of the parser, given alone with a small preset, acts, is refused, or has a note that says what it needs."""

from collections.abc import Iterator

import pytest

from arguments import recipe
from arguments.container import OPTIONS
from arguments.demands import demands
from arguments.machine import check_machine
from arguments.mechanisms.formats import FLAGS
from arguments.mechanisms.selections import SPLITS
from arguments.mechanisms.sublayer_kinds.declaration import SublayerCapability
from arguments.mechanisms.sublayers import BY_LETTER, EXPERTS
from arguments.needs import FACTS, notes_about
from arguments.parse import resolve_command_line

PRESET = "mixtral_tiny"
WORDS = {"window_size": ["8,0"], "init_from": ["x"], "dump_step": ["1", "x"], "preset": ["qwen3_tiny"]}
ALONE = set(
    """
    make_vocab_size_divisible_by hidden_dropout attention_dropout lora_dim init_method_std
    embedding_init_method_std init_method_xavier_uniform use_mup defer_embedding_wgrad_compute
    use_distributed_optimizer use_torch_fsdp2 print_groups micro_batch_size global_batch_size rampup_batch_size
    calculate_per_token_loss train_iters iterations_to_skip exit_interval exit_duration_in_mins
    exit_signal_handler eval_iters full_validation cpu_offloading_num_layers seed deterministic_mode
    check_for_nan_in_loss_and_grad check_for_large_grads check_for_spiky_loss rerun_mode gpu_sniff_test_interval
    manual_gc gradient_accumulation_fusion dataloader_type optimizer clip_grad weight_decay lr lr_decay_style
    lr_warmup_fraction decoupled_lr use_precision_aware_optimizer chunked_optimizer_state_offload
    dump_param_to_param_group_map bf16 fp16 on_missing_backend logit_dtype mock_data use_varlen_dataset sft
    phase_transition_iterations data_cache_path seq_length reset_position_ids dataloader_inter_document_masking
    allow_ambiguous_pad_tokens num_workers tokenizer_type vocab_size pad_vocab_size preset validate_only dry_run
    log_all_arguments metrics_file init_from export_weights dump_step save load pretrained_checkpoint
    log_interval log_params_norm log_num_zeros_in_grad log_throughput log_energy log_max_attention_logit
    logging_level timing_log_level config_logger_dir log_straggler tensorboard_dir wandb_project
    """.split()
) | {flags.name for flags in FLAGS}
"""Flags that act in a run of the preset on one CPU rank whatever else is given. Before you add one: see it act.

Not here are flags that say what they need, which the preset has, and flags of the model that are restored always:
tests/memory/test_flags_of_the_model.py sees these act.
"""
STATED = set(
    """
    expert_tensor_parallel_size tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards
    add_position_embedding distributed_backend transformer_impl
    """.split()
)
"""Flags that here only say what is the case anyway, with the values that are not refused."""


def test_conditions_name_flags_and_their_values():
    for option in OPTIONS.values():
        for alternative in (each for need in option.needs for each in need.split(" or ")):
            dest, _, value = alternative.removeprefix("!").partition("=")
            assert dest in FACTS or dest in OPTIONS, option.dest
            assert not value or value in OPTIONS[dest].choices, option.dest


def test_defaults_that_are_typed_are_quiet():
    """Recipes write down Megatron's defaults."""
    base = preset_words()
    for option in OPTIONS.values():
        if not option.needs or option.takes == 0 or option.default in (None, []):
            continue
        default = option.default if isinstance(option.default, list) else [option.default]
        settings, _ = resolve_command_line([*base, option.spellings[0], *map(str, default)], 1)
        assert not any(flag.startswith(option.spellings[0]) for flag, _ in settings.no_effect), option.dest


@pytest.mark.parametrize(
    ("words", "arch", "expected"),
    [
        ("--nvtx-ranges", None, "--nvtx-ranges has no effect without a CUDA device."),
        ("--nvtx-ranges", 9, None),
        ("--profile --pytorch-profiler-collect-shapes", 9, "has no effect without --use-pytorch-profiler."),
        ("--profile --pytorch-profiler-collect-shapes", None, None),
    ],
)
def test_what_a_device_decides_is_said_where_it_is_known(words, arch, expected):
    settings, _ = resolve_command_line([*preset_words(), *words.split()], 1)
    assert not any(flag in words for flag, _ in settings.no_effect)
    notes = [text for _, text in notes_about(settings, {"cuda": arch is not None})]
    assert notes == [] if expected is None else expected in notes[0]


def preset_words() -> list[str]:
    """Return a short run of the preset with its flags as words, which are read faster than its file."""
    words = ["--mock-data"]
    for item in recipe.load(PRESET, {}, is_run=False).parsed.given:
        values = item.value if isinstance(item.value, list) else [item.value]
        words += [item.spelling, *(str(value) for value in values if not isinstance(value, bool))]
    return [*words, "--train-iters", "2", "--eval-iters", "2", "--eval-interval", "2"]


def lines_with(option) -> Iterator[list[str]]:
    """Yield command lines that give a flag another value than its default, one for each choice."""
    if option.takes == 0:
        yield [option.spellings[0]]
        return
    if option.dest in WORDS:
        yield [option.spellings[0], *WORDS[option.dest]]
        return
    texts = option.choices or {"int": ("4", "2", "1"), "float": ("0.7", "0.3", "1e-4")}.get(
        option.type_name, ("x", "1")
    )
    for text in texts:
        if str(text) != str(option.default):
            yield [option.spellings[0], *[str(text)] * (option.takes if isinstance(option.takes, int) else 1)]


def outcomes(option, base: list[str]) -> set[str]:
    """Return what comes of a flag after a line: refused, noted or silent; for each choice, else the first valid value."""
    found = set()
    for words in lines_with(option):
        settings, violations = resolve_command_line([*base, *words], 1)
        if any(flag in option.spellings for violation in violations for flag in violation.flags):
            found.add("refused")
            continue
        starts = tuple(f"{spelling}{end}" for spelling in option.spellings for end in " :")
        notes = [*settings.lines(), *map(str, check_machine(settings, {}, None))]
        found.add("noted" if any(note.startswith(starts) for note in notes) else "silent")
        if not option.choices:
            break
    return found


def test_every_flag_acts_is_refused_or_is_noted():
    base = preset_words()
    silent = {dest for dest, option in OPTIONS.items() if "silent" in outcomes(option, base)}
    declared = {
        option.dest
        for option in OPTIONS.values()
        if option.needs or option.section in ("model", "moe") and "always" in option.restore
    }
    assert silent - ALONE - STATED - declared == set(), (
        "no effect and no note: see flag(needs=...); or they act alone: see ALONE"
    )
    assert (ALONE | STATED) - silent == set(), "these are refused or noted when they are given alone"
    assert (ALONE | STATED) & declared == set(), "their fields say enough"


@pytest.mark.parametrize("letter", BY_LETTER)
def test_flags_that_no_sublayer_of_a_pattern_reads_are_refused_or_noted(letter):
    base = [*preset_words(), f"--hybrid-layer-pattern={letter}{EXPERTS.letter}"]
    ignored = [
        dest
        for dest, capability in demands(SublayerCapability).items()
        if BY_LETTER[letter].ignores(capability) and EXPERTS.ignores(capability)
    ]
    assert [dest for dest in ignored if "silent" in outcomes(OPTIONS[dest], base)] == []


def test_every_flag_of_experts_is_refused_or_noted_without_experts():
    base = [
        *"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64".split(),
        *"--position-embedding-type rope --disable-bias-linear --micro-batch-size 1 --lr 1e-4 --train-iters 4".split(),
        *"--mock-data --tokenizer-type NullTokenizer --vocab-size 100".split(),
    ]
    assert not resolve_command_line(base, 1)[1]
    of_experts = [option for option in OPTIONS.values() if option.section == "moe"]
    silent = {option.dest for option in of_experts if "silent" in outcomes(option, base)}
    bring_experts = {dest for split in SPLITS for dest in (split.width_shares, split.slices)}
    assert silent - bring_experts == set(), 'say flag(..., needs="num_experts")'

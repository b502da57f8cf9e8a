"""Every flag has one status, and messages report it."""

from dataclasses import fields

import pytest

from arguments import ArgumentError, flag_status, parse_args
from arguments.apply_flag_status import check_flag_status
from arguments.container import OPTIONS
from arguments.moe import MoEArgs
from arguments.parse import resolve_command_line
from arguments.settings import Settings
from arguments.tokens import FIELDS, parse_tokens
from tests.arguments.test_tokens import TOY

MOE = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear".split()


def parse(*argv):
    return parse_args([*TOY, *MOE, *argv], 1)


def test_tables_contain_only_flags():
    tables = [flag_status.NOT_IMPLEMENTED, flag_status.NO_EFFECT, flag_status.UNSUPPORTED, flag_status.RENAMED]
    assert [dest for table in tables for dest in table if dest not in OPTIONS] == []
    assert [dest for dest, _ in flag_status.RENAMED_VALUES if dest not in OPTIONS] == []


def test_tables_do_not_contradict_each_other():
    rejected = {dest for dest, feature in flag_status.NOT_IMPLEMENTED.items() if feature.values is None}
    assert not rejected & set(flag_status.NO_EFFECT)


def test_rejected_values_are_choices():
    for dest, entry in (*flag_status.NOT_IMPLEMENTED.items(), *flag_status.UNSUPPORTED.items()):
        if entry.values is not None and OPTIONS[dest].choices is not None:
            assert set(entry.values) < set(OPTIONS[dest].choices), dest


def test_defaults_request_nothing():
    assert check_flag_status(Settings(OPTIONS)) == []


def test_missing_features_are_rejected_by_name():
    for dest, feature in flag_status.NOT_IMPLEMENTED.items():
        if feature.values is not None:
            continue
        option, settings = OPTIONS[dest], Settings(OPTIONS)
        rejected = [choice for choice in option.choices or () if feature.is_requested(choice, settings.default(dest))]
        value = True if option.takes == 0 else rejected[-1] if rejected else [2] if option.is_list else 2
        settings.set_given(dest, value, "command line", option.spellings[0])
        (violation,) = check_flag_status(settings)
        assert violation.kind == "later", dest
        assert option.spellings[0] in violation.message and feature.what in violation.message


def test_renamed_flags_are_accepted_with_a_note():
    for line, dest, value in (
        ("--layernorm-epsilon 1e-6", "layernorm_epsilon", 1e-6),
        ("--te-rng-track", "te_rng_tracker", True),
        ("--moe-loss-coeff 0.1", "moe_aux_loss_coeff", 0.1),
        ("--moe-frequency 2", "moe_layer_freq", 2),
        ("--local_rank 3", "local_rank", 3),
        ("--moe-token-dispatcher-type alltoall_seq", "moe_token_dispatcher_type", "alltoall"),
        ("--moe-flex-dispatcher-backend deepepv2", "moe_flex_dispatcher_backend", "deepep"),
        ("--expert-parallel 1", "expert_model_parallel_size", 1),
        ("--fp8-e4m3 --bf16", "fp8", "e4m3"),
        ("--use-rotary-position-embeddings", "position_embedding_type", "rope"),
        ("--no-weight-decay-cond-type qwen3_next", "apply_wd_to_qk_layernorm", True),
        ("--grad-reduce-in-fp32 false --bf16", "grad_reduce_in_bf16", True),
        ("--moe-router-type top1 --moe-router-pre-softmax", "moe_router_topk", 1),
        ("--log-moe-overload-factor", "moe_per_layer_logging", True),
    ):
        settings, errors = resolve_command_line([*TOY, *MOE, *line.split()], 1)
        assert getattr(settings, dest) == value and not errors, line
        assert any(flag.split()[0] == line.split()[0] for flag, _ in settings.renamed), line


def test_dense_model_reports_expert_flags():
    """Given to a dense model, they are rejected, renamed, or reported as having no effect."""
    silent = []
    for option in (OPTIONS[field.name] for field in fields(MoEArgs) if field.name != "num_experts"):
        others = [choice for choice in option.choices or () if choice != option.default]
        word = str(others[-1]) if others else "0.5" if isinstance(option.default, float) else "3"
        words = [] if option.takes == 0 else [word]
        settings, violations = resolve_command_line([*TOY, "--disable-bias-linear", option.spellings[0], *words], 1)
        reported = [flag for violation in violations for flag in violation.flags] + [
            flag for flag, _ in settings.renamed + settings.no_effect
        ]
        if not any(flag.split()[0] in option.spellings for flag in reported):
            silent.append(option.spellings[0])
    assert not silent, f"no effect on a dense model and no note: {silent} need num_experts"


@pytest.mark.parametrize("flag", ["--lora-alpha", "--lora-dropout"])
def test_lora_flags_without_lora_have_no_effect(flag):
    settings, _ = resolve_command_line([*TOY, *MOE, "--moe-aux-loss-coeff", "0.1", flag, "0.5"], 1)
    assert [name.split()[0] for name, _ in settings.no_effect] == [flag]


def test_feature_with_a_rejected_value_is_not_called_missing():
    with pytest.raises(ArgumentError) as raised:
        parse("--phase-data-args-path", "a", "b", "--phase-transition-iterations", "0,3")
    assert not any("has no effect" in note for note in raised.value.notes), raised.value.notes


def test_out_of_scope_values_are_skipped():
    with pytest.raises(ArgumentError) as raised:
        parse(*"--inference-max-requests 4 --rl-inference-parsers a b --img-h 224 --perform-rl-step".split())
    assert [violation.kind for violation in raised.value.violations] == ["product"] * 4


def known_spellings():
    """Every known spelling with the number of values it takes; of a prefix, one spelling that it matches."""
    yield from ((spelling, option.takes) for spelling, option in FIELDS.items())
    yield from ((spelling, old.takes) for spelling, old in flag_status.OLD_SPELLINGS.items())
    for product in flag_status.PRODUCTS:
        words = [word.partition("=")[0] for word in product.flags.split()]
        words += [f"{prefix}something" for prefix in product.prefixes.split()]
        yield from ((spelling, flag_status.find_out_of_scope(spelling)[1]) for spelling in words)


def test_every_spelling_is_parsed_with_its_values():
    """Each known spelling, given as many values as it takes, leaves the flag after it intact."""
    for spelling, takes in known_spellings():
        option = FIELDS.get(spelling)
        word = str(option.choices[0]) if option and option.choices else "1"
        word = "1,1" if option and option.dest == "window_size" else word
        count = {"?": 1, "+": 2, "*": 2}.get(takes, takes)
        parsed = parse_tokens([spelling, *[word] * count, "--exit-interval", "77"])
        assert parsed.last("exit_interval") == 77, spelling
        assert all(violation.flags == (spelling,) for violation in parsed.violations), spelling
        assert [v for v in parsed.violations if "unexpected argument" in v.message] == [], spelling


def test_every_field_has_a_status():
    statuses = {dest: flag_status.get_flag_status(dest) for dest in OPTIONS}
    assert [dest for dest, (status, reason) in statuses.items() if status != "acts" and not reason] == []
    names = {"acts", "no effect", "not implemented", "renamed", "unsupported"}
    assert {status for status, _ in statuses.values()} == names


def test_old_spellings_keep_their_meaning():
    for old, new in (
        ("--activations-checkpoint-method uniform --activations-checkpoint-num-layers 2",
         "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"),
        ("--override-lr-scheduler", "--override-opt_param-scheduler"),
        ("--use-checkpoint-lr-scheduler", "--use-checkpoint-opt-param-scheduler"),
        ("--min-scale 2", "--min-loss-scale 2"),
        ("--no-scaled-masked-softmax-fusion", "--no-masked-softmax-fusion"),
        ("--scatter-gather-tensors-in-pipeline --use-contiguous-buffers-in-ddp --delay-grad-reduce "
         "--no-log-learnig-rate-to-tensorboard", ""),
    ):  # fmt: skip
        actual, meant = parse(*old.split()), parse(*new.split())
        assert (actual.training, actual.optimizer, actual.model) == (meant.training, meant.optimizer, meant.model), old
        assert (actual.output, actual.precision) == (meant.output, meant.precision), old

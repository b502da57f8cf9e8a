"""Every flag has one standing, and says so when it matters."""

from dataclasses import fields

import pytest

from arguments import ArgumentError, parse_args, products, retired, standing, verdict
from arguments.container import OPTIONS
from arguments.moe import MoEArgs
from arguments.parse import understand
from arguments.settings import Settings
from arguments.tokens import FIELDS, read
from tests.arguments.test_tokens import TOY

MOE = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear".split()


def parse(*argv, world_size=1):
    return parse_args([*TOY, *MOE, *argv], world_size)


def violations(*argv, world_size=1):
    with pytest.raises(ArgumentError) as caught:
        parse(*argv, world_size=world_size)
    return caught.value.violations


def test_tables_name_flags():
    children = [dest for text in standing.PART_OF.values() for dest in text.split()]
    needs = [dest.partition("=")[0] for parents, text in standing.NEEDS for dest in (*parents, *text.split())]
    needs += [dest for parent, _, text in standing.NEEDS_VALUE for dest in (parent, *text.split())]
    tables = [standing.LATER, standing.PART_OF, standing.IDLE, standing.OTHER, standing.OLD, children, needs]
    assert [dest for table in tables for dest in table if dest not in OPTIONS] == []
    assert [dest for dest, _ in standing.VALUES if dest not in OPTIONS] == []


def test_every_parent_is_refused_by_itself():
    assert [parent for parent in standing.PART_OF if parent not in standing.LATER] == []


def test_tables_do_not_contradict_each_other():
    whole = {dest for dest, entry in standing.LATER.items() if entry.values is None}
    assert not whole & set(standing.IDLE)
    assert not whole & set(standing.PARENT)
    assert not set(standing.IDLE) & set(standing.PARENT)


def test_refused_values_are_choices():
    for dest, entry in standing.LATER.items():
        if entry.values is not None and OPTIONS[dest].choices is not None:
            assert set(entry.values) < set(OPTIONS[dest].choices), dest
    for dest, values in standing.OTHER_VALUES.items():
        assert set(values) < set(OPTIONS[dest].choices), dest


def test_defaults_ask_for_nothing():
    settings = Settings(OPTIONS)
    assert verdict.check(settings) == []


@pytest.mark.parametrize("dest", [dest for dest, entry in standing.LATER.items() if entry.values is None])
def test_what_comes_later_is_refused_by_name(dest):
    option = OPTIONS[dest]
    settings = Settings(OPTIONS)
    refused = [choice for choice in option.choices or () if standing.LATER[dest].refuses(choice, settings.default(dest))]
    value = True if option.takes == 0 else refused[-1] if refused else [2] if option.is_list else 2
    settings.set_given(dest, value, "command line", option.spellings[0])
    found = verdict.check(settings)
    assert [violation.kind for violation in found] == ["later"]
    assert option.spellings[0] in found[0].message and standing.LATER[dest].feature in found[0].message


def test_the_message_names_flag_value_and_feature():
    found = violations("--tensor-parallel-num-weight-shards", "2", world_size=2)
    later = [violation for violation in found if violation.kind == "later"]
    assert len(later) == 1 and later[0].flags == ("--tensor-parallel-num-weight-shards",)
    assert later[0].message == (
        "--tensor-parallel-num-weight-shards 2: this version does not have weight-sharded tensor parallelism yet "
        "(feature: parallel dimensions)"
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["--tensor-model-parallel-size", "1", "--context-parallel-size", "1", "--expert-model-parallel-size", "1"],
        ["--expert-tensor-parallel-size", "1"],
        ["--optimizer", "sgd"],
        ["--moe-token-dispatcher-type", "alltoall"],
        ["--cuda-graph-impl", "none"],
        ["--rerun-mode", "disabled"],
        ["--main-grads-dtype", "fp32"],
    ],
)
def test_values_that_ask_for_nothing_pass(argv):
    parse(*argv)


def test_flags_of_other_programs_are_refused_by_product():
    for flag, product in (("--dino-warmup-teacher-temp", "vision"), ("--ft-num-warmup-iters", "cluster services")):
        assert any(product in violation.message for violation in violations(flag, "1"))


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(("size", "world_size"), [(2, 2), (2, 4), (4, 4)])
def test_experts_spread_over_data_ranks(size, world_size, dispatcher):
    args = parse("--expert-model-parallel-size", str(size), "--moe-token-dispatcher-type", dispatcher, "--global-batch-size", "8",
                 world_size=world_size)
    assert args.parallel.expert_model_parallel_size == size


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "ncclep"], "--moe-flex-dispatcher-backend"),
    ],
)
def test_spread_experts_with_what_comes_later_are_refused_by_that_name(argv, flag):
    found = violations("--expert-model-parallel-size", "2", *argv, "--global-batch-size", "8", world_size=8)
    later = [violation for violation in found if violation.kind == "later"]
    assert any(flag in violation.flags for violation in later)
    assert not any("--expert-model-parallel-size" in violation.flags for violation in later)


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--enable-cuda-graph"], "--enable-cuda-graph"),
        (["--optimizer-cuda-graph"], "--optimizer-cuda-graph"),
    ],
)
def test_the_spelling_the_user_typed_is_named(argv, flag):
    later = [violation for violation in violations(*argv) if violation.kind == "later"]
    assert any(flag in violation.message for violation in later)


@pytest.mark.parametrize(
    ("argv", "section", "dest", "value"),
    [
        (["--layernorm-epsilon", "1e-6"], "model", "layernorm_epsilon", 1e-6),
        (["--te-rng-track"], "training", "te_rng_tracker", True),
        (["--moe-loss-coeff", "0.1"], "moe", "moe_aux_loss_coeff", 0.1),
        (["--moe-frequency", "2"], "moe", "moe_layer_freq", 2),
        (["--local_rank", "3"], "parallel", "local_rank", 3),
        (["--moe-token-dispatcher-type", "alltoall_seq"], "moe", "moe_token_dispatcher_type", "alltoall"),
        (["--expert-parallel", "1"], "parallel", "expert_model_parallel_size", 1),
        (["--fp8-e4m3", "--bf16"], "precision", "fp8", "e4m3"),
        (["--use-rotary-position-embeddings"], "model", "position_embedding_type", "rope"),
        (["--no-weight-decay-cond-type", "qwen3_next"], "optimizer", "apply_wd_to_qk_layernorm", True),
        (["--grad-reduce-in-fp32", "false", "--bf16"], "precision", "grad_reduce_in_bf16", True),
        (["--moe-router-type", "top1", "--moe-router-pre-softmax"], "moe", "moe_router_topk", 1),
    ],
)
def test_renamed(argv, section, dest, value):
    args = parse(*argv)
    assert getattr(getattr(args, section), dest) == value
    assert any(argv[0] in line and "is now" in line for line in args.notes)


def test_a_renamed_flag_keeps_the_spelling_in_messages():
    found = violations("--layernorm-epsilon", "small")
    assert found[0].flags == ("--layernorm-epsilon",) and "--norm-epsilon small" in found[0].message


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--expert-parallel"], "--expert-model-parallel-size"),
        (["--moe-extended-tp"], "--expert-tensor-parallel-size"),
        (["--moe-token-dropping"], "--moe-expert-capacity-factor"),
        (["--moe-router-topk-limited-devices", "3"], "--moe-router-group-topk"),
        (["--fp8"], "--fp8-format"),
        (["--moe-router-type", "magic"], "--moe-router-load-balancing-type"),
        (["--spec", "a", "b"], "layers are chosen by flags"),
        (["--transformer-impl", "inference_optimized"], "this program trains"),
    ],
)
def test_refused_with_what_to_use_instead(argv, text):
    assert any(argv[0] in violation.message and text in violation.message for violation in violations(*argv))


@pytest.mark.parametrize(
    "argv",
    [
        ["--no-rope-fusion"],
        ["--use-flash-attn"],
        ["--tp-comm-overlap"],
        ["--use-mcore-models"],
        ["--moe-n-hash-layers", "0", "--no-one-logger"],
        ["--DDP-impl", "local"],
    ],
)
def test_idle_flags_say_why_once(argv):
    args = parse(*argv, *argv)
    name = next(token for token in reversed(argv) if token.startswith("--"))
    lines = [line for line in args.notes if name in line]
    assert len(lines) == len(set(lines)) >= 1


def test_options_of_the_flex_dispatcher_need_it():
    """A buffer's option without that buffer says so; with it, it does not."""
    notes = parse("--moe-flex-dispatcher-num-sms", "8", "--moe-hybridep-num-blocks-permute", "3").notes
    assert any("--moe-flex-dispatcher-num-sms 8 is idle: no effect without --moe-token-dispatcher-type flex" in line for line in notes)
    assert any("no effect without --moe-flex-dispatcher-backend hybridep" in line for line in notes)
    notes = parse("--moe-flex-dispatcher-num-sms", "8", "--moe-token-dispatcher-type", "flex", "--expert-model-parallel-size", "2",
                  "--global-batch-size", "8", world_size=2).notes
    assert not any("num-sms" in line for line in notes)


@pytest.mark.parametrize("dest", [field.name for field in fields(MoEArgs) if field.name != "num_experts"])
def test_a_dense_model_has_no_use_for_flags_of_experts(dest):
    """Given to a dense model they are refused, renamed, or said to be without effect."""
    option = OPTIONS[dest]
    others = [choice for choice in option.choices or () if choice != option.default]
    words = [] if option.takes == 0 else [str(others[-1]) if others else "0.5" if isinstance(option.default, float) else "3"]
    settings, violations = understand([*TOY, "--disable-bias-linear", option.spellings[0], *words], 1)
    told = [flag for violation in violations for flag in violation.flags] + [flag for flag, _ in settings.renamed + settings.idle]
    assert any(flag.split()[0] in option.spellings for flag in told), (option.spellings, words)


def test_the_kind_of_context_parallelism_needs_context_ranks():
    idle = "--cp-comm-type a2a is idle: no effect without --context-parallel-size above 1"
    assert any(idle in line for line in parse("--cp-comm-type", "a2a").notes)
    notes = parse("--cp-comm-type", "a2a", "--context-parallel-size", "2", world_size=2).notes
    assert not any("--cp-comm-type" in line for line in notes)


def test_a_part_without_its_parent_is_said_to_be_idle():
    args = parse("--muon-momentum", "0.8", "--mtp-loss-scaling-factor", "0.3")
    assert any("--muon-momentum 0.8 is idle: no effect without --optimizer muon" in line for line in args.notes)
    assert any(
        "--mtp-loss-scaling-factor 0.3 is idle: no effect without --mtp-num-layers" in line for line in args.notes
    )


def test_flags_of_other_products_are_read_over_with_their_values():
    found = violations(
        "--inference-max-requests", "4", "--rl-inference-parsers", "a", "b", "--img-h", "224", "--perform-rl-step"
    )
    assert [violation.kind for violation in found] == ["product"] * 4
    assert "serving" in found[0].message and "reinforcement" in found[1].message and "vision" in found[2].message


def test_every_spelling_reads_without_derailing():
    """Each known spelling, given as many values as it takes, leaves the flag after it intact."""
    for spelling in [*FIELDS, *products.BY_SPELLING, *retired.BY_SPELLING]:
        if spelling in FIELDS:
            option = FIELDS[spelling]
            takes, word = option.takes, str(option.choices[0]) if option.choices else "1"
            word = "1,1" if option.dest == "window_size" else word
        else:
            takes = (
                products.BY_SPELLING[spelling][1]
                if spelling in products.BY_SPELLING
                else retired.BY_SPELLING[spelling].takes
            )
            word = "1"
        count = {"?": 1, "+": 2, "*": 2}.get(takes, takes)
        reading = read([spelling, *[word] * count, "--exit-interval", "77"])
        assert reading.last("exit_interval") == 77, spelling
        assert all(violation.flags == (spelling,) for violation in reading.violations), spelling
        assert [v for v in reading.violations if "belongs to no flag" in v.message] == [], spelling


def test_every_field_has_exactly_one_standing():
    counts = {}
    for dest in OPTIONS:
        kind, reason = standing.standing_of(dest)
        assert kind == "acts" or reason, dest
        counts[kind] = counts.get(kind, 0) + 1
    assert set(counts) == {"acts", "idle", "later", "renamed", "refused"}


@pytest.mark.parametrize(("old", "new"), [
    ("--activations-checkpoint-method uniform --activations-checkpoint-num-layers 2", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"),
    ("--override-lr-scheduler", "--override-opt_param-scheduler"),
    ("--use-checkpoint-lr-scheduler", "--use-checkpoint-opt-param-scheduler"),
    ("--min-scale 2", "--min-loss-scale 2"),
    ("--no-scaled-masked-softmax-fusion", "--no-masked-softmax-fusion"),
    ("--scatter-gather-tensors-in-pipeline --use-contiguous-buffers-in-ddp --delay-grad-reduce --no-log-learnig-rate-to-tensorboard", ""),
])  # fmt: skip
def test_spellings_of_older_scripts_say_what_they_said(old, new):
    told, meant = parse(*old.split()), parse(*new.split())
    assert (told.training, told.optimizer, told.model) == (meant.training, meant.optimizer, meant.model)
    assert told.output == meant.output and told.precision == meant.precision


def test_flags_of_models_that_retrieve_are_refused_by_name():
    found = violations("--retro-add-retriever", "--retro-num-neighbors", "2", "--encoder-pipeline-model-parallel-size", "1")
    assert [violation.flags for violation in found] == [("--retro-add-retriever",), ("--retro-num-neighbors",), ("--encoder-pipeline-model-parallel-size",)]


@pytest.mark.parametrize("flag", ["--moe-pad-experts-for-cuda-graph-inference", "--enable-gpt-oss", "--export-force-local-attention"])
def test_flags_of_upstream_recipes_have_no_effect_for_a_reason(flag):
    settings, found = understand([*TOY, *MOE, flag], 1)
    assert not found and [name for name, reason in settings.idle if reason] == [flag]


def test_the_overload_factor_comes_with_the_health_of_routing():
    settings, found = understand([*TOY, *MOE, "--log-moe-overload-factor"], 1)
    assert not found and settings.moe_per_layer_logging and settings.renamed == [("--log-moe-overload-factor", "--moe-per-layer-logging")]


@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise"])
def test_muon_updates_weights_that_stay_in_the_models_format(recipe):
    """MXFP8 weights do, also with --fp8-param-gather; those of the other recipes are kept in 8 bits."""
    line = ["--optimizer", "muon", "--bf16", "--fp8-format", "e4m3", "--fp8-recipe", recipe, "--fp8-param-gather", "--use-distributed-optimizer"]
    found = {flag for violation in understand([*TOY, *MOE, *line], 1)[1] for flag in violation.flags}
    assert ("--fp8-param-gather" in found) == (recipe != "mxfp8")


def test_a_plan_without_a_network_takes_any_dispatcher():
    parse("--fake-process-group", "--moe-token-dispatcher-type", "flex", "--expert-model-parallel-size", "2", "--global-batch-size", "8", world_size=2)


def test_a_missing_architecture_is_one_reason():
    line = ("--experimental-attention-variant dsv4_hybrid --csa-compress-ratios [4,128] --csa-window-size 128 --moe-n-hash-layers 3 "
            "--enable-hyper-connections --mhc-sinkhorn-iterations 20 --recompute-granularity selective --recompute-modules mhc "
            "--cuda-graph-impl local --cuda-graph-modules attn --reset-attention-mask")
    found = violations(*line.split())
    assert len(found) == 1 and found[0].kind == "later" and "DeepSeek-V4" in found[0].message
    assert {"--csa-compress-ratios", "--moe-n-hash-layers", "--enable-hyper-connections", "--recompute-modules"} < set(found[0].flags)
    alone = violations("--moe-n-hash-layers", "3")
    assert len(alone) == 1 and "hash routing" in alone[0].message and "DeepSeek-V4" not in alone[0].message

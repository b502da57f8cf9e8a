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


def parse(*argv, world_size=1):
    return parse_args([*TOY, *MOE, *argv], world_size)


def violations(*argv, world_size=1):
    with pytest.raises(ArgumentError) as caught:
        parse(*argv, world_size=world_size)
    return caught.value.violations


def test_tables_contain_only_flags():
    requires = [dest.partition("=")[0] for names, text in flag_status.REQUIRES for dest in (*names, *text.split())]
    tables = [
        flag_status.NOT_IMPLEMENTED,
        flag_status.NO_EFFECT,
        flag_status.UNSUPPORTED,
        flag_status.RENAMED,
        requires,
    ]
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


@pytest.mark.parametrize(
    "dest", [dest for dest, feature in flag_status.NOT_IMPLEMENTED.items() if feature.values is None]
)
def test_missing_feature_is_rejected_by_name(dest):
    option, feature = OPTIONS[dest], flag_status.NOT_IMPLEMENTED[dest]
    settings = Settings(OPTIONS)
    rejected = [choice for choice in option.choices or () if feature.is_requested(choice, settings.default(dest))]
    value = True if option.takes == 0 else rejected[-1] if rejected else [2] if option.is_list else 2
    settings.set_given(dest, value, "command line", option.spellings[0])
    violations = check_flag_status(settings)
    assert [violation.kind for violation in violations] == ["later"]
    assert option.spellings[0] in violations[0].message and feature.what in violations[0].message


def test_message_names_flag_value_and_feature():
    errors = violations("--tensor-parallel-num-weight-shards", "2", world_size=2)
    later = [violation for violation in errors if violation.kind == "later"]
    assert len(later) == 1 and later[0].flags == ("--tensor-parallel-num-weight-shards",)
    assert later[0].message == (
        "--tensor-parallel-num-weight-shards 2: weight-sharded tensor parallelism is not implemented yet"
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
def test_values_that_request_nothing_pass(argv):
    parse(*argv)


def test_out_of_scope_flags_name_the_product():
    for flag, product in (("--dino-warmup-teacher-temp", "vision"), ("--ft-num-warmup-iters", "cluster services")):
        assert any(product in violation.message for violation in violations(flag, "1"))


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(("size", "world_size"), [(2, 2), (2, 4), (4, 4)])
def test_experts_are_sharded_over_data_ranks(size, world_size, dispatcher):
    args = parse(
        "--expert-model-parallel-size",
        str(size),
        "--moe-token-dispatcher-type",
        dispatcher,
        "--global-batch-size",
        "8",
        world_size=world_size,
    )
    assert args.parallel.expert_model_parallel_size == size


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--enable-cuda-graph"], "--enable-cuda-graph"),
        (["--optimizer-cuda-graph"], "--optimizer-cuda-graph"),
    ],
)
def test_message_uses_the_spelling_given(argv, flag):
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
def test_renamed_flags_are_accepted_with_a_note(argv, section, dest, value):
    args = parse(*argv)
    assert getattr(getattr(args, section), dest) == value
    assert any(argv[0] in line and "is now" in line for line in args.notes)


def test_renamed_flag_keeps_its_spelling_in_messages():
    errors = violations("--layernorm-epsilon", "small")
    assert errors[0].flags == ("--layernorm-epsilon",) and "--norm-epsilon small" in errors[0].message


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--expert-parallel"], "--expert-model-parallel-size"),
        (["--moe-extended-tp"], "--expert-tensor-parallel-size"),
        (["--moe-token-dropping"], "--moe-expert-capacity-factor"),
        (["--moe-router-topk-limited-devices", "3"], "--moe-router-group-topk"),
        (["--fp8"], "--fp8-format"),
        (["--moe-router-type", "magic"], "--moe-router-load-balancing-type"),
        (["--transformer-impl", "inference_optimized"], "this program trains"),
    ],
)
def test_rejection_says_what_to_use_instead(argv, text):
    assert any(argv[0] in violation.message and text in violation.message for violation in violations(*argv))


@pytest.mark.parametrize(
    "argv",
    [
        ["--no-bias-dropout-fusion"],
        ["--use-flash-attn"],
        ["--tp-comm-overlap"],
        ["--use-mcore-models"],
        ["--moe-n-hash-layers", "0", "--no-one-logger"],
        ["--DDP-impl", "local"],
    ],
)
def test_flags_without_effect_are_explained_once(argv):
    args = parse(*argv, *argv)
    name = next(token for token in reversed(argv) if token.startswith("--"))
    lines = [line for line in args.notes if name in line]
    assert len(lines) == len(set(lines)) >= 1


def test_flex_options_need_the_flex_dispatcher():
    """A buffer's option without that buffer is noted; with it, it is not."""
    notes = parse("--moe-flex-dispatcher-num-sms", "8", "--moe-hybridep-num-blocks-permute", "3").notes
    assert any(
        "--moe-flex-dispatcher-num-sms 8 has no effect without --moe-token-dispatcher-type flex" in line
        for line in notes
    )
    assert any("no effect without --moe-flex-dispatcher-backend hybridep" in line for line in notes)
    notes = parse(
        "--moe-flex-dispatcher-num-sms",
        "8",
        "--moe-token-dispatcher-type",
        "flex",
        "--expert-model-parallel-size",
        "2",
        "--global-batch-size",
        "8",
        world_size=2,
    ).notes
    assert not any("num-sms" in line for line in notes)


@pytest.mark.parametrize("dest", [field.name for field in fields(MoEArgs) if field.name != "num_experts"])
def test_dense_model_reports_expert_flags(dest):
    """Given to a dense model, they are rejected, renamed, or reported as having no effect."""
    option = OPTIONS[dest]
    others = [choice for choice in option.choices or () if choice != option.default]
    words = (
        []
        if option.takes == 0
        else [str(others[-1]) if others else "0.5" if isinstance(option.default, float) else "3"]
    )
    settings, violations = resolve_command_line([*TOY, "--disable-bias-linear", option.spellings[0], *words], 1)
    actual = [flag for violation in violations for flag in violation.flags] + [
        flag for flag, _ in settings.renamed + settings.no_effect
    ]
    assert any(flag.split()[0] in option.spellings for flag in actual), (
        f"{option.spellings[0]} has no effect on a dense model: add it under num_experts in flag_status.REQUIRES"
    )


def test_profile_of_ranks_that_do_not_exist_has_a_note():
    flags = ("--profile", "--profile-ranks", "2", "3")
    found = [
        any("--profile-ranks" in note for note in parse(*flags, "--global-batch-size", "8", world_size=size).notes)
        for size in (2, 4)
    ]
    assert found == [True, False]


def test_scoring_flags_have_no_effect_with_sinkhorn():
    sinkhorn = ("--num-experts", "4", "--moe-router-load-balancing-type", "sinkhorn", "--moe-aux-loss-coeff", "0")
    notes = parse(*sinkhorn, "--moe-router-topk-scaling-factor", "2.5").notes
    assert any(note.startswith("--moe-router-topk-scaling-factor 2.5: no effect with") for note in notes), notes
    assert not any("no effect with --moe-router-load-balancing-type" in note for note in parse(*sinkhorn).notes)


def test_cp_comm_type_needs_context_ranks():
    idle = "--cp-comm-type a2a has no effect without --context-parallel-size above 1"
    assert any(idle in line for line in parse("--cp-comm-type", "a2a").notes)
    notes = parse("--cp-comm-type", "a2a", "--context-parallel-size", "2", world_size=2).notes
    assert not any("--cp-comm-type" in line for line in notes)


def test_option_without_its_feature_has_no_effect():
    args = parse("--muon-momentum", "0.8", "--mtp-loss-scaling-factor", "0.3")
    assert any("--muon-momentum 0.8 has no effect without --optimizer muon" in line for line in args.notes)
    assert any("--mtp-loss-scaling-factor 0.3 has no effect without --mtp-num-layers" in line for line in args.notes)


def test_feature_with_a_rejected_value_is_not_called_missing():
    phases = ("--phase-data-args-path", "a", "b")
    with pytest.raises(ArgumentError) as raised:
        parse(*phases, "--phase-transition-iterations", "0,3")
    assert "the value must be different iterations above 0" in str(raised.value)
    assert not any("has no effect" in note for note in raised.value.notes), raised.value.notes
    assert any("has no effect without --phase-transition-iterations" in note for note in parse(*phases).notes)


def test_files_of_phases_after_the_end_are_named():
    phases = "--phase-transition-iterations 4,20 --phase-data-args-path a b c --train-iters".split()
    argv = [flag for flag in TOY if flag != "--mock-data"] + phases
    notes = parse_args([*argv, "6"], 1).notes
    assert any("--phase-data-args-path: c will not be read: the run ends with iteration 6" in line for line in notes)
    assert not any("will not be read" in line for line in parse_args([*argv, "21"], 1).notes)


def test_streamed_text_without_validation_is_noted():
    argv = [flag for flag in TOY if flag != "--mock-data"]
    argv += "--dataloader-type external --train-data-path a.jsonl --eval-interval 5 --eval-iters".split()
    text = "--eval-iters 2 with --dataloader-type external: nothing is validated; give --valid-data-path FILES"
    assert any(text in note for note in parse_args([*argv, "2"], 1).notes)
    for more in (["0"], ["2", "--valid-data-path", "b.jsonl"]):
        assert not any("nothing is validated" in note for note in parse_args([*argv, *more], 1).notes)


FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --use-distributed-optimizer --data-parallel-sharding-strategy"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            "--num-experts 4 --moe-grouped-gemm --use-transformer-engine-op-fuser --transformer-impl local",
            "--use-transformer-engine-op-fuser has no effect without --transformer-impl transformer_engine",
        ),
        (
            "--num-experts 4 --moe-grouped-gemm --use-transformer-engine-op-fuser --moe-token-dispatcher-type flex "
            "--moe-flex-dispatcher-backend hybridep --moe-expert-rank-capacity-factor 2 --moe-paged-stash",
            "--use-transformer-engine-op-fuser has no effect: TransformerEngine cannot compute these experts, because the "
            "tensors that it saves for backward cannot be stored in pages (--moe-paged-stash)",
        ),
        *(
            (
                f"{FSDP} optim {flag}",
                f"{flag} has no effect without --data-parallel-sharding-strategy optim_grads or optim_grads_params",
            )
            for flag in ("--fsdp-double-buffer", "--use-nccl-ub")
        ),
        (
            f"{FSDP} optim --enable-full-sharding-in-hsdp",
            "--enable-full-sharding-in-hsdp has no effect without sharded parameters",
        ),
    ],
)
def test_flags_without_effect_in_combination(flags, line):
    settings, _ = resolve_command_line([*TOY, "--disable-bias-linear", *flags.split()], 1)
    assert line in settings.lines()
    acting = flags.replace("local", "transformer_engine").replace("optim --", "optim_grads_params --")
    acting = acting.removesuffix("--moe-paged-stash")
    settings, _ = resolve_command_line([*TOY, "--disable-bias-linear", *acting.split()], 1)
    assert line not in settings.lines()


def test_out_of_scope_values_are_skipped():
    errors = violations(
        "--inference-max-requests", "4", "--rl-inference-parsers", "a", "b", "--img-h", "224", "--perform-rl-step"
    )
    assert [violation.kind for violation in errors] == ["product"] * 4
    assert "serving" in errors[0].message and "reinforcement" in errors[1].message and "vision" in errors[2].message


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
        word = (
            "1,1"
            if option and option.dest == "window_size"
            else str(option.choices[0])
            if option and option.choices
            else "1"
        )
        count = {"?": 1, "+": 2, "*": 2}.get(takes, takes)
        parsed = parse_tokens([spelling, *[word] * count, "--exit-interval", "77"])
        assert parsed.last("exit_interval") == 77, spelling
        assert all(violation.flags == (spelling,) for violation in parsed.violations), spelling
        assert [v for v in parsed.violations if "unexpected argument" in v.message] == [], spelling


def test_every_field_has_a_status():
    statuses = {dest: flag_status.get_flag_status(dest) for dest in OPTIONS}
    assert [dest for dest, (status, reason) in statuses.items() if status != "acts" and not reason] == []
    assert {status for status, _ in statuses.values()} == {
        "acts",
        "no effect",
        "not implemented",
        "renamed",
        "unsupported",
    }


@pytest.mark.parametrize(("old", "new"), [
    ("--activations-checkpoint-method uniform --activations-checkpoint-num-layers 2", "--recompute-granularity full "
                                                                                      "--recompute-method uniform "
                                                                                      "--recompute-num-layers 2"),
    ("--override-lr-scheduler", "--override-opt_param-scheduler"),
    ("--use-checkpoint-lr-scheduler", "--use-checkpoint-opt-param-scheduler"),
    ("--min-scale 2", "--min-loss-scale 2"),
    ("--no-scaled-masked-softmax-fusion", "--no-masked-softmax-fusion"),
    ("--scatter-gather-tensors-in-pipeline --use-contiguous-buffers-in-ddp --delay-grad-reduce "
     "--no-log-learnig-rate-to-tensorboard", ""),
])  # fmt: skip
def test_old_spellings_keep_their_meaning(old, new):
    actual, meant = parse(*old.split()), parse(*new.split())
    assert (actual.training, actual.optimizer, actual.model) == (meant.training, meant.optimizer, meant.model)
    assert actual.output == meant.output and actual.precision == meant.precision


def test_retrieval_flags_are_rejected_by_name():
    errors = violations(
        "--retro-add-retriever", "--retro-num-neighbors", "2", "--encoder-pipeline-model-parallel-size", "1"
    )
    assert [violation.flags for violation in errors] == [
        ("--retro-add-retriever",),
        ("--retro-num-neighbors",),
        ("--encoder-pipeline-model-parallel-size",),
    ]


@pytest.mark.parametrize(
    "flag", ["--moe-pad-experts-for-cuda-graph-inference", "--enable-gpt-oss", "--export-force-local-attention"]
)
def test_upstream_recipe_flags_have_no_effect(flag):
    settings, errors = resolve_command_line([*TOY, *MOE, flag], 1)
    assert not errors and [name for name, reason in settings.no_effect if reason] == [flag]


def test_overload_factor_turns_on_per_layer_logging():
    settings, errors = resolve_command_line([*TOY, *MOE, "--log-moe-overload-factor"], 1)
    assert (
        not errors
        and settings.moe_per_layer_logging
        and settings.renamed == [("--log-moe-overload-factor", "--moe-per-layer-logging")]
    )


def test_dry_run_accepts_any_dispatcher():
    parse(
        "--fake-process-group",
        "--moe-token-dispatcher-type",
        "flex",
        "--expert-model-parallel-size",
        "2",
        "--global-batch-size",
        "8",
        world_size=2,
    )

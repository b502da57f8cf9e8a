"""Every rule: a line that breaks it, and similar lines that do not. Every rule must report at least one line."""

import pytest
from training.tiny import MOCK, TINY

from arguments import rules
from arguments.container import OPTIONS
from arguments.machine import check_machine
from arguments.parse import resolve_command_line
from arguments.rules.derived_sizes import derive_sizes
from tests.arguments.graph_lines import UNSUPPORTED
from tests.arguments.invalid_command_lines import DENSE, INVALID_LINES, SELECTIVE, VALID_LINES
from tests.arguments.rule_lines import base_line, changed, findings, violated_flags

FLEX = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend"


def line_name(line) -> str:
    return f"{line[0]} | -{line[1]}"


@pytest.mark.parametrize("line", INVALID_LINES, ids=line_name)
def test_invalid_lines_are_rejected_naming_the_flag(line):
    added, removed, flag = line
    _, violations = findings(changed(added, removed), 8)
    assert flag in violated_flags(violations), "; ".join(map(str, violations))
    for violation in violations:
        assert violation.flags[0] in violation.message or violation.kind != "rule" or "ranks" in violation.message


@pytest.mark.parametrize("line", VALID_LINES, ids=line_name)
def test_valid_lines_pass(line):
    _, violations = findings(changed(*line), 8)
    assert not violations


def test_number_out_of_range_is_reported_once():
    for dest, value, added in (
        ("qk_clip_threshold", "-1", "--qk-clip"),
        ("qk_clip_alpha", "2", "--qk-clip"),
        ("qk_clip_alpha", "-1", "--qk-clip"),
        ("qk_clip_alpha", "0", "--qk-clip"),
        ("fp8_amax_history_len", "0", "--fp8-format e4m3 --fp8-recipe delayed"),
        ("moe_deepep_num_sms", "0", f"{FLEX} deepep"),
        ("moe_hybridep_num_sms", "-1", f"{FLEX} hybridep"),
    ):
        _, violations = findings(changed(f"{added} {OPTIONS[dest].on[0]} {value}", ""), 8)
        assert len(violations) == 1, "; ".join(map(str, violations))


@pytest.mark.parametrize(
    ("size", "expected"),
    [(3, "does not divide 8 ranks"), (8, "one node"), (12, "one node"), (2, None), (4, "one node")],
)
def test_nodes_that_do_not_divide_the_ranks_are_noted(size, expected):
    added = f"{FLEX} hierarchical --expert-model-parallel-size 4 --moe-hierarchical-domain-size {size}"
    settings, violations = resolve_command_line(changed(added, "--moe-token-dispatcher-type"), 8)
    notes = [note for note in settings.notes if note.startswith("--moe-hierarchical-domain-size")]
    assert not violations and len(notes) == (expected is not None) and all(expected in note for note in notes)


@pytest.mark.parametrize(("last", "is_noted"), [(11, True), (12, False)])
def test_a_profile_that_would_not_be_written_is_noted(last, is_noted):
    notes = resolve_command_line(changed(f"--profile --train-iters {last}", "--train-samples"), 8)[0].notes
    assert any("no profile is written" in note for note in notes) == is_noted


def test_every_rule_has_an_invalid_command_line():
    """A rule that no invalid line breaks is dead, or untested."""
    silent = set(rules.CHECKS)
    for added, removed, _ in (*INVALID_LINES, *UNSUPPORTED):
        settings, _ = resolve_command_line(changed(added, removed), 8)
        facts = derive_sizes(settings, 8)
        silent -= {rule for rule in silent if list(rule(settings, facts))}
    assert not silent, sorted(rule.__name__ for rule in silent)


def test_every_rule_function_is_registered():
    """A rule whose name does not match the naming scheme would never run."""
    for area in rules.AREAS:
        run = {rule for rule in (*rules.RESOLVERS, *rules.CHECKS, *rules.LIMITS) if rule.__module__ == area.__name__}
        written = [
            item
            for name, item in vars(area).items()
            if callable(item) and getattr(item, "__module__", "") == area.__name__ and not name.startswith("_")
        ]
        rule_like = [item for item in written if item.__code__.co_varnames[:2] in (("s", "f"), ("s", "_f"))]
        assert set(rule_like) == run, area.__name__


def test_all_violations_at_once():
    line = changed(
        "--moe-router-topk 9 --moe-router-enable-expert-bias --moe-router-num-groups 2 --moe-router-group-topk 1 "
        "--global-batch-size 12 --save out --split 1,2,3,4",
        "--moe-router-topk --global-batch-size",
    )
    _, violations = findings(line, 8)
    assert {
        "--moe-router-topk",
        "--moe-router-enable-expert-bias",
        "--global-batch-size",
        "--save",
        "--split",
    } <= violated_flags(violations)
    assert len(violations) == 5


def test_world_size_rules_are_skipped_when_it_is_unknown():
    line = changed(
        "--tensor-model-parallel-size 3 --num-attention-heads 6 --kv-channels 64 --seq-length 1023",
        "--num-attention-heads --seq-length",
    )
    settings, violations = findings(line, None)
    assert not violations
    assert sum("--world-size" in note for note in settings.notes) == 1
    assert findings(line, 8)[1]


def test_messages_are_short_and_complete():
    for added, removed, _ in INVALID_LINES:
        for violation in findings(changed(added, removed), 8)[1]:
            if violation.kind == "rule":
                assert violation.message.endswith("."), violation
                assert len(violation.message) < 420, violation


def _values(option) -> tuple[str, ...]:
    if option.takes == 0:
        return ("",)
    return tuple(map(str, option.choices[:2] if option.choices else ("-1", "0", "7", "nan")))


def test_rules_do_not_crash_on_any_flag_value():
    base = base_line()
    for option in OPTIONS.values():
        count = option.takes if isinstance(option.takes, int) else 1
        for value in _values(option):
            settings, _ = resolve_command_line(
                [*base, option.spellings[-1], *[value] * count], None if value == "7" else 8
            )
            check_machine(settings, {}, 9)
            rules.derived(settings, 8)


def test_resolving_twice_changes_nothing():
    for added, removed in VALID_LINES:
        settings, _ = resolve_command_line(changed(added, removed), 8)
        before = dict(settings.values)
        rules.resolve(settings, 8)
        assert settings.values == before, added


OFFLOAD = "--fine-grained-activation-offloading --transformer-impl transformer_engine --offload-modules"


@pytest.mark.parametrize(
    ("added", "removed", "expected"),
    [
        (
            f"{SELECTIVE} moe shared_experts core_attn",
            DENSE,
            ["--recompute-modules moe: ", "--recompute-modules shared_experts: "],
        ),
        (
            f"{OFFLOAD} expert_fc1 moe_act attn_norm",
            DENSE,
            ["--offload-modules expert_fc1: ", "--offload-modules moe_act: "],
        ),
        (f"{SELECTIVE} shared_experts moe", "", ["--recompute-modules shared_experts: "]),
        (f"{SELECTIVE} shared_experts --moe-shared-expert-intermediate-size 64", "", []),
        (f"{SELECTIVE} mlp", "", ["--recompute-modules mlp: "]),
        (f"{SELECTIVE} mlp --moe-layer-freq 2", "", []),
        (f"{SELECTIVE} mlp", DENSE, []),
        (f"{OFFLOAD} expert_fc1 moe_act", "", []),
    ],
)
def test_modules_that_no_layer_has_are_noted(added, removed, expected):
    settings, _ = resolve_command_line(changed(added, removed), 8)
    notes = [note for note in settings.notes if "no layer of this model has" in note]
    assert [note.split(": ")[0] + ": " for note in notes] == expected


TRITON = "--triton-kernels"


@pytest.mark.parametrize(
    ("added", "removed", "expected"),
    [
        (f"{TRITON} permute router grouped-gemm rope", DENSE, {"permute", "router", "grouped-gemm"}),
        (f"{TRITON} all", DENSE, set()),
        (f"{TRITON} permute router grouped-gemm activation --moe-grouped-gemm", "", set()),
        (f"{TRITON} grouped-gemm", "--moe-grouped-gemm", {"grouped-gemm"}),
        (f"{TRITON} grouped-gemm quantize --moe-grouped-gemm --fp8-format e4m3", "", {"grouped-gemm"}),
        (f"{TRITON} grouped-gemm --moe-grouped-gemm --fp8-format e4m3 --first-last-layers-bf16", "", set()),
        (f"{TRITON} quantize", "", {"quantize"}),
        (f"{TRITON} quantize --fp4-format e2m1", "", set()),
        (f"{TRITON} router --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0", "", {"router"}),
        (
            f"{TRITON} router --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0 --moe-z-loss-coeff 1e-3",
            "",
            set(),
        ),
        (
            f"{TRITON} permute --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep "
            "--expert-model-parallel-size 2",
            "--moe-token-dispatcher-type",
            {"permute"},
        ),
        (
            f"{TRITON} permute --moe-token-dispatcher-type flex --expert-model-parallel-size 2",
            "--moe-token-dispatcher-type",
            set(),
        ),
        (f"{TRITON} sparse-attention", "", {"sparse-attention"}),
        (f"{TRITON} norm --normalization LayerNorm", "--normalization", {"norm"}),
        (f"{TRITON} norm --normalization RMSNorm", "--normalization", set()),
        (f"{TRITON} norm --normalization LayerNorm --qk-l2-norm", "--normalization", set()),
    ],
)
def test_unused_triton_kernels_are_noted(added, removed, expected):
    settings, _ = resolve_command_line(changed(added, removed), 8)
    assert {flag for flag, _ in settings.no_effect if flag.startswith(TRITON)} == {
        f"{TRITON} {name}" for name in expected
    }


def test_adjusted_and_ignored_flags_are_noted_once():
    for added, removed, word in (
        ("--tp-comm-overlap", "", "--tp-comm-overlap"),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "", "--cross-entropy-fusion-impl"),
        ("--checkpoint-activations", "", "--checkpoint-activations"),
        ("--batch-size 2", "--micro-batch-size", "--micro-batch-size 2"),
        ("--sequence-parallel", "", "--sequence-parallel"),
        ("--data-path /d", "--mock-data", "969, 30, 1"),
        (
            "--overlap-dispatch-backward-with-experts-wgrad --moe-token-dispatcher-type allgather "
            "--expert-model-parallel-size 2",
            "--moe-token-dispatcher-type",
            "gathers in one call",
        ),
        ("--overlap-dispatch-backward-with-experts-wgrad --expert-model-parallel-size 1", "", "there is no exchange"),
        (
            "--moe-shared-expert-overlap --moe-shared-expert-intermediate-size 64 --expert-model-parallel-size 1",
            "",
            "there is no exchange to overlap with",
        ),
        (
            "--moe-token-dispatcher-type flex --moe-router-padding-for-quantization --fp8-format e4m3 "
            "--expert-model-parallel-size 2",
            "--moe-token-dispatcher-type",
            "not padded with further tokens",
        ),
        (
            "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-permute-fusion "
            "--expert-model-parallel-size 2",
            "--moe-token-dispatcher-type",
            "HybridEP sorts tokens itself",
        ),
        (f"{SELECTIVE} moe_act --moe-grouped-gemm", "", "the local experts never save"),
        (
            "--fp8-format e4m3 --first-last-layers-bf16 --num-layers-at-start-in-bf16 4 --num-layers-at-end-in-bf16 4",
            "",
            "quantizes none of them",
        ),
    ):
        settings, _ = resolve_command_line(changed(added, removed), 8)
        assert sum(word in note for note in settings.notes) == 1, (added, settings.notes)


@pytest.mark.parametrize("words, expected", [
    ("--skip-train --load l --eval-iters 1 --exit-interval 5 --async-save --iterations-to-skip 2",
     "--async-save, --exit-interval, --iterations-to-skip with --skip-train: no effect"),
    ("--skip-train --load l --eval-iters 0", "--eval-iters 0 with --skip-train: nothing is evaluated"),
    ("--skip-train --eval-iters 1", "--skip-train without --load: the initial weights are evaluated"),
])  # fmt: skip
def test_flags_without_effect_under_skip_train_are_noted(words, expected):
    flag_words = words.split()
    base = [word for word in TINY if word not in ("--eval-iters", "0")] if "--eval-iters" in flag_words else TINY
    data = [] if "--data-path" in flag_words else MOCK
    settings, _ = resolve_command_line([*base, *data, "--train-iters", "10", *flag_words], 1)
    ordinary, _ = resolve_command_line([*TINY, *MOCK, "--train-iters", "10"], 1)
    assert any(expected in " ".join(note.split()) for note in settings.notes), settings.notes
    assert not any("no effect" in note or "--skip-train" in note for note in ordinary.notes)


def test_fim_flags_without_fim_data_are_noted_once():
    settings, _ = resolve_command_line(
        [*TINY, *MOCK, "--train-iters", "10", "--fim-rate", "0.3", "--fim-fragment-rate", "0.3"], 1
    )
    for flag, needed in (("--fim-rate", "--fim-data"), ("--fim-fragment-rate", "--fim-split-sample")):
        (line,) = (line for line in settings.lines() if flag in line)
        assert f"no effect without {needed}" in line


BUDGET = (
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --expert-model-parallel-size 2 "
    "--moe-expert-rank-capacity-factor"
)
REPEATED = "even routing does not fit, so iterations are repeated"
QUANTIZED = f"{BUDGET} 1.5 --bf16 --moe-grouped-gemm --fp8-format e4m3 --fp8-recipe blockwise"
TE_EXPERTS = "experts in fp8 and fp4 are this program's"
IN_A_GRAPH = "read them on the host, which a CUDA graph cannot contain"


@pytest.mark.parametrize("added, expected", [
    (f"{BUDGET} 0.5", {REPEATED: 1}),
    (f"{BUDGET} 1.5", {}),
    (f"{BUDGET} 0.5 --moe-paged-stash --moe-paged-stash-buffer-size-factor-cuda 0.01", {REPEATED: 2}),
    (f"{BUDGET} 1.5 --moe-paged-stash --moe-paged-stash-buffer-size-factor-cuda 0.5 "
     "--moe-paged-stash-buffer-size-factor-cpu 0.6", {}),
    (f"{QUANTIZED}", {TE_EXPERTS: 1}),
    (f"{QUANTIZED} --moe-paged-stash", {}),
    (f"{QUANTIZED} --transformer-impl transformer_engine", {}),
    (f"{QUANTIZED} --transformer-impl transformer_engine --cuda-graph-impl full_iteration",
     {TE_EXPERTS: 1, IN_A_GRAPH: 1}),
    (f"{QUANTIZED} --cuda-graph-impl full_iteration", {TE_EXPERTS: 1, IN_A_GRAPH: 1}),
    (f"{QUANTIZED} --transformer-impl transformer_engine --cuda-graph-impl local "
     "--cuda-graph-modules attn", {}),
    (f"{QUANTIZED} --fp8-recipe delayed", {}),
    (f"{QUANTIZED} --moe-permute-fusion-into-hybridep", {}),
    (f"{QUANTIZED} --use-transformer-engine-op-fuser", {}),
    (f"{QUANTIZED} --transformer-impl local", {}),
])  # fmt: skip
def test_notes_of_receive_buffers(added, expected):
    notes = resolve_command_line(changed(added, "--moe-token-dispatcher-type"), 8)[0].notes
    for text in (REPEATED, TE_EXPERTS, IN_A_GRAPH):
        assert sum(text in note for note in notes) == expected.get(text, 0), (text, notes)
    assert not any("te-rng-tracker" in note for note in notes)

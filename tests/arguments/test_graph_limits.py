"""Parts that cannot be captured as CUDA graphs are refused by name; parts that can are accepted."""

import pytest

from arguments.parse import resolve_command_line
from tests.arguments.graph_lines import HYBRIDEP, NOT_CAPTURED, PADDED, PREPROCESS, ROUTER, SUPPORTED, UNSUPPORTED
from tests.arguments.rule_lines import changed


def not_implemented_violations(added, removed=""):
    return [violation for violation in resolve_command_line(changed(added, removed), 8)[1] if violation.kind == "later"]


@pytest.mark.parametrize("line", UNSUPPORTED, ids=lambda line: line[0])
def test_unsupported_graph_flags_are_rejected_by_name(line):
    added, removed, flag = line
    found = not_implemented_violations(added, removed)
    assert flag in {name for violation in found for name in violation.flags}
    asked = "--enable-cuda-graph" if "--enable" in added else "--cuda-graph-impl"
    assert all(asked in violation.message for violation in found if flag in violation.flags)


@pytest.mark.parametrize("added", SUPPORTED)
def test_supported_graph_flags_are_accepted(added):
    assert not [violation for violation in not_implemented_violations(added) if "--cuda-graph-impl" in violation.flags]


@pytest.mark.parametrize(("added", "reason"), NOT_CAPTURED)
def test_modules_that_are_not_captured_are_logged_once(added, reason):
    settings, violations = resolve_command_line(changed(added), 8)
    messages = [line for line in settings.notes if "moe_preprocess is not captured" in line]
    assert len(messages) == 1 and reason in messages[0] and not violations


@pytest.mark.parametrize("added", [PREPROCESS, f"{PREPROCESS} --expert-model-parallel-size 2", ROUTER])
def test_no_note_when_all_modules_are_captured(added):
    assert not [line for line in resolve_command_line(changed(added), 8)[0].notes if "not captured" in line]


def test_full_iteration_graph_of_dropless_experts_gives_one_error():
    flags = (
        "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad --moe-router-force-biased 1.0 "
        f"--expert-model-parallel-size 4 {HYBRIDEP}"
    )
    found = not_implemented_violations(flags)
    assert len(found) == 1 and "dropless" in found[0].message
    assert "--moe-expert-rank-capacity-factor" in found[0].message
    assert ["--moe-router-force-biased" in each.flags for each in not_implemented_violations(f"{flags} {PADDED}")] == [
        True
    ]


def test_all_obstacles_are_reported_at_once():
    found = not_implemented_violations(
        f"{ROUTER} --attention-dropout 0.1 --hidden-dropout 0 --recompute-granularity selective --moe-router-force-biased 1.0 --use-torch-fsdp2"
    )
    assert len([violation for violation in found if "--cuda-graph-impl" in violation.flags]) == 3


def test_modules_without_graphs_report_no_effect():
    settings, _ = resolve_command_line(changed("--cuda-graph-modules attn"), 8)
    assert any("--cuda-graph-modules" in flag for flag, _ in settings.no_effect)

"""Recorded outcomes of Megatron-LM's own validation against ours: equal, or a known difference."""

import json

import pytest

from arguments.megatron_differences import FAILS_EARLIER, MORE_PERMISSIVE
from arguments.rules import derived
from tests.arguments.rule_lines import findings, recorded, violated_flags, without

KNOWN = frozenset(name for entry in (*MORE_PERMISSIVE, *FAILS_EARLIER) for name in entry.cases)
SUBSET = recorded("rule_cases")


def assert_recorded_outcome(case: dict, argv: list[str]) -> None:
    """Fail unless a recorded case has the recorded outcome, values included."""
    env = {name: value for name, value in case["env"].items() if value != "__unset__"}
    settings, violations = findings(argv, case["world_size"], env, case["arch"])
    # Megatron-LM's parser accepts what only its builders refuse; so does parse_args, and the start refuses
    violations = [violation for violation in violations if violation.kind != "build"]
    reported = "; ".join(map(str, violations))
    if (case["outcome"] == "ok") == bool(violations):
        assert case["name"] in KNOWN, f"{case['name']}: recorded {case['outcome']}, ours: {reported or 'no violation'}"
        return
    if violations:
        named = {token for token in case["added"] if token.startswith("--")} | set(case["removed"])
        assert named & violated_flags(violations), f"{case['name']}: none of {sorted(named)} is named in: {reported}"
        return
    values = settings.values | derived(settings, case["world_size"])
    for key, wanted in case.get("observed", {}).items():
        name = "query_groups" if key == "cfg.num_query_groups" else key.removeprefix("cfg.")
        if isinstance(wanted, list):
            wanted = [str(w).removeprefix("CudaGraphModule.") if isinstance(w, str) else w for w in wanted]
        assert values[name] == wanted, f"{case['name']}: {key}"


@pytest.mark.parametrize("case", SUBSET["cases"], ids=lambda case: case["name"])
def test_recorded_subset_has_megatron_outcomes(case):
    assert_recorded_outcome(case, without(SUBSET["base"], case["removed"]) + case["added"])


def test_all_recorded_cases_have_megatron_outcomes(shared):
    for case in json.loads((shared / "reference" / "rule_cases.json").read_text()):
        assert_recorded_outcome(case, case["argv"])


def test_known_differences_are_recorded_cases(shared):
    names = {case["name"] for case in json.loads((shared / "reference" / "rule_cases.json").read_text())}
    recorded_elsewhere = {"tp1_tp_comm_overlap"}  # in rules.md only
    assert KNOWN - recorded_elsewhere <= names

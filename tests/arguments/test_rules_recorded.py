"""Recorded outcomes of Megatron-LM's own validation against ours: equal, or a known difference."""

import json
from itertools import pairwise

from arguments.megatron_differences import FAILS_EARLIER, MORE_PERMISSIVE
from arguments.rules import derived
from tests.arguments.recorded import megatron_flags
from tests.arguments.rule_lines import findings, recorded, violated_flags, without

KNOWN = frozenset(name for entry in (*MORE_PERMISSIVE, *FAILS_EARLIER) for name in entry.cases)
SUBSET = recorded("rule_cases")
CHOICES = {flag: record["choices"] for record in megatron_flags() if record["choices"] for flag in record["flags"]}


def difference_from_record(case: dict, argv: list[str]) -> str | None:
    """Return how a case differs from the recorded outcome, values included; None if it does not, or as is known."""
    env = {name: value for name, value in case["env"].items() if value != "__unset__"}
    settings, violations = findings(argv, case["world_size"], env, case["arch"])
    # Megatron-LM's parser accepts what only its builders refuse; so does parse_args, and the start refuses
    violations = [violation for violation in violations if violation.kind != "build"]
    reported = "; ".join(map(str, violations))
    if (case["outcome"] == "ok") == bool(violations):
        known = case["name"] in KNOWN
        return None if known else f"{case['name']}: recorded {case['outcome']}, ours: {reported or 'no violation'}"
    if violations:
        named = {token for token in case["added"] if token.startswith("--")} | set(case["removed"])
        names_one = named & violated_flags(violations)
        return None if names_one else f"{case['name']}: none of {sorted(named)} is named in: {reported}"
    values = settings.values | derived(settings, case["world_size"])
    for key, wanted in case.get("observed", {}).items():
        name = "query_groups" if key == "cfg.num_query_groups" else key.removeprefix("cfg.")
        if isinstance(wanted, list):
            wanted = [str(w).removeprefix("CudaGraphModule.") if isinstance(w, str) else w for w in wanted]
        if values[name] != wanted:
            return f"{case['name']}: {key} is {values[name]}, recorded {wanted}"
    return None


def test_recorded_subset_has_megatron_outcomes():
    problems = [
        difference_from_record(case, without(SUBSET["base"], case["removed"]) + case["added"])
        for case in SUBSET["cases"]
    ]
    assert not any(problems), "\n".join(filter(None, problems))


def has_recorded_choices(case: dict) -> bool:
    """Return whether tests/data has the values that Megatron-LM accepted; removal drops those of a feature."""
    return case["outcome"] != "ok" or all(value in CHOICES.get(flag, [value]) for flag, value in pairwise(case["argv"]))


def test_all_recorded_cases_have_megatron_outcomes(shared):
    cases = json.loads((shared / "reference" / "rule_cases.json").read_text())
    problems = [difference_from_record(case, case["argv"]) for case in cases if has_recorded_choices(case)]
    assert not any(problems), "\n".join(filter(None, problems))


def test_known_differences_are_recorded_cases(shared):
    names = {case["name"] for case in json.loads((shared / "reference" / "rule_cases.json").read_text())}
    recorded_elsewhere = {"tp1_tp_comm_overlap"}  # in rules.md only
    assert KNOWN - recorded_elsewhere <= names

"""Every rejection is Megatron-LM's (or a wrong value), or it is a limit of this program, which the manual lists."""

import ast
import inspect
import re

import pytest

from arguments import refused, rules
from arguments.parse import resolve_command_line
from arguments.rules.derived_sizes import derive_sizes
from tests.arguments.rule_lines import changed, recorded

SOURCES = recorded("check_sources")
"""Check -> {"source": numbers in reference/rules.md, or words; "yields": the number of its violations}."""
GRAPHS = "--cuda-graph-impl local --cuda-graph-modules"
SPARSE = "--multi-latent-attention --experimental-attention-variant dsa"
REJECTED = (
    # (added to the base line, part of the page's text)
    (f"{GRAPHS} attn --use-torch-fsdp2", "cannot capture modules with `--use-torch-fsdp2`"),
    (f"{GRAPHS} attn --attention-dropout 0.1 --recompute-granularity selective", "with `--attention-dropout`"),
    (f"{GRAPHS} moe_router --moe-router-force-biased 1.0", "forced biases are drawn on the host"),
    (
        "--use-megatron-fsdp --ckpt-format fsdp_dtensor --pipeline-schedule zero-bubble --pipeline-model-parallel-size "
        "2 --data-parallel-sharding-strategy optim_grads_params",
        "`--use-megatron-fsdp` cannot be combined with `--pipeline-schedule` zero-bubble",
    ),
    (
        "--moe-clone-hot-experts 1 --expert-model-parallel-size 2 --fp8-format hybrid --fp8-recipe delayed",
        "`--moe-clone-hot-experts` cannot be combined with `--fp8-recipe` delayed",
    ),
    (
        "--moe-dispatch-fwd-dtype mxfp8 --moe-token-dispatcher-type allgather --expert-model-parallel-size 2",
        "`--moe-dispatch-fwd-dtype` mxfp8 cannot be combined with `--moe-token-dispatcher-type` allgather",
    ),
    (
        "--moe-enable-routing-replay --moe-aux-loss-coeff 0 --moe-router-load-balancing-type sinkhorn",
        "sinkhorn, which balances",
    ),
    (f"{GRAPHS} attn --moe-enable-routing-replay --moe-routing-replay-path d", "would route every microbatch"),
    ("--qk-clip --use-torch-fsdp2", "`--qk-clip` cannot be combined with `--use-torch-fsdp2`"),
    (f"{SPARSE} --window-size 8,0", "dsa cannot be combined with `--window-size`"),
    (f"{SPARSE} --dsa-attention-form gathered --fp8-format e4m3", "gathered cannot be combined with `--fp8-format`"),
    (f"{SPARSE} --dsa-attention-form gathered --fp4-format e2m1", "gathered cannot be combined with `--fp4-format`"),
    ("--ckpt-format torch --optimizer muon", "torch has the state of `--optimizer` adam and sgd only"),
    (
        "--te-precision-config-file f.yaml --fp8-format e4m3 --fp8-recipe custom --fp8-quantizer-factory a.b",
        "`--te-precision-config-file` cannot be combined with `--fp8-recipe` custom",
    ),
)


def test_every_check_has_a_source():
    """A new check names Megatron-LM's rule in tests/data/check_sources.json, or is a limit (arguments/rules)."""
    found = {}
    for rule in rules.CHECKS:
        nodes = list(ast.walk(ast.parse(inspect.getsource(rule))))
        found[f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}"] = sum(
            isinstance(node, ast.Yield | ast.YieldFrom) for node in nodes
        )
    assert found == {name: entry["yields"] for name, entry in SOURCES.items()}


def test_sources_are_rules_of_megatron(shared):
    text = (shared / "reference" / "rules.md").read_text(encoding="utf-8")
    rules_of_megatron = re.findall(r"^(\d+)\. +(.+)", text, re.MULTILINE)
    errors = {int(number) for number, rule in rules_of_megatron if re.search(r"\bE\b|\bmust\b", rule)}
    named = {number for entry in SOURCES.values() if isinstance(entry["source"], list) for number in entry["source"]}
    assert len(named) > 70 and named <= errors


def test_limits_are_yielded_without_conditions():
    """What is yielded only under some flags would be missing on the page."""
    for rule in rules.LIMITS:
        nodes = list(ast.walk(ast.parse(inspect.getsource(rule))))
        branches = [node for node in nodes if isinstance(node, ast.If | ast.While | ast.Try | ast.Match)]
        assert not any(isinstance(node, ast.Return | ast.Continue | ast.Break) for node in nodes), rule
        assert not any(isinstance(node, ast.Yield) for branch in branches for node in ast.walk(branch)), rule


def test_limits_are_listed_whatever_the_settings():
    listed = listed_messages([])
    assert len(listed) > 90
    for case in recorded("rule_cases")["cases"]:
        assert listed_messages(changed(" ".join(case["added"]))) == listed, case["name"]


def listed_messages(argv):
    settings, _ = resolve_command_line(argv, 8)
    return [(topic, limit.message) for topic, limit in rules.limits(settings, derive_sizes(settings, 8))]


@pytest.mark.parametrize(("added", "text"), REJECTED, ids=[added for added, _ in REJECTED])
def test_limits_reject_what_the_page_says(added, text):
    settings, violations = resolve_command_line(changed(added), 8)
    applied = [limit for _, limit in rules.limits(settings, derive_sizes(settings, 8)) if limit.applies]
    named = [limit for limit in applied if text in refused.limit_text(limit)]
    assert len(named) == 1
    message = settings.violation(named[0].message, *named[0].dests).message
    assert message in [violation.message for violation in violations]
    assert f"- {refused.limit_text(named[0])}\n" in refused.page()


def test_pairs_without_their_second_flag_are_accepted():
    for added in ("--moe-clone-hot-experts 1 --expert-model-parallel-size 2", f"{GRAPHS} attn", "--qk-clip"):
        settings, _ = resolve_command_line(changed(added), 8)
        assert not [limit for _, limit in rules.limits(settings, derive_sizes(settings, 8)) if limit.applies], added


def test_old_graph_flags_are_named():
    _, violations = resolve_command_line(changed("--enable-cuda-graph --cuda-graph-modules attn --use-torch-fsdp2"), 8)
    assert any("--cuda-graph-impl local (from --enable-cuda-graph)" in violation.message for violation in violations)

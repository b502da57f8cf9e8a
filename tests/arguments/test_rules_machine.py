"""Rules about environment, GPU and packages: without a GPU no errors, with one errors that name the flag."""

import os

import pytest

from arguments import parse_args
from arguments.machine import (
    ALLOCATOR,
    allocator_environment,
    check_machine,
    check_packages,
    environment_defaults,
)
from arguments.mechanisms.attention_backend_kinds.declaration import SWITCHES
from arguments.mechanisms.attention_backends import ATTENTION_BACKENDS
from arguments.parse import resolve_command_line
from moe_trainer.commands import train_process
from tests.arguments.rule_lines import changed

GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn"


def test_frozen_arguments_give_the_same_findings():
    args = parse_args(changed("--deterministic-mode"), 8)
    (found,) = check_machine(args, {"NCCL_ALGO": "Tree"}, 9)
    assert found.kind == "machine" and "NCCL_ALGO" in found.message and "--deterministic-mode" in found.message
    assert check_machine(args, {"NCCL_ALGO": "Tree"}, None) == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--nvtx-ranges", ["--nvtx-ranges has no effect without a CUDA device"]),
        ("--profile", ["--profile: on a CPU torch's profiler writes a trace"]),
        ("--profile --use-pytorch-profiler", []),
        ("--profile --record-shapes", ["--record-shapes has no effect without a CUDA device", "--profile: on a CPU"]),
    ],
)
def test_marks_for_nsys_on_a_cpu_are_noted(flags, expected):
    args = parse_args(changed(flags), 8)
    found = check_machine(args, {}, None)
    assert {violation.kind for violation in found} <= {"note"} and check_machine(args, {}, 9) == []
    assert all(str(violation).startswith(start) for violation, start in zip(found, expected, strict=True))


def test_defaults_satisfy_the_rules():
    for backend in ATTENTION_BACKENDS:
        settings, _ = resolve_command_line(changed(f"--deterministic-mode --attention-backend {backend.key}"), 8)
        wanted = environment_defaults(settings, {}, 9)
        assert {name: value for name, value in wanted.items() if name in SWITCHES} == backend.switches
        assert check_machine(settings, wanted, 9) == []
        assert environment_defaults(settings, wanted, 9) == {}
        assert environment_defaults(settings, {}, None) == {}
    settings, _ = resolve_command_line(changed("--deterministic-mode"), 8)
    assert "NCCL_ALGO" not in environment_defaults(settings, {"NCCL_ALGO": "^NVLS"}, 9)


def test_package_versions():
    settings, _ = resolve_command_line(changed("--moe-permute-fusion --moe-router-fusion"), 8)
    assert check_packages(settings, {}) == []
    assert check_packages(settings, {"transformer_engine": "2.10.0+abc", "torch": "2.13.0"}) == []
    old = check_packages(settings, {"transformer_engine": "2.3.0"})
    assert [v.flags[0] for v in old] == ["--moe-router-fusion"] and "2.7" in old[0].message


def test_expandable_segments_are_set_before_torch_is_imported(monkeypatch):
    def wanted(flags, **env):
        return allocator_environment(resolve_command_line(changed(flags), 8)[0], env)

    asked = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert wanted("") == asked and wanted("", NCCL_GRAPH_REGISTER="1") == asked
    assert wanted(GRAPHS) == {**asked, "NCCL_GRAPH_REGISTER": "0"} and wanted(GRAPHS, NCCL_GRAPH_REGISTER="1") == {}
    assert wanted("--use-nccl-ub") == asked  # registers nothing
    for name in ALLOCATOR:
        assert wanted("", **{name: "max_split_size_mb:64"}) == {}
    for flags in ("", GRAPHS):
        assert check_machine(resolve_command_line(changed(flags), 8)[0], wanted(flags), 9) == []
    seen = {}
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "")  # taken back at the end, whatever main sets
        monkeypatch.delenv(name)
    monkeypatch.setattr(train_process, "require_packages", lambda *names: seen.update(os.environ))
    monkeypatch.setattr(train_process, "_train", lambda *rest: 0)
    line = "--preset mixtral_tiny --mock-data --train-iters 1 --lr 1e-3 --min-lr 0 --micro-batch-size 1"
    assert train_process.main([*line.split(), "--global-batch-size", "1"]) == 0
    assert seen["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("name", ALLOCATOR)
def test_user_allocator_setting_is_kept_and_noted(name):
    settings, _ = resolve_command_line(changed(""), 8)
    (note,) = check_machine(settings, {name: "max_split_size_mb:64"}, 9)
    assert (
        note.kind == "note"
        and f"{name}=max_split_size_mb:64 is kept: without expandable_segments:True memory fragments" in note.message
    )
    assert check_machine(settings, {name: "expandable_segments:True"}, 9) == []

"""The benches that run on a CPU still run: each once, at a tiny size. What they measure means nothing here."""

import sys

import pytest
import torch

from scripts import (
    bench_context_parallel,
    bench_data,
    bench_dispatch,
    bench_dynamic_cp,
    bench_experts,
    bench_index,
    bench_long_context,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bench_experts_measures_loop_and_grouped(dtype):
    loop, grouped = bench_experts.measure((16, 32, 32, 4, 2), dtype, rounds=1)
    assert loop > 0 and grouped > 0


def test_bench_context_parallel_runs():
    seconds, sent = bench_context_parallel.measure("p2p", 2, 64, rounds=1)
    assert seconds > 0 and sent > 0


def test_bench_dispatch_runs(monkeypatch):
    monkeypatch.setattr(bench_dispatch, "HIDDEN", 16)
    monkeypatch.setattr(bench_dispatch, "FFN", 16)
    monkeypatch.setattr(bench_dispatch, "EXPERTS", (8,))
    measured = bench_dispatch.measure(2, 32, steps=1)
    assert set(measured) == {(8, dispatcher) for dispatcher in bench_dispatch.DISPATCHERS}
    assert all(sum(sent.values()) > 0 for _, _, sent in measured.values())


def test_bench_index_runs(monkeypatch, capsys):
    monkeypatch.setattr(
        bench_index, "timed", lambda label, action: (print(label), None if "10 million" in label else action())[1]
    )
    monkeypatch.setattr(
        sys, "argv", "bench_index.py --documents 4000 --mean-length 600 --seq-length 128 --blend 2".split()
    )
    bench_index.main()
    out = capsys.readouterr().out
    assert "4000 documents" in out and "the same 1,000 samples again" in out


def test_bench_data_measures_checkpoints(tmp_path):
    rows = bench_data.checkpoints(1, 6, tmp_path)
    assert [what.split()[0] for what, _ in rows] == ["save", "load"]


def test_bench_long_context_runs():
    """Chunks change neither the loss nor what is saved much, and lower the peak."""
    small = bench_long_context.SMALL.replace(str(bench_long_context.LENGTH), "512")
    found = {}
    for name in ("recomputed", "8 chunks"):
        argv = f"{small} {bench_long_context.MODELS['GQA']} {bench_long_context.TILINGS[name]}".split()
        found[name], other = bench_long_context.run_on_ranks(bench_long_context.run_pass, 2, argv)
        assert found[name]["loss"] == other["loss"]
    assert found["recomputed"]["loss"] == pytest.approx(found["8 chunks"]["loss"], rel=1e-6)
    assert found["8 chunks"]["peak"] < 0.6 * found["recomputed"]["peak"]


def test_bench_dynamic_cp_runs(monkeypatch):
    """Packs of fixed groups and of dynamic ones have one loss."""
    monkeypatch.setattr(bench_dynamic_cp, "WAYS", bench_dynamic_cp.WAYS[1:])
    monkeypatch.setattr(bench_dynamic_cp, "REPEATS", 0)
    lengths = [200, *range(1, bench_dynamic_cp.STEP_BATCH)]
    found, _ = bench_dynamic_cp.run_on_ranks(bench_dynamic_cp.train_on_rank, 2, lengths)
    losses = [loss for _, loss, _ in found]
    assert len(losses) == 3 and losses == pytest.approx([losses[0]] * 3, rel=2e-6)


def test_plans_of_dynamic_groups_are_the_fastest():
    """In microbatches of as many tokens as with fixed groups; costs include the exchange of keys."""
    lengths = bench_dynamic_cp.draw_long_tail(bench_dynamic_cp.LONGEST, bench_dynamic_cp.BATCH)
    found = {way: (summary, time) for way, summary, time in bench_dynamic_cp.plan_ways(lengths)}
    assert min(found, key=lambda way: found[way][1]) == "dynamic groups"
    padded, in_order, _, dynamic = found.values()
    assert padded[1] > 2 * in_order[1] and in_order[1] > 1.3 * dynamic[1]
    assert padded[0].fill < 0.2 and dynamic[0].fill > 0.95


def test_long_context_launchers_are_planned():
    for case in bench_long_context.CASES:
        short, long, million = bench_long_context.case_plans(case)
        assert min(plan.margin for plan in (short, long, million)) >= 0 and long.headroom > 1.5
        assert million.args.data.seq_length == 2**20 and million.world_size == 1024
        tokens = {plan.batch_size * plan.args.data.seq_length for plan in (short, long)}
        assert long.args.data.seq_length == 262144 and len(tokens) == 1

"""The benches that run on a CPU still run: each once, at a tiny size. What they measure means nothing here."""

import pytest

from scripts.benchmarks import bench_data, bench_long_context


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


def test_long_context_launchers_are_planned():
    for case in bench_long_context.CASES:
        short, long, million = bench_long_context.case_plans(case)
        assert min(plan.margin for plan in (short, long, million)) >= 0 and long.headroom > 1.5
        assert million.args.data.seq_length == 2**20 and million.world_size == 1024
        tokens = {plan.batch_size * plan.args.data.seq_length for plan in (short, long)}
        assert long.args.data.seq_length == 262144 and len(tokens) == 1

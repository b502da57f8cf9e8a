"""The benches that run on a CPU still run: each once, at a tiny size. What they measure means nothing here."""

import sys

import pytest
import torch

from scripts import bench_context_parallel, bench_data, bench_dispatch, bench_experts, bench_index


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

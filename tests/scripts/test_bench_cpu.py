"""bench_cpu.py has a result whatever its baselines do."""

import argparse
import itertools

import fake_baselines
import pytest

from scripts.benchmarks import bench_baselines, bench_cpu

REASONS = {
    "hangs": "no answer within 2 s",
    "misses_a_package": "ModuleNotFoundError: No module named 'triton'",
    "dies": "its process ended with exit code 7",
}


@pytest.mark.parametrize("name", REASONS)
def test_contender_that_hangs_fails_or_dies_is_ended(name):
    one = bench_cpu.Contender(
        name,
        getattr(fake_baselines, name),
        bench_baselines.MODELS["small"],
        "fp32",
        1,
        2.0 if name == "hangs" else 300.0,
    )
    with pytest.raises(bench_cpu.AbsentError) as caught:
        one.ready()
        one.turn(3)
    assert str(caught.value) == REASONS[name]
    assert not one._process.is_alive()


class FakeContender:
    """A contender without a process that answers a given number of turns and then fails."""

    begun = 0

    def __init__(self, name, turns):
        self.figures, self.left, self.ended = {"seconds": [], "peak_memory_mb": 1}, turns, False
        self.name = name

    def ready(self):
        assert FakeContender.begun == 0, "another one still warms up"
        FakeContender.begun += 1
        self.turn(1)
        FakeContender.begun -= 1
        self.figures["what"] = "quick"
        return self

    def turn(self, steps):
        if self.left == 0:
            FakeContender.begun = 0
            raise bench_cpu.AbsentError("gone")
        self.left -= 1
        return 0.001

    def leave(self):
        self.end()

    def end(self):
        self.ended = True


@pytest.mark.parametrize("model", ["small", "wide"])
@pytest.mark.parametrize("turns", [0, 1, 3, 9])
def test_benchmark_continues_without_a_failed_contender(monkeypatch, capsys, model, turns):
    """In parallel and one by one: the trainer and the GEMM rate are measured; the table has the contender's error or its other implementation."""
    made = []
    monkeypatch.setattr(
        bench_cpu, "Contender", lambda name, build, *rest: made.append(FakeContender(name, build)) or made[-1]
    )
    found = {"moe-trainer": 99, "transformers/eager": turns, "transformers/grouped_mm": 99, "other": turns, "gemm": 99}
    options = argparse.Namespace(contenders=None, threads=1, limit=20.0, rounds=3, steps=2)
    results = bench_cpu.race(bench_baselines.MODELS[model], "bf16", found, options)
    enough = turns >= (
        7 if model == "small" else 4
    )  # to warm up, (be tried three times,) and take part in three rounds
    text = bench_cpu.table({model: {"bf16": results}})
    assert "| moe-trainer (quick) |" in text and "| transformers (quick) |" in text
    assert ("| other | not measured: gone |" in text) == (not enough)
    assert len(results["moe-trainer"]["seconds"]) == 3
    assert all(one.ended or one.left == 0 for one in made)
    stderr = capsys.readouterr().err
    assert "contenders" in stderr and "about 0 min" in stderr  # how long it will take
    assert ("other is left out: gone" in stderr) == (not enough)


@pytest.mark.parametrize("missing", ["moe-trainer", "gemm"])
def test_benchmark_fails_without_the_trainer_or_the_gemm_rate(monkeypatch, capsys, missing):
    turns = itertools.chain([99], itertools.repeat(0)) if missing == "gemm" else itertools.repeat(0)
    monkeypatch.setattr(bench_cpu, "Contender", lambda name, build, *rest: FakeContender(name, next(turns)))
    monkeypatch.setattr(bench_cpu, "builders", lambda dtype: {"moe-trainer": 99, "gemm": 99})
    monkeypatch.setattr("sys.argv", ["bench_cpu.py", "--dtypes", "fp32"])
    assert bench_cpu.main() == 1
    assert f"{missing} is left out: gone" in capsys.readouterr().err

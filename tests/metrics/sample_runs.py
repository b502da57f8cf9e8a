"""Made-up runs as the dashboard's page reads them: healthy, with a collapsed router, with a slow rank, large, hostile."""

import json
import math
import os
import random
from pathlib import Path

import torch

from moe_trainer.metrics.routing_health import routing_health
from moe_trainer.metrics.run_state import RunEnd

NASTY = "</script><img src=x onerror=alert(1)>&<b>\"'"
HEALTH = ("load_max_over_mean", "load_entropy", "dead_experts", "drop_rate", "bias_drift", "rank_max_over_mean")


def make_run(
    name: str = "healthy",
    iterations: int = 400,
    layers: int = 6,
    experts: int = 16,
    ranks: int = 8,
    collapsed: int | None = None,
    slow: int | None = None,
    seed: int = 0,
    records: int = 400,
    moments: int = 40,
) -> dict:
    """Return a run of the page's data; `collapsed`: a layer without balance, `slow`: a rank that others wait for."""
    rng = random.Random(seed)
    steps = [max(1, round((at + 1) * iterations / records)) for at in range(records)]
    level = 0.35 if collapsed is not None else 0.0
    loss = [
        4 * math.exp(-step / iterations * 3) + 2.1 + level * step / iterations + rng.gauss(0, 0.05) for step in steps
    ]
    nodes, rows = -(-ranks // 8), min(64, ranks)
    factor = 1.7 if slow is not None else 1.0
    elapsed = [factor * (410 + rng.gauss(0, 8)) for _ in steps]
    wall = [step * 0.41 * factor for step in steps]
    times = [round((at + 1) * iterations / moments) for at in range(moments)]

    def loads(time: int, layer: int) -> list[int]:
        share = time / iterations if layer == collapsed else 0.0
        weights = [
            max(0.0, 1 + rng.gauss(0, 0.12)) * (1 - share if each >= 2 else 1 + 6 * share) for each in range(experts)
        ]
        counts = [round(8192 * weight / sum(weights)) for weight in weights]
        return [0 if share > 0.6 and each >= experts // 2 else count for each, count in enumerate(counts)]

    tables = [[loads(time, layer) for layer in range(layers)] for time in times]
    means = [[sum(row) / experts or 1 for row in table] for table in tables]

    def metric(function) -> list[list[float]]:
        return [[function(row, mean) for row, mean in zip(table, mean_of)] for table, mean_of in zip(tables, means)]

    def entropy(row, mean) -> float:
        total = sum(row) or 1
        return -sum(load / total * math.log(load / total) for load in row if load) / math.log(experts)

    health = {
        "load_max_over_mean": metric(lambda row, mean: max(row) / mean),
        "load_entropy": metric(entropy),
        "dead_experts": metric(lambda row, mean: row.count(0)),
        "drop_rate": metric(lambda row, mean: 0.0),
        "bias_drift": metric(lambda row, mean: rng.random() * 0.01),
        "rank_max_over_mean": metric(lambda row, mean: 1 + (max(row) / mean - 1) / 2),
    }
    findings = []
    if collapsed is not None:
        dead = int(health["dead_experts"][-1][collapsed])
        findings.append(
            {
                "severity": "bad",
                "card": "routing",
                "metric": "dead_experts",
                "text": f"layer {collapsed}: {dead} experts received no token since iteration {round(0.6 * iterations)}; "
                f"the busiest expert has {health['load_max_over_mean'][-1][collapsed]:.1f} times the mean load",
            }
        )
    if slow is not None:
        findings.append(
            {"severity": "bad", "card": "ranks", "text": f"rank {slow} computes 1.8 times as long as the median rank"}
        )
    if not findings:
        findings.append({"severity": "ok", "card": "loss", "text": "no finding: loss, routing and ranks look healthy"})
    return {
        "name": name,
        "path": f"runs/{name}",
        "status": "running",
        "updated": "2026-11-28 08:00:00",
        "head": {
            "model": {
                "name": "qwen3_30b_a3b",
                "total_parameters": 30_500_000_000,
                "active_parameters": 3_300_000_000,
                "num_layers": layers,
                "num_moe_layers": layers,
                "num_experts": experts,
                "topk": 8,
                "hidden_size": 2048,
                "seq_length": 4096,
            },
            "mapping": {
                "tp": 1,
                "pp": 2,
                "vpp": 1,
                "cp": 1,
                "ep": 8,
                "etp": 1,
                "dp": 4,
                "world_size": ranks,
                "nodes": nodes,
            },
            "hardware": {
                "device": "NVIDIA H100 80GB HBM3",
                "hostnames": [f"node-{at}" for at in range(1, min(8, nodes) + 1)],
            },
            "versions": {"moe_trainer": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
            "precision": "bf16",
            "global_batch_size": 256,
            "tokens_per_iteration": 1_048_576,
            "starts": [
                {"iteration": 0, "time": "2026-11-28 07:00:00"},
                {"iteration": iterations // 2, "time": "2026-11-28 07:30:00"},
            ],
            "command": "pretrain_moe.py --preset qwen3_30b_a3b",
            "settings": {"lr": 3e-4 * (1 + seed), "seed": seed, "num_layers": layers, "bf16": True, "swiglu": True},
            "changed": ["lr", "seed"],
        },
        "progress": {
            "iteration": iterations,
            "train_iters": iterations * 2,
            "tokens": iterations * 1_048_576,
            "eta_s": 0.41 * factor * iterations,
            "wall_s": wall[-1] * 1.08,
            "goodput": 0.92,
        },
        "records": {
            "iteration": steps,
            "tokens": [step * 1_048_576 for step in steps],
            "wall_s": wall,
            "series": {
                "lm loss": loss,
                "mtp_1 loss": [each + 0.4 for each in loss],
                "load_balancing_loss": [1.02 + rng.gauss(0, 0.01) for _ in steps],
                "z_loss": [0.3 * math.exp(-step / iterations) for step in steps],
                "learning_rate": [3e-4 * min(1, step / (iterations / 10)) for step in steps],
                "grad_norm": [1.2 + rng.gauss(0, 0.1) + (8 if at == records // 3 else 0) for at in range(records)],
                "elapsed_ms": elapsed,
                "tokens_per_s": [1_048_576 / each * 1000 for each in elapsed],
                "tflops_per_gpu": [320 / factor + rng.gauss(0, 4) for _ in steps],
                "dropped_tokens": [0 for _ in steps],
            },
            "constants": {"global_batch_size": 256, "world_size": ranks},
            "step_time_ms": {
                "forward-backward": [each * 0.82 for each in elapsed],
                "optimizer": [each * 0.06 for each in elapsed],
                "communication": [each * 0.1 for each in elapsed],
                "other": [each * 0.02 for each in elapsed],
            },
        },
        "validations": [
            {"set": kind, "iteration": step, "lm loss": value + shift, "ppl": math.exp(value)}
            for step, value in list(zip(steps, loss))[:: max(1, records // 8)][1:]
            for kind, shift in (("validation", 0.05),)
        ],
        "newest_validation": {"set": "validation", "iteration": iterations, "lm loss": loss[-1] + 0.05},
        "throughput": 1_048_576 / 0.41 / factor,
        "events": [
            {
                "kind": "resume",
                "iteration": iterations // 2,
                "wall_s": wall[records // 2],
                "text": f"resumed after iteration {iterations // 2}",
            },
            {
                "kind": "skip",
                "iteration": iterations // 3,
                "wall_s": wall[records // 3],
                "text": f"iteration {iterations // 3} skipped: the gradient norm is 9.2",
            },
            {"kind": "save", "iteration": iterations, "wall_s": wall[-1], "text": "saved checkpoint"},
        ],
        "ranks": {
            "iteration": times,
            "ranks": list(range(ranks)),
            "time_ms": [
                [(400 + rng.gauss(0, 4)) * (1.8 if rank == slow else 1) for rank in range(ranks)] for _ in times
            ],
            "memory_mb": [[61_000 + 900 * rank + rng.gauss(0, 60) for rank in range(ranks)] for _ in times],
        },
        "routing": {
            "iteration": times,
            "layers": list(range(layers)),
            "metrics": health,
            "straggler_cost": [0.03 + (0.2 * time / iterations if collapsed is not None else 0) for time in times],
            "loads": {"iteration": times[::8], "tokens_per_expert": tables[::8]},
            "between_ranks": {
                "iteration": times[::20],
                "ranks_per_row": -(-ranks // 64),
                "tokens": [[[rng.randint(900, 1100) for _ in range(rows)] for _ in range(rows)] for _ in times[::20]],
            },
            "findings": [{"severity": "bad", "layer": collapsed, "text": findings[0]["text"]}]
            if collapsed is not None
            else [],
        },
        "findings": findings,
        "samples": [
            {
                "iteration": iterations // 2,
                "prompt": "Once upon a time",
                "text": " there was a router that\nliked every expert.",
            }
        ],
        "tasks": [
            {
                "iteration": step,
                "task": task,
                "metric": metric,
                "value": value + slope * step / iterations,
                "stderr": 0.01,
            }
            for step in times[::10]
            for task, metric, value, slope in (
                ("arc_easy", "acc", 0.25, 0.4),
                ("wikitext", "word_perplexity", 90.0, -60.0),
                ("gsm8k", "exact_match,strict-match", 0.0, 0.2),
                ("gsm8k", "exact_match,flexible-extract", 0.0, 0.25),
            )
        ],
    }


def make_page(*runs: dict, **more: object) -> dict:
    """Return the page's data for some runs."""
    return {"written": "2026-11-28 08:00:01", "runs": list(runs), **more}


def three_runs() -> dict:
    """Return a healthy run, one with a collapsed router, and one with a slow rank."""
    return make_page(
        make_run("healthy"), make_run("collapsed-router", collapsed=3, seed=1), make_run("slow-rank", slow=5, seed=2)
    )


def dense_run() -> dict:
    """Return a run of an older version: few fields, no routing."""
    run = make_run("dense", 20, records=20)
    return make_page({key: run[key] for key in ("name", "records", "validations")})


def large_run() -> dict:
    """Return a run of 58 layers with 256 experts each, 100,000 iterations, on 256 ranks."""
    return make_page(make_run("deepseek_v3", 100_000, 58, 256, 256, collapsed=43, records=2000, moments=60))


def hostile_run() -> dict:
    """Return a run whose texts are markup."""

    def spoil(value):
        if isinstance(value, dict):
            return {
                (NASTY + key if key in ("lr", "seed", "arc_easy") else key): spoil(each) for key, each in value.items()
            }
        if isinstance(value, list):
            return [spoil(each) for each in value]
        return (
            NASTY + value
            if isinstance(value, str) and value not in ("resume", "skip", "save", "running", "bad", "ok", "validation")
            else value
        )

    run = spoil(make_run("x", 20, records=20, moments=10))
    run["records"]["series"][NASTY] = [float(at) for at in range(20)]
    run["records"]["series"]["lm loss"][3] = None
    return make_page(run)


def list_of_runs() -> dict:
    """Return the server's list of runs."""
    entry = {
        "status": "running",
        "iteration": 40,
        "train_iters": 100,
        "lm_loss": 3.21,
        "updated": "2026-11-28 08:00:00",
        "finding": {"severity": "bad", "card": "ranks", "text": f"rank 5 is slow {NASTY}"},
    }
    runs = [{"name": name, "query": f"run={name}", "url": f"?run={name}", **entry} for name in ("a", "b", NASTY)]
    reports = [{"title": NASTY, "file": "all.html", "url": "report?file=all.html"}]
    return make_page(list=runs, reports=reports, live={"poll_ms": 10**8, "data_url": "data", "compare_url": "?"})


def many_runs(count: int) -> dict:
    """Return runs on one page; the fourth has diverged."""
    runs = [make_run(f"run-{at}", layers=2, ranks=4, seed=at, records=60, moments=10) for at in range(count)]
    for run in runs[2:]:  # drawings of two runs are enough
        del run["ranks"], run["routing"]
    if count > 3:
        diverged = runs[3]
        diverged["records"]["series"]["lm loss"] = [8.0 + at * at / 7 for at in range(60)]
        diverged["findings"] = [{"severity": "bad", "card": "loss", "text": "the training loss is 505, 60 times ..."}]
    return make_page(*runs, uncompared=["save", "seed"])


def list_of_states() -> dict:
    """Return the server's list of eight runs that are in different states, three of them with equal settings."""
    silent = "no sign of life since 2026-11-28 07:00:00"
    runs = []
    for name, status, finding, loss, validation, seed in (
        ("finished", "finished", None, 3.1, 3.2, 1),
        ("healthy", "running", None, 3.5, 3.6, 2),
        ("slow-rank", "running", ("bad", "ranks", "rank 5 computes 1.8 times as long as the others"), 3.3, 3.7, 3),
        ("collapsed", "running", ("bad", "routing", "layer 3: 4 of 8 experts (4, 5, 6, 7) have received no token"), 3.9, 4.0, 1),
        ("stalled", "silent", ("bad", "events", silent + ", and no recorded end"), 5.5, None, 1),
        ("killed", "interrupted", ("warn", "events", "the run was interrupted by signal 15"), 4.5, 4.6, 1),
        ("nan", "failed", ("bad", "events", "the run failed after iteration 3, exit code 16: NaN"), None, None, 1),
        ("diverged", "running", ("bad", "loss", "the training loss is 104, 12 times that of earlier iterations"), 104.0, 88.6, 1),
    ):  # fmt: skip
        settings = {
            "lr": 10.0 if name == "diverged" else 3e-4,
            "seed": seed,
            "optimizer": "adam",
            "save": f"runs/{name}",
        }
        runs.append(
            {
                "name": name,
                "query": f"run={name}",
                "url": f"?run={name}",
                "status": status,
                "state": silent if status == "silent" else status,
                "iteration": 40,
                "train_iters": 40 if status == "finished" else 100,
                "lm_loss": loss,
                "validation_loss": validation,
                "tokens_per_s": 1000.0 * len(name),
                "updated": "2026-11-28 08:00:00",
                "finding": None if finding is None else dict(zip(("severity", "card", "text"), finding)),
                "settings": settings
                | (
                    {"num_layers": len(name)}
                    if name in ("collapsed", "stalled", "nan", "killed")
                    else {"num_layers": 4}
                ),
            }
        )
    live = {"poll_ms": 10**8, "data_url": "data", "compare_url": "?compare=1", "max_runs": 3}
    return make_page(list=runs, live=live, uncompared=["save", "seed"])


def write_eight_runs(folder: Path) -> None:
    """Write the metrics of runs that differ in their state or in what is wrong with them, as folders of these names.

    Those that still run or were killed have no recorded end. "stalled" was written an hour ago. Locks are the caller's.
    """
    steps = range(1, 41)
    even, collapsed = [[64] * 8] * 2, [[64] * 8, [256, 256, *[0] * 6]]
    losses = [8.3 * math.exp(-at / 40) for at in steps]
    ends = {
        "finished": RunEnd("finished", 40, 0, "all 40 iterations are done"),
        "nan": RunEnd("failed", 2, 16, "iteration 3: the gradient norm is nan"),
    }
    changed = {
        "diverged": {"losses": [8.3, 8.3, *[104.0] * 38]},
        "nan": {"losses": [8.3, 588.0]},
        "collapsed-router": {"loads": collapsed},
        "slow-rank": {"times": [100.0, 101.0, 190.0, 99.0]},
    }
    for name in ("healthy", "diverged", "nan", "killed", "stalled", "collapsed-router", "slow-rank", "finished"):
        run = {"losses": losses, "loads": even, "times": [100.0, 101.0, 99.0, 100.0], **changed.get(name, {})}
        records = [_record(at, loss, run["loads"], run["times"]) for at, loss in zip(steps, run["losses"])]
        records[0]["run"] = {
            "train_iters": 40 if name == "finished" else 100,
            "started": 1000.0,
            "padded_vocab_size": 4096,
            "model": {"num_experts": 8, "active_parameters": 30_000_000},
            "mapping": {"world_size": 4, "ep": 1},
        }
        records += [ends[name].as_record()] if name in ends else []
        (folder / name).mkdir(parents=True)
        file = folder / name / "metrics.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        if name == "stalled":
            written = file.stat().st_mtime - 3600
            os.utime(file, (written, written))


def _record(iteration: int, loss: float, loads: list[list[int]], times: list[float]) -> dict:
    """Return an iteration's record of a run with routing statistics and compute times of its ranks."""
    health = routing_health(torch.tensor([[*row, 0, 0, 0, 1, sum(row)] for row in loads], dtype=torch.float64), 1, 0.5)
    return {
        "iteration": iteration,
        "lm loss": loss,
        "grad_norm": 1.0,
        "learning_rate": 3e-4,
        "elapsed_ms": 400.0,
        "interval_s": 0.4,
        "tokens_per_s": 1e4,
        "time": 1000.0 + iteration,
        "routing": health,
        "own_time_ms": {"ranks": times},
    }

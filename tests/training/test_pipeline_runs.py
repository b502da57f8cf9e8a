"""Full jobs over pipeline stages: everything that is logged, validated and dumped is what one process logs."""

import numpy as np
import pytest
from safetensors.torch import load_file
from training.forked import pretrain
from training.tiny import MOCK, TINY

FOUR = [word if word != "2" or TINY[at - 1] != "--num-layers" else "4" for at, word in enumerate(TINY)]
JOB = [
    *FOUR,
    *MOCK,
    "--train-iters",
    "4",
    "--eval-interval",
    "2",
    "--eval-iters",
    "3",
    "--eval-global-batch-size",
    "4",
    "--global-batch-size",
    "8",
    "--moe-layer-freq",
    "[0,0,1,1]",
    "--moe-per-layer-logging",
    "--log-params-norm",
    "--log-num-zeros-in-grad",
    "--dump-step",
    "1",
    "dump",
    "--mtp-num-layers",
    "1",
    "--adam-eps",
    "1e-5",
]
TIMES = ("elapsed", "interval", "time", "tflops", "throughput", "memory", "tokens_per")
PP2, PP4 = ["--pipeline-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "4"]


def assert_same(records, expected):
    assert len(records) == len(expected)
    for record, other in zip(records, expected):
        keys = {
            key
            for key in other
            if not any(word in key for word in TIMES) and key not in ("world_size", "timestamp", "run")
        }
        assert keys <= record.keys(), keys - record.keys()
        for key in keys:
            if key == "routing":
                assert (
                    record[key]["layers"] == other[key]["layers"]
                    and record[key]["tokens_per_expert"] == other[key]["tokens_per_expert"]
                )
                assert record[key]["load_entropy"] == pytest.approx(other[key]["load_entropy"])
                continue
            wanted = other[key] if isinstance(other[key], str | None) else pytest.approx(other[key], rel=5e-6, abs=1e-9)
            assert record[key] == wanted, (key, record.get("iteration"))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return pretrain(JOB, folder), folder


@pytest.mark.parametrize(
    "n, flags",
    [
        (2, [*PP2, "--num-virtual-stages-per-pipeline-rank", "2"]),
        (2, [*PP2, "--pipeline-schedule", "zero-bubble", "--eval-micro-batch-size", "1"]),
        (4, [*PP4, "--pipeline-model-parallel-layout", "Et|tt|tm|L"]),
        (4, [*PP2, "--use-tp-pp-dp-mapping", "--decoder-first-pipeline-num-layers", "1"]),
    ],
)
def test_pipeline_job_reports_the_values_of_one_process(one_process, tmp_path, n, flags):
    (expected, weights), folder = one_process
    records, found = pretrain([*JOB, *flags], tmp_path, n)
    assert {"validation", "mtp_1 loss", "params_norm", "num_zeros", "routing"} <= {
        key for record in expected for key in record
    }
    assert_same(records, expected)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert (found[name] - weight).abs().max() <= 2e-6, name
    grads, full = (load_file(place / "dump" / "grads_step1.safetensors") for place in (tmp_path, folder))
    assert grads.keys() == full.keys()
    for name, grad in full.items():
        assert (grads[name] - grad).norm() <= 1e-5 * grad.norm() + 1e-12, name
    if n == 2:  # every rank dumps the routing of its own layers
        routing = dict(np.load(folder / "dump" / "routing_step1_rank0.npz"))
        parts = [
            dict(np.load(tmp_path / "dump" / f"routing_step1_rank{rank}.npz"))
            for rank in range(n)
            if (tmp_path / "dump" / f"routing_step1_rank{rank}.npz").exists()
        ]
        assert sorted(key for part in parts for key in part) == sorted(routing)


def test_pipeline_job_with_batch_size_rampup(tmp_path):
    argv = [
        *FOUR,
        *MOCK,
        "--train-samples",
        "44",
        "--rampup-batch-size",
        "4",
        "4",
        "24",
        "--global-batch-size",
        "12",
        "--lr-decay-samples",
        "40",
    ]
    expected, _ = pretrain(argv, tmp_path / "one")
    assert len({record["global_batch_size"] for record in expected}) == 3
    for schedule in ("1f1b", "zero-bubble"):
        records, _ = pretrain([*argv, *PP2, "--pipeline-schedule", schedule], tmp_path / schedule, 2)
        assert_same(records, expected)

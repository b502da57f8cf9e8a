"""Full jobs on emulated devices: they evaluate, save and resume, on a device what a CPU has saved and the reverse."""

import pytest
import torch
from emulated_cuda.test_low_precision import TURNED
from mock_data import short_mock_data  # noqa: F401 - for all tests
from training.forked import pretrain
from training.tiny import MOCK, TINY

from moe_trainer.verification.compare_runs import FP32

JOB = [
    *TINY,
    *MOCK,
    *"--micro-batch-size 1 --global-batch-size 2 --train-iters 4 --adam-eps 1e-5 --eval-interval 1 --eval-iters 1 --save-interval 2 --save ckpt --triton-kernels none".split(),
]
EP2 = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --use-distributed-optimizer"
# name: flags of all jobs, of those on devices, devices, how near devices and a CPU are
CASES = {
    "two devices, distributed optimizer": ("", EP2, 2, FP32),
    "delayed scaling": ("--fp8-format hybrid --fp8-amax-history-len 3 --fp8-amax-compute-algo max", "", 1, TURNED),
}


def numbers(records: list[dict]) -> dict[tuple, float]:
    """Losses and gradient norms of training and evaluation, by iteration."""
    names = "lm loss", "load_balancing_loss", "grad_norm"
    return {
        (record["iteration"], record.get("validation"), name): record[name]
        for record in records
        for name in names
        if name in record
    }


@pytest.mark.parametrize("name", CASES)
def test_jobs_resume_on_another_device(tmp_path, name):
    """Two iterations and two more in other processes equal four: close to a CPU, bit for bit on the same devices."""
    flags, mapping, devices, tolerances = CASES[name]

    def job(folder: str, on_device: bool, source: str = "") -> tuple[dict[tuple, float], dict[str, torch.Tensor]]:
        resumed = f"--load {tmp_path / source / 'ckpt'} --ckpt-step 2 --exit-on-missing-checkpoint" if source else ""
        records, weights = pretrain(
            [*JOB, *f"{flags} {mapping if on_device else ''} {resumed}".split()],
            tmp_path / folder,
            devices if on_device else 1,
            on_device,
        )
        return numbers(records), weights

    expected, weights = job("cpu", False)
    assert {what[:2] for what in expected} >= {(4, None), (4, "validation"), (4, "test")}
    full, full_weights = job("device", True)
    parts = {
        "from cpu": job("from cpu", True, "cpu"),
        "from device": job("from device", True, "device"),
        "to cpu": job("to cpu", False, "device"),
    }
    for found, last in (*parts.values(), (full, full_weights)):
        behind = {what: value for what, value in expected.items() if what[0] > 2 or found is full}
        assert found == pytest.approx(behind, rel=max(tolerances.loss, tolerances.norm))
        assert last.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(last[name], weight, rtol=0, atol=tolerances.weight)
    found, last = parts["from device"]
    assert found == {what: value for what, value in full.items() if what[0] > 2}
    assert all(torch.equal(last[name], weight) for name, weight in full_weights.items())

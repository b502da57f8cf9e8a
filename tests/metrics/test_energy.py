"""Energy in the log: read from NVML's counter, in Megatron-LM's format, without effect if there is no counter."""

import sys
from types import SimpleNamespace

import torch
from commands import run
from harness import run_ranks
from training.tiny import MOCK, TINY

from moe_trainer.metrics import energy
from moe_trainer.metrics.console import memory_line
from moe_trainer.metrics.energy import EnergyMeter, open_energy_meter
from moe_trainer.parallel.state import ParallelState

CUDA = torch.device("cuda")


def measure_energy(rank, n):
    """In three iterations and two seconds, rank 0 uses 30 J and rank 1 uses 60 J."""
    readings, moments = iter([1000.0, 1000.0 + 30_000.0 * (rank + 1)]), iter([5.0, 7.0])
    energy.time = SimpleNamespace(perf_counter=lambda: next(moments))
    return EnergyMeter(ParallelState.create(n, rank), torch.device("cpu"), lambda: next(readings)).lap(3)


def test_logged_energy_is_the_mean_over_gpus():
    assert run_ranks(measure_energy, 2) == [((10.0 + 20.0) / 2, (15.0 + 30.0) / 2)] * 2


class FakePynvml:
    """A replacement of pynvml with one GPU."""

    class NVMLError(Exception):
        """A replacement of pynvml.NVMLError."""

    def __init__(self, total=None):
        self.total = total

    def nvmlInit(self):
        self.ready = True

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert self.ready
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if self.total is None:
            raise self.NVMLError("Not Supported")
        assert handle == "GPU-1234"
        return self.total


def use(monkeypatch, library):
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))


def test_missing_energy_counter_is_explained(monkeypatch):
    for library, reason in (
        (None, "the package nvidia-ml-py (pynvml) is not installed"),
        (FakePynvml(), "cannot read the GPU's energy (Not Supported)"),
    ):
        use(monkeypatch, library)
        assert open_energy_meter(ParallelState.single(), CUDA) == reason


def test_energy_counter_is_that_of_the_gpu_of_this_rank(monkeypatch):
    use(monkeypatch, FakePynvml(5000))
    assert energy._open_counter(CUDA)() == 5000


def test_a_cpu_run_logs_that_the_flags_have_no_effect(tmp_path):
    flags = "--train-iters 1 --log-energy --log-device-memory-used --record-memory-history".split()
    done = run([*TINY, *MOCK, *flags], tmp_path)
    assert done.returncode == 0, done.stderr
    for flag, reason in (
        ("--log-energy", "a CPU has no energy counter"),
        ("--log-device-memory-used", "without a CUDA device"),
        ("--record-memory-history", "without a CUDA device"),
    ):
        assert f"{flag} has no effect" in done.stderr and reason in done.stderr
    assert "energy per GPU" not in done.stdout and not (tmp_path / "snapshot.pickle").exists()


def test_memory_line_ends_with_the_total_device_memory():
    assert memory_line(0, 1, 1, 1, 1, 1, 3 * 2**20).endswith(
        " | max reserved: 9.5367431640625e-07 | total device memory used: 3.0"
    )

"""Energy of the GPUs from their own counters (`--log-energy`), read through the package nvidia-ml-py (pynvml)."""

import importlib
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from moe_trainer.backends import import_problem
from moe_trainer.parallel import collectives
from moe_trainer.parallel.coordination import gather_errors
from moe_trainer.parallel.state import ParallelState


class Energy(NamedTuple):
    """Mean energy and power of a GPU, over all GPUs."""

    joules_per_iteration: float
    watts: float


class EnergyMeter:
    """Measures the energy of this rank's GPU. `read_mj` returns millijoules since the driver was loaded."""

    def __init__(self, ps: ParallelState, device: torch.device, read_mj: Callable[[], float]):
        self._ps, self._device, self._read_mj = ps, device, read_mj
        self._joules, self._read_at = self._read()

    def _read(self) -> tuple[float, float]:
        return self._read_mj() / 1e3, time.perf_counter()

    def lap(self, iterations: int) -> Energy:
        """Return the energy of the iterations since the last call. Collective over ps.world."""
        joules, now = self._read()
        used, seconds = joules - self._joules, now - self._read_at
        self._joules, self._read_at = joules, now
        local = torch.tensor([used / max(iterations, 1), used / seconds], dtype=torch.float64, device=self._device)
        return Energy(*(collectives.all_reduce(local, self._ps.world) / self._ps.world.size).tolist())


def open_energy_meter(ps: ParallelState, device: torch.device) -> EnergyMeter | str:
    """Return a meter, or why some rank has no counter. Collective over ps.world; all ranks get the same answer."""
    counter: Callable[[], float] | str  # or why this rank has none
    try:
        counter = _open_counter(device)
    except ValueError as error:
        counter = str(error)
    problems = sorted(set(gather_errors(counter if isinstance(counter, str) else None, ps.world)))
    if problems or isinstance(counter, str):
        return "; ".join(problems)
    return EnergyMeter(ps, device, counter)


def _open_counter(device: torch.device) -> Callable[[], float]:
    """Return the GPU's energy counter; raise ValueError with the reason if there is none."""
    if device.type != "cuda":
        raise ValueError("a CPU has no energy counter that every user may read")
    if problem := import_problem("pynvml"):
        raise ValueError(problem.replace("package pynvml", "package nvidia-ml-py (pynvml)"))
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        # by UUID, because CUDA_VISIBLE_DEVICES renumbers the GPUs
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError as error:
        raise ValueError(f"cannot read the GPU's energy ({error})") from error
    return lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)

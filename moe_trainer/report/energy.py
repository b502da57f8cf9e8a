"""Energy of the GPUs, by their own counters (`--log-energy`): NVIDIA's management library, through the package nvidia-ml-py (pynvml)."""

import importlib
import time
from typing import Any, NamedTuple

import torch

from moe_trainer.backends import import_problem
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState


class Energy(NamedTuple):
    """Means over all GPUs: joules_per_iteration of one GPU, watts it drew meanwhile."""

    joules_per_iteration: float
    watts: float


class EnergyMeter:
    """The energy that this rank's GPU has used since the last reading.

    counter: returns millijoules since the driver was loaded.
    """

    def __init__(self, ps: ParallelState, device: torch.device, counter: Any):
        self._ps, self._device, self._counter = ps, device, counter
        self._joules, self._moment = self._read()

    def _read(self) -> tuple[float, float]:
        return self._counter() / 1e3, time.perf_counter()

    def lap(self, iterations: int) -> Energy:
        """What the iterations since the last lap took. Collective over ps.world."""
        joules, moment = self._read()
        used, seconds = joules - self._joules, moment - self._moment
        self._joules, self._moment = joules, moment
        mine = torch.tensor([used / max(iterations, 1), used / seconds], dtype=torch.float64, device=self._device)
        return Energy(*(collectives.all_reduce(mine, self._ps.world) / self._ps.world.size).tolist())


def open_energy_meter(ps: ParallelState, device: torch.device) -> EnergyMeter | str:
    """A meter, or the reason why some rank has none. Collective over ps.world: all ranks get the same answer."""
    counter, problem = None, None
    try:
        counter = _counter(device)
    except ValueError as error:
        problem = str(error)
    problems = sorted({each for each in collectives.all_gather_object(problem, ps.world) if each is not None})
    return "; ".join(problems) if problems else EnergyMeter(ps, device, counter)


def _counter(device: torch.device) -> Any:
    """The GPU's energy counter. Raises: ValueError with the reason when there is none."""
    if device.type != "cuda":
        raise ValueError("a CPU has no counter that every user may read")
    if problem := import_problem("pynvml"):
        raise ValueError(problem.replace("package pynvml", "package nvidia-ml-py (pynvml)"))
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        # by identity: CUDA_VISIBLE_DEVICES numbers GPUs in its own way
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError as error:
        raise ValueError(f"the GPU's energy cannot be read ({error})") from error
    return lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)

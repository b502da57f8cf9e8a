"""Optional health monitors: stragglers, diverged replicas, faulty devices, energy, allocations.

Every rank enters the collectives in the same iterations, which depend on flags only.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from arguments import Arguments
from arguments.mechanisms.sharding_kinds.declaration import ShardingCapability
from arguments.mechanisms.shardings import get_sharding
from moe_trainer.metrics.energy import Energy, EnergyMeter, open_energy_meter
from moe_trainer.metrics.memory_snapshots import MemorySnapshotRecorder
from moe_trainer.resilience.device_check import check_devices
from moe_trainer.resilience.http_toggle import HttpToggle
from moe_trainer.resilience.straggler import ComputeTimeSummary, StragglerDetector
from moe_trainer.resilience.weight_hash import check_replica_weights
from moe_trainer.training.initialize import Runtime

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MonitorReport:
    """Values for metrics.jsonl and lines for the log at the end of an iteration."""

    compute_times: Mapping[str, Any] | None = None
    energy: Energy | None = None
    lines: tuple[str, ...] = ()


class RankMonitors:
    """The monitors that the flags enable. Collective: build it on every rank."""

    def __init__(self, args: Arguments, runtime: Runtime):
        self._args, self._runtime = args, runtime
        self._stragglers = _make_straggler_detector(args, runtime)
        self._hash_interval = args.training.check_weight_hash_across_dp_replicas_interval
        sharding = get_sharding(args.parallel)
        if self._hash_interval is not None and sharding.ignores(ShardingCapability.REPLICA_HASH):
            reason = sharding.reason(ShardingCapability.REPLICA_HASH)
            logger.info("--check-weight-hash-across-dp-replicas-interval has no effect: %s", reason)
            self._hash_interval = None
        self._energy = _make_energy_meter(args, runtime)
        self._allocations = _make_snapshot_recorder(args, runtime)
        self._iterations = 0  # since the energy was read

    def start(self) -> None:
        """Begin an iteration."""
        if self._stragglers is not None:
            self._stragglers.start()

    def stop(self, iteration: int) -> MonitorReport:
        """End an iteration. Collective at the log interval."""
        if self._stragglers is not None:
            self._stragglers.stop()
        self._iterations += 1
        if iteration % self._args.output.log_interval != 0:
            return MonitorReport()
        if self._allocations is not None:
            self._allocations.snapshot()
        energy = None if self._energy is None else self._energy.lap(self._iterations)
        self._iterations = 0
        times = None if self._stragglers is None else self._stragglers.report(iteration)
        if self._stragglers is None or times is None:
            return MonitorReport(energy=energy)
        return MonitorReport(_as_record(times), energy, tuple(self._stragglers.lines(times)))

    def run_due_checks(self, chunks: Iterable[nn.Module], wait_params: Callable[[], None], iteration: int) -> None:
        """Run the checks that are due between two iterations, or before the first. Collective.

        `wait_params` waits until the parameters hold the last update.

        Raises:
            WeightsDifferError: if replicas hold different weights.
        """
        sniff = self._args.training.gpu_sniff_test_interval
        if sniff is not None and iteration % sniff == 0:
            lines = check_devices(self._runtime.ps, self._runtime.device)
            if self._runtime.launch_env.rank == 0:
                print(f"{lines[0]}, after {iteration} iterations", flush=True)
                for line in lines[1:]:
                    logger.warning("%s", line)
        if self._hash_interval is not None and iteration % self._hash_interval == 0:
            wait_params()
            check_replica_weights(
                (param for chunk in chunks for param in chunk.parameters()), self._runtime.ps, iteration
            )
            if self._runtime.launch_env.rank == 0:
                print(f">>> Weight hashes match after {iteration} iterations...", flush=True)

    def close(self) -> None:
        if self._stragglers is not None:
            self._stragglers.close()


def _make_straggler_detector(args: Arguments, runtime: Runtime) -> StragglerDetector | None:
    output = args.output
    if not output.log_straggler:
        return None
    if args.parallel.has_sharded_params or args.training.cuda_graph_impl == "full_iteration":
        logger.info(
            "--log-straggler has no effect with full-iteration CUDA graphs or fully sharded parameters: "
            "communication cannot be separated from compute"
        )
        return None
    on, switch = not output.disable_straggler_on_startup, None
    # Open a port only if a flag sets one, or if detection is off at the start and needs it.
    if runtime.launch_env.rank == 0 and (not on or args.source.get("straggler_ctrlr_port", "default") != "default"):
        switch = HttpToggle("straggler detection", output.straggler_ctrlr_port, on)
    return StragglerDetector(
        runtime.ps,
        runtime.device,
        output.straggler_minmax_count,
        on,
        switch,
        get_memory_mb=partial(peak_memory_mb, runtime.device),
    )


def _make_energy_meter(args: Arguments, runtime: Runtime) -> EnergyMeter | None:
    if not args.output.log_energy:
        return None
    meter = open_energy_meter(runtime.ps, runtime.device)
    if isinstance(meter, str):
        logger.warning("--log-energy has no effect: %s", meter)
        return None
    return meter


def _make_snapshot_recorder(args: Arguments, runtime: Runtime) -> MemorySnapshotRecorder | None:
    if not args.output.record_memory_history or runtime.device.type != "cuda":
        return None
    launch_env = runtime.launch_env
    return MemorySnapshotRecorder(args.output.memory_snapshot_path, launch_env.rank, writer=launch_env.world_size - 1)


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory of this process in MiB: of the device on CUDA, else of the resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _as_record(times: ComputeTimeSummary) -> dict[str, Any]:
    """Return the values for metrics.jsonl, in milliseconds."""
    return {
        "min": times.low_s * 1e3,
        "median": times.median_s * 1e3,
        "max": times.high_s * 1e3,
        "stragglers": [slow.rank for slow in times.stragglers],
        "parts": {part: seconds * 1e3 for part, seconds in times.parts_s.items()},
        "ranks": [seconds * 1e3 for seconds in times.ranks_s],
        "memory_mb": list(times.memory_mb),
    }

"""What looks at the ranks while they train, where a flag asks for it: slow ones, ones whose weights are no longer those of the others, ones
whose device computes wrong; and at their devices' energy and allocations.

All that is collective here is entered by every rank in the same iterations, which follow from flags alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from arguments import Arguments
from moe_trainer.guard.device_check import check_devices
from moe_trainer.guard.straggler import OwnTimes, StragglerWatch
from moe_trainer.guard.switch import Switch
from moe_trainer.guard.weight_hash import check_weights
from moe_trainer.initialize import Runtime
from moe_trainer.optim.optimizer import Optimizer
from moe_trainer.report.allocations import AllocationRecord
from moe_trainer.report.energy import Energy, EnergyMeter, open_energy_meter
from moe_trainer.shape.full_sharding import shards_parameters

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Observed:
    """What an iteration's end brought: values for metrics.jsonl, and lines for the log."""

    own_times: Mapping[str, Any] | None = None
    energy: Energy | None = None
    lines: tuple[str, ...] = ()


class Watches:
    """The watches that the flags ask for; with none of them nothing is measured or sent. Collective: build it on every rank."""

    def __init__(self, args: Arguments, runtime: Runtime):
        self._args, self._runtime = args, runtime
        self._stragglers = _straggler_watch(args, runtime)
        self._hash_interval = args.training.check_weight_hash_across_dp_replicas_interval
        if self._hash_interval is not None and shards_parameters(args.parallel):
            logger.info("--check-weight-hash-across-dp-replicas-interval is idle: the weights are cut over the data-parallel ranks, none is held twice")
            self._hash_interval = None
        self._energy = _energy_meter(args, runtime)
        self._allocations = _allocation_record(args, runtime)
        self._iterations = 0  # since the energy was read
        if args.output.log_device_memory_used and runtime.device.type != "cuda":
            logger.info("--log-device-memory-used is idle: there is no device, whose memory lines it adds to")

    def start(self) -> None:
        """An iteration begins."""
        if self._stragglers is not None:
            self._stragglers.start()

    def stop(self, iteration: int) -> Observed:
        """It is over. Collective at the log interval."""
        if self._stragglers is not None:
            self._stragglers.stop()
        self._iterations += 1
        if iteration % self._args.output.log_interval != 0:
            return Observed()
        if self._allocations is not None:
            self._allocations.snapshot()
        energy = None if self._energy is None else self._energy.lap(self._iterations)
        self._iterations = 0
        times = None if self._stragglers is None else self._stragglers.report(iteration)
        if times is None:
            return Observed(energy=energy)
        return Observed(_as_record(times), energy, tuple(self._stragglers.lines(times)))

    def look(self, chunks: Iterable[nn.Module], optimizer: Optimizer | None, iteration: int) -> None:
        """Do what is due between two iterations, and before the first. Collective.

        Raises: WeightsDifferError.
        """
        sniff = self._args.training.gpu_sniff_test_interval
        if sniff is not None and iteration % sniff == 0:
            lines = check_devices(self._runtime.ps, self._runtime.device)
            if self._runtime.place.rank == 0:
                print(f"{lines[0]}, after {iteration} iterations", flush=True)
                for line in lines[1:]:
                    logger.warning("%s", line)
        if self._hash_interval is not None and iteration % self._hash_interval == 0:
            if optimizer is not None:
                optimizer.wait_params()
            check_weights((param for chunk in chunks for param in chunk.parameters()), self._runtime.ps, iteration)
            if self._runtime.place.rank == 0:
                print(f">>> Weight hashes match after {iteration} iterations...", flush=True)

    def close(self) -> None:
        """End them."""
        if self._stragglers is not None:
            self._stragglers.close()


def _straggler_watch(args: Arguments, runtime: Runtime) -> StragglerWatch | None:
    output = args.output
    if not output.log_straggler:
        return None
    if shards_parameters(args.parallel) or args.training.cuda_graph_impl == "full_iteration":
        logger.info("--log-straggler is idle: waits inside a graph of the whole iteration, and for fully sharded parameters, cannot be told from work")
        return None
    on, switch = not output.disable_straggler_on_startup, None
    # no port is opened that nobody has asked for; a search that is off at the start needs one
    if runtime.place.rank == 0 and (not on or args.source.get("straggler_ctrlr_port", "default") != "default"):
        switch = Switch("the search for slow ranks", output.straggler_ctrlr_port, on)
    return StragglerWatch(runtime.ps, runtime.device, output.straggler_minmax_count, on, switch)


def _energy_meter(args: Arguments, runtime: Runtime) -> EnergyMeter | None:
    if not args.output.log_energy:
        return None
    meter = open_energy_meter(runtime.ps, runtime.device)
    if isinstance(meter, str):
        logger.warning("--log-energy is idle: %s", meter)
        return None
    return meter


def _allocation_record(args: Arguments, runtime: Runtime) -> AllocationRecord | None:
    if not args.output.record_memory_history:
        return None
    if runtime.device.type != "cuda":
        logger.info("--record-memory-history is idle: torch keeps a history of allocations on CUDA devices only")
        return None
    place = runtime.place
    return AllocationRecord(args.output.memory_snapshot_path, place.rank, writer=place.world_size - 1)


def _as_record(times: OwnTimes) -> dict[str, Any]:
    """As in metrics.jsonl, in milliseconds."""
    return {"min": times.low_s * 1e3, "median": times.median_s * 1e3, "max": times.high_s * 1e3,
            "stragglers": [slow.rank for slow in times.stragglers]}

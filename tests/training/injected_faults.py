"""Wrong values injected into a run: one expert, module, iteration and microbatch, forward or backward, once or always."""

import contextlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from emulated_cuda.run import on_device
from harness import run_ranks

import arguments
from moe_trainer.launch_env import LaunchEnv
from moe_trainer.resilience.rejection import ResultRejectedError
from moe_trainer.training import fault_localization, initialize, pretrain, resume
from moe_trainer.training.run import TrainRun


@dataclass(frozen=True)
class Fault:
    """Where a NaN (or `value`) is injected. module: global name; rank: None for every rank that has the module and the microbatch.

    times: evaluations that have it. expert: the NaN is in that expert's rows only, by its global number.
    """

    module: str
    iteration: int
    microbatch: int = 1
    backward: bool = False
    rank: int | None = None
    times: int = 99
    expert: int | None = None
    value: float = float("nan")


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad.clone()), None


def inject_fault(run: TrainRun, fault: Fault) -> None:
    """Register the fault as a forward hook of its module."""
    seen: list[int] = []

    def hook(module, inputs, output):
        trace = run.ps.trace
        if (
            trace.iteration != fault.iteration
            or trace.microbatch != fault.microbatch
            or not module.training
            or len(seen) >= fault.times
        ):
            return None
        if fault.rank is not None and run.ps.world.rank != fault.rank:
            return None
        first, count = 0, len(output)
        if fault.expert is not None:
            names = [name.split(".")[-3] for name in module.linear_fc1.weight.info.names]
            local = names.index(str(fault.expert))
            first, count = sum(inputs[2][:local]), inputs[2][local]
        seen.append(1)

        def change(x):
            x[first : first + count].view(-1)[:1] = fault.value
            return x

        return _Backward.apply(output, change) if fault.backward else change(output.clone())

    for chunk in run.chunks:
        for path, module in chunk.named_modules():
            if fault_localization.global_name(chunk, path) == fault.module:
                named = (
                    [name.split(".")[-3] for name in module.linear_fc1.weight.info.names]
                    if fault.expert is not None
                    else []
                )
                if fault.expert is None or str(fault.expert) in named:
                    module.register_forward_hook(hook)


@dataclass(frozen=True)
class RankResult:
    """How a rank ended: its exit code, the message if it was rejected, and what it logged."""

    code: int
    message: str
    log: str


def train_with(
    argv: list[str],
    folder: Path,
    world_size: int = 1,
    faults: tuple[Fault, ...] = (),
    node: str | None = None,
    change: Callable[[TrainRun], None] | None = None,
) -> list[RankResult]:
    """Run a job with injected faults, with CUDA graphs on an emulated device; node: the host name it sees; change: modifies the run."""
    folder.mkdir(parents=True, exist_ok=True)
    argv = [*argv, "--metrics-file", "metrics.jsonl"]
    if "--cuda-graph-impl" in argv:
        # Triton's kernels run in its interpreter there, too slowly for a full job
        return [on_device(_rank, 0, 1, [*argv, "--triton-kernels", "none"], folder, faults, node, change)]
    return run_ranks(_rank, world_size, argv, folder, faults, node, change)


def _rank(rank, n, argv, folder, faults, node, change):
    initialize._init_process_group = pretrain.close_groups = lambda *_: None
    os.chdir(folder)
    if node is not None:
        fault_localization.platform.node = lambda: node
    build = resume.build_run

    def build_with_faults(*rest):
        run = build(*rest)
        for fault in faults:
            inject_fault(run, fault)
        if change is not None:
            change(run)
        return run

    resume.build_run = build_with_faults
    heard = io.StringIO()
    with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
        try:
            code, message = (
                pretrain.pretrain(arguments.parse_args(argv, n), LaunchEnv(rank, n, rank, "127.0.0.1", 1, "test")),
                "",
            )
        except ResultRejectedError as error:
            code, message = error.exit_code, str(error)
    return RankResult(code, message, heard.getvalue())

"""Wrong numbers planted in a run: one expert, module, iteration and microbatch, forward or backward, once or always."""

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
from moe_trainer.training import fault_localization, initialize, pretrain
from moe_trainer.training.context import TrainContext


@dataclass(frozen=True)
class Plant:
    """Where a NaN (or `value`) comes in. module: global name; rank: None for every rank that has the module and the microbatch.

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


def plant(run: TrainContext, what: Plant) -> None:
    """Hang it into the model."""
    seen: list[int] = []

    def hook(module, inputs, output):
        trace = run.ps.trace
        if (
            trace.iteration != what.iteration
            or trace.microbatch != what.microbatch
            or not module.training
            or len(seen) >= what.times
        ):
            return None
        if what.rank is not None and run.ps.world.rank != what.rank:
            return None
        first, count = 0, len(output)
        if what.expert is not None:
            names = [name.split(".")[-3] for name in module.linear_fc1.weight.info.names]
            local = names.index(str(what.expert))
            first, count = sum(inputs[2][:local]), inputs[2][local]
        seen.append(1)

        def change(x):
            x[first : first + count].view(-1)[:1] = what.value
            return x

        return _Backward.apply(output, change) if what.backward else change(output.clone())

    for chunk in run.chunks:
        for path, module in chunk.named_modules():
            if fault_localization.global_name(chunk, path) == what.module:
                named = (
                    [name.split(".")[-3] for name in module.linear_fc1.weight.info.names]
                    if what.expert is not None
                    else []
                )
                if what.expert is None or str(what.expert) in named:
                    module.register_forward_hook(hook)


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code, the message if it was rejected, and what it logged."""

    code: int
    message: str
    log: str


def train_with(
    argv: list[str],
    folder: Path,
    world_size: int = 1,
    plants: tuple[Plant, ...] = (),
    node: str | None = None,
    change: Callable[[TrainContext], None] | None = None,
) -> list[Ended]:
    """Run a job with what is planted in it, with CUDA graphs on an emulated device; node: the name of the host that it believes to be on; change: does something to the run."""
    folder.mkdir(parents=True, exist_ok=True)
    argv = [*argv, "--metrics-file", "metrics.jsonl"]
    if "--cuda-graph-impl" in argv:
        # Triton's kernels run in its interpreter there, too slowly for a full job
        return [on_device(_rank, 0, 1, [*argv, "--triton-kernels", "none"], folder, plants, node, change)]
    return run_ranks(_rank, world_size, argv, folder, plants, node, change)


def _rank(rank, n, argv, folder, plants, node, change):
    initialize._init_process_group = pretrain.close_groups = lambda *_: None
    os.chdir(folder)
    if node is not None:
        fault_localization.platform.node = lambda: node
    build = pretrain.build_context

    def build_with_plants(*rest):
        run = build(*rest)
        for what in plants:
            plant(run, what)
        if change is not None:
            change(run)
        return run

    pretrain.build_context = build_with_plants
    heard = io.StringIO()
    with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
        try:
            code, message = (
                pretrain.pretrain(arguments.parse_args(argv, n), LaunchEnv(rank, n, rank, "127.0.0.1", 1, "test")),
                "",
            )
        except ResultRejectedError as error:
            code, message = error.exit_code, str(error)
    return Ended(code, message, heard.getvalue())

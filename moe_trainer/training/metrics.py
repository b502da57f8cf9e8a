"""Open and close the metrics of a run, which the last rank writes."""

import json
import os
from dataclasses import replace

import torch

from arguments import Arguments
from arguments.container import OPTIONS
from moe_trainer.estimate.flops import routed_layer_share
from moe_trainer.estimate.hardware import bf16_peak_tflops
from moe_trainer.metrics.logger import LogOptions, MetricsLogger
from moe_trainer.parallel.coordination import raise_on_all_ranks
from moe_trainer.training.context import TrainContext, TrainState


def open_metrics(ctx: TrainContext, state: TrainState) -> MetricsLogger | None:
    """Open the metrics files on the last rank; the others get None. Collective.

    Raises:
        UserError: on every rank, if they cannot be written.
    """
    with raise_on_all_ranks(ctx.ps.world, "logging"):
        is_last = ctx.ps.world.rank == ctx.ps.world.size - 1
        return _open_metrics(ctx, state) if is_last else None


def close_metrics(ctx: TrainContext) -> None:
    """Write buffered metrics and close the files. Collective.

    Raises:
        UserError: on every rank, if something could not be written.
    """
    with raise_on_all_ranks(ctx.ps.world):
        if ctx.metrics is not None:
            ctx.metrics.close()


def _open_metrics(ctx: TrainContext, state: TrainState) -> MetricsLogger:
    args, output, launch_env = ctx.args, ctx.args.output, ctx.runtime.launch_env
    folder = output.save or output.tensorboard_dir
    if args.is_eval_only:  # as in Megatron-LM; the metrics next to a checkpoint belong to the run that wrote it
        folder, output = None, replace(output, tensorboard_dir=None, wandb_project=None)
    options = LogOptions(
        output,
        ctx.train_iters,
        metrics_file=output.metrics_file or (f"{folder}/metrics.jsonl" if folder else None),
        moe_per_layer_logging=args.moe.moe_per_layer_logging,
        expert_ranks=ctx.ps.ep.size,
        peak_tflops=bf16_peak_tflops(torch.cuda.get_device_name(ctx.runtime.device))
        if ctx.runtime.device.type == "cuda"
        else None,
        layer_share=routed_layer_share(args, args.data.seq_length, ctx.padded_vocab_size),
        resumes_own_run=output.auto_resume
        or (state.iteration > 0 and output.save is not None and output.load == output.save),
        start_samples=state.consumed_train_samples,
        is_eval_only=args.is_eval_only,
        run=describe_environment(args, launch_env.world_size, ctx.padded_vocab_size, ctx.runtime.device),
    )
    return MetricsLogger(options, launch_env.world_size, state.iteration, args.as_dict())


def describe_environment(
    args: Arguments, world_size: int, padded_vocab_size: int, device: torch.device
) -> dict[str, object]:
    """Describe the run for the first record of metrics.jsonl, which `plan.py calibrate --from` reads.

    Returns:
        World size, device, threads of a rank on CPU, padded vocabulary, and every flag that is not at its default.
    """
    settings = {name: value for name, value in args.as_dict().items() if value != OPTIONS[name].default}
    on_gpu = device.type == "cuda"
    return {
        "world_size": world_size,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "threads": None if on_gpu else torch.get_num_threads(),
        "cores": None if on_gpu else os.cpu_count(),
        "padded_vocab_size": padded_vocab_size,
        "settings": json.loads(json.dumps(settings, default=str)),
    }

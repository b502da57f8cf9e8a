"""The metrics of a run: opened and closed by all ranks together, kept by the last one."""

import json
import os
from dataclasses import replace

import torch

from arguments import Arguments
from arguments.container import OPTIONS
from moe_trainer.planner.hardware import bf16_peak
from moe_trainer.report.metrics import LogOptions, MetricsLogger
from moe_trainer.run import Run, TrainState
from moe_trainer.shape.flops import routed_layer_share
from moe_trainer.training.agreement import written_by_all


def open_metrics(run: Run, state: TrainState) -> Run:
    """Open the metrics files on the last rank; collective, so that all ranks stop when they cannot be written."""
    place = run.runtime.place
    with written_by_all(run, "logging"):
        if place.rank == place.world_size - 1:
            return replace(run, metrics=_open_metrics(run, state))
    return run


def close_metrics(run: Run) -> None:
    """Write what is held back and close the metrics files; collective.

    Raises: InputError on every rank when something of it could not be written.
    """
    with written_by_all(run):
        if run.metrics is not None:
            run.metrics.close()


def _open_metrics(run: Run, state: TrainState) -> MetricsLogger:
    args, output, place = run.args, run.args.output, run.runtime.place
    folder = output.save or output.tensorboard_dir
    if args.evaluates_only:  # as in Megatron-LM; and the metrics beside a checkpoint are those of the run that wrote it
        folder, output = None, replace(output, tensorboard_dir=None, wandb_project=None)
    options = LogOptions(
        output,
        run.train_iters,
        metrics_file=output.metrics_file or (f"{folder}/metrics.jsonl" if folder else None),
        moe_per_layer_logging=args.moe.moe_per_layer_logging,
        expert_ranks=run.ps.ep.size,
        peak_tflops=bf16_peak(torch.cuda.get_device_name(run.runtime.device)) if run.runtime.device.type == "cuda" else None,
        layer_share=routed_layer_share(args, args.data.seq_length, run.padded_vocab_size),
        own=output.auto_resume or (state.iteration > 0 and output.save is not None and output.load == output.save),
        start_samples=state.consumed_train_samples,
        evaluates_only=args.evaluates_only,
        run=run_record(args, place.world_size, run.padded_vocab_size, run.runtime.device),
    )
    return MetricsLogger(options, place.world_size, state.iteration, args.as_dict())


def run_record(args: Arguments, world_size: int, padded_vocab_size: int, device: torch.device) -> dict[str, object]:
    """Describe what runs where, as the first record of metrics.jsonl holds it and `plan.py calibrate --from` reads it.

    Returns:
        World size, device, threads of a rank on CPU, padded vocabulary, and every flag that is not at its default.
    """
    settings = {name: value for name, value in args.as_dict().items() if value != OPTIONS[name].default}
    on_gpu = device.type == "cuda"
    return {
        "world_size": world_size, "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "threads": None if on_gpu else torch.get_num_threads(), "cores": None if on_gpu else os.cpu_count(),
        "padded_vocab_size": padded_vocab_size, "settings": json.loads(json.dumps(settings, default=str)),
    }

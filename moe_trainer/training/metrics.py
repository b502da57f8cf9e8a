"""The metrics of a run: opened and closed by all ranks together, kept by the last one."""

from dataclasses import replace

import torch

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
    )
    return MetricsLogger(options, place.world_size, state.iteration, args.as_dict())

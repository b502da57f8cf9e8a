"""Open and close the metrics of a run, which the last rank writes."""

import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from arguments import Arguments
from arguments.container import OPTIONS
from arguments.mechanisms.formats import quantized_format
from arguments.stage_layout import chunk_layouts, parallel_sizes
from moe_trainer.estimate.flops import routed_layer_share
from moe_trainer.estimate.hardware import bf16_peak_tflops
from moe_trainer.estimate.memory import data_parallel_size
from moe_trainer.estimate.parameters import count_parameters
from moe_trainer.metrics.logger import LogOptions, MetricsLogger
from moe_trainer.parallel.collectives import all_gather_object
from moe_trainer.parallel.coordination import raise_on_all_ranks
from moe_trainer.parallel.state import Group
from moe_trainer.training.run import BaseRun, TrainState
from moe_trainer.version import __version__

MAX_HOSTNAMES = 8  # in the description of a run


def open_metrics(run: BaseRun, state: TrainState) -> MetricsLogger | None:
    """Open the metrics files on the last rank; the others get None. Collective.

    Raises:
        UserError: on every rank, if they cannot be written.
    """
    hosts = node_names(run.ps.world)
    with raise_on_all_ranks(run.ps.world, "logging"):
        is_last = run.ps.world.rank == run.ps.world.size - 1
        return _open_metrics(run, state, hosts) if is_last else None


def node_names(group: Group) -> list[str]:
    """Return the names of the group's nodes, in the order of their ranks. Collective."""
    return list(dict.fromkeys(all_gather_object(socket.gethostname(), group)))


def close_metrics(run: BaseRun) -> None:
    """Write buffered metrics and close the files. Collective.

    Raises:
        UserError: on every rank, if something could not be written.
    """
    with raise_on_all_ranks(run.ps.world):
        if run.metrics is not None:
            run.metrics.close()


def metrics_path(args: Arguments) -> str | None:
    """Return where metrics.jsonl is written; None if it is not."""
    output = args.output
    folder = None if args.is_eval_only else output.save or output.tensorboard_dir
    # the metrics next to an evaluated checkpoint belong to the run that wrote it
    return output.metrics_file or (f"{folder}/metrics.jsonl" if folder else None)


def _open_metrics(run: BaseRun, state: TrainState, hosts: Sequence[str]) -> MetricsLogger:
    args, output, launch_env = run.args, run.args.output, run.runtime.launch_env
    if args.is_eval_only:  # as in Megatron-LM
        output = replace(output, tensorboard_dir=None, wandb_project=None)
    options = LogOptions(
        output,
        run.train_iters,
        metrics_file=metrics_path(args),
        moe_per_layer_logging=args.moe.moe_per_layer_logging,
        expert_ranks=run.ps.ep.size,
        peak_tflops=bf16_peak_tflops(torch.cuda.get_device_name(run.runtime.device))
        if run.runtime.device.type == "cuda"
        else None,
        layer_share=routed_layer_share(args, args.data.seq_length, run.padded_vocab_size),
        resumes_own_run=output.auto_resume
        or (state.iteration > 0 and output.save is not None and output.load == output.save),
        start_samples=state.consumed_train_samples,
        is_eval_only=args.is_eval_only,
        run=describe_environment(args, launch_env.world_size, run.padded_vocab_size, run.runtime.device, hosts)
        | ({"warnings": list(run.inputs.warnings)} if run.inputs.warnings else {}),
    )
    return MetricsLogger(options, launch_env.world_size, state.iteration, args.as_dict())


def describe_environment(
    args: Arguments, world_size: int, padded_vocab_size: int, device: torch.device, hosts: Sequence[str]
) -> dict[str, object]:
    """Describe the run for the first record of metrics.jsonl, which the dashboard and `plan.py calibrate --from` read.

    `hosts` are the names of the nodes, in the order of their ranks.

    Returns:
        World size, device, threads of a rank on CPU, padded vocabulary, model, mapping, the first nodes, versions, and
        every flag that is not at its default (`settings`), or every flag (`all_settings`).
    """
    values = args.as_dict()
    everything = json.loads(json.dumps(values, default=str))
    changed = {name for name, value in values.items() if value != OPTIONS[name].default}
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    training, parallel, tokens = args.training, args.parallel, args.data.seq_length
    return {
        "started": time.time(),
        "world_size": world_size,
        "device": name,
        "threads": None if on_gpu else torch.get_num_threads(),
        "cores": None if on_gpu else os.cpu_count(),
        "padded_vocab_size": padded_vocab_size,
        "model": _describe_model(args, padded_vocab_size),
        "mapping": {
            **{key: value for key, value in parallel_sizes(args).items() if key in ("tp", "cp", "pp", "ep", "etp")},
            "vpp": len(chunk_layouts(args.model, parallel)[0]),
            "dp": data_parallel_size(args, world_size),
            "world_size": world_size,
            "nodes": len(hosts),
        },
        "hardware": {"device": name, "hostnames": list(hosts[:MAX_HOSTNAMES])},
        "versions": {"moe_trainer": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "precision": args.precision.params_dtype_name
        + (f", {fmt.flags.name} {fmt.key}" if (fmt := quantized_format(args.precision)) else ""),
        "train_iters": training.train_iters,
        "global_batch_size": training.global_batch_size,
        "tokens_per_iteration": None if args.packed_capacity else training.global_batch_size * tokens,
        "command": shlex.join(sys.argv),
        "settings": {each: value for each, value in everything.items() if each in changed},
        "all_settings": everything,
    }


def _describe_model(args: Arguments, padded_vocab_size: int) -> dict[str, object]:
    model, moe = args.model, args.moe
    counts = count_parameters(args, padded_vocab_size)
    found: dict[str, object] = {
        "name": args.output.preset,
        "total_parameters": counts.total + counts.mtp,
        "active_parameters": counts.active,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "seq_length": args.data.seq_length,
    }
    if moe.num_experts:
        found |= {"num_experts": moe.num_experts, "topk": moe.moe_router_topk, "num_moe_layers": counts.num_moe_layers}
    return found

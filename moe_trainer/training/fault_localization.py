"""Locate the origin of a non-finite result: module, expert, microbatch (debug/nonfinite.py), rank, device, samples."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from moe_trainer.debug.nonfinite import (
    AFTER_LAST,
    FORWARD,
    Chunk,
    ExpertTokensFn,
    Fault,
    NonFiniteTracer,
    nonfinite_gradients,
)
from moe_trainer.model.module_names import names_of_experts
from moe_trainer.model.transformer import Transformer
from moe_trainer.model.weights import chunk_stages
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import get_param_info
from moe_trainer.training.run import BaseRun, TrainRun, TrainState


def locate_nonfinite(run: TrainRun, state: TrainState, rerun: Callable[[], list[Tensor]]) -> str:
    """Describe the first non-finite value over all ranks, and the rank that has it. Collective.

    `rerun` repeats the iteration without graphs and returns its sums.
    """
    ps = run.ps
    chunks = [Chunk(number, chunk, partial(global_name, chunk)) for number, chunk in chunk_stages(run.chunks, ps)]
    tracer = NonFiniteTracer(chunks, lambda: ps.trace.microbatch, _make_expert_tokens_fn(run.chunks))
    with tracer.watching():
        sums = rerun()
    for index, pair in enumerate(sums, start=1):
        if not torch.isfinite(pair[0]):
            text = "the loss is not finite, and all modules' results are"
            tracer.note(Fault(index, FORWARD, chunks[-1].number, AFTER_LAST, text))
    local_fault = tracer.earliest()
    if local_fault is None and (names := nonfinite_gradients(run.grads.owned_views())):
        text = f"the sum of the gradients of {', '.join(names[:3])} is not finite, and each of them is"
        local_fault = Fault(AFTER_LAST, 1, 0, 0, text)
    gathered = collectives.all_gather_object((local_fault, _describe_owner(run, state, local_fault)), ps.world)
    faults = [(fault, owner) for fault, owner in gathered if fault is not None]
    if not faults:
        return _describe_largest_gradient(run, state)
    fault = min(fault for fault, _ in faults)
    return f"{fault.text}, on {' and '.join(owner for each, owner in faults if each == fault)}"


def _describe_largest_gradient(run: TrainRun, state: TrainState) -> str:
    """Describe the overflow of the norm of finite gradients, and the largest of them. Collective."""
    if math.isfinite(run.optimizer.grad_norm()):
        return "nothing that is not finite was found in it"
    views = [(slot, view) for slot, view in run.grads.owned_views() if view.numel()]
    mine = max(
        ((float(view.abs().max()), get_param_info(slot.param).names[0]) for slot, view in views), default=(0.0, "")
    )
    gathered = collectives.all_gather_object((*mine, _describe_owner(run, state, None)), run.ps.world)
    largest, name, owner = max(gathered)
    return f"each gradient is finite, and their norm is not; the largest is {largest:.3g}, of {name}, on {owner}"


def device_name(run: BaseRun) -> str:
    """Return host and device index of this rank, "node7 3"; only the host on CPU."""
    device = run.runtime.device
    return platform.node() + (f" {device.index or 0}" if device.type == "cuda" else "")


def global_name(chunk: Transformer, path: str) -> str:
    """Return a module's path in the full model; the path in a chunk counts from its first layer."""
    words = path.split(".")
    if words[:2] == ["decoder", "layers"] and len(words) > 2:
        words[2] = str(chunk.layout.layers[int(words[2])])
    return ".".join(words) if path else ("output_layer and loss" if chunk.layout.has_loss else "the pipeline stage")


def _describe_owner(run: BaseRun, state: TrainState, fault: Fault | None) -> str:
    ps = run.ps
    coordinates = ", ".join(f"{name} {getattr(ps, name).rank}" for name in ("tp", "cp", "pp", "ep", "dp"))
    text = f"rank {ps.world.rank} ({device_name(run)}; {coordinates})"
    if fault is None or not 0 < fault.microbatch < AFTER_LAST:
        return text
    size = run.args.training.micro_batch_size
    if run.inputs.packing is not None:
        consumed = state.consumed_train_samples
        plan = run.inputs.packing.plan(consumed, run.batch_size.global_batch_size(consumed))
        samples = plan.pack(fault.microbatch - 1, run.data_rank)
        return f"{text}, samples {', '.join(map(str, samples))} of the run"
    start = state.consumed_train_samples + ((fault.microbatch - 1) * ps.dp.size + ps.dp.rank) * size
    return f"{text}, samples {start} to {start + size - 1} of the run"


def _make_expert_tokens_fn(chunks: list[Transformer]) -> ExpertTokensFn:
    """Return a function that reads the numbers of tokens per expert from the inputs of an experts module."""
    # collected before anything runs: parameters that a sharded module gathers have no names
    names = names_of_experts(chunks)

    def get_expert_tokens(module: nn.Module, inputs: tuple) -> tuple[list[str], list[int]] | None:
        expert_names = names.get(id(module))
        return None if expert_names is None else (expert_names, list(inputs[2])[: len(expert_names)])

    return get_expert_tokens

"""A plan as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from arguments.program import other_command
from moe_trainer.estimate.flops import training_flops
from moe_trainer.estimate.hardware import GIB, RESERVED_BYTES
from moe_trainer.estimate.memory import ChunkBytes, StageMemory
from moe_trainer.estimate.plan import Plan, closest_reference_run
from moe_trainer.estimate.published_runs import BILLION_PARAMS
from moe_trainer.estimate.step_time import PARTS
from moe_trainer.estimate.uncertainty import PUBLISHED_HARDWARE, error_bar

if TYPE_CHECKING:
    from moe_trainer.estimate.suggestions import Fix


def plan_lines(plan: Plan, fixes: Sequence[Fix] = ()) -> list[str]:
    """Return the table that --dry-run prints; `fixes` make a plan fit that does not."""
    counts, time, hardware = plan.counts, plan.time, plan.hardware
    is_packed = plan.args.packed_capacity is not None
    num_sequences = plan.args.training.global_batch_size if is_packed else plan.batch_size
    lines = [
        "--------------------------- plan ---------------------------",
        f"{plan.world_size} x {hardware.name} ({hardware.memory_gib:g} GiB, {hardware.peak(plan.width) / 1e12:g} "
        f"TFLOP/s {plan.width}, NVLink {hardware.nvlink_gb_s:g} GB/s among {hardware.domain}, network "
        f"{hardware.network_gb_s:g} GB/s; {hardware.source})",
        f"parameters: {counts.total:,} (+ {counts.mtp:,} multi-token prediction), {counts.active:,} active per token",
        f"an iteration: {num_sequences} sequences in {plan.num_microbatches} microbatches, {plan.flops:.4g} FLOPs",
        "",
        f"memory of a rank by pipeline stage, GiB at the peak (of {hardware.memory_gib:g}, "
        f"{RESERVED_BYTES / GIB:g} set aside for context, NCCL, allocator)",
        "  stage   parameters  weights    grads  optimizer  activations  dispatch  working    total     free  "
        "microbatches held",
    ]
    lines += [_stage_line(plan, stage) for stage in plan.memory]
    peak = plan.peak
    modules = sorted(peak.activations.items(), key=lambda item: -item[1])
    activations = ", ".join(f"{module} {count / GIB:.2f}" for module, count in modules if count)
    lines.append(f"  activations of stage {peak.stage}: {activations}")
    if max(len(stage.peak_inflight_microbatches) for stage in plan.memory) > 1:
        lines.append("  microbatches held: at the peak, by each chunk (virtual stage) of the stage")
    lines.append(
        "  counted as this program's own layers keep them; of what TransformerEngine's keep instead, inputs in 8 "
        "bits and attention" + ("" if ChunkBytes(plan.args, plan.vocab_rows).te_attends else " (not used here)")
    )
    if peak.host:
        lines.append(f"  in host memory: {peak.host / GIB:.2f} GiB a rank")
    bar = error_bar(plan)
    lines += [
        _fit_line(plan),
        *(fix_lines(fixes, "cheapest changes that fit") if plan.margin < 0 else []),
        "",
        f"step: {time.step:.3f} s +- {bar.percent}",
    ]
    lines += [f"  +- {100 * value:.0f} % of these: {name}" for name, value in bar.reasons]
    lines += [
        f"  {text:36s} {getattr(time, name):9.3f} s  {100 * getattr(time, name) / time.step:5.1f} %"
        for name, text in PARTS
        if getattr(time, name) > 0
    ]
    lines += [
        f"speed: {plan.tokens_per_second:,.0f} tokens/s/GPU, {plan.tflops:.1f} TFLOP/s/GPU, MFU {100 * plan.mfu:.1f} % "
        f"of the {plan.width} peak, {plan.tokens_per_day / 1e9:.1f} billion tokens a day",
        *length_lines(plan),
        *_nearest_lines(plan),
        _basis_line(plan),
        "------------------------------------------------------------",
    ]
    return lines


def length_lines(plan: Plan) -> list[str]:
    """Return what --length-histogram says of padding and packing; nothing without it."""
    lengths = plan.lengths
    if lengths is None or plan.padded_step is None:
        return []
    found, size = lengths.histogram, lengths.seq_length
    cut = f", {lengths.num_cut:,.0f} of them cut to --seq-length" if lengths.num_cut else ""
    full = training_flops(plan.args, 1, size, plan.vocab_rows) / size
    space = plan.batch_size * plan.args.data.seq_length
    padded = lengths.padded_fill * space / plan.padded_step / plan.world_size
    packed = f"packed in order into {lengths.capacity:,} tokens"
    if lengths.groups is not None:
        shares = lengths.groups.token_shares.items()
        sizes = ", ".join(f"{100 * share:.0f} % in groups of {number}" for number, share in shares)
        packed = f"packed into groups of ranks with {lengths.capacity:,} tokens each (tokens: {sizes})"
    return [
        f"lengths: {found.num_sequences:,.0f} sequences of {found.mean:,.0f} tokens, half of them up to "
        f"{found.quantile(0.5):,}, the longest {found.counts[-1][0]:,}{cut}",
        f"  {packed}: {100 * (1 - lengths.fill):.1f} % padding, "
        f"{lengths.per_pack:.1f} sequences a pack; the mean token is in a sequence of {found.attention_length:,.0f}, "
        f"and takes {lengths.flops_per_token / 1e9:.2f} GFLOPs ({full / 1e9:.2f} in a full sequence)",
        f"  one by one, padded to {size:,}: {100 * (1 - lengths.padded_fill):.1f} % padding, "
        f"{lengths.padded_flops_per_token / 1e9:.2f} GFLOPs and {lengths.fill / lengths.padded_fill:.1f} times the "
        f"memory of activations a token, {padded:,.0f} tokens/s/GPU; packing is {plan.tokens_per_second / padded:.1f} "
        "times as fast",
    ]


def _stage_line(plan: Plan, stage: StageMemory) -> str:
    margin = plan.hardware.usable_bytes - stage.total
    state = stage.weights, stage.gradients, stage.optimizer
    sizes = (*state, stage.kept, stage.dispatch, stage.working, stage.total, margin)
    columns = [f"{size / GIB:{width}.2f}" for size, width in zip(sizes, (9, 9, 11, 13, 10, 9, 9, 9))]
    in_flight = " ".join(map(str, stage.peak_inflight_microbatches))
    return f"  {stage.stage:5d} {stage.held.total:12,d}{''.join(columns)}  {in_flight}"


def _fit_line(plan: Plan) -> str:
    if plan.margin < 0:
        return f"does not fit: stage {plan.peak.stage} needs {-plan.margin / GIB:.2f} GiB more than a device has"
    text = f"fits: the fullest device has {plan.margin / GIB:.2f} GiB left"
    if plan.headroom is not None and plan.headroom > 100:
        text += "; uneven routing cannot fill it"
    elif plan.headroom is not None:
        share = f"{plan.headroom:.2f} times an even share of tokens"
        text += f"; uneven routing fills it when a rank gets {share} in every layer"
    factor = plan.args.moe.moe_expert_rank_capacity_factor
    if factor is not None and plan.args.moe.num_experts:
        text += f"; from {factor:g} times on iterations are repeated with larger receive buffers"
    return text


def fix_lines(fixes: Sequence[Fix], title: str, none: str = "") -> list[str]:
    """Return the fixes, one per line; `none` if there are none."""
    if not fixes:
        return [
            none
            or "no few changes of recompute, mapping, optimizer and offloading make it fit, and not eight times the "
            f"devices; `{other_command('plan')} search` tries every mapping"
        ]
    return [f"{title}:", *(f"  {fix.text}" for fix in fixes)]


def _basis_line(plan: Plan) -> str:
    runs = len(plan.hardware.calibration)
    if runs:
        return (
            f"times: predicted, with constants fitted to {runs} own run{'s' if runs > 1 else ''} "
            f"({plan.hardware.source}); even routing"
        )
    return (
        "times: predicted, with constants fitted to published runs of Megatron-LM "
        f"(`{other_command('plan')} calibrate --from` fits yours); even routing"
    )


COMPARABLE = 1.0
"""Largest ratio of sizes, as logarithm to base 2, of two models that are compared at all."""


def _nearest_lines(plan: Plan) -> list[str]:
    if plan.hardware.calibration:
        return []
    found = closest_reference_run(plan)
    run = found.run
    differs = "; ".join(found.differs) or "the same mapping"
    if (
        abs(math.log2((plan.counts.total + plan.counts.mtp) / 1e9 / BILLION_PARAMS[run.model])) > COMPARABLE
        or plan.hardware.name not in PUBLISHED_HARDWARE
    ):
        return [f"no published run is comparable; the nearest is {run.name} ({run.source})"]
    return [
        f"nearest published run: {run.name}, {run.tflops:.1f} TFLOP/s/GPU ({run.source}); predicted here "
        f"{100 * (plan.tflops / run.tflops - 1):+.1f} %",
        f"  this run: {differs}",
    ]


def plan_json(plan: Plan, fixes: Sequence[Fix] = ()) -> dict[str, object]:
    """Return the content of --report FILE.

    Memory is of the fullest stage, in units of 2^30 bytes; `memory.stages` has all stages.
    """
    time, found, bar = plan.time, closest_reference_run(plan), error_bar(plan)
    return {
        "valid": True,
        "world_size": plan.world_size,
        "hardware": plan.hardware.name,
        "fits": plan.margin >= 0,
        "params": {name: getattr(plan.counts, name) for name in ("total", "mtp", "active", "active_no_embedding")},
        "memory": memory_json(plan),
        "microbatches": plan.num_microbatches,
        "flops": plan.flops,
        "fixes": [
            {"flags": list(fix.words), "slower": fix.slower, "margin_gb": fix.plan.margin / GIB, "outcome": fix.outcome}
            for fix in fixes
        ],
        "step_s": time.step,
        "step_error": bar.relative,
        "step_error_reasons": [{"reason": name, "error": value} for name, value in bar.reasons],
        "step": {f"{name}_s": getattr(time, name) for name, _ in PARTS},
        "tflops_per_gpu": plan.tflops,
        "tokens_per_s_per_gpu": plan.tokens_per_second,
        "tokens_per_day": plan.tokens_per_day,
        "mfu": plan.mfu,
        "mfu_peak": plan.width,
        "lengths": _lengths_json(plan),
        "nearest_published": {
            "name": found.run.name,
            "tflops_per_gpu": found.run.tflops,
            "source": found.run.source,
            "difference": plan.tflops / found.run.tflops - 1,
            "differs": list(found.differs),
        },
    }


def _lengths_json(plan: Plan) -> dict[str, float] | None:
    lengths = plan.lengths
    if lengths is None or plan.padded_step is None:
        return None
    return {
        "mean": lengths.histogram.mean,
        "attention_length": lengths.histogram.attention_length,
        "sequences_per_pack": lengths.per_pack,
        "fill": lengths.fill,
        "padded_fill": lengths.padded_fill,
        "flops_per_token": lengths.flops_per_token,
        "padded_flops_per_token": lengths.padded_flops_per_token,
        "padded_step_s": plan.padded_step,
    }


def memory_json(plan: Plan) -> dict[str, object]:
    """Return the part of the report about memory."""
    return {
        **_memory_json(plan.peak),
        "gb": 2**30,
        "device_gb": plan.hardware.memory_gib,
        "reserve_gb": RESERVED_BYTES / GIB,
        "margin_gb": plan.margin / GIB,
        "headroom": plan.headroom,
        "stages": [_memory_json(stage) for stage in plan.memory],
    }


def _memory_json(stage: StageMemory) -> dict[str, object]:
    sizes = {
        "weights": stage.weights,
        "grads": stage.gradients,
        "optimizer": stage.optimizer,
        "activations": stage.kept,
        "dispatch": stage.dispatch,
        "working": stage.working,
        "total": stage.total,
        "host": stage.host,
    }
    return {
        "stage": stage.stage,
        "parameters": stage.held.total,
        **{f"{name}_gb": size / GIB for name, size in sizes.items()},
        "activations_by_module_gb": {module: size / GIB for module, size in stage.activations.items()},
        "in_flight": list(stage.peak_inflight_microbatches),
        "headroom": stage.headroom,
    }

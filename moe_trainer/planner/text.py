"""A plan as a table and as JSON."""

from __future__ import annotations

from moe_trainer.planner.memory import GIB, RESERVE, StageMemory
from moe_trainer.planner.plan import Plan, nearest

_PARTS = (("compute", "computation"), ("exchange", "expert exchange, exposed"), ("tensor", "tensor parallel, exposed"),
          ("context", "context parallel, exposed"), ("pipeline", "pipeline messages, exposed"), ("data", "gradients and parameters, exposed"),
          ("bubble", "pipeline bubble"), ("optimizer", "optimizer"), ("host", "between iterations"))


def plan_lines(plan: Plan) -> list[str]:
    """The table that --dry-run prints."""
    counts, time, hardware = plan.counts, plan.time, plan.hardware
    lines = [
        "--------------------------- plan ---------------------------",
        f"{plan.world_size} x {hardware.name} ({hardware.memory_gib:g} GiB, {hardware.peak(plan.width) / 1e12:g} TFLOP/s {plan.width}, NVLink "
        f"{hardware.nvlink_gb_s:g} GB/s among {hardware.domain}, network {hardware.network_gb_s:g} GB/s; {hardware.source})",
        f"parameters: {counts.total:,} (+ {counts.mtp:,} multi-token prediction), {counts.active:,} active per token",
        f"an iteration: {plan.batch_size} sequences in {plan.num_microbatches} microbatches, {plan.flops:.4g} FLOPs",
        "",
        f"memory of a rank by pipeline stage, GiB at the peak (of {hardware.memory_gib:g}, {RESERVE / GIB:g} set aside for context, NCCL, allocator)",
        "  stage   parameters  weights    grads  optimizer  activations  dispatch  working    total   margin  in flight",
    ]
    lines += [_stage_line(plan, stage) for stage in plan.memory]
    peak = plan.peak
    lines.append("  activations of stage " + f"{peak.stage}: " + ", ".join(
        f"{module} {count / GIB:.2f}" for module, count in sorted(peak.activations.items(), key=lambda item: -item[1]) if count))
    lines.append("  counted as this program's own layers keep them; of what TransformerEngine's keep instead, inputs in 8 bits alone (its latent attention keeps less)")
    if peak.host:
        lines.append(f"  in host memory: {peak.host / GIB:.2f} GiB a rank")
    lines += [_fit_line(plan), "", f"step: {time.step:.3f} s"]
    lines += [f"  {text:36s} {getattr(time, name):9.3f} s  {100 * getattr(time, name) / time.step:5.1f} %" for name, text in _PARTS
              if getattr(time, name) > 0]
    lines += [
        f"speed: {plan.tokens_per_second:,.0f} tokens/s/GPU, {plan.tflops:.1f} TFLOP/s/GPU, MFU {100 * plan.mfu:.1f} % of the {plan.width} peak, "
        f"{plan.tokens_per_day / 1e9:.1f} billion tokens a day",
        *_nearest_lines(plan),
        "times: predicted, with constants fitted to published runs of Megatron-LM (scripts/plan.py calibrate); even routing",
        "------------------------------------------------------------",
    ]
    return lines


def _stage_line(plan: Plan, stage: StageMemory) -> str:
    margin = plan.hardware.memory_gib * GIB - RESERVE - stage.total
    sizes = (stage.weights, stage.gradients, stage.optimizer, stage.kept, stage.dispatch, stage.working, stage.total, margin)
    columns = [f"{size / GIB:{width}.2f}" for size, width in zip(sizes, (9, 9, 11, 13, 10, 9, 9, 9))]
    return f"  {stage.stage:5d} {stage.held.total:12,d}".ljust(20) + "".join(columns) + "  " + " ".join(map(str, stage.in_flight))


def _fit_line(plan: Plan) -> str:
    if plan.margin < 0:
        return f"does not fit: stage {plan.peak.stage} needs {-plan.margin / GIB:.2f} GiB more than a device has"
    text = f"fits: the fullest device has {plan.margin / GIB:.2f} GiB left"
    if plan.headroom is not None:
        text += f"; uneven routing fills it when a rank gets {plan.headroom:.2f} times an even share of tokens in every layer"
    return text


def _nearest_lines(plan: Plan) -> list[str]:
    found = nearest(plan)
    row = found.row
    differs = "; ".join(found.differs) or "the same mapping"
    return [f"nearest published run: {row.name}, {row.tflops:.1f} TFLOP/s/GPU ({row.source}); predicted here {100 * (plan.tflops / row.tflops - 1):+.1f} %",
            f"  this run: {differs}"]


def plan_json(plan: Plan) -> dict[str, object]:
    """What --report FILE holds. Memory is of the fullest stage, in units of 2^30 bytes; `memory.stages` has all of them."""
    time, found = plan.time, nearest(plan)
    return {
        "valid": True,
        "world_size": plan.world_size,
        "hardware": plan.hardware.name,
        "fits": plan.margin >= 0,
        "params": {"total": plan.counts.total, "mtp": plan.counts.mtp, "active": plan.counts.active,
                   "active_no_embedding": plan.counts.active_no_embedding},
        "memory": memory_json(plan),
        "microbatches": plan.num_microbatches,
        "flops": plan.flops,
        "step_s": time.step,
        "step": {f"{name}_s": getattr(time, name) for name, _ in _PARTS},
        "tflops_per_gpu": plan.tflops,
        "tokens_per_s_per_gpu": plan.tokens_per_second,
        "tokens_per_day": plan.tokens_per_day,
        "mfu": plan.mfu,
        "mfu_peak": plan.width,
        "nearest_published": {"name": found.row.name, "tflops_per_gpu": found.row.tflops, "source": found.row.source,
                              "difference": plan.tflops / found.row.tflops - 1, "differs": list(found.differs)},
    }


def memory_json(plan: Plan) -> dict[str, object]:
    """The part of it about memory."""
    return {**_memory_json(plan.peak), "gb": 2**30, "device_gb": plan.hardware.memory_gib, "reserve_gb": RESERVE / GIB,
            "margin_gb": plan.margin / GIB, "headroom": plan.headroom, "stages": [_memory_json(stage) for stage in plan.memory]}


def _memory_json(stage: StageMemory) -> dict[str, object]:
    sizes = {"weights": stage.weights, "grads": stage.gradients, "optimizer": stage.optimizer, "activations": stage.kept,
             "dispatch": stage.dispatch, "working": stage.working, "total": stage.total, "host": stage.host}
    return {"stage": stage.stage, "parameters": stage.held.total, **{f"{name}_gb": size / GIB for name, size in sizes.items()},
            "activations_by_module_gb": {module: size / GIB for module, size in stage.activations.items()},
            "in_flight": list(stage.in_flight), "headroom": stage.headroom}

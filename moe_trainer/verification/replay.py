"""Replay of a recorded iteration (debug/step_record.py), with its own flags or with some of them replaced.

A replay is a run like any other: model, schedule and reductions are built from flags, weights are loaded with
--init-from, the batches are distributed to the data ranks of the mapping, and the iteration is recorded again. Two
records of one iteration are then compared (compare_records.py). Nothing here depends on what a layer computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from arguments import ArgumentError, Arguments, parse_args
from arguments.container import OPTIONS, flags_of
from arguments.mechanisms.formats import FLAGS, list_widths, quantized_format
from arguments.mechanisms.selections import named_selections
from arguments.parse import resolve_command_line
from arguments.rules.derived_sizes import derive_sizes
from arguments.spelling import to_command_line
from moe_trainer.checkpoint.random_state import get_streams, reseed, restore, restore_named
from moe_trainer.data.loader import Batch
from moe_trainer.debug.step_record import Record
from moe_trainer.errors import UserError
from moe_trainer.launch_env import LaunchEnv
from moe_trainer.training.initialize import Runtime, make_groups, set_numerics_flags, set_seeds
from moe_trainer.training.record_step import AXES, record_iteration
from moe_trainer.training.run import TrainRun, TrainState, with_batches
from moe_trainer.training.setup import build_train_run
from moe_trainer.verification.kept_flags import NOISE, NOT_IN_REFERENCE

# what a run does besides an iteration, and what the record says instead
_NOT_OF_AN_ITERATION = frozenset(("initial_loss_scale",)) | flags_of(
    "batch", "data", "evaluation", "check", "exit", "load", "output", "launch"
)
_KEPT_TOO = frozenset(("micro_batch_size", "ckpt_format"))


@dataclass(frozen=True)
class ReplayPlan:
    """Flags and number of ranks of a replay. `as_recorded`: both are the recorded ones."""

    argv: tuple[str, ...]
    world_size: int
    as_recorded: bool


@dataclass(frozen=True)
class ReplayChanges:
    """Changes to the recorded flags.

    Attributes:
        flags: words that replace recorded flags.
        without: spellings of recorded flags to leave out.
        one_process: leave out parallel flags, recompute and offload.
        fp32: leave out flags of lower precision.
        world_size: number of ranks; None to derive it.
    """

    flags: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    one_process: bool = False
    fp32: bool = False
    world_size: int | None = None


def plan_replay(record: Record, changes: ReplayChanges) -> ReplayPlan:
    """Return the command line of a replay.

    Raises:
        ArgumentError: if the flags are not valid.
        ValueError: if a flag to leave out was not recorded.
    """
    head = record.head
    settings, _ = resolve_command_line(head["flags"], None)
    left_out = _get_dests(changes.without, settings.given_dests())
    values = {
        dest: settings.values[dest]
        for dest in settings.given_dests()
        if dest not in _NOT_OF_AN_ITERATION or dest in _KEPT_TOO
    }
    if changes.one_process:
        left_out |= {dest for dest in values if OPTIONS[dest].section == "parallel"} | (NOT_IN_REFERENCE - {"bf16"})
    if changes.fp32:
        left_out |= flags_of("precision", "quantization")
    values = {dest: value for dest, value in values.items() if dest not in left_out}
    fixed = {
        "global_batch_size": head["samples"],
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
        "eval_iters": 0,
        "rerun_mode": "disabled",
        "vocab_size": head["vocab_size"] or head["padded_vocab_size"] - 1,
        "padded_vocab_size": head["padded_vocab_size"],
        "init_from": str(record.weights.resolve()),
        **({"initial_loss_scale": head["loss_scale"]} if values.get("fp16") else {}),
    }
    argv = (*to_command_line(values | fixed), *changes.flags)
    as_recorded = not (changes.flags or changes.without or changes.one_process or changes.fp32 or changes.world_size)
    world_size = _world_size(argv, head, changes)
    parse_args(list(argv), world_size)
    return ReplayPlan(argv, world_size, as_recorded)


def _get_dests(spellings: Iterable[str], given: Iterable[str]) -> set[str]:
    known = {spelling: dest for dest in given for spelling in OPTIONS[dest].spellings}
    unknown = [spelling for spelling in spellings if spelling not in known]
    if unknown:
        raise ValueError(f"--without {' '.join(unknown)}: no such flag was recorded")
    return {known[spelling] for spelling in spellings}


def _world_size(argv: tuple[str, ...], head: Mapping[str, Any], changes: ReplayChanges) -> int:
    """Return the recorded number of ranks if the mapping is unchanged, otherwise that of one model replica."""
    if changes.world_size is not None:
        return changes.world_size
    settings, violations = resolve_command_line(list(argv), None)
    if violations:
        raise ArgumentError(violations, settings)
    sizes = derive_sizes(settings, None)
    if all(getattr(sizes, name) == head["mapping"][name] for name in AXES if name != "dp"):
        return head["world_size"]
    return math.lcm(sizes.tp * sizes.cp * sizes.pp, sizes.etp * sizes.ep * sizes.pp)


def expected_differences(record: Record, plan: ReplayPlan) -> Iterator[str]:
    """Describe what differs between the two runs by definition (moe/balancing.py explains why)."""
    args = parse_args(list(plan.argv), plan.world_size)
    model, moe = args.model, args.moe
    sizes = derive_sizes(resolve_command_line(list(plan.argv), plan.world_size)[0], plan.world_size)
    changed = {name for name in AXES if getattr(sizes, name) != record.head["mapping"][name]}
    micro_batch_changed = args.training.micro_batch_size != record.head["micro_batch_size"]
    recorded = resolve_command_line(record.head["flags"], None)[0]
    values = {**vars(model), **vars(moe)}
    random_flags = [name for name in NOISE if values[name] or recorded.values[name]]
    for name in random_flags:
        if values[name] != recorded.values[name]:
            yield f"{OPTIONS[name].spellings[0]} {values[name]}: recorded with {recorded.values[name]}"
    if random_flags and (changed or micro_batch_changed):
        flags = ", ".join(OPTIONS[name].spellings[0] for name in random_flags)
        yield f"{flags}: every rank draws its own random numbers, so they differ under another mapping"
    if moe.moe_expert_capacity_factor is not None and (changed & {"tp", "cp"} or micro_batch_changed):
        yield (
            "--moe-expert-capacity-factor: the capacity counts the tokens of one rank, so other tokens are dropped "
            "under another tp or cp"
        )
    balancing = str(moe.moe_router_load_balancing_type)
    for each in named_selections(moe):
        if each.counts and (micro_batch_changed or each.counts == "rank" and changed & {"tp", "cp"}):
            yield each.counts_because
    if "global_aux_loss" in balancing and (changed & {"dp"} or micro_batch_changed):
        yield "global_aux_loss counts tokens over the data ranks of one microbatch index"
    is_mtp_per_token = model.mtp_loss_per_token and args.training.calculate_per_token_loss
    if "cp" in changed and model.num_mtp_depths and not is_mtp_per_token:
        yield "multi-token prediction: each context rank divides by its own number of valid tokens"
    fmt = quantized_format(args.precision)
    if fmt is not None and changed:
        reason = (
            "the last digit can change a rounding"
            if fmt.keeps_scales
            else "scales and blocks are those of a rank's shard"
        )
        yield f"{list_widths('and')}: {reason}"
    for named in FLAGS:
        if recorded.values[named.param_gather]:
            yield (
                f"--{named.name}-param-gather: the recorded run cast its weights to {named.name} from fp32 main "
                "parameters, the replay casts them from the recorded bf16 weights"
            )
    if micro_batch_changed:
        yield (
            "--micro-batch-size: losses are means over a microbatch, which differ if labels are masked, and in the "
            "auxiliary losses"
        )
    if args.precision.params_dtype_name != record.head["dtype"]:
        yield (
            f"recorded with {record.head['dtype']}, replayed with {args.precision.params_dtype_name}: for nearly equal "
            "experts rounding chooses another one, and the outputs of that token differ"
        )


def replay_on_cpu(rank: int, world_size: int, record: Record, plan: ReplayPlan, folder: str, threads: int) -> None:
    """Replay as one rank on this machine's CPU, in an initialized process group, and record in `folder`."""
    torch.set_num_threads(threads)
    args = parse_args(list(plan.argv), world_size)
    launch_env = LaunchEnv(rank, world_size, rank, None, None, "replay")
    ps = make_groups(args, launch_env, timedelta(minutes=args.parallel.distributed_timeout_minutes))
    set_seeds(args, ps)
    set_numerics_flags(args)
    replay(record, args, Runtime(launch_env, torch.device("cpu"), ps), Path(folder))


def replay(record: Record, args: Arguments, runtime: Runtime, folder: Path) -> None:
    """Run the recorded iteration under `args` and record it in `folder`. Collective over the world.

    Raises:
        UserError: if the weights do not fit the flags, or the record cannot be written.
    """
    head = record.head
    vocab_size = min(head["vocab_size"] or 1, head["padded_vocab_size"])
    run = build_train_run(args, runtime, SimpleNamespace(vocab_size=vocab_size, eod=None, pad=None))
    batches = get_local_batches(record, run)
    state = TrainState(**head["state"])
    _restore(record, run, state)
    for chunk in run.chunks:
        chunk.train()
    try:
        run = with_batches(run, iter(batches))
        _, problem, _ = record_iteration(run, state, len(batches), folder, head["sample_numbers"], weights=False)
    except FloatingPointError:
        return  # a loss or gradient is not finite; the record is complete
    if problem is not None:
        raise UserError(problem)


def get_local_batches(record: Record, run: TrainRun) -> list[Batch]:
    """Return this rank's microbatches of the recorded global batch, distributed as the loader does."""
    micro, dp, samples = run.args.training.micro_batch_size, run.ps.dp, record.head["samples"]
    if samples % (micro * dp.size):
        raise UserError(
            f"{record.folder}: {samples} samples cannot be split over {dp.size} data ranks in microbatches of {micro}"
        )
    global_batch = record.batch()
    starts = range(dp.rank * micro, samples, dp.size * micro)

    def microbatch(start: int) -> Batch:
        fields: dict[str, Any] = {}
        for name, tensor in global_batch.items():
            fields[name] = tensor[start : start + micro].contiguous()
        return Batch(**fields)

    return list(map(microbatch, starts))


def _restore(record: Record, run: TrainRun, state: TrainState) -> None:
    """Restore random states and scales; a rank restores its own states if the mapping is unchanged."""
    ps, streams, head = run.ps, get_streams(run.chunks), record.head
    is_same_mapping = all(getattr(ps, name).size == head["mapping"][name] for name in AXES)
    if is_same_mapping and head["world_size"] == ps.world.size:
        restore(record.generators(ps.world.rank), streams, record.folder)
    else:
        reseed(run.args.training.seed, state.iteration, ps, streams)
        restore_named((record.generators(rank) for rank in record.ranks()), streams)
    scales = record.scaling()
    with torch.no_grad():
        for chunk in run.chunks:
            for name, tensor in chunk.named_scaling_state():
                if name in scales:
                    tensor.copy_(scales[name])

"""Running a recorded iteration again (guard/record.py), under its own flags or with some of them replaced.

The replay is a run like any other: model, schedule, reductions are built from flags, weights come through --init-from, the batches are
dealt out to whatever data ranks there are, and the iteration is recorded in its turn. Two records of one iteration are then compared
(parting.py), whoever wrote them. So nothing here knows what a layer computes, and a replay on a cluster is compared as one on a
laptop is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from arguments import ArgumentError, Arguments, parse_args
from arguments.container import OPTIONS
from arguments.parse import understand
from arguments.rules.facts import gather
from arguments.spelling import flags_of
from moe_trainer.checkpoint.random_state import restart, restore, restore_named, streams_of
from moe_trainer.data.loader import Batch
from moe_trainer.errors import InputError
from moe_trainer.guard.record import Record
from moe_trainer.initialize import Runtime, make_groups, set_arithmetic, set_seeds
from moe_trainer.place import Place
from moe_trainer.proof import low_precision
from moe_trainer.proof.carried import NOT_IN_REFERENCE
from moe_trainer.run import Run, TrainState, build_run
from moe_trainer.training.record import AXES, record_iteration

_KEPT_DATA = frozenset(
    "seq_length reset_position_ids reset_attention_mask eod_mask_loss dataloader_inter_document_masking create_attention_mask_in_dataloader".split()
)
# of the run, not of one iteration; or about the machine it ran on
_DROPPED = frozenset(
    "global_batch_size rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed exit_interval exit_duration_in_mins "
    "exit_signal_handler exit_signal iterations_to_skip skip_train eval_interval eval_iters eval_global_batch_size eval_micro_batch_size "
    "full_validation multiple_validation_sets validation_set_names start_eval_at_iter world_size local_rank fake_process_group print_groups "
    "initial_loss_scale error_injection_rate error_injection_type check_for_spiky_loss check_for_large_grads on_nan on_loss_spike "
    "loss_spike_factor".split()
)
_NOISE = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps", "moe_router_force_load_balancing")
# destinations of other arithmetic than fp32
_NARROW = frozenset({"bf16", "fp16", "fp4", "fp4_recipe", *low_precision.NONE, *low_precision.ROWS})


@dataclass(frozen=True)
class Plan:
    """What a replay runs: its flags, its number of ranks, and whether these are the recorded ones."""

    argv: tuple[str, ...]
    world_size: int
    as_recorded: bool


@dataclass(frozen=True)
class Changes:
    """What a user wants otherwise than recorded. flags: words, which replace recorded ones. without: spellings of recorded flags to leave
    out. one_process: no parallel flag, no recompute, no offload. fp32: no narrower arithmetic. world_size: None to find it."""

    flags: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    one_process: bool = False
    fp32: bool = False
    world_size: int | None = None


def plan_replay(record: Record, changes: Changes) -> Plan:
    """The command line of a replay.

    Raises: ArgumentError when these flags cannot run, ValueError when one is named that was not recorded.
    """
    head = record.head
    settings, _ = understand(head["flags"], None)
    left_out = _dests(changes.without, settings.given_dests())
    values = {dest: settings.values[dest] for dest in settings.given_dests() if _is_kept(dest) and dest not in left_out}
    if changes.one_process:
        values = {dest: value for dest, value in values.items() if OPTIONS[dest].section != "parallel" and dest not in NOT_IN_REFERENCE - {"bf16"}}
    if changes.fp32:
        values = {dest: value for dest, value in values.items() if dest not in _NARROW}
    fixed = {
        "global_batch_size": head["samples"], "mock_data": True, "tokenizer_type": "NullTokenizer", "eval_iters": 0,
        "rerun_mode": "disabled",
        "vocab_size": head["vocab_size"] or head["padded_vocab_size"] - 1, "padded_vocab_size": head["padded_vocab_size"],
        "init_from": str(record.weights.resolve()), **({"initial_loss_scale": head["loss_scale"]} if values.get("fp16") else {}),
    }  # fmt: skip
    argv = (*flags_of(values | fixed), *changes.flags)
    untouched = not (changes.flags or changes.without or changes.one_process or changes.fp32 or changes.world_size)
    world_size = _world_size(argv, head, changes)
    parse_args(list(argv), world_size)
    return Plan(argv, world_size, untouched)


def _is_kept(dest: str) -> bool:
    section = OPTIONS[dest].section
    return dest == "ckpt_format" or (dest not in _DROPPED and section != "output" and (section != "data" or dest in _KEPT_DATA))


def _dests(spellings: Iterable[str], given: Iterable[str]) -> set[str]:
    """Destinations of flags by their spelling. Raises: ValueError for those that were not recorded."""
    known = {spelling: dest for dest in given for spelling in OPTIONS[dest].spellings}
    unknown = [spelling for spelling in spellings if spelling not in known]
    if unknown:
        raise ValueError(f"--without {' '.join(unknown)}: no such flag was recorded")
    return {known[spelling] for spelling in spellings}


def _world_size(argv: tuple[str, ...], head: Mapping[str, Any], changes: Changes) -> int:
    """As many ranks as were recorded where they fit the mapping, else those of one replica of model and experts."""
    if changes.world_size is not None:
        return changes.world_size
    settings, violations = understand(list(argv), None)
    if violations:
        raise ArgumentError(violations, settings)
    facts = gather(settings, None)
    if all(getattr(facts, name) == head["mapping"][name] for name in AXES if name != "dp"):
        return head["world_size"]
    return math.lcm(facts.tp * facts.cp * facts.pp, facts.etp * facts.ep * facts.pp)


def what_cannot_be_equal(record: Record, plan: Plan) -> Iterator[str]:
    """What of these two runs differs by definition (moe/balancing.py lists why), as sentences."""
    args = parse_args(list(plan.argv), plan.world_size)
    then, model, moe = record.head["mapping"], args.model, args.moe
    facts = gather(understand(list(plan.argv), plan.world_size)[0], plan.world_size)
    changed = {name for name in AXES if getattr(facts, name) != then[name]}
    micro = args.training.micro_batch_size != record.head["micro_batch_size"]
    recorded = understand(record.head["flags"], None)[0]
    values = {**vars(model), **vars(moe)}
    noise = [name for name in _NOISE if values[name] or recorded.values[name]]
    for name in [name for name in noise if values[name] != recorded.values[name]]:
        yield f"{OPTIONS[name].spellings[0]} {values[name]}: {recorded.values[name]} was recorded"
    if noise and (changed or micro):
        yield f"{', '.join(OPTIONS[name].spellings[0] for name in noise)}: every rank draws its own random numbers, so under another mapping other elements are hit"
    if moe.moe_expert_capacity_factor is not None and (changed & {"tp", "cp"} or micro):
        yield "--moe-expert-capacity-factor: a capacity counts the tokens of one rank, so under another tp or cp others are dropped"
    if "sinkhorn" in str(moe.moe_router_load_balancing_type) and (changed & {"tp", "cp"} or micro):
        yield "sinkhorn balances the tokens of one rank"
    if "quantile_balancing" in str(moe.moe_router_load_balancing_type) and micro:
        yield "quantile balancing estimates its bias from one microbatch"
    if "global_aux_loss" in str(moe.moe_router_load_balancing_type) and (changed & {"dp"} or micro):
        yield "global_aux_loss counts over the data ranks of one microbatch number"
    if "cp" in changed and model.mtp_num_layers:
        yield "multi-token prediction: each context rank divides by its own number of valid tokens"
    if (args.precision.fp8 or args.precision.fp4) and changed:
        why = "a last digit can turn a rounding" if args.precision.fp8_recipe == "delayed" else "scales and blocks are those of what a rank holds"
        yield f"8 and 4 bits: {why}"
    if recorded.values["fp8_param_gather"]:
        yield "--fp8-param-gather: the recorded run cast its weights to 8 bits from fp32 main parameters, this one from what the record has, bf16"
    if micro:
        yield "--micro-batch-size: losses are means over a microbatch, which differ where labels are masked and in the auxiliary losses"
    if args.precision.params_dtype_name != record.head["dtype"]:
        yield (f"{record.head['dtype']} was recorded, here it is {args.precision.params_dtype_name}: where two experts are all but equal, "
               "rounding chooses another one, and that token's outputs part")


def replay_on_cpu(rank: int, world_size: int, record: Record, plan: Plan, folder: str, threads: int) -> None:
    """A rank of a replay on this machine's CPU, in a group that has been joined; writes its part of a record to `folder`."""
    torch.set_num_threads(threads)
    args = parse_args(list(plan.argv), world_size)
    place = Place(rank, world_size, rank, None, None, "replay")
    ps = make_groups(args, place, timedelta(minutes=args.parallel.distributed_timeout_minutes))
    set_seeds(args, ps)
    set_arithmetic(args)
    replay(record, args, Runtime(place, torch.device("cpu"), ps), Path(folder))


def replay(record: Record, args: Arguments, runtime: Runtime, folder: Path) -> None:
    """Run the recorded iteration under `args` and record it in `folder`. Collective over the world.

    Raises: InputError when the weights do not fit these flags, or nothing can be written.
    """
    head = record.head
    run = build_run(args, runtime, SimpleNamespace(vocab_size=min(head["vocab_size"] or 1, head["padded_vocab_size"]), eod=None, pad=None))
    batches = own_batches(record, run)
    state = TrainState(**head["state"])
    _restore(record, run, state)
    for chunk in run.chunks:
        chunk.train()
    try:
        _, problem, _ = record_iteration(replace(run, train_batches=iter(batches)), state, len(batches), folder, head["sample_numbers"], weights=False)
    except FloatingPointError:
        return  # a loss or gradient that is not finite; the record is there
    if problem is not None:
        raise InputError(problem)


def own_batches(record: Record, run: Run) -> list[Batch]:
    """This rank's microbatches of the recorded global batch, as the loader deals samples out."""
    micro, dp, samples = run.args.training.micro_batch_size, run.ps.dp, record.head["samples"]
    if samples % (micro * dp.size):
        raise InputError(f"{record.folder}: {samples} samples cannot be dealt out to {dp.size} data ranks in microbatches of {micro}")
    whole = record.batch()
    starts = range(dp.rank * micro, samples, dp.size * micro)
    return [Batch(**{name: tensor[start:start + micro].contiguous() for name, tensor in whole.items()}) for start in starts]


def _restore(record: Record, run: Run, state: TrainState) -> None:
    """Generators and scales as they were: a rank's own where the mapping is the recorded one."""
    ps, streams = run.ps, streams_of(run.chunks)
    if record.head["world_size"] == ps.world.size and all(getattr(ps, name).size == record.head["mapping"][name] for name in AXES):
        restore(record.generators(ps.world.rank), streams, record.folder)
    else:
        restart(run.args.training.seed, state.iteration, ps, streams)
        restore_named((record.generators(rank) for rank in record.ranks()), streams)
    scales = record.scaling()
    with torch.no_grad():
        for chunk in run.chunks:
            for name, tensor in chunk.named_scaling_state():
                if name in scales:
                    tensor.copy_(scales[name])



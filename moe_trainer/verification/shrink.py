"""Small legal command lines from a user's command line of any size, with every feature and the shape of the mapping.

Flags are parsed, resolved and checked as in a training; features are kept and sizes are reduced. mapping.py chooses
the ranks (several mappings if one cannot hold all dimensions at once), sizes.py the model. What does not matter for
equality or would hide a difference is dropped or set, and reported: paths and data (random tokens instead), logging,
checkpoints and the machine, half precision (fp32, so that a difference is a mistake and not rounding), random noise,
the learning-rate schedule (constant, so that the first steps change the weights). Features that are not implemented
are left out and listed. The small command lines pass the trainer's own rules. No torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from arguments.container import OPTIONS
from arguments.flag_status import NOT_IMPLEMENTED
from arguments.layer_pattern import variants_of
from arguments.mechanisms.implementation_kinds.declaration import ImplementationCapability
from arguments.mechanisms.implementations import LOCAL_LAYERS, selecting
from arguments.mechanisms.optimizers import get_optimizer
from arguments.mechanisms.schedule_kinds.declaration import PIPELINE_SCHEDULE
from arguments.mechanisms.schedules import asked_schedule
from arguments.mechanisms.sublayers import variant_of
from arguments.parse import resolve_command_line
from arguments.rules.derived_sizes import as_list, derive_sizes
from arguments.rules.layout_grammar import read_layout
from arguments.rules.packing import is_packed, sequences_flag
from arguments.settings import Settings, Violation
from arguments.spelling import to_command_line
from arguments.tokens import parse_tokens
from moe_trainer.verification import low_precision, sizes
from moe_trainer.verification.definitions import defined_by_mapping, plain_values, reference_micro_batch_size
from moe_trainer.verification.kept_flags import NOISE, NOT_IN_REFERENCE, get_kept_flags
from moe_trainer.verification.mapping import NAMES, MappingRequirements, ParallelMapping, shrink_mapping

STEPS = 3
LEARNING_RATE = 1e-3
LARGE_EPSILON = 1e-2
SMALL_TRAINING = MappingProxyType(
    {
        "init_method_std": 0.2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "lr": LEARNING_RATE,
        "lr_decay_style": "constant",
        "adam_eps": 1e-5,
        "train_iters": STEPS,
        "eval_iters": 0,
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 120,
        "make_vocab_size_divisible_by": 16,
    }
)
"""Random data, no noise, and weights and a learning rate that show a mistake within three steps."""

_SIZES = tuple(
    """
    tensor_model_parallel_size context_parallel_size pipeline_model_parallel_size expert_model_parallel_size
    """.split()
)


@dataclass(frozen=True)
class ParityCase:
    """Small command line.

    Attributes:
        argv: flags, without the program.
        reference: flags of the same model and batches on one process.
        force_fp32: run in fp32 in spite of --bf16.
        defined_by_mapping: quantities that the reference computes by their definition for the mapping.
    """

    mapping: ParallelMapping
    argv: tuple[str, ...]
    reference: tuple[str, ...]
    force_fp32: bool = False
    defined_by_mapping: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.mapping.world

    @property
    def pool_size(self) -> int:
        """Number of processes that the case and its references need."""
        return max(self.mapping.world, 3)


@dataclass(frozen=True)
class ShrinkResult:
    """Result of shrinking a command line.

    Attributes:
        notes: what was changed, as sentences.
        left_out: features that are not implemented.
        not_compared: flags whose effect on the numbers no case compares.
    """

    original: ParallelMapping
    cases: tuple[ParityCase, ...]
    notes: tuple[str, ...]
    left_out: tuple[str, ...]
    not_compared: tuple[str, ...] = ()


class ShrinkError(ValueError):
    """Error for a command line that cannot be shrunk, with its reasons."""

    def __init__(self, reasons: Iterable[str]):
        self.reasons = tuple(reasons)
        super().__init__("\n".join(self.reasons))


def shrink(argv: list[str], world_size: int | None = None, ranks: int = 8) -> ShrinkResult:
    """Make small command lines of a large one.

    Args:
        argv: flags of the user.
        world_size: ranks of the user's job; by default --world-size, WORLD_SIZE or one model replica, in this order.
        ranks: largest number of ranks of a small command line.

    Raises:
        ShrinkError: if the command line is not valid, or no mapping of its shape fits on `ranks` ranks.
    """
    settings, violations, world_size, problems = _resolve(argv, world_size, ignored=("later", "build"))
    problems += [violation.message for violation in violations if violation.kind != "later"]
    if problems or world_size is None:
        raise ShrinkError(problems)
    left_out = _leave_out(settings, violations)
    original = _mapping(settings, world_size)
    notes: list[str] = []
    mappings = _choose(settings, original, ranks, notes)
    cases = [_case(settings, original, mapping, notes) for mapping in mappings]
    plain = next((case.mapping for case in cases if case.defined_by_mapping), None)
    if plain is not None:
        cases += _plain_case(settings, original, plain, notes)
    if any(low_precision.is_method_note(note) for note in notes):
        cases.append(_case(settings, original, mappings[0], [], quantized=False))
        reason = "its weights change, so it checks the optimizer's steps and formats"
        notes.append(f"the last case is the first mapping without fp8: {reason}")
    not_compared = _note_changes(settings, notes)
    not_compared += [name for name, _, text in (note.partition(": ") for note in notes) if text.startswith("left out")]
    unique_notes, not_compared = dict.fromkeys(notes), list(dict.fromkeys(not_compared))
    return ShrinkResult(original, tuple(cases), tuple(unique_notes), tuple(left_out), tuple(not_compared))


def as_is(argv: list[str], world_size: int | None = None) -> ParityCase:
    """Make a case of a small command line, unchanged except for half precision.

    Raises:
        ShrinkError: if it is not valid, has no vocabulary size, or asks for GEMMs that one process cannot compute.
    """
    settings, violations, world_size, problems = _resolve(argv, world_size)
    problems += [violation.message for violation in violations]
    if settings.vocab_size is None:
        problems.append("--vocab-size is missing: the batches are random tokens of --tokenizer-type NullTokenizer")
    if problems or world_size is None:
        raise ShrinkError(problems)
    # full sharding requires its checkpoint format
    dests = [dest for dest in settings.given_dests() if OPTIONS[dest].section != "output" or dest == "ckpt_format"]
    values = {dest: settings.values[dest] for dest in dests}
    values |= {dest: settings.values[dest] for dest in ("global_batch_size", "expert_tensor_parallel_size")}
    force_fp32 = bool(settings.overlap_moe_expert_parallel_comm)  # the flag requires --bf16
    fixed = {"train_iters": STEPS, "world_size": None, "mock_data": True}
    fixed |= {"bf16": force_fp32, "fp16": False, "logit_dtype": None}
    new = _mapping(settings, world_size)
    fp8, notes = low_precision.comparable_fp8_options(values, new, settings.num_layers)
    if changed := [note for note in notes if not low_precision.is_method_note(note)]:
        raise ShrinkError(f"cannot be checked as it is: {note}" for note in changed)
    return make_case(new, values | fixed | fp8, force_fp32)


def _resolve(
    argv: list[str], world_size: int | None, ignored: Collection[str] = ()
) -> tuple[Settings, list[Violation], int | None, list[str]]:
    """Resolve a command line.

    Args:
        argv: the flags.
        world_size: number of ranks; by default --world-size, WORLD_SIZE or one replica of model and experts.
        ignored: kinds of violations in spite of which the size of a replica is known.

    Returns:
        The settings, their violations, the number of ranks, and what is wrong with it.
    """
    world_size, problems = (world_size, []) if world_size else _read_world_size(argv)
    settings, violations = resolve_command_line(argv, world_size)
    if world_size is None and all(violation.kind in ignored for violation in violations):
        facts = derive_sizes(settings, None)
        world_size = math.lcm(facts.tp * facts.cp * facts.pp, facts.etp * facts.ep * facts.pp)
        settings, violations = resolve_command_line(argv, world_size)
    return settings, violations, world_size, problems


def _read_world_size(argv: list[str]) -> tuple[int | None, list[str]]:
    """Return --world-size or the environment's WORLD_SIZE, and what is wrong with it."""
    typed, text = parse_tokens(argv).last("world_size"), os.environ.get("WORLD_SIZE")
    if typed is not None:
        return (typed, []) if typed > 0 else (None, [f"--world-size {typed} must be above 0."])
    if text is None or (text.isdigit() and int(text) > 0):
        return (None if text is None else int(text)), []
    return None, [f"the environment's WORLD_SIZE is {text!r}; a number above 0 is needed."]


def _mapping(s: Settings, world_size: int) -> ParallelMapping:
    facts = derive_sizes(s, world_size)
    etp = facts.etp if s.num_experts else facts.tp
    return ParallelMapping(facts.tp, facts.cp, facts.pp, facts.vpp or 1, facts.dp or 1, facts.ep, etp)


def _leave_out(s: Settings, violations: list[Violation]) -> list[str]:
    """Reset features that are not implemented, and return the messages of their violations."""
    for dest, feature in NOT_IMPLEMENTED.items():
        if feature.is_requested(s.values[dest], s.default(dest)):
            s.forget(dest)
            if dest == "expert_tensor_parallel_size":
                s.set_derived(dest, s.tensor_model_parallel_size, "as --tensor-model-parallel-size")
    return [violation.message for violation in violations if violation.kind == "later"]


def _choose(s: Settings, original: ParallelMapping, ranks: int, notes: list[str]) -> list[ParallelMapping]:
    layout = s.pipeline_model_parallel_layout
    both_ends = getattr(s, sizes.FIRST) is not None and getattr(s, sizes.LAST) is not None
    requirements = MappingRequirements(
        moe=bool(s.num_experts),
        middle_stages=both_ends or (layout is not None and read_layout(layout).mtp_standalone(original.pp)),
        nested_context="a2a+p2p" in as_list(s.cp_comm_type),
        same_data_ranks=bool(s.use_tp_pp_dp_mapping),
        instances=s.num_distributed_optimizer_instances or 1,
        single_expert=s.num_experts == original.ep,
    )
    try:
        mappings = shrink_mapping(original, ranks, requirements)
    except ValueError as error:
        raise ShrinkError([str(error)]) from None
    notes.append(f"mapping: {original} -> {'; '.join(map(str, mappings))}")
    for name in NAMES:
        without = [mapping for mapping in mappings if getattr(original, name) > 1 and getattr(mapping, name) == 1]
        if len(without) == len(mappings):
            notes.append(f"{name} {getattr(original, name)} is 1 in every small mapping: {ranks} ranks are too few")
        elif without:
            count = f"{len(without)} of {len(mappings)} mappings"
            notes.append(f"{name} is 1 in {count}: {ranks} ranks cannot hold all dimensions at once")
    if s.num_experts and all((mapping.ep > mapping.dp) != (original.ep > original.dp) for mapping in mappings):
        notes.append("the order of ep and dp could not be kept")
    return mappings


def _plain_case(s: Settings, old: ParallelMapping, new: ParallelMapping, notes: list[str]) -> list[ParityCase]:
    """Return a case without quantities that are defined by the mapping; [] if there is no legal command line."""
    try:
        case = _case(s, old, new, [], plain=True)
    except ShrinkError as error:
        notes.append(f"no case is without quantities defined by the mapping: {error.reasons[0]}")
        return []
    if case.defined_by_mapping:
        notes.append(f"no case is without {', '.join(case.defined_by_mapping)}: the pipeline layout has these layers")
    notes.append(
        "a further case leaves out what Megatron-LM defines by the mapping: there the reference runs the plain program"
    )
    return [case]


def _case(
    s: Settings,
    old: ParallelMapping,
    new: ParallelMapping,
    notes: list[str],
    quantized: bool = True,
    plain: bool = False,
) -> ParityCase:
    """Return a small command line; `plain` leaves out quantities that are defined by the mapping."""
    values = get_kept_flags(s)
    if not quantized:
        values |= {**low_precision.WITHOUT_FP8, **dict.fromkeys(low_precision.TRANSPORT_FLAGS)}
    values |= sizes.stages(s, old, new) | sizes.attention(s, new) | sizes.experts(s, new) | sizes.batch(s, old, new)
    layers = values["num_layers"]
    values |= sizes.context(s, new, layers) | _ranks(s, new, notes) | _patterns(s, values, layers)
    values |= sizes.packing(s, new, values)
    if s.dynamic_context_parallel and "dynamic_context_parallel" not in values:
        flag = s.flag("dynamic_context_parallel")
        notes.append(f"{flag}: left out; its groups need an even number of data- and context-parallel ranks")
    values |= _small_training(s)
    values |= _memory(s, layers) | low_precision.comparable_moment_dtypes(s, notes) | _updates(s, new, notes)
    if values.get("overlap_grad_reduce"):
        values["ddp_bucket_size"] = 3000
    force_fp32 = bool(values.get("overlap_moe_expert_parallel_comm"))
    values["bf16"] = force_fp32
    if values.get("logit_dtype") == "bf16" or values.get("fp8"):
        values["logit_dtype"] = None  # noted by _note_changes
    if plain:
        values |= plain_values(values, new)
    fp8, fp8_notes = low_precision.comparable_fp8_options(values, new, layers)
    notes += fp8_notes
    return make_case(new, values | fp8, force_fp32)


def _memory(s: Settings, layers: int) -> dict[str, Any]:
    """Return options of recompute and offload for small layers, which are below the default offload size."""
    options: dict[str, Any] = {}
    if s.recompute_granularity == "full" and s.recompute_num_layers:
        options["recompute_num_layers"] = min(s.recompute_num_layers, 2) if s.recompute_method == "uniform" else 1
    if s.fine_grained_activation_offloading:
        options |= {**selecting(ImplementationCapability.ACTIVATION_OFFLOAD), "min_offloaded_tensor_size": 1}
    if s.cpu_offloading_num_layers:
        options["cpu_offloading_num_layers"] = min(s.cpu_offloading_num_layers, layers - 1) or None
    return options


def _updates(s: Settings, new: ParallelMapping, notes: list[str]) -> dict[str, Any]:
    """Return options with which the optimizer's updates agree between mappings."""
    comparable = get_optimizer(s).comparable
    options, reasons = ({}, []) if comparable is None else comparable(s, max(new.tp, new.etp) > 1)
    notes += reasons
    return options


def make_case(mapping: ParallelMapping, values: Mapping[str, Any], force_fp32: bool = False) -> ParityCase:
    """Make a case of values by destination.

    Raises:
        ShrinkError: if the rules reject it.
    """
    plain = {
        dest: value
        for dest, value in values.items()
        if OPTIONS[dest].section != "parallel" and dest not in NOT_IN_REFERENCE
    }
    plain |= {"micro_batch_size": reference_micro_batch_size(values, mapping), **LOCAL_LAYERS.selected_by}
    argv = to_command_line(values)
    reference = to_command_line({**plain, **low_precision.reference_options(plain)})
    for words, ranks in ((argv, mapping.world), (reference, 1)):
        violations = resolve_command_line(words, ranks)[1]
        if violations:
            prefix = f"the small command line for {mapping} is not legal"
            raise ShrinkError(f"{prefix}: {violation.message}" for violation in violations)
    return ParityCase(mapping, tuple(argv), tuple(reference), force_fp32, defined_by_mapping(values, mapping))


def _ranks(s: Settings, new: ParallelMapping, notes: list[str]) -> dict[str, Any]:
    """Return the flags of the mapping, and those that need one of its dimensions."""
    values: dict[str, Any] = dict(zip(_SIZES, (new.tp, new.cp, new.pp, new.ep)))
    if s.num_experts:
        values["expert_tensor_parallel_size"] = new.etp
    values["sequence_parallel"] = bool(s.sequence_parallel) and new.tp > 1
    values["use_tp_pp_dp_mapping"] = bool(s.use_tp_pp_dp_mapping)
    instances = s.num_distributed_optimizer_instances or 1
    if instances > 1 and (new.dp * new.cp) % 2 == 0 and (not s.num_experts or new.edp % 2 == 0):
        values["num_distributed_optimizer_instances"] = 2
    elif instances > 1:
        notes.append(f"{s.flag('num_distributed_optimizer_instances')} is 1 for one data rank ({new})")
    if new.vpp > 1 and not s.overlap_p2p_comm and new.pp > 2:
        values["overlap_p2p_comm"] = False
    if new.vpp > 1 and s.given("align_param_gather"):
        values["align_param_gather"] = s.align_param_gather
    schedule = asked_schedule(s)
    if schedule is not None and new.pp > 1 and schedule.runs(new.vpp):
        values[PIPELINE_SCHEDULE] = schedule.key
    overlap = "overlap_moe_expert_parallel_comm"
    if s.values[overlap]:
        possible = new.ep > 1 and (new.pp == 1 or new.vpp > 1)
        values[overlap] = possible
        if possible and s.delay_wgrad_compute:
            values |= {"delay_wgrad_compute": True, **selecting(ImplementationCapability.DELAYED_WGRAD)}
        if not possible:
            notes.append(f"{s.flag(overlap)} is off if there is nothing to overlap ({new})")
    return {**LOCAL_LAYERS.selected_by, **values}


def _patterns(s: Settings, values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return per-layer patterns for fewer layers."""
    patterns: dict[str, Any] = {}
    if s.hybrid_layer_pattern:
        patterns["hybrid_layer_pattern"] = sizes.letters(s.hybrid_layer_pattern, layers)
    elif s.num_experts and s.moe_layer_freq != 1:
        patterns["moe_layer_freq"] = sizes.pattern(s.moe_layer_freq, s.num_layers, layers)
    if s.num_experts and s.moe_n_hash_layers:
        patterns["moe_n_hash_layers"] = min(s.moe_n_hash_layers, layers)
    if variant_of(s).compresses_keys:
        patterns["csa_compress_ratios"] = sizes.compress_ratios(s.csa_compress_ratios[: s.num_layers], layers)
    for dest in ("no_rope_freq", "rotary_base_per_layer", "window_attn_skip_freq", "linear_attention_freq"):
        if s.values[dest] is not None and not (dest == "linear_attention_freq" and s.hybrid_layer_pattern):
            patterns[dest] = sizes.pattern(s.values[dest], s.num_layers, layers)
    return patterns


def _small_training(s: Settings) -> dict[str, Any]:
    values: dict[str, Any] = dict(SMALL_TRAINING)
    if s.decoupled_lr is not None:
        values["decoupled_lr"] = 2 * LEARNING_RATE
    if any(each.has_delta_rule for each in variants_of(s)):
        values["layernorm_epsilon"] = LARGE_EPSILON
    if s.dsa_indexer_loss_coeff:
        values["dsa_indexer_loss_coeff"] = 1.0
    return values


def _note_changes(s: Settings, notes: list[str]) -> list[str]:
    """Note what the small runs change, and return the flags that no small run has."""
    if is_packed(s):
        flag = s.flag(sequences_flag(s) or "use_varlen_dataset")
        notes.append(f"{flag}: lengths and trained tokens are random; one process runs the packs of the ranks")
    if s.varlen_sbhd_validation:
        notes.append(f"{s.flag('varlen_sbhd_validation')}: left out; samples have no padding")
    given = [dest for dest in s.given_dests() if OPTIONS[dest].role == "precision"]
    half = [s.flag(dest) for dest in given if s.values[dest] not in (None, False, "auto", s.default(dest))]
    if half:
        reason = "the check computes in fp32 (fp64 with fp8), so that a difference is a mistake and not rounding"
        notes.append(f"{', '.join(half)}: {reason}")
    if any(each.has_delta_rule for each in variants_of(s)):
        notes.append(
            f"{s.flag('layernorm_epsilon')} is {LARGE_EPSILON}: a query nearly orthogonal to a key gives an output "
            "near zero, and the next norm would amplify the rounding of its gradient"
        )
    if s.dsa_indexer_loss_coeff:
        reason = "so that indexers change within three steps as much as the model"
        notes.append(f"{s.shown('dsa_indexer_loss_coeff')}: 1, {reason}")
    if s.given("embedding_init_method_std"):
        notes.append(f"{s.flag('embedding_init_method_std')}: embeddings are initialized like all other weights")
    noise = [s.shown(dest) for dest in NOISE if s.values[dest]]
    if noise:
        notes.append(f"{', '.join(noise)}: off; every rank draws its own random numbers")
    if s.values["cuda_graph_impl"] != "none":
        reason = "graphs repeat the operations of eager passes (tests/memory/test_cuda_graph.py)"
        notes.append(f"{s.shown('cuda_graph_impl')}: left out; {reason}")
    if s.moe_use_upcycling:
        flags = [s.flag("moe_use_upcycling")]
        flags += [s.shown(dest) for dest in ("moe_upcycling_granularity", "moe_upcycling_expert_init") if s.given(dest)]
        notes.append(f"{', '.join(flags)}: left out; the weights are random, not those of a dense model")
    flags = [s.flag(dest) for dest in ("moe_enable_routing_replay", "moe_routing_replay_path") if s.given(dest)]
    if flags:
        notes.append(f"{', '.join(flags)}: left out; the experts are those of other tokens")
    sizes_over_time = [s.shown(dest) for dest in ("step_batch_size_schedule", "rampup_batch_size") if s.values[dest]]
    if sizes_over_time:
        notes.append("the batch size is constant")
    notes.append(
        "data are random tokens, initial weights have a standard deviation of 0.2, the learning rate is "
        f"{LEARNING_RATE} (except with fp8) and Adam's epsilon is 1e-5: three steps change the weights, rounding does "
        "not"
    )
    dropped = [s.flag(dest) for dest in s.given_dests() if OPTIONS[dest].role in ("load", "output")]
    if dropped:
        notes.append(f"flags of logging, checkpoints and profiling are left out: {len(dropped)}")
    return [*half, *noise, *sizes_over_time]

"""From a user's command line, for a thousand ranks or eight, to small legal ones that keep every feature and the shape of the mapping.

How: the flags are read, resolved and judged as the trainer does it; what a flag means is kept, how large it is is not. mapping.py
chooses the ranks (several mappings where one cannot hold all dimensions at once), sizes.py the model. What cannot matter for equality,
or would hide it, is dropped or set, and said: paths and data (random tokens instead), logging, checkpoints and the machine; half
precision (fp32, so that a difference is a mistake and not rounding), dropout and other noise, the learning-rate schedule (a constant
rate, so that the first steps move the weights). A feature that this version refuses as coming later is left out, and listed.

The result is judged by the trainer's own rules again: what is printed can be started. No torch here, and no process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass

from arguments.container import OPTIONS
from arguments.parse import understand
from arguments.rules.facts import as_list, gather
from arguments.rules.layout_grammar import read_layout
from arguments.settings import Settings, Violation
from arguments.spelling import flags_of
from arguments.standing import LATER, PART_OF
from moe_trainer.proof import low_precision, sizes
from moe_trainer.proof.carried import NOISE, NOT_IN_REFERENCE, carried
from moe_trainer.proof.definitions import defined_by_mapping, plain_values
from moe_trainer.proof.mapping import NAMES, Mapping, Wanted, shrink_mapping

STEPS = 3
LEARNING_RATE = 1e-3
LARGE_EPSILON = 1e-2
VOCAB = 120

_SIZES = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")

@dataclass(frozen=True)
class Case:
    """One small command line: its mapping, its flags (without the program), the flags of the same model and batches on one process,
    whether it is to be run in fp32 in spite of --bf16, and which quantities the one process computes as the mapping defines them."""

    mapping: Mapping
    argv: tuple[str, ...]
    reference: tuple[str, ...]
    force_fp32: bool = False
    defined_by_mapping: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.mapping.world

    @property
    def pool_size(self) -> int:
        """Processes that the case and its references need."""
        return max(self.mapping.world, 3)


@dataclass(frozen=True)
class Shrunk:
    """What became of a command line: small cases, what was changed on the way (sentences), what is left out as coming later, and which
    flags' effect on the numbers is not compared at all."""

    original: Mapping
    cases: tuple[Case, ...]
    notes: tuple[str, ...]
    left_out: tuple[str, ...]
    not_compared: tuple[str, ...] = ()


class ShrinkError(ValueError):
    """A command line that cannot be shrunk; `reasons` says why."""

    def __init__(self, reasons: Iterable[str]):
        self.reasons = tuple(reasons)
        super().__init__("\n".join(self.reasons))


def shrink(argv: list[str], world_size: int | None = None, ranks: int = 8) -> Shrunk:
    """Make small command lines of a large one.

    world_size: ranks of the user's job; None: --world-size, else the environment's WORLD_SIZE, else one model replica.
    Raises: ShrinkError when the command line itself is wrong, or nothing of its shape fits on `ranks` ranks.
    """
    unusable = [] if world_size else _unusable_world(argv)
    world_size = world_size or _world_size(argv)
    settings, violations = understand(argv, world_size)
    if world_size is None and not any(violation.kind not in ("later", "build") for violation in violations):
        world_size = _smallest_world(settings)
        settings, violations = understand(argv, world_size)
    wrong = unusable + [violation.message for violation in violations if violation.kind != "later"]
    if wrong:
        raise ShrinkError(wrong)
    left_out = _leave_out(settings, violations)
    original = _mapping(settings, world_size)
    notes: list[str] = []
    mappings = _choose(settings, original, ranks, notes)
    cases = [_case(settings, original, mapping, notes) for mapping in mappings]
    plain = next((case.mapping for case in cases if case.defined_by_mapping), None)
    if plain is not None:
        cases += _plain_case(settings, original, plain, notes)
    if any(low_precision.is_how(note) for note in notes):
        cases.append(_case(settings, original, mappings[0], [], quantized=False))
        notes.append("the last case is the first mapping without 8 bits: there the weights move, and steps and formats of the optimizer are proven")
    not_compared = _note_changes(settings, notes)
    not_compared += [name for name, _, text in (note.partition(": ") for note in notes) if text.startswith("left out")]
    return Shrunk(original, tuple(cases), tuple(dict.fromkeys(notes)), tuple(left_out), tuple(dict.fromkeys(not_compared)))


def as_is(argv: list[str], world_size: int | None = None) -> Case:
    """Take a command line that is small already as a case, unchanged but for half precision.

    Raises: ShrinkError when it is wrong, leaves open what a proof must fix (vocabulary, batch, number of steps), or asks for numbers in
        8 or 4 bits that one process cannot compute.
    """
    unusable = [] if world_size else _unusable_world(argv)
    world_size = world_size or _world_size(argv)
    settings, violations = understand(argv, world_size)
    if world_size is None and not violations:
        world_size = _smallest_world(settings)
        settings, violations = understand(argv, world_size)
    wrong = unusable + [violation.message for violation in violations]
    if settings.vocab_size is None:
        wrong.append("--vocab-size is missing: the batches are random tokens of --tokenizer-type NullTokenizer")
    if wrong:
        raise ShrinkError(wrong)
    kept = (dest for dest in settings.given_dests() if OPTIONS[dest].section != "output" or dest == "ckpt_format")  # full sharding asks for its own
    values = {dest: settings.values[dest] for dest in kept}
    values |= {dest: settings.values[dest] for dest in ("global_batch_size", "expert_tensor_parallel_size")}
    force_fp32 = bool(settings.overlap_moe_expert_parallel_comm)  # its rules ask for --bf16
    fixed = {"train_iters": STEPS, "world_size": None, "mock_data": True, "bf16": force_fp32, "fp16": False, "logit_dtype": None}
    new = _mapping(settings, world_size)
    fp8, said = low_precision.provable(values, new, settings.num_layers)
    if changed := [note for note in said if not low_precision.is_how(note)]:
        raise ShrinkError([f"not provable as it is: {note}" for note in changed])
    return make_case(new, values | fixed | fp8, force_fp32)


def _world_size(argv: list[str]) -> int | None:
    from arguments.tokens import read

    text = os.environ.get("WORLD_SIZE", "")
    typed = read(argv).last("world_size")
    found = int(text) if typed is None and text.isdigit() else typed
    return found if found is not None and found > 0 else None


def _unusable_world(argv: list[str]) -> list[str]:
    """What is wrong with the number of ranks that --world-size, or else the environment, gives."""
    from arguments.tokens import read

    typed, text = read(argv).last("world_size"), os.environ.get("WORLD_SIZE")
    if typed is not None:
        return [] if typed > 0 else [f"--world-size {typed} must be above 0."]
    return [] if text is None or (text.isdigit() and int(text) > 0) else [f"the environment's WORLD_SIZE is {text!r}; a number above 0 is needed."]


def _smallest_world(s: Settings) -> int:
    """Ranks of one replica of the model and of its experts."""
    facts = gather(s, None)
    return math.lcm(facts.tp * facts.cp * facts.pp, facts.etp * facts.ep * facts.pp)


def _mapping(s: Settings, world_size: int) -> Mapping:
    facts = gather(s, world_size)
    etp = facts.etp if s.num_experts else facts.tp
    return Mapping(facts.tp, facts.cp, facts.pp, facts.vpp or 1, facts.dp or 1, facts.ep, etp)


def _leave_out(s: Settings, violations: list[Violation]) -> list[str]:
    """Put what this version does not have yet back to its default; returns the sentences that say so."""
    for dest, entry in LATER.items():
        if entry.refuses(s.values[dest], s.default(dest)):
            for name in (dest, *PART_OF.get(dest, "").split(), *entry.also):
                s.forget(name)
            if dest == "moe_token_dispatcher_type":
                s.set_derived(dest, "alltoall", "in place of flex")
            if dest == "expert_tensor_parallel_size":
                s.set_derived(dest, s.tensor_model_parallel_size, "as --tensor-model-parallel-size")
    return [violation.message for violation in violations if violation.kind == "later"]


def _choose(s: Settings, original: Mapping, ranks: int, notes: list[str]) -> list[Mapping]:
    layout = s.pipeline_model_parallel_layout
    both_ends = getattr(s, sizes.FIRST) is not None and getattr(s, sizes.LAST) is not None
    wanted = Wanted(
        moe=bool(s.num_experts),
        middle_stages=both_ends or (layout is not None and read_layout(layout).mtp_standalone(original.pp)),
        nested_context="a2a+p2p" in as_list(s.cp_comm_type),
        same_data_ranks=bool(s.use_tp_pp_dp_mapping),
        instances=s.num_distributed_optimizer_instances or 1,
        lone_experts=s.num_experts == original.ep,
    )
    try:
        mappings = shrink_mapping(original, ranks, wanted)
    except ValueError as error:
        raise ShrinkError([str(error)]) from None
    notes.append(f"mapping: {original} -> {'; '.join(map(str, mappings))}")
    for name in NAMES:
        without = [mapping for mapping in mappings if getattr(original, name) > 1 and getattr(mapping, name) == 1]
        if len(without) == len(mappings):
            notes.append(f"{name} {getattr(original, name)} is 1 in every small mapping: {ranks} ranks have no room for it")
        elif without:
            notes.append(f"{name} is 1 in {len(without)} of {len(mappings)} mappings: {ranks} ranks cannot hold all dimensions at once")
    if s.num_experts and all((mapping.ep > mapping.dp) != (original.ep > original.dp) for mapping in mappings):
        notes.append("whether ep is above dp could not be kept")
    return mappings


def _plain_case(s: Settings, old: Mapping, new: Mapping, notes: list[str]) -> list[Case]:
    """The case of a mapping without what is defined by the mapping; [] where no legal command line is left."""
    try:
        case = _case(s, old, new, [], plain=True)
    except ShrinkError as error:
        notes.append(f"no case without what is defined by the mapping: {error.reasons[0]}")
        return []
    if case.defined_by_mapping:
        notes.append(f"no case without {', '.join(case.defined_by_mapping)}: a layout of stages names its layers")
    notes.append("a further case of the first such mapping is without what Megatron-LM defines by the mapping: there the one process runs the plain program")
    return [case]


def _case(s: Settings, old: Mapping, new: Mapping, notes: list[str], quantized: bool = True, plain: bool = False) -> Case:
    """One small command line for one mapping. plain: without what is defined by the mapping."""
    values = carried(s) if quantized else {**carried(s), **low_precision.NONE, **dict.fromkeys(low_precision.ROWS)}
    values |= sizes.stages(s, old, new) | sizes.attention(s, new) | sizes.experts(s, new) | sizes.batch(s, old, new)
    layers = values["num_layers"]
    values |= sizes.context(s, new, layers) | _ranks(s, new, notes) | _patterns(s, values, layers) | _steady(s)
    values |= _memory(s, layers) | low_precision.moments(s, notes) | _matrices(s, new, notes)
    if values.get("overlap_grad_reduce"):
        values["ddp_bucket_size"] = 3000
    force_fp32 = bool(values.get("overlap_moe_expert_parallel_comm"))
    values["bf16"] = force_fp32
    if values.get("logit_dtype") == "bf16" or values.get("fp8"):
        values["logit_dtype"] = None  # _note_changes says so
    if plain:
        values |= plain_values(values, new)
    fp8, said = low_precision.provable(values, new, layers)
    notes += said
    return make_case(new, values | fp8, force_fp32)


def _memory(s: Settings, layers: int) -> dict[str, object]:
    """Recompute and offload at the size of small layers: nothing would be large enough to be sent."""
    found: dict[str, object] = {}
    if s.recompute_granularity == "full" and s.recompute_num_layers:
        found["recompute_num_layers"] = min(s.recompute_num_layers, 2) if s.recompute_method == "uniform" else 1
    if s.fine_grained_activation_offloading:
        found |= {"transformer_impl": "transformer_engine", "min_offloaded_tensor_size": 1}
    if s.cpu_offloading_num_layers:
        found["cpu_offloading_num_layers"] = min(s.cpu_offloading_num_layers, layers - 1) or None
    return found


def _matrices(s: Settings, new: Mapping, notes: list[str]) -> dict[str, object]:
    """Muon in fp32, and on whole matrices."""
    if s.optimizer != "muon":
        return {}
    found: dict[str, object] = {"muon_fp32_matmul_prec": "high"}
    if s.muon_fp32_matmul_prec != "high":
        notes.append("--muon-fp32-matmul-prec high: products in bf16 make a difference of every rounding of a gradient")
    if s.muon_tp_mode == "blockwise" and max(new.tp, new.etp) > 1:
        found["muon_tp_mode"] = "duplicated"
        notes.append(f"{s.shown('muon_tp_mode')}: duplicated instead; tensor-parallel parts that are taken for matrices are no step of one process")
    return found


def make_case(mapping: Mapping, values: MappingOf[str, object], force_fp32: bool = False) -> Case:
    """A case of values by destination.

    Raises: ShrinkError when the rules do not allow it.
    """
    plain = {dest: value for dest, value in values.items() if OPTIONS[dest].section != "parallel" and dest not in NOT_IN_REFERENCE}
    argv, reference = flags_of(values), flags_of({**plain, **low_precision.of_reference(plain), "transformer_impl": "local"})
    for words, ranks in ((argv, mapping.world), (reference, 1)):
        violations = understand(words, ranks)[1]
        if violations:
            raise ShrinkError([f"the small command line for {mapping} is not legal: {violation.message}" for violation in violations])
    return Case(mapping, tuple(argv), tuple(reference), force_fp32, defined_by_mapping(values, mapping))


def _ranks(s: Settings, new: Mapping, notes: list[str]) -> dict[str, object]:
    """The mapping's own flags, and those that need one of its dimensions."""
    values = dict(zip(_SIZES, (new.tp, new.cp, new.pp, new.ep)))
    if s.num_experts:
        values["expert_tensor_parallel_size"] = new.etp
    values["sequence_parallel"] = bool(s.sequence_parallel) and new.tp > 1
    values["use_tp_pp_dp_mapping"] = bool(s.use_tp_pp_dp_mapping)
    instances = s.num_distributed_optimizer_instances or 1
    if instances > 1 and (new.dp * new.cp) % 2 == 0 and (not s.num_experts or new.edp % 2 == 0):
        values["num_distributed_optimizer_instances"] = 2
    elif instances > 1:
        notes.append(f"{s.flag('num_distributed_optimizer_instances')} is 1 where there is one data rank ({new})")
    if new.vpp > 1 and not s.overlap_p2p_comm and new.pp > 2:
        values["overlap_p2p_comm"] = False
    if new.vpp > 1 and s.given("align_param_gather"):
        values["align_param_gather"] = s.align_param_gather
    if s.pipeline_schedule is not None and new.pp > 1 and (new.vpp > 1 or s.pipeline_schedule != "interleaved"):
        values["pipeline_schedule"] = s.pipeline_schedule
    overlap = "overlap_moe_expert_parallel_comm"
    if s.values[overlap]:
        possible = new.ep > 1 and (new.pp == 1 or new.vpp > 1)
        values[overlap] = possible
        if possible and s.delay_wgrad_compute:
            values |= {"delay_wgrad_compute": True, "transformer_impl": "transformer_engine"}
        if not possible:
            notes.append(f"{s.flag(overlap)} is off where there is nothing to overlap ({new})")
    return {"transformer_impl": "local", **values}


def _patterns(s: Settings, values: MappingOf[str, object], layers: int) -> dict[str, object]:
    """Per-layer patterns for fewer layers."""
    found: dict[str, object] = {}
    if s.num_experts and s.moe_layer_freq != 1:
        found["moe_layer_freq"] = sizes.pattern(s.moe_layer_freq, s.num_layers, layers)
    for dest in ("no_rope_freq", "window_attn_skip_freq", "linear_attention_freq"):
        if s.values[dest] is not None:
            found[dest] = sizes.pattern(s.values[dest], s.num_layers, layers)
    return found


def _steady(s: Settings) -> dict[str, object]:
    """Random data, no noise, initial weights and a learning rate at which a mistake shows within three steps."""
    values = {dest: value for dest, value in NOISE.items() if dest.endswith("dropout")}
    if s.decoupled_lr is not None:
        values["decoupled_lr"] = 2 * LEARNING_RATE
    if s.experimental_attention_variant == "gdn":
        values["layernorm_epsilon"] = LARGE_EPSILON
    if s.dsa_indexer_loss_coeff:
        values["dsa_indexer_loss_coeff"] = 1.0
    return values | {
        "init_method_std": 0.2, "lr": LEARNING_RATE, "lr_decay_style": "constant", "adam_eps": 1e-5, "train_iters": STEPS,
        "eval_iters": 0, "mock_data": True, "tokenizer_type": "NullTokenizer", "vocab_size": VOCAB, "make_vocab_size_divisible_by": 16,
    }  # fmt: skip


def _note_changes(s: Settings, notes: list[str]) -> list[str]:
    """Say what the small runs do otherwise than the user's; returns the flags that no small run has."""
    narrow = ("bf16", "fp16", "main_params_dtype", "main_grads_dtype", "grad_reduce_in_bf16", "megatron_fsdp_grad_comm_dtype",
              "megatron_fsdp_main_grads_dtype", "fp32_residual_connection", "logit_dtype")  # fmt: skip
    half = [s.flag(dest) for dest in narrow if s.given(dest) and s.values[dest] not in (None, False, "auto", s.default(dest))]
    if half:
        notes.append(f"{', '.join(half)}: the proof computes in fp32 (with fp8 in fp64), where a difference is a mistake and not rounding")
    if s.experimental_attention_variant == "gdn":
        notes.append(f"{s.flag('layernorm_epsilon')} is {LARGE_EPSILON}: a query that all but misses a key makes an output near zero, whose "
                     "gradient the norm behind it would blow up, rounding and all")
    if s.dsa_indexer_loss_coeff:
        notes.append(f"{s.shown('dsa_indexer_loss_coeff')}: 1, so that indexers move within three steps as the model does")
    if s.given("embedding_init_method_std"):
        notes.append(f"{s.flag('embedding_init_method_std')}: embeddings begin like all other weights")
    noise = [s.shown(dest) for dest, still in NOISE.items() if s.values[dest] not in (still, 0.0, None, False)]
    if noise:
        notes.append(f"{', '.join(noise)}: off, since random numbers are drawn per rank")
    if s.values["cuda_graph_impl"] != "none":
        notes.append(f"{s.shown('cuda_graph_impl')}: left out, graphs repeat the operations of passes without them (tests/memory/test_cuda_graph.py)")
    if s.moe_use_upcycling:
        fine = [s.shown("moe_upcycling_granularity")] if s.given("moe_upcycling_granularity") else []
        notes.append(f"{', '.join([s.flag('moe_use_upcycling'), *fine])}: left out, the proof's weights are random and not a dense model's")
    sizes_over_time = [s.shown(dest) for dest in ("step_batch_size_schedule", "rampup_batch_size") if s.values[dest]]
    if sizes_over_time:
        notes.append("the batch size is constant")
    notes.append(
        f"data are random tokens, initial weights have a deviation of 0.2, the learning rate is {LEARNING_RATE} throughout (but "
        "where 8 bits are proven) and Adam's epsilon 1e-5: three small steps shall move the weights, and rounding shall not"
    )
    dropped = [s.flag(dest) for dest in s.given_dests() if OPTIONS[dest].section == "output"]
    if dropped:
        notes.append(f"flags of logging, checkpoints and profiling are left out: {len(dropped)}")
    return [*half, *noise, *sizes_over_time]

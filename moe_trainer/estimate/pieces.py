"""What each piece of the published training stack is worth for a command line: its step with and without the piece.

A piece is a set of flags. The run without a piece that the command line uses loses these flags, and those that need
them. A piece that it does not use is tried: the run with it gets the flags, and both runs get what the piece needs.
Both runs of a pair obey the rules and are planned like any command line; scripts/plan.py prints the planner's pairs,
scripts/roofline.py also those of the roofline, side by side.

Routing is even in both models. So what balances the load or saves memory is worth no time here, and may cost some.
Both share the token exchange, the schedule and the communication of data parallelism (step_time.py), so they can
differ in what a pass computes, launches, copies and waits for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from arguments.mechanisms import dispatchers, formats
from arguments.mechanisms.dispatchers import get_dispatcher
from arguments.mechanisms.format_kinds import eight_bit
from arguments.tokens import FIELDS, drop_flags, with_old_spellings
from moe_trainer.estimate.corrections import strengths
from moe_trainer.estimate.dry_run import plan_of_flags
from moe_trainer.estimate.parallel_configs import RECOMPUTE
from moe_trainer.estimate.published_runs import BLOCKWISE, DEEPEP, GRAPHS, HYBRIDEP, MXFP8, OVERLAP
from moe_trainer.estimate.spelled_flags import spell_preset
from moe_trainer.estimate.uncertainty import comparison_bar

if TYPE_CHECKING:
    from arguments import Arguments
    from moe_trainer.estimate.hardware import Hardware
    from moe_trainer.estimate.plan import Plan

NEGLIGIBLE = 0.005
"""Share of the step below which a piece counts as worth nothing."""
FORMATS = formats.SELECTING_FLAGS
FORMAT_OPTIONS = with_old_spellings(
    (
        *formats.STORING_FLAGS,
        eight_bit.OUTPUT_LAYER,
        "first_last_layers_bf16",
        "moe_router_padding_for_quantization",
    )
)
DISPATCHER = with_old_spellings(
    (*dispatchers.SELECTING_FLAGS, "moe_flex_dispatcher_num_sms", "moe_permute_fusion_into_hybridep")
)
GRAPH_FLAGS = with_old_spellings(("cuda_graph_impl", "cuda_graph_modules"))
STATIC = ("moe_expert_rank_capacity_factor", "moe_paged_stash")
RANK_CAPACITY = "--moe-expert-rank-capacity-factor 1.5"
LEAVES_TE = (
    "its experts leave TransformerEngine, and this program casts operands apart from activations and GEMMs, weights "
    "with other ranks' experts in every microbatch; the planner counts one cast of an operand"
)

CORRECTED = "published runs correct the planner's times of one of the two (corrections.py), not the roofline's"


@dataclass(frozen=True)
class PublishedPair:
    """TFLOP/s per GPU without and with a piece, of one published model and machine."""

    without: float
    used: float
    run: str
    source: str

    @property
    def gain(self) -> float:
        return self.used / self.without - 1

    @property
    def text(self) -> str:
        return f"{self.without:g} -> {self.used:g}, {self.run} ({self.source})"


@dataclass(frozen=True)
class Piece:
    """A piece of the stack.

    Attributes:
        flags: of the run that uses it.
        is_used: whether a command line uses it.
        otherwise: flags of the run without it.
        drops: destinations that the run without it loses besides those of `flags`.
        also: what a run needs before the piece can be tried.
        replaces: destinations that the run that tries it loses.
        is_alternative: other pieces have the same purpose, and where it is tried, the run without it has none of them.
        blackwell: the tensor cores that it is for; None: all.
        note: what the models do not count, and why.
        difference: why the two models give it another worth, if they do.
    """

    name: str
    flags: str
    is_used: Callable[[Arguments], bool]
    otherwise: str = ""
    drops: Collection[str] = ()
    also: str = ""
    replaces: Collection[str] = ()
    is_alternative: bool = False
    blackwell: bool | None = None
    published: tuple[PublishedPair, ...] = ()
    note: str = ""
    difference: str = ""

    @property
    def dests(self) -> frozenset[str]:
        """Destinations of its flags."""
        return frozenset(FIELDS[word].dest for word in self.flags.split() if word.startswith("--"))


LADDER = "DeepSeek-V3 256xGB200 MXFP8, while it was tuned"


def _has_width(width: str, args: Arguments) -> bool:
    return (fmt := formats.quantized_format(args.precision)) is not None and fmt.flags.name == width


def _unmeasured_formats() -> tuple[Piece, ...]:
    return tuple(
        Piece(
            f"{each.name} GEMMs instead of BF16",
            " ".join(each.words),
            partial(_has_width, each.flags.name),
            drops=(*FORMATS, *FORMAT_OPTIONS),
            replaces=(*FORMATS, *FORMAT_OPTIONS),
            is_alternative=True,
            blackwell=each.needs_blackwell,
        )
        for each in formats.QUANTIZED
        if each.searched_with and not each.flags.is_measured
    )


PIECES = (
    Piece(
        "HybridEP instead of all-to-all",
        HYBRIDEP,
        lambda args: get_dispatcher(args.moe) is dispatchers.HYBRIDEP,
        "--moe-token-dispatcher-type alltoall",
        (*DISPATCHER, *STATIC),
        replaces=DISPATCHER,
        is_alternative=True,
        published=(
            PublishedPair(830, 944, f"{LADDER}; instead of DeepEP", "DEV"),
            PublishedPair(132.9, 244.0, "Qwen3-30B 16xH100 BF16", "BR; other flags of the first are not stated"),
        ),
    ),
    Piece(
        "DeepEP instead of all-to-all",
        DEEPEP,
        lambda args: get_dispatcher(args.moe) is dispatchers.DEEPEP,
        "--moe-token-dispatcher-type alltoall",
        (*DISPATCHER, *STATIC),
        replaces=(*DISPATCHER, *STATIC),
        is_alternative=True,
        published=(PublishedPair(540, 566, LADDER, "DEV"),),
    ),
    Piece(
        "overlapped token exchange",
        OVERLAP,
        lambda args: args.parallel.overlap_moe_expert_parallel_comm,
        f"{OVERLAP}=false",
        ("delay_wgrad_compute", "ep_overlap_early_attn_memory_release"),
        replaces=("moe_shared_expert_overlap",),
        published=(PublishedPair(244.0, 287.3, "Qwen3-30B 16xH100 BF16, HybridEP", "BR"),),
    ),
    Piece(
        "delayed weight gradients",
        "--delay-wgrad-compute",
        lambda args: args.parallel.delay_wgrad_compute,
        "--delay-wgrad-compute=false",
        also=OVERLAP,
        published=(PublishedPair(100, 100.4, "Qwen3-30B 16xH100 BF16, in percent", "BR"),),
        note="both models hide the same share of an overlapped exchange with and without it",
    ),
    Piece(
        "shared expert during the exchange",
        "--moe-shared-expert-overlap",
        lambda args: args.moe.moe_shared_expert_overlap and bool(args.moe.moe_shared_expert_intermediate_size),
        "--moe-shared-expert-overlap=false",
    ),
    Piece(
        "sync-free dispatch (static budget)",
        RANK_CAPACITY,
        lambda args: args.moe.moe_expert_rank_capacity_factor is not None,
        drops=(*STATIC, "cuda_graph_impl"),
        also=HYBRIDEP,
        difference="the roofline executes an all-to-all in place of HybridEP, and gathers tokens into and out of its "
        "slots of equal size (ops/fixed_slots.py)",
    ),
    Piece(
        "paged stash",
        "--moe-paged-stash",
        lambda args: args.moe.moe_paged_stash,
        "--moe-paged-stash=false",
        also=f"{HYBRIDEP} {RANK_CAPACITY}",
        note="saves memory; the copies to and from pages are what it costs",
    ),
    Piece(
        "ECHO (clones of hot experts)",
        "--moe-clone-hot-experts 2",
        lambda args: args.moe.moe_clone_hot_experts > 0,
        "--moe-clone-hot-experts 0",
        note="an even routing has no hot experts, so no clone is made; planning the clones is what it costs",
        difference="the roofline lets the host run ahead into the launches of a plan, the planner within a layer only",
    ),
    Piece(
        "8-bit dispatch",
        "--moe-dispatch-fwd-dtype mxfp8 --moe-combine-bwd-dtype mxfp8",
        lambda args: args.moe.moe_dispatch_fwd_dtype == formats.TRANSPORT.key,
        "--moe-dispatch-fwd-dtype bf16 --moe-combine-bwd-dtype bf16",
    ),
    Piece(
        "CUDA graphs of attention and router",
        GRAPHS,
        lambda args: bool(args.training.captured_modules - {"iteration"}),
        "--cuda-graph-impl none",
        GRAPH_FLAGS,
        replaces=GRAPH_FLAGS,
        published=(PublishedPair(611, 663, LADDER, "DEV"),),
    ),
    Piece(
        "CUDA graph of the full iteration",
        "--cuda-graph-impl full_iteration",
        lambda args: args.training.cuda_graph_impl == "full_iteration",
        GRAPHS,
        GRAPH_FLAGS,
        f"{HYBRIDEP} {RANK_CAPACITY} --no-check-for-nan-in-loss-and-grad",
        GRAPH_FLAGS,
    ),
    Piece(
        "MXFP8 GEMMs instead of BF16",
        MXFP8,
        lambda args: formats.quantized_format(args.precision) is eight_bit.MXFP8,
        drops=(*FORMATS, *FORMAT_OPTIONS),
        replaces=(*FORMATS, *FORMAT_OPTIONS),
        is_alternative=True,
        blackwell=True,
        published=(
            PublishedPair(961, 1088, "DeepSeek-V3 without MTP 256xGB300", "BP 25.11"),
            PublishedPair(857, 1048, "DeepSeek-V3 256xGB200, with another mapping", "P"),
        ),
    ),
    Piece(
        "blockwise FP8 GEMMs instead of BF16",
        BLOCKWISE,
        lambda args: formats.quantized_format(args.precision) is eight_bit.BLOCKWISE,
        drops=(*FORMATS, *FORMAT_OPTIONS),
        replaces=(*FORMATS, *FORMAT_OPTIONS),
        is_alternative=True,
        blackwell=False,
        published=(PublishedPair(487.8, 632, "Mixtral-8x22B 128xH100, delayed scaling", "PF"),),
    ),
    *_unmeasured_formats(),
    Piece(
        "fp8 parameters",
        "--fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag",
        lambda args: args.stored_weight_format is not None and not args.replaces_te_weights,
        "--fp8-param-gather=false --reuse-grad-buf-for-mxfp8-param-ag=false",
        note="saves memory and half of the gather of parameters, which overlaps; in both models a run without it casts "
        "weights once per iteration, which is not counted",
    ),
    Piece(
        "fused grouped MLP",
        "--use-transformer-engine-op-fuser",
        lambda args: args.model.use_transformer_engine_op_fuser,
        "--use-transformer-engine-op-fuser=false",
        ("moe_mlp_glu_interleave_size",),
        note="both models count GEMMs and one activation kernel with and without it",
    ),
    Piece(
        "fused permutation",
        "--moe-permute-fusion",
        lambda args: args.moe.moe_permute_fusion,
        "--moe-permute-fusion=false",
        published=(PublishedPair(494, 530, f"{LADDER}; with other fusions", "DEV"),),
        note="both models count fused kernels with and without it: this program's own are the default",
    ),
    Piece(
        "fused router",
        "--moe-router-fusion",
        lambda args: args.moe.moe_router_fusion,
        "--moe-router-fusion=false",
        published=(PublishedPair(530, 540, LADDER, "DEV"),),
        note="both models count fused kernels with and without it: this program's own are the default",
    ),
    Piece(
        "recompute of selected modules",
        "--recompute-granularity selective --recompute-modules moe_act layernorm",
        lambda args: bool(args.training.recomputed_modules),
        drops=RECOMPUTE,
        published=(PublishedPair(611, 566, f"{LADDER}; mla_up_proj", "DEV"),),
        note="saves memory, and costs what it computes again",
    ),
    Piece(
        "offloaded activations",
        "--fine-grained-activation-offloading --offload-modules expert_fc1 moe_act",
        lambda args: bool(args.training.offloaded_modules),
        "--fine-grained-activation-offloading=false --cpu-offloading-num-layers 0",
        ("offload_modules",),
        published=(PublishedPair(945, 930, "DeepSeek-V3 256xGB200 MXFP8, PP8", "P"),),
        note="saves memory; copies cost time where they take longer than the computation",
    ),
    Piece(
        "overlapped tensor-parallel communication",
        "--tp-comm-overlap",
        lambda args: args.parallel.tp_comm_overlap,
        "--tp-comm-overlap=false",
    ),
    Piece(
        "overlapped gradients and parameters",
        "--overlap-grad-reduce --overlap-param-gather",
        lambda args: args.parallel.overlap_grad_reduce,
        "--overlap-grad-reduce=false --overlap-param-gather=false",
        ("overlap_param_gather_with_optimizer_step",),
    ),
)
"""Sources of published pairs as in published_runs.py and holdout_runs.py."""


@dataclass(frozen=True)
class PiecePair:
    """The two command lines of a piece. `is_tried`: the user's does not use it."""

    piece: Piece
    without: tuple[str, ...]
    used: tuple[str, ...]
    is_tried: bool


@dataclass(frozen=True)
class Worth:
    """Seconds of an iteration without and with a piece, by one model."""

    without: float
    used: float

    @property
    def gain(self) -> float:
        """How much faster the run is with the piece, as a fraction."""
        return self.without / self.used - 1


@dataclass(frozen=True)
class Row:
    """A piece's worth by planner and roofline (None if it was not asked), or the reason why there is no pair.

    `bar` is how far the ratio of two planned times may be off; `difference` says why the models may differ by more.
    """

    piece: Piece
    is_tried: bool = False
    planner: Worth | None = None
    roofline: Worth | None = None
    bar: float = 0.0
    reason: str = ""
    difference: str = ""

    @property
    def agrees(self) -> bool:
        """Whether both models give gains of one sign, or none, whose ratio is within the bar."""
        if self.planner is None or self.roofline is None:
            return True
        first, second = self.planner.gain, self.roofline.gain
        opposed = first * second < 0 and min(abs(first), abs(second)) >= NEGLIGIBLE
        return not opposed and abs(math.log((1 + first) / (1 + second))) <= self.bar


def make_pair(piece: Piece, argv: Sequence[str], args: Arguments) -> PiecePair:
    """Return the command lines without and with a piece, from a legal one and its arguments."""
    words = piece.flags.split()
    if piece.is_used(args):
        dests = piece.dests | set(piece.drops)
        rest = drop_flags(spell_preset(argv, dests), dests)
        return PiecePair(piece, (*rest, *piece.otherwise.split()), tuple(argv), False)
    base = (*argv, *piece.also.split())
    dests = piece.dests | set(piece.replaces)
    rest = drop_flags(spell_preset(base, dests), dests)
    without = (*rest, *piece.otherwise.split()) if piece.is_alternative else base
    return PiecePair(piece, without, (*rest, *words), True)


def unfit_device(piece: Piece, hardware: Hardware) -> str:
    """Return why a piece is not for a device, "" if it is."""
    if hardware.synchronous and "--moe-flex-dispatcher-backend" in f"{piece.flags} {piece.also}".split():
        return "its dispatcher is made of kernels of GPUs"
    if piece.blackwell is None or piece.blackwell == hardware.is_blackwell:
        return ""
    return f"{hardware.name}'s tensor cores have another format for it"


def make_rows(argv: Sequence[str], step: Callable[[Sequence[str], Plan], float] | None = None) -> Iterator[Row]:
    """Yield the worth of every piece for a command line with --world-size and --hardware.

    Args:
        step: the roofline: seconds of an iteration of a command line, which has this plan.

    Raises:
        ValueError: if the command line cannot be planned.
    """
    plan = plan_of_flags(list(argv))
    for piece in PIECES:
        yield make_row(piece, argv, plan, step)


def make_row(
    piece: Piece, argv: Sequence[str], plan: Plan, step: Callable[[Sequence[str], Plan], float] | None = None
) -> Row:
    """Return the worth of a piece for a command line and its plan; see `make_rows`."""
    pair = make_pair(piece, argv, plan.args)
    if pair.is_tried and (reason := unfit_device(piece, plan.hardware)):
        return Row(piece, True, reason=reason)
    try:
        without, used = (plan_of_flags(list(line)) for line in (pair.without, pair.used))
    except ValueError as error:
        return Row(piece, pair.is_tried, reason=first_reason(error))
    if piece.is_used(without.args) or not piece.is_used(used.args):
        return Row(piece, pair.is_tried, reason="these flags have no effect here")
    planner = Worth(without.time.step, used.time.step)
    roofline = None if step is None else Worth(step(pair.without, without), step(pair.used, used))
    difference = "; ".join(filter(None, (piece.difference, _known_difference(without, used))))
    return Row(piece, pair.is_tried, planner, roofline, comparison_bar(without, used), difference=difference)


def _known_difference(without: Plan, used: Plan) -> str:
    """Return why the roofline counts something of a pair that the planner does not, "" if nothing is known."""
    is_quantized = all(plan.width != "bf16" for plan in (without, used))
    leaves = without.args.te_quantizes[1] and not used.args.te_quantizes[1]
    kinds = [strengths(plan.args, plan.hardware) for plan in (without, used)]
    return "; ".join([LEAVES_TE] * (is_quantized and leaves) + [CORRECTED] * (kinds[0] != kinds[1]))


def first_reason(error: ValueError) -> str:
    """Return the first of the reasons why a command line cannot be planned."""
    violations = getattr(error, "violations", None)
    return violations[0].message if violations else str(error).splitlines()[0]

"""Parallel mappings that a search tries: their flags, their arguments and a pipeline layout for each.

A mapping sets tensor, context, pipeline, expert and expert-tensor parallelism, virtual stages, the micro-batch, what is
recomputed, the dispatcher, and whether its exchange is overlapped. All other flags stay. `parallel_shapes` leaves out
what does not divide; the rules of arguments/ have the last word on every mapping that is shown.

Left out on purpose, because each is dominated or not practical: context parallelism with fewer than 2048 positions per
rank, more than 32 pipeline stages, micro-batches above 8, tensor parallelism beyond NVLink.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from arguments.checkpoint_args import STAGES
from arguments.layer_pattern import moe_layer_pattern
from arguments.mechanisms import formats
from arguments.mechanisms.dispatchers import ALLTOALL, BACKENDS, SELECTING_FLAGS, DispatcherDeclaration
from arguments.mechanisms.format_kinds.declaration import FormatCapability
from arguments.mechanisms.formats import BF16, FP16, QUANTIZED, quantized_format
from arguments.mechanisms.schedule_kinds.declaration import PIPELINE_SCHEDULE
from arguments.mechanisms.schedules import default_schedule
from arguments.tokens import with_old_spellings

if TYPE_CHECKING:
    from arguments import Arguments
    from moe_trainer.estimate.hardware import Hardware

RECOMPUTE = with_old_spellings(
    ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
)
LAYOUT = frozenset((*STAGES, "pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage"))
REPLACED = with_old_spellings(
    RECOMPUTE
    | LAYOUT
    | frozenset(
        "tensor_model_parallel_size context_parallel_size expert_model_parallel_size expert_tensor_parallel_size "
        "sequence_parallel micro_batch_size overlap_moe_expert_parallel_comm "
        "delay_wgrad_compute".split()
    )
    | frozenset((PIPELINE_SCHEDULE, *SELECTING_FLAGS))
)
"""Flags whose values a search chooses: those that ParallelConfig writes, and what sets the same."""
SEARCHED = REPLACED | frozenset(
    "world_size hardware dry_run validate_only fake_process_group report report_html".split()
)
"""Flags that a mapping sets, or that make no sense with a search; they are removed from the command line."""
FORMAT_FLAGS = frozenset((BF16.name, FP16.name, *formats.SELECTING_FLAGS))
FULL_RECOMPUTE = ("full",)
MAX_PIPELINE_STAGES, MAX_TENSOR_PARALLEL, MIN_POSITIONS_PER_RANK = 32, 16, 2048


@dataclass(frozen=True)
class ParallelConfig:
    """One parallel mapping.

    Attributes:
        vpp: chunks of a pipeline rank.
        recompute: modules, or ("full",).
        backend: of the flex dispatcher, "" for alltoall.
    """

    tp: int
    cp: int
    pp: int
    vpp: int
    ep: int
    etp: int
    mbs: int
    recompute: tuple[str, ...] = ()
    backend: str = ""
    overlap: bool = False

    @property
    def dispatcher(self) -> DispatcherDeclaration:
        return BACKENDS[self.backend] if self.backend else ALLTOALL

    @property
    def num_features(self) -> int:
        """Number of kinds of parallelism, recompute and dispatch that it adds to plain data parallelism."""
        sizes = (self.tp, self.cp, self.pp, self.vpp, self.ep)
        return (
            sum(size > 1 for size in sizes)
            + (self.etp not in (1, self.tp))
            + sum(map(bool, (self.recompute, self.backend, self.overlap)))
        )

    def flags(self, layout: str | None, has_experts: bool = True, preset: frozenset[str] = frozenset()) -> list[str]:
        """Return the command-line flags of this mapping, sizes of 1 included.

        Args:
            layout: pipeline layout, needed if there are stages or the preset sets some.
            has_experts: whether the model has experts.
            preset: destinations that the preset sets, which may have to be reset.
        """
        words: list[object] = ["--tensor-model-parallel-size", self.tp, "--context-parallel-size", self.cp]
        words += ["--pipeline-model-parallel-size", self.pp, "--expert-model-parallel-size", self.ep]
        words += ["--sequence-parallel"] if self.tp > 1 else []
        words += ["--pipeline-model-parallel-layout", layout] if self.pp > 1 or not preset.isdisjoint(STAGES) else []
        if PIPELINE_SCHEDULE in preset:
            words += ["--pipeline-schedule", default_schedule(self.vpp).key]
        if "microbatch_group_size_per_vp_stage" in preset:
            words += ["--microbatch-group-size-per-virtual-pipeline-stage", self.pp]
        words += ["--micro-batch-size", self.mbs]
        if has_experts:  # even without an exchange, because other flags require one of the two
            words += ["--expert-tensor-parallel-size", self.etp]
            words += self.dispatcher.words
        words += ["--moe-enable-deepep=false"] if "moe_enable_deepep" in preset else []
        if self.overlap:
            words += ["--overlap-moe-expert-parallel-comm"]
        else:
            switches = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
            words += [f"--{dest.replace('_', '-')}=false" for dest in switches if dest in preset]
        return [*map(str, words), *(recompute_flags(self.recompute) if self.recompute else ())]

    def applied(self, args: Arguments, layout: str | None) -> Arguments:
        """Return the arguments with this mapping, without validation; what the rules would derive is set here."""
        parallel = replace(
            args.parallel,
            tensor_model_parallel_size=self.tp,
            context_parallel_size=self.cp,
            pipeline_model_parallel_size=self.pp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
            sequence_parallel=self.tp > 1,
            pipeline_model_parallel_layout=layout if self.pp > 1 else None,
            pipeline_schedule=None,
            microbatch_group_size_per_vp_stage=self.pp,
            overlap_p2p_comm=self.vpp > 1,
            overlap_moe_expert_parallel_comm=self.overlap,
        )
        full = self.recompute == FULL_RECOMPUTE
        training = replace(args.training, micro_batch_size=self.mbs)
        if self.recompute:  # else that of the preset
            training = replace(
                training,
                recompute_granularity="full" if full else "selective",
                recompute_method="uniform" if full else None,
                recompute_num_layers=1 if full else None,
                recompute_modules=None if full else list(self.recompute),
            )
        moe = replace(args.moe, **self.dispatcher.selected_by)
        return replace(args, parallel=parallel, training=training, moe=moe)


def recompute_flags(modules: Sequence[str]) -> tuple[str, ...]:
    """Return the flags that recompute these modules, or everything (FULL_RECOMPUTE)."""
    if modules == FULL_RECOMPUTE:
        return tuple("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split())
    return "--recompute-granularity", "selective", "--recompute-modules", *modules


def gemm_formats(hardware: Hardware) -> tuple[str, ...]:
    """Return the formats that a device has GEMMs in: 32-element blocks since Blackwell, larger ones before it."""
    searched = (each for each in QUANTIZED if each.searched_with and hardware.has_gemms(each))
    return (BF16.name, *(each.key for each in searched if not (each.superseded_on_blackwell and hardware.is_blackwell)))


def divisors(number: int, limit: int) -> list[int]:
    """Return the divisors of a number up to a limit, ascending."""
    return [each for each in range(1, min(number, limit) + 1) if number % each == 0]


def recompute_sets(args: Arguments) -> tuple[tuple[str, ...], ...]:
    """Return what may be recomputed, from nothing to everything."""
    if args.model.hybrid_layer_pattern:
        return (), FULL_RECOMPUTE
    latent = ("mla_up_proj",) if args.model.multi_latent_attention else ()
    pattern = moe_layer_pattern(args.model.num_layers, args.moe.num_experts, args.moe.moe_layer_freq)
    dense = ("mlp",) if not all(pattern) else ()
    fmt = quantized_format(args.precision)
    norms = () if fmt is not None and fmt.rejects(FormatCapability.RECOMPUTED_INPUTS) else ("layernorm",)
    sets = [(), norms, latent, (*norms, *latent), (*norms, *latent, *dense)]
    if any(pattern):
        if fmt is not None:  # bf16 experts always recompute their activation
            sets += [("moe_act", *norms, *latent), ("moe_act", *norms, *latent, *dense)]
        sets += [("moe", *norms), ("moe", *norms, *latent, *dense)]
    return tuple(dict.fromkeys([*sets, FULL_RECOMPUTE]))


def dispatcher_choices(args: Arguments, hardware: Hardware, ep: int, etp: int) -> list[tuple[str, bool]]:
    """Return (backend of flex, whether it overlaps) of the dispatchers that a machine has."""
    if ep * etp == 1:
        return [("", False)]
    half = args.precision.bf16 or args.precision.fp16
    overlaps = [False]
    if ep > 1 and half and args.model.num_mtp_depths <= 1 and not args.moe.moe_shared_expert_overlap:
        overlaps.append(True)
    spread = ep > 1 and ep * etp > hardware.domain
    plain = [(backend, overlap) for backend in ("", *(["hierarchical"] if spread else [])) for overlap in overlaps]
    if etp > 1 or ep == 1 or hardware.synchronous:  # the others are kernels of GPUs
        return plain
    # An all-to-all over NCCL hides little: it reached 133 of a tuned run's 299 TFLOP/s (published_runs.py, alltoall).
    backends = ("deepep", "hybridep") if hardware.is_blackwell else ("deepep",)
    plain = [(backend, overlap) for backend, overlap in plain if not overlap]
    return [*plain, *((backend, overlap) for backend in backends for overlap in overlaps)]


def parallel_shapes(args: Arguments, gpus: int, hardware: Hardware) -> Iterator[ParallelConfig]:
    """Yield all sizes that divide, without recompute and dispatcher."""
    model, experts = args.model, args.moe.num_experts or 1
    seq, batch = args.data.seq_length, args.training.global_batch_size
    layers, expert_ffn = model.num_layers, args.moe.moe_ffn_hidden_size or model.ffn_hidden_size
    for tp in divisors(math.gcd(gpus, model.num_attention_heads), min(hardware.domain, MAX_TENSOR_PARALLEL)):
        groups = model.query_groups
        if not model.multi_latent_attention and groups % tp and tp % groups:
            continue
        if model.ffn_hidden_size % tp or (args.moe.moe_shared_expert_intermediate_size or 0) % tp:
            continue
        for cp in divisors(gpus // tp, max(1, seq // MIN_POSITIONS_PER_RANK)):
            if seq % (tp * cp * (2 if cp > 1 else 1)):
                continue
            for pp in divisors(gpus // (tp * cp), min(MAX_PIPELINE_STAGES, layers)):
                replicas = gpus // (tp * cp * pp)
                for mbs in (1, 2, 4, 8):
                    if batch % (mbs * replicas):
                        continue
                    for vpp in _virtual(layers, pp, batch // (mbs * replicas)):
                        for etp in sorted({1, tp} if experts > 1 else {tp}):
                            for ep in divisors(experts, gpus):
                                if gpus % (etp * ep * pp) == 0 and expert_ffn % etp == 0:
                                    yield ParallelConfig(tp, cp, pp, vpp, ep, etp, mbs)


def _virtual(layers: int, pp: int, microbatches: int) -> list[int]:
    if pp == 1 or microbatches % pp:
        return [1]
    return [1, *(vpp for vpp in (2, 3, 4, 6, 8, 12) if pp * vpp <= layers + 1)]


def layer_counts(layers: int, stages: int, extra: float) -> list[int]:
    """Return the layers of every stage, as even as possible.

    The last stage has fewer, because its loss and multi-token prediction take as long as `extra` layers.
    """
    if stages == 1:
        return [layers]
    per = math.ceil((layers + extra) / stages)
    last = max(0, per - round(extra), layers - per * (stages - 1))
    each, more = divmod(layers - last, stages - 1)
    return [each + (index >= stages - 1 - more) for index in range(stages - 1)] + [last]


def layout_text(counts: Sequence[int], depths: int) -> str:
    """Return the layout string of these layers by stage."""
    if len(counts) == 1:
        return f"Et*{counts[0]}{'m' * depths}L"
    stages = ["t" * count for count in counts]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "m" * depths + "L"
    parts, middle = [stages[0] + "|"], stages[1:-1]
    while middle:
        same = next((index for index, stage in enumerate(middle) if stage != middle[0]), len(middle))
        parts.append(f"({middle[0]}|)*{same}" if same > 1 else f"{middle[0]}|")
        middle = middle[same:]
    return "".join(parts) + stages[-1]

"""The frozen result of parsing: eight sections, and the sources of their values."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from arguments import schema
from arguments.data import DataArgs
from arguments.flag_properties import Role
from arguments.mechanisms.attention_backend_kinds.declaration import AttentionBackendCapability
from arguments.mechanisms.attention_backends import get_attention_backend
from arguments.mechanisms.format_kinds.declaration import StoredForm
from arguments.mechanisms.implementations import get_implementation
from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from arguments.optimizer import OptimizerArgs
from arguments.output import OutputArgs
from arguments.parallel import ParallelArgs, dynamic_cp_sizes, packed_alignment, sequence_padding_multiple
from arguments.precision import PrecisionArgs
from arguments.settings import Settings, Violation, is_eval_only
from arguments.stored_weights import stored_weight_format
from arguments.te_support import (
    attention_problem,
    can_quantize_experts,
    can_quantize_linears,
    leaves_counts_on_device,
)
from arguments.training import TrainingArgs

SECTIONS = (
    ("model", ModelArgs),
    ("moe", MoEArgs),
    ("parallel", ParallelArgs),
    ("training", TrainingArgs),
    ("optimizer", OptimizerArgs),
    ("precision", PrecisionArgs),
    ("data", DataArgs),
    ("output", OutputArgs),
)

OPTIONS = MappingProxyType(schema.options(SECTIONS))
"""Every flag's option by destination, in order of declaration."""


def flags_of(*roles: Role) -> frozenset[str]:
    """Return the destinations of the flags with one of these roles."""
    return frozenset(dest for dest, option in OPTIONS.items() if option.role in roles)


@dataclass(frozen=True)
class Arguments:
    """All flags, resolved. Field `x_y` of a section is the flag whose Megatron destination is `x_y`.

    `source[dest]` says where a value came from, `typed` which destinations stood on the command line,
    `spelling[dest]` how a given flag was written, `notes` are one-line notices for the log, `recipe_env` are the
    environment variables a recipe asks for, `world_size` is the number of ranks the rules were checked against (None:
    unknown), `unbuildable` is what a run refuses although the flags are read (see `parse.parse_args`).
    """

    model: ModelArgs
    moe: MoEArgs
    parallel: ParallelArgs
    training: TrainingArgs
    optimizer: OptimizerArgs
    precision: PrecisionArgs
    data: DataArgs
    output: OutputArgs
    source: Mapping[str, str] = field(default_factory=dict, repr=False)
    typed: frozenset[str] = frozenset()
    spelling: Mapping[str, str] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()
    recipe_env: Mapping[str, str] = field(default_factory=dict)
    world_size: int | None = None
    unbuildable: tuple[Violation, ...] = ()

    @property
    def is_eval_only(self) -> bool:
        """Whether the run only evaluates a model."""
        return is_eval_only(self.training.skip_train, self.moe.moe_use_upcycling, self.output.ckpt_convert_format)

    @property
    def has_frozen_weights(self) -> bool:
        """Whether the weights stay unchanged, so that there are no gradients and no optimizer."""
        return self.is_eval_only or self.optimizer.freeze_all_layers

    @property
    def dynamic_cp_sizes(self) -> tuple[int, ...]:
        """Sizes of the groups of --dynamic-context-parallel, () without."""
        parallel = self.parallel
        if not parallel.dynamic_context_parallel or self.world_size is None:
            return ()
        num_ranks = self.world_size // (parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size)
        return dynamic_cp_sizes(num_ranks, parallel.min_dynamic_context_parallel_size)

    def _padding_multiple(self, cp_size: int) -> int:
        parallel = self.parallel
        by_tensor_ranks = bool(parallel.sequence_parallel or self.moe.num_experts)
        return sequence_padding_multiple(cp_size, parallel.tensor_model_parallel_size, by_tensor_ranks)

    @property
    def _pack_ranks(self) -> int:
        """Context-parallel ranks to which the numbers of tokens of packs refer."""
        return 1 if self.dynamic_cp_sizes else self.parallel.context_parallel_size

    @property
    def sequence_padding_multiple(self) -> int:
        """Multiple to which packed sequences are padded; with dynamic context parallelism on one rank."""
        return self._padding_multiple(self._pack_ranks)

    @property
    def packed_capacity(self) -> int | None:
        """Largest number of tokens of a packed microbatch; None without packing.

        With dynamic context parallelism of one rank, a multiple of the fewest tokens that a rank of a group has of a
        sequence, so that a sequence that fits into a group fits into larger ones.
        """
        parallel, sizes = self.parallel, self.dynamic_cp_sizes
        if parallel.sequence_packing_scheduler is None or parallel.max_seqlen_per_dp_cp_rank is None:
            return None
        size = parallel.max_seqlen_per_dp_cp_rank * self._pack_ranks
        multiple = self._padding_multiple(sizes[-1] if sizes else parallel.context_parallel_size)
        longest = -(-self.data.seq_length // multiple) * multiple
        if not sizes:
            return max(size, longest)
        of_rank = multiple // sizes[-1]
        return max(size // of_rank * of_rank, longest // sizes[-1])

    @property
    def packed_tail_multiple(self) -> int:
        """Multiple to which packed microbatches are padded, over all context-parallel ranks.

        With dynamic context parallelism on one rank.
        """
        parallel = self.parallel
        alignment = packed_alignment(parallel.pad_packed_seq_alignment, parallel.max_seqlen_per_dp_cp_rank)
        return 1 if alignment is None else alignment * self._pack_ranks

    @property
    def max_packed_tokens(self) -> int | None:
        """Largest number of tokens of a microbatch with its padding; None without packing.

        With dynamic context parallelism on --context-parallel-size ranks.
        """
        if self.packed_capacity is None:
            return None
        tokens = -(-self.packed_capacity // self.packed_tail_multiple) * self.packed_tail_multiple
        return tokens * (self.parallel.context_parallel_size // self._pack_ranks)

    @property
    def stored_weight_format(self) -> StoredForm | None:
        """Form in which the weights of quantized layers are stored; None for the model's format."""
        return stored_weight_format(self.precision, self.parallel)

    @property
    def has_quantized_params(self) -> bool:
        """Whether the weights of quantized layers are stored in 8 or 4 bits."""
        return self.stored_weight_format is not None

    @property
    def replaces_te_weights(self) -> bool:
        """Whether weights are stored in a form that TransformerEngine's layers neither take nor can do without."""
        return (stored := self.stored_weight_format) is not None and stored.library_cannot_hold

    @property
    def te_quantizes(self) -> tuple[bool, bool]:
        """Whether TransformerEngine computes the quantized GEMMs of (linears, experts), if it can be used at all."""
        linears = can_quantize_linears(self.precision, self.replaces_te_weights)
        ep, fused = self.parallel.expert_model_parallel_size, self.model.use_transformer_engine_op_fuser
        experts = can_quantize_experts(
            self.moe, self.precision, ep, replaces_weights=self.replaces_te_weights, fused=fused
        ) and not leaves_counts_on_device(
            self.moe, self.precision, typed=self.typed, captured=self.training.captured_modules, fused=fused
        )
        return linears and not self.parallel.has_deferred_wgrad, experts

    @property
    def te_attends(self) -> bool:
        """Whether TransformerEngine computes attention to full sequences, if it can be used at all."""
        backend, cp_size = get_attention_backend(self.model), self.parallel.context_parallel_size
        is_requested = get_implementation(self.precision).has_attention and backend.supports(
            AttentionBackendCapability.LIBRARY
        )
        return is_requested and attention_problem(self.model, self.precision.params_dtype_name, cp_size) is None

    @property
    def caches_expert_casts(self) -> bool:
        """Whether this program's experts with counts on the device keep casts of their weights in an iteration.

        FSDP gathers weights per layer; a graph of a part with the experts would hold the first microbatch's cast or
        none.
        """
        return not self.parallel.has_sharded_params and self.training.captured_modules.isdisjoint(("layer", "moe"))

    def as_dict(self) -> dict[str, object]:
        """Every flag by destination, flat, in order of declaration (for logs and for the checkpoint's record)."""
        return {f.name: getattr(getattr(self, name), f.name) for name, cls in SECTIONS for f in dataclasses.fields(cls)}


def freeze(settings: Settings, world_size: int | None, unbuildable: Iterable[Violation] = ()) -> Arguments:
    """Freeze resolved settings into sections."""
    sections: dict[str, Any] = {
        name: cls(**{f.name: settings.values[f.name] for f in dataclasses.fields(cls)}) for name, cls in SECTIONS
    }
    return Arguments(
        **sections,
        source=MappingProxyType(dict(settings.source)),
        typed=frozenset(settings.typed),
        spelling=MappingProxyType(dict(settings.spelling)),
        notes=tuple(settings.lines()),
        recipe_env=MappingProxyType(dict(settings.recipe_env)),
        world_size=world_size,
        unbuildable=tuple(unbuildable),
    )


def from_values(values: Mapping[str, object], world_size: int) -> Arguments:
    """Make arguments of resolved values by destination, as a run records them; what is not named is at its default.

    Raises: ValueError for a value of a type that no flag has.
    """
    settings = Settings(OPTIONS)
    for name, value in values.items():
        if name not in OPTIONS:
            continue
        if OPTIONS[name].read is schema.int_pair and isinstance(value, list):
            value = tuple(value)  # JSON has no tuples
        if isinstance(value, dict):
            raise ValueError(f"{name}: {value!r} is no value of a flag")
        settings.values[name] = value
    return freeze(settings, world_size)

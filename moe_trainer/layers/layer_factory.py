"""The layer factory: a record of layer constructors, chosen once when the model is built.

There are two: the local layers, and TransformerEngine's (te_layers.py), which is used where the package and a CUDA
device are present. Model code calls `factory.column_linear(...)` and does not know the library. Local experts are one
autograd function (ops/expert_mlp.py); a factory that has a grouped linear builds experts from two of them.

A factory also carries what all blocks of a model chunk share (`for_chunk`): the queue of weight gradients, the random
stream for tensor-parallel shards, the activation policy and the CUDA graphs.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from arguments import Arguments, te_support
from arguments.mechanisms.attention_backend_kinds.declaration import AttentionBackendCapability
from arguments.mechanisms.attention_backends import get_attention_backend
from arguments.mechanisms.implementations import LOCAL_LAYERS, TRANSFORMER_ENGINE, get_implementation
from arguments.mechanisms.offloaded_modules import OFFLOADED_MODULES
from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from arguments.precision import PrecisionArgs
from moe_trainer.backends import BackendPolicy
from moe_trainer.layers import te, te_layers, te_ops
from moe_trainer.layers.context_parallel import make_core_attention
from moe_trainer.layers.core_attention import BACKENDS, CoreAttention, backend_problem
from moe_trainer.layers.kernels import Kernels
from moe_trainer.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from moe_trainer.layers.norm import Norm
from moe_trainer.layers.tp_overlap import TpOverlap
from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.memory.cuda_graph import CudaGraphs
from moe_trainer.ops.grouped_gemm import GROUPED_MM_CAPABILITIES
from moe_trainer.parallel.overlap_threads import AlternatingExecutor
from moe_trainer.parallel.rng import ShardRNG
from moe_trainer.parallel.state import ParallelState
from moe_trainer.parallel.weight_grads import WeightGradQueue
from moe_trainer.quantization.config import QuantizationConfig, get_recipe
from moe_trainer.quantization.gemms import QuantizedGemms
from moe_trainer.quantization.recipe import QuantizationRecipe

logger = logging.getLogger(__name__)

TENSORS_OF_EXPERTS = frozenset(each.key for each in OFFLOADED_MODULES if each.saves_received)
"""Names of --recompute-modules and --offload-modules for tensors inside the experts."""


@dataclass(frozen=True)
class LayerFactory:
    """Constructors of one backend, with the signatures of the local classes.

    Attributes:
        column_linear: (in_features, out_features, *, name, group, init, bias, sequence_parallel, parts,
            gather_output, save_original_input).
        row_linear, replicated_linear: (in_features, out_features, *, name, group, init, bias, sequence_parallel,
            save_original_input).
        norm: (size, model, *, name, partial).
        core_attention: see layers/core_attention.py; `select_layer_factory` binds the context-parallel groups.
        grouped_linear: (num_experts, in_features, out_features, *, save_original_input), without bias. The constructor,
            or its result, may be None: see layers/te_experts.py.
        expert_mlp: (num_experts, (hidden, ffn, output)), without bias. The constructor, or its result, may be None: see
            layers/te_ops.py.
        self_attention, mlp, moe, router: what TransformerLayer and MoELayer build instead of the modules that the flags
            select, with the arguments of SelfAttention, MLP, MoELayer and TopKRouter; set by --spec.
        kernels: implementations of the small operations.
        queue: the chunk's weight-gradient queue; None if none is deferred.
        stream: the chunk's random stream of tensor-parallel shards; None if nothing is sharded.
        overlap_executor: interleaves passes around token exchange; None if passes run one after the other.
        activations: the chunk's recomputation and offloading.
        graphs: the chunk's CUDA graphs.
        precision: the chunk's quantization; None in high precision.
        quantize: of a layer (`for_layer`); makes the GEMMs of a linear from (name, is_sharded=, is_expert=), or None
            for high precision.
    """

    name: str
    column_linear: Callable[..., ColumnParallelLinear]
    row_linear: Callable[..., RowParallelLinear]
    replicated_linear: Callable[..., ReplicatedLinear]
    norm: Callable[..., nn.Module]
    core_attention: Callable[..., CoreAttention | te_layers.FusedAttention]
    grouped_linear: Callable[..., nn.Module | None] | None = None
    expert_mlp: Callable[..., nn.Module | None] | None = None
    self_attention: Callable[..., Any] | None = None
    mlp: Callable[..., Any] | None = None
    moe: Callable[..., Any] | None = None
    router: Callable[..., Any] | None = None
    kernels: Kernels = Kernels()
    queue: WeightGradQueue | None = None
    stream: ShardRNG | None = None
    overlap_executor: AlternatingExecutor | None = None
    activations: ActivationPolicy = field(default_factory=ActivationPolicy)
    graphs: CudaGraphs = field(default_factory=CudaGraphs)
    precision: QuantizationConfig | None = None
    quantize: Callable[..., QuantizedGemms | None] | None = None

    def for_chunk(
        self,
        queue: WeightGradQueue | None = None,
        stream: ShardRNG | None = None,
        overlap_executor: AlternatingExecutor | None = None,
        activations: ActivationPolicy | None = None,
        precision: QuantizationConfig | None = None,
        graphs: CudaGraphs | None = None,
    ) -> "LayerFactory":
        """Return the factory for the blocks of one model chunk."""
        return replace(
            self,
            queue=queue,
            stream=stream,
            overlap_executor=overlap_executor,
            activations=activations or ActivationPolicy(),
            precision=precision,
            graphs=graphs or CudaGraphs(),
            **self._linears(queue=queue),
        )

    def without_queue(self) -> "LayerFactory":
        """Return the factory for blocks whose weight gradients are never deferred."""
        return replace(self, queue=None, **self._linears(queue=None))

    def for_layer(self, layer_number: int) -> "LayerFactory":
        """Return the factory for one layer (counted from 1), with quantized GEMMs where the flags ask for them."""
        low = self.precision
        quantize = (
            functools.partial(
                low.make_gemms, quantizer=self.kernels.quantize, expert_kernels=self.kernels.expert_kernels
            )
            if low is not None and low.is_quantized_layer(layer_number)
            else None
        )
        return replace(self, quantize=quantize, **self._linears(quantize=quantize))

    def lm_head_quantizer(self) -> Callable[..., QuantizedGemms | None] | None:
        """Return what makes the output layer's quantized GEMMs; None if they are not."""
        low = self.precision
        return (
            functools.partial(low.make_gemms, quantizer=self.kernels.quantize)
            if low is not None and low.quantize_lm_head
            else None
        )

    def _linears(self, **options: object) -> dict[str, Any]:
        """Return the constructors of linears with further options bound."""
        optional = (kind for kind in ("grouped_linear", "expert_mlp") if getattr(self, kind) is not None)
        kinds = ("column_linear", "row_linear", "replicated_linear", *optional)
        return {kind: functools.partial(getattr(self, kind), **options) for kind in kinds}


LOCAL = LayerFactory(LOCAL_LAYERS.key, ColumnParallelLinear, RowParallelLinear, ReplicatedLinear, Norm, CoreAttention)


def select_layer_factory(
    args: Arguments,
    ps: ParallelState,
    backends: BackendPolicy = BackendPolicy(),
    kernels: Kernels = Kernels(),
    overlap: TpOverlap | None = None,
) -> LayerFactory:
    """Return the factory for --transformer-impl, with --cp-comm-type bound to the groups of `ps`.

    Where TransformerEngine (Megatron's default) cannot be used, the local layers replace it and the log says why, once;
    the same holds for single layers.

    Args:
        overlap: of tensor-parallel linears.

    Raises:
        MissingBackendError: if no fallback is allowed.
    """
    local = replace(
        LOCAL,
        norm=functools.partial(Norm, rms_norm=kernels.rms_norm),
        kernels=kernels,
        core_attention=functools.partial(make_core_attention, ps=ps, comm_types=tuple(args.parallel.cp_comm_type)),
    )
    if overlap is not None:
        local = replace(
            local,
            column_linear=functools.partial(ColumnParallelLinear, overlap=overlap),
            row_linear=functools.partial(RowParallelLinear, overlap=overlap),
        )
    implementation = get_implementation(args.precision)
    if implementation.package is None or not _has_transformer_engine(implementation.key, backends):
        backend = _attention_backend(args.model, args.precision, backends, for_all=True)
        return replace(local, core_attention=functools.partial(local.core_attention, backend=backend))
    return _FusedSelection(local, ps, backends, args).make_factory(overlap)


def _has_transformer_engine(transformer_impl: str, backends: BackendPolicy) -> bool:
    problem: str | None
    problem, remedy = "the layers work on CUDA devices, and this rank computes on a CPU", "Use --transformer-impl local"
    if backends.cuda:
        problem, remedy = te.problem("", *te_layers.NAMES), f"Install it ({te.INSTALL}), use --transformer-impl local"
    return backends.should_use(
        ("transformer_impl",),
        flag=f"--transformer-impl {transformer_impl}",
        problem=problem,
        remedy=remedy,
        instead="the local layers (plain torch)",
    )


def _attention_backend(
    model: ModelArgs, precision: PrecisionArgs, backends: BackendPolicy, *, for_all: bool
) -> SDPBackend | None:
    """Return torch's kernel for --attention-backend; None for torch's choice.

    Args:
        for_all: the local layers compute all attention, not only what TransformerEngine's cannot.

    Raises:
        MissingBackendError: if they cannot use it and no fallback is allowed.
    """
    backend, problem = get_attention_backend(model), backend_problem(model, precision.params_dtype_name, backends.cuda)
    if for_all:
        backends.should_use(
            ("attention_backend",),
            flag=f"--attention-backend {backend.key}",
            problem=problem,
            remedy="Use --attention-backend auto",
            instead="what torch chooses",
        )
    return BACKENDS.get(backend.key) if problem is None else None


@dataclass(frozen=True)
class _FusedSelection:
    """Selection of the layers that TransformerEngine computes; the log says why others are local."""

    local: LayerFactory
    ps: ParallelState
    backends: BackendPolicy
    args: Arguments

    @property
    def model(self) -> ModelArgs:
        return self.args.model

    @property
    def moe(self) -> MoEArgs:
        return self.args.moe

    @property
    def precision(self) -> PrecisionArgs:
        return self.args.precision

    def make_factory(self, overlap: TpOverlap | None) -> LayerFactory:
        """Return TransformerEngine's factory, with local layers where it does not support the flags."""
        recipe, stream, stored = get_recipe(self.precision), None, self.args.stored_weight_format
        defers = self.args.parallel.has_deferred_wgrad
        computed = recipe if recipe is not None and self._fits_recipe(recipe) else None
        attention_problem = te_support.attention_problem(self.model, self.precision.params_dtype_name, self.ps.cp.size)
        wanted = get_attention_backend(self.model).supports(AttentionBackendCapability.LIBRARY)
        attends = wanted and self._fits("core attention", attention_problem)
        self._fits("linears", "it cannot defer weight gradients pass by pass, as the schedule does" if defers else None)
        if attends and self.ps.cp.size > 1:
            stream = torch.cuda.Stream()
        experts = self._select_experts(recipe, computed) if self.moe.num_experts and self.moe.moe_grouped_gemm else {}
        _log_unused_kernels(self.local.kernels, computed is not None, **experts)
        layers = te_layers.FusedLayers(
            te.load(),
            self.ps,
            self.args.parallel.cp_comm_type,
            None if computed is None else te.autocast(computed),
            attends,
            stream,
            overlap=overlap,
            stores=stored is not None and stored.library_takes,
            backend=_attention_backend(self.model, self.precision, self.backends, for_all=not attends),
            **experts,
        )
        return replace(
            self.local,
            name=TRANSFORMER_ENGINE.key,
            column_linear=layers.column_linear,
            row_linear=layers.row_linear,
            replicated_linear=layers.replicated_linear,
            grouped_linear=layers.grouped_linear,
            expert_mlp=layers.expert_mlp,
            norm=layers.norm if self._norms_fit() else self.local.norm,
            core_attention=layers.core_attention,
        )

    def _fits_recipe(self, recipe: QuantizationRecipe) -> bool:
        """Return whether the library computes GEMMs with a recipe."""
        stored = self.args.stored_weight_format
        return self._fits(
            f"linears and experts with {recipe.name} scaling",
            te_support.recipe_problem(self.precision, stored is not None and stored.library_cannot_hold)
            or te.recipe_problem(recipe),
            loud=True,
        )

    def _fits(self, what: str, problem: str | None, loud: bool = False) -> bool:
        """Return whether there is no problem; `loud` for the GEMMs, which are what quantization is asked for."""
        # nothing types what stays local, so only --on-missing-backend error stops here
        return self.backends.should_use(
            (),
            flag="--transformer-impl transformer_engine",
            problem=problem and f"{what}: {problem}",
            remedy="Use --transformer-impl local",
            instead=f"the local layers for {what}",
            loud=loud,
        )

    def _select_experts(self, recipe: QuantizationRecipe | None, computed: QuantizationRecipe | None) -> dict[str, Any]:
        """Return the arguments of FusedLayers for experts; `computed`: the recipe, if the library's GEMMs have it."""
        fused = self._uses_operation_fuser()
        plain_host_problem, host_problem = (
            te_layers.host_counts_problem(self.precision, each, capability=self.backends.capability, moe=self.moe)
            for each in (None, recipe)
        )
        quantized, multiple = False, 1
        if computed is not None and not self._leaves_counts_on_device(computed, fused):
            problem = self._experts_problem(computed.alignment, fused, host_problem)
            quantized = self._fits(f"experts with {computed.name} scaling", problem, loud=True)
            if quantized:
                multiple = max(te.pad_multiple(computed), te_ops.PAD_MULTIPLE if fused else 1)
        return {
            "quantized_experts": quantized,
            "plain_experts": self._select_plain_experts(fused, plain_host_problem),
            "pad_multiple": multiple,
            "expert_ops": fused,
            "interleave_size": self.moe.moe_mlp_glu_interleave_size,
            "plain_host_problem": plain_host_problem,
            "quantized_host_problem": host_problem,
        }

    def _experts_problem(self, alignment: int, fused: bool, host_problem: str | None) -> str | None:
        """Return why the library cannot compute experts; None if it can.

        Args:
            host_problem: why the pipeline reads token counts on the host; None if it does not.
        """
        return te_layers.grouped_linear_problem(
            te.load(), self.model, self.moe, self.ps, alignment
        ) or te_support.stash_problem(self.moe, fused, host_problem)

    def _uses_operation_fuser(self) -> bool:
        if not self.model.use_transformer_engine_op_fuser:
            return False
        stored, training = self.args.stored_weight_format, self.args.training
        problem: str | None
        if stored is not None and stored.library_takes:
            problem = f"it cannot take weights that are stored in {stored.name}"
        else:
            inside = TENSORS_OF_EXPERTS & (training.recomputed_modules | training.offloaded_modules)
            problem = te_layers.expert_ops_problem(self.model, self.moe, inside)
        return self.backends.should_use(
            ("use_transformer_engine_op_fuser",),
            flag="--use-transformer-engine-op-fuser",
            problem=problem,
            remedy="Leave this flag out",
            instead="experts without the library's operation fuser",
            loud=True,
        )

    def _leaves_counts_on_device(self, recipe: QuantizationRecipe, fused: bool) -> bool:
        """Return whether quantized experts are local because the library's need token counts on the host; log it."""
        has_grouped_gemm = (
            self.backends.capability[0] in GROUPED_MM_CAPABILITIES or self.local.kernels.grouped_gemms is not None
        )
        leaves_counts = has_grouped_gemm and te_support.leaves_counts_on_device(
            self.moe,
            self.precision,
            typed=self.backends.typed,
            captured=self.args.training.captured_modules,
            fused=fused,
        )
        if leaves_counts:
            logger.info(
                "experts with %s scaling are computed by this program's grouped GEMMs, which read token counts on the "
                "device (--moe-expert-rank-capacity-factor); TransformerEngine's read them on the host",
                recipe.name,
            )
        return leaves_counts

    def _select_plain_experts(self, fused: bool, host_problem: str | None) -> bool:
        """Return whether the library computes experts in high precision."""
        bf16 = self.precision.params_dtype_name == "bf16"
        if bf16 and not fused:
            is_selected = (
                self.backends.capability >= te_layers.BF16_EXPERTS_FROM
                and not self._is_kernel_named(self.local.kernels.grouped_gemms is not None)
                and self.moe.moe_expert_rank_capacity_factor is None
                and self._experts_problem(1, fused, host_problem) is None
            )
        else:
            problem = self._experts_problem(1, fused, host_problem)
            is_selected = self._fits(f"experts in {self.precision.params_dtype_name}", problem)
        if bf16 and not is_selected:
            # torch's one GEMM for all experts saves less for backward (ops/expert_mlp.py), so nothing is missing: not
            # for `_fits`
            logger.info("experts in bf16 are computed by this program's own grouped GEMMs, not by TransformerEngine's")
        return is_selected

    def _norms_fit(self) -> bool:
        if self.model.normalization == "RMSNorm" and self._is_kernel_named(
            self.local.kernels.rms_norm is not Kernels.rms_norm
        ):
            logger.info("norms are those of --triton-kernels norm, not TransformerEngine's")
            return False
        problem = "it rounds the residual stream before the norm, not after it (--fp32-residual-connection)"
        return self._fits("norms", problem if self.model.fp32_residual_connection else None)

    def _is_kernel_named(self, is_selected: bool) -> bool:
        """Return whether a selected kernel of ours was named on the command line, which takes precedence."""
        return is_selected and "triton_kernels" in self.backends.typed


def _log_unused_kernels(
    kernels: Kernels, low: bool, quantized_experts: bool = False, plain_experts: bool = False, **_: object
) -> None:
    """Log kernels of --triton-kernels that the library's layers replace."""
    if kernels.quantize is not Kernels.quantize and low:
        logger.info("--triton-kernels quantize: not in TransformerEngine's linears, which quantize on their own")
    if kernels.grouped_gemms is not None and (quantized_experts or plain_experts):
        logger.info("--triton-kernels grouped-gemm: not in experts that TransformerEngine computes")

"""The kit of building blocks a model is made of: a record of constructors, chosen once at build.

Blocks call `kit.column_linear(...)` and the like; nothing else knows which library stands behind them. Local experts
need no grouped linear: they run as one autograd function (ops/expert_mlp.py). A kit that has one makes experts of two of them. There are
two kits: the local layers, and TransformerEngine's (te_layers.py), which is chosen where the package and a CUDA device are.

A kit also carries what all blocks of one model chunk share (`for_chunk`): the queue of weight gradients, which its linears
then know, the stream of random numbers for tensors that are cut over the tensor-parallel group, and what becomes of activations.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from arguments.precision import PrecisionArgs
from moe_trainer.backends import Backends
from moe_trainer.layers import te, te_layers
from moe_trainer.layers.context_parallel import make_core_attention
from moe_trainer.layers.core_attention import CoreAttention
from moe_trainer.layers.kernels import Kernels
from moe_trainer.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from moe_trainer.layers.norm import Norm
from moe_trainer.layers.precision import LowPrecision, recipe_of
from moe_trainer.memory.activations import Activations
from moe_trainer.memory.cuda_graph import Graphs
from moe_trainer.ops.fp8 import QuantizedProducts
from moe_trainer.parallel.baton import Baton
from moe_trainer.parallel.rng import ShardStream
from moe_trainer.parallel.state import ParallelState
from moe_trainer.parallel.weight_grads import WeightGradQueue
from moe_trainer.shape import library_products

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kit:
    """Constructors of one backend; the signatures are those of the local classes.

    column_linear: (in_features, out_features, *, name, group, init, bias, sequence_parallel, parts, gather_output)
    row_linear, replicated_linear: (in_features, out_features, *, name, group, init, bias, sequence_parallel)
    norm: (size, model, *, name, partial)
    core_attention: see layers/core_attention.py; `choose` binds the groups and kinds of context parallelism to it
    grouped_linear: (num_experts, in_features, out_features, *, keeps_input), without bias, or None, as a whole or of a layer: see
    layers/te_experts.py
    kernels: what the small operations run on
    queue: of the chunk, or None when its weight gradients never wait. stream: of the chunk, or None when nothing is cut.
    baton: handed over where tokens are exchanged, or None when passes run one after the other.
    activations: of the chunk; which of them are recomputed or go to the host. graphs: of the chunk; which parts are captured.
    precision: of the chunk; None in high precision. quantize: of a layer that it covers (`for_layer`): makes the products of a linear,
    of (name, cut=, expert=).
    """

    name: str
    column_linear: Callable[..., nn.Module]
    row_linear: Callable[..., nn.Module]
    replicated_linear: Callable[..., nn.Module]
    norm: Callable[..., nn.Module]
    core_attention: Callable[..., nn.Module]
    grouped_linear: Callable[..., nn.Module | None] | None = None
    kernels: Kernels = Kernels()
    queue: WeightGradQueue | None = None
    stream: ShardStream | None = None
    baton: Baton | None = None
    activations: Activations = field(default_factory=Activations)
    graphs: Graphs = field(default_factory=Graphs)
    precision: LowPrecision | None = None
    quantize: Callable[..., QuantizedProducts] | None = None

    def for_chunk(self, queue: WeightGradQueue | None = None, stream: ShardStream | None = None, baton: Baton | None = None,
                  activations: Activations | None = None, precision: LowPrecision | None = None, graphs: Graphs | None = None) -> "Kit":
        """The same kit for the blocks of one model chunk."""
        return replace(self, queue=queue, stream=stream, baton=baton, activations=activations or Activations(), precision=precision,
                       graphs=graphs or Graphs(), **self._linears(queue=queue))

    def for_layer(self, layer_number: int) -> "Kit":
        """The same kit for one layer (counted from 1): with quantised products where the flags ask for them."""
        low = self.precision
        quantize = functools.partial(low.products, quantizer=self.kernels.quantize) if low is not None and low.covers(layer_number) else None
        return replace(self, quantize=quantize, **self._linears(quantize=quantize))

    def for_head(self) -> Callable[..., QuantizedProducts] | None:
        """What makes quantised products for the output layer, of (name, cut=); None without --fp8-output-proj."""
        low = self.precision
        return functools.partial(low.products, quantizer=self.kernels.quantize) if low is not None and low.head else None

    def _linears(self, **options: object) -> dict[str, Callable[..., nn.Module]]:
        """The constructors of linears with further options."""
        kinds = ("column_linear", "row_linear", "replicated_linear", *(("grouped_linear",) if self.grouped_linear is not None else ()))
        return {kind: functools.partial(getattr(self, kind), **options) for kind in kinds}


LOCAL = Kit("local", ColumnParallelLinear, RowParallelLinear, ReplicatedLinear, Norm, CoreAttention)


def choose(transformer_impl: str, ps: ParallelState, cp_comm_types: Sequence[str], backends: Backends = Backends(),
           kernels: Kernels = Kernels(), *, model: ModelArgs = ModelArgs(), moe: MoEArgs = MoEArgs(),
           precision: PrecisionArgs = PrecisionArgs(), defers: bool = False, stores: bool = False) -> Kit:
    """Return the kit for --transformer-impl, and for --cp-comm-type over the groups of `ps`.

    model, moe, precision: of the layers to come. defers: weight gradients may wait. stores: weights are kept in 8 bits.
    Where TransformerEngine (Megatron's default) cannot be used and may be done without, it is the local kit, and the log says why,
    once; so it does for layers that stay local in its kit. Raises: MissingBackend where it may not.
    """
    local = replace(
        LOCAL, norm=functools.partial(Norm, rms_norm=kernels.rms_norm), kernels=kernels,
        core_attention=functools.partial(make_core_attention, ps=ps, comm_types=tuple(cp_comm_types)))
    if transformer_impl == "local" or not _has_transformer_engine(transformer_impl, backends):
        return local
    return _fused(local, ps, cp_comm_types, backends, model, moe, precision, defers, stores)


def _has_transformer_engine(transformer_impl: str, backends: Backends) -> bool:
    problem, remedy = "the layers work on CUDA devices, and this rank computes on a CPU", "Use --transformer-impl local"
    if backends.cuda:
        problem, remedy = te.problem("", *te_layers.NAMES), f"Install it ({te.INSTALL}), use --transformer-impl local"
    return backends.use(("transformer_impl",), flag=f"--transformer-impl {transformer_impl}", problem=problem, remedy=remedy,
                        instead="the local layers (plain torch)")


def _fused(local: Kit, ps: ParallelState, cp_comm_types: Sequence[str], backends: Backends, model: ModelArgs, moe: MoEArgs,
           precision: PrecisionArgs, defers: bool, stores: bool) -> Kit:
    """The kit of TransformerEngine, with the local layers where it does not do what the flags ask for."""

    def fits(what: str, problem: str | None, loud: bool = False) -> bool:
        # nobody types what stays local, so only --on-missing-backend error stops here
        return backends.use((), flag="--transformer-impl transformer_engine", problem=problem and f"{what}: {problem}",
                            remedy="Use --transformer-impl local", instead=f"the local layers for {what}", loud=loud)

    recipe, stream = recipe_of(precision), None
    # loud: the products are what 8 and 4 bits are asked for
    low = recipe is not None and fits(f"linears and experts with {recipe.name} scaling",
                                      library_products.recipe_problem(precision, stores) or te.recipe_problem(recipe), loud=True)
    attends = fits("core attention", te_layers.attention_problem(model, precision.params_dtype_name, ps))
    fits("linears", "it puts off all weight gradients or none, and the schedule decides pass by pass" if defers else None)
    if attends and ps.cp.size > 1:
        stream = torch.cuda.Stream()
    experts = {}
    if moe.num_experts and moe.moe_grouped_gemm:
        def experts_problem(alignment: int) -> str | None:
            return te_layers.experts_problem(te.load(), model, moe, ps, alignment)

        quantized = low and fits(f"experts with {recipe.name} scaling", experts_problem(recipe.alignment), loud=True)
        bf16 = precision.params_dtype_name == "bf16"
        named = "triton_kernels" in backends.typed and local.kernels.products is not None
        # the library's reads counts on the host, which a budget for received rows can do without
        plain = (backends.capability >= te_layers.BF16_EXPERTS_FROM and not named and moe.moe_expert_rank_capacity_factor is None
                 and experts_problem(1) is None if bf16
                 else fits(f"experts in {precision.params_dtype_name}", experts_problem(1)))
        if bf16 and not plain:
            # torch's one product for all experts keeps less for backward (ops/expert_mlp.py), so nothing is missing: not for `fits`
            logger.info("experts in bf16 are computed by this program's own grouped products, not by TransformerEngine's")
        experts = {"quantized_experts": quantized, "plain_experts": plain, "row_multiple": te.row_multiple(recipe) if quantized else 1}
    _tell_idle_kernels(local.kernels, low, **experts)
    layers = te_layers.FusedLayers(te.load(), ps, tuple(cp_comm_types), te.autocast(recipe) if low else None, attends, stream, **experts)
    named = "triton_kernels" in backends.typed and local.kernels.rms_norm is not Kernels.rms_norm and model.normalization == "RMSNorm"
    if named:  # whoever names a kernel wants that one
        logger.info("norms are those of --triton-kernels norm, not TransformerEngine's")
    norms_fit = not named and fits(
        "norms", "it rounds the residual stream before the norm, not behind it (--fp32-residual-connection)"
        if model.fp32_residual_connection else None)
    return replace(
        local, name="transformer_engine", column_linear=layers.column_linear, row_linear=layers.row_linear,
        replicated_linear=layers.replicated_linear, grouped_linear=layers.grouped_linear, norm=layers.norm if norms_fit else local.norm,
        core_attention=layers.core_attention)


def _tell_idle_kernels(kernels: Kernels, low: bool, quantized_experts: bool = False, plain_experts: bool = False, **_: object) -> None:
    """Kernels of --triton-kernels that the library's layers displace, wholly or in part."""
    if kernels.quantize is not Kernels.quantize and low:
        logger.info("--triton-kernels quantize: not in TransformerEngine's linears, which quantise by themselves")
    if kernels.products is not None and (quantized_experts or plain_experts):
        logger.info("--triton-kernels grouped-gemm: not in experts that TransformerEngine computes")

"""Which layers multiply in 8 or 4 bits, and what happens to their scales between iterations.

Linears of attention, feed-forward, experts, shared experts and multi-token prediction are quantised, the output layer with
--fp8-output-proj; embedding, router, gates, norms and attention's core are not. With --first-last-layers-bf16 whole layers at both ends
are not either; the layers of multi-token prediction are, always, as in Megatron-Core.

Delayed scaling: at the end of an iteration the maxima of every layer are taken over the microbatches and over all ranks of the stage that
share a model replica or its data (ps.tp_dp_cp, Megatron-Core's amax reduction group), in one all-reduce. All experts of a layer share
their scales. So the state is the same on all these ranks and for every mapping, and a checkpoint keeps it under the layer's name.

With --fp8-param-gather the weights of quantised layers are kept in 8 bits from the moment the optimizer takes them over
(optim/stored_state.py) wherever shape/stored_weights.py says so. A recipe can be stored if one set of bytes serves the output and the gradient of x; MXFP8, whose blocks lie along
the contracted dimension of each, keeps and gathers bf16, as Megatron-LM gathers it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from arguments.model import ModelArgs
from arguments.precision import PrecisionArgs
from moe_trainer.layers.precision_file import Formats, PrecisionFile, PrecisionFileError
from moe_trainer.layers.te_experts import CastOnce
from moe_trainer.ops.fp8 import Delayed, QuantizedProducts, Recipe, make_recipe
from moe_trainer.ops.quantize import Quantized, quantize
from moe_trainer.ops.stored_weight import StoredWeight
from moe_trainer.parallel.collectives import all_reduce
from moe_trainer.parallel.rng import RoundingNoise
from moe_trainer.parallel.state import ParallelState


def recipe_of(precision: PrecisionArgs) -> Recipe | None:
    """The recipe that the flags ask for; None in high precision.

    Raises: ValueError for recipes whose quantisers are Python code of the user.
    """
    if not precision.fp8 and not precision.fp4:
        return None
    name = precision.fp8_recipe if precision.fp8 else precision.fp4_recipe
    if name == "custom":
        raise ValueError("--fp8-recipe custom and --fp4-recipe custom take quantisers of TransformerEngine, which this version does not run")
    delayed = Delayed(precision.fp8_margin, precision.fp8_amax_history_len, precision.fp8_amax_compute_algo == "max")
    return make_recipe(name, hybrid=precision.fp8 == "hybrid", wgrad=precision.fp8_wgrad or not precision.fp8, delayed=delayed)


@dataclass(frozen=True)
class LowPrecision:
    """What the linears of one model chunk need to be quantised.

    bf16_first, bf16_last: layers at the ends of num_layers that stay in high precision. seed: of stochastic rounding. head: is the
    output layer quantised? file: formats of single layers, which come before `recipe`.
    """

    recipe: Recipe
    num_layers: int
    bf16_first: int
    bf16_last: int
    seed: int
    ps: ParallelState
    head: bool = False
    file: PrecisionFile | None = None

    @staticmethod
    def of(precision: PrecisionArgs, model: ModelArgs, seed: int, ps: ParallelState, stores: bool = False) -> "LowPrecision | None":
        """What the flags ask for; None in high precision. stores: weights are kept in 8 bits. Raises: PrecisionFileError."""
        recipe, file, path = recipe_of(precision), None, precision.te_precision_config_file
        if recipe is None:
            return None
        if path is not None:
            if stores:
                raise PrecisionFileError("--te-precision-config-file does not go with --fp8-param-gather: weights are stored in one format")
            file = PrecisionFile.load(path, recipe)
        ends = (precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16)
        return LowPrecision(recipe, model.num_layers, *(ends if precision.first_last_layers_bf16 else (0, 0)), seed, ps,
                            precision.fp8_output_proj, file)

    def covers(self, layer_number: int) -> bool:
        """Is a layer (counted from 1; multi-token prediction behind the decoder) quantised?"""
        return self.bf16_first < layer_number <= self.num_layers - self.bf16_last or layer_number > self.num_layers

    def products(self, name: str, *, cut: bool, expert: bool = False,
                 quantizer: Callable[..., Quantized] = quantize) -> QuantizedProducts | None:
        """The products of a linear. cut: the ranks of tp hold different parts of it, or apply it to different rows; expert: it is the
        stack of a rank's experts; quantizer: see QuantizedProducts. Ranks of tp that do the same round the same. None: it stays in high
        precision."""
        formats = Formats(self.recipe, self.recipe) if self.file is None else self.file.formats(name, self.recipe)
        if formats.training is None:
            return None
        ps = self.ps
        if expert:
            place = (f"ep {ps.ep.rank}", f"etp {ps.etp.rank}", f"edp {ps.edp.rank}")
        else:
            place = (f"dp_cp {ps.dp_cp.rank}", f"tp {ps.tp.rank if cut else 0}")
        products = QuantizedProducts(formats.training, name, RoundingNoise(self.seed, name, *place), quantizer)
        products.evaluation = formats.evaluation
        return products


def store_weights(chunks: Iterable[nn.Module]) -> int:
    """Mark the weights of all quantised layers to be kept in 8 bits: whoever flattens the parameters does it. Returns: their elements."""
    count = 0
    for chunk in chunks:
        for module in chunk.modules():
            for weight, products in getattr(module, "quantized_weights", tuple)():
                products.stored = weight.stored = StoredWeight(weight.shape, products.recipe.weight, weight.dtype, weight.device,
                                                               products.weight_scale)
                count += weight.numel()
    return count


def find_quantized(chunk: nn.Module) -> tuple[QuantizedProducts, ...]:
    """The products of all layers of a chunk, in order of the model: for its builder, who keeps them as `quantized`."""
    return tuple(module for module in chunk.modules() if isinstance(module, QuantizedProducts))


def quantized_products(chunks: Iterable[nn.Module]) -> Iterator[QuantizedProducts]:
    """Those of all layers of built chunks, in order of the model."""
    return (products for chunk in chunks for products in chunk.quantized)


def begin_iteration(chunks: Iterable[nn.Module], iteration: int) -> None:
    """Call it before the microbatches of an iteration."""
    for products in quantized_products(chunks):
        if products.rounding is not None:
            products.rounding.begin(iteration)


def find_casts(chunk: nn.Module) -> tuple[CastOnce, ...]:
    """Those of all modules of a chunk: for its builder, who keeps them as `casts` where they may be kept from one call to another."""
    found = (getattr(module, "casts", None) for module in chunk.modules())
    return tuple(casts for casts in found if isinstance(casts, CastOnce))


@contextmanager
def casting_once(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Weights stay what they are inside: a library that casts them to 8 bits does it once."""
    found = [casts for chunk in chunks for casts in chunk.casts]
    try:
        for casts in found:
            casts.due = True
        yield
    finally:
        for casts in found:
            casts.due = None


def forget_maxima(chunks: Iterable[nn.Module]) -> None:
    """Drop the maxima of the iteration under way: it is repeated, or skipped."""
    for products in quantized_products(chunks):
        if products.recipe.delayed is not None:
            products.amax.zero_()


@torch.no_grad()
def update_scales(chunks: Iterable[nn.Module], ps: ParallelState) -> None:
    """End an iteration of delayed scaling: new scales from the maxima of all ranks.

    Communication: three fp32 numbers a linear, maximum over ps.tp_dp_cp. Nothing to do with other recipes.
    """
    found = [products for products in quantized_products(chunks) if products.recipe.delayed is not None]
    if not found:
        return
    together = all_reduce(torch.stack([products.amax for products in found]), ps.tp_dp_cp, op="max")
    for products, amax_3 in zip(found, together):
        products.advance(amax_3)


def scaling_state(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The state of delayed scaling that a checkpoint keeps, by a name that does not depend on the mapping."""
    for products in quantized_products([chunk]):
        if products.recipe.delayed is not None:
            yield f"fp8.{products.name}.scaling", products.scaling

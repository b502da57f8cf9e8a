"""Which layers multiply in a narrower format than the model's.

Quantized are the linears of attention, MLPs, experts, shared experts and multi-token prediction, and the output layer
with --fp8-output-proj. Embedding, router, gates, norms and core attention are not. --first-last-layers-bf16 leaves
layers at both ends unquantized, except those of multi-token prediction, as in Megatron-Core.
"""

from collections.abc import Callable
from dataclasses import dataclass

from arguments.mechanisms.formats import quantized_format, quantizes_weight_gradients
from arguments.model import ModelArgs
from arguments.precision import PrecisionArgs
from moe_trainer.parallel.rng import StochasticRoundingRNG
from moe_trainer.parallel.state import ParallelState
from moe_trainer.quantization.custom_recipe import CustomRecipe
from moe_trainer.quantization.gemms import QuantizedGemms
from moe_trainer.quantization.precision_file import Formats, PrecisionFile, PrecisionFileError
from moe_trainer.quantization.quantize import QuantizedTensor, quantize
from moe_trainer.quantization.recipe import DelayedScaling, QuantizationRecipe, make_recipe
from moe_trainer.quantization.scaled_grouped import ExpertKernels


def get_recipe(precision: PrecisionArgs) -> QuantizationRecipe | None:
    """Return the recipe of the flags, or None in high precision.

    Raises:
        QuantizerFactoryError: if a factory chooses the formats and cannot be imported.
    """
    fmt = quantized_format(precision)
    if fmt is None:
        return None
    hybrid, wgrad = getattr(precision, fmt.flags.name) == "hybrid", quantizes_weight_gradients(precision)
    if fmt.is_custom:
        flag, path = f"--{fmt.flags.factory.replace('_', '-')}", getattr(precision, fmt.flags.factory)
        return CustomRecipe.load(flag, path or "", hybrid, wgrad).representative()
    delayed = DelayedScaling(
        precision.fp8_margin, precision.fp8_amax_history_len, precision.fp8_amax_compute_algo == "max"
    )
    return make_recipe(fmt.key, hybrid=hybrid, wgrad=wgrad, delayed=delayed)


@dataclass(frozen=True)
class QuantizationConfig:
    """Quantization of the linears of one model chunk.

    Args:
        bf16_first, bf16_last: layers at the ends of num_layers that stay in high precision.
        seed: of stochastic rounding.
        quantize_lm_head: whether the output layer is quantized.
        file: recipes of single layers, which override `recipe`.
    """

    recipe: QuantizationRecipe
    num_layers: int
    bf16_first: int
    bf16_last: int
    seed: int
    ps: ParallelState
    quantize_lm_head: bool = False
    file: PrecisionFile | None = None

    @staticmethod
    def from_args(
        precision: PrecisionArgs, model: ModelArgs, seed: int, ps: ParallelState, stores: bool = False
    ) -> "QuantizationConfig | None":
        """Build the configuration of the flags; None in high precision.

        Args:
            stores: weights are stored in the format.

        Raises:
            PrecisionFileError: if the file is invalid or contradicts the flags.
        """
        recipe, file, path = get_recipe(precision), None, precision.te_precision_config_file
        if recipe is None:
            return None
        if path is not None:
            if stores:
                raise PrecisionFileError(
                    "--te-precision-config-file does not go with --fp8-param-gather: weights are stored in one format"
                )
            file = PrecisionFile.load(path, recipe)
        ends = (precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16)
        return QuantizationConfig(
            recipe,
            model.num_layers,
            *(ends if precision.first_last_layers_bf16 else (0, 0)),
            seed,
            ps,
            precision.fp8_output_proj,
            file,
        )

    def is_quantized_layer(self, layer_number: int) -> bool:
        """Return whether a layer is quantized (counted from 1, multi-token prediction after the decoder)."""
        return self.bf16_first < layer_number <= self.num_layers - self.bf16_last or layer_number > self.num_layers

    def make_gemms(
        self,
        name: str,
        *,
        is_sharded: bool,
        is_expert: bool = False,
        quantizer: Callable[..., QuantizedTensor] = quantize,
        expert_kernels: ExpertKernels | None = None,
    ) -> QuantizedGemms | None:
        """Make the GEMMs of a linear; None if it stays in high precision.

        Args:
            is_sharded: tensor-parallel ranks hold different shards of it, or apply it to different tokens. Otherwise
                they round alike.
            is_expert: it is the stacked weight of a rank's experts.
            quantizer, expert_kernels: see QuantizedGemms.
        """
        recipe = self.recipe if self.recipe.custom is None else self.recipe.custom.recipe(name, is_expert)
        formats = Formats(recipe, recipe) if self.file is None else self.file.formats(name, self.recipe)
        if formats.training is None:
            return None
        ps = self.ps
        place: tuple[str, ...]
        if is_expert:
            place = (f"ep {ps.ep.rank}", f"etp {ps.etp.rank}", f"edp {ps.edp.rank}")
        else:
            place = (f"dp_cp {ps.dp_cp.rank}", f"tp {ps.tp.rank if is_sharded else 0}")
        rounding = StochasticRoundingRNG(self.seed, name, *place)
        gemms = QuantizedGemms(formats.training, name, rounding, quantizer, expert_kernels)
        gemms.evaluation = formats.evaluation
        return gemms

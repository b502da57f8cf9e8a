"""The three GEMMs of a linear layer with quantized operands.

| GEMM | of | contracted over |
|---|---|---|
| output | x [R, K], weight [N, K] | K |
| input gradient | gradient [R, N], weight transposed [K, N] | N |
| weight gradient | gradient transposed [N, R], x transposed [K, R] | R, the tokens |

Each operand is quantized from high precision with its blocks along the contracted dimension; see
docs/design/quantization.md.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from moe_trainer.ops.gemms import UnquantizedGemms, WgradFn, multiply
from moe_trainer.quantization.grouped import (
    BothOperands,
    GroupedOperand,
    TokenGroups,
    grouped_mm_of_tokens,
    grouped_mm_over_tokens,
    quantize_tokens,
)
from moe_trainer.quantization.quantize import (
    QuantizedTensor,
    Scaling,
    compute_amax,
    compute_scale,
    quantize,
)
from moe_trainer.quantization.recipe import DelayedScaling, QuantizationRecipe
from moe_trainer.quantization.saved_input import SavedInput, SavedTokens
from moe_trainer.quantization.scaled_grouped import (
    ExpertKernels,
    StackedWeights,
    can_use_native_grouped_mm,
    native_grouped_mm,
)
from moe_trainer.quantization.scaled_layouts import TILE_ROWS
from moe_trainer.quantization.scaled_mm import MX, gemm_kind, scaled_mm
from moe_trainer.quantization.stored_weight import StoredMatrix, StoredWeight

X, WEIGHT, GRAD = 0, 1, 2
"""Operands with separate scales: rows of the state of delayed scaling."""

Pair = tuple[Tensor, Tensor | StoredMatrix]
"""The rows of an expert, or their gradient, and its weight."""


class NoiseSource(Protocol):
    """Source of noise for stochastic rounding (parallel/rng.py)."""

    def begin(self, iteration: int) -> None:
        """Start the noise of an iteration."""

    def generator(self, role: str, device: torch.device) -> torch.Generator:
        """Return the generator for the tensors of this role."""


def quantized_mm(
    a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, narrow: torch.dtype | None = None
) -> Tensor:
    """Return a [M, K] @ b [N, K]^T, accumulated in fp32, in `dtype`; `narrow`: see scaled_mm."""
    native = scaled_mm(a, b, dtype, narrow)
    return (a.dequantized() @ b.dequantized().t()).to(dtype) if native is None else native


class UnquantizedExpertGemms(UnquantizedGemms, nn.Module):
    """GEMMs of an unquantized linear of experts whose other linear is quantized; same interface as QuantizedGemms."""

    token_multiple = 1
    cached_weights = None

    def quantize_both(self, x_CK: Tensor, is_grad: bool) -> None:
        """Return None: nothing is quantized."""

    def grouped_output(self, x_CK: Tensor, weight_eNK: Tensor, groups: TokenGroups, both: None = None) -> Tensor:
        """Return `output` of every expert, whose counts are on the device."""
        return groups.gemms.forward(x_CK, weight_eNK, groups.offsets_e)

    def grouped_input_grad(self, grad_CN: Tensor, weight_eNK: Tensor, groups: TokenGroups, both: None = None) -> Tensor:
        """Return `input_grad` of every expert, whose counts are on the device."""
        return groups.gemms.input_grad(grad_CN, weight_eNK, groups.offsets_e)

    def make_grouped_wgrad_fn(self, grad_CN: Tensor, x_CK: Tensor, groups: TokenGroups, both: None = None) -> WgradFn:
        """Return a function that computes `weight_grad` of every expert, [e, N, K], in the dtype of the tokens."""
        return lambda dtype=None: groups.gemms.weight_grad(grad_CN, x_CK, groups.offsets_e)

    def outputs(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """Yield `output` of every pair."""
        return (self.output(*pair) for pair in pairs)

    def input_grads(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """Yield `input_grad` of every pair."""
        return (self.input_grad(*pair) for pair in pairs)

    def expert_weight(self, weights_eNK: Tensor, expert: int) -> Tensor:
        """Return one weight of the stack."""
        return weights_eNK[expert]

    def saved_input(self, x_RK: Tensor) -> None:
        """Return None: x itself is saved for backward."""

    def saved_tokens(self, x_CK: Tensor, groups: TokenGroups, both: None = None) -> None:
        """Return None: x itself is saved for backward."""


class QuantizedGemms(nn.Module):
    """GEMMs of one linear, or of all experts of one, which share the state of delayed scaling.

    Attributes:
        scaling: fp32 buffer [3, 1 + L] of delayed scaling: for x, weight and gradient the scale (0: none yet, used as
            1) and the amax history, latest first.
        amax: fp32 buffer [3], maxima of the current iteration.
        stored_weight: the weight, if it is stored in 8 or 4 bits.
        evaluation: recipe of evaluation if it differs (then neither is delayed); None for high precision.
        cached_weights: quantized experts by whether they are transposed, and the maximum of each, while weights do not
            change and counts are on the device (iteration.py: cached_weight_casts); None if none are cached.
    """

    scaling: Tensor
    amax: Tensor
    stored_weight: StoredWeight | None = None
    cached_weights: dict[bool, tuple[StackedWeights, Tensor | None]] | None = None
    is_quantized = True

    def __init__(
        self,
        recipe: QuantizationRecipe,
        name: str,
        rounding: NoiseSource | None = None,
        quantizer: Callable[..., QuantizedTensor] = quantize,
        expert_kernels: ExpertKernels | None = None,
    ):
        """Create the GEMMs of the linear `name`.

        Args:
            quantizer: `quantize`, or a kernel with the same signature and results.
            expert_kernels: kernels for experts whose counts are on the device.
        """
        super().__init__()
        self.recipe, self.name, self.rounding = recipe, name, rounding
        self.quantizer, self.expert_kernels = quantizer, expert_kernels
        self.evaluation: QuantizationRecipe | None = recipe
        if recipe.delayed is not None:
            self.register_buffer("scaling", torch.zeros(3, 1 + recipe.delayed.history), persistent=False)
            self.register_buffer("amax", torch.zeros(3), persistent=False)

    @property
    def token_multiple(self) -> int:
        """Multiple of tokens per expert with which blocks and tiles of scales never cover two experts."""
        tile = TILE_ROWS if gemm_kind(self.recipe.x, self.recipe.weight) == MX else 1
        return max(self.recipe.alignment, self.recipe.grad_t.cols, tile)

    def expert_weight(self, weights_eNK: Tensor, expert: int) -> Tensor | StoredMatrix:
        """Return one weight of a stack, as the GEMMs take it."""
        return weights_eNK[expert] if self.stored_weight is None else self.stored_weight[expert]

    def output(self, x_RK: Tensor, weight_NK: Tensor | StoredMatrix, dtype: torch.dtype | None = None) -> Tensor:
        """Return x @ weight^T in `dtype` or that of x. x may have any leading dimensions."""
        if not self.training and self.evaluation != self.recipe:
            # stored weights have one recipe (config.py)
            return self._evaluated(x_RK, cast(Tensor, weight_NK), dtype or x_RK.dtype)
        flat = x_RK.reshape(-1, x_RK.shape[-1])
        y_RN = quantized_mm(
            self._quantize(flat, self.recipe.x, X), self._weight(weight_NK, False, x_RK.dtype), dtype or x_RK.dtype
        )
        return y_RN.view(*x_RK.shape[:-1], -1)

    def _evaluated(self, x_RK: Tensor, weight_NK: Tensor, dtype: torch.dtype) -> Tensor:
        if self.evaluation is None:
            return UnquantizedGemms().output(x_RK, weight_NK, dtype)
        flat = x_RK.reshape(-1, x_RK.shape[-1])
        y_RN = quantized_mm(
            self.quantizer(flat, self.evaluation.x), self.quantizer(weight_NK, self.evaluation.weight), dtype
        )
        return y_RN.view(*x_RK.shape[:-1], -1)

    def input_grad(self, grad_RN: Tensor, weight_NK: Tensor | StoredMatrix) -> Tensor:
        """Return grad @ weight in the dtype of grad, which may have any leading dimensions."""
        flat = grad_RN.reshape(-1, grad_RN.shape[-1])
        grad = self._quantize(flat, self.recipe.grad, GRAD, "input")
        grad_RK = quantized_mm(grad, self._weight(weight_NK, True, grad_RN.dtype), grad_RN.dtype)
        return grad_RK.view(*grad_RN.shape[:-1], -1)

    def outputs(self, pairs: Iterable[Pair]) -> Iterator[Tensor]:
        """Yield `output` of the tokens and the weight of every expert that has tokens.

        One by one as the pairs are consumed, or all in one call where the device can.
        """
        return self._of_experts(pairs, False)

    def input_grads(self, pairs: Iterable[Pair]) -> Iterator[Tensor]:
        """Yield `input_grad` of every expert that has tokens, like `outputs`."""
        return self._of_experts(pairs, True)

    def quantize_both(self, x_CK: Tensor, is_grad: bool) -> BothOperands | None:
        """Quantize tokens, or their gradients, for the output or the input gradient and for the weight gradient.

        None if one read does not do for both.
        """
        recipe = self.recipe
        scaling, other = (recipe.grad, recipe.grad_t) if is_grad else (recipe.x, recipe.x_t)
        if self.expert_kernels is None or not (recipe.wgrad and self.training) or scaling != other:
            return None
        both = self.expert_kernels.quantize_both(x_CK, scaling)
        return None if both is None else BothOperands(*map(GroupedOperand.of_blocks, both))

    def grouped_output(
        self, x_CK: Tensor, weight_eNK: Tensor, groups: TokenGroups, both: BothOperands | None = None
    ) -> Tensor:
        """Return `output` of every expert, whose counts are on the device.

        both: what quantize_both has made of x.
        """
        x = self._quantize_tokens(x_CK, self.recipe.x, X, groups) if both is None else both.rows
        weights = self._expert_weights(weight_eNK, False, x_CK.dtype, groups)
        return grouped_mm_of_tokens(x, weights, groups, x_CK.dtype, self.expert_kernels)

    def grouped_input_grad(
        self, grad_CN: Tensor, weight_eNK: Tensor, groups: TokenGroups, both: BothOperands | None = None
    ) -> Tensor:
        """Return `input_grad` of every expert, whose counts are on the device.

        both: what quantize_both has made of grad.
        """
        grad = self._quantize_tokens(grad_CN, self.recipe.grad, GRAD, groups, "input") if both is None else both.rows
        weights = self._expert_weights(weight_eNK, True, grad_CN.dtype, groups)
        return grouped_mm_of_tokens(grad, weights, groups, grad_CN.dtype, self.expert_kernels)

    def saved_tokens(self, x_CK: Tensor, groups: TokenGroups, both: BothOperands | None = None) -> SavedTokens | None:
        """Return x as make_grouped_wgrad_fn takes it, for backward; None if x itself is to be saved."""
        if not self.recipe.wgrad or not self.training:
            return None
        if both is not None:
            return SavedTokens.of(both.columns)
        scale = self._scale(X)
        return SavedTokens.of(quantize_tokens(x_CK, self.recipe.x_t, groups, self.quantizer, scale, transposed=True))

    def make_grouped_wgrad_fn(
        self, grad_CN: Tensor, x: Tensor | SavedTokens, groups: TokenGroups, both: BothOperands | None = None
    ) -> WgradFn:
        """Return a function that computes `weight_grad` of every expert, with the scales of this moment.

        x [C, K], or what `saved_tokens` has made of it; both: what quantize_both has made of grad.
        """
        self._note_tokens(GRAD, grad_CN, groups)
        if isinstance(x, Tensor) and not self.recipe.wgrad:
            return lambda dtype=None: groups.gemms.weight_grad(grad_CN, x, groups.offsets_e)
        noise = self._noise(self.recipe.grad_t, "weight", grad_CN.device)
        scales = self._scale(GRAD), self._scale(X)
        given: Tensor | GroupedOperand = grad_CN if both is None else both.columns
        narrow = grad_CN.dtype

        def operand(
            tokens: Tensor | SavedTokens | GroupedOperand,
            scaling: Scaling,
            scale: Tensor | None,
            noise: torch.Generator | None,
        ) -> GroupedOperand:
            if isinstance(tokens, GroupedOperand):
                return tokens
            if isinstance(tokens, SavedTokens):
                return tokens.operand(groups)
            return quantize_tokens(tokens, scaling, groups, self.quantizer, scale, noise, transposed=True)

        def compute(dtype: torch.dtype | None = None) -> Tensor:
            grad = operand(given, self.recipe.grad_t, scales[0], noise)
            tokens = operand(x, self.recipe.x_t, scales[1], None)
            return grouped_mm_over_tokens(grad, tokens, groups, dtype or narrow, narrow, self.expert_kernels)

        return compute

    def _expert_weights(
        self, weight_eNK: Tensor, transposed: bool, dtype: torch.dtype, groups: TokenGroups
    ) -> StackedWeights:
        """Return all weights; those of experts without tokens do not count for delayed scaling."""
        # a stack with experts of other ranks is no parameter, and another one in every microbatch
        cache = self.cached_weights if isinstance(weight_eNK, nn.Parameter) and self.stored_weight is None else None
        cached = None if cache is None else cache.get(transposed)
        if cached is None:
            matrices = [self.expert_weight(weight_eNK, expert) for expert in range(len(weight_eNK))]
            weights = StackedWeights.of([self._cast_weight(matrix, transposed, dtype) for matrix in matrices])
            cached = weights, torch.stack([_weight_amax(matrix) for matrix in matrices]) if self._notes_amax else None
            if cache is not None and weights.values_eNK.itemsize == 1:
                cache[transposed] = cached
        weights, amax_e = cached
        if amax_e is not None:
            has_tokens_e = groups.offsets_e.diff(prepend=groups.offsets_e.new_zeros(1)) > 0
            self._note_amax(WEIGHT, torch.where(has_tokens_e, amax_e, 0.0).amax())
        return weights

    def _quantize_tokens(
        self, x_CK: Tensor, scaling: Scaling, operand: int, groups: TokenGroups, role: str = ""
    ) -> GroupedOperand:
        self._note_tokens(operand, x_CK, groups)
        noise = self._noise(scaling, role, x_CK.device)
        return quantize_tokens(x_CK, scaling, groups, self.quantizer, self._scale(operand), noise)

    def _note_tokens(self, operand: int, x_CK: Tensor, groups: TokenGroups) -> None:
        """As _note, without the tokens after the last expert's."""
        if self._notes_amax:
            self._note_amax(operand, groups.amax(x_CK.detach().abs().amax(1).float()).amax())

    def _of_experts(self, pairs: Iterable[Pair], backward: bool) -> Iterator[Tensor]:
        scaling, weight_scaling = (
            (self.recipe.grad, self.recipe.weight_t) if backward else (self.recipe.x, self.recipe.weight)
        )
        pairs = iter(pairs)
        first = next(pairs, None)
        if first is None:
            return
        rows, weight = first
        shape = weight.shape
        plain = self.training or self.evaluation == self.recipe
        if not plain or not can_use_native_grouped_mm(
            rows, shape[1 if backward else 0], scaling, weight_scaling, rows.dtype
        ):
            yield from (
                self.input_grad(*pair) if backward else self.output(*pair) for pair in itertools.chain([first], pairs)
            )
            return
        both = [
            (
                self._quantize(rows, scaling, GRAD if backward else X, "input" if backward else ""),
                self._weight(weight, backward, rows.dtype),
            )
            for rows, weight in (first, *pairs)
        ]
        yield from native_grouped_mm(*zip(*both)).split([rows.values.shape[0] for rows, _ in both])

    def saved_input(self, x_RK: Tensor) -> SavedInput | None:
        """Return x as make_wgrad_fn takes it, for backward; None if x itself is to be saved."""
        if not self.recipe.wgrad or not self.training:
            return None
        x_KR = x_RK.reshape(-1, x_RK.shape[-1]).t()
        return SavedInput.of(self.quantizer(x_KR, self.recipe.x_t, self._scale(X)))

    def weight_grad(self, grad_RN: Tensor, x_RK: Tensor) -> Tensor:
        """Return grad^T @ x over all leading dimensions."""
        return self.make_wgrad_fn(grad_RN, x_RK)()

    def make_wgrad_fn(self, grad_RN: Tensor, x: Tensor | SavedInput) -> WgradFn:
        """Return a function that computes grad^T @ x, with the scales of this moment.

        Functions of one linear draw their noise when they run, so they must run in the order in which they are made.
        x [R, K], or what `saved_input` has made of it.
        """
        grad_NR = grad_RN.reshape(-1, grad_RN.shape[-1]).t()
        self._note(GRAD, grad_RN)
        if isinstance(x, Tensor) and not self.recipe.wgrad:
            return functools.partial(multiply, grad_NR, x.reshape(-1, x.shape[-1]))
        noise = self._noise(self.recipe.grad_t, "weight", grad_RN.device)
        scales = self._scale(GRAD), self._scale(X)

        def compute(dtype: torch.dtype | None = None) -> Tensor:
            grad = self.quantizer(grad_NR, self.recipe.grad_t, scales[0], noise)
            if isinstance(x, SavedInput):
                x_t = x.operand()
            else:
                x_t = self.quantizer(x.reshape(-1, x.shape[-1]).t(), self.recipe.x_t, scales[1])
            return quantized_mm(grad, x_t, dtype or grad_RN.dtype, grad_RN.dtype)

        return compute

    def advance(self, delayed: DelayedScaling, amax_3: Tensor) -> None:
        """End an iteration of delayed scaling: compute new scales from the maxima of all ranks.

        Maxima that are zero or not finite change no scale.
        """
        scale_3, history_3L = self.scaling[:, 0], self.scaling[:, 1:]
        finite = torch.isfinite(amax_3)
        moved = torch.cat([amax_3[:, None], history_3L[:, :-1]], 1)
        history_3L.copy_(torch.where(finite[:, None], moved, history_3L))
        of = history_3L.amax(1) if delayed.largest else history_3L[:, 0]
        formats = (self.recipe.x.fmt, self.recipe.weight.fmt, self.recipe.grad.fmt)
        found = torch.stack([compute_scale(amax, fmt) for amax, fmt in zip(of, formats)]) / 2.0**delayed.margin
        scale_3.copy_(torch.where(finite & (of > 0), found, scale_3))
        self.amax.zero_()

    def weight_scale(self) -> Tensor | None:
        """Return the current weight scale of delayed scaling; None if it follows from the weight."""
        return self._scale(WEIGHT)

    def _weight(self, weight_NK: Tensor | StoredMatrix, transposed: bool, dtype: torch.dtype) -> QuantizedTensor:
        if self.stored_weight is not None and isinstance(weight_NK, Tensor):
            weight_NK = self.stored_weight[0]
        if self._notes_amax:
            self._note_amax(WEIGHT, _weight_amax(weight_NK))
        return self._cast_weight(weight_NK, transposed, dtype)

    def _cast_weight(self, weight_NK: Tensor | StoredMatrix, transposed: bool, dtype: torch.dtype) -> QuantizedTensor:
        scaling = self.recipe.weight_t if transposed else self.recipe.weight
        if not isinstance(weight_NK, Tensor):
            return weight_NK.operand(scaling, transposed, dtype)
        matrix = weight_NK.t() if transposed else weight_NK
        return self.quantizer(matrix, scaling, self._scale(WEIGHT), self._noise(scaling, "", matrix.device))

    def _quantize(self, matrix: Tensor, scaling: Scaling, operand: int, role: str = "") -> QuantizedTensor:
        self._note(operand, matrix)
        return self.quantizer(matrix, scaling, self._scale(operand), self._noise(scaling, role, matrix.device))

    def _note(self, operand: int, matrix: Tensor) -> None:
        """Update the running maximum of delayed scaling, in training only."""
        if self._notes_amax:
            self._note_amax(operand, compute_amax(matrix))

    @property
    def _notes_amax(self) -> bool:
        return self.recipe.delayed is not None and self.training

    def _note_amax(self, operand: int, amax: Tensor) -> None:
        self.amax[operand] = torch.maximum(self.amax[operand], amax)

    def _scale(self, operand: int) -> Tensor | None:
        if self.recipe.delayed is None:
            return None
        scale = self.scaling[operand, 0]
        return torch.where(scale == 0, torch.ones_like(scale), scale)

    def _noise(self, scaling: Scaling, role: str, device: torch.device) -> torch.Generator | None:
        return self.rounding.generator(role, device) if scaling.stochastic and self.rounding is not None else None

    def graph_generators(self, device: torch.device) -> list[torch.Generator]:
        """Return the generators that a CUDA graph of this linear draws from."""
        recipe = self.recipe
        roles = {"": (recipe.x, recipe.weight, recipe.weight_t), "input": (recipe.grad,), "weight": (recipe.grad_t,)}
        if self.rounding is None:
            return []
        return [
            self.rounding.generator(role, device)
            for role, scalings in roles.items()
            if any(scaling.stochastic for scaling in scalings)
        ]

    def extra_repr(self) -> str:
        return self.recipe.name


def _weight_amax(weight_NK: Tensor | StoredMatrix) -> Tensor:
    return compute_amax(weight_NK) if isinstance(weight_NK, Tensor) else weight_NK.amax

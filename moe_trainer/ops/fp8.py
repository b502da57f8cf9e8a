"""The three products of a linear layer with their operands in 8 or 4 bits.

| product | of | contracted over |
|---|---|---|
| output | x [R, K], weight [N, K] | K |
| gradient of x | gradient [R, N], weight transposed [K, N] | N |
| gradient of the weight | gradient transposed [N, R], x transposed [K, R] | R, the rows |

Each operand is quantised anew from what it was in high precision, with its blocks along the dimension that is contracted. The products
are summed in fp32 by the device where it can (scaled_mm.py); everywhere else the quantised numbers are multiplied in fp32, which gives
the same but for the order of sums. So every recipe runs, and can be tested, on any device.

Delayed scaling keeps, of each operand of each layer, the maxima of the last iterations and the scale they give. Maxima are taken in
training only and are a running maximum over an iteration, so a forward that is computed twice (recompute) counts once; the scale changes
between iterations only (layers/precision.py). TransformerEngine advances with every microbatch instead; here the scales of an
iteration are those of one process, whatever the mapping.

A weight may be kept in 8 bits (`stored`, stored_weight.py): then its bytes are the operand, and what is given as the weight has only its
shape.

Shape letters: R rows, K input width, N output width, L length of the history.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from moe_trainer.ops.quantize import (
    E2M1,
    E4M3,
    E5M2,
    POWER_OF_TWO,
    TWO_LEVEL,
    Quantized,
    Scaling,
    amax_of,
    quantize,
    scale_of,
)
from moe_trainer.ops.scaled_grouped import can_group, multiply_groups
from moe_trainer.ops.scaled_mm import scaled_mm
from moe_trainer.ops.stored_weight import StoredMatrix, StoredWeight

X, WEIGHT, GRAD = 0, 1, 2
"""Operands with scales of their own: rows of the state of delayed scaling."""

Pair = tuple[Tensor, Tensor | StoredMatrix]
"""The rows of an expert, or their gradient, and its weight."""


@dataclass(frozen=True)
class Delayed:
    """Delayed scaling. margin: powers of two kept free; history: iterations looked back on; largest: the largest maximum of these
    counts, otherwise the most recent one."""

    margin: int = 0
    history: int = 1
    largest: bool = False


@dataclass(frozen=True)
class Recipe:
    """How each operand of each product is quantised.

    x, weight: of the output. grad, weight_t: of the gradient of x. grad_t, x_t: of the gradient of the weight, which is computed in
    high precision without `wgrad`. alignment: rows of a product are padded to a multiple of it by those who pad.
    """

    name: str
    x: Scaling
    weight: Scaling
    grad: Scaling
    weight_t: Scaling
    grad_t: Scaling
    x_t: Scaling
    wgrad: bool = True
    delayed: Delayed | None = None
    alignment: int = 16


def make_recipe(name: str, *, hybrid: bool = False, wgrad: bool = True, delayed: Delayed = Delayed()) -> Recipe:
    """The recipe of a name: delayed, tensorwise, blockwise, mxfp8 or nvfp4. hybrid: gradients in E5M2.

    Raises: ValueError for another name.
    """
    grad = E5M2 if hybrid else E4M3
    if name in ("delayed", "tensorwise"):
        one, two = Scaling(E4M3), Scaling(grad)
        return Recipe(name, one, one, two, one, two, one, wgrad, delayed if name == "delayed" else None)
    if name == "blockwise":
        row, square = Scaling(E4M3, 1, 128, POWER_OF_TWO), Scaling(E4M3, 128, 128, POWER_OF_TWO)
        grads = Scaling(grad, 1, 128, POWER_OF_TWO)
        return Recipe(name, row, square, grads, square, grads, row, wgrad)
    if name == "mxfp8":
        row, grads = Scaling(E4M3, 1, 32, POWER_OF_TWO), Scaling(grad, 1, 32, POWER_OF_TWO)
        return Recipe(name, row, row, grads, row, grads, row, wgrad, alignment=32)
    if name == "nvfp4":
        row, square = Scaling(E2M1, 1, 16, TWO_LEVEL), Scaling(E2M1, 16, 16, TWO_LEVEL)
        grads = Scaling(E2M1, 1, 16, TWO_LEVEL, stochastic=True)
        grads_t = Scaling(E2M1, 1, 16, TWO_LEVEL, stochastic=True, hadamard=True)
        return Recipe(name, row, square, grads, square, grads_t, Scaling(E2M1, 1, 16, TWO_LEVEL, hadamard=True), wgrad, alignment=32)
    raise ValueError(f"no recipe {name!r}: delayed, tensorwise, blockwise, mxfp8 or nvfp4")


class Rounding(Protocol):
    """Where stochastic rounding gets its noise (parallel/rng.py)."""

    def generator(self, role: str, device: torch.device) -> torch.Generator:
        """A generator for the next tensor of this role."""


def product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """a [M, K] times b [N, K] transposed, summed in fp32, in `dtype`. Shape: [M, N]."""
    native = scaled_mm(a, b, dtype)
    return (a.dequantized() @ b.dequantized().t()).to(dtype) if native is None else native


class HighPrecision(nn.Module):
    """The products of a linear of experts that is not quantised, beside one that is: as QuantizedProducts, in the operands' dtype."""

    def outputs(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """`output` of every pair, one by one."""
        return (self.output(*pair) for pair in pairs)

    def input_grads(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """`input_grad` of every pair, one by one."""
        return (self.input_grad(*pair) for pair in pairs)

    def of_expert(self, weights_eNK: Tensor, expert: int) -> Tensor:
        """One weight of a stack."""
        return weights_eNK[expert]

    def output(self, x_RK: Tensor, weight_NK: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x @ weight^T. Returns: in `dtype`, or that of x."""
        return (x_RK @ weight_NK.t()).to(dtype or x_RK.dtype)

    def input_grad(self, grad_RN: Tensor, weight_NK: Tensor) -> Tensor:
        """grad @ weight."""
        return grad_RN @ weight_NK

    def weight_grad_later(self, grad_RN: Tensor, x_RK: Tensor) -> Callable[[], Tensor]:
        """grad^T @ x, when it is called."""
        return lambda: grad_RN.t() @ x_RK


class QuantizedProducts(nn.Module):
    """The products of one linear layer, or of all experts of one: they share the state of delayed scaling.

    Buffers with delayed scaling, both fp32: scaling [3, 1 + L], of x, weight and gradient the scale (0: none yet, which means 1) and
    the maxima, latest first; amax [3], of the iteration so far. stored: the weight, where it is kept in 8 bits. evaluation: the recipe of
    evaluation, None for high precision, if it is another one (then neither is delayed).
    """

    stored: StoredWeight | None = None
    plain = False

    def __init__(self, recipe: Recipe, name: str, rounding: Rounding | None = None,
                 quantizer: Callable[..., Quantized] = quantize):
        """quantizer: `quantize`, or a kernel of its signature and numbers."""
        super().__init__()
        self.recipe, self.name, self.rounding, self.quantizer = recipe, name, rounding, quantizer
        self.evaluation: Recipe | None = recipe
        if recipe.delayed is not None:
            self.register_buffer("scaling", torch.zeros(3, 1 + recipe.delayed.history), persistent=False)
            self.register_buffer("amax", torch.zeros(3), persistent=False)

    def of_expert(self, weights_eNK: Tensor, expert: int) -> Tensor | StoredMatrix:
        """One weight of a stack, to be given to the products."""
        return weights_eNK[expert] if self.stored is None else self.stored[expert]

    def output(self, x_RK: Tensor, weight_NK: Tensor | StoredMatrix, dtype: torch.dtype | None = None) -> Tensor:
        """x @ weight^T. Shapes: x any leading dimensions. Returns: in `dtype`, or that of x."""
        if not self.training and self.evaluation != self.recipe:
            return self._evaluated(x_RK, weight_NK, dtype or x_RK.dtype)
        flat = x_RK.reshape(-1, x_RK.shape[-1])
        y_RN = product(self._quantize(flat, self.recipe.x, X), self._weight(weight_NK, False, x_RK.dtype), dtype or x_RK.dtype)
        return y_RN.view(*x_RK.shape[:-1], -1)

    def _evaluated(self, x_RK: Tensor, weight_NK: Tensor, dtype: torch.dtype) -> Tensor:
        if self.evaluation is None:
            return HighPrecision().output(x_RK, weight_NK, dtype)
        flat = x_RK.reshape(-1, x_RK.shape[-1])
        y_RN = product(self.quantizer(flat, self.evaluation.x), self.quantizer(weight_NK, self.evaluation.weight), dtype)
        return y_RN.view(*x_RK.shape[:-1], -1)

    def input_grad(self, grad_RN: Tensor, weight_NK: Tensor | StoredMatrix) -> Tensor:
        """grad @ weight. Shapes: grad any leading dimensions. Returns: in the dtype of grad."""
        flat = grad_RN.reshape(-1, grad_RN.shape[-1])
        grad = self._quantize(flat, self.recipe.grad, GRAD, "input")
        grad_RK = product(grad, self._weight(weight_NK, True, grad_RN.dtype), grad_RN.dtype)
        return grad_RK.view(*grad_RN.shape[:-1], -1)

    def outputs(self, pairs: Iterable[Pair]) -> Iterator[Tensor]:
        """`output` of the rows and the weight of every expert that has rows: one by one, as they are asked for, or all in one call
        where the device can."""
        return self._of_experts(pairs, False)

    def input_grads(self, pairs: Iterable[Pair]) -> Iterator[Tensor]:
        """`input_grad` of every expert that has rows, as `outputs`."""
        return self._of_experts(pairs, True)

    def _of_experts(self, pairs: Iterable[Pair], backward: bool) -> Iterator[Tensor]:
        scaling, weight_scaling = (self.recipe.grad, self.recipe.weight_t) if backward else (self.recipe.x, self.recipe.weight)
        pairs = iter(pairs)
        first = next(pairs, None)
        if first is None:
            return
        rows, weight = first
        shape = weight.values_NK.shape if isinstance(weight, StoredMatrix) else weight.shape
        plain = self.training or self.evaluation == self.recipe
        if not plain or not can_group(rows, shape[1 if backward else 0], scaling, weight_scaling, rows.dtype):
            yield from (self.input_grad(*pair) if backward else self.output(*pair) for pair in itertools.chain([first], pairs))
            return
        both = [(self._quantize(rows, scaling, GRAD if backward else X, "input" if backward else ""), self._weight(weight, backward, rows.dtype))
                for rows, weight in (first, *pairs)]
        yield from multiply_groups(*zip(*both)).split([rows.values.shape[0] for rows, _ in both])

    def weight_grad(self, grad_RN: Tensor, x_RK: Tensor) -> Tensor:
        """grad^T @ x, over all leading dimensions."""
        return self.weight_grad_later(grad_RN, x_RK)()

    def weight_grad_later(self, grad_RN: Tensor, x_RK: Tensor) -> Callable[[], Tensor]:
        """The same as a function; noise and scales are those of now, whenever it is called."""
        grad_NR, x_KR = (tensor.reshape(-1, tensor.shape[-1]).t() for tensor in (grad_RN, x_RK))
        self._note(GRAD, grad_RN)
        if not self.recipe.wgrad:
            return lambda: grad_NR @ x_KR.t()
        noise = self._noise(self.recipe.grad_t, "weight", grad_RN.device)
        scales = self._scale(GRAD), self._scale(X)

        def compute() -> Tensor:
            grad, x = self.quantizer(grad_NR, self.recipe.grad_t, scales[0], noise), self.quantizer(x_KR, self.recipe.x_t, scales[1])
            return product(grad, x, grad_RN.dtype)

        return compute

    def advance(self, amax_3: Tensor) -> None:
        """End an iteration with the maxima of all ranks: new scales from them. What is not finite, or nothing but zeros, changes none."""
        delayed = self.recipe.delayed
        scale_3, history_3L = self.scaling[:, 0], self.scaling[:, 1:]
        finite = torch.isfinite(amax_3)
        moved = torch.cat([amax_3[:, None], history_3L[:, :-1]], 1)
        history_3L.copy_(torch.where(finite[:, None], moved, history_3L))
        of = history_3L.amax(1) if delayed.largest else history_3L[:, 0]
        formats = (self.recipe.x.fmt, self.recipe.weight.fmt, self.recipe.grad.fmt)
        found = torch.stack([scale_of(amax, fmt) for amax, fmt in zip(of, formats)]) / 2.0**delayed.margin
        scale_3.copy_(torch.where(finite & (of > 0), found, scale_3))
        self.amax.zero_()

    def weight_scale(self) -> Tensor | None:
        """The scale of the weight with delayed scaling, as it is now; None where it follows from the weight."""
        return self._scale(WEIGHT)

    def _weight(self, weight_NK: Tensor | StoredMatrix, transposed: bool, dtype: torch.dtype) -> Quantized:
        scaling = self.recipe.weight_t if transposed else self.recipe.weight
        if self.stored is not None and isinstance(weight_NK, Tensor):
            weight_NK = self.stored[0]
        if not isinstance(weight_NK, StoredMatrix):
            return self._quantize(weight_NK.t() if transposed else weight_NK, scaling, WEIGHT)
        if self.recipe.delayed is not None and self.training:
            self.amax[WEIGHT] = torch.maximum(self.amax[WEIGHT], weight_NK.amax)
        return weight_NK.operand(scaling, transposed, dtype)

    def _quantize(self, matrix: Tensor, scaling: Scaling, operand: int, role: str = "") -> Quantized:
        self._note(operand, matrix)
        return self.quantizer(matrix, scaling, self._scale(operand), self._noise(scaling, role, matrix.device))

    def _note(self, operand: int, matrix: Tensor) -> None:
        """Take a maximum of delayed scaling into account; in evaluation there is none."""
        if self.recipe.delayed is not None and self.training:
            self.amax[operand] = torch.maximum(self.amax[operand], amax_of(matrix))

    def _scale(self, operand: int) -> Tensor | None:
        if self.recipe.delayed is None:
            return None
        scale = self.scaling[operand, 0]
        return torch.where(scale == 0, torch.ones_like(scale), scale)

    def _noise(self, scaling: Scaling, role: str, device: torch.device) -> torch.Generator | None:
        return self.rounding.generator(role, device) if scaling.stochastic and self.rounding is not None else None

    def extra_repr(self) -> str:
        return self.recipe.name

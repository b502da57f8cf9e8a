"""NVFP4: 4 bits, a scale for 16 elements, and one for the tensor; weights that are stored so (--fp4-param-gather).

Two elements of a stored weight share a byte, the first in the lower half, as in `scaled_layouts.pack_e2m1`. Blocks are
16 x 16, so one set of bytes serves the output and the input gradient. The scale of a block depends on the largest block
of its matrix; all ranks have the maxima of all blocks, so they compute the same scales.

Shape letters: e matrices of a stack (1 for a single weight), N output width, K input width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_trainer.quantization.quantize import E2M1, TWO_LEVEL, QuantizedTensor, Scaling, two_level_scales, unpack_e2m1
from moe_trainer.quantization.recipe import QuantizationRecipe, RecipeOptions
from moe_trainer.quantization.scaled_layouts import pack_e2m1
from moe_trainer.quantization.stored_weight import SingleCopyWeight


def make_recipe(options: RecipeOptions) -> QuantizationRecipe:
    """Return the recipe; gradients are rounded stochastically, and those of weights transformed first."""
    row, square = Scaling(E2M1, 1, 16, TWO_LEVEL), Scaling(E2M1, 16, 16, TWO_LEVEL)
    grads = Scaling(E2M1, 1, 16, TWO_LEVEL, stochastic=True)
    grads_t = Scaling(E2M1, 1, 16, TWO_LEVEL, stochastic=True, hadamard=True)
    return QuantizationRecipe(
        "nvfp4",
        row,
        square,
        grads,
        square,
        grads_t,
        Scaling(E2M1, 1, 16, TWO_LEVEL, hadamard=True),
        options.wgrad,
        alignment=32,
        weight_class=Fp4Weight,
    )


class Fp4Matrix(NamedTuple):
    """One weight [N, K] as bytes [N, K / 2], inverse scales [N / 16, K / 16], and its amax."""

    codes: Tensor
    inverse: Tensor
    amax: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight, N and K."""
        return torch.Size((self.codes.shape[0], 2 * self.codes.shape[1]))

    def operand(self, scaling: Scaling, transposed: bool, dtype: torch.dtype) -> QuantizedTensor:
        """Return the matrix as an operand of a GEMM of values in `dtype`; packed where its rows allow that."""
        packed = self.codes.view(torch.float4_e2m1fn_x2)
        if dtype == torch.float64:
            values = unpack_e2m1(packed).double()
            values, inverse = (x.t() if transposed else x for x in (values, self.inverse))
            return QuantizedTensor(values, inverse, scaling)
        if not transposed:
            return QuantizedTensor(packed, self.inverse, scaling)
        if self.codes.shape[0] % 2:
            return QuantizedTensor(unpack_e2m1(packed).t(), self.inverse.t(), scaling)
        return QuantizedTensor(_transpose_packed(self.codes), self.inverse.t(), scaling)


class Fp4Weight(SingleCopyWeight):
    """Pairs of elements, so K is even, scaled by blocks and by matrix."""

    elements_per_byte = 2

    def __getitem__(self, index: int) -> Fp4Matrix:
        return Fp4Matrix(self.codes[index], self.inverse_e[index], self._largest_e[index])

    def _scales(self) -> tuple[Tensor, Tensor]:
        return two_level_scales(self.amax_eB, self.amax_eB.amax((-2, -1), keepdim=True), self.scaling.fmt)[:2]

    def _write(self, at: int, rounded: Tensor) -> None:
        self.codes.view(-1)[at // 2 : (at + rounded.numel()) // 2] = pack_e2m1(rounded[None]).view(torch.uint8)[0]


def _transpose_packed(codes: Tensor) -> Tensor:
    """Return the bytes [K, N / 2] of the transposed matrix."""
    nibbles_KN = torch.stack((codes & 15, codes >> 4), -1).flatten(1).t()
    return (nibbles_KN[:, 0::2] | nibbles_KN[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)

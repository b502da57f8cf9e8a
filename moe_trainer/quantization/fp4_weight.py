"""Model weights stored in NVFP4 with their scales, and in no other form (--fp4-param-gather).

Two elements share a byte, the first in the lower half, as in `scaled_layouts.pack_e2m1`. Blocks are 16 x 16, so one set
of bytes serves the output and the input gradient, as in fp8_weight.py. The scale of a block depends on the largest
block of its matrix; all ranks have the maxima of all blocks, so they compute the same scales.

Shape letters: e matrices of a stack (1 for a single weight), N output width, K input width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_trainer.quantization.fp8_weight import Fp8Weight
from moe_trainer.quantization.quantize import QuantizedTensor, Scaling, two_level_scales, unpack_e2m1
from moe_trainer.quantization.scaled_layouts import pack_e2m1


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
            return QuantizedTensor(*(x.t() if transposed else x for x in (values, self.inverse)), scaling)
        if not transposed:
            return QuantizedTensor(packed, self.inverse, scaling)
        if self.codes.shape[0] % 2:
            return QuantizedTensor(unpack_e2m1(packed).t(), self.inverse.t(), scaling)
        return QuantizedTensor(_transpose_packed(self.codes), self.inverse.t(), scaling)


class Fp4Weight(Fp8Weight):
    """Bytes and scales of one parameter [N, K], or of a stack of experts [e, N, K]; K is even.

    Attributes:
        codes: uint8 [e, N, K / 2].
    """

    elements_per_byte = 2

    def bind(self, codes: Tensor, amax: Tensor) -> None:
        """Store bytes and maxima in these flat tensors."""
        self.codes = codes.view(self.num_matrices, self.height, self.width // 2)
        self.amax_eB = amax.view_as(self._scale_eB)

    def __getitem__(self, index: int) -> Fp4Matrix:
        return Fp4Matrix(self.codes[index], self.inverse_e[index], self._largest_e[index])

    def compute_scales(self) -> None:
        """Compute the scales from the maxima. A matrix whose maximum is not finite becomes NaN."""
        scale, inverse, _ = two_level_scales(self.amax_eB, self.amax_eB.amax((-2, -1), keepdim=True), self.scaling.fmt)
        self._scale_eB.copy_(scale)
        self.inverse_e.copy_(inverse)
        self._largest_e.copy_(self.amax_eB.flatten(1).amax(1))

    def _write(self, at: int, rounded: Tensor) -> None:
        self.codes.view(-1)[at // 2 : (at + rounded.numel()) // 2] = pack_e2m1(rounded[None]).view(torch.uint8)[0]


def _transpose_packed(codes: Tensor) -> Tensor:
    """Return the bytes [K, N / 2] of the transposed matrix."""
    nibbles_KN = torch.stack((codes & 15, codes >> 4), -1).flatten(1).t()
    return (nibbles_KN[:, 0::2] | nibbles_KN[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)

"""Model weights stored in fp8 (--fp8-param-gather).

Shape letters: e matrices of a stack (1 for a single weight), N output width, K input width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_trainer.quantization.quantize import POWER_OF_TWO, QuantizedTensor, Scaling, compute_scale
from moe_trainer.quantization.stored_weight import SingleCopyWeight


class Fp8Matrix(NamedTuple):
    """One weight [N, K] in the dtype of its format, inverse scales () or [N / rows, K / cols], and its amax."""

    values_NK: Tensor
    inverse: Tensor
    amax: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight, N and K."""
        return self.values_NK.shape

    def operand(self, scaling: Scaling, transposed: bool, dtype: torch.dtype) -> QuantizedTensor:
        """Return the matrix as an operand of a GEMM of values in `dtype`."""
        values, inverse = self.values_NK, self.inverse
        if transposed:
            values, inverse = values.t(), inverse.t() if inverse.dim() else inverse
        return QuantizedTensor(values.double() if dtype == torch.float64 else values, inverse, scaling)


class Fp8Weight(SingleCopyWeight):
    """Bytes in the dtype of the format, scaled by blocks or by matrix."""

    def __getitem__(self, index: int) -> Fp8Matrix:
        return Fp8Matrix(self.codes[index].view(self.scaling.fmt.dtype), self.inverse_e[index], self._largest_e[index])

    def _scales(self) -> tuple[Tensor, Tensor]:
        amax, scale = self.amax_eB, self.scale_fn()
        if scale is None:
            scale = compute_scale(amax, self.scaling.fmt, self.scaling.scales == POWER_OF_TWO)
        else:
            scale = torch.where(torch.isfinite(amax), scale, torch.nan)
        return scale, 1.0 / scale

    def _write(self, at: int, rounded: Tensor) -> None:
        codes = rounded.to(self.scaling.fmt.dtype).view(torch.uint8)
        self.codes.view(-1)[at : at + codes.numel()] = codes

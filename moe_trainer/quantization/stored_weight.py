"""Model weights stored in 8 or 4 bits with their scales, and in no other form.

The parameter itself is a NaN placeholder that has the shape (`placeholder_param`), for autograd, optimizer and names;
code that reads it as the weight gets NaN. See docs/design/quantization.md.

Where blocks are square (`SingleCopyWeight`) one set of bytes serves both GEMMs. It equals that of the quantized full
weight, whatever shard a rank holds: `update_amax` accumulates block maxima of the local shard, the caller reduces them
over the ranks, `compute_scales` derives scales, and `cast` writes the local shard. Every expert of a stack is cast by
itself. Weights in other blocks are stored twice (mx_weight.py).

Shape letters: e matrices of a stack (1 for a single weight), N output width, K input width, B blocks of a matrix.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_trainer.quantization.quantize import (
    QuantizedTensor,
    Scaling,
    block_amax,
    expand_scales,
    round_nearest,
)

ScaleFn = Callable[[], Tensor | None]
PORTION_CPU, PORTION_GPU = 1 << 18, 1 << 24
"""Elements that are cast at once."""


def no_external_scale() -> None:
    """Return None: scales follow from the values."""


class StoredMatrix(Protocol):
    """One weight [N, K] as it is stored."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight, N and K."""

    @property
    def amax(self) -> Tensor:
        """Largest absolute value, of delayed scaling."""

    def operand(self, scaling: Scaling, transposed: bool, dtype: torch.dtype) -> QuantizedTensor:
        """Return the matrix as an operand of a GEMM of values in `dtype`."""


class StoredWeight(ABC):
    """A parameter [N, K], or a stack of experts [e, N, K], as it is stored; indexed by matrix.

    Attributes:
        elements_per_byte: K is a multiple of it.
        scale_fn: returns the scale if it does not follow from the values (delayed scaling).
        main_param_owner: access to the fp32 values, set by the optimizer (optim/quantized_params.py).
    """

    elements_per_byte = 1

    def __init__(
        self, shape: torch.Size, scaling: Scaling, device: torch.device, scale_fn: ScaleFn = no_external_scale
    ):
        self.shape, self.scaling, self.device, self.scale_fn = shape, scaling, device, scale_fn
        self.num_matrices, (self.height, self.width) = (shape[0] if len(shape) == 3 else 1), shape[-2:]
        self.main_param_owner: Any = None

    @classmethod
    @abstractmethod
    def for_param(
        cls, param: Tensor, scaling: Scaling, quantizer: Callable[[Tensor, Scaling], QuantizedTensor], scale_fn: ScaleFn
    ) -> "StoredWeight":
        """Return an empty one for a parameter; `quantizer` is as in QuantizedGemms."""

    def placeholder_param(self, dtype: torch.dtype) -> Tensor:
        """Return the data of the parameter: its shape over a single NaN."""
        return torch.full((1,), torch.nan, dtype=dtype, device=self.device).expand(self.shape)

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return what is stored, by name; the first dimension counts matrices."""

    @abstractmethod
    def __getitem__(self, index: int) -> StoredMatrix: ...


class SingleCopyWeight(StoredWeight):
    """Bytes and scales that serve both GEMMs.

    Attributes:
        codes: uint8 [e, N, K / elements_per_byte].
        amax_eB: block maxima of the local shard, to be reduced over all shards before `compute_scales`.
    """

    def __init__(
        self,
        shape: torch.Size,
        scaling: Scaling,
        dtype: torch.dtype,
        device: torch.device,
        scale_fn: ScaleFn = no_external_scale,
    ):
        """Allocate the scales; `dtype` is the parameter's. fp64 (verification runs) is quantized in fp64."""
        super().__init__(shape, scaling, device, scale_fn)
        self._dtype = torch.float64 if dtype == torch.float64 else torch.float32
        grid = (1, 1) if scaling.per_tensor else (-(-self.height // scaling.rows), -(-self.width // scaling.cols))
        # what is cast at a time belongs to one of `count` matrices of `_tall` rows
        tall = not scaling.per_tensor and self.height % scaling.rows == 0
        self._tall = self.height * (self.num_matrices if tall else 1)
        self._count = 1 if tall else self.num_matrices
        inverse = torch.ones(self.num_matrices, *grid, dtype=torch.float32, device=device)
        self.inverse_e = inverse.view(self.num_matrices) if scaling.per_tensor else inverse
        self._scale_eB = torch.ones_like(inverse)
        self._largest_e = torch.zeros(self.num_matrices, dtype=torch.float32, device=device)
        self.codes = torch.empty(0, dtype=torch.uint8, device=device)
        self.amax_eB = torch.empty(0, device=device)

    @classmethod
    def for_param(
        cls, param: Tensor, scaling: Scaling, quantizer: Callable[[Tensor, Scaling], QuantizedTensor], scale_fn: ScaleFn
    ) -> "SingleCopyWeight":
        return cls(param.shape, scaling, param.dtype, param.device, scale_fn)

    @property
    def num_blocks(self) -> int:
        """Number of elements of `amax_eB`."""
        return self._scale_eB.numel()

    def bind(self, codes: Tensor, amax: Tensor) -> None:
        """Store bytes and maxima in these flat tensors."""
        self.codes = codes.view(self.num_matrices, self.height, self.width // self.elements_per_byte)
        self.amax_eB = amax.view_as(self._scale_eB)

    def tensors(self) -> dict[str, Tensor]:
        return {"": self.codes, " (scales)": self.inverse_e}

    def update_amax(self, values: Tensor, start: int) -> None:
        """Accumulate the maxima of elements [start, start + len(values)) of the flat weight.

        `amax_eB` must be zero before the first call.
        """
        known_B = self.amax_eB.view(self._count, -1, self.amax_eB.shape[2])
        for matrix, matrices, here, first, count in self._portions(start, start + values.numel()):
            magnitudes = values[here : here + count].to(self._dtype).abs()
            if self.scaling.per_tensor:
                known, amax = known_B[matrix : matrix + matrices, 0, 0], magnitudes.view(matrices, -1).amax(1).float()
            else:
                framed, _, row = self._framed(magnitudes, first)
                amax = block_amax(framed, self.scaling.rows, self.scaling.cols)
                known = known_B[matrix, row // self.scaling.rows :][: amax.shape[0]]
            # a maximum over ranks need not keep NaN
            known.copy_(torch.maximum(known, torch.where(torch.isfinite(amax), amax, torch.inf)))

    def compute_scales(self) -> None:
        """Compute the scales from the maxima; where these are not finite, weights become NaN."""
        scale, inverse = self._scales()
        self._scale_eB.copy_(scale)
        self.inverse_e.copy_(inverse.view_as(self.inverse_e))
        self._largest_e.copy_(self.amax_eB.flatten(1).amax(1))

    @abstractmethod
    def _scales(self) -> tuple[Tensor, Tensor]:
        """Return the scales of all blocks, and their inverses."""

    def cast(self, values: Tensor, start: int) -> None:
        """Cast a shard to bytes, with the scales of `compute_scales`."""
        fmt, scale_B = self.scaling.fmt, self._scale_eB.view(self._count, -1, self._scale_eB.shape[2])
        for matrix, matrices, here, first, count in self._portions(start, start + values.numel()):
            part = values[here : here + count].to(self._dtype)
            if self.scaling.per_tensor:
                rounded = round_nearest(part.view(matrices, -1) * scale_B[matrix : matrix + matrices, 0], fmt).view(-1)
            else:
                framed, lead, row = self._framed(part, first)
                scale = scale_B[matrix, row // self.scaling.rows :]
                rounded = round_nearest(framed * expand_scales(scale, self.scaling, framed.shape), fmt).view(-1)[
                    lead : lead + count
                ]
            self._write(matrix * self._tall * self.width + first, rounded)

    @abstractmethod
    def _write(self, at: int, rounded: Tensor) -> None:
        """Store numbers on the format's grid from element `at` of the flat weight on."""

    def _framed(self, part: Tensor, first: int) -> tuple[Tensor, int, int]:
        """Pad a portion with zeros to full rows, starting with a row of blocks.

        Returns:
            Matrix, offset of the portion in it, and its first row.
        """
        row = first // self.width
        row -= row % self.scaling.rows
        lead = first - row * self.width
        framed = part.new_zeros(-(-(lead + part.numel()) // self.width), self.width)
        framed.view(-1)[lead : lead + part.numel()] = part
        return framed, lead, row

    def _portions(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Split a flat range into portions.

        Yields:
            Matrix, number of full matrices, offset in the range, first element inside the matrix, number of elements.
        """
        size, block = self._tall * self.width, max(1, self.scaling.rows) * self.width
        limit = PORTION_CPU if self.codes.device.type == "cpu" else PORTION_GPU
        longest = max(1, limit // block) * block
        at = start
        while at < stop:
            matrix, first = divmod(at, size)
            matrices = min((stop - at) // size, limit // size) if first == 0 and self.scaling.per_tensor else 0
            # other portions end where rows of blocks do
            end = (
                at + matrices * size
                if matrices > 1
                else min(stop, matrix * size + min(size, (first // longest + 1) * longest))
            )
            yield matrix, max(1, matrices), at - start, first, end - at
            at = end

"""A weight that a model keeps in 8 bits with its scales, and in no other form.

What products read are these bytes: nothing is quantised between the optimizer's steps. They are made of the fp32 main parameters, of
which a rank has only a part, in three steps: `look_at` the part (the largest magnitude of every block), take the maxima of all parts
together, `cast` the part with the scales that follow. The arithmetic is that of quantize.py, so the bytes are those of a quantised
whole weight, and which part of it a rank has changes no bit. Every expert of a stack is cast by itself, as it is quantised; many at once
where that needs no loop: blocks that end with the expert make of the stack one tall matrix, and whole experts are rows with a scale each.

The parameter itself stays, for autograd, optimizer and names: shape and type, and one element that all others share (`carrier`). That is
NaN, so whoever takes it for the weight finds out.

Delayed scaling gives one scale for all experts before their maxima are known; these are kept for the next one.

Shape letters: e matrices of a stack (1 for a plain weight), N output width, K input width, B blocks of a matrix.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_trainer.ops.quantize import (
    POWER_OF_TWO,
    Quantized,
    Scaling,
    block_amax,
    round_nearest,
    scale_of,
    spread,
)

PORTION_CPU, PORTION_GPU = 1 << 18, 1 << 24
"""Elements that are cast at once."""


def can_store(scaling: Scaling, transposed: Scaling) -> bool:
    """Whether one set of bytes serves both products of a weight: a format of a byte, with scales that are the same for the transposed weight."""
    square = scaling.rows == scaling.cols and (scaling.rows, scaling.cols) == (transposed.rows, transposed.cols)
    return scaling.fmt.dtype is not None and scaling.fmt == transposed.fmt and square


class StoredMatrix(NamedTuple):
    """One weight [N, K]: its bytes in the dtype of the format, inverse scales () or [N / rows, K / cols], and its largest magnitude."""

    values_NK: Tensor
    inverse: Tensor
    amax: Tensor

    def operand(self, scaling: Scaling, transposed: bool, dtype: torch.dtype) -> Quantized:
        """As an operand of a product of numbers in `dtype`."""
        values, inverse = self.values_NK, self.inverse
        if transposed:
            values, inverse = values.t(), inverse.t() if inverse.dim() else inverse
        return Quantized(values.double() if dtype == torch.float64 else values, inverse, scaling)


class StoredWeight:
    """The bytes and scales of one parameter [N, K], or of a stack of experts [e, N, K].

    home: who keeps the fp32 values; set by the optimizer (optim/stored_state.py). codes: uint8 [e, N, K]. amax_eB: the largest
    magnitudes, of which those of all parts must be taken together between the steps.
    """

    def __init__(self, shape: torch.Size, scaling: Scaling, dtype: torch.dtype, device: torch.device,
                 given: Callable[[], Tensor | None] = lambda: None):
        """dtype: of the parameter; in fp64, which only proofs have, blocks are quantised in fp64. given: the present scale, where it does
        not follow from the values (delayed scaling)."""
        self.shape, self.scaling, self.given = shape, scaling, given
        self.num_matrices, (self.height, self.width) = (shape[0] if len(shape) == 3 else 1), shape[-2:]
        self.home: Any = None
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

    @property
    def num_blocks(self) -> int:
        """Numbers of `amax_eB`."""
        return self._scale_eB.numel()

    def carrier(self, dtype: torch.dtype) -> Tensor:
        """What the parameter holds: its shape, in one element."""
        return torch.full((1,), torch.nan, dtype=dtype, device=self.codes.device).expand(self.shape)

    def bind(self, codes: Tensor, amax: Tensor) -> None:
        """Keep the bytes, and the maxima, in a part of flat storage from here on. Both are flat."""
        self.codes, self.amax_eB = codes.view(self.num_matrices, self.height, self.width), amax.view_as(self._scale_eB)

    def __getitem__(self, index: int) -> StoredMatrix:
        return StoredMatrix(self.codes[index].view(self.scaling.fmt.dtype), self.inverse_e[index], self._largest_e[index])

    def look_at(self, values: Tensor, start: int) -> None:
        """Take a part into account, elements [start, start + len(values)) of the flat weight. `amax_eB` must be zero before the first."""
        known_B = self.amax_eB.view(self._count, -1, self.amax_eB.shape[2])
        for matrix, matrices, here, first, count in self._portions(start, start + values.numel()):
            magnitudes = values[here:here + count].to(self._dtype).abs()
            if self.scaling.per_tensor:
                known, amax = known_B[matrix:matrix + matrices, 0, 0], magnitudes.view(matrices, -1).amax(1).float()
            else:
                framed, _, row = self._framed(magnitudes, first)
                amax = block_amax(framed, self.scaling.rows, self.scaling.cols)
                known = known_B[matrix, row // self.scaling.rows:][:amax.shape[0]]
            # a maximum over ranks need not keep NaN
            known.copy_(torch.maximum(known, torch.where(torch.isfinite(amax), amax, torch.inf)))

    def settle(self) -> None:
        """Find the scales for the maxima. A block with a maximum that is not finite becomes NaN."""
        amax, given = self.amax_eB, self.given()
        if given is None:
            scale = scale_of(amax, self.scaling.fmt, self.scaling.scales == POWER_OF_TWO)
        else:
            scale = torch.where(torch.isfinite(amax), given, torch.nan)
        self._scale_eB.copy_(scale)
        self.inverse_e.copy_((1.0 / scale).view_as(self.inverse_e))
        self._largest_e.copy_(amax.flatten(1).amax(1))

    def cast(self, values: Tensor, start: int) -> None:
        """Put a part into bytes, with the scales that `settle` found."""
        codes, fmt, scale_B = self.codes.view(-1), self.scaling.fmt, self._scale_eB.view(self._count, -1, self._scale_eB.shape[2])
        for matrix, matrices, here, first, count in self._portions(start, start + values.numel()):
            part = values[here:here + count].to(self._dtype)
            if self.scaling.per_tensor:
                rounded = round_nearest(part.view(matrices, -1) * scale_B[matrix:matrix + matrices, 0], fmt).view(-1)
            else:
                framed, lead, row = self._framed(part, first)
                scale = scale_B[matrix, row // self.scaling.rows:]
                rounded = round_nearest(framed * spread(scale, self.scaling, framed.shape), fmt).view(-1)[lead:lead + count]
            at = matrix * self._tall * self.width + first
            codes[at:at + count] = rounded.to(fmt.dtype).view(torch.uint8)

    def _framed(self, part: Tensor, first: int) -> tuple[Tensor, int, int]:
        """A portion amid zeros as whole rows from the beginning of a row of blocks: (matrix, where the portion begins in it, its first row)."""
        row = first // self.width
        row -= row % self.scaling.rows
        lead = first - row * self.width
        framed = part.new_zeros(-(-(lead + part.numel()) // self.width), self.width)
        framed.view(-1)[lead:lead + part.numel()] = part
        return framed, lead, row

    def _portions(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Cut a flat range: (matrix, how many whole ones it is, where it begins in the range, first element inside the matrix, elements)."""
        size, block = self._tall * self.width, max(1, self.scaling.rows) * self.width
        limit = PORTION_CPU if self.codes.device.type == "cpu" else PORTION_GPU
        longest = max(1, limit // block) * block
        at = start
        while at < stop:
            matrix, first = divmod(at, size)
            matrices = min((stop - at) // size, limit // size) if first == 0 and self.scaling.per_tensor else 0
            # other portions end where rows of blocks do
            end = at + matrices * size if matrices > 1 else min(stop, matrix * size + min(size, (first // longest + 1) * longest))
            yield matrix, max(1, matrices), at - start, first, end - at
            at = end

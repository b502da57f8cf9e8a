"""The input of a quantized linear as it waits for the weight gradient: quantized already, in 8 or 4 bits.

The weight gradient reads x transposed, with blocks along the tokens. That operand follows from x alone, so it is made
in forward and saved instead of x: the numbers are the same, and bf16 takes twice the memory. Inputs that are
recomputed, or that something else keeps for backward anyway, are saved as they are (layers/linear.py:
save_original_input).

Shape letters: R tokens, C tokens in a buffer, K input width, B blocks, G ranks, e experts.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_trainer.quantization.grouped import GroupedOperand, TokenGroups
from moe_trainer.quantization.quantize import (
    E4M3,
    POWER_OF_TWO,
    TWO_LEVEL,
    NumberFormat,
    QuantizedTensor,
    Scaling,
    unpack_e2m1,
)
from moe_trainer.quantization.scaled_layouts import pack_e2m1


class InputFormat(NamedTuple):
    """How an input is quantized; dtype: of the operand's values where they are wider than their format."""

    scaling: Scaling
    dtype: torch.dtype


class SavedInput(NamedTuple):
    """A quantized matrix x^T.

    Args:
        values: bytes [K, R] of the format; E2M1: two numbers in a byte, [K, R / 2].
        inverse: () or [K, B]; powers of two as bytes of E8M0, otherwise fp32.
    """

    values: Tensor
    inverse: Tensor
    form: InputFormat

    @staticmethod
    def of(x: QuantizedTensor) -> "SavedInput":
        """Return an operand in as few bytes as hold it exactly."""
        scaling, inverse = x.scaling, x.inverse
        if scaling.scales == POWER_OF_TWO:
            inverse = inverse.to(torch.float8_e8m0fnu).view(torch.uint8)
        return SavedInput(_to_bytes(x.values, scaling.fmt), inverse, InputFormat(scaling, x.values.dtype))

    def operand(self) -> QuantizedTensor:
        """Return the operand."""
        scaling, dtype = self.form
        inverse, values = self.inverse, _from_bytes(self.values, scaling.fmt)
        if dtype == torch.float64:
            values = values.to(dtype)
        if scaling.scales == POWER_OF_TWO:
            inverse = inverse.view(torch.float8_e8m0fnu).float()
        return QuantizedTensor(values, inverse, scaling)

    @property
    def token_tables(self) -> tuple[Tensor, ...]:
        """Tables with columns for tokens: values, and scales of blocks."""
        return (self.values,) if self.form.scaling.per_tensor else (self.values, self.inverse)

    def shard(self, rank: int, count: int) -> "SavedInput | None":
        """Return the tokens of a rank, copied; None if they do not end with blocks or share a scale beyond these."""
        scaling = self.form.scaling
        num_tokens = self.values.shape[1] // count
        if scaling.scales == TWO_LEVEL or (not scaling.per_tensor and num_tokens % scaling.cols):
            return None
        return self._of_tables([table.chunk(count, 1)[rank].contiguous() for table in self.token_tables])

    def joined(self, tables_GKC: Sequence[Tensor]) -> "SavedInput":
        """Return the tokens of all ranks, whose token_tables these are."""
        return self._of_tables([table.transpose(0, 1).flatten(1) for table in tables_GKC])

    @staticmethod
    def stack(parts: "Sequence[SavedInput]") -> "StackedInputs":
        """Copy inputs of several weights into two flat tensors."""
        return StackedInputs(
            torch.cat([part.values.flatten() for part in parts]),
            torch.cat([part.inverse.flatten() for part in parts]),
            tuple((part.values.shape, part.inverse.shape) for part in parts),
            parts[0].form,
        )

    def _of_tables(self, tables: Sequence[Tensor]) -> "SavedInput":
        values, *inverse = tables
        return self._replace(values=values, inverse=inverse[0] if inverse else self.inverse)


class StackedInputs(NamedTuple):
    """Saved inputs of several weights, with the shapes of their values and scales."""

    values: Tensor
    inverse: Tensor
    shapes: tuple[tuple[torch.Size, torch.Size], ...]
    form: InputFormat

    def parts(self) -> Iterator[SavedInput]:
        """Yield the inputs."""
        sizes = ([shape[which].numel() for shape in self.shapes] for which in (0, 1))
        tables = (table.split(size) for table, size in zip((self.values, self.inverse), sizes))
        for values, inverse, shape in zip(*tables, self.shapes):
            yield SavedInput(values.view(shape[0]), inverse.view(shape[1]), self.form)


class SavedTokens(NamedTuple):
    """The tokens of all experts in a buffer, transposed and quantized, [K, C].

    Args:
        values: bytes, as of SavedInput.
        blocks: bytes [K, B], powers of two as E8M0 or E4M3 numbers; None if there are no blocks.
        scale_e: as of GroupedOperand.
        scaling: how they were scaled.
    """

    values: Tensor
    blocks: Tensor | None
    scale_e: Tensor | None
    scaling: Scaling

    @staticmethod
    def of(x: GroupedOperand) -> "SavedTokens":
        """Return transposed tokens in as few bytes as hold them exactly."""
        blocks = None if x.blocks is None else x.blocks.to(_block_dtype(x.scaling)).view(torch.uint8)
        return SavedTokens(_to_bytes(x.values, x.scaling.fmt), blocks, x.scale_e, x.scaling)

    def operand(self, groups: TokenGroups) -> GroupedOperand:
        """Return the operand."""
        values, scaling = _from_bytes(self.values, self.scaling.fmt), self.scaling
        blocks = None if self.blocks is None else self.blocks.view(_block_dtype(scaling)).float()
        return GroupedOperand.of(values, blocks, self.scale_e, scaling, groups, transposed=True)


def _block_dtype(scaling: Scaling) -> torch.dtype:
    return torch.float8_e8m0fnu if scaling.scales == POWER_OF_TWO else E4M3.dtype


def _to_bytes(values: Tensor, fmt: NumberFormat) -> Tensor:
    return (pack_e2m1(values) if fmt.is_packed else values.to(fmt.dtype)).view(torch.uint8)


def _from_bytes(values: Tensor, fmt: NumberFormat) -> Tensor:
    return unpack_e2m1(values) if fmt.is_packed else values.view(fmt.dtype)

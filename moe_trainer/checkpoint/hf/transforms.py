"""Transforms between Hugging Face and native tensors that hold the same numbers in another arrangement."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

ModelSizes = Mapping[str, int]


@dataclass(frozen=True)
class Transform:
    """Conversion to and from native tensors.

    Both functions take the model's sizes and may get tensors without storage. If several native tensors are made of the
    same sources, `to_native` returns and the inverse takes a sequence.

    Attributes:
        num_sources: accepted numbers of Hugging Face tensors; none: all are.
        num_natives: number of native tensors; 0: as many as Hugging Face tensors.
    """

    to_native: Callable[[Sequence[Tensor], ModelSizes], Any]
    to_hf: Callable[[Any, ModelSizes], Sequence[Tensor]]
    num_sources: tuple[int, ...] = (1,)
    num_natives: int = 1


# layers may have different numbers of key-value groups, so these follow from the rows


def _join_groups(parts: Sequence[Tensor], sizes: ModelSizes) -> Tensor:
    groups = len(parts[-2]) // sizes["D"]  # of the keys
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)


def _part_groups(full: Tensor, sizes: ModelSizes) -> Sequence[Tensor]:
    head, value, kinds = sizes["D"], sizes["DV"], 1 + sizes["gated"]  # of queries: they, and their gates
    groups = (len(full) - kinds * sizes["Q"]) // (head + value)
    widths = [sizes["Q"] // groups] * kinds + [head, value]
    return [part.flatten(0, 1) for part in full.unflatten(0, (groups, -1)).split(widths, 1)]


def _join_gated_groups(parts: Sequence[Tensor], sizes: ModelSizes) -> Tensor:
    queries, *others = parts
    head, groups = sizes["D"], sizes["K"] // sizes["D"]
    both = queries.unflatten(0, (groups, -1, 2, head))
    return torch.cat(
        [*(each.flatten(1, 2) for each in both.unbind(2)), *(part.unflatten(0, (groups, -1)) for part in others)], 1
    ).flatten(0, 1)


def _part_gated_groups(full: Tensor, sizes: ModelSizes) -> Sequence[Tensor]:
    head, groups = sizes["D"], sizes["K"] // sizes["D"]
    rows = sizes["Q"] // groups
    *both, key, value = full.unflatten(0, (groups, -1)).split([rows, rows, head, head], 1)
    queries = torch.stack([each.unflatten(1, (-1, head)) for each in both], 2).flatten(0, 3)
    return queries, key.flatten(0, 1), value.flatten(0, 1)


def _delta_rows(sizes: ModelSizes) -> tuple[list[int], list[int]]:
    """Return the rows of query, key, value and gate, and of beta and alpha, of one key head."""
    values = sizes["LV"] // sizes["LK"]
    return [sizes["LKD"], sizes["LKD"], values * sizes["LVD"], values * sizes["LVD"]], [values, values]


def _join_delta(parts: Sequence[Tensor], sizes: ModelSizes) -> Sequence[Tensor]:
    split = (
        part.unflatten(0, (sizes["LK"], -1)).split(rows, 1)
        for part, rows in zip(parts, _delta_rows(sizes), strict=True)
    )
    return [each.flatten(0, 1) for group in split for each in group]


def _part_delta(full: Sequence[Tensor], sizes: ModelSizes) -> Sequence[Tensor]:
    grouped = [each.unflatten(0, (sizes["LK"], -1)) for each in full]
    return torch.cat(grouped[:4], 1).flatten(0, 1), torch.cat(grouped[4:], 1).flatten(0, 1)


def _delta_widths(sizes: ModelSizes) -> list[int]:
    return [sizes["LK"] * sizes["LKD"], sizes["LK"] * sizes["LKD"], sizes["LV"] * sizes["LVD"]]


def _state_space_rows(sizes: ModelSizes) -> list[int]:
    """Return the rows of z, x, B, C and dt."""
    return [sizes["MI"], sizes["MI"], sizes["MG"], sizes["MG"], sizes["MH"]]


def _join_interleaved(parts: Sequence[Tensor], _sizes: ModelSizes) -> Tensor:
    rows = parts[0].t()  # a bias is its own transpose
    return torch.cat([rows[0::2], rows[1::2]])


def _part_interleaved(full: Tensor, _sizes: ModelSizes) -> Sequence[Tensor]:
    return (torch.stack(full.chunk(2), 1).flatten(0, 1).t(),)


SAME = Transform(lambda parts, _: parts[0], lambda full, _: (full,))
# gate above up
HALVES = Transform(lambda parts, _: torch.cat(tuple(parts)), lambda full, _: full.chunk(2), (1, 2))
# inputs x outputs in Hugging Face, which multiplies from the right
TRANSPOSED = Transform(lambda parts, _: parts[0].t(), lambda full, _: (full.t(),))
TRANSFORMS = MappingProxyType(
    {
        "SAME": SAME,
        "HALVES": HALVES,
        "ELEMENTS": Transform(lambda parts, _: parts[0].split(1), lambda full, _: [torch.cat(tuple(full))], (1,), 3),
        # [q..q, k, v] per key-value group, or [q..q, g..g, k, v]; Hugging Face: one tensor each
        "GROUPS": Transform(_join_groups, _part_groups, (3, 4)),
        # [q..q, g..g, k, v] per key-value group; Hugging Face: [q, g] per head
        "GATED_GROUPS": Transform(_join_gated_groups, _part_gated_groups, (3,)),
        # query, key, value, gate, beta and alpha of all heads; Hugging Face: grouped by key head, the last two in a
        # separate tensor
        "DELTA": Transform(_join_delta, _part_delta, (2,), 6),
        # parts of one native tensor, adapted together
        "EACH": Transform(lambda parts, _: parts, lambda full, _: full, (), 0),
        "THIRDS": Transform(
            lambda parts, _: parts[0].chunk(3), lambda full, _: (torch.cat(tuple(full)),), num_natives=3
        ),
        # the channels of query, key and value
        "DELTA_PARTS": Transform(
            lambda parts, sizes: parts[0].split(_delta_widths(sizes)),
            lambda full, _: (torch.cat(tuple(full)),),
            num_natives=3,
        ),
        # z, x, B, C and dt of Mamba-2, and the channels of x, B and C
        "STATE_SPACE": Transform(
            lambda parts, sizes: parts[0].split(_state_space_rows(sizes)),
            lambda full, _: (torch.cat(tuple(full)),),
            num_natives=5,
        ),
        "STATE_SPACE_CHANNELS": Transform(
            lambda parts, sizes: parts[0].split(_state_space_rows(sizes)[1:4]),
            lambda full, _: (torch.cat(tuple(full)),),
            num_natives=3,
        ),
        "TRANSPOSED": TRANSPOSED,
        # a vector; Hugging Face: a matrix of one row
        "ROW": Transform(lambda parts, _: parts[0].squeeze(0), lambda full, _: (full.unsqueeze(0),)),
        # a number of each head; Hugging Face: [1, 1, heads, 1]
        "HEADS": Transform(lambda parts, _: parts[0].flatten(), lambda full, _: (full.view(1, 1, -1, 1),)),
        # gate above up; Hugging Face: transposed, gate and up interleaved
        "INTERLEAVED": Transform(_join_interleaved, _part_interleaved),
        # a gain around zero; Hugging Face: around one
        "MINUS_ONE": Transform(lambda parts, _: parts[0] - 1, lambda full, _: (full + 1,)),
    }
)

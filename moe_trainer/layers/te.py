"""TransformerEngine: its fused kernels for routing and for the local reordering of tokens. The only file that imports it.

Nothing is imported before a chooser asks; `problem` says what stands in the way. Layers of TransformerEngine are not built yet.

Shape letters: T tokens, E experts, R rows (token, expert pairs), H hidden.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trainer.ops.permute import Permutation, PermuteMap

INSTALL = "pip install --no-build-isolation transformer_engine[pytorch]"


def problem(module: str, *names: str) -> str | None:
    """What stands in the way of using functions of transformer_engine.pytorch.<module>; None if nothing does."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "the package transformer_engine is not installed"
    qualified = f"transformer_engine.pytorch.{module}"
    if importlib.util.find_spec(qualified) is None:
        return f"the installed transformer_engine has no {qualified}"
    found = importlib.import_module(qualified)
    missing = [name for name in names if not hasattr(found, name)]
    return f"the installed transformer_engine has no {qualified}.{missing[0]}" if missing else None


@dataclass(frozen=True)
class FusedMap:
    """Where rows come from, in the library's form; rows of each expert on the device."""

    row_id_map: Tensor
    counts_E: Tensor
    shape: torch.Size


class FusedPermutation(Permutation):
    """Permutation by one kernel for rows and probabilities, one for the way back."""

    NAMES = ("moe_permute_with_probs", "moe_unpermute")

    def __init__(self) -> None:
        self.library = importlib.import_module("transformer_engine.pytorch.permutation")

    def permute(self, x_TH: Tensor, probs_TE: Tensor, routing_TE: Tensor) -> tuple[Tensor, Tensor, FusedMap | PermuteMap]:
        """As Permutation.permute. The number of rows reaches the host here."""
        counts_E = routing_TE.sum(0)
        num_rows = int(counts_E.sum())
        if num_rows == 0:
            return super().permute(x_TH, probs_TE, routing_TE)
        x_RH, probs_R, row_id_map = self.library.moe_permute_with_probs(x_TH, probs_TE, routing_TE, num_rows)
        return x_RH, probs_R, FusedMap(row_id_map, counts_E, x_TH.shape)

    def unpermute(self, y_RH: Tensor, routes: FusedMap | PermuteMap) -> Tensor:
        """As Permutation.unpermute."""
        if isinstance(routes, PermuteMap):
            return super().unpermute(y_RH, routes)
        return self.library.moe_unpermute(y_RH, routes.row_id_map, restore_shape=routes.shape)


FUSED_TOPK = "fused_topk_with_score_function"


def fused_topk() -> Callable[..., tuple[Tensor, Tensor]]:
    """The kernel that scores and chooses: (logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function,
    expert_bias) -> probs_TE, routing_TE."""
    return getattr(importlib.import_module("transformer_engine.pytorch.router"), FUSED_TOPK)

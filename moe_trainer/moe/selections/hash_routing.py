"""Experts by token id (--moe-n-hash-layers): a table of the router, tid2eid, says which.

Shape letters: T tokens, E experts, K top-k, V token ids.
"""

import torch
from torch import Tensor

from arguments.mechanisms.selection_kinds.hash_routing import HASH
from moe_trainer.moe.selections.selection import (
    Choice,
    ExpertSelection,
    RoutingInputs,
    ScoredSelection,
    SelectionContext,
    to_routing_map,
)


def make_table(vocab_size: int, topk: int, num_experts: int, device: torch.device) -> Tensor:
    """Return tid2eid_VK: token t chooses the experts (t + k) mod E, k = 0 ... K-1.

    Source: Megatron-Core's dev branch, TopKRouter. DeepSeek-V4's checkpoints bring tables of their own.
    """
    ids_V1 = torch.arange(vocab_size, dtype=torch.int32, device=device).unsqueeze(1)
    ids_K = torch.arange(topk, dtype=torch.int32, device=device)
    return (ids_V1 + ids_K) % num_experts


class HashSelection(ScoredSelection):
    """The experts of the token's row of the table; scores only weigh them."""

    declaration = HASH

    reads_token_ids = True

    @classmethod
    def build(cls, context: SelectionContext) -> "HashSelection":
        moe = context.moe
        is_forced = moe.moe_router_force_load_balancing or moe.moe_router_force_biased is not None
        # upstream's only softmax here is that over all experts
        scores = context.make_scores(pre_softmax=True)
        return (ForcedSelection if is_forced else cls)(moe.moe_router_topk, scores, context.cache_fn)

    def counted(self, logits_TE: Tensor, choice: Choice | None) -> Tensor | None:
        if self.scores.function != "softmax":
            return None
        return to_routing_map(logits_TE.topk(self.topk, dim=1)[1], logits_TE)

    def choose(self, logits_TE: Tensor, scores_TE: Tensor, inputs: RoutingInputs) -> Tensor:
        assert inputs.token_ids_T is not None and inputs.tid2eid_VK is not None
        return inputs.tid2eid_VK[inputs.token_ids_T].long()


class ForcedSelection(HashSelection):
    """The experts of the largest logits in the place of the table's: a benchmark has replaced the logits."""

    def choose(self, logits_TE: Tensor, scores_TE: Tensor, inputs: RoutingInputs) -> Tensor:
        return self.cache_fn(lambda: logits_TE.detach().topk(self.topk, dim=1)[1])


def make_selection(context: SelectionContext) -> ExpertSelection:
    return HashSelection.build(context)

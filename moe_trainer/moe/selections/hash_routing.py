"""Experts by token id (--moe-n-hash-layers): a table, tid2eid in checkpoints, says which.

Shape letters: T tokens, E experts, K top-k, V token ids.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

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


class HashSelection(ScoredSelection, nn.Module):
    """The experts of the token's row of the table; scores only weigh them.

    Buffers: tid2eid_VK int32, None before `make_tables`.
    """

    declaration = HASH

    reads_token_ids = True
    tid2eid_VK: Tensor | None

    def __init__(self, context: SelectionContext):
        # upstream's only softmax here is that over all experts
        super().__init__(context.moe.moe_router_topk, context.make_scores(pre_softmax=True), context.cache_fn)
        self.num_experts = context.moe.expert_count
        self.register_buffer("tid2eid_VK", None)

    @classmethod
    def build(cls, context: SelectionContext) -> "HashSelection":
        moe = context.moe
        is_forced = moe.moe_router_force_load_balancing or moe.moe_router_force_biased is not None
        return (ForcedSelection if is_forced else cls)(context)

    def make_tables(self, vocab_size: int, device: torch.device) -> None:
        self.tid2eid_VK = make_table(vocab_size, self.topk, self.num_experts, device)

    def state_buffers(self) -> Iterator[tuple[str, Tensor]]:
        if self.tid2eid_VK is not None:
            yield "tid2eid", self.tid2eid_VK

    def counted(self, logits_TE: Tensor, choice: Choice | None) -> Tensor | None:
        if self.scores.function != "softmax":
            return None
        return to_routing_map(logits_TE.topk(self.topk, dim=1)[1], logits_TE)

    def choose(self, logits_TE: Tensor, scores_TE: Tensor, inputs: RoutingInputs) -> Tensor:
        assert inputs.token_ids_T is not None and self.tid2eid_VK is not None
        return self.tid2eid_VK[inputs.token_ids_T].long()


class ForcedSelection(HashSelection):
    """The experts of the largest logits in the place of the table's: a benchmark has replaced the logits."""

    def choose(self, logits_TE: Tensor, scores_TE: Tensor, inputs: RoutingInputs) -> Tensor:
        return self.cache_fn(lambda: logits_TE.detach().topk(self.topk, dim=1)[1])


def make_selection(context: SelectionContext) -> ExpertSelection:
    return HashSelection.build(context)

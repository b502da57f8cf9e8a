"""A budget for the rows a rank receives (--moe-expert-rank-capacity-factor): what experts compute on has the same size every time.

Without a limit on what an expert takes, the rows that reach a rank change with every microbatch, and with them the size of all that
its experts allocate and keep. With a budget their input is a buffer of

    ceil(tokens * topk * etp * factor)

rows, of which the first ones are used; what the experts make of them has as many (and is kept as long). tokens * topk * etp is what
the rank receives when every rank gets as much as it sends, and every rank of etp a piece of all rows. Only rows that are used are
computed, so the numbers are those without a budget, bit for bit.

When a rank receives more than its budget, nothing is cut off. HybridEP, where nothing waits for the host, finds out after the fact and
must repeat the iteration with a larger budget; here the counts are on the host before the experts run, so the larger buffer is taken at
once and nothing that was computed is wrong. Such an overflow is counted, the budget stays larger from then on, and the log names
the factor that would have been enough.

Shape letters: T local tokens, R rows received, C rows of the budget, H hidden.
"""

import logging
import math

import torch
from torch import Tensor

from moe_trainer.shape.feed_forward_kept import budget_rows

logger = logging.getLogger(__name__)

_STEPS = 1000  # a factor is named in thousandths


class ReceiveBudget:
    """The budget of one MoE layer on one rank.

    factor: the one in force; it grows on an overflow. overflows: how often that was. share: rows received per token when all ranks
    receive as much as they send.
    """

    def __init__(self, name: str, factor: float, topk: int, etp: int = 1):
        """name: for the log. factor: --moe-expert-rank-capacity-factor, above 0. etp: size of the expert tensor-parallel group."""
        self.name, self.factor = name, factor
        self.share = topk * etp
        self.overflows = 0
        self._tokens = 1

    @property
    def even(self) -> int:
        """Rows of an even share: of the largest microbatch so far."""
        return self._tokens * self.share

    def rows(self, num_tokens: int, received: int) -> int:
        """Rows of the buffer for `received` rows when this rank has num_tokens tokens of its own: at least `received`.

        A rank with fewer tokens than usual (the end of a data set) has the budget of its largest microbatch so far.
        """
        self._tokens = max(self._tokens, num_tokens)
        rows = budget_rows(self.even, self.factor)
        if received <= rows:
            return rows
        self.overflows += 1
        enough = math.ceil(received / self.even * _STEPS) / _STEPS
        logger.warning(
            "%s received %d rows on this rank, and --moe-expert-rank-capacity-factor %g allows %d: the budget grows, no row is "
            "lost. --moe-expert-rank-capacity-factor %g would have been enough", self.name, received, self.factor, rows, enough)
        self.factor = enough
        return budget_rows(self.even, enough)


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_R: Tensor, rows: int) -> Tensor:
        ctx.received = x_R.shape[0]
        out_C = x_R.new_empty(rows, *x_R.shape[1:])
        out_C[:ctx.received] = x_R
        out_C[ctx.received:].zero_()  # products may run over them, and what they give must stay finite
        return out_C

    @staticmethod
    def backward(ctx, grad_C: Tensor):
        return grad_C[:ctx.received], None


def place(x_R: Tensor, rows: int) -> Tensor:
    """Copy received rows to the beginning of a buffer of `rows` rows; the others are zeros. Shapes: x_R [R, ...] -> [C, ...]."""
    return _Place.apply(x_R, rows)

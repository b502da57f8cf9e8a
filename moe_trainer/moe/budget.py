"""A budget for the rows a rank receives (--moe-expert-rank-capacity-factor): what experts compute on has the same size every time.

Without a limit on what an expert takes, the rows that reach a rank change with every microbatch, and with them the size of all that
its experts allocate and keep. With a budget their input is a buffer of

    ceil(tokens * topk * etp * factor)

rows, of which the first ones are used; what the experts make of them has as many (and is kept as long). tokens * topk * etp is what
the rank receives when every rank gets as much as it sends, and every rank of etp a piece of all rows. Only rows that are used are
computed, so the numbers are those without a budget, bit for bit; but for the gradients of experts' biases where the counts stay on the
device (`on_device`), which are summed by a grouped GEMM there and agree to rounding.

When a rank receives more than its budget, no token is lost. Where the counts are on the host before the experts run, the larger buffer is
taken at once and nothing that was computed is wrong. The budget stays larger from then on, and the log names the factor that would have
been enough.

HybridEP can receive into a buffer of that size without anybody's knowing the counts (`on_device`): then no MoE layer waits for the host.
Rows that find no room are dropped there, which is known after the fact: a flag of the layer is set on the device, the training loop reads
the flags of all layers and ranks once per iteration, together with the loss, and repeats an iteration in which one is set
(training/step.py), this time with the counts on the host, so that the budgets grow to what it takes. Only there is the flag read, so
only there (`counts_on_device`) the counts stay away; evaluations and single forward passes ask for them. Megatron-Core repeats the iteration, too: without any
budget, and with the same budget again in the next iteration; it reads the flags by a wait of their own.

Shape letters: T local tokens, R rows received, C rows of the budget, H hidden.
"""

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from moe_trainer.shape.feed_forward_kept import budget_rows

logger = logging.getLogger(__name__)

_STEPS = 1000  # a factor is named in thousandths


class ReceiveBudget:
    """The budget of one MoE layer on one rank.

    factor: the one in force; it grows on an overflow. share: rows received per token when all ranks receive as much as they send.
    may_stay: can the layer do without the counts on the host? on_device: do they stay away now? logs: is every growth logged?
    """

    def __init__(self, name: str, factor: float, topk: int, etp: int = 1):
        """name: for the log. factor: --moe-expert-rank-capacity-factor, above 0. etp: size of the expert tensor-parallel group."""
        self.name, self.factor = name, factor
        self.share = topk * etp
        self.may_stay = self.on_device = False
        self.logs = True
        self._lost: Tensor | None = None
        self._tokens = 1

    @property
    def even(self) -> int:
        """Rows of an even share: of the largest microbatch so far."""
        return self._tokens * self.share

    def rows(self, num_tokens: int, received: int) -> int:
        """Rows of the buffer for `received` rows when this rank has num_tokens tokens of its own: at least `received`.

        A rank with fewer tokens than usual (the end of a data set) has the budget of its largest microbatch so far.
        """
        rows = self.fixed_rows(num_tokens)
        if received <= rows:
            return rows
        enough = math.ceil(received / self.even * _STEPS) / _STEPS
        if self.logs:
            logger.warning(
                "%s received %d rows on this rank, and --moe-expert-rank-capacity-factor %g allows %d: the budget grows, no row is "
                "lost. --moe-expert-rank-capacity-factor %g would have been enough", self.name, received, self.factor, rows, enough)
        self.factor = enough
        return budget_rows(self.even, enough)

    def fixed_rows(self, num_tokens: int) -> int:
        """Rows of the buffer, whatever is received."""
        self._tokens = max(self._tokens, num_tokens)
        return budget_rows(self.even, self.factor)

    def note(self, overflow: Tensor) -> None:
        """A dispatch into a fixed buffer has set this flag, integer [1]; nobody waits for it."""
        if self._lost is None:
            self._lost = torch.zeros_like(overflow)
        torch.maximum(self._lost, overflow, out=self._lost)

    def lost(self) -> Tensor | None:
        """Was any flag set since `reset`? Integer [1] on the device, None where there was no such dispatch."""
        return self._lost

    def reset(self) -> None:
        """Forget the flags."""
        self._lost = None


def budgets_of(chunks: Iterable) -> list[ReceiveBudget]:
    """The budgets of all MoE layers of these model chunks."""
    return [layer.budget for chunk in chunks for layer in chunk.moe_layers() if layer.budget is not None]


@contextlib.contextmanager
def growing(chunks: Iterable) -> Iterator[list[tuple[str, float, float]]]:
    """A scope in which budgets grow without a line in the log for each time. Gives a list that is filled when it is over: of the budgets
    that have grown the name and the factors before and after."""
    budgets, grown = budgets_of(chunks), []
    before = [budget.factor for budget in budgets]
    for budget in budgets:
        budget.logs = False
    try:
        yield grown
    finally:
        for budget in budgets:
            budget.logs = True
        grown += [(budget.name, factor, budget.factor) for budget, factor in zip(budgets, before, strict=True) if budget.factor > factor]


@contextlib.contextmanager
def counts_on_device(chunks: Iterable, wanted: bool = True) -> Iterator[None]:
    """A scope in which layers that can do without counts on the host do so; whoever opens it reads `overflowed` when it is over.

    wanted False: one in which they do not, although they could.
    """
    budgets = budgets_of(chunks)
    for budget in budgets:
        budget.reset()
        budget.on_device = wanted and budget.may_stay
    try:
        yield
    finally:
        for budget in budgets:
            budget.on_device = False


def overflowed(chunks: Iterable, device: torch.device) -> Tensor:
    """In how many layers of this rank rows found no room in the last scope, fp64 [1] on the device; nobody waits for it."""
    flags = [flag for budget in budgets_of(chunks) if (flag := budget.lost()) is not None]
    return torch.cat(flags).count_nonzero().double().view(1) if flags else torch.zeros(1, dtype=torch.float64, device=device)


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

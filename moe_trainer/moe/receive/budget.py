"""Budget for the routed tokens that a rank receives (--moe-expert-rank-capacity-factor), so sizes are fixed.

Without a limit, the tokens that reach a rank change with every microbatch, and with them the size of all that its
experts allocate and save. With a budget the experts' input is a buffer of ceil(tokens * topk * etp * factor) tokens,
of which the first ones are used. tokens * topk * etp is what a rank receives under perfect balance. Only used tokens
are computed, so the numbers are those without a budget, bit for bit, except for the gradients of experts' biases with
counts on the device, which a grouped GEMM sums.

If a rank receives more than its budget, no token is lost. With counts on the host a larger buffer is allocated at once;
the budget stays larger, and after the iteration the log names the sufficient factor, in one line. A fixed buffer needs
no counts on the host, so no MoE layer waits: HybridEP receives into it, and the all-to-all, which replaces HybridEP
where that is missing, exchanges a slot of equal size with every rank. Tokens that do not fit are dropped there and set
a flag on the device; the training loop reads the flags of all layers and ranks once per iteration, with the loss, and
repeats an iteration that set one, with counts on the host. Then all ranks adopt the largest factor that a layer needed
on any of them, so fixed buffers have the same size everywhere. The flags are read only there, so only there
(`receive_scope`) the counts stay on the device. A CUDA graph sets the same flags, whose memory is allocated when the
model is built; a repeated iteration runs without graphs, which are captured again with the larger buffers.
Megatron-Core also repeats the iteration: without any budget, then with the same budget again; it reads the flags by an
extra wait.

Shape letters: T local tokens, R routed tokens received, C tokens in the buffer, H hidden.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from moe_trainer.memory.paged_stash import PagedStash, round_up_factor
from moe_trainer.ops.block_sizes import expert_buffer_tokens


class ReceiveBudget:
    """Budget of one MoE layer on one rank.

    Attributes:
        factor: the current factor, which grows on overflow.
        fixed_factor: the factor of fixed buffers, the same on all ranks; follows the largest `factor` in `adopt`, so a
            larger `factor` means that the budget has grown since.
        share: routed tokens received per local token under perfect balance.
        allows_device_counts: the layer can run without counts on the host.
        counts_on_device: the counts stay on the device now.
    """

    def __init__(self, name: str, factor: float, topk: int, etp_size: int = 1):
        """Store the settings; `name` is for the log, `factor` is --moe-expert-rank-capacity-factor, above 0."""
        self.name, self.factor, self.fixed_factor = name, factor, factor
        self.share = topk * etp_size
        self.allows_device_counts = self.counts_on_device = False
        self._overflow: Tensor | None = None
        self._max_tokens = 1

    def allocate_flag(self, device: torch.device) -> None:
        """Allocate the overflow flag, which counts that stay on the device need."""
        self._overflow = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def balanced_size(self) -> int:
        """Routed tokens received under perfect balance, for the largest microbatch so far."""
        return self._max_tokens * self.share

    def size_for(self, num_tokens: int, num_received: int) -> int:
        """Return the size for `num_tokens` local tokens, at least `num_received`; grow the factor if needed.

        A rank with fewer tokens than usual (the end of a data set) has the budget of its largest microbatch so far.
        """
        self._max_tokens = max(self._max_tokens, num_tokens)
        size = expert_buffer_tokens(self.balanced_size, self.factor)
        if num_received <= size:
            return size
        self.factor = round_up_factor(num_received / self.balanced_size)
        return expert_buffer_tokens(self.balanced_size, self.factor)

    def fixed_size(self, num_tokens: int) -> int:
        """Return the fixed buffer's size, whatever is received."""
        self._max_tokens = max(self._max_tokens, num_tokens)
        return expert_buffer_tokens(self.balanced_size, self.fixed_factor)

    def adopt(self, factor: float) -> None:
        """Use this factor from now on; the same on all ranks."""
        self.factor = self.fixed_factor = factor

    def note_overflow(self, overflow: Tensor | None) -> None:
        """Accumulate the overflow flag of a dispatch, int32 [1], on the device.

        Raises:
            ValueError: if the dispatcher gives none, or none was allocated, so that lost tokens would not be noticed.
        """
        if overflow is None or self._overflow is None:
            raise ValueError(f"{self.name}: token counts are on the device, without a flag for tokens that do not fit")
        torch.maximum(self._overflow, overflow, out=self._overflow)

    @property
    def overflow(self) -> Tensor | None:
        """Whether a flag was set since `reset`: int32 [1] on the device, None if the counts are on the host."""
        return self._overflow

    def reset(self) -> None:
        """Clear the flags."""
        if self._overflow is not None:
            self._overflow.zero_()


def get_receive_budgets(chunks: Iterable) -> list[ReceiveBudget]:
    """Return the budgets of all MoE layers of these model chunks."""
    return [budget for chunk in chunks for layer in chunk.moe_layers() for budget in layer.receive.budgets]


def get_stashes(chunks: Iterable) -> list[PagedStash]:
    """Return the paged stashes of these model chunks, which usually share one."""
    per_layer = [layer.activations.stash for chunk in chunks for layer in chunk.moe_layers()]
    return list({id(stash): stash for stash in per_layer if stash is not None}.values())


def get_grown_budgets(chunks: Iterable) -> list[ReceiveBudget]:
    """Return the budgets that have grown since they last adopted a factor."""
    return [budget for budget in get_receive_budgets(chunks) if budget.factor > budget.fixed_factor]


@contextlib.contextmanager
def receive_scope(chunks: Iterable, enabled: bool = True) -> Iterator[None]:
    """Receive tokens of one iteration: leave counts on the device where layers allow it, and begin the paged stash.

    The caller must read `count_overflows` on exit. The first iteration of a stash has counts on the host.
    """
    budgets, stashes = get_receive_budgets(chunks), get_stashes(chunks)
    for stash in stashes:
        stash.begin_iteration()
    enabled = enabled and not any(stash.is_measuring for stash in stashes)
    for budget in budgets:
        budget.reset()
        budget.counts_on_device = enabled and budget.allows_device_counts
    try:
        yield
    finally:
        for budget in budgets:
            budget.counts_on_device = False


def count_overflows(chunks: Iterable, device: torch.device) -> Tensor:
    """Return how many of this rank's layers dropped tokens in the last scope: fp64 [1] on the device.

    A paged stash without enough pages counts as one.
    """
    flags = [flag for budget in get_receive_budgets(chunks) if (flag := budget.overflow) is not None]
    flags += [stash.overflow for stash in get_stashes(chunks)]
    if not flags:
        return torch.zeros(1, dtype=torch.float64, device=device)
    return torch.cat(flags).count_nonzero().double().view(1)


def count_growing_stashes(chunks: Iterable, device: torch.device) -> Tensor:
    """Return how many of this rank's stashes will have other memory in the next scope: fp64 [1] on the device."""
    growing = sum(stash.will_grow for stash in get_stashes(chunks))
    return torch.full((1,), growing, dtype=torch.float64, device=device)

"""Forward of one microbatch merged with backward of another (--overlap-moe-expert-parallel-comm).

In the steady state of a schedule a forward and a backward follow each other. As a pair (plan.py) they run in two threads that pass
a baton (parallel/baton.py) wherever tokens are exchanged between expert-parallel ranks: while the rows of one are under way, the
other computes. With --delay-wgrad-compute the backward's weight gradients wait for the same places, and lengthen what hides the
exchange.

On CUDA exchanges run on the stream of their communicator, and the computations of both passes on the current stream in the order of
the baton: two streams, of which the first is hidden behind the second. A second compute stream was rejected: the passes
would compete for the same multiprocessors, and every tensor would have to be handed between streams. On CPU the exchanges are
asynchronous collectives. Rejected, too: cutting every layer into parts that a schedule calls one by one (as Megatron-LM does),
which repeats the model's text in the schedule.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from moe_trainer.parallel.baton import Baton


class Pairs:
    """Runs pairs of passes; the forward one always in one and the same thread of its own."""

    def __init__(self, baton: Baton, device: torch.device):
        self.baton = baton
        self._device = device
        self._executor = ThreadPoolExecutor(1, "forward", torch.set_num_threads, (torch.get_num_threads(),))

    def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run both to their ends. Raises: what one of them raises."""
        self.baton.run(forward if self._device.type == "cpu" else self._on_stream(forward), backward, self._executor)

    def _on_stream(self, forward: Callable[[], None]) -> Callable[[], None]:
        """Device and stream of a thread are its own: give the other one this thread's."""
        stream = torch.cuda.current_stream(self._device)

        def run() -> None:
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                forward()

        return run

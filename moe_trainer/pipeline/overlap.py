"""Forward of one microbatch overlapped with backward of another (--overlap-moe-expert-parallel-comm).

A forward-backward pair of a schedule runs in two threads that alternate (parallel/overlap_threads.py) wherever tokens
are exchanged between expert-parallel ranks: while one pass communicates, the other computes. With --delay-wgrad-compute
the weight gradients are computed at the same points. docs/design/pipeline.md discusses streams and alternatives.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from moe_trainer.parallel.overlap_threads import AlternatingExecutor


class FwdBwdPairRunner:
    """Runs forward-backward pairs; all forwards run in one separate thread."""

    def __init__(self, overlap_executor: AlternatingExecutor, device: torch.device):
        self.overlap_executor = overlap_executor
        self._device = device
        self._executor = ThreadPoolExecutor(1, "forward", torch.set_num_threads, (torch.get_num_threads(),))

    def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run both passes to completion; raises what one of them raises."""
        self.overlap_executor.run(
            forward if self._device.type == "cpu" else self._on_stream(forward), backward, self._executor
        )

    def _on_stream(self, forward: Callable[[], None]) -> Callable[[], None]:
        """Run `forward` on the device and stream of the calling thread, which are per thread."""
        stream = torch.cuda.current_stream(self._device)

        def run() -> None:
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                forward()

        return run

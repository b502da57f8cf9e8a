"""Profiling: `--profile` records the iterations [--profile-step-start, --profile-step-end) on selected ranks.

With `--use-pytorch-profiler` torch's profiler writes a Chrome trace. Without it the range is marked for NVIDIA Nsight
Systems (cudaProfilerStart/Stop), which exists on CUDA only, so CPU runs always use torch's profiler. --nvtx-ranges
(metrics/nvtx.py) names parts of the step there, and --record-shapes every operator with the shapes it gets. With
`--pytorch-profiler-collect-chakra` torch also writes an execution trace of the same iterations, the input of Chakra's
tools.
"""

from pathlib import Path

import torch

from arguments.output import OutputArgs


class Profiler:
    """Starts and stops profiling at the chosen iterations; call `before` and `after` around each iteration."""

    def __init__(self, output: OutputArgs, rank: int):
        self._active, self._rank = output.profile and rank in output.profile_ranks, rank
        self._start, self._end = output.profile_step_start, output.profile_step_end
        self._folder = Path(output.tensorboard_dir or output.save or ".") / "profile"
        self._torch_profiler: torch.profiler.profile | None = None
        self._execution: torch.profiler.ExecutionTraceObserver | None = None
        self._operators: torch.autograd.profiler.emit_nvtx | None = None
        self._record_shapes = output.record_shapes
        if self._active and (output.use_pytorch_profiler or not torch.cuda.is_available()):
            self._torch_profiler = torch.profiler.profile(
                record_shapes=output.pytorch_profiler_collect_shapes,
                with_stack=output.pytorch_profiler_collect_callstack,
            )
            if output.pytorch_profiler_collect_chakra:
                self._execution = torch.profiler.ExecutionTraceObserver()

    def before(self, iteration: int) -> None:
        """Start if `iteration` (1-based, about to run) is the first to record."""
        if self._active and iteration == self._start + 1:
            if self._execution is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._execution.register_callback(str(self._path("chakra")))
                self._execution.start()
            if self._torch_profiler is not None:
                self._torch_profiler.start()
            else:
                torch.cuda.cudart().cudaProfilerStart()
                if self._record_shapes:
                    self._operators = torch.autograd.profiler.emit_nvtx(record_shapes=True)
                    self._operators.__enter__()

    def after(self, iteration: int) -> Path | None:
        """Stop if `iteration` was the last to record, and return the trace file if one was written."""
        if not self._active or iteration != self._end:
            return None
        if self._torch_profiler is None:
            if self._operators is not None:
                self._operators.__exit__(None, None, None)
                self._operators = None
            torch.cuda.cudart().cudaProfilerStop()
            return None
        self._torch_profiler.stop()
        if self._execution is not None:
            self._execution.stop()
            self._execution.unregister_callback()  # which completes the file
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path()
        self._torch_profiler.export_chrome_trace(str(path))
        return path

    def _path(self, kind: str = "") -> Path:
        return self._folder / f"{kind and kind + '_'}rank{self._rank}_iterations{self._start + 1}-{self._end}.json"

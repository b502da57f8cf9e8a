"""--record-step: run an iteration and write everything that is needed to repeat it (debug/step_record.py).

Weights, generators and scales are saved before the step, batches and projections during it, gradients when they are
reduced. The results are unchanged, but CUDA graphs are not replayed, since intermediate results inside a graph cannot
be read.

All ranks write; rank 0 also receives weights and gradients tensor by tensor. An I/O failure loses the record, not the
run.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from arguments import Arguments
from arguments.checkpoint_args import MAPPING, SHAPE, UNLESS_GIVEN
from arguments.mechanisms.formats import quantized_format
from arguments.spelling import to_command_line
from moe_trainer.data.loader import Batch
from moe_trainer.debug import step_record
from moe_trainer.debug.module_tracer import ModuleTracer
from moe_trainer.metrics.iteration import StepResult
from moe_trainer.model.module_names import named_transformer_layers
from moe_trainer.model.transformer import Transformer
from moe_trainer.model.weights import export_named_weights
from moe_trainer.parallel import collectives
from moe_trainer.parallel.coordination import drain_on_exit, gather_errors
from moe_trainer.resilience.rewindable import RewindableIterator
from moe_trainer.training.dumps import gather_unscaled_grads
from moe_trainer.training.export import write_weights
from moe_trainer.training.rerun import make_rewindable_iterator
from moe_trainer.training.run import BaseRun, TrainRun, TrainState, with_batches
from moe_trainer.training.step import train_step

logger = logging.getLogger(__name__)

COUNTS = (
    "iteration",
    "consumed_train_samples",
    "consumed_valid_samples",
    "skipped_train_samples",
    "scheduled_samples",
    "total_flops",
)
"""Fields of TrainState that describe the progress of the run."""
AXES = ("tp", "cp", "pp", "dp", "ep", "etp")
"""Groups whose sizes make a parallel mapping."""


def record_folder(run: BaseRun, state: TrainState) -> Path | None:
    """Return the folder under --save for the record of the next iteration, None unless --record-step names it."""
    output, number = run.args.output, state.iteration + 1
    return None if output.save is None or output.record_step != number else Path(output.save, f"recorded_step_{number}")


def record_step(run: TrainRun, state: TrainState, num_microbatches: int, folder: Path) -> StepResult:
    """Run `train_step` and record it in a folder. Collective."""
    number = state.iteration + 1
    get_numbers, is_first = run.inputs.sample_numbers, run.ps.world.rank == 0
    numbers = get_numbers(state.consumed_train_samples, num_microbatches) if is_first else []
    result, problem, size = record_iteration(run, state, num_microbatches, folder, numbers)
    if problem is not None:
        logger.warning("--record-step %d: this iteration is not recorded (%s); the run continues", number, problem)
    else:
        logger.info(
            f"--record-step: iteration {number} is recorded in {folder} ({size / 1e6:.1f} MB): python "
            f"scripts/replay.py {folder} [FLAGS]"
        )
    return result


def record_iteration(
    run: TrainRun,
    state: TrainState,
    num_microbatches: int,
    folder: Path,
    sample_numbers: Sequence[int] = (),
    weights: bool = True,
) -> tuple[StepResult, str | None, int]:
    """Run an iteration on the next batches and write its record to `folder`. Collective over the world.

    `sample_numbers`, on rank 0, are indices into the dataset in the order of the global batch. `weights`: save the
    weights too.

    Returns:
        Result of train_step; why there is no record, or None; size in bytes.

    Raises: as train_step. A record is also written if losses or gradients are not finite.
    """
    writing = _RecordWriter(run, folder)
    counters = {name: getattr(state, name) for name in COUNTS}
    writing.begin(weights)
    replayable = make_rewindable_iterator(run)
    replayable.begin()
    recorder = StepRecorder(run, num_microbatches, writing.gradients)
    result: StepResult | FloatingPointError
    try:
        result = train_step(with_batches(run, replayable), state, num_microbatches, recorder)
    except FloatingPointError as error:  # raised on all ranks
        result = error
        writing.gradients()
    finally:
        recorder.detach()
    samples = num_microbatches * run.args.training.micro_batch_size * run.ps.dp.size
    head = {
        **record_metadata(run, counters, samples, run.args.data.seq_length),
        "sample_numbers": list(sample_numbers),
        "losses": getattr(result, "losses", {}),
        "failure": str(result) if isinstance(result, FloatingPointError) else None,
        **{name: getattr(result, name, None) for name in ("grad_norm", "skipped", "dropped_tokens")},
    }
    problem, size = writing.finish(head, recorder, replayable)
    if isinstance(result, FloatingPointError):
        if problem is None:
            logger.warning("iteration %d is recorded in %s", counters["iteration"] + 1, folder)
        raise result
    return result, problem, size


def record_metadata(run: TrainRun, counters: Mapping[str, Any], samples: int, seq_length: int) -> dict[str, Any]:
    """Return the metadata of an iteration, the head of its record."""
    ps, args, device = run.ps, run.args, run.runtime.device
    fmt = quantized_format(args.precision)
    return {
        "iteration": counters["iteration"] + 1,
        "state": dict(counters),
        "flags": to_command_line(explicit_flags(args)),
        "world_size": ps.world.size,
        "mapping": {name: getattr(ps, name).size for name in AXES},
        "samples": samples,
        "micro_batch_size": args.training.micro_batch_size,
        "seq_length": seq_length,
        "padded_vocab_size": run.padded_vocab_size,
        "vocab_size": args.data.vocab_size,
        "dtype": args.precision.params_dtype_name,
        "quantized": None if fmt is None else getattr(args.precision, fmt.flags.name),
        "loss_scale": float(run.optimizer.loss_scale),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def explicit_flags(args: Arguments) -> dict[str, object]:
    """Return what command line, recipe or checkpoint set explicitly, enough to pass the same flags again."""
    taken = (*SHAPE, *UNLESS_GIVEN, *(MAPPING if args.output.use_mp_args_from_checkpoint_args else ()))
    names = {*args.spelling, *(taken if args.output.use_checkpoint_args else ())}
    return {name: value for name, value in args.as_dict().items() if name in names}


class _RecordWriter:
    """Writer of the files of one record; `problem` is why it fails. Methods are collective."""

    def __init__(self, run: TrainRun, folder: Path):
        self.run, self.folder = run, folder
        self.problem: str | None = None
        self.staging_dir = folder.with_name(f"{folder.name}.unfinished")
        self.files: list[str] = []
        self.scaling: dict[str, Tensor] = {}
        self._has_gradients = False

    def begin(self, weights: bool) -> None:
        """Create the staging directory and write the weights."""
        run, ps = self.run, self.run.ps
        if ps.world.rank == 0:
            self._try(lambda: step_record.make_staging_dir(self.folder))
        collectives.barrier(ps.world)
        run.wait_params()
        if weights:
            self._write_full_tensors(step_record.WEIGHTS, export_named_weights(run.chunks, ps))
        self.scaling = {
            f"{step_record.SCALING}{name}": tensor.detach().clone()
            for chunk in run.chunks
            for name, tensor in chunk.named_scaling_state()
        }

    def gradients(self) -> None:
        """Write the gradients, reduced and not yet clipped, unless that has been done."""
        if not self._has_gradients:
            self._has_gradients = True
            self._write_full_tensors(step_record.GRADIENTS, gather_unscaled_grads(self.run))

    def finish(
        self, head: Mapping[str, Any], recorder: StepRecorder, replayable: RewindableIterator[Batch]
    ) -> tuple[str | None, int]:
        """Write the data of every rank and finalize the record.

        Returns:
            The first problem of any rank or None; size in bytes.
        """
        ps, size = self.run.ps, 0
        fields = {}
        if ps.tp.rank == ps.cp.rank == ps.pp.rank == 0:
            fields = {
                f"{step_record.BATCH}{name}": torch.stack([getattr(batch, name) for batch in replayable.batches])
                for name, value in vars(replayable.batches[0]).items()
                if isinstance(value, Tensor)
            }
        tensors = recorder.tensors({**self.scaling, **fields})
        random_state = to_plain_types(replayable.random_state)
        if self.problem is None:
            self._try(lambda: step_record.write_rank(self.staging_dir, ps.world.rank, tensors, random_state))
        problems = gather_errors(self.problem, ps.world)
        if not problems and ps.world.rank == 0:
            of_rank = (step_record.rank_file, step_record.random_file)
            names = [*self.files, *(name(rank) for rank in range(ps.world.size) for name in of_rank)]
            size = self._try(lambda: step_record.finalize_record(self.staging_dir, self.folder, head, names)) or 0
            problems = [] if self.problem is None else [self.problem]
        problem, size = collectives.broadcast_object((next(iter(problems), None), size), ps.world)
        if problem is not None and ps.world.rank == 0:
            shutil.rmtree(self.staging_dir, ignore_errors=True)
        return problem, size

    def _write_full_tensors(self, name: str, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Write full tensors on rank 0; the other ranks send theirs even if the write fails."""
        with drain_on_exit(tensors):
            if self.run.ps.world.rank == 0 and self.problem is None:
                self.files.append(name)
                self._try(lambda: write_weights(tensors, os.fspath(self.staging_dir / name)))

    def _try(self, write: Any) -> Any:
        try:
            return write()
        except (OSError, ValueError, RuntimeError) as error:
            self.problem = f"rank {self.run.ps.world.rank}: {error}"
            return None


class StepRecorder:
    """Observer that records projections of the outputs of this rank's layers during one iteration."""

    def __init__(self, run: TrainRun, num_microbatches: int, take_gradients: Any):
        self.run, self.num_microbatches, self._take_gradients = run, num_microbatches, take_gradients
        self.by_token: dict[str, list[Tensor]] = defaultdict(list)
        self._calls: dict[int, int] = defaultdict(int)
        self._signs: dict[int, Tensor] = {}
        self._tracer = ModuleTracer()

    def attach(self) -> None:
        """Attach to modules and routers. A router that is already recorded stays so."""
        repeated, depths = self.run.args.model.mtp_use_repeated_layer, self.run.args.model.num_mtp_depths
        for chunk in self.run.chunks:
            layout = chunk.layout
            ahead = [f"mtp.layers.{depth}" for depth in range(depths)]
            if chunk.embedding is not None:
                names = ["embedding"] * layout.has_embedding + [f"{each}.embedding" for each in ahead] * (
                    chunk.mtp is not None
                )
                self._hook(chunk, chunk.embedding, names)
            for name, layer in named_transformer_layers([chunk]):
                passes = [name]
                if name.startswith("mtp.") and repeated:
                    passes = [each + name.removeprefix(ahead[0]) for each in ahead]
                for part, module in layer.sublayers.items():
                    self._hook(chunk, module, [f"{each}.{part}" for each in passes])
                if layer.is_moe:
                    layer.mlp.router.recorder = _RouterRecordAdapter(
                        self, [f"{each}.mlp.router" for each in passes], layer.mlp.router
                    )
            if chunk.decoder.final_layernorm is not None:
                self._hook(chunk, chunk.decoder.final_layernorm, [chunk.decoder.final_norm_name])
            for depth, mtp_layer in enumerate([] if chunk.mtp is None else chunk.mtp.layers):
                self._hook(chunk, mtp_layer, ahead if repeated else [ahead[depth]])
            if layout.has_loss:
                self._tracer.on_output(chunk, lambda _inputs, loss_BS: self.add("loss", loss_BS.t().unsqueeze(-1)))

    def _hook(self, chunk: Transformer, module: nn.Module, names: Sequence[str]) -> None:
        """Record a module's outputs under `names`, one per call in a pass of the chunk."""
        if names:
            self._tracer.on_output(
                module, lambda _inputs, y_SBH: self.trace(self.next_of(module, names), y_SBH), chunk.activations
            )

    def next_of(self, caller: object, names: Sequence[str]) -> str:
        """Return the name of a caller's next call; names take turns."""
        self._calls[id(caller)] += 1
        return names[(self._calls[id(caller)] - 1) % len(names)]

    def trace(self, name: str, x_SBH: Tensor) -> None:
        """Record the projections of an output."""
        width = x_SBH.shape[-1]
        if width not in self._signs:
            self._signs[width] = step_record.random_signs(width, x_SBH.device)
        self.add(name, step_record.project_tokens(x_SBH, self._signs[width]))

    def add(self, name: str, kept: Tensor, prefix: str = step_record.TRACE) -> None:
        """Record [rows, B, K] of the next microbatch; of tensor ranks with equal rows only the first one does."""
        tp = self.run.ps.tp
        if tp.rank == 0 or kept.shape[0] != len(self._positions()[0]):
            self.by_token[f"{prefix}{name}"].append(kept.detach().cpu())

    def on_retry(self) -> None:
        """Discard what was recorded."""
        self.by_token.clear()
        self._calls.clear()

    def before_update(self) -> None:
        """Write the reduced gradients."""
        self._take_gradients()

    def detach(self) -> None:
        self._tracer.stop()
        for chunk in self.run.chunks:
            for layer in chunk.moe_layers():
                layer.router.recorder = None

    def _positions(self) -> list[Tensor]:
        """Return the sequence positions of a context rank's rows, and of a tensor rank's part of them."""
        ps = self.run.ps
        positions = self.run.chunks[0].sequence.positions(self.run.args.data.seq_length)
        return [positions, positions.chunk(ps.tp.size)[ps.tp.rank]]

    def tensors(self, others: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all tensors that this rank writes, with sample indices in the loader's order."""
        dp, micro = self.run.ps.dp, self.run.args.training.micro_batch_size
        first = torch.arange(self.num_microbatches)[:, None] * dp.size + dp.rank
        samples = first * micro + torch.arange(micro)
        return step_record.tensors_of_rank(samples, self._positions(), self.by_token, others)


class _RouterRecordAdapter(list):
    """Recorder of a router that records projections and choices, and forwards to an earlier recorder."""

    def __init__(self, recorder: StepRecorder, names: Sequence[str], router: Any):
        super().__init__()
        self.recorder, self.names, self.router, self.further = recorder, names, router, router.recorder

    def append(self, route: Mapping[str, Tensor]) -> None:
        """Record a microbatch: logits, probs and map, [T, E] with token s * B + b."""
        recorder = self.recorder
        name = recorder.next_of(self, self.names)
        micro = recorder.run.args.training.micro_batch_size
        for what in ("logits", "probs"):
            recorder.trace(f"{name}.{what}", route[what].reshape(-1, micro, route[what].shape[-1]))
        chosen = route["map"].reshape(-1, micro, route["map"].shape[-1])
        recorder.add(name, step_record.pack(chosen), step_record.CHOICE)
        margin_T = self.router.margin(route["logits"])
        if margin_T is not None:
            recorder.add(name, margin_T.reshape(-1, micro, 1), step_record.MARGIN)
        if self.further is not None:
            self.further.append(route)

    def clear(self) -> None:
        """Discard what was recorded."""
        self.recorder.on_retry()
        if self.further is not None:
            self.further.clear()


def to_plain_types(state: Any) -> Any:
    """Convert generator states from numpy arrays to plain types, which can be loaded with weights_only."""
    if isinstance(state, Mapping):
        return {key: to_plain_types(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(to_plain_types, state))
    return state.tolist() if hasattr(state, "tolist") and not isinstance(state, Tensor) else state

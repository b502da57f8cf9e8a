"""--record-step: an iteration is run as any other, and everything that is needed to run it again is written (guard/record.py).

Weights, generators and scales are taken before the step, batches and traces while it runs, gradients when they are reduced and before the
optimizer reads them. Nothing of it changes what is computed, but for parts that are captured as CUDA
graphs: they run one by one in this iteration, since what a graph holds cannot be looked at.

All ranks write; rank 0 also receives weights and gradients tensor by tensor. A disk that does not take it costs the record, not the run.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from arguments import Arguments
from arguments.checkpoint_args import MAPPING, SHAPE, WHERE_NOT_GIVEN
from arguments.spelling import flags_of
from moe_trainer.data.loader import Batch, build_loader
from moe_trainer.guard import record
from moe_trainer.guard.beginning import Beginning
from moe_trainer.model.transformer import Transformer
from moe_trainer.model.weights import export_named_weights, gather_named, gradient_of
from moe_trainer.moe.router import TopKRouter
from moe_trainer.parallel import collectives
from moe_trainer.run import Run, TrainState, layers_of
from moe_trainer.training.agreement import sent_by_all
from moe_trainer.training.export import write_weights
from moe_trainer.training.judgement import beginning_of
from moe_trainer.training.step import StepResult, train_step

logger = logging.getLogger(__name__)

COUNTS = ("iteration", "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples", "scheduled_samples", "total_flops")
"""Of TrainState, what says how far the run was."""
AXES = ("tp", "cp", "pp", "dp", "ep", "etp")
"""The parallel sizes that make a mapping, by the names that groups have."""


def recording_is_due(run: Run, state: TrainState) -> bool:
    """Is the next iteration the one that --record-step asks for?"""
    return run.args.output.record_step == state.iteration + 1


def record_step(run: Run, state: TrainState, num_microbatches: int) -> StepResult:
    """`train_step`, recorded under --save. Collective."""
    number = state.iteration + 1
    folder = Path(run.args.output.save, f"recorded_step_{number}")
    numbers = sample_numbers(run, state, num_microbatches) if run.ps.world.rank == 0 else []
    result, problem, size = record_iteration(run, state, num_microbatches, folder, numbers)
    if problem is not None:
        logger.warning("--record-step %d: this iteration is not recorded (%s); the run goes on", number, problem)
    else:
        logger.info("--record-step: iteration %d is recorded in %s (%.1f MB): python scripts/replay.py %s [FLAGS]",
                    number, folder, size / 1e6, folder)
    return result


def record_iteration(run: Run, state: TrainState, num_microbatches: int, folder: Path, numbers: Sequence[int] = (),
                     weights: bool = True) -> tuple[StepResult, str | None, int]:
    """Run an iteration on the run's next batches and write its record to `folder`. Collective over the world.

    numbers: on rank 0, of the samples in their dataset, in the order of the global batch. weights: write those, too?
    Returns: what train_step returns; why there is no record, or None; its size in bytes.
    Raises: whatever train_step raises. Of losses or gradients that are not finite the record is written all the same.
    """
    writing = _Writing(run, folder)
    begun = {name: getattr(state, name) for name in COUNTS}
    writing.begin(weights)
    beginning = beginning_of(run)
    beginning.begin()
    witness = Witness(run, num_microbatches, writing.gradients)
    result, failure = None, None
    try:
        result = train_step(replace(run, train_batches=beginning), state, num_microbatches, witness)
    except FloatingPointError as error:  # which all ranks raise alike
        failure = error
        writing.gradients()
    finally:
        witness.detach()
    losses = {} if result is None else result.losses
    facts = {"losses": losses, "grad_norm": None if result is None else result.grad_norm,
             "failure": None if failure is None else str(failure), "skipped": None if result is None else result.skipped,
             "dropped_tokens": None if result is None else result.dropped_tokens}
    samples = num_microbatches * run.args.training.micro_batch_size * run.ps.dp.size
    head = {**head_of(run, begun, samples, run.args.data.seq_length), "sample_numbers": list(numbers), **facts}
    problem, size = writing.finish(head, witness, beginning)
    if failure is not None:
        if problem is None:
            logger.warning("iteration %d is recorded in %s", begun["iteration"] + 1, folder)
        raise failure
    return result, problem, size


def head_of(run: Run, begun: Mapping[str, Any], samples: int, seq_length: int) -> dict[str, Any]:
    """What can be said of an iteration in a few words: the head of its record."""
    ps, args, device = run.ps, run.args, run.runtime.device
    quantized = args.precision.fp8 or args.precision.fp4
    return {
        "iteration": begun["iteration"] + 1, "state": dict(begun), "flags": flags_of(given_values(args)),
        "world_size": ps.world.size, "mapping": {name: getattr(ps, name).size for name in AXES},
        "samples": samples, "micro_batch_size": args.training.micro_batch_size, "seq_length": seq_length,
        "padded_vocab_size": run.padded_vocab_size, "vocab_size": args.data.vocab_size, "dtype": args.precision.params_dtype_name,
        "quantized": quantized or None, "loss_scale": float(run.optimizer.loss_scale), "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(), "torch": torch.__version__,
    }


def given_values(args: Arguments) -> dict[str, object]:
    """What was given, by command line, recipe or checkpoint: enough to give the same flags again."""
    taken = (*SHAPE, *WHERE_NOT_GIVEN, *(MAPPING if args.output.use_mp_args_from_checkpoint_args else ()))
    names = {*args.spelling, *(taken if args.output.use_checkpoint_args else ())}
    return {name: value for name, value in args.as_dict().items() if name in names}


def sample_numbers(run: Run, state: TrainState, num_microbatches: int) -> list[int]:
    """Numbers of the iteration's samples in their dataset, in the order of the global batch."""
    training, dp = run.args.training, run.ps.dp
    by_rank = []
    for rank in range(dp.size):
        loader = build_loader(run.datasets.train, training.micro_batch_size, rank, dp.size, state.consumed_train_samples,
                              training.dataloader_type or "single", fmt=run.batch_format)
        by_rank.append([batch for batch, _ in zip(loader.indices(), range(num_microbatches))])
    return [int(number) for microbatch in zip(*by_rank) for batch in microbatch for number in batch]


class _Writing:
    """The files of one record, and why they are not there. Methods are collective."""

    def __init__(self, run: Run, folder: Path):
        self.run, self.folder, self.problem = run, folder, None
        self.beside = folder.with_name(f"{folder.name}.unfinished")
        self.files: list[str] = []
        self.scaling: dict[str, Tensor] = {}
        self._has_gradients = False

    def begin(self, weights: bool) -> None:
        """Make room, and take what is there before the iteration."""
        run, ps = self.run, self.run.ps
        if ps.world.rank == 0:
            self._try(lambda: record.unfinished(self.folder))
        collectives.barrier(ps.world)
        run.optimizer.wait_params()
        if weights:
            self._whole(record.WEIGHTS, export_named_weights(run.chunks, ps))
        self.scaling = {f"{record.SCALING}{name}": tensor.detach().clone() for chunk in run.chunks for name, tensor in chunk.named_scaling_state()}

    def gradients(self) -> None:
        """Take the gradients, reduced and not yet clipped, if that has not been done."""
        run = self.run
        if self._has_gradients:
            return
        self._has_gradients = True
        run.grads.gather()
        scale = 1.0 / run.optimizer.loss_scale
        named = gather_named(run.chunks, run.ps, gradient_of)
        self._whole(record.GRADIENTS, ((name, grad.float() * scale) for name, grad in named))

    def finish(self, head: Mapping[str, Any], witness: Witness, beginning: Beginning[Batch]) -> tuple[str | None, int]:
        """Write what every rank has, and give the record its name. Returns: what went wrong on any rank; size in bytes."""
        ps, size = self.run.ps, 0
        first = ps.tp.rank == ps.cp.rank == ps.pp.rank == 0
        fields = {} if not first else {f"{record.BATCH}{name}": torch.stack([getattr(batch, name) for batch in beginning.batches])
                                       for name, value in vars(beginning.batches[0]).items() if value is not None}
        tensors = witness.tensors({**self.scaling, **fields})
        if self.problem is None:
            self._try(lambda: record.write_rank(self.beside, ps.world.rank, tensors, plain(beginning.random_state)))
        problems = [text for text in collectives.all_gather_object(self.problem, ps.world) if text is not None]
        if not problems and ps.world.rank == 0:
            names = [*self.files, *(name for rank in range(ps.world.size) for name in (record.rank_file(rank), record.random_file(rank)))]
            size = self._try(lambda: record.seal(self.beside, self.folder, head, names)) or 0
            problems = [] if self.problem is None else [self.problem]
        problem, size = collectives.broadcast_object((next(iter(problems), None), size), ps.world)
        if problem is not None and ps.world.rank == 0:
            shutil.rmtree(self.beside, ignore_errors=True)
        return problem, size

    def _whole(self, name: str, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Have rank 0 write tensors of the whole model; the others send theirs, whatever becomes of the file."""
        with sent_by_all(tensors):
            if self.run.ps.world.rank == 0 and self.problem is None:
                self.files.append(name)
                self._try(lambda: write_weights(tensors, os.fspath(self.beside / name)))

    def _try(self, write: Any) -> Any:
        try:
            return write()
        except (OSError, ValueError, RuntimeError) as error:
            self.problem = f"rank {self.run.ps.world.rank}: {error}"
            return None


class Witness:
    """Looks at the outputs of this rank's layers during one iteration; see guard/record.py for what is kept of them."""

    def __init__(self, run: Run, num_microbatches: int, take_gradients: Any):
        self.run, self.num_microbatches, self._take_gradients = run, num_microbatches, take_gradients
        self.by_token: dict[str, list[Tensor]] = defaultdict(list)
        self._calls: dict[int, int] = defaultdict(int)
        self._signs: dict[int, Tensor] = {}
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Begin to look. Routers keep a recorder that they have already."""
        repeated, depths = self.run.args.model.mtp_use_repeated_layer, self.run.args.model.mtp_num_layers or 0
        for chunk in self.run.chunks:
            layout = chunk.layout
            ahead = [f"mtp.layers.{depth}" for depth in range(depths)]
            if chunk.embedding is not None:
                names = ["embedding"] * layout.has_embedding + [f"{each}.embedding" for each in ahead] * (chunk.mtp is not None)
                self._watch(chunk, chunk.embedding, names)
            for name, layer in layers_of([chunk]):
                passes = ahead if name.startswith("mtp.") and repeated else [name]
                self._watch(chunk, layer.self_attention, [f"{each}.self_attention" for each in passes])
                self._watch(chunk, layer.mlp, [f"{each}.mlp" for each in passes])
                if layer.is_moe:
                    layer.mlp.router.recorder = _Routes(self, [f"{each}.mlp.router" for each in passes], layer.mlp.router)
            if chunk.decoder.final_layernorm is not None:
                self._watch(chunk, chunk.decoder.final_layernorm, ["decoder.final_layernorm"])
            for depth, layer in enumerate([] if chunk.mtp is None else chunk.mtp.layers):
                self._watch(chunk, layer, ahead if repeated else [ahead[depth]])
            if layout.has_loss:
                self._handles.append(chunk.register_forward_hook(lambda _module, _inputs, loss_BS: self.add("loss", loss_BS.t().unsqueeze(-1))))

    def _watch(self, chunk: Transformer, module: nn.Module, names: Sequence[str]) -> None:
        """Trace a module's outputs. names: of its calls in one pass of the chunk."""
        def look(module: nn.Module, _inputs: tuple, y_SBH: Tensor) -> None:
            if names and not chunk.activations.replaying:
                self.trace(self.next_of(module, names), y_SBH)

        self._handles.append(module.register_forward_hook(look))

    def next_of(self, caller: object, names: Sequence[str]) -> str:
        """Names of a caller's calls take turns."""
        self._calls[id(caller)] += 1
        return names[(self._calls[id(caller)] - 1) % len(names)]

    def trace(self, name: str, x_SBH: Tensor) -> None:
        """Keep the trace of an output."""
        width = x_SBH.shape[-1]
        if width not in self._signs:
            self._signs[width] = record.signs_of(width, x_SBH.device)
        self.add(name, record.digest(x_SBH, self._signs[width]))

    def add(self, name: str, kept: Tensor, prefix: str = record.TRACE) -> None:
        """Keep [rows, B, K] of the next microbatch. Of ranks that hold the same rows the first one does."""
        tp = self.run.ps.tp
        if tp.rank == 0 or kept.shape[0] != len(self._positions()[0]):
            self.by_token[f"{prefix}{name}"].append(kept.detach().cpu())

    def again(self) -> None:
        """The passes begin again: forget those before."""
        self.by_token.clear()
        self._calls.clear()

    def before_update(self) -> None:
        """The gradients are reduced."""
        self._take_gradients()

    def detach(self) -> None:
        """Look no longer."""
        for handle in self._handles:
            handle.remove()
        for chunk in self.run.chunks:
            for layer in chunk.moe_layers():
                layer.router.recorder = None

    def _positions(self) -> list[Tensor]:
        """Of the rows of a context rank, and of what a tensor rank has of them."""
        ps = self.run.ps
        held = self.run.chunks[0].sequence.positions(self.run.args.data.seq_length)
        return [held, held.chunk(ps.tp.size)[ps.tp.rank]]

    def tensors(self, others: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All that this rank writes; samples count through microbatches, data ranks and their sequences, as the loader deals them out."""
        dp, micro = self.run.ps.dp, self.run.args.training.micro_batch_size
        first = torch.arange(self.num_microbatches)[:, None] * dp.size + dp.rank
        samples = first * micro + torch.arange(micro)
        return record.tensors_of_rank(samples, self._positions(), self.by_token, others)


class _Routes:
    """Stands where a router's list of microbatches would: keeps their traces and choices, and hands them on."""

    def __init__(self, witness: Witness, names: Sequence[str], router: TopKRouter):
        self.witness, self.names, self.router, self.further = witness, names, router, router.recorder

    def append(self, route: Mapping[str, Tensor]) -> None:
        """Take a microbatch: logits, probs and map, [T, E] with token s * B + b."""
        witness = self.witness
        name = witness.next_of(self, self.names)
        micro = witness.run.args.training.micro_batch_size
        for what in ("logits", "probs"):
            witness.trace(f"{name}.{what}", route[what].reshape(-1, micro, route[what].shape[-1]))
        chosen = route["map"].reshape(-1, micro, route["map"].shape[-1])
        witness.add(name, record.pack(chosen), record.CHOICE)
        margin_T = self.router.margin(route["logits"])
        if margin_T is not None:
            witness.add(name, margin_T.reshape(-1, micro, 1), record.MARGIN)
        if self.further is not None:
            self.further.append(route)

    def clear(self) -> None:
        """Forget what came so far."""
        self.witness.again()
        if self.further is not None:
            self.further.clear()


def plain(state: Any) -> Any:
    """Generators' states without arrays of numpy, which are not read back without trust."""
    if isinstance(state, Mapping):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(plain, state))
    return state.tolist() if hasattr(state, "tolist") and not isinstance(state, Tensor) else state

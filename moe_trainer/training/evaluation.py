"""Evaluation: validation during training, the sets after it, and --skip-train, which does nothing else.

A validation prints Megatron-LM's line. An evaluation of a checkpoint (--skip-train) also reports each prefix of a blend by itself, and ends
with a table of loss and perplexity per token and per byte.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_trainer.data.build import AnyDataset
from moe_trainer.data.loader import Batch
from moe_trainer.data.tokenizer import Tokenizer
from moe_trainer.errors import user_input
from moe_trainer.model.transformer import Transformer
from moe_trainer.parallel import collectives
from moe_trainer.report.evaluation import SetResult, evaluation_table
from moe_trainer.run import Run, TrainState, batches_of
from moe_trainer.training.step import run_microbatches, shared_sums


@dataclass(frozen=True)
class ByteLengths:
    """The bytes of text that each token id stands for; `reason` says why there are none where `lengths` is None."""

    lengths: np.ndarray | None
    reason: str = ""


def byte_lengths(tokenizer: Tokenizer, rows: int) -> ByteLengths:
    """Ask the tokenizer. rows: of the padded vocabulary; padding stands for no text."""
    try:
        lengths = np.asarray(tokenizer.byte_lengths(), dtype=np.int64)
    except ValueError as error:
        return ByteLengths(None, str(error))
    return ByteLengths(np.pad(lengths, (0, max(0, rows - len(lengths)))))


class _ByteCount:
    """Counts the bytes of all labels that the loss counts, batch by batch."""

    def __init__(self, lengths: np.ndarray):
        self._lengths, self.total = lengths, 0

    def through(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.total += int((self._lengths[batch.labels_BS.numpy()] * (batch.loss_mask_BS.numpy() > 0)).sum())
            yield batch


def can_validate(run: Run) -> bool:
    """Is there anything to validate on?"""
    return bool(run.datasets.valid) and (run.args.training.eval_iters > 0 or run.args.training.full_validation)


def validate(run: Run, state: TrainState, where: str, bytes_of: ByteLengths | None = None) -> list[SetResult]:
    """Evaluate every validation set and report it; consumes validation samples as the training goes on."""
    training = run.args.training
    from_the_start = training.full_validation or run.args.evaluates_only
    consumed = 0 if from_the_start else state.consumed_valid_samples
    results = []
    for name, dataset in zip(run.datasets.valid_names, run.datasets.valid):
        kind = f"validation-{name}" if name else "validation"
        results.append(evaluate(run, state, where, kind, dataset, consumed, training.full_validation, bytes_of))
    if not from_the_start and results:
        state.consumed_valid_samples += results[-1].samples
    return results


def evaluate(run: Run, state: TrainState, where: str, kind: str, dataset: AnyDataset, consumed: int, whole: bool,
             bytes_of: ByteLengths | None = None) -> SetResult:
    """Mean loss over `--eval-iters` evaluation batches of a dataset (or all of it), from sample `consumed` on.

    bytes_of: count the bytes of the text, too.
    """
    training, ps = run.args.training, run.ps
    micro, batch_size = training.eval_micro_batch_size, training.eval_global_batch_size
    # a whole pass ends with the last full microbatch of all ranks, not with the last full batch
    one_pass = len(dataset) // (micro * ps.dp.size)
    microbatches = one_pass if whole else training.eval_iters * (batch_size // (micro * ps.dp.size))
    with user_input(f"the {kind} set"):
        batches = batches_of(run, dataset, micro, consumed)
    count = None if bytes_of is None or bytes_of.lengths is None else _ByteCount(bytes_of.lengths)
    if count is not None:
        batches = count.through(batches)
    set_training(run.chunks, False)
    if training.manual_gc and training.manual_gc_eval:
        gc.collect()
    sums: list[Tensor] = []
    with run.timers("evaluate"), torch.no_grad():
        run.wait_params()
        if microbatches > 0:
            sums = run_microbatches(run, batches, microbatches, micro, forward_only=True)
    set_training(run.chunks, True)
    loss_sum, tokens = shared_sums(run, sums)
    num_bytes = None if count is None else _over_all_ranks(run, count.total)
    result = SetResult(kind, microbatches * micro * ps.dp.size, loss_sum, int(tokens), num_bytes)
    if run.metrics is not None:
        run.metrics.validation(where, kind, {"lm loss": result.loss}, state.iteration, state.consumed_train_samples, result if bytes_of else None)
    return result


def evaluate_checkpoint(run: Run, state: TrainState, tokenizer: Tokenizer) -> None:
    """What --skip-train does: the validation and test sets, the prefixes of a blend one by one, and a table of them all. Collective."""
    training, iteration = run.args.training, state.iteration
    bytes_of = byte_lengths(tokenizer, run.padded_vocab_size)
    results = []
    if can_validate(run):
        results += validate(run, state, f"iteration {iteration} on validation set", bytes_of)
    if run.datasets.test is not None and training.eval_iters > 0:
        results.append(evaluate(run, state, f"iteration {iteration} on test set", "test", run.datasets.test, 0, False, bytes_of))
    for name, dataset in run.datasets.domains:
        kind, _, prefix = name.partition("-")
        results.append(evaluate(run, state, f"iteration {iteration} on {kind} set {prefix}", name, dataset, 0, training.full_validation, bytes_of))
    if run.metrics is not None:
        output = run.args.output
        of = output.load or output.pretrained_checkpoint or output.init_from
        run.metrics.print(evaluation_table(results, iteration, of, bytes_of.reason))


def _over_all_ranks(run: Run, num_bytes: int) -> int:
    """The sum over the data-parallel ranks, as the last stage has counted: every stage reads the same batches, and that one the labels."""
    total = torch.tensor(num_bytes, dtype=torch.int64, device=run.runtime.device)
    if run.ps.is_last_stage:
        total = collectives.all_reduce(total, run.ps.dp)
    return int(collectives.broadcast(total, run.ps.pp, src=run.ps.pp.size - 1))


def set_training(chunks: list[Transformer], training: bool) -> None:
    """Switch every chunk between training and evaluation."""
    for chunk in chunks:
        chunk.train(training)

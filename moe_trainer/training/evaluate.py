"""Evaluation: validation during training, the sets after it, and evaluation of a checkpoint (--skip-train).

A validation prints Megatron-LM's line. The evaluation of a checkpoint also reports each prefix of a blend separately,
and ends with a table of loss and perplexity per token and per byte.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_trainer.data.build import AnyDataset
from moe_trainer.data.loader import Batch
from moe_trainer.data.tokenizer import Tokenizer
from moe_trainer.errors import as_user_error
from moe_trainer.metrics.evaluation_summary import EvaluationResult, evaluation_table
from moe_trainer.model.transformer import Transformer
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import Group
from moe_trainer.training.data_setup import make_loader, make_packing_planner
from moe_trainer.training.run import BaseRun, TrainState
from moe_trainer.training.step import agree_on_buffers, reduce_loss, run_microbatches


@dataclass(frozen=True)
class ByteLengths:
    """Bytes of text per token id. `reason` explains why `lengths` is None."""

    lengths: np.ndarray | None
    reason: str = ""


def byte_lengths(tokenizer: Tokenizer, vocab_size: int) -> ByteLengths:
    """Return the bytes of each token id, padded with zeros to `vocab_size`."""
    try:
        lengths = np.asarray(tokenizer.byte_lengths(), dtype=np.int64)
    except ValueError as error:
        return ByteLengths(None, str(error))
    return ByteLengths(np.pad(lengths, (0, max(0, vocab_size - len(lengths)))))


class _ByteCount:
    """Count the bytes of all labels that contribute to the loss; of a group of ranks, on its first one.

    Args:
        lengths: of tokens, in bytes.
        groups: ranks that share batches, with dynamic context parallelism.
    """

    def __init__(self, lengths: np.ndarray, groups: Mapping[int, Group]):
        self._lengths, self._groups, self.total = lengths, groups, 0

    def through(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            size = None if batch.packed is None else batch.packed.cp_size
            if size is not None and self._groups[size].rank:
                yield batch
                continue
            self.total += int((self._lengths[batch.labels_BS.numpy()] * (batch.loss_mask_BS.numpy() > 0)).sum())
            yield batch


def can_validate(run: BaseRun) -> bool:
    """Return whether there is a validation set to evaluate."""
    training = run.args.training
    return bool(run.inputs.datasets.valid) and (training.eval_iters > 0 or training.full_validation)


def validate(
    run: BaseRun, state: TrainState, where: str, bytes_of: ByteLengths | None = None
) -> list[EvaluationResult]:
    """Evaluate and report every validation set; during training, consume validation samples."""
    training = run.args.training
    from_the_start = training.full_validation or run.args.is_eval_only
    consumed = 0 if from_the_start else state.consumed_valid_samples
    results = []
    for name, dataset in zip(run.inputs.datasets.valid_names, run.inputs.datasets.valid):
        kind = f"validation-{name}" if name else "validation"
        results.append(evaluate(run, state, where, kind, dataset, consumed, training.full_validation, bytes_of))
    if not from_the_start and results:
        state.consumed_valid_samples += results[-1].samples
    return results


def evaluate(
    run: BaseRun,
    state: TrainState,
    where: str,
    kind: str,
    dataset: AnyDataset,
    consumed: int,
    full_pass: bool,
    bytes_of: ByteLengths | None = None,
) -> EvaluationResult:
    """Compute the mean loss of `--eval-iters` evaluation batches of a dataset, or all of it.

    Starts at sample `consumed`. `bytes_of`: also count the bytes of the text.
    """
    training, ps = run.args.training, run.ps
    micro, batch_size = training.eval_micro_batch_size, training.eval_global_batch_size
    # a full pass ends with the last full microbatch of all ranks, not with the last full batch
    chunk = micro * ps.dp.size
    samples = len(dataset) // chunk * chunk if full_pass else training.eval_iters * batch_size
    microbatches, stop = samples // chunk, consumed + samples
    with as_user_error(f"the {kind} set"):
        packing = make_packing_planner(run, dataset, micro, forward_only=True)
        if packing is not None:
            microbatches = packing.count_microbatches(consumed, stop, batch_size)
        batches = iter(
            make_loader(
                run,
                dataset,
                micro,
                consumed,
                packing,
                lambda consumed: min(batch_size, stop - consumed),
                fmt=run.inputs.batch_format,
            )
        )
    count = None if bytes_of is None or bytes_of.lengths is None else _ByteCount(bytes_of.lengths, ps.dynamic_cp)
    if count is not None:
        batches = count.through(batches)
    if run.metrics is not None and run.args.is_eval_only:
        batches = run.metrics.evaluating(kind, batches, microbatches)
    set_training(run.chunks, False)
    if training.manual_gc and training.manual_gc_eval:
        gc.collect()
    sums: list[Tensor] = []
    with run.timers("evaluate"), torch.no_grad():
        run.wait_params()
        if microbatches > 0:
            sums = run_microbatches(run, batches, microbatches, forward_only=True)
    set_training(run.chunks, True)
    loss_sum, tokens = reduce_loss(run, sums)
    agree_on_buffers(run, f"evaluation at {where}")
    num_bytes = None if count is None else _sum_bytes(run, count.total)
    result = EvaluationResult(kind, samples, loss_sum, int(tokens), num_bytes)
    if run.metrics is not None:
        losses, evaluated = {"lm loss": result.loss}, result if bytes_of else None
        run.metrics.validation(where, kind, losses, state.iteration, state.consumed_train_samples, evaluated)
    return result


def evaluate_checkpoint(run: BaseRun, state: TrainState, tokenizer: Tokenizer) -> None:
    """Evaluate validation and test sets and each prefix of a blend, and print a table (--skip-train). Collective."""
    training, iteration = run.args.training, state.iteration
    bytes_of = byte_lengths(tokenizer, run.padded_vocab_size)
    results = []
    if can_validate(run):
        results += validate(run, state, f"iteration {iteration} on validation set", bytes_of)
    if run.inputs.datasets.test is not None and training.eval_iters > 0:
        results.append(
            evaluate(
                run, state, f"iteration {iteration} on test set", "test", run.inputs.datasets.test, 0, False, bytes_of
            )
        )
    for name, dataset in run.inputs.datasets.domains:
        kind, _, prefix = name.partition("-")
        where = f"iteration {iteration} on {kind} set {prefix}"
        results.append(evaluate(run, state, where, name, dataset, 0, training.full_validation, bytes_of))
    if run.metrics is not None:
        output = run.args.output
        source = output.load or output.pretrained_checkpoint or output.init_from
        run.metrics.print(evaluation_table(results, iteration, source, bytes_of.reason))


def _sum_bytes(run: BaseRun, num_bytes: int) -> int:
    """Sum the count of the last stage over data-parallel ranks; every stage reads the same batches."""
    total = torch.tensor(num_bytes, dtype=torch.int64, device=run.runtime.device)
    if run.ps.is_last_stage:
        total = collectives.all_reduce(total, run.ps.dp_cp if run.ps.dynamic_cp else run.ps.dp)
    return int(collectives.broadcast(total, run.ps.pp, src=run.ps.pp.size - 1))


def set_training(chunks: list[Transformer], training: bool) -> None:
    """Switch every chunk between training and evaluation mode."""
    for chunk in chunks:
        chunk.train(training)

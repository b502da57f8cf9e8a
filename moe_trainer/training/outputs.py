"""Assembly of what a run writes besides checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_trainer.data.tokenizer import Tokenizer
from moe_trainer.errors import as_user_error
from moe_trainer.training.evaluate_tasks import prepare_eval_tasks
from moe_trainer.training.generate_samples import prepare_completer
from moe_trainer.training.metrics import open_metrics
from moe_trainer.training.run import BaseRun, Outputs, TrainRun, TrainState

if TYPE_CHECKING:
    from moe_trainer.training.stream_weights import SnapshotStream


def open_outputs(run: BaseRun, state: TrainState, tokenizer: Tokenizer) -> Outputs:
    """Prepare tasks, prompts and the stream of weights, and open the metrics. Collective.

    Raises:
        UserError: on every rank, if something cannot be written or evaluated.
    """
    return Outputs(
        weight_stream=_open_weight_stream(run),
        tasks=prepare_eval_tasks(run, tokenizer),
        completer=prepare_completer(run, tokenizer),
        metrics=open_metrics(run, state),
    )


def _open_weight_stream(run: BaseRun) -> SnapshotStream | None:
    target = run.args.output.stream_weights_to
    if target is None or run.args.training.skip_train:
        return None
    from moe_trainer.training.stream_weights import SnapshotStream  # with the code of Hugging Face folders

    optimizer = run.optimizer if isinstance(run, TrainRun) else None
    with as_user_error("--stream-weights-to"):
        return SnapshotStream(target, run.args, run.chunks, run.ps, run.padded_vocab_size, optimizer)

"""The Python interface: build a model from flags, load one, run it, save it.

    from moe_trainer import load_model
    model = load_model("checkpoint")  # or a Hugging Face folder
    logits_BSV = model(tokens_BS)

The names in `__all__` are stable: a release that changes them says so in CHANGELOG.md. docs/python_api.md has examples.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import arguments
from arguments import Arguments
from moe_trainer.checkpoint.directory import checkpoint_folder
from moe_trainer.checkpoint.manager import CheckpointState, SaveOptions, save
from moe_trainer.data.tokenizer import build_tokenizer
from moe_trainer.errors import UserError, as_user_error
from moe_trainer.launch_env import read_launch_env
from moe_trainer.model.transformer import Transformer
from moe_trainer.parallel.coordination import run_on_rank0
from moe_trainer.parallel.state import ParallelState
from moe_trainer.training.inference import load_for_inference
from moe_trainer.training.initialize import initialize
from moe_trainer.training.run import BaseRun
from moe_trainer.training.setup import build_run

__all__ = ["LanguageModel", "build_model", "load_model", "save_checkpoint", "save_hf_folder"]

logger = logging.getLogger(__name__)

_WITHOUT_DATA = ("--skip-train", "--eval-iters", "0")
_MAX_FILE_BYTES = 5 * 10**9


class LanguageModel(nn.Module):
    """A model of this trainer on this rank.

    Attributes:
        args: all flags.
        network: the transformer, with the parameters of this rank.
        ps: process groups.
        vocab_size: with padding, rows of the embedding.
    """

    def __init__(self, args: Arguments, network: Transformer, ps: ParallelState, vocab_size: int):
        super().__init__()
        self.args, self.network, self.ps, self.vocab_size = args, network, ps, vocab_size

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.network.parameters()).device

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor | None = None) -> Tensor:
        """Run the model; positions count from 0.

        All ranks of a model replica call it with the same tokens. Gradients flow; in training mode the balancing losses
        are in them.

        Args:
            tokens_BS: token ids, int64.
            labels_BS: the token that follows each, int64.

        Returns:
            Logits [B, S, V] with the padding of the vocabulary; with labels the loss of every token, fp32 [B, S].

        Raises:
            ValueError: for another shape or type; on a CPU also for an id outside the vocabulary.
        """
        for name, ids_BS in (("tokens", tokens_BS), ("labels", labels_BS)):
            self._check_ids(name, ids_BS, tokens_BS)
        tokens_BS = tokens_BS.to(self.device)
        positions_BS = torch.arange(tokens_BS.shape[1], device=self.device).expand_as(tokens_BS)
        return self.network(tokens_BS, positions_BS, None if labels_BS is None else labels_BS.to(self.device))

    def _check_ids(self, name: str, ids_BS: Tensor | None, tokens_BS: Tensor) -> None:
        if ids_BS is None:
            return
        if not isinstance(ids_BS, Tensor) or ids_BS.dtype not in (torch.int64, torch.int32):
            kind = ids_BS.dtype if isinstance(ids_BS, Tensor) else type(ids_BS).__name__
            raise ValueError(f"{name} are {kind}, and a tensor of int64 is needed")
        if ids_BS.dim() != 2 or not ids_BS.numel() or ids_BS.shape != tokens_BS.shape:
            needed = (
                "[B, S] with at least one token" if ids_BS is tokens_BS else f"that of tokens, {list(tokens_BS.shape)},"
            )
            raise ValueError(f"{name} have the shape {list(ids_BS.shape)}, and {needed} is needed")
        # on a CUDA device the test would wait for it
        if ids_BS.device.type == "cpu" and not 0 <= int(ids_BS.min()) <= int(ids_BS.max()) < self.vocab_size:
            raise ValueError(
                f"{name} are from {int(ids_BS.min())} to {int(ids_BS.max())}, and ids from 0 to {self.vocab_size - 1} "
                "are needed"
            )


def build_model(flags: Sequence[str]) -> LanguageModel:
    """Build a model with initial weights. Collective over the ranks that were launched.

    Args:
        flags: of the trainer, as on its command line; those of data and training have no effect.

    Raises:
        ValueError: if a flag is wrong (ArgumentError), or the model does not fit this machine (UserError).
    """
    launch_env = read_launch_env(os.environ)
    args = arguments.parse_args([*_WITHOUT_DATA, *flags], launch_env.world_size)
    runtime = initialize(args, launch_env)
    for flag, folder in (("load", args.output.load), ("pretrained-checkpoint", args.output.pretrained_checkpoint)):
        if folder is not None:
            logger.warning("--%s %s has no effect: build_model gives initial weights; use load_model", flag, folder)
    with as_user_error("tokenizer"):
        tokenizer = build_tokenizer(args.data)
    return _wrap(build_run(args, runtime, tokenizer)).train()


def load_model(source: str | Path, flags: Sequence[str] = ()) -> LanguageModel:
    """Load a model, in evaluation mode. Collective over the ranks that were launched.

    Args:
        source: checkpoint directory or Hugging Face folder; the architecture is the one that it records.
        flags: further flags of the trainer: mapping, precision, --ckpt-step, --spec.

    Raises:
        ValueError: if a flag or the checkpoint is wrong (ArgumentError, UserError).
    """
    return _wrap(load_for_inference(str(source), flags).run).eval()


def save_checkpoint(model: LanguageModel, directory: str | Path, iteration: int = 0) -> None:
    """Write the weights as a checkpoint that --load and `load_model` read. Collective.

    Raises:
        ValueError: on every rank, if the directory cannot be written (CheckpointError).
    """
    state = CheckpointState(iteration, model.args.as_dict() | {"padded_vocab_size": model.vocab_size})
    save(directory, state, [model.network], None, model.ps, SaveOptions(save_optim=False, save_rng=False))


def save_hf_folder(
    model: LanguageModel, folder: str | Path, model_type: str | None = None, keep_vocab_padding: bool = False
) -> None:
    """Write the weights as a new Hugging Face folder. Collective.

    A hidden checkpoint in the same directory holds the weights meanwhile.

    Args:
        model_type: of config.json; by default the first that can express the model.
        keep_vocab_padding: keep the rows that pad the vocabulary.

    Raises:
        ValueError: if no model type can express the model, or the folder exists (CheckpointError).
    """
    target = Path(folder)
    staging = target.parent / f".{target.name}.checkpoint"
    save_checkpoint(model, staging)
    try:
        mapping = model.args.output.hf_mapping
        run_on_rank0(lambda: _convert(staging, target, model_type, mapping, keep_vocab_padding), model.ps.world)
    finally:
        if model.ps.world.rank == 0:
            shutil.rmtree(staging)


def _convert(checkpoint: Path, target: Path, model_type: str | None, mapping: str | None, keep_padding: bool) -> None:
    from moe_trainer.checkpoint.hf.conversion_job import finish_job, open_job, write_share
    from moe_trainer.checkpoint.hf.export import Vocabulary, plan_hf_folder
    from moe_trainer.checkpoint.hf.families import families_with

    families, vocabulary = families_with(mapping), Vocabulary(keep_padding=keep_padding)
    job = plan_hf_folder(checkpoint_folder(checkpoint, 0), target, _MAX_FILE_BYTES, model_type, families, vocabulary)
    open_job(job)
    write_share(job)
    finish_job(job)


def _wrap(run: BaseRun) -> LanguageModel:
    """Return the model of a run.

    Raises:
        UserError: with pipeline or context parallelism.
    """
    for name, size in (("pipeline", run.ps.pp.size), ("context", run.ps.cp.size)):
        if size > 1:
            raise UserError(
                f"--{name}{'-model' if name == 'pipeline' else ''}-parallel-size {size}: the Python interface holds a "
                "whole model; use tensor and expert parallelism"
            )
    (network,) = run.chunks
    return LanguageModel(run.args, network, run.ps, run.padded_vocab_size)

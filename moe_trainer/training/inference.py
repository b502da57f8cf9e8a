"""Models for inference: that of a run, or a checkpoint or Hugging Face folder without data and training state."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import arguments
from arguments.help import field_docs
from moe_trainer.checkpoint.recorded_flags import read_recorded_flags
from moe_trainer.data.template_process import LimitedTemplate
from moe_trainer.data.tokenizer import Tokenizer, build_tokenizer
from moe_trainer.data.tokenizer_libraries import open_sft
from moe_trainer.errors import UserError, as_user_error
from moe_trainer.inference.model import Model
from moe_trainer.launch_env import read_launch_env
from moe_trainer.training.initialize import initialize
from moe_trainer.training.resume import build_and_resume
from moe_trainer.training.run import BaseRun, TrainState

# evaluation batches of a data set are not read, so none is needed
_FLAGS = ("--use-checkpoint-args", "--skip-train", "--eval-iters", "0")
_UNUSED_TOPICS = (
    *("batches and duration", "evaluation", "checks", "corpora", "fill-in-the-middle samples", "reading"),
    *("saving", "TensorBoard and Weights & Biases", "profiling"),
)
"""Headings of flags (arguments/help.py) about training and its data."""
_TOKENIZER_FLAGS = frozenset(("--tokenizer-type", "--tokenizer-model"))

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, and its tokenizer."""

    run: BaseRun
    state: TrainState
    tokenizer: Tokenizer


def load_for_inference(source: str, flags: Sequence[str], environ: Mapping[str, str] | None = None) -> LoadedModel:
    """Load a model into the ranks that were launched. Collective.

    Args:
        source: checkpoint directory or Hugging Face folder.
        flags: of the trainer: mapping, precision, tokenizer, --ckpt-step.
        environ: the launch environment; None for this process's.

    Raises:
        ValueError: if the flags, the checkpoint or the tokenizer are wrong (ArgumentError, UserError).
    """
    names = {flag.partition("=")[0] for flag in flags if flag.startswith("--")}
    if "--load" in names:
        raise UserError(f"--load: the model is the first argument, {source}; give no other")
    argv = [*_FLAGS, "--load", source, *flags]
    launch_env = read_launch_env(os.environ if environ is None else environ)
    recorded = dict(read_recorded_flags(argv, launch_env.world_size) or {})
    for name in _TOKENIZER_FLAGS.intersection(names):  # else the checkpoint's value would override it
        recorded.pop(name.removeprefix("--").replace("-", "_"), None)
    if recorded.get("seq_length") is None:  # a Hugging Face model has none
        recorded["seq_length"] = recorded.get("max_position_embeddings")
    if recorded.get("multi_latent_attention") and recorded.get("rope_type") == "rope":
        argv.append("--no-rope-fusion")  # which the flags of this model ask for
    args = arguments.parse_args(argv, launch_env.world_size, recorded)
    runtime = initialize(args, launch_env)
    for note in args.notes:
        if note.startswith(tuple(names)):  # others are on flags that were not given
            logger.info("%s", note)
    if unused := sorted(names.intersection(_unused_flags(args))):
        logger.info("%s: no effect here, because nothing is trained, and no data set is read", ", ".join(unused))
    with as_user_error("tokenizer"):
        tokenizer = build_tokenizer(args.data)
    run, state = build_and_resume(args, runtime, tokenizer)
    for chunk in run.chunks:
        chunk.eval()
    return LoadedModel(run, state, tokenizer)


def _unused_flags(args: arguments.Arguments) -> set[str]:
    """Return the given flags that neither texts nor their scores depend on."""
    docs = (item for section in ("training", "data", "output") for item in field_docs(section).items())
    return {args.spelling[dest] for dest, (topic, _) in docs if topic in _UNUSED_TOPICS and dest in args.spelling}


def as_model(run: BaseRun) -> Model:
    """Return the model of a run, for scoring and generation.

    Raises:
        UserError: with context parallelism.
    """
    ps, args = run.ps, run.args
    if ps.cp.size > 1:
        raise UserError(
            f"--context-parallel-size {ps.cp.size}: tasks and generation work without context parallelism, because "
            "their texts are short; use these ranks for --tensor-model-parallel-size or data parallelism"
        )
    max_length = args.model.max_position_embeddings or args.data.seq_length
    # tensor-parallel ranks share the tokens of a sequence
    return Model(run.chunks, run.schedule, ps, run.runtime.device, max_length, run.padded_vocab_size, ps.tp.size)


def open_chat_template(run: BaseRun) -> LimitedTemplate:
    """Return the chat template of --chat-template or the tokenizer's folder.

    Raises:
        UserError: if there is none.
    """
    data = run.args.data
    if data.tokenizer_model is None:
        raise UserError("a chat template needs --tokenizer-model: the folder of a Hugging Face tokenizer")
    with as_user_error("chat template"):
        chat_format = open_sft(data.tokenizer_model, data.special_tokens or [], "default", data.chat_template).format
    assert isinstance(chat_format, LimitedTemplate)
    return chat_format

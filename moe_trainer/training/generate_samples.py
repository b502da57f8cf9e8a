"""Texts that the model of a run writes between iterations (--sample-prompts)."""

from __future__ import annotations

from moe_trainer.data.tokenizer import Tokenizer
from moe_trainer.inference.completion import PromptCompleter, encode_prompts
from moe_trainer.inference.generator import Generator
from moe_trainer.inference.text import TextCodec
from moe_trainer.parallel.coordination import raise_on_all_ranks
from moe_trainer.training.inference import as_model
from moe_trainer.training.run import BaseRun, TrainState
from moe_trainer.training.step import agree_on_buffers


def prepare_completer(run: BaseRun, tokenizer: Tokenizer) -> PromptCompleter | None:
    """Encode --sample-prompts; None without the flag. Collective with it.

    Raises:
        UserError: on every rank, if a prompt is too long or the tokenizer has no text.
    """
    training = run.args.training
    if not training.sample_prompts or training.skip_train:
        return None
    with raise_on_all_ranks(run.ps.world, "--sample-prompts"):
        model, codec, new = as_model(run), TextCodec(tokenizer), training.sample_max_new_tokens
        tokens = encode_prompts(codec, training.sample_prompts, new, model.max_length)
        batch_size = training.eval_micro_batch_size or training.micro_batch_size
        generator = Generator(model, batch_size, tokenizer.vocab_size)
        return PromptCompleter(generator, codec, training.sample_prompts, tokens, new)


def write_samples(run: BaseRun, state: TrainState, completer: PromptCompleter) -> None:
    """Continue the prompts greedily and log the texts. Collective."""
    run.wait_params()
    with run.timers("evaluate"):
        found = completer.complete()
    agree_on_buffers(run, "generation of samples")
    if run.metrics is not None:
        run.metrics.samples(state.iteration, list(zip(completer.prompts, (each.text for each in found))))

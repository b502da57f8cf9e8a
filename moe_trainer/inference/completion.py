"""Continuation of prompts that are text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_trainer.errors import UserError
from moe_trainer.inference.generator import GenerationOptions, Generator
from moe_trainer.inference.sampling import SamplingOptions
from moe_trainer.inference.text import TextCodec


@dataclass(frozen=True)
class Completion:
    """What a model wrote after a prompt.

    Attributes:
        text: up to the end-of-text token or a stop text, which are left out.
        tokens: all new ones.
        finish_reason: "eos", "stop" or "length".
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str


def encode_prompts(codec: TextCodec, prompts: Sequence[str], max_new_tokens: int, max_length: int) -> list[list[int]]:
    """Return the tokens of prompts; of an empty one, that of the beginning.

    Raises:
        UserError: if a prompt with its new tokens is longer than the model.
    """
    encoded = [codec.encode(prompt) or [codec.prefix] for prompt in prompts]
    for number, tokens in enumerate(encoded, 1):
        if len(tokens) + max_new_tokens > max_length:
            raise UserError(
                f"prompt {number} has {len(tokens):,} tokens; with {max_new_tokens:,} new ones it is longer than the "
                f"model's {max_length:,} positions"
            )
    return encoded


def complete(
    generator: Generator,
    codec: TextCodec,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingOptions,
    stops: Sequence[str] = (),
) -> list[Completion]:
    """Continue prompts of tokens. Collective.

    `stops`: texts that end a completion.
    """

    def is_finished(tokens: Sequence[int]) -> bool:
        return tokens[-1] == codec.eos or bool(stops and _first_stop(codec.decode(tokens), stops))

    written = generator.generate(prompts, GenerationOptions(max_new_tokens, is_finished, sampling))
    return [_completion(codec, prompt, tokens, stops) for prompt, tokens in zip(prompts, written, strict=True)]


def _completion(codec: TextCodec, prompt: Sequence[int], tokens: list[int], stops: Sequence[str]) -> Completion:
    ended = tokens[-1:] == [codec.eos]
    text = _text_after(codec.decode, prompt, tokens[:-1] if ended else tokens)
    stop = _first_stop(text, stops)
    if stop is not None:
        text = text[: text.index(stop)]
    return Completion(text, tuple(tokens), "stop" if stop is not None else "eos" if ended else "length")


def _first_stop(text: str, stops: Sequence[str]) -> str | None:
    """Return the stop text that comes first."""
    return min((stop for stop in stops if stop in text), key=text.index, default=None)


def _text_after(decode: Callable[[Sequence[int]], str], prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text of tokens after a prompt: tokenizers drop the blank before the first word of a text."""
    before, whole = decode(prompt), decode([*prompt, *tokens])
    return whole[len(before) :] if whole.startswith(before) else decode(tokens)


@dataclass(frozen=True)
class PromptCompleter:
    """Prompts of a run with what continues them greedily.

    Attributes:
        tokens: of the prompts.
    """

    generator: Generator
    codec: TextCodec
    prompts: Sequence[str]
    tokens: Sequence[Sequence[int]]
    max_new_tokens: int

    def complete(self) -> list[Completion]:
        """Continue the prompts with the model's present weights. Collective."""
        return complete(self.generator, self.codec, self.tokens, self.max_new_tokens, SamplingOptions())

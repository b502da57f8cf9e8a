"""Continuation of texts with a cache, under any mapping but context parallelism.

Texts of similar length form batches, and as many batches as there are pipeline stages are computed together. A batch
ends when all of its texts are finished.

Shapes: B sequences of a batch on one rank, S padded length of its prompts, T = B tokens of a later pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_trainer.inference.model import Model, TextBatch
from moe_trainer.inference.sampling import SamplingOptions, choose_tokens
from moe_trainer.layers.kv_cache import KVCache
from moe_trainer.model.sequence_borders import SequenceBorders
from moe_trainer.pipeline.schedule import ScheduleInputs

MAX_PREFILL_TOKENS = 2**16
"""Tokens of the prompts of a batch on one rank at most, but for those of one prompt."""


@dataclass(frozen=True)
class GenerationOptions:
    """Where texts end, and how tokens are drawn.

    Attributes:
        max_new_tokens: of every text.
        is_finished: of the new tokens of a text, of which there is at least one.
    """

    max_new_tokens: int
    is_finished: Callable[[Sequence[int]], bool]
    sampling: SamplingOptions = SamplingOptions()


class _Group:
    """The sequences of one batch while they are continued: caches of this rank, and what every rank knows of them."""

    def __init__(
        self, model: Model, of_ranks: Sequence[TextBatch], prompts: Sequence[Sequence[int]], seed: int, new: int
    ):
        self._model, self._of_ranks = model, of_ranks
        self.num_rows = model.padded(of_ranks[0].num_rows)
        batch = of_ranks[model.ps.dp.rank]
        self.tokens_BS, self._row_lengths = batch.pad(prompts, self.num_rows)
        lengths = [max(1, length) for length in self._row_lengths]
        # positions that the padding of the first pass fills exist, too
        num_positions = max(batch.length, max(lengths) + new)
        self.caches = [KVCache(lengths, num_positions, model.device) for _ in model.chunks]
        self._draws = [np.random.default_rng((seed, number)) for number in batch.numbers]

    def draws(self) -> Tensor:
        """Return the next random number of every sequence [B]."""
        numbers = [each.random() for each in self._draws] + [0.0] * (self.num_rows - len(self._draws))
        return torch.tensor(numbers, dtype=torch.float32)

    @property
    def num_shared(self) -> int:
        """Number of rows on all data-parallel ranks."""
        return self.num_rows * len(self._of_ranks)

    def own_rows(self) -> slice:
        """Return this rank's rows among those of all data-parallel ranks."""
        first = self._model.ps.dp.rank * self.num_rows
        return slice(first, first + self.num_rows)

    def numbers(self) -> list[int | None]:
        """Return the number of the text of every row of all data-parallel ranks; None for padding."""
        return [
            number
            for batch in self._of_ranks
            for number in (*batch.numbers, *[None] * (self.num_rows - len(batch.numbers)))
        ]

    def forward(self, chunk: int, x_SBH: Tensor | None) -> Tensor:
        """Run a chunk on the next tokens."""
        cache, device = self.caches[chunk], self._model.device
        length, row_lengths = self.tokens_BS.shape[1], self._row_lengths
        if cache.is_prefill:
            positions_BS = torch.arange(length, device=device).expand(self.num_rows, -1)
        else:
            positions_BS, row_lengths = cache.last_positions.unsqueeze(0), (len(self._draws),)
        return self._model.chunks[chunk](
            self.tokens_BS.to(device),
            positions_BS,
            borders=SequenceBorders(row_lengths=None if set(row_lengths) == {length} else row_lengths, cache=cache),
            x_SBH=x_SBH,
        )

    def input_spec(self, chunk: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of what a chunk receives."""
        return self._model.chunks[chunk].input_spec(*self.tokens_BS.shape)

    def advance(self, tokens_B: Tensor) -> None:
        """Make the chosen tokens the next pass."""
        self.tokens_BS = tokens_B.unsqueeze(0)
        for cache in self.caches:
            cache.advance()


class Generator:
    """Continues texts in batches of at most `batch_size` texts a rank.

    Args:
        num_tokens: of the vocabulary without its padding, whose tokens are never chosen.
    """

    def __init__(self, model: Model, batch_size: int, num_tokens: int):
        self.model, self.batch_size, self.num_tokens = model, batch_size, num_tokens

    def generate(self, prompts: Sequence[Sequence[int]], options: GenerationOptions) -> list[list[int]]:
        """Return the new tokens of every prompt. Collective.

        Args:
            prompts: at least one token each; with the new tokens, no more than the model has positions.

        Communication: for every token, one number per sequence as in `Model.share`.
        """
        written: list[list[int]] = [[] for _ in prompts]
        if options.max_new_tokens < 1:
            return written
        batches = self.model.plan(
            [len(prompt) for prompt in prompts], lambda length: min(self.batch_size, MAX_PREFILL_TOKENS // length)
        )
        num_together = self.model.ps.pp.size
        with self.model.evaluating():
            for start in range(0, len(batches), num_together):
                groups = [
                    _Group(self.model, each, prompts, options.sampling.seed, options.max_new_tokens)
                    for each in batches[start : start + num_together]
                ]
                self._continue(groups, written, options)
        return written

    def _continue(self, groups: Sequence[_Group], written: list[list[int]], options: GenerationOptions) -> None:
        """Append the new tokens of the groups' texts to `written`."""
        numbers = [number for group in groups for number in group.numbers()]
        active = {number for number in numbers if number is not None}
        while active:
            tokens = self._next_tokens(groups, options.sampling)
            for number, token in zip(numbers, tokens.tolist(), strict=True):
                if number in active:
                    written[number].append(token)
                    if len(written[number]) >= options.max_new_tokens or options.is_finished(written[number]):
                        active.remove(number)
            for group, part in zip(groups, tokens.split([group.num_shared for group in groups]), strict=True):
                group.advance(part[group.own_rows()])

    def _next_tokens(self, groups: Sequence[_Group], sampling: SamplingOptions) -> Tensor:
        """Run a pass and return the chosen token of every row of all data-parallel ranks, group by group."""
        model = self.model

        def forward_step(chunk: int, index: int, x_SBH: Tensor | None) -> tuple[Tensor, Tensor | None]:
            output = groups[index].forward(chunk, x_SBH)
            if not model.chunks[chunk].layout.has_loss:
                return output, None
            logits_BV = output[0, :, : self.num_tokens]
            draws_B = groups[index].draws().to(logits_BV.device) if sampling.temperature > 0 else None
            return output.new_zeros(()), choose_tokens(logits_BV, sampling, draws_B)

        chosen: list[Tensor | None] = model.schedule.run(
            ScheduleInputs(
                forward_step,
                len(groups),
                spec=lambda chunk, index: groups[index].input_spec(chunk),
                forward_only=True,
            )
        )
        parts = [torch.zeros(group.num_shared, dtype=torch.int64, device=model.device) for group in groups]
        for group, part, tokens_B in zip(groups, parts, chosen if model.ps.is_last_stage else [None] * len(groups)):
            if tokens_B is not None:
                part[group.own_rows()] = tokens_B
        return model.share(torch.cat(parts)).cpu()

"""Forward passes that score texts, under any mapping.

Every rank is given the same sequences and returns the same numbers. Data-parallel ranks share the sequences, all other
ranks compute together as in training. Sequences are sorted by length and padded on the right: in a causal model the
padding changes nothing, and it counts in no expert's capacity.

Shapes: B sequences of a batch, S padded length, V padded vocabulary, C scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trainer.model.transformer import Transformer
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState
from moe_trainer.pipeline.schedule import Schedule, ScheduleInputs

_VALUES = 2  # numbers per sequence that a reduction returns

Reduction = Callable[[int, Tensor], tuple[float, float]]
"""Turns the number of a sequence and its logits [length, V] into two numbers."""


@dataclass(frozen=True)
class Model:
    """A model in memory, as one rank sees it.

    Attributes:
        chunks: this rank's chunks.
        schedule: order of their forward passes.
        ps: process groups.
        device: of the parameters.
        max_length: number of positions.
        length_multiple: that a padded length must have (sequence parallelism).
    """

    chunks: Sequence[Transformer]
    schedule: Schedule
    ps: ParallelState
    device: torch.device
    max_length: int
    length_multiple: int = 1


class Scorer:
    """Computes log-probabilities and greedy continuations in batches of at most `batch_size` sequences a rank."""

    def __init__(self, model: Model, batch_size: int):
        self.model, self.batch_size = model, batch_size
        self.max_length = model.max_length // model.length_multiple * model.length_multiple

    def log_probabilities(self, sequences: Sequence[Sequence[int]], scored: Sequence[int]) -> list[tuple[float, bool]]:
        """Return for every sequence the log-probability of its last tokens, and whether greedy decoding gives them.

        Args:
            sequences: token ids; at most `max_length` + 1, because the last token is only predicted.
            scored: number of tokens at the end of each sequence that count.

        Communication: two numbers per sequence, summed over the data-parallel group and sent by the last stage.
        """

        def reduce(number: int, logits_SV: Tensor) -> tuple[float, float]:
            count = scored[number]
            logits_CV = logits_SV[-count:].float()
            target_C = torch.tensor(sequences[number][-count:], device=logits_CV.device)
            target_logit_C = logits_CV.gather(1, target_C.unsqueeze(1)).squeeze(1)
            log_prob_C = target_logit_C - logits_CV.logsumexp(dim=1)
            is_greedy = bool((logits_CV.argmax(dim=1) == target_C).all())
            return float(log_prob_C.double().sum()), float(is_greedy)

        values = self._run([sequence[:-1] for sequence in sequences], reduce)
        return [(log_prob, is_greedy > 0) for log_prob, is_greedy in values]

    def continue_greedily(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, is_finished: Callable[[Sequence[int]], bool]
    ) -> list[list[int]]:
        """Return the new tokens of every prompt, until `is_finished(new tokens)` or `max_tokens`.

        Every token is a full forward pass over its text. Communication: as in `log_probabilities`, for every token.
        """
        written: list[list[int]] = [[] for _ in prompts]
        active = [*range(len(prompts))] if max_tokens > 0 else []
        while active:
            texts = [[*prompts[number], *written[number]][-self.max_length :] for number in active]
            tokens = self._run(texts, lambda number, logits_SV: (float(logits_SV[-1].argmax()), 0.0))
            for number, (token, _) in zip(active, tokens, strict=True):
                written[number].append(int(token))
            active = [
                number for number in active if len(written[number]) < max_tokens and not is_finished(written[number])
            ]
        return written

    def _run(self, sequences: Sequence[Sequence[int]], reduce: Reduction) -> list[tuple[float, float]]:
        """Run the sequences through the model and return what `reduce` makes of each one's logits. Collective."""
        ps = self.model.ps
        values = torch.zeros(len(sequences), _VALUES, dtype=torch.float64)
        if sequences:
            batches = self._plan(sequences)
            with _evaluation_mode(self.model.chunks), torch.no_grad():
                for numbers, found in zip(batches, self._forward(sequences, batches, reduce), strict=False):
                    for number, pair in zip(numbers, found, strict=True):
                        values[number] = torch.tensor(pair, dtype=torch.float64)
        values = values.to(self.model.device)
        if ps.is_last_stage:
            values = collectives.all_reduce(values, ps.dp)
        values = collectives.broadcast(values, ps.pp, src=ps.pp.size - 1)
        return [(first, second) for first, second in values.tolist()]

    def _plan(self, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return this rank's batches, as numbers of sequences of similar length; every rank gets as many batches.

        The batches that are computed at the same time have one shape, because expert parallelism joins them. A rank
        without a sequence of its own gets an empty batch, which is computed with padding only.
        """
        ps = self.model.ps
        order = sorted(range(len(sequences)), key=lambda number: (-len(sequences[number]), number))
        step = self.batch_size * ps.dp.size
        together = [order[start : start + step] for start in range(0, len(order), step)]
        return [numbers[ps.dp.rank :: ps.dp.size] for numbers in together]

    def _forward(
        self, sequences: Sequence[Sequence[int]], batches: Sequence[Sequence[int]], reduce: Reduction
    ) -> list[list[tuple[float, float]]]:
        """Run the batches in the order of the pipeline schedule; returns nothing on ranks before the last stage."""
        model, step = self.model, self.batch_size * self.model.ps.dp.size
        lengths = sorted((len(sequence) for sequence in sequences), reverse=True)
        multiple = model.length_multiple

        def shape(index: int) -> tuple[int, int]:
            """Return the rows and the padded length of the batches that all ranks compute at this time."""
            together = lengths[index * step : (index + 1) * step]
            rows = -(-len(together) // model.ps.dp.size)
            return rows, -(-together[0] // multiple) * multiple

        def forward_step(chunk: int, index: int, x_SBH: Tensor | None) -> tuple[Tensor, list | None]:
            rows, length = shape(index)
            numbers = batches[index]
            tokens_BS = torch.zeros(rows, length, dtype=torch.int64)
            for row, number in enumerate(numbers):
                tokens_BS[row, : len(sequences[number])] = torch.tensor(sequences[number])
            filled = [len(sequences[number]) for number in numbers] + [0] * (rows - len(numbers))
            position_ids_BS = torch.arange(length, device=model.device).expand(rows, -1)
            output = model.chunks[chunk](
                tokens_BS.to(model.device),
                position_ids_BS,
                x_SBH=x_SBH,
                row_lengths=None if set(filled) == {length} else tuple(filled),
            )
            if not model.chunks[chunk].layout.has_loss:
                return output, None
            found = [reduce(number, output[row, : filled[row]]) for row, number in enumerate(numbers)]
            return output.new_zeros(()), found

        return model.schedule.run(
            ScheduleInputs(
                forward_step,
                len(batches),
                spec=lambda chunk, index: model.chunks[chunk].input_spec(*shape(index)),
                forward_only=True,
            )
        )


@contextmanager
def _evaluation_mode(chunks: Sequence[Transformer]) -> Iterator[None]:
    """Switch the chunks to evaluation mode, and back to the mode that they had."""
    modes = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, mode in zip(chunks, modes, strict=True):
            chunk.train(mode)

"""Forward passes that score texts, under any mapping.

Every rank is given the same sequences and returns the same numbers. Data-parallel ranks share the sequences, all other
ranks compute together as in training. Sequences are sorted by length and padded on the right: in a causal model the
padding changes nothing, and it counts in no expert's capacity.

Shapes: B sequences of a batch, S padded length, V padded vocabulary, C scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_trainer.model.transformer import Transformer
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState
from moe_trainer.pipeline.schedule import Schedule, ScheduleInputs

_MAX_LOGITS = 2**31  # of a batch; the last stage has them in memory
_MAX_MICROBATCHES = 64  # of one run of the pipeline schedule, which plans all of them before the first

Reduction = Callable[[int, Tensor], Iterable[tuple[int, float, float]]]
"""Turns the number of a sequence and its logits [length, V] into results: an index, and two numbers."""


@dataclass(frozen=True)
class Model:
    """A model in memory, as one rank sees it.

    Attributes:
        chunks: this rank's chunks.
        schedule: order of their forward passes.
        ps: process groups.
        device: of the parameters.
        max_length: number of positions.
        vocab_size: padded.
        length_multiple: that a padded length must have (sequence parallelism).
    """

    chunks: Sequence[Transformer]
    schedule: Schedule
    ps: ParallelState
    device: torch.device
    max_length: int
    vocab_size: int
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
        # choices of one token share their text
        texts: dict[tuple[int, ...], list[int]] = {}
        for number, sequence in enumerate(sequences):
            texts.setdefault(tuple(sequence[:-1]), []).append(number)
        members = list(texts.values())

        def reduce(text: int, logits_SV: Tensor) -> Iterator[tuple[int, float, float]]:
            for number in members[text]:
                count = scored[number]
                logits_CV = logits_SV[-count:].float()
                target_C = torch.tensor(sequences[number][-count:], device=logits_CV.device)
                log_prob_C = logits_CV.gather(1, target_C.unsqueeze(1)).squeeze(1) - logits_CV.logsumexp(dim=1)
                is_greedy = bool((logits_CV.argmax(dim=1) == target_C).all())
                yield number, float(log_prob_C.double().sum()), float(is_greedy)

        values = self._run(list(texts), reduce, len(sequences))
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
            tokens = self._run(texts, lambda text, logits_SV: [(text, float(logits_SV[-1].argmax()), 0.0)], len(texts))
            for number, (token, _) in zip(active, tokens, strict=True):
                written[number].append(int(token))
            active = [
                number for number in active if len(written[number]) < max_tokens and not is_finished(written[number])
            ]
        return written

    def _run(self, texts: Sequence[Sequence[int]], reduce: Reduction, num_results: int) -> list[tuple[float, float]]:
        """Run the texts through the model and return the results that `reduce` makes of their logits. Collective."""
        ps = self.model.ps
        values = torch.zeros(num_results, 2, dtype=torch.float64)
        if texts:
            with _evaluation_mode(self.model.chunks), torch.no_grad():
                batches = self._plan(texts)
                for start in range(0, len(batches), _MAX_MICROBATCHES):
                    for found in self._forward(texts, batches[start : start + _MAX_MICROBATCHES], reduce):
                        for index, *pair in found:
                            values[index] = torch.tensor(pair, dtype=torch.float64)
        values = values.to(self.model.device)
        if ps.is_last_stage:
            values = collectives.all_reduce(values, ps.dp)
        values = collectives.broadcast(values, ps.pp, src=ps.pp.size - 1)
        return [(first, second) for first, second in values.tolist()]

    def _plan(self, texts: Sequence[Sequence[int]]) -> list[tuple[list[int], int, int]]:
        """Return this rank's batches: numbers of texts of similar length, rows, and the padded length.

        What ranks compute at the same time has one shape, because expert parallelism joins it. Rows without a text are
        padding.
        """
        num_ranks, multiple = self.model.ps.dp.size, self.model.length_multiple
        order = sorted(range(len(texts)), key=lambda number: (-len(texts[number]), number))
        batches, start = [], 0
        while start < len(order):
            length = -(-len(texts[order[start]]) // multiple) * multiple
            most = max(1, min(self.batch_size, _MAX_LOGITS // (length * self.model.vocab_size)))
            together = order[start : start + most * num_ranks]
            start += len(together)
            batches.append((together[self.model.ps.dp.rank :: num_ranks], -(-len(together) // num_ranks), length))
        return batches

    def _forward(
        self, texts: Sequence[Sequence[int]], batches: Sequence[tuple[list[int], int, int]], reduce: Reduction
    ) -> list[list[tuple[int, float, float]]]:
        """Run the batches in the order of the pipeline schedule; returns nothing on ranks before the last stage."""
        model = self.model

        def forward_step(chunk: int, index: int, x_SBH: Tensor | None) -> tuple[Tensor, list | None]:
            numbers, rows, length = batches[index]
            tokens_BS = torch.zeros(rows, length, dtype=torch.int64)
            for row, number in enumerate(numbers):
                tokens_BS[row, : len(texts[number])] = torch.tensor(texts[number])
            filled = [len(texts[number]) for number in numbers] + [0] * (rows - len(numbers))
            position_ids_BS = torch.arange(length, device=model.device).expand(rows, -1)
            output = model.chunks[chunk](
                tokens_BS.to(model.device),
                position_ids_BS,
                x_SBH=x_SBH,
                row_lengths=None if set(filled) == {length} else tuple(filled),
            )
            if not model.chunks[chunk].layout.has_loss:
                return output, None
            found = [
                result for row, number in enumerate(numbers) for result in reduce(number, output[row, : filled[row]])
            ]
            return output.new_zeros(()), found

        return model.schedule.run(
            ScheduleInputs(
                forward_step,
                len(batches),
                spec=lambda chunk, index: model.chunks[chunk].input_spec(*batches[index][1:]),
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

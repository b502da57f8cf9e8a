"""Forward passes that score texts, under any mapping (inference/model.py).

Sequences are sorted by length and padded on the right: in a causal model the padding changes nothing, and it counts in
no expert's capacity.

Shapes: B sequences of a batch, S padded length, V padded vocabulary, C scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from moe_trainer.inference.model import Model, TextBatch
from moe_trainer.model.sequence_borders import SequenceBorders
from moe_trainer.pipeline.schedule import ScheduleInputs

_MAX_LOGITS = 2**31  # of a batch; the last stage has them in memory
_MAX_MICROBATCHES = 64  # of one run of the pipeline schedule, which plans all of them before the first

Reduction = Callable[[int, Tensor], Iterable[tuple[int, float, float]]]
"""Turns the number of a sequence and its logits [length, V] into results: an index, and two numbers."""


class Scorer:
    """Computes log-probabilities in batches of at most `batch_size` sequences a rank."""

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

    def _run(self, texts: Sequence[Sequence[int]], reduce: Reduction, num_results: int) -> list[tuple[float, float]]:
        """Run the texts through the model and return the results that `reduce` makes of their logits. Collective."""
        values = torch.zeros(num_results, 2, dtype=torch.float64)
        if texts:
            with self.model.evaluating():
                of_ranks = self.model.plan(
                    [len(text) for text in texts],
                    lambda length: min(self.batch_size, _MAX_LOGITS // (length * self.model.vocab_size)),
                )
                batches = [each[self.model.ps.dp.rank] for each in of_ranks]
                for start in range(0, len(batches), _MAX_MICROBATCHES):
                    for found in self._forward(texts, batches[start : start + _MAX_MICROBATCHES], reduce):
                        for index, *pair in found:
                            values[index] = torch.tensor(pair, dtype=torch.float64)
        return [(first, second) for first, second in self.model.share(values).tolist()]

    def _forward(
        self, texts: Sequence[Sequence[int]], batches: Sequence[TextBatch], reduce: Reduction
    ) -> list[list[tuple[int, float, float]]]:
        """Run the batches in the order of the pipeline schedule; returns nothing on ranks before the last stage."""
        model = self.model

        def forward_step(chunk: int, index: int, x_SBH: Tensor | None) -> tuple[Tensor, list | None]:
            numbers, rows, length = batches[index].numbers, batches[index].num_rows, batches[index].length
            tokens_BS, filled = batches[index].pad(texts, rows)
            position_ids_BS = torch.arange(length, device=model.device).expand(rows, -1)
            output = model.chunks[chunk](
                tokens_BS.to(model.device),
                position_ids_BS,
                borders=SequenceBorders(row_lengths=None if set(filled) == {length} else filled),
                x_SBH=x_SBH,
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
                spec=lambda chunk, index: model.chunks[chunk].input_spec(
                    batches[index].num_rows, batches[index].length
                ),
                forward_only=True,
            )
        )

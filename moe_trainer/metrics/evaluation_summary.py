"""Summary of the evaluation of a checkpoint: loss and perplexity of every set, per token and per byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_trainer.metrics.console import perplexity


@dataclass(frozen=True)
class EvaluationResult:
    """Sums over one evaluated set.

    Attributes:
        kind: "validation", "validation-NAME", "test" or "test-NAME".
        samples: number of samples.
        loss_sum: sum of the losses of all tokens, in nats.
        tokens: number of tokens.
        num_bytes: UTF-8 bytes of the text that the tokens decode to; None if they were not counted.
    """

    kind: str
    samples: int
    loss_sum: float
    tokens: int
    num_bytes: int | None = None

    @property
    def loss(self) -> float:
        """Mean loss per token, in nats."""
        return self.loss_sum / max(self.tokens, 1)

    @property
    def loss_per_byte(self) -> float | None:
        """Mean loss per byte, in nats; None if no bytes were counted."""
        return self.loss_sum / self.num_bytes if self.num_bytes else None

    def as_record(self) -> dict[str, float]:
        """Return the values of the record in metrics.jsonl, except the loss."""
        record: dict[str, float] = {"samples": self.samples, "tokens": self.tokens}
        if self.loss_per_byte is not None:
            record |= {
                "bytes": self.num_bytes,
                "loss_per_byte": self.loss_per_byte,
                "bits_per_byte": self.loss_per_byte / math.log(2.0),
                "ppl_per_byte": perplexity(self.loss_per_byte),
            }
        return record


def evaluation_table(results: Sequence[EvaluationResult], iteration: int, source: str | None, no_bytes: str) -> str:
    """Return a table with one line per set.

    Args:
        results: the evaluated sets.
        iteration: of the checkpoint.
        source: the checkpoint; None for initial weights.
        no_bytes: why bytes are not counted; "" if they are.
    """
    title = (
        f"evaluation of {source}, iteration {iteration}"
        if source
        else f"evaluation of initial weights (no --load), iteration {iteration}"
    )
    if not results:
        return f"{title}: nothing was evaluated (no validation or test data, or --eval-iters 0)"
    head = ["set", "samples", "tokens", "loss/token", "PPL/token"] + (
        [] if no_bytes else ["bytes", "loss/byte", "bits/byte", "PPL/byte"]
    )
    rows = [head]
    for result in results:
        row = [
            result.kind,
            f"{result.samples:,}",
            f"{result.tokens:,}",
            f"{result.loss:.6f}",
            f"{perplexity(result.loss):.4f}",
        ]
        if not no_bytes:
            per_byte = result.loss_per_byte
            figures = (
                ["-"] * 3
                if per_byte is None
                else [f"{per_byte:.6f}", f"{per_byte / math.log(2.0):.6f}", f"{perplexity(per_byte):.4f}"]
            )
            row += [f"{result.num_bytes:,}", *figures]
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]
    note = (
        f"per byte: not reported, because {no_bytes}"
        if no_bytes
        else "bytes: UTF-8 bytes of the text that the evaluated tokens decode to; special and unknown tokens "
        "count none. Losses in nats."
    )
    return "\n".join([title, *(f"  {line}" for line in lines), f"  {note}"])

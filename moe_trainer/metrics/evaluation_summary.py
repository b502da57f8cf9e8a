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
        loss_sum: sum of the losses of all tokens, in nats.
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
        if self.num_bytes and (loss := self.loss_per_byte) is not None:
            record |= {
                "bytes": self.num_bytes,
                "loss_per_byte": loss,
                "bits_per_byte": loss / math.log(2.0),
                "ppl_per_byte": perplexity(loss),
            }
        return record


def evaluation_table(results: Sequence[EvaluationResult], iteration: int, source: str | None, no_bytes: str) -> str:
    """Return a table with one line per set.

    `source` is the checkpoint, None for initial weights; `no_bytes` is why bytes are not counted, "" if they are.
    """
    title = f"evaluation of {source or 'initial weights (no --load)'}, iteration {iteration}"
    if not results:
        return f"{title}: nothing was evaluated (no validation or test data, or --eval-iters 0)"
    rows = ["set samples tokens loss/token PPL/token".split()]
    if not no_bytes:
        rows[0] += "bytes loss/byte bits/byte PPL/byte".split()
    for result in results:
        counts = [f"{result.samples:,}", f"{result.tokens:,}"]
        row = [result.kind, *counts, f"{result.loss:.6f}", f"{perplexity(result.loss):.4f}"]
        if not no_bytes:
            loss = result.loss_per_byte
            row.append(f"{result.num_bytes:,}")
            row += (
                ["-"] * 3 if loss is None else [f"{loss:.6f}", f"{loss / math.log(2.0):.6f}", f"{perplexity(loss):.4f}"]
            )
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]
    note = (
        f"per byte: not reported, because {no_bytes}"
        if no_bytes
        else "bytes: UTF-8 bytes of the text that the evaluated tokens decode to; special and unknown tokens "
        "count none. Losses in nats."
    )
    return "\n".join([title, *(f"  {line}" for line in lines), f"  {note}"])

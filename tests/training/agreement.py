"""Training under a mapping equals one process: a table of rows, each a model and the flags of its ranks.

    ROWS = {"tp2": Row(2, make_argv("plain"), "--tensor-model-parallel-size 2")}
    check_rows(ROWS)

The rows of a number of ranks run one after another on the same ranks, and rows of one model share its run on one
process. Every test_*_agree module whose one process needs no definition of the mapping has such a table.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness import run_ranks
from training.layouts import Tolerances, TrainingTrace, assert_equal, train_one_process, train_ranks


@dataclass(frozen=True)
class Row:
    """A model, and flags of the ranks only, which must not change a result."""

    ranks: int
    model: Iterable[str]
    flags: str
    tolerances: Tolerances | None = None


def train_rows(rows: Mapping[str, Row]) -> dict[str, list[TrainingTrace]]:
    """Return the traces of all ranks by name of the row."""
    found = {}
    for ranks in sorted({row.ranks for row in rows.values()}):
        names = [name for name, row in rows.items() if row.ranks == ranks]
        traces = run_ranks(train_ranks, ranks, [[*rows[name].model, *rows[name].flags.split()] for name in names])
        found |= {name: list(of_ranks) for name, *of_ranks in zip(names, *traces, strict=True)}
    return found


def check_rows(rows: Mapping[str, Row]) -> dict[str, TrainingTrace]:
    """Losses, every gradient, norms, and the weights after two steps; every rank logs and clips alike."""
    outcomes = {}
    for name, (outcome, *others) in train_rows(rows).items():
        assert_equal(outcome, train_one_process(*rows[name].model), name, rows[name].tolerances)
        for other in others:
            assert other.losses == outcome.losses and other.grad_norms == outcome.grad_norms, name
        outcomes[name] = outcome
    return outcomes

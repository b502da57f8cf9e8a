"""Training under a mapping equals one process: a table of rows, each a model and the flags of its ranks.

    ROWS = {"tp2": Row(2, make_argv("plain"), "--tensor-model-parallel-size 2")}
    check_rows(ROWS)

The rows of a number of ranks run one after another on the same ranks, and rows of one model share its run on one
process. Where the one process needs definitions of the mapping (verification/parity.py), a table has cases instead:

    check_cases({"cp2": as_is([*make_argv("capacity"), "--context-parallel-size", "2"], 2)})
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from unittest.mock import patch

from harness import run_ranks
from training.layouts import Tolerances, TrainingTrace, assert_equal, compare, train_one_process, train_ranks

from moe_trainer.verification import parity
from moe_trainer.verification.parity import check_parity, train_case, train_reference
from moe_trainer.verification.rank_pool import RankPool
from moe_trainer.verification.shrink import ParityCase


@dataclass(frozen=True)
class Row:
    """A model, and flags of the ranks only, which must not change a result."""

    ranks: int
    model: Iterable[str]
    flags: str
    tolerances: Tolerances | None = None


def names_by_ranks(ranks: Mapping[str, int]) -> list[tuple[int, list[str]]]:
    """Return the numbers of ranks, the small ones first, each with the names that have it."""
    return [(count, [name for name, own in ranks.items() if own == count]) for count in sorted({*ranks.values()})]


def traces_by_name(names: Sequence[str], traces: list[list[TrainingTrace]]) -> dict[str, TrainingTrace]:
    """Return the first rank's traces by name; every rank must have logged and clipped alike."""
    for name, outcome, *others in zip(names, *traces, strict=True):
        for other in others:
            assert other.losses == outcome.losses and other.grad_norms == outcome.grad_norms, name
    return dict(zip(names, traces[0], strict=True))


def check_rows(rows: Mapping[str, Row]) -> dict[str, TrainingTrace]:
    """Losses, every gradient, norms, and the weights after two steps; every rank logs and clips alike."""
    outcomes = {}
    for ranks, names in names_by_ranks({name: row.ranks for name, row in rows.items()}):
        argvs = [[*rows[name].model, *rows[name].flags.split()] for name in names]
        outcomes |= traces_by_name(names, run_ranks(train_ranks, ranks, argvs))
    for name, outcome in outcomes.items():
        assert_equal(outcome, train_one_process(*rows[name].model), name, rows[name].tolerances)
    return outcomes


def train_cases(rank: int, n: int, cases: list[ParityCase]) -> list[TrainingTrace]:
    """Train cases one after another on the same ranks, with the first seed."""
    traces = []
    for case in cases:
        try:
            traces.append(train_case(rank, n, case, 0))
        except Exception as error:
            raise RuntimeError(" ".join(case.argv)) from error
    return traces


def check_cases(cases: Mapping[str, ParityCase]) -> dict[str, TrainingTrace]:
    """The same for cases. One that differs is repeated on batches where rounding chooses no expert, token or key."""
    outcomes, failed = {}, {}
    with patch.object(parity, "STEPS", 2), RankPool(max(case.pool_size for case in cases.values())) as pool:
        for ranks, names in names_by_ranks({name: case.world_size for name, case in cases.items()}):
            of_ranks = [cases[name] for name in names]
            outcomes |= traces_by_name(names, run_ranks(train_cases, ranks, of_ranks, timeout=600.0 * len(of_ranks)))
        for name, outcome in outcomes.items():
            differences = compare(train_reference(0, 1, cases[name], 0)[0], outcome)
            if differences and not check_parity(pool, cases[name]).is_equal:
                failed[name] = "; ".join(map(str, differences[:3]))
    assert not failed, "\n".join(f"{name}: {differences}" for name, differences in failed.items())
    return outcomes

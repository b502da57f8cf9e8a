"""Which data the flags name: blends, splits and how many samples of each are read.

No token file is opened here, and torch is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

from arguments.blend import SPLIT_NAMES, get_blends_per_split, get_common_blend, get_phase_blends
from arguments.data import DataArgs
from arguments.training import TrainingArgs
from moe_trainer.errors import UserError


class Phase(NamedTuple):
    """Part of the run that reads one blend: its number, its first sample and one past its last."""

    number: int
    first: int
    end: int


def training_phases(data: DataArgs, training: TrainingArgs, consumed: int) -> tuple[Phase, ...]:
    """Return the phase that follows `consumed` samples and those that this run reads after it.

    Without --phase-data-args-path that is one phase, at whose end the run stops. Without
    --phase-transition-iterations it is the whole run.
    """
    total, _, _ = requested_sizes(training)
    starts = [0, *(iteration * training.global_batch_size for iteration in data.phase_transitions)]
    bounds = [*(start for start in starts if start < total), total]
    phases = [Phase(number, first, end) for number, (first, end) in enumerate(pairwise(bounds))]
    left = [phase for phase in phases if consumed < phase.end] or phases[-1:]
    return tuple(left if data.phase_data_args_path else left[:1])


def requested_sizes(training: TrainingArgs) -> tuple[int, int | None, int]:
    """Return how many samples training, validation (None: one full pass) and test will read over the whole run."""
    eval_batch = training.eval_global_batch_size or training.global_batch_size
    if training.skip_train:
        train, train_iters = 0, 0
    elif training.train_samples:
        train, train_iters = training.train_samples, training.train_samples // training.global_batch_size
    else:
        train_iters = training.train_iters or 0
        train = train_iters * training.global_batch_size
    evaluations = train_iters // training.eval_interval + 1
    valid = None if training.full_validation else evaluations * training.eval_iters * eval_batch
    return train, valid, training.eval_iters * eval_batch


def domain_names(prefixes: Sequence[str]) -> list[str]:
    """Return names of a blend's prefixes: the ends of their paths that differ, without what preprocessing appends."""
    paths = [prefix.removesuffix("_text_document").rstrip("/").split("/") for prefix in prefixes]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{number}-{path[-1]}" for number, path in enumerate(paths)]  # the same prefix twice


def data_prefixes(data: DataArgs) -> tuple[str, ...]:
    """Return the prefixes of all token files that these flags name, each once.

    Raises:
        ValueError: for a blend that cannot be read.
    """
    blends = (get_common_blend(data), *(get_blends_per_split(data) or ()), *get_phase_blends(data))
    return tuple(dict.fromkeys(prefix for blend in blends if blend is not None for prefix in blend.prefixes))


def source_flag(data: DataArgs, number: int) -> str:
    """Return the flag, with its file, that names the data of split `number`."""
    if number == 0 and data.phase_data_args_path:
        return "--phase-data-args-path"
    for dest in ("data_args_path", "per_split_data_args_path"):
        if getattr(data, dest) is not None:
            return f"--{dest.replace('_', '-')} {getattr(data, dest)}"
    return "--data-path" if data.data_path is not None else f"--{SPLIT_NAMES[number]}-data-path"


@contextmanager
def naming_flag(data: DataArgs, number: int) -> Iterator[None]:
    """Let a UserError of the block begin with the flag that names the data of split `number`."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{source_flag(data, number)}: {error}") from None

"""Which data the flags name: blends, splits and how many samples of each are read.

No token file is opened here, and torch is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from arguments.data import DataArgs
from arguments.training import TrainingArgs
from moe_trainer.data.blend import Blend, parse_blend, read_blend_file, read_split_blends_file
from moe_trainer.data.index_build import SPLIT_NAMES


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
    evaluations = train_iters // training.eval_interval + 1 if training.eval_interval and not training.skip_train else 1
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
    blends = (get_common_blend(data), *(get_blends_per_split(data) or ()))
    return tuple(dict.fromkeys(prefix for blend in blends if blend is not None for prefix in blend.prefixes))


def source_flag(data: DataArgs, number: int) -> str:
    """Return the flag, with its file, that names the data of split `number`."""
    for dest in ("data_args_path", "per_split_data_args_path"):
        if getattr(data, dest) is not None:
            return f"--{dest.replace('_', '-')} {getattr(data, dest)}"
    return "--data-path" if data.data_path is not None else f"--{SPLIT_NAMES[number]}-data-path"


def get_common_blend(data: DataArgs) -> Blend | None:
    """Return the blend that all splits are taken of, None where there is none.

    Raises:
        ValueError: if it cannot be read.
    """
    if data.data_args_path is not None:
        if data.data_path is not None:
            raise ValueError("--data-path and --data-args-path both name the data; give one")
        return read_blend_file(data.data_args_path)
    return None if data.data_path is None else parse_blend(data.data_path)


def get_blends_per_split(data: DataArgs) -> tuple[Blend | None, ...] | None:
    """Return the blend of each split, None where the splits have no separate files.

    Raises:
        ValueError: if one cannot be read, or both kinds of flags name the data.
    """
    paths = [(f"--{name}-data-path", getattr(data, f"{name}_data_path")) for name in SPLIT_NAMES]
    given = [flag for flag, items in paths if items is not None]
    if data.per_split_data_args_path is not None:
        if given:
            raise ValueError(f"{given[0]} and --per-split-data-args-path both name the data; give one")
        return read_split_blends_file(data.per_split_data_args_path)
    if not given:
        return None
    return tuple(None if items is None else parse_blend(items, flag) for flag, items in paths)

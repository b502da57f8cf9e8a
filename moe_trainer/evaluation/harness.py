"""Access to EleutherAI's evaluation harness, an optional library."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

from moe_trainer.backends import import_problem
from moe_trainer.errors import UserError

# The libraries read all but the last when they are imported. The last: a process that trains must not fork.
_ENVIRONMENT = (
    ("HF_HUB_OFFLINE", "1"),
    ("HF_DATASETS_OFFLINE", "1"),
    ("HF_DATASETS_DISABLE_PROGRESS_BARS", "1"),
    ("DISABLE_MULTIPROC", "1"),
)


@dataclass(frozen=True)
class TaskEvaluation:
    """Tasks, and the model that they are run on.

    Attributes:
        runner: TaskRunner of lm_eval_model.py.
        model: TrainedModel of lm_eval_model.py.
    """

    runner: Any
    model: Any


def open_harness() -> Any:
    """Import lm_eval_model.py. Tasks are read from this machine unless the environment sets HF_HUB_OFFLINE=0.

    Raises:
        UserError: if lm-eval is not installed, or another version of it.
    """
    for name, value in _ENVIRONMENT:
        os.environ.setdefault(name, value)
    if (problem := import_problem("lm_eval")) is not None:
        raise UserError(f"tasks need EleutherAI's harness, but {problem} (pip install lm-eval)")
    try:
        return importlib.import_module("moe_trainer.evaluation.lm_eval_model")
    except ImportError as error:
        raise UserError(f"the installed lm-eval is too old or incomplete: {error} (pip install -U lm-eval)") from error

"""A run on Weights & Biases, which a resumed job continues.

The run's id stands in SAVE/wandb_run.json, beside the checkpoints. A job that goes on with its own checkpoints continues that run;
any other begins a new one, as metrics.jsonl and TensorBoard do. Steps of a run must ascend there and cannot be taken back: what a killed
job had logged after its last checkpoint stays, and is not logged again by its successor (the numbers are the same).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arguments.output import OutputArgs
from moe_trainer.backends import import_problem

logger = logging.getLogger(__name__)


class WandbRun:
    """Hands numbers to Weights & Biases, which must not end a training: when its library fails, that is told and no more is logged."""

    def __init__(self, output: OutputArgs, settings: Mapping[str, object], resumes: bool):
        """resumes: the job goes on with its own checkpoints. Raises: ValueError, OSError."""
        try:
            import wandb
        except ImportError as error:
            raise ValueError(f"--wandb-project: {import_problem('wandb') or error} (pip install wandb)") from error
        file = Path(output.save) / "wandb_run.json" if output.save else None
        place = {"project": output.wandb_project, "entity": output.wandb_entity or None}
        known = _read(file, place) if file is not None and resumes else None
        try:
            self._run: Any = wandb.init(
                dir=output.wandb_save_dir or (f"{output.save}/wandb" if output.save else None), name=output.wandb_exp_name,
                config=dict(settings), **place, **({"id": known, "resume": "allow"} if known else {}))
        except Exception as error:  # of many kinds: no key, no network, no such project
            raise ValueError(f"--wandb-project {output.wandb_project}: Weights & Biases cannot begin a run: {error}") from error
        # what is there already; the library counts the steps of a continued run on
        self._first_step = int(self._run.step or 0) if known else 0
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"id": self._run.id, **place}) + "\n", encoding="utf-8")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Hand over the numbers of a step, unless they are there already."""
        if self._run is None or step < self._first_step:
            return
        try:
            self._run.log(dict(values), step=step)
        except Exception as error:  # a report must not end a run, whatever a library raises
            logger.warning("Weights & Biases takes no more numbers (%s); the run goes on without, metrics.jsonl has them all", error)
            self._run = None

    def finish(self) -> None:
        """End the run there; waits until all is handed over."""
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:
            logger.warning("Weights & Biases could not end its run (%s)", error)


def _read(file: Path, place: Mapping[str, object]) -> str | None:
    """The id in a file; None where there is none, or one of another project."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        if {name: known[name] for name in place} == place:
            return str(known["id"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        logger.warning("Weights & Biases begins a new run, since %s does not tell which one to continue: %s", file, error)
    return None

"""A Weights & Biases run that a resumed job continues.

The id of the run is in SAVE/wandb_run.json, next to the checkpoints. A job that resumes from its own checkpoints
continues that run; any other job starts a new one, as for metrics.jsonl and TensorBoard. W&B steps must ascend and
cannot be removed: values that a killed job logged after its last checkpoint stay, and the next job does not log them
again (they are equal).
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
    """Logs values to Weights & Biases. If its library fails, that is logged and W&B logging is disabled."""

    def __init__(self, output: OutputArgs, settings: Mapping[str, object], resumes: bool):
        """Start a run, or continue one if the job `resumes` from its own checkpoints.

        Raises:
            ValueError: if wandb is not installed or cannot start a run.
            OSError: if the id cannot be saved.
        """
        try:
            import wandb
        except ImportError as error:
            raise ValueError(f"--wandb-project: {import_problem('wandb') or error} (pip install wandb)") from error
        file = Path(output.save) / "wandb_run.json" if output.save else None
        project = {"project": output.wandb_project, "entity": output.wandb_entity or None}
        run_id = _read(file, project) if file is not None and resumes else None
        try:
            self._run: Any = wandb.init(
                dir=output.wandb_save_dir or (f"{output.save}/wandb" if output.save else None),
                name=output.wandb_exp_name,
                config=dict(settings),
                **project,
                **({"id": run_id, "resume": "allow"} if run_id else {}),
            )
        except Exception as error:  # of many types: no key, no network, no such project
            raise ValueError(
                f"--wandb-project {output.wandb_project}: Weights & Biases cannot start a run: {error}"
            ) from error
        # the next step of a continued run; earlier ones are logged already
        self._first_step = int(self._run.step or 0) if run_id else 0
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"id": self._run.id, **project}) + "\n", encoding="utf-8")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the values of a step, unless they are logged already."""
        if self._run is None or step < self._first_step:
            return
        try:
            self._run.log(dict(values), step=step)
        except Exception as error:  # logging must not end a run, whatever a library raises
            logger.warning(
                "W&B logging failed (%s); disabled for the rest of the run (metrics.jsonl is complete)", error
            )
            self._run = None

    def finish(self) -> None:
        """Finish the W&B run, after uploading everything."""
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:
            logger.warning("Weights & Biases cannot finish its run (%s)", error)


def _read(file: Path, project: Mapping[str, object]) -> str | None:
    """Return the run id in a file; None if there is none, or it is of another project."""
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        if {name: saved[name] for name in project} == project:
            return str(saved["id"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        logger.warning("starting a new Weights & Biases run: cannot read the one to continue from %s: %s", file, error)
    return None

"""Benchmark tasks on the model of a run: for scripts/evaluate.py, and between iterations (--eval-tasks)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from moe_trainer.data.tokenizer import Tokenizer
from moe_trainer.evaluation.harness import TaskEvaluation, open_harness
from moe_trainer.evaluation.options import TaskOptions, split_names
from moe_trainer.evaluation.routing import RoutingCounter
from moe_trainer.evaluation.scoring import Scorer
from moe_trainer.evaluation.task_groups import expand_tasks
from moe_trainer.inference.generator import Generator
from moe_trainer.inference.text import TextCodec
from moe_trainer.metrics.logger import TaskMetric
from moe_trainer.parallel.coordination import raise_on_all_ranks
from moe_trainer.training.inference import as_model, open_chat_template
from moe_trainer.training.run import BaseRun, TrainState
from moe_trainer.training.step import agree_on_buffers

_KEPT = ("results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better", "n-samples")


def prepare_eval_tasks(run: BaseRun, tokenizer: Tokenizer) -> TaskEvaluation | None:
    """Load the tasks of --eval-tasks; None without the flag. Collective with it.

    Raises:
        UserError: on every rank, if lm-eval is not installed or a task cannot be loaded.
    """
    training = run.args.training
    if not training.eval_tasks or training.skip_train:
        return None
    with raise_on_all_ranks(run.ps.world, "--eval-tasks"):
        tasks, num_fewshot = expand_tasks(split_names(training.eval_tasks), None)
        options = TaskOptions(tasks, training.eval_tasks_path, num_fewshot, training.eval_tasks_limit)
        runner = open_harness().find_tasks(options)
        batch_size = training.eval_micro_batch_size or training.micro_batch_size
        return bind_tasks(run, tokenizer, runner, batch_size)


def bind_tasks(
    run: BaseRun, tokenizer: Tokenizer, runner: Any, batch_size: int, counter: RoutingCounter | None = None
) -> TaskEvaluation:
    """Return the tasks with the model of this run, which computes `batch_size` texts at a time on each rank.

    `runner`: from `find_tasks` of lm_eval_model.py. `counter`: counts the routing of what the tasks ask.

    Raises:
        UserError: if the tokenizer has no text, or the mapping cannot evaluate tasks.
    """
    passes = as_model(run)
    scorer, generator = Scorer(passes, batch_size), Generator(passes, batch_size, tokenizer.vocab_size)
    parts = scorer, generator, TextCodec(tokenizer), counter
    if runner.options.uses_chat_template:
        return TaskEvaluation(runner, open_harness().ChatModel(open_chat_template(run).write_prompt, *parts))
    return TaskEvaluation(runner, open_harness().TrainedModel(*parts))


def run_tasks(run: BaseRun, evaluation: TaskEvaluation) -> dict[str, Any]:
    """Run the tasks and return the harness's results. Collective."""
    run.wait_params()
    with run.timers("evaluate"):
        results = evaluation.runner.run(evaluation.model)
    agree_on_buffers(run, "evaluation of tasks")
    return {name: results[name] for name in _KEPT if name in results}


def evaluate_tasks(run: BaseRun, state: TrainState, tasks: TaskEvaluation) -> None:
    """Run the tasks of --eval-tasks and log their figures. Collective."""
    results = run_tasks(run, tasks)
    if run.metrics is not None:
        run.metrics.tasks(state.iteration, state.consumed_train_samples, list(task_metrics(results)))


def task_metrics(results: Mapping[str, Any]) -> Iterator[TaskMetric]:
    """Yield the figures of the harness's results, of single tasks and of groups."""
    for task, entry in results["results"].items():
        for name, value in entry.items():
            metric, _, filtered = name.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = entry.get(f"{metric}_stderr,{filtered}")
            is_known = isinstance(stderr, int | float) and math.isfinite(stderr)
            label = metric if filtered == "none" else f"{metric},{filtered}"
            yield TaskMetric(task, label, float(value), float(stderr) if is_known else None)

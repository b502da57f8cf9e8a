"""Log lines, metrics.jsonl, TensorBoard, Weights & Biases and the dashboard of a run.

The loop passes one `IterationRecord` per iteration to `MetricsLogger.record`, on the last rank only (as in
Megatron-LM: the last pipeline stage has the loss). A resumed run continues the files, and drops what was logged of
iterations that it repeats. A run that starts from iteration 0 renames an older metrics file to a numbered name.

* The iteration line holds means over the interval, with Megatron-LM's quirk: the line after the first iteration of a
  run does not reset the sums.
* Each record of metrics.jsonl holds the exact values of its iteration, and counters since the last record;
  `learning_rate` is that of the step. The first record has `run`, and of a resumed run `resumed_from`.
"""

from __future__ import annotations

import datetime
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from arguments.output import OutputArgs
from moe_trainer.errors import name_write_errors
from moe_trainer.metrics import event_files
from moe_trainer.metrics.console import LoggedInterval, iteration_line, perplexity, task_line, validation_line
from moe_trainer.metrics.dashboard import open_dashboard
from moe_trainer.metrics.evaluation_summary import EvaluationResult
from moe_trainer.metrics.iteration import IterationRecord
from moe_trainer.metrics.metrics_file import open_metrics_file, read_end
from moe_trainer.metrics.routing_health import PER_LAYER, heat_map, routing_health
from moe_trainer.metrics.run_state import RunEnd
from moe_trainer.metrics.summary import RunSummary
from moe_trainer.metrics.tensorboard_writer import TensorBoardWriter
from moe_trainer.metrics.wandb_run import WandbRun

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")
EVALUATION_REPORT_S = 30.0


@dataclass(frozen=True)
class LogOptions:
    """What is logged, and where.

    Attributes:
        metrics_file: path of metrics.jsonl; None writes none.
        resumes_own_run: the run continues the one in --tensorboard-dir, which has logged at least `start_samples`
            samples.
        is_eval_only: a checkpoint is evaluated; its records are appended to the metrics file and none are dropped.
        expert_ranks: as in `routing_health`.
        layer_share: as in `routing_health`.
        peak_tflops: of the device in bf16; None if unknown.
        run: description of the run for the first record.
    """

    output: OutputArgs
    train_iters: int
    metrics_file: str | None = None
    moe_per_layer_logging: bool = False
    resumes_own_run: bool = False
    is_eval_only: bool = False
    start_samples: int = 0
    expert_ranks: int = 1
    layer_share: float = 0.0
    peak_tflops: float | None = None
    run: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class TaskMetric:
    """One figure of a benchmark task: accuracy, perplexity, ...; `stderr` is None if it is unknown."""

    task: str
    metric: str
    value: float
    stderr: float | None


class MetricsLogger:
    """Turns iteration records into log lines, files and scalars. One per run, on the last rank.

    A later disk error does not end the run; see metrics_file.py and tensorboard_writer.py.

    Raises:
        UserError: if the metrics file or the TensorBoard directory cannot be opened.
    """

    def __init__(self, options: LogOptions, world_size: int, start_iteration: int, settings: Mapping[str, object]):
        self._options, self._world_size, self._started = options, world_size, time.time()
        begin = None if options.is_eval_only else start_iteration
        self._file = open_metrics_file(options.metrics_file, begin) if options.metrics_file else None
        self._dashboard = (
            open_dashboard(options.metrics_file) if options.metrics_file and not options.is_eval_only else None
        )
        self._tensorboard = _open_tensorboard(options, start_iteration, settings)
        resumes = options.resumes_own_run and start_iteration > 0
        self._wandb = WandbRun(options.output, settings, resumes) if options.output.wandb_project else None
        # on a terminal only
        is_off = None if options.train_iters > 0 else True
        self._bar = tqdm(total=options.train_iters, initial=start_iteration, disable=is_off, leave=False)
        self._summary = RunSummary(options.train_iters, world_size, start_iteration)
        self._first = True
        self._saved: list[int] = []
        self._resumed_from = self._recorded = start_iteration
        self._reset_line_sums()
        self._reset_record_counters()

    def _reset_line_sums(self) -> None:
        self._loss_sums: dict[str, float] = {}
        self._advanced = self._skipped = self._nan = self._repeated = 0
        self._line_seconds = 0.0

    def _reset_record_counters(self) -> None:
        self._record_skipped = self._record_nan = self._record_repeated = self._record_dropped = 0
        self._record_seconds = 0.0

    def record(self, record: IterationRecord) -> None:
        """Add an iteration; print and write what is due."""
        self._accumulate(record)
        self._summary.add_iteration(record)
        if record.iteration % self._options.output.tensorboard_log_interval == 0:
            self._write_scalars(record)
        if record.iteration % self._options.output.log_interval == 0 or self._first:
            health = None
            if (loads := record.step.loads) is not None:
                options, between_ranks = self._options, record.step.between_ranks
                health = routing_health(loads, options.expert_ranks, options.layer_share, between_ranks)
            self._print_line(record, health)
            self._write_interval_scalars(record, health)
            self._write_record(record, health)
            self.flush()  # a run that dies has written everything up to its last line
            if not self._first:
                self._reset_line_sums()
            self._first = False
        self._bar.set_postfix({"tokens/s": record.tokens / record.elapsed_s, **record.step.losses}, refresh=False)
        self._bar.update(record.iteration - self._bar.n)

    def print(self, text: str) -> None:
        """Print a line for the user, above the progress bar."""
        self._bar.clear()
        print(text, flush=True)

    def _accumulate(self, record: IterationRecord) -> None:
        if record.skipped:
            self._skipped += 1
            self._record_skipped += 1
        else:
            self._advanced += 1
            for name, value in record.step.losses.items():
                self._loss_sums[name] = self._loss_sums.get(name, 0.0) + value
        self._nan += record.step.is_nan
        self._record_nan += record.step.is_nan
        self._repeated += record.step.num_repeats > 0
        self._record_repeated += record.step.num_repeats > 0
        self._record_dropped += record.step.dropped_tokens
        self._line_seconds += record.elapsed_s
        self._record_seconds += record.elapsed_s

    def _tflops(self, flops: float, seconds: float) -> float:
        return flops / (seconds * 1e12 * self._world_size)

    def _print_line(self, record: IterationRecord, health: Mapping[str, Any] | None) -> None:
        seconds = self._line_seconds / (self._advanced + self._skipped)
        losses = {name: total / max(1, self._advanced) for name, total in self._loss_sums.items()}
        self._summary.add_line(self._advanced, losses)
        interval = LoggedInterval(
            seconds * 1e3,
            losses,
            throughput=self._tflops(record.flops, seconds) if self._options.output.log_throughput else None,
            overload_factors=self._overload_factors(health),
            skipped_iterations=self._skipped,
            nan_iterations=self._nan,
            repeated_iterations=self._repeated,
        )
        self.print(iteration_line(record, datetime.datetime.now(), self._options.train_iters, interval))

    def _overload_factors(self, health: Mapping[str, Any] | None) -> tuple[float, float] | None:
        """Return the mean and maximum over layers; None if every rank holds all experts."""
        if health is None or not health["layers"] or self._options.expert_ranks == 1:
            return None
        factors = health["rank_max_over_mean"]
        return sum(factors) / len(factors), max(factors)

    def _write_record(self, record: IterationRecord, health: Mapping[str, Any] | None) -> None:
        if self._file is None:
            return
        values: dict[str, Any] = {
            "iteration": record.iteration,
            "consumed_samples": record.consumed_samples,
            **record.step.losses,
            "learning_rate": record.learning_rate,
            "grad_norm": record.step.grad_norm,
            "loss_scale": record.loss_scale,
            "global_batch_size": record.global_batch_size,
            "skipped_iterations": self._record_skipped,
            "nan_iterations": self._record_nan,
            "repeated_iterations": self._record_repeated,
            "dropped_tokens": self._record_dropped,
            "elapsed_ms": record.elapsed_s * 1e3,
            "tokens_per_s": record.tokens / record.elapsed_s,
            "tflops_per_gpu": self._tflops(record.flops, record.elapsed_s),
            "max_memory_mb": record.max_memory_mb,
            "interval_s": self._record_seconds,
            "time": time.time(),
        }
        if self._options.peak_tflops:
            values["mfu"] = values["tflops_per_gpu"] / self._options.peak_tflops
        step = record.step
        optional = (
            ("num_zeros", step.num_zeros),
            ("params_norm", record.params_norm),
            ("max_attention_logit", step.max_attention_logit),
        )
        values |= {name: value for name, value in optional if value is not None}
        if rejected := [entry for entry in record.rejected if entry["iteration"] > self._recorded]:
            values["rejected"] = rejected
        self._recorded = record.iteration
        if self._saved:
            values["saved"], self._saved = self._saved, []
        if record.packing is not None:
            values["packing"] = record.packing
        if record.energy is not None:
            values.update(energy_per_gpu_j=record.energy.joules_per_iteration, power_per_gpu_w=record.energy.watts)
        if record.compute_times is not None:
            values["own_time_ms"] = record.compute_times
        if self._first and self._resumed_from:
            values["resumed_from"] = self._resumed_from
        if self._first and self._options.run is not None:
            values["run"] = self._options.run
        if health is not None:
            values["routing"] = health
        self._append(values)
        self._reset_record_counters()

    def _append(self, values: Mapping[str, object]) -> None:
        """Add a record to the metrics file and the dashboard, if there are any."""
        if self._file is not None:
            self._file.append(json.dumps(values))
        if self._dashboard is not None:
            self._dashboard.add(values)

    def _scalar(self, name: str, value: float, iteration: int, samples: int | None = None) -> None:
        if self._tensorboard is not None:
            self._tensorboard.add_scalar(name, value, iteration)
            if samples is not None:
                self._tensorboard.add_scalar(f"{name} vs samples", value, samples)
        if self._wandb is not None:
            self._wandb.log({name: value}, iteration)

    def _write_scalars(self, record: IterationRecord) -> None:
        options, iteration, samples = self._options, record.iteration, record.consumed_samples
        if self._wandb is not None:
            self._wandb.log({"samples vs steps": samples}, iteration)
        # Megatron-LM writes its scalars after the scheduler has stepped: the learning rate here is the next step's.
        self._scalar("learning-rate", record.next_learning_rate, iteration, samples)
        self._scalar("batch-size", record.global_batch_size, iteration, samples)
        if record.skipped_samples > 0:
            self._scalar("skipped-train-samples", record.skipped_samples, iteration)
        for name, value in record.step.losses.items():
            self._scalar(name, value, iteration, samples if name == "lm loss" else None)
        if options.output.log_loss_scale_to_tensorboard:
            self._scalar("loss-scale", record.loss_scale, iteration, samples)
        if options.output.log_world_size_to_tensorboard:
            self._scalar("world-size", self._world_size, iteration, samples)
        for name, known in (
            ("grad-norm", record.step.grad_norm),
            ("num-zeros", record.step.num_zeros),
            ("params-norm", record.params_norm),
            ("max_attention_logit", record.step.max_attention_logit),
        ):
            if known is not None:
                self._scalar(name, known, iteration, samples)
        if options.output.log_memory_to_tensorboard:
            for name, value in _memory_scalars(record.max_memory_mb).items():
                self._scalar(name, value, iteration)
        if options.moe_per_layer_logging:
            for name, values in record.step.per_layer.items():
                for layer, value in enumerate(values):
                    self._scalar(f"moe/{name}_layer_{layer}", value, iteration)

    def _write_interval_scalars(self, record: IterationRecord, health: Mapping[str, Any] | None) -> None:
        seconds = self._line_seconds / (self._advanced + self._skipped)
        self._scalar("iteration-time", seconds, record.iteration)
        if self._options.output.log_throughput and self._options.output.log_timers_to_tensorboard:
            self._scalar("throughput", self._tflops(record.flops, seconds), record.iteration)
        if record.energy is not None:
            self._scalar("iter-energy/gpu", record.energy.joules_per_iteration, record.iteration)
            self._scalar("power/gpu", record.energy.watts, record.iteration)
        for name, value in (record.packing or {}).items():
            self._scalar(f"packing/{name}", value, record.iteration)
        for name, value in (record.compute_times or {}).items():
            if isinstance(value, float):
                self._scalar(f"own-time-{name}", value / 1e3, record.iteration)  # in seconds, as iteration-time
        if health is None or not health["layers"]:
            return
        self._scalar("moe/straggler_cost", health["straggler_cost"], record.iteration)
        if (factors := self._overload_factors(health)) is not None:
            for name, value in zip(("avg", "max"), factors):
                self._scalar(f"moe/{name}_overload_factor", value, record.iteration)
        for name in PER_LAYER:
            for layer, value in zip(health["layers"], health[name], strict=True):
                self._scalar(f"moe/{name}_layer_{layer}", value, record.iteration)
        if self._tensorboard is not None:
            self._tensorboard.add_image("moe/load", heat_map(health["tokens_per_expert"]), record.iteration)

    def timers(self, seconds_by_name: Mapping[str, float], iteration: int) -> None:
        if self._options.output.log_timers_to_tensorboard:
            for name, seconds in seconds_by_name.items():
                self._scalar(f"{name}-time", seconds, iteration)

    def validation(
        self,
        where: str,
        kind: str,
        losses: Mapping[str, float],
        iteration: int,
        samples: int,
        evaluated: EvaluationResult | None = None,
    ) -> None:
        """Print the validation line and write its record and scalars.

        `where` is "iteration 200" or "iteration 200 on test set", `kind` "validation", "validation-NAME" or "test".
        `evaluated` adds the values of the evaluation of a checkpoint to the record.
        """
        self.print(validation_line(where, losses, set_name=kind.partition("-")[2]))
        self._summary.add_validation(kind, iteration, losses["lm loss"])
        record = {"validation": kind, "iteration": iteration, **losses, "ppl": perplexity(losses["lm loss"])}
        self._append(record | ({} if evaluated is None else evaluated.as_record()))
        suffix = "validation" if kind == "test" else kind
        for name, value in losses.items():
            self._scalar(f"{name} {suffix}", value, iteration, samples)
            if self._options.output.log_validation_ppl_to_tensorboard:
                self._scalar(f"{name} {suffix} ppl", perplexity(value), iteration, samples)
        self.flush()

    def evaluating(self, kind: str, batches: Iterator[Batch], total: int) -> Iterator[Batch]:
        """Yield the batches of an evaluation and show how many are done: a bar on a terminal, else a line now and then.

        `kind` is that of `validation`.
        """
        reported = time.monotonic()
        with tqdm(total=total, desc=kind, unit="microbatch", disable=None, leave=False) as bar:
            for done, batch in enumerate(batches):
                if bar.disable and time.monotonic() - reported >= EVALUATION_REPORT_S:
                    reported = time.monotonic()
                    self.print(f"evaluating {kind}: {done} of {total} microbatches")
                yield batch
                bar.update()

    def tasks(self, iteration: int, samples: int, figures: Sequence[TaskMetric]) -> None:
        """Print the figures of benchmark tasks (--eval-tasks) and write their records and scalars."""
        self.print(task_line(iteration, [(each.task, each.metric, each.value) for each in figures]))
        for each in figures:
            record = {"task": each.task, "iteration": iteration, "metric": each.metric, "value": each.value}
            self._append(record | {"stderr": each.stderr, "time": time.time()})
            self._scalar(f"tasks/{each.task}/{each.metric}", each.value, iteration, samples)
        self.flush()

    def samples(self, iteration: int, texts: Sequence[tuple[str, str]]) -> None:
        """Print the continuations of prompts (--sample-prompts) and write their records; a text is prompt and rest."""
        for prompt, text in texts:
            self.print(f" sample at iteration {iteration} | {json.dumps(prompt)} -> {json.dumps(text)} | ")
            self._append({"sample": prompt, "iteration": iteration, "text": text, "time": time.time()})
            if self._tensorboard is not None:
                self._tensorboard.add_text(f"samples/{prompt}", text, iteration)
        self.flush()

    def saved(self, iteration: int) -> None:
        """Note that a checkpoint was saved: on the dashboard, and in the next iteration's record."""
        self._saved.append(iteration)
        if self._dashboard is not None:
            self._dashboard.take_save(iteration)

    @property
    def dashboard_path(self) -> str | None:
        """Path of the dashboard; None if there is none."""
        return None if self._dashboard is None else str(self._dashboard.path.resolve())

    def begin(self) -> None:
        if self.dashboard_path is not None:
            self.print(f"dashboard: {self.dashboard_path} (open it in a browser; the run keeps it up to date)")

    def end(self, end: RunEnd, saved: Sequence[int]) -> None:
        """Record how the run ended and print its summary, with the iterations that this start has saved.

        If another rank has recorded an end of this start, that is the cause, and stays.
        """
        found = read_end(Path(self._options.metrics_file), self._started) if self._options.metrics_file else None
        record = (found or end).as_record()
        if self._first and self._options.run is not None:
            record["run"] = self._options.run  # there is no record of an iteration that has it
        if found is None and self._file is not None:
            self._file.append(json.dumps(record))
        if self._dashboard is not None:
            self._dashboard.take(record)
            self._dashboard.write()
        lines = self._summary.lines(str(found or end), saved, self._options.output.save, self.dashboard_path)
        self.print("\n".join(lines))

    def flush(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def close(self) -> None:
        self._bar.close()
        if self._dashboard is not None:
            self._dashboard.write()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._file is not None:
            self._file.close()


def _memory_scalars(max_memory_mb: float) -> dict[str, float]:
    import torch

    if not torch.cuda.is_available():
        return {"mem-max-allocated-bytes": max_memory_mb * 2**20}
    stats = torch.cuda.memory_stats()
    return {
        "mem-reserved-bytes": stats["reserved_bytes.all.current"],
        "mem-allocated-bytes": stats["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
        "mem-allocated-count": stats["allocation.all.current"],
    }


def _open_tensorboard(
    options: LogOptions, start_iteration: int, settings: Mapping[str, object]
) -> TensorBoardWriter | None:
    if options.output.tensorboard_dir is None:
        return None
    # Imported here because it takes a second and only one rank needs it.
    from torch.utils.tensorboard import SummaryWriter

    def open_writer() -> SummaryWriter:
        # no purge_step: it would purge the "vs samples" curves, whose steps are samples
        writer = SummaryWriter(log_dir=options.output.tensorboard_dir, max_queue=options.output.tensorboard_queue_size)
        for name in sorted(settings):
            writer.add_text(name, str(settings[name]), global_step=start_iteration)
        return writer

    with name_write_errors("--tensorboard-dir", options.output.tensorboard_dir):
        if options.resumes_own_run:
            _resume_event_files(Path(options.output.tensorboard_dir), start_iteration, options.start_samples)
        return TensorBoardWriter(options.output.tensorboard_dir, open_writer)


def _resume_event_files(folder: Path, iteration: int, samples: int) -> None:
    if iteration == 0:
        event_files.archive_event_files(folder)
    elif num_dropped := event_files.drop_events_after(folder, iteration, samples):
        logger.info(
            f"dropping {num_dropped} TensorBoard events after iteration {iteration} from {folder}: this run logs them "
            "again"
        )

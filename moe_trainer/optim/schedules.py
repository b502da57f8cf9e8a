"""Everything that is a function of samples: learning rate, weight decay, global batch size.

All schedules are frozen values with pure methods, so a resumed run needs nothing but its counters. Lengths in
iterations become samples through the final global batch size, as in Megatron-LM.

NOTE: Megatron-LM has two counters, which the caller keeps. The batch size follows the *consumed* samples. Learning rate
and weight decay follow the samples of *updated* iterations: an iteration skipped for an overflow does not advance them.
An iteration uses the value of the counter before it, so the first one runs at the start of the warmup; the log line
prints the learning rate after it.
"""

import math
from dataclasses import dataclass

from arguments.optimizer import OptimizerArgs
from arguments.training import TrainingArgs
from moe_trainer.pipeline.batch_sizes import batch_stages


@dataclass(frozen=True)
class LrSchedule:
    """Learning rate as a function of the samples of updated iterations.

    The rate grows linearly from init_lr to the maximum over warmup_samples (may be fractional), then decays by `style`
    to the minimum until decay_samples and stays there. "constant" stays at the maximum, "inverse-square-root" follows
    1/sqrt(samples), "WSD" holds the maximum and decays over the last wsd_samples by `wsd_style`. The decoupled range,
    if any, applies to the embedding and the output layer, on the same curve.
    """

    style: str
    max_lr: float
    min_lr: float
    decay_samples: int
    warmup_samples: float = 0
    init_lr: float = 0.0
    wsd_style: str = "exponential"
    wsd_samples: int | None = None
    decoupled_max_lr: float | None = None
    decoupled_min_lr: float | None = None

    def __post_init__(self):
        if not 0.0 <= self.min_lr <= self.max_lr:
            raise ValueError(f"--min-lr {self.min_lr} must lie between 0 and --lr {self.max_lr}")
        if self.init_lr > self.max_lr:
            raise ValueError(f"--lr-warmup-init {self.init_lr} must not exceed --lr {self.max_lr}")
        if self.decay_samples <= 0:
            raise ValueError(
                f"the learning-rate decay (--lr-decay-iters, --lr-decay-samples, else --train-iters or "
                f"--train-samples) must be longer than 0 samples, got {self.decay_samples}"
            )
        if not 0 <= self.warmup_samples < self.decay_samples:
            raise ValueError(
                f"the warmup ({self.warmup_samples} samples; --lr-warmup-iters, --lr-warmup-samples, "
                f"--lr-warmup-fraction) must be shorter than the decay ({self.decay_samples} samples)"
            )
        if self.style == "WSD" and not self.wsd_samples:
            raise ValueError("--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples")

    def lr(self, samples: int, multiplier: float = 1.0) -> float:
        """Return the learning rate after `samples`; `multiplier` scales the range, but not init_lr."""
        return self._rate(samples, self.max_lr * multiplier, self.min_lr * multiplier)

    def decoupled_lr(self, samples: int) -> float | None:
        """Return the rate of the embedding and the output layer with --decoupled-lr, else None."""
        if self.decoupled_max_lr is None:
            return None
        low = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        return self._rate(samples, self.decoupled_max_lr, low)

    def _rate(self, samples: int, high: float, low: float) -> float:
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.init_lr + (high - self.init_lr) * samples / self.warmup_samples
        if self.style == "constant":
            return high
        if samples > self.decay_samples:
            return low
        if self.style == "inverse-square-root":
            return max(low, high * math.sqrt(max(self.warmup_samples, 1)) / math.sqrt(max(samples, 1)))
        style, done = self.style, (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        if style == "WSD":
            wsd_samples = self.wsd_samples or 0  # __post_init__ rejects 0
            annealed = (samples - (self.decay_samples - wsd_samples)) / wsd_samples
            style, done = self.wsd_style, max(annealed, 0.0)
        return low + _fraction_left(style, done) * (high - low)


def _fraction_left(style: str, done: float) -> float:
    """Return the remaining fraction of a range when a fraction `done` of the decay is over."""
    if style == "linear":
        return 1.0 - done
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * done) + 1.0)
    if style == "exponential":
        return 2.0 * 0.5**done - 1.0
    assert style == "minus_sqrt", f"unknown decay style {style!r}"
    return 1.0 - math.sqrt(done)


@dataclass(frozen=True)
class WeightDecaySchedule:
    """Weight decay from `start` to `end` over `samples` of updated iterations."""

    start: float
    end: float
    samples: int
    style: str = "constant"

    def weight_decay(self, samples: int) -> float:
        if self.style == "constant" or samples > self.samples:
            return self.end
        done = samples / self.samples
        part = done if self.style == "linear" else 0.5 * (math.cos(math.pi * (1.0 - done)) + 1.0)
        return self.start + part * (self.end - self.start)


@dataclass(frozen=True)
class BatchSizeSchedule:
    """Global batch size as a function of consumed samples.

    Args:
        stages: (first consumed sample, global batch size), ascending, the first at 0.
        round_down: shrink a batch that does not divide among the ranks to a multiple of micro_batch_size * dp_size.
    """

    stages: tuple[tuple[int, int], ...]
    micro_batch_size: int
    dp_size: int
    round_down: bool = False

    def __post_init__(self):
        assert self.stages and self.stages[0][0] == 0, f"the first stage must begin at 0: {self.stages}"
        if self.round_down:
            small = [batch for _, batch in self.stages if batch < self._unit]
            if small:
                raise ValueError(
                    f"global batch size {small[0]} is smaller than micro-batch size * data-parallel size = "
                    f"{self.micro_batch_size} * {self.dp_size}; --decrease-batch-size-if-needed cannot help"
                )

    def global_batch_size(self, consumed: int) -> int:
        """Return the batch size of the iteration that starts after `consumed` samples.

        Raises:
            ValueError: it does not divide among micro-batches and ranks. Only the current stage is checked, because
                past stages of a run that was moved to more ranks need not fit.
        """
        unit, batch = self._unit, self._stage(consumed)
        if batch % unit:
            raise ValueError(
                f"global batch size {batch} (at {consumed} consumed samples) is not divisible by micro-batch "
                f"size * data-parallel size = {self.micro_batch_size} * {self.dp_size} = {unit}; change "
                "--global-batch-size (or its schedule), or use --decrease-batch-size-if-needed"
            )
        return batch

    def num_microbatches(self, consumed: int) -> int:
        """Return the number of microbatches per rank of the iteration that starts after `consumed` samples."""
        return self.global_batch_size(consumed) // self._unit

    @property
    def final_global_batch_size(self) -> int:
        """The size that converts iterations to samples: that of the last stage, before rounding."""
        return self.stages[-1][1]

    def iterations_for(self, train_samples: int) -> int:
        """Return the number of complete iterations in `train_samples` samples."""
        consumed = iterations = 0
        for begin, _ in self.stages[1:]:
            batch = self._stage(consumed)
            count = min(max(0, -(-(begin - consumed) // batch)), (train_samples - consumed) // batch)
            consumed += count * batch
            iterations += count
        return iterations + (train_samples - consumed) // self._stage(consumed)

    @property
    def _unit(self) -> int:
        return self.micro_batch_size * self.dp_size

    def _stage(self, consumed: int) -> int:
        batch = [size for begin, size in self.stages if begin <= max(consumed, 0)][-1]
        return batch // self._unit * self._unit if self.round_down else batch


def build_batch_size_schedule(training: TrainingArgs, dp_size: int, seq_length: int) -> BatchSizeSchedule:
    """Build the schedule of --global-batch-size, --rampup-batch-size or --step-batch-size-schedule.

    Raises:
        ValueError: a flag is invalid.
    """
    stages = batch_stages(training, dp_size, seq_length)
    return BatchSizeSchedule(stages, training.micro_batch_size, dp_size, training.decrease_batch_size_if_needed)


def build_lr_schedule(optimizer: OptimizerArgs, training: TrainingArgs, final_batch_size: int) -> LrSchedule:
    """Build the learning-rate schedule of the flags; `final_batch_size` converts iterations to samples.

    Raises:
        ValueError: the flags are incomplete or contradict each other.
    """
    if optimizer.lr is None:
        raise ValueError("--lr is needed to train")
    warmup: float
    if training.train_samples is not None:
        decay = optimizer.lr_decay_samples or training.train_samples
        wsd, warmup = optimizer.lr_wsd_decay_samples, optimizer.lr_warmup_samples
    elif training.train_iters is None:
        raise ValueError("either --train-iters or --train-samples is needed to train")
    else:
        decay = (optimizer.lr_decay_iters or training.train_iters) * final_batch_size
        wsd = None if optimizer.lr_wsd_decay_iters is None else optimizer.lr_wsd_decay_iters * final_batch_size
        warmup = optimizer.lr_warmup_iters * final_batch_size
    if optimizer.lr_warmup_fraction is not None:
        warmup = optimizer.lr_warmup_fraction * decay
    return LrSchedule(
        style=optimizer.lr_decay_style,
        max_lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        decay_samples=decay,
        warmup_samples=warmup,
        init_lr=optimizer.lr_warmup_init,
        wsd_style=optimizer.lr_wsd_decay_style,
        wsd_samples=wsd,
        decoupled_max_lr=optimizer.decoupled_lr,
        decoupled_min_lr=optimizer.decoupled_min_lr,
    )


def build_weight_decay_schedule(
    optimizer: OptimizerArgs, training: TrainingArgs, final_batch_size: int
) -> WeightDecaySchedule:
    """Build the weight-decay schedule of the flags, over the entire training.

    Raises:
        ValueError: the ends of an increasing weight decay are missing or in the wrong order.
    """
    style = optimizer.weight_decay_incr_style
    samples = training.train_samples
    if samples is None:
        samples = (training.train_iters or 0) * final_batch_size
    if style == "constant":
        return WeightDecaySchedule(optimizer.weight_decay, optimizer.weight_decay, samples)
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    if start is None or end is None or not 0.0 <= start <= end:
        raise ValueError(
            f"--weight-decay-incr-style {style} needs 0 <= --start-weight-decay <= --end-weight-decay, "
            f"got {start} and {end}"
        )
    return WeightDecaySchedule(start, end, samples, style)

"""Loss scale, which keeps fp16 gradients inside the range of the format."""

import math
from dataclasses import dataclass

from arguments.precision import PrecisionArgs


@dataclass
class LossScale:
    """A constant factor on the loss; `update` does nothing."""

    scale: float = 1.0

    def update(self, found_inf: bool) -> None:
        """Note whether this iteration's gradients overflowed."""

    def state_dict(self) -> dict:
        """Return the checkpoint content."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Restore `state_dict()`."""


@dataclass
class DynamicLossScale(LossScale):
    """A scale that halves after `hysteresis` overflows and doubles after `window` iterations without one.

    The overflows need not be consecutive: only a doubling resets their count, and every overflow beyond it halves the
    scale, down to `minimum`.

    Source: Megatron-LM dynamic gradient scaler.
    """

    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    clean_iterations: int = 0
    overflows_left: int = 0
    overflows_at_minimum: int = 0
    """Consecutive overflows at the minimum scale; not part of a checkpoint."""

    def __post_init__(self):
        self.overflows_left = self.hysteresis

    def update(self, found_inf: bool) -> None:
        """Note whether this iteration's gradients overflowed."""
        self.overflows_at_minimum = self.overflows_at_minimum + 1 if found_inf and self.scale <= self.minimum else 0
        if found_inf:
            self.clean_iterations = 0
            self.overflows_left -= 1
            if self.overflows_left <= 0:
                self.scale = max(self.scale * 0.5, self.minimum)
            return
        self.clean_iterations += 1
        if self.clean_iterations == self.window:
            self.clean_iterations = 0
            self.overflows_left = self.hysteresis
            self.scale *= 2.0

    def state_dict(self) -> dict:
        """Return the checkpoint content, under Megatron's names."""
        return {"scale": self.scale, "growth_tracker": self.clean_iterations, "hysteresis_tracker": self.overflows_left}

    def load_state_dict(self, state: dict) -> None:
        """Restore `state_dict()`."""
        scale = float(state["scale"])
        if not 0 < scale < math.inf:
            raise ValueError(f"the checkpoint contains the loss scale {scale}; needed a finite number above 0")
        self.scale = scale
        self.clean_iterations = int(state["growth_tracker"])
        self.overflows_left = int(state["hysteresis_tracker"])


def build_loss_scale(precision: PrecisionArgs) -> LossScale:
    """Build a constant scale if --loss-scale is given (fp16, bf16), a dynamic one for fp16, else 1."""
    if not (precision.fp16 or precision.bf16):
        return LossScale()
    if precision.loss_scale is not None:
        return LossScale(float(precision.loss_scale))
    if not precision.fp16:
        return LossScale()
    return DynamicLossScale(
        float(precision.initial_loss_scale),
        minimum=float(precision.min_loss_scale),
        window=int(precision.loss_scale_window),
        hysteresis=precision.hysteresis,
    )

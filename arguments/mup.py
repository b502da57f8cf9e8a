"""The width multiplier of maximal update parametrization (arXiv 2203.03466): what rules, sections and readers of checkpoints share."""


def width_mult(use_mup: bool, hidden_size: int, base_hidden_size: int | None) -> float:
    """Return width / base width; 1 without --use-mup or --mup-base-hidden-size."""
    return hidden_size / (base_hidden_size or hidden_size) if use_mup else 1.0

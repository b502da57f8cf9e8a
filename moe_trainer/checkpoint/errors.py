"""The one error of this package."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written or used; the message names the folder, the cause, and what can be done."""

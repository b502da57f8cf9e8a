"""The one error of this package."""

from moe_trainer.errors import InputError


class CheckpointError(InputError):
    """A checkpoint cannot be written or used; the message names the folder, the cause, and what can be done."""

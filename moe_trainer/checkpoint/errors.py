"""The errors of this package: CheckpointError, and the two kinds of it that a caller may want to treat otherwise."""

from moe_trainer.errors import UserError


class CheckpointError(UserError):
    """A checkpoint cannot be written or used; the message names the folder, the cause, and what can be done."""


class StorageError(CheckpointError):
    """The disk would not take a checkpoint. What was saved before is as it was, and a later save may succeed."""


class DamagedError(CheckpointError):
    """A checkpoint is incomplete, or its bytes differ from the saved ones. Another checkpoint may be valid."""

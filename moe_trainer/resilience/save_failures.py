"""Failed saves: a full disk for an hour must not cost days of work, and a run must not continue for days unsaved."""

from moe_trainer.errors import UserError

MAX_CONSECUTIVE_FAILURES = 3


class SaveHistory:
    """Which saves of a run succeeded, and how many have failed since the last success. Equal on every rank.

    Attributes:
        consecutive_failures: number of failed saves since the last success.
        last: the error of the last save, None if it succeeded.
        saved: the iterations of the successful saves.
    """

    def __init__(self) -> None:
        self.consecutive_failures = 0
        self.last: UserError | None = None
        self.saved: list[int] = []
        self._iteration = 0

    def begin(self, iteration: int) -> None:
        """Remember the iteration that a save writes, for `saved`."""
        self._iteration = iteration

    def succeeded(self) -> None:
        """Record a complete checkpoint and reset the failures."""
        self.consecutive_failures, self.last = 0, None
        self.saved.append(self._iteration)

    def failed(self, error: UserError) -> None:
        """Count a failure.

        Raises:
            UserError: the error itself, after MAX_CONSECUTIVE_FAILURES failures.
        """
        self.consecutive_failures, self.last = self.consecutive_failures + 1, error
        if self.consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
            text = f"{error} The last {self.consecutive_failures} saves have failed: ending the run"
            raise type(error)(text) from error

    def raise_if_unsaved(self) -> None:
        """Raise the error of the last save if it failed. Called at the end of the run."""
        if self.last is not None:
            raise type(self.last)(f"{self.last} This was the last save of the run") from self.last

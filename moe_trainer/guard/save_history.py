"""Saves that storage has refused: a full disk for an hour must not cost days of work, and a run must not go on for days unsaved."""

from moe_trainer.errors import InputError

MOST_IN_A_ROW = 3


class SaveHistory:
    """Which saves of a run succeeded, and how many have failed since the last one that did; the same on every rank.

    in_a_row: how many. last: the error of the last one. saved: the iterations of those that succeeded.
    """

    def __init__(self) -> None:
        self.in_a_row = 0
        self.last: InputError | None = None
        self.saved: list[int] = []
        self._iteration = 0

    def begin(self, iteration: int) -> None:
        """Remember the iteration that a save writes, for `saved`."""
        self._iteration = iteration

    def succeeded(self) -> None:
        """A checkpoint is complete: what failed before is made good."""
        self.in_a_row, self.last = 0, None
        self.saved.append(self._iteration)

    def failed(self, error: InputError) -> None:
        """Count a failure.

        Raises: the error when as many have failed in a row as a run may go on with.
        """
        self.in_a_row, self.last = self.in_a_row + 1, error
        if self.in_a_row >= MOST_IN_A_ROW:
            raise type(error)(f"{error} The last {self.in_a_row} saves have failed: the run ends") from error

    def settle(self) -> None:
        """At the end of the run: what is unsaved now is lost.

        Raises: the error of the last save if it failed.
        """
        if self.last is not None:
            raise type(self.last)(f"{self.last} This was the last save of the run") from self.last

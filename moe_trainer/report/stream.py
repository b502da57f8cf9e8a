"""The streams a run talks through, which must not end it: a log's disk may be full, or gone."""

from typing import Any, TextIO


class Forgiving:
    """A text stream that goes on when its disk refuses: what the stream cannot hold back until there is room is lost.

    A reader that has left (a closed pipe) is still an error: nobody listens then.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """As of the stream, without its disk's errors."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            raise
        except OSError:
            return len(text)

    def flush(self) -> None:
        """As of the stream, without its disk's errors."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError:
            pass  # the stream keeps it and tries again

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

"""A check of files that a user names, before they are opened."""

import errno
import os
import stat
from pathlib import Path


def regular_file(path: str | os.PathLike[str]) -> Path:
    """Return the path of a regular file.

    Opening a pipe would wait for a writer, a pipe cannot be read twice, and a device may have no end.
    Raises: OSError for everything else, in the system's words for a folder and for what is not there.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return Path(path)

"""The batch-size schedule string: `--step-batch-size-schedule "0:384 200B:768 400B:1152"`.

Entries `THRESHOLD:BATCH` separated by blanks or commas; a threshold is a number with an optional suffix K, M, B or T
(thousands to trillions). The first threshold is 0, thresholds rise.
"""

import itertools
import re
from decimal import Decimal
from types import MappingProxyType

_SUFFIX = MappingProxyType({"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12})
_ENTRY = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?):(\d+)", re.IGNORECASE)


def read_batch_schedule(text: str) -> tuple[tuple[int, int], ...]:
    """Read a schedule as (threshold, global batch size) pairs.

    Raises: ValueError saying what is wrong.
    """
    entries = []
    for word in text.replace(",", " ").strip("'\"").split():
        match = _ENTRY.fullmatch(word)
        if match is None:
            raise ValueError(f"{word} is not THRESHOLD:BATCH with an optional K, M, B or T (for example 250B:1536)")
        threshold = Decimal(match.group(1)) * _SUFFIX[match.group(2).upper()]
        if threshold != int(threshold):
            raise ValueError(f"{word} has a threshold that is not a whole number")
        entries.append((int(threshold), int(match.group(3))))
    if not entries or entries[0][0] != 0:
        raise ValueError("the first entry must start at 0, for example 0:768")
    if any(later[0] <= earlier[0] for earlier, later in itertools.pairwise(entries)):
        raise ValueError("thresholds must rise from entry to entry")
    if any(batch < 1 for _, batch in entries):
        raise ValueError("batch sizes must be above 0")
    return tuple(entries)

"""--varlen-mock-dataset-config-json: where the lengths of mock samples come from."""

import json
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from arguments.regular_file import regular_file


@dataclass(frozen=True)
class MockLengths:
    """Lengths of mock samples, in the words of the JSON.

    Attributes:
        type: of the distribution.
        path: of a CSV file with lengths, below a line with a title; None for those of the distribution.
        data_path: prefix of a token file; None for tokens that count up.
    """

    type: str = "lognormal"
    min_seq_len: int = 100
    max_seq_len: int = 4096
    mean_seq_len: float = 2048
    lognormal_sigma: float = 1.1
    path: str | None = None
    data_path: str | None = None


_REQUIRED = MappingProxyType(
    {
        "distribution": ("type", "min_seq_len", "max_seq_len", "mean_seq_len", "lognormal_sigma"),
        "file": ("path",),
        "verification": ("data_path",),
    }
)


def read_mock_lengths(text: str | None, seq_length: int) -> MockLengths:
    """Read the flag: JSON, a file with it, or None for a lognormal distribution up to `seq_length`.

    Raises:
        ValueError: with what is wrong.
    """
    if text is None:
        return MockLengths(min_seq_len=seq_length // 2, max_seq_len=seq_length, mean_seq_len=seq_length // 4 * 3)
    found = _load(text)
    if not isinstance(found, dict) or found.get("mode") not in _REQUIRED:
        raise ValueError('needs a JSON object with "mode": "distribution", "file" or "verification"')
    needed = _REQUIRED[found["mode"]]
    missing = [key for key in needed if key not in found]
    if missing:
        raise ValueError(f'has no "{missing[0]}", which mode "{found["mode"]}" needs')
    known = {field.name for field in fields(MockLengths)}
    lengths = MockLengths(**{key: value for key, value in found.items() if key in known})
    for key in ("path", "data_path"):
        if not isinstance(value := getattr(lengths, key), str | None) or (value is None and key in needed):
            raise ValueError(f"{key} must be the path of a file")
    if "path" not in needed:
        lengths = replace(lengths, path=None)
    if lengths.type != "lognormal":
        raise ValueError(f'type "{lengths.type}": needs "lognormal"')
    if not all(type(value) is int for value in (lengths.min_seq_len, lengths.max_seq_len)):
        raise ValueError("min_seq_len and max_seq_len must be integers")
    if not 2 <= lengths.min_seq_len <= lengths.max_seq_len < 2**31:
        raise ValueError("needs 2 <= min_seq_len <= max_seq_len < 2^31: a sample has a token and a label")
    for name, largest in (("mean_seq_len", 2**31), ("lognormal_sigma", 10)):
        value = getattr(lengths, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= largest:
            raise ValueError(f"{name} must be a positive number up to {largest}")
    return lengths


def _load(text: str) -> object:
    try:
        return json.loads(text if text.lstrip().startswith("{") else regular_file(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"is no JSON object and no readable file ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"is not readable as JSON ({error})") from None

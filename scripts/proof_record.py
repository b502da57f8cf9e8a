"""Recorded results of proofs, which the manual's tables of combinations and recipes show."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple


class ProofRecord(NamedTuple):
    """Results by name, in a JSON file, each with a fingerprint of what was proven.

    Attributes:
        path: the file.
        key: under which an entry has the fingerprint.
    """

    path: Path
    key: str

    def find(self, name: str, text: str) -> dict[str, str]:
        """Return the results of a name; none if they were recorded for another text (of flags)."""
        entry = self._read().get(name, {})
        return entry if entry.pop(self.key, None) == _fingerprint(text) else {}

    def keep(self, name: str, text: str, **results: str) -> None:
        """Add results; those for another text are dropped."""
        entry = {self.key: _fingerprint(text)} | self.find(name, text) | results
        self.path.write_text(json.dumps(dict(sorted((self._read() | {name: entry}).items())), indent=0) + "\n")

    def _read(self) -> dict[str, dict[str, str]]:
        return json.loads(self.path.read_text()) if self.path.exists() else {}


def _fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]

"""A copy of the sources by links, in which some files are others: what a new mechanism needs."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from structure.source import ROOT


def link_sources(root: Path, new: Mapping[str, Callable[[str], str]]) -> None:
    """Link the checkout into `root`, with `new` files: path -> function of the old text, "" if there is none."""
    parents = {str(parent) for path in new for parent in (ROOT / path).relative_to(ROOT).parents}
    for folder in sorted(parents):
        (root / folder).mkdir(exist_ok=True)
        for path in (ROOT / folder).iterdir():
            name = str(path.relative_to(ROOT))
            if name not in parents and name not in new and path.name not in (".git", "__pycache__"):
                (root / name).symlink_to(path)
    for name, edit in new.items():
        path = ROOT / name
        old = path.read_text() if path.exists() else ""
        assert edit(old) != old
        (root / name).write_text(edit(old))


def run_linked(root: Path, *words: str, **variables: str) -> subprocess.CompletedProcess:
    """Run Python on linked sources."""
    env = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1", **variables}
    env.pop("WORLD_SIZE", None)
    return subprocess.run([sys.executable, *words], cwd=root, env=env, capture_output=True, text=True, check=False)

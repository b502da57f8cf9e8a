"""Committed files name no machine and no registry."""

import re
import subprocess
from pathlib import Path

import pytest
from structure.source import ROOT

SKIPPED_FOLDERS = frozenset(
    ".git .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis __pycache__ build dist runs shared".split()
)
BINARY = frozenset(".bin .idx .npy .npz .model .safetensors .pt .gz .zst .png .distcp".split())
# Spelled in pieces, so that this file does not find itself.
FORBIDDEN = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?<![\w.$}])/" + r"work/",
        r"(?<![\w.$}])/" + r"farm\w*/",
        r"(?<![\w.$}])/" + r"(?:home|Users)/[a-z]",
        r"(?<![\w.$}])/" + r"root/",
        r"/opt/" + r"(?:pypi|wheels|Megatron)",
        r"pypi\." + r"org|python" + r"hosted\.org|download\.py" + r"torch\.org",
    )
)


def committed_files() -> list[Path]:
    """Return every file of the checkout that is, or would be, committed; without git every one outside of SKIPPED_FOLDERS."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        found = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        found = [path for path in ROOT.rglob("*") if not SKIPPED_FOLDERS & set(path.relative_to(ROOT).parts)]
    return [path for path in sorted(found) if path.is_file() and ".egg-info/" not in path.as_posix()]


def find_violations(text: str) -> list[str]:
    """List the lines of a text that name a place which exists on one machine only, or a package registry."""
    lines = text.splitlines()
    return [
        f"{number}: {line.strip()[:120]}"
        for number, line in enumerate(lines, 1)
        if any(p.search(line) for p in FORBIDDEN)
    ]


def texts() -> list[Path]:
    # Recorded lists hold the command lines of others, with their paths.
    return [
        path
        for path in committed_files()
        if path.suffix not in BINARY and path.relative_to(ROOT).parts[:2] != ("tests", "data")
    ]


def test_no_path_of_a_machine_and_no_registry():
    bad = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in texts()
        for line in find_violations(path.read_text(encoding="utf-8"))
    ]
    assert not bad, "\n".join(bad)


def test_sources_are_ascii():
    checked = (".py", ".sh", ".yaml", ".txt", ".toml", ".ini", ".md")
    bad = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in texts()
        if path.suffix in checked
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if not line.isascii()
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    "text",
    [
        "x = '/" + "work/main'",
        "cd /" + "home/someone",
        "--index-url https://pypi" + ".org/simple",
        "p = '/" + "root/.cache'",
    ],
)
def test_machine_paths_and_registries_are_detected(text):
    assert find_violations(text)


@pytest.mark.parametrize(
    "text", ["a/work/b", "https://host/home/page", "$HOME/x", "/tmp/x", "../work/x", "/data/my_text_document"]
)
def test_allowed_paths_are_not_reported(text):
    assert not find_violations(text)

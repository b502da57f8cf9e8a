"""Names and words: no private vocabulary in sources and texts, and one definition of every public class.

`docs/design` and the code use the terms of Megatron-LM and PyTorch; a word of this list is a metaphor or an old-fashioned phrase for one of
them. Identifiers are split at underscores and capitals, so `is_under_way` and `UnderWay` count as "under way".
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
from structure.source import ROOT, source_files

WORDS = (
    "anew anybody baton beside bulletin dealt house houses judgement kinder journey journeys mend mended mending mends mishap nobody parting "
    "patience room rooms somebody stretch told verdict whoever witness"
).split()
PHRASES = ("for ever", "go on", "goes on", "how many-th", "in vain", "lets go", "passed over", "put off", "under way")

FOLDERS = ("arguments", "docs", "model_zoo", "moe_trainer", "scripts", "tests")
FILES = (
    "README.md",
    "CONTRIBUTING.md",
    "pretrain_moe.py",
    "setup.py",
    "mkdocs.yml",
    "ruff.toml",
    "pytest.ini",
    "mypy.ini",
)
SUFFIXES = {".cpp", ".md", ".py", ".sh", ".txt", ".yaml", ".yml"}
EXEMPT = ("tests/data/", "tests/structure/test_names.py")

ALLOWED = {
    ("scripts/bench_results/faults.md", "goes on"): "messages of the recorded runs, as they were logged",
    ("scripts/bench_results/faults.md", "nobody"): "messages of the recorded runs, as they were logged",
    ("scripts/bench_results/faults.md", "passed over"): "messages of the recorded runs, as they were logged",
}
"""(file, word) that may stay, and why."""

_GAP = r"(?:[\s#]|//)+"  # a phrase may continue on the next line of a comment
_BANNED = re.compile(
    r"\b(?:" + "|".join([*WORDS, *(phrase.replace(" ", _GAP) for phrase in PHRASES)]) + r")\b", re.IGNORECASE
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def banned_words(text: str) -> list[tuple[int, str]]:
    """Return (line number, word) for every banned word of a text, words inside identifiers included."""
    split = _CAMEL.sub(" ", text).replace("_", " ")
    return [
        (split.count("\n", 0, match.start()) + 1, re.sub(_GAP, " ", match[0].lower()))
        for match in _BANNED.finditer(split)
    ]


def text_files() -> list[Path]:
    """Return every source and text file that a person wrote."""
    found = [ROOT / name for name in FILES if (ROOT / name).exists()]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    return sorted(path for path in found if not path.relative_to(ROOT).as_posix().startswith(EXEMPT))


def test_no_private_words():
    problems, used = [], set()
    for path in text_files():
        name = path.relative_to(ROOT).as_posix()
        found = [(0, word) for _, word in banned_words(name)] + banned_words(path.read_text(encoding="utf-8"))
        used |= {(name, word) for _, word in found} & ALLOWED.keys()
        problems += [f"{name}:{line}: {word}" for line, word in found if (name, word) not in ALLOWED]
    assert not problems, "\n".join(problems)
    assert used == ALLOWED.keys(), f"remove from ALLOWED: {sorted(ALLOWED.keys() - used)}"


def test_public_class_names_are_unique():
    places = defaultdict(list)
    for path in source_files("arguments", "moe_trainer"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    repeated = {name: where for name, where in places.items() if len(where) > 1}
    assert not repeated, repeated


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a message that was told", ["told"]),
        ("is_told = 1", ["told"]),
        ("class ToldTwice: ...", ["told"]),
        ("the copies under_way", ["under way"]),
        ("UnderWay", ["under way"]),
        ("# it goes\n# on", ["goes on"]),
        ("ROOMS and HTTPRoom", ["rooms", "room"]),
        ("mushroom, recommend, departing, folded, amended", []),
    ],
)
def test_banned_words_are_detected_in_identifiers(text, words):
    assert [word for _, word in banned_words(text)] == words

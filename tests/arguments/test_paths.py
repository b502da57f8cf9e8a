"""A URL, or a path that the shell has not expanded, is refused by every flag and every program that needs a local path."""

import ast
import re
from pathlib import Path

import pytest

from arguments.container import OPTIONS
from arguments.flag_status import get_flag_status
from arguments.parse import resolve_command_line
from arguments.paths import local_path
from moe_trainer.commands import compare, convert, dashboard, evaluate, generate, inspect, plan, preprocess

ROOT = Path(__file__).resolve().parents[2]
BASE = ["--preset", "mixtral_tiny"]


@pytest.mark.parametrize("text", ["s3://bucket/x", "$HOME/x", "~/x"])
def test_flags_refuse_what_is_no_local_path(text):
    accepted = []
    for dest, option in OPTIONS.items():
        if option.path is None or (option.path == "data" and text.startswith("s3:")):
            continue
        flag = option.spellings[0]
        _, violations = resolve_command_line([*BASE, flag, *[text] * (option.takes if option.takes == 2 else 1)], 1)
        if not any(violation.flags == (flag,) and text in violation.message for violation in violations):
            accepted.append(dest)
    assert accepted == []


def test_flags_that_name_files_say_so():
    names = re.compile(r"(path|dir|file|filename|save|load|checkpoint)$")
    unmarked = {
        dest for dest, option in OPTIONS.items() if option.type_name == "str" and names.search(dest) and not option.path
    }
    assert {dest for dest in unmarked if get_flag_status(dest)[0] == "acts"} == set()


def test_paths_of_a_recipe_may_have_variables_in_a_plan(tmp_path):
    (tmp_path / "recipe.yaml").write_text("MODEL_ARGS:\n  --save: $UNSET_FOLDER/x\n  --save-interval: 5\n")
    _, violations = resolve_command_line(["--preset", str(tmp_path / "recipe.yaml"), "--validate-only"], 1)
    assert [violation for violation in violations if "--save" in violation.flags] == []


def test_no_program_reads_a_path_unchecked():
    """`type=Path` would make a folder called s3: or $HOME."""
    unchecked = []
    for path in (*(ROOT / "scripts").rglob("*.py"), *(ROOT / "moe_trainer").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "type" and getattr(node.value, "id", "") == "Path":
                unchecked.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert [place for place in unchecked if not place.startswith(STANDALONE)] == []


STANDALONE = ("scripts/analyze_nsys.py", "moe_trainer/launch/launch_fixes.py")
"""They read and write single files without importing this repository: opening a file below s3: fails."""


@pytest.mark.parametrize(
    ("program", "argv"), [(compare, ["run", "--report-html", "gs://bucket/r.html"]), (dashboard, ["$HOME/runs"])]
)
def test_programs_refuse_what_is_no_local_path(program, argv, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(argv)
    assert ended.value.code == 2 and argv[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "argv", "named"),
    [
        (dashboard, [""], "argument RUNS: ''"),
        (compare, ["run", ""], "argument RUN: ''"),
        (compare, ["run", "--report-html="], "argument --report-html: ''"),
        (convert, ["", "to"], "argument FROM: ''"),
        (inspect, [""], "argument PREFIX: ''"),
        (inspect, ["ls", ""], "argument PATH: ''"),
        (preprocess, ["--input", "", "--output-prefix", "x", "--tokenizer-type", "NullTokenizer"], "argument --input"),
        (preprocess, ["--input", "a", "--output-prefix", "", "--tokenizer-type", "NullTokenizer"], "--output-prefix"),
        (preprocess, ["--input", "a", "--tokenizer-model", ""], "argument --tokenizer-model: ''"),
        (generate, ["", "a prompt"], "the checkpoint directory or Hugging Face folder"),
        (evaluate, ["model", "--include-path", ""], "argument --include-path: ''"),
        (plan, ["calibrate", "--output", ""], "argument --output: ''"),
    ],
)
def test_programs_refuse_an_empty_path(program, argv, named, capsys, monkeypatch, tmp_path):
    """Path("") is the working directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        program.main(argv)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and named in error and "empty" in error and list(tmp_path.iterdir()) == []


def test_flags_refuse_an_empty_path():
    accepted = []
    for dest, option in OPTIONS.items():
        flag = option.spellings[0]
        if option.path is None or option.default == "":
            continue
        _, violations = resolve_command_line([*BASE, flag, *[""] * (option.takes if option.takes == 2 else 1)], 1)
        if not any(violation.flags == (flag,) and "empty" in violation.message for violation in violations):
            accepted.append(dest)
    assert accepted == []


def test_arguments_of_programs_that_are_paths_say_so():
    """By what help calls their values; only then is an empty one, a URL or $HOME refused."""
    names = {"FILE", "FILE.csv", "DIR", "FOLDER", "PATH", "PREFIX", "RUN", "RUNS", "METRICS", "FROM", "TO", "OUT"}
    unmarked = []
    for path in (*(ROOT / "scripts").rglob("*.py"), *(ROOT / "moe_trainer").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            given = {word.arg: word.value for word in node.keywords} if isinstance(node, ast.Call) else {}
            if getattr(given.get("metavar"), "value", None) not in names or "action" in given:
                continue
            if getattr(given.get("type"), "id", "") not in ("local_path", "local_prefix"):
                unmarked.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert [place for place in unmarked if not place.startswith((*STANDALONE, "scripts/gpu_acceptance.py"))] == []


def test_other_paths_are_taken_as_they_are():
    for text in ("a/b", "/x:y/z", "a$1 c", "run-2024~", "C", "x:y"):
        assert local_path(text) == Path(text)

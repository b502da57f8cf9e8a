"""What the runs of scripts/study_finermoe.py read: token files of Python sources, and a task made of them."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_trainer.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
TASK = "next_line"


@dataclass(frozen=True)
class Size:
    """What a study of this size reads and how long it trains."""

    megabytes: float
    vocab_size: int
    dense_iterations: int
    iterations: int
    evaluations: int
    validation_share: float
    questions: int


def run_program(script: str, words: Sequence[str], log: Path) -> None:
    """Run a script of this repository on one thread, which makes its losses repeatable.

    Raises:
        UserError: if it fails; the message has the end of its output.
    """
    command = [sys.executable, str(ROOT / script), *words]
    with log.open("a", encoding="utf-8") as out:
        out.write(f"$ {shlex.join(command)}\n")
        out.flush()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    if code:
        end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])
        raise UserError(f"{script} ended with exit code {code}; the end of {log}:\n{end}")


def make_data(data: Path, size: Size) -> None:
    """Make the tokenizer, the token files for training and validation, and the task. Source: this Python's library.

    Args:
        data: the folder of these files; what an earlier call has finished is kept.
        size: of the text, its vocabulary and its task.

    Raises:
        UserError: if a program fails.
    """
    if (data / "done").exists():
        return
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir()
    log = data / "log.txt"
    source = [str(data), "--vocab-size", str(size.vocab_size), "--megabytes", str(size.megabytes)]
    run_program("scripts/quickstart_text.py", source, log)
    # Documents are in a shuffled, fixed order, so the last ones are a sample of all kinds.
    documents = [json.loads(line)["text"] for line in (data / "text.jsonl").read_text(encoding="utf-8").splitlines()]
    valid: list[str] = []
    left = round(sum(map(len, documents)) * size.validation_share)
    while left > 0:
        valid.append(documents.pop()[:left])
        left -= len(valid[-1])
    for name, texts in (("train", documents), ("valid", valid)):
        text = "".join(json.dumps({"text": document}) + "\n" for document in texts)
        (data / f"{name}.jsonl").write_text(text, encoding="utf-8")
        words = f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {shlex.quote(str(data))}/tokenizer.model"
        paths = ["--input", f"{data}/{name}.jsonl", "--output-prefix", f"{data}/{name}"]
        run_program("scripts/preprocess_data.py", [*paths, *shlex.split(words), "--append-eod"], log)
    write_task(valid, data / "tasks", size.questions)
    (data / "done").touch()


def write_task(documents: Sequence[str], folder: Path, questions: int) -> None:
    """Write a task of multiple choice: which line follows? The other three are as far indented, from anywhere else.

    Args:
        documents: that no model was trained on.
        folder: where lm-eval finds it.
        questions: how many.
    """
    draw, before, lines = random.Random(1), [], []
    for document in documents:
        rows = [row for row in document.splitlines() if row.strip()]
        for at in range(6, len(rows)):
            context = "\n".join(rows[at - 6 : at])[-220:] + "\n"
            if 20 <= len(rows[at].strip()) <= 60:
                before.append(context)
                lines.append(rows[at])
    by_indent: dict[int, list[str]] = {}
    for line in dict.fromkeys(lines):
        by_indent.setdefault(len(line) - len(line.lstrip()), []).append(line)
    rows_of_task = []
    for at in draw.sample(range(len(lines)), len(lines)):
        alike = [line for line in by_indent[len(lines[at]) - len(lines[at].lstrip())] if line != lines[at]]
        if len(alike) >= 3 and len(rows_of_task) < questions:
            choices = [*draw.sample(alike, 3), lines[at]]
            draw.shuffle(choices)
            rows_of_task.append({"before": before[at], "choices": choices, "answer": choices.index(lines[at])})
    folder.mkdir()
    (folder / f"{TASK}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of_task), encoding="utf-8")
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / f"{TASK}.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{before}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (folder / f"{TASK}.yaml").write_text(json.dumps(task, indent=1), encoding="utf-8")  # YAML includes JSON

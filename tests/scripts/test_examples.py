"""scripts/examples: every script starts one line, which is valid, fits its devices and trains its preset's model."""

import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
import yaml
from commands import environment, read_metrics
from structure.source import ROOT

import model_zoo
from arguments.checkpoint_args import SHAPE
from arguments.container import OPTIONS
from arguments.parse import resolve_command_line
from arguments.schema import by_spelling
from moe_trainer.estimate.dry_run import run_dry_run

EXAMPLES = ROOT / "scripts" / "examples"
FOLDERS = "CHECKPOINTS TOKENIZER DATA"


@dataclass(frozen=True)
class Example:
    """What a script is for: preset and devices, the words after its name, and settings that are not the preset's."""

    preset: str
    ranks: int
    hardware: str
    words: str = FOLDERS
    own: tuple[str, ...] = ()


CASES = {
    "mixtral_8x7b_32gpu": Example("mixtral_8x7b", 32, "h100"),
    "qwen3_30b_a3b_16gpu": Example("qwen3_30b_a3b", 16, "h100"),
    "qwen3_235b_a22b_256h100": Example("qwen3_235b_a22b", 256, "h100"),
    "qwen3_235b_a22b_gb200": Example("qwen3_235b_a22b", 256, "gb200"),
    "deepseek_v3_1024h100": Example("deepseek_v3", 1024, "h100"),
    "deepseek_v3_256gb200": Example("deepseek_v3", 256, "gb200"),
    "long_context": Example("qwen3_235b_a22b", 256, "h100", f"WEIGHTS {FOLDERS}", ("max_position_embeddings",)),
    "upcycling": Example("finermoe_qwen2_5_0_5b", 8, "h100", f"DENSE {FOLDERS}"),
    "fine_tuning": Example("qwen3_30b_a3b", 8, "h100", "MODEL CHECKPOINTS CHATS"),
    "laptop": Example("mixtral_tiny", 2, "h100", "CHECKPOINTS"),
}


def start(name, folder, words, programs=("srun", "torchrun"), **variables):
    """Run a script with stand-ins for the programs that start ranks; they write their words to a file."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for program in programs:
        (bin_folder / program).write_text(f'#!/bin/bash\nprintf "%s\\n" {program} "$@" >>"{folder}/started"\n')
        (bin_folder / program).chmod(0o755)
    env = environment(**{"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", **variables})
    command = [str(EXAMPLES / f"{name}.sh"), *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def started_line(name, folder, extra=()):
    """The number of ranks and the flags of the one line that a script starts."""
    done = start(name, folder, [*CASES[name].words.split(), *extra])
    assert done.returncode == 0, done.stderr
    words = (folder / "started").read_text().splitlines()
    index = words.index("pretrain_moe.py")
    before, text = words[:index], (EXAMPLES / f"{name}.sh").read_text()
    assert "torchrun" not in words[1:] and "srun" not in words[1:]
    sizes = re.findall(r"^#SBATCH --(?:nodes|ntasks-per-node)=(\d+)$", text, re.MULTILINE)
    if words[0] == "torchrun":
        assert not sizes
        sizes = [before[i + 1] for i, word in enumerate(before) if word in ("--nnodes", "--nproc-per-node")]
    return math.prod(map(int, sizes)), words[index + 1 :]


def test_every_script_has_a_case():
    assert {path.stem for path in EXAMPLES.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_example_is_valid_fits_and_trains_the_model_of_its_preset(tmp_path, name):
    case = CASES[name]
    table = yaml.safe_load(model_zoo.find(case.preset).read_text())["MODEL_ARGS"]
    extra = ["--vocab-size", str(table["--vocab-size"])]  # there are no files of a tokenizer
    ranks, flags = started_line(name, tmp_path, extra)
    assert ranks == case.ranks and flags[-len(extra) :] == extra
    assert run_dry_run([*flags, "--dry-run", "--world-size", str(ranks), "--hardware", case.hardware]) == 0
    values, _ = resolve_command_line(flags, ranks)
    wanted, _ = resolve_command_line(["--preset", case.preset], ranks)
    # besides the shape, what the preset says about the model: coefficients, initialization, dtype of the router
    named = {by_spelling(OPTIONS)[flag].dest for flag in table}
    about = {dest for dest in named if OPTIONS[dest].section in ("model", "moe")} - {"moe_token_dispatcher_type"}
    differs = {
        dest: (getattr(values, dest), getattr(wanted, dest))
        for dest in {*SHAPE, *about}
        if getattr(values, dest) != getattr(wanted, dest)
    }
    assert set(differs) == set(case.own), differs


def test_example_without_its_words_says_what_is_missing(tmp_path):
    for name in CASES:
        done = start(name, tmp_path, [])
        assert done.returncode != 0 and "is needed: see the head of this file" in done.stderr
        assert f"{name}.sh" in (EXAMPLES / f"{name}.sh").read_text().partition("set -euo")[0]
        assert not (tmp_path / "started").exists()


def test_long_context_has_the_launch_values_of_its_preset(tmp_path):
    values = yaml.safe_load(model_zoo.find("qwen3_235b_a22b").read_text())["launch_256k"]
    ranks, flags = started_line("long_context", tmp_path)
    assert ranks == 8 * values["NNODES"]
    for variable, flag in {
        "SEQ_LEN": "--seq-length",
        "TP": "--tensor-model-parallel-size",
        "CP": "--context-parallel-size",
        "PP": "--pipeline-model-parallel-size",
        "EP": "--expert-model-parallel-size",
        "GBS": "--global-batch-size",
    }.items():
        assert flags[flags.index(flag) + 1] == str(values[variable]), flag


def test_laptop_example_trains(tmp_path):
    """With torchrun itself, from the checkout to a folder elsewhere."""
    (tmp_path / "bin").mkdir()
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.write_text(f'#!/bin/bash\ncd "{ROOT}"\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    folder = tmp_path / "run"
    done = start("laptop", tmp_path, [str(folder), *"--train-iters 3 --log-interval 1 --eval-iters 1".split()], ())
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [record["lm loss"] for record in read_metrics(*folder.rglob("metrics.jsonl")) if "lm loss" in record]
    assert len(losses) >= 3 and losses[2] < losses[0] < math.log(4096) + 0.5
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "3"

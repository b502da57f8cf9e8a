"""scripts/examples: every script starts one line, which is valid, fits its devices and trains its preset's model."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import yaml
from commands import environment, read_metrics
from structure.source import ROOT

import model_zoo
from arguments.checkpoint_args import SHAPE
from arguments.container import OPTIONS
from arguments.parse import resolve_command_line
from arguments.schema import by_spelling
from arguments.tokens import drop_flags, parse_tokens
from moe_trainer.estimate.dry_run import run_dry_run
from moe_trainer.estimate.published_runs import PUBLISHED_RUNS

EXAMPLES = ROOT / "scripts" / "examples"
FOLDERS = "CHECKPOINTS TOKENIZER DATA"


@dataclass(frozen=True)
class Example:
    """What a script is for.

    Attributes:
        source: a launch section of the preset's file, or a published run; the mapping, ranks and batch are its own.
        words: after the name of the script.
        own: settings that are not the preset's.
        sizes: (source's, script's) sizes that are not the source's.
    """

    preset: str
    ranks: int
    hardware: str
    source: str = "launch"
    words: str = FOLDERS
    own: tuple[str, ...] = ()
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)


CASES = {
    "mixtral_8x7b_32gpu": Example("mixtral_8x7b", 32, "h100", sizes={"ranks": (64, 32)}),
    "qwen3_30b_a3b_16gpu": Example(
        "qwen3_30b_a3b",
        *(16, "h100", "Qwen3-30B 16xH100 BF16, exchange overlapped"),
        sizes={"global_batch_size": (1024, 512)},
    ),
    "qwen3_235b_a22b_256h100": Example("qwen3_235b_a22b", 256, "h100", "Qwen3-235B 256xH100 BF16"),
    "qwen3_235b_a22b_gb200": Example("qwen3_235b_a22b", 256, "gb200", "Qwen3-235B 256xGB200 BF16"),
    "deepseek_v3_1024h100": Example("deepseek_v3", 1024, "h100", "DeepSeek-V3 1024xH100 FP8"),
    "deepseek_v3_256gb200": Example("deepseek_v3", 256, "gb200", "DeepSeek-V3 256xGB200 MXFP8"),
    "long_context": Example(
        "qwen3_235b_a22b", 256, "h100", "launch_256k", f"WEIGHTS {FOLDERS}", ("max_position_embeddings",)
    ),
    "upcycling": Example("finermoe_qwen2_5_0_5b", 8, "h100", words=f"DENSE {FOLDERS}"),
    "fine_tuning": Example(
        "qwen3_30b_a3b",
        *(8, "h100"),
        words="MODEL CHECKPOINTS CHATS",
        sizes={"ranks": (32, 8), "global_batch_size": (256, 64)},
    ),
    "laptop": Example("mixtral_tiny", 2, "h100", words="CHECKPOINTS"),
}
DEGREES = {"TP": "tensor-model", "PP": "pipeline-model", "CP": "context", "EP": "expert-model"}
BATCH = {"MBS": "micro-batch-size", "GBS": "global-batch-size", "SEQ_LEN": "seq-length"}


def sizes_of_source(case):
    """Ranks of the source, and every setting that its line has."""
    run = next((run for run in PUBLISHED_RUNS if run.name == case.source), None)
    if run is not None:
        words = drop_flags(run.argv(), {"preset", "mock_data"})
        return {"ranks": run.gpus} | {item.dest: item.value for item in parse_tokens(words).given}
    values = yaml.safe_load(model_zoo.find(case.preset).read_text())[case.source]
    words = [word for name, axis in DEGREES.items() for word in (f"--{axis}-parallel-size", str(values.get(name, 1)))]
    words += [word for name, flag in BATCH.items() if name in values for word in (f"--{flag}", str(values[name]))]
    if values.get("VPP", 1) > 1:
        words += ["--num-virtual-stages-per-pipeline-rank", str(values["VPP"])]
    ranks = values.get("NNODES", 1) * values.get("GPUS_PER_NODE", 8)
    return {"ranks": ranks} | {item.dest: item.value for item in parse_tokens(words).given}


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
    apart = {}
    for dest, wanted in sizes_of_source(case).items():
        found = ranks if dest == "ranks" else getattr(values, dest)
        if found != wanted and not (isinstance(wanted, list) and set(found) == set(wanted)):
            apart[dest] = (wanted, found)
    assert apart == case.sizes


def test_example_without_its_words_says_what_is_missing(tmp_path):
    for name in CASES:
        done = start(name, tmp_path, [])
        assert done.returncode != 0 and "is needed: see the head of this file" in done.stderr
        assert f"{name}.sh" in (EXAMPLES / f"{name}.sh").read_text().partition("set -euo")[0]
        assert not (tmp_path / "started").exists()


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

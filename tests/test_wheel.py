"""The wheel: `moe-trainer` and its commands without a checkout, with every file that they open."""

import email
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from commands import environment
from structure.source import PACKAGES, ROOT

from arguments.program import SCRIPTS
from moe_trainer.__main__ import COMMANDS
from moe_trainer.version import __version__

pytestmark = pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="setuptools builds the wheel")

BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv.pop(1))(sys.argv.pop(1))"
# Runs command lines (JSON, on stdin) one after the other in forks of one interpreter, as the installed script does.
DRIVER = """
import json, os, sys
from moe_trainer.__main__ import main

def call(words):
    sys.argv = ["bin/moe-trainer", *words]
    try:
        return main()
    except SystemExit as ended:
        return ended.code

for number, words in enumerate(json.load(sys.stdin)):
    if words == ["import torch"]:
        import torch
        continue
    if not os.fork():
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), stream)
        code = call(words)
        if "--help" in words and "torch" in sys.modules:
            print("torch was imported")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    status = os.wait()[1]
    with open(f"{number}.code", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(status)))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Copies of the sources; a build writes next to them."""
    folder = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "MANIFEST.in", "README.md", "pretrain_moe.py"):
        shutil.copy(ROOT / name, folder)
    (folder / "tests").mkdir()
    (folder / "tests" / "test_api.py").touch()
    return folder


def build(source, hook, folder, **env):
    """Build a wheel, or its metadata only, as pip does."""
    words = [sys.executable, "-c", BUILD, hook, str(folder)]
    done = subprocess.run(words, cwd=source, env=environment(**env), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build(source, "build_wheel", folder, MOE_TRAINER_REPOSITORY="https://host/owner/name")
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """The folder into which pip has installed the wheel."""
    folder = tmp_path_factory.mktemp("site")
    words = f"-m pip --disable-pip-version-check install --quiet --no-deps --no-index --no-compile --target {folder}"
    subprocess.run([sys.executable, *words.split(), str(wheel)], check=True)
    return folder


def installed_environment(site, **env):
    """Return an environment in which `python -S` sees the wheel and other packages, not this checkout."""
    return environment(PYTHONPATH=os.pathsep.join([str(site), sysconfig.get_path("purelib")]), **env)


def run_all(site, folder, lines, **env):
    """Run command lines of `moe-trainer` in a folder. Returns exit code, output and errors of each."""
    words = [line.split() if isinstance(line, str) else line for line in lines]
    done = subprocess.run(
        [sys.executable, "-S", "-c", DRIVER],
        cwd=folder,
        env=installed_environment(site, **env),
        input=json.dumps(words),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    numbers = [number for number, line in enumerate(lines) if line != ["import torch"]]
    return [
        (int(Path(folder, f"{n}.code").read_text()), *(Path(folder, f"{n}.{s}").read_text() for s in ("out", "err")))
        for n in numbers
    ]


def test_wheel_has_every_file_of_the_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "moe-trainer = moe_trainer.__main__:main" in archive.read(entry).decode()
    files = {path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if "__pycache__" not in path.parts and path.name != "README.md"
    }
    assert names == wanted | {"pretrain_moe.py"}


def test_source_package_holds_what_the_wheel_is_built_of(source, wheel, tmp_path):
    build(source, "build_sdist", tmp_path)
    (path,) = tmp_path.iterdir()
    with tarfile.open(path) as package:
        held = {member.name.partition("/")[2] for member in package if member.isfile()}
    with zipfile.ZipFile(wheel) as archive:
        built = {name for name in archive.namelist() if ".dist-info/" not in name}
    own = {"setup.py", "MANIFEST.in", "README.md", "PKG-INFO", "setup.cfg"}
    assert {name for name in held if ".egg-info/" not in name} == built | own


def test_description_is_the_readme_with_links_that_lead_somewhere(source, wheel, tmp_path):
    build(source, "prepare_metadata_for_build_wheel", tmp_path)
    (without_address,) = tmp_path.rglob("METADATA")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        metadata, plain = map(email.message_from_bytes, (archive.read(name), without_address.read_bytes()))
    assert metadata["Description-Content-Type"] == "text/markdown"
    links = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    prefixes = tuple(f"https://host/owner/name/{kind}/v{__version__}/" for kind in ("blob", "raw"))
    files = [link.removeprefix(prefix) for prefix in prefixes for link in links if link.startswith(prefix)]
    assert "docs/training.md" in files and "docs/img/dashboard.png" in files and len(files) == len(links)
    assert all((ROOT / file.partition("#")[0]).is_file() for file in files)
    text = plain.get_payload()
    assert "](" not in text and "Getting started" in text and "[3/5] tokens" in text


def test_every_command_explains_itself_without_torch(site, tmp_path):
    results = run_all(site, tmp_path, [[name, "--help"] for name in COMMANDS])
    for name, (code, out, err) in zip(COMMANDS, results, strict=True):
        assert (code, err) == (0, ""), (name, err)
        assert f"moe-trainer {name}" in out and "torch was imported" not in out, (name, out)
        named = [script for script in SCRIPTS.values() if script in out]  # files that only a checkout has
        assert named == (["pretrain_moe.py"] if name == "launch" else []), (name, out)


def test_wrong_names_of_commands_are_corrected(site, tmp_path):
    lines = ["", "--help", "--version", "plam", "prove_layout.py", "--preset mixtral_tiny", "xyzzy"]
    none, table, version, *wrong = run_all(site, tmp_path, lines)
    assert none == (2, "", table[1]) and table[0] == 0 and all(f"\n  {name} " in table[1] for name in COMMANDS)
    assert version == (0, f"moe-trainer {__version__}\n", "")
    for (code, out, err), meant in zip(wrong, ("plan", "prove", "train", None), strict=True):
        first, _, rest = err.partition("\n")
        assert (code, out, rest) == (2, "", table[1])
        assert first.endswith(f"; did you mean moe-trainer {meant}?") == (meant is not None), first


TRAIN = (
    "train --preset mixtral_tiny --mock-data --train-iters 2 --global-batch-size 2 --micro-batch-size 1 --seq-length 32 "
    "--log-interval 1 --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 255 --save run"
)


def test_commands_work_without_a_checkout(site, tmp_path):
    (tmp_path / "text.txt").write_text("1 2 3\n\n4 5\n")
    lines = [
        "plan --preset mixtral_8x7b --mock-data --world-size 8 --hardware h200 --expert-model-parallel-size 8",
        "prove --preset mixtral_tiny --mock-data --world-size 2 --expert-model-parallel-size 2 --shrink-only",
        "preprocess --input text.txt --output-prefix tokens --tokenizer-type NullTokenizer --vocab-size 9 --append-eod",
        "inspect tokens_text_document --strict",
        "train --preset mixtral_tiny --lr x",
        "plan --preset nowhere",
        "dashboard nowhere",
        "launch --train-iters 2",
        ["import torch"],
        "doctor",
        TRAIN,
        "inspect ls run",
        "compare run run/metrics.jsonl",
        "convert run hf",
    ]
    env = {"MODEL": "mixtral_tiny", "PP": "2", "A2A_OVERLAP": "1", "DRY_RUN": "1", "VALIDATE": "0", "PYTHON": ""}
    results = run_all(site, tmp_path, lines, **env)
    plan, prove, preprocess, data, *wrong, launch, doctor, train, checkpoint, compare, convert = results
    for code, out, err in (plan, prove, preprocess, data, launch, doctor, train, checkpoint, compare, convert):
        assert code == 0, out + err
    assert "tokens/s/GPU" in plan[1] and "`moe-trainer plan calibrate --from`" in plan[1]
    assert "small command line 1 of 1" in prove[1] and "2 documents, 7 tokens" in data[1]
    for (code, _, err), start in zip(wrong, ("train: 1 problem", "plan: ", "dashboard: error: "), strict=True):
        assert code == 2 and f"moe-trainer {start}" in err, err
    started = next(line for line in launch[1].splitlines() if line.startswith("command: ")).split()
    used = [Path(word) for word in started if word.startswith(str(site))]
    assert [path.name for path in used] == ["torchrun.py", "rank.sh", "pretrain_moe.py"]
    assert all(path.is_file() for path in used) and started[1] == sys.executable
    assert "--pipeline-model-parallel-layout" in started
    assert "iteration        2/       2" in train[1] and (tmp_path / "run/dashboard.html").is_file()
    assert "embedding.word_embeddings.weight" in checkpoint[1] and "Comparison" in compare[1]
    assert (tmp_path / "hf/config.json").is_file()


def test_installed_script_starts(site, tmp_path):
    script = site / "bin" / "moe-trainer"
    words = [sys.executable, "-S", str(script), "--version"]
    env = installed_environment(site)
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"moe-trainer {__version__}\n", "")

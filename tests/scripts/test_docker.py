"""The Dockerfiles, as far as a machine without docker can check them: shell lines, copied files, versions, environment."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from structure.test_no_machine_paths import committed_files

ROOT = Path(__file__).resolve().parents[2]
RECORD = json.loads((ROOT / "tests" / "data" / "docker_sources.json").read_text())
FILES = (ROOT / "docker" / "Dockerfile", ROOT / "docker" / "Dockerfile.gb200")


def instructions(text: str) -> list[tuple[str, str]]:
    """Split a Dockerfile into (instruction, arguments)."""
    lines = "".join(f"{line}\n" for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = lines.replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined if line.strip())]


def of(file: Path, name: str) -> list[str]:
    return [rest for word, rest in instructions(file.read_text()) if word == name]


def find_unrecorded(file: Path) -> list[str]:
    """List what a Dockerfile installs from elsewhere that tests/data/docker_sources.json does not have."""
    found = [image for image in of(file, "FROM") if image not in RECORD["images"]]
    arguments = dict(argument.split("=", 1) for argument in of(file, "ARG"))
    for line in of(file, "RUN"):
        for install in re.findall(r"pip install ([^&]*)", line):
            for word in shlex.split(install):
                if word.startswith("git+"):
                    repository, _, commit = word.removeprefix("git+").rpartition("@")
                    commit = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], commit)
                    if commit not in RECORD["commits"].get(repository, ()):
                        found.append(word)
                elif not word.startswith("-") and word != "." and word not in RECORD["packages"]:
                    found.append(word)
        found += [word for word in ("wget", "curl", "git clone") if word in line]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_shell_lines_and_copied_files(file):
    shell = of(file, "RUN")
    for line in shell:
        done = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), line
    assert shell[-1] == "pip install --no-cache-dir -e ." and of(file, "ADD") == []
    committed = {path.relative_to(ROOT) for path in committed_files()}
    committed |= {parent for path in committed for parent in path.parents}
    copied = {Path(source) for line in of(file, "COPY") for source in line.split()[:-1]}
    assert copied <= committed, copied - committed
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert "*" in ignored and copied == {Path(word[1:]) for word in ignored if word.startswith("!")}
    setup = (ROOT / "setup.py").read_text()
    packages = re.findall(r'"(\w+)\.?\*?"', re.search(r"find_packages\((.*)\)", setup)[1])
    assert {*map(Path, packages), Path("setup.py"), Path("pretrain_moe.py"), Path("scripts")} <= copied


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_versions_are_recorded(file):
    assert find_unrecorded(file) == []
    torch = RECORD["images"][of(file, "FROM")[0]]["torch"]
    least = re.search(r'"torch>=(\d+)\.(\d+)"', (ROOT / "setup.py").read_text())
    assert tuple(map(int, torch.split(".")[:2])) >= tuple(map(int, least.groups()))


def test_what_is_not_recorded_is_found(tmp_path):
    (tmp_path / "Dockerfile").write_text(
        "FROM other:1\nARG C=0\nRUN pip install -U deep-ep && \\\n    pip install git+https://github.com/deepseek-ai/DeepEP.git@${C}\n"
    )
    assert find_unrecorded(tmp_path / "Dockerfile") == [
        "other:1",
        "deep-ep",
        "git+https://github.com/deepseek-ai/DeepEP.git@${C}",
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_images_leave_the_environment_to_the_launchers(file):
    """A variable of the image counts as the caller's: A2A_OVERLAP=1 and recipes could not change it."""
    lines = (ROOT / "moe_trainer" / "launch" / "launch_environment.txt").read_text().splitlines()
    of_launchers = {line.partition("=")[0] for line in lines if line and not line.startswith("#")}
    of_image = {line.partition("=")[0] for line in of(file, "ENV")}
    assert of_launchers and of_image and not of_image & of_launchers

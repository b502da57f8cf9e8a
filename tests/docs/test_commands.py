"""Every command of README and the manual.

A fenced `bash` block without a title runs verbatim under bash, in a copy of the checkout's surface. `python` and `torchrun` are stand-ins that
fork a process in which torch is already imported (command_server.py), and make trainings small. The commands of a block with the title TRAINS are
validated by the trainer. A block with another title needs more than a laptop, or minutes; then its programs and flags must exist.
"""

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from docs.command_server import VALIDATE, CommandServer

from arguments import flag_status
from arguments.container import OPTIONS
from arguments.schema import by_spelling

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = "refused_flags.md"
TRAINS = "Trains for minutes"
FENCE = re.compile(r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, title and text."""

    page: Path
    title: str | None
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """The bash blocks of a page."""
    for language, title, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "bash":
            yield Block(page, title or None, text)


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


EXECUTED = [page for page in PAGES if any(block.title is None for block in blocks(page))]


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    """A folder that looks like a checkout after the quickstart: links to the sources, and runs/quickstart."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in (".git", "scripts", "runs", "site", ".venv"):
            (folder / path.name).symlink_to(path)
    (folder / "scripts").mkdir()
    for path in (ROOT / "scripts").iterdir():
        (folder / "scripts" / path.name).symlink_to(path)
    # The environment is the one of this test: nothing is installed.
    (folder / "scripts" / "environment.sh").unlink()
    (folder / "scripts" / "environment.sh").write_text(
        'make_environment() { PYTHON_BIN=python; }\nfail() { echo "error: $*" >&2; exit 1; }\n'
    )
    text = "\n\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    (folder / "text.txt").write_text(text * (1 + 600_000 // len(text)))
    with CommandServer(folder) as server:
        yield server


@pytest.fixture(scope="module")
def quickstart(sandbox):
    """The README's first command, on a small text and with few iterations."""
    return run(
        sandbox, "bash scripts/quickstart.sh --train-iters 2 --log-interval 1 --eval-interval 1", TEXT="text.txt"
    )


def run(server: CommandServer, script: str, **env: str) -> subprocess.CompletedProcess:
    """Run a script under bash in the sandbox; a test fails where it fails."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=server.folder,
        env=server.environment | env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{script}\nexit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def test_quickstart_command_of_the_readme_runs(quickstart):
    lines = quickstart.stdout
    for shown in (
        "[3/5] tokens",
        "a model that knows only how frequent each token is would reach",
        "[4/5] training mixtral_tiny on 2 CPU ranks",
        "  iteration 2 of 2 | ",
        "validation loss at iteration 2 on validation set | lm loss value: ",
        "[5/5] result",
        "nats per token; the unigram model's is",
    ):
        assert shown in lines, lines


@pytest.mark.parametrize("page", EXECUTED, ids=page_name)
def test_commands_of_the_manual_run(page, sandbox, quickstart):
    for block in blocks(page):
        if block.title is None:
            run(sandbox, block.text)
        elif block.title == TRAINS:
            run(sandbox, block.text, **{VALIDATE: "1"})


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a bash block, without comments, here-documents and assignments."""
    text = re.sub(r"<<'(\w+)'\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|\|\|", line):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words.pop(0)
            if words:
                yield words


def option_names(source: str) -> set[str]:
    """Options that a script's source spells."""
    return set(re.findall(r"--[a-zA-Z][\w-]*", source))


def known_flags() -> set[str]:
    """Every flag that the trainer reads, refuses or renames, and every option of a script."""
    trainer = {*by_spelling(OPTIONS), *flag_status.OLD_SPELLINGS, "--preset", "--help"}
    sources = [
        *(ROOT / "scripts").rglob("*"),
        *(ROOT / "moe_trainer/commands").iterdir(),
        *(ROOT / "moe_trainer/launch").iterdir(),
        ROOT / "arguments/parse.py",
        ROOT / "arguments/recipe.py",
        ROOT / "tests/removal/remove.py",
        *(ROOT / "moe_trainer").rglob("inspect.py"),
    ]
    return trainer.union(
        *(option_names(path.read_text(encoding="utf-8")) for path in sources if path.suffix in (".py", ".sh"))
    )


FOREIGN = {  # programs of others
    *("mkdir", "tar"),
    "docker", "pip", "mkdocs", "sbatch", "scontrol", "srun", "torchrun", "git", "cat", ".", "export", "curl", "#!/bin/bash",
    "for", "done", "echo", "nohup", "tail", "touch", "vllm",
}  # fmt: skip
OPTIONS_OF_OTHERS = {
    *"--model --no-binary --no-deps --outfile --outtype --strip-components --wildcards".split(),  # consumers.md
    "--nproc-per-node", "--nnodes", "--strict", "--signal", "--nodes", "--ntasks-per-node", "--gpus-per-node", "--moe-layer-freq", "--num-exp",
    "--no-build-isolation", "--env-file", "--ipc", "--network",
    "--extra", "--wait", "--flag", "--all", "--changed", "--tier-limit", "--record", "--lf", "--junit-xml", "--tier", "--write",
}  # fmt: skip


def test_titled_commands_name_programs_that_exist():
    unknown = []
    for page in PAGES:
        for block in blocks(page):
            for words in commands(block.text):
                programs = [
                    word for word in words if re.fullmatch(r"(scripts|tests)/\S+\.(py|sh)|pretrain_moe\.py", word)
                ]
                missing = [program for program in programs if not (ROOT / program).exists()]
                if missing or not (programs or words[0] in FOREIGN | {"python", "bash"}):
                    unknown.append(f"{page_name(page)}: {shlex.join(words)}")
    assert not unknown, unknown


def test_every_flag_named_in_the_manual_exists():
    known, unknown = known_flags() | OPTIONS_OF_OTHERS, []
    for page in PAGES:
        if page.name != GENERATED:
            text = page.read_text(encoding="utf-8")
            named = {flag.rstrip("-") for flag in re.findall(r"(?<![\w/.-])--[a-zA-Z][\w-]*", text)}
            unknown += [
                f"{page_name(page)}: {flag}"
                for flag in sorted(named - known)
                if not flag_status.find_out_of_scope(flag)
            ]
    assert not unknown, unknown


def test_every_file_named_in_the_manual_exists():
    missing = []
    for page in PAGES:
        for path in re.findall(
            r"`((?:arguments|model_zoo|moe_trainer|scripts|tests|docs)/[\w/.*-]*)`", page.read_text(encoding="utf-8")
        ):
            if not (any(ROOT.glob(path)) if "*" in path else (ROOT / path).exists()):
                missing.append(f"{page_name(page)}: {path}")
    assert not missing, missing


def test_links_between_pages_lead_somewhere():
    """Files and anchors, as they are in the repository; `mkdocs build --strict` checks the pages that it generates."""
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
            path, _, anchor = target.partition("#")
            if "://" in target or path.startswith("flags/"):
                continue
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page_name(page)}: {target}")
    assert not broken, broken


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a Markdown page, as MkDocs and code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}

"""A Python without the required packages ends with one error line and exit code 2; what extras and hints install."""

import ast
import re
import subprocess
import sys

import pytest
from commands import environment
from structure.source import ROOT, product_files
from training.tiny import MOCK, TINY

from moe_trainer.errors import UserError, require_packages


def test_missing_packages_are_named():
    require_packages("json", "torch")
    with pytest.raises(UserError, match=r"has no not_a_package, nor_this: .*scripts/doctor\.py"):
        require_packages("json", "not_a_package", "nor_this")


@pytest.mark.parametrize(
    "words, name",
    [
        (["pretrain_moe.py", *TINY, *MOCK, "--train-iters", "1"], "torch"),
        (["scripts/preprocess_data.py", "--help"], "numpy"),
        (["scripts/convert.py", "a", "b"], "torch"),
        (["scripts/compare.py", "a"], "numpy"),
        (["scripts/replay.py", "a"], "torch"),
        (["scripts/generate.py", "a", "b"], "torch"),
        (["scripts/evaluate.py", "a", "--tasks", "b"], "torch"),
        (["scripts/torchrun.py", "--nproc-per-node", "2", "pretrain_moe.py"], "torch"),
        (["scripts/prove_layout.py", *TINY, *MOCK, "--train-iters", "1", "--world-size", "2"], "torch"),
        (["pretrain_moe.py", "--preset", "mixtral_tiny", *MOCK], "PyYAML"),
    ],
)
def test_python_without_packages_ends_with_exit_code_2(tmp_path, words, name):
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / words[0]), *words[1:]],
        cwd=tmp_path,
        env=environment(PYTHONPATH=""),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and name in done.stderr and "Traceback" not in done.stderr, done.stderr


def read_extras() -> dict[str, list[str]]:
    """The extras of setup.py, which runs a build when it is imported."""
    nodes = ast.walk(ast.parse((ROOT / "setup.py").read_text()))
    return next(ast.literal_eval(node.value) for node in nodes if getattr(node, "arg", None) == "extras_require")


def find_strangers(text: str) -> list[str]:
    """Find commands that would install what only the index calls DeepEP or apex: other people's packages."""
    return re.findall(r"pip install [^;&`'\"\n)]*?(?<![\w/=-])(?:deep[-_]ep|apex)(?![\w/])", text, re.IGNORECASE)


def test_no_extra_or_hint_installs_another_package_of_the_same_name():
    assert [*map(find_strangers, ("pip install -U deep-ep", "pip install apex", "pip install x deep_ep[all]"))] == [
        ["pip install -U deep-ep"],
        ["pip install apex"],
        ["pip install x deep_ep"],
    ]
    assert find_strangers("pip install --no-build-isolation git+https://github.com/NVIDIA/apex") == []
    requirements = " ".join(word for words in read_extras().values() for word in words)
    assert find_strangers(f"pip install {requirements}") == []
    texts = [*product_files(), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "docker").iterdir()]
    assert [found for path in texts for found in find_strangers(path.read_text())] == []


def test_the_manual_lists_the_extras():
    table = (ROOT / "docs" / "getting_started.md").read_text().partition("| extra | adds |")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(read_extras())

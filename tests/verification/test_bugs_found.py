"""The proof names every bug of upstream_bugs.py, and docs/bugs_found.md tells it as it is."""

import re
from pathlib import Path

import pytest
import torch
from verification.megatron_reference import run_megatron_core
from verification.upstream_bugs import BUGS, UpstreamBug

from moe_trainer.verification import parity
from moe_trainer.verification.rank_pool import RankPool

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "bugs_found.md").read_text(encoding="utf-8")
CELL = r" \| (.+?)"
ROWS = {row[0]: row[1:] for row in re.findall(rf"^\| \d+ \| (.+?) \| `(.+?)`{CELL * 4} \|$", PAGE, re.MULTILINE)}
"""By bug: quantity, values of one process and the broken ranks, differences of Megatron-Core, right and broken ranks."""
ITEMS = re.findall(r"^\d+\. \*\*(.+?)\*\*, \[(.+?)\]\((.+?)\).*\n    `(.+?)`$", PAGE, re.MULTILINE)
ROUNDING = 1e-5
NUMBER = re.compile(r"(?<![\w.])\d[\d.]*(?:e[+-]\d+)?")


@pytest.fixture(scope="module")
def clean_pool():
    """Processes that no planted bug reaches. Those that a proof forks later also take two steps (conftest.py)."""
    with pytest.MonkeyPatch.context() as patch, RankPool(3) as pool:
        patch.setattr(parity, "STEPS", 2)
        pool.run(max, 1)  # fork them now
        yield pool


@pytest.fixture(autouse=True)
def one_perturbation(monkeypatch):
    monkeypatch.setattr(parity, "EXTRA_PERTURBATIONS", parity.PERTURBATIONS[:1])
    monkeypatch.setattr(parity, "PERTURBATIONS", parity.PERTURBATIONS[:1])


def relative_difference(expected, value) -> float:
    expected, value = (torch.as_tensor(each).double() for each in (expected, value))
    return ((value - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_proof_names_the_bug(clean_pool, bug: UpstreamBug):
    case = bug.case()
    right = parity.check_parity(clean_pool, case)
    assert right.is_equal, (right.failure, *map(str, right.differences[:4]))
    with pytest.MonkeyPatch.context() as patch, RankPool(3) as pool:
        bug.plant(patch)
        broken = parity.check_parity(pool, case)
    found = [row for row in broken.differences if row.label == bug.noticed]
    assert found, (broken.failure, *map(str, broken.differences[:4]))
    quantity, values, in_megatron_core, of_right, of_broken = ROWS[bug.name]
    assert quantity == bug.noticed and bug.in_megatron_core == (in_megatron_core != "-")
    shown = [float(value) for value in (*values.split(", "), of_broken)]
    measured = [float(value) for value in NUMBER.findall(found[0].detail)[:2]]
    assert shown == pytest.approx([*measured, found[0].difference], rel=0.02)
    assert float(of_right) < ROUNDING


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.in_megatron_core], ids=lambda bug: bug.name)
def test_megatron_core_computes_what_the_one_process_does(clean_pool, bug: UpstreamBug):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    case = bug.case()
    ((reference, _),) = clean_pool.run_each(parity.train_reference, [(case, 0, 0.0, 0)])
    found = clean_pool.run(run_megatron_core, 1, case, 0)
    for name, grad in reference.grads.items():
        assert relative_difference(grad, found[f"gradient (step 1) of {name}"]) < ROUNDING, name
    assert relative_difference(reference.losses[0]["lm loss"], found["lm loss (step 1)"]) < ROUNDING
    assert relative_difference(reference.grad_norms[0], found["gradient norm (step 1)"]) < ROUNDING
    assert float(ROWS[bug.name][2]) < ROUNDING


def test_page_has_the_bugs_of_the_table():
    assert [(name, report, flags) for name, report, _, flags in ITEMS] == [
        (bug.name, bug.report, bug.flags) for bug in BUGS
    ]
    assert list(ROWS) == [bug.name for bug in BUGS]
    for _, report, link, _ in ITEMS:
        owner, _, number = report.partition("#")
        assert re.fullmatch(rf"https://github\.com/{owner}/(issues|pull)/{number}", link)
    assert sum(word != "|" for word in PAGE.split()) < 900

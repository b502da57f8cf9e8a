"""docs/families.md: what the tests of Hugging Face families measured, family by family.

python tests/checkpoint/hf/family_table.py --write [PYTEST ARGUMENT...]     run the tests (minutes) and renew the page
python tests/checkpoint/hf/family_table.py --write --junit FILE...          renew it from pytest's --junitxml of these tests
"""

# ruff: noqa: E402 - the path comes before the imports

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from checkpoint.hf.models import MODELS

PAGE = ROOT / "docs" / "families.md"
FILES = (
    "tests/checkpoint/hf/test_load.py",
    "tests/checkpoint/hf/test_convert.py",
    "tests/checkpoint/hf/test_training_agrees.py",
    "tests/inference/test_generate_families.py",
)
COLUMNS = ("parameters", "logits", "gradients", "bf16", "loss", "tokens")
"""What the tests record, in the order of the table."""
INTRODUCTION = """# Families, one by one

Each row is a small model of `transformers` {version} with odd sizes and random weights, compared on the CPU by tests
(`python tests/checkpoint/hf/family_table.py --write`). Nothing has run on a GPU. [Limits of single families](models.md#families-from-hugging-face).

- *parameters*: of the small model, in both programs; `from_pretrained` reads ours bit for bit.
- *logits*, *gradients*: largest difference from `transformers` in fp32, over the largest value (gradients: at least 0.01). Gradients of Qwen3-Next: `tests/model/test_qwen3_next.py`.
- *bf16*: median difference of bf16 logits from fp32 logits, over that of `transformers`.
- *loss*: largest relative difference of two AdamW steps (`qwen3`, `olmoe`: five), under TP 2 with sequence parallelism and EP 2.
- *tokens*: generated greedily and drawn; all equal those of `transformers`.

DeepSeekMoE-16B (`deepseek`), which `transformers` has no class for, is compared with Llama's blocks and DeepSeek-V2's experts.
"""


def read_junit(*paths: Path) -> dict[str, dict[str, float]]:
    """Return what the tests recorded: family -> column -> value.

    Raises:
        ValueError: if a test failed.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in MODELS}
    for case in (case for path in paths for case in ET.parse(path).getroot().iter("testcase")):
        if case.find("failure") is not None or case.find("error") is not None:
            raise ValueError(f"{case.get('name')} failed")
        name = re.search(r"\[(\w+?)(?:-one process|-TP2 SP EP2)?\]$", str(case.get("name")))
        for each in case.iter("property"):
            if name and each.get("name") in COLUMNS:
                found[name[1]][str(each.get("name"))] = float(str(each.get("value")))
    return {name: values for name, values in found.items() if values}


def page_lines(found: dict[str, dict[str, float]], version: str) -> list[str]:
    rows = []
    for name, values in found.items():
        cells = [f"`{name}`"]
        for column in COLUMNS:
            value = values.get(column)
            digits = "{:,.0f}" if column in ("parameters", "tokens") else "{:.2f}" if column == "bf16" else "{:.0e}"
            cells.append("" if value is None else digits.format(value))
        rows.append(f"| {' | '.join(cells)} |")
    header = [f"| model | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    return [*INTRODUCTION.format(version=version).splitlines(), "", *header, *rows]


def main(argv: list[str]) -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="renew the page instead of printing it")
    parser.add_argument("--junit", type=Path, nargs="+", metavar="FILE", help="what pytest wrote with --junitxml FILE")
    known, more = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        results = known.junit or [Path(folder, "results.xml")]
        if known.junit is None:
            command = [sys.executable, "-m", "pytest", "-q", "-o", "junit_family=xunit1", f"--junitxml={results[0]}"]
            subprocess.run([*command, *FILES, *more], cwd=ROOT, check=True)
        lines = page_lines(read_junit(*results), transformers.__version__)
    if known.write:
        PAGE.write_text("\n".join(lines) + "\n")
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])

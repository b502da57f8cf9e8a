"""--help shows every flag, grouped, without loading anything heavy."""

import subprocess
import sys
from pathlib import Path

from arguments.container import OPTIONS
from arguments.help import help_lines

ROOT = Path(__file__).parents[2]


def test_every_flag_is_in_the_help_text():
    text = "\n".join(help_lines(100))
    for option in OPTIONS.values():
        assert all((spelling in text) != option.hidden or option.hidden for spelling in option.spellings)
    assert "--cuda-graph-scope" not in text


def test_lines_fit_and_are_grouped():
    lines = list(help_lines(100))
    prose = [line for line in lines if line.startswith("        ")]
    assert max(map(len, prose)) <= 100
    assert sum(line.startswith("  ") and not line.startswith("   ") for line in lines) > 40
    assert sum(line.isupper() or line.split(":")[0].isupper() for line in lines if line[:1].isalpha()) >= 8


def test_help_loads_nothing_heavy():
    code = (
        "import runpy, sys; sys.argv = ['pretrain_moe.py', '--help']\n"
        "try:\n    runpy.run_path('pretrain_moe.py', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'yaml', 'argparse', 'tensorboard', 'transformers'} & set(sys.modules)\n"
        "sys.stderr.write(repr(sorted(heavy)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == "[]"
    assert "--moe-router-topk" in done.stdout

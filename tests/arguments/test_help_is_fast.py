"""--help shows every flag, grouped, without loading anything heavy."""

import subprocess
import sys
from pathlib import Path

from arguments.container import OPTIONS
from arguments.help import help_lines, run_help
from arguments.parse import resolve_command_line
from arguments.tokens import parse_tokens

ROOT = Path(__file__).parents[2]


def test_every_flag_is_in_the_help_text():
    text = "\n".join(help_lines(100))
    for option in OPTIONS.values():
        assert all((spelling in text) != option.hidden or option.hidden for spelling in option.shown_spellings)
    assert "--cuda-graph-scope" not in text


def test_of_spellings_that_differ_by_an_underscore_one_is_shown():
    """Megatron-LM has --override-opt_param-scheduler and --override-opt-param-scheduler; both are accepted."""
    others = {
        spelling: option.spellings[0]
        for option in OPTIONS.values()
        for spelling in set(option.spellings) - set(option.shown_spellings)
    }
    assert others["--override-opt-param-scheduler"] == "--override-opt_param-scheduler" and len(others) < 5
    for spelling, shown in others.items():
        assert [OPTIONS[given.dest].spellings[0] for given in parse_tokens([spelling]).given] == [shown]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "scripts").glob("*.sh")]
    texts = {path: path.read_text(encoding="utf-8") for path in pages} | {"--help": "\n".join(help_lines(100))}
    assert [(place, spelling) for place, text in texts.items() for spelling in others if spelling in text] == []


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


def test_help_of_a_topic_or_a_flag(capsys):
    assert run_help(["--lr", "1", "--help", "--moe-router-topk"]) == 0
    text = capsys.readouterr().out
    assert "--moe-router-topk N" in text and text.count("\n") < 8
    assert run_help(["-h", "moe"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("MOE: ") and "--moe-router-topk N" in text and "--hidden-size" not in text
    assert run_help(["--help", "balancing"]) == 0
    assert "--moe-aux-loss-coeff" in capsys.readouterr().out
    assert run_help(["--help", "--moe-routr-topk"]) == 2
    captured = capsys.readouterr()
    assert (
        captured.out == ""
        and "--help --moe-routr-topk: there is no such flag or topic; did you mean --moe-router-topk" in captured.err
    )


def test_help_accepts_alternative_spellings(capsys):
    for topics, shown in {
        "--moe_router_topk --moe-router-topk=8 --moe_router_topk=8 router_topk": "--moe-router-topk N",
        "--override-opt_param-scheduler --override-opt-param-scheduler": "--override-opt_param-scheduler",
        "ECHO": "--moe-clone-hot-experts N",
        "sync-free": "--moe-expert-rank-capacity-factor X",
        "sync_free": "--moe-paged-stash",
        "linear_and_sparse": "--linear-num-key-heads",
    }.items():
        for topic in topics.split():
            assert run_help(["--help", topic]) == 0
            assert shown in capsys.readouterr().out, topic


def test_usage_examples_shown_without_flags_are_valid(capsys, monkeypatch):
    from moe_trainer.commands import train_process

    monkeypatch.delenv("RANK", raising=False)
    assert train_process.main([]) == 2
    captured = capsys.readouterr()
    lines = [
        line.split("  ")[1].split()[2:]
        for line in captured.err.splitlines()
        if line.startswith("  python pretrain_moe.py")
    ]
    assert captured.out == "" and len(lines) == 3 and "Traceback" not in captured.err
    for argv in lines[:2]:  # the third needs a checkpoint
        assert not resolve_command_line(argv, 1)[1], argv

"""Malformed command lines end with exit code 2, the flag (or file) named on standard error, and no traceback."""

import subprocess
import sys

import pytest
from commands import REPOSITORY, environment, run
from fault_injection.ranks import reserved_port

import pretrain_moe
from arguments.container import OPTIONS
from arguments.parse import resolve_command_line
from tests.arguments.malformed import ANY_NUMBER, BASE, KINDS, STARTUP_ERRORS, Malformed, malformed

SEED, EACH = 20, 30


def write_files(line: Malformed, folder) -> None:
    for name, content in line.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def check_refusal(line: Malformed, code: int, message: str) -> None:
    assert code == 2, (str(line), code, message)
    assert "Traceback" not in message, (str(line), message)
    for name in line.names:
        assert name in message, (str(line), name, message)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_malformed_lines_are_refused(kind, tmp_path, monkeypatch, capsys):
    """In this process: errors of a command line are found before anything starts."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pretrain_moe, "_train", lambda args, place, listening: pytest.fail("the line was accepted"))
    for line in malformed(SEED, EACH, [kind]):
        write_files(line, tmp_path)
        with monkeypatch.context() as patch:
            for name, value in line.env.items():
                patch.setenv(name, value)
            code = pretrain_moe.main(list(line.argv))
        check_refusal(line, code, capsys.readouterr().err)


def test_there_are_at_least_600_malformed_command_lines():
    assert EACH * len(KINDS) + len(STARTUP_ERRORS) >= 600


def test_same_seed_draws_the_same_malformed_lines():
    assert list(malformed(1, 50)) == list(malformed(1, 50)) != list(malformed(2, 50))


def test_base_command_line_is_valid():
    assert not resolve_command_line(list(BASE), 1)[1]


def test_number_flags_reject_negative_numbers_or_document_them():
    for option in OPTIONS.values():
        if option.type_name not in ("int", "float") or option.choices or option.takes == 0:
            continue
        argv = [*BASE, option.spellings[0], *["-7"] * (option.takes if isinstance(option.takes, int) else 1)]
        refused = any(option.spellings[0] in violation.message for violation in resolve_command_line(argv, 1)[1])
        assert refused == (option.dest not in ANY_NUMBER), option.spellings[0]


@pytest.mark.parametrize("line", STARTUP_ERRORS, ids=lambda line: " ".join(line.argv[len(BASE) - 2 :]))
def test_errors_found_at_startup_are_refused(line, tmp_path):
    write_files(line, tmp_path)
    ended = run(list(line.argv), tmp_path, HF_HUB_OFFLINE="1")
    check_refusal(line, ended.returncode, ended.stderr)


@pytest.mark.parametrize("line", list(malformed(SEED + 1, 10)), ids=lambda line: line.kind)
def test_malformed_lines_are_refused_in_a_new_interpreter(line, tmp_path):
    write_files(line, tmp_path)
    ended = run(list(line.argv), tmp_path, new_interpreter=True, **line.env)
    check_refusal(line, ended.returncode, ended.stderr)


# rank 0's interpreter takes its time
LATE = """
import os, time

if os.environ.get("RANK") == "0":
    time.sleep(3.0)
"""


@pytest.mark.parametrize(
    "launcher",
    [["-m", "torch.distributed.run"], [str(REPOSITORY / "scripts" / "torchrun.py")]],
    ids=["torchrun", "scripts"],
)
def test_launchers_print_the_error_of_all_ranks_once(launcher, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(LATE)
    with reserved_port() as port:
        words = [
            sys.executable,
            *launcher,
            "--nproc-per-node",
            "2",
            "--master-port",
            str(port),
            str(REPOSITORY / "pretrain_moe.py"),
        ]
        ended = subprocess.run(
            [*words, *BASE, "--lr", "abc"],
            cwd=tmp_path,
            env=environment(PYTHONPATH=str(tmp_path)),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert ended.stderr.count("pretrain_moe.py: 1 problem with the arguments:") == 1, ended.stderr
    if "scripts" in launcher[0]:
        assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
        assert ended.stderr.endswith(
            "the run failed with exit code 2: 1 problem with the arguments:\n  - --lr abc: the value must be a number\n"
        )
    else:  # its own traceback and code 1 cannot be helped; its report, which comes last, gives the reason
        assert "--lr abc: the value must be a number" in ended.stderr[ended.stderr.index("Root Cause") :], ended.stderr

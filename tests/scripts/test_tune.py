"""`moe-trainer tune`: sizes that run, that are refused and that do not fit are rows, and the line's folders stay empty."""

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from commands import call_main, run
from training.tiny import MOCK, TINY

from moe_trainer.commands import tune
from moe_trainer.errors import UserError
from moe_trainer.launch import trial
from moe_trainer.metrics.run_state import RunEnd

LINE = [*TINY, *MOCK, "--train-iters", "50"]


@pytest.fixture
def forked(tmp_path, monkeypatch):
    """Run trials in forks of this process, and list their command lines."""
    commands = []

    def run_command(command, output, timeout_s):
        commands.append(command)
        done = run(command[2:], tmp_path)
        output.write_text(done.stdout + done.stderr)
        return done.returncode

    monkeypatch.setattr(trial, "run_command", run_command)
    return commands


def rows(text):
    """The table below its head: cells by size, and the lines after it."""
    lines = text.splitlines()[1:]
    table = [line for line in lines if line[:16].strip().isdecimal()]
    return {int(line[:16]): line[16:].split(maxsplit=4) for line in table}, lines[len(table) :]


def test_sizes_that_run_and_one_that_is_refused(tmp_path, forked, capsys):
    folders = ["--save", "ckpt", "--save-interval", "1", "--tensorboard-dir", "tb", "--load", "ckpt", "--auto-resume"]
    words = ["--micro-batch-size", "1,3,2", "--iterations=4", "pretrain_gpt.py", *LINE, *folders]
    done = call_main(tune.main, words, capsys)
    assert done.returncode == 0, done.stderr
    found, after = rows(done.stdout)
    assert list(found) == [1, 3, 2]
    assert found[3][:3] == ["-"] * 3 and "--global-batch-size 4 must be a multiple of 3" in " ".join(found[3])
    speeds = {size: float(found[size][0].replace(",", "")) for size in (1, 2)}
    assert all(speed > 0 and float(found[size][2].replace(",", "")) > 1 for size, speed in speeds.items())
    fastest = after[0].split()[2].strip(",;")
    assert after[0].startswith("fastest: --micro-batch-size ") and after[0].count("--micro-batch-size") == 2
    assert speeds[int(fastest)] == max(speeds.values())
    assert list(tmp_path.iterdir()) == [], "nothing is written but to the folder of a trial"
    assert all(command[1].endswith("/pretrain_moe.py") for command in forked), "not Megatron-LM's program"


def test_global_batch_that_grows_is_said(forked, capsys):
    line = " ".join(LINE).replace("--global-batch-size 4", "").split()
    done = call_main(tune.main, ["--micro-batch-size", "1,2", "--iterations", "3", *line], capsys)
    assert done.returncode == 0 and "the global batch grew with the size" in done.stdout, done


def test_medians_leave_the_first_iterations_out(tmp_path):
    records = [
        f'{{"iteration": {number}, "elapsed_ms": {ms}, "tokens_per_s": {64e3 / ms}, "max_memory_mb": {ms}, '
        '"global_batch_size": 4}'
        for number, ms in enumerate((9000, 800, 40, 20, 32), 1)
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([*records, '{"iteration": 5, "validation": "x"}', '{"ended": "stopped"}']))
    assert trial._read_trial(path, "") == trial.Trial("", 2000.0, 0.032, 40, 4)
    lines = "[Rank 0] | max allocated: 7.5 | reserved: 99\n[Rank 1] | max allocated: 48.25 | reserved: 99"
    assert trial._read_trial(path, lines).memory_mb == 48.25
    assert trial._read_trial(path, lines.splitlines()[0]).memory_mb == 40, "the last rank's"
    path.write_text("\n".join(records[:2]))
    assert "2 iterations are recorded" in trial._read_trial(path, "").note


@pytest.mark.parametrize(
    ("output", "code", "note"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", 1, "out of memory"),
        ("pretrain_moe.py: rank 1: out of host memory in step; give the process more memory", 2, "out of memory"),
        ("", -signal.SIGKILL, "killed by SIGKILL, as when memory runs out"),
        ("traceback : Signal 9 (SIGKILL) received by PID 7", 1, "killed by SIGKILL, as when memory runs out"),
        ("pretrain_moe.py: --load x: there is none\nE1129 torch", 1, "--load x: there is none"),
        ("moe-trainer train: 1 problem:\n  - --lr is missing\nE1129 torch", 1, "--lr is missing"),
        ("a\nlast words\n\n", 5, "exit code 5: last words"),
        ("", 5, "exit code 5"),
    ],
)
def test_reasons_are_one_line(output, code, note, tmp_path):
    assert trial._reason(tmp_path / "metrics.jsonl", output, code) == note


@pytest.mark.parametrize(
    ("reason", "note"),
    [("iteration 3: the loss is nan", None), ("OutOfMemoryError: CUDA out of memory. Tried", "out of memory")],
)
def test_recorded_reason_comes_before_the_last_line_of_the_log(reason, note, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(RunEnd("failed", 2, 16, reason).as_record()) + "\n")
    assert trial._reason(path, "pretrain_moe.py: rank 0 has left\nE1129 torch", 1) == (note or reason)


def test_nothing_that_runs_is_an_error(monkeypatch, capsys):
    def run_command(command, output, timeout_s):
        output.write_text("CUDA out of memory")
        return None if "--micro-batch-size 8" in " ".join(command) else 1

    monkeypatch.setattr(trial, "run_command", run_command)
    done = call_main(tune.main, ["--micro-batch-size", "4,8", "--timeout", "5", *LINE], capsys)
    assert done.returncode == 2 and "no size gave a result" in done.stderr
    found, after = rows(done.stdout)
    assert " ".join(found[4]) == "- - - out of memory" and "no result within 5 s" in " ".join(found[8]) and not after


@pytest.mark.parametrize(
    ("start", "command"),
    [
        ("torchrun --nproc-per-node 2 pretrain_gpt.py", "torchrun --nproc-per-node 2 {ours}"),
        ("A=1 torchrun /x/pretrain_moe.py", "env A=1 torchrun /x/pretrain_moe.py"),
        ("exec srun python pretrain_gpt.py", "srun python {ours}"),
        ("torchrun -m moe_trainer train", "torchrun -m moe_trainer train"),
        ("torchrun -m pretrain_gpt", "torchrun -m pretrain_moe"),
        ("moe-trainer train", "moe-trainer train"),
        ("pretrain_moe.py", "{python} pretrain_moe.py"),
        ("", "{python} {ours}"),
    ],
)
def test_launcher_stays_and_the_trainer_is_ours(start, command):
    ours = sys.modules[tune.__name__].__file__.replace("moe_trainer/commands/tune.py", "pretrain_moe.py")
    assert trial._start_of_trainer(start.split()) == command.format(ours=ours, python=sys.executable).split()


def test_command_that_runs_too_long_is_ended_with_what_it_started(tmp_path):
    script = "import subprocess, sys; subprocess.run(['sleep', '1000'])"
    assert trial.run_command([sys.executable, "-c", script], tmp_path / "out", 0.01) is None
    assert trial.run_command([sys.executable, "-c", "print(5); raise SystemExit(7)"], tmp_path / "out", 100) == 7
    assert (tmp_path / "out").read_text() == "5\n"
    with pytest.raises(UserError, match="not-there: cannot be started"):
        trial.run_command(["not-there"], tmp_path / "out", 1)
    words = ["bash", "-c", "sleep 1000 & echo started; wait"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.readline()
        trial._end(process)
        ended, *_ = select.select([process.stdout], [], [], 60)  # readable when the last one that has it is gone
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert ended and process.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--micro-batch-size 1,x --mock-data", "--micro-batch-size 1,x: numbers above 0 are needed"),
        (f"--micro-batch-size {'1' * 5000} --mock-data", "1... (5000 characters): numbers above 0 are needed"),
        ("--micro-batch-size 0 --mock-data", "--micro-batch-size 0: numbers above 0 are needed"),
        ("--micro-batch-size 1", "the command line of a run is missing"),
        ("--micro-batch-size 1 --iterations 2 --mock-data", "--iterations 2: more than 2 are needed"),
        ("--micro-batch-size 1 --timeout 0 --mock-data", "--timeout 0 must be above 0"),
        ("--micro-batch-size 1 torchrun pretrain_gpt.py --nothing 3", "--nothing: this flag is unknown"),
        ("--mock-data", "--micro-batch-size"),
    ],
)
def test_wrong_words_run_nothing(words, message, monkeypatch, capsys):
    monkeypatch.setattr(trial, "run_command", None)
    done = call_main(tune.main, words.split(), capsys)
    assert done.returncode == 2 and message in done.stderr, done.stderr


@pytest.mark.parametrize("flag", ["--save", "--result-rejected-tracker-filename"])
def test_path_of_a_recipe_file_is_not_written_to(flag, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trial, "run_command", None)
    (tmp_path / "own.yaml").write_text(f"MODEL_ARGS:\n  {flag}: {tmp_path / 'mine'}\n  --num-layers: 2\n")
    done = call_main(tune.main, ["--micro-batch-size", "1", "--preset", str(tmp_path / "own.yaml"), *LINE], capsys)
    assert done.returncode == 2 and f"{flag} in the recipe file would write" in done.stderr, done.stderr


def test_trial_loads_only_the_weights_of_a_recipe_files_checkpoint(tmp_path):
    (tmp_path / "own.yaml").write_text("MODEL_ARGS:\n  --load: mine\n")
    flags = trial._trial_flags(["--preset", str(tmp_path / "own.yaml"), *LINE], 1, 4, tmp_path)
    assert {"--finetune", "--no-load-optim", "--no-load-rng"} <= set(flags)
    assert "--finetune" not in trial._trial_flags(LINE, 1, 4, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_the_trial(tmp_path, monkeypatch, number):
    """With what it has started, which a closed terminal does not reach; its folder is deleted."""
    handlers = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)  # nohup would ignore a closed terminal
    monkeypatch.setattr(tune.tempfile, "tempdir", str(tmp_path))

    def run_trial(*args):
        handlers[number](number, None)

    monkeypatch.setattr(tune, "run_trial", run_trial)
    with pytest.raises(SystemExit) as ended:
        tune.main(["--micro-batch-size", "1", *LINE])
    assert ended.value.code == 128 + number and list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune.tempfile, "tempdir", str(tmp_path / "gone"))
    done = call_main(tune.main, ["--micro-batch-size", "1", *LINE], capsys)
    assert done.returncode == 2 and f"below TMPDIR: [Errno 2] No such file or directory: '{tmp_path}" in done.stderr

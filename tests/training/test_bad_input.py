"""Malformed command lines and bad files: exit code 2, the flag or file named on one screen, no traceback, nothing lost."""

import os
import shutil
import subprocess
import sys

import pytest
from bad_input import check_refusal, cut, refused, write_files
from commands import REPOSITORY, environment, golden_workspace, read_metrics, run
from fault_injection.ranks import reserved_port
from training.tiny import MOCK, TINY

from arguments.container import OPTIONS
from arguments.parse import resolve_command_line
from moe_trainer.commands import train_process
from tests.arguments.malformed import BASE, KINDS, STARTUP_ERRORS, malformed

SEED, EACH = 20, 30
TWO = [*TINY, *MOCK, "--train-iters", "2"]

# ---- malformed command lines


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_malformed_lines_are_refused(kind, tmp_path, monkeypatch, capsys):
    """In this process: errors of a command line are found before anything starts."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(train_process, "_train", lambda args, place, listening: pytest.fail("the line was accepted"))
    for line in malformed(SEED, EACH, [kind]):
        write_files(tmp_path, line.files)
        with monkeypatch.context() as patch:
            for name, value in line.env.items():
                patch.setenv(name, value)
            code = train_process.main(list(line.argv))
        check_refusal(code, capsys.readouterr().err, line.names, line)


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
        found = any(option.spellings[0] in violation.message for violation in resolve_command_line(argv, 1)[1])
        assert found == (option.bounds != "any"), (
            f"{option.spellings[0]}: say flag(..., bounds=...), see flag_properties.py"
        )


@pytest.mark.parametrize("line", STARTUP_ERRORS, ids=lambda line: " ".join(line.argv[len(BASE) - 2 :]))
def test_errors_found_at_startup_are_refused(line, tmp_path):
    write_files(tmp_path, line.files)
    refused(list(line.argv), tmp_path, *line.names, about=line, HF_HUB_OFFLINE="1")


def test_unknown_flag_and_wrong_value_are_reported_together_by_a_new_interpreter(tmp_path):
    words = ("--moe-router-topkk", "--moe-router-topk", "--num-layers")
    refused([*TWO, "--moe-router-topkk", "2", "--num-layers", "two"], tmp_path, *words, new_interpreter=True)


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
        flags = ["--nproc-per-node", "2", "--master-port", str(port)]
        ended = subprocess.run(
            [sys.executable, *launcher, *flags, str(REPOSITORY / "pretrain_moe.py"), *BASE, "--lr", "abc"],
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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--load nowhere --exit-on-missing-checkpoint", ["nowhere"]),
        ("--load nowhere --use-checkpoint-args", ["--use-checkpoint-args", "nowhere"]),
        (f"--load {'x' * 300}", ["--load xxx", "File name too long"]),
        ("--preset mixtral_8x7", ["mixtral_8x7b"]),
        ("--preset recipe.yaml", ["SURELY_UNSET_VARIABLE", "recipe.yaml"]),
        ("--moe-layer-freq [1]*5", ["--moe-layer-freq", "--num-layers"]),
        ("--export-weights missing/w.safetensors", ["--export-weights missing/w.safetensors"]),
        ("--train-iters 0", ["--train-iters"]),
        ("--metrics-file /dev/full", ["--metrics-file: cannot write /dev/full", "No space left"]),
        ("--dump-step 1 dump", ["--dump-step", "grads_step1.safetensors"]),
        ("--init-from missing.safetensors", ["missing.safetensors"]),
        ("--init-from broken.safetensors", ["broken.safetensors"]),
    ],
)
def test_flags_and_files_that_do_not_fit_are_refused(tmp_path, flags, words):
    (tmp_path / "dump" / "grads_step1.safetensors").mkdir(parents=True)
    recipe = "MODEL_ARGS:\n  --num-layers: 2\n  --data-path: ${SURELY_UNSET_VARIABLE}\n"
    write_files(tmp_path, {"broken.safetensors": b"nothing of the kind", "recipe.yaml": recipe})
    message = refused([*TWO, *flags.split()], tmp_path, *words)
    assert "iteration" not in message or "export" not in flags


@pytest.mark.parametrize("env", [{"RANK": "1"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_invalid_rank_variable_is_reported_on_any_rank(tmp_path, env):
    refused(TWO, tmp_path, "rank" if env["RANK"] == "1" else "RANK", **env)


def test_all_missing_backends_are_named_at_once(tmp_path):
    flags = (
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep "
        "--moe-permute-fusion --on-missing-backend error"
    )
    words = (
        "--transformer-impl transformer_engine",
        "--moe-permute-fusion",
        "--moe-flex-dispatcher-backend deepep",
    )
    refused([*TWO, *flags.split()], tmp_path, *words, ranks=2)


# ---- errors of one rank


def test_error_on_one_rank_ends_all_ranks_with_its_message(tmp_path):
    refused([*TWO, "--metrics-file", "/proc/nope/metrics.jsonl"], tmp_path, "--metrics-file", ranks=2)


@pytest.mark.parametrize("argv, in_the_way", [
    (["--dump-step", "1", "dump"], "dump/grads_step1.safetensors"), (["--dump-step", "1", "dump"], "dump/routing_step1_rank1.npz"),
    (["--export-weights", "w.safetensors"], "w.safetensors.elements.tmp"),
], ids=["gradients", "routing of one rank", "weights"])  # fmt: skip
def test_write_error_on_one_rank_ends_all_ranks(tmp_path, argv, in_the_way):
    (tmp_path / in_the_way).mkdir(parents=True)
    # far below the watchdog's timeout
    refused([*TINY, *MOCK, "--train-iters", "1", *argv], tmp_path, argv[0], in_the_way, ranks=2, timeout=200.0)


def test_nan_loss_stops_the_run_and_names_the_iteration(tmp_path):
    finished = run([*TWO, *"--train-iters 40 --lr 1e30 --min-lr 1e30 --clip-grad 0".split()], tmp_path)
    assert finished.returncode != 0
    assert "iteration" in finished.stderr and "nan" in finished.stderr.lower()


# ---- data

DATA = (
    "--data-path golden/dataset/A_text_document --split 100,0,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "
    "golden/dataset/tokenizer --data-cache-path cache"
).split()
TEXT, TOKENIZER = "golden/dataset/A_text_document", "golden/dataset/tokenizer/tokenizer.json"


@pytest.fixture
def cwd(shared, tmp_path):
    return golden_workspace(shared, tmp_path)


def train(*changes):
    return [*TINY, *DATA, "--train-iters", "2", *changes]


@pytest.mark.parametrize(
    ("damage", "flags", "words"),
    [
        (None, "--data-path nowhere/text_document", ["nowhere/text_document"]),
        (lambda cwd: cut(cwd / f"{TEXT}.idx", 100), "", ["A_text_document.idx"]),
        (lambda cwd: cut(cwd / f"{TEXT}.bin", -10), "", ["A_text_document.bin"]),
        (None, "--tokenizer-type NullTokenizer --vocab-size 100", ["A_text_document", "vocab"]),
        (lambda cwd: (cwd / TOKENIZER).write_text("{ this is no tokenizer"), "", ["tokenizer"]),
        (lambda cwd: (cwd / "file").write_text(""), "--save file/ckpt --save-interval 1", ["file/ckpt"]),
        # a share so small that it rounds to no document: Megatron-LM would wait endlessly
        (None, "--split 9999,1,0 --eval-interval 1 --eval-iters 1", ["split", "valid"]),
    ],
    ids=["missing", "cut index", "short data", "vocabulary", "tokenizer", "save folder", "empty split"],
)
def test_data_that_cannot_be_read_are_refused(cwd, damage, flags, words):
    if damage is not None:
        damage(cwd)
    refused(train(*flags.split()), cwd, *words)


def test_split_with_zero_weight_is_not_evaluated(cwd):
    finished = run(train("--eval-interval", "1", "--eval-iters", "1"), cwd)
    assert finished.returncode == 0, finished.stderr
    assert "there is no data for the valid split" in finished.stderr
    assert "validation loss" not in finished.stdout


def test_validation_smaller_than_a_batch_is_evaluated_or_refused(cwd):
    small = ["--split", "99,1,0", "--eval-interval", "1", "--eval-iters", "1", "--full-validation"]
    finished = run(train(*small, "--micro-batch-size", "1", "--global-batch-size", "8"), cwd)
    assert finished.returncode == 0, finished.stderr
    assert "lm loss value: 0.0" not in finished.stdout and "validation loss at iteration 2" in finished.stdout
    refused(train(*small, "--micro-batch-size", "64", "--global-batch-size", "64"), cwd, "validation")


# ---- checkpoints


def test_full_disk_during_save_keeps_the_last_checkpoint(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1600k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")

    def line(folder, interval):
        return [*TWO, *f"--train-iters 20 --save {folder} --load {folder} --save-interval {interval}".split()]

    try:
        refused(line(disk / "ckpt", 1), tmp_path, str(disk), "space")
        last = int((disk / "ckpt" / "latest_checkpointed_iteration.txt").read_text())
        assert last >= 1
        shutil.copytree(disk / "ckpt", tmp_path / "rescued")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    finished = run(line(tmp_path / "rescued", 100), tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert f"at iteration {last}" in finished.stdout + finished.stderr


def test_checkpoint_and_weights_that_do_not_fit_are_refused(tmp_path):
    """Of another architecture, and damaged: the last valid step is named."""
    argv = [*TWO, *"--save ckpt --save-interval 1 --load ckpt".split()]
    assert run([*argv, "--export-weights", "w.safetensors"], tmp_path).returncode == 0
    keeps = [tmp_path / "ckpt" / "iter_0000002"]
    refused([*argv, "--hidden-size", "64"], tmp_path, "--hidden-size", "32", "64", keeps=keeps)
    refused([*argv, "--num-experts", "8"], tmp_path, "--num-experts", "4", "8", keeps=keeps)
    refused([*TWO, "--num-layers", "3", "--init-from", "w.safetensors"], tmp_path, "decoder.layers.2.")
    cut(next((tmp_path / "ckpt" / "iter_0000002").glob("*.distcp")), 1000)
    refused(argv, tmp_path, "iter_0000002", "--ckpt-step 1")


def test_use_checkpoint_args_before_the_first_checkpoint(tmp_path):
    """A job that is started again and again with the same line."""
    argv = [*TWO, *"--use-checkpoint-args --train-iters 1 --load ckpt --save ckpt --save-interval 1".split()]
    finished = run(argv, tmp_path)
    assert finished.returncode == 0
    assert "there is no checkpoint yet; the command line is used" in finished.stdout + finished.stderr


def test_invalid_metrics_file_does_not_stop_a_resumed_run(tmp_path):
    argv = [*TWO, *"--save ckpt --load ckpt --save-interval 1".split()]
    assert run([*argv, "--exit-interval", "1"], tmp_path).returncode == 0
    (tmp_path / "ckpt" / "metrics.jsonl").write_bytes(b'[1, 2]\n"a"\n{"iteration": "x"}\n\xff\xfe\n{"iteration": 1}\n')
    finished = run(argv, tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert [r["iteration"] for r in read_metrics(tmp_path / "ckpt" / "metrics.jsonl")] == [1, 2]

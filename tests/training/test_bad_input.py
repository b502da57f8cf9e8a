"""Bad input: one screen, exit code 2, no traceback, the flag or file named, nothing lost."""

import os
import shutil
import subprocess

import pytest
from commands import golden_workspace, read_metrics, run
from training.tiny import MOCK, TINY

DATA = (
    "--data-path golden/dataset/A_text_document --split 100,0,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "
    "golden/dataset/tokenizer --data-cache-path cache"
).split()


def refused(argv, cwd, *needles, new_interpreter=False, **env):
    """Check that the command fails with exit code 2 and no traceback. Returns its message."""
    finished = run([*argv], cwd, new_interpreter=new_interpreter, **env)
    assert finished.returncode == 2, (finished.returncode, finished.stdout[-2000:], finished.stderr)
    assert "Traceback" not in finished.stderr
    message = finished.stderr
    assert len(message.splitlines()) <= 40, message
    for needle in needles:
        assert needle in message, (needle, message)
    return message


@pytest.fixture
def cwd(shared, tmp_path):
    return golden_workspace(shared, tmp_path)


def train(*changes):
    return [*TINY, *DATA, "--train-iters", "2", *changes]


def test_missing_data_file(cwd):
    refused(train("--data-path", "nowhere/text_document"), cwd, "nowhere/text_document", new_interpreter=True)


def test_truncated_index(cwd):
    path = cwd / "golden/dataset/A_text_document.idx"
    path.write_bytes(path.read_bytes()[:100])
    refused(train(), cwd, "A_text_document.idx")


def test_data_shorter_than_its_index(cwd):
    path = cwd / "golden/dataset/A_text_document.bin"
    path.write_bytes(path.read_bytes()[:-10])
    refused(train(), cwd, "A_text_document.bin")


def test_token_beyond_the_vocabulary(cwd):
    argv = train("--tokenizer-type", "NullTokenizer", "--vocab-size", "100")
    refused(argv, cwd, "A_text_document", "vocab")


def test_unreadable_tokenizer(cwd):
    path = cwd / "golden/dataset/tokenizer/tokenizer.json"
    path.write_text("{ this is no tokenizer")
    refused(train(), cwd, "tokenizer")


def test_unwritable_save_folder(cwd):
    (cwd / "file").write_text("")
    refused(train("--save", "file/ckpt", "--save-interval", "1"), cwd, "file/ckpt")


def test_full_disk_during_save_keeps_the_last_checkpoint(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1600k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        argv = [
            *TINY,
            *MOCK,
            "--train-iters",
            "20",
            "--save",
            str(disk / "ckpt"),
            "--load",
            str(disk / "ckpt"),
            "--save-interval",
            "1",
        ]
        message = refused(argv, tmp_path, str(disk))
        assert "space" in message
        last = int((disk / "ckpt" / "latest_checkpointed_iteration.txt").read_text())
        assert last >= 1
        shutil.copytree(disk / "ckpt", tmp_path / "rescued")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    rescued = str(tmp_path / "rescued")
    argv = [*TINY, *MOCK, "--train-iters", "20", "--save", rescued, "--load", rescued, "--save-interval", "100"]
    finished = run(argv, tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert f"at iteration {last}" in finished.stdout + finished.stderr


def test_checkpoint_of_another_architecture(tmp_path):
    argv = [*TINY, *MOCK, "--train-iters", "1", "--save", "ckpt", "--save-interval", "1", "--load", "ckpt"]
    assert run(argv, tmp_path).returncode == 0
    refused([*argv, "--hidden-size", "64"], tmp_path, "--hidden-size", "32", "64")
    refused([*argv, "--num-experts", "8"], tmp_path, "--num-experts", "4", "8")


def test_damaged_checkpoint_error_names_the_last_valid_step(tmp_path):
    argv = [*TINY, *MOCK, "--train-iters", "2", "--save", "ckpt", "--save-interval", "1", "--load", "ckpt"]
    assert run(argv, tmp_path).returncode == 0
    data = next((tmp_path / "ckpt" / "iter_0000002").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:1000])
    refused(argv, tmp_path, "iter_0000002", "--ckpt-step 1")


def test_missing_checkpoint_with_exit_on_missing(tmp_path):
    refused(
        [*TINY, *MOCK, "--train-iters", "1", "--load", "nowhere", "--exit-on-missing-checkpoint"], tmp_path, "nowhere"
    )


def test_use_checkpoint_args_with_a_missing_checkpoint(tmp_path):
    argv = [*TINY, *MOCK, "--train-iters", "1", "--use-checkpoint-args"]
    refused([*argv, "--load", "nowhere"], tmp_path, "--use-checkpoint-args", "nowhere")
    # a job that is started again and again with the same line writes it there
    finished = run([*argv, "--load", "ckpt", "--save", "ckpt", "--save-interval", "1"], tmp_path)
    assert (
        finished.returncode == 0
        and "there is no checkpoint yet; the command line is used" in finished.stdout + finished.stderr
    )


def test_initial_weights_that_do_not_fit(tmp_path):
    argv = [*TINY, *MOCK, "--train-iters", "1"]
    refused([*argv, "--init-from", "missing.safetensors"], tmp_path, "missing.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"nothing of the kind")
    refused([*argv, "--init-from", "broken.safetensors"], tmp_path, "broken.safetensors")
    assert run([*argv, "--export-weights", "w.safetensors"], tmp_path).returncode == 0
    refused([*argv, "--num-layers", "3", "--init-from", "w.safetensors"], tmp_path, "decoder.layers.2.")


def test_unknown_preset_offers_close_names(tmp_path):
    refused(["--preset", "mixtral_8x7", *MOCK], tmp_path, "mixtral_8x7b")


def test_yaml_with_an_unset_variable(tmp_path):
    (tmp_path / "recipe.yaml").write_text("MODEL_ARGS:\n  --num-layers: 2\n  --data-path: ${SURELY_UNSET_VARIABLE}\n")
    refused(["--preset", "recipe.yaml"], tmp_path, "SURELY_UNSET_VARIABLE", "recipe.yaml")


def test_unknown_flag_and_wrong_value_are_reported_together(tmp_path):
    message = refused(
        [*TINY, *MOCK, "--train-iters", "1", "--moe-router-topkk", "2", "--num-layers", "two"],
        tmp_path,
        new_interpreter=True,
    )
    assert "--moe-router-topkk" in message and "--moe-router-topk" in message and "--num-layers" in message


def test_samples_from_an_empty_split_are_refused(cwd):
    # a share so small that it rounds to no document: Megatron-LM would wait endlessly
    refused(train("--split", "9999,1,0", "--eval-interval", "1", "--eval-iters", "1"), cwd, "split", "valid")


def test_split_with_zero_weight_is_not_evaluated(cwd):
    finished = run(train("--eval-interval", "1", "--eval-iters", "1"), cwd)
    assert finished.returncode == 0, finished.stderr
    assert "there is no data for the valid split" in finished.stderr
    assert "validation loss" not in finished.stdout


def test_nan_loss_stops_the_run_and_names_the_iteration(tmp_path):
    finished = run(
        [*TINY, *MOCK, "--train-iters", "40", "--lr", "1e30", "--min-lr", "1e30", "--clip-grad", "0"], tmp_path
    )
    assert finished.returncode != 0
    assert "iteration" in finished.stderr and "nan" in finished.stderr.lower()


def test_output_paths_are_checked_before_training(tmp_path):
    argv = [*TINY, *MOCK, "--train-iters", "2"]
    message = refused(
        [*argv, "--export-weights", "missing/w.safetensors"], tmp_path, "--export-weights missing/w.safetensors"
    )
    assert "iteration" not in message
    refused([*argv, "--train-iters", "0"], tmp_path, "--train-iters")


def test_error_on_one_rank_ends_all_ranks_with_its_message(tmp_path):
    finished = run(
        [*TINY, *MOCK, "--train-iters", "2", "--metrics-file", "/proc/nope/metrics.jsonl"],
        tmp_path,
        2,
        new_interpreter=True,
    )
    assert finished.returncode == 2 and "Traceback" not in finished.stderr
    assert "--metrics-file" in finished.stderr


@pytest.mark.parametrize("env", [{"RANK": "1"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_invalid_rank_variable_is_reported_on_any_rank(tmp_path, env):
    refused([*TINY, *MOCK, "--train-iters", "2"], tmp_path, "rank" if env["RANK"] == "1" else "RANK", **env)


def test_inconsistent_moe_layer_freq_is_refused_at_startup(tmp_path):
    refused(
        [*TINY, *MOCK, "--train-iters", "2", "--moe-layer-freq", "[1]*5"], tmp_path, "--moe-layer-freq", "--num-layers"
    )


def test_validation_smaller_than_a_batch_is_evaluated_or_refused(cwd):
    small = ["--split", "99,1,0", "--eval-interval", "1", "--eval-iters", "1", "--full-validation"]
    finished = run(train(*small, "--micro-batch-size", "1", "--global-batch-size", "8"), cwd)
    assert finished.returncode == 0, finished.stderr
    assert "lm loss value: 0.0" not in finished.stdout and "validation loss at iteration 2" in finished.stdout
    refused(train(*small, "--micro-batch-size", "64", "--global-batch-size", "64"), cwd, "validation")


def test_invalid_metrics_file_does_not_stop_a_resumed_run(tmp_path):
    argv = [*TINY, *MOCK, "--train-iters", "2", "--save", "ckpt", "--load", "ckpt", "--save-interval", "1"]
    assert run([*argv, "--exit-interval", "1"], tmp_path).returncode == 0
    (tmp_path / "ckpt" / "metrics.jsonl").write_bytes(b'[1, 2]\n"a"\n{"iteration": "x"}\n\xff\xfe\n{"iteration": 1}\n')
    finished = run(argv, tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert [r["iteration"] for r in read_metrics(tmp_path / "ckpt" / "metrics.jsonl")] == [1, 2]


def test_full_disk_while_logging_is_reported(tmp_path):
    message = refused(
        [*TINY, *MOCK, "--train-iters", "2", "--metrics-file", "/dev/full"],
        tmp_path,
        "--metrics-file: cannot write /dev/full",
    )
    assert "No space left" in message
    (tmp_path / "dump" / "grads_step1.safetensors").mkdir(parents=True)
    refused(
        [*TINY, *MOCK, "--train-iters", "2", "--dump-step", "1", "dump"],
        tmp_path,
        "--dump-step",
        "grads_step1.safetensors",
    )


@pytest.mark.parametrize("argv, in_the_way", [
    (["--dump-step", "1", "dump"], "dump/grads_step1.safetensors"), (["--dump-step", "1", "dump"], "dump/routing_step1_rank1.npz"),
    (["--export-weights", "w.safetensors"], "w.safetensors.elements.tmp"),
], ids=["gradients", "routing of one rank", "weights"])  # fmt: skip
def test_write_error_on_one_rank_ends_all_ranks(tmp_path, argv, in_the_way):
    (tmp_path / in_the_way).mkdir(parents=True)
    finished = run(
        [*TINY, *MOCK, "--train-iters", "1", *argv], tmp_path, 2, timeout=200.0
    )  # far below the watchdog's timeout
    assert finished.returncode == 2 and "Traceback" not in finished.stderr
    assert argv[0] in finished.stderr and in_the_way in finished.stderr


def test_all_missing_backends_are_named_at_once(tmp_path):
    argv = [
        *TINY,
        *MOCK,
        "--train-iters",
        "1",
        "--expert-model-parallel-size",
        "2",
        "--moe-token-dispatcher-type",
        "flex",
        "--moe-flex-dispatcher-backend",
        "deepep",
        "--moe-permute-fusion",
        "--on-missing-backend",
        "error",
    ]
    finished = run(argv, tmp_path, 2)
    assert finished.returncode == 2 and "Traceback" not in finished.stderr
    for flag in (
        "--transformer-impl transformer_engine",
        "--moe-permute-fusion",
        "--moe-flex-dispatcher-backend deepep",
    ):
        assert flag in finished.stderr, finished.stderr

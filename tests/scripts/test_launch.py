"""The launchers: variables become flags, dry runs validate, torchrun's ranks save on a signal and the exit code is theirs."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from commands import environment, read_metrics
from structure.source import ROOT
from train.tiny import MOCK, TINY

from scripts.pipeline_layout import layout
from scripts.torchrun import exit_code

SCRIPTS = ROOT / "scripts"
WRAPPERS = sorted(path.name for path in SCRIPTS.glob("train_*.sh"))
NAMES = ("MODEL", "TP", "PP", "EP", "CP", "ETP", "VPP", "NNODES", "PR", "DISPATCHER", "CLUSTER", "OUTPUT_PATH", "CUDA_DEVICE_MAX_CONNECTIONS")


def surroundings(**extra):
    env = environment(PYTHON=sys.executable, **extra)
    return {name: value for name, value in env.items() if name in extra or name not in NAMES}


def dry(script, cwd, *flags, code=0, **variables):
    done = subprocess.run(["bash", str(SCRIPTS / script), *flags], cwd=cwd, env=surroundings(DRY_RUN="1", **variables),
                          capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr
    return done


def flags_in(text):
    """The FLAGS of a job file, as bash reads them."""
    line = next(line for line in text.splitlines() if line.startswith("FLAGS="))
    return shlex.split(line.removeprefix("FLAGS=( ").removesuffix(" )"))


def value(flags, name):
    return flags[flags.index(name) + 1]


def test_the_zoos_line_is_a_valid_job_and_planned(tmp_path):
    done = dry("sbatch_train.sh", tmp_path, "--log-interval", "7", MODEL="DeepSeek-V3", TP="2", PP="8", EP="64", NNODES="128", PR="fp8",
               DISPATCHER="deepep", A2A_OVERLAP="1", RECOMPUTE="mla_up_proj mlp")
    flags = flags_in(done.stdout)
    for name, wanted in {"--preset": "DeepSeek-V3", "--tensor-model-parallel-size": "2", "--expert-model-parallel-size": "64",
                         "--expert-tensor-parallel-size": "1", "--fp8-recipe": "blockwise", "--moe-flex-dispatcher-backend": "deepep",
                         "--pipeline-model-parallel-layout": "Et|(tt|)*30mL", "--save": f"{tmp_path}/runs/DeepSeek-V3/checkpoints"}.items():
        assert value(flags, name) == wanted, name
    assert {"--sequence-parallel", "--overlap-moe-expert-parallel-comm", "--auto-resume", "--mock-data"} <= set(flags)
    assert flags[-2:] == ["--log-interval", "7"]  # extra flags come last and win
    for wanted in ("#SBATCH --nodes=128\n", "#SBATCH --ntasks-per-node=8\n", "#SBATCH --signal=USR1@120\n", "#SBATCH --requeue\n",
                   "CUDA_DEVICE_MAX_CONNECTIONS=32"):
        assert wanted in done.stdout
    assert "tokens/s/GPU" in done.stdout and "1024 x h100" in done.stdout
    assert "(command line)" in done.stdout and "(default)" not in done.stdout
    assert not (tmp_path / "runs").exists()  # a dry run leaves nothing behind


@pytest.mark.parametrize("words, wanted, mock", [
    ((), {}, True), (("--data-path", "text"), {}, False), (("--train-data-path=text", "--log-interval", "7"), {}, False),
    ((), {"DATA_PATH": "0.7 a 0.3 b"}, False)])
def test_mock_data_where_nothing_names_data_and_it_is_said(tmp_path, words, wanted, mock):
    done = dry("sbatch_train.sh", tmp_path, *words, MODEL="mixtral_tiny", HARDWARE="h200", VALIDATE="0", **wanted)
    flags = flags_in(done.stdout)
    assert ("--mock-data" in flags) == ("trains on mock data" in done.stdout) == mock
    if wanted:
        assert flags[flags.index("--data-path") + 1 :][:4] == ["0.7", "a", "0.3", "b"]


def test_the_quickstarts_help_touches_nothing(tmp_path):
    told = subprocess.run(["bash", str(SCRIPTS / "quickstart.sh"), "--help"], cwd=tmp_path, env=surroundings(RUN=str(tmp_path / "run")),
                          capture_output=True, text=True, check=True).stdout
    assert "TEXT=my.txt" in told and "set -euo" not in told and "[1/5]" not in told and not any(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["launch.sh", "sbatch_train.sh"])
def test_help_needs_no_model(script, tmp_path):
    told = dry(script, tmp_path, "--help").stdout
    assert "DRY_RUN=1" in told and "DISPATCHER" in told and "read_cluster" not in told


def test_what_does_not_run_is_not_submitted(tmp_path):
    done = dry("sbatch_train.sh", tmp_path, MODEL="mixtral_8x7b", TP="3", code=2)
    assert "--tensor-model-parallel-size 3" in done.stdout + done.stderr
    assert "MODEL is not set" in dry("sbatch_train.sh", tmp_path, code=2).stderr
    for script, name, given in (("launch.sh", "GPUS_PER_NODE", "x"), ("sbatch_train.sh", "NNODES", "0")):
        refusal = dry(script, tmp_path, code=2, MODEL="mixtral_8x7b", **{name: given}).stderr
        assert refusal == f"error: {name}={given}: a whole number above 0 is needed\n"
    assert "PR=fp9: one of bf16 fp8 mxfp8" in dry("sbatch_train.sh", tmp_path, MODEL="mixtral_8x7b", PR="fp9", code=2).stderr
    env = surroundings(MODEL="mixtral_8x7b", TP="3")
    submitted = subprocess.run(["bash", str(SCRIPTS / "sbatch_train.sh")], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert submitted.returncode == 2 and "--tensor-model-parallel-size 3" in submitted.stderr and not (tmp_path / "runs").exists()
    assert "CLUSTER=nowhere" in dry("sbatch_train.sh", tmp_path, MODEL="mixtral_8x7b", CLUSTER="nowhere", code=2).stderr


def test_a_plan_that_does_not_fit_is_an_error_of_its_own(tmp_path):
    for script in ("sbatch_train.sh", "launch.sh"):
        done = dry(script, tmp_path, MODEL="mixtral_8x7b", EP="8", code=3)
        assert "does not fit: stage 0 needs" in done.stdout and "8 x h100" in done.stdout
        assert "error: this run DOES NOT FIT the memory of its devices: stage 0 needs" in done.stderr
    done = dry("launch.sh", tmp_path, MODEL="mixtral_8x7b", EP="8", HARDWARE="gb300")
    assert "fits: the fullest device" in done.stdout and "8 x gb300" in done.stdout and done.stderr == ""
    assert "there are a100" in dry("launch.sh", tmp_path, MODEL="mixtral_8x7b", EP="8", HARDWARE="b3000", code=2).stderr


def test_a_cluster_file_fills_in_and_the_caller_wins(tmp_path):
    cluster = tmp_path / "cluster.conf"
    cluster.write_text("ACCOUNT=ours\nPARTITION=slow\nGPUS_PER_NODE=4\nCONTAINER_IMAGE=/images/torch.sqsh\nCONTAINER_MOUNTS=/data:/data\n"
                       "MODULES='cuda gcc'\nSBATCH_OPTIONS=(--mem=0 '--comment=two words')\nENVIRONMENT=('A=x y' NCCL_DEBUG=INFO)\n")
    done = dry("sbatch_train.sh", tmp_path, MODEL="mixtral_8x7b", EP="8", NNODES="2", CLUSTER=str(cluster), PARTITION="fast", OUTPUT_PATH="out",
               HARDWARE="gb300")
    for wanted in ("--account=ours", "--partition=fast", "--ntasks-per-node=4", "--mem=0", '#SBATCH "--comment=two words"\n',
                   "--container-image=/images/torch.sqsh", "MODULES=cuda\\ gcc", "A=x\\ y", "NCCL_DEBUG=INFO", "PYTHON=" + sys.executable):
        assert wanted in done.stdout, wanted
    assert f":{tmp_path}/out\\,/data:/data" in done.stdout


def test_arrays_dependencies_and_requeueing_are_sbatchs(tmp_path):
    done = dry("sbatch_train.sh", tmp_path, MODEL="mixtral_8x7b", EP="8", ARRAY="5", DEPENDENCY="afterok:12", SIGNAL_SECONDS="300",
               RUN_TIME="1:00:00", GB200_CLUSTER="1", NNODES="2", SEGMENT="2", HARDWARE="gb200")
    for wanted in ("--array=1-5%1", "--dependency=afterok:12", "--signal=USR1@300", "--time=1:00:00", "--ntasks-per-node=4", "--segment=2"):
        assert f"#SBATCH {wanted}\n" in done.stdout, wanted


@pytest.mark.parametrize("name", WRAPPERS)
def test_every_wrapper_is_valid_as_it_stands(tmp_path, name):
    done = dry(name, tmp_path)
    assert f"--preset {name.removeprefix('train_').removesuffix('.sh')}" in done.stdout


def test_every_preset_has_a_wrapper():
    presets = {path.stem for path in (ROOT / "model_zoo").glob("*.yaml")}
    assert {name.removeprefix("train_").removesuffix(".sh") for name in WRAPPERS} == presets


def test_layouts_hold_every_layer_once():
    assert layout(61, 1, 8, None, True) == "Et|(tt|)*30mL"
    assert layout(32, 0, 8, None, False) is layout(32, 0, 4, 8, True) is None  # an even split does
    assert layout(7, 0, 2, None, False) == "Etttt|tttL"
    assert layout(7, 0, 2, 2, False) == "Ett|(tt|)*2tL"


def test_the_exit_code_is_the_ranks():
    assert exit_code({75}) == exit_code({75, -15}) == 75
    assert exit_code({75, 1}) == 1
    assert exit_code({-9, 3}) == 3
    assert exit_code({-9}) == exit_code({-9, -15}) == 137
    assert exit_code({-15}) == 143


def test_the_shell_scripts_are_clean():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", *map(str, sorted(SCRIPTS.glob("*.sh")))], capture_output=True, text=True, check=False)
    assert done.stdout == ""


def test_torchruns_ranks_save_and_the_same_command_goes_on(tmp_path):
    """SIGTERM to the launcher: both ranks save together, exit code 75; then the same command does the rest."""
    recipe = tmp_path / "tiny.yaml"
    line = [*TINY, *MOCK, "--train-iters", "100000", "--lr-decay-iters", "100", "--save-interval", "100000", "--distributed-backend", "gloo"]
    recipe.write_text("MODEL_ARGS:\n  --num-layers: 2\n")
    env = surroundings(MODEL=str(recipe), GPUS_PER_NODE="2", OUTPUT_PATH=str(tmp_path / "out"), BIND="none")
    metrics = tmp_path / "out" / "checkpoints" / "metrics.jsonl"
    launcher = subprocess.Popen(["bash", str(SCRIPTS / "launch.sh"), *line], cwd=tmp_path, env=env, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.stat().st_size) and launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(launcher.pid, signal.SIGTERM)
    output, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == 75, output[-3000:]
    done = len(read_metrics(metrics))
    assert "receiving SIGUSR1" in output
    again = subprocess.run(["bash", str(SCRIPTS / "launch.sh"), *line, "--exit-interval", str(done + 1)], cwd=tmp_path, env=env,
                           capture_output=True, text=True, timeout=600, check=False)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert [record["iteration"] for record in read_metrics(metrics)] == list(range(1, done + 2))
    assert len(list((tmp_path / "out" / "logs").rglob("std*.log"))) >= 4

"""The launchers: variables become flags, dry runs validate, ranks save on a signal, and their exit code is returned."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import environment, read_metrics
from harness import wait_until
from structure.source import ROOT
from training.tiny import MOCK, TINY

from scripts.launch_fixes import flags_to_variables
from scripts.pipeline_layout import make_layout
from scripts.torchrun import exit_code, get_error_message

SCRIPTS = ROOT / "scripts"
LONG = "_256k"
WRAPPERS = sorted(path.name for path in SCRIPTS.glob("train_*.sh"))
NAMES = {
    "MODEL",
    "CLUSTER",
    "WORKSPACE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "MEGATRON_PATH",
    "WANDB_API_KEY",
    "TRITON_CACHE_DIR",
    *(SCRIPTS / "launch_flags.sh").read_text().partition('VARIABLES="')[2].partition('"')[0].split(),
} - {"PYTHON"}


def make_environment(**extra):
    env = environment(PYTHON=sys.executable, **extra)
    return {name: value for name, value in env.items() if name in extra or name not in NAMES}


def dry_run(script, cwd, *flags, code=0, **variables):
    done = subprocess.run(
        ["bash", str(SCRIPTS / script), *flags],
        cwd=cwd,
        env=make_environment(DRY_RUN="1", **variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr
    return done


def flags_in(text):
    """The FLAGS of a job file, split like bash does."""
    line = next(line for line in text.splitlines() if line.startswith("FLAGS="))
    return shlex.split(line.removeprefix("FLAGS=( ").removesuffix(" )"))


def value(flags, name):
    return flags[flags.index(name) + 1]


def test_model_zoo_variables_give_a_valid_planned_job(tmp_path):
    done = dry_run(
        "sbatch_train.sh",
        tmp_path,
        "--log-interval",
        "7",
        MODEL="DeepSeek-V3",
        TP="2",
        PP="8",
        EP="64",
        NNODES="128",
        PR="fp8",
        DISPATCHER="deepep",
        A2A_OVERLAP="1",
        RECOMPUTE="mla_up_proj mlp",
    )
    flags = flags_in(done.stdout)
    for name, wanted in {
        "--preset": "DeepSeek-V3",
        "--tensor-model-parallel-size": "2",
        "--expert-model-parallel-size": "64",
        "--expert-tensor-parallel-size": "1",
        "--fp8-recipe": "blockwise",
        "--moe-flex-dispatcher-backend": "deepep",
        "--pipeline-model-parallel-layout": "Et|(tt|)*30mL",
        "--save": f"{tmp_path}/runs/DeepSeek-V3/checkpoints",
    }.items():
        assert value(flags, name) == wanted, name
    assert {"--sequence-parallel", "--overlap-moe-expert-parallel-comm", "--auto-resume", "--mock-data"} <= set(flags)
    assert flags[-2:] == ["--log-interval", "7"]  # extra flags come last and win
    for wanted in (
        "#SBATCH --nodes=128\n",
        "#SBATCH --ntasks-per-node=8\n",
        "#SBATCH --signal=USR1@120\n",
        "#SBATCH --requeue\n",
        "CUDA_DEVICE_MAX_CONNECTIONS=32",
    ):
        assert wanted in done.stdout
    assert "tokens/s/GPU" in done.stdout and "1024 x h100" in done.stdout
    assert "(command line)" in done.stdout and "(default)" not in done.stdout
    assert not (tmp_path / "runs").exists()  # a dry run leaves nothing behind


@pytest.mark.parametrize(
    "words, wanted, mock",
    [
        ((), {}, True),
        (("--data-path", "text"), {}, False),
        (("--train-data-path=text", "--log-interval", "7"), {}, False),
        ((), {"DATA_PATH": "0.7 a 0.3 b"}, False),
    ],
)
def test_mock_data_is_used_and_noted_without_a_data_path(tmp_path, words, wanted, mock):
    done = dry_run("sbatch_train.sh", tmp_path, *words, MODEL="mixtral_tiny", HARDWARE="h200", VALIDATE="0", **wanted)
    flags = flags_in(done.stdout)
    assert ("--mock-data" in flags) == ("trains on mock data" in done.stdout) == mock
    if wanted:
        assert flags[flags.index("--data-path") + 1 :][:4] == ["0.7", "a", "0.3", "b"]


def test_quickstart_help_writes_no_files(tmp_path):
    stdout = subprocess.run(
        ["bash", str(SCRIPTS / "quickstart.sh"), "--help"],
        cwd=tmp_path,
        env=make_environment(RUN=str(tmp_path / "run")),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert (
        "TEXT=my.txt" in stdout and "set -euo" not in stdout and "[1/5]" not in stdout and not any(tmp_path.iterdir())
    )


@pytest.mark.parametrize("script", ["launch.sh", "sbatch_train.sh"])
def test_launcher_help_needs_no_model(script, tmp_path):
    stdout = dry_run(script, tmp_path, "--help").stdout
    assert "DRY_RUN=1" in stdout and "DISPATCHER" in stdout and "read_cluster" not in stdout


def test_invalid_job_is_not_submitted(tmp_path):
    done = dry_run("sbatch_train.sh", tmp_path, MODEL="mixtral_8x7b", TP="3", code=2)
    assert "--tensor-model-parallel-size 3" in done.stdout + done.stderr
    assert "MODEL is not set" in dry_run("sbatch_train.sh", tmp_path, code=2).stderr
    for script, name, value in (("launch.sh", "GPUS_PER_NODE", "x"), ("sbatch_train.sh", "NNODES", "0")):
        refusal = dry_run(script, tmp_path, code=2, MODEL="mixtral_8x7b", **{name: value}).stderr
        assert refusal == f"error: {name}={value}: a positive integer is needed\n"
    assert (
        "PR=fp9: one of bf16 fp8 mxfp8"
        in dry_run("sbatch_train.sh", tmp_path, MODEL="mixtral_8x7b", PR="fp9", code=2).stderr
    )
    sbatch = tmp_path / "bin" / "sbatch"  # the script looks for it first
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\ntouch submitted\n")
    sbatch.chmod(0o755)
    env = make_environment(MODEL="mixtral_8x7b", TP="3")
    env["PATH"] = f"{sbatch.parent}:{env['PATH']}"
    submitted = subprocess.run(
        ["bash", str(SCRIPTS / "sbatch_train.sh")], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert (
        submitted.returncode == 2
        and "--tensor-model-parallel-size 3" in submitted.stderr
        and not (tmp_path / "runs").exists()
        and not (tmp_path / "submitted").exists()
    )
    assert (
        "CLUSTER=nowhere"
        in dry_run("sbatch_train.sh", tmp_path, MODEL="mixtral_8x7b", CLUSTER="nowhere", code=2).stderr
    )


def test_plan_that_does_not_fit_exits_with_3_and_suggests_changes(tmp_path):
    for script in ("sbatch_train.sh", "launch.sh"):
        done = dry_run(script, tmp_path, MODEL="mixtral_8x7b", EP="8", PP="1", NNODES="1", code=3)
        assert "does not fit: stage 0 needs" in done.stdout and "8 x h100" in done.stdout
        assert "error: this run DOES NOT FIT the memory of its devices: stage 0 needs" in done.stderr
        assert "cheapest changes that fit:" in done.stderr
        changes = [line.split(": fits ")[0] for line in done.stderr.splitlines() if ": fits with" in line]
        assert changes
        assert not [
            line for line in changes if "--micro-batch" in line or "parallel-size" in line or "--recompute" in line
        ]
    dry_run("launch.sh", tmp_path, "--report", "own.json", MODEL="mixtral_8x7b", EP="8", PP="1", NNODES="1", code=3)
    assert json.loads((tmp_path / "own.json").read_text())["fits"] is False
    done = dry_run("launch.sh", tmp_path, MODEL="mixtral_8x7b", EP="8", PP="1", NNODES="1", HARDWARE="gb300")
    assert "fits: the fullest device" in done.stdout and "8 x gb300" in done.stdout and done.stderr == ""
    assert (
        "there are a100"
        in dry_run("launch.sh", tmp_path, MODEL="mixtral_8x7b", EP="8", HARDWARE="b3000", code=2).stderr
    )


@pytest.mark.parametrize(
    "flags, variables",
    [
        ("--micro-batch-size 1 --world-size 20", "MBS=1 NNODES=3"),
        ("--tensor-model-parallel-size 4 --sequence-parallel --expert-tensor-parallel-size 1", "TP=4 ETP=1"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tL", "PP=2 LAYOUT='Et|tL'"),
        (
            "--recompute-granularity selective --recompute-modules mlp moe_act --optimizer-cpu-offload",
            "RECOMPUTE='mlp moe_act' and flags --optimizer-cpu-offload",
        ),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "RECOMPUTE=full"),
        ("--offload-modules a b", "flags --offload-modules a b"),
    ],
)
def test_suggested_flags_are_printed_as_variables(flags, variables):
    assert flags_to_variables(flags.split(), 8) == variables


def test_cluster_file_sets_defaults_that_the_caller_overrides(tmp_path):
    cluster = tmp_path / "cluster.conf"
    cluster.write_text(
        "ACCOUNT=ours\nPARTITION=slow\nGPUS_PER_NODE=4\nCONTAINER_IMAGE=/images/torch.sqsh\nCONTAINER_MOUNTS=/data:/data\n"
        "MODULES='cuda gcc'\nSBATCH_OPTIONS=(--mem=0 '--comment=two words')\nENVIRONMENT=('A=x y' NCCL_DEBUG=INFO)\n"
    )
    done = dry_run(
        "sbatch_train.sh",
        tmp_path,
        MODEL="mixtral_8x7b",
        EP="8",
        PP="1",
        NNODES="2",
        CLUSTER=str(cluster),
        PARTITION="fast",
        OUTPUT_PATH="out",
        HARDWARE="gb300",
    )
    for wanted in (
        "--account=ours",
        "--partition=fast",
        "--ntasks-per-node=4",
        "--mem=0",
        '#SBATCH "--comment=two words"\n',
        "--container-image=/images/torch.sqsh",
        "MODULES=cuda\\ gcc",
        "A=x\\ y",
        "NCCL_DEBUG=INFO",
        "PYTHON=" + sys.executable,
    ):
        assert wanted in done.stdout, wanted
    assert f":{tmp_path}/out\\,/data:/data" in done.stdout


def test_dry_run_checks_data_files(tmp_path):
    env_vars = dict(MODEL="qwen3_tiny", GPUS_PER_NODE="2", EP="2", DATA_PATH=str(tmp_path / "none_text_document"))
    done = dry_run("launch.sh", tmp_path, code=2, **env_vars)
    assert "none_text_document" in done.stderr
    assert "2 x h100" in dry_run("launch.sh", tmp_path, CHECK_FILES="0", **env_vars).stdout
    assert (
        "can be written" not in dry_run("launch.sh", tmp_path, **{**env_vars, "DATA_PATH": ""}).stdout
    )  # nothing is named: a plan may be another machine's


ZOO_BARE = {
    "Mixtral-8x2B": "tp=1 pp=1 ep=8 mbs=2 gbs=256 nodes=8",
    "Mixtral-8x7B": "tp=1 pp=4 ep=8 vpp=8 mbs=1 gbs=256 nodes=8",
    "Mixtral-8x22B": "tp=2 pp=8 ep=8 vpp=7 mbs=1 gbs=256 nodes=16",
    "DeepSeek-V2": "tp=1 pp=16 ep=8 first=2 last=2 vpp=2 mbs=1 gbs=1024 nodes=32",
    "DeepSeek-V2-Lite": "tp=1 pp=1 ep=8 mbs=1 gbs=512 nodes=1",
    "DeepSeek-V3": "tp=1 pp=16 ep=64 first=4 last=1 mbs=1 gbs=8192 nodes=128",
    "DeepSeek-V3-Proxy": "tp=1 pp=4 ep=16 first=2 last=2 mbs=1 gbs=512 nodes=8",
    "Qwen2-57B-A14B": "tp=2 pp=4 ep=4 vpp=7 mbs=1 gbs=256 nodes=8",
    "Qwen3-235B-A22B": "tp=2 pp=8 ep=32 layout=Ett|(ttt|)*30ttL mbs=1 gbs=256 nodes=32",
    "Qwen3-30B-A3B": "tp=1 pp=1 ep=8 mbs=1 gbs=256 nodes=4",
    "Qwen3-Next-80B-A3B": "tp=1 pp=4 ep=8 vpp=3 mbs=1 gbs=256 nodes=8",
    "Kimi-K2": "tp=1 pp=4 ep=64 layout=Ettt|ttt|(tttt|)*13tttL mbs=1 gbs=128 nodes=32",
}
SHORT = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--expert-model-parallel-size": "ep",
    "--num-virtual-stages-per-pipeline-rank": "vpp",
    "--decoder-first-pipeline-num-layers": "first",
    "--decoder-last-pipeline-num-layers": "last",
    "--pipeline-model-parallel-layout": "layout",
    "--micro-batch-size": "mbs",
    "--global-batch-size": "gbs",
}


@pytest.mark.parametrize("model", ZOO_BARE)
def test_model_name_alone_gives_the_mapping_of_the_model_zoo(tmp_path, model):
    done = dry_run("sbatch_train.sh", tmp_path, MODEL=model, VALIDATE="0")
    flags = flags_in(done.stdout)
    found = [f"{SHORT[name]}={flags[index + 1]}" for index, name in enumerate(flags) if name in SHORT]
    (nodes,) = re.findall(r"^#SBATCH --nodes=(\d+)$", done.stdout, re.MULTILINE)
    assert " ".join([*found, f"nodes={nodes}"]) == ZOO_BARE[model]
    assert value(flags, "--moe-flex-dispatcher-backend") == "deepep" and "--seq-length" not in flags
    assert f"note: the model zoo's defaults for {model}: TP=" in done.stdout


def test_model_zoo_defaults_have_the_lowest_precedence(tmp_path):
    cluster = tmp_path / "cluster.conf"
    cluster.write_text("NNODES=2 PP=2\n")
    flags = flags_in(
        dry_run("launch.sh", tmp_path, MODEL="Mixtral-8x7B", CLUSTER=str(cluster), PP="1", VALIDATE="0").stdout.replace(
            "command: ", "FLAGS="
        )
    )
    assert value(flags, "--pipeline-model-parallel-size") == "1" and value(flags, "--nnodes") == "2"
    assert "--num-virtual-stages-per-pipeline-rank" not in flags  # the zoo's VPP goes with its PP
    assert value(flags, "--moe-token-dispatcher-type") == "alltoall"  # the other launcher of the zoo takes its table's
    env = make_environment(MODEL="Mixtral-8x7B", VALIDATE="0")
    several = subprocess.run(
        ["bash", str(SCRIPTS / "launch.sh")], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert (
        several.returncode == 2
        and "NNODES=8, the default of the model zoo for Mixtral-8x7B, needs NODE_RANK" in several.stderr
    )


@pytest.mark.parametrize(
    "variables, words, wanted",
    [
        (dict(VPP="4", PP_LAST="2"), ("--pipeline-model-parallel-layout", "Et|(tt|)*30mL"), []),
        (dict(VPP="4", LAYOUT="Et|(tt|)*30mL"), (), ["--pipeline-model-parallel-layout"]),
        (
            dict(VPP="1", LAYERS_PER_VP="false", PP_FIRST="false", PP_LAST="false"),
            (),
            ["--pipeline-model-parallel-layout"],
        ),
        (
            dict(PP_FIRST="7", PP_LAST="6"),
            (),
            ["--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"],
        ),
        (dict(LAYERS_PER_VP="2"), (), ["--num-layers-per-virtual-pipeline-stage"]),
        (dict(VPP="4"), ("--num-layers-per-virtual-pipeline-stage", "2"), []),
    ],
)
def test_pipeline_stages_are_set_by_one_flag(tmp_path, variables, words, wanted):
    done = dry_run("sbatch_train.sh", tmp_path, *words, MODEL="DeepSeek-V3", PP="8", EP="32", VALIDATE="0", **variables)
    flags = flags_in(done.stdout)
    about = ("--num-virtual", "--num-layers-per", "--pipeline-model-parallel-layout", "--decoder-")
    assert [flag for flag in flags[: len(flags) - len(words)] if flag.startswith(about)] == wanted
    notes = ["VPP=4 has no effect"] if "Et|(tt|)*30mL" in (*words, variables.get("LAYOUT")) else []
    assert re.findall(r"VPP=\d has no effect", done.stdout) == notes


def test_invalid_flag_gives_no_second_error_about_the_layout(tmp_path):
    """94 layers over 8 stages need the launcher's own layout, also if another flag is invalid."""
    done = dry_run(
        "sbatch_train.sh",
        tmp_path,
        "--cuda-graph-warmup-steps",
        "x",
        MODEL="Qwen3-235B-A22B",
        TP="2",
        PP="8",
        VPP="4",
        EP="32",
        NNODES="32",
        code=2,
    )
    assert "1 problem" in done.stdout and "--num-layers" not in done.stderr


def test_named_cluster_file_in_the_format_of_the_model_zoo(tmp_path):
    """cluster_configs/benchmarking/NAME.conf reads the defaults and finds the data by DATASET; the caller overrides it."""
    folder = tmp_path / "cluster_configs" / "benchmarking"
    folder.mkdir(parents=True)
    (folder / "OURS.conf").write_text("""export ACCOUNT=${ACCOUNT:-"them"}
export PARTITION=${PARTITION:-"batch"}
export OUTPUT_PATH=${OUTPUT_PATH:-"/results/${MODEL}-TP${TP}PP${PP}EP${EP}VPP${VPP}-MBS${MBS}GBS${GBS}"}
declare -A DATA_PATHS=(["Pile:Mixtral-8x7B"]="/data/pile_text_document")
""")
    env_vars = dict(MODEL="Mixtral-8x7B", CLUSTER="OURS", VALIDATE="0", ACCOUNT="us", PARTITION="")
    done = dry_run(
        "sbatch_train.sh",
        tmp_path,
        DATASET="Pile",
        RUN_NAME="baseline",
        COMMENT="v1",
        MEGATRON_PATH="/opt/megatron",
        **env_vars,
    )
    flags = flags_in(done.stdout)
    assert value(flags, "--save") == "/results/Mixtral-8x7B-TP1PP4EP8VPP8-MBS1GBS256/checkpoints"
    assert value(flags, "--data-path") == "/data/pile_text_document" and "--mock-data" not in flags
    for wanted in ("--account=us", "--partition=batch", "--job-name=moe-baseline", "--comment=v1"):
        assert f"#SBATCH {wanted}\n" in done.stdout, wanted
    assert "note: MEGATRON_PATH=/opt/megatron has no effect" in done.stdout
    assert "DATASET=Dolma: neither" in dry_run("sbatch_train.sh", tmp_path, DATASET="Dolma", code=2, **env_vars).stderr
    assert (
        "no THEIRS.conf in cluster_configs"
        in dry_run("sbatch_train.sh", tmp_path, code=2, **{**env_vars, "CLUSTER": "THEIRS"}).stderr
    )


ZOO_FILE = """ENV_VARS:
  TRITON_CACHE_DIR: /tmp/triton_cache_$SLURM_NODEID
MODEL_ARGS:
  --tensor-model-parallel-size: ${TP}
  --pipeline-model-parallel-size: ${PP}
  --num-layers-per-virtual-pipeline-stage: ${LAYERS_PER_VP}
  --expert-model-parallel-size: ${EP}
  --context-parallel-size: ${CP}
  --micro-batch-size: ${MBS}
  --global-batch-size: ${GBS}
  --train-samples: 1000
  --eval-interval: 100
  --save-interval: 100
  --data-cache-path: ${WORKSPACE}/data_cache
  --tokenizer-type: NullTokenizer
  --vocab-size: 31999
  --data-path: ${DATA_PATH}
  --num-layers: 32
  --hidden-size: 256
  --num-attention-heads: 8
  --seq-length: ${SEQ_LEN}
  --max-position-embeddings: 4096
  --lr: 1e-4
  --num-experts: 8
  --moe-router-topk: 2
  --moe-grouped-gemm: ${MOE_GROUPED_GEMM}
  --moe-token-dispatcher-type: ${MOE_TOKEN_DISPATCHER}
  --load: ${LOAD_PATH}
  --use-distributed-optimizer: true
  --wandb-project: ${WANDB_PROJECT}
  --wandb-exp-name: Mixtral-8x7B-TP${TP}-${COMMENT}
  --bf16: true
"""


def test_model_zoo_recipe_reads_the_variables_of_the_launcher(tmp_path):
    recipe = tmp_path / "Mixtral-8x7B.yaml"
    recipe.write_text(ZOO_FILE)
    done = dry_run(
        "sbatch_train.sh",
        tmp_path,
        "--log-interval",
        "7",
        TRAINING_PARAMS_PATH=str(recipe),
        TRAINING_PARAMS="--lr 2e-4 --min-lr 1e-5",
        WANDB_PROJECT="ours",
        HARDWARE="b200",
    )
    flags = flags_in(done.stdout)
    assert value(flags, "--preset") == str(recipe) and flags[-6:] == [
        "--lr",
        "2e-4",
        "--min-lr",
        "1e-5",
        "--log-interval",
        "7",
    ]
    exports = done.stdout.partition("EXPORTS=(")[2].partition("\n")[0].split()
    assert {
        "TP=1",
        "PP=4",
        "EP=8",
        "LAYERS_PER_VP=1",
        "SEQ_LEN=4096",
        "DATA_PATH=",
        "WANDB_PROJECT=",
        f"WORKSPACE={tmp_path}",
    } <= set(exports)
    assert "--num-virtual-stages-per-pipeline-rank" not in flags  # the file sets it
    assert "valid for 64 ranks" in done.stdout and "64 x b200" in done.stdout
    assert "WANDB_PROJECT=ours has no effect" in done.stdout
    missing = dry_run("launch.sh", tmp_path, TRAINING_PARAMS_PATH=str(tmp_path / "none.yaml"), code=2)
    assert missing.stderr == f"error: the recipe {tmp_path}/none.yaml: there is no such file\n"


@pytest.mark.parametrize("flag", ["--num-layers", "--max-position-embeddings"])
def test_recipe_values_are_not_executed_by_bash_arithmetic(tmp_path, flag):
    """Bash executes a command in an array index inside $(( )) and [ -gt ]."""
    lines = [line for line in ZOO_FILE.splitlines() if not line.startswith(f"  {flag}:")]
    (tmp_path / "zoo.yaml").write_text("\n".join([*lines, f"  {flag}: BASH_VERSINFO[$(>ran)]", ""]))
    env_vars = dict(TRAINING_PARAMS_PATH=str(tmp_path / "zoo.yaml"), VALIDATE="0", SEQ_LEN="512", PP="2", VPP="2")
    for script in ("launch.sh", "sbatch_train.sh"):
        done = subprocess.run(
            ["bash", str(SCRIPTS / script)],
            cwd=tmp_path,
            env=make_environment(DRY_RUN="1", **env_vars),
            capture_output=True,
            text=True,
        )
        assert (
            not (tmp_path / "ran").exists()
            and "syntax error" not in done.stderr
            and "integer expression" not in done.stderr
        )
        if flag == "--num-layers":
            assert done.returncode == 2 and "--num-layers BASH_VERSINFO[$(>ran)] is not an integer" in done.stderr
        else:
            assert done.returncode == 0 and "--max-position-embeddings 512" in done.stdout, done.stderr


def test_multiline_variables_and_a_recipe_in_another_folder(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/own.yaml").write_text(ZOO_FILE)
    done = dry_run(
        "launch.sh",
        tmp_path,
        TRAINING_PARAMS_PATH="recipes/own.yaml",
        VALIDATE="0",
        TRAINING_PARAMS="--lr 2e-4\n--min-lr\n1e-5\n",
        DATA_PATH="0.5 a\n0.5 b\n",
        RECOMPUTE="moe_act\nlayernorm",
        SEQ_LEN="512",
    )
    text = " ".join(done.stdout.partition("command: ")[2].split())
    assert f"--preset {tmp_path}/recipes/own.yaml " in text  # the ranks may start elsewhere
    assert "--max-position-embeddings" not in text  # the file has been read: it has more positions
    for wanted in ("--data-path 0.5 a 0.5 b --", "--recompute-modules moe_act layernorm --", "--lr 2e-4 --min-lr 1e-5"):
        assert wanted in text, wanted


def test_recipe_in_the_format_of_megatron_is_read(tmp_path):
    """The section is named ARGS, and names have underscores."""
    (tmp_path / "own.yaml").write_text(
        "ENV_VARS:\n  data_path: not a flag\nARGS:\n  num_layers: 4\n  max_position_embeddings: 4096\n"
        "  'data_path': somewhere  # else\n  moe_grouped_gemm: true\n"
    )
    done = dry_run(
        "launch.sh",
        tmp_path,
        TRAINING_PARAMS_PATH="own.yaml",
        VALIDATE="0",
        SEQ_LEN="512",
        MOE_GROUPED_GEMM="false",
        PP="2",
    )
    assert "--mock-data" not in done.stdout and "--max-position-embeddings" not in done.stdout
    assert "MOE_GROUPED_GEMM=false has no effect" in done.stdout


OWN_FILE = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: '32'
  PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True,graph_capture_record_stream_reuse:True
ARGS:
  num_layers: 61
  pipeline_model_parallel_size: 4
  micro_batch_size: 2
  moe_flex_dispatcher_backend: hybridep
"""


@pytest.mark.parametrize("script", ["launch.sh", "sbatch_train.sh"])
def test_a_recipe_file_wins_over_the_defaults_of_zoo_and_launcher(tmp_path, script):
    (tmp_path / "own.yaml").write_text(OWN_FILE)
    names = ("--pipeline-model-parallel-size", "--micro-batch-size", "--moe-flex-dispatcher-backend", "--decoder-first")
    for variables in ({"MODEL": "DeepSeek-V3", "TRAINING_PARAMS_PATH": "own.yaml"}, {"MODEL": "./own.yaml"}):
        text = dry_run(script, tmp_path, VALIDATE="0", NNODES="64", GB200_CLUSTER="1", **variables).stdout
        assert not any(name in text for name in names), text
        assert "CUDA_DEVICE_MAX_CONNECTIONS" not in text and "PYTORCH_CUDA_ALLOC_CONF" not in text
        assert "NCCL_GRAPH_REGISTER=0" in text  # not in the file
        asked = dry_run(
            script, tmp_path, VALIDATE="0", NNODES="64", PP="8", CUDA_DEVICE_MAX_CONNECTIONS="8", **variables
        )
        assert "--pipeline-model-parallel-size 8" in asked.stdout and "CUDA_DEVICE_MAX_CONNECTIONS=8" in asked.stdout


def test_other_model_zoo_variables_have_their_effect(tmp_path):
    def dry_run_flags(script="sbatch_train.sh", **variables):
        done = dry_run(script, tmp_path, VALIDATE="0", **{"MODEL": "qwen3_30b_a3b", **variables})
        return flags_in(
            done.stdout.replace("command: ", "FLAGS=") if script == "launch.sh" else done.stdout
        ), done.stdout

    flags, text = dry_run_flags(
        MOE_TOKEN_DISPATCHER="alltoall",
        MOE_GROUPED_GEMM="true",
        SEQ_LEN="4096",
        DATA_PATH="mock",
        TOKENIZER_MODEL="mock",
        LOAD_PATH="/weights",
        PRETRAIN="1",
    )
    assert value(flags, "--moe-token-dispatcher-type") == "alltoall" and "--moe-grouped-gemm" in flags
    assert value(flags, "--seq-length") == "4096" and "--max-position-embeddings" not in flags  # raised, not lowered
    assert (
        "--mock-data" in flags
        and "--tokenizer-model" not in flags
        and "--load" not in flags
        and "names data" not in text
    )
    assert value(dry_run_flags(SEQ_LEN="131072")[0], "--max-position-embeddings") == "131072"
    assert "MOE_GROUPED_GEMM=false has no effect" in dry_run_flags(MOE_GROUPED_GEMM="false")[1]
    flags, text = dry_run_flags(
        PR="mxfp8", OPTIMIZER_OFFLOAD="1", WANDB_API_KEY="secret", WANDB_PROJECT="ours", COMMENT="first", PROFILE="nsys"
    )
    assert "--fp8-param-gather" not in flags and value(flags, "--wandb-project") == "ours" and "--nvtx-ranges" in flags
    assert value(flags, "--wandb-exp-name") == "qwen3_30b_a3b-TP1PP1EP8CP1VPP1-MBS1GBS256-first"
    assert (
        "WANDB_MODE=online" in text
        and "secret" not in text
        and f"NSYS_OUTPUT={tmp_path}/runs/qwen3_30b_a3b/nsys/qwen3_30b_a3b-" in text
    )
    program = tmp_path / "mine.py"
    program.touch()
    for script in ("sbatch_train.sh", "launch.sh"):
        flags, text = dry_run_flags(script, GB200_CLUSTER="1", TRAINING_SCRIPT_PATH=str(program))
        assert f" -u {program} --preset" in text and "NVLINK_DOMAIN_SIZE=72" in text
        assert ("--ntasks-per-node=4" if script == "sbatch_train.sh" else "--nproc-per-node 4") in text
    assert (
        "TRAINING_SCRIPT_PATH=none.py"
        in dry_run("launch.sh", tmp_path, MODEL="qwen3_tiny", TRAINING_SCRIPT_PATH="none.py", code=2).stderr
    )
    assert "TP=x: a positive integer" in dry_run("launch.sh", tmp_path, MODEL="qwen3_tiny", TP="x", code=2).stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sbatch_train.sh", "launch.sh"])
def test_every_best_practice_line_of_the_model_zoo_fits(tmp_path, script):
    """Every line is valid, and its plan fits the hardware it was measured on."""
    lines = [
        line for line in Path(__file__).with_name("zoo_lines.txt").read_text().splitlines() if not line.startswith("#")
    ]
    assert len(lines) == 33
    codes = {}
    for line in lines:
        hardware, *words = shlex.split(line)  # (one layout comes in quotes)
        count = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
        env = make_environment(DRY_RUN="1", HARDWARE=hardware, **dict(word.split("=", 1) for word in words[:count]))
        codes[line] = subprocess.run(
            ["bash", str(SCRIPTS / script), *words[count:]], cwd=tmp_path, env=env, capture_output=True, check=False
        ).returncode
    assert {line: code for line, code in codes.items() if code != 0} == {}


def test_array_dependency_signal_and_segment_become_sbatch_options(tmp_path):
    done = dry_run(
        "sbatch_train.sh",
        tmp_path,
        MODEL="mixtral_8x7b",
        EP="8",
        PP="1",
        ARRAY="5",
        DEPENDENCY="afterok:12",
        SIGNAL_SECONDS="300",
        RUN_TIME="1:00:00",
        GB200_CLUSTER="1",
        NNODES="2",
        SEGMENT="2",
        HARDWARE="gb200",
    )
    for wanted in (
        "--array=1-5%1",
        "--dependency=afterok:12",
        "--signal=USR1@300",
        "--time=1:00:00",
        "--ntasks-per-node=4",
        "--segment=2",
    ):
        assert f"#SBATCH {wanted}\n" in done.stdout, wanted


@pytest.mark.parametrize("name", WRAPPERS)
def test_every_wrapper_script_is_valid_without_changes(tmp_path, name):
    done = dry_run(name, tmp_path)
    assert f"--preset {name.removeprefix('train_').removesuffix('.sh').removesuffix(LONG)} " in done.stdout
    assert ("--seq-length 262144 --max-position-embeddings 262144" in done.stdout) == (f"{LONG}.sh" in name)


def test_every_preset_has_a_wrapper_script():
    presets = {path.stem for path in (ROOT / "model_zoo").glob("*.yaml")}
    names = {name.removeprefix("train_").removesuffix(".sh") for name in WRAPPERS}
    assert {name for name in names if not name.endswith(LONG)} == presets
    assert {name.removesuffix(LONG) for name in names if name.endswith(LONG)} == {"deepseek_v3", "qwen3_235b_a22b"}


def test_launcher_layouts_contain_every_layer():
    assert make_layout(61, 1, 8, None, True) == "Et|(tt|)*30mL"
    assert make_layout(32, 0, 8, None, False) is make_layout(32, 0, 4, 8, True) is None  # an even split does
    assert make_layout(7, 0, 2, None, False) == "Etttt|tttL"
    assert make_layout(7, 0, 2, 2, False) == "Ett|(tt|)*2tL"


def test_exit_code_of_torchrun_is_that_of_the_ranks():
    assert exit_code({75}) == exit_code({75, -15}) == 75
    assert exit_code({75, 1}) == 1
    assert exit_code({-9, 3}) == 3
    assert exit_code({-9}) == exit_code({-9, -15}) == 137
    assert exit_code({-15}) == 143


def test_killed_rank_is_named_where_torchrun_ended_the_others():
    failures = {0: SimpleNamespace(exitcode=-15), 2: SimpleNamespace(exitcode=-9)}
    assert get_error_message(failures, 137) == "rank 2 was killed by SIGKILL"
    failures = {0: SimpleNamespace(exitcode=1, message=""), 1: SimpleNamespace(exitcode=127, message="")}
    assert get_error_message(failures, 1) is None  # 127 is an exit code, not a signal


def test_signal_for_torchrun_gives_an_exit_code_without_traceback(tmp_path):
    """SIGINT, which the terminal sends to torchrun and its ranks on Ctrl-C."""
    (tmp_path / "rank.py").write_text(
        "import pathlib, signal, time\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\npathlib.Path('ready').touch()\ntime.sleep(600)\n"
    )
    words = [sys.executable, str(SCRIPTS / "torchrun.py"), "--standalone", "--nproc-per-node", "1", "rank.py"]
    process = subprocess.Popen(
        words, cwd=tmp_path, env=make_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until((tmp_path / "ready").exists)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in err, err
    assert err.endswith("the run was terminated by SIGINT\n")


def test_shell_scripts_pass_shellcheck():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(
        ["shellcheck", *map(str, sorted(SCRIPTS.glob("*.sh")))], capture_output=True, text=True, check=False
    )
    assert done.stdout == ""


def test_sigterm_for_the_launcher_saves_and_the_same_command_resumes(tmp_path):
    """SIGTERM to the launcher: both ranks save, exit code 75; then the same command continues."""
    recipe = tmp_path / "tiny.yaml"
    line = [
        *TINY,
        *MOCK,
        "--train-iters",
        "100000",
        "--lr-decay-iters",
        "100",
        "--save-interval",
        "100000",
        "--distributed-backend",
        "gloo",
    ]
    recipe.write_text("MODEL_ARGS:\n  --num-layers: 2\n")
    env = make_environment(MODEL=str(recipe), GPUS_PER_NODE="2", OUTPUT_PATH=str(tmp_path / "out"), BIND="none")
    metrics = tmp_path / "out" / "checkpoints" / "metrics.jsonl"
    launcher = subprocess.Popen(
        ["bash", str(SCRIPTS / "launch.sh"), *line],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.stat().st_size) and launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(launcher.pid, signal.SIGTERM)
    output, _ = launcher.communicate(timeout=600)
    assert launcher.returncode == 75, output[-3000:]
    done = len(read_metrics(metrics))
    assert "receiving SIGUSR1" in output
    again = subprocess.run(
        ["bash", str(SCRIPTS / "launch.sh"), *line, "--exit-interval", str(done + 1)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert [record["iteration"] for record in read_metrics(metrics)] == list(range(1, done + 2))
    assert len(list((tmp_path / "out" / "logs").rglob("std*.log"))) >= 4

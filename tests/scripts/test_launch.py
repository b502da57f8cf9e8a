"""The launchers: variables become flags, dry runs validate, ranks save on a signal, and their exit code is returned."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import commands
import pytest
import yaml
from commands import environment, read_metrics
from harness import wait_until
from structure.source import ROOT
from training.tiny import MOCK, TINY

from arguments.mechanisms.dispatchers import SELECTABLE
from moe_trainer.commands import launch as launch_command
from moe_trainer.estimate.dry_run import run_dry_run
from moe_trainer.launch.launch_fixes import flags_to_variables
from moe_trainer.launch.pipeline_layout import make_layout
from moe_trainer.launch.torchrun import exit_code, get_error_message

SCRIPTS, LAUNCH = ROOT / "scripts", ROOT / "moe_trainer/launch"
SECTIONS = [
    (path.stem, name.removeprefix("launch").removeprefix("_"))
    for path in sorted((ROOT / "model_zoo").glob("*.yaml"))
    for name in yaml.safe_load(path.read_text())
    if name.startswith("launch")
]
NAMES = {
    "MODEL",
    "VARIANT",
    "CLUSTER",
    "WORKSPACE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "MEGATRON_PATH",
    "WANDB_API_KEY",
    "TRITON_CACHE_DIR",
    *(LAUNCH / "launch_flags.sh").read_text().partition('VARIABLES="')[2].partition('"')[0].split(),
} - {"PYTHON"}


def launch(script, cwd, flags="", variables="", act=lambda process: None):
    """Run a script with flags and variables as they would be typed, without those of the caller. Meanwhile, act."""
    extra = dict(word.split("=", 1) for word in shlex.split(variables))
    env = environment(**{"PYTHON": sys.executable, **extra})
    env = {name: value for name, value in env.items() if name in extra or name not in NAMES}
    command = ["bash", str(SCRIPTS / script), *shlex.split(flags)]
    with subprocess.Popen(command, cwd=cwd, env=env, stdout=PIPE, stderr=PIPE, text=True) as process:
        try:
            act(process)
            output = process.communicate(timeout=600)
        finally:
            process.kill()
    return commands.Finished(process.returncode, *output)


def dry_run(script, cwd, flags="", variables="", code=0):
    """Dry run of a launcher. Where it must succeed, the trainer validates and plans in forks of this process."""
    if code != 0:
        done = launch(script, cwd, flags, f"DRY_RUN=1 {variables}")
        assert done.returncode == code, done.stdout[-2000:] + done.stderr
        return done
    with tempfile.TemporaryDirectory() as folder:
        python, asked, exported = (Path(folder, name) for name in ("python", "asked", "exported"))
        python.write_text(
            "#!/bin/bash\n"
            f'if [[ $1 == */pretrain_moe.py ]]; then shift; echo "${{@@Q}}" >>{asked}; env -0 >{exported}; exit; fi\n'
            f'exec {sys.executable} "$@"\n'
        )
        python.chmod(0o755)
        own = f"DRY_RUN=1 PYTHON={python} TMPDIR={folder} {variables}"
        parts = [launch(script, cwd, flags, own)]
        for words in asked.read_text().splitlines() if asked.exists() else ():
            env = dict(word.split("=", 1) for word in exported.read_text().rstrip("\0").split("\0"))
            del env["OMP_NUM_THREADS"]  # which `run` sets
            parts.append(commands.run(shlex.split(words), cwd, **env))
    assert [part.returncode for part in parts] == [0] * len(parts), [
        part.stdout[-2000:] + part.stderr for part in parts
    ]
    output, error = ("".join(getattr(part, name) for part in parts) for name in ("stdout", "stderr"))
    return commands.Finished(0, output.replace(str(python), sys.executable), error)


def flags_in(text):
    """The flags of a job file or of the command of launch.sh, split like bash does."""
    line = next(line for line in text.splitlines() if line.startswith(("FLAGS=", "command: ")))
    return shlex.split(line.removeprefix("FLAGS=( ").removeprefix("command: ").removesuffix(" )"))


def trainer_flags(text):
    """As flags_in, without the command of launch.sh before them."""
    words, program = flags_in(text), str(ROOT / "pretrain_moe.py")
    return words[words.index(program) + 1 :] if program in words else words


def value(flags, name):
    return flags[flags.index(name) + 1]


def test_model_zoo_variables_give_a_valid_planned_job(tmp_path):
    settings = "MODEL=DeepSeek-V3 TP=2 PP=8 EP=64 NNODES=128 PR=fp8 DISPATCHER=deepep A2A_OVERLAP=1"
    done = dry_run("sbatch_train.sh", tmp_path, "--log-interval 7", f"{settings} RECOMPUTE='mla_up_proj mlp'")
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
    for wanted in ("--nodes=128", "--ntasks-per-node=8", "--signal=USR1@120", "--requeue"):
        assert f"#SBATCH {wanted}\n" in done.stdout
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32" in done.stdout
    assert "tokens/s/GPU" in done.stdout and "1024 x h100" in done.stdout
    assert "(command line)" in done.stdout and "(default)" not in done.stdout
    assert not (tmp_path / "runs").exists()  # a dry run leaves nothing behind


@pytest.mark.parametrize(
    "words, variables, mock",
    [
        ("", "", True),
        ("--data-path text", "", False),
        ("--train-data-path=text --log-interval 7", "", False),
        ("", "DATA_PATH='0.7 a 0.3 b'", False),
    ],
)
def test_mock_data_is_used_and_noted_without_a_data_path(tmp_path, words, variables, mock):
    done = dry_run("sbatch_train.sh", tmp_path, words, f"MODEL=mixtral_tiny HARDWARE=h200 VALIDATE=0 {variables}")
    flags = flags_in(done.stdout)
    assert ("--mock-data" in flags) == ("trains on mock data" in done.stdout) == mock
    if variables:
        assert flags[flags.index("--data-path") + 1 :][:4] == ["0.7", "a", "0.3", "b"]


def test_help_needs_no_model_and_writes_no_files(tmp_path):
    for script in ("launch.sh", "sbatch_train.sh"):
        text = dry_run(script, tmp_path, "--help").stdout
        assert "DRY_RUN=1" in text and "DISPATCHER" in text and "read_cluster" not in text
    done = launch("quickstart.sh", tmp_path, "--help", f"RUN={tmp_path}/run")
    assert done.returncode == 0 and "TEXT=my.txt" in done.stdout
    assert "set -euo" not in done.stdout and "[1/5]" not in done.stdout and not any(tmp_path.iterdir())


def test_invalid_job_is_not_submitted(tmp_path):
    for script, variables, message in (
        ("sbatch_train.sh", "", "MODEL is not set"),
        ("launch.sh", "GPUS_PER_NODE=x", "error: GPUS_PER_NODE=x: a positive integer is needed\n"),
        ("sbatch_train.sh", "NNODES=0", "error: NNODES=0: a positive integer is needed\n"),
        ("launch.sh", "TP=x", "TP=x: a positive integer"),
        ("sbatch_train.sh", "PR=fp9", "PR=fp9: one of bf16 fp8 mxfp8"),
        ("launch.sh", "DISPATCHER=x", f"DISPATCHER=x: one of {' '.join(each.key for each in SELECTABLE)} is needed"),
        ("sbatch_train.sh", "CLUSTER=nowhere", "CLUSTER=nowhere"),
        ("launch.sh", "TRAINING_SCRIPT_PATH=none.py", "TRAINING_SCRIPT_PATH=none.py"),
    ):
        refusal = dry_run(script, tmp_path, "", f"{variables} MODEL=mixtral_8x7b" if variables else "", code=2).stderr
        is_whole = message.startswith("error: ")
        assert refusal == message if is_whole else message in refusal
    done = dry_run("sbatch_train.sh", tmp_path, "", "MODEL=mixtral_8x7b TP=3", code=2)
    assert "--tensor-model-parallel-size 3" in done.stdout + done.stderr
    sbatch = tmp_path / "bin" / "sbatch"  # the script looks for it first
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\ntouch submitted\n")
    sbatch.chmod(0o755)
    done = launch("sbatch_train.sh", tmp_path, "", f"MODEL=mixtral_8x7b TP=3 PATH={sbatch.parent}:{os.environ['PATH']}")
    assert done.returncode == 2 and "--tensor-model-parallel-size 3" in done.stderr
    assert not (tmp_path / "runs").exists() and not (tmp_path / "submitted").exists()


def test_plan_that_does_not_fit_exits_with_3_and_suggests_changes(tmp_path):
    settings = "MODEL=mixtral_8x7b EP=8 PP=1 NNODES=1"
    done = dry_run("sbatch_train.sh", tmp_path, "", settings, code=3)
    assert "does not fit: stage 0 needs" in done.stdout and "8 x h100" in done.stdout
    assert "error: this run DOES NOT FIT the memory of its devices: stage 0 needs" in done.stderr
    assert "cheapest changes that fit:" in done.stderr
    changes = [line.split(": fits ")[0] for line in done.stderr.splitlines() if ": fits with" in line]
    assert changes
    flags = ("--micro-batch", "parallel-size", "--recompute")
    assert not [line for line in changes if any(flag in line for flag in flags)]
    done = dry_run("launch.sh", tmp_path, "--report own.json", f"{settings} HARDWARE=gb300")
    assert "fits: the fullest device" in done.stdout and "8 x gb300" in done.stdout and done.stderr == ""
    assert json.loads((tmp_path / "own.json").read_text())["fits"] is True
    assert "there are a100" in dry_run("launch.sh", tmp_path, "", f"{settings} HARDWARE=b3000", code=2).stderr


@pytest.mark.parametrize(
    "flags, variables",
    [
        ("--micro-batch-size 1 --global-batch-size 80 --world-size 20", "MBS=1 GBS=80 NNODES=3"),
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


def test_installed_launcher_trains_with_its_own_python(monkeypatch):
    monkeypatch.setenv("MOE_TRAINER_PYTHON", "/another/python")  # of a launcher around this one
    environments = []
    monkeypatch.setattr("os.execve", lambda path, words, environment: environments.append(environment))
    launch_command.main([])
    assert [each["MOE_TRAINER_PYTHON"] for each in environments] == [sys.executable]


def test_cluster_file_sets_defaults_that_the_caller_overrides(tmp_path):
    cluster = tmp_path / "cluster.conf"
    cluster.write_text(
        "ACCOUNT=ours\nPARTITION=slow\nGPUS_PER_NODE=4\nCONTAINER_IMAGE=/images/torch.sqsh\nCONTAINER_MOUNTS=/data:/data\n"
        "MODULES='cuda gcc'\nSBATCH_OPTIONS=(--mem=0 '--comment=two words')\nENVIRONMENT=('A=x y' NCCL_DEBUG=INFO)\n"
    )
    settings = f"MODEL=mixtral_8x7b EP=8 PP=1 NNODES=2 CLUSTER={cluster} PARTITION=fast OUTPUT_PATH=out HARDWARE=gb300"
    text = dry_run("sbatch_train.sh", tmp_path, "", settings).stdout
    wanted = "--account=ours --partition=fast --ntasks-per-node=4 --mem=0 --container-image=/images/torch.sqsh"
    wanted += f" NCCL_DEBUG=INFO PYTHON={sys.executable}"
    for each in (*wanted.split(), '#SBATCH "--comment=two words"\n', "MODULES=cuda\\ gcc", "A=x\\ y"):
        assert each in text, each
    assert f":{tmp_path}/out\\,/data:/data" in text


def test_dry_run_checks_data_files(tmp_path):
    settings = "MODEL=qwen3_tiny GPUS_PER_NODE=2 EP=2"
    named = f"{settings} DATA_PATH={tmp_path}/none_text_document"
    assert "none_text_document" in dry_run("launch.sh", tmp_path, "", named, code=2).stderr
    assert "2 x h100" in dry_run("launch.sh", tmp_path, "", f"{named} CHECK_FILES=0").stdout
    # nothing is named: a plan may be another machine's
    assert "can be written" not in dry_run("launch.sh", tmp_path, "", f"{settings} DATA_PATH=").stdout


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
    "Kimi-K2": "tp=1 pp=4 ep=64 layout=Ettt|ttt|(tttt|)*13tttL mbs=1 gbs=256 nodes=32",
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
    done = dry_run("sbatch_train.sh", tmp_path, "", f"MODEL={model} VALIDATE=0")
    flags = flags_in(done.stdout)
    found = [f"{SHORT[name]}={flags[index + 1]}" for index, name in enumerate(flags) if name in SHORT]
    (nodes,) = re.findall(r"^#SBATCH --nodes=(\d+)$", done.stdout, re.MULTILINE)
    assert " ".join([*found, f"nodes={nodes}"]) == ZOO_BARE[model]
    assert value(flags, "--moe-flex-dispatcher-backend") == "deepep" and "--seq-length" not in flags
    assert f"note: launch values of {model.lower().replace('-', '_')}.yaml: NNODES=" in done.stdout


def test_launch_values_have_the_lowest_precedence(tmp_path):
    cluster = tmp_path / "cluster.conf"
    cluster.write_text("NNODES=2 PP=2\n")
    done = dry_run("launch.sh", tmp_path, "", f"MODEL=Mixtral-8x7B CLUSTER={cluster} PP=1 VALIDATE=0")
    flags = flags_in(done.stdout)
    assert value(flags, "--pipeline-model-parallel-size") == "1" and value(flags, "--nnodes") == "2"
    assert "--num-virtual-stages-per-pipeline-rank" not in flags  # the section's VPP goes with its PP
    assert value(flags, "--moe-token-dispatcher-type") == "alltoall"  # the other launcher of the zoo takes its table's
    several = launch("launch.sh", tmp_path, "", "MODEL=Mixtral-8x7B VALIDATE=0")
    needed = "NNODES=8, the launch value in mixtral_8x7b.yaml, needs NODE_RANK"
    assert several.returncode == 2 and needed in several.stderr


@pytest.mark.parametrize(
    "variables, words, wanted",
    [
        ("VPP=4 PP_LAST=2", "--pipeline-model-parallel-layout 'Et|(tt|)*30mL'", ""),
        ("VPP=4 LAYOUT='Et|(tt|)*30mL'", "", "--pipeline-model-parallel-layout"),
        ("VPP=1 LAYERS_PER_VP=false PP_FIRST=false PP_LAST=false", "", "--pipeline-model-parallel-layout"),
        ("PP_FIRST=7 PP_LAST=6", "", "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers"),
        ("LAYERS_PER_VP=2", "", "--num-layers-per-virtual-pipeline-stage"),
        ("VPP=4", "--num-layers-per-virtual-pipeline-stage 2", ""),
    ],
)
def test_pipeline_stages_are_set_by_one_flag(tmp_path, variables, words, wanted):
    done = dry_run("sbatch_train.sh", tmp_path, words, f"MODEL=DeepSeek-V3 PP=8 EP=32 VALIDATE=0 {variables}")
    flags = flags_in(done.stdout)
    about = ("--num-virtual", "--num-layers-per", "--pipeline-model-parallel-layout", "--decoder-")
    own = flags[: len(flags) - len(shlex.split(words))]
    assert [flag for flag in own if flag.startswith(about)] == wanted.split()
    notes = ["VPP=4 has no effect"] if "Et|(tt|)*30mL" in words + variables else []
    assert re.findall(r"VPP=\d has no effect", done.stdout) == notes


def test_invalid_flag_gives_no_second_error_about_the_layout(tmp_path):
    """94 layers over 8 stages need the launcher's own layout, also if another flag is invalid."""
    settings = "MODEL=Qwen3-235B-A22B TP=2 PP=8 VPP=4 EP=32 NNODES=32"
    done = dry_run("sbatch_train.sh", tmp_path, "--cuda-graph-warmup-steps x", settings, code=2)
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
    settings = "MODEL=Mixtral-8x7B CLUSTER=OURS VALIDATE=0 ACCOUNT=us PARTITION="
    names = "DATASET=Pile RUN_NAME=baseline COMMENT=v1 MEGATRON_PATH=/opt/megatron"
    done = dry_run("sbatch_train.sh", tmp_path, "", f"{settings} {names}")
    flags = flags_in(done.stdout)
    assert value(flags, "--save") == "/results/Mixtral-8x7B-TP1PP4EP8VPP8-MBS1GBS256/checkpoints"
    assert value(flags, "--data-path") == "/data/pile_text_document" and "--mock-data" not in flags
    for wanted in ("--account=us", "--partition=batch", "--job-name=moe-baseline", "--comment=v1"):
        assert f"#SBATCH {wanted}\n" in done.stdout, wanted
    assert "note: MEGATRON_PATH=/opt/megatron has no effect" in done.stdout
    for wrong, message in (
        ("DATASET=Dolma", "DATASET=Dolma: neither"),
        ("CLUSTER=THEIRS", "no THEIRS.conf in cluster_configs"),
    ):
        assert message in dry_run("sbatch_train.sh", tmp_path, "", f"{settings} {wrong}", code=2).stderr


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
    settings = (
        f"TRAINING_PARAMS_PATH={recipe} TRAINING_PARAMS='--lr 2e-4 --min-lr 1e-5' WANDB_PROJECT=ours HARDWARE=b200"
    )
    done = dry_run("sbatch_train.sh", tmp_path, "--log-interval 7", settings)
    flags = flags_in(done.stdout)
    assert value(flags, "--preset") == str(recipe)
    assert flags[-6:] == "--lr 2e-4 --min-lr 1e-5 --log-interval 7".split()
    exports = done.stdout.partition("EXPORTS=(")[2].partition("\n")[0].split()
    wanted = f"TP=1 PP=4 EP=8 LAYERS_PER_VP=1 SEQ_LEN=4096 DATA_PATH= WANDB_PROJECT= WORKSPACE={tmp_path}"
    assert set(wanted.split()) <= set(exports)
    assert "--num-virtual-stages-per-pipeline-rank" not in flags  # the file sets it
    assert "valid for 64 ranks" in done.stdout and "64 x b200" in done.stdout
    assert "WANDB_PROJECT=ours has no effect" in done.stdout
    missing = dry_run("launch.sh", tmp_path, "", f"TRAINING_PARAMS_PATH={tmp_path}/none.yaml", code=2)
    assert missing.stderr == f"error: the recipe {tmp_path}/none.yaml: there is no such file\n"


@pytest.mark.parametrize("script", ["launch.sh", "sbatch_train.sh"])
def test_recipe_values_are_not_executed_by_bash_arithmetic(tmp_path, script):
    """Bash executes a command in an array index inside $(( )) and [ -gt ]."""
    settings = f"TRAINING_PARAMS_PATH={tmp_path}/zoo.yaml VALIDATE=0 SEQ_LEN=512 PP=2 VPP=2"
    for flag, code, words in (
        ("--num-layers", 2, "--num-layers BASH_VERSINFO[$(>ran)] is not an integer"),
        ("--max-position-embeddings", 0, "--max-position-embeddings 512"),
    ):
        (tmp_path / "zoo.yaml").write_text(re.sub(rf"{flag}: \d+", f"{flag}: BASH_VERSINFO[$(>ran)]", ZOO_FILE))
        done = dry_run(script, tmp_path, "", settings, code)
        assert words in (done.stderr if code else done.stdout)
        assert not (tmp_path / "ran").exists()
        assert "syntax error" not in done.stderr and "integer expression" not in done.stderr


def test_multiline_variables_and_a_recipe_in_another_folder(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/own.yaml").write_text(ZOO_FILE)
    settings = (
        "TRAINING_PARAMS_PATH=recipes/own.yaml VALIDATE=0 SEQ_LEN=512 TRAINING_PARAMS='--lr 2e-4\n--min-lr\n1e-5\n'"
    )
    settings += " DATA_PATH='0.5 a\n0.5 b\n' RECOMPUTE='moe_act\nlayernorm'"
    text = " ".join(dry_run("launch.sh", tmp_path, "", settings).stdout.partition("command: ")[2].split())
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
    settings = "TRAINING_PARAMS_PATH=own.yaml VALIDATE=0 SEQ_LEN=512 MOE_GROUPED_GEMM=false PP=2"
    text = dry_run("launch.sh", tmp_path, "", settings).stdout
    assert "--mock-data" not in text and "--max-position-embeddings" not in text
    assert "MOE_GROUPED_GEMM=false has no effect" in text


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
    for recipe in ("MODEL=DeepSeek-V3 TRAINING_PARAMS_PATH=own.yaml", "MODEL=./own.yaml"):
        settings = f"{recipe} VALIDATE=0 NNODES=64"
        text = dry_run(script, tmp_path, "", f"{settings} GB200_CLUSTER=1").stdout
        assert not any(name in text for name in names), text
        assert "CUDA_DEVICE_MAX_CONNECTIONS" not in text and "PYTORCH_CUDA_ALLOC_CONF" not in text
        assert "NCCL_GRAPH_REGISTER=0" in text  # not in the file
        asked = dry_run(script, tmp_path, "", f"{settings} PP=8 CUDA_DEVICE_MAX_CONNECTIONS=8").stdout
        assert "--pipeline-model-parallel-size 8" in asked and "CUDA_DEVICE_MAX_CONNECTIONS=8" in asked


def test_other_model_zoo_variables_have_their_effect(tmp_path):
    def dry_run_flags(variables, script="sbatch_train.sh"):
        text = dry_run(script, tmp_path, "", f"VALIDATE=0 MODEL=qwen3_30b_a3b {variables}").stdout
        return flags_in(text), text

    flags, text = dry_run_flags(
        "MOE_TOKEN_DISPATCHER=alltoall MOE_GROUPED_GEMM=true SEQ_LEN=4096 DATA_PATH=mock TOKENIZER_MODEL=mock "
        "LOAD_PATH=/weights PRETRAIN=1"
    )
    assert value(flags, "--moe-token-dispatcher-type") == "alltoall" and "--moe-grouped-gemm" in flags
    assert value(flags, "--seq-length") == "4096" and "--max-position-embeddings" not in flags  # raised, not lowered
    assert "--mock-data" in flags and not {"--tokenizer-model", "--load"} & set(flags) and "names data" not in text
    assert value(dry_run_flags("SEQ_LEN=131072")[0], "--max-position-embeddings") == "131072"
    assert "MOE_GROUPED_GEMM=false has no effect" in dry_run_flags("MOE_GROUPED_GEMM=false")[1]
    flags, text = dry_run_flags(
        "PR=mxfp8 OPTIMIZER_OFFLOAD=1 WANDB_API_KEY=secret WANDB_PROJECT=ours COMMENT=first PROFILE=nsys"
    )
    assert "--fp8-param-gather" not in flags and value(flags, "--wandb-project") == "ours" and "--nvtx-ranges" in flags
    assert value(flags, "--wandb-exp-name") == "qwen3_30b_a3b-TP1PP1EP8CP1VPP1-MBS1GBS256-first"
    assert "WANDB_MODE=online" in text and "secret" not in text
    assert f"NSYS_OUTPUT={tmp_path}/runs/qwen3_30b_a3b/nsys/qwen3_30b_a3b-" in text
    program = tmp_path / "mine.py"
    program.touch()
    for script, ranks in (("sbatch_train.sh", "--ntasks-per-node=4"), ("launch.sh", "--nproc-per-node 4")):
        _, text = dry_run_flags(f"GB200_CLUSTER=1 TRAINING_SCRIPT_PATH={program}", script)
        assert f" -u {program} --preset" in text and "NVLINK_DOMAIN_SIZE=72" in text and ranks in text


@pytest.mark.parametrize(
    ("file", "variables", "hardware"),
    [
        ("run_gb300_235b.sh", "GB200_CLUSTER=1", "HARDWARE=gb300, which run_gb300_235b.sh names"),
        ("run_b200.sh", "HARDWARE=h200", ""),
        ("run.sh", "COMMENT=gb200-128k RUN_NAME=qwen3", "HARDWARE=gb200, which gb200-128k names"),
    ],
)
def test_hardware_is_that_of_the_calling_file_or_the_run(tmp_path, file, variables, hardware):
    """A dry run would otherwise plan a line of the model zoo for another device."""
    (tmp_path / file).write_text(f'#!/bin/bash\nbash "{SCRIPTS}/launch.sh" "$@"\n')
    env = {name: value for name, value in environment().items() if name not in NAMES}
    settings = f"MODEL=mixtral_tiny GPUS_PER_NODE=1 DRY_RUN=1 {variables}".split()
    env |= dict(word.split("=") for word in settings) | {"PYTHON": "echo"}
    done = subprocess.run(["bash", str(tmp_path / file)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall("HARDWARE=.*", done.stdout) == ([hardware] if hardware else [])
    assert f"--hardware {hardware[9:14] if hardware else 'h200'}" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sbatch_train.sh", "launch.sh"])
def test_every_best_practice_line_of_the_model_zoo_fits(tmp_path, script):
    """Every line is valid, and its plan fits the hardware it was measured on."""
    lines = Path(__file__).with_name("zoo_lines.txt").read_text().splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    assert len(lines) == 33
    codes = {}
    for line in lines:
        variables, dashes, flags = line.partition(" --")  # (one layout comes in quotes)
        codes[line] = launch(script, tmp_path, dashes + flags, f"DRY_RUN=1 HARDWARE={variables}").returncode
    assert {line: code for line, code in codes.items() if code != 0} == {}


def test_array_dependency_signal_and_segment_become_sbatch_options(tmp_path):
    settings = "MODEL=mixtral_8x7b EP=8 PP=1 ARRAY=5 DEPENDENCY=afterok:12 SIGNAL_SECONDS=300 RUN_TIME=1:00:00"
    done = dry_run("sbatch_train.sh", tmp_path, "", f"{settings} GB200_CLUSTER=1 NNODES=2 SEGMENT=2 HARDWARE=gb200")
    options = "--array=1-5%1 --dependency=afterok:12 --signal=USR1@300 --time=1:00:00 --ntasks-per-node=4 --segment=2"
    for wanted in options.split():
        assert f"#SBATCH {wanted}\n" in done.stdout, wanted


# the zoo's own values, for measuring speed: these exceed an H100 or make too few microbatches
@pytest.mark.parametrize("model, variant", SECTIONS)
def test_launch_values_of_every_preset_are_valid_and_fit(tmp_path, model, variant):
    """The device that they name, else H100. The plan, which validates first, is made in this process."""
    script = "launch.sh" if model.endswith("_tiny") else "sbatch_train.sh"
    text = launch(script, tmp_path, "", f"DRY_RUN=1 VALIDATE=0 MODEL={model} VARIANT={variant}").stdout
    sizes = re.findall(r"^#SBATCH --(?:nodes|ntasks-per-node)=(\d+)$| --nproc-per-node (\d+) ", text, re.MULTILINE)
    ranks = math.prod(int(nodes or gpus) for nodes, gpus in sizes)
    device = re.findall(r"^note: launch values of .* HARDWARE=(\w+)", text, re.MULTILINE) or ["h100"]
    wanted = {("deepseek_v2", ""): "b200", ("deepseek_v3", ""): "h200", ("kimi_k2", ""): "b200"}.get(
        (model, variant), "h100"
    )
    assert device == [wanted]
    assert run_dry_run([*trainer_flags(text), "--dry-run", "--world-size", str(ranks), "--hardware", wanted]) == 0
    assert f"--preset {model} " in text
    assert ("--seq-length 262144 --max-position-embeddings 262144" in text) == (variant == "256k")


@pytest.mark.parametrize(
    ("variables", "device"),
    [
        ("", "h200"),
        ("MBS=1 TP=1", "h200"),
        ("PP=8 EP=32", None),
        ("HARDWARE=b300", "b300"),
        ("COMMENT=a-gb300-run", "gb300"),
        ("GB200_CLUSTER=1", "gb200"),
    ],
)
def test_dry_run_plans_for_the_device_of_the_section_with_its_sizes_only(tmp_path, variables, device):
    asked, python = tmp_path / "asked", tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\n[[ $1 == *.py && $1 != *layout.py ]] && echo "$@" >>{asked} && exit\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    launch("sbatch_train.sh", tmp_path, "", f"DRY_RUN=1 PYTHON={python} MODEL=deepseek_v3 {variables}")
    assert re.findall(r"--dry-run .*?(?:--hardware (\w+))?$", asked.read_text(), re.MULTILINE) == [device or ""]


def test_typed_weights_are_loaded_or_a_note_says_why_not(tmp_path):
    """The section of Mixtral-8x2B has PRETRAIN: 1."""
    for variables, loads in (("", True), ("PRETRAIN=1", False)):
        settings = f"VALIDATE=0 MODEL=Mixtral-8x2B LOAD_PATH=/weights {variables}"
        text = dry_run("sbatch_train.sh", tmp_path, "", settings).stdout
        assert ("--load /weights --finetune" in text) == loads
        assert ("note: LOAD_PATH=/weights has no effect: PRETRAIN=1" in text) != loads


def test_every_preset_has_launch_values():
    assert [model for model, variant in SECTIONS if not variant] == sorted(
        path.stem for path in (ROOT / "model_zoo").glob("*.yaml")
    )
    h100 = [model for model, variant in SECTIONS if variant == "h100"]
    assert h100 == ["deepseek_v2", "deepseek_v3", "kimi_k2"]
    assert [model for model, variant in SECTIONS if variant == "256k"] == ["deepseek_v3", "qwen3_235b_a22b"]


def test_section_of_a_recipe_file_gives_launch_values(tmp_path):
    """Of the file itself, else of the preset of this name; a variant's section replaces the other; the caller wins."""
    recipe = "MODEL_ARGS:\n  --num-layers: 8\n"
    section = "launch:\n  PP: 2 # stages\n  EP: 4\n\nlaunch_long:\n  EP: 8\n  RECOMPUTE: 'mlp moe_act'\n\n"
    (tmp_path / "own.yaml").write_text(section + recipe)
    (tmp_path / "Mixtral-8x7B.yaml").write_text(recipe)

    def flags(variables):
        return " ".join(trainer_flags(dry_run("sbatch_train.sh", tmp_path, "", f"VALIDATE=0 {variables}").stdout))

    both, pp, ep = "--pipeline-model-parallel-size 2 --expert-model-parallel-size {}", "pipeline-model", "expert-model"
    assert both.format(4) in flags("MODEL=own.yaml") and both.format(2) in flags("TRAINING_PARAMS_PATH=own.yaml EP=2")
    long = flags("MODEL=own.yaml VARIANT=long")
    assert f"--{ep}-parallel-size 8" in long and f"--{pp}" not in long and "--recompute-modules mlp moe_act" in long
    assert ep not in flags("MODEL=Mixtral-8x7B.yaml")  # a file without a section asks by ${EP}
    (tmp_path / "own.yaml").write_text("launch:\n  EPS: 4\n" + recipe)
    for variables, message in (
        ("MODEL=own.yaml", "own.yaml: EPS in launch: is no variable of the launchers"),
        (
            "MODEL=own.yaml VARIANT=128k",
            "VARIANT=128k: neither own.yaml nor a preset of this name has a section launch_128k",
        ),
        ("MODEL=DeepSeek-V3 VARIANT=128k", "has a section launch_128k; there are: h100 256k"),
    ):
        assert message in dry_run("sbatch_train.sh", tmp_path, "", variables, code=2).stderr


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("launch: {EP: 2}\n", "only lines of the form NAME: VALUE are read, not: launch: {EP: 2}"),
        ("launch:\n- EP: 2\n", "not: - EP: 2"),
        ("launch:\n  EP:\n    - 2\n", "not:   EP:"),
        ("launch:\n  TP TP: 3\n", "not:   TP TP: 3"),
        ("launch:\n  EP: 2\n  EP: 4\n", "EP is in launch twice"),
    ],
)
def test_section_that_is_not_understood_is_rejected(tmp_path, section, message):
    (tmp_path / "own.yaml").write_text(section + "MODEL_ARGS:\n  --num-layers: 8\n")
    error = dry_run("sbatch_train.sh", tmp_path, "", "MODEL=own.yaml VALIDATE=0", code=2).stderr
    assert "own.yaml: " in error and message in error


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("MODEL=deepseek_v3 VARIANT=25.k", "VARIANT=25.k: only letters, digits and underscores"),
        ("MODEL=mixtral_tiny NNODES=2 MASTER_ADDR=a NODE_RANK=2", "NODE_RANK=2: a number from 0 to 1 is needed"),
        ("MODEL=mixtral_tiny NNODES=2 MASTER_ADDR=a NODE_RANK=node1", "NODE_RANK=node1: a number from 0 to 1 is"),
        ("MODEL=mixtral_tiny PYTHON=/not/there", "PYTHON=/not/there: there is no such program"),
        ("MODEL=mixtral_tiny OUTPUT_PATH=own.yaml VALIDATE=0", "own.yaml: the folder of the logs cannot be made"),
        ("MODEL=own.yaml DRY_RUN=1", "own.yaml: the file has no MODEL_ARGS"),
        # with one rank it would be right
        ("MODEL=mixtral_tiny NNODES=2 GPUS_PER_NODE=1 MBS=1 GBS=1 DRY_RUN=1", "--global-batch-size 1"),
    ],
)
def test_wrong_variable_is_rejected(tmp_path, variables, message):
    (tmp_path / "own.yaml").write_text("# nothing\n")
    refused = launch("launch.sh", tmp_path, "", variables)
    assert refused.returncode == 2 and message in refused.stderr, refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["own.yaml"]


def test_section_with_line_ends_of_windows_and_quotes(tmp_path):
    content = "launch:\n  EP: 4\n  RECOMPUTE: 'mlp # x' # why\nMODEL_ARGS:\n  --num-layers: 8\n"
    (tmp_path / "own.yaml").write_bytes(content.replace("\n", "\r\n").encode())
    shown = dry_run("sbatch_train.sh", tmp_path, "", "MODEL=own.yaml VALIDATE=0")
    assert "--expert-model-parallel-size 4" in " ".join(trainer_flags(shown.stdout)) and "mlp # x" in shown.stdout


def test_launcher_layouts_contain_every_layer():
    assert make_layout(61, 1, 8, None, True) == "Et|(tt|)*30mL"
    assert make_layout(32, 0, 8, None, False) is make_layout(32, 0, 4, 8, True) is None  # an even split does
    assert make_layout(7, 0, 2, None, False) == "Etttt|tttL"
    assert make_layout(7, 0, 2, 2, False) == "Ett|(tt|)*2tL"


def test_exit_code_of_torchrun_is_that_of_the_ranks():
    assert exit_code({75}) == exit_code({75, -15}) == 75
    assert exit_code({75, 1}) == 1
    assert exit_code({-9, 3}) == 3
    assert exit_code({-9}) == exit_code({-9, -15}) == exit_code({-9, 143}) == 137
    assert exit_code({-15}) == exit_code({143}) == 143


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
    process = subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=PIPE, stderr=PIPE, text=True)
    try:
        wait_until((tmp_path / "ready").exists)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in err, err
    assert err.endswith("the run was terminated by SIGINT\n")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shell_scripts_pass_shellcheck():
    scripts = map(str, sorted([*SCRIPTS.rglob("*.sh"), *LAUNCH.glob("*.sh")]))
    assert subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False).stdout == ""


def test_sigterm_for_the_launcher_saves_and_the_same_command_resumes(tmp_path):
    """SIGTERM to the launcher: both ranks save, exit code 75; then the command that it printed continues."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text("MODEL_ARGS:\n  --num-layers: 2\n")
    line = [*TINY, *MOCK, *"--train-iters 100000 --lr-decay-iters 100 --save-interval 100000".split()]
    line = shlex.join([*line, "--distributed-backend", "gloo"])
    settings = f"MODEL={recipe} VALIDATE=0 GPUS_PER_NODE=2 OUTPUT_PATH={tmp_path}/out BIND=none"
    metrics = tmp_path / "out/checkpoints/metrics.jsonl"

    def send_signal(launcher):
        wait_until(lambda: (metrics.exists() and metrics.stat().st_size) or launcher.poll() is not None, 300)
        os.kill(launcher.pid, signal.SIGTERM)

    first = launch("launch.sh", tmp_path, line, settings, send_signal)
    assert first.returncode == 75, first.stdout[-3000:]
    done = len(read_metrics(metrics))
    assert "receiving SIGUSR1" in first.stdout + first.stderr
    assert len(list((tmp_path / "out" / "logs").rglob("std*.log"))) == 4
    again = commands.run([*trainer_flags(first.stdout), "--exit-interval", str(done + 1)], tmp_path, 2)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert [record["iteration"] for record in read_metrics(metrics)] == list(range(1, done + 2))


@pytest.mark.parametrize(
    ("flags", "variables", "changed"),
    [
        ("", "", {}),
        ("", "A2A_OVERLAP=1", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}),
        # the recipe sets the other variable itself
        ("", "TRAINING_PARAMS_PATH={}/recipe.yaml", {"CUDA_DEVICE_MAX_CONNECTIONS": None}),
        ("", "NCCL_NVLS_ENABLE=1", {"NCCL_NVLS_ENABLE": "1"}),
    ],
)
def test_launchers_set_the_environment_of_one_file(tmp_path, flags, variables, changed):
    lines = (LAUNCH / "launch_environment.txt").read_text().splitlines()
    wanted = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    recipe = (ROOT / "model_zoo" / "mixtral_tiny.yaml").read_text()
    (tmp_path / "recipe.yaml").write_text(recipe)
    settings = f"MODEL=mixtral_tiny VALIDATE=0 {variables.format(tmp_path)}"
    text = dry_run("launch.sh", tmp_path, flags, settings).stdout
    line = next(line for line in text.splitlines() if line.startswith("environment: "))
    found = dict(word.split("=", 1) for word in shlex.split(line.removeprefix("environment: ")))
    assert {name: found.get(name) for name in wanted} == wanted | changed

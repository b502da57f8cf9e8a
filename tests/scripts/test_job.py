"""The job and rank scripts, with fake srun, scontrol, sbatch, module, numactl and nvidia-smi programs.

Requeueing after every outcome, and the command lines of containers, modules and NUMA binding.
"""

import os
import shutil
import subprocess
import sys

import pytest
from structure.source import ROOT
from training.tiny import MOCK, TINY

SCRIPTS, RANK = ROOT / "scripts", ROOT / "moe_trainer/launch/rank.sh"


def make_fake_program(folder, name, *lines):
    """Create a program in the folder that logs its arguments to folder/NAME.calls, one line per call, quoted for bash."""
    path = folder / name
    path.write_text("\n".join(["#!/usr/bin/env bash", f'echo {name} "${{*@Q}}" >>{folder}/{name}.calls', *lines, ""]))
    path.chmod(0o755)


def calls(folder, name):
    path = folder / f"{name}.calls"
    return path.read_text().replace("'", "").splitlines() if path.exists() else []


def run_bash(script, *words, env, cwd=None):
    command = ["bash", str(script), *words]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=600)


class Job:
    """A submitted job, whose attempts run here when asked."""

    def __init__(self, folder, *flags, **variables):
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.env.update(PATH=f"{self.bin}:{self.env['PATH']}", PYTHON=sys.executable)
        make_fake_program(self.bin, "sbatch", "echo 7")
        make_fake_program(self.bin, "sleep")
        make_fake_program(self.bin, "scancel")
        settings = dict(MODEL="mixtral_tiny", EP="2", GPUS_PER_NODE="2", OUTPUT_PATH=str(folder / "out"), VALIDATE="0")
        done = run_bash(SCRIPTS / "sbatch_train.sh", *flags, cwd=folder, env={**self.env, **settings, **variables})
        assert done.returncode == 0, done.stderr
        self.file = folder / "out" / "logs" / "job-7.sh"
        self.logs = folder / "out" / "logs" / "7-0"
        self.tracker = folder / "out" / "checkpoints" / "latest_checkpointed_iteration.txt"
        self.tracker.parent.mkdir()

    def attempt(self, number=0, code=75, state="RUNNING Reason=None", saved=None, errors=(), **env):
        """Attempt `number`: srun prints errors and the ranks leave with `code`, after saving iteration `saved`; SLURM reports `state`. Returns the ended job script."""
        save = "" if saved is None else f"echo {saved} >{self.tracker}"
        make_fake_program(self.bin, "srun", save, *(f"echo '{error}' >&2" for error in errors), f"exit {code}")
        show = f"[ $1 != show ] || echo JobId=7 JobState={state} Dependency="
        # SLURM signals all processes of a requeued job, maybe before scontrol has ended
        make_fake_program(self.bin, "scontrol", show, "[ $1 != requeue ] || kill -TERM $PPID $$")
        for name in ("srun", "scontrol", "scancel"):
            (self.bin / f"{name}.calls").unlink(missing_ok=True)
        slurm = dict(
            SLURM_JOB_ID="7", SLURM_JOB_NODELIST="node[1-3]", SLURM_JOB_NUM_NODES="3", SLURM_RESTART_COUNT=str(number)
        )
        return run_bash(self.file, cwd=self.folder, env={**self.env, **slurm, **env})

    @property
    def requeued(self):
        return "scontrol requeue 7" in calls(self.bin, "scontrol")


@pytest.mark.parametrize(
    "code, state, again",
    [
        (75, "RUNNING Reason=None", True),
        (138, "RUNNING Reason=None", True),
        (143, "RUNNING Reason=None", True),
        (75, "COMPLETING Reason=TimeLimit", True),
        (75, "COMPLETING Reason=None", False),  # scancel
        (0, "RUNNING Reason=None", False),
        (1, "RUNNING Reason=None", False),
        (137, "RUNNING Reason=None", False),
    ],
)
def test_job_is_requeued_by_exit_code_and_state(tmp_path, code, state, again):
    job = Job(tmp_path)
    done = job.attempt(code=code, state=state)
    assert job.requeued == again, done.stdout + done.stderr
    assert done.returncode == code and "did not requeue" not in done.stdout


def write_recipe(folder, **variables):
    """The environment of a launcher that trains a recipe of two layers in the folder."""
    (folder / "bin").mkdir()
    (folder / "tiny.yaml").write_text("MODEL_ARGS:\n  --num-layers: 2\n")
    settings = {"MODEL": str(folder / "tiny.yaml"), "OUTPUT_PATH": str(folder / "out"), "VALIDATE": "0"}
    return {**os.environ, **settings, "PYTHON": sys.executable, **variables}


def test_failed_submission_leaves_no_files(tmp_path):
    env = write_recipe(tmp_path, PATH=str(tmp_path / "bin"))
    for name in "bash dirname basename sed awk mkdir mktemp rm grep tail sort tr cat".split():
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    for word in ("there is no sbatch here", "sbatch rejected the job"):
        done = run_bash(SCRIPTS / "sbatch_train.sh", cwd=tmp_path, env=env)
        assert done.returncode == 2 and word in done.stderr, done.stderr
        make_fake_program(tmp_path / "bin", "sbatch", "echo 'sbatch: error: no partition' >&2", "exit 1")
    assert "no partition" in done.stderr and not list((tmp_path / "out" / "logs").iterdir())


def test_requeues_are_limited(tmp_path):
    job = Job(tmp_path, MAX_REQUEUES="3")
    ended = [(job.attempt(number, saved=number).returncode, job.requeued) for number in range(4)]
    assert ended == [(75, True)] * 3 + [(75, False)]
    (tmp_path / "other").mkdir()
    never = Job(tmp_path / "other", REQUEUE="0")
    assert never.attempt(saved=1).returncode == 75 and not never.requeued


def test_two_attempts_without_a_newer_checkpoint_end_the_job(tmp_path):
    job = Job(tmp_path)
    # one attempt without is bad luck, and progress is counted from zero
    for number, saved in enumerate((10, None, 12, None)):
        assert job.attempt(number, saved=saved).returncode == 75 and job.requeued
    done = job.attempt(4)
    assert done.returncode == 1 and not job.requeued
    assert "2 consecutive attempts have saved no newer checkpoint (newest iteration: 12)" in done.stdout


@pytest.mark.parametrize("flags", ["--save {}", "--save={}"])
def test_attempts_requeued_by_slurm_count_as_stalled(tmp_path, flags):
    """A lost node kills the job's shell: only the next attempt can detect that there was no progress."""
    job = Job(tmp_path, *flags.format(tmp_path / "elsewhere").split())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / job.tracker.name).write_text("30")
    for number, saved in enumerate((None, 31)):  # 31: not where it saves
        assert job.attempt(number, state="COMPLETING Reason=NodeDown", saved=saved).returncode == 75
    done = job.attempt(2)
    assert done.returncode == 1 and "(newest iteration: 30)" in done.stdout
    assert calls(job.bin, "srun") == []  # nothing was started
    assert job.attempt(0).returncode == 75  # a new submission counts from zero


def test_max_stalled_0_disables_the_limit(tmp_path):
    job = Job(tmp_path, MAX_STALLED="0")
    assert all(job.attempt(number).returncode == 75 and job.requeued for number in range(5))


def test_job_array_ends_when_done_or_stalled(tmp_path):
    job = Job(tmp_path, ARRAY="9")
    tasks = [dict(SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID=str(task)) for task in range(1, 5)]
    assert job.attempt(saved=1, **tasks[0]).returncode == 75 and not job.requeued  # the next task resumes
    assert job.attempt(**tasks[1]).returncode == 75
    assert calls(job.bin, "scancel") == []
    assert job.attempt(**tasks[2]).returncode == 1
    assert calls(job.bin, "scancel") == ["scancel --state=PENDING 5"]
    assert job.attempt(code=0, **tasks[0]).returncode == 0
    assert calls(job.bin, "scancel") == ["scancel --state=PENDING 5"]


def test_job_log_shows_the_last_lines_of_a_failed_rank(tmp_path):
    job = Job(tmp_path)
    job.logs.mkdir(parents=True)
    (job.logs / "rank-1.log").write_text("pretrain_moe.py: the disk is full\n")
    done = job.attempt(code=3)
    assert done.returncode == 3 and "the disk is full" in done.stdout


def test_job_log_has_the_output_of_the_first_and_last_rank(tmp_path):
    """The log has their lines without the arguments, srun's errors except those of ranks that saved, and the next step."""
    job = Job(tmp_path)
    job.logs.mkdir(parents=True)
    for rank, text in (
        (0, "---- arguments ----\n  lr ... 1\n---- end of arguments ----\nsaved\n"),
        (4, "hush\n"),
        (5, "iteration 1\niteration 2\n"),
    ):
        (job.logs / f"rank-{rank}.log").write_text(text)
    errors = ("srun: error: node1: task 0: Exited with exit code 75", "srun: error: node2 is lost")
    done = job.attempt(errors=errors)
    lines = done.stdout.splitlines()
    assert "saved" in lines and lines.index("iteration 1") < lines.index("iteration 2")
    assert "lr ..." not in done.stdout and "hush" not in done.stdout
    assert "attempt 0: 6 ranks on node[1-3]" in done.stdout and done.stderr == "srun: error: node2 is lost\n"
    assert "interrupted, and saved (exit code 75)" in lines[-2]
    assert lines[-1].startswith("requeued: attempt 1 starts when nodes are free")


def test_rejected_result_recommends_other_nodes(tmp_path):
    ended = Job(tmp_path).attempt(code=16)
    assert ended.returncode == 16 and "--exclude=node[1-3]" in ended.stdout


def test_srun_command_with_container_modules_and_environment(tmp_path):
    """pyxis options come first, variables are set inside the container, modules and setup run before, all is recorded."""
    cluster = tmp_path / "cluster.conf"
    cluster.write_text(
        "CONTAINER_IMAGE=/images/torch.sqsh\nCONTAINER_MOUNTS=/data:/data\nMODULES='cuda gcc'\nSETUP='export FROM_SETUP=yes'\n"
        "SRUN_OPTIONS=(--cpu-bind=none)\nENVIRONMENT=('A=x y' NCCL_DEBUG=INFO)\n"
    )
    job = Job(tmp_path, CLUSTER=str(cluster))
    module = {"BASH_FUNC_module%%": f'() {{ echo "module $*" >>{job.bin}/module.calls; }}'}
    done = job.attempt(code=0, HF_TOKEN="hush", **module)
    assert calls(job.bin, "module") == ["module load cuda gcc"]
    (line,) = calls(job.bin, "srun")
    out = tmp_path / "out"
    for wanted in (
        f"--container-image=/images/torch.sqsh --container-mounts={ROOT}:{ROOT},{out}:{out},/data:/data --container-workdir={ROOT}",
        "--no-container-mount-home --cpu-bind=none env CUDA_DEVICE_MAX_CONNECTIONS=1 ",
        " A=x y NCCL_DEBUG=INFO bash ",
        f"bash {RANK} {sys.executable} -u {ROOT}/pretrain_moe.py --preset mixtral_tiny",
        "srun --nodes=3 --ntasks=6 ",
        "--output=" + str(out / "logs" / "7-0" / "rank-%t.log"),
    ):
        assert wanted in line, wanted
    recorded = (out / "logs" / "7-0" / "environment.txt").read_text().splitlines()
    assert {"A=x y", "NCCL_DEBUG=INFO", "FROM_SETUP=yes", "SLURM_JOB_ID=7"} <= set(recorded)
    assert "hush" not in done.stdout + "\n".join(recorded)


@pytest.fixture
def node(tmp_path):
    """A fake sysfs with two NUMA nodes: the GPU of local rank 0 is attached to node 1."""
    for number in (0, 1):
        (tmp_path / "sys/devices/system/node" / f"node{number}").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:17:00.0").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:17:00.0/numa_node").write_text("1\n")
    (tmp_path / "bin").mkdir()
    return tmp_path


def rank_settings(folder, **env):
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SYSFS": str(folder / "sys"), "SLURM_LOCALID": "0", **env}


def run_rank_script(folder, smi="exit 9", numactl='while [[ $1 == --* ]]; do shift; done; exec "$@"', **env):
    """Return the binding that rank.sh reports, its numactl calls, and the number of threads that it sets."""
    make_fake_program(folder / "bin", "nvidia-smi", smi)
    make_fake_program(folder / "bin", "numactl", numactl)
    words = ("bash", "-c", "echo ran with $OMP_NUM_THREADS")
    done = run_bash(RANK, *words, env=rank_settings(folder, RANKS_PER_NODE="4", **env))
    assert done.returncode == 0 and done.stdout.startswith("ran with "), done.stderr
    return done.stderr.partition(": ")[2].split(", OMP")[0], calls(folder / "bin", "numactl"), done.stdout.split()[-1]


def test_rank_is_bound_to_the_numa_node_of_its_gpu(node):
    binding, numactl, _ = run_rank_script(node, smi="echo 00000000:17:00.0")
    assert binding == "numactl --cpunodebind=1 --membind=1"
    assert numactl[-1].startswith("numactl --cpunodebind=1 --membind=1 bash -c")
    assert calls(node / "bin", "nvidia-smi")[0].startswith("nvidia-smi --id=0 ")


@pytest.mark.parametrize("rank, wanted", [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_ranks_without_gpu_are_spread_over_numa_nodes(node, rank, wanted):
    assert run_rank_script(node, SLURM_LOCALID=str(rank))[0] == f"numactl --cpunodebind={wanted} --membind={wanted}"


def test_slurm_nodeid_is_expanded_on_the_node(node):
    env = rank_settings(
        node, BIND="none", SLURM_NODEID="3", SLURM_PROCID="1", CACHE="/tmp/a_$SLURM_NODEID/${SLURM_NODEID}"
    )
    words = ("bash", "-c", 'echo "$CACHE $1 $TRITON_CACHE_DIR"', "x", "--path=/tmp/$SLURM_NODEID")
    done = run_bash(RANK, *words, env=env)
    assert done.stdout.split() == ["/tmp/a_3/3", "--path=/tmp/3", f"/tmp/triton_cache_{os.geteuid()}_3"]


@pytest.mark.parametrize("rank, ranks, profiled", [("0", "0", True), ("1", "0", False), ("9", "0 9", True)])
def test_profiled_ranks_run_under_nsys(node, rank, ranks, profiled):
    output = node / "nsys" / "run"
    env = rank_settings(node, BIND="none", SLURM_PROCID=rank, NSYS_OUTPUT=str(output))
    words = f"echo --profile-ranks 7 --profile --profile-ranks {ranks} --lr 1".split()
    if profiled:
        absent = run_bash(RANK, *words, env=env)
        assert absent.returncode == 2 and "there is no nsys on" in absent.stderr
    make_fake_program(node / "bin", "nsys")
    done = run_bash(RANK, *words, env=env)
    made = calls(node / "bin", "nsys")
    assert done.returncode == 0 and bool(made) == profiled == (not done.stdout)
    if profiled:
        assert "profile" in made[0] and "--capture-range=cudaProfilerApi" in made[0]
        assert f"--output={output}-rank{rank} echo --profile-ranks" in made[0]


def test_binding_can_be_disabled_replaced_or_unavailable(node):
    assert run_rank_script(node, BIND="none")[:2] == ("no binding", [])
    make_fake_program(node / "bin", "bindpcie", 'exec "$@"')
    program = str(node / "bin" / "bindpcie")
    assert run_rank_script(node, BINDPCIE_PATH=program)[:2] == (program, [])
    assert run_rank_script(node, numactl="exit 1")[0] == "no binding"
    assert run_rank_script(node, OMP_NUM_THREADS="5")[2] == "5"


def test_launch_writes_the_environment_next_to_the_rank_logs(tmp_path):
    settings = dict(GPUS_PER_NODE="2", NNODES="2", NODE_RANK="1", MASTER_ADDR="host0", ENVIRONMENT="NCCL_DEBUG=INFO")
    env = write_recipe(tmp_path, **settings, PYTHON=str(tmp_path / "bin" / "python"))
    make_fake_program(tmp_path / "bin", "python", "exit 75")
    done = run_bash(SCRIPTS / "launch.sh", *TINY, *MOCK, cwd=tmp_path, env=env)
    assert done.returncode == 75, done.stderr
    assert "NCCL_DEBUG=INFO" in (tmp_path / "out/logs/node1/environment.txt").read_text().splitlines()
    (line,) = calls(tmp_path / "bin", "python")
    flags = "--nnodes 2 --node-rank 1 --master-addr host0 --master-port 29500 --nproc-per-node 2"
    assert f"torchrun.py {flags} --log-dir {tmp_path}/out/logs/node1" in line

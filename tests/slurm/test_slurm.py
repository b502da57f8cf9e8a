"""sbatch_train.sh on a real SLURM of two nodes on this host: the outcomes that slurm_job.sh documents are the outcomes seen."""

import os
import shutil
import subprocess
import sys
import time

import pytest
from commands import environment, read_metrics, run
from structure.source import ROOT
from train.tiny import MOCK, TINY

ITERATIONS = 150
LINE = [*TINY, *MOCK, "--train-iters", str(ITERATIONS), "--lr-decay-iters", str(ITERATIONS), "--save-interval", "1000",
        "--distributed-backend", "gloo"]
LONG = [*LINE, "--train-iters", "1000000"]


class Cluster:
    """A running SLURM, and what the tests ask of it."""

    def __init__(self, configuration):
        self.env = {**environment(), "SLURM_CONF": str(configuration)}

    def __call__(self, *command):
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=True, timeout=60).stdout

    def submit(self, folder, *flags, **variables):
        recipe = folder / "tiny.yaml"
        recipe.write_text("MODEL_ARGS:\n  --num-layers: 2\n")
        settings = dict(MODEL=str(recipe), NNODES="2", GPUS_PER_NODE="1", GRES="none", RUN_TIME="10:00", PYTHON=sys.executable, BIND="none",
                        OUTPUT_PATH=str(folder / "out"), ENVIRONMENT="OMP_NUM_THREADS=1 MASTER_ADDR=127.0.0.1 GLOO_SOCKET_IFNAME=lo")
        done = subprocess.run(["bash", str(ROOT / "scripts" / "sbatch_train.sh"), *flags], cwd=folder, env={**self.env, **settings, **variables},
                              capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[2].rstrip(":")

    def job(self, job, name):
        text = self("scontrol", "show", "job", "-o", job).splitlines()[0]
        return next(word.partition("=")[2] for word in text.split() if word.startswith(f"{name}="))

    def wait(self, what, true, folder, seconds=120):
        deadline = time.monotonic() + seconds
        while not true():
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted((folder / "out" / "logs").rglob("*.log")))
            assert time.monotonic() < deadline, f"waited in vain: {what}\n{logs}"
            time.sleep(0.2)

    def wait_for_state(self, job, state, folder):
        self.wait(f"job {job} {state}", lambda: self.job(job, "JobState") == state, folder)


@pytest.fixture(scope="module")
def cluster(shared, tmp_path_factory):
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed (apt-get install --no-install-recommends slurm-wlm munge)")
    if os.geteuid() != 0:
        pytest.skip("bringing up SLURM needs root")
    tools, folder = shared / "tools", tmp_path_factory.mktemp("slurm") / "state"
    if not (tools / "slurm_up.sh").is_file():
        pytest.skip(f"no slurm_up.sh in {tools}")
    environ = {**os.environ, "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
    # to a file: the daemons keep their output open, a pipe would never end
    with open(folder.parent / "up.log", "w") as log:
        up = subprocess.run(["bash", str(tools / "slurm_up.sh"), "-n", "2", "-c", "2", "-g", "0", "-d", str(folder)], env=environ, check=False,
                            stdout=log, stderr=log, timeout=90)
    try:
        if up.returncode != 0:
            pytest.skip(f"SLURM does not come up here: {(folder.parent / 'up.log').read_text()[-500:]}")
        yield Cluster(folder / "slurm.conf")
    finally:
        subprocess.run(["bash", str(tools / "slurm_down.sh"), "-d", str(folder)], env=environ, check=False, timeout=60,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def records(folder):
    path = folder / "out" / "checkpoints" / "metrics.jsonl"
    return [record for record in read_metrics(path) if "validation" not in record] if path.exists() else []


def log_of(folder, job):
    return (folder / "out" / "logs" / f"slurm-{job}.log").read_text()


def test_signalled_twice_requeued_and_equal_to_an_undisturbed_run(cluster, tmp_path):
    job = cluster.submit(tmp_path, *LINE)
    for attempt, (name, reached) in enumerate((("USR1", 5), ("TERM", 60))):
        cluster.wait(f"iteration {reached}", lambda reached=reached: len(records(tmp_path)) >= reached, tmp_path)
        cluster("scancel", f"--signal={name}", job)
        cluster.wait("requeued", lambda attempt=attempt: cluster.job(job, "Restarts") == str(attempt + 1), tmp_path)
        cluster.wait_for_state(job, "PENDING", tmp_path)
        assert f"attempt {attempt}: exit code 75, job RUNNING" in log_of(tmp_path, job)
        cluster("scontrol", "update", f"JobId={job}", "StartTime=now")  # SLURM would wait two minutes
    cluster.wait_for_state(job, "COMPLETED", tmp_path)
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    whole = run([*LINE, "--save", "out/checkpoints"], undisturbed, 2, apart=True)
    assert whole.returncode == 0, whole.stderr
    disturbed, expected = records(tmp_path), records(undisturbed)
    assert [record["iteration"] for record in disturbed] == list(range(1, ITERATIONS + 1))
    for name in ("lm loss", "grad_norm", "learning_rate", "load_balancing_loss", "consumed_samples"):
        assert [record[name] for record in disturbed] == [record[name] for record in expected], name


def test_scancel_saves_and_is_final(cluster, tmp_path):
    job = cluster.submit(tmp_path, *LONG)
    cluster.wait("training", lambda: len(records(tmp_path)) >= 3, tmp_path)
    cluster("scancel", job)
    cluster.wait_for_state(job, "CANCELLED", tmp_path)
    cluster.wait("the save", lambda: (tmp_path / "out/checkpoints/latest_checkpointed_iteration.txt").exists(), tmp_path)
    cluster.wait("no job left", lambda: cluster("squeue", "-h") == "", tmp_path)
    assert cluster.job(job, "Restarts") == "0"
    assert (tmp_path / "out/checkpoints/latest_checkpointed_iteration.txt").read_text() == str(records(tmp_path)[-1]["iteration"])


def test_a_killed_rank_ends_the_job_with_its_words(cluster, tmp_path):
    job = cluster.submit(tmp_path, *LONG, "--distributed-timeout-seconds-after-init", "20")
    cluster.wait("training", lambda: len(records(tmp_path)) >= 3, tmp_path)
    kill_a_rank(tmp_path)
    cluster.wait_for_state(job, "FAILED", tmp_path)
    text = log_of(tmp_path, job)
    assert "the last words of the ranks" in text and "pretrain_moe.py: rank 0" in text
    assert cluster.job(job, "Restarts") == "0"


def kill_a_rank(folder):
    """kill -9 of rank 1, which is found by where it logs."""
    output = str((folder / "out" / "logs" / "latest").resolve() / "rank-1.log")
    for process in os.listdir("/proc"):
        try:
            name = f"/proc/{process}"
            if process.isdigit() and os.readlink(f"{name}/fd/1") == output and "pretrain_moe.py" in open(f"{name}/cmdline").read():
                os.kill(int(process), 9)
                return
        except OSError:
            continue
    raise AssertionError(f"no process writes to {output}")


def test_an_arrays_tasks_go_on_one_after_the_other(cluster, tmp_path):
    job = cluster.submit(tmp_path, *LINE, "--train-iters", "2", "--exit-duration-in-mins", "0", ARRAY="5")
    cluster.wait("the end of the array", lambda: cluster("squeue", "-h") == "", tmp_path)
    assert [record["iteration"] for record in records(tmp_path)] == [1, 2]
    logs = sorted((tmp_path / "out" / "logs").glob("slurm-*.log"))
    assert len(logs) == 3, "two iterations, one start that finds them done, and the rest cancelled"
    assert job


def test_a_node_that_goes_down_costs_the_work_since_the_last_save(cluster, tmp_path):
    job = cluster.submit(tmp_path, *LINE, "--save-interval", "5")
    cluster.wait("training", lambda: len(records(tmp_path)) >= 12, tmp_path)
    cluster("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    try:
        cluster.wait("requeued", lambda: cluster.job(job, "Restarts") == "1", tmp_path)
        cluster.wait_for_state(job, "PENDING", tmp_path)
    finally:
        # (its slurmd lives: SLURM may have taken it back already, and then refuses this)
        subprocess.run(["scontrol", "update", "NodeName=node2", "State=RESUME"], env=cluster.env, capture_output=True, check=False)
        cluster.wait("node2", lambda: cluster("sinfo", "-h", "-n", "node2", "-o", "%T").strip() == "idle", tmp_path)
    cluster("scontrol", "update", f"JobId={job}", "StartTime=now")
    cluster.wait_for_state(job, "COMPLETED", tmp_path)
    assert [record["iteration"] for record in records(tmp_path)] == list(range(1, ITERATIONS + 1))


def test_another_number_of_nodes_goes_on(cluster, tmp_path):
    first = cluster.submit(tmp_path, *LINE, "--exit-interval", "20")
    cluster.wait_for_state(first, "COMPLETED", tmp_path)
    second = cluster.submit(tmp_path, *LINE, "--exit-interval", "40", NNODES="1", DEPENDENCY=f"afterok:{first}")
    cluster.wait_for_state(second, "COMPLETED", tmp_path)
    assert [record["iteration"] for record in records(tmp_path)] == list(range(1, 41))
    losses = [record["lm loss"] for record in records(tmp_path)]
    assert abs(losses[20] - losses[19]) < 0.2

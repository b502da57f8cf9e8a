"""sbatch_train.sh on a real SLURM of two nodes on this host: the outcomes are those that slurm_job.sh documents.

All decisions from exit codes and job states are also tested with fake programs (tests/scripts/test_job.py).
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import environment, read_metrics, run
from structure.source import ROOT
from training.tiny import MOCK, TINY

ITERATIONS = 150
SCRIPTS = ROOT / "scripts"
LINE = [
    *TINY,
    *MOCK,
    "--train-iters",
    str(ITERATIONS),
    "--lr-decay-iters",
    str(ITERATIONS),
    "--save-interval",
    "1000",
    "--distributed-backend",
    "gloo",
]
LONG = [*LINE, "--train-iters", "1000000"]


class Cluster:
    """A running SLURM and the operations that the tests need."""

    def __init__(self, configuration):
        self.folder = str(configuration.parent)
        self.env = {**environment(), "SLURM_CONF": str(configuration)}

    def __call__(self, *command):
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=True, timeout=300).stdout

    def submit(self, folder, *flags, **variables):
        recipe = folder / "tiny.yaml"
        recipe.write_text("MODEL_ARGS:\n  --num-layers: 2\n")
        settings = dict(
            MODEL=str(recipe),
            NNODES="2",
            GPUS_PER_NODE="1",
            GRES="none",
            RUN_TIME="60:00",
            PYTHON=sys.executable,
            BIND="none",
            OUTPUT_PATH=str(folder / "out"),
            ENVIRONMENT="OMP_NUM_THREADS=1 MASTER_ADDR=127.0.0.1 GLOO_SOCKET_IFNAME=lo",
        )
        done = subprocess.run(
            ["bash", str(ROOT / "scripts" / "sbatch_train.sh"), *flags],
            cwd=folder,
            env={**self.env, **settings, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return re.search(r"^submitted job (\d+):", done.stdout, re.MULTILINE)[1]

    def job(self, job, name):
        text = self("scontrol", "show", "job", "-o", job).splitlines()[0]
        return next(word.partition("=")[2] for word in text.split() if word.startswith(f"{name}="))

    def wait(self, what, true, folder, seconds=900):
        deadline = time.monotonic() + seconds
        while not true():
            logs = "\n".join(
                path.read_text(errors="replace")[-2000:] for path in sorted((folder / "out" / "logs").rglob("*.log"))
            )
            assert time.monotonic() < deadline, f"timed out: {what}\n{logs}"
            time.sleep(0.2)

    def wait_for_state(self, job, *states, folder):
        self.wait(f"job {job} {states}", lambda: self.job(job, "JobState") in states, folder)

    def wait_for_requeue(self, job, count, folder):
        self.wait(f"requeue {count}", lambda: self.job(job, "Restarts") == str(count), folder)
        self.wait_for_state(job, "PENDING", folder=folder)

    def start_now(self, job, folder):
        """Start a requeued job, which SLURM would delay for two minutes after its end."""

        def started():
            if self.job(job, "JobState") not in ("PENDING", "COMPLETING"):
                return True
            subprocess.run(
                ["scontrol", "update", f"JobId={job}", "StartTime=now"],
                env=self.env,
                capture_output=True,
                check=False,
                timeout=300,
            )
            time.sleep(0.5)
            return False

        time.sleep(2)  # not in the second in which it was ended
        self.wait(f"job {job} starts again", started, folder)

    def cancel(self, folder):
        """End whatever still runs."""
        self("scancel", "--user=root")
        self.wait("no job left", lambda: self("squeue", "-h") == "", folder)


@pytest.fixture(scope="module")
def cluster(shared, tmp_path_factory):
    missing = [
        name
        for name in ("slurmctld", "slurmd", "sbatch", "munged")
        if shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") is None
    ]
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
        up = subprocess.run(
            ["bash", str(tools / "slurm_up.sh"), "-n", "2", "-c", "2", "-g", "0", "-d", str(folder)],
            env=environ,
            check=False,
            stdout=log,
            stderr=log,
            timeout=300,
        )
    try:
        if up.returncode != 0:
            pytest.skip(f"SLURM does not come up here: {(folder.parent / 'up.log').read_text()[-500:]}")
        yield make_cluster_with_preemption(folder / "slurm.conf")
    finally:
        subprocess.run(
            ["bash", str(tools / "slurm_down.sh"), "-d", str(folder)],
            env=environ,
            check=False,
            timeout=300,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def make_cluster_with_preemption(configuration):
    """The cluster, with a second partition whose jobs preempt those of the first after a grace time of one minute."""
    # A job that starts in the second in which it was ended is refused, its credential taken for the old one's. Elsewhere SLURM lets two
    # minutes pass; here three seconds (in microseconds).
    text = configuration.read_text().replace("sched_min_interval=0", "sched_min_interval=3000000")
    configuration.write_text(
        text.replace("PartitionName=batch", "PartitionName=batch PriorityTier=1 GraceTime=60")
        + (
            "PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2\nPreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
        )
    )
    cluster = Cluster(configuration)
    cluster("scontrol", "reconfigure")
    return cluster


def records(folder):
    path = folder / "out" / "checkpoints" / "metrics.jsonl"
    return [record for record in read_metrics(path) if "validation" not in record] if path.exists() else []


def newest_checkpoint(folder):
    path = folder / "out" / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(path.read_text()) if path.exists() else 0


def read_log(folder, job):
    return (folder / "out" / "logs" / f"slurm-{job}.log").read_text()


def read_rank_log(folder, attempt, rank):
    return (folder / "out" / "logs" / attempt / f"rank-{rank}.log").read_text()


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A part of the quickstart's text as tokens, and its flags with fewer iterations."""
    folder = tmp_path_factory.mktemp("text")
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(folder / "tokenizer.model")]
    prefix = str(folder / "text")
    for command in (
        ["quickstart_text.py", str(folder), "--megabytes", "2", "--vocab-size", "4096"],
        ["preprocess_data.py", "--input", f"{prefix}.jsonl", "--output-prefix", prefix, "--append-eod", *tokenizer],
    ):
        subprocess.run(
            [sys.executable, str(SCRIPTS / command[0]), *command[1:]],
            env=environment(),
            check=True,
            capture_output=True,
            timeout=600,
        )
    return f"{prefix}_text_document", [
        "--split",
        "90,5,5",
        *tokenizer,
        "--micro-batch-size",
        "8",
        "--train-iters",
        "14",
        "--lr-decay-iters",
        "14",
        "--log-interval",
        "1",
        "--eval-interval",
        "6",
        "--eval-iters",
        "1",
        "--save-interval",
        "1000",
        "--distributed-backend",
        "gloo",
    ]


def curves(folder):
    """The records of metrics.jsonl without times and memory."""
    clocks = (
        "elapsed",
        "memory",
        "throughput",
        "tokens_per",
        "flop",
        "mfu",
        "timers",
        "resumed_from",
        "run",
        "time",
        "interval",
        "saved",
    )
    return [
        {name: value for name, value in record.items() if not any(word in name.lower() for word in clocks)}
        for record in read_metrics(folder / "out" / "checkpoints" / "metrics.jsonl")
    ]


def test_quickstart_preempted_twice_equals_an_uninterrupted_run(cluster, tmp_path, quickstart):
    """Preempted by a signal and by a job of higher priority; the curve equals that of an uninterrupted run."""
    data, flags = quickstart
    job = cluster.submit(tmp_path, *flags, MODEL="mixtral_tiny", EP="1", DATA_PATH=data, COMMENT='two "words" \\ #1')
    assert 'Comment=two "words" \\ #1' in cluster("scontrol", "show", "job", job)
    cluster.wait("iteration 3", lambda: len(records(tmp_path)) >= 3, tmp_path)
    cluster("scancel", "--signal=USR1", job)
    cluster.wait_for_requeue(job, 1, tmp_path)
    first = newest_checkpoint(tmp_path)
    assert "attempt 0: interrupted, and saved (exit code 75)" in read_log(tmp_path, job) and first == len(
        records(tmp_path)
    )
    cluster.start_now(job, tmp_path)
    cluster.wait(f"iteration {first + 1}", lambda: len(records(tmp_path)) > first, tmp_path)
    cluster("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    cluster.wait_for_requeue(job, 2, tmp_path)
    assert first < newest_checkpoint(tmp_path) == len(records(tmp_path)) < 14
    cluster.start_now(job, tmp_path)
    cluster.wait_for_state(job, "COMPLETED", folder=tmp_path)
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    full = run(
        [
            "--preset",
            "mixtral_tiny",
            "--data-path",
            data,
            *flags,
            "--save",
            "out/checkpoints",
            "--tensorboard-dir",
            "out/tensorboard",
        ],
        undisturbed,
        2,
        new_interpreter=True,
    )
    assert full.returncode == 0, full.stderr
    assert curves(tmp_path) == curves(undisturbed)
    assert [record["iteration"] for record in records(tmp_path)] == list(range(1, 15))
    assert scalars(tmp_path) == scalars(undisturbed)
    text = read_log(
        tmp_path, job
    )  # what a user reads: every iteration once and in order, saves, why it ended and what then
    assert [int(number) for number in re.findall(r"\] iteration +(\d+)/ +14 \|", text)] == list(range(1, 15))
    expected = [
        r"attempt 0: 2 ranks on \S+, newest checkpoint: none",
        "successfully saved checkpoint",
        "receiving SIGUSR1",
        r"attempt 0: interrupted, and saved",
        r"attempt 1 starts when nodes are free",
        rf"attempt 1: 2 ranks on \S+, newest checkpoint: {first}",
        "attempt 1: interrupted, and saved",
        "attempt 2 starts when nodes are free",
        "attempt 2: ",
        "validation loss at iteration 12",
        r"attempt 2: done \(exit code 0\), newest checkpoint: 14",
    ]
    assert re.search(".*".join(expected), text, re.DOTALL)
    assert "Terminated" not in text and "exit code 75\n" not in text  # what looks like an error to bash and srun
    assert "end of arguments" not in text and "end of arguments" in read_rank_log(tmp_path, f"{job}-0", 0)
    for attempt in range(3):  # a log for each rank of each attempt, and what environment it had
        for rank in (0, 1):
            assert f"rank {rank} on " in read_rank_log(tmp_path, f"{job}-{attempt}", rank)
        environ = (tmp_path / "out" / "logs" / f"{job}-{attempt}" / "environment.txt").read_text().splitlines()
        assert {"CUDA_DEVICE_MAX_CONNECTIONS=1", "GLOO_SOCKET_IFNAME=lo", f"SLURM_JOB_ID={job}"} <= set(environ)


def scalars(folder):
    """TensorBoard's losses: name -> [(step, value)], in the order of the files."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "out" / "tensorboard"), {"scalars": 0}).Reload()
    found = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if "loss" in tag
    }
    assert found
    return found


def test_scancel_saves_and_does_not_requeue(cluster, tmp_path):
    job = cluster.submit(tmp_path, *LONG)
    cluster.wait("training", lambda: len(records(tmp_path)) >= 3, tmp_path)
    cluster("scancel", job)
    cluster.wait_for_state(job, "CANCELLED", folder=tmp_path)
    cluster.wait(
        "the save", lambda: (tmp_path / "out/checkpoints/latest_checkpointed_iteration.txt").exists(), tmp_path
    )
    cluster.wait("no job left", lambda: cluster("squeue", "-h") == "", tmp_path)
    assert cluster.job(job, "Restarts") == "0"
    assert (tmp_path / "out/checkpoints/latest_checkpointed_iteration.txt").read_text() == str(
        records(tmp_path)[-1]["iteration"]
    )


def test_killed_rank_fails_the_job_and_shows_the_rank_logs(cluster, tmp_path):
    job = cluster.submit(tmp_path, *LONG, "--distributed-timeout-seconds-after-init", "20")
    cluster.wait("training", lambda: len(records(tmp_path)) >= 3, tmp_path)
    os.kill(find_rank_1(tmp_path), signal.SIGKILL)
    cluster.wait_for_state(job, "FAILED", folder=tmp_path)
    text = read_log(tmp_path, job)
    assert "last lines of the ranks" in text and "pretrain_moe.py: rank 0" in text
    assert cluster.job(job, "Restarts") == "0"


def find_rank_1(folder):
    """The process id of rank 1, identified by its log file."""
    output = str((folder / "out" / "logs" / "latest").resolve() / "rank-1.log")
    for process, line in processes():
        try:
            if "pretrain_moe.py" in line and os.readlink(f"/proc/{process}/fd/1") == output:
                return process
        except OSError:
            continue
    raise AssertionError(f"no process writes to {output}")


def processes():
    """(id, command line) of every process of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append((int(path.parent.name), path.read_bytes().replace(b"\0", b" ").decode(errors="replace")))
        except OSError:
            continue
    return found


def test_array_tasks_resume_one_after_the_other(cluster, tmp_path):
    before = cluster("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true").strip()
    array = cluster.submit(
        tmp_path, *LINE, "--train-iters", "2", "--exit-duration-in-mins", "0", ARRAY="5", DEPENDENCY=f"afterok:{before}"
    )
    assert cluster.job(array, "Dependency") == f"afterok:{before}(unfulfilled)"
    cluster("scontrol", "release", before)
    cluster.wait("the end of the array", lambda: cluster("squeue", "-h") == "", tmp_path)
    assert [record["iteration"] for record in records(tmp_path)] == [1, 2]
    logs = sorted((tmp_path / "out" / "logs").glob("slurm-*.log"))
    assert len(logs) == 3, "two iterations, one start that finds them done, and the rest cancelled"


def test_node_down_requeues_and_resumes_on_one_node(cluster, tmp_path):
    """The job resumes from the last save, with one node instead of two."""
    job = cluster.submit(tmp_path, *LONG, "--save-interval", "5")
    cluster.wait("training", lambda: len(records(tmp_path)) >= 12, tmp_path)
    cluster("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    try:
        cluster.wait_for_requeue(job, 1, tmp_path)
        saved = newest_checkpoint(tmp_path)
        assert saved >= 10
        cluster("scontrol", "update", f"JobId={job}", "NumNodes=1-1", "NumTasks=1", "NumCPUs=1")
        cluster.start_now(job, tmp_path)
        cluster.wait("training on", lambda: newest_checkpoint(tmp_path) >= saved + 10, tmp_path)
        assert cluster.job(job, "NumNodes") == "1"
        cluster.cancel(tmp_path)
    finally:
        # (its slurmd lives: SLURM may have taken it back already, and then refuses this)
        subprocess.run(
            ["scontrol", "update", "NodeName=node2", "State=RESUME"], env=cluster.env, capture_output=True, check=False
        )
        cluster.wait("node2", lambda: cluster("sinfo", "-h", "-n", "node2", "-o", "%T").strip() == "idle", tmp_path)
    assert f"going on from iteration {saved} " in read_rank_log(tmp_path, f"{job}-1", 0)
    assert not (tmp_path / "out" / "logs" / f"{job}-1" / "rank-1.log").exists()
    assert [record["iteration"] for record in records(tmp_path)] == list(range(1, len(records(tmp_path)) + 1))
    losses = [record["lm loss"] for record in records(tmp_path)]
    assert abs(losses[saved] - losses[saved - 1]) < 0.2


def test_time_limit_requeues_and_two_stalled_attempts_end_the_job(cluster, tmp_path):
    """SLURM's signal before the time limit saves and requeues. Then two attempts that cannot save end the job."""
    python = tmp_path / "python"  # of the later attempts a signal ends the interpreter before it has begun
    python.write_text(
        f'#!/bin/bash\n[ "$SLURM_RESTART_COUNT" = "" ] || [ "$SLURM_RESTART_COUNT" = 0 ] || kill -TERM $$\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    job = cluster.submit(tmp_path, *LONG, RUN_TIME="1:00", SIGNAL_SECONDS="15", PYTHON=str(python))
    cluster.wait_for_requeue(job, 1, tmp_path)  # SLURM looks every thirty seconds
    assert "attempt 0: interrupted, and saved (exit code 75)" in read_log(tmp_path, job)
    saved = newest_checkpoint(tmp_path)
    assert saved == len(records(tmp_path)) > 0
    cluster.start_now(job, tmp_path)  # its second start SLURM may not delay any more
    cluster.wait("requeue 2", lambda: cluster.job(job, "Restarts") == "2", tmp_path)
    cluster.start_now(job, tmp_path)
    cluster.wait_for_state(job, "FAILED", folder=tmp_path)
    assert f"2 consecutive attempts have saved no newer checkpoint (newest iteration: {saved})" in read_log(
        tmp_path, job
    )
    assert cluster.job(job, "Restarts") == "2" and newest_checkpoint(tmp_path) == saved


@pytest.mark.slow
def test_sigterm_at_the_time_limit_saves_and_requeues(cluster, tmp_path):
    """Without an earlier signal, SLURM sends SIGTERM to the ranks and waits KillWait seconds."""
    job = cluster.submit(tmp_path, *LONG, RUN_TIME="1:00", SIGNAL_SECONDS="0")
    cluster.wait_for_requeue(job, 1, tmp_path)
    assert "DUE TO TIME LIMIT" in read_log(tmp_path, job)
    assert newest_checkpoint(tmp_path) == len(records(tmp_path)) > 0
    cluster.cancel(tmp_path)


@pytest.mark.slow
def test_node_failure_requeues_the_job(cluster, tmp_path):
    """The rank, the daemon and the job step of a node are killed: the other rank ends, and SLURM requeues the job."""
    job = cluster.submit(tmp_path, *LONG, "--save-interval", "5", "--distributed-timeout-seconds-after-init", "20")
    cluster.wait("training", lambda: len(records(tmp_path)) >= 12, tmp_path)
    rank = find_rank_1(tmp_path)
    step = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    (daemon,) = [process for process, line in processes() if "slurmd -D -N node2" in line]
    for process in (daemon, step, rank):
        os.kill(process, signal.SIGKILL)
    cluster.wait_for_requeue(job, 1, tmp_path)
    assert newest_checkpoint(tmp_path) >= 10
    cluster.cancel(tmp_path)

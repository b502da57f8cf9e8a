import os

import pytest
import torch
from training.tiny import MOCK, TINY

from arguments import parse_args
from moe_trainer.launch_env import LaunchEnv, first_slurm_host, read_launch_env
from moe_trainer.training import initialize
from moe_trainer.training.initialize import cores_by_sharers
from tests import commands
from tests.commands import run


def test_torchrun_variables_take_precedence_over_slurm():
    place = read_launch_env(
        {
            "RANK": "3",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "MASTER_ADDR": "a",
            "MASTER_PORT": "1",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": "7",
            "SLURM_NTASKS": "16",
        }
    )
    assert (place.rank, place.world_size, place.local_rank, place.master_addr, place.master_port) == (3, 8, 1, "a", 1)


def test_slurm_step_variables_give_rank_and_master_address():
    place = read_launch_env(
        {
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": "5",
            "SLURM_NTASKS": "8",
            "SLURM_LOCALID": "1",
            "SLURM_STEP_NODELIST": "gpu[003-004]",
            "SLURM_JOB_ID": "12",
        }
    )
    assert (place.rank, place.world_size, place.local_rank, place.master_addr, place.source) == (
        5,
        8,
        1,
        "gpu003",
        "SLURM",
    )
    assert place.master_port == 20012 and place.ranks_per_node is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "0", "LOCAL_WORLD_SIZE": "4"}, 4),
        ({"RANK": "0", "LOCAL_WORLD_SIZE": "4", "NVLINK_DOMAIN_SIZE": "72"}, 72),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, 8),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "8(x3),4"}, None),
        ({"RANK": "0"}, None),
    ],
)
def test_ranks_per_node_of_the_launcher(variables, expected):
    assert read_launch_env(variables).ranks_per_node == expected


def test_slurm_batch_script_is_one_process():
    """The shell of sbatch has a task's variables; that of salloc has the job's only. srun alone sets SLURM_STEP_ID."""
    job = {"SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_TASKS_PER_NODE": "8", "SLURM_JOB_ID": "12"}
    for shell in (job, {**job, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}):
        place = read_launch_env(shell)
        assert place.world_size == 1 and place.hint is not None
        assert "SLURM job 12 asked for 8 tasks (SLURM_NTASKS): start the ranks with srun" in place.hint


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_NTASKS": "8"},  # left over: no job
        {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0"},  # sbatch without --ntasks
        {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "1"},
        {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "8", "RANK": "0", "WORLD_SIZE": "1"},  # torchrun
        {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "MASTER_ADDR": "a"},
    ],
)
def test_other_processes_get_no_hint_of_a_job(variables):
    assert read_launch_env(variables).hint is None


def test_the_hint_of_a_job_is_in_the_log(tmp_path):
    shell = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    done = run([*TINY, *MOCK, "--train-iters", "1"], tmp_path, **shell)
    assert done.returncode == 0 and done.stderr.count("SLURM job 12 asked for 4 tasks") == 1, done.stderr


@pytest.mark.parametrize(
    "nodes, host",
    [
        ("gpu003", "gpu003"),
        ("gpu003,gpu009", "gpu003"),
        ("gpu[003-010,12],cpu1", "gpu003"),
        ("n[7]-ib,n9", "n7-ib"),
    ],
)
def test_first_slurm_host_of_a_node_list(nodes, host):
    assert first_slurm_host(nodes) == host


@pytest.mark.parametrize(
    "env, needle",
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be an integer"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "rank 2 is not valid for world size 2",
        ),
    ],
)
def test_invalid_launch_variables_are_named(env, needle):
    with pytest.raises(ValueError, match=needle):
        read_launch_env(env)


def test_ranks_share_the_cores_of_their_affinity_and_the_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(initialize.platform, "node", lambda: "n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {9, 10, 2}, raising=False)
    quota = tmp_path / "cpu.max"
    own = {"threads/n/2 9 10": 3}
    assert cores_by_sharers(quota) == own
    for text, shared in (("max 100000", {}), ("100000 100000", {"threads/n": 1}), ("50000 100000", {"threads/n": 1}), ("9900000 100000", {"threads/n": 99})):  # fmt: skip
        quota.write_text(text + "\n")
        assert cores_by_sharers(quota) == own | shared


def test_ranks_without_a_number_of_threads_do_not_take_all_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(initialize, "cores_by_sharers", lambda: {"threads/all": 6, f"threads/{os.environ['RANK']}": 5})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: print(f"{count} threads each"))
    line = [*TINY, *MOCK, "--train-iters", "1"]
    assert "3 threads each" not in run(line, tmp_path, 2).stdout  # the user's number stays
    environment = commands.environment
    monkeypatch.setattr(
        commands,
        "environment",
        lambda **extra: {name: value for name, value in environment(**extra).items() if name != "OMP_NUM_THREADS"},
    )
    finished = run(line, tmp_path, 2)
    assert finished.returncode == 0 and finished.stdout.count("3 threads each") == 2, finished.stderr


@pytest.mark.parametrize(("device", "backend"), [("cuda:3", "nccl"), ("cpu", "gloo")])
def test_the_process_group_is_bound_to_the_device(monkeypatch, caplog, device, backend):
    """NCCL then makes the communicators at once, and those of the groups by splitting the first."""
    seen = {}
    store = torch.distributed.HashStore()
    monkeypatch.setattr(initialize.dist, "rendezvous", lambda *rest, **options: iter([(store, 0, 2)]))
    monkeypatch.setattr(
        initialize.dist, "init_process_group", lambda backend, **options: seen.update(options, backend=backend)
    )
    args = parse_args([*TINY, *MOCK, "--train-iters", "1"], 2)
    with caplog.at_level("INFO"):
        found = initialize._init_process_group(args, LaunchEnv(0, 2, 0, "localhost", 1, "test"), torch.device(device))
    assert found is store and "waiting for all 2 ranks (test) to meet at localhost:1, at most" in caplog.text
    assert (seen["backend"], seen["device_id"]) == (backend, torch.device(device) if backend == "nccl" else None)

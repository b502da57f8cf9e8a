import pytest

from moe_trainer.place import find_place, first_host


def test_torchrun_variables_win():
    place = find_place({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1",
                        "SLURM_STEP_ID": "0", "SLURM_PROCID": "7", "SLURM_NTASKS": "16"})
    assert (place.rank, place.world_size, place.local_rank, place.master_addr, place.master_port) == (3, 8, 1, "a", 1)


def test_slurm_step_is_mapped():
    place = find_place({"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1",
                        "SLURM_STEP_NODELIST": "gpu[003-004]", "SLURM_JOB_ID": "12"})
    assert (place.rank, place.world_size, place.local_rank, place.master_addr, place.source) == (5, 8, 1, "gpu003", "SLURM")
    assert place.master_port == 20012


def test_the_batch_script_itself_is_one_process():
    assert find_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}).world_size == 1


@pytest.mark.parametrize("nodes, host", [
    ("gpu003", "gpu003"), ("gpu003,gpu009", "gpu003"), ("gpu[003-010,12],cpu1", "gpu003"), ("n[7]-ib,n9", "n7-ib"),
])
def test_first_host(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize("env, needle", [
    ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be an integer"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
    ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "rank 2 does not fit a world size of 2"),
])
def test_mistakes_are_named(env, needle):
    with pytest.raises(ValueError, match=needle):
        find_place(env)

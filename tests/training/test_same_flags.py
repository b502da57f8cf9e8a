"""Ranks with different flags or different folders end at the start instead of waiting for each other."""

import pytest
from harness import run_ranks
from training.tiny import MOCK, TINY

import arguments
from moe_trainer.errors import UserError
from moe_trainer.launch_env import LaunchEnv
from moe_trainer.parallel.state import ParallelState
from moe_trainer.training.initialize import check_same_flags
from moe_trainer.training.resume import holds_checkpoint


def check_flags_on_rank(rank, n):
    def check(*flags):
        check_same_flags(
            arguments.parse_args([*TINY, *MOCK, "--train-iters", "2", "--micro-batch-size", "1", *flags], n),
            LaunchEnv(rank, n, rank, "127.0.0.1", 1, "test"),
        )

    check()
    check("--local-rank", str(rank), "--data-cache-path", f"/node{rank}")
    with pytest.raises(UserError) as refused:
        check(*(["--lr", "0.5", "--seed", "7"] if rank > 0 else ["--lr", "0.25"]))
    lines = str(refused.value).splitlines()
    assert "not started with the same flags" in lines[0] and len(lines) == 3
    assert "  --lr: 0.25 on rank 0, 0.5 on rank 1" in lines and "  --seed: 1234 on rank 0, 7 on rank 1" in lines
    with pytest.raises(UserError, match=r"\.\.\. and "):
        check(
            "--seed",
            str(rank + 1),
            "--lr",
            f"0.{rank + 1}",
            "--min-lr",
            f"0.0{rank + 1}",
            "--clip-grad",
            str(rank + 1),
            "--weight-decay",
            f"0.{rank + 1}",
            "--adam-beta1",
            f"0.{rank + 1}",
        )


def test_different_flags_are_refused_on_every_rank():
    run_ranks(check_flags_on_rank, 4)


def check_folder_on_rank(rank, n, folder):
    ps = ParallelState.create(n, rank)
    mine = folder / str(rank)  # what this node sees
    assert holds_checkpoint(str(mine), ps)
    (folder / "0/latest_checkpointed_iteration.txt").write_text("nonsense")
    with pytest.raises(ValueError, match="latest_checkpointed_iteration.txt"):
        holds_checkpoint(str(mine), ps)


def test_rank_0_decides_whether_there_is_a_checkpoint(tmp_path):
    (tmp_path / "0/iter_0000005").mkdir(parents=True)
    (tmp_path / "0/latest_checkpointed_iteration.txt").write_text("5")
    (tmp_path / "0/iter_0000005/metadata.json").write_text("{}")
    run_ranks(check_folder_on_rank, 2, tmp_path)

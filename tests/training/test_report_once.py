"""An error that all ranks raise is printed once; an error of one rank is not lost."""

import pytest
import torch.distributed as dist
from commands import run
from harness import run_ranks
from training.tiny import TINY

from moe_trainer.errors import UserError, report_once_per_job
from moe_trainer.training.initialize import make_error_dedup_counter


def _raised(rank, n, path, words):
    count = make_error_dedup_counter(dist.FileStore(path, n)) if path else None
    try:
        with report_once_per_job(count):
            if words[rank]:
                raise UserError(words[rank])
    except UserError as error:
        return error.reported_elsewhere
    return "nothing"


@pytest.mark.parametrize(
    "words, printing",
    [(("missing",) * 3, 1), (("missing on a", "missing on b", "missing on a"), 2), (("", "mine", ""), 1)],
)
def test_equal_errors_are_printed_by_one_rank(tmp_path, words, printing):
    found = run_ranks(_raised, 3, str(tmp_path / "store"), words)
    assert found.count(False) == printing and found.count("nothing") == words.count("")


def test_every_rank_prints_its_error_without_a_store(monkeypatch):
    assert _raised(0, 1, None, ("missing",)) is False

    def gone(text):
        raise dist.DistError("connection lost")

    with pytest.raises(UserError) as caught, report_once_per_job(gone):
        raise UserError("missing")
    assert caught.value.reported_elsewhere is False


def test_missing_file_on_two_ranks_is_reported_once(tmp_path):
    argv = [
        *TINY,
        *"--data-path nowhere/text --split 100,0,0 --train-iters 2 --tokenizer-type NullTokenizer --vocab-size 60".split(),
    ]
    finished = run(argv, tmp_path, 2)  # its errors are those of both ranks
    assert finished.returncode == 2 and finished.stderr.count("pretrain_moe.py: ") == 1, finished.stderr
    assert finished.stderr.count("nowhere/text") == 1 and "Traceback" not in finished.stderr, finished.stderr

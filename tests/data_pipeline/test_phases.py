"""Training phases: every phase reads its own data from the beginning, in a run that stops between them or continues."""

import numpy as np
import pytest
from data_pipeline.corpora import FixedTokenizer, assert_equal_runs, data_args, losses, training_args, write_corpus
from training.forked import pretrain
from training.tiny import TINY

from moe_trainer.data.build import build_datasets
from moe_trainer.data.sources import training_phases

BATCH = 4


@pytest.fixture
def prefixes(tmp_path):
    lengths = np.full(40, 33)
    return [write_corpus(tmp_path / name, lengths, vocab_size=120, seed=seed) for seed, name in enumerate("abc")]


def files(tmp_path, prefixes):
    blends = [prefixes[0], f"0.5 {prefixes[0]} 0.5 {prefixes[1]}", prefixes[2]]
    paths = [tmp_path / f"blend{number}" for number in range(3)]
    for path, blend in zip(paths, blends):
        path.write_text(blend)
    return list(map(str, paths)), blends


def build(consumed, **data):
    sizes = training_args(global_batch_size=BATCH, train_iters=10, eval_interval=100, eval_iters=0)
    return build_datasets(data_args(**data), sizes, FixedTokenizer(), consumed=consumed).train


def test_phases_of_a_run():
    training = training_args(global_batch_size=BATCH, train_iters=10, eval_interval=100, eval_iters=0)
    stops, continues = (
        data_args(phase_transition_iterations=text, phase_data_args_path=files)
        for text, files in (("7,3", None), ("3,7", ["a", "b", "c"]))
    )
    assert [training_phases(stops, training, n) for n in (0, 11, 12, 28, 40)] == [
        ((0, 0, 12),), ((0, 0, 12),), ((1, 12, 28),), ((2, 28, 40),), ((2, 28, 40),)
    ]  # fmt: skip
    assert training_phases(continues, training, 12) == ((1, 12, 28), (2, 28, 40))
    short = training_args(global_batch_size=BATCH, train_iters=2, eval_interval=100, eval_iters=0)
    assert training_phases(continues, short, 0) == ((0, 0, 8),)
    assert training_phases(data_args(), training, 30) == ((0, 0, 40),)


def test_each_phase_reads_its_blend_from_the_beginning(prefixes, tmp_path):
    paths, blends = files(tmp_path, prefixes)
    together = build(0, phase_transition_iterations="3,7", phase_data_args_path=paths)
    resumed = build(20, phase_transition_iterations="3,7", phase_data_args_path=paths)
    assert len(together) == len(resumed) == 40 and resumed.begin == 12 and len(resumed.datasets) == 2
    for (first, end), blend in zip(((0, 12), (12, 28), (28, 40)), blends):
        alone = build(first, phase_transition_iterations="3,7", train_data_path=blend.split())
        assert alone.begin == first and len(alone) == end
        single = build_datasets(data_args(train_data_path=blend.split()), training_args(), FixedTokenizer(), (end - first, 0, 0)).train  # fmt: skip
        for index in range(first, end):
            np.testing.assert_array_equal(together.tokens(index), single.tokens(index - first))
            np.testing.assert_array_equal(alone.tokens(index), single.tokens(index - first))
            assert together.part_lengths(index) == single.part_lengths(index - first)
            assert together.locate(index, 5) == single.locate(index - first, 5)
            if index >= 12:
                np.testing.assert_array_equal(resumed.tokens(index), single.tokens(index - first))
    with pytest.raises(IndexError, match="sample 11 lies outside"):
        resumed.tokens(11)


RUN = [*TINY, *"--tokenizer-type NullTokenizer --vocab-size 500".split()]
KEEP = "--save ckpt --load ckpt --save-interval 100".split()


def test_a_run_that_stops_between_phases_equals_one_that_continues(prefixes, tmp_path, capfd):
    paths, blends = files(tmp_path, prefixes)
    argv = [*RUN, *"--train-iters 10 --phase-transition-iterations 3,7".split()]
    killed = [*argv, *KEEP, "--phase-data-args-path", *paths]
    whole = pretrain([*argv, "--phase-data-args-path", *paths], tmp_path / "whole")
    pretrain([*killed, "--exit-interval", "5"], tmp_path / "killed")
    continued, _ = pretrain(killed, tmp_path / "killed", world_size=2)
    for number, blend in enumerate(blends):
        phases = pretrain([*argv, *KEEP, "--train-data-path", *blend.split()], tmp_path / "phases")
        assert len(phases[0]) == (3, 7, 10)[number]
    assert "is not that of the checkpoint" not in capfd.readouterr().err  # another blend is expected here
    assert_equal_runs(phases, whole, 10)
    assert losses(continued) == pytest.approx(losses(whole[0]), rel=1e-6)


def test_packed_samples_of_blended_phases_continue_exactly(tmp_path):
    lengths = np.random.RandomState(1).randint(3, 33, 60)
    prefixes = [write_corpus(tmp_path / name, lengths, vocab_size=120, seed=seed) for seed, name in enumerate("abc")]
    flags = "--train-iters 8 --use-varlen-dataset --phase-transition-iterations 3,7 --phase-data-args-path".split()
    argv = [*RUN, *flags, *files(tmp_path, prefixes)[0]]
    whole = pretrain(argv, tmp_path / "whole")
    pretrain([*argv, *KEEP, "--exit-interval", "5"], tmp_path / "killed")
    assert_equal_runs(pretrain([*argv, *KEEP], tmp_path / "killed"), whole, 8)


def test_another_batch_size_is_an_error(prefixes, tmp_path):
    argv = [*RUN, *KEEP, *"--train-iters 10 --phase-transition-iterations 3 --override-opt_param-scheduler".split()]
    argv += ["--train-data-path", prefixes[0]]
    pretrain(argv, tmp_path)
    problem = "12 samples are consumed after iteration 3; --global-batch-size 8"
    with pytest.raises(Exception, match=f"--phase-transition-iterations: {problem}"):
        pretrain([*argv, "--global-batch-size", "8"], tmp_path)

"""A checkpoint loads bitwise under any other layout (weights, both moments, expert bias), and training continues the same."""

import functools

import pytest
import torch
from harness import run_ranks
from training.forked import pretrain
from training.layouts import make_argv, make_run, shallow
from training.resuming import assert_alike, load_and_save, train_and_save
from training.tiny import MOCK, TINY

from arguments import parse_args
from arguments.vocabulary import get_padded_vocab_size
from moe_trainer.checkpoint.inspect import describe, differences
from moe_trainer.checkpoint.verify import verify_checkpoint
from moe_trainer.model.weights import gather_named_tensors, load_named_weights
from moe_trainer.parallel.state import ParallelState

KIND = "deepseek"
FEW = ["--global-batch-size", "4"]
SMALL = [*FEW, "--num-experts", "4"]


def _argv(ep, distributed):
    flags = f"--expert-model-parallel-size {ep} --moe-token-dispatcher-type alltoall --micro-batch-size 1"
    return [*shallow(make_argv(KIND)), *FEW, *flags.split(), *(["--use-distributed-optimizer"] if distributed else [])]


# (ranks, EP, distributed optimizer); each is loaded from the one before it, the first from (2, 2, True)
CHAIN = ((1, 1, False), (4, 4, False), (4, 2, True))


def test_state_is_unchanged_across_expert_parallel_layouts(tmp_path):
    first = tmp_path / "first"
    run_ranks(train_and_save, 2, [*_argv(2, True), *SMALL], first, 0)
    kept = describe(first / "iter_0000002")
    for moment in ("exp_avg", "exp_avg_sq"):
        assert f"optimizer.state.{moment}.decoder.layers.1.mlp.experts.experts.linear_fc1.weight" in kept
    source, results = first, []
    for number, (n, ep, sharded) in enumerate(CHAIN):
        target = tmp_path / str(number)
        results.append(run_ranks(load_and_save, n, [*_argv(ep, sharded), *SMALL], source, target, 1)[0])
        assert differences(first / "iter_0000002", target / "iter_0000002") == [], CHAIN[number]
        source = target
    for steps in results[1:]:
        assert_alike(steps, results[0])


# ---- every dimension

PRETRAINED = (
    "--micro-batch-size 1 --moe-token-dispatcher-type alltoall --tensor-model-parallel-size 2 --sequence-parallel "
)
SAVED = (
    4,
    PRETRAINED + "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
)
# name -> (ranks, mapping); the slow ones are marked so
RESUMED = {
    "one process": (1, "--micro-batch-size 1"),
    "tp": (2, PRETRAINED),
    "pp, virtual stages": (
        2,
        "--micro-batch-size 1 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "pp, layout, ep, distributed optimizer": (
        4,
        "--micro-batch-size 1 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --use-distributed-optimizer "
        "--moe-token-dispatcher-type alltoall --pipeline-model-parallel-layout Et|tttmL",
    ),
    "tp without sp, allgather": (
        4,
        "--micro-batch-size 1 --tensor-model-parallel-size 2 --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type allgather --use-distributed-optimizer",
    ),
    "ep beyond dp": (4, PRETRAINED + "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1"),
    "cp, ep": (
        4,
        "--micro-batch-size 1 --context-parallel-size 2 --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall",
    ),
    "tp, cp, pp, distributed optimizer": (
        8,
        PRETRAINED + "--context-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 4 "
        "--expert-tensor-parallel-size 1 --use-distributed-optimizer",
    ),
    "dp, etp, optimizer instances": (
        8,
        PRETRAINED + "--expert-tensor-parallel-size 2 --expert-model-parallel-size 2 --use-distributed-optimizer "
        "--num-distributed-optimizer-instances 2",
    ),
    "four stages": (
        8,
        "--micro-batch-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
}
ORDINARY = ("one process", "pp, layout, ep, distributed optimizer")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By kind of model: a checkpoint under (TP 2, EP 2, PP 2), and the next steps of that run."""
    n, mapping = SAVED

    @functools.cache
    def make(kind):
        folder = tmp_path_factory.mktemp("saved")
        return folder, run_ranks(train_and_save, n, [*make_argv(kind), *SMALL, *mapping.split()], folder)[0]

    return make


@pytest.mark.parametrize(
    "name", [name if name in ORDINARY else pytest.param(name, marks=pytest.mark.slow) for name in RESUMED]
)
def test_tp2_ep2_pp2_checkpoint_resumes_under_another_layout(saved, tmp_path, name):
    """The stored tensors are bitwise equal, and the next two losses are those of the uninterrupted run."""
    # under cp the MTP loss is normalised by each rank's own tokens, as the reference does it: another gradient, so no MTP there
    kind = "plain" if "cp" in name else KIND
    folder, expected = saved(kind)
    n, mapping = RESUMED[name]
    steps = run_ranks(load_and_save, n, [*make_argv(kind), *SMALL, *mapping.split()], folder, tmp_path)
    assert verify_checkpoint(tmp_path / "iter_0000002").problems == []
    assert differences(folder / "iter_0000002", tmp_path / "iter_0000002") == []
    for rank in steps:
        assert_alike(rank, expected)


@pytest.mark.parametrize(
    "mapping",
    [
        "--pipeline-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
    ],
)
def test_tied_output_layer_is_stored_once(tmp_path, mapping):
    """The last stage's copy of the embedding is not written, and is filled when it loads."""
    one = [*shallow(make_argv("biases, tied head")), *SMALL, "--global-batch-size", "2"]
    argv = [*one, *mapping.split()]
    expected = run_ranks(train_and_save, 2, argv, tmp_path / "two", 1)[0]
    assert "output_layer.weight" not in describe(tmp_path / "two/iter_0000002")
    alone = run_ranks(load_and_save, 1, one, tmp_path / "two", tmp_path / "one", 1)[0]
    again = run_ranks(load_and_save, 2, argv, tmp_path / "one", tmp_path / "back", 1)[0]
    assert differences(tmp_path / "two/iter_0000002", tmp_path / "back/iter_0000002") == []
    assert_alike(alone, expected)
    assert_alike(again, expected)


NARROW = {
    "latents": (
        "--moe-latent-size 6",
        {
            "fc1_latent_proj.weight": (2, 6, 16),
            "fc2_latent_proj.weight": (2, 16, 6),
            "experts.experts.linear_fc2.weight": (2, 8, 6, 24),
        },
    ),
    "slices": (
        "--G-I 2 --G-O 2 --R-I 1 --R-O 2 --moe-router-load-balancing-type seq_aux_loss",
        {"experts.experts.linear_fc1.weight": (2, 8, 24, 16), "experts.experts.linear_fc2.weight": (2, 8, 8, 12)},
    ),
}


@pytest.mark.parametrize("kind", NARROW)
def test_narrow_experts_resume_under_another_layout(tmp_path, kind):
    flags, shapes = NARROW[kind]
    argv = [*shallow(make_argv("plain")), *FEW, *flags.split()]
    mapping = "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1".split()
    expected = run_ranks(train_and_save, 2, [*argv, *mapping], tmp_path / "two", 1)[0]
    kept = describe(tmp_path / "two/iter_0000002")
    assert {name: kept[f"decoder.layers.mlp.{name}"][0] for name in shapes} == shapes
    # losses by sequence are those of a context rank's part
    context = [] if "seq_aux_loss" in argv else "--context-parallel-size 2 --use-distributed-optimizer".split()
    alone = run_ranks(load_and_save, 2 if context else 1, [*argv, *context], tmp_path / "two", tmp_path / "one", 1)[0]
    assert verify_checkpoint(tmp_path / "one/iter_0000002").problems == []
    assert differences(tmp_path / "two/iter_0000002", tmp_path / "one/iter_0000002") == []
    assert_alike(alone, expected)


def test_a_run_resumes_under_another_mapping(tmp_path):
    """From the command line: data position, schedules and counters come along when stages and tensor ranks become experts' ranks."""
    # the padded vocabulary is part of the loss, and grows with tp
    flags = (
        "--train-iters 4 --lr-warmup-iters 1 --save-interval 100 --save ckpt --load ckpt --rampup-batch-size 2 2 6 "
        "--moe-token-dispatcher-type alltoall --micro-batch-size 1 --make-vocab-size-divisible-by 64"
    )
    argv = [*TINY, *MOCK, *flags.split()]
    before = (
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --exit-interval 2".split()
    )
    after = (
        "--expert-model-parallel-size 2 --use-distributed-optimizer --exit-on-missing-checkpoint "
        "--ckpt-fully-parallel-load"
    ).split()
    full, weights = pretrain(argv, tmp_path / "whole")
    pretrain([*argv, *before], tmp_path / "parts", 4)
    parts, other = pretrain([*argv, *after], tmp_path / "parts", 2)
    assert [record["iteration"] for record in parts] == [1, 2, 3, 4]
    for one, two in zip(full, parts, strict=True):
        for name in ("consumed_samples", "learning_rate", "lm loss", "load_balancing_loss", "grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=2e-6), (one["iteration"], name)
    assert (
        all(torch.allclose(other[name], weight, rtol=0, atol=2e-6) for name, weight in weights.items())
        and weights.keys() == other.keys()
    )


# ---- weights by name


def _full_model(rank, n):
    """The tensors that rank 0 gathers by name (none on other ranks), and the numbers of local experts of a rank."""
    run = make_run(_argv(2, False), rank, ParallelState.create(n, rank, ep=2), 0)
    full = dict(gather_named_tensors(run.chunks, run.ps, lambda param: param.data))
    return {name: tensor.clone() for name, tensor in full.items()}, {
        param.shape[0] for param in run.chunks[0].parameters() if param.info.stacked
    }


def test_expert_parallel_ranks_initialize_like_one_process():
    run = make_run(_argv(1, False), 0, ParallelState.single(), 0)
    expected = dict(gather_named_tensors(run.chunks, run.ps, lambda param: param.data))
    for rank, (full, local) in enumerate(run_ranks(_full_model, 4)):
        assert local == {4}
        assert list(full) == (list(expected) if rank == 0 else [])
        assert all(torch.equal(tensor, expected[name]) for name, tensor in full.items())


def _load_mismatched_weights(rank, n, weights):
    """The message of this rank when one expert is missing and another one's shape is wrong."""
    run = make_run(_argv(2, False), rank, ParallelState.create(n, rank, ep=2), 0)
    load_named_weights(run.chunks, weights, run.ps)
    prefix = "decoder.layers.1.mlp.experts.local_experts"
    broken = {name: tensor for name, tensor in weights.items() if name != f"{prefix}.7.linear_fc1.weight"}
    broken |= {f"{prefix}.1.linear_fc2.weight": torch.zeros(3), "decoder.extra": torch.zeros(1)}
    with pytest.raises(ValueError) as error:
        load_named_weights(run.chunks, broken, run.ps)
    return str(error.value)


def test_mismatched_weights_raise_the_same_error_on_every_rank():
    run = make_run(_argv(1, False), 0, ParallelState.single(), 0)
    weights = {
        name: tensor.clone() for name, tensor in gather_named_tensors(run.chunks, run.ps, lambda param: param.data)
    }
    one, other = run_ranks(_load_mismatched_weights, 2, weights)
    assert one == other
    for words in (
        "1 missing",
        "local_experts.7.linear_fc1.weight",
        "1 unexpected",
        "decoder.extra",
        "local_experts.1.linear_fc2.weight: given [3]",
    ):
        assert words in one


def test_the_padded_vocabulary_of_a_checkpoint_is_kept(tmp_path):
    """Padding depends on the tensor-parallel size and takes part in the softmax: it must not change with the mapping."""
    argv = [*TINY, *MOCK, "--train-iters", "4", "--eval-iters", "0"]
    rows = {
        tp: get_padded_vocab_size(parse_args([*argv, "--tensor-model-parallel-size", str(tp)], tp), 120)
        for tp in (1, 2)
    }
    assert rows[1] != rows[2], "the flags alone would pad differently"
    full, _ = pretrain([*argv, "--save", "saved", "--save-interval", "2"], tmp_path)
    resumed, weights = pretrain(
        [*argv, "--load", str(tmp_path / "saved"), "--ckpt-step", "2", "--tensor-model-parallel-size", "2"],
        tmp_path / "resumed",
        world_size=2,
    )
    assert weights["embedding.word_embeddings.weight"].shape[0] == rows[1]
    losses = {record["iteration"]: record["lm loss"] for record in full if "lm loss" in record}
    assert [record["lm loss"] for record in resumed] == pytest.approx([losses[3], losses[4]], rel=1e-6)

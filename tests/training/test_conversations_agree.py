"""Conversations: packed, alone and padded to rows they have the same losses and gradients."""

import json
from functools import partial

import pytest
import torch
from commands import read_metrics, run
from data_pipeline.corpora import training_args, write_chat_tokenizer
from harness import run_ranks
from training.layouts import MODEL, create_groups

from arguments import parse_args
from moe_trainer.data.build import batch_format, build_datasets
from moe_trainer.data.loader import make_packed_batch, make_padded_batch
from moe_trainer.data.tokenizer import build_tokenizer
from moe_trainer.model.build import build_chunks
from moe_trainer.model.sequence_borders import SequenceBorders, shard_of
from moe_trainer.moe.balancing import start_iteration
from moe_trainer.ops.packed_sequences import PackedSequences
from moe_trainer.parallel.state import ParallelState

SEQ_LENGTH = 48
VOCABULARY = 400


@pytest.fixture
def argv(tmp_path):
    """A model, and three conversations of one to three turns."""
    turn = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "a dog"}]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": turn * n}) + "\n" for n in (2, 1, 3)))
    folder = write_chat_tokenizer(tmp_path / "tokenizer", None)
    return [
        *(word for word in MODEL if word != "--mock-data"), "--num-layers", "2", "--group-query-attention", "--num-query-groups", "2", "--split", "1,0,0",
        "--moe-token-dispatcher-type", "alltoall", "--calculate-per-token-loss", "--data-path", str(tmp_path / "chat.jsonl"),
        "--seq-length", str(SEQ_LENGTH), "--max-position-embeddings", str(SEQ_LENGTH), "--use-varlen-dataset",
        "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(folder), "--moe-z-loss-coeff", "1e-2",
    ]  # fmt: skip


def make_batches(args):
    """The conversations packed, padded to rows, and each alone."""
    tokenizer = build_tokenizer(args.data)
    train = build_datasets(args.data, training_args(), tokenizer, (3, 0, 0)).train
    fmt = batch_format(args.data, tokenizer)
    packed = make_packed_batch(train, range(3), fmt, partial(PackedSequences.of, multiple=4))
    rows = make_padded_batch(train, range(3), fmt, SEQ_LENGTH)
    alone = [make_packed_batch(train, [index], fmt, PackedSequences.of) for index in range(3)]
    assert 0 < float(packed.loss_mask_BS.sum()) < sum(packed.packed.lengths) == sum(rows.lengths)
    return packed, rows, alone


def sum_of_losses(chunk, batch):
    """Run forward and backward and return this rank's sum of trained losses."""
    loss_BS = chunk(
        batch.tokens_BS, batch.position_ids_BS, batch.labels_BS, batch.loss_mask_BS,
        SequenceBorders(packed=batch.packed, row_lengths=batch.lengths),
    )  # fmt: skip
    loss = (loss_BS * shard_of(chunk.sequence, batch.packed).local(batch.loss_mask_BS, 1)).sum()
    loss.backward()
    return float(loss.detach())


def run_batches(args, batches, ps=None):
    (chunk,) = build_chunks(args, ps or ParallelState.single(), VOCABULARY, torch.device("cpu"))
    start_iteration([chunk])
    losses = sum(sum_of_losses(chunk, batch) for batch in batches)
    balancing = [router.loss_sums.clone() for router in (layer.router for layer in chunk.moe_layers())]
    return losses, {name: param.grad for name, param in chunk.named_parameters()}, balancing


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=2e-6)
    for name, grad in expected[1].items():
        torch.testing.assert_close(
            found[1][name], grad, rtol=0, atol=2e-6 * max(1.0, float(grad.abs().max())), msg=name
        )


def test_packed_conversations_equal_conversations_alone(argv):
    args = parse_args([*argv, "--moe-aux-loss-coeff", "0", "--moe-z-loss-coeff", "0"], 1)
    packed, _, alone = make_batches(args)
    assert_same(run_batches(args, [packed]), run_batches(args, alone))


def test_padded_rows_equal_packed_conversations(argv):
    """--varlen-sbhd-validation, with the balancing losses: padding counts in none of them."""
    args = parse_args(argv, 1)
    packed, rows, _ = make_batches(args)
    found, expected = run_batches(args, [rows]), run_batches(args, [packed])
    assert_same(found, expected)
    assert all(float(sums.sum()) > 0 for sums in expected[2])
    torch.testing.assert_close(found[2], expected[2], rtol=2e-6, atol=2e-6)


def balancing_on_rank(rank, n, argv):
    args = parse_args(argv, n)
    losses, _, balancing = run_batches(args, [make_batches(args)[1]], create_groups(argv, rank, n))
    return losses, balancing


@pytest.mark.parametrize(
    "flags, shards", [("--context-parallel-size 2", 2), ("--tensor-model-parallel-size 2 --sequence-parallel", 1)]
)
def test_padding_of_rows_is_found_on_every_rank(argv, flags, shards):
    args = parse_args(argv, 1)
    make_batches(args)  # the index, before ranks read it
    outcomes = run_ranks(balancing_on_rank, 2, [*argv, *flags.split()])
    losses, _, balancing = run_batches(args, [make_batches(args)[1]])
    assert sum(outcome[0] for outcome in outcomes[:shards]) == pytest.approx(losses, rel=2e-6)
    for layer, expected in enumerate(balancing):
        found = sum(outcome[1][layer] for outcome in outcomes)
        torch.testing.assert_close(found[0], expected[0], rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(found[3] / 2, expected[3], rtol=2e-6, atol=2e-6)  # each rank's is a mean


def test_run_with_padded_rows_equals_packed_run(tmp_path, argv):
    """Losses of every iteration, with the balancing loss, where a microbatch has the same samples."""
    records = {}
    for name, more in (("packed", ["--max-seqlen-per-dp-cp-rank", "200"]), ("padded", ["--varlen-sbhd-validation"])):
        metrics = tmp_path / f"{name}.jsonl"
        sizes = "--micro-batch-size 3 --global-batch-size 3 --train-iters 3 --eval-iters 0 --num-workers 0 --log-interval 1".split()
        finished = run([*argv, *sizes, *more, "--metrics-file", str(metrics)], tmp_path)
        assert finished.returncode == 0, finished.stderr
        records[name] = read_metrics(metrics)
    assert len(records["packed"]) == len(records["padded"]) == 3
    for packed, padded in zip(records["packed"], records["padded"]):
        for key in ("lm loss", "load_balancing_loss", "z_loss", "grad_norm"):
            assert padded[key] == pytest.approx(packed[key], rel=1e-5), key


def test_batch_without_trained_tokens_has_no_gradient(tmp_path, argv):
    """Balancing losses, whose gradients are multiplied by the tokens of a batch, must not take over the step."""
    turns = [{"role": "user", "content": "the fox " * 40}, {"role": "assistant", "content": "a dog"}]
    short = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "a dog"}]
    (tmp_path / "chat.jsonl").write_text(
        "".join(json.dumps({"messages": m}) + "\n" for m in (turns, turns, short, short))
    )
    sizes = "--micro-batch-size 1 --global-batch-size 2 --train-iters 2 --eval-iters 0 --num-workers 0 --log-interval 1"
    metrics = tmp_path / "metrics.jsonl"
    finished = run([*argv, *sizes.split(), "--lr", "1e-3", "--metrics-file", str(metrics)], tmp_path)
    assert finished.returncode == 0, finished.stderr
    first, second = read_metrics(metrics)
    assert first["lm loss"] == 0 and first["grad_norm"] == 0 and first["z_loss"] > 0
    assert second["lm loss"] > 0 and second["grad_norm"] > 0

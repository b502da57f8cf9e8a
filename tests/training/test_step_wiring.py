"""Inputs that the training loop passes to model, loss, schedules and validation, compared with direct model calls."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from data_pipeline.corpora import attention_mask
from training.forked import pretrain
from training.layouts import make_argv, make_run
from training.tiny import MOCK, TINY

import arguments
from arguments.vocabulary import get_padded_vocab_size
from moe_trainer.data.build import batch_format, build_datasets
from moe_trainer.data.indexed import write_indexed_dataset
from moe_trainer.data.loader import cyclic_order, make_batch
from moe_trainer.data.tokenizer import build_tokenizer
from moe_trainer.model.build import build_chunks
from moe_trainer.model.sequence_borders import SequenceBorders
from moe_trainer.model.weights import export_named_weights
from moe_trainer.parallel.state import ParallelState
from moe_trainer.training.run import TrainState
from moe_trainer.training.step import train_step

PLAIN = ["--moe-aux-loss-coeff", "0", "--clip-grad", "0"]


class _DroppedGraph:
    num_drops = 0

    def drop(self):
        self.num_drops += 1


def test_graphs_of_iterations_and_of_parts_are_dropped_together():
    run, graphs = make_run(make_argv("plain"), 0, ParallelState.single(), 1), (_DroppedGraph(), _DroppedGraph())
    run.chunks[0].graphs = graphs[1]
    replace(run, iteration_graph=graphs[0]).drop_graphs()
    assert [graph.num_drops for graph in graphs] == [1, 1]


class DirectModel:
    """The model of a command line with its initial weights, and the samples that it would read."""

    def __init__(self, argv):
        self.args = arguments.parse_args(argv, 1)
        tokenizer = build_tokenizer(self.args.data)
        vocab = get_padded_vocab_size(self.args, tokenizer.vocab_size)
        self.chunks = build_chunks(self.args, ParallelState.single(), vocab)
        self.dataset = build_datasets(self.args.data, self.args.training, tokenizer).train
        self.format = batch_format(self.args.data, tokenizer, vocab)

    def loss(self, indices, masked_attention=True):
        """Mean loss over all tokens that count in these samples."""
        batch = make_batch(self.dataset, indices, self.format)
        ids_BS, mask = batch.document_ids_BS, None
        if ids_BS is not None and masked_attention:
            mask = torch.from_numpy(attention_mask(ids_BS))
        loss_BS = self.chunks[0](
            batch.tokens_BS, batch.position_ids_BS, batch.labels_BS, batch.loss_mask_BS, SequenceBorders(mask)
        )
        return (loss_BS * batch.loss_mask_BS).sum() / batch.loss_mask_BS.sum()

    def weights(self):
        return {
            name: tensor.detach().clone() for name, tensor in export_named_weights(self.chunks, ParallelState.single())
        }


def documents(prefix, eod):
    """A token file of many short documents of very different length, each ended by eod."""
    generator = np.random.default_rng(0)
    with write_indexed_dataset(str(prefix), np.uint16) as builder:
        for length in [2] * 30 + [90, 3, 3, 60] * 12:
            builder.add_document(np.append(generator.integers(0, 100, length - 1), eod).astype(np.uint16), [length])
    return str(prefix)


@pytest.mark.parametrize("mapping", ["", "--context-parallel-size 2", "--context-parallel-size 2 --cp-comm-type a2a"])
def test_per_token_loss_and_document_masks_apply_to_the_update(tmp_path, mapping):
    """Two ranks, unequal numbers of tokens: the mean over all tokens, under the attention mask of the documents."""
    eod = build_tokenizer(arguments.parse_args([*TINY, *MOCK, "--train-iters", "1"], 1).data).eod
    argv = [
        *TINY,
        *PLAIN,
        "--data-path",
        documents(tmp_path / "docs", eod),
        "--split",
        "100,0,0",
        *MOCK[1:],
        "--data-cache-path",
        str(tmp_path / "cache"),
        "--train-iters",
        "1",
        "--lr",
        "1.0",
        "--lr-decay-style",
        "constant",
        "--calculate-per-token-loss",
        "--eod-mask-loss",
        "--reset-attention-mask",
        "--reset-position-ids",
        "--optimizer",
        "sgd",
        "--sgd-momentum",
        "0",
        "--weight-decay",
        "0",
        "--global-batch-size",
        "8",
    ]
    hand = DirectModel(argv)
    counts = [
        make_batch(hand.dataset, pair, hand.format).loss_mask_BS.sum().item()
        for pair in ([0, 1], [2, 3], [4, 5], [6, 7])
    ]
    assert len(set(counts)) > 2, "the micro-batches must differ in their number of tokens"
    before = hand.weights()
    loss = hand.loss(range(8))
    assert abs(loss.item() - hand.loss(range(8), masked_attention=False).item()) > 1e-4
    loss.backward()
    with torch.no_grad():
        for param in hand.chunks[0].parameters():
            param.sub_(param.grad)
    expected = hand.weights()
    records, weights = pretrain([*argv, *mapping.split()], tmp_path, 2)
    assert records[0]["lm loss"] == pytest.approx(loss.item(), rel=2e-6)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=2e-6, atol=2e-7, msg=name)
    assert max((weights[name] - before[name]).abs().max().item() for name in expected) > 1e-2


def test_training_loop_applies_batch_size_rampup(tmp_path):
    records, _ = pretrain(
        [*TINY, *MOCK, "--global-batch-size", "8", "--rampup-batch-size", "4", "4", "16", "--train-samples", "32"],
        tmp_path,
    )
    assert [r["global_batch_size"] for r in records] == [4, 4, 4, 4, 8, 8]
    assert [r["consumed_samples"] for r in records] == [4, 8, 12, 16, 24, 32]


def test_loss_scale_applies_to_auxiliary_losses(tmp_path):
    """fp16: the update is independent of the loss scale; unscaled auxiliary gradients would be 65536 times too small."""
    argv = [
        *TINY,
        *MOCK,
        "--fp16",
        "--moe-aux-loss-coeff",
        "1.0",
        "--moe-z-loss-coeff",
        "0.1",
        "--clip-grad",
        "0",
        "--train-iters",
        "1",
        "--optimizer",
        "sgd",
        "--weight-decay",
        "0",
        "--lr",
        "1.0",
        "--lr-decay-style",
        "constant",
    ]
    before = DirectModel(argv).weights()
    (one, plain), (other, scaled) = (
        pretrain([*argv, "--loss-scale", scale], tmp_path / scale) for scale in ("1", "65536")
    )
    assert other[0]["loss_scale"] == 65536 and other[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=2e-2)
    routers = [name for name in before if "router.weight" in name]
    assert routers
    for name in before:
        moved, again = ((after[name].float() - before[name].float()) for after in (plain, scaled))
        assert (moved - again).norm() < 0.05 * again.norm() + 1e-3, name
    for name in routers:
        assert (scaled[name].float() - before[name].float()).norm() > 1e-2, name


def validations(argv, folder, world_size=1, mock=True):
    records, _ = pretrain(
        [
            *TINY,
            *MOCK[not mock :],
            "--lr",
            "0",
            "--min-lr",
            "0",
            "--train-iters",
            "2",
            "--eval-interval",
            "1",
            "--eval-iters",
            "1",
            *argv,
        ],
        folder,
        world_size,
    )
    return [record["lm loss"] for record in records if record.get("validation") == "validation"]


def test_validations_read_new_samples_whatever_ranks_and_batch_sizes(tmp_path):
    """The weights are constant (--lr 0), so a loss shows which samples were read."""
    first, second, third = validations([], tmp_path / "one")
    assert len({round(loss, 4) for loss in (first, second, third)}) == 3
    assert validations([], tmp_path / "two", 2) == pytest.approx([first, second, third], rel=2e-6)
    small = ["--eval-micro-batch-size", "1", "--eval-global-batch-size", "2", "--eval-iters", "2"]
    assert validations(small, tmp_path / "small", 2) == pytest.approx([first, second, third], rel=2e-6)
    large = validations(["--eval-global-batch-size", "8"], tmp_path / "large")
    assert large[0] == pytest.approx((first + second) / 2, rel=2e-6)


def test_validations_weigh_microbatches_by_their_tokens(tmp_path):
    """Masked labels leave microbatches with different numbers of tokens: the mean over all tokens does not depend on how they are grouped."""
    eod = build_tokenizer(arguments.parse_args([*TINY, *MOCK, "--train-iters", "1"], 1).data).eod
    flags = ["--data-path", documents(tmp_path / "docs", eod), "--split", "30,70,0", "--eod-mask-loss"]
    full = validations([*flags, "--eval-micro-batch-size", "4"], tmp_path / "whole", mock=False)
    for micro, ranks in ((2, 1), (1, 1), (1, 2)):
        again = validations(
            [*flags, "--eval-micro-batch-size", str(micro)], tmp_path / f"{micro} {ranks}", ranks, mock=False
        )
        assert again == pytest.approx(full, rel=1e-6)


def test_decoupled_rate_weight_decay_schedule_and_cyclic_order(tmp_path):
    """Embedding rows beyond the vocabulary never see a gradient: only the decay moves them."""
    argv = [
        *TINY,
        *MOCK,
        *PLAIN,
        "--train-iters",
        "3",
        "--lr",
        "0",
        "--min-lr",
        "0",
        "--decoupled-lr",
        "0.1",
        "--decoupled-min-lr",
        "0.1",
        "--start-weight-decay",
        "0",
        "--end-weight-decay",
        "0.6",
        "--weight-decay-incr-style",
        "linear",
        "--dataloader-type",
        "cyclic",
    ]
    hand = DirectModel(argv)
    before = hand.weights()
    records, after = pretrain(argv, tmp_path)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"embedding.word_embeddings.weight", "output_layer.weight"}
    embedding = "embedding.word_embeddings.weight"
    factor = (1 - 0.1 * 0.0) * (1 - 0.1 * 0.2) * (1 - 0.1 * 0.4)
    torch.testing.assert_close(after[embedding][-1], before[embedding][-1] * factor, rtol=2e-6, atol=0)
    total = len(hand.dataset)
    order = cyclic_order(total, 0, 2, 0, 1)
    indices = next(order) + next(order)
    assert indices != [0, 1, 2, 3]
    assert records[0]["lm loss"] == pytest.approx(hand.loss(indices).item(), rel=2e-6)
    assert abs(hand.loss(range(4)).item() - hand.loss(indices).item()) > 1e-4


@pytest.mark.parametrize(("level", "order"), [(0, "update"), (1, "empty update"), (2, "empty update empty")])
def test_cached_memory_is_returned_around_the_update(level, order, monkeypatch):
    run, calls = (
        make_run([*make_argv("plain"), "--empty-unused-memory-level", str(level)], 0, ParallelState.single(), 1),
        [],
    )
    update = run.optimizer.step
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    run.optimizer.step = lambda **rates: calls.append("update") or update(**rates)
    train_step(run, TrainState(), run.args.training.global_batch_size // run.args.training.micro_batch_size)
    assert " ".join(calls) == order

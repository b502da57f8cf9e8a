"""QK-clip: the largest logit of each head and the scaled weights; by hand, and under every parallel dimension."""

import pytest
import torch
from harness import run_ranks
from training.layouts import assert_equal, compare, make_argv, make_run, shallow, train, train_one_process, train_ranks

from arguments import parse_args
from moe_trainer.layers.core_attention import CoreAttention
from moe_trainer.layers.max_logits import MaxLogitTracker
from moe_trainer.layers.qk_clip import (
    attentions,
    global_max_logit,
    qk_clip_factors,
    reduce_max_logits,
    reset_max_logits,
)
from moe_trainer.ops.block_attention import BlockMask, Documents, PositionRange
from moe_trainer.ops.max_logits import max_logits_per_head
from moe_trainer.parallel.state import ParallelState
from moe_trainer.training.run import TrainState, with_batches
from moe_trainer.training.step import train_step

CLIP = "--qk-clip --qk-clip-threshold 0.05 --qk-clip-alpha 0.3 --log-max-attention-logit"
LATENT = "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 4 --qk-layernorm"


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "left, documents, masked",
    [(-1, False, False), (20, False, False), (-1, True, False), (9, True, False), (-1, False, True)],
)
def test_max_logits_consider_visible_keys_only(left, documents, masked):
    length, batch, heads, groups = 150, 2, 4, 2
    q, k = random(length, batch, heads, 8), random(length, batch, groups, 8, seed=1)
    place = torch.arange(length)
    seen = (place[None] <= place[:, None])[None, None].expand(batch, 1, -1, -1)
    if left >= 0:
        seen = seen & (place[None] >= place[:, None] - left)
    ids = torch.stack([(place >= 40).long(), (place >= 77).long()])
    if documents:
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
    mask = torch.rand(1, 1, length, length, generator=torch.Generator().manual_seed(5)) < 0.3 if masked else None
    scores = torch.einsum("sbnd,tbnd->bnst", q, k.repeat_interleave(2, dim=2)) * 0.3
    expected = scores.masked_fill(~(mask if masked else seen), float("-inf")).amax((0, 2, 3))
    block_mask = BlockMask(left=left, documents=Documents.of(ids) if documents else None)
    torch.testing.assert_close(max_logits_per_head(q, k, 0.3, block_mask, [PositionRange(0, length)], mask), expected)
    halves = [
        max_logits_per_head(q[rows], k, 0.3, block_mask, [PositionRange(rows.start, rows.stop)], mask)
        for rows in (slice(0, 90), slice(90, 150))
    ]
    torch.testing.assert_close(torch.maximum(*halves), expected)


def test_max_logits_of_a_layer_with_chunks():
    model = parse_args([*make_argv("plain"), "--attention-chunk-size", "5"], 1).model
    tracker = MaxLogitTracker(model, 1, 0.3, ParallelState.single().context)
    tracker.enabled = True
    q, k = random(12, 2, 4, 8), random(12, 2, 4, 8, seed=1)
    tracker.update(q, k, None)
    place = torch.arange(12)
    seen = (place <= place[:, None]) & (place // 5 == place[:, None] // 5)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * 0.3
    torch.testing.assert_close(tracker.value(4, q.device), scores.masked_fill(~seen, float("-inf")).amax((0, 2, 3)))


def _argv(kind, *more):
    base = shallow(make_argv("biases, tied head" if kind == "biases" else "plain"))
    flags = {
        "plain": "",
        "biases": "",
        "latent": LATENT,
        "latent without q": LATENT.replace("--q-lora-rank 12 ", ""),
        "grouped, gated": "--group-query-attention --num-query-groups 2 --attention-output-gate",
    }[kind]
    return [*base, *flags.split(), *(word for flag in more for word in flag.split())]


@pytest.mark.parametrize("kind", ["plain", "latent", "latent without q", "grouped, gated", "biases"])
def test_qk_clip_reduces_logits_to_the_threshold(kind, monkeypatch):
    """With a learning rate of zero the same batch has, after the step, no logit above it.

    Exactly the threshold where one key serves one head.
    """
    seen = []
    forward = CoreAttention.forward

    def watched(self, q_SBND, k_SBGD, *rest):
        k = k_SBGD.repeat_interleave(q_SBND.shape[2] // k_SBGD.shape[2], dim=2)
        scores = torch.einsum("sbnd,tbnd->bnst", q_SBND.detach(), k.detach()) * self.scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        seen.append(scores.masked_fill(hidden, float("-inf")).amax((0, 2, 3)))
        return forward(self, q_SBND, k_SBGD, *rest)

    monkeypatch.setattr(CoreAttention, "forward", watched)
    argv = _argv(kind, CLIP, "--lr 0 --min-lr 0 --weight-decay 0 --global-batch-size 2")
    run = make_run(argv, 0, ParallelState.single(), 1)
    batches = list(run.train_batches)
    run = with_batches(run, iter(batches * 3))
    train_step(run, TrainState(), 1)
    before = torch.stack(seen[:2])
    assert before.min() > 0.05
    result = train_step(run, TrainState(iteration=1), 1)
    after = torch.stack(seen[2:4])
    # of the second layer's heads some input has changed, too
    if kind == "grouped, gated":
        expected = before[0] * (0.05 / before[0].view(2, 2).amax(1)).repeat_interleave(2)
        torch.testing.assert_close(after[0], expected, rtol=1e-5, atol=0)
    else:
        torch.testing.assert_close(after[0], torch.full_like(after[0], 0.05), rtol=1e-5, atol=0)
    assert result.max_attention_logit == pytest.approx(float(after.max()), rel=1e-5)


def test_head_below_the_threshold_is_unchanged():
    run = make_run(_argv("plain", "--qk-clip"), 0, ParallelState.single(), 1)
    assert run.args.model.qk_clip_threshold == 100.0
    train_step(run, TrainState(), 4)
    peaks = reduce_max_logits(run.chunks, run.ps, torch.device("cpu"))
    assert all(0 < peak.max() < 100 for peak in peaks.values())
    assert qk_clip_factors(peaks, run.ps, 100.0, 0.5) == {}
    attention = next(iter(peaks))
    peaks[attention] = torch.tensor([1.0, 400.0, float("inf"), float("-inf")])
    ((param, rows),) = qk_clip_factors(peaks, run.ps, 100.0, 0.5).items()
    assert param is attention.linear_qkv.weight
    assert (
        torch.equal(rows.view(4, -1)[1], torch.tensor([0.5] * 4 + [0.5] * 4 + [1.0] * 4))
        and (rows.view(4, -1)[[0, 2, 3]] == 1).all()
    )
    reset_max_logits(run.chunks)
    assert all(
        not torch.isfinite(each.max_logits.value(4, torch.device("cpu"))).any() for each in attentions(run.chunks)
    )


def test_qk_clip_includes_mtp_attention():
    run = make_run(_argv("plain", "--qk-clip --mtp-num-layers 1"), 0, ParallelState.single(), 1)
    train_step(run, TrainState(), 4)
    peaks = reduce_max_logits(run.chunks, run.ps, torch.device("cpu"))
    names = [attention.linear_qkv.weight.info.names[0] for attention in peaks]
    assert sum(name.startswith("mtp.") for name in names) == 1 and len(names) == run.args.model.num_layers + 1
    assert all(torch.isfinite(peak).all() for peak in peaks.values())


def test_qk_clip_scales_biases_but_not_gates():
    factors = {}
    for kind in ("biases", "grouped, gated"):
        run = make_run(_argv(kind, "--qk-clip"), 0, ParallelState.single(), 1)
        attention = next(attentions(run.chunks))
        peaks = {attention: torch.tensor([200.0, 1.0, 50.0, 400.0])}
        factors[kind] = qk_clip_factors(peaks, run.ps, 100.0, 0.5), attention.linear_qkv
    found, linear = factors["biases"]
    assert set(found) == {linear.weight, linear.bias} and torch.equal(found[linear.bias], found[linear.weight])
    found, linear = factors["grouped, gated"]
    (rows,) = found.values()
    width = linear.weight.info.row_blocks[-1]
    groups = rows.view(2, 6, width)  # two heads of queries, their gates, key and value
    assert torch.equal(groups[:, 2:4], torch.ones(2, 2, width)) and torch.equal(groups[:, 5], torch.ones(2, width))
    for part in (0, 1, 4):
        torch.testing.assert_close(groups[:, part, 0], torch.tensor([0.5, 0.25]).sqrt())


def _largest(rank, n):
    ps, cpu = ParallelState.create(n, rank, tp=n), torch.device("cpu")
    here = {number: torch.tensor([rank - 3.0, -4.0]) for number in range(2)}
    return global_max_logit(here, ps, cpu), global_max_logit(here if rank == 0 else {}, ps, cpu)


def test_max_logits_are_reduced_over_all_ranks():
    """Heads are distributed over ranks, and some ranks have none."""
    assert run_ranks(_largest, 2) == [(-2.0, -3.0)] * 2


LAYOUTS = (
    (
        4,
        "grouped, gated",
        "--tensor-model-parallel-size 4 --sequence-parallel --expert-tensor-parallel-size 1 --use-distributed-optimizer",
    ),
    (
        4,
        "plain",
        "--context-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000",
    ),
    (4, "latent", "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --cp-comm-type a2a"),
    (4, "latent", "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --use-distributed-optimizer"),
    (
        4,
        "plain",
        "--tensor-model-parallel-size 2 --use-distributed-optimizer --optimizer muon --muon-fp32-matmul-prec high",
    ),
)


def test_qk_clip_on_four_ranks_equals_one_process():
    found = run_ranks(train_ranks, 4, [_argv(kind, CLIP, flags) for _, kind, flags in LAYOUTS])
    for (_, kind, flags), outcome in zip(LAYOUTS, found[0], strict=True):
        optimizer = flags.partition("--optimizer ")[2]
        more = f"--optimizer {optimizer}" if optimizer else ""
        assert_equal(outcome, train_one_process(*_argv(kind, CLIP, more)), f"{kind}, {flags}")


def test_qk_clip_changes_training():
    plain = train(_argv("plain"), 0, ParallelState.single())
    assert compare(plain, train_one_process(*_argv("plain", CLIP, "")))

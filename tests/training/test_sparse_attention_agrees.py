"""Training with sparse attention over ranks, or with activation recompute, equals one process.

Losses, the indexers' too, every gradient, the norm, the weights after two steps.

With the chosen keys gathered the one process still masks those not chosen.

A choice that hangs on a last digit would part for no fault: the seeds are such that in every choice of the one process the last chosen
key and the first other one are apart.
"""

import pytest
from harness import run_ranks
from training.forked import pretrain
from training.layouts import assert_equal, make_argv, shallow
from training.test_context_parallel_agrees import train_rank, with_documents

from arguments import parse_args
from moe_trainer.backends import MissingBackendError
from moe_trainer.model.build import build_chunks
from moe_trainer.ops import sparse_attention
from moe_trainer.ops.sparse_attention import topk_mask
from moe_trainer.parallel.state import ParallelState
from moe_trainer.verification import training_trace
from moe_trainer.verification.emulate_topology import SequenceSharding, emulate_topology

DSA = "--experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 8 --dsa-indexer-topk 5 --dsa-indexer-loss-coeff 2.5"
SEED, SPARSE_LOSS = "--seed 2", "--dsa-indexer-use-sparse-loss --seed 1"
INTERLEAVED = "--dsa-indexer-rope-interleaved --no-dsa-indexer-rotate-activation"
TP2, CP2, PP2 = (
    "--tensor-model-parallel-size 2",
    "--context-parallel-size 2 --cp-comm-type allgather",
    "--pipeline-model-parallel-size 2",
)
EP2, SP = "--expert-model-parallel-size 2", "--sequence-parallel"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
GATHERED = "--dsa-attention-form gathered"
# name: (flags of both, ranks, flags of the ranks)
CASES = {
    "tp": (SEED, 2, f"{TP2} --expert-tensor-parallel-size 1"),
    "tp and sp, sparse loss": (SPARSE_LOSS, 2, f"{TP2} {SP}"),
    "cp, more chosen than a rank has, sparse loss, per-token loss": (
        f"{SPARSE_LOSS} --dsa-indexer-topk 9 --calculate-per-token-loss",
        2,
        CP2,
    ),
    "pp, no latent of queries": ("--mtp-num-layers 1 --seed 4", 2, PP2),
    "ep, data ranks": (f"{INTERLEAVED} --seed 7", 2, f"{EP2} --use-distributed-optimizer"),
    "full recompute, tp and sp": (SPARSE_LOSS, 2, f"{TP2} {SP} {FULL}"),
    "selective recompute of all around, cp": (SEED, 2, f"{CP2} {SELECTIVE} core_attn mla_up_proj layernorm"),
    "gathered, tp, sp and cp": (SPARSE_LOSS, 4, f"{GATHERED} {TP2} {SP} {CP2} --expert-tensor-parallel-size 1 {EP2}"),
    "gathered, tp": (SPARSE_LOSS, 2, f"{GATHERED} {TP2} --expert-tensor-parallel-size 1"),
    "gathered, selective recompute of all around, cp": (
        SPARSE_LOSS,
        2,
        f"{GATHERED} {CP2} {SELECTIVE} core_attn mla_up_proj layernorm",
    ),
    "gathered, recompute of latents, data ranks": (
        SPARSE_LOSS,
        2,
        f"{GATHERED} {SELECTIVE} mla_up_proj --use-distributed-optimizer --overlap-grad-reduce",
    ),
    "gathered, delayed weight gradients": (SPARSE_LOSS, 2, f"{GATHERED} {PP2} --pipeline-schedule zero-bubble"),
}


def argv_for(case: str) -> list[str]:
    argv = [*shallow(make_argv("deepseek")), *DSA.split(), *CASES[case][0].split()]
    if "no latent of queries" in case:
        at = argv.index("--q-lora-rank")
        del argv[at : at + 2]
    return argv


def min_margin(scores_BSK, topk):
    """How far the last chosen score of every row is from the first other one that differs, at least."""
    ordered = scores_BSK.sort(-1, descending=True).values
    least = ordered[..., topk - 1 : topk]
    beyond = ordered.masked_fill(ordered >= least, float("-inf")).amax(-1, keepdim=True)
    gaps = (least - beyond)[(beyond > float("-inf"))]
    return float(gaps.min()) if gaps.numel() else float("inf")


def train_reference(argv, topology, packed, monkeypatch):
    margins = []

    def watched(scores_BSK, topk):
        margins.append(min_margin(scores_BSK, min(topk, scores_BSK.shape[-1])))
        return topk_mask(scores_BSK, topk)

    def prepare(run):
        emulate_topology(run, topology)
        if packed:
            with_documents(run, explicit=False)

    with monkeypatch.context() as patched:
        patched.setattr(sparse_attention, "topk_mask", watched)
        outcome = training_trace.train(parse_args(argv, 1), 0, ParallelState.single(), prepare=prepare)
    assert len(margins) > 8, "keys are chosen"
    assert min(margins) > 2e-5, "another seed: the choice hangs on the last digits"
    return outcome


def assert_agree(argv, n, mapping, monkeypatch, packed=False):
    outcome, *others = run_ranks(train_rank, n, [*argv, *mapping.split()], packed)
    parallel = parse_args([*argv, *mapping.split()], n).parallel
    expected = train_reference(
        argv, SequenceSharding(parallel.tensor_model_parallel_size, parallel.context_parallel_size), packed, monkeypatch
    )
    assert_equal(outcome, expected)
    assert all(other.losses == outcome.losses and other.grad_norms == outcome.grad_norms for other in others)
    assert expected.losses[0]["indexer loss"] > 1e-2 and list(expected.losses[0])[-1] == "indexer loss"
    indexers = [grad for name, grad in expected.grads.items() if ".indexer." in name]
    assert len(indexers) == 15 and all(grad.abs().max() > 1e-4 for grad in indexers)
    return outcome


@pytest.mark.parametrize("case", CASES)
def test_sparse_attention_training_equals_one_process(case, monkeypatch):
    _, n, mapping = CASES[case]
    assert_agree(argv_for(case), n, mapping, monkeypatch)


@pytest.mark.parametrize("mapping", [CP2, f"{TP2} {SP}", f"{GATHERED} {CP2}"])
def test_sparse_attention_with_packed_documents_equals_one_process(mapping, monkeypatch):
    argv = argv_for("tp" if GATHERED not in mapping else "tp and sp, sparse loss")
    outcome = assert_agree(argv, 2, mapping, monkeypatch, packed=True)
    apart = train_reference(argv, SequenceSharding(), False, monkeypatch)
    assert abs(outcome.losses[0]["lm loss"] - apart.losses[0]["lm loss"]) > 1e-5, "the documents make a difference"


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_sparse_attention_checkpoint_resumes_under_another_layout(tmp_path, form):
    argv = [
        *argv_for("tp"),
        "--ckpt-format",
        form,
        "--train-iters",
        "4",
        "--save",
        "saved",
        "--save-interval",
        "2",
        "--log-interval",
        "1",
        "--eval-interval",
        "100",
    ]
    first = [*argv, *f"{TP2} {SP} --use-distributed-optimizer".split()]
    full_run, _ = pretrain(first, tmp_path, 2)
    (tmp_path / "saved/latest_checkpointed_iteration.txt").write_text("2")
    (tmp_path / "metrics.jsonl").unlink()
    resumed, _ = pretrain([*argv, "--load", "saved", "--save", "other", *PP2.split()], tmp_path, 2)
    assert [record["iteration"] for record in resumed] == [3, 4]
    for record, expected in zip(resumed, full_run[2:], strict=True):
        for name in ("lm loss", "indexer loss", "grad_norm"):
            assert record[name] == pytest.approx(expected[name], rel=3e-6), name


def test_unavailable_dsa_kernel_backend_falls_back_or_raises(caplog):
    """--on-missing-backend decides; on a CPU the default continues with torch and logs it."""
    argv = [*argv_for("tp"), "--dsa-kernel-backend", "tilelang"]
    with caplog.at_level("INFO"):
        build_chunks(parse_args(argv, 1), ParallelState.single(), 64)
    assert "--dsa-kernel-backend tilelang: this version has no binding" in caplog.text
    with pytest.raises(MissingBackendError, match="--dsa-kernel-backend tilelang"):
        build_chunks(
            parse_args([*argv, "--on-missing-backend", "error", "--transformer-impl", "local"], 1),
            ParallelState.single(),
            64,
        )

"""Training with sparse attention over ranks, or with activation recompute, equals one process.

Losses, the indexers' too, every gradient, the norm, the weights after two steps.

With the chosen keys gathered the one process still masks those not chosen.
"""

import pytest
from training.agreement import check_cases
from training.forked import pretrain
from training.layouts import make_argv, shallow

from arguments import parse_args
from moe_trainer.backends import MissingBackendError
from moe_trainer.model.build import build_chunks
from moe_trainer.parallel.state import ParallelState
from moe_trainer.verification.shrink import ParityCase, as_is

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
DOCUMENTS = "--reset-attention-mask"
AROUND = f"{SELECTIVE} core_attn mla_up_proj layernorm"
# name: (flags, ranks)
CASES = {
    "tp": (f"{SEED} {TP2} --expert-tensor-parallel-size 1", 2),
    "documents, tp and sp": (f"{SEED} {DOCUMENTS} {TP2} {SP}", 2),
    "cp, more chosen than a rank has, per-token loss": (
        f"{SPARSE_LOSS} --dsa-indexer-topk 9 --calculate-per-token-loss {CP2}",
        2,
    ),
    "pp, no latent of queries": (f"--mtp-num-layers 1 --seed 4 {PP2}", 2),
    "ep, data ranks": (f"{INTERLEAVED} --seed 7 {EP2} --use-distributed-optimizer", 2),
    "full recompute, tp and sp": (f"{SPARSE_LOSS} {TP2} {SP} {FULL}", 2),
    "documents, selective recompute of all around, cp": (f"{SEED} {DOCUMENTS} {CP2} {AROUND}", 2),
    "gathered, tp, sp and cp": (f"{SPARSE_LOSS} {GATHERED} {TP2} {SP} {CP2} --expert-tensor-parallel-size 1 {EP2}", 4),
    "gathered, tp": (f"{SPARSE_LOSS} {GATHERED} {TP2} --expert-tensor-parallel-size 1", 2),
    "gathered, documents, selective recompute of all around, cp": (
        f"{SPARSE_LOSS} {GATHERED} {DOCUMENTS} {CP2} {AROUND}",
        2,
    ),
    "gathered, recompute of latents, data ranks": (
        f"{SPARSE_LOSS} {GATHERED} {SELECTIVE} mla_up_proj --use-distributed-optimizer --overlap-grad-reduce",
        2,
    ),
    "gathered, delayed weight gradients": (f"{SPARSE_LOSS} {GATHERED} {PP2} --pipeline-schedule zero-bubble", 2),
}


def make_sparse_argv(*more: str) -> list[str]:
    return [*shallow(make_argv("deepseek")), "--global-batch-size", "4", *DSA.split(), *more]


def make_case(name: str) -> ParityCase:
    flags, ranks = CASES[name]
    argv = make_sparse_argv(*flags.split())
    if "no latent of queries" in name:
        at = argv.index("--q-lora-rank")
        del argv[at : at + 2]
    return as_is(argv, ranks)


def test_sparse_attention_training_equals_one_process():
    outcomes = check_cases({name: make_case(name) for name in CASES})
    for name, outcome in outcomes.items():
        assert outcome.losses[0]["indexer loss"] > 1e-2 and list(outcome.losses[0])[-1] == "indexer loss", name
        indexers = [grad for key, grad in outcome.grads.items() if ".indexer." in key]
        assert len(indexers) == 15 and all(grad.abs().max() > 1e-4 for grad in indexers), name
    for name, flags in CASES.items():
        if DOCUMENTS in flags[0]:
            apart = outcomes["gathered, tp" if GATHERED in flags[0] else "tp"]
            difference = outcomes[name].losses[0]["lm loss"] - apart.losses[0]["lm loss"]
            assert abs(difference) > 1e-5, f"{name}: the documents make a difference"


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_sparse_attention_checkpoint_resumes_under_another_layout(tmp_path, form):
    flags = f"{SEED} --ckpt-format {form} --train-iters 3 --save saved --save-interval 2 --log-interval 1"
    argv = make_sparse_argv(*flags.split(), "--eval-interval", "100")
    first = [*argv, *f"{TP2} {SP} --use-distributed-optimizer".split()]
    full_run, _ = pretrain(first, tmp_path, 2)
    (tmp_path / "saved/latest_checkpointed_iteration.txt").write_text("2")
    (tmp_path / "metrics.jsonl").unlink()
    resumed, _ = pretrain([*argv, "--load", "saved", "--save", "other", *PP2.split()], tmp_path, 2)
    assert [record["iteration"] for record in resumed] == [3]
    for record, expected in zip(resumed, full_run[2:], strict=True):
        for name in ("lm loss", "indexer loss", "grad_norm"):
            assert record[name] == pytest.approx(expected[name], rel=3e-6), name


def test_unavailable_dsa_kernel_backend_falls_back_or_raises(caplog):
    """--on-missing-backend decides; on a CPU the default continues with torch and logs it."""
    argv = make_sparse_argv("--dsa-kernel-backend", "tilelang")
    with caplog.at_level("INFO"):
        build_chunks(parse_args(argv, 1), ParallelState.single(), 64)
    assert "--dsa-kernel-backend tilelang: this version has no binding" in caplog.text
    with pytest.raises(MissingBackendError, match="--dsa-kernel-backend tilelang"):
        build_chunks(
            parse_args([*argv, "--on-missing-backend", "error", "--transformer-impl", "local"], 1),
            ParallelState.single(),
            64,
        )

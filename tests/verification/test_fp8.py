"""Mappings with fp8 GEMMs equal one process that quantizes by their definition, and differ for planted mistakes."""

import random
from types import SimpleNamespace

import pytest
from verification import test_parity
from verification.test_parity import MODEL, assert_equal, clean_pool  # noqa: F401 - a fixture

from moe_trainer.moe.dispatch import local
from moe_trainer.moe.dispatch.mxfp8_transport import Mxfp8Transport
from moe_trainer.optim import quantized_params
from moe_trainer.parallel import collectives
from moe_trainer.quantization import iteration as quantization_iteration
from moe_trainer.quantization.gemms import QuantizedGemms
from moe_trainer.verification import parity
from moe_trainer.verification.low_precision import comparable_fp8_options
from moe_trainer.verification.mapping import ParallelMapping
from moe_trainer.verification.parity import ParityResult
from moe_trainer.verification.random_layouts import draw
from moe_trainer.verification.rank_pool import RankPool
from moe_trainer.verification.shrink import ParityCase, ShrinkError, as_is, shrink

TP = "--tensor-model-parallel-size 2 --sequence-parallel"
FP8_CASES = {
    "dp, delayed": "--fp8-format hybrid --fp8-amax-history-len 2 --fp8-amax-compute-algo max",
    "tp, blockwise": f"{TP} --fp8-format e4m3 --fp8-recipe blockwise",
    "tp, tensorwise": f"{TP} --fp8-format e4m3 --fp8-recipe tensorwise",
    "tp without sp, mxfp8": "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --fp8-format hybrid --fp8-recipe mxfp8 --no-fp8-wgrad",
    "cp and ep, tensorwise": "--context-parallel-size 2 --expert-model-parallel-size 2 --fp8-format hybrid --fp8-recipe tensorwise",
    "output layer under tp": f"{TP} --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-output-proj --mtp-num-layers 1",
}
FP8_PARAMS = "--fp8-param-gather --use-distributed-optimizer"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
FP8_PARAM_CASES = {
    "dp, delayed": f"{FP8_CASES['dp, delayed']} {FP8_PARAMS} {OVERLAP}",
    "latent attention under tp": f"{TP} --multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4 "
    f"--v-head-dim 4 --mtp-num-layers 1 --fp8-format e4m3 --fp8-recipe tensorwise --moe-shared-expert-intermediate-size 16 {FP8_PARAMS}",
    "cp and ep, tensorwise": f"{FP8_CASES['cp and ep, tensorwise']} {FP8_PARAMS}",
    "pp, first layer in bf16": "--pipeline-model-parallel-size 2 --fp8-format e4m3 --first-last-layers-bf16 --num-layers-at-end-in-bf16 0 "
    f"{FP8_PARAMS}",
    "recompute": "--expert-model-parallel-size 2 --fp8-format hybrid --recompute-granularity full --recompute-method uniform "
    f"--recompute-num-layers 1 {FP8_PARAMS}",
    "ep over dp, mxfp8": "--expert-model-parallel-size 2 --fp8-format e4m3 --fp8-recipe mxfp8 --no-fp8-wgrad "
    f"{FP8_PARAMS} {OVERLAP} --reuse-grad-buf-for-mxfp8-param-ag",
}


def make_fp8_case(flags: str, ranks: int = 2) -> ParityCase:
    # every GEMM of an expert is quantized separately
    return test_parity.make_case("--num-experts", "4", *flags.split(), ranks=ranks)


def run_parity(flags: str, **how: object) -> ParityResult:
    return test_parity.run_parity("--num-experts", "4", *flags.split(), **how)


def test_fp8_cases_equal_one_process(clean_pool, monkeypatch):  # noqa: F811
    for flags in FP8_CASES.values():
        set_steps(monkeypatch, flags)
        assert_equal(clean_pool, make_fp8_case(flags))


def set_steps(monkeypatch, flags: str) -> None:
    """Only delayed scales and overlapped communication depend on the step before."""
    monkeypatch.setattr(parity, "STEPS", 1 if "--fp8-recipe" in flags and OVERLAP not in flags else 2)


def test_output_layer_equals_one_process_for_partial_blocks(monkeypatch):
    """40 columns and 8 positions per rank, blocks of 32. A dense model, so that blocks along the tokens are checked too."""
    moe = [word for word in MODEL if word.startswith("--moe")] + ["--num-experts"]
    words = [*without(MODEL, moe), *f"{TP} --context-parallel-size 2 --global-batch-size 2 --vocab-size 78 --make-vocab-size-divisible-by 8 --fp8-format hybrid --fp8-recipe mxfp8 "
             "--fp8-output-proj".split()]  # fmt: skip
    case = as_is(words, 4)
    assert "--fp8-output-proj" in case.argv and "--no-fp8-wgrad" not in case.argv
    monkeypatch.setattr(parity, "STEPS", 1)
    with RankPool(4) as pool:
        assert_equal(pool, case)


def without(words: list[str], flags: list[str]) -> list[str]:
    """Return a command line without some flags and their values."""
    starts = [index for index, word in enumerate(words) if word.startswith("--")] + [len(words)]
    return [word for start, stop in zip(starts, starts[1:]) if words[start] not in flags for word in words[start:stop]]


MXFP8_TRANSPORT = "--moe-token-dispatcher-type alltoall --moe-dispatch-fwd-dtype mxfp8 --moe-combine-bwd-dtype mxfp8"


@pytest.mark.parametrize(
    "flags",
    [
        "--expert-model-parallel-size 2",
        f"{TP} --fp8-format e4m3 --fp8-recipe blockwise",
        f"{TP} --expert-tensor-parallel-size 1 --expert-model-parallel-size 2",
        "--context-parallel-size 2 --expert-model-parallel-size 2 --fp8-format hybrid",
        "--pipeline-model-parallel-size 2",
    ],
)
def test_tokens_sent_in_fp8_equal_one_process(flags, clean_pool, monkeypatch):  # noqa: F811
    monkeypatch.setattr(parity, "STEPS", 2 if flags.endswith("hybrid") else 1)
    assert_equal(clean_pool, make_fp8_case(f"{MXFP8_TRANSPORT} {flags}"))


def test_missing_rounding_of_sent_tokens_is_found(monkeypatch):
    make = local.LocalDispatcher
    monkeypatch.setattr(local, "LocalDispatcher", lambda permutation, mxfp8: make(permutation, Mxfp8Transport()))
    assert not run_parity(f"{MXFP8_TRANSPORT} --expert-model-parallel-size 2", steps=1, shared=False).is_equal


def test_fp8_params_equal_one_process(clean_pool, monkeypatch):  # noqa: F811
    for flags in FP8_PARAM_CASES.values():
        set_steps(monkeypatch, flags)
        assert_equal(clean_pool, make_fp8_case(flags))
    experts = "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
    monkeypatch.setattr(parity, "STEPS", 1)
    with RankPool(4) as pool:
        assert_equal(pool, make_fp8_case(f"{FP8_CASES['tp, blockwise']} {FP8_PARAMS} {experts}", 4))


def test_scale_of_a_local_shard_is_found(monkeypatch):
    monkeypatch.setattr(
        quantized_params,
        "collectives",
        SimpleNamespace(
            all_reduce=lambda x, group, op="sum": x if op == "max" else collectives.all_reduce(x, group, op)
        ),
    )
    assert not run_parity(f"{FP8_PARAMS} --fp8-format e4m3 --fp8-recipe blockwise --no-fp8-wgrad", steps=1).is_equal


@pytest.mark.slow
def test_drawn_fp8_cases_equal_one_process():
    rng, cases = random.Random(7), []
    while len(cases) < 12:
        mapping = rng.choice(
            [
                ParallelMapping(tp=2, dp=2, etp=1, ep=2),
                ParallelMapping(cp=2, dp=2, ep=2),
                ParallelMapping(tp=2, cp=2, etp=2),
                ParallelMapping(pp=2, dp=2, ep=2),
            ]
        )
        found = draw(rng, mapping)
        if found is not None and "--fp8-format" in found.argv:
            cases.append(found)
    with RankPool(max(case.pool_size for case in cases)) as pool:
        for case in cases:
            assert_equal(pool, case)


def test_reference_without_emulation_differs(monkeypatch):
    """One process that quantizes full tensors differs from two ranks that quantize halves.

    Scales that are powers of two would hide it, because they change the rounding of the smallest numbers only.
    """
    monkeypatch.setattr(parity, "emulate_formats", lambda *_: None)
    assert not run_parity(f"{TP} --fp8-format e4m3 --fp8-recipe tensorwise", steps=1, shared=False).is_equal


def test_maximum_of_one_rank_is_found(monkeypatch):
    monkeypatch.setattr(quantization_iteration, "all_reduce", lambda amax, group, op: amax)
    result = run_parity(FP8_CASES["dp, delayed"])
    assert not result.is_equal and "step 1" not in str(result.differences[0]), "the first scales are all 1"


def test_unquantized_gemm_on_one_rank_is_found(monkeypatch):
    output = QuantizedGemms.output

    def exact_on_rank_1(self, x, weight):
        place = "".join(map(str, self.rounding._place))
        return x @ weight.t() if "tp 1" in place else output(self, x, weight)

    monkeypatch.setattr(QuantizedGemms, "output", exact_on_rank_1)
    assert not run_parity(FP8_CASES["tp, blockwise"], steps=1).is_equal


def test_options_that_cannot_be_kept_are_noted():
    flags = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "num_experts": 8, "first_last_layers_bf16": True}
    found, notes = comparable_fp8_options(flags, ParallelMapping(dp=2, ep=2), 4)
    assert found["fp8_recipe"] == "delayed" and any("tensorwise: delayed instead" in note for note in notes)
    assert found["num_layers_at_start_in_bf16"] == 1 and found["moe_router_dtype"] == "fp64" and found["lr"] < 1e-10
    found, notes = comparable_fp8_options(flags, ParallelMapping(tp=2, etp=2), 4)
    assert found["fp8_recipe"] == "tensorwise" and len(notes) == 1
    found, notes = comparable_fp8_options(
        {**flags, "fp8_recipe": "mxfp8", "moe_router_padding_for_quantization": True},
        ParallelMapping(tp=2, dp=2, ep=4),
        4,
    )
    assert found["fp8_wgrad"] is False and found["moe_router_padding_for_quantization"] is None and len(notes) == 3
    found, notes = comparable_fp8_options({"fp4": "e2m1", "num_experts": 8}, ParallelMapping(dp=2), 4)
    assert found["fp4"] is None and "stochastically" in notes[0]
    found, notes = comparable_fp8_options({**flags, "use_torch_fsdp2": True}, ParallelMapping(dp=2), 4)
    assert found["fp8"] is None and "fully sharded" in notes[0]
    assert comparable_fp8_options({"fp8": None}, ParallelMapping(dp=2), 4)[1] == []


@pytest.mark.parametrize(
    "flags",
    [
        "--fp8-format e4m3 --fp8-recipe tensorwise",
        "--fp8-format e4m3 --fp8-recipe blockwise",
        "--fp4-format e2m1",
    ],
)
def test_as_is_rejects_options_that_cannot_be_kept(flags):
    with pytest.raises(ShrinkError, match="cannot be checked as it is"):
        make_fp8_case(f"--expert-model-parallel-size 2 {flags}")


def test_shrunk_flags_keep_their_recipe():
    words = [*MODEL, *"--expert-model-parallel-size 8 --bf16 --fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather --use-distributed-optimizer "
             "--moe-router-padding-for-fp8 --moe-token-dispatcher-type alltoall --global-batch-size 64".split()]  # fmt: skip
    shrunk = shrink(words, 8, ranks=2)
    argv = shrunk.cases[0].argv
    assert (
        "--fp8-format" in argv
        and "blockwise" in argv
        and "--no-fp8-wgrad" in argv
        and "--moe-router-padding-for-quantization" in argv
    )
    assert (
        "--fp8-param-gather" in argv
        and "--fp8-format" in (reference := shrunk.cases[0].reference)
        and "--fp8-param-gather" not in reference
    )
    assert any("--no-fp8-wgrad" in note for note in shrunk.notes)


def test_further_case_without_fp8_checks_the_optimizer():
    line = (
        "--preset mixtral_8x7b --world-size 16 --mock-data --bf16 --expert-model-parallel-size 8 --use-distributed-optimizer --fp8-format e4m3 "
        "--fp8-recipe blockwise --fp8-param-gather --moe-dispatch-fwd-dtype mxfp8 --use-precision-aware-optimizer --exp-avg-dtype bf16"
    )
    *cases, last = shrink(line.split(), ranks=2).cases
    assert all("1e-12" in case.argv and "--fp8-format" in case.argv for case in cases) and cases
    assert last.mapping == cases[0].mapping and not {
        "--fp8-format",
        "--fp8-param-gather",
        "--moe-dispatch-fwd-dtype",
        "1e-12",
    } & set(last.argv)
    assert last.argv[last.argv.index("--exp-avg-dtype") + 1] == "fp16"

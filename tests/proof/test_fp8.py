"""Mappings with 8-bit products equal one process that quantises what the ranks' definition says, and part for mistakes in that."""

import random
from types import SimpleNamespace

import pytest
from proof.test_prove import MODEL

from moe_trainer.layers import precision
from moe_trainer.moe.dispatch import choose, local
from moe_trainer.moe.dispatch.eight_bits import EightBits
from moe_trainer.ops.fp8 import QuantizedProducts
from moe_trainer.optim import stored_state
from moe_trainer.parallel import collectives
from moe_trainer.proof import prove as prove_module
from moe_trainer.proof.low_precision import provable
from moe_trainer.proof.mapping import Mapping
from moe_trainer.proof.pool import Pool
from moe_trainer.proof.prove import Verdict, prove
from moe_trainer.proof.random_layouts import draw
from moe_trainer.proof.shrink import Case, ShrinkError, as_is, shrink

TP = "--tensor-model-parallel-size 2 --sequence-parallel"
HELD = {
    "dp, delayed": "--fp8-format hybrid --fp8-amax-history-len 2 --fp8-amax-compute-algo max",
    "tp, blockwise": f"{TP} --fp8-format e4m3 --fp8-recipe blockwise",
    "tp without sp, mxfp8": "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --fp8-format hybrid --fp8-recipe mxfp8 --no-fp8-wgrad",
    "cp and ep, tensorwise": "--context-parallel-size 2 --expert-model-parallel-size 2 --fp8-format hybrid --fp8-recipe tensorwise",
    "ep over dp, mxfp8": "--expert-model-parallel-size 2 --fp8-format e4m3 --fp8-recipe mxfp8 --no-fp8-wgrad",
    "pp, first layer in bf16": "--pipeline-model-parallel-size 2 --fp8-format e4m3 --first-last-layers-bf16 --num-layers-at-end-in-bf16 0",
    "latent attention under tp": f"{TP} --multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 4 --mtp-num-layers 1 --fp8-format e4m3 --fp8-recipe tensorwise --moe-shared-expert-intermediate-size 16",
    "output layer under tp": f"{TP} --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-output-proj --mtp-num-layers 1",
    "recompute": "--expert-model-parallel-size 2 --fp8-format hybrid --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
}
STORED = "--fp8-param-gather --use-distributed-optimizer"
KEPT_IN_8_BITS = {
    "dp, delayed": f"{HELD['dp, delayed']} {STORED} --overlap-grad-reduce --overlap-param-gather",
    "tp, blockwise": f"{HELD['tp, blockwise']} {STORED}",
    "tp, tensorwise": f"{HELD['latent attention under tp']} {STORED}",
    "cp and ep, tensorwise": f"{HELD['cp and ep, tensorwise']} {STORED}",
    "pp, first layer in bf16": f"{HELD['pp, first layer in bf16']} {STORED}",
    "recompute": f"{HELD['recompute']} {STORED}",
}


def case_of(flags: str, ranks: int = 2) -> Case:
    return as_is([*MODEL, "--num-experts", "4", *flags.split()], ranks)  # every product of an expert is quantised by itself


def verdict(flags: str) -> Verdict:
    with Pool(3) as pool:
        return prove(pool, case_of(flags))


def test_what_holds_by_definition_holds():
    with Pool(3) as pool:
        for name, flags in HELD.items():
            result = prove(pool, case_of(flags))
            assert result.equal, (name, result.failure[-2000:], *map(str, result.differences[:4]))


def test_the_output_layer_holds_where_blocks_end_at_a_ranks_vocabulary_and_rows():
    """40 columns and 8 positions of a rank, blocks of 32: a dense model, so that blocks along the rows can be proven, too."""
    moe = [word for word in MODEL if word.startswith("--moe")] + ["--num-experts"]
    words = [*without(MODEL, moe), *f"{TP} --context-parallel-size 2 --vocab-size 78 --make-vocab-size-divisible-by 8 --fp8-format hybrid --fp8-recipe mxfp8 "
             "--fp8-output-proj".split()]  # fmt: skip
    case = as_is(words, 4)
    assert "--fp8-output-proj" in case.argv and "--no-fp8-wgrad" not in case.argv
    with Pool(4) as pool:
        result = prove(pool, case)
        assert result.equal, (result.failure[-2000:], *map(str, result.differences[:4]))


def without(words: list[str], flags: list[str]) -> list[str]:
    """A command line without some flags and their values."""
    starts = [index for index, word in enumerate(words) if word.startswith("--")] + [len(words)]
    return [word for start, stop in zip(starts, starts[1:]) if words[start] not in flags for word in words[start:stop]]


ROWS = "--moe-token-dispatcher-type alltoall --moe-dispatch-fwd-dtype mxfp8 --moe-combine-bwd-dtype mxfp8"


@pytest.mark.parametrize("flags", [
    "--expert-model-parallel-size 2", f"{TP} --fp8-format e4m3 --fp8-recipe blockwise", f"{TP} --expert-tensor-parallel-size 1 --expert-model-parallel-size 2",
    "--context-parallel-size 2 --expert-model-parallel-size 2 --fp8-format hybrid", "--pipeline-model-parallel-size 2",
])
def test_rows_that_travel_in_eight_bits_hold(flags):
    result = verdict(f"{ROWS} {flags}")
    assert result.equal, (result.failure[-2000:], *map(str, result.differences[:4]))


def test_rows_that_are_not_rounded_on_one_rank_are_found(monkeypatch):
    monkeypatch.setattr(choose, "LocalDispatcher", lambda permutation, eight_bits: local.LocalDispatcher(permutation, EightBits()))
    assert not verdict(f"{ROWS} --expert-model-parallel-size 2").equal


def test_weights_kept_in_eight_bits_hold():
    with Pool(4) as pool:
        for name, flags in KEPT_IN_8_BITS.items():
            result = prove(pool, case_of(flags))
            assert result.equal, (name, result.failure[-2000:], *map(str, result.differences[:4]))
        result = prove(pool, case_of(f"{KEPT_IN_8_BITS['tp, blockwise']} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", 4))
        assert result.equal, (result.failure[-2000:], *map(str, result.differences[:4]))


def test_scales_of_a_part_alone_are_found(monkeypatch):
    monkeypatch.setattr(stored_state, "collectives", SimpleNamespace(
        all_reduce=lambda x, group, op="sum": x if op == "max" else collectives.all_reduce(x, group, op)))
    assert not verdict(f"{STORED} --fp8-format e4m3 --fp8-recipe blockwise --no-fp8-wgrad").equal


@pytest.mark.slow
def test_drawn_cases_with_eight_bits_hold():
    dice, cases = random.Random(7), []
    while len(cases) < 12:
        mapping = dice.choice([Mapping(tp=2, dp=2, etp=1, ep=2), Mapping(cp=2, dp=2, ep=2), Mapping(tp=2, cp=2, etp=2), Mapping(pp=2, dp=2, ep=2)])
        found = draw(dice, mapping)
        if found is not None and "--fp8-format" in found.argv:
            cases.append(found)
    with Pool(max(case.pool_size for case in cases)) as pool:
        for case in cases:
            result = prove(pool, case)
            assert result.equal, (case.argv, result.failure[-2000:], *map(str, result.differences[:4]))


def test_without_the_definition_of_the_mapping_they_part(monkeypatch):
    """One process that quantises whole tensors is another program than two ranks that quantise halves.

    (Scales that are powers of two hide it: they move numbers of a floating format without another rounding, but for the smallest.)
    """
    monkeypatch.setattr(prove_module, "emulate_fp8", lambda *_: None)
    assert not verdict(f"{TP} --fp8-format e4m3 --fp8-recipe tensorwise").equal


def test_a_maximum_of_this_rank_alone_is_found(monkeypatch):
    monkeypatch.setattr(precision, "all_reduce", lambda amax, group, op: amax)
    result = verdict(HELD["dp, delayed"])
    assert not result.equal and "step 1" not in str(result.differences[0]), "the first scales are all 1"


def test_one_operand_in_high_precision_is_found(monkeypatch):
    output = QuantizedProducts.output

    def exact_on_rank_1(self, x, weight):
        place = "".join(map(str, self.rounding._place))
        return x @ weight.t() if "tp 1" in place else output(self, x, weight)

    monkeypatch.setattr(QuantizedProducts, "output", exact_on_rank_1)
    assert not verdict(HELD["tp, blockwise"]).equal


def test_what_cannot_be_kept_is_said():
    flags = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "num_experts": 8, "first_last_layers_bf16": True}
    found, notes = provable(flags, Mapping(dp=2, ep=2), 4)
    assert found["fp8_recipe"] == "delayed" and any("tensorwise: delayed instead" in note for note in notes)
    assert found["num_layers_at_start_in_bf16"] == 1 and found["moe_router_dtype"] == "fp64" and found["lr"] < 1e-10
    found, notes = provable(flags, Mapping(tp=2, etp=2), 4)
    assert found["fp8_recipe"] == "tensorwise" and len(notes) == 1
    fine = {dest: value for dest, value in flags.items() if dest != "num_experts"} | {"finermoe_output_granularity": 2}
    assert provable(fine, Mapping(dp=2, ep=2), 4)[0]["fp8_recipe"] == "delayed", "its number of experts follows"
    found, notes = provable({**flags, "fp8_recipe": "mxfp8", "moe_router_padding_for_quantization": True}, Mapping(tp=2, dp=2, ep=4), 4)
    assert found["fp8_wgrad"] is False and found["moe_router_padding_for_quantization"] is None and len(notes) == 3
    found, notes = provable({"fp4": "e2m1", "num_experts": 8}, Mapping(dp=2), 4)
    assert found["fp4"] is None and "at random" in notes[0]
    found, notes = provable({**flags, "use_torch_fsdp2": True}, Mapping(dp=2), 4)
    assert found["fp8"] is None and "fully sharded" in notes[0]
    assert provable({"fp8": None}, Mapping(dp=2), 4)[1] == []


@pytest.mark.parametrize("flags", ["--fp8-format e4m3 --fp8-recipe tensorwise", "--fp8-format e4m3 --fp8-recipe blockwise", "--fp4-format e2m1"])
def test_what_cannot_be_kept_is_not_proven_as_it_is(flags):
    with pytest.raises(ShrinkError, match="not provable as it is"):
        case_of(f"--expert-model-parallel-size 2 {flags}")


def test_a_users_flags_keep_their_recipe():
    words = [*MODEL, *"--expert-model-parallel-size 8 --bf16 --fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather --use-distributed-optimizer "
             "--moe-router-padding-for-fp8 --moe-token-dispatcher-type alltoall --global-batch-size 64".split()]  # fmt: skip
    shrunk = shrink(words, 8, ranks=2)
    argv = shrunk.cases[0].argv
    assert "--fp8-format" in argv and "blockwise" in argv and "--no-fp8-wgrad" in argv and "--moe-router-padding-for-quantization" in argv
    assert "--fp8-param-gather" in argv and "--fp8-format" in (reference := shrunk.cases[0].reference) and "--fp8-param-gather" not in reference
    assert any("--no-fp8-wgrad" in note for note in shrunk.notes)


def test_a_further_case_without_8_bits_proves_the_optimizers_steps():
    line = ("--preset mixtral_8x7b --world-size 16 --mock-data --bf16 --expert-model-parallel-size 8 --use-distributed-optimizer --fp8-format e4m3 "
            "--fp8-recipe blockwise --fp8-param-gather --moe-dispatch-fwd-dtype mxfp8 --use-precision-aware-optimizer --exp-avg-dtype bf16")
    *cases, last = shrink(line.split(), ranks=2).cases
    assert all("1e-12" in case.argv and "--fp8-format" in case.argv for case in cases) and cases
    assert last.mapping == cases[0].mapping and not {"--fp8-format", "--fp8-param-gather", "--moe-dispatch-fwd-dtype", "1e-12"} & set(last.argv)
    assert last.argv[last.argv.index("--exp-avg-dtype") + 1] == "fp16"

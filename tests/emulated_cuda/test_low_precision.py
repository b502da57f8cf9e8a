"""Training in 8 and 4 bits on emulated devices gives the numbers of one CPU process with the same recipe.

In fp64 to the last digits, where no rounding to 8 bits turns: what is quantized, where and in which order. In fp32 the GEMMs are those
of the device's own units (torch's scaled_mm), whose sums may turn one now and then. In bf16, experts in one call (scaled_grouped_mm).
"""

from dataclasses import replace

import pytest
import torch
from emulated_cuda.run import check_races, on_device
from gpu.test_te_parity import assert_close_training
from harness import run_ranks
from training.layouts import FP32, compare, make_argv, shallow
from verification.test_fp8 import FP8_CASES, FP8_PARAM_CASES, FP8_PARAMS, make_fp8_case

from arguments import parse_args
from arguments.mechanisms.formats import BY_KEY
from moe_trainer.parallel.state import ParallelState
from moe_trainer.verification import training_trace
from moe_trainer.verification.compare_runs import Tolerances
from moe_trainer.verification.parity import Fp64Precision, train_case, train_reference
from moe_trainer.verification.training_trace import TrainingTrace

STEPS = 2
MODEL = [*shallow(make_argv("plain")), *"--num-experts 4 --global-batch-size 2".split()]
WIDE = "--hidden-size 128 --ffn-hidden-size 128 --init-method-std 0.02"  # GEMMs of experts in one call take multiples of 128
# a sum in another order turns a rounding to 8 bits now and then, by up to an eighth of a number
TURNED = Tolerances(loss=1e-4, norm=1e-3, grad=1e-2, weight=5e-4)
FROZEN_WEIGHTS = "--moe-router-dtype fp64 --lr 1e-12"  # see moe_trainer/verification/low_precision.py
DELAYED = "--fp8-format hybrid --fp8-amax-history-len 2 --fp8-amax-compute-algo max"
BLOCKWISE, MXFP8 = "--fp8-format e4m3 --fp8-recipe blockwise", "--fp8-format hybrid --fp8-recipe mxfp8"
NVFP4 = "--fp4-format e2m1"
TENSORWISE = "--fp8-format hybrid --fp8-recipe tensorwise"
STORED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
# further than the proofs of tests/verification go: what is rounded at random, and what no mapping of several ranks keeps
ONE_RANK = {
    "tensorwise, ends in bf16": f"{TENSORWISE} --first-last-layers-bf16 --num-layers-at-end-in-bf16 0",
    "mxfp8, rows padded": f"{MXFP8} --moe-token-dispatcher-type alltoall --moe-router-padding-for-quantization",
    "nvfp4, weights in 4 bits": f"{NVFP4} --fp4-param-gather --use-distributed-optimizer",
    "nvfp4, recompute": f"{NVFP4} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
RANKS = {
    "dp, delayed": FP8_CASES["dp, delayed"],
    "cp and ep, tensorwise": FP8_CASES["cp and ep, tensorwise"],
    "ep over dp, mxfp8 weights": FP8_PARAM_CASES["ep over dp, mxfp8"],
    "tp, blockwise weights": f"{FP8_CASES['tp, blockwise']} {FP8_PARAMS}",
}
# recipe: flags, compute capability, kind of GEMM
UNITS = {
    "delayed": (DELAYED, (9, 0)),
    "tensorwise": (TENSORWISE, (9, 0)),
    "blockwise": (BLOCKWISE, (9, 0)),
    "mxfp8": (MXFP8, (10, 0)),
    "nvfp4": (NVFP4, (10, 0)),
    "nvfp4 weights": (f"{NVFP4} {STORED} --fp4-param-gather", (10, 0)),
    "mxfp8 weights": (f"{MXFP8} {STORED} --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag", (10, 0)),
}
PROBES = 10  # a GEMM is tried first, and computed by definition where the device gives another result
BUDGET = (
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-expert-rank-capacity-factor 4 "
    "--moe-grouped-gemm"
)
GROUPED = {
    "tensorwise": ("--fp8-format e4m3 --fp8-recipe tensorwise", (9, 0)),
    "mxfp8": ("--fp8-format e4m3 --fp8-recipe mxfp8", (10, 0)),
    "tensorwise, counts on the device": (f"--fp8-format e4m3 --fp8-recipe tensorwise {BUDGET}", (9, 0)),
    "mxfp8, counts on the device": (f"--fp8-format e4m3 --fp8-recipe mxfp8 {BUDGET}", (10, 0)),
    "blockwise, counts on the device": (
        f"--num-layers 1 --fp8-format e4m3 --fp8-recipe blockwise {BUDGET}",
        (9, 0),
    ),
}


def train_fp64(argv: list[str], device: str = "cpu") -> TrainingTrace:
    """Train in fp64 where nothing is quantized."""
    args = parse_args(argv, 1)
    return training_trace.train(
        replace(args, precision=Fp64Precision.from_args(args.precision)),
        0,
        ParallelState.single(),
        STEPS,
        device=device,
    )


def train_fp64_on_device(argvs: list[list[str]]) -> list[TrainingTrace]:
    check_races()
    return [train_fp64(argv, "cuda") for argv in argvs]


def test_recipes_in_fp64_equal_cpu():
    argvs = [[*MODEL, *f"{flags} {FROZEN_WEIGHTS}".split()] for flags in ONE_RANK.values()]
    found = on_device(train_fp64_on_device, argvs)
    assert {
        name: differences
        for name, argv, outcome in zip(ONE_RANK, argvs, found, strict=True)
        if (differences := [str(difference) for difference in compare(train_fp64(argv), outcome, FP32)])
    } == {}


def references(rank: int, world_size: int, cases: list) -> list[TrainingTrace]:
    return [train_reference(rank, world_size, case, 0)[0] for case in cases]


def cases_on_devices(rank: int, world_size: int, cases: list) -> list[TrainingTrace]:
    check_races()
    return [train_case(rank, world_size, case, 0, "cuda") for case in cases]


def test_recipes_on_ranks_equal_cpu():
    """With the comparison of tests/verification/test_fp8.py."""
    cases = [make_fp8_case(f"{flags} --num-layers 1 --triton-kernels none") for flags in RANKS.values()]
    (found,) = run_ranks(references, 1, cases)
    assert {
        name: differences
        for name, one, outcome in zip(
            RANKS, found, on_device(cases_on_devices, cases, ranks=2, devices=2)[0], strict=True
        )
        if (differences := [str(difference) for difference in compare(one, outcome, FP32)])
    } == {}


def train_with_native_gemms(argv: list[str], capability: tuple[int, int]) -> tuple[TrainingTrace, dict[str, int]]:
    """Train on a device of this compute capability; also how often it was asked for its own GEMMs."""
    import emulation

    check_races()
    device = emulation.DEVICE()
    device.capability = capability
    with emulation.Ledger(device) as ledger:
        outcome = training_trace.train(parse_args(argv, 1), 0, ParallelState.single(), STEPS, device="cuda")
    of_gemms = {
        name: count
        for name, count in ledger.operators.items()
        if "scaled" in name and "mm" in name or name.startswith("triton::block_") and name != "triton::block_kernel"
    }
    # experts have none in bf16
    return outcome, of_gemms | {name: count for name, count in ledger.operators.items() if "_grouped_mm" in name}


@pytest.mark.parametrize("name", UNITS)
def test_native_scaled_gemms_equal_emulation(name):
    flags, capability = UNITS[name]
    argv = [*MODEL, *flags.split()]
    one = training_trace.train(parse_args(argv, 1), 0, ParallelState.single(), STEPS)
    outcome, gemms = on_device(train_with_native_gemms, argv, capability)
    assert gemms.keys() == {"aten::_scaled_mm_v2"} and min(gemms.values()) > PROBES, gemms
    assert [str(difference) for difference in compare(one, outcome, TURNED)] == []


@pytest.mark.parametrize("name", GROUPED)
def test_native_grouped_gemms_equal_emulation(name):
    flags, capability = GROUPED[name]
    argv = [*MODEL, *f"{flags} {WIDE} --bf16".split()]
    one = training_trace.train(parse_args(argv, 1), 0, ParallelState.single(), STEPS)
    expected = {"aten::_scaled_mm_v2"}
    if name.startswith("blockwise"):
        pytest.importorskip("triton")
        argv += "--triton-kernels quantize".split()
    outcome, gemms = on_device(train_with_native_gemms, argv, capability)
    if name.startswith("blockwise"):
        expected |= {"triton::block_rows_kernel", "triton::block_weight_kernel"}
    else:
        expected.add("aten::_scaled_grouped_mm_v2")
    if name == "tensorwise, counts on the device":
        expected.add("aten::_grouped_mm")  # of weight gradients
    assert gemms.keys() == expected and min(gemms.values()) > 2 * STEPS, gemms
    assert min(count for gemm, count in gemms.items() if "scaled" in gemm) > PROBES, gemms  # the others are not tried
    assert_close_training(one, outcome, 0.15)


def experts_on_device(names: tuple[str, ...]) -> dict[str, tuple[list, list]]:
    import emulation
    from quantization import test_grouped

    check_races()
    emulation.DEVICE().capability = (9, 0)
    found = {}
    for name in names:
        gemms = test_grouped.make_gemms(name, stochastic=False).to("cuda")
        with emulation.Ledger(emulation.DEVICE()) as ledger:
            results = test_grouped.run(gemms, torch.bfloat16, False, True, "cuda")
        waits = [line for _, line in ledger.waits if not line.startswith("test_grouped.py")]
        assert not waits or name == "delayed", (name, waits)  # the first GEMM of the device's own is checked
        alone = test_grouped.three_gemms(name, "cuda")
        found[name] = tuple([table.float().cpu().numpy() for table in tables] for tables in (results, alone))
    return found


def test_grouped_experts_with_counts_on_the_device_equal_cpu():
    """The scales of blocks multiply exactly in bf16. Those of tensors multiply results in bf16, which rounds these twice."""
    from quantization import test_grouped

    def differences(ours, theirs):
        pairs = [(one.float(), torch.from_numpy(other)) for one, other in zip(ours, theirs, strict=True)]
        return [float((one - other).norm() / one.norm()) for one, other in pairs]

    for name, (results, alone) in on_device(experts_on_device, test_grouped.RECIPES).items():
        rounds_twice = name == "tensorwise" or BY_KEY[name].has_global_scale
        found = differences(test_grouped.three_gemms(name), alone)
        assert max(found) < (4e-3 if rounds_twice else 1e-5), (name, found)
        if not rounds_twice:  # a last bit of an activation turns roundings to 4 bits
            gemms = test_grouped.make_gemms(name, stochastic=False)
            found = differences(test_grouped.run(gemms, torch.bfloat16, False, False), results)
            assert max(found) < 1e-5, (name, found)

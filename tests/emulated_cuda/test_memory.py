"""The plan's memory against what the emulated device's allocator counts: one rank at the real sizes, a few layers deep."""

from contextlib import contextmanager, nullcontext

import pytest
from emulated_cuda import te_package
from emulated_cuda.run import on_device
from emulated_cuda.test_transformer_engine import FP8
from training.layouts import make_argv

from arguments import parse_args
from arguments.stage_layout import chunk_layouts
from moe_trainer.estimate.dry_run import plan_of_flags
from moe_trainer.estimate.hardware import find_hardware
from moe_trainer.estimate.static_memory import cast_bytes, expert_cast_bytes, matrices_only, quantized_params_on_rank

RUN = "--mock-data --micro-batch-size 1 --global-batch-size 64 --bf16"
# name: flags. One microbatch in flight: record_step.py runs them one after the other
CASES = {
    "Mixtral, expert parallel": "--preset mixtral_8x7b --seq-length 4096 --num-layers 3 --expert-model-parallel-size 8 --use-distributed-optimizer",
    "Mixtral, folded, recompute": "--preset mixtral_8x7b --seq-length 4096 --num-layers 3 --tensor-model-parallel-size 2 --sequence-parallel "
    "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --recompute-granularity selective "
    "--recompute-modules moe_act layernorm",
    "Mixtral, unfused attention": "--preset mixtral_8x7b --seq-length 1024 --num-layers 3 --expert-model-parallel-size 8 "
    "--use-distributed-optimizer --attention-backend unfused --transformer-impl local",
    "Qwen3": "--preset qwen3_30b_a3b --seq-length 4096 --num-layers 3 --expert-model-parallel-size 8 --use-distributed-optimizer",
    "Qwen3, MXFP8": "--preset qwen3_30b_a3b --seq-length 2048 --num-layers 2 --expert-model-parallel-size 32 --use-distributed-optimizer "
    "--fp8-format e4m3 --fp8-recipe mxfp8 --transformer-impl local",
    "DeepSeek-V3, recompute": "--preset deepseek_v3 --seq-length 4096 --num-layers 4 --moe-layer-freq ([0]*2+[1]*2) --expert-model-parallel-size 32 "
    "--use-distributed-optimizer --recompute-granularity selective --recompute-modules mla_up_proj layernorm moe_act "
    "--transformer-impl local",
    "DeepSeek-V3, chunks": "--preset deepseek_v3 --seq-length 16384 --num-layers 4 --moe-layer-freq ([0]*2+[1]*2) --expert-model-parallel-size 32 "
    "--use-distributed-optimizer --recompute-granularity selective --recompute-modules mla_up_proj layernorm moe mlp --mlp-chunks-for-training 8 "
    "--transformer-impl local",
    "Qwen3, loss in chunks": "--preset qwen3_30b_a3b --seq-length 12288 --num-layers 3 --expert-model-parallel-size 8 --use-distributed-optimizer",
    "Qwen3-Next, full recompute": "--preset qwen3_next_80b_a3b --seq-length 2048 --num-layers 3 --linear-attention-freq [0]*3 "
    "--expert-model-parallel-size 16 --use-distributed-optimizer "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
WORLD = 64


def recorded(words: list[str]) -> dict[str, int]:
    from emulated_cuda.record_step import record

    return record(words, 0, WORLD, 1)["bytes"]


@pytest.mark.parametrize("name", CASES)
def test_memory_plan_equals_allocator_count(name):
    words = [*RUN.split(), *CASES[name].split()]
    plan, found = (
        plan_of_flags([*words, "--world-size", str(WORLD), "--hardware", "h100"]).peak,
        on_device(recorded, words),
    )
    assert plan.peak_inflight_microbatches == (1,)
    assert found["states"] == pytest.approx(plan.weights + plan.gradients + plan.optimizer, rel=0.01)
    assert found["forward 0"] == pytest.approx(plan.kept, rel=0.005)
    assert found["backward 0"] == pytest.approx(-found["forward 0"], rel=1e-5)  # but the loss itself
    # the plan adds buffers of the experts' backward to logits that are gone by then
    assert found["peak"] <= 1.005 * plan.total and plan.total <= 1.14 * found["peak"]


@pytest.mark.parametrize(
    ("flags", "width"),
    [
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag", 2.0625),
        ("--fp4-format e2m1 --fp4-param-gather", 0.5 + 12 / 256),
    ],
)
def test_memory_plan_of_stored_weights(flags, width):
    """No copy in the model's format is left."""
    words = f"{RUN} {CASES['Mixtral, expert parallel']} --num-layers 1 --transformer-impl local {flags}".split()
    plan, found = (
        plan_of_flags([*words, "--world-size", str(WORLD), "--hardware", "b200"]).peak,
        on_device(recorded, words),
    )
    assert found["states"] == pytest.approx(plan.weights + plan.gradients + plan.optimizer, rel=0.01)
    args = parse_args(words, WORLD)
    matrices = quantized_params_on_rank(matrices_only(args, 32000), chunk_layouts(args.model, args.parallel)[0])
    assert plan.weights == pytest.approx(2 * plan.held.total - (2 - width) * matrices.total, rel=1e-3)


def test_memory_plan_of_the_delta_rule():
    """Our Triton kernels keep no state, plain torch one for each segment but the first."""
    pytest.importorskip("triton")
    words = (
        f"{RUN} --preset qwen3_next_80b_a3b --seq-length 2048 --num-layers 1 --linear-attention-freq [1] --expert-model-parallel-size 16 "
        "--use-distributed-optimizer --triton-kernels"
    ).split()
    plans, found = [], []
    for name in ("delta-rule", "norm"):
        plans.append(plan_of_flags([*words, name, "--world-size", str(WORLD), "--hardware", "h100"]).peak.kept)
        found.append(on_device(recorded, [*words, name])["forward 0"])
        assert found[-1] == pytest.approx(plans[-1], rel=0.01)
    assert found[1] - found[0] == pytest.approx(plans[1] - plans[0], rel=0.05)


def states_with(argv: list[str], once: bool) -> int:
    """Bytes at the beginning of a second iteration. once: False: as if weights could change at any time."""
    import torch

    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.quantization import iteration
    from moe_trainer.training import step
    from moe_trainer.verification import training_trace

    found, run_microbatches = [], step.run_microbatches
    step.run_microbatches = lambda *args, **options: (
        found.append(torch.cuda.memory_allocated()) or run_microbatches(*args, **options)
    )
    if not once:
        iteration.cached_weight_casts = lambda *_: nullcontext()
    training_trace.train(parse_args(argv, 1), 0, ParallelState.single(), 2, device="cuda")
    return found[1]


@pytest.mark.parametrize("stored", ["", "--fp8-param-gather --use-distributed-optimizer"])
def test_memory_plan_of_fp8_weights(stored):
    argv = [
        *make_argv("plain"),
        *FP8.replace("tensorwise", "blockwise").replace("32", "128").split(),
        *f"--num-layers 2 --global-batch-size 4 {stored}".split(),
    ]
    args = parse_args(argv, 1)
    kept = cast_bytes(args, chunk_layouts(args.model, args.parallel)[0], matrices_only(args, 64), find_hardware("h100"))
    with_casts, without = (te_package.on_device(states_with, argv, once) for once in (True, False))
    assert with_casts - without == pytest.approx(kept, rel=0.05)  # and scales


def casts_at_the_end(argv: list[str], kept: bool) -> int:
    """Bytes when the last microbatch of an iteration has ended, and casts of weights are about to be dropped."""
    import torch

    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.quantization import iteration
    from moe_trainer.verification import training_trace

    found, cached = [], iteration.cached_weight_casts

    @contextmanager
    def measured(*args):
        with cached(*args) if kept else nullcontext():
            yield
            found.append(torch.cuda.memory_allocated())

    iteration.cached_weight_casts = measured
    training_trace.train(parse_args(argv, 1), 0, ParallelState.single(), 2, device="cuda")
    return found[1]


@pytest.mark.parametrize("recompute", ["", "--recompute-granularity selective --recompute-modules moe_act"])
def test_memory_plan_of_experts_with_counts_on_the_device(recompute):
    """They keep casts in both directions between microbatches, also if backward recomputes."""
    argv = [
        *make_argv("plain"),
        *"--num-layers 2 --num-experts 4 --global-batch-size 4 --bf16 --fp8-format e4m3 --fp8-recipe blockwise".split(),
        *"--hidden-size 128 --ffn-hidden-size 128 --moe-grouped-gemm --moe-token-dispatcher-type flex".split(),
        *f"--moe-flex-dispatcher-backend hybridep --moe-expert-rank-capacity-factor 4 {recompute}".split(),
    ]
    args = parse_args(argv, 1)
    kept = expert_cast_bytes(args, 1, chunk_layouts(args.model, args.parallel)[0], matrices_only(args, 64))
    with_casts, without = (on_device(casts_at_the_end, argv, once) for once in (True, False))
    assert kept > 0 and with_casts - without == pytest.approx(kept, rel=0.05)  # and scales


@pytest.mark.parametrize(("recipe", "copies"), [("mxfp8 --reuse-grad-buf-for-mxfp8-param-ag", 2), ("blockwise", 1)])
def test_stored_fp8_weights_replace_one_cast(recipe, copies):
    """MXFP8 weights are stored in another form than the casts of TransformerEngine's layers, which keep both."""
    flags = (
        f"--use-distributed-optimizer --bf16 --fp8-format e4m3 --fp8-recipe {recipe} "
        "--transformer-impl transformer_engine"
    )

    def kept(words):
        argv = [*make_argv("plain"), *words.split(), "--num-layers", "2"]
        args = parse_args(argv, 1)
        chunks = chunk_layouts(args.model, args.parallel)[0]
        return cast_bytes(args, chunks, matrices_only(args, 64), find_hardware("b200"))

    plain = kept(flags.replace("--reuse-grad-buf-for-mxfp8-param-ag", ""))
    assert plain > 0 and kept(f"{flags} --fp8-param-gather") == pytest.approx(plain * copies / 2)

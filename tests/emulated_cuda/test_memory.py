"""What the plan says of memory against what the emulated device's allocator counts: one rank at the real sizes, a few layers deep."""

import pytest
from emulated_cuda.run import on_device

from moe_trainer.planner.dry_run import plan_of_flags

RUN = "--mock-data --micro-batch-size 1 --global-batch-size 64 --bf16"
# name: flags. One microbatch in flight: record_step.py runs them one after the other
CASES = {
    "Mixtral, expert parallel": "--preset mixtral_8x7b --seq-length 4096 --num-layers 3 --expert-model-parallel-size 8 --use-distributed-optimizer",
    "Mixtral, folded, recompute": "--preset mixtral_8x7b --seq-length 4096 --num-layers 3 --tensor-model-parallel-size 2 --sequence-parallel "
                                  "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --recompute-granularity selective "
                                  "--recompute-modules moe_act layernorm",
    "Qwen3": "--preset qwen3_30b_a3b --seq-length 4096 --num-layers 3 --expert-model-parallel-size 8 --use-distributed-optimizer",
    "DeepSeek-V3, recompute": "--preset deepseek_v3 --seq-length 4096 --num-layers 4 --moe-layer-freq ([0]*2+[1]*2) --expert-model-parallel-size 32 "
                              "--use-distributed-optimizer --recompute-granularity selective --recompute-modules mla_up_proj layernorm moe_act",
    "Qwen3-Next, full recompute": "--preset qwen3_next_80b_a3b --seq-length 2048 --num-layers 3 --linear-attention-freq [0]*3 "
                                  "--expert-model-parallel-size 16 --use-distributed-optimizer "
                                  "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
WORLD = 64


def recorded(words: list[str]) -> dict[str, int]:
    from emulated_cuda.record_step import record

    return record(words, 0, WORLD, 1)["bytes"]


@pytest.mark.parametrize("name", CASES)
def test_the_plan_counts_what_the_device_holds(name):
    words = [*RUN.split(), *CASES[name].split()]
    plan, found = plan_of_flags([*words, "--world-size", str(WORLD), "--hardware", "h100"]).peak, on_device(recorded, words)
    assert plan.in_flight == (1,)
    assert found["states"] == pytest.approx(plan.weights + plan.gradients + plan.optimizer, rel=0.01)
    assert found["forward 0"] == pytest.approx(plan.kept, rel=0.005)
    assert found["backward 0"] == pytest.approx(-found["forward 0"], rel=1e-5)  # but the loss itself
    # the plan adds buffers of the experts' backward to logits that are gone by then
    assert found["peak"] <= 1.005 * plan.total and plan.total <= 1.12 * found["peak"]

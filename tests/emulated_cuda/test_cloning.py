"""The plan of clones in a recorded step: no clones with even routing, and the kernels that the planner counts."""

from collections import Counter

import pytest
from emulated_cuda.run import on_device
from emulated_cuda.test_record_step import record_even_routing
from training.layouts import make_argv

from arguments.mechanisms.placement_kinds.cloned import PLAN_KERNELS


@pytest.mark.parametrize("slots", [1, 2])
def test_even_routing_clones_no_expert(slots):
    """The recorded plan has no clones, and launches what the planner counts."""
    flags = f"--bf16 --kv-channels 8 --expert-model-parallel-size 2 --moe-clone-hot-experts {slots}"
    argv = [*make_argv("plain"), "--moe-token-dispatcher-type", "alltoall", *flags.split()]
    found = on_device(record_even_routing, argv)
    assert all(numbers[: 4 * slots] == [0] * 4 * slots for numbers in found["routed"])
    texts, planned = found["texts"], Counter()
    for kind, _, line, layer, microbatch, action, _ in found["events"]:
        if (
            kind == 0
            and microbatch == 1
            and texts[action] == "forward 0"
            and texts[line].startswith("moe/placement/clon")
        ):
            planned[texts[layer]] += 1
    once, each = PLAN_KERNELS
    assert planned and all(count == pytest.approx(once + each * (3 + slots), rel=0.1) for count in planned.values())

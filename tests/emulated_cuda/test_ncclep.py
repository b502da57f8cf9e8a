"""NCCL EP over its stand-in on emulated devices: host waits."""

import pytest
from emulated_cuda import test_dispatchers
from emulated_cuda.test_dispatchers import EXPERTS, RECOMPUTE, check_waits
from moe import fake_te_ep

NCCLEP = f"{EXPERTS} 2 --moe-flex-dispatcher-backend ncclep"
BUDGET = f"{NCCLEP} --moe-expert-rank-capacity-factor 3"


def count_waits(rank: int, n: int, flags: str) -> dict[str, int]:
    """Waits of a training iteration over the stand-in."""
    fake_te_ep.install()
    return test_dispatchers.count_waits(rank, n, flags)


@pytest.mark.parametrize(
    ("flags", "files"),
    [
        (NCCLEP, ["moe/dispatch/ncclep.py", "memory/activations.py"]),
        (f"{BUDGET} --moe-per-layer-logging", []),
        (f"{BUDGET} --moe-ncclep-zero-copy {RECOMPUTE}", []),
    ],
)
def test_host_waits_of_a_layer(flags, files):
    """Without a budget for the number of tokens, then for the experts' counts."""
    check_waits(count_waits, flags, 2, files)

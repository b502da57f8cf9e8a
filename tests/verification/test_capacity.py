"""Receive budgets and paged stashing equal one process without them."""

from verification.test_parity import (  # noqa: F401 - a fixture
    EP,
    MODEL,
    MTP,
    PP,
    assert_equal,
    clean_pool,
)

from moe_trainer.verification.rank_pool import RankPool
from moe_trainer.verification.shrink import as_is

BUDGET = [
    "--moe-token-dispatcher-type",
    "flex",
    "--moe-flex-dispatcher-backend",
    "hybridep",
    "--moe-expert-rank-capacity-factor",
    "1.1",
]
STASH = [*BUDGET, "--moe-paged-stash", "--moe-paged-stash-page-size", "4"]


def test_capacity_features_equal_one_process():
    cases = [as_is([*MODEL, *EP, *flags], 2) for flags in (BUDGET, [*STASH, *MTP])]
    with RankPool(4) as pool:
        for case in (*cases, as_is([*MODEL, *EP, *PP, *STASH], 4)):
            assert_equal(pool, case)

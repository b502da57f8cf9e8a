"""Training with clones of hot experts equals one process without them; mistakes in cloning are found."""

from verification.test_parity import (  # noqa: F401 - a fixture
    EP,
    MODEL,
    MTP,
    PP,
    TP,
    assert_equal,
    clean_pool,
    run_parity,
)

from moe_trainer.moe.placement.cloned import CloneRouting, CloneWeights
from moe_trainer.verification.rank_pool import RankPool
from moe_trainer.verification.shrink import as_is

CLONES = ["--moe-clone-hot-experts", "2", "--moe-token-dispatcher-type", "alltoall"]
RECOMPUTE = ["--recompute-granularity", "selective", "--recompute-modules", "moe"]


def test_clones_equal_one_process():
    cases = [as_is([*MODEL, *EP, *CLONES, *MTP, *RECOMPUTE], 2)]
    cases += [as_is([*MODEL, *EP, *flags, *CLONES], 4) for flags in (PP, [*TP, "--expert-tensor-parallel-size", "2"])]
    with RankPool(4) as pool:
        for case in cases:
            assert_equal(pool, case)


def test_ranks_clone_experts(monkeypatch):
    """Otherwise none of the mistakes below could be found."""

    def refuse(*_args):
        raise RuntimeError("an expert is cloned")

    monkeypatch.setattr(CloneWeights, "make_stacks", refuse)
    assert "an expert is cloned" in run_parity(*EP, *CLONES, steps=1).failure


def test_missing_gradients_of_clones_are_found(monkeypatch):
    def without_clones(self, grads):
        return [grad[: len(grad) - self.num_clones] for grad in grads]

    monkeypatch.setattr(CloneWeights, "return_grads", without_clones)
    found = run_parity(*EP, *CLONES, steps=1)
    assert not found.is_equal and any("linear_fc" in str(difference) for difference in found.differences)


def test_redirected_tokens_that_are_also_kept_are_found(monkeypatch):
    apply = CloneRouting.apply

    def twice(self, probs_TE, routing_TE):
        probs_TV, routing_TV = apply(self, probs_TE, routing_TE)
        return probs_TV, routing_TE.index_select(1, self.expert_V) & ((self.high_V > self.low_V) | routing_TV)

    monkeypatch.setattr(CloneRouting, "apply", twice)
    assert not run_parity(*EP, *CLONES, steps=1).is_equal

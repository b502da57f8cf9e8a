"""Budgets, pages and clones on ranks equal one process without them; forgotten gradients and misrouted rows of clones are found."""

from proof.test_prove import EP, MODEL, MTP, PP, TP, verdict

from moe_trainer.moe.cloning import CloneTrip, Redirect
from moe_trainer.proof.pool import Pool
from moe_trainer.proof.prove import prove
from moe_trainer.proof.shrink import as_is

CLONES = ["--moe-clone-hot-experts", "2", "--moe-token-dispatcher-type", "alltoall"]
BUDGET = ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep", "--moe-expert-rank-capacity-factor", "1.1"]
STASH = [*BUDGET, "--moe-paged-stash", "--moe-paged-stash-page-size", "4"]
RECOMPUTE = ["--recompute-granularity", "selective", "--recompute-modules", "moe"]


def test_clones_budgets_and_pages_equal_one_process():
    cases = [as_is([*MODEL, *EP, *flags], 2) for flags in (CLONES, [*CLONES, *MTP], [*CLONES, *RECOMPUTE], BUDGET, STASH, [*STASH, *MTP])]
    cases += [as_is([*MODEL, *EP, *flags], 4) for flags in (
        [*PP, *CLONES], [*TP, "--expert-tensor-parallel-size", "2", *CLONES], [*PP, *STASH])]
    with Pool(5) as pool:
        for case in cases:
            result = prove(pool, case)
            assert result.equal, (" ".join(case.argv), result.failure, *map(str, result.differences[:4]))


def test_the_ranks_really_clone(monkeypatch):
    """Were nothing cloned, none of the mistakes below could be found."""
    def refuse(*_args):
        raise RuntimeError("a clone is on its way")

    monkeypatch.setattr(CloneTrip, "exchange", refuse)
    assert "a clone is on its way" in verdict(*EP, *CLONES).failure


def test_gradients_of_clones_that_do_not_come_home_are_found(monkeypatch):
    monkeypatch.setattr(CloneTrip, "_at_home", lambda self, weight, arrived: arrived.new_zeros(weight.shape))
    found = verdict(*EP, *CLONES)
    assert not found.equal and any("linear_fc" in str(difference) for difference in found.differences)


def test_rows_that_are_redirected_and_stay_at_home_too_are_found(monkeypatch):
    apply = Redirect.apply

    def twice(self, probs_TE, routing_TE):
        probs_TV, routing_TV = apply(self, probs_TE, routing_TE)
        return probs_TV, routing_TE.index_select(1, self.expert_V) & ((self.high_V > self.low_V) | routing_TV)

    monkeypatch.setattr(Redirect, "apply", twice)
    assert not verdict(*EP, *CLONES).equal

"""Small mappings keep the shape of large ones; several cover every pair of dimensions if one cannot."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from moe_trainer.verification.mapping import NAMES, MappingRequirements, ParallelMapping, shrink_mapping

MOE = MappingRequirements(moe=True)


def test_1024_ranks_become_eight_of_the_same_shape():
    """DeepSeek-V3 as its public recipe runs it: PP 16, EP 64, DP 64."""
    small, *others = shrink_mapping(ParallelMapping(pp=16, dp=64, ep=64), 8, MOE)
    assert small == ParallelMapping(pp=4, dp=2, ep=2) and not others


def test_expert_ranks_stay_above_data_ranks():
    """TP 2, PP 8, EP 64 on 512 ranks: 32 data ranks, experts fold over the tensor ranks and are not sharded themselves."""
    original = ParallelMapping(tp=2, pp=8, dp=32, ep=64, etp=1)
    small, *others = shrink_mapping(original, 8, MOE)
    assert small == ParallelMapping(tp=2, pp=2, dp=2, ep=4, etp=1) and not others
    assert original.edp == small.edp == 1


def test_virtual_stages_and_unsharded_experts_are_kept():
    small = shrink_mapping(ParallelMapping(tp=4, pp=4, vpp=5, dp=8, ep=8, etp=1), 8, MOE)[0]
    assert small.vpp == 2 and small.tp == 2 and small.etp == 1 and small.edp > 1


def test_four_dimensions_on_eight_ranks_need_several_mappings():
    original = ParallelMapping(tp=2, cp=4, pp=8, dp=16, ep=32, etp=2)
    chosen = shrink_mapping(original, 8, MOE)
    assert 1 < len(chosen) <= 6 and all(mapping.world <= 8 for mapping in chosen)
    for pair in itertools.combinations(("tp", "cp", "pp", "dp", "ep"), 2):
        assert any(set(pair) <= mapping.active for mapping in chosen), pair


def test_context_ring_keeps_its_direction():
    """With two ranks the previous one is also the next one."""
    assert (
        shrink_mapping(ParallelMapping(cp=16, dp=4), 8, MOE)[0].cp == 4
        and shrink_mapping(ParallelMapping(cp=2, dp=4), 8, MOE)[0].cp == 2
    )


def test_small_mapping_meets_requirements():
    assert shrink_mapping(ParallelMapping(pp=8, dp=4), 8, MappingRequirements(moe=False, middle_stages=True))[0].pp > 2
    assert (
        shrink_mapping(ParallelMapping(cp=8, dp=4), 8, MappingRequirements(moe=False, nested_context=True))[0].cp == 4
    )
    same = shrink_mapping(
        ParallelMapping(tp=2, pp=4, dp=4, ep=2, etp=1), 8, MappingRequirements(moe=True, same_data_ranks=True)
    )
    assert same[0].pp > 1 and all(mapping.edp == mapping.dp for mapping in same if mapping.pp > 1)
    sharded = shrink_mapping(ParallelMapping(dp=64), 8, MappingRequirements(moe=False, instances=4))[0]
    assert sharded.dp >= 4


@st.composite
def mappings(draw):
    size = st.sampled_from((1, 1, 2, 4, 8))
    tp, cp, pp, dp, etp, ep = (draw(size) for _ in range(6))
    vpp = draw(st.sampled_from((1, 1, 3))) if pp > 1 else 1
    while (tp * cp * dp) % (etp * ep):
        dp *= 2
    return ParallelMapping(tp, cp, pp, vpp, dp, ep, etp)


@given(mappings(), st.sampled_from((2, 4, 8)))
def test_small_mappings_are_legal_and_add_no_dimension(original, ranks):
    for small in shrink_mapping(original, ranks, MOE):
        assert small.world <= ranks and small.world % (small.etp * small.ep * small.pp) == 0
        assert all(getattr(small, name) <= getattr(original, name) for name in NAMES)
        assert (small.vpp > 1) <= (small.pp > 1)

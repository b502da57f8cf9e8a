"""Initial weights depend on (seed, global name) only: not on order, sharding, stacking, dtype or the meta device."""

import math
import os
import threading

import pytest
import torch
from torch.nn import Parameter

from moe_trainer.parallel import rng
from moe_trainer.parallel.params import ParamInfo, get_param_info, logical_ndim
from moe_trainer.parallel.rng import init_parameters, named_generator


def _param(shape, seed=1, dtype=torch.float32, device="cpu", **info):
    param = Parameter(torch.empty(shape, dtype=dtype, device=device))
    param.info = ParamInfo(**{"names": ("a.weight",), "init_std": 0.02, **info})
    init_parameters([param], seed)
    return param


def test_init_is_independent_of_order_and_global_random_state():
    first = _param((32, 16))
    torch.randn(1000)
    _param((8, 8), names=("other.weight",))
    again = _param((32, 16))
    assert torch.equal(first, again)
    assert not torch.equal(first, _param((32, 16), names=("b.weight",)))
    assert not torch.equal(first, _param((32, 16), seed=2))


@pytest.mark.parametrize("init", ["normal", "xavier_uniform"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(96, 1040), (70, 40)])  # several row blocks, and one
def test_shards_are_slices_of_the_full_tensor(shape, dim, init):
    full = _param(shape, init=init)
    for rank in range(2):
        cut = list(shape)
        cut[dim] //= 2
        part = _param(cut, sharded_dim=dim, shard_rank=rank, shard_count=2, init=init)
        assert torch.equal(part, full.chunk(2, dim)[rank])


@pytest.mark.parametrize("init", ["normal", "xavier_uniform"])
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(("shape", "dim"), [((96, 1040), 0), ((2064, 96), 0), ((40, 96), 1)])
def test_fused_parts_are_sharded_separately(shape, dim, parts, init):
    """[gate; up] over two ranks: each holds half of gate, then half of up; so do the experts of a stack."""
    full = _param(shape, init=init)
    for rank in range(2):
        expected = torch.cat([part.chunk(2, dim)[rank] for part in full.chunk(parts, dim)], dim)
        cut = {"sharded_dim": dim, "shard_rank": rank, "shard_count": 2, "parts": parts, "init": init}
        assert torch.equal(_param(expected.shape, **cut), expected)
        stack = _param((2, *expected.shape), names=("a.weight", "b.weight"), stacked=True, kind="expert", **cut)
        assert torch.equal(stack[0], expected)


def test_stacked_experts_equal_single_ones():
    names = tuple(f"experts.{e}.weight" for e in range(3))
    stack = _param((3, 16, 8), names=names, stacked=True, kind="expert")
    for e, name in enumerate(names):
        assert torch.equal(stack[e], _param((16, 8), names=(name,)))
    assert not torch.equal(stack[0], stack[1])
    assert logical_ndim(stack) == 2


def test_vocabulary_padding_keeps_the_first_rows():
    small, large = _param((2048, 64)), _param((3072, 64))
    assert torch.equal(small, large[:2048])


def test_other_dtypes_round_and_meta_materializes_equally():
    fp32 = _param((32, 16))
    assert torch.equal(_param((32, 16), dtype=torch.bfloat16), fp32.bfloat16())
    meta = _param((32, 16), device="meta")
    made = Parameter(torch.empty_like(meta, device="cpu"))
    made.info = meta.info
    init_parameters([made], 1)
    assert torch.equal(made, fp32)


def test_many_values_are_drawn_by_all_cores_and_are_those_of_one(monkeypatch):
    def draw():
        made = [Parameter(torch.full(shape, math.nan)) for shape in ((300, 1040), (5, 3, 70_000), (50, 65_536))]
        for param, (names, init) in zip(
            made, ((("a.weight",), "normal"), (tuple("bcdef"), "xavier_uniform"), (("g",), "normal"))
        ):
            param.info = ParamInfo(names, stacked=len(names) > 1, init=init, init_std=0.02)
        init_parameters(made, 1)
        return made

    fill, threads = rng._fill, set()
    monkeypatch.setattr(rng, "_fill", lambda *given: (threads.add(threading.current_thread().name), fill(*given)))
    monkeypatch.setattr(rng, "_NUMEL_PER_THREAD", 10_000_000)
    alone = draw()
    assert threads == {threading.main_thread().name}, "few values are not worth a thread"
    threads.clear()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {4, 5, 9})
    monkeypatch.setattr(rng, "_NUMEL_PER_THREAD", 1)
    number = torch.get_num_threads()
    drawn = draw()
    assert threads and all(name.startswith("weights_") for name in threads) and torch.get_num_threads() == number
    assert all(torch.equal(one, other) for one, other in zip(alone, drawn)), "no value is left out either"
    monkeypatch.setattr(rng, "_fill", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        draw()


def test_init_distribution_has_expected_statistics():
    normal = _param((512, 512), init_std=0.02)
    assert abs(normal.std().item() - 0.02) < 2e-4 and abs(normal.mean().item()) < 2e-4
    xavier = _param((512, 256), init="xavier_uniform")
    bound = (6 / 768) ** 0.5
    assert 0.99 * bound < xavier.abs().max().item() <= bound
    assert torch.equal(_param((4,), init="ones"), torch.ones(4)) and torch.equal(
        _param((4,), init="zeros"), torch.zeros(4)
    )


def test_streams_are_stable_over_versions():
    """A checkpoint-free restart on another machine must draw the same numbers."""
    assert named_generator(1, "x", 0).initial_seed() == 4863426508715678869


def test_a_parameter_without_info_is_an_error():
    with pytest.raises(ValueError, match="no ParamInfo"):
        get_param_info(Parameter(torch.zeros(2)))

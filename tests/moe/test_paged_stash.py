"""Paged stashing: bitwise equal to layers that keep their buffers; memory of the used pages and one worst-case buffer."""

import gc
import logging

import pytest
import torch
from harness import run_ranks
from memory.measure import measure_retained
from moe.layers import FFN, HIDDEN, by_name, cut, sections
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_trainer.layers.layer_factory import LOCAL
from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.memory.paged_stash import PagedStash, PagePool
from moe_trainer.moe.dispatch.select import attach_dispatcher, build_dispatcher
from moe_trainer.moe.layer import MoELayer
from moe_trainer.parallel.state import ParallelState

CPU = torch.device("cpu")
TOKENS, FACTOR, PAGE = 40, 3.0, 8
WORST, SHARE = TOKENS * 2 * 3, TOKENS * 2
WIDTH = HIDDEN + 2 * FFN + 1  # what an expert's rows keep: input, fc1's output, probability


def make_pool(page=4, factor=1.0):
    return PagePool(torch.Size([3]), torch.float32, CPU, page, factor)


def test_freed_pages_are_reused_as_a_ring():
    pages = make_pool()
    first, second = pages.allocate(9, 24), pages.allocate(4, 24)
    assert (len(first), len(second), pages.num_pages, pages.num_used, pages.num_users) == (3, 1, 6, 4, 2)
    pages.free(first)
    third = pages.allocate(12, 24)
    assert third == [(0, 4), (0, 5), (0, 0)], "pages that were given back come last"
    assert [(piece.shape[0], start, stop) for piece, start, stop in pages.views(third, 11)] == [(8, 0, 8), (3, 8, 11)]


def test_pool_grows_by_one_slab_per_user():
    pages = make_pool(factor=1.5)
    assert pages.num_pages == 0 and len(pages.allocate(8, 8)) == 2 and pages.num_pages == 3
    assert len(pages.allocate(16, 8)) == 4 and pages.num_pages == 6, "what the first user left is used by the second"
    assert pages.allocate(16, 8) is None and pages.num_users == 2
    assert len(pages.allocate(16, 8, force=True)) == 4 and pages.num_used == pages.num_pages == 10
    assert make_pool(factor=0.0).allocate(1, 8) is None
    assert pages.allocate(0, 8) == [], "an expert without tokens"


def test_views_do_not_span_two_slabs():
    pages = make_pool(factor=1.0)
    pages.allocate(12, 12), pages.allocate(12, 12)  # a slab of three pages for each
    assert [(piece.shape[0], start, stop) for piece, start, stop in pages.views([(0, 0), (1, 1), (1, 2)], 12)] == [
        (4, 0, 4),
        (8, 4, 12),
    ]


def build_layers(count, ps=None, stash=None, factor=FACTOR, dtype=torch.float64, device=CPU, **changes):
    """Layers behind each other, with the weights one process would have."""
    ps, single = ps or ParallelState.single(), ParallelState.single()
    args = sections(
        moe_aux_loss_coeff=0.0, moe_expert_rank_capacity_factor=factor, moe_token_dispatcher_type="alltoall", **changes
    )
    factory = LOCAL.for_chunk(activations=ActivationPolicy(stash=stash))
    made = []
    for index in range(count):
        full, layer = (
            MoELayer(args.model, args.moe, where, name="mlp", layer_number=index + 1, factory=factory).to(dtype)
            for where in (single, ps)
        )
        attach_dispatcher([layer], build_dispatcher(args.moe, ps))
        generator = torch.Generator().manual_seed(index)
        with torch.no_grad():
            for param in full.parameters():
                param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.3)
            named = by_name(full)
            for param in layer.parameters():
                for name, piece in zip(
                    param.info.names, param.unbind(0) if param.info.stacked else (param,), strict=True
                ):
                    piece.copy_(cut(named[name], param.info))
        made.append(layer.to(device))
    return made


def begin(layers):
    layers[0].activations.begin_pass()


def run(layers, x):
    begin(layers)
    for layer in layers:
        x = x + layer(x)
    return x


def tokens(dtype=torch.float64, seed=0):
    return torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradients(layers, microbatches=3):
    """Outputs and gradients of microbatches that are in flight at the same time, in two orders of backward."""
    weight = layers[0].router.weight
    xs = [tokens(weight.dtype, seed).to(weight.device).requires_grad_() for seed in range(microbatches)]
    ys = [run(layers, x) for x in xs]
    for y in (ys[1], ys[0], *ys[2:]):
        (y * y).sum().backward()
    return [
        *(y.detach() for y in ys),
        *(x.grad for x in xs),
        *(param.grad.clone() for layer in layers for param in layer.parameters()),
    ]


KINDS = {
    "plain": {},
    "grouped": {"moe_grouped_gemm": True},
    "biases": {"add_bias_linear": True, "moe_grouped_gemm": True},
    "probabilities on the input": {
        "moe_apply_probs_on_input": True,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
    },
    "shared": {"moe_shared_expert_intermediate_size": 20},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_paged_stash_gives_bitwise_equal_results(kind, dtype):
    stash = PagedStash(CPU, PAGE, 1.2, 0.0)
    plain, ours = (gradients(build_layers(3, stash=which, dtype=dtype, **KINDS[kind])) for which in (None, stash))
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)
    gc.collect()
    assert stash.pools and all(pages.num_pages and not pages.num_used for pages in stash.pools), (
        "every page was used and given back"
    )


@pytest.mark.parametrize(("device", "host"), [(0.5, 1.0), (0.3, 0.3), (0.01, 0.0)])
def test_full_pools_spill_to_host_or_grow(device, host, caplog):
    stash = PagedStash(CPU, PAGE, device, host)
    with caplog.at_level(logging.WARNING):
        plain, ours = (gradients(build_layers(3, stash=which)) for which in (None, stash))
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)
    assert (
        (stash.num_overflows > 0)
        == ("--moe-paged-stash-buffer-size-factor-cuda" in caplog.text)
        == (device + host < 1.0)
    )
    used_host = any(where == "host" and pages.num_pages for (where, *_), pages in stash._pools.items())
    assert used_host == (host > 0)


def test_stash_factor_named_in_the_log_suffices(caplog):
    stash = PagedStash(CPU, 1, 0.3)  # pages of a row: nothing is rounded up
    with caplog.at_level(logging.WARNING):
        gradients(build_layers(3, stash=stash))
    assert stash.num_overflows
    named = float(caplog.messages[-1].removesuffix(" would suffice").split()[-1])
    for factor, enough in ((named, True), (0.9 * named, False)):
        stash = PagedStash(CPU, 1, factor)
        gradients(build_layers(3, stash=stash))
        assert (stash.num_overflows == 0) == enough


def test_backward_restores_only_layers_of_its_own_pass():
    stash = PagedStash(CPU, PAGE, 1.2)
    layers = build_layers(2, stash=stash)
    first = run(layers, tokens())
    held = [pages.num_used for pages in stash.pools]
    run(layers, tokens(seed=1)).sum().backward()
    gc.collect()
    assert [pages.num_used for pages in stash.pools] == held, "the first pass waits for its own backward"
    first.sum().backward()


def test_restored_buffers_are_zero_after_their_rows():
    stash = PagedStash(CPU, PAGE, 1.2)
    x = torch.cat([torch.randn(13, 3), torch.zeros(27, 3)])
    assert torch.equal(stash.open(40, 13, 13)(x)(), x)


def test_pages_of_a_discarded_graph_are_freed():
    stash = PagedStash(CPU, PAGE, 1.2)
    y = run(build_layers(2, stash=stash), tokens())
    assert all(pages.num_used for pages in stash.pools)
    del y
    gc.collect()
    assert not any(pages.num_used for pages in stash.pools)


def test_nothing_is_stashed_without_gradients():
    stash = PagedStash(CPU, PAGE, 1.2)
    with torch.no_grad():
        run(build_layers(2, stash=stash), tokens())
    assert stash.pools == ()


def count_received_rows(layers, x):
    """Count the rows that the experts of each layer receive on this rank."""
    found, undo = [], []
    for layer in layers:
        forward = layer.experts.forward
        layer.experts.forward = lambda x, p, counts, *rest, forward=forward, **options: (
            found.append(sum(counts)),
            forward(x, p, counts, *rest, **options),
        )[1]
        undo.append(layer)
    with torch.no_grad():
        run(layers, x)
    for layer in undo:
        del layer.experts.forward
    return found


@pytest.mark.parametrize("count", [1, 4])
def test_retained_bytes_are_the_used_pages(count):
    """Counted: L layers keep L x worst case without a stash, and pages of what they used with it."""
    stash = PagedStash(CPU, PAGE, 1.0)
    plain, ours = (build_layers(count, stash=which) for which in (None, stash))
    rows = count_received_rows(ours, tokens())
    assert rows == [SHARE] * count  # one process gets all rows; the worst case is three times as much
    left, y = measure_retained(lambda: run(plain, tokens()))
    kept = sum(size for size, shape, _ in left.tensors if shape[0] == WORST)
    assert kept == count * WORST * WIDTH * 8, "without a stash: layers x worst case"
    ours_left, z = measure_retained(lambda: run(ours, tokens()))
    assert not [shape for _, shape, _ in ours_left.tensors if shape[0] == WORST], "with it no buffer stays"
    pages = sum(-(-number // PAGE) for number in rows)
    assert [which.num_used for which in stash.pools] == [pages] * 3
    assert left.device - ours_left.device == kept - pages * PAGE * WIDTH * 8
    assert torch.equal(y, z)


class _Peak(TorchDispatchMode):
    """The most bytes of buffers of the worst case that existed at a time."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for x in tree_leaves(outputs):
            if not isinstance(x, torch.Tensor) or not x.dim() or x.shape[0] != WORST:
                continue
            storage = x.untyped_storage()
            if storage.nbytes() >= WORST * x.element_size():
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for reference, size in self.alive.values() if not reference.expired()))
        return outputs


def _peaks(count, stash):
    layers = build_layers(count, stash=stash)
    with _Peak() as forward:
        y = run(layers, tokens())
    with _Peak() as backward:
        y.sum().backward()
    return forward.most, backward.most


def test_worst_case_buffers_in_forward_and_backward():
    (one, back_one), (two, back_two), (five, back_five) = (
        _peaks(count, PagedStash(CPU, PAGE, 1.0)) for count in (1, 2, 5)
    )
    assert 0 < one == two == five, "one worst case, whatever the number of layers"
    assert back_one < back_two == back_five <= 2 * back_one, "the layer before is brought back meanwhile, and no other"
    assert _peaks(5, None)[0] >= 4 * WORST * WIDTH * 8 + one - WORST * WIDTH * 8, (
        "without a stash every layer has its own"
    )


def _one_rank(rank, n, layout):
    ps, stash = ParallelState.create(n, rank, **layout), PagedStash(CPU, PAGE, 1.2)
    x = tokens(seed=rank)
    results = []
    for which in (None, stash):
        layers = build_layers(3, ps, which)
        own = x.clone().requires_grad_()
        y = run(layers, own)
        used = [pages.num_used for pages in stash.pools]
        (y * y).sum().backward()
        results.append([y.detach(), own.grad, *(param.grad for layer in layers for param in layer.parameters())])
    rows = count_received_rows(layers, x)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))
    assert used == [sum(-(-number // PAGE) for number in rows)] * 3
    return rows


@pytest.mark.parametrize("layout", [{"ep": 2}, {"ep": 4}, {"ep": 2, "etp": 2}], ids=str)
def test_paged_stash_on_ranks_uses_pages_of_received_rows(layout):
    found = run_ranks(_one_rank, layout["ep"] * layout.get("etp", 1), layout)
    assert len({tuple(rows) for rows in found}) > 1, "ranks receive different numbers of rows"

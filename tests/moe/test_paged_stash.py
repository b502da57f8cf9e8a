"""Paged stashing: bitwise equal to layers that keep their buffers; memory of the used pages and one worst-case buffer."""

import logging
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from memory.measure import measure_retained
from moe.layers import FFN, HIDDEN, by_name, cut, sections
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_trainer.layers.layer_factory import LOCAL
from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.memory.paged_stash import PagedStash
from moe_trainer.model.build import attach_dispatcher
from moe_trainer.moe.dispatch.local import LocalDispatcher
from moe_trainer.moe.dispatch.select import build_dispatcher
from moe_trainer.moe.layer import MoELayer
from moe_trainer.ops.permute import Permutation
from moe_trainer.parallel.state import ParallelState

CPU = torch.device("cpu")
TOKENS, FACTOR, PAGE = 40, 3.0, 8
WORST, SHARE = TOKENS * 2 * 3, TOKENS * 2
WIDTH = HIDDEN + 2 * FFN + 1  # what an expert's rows keep: input, fc1's output, probability


class FixedBuffers(LocalDispatcher):
    """Receives into buffers of a fixed size with counts on the device; what follows the tokens is undefined."""

    def dispatch_preprocess(self, x_TH, probs_TE, routing_TE, hints):
        state = super().dispatch_preprocess(x_TH, probs_TE, routing_TE, replace(hints, buffer_size=None))
        rest = hints.buffer_size - state.x_RH.shape[0]
        return replace(
            state,
            x_RH=F.pad(state.x_RH, (0, 0, 0, rest), value=torch.nan),
            probs_R=F.pad(state.probs_R, (0, rest), value=torch.nan),
            tokens_per_expert_e=state.handle.routes.counts_E,
            overflow=torch.zeros(1, dtype=torch.int32),
        )

    def start_token_dispatch(self, state, cache_fn):
        return state

    def combine_preprocess(self, y_RH, state):
        return y_RH[: state.handle.routes.row_R.shape[0]]


def free_pages(stash):
    """The numbers of free pages, and of all pages."""
    return [(int(pool.free_P[:-1].sum()), pool.num_device + pool.num_host) for pool in stash.pools]


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


def run(layers, x):
    layers[0].activations.begin_pass()
    for layer in layers:
        x = x + layer(x)
    return x


def tokens(dtype=torch.float64, seed=0, count=TOKENS):
    x = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x[:count].to(dtype)


def gradients(layers, microbatches=3, counts=(TOKENS,)):
    """Outputs and gradients of microbatches that are in flight at the same time, in two orders of backward."""
    weight, stash = layers[0].router.weight, layers[0].activations.stash
    if stash is not None:
        stash.begin_iteration()
    for layer in layers:
        layer.zero_grad()
    xs = [
        tokens(weight.dtype, seed, counts[seed % len(counts)]).to(weight.device).requires_grad_()
        for seed in range(microbatches)
    ]
    ys = [run(layers, x) for x in xs]
    for y in (ys[1], ys[0], *ys[2:]):
        (y * y).sum().backward()
    return [
        *(y.detach() for y in ys),
        *(x.grad for x in xs),
        *(param.grad.clone() for layer in layers for param in layer.parameters()),
    ]


def assert_same(ours, plain):
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)


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
    """In the first iteration, which measures, and in the second one, which uses pages."""
    stash = PagedStash(CPU, PAGE, 1.2)
    layers, plain = (
        build_layers(3, stash=stash, dtype=dtype, **KINDS[kind]),
        build_layers(3, dtype=dtype, **KINDS[kind]),
    )
    for _ in range(2):
        assert_same(gradients(layers), gradients(plain))
    assert stash.generation and free_pages(stash), "there were pages"
    assert all(free == total for free, total in free_pages(stash)), "every page was given back"


@pytest.mark.parametrize("kind", ["grouped", "probabilities on the input"])
@pytest.mark.parametrize(("device", "host", "page"), [(1.2, 0.0, 8), (0.5, 0.75, 8), (1.0, 0.0, 7)])
def test_device_counts_give_bitwise_equal_results(device, host, page, kind):
    """Microbatches of different sizes in buffers of one size; pages on the host are those behind the device's."""
    changes, counts = KINDS["grouped"] | KINDS[kind], (TOKENS, 23, 9)
    stash = PagedStash(CPU, page, device, host)
    layers, plain = (build_layers(3, stash=which, dtype=torch.float32, **changes) for which in (stash, None))
    expected = gradients(plain, counts=counts)
    assert_same(gradients(layers, counts=counts), expected)
    attach_dispatcher(layers, FixedBuffers(Permutation()))
    for layer in layers:
        layer.receive.budget.counts_on_device = True
    for _ in range(2):
        assert_same(gradients(layers, counts=counts), expected)
        assert not stash.overflow.any()
    assert free_pages(stash) and all(free == total for free, total in free_pages(stash))


def test_device_counts_without_enough_pages_set_the_flag():
    """The next iteration, with counts on the host, loses nothing, and then there are enough pages."""
    stash = PagedStash(CPU, PAGE, 0.5)
    layers, plain = (build_layers(3, stash=which, dtype=torch.float32, **KINDS["grouped"]) for which in (stash, None))
    expected, by_host = gradients(plain), layers[0].dispatcher
    gradients(layers)
    for on_device, overflows, generation in ((True, True, 1), (False, False, 1), (True, False, 2)):
        attach_dispatcher(layers, FixedBuffers(Permutation()) if on_device else by_host)
        for layer in layers:
            layer.receive.budget.counts_on_device = on_device
        found = gradients(layers)
        assert bool(stash.overflow) == overflows and stash.generation == generation
        assert all(free == total for free, total in free_pages(stash)), "missing pages are not given back"
        if not overflows:
            assert_same(found, expected)
        assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize(("device", "host"), [(0.5, 1.0), (0.3, 0.3), (0.01, 0.0)])
def test_full_pools_spill_to_host_or_grow(device, host, caplog):
    stash = PagedStash(CPU, PAGE, device, host)
    layers, expected = build_layers(3, stash=stash), gradients(build_layers(3))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert_same(gradients(layers), expected)
    assert (
        (stash.num_overflows > 0)
        == ("--moe-paged-stash-buffer-size-factor-cuda" in caplog.text)
        == (device + host < 1.0)
    )
    assert stash.num_overflows <= 1, "it has grown"
    assert all(pool.num_host == (host > 0) * 9 * -(-host * SHARE // PAGE) for pool in stash.pools)


@pytest.mark.parametrize("host", [0.0, 0.2])
def test_stash_factor_named_in_the_log_suffices(caplog, host):
    stash = PagedStash(CPU, 1, 0.3, host)  # pages of a row: nothing is rounded up
    layers = build_layers(3, stash=stash)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            gradients(layers)
    assert stash.num_overflows
    named = float(caplog.messages[-1].removesuffix(" would suffice").split()[-1])
    for factor, enough in ((named, True), (0.9 * named, False)):
        stash = PagedStash(CPU, 1, factor, host)
        layers = build_layers(3, stash=stash)
        for _ in range(2):
            gradients(layers)
        assert stash.has_overflowed == (not enough)


def test_groups_use_the_pinned_memory_of_earlier_ones():
    """Of two groups in flight the second is in pinned memory, which is enough for one."""
    stash, x = PagedStash(CPU, PAGE, 1.0, 1.0), torch.ones(2 * PAGE, 3)

    def store():
        group = stash.open(2 * PAGE, 2 * PAGE, PAGE)
        fetch = group.store(x)
        group.close()
        return fetch

    for _ in range(2):  # the first iteration measures
        stash.begin_iteration()
        first, second = store(), store()
        second()
        third = store()
        assert torch.equal(first(), x) and torch.equal(third(), x)
    assert [(pool.num_device, pool.num_host) for pool in stash.pools] == [(2, 2)] and not stash.has_overflowed


def test_more_layers_in_flight_have_more_pages():
    """As when the batch size grows: the memory is that of the most groups so far."""
    stash = PagedStash(CPU, PAGE, 1.0)
    layers = build_layers(2, stash=stash)
    sizes = []
    for microbatches in (2, 2, 4, 2, 2):
        gradients(layers, microbatches)
        sizes.append((stash.generation, stash.pools[0].num_device, stash.will_grow))
    group = SHARE // PAGE
    assert sizes == [
        (0, 0, True),
        (1, 4 * group, False),
        (1, 4 * group, True),
        (2, 8 * group, False),
        (2, 8 * group, False),
    ]


def test_backward_restores_only_layers_of_its_own_pass():
    stash = PagedStash(CPU, PAGE, 1.2)
    layers = build_layers(2, stash=stash)
    gradients(layers)
    stash.begin_iteration()
    first = run(layers, tokens())
    held = free_pages(stash)
    run(layers, tokens(seed=1)).sum().backward()
    assert free_pages(stash) == held, "the first pass waits for its own backward"
    first.sum().backward()
    assert all(free == total for free, total in free_pages(stash))


def test_restored_buffers_are_zero_after_their_rows():
    stash = PagedStash(CPU, PAGE, 1.2)
    x = torch.cat([torch.randn(13, 3), torch.full((27, 3), torch.nan)])
    expected = x.nan_to_num()
    for num_used in (13, 13, torch.tensor([13])):
        stash.begin_iteration()
        group = stash.open(40, num_used, 13)
        fetch = group.store(x)
        group.close()
        assert torch.equal(fetch(), expected)


def test_pages_of_a_discarded_graph_are_free_in_the_next_iteration():
    stash = PagedStash(CPU, PAGE, 1.0)
    layers = build_layers(2, stash=stash)
    gradients(layers, 2)
    for _ in range(3):
        stash.begin_iteration()
        run(layers, tokens()), run(layers, tokens())
        assert [free for free, _ in free_pages(stash)] == [0] and not stash.has_overflowed


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
    stash.begin_iteration()
    run(ours, tokens()).sum().backward()
    stash.begin_iteration()
    ours_left, z = measure_retained(lambda: run(ours, tokens()))
    assert not [shape for _, shape, _ in ours_left.tensors if shape[0] == WORST], "with it no buffer stays"
    pages = sum(-(-number // PAGE) for number in rows)
    assert free_pages(stash) == [(0, pages)]
    assert stash.num_bytes == pages * PAGE * WIDTH * 8
    tables = count * (SHARE // PAGE + 1) * 8  # and the number of tokens
    assert left.device - ours_left.device == kept - tables
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
    for _ in range(1 if stash is None else 2):
        if stash is not None:
            stash.begin_iteration()
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
    assert 0 < back_one < back_two == back_five, "the same in backward; the first layer's input has no gradient"
    assert _peaks(5, None)[0] >= 4 * WORST * WIDTH * 8 + one - WORST * WIDTH * 8, (
        "without a stash every layer has its own"
    )


def _one_rank(rank, n, layout):
    ps, stash = ParallelState.create(n, rank, **layout), PagedStash(CPU, PAGE, 1.5)
    x = tokens(seed=rank)
    results = []
    for which in (None, stash, stash):
        layers = build_layers(3, ps, which)
        stash.begin_iteration()
        own = x.clone().requires_grad_()
        y = run(layers, own)
        used = [total - free for free, total in free_pages(stash)]
        (y * y).sum().backward()
        results.append([y.detach(), own.grad, *(param.grad for layer in layers for param in layer.parameters())])
    rows = count_received_rows(layers, x)
    assert_same(results[1], results[0]), assert_same(results[2], results[0])
    assert used == [sum(-(-number // PAGE) for number in rows)]
    return rows


@pytest.mark.parametrize("layout", [{"ep": 2}, {"ep": 4}, {"ep": 2, "etp": 2}], ids=str)
def test_paged_stash_on_ranks_uses_pages_of_received_rows(layout):
    found = run_ranks(_one_rank, layout["ep"] * layout.get("etp", 1), layout)
    assert len({tuple(rows) for rows in found}) > 1, "ranks receive different numbers of rows"

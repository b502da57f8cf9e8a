"""Attention over a cut sequence equals attention of one process: output and every gradient, in fp64."""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from harness import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from moe_trainer.layers.context_parallel import ContextParallelAttention, get_cp_comm_type, make_core_attention
from moe_trainer.layers.core_attention import AttentionMask, CoreAttention
from moe_trainer.layers.ring_attention import ring_attention
from moe_trainer.ops import flash_attention
from moe_trainer.ops.block_attention import BlockMask
from moe_trainer.parallel.sequence import SequenceShard
from moe_trainer.parallel.state import Group, ParallelState

S, B = 16, 2
WIDTHS = {  # query heads, key-value heads, key width, value width
    "grouped queries": (8, 4, 6, 6),
    "one head each": (4, 4, 4, 4),
    "latent": (4, 4, 6, 3),
}
LAYOUTS = [("p2p", 2), ("p2p", 4), ("allgather", 2), ("allgather", 4), ("a2a", 2), ("a2a", 4), ("a2a+p2p", 4)]


def model(window=None, dropout=0.0, softmax="vanilla"):
    """`window`: keys before a query, or "chunks of 5"."""
    chunk = int(window.split()[-1]) if isinstance(window, str) else None
    return SimpleNamespace(
        softmax_type=softmax,
        attention_dropout=dropout,
        window_attn_skip_freq=None,
        window_size=None if window is None or chunk else (window, 0),
        attention_chunk_size=chunk,
    )


def inputs(widths, length=S, dtype=torch.float64):
    heads, groups, key, value = WIDTHS[widths]
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, key), (groups, key), (groups, value), (heads * value,)
    return [torch.randn(length, B, *shape, generator=generator, dtype=dtype) for shape in shapes]


def documents(length=S):
    """Three documents in one row, two in the other; their ends fall inside chunks and on their borders."""
    ids = torch.zeros(B, length, dtype=torch.int64)
    ids[0, 3:] += 1
    ids[0, length // 2 + 1 :] += 1
    ids[1, length // 4 :] += 1
    return ids


def explicit_mask(ids, window):
    """Return causal, window and document rules as an explicit mask."""
    i = torch.arange(ids.shape[1])
    mask = i[:, None] >= i
    if isinstance(window, str):
        mask &= i // int(window.split()[-1]) == i[:, None] // int(window.split()[-1])
    elif window is not None:
        mask &= i >= i[:, None] - window
    return (mask & (ids[:, :, None] == ids[:, None]))[:, None]


def run(core, q, k, v, grad, visible):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = core(q, k, v, visible)
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad]


@functools.cache
def run_one_process(widths, window, packed, length=S):
    """Plain softmax over an explicit mask: shares no code with the blocks."""
    *qkv, grad = inputs(widths, length)
    ids = documents(length) if packed else torch.zeros(B, length, dtype=torch.int64)
    core = CoreAttention(model(), 1, head_dim=WIDTHS[widths][2])
    return run(core, *qkv, grad, AttentionMask(mask=explicit_mask(ids, window)))


def run_on_ranks(rank, n, kind, cases, length=S):
    levels = (2, n // 2) if kind == "a2a+p2p" else None
    ps = ParallelState.create(n, rank, cp=n, cp_levels=levels)
    shard, outcomes = SequenceShard(ps.cp), []
    for widths, window, packed in cases:
        core = make_core_attention(model(window), 1, head_dim=WIDTHS[widths][2], ps=ps, comm_types=[kind])
        visible = AttentionMask.of(None, documents(length)) if packed else None
        results = run(core, *(shard.local(x, 0) for x in inputs(widths, length)), visible)
        outcomes.append([shard.full(x, 0) for x in results])
    return outcomes


def assert_equal(results, expected, case=""):
    for name, x, y in zip(("output", "grad of q", "grad of k", "grad of v"), results, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}, {case}: {text}")


@pytest.mark.parametrize("kind, n", LAYOUTS)
def test_every_cp_comm_type_equals_one_process(kind, n):
    # every two of the three choices
    pairs = itertools.product(enumerate(WIDTHS), enumerate((None, 3, 5, "chunks of 5", "chunks of 4")))
    cases = [(widths, window, bool((a + b) % 2)) for (a, widths), (b, window) in pairs]
    outcomes = run_ranks(run_on_ranks, n, kind, cases)
    for number, case in enumerate(cases):
        expected = run_one_process(*case)
        for outcome in outcomes:
            assert_equal(outcome[number], expected, case)


@pytest.mark.parametrize("window", [70, "chunks of 110"])
@pytest.mark.parametrize("kind", ["p2p", "allgather"])
def test_ring_of_three_ranks_with_multi_tile_chunks(kind, window):
    case, length = ("grouped queries", window, True), 3 * 2 * 80
    for (outcome,) in run_ranks(run_on_ranks, 3, kind, [case], length):
        assert_equal(outcome, run_one_process(*case, length), case)


@pytest.mark.parametrize("window", [None, 4, "chunks of 3"])
@pytest.mark.parametrize("widths", WIDTHS)
def test_packed_documents_of_one_rank_equal_the_explicit_mask(widths, window):
    *qkv, grad = inputs(widths)
    core = CoreAttention(model(window), 1, head_dim=WIDTHS[widths][2])
    assert_equal(run(core, *qkv, grad, AttentionMask.of(None, documents())), run_one_process(widths, window, True))


@pytest.mark.parametrize("size", [1, 5, 8, S, S + 1])
@pytest.mark.parametrize("widths", WIDTHS)
def test_chunks_of_one_rank_equal_the_explicit_mask(widths, size):
    *qkv, grad = inputs(widths)
    chunks = f"chunks of {size}"
    core, expected = (
        CoreAttention(model(chunks), 1, head_dim=WIDTHS[widths][2]),
        run_one_process(widths, chunks, False),
    )
    assert_equal(run(core, *qkv, grad, None), expected)
    ids = torch.zeros(B, S, dtype=torch.int64)  # the causal rule alone, as a mask
    assert_equal(run(core, *qkv, grad, AttentionMask(mask=explicit_mask(ids, None))), expected)


def test_chunks_of_a_long_sequence_use_the_flash_kernel(monkeypatch):
    size, calls = flash_attention.CPU_LENGTH, []
    length, original = 3 * size, flash_attention.flash_block
    monkeypatch.setattr(flash_attention, "flash_block", lambda *args: calls.append(args[4]) or original(*args))
    *qkv, grad = inputs("grouped queries", length)
    chunks, ids = f"chunks of {size}", torch.zeros(B, length, dtype=torch.int64)
    core = CoreAttention(model(chunks, softmax="off-by-one"), 1, head_dim=6)
    run(core, *qkv, grad, AttentionMask.of(None, ids))
    assert calls == [True, True, True], "one square block per chunk"
    *qkv, grad = inputs("grouped queries", size * 3 // 2)  # too short to be cut
    core = CoreAttention(model(chunks), 1, head_dim=6)
    ids = torch.zeros(B, size * 3 // 2, dtype=torch.int64)
    assert_equal(run(core, *qkv, grad, AttentionMask.of(None, ids)), run(core, *qkv, grad, None))
    assert len(calls) == 3


def with_sinks(core, q, k, v, grad, sinks, visible=None):
    """As `run`, with the gradient of the sinks at the end (zero where they are not learned)."""
    q, k, v, sinks = (x.clone().requires_grad_() for x in (q, k, v, sinks))
    out = core(q, k, v, visible, None if core.one_more else sinks)
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad, torch.zeros_like(sinks) if sinks.grad is None else sinks.grad]


@functools.cache
def sinks_by_definition(widths, window, packed, softmax):
    """Add a column before the softmax and drop it afterwards."""
    *qkv, grad = inputs(widths)
    heads, groups, key, _value = WIDTHS[widths]
    sinks = make_sinks(heads) if softmax == "learnable" else torch.zeros(heads, dtype=torch.float64)
    q, k, v, sinks = (x.clone().requires_grad_() for x in (*qkv, sinks))
    ids = documents() if packed else torch.zeros(B, S, dtype=torch.int64)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k.repeat_interleave(heads // groups, 2)) / key**0.5
    scores = scores.masked_fill(~explicit_mask(ids, window), float("-inf"))
    probs = torch.cat([scores, sinks[None, :, None, None].expand(B, heads, S, 1)], -1).softmax(-1)[..., :-1]
    out = torch.einsum("bnst,tbne->sbne", probs, v.repeat_interleave(heads // groups, 2)).flatten(2)
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad, sinks.grad if softmax == "learnable" else torch.zeros_like(sinks)]


def make_sinks(heads):
    return torch.linspace(-2.0, 3.0, heads, dtype=torch.float64)


def sinks_on_ranks(rank, n, kind, cases):
    levels = (2, n // 2) if kind == "a2a+p2p" else None
    ps = ParallelState.create(n, rank, cp=n, cp_levels=levels)
    shard, outcomes = SequenceShard(ps.cp), []
    for widths, window, packed, softmax in cases:
        core = make_core_attention(
            model(window, softmax=softmax), 1, head_dim=WIDTHS[widths][2], ps=ps, comm_types=[kind]
        )
        visible = AttentionMask.of(None, documents()) if packed else None
        *results, grad = with_sinks(
            core, *(shard.local(x, 0) for x in inputs(widths)), make_sinks(WIDTHS[widths][0]), visible
        )
        torch.distributed.all_reduce(grad)  # as every gradient of context-parallel ranks
        outcomes.append([*(shard.full(x, 0) for x in results), grad])
    return outcomes


SINKS = [
    (widths, window, packed, softmax)
    for (a, widths), (b, window) in itertools.product(enumerate(WIDTHS), enumerate((None, 3, "chunks of 6")))
    for packed, softmax in [((a + b) % 2 == 0, ("learnable", "off-by-one")[b % 2])]
] + [
    ("grouped queries", None, False, "off-by-one"),
    ("latent", 3, True, "learnable"),
    ("latent", "chunks of 6", False, "off-by-one"),
]


@pytest.mark.parametrize("kind, n", [("p2p", 1), *LAYOUTS])
def test_attention_sinks_equal_an_extra_softmax_column(kind, n):
    outcomes = run_ranks(sinks_on_ranks, n, kind, SINKS)
    for number, case in enumerate(SINKS):
        expected = sinks_by_definition(*case)
        for outcome in outcomes:
            for name, x, y in zip(
                ("output", "grad of q", "grad of k", "grad of v", "grad of sinks"),
                outcome[number],
                expected,
                strict=True,
            ):
                torch.testing.assert_close(
                    x, y, rtol=1e-12, atol=1e-12, msg=lambda text, name=name, case=case: f"{name}, {case}: {text}"
                )


def test_sinks_do_not_take_an_explicit_mask():
    *qkv, _grad = inputs("one head each")
    with pytest.raises(ValueError, match="--softmax-type"):
        CoreAttention(model(softmax="off-by-one"), 1, head_dim=4)(
            *qkv, AttentionMask(mask=torch.ones(1, 1, S, S, dtype=torch.bool))
        )


def test_aligned_long_documents_use_the_flash_kernel(monkeypatch):
    length, calls = 4 * flash_attention.CPU_LENGTH, []
    original = flash_attention.flash_block
    monkeypatch.setattr(flash_attention, "flash_block", lambda *args: calls.append(args[4]) or original(*args))
    *qkv, grad = inputs("grouped queries", length)
    places = torch.arange(length).expand(B, length)
    ids = (places >= length // 3).int() + (places >= length - 300).int()
    core = CoreAttention(model(), 1, head_dim=6)
    results = run(core, *qkv, grad, AttentionMask.of(None, ids))
    assert calls == [True, True, True], "one square block per document"
    assert_equal(results, run(core, *qkv, grad, AttentionMask(mask=explicit_mask(ids, None))))


def test_half_precision_keeps_fp32_sums():
    *qkv, grad = (x.bfloat16() for x in inputs("grouped queries", dtype=torch.float32))
    core = CoreAttention(model(), 1, head_dim=6)
    exact = run(core, *(x.double() for x in qkv), grad.double(), AttentionMask.of(None, documents()))
    for x, y in zip(run(core, *qkv, grad, AttentionMask.of(None, documents())), exact):
        assert x.dtype == torch.bfloat16
        torch.testing.assert_close(x.double(), y, rtol=2e-2, atol=2e-2)


def test_gradients_of_keys_and_values_are_summed_in_fp32():
    """A key is seen by several tiles of queries: 256 and twice 1 are 256 in bf16, if they are added one by one."""
    q, k, v = (torch.zeros(512, 1, 1, 1, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = ring_attention(q, k, v, 1.0, BlockMask(fused=False), Group.single("cp"))
    grad = torch.zeros_like(out)
    for query, of_first_value in ((0, 256.0), (255, 1.0), (511, 1.0)):
        grad[query] = of_first_value * (query + 1)  # which has the weight 1 / (query + 1)
    out.backward(grad)
    assert v.grad[0] == 258.0


def in_bf16(rank, n, kind):
    ps = ParallelState.create(n, rank, cp=n)
    core = make_core_attention(model(), 1, head_dim=6, ps=ps, comm_types=[kind])
    shard = SequenceShard(ps.cp)
    results = run(core, *(shard.local(x, 0).bfloat16() for x in inputs("grouped queries")), None)
    return [shard.full(x, 0) for x in results]


@pytest.mark.parametrize("kind", ["p2p", "allgather", "a2a"])
def test_cp_comm_types_agree_in_half_precision(kind):
    for results in run_ranks(in_bf16, 2, kind):
        for x, y in zip(results, run_one_process("grouped queries", None, False)):
            assert x.dtype == torch.bfloat16
            torch.testing.assert_close(x.double(), y, rtol=2e-2, atol=3e-2)


def with_dropout(rank, n, kind):
    """Two runs from one seed, one from another; rows of ones make the dropped share visible."""
    ps = ParallelState.create(n, rank, cp=n, cp_levels=(2, 2) if kind == "a2a+p2p" else None)
    core = make_core_attention(model(dropout=0.25), 1, head_dim=4, ps=ps, comm_types=[kind])
    q, k, v = (torch.zeros(64, B, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    v = torch.ones_like(v, requires_grad=True)

    def once(seed):
        torch.manual_seed(seed + rank)
        out = core(q, k, v)
        return out, torch.autograd.grad(out.sum(), v)[0]

    (first, grad), (again, grad_again), (other, _) = once(0), once(0), once(100)
    core.eval()
    return dict(
        same=torch.equal(first, again) and torch.equal(grad, grad_again),
        other=torch.equal(first, other),
        mean=first.mean().item(),
        total=grad.sum().item(),
        sum=first.sum().item(),
        plain=torch.allclose(core(q, k, v), torch.ones_like(first)),
        first=first.detach(),
    )


@pytest.mark.parametrize("kind, n", [("p2p", 2), ("allgather", 2), ("a2a", 2), ("a2a+p2p", 4)])
def test_dropout_differs_per_rank_and_is_equal_in_backward(kind, n):
    results = run_ranks(with_dropout, n, kind)
    for result in results:
        assert result["same"] and not result["other"] and result["plain"]
        assert abs(result["mean"] - 1.0) < 0.05
    # the output is linear in v: with v of ones its sum is the sum of v's gradient, if backward drops the same ones
    assert abs(sum(r["sum"] for r in results) - sum(r["total"] for r in results)) < 1e-9
    assert not torch.equal(results[0]["first"], results[1]["first"])


def test_dropout_gradients_of_packed_documents():
    core = CoreAttention(model(dropout=0.3), 1, head_dim=3)
    q, k, v = (torch.randn(6, 1, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    ids = torch.tensor([[0, 0, 1, 1, 1, 2]])

    def forward(q, k, v):
        torch.manual_seed(5)
        return core(q, k, v, AttentionMask.of(None, ids))

    assert torch.autograd.gradcheck(forward, (q, k, v))


class LargestTensor(TorchDispatchMode):
    """Count the elements of the largest tensor that any operator creates."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


def find_largest_tensor(rank, n, kind, packed):
    ps = ParallelState.create(n, rank, cp=n)
    length = 1024
    core = make_core_attention(model(), 1, head_dim=2, ps=ps, comm_types=[kind])
    q, k, v, grad = (SequenceShard(ps.cp).local(torch.randn(length, 1, 1, 2), 0) for _ in range(4))
    with LargestTensor() as seen:
        run(
            core,
            q,
            k,
            v,
            grad.flatten(2),
            AttentionMask.of(None, torch.arange(length)[None] // 100) if packed else None,
        )
    return seen.numel


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["p2p", "allgather"])
def test_full_attention_matrix_is_never_materialized(kind, packed):
    longest_keys = 1024 if kind == "allgather" else 1024 // 4
    for numel in run_ranks(find_largest_tensor, 2, kind, packed):
        assert numel <= max(64 * longest_keys, 2 * 1024), (
            "a tile of queries against the keys at hand, or the keys themselves"
        )


def run_with_masked_blocks(rank, n, kind):
    """Window 0 and one document per token: most blocks are fully masked for some query, many for all."""
    ps = ParallelState.create(n, rank, cp=n)
    core = make_core_attention(model(window=0), 1, head_dim=4, ps=ps, comm_types=[kind])
    shard = SequenceShard(ps.cp)
    q, k, v, grad = (shard.local(x, 0) for x in inputs("one head each"))
    ids = torch.arange(S).expand(B, S)
    out, *grads = run(core, q, k, v, grad, AttentionMask.of(None, ids))
    return torch.equal(out, v.flatten(2)), [bool(torch.isfinite(x).all()) for x in grads], grads[0].abs().max().item()


@pytest.mark.parametrize("kind", ["p2p", "allgather", "a2a"])
def test_megatron_1764_fully_masked_block_gives_no_nan(kind):
    for exact, finite, grad_q in run_ranks(run_with_masked_blocks, 2, kind):
        assert exact and all(finite) and grad_q < 1e-12, "a query that sees itself only returns its own value"


def collect_errors(rank, n):
    ps = ParallelState.create(n, rank, cp=n)
    q, k, v = (torch.randn(4, 1, heads, 4) for heads in (4, 1, 1))
    messages = []
    for kind, visible in (("a2a", None), ("p2p", AttentionMask(mask=torch.ones(1, 1, 8, 8, dtype=torch.bool)))):
        core = make_core_attention(model(), 1, head_dim=4, ps=ps, comm_types=[kind])
        with pytest.raises(ValueError) as caught:
            core(q, k, v, visible)
        messages.append(str(caught.value))
    return messages


def test_unsplittable_attention_is_rejected():
    for heads, mask in run_ranks(collect_errors, 2):
        assert "1 heads" in heads and "--cp-comm-type a2a" in heads
        assert "document ids" in mask


def kind_per_layer(rank, n):
    ps = ParallelState.create(n, rank, cp=n, cp_levels=(2, 1))
    cores = [
        make_core_attention(model(), layer, head_dim=4, ps=ps, comm_types=["p2p", "a2a", "allgather", "a2a+p2p"])
        for layer in (1, 2, 3, 4, 5)
    ]
    return [
        (type(core) is ContextParallelAttention, *(group.size for group in core.groups(None)), core.attend.__name__)
        for core in cores
    ]


def test_cp_comm_type_is_chosen_per_layer():
    assert run_ranks(kind_per_layer, 2)[0] == [
        (True, 1, 2, "ring_attention"),
        (True, 2, 1, "ring_attention"),
        (True, 1, 2, "gathered_attention"),
        (True, 2, 1, "ring_attention"),
        (True, 2, 1, "ring_attention"),
    ]
    assert [get_cp_comm_type(layer, ["a2a"]) for layer in (1, 7)] == ["a2a", "a2a"]


def test_one_rank_uses_plain_attention():
    core = make_core_attention(model(), 1, head_dim=4, ps=ParallelState.single(), comm_types=["p2p"])
    assert type(core) is CoreAttention


def with_kernels_counted(rank, n, kind, widths, length):
    calls = []
    original = flash_attention.flash_block
    flash_attention.flash_block = lambda q, k, v, scale, causal: (
        calls.append(causal) or original(q, k, v, scale, causal)
    )
    (results,) = run_on_ranks(rank, n, kind, [(widths, None, False)], length)
    return results, sorted(calls)


@pytest.mark.parametrize(
    "kind, blocks",
    [("p2p", [[False] * 3 + [True] * 2] * 2), ("allgather", [[False] + [True] * 2, [False] * 2 + [True] * 2])],
)
@pytest.mark.parametrize("widths", ["grouped queries", "latent"])
def test_long_chunks_use_the_flash_kernel(kind, blocks, widths):
    length = 2 * 2 * flash_attention.CPU_LENGTH
    expected = run_one_process(widths, None, False, length)
    for (results, calls), called in zip(run_ranks(with_kernels_counted, 2, kind, widths, length), blocks):
        assert_equal(results, expected)
        assert calls == called


@pytest.mark.parametrize("softmax", ["vanilla", "off-by-one"])
def test_packed_documents_of_one_rank_need_no_mask(softmax):
    """Nor do attention sinks."""
    length = 1024
    core = CoreAttention(model(softmax=softmax), 1, head_dim=2)
    q, k, v, grad = (torch.randn(length, 1, 1, 2) for _ in range(4))
    with LargestTensor() as seen:
        run(core, q, k, v, grad.flatten(2), AttentionMask.of(None, torch.arange(length)[None] // 100))
    assert seen.numel <= 64 * length, "a tile of queries against all keys"

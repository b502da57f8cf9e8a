"""--attention-backend chooses the kernel of the local layers' attention."""

import contextlib
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from emulated_cuda.run import on_device
from emulated_cuda.test_kernels import HEADS, LATENT
from torch.nn.attention import SDPBackend
from training.layouts import create_groups, make_argv, shallow

from arguments import parse_args
from moe_trainer.errors import UserError
from moe_trainer.layers.core_attention import BACKENDS, AttentionMask, CoreAttention
from moe_trainer.layers.ring_attention import ring_attention
from moe_trainer.ops import varlen_attention
from moe_trainer.ops.block_attention import BlockMask, Documents
from moe_trainer.ops.packed_sequences import PackedSequences
from moe_trainer.parallel.sequence import SequenceShard
from moe_trainer.parallel.state import ParallelState
from moe_trainer.verification.compare_runs import FP32, compare
from moe_trainer.verification.training_trace import TrainingTrace, train

FLASH, CUDNN = "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"


def trained(kind: str, flags: str) -> tuple[TrainingTrace, set[str]]:
    """Train on this process's device; return what became of the model, and the kernels of attention."""
    import emulation

    args = parse_args([*shallow(make_argv(kind)), "--global-batch-size", "2", *flags.split()], 1)
    with emulation.Ledger(emulation.DEVICE()) as ledger:
        trace = train(args, 0, ParallelState.single(), 1, device="cuda")
    found = {
        operator.removeprefix("aten::") for operator, line in ledger.launches if "attention" in f"{operator}{line}"
    }
    return trace, {name for name in found if name == "_softmax" or "attention" in name}


@pytest.mark.parametrize(("kind", "heads"), [("plain", HEADS), ("deepseek", LATENT)])
def test_backends_run_their_kernels_and_agree(kind, heads):
    expected = {
        "auto": {FLASH, f"{FLASH}_backward"},
        "flash": {FLASH, f"{FLASH}_backward"},
        "fused": {CUDNN, f"{CUDNN}_backward"},
        "unfused": {"_softmax"},
        "local": {"_softmax"},
    }
    outcomes = {
        backend: on_device(trained, kind, f"{heads} --bf16 --attention-backend {backend}") for backend in expected
    }
    assert {backend: found for backend, (_, found) in outcomes.items()} == expected
    for backend in ("flash", "fused"):  # here the same arithmetic
        assert [str(difference) for difference in compare(outcomes["auto"][0], outcomes[backend][0], FP32)] == []
    chosen, unfused = (
        on_device(trained, kind, f"{heads} --attention-backend {each}")[0] for each in ("auto", "unfused")
    )
    assert [str(difference) for difference in compare(chosen, unfused, FP32)] == []


@pytest.mark.parametrize(("backend", "flash"), [("auto", True), ("fused", True), ("unfused", False)])
def test_attention_in_blocks_is_by_flash_kernels_unless_unfused(backend, flash):
    flags = f"{HEADS} --bf16 --softmax-type off-by-one --attention-backend {backend}"
    assert (FLASH in on_device(trained, "plain", flags)[1]) == flash


def chooses_packed_kernel(backend: str) -> bool:
    """Attend within packed sequences, as on a CPU; return whether the flash kernel was called."""
    model = parse_args([*make_argv("plain")], 1).model
    packed = PackedSequences.of([3, 8, 5], 16)
    inputs = torch.randn(3, packed.num_tokens, 1, 4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    with mock.patch.object(varlen_attention, "varlen_attention", side_effect=NotImplementedError) as kernel:
        outputs = []
        for device in map(torch.device, ("cpu", "cuda")):
            core = CoreAttention(model, 1, head_dim=8, backend=BACKENDS.get(backend))
            visible = AttentionMask.of(None, None, device, packed)
            with contextlib.suppress(NotImplementedError):
                outputs.append(core(*inputs.to(device), visible).cpu())
        if not kernel.called:
            torch.testing.assert_close(*outputs)
    return kernel.called


@pytest.mark.parametrize(("backend", "flash"), [("auto", True), ("flash", True), ("unfused", False), ("local", False)])
def test_packed_sequences_are_by_the_flash_kernel_unless_unfused(backend, flash):
    assert on_device(chooses_packed_kernel, backend) == flash


def attends_to_chunks_of_sequences() -> list[int]:
    """One kernel computes the chunks of all packed sequences; return their borders."""
    model = parse_args([*make_argv("plain"), "--attention-chunk-size", "3"], 1).model
    packed = PackedSequences.of([2, 8, 5], 1)
    inputs = torch.randn(3, packed.num_tokens, 1, 4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    outputs = []
    with mock.patch.object(varlen_attention, "varlen_attention", wraps=varlen_attention.varlen_attention) as kernel:
        for device in map(torch.device, ("cpu", "cuda")):
            core = CoreAttention(model, 1, head_dim=8)
            outputs.append(core(*inputs.to(device), AttentionMask.of(None, None, device, packed)).cpu())
        (call,) = kernel.call_args_list
        with_sinks = replace(model, softmax_type="off-by-one")
        for device in map(torch.device, ("cpu", "cuda")):  # by blocks on both
            core = CoreAttention(with_sinks, 1, head_dim=8)
            outputs.append(core(*inputs.to(device), AttentionMask.of(None, None, device, packed)).cpu())
    torch.testing.assert_close(*outputs[:2], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(*outputs[2:], rtol=2e-2, atol=2e-2)
    assert call.args[4] == 3, "the longest chunk"
    return call.args[3].tolist()


def test_chunks_of_packed_sequences_are_sequences_of_the_flash_kernel():
    assert on_device(attends_to_chunks_of_sequences) == [0, 2, 5, 8, 10, 13, 15]


def attends_within_sequences(window: int) -> None:
    """The flash kernel for variable lengths computes, forward and backward, what every sequence gives alone."""
    lengths, starts = [3, 8, 5], [0, 3, 11, 16]
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(16, heads, 8, generator=generator).bfloat16() for heads in (4, 2, 2, 4))
    outputs = []
    for device in ("cpu", "cuda"):
        inputs = [x.detach().clone().to(device).requires_grad_() for x in (q, k, v)]
        if device == "cuda":
            borders = torch.tensor(starts, dtype=torch.int32, device=device)
            out = varlen_attention.varlen_attention(*inputs, borders, max(lengths), 0.3, window)
        else:
            parts = []
            for start, stop in zip(starts, starts[1:]):
                x = [each[start:stop].transpose(0, 1).float() for each in inputs]
                places = torch.arange(stop - start)
                distance = places[:, None] - places
                mask = (distance >= 0) & ((distance <= window) | (window < 0))
                parts.append(
                    torch.nn.functional.scaled_dot_product_attention(*x, attn_mask=mask, scale=0.3, enable_gqa=True)
                )
            out = torch.cat([part.transpose(0, 1) for part in parts])
        out.backward(grad.to(device, out.dtype))
        outputs.append([out.float().cpu(), *(x.grad.float().cpu() for x in inputs)])
    torch.testing.assert_close(*outputs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("window", [-1, 2])
def test_flash_kernel_for_variable_lengths_is_emulated(window):
    on_device(attends_within_sequences, window)


def ring_within_sequences(rank: int, world_size: int, sinks: bool, window: int, width: int) -> dict[str, int]:
    """A ring over packed sequences computes what every sequence gives alone; count the kernels of attention."""
    import emulation

    argv = [*make_argv("plain"), "--context-parallel-size", str(world_size)]
    group = create_groups(argv, rank, world_size).cp
    packed = PackedSequences.of([5, 16, 8, 3], 8)
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 8), (2, 8), (2, width), (4, width)
    inputs = [torch.randn(packed.num_tokens, 1, *shape, generator=generator).bfloat16() for shape in shapes]
    sink_N = torch.tensor([0.5, -1.0, 0.0, 2.0]) if sinks else None
    q, k, v = (x.float().requires_grad_() for x in inputs[:3])
    borders = packed.cu_seqlens_padded
    parts = []
    for start, stop in zip(borders, borders[1:]):
        keys, values = (x[start:stop, 0].repeat_interleave(2, 1) for x in (k, v))
        scores = torch.einsum("snd,tnd->nst", q[start:stop, 0], keys) * 0.3
        places = torch.arange(stop - start)
        distance = places[:, None] - places
        scores = scores.masked_fill((distance < 0) | ((distance > window) & (window >= 0)), -torch.inf)
        if sink_N is not None:
            scores = torch.cat([scores, sink_N[:, None, None].expand(-1, stop - start, 1)], -1)
        weights = scores.softmax(-1)[..., : stop - start]
        parts.append(torch.einsum("nst,tnd->snd", weights, values))
    expected = torch.cat(parts).unsqueeze(1)
    expected.backward(inputs[3].float())

    shard = SequenceShard(group, packed.padded_lengths)
    local = [shard.local(x, 0).cuda().requires_grad_() for x in inputs]
    mask = BlockMask(window, Documents.of(packed.ids(), torch.device("cuda"), packed.padded_lengths))
    with emulation.Ledger(emulation.DEVICE()) as ledger:
        out = ring_attention(*local[:3], 0.3, mask, group, None if sink_N is None else sink_N.cuda())
        out.backward(local[3].detach().flatten(2))
    assert list(mask.documents.derived) == [world_size]  # made once, for all layers and passes
    for ours, whole in zip(
        (out.unflatten(2, (4, -1)), *(x.grad for x in local[:3])), (expected, q.grad, k.grad, v.grad)
    ):
        torch.testing.assert_close(ours.float().cpu(), shard.local(whole.detach(), 0), rtol=3e-2, atol=3e-2)
    found = Counter()
    for (operator, _), count in ledger.launches.items():
        found[operator.removeprefix("aten::")] += count if "flash_attention" in operator else 0
    return dict(+found)


@pytest.mark.parametrize(
    ("ranks", "sinks", "window", "width"), [(2, False, -1, 8), (2, True, -1, 4), (1, True, -1, 8), (1, True, 3, 8)]
)
def test_ring_has_one_kernel_for_the_keys_of_a_rank(ranks, sinks, window, width):
    inputs = sinks, window, width
    if ranks == 1:
        found = [on_device(ring_within_sequences, 0, 1, *inputs)]
    else:
        found = on_device(ring_within_sequences, *inputs, ranks=ranks, devices=ranks)
    expected = {"_flash_attention_forward": ranks, "_flash_attention_backward": ranks}
    assert found == [expected] * ranks


def attends_in_a_window(batch: int, width: int, backend: str, dropout: float) -> list[str]:
    """A layer with a window computes what it computes on a CPU; return the operators of attention, and who makes a mask."""
    import emulation

    model = parse_args([*make_argv("plain"), "--window-size", "3,0"], 1).model
    core = CoreAttention(replace(model, attention_dropout=dropout), 1, head_dim=8, backend=BACKENDS.get(backend))
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 8), (2, 8), (2, width), (4, width)
    values = [torch.randn(10, batch, *shape, generator=generator).bfloat16() for shape in shapes]
    outputs = []
    with emulation.Ledger(emulation.DEVICE()) as ledger:
        for device in ("cpu", "cuda"):
            *inputs, grad = [x.clone().to(device).requires_grad_() for x in values]
            out = core(*inputs)
            assert out.is_contiguous()
            out.backward(grad.detach().flatten(2))
            outputs.append([out.float().cpu(), *(x.grad.float().cpu() for x in inputs)])
    if not dropout:
        torch.testing.assert_close(*outputs, rtol=3e-2, atol=3e-2)
    names = {operator.removeprefix("aten::").partition(".")[0] for operator, _ in ledger.launches}
    return sorted(name for name in names if "flash_attention" in name or name.startswith("tril"))


@pytest.mark.parametrize(
    ("batch", "width", "backend", "dropout", "is_flash"),
    [
        (1, 8, "auto", 0.0, True),
        (3, 4, "flash", 0.0, True),
        (1, 8, "unfused", 0.0, False),
        (1, 8, "auto", 0.1, False),
    ],
)
def test_a_window_is_by_the_flash_kernel_without_a_mask(batch, width, backend, dropout, is_flash):
    expected = ["_flash_attention_backward", "_flash_attention_forward"] if is_flash else ["tril"]
    assert on_device(attends_in_a_window, batch, width, backend, dropout) == expected


def captures_a_window() -> None:
    """A graph of a layer with a window computes new inputs when it is replayed."""
    model = parse_args([*make_argv("plain"), "--window-size", "3,0"], 1).model
    core = CoreAttention(model, 1, head_dim=8)
    first, second = torch.randn(2, 10, 2, 4, 8, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    static, graph = first.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = core(static, static, static)
    static.copy_(second)
    graph.replay()
    torch.testing.assert_close(out, core(second, second, second))


def test_a_window_is_captured_in_a_graph():
    on_device(captures_a_window)


def forced_flash_with_a_mask() -> None:
    x = torch.ones(4, 1, 2, 8, dtype=torch.bfloat16, device="cuda")
    model = parse_args([*make_argv("plain"), "--window-size", "1,0"], 1).model
    core = CoreAttention(model, 1, head_dim=8, backend=SDPBackend.FLASH_ATTENTION)
    hidden = torch.zeros(1, 1, 4, 4, dtype=torch.bool, device="cuda")
    with pytest.raises(UserError, match="flash_attention kernel .* 4 x 1 x 2 x 8 in bfloat16 .*backend auto"):
        core(x, x, x, AttentionMask.of(hidden, None))


def test_a_kernel_that_cannot_run_is_an_error_of_the_user():
    on_device(forced_flash_with_a_mask)

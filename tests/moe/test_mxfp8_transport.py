"""Dispatch of tokens and gradients in MXFP8: equal to one process that rounds the same rows, with half the bytes."""

from collections import Counter

import pytest
import torch
from harness import run_ranks
from moe import test_dispatch_ranks as ranks
from moe.layers import HIDDEN, build_layer, sections
from training.layouts import create_groups, make_argv, make_run
from training.resuming import run_steps

from arguments.mechanisms.dispatchers import DispatcherCapability
from moe_trainer.layers.kernels import Kernels
from moe_trainer.moe.dispatch.base import DispatchHints
from moe_trainer.moe.dispatch.select import build_dispatcher
from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState
from moe_trainer.quantization.mxfp8_rowwise import TORCH_ROW_CASTS, RowCasts, row_nbytes
from moe_trainer.quantization.quantize import E4M3, POWER_OF_TWO, Scaling, quantize

FORWARD, BACKWARD = {"moe_dispatch_fwd_dtype": "mxfp8"}, {"moe_combine_bwd_dtype": "mxfp8"}
KINDS = {"forward": FORWARD, "backward": BACKWARD, "both": FORWARD | BACKWARD}
LAYOUTS = (
    ranks.Layout(2, ep=2), ranks.Layout(2, tp=2, etp=2, sp=True), ranks.Layout(2, tp=2, ep=2), ranks.Layout(4, ep=2),
    ranks.Layout(4, tp=2, ep=2, etp=2, sp=True),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [64, 48, 7])
def test_packed_rows_equal_rounded_rows(width, dtype):
    x = torch.randn(9, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (x * torch.exp2(torch.arange(9.0)[:, None] * 6 - 24)).to(dtype)
    x[3] = 0.0
    packed = TORCH_ROW_CASTS.pack(x)
    assert packed.shape == (9, row_nbytes(width)) and packed.dtype == torch.uint8
    found = TORCH_ROW_CASTS.unpack(packed, width, dtype)
    assert torch.equal(found, TORCH_ROW_CASTS.round(x)) and found.dtype == dtype
    assert torch.equal(found.double(), quantize(x, Scaling(E4M3, 1, 32, POWER_OF_TWO)).dequantized().double()), (
        "bf16 holds them exactly"
    )
    assert torch.equal(TORCH_ROW_CASTS.unpack(TORCH_ROW_CASTS.pack(found), width, dtype), found), (
        "rounding twice changes nothing"
    )
    assert ((found - x).abs() <= x.abs().amax(1, keepdim=True) / 16).all() and not torch.equal(found, x)


def test_packing_of_empty_and_nonfinite_rows():
    assert TORCH_ROW_CASTS.unpack(TORCH_ROW_CASTS.pack(torch.zeros(0, 40)), 40, torch.float32).shape == (0, 40)
    x = torch.ones(2, 64)
    x[0, 3], x[1, 40] = torch.nan, torch.inf
    found = TORCH_ROW_CASTS.unpack(TORCH_ROW_CASTS.pack(x), 64, torch.float32)
    assert found[0, :32].isnan().all() and found[1, 32:].isnan().all() and torch.equal(found[0, 32:], x[0, 32:])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fp8_dispatch_on_ranks_equals_one_process(layout, monkeypatch):
    monkeypatch.setattr(ranks, "KINDS", KINDS)
    rounding = {
        key: each for key, each in ranks.DISPATCHERS.items() if each.supports(DispatcherCapability.MXFP8_TRANSPORT)
    }
    monkeypatch.setattr(ranks, "DISPATCHERS", rounding)
    shards = layout.tp == 1 or layout.sp
    cases = tuple(ranks.Case(layout, kind, ranks.UNEVEN if shards else ranks.EVEN) for kind in KINDS)
    if shards:
        cases += (ranks.Case(layout, "both", (0, 3, 1, 0)),)
    for case in cases:
        ranks.compare(case, cases)


@pytest.mark.parametrize("size", [None, 8])
def test_one_process_rounds_the_rows_of_any_buffer(size):
    args = sections(**FORWARD)
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(0))
    routing = torch.zeros(4, args.moe.num_experts, dtype=torch.bool)
    routing[:, :2] = True
    dispatcher = build_dispatcher(args.moe, ParallelState.single())
    state = dispatcher.dispatch_preprocess(x, routing.float(), routing, DispatchHints(buffer_size=size))
    state = dispatcher.start_token_dispatch(state)
    assert torch.equal(state.x_RH[:8], TORCH_ROW_CASTS.round(x).repeat(2, 1)) and not torch.equal(state.x_RH[:4], x)


def test_each_direction_is_rounded_by_its_own_flag():
    """The forward flag changes outputs, the backward flag changes expert gradients; token gradients are unchanged."""

    def run(**flags):
        layer = build_layer(sections(moe_aux_loss_coeff=0.0, **flags), dtype=torch.float64)
        x, weight = (tensor[0] for tensor in ranks.tokens((6,), torch.float64))
        y, grad = ranks.run_layer(layer, x, weight)
        return y, grad, layer.experts.linear_fc2.weight.grad

    plain, forward, backward = run(), run(**FORWARD), run(**BACKWARD)
    assert 1e-4 < (forward[0] - plain[0]).norm() / plain[0].norm() < 0.1
    assert torch.equal(backward[0], plain[0])
    assert 1e-4 < (backward[2] - plain[2]).norm() / plain[2].norm() < 0.1
    assert 1e-4 < (backward[1] - plain[1]).norm() / plain[1].norm() < 0.1


def _count_bytes(rank, n, flags):
    """Return the bytes of rows [R, H] that this rank sends: dispatch, combine, and their gradients in reverse order."""
    layout, sent = ranks.Layout(2, ep=2), []
    layer = ranks.build_shard(
        sections(moe_token_dispatcher_type="alltoall", moe_aux_loss_coeff=0.0, **flags),
        layout.state(rank),
        torch.bfloat16,
    )
    xs, weights = ranks.tokens((16, 16), torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        exchange = collectives.dist.all_to_all_single

        def all_to_all_single(out, sent_tensor, *args, **kwargs):
            if sent_tensor.dim() > 1:
                sent.append(sent_tensor.numel() * sent_tensor.element_size())
            return exchange(out, sent_tensor, *args, **kwargs)

        patch.setattr(collectives.dist, "all_to_all_single", all_to_all_single)
        ranks.run_layer(layer, xs[rank], weights[rank])
    return sent


def test_fp8_dispatch_sends_half_the_bytes():
    plain, forward, backward = (run_ranks(_count_bytes, 2, flags)[0] for flags in ({}, FORWARD, BACKWARD))
    share = row_nbytes(HIDDEN) / (2 * HIDDEN)  # 33 / 64 where blocks are full
    assert len(plain) == 4 and min(plain) > 0 and share < 0.54
    assert forward == [plain[0] * share, *plain[1:]]
    assert backward == [*plain[:2], plain[2] * share, plain[3]]


def _count_casts(rank, n, layout):
    """Return how often a forward and a backward pass call the casts that the dispatcher was given."""
    calls = Counter()

    def counted(name):
        def cast(*tensors):
            calls[name] += 1
            return getattr(TORCH_ROW_CASTS, name)(*tensors)

        return cast

    casts = RowCasts(counted("quantize"), counted("dequantize"))
    args = sections(moe_token_dispatcher_type="alltoall", moe_aux_loss_coeff=0.0, **KINDS["both"])
    ps = layout.state(rank)
    layer = ranks.build_shard(args, ps, torch.float64)
    layer.dispatcher = build_dispatcher(args.moe, ps, kernels=Kernels(row_casts=casts))
    xs, weights = ranks.tokens((8,) * n, torch.float64)
    ranks.run_layer(layer, xs[rank], weights[rank])
    return dict(calls)


@pytest.mark.parametrize("layout", [ranks.Layout(1), ranks.Layout(2, ep=2)], ids=str)
def test_kernels_of_the_model_cast_what_is_dispatched(layout):
    """Tokens in forward and gradients in backward, each once to MXFP8 and back, also where nothing is sent."""
    assert run_ranks(_count_casts, layout.n, layout) == [{"quantize": 2, "dequantize": 2}] * layout.n


def _train(rank, n, argv):
    return run_steps(make_run(argv, rank, create_groups(argv, rank, n), 2), 0, 2)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--bf16 --overlap-moe-expert-parallel-comm",
    ],
)
def test_fp8_dispatch_training_equals_one_process(flags):
    argv = [
        *make_argv("plain"),
        *"--num-layers 2 --moe-dispatch-fwd-dtype mxfp8 --moe-combine-bwd-dtype mxfp8 --moe-token-dispatcher-type alltoall".split(),
    ]
    ahead = run_ranks(_train, 2, [*argv, *"--expert-model-parallel-size 2".split(), *flags.split()])[0]
    bf16 = "--bf16" in flags
    one = _train(0, 1, [*argv, *(["--bf16"] if bf16 else [])])
    for (losses, norm), (expected, expected_norm) in zip(ahead, one):
        # a last digit turns a rounding now and then
        assert losses["lm loss"] == pytest.approx(expected["lm loss"], rel=2e-3 if bf16 else 1e-4)
        assert norm == pytest.approx(expected_norm, rel=5e-2 if bf16 else 1e-2)

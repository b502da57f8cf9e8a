"""TransformerEngine's fused experts (--use-transformer-engine-op-fuser) with the paged stash, by the library's own Python."""

import pytest
import torch
from emulated_cuda import te_package

from moe_trainer.parallel.state import ParallelState

STEPS, PAGE = 3, 8
EXPERTS, HIDDEN = 4, 128
FIXED = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-expert-rank-capacity-factor 2"
STASH = f"--moe-paged-stash --moe-paged-stash-page-size {PAGE} --moe-paged-stash-buffer-size-factor-cuda"
MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8"
INTERLEAVED = "--moe-mlp-glu-interleave-size 32"
CAPABILITY = {"": (9, 0), MXFP8: (10, 0)}


def train(flags: str, capability: tuple[int, int] = (9, 0)) -> tuple:
    """Train; return losses, norms and weights, the kinds of token counts that experts got, and what the stash held."""
    import emulation
    from gpu.test_te_parity import MODEL

    from arguments import parse_args
    from moe_trainer.layers.te_ops import FusedExpertMLP
    from moe_trainer.moe.receive.budget import get_stashes
    from moe_trainer.verification import training_trace

    emulation.DEVICE().capability = capability
    forward, kinds, runs = FusedExpertMLP.forward, [], []

    def noted(self, x, probs, w1, w2, counts, **more):
        if torch.is_grad_enabled():
            kinds.append("device" if isinstance(counts, torch.Tensor) else "host")
        return forward(self, x, probs, w1, w2, counts, **more)

    FusedExpertMLP.forward = noted
    sizes = (
        f"--hidden-size {HIDDEN} --ffn-hidden-size {HIDDEN} --num-experts {EXPERTS} --use-transformer-engine-op-fuser"
    )
    argv = [*MODEL.split(), "--transformer-impl", "transformer_engine", *sizes.split(), *flags.split()]
    outcome = training_trace.train(
        parse_args(argv, 1), 0, ParallelState.single(), STEPS, device="cuda", prepare=runs.append
    )
    held = [
        (
            sorted((str(dtype), tuple(token)) for token, dtype in signature),
            pool.peak_groups,
            stash.num_overflows,
            bool(pool.free_P[:-1].all()),
        )
        for run in runs
        for stash in get_stashes(run.chunks)
        for signature, pool in stash._pools.items()
    ]
    weights = {name: weight.float().numpy() for name, weight in outcome.weights.items()}
    return (outcome.losses, outcome.grad_norms, weights), kinds, held


BF16 = "torch.bfloat16"
TOKENS = {
    "": [(BF16, (1,)), (BF16, (HIDDEN,)), (BF16, (HIDDEN,)), (BF16, (2 * HIDDEN,))],
    MXFP8: [
        (BF16, (1,)),
        (BF16, (2 * HIDDEN,)),
        *[("torch.uint8", (HIDDEN // 32,))] * 2,
        *[("torch.uint8", (HIDDEN,))] * 2,
    ],
}
"""Of a token: its probability, fc1's results, and the inputs of both linears; quantized ones and a scale of 32 tokens."""


@pytest.mark.parametrize(
    ("recipe", "more"), [("", ""), ("", INTERLEAVED), (MXFP8, INTERLEAVED)], ids=["bf16", "interleaved", "mxfp8"]
)
def test_fused_experts_train_as_without_the_stash(recipe, more):
    """Bit for bit; experts read counts on the device but in the iteration that measures, and pages hold all that they save of tokens."""
    flags, capability = f"{recipe} {more} {FIXED}", CAPABILITY[recipe]
    plain, kinds, none = te_package.on_device(train, flags, capability)
    assert set(kinds) == {"device"} and not none
    ours, kinds, held = te_package.on_device(train, f"{flags} {STASH} 4", capability)
    assert [*dict.fromkeys(kinds)] == ["host", "device"] and kinds.count("device") == (STEPS - 1) * kinds.count("host")
    assert held == [(TOKENS[recipe], 2, 0, True)]
    for one, other in zip(ours[:2], plain[:2], strict=True):
        assert one == other
    assert all((weight == ours[2][name]).all() for name, weight in plain[2].items())


def test_iteration_of_fused_experts_is_repeated_where_pages_are_too_few():
    plain, *_ = te_package.on_device(train, FIXED)
    ours, kinds, held = te_package.on_device(train, f"{FIXED} {STASH} 0.5")
    assert held[0][3] and kinds[-1] == "device" and kinds.count("host") == 2 * kinds.index("device")
    assert ours[:2] == plain[:2] and all((weight == ours[2][name]).all() for name, weight in plain[2].items())


def gradients(
    recipe: str, width: int, counts: list[int], rows: int, capability: tuple[int, int]
) -> list[list[torch.Tensor]]:
    """Gradients of experts with a stash and without, in a buffer of `rows` tokens of which the counted ones are in use."""
    import emulation
    from gpu.test_te_parity import PIPELINE, make_experts

    from moe_trainer.memory.activations import ActivationPolicy
    from moe_trainer.memory.paged_stash import PagedStash, join_stash

    emulation.DEVICE().capability = capability
    flags = f"{PIPELINE} {recipe} --hidden-size {HIDDEN} --ffn-hidden-size {width} --num-experts {len(counts)}"
    stash, found, used = PagedStash(torch.device("cuda", 0), PAGE, 3.0), [], sum(counts)
    experts = make_experts(flags)
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(1)).cuda().bfloat16()
    x[used:] = 0.0
    on_device = torch.tensor(counts, device="cuda")
    for kind in (None, stash, stash):
        experts.activations = ActivationPolicy(stash=kind)
        if kind is not None:
            stash.begin_iteration()
        measures = kind is not None and stash.is_measuring
        received = x.clone().requires_grad_()
        probs = torch.linspace(0.1, 1.0, rows, device="cuda").requires_grad_()
        experts.zero_grad()
        with experts.activations.stash_scope(rows, used if measures else on_device.sum(0, keepdim=True), used) as group:
            y = experts(received, probs, *((counts, rows - used) if measures else (on_device,)))
        y = join_stash(y, group)
        y[:used].backward(torch.ones_like(y[:used]))
        grads = received.grad[:used], probs.grad[:used], *(param.grad for param in experts.parameters())
        found.append([grad.float().cpu() for grad in grads])
    assert stash.generation == 1 and not stash.overflow.item() and stash.pools[0].num_bytes
    return found


@pytest.mark.parametrize(
    ("recipe", "width", "counts", "rows"),
    [("", 96, [64, 0, 40], 192), ("", 96, [64, 0, 40], HIDDEN), (MXFP8, 512, [256, 0, 256], 1024)],
)
def test_weights_as_long_as_the_buffer_stay(recipe, width, counts, rows):
    """fc1 has as many rows of weights as the buffer has tokens; or fc2."""
    plain, measured, paged = te_package.on_device(gradients, recipe, width, counts, rows, CAPABILITY[recipe])
    for one, other in ((measured, plain), (paged, plain)):
        for ours, theirs in zip(one, other, strict=True):
            assert torch.equal(ours, theirs)


def test_tensors_that_fused_kernels_mark_are_of_tokens():
    from moe_trainer.layers.te_ops import _is_of_tokens

    x = torch.zeros(64, 32, dtype=torch.bfloat16)
    cast_of_weight, sums_of_experts, counts = (
        torch.zeros(64, 32, dtype=torch.uint8),
        torch.zeros(64),
        torch.zeros(64, dtype=torch.int64),
    )
    for tensor in (cast_of_weight, sums_of_experts, counts):
        assert not _is_of_tokens(tensor, x)
        tensor.grouped_tensor_scale_inv = False
        assert _is_of_tokens(tensor, x)
    assert not _is_of_tokens(torch.zeros(63, dtype=torch.bfloat16), x)
    assert not _is_of_tokens(torch.zeros(65, dtype=torch.uint8), x)

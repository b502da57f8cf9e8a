"""--attention-backend of the local layers: which kernel of torch they take, and when they cannot."""

import logging

import pytest
import torch
from torch.nn.attention import SDPBackend

from arguments import parse_args
from moe_trainer.backends import BackendPolicy, MissingBackendError
from moe_trainer.layers.layer_factory import select_layer_factory
from moe_trainer.ops import attention as module
from moe_trainer.parallel.state import ParallelState
from tests.arguments.test_tokens import TOY

TYPED = frozenset({"attention_backend"})
WIDE = "--kv-channels 264"
LATENT = "--multi-latent-attention --kv-lora-rank 8 --qk-head-dim 256 --qk-pos-emb-head-dim 8 --v-head-dim 8"


def attention(flags: str, policy: BackendPolicy):
    args = parse_args([*TOY, "--transformer-impl", "local", *flags.split()], 1)
    factory = select_layer_factory(args, ParallelState.single(), policy)
    return factory.core_attention(args.model, 1, head_dim=8)


@pytest.mark.parametrize(
    ("backend", "kernel"),
    [
        ("auto", None),
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("fused", SDPBackend.CUDNN_ATTENTION),
        ("unfused", SDPBackend.MATH),
        ("local", SDPBackend.MATH),
    ],
)
def test_every_backend_is_a_kernel_of_torch(backend, kernel, caplog):
    flags = f"--bf16 --attention-backend {backend}"
    assert attention(flags, BackendPolicy(cuda=True, typed=TYPED)).backend == kernel
    with caplog.at_level(logging.INFO):
        assert attention(flags, BackendPolicy(typed=TYPED)).backend is None
    assert caplog.messages == [
        f"--attention-backend {backend}: the kernels run on CUDA devices, and this rank computes on a CPU; using what "
        "torch chooses"
    ] * (backend != "auto")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--attention-backend flash", "bf16 and fp16, not fp32"),
        ("--attention-backend fused", "bf16 and fp16, not fp32"),
        (f"--attention-backend flash --bf16 {WIDE}", "up to 256 channels, and these have 264"),
        (f"--attention-backend flash --bf16 {LATENT}", "up to 256 channels, and these have 264"),
        ("--attention-backend unfused --window-size 4,0", None),
        ("--attention-backend fused --fp16 --window-size 4,0", None),
    ],
)
def test_a_typed_backend_that_cannot_run_is_an_error(flags, problem):
    policy = BackendPolicy(cuda=True, typed=TYPED)
    if problem is None:
        assert attention(flags, policy).backend is not None
        return
    with pytest.raises(MissingBackendError, match=f"{problem}.*Use --attention-backend auto"):
        attention(flags, policy)
    assert attention(flags, BackendPolicy("fallback", cuda=True, typed=TYPED)).backend is None


def test_unfused_attention_equals_torchs_choice(monkeypatch):
    """On a CPU, where the math kernel can be named as well."""
    monkeypatch.setattr(module, "BLOCKED_MAX_LENGTH", 0)
    q, k, v = (torch.randn(9, 2, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    chosen, unfused = (module.attention(q, k, v, 0.3, backend=kernel) for kernel in (None, SDPBackend.MATH))
    torch.testing.assert_close(chosen, unfused)
    for one, other in zip(*(torch.autograd.grad(y.sum(), (q, k, v)) for y in (chosen, unfused)), strict=True):
        torch.testing.assert_close(one, other)

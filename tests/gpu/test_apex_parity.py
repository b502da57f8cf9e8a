"""The kernels of the real apex against torch's: that the library means what tests/optim/fake_apex.py means."""

import pytest
import torch

from moe_trainer.optim import apex
from moe_trainer.optim.clip import square_sum
from moe_trainer.optim.update_rules.adam import torch_adam

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or apex.problem() is not None,
    reason="needs a CUDA device and NVIDIA's apex with its CUDA extensions",
)
SIZES = (70_001, 3, 65_536)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def test_adam():
    lists = [[draw(size) for size in SIZES] for _ in range(3)]
    lists.append([draw(size).square() for size in SIZES])
    expected = [[x.clone() for x in each] for each in lists]
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step_count": 7, "factor": 0.3}
    apex.load().adam(*lists, **settings)
    torch_adam(*expected, **settings)
    for ours, theirs in zip(expected, lists, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6)


def test_norms_and_scaled_copies():
    tensors = [*(draw(size) for size in SIZES), *(draw(size, dtype=torch.bfloat16) for size in SIZES)]
    assert float(square_sum(tensors, apex.load())) == pytest.approx(float(square_sum(tensors)), rel=1e-5)
    for x, scaled in zip(tensors, apex.load().scale(tensors, 0.3), strict=True):
        torch.testing.assert_close(scaled, x.float() * 0.3)


@pytest.mark.parametrize("total", [torch.float32, torch.bfloat16])
def test_weight_gradients(total):
    grad, x, start = draw(64, 96, dtype=torch.bfloat16), draw(64, 128, dtype=torch.bfloat16), draw(96, 128, dtype=total)
    expected = (start.double() + grad.double().t() @ x.double()).to(total)
    library = apex.load()
    if library.gemms is None:
        pytest.skip("apex was built without fused_weight_gradient_mlp_cuda")
    assert library.add_product(start, grad.t(), x)
    torch.testing.assert_close(start, expected)

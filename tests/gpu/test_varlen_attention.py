"""Attention of packed sequences by CUDA's kernels for variable lengths against the blocks of the CPU."""

import pytest
import torch
from training.layouts import MODEL

from arguments import parse_args
from moe_trainer.layers.core_attention import AttentionMask, CoreAttention
from moe_trainer.ops.packed_sequences import PackedSequences
from moe_trainer.ops.varlen_attention import can_run

pytestmark = pytest.mark.gpu

PACKED = PackedSequences.of([300, 77, 1, 512], 8)


@pytest.mark.parametrize("window, sequences", [(None, 0), (100, 0), (100, 2)])  # 0: packed
@pytest.mark.parametrize("groups, width", [(4, 64), (2, 64), (4, 48)])
def test_cuda_varlen_attention_equals_the_blocks_of_the_cpu(window, sequences, groups, width):
    flags = [] if window is None else ["--window-size", f"{window},0"]
    core = CoreAttention(parse_args([*MODEL, *flags], 1).model, 1, head_dim=64, scale=0.1)
    sizes = (256, sequences) if sequences else (PACKED.num_tokens, 1)
    shapes = ((*sizes, 4, 64), (*sizes, groups, 64), (*sizes, groups, width))
    generator = torch.Generator().manual_seed(0)
    results = []
    values = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    for device, dtype in ((torch.device("cuda", 0), torch.bfloat16), (torch.device("cpu"), torch.float64)):
        inputs = [x.to(device, dtype).requires_grad_() for x in values]
        assert can_run(inputs[0][:, 0], inputs[2][:, 0]) == (device.type == "cuda")
        out = core(*inputs, None if sequences else AttentionMask.of(None, None, device, PACKED))
        grads = torch.autograd.grad(out.float().square().sum(), inputs)
        results.append([x.detach().cpu().double() for x in (out, *grads)])
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-2, atol=2e-2)
    for ours, theirs in zip(results[0][1:], results[1][1:]):
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2 * float(theirs.abs().max()))

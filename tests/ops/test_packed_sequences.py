"""Lengths on a device say the same of every token as lengths on the host."""

import pytest
import torch

from moe_trainer.ops.packed_sequences import PackedSequences


@pytest.mark.parametrize("extend_last", [False, True])
@pytest.mark.parametrize("lengths", [(5, 16, 1, 9), (1,), (24,)])
def test_lengths_on_the_device_equal_those_on_the_host(lengths, extend_last):
    host = PackedSequences.of(lengths, 4).pad_tail(16, extend_last)
    device = host.on_device(torch.device("cpu"), 7)
    assert device.lengths.shape == (7,) and device.cu_seqlens_padded.shape == (8,)
    assert device.cu_seqlens_padded[: len(host.padded_lengths) + 1].tolist() == list(host.cu_seqlens_padded)
    assert set(device.cu_seqlens_padded[len(host.padded_lengths) :].tolist()) == {host.num_tokens}
    assert torch.equal(device.ids(), host.ids()) and torch.equal(device.positions().long(), host.positions())
    assert torch.equal(device.is_valid(), host.is_valid()) and device.num_valid == host.num_valid == sum(lengths)
    assert device.max_seqlen >= host.max_seqlen and device.num_tokens == host.num_tokens
    x_BT = torch.arange(1, host.num_tokens + 1).unsqueeze(0)
    assert torch.equal(device.shift_left(x_BT), host.shift_left(x_BT))

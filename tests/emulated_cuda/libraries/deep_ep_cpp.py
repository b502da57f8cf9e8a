"""DeepEP's compiled part (version 1, one machine) on gloo.

What its pybind sources declare (folder DEEP_EP_SOURCES), over rows that are really exchanged, on a communication stream
of its own.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from deep_ep_calls import Event, Work, check, exchange
from emulation import DEVICE
from pybind import Declarations

SOURCES = Path(os.environ["DEEP_EP_SOURCES"], "csrc")
declared = Declarations(
    "\n".join((SOURCES / name).read_text() for name in ("config.hpp", "event.hpp", "deep_ep.hpp", "deep_ep.cpp"))
)


MOST_SCALES = 128  # kNumMaxScales of config.hpp, for which buffers have space


class _Config:
    def __init__(self, num_sms, nvl_send, nvl_recv, rdma_send, rdma_recv):
        assert num_sms >= 0 and 0 < nvl_send < nvl_recv and 0 < rdma_send < rdma_recv
        self._sms, self._recv = num_sms, nvl_recv

    def get_nvl_buffer_size_hint(self, row_bytes, num_ranks):
        return max(1, self._sms // 2) * num_ranks * self._recv * (row_bytes + 128)

    def get_rdma_buffer_size_hint(self, row_bytes, num_ranks):
        return 0


def is_sm90_compiled():
    return True


def _check_rows(x):
    assert x.dim() == 2 and x.is_contiguous() and x.is_cuda and x.shape[1] * x.element_size() % 32 == 0


class _Buffer:
    def __init__(self, rank, num_ranks, nvl_bytes, rdma_bytes, low_latency, *_):
        assert not low_latency and nvl_bytes > 0 and nvl_bytes % 128 == 0
        self._rank, self._size, self._bytes = rank, num_ranks, nvl_bytes
        self._stream, self._group = torch.cuda.Stream(), None

    def is_available(self):
        return self._group is not None

    def get_num_rdma_ranks(self):
        return 1

    def get_local_device_id(self):
        return torch.cuda.current_device()

    def get_local_ipc_handle(self):
        return bytearray(64)

    def sync(self, device_ids, handles, root_unique_id):
        assert len(device_ids) == len(handles) == self._size
        # the extension does not receive the group: that of all ranks, which the tests use
        self._group = dist.group.WORLD
        assert self._group.size() == self._size

    def get_dispatch_layout(self, idx_TK, num_experts, previous_event, async_, on_comm_stream):
        check(torch.int64, idx_TK)
        assert idx_TK.dim() == 2 and num_experts > 0
        with self._work(previous_event, async_, on_comm_stream, idx_TK) as work:
            # -1 goes into a column that is cut off
            chosen_TE = torch.zeros(len(idx_TK), num_experts + 1, dtype=torch.bool, device=idx_TK.device)
            chosen_TE = chosen_TE.scatter_(1, torch.where(idx_TK < 0, num_experts, idx_TK), True)[:, :num_experts]
            in_rank = chosen_TE.view(len(idx_TK), self._size, -1).any(2)
            made = work.made(in_rank.sum(0).int(), chosen_TE.sum(0).int(), in_rank)
        return made[0], None, made[1], made[2], work.event

    def intranode_dispatch(
        self,
        x,
        scales,
        idx_TK,
        weights,
        per_rank,
        in_rank,
        per_expert,
        cached_rows,
        cached_ranks,
        cached_channels,
        alignment,
        worst,
        config,
        nvfp4,
        sf,
        previous_event,
        async_,
        on_comm_stream,
    ):
        again, channels = cached_ranks is not None, config._sms // 2
        check(torch.bool, in_rank)
        _check_rows(x)
        assert config._sms % 2 == 0 and in_rank.shape == (len(x), self._size)
        assert worst == 0 and not nvfp4 and sf is None, "not emulated"
        assert (scales is None) == (x.element_size() > 1)
        if scales is not None:
            check(torch.float32, scales)
            assert scales.dim() == 2 and len(scales) == len(x) and scales.shape[1] <= MOST_SCALES
        assert self._bytes >= config.get_nvl_buffer_size_hint(x.shape[1] * x.element_size(), self._size)
        assert (idx_TK is None) == (weights is None)
        if again:
            check(torch.int32, cached_ranks, cached_channels)
            assert cached_ranks.shape == (self._size, self._size) and cached_channels.shape == (self._size, channels)
        else:
            check(torch.int32, per_rank, per_expert)
            check(torch.int64, idx_TK)
            check(torch.float32, weights)
            assert (
                per_rank.shape == (self._size,)
                and weights.shape == idx_TK.shape
                and len(x) == len(idx_TK)
                and idx_TK.shape[1] <= 32
            )
        given = x, scales, in_rank, idx_TK, weights, cached_ranks
        with self._work(previous_event, async_, on_comm_stream, *given) as work:
            tokens = [in_rank[:, rank].nonzero().flatten() for rank in range(self._size)]
            sizes = [len(part) for part in tokens]
            if again:
                arriving = cached_ranks[:, self._rank].diff(prepend=cached_ranks.new_zeros(1)).tolist()
                assert sum(arriving) == cached_rows
            else:
                table = torch.empty(self._size, self._size, dtype=torch.int32, device=x.device)
                dist.all_gather(list(table.unbind(0)), per_rank, group=self._group)
                assert table[self._rank].tolist() == sizes
                ranks, arriving = table.cumsum(0).int(), table[:, self._rank].tolist()
            order = torch.cat(tokens)
            (x_NH,) = work.made(self._exchange(x[order], sizes, arriving))
            received = None if scales is None else work.made(self._exchange(scales[order], sizes, arriving))[0]
            if again:
                outcome = (
                    x_NH,
                    received,
                    None,
                    None,
                    None,
                    [],
                    cached_ranks,
                    cached_channels,
                    cached_channels,
                    cached_ranks,
                    cached_ranks,
                )
            else:
                num_local = len(per_expert) // self._size
                idx_NK = self._exchange(idx_TK[order], sizes, arriving) - self._rank * num_local
                idx_NK = torch.where((idx_NK < 0) | (idx_NK >= num_local), -1, idx_NK)
                weights_NK = self._exchange(weights[order], sizes, arriving).masked_fill(idx_NK < 0, 0.0)
                counts = [int((idx_NK == expert).any(1).sum()) for expert in range(num_local)]
                counts = [-(-count // alignment) * alignment for count in counts]
                source = self._exchange(order.int().unsqueeze(1), sizes, arriving).flatten()
                channel = torch.zeros(self._size, channels, dtype=torch.int32, device=x.device)
                head = torch.where(in_rank, in_rank.cumsum(0) - 1, -1).int()
                idx_NK, weights_NK, ranks, channel, source, head = work.made(
                    idx_NK, weights_NK, ranks, channel, source, head
                )
                outcome = (
                    x_NH,
                    received,
                    None,
                    idx_NK,
                    weights_NK,
                    counts,
                    ranks,
                    channel,
                    channel.clone(),
                    source,
                    head,
                )
        if not again:  # the host waits for the counts
            DEVICE().wait("intranode_dispatch", x.device.index, self._stream.cuda_stream)
        return *outcome, work.event

    def intranode_combine(
        self, x, weights, bias_0, bias_1, source, ranks, channel, head, config, previous_event, async_, on_comm_stream
    ):
        check(torch.bfloat16, x)
        _check_rows(x)
        check(torch.int32, source, ranks, channel, head)
        assert bias_0 is None and bias_1 is None, "not emulated"
        assert config._sms % 2 == 0 and ranks.shape == (self._size, self._size)
        assert (
            source.shape == (len(x),)
            and head.shape[1] == self._size
            and channel.shape == (self._size, config._sms // 2)
        )
        if weights is not None:
            check(torch.float32, weights)
            assert weights.dim() == 2 and len(weights) == len(x)
        with self._work(previous_event, async_, on_comm_stream, x, source, ranks, head, weights) as work:
            tokens = [(head[:, rank] >= 0).nonzero().flatten() for rank in range(self._size)]
            sizes = ranks[:, self._rank].diff(prepend=ranks.new_zeros(1)).tolist()
            made = []
            for table in (x, weights):
                if table is not None:
                    arrived = self._exchange(table, sizes, [len(part) for part in tokens])
                    total = torch.zeros(len(head), table.shape[1], device=x.device).index_add(
                        0, torch.cat(tokens), arrived.float()
                    )
                    made += work.made(total.to(table.dtype))
        return made[0], made[1] if weights is not None else None, work.event

    def _work(self, previous_event, async_, on_comm_stream, *inputs):
        assert not on_comm_stream or (previous_event is not None and async_)
        return Work(self._stream, previous_event, async_, EventHandle, inputs)

    def _exchange(self, table, sizes, arriving):
        return exchange(table, sizes, arriving, self._group)


Config = declared.make("Config", _Config)
EventHandle = declared.make("EventHandle", Event)
Buffer = declared.make("Buffer", _Buffer)

"""DeepEP 2's compiled part (deep_ep._C; ElasticBuffer on one machine, without expansion) on gloo.

What its pybind sources declare (folder DEEP_EP_SOURCES), over rows that are really exchanged, on a communication stream
of its own.

The library hands out the slots of a receiving buffer by atomic additions, so that the rows of one rank arrive in any order: here backwards.
What it leaves undefined is NaN, or as a number out of range.
"""

import functools
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
from deep_ep_calls import Event, Work, check, exchange
from emulation import DEVICE
from pybind import Declarations

SOURCES = Path(os.environ["DEEP_EP_SOURCES"], "csrc")
FILES = (
    "jit/api.hpp",
    "kernels/backend/symmetric.hpp",
    "kernels/backend/api.cuh",
    "utils/event.hpp",
    "legacy/config.hpp",
    "legacy/buffer.hpp",
    "elastic/buffer.hpp",
)
declared = Declarations("\n".join((SOURCES / name).read_text() for name in FILES))
ALIGNMENT = int(re.search(r"kNumAlignmentBytes = (\d+)", declared.text).group(1))
NO_VALUE = -12345
topk_idx_t = torch.int64


def is_sm90_compiled():
    return True


@functools.cache
def _comm_stream():
    return torch.cuda.Stream()


def _align(number, unit):
    return -(-number // unit) * unit


def _token_bytes(hidden_bytes, num_topk, with_metadata, scale_bytes=0):
    assert hidden_bytes % 32 == 0
    return (
        hidden_bytes + _align(scale_bytes, 32) + _align(8 * num_topk + (4 * (1 + num_topk) if with_metadata else 0), 32)
    )


def _dispatch_bytes(max_tokens, hidden, num_topk, element_size, num_ranks, num_scales=0):
    return num_ranks * max_tokens * _token_bytes(hidden * element_size, num_topk, True, 4 * num_scales)


def _combine_bytes(max_tokens, hidden, num_topk, num_ranks, multiple_reduction):
    return (
        (min(num_ranks, num_topk) if multiple_reduction else num_topk)
        * max_tokens
        * _token_bytes(2 * hidden, num_topk, False)
    )


def _buffer_size(comm, max_tokens, hidden, num_topk, fp8, hybrid, multiple_reduction):
    assert max_tokens > 0 and hidden > 0
    assert not fp8, "not emulated"
    num_topk = num_topk or 32
    needed = max(
        _dispatch_bytes(max_tokens, hidden, num_topk, 2, comm),
        _combine_bytes(max_tokens, hidden, num_topk, comm, multiple_reduction),
    )
    return _align(needed, ALIGNMENT)


class _Elastic:
    def __init__(self, rank, num_ranks, comm, cpu_comm, num_bytes, num_cpu_bytes, hybrid, multiple_reduction, *_):
        assert num_bytes > 0 and num_bytes % ALIGNMENT == 0 and num_cpu_bytes == 0 and comm == num_ranks
        # the extension does not receive the group: that of all ranks, which the tests use
        self._group, self._rank, self._size = dist.group.WORLD, rank, num_ranks
        assert self._group.size() == num_ranks and self._group.rank() == rank
        self._bytes, self._multiple_reduction = num_bytes, multiple_reduction

    def get_physical_domain_size(self):
        return 1, self._size

    def get_logical_domain_size(self):
        return 1, self._size

    def dispatch(
        self,
        x,
        sf,
        idx_TK,
        weights,
        stats,
        cached_rows,
        cached_expanded,
        cached_counts,
        cached_ranks,
        cached_experts,
        cached_unaligned,
        cached_slots,
        cached_forward,
        cached_metadata,
        cached_list,
        max_tokens,
        num_experts,
        alignment,
        num_sms,
        num_qps,
        previous_event,
        before_epilogue,
        async_,
        on_comm_stream,
        copy_idx,
        cpu_sync,
        expand,
        zero_padding,
        column_major,
    ):
        again = cached_rows is not None
        self._check_call(x, idx_TK, num_sms, max_tokens, previous_event, on_comm_stream)
        assert stats is None and before_epilogue is None and not (expand or zero_padding or column_major), (
            "not emulated"
        )
        assert num_experts % self._size == 0 and not (again and cpu_sync)
        num_topk, num_local = idx_TK.shape[1], num_experts // self._size
        assert idx_TK.shape[0] == len(x)
        assert (sf is None) == (x.element_size() > 1)
        if sf is not None:
            assert sf.is_cuda and sf.element_size() == 4 and sf.dim() == 2 and len(sf) == len(x)
        num_scales = 0 if sf is None else sf.shape[1]
        assert (
            _dispatch_bytes(max_tokens, x.shape[1], num_topk, x.element_size(), self._size, num_scales) <= self._bytes
        )
        if weights is not None:
            check(torch.float32, weights)
            assert weights.dim() == 2 and len(weights) == len(x)
        if again:
            check(torch.int32, cached_ranks, cached_experts, cached_unaligned, cached_slots, cached_metadata)
            assert cached_expanded is not None and cached_counts is not None
            assert cached_experts.shape == cached_unaligned.shape == (num_local,) and cached_ranks.shape == (
                self._size,
            )
            assert cached_slots.shape == idx_TK.shape
        with Work(
            _comm_stream(),
            previous_event,
            async_,
            EventHandle,
            [x, sf, idx_TK, weights, cached_slots, cached_ranks, cached_metadata],
        ) as work:
            holder_TK = torch.where(idx_TK < 0, -1, idx_TK // num_local)
            slots_TK = cached_slots if again else self._slots(holder_TK, max_tokens)
            tokens = self._tokens(holder_TK, slots_TK)
            sizes, order = [len(part) for part in tokens], torch.cat(tokens)
            if again:
                arriving = cached_ranks.diff(prepend=cached_ranks.new_zeros(1)).tolist()
            else:
                table = torch.empty(self._size, self._size, dtype=torch.int32, device=x.device)
                dist.all_gather(list(table.unbind(0)), table.new_tensor(sizes), group=self._group)
                arriving = table[:, self._rank].tolist()
            x_NH = self._exchange(x[order], sizes, arriving)
            sf_N = None if sf is None else self._exchange(sf[order], sizes, arriving)
            idx_NK = self._exchange(idx_TK[order], sizes, arriving) - self._rank * num_local
            idx_NK = torch.where((idx_NK < 0) | (idx_NK >= num_local), -1, idx_NK)
            weights_NK = None if weights is None else self._exchange(weights[order], sizes, arriving)
            if again:
                num_rows, num_expanded, counts = cached_rows, cached_expanded, cached_counts
                ranks, experts, unaligned, metadata, copied = (
                    cached_ranks,
                    cached_experts,
                    cached_unaligned,
                    cached_metadata,
                    None,
                )
                assert num_rows == len(x_NH)
            else:
                unaligned = torch.stack([(idx_NK == expert).sum() for expert in range(num_local)]).int()
                counts = [_align(count, alignment) for count in unaligned.tolist()]
                ranks, experts = (torch.tensor(each, device=x.device).cumsum(0).int() for each in (arriving, counts))
                metadata = torch.full((len(x_NH), num_topk + 2), NO_VALUE, dtype=torch.int32, device=x.device)
                metadata[:, 0] = self._exchange(self._rank * max_tokens + order, sizes, arriving)
                lane = torch.where(idx_NK >= 0, torch.arange(num_topk, device=x.device), -1).amax(1)
                metadata[:, 1] = torch.repeat_interleave(torch.tensor(arriving, device=x.device)) * num_topk + lane
                copied = idx_TK.clone() if copy_idx else None
                num_rows, num_expanded = len(x_NH), sum(counts)
                assert cpu_sync or sf is None, "not emulated"
                if not cpu_sync:  # as many rows as there may be
                    num_rows, counts = max_tokens * self._size, []
                    x_NH, idx_NK, metadata = (_filled(table, num_rows) for table in (x_NH, idx_NK, metadata))
                    weights_NK = None if weights is None else _filled(weights_NK, num_rows)
            made = [x_NH, sf_N, idx_NK, weights_NK, copied, ranks, experts, unaligned, metadata, slots_TK]
            work.made(*(tensor for tensor in made if tensor is not None))
        if cpu_sync:
            DEVICE().wait("ElasticBuffer.dispatch", x.device.index, _comm_stream().cuda_stream)
        return (
            x_NH,
            sf_N,
            idx_NK,
            weights_NK,
            copied,
            num_rows,
            num_expanded,
            counts,
            ranks,
            experts,
            unaligned,
            metadata,
            slots_TK,
            None,
            None,
            work.event,
        )

    def combine(
        self,
        x,
        weights,
        bias_0,
        bias_1,
        metadata,
        idx_TK,
        ranks,
        forward,
        linked,
        num_experts,
        max_tokens,
        num_sms,
        num_qps,
        previous_event,
        before_epilogue,
        async_,
        on_comm_stream,
        expanded,
    ):
        self._check_call(x, idx_TK, num_sms, max_tokens, previous_event, on_comm_stream)
        check(torch.bfloat16, x)
        check(torch.int32, ranks, metadata)
        assert bias_0 is None and bias_1 is None and before_epilogue is None and not expanded, "not emulated"
        (num_tokens, num_topk), num_local = idx_TK.shape, num_experts // self._size
        assert x.shape[1] % 256 == 0, "Invalid hidden"  # what the kernel is compiled for
        assert ranks.shape == (self._size,) and metadata.shape == (len(x), num_topk + 2)
        assert _combine_bytes(max_tokens, x.shape[1], num_topk, self._size, self._multiple_reduction) <= self._bytes
        if weights is not None:
            check(torch.float32, weights)
            assert weights.shape == (len(x), num_topk)
        with Work(_comm_stream(), previous_event, async_, EventHandle, [x, weights, metadata, idx_TK, ranks]) as work:
            source = metadata[:, 1] // num_topk
            order = source.argsort(stable=True)
            sizes = torch.bincount(source, minlength=self._size).tolist()
            holder_TK = torch.where(idx_TK < 0, -1, idx_TK // num_local)
            chosen_RT = torch.stack([(holder_TK == rank).any(1) for rank in range(self._size)])
            arriving = chosen_RT.sum(1).tolist()
            place = (
                torch.repeat_interleave(torch.tensor(arriving, device=x.device)),
                self._exchange(metadata[order, 0] % max_tokens, sizes, arriving).long(),
            )

            def arrived(table):
                received = torch.full((self._size, num_tokens, table.shape[1]), torch.nan, device=x.device)
                received[place] = self._exchange(table[order], sizes, arriving).float()
                return received

            y_TH = torch.where(chosen_RT.unsqueeze(2), arrived(x), 0.0).sum(0).to(x.dtype)
            weights_TK = None
            if weights is not None:  # each from the rank of its expert
                weights_TK = (
                    arrived(weights)
                    .gather(0, holder_TK.clamp(min=0).unsqueeze(0))
                    .squeeze(0)
                    .masked_fill(holder_TK < 0, 0.0)
                )
            work.made(*(tensor for tensor in (y_TH, weights_TK) if tensor is not None))
        return y_TH, weights_TK, work.event

    def _check_call(self, x, idx_TK, num_sms, max_tokens, previous_event, on_comm_stream):
        assert 0 < num_sms <= torch.cuda.get_device_properties(x.device).multi_processor_count
        assert x.dim() == 2 and x.is_cuda and x.is_contiguous() and x.shape[1] * x.element_size() % 16 == 0
        check(topk_idx_t, idx_TK)
        assert idx_TK.dim() == 2 and idx_TK.shape[1] <= 32 and idx_TK.shape[0] <= max_tokens
        assert previous_event is None or on_comm_stream
        assert on_comm_stream, "not emulated"

    def _slots(self, holder_TK, max_tokens):
        """A slot on every rank that gets the token, behind the last of its choices there."""
        slots_TK = torch.full_like(holder_TK, -1, dtype=torch.int32)
        lanes = torch.arange(holder_TK.shape[1], device=holder_TK.device)
        for rank in range(self._size):
            lane_T = torch.where(holder_TK == rank, lanes, -1).amax(1)
            token = (lane_T >= 0).nonzero().flatten().flip(0)
            slots_TK[token, lane_T[token]] = self._rank * max_tokens + torch.arange(
                len(token), dtype=torch.int32, device=token.device
            )
        return slots_TK

    def _tokens(self, holder_TK, slots_TK):
        """Tokens for every rank, by slot."""
        parts = []
        for rank in range(self._size):
            place = ((holder_TK == rank) & (slots_TK >= 0)).nonzero().unbind(1)
            parts.append(place[0][slots_TK[place].argsort()])
        return parts

    def _exchange(self, table, sizes, arriving):
        return exchange(table, sizes, arriving, self._group)


def _filled(table, num_rows):
    rest = table.new_full(
        (num_rows - len(table), *table.shape[1:]), torch.nan if table.is_floating_point() else NO_VALUE
    )
    return torch.cat([table, rest])


init_jit = declared.function("init_jit", lambda *paths: None)
# a communicator is known by its number of ranks
get_local_nccl_unique_id = declared.function("get_local_nccl_unique_id", lambda: bytearray(128))
create_nccl_comm = declared.function("create_nccl_comm", lambda unique_id, num_ranks, rank: num_ranks)
destroy_nccl_comm = declared.function("destroy_nccl_comm", lambda comm: None)
get_physical_domain_size = declared.function("get_physical_domain_size", lambda comm: (1, comm))
get_logical_domain_size = declared.function("get_logical_domain_size", lambda comm, hybrid: (1, comm))
calculate_elastic_buffer_size = declared.function("calculate_elastic_buffer_size", _buffer_size)
Config = declared.make("Config")
EventHandle = declared.make("EventHandle", Event)
Buffer = declared.make("Buffer")
ElasticBuffer = declared.make("ElasticBuffer", _Elastic)


def get_elastic_buffer_alignment():
    return ALIGNMENT

"""HybridEP's compiled part on gloo: what its pybind sources declare (folder DEEP_EP_SOURCES), over rows that are really exchanged.

Every rank gets all tokens and takes those that its experts need, in the order of ranks and tokens, expert by expert. What the library
leaves undefined is NaN; padding of experts is zeros. Rows beyond a limit that is given beforehand are dropped, the counts are of those that are left, and a flag
reports it (the library's `scan` kernel, built with HYBRID_EP_BUILD_TOKEN_DROP_ENABLE).
"""

import contextlib
import functools
import os
from pathlib import Path

import torch
import torch.distributed as dist
from emulation import DEVICE
from pybind import Declarations

torch.cuda.nvtx.range = lambda message: contextlib.nullcontext()  # builds of torch without CUDA have no ranges
declared = Declarations.read(Path(os.environ["DEEP_EP_SOURCES"], "csrc/hybrid_ep"))
APP_TOKEN_DATA_TYPE = declared.enumeration("APP_TOKEN_DATA_TYPE")
UINT16, UINT8 = APP_TOKEN_DATA_TYPE.UINT16, APP_TOKEN_DATA_TYPE.UINT8


class _Allocator:
    def detect_accessible_ranks(self, group):
        return group.size()


class _Config:
    def is_valid(self, fuse_permute_dispatch=False):
        multiple = 512 if self.token_data_type == UINT8 else 16
        return self.hidden_dim % multiple == 0 and self.num_of_experts_per_rank > 0


class _Configurer:
    def __init__(self, hidden_dim, max_tokens, num_local, ranks, nodes, use_fp8, *_):
        config = BufferConfig()
        config.hidden_dim, config.num_of_experts_per_rank, config.max_num_of_tokens_per_rank = (
            hidden_dim,
            num_local,
            -(-max_tokens // 16) * 16,
        )
        config.num_of_ranks_per_node, config.num_of_nodes, config.token_data_type = (
            ranks,
            nodes,
            UINT8 if use_fp8 else UINT16,
        )
        self.buffer_config = config

    def get_default_config(self, fuse_permute_dispatch):
        made = HybridEpConfigInstance()
        for name in made.declared.attributes:
            if name in self.buffer_config.declared.attributes:
                setattr(made, name, getattr(self.buffer_config, name))
        return made

    def adjust_template(self, config, fuse_permute_dispatch):
        pass


def one_kernel(method):
    @functools.wraps(method)
    def run(*args, **kwargs):
        DEVICE().lib.ec_kernel_begin(b"HybridEP", 0)
        try:
            return method(*args, **kwargs)
        finally:
            DEVICE().lib.ec_kernel_end()

    return run


class _Buffer:
    def __init__(self, group, config, local_rank, node_rank, group_size, *_):
        self._group, self._rank, self._size = group, group.rank(), group.size()
        assert self._size == group_size and config.hidden_dim > 0

    def update_buffer(self, config):
        return False

    def metadata_preprocessing(self, *args, non_blocking, **kwargs):
        handle = self._metadata(*args, non_blocking=non_blocking, **kwargs)
        if not non_blocking:  # the host waits for the counts
            DEVICE().wait(
                "metadata_preprocessing", torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream
            )
        return handle

    @one_kernel
    def _metadata(
        self,
        config,
        routing_map,
        num_of_tokens_per_rank,
        num_permuted_tokens,
        pad_multiple,
        enable_permute,
        fuse_permute_dispatch,
        non_blocking,
    ):
        assert routing_map.is_cuda and routing_map.is_contiguous() and routing_map.dtype == torch.bool
        assert routing_map.shape == (num_of_tokens_per_rank, config.num_of_experts_per_rank * self._size)
        sizes = [None] * self._size
        dist.all_gather_object(sizes, num_of_tokens_per_rank, self._group)
        assert len(set(sizes)) == 1, "HybridEP hangs when ranks have different numbers of tokens"
        everywhere = self._gather(routing_map.to(torch.uint8)).bool()
        first = self._rank * config.num_of_experts_per_rank
        local = everywhere[:, first : first + config.num_of_experts_per_rank].contiguous()
        handle, unit = HandleImpl(), pad_multiple or 1
        handle.config, handle.num_of_tokens_per_rank, handle.local_expert_routing_map = (
            config,
            num_of_tokens_per_rank,
            local,
        )
        handle.sparse_to_dense_map = everywhere
        for name in ("rdma_to_attn_map", "attn_to_rdma_map", "dense_chunk_layout", "dense_to_expert_map"):
            setattr(handle, name, local.new_empty(0, dtype=torch.int32))
        counts = local.sum(0)
        start = (padded := (counts + unit - 1) // unit * unit).cumsum(0) - padded
        handle.overflow_flag = torch.zeros(1, dtype=torch.int32, device=local.device)
        if non_blocking:
            handle.overflow_flag += (start + counts > num_permuted_tokens).any()
            counts = counts.minimum((num_permuted_tokens - start).clamp(min=0))
            padded = (counts + unit - 1) // unit * unit
        handle.tokens_per_expert = counts.int()
        handle.num_dispatched_tokens_tensor = local.any(1).sum().int()
        handle.padded_tokens_per_expert = padded if non_blocking else padded.cpu()
        handle.num_permuted_tokens = num_permuted_tokens if non_blocking else int(padded.sum())
        return handle

    @one_kernel
    def dispatch_with_permute(
        self, hidden, probs, scaling_factor, handle, pad_multiple, fuse_permute_dispatch, non_blocking, with_probs
    ):
        assert hidden.is_cuda and hidden.is_contiguous() and hidden.shape[1] == handle.config.hidden_dim
        is_bytes = handle.config.token_data_type == UINT8
        assert hidden.element_size() == 2 - is_bytes and len(hidden) == handle.num_of_tokens_per_rank
        tables = [hidden]
        if is_bytes:
            assert scaling_factor.is_cuda and scaling_factor.is_contiguous() and scaling_factor.dtype == torch.float32
            assert scaling_factor.shape == (len(hidden), hidden.shape[1] // 128)
            tables.append(scaling_factor)
        x, scales = (*(self._undefined(table, handle.num_permuted_tokens) for table in tables), None)[:2]
        token, expert, place = self._ways(handle, pad_multiple, len(x))
        unit = pad_multiple or 1
        num_used = ((handle.tokens_per_expert + unit - 1) // unit * unit).sum()
        used = torch.arange(len(x), device=x.device) < num_used
        for table, received in zip(tables, (x, scales), strict=False):
            received.masked_fill_(used[:, None], 0)
            received[place] = self._gather(table)[token]
        if not with_probs:
            return x, None, scales
        self._check_probs(probs)
        weights = torch.full((len(x),), torch.nan, device=x.device).masked_fill_(used, 0.0)
        weights[place] = self._gather(probs)[token, self._rank * handle.config.num_of_experts_per_rank + expert]
        return x, weights, scales

    @one_kernel
    def combine_with_unpermute(self, hidden, probs, handle, pad_multiple, fuse_unpermute_combine, with_probs):
        assert hidden.is_cuda and hidden.is_contiguous() and hidden.element_size() == 2 and hidden.dtype != torch.uint8
        token, expert, place = self._ways(handle, pad_multiple, len(hidden))
        total = handle.num_of_tokens_per_rank * self._size
        rows = torch.zeros((total, hidden.shape[1]), device=hidden.device).index_add(0, token, hidden[place].float())
        x = self._scatter(rows.to(hidden.dtype)).float().sum(0).to(hidden.dtype)
        if not with_probs:
            return x, None
        self._check_probs(probs)
        num_local = handle.config.num_of_experts_per_rank
        table = torch.zeros((total, num_local * self._size), device=hidden.device)
        table[token, self._rank * num_local + expert] = probs[place]
        return x, self._scatter(table).sum(0)

    @staticmethod
    def _undefined(table, num_rows):
        value = 255 if table.dtype == torch.uint8 else torch.nan
        return torch.full((num_rows, table.shape[1]), value, dtype=table.dtype, device=table.device)

    @staticmethod
    def _check_probs(probs):
        assert probs is not None and probs.is_cuda and probs.is_contiguous() and probs.dtype == torch.float32

    @staticmethod
    def _ways(handle, pad_multiple, num_rows):
        """Token, expert and place of every row that fits; places are looked for by counts alone, as the kernels do."""
        expert, token = handle.local_expert_routing_map.t().nonzero().unbind(1)
        unit, counts = pad_multiple or 1, handle.local_expert_routing_map.sum(0)
        padded = (counts + unit - 1) // unit * unit
        shift = (padded - counts).cumsum(0) - (padded - counts)
        place = torch.arange(len(token), device=token.device) + shift[expert]
        kept = place < num_rows
        return token[kept], expert[kept], place[kept]

    def _gather(self, table):
        parts = [torch.empty_like(table) for _ in range(self._size)]
        dist.all_gather(parts, table.contiguous(), group=self._group)
        return torch.cat(parts)

    def _scatter(self, table):
        """Parts of the table for this rank, by rank."""
        arrived = torch.empty_like(table)
        dist.all_to_all_single(arrived, table.contiguous(), group=self._group)
        return arrived.view(self._size, -1, table.shape[1])


ExtendedMemoryAllocator = declared.make("ExtendedMemoryAllocator", _Allocator)
BufferConfig = declared.make("BufferConfig")
HybridEpConfigInstance = declared.make("HybridEpConfigInstance", _Config)
Configurer = declared.make("Configurer", _Configurer)
HandleImpl = declared.make("HandleImpl")
HybridEPBuffer = declared.make("HybridEPBuffer", _Buffer)

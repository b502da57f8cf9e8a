"""A stand-in for transformer_engine.pytorch.ep over gloo: the same calls, the same meaning, on a CPU or an emulated device.

Parameters are checked against the signatures of TransformerEngine's branch main (d0067d0d). The meaning is that of its documentation and tests:
rows arrive sorted by local expert, source rank and token; indices of -1 are skipped; with a capacity rows beyond it are dropped and
total_recv_tokens counts them; what is behind the last row is undefined (here NaN); combine sums without weights. What the library cannot do
fails: a buffer of an earlier context, ranks with different settings, and with zero copy tensors that are not registered.
"""

import contextlib
import importlib.machinery
import sys
from types import ModuleType

import torch
import torch.distributed as dist
from moe.fake_deep_ep import Signatures

RECORDED = {
    "ep_bootstrap": [
        *([name, None] for name in ("ep_group", "num_experts", "max_tokens_per_rank", "hidden_dim", "num_topk")),
        ["recv_capacity_per_rank", "None"],
        *([name, "default"] for name in ("max_num_sms", "zero_copy", "drop_on_overflow", "max_token_dtype")),
    ],
    "ep_finalize": [],
    "EpBuffer": [
        *([name, None] for name in ("top_k", "max_tokens_per_rank", "hidden_dim", "num_local_experts")),
        ["recv_capacity_per_rank", "None"],
        *([name, "default"] for name in ("alignment", "payload_dtype", "device")),
        *([name, "None"] for name in ("dispatch_fwd_quant_recipe", "combine_bwd_quant_recipe")),
    ],
    "ep_dispatch": [
        *([name, None] for name in ("buffer", "tokens", "topk_idx", "topk_weights", "*")),
        *([name, "None"] for name in ("recv_tokens", "recv_topk_weights")),
    ],
    "ep_combine": [
        *([name, None] for name in ("buffer", "expert_out", "*")),
        *([name, "None"] for name in ("num_local_tokens", "grad_out")),
    ],
    "symm_mem_alloc": [
        *([name, None] for name in ("shape", "dtype", "ep_group")),
        *([name, "default"] for name in ("device", "use_pool", "backend")),
    ],
}


def one_kernel(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """Count what runs inside as one kernel, on an emulated device."""
    if not x.is_cuda:
        return contextlib.nullcontext()
    from emulation import DEVICE

    @contextlib.contextmanager
    def kernel():
        DEVICE().lib.ec_kernel_begin(b"NCCL EP", 0)
        try:
            yield
        finally:
            DEVICE().lib.ec_kernel_end()

    return kernel()


class Library:
    """The state of the process: settings of the context, its number, and registered memory."""

    def __init__(self, signatures: Signatures):
        self.signatures, self.settings, self.number = signatures, None, 0
        self.registered: list[torch.Tensor] = []

    def ep_bootstrap(self, *args, **kwargs) -> None:
        bound = self.signatures.bind("ep_bootstrap", args, kwargs)
        assert self.settings is None, "ep_bootstrap was already called in this process"
        group, capacity = bound["ep_group"], bound.get("recv_capacity_per_rank")
        assert group.size() >= 2 and bound["num_topk"] >= 1 and bound["max_tokens_per_rank"] % 64 == 0
        assert capacity is not None or not (bound.get("zero_copy") or bound.get("drop_on_overflow"))
        assert capacity is None or capacity >= bound["max_tokens_per_rank"]
        everywhere = [None] * group.size()
        dist.all_gather_object(everywhere, {key: bound[key] for key in bound if key != "ep_group"}, group=group)
        assert all(one == everywhere[0] for one in everywhere), everywhere
        self.settings, self.number = bound, self.number + 1

    def ep_finalize(self, *args, **kwargs) -> None:
        self.signatures.bind("ep_finalize", args, kwargs)
        self.settings, self.registered = None, []

    def symm_mem_alloc(self, *args, **kwargs) -> torch.Tensor:
        bound = self.signatures.bind("symm_mem_alloc", args, kwargs)
        assert self.settings is not None and bound["ep_group"] is self.settings["ep_group"]
        self.registered.append(torch.empty(*bound["shape"], dtype=bound["dtype"], device=bound["device"]))
        return self.registered[-1]

    def check_registered(self, *tensors: torch.Tensor) -> None:
        if self.settings.get("zero_copy"):
            known = {x.untyped_storage().data_ptr() for x in self.registered}
            assert all(x.untyped_storage().data_ptr() in known for x in tensors), "not registered with NCCL"

    def received(self, like: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Undefined memory for what arrives."""
        out = like.new_full((num_rows, *like.shape[1:]), torch.nan)
        if self.settings.get("zero_copy"):
            self.registered.append(out)
        return out


class EpBuffer:
    """The routes of one dispatch."""

    def __init__(self, library: Library, bound: dict):
        self.library, self.number, self.bound = library, library.number, bound
        assert library.settings is not None, "EpBuffer requires ep_bootstrap() to be called first"
        for mine, name in (("top_k", "num_topk"), ("max_tokens_per_rank",) * 2, ("hidden_dim",) * 2):
            assert bound[mine] == library.settings[name]
        self.capacity = bound.get("recv_capacity_per_rank")
        assert self.capacity == library.settings.get("recv_capacity_per_rank")
        self.group, self.most = library.settings["ep_group"], bound["max_tokens_per_rank"]
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def check(self) -> None:
        assert self.number == self.library.number and self.library.settings is not None, "of an earlier context"

    def prepare(self, idx_TK: torch.Tensor) -> None:
        assert idx_TK.dtype == torch.int64 and idx_TK.shape[1] == self.bound["top_k"]
        num_local, capacity = self.bound["num_local_experts"], self.capacity
        with one_kernel(idx_TK):
            idx_GK = self.gather(idx_TK, -1)
            local_GK = idx_GK - self.rank * num_local
            mine = (idx_GK >= 0) & (local_GK >= 0) & (local_GK < num_local)
            cell, expert = mine.flatten().nonzero().flatten(), local_GK[mine]
            order = expert.argsort(stable=True)  # cells are in the order of ranks and tokens
            self.cell, expert = cell[order], expert[order]
            total = torch.tensor([len(self.cell)])
            self.total_recv_tokens = total if capacity is None else total.to(idx_TK.device)
            self.num_rows = len(self.cell) if capacity is None else capacity
            self.cell, expert = self.cell[: self.num_rows], expert[: self.num_rows]
            self.tokens_per_expert = torch.stack([(expert == each).sum() for each in range(num_local)])
        if capacity is None and idx_TK.is_cuda:
            torch.cuda.current_stream().synchronize()

    def gather(self, table: torch.Tensor, fill: float) -> torch.Tensor:
        """Tables of all ranks, each with as many rows as a rank may send."""
        padded = table.new_full((self.most, table.shape[1]), fill)
        padded[: len(table)] = table
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat(parts)

    def send(self, table: torch.Tensor) -> torch.Tensor:
        """Rows of tokens for this rank's experts."""
        out = self.library.received(table, self.num_rows)
        out[: len(self.cell)] = self.gather(table, torch.nan)[self.cell // self.bound["top_k"]]
        return out

    def bring_back(self, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Sums of each token's rows."""
        used, token = rows[: len(self.cell)].float(), self.cell // self.bound["top_k"]
        table = used.new_zeros(self.size * self.most, rows.shape[1]).index_add(0, token, used)
        return self.exchange(table.to(rows.dtype)).float().sum(0)[:num_tokens].to(rows.dtype)

    def exchange(self, table: torch.Tensor) -> torch.Tensor:
        arrived = torch.empty_like(table)
        dist.all_to_all_single(arrived, table.contiguous(), group=self.group)
        return arrived.view(self.size, self.most, -1)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, x_TH, weights_TK):
        ctx.buffer, ctx.num_tokens = buffer, len(x_TH)
        with one_kernel(x_TH):
            weights = buffer.library.received(weights_TK.new_empty(0), buffer.num_rows)
            weights[: len(buffer.cell)] = buffer.gather(weights_TK, torch.nan).flatten()[buffer.cell]
            return buffer.send(x_TH), weights

    @staticmethod
    def backward(ctx, grad_RH, grad_R):
        buffer = ctx.buffer
        buffer.check()
        buffer.library.check_registered(grad_RH, grad_R)
        with one_kernel(grad_RH):
            table = grad_R.new_zeros(buffer.size * buffer.most * buffer.bound["top_k"])
            table[buffer.cell] = grad_R[: len(buffer.cell)]
            weights = buffer.exchange(table.view(-1, buffer.bound["top_k"])).sum(0)[: ctx.num_tokens]
            return None, buffer.bring_back(grad_RH, ctx.num_tokens), weights


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, y_RH, num_tokens):
        ctx.buffer = buffer
        buffer.library.check_registered(y_RH)
        with one_kernel(y_RH):
            return buffer.bring_back(y_RH, num_tokens)

    @staticmethod
    def backward(ctx, grad_TH):
        ctx.buffer.check()
        with one_kernel(grad_TH):
            return None, ctx.buffer.send(grad_TH.contiguous()), None


def install() -> Signatures:
    """Make the module importable in this process; return a record of its calls."""
    signatures = Signatures(RECORDED)
    library, module = Library(signatures), ModuleType("transformer_engine.pytorch.ep")

    def make_buffer(*args, **kwargs):
        return EpBuffer(library, signatures.bind("EpBuffer", args, kwargs))

    def ep_dispatch(*args, **kwargs):
        bound = signatures.bind("ep_dispatch", args, kwargs)
        buffer, tokens, weights = bound["buffer"], bound["tokens"], bound["topk_weights"]
        buffer.check()
        assert tokens.is_contiguous() and len(tokens) <= buffer.most and weights.dtype == torch.float32
        buffer.prepare(bound["topk_idx"])
        return *_Dispatch.apply(buffer, tokens, weights), buffer.tokens_per_expert

    def ep_combine(*args, **kwargs):
        bound = signatures.bind("ep_combine", args, kwargs)
        bound["buffer"].check()
        assert bound["expert_out"].is_contiguous() and len(bound["expert_out"]) == bound["buffer"].num_rows
        return _Combine.apply(bound["buffer"], bound["expert_out"], bound["num_local_tokens"])

    module.EpBuffer, module.ep_dispatch, module.ep_combine = make_buffer, ep_dispatch, ep_combine
    for name in ("ep_bootstrap", "ep_finalize", "symm_mem_alloc"):
        setattr(module, name, getattr(library, name))
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules["transformer_engine.pytorch.ep"] = module
    return signatures

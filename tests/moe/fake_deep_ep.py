"""A stand-in for the package deep_ep over gloo: the same calls, the same meaning, no GPU.

Every method's parameters are checked against the recorded signatures of the real package (`Signatures.bind`). Results are filled in only
when their event is waited for, and an event can be waited for once, so that a missing or early wait shows.

Meaning: a token goes once to every rank that holds one of its experts (number // experts per rank), tokens of a rank in their order,
ranks one after the other. Received numbers are counted from the receiver's first expert, -1 for experts of other ranks; in version 2 the
weight of a -1 is whatever was in memory (here NaN). combine adds what comes back from several ranks in rank order, and adds weights
column by column. Dispatched tokens may be a pair of tables: elements of one byte, and their scales of four.
"""

import inspect
from types import SimpleNamespace

import torch
import torch.distributed as dist


def _optional(names: str) -> list[list[str | None]]:
    return [[name, "None"] for name in names.split()]


_CLASS = "deep_ep.hybrid_ep_buffer.HybridEPBuffer"
# of the library's branch hybrid-ep: parameters and defaults by qualified name, as they are recorded for the others
HYBRID_EP = {
    _CLASS: [
        *([name, None] for name in ("group", "hidden_dim", "max_num_of_tokens_per_rank", "num_local_experts")),
        *_optional(
            "use_fp8 num_sms_dispatch_api num_sms_combine_api num_sms_preprocessing_api num_blocks_permute num_blocks_unpermute"
        ),
    ],
    f"{_CLASS}.dispatch_with_permute": [
        ["*", None],
        ["hidden", None],
        *_optional(
            "topk_idx topk_weights num_of_experts_per_rank num_of_experts use_fp8 routing_map probs scaling_factor num_permuted_tokens pad_multiple "
            "handle non_blocking fuse_permute_dispatch"
        ),
    ],
    f"{_CLASS}.update_template_config": _optional(
        "hidden_dim num_of_tokens_per_rank num_local_experts pad_multiple use_fp8 fuse_permute_dispatch"
    ),
    f"{_CLASS}.combine_with_unpermute": [
        ["*", None],
        ["hidden", None],
        *_optional("probs handle pad_multiple fuse_unpermute_combine"),
    ],
}


class Signatures:
    """Recorded parameters by qualified name, and a record of the calls made."""

    def __init__(self, recorded: dict):
        self.recorded = recorded
        self.calls: list[tuple[str, dict]] = []

    def bind(self, name: str, args: tuple, kwargs: dict) -> dict:
        """The call's arguments by name. Raises: TypeError when the real function does not take them."""
        parameters, kind = [], inspect.Parameter.POSITIONAL_OR_KEYWORD
        for parameter, default in self.recorded[name]:
            if parameter == "*":
                kind = inspect.Parameter.KEYWORD_ONLY
                continue
            if parameter.startswith("**"):
                parameters.append(inspect.Parameter(parameter[2:], inspect.Parameter.VAR_KEYWORD))
                continue
            value = inspect.Parameter.empty if default is None else default
            parameters.append(inspect.Parameter(parameter, kind, default=value))
        bound = inspect.Signature(parameters).bind(*args, **kwargs).arguments
        self.calls.append((name, dict(bound)))
        return bound


class Event:
    """The work of one call: it happens when it is waited for."""

    def __init__(self, work=None):
        self.work = work

    def current_stream_wait(self) -> None:
        assert self.work is not None, "waited for twice, or for nothing"
        work, self.work = self.work, None
        work()


def exchange(tensors: list[torch.Tensor], group) -> list[torch.Tensor]:
    """Send tensors[i] to rank i; what they sent, by rank. Rows may differ in number."""
    sizes = torch.tensor([t.shape[0] for t in tensors])
    arriving = torch.empty_like(sizes)
    dist.all_to_all_single(arriving, sizes, group=group)
    tail = tensors[0].shape[1:]
    out = tensors[0].new_empty(int(arriving.sum()), *tail)
    dist.all_to_all_single(out, torch.cat(tensors).contiguous(), arriving.tolist(), sizes.tolist(), group=group)
    return list(out.split(arriving.tolist()))


class Route:
    """The routing of tokens to ranks: the content of both libraries' handles."""

    def __init__(self, idx_TK: torch.Tensor, num_experts: int, group):
        self.group, self.num_tokens, self.idx_TK = group, idx_TK.shape[0], idx_TK
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.num_local = num_experts // self.size
        holder_TK = torch.where(idx_TK < 0, -1, idx_TK // self.num_local)
        self.to_rank = [(holder_TK == rank).any(1).nonzero().flatten() for rank in range(self.size)]
        arrived = exchange([idx_TK[tokens] for tokens in self.to_rank], group)
        self.from_rank = [len(part) for part in arrived]
        idx_NK = torch.cat(arrived) - self.rank * self.num_local
        self.idx_NK = torch.where((idx_NK < 0) | (idx_NK >= self.num_local), -1, idx_NK)
        self.counts = [int((self.idx_NK == expert).sum()) for expert in range(self.num_local)]

    def send(self, table: torch.Tensor) -> torch.Tensor:
        if table.element_size() == 1:  # gloo sends no float8
            return self._send(table.view(torch.uint8)).view(table.dtype)
        return self._send(table)

    def _send(self, table: torch.Tensor) -> torch.Tensor:
        return torch.cat(exchange([table[tokens] for tokens in self.to_rank], self.group))

    def send_tokens(self, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        if isinstance(x, torch.Tensor):
            assert x.element_size() > 1 and x.is_contiguous()
            return [self.send(x)]
        values, scales = x
        assert values.element_size() == 1 and scales.element_size() == 4 and len(values) == len(scales)
        assert values.is_contiguous() and scales.is_contiguous() and scales.shape[1] <= 128
        return [self.send(table) for table in x]

    def bring_back(self, table: torch.Tensor) -> torch.Tensor:
        total = table.new_zeros(self.num_tokens, *table.shape[1:])
        for tokens, part in zip(self.to_rank, exchange(list(table.split(self.from_rank)), self.group)):
            total[tokens] += part
        return total


def deferred(like: list[torch.Tensor]) -> tuple[list[torch.Tensor], Event]:
    """Return tensors that get the values of `like` when the event is waited for; before that they hold invalid values."""
    outs = [
        t.new_empty(t.shape).view(torch.uint8).fill_(255).view(t.dtype)
        if t.element_size() == 1
        else torch.full_like(t, torch.nan if t.is_floating_point() else -99)
        for t in like
    ]

    def fill():
        for out, value in zip(outs, like):
            out.copy_(value)

    return outs, Event(fill)


def one_or_pair(tables: list[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    return tables[0] if len(tables) == 1 else tuple(tables)


def make_v1(recorded: Signatures, prefix: str):
    """The class deep_ep.Buffer."""

    class Config:
        def __init__(self, per_rank):
            self.per_rank = per_rank

        def get_nvl_buffer_size_hint(self, row_bytes, num_ranks):
            return self.per_rank * row_bytes * num_ranks

        def get_rdma_buffer_size_hint(self, row_bytes, num_ranks):
            return 0

    class Buffer:
        num_sms = None

        def __init__(self, *args, **kwargs):
            bound = recorded.bind(prefix, args, kwargs)
            self.group, self.nvl_bytes = bound["group"], bound["num_nvl_bytes"]

        @staticmethod
        def set_num_sms(*args, **kwargs):
            Buffer.num_sms = recorded.bind(f"{prefix}.set_num_sms", args, kwargs)["new_num_sms"]

        @staticmethod
        def capture(*args, **kwargs):
            recorded.bind(f"{prefix}.capture", args, kwargs)
            return Event()

        @staticmethod
        def get_dispatch_config(*args, **kwargs):
            recorded.bind(f"{prefix}.get_dispatch_config", args, kwargs)
            return Config(3)

        @staticmethod
        def get_combine_config(*args, **kwargs):
            recorded.bind(f"{prefix}.get_combine_config", args, kwargs)
            return Config(2)

        def get_dispatch_layout(self, *args, **kwargs):
            bound = recorded.bind(f"{prefix}.get_dispatch_layout", args, kwargs)
            assert bound["topk_idx"].dtype == torch.int64
            return "per rank", "per rdma rank", "per expert", ("in rank", bound["num_experts"]), Event()

        def dispatch(self, *args, **kwargs):
            bound = recorded.bind(f"{prefix}.dispatch", args, kwargs)
            assert isinstance(bound["previous_event"], Event)
            assert bound["async_finish"] and bound["allocate_on_comm_stream"]
            if "handle" in bound:
                assert not {"topk_idx", "topk_weights", "num_tokens_per_rank"} & set(bound)
                x, event = deferred(bound["handle"].send_tokens(bound["x"]))
                return one_or_pair(x), None, None, bound["handle"].counts, bound["handle"], event
            layout = [bound[f"num_tokens_per_{what}"] for what in ("rank", "rdma_rank", "expert")]
            assert layout == ["per rank", "per rdma rank", "per expert"]
            weights = bound["topk_weights"]
            assert weights.dtype == torch.float32 and weights.is_contiguous()
            way = Route(bound["topk_idx"], bound["is_token_in_rank"][1], self.group)
            received = way.send(weights).masked_fill(way.idx_NK < 0, 0.0)
            (idx, received, *x), event = deferred([way.idx_NK, received, *way.send_tokens(bound["x"])])
            return one_or_pair(x), idx, received, way.counts, way, event

        def combine(self, *args, **kwargs):
            bound = recorded.bind(f"{prefix}.combine", args, kwargs)
            assert bound["x"].is_contiguous() and isinstance(bound["previous_event"], Event) and bound["async_finish"]
            way, weights = bound["handle"], bound.get("topk_weights")
            assert weights is None or weights.dtype == torch.float32
            (x, *combined), event = deferred([way.bring_back(t) for t in (bound["x"], weights) if t is not None])
            return x, combined[0] if combined else None, event

    return Buffer


def make_v2(recorded: Signatures, prefix: str):
    """The class deep_ep.ElasticBuffer."""

    class ElasticBuffer:
        def __init__(self, *args, **kwargs):
            bound = recorded.bind(prefix, args, kwargs)
            self.group, self.bound = bound["group"], bound

        @staticmethod
        def capture(*args, **kwargs):
            recorded.bind(f"{prefix}.capture", args, kwargs)
            return "event handle"

        def dispatch(self, *args, **kwargs):
            bound = recorded.bind(f"{prefix}.dispatch", args, kwargs)
            assert (
                bound["previous_event"] == "event handle"
                and bound["async_with_compute_stream"]
                and bound["allocate_on_comm_stream"]
            )
            if "handle" in bound:
                handle = bound["handle"]
                assert not {"topk_idx", "topk_weights"} & set(bound) and not bound.get("do_cpu_sync")
                assert bound["num_experts"] == handle.num_experts and bound["num_sms"] > 0
                x, event = deferred(handle.way.send_tokens(bound["x"]))
                return one_or_pair(x), handle.way.idx_NK, None, handle, event
            x = bound["x"] if isinstance(bound["x"], torch.Tensor) else bound["x"][0]
            assert x.shape[0] <= self.bound["num_max_tokens_per_rank"] and bound["topk_weights"].dtype == torch.float32
            assert bound["topk_idx"].shape[1] <= self.bound["num_topk"]
            way = Route(bound["topk_idx"], bound["num_experts"], self.group)
            handle = SimpleNamespace(
                way=way,
                num_experts=bound["num_experts"],
                num_sms=bound["num_sms"] or 6,
                num_recv_tokens_per_expert_list=way.counts,
            )
            weights = way.send(bound["topk_weights"]).masked_fill(way.idx_NK < 0, torch.nan)
            (idx, weights, *x), event = deferred([way.idx_NK, weights, *way.send_tokens(bound["x"])])
            return one_or_pair(x), idx, weights, handle, event

        def combine(self, *args, **kwargs):
            bound = recorded.bind(f"{prefix}.combine", args, kwargs)
            assert bound["previous_event"] == "event handle" and bound["async_with_compute_stream"]
            way, weights = bound["handle"].way, bound.get("topk_weights")
            (x, *combined), event = deferred([way.bring_back(t) for t in (bound["x"], weights) if t is not None])
            return x, combined[0] if combined else None, event

    return ElasticBuffer


def make_hybrid(recorded: Signatures, prefix: str):
    """The class deep_ep.HybridEPBuffer: dense routing, equally many tokens on all ranks, rows sorted by expert."""

    class HybridEPBuffer:
        def __init__(self, *args, **kwargs):
            self.bound = recorded.bind(prefix, args, kwargs)
            self.group = self.bound["group"]

        def dispatch_with_permute(self, *args, **kwargs):
            bound = recorded.bind(f"{prefix}.dispatch_with_permute", args, kwargs)
            hidden = bound["hidden"]
            if "handle" in bound:
                assert "routing_map" not in bound
                (way, use_fp8, _), probs = bound["handle"], bound.get("probs")
                assert bound.get("num_permuted_tokens") == way.num_rows, "the handle does not keep the number of rows"
                assert bound.get("non_blocking", False) == way.limited
                x, scales = self.tokens(way, use_fp8, bound)
                return x, None if probs is None else self.weights(way, probs), scales, None, bound["handle"]
            routing, probs = bound["routing_map"], bound["probs"]
            assert routing.dtype == torch.bool and probs.dtype == torch.float32
            sizes = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(self.group))]
            dist.all_gather(sizes, torch.tensor([len(hidden)]), group=self.group)
            assert len({int(size) for size in sizes}) == 1, "HybridEP hangs when ranks have different numbers of tokens"
            assert len(hidden) <= self.bound["max_num_of_tokens_per_rank"]
            numbers = torch.where(routing, torch.arange(routing.shape[1]), -1)
            way = Route(numbers, routing.shape[1], self.group)
            assert way.num_local == self.bound["num_local_experts"] == bound["num_of_experts_per_rank"]
            mine = slice(way.rank * way.num_local, (way.rank + 1) * way.num_local)
            way.local, way.mine, way.num_columns = (
                way.send(routing.to(torch.uint8))[:, mine].bool(),
                mine,
                routing.shape[1],
            )
            way.expert, way.token = way.local.t().nonzero().unbind(1)
            way.limited, unit = bound.get("non_blocking", False), bound.get("pad_multiple", 1)
            counts = way.expert.bincount(minlength=way.num_local)
            missing = -counts % unit
            way.place = torch.arange(len(way.token)) + (missing.cumsum(0) - missing)[way.expert]
            way.num_rows = bound["num_permuted_tokens"] if way.limited else int((counts + missing).sum())
            assert way.num_rows % unit == 0, "the library compares the limit with padded counts"
            flag = torch.tensor([int((way.place >= way.num_rows).any())], dtype=torch.int32)
            # beyond the limit rows are dropped, expert by expert; the counts are of those that are left
            fits = way.place < way.num_rows
            way.expert, way.token, way.place = way.expert[fits], way.token[fits], way.place[fits]
            counts = way.expert.bincount(minlength=way.num_local)
            counts += -counts % unit
            way.num_used = int(counts.sum())
            use_fp8 = self.update_template_config(use_fp8=bound.get("use_fp8"))
            x, scales = self.tokens(way, use_fp8, bound)
            return x, self.weights(way, probs), scales, counts, (way, use_fp8, flag)

        def update_template_config(self, *args, **kwargs):
            """The kernels' configuration: whether they send elements of one byte."""
            return bool(recorded.bind(f"{prefix}.update_template_config", args, kwargs)["use_fp8"])

        def tokens(self, way, use_fp8, bound):
            hidden, scales = bound["hidden"], bound.get("scaling_factor")
            assert hidden.is_contiguous() and (hidden.element_size() == 1) == use_fp8 == (scales is not None)
            if scales is not None:
                assert scales.dtype == torch.float32 and scales.shape == (len(hidden), hidden.shape[1] // 128)
                scales = self.rows(way, scales)
            return self.rows(way, hidden), scales

        @staticmethod
        def rows(way, hidden):
            """Rows for the experts; what is behind them is undefined."""
            rows = hidden.new_full((way.num_rows, hidden.shape[1]), 255 if hidden.element_size() == 1 else torch.nan)
            rows[: way.num_used] = 0
            rows[way.place] = way.send(hidden)[way.token]
            return rows

        @staticmethod
        def weights(way, probs):
            weights = probs.new_full((way.num_rows,), torch.nan)
            weights[: way.num_used] = 0.0
            weights[way.place] = way.send(probs)[way.token, way.mine.start + way.expert]
            return weights

        def combine_with_unpermute(self, *args, **kwargs):
            bound = recorded.bind(f"{prefix}.combine_with_unpermute", args, kwargs)
            (way, _, _), hidden, probs = bound["handle"], bound["hidden"], bound.get("probs")
            tokens = hidden.new_zeros(len(way.local), hidden.shape[1]).index_add(0, way.token, hidden[way.place])
            if probs is None:
                return way.bring_back(tokens), None
            table = torch.zeros(len(way.local), way.num_columns)
            table[way.token, way.mine.start + way.expert] = probs[way.place]
            return way.bring_back(tokens), way.bring_back(table)

    return HybridEPBuffer

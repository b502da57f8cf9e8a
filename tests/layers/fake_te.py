"""A stand-in for transformer_engine on the CPU: the same calls, the same meaning, computed by plain torch.

Every call is checked against the recorded signatures of the real package (`Signatures.bind`). Collectives go straight to
torch.distributed. Linears compute the same under every recipe; the active recipe is recorded
(`FakeTransformerEngine.gemms`).
"""

import importlib.machinery
import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
from moe.fake_deep_ep import Signatures
from torch import nn
from torch.nn import Parameter

from moe_trainer.layers import layer_factory
from moe_trainer.model import build

PYTORCH = "transformer_engine.pytorch"
RECIPE = "transformer_engine.common.recipe"
USERBUFFERS = f"{PYTORCH}.module.base.initialize_ub"
SHAPES = [["shape", None], ["tp_size", None], ["use_fp8", "False"], ["quantization_modes", "None"]]
# of TransformerEngine 2.17.1; the recorded signatures are of modules
USERBUFFER_SIGNATURE = [
    *SHAPES,
    *([name, "None"] for name in ("dtype", "ub_cfgs", "bootstrap_backend")),
    ["with_cublasmp", "False"],
]


def install(monkeypatch, modules: dict) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.delitem(
        sys.modules, "transformer_engine"
    )  # both: whatever a test imports under this name is gone after it
    for name, made in modules.items():
        monkeypatch.setitem(sys.modules, name, made)


def install_fake_te(shared, monkeypatch) -> "FakeTransformerEngine":
    """Install the stand-in, and build models on the CPU as on CUDA devices."""
    made = FakeTransformerEngine(Signatures(json.loads((shared / "reference" / "te_api.json").read_text())))
    install(monkeypatch, made.modules())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "a stream")
    select = layer_factory.select_layer_factory

    def on_cuda(args, ps, backends, *rest):
        return select(args, ps, replace(backends, cuda=True), *rest)

    monkeypatch.setattr(build, "select_layer_factory", on_cuda)
    return made


def without_packages(called: set[str]) -> set[str]:
    """Remove the package names from qualified names."""
    parts = ("forward", "backward_dw", "set_")
    return {
        ".".join(part for part in name.split(".") if part[0].isupper() or part.startswith(parts)) for name in called
    }


def make_module(name: str) -> ModuleType:
    """An empty package."""
    made = ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    made.__path__ = []
    return made


class _Exchange(torch.autograd.Function):
    """there and back: what happens forward and backward."""

    @staticmethod
    def forward(ctx, x, group, there, back):
        ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx, grad):
        group, back = ctx.back
        return back(grad.contiguous(), group), None, None, None


def _identity(x, group):
    return x.clone()


def _sum(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def _gather(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _sum_of_own_rows(x, group):
    return _sum(x, group).chunk(dist.get_world_size(group))[dist.get_rank(group)].contiguous()


@dataclass
class FakeTransformerEngine:
    """The modules, with a record of the calls. available: formats that the fake device supports."""

    recorded: Signatures
    available: set[str] = field(default_factory=lambda: {"fp8", "fp8_block_scaling", "mxfp8", "nvfp4"})
    recipes: list = field(default_factory=list)
    gemms: list[tuple[tuple[int, int], object]] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    align: int = 16

    def called(self) -> set[str]:
        return {name.removeprefix(f"{PYTORCH}.").removeprefix("module.") for name, _ in self.recorded.calls}

    def modules(self) -> dict[str, ModuleType]:
        """By name, for sys.modules."""
        pytorch, recipe = make_module(PYTORCH), make_module(RECIPE)
        pytorch.Linear, pytorch.DotProductAttention = _linear(self), _attention(self)
        pytorch.RMSNorm, pytorch.LayerNorm = _norm(self, "rmsnorm.RMSNorm"), _norm(self, "layernorm.LayerNorm")
        pytorch.GroupedLinear = _grouped(self)
        pytorch.autocast = _autocast(self)
        quantization = make_module(f"{PYTORCH}.quantization")
        quantization.get_align_size_for_quantization = _align(self)
        for kind in ("fp8", "fp8_block_scaling", "mxfp8", "nvfp4"):
            setattr(pytorch, f"is_{kind}_available", _available(self, kind))
        recipe.Format = type("Format", (), {"HYBRID": "HYBRID", "E4M3": "E4M3"})
        kinds = ("Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", "CustomRecipe")
        for name in kinds:
            setattr(recipe, name, _recipe(self, name))
        module, base = make_module(f"{PYTORCH}.module"), make_module(f"{PYTORCH}.module.base")
        self.recorded.recorded[USERBUFFERS] = USERBUFFER_SIGNATURE
        base.UserBufferQuantizationMode = type("UserBufferQuantizationMode", (), {"NONE": "none", "FP8": "fp8"})
        base.initialize_ub = lambda *args, **kwargs: self.recorded.bind(USERBUFFERS, args, kwargs)
        pytorch.module, module.base = module, base
        package, common = make_module("transformer_engine"), make_module("transformer_engine.common")
        package.pytorch, package.common, common.recipe = pytorch, common, recipe
        pytorch.quantization = quantization
        return {made.__name__: made for made in (package, pytorch, common, recipe, quantization, module, base)}


def _available(double: FakeTransformerEngine, kind: str):
    def is_available(*args, **kwargs):
        bound = double.recorded.bind(f"{PYTORCH}.quantization.is_{kind}_available", args, kwargs)
        assert bound["return_reason"] is True
        return (True, "") if kind in double.available else (False, f"this device has no {kind}")

    return is_available


def _recipe(double: FakeTransformerEngine, name: str):
    def make(*args, **kwargs):
        bound = double.recorded.bind(f"{RECIPE}.{name}", args, kwargs)
        return name, dict(bound)

    return make


def _autocast(double: FakeTransformerEngine):
    @contextmanager
    def autocast(*args, **kwargs):
        bound = double.recorded.bind(f"{PYTORCH}.quantization.autocast", args, kwargs)
        assert bound["enabled"]
        double.recipes.append(bound["recipe"])
        try:
            yield
        finally:
            double.recipes.pop()

    return autocast


def _linear(double: FakeTransformerEngine):
    class Linear(nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()
            bound = double.recorded.bind(f"{PYTORCH}.module.linear.Linear", args, kwargs)
            assert not bound.get("fuse_wgrad_accumulation") and not bound.get("delay_wgrad_compute")
            self.group, self.mode = bound["tp_group"], bound["parallel_mode"]
            size = bound["tp_size"] if self.group is None else dist.get_world_size(self.group)
            assert size == bound["tp_size"] and self.mode in ("column", "row", None)
            self.tp_size, self.sequence_parallel = size, size > 1 and bound["sequence_parallel"]
            shape = [bound["out_features"], bound["in_features"]]
            if self.mode is not None:
                cut = ("column", "row").index(self.mode)
                assert shape[cut] % size == 0
                shape[cut] //= size
            options = {"device": bound["device"], "dtype": bound["params_dtype"]}
            self.weight = Parameter(torch.empty(shape, **options))
            self.use_bias = bound["bias"]
            if self.use_bias:
                self.bias = Parameter(torch.empty(shape[0], **options))
            self.shape = tuple(shape)

        def forward(self, *args, **kwargs):
            x = double.recorded.bind(f"{PYTORCH}.module.linear.Linear.forward", args, kwargs)["inp"]
            assert all(param.dtype == x.dtype and not param.is_meta for param in self.parameters())
            assert tuple(self.weight.shape) == self.shape
            double.gemms.append((self.shape, double.recipes[-1] if double.recipes else None))
            cut = self.tp_size > 1
            if cut and self.mode == "column":
                x = _Exchange.apply(
                    x, self.group, *((_gather, _sum_of_own_rows) if self.sequence_parallel else (_identity, _sum))
                )
            y = F.linear(x, self.weight)
            if cut and self.mode == "row":
                y = _Exchange.apply(
                    y, self.group, *((_sum_of_own_rows, _gather) if self.sequence_parallel else (_sum, _identity))
                )
            return y + self.bias if self.use_bias else y

    return Linear


def _align(double: FakeTransformerEngine):
    def get_align_size_for_quantization(*args, **kwargs):
        assert double.recorded.bind(f"{PYTORCH}.quantization.get_align_size_for_quantization", args, kwargs)["recipe"][
            0
        ]
        return double.align

    return get_align_size_for_quantization


class _Grouped(torch.autograd.Function):
    """Matmuls of every expert; weight gradients are added to the weights' main_grad, at once or by the module's store."""

    @staticmethod
    def forward(ctx, x, splits, store, *weights):
        ctx.save_for_backward(x, *weights)
        ctx.plan = splits, store, weights
        return torch.cat([rows @ weight.t() for rows, weight in zip(x.split(splits), weights)])

    @staticmethod
    def backward(ctx, grad):
        (x, *weights), (splits, store, objects) = ctx.saved_tensors, ctx.plan
        pairs = list(zip(grad.split(splits), x.split(splits)))
        sums = [weight.main_grad for weight in objects]

        def compute():
            for total, (g, rows) in zip(sums, pairs, strict=True):
                total += g.t() @ rows

        if store is None:
            compute()
        else:
            store.append(compute)
        grad_x = torch.cat([g @ weight for (g, _), weight in zip(pairs, weights)])
        return grad_x, None, None, *[None] * len(weights)


def _grouped(double: FakeTransformerEngine):
    prefix = f"{PYTORCH}.module.grouped_linear.GroupedLinear"

    class GroupedLinear(nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()
            bound = double.recorded.bind(prefix, args, kwargs)
            assert not bound["bias"] and bound["fuse_wgrad_accumulation"] and not bound.get("tp_size")
            self.num_gemms, self.shape = bound["num_gemms"], (bound["out_features"], bound["in_features"])
            for index in range(self.num_gemms):
                setattr(
                    self,
                    f"weight{index}",
                    Parameter(torch.empty(self.shape, device=bound["device"], dtype=bound["params_dtype"])),
                )
            self.store = [] if bound["delay_wgrad_compute"] else None
            self.save_original_input = bound["save_original_input"]

        def forward(self, *args, **kwargs):
            bound = double.recorded.bind(f"{prefix}.forward", args, kwargs)
            x, splits = bound["inp"], bound["m_splits"]
            weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
            assert (
                type(splits) is list and all(type(count) is int for count in splits) and len(splits) == self.num_gemms
            )
            assert sum(splits) == len(x) > 0 and x.is_contiguous()
            assert all(
                weight.dtype == x.dtype and weight.shape == self.shape and not weight.is_meta for weight in weights
            )
            recipe = double.recipes[-1] if double.recipes else None
            assert recipe is None or all(count % double.align == 0 for count in splits)
            double.gemms.append((self.shape, recipe))
            double.rows.append(splits)
            return _Grouped.apply(x, splits, self.store, *weights)

        def backward_dw(self, *args, **kwargs):
            double.recorded.bind(f"{prefix}.backward_dw", args, kwargs)
            self.store.pop(0)()

    return GroupedLinear


def _norm(double: FakeTransformerEngine, name: str):
    class Norm(nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()
            bound = double.recorded.bind(f"{PYTORCH}.module.{name}", args, kwargs)
            assert set(bound["kwargs"]) <= {"device", "dtype", "sm_margin"}
            self.eps, self.zero_centered = bound["eps"], bound["zero_centered_gamma"]
            self.weight = Parameter(torch.empty(bound["normalized_shape"], **bound["kwargs"]))
            if name.endswith("LayerNorm"):
                self.bias = Parameter(torch.empty(bound["normalized_shape"], **bound["kwargs"]))

        def forward(self, x):
            wide = x.to(self.weight.dtype).float()
            gain = self.weight.float() + (1.0 if self.zero_centered else 0.0)
            if name.endswith("LayerNorm"):
                return F.layer_norm(wide, gain.shape, gain, self.bias.float(), self.eps).to(self.weight.dtype)
            return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * gain).to(self.weight.dtype)

    return Norm


def _attention(double: FakeTransformerEngine):
    prefix = f"{PYTORCH}.attention.dot_product_attention.dot_product_attention.DotProductAttention"

    class DotProductAttention(nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()
            self.bound = bound = double.recorded.bind(prefix, args, kwargs)
            assert (
                bound["qkv_format"] == "sbhd" and bound["attn_mask_type"] == "causal" and bound["window_size"][1] == 0
            )
            self.widths = (
                bound["kv_channels"] if isinstance(bound["kv_channels"], tuple) else (bound["kv_channels"],) * 2
            )
            self.exchange = None

        def set_context_parallel_group(self, *args, **kwargs):
            self.exchange = double.recorded.bind(f"{prefix}.set_context_parallel_group", args, kwargs)
            assert self.exchange["cp_comm_type"] in ("p2p", "a2a", "all_gather", "a2a+p2p")

        def forward(self, *args, **kwargs):
            bound = double.recorded.bind(f"{prefix}.forward", args, kwargs)
            q, k, v = bound["query_layer"], bound["key_layer"], bound["value_layer"]
            heads, groups = self.bound["num_attention_heads"], self.bound["num_gqa_groups"]
            sequence_S = torch.zeros(q.shape[0])
            if packed := bound.get("qkv_format") == "thd":
                sequence_S, q, k, v = _packed(bound, q, k, v)
            assert q.shape[2:] == (heads, self.widths[0]) and k.shape[2:] == (groups, self.widths[0])
            assert v.shape[2:] == (groups, self.widths[1])
            rows = torch.arange(q.shape[0])
            if self.exchange is not None:
                k, v, rows = _full(k, v, self.exchange["cp_group"])
            k, v = (x.repeat_interleave(heads // groups, 2) for x in (k, v))
            scores = torch.einsum("sbnd,tbnd->bnst", q, k).float() * self.bound["softmax_scale"]
            columns, left = torch.arange(k.shape[0]), self.bound["window_size"][0]
            visible = columns <= rows[:, None]
            if left >= 0:
                visible &= columns >= rows[:, None] - left
            visible &= sequence_S[:, None] == sequence_S if packed else True
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            weights = F.dropout(weights, self.bound["attention_dropout"], self.training).to(v.dtype)
            out = torch.einsum("bnst,tbne->sbne", weights, v).flatten(2)
            return out[:, 0] if packed else out

    return DotProductAttention


def _packed(bound, *tensors):
    """Sequence of every token, and [T, N, D] as [T, 1, N, D]. The library has no kernel for this in fp32."""
    borders = bound["cu_seqlens_q"]
    assert borders.dtype == torch.int32 and torch.equal(borders, bound["cu_seqlens_kv"])
    assert bound["attn_mask_type"] == "padding_causal" and bound["pad_between_seqs"] is False
    assert borders[-1] == len(tensors[0]) and all(x.dim() == 3 and x.dtype == torch.bfloat16 for x in tensors)
    assert borders.diff().max() <= bound["max_seqlen_q"] == bound["max_seqlen_kv"]
    sequence_S = torch.arange(len(borders) - 1).repeat_interleave(borders.diff())
    return sequence_S, *(x.unsqueeze(1) for x in tensors)


def _full(k, v, group):
    """Keys and values of the full sequence, and the numbers of this rank's positions: two chunks, one from each end."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    order = [chunk for each in range(size) for chunk in (each, 2 * size - 1 - each)]
    back = [order.index(chunk) for chunk in range(2 * size)]
    full = []
    for x in (k, v):
        chunks = _Exchange.apply(x, group, _gather, _sum_of_own_rows).chunk(2 * size)
        full.append(torch.cat([chunks[place] for place in back]))
    length = full[0].shape[0] // (2 * size)
    mine = [torch.arange(chunk * length, (chunk + 1) * length) for chunk in order[2 * rank : 2 * rank + 2]]
    return *full, torch.cat(mine)

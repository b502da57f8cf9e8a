"""Layers made of TransformerEngine's (--transformer-impl transformer_engine).

Each is one of the local layers that hands its forward to a module of the library. The parameters are the local layer's own: their names,
their ParamInfo, their first values. The library's module is built on the meta device and then holds the same parameters, so whoever
replaces or fills them (model/build.py, grad buffers, checkpoints) need not know. Weight gradients come out of autograd and reach the
grad buffers by their hooks; the library's own accumulation into a `main_grad` stays off.

Norm and linear are two modules, not the library's LayerNormLinear: parts that are recomputed or offloaded are told apart by them, and
checkpoints name them apart.

What it does not do is done by the local layers:

| what | why |
|---|---|
| experts in bf16 before compute capability 10 | torch's grouped product takes the stack of weights as it is, with group sizes on the device; ours keeps less for backward, and no gradients of views need be put together |
| some experts in other formats | see `experts_problem`; without --moe-grouped-gemm they run one by one |
| linears of a chunk whose weight gradients may wait | the library puts all of them off or none, and writes `.grad` itself; the schedules decide pass by pass, and hooks must see each gradient once |
| linears with delayed scaling, or without fp8 gradients of weights | see te.recipe_problem |
| attention over packed documents or with an explicit mask | thd tensors would be copies of ours; ours reads document numbers |
| some kinds of attention under context parallelism | see `attention_problem` |

The library is handed over as a module, so nothing here imports it. Its calls are held against recorded signatures in
tests/layers/test_te.py. Shapes as in the local layers.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from moe_trainer.layers.context_parallel import comm_type_of, make_core_attention
from moe_trainer.layers.core_attention import CoreAttention, Visible
from moe_trainer.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from moe_trainer.layers.norm import Norm
from moe_trainer.layers.te_experts import CastOnce, FusedGroupedLinear
from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.shape import library_products

NAMES = ("Linear", "RMSNorm", "LayerNorm", "DotProductAttention")
"""What the layers take from transformer_engine.pytorch."""

BF16_EXPERTS_FROM = (10, 0)
"""Compute capability from which its products of experts in bf16 come before torch's, which was written for 9.0."""

Context = Callable[[], contextlib.AbstractContextManager]


def _share(fused: nn.Module, layer: nn.Module) -> nn.Module:
    """Give a module of the library the parameters of a local layer."""
    fused.weight = layer.weight
    if layer.bias is not None:
        fused.bias = layer.bias
    return fused


class _FusedLinear:
    """A local linear whose forward is the library's. mode: what the library calls its kind. context: in which it computes its products."""

    mode: str | None = None

    def __init__(self, in_features: int, out_features: int, *, library: ModuleType, context: Context, **options):
        super().__init__(in_features, out_features, **options)
        self.context, self.casts = context, CastOnce()
        group = Group.single(self.group.name) if self.mode is None else self.group
        self.fused = _share(library.Linear(
            in_features, out_features, sequence_parallel=group.size > 1 and self.sequence_parallel, tp_group=group.handle,
            tp_size=group.size, bias=self.bias is not None, params_dtype=torch.float32, parallel_mode=self.mode, device="meta"), self)

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            return self.fused(x, is_first_microbatch=self.casts.is_first())


class FusedColumnLinear(_FusedLinear, ColumnParallelLinear):
    """As ColumnParallelLinear."""

    mode = "column"

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return self.gathered(y) if self.gather_output else y


class FusedRowLinear(_FusedLinear, RowParallelLinear):
    """As RowParallelLinear."""

    mode = "row"


class FusedReplicatedLinear(_FusedLinear, ReplicatedLinear):
    """As ReplicatedLinear."""


class FusedNorm(Norm):
    """As Norm."""

    def __init__(self, size: int, model: ModelArgs, *, library: ModuleType, **options):
        super().__init__(size, model, **options)
        make = library.RMSNorm if self.bias is None else library.LayerNorm
        self.fused = _share(make(size, eps=self.eps, zero_centered_gamma=self.zero_centered, device="meta"), self)

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x)


class FusedAttention(nn.Module):
    """As the local core attention, which it hands packed documents and explicit masks to.

    local: of the same layer. fused: the library's.
    """

    def __init__(self, local: CoreAttention, fused: nn.Module):
        super().__init__()
        self.local, self.fused = local, fused

    @property
    def saves_inputs(self) -> bool:
        """Of the local one, as `value_width`; the library always saves what it was given."""
        return self.local.saves_inputs

    @saves_inputs.setter
    def saves_inputs(self, value: bool) -> None:
        self.local.saves_inputs = value

    @property
    def value_width(self) -> int | None:
        return self.local.value_width

    @value_width.setter
    def value_width(self, value: int | None) -> None:
        self.local.value_width = value

    def pads_values(self, length: int, visible: Visible | None, device: torch.device) -> bool:
        """As the local one's; the library takes values as wide as they are."""
        return visible is not None and self.local.pads_values(length, visible, device)

    def forward(self, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, visible: Visible | None = None,
                sink_N: Tensor | None = None) -> Tensor:
        """As CoreAttention.forward; there are no sinks (`attention_problem`)."""
        return self.fused(q_SBND, k_SBGD, v_SBGE) if visible is None else self.local(q_SBND, k_SBGD, v_SBGE, visible)


def attention_problem(model: ModelArgs, params_dtype: str, ps: ParallelState) -> str | None:
    """What keeps the library's attention from being used, None if nothing does.

    Under context parallelism only what all of its kinds of exchange know is asked of it.
    """
    if model.softmax_type != "vanilla":
        return f"attention sinks (--softmax-type {model.softmax_type}) are not asked of it"
    if model.experimental_attention_variant == "dsa":
        return "it has no attention to chosen keys"
    if ps.cp.size == 1:
        return None
    what = {
        "attention in fp32": params_dtype not in ("bf16", "fp16"),
        "a window (--window-size)": model.window_size is not None,
        "keys and values of different widths (--multi-latent-attention)": model.multi_latent_attention,
        "dropout (--attention-dropout)": model.attention_dropout > 0.0,
    }
    found = [name for name, is_so in what.items() if is_so]
    return f"{found[0]} under context parallelism is not asked of it" if found else None


def experts_problem(library: ModuleType, model: ModelArgs, moe: MoEArgs, ps: ParallelState, alignment: int) -> str | None:
    """What keeps the library's grouped linear from computing the experts, None if nothing does. alignment: of widths; 1: any."""
    if not hasattr(library, "GroupedLinear"):
        return f"the installed transformer_engine has no {library.__name__}.GroupedLinear"
    if problem := library_products.experts_problem(moe, ps.ep.size):
        return problem
    ffn = moe.moe_ffn_hidden_size or model.ffn_hidden_size
    reads, makes = moe.expert_widths(model.hidden_size)
    if reads % alignment or makes % alignment or ffn % (ps.etp.size * alignment):
        return f"its units take widths in multiples of {alignment}, and these are {reads}, {makes} and {ffn} over {ps.etp.size} ranks"
    return None


@dataclass(frozen=True)
class FusedLayers:
    """Constructors of a kit, with the signatures of the local classes (layers/kit.py).

    library: transformer_engine.pytorch. context: in which quantised products are computed; None: the local linears do that.
    fused_attention: False: the local one. stream: on which context parallelism talks. quantized_experts, plain_experts: does the library
    compute the experts of layers that are quantised, and of those that are not? row_multiple: of quantised experts.
    """

    library: ModuleType
    ps: ParallelState
    comm_types: Sequence[str]
    context: Context | None = None
    fused_attention: bool = True
    stream: torch.Stream | None = None
    quantized_experts: bool = False
    plain_experts: bool = False
    row_multiple: int = 1

    def column_linear(self, *sizes: int, **options) -> nn.Module:
        return self._linear(ColumnParallelLinear, FusedColumnLinear, *sizes, **options)

    def row_linear(self, *sizes: int, **options) -> nn.Module:
        return self._linear(RowParallelLinear, FusedRowLinear, *sizes, **options)

    def replicated_linear(self, *sizes: int, **options) -> nn.Module:
        return self._linear(ReplicatedLinear, FusedReplicatedLinear, *sizes, **options)

    def norm(self, size: int, model: ModelArgs, **options) -> nn.Module:
        return FusedNorm(size, model, library=self.library, **options)

    def core_attention(self, model: ModelArgs, layer_number: int, *, head_dim: int, scale: float | None = None) -> nn.Module:
        local = make_core_attention(model, layer_number, head_dim=head_dim, scale=scale, ps=self.ps, comm_types=self.comm_types)
        if not self.fused_attention:
            return local
        heads = model.num_attention_heads // self.ps.tp.size
        groups, widths = max(1, model.query_groups // self.ps.tp.size), head_dim
        if model.multi_latent_attention:
            groups, widths = heads, (head_dim, model.v_head_dim)
        # tp_size stays 1: the numbers of heads are this rank's, also where ranks share a key-value group
        fused = self.library.DotProductAttention(
            heads, widths, num_gqa_groups=groups, attention_dropout=local.dropout_p, qkv_format="sbhd", attn_mask_type="causal",
            window_size=(-1 if local.window is None else local.window, 0), layer_number=layer_number, softmax_scale=local.scale)
        if self.ps.cp.size > 1:
            fused.set_context_parallel_group(*self._exchange(layer_number))
        return FusedAttention(local, fused)

    def _exchange(self, layer_number: int) -> tuple:
        """Group or groups, ranks, stream and kind of exchange, as the library wants them. A level of one rank is none."""
        kind, ps = comm_type_of(layer_number, self.comm_types), self.ps
        if kind == "a2a+p2p" and ps.cp_a2a.size > 1 and ps.cp_p2p.size > 1:
            return [ps.cp_a2a.handle, ps.cp_p2p.handle], list(ps.cp.ranks), self.stream, kind
        if kind == "a2a+p2p":
            kind = "a2a" if ps.cp_a2a.size > 1 else "p2p"
        return ps.cp.handle, list(ps.cp.ranks), self.stream, "all_gather" if kind == "allgather" else kind

    def _linear(self, local: type[nn.Module], fused: type[nn.Module], *sizes: int, queue=None, quantize=None, **options) -> nn.Module:
        if queue is not None or (quantize is not None and self.context is None):
            return local(*sizes, queue=queue, quantize=quantize, **options)
        context = contextlib.nullcontext if quantize is None else self.context
        return fused(*sizes, library=self.library, context=context, **options)

    def grouped_linear(self, num_experts: int, in_features: int, out_features: int, *, queue=None, quantize=None,
                       keeps_input: bool = False) -> nn.Module | None:
        """One linear of all experts; None where the local experts compute."""
        if not (self.plain_experts if quantize is None else self.quantized_experts):
            return None
        context, multiple = (contextlib.nullcontext, 1) if quantize is None else (self.context, self.row_multiple)
        return FusedGroupedLinear(num_experts, in_features, out_features, library=self.library, context=context, queue=queue,
                                  row_multiple=multiple, keeps_input=keeps_input)

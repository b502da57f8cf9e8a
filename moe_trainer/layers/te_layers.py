"""Layers built on TransformerEngine's modules (--transformer-impl transformer_engine).

Each is a local layer whose forward calls a module of the library. The parameters are the local layer's (names,
ParamInfo, initial values); the library's module is built on the meta device and shares them. Where a weight's gradient
is added to a wider main gradient (--gradient-accumulation-fusion), the library's GEMM writes it in that dtype
(`fuse_wgrad_accumulation`), as in te_experts.py; elsewhere it comes out of autograd. Norm and linear stay two modules,
not LayerNormLinear: recomputation, offloading and checkpoint names need both. What stays with the local layers, and
why: docs/design/transformer_engine.md.

The library is passed in as a module. tests/layers/test_te.py compares its calls with recorded signatures.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from arguments import te_support
from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from arguments.precision import PrecisionArgs
from moe_trainer.layers import te, te_ops
from moe_trainer.layers.context_parallel import get_cp_comm_type, make_core_attention
from moe_trainer.layers.core_attention import AttentionMask, CoreAttention
from moe_trainer.layers.kv_cache import KVCache
from moe_trainer.layers.linear import ColumnParallelLinear, ParallelLinear, ReplicatedLinear, RowParallelLinear
from moe_trainer.layers.norm import Norm
from moe_trainer.layers.te_experts import (
    FusedGroupedLinear,
    LibraryGemms,
    LibraryWeight,
    give_main_grad,
    showing,
    unstacked,
)
from moe_trainer.layers.te_ops import FusedExpertMLP
from moe_trainer.layers.tp_overlap import GEMM_NAMES, TpOverlap
from moe_trainer.ops.main_grad import add_to_main_grad, is_sum_wider
from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.quantization.iteration import WeightCastCache
from moe_trainer.quantization.recipe import QuantizationRecipe

NAMES = ("Linear", "RMSNorm", "LayerNorm", "DotProductAttention")
"""What the layers take from transformer_engine.pytorch."""

BF16_EXPERTS_FROM = (10, 0)
"""Compute capability from which its GEMMs of experts in bf16 come before torch's, which was written for 9.0."""

L = TypeVar("L", bound=ParallelLinear)
Context = Callable[[], contextlib.AbstractContextManager]


def _share(fused: Any, layer: ParallelLinear | Norm) -> Any:
    """Give a module of the library the parameters of a local layer."""
    fused.weight = layer.weight
    if layer.bias is not None:
        fused.bias = layer.bias
    return fused


def userbuffer_options(name: str, overlap: TpOverlap | None) -> dict[str, str | bool]:
    """Return the arguments of the library's Linear that overlap its communication through user buffers.

    The library has buffers for the GEMMs of four linears only.
    """
    gemm = GEMM_NAMES.get(name.rpartition(".")[2])
    if overlap is None or gemm is None:
        return {}
    return {
        "ub_name": gemm,
        "ub_overlap_ag": overlap.gathers,
        "ub_overlap_rs": overlap.scatters,
        "ub_overlap_rs_dgrad": overlap.scatters_input_grads,
        "ub_bulk_dgrad": overlap.bulk_dgrad,
        "ub_bulk_wgrad": overlap.bulk_wgrad,
    }


class _FusedLinear(ParallelLinear):
    """A local linear whose forward is the library's.

    Attributes:
        mode: the library's parallel_mode.
        context: in which its GEMMs run.
    """

    mode: str | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        library: ModuleType,
        context: Context,
        save_original_input: bool = False,
        **options,
    ):
        super().__init__(in_features, out_features, **options)
        self.stored = LibraryWeight()
        self.context, self.casts = context, WeightCastCache()
        overlap = userbuffer_options(options["name"], options.get("overlap")) if self.sequence_parallel else {}
        group = Group.single(self.group.name) if self.mode is None else self.group
        self.fused = _share(
            library.Linear(
                in_features,
                out_features,
                sequence_parallel=group.size > 1 and self.sequence_parallel,
                tp_group=group.handle,
                tp_size=group.size,
                bias=self.bias is not None,
                params_dtype=torch.float32,
                parallel_mode=self.mode,
                device="meta",
                **(overlap if self.mode is not None else {}),
                save_original_input=save_original_input,
            ),
            self,
        )

    def forward(self, x: Tensor) -> Tensor:
        is_first = self.casts.is_first()
        tensors = self.stored.tensors(self.weight, is_first, self.training)
        adds = self.weight.requires_grad and torch.is_grad_enabled() and is_sum_wider(self.weight)
        self.fused.fuse_wgrad_accumulation = adds
        if tensors is None and not adds:
            with self.context():
                return self.fused(x, is_first_microbatch=is_first)
        return self._forward_shown(x, is_first, tensors, adds)

    def _forward_shown(self, x: Tensor, is_first: bool | None, tensors: list[Tensor] | None, adds: bool) -> Tensor:
        """Run the library with another tensor in place of the parameter: one it made, or one whose gradient we add.

        Args:
            tensors: see `unstacked`.
            adds: add the gradient to the main gradient.
        """
        parameter, sums = self.weight, list[Tensor]()
        (weight,) = unstacked(
            parameter.unsqueeze(0), (lambda: add_to_main_grad(parameter, sums.pop())) if adds else None, tensors
        )
        shared = self.fused._parameters.pop("weight", None)
        with self.context(), showing(self.fused, {"weight": weight}):
            y = self.fused(x, is_first_microbatch=is_first)
        if shared is not None:
            self.fused.weight = shared
        if adds and y.requires_grad:  # when its backward begins
            y.register_hook(lambda _: sums.append(give_main_grad(weight, parameter)))
        return y


class FusedColumnLinear(_FusedLinear, ColumnParallelLinear):
    """ColumnParallelLinear on the library's Linear."""

    mode = "column"

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return self.gathered(y) if self.gather_output else y


class FusedRowLinear(_FusedLinear, RowParallelLinear):
    """RowParallelLinear on the library's Linear."""

    mode = "row"


class FusedReplicatedLinear(_FusedLinear, ReplicatedLinear):
    """ReplicatedLinear on the library's Linear."""


class FusedNorm(Norm):
    """Norm on the library's RMSNorm or LayerNorm."""

    def __init__(self, size: int, model: ModelArgs, *, library: ModuleType, **options):
        super().__init__(size, model, **options)
        make = library.RMSNorm if self.bias is None else library.LayerNorm
        self.fused = _share(make(size, eps=self.eps, zero_centered_gamma=self.zero_centered, device="meta"), self)

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x)


class FusedAttention(nn.Module):
    """The library's attention, with the local one for packed documents and explicit masks.

    Packed sequences in half precision go to the library's kernels for variable lengths (qkv_format thd), on one
    context-parallel rank and unless --attention-backend names a kernel.
    """

    def __init__(self, local: CoreAttention, fused: nn.Module, takes_packed: bool = False):
        super().__init__()
        self.local, self.fused = local, fused
        self.takes_packed = takes_packed and local.backend is None

    @property
    def should_save_inputs(self) -> bool:
        """Setting of the local attention, like `value_width`; the library always saves its inputs."""
        return self.local.should_save_inputs

    @should_save_inputs.setter
    def should_save_inputs(self, value: bool) -> None:
        self.local.should_save_inputs = value

    @property
    def value_width(self) -> int | None:
        return self.local.value_width

    @value_width.setter
    def value_width(self, value: int | None) -> None:
        self.local.value_width = value

    def should_pad_values(self, length: int, visible: AttentionMask | None, device: torch.device) -> bool:
        """Return the local attention's answer if it computes; the library takes values of any width."""
        return visible is not None and self.local.should_pad_values(length, visible, device)

    def decode_options(
        self, q_SBND: Tensor, cache: KVCache, learned_N: Tensor | None
    ) -> tuple[float, Tensor, Tensor | None]:
        """Return the local attention's options."""
        return self.local.decode_options(q_SBND, cache, learned_N)

    def forward(
        self,
        q_SBND: Tensor,
        k_SBGD: Tensor,
        v_SBGE: Tensor,
        visible: AttentionMask | None = None,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """Attend like CoreAttention.forward; there are no sinks (te_support.attention_problem)."""
        if visible is None:
            return self.fused(q_SBND, k_SBGD, v_SBGE)
        borders, is_half = visible.borders, q_SBND.dtype in (torch.bfloat16, torch.float16)
        if borders is None or not self.takes_packed or visible.cp_size not in (None, 1) or not is_half:
            return self.local(q_SBND, k_SBGD, v_SBGE, visible)
        out_TN = self.fused(
            q_SBND[:, 0],
            k_SBGD[:, 0],
            v_SBGE[:, 0],
            qkv_format="thd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=borders.cu_seqlens,
            cu_seqlens_kv=borders.cu_seqlens,
            max_seqlen_q=borders.packed.max_seqlen,
            max_seqlen_kv=borders.packed.max_seqlen,
            pad_between_seqs=False,  # padding belongs to its sequence; the library would compare on the host
        )
        return out_TN.flatten(1).unsqueeze(1)


def grouped_linear_problem(
    library: ModuleType, model: ModelArgs, moe: MoEArgs, ps: ParallelState, alignment: int
) -> str | None:
    """Return why the library's grouped linear cannot compute the experts; None if it can.

    Args:
        alignment: required multiple of widths; 1 for any.
    """
    if not hasattr(library, "GroupedLinear"):
        return f"the installed transformer_engine has no {library.__name__}.GroupedLinear"
    if problem := te_support.placement_problem(moe, ps.ep.size):
        return problem
    ffn = moe.moe_ffn_hidden_size or model.ffn_hidden_size
    reads, makes = moe.expert_widths(model.hidden_size)
    if reads % alignment or makes % alignment or ffn % (ps.etp.size * alignment):
        return (
            f"its kernels need widths in multiples of {alignment}, and these are {reads}, {makes} and {ffn} over "
            f"{ps.etp.size} ranks"
        )
    return None


def expert_ops_problem(model: ModelArgs, moe: MoEArgs, tensors_of_experts: frozenset[str]) -> str | None:
    """Return why the experts cannot be a pipeline of the library's operations; None if they can.

    Args:
        tensors_of_experts: names of --recompute-modules and --offload-modules for what only the pipeline sees.
    """
    if missing := te.problem("ops", *te_ops.NAMES):
        return missing
    if model.add_bias_linear:
        return "its pipeline of experts is used without biases (--disable-bias-linear)"
    if moe.moe_apply_probs_on_input:
        return "its pipeline multiplies the activation by the probability (--moe-apply-probs-on-input)"
    if tensors_of_experts:
        return f"its pipeline saves its own tensors for backward ({sorted(tensors_of_experts)[0]})"
    size, ffn = moe.moe_mlp_glu_interleave_size, moe.moe_ffn_hidden_size or model.ffn_hidden_size
    if size is not None and ffn % size:
        return f"--moe-mlp-glu-interleave-size {size} does not divide the experts' width {ffn}"
    if not model.swiglu or model.activation_func_clamp_value is not None or model.glu_linear_offset:
        return "its pipeline of experts is for --swiglu without clamp and offset"
    return None


def host_counts_problem(
    precision: PrecisionArgs, recipe: QuantizationRecipe | None, capability: tuple[int, int], moe: MoEArgs
) -> str | None:
    """Return why the library's pipeline of experts reads token counts on the host; None if it does not.

    Args:
        recipe: of the experts; None in high precision.
    """
    if recipe is None and (capability < (9, 0) or precision.params_dtype_name == "fp32"):
        return "TransformerEngine reads them on the host before compute capability 9.0, and in fp32"
    if recipe is None:
        return None
    if capability < (10, 0):
        return f"TransformerEngine reads them on the host with {recipe.name} scaling on this device"
    return te_support.fused_experts_problem(moe, precision)


@dataclass(frozen=True)
class FusedLayers:
    """Constructors of a layer factory, with the signatures of the local classes (layers/layer_factory.py).

    Args:
        library: transformer_engine.pytorch.
        context: of quantized GEMMs; None if the local linears compute them.
        fused_attention: whether to use the library's attention.
        stream: CUDA stream of context-parallel communication.
        quantized_experts, plain_experts: whether the library computes the experts of quantized and other layers.
        pad_multiple: of quantized experts' token counts.
        expert_ops: experts that the library computes are one pipeline of its operations.
        interleave_size: see FusedExpertMLP.
        plain_host_problem, quantized_host_problem: why the pipeline reads token counts on the host.
        overlap: of tensor-parallel linears.
        stores: quantized weights are stored in a form that the library takes.
        backend: torch's kernel where the local attention computes; None for torch's choice.
    """

    library: ModuleType
    ps: ParallelState
    comm_types: Sequence[str]
    context: Context | None = None
    fused_attention: bool = True
    stream: torch.Stream | None = None
    quantized_experts: bool = False
    plain_experts: bool = False
    pad_multiple: int = 1
    expert_ops: bool = False
    interleave_size: int | None = None
    plain_host_problem: str | None = None
    quantized_host_problem: str | None = None
    overlap: TpOverlap | None = None
    stores: bool = False
    backend: SDPBackend | None = None

    def column_linear(self, *sizes: int, **options) -> ColumnParallelLinear:
        return self._linear(ColumnParallelLinear, FusedColumnLinear, *sizes, overlap=self.overlap, **options)

    def row_linear(self, *sizes: int, **options) -> RowParallelLinear:
        return self._linear(RowParallelLinear, FusedRowLinear, *sizes, overlap=self.overlap, **options)

    def replicated_linear(self, *sizes: int, **options) -> ReplicatedLinear:
        return self._linear(ReplicatedLinear, FusedReplicatedLinear, *sizes, **options)

    def norm(self, size: int, model: ModelArgs, **options) -> nn.Module:
        return FusedNorm(size, model, library=self.library, **options)

    def core_attention(
        self, model: ModelArgs, layer_number: int, *, head_dim: int, scale: float | None = None
    ) -> CoreAttention | FusedAttention:
        local = make_core_attention(
            model,
            layer_number,
            head_dim=head_dim,
            scale=scale,
            ps=self.ps,
            comm_types=self.comm_types,
            backend=self.backend,
        )
        if not self.fused_attention:
            return local
        heads = model.num_attention_heads // self.ps.tp.size
        groups = max(1, model.query_groups // self.ps.tp.size)
        widths: int | tuple[int, int] = head_dim
        if model.multi_latent_attention:
            groups, widths = heads, (head_dim, model.v_head_dim)
        # tp_size stays 1: the numbers of heads are this rank's, also where ranks share a key-value group
        fused = self.library.DotProductAttention(
            heads,
            widths,
            num_gqa_groups=groups,
            attention_dropout=local.dropout_p,
            qkv_format="sbhd",
            attn_mask_type="causal",
            window_size=(-1 if local.window is None else local.window, 0),
            layer_number=layer_number,
            softmax_scale=local.scale,
        )
        if self.ps.cp.size > 1:
            fused.set_context_parallel_group(*self._exchange(layer_number))
        return FusedAttention(local, fused, takes_packed=self.ps.cp.size == 1)

    def _exchange(self, layer_number: int) -> tuple:
        """Return the library's arguments: group or groups, ranks, stream and kind. Levels of one rank are dropped."""
        kind, ps = get_cp_comm_type(layer_number, self.comm_types), self.ps
        if kind == "a2a+p2p" and ps.cp_a2a.size > 1 and ps.cp_p2p.size > 1:
            return [ps.cp_a2a.handle, ps.cp_p2p.handle], list(ps.cp.ranks), self.stream, kind
        if kind == "a2a+p2p":
            kind = "a2a" if ps.cp_a2a.size > 1 else "p2p"
        return ps.cp.handle, list(ps.cp.ranks), self.stream, "all_gather" if kind == "allgather" else kind

    def _linear(
        self, local: Callable[..., L], fused: Callable[..., L], *sizes: int, queue=None, quantize=None, **options
    ) -> L:
        if queue is not None or (quantize is not None and self.context is None):
            return local(*sizes, queue=queue, quantize=quantize, **options)
        context = contextlib.nullcontext if quantize is None else self.context
        if self.stores:
            options["quantize"] = quantize  # how the weight is stored
        return fused(*sizes, library=self.library, context=context, **options)

    def _gemms_of_experts(self, quantize: Callable | None) -> LibraryGemms:
        if quantize is None or self.context is None:
            return LibraryGemms(self.library)
        return LibraryGemms(self.library, self.context, self.pad_multiple, self.stores)

    def grouped_linear(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        queue=None,
        quantize=None,
        save_original_input: bool = False,
    ) -> nn.Module | None:
        """Build one linear of all experts; None where the local experts or a pipeline compute."""
        if self.expert_ops or not (self.plain_experts if quantize is None else self.quantized_experts):
            return None
        return FusedGroupedLinear(
            num_experts,
            in_features,
            out_features,
            self._gemms_of_experts(quantize),
            queue=queue,
            save_original_input=save_original_input,
        )

    def expert_mlp(
        self, num_experts: int, sizes: tuple[int, int, int], *, queue=None, quantize=None
    ) -> nn.Module | None:
        """Build the MLP of all experts; None where linears of the library or the local experts compute."""
        if not self.expert_ops or not (self.plain_experts if quantize is None else self.quantized_experts):
            return None
        return FusedExpertMLP(
            num_experts,
            sizes,
            self._gemms_of_experts(quantize),
            queue=queue,
            interleave_size=self.interleave_size,
            host_problem=self.plain_host_problem if quantize is None else self.quantized_host_problem,
        )

"""Selection of the dispatcher and of fused kernels, when the model is built."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from arguments.moe import MoEArgs
from moe_trainer.backends import BackendPolicy
from moe_trainer.layers import te
from moe_trainer.layers.kernels import Kernels
from moe_trainer.moe.dispatch import deepep, hybridep, ncclep
from moe_trainer.moe.dispatch.allgather import AllGatherDispatcher
from moe_trainer.moe.dispatch.alltoall import AllToAllDispatcher
from moe_trainer.moe.dispatch.base import TokenDispatcher
from moe_trainer.moe.dispatch.hierarchical import HierarchicalDispatcher
from moe_trainer.moe.dispatch.local import LocalDispatcher
from moe_trainer.moe.dispatch.mxfp8_transport import Mxfp8Transport
from moe_trainer.moe.finermoe import SlicedPermutation
from moe_trainer.ops.attach_loss import Balancing
from moe_trainer.ops.permute import Permutation
from moe_trainer.parallel.state import ParallelState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DispatchBufferSpec:
    """Sizes of a communication buffer; max_tokens is the maximum that a rank dispatches at a time.

    Attributes:
        high_priority: whether tokens are exchanged on a high-priority stream.
    """

    hidden_size: int
    max_tokens: int
    dtype: torch.dtype
    device: torch.device
    deterministic: bool = False
    high_priority: bool = False


def build_dispatcher(
    moe: MoEArgs,
    ps: ParallelState,
    buffer: DispatchBufferSpec | None = None,
    backends: BackendPolicy | None = None,
    kernels: Kernels | None = None,
) -> TokenDispatcher:
    """Build the dispatcher for --moe-token-dispatcher-type; `buffer` is needed on CUDA devices.

    Raises:
        MissingBackendError: if a library is missing.
        ValueError: if the library does not support the size or dtype of the tokens.

    Communication: collective if a communication buffer is allocated.
    """
    backends = backends or BackendPolicy()
    permutation = (
        build_permutation(moe, backends, kernels) if moe.finermoe is None else _build_sliced_permutation(moe, ps)
    )
    mxfp8 = Mxfp8Transport(
        moe.moe_dispatch_fwd_dtype == "mxfp8",
        moe.moe_combine_bwd_dtype == "mxfp8",
        (kernels or Kernels()).row_casts,
    )
    if ps.tp_ep.size == 1:
        return LocalDispatcher(permutation, mxfp8)
    kind = moe.moe_token_dispatcher_type
    if kind == "allgather":
        return AllGatherDispatcher(ps, permutation)
    if moe.uses_hierarchical_dispatch:
        if ps.ep_inter.size > 1:
            return HierarchicalDispatcher(ps, permutation)
        logger.info(
            "--moe-flex-dispatcher-backend hierarchical: all expert ranks of a token are in one node (%d consecutive "
            "ranks); using the alltoall dispatcher",
            ps.ep.size * ps.etp.size,
        )
    elif kind == "flex" and (flex := _build_flex(moe, ps, buffer, backends, permutation, mxfp8)) is not None:
        return flex
    return AllToAllDispatcher(ps, permutation, mxfp8)


def _use_te_kernels(
    flag: str, dest: str, backends: BackendPolicy, module: str, *names: str, ours: str, limitation: str | None = None
) -> bool:
    """Return whether TransformerEngine's kernels for a flag can be used.

    Args:
        flag: flag as typed.
        dest: its field.
        backends: policy for missing libraries.
        module: TransformerEngine's module.
        *names: what is needed of it.
        ours: name of our kernel in --triton-kernels.
        limitation: why the kernel cannot be used although it is installed.
    """
    if not backends.cuda:
        problem, remedy = "the kernels work on CUDA devices, and this rank computes on a CPU", f"Drop {flag}"
    elif problem := te.problem(module, *names):
        remedy = f"Install it ({te.INSTALL}), or use --triton-kernels {ours} instead"
    else:
        problem, remedy = limitation, f"Drop {flag}"
    return backends.should_use(
        (dest,), flag=flag, problem=problem, remedy=remedy, instead="plain torch, with the same results"
    )


def build_permutation(moe: MoEArgs, backends: BackendPolicy, kernels: Kernels | None = None) -> Permutation:
    """Build the local permutation: ours if its kernel was named, fused for --moe-permute-fusion, else plain torch."""
    our_kernel = None if kernels is None else kernels.permutation
    ours_named = our_kernel is not None and "triton_kernels" in backends.typed
    if (
        moe.moe_permute_fusion
        and not ours_named
        and _use_te_kernels(
            "--moe-permute-fusion",
            "moe_permute_fusion",
            backends,
            "permutation",
            *te.FusedPermutation.NAMES,
            ours="permute",
        )
    ):
        return te.FusedPermutation()
    return Permutation() if our_kernel is None else our_kernel()


def _build_sliced_permutation(moe: MoEArgs, ps: ParallelState) -> SlicedPermutation:
    """Build FineRMoE's permutation: of this rank's experts where received tokens are permuted, else of all."""
    local_columns = (moe.moe_token_dispatcher_type == "allgather" and ps.tp_ep.size > 1) or (
        moe.uses_hierarchical_dispatch and ps.ep_inter.size > 1
    )
    first = ps.ep.rank * (moe.num_experts // ps.ep.size) if local_columns else 0
    return SlicedPermutation(moe.finermoe.slices, moe.num_experts // moe.finermoe.slices, first)


def select_fused_topk(moe: MoEArgs, backends: BackendPolicy, kernels: Kernels | None = None) -> Callable | None:
    """Return the kernel that scores and selects experts: ours if named, fused for --moe-router-fusion, or None."""
    if moe.finermoe is not None:
        return None
    our_kernel = None if kernels is None else kernels.fused_topk
    if our_kernel is not None and ("triton_kernels" in backends.typed or not moe.moe_router_fusion):
        return our_kernel
    if not moe.moe_router_fusion:
        return None
    limitation = None
    if moe.moe_router_dtype == "fp64":
        limitation = "the kernel computes in fp32, and --moe-router-dtype is fp64"
    elif moe.moe_router_load_balancing_type == "sinkhorn":
        limitation = "the kernel does not support --moe-router-load-balancing-type sinkhorn"
    is_usable = _use_te_kernels(
        "--moe-router-fusion",
        "moe_router_fusion",
        backends,
        "router",
        te.FUSED_TOPK,
        ours="router",
        limitation=limitation,
    )
    return te.fused_topk() if is_usable else our_kernel


def _build_flex(
    moe: MoEArgs,
    ps: ParallelState,
    buffer: DispatchBufferSpec | None,
    backends: BackendPolicy,
    permutation: Permutation,
    mxfp8: Mxfp8Transport,
) -> TokenDispatcher | None:
    """Build the flex dispatcher's backend; return None if the all-to-all replaces it."""
    name = moe.moe_flex_dispatcher_backend
    adapter = {"deepep": deepep, "hybridep": hybridep, "ncclep": ncclep}[name]
    num_experts = moe.num_experts + moe.moe_clone_hot_experts * (ps.ep.size if ps.ep.size > 1 else 0)
    problem, remedy = (
        "the library works on CUDA devices, and this rank computes on a CPU",
        "Use --moe-token-dispatcher-type alltoall",
    )
    if backends.cuda:
        problem, remedy = adapter.problem(), f"Install it ({adapter.INSTALL})"
    is_usable = backends.should_use(
        ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_enable_deepep"),
        flag=f"--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {name}",
        problem=problem,
        remedy=remedy,
        instead="the alltoall dispatcher, with the same results",
    )
    if not is_usable:
        return None
    if buffer.dtype != torch.bfloat16:
        raise ValueError(
            f"--moe-flex-dispatcher-backend {name} supports bf16 tokens only, these are {buffer.dtype}: "
            "add --bf16 or use --moe-token-dispatcher-type alltoall"
        )
    num_sms = moe.moe_flex_dispatcher_num_sms
    if name == "deepep":
        num_sms_asked = not backends.typed.isdisjoint(("moe_flex_dispatcher_num_sms", "moe_deepep_num_sms"))
        return deepep.make_dispatcher(
            ps,
            topk=moe.moe_router_topk,
            hidden_size=buffer.hidden_size,
            max_tokens=buffer.max_tokens,
            num_sms=num_sms,
            num_sms_asked=num_sms_asked,
            deterministic=buffer.deterministic,
            device=buffer.device,
            permutation=permutation,
            mxfp8=mxfp8,
        )
    if name == "ncclep":
        return ncclep.make_dispatcher(
            ps,
            topk=moe.moe_router_topk,
            hidden_size=buffer.hidden_size,
            num_experts=num_experts,
            max_tokens=buffer.max_tokens,
            num_sms=num_sms,
            zero_copy=moe.moe_ncclep_zero_copy,
        )
    return hybridep.make_dispatcher(
        ps,
        hidden_size=buffer.hidden_size,
        num_experts=num_experts,
        max_tokens=buffer.max_tokens,
        num_sms=num_sms,
        num_sms_preprocessing=moe.moe_hybridep_num_sms_preprocessing,
        num_blocks_permute=moe.moe_hybridep_num_blocks_permute,
        num_blocks_unpermute=moe.moe_hybridep_num_blocks_unpermute,
        fused=moe.moe_permute_fusion_into_hybridep,
        pad_uneven=moe.moe_hybridep_pad_uneven_dispatch_inputs,
        mxfp8=mxfp8,
        high_priority=buffer.high_priority,
    )


def attach_dispatcher(
    layers: Sequence,
    dispatcher: TokenDispatcher,
    fused_topk: Callable | None = None,
    balancing: Balancing | None = None,
) -> None:
    """Set the dispatcher of every MoE layer of a model, and the kernels of its router.

    Raises:
        ValueError: if a CUDA graph holds dropless experts whose token counts cannot stay on the device.
    """
    problems = set()
    for layer in layers:
        layer.dispatcher = dispatcher
        layer.router.fused_topk, layer.router.balancing = fused_topk, balancing
        if layer.cloner is not None:
            num_ranks = layer.cloner.ep.size
            layer.cloned_tokens_2P = torch.zeros(2, num_ranks, dtype=torch.int64, device=layer.router.weight.device)
        if layer.budget is not None:
            problems.add(layer.allow_device_counts(dispatcher.fixed_buffer_problem))
        if layer.captures_experts and layer.capacity is None and not layer.has_device_counts:
            problem = next(iter(problems - {None}), "the dispatcher has no fixed receive buffer")
            raise ValueError(
                f"CUDA graphs of dropless experts need their token counts on the device, but they are on the host: "
                f"{problem}; leave the experts out of --cuda-graph-modules, or pad them to capacity"
            )
    if isinstance(dispatcher, ncclep.NcclEPDispatcher):
        dispatcher.context.budgets = [layer.budget for layer in layers if layer.budget is not None]
    for problem in sorted(problems - {None}):
        logger.info(
            "--moe-expert-rank-capacity-factor: every MoE layer still waits for token counts on the host: %s",
            problem,
        )


def close_dispatchers(chunks: Iterable) -> None:
    """Release what the libraries of the dispatchers hold, before the process groups are destroyed."""
    for chunk in chunks:
        for layer in chunk.moe_layers():
            layer.dispatcher.close()

"""Choice of the dispatcher and of fused kernels, once, when the model is built."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from arguments.moe import MoEArgs
from moe_trainer.backends import Backends
from moe_trainer.layers import te
from moe_trainer.layers.kernels import Balancing, Kernels
from moe_trainer.moe.dispatch import deepep, hybridep
from moe_trainer.moe.dispatch.allgather import AllGatherDispatcher
from moe_trainer.moe.dispatch.alltoall import AllToAllDispatcher
from moe_trainer.moe.dispatch.base import TokenDispatcher
from moe_trainer.moe.dispatch.eight_bits import EightBits
from moe_trainer.moe.dispatch.local import LocalDispatcher
from moe_trainer.moe.finermoe import SlicedPermutation
from moe_trainer.ops.permute import Permutation
from moe_trainer.parallel.state import ParallelState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rows:
    """What a communication buffer is made for. max_tokens: the most tokens a rank dispatches at a time."""

    hidden_size: int
    max_tokens: int
    dtype: torch.dtype
    device: torch.device
    deterministic: bool = False


def choose_dispatcher(moe: MoEArgs, ps: ParallelState, rows: Rows | None = None, backends: Backends = Backends(),
                      kernels: Kernels = Kernels()) -> TokenDispatcher:
    """Return the dispatcher for --moe-token-dispatcher-type under these parallel sizes. rows: needed on CUDA devices.

    Collective where a communication buffer is made. Raises: MissingBackend; ValueError when the library cannot carry such rows.
    """
    permutation = choose_permutation(moe, backends, kernels) if moe.finermoe is None else _sliced(moe, ps)
    eight_bits = EightBits(moe.moe_dispatch_fwd_dtype == "mxfp8", moe.moe_combine_bwd_dtype == "mxfp8")
    if ps.tp_ep.size == 1:
        return LocalDispatcher(permutation, eight_bits)
    kind = moe.moe_token_dispatcher_type
    if kind == "allgather":
        return AllGatherDispatcher(ps, permutation)
    if kind == "flex" and (made := _flex(moe, ps, rows, backends, permutation)) is not None:
        return made
    return AllToAllDispatcher(ps, permutation, eight_bits)


def _kernel(flag: str, dest: str, backends: Backends, module: str, *names: str, own: str, other: str | None = None) -> bool:
    """Whether TransformerEngine's kernels behind a flag can be used. own: the name of ours."""
    if not backends.cuda:
        problem, remedy = "the kernels work on CUDA devices, and this rank computes on a CPU", f"Drop {flag}"
    elif problem := te.problem(module, *names):
        remedy = f"Install it ({te.INSTALL}), or use --triton-kernels {own} instead"
    else:
        problem, remedy = other, f"Drop {flag}"
    return backends.use((dest,), flag=flag, problem=problem, remedy=remedy, instead="plain torch, with the same results")


def choose_permutation(moe: MoEArgs, backends: Backends, kernels: Kernels = Kernels()) -> Permutation:
    """The local reordering of tokens: our own kernels if they were named, fused ones for --moe-permute-fusion where they are."""
    ours_named = kernels.permutation is not None and "triton_kernels" in backends.typed
    if moe.moe_permute_fusion and not ours_named and _kernel(
            "--moe-permute-fusion", "moe_permute_fusion", backends, "permutation", *te.FusedPermutation.NAMES, own="permute"):
        return te.FusedPermutation()
    return Permutation() if kernels.permutation is None else kernels.permutation()


def _sliced(moe: MoEArgs, ps: ParallelState) -> SlicedPermutation:
    """The reordering of FineRMoE: of what was gathered a rank reorders the columns of its own experts, else those of all."""
    own_columns = moe.moe_token_dispatcher_type == "allgather" and ps.tp_ep.size > 1
    first = ps.ep.rank * (moe.num_experts // ps.ep.size) if own_columns else 0
    return SlicedPermutation(moe.finermoe.slices, moe.num_experts // moe.finermoe.slices, first)


def choose_fused_topk(moe: MoEArgs, backends: Backends, kernels: Kernels = Kernels()) -> Callable | None:
    """The kernel that scores and chooses experts: our own if it was named, a fused one for --moe-router-fusion where it is, else our own
    or None."""
    if moe.finermoe is not None:
        return None
    if kernels.fused_topk is not None and ("triton_kernels" in backends.typed or not moe.moe_router_fusion):
        return kernels.fused_topk
    if not moe.moe_router_fusion:
        return None
    other = None
    if moe.moe_router_dtype == "fp64":
        other = "the kernel computes in fp32, and --moe-router-dtype is fp64"
    elif moe.moe_router_load_balancing_type == "sinkhorn":
        other = "the kernel does not know --moe-router-load-balancing-type sinkhorn"
    found = _kernel("--moe-router-fusion", "moe_router_fusion", backends, "router", te.FUSED_TOPK, own="router", other=other)
    return te.fused_topk() if found else kernels.fused_topk


def _flex(moe: MoEArgs, ps: ParallelState, rows: Rows | None, backends: Backends,
          permutation: Permutation) -> TokenDispatcher | None:
    """The flex dispatcher's backend, None where the all-to-all stands in for it."""
    name = moe.moe_flex_dispatcher_backend
    adapter = {"deepep": deepep, "hybridep": hybridep}.get(name)
    if adapter is None:
        raise ValueError(f"--moe-flex-dispatcher-backend {name} is not available yet; use deepep or hybridep")
    problem, remedy = "the library works on CUDA devices, and this rank computes on a CPU", "Use --moe-token-dispatcher-type alltoall"
    if backends.cuda:
        problem, remedy = adapter.problem(), f"Install it ({adapter.INSTALL})"
    found = backends.use(
        ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_enable_deepep"),
        flag=f"--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {name}", problem=problem, remedy=remedy,
        instead="the alltoall dispatcher, with the same results")
    if not found:
        return None
    if rows.dtype != torch.bfloat16:
        raise ValueError(f"--moe-flex-dispatcher-backend {name} carries bf16 rows only, these are {rows.dtype}: "
                         "add --bf16 or use --moe-token-dispatcher-type alltoall")
    num_sms = moe.moe_flex_dispatcher_num_sms
    if name == "deepep":
        asked = not backends.typed.isdisjoint(("moe_flex_dispatcher_num_sms", "moe_deepep_num_sms"))
        return deepep.make_dispatcher(
            ps, topk=moe.moe_router_topk, hidden_size=rows.hidden_size, max_tokens=rows.max_tokens, num_sms=num_sms,
            num_sms_asked=asked, deterministic=rows.deterministic, device=rows.device, permutation=permutation)
    return hybridep.make_dispatcher(
        ps, hidden_size=rows.hidden_size, num_experts=moe.num_experts, max_tokens=rows.max_tokens, num_sms=num_sms,
        num_sms_preprocessing=moe.moe_hybridep_num_sms_preprocessing, num_blocks_permute=moe.moe_hybridep_num_blocks_permute,
        num_blocks_unpermute=moe.moe_hybridep_num_blocks_unpermute, fused=moe.moe_permute_fusion_into_hybridep,
        pad_uneven=moe.moe_hybridep_pad_uneven_dispatch_inputs)


def connect_dispatcher(layers: Iterable, dispatcher: TokenDispatcher, fused_topk: Callable | None = None,
                       balancing: Balancing | None = None) -> None:
    """Give every MoE layer of a model the same dispatcher, and its router the same kernels."""
    problems = set()
    for layer in layers:
        layer.dispatcher = dispatcher
        layer.router.fused_topk, layer.router.balancing = fused_topk, balancing
        if layer.budget is not None and isinstance(dispatcher, hybridep.HybridEPDispatcher):
            problems.add(layer.keep_counts_on_device() if dispatcher.takes_buffer_rows else hybridep.FUSED_NEEDS_COUNTS)
    for problem in sorted(problems - {None}):
        logger.info("--moe-expert-rank-capacity-factor: the host still waits for the counts of received rows in every MoE layer: %s", problem)

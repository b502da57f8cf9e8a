"""Selection of the dispatcher and of its kernels, when the model is built."""

import logging
from collections.abc import Iterable

import torch

from arguments.mechanisms.dispatchers import ALLTOALL, LOCAL, SELECTING_FLAGS, DispatcherDeclaration, get_dispatcher
from arguments.mechanisms.selections import get_selection
from arguments.moe import MoEArgs
from moe_trainer.backends import BackendPolicy
from moe_trainer.declared_module import load_module
from moe_trainer.layers import te
from moe_trainer.layers.kernels import Kernels
from moe_trainer.moe.dispatch.base import TokenDispatcher
from moe_trainer.moe.dispatch.flex import DispatchBufferSpec, DispatcherSettings, LibrarySettings
from moe_trainer.moe.dispatch.mxfp8_transport import Mxfp8Transport
from moe_trainer.ops.permute import Permutation
from moe_trainer.parallel.state import ParallelState

logger = logging.getLogger(__name__)


def build_dispatcher(
    moe: MoEArgs,
    ps: ParallelState,
    buffer: DispatchBufferSpec | None = None,
    backends: BackendPolicy | None = None,
    kernels: Kernels | None = None,
) -> TokenDispatcher:
    """Build the dispatcher that the flags select; `buffer` is needed by a library, so on CUDA devices only.

    Raises:
        MissingBackendError: if a library is missing.
        ValueError: if the library does not support the size or dtype of the tokens, or needs a buffer.

    Communication: collective if a communication buffer is allocated.
    """
    backends, kernels = backends or BackendPolicy(), kernels or Kernels()
    dispatcher = _find_usable(moe, ps, backends)
    permutation = build_permutation(moe, backends, kernels)
    selection = get_selection(moe)
    if selection.split is not None:
        # of all experts where tokens are permuted before they are sent, else of this rank's
        first = 0 if dispatcher.sends_copies else ps.ep.rank * (moe.expert_count // ps.ep.size)
        permutation = load_module(selection).make_permutation(moe, first, permutation)
    mxfp8 = Mxfp8Transport(
        moe.moe_dispatch_fwd_dtype == "mxfp8", moe.moe_combine_bwd_dtype == "mxfp8", kernels.row_casts
    )
    module, inputs = load_module(dispatcher), (ps, moe, permutation, mxfp8, backends.typed)
    if dispatcher.package is None:
        return module.make_dispatcher(DispatcherSettings(*inputs))
    if buffer is None:
        raise ValueError(f"{_spell(dispatcher)} needs the sizes of its communication buffer")
    if buffer.dtype != torch.bfloat16:
        raise ValueError(
            f"{_spell(dispatcher)} supports bf16 tokens only, these are {buffer.dtype}: "
            f"add --bf16 or use {' '.join(ALLTOALL.words)}"
        )
    return module.make_dispatcher(LibrarySettings(*inputs, buffer=buffer))


def _spell(dispatcher: DispatcherDeclaration) -> str:
    return " ".join(dispatcher.words[-2:])


def _find_usable(moe: MoEArgs, ps: ParallelState, backends: BackendPolicy) -> DispatcherDeclaration:
    """Return the dispatcher that the flags select, or what takes its place on these ranks and devices."""
    if ps.tp_ep.size == 1:
        return LOCAL
    dispatcher = get_dispatcher(moe)
    if dispatcher.groups_by_domain and ps.ep_inter.size == 1:
        logger.info(
            "%s: all expert ranks of a token are in one node (%d consecutive ranks); using the alltoall dispatcher",
            _spell(dispatcher),
            ps.ep.size * ps.etp.size,
        )
        return ALLTOALL
    if dispatcher.package is None:
        return dispatcher
    problem, remedy = (
        "the library works on CUDA devices, and this rank computes on a CPU",
        f"Use {' '.join(ALLTOALL.words)}",
    )
    if backends.cuda:
        library = load_module(dispatcher)
        problem, remedy = library.problem(), f"Install it ({library.INSTALL})"
    is_usable = backends.should_use(
        SELECTING_FLAGS,
        flag=" ".join(dispatcher.words),
        problem=problem,
        remedy=remedy,
        instead="the alltoall dispatcher, with the same results",
    )
    return dispatcher if is_usable else ALLTOALL


def build_permutation(moe: MoEArgs, backends: BackendPolicy, kernels: Kernels | None = None) -> Permutation:
    """Build the local permutation: ours if its kernel was named, fused for --moe-permute-fusion, else plain torch."""
    our_kernel = None if kernels is None else kernels.permutation
    ours_named = our_kernel is not None and "triton_kernels" in backends.typed
    if (
        moe.moe_permute_fusion
        and not ours_named
        and te.should_use_kernels(
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


def close_dispatchers(chunks: Iterable) -> None:
    """Release what the libraries of the dispatchers hold, before the process groups are destroyed."""
    for chunk in chunks:
        for layer in chunk.moe_layers():
            layer.dispatcher.close()

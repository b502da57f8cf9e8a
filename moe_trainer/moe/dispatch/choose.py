"""Choice of the dispatcher, once, when the model is built."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from arguments.moe import MoEArgs
from moe_trainer.backends import Backends
from moe_trainer.moe.dispatch import deepep, hybridep
from moe_trainer.moe.dispatch.allgather import AllGatherDispatcher
from moe_trainer.moe.dispatch.alltoall import AllToAllDispatcher
from moe_trainer.moe.dispatch.base import TokenDispatcher
from moe_trainer.moe.dispatch.local import LocalDispatcher
from moe_trainer.parallel.state import ParallelState


@dataclass(frozen=True)
class Rows:
    """What a communication buffer is made for. max_tokens: the most tokens a rank dispatches at a time."""

    hidden_size: int
    max_tokens: int
    dtype: torch.dtype
    device: torch.device
    deterministic: bool = False


def choose_dispatcher(moe: MoEArgs, ps: ParallelState, rows: Rows | None = None, backends: Backends = Backends()) -> TokenDispatcher:
    """Return the dispatcher for --moe-token-dispatcher-type under these parallel sizes. rows: needed on CUDA devices.

    Collective where a communication buffer is made. Raises: MissingBackend; ValueError when the library cannot carry such rows.
    """
    if ps.tp_ep.size == 1:
        return LocalDispatcher()
    kind = moe.moe_token_dispatcher_type
    if kind == "allgather":
        return AllGatherDispatcher(ps)
    if kind == "flex" and (made := _flex(moe, ps, rows, backends)) is not None:
        return made
    return AllToAllDispatcher(ps)


def _flex(moe: MoEArgs, ps: ParallelState, rows: Rows | None, backends: Backends) -> TokenDispatcher | None:
    """The flex dispatcher's backend, None where the all-to-all stands in for it."""
    name = moe.moe_flex_dispatcher_backend
    adapter = {"deepep": deepep, "hybridep": hybridep}.get(name)
    if adapter is None:
        raise ValueError(f"--moe-flex-dispatcher-backend {name} is not available yet; use deepep or hybridep")
    found = backends.use(
        ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_enable_deepep"),
        flag=f"--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {name}",
        problem=adapter.problem() if backends.cuda else "the library works on CUDA devices, and this rank computes on a CPU",
        remedy=f"Install it ({adapter.INSTALL})", instead="the alltoall dispatcher, with the same results")
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
            num_sms_asked=asked, deterministic=rows.deterministic, device=rows.device)
    return hybridep.make_dispatcher(
        ps, hidden_size=rows.hidden_size, num_experts=moe.num_experts, max_tokens=rows.max_tokens, num_sms=num_sms,
        num_sms_preprocessing=moe.moe_hybridep_num_sms_preprocessing, num_blocks_permute=moe.moe_hybridep_num_blocks_permute,
        num_blocks_unpermute=moe.moe_hybridep_num_blocks_unpermute, fused=moe.moe_permute_fusion_into_hybridep,
        pad_uneven=moe.moe_hybridep_pad_uneven_dispatch_inputs)


def connect_dispatcher(layers: Iterable, dispatcher: TokenDispatcher) -> None:
    """Give every MoE layer of a model the same dispatcher."""
    for layer in layers:
        layer.dispatcher = dispatcher

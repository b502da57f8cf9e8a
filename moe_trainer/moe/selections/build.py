"""The choice of a selection for a layer, and of the kernel that computes it."""

from collections.abc import Callable
from functools import partial

from arguments.mechanisms.selection_kinds.declaration import SelectionCapability
from arguments.mechanisms.selections import get_selection
from arguments.moe import MoEArgs
from moe_trainer.backends import BackendPolicy
from moe_trainer.declared_module import load_module
from moe_trainer.layers import te
from moe_trainer.layers.kernels import Kernels
from moe_trainer.moe.selections.selection import ExpertSelection, SelectionContext


def build_selection(context: SelectionContext) -> ExpertSelection:
    """Build the selection that the flags ask for in a layer."""
    return load_module(get_selection(context.moe, context.layer_number)).make_selection(context)


def select_fused_topk(moe: MoEArgs, backends: BackendPolicy, kernels: Kernels | None = None) -> Callable | None:
    """Return the kernel that scores and selects experts: ours if named, fused for --moe-router-fusion, or None.

    A selection that it cannot compute does not use it.
    """
    our_kernel, scored = None if kernels is None else kernels.fused_topk, moe.moe_router_group_score_topk
    if our_kernel is not None and scored is not None:
        our_kernel = partial(our_kernel, group_score_topk=scored)
    if our_kernel is not None and ("triton_kernels" in backends.typed or not moe.moe_router_fusion):
        return our_kernel
    limitation, selection = None, get_selection(moe)
    if not moe.moe_router_fusion or selection.ignores(SelectionCapability.FUSED_KERNEL):
        return our_kernel
    if moe.moe_router_dtype == "fp64":
        limitation = "the kernel computes in fp32, and --moe-router-dtype is fp64"
    elif not selection.supports(SelectionCapability.FUSED_KERNEL):
        limitation = f"{selection.reason(SelectionCapability.FUSED_KERNEL)} ({selection.name})"
    elif moe.moe_router_enable_expert_bias and moe.moe_router_score_function == "softmax":
        limitation = "the kernel adds no expert bias to --moe-router-score-function softmax"
    elif moe.moe_router_group_topk and scored not in (None, moe.moe_router_topk // moe.moe_router_group_topk):
        limitation = f"the kernel does not support --moe-router-group-score-topk {scored}"
    is_usable = te.should_use_kernels(
        "--moe-router-fusion",
        "moe_router_fusion",
        backends,
        "router",
        te.FUSED_TOPK,
        ours="router",
        limitation=limitation,
    )
    return te.fused_topk() if is_usable else our_kernel

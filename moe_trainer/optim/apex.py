"""NVIDIA's apex, whose kernels a run without TransformerEngine uses where it is installed, as Megatron-LM does.

The only file that imports it. What the kernels do: ops/fused_library.py.
"""

import importlib
import importlib.util
import logging
from pathlib import Path

import torch

from moe_trainer.backends import import_problem
from moe_trainer.ops.fused_library import FusedLibrary
from moe_trainer.parallel.collectives import all_gather_object
from moe_trainer.parallel.state import Group

logger = logging.getLogger(__name__)

INSTALL = (
    "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation git+https://github.com/NVIDIA/apex; "
    "the index has another program of that name"
)
KERNELS = ("multi_tensor_adam_capturable", "multi_tensor_l2norm", "multi_tensor_scale")
"""What is taken from amp_C."""


def problem() -> str | None:
    """Return why NVIDIA's apex cannot be used; None if it can. Does not import another program of that name."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "the package apex is not installed"
    folders = spec.submodule_search_locations or ()
    if not any((Path(folder) / "multi_tensor_apply").exists() for folder in folders):
        return "the installed apex is another program of that name, the one of the index, not NVIDIA's"
    if importlib.util.find_spec("amp_C") is None:
        return "NVIDIA's apex is installed without its CUDA extensions (amp_C)"
    if reason := import_problem("amp_C") or import_problem("apex.multi_tensor_apply"):
        return reason
    missing = [name for name in KERNELS if not hasattr(importlib.import_module("amp_C"), name)]
    return f"the installed apex is too old: its amp_C has no {missing[0]}" if missing else None


def load(device_type: str = "cuda") -> FusedLibrary:
    """Import apex; check `problem` first."""
    gemms = None
    if import_problem("fused_weight_gradient_mlp_cuda") is None:
        gemms = importlib.import_module("fused_weight_gradient_mlp_cuda")
    apply = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
    return FusedLibrary("apex", apply, importlib.import_module("amp_C"), gemms, device_type)


def select_fused_library(device: torch.device, world: Group) -> FusedLibrary | None:
    """Return the library whose kernels replace torch's on a device; None if torch's are used. The log says which.

    All ranks use the same kernels: replicas of a weight that round differently would drift apart.

    Communication: on CUDA devices, one object of every rank.
    """
    if device.type != "cuda":
        return None
    has_te = importlib.util.find_spec("transformer_engine") is not None
    reasons = all_gather_object("TransformerEngine is installed" if has_te else problem(), world)
    if any(reasons):
        reason = next(filter(None, reasons))
        if not has_te and importlib.util.find_spec("apex") is not None:
            logger.info("%s; the optimizer uses torch's kernels", reason)
        return None
    library = load()
    added = "weight gradients by fused_weight_gradient_mlp_cuda where it can add them"
    logger.info(
        "apex: Adam, scaled gradients and their norm by amp_C; %s",
        added if library.gemms is not None else "weight gradients by torch (no fused_weight_gradient_mlp_cuda)",
    )
    return library

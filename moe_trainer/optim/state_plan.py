"""What a rank's optimizer state consists of, in which formats and where: decided once, from the flags."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from arguments.optimizer import OptimizerArgs
from moe_trainer.optim.formats import FORMATS
from moe_trainer.optim.kept import Devices

# moments that each update rule keeps, under their checkpoint names
MOMENTS = MappingProxyType({
    "adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",), "lion": ("exp_avg",), "muon": ("momentum_buffer",)})
MAIN = "fp32_param"
SQUARES = "exp_avg_sq"


@dataclass(frozen=True)
class StatePlan:
    """Formats (names of formats.FORMATS) and places.

    remainders: fp32 main parameters of a bf16 model share its half of the bits. host_share: of the elements whose state lives on
    the host; host_update: the host updates them, too (otherwise their state visits the device for the update). pinned: host memory that a
    device can reach itself; overlap: copies between the two beside the update. longest: elements updated at once; None: as it suits the
    device.
    """

    moments: Mapping[str, str]
    main: str = "fp32"
    remainders: bool = False
    host_share: float = 0.0
    host_update: bool = False
    pinned: bool = True
    pinned_grads: bool = True
    overlap: bool = False
    longest: int | None = None

    @property
    def needs_pieces(self) -> bool:
        """Whether a scale belongs to elements of one parameter, so that the update goes parameter by parameter."""
        return any(FORMATS[name].scaled for name in (*self.moments.values(), self.main))

    def devices(self, device: torch.device, on_host: bool) -> Devices:
        """Where a part of the state lies."""
        if not on_host:
            return Devices(device, device)
        host = torch.device("cpu")
        return Devices(host, host if self.host_update else device, not self.host_update, self.pinned and device.type == "cuda")


def rule_of(settings: OptimizerArgs, matrices: bool = False) -> str:
    """The update rule, of MOMENTS, of matrices or of all other parameters; they differ with --optimizer muon."""
    return settings.muon_scalar_optimizer if settings.optimizer == "muon" and not matrices else settings.optimizer


def plan_state(settings: OptimizerArgs, matrices: bool = False) -> StatePlan:
    """The plan of a command line, for matrices or all other parameters."""
    names, aware = MOMENTS[rule_of(settings, matrices)], settings.use_precision_aware_optimizer
    formats = (settings.exp_avg_dtype, settings.exp_avg_sq_dtype) if aware else ("fp32",) * len(names)
    plan = StatePlan(dict(zip(names, formats)), settings.main_params_dtype if aware else "fp32",
                     aware and settings.main_params_dtype == "fp32", pinned=settings.pin_cpu_params)
    if settings.optimizer_cpu_offload:
        return replace(plan, host_share=settings.optimizer_offload_fraction, host_update=True, pinned_grads=settings.pin_cpu_grads,
                       overlap=settings.overlap_cpu_optimizer_d2h_h2d)
    if settings.chunked_optimizer_state_offload:
        chunk = settings.optimizer_state_offload_chunk_size_mb * 2**20 // (4 * (len(names) + 1))  # opened, everything is fp32
        return replace(plan, host_share=settings.optimizer_state_offload_fraction, longest=max(chunk // 64 * 64, 64) if chunk else None)
    return plan

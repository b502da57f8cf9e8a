"""What a rank's optimizer state consists of, in which formats and where: decided once, from the flags."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from arguments.optimizer import OptimizerArgs
from moe_trainer.optim.formats import FORMATS
from moe_trainer.optim.kept import Place

# moments that each --optimizer keeps, under their checkpoint names
MOMENTS = MappingProxyType({"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)})
MAIN = "fp32_param"
SQUARES = "exp_avg_sq"


@dataclass(frozen=True)
class StatePlan:
    """Formats (names of formats.FORMATS) and places.

    remainders: fp32 main parameters of a bf16 model share its half of the bits. host_share: of the elements whose state lives on
    the host; host_update: the host updates them, too (otherwise their state visits the device for the update). pinned: host memory that a
    device can reach itself; overlap: copies between the two beside the update.
    """

    moments: Mapping[str, str]
    main: str = "fp32"
    remainders: bool = False
    host_share: float = 0.0
    host_update: bool = False
    pinned: bool = True
    pinned_grads: bool = True
    overlap: bool = False

    @property
    def needs_pieces(self) -> bool:
        """Whether a scale belongs to elements of one parameter, so that the update goes parameter by parameter."""
        return any(FORMATS[name].scaled for name in (*self.moments.values(), self.main))

    def place(self, device: torch.device, on_host: bool) -> Place:
        """Where a part of the state lies."""
        if not on_host:
            return Place(device, device)
        host = torch.device("cpu")
        return Place(host, host if self.host_update else device, not self.host_update, self.pinned and device.type == "cuda")


def plan_state(settings: OptimizerArgs) -> StatePlan:
    """The plan of a command line."""
    names = MOMENTS[settings.optimizer]
    if not settings.use_precision_aware_optimizer:
        return StatePlan(dict.fromkeys(names, "fp32"))
    formats = (settings.exp_avg_dtype, settings.exp_avg_sq_dtype)
    offload = settings.optimizer_cpu_offload
    return StatePlan(dict(zip(names, formats)), settings.main_params_dtype, settings.main_params_dtype == "fp32",
                     settings.optimizer_offload_fraction if offload else 0.0, offload, settings.pin_cpu_params, settings.pin_cpu_grads,
                     settings.overlap_cpu_optimizer_d2h_h2d)

"""Contents, formats and placement of the optimizer state, decided once from the flags."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from arguments.mechanisms.optimizers import get_element_rule, get_optimizer
from arguments.optimizer import OptimizerArgs
from moe_trainer.optim.state_formats import FORMATS, ScaledFormat
from moe_trainer.optim.state_storage import StatePlacement

MAIN = "fp32_param"
SQUARES = "exp_avg_sq"


@dataclass(frozen=True)
class StatePlan:
    """Formats (names of state_formats.FORMATS) and placement of the state.

    Args:
        moments: format by moment.
        main: format of the main parameters; "model" if the model's parameters are the main parameters in any dtype.
        uses_remainders: fp32 main parameters of a bf16 model store only the bits that the model does not have.
        host_share: fraction of the elements whose state is on the host.
        updates_on_host: the host updates those elements; otherwise their state is copied to the device for the update.
        pins_state: allocate host state in pinned memory.
        pins_grads: use pinned buffers for gradients.
        overlaps_copies: copy between host and device during the update.
        max_segment_numel: elements that are updated at once; None for the device's default.
    """

    moments: Mapping[str, str]
    main: str = "fp32"
    uses_remainders: bool = False
    host_share: float = 0.0
    updates_on_host: bool = False
    pins_state: bool = True
    pins_grads: bool = True
    overlaps_copies: bool = False
    max_segment_numel: int | None = None

    @property
    def splits_at_params(self) -> bool:
        """Whether a scale belongs to elements of one parameter, so update segments must not span two."""
        formats = (*self.moments.values(), *(() if self.main == "model" else (self.main,)))
        return any(isinstance(FORMATS[name], ScaledFormat) for name in formats)

    def placement(self, device: torch.device, is_on_host: bool) -> StatePlacement:
        """Return the placement of a part of the state."""
        if not is_on_host:
            return StatePlacement(device, device)
        host = torch.device("cpu")
        return StatePlacement(
            host,
            host if self.updates_on_host else device,
            always_copies=not self.updates_on_host,
            is_pinned=self.pins_state and device.type == "cuda",
        )


def plan_state(settings: OptimizerArgs, of_matrices: bool = False, main_format: str | None = None) -> StatePlan:
    """Return the plan for the matrices of an optimizer that updates them whole, or for all other parameters.

    Args:
        main_format: of the main parameters, if not that of `settings`.
    """
    names = (get_optimizer(settings) if of_matrices else get_element_rule(settings)).states
    is_precision_aware = settings.use_precision_aware_optimizer
    formats = (settings.exp_avg_dtype, settings.exp_avg_sq_dtype) if is_precision_aware else ("fp32",) * len(names)
    plan = StatePlan(
        dict(zip(names, formats)),
        main_format or (settings.main_params_dtype if is_precision_aware else "fp32"),
        is_precision_aware and settings.main_params_dtype == "fp32",
        pins_state=settings.pin_cpu_params,
    )
    if settings.optimizer_cpu_offload:
        return replace(
            plan,
            host_share=settings.optimizer_offload_fraction,
            updates_on_host=not of_matrices,  # the GEMMs of an orthogonalization belong on the device
            pins_grads=settings.pin_cpu_grads,
            overlaps_copies=settings.overlap_cpu_optimizer_d2h_h2d,
        )
    if settings.chunked_optimizer_state_offload:
        # a loaded segment is fp32: main parameters and all moments
        chunk = settings.optimizer_state_offload_chunk_size_mb * 2**20 // (4 * (len(names) + 1))
        return replace(
            plan,
            host_share=settings.optimizer_state_offload_fraction,
            max_segment_numel=max(chunk // 64 * 64, 64) if chunk else None,
        )
    return plan

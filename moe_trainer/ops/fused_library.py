"""Kernels of another library for the optimizer step: Adam, scaling and norms of many tensors, weight-gradient GEMMs.

The signatures are those of NVIDIA's apex. optim/apex.py loads it and says when its kernels replace torch's; a further
library is another such file.

Source: csrc/amp_C_frontend.cpp and csrc/megatron/fused_weight_gradient_dense.cpp of github.com/NVIDIA/apex.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_HALF_DTYPES = (torch.bfloat16, torch.float16)
_DTYPES = (torch.float32, *_HALF_DTYPES)
_MAX_NUMEL = 2**31 - 1  # the kernels count in int32
_DECOUPLED_DECAY = 1  # mode of the Adam kernel
_BIAS_CORRECTION = 1


@dataclass(frozen=True)
class FusedLibrary:
    """Kernels of a library, on tensors of one type of device.

    Attributes:
        name: of the library, for the log.
        apply: calls a kernel on lists of tensors: (kernel, overflow flag, lists, *arguments).
        kernels: module with multi_tensor_adam_capturable, multi_tensor_l2norm and multi_tensor_scale.
        gemms: module with wgrad_gemm_accum_fp32 and wgrad_gemm_accum_fp16; None if it is not built.
        device_type: of the tensors that the kernels take.
    """

    name: str
    apply: Callable[..., Any]
    kernels: ModuleType
    gemms: ModuleType | None
    device_type: str = "cuda"

    def takes(self, x: Tensor) -> bool:
        """Return whether the kernels take a tensor. An empty one, last in a list, would leave out the launch."""
        return (
            x.device.type == self.device_type
            and x.dtype in _DTYPES
            and 0 < x.numel() <= _MAX_NUMEL
            and x.is_contiguous()
        )

    def adam(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        averages: Sequence[Tensor],
        square_averages: Sequence[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        step_count: int,
        factor: float,
    ) -> None:
        """Update fp32 parameters and moments by AdamW; multiply the fp32 gradients by `factor`, in place."""
        device = params[0].device
        self.apply(
            self.kernels.multi_tensor_adam_capturable,
            _overflow_flag(device),
            [list(grads), list(params), list(averages), list(square_averages)],
            torch.full((1,), lr, device=device),
            *betas,
            eps,
            torch.full((1,), step_count, dtype=torch.int32, device=device),
            _DECOUPLED_DECAY,
            _BIAS_CORRECTION,
            weight_decay,
            torch.full((1,), factor, device=device),
        )

    def scale(self, tensors: Sequence[Tensor], factor: float) -> list[Tensor]:
        """Return fp32 copies of tensors, times a factor."""
        scaled = [torch.empty_like(x, dtype=torch.float32) for x in tensors]
        for dtype in dict.fromkeys(x.dtype for x in tensors):
            lists = [
                [x for x, of in zip(each, tensors, strict=True) if of.dtype == dtype] for each in (tensors, scaled)
            ]
            self.apply(self.kernels.multi_tensor_scale, _overflow_flag(tensors[0].device), lists, factor)
        return scaled

    def norms(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the fp32 norms, of shape [1], of all tensors of each dtype together."""
        return [
            self.apply(
                self.kernels.multi_tensor_l2norm,
                _overflow_flag(tensors[0].device),
                [[x for x in tensors if x.dtype == dtype]],
                False,
            )[0]
            for dtype in dict.fromkeys(x.dtype for x in tensors)
        ]

    def add_product(self, total_NK: Tensor, left_NR: Tensor, right_RK: Tensor) -> bool:
        """Add left @ right to a total in place.

        Returns:
            Whether it was added; the kernel reads the memory of `right` and of the transposed `left` in rows.
        """
        grad_RN = left_NR.t()
        if self.gemms is None or not all(map(self.takes, (total_NK, grad_RN, right_RK))):
            return False
        if total_NK.dtype == torch.float32 and grad_RN.dtype == right_RK.dtype:
            self.gemms.wgrad_gemm_accum_fp32(right_RK, grad_RN, total_NK)
        elif total_NK.dtype in _HALF_DTYPES and total_NK.dtype == grad_RN.dtype == right_RK.dtype:
            self.gemms.wgrad_gemm_accum_fp16(right_RK, grad_RN, total_NK)
        else:
            return False
        return True


def _overflow_flag(device: torch.device) -> Tensor:
    """Return what the kernels set where a value is not finite, which nothing reads: the norm is not finite either."""
    return torch.zeros(1, dtype=torch.int32, device=device)

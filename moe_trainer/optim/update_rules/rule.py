"""What update rules have in common: those of segments of the flat state, and those of full matrices."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from arguments.mechanisms.optimizer_kinds.declaration import OptimizerDeclaration
from arguments.optimizer import OptimizerArgs
from moe_trainer.ops.fused_library import FusedLibrary
from moe_trainer.optim.param_groups import ParamGroup

Tensors = list[Tensor]


@dataclass(frozen=True)
class GroupStep:
    """A step of a group of parameters.

    Attributes:
        group: the group.
        lr: its learning rate.
        weight_decay: its weight decay.
        count: number of the step, from 1.
        factor: multiplies every gradient.
        library: whose kernels update; None: torch's.
    """

    group: ParamGroup
    lr: float
    weight_decay: float
    count: int
    factor: float
    library: FusedLibrary | None


class ElementRule(ABC):
    """Updates any segment of parameters, element by element."""

    declaration: ClassVar[OptimizerDeclaration]

    def __init__(self, settings: OptimizerArgs):
        self._settings = settings

    @abstractmethod
    def update(self, params: Tensors, grads: Tensors, moments: dict[str, Tensors], step: GroupStep) -> None:
        """Update fp32 parameters and moments in place. Gradients of any format; they are undefined afterwards."""

    @abstractmethod
    def describe(self, group: ParamGroup) -> dict[str, Any]:
        """Return the settings of a group that a checkpoint records."""


class MatrixRule(ABC):
    """Updates full matrices, or the shards that tensor parallelism leaves a rank."""

    declaration: ClassVar[OptimizerDeclaration]

    @abstractmethod
    def update(
        self,
        param: Parameter,
        main: Tensor,
        grad: Tensor,
        moments: dict[str, Tensor],
        lr: float,
        weight_decay: float,
    ) -> None:
        """Update flat fp32 main parameters and moments in place. Collective over the ranks that shard the matrix."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the settings that a checkpoint records with every group."""


def scale_grad(grad: Tensor, factor: float) -> Tensor:
    """Return grad * factor in fp32; the same tensor if nothing changes."""
    if grad.dtype == torch.float32:
        return grad if factor == 1.0 else grad * factor
    return grad.float().mul_(factor)


def scale_grads(grads: Sequence[Tensor], factor: float, library: FusedLibrary | None) -> Tensors:
    """Return grads * factor in fp32; the same tensors where nothing changes."""
    if library is None or factor == 1.0 and all(grad.dtype == torch.float32 for grad in grads):
        return [scale_grad(grad, factor) for grad in grads]
    return library.scale(grads, factor)

"""What dispatchers are built from, the same for each; what the libraries of flex backends have in common."""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from arguments.mechanisms.placements import get_placement
from arguments.moe import MoEArgs
from moe_trainer.moe.dispatch.mxfp8_transport import HIGH_PRECISION, Mxfp8Transport
from moe_trainer.ops.permute import Permutation
from moe_trainer.parallel.state import ParallelState

MIN_NCCL_VERSION = (2, 30, 4)
"""Of libraries whose kernels communicate, as those of DeepEP 2; torch 2.11.0 brings 2.28.9."""
NCCL_INSTALL = "pip install --no-deps 'nvidia-nccl-cu13>=2.30.4'"


@dataclass(frozen=True)
class DispatchBufferSpec:
    """Sizes of a communication buffer; max_tokens is the maximum that a rank dispatches at a time.

    Attributes:
        high_priority: whether tokens are exchanged on a high-priority stream.
    """

    hidden_size: int
    max_tokens: int
    dtype: torch.dtype
    device: torch.device
    deterministic: bool = False
    high_priority: bool = False


@dataclass(frozen=True)
class DispatcherSettings:
    """Inputs of `make_dispatcher`, which the module of every dispatcher has.

    Attributes:
        permutation: local permutation.
        mxfp8: what is sent in 8 bits. The buffers are for bf16, which is also sent.
        typed: fields of the flags that the user typed.
    """

    ps: ParallelState
    moe: MoEArgs
    permutation: Permutation
    mxfp8: Mxfp8Transport = HIGH_PRECISION
    typed: Collection[str] = ()

    @property
    def num_experts(self) -> int:
        """Experts of the model and slots for those of other ranks."""
        ep = self.ps.ep.size
        return self.moe.expert_count + ep * get_placement(self.moe, ep).slots(self.moe)


@dataclass(frozen=True, kw_only=True)
class LibrarySettings(DispatcherSettings):
    """Inputs of `make_dispatcher` of a dispatcher that adapts a library, which has a communication buffer."""

    buffer: DispatchBufferSpec

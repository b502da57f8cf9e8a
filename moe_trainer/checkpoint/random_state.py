"""The random states of this process: Python, numpy, torch and CUDA, under Megatron's names."""

import random
from typing import Any

import numpy
import torch


def capture() -> dict[str, Any]:
    """A copy of every generator's state."""
    state: dict[str, Any] = {
        "random_rng_state": random.getstate(),
        "np_rng_state": numpy.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {},
    }
    if torch.cuda.is_available():
        state["cuda_rng_state"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Set every generator that the state has; a CPU run's state leaves CUDA's generator alone."""
    random.setstate(state["random_rng_state"])
    numpy.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"].cpu())
    cuda = state.get("cuda_rng_state")
    if torch.cuda.is_available() and cuda is not None and cuda.numel() == torch.cuda.get_rng_state().numel():
        torch.cuda.set_rng_state(cuda.cpu())

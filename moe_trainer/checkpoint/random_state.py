"""The random states of this process: Python, numpy, torch and CUDA under Megatron's names, and the model's own streams.

Random numbers make dropout masks, jitter and forced routing; data order and initial weights do not depend on them. A state
belongs to a place (pp, tp, position in dp x cp). Where a checkpoint of another layout has none for a place, its
streams start afresh from a seed that also holds the iteration, so that no mask of an earlier iteration comes
again: `restart`. The same is done everywhere else where a state is missing. Streams under a layer's global name (forced expert
biases) are the same on all ranks and move with the layer.
"""

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch

from moe_trainer.parallel.rng import name_seed
from moe_trainer.parallel.state import ParallelState

_GLOBAL_NAME = re.compile(r"^(decoder|mtp)\.")
_OWN = "moe_trainer_streams"

# of each chunk its own streams by name
Streams = Sequence[Mapping[str, torch.Generator]]


def streams_of(chunks: Iterable[Any]) -> Streams:
    """The streams that the chunks keep beside torch's global one."""
    return [chunk.generators() for chunk in chunks]


def capture(streams: Streams) -> dict[str, Any]:
    """A copy of every generator's state."""
    state: dict[str, Any] = {
        "random_rng_state": random.getstate(),
        "np_rng_state": numpy.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {},
        _OWN: [{name: generator.get_state().cpu() for name, generator in chunk.items()} for chunk in streams],
    }
    if torch.cuda.is_available():
        state["cuda_rng_state"] = torch.cuda.get_rng_state()
    return state


def restore(state: Mapping[str, Any], streams: Streams) -> None:
    """Set every generator that the state has; a CPU run's state leaves CUDA's generator alone."""
    random.setstate(state["random_rng_state"])
    numpy.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"].cpu())
    cuda = state.get("cuda_rng_state")
    if torch.cuda.is_available() and cuda is not None and cuda.numel() == torch.cuda.get_rng_state().numel():
        torch.cuda.set_rng_state(cuda.cpu())
    for chunk, saved in zip(streams, state.get(_OWN, ())):
        for name in chunk.keys() & saved.keys():
            if saved[name].numel() == chunk[name].get_state().numel():  # CPU and CUDA generators differ
                chunk[name].set_state(saved[name].cpu())


def restart(seed: int, iteration: int, ps: ParallelState, streams: Streams) -> None:
    """Begin new streams for this rank's place; tensor-parallel ranks share torch's global one, as at the start of a run."""
    place = (seed, "resumed", iteration, f"pp {ps.pp.rank}", f"dp_cp {ps.dp_cp.rank}")
    random.seed(name_seed(*place))
    numpy.random.seed(name_seed(*place) % 2**32)
    torch.manual_seed(name_seed(*place))
    for index, chunk in enumerate(streams):
        for name, generator in chunk.items():
            if _GLOBAL_NAME.match(name):
                generator.manual_seed(name_seed(seed, "resumed", iteration, name))
            else:
                generator.manual_seed(name_seed(*place, f"tp {ps.tp.rank}", index, name))


def restore_named(states: Iterable[Mapping[str, Any]], streams: Streams) -> None:
    """Set streams under global names from whichever of the states has them."""
    wanted = {name: generator for chunk in streams for name, generator in chunk.items() if _GLOBAL_NAME.match(name)}
    for state in states:
        for saved in state.get(_OWN, ()):
            for name in saved.keys() & wanted.keys():
                wanted[name].set_state(saved[name].cpu())


def is_ours(state: Mapping[str, Any]) -> bool:
    """Whether this program captured the state, not Megatron-LM."""
    return _OWN in state


def has_named(streams: Streams) -> bool:
    """Whether any stream has a global name."""
    return any(_GLOBAL_NAME.match(name) for chunk in streams for name in chunk)

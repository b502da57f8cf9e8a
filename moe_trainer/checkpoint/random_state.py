"""The random states of this process: Python, numpy, torch and CUDA under Megatron's names, and the model's own streams.

Dropout masks, jitter and forced routing are random; data order and initial weights do not depend on these states. A
state belongs to a position (pp, tp, rank in dp x cp). If a checkpoint of another mapping has none for it, or its
state is missing for another reason, `reseed` starts new streams from a seed that depends on the iteration, so that no
mask of an earlier iteration is repeated. Streams under a layer's global name (forced expert biases) are equal on all
ranks and move with the layer.

Megatron-LM keeps three more streams in its tracker and requires them in a state. A checkpoint has them under its names:
those that exist here as they are, the others as new streams. Without a GPU, all of them are states of CPU generators.
"""

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.parallel.rng import name_seed
from moe_trainer.parallel.state import ParallelState

_GLOBAL_NAME = re.compile(r"^(decoder|mtp)\.")
_NATIVE_KEY = "moe_trainer_streams"
_TENSOR_PARALLEL = "tensor_parallel"  # of a chunk's streams the one that Megatron-LM calls:
_MODEL_TRACKER = "model-parallel-rng"

# of each chunk its own streams by name
Streams = Sequence[Mapping[str, torch.Generator]]


def get_streams(chunks: Iterable[Any]) -> Streams:
    """Return the generators of every chunk, besides torch's global one."""
    return [chunk.generators() for chunk in chunks]


def capture(streams: Streams) -> dict[str, Any]:
    """Return a copy of every generator's state."""
    state: dict[str, Any] = {
        "random_rng_state": random.getstate(),
        "np_rng_state": numpy.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {},
        _NATIVE_KEY: [{name: generator.get_state().cpu() for name, generator in chunk.items()} for chunk in streams],
    }
    if torch.cuda.is_available():
        state["cuda_rng_state"] = torch.cuda.get_rng_state()
    return state


def capture_for_checkpoint(streams: Streams, ps: ParallelState) -> dict[str, Any]:
    """Return `capture` with what Megatron-LM's loader requires: an entry of a checkpoint's list of states."""
    state = capture(streams)
    shared = state.setdefault("cuda_rng_state", state["torch_rng_state"])
    own = [chunk[_TENSOR_PARALLEL] for chunk in streams if _TENSOR_PARALLEL in chunk]
    state["rng_tracker_states"] = {
        "data-parallel-rng": shared.clone(),
        _MODEL_TRACKER: own[0].get_state().cpu() if own else _fresh_state(shared, _MODEL_TRACKER, ps.tp.rank),
        "expert-parallel-rng": _fresh_state(shared, "expert-parallel-rng", ps.ep.rank, ps.etp.rank),
    }
    return state


def _fresh_state(shared: torch.Tensor, *name: str | int) -> torch.Tensor:
    """Return the state of a new stream, seeded by its name and the state of the shared generator."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.Generator(device).manual_seed(name_seed(0, shared.numpy().tobytes().hex(), *name)).get_state().cpu()


def restore(state: Mapping[str, Any], streams: Streams, source: Path | str = "memory") -> None:
    """Set every generator that the state has; the state of a CPU run does not change CUDA's generator.

    `source` names the origin of the state in errors.

    Raises:
        CheckpointError: if it is not a state of generators.
    """
    try:
        _restore(state, streams)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{source}: the random state is damaged ({type(error).__name__}: {error}); --no-load-rng resumes without it"
        ) from error


def _restore(state: Mapping[str, Any], streams: Streams) -> None:
    random.setstate(state["random_rng_state"])
    numpy.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"].cpu())
    cuda = state.get("cuda_rng_state")
    if torch.cuda.is_available() and cuda is not None and cuda.numel() == torch.cuda.get_rng_state().numel():
        torch.cuda.set_rng_state(cuda.cpu())
    for chunk, saved in zip(streams, state.get(_NATIVE_KEY, ())):
        for name in chunk.keys() & saved.keys():
            if saved[name].numel() == chunk[name].get_state().numel():  # CPU and CUDA generators differ
                chunk[name].set_state(saved[name].cpu())
    tracked = state.get("rng_tracker_states", {}).get(_MODEL_TRACKER)
    for chunk in streams if not is_native(state) and tracked is not None else ():
        if _TENSOR_PARALLEL in chunk and tracked.numel() == chunk[_TENSOR_PARALLEL].get_state().numel():
            chunk[_TENSOR_PARALLEL].set_state(tracked.cpu())


def reseed(seed: int, iteration: int, ps: ParallelState, streams: Streams) -> None:
    """Start new streams for this rank's position; tensor-parallel ranks share torch's global one."""
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
    """Set streams with global names from the first state that has them."""
    wanted = {name: generator for chunk in streams for name, generator in chunk.items() if _GLOBAL_NAME.match(name)}
    for state in states:
        for saved in state.get(_NATIVE_KEY, ()):
            for name in saved.keys() & wanted.keys():
                wanted[name].set_state(saved[name].cpu())


def is_native(state: Mapping[str, Any]) -> bool:
    """Return whether this program, not Megatron-LM, captured the state."""
    return _NATIVE_KEY in state


def has_named(streams: Streams) -> bool:
    """Return whether any stream has a global name."""
    return any(_GLOBAL_NAME.match(name) for chunk in streams for name in chunk)

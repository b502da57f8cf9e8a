"""Writing one step's gradients and routing to disk (`--dump-step N DIR`), under Megatron-Core's parameter names."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def dump_gradients(directory: str, iteration: int, gradients: Iterable[tuple[str, Tensor]], scale: float) -> Path:
    """Write `grads_step{N}.safetensors`: accumulated gradients, fp32, before clipping.

    Args: gradients (global name, tensor); scale multiplies each (1 / loss scale).
    Raises: ValueError if the file cannot be written.
    """
    path = _folder(directory) / f"grads_step{iteration}.safetensors"
    try:
        save_file({name: (tensor.float() * scale).cpu().contiguous() for name, tensor in gradients}, path)
    except SafetensorError as error:
        raise ValueError(f"cannot write {path}: {error}") from error
    return path


def dump_routing(directory: str, iteration: int, rank: int, records: Mapping[str, Sequence[Mapping[str, Tensor]]]) -> Path:
    """Write `routing_step{N}_rank{R}.npz`: logits, probs and map of every MoE layer and microbatch of this rank.

    Keys `routing/{layer}/mb{m}/{logits,probs,map}`; rows are tokens (s * micro batch size + b); `map` is packed with
    numpy.packbits over experts.
    Args: records by layer label ("layer1" counts from 1, "mtp1"), one entry per microbatch.
    """
    path = _folder(directory) / f"routing_step{iteration}_rank{rank}.npz"
    arrays = {}
    for label, microbatches in records.items():
        for index, record in enumerate(microbatches):
            key = f"routing/{label}/mb{index}"
            arrays[f"{key}/logits"] = record["logits"].float().cpu().numpy()
            arrays[f"{key}/probs"] = record["probs"].float().cpu().numpy()
            arrays[f"{key}/map"] = np.packbits(record["map"].bool().cpu().numpy(), axis=-1)
    np.savez(path, **arrays)
    return path


def _folder(directory: str) -> Path:
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--dump-step: cannot make the folder {directory}: {error.strerror}") from error
    return Path(directory)

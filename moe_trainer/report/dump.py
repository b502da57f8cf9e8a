"""Writing what an iteration computed to disk, under Megatron-Core's parameter names: of one iteration (`--dump-step N DIR`), or of
every so many (`Dumps`).

    SAVE/params/iter_0000010.safetensors                --save-params-interval: after the update; whole tensors, whatever the mapping
    SAVE/wgrads/iter_0000010.safetensors                --save-wgrads-interval: accumulated and reduced, fp32, before clipping; whole tensors
    SAVE/activations/iter_0000010/rank0.safetensors     --save-activations-interval: what goes in and out of linears, norms, embeddings, routers and
                                                        experts in the last microbatch, as this rank has it
    SAVE/dgrads/iter_0000010/rank0.safetensors          --save-dgrads-interval: gradients of those inputs, fp32, likewise
    SAVE/tokens_per_expert/rank0.jsonl                  --save-tokens-per-expert-interval: rows that arrived at this rank's experts, a line per
                                                        iteration and layer, a list per microbatch; in Megatron-LM's format

Ranks that hold copies of the same experts have the same part of the model; the first of them writes. The trace of routing has a
module of its own (routing_trace.py).

A step dumped by --dump-step is what its run is for: what cannot be written ends the run. The others are extras of a training,
which goes on without them: told once per kind, and tried again.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from arguments.moe import MoEArgs
from arguments.output import OutputArgs
from moe_trainer.report.continued import ContinuedFile, end_before
from moe_trainer.report.routing_trace import RoutingTrace, layer_of

logger = logging.getLogger(__name__)

TRACE = "routing trace"


class Dumps:
    """What one rank dumps in which iterations, and where."""

    def __init__(self, output: OutputArgs | None = None, moe: MoEArgs | None = None, rank: int = 0):
        """Without arguments nothing is ever due."""
        self._folder, self._rank = Path(output.save) if output is not None and output.save else None, rank
        self._intervals = {} if self._folder is None else {
            "params": output.save_params_interval, "wgrads": output.save_wgrads_interval, "activations": output.save_activations_interval,
            "dgrads": output.save_dgrads_interval, "tokens_per_expert": output.save_tokens_per_expert_interval if moe.num_experts else None,
        }
        self.trace = RoutingTrace(moe, rank) if moe is not None and moe.num_experts and moe.moe_routing_trace_path else None
        self._counts: ContinuedFile | None = None
        self._told: set[str] = set()

    def due(self, iteration: int) -> frozenset[str]:
        """What is to be dumped of an iteration, by the names of the folders; TRACE for the trace of routing."""
        found = {name for name, interval in self._intervals.items() if interval and iteration % interval == 0}
        return frozenset(found | {TRACE} if self.trace is not None and self.trace.open else found)

    @contextmanager
    def going_on(self, what: str) -> Iterator[None]:
        """Go on where something of this kind cannot be written, and tell it the first time."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            if what not in self._told:
                logger.warning("%s cannot be written (%s); the training goes on without, and tries again when they are due",
                               what, getattr(error, "strerror", None) or error)
            self._told.add(what)

    def whole_file(self, what: str, iteration: int) -> Path:
        """Where one file for all ranks goes; makes its folder. Raises: OSError."""
        folder = self._folder / what
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"iter_{iteration:07d}.safetensors"

    def write_own(self, what: str, iteration: int, tensors: Mapping[str, Tensor], told: Mapping[str, object]) -> None:
        """Write this rank's tensors. told: what the file says of them besides. Raises: OSError, SafetensorError."""
        folder = self._folder / what / f"iter_{iteration:07d}"
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), folder / f"rank{self._rank}.safetensors", {name: str(value) for name, value in told.items()})

    def write_counts(self, iteration: int, counts: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Add lines to tokens_per_expert. counts: per "decoder.layers.3..." a list per microbatch. Raises: OSError."""
        if self._counts is None:
            path = self._folder / "tokens_per_expert" / f"rank{self._rank}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._counts = ContinuedFile(path, end_before(path, "iter", iteration))
        lines = []
        for name, lists in counts.items():
            block, number = layer_of(name)
            place = {"layer": number} if block == "decoder" else {"mtp_idx": number, "layer": 0}
            lines.append(json.dumps({"iter": iteration, "block": block, **place, "tpe": lists}) + "\n")
        self._counts.append("".join(lines).encode())


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
        raise ValueError(f"cannot make the folder {directory}: {error.strerror}") from error
    return Path(directory)

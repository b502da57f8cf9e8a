"""Files of the tensors of an iteration, under Megatron-Core's names (--dump-step, --save-...-interval).

    SAVE/params/iter_0000010.safetensors              --save-params-interval: full tensors after the update
    SAVE/wgrads/iter_0000010.safetensors              --save-wgrads-interval: full reduced gradients, fp32, not clipped
    SAVE/activations/iter_0000010/rank0.safetensors   --save-activations-interval: inputs and outputs of linears, norms,
                                                      embeddings, routers and experts of this rank, last microbatch
    SAVE/dgrads/iter_0000010/rank0.safetensors        --save-dgrads-interval: gradients of those inputs, fp32, likewise
    SAVE/tokens_per_expert/rank0.jsonl                --save-tokens-per-expert-interval: tokens of this rank's experts,
                                                      a line per iteration and layer, a list per microbatch

Of ranks with copies of the same experts only the first writes. An I/O failure of --dump-step ends the run. The other
dumps are optional: the first failure of each kind is logged, and they are tried again.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from arguments.moe import MoEArgs
from arguments.output import OutputArgs
from moe_trainer.debug.module_tracer import is_floating, tap_gradients
from moe_trainer.debug.routing_trace import RoutingTrace, parse_layer
from moe_trainer.io import ResumableFile, resume_offset

logger = logging.getLogger(__name__)

TRACE = "routing trace"


class TensorRecorder:
    """Tensors of modules on the host. Every microbatch overwrites the previous one, as in Megatron-LM.

    Attributes:
        activations: "NAME/input0", "NAME/output0", ... of every floating-point positional input and output.
        input_grads: "NAME/input0", ... of the inputs that require a gradient, fp32.
    """

    def __init__(self) -> None:
        self.activations: dict[str, Tensor] = {}
        self.input_grads: dict[str, Tensor] = {}

    def record_activations(self, name: str, inputs: tuple, output: object) -> None:
        for kind, values in (("input", inputs), ("output", output if isinstance(output, tuple) else (output,))):
            for index, value in enumerate(values):
                if is_floating(value):
                    self.activations[f"{name}/{kind}{index}"] = value.detach().to("cpu", copy=True).contiguous()

    def record_input_grads(self, name: str, inputs: tuple) -> tuple:
        """Return the inputs of a module, whose gradients are recorded when backward reaches them."""

        def record(index: int, grad: Tensor) -> None:
            self.input_grads[f"{name}/input{index}"] = grad.detach().to("cpu", torch.float32, copy=True).contiguous()

        return tap_gradients(inputs, record)


class Dumps:
    """What one rank dumps in which iterations, and where. Without arguments nothing is ever due."""

    def __init__(self, output: OutputArgs | None = None, moe: MoEArgs | None = None, rank: int = 0):
        self._rank = rank
        self._warned: set[str] = set()
        self._counts: ResumableFile | None = None
        self._intervals: dict[str, int | None] = {}
        if output is not None and output.save:
            self._folder = Path(output.save)
            self._intervals = {
                "params": output.save_params_interval,
                "wgrads": output.save_wgrads_interval,
                "activations": output.save_activations_interval,
                "dgrads": output.save_dgrads_interval,
                "tokens_per_expert": output.save_tokens_per_expert_interval if moe and moe.num_experts else None,
            }
        self.trace: RoutingTrace | None = None
        if moe is not None and moe.num_experts and moe.moe_routing_trace_path:
            self.trace = RoutingTrace(moe, rank)

    def due(self, iteration: int) -> frozenset[str]:
        """Return the directory names of the dumps that are due, and TRACE for the routing trace."""
        due = {name for name, interval in self._intervals.items() if interval and iteration % interval == 0}
        return frozenset(due | {TRACE} if self.trace is not None and self.trace.open else due)

    @contextmanager
    def warn_once_on_error(self, what: str) -> Iterator[None]:
        """Continue after an I/O failure, and warn the first time for each kind of dump."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            if what not in self._warned:
                logger.warning(
                    "%s cannot be written (%s); the training continues without them and retries when they are due",
                    what,
                    getattr(error, "strerror", None) or error,
                )
            self._warned.add(what)

    def shared_file(self, what: str, iteration: int) -> Path:
        """Return the path of one file for all ranks; create its folder."""
        folder = self._folder / what
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"iter_{iteration:07d}.safetensors"

    def write_rank_tensors(
        self, what: str, iteration: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, object]
    ) -> None:
        path = self._folder / what / f"iter_{iteration:07d}" / f"rank{self._rank}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), path, {name: str(value) for name, value in metadata.items()})

    def write_counts(self, iteration: int, counts: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Append to tokens_per_expert. `counts` has a list per microbatch for each "decoder.layers.3..."."""
        if self._counts is None:
            path = self._folder / "tokens_per_expert" / f"rank{self._rank}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._counts = ResumableFile(path, resume_offset(path, "iter", iteration))
        lines = []
        for name, lists in counts.items():
            block, layer, depth = parse_layer(name)
            place = {"layer": layer} if depth is None else {"mtp_idx": depth, "layer": layer}
            lines.append(json.dumps({"iter": iteration, "block": block, **place, "tpe": lists}) + "\n")
        self._counts.append("".join(lines).encode())


def dump_gradients(directory: str, iteration: int, gradients: Iterable[tuple[str, Tensor]], scale: float) -> Path:
    """Write `grads_step{N}.safetensors`: accumulated gradients times `scale` (1 / loss scale), fp32, before clipping.

    Raises:
        ValueError: if the file cannot be written.
    """
    path = _make_directory(directory) / f"grads_step{iteration}.safetensors"
    try:
        save_file({name: (tensor.float() * scale).cpu().contiguous() for name, tensor in gradients}, path)
    except SafetensorError as error:
        raise ValueError(f"cannot write {path}: {error}") from error
    return path


def dump_routing(
    directory: str, iteration: int, rank: int, records: Mapping[str, Sequence[Mapping[str, Tensor]]]
) -> Path:
    """Write `routing_step{N}_rank{R}.npz`: logits, probs and map of every MoE layer and microbatch of this rank.

    Keys are `routing/{layer}/mb{m}/{logits,probs,map}`; token s * micro_batch_size + b; `map` is packed with
    numpy.packbits over experts. `records`: "layer1" (counts from 1), "mtp1" or "mtp1.2" -> one entry per microbatch.
    """
    path = _make_directory(directory) / f"routing_step{iteration}_rank{rank}.npz"
    arrays: dict[str, Any] = {}
    for label, microbatches in records.items():
        for index, record in enumerate(microbatches):
            key = f"routing/{label}/mb{index}"
            arrays |= {f"{key}/{name}": record[name].float().cpu().numpy() for name in ("logits", "probs")}
            arrays[f"{key}/map"] = np.packbits(record["map"].bool().cpu().numpy(), axis=-1)
    np.savez(path, **arrays)
    return path


def _make_directory(directory: str) -> Path:
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {directory}: {error.strerror}") from error
    return Path(directory)

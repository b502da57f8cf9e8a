"""--moe-routing-trace-path: the experts of every token, in the files of Megatron-LM's router trace.

`RoutingTraceReader` reads them back for --moe-routing-replay-path. Every rank writes the tokens that it routes:

    router_trace_rank{R}.jsonl    a line per iteration, layer and microbatch: "step" (iterations from 0), "stage"
                                  ("pre_dispatch"), "block" ("decoder" or "mtp"), "layer" (from 0 in its block,
                                  or in a depth of mtp), "mtp_idx" (the depth; mtp only), "rank", "num_tokens", "topk",
                                  "microbatch" (from 0), "top_indices" (per token its experts, ascending; -1 where one
                                  was dropped)
    logits_rank{R}.bin            --moe-routing-trace-capture-logits: bfloat16, located by a line's "logit_offset",
                                  "logit_bytes", "logit_shape"
    hidden_states_rank{R}.bin     --moe-routing-trace-capture-hidden-states: the router's input, likewise "hs_..."
    router_state_rank{R}.pt       --moe-routing-trace-dump-weights: per layer the weight, expert bias, score function
                                  and top-k at the start of the trace (mtp under "mtp.N", layer M of
                                  a hybrid depth under "mtp.N.M")

Format: NVIDIA/Megatron-LM pull request 5220. Differences: layers are numbered over all pipeline stages, a resumed run
continues the files from its iteration, and dropped tokens are marked.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arguments.moe import MoEArgs
from arguments.regular_file import regular_file
from moe_trainer.errors import UserError
from moe_trainer.io import ResumableFile, resume_offset

_SIDECARS = (("logits", "logit", "logits"), ("hidden_states", "hs", "hidden"))
"""(File, prefix in a line, name in a record)."""
TRACE_FILES = "router_trace_rank*.jsonl"


@dataclass(frozen=True)
class TracedRouter:
    """Records of a router in one iteration.

    Attributes:
        name: global name.
        records: per microbatch "logits" [T, E], "map" [T, E] and, if enabled, "hidden" [T, H], on the host.
        state: content of router_state_rank{R}.pt.
    """

    name: str
    records: Sequence[Mapping[str, Tensor]]
    state: Mapping[str, Any]


class RoutingTrace:
    """Writer of the trace of one rank."""

    def __init__(self, moe: MoEArgs, rank: int):
        self._folder, self._rank = Path(moe.moe_routing_trace_path or ""), rank
        self.hidden, self._weights = moe.moe_routing_trace_capture_hidden_states, moe.moe_routing_trace_dump_weights
        is_captured = {"logits": moe.moe_routing_trace_capture_logits, "hidden": self.hidden}
        self._topk, self._num_left = moe.moe_router_topk, moe.moe_routing_trace_max_training_iters
        self._sidecars = [sidecar for sidecar in _SIDECARS if is_captured[sidecar[2]]]
        self._files: dict[str, ResumableFile] = {}

    @property
    def open(self) -> bool:
        """Whether there are iterations left to trace."""
        return self._num_left is None or self._num_left > 0

    def write(self, iteration: int, routers: Sequence[TracedRouter]) -> None:
        """Append an iteration, counted from 1."""
        step = iteration - 1
        if self._num_left is not None:
            self._num_left -= 1
        if not self._files:
            self._begin(step, routers)
        lines = [json.dumps(line) + "\n" for router in routers for line in self._lines(step, router)]
        self._files["trace"].append("".join(lines).encode())

    def _begin(self, step: int, routers: Sequence[TracedRouter]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"router_trace_rank{self._rank}.jsonl"
        ends = dict.fromkeys((file for file, _, _ in _SIDECARS), 0)

        def on_kept(record: dict[str, Any]) -> None:
            for file, prefix, _ in _SIDECARS:
                if f"{prefix}_offset" in record:
                    ends[file] = record[f"{prefix}_offset"] + record[f"{prefix}_bytes"]

        end = resume_offset(trace, "step", step, on_kept)
        if self._weights:
            content = io.BytesIO()  # torch.save reports a full disk without the reason
            torch.save({_layer_key(router.name): _copy_to_host(router.state) for router in routers}, content)
            (self._folder / f"router_state_rank{self._rank}.pt").write_bytes(content.getvalue())
        self._files = {
            file: ResumableFile(self._folder / f"{file}_rank{self._rank}.bin", ends[file])
            for file, _, _ in self._sidecars
        }
        self._files["trace"] = ResumableFile(trace, end)

    def _lines(self, step: int, router: TracedRouter) -> Iterator[dict[str, Any]]:
        place = parse_layer(router.name)
        for microbatch, record in enumerate(router.records):
            line = {
                "step": step,
                "stage": "pre_dispatch",
                "block": place.block,
                "layer": place.layer,
                "rank": self._rank,
                "num_tokens": record["map"].shape[0],
                "topk": self._topk,
                "microbatch": microbatch,
            }
            if place.mtp_idx is not None:
                line["mtp_idx"] = place.mtp_idx
            for file, prefix, name in self._sidecars:
                tensor = record[name].bfloat16().contiguous()
                data = tensor.view(torch.int16).numpy().tobytes()
                line |= {
                    f"{prefix}_offset": self._files[file].append(data),
                    f"{prefix}_bytes": len(data),
                    f"{prefix}_shape": list(tensor.shape),
                }
            yield line | {"top_indices": list_chosen_experts(record["map"], self._topk).tolist()}


def list_chosen_experts(map_TE: Tensor, topk: int) -> Tensor:
    """Return the experts of every token in ascending order, padded with -1; more than topk if padding added experts."""
    width = max(topk, int(map_TE.sum(1).max())) if map_TE.numel() else topk
    is_chosen_TE, expert_TE = map_TE.int().sort(dim=1, descending=True, stable=True)
    return expert_TE.masked_fill(is_chosen_TE == 0, -1)[:, :width]


class LayerPlace(NamedTuple):
    """The place of a layer in a model, as a routing trace has it.

    Attributes:
        block: "decoder" or "mtp".
        layer: from 0 in the decoder, or in a depth of multi-token prediction.
        mtp_idx: the depth, from 0.
    """

    block: str
    layer: int
    mtp_idx: int | None = None

    def __str__(self) -> str:
        inside = f" depth {self.mtp_idx}" if self.mtp_idx is not None else ""
        return f"{self.block}{inside} layer {self.layer}"


def parse_layer(name: str) -> LayerPlace:
    """Return the place of a module: decoder layer 3 for "decoder.layers.3.mlp.router"."""
    block, _, number, *rest = name.split(".")
    if block == "decoder":
        return LayerPlace(block, int(number))
    # a depth of a hybrid model has a list of layers
    return LayerPlace(block, int(rest[2]) if rest[1:2] == ["layers"] else 0, int(number))


def _copy_to_host(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().to("cpu", torch.float32, copy=True) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def _layer_key(name: str) -> int | str:
    block, layer, depth = parse_layer(name)
    return layer if depth is None else f"{block}.{depth}" + (f".{layer}" if layer else "")


def _read_line(text: str) -> dict[str, Any]:
    line = json.loads(text)
    numbers = (line["step"], line["layer"], line["microbatch"], line["mtp_idx"] if line["block"] == "mtp" else 0)
    if not all(isinstance(number, int) for number in numbers) or not isinstance(line["top_indices"], list):
        raise TypeError("a value of another type")
    return line


class RoutingTraceReader:
    """Reader of the experts that one rank traced; for a run with the same ranks, mapping and batches.

    Iterations are read in order, one at a time, or again from the beginning of the file.

    Args:
        folder: of the trace.
        rank: this rank.
        world_size: number of ranks, which the trace must have too.
        topk: experts of a token.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, topk: int):
        self.path, self._topk = folder / f"router_trace_rank{rank}.jsonl", topk
        numbers = [int(path.stem.removeprefix("router_trace_rank")) for path in folder.glob(TRACE_FILES)]
        if numbers and max(numbers) >= world_size:
            raise UserError(f"{folder} is the trace of {max(numbers) + 1} ranks, and this run has {world_size}")
        self._step: int | None = None
        self._lines: Iterator[dict[str, Any]] = iter(())
        self._next: dict[str, Any] | None = None
        self._experts: dict[tuple[LayerPlace, int], Tensor] = {}

    def experts(self, iteration: int, router: str, microbatch: int) -> Tensor:
        """Return the experts [T, K] of a router's tokens; iterations count from 1, microbatches from 0.

        Raises:
            UserError: naming the file and what it lacks.
        """
        if self._step != iteration - 1:
            self._read(iteration - 1)
        layer = parse_layer(router)
        found = self._experts.get((layer, microbatch))
        if found is None:
            raise UserError(
                f"{self.path} has no experts of iteration {iteration}, {layer}, microbatch {microbatch + 1}; a trace "
                "can be replayed by a run with the same layers, parallel sizes and batch sizes"
            )
        return found

    def _read(self, step: int) -> None:
        if self._step is None or step < self._step:
            self._lines = self._parse()
            self._next = next(self._lines, None)
        self._step, self._experts = step, {}
        while self._next is not None and self._next["step"] <= step:
            line = self._next
            if line["step"] == step:
                depth = line["mtp_idx"] if line["block"] == "mtp" else None
                place = LayerPlace(line["block"], line["layer"], depth)
                self._experts[place, line["microbatch"]] = self._to_tensor(line)
            self._next = next(self._lines, None)

    def _parse(self) -> Iterator[dict[str, Any]]:
        try:
            with open(regular_file(self.path), encoding="utf-8", errors="replace") as file:
                for number, text in enumerate(file, 1):
                    try:
                        yield _read_line(text)
                    except (ValueError, LookupError, TypeError, RecursionError):
                        raise UserError(f"{self.path}, line {number}: this is no line of a routing trace") from None
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be read ({error.strerror}); the trace of another number of ranks or another "
                "mapping cannot be replayed"
            ) from error

    def _to_tensor(self, line: dict[str, Any]) -> Tensor:
        where = f"{self.path}: iteration {line['step'] + 1}, {line['block']} layer {line['layer']}"
        try:
            experts_TK = torch.tensor(line["top_indices"], dtype=torch.int64)
        except (ValueError, TypeError, RuntimeError):  # RuntimeError: a number of more than 64 bits
            raise UserError(f"{where}: the tokens have different numbers of experts, or no integers") from None
        if experts_TK.dim() != 2 or experts_TK.shape[1] != self._topk:
            raise UserError(
                f"{where}: the shape of the experts is {list(experts_TK.shape)}; [tokens, {self._topk}] is needed "
                f"(--moe-router-topk {self._topk}, without --moe-pad-expert-input-to-capacity)"
            )
        if (experts_TK < 0).any():
            raise UserError(
                f"{where}: tokens were dropped (--moe-expert-capacity-factor), and the trace does not have the experts "
                "that they had chosen; trace a run without a capacity"
            )
        return experts_TK

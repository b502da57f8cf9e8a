"""Tensors recorded in one iteration: --dump-step, the --save-...-interval dumps, the routing trace.

`StepDumps` attaches to routers, experts and modules before the first microbatch, and writes when the gradients are
reduced (`write`) and when the weights are updated (`write_params`). If nothing is due, it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from moe_trainer.debug.module_tracer import ModuleTracer
from moe_trainer.debug.routing_trace import RoutingTrace, TracedRouter, parse_layer
from moe_trainer.debug.tensor_dump import TRACE, TensorRecorder, dump_gradients, dump_routing
from moe_trainer.model.module_names import named_experts, named_modules
from moe_trainer.model.weights import export_named_weights, gather_named_tensors, get_main_grad
from moe_trainer.parallel.coordination import drain_on_exit, raise_on_all_ranks
from moe_trainer.training.export import write_weights
from moe_trainer.training.run import TrainRun

_TENSORS = frozenset({"activations", "dgrads"})
_RECORDED = frozenset({*_TENSORS, "tokens_per_expert", TRACE})


class CpuRecordList(list):
    """List of router records, copied to the CPU on append so that a traced iteration does not fill the device."""

    def append(self, record: dict[str, Tensor]) -> None:
        super().append({name: tensor.detach().to("cpu", copy=True) for name, tensor in record.items()})


class StepDumps:
    """Recorder of one iteration, which starts when this is constructed. `records`: intermediate results are read."""

    def __init__(self, run: TrainRun, iteration: int):
        output = run.args.output
        self._run, self._iteration, self._due = run, iteration, run.dumps.due(iteration)
        number, folder = output.dump_step or ("0", "")  # an iteration's number, which is at least 1, and the folder
        self._folder = folder if int(number) == iteration else None  # of --dump-step in this iteration
        self.records = self._folder is not None or bool(self._due & _RECORDED)
        self._routers: list[tuple[Any, CpuRecordList]] = []
        self._tracer = ModuleTracer()
        self._counts: dict[str, list[list[int]]] = {}
        self._tensors = TensorRecorder()
        if self._folder is not None or TRACE in self._due:
            self._trace_routers()
        if "tokens_per_expert" in self._due:
            self._count_expert_tokens()
        if self._due & _TENSORS:
            for name, module in named_modules(run.chunks):
                if "activations" in self._due:
                    self._tracer.on_output(module, partial(self._tensors.record_activations, name))
                if "dgrads" in self._due:
                    self._tracer.on_inputs(module, partial(self._tensors.record_input_grads, name))

    def _trace_routers(self) -> None:
        trace = self._run.dumps.trace
        hidden = TRACE in self._due and trace is not None and trace.hidden
        self._routers = [(layer.router, CpuRecordList()) for chunk in self._run.chunks for layer in chunk.moe_layers()]
        for router, records in self._routers:
            router.recorder = records
            if hidden:
                self._tracer.on_output(router, partial(_keep_hidden, records), router.activations)

    def _count_expert_tokens(self) -> None:
        for name, module in named_experts(self._run.chunks):
            self._counts[name] = []
            self._tracer.on_inputs(module, partial(_count, self._counts[name], module), module.activations)

    def on_retry(self) -> None:
        """Discard the records; the iteration is evaluated again."""
        for records in (*(records for _, records in self._routers), *self._counts.values()):
            records.clear()

    def write(self, tokens: float) -> None:
        """Stop recording and write everything known when the gradients are reduced. Collective over the world.

        `tokens` of the global batch divide the gradients of a summed loss.
        """
        for router, _ in self._routers:
            router.recorder = None
        self._tracer.stop()
        if self._folder is not None:
            write_step(
                self._run, self._folder, self._iteration, {router.name: records for router, records in self._routers}
            )
        if "wgrads" in self._due:
            self._write_full_tensors("wgrads", gather_unscaled_grads(self._run))
        trace = self._run.dumps.trace
        if TRACE in self._due and trace is not None:
            self._write_trace(trace)
        if self._counts:
            with self._run.dumps.warn_once_on_error("--save-tokens-per-expert-interval"):
                self._run.dumps.write_counts(self._iteration, self._counts)
        if self._due & _TENSORS:
            self._write_tensors(tokens)

    def write_params(self) -> None:
        """Write the updated weights. Collective over the world."""
        if "params" in self._due:
            self._run.wait_params()
            self._write_full_tensors("params", export_named_weights(self._run.chunks, self._run.ps))

    def _write_full_tensors(self, what: str, tensors: Iterator[tuple[str, Tensor]]) -> None:
        dumps = self._run.dumps
        with drain_on_exit(tensors):
            if self._run.ps.world.rank == 0:
                with dumps.warn_once_on_error(f"--save-{what}-interval"):
                    write_weights(tensors, str(dumps.shared_file(what, self._iteration)))

    def _write_tensors(self, tokens: float) -> None:
        run, dumps, ps = self._run, self._run.dumps, self._run.ps
        if ps.edp.rank != 0:
            return
        groups = ((name, getattr(ps, name)) for name in ("tp", "cp", "pp", "dp", "ep", "etp"))
        metadata = {"iteration": self._iteration, **{name: f"{group.rank} of {group.size}" for name, group in groups}}
        scale = 1.0 / run.optimizer.loss_scale / (max(tokens, 1.0) if run.per_token else 1.0)
        grads = {name: grad * scale for name, grad in self._tensors.input_grads.items()}
        for what, tensors in (("activations", self._tensors.activations), ("dgrads", grads)):
            if what in self._due:
                with dumps.warn_once_on_error(f"--save-{what}-interval"):
                    dumps.write_rank_tensors(what, self._iteration, tensors, metadata)

    def _write_trace(self, trace: RoutingTrace) -> None:
        score = self._run.args.moe.moe_router_score_function
        with self._run.dumps.warn_once_on_error("--moe-routing-trace-path"):
            routers = []
            for router, records in self._routers:
                tensors = {"weight": router.weight, "expert_bias": router.expert_bias}
                routers.append(
                    TracedRouter(router.name, records, {**tensors, "score_function": score, "topk": router.topk})
                )
            trace.write(self._iteration, routers)


def gather_unscaled_grads(run: TrainRun) -> Iterator[tuple[str, Tensor]]:
    """Yield the full reduced gradients, fp32, divided by the loss scale; on rank 0 only. Collective over the world."""
    run.grads.gather()
    scale = 1.0 / run.optimizer.loss_scale
    gradients = gather_named_tensors(run.chunks, run.ps, get_main_grad)
    return ((name, tensor.float() * scale) for name, tensor in gradients)


def _keep_hidden(records: CpuRecordList, inputs: tuple, output: Any) -> None:
    x_SBH = inputs[0]
    records[-1]["hidden"] = x_SBH.detach().reshape(-1, x_SBH.shape[-1]).to("cpu", copy=True)


def _count(counts: list[list[int]], experts: Any, inputs: tuple) -> None:
    counts.append([int(tokens) for tokens in inputs[2][: experts.linear_fc1.weight.shape[0]]])


def write_step(
    run: TrainRun, directory: str, iteration: int, records: Mapping[str, Sequence[Mapping[str, Tensor]]]
) -> None:
    """Write gradients and routing of an iteration to a folder (--dump-step). Collective over the world.

    `records` are keyed by the router's name.

    Raises:
        UserError: on every rank, if a file cannot be written.
    """
    with raise_on_all_ranks(run.ps.world, "--dump-step"):
        if records:
            by_label = {_label(name): record for name, record in records.items()}
            dump_routing(directory, iteration, run.runtime.launch_env.rank, by_label)
    run.grads.gather()
    gradients = gather_named_tensors(run.chunks, run.ps, get_main_grad)
    with raise_on_all_ranks(run.ps.world, "--dump-step"), drain_on_exit(gradients):
        if run.runtime.launch_env.rank == 0:
            dump_gradients(directory, iteration, gradients, 1.0 / run.optimizer.loss_scale)


def _label(name: str) -> str:
    """Return "layer4" for "decoder.layers.3.mlp.router", "mtp1" for "mtp.layers.0....", "mtp1.2" for its layer 1."""
    block, layer, depth = parse_layer(name)
    return f"layer{layer + 1}" if depth is None else f"{block}{depth + 1}" + (f".{layer + 1}" if layer else "")

"""What is recorded of an iteration and dumped: --dump-step, the --save-...-interval dumps, the trace of routing.

`StepDumps` stands beside one iteration: it hangs itself on routers, experts and modules before the first microbatch, and writes when the
gradients are reduced (`write`) and when the weights are updated (`write_params`). Where nothing is due it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from moe_trainer.model.transformer import Transformer
from moe_trainer.model.weights import export_named_weights, gather_named, gradient_of
from moe_trainer.moe.experts import Experts
from moe_trainer.moe.router import TopKRouter
from moe_trainer.parallel.params import info_of
from moe_trainer.report.dump import TRACE, dump_gradients, dump_routing
from moe_trainer.report.routing_trace import TracedRouter, layer_of
from moe_trainer.report.tensor_recorder import TensorRecorder
from moe_trainer.run import Run
from moe_trainer.training.agreement import sent_by_all, written_by_all
from moe_trainer.training.export import write_weights

_RECORDED = frozenset({"activations", "dgrads", "tokens_per_expert", TRACE})


class OnHost(list):
    """A router's records, brought to the host as they come: a traced iteration must not fill the device."""

    def append(self, record: dict[str, Tensor]) -> None:
        super().append({name: tensor.detach().to("cpu", copy=True) for name, tensor in record.items()})


class StepDumps:
    """Records one iteration of a run, which begins when this is made. records: is there anything that a graph could not give?"""

    def __init__(self, run: Run, iteration: int):
        output = run.args.output
        self._run, self._iteration, self._due = run, iteration, run.dumps.due(iteration)
        self._step = output.dump_step is not None and int(output.dump_step[0]) == iteration
        self.records = self._step or bool(self._due & _RECORDED)
        self._routers: list[tuple[TopKRouter, OnHost]] = []
        self._hooks: list[Any] = []
        self._counts: dict[str, list[list[int]]] = {}
        self._tensors: TensorRecorder | None = None
        if self._step or TRACE in self._due:
            self._watch_routers()
        if "tokens_per_expert" in self._due:
            self._watch_experts()
        if self._due & {"activations", "dgrads"}:
            self._tensors = TensorRecorder(named_modules(run.chunks), activations="activations" in self._due, input_grads="dgrads" in self._due)

    def _watch_routers(self) -> None:
        hidden = TRACE in self._due and self._run.dumps.trace.hidden
        self._routers = [(layer.router, OnHost()) for chunk in self._run.chunks for layer in chunk.moe_layers()]
        for router, records in self._routers:
            router.recorder = records
            if hidden:
                self._hooks.append(router.register_forward_hook(partial(_keep_hidden, records)))

    def _watch_experts(self) -> None:
        for name, module in named_modules(self._run.chunks):
            if isinstance(module, Experts):
                self._counts[name] = []
                self._hooks.append(module.register_forward_pre_hook(partial(_count, self._counts[name])))

    def again(self) -> None:
        """The iteration is evaluated once more: forget what was recorded of it."""
        for records in (*(records for _, records in self._routers), *self._counts.values()):
            records.clear()

    def write(self, tokens: float) -> None:
        """Stop recording and write what is known when the gradients are reduced. tokens: of the global batch, which gradients of a sum of
        losses are divided by. Collective over the world."""
        for router, _ in self._routers:
            router.recorder = None
        for hook in self._hooks:
            hook.remove()
        if self._step:
            write_step(self._run, self._iteration, {router.name: records for router, records in self._routers})
        if "wgrads" in self._due:
            run, scale = self._run, 1.0 / self._run.optimizer.loss_scale
            run.grads.gather()
            gradients = gather_named(run.chunks, run.ps, gradient_of)
            self._write_whole("wgrads", ((name, tensor.float() * scale) for name, tensor in gradients))
        if TRACE in self._due:
            self._trace()
        if self._counts:
            with self._run.dumps.going_on("--save-tokens-per-expert-interval"):
                self._run.dumps.write_counts(self._iteration, self._counts)
        if self._tensors is not None:
            self._tensors.stop()
            self._write_tensors(tokens)

    def write_params(self) -> None:
        """Write the weights, when they are updated. Collective over the world."""
        if "params" in self._due:
            self._run.optimizer.wait_params()
            self._write_whole("params", export_named_weights(self._run.chunks, self._run.ps))

    def _write_whole(self, what: str, tensors: Iterator[tuple[str, Tensor]]) -> None:
        dumps = self._run.dumps
        with sent_by_all(tensors):
            if self._run.ps.world.rank == 0:
                with dumps.going_on(f"--save-{what}-interval"):
                    write_weights(tensors, str(dumps.whole_file(what, self._iteration)))

    def _write_tensors(self, tokens: float) -> None:
        run, dumps, ps = self._run, self._run.dumps, self._run.ps
        if ps.edp.rank != 0:
            return
        told = {"iteration": self._iteration, **{name: f"{group.rank} of {group.size}" for name, group in (
            ("tp", ps.tp), ("cp", ps.cp), ("pp", ps.pp), ("dp", ps.dp), ("ep", ps.ep), ("etp", ps.etp))}}
        scale = 1.0 / run.optimizer.loss_scale / (max(tokens, 1.0) if run.per_token else 1.0)
        for what, tensors, factor in (("activations", self._tensors.activations, None), ("dgrads", self._tensors.input_grads, scale)):
            if what in self._due:
                with dumps.going_on(f"--save-{what}-interval"):
                    dumps.write_own(what, self._iteration, {name: tensor if factor is None else tensor * factor for name, tensor in tensors.items()},
                                    told)

    def _trace(self) -> None:
        score = self._run.args.moe.moe_router_score_function
        with self._run.dumps.going_on("--moe-routing-trace-path"):
            self._run.dumps.trace.write(self._iteration, [
                TracedRouter(router.name, records, {
                    "weight": router.weight, "expert_bias": router.expert_bias, "score_function": score, "topk": router.topk})
                for router, records in self._routers])


def named_modules(chunks: Iterable[Transformer]) -> Iterator[tuple[str, nn.Module]]:
    """Every module that has parameters of its own, under its Megatron-Core name; the experts of a layer as one."""
    for chunk in chunks:
        for module in chunk.modules():
            own = next(module.parameters(recurse=False), None)
            if isinstance(module, Experts):
                yield info_of(module.linear_fc1.weight).names[0].partition(".local_experts.")[0], module
            elif own is not None and not info_of(own).stacked:
                yield info_of(own).names[0].rpartition(".")[0], module


def _keep_hidden(records: OnHost, router: TopKRouter, inputs: tuple, output: Any) -> None:
    if not router.activations.replaying:
        x_SBH = inputs[0]
        records[-1]["hidden"] = x_SBH.detach().reshape(-1, x_SBH.shape[-1]).to("cpu", copy=True)


def _count(counts: list[list[int]], experts: Experts, inputs: tuple) -> None:
    if not experts.activations.replaying:
        counts.append([int(rows) for rows in inputs[2][:experts.linear_fc1.weight.shape[0]]])


def write_step(run: Run, iteration: int, records: Mapping[str, Sequence[Mapping[str, Tensor]]]) -> None:
    """Write an iteration's gradients and routing (--dump-step). records: by the router's name. Collective over the world.

    Raises: InputError on every rank when a file cannot be written.
    """
    directory = run.args.output.dump_step[1]
    with written_by_all(run, "--dump-step"):
        if records:
            dump_routing(directory, iteration, run.runtime.place.rank, {_label(name): record for name, record in records.items()})
    run.grads.gather()
    gradients = gather_named(run.chunks, run.ps, gradient_of)
    with written_by_all(run, "--dump-step"), sent_by_all(gradients):
        if run.runtime.place.rank == 0:
            dump_gradients(directory, iteration, gradients, 1.0 / run.optimizer.loss_scale)


def _label(name: str) -> str:
    """"layer4" of "decoder.layers.3.mlp.router", "mtp1" of "mtp.layers.0...."."""
    block, number = layer_of(name)
    return f"{'layer' if block == 'decoder' else block}{number + 1}"

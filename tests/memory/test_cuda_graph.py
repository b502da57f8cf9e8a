"""Graphed training equals eager training bit for bit, in one process with an emulated device."""

import logging
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from emulated_cuda.run import device_test
from memory.graphed import full, line, list_differences, local, same_accumulation_flags, train, train_counted
from torch import nn

from arguments import parse_args
from moe_trainer.memory import cuda_graph, iteration_graph
from moe_trainer.memory.cuda_graph import CudaGraphs
from moe_trainer.memory.offload import GraphCopies
from moe_trainer.parallel.state import ParallelState
from moe_trainer.training.run import TrainState
from moe_trainer.training.step import train_step
from moe_trainer.verification import training_trace

ROUTED = "attn moe_router moe_preprocess"
SHARED = "--moe-shared-expert-intermediate-size 8"
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn layernorm"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
BLOCKWISE = "--bf16 --fp8-format e4m3 --fp8-recipe blockwise --num-layers 1"
DELAYED = "--bf16 --fp8-format hybrid --fp8-recipe delayed --num-layers 1"
KEPT = "--use-distributed-optimizer --fp8-param-gather"
TO_HOST = (
    "--transformer-impl transformer_engine --on-missing-backend fallback --fine-grained-activation-offloading "
    "--min-offloaded-tensor-size 1"
)
CHANGING_SCALE = "--fp16 --initial-loss-scale 1024 --loss-scale-window 1"
PACKED = (
    "--use-varlen-dataset --max-seqlen-per-dp-cp-rank 32 --pad-packed-seq-alignment max --thd-max-packed-sequences 6"
)
BALANCED = "--moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.1 0.1"
AFTER = "--post-self-attn-layernorm --post-mlp-layernorm"
NOISE = "--hidden-dropout 0.1 --attention-dropout 0.1"
HYBRID = "--hybrid-layer-pattern=ME*- --mamba-num-heads 8 --mamba-head-dim 6 --mamba-num-groups 4 --mamba-state-dim 10"


def small(kind: str, flags: str = "") -> list[str]:
    """Return the flags of two microbatches, of which one captures and one replays, and of few experts: each is many operators."""
    return line(kind, "--global-batch-size 4 " + "--num-experts 4 " * (kind not in ("dense", "deepseek")) + flags)


# name -> (kind of model, further flags, flags of graphs)
CASES = {
    "dense, full layers": ("dense", "", [local()]),
    "dense, attention and feed-forward": ("dense", NOISE, [local("attn"), local("attn mlp"), full()]),
    "experts": ("plain", SHARED, [local("attn"), local("attn moe_router"), local(ROUTED)]),
    "shared experts during the exchange": (
        "plain",
        f"{SHARED} --moe-shared-expert-overlap --moe-token-dispatcher-type alltoall",
        [local(ROUTED)],
    ),
    "latent attention, shared experts, MTP": ("deepseek", "", [local(f"mlp {ROUTED}")]),
    "one layer of MTP for all depths": ("plain", "--mtp-num-layers 2 --mtp-use-repeated-layer", [local(ROUTED)]),
    "dropped tokens": ("capacity", "--moe-router-load-balancing-type global_aux_loss", [local("attn moe_router")]),
    "padded experts": ("padded capacity", "", [local(ROUTED), local("attn moe"), local(), full()]),
    "padded experts, grouped GEMMs": ("padded capacity", "--bf16", [local("attn moe"), full()]),
    "recompute": ("deepseek", f"{SELECTIVE} mla_up_proj mlp shared_experts", [local(f"mlp {ROUTED}")]),
    "recompute of everything": ("padded capacity", FULL, [full()]),
    "random numbers": ("plain", f"{NOISE} --moe-input-jitter-eps 0.1", [local(ROUTED)]),
    "fp8, delayed": ("plain", DELAYED, [local(ROUTED)]),
    "fp8, blocks": ("padded capacity", BLOCKWISE, [local(), full()]),
    "fp8, weights kept in 8 bits": ("plain", f"{KEPT} {BLOCKWISE}", [local(ROUTED)]),
    "fp8, weights kept in 8 bits with delayed scales": (
        "padded capacity",
        f"{KEPT} {DELAYED}",
        [local("attn moe"), full()],
    ),
    "forced routing": (
        "plain",
        f"--moe-router-force-load-balancing --hidden-dropout 0.1 {SELECTIVE} moe_act",
        [local("moe_router")],
    ),
    "forced routing, padded experts": (
        "padded capacity",
        f"--moe-router-force-load-balancing {SELECTIVE} moe",
        [local("moe"), local("attn"), local(), full()],
    ),
    "fp16": ("plain", CHANGING_SCALE, [local(ROUTED)]),
    "fp16, padded experts": ("padded capacity", CHANGING_SCALE, [full()]),
    "per-token loss": ("per-token loss", "", [local(ROUTED)]),
    "residual in fp32 behind the norm": (
        "plain",
        "--bf16 --fp32-residual-connection --apply-residual-connection-post-layernorm",
        [local(ROUTED)],
    ),
    "norms before and after sublayers": ("padded capacity", AFTER, [local(ROUTED), local("attn moe")]),
    "norms after sublayers only": ("dense", f"{AFTER} --disable-pre-layernorm", [local("attn mlp"), local()]),
    "experts to the host": ("plain", f"{TO_HOST} --offload-modules expert_fc1 moe_act", [local(ROUTED)]),
    "attention to the host": (
        "padded capacity",
        f"{TO_HOST} --offload-modules attn_norm qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act "
        "--fine-grained-offloading-max-inflight-offloads 2",
        [local("attn"), local(ROUTED), local("moe"), local(), full()],
    ),
    "layers of one sublayer": ("plain", HYBRID, [local("mamba"), local(f"mamba mlp {ROUTED}")]),
    "layers of one sublayer, padded experts": ("padded capacity", HYBRID, [local(), full()]),
    "layers to the host": ("padded capacity", "--cpu-offloading-num-layers 1", [local("attn"), full()]),
}


@pytest.mark.parametrize("name", CASES)
@device_test
def test_graphed_training_equals_eager(name):
    kind, flags, graphs = CASES[name]
    used, eager = [], {}
    for graph in graphs:
        argv = (*small(kind, flags), *same_accumulation_flags(graph))
        eager[argv] = eager.get(argv) or train([*argv])
        graphed = train([*argv, *graph], prepare=lambda run: used.append(run))
        assert list_differences(eager[argv], graphed) == [], graph
        run = used.pop()
        assert (
            run.iteration_graph.num_graphs > 0
            if run.iteration_graph
            else all(chunk.graphs.num_passes == 1 for chunk in run.chunks)
        )


PACKED_CASES = {
    "attention": ("plain", "", local("attn moe_router")),
    "routers": ("plain", BALANCED, local("moe_router moe_preprocess")),
    "latent attention, MTP": ("deepseek", "", local(f"mlp {ROUTED}")),
    "layers": (
        "padded capacity",
        f"{BALANCED} --window-size 3,0 --window-rotary-percent 0.5 --window-attn-skip-freq 2",
        local(),
    ),
    "sinks": ("padded capacity", "--softmax-type learnable", local("attn moe")),
    "full iteration": (
        "padded capacity",
        f"{BALANCED} --mtp-num-layers 2 --thd-tail-padding-policy extend_last",
        full(),
    ),
    "full iteration, fp8": ("padded capacity", BLOCKWISE, full()),
    "full iteration, sharded parameters": ("padded capacity", f"{BALANCED} --use-torch-fsdp2", full()),
}


@pytest.mark.parametrize("name", PACKED_CASES)
@device_test
def test_graphs_serve_packed_sequences_of_other_lengths(name):
    """Graphs read lengths on the device, where attention computes all blocks: equal up to the order of sums."""
    kind, flags, graph = PACKED_CASES[name]
    argv = [*small(kind, f"{PACKED} {flags}"), *same_accumulation_flags(graph)]
    steps = 6 if graph == full() else 4  # of 1, 2, 2, 1, 1 and 2 microbatches
    (eager, _), (graphed, counts) = (
        train_counted(each, 0, ParallelState.single(), steps) for each in (argv, argv + graph)
    )
    close = {"rtol": 2e-3, "atol": 2e-3} if "--bf16" in argv else {"rtol": 2e-6, "atol": 2e-6}
    for found, expected in zip(graphed.losses, eager.losses, strict=True):
        torch.testing.assert_close(found, expected, **close)
    for weight, expected in eager.weights.items():
        torch.testing.assert_close(graphed.weights[weight], expected, **close)
    captures = [step["captures"] for step in counts]
    assert sum(captures) > 0 == captures[0] == captures[-1] and counts[-1]["replays"] > 0, captures
    if graph == full():  # one for each number of microbatches
        waits = {file: times for file, times in counts[-1].items() if file.endswith(".py")}
        assert max(captures) == 1 < sum(captures) and waits.keys() <= {
            "training/step.py", "optim/clip.py", "moe/balancing.py"
        } and max(waits.values()) == 1, waits  # fmt: skip


def test_a_replay_restores_the_state_of_its_own_graph(monkeypatch):
    graph = SimpleNamespace(capture=lambda fn: fn(), replay=lambda: None)
    monkeypatch.setattr(iteration_graph, "CapturedGraph", lambda *_: graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    graphs, restored = iteration_graph.IterationGraph(1), []
    for num_microbatches, state in ((3, "of three"), (4, "of four"), (3, None)):
        graphs.run(num_microbatches, torch.ones(1), lambda x: x, lambda state=state: state, restored.append)
    assert restored == ["of three"]


@device_test
def test_offloaded_tensors_of_a_graph_are_copied_inside_it():
    """Pinned memory of a microbatch serves the next one; what is brought back is what was sent."""
    kind, flags, _ = CASES["attention to the host"]
    counts, out, back = Counter(), GraphCopies.start_out, GraphCopies.start_back

    def counted_out(self, x):
        counts["out"] += 1
        host, event = out(self, x)
        counts["buffers"] = len(self._buffers)
        return host, event

    def counted_back(self, *args):
        counts["back"] += 1
        return back(self, *args)

    GraphCopies.start_out, GraphCopies.start_back = counted_out, counted_back
    train([*small(kind, flags), *full()])
    assert counts["out"] == counts["back"] == 2 * counts["buffers"] > 0  # two microbatches


class Toy(nn.Module):
    """Two parts, the second of which keeps the output of the first."""

    def __init__(self, graphs: CudaGraphs):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.last = (nn.Linear(4, 4, dtype=torch.float64, device="cuda") for _ in range(3))
        self.graphs, self.factor = graphs, 1.0

    def forward(self, x):
        self.graphs.begin_pass(self.training, 1.0)
        x = self.graphs.run("first", lambda x: x + self.first(x).sin(), [self.first], x * 2.0)
        y = self.graphs.run("second", lambda x: (self.second(x) * self.factor).tanh() * x, [self.second], x)
        return (self.last(y) * x).square().sum()


def make_toy(parts=("first", "second"), iterations=1):
    graphs = CudaGraphs(frozenset(parts), torch.device("cuda"))
    for _ in range(1 + iterations):
        graphs.begin_iteration()
    return Toy(graphs)


def run_passes(model, order, seed=0):
    """Run microbatches in an order (a number twice: forward, then backward); returns losses, input and parameter gradients."""
    model.zero_grad()
    inputs, losses = {}, {}
    for number in order:
        if number not in inputs:
            generator = torch.Generator().manual_seed(seed + number)
            inputs[number] = torch.randn(3, 4, dtype=torch.float64, generator=generator).cuda().requires_grad_()
            losses[number] = model(inputs[number])
        else:
            losses[number].backward()
    return [
        *(loss.detach() for loss in losses.values()),
        *(x.grad for x in inputs.values()),
        *(p.grad.clone() for p in model.parameters()),
    ]


def all_close(one, other):
    # fp64; sums of three in another order
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("order", "in_flight"), [("0011", 1), ("0101", 2), ("012012", 3), ("01021233", 2), ("0110", 2)]
)
@device_test
def test_every_pass_in_flight_has_its_own_tensors(order, in_flight):
    eager, graphed, order = make_toy(iterations=0), make_toy(), [int(number) for number in order]
    for seed in (0, 100, 200):
        assert all_close(run_passes(eager, order, seed), run_passes(graphed, order, seed))
    assert graphed.graphs.num_passes == in_flight


@device_test
def test_comparison_detects_shared_buffers():
    cuda_graph._Slot.is_free = lambda slot: True
    eager, graphed = make_toy(iterations=0), make_toy()
    run_passes(graphed, [0, 0])
    try:
        assert not all_close(run_passes(eager, [0, 1, 0, 1]), run_passes(graphed, [0, 1, 0, 1]))
    except RuntimeError as error:  # autograd finds that what it saved was written to
        assert "inplace operation" in str(error)


@device_test
def test_tensor_held_after_backward_keeps_its_buffers_in_use():
    graphed, held = make_toy(), []
    graphed.last.register_forward_pre_hook(lambda module, inputs: held.append(inputs[0].detach()))
    run_passes(graphed, [0, 0])
    run_passes(graphed, [0, 0])
    assert graphed.graphs.num_passes == 2
    held.clear()
    run_passes(graphed, [0, 0])
    assert graphed.graphs.num_passes == 2


@device_test
def test_buffers_of_a_dropped_pass_are_reused():
    graphed = make_toy()
    for _ in range(3):
        graphed(torch.randn(3, 4, dtype=torch.float64, device="cuda", requires_grad=True))
    assert graphed.graphs.num_passes == 1


@device_test
def test_python_numbers_are_frozen_at_capture():
    eager, graphed = make_toy(iterations=0), make_toy()
    assert all_close(run_passes(eager, [0, 0]), run_passes(graphed, [0, 0]))
    eager.factor = graphed.factor = 2.0
    assert not all_close(run_passes(eager, [0, 0]), run_passes(graphed, [0, 0]))
    eager.factor = 1.0
    assert all_close(run_passes(eager, [0, 0]), run_passes(graphed, [0, 0]))


@device_test
def test_no_graphs_in_evaluation_and_warm_up():
    graphed = make_toy(iterations=0)
    run_passes(graphed, [0, 0])
    graphed.graphs.begin_iteration()
    graphed.eval()
    run_passes(graphed, [0, 0])
    with torch.no_grad():
        graphed.train()(torch.randn(3, 4, dtype=torch.float64, device="cuda"))
    graphed.graphs.begin_iteration(eager=True)
    run_passes(graphed, [0, 0])
    assert graphed.graphs.num_passes == 0


@device_test
def test_mamba_mixers_are_parts_of_layers_that_can_be_captured():
    (after_capture, _) = logged_parts([*small("plain", HYBRID), *local("mamba")])[1:]
    assert any(line.startswith("CUDA graphs of layers of MambaMixer: captured: mamba") for line in after_capture), (
        after_capture
    )


def logged_parts(argv):
    """The lines about captured parts that were logged by the end of each of three iterations."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    cuda_graph.logger.addHandler(handler)
    cuda_graph.logger.setLevel(logging.INFO)
    run = training_trace.make_run(parse_args(argv, 1), 0, ParallelState.single(), 4, device="cuda")
    state, after = TrainState(), []
    for _ in range(3):
        train_step(run, state, 2)
        after.append([line for line in lines if "captured:" in line])
    cuda_graph.logger.removeHandler(handler)
    return after


@device_test
def test_log_lists_captured_parts_of_every_layer_kind_once():
    after = logged_parts([*small("deepseek", "--mtp-num-layers 0"), *local("attn moe_router moe_preprocess")])
    assert after[0] == [] and after[1] == after[2]
    assert sorted(after[1]) == [
        "CUDA graphs of layers of MultiLatentAttention and MLP: captured: attn; not captured: mlp",
        "CUDA graphs of layers of MultiLatentAttention and MoELayer: captured: attn, moe_router, moe_preprocess; "
        "not captured: dispatch and experts",
    ]


@device_test
def test_other_input_shape_is_rejected():
    graphed = make_toy()
    run_passes(graphed, [0, 0])
    with pytest.raises(RuntimeError, match=r"first was called with .*5, 4.* was captured with .*3, 4"):
        graphed(torch.randn(5, 4, dtype=torch.float64, device="cuda", requires_grad=True))


@device_test
def test_bytes_of_static_tensors_are_counted():
    graphed = make_toy()
    run_passes(graphed, [0, 1, 0, 1])
    # of each pass: the input of the first part, outputs, their gradients and those of the inputs of both; gradients of both Linears share one buffer
    x = 3 * 4 * 8
    assert graphed.graphs.num_bytes == 2 * (1 + 2 + 2 + 2) * x + (16 + 4) * 8


@device_test
def test_comparison_detects_a_frozen_aux_loss_scale():
    argv = small("plain", CHANGING_SCALE)
    eager = train(argv)
    CudaGraphs.scale_tensor = lambda graphs, grad_scale: grad_scale
    assert list_differences(eager, train([*argv, *local("attn moe_router")]))


@device_test
def test_microbatch_count_may_change_with_graphs():
    def norms(argv):
        run = training_trace.make_run(parse_args(argv, 1), 0, ParallelState.single(), 6, device="cuda")
        state = TrainState()
        return [train_step(run, state, microbatches).grad_norm for microbatches in (1, 1, 2, 2, 3, 1)]

    argv = line("dense")
    assert norms(argv) == norms([*argv, *local("attn moe_router")]) == norms([*argv, *full()])

"""Graphed trainings give the numbers of eager ones, bit for bit, in one process with an emulated device."""

import pytest
import torch
from emulated_cuda.run import device_test
from memory.graphed import adding_alike, full, line, local, train, unlike
from torch import nn

from arguments import parse_args
from moe_trainer.memory import cuda_graph
from moe_trainer.memory.cuda_graph import CudaGraphs
from moe_trainer.parallel.state import ParallelState
from moe_trainer.training.context import TrainState
from moe_trainer.training.step import train_step
from moe_trainer.verification import training_trace

ROUTED = "attn moe_router moe_preprocess"
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn layernorm"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
KEPT = "--bf16 --use-distributed-optimizer --fp8-param-gather"
NOISE = "--hidden-dropout 0.1 --attention-dropout 0.1"
# name -> (kind of model, further flags, flags of graphs)
CASES = {
    "dense, full layers": ("dense", "", [local()]),
    "dense, attention and feed-forward": ("dense", NOISE, [local("attn"), local("attn mlp"), full()]),
    "experts": (
        "plain",
        "--moe-shared-expert-intermediate-size 8",
        [local("attn"), local("attn moe_router"), local(ROUTED)],
    ),
    "shared experts during the exchange": (
        "plain",
        "--moe-shared-expert-intermediate-size 8 --moe-shared-expert-overlap --moe-token-dispatcher-type alltoall",
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
    "fp8, delayed": ("plain", "--bf16 --fp8-format hybrid --fp8-recipe delayed", [local(ROUTED)]),
    "fp8, blocks": ("padded capacity", "--bf16 --fp8-format e4m3 --fp8-recipe blockwise", [local(), full()]),
    "fp8, weights kept in 8 bits": ("plain", f"{KEPT} --fp8-format e4m3 --fp8-recipe blockwise", [local(ROUTED)]),
    "fp8, weights kept in 8 bits with delayed scales": (
        "padded capacity",
        f"{KEPT} --fp8-format hybrid --fp8-recipe delayed",
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
    "fp16": ("plain", "--fp16 --initial-loss-scale 1024 --loss-scale-window 1", [local(ROUTED)]),
    "per-token loss": ("per-token loss", "", [local(ROUTED)]),
    "residual in fp32 behind the norm": (
        "plain",
        "--bf16 --fp32-residual-connection --apply-residual-connection-post-layernorm",
        [local(ROUTED)],
    ),
    "experts to the host": (
        "plain",
        "--transformer-impl transformer_engine --on-missing-backend fallback --fine-grained-activation-offloading --offload-modules expert_fc1 moe_act "
        "--min-offloaded-tensor-size 1",
        [local(ROUTED)],
    ),
}


@pytest.mark.parametrize("name", CASES)
@device_test
def test_graphs_change_no_number(name):
    kind, flags, graphs = CASES[name]
    used, eager = [], {}
    for graph in graphs:
        argv = (*line(kind, flags), *adding_alike(graph))
        eager[argv] = eager.get(argv) or train([*argv])
        graphed = train([*argv, *graph], prepare=lambda run: used.append(run))
        assert unlike(eager[argv], graphed) == [], graph
        run = used.pop()
        assert (
            run.iteration_graph._graph is not None
            if run.iteration_graph
            else all(chunk.graphs.num_passes == 1 for chunk in run.chunks)
        )


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


def toy(parts=("first", "second"), iterations=1):
    graphs = CudaGraphs(frozenset(parts), torch.device("cuda"))
    for _ in range(1 + iterations):
        graphs.begin_iteration()
    return Toy(graphs)


def passes(model, order, seed=0):
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


def same(one, other):
    return all(
        torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(one, other, strict=True)
    )  # fp64; sums of three in another order


@pytest.mark.parametrize(
    ("order", "in_flight"), [("0011", 1), ("0101", 2), ("012012", 3), ("01021233", 2), ("0110", 2)]
)
@device_test
def test_every_pass_in_flight_has_tensors_of_its_own(order, in_flight):
    eager, graphed, order = toy(iterations=0), toy(), [int(number) for number in order]
    for seed in (0, 100, 200):
        assert same(passes(eager, order, seed), passes(graphed, order, seed))
    assert graphed.graphs.num_passes == in_flight


@device_test
def test_one_set_for_two_passes_is_found_out():
    cuda_graph._Slot.is_free = lambda slot: True
    eager, graphed = toy(iterations=0), toy()
    passes(graphed, [0, 0])
    try:
        assert not same(passes(eager, [0, 1, 0, 1]), passes(graphed, [0, 1, 0, 1]))
    except RuntimeError as error:  # autograd finds that what it saved was written to
        assert "inplace operation" in str(error)


@device_test
def test_what_is_held_after_backward_keeps_its_pass_busy():
    graphed, held = toy(), []
    graphed.last.register_forward_pre_hook(lambda module, inputs: held.append(inputs[0].detach()))
    passes(graphed, [0, 0])
    passes(graphed, [0, 0])
    assert graphed.graphs.num_passes == 2
    held.clear()
    passes(graphed, [0, 0])
    assert graphed.graphs.num_passes == 2


@device_test
def test_a_pass_that_is_dropped_is_free_again():
    graphed = toy()
    for _ in range(3):
        graphed(torch.randn(3, 4, dtype=torch.float64, device="cuda", requires_grad=True))
    assert graphed.graphs.num_passes == 1


@device_test
def test_numbers_of_python_are_those_of_the_capture():
    eager, graphed = toy(iterations=0), toy()
    assert same(passes(eager, [0, 0]), passes(graphed, [0, 0]))
    eager.factor = graphed.factor = 2.0
    assert not same(passes(eager, [0, 0]), passes(graphed, [0, 0]))
    eager.factor = 1.0
    assert same(passes(eager, [0, 0]), passes(graphed, [0, 0]))


@device_test
def test_no_graphs_in_evaluation_and_warm_up():
    graphed = toy(iterations=0)
    passes(graphed, [0, 0])
    graphed.graphs.begin_iteration()
    graphed.eval()
    passes(graphed, [0, 0])
    with torch.no_grad():
        graphed.train()(torch.randn(3, 4, dtype=torch.float64, device="cuda"))
    graphed.graphs.begin_iteration(eager=True)
    passes(graphed, [0, 0])
    assert graphed.graphs.num_passes == 0


@device_test
def test_another_shape_is_refused():
    graphed = toy()
    passes(graphed, [0, 0])
    with pytest.raises(RuntimeError, match=r"first was called with .*5, 4.* was captured with .*3, 4"):
        graphed(torch.randn(5, 4, dtype=torch.float64, device="cuda", requires_grad=True))


@device_test
def test_tensors_that_stay_are_counted():
    graphed = toy()
    passes(graphed, [0, 1, 0, 1])
    # of each pass: the input of the first part, outputs, their gradients and those of the inputs of both; gradients of both Linears share one buffer
    x = 3 * 4 * 8
    assert graphed.graphs.num_bytes == 2 * (1 + 2 + 2 + 2) * x + (16 + 4) * 8


@device_test
def test_a_frozen_factor_of_auxiliary_losses_is_found_out():
    argv = line("plain", "--fp16 --initial-loss-scale 1024 --loss-scale-window 1")
    eager = train(argv)
    CudaGraphs.scale_tensor = lambda graphs, grad_scale: grad_scale
    assert unlike(eager, train([*argv, *local("attn moe_router")]))


@pytest.mark.parametrize("graphs", [local("attn moe_router"), full()])
@device_test
def test_another_number_of_microbatches(graphs):
    def norms(argv):
        run, state = (
            training_trace.make_run(parse_args(argv, 1), 0, ParallelState.single(), 6, device="cuda"),
            TrainState(),
        )
        return [train_step(run, state, microbatches).grad_norm for microbatches in (1, 1, 2, 2, 3, 1)]

    argv = line("dense")
    assert norms(argv) == norms([*argv, *graphs])

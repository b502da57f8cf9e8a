"""The paged stash on an emulated device: races of its stream, waits of the host, and graphs of whole passes and of single layers."""

from dataclasses import replace

import pytest
import torch
from emulated_cuda.run import check_races, on_device

LAYERS, EXPERTS, HIDDEN, FFN, ROWS, BALANCED, PAGE = 3, 2, 16, 16, 40, 24, 8
COUNTS = ((10, 14, 9, 3, 20, 4), (0, 0, 24, 1, 3, 30), (12, 13, 14, 2, 5, 6), (1, 2, 3, 4, 5, 6))
"""Tokens of each expert, one pair for each layer."""


class Model:
    """Experts behind each other, with counts that are on the device or on the host."""

    def __init__(self, stash=None):
        from moe.layers import sections

        from moe_trainer.layers.layer_factory import LOCAL
        from moe_trainer.memory.activations import ActivationPolicy
        from moe_trainer.moe.experts import Experts
        from moe_trainer.parallel.state import ParallelState

        self.activations = ActivationPolicy(stash=stash)
        args = sections(num_experts=EXPERTS, moe_grouped_gemm=True, hidden_size=HIDDEN, ffn_hidden_size=FFN)
        factory = replace(LOCAL, activations=self.activations)
        self.layers = [
            Experts(args.model, args.moe, ParallelState.single(), f"{number}", factory) for number in range(LAYERS)
        ]
        self.params = []
        generator = torch.Generator().manual_seed(0)
        for layer in self.layers:
            for param in layer.parameters():
                param.data = (torch.randn(param.shape, generator=generator) * 0.3).bfloat16().cuda()
                self.params.append(param)

    def layer(self, number: int, x, probs, counts):
        """One layer: tokens of the first rows; the results of other rows are undefined."""
        from moe_trainer.memory.paged_stash import join_stash

        if isinstance(counts, torch.Tensor):
            used = counts.sum(0, keepdim=True)
            mask = (torch.arange(ROWS, device="cuda") < used).unsqueeze(1)
        else:
            used, mask = sum(counts), torch.zeros(ROWS, 1, dtype=torch.bool, device="cuda")
            mask[:used].fill_(True)
        unused, received = () if isinstance(counts, torch.Tensor) else (ROWS - used,), torch.where(mask, x, 0.0)
        with self.activations.stash_scope(ROWS, used, BALANCED) as group:
            y = self.layers[number](received, probs, counts, *unused)
        return join_stash(x + torch.where(mask, y, 0.0), group)

    def run(self, xs, probs, counts):
        """Two microbatches in flight, of which the first returns first; results and gradients."""
        outputs = []
        for x in xs:
            y = x
            for number in range(LAYERS):
                y = self.layer(number, y, probs, counts[number])
            outputs.append(y)
        grads = [torch.autograd.grad((y.float() ** 2).sum(), [x, *self.params]) for x, y in zip(xs, outputs)]
        return [*(y.detach() for y in outputs), *(grad for each in grads for grad in each)]


def draw(step: int):
    generator = torch.Generator().manual_seed(step)
    xs = [torch.randn(ROWS, HIDDEN, generator=generator).bfloat16().cuda() for _ in range(2)]
    return xs, torch.rand(ROWS, generator=generator).cuda()


def pairs(step: int) -> list[list[int]]:
    return [list(COUNTS[step][2 * layer : 2 * layer + 2]) for layer in range(LAYERS)]


def leaves(xs):
    return [x.clone().requires_grad_() for x in xs]


def make_stash(device: float, host: float, kernels: str):
    from moe_trainer.memory.paged_stash import PagedStash
    from moe_trainer.ops.paged_copy import TORCH_PAGE_KERNELS

    chosen = TORCH_PAGE_KERNELS
    if kernels == "triton":
        from moe_trainer.ops.triton_paged_copy import PAGE_KERNELS as chosen  # noqa: N811
    return PagedStash(torch.device("cuda", 0), PAGE, device, host, chosen)


def measured(stash) -> Model:
    """A model whose stash has pages: its first iteration has run."""
    model = Model(stash)
    stash.begin_iteration()
    xs, probs = draw(0)
    model.run(leaves(xs), probs, pairs(0))
    stash.begin_iteration()
    assert stash.generation == 1
    return model


def in_numbers(results):
    return [x.float().cpu().tolist() for x in results]


def eager(device: float, host: float, kernels: str, on_host: bool):
    """Iterations with pages, and the same without a stash; waits, and whether every page was given back."""
    import emulation

    check_races()
    stash = make_stash(device, host, kernels)
    model, plain, found = measured(stash), Model(), []
    for step in range(len(COUNTS)):
        xs, probs = draw(step)
        counts = [torch.tensor(pair).cuda() for pair in pairs(step)]
        stash.begin_iteration()
        with emulation.Ledger(emulation.DEVICE()) as ledger:
            ours = model.run(leaves(xs), probs, pairs(step) if on_host else counts)
        complete = not stash.overflow.item() and bool(stash.pools[0].free_P[:-1].all())
        theirs = plain.run(leaves(xs), probs, counts)
        found.append((complete, dict(ledger.waits), in_numbers(ours) == in_numbers(theirs)))
    return found


@pytest.mark.parametrize(
    ("device", "host", "kernels", "on_host"),
    [
        (1.5, 0.0, "torch", False),
        (0.5, 1.0, "torch", True),
        (1.5, 0.0, "triton", False),
        (0.5, 1.0, "triton", False),
    ],
)
def test_stash_equals_kept_buffers_without_waits_and_races(device, host, kernels, on_host):
    if kernels == "triton":
        pytest.importorskip("triton")
    for complete, waits, is_equal in on_device(eager, device, host, kernels, on_host):
        assert complete and not waits and is_equal


def captured_iteration(kernels: str):
    """All passes as one graph, replayed with other tokens and counts."""
    from moe_trainer.memory.graph_capture import CapturedGraph

    check_races()
    stash = make_stash(1.5, 0.5 if kernels == "triton" else 0.0, kernels)
    model, plain, found = measured(stash), Model(), []
    xs, probs = draw(0)
    static = leaves(xs), probs, [torch.tensor(pair).cuda() for pair in pairs(0)]
    graph = CapturedGraph(torch.cuda.graph_pool_handle())
    results = graph.capture(lambda: model.run(*static))
    for step in range(1, len(COUNTS)):
        xs, probs = draw(step)
        counts = [torch.tensor(pair).cuda() for pair in pairs(step)]
        stash.begin_iteration()
        with torch.no_grad():
            for mine, now in zip([*static[0], static[1], *static[2]], [*xs, probs, *counts], strict=True):
                mine.copy_(now)
        graph.replay()
        theirs = plain.run(leaves(xs), probs, counts)
        complete = not stash.overflow.item() and bool(stash.pools[0].free_P[:-1].all())
        found.append((complete, stash.generation, in_numbers(results) == in_numbers(theirs)))
    return found


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_captured_iteration_equals_kept_buffers(kernels):
    if kernels == "triton":
        pytest.importorskip("triton")
    assert on_device(captured_iteration, kernels) == [(True, 1, True)] * (len(COUNTS) - 1)


def captured_layers():
    """Two graphs of each layer, forward and backward, in two slots; the passes of two microbatches are interleaved."""
    from moe_trainer.memory.graph_capture import CapturedGraph

    check_races()
    stash = make_stash(1.5, 0.0, "torch")
    model, plain, found = measured(stash), Model(), []
    xs, probs = draw(0)
    probs_now, counts_now = probs.clone(), [torch.tensor(pair).cuda() for pair in pairs(0)]
    passes = []
    for _ in xs:
        pool, inputs, graphs, outputs = torch.cuda.graph_pool_handle(), [], [], []
        x = torch.zeros_like(xs[0])
        for number in range(LAYERS):
            inputs.append(x.detach().clone().requires_grad_())
            graphs.append(CapturedGraph(pool))
            outputs.append(
                graphs[-1].capture(
                    lambda x=inputs[-1], number=number: model.layer(number, x, probs_now, counts_now[number])
                )
            )
            x = outputs[-1]
        passes.append((pool, inputs, graphs, outputs, []))
    grad_now, grads = torch.zeros_like(xs[0]), []
    for pool, inputs, _, outputs, backward in passes:
        backward.extend([None] * LAYERS)
        for number in reversed(range(LAYERS)):
            graph = CapturedGraph(pool)
            wanted = [inputs[number], *model.layers[number].parameters()]
            found_grads = graph.capture(
                lambda y=outputs[number], wanted=wanted: torch.autograd.grad(y, wanted, grad_now)
            )
            backward[number] = graph, found_grads
    for step in range(1, len(COUNTS)):
        xs, probs = draw(step)
        stash.begin_iteration()
        counts = [torch.tensor(pair).cuda() for pair in pairs(step)]
        probs_now.copy_(probs)
        for now, new in zip(counts_now, counts):
            now.copy_(new)
        ours = []
        for x, (_, inputs, graphs, outputs, _) in zip(xs, passes):
            for number in range(LAYERS):
                with torch.no_grad():
                    inputs[number].copy_(x)
                graphs[number].replay()
                x = outputs[number].detach()
            ours.append(x)
        for y, (*_, backward) in zip(ours[:2], passes):
            grads, grad = [], 2 * y.float()
            for number in reversed(range(LAYERS)):
                grad_now.copy_(grad)
                backward[number][0].replay()
                grads[:0] = [x.clone() for x in backward[number][1][1:]]
                grad = backward[number][1][0].clone()
            ours += [grad, *grads]
        theirs = plain.run(leaves(xs), probs, counts)
        complete = not stash.overflow.item() and bool(stash.pools[0].free_P[:-1].all())
        found.append((complete, in_numbers(ours) == in_numbers(theirs)))
    return found


def test_captured_layers_equal_kept_buffers():
    assert on_device(captured_layers) == [(True, True)] * (len(COUNTS) - 1)

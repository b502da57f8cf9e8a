"""Offload: which tensors, the order of their return and their lifetime; with copies that happen as late as allowed."""

import gc

import pytest
import torch
from memory.measure import CountedCopies
from memory.one_pass import EVERYTHING, GROUPED, OFFLOAD, build, collect_results, compute_loss, differences, parsed
from torch.multiprocessing.reductions import StorageWeakRef

from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.memory.offload import ActivationOffload, HostCopies

CPU = torch.device("cpu")


class LateCopies(HostCopies):
    """A copy out happens when it is waited for, a copy back when the computation needs it; every event is logged."""

    def __init__(self):
        self.log: list[tuple[str, int]] = []
        self.numbers: dict[int, int] = {}

    def start_out(self, x):
        host = torch.full_like(x, -7.0)
        number = len(self.numbers)
        self.numbers[id(host)] = number
        self.log.append(("out", number))
        return host, [number, x, host]

    def limit(self, out):
        if out[1] is not None:
            self.log.append(("done", out[0]))
            out[2].copy_(out[1])
            out[1] = None

    def start_back(self, host, out):
        self.limit(out)
        self.log.append(("back", out[0]))
        return torch.full_like(host, -8.0), (out[0], host)

    def finish(self, x, back):
        self.log.append(("use", back[0]))
        x.copy_(back[1])

    def of(self, kind):
        return [number for what, number in self.log if what == kind]


def run_chain(activations, x, parts):
    """Run one operation per part; each saves its input."""
    for part in parts:
        with activations.offload_scope(part):
            x = (x * x.detach().cos()).exp() - 1.0
    return x


def run(activations, parts, size=8):
    x = torch.linspace(-0.5, 0.5, size).requires_grad_()
    activations.begin_pass()
    y = run_chain(activations, x, parts)
    return x, y


def offloading(parts, **settings):
    copies = settings.pop("copies", None) or LateCopies()
    return ActivationPolicy(offload=ActivationOffload(frozenset(parts), CPU, copies=copies, **settings)), copies


def expected_gradient(parts, size=8):
    x, y = run(ActivationPolicy(), parts, size)
    y.sum().backward()
    return x.grad


def test_results_are_independent_of_copy_timing():
    activations, copies = offloading("abc")
    x, y = run(activations, "abc")
    assert copies.of("out") and not copies.of("back")
    y.sum().backward()
    assert torch.equal(x.grad, expected_gradient("abc"))


def test_previous_group_is_prefetched_in_backward():
    activations, copies = offloading("abc")
    x, y = run(activations, "abc")
    sent = len(copies.of("out"))
    assert sent % 3 == 0
    group = sent // 3
    y.sum().backward()
    first_use = copies.log.index(("use", copies.of("use")[0]))
    started = [number for what, number in copies.log[:first_use] if what == "back"]
    assert group > 1 and sorted(started) == list(range(group, sent)), (
        "all of the last group, which is used, and of the one before it"
    )
    assert sorted(copies.of("back")) == list(range(sent)) == sorted(copies.of("use")), "each once"


def test_backward_prefetches_only_its_own_pass():
    activations, copies = offloading("ab")
    _, first = run(activations, "ab")
    sent = len(copies.of("out"))
    _, second = run(activations, "ab")
    second.sum().backward()
    assert sorted(copies.of("back")) == list(range(sent, 2 * sent)), "the first pass waits for its own backward"
    first.sum().backward()
    assert sorted(copies.of("back")) == list(range(2 * sent))


@pytest.mark.parametrize("most", [1, 2])
def test_the_number_of_copies_in_flight_is_bounded(most):
    activations, copies = offloading("abcd", max_in_flight=most)
    run(activations, "abcd")
    in_flight, most_seen = 0, 0
    for what, _ in copies.log:
        in_flight += {"out": 1, "done": -1}[what]
        most_seen = max(most_seen, in_flight)
    assert most_seen == most + 1  # the new one starts, then the oldest is waited for


def test_small_tensors_are_not_offloaded():
    activations, copies = offloading("a", min_numel=9)
    run(activations, "a", 8)
    assert not copies.of("out")
    run(activations, "a", 9)
    assert copies.of("out")


def test_offload_fraction_is_spread_evenly():
    (half, copies), (unsplit, all_copies) = offloading("a", fraction=0.5), offloading("a")
    x, y = run(half, "aaaa")
    run(unsplit, "aaaa")
    assert len(copies.of("out")) * 2 == len(all_copies.of("out"))
    y.sum().backward()
    assert torch.equal(x.grad, expected_gradient("aaaa"))


def test_skip_bytes_keeps_the_last_groups_on_device():
    activations, copies = offloading("a", skip_bytes=40)
    so_far = [0]
    for _ in range(2):
        x, y = run(activations, "aaaa")
        y.sum().backward()
        assert torch.equal(x.grad, expected_gradient("aaaa"))
        so_far.append(len(copies.of("out")))
    first, second = so_far[1], so_far[2] - so_far[1]
    assert 0 < second < first, "the first pass is the measure, and sends everything"
    assert 40 <= (first - second) * 8 * 4 < 40 + 8 * 4


def test_tensor_saved_twice_is_copied_once():
    activations, copies = offloading("a")
    activations.begin_pass()
    x = torch.randn(4, 6).requires_grad_() * 1.0
    with activations.offload_scope("a"):
        y = x.square() + x.reshape(-1).square().view(4, 6)
    assert len(copies.of("out")) == 1
    y.sum().backward()


@pytest.mark.parametrize("dim", [0, 1])
def test_views_of_one_storage_are_offloaded_separately(dim):
    """Views with equal size and strides at other offsets; and a transposed view."""
    activations, _ = offloading("a")
    activations.begin_pass()
    x = torch.randn(4, 6).requires_grad_()
    with activations.offload_scope("a"):
        first, second = (x * 1.0).chunk(2, dim)
        unsplit = x * 1.0
        y = first.square().sum() + second.square().sum() + unsplit.square().sum() + unsplit.t().square().sum()
    y.backward()
    torch.testing.assert_close(x.grad, 6 * x.detach())


def test_tensor_modified_in_place_is_copied_again():
    activations, copies = offloading("a", copies=CountedCopies())
    activations.begin_pass()
    x, factor = torch.randn(5).requires_grad_(), torch.ones(5)
    with activations.offload_scope("a"):
        y = x * factor
        factor.mul_(3.0)
        y = y + x * factor
    assert len(copies.hosts) == 2
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((5,), 4.0))


def test_weights_and_resident_buffers_are_not_offloaded():
    activations, copies = offloading("a")
    weight, table = torch.nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4)
    activations.begin_pass(table)
    with activations.offload_scope("a"):
        y = (table.view(3, 4) * (table @ weight.t())).sum()
    assert not copies.of("out")
    y.backward()
    assert weight.grad is not None


def test_device_and_host_memory_is_freed():
    copies = CountedCopies()
    activations, _ = offloading("a", copies=copies)
    activations.begin_pass()
    x = torch.randn(64).requires_grad_()
    inner = x * 1.0
    on_device = StorageWeakRef(inner.untyped_storage())
    with activations.offload_scope("a"):
        y = inner.square()
    del inner
    gc.collect()
    assert on_device.expired() and not copies.hosts[0].expired()
    y.sum().backward()
    del y
    activations.begin_pass()
    gc.collect()
    assert copies.hosts[0].expired()


def test_tensor_not_offloaded_does_not_keep_the_graph_alive():
    """A node that saves its own output would own itself, and wait for the garbage collector."""
    activations, copies = offloading("a", min_numel=100)
    activations.begin_pass()
    x = torch.randn(64).requires_grad_()
    gc.disable()
    try:
        with activations.offload_scope("a"):
            y = x.exp()
        kept = StorageWeakRef(y.untyped_storage())
        y.sum().backward(retain_graph=True)
        del y
        assert kept.expired() and not copies.of("out")
    finally:
        gc.enable()


def test_passes_with_interleaved_backward_order():
    """As pipeline schedules mix them: three forward, backward of the second, the first, the third."""

    def through(*hows):
        torch.manual_seed(3)
        (chunk,) = build(parsed(GROUPED, *hows))
        if chunk.activations.offload is not None:
            chunk.activations.offload._copies = LateCopies()
        losses = [compute_loss(chunk, number) for number in range(3)]
        for number in (1, 0, 2):
            losses[number].backward()
        return collect_results(chunk, losses)

    assert not differences(through(), through(f"{OFFLOAD} {EVERYTHING}"))


def test_number_of_tensors_offloaded_per_module():
    sent = {}
    for part in EVERYTHING.split():
        (chunk,) = build(parsed(GROUPED, f"{OFFLOAD} core_attn {part}" if part == "attn_proj" else f"{OFFLOAD} {part}"))
        copies = chunk.activations.offload._copies = CountedCopies()
        compute_loss(chunk, 0)
        sent[part] = len(copies.hosts)
    assert sent == {
        "attn_norm": 6,
        "qkv_linear": 3,
        "core_attn": 12,
        "attn_proj": 15,
        "mlp_norm": 6,
        "expert_fc1": 3,
        "moe_act": 6,
    }

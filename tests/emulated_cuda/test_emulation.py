"""The emulated device detects what a real device would refuse, wait for, or silently compute wrongly."""

import threading

import pytest
import torch
from emulated_cuda.run import check_races, on_device


def device_error(function, *args) -> str:
    """Return the error that a function on the device raises."""
    with pytest.raises(AssertionError) as error:
        on_device(function, *args)
    return str(error.value)


def two_devices(other: str):
    return (torch.ones(4, device="cuda:0") + torch.ones(4, device=other)).sum().item()


def test_operands_on_different_devices_are_an_error():
    assert "same device" in device_error(two_devices, "cpu")
    with pytest.raises(AssertionError, match="cuda:1"):
        on_device(two_devices, "cuda:1", devices=2)
    assert on_device(two_devices, "cuda:0") == 8


def compute_gradient():
    x = torch.arange(4.0, device="cuda", requires_grad=True)
    (x * x).sum().backward()
    assert x.grad.device == x.device
    return x.grad.cpu()


def test_numbers_are_real_and_gradients_on_the_device():
    assert on_device(compute_gradient).tolist() == [0, 2, 4, 6]


def side_stream(waits: bool, back: bool):
    check_races()
    x, side = torch.zeros(1000, device="cuda"), torch.cuda.Stream()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
        done = side.record_event()
    if back:
        torch.cuda.current_stream().wait_event(done)
    z = y * 2
    y.record_stream(torch.cuda.current_stream())
    x.record_stream(side)
    return z.sum().item()


def test_missing_stream_wait_is_reported_as_a_race():
    message = device_error(side_stream, False, True)
    assert "CUDA stream race" in message and "aten::zero_" in message and "side_stream" in message, (
        "both places are named"
    )
    assert "CUDA stream race" in device_error(side_stream, True, False)
    assert on_device(side_stream, True, True) == 2000


def fused_adam(device: str):
    tables = [[torch.ones(3, device="cuda")] for _ in range(4)]
    scale = torch.ones((), device=device)
    torch._fused_adamw_(
        *tables,
        [],
        [torch.ones((), device="cuda")],
        lr=0.1,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
        grad_scale=scale,
        found_inf=torch.zeros((), device="cuda"),
    )
    return tables[0][0].tolist()


def test_fused_optimizer_reads_no_host_scalars():
    assert "_fused_adamw_ gets a CPU tensor" in device_error(fused_adam, "cpu")
    assert on_device(fused_adam, "cuda")


def free_memory(recorded: bool):
    check_races()
    x, side = torch.ones(1000, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    if recorded:
        x.record_stream(side)
    del x
    torch.ones(1, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    y.record_stream(torch.cuda.current_stream())
    return y.sum().item()


def test_free_without_record_stream_is_reported():
    assert "without record_stream" in device_error(free_memory, False)
    assert on_device(free_memory, True) == 2000


def pinned(waits: bool):
    host, x = torch.zeros(3, pin_memory=True), torch.ones(3, device="cuda")
    host.copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    if waits:
        done.synchronize()
    return host.tolist()


def test_copy_to_pinned_memory_completes_at_the_wait():
    assert on_device(pinned, True) == [1, 1, 1] and on_device(pinned, False) != [1, 1, 1]


def many_copies():
    """Copies to overlapping places, some never read; each place holds the last one."""
    slab, x = torch.zeros(8, 4, pin_memory=True), torch.arange(32.0, device="cuda").view(8, 4)
    for start, stop in ((0, 4), (2, 6), (1, 3)):
        slab[start:stop].copy_(x[start:stop] + start, non_blocking=True)
    back = torch.empty(8, 4, device="cuda")
    back.copy_(slab, non_blocking=True)
    return (back[:6] - x[:6]).cpu()[:, 0].tolist()


def test_copies_to_the_same_place_keep_their_order():
    assert on_device(many_copies) == [0, 1, 1, 2, 2, 2]


def waits():
    import emulation

    x = torch.arange(6, device="cuda")
    with emulation.Ledger(emulation.DEVICE()) as ledger:
        x.sum().item()
        x.cpu()
        x.nonzero()
        x.repeat_interleave(x)
        x.repeat_interleave(x, output_size=15)
        torch.ones(3).to("cuda", non_blocking=True)
        torch.ones(3).pin_memory().to("cuda", non_blocking=True)
        x[x > 2]
        x[torch.tensor([1, 2])]
    return [(what, line) for (what, line), count in ledger.waits.items() for _ in range(count)]


def test_host_waits_are_counted_by_line():
    found = on_device(waits)
    assert all("test_emulation.py" in line for _, line in found)
    by_line = [line for _, line in found]
    assert len(set(by_line)) == 7, found


def wait_when_refused():
    torch.cuda.set_sync_debug_mode("error")
    x = torch.ones(3, device="cuda")
    y = (x + 1).sum()
    try:
        y.item()
    except RuntimeError as error:
        return str(error)


def test_sync_debug_mode():
    assert "synchronizing" in on_device(wait_when_refused)


def memory():
    import emulation

    with emulation.Ledger(emulation.DEVICE()) as ledger:
        x = torch.empty(1024, device="cuda")
        y = x + 1
        del y
        torch.empty(512, device="cuda")
    return (
        ledger.peak,
        sorted(ledger.peak_by_line.values()),
        torch.cuda.memory_allocated(),
        torch.cuda.max_memory_allocated(),
    )


def test_peak_memory_by_line():
    peak, lines, now, highest = on_device(memory)
    assert (peak, lines) == (8192, [4096, 4096]) and now == 4096 and highest >= peak


def random_states():
    first = torch.cuda.get_rng_state(0)
    torch.rand(3, device="cuda:1")
    same = torch.equal(first, torch.cuda.get_rng_state(0))
    torch.cuda.set_rng_state(new_state=torch.cuda.get_rng_state(device=0), device=1)
    a, b = torch.rand(3, device="cuda:0"), torch.rand(3, device="cuda:1")
    before = torch.random.get_rng_state()
    torch.rand(3, device="cuda")
    torch.nn.functional.dropout(torch.ones(3, device="cuda"))
    return same, torch.equal(a.cpu(), b.cpu()), torch.equal(before, torch.random.get_rng_state())


def test_every_device_has_its_own_random_state():
    assert on_device(random_states, devices=2) == (True, True, True)


def graph():
    g, x, total = torch.cuda.CUDAGraph(), torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    with torch.cuda.graph(g):
        y = torch.add(x, x)
        total.add_(y)
        y.unsqueeze_(0)
    values = [total.tolist()]
    for _ in range(2):
        g.replay()
        x.fill_(5)
    return [*values, total.tolist(), y.tolist()]


def test_a_replay_repeats_the_operators_on_the_same_addresses():
    assert on_device(graph) == [[0, 0, 0], [12, 12, 12], [[10, 10, 10]]]


def on_stream(stream, run) -> None:
    with torch.cuda.stream(stream):
        run()


class forked:  # noqa: N801 - a scope
    """Run on a stream that waits for the current one."""

    def __init__(self, run):
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        on_stream(self.stream, run)

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)


def capture(how: str):
    x, mask = torch.ones(3, device="cuda"), torch.ones(3, dtype=torch.bool, device="cuda")
    event = torch.cuda.Event()
    event.record()
    generator = torch.Generator("cuda")
    g = torch.cuda.CUDAGraph()
    if how == "a registered generator":
        g.register_generator_state(generator)
    with torch.cuda.graph(g):
        y = x * 2
        {
            "value": lambda: y.sum().item(),
            "synchronize": torch.cuda.synchronize,
            "query": event.query,
            "shape": lambda: y[mask],
            "copy from pageable memory": lambda: x.copy_(torch.ones(3), non_blocking=True),
            "pinned memory": lambda: torch.empty(3, pin_memory=True),
            "generator": lambda: torch.empty_like(x).uniform_(generator=generator),
            "read": lambda: None,
            "freed": lambda: None,
            "a registered generator": lambda: torch.empty_like(x).uniform_(generator=generator),
            "unforked": lambda: on_stream(torch.cuda.Stream(), lambda: x * 2),
            "unjoined": lambda: forked(lambda: x * 2).join,
            "forked": lambda: forked(lambda: x * 2).join(),
        }[how]()
    if how == "read":
        y.tolist()
    if how == "freed":
        del x
        torch.ones(3, device="cuda")
    g.replay()


@pytest.mark.parametrize(
    "how",
    [
        "value",
        "synchronize",
        "query",
        "shape",
        "copy from pageable memory",
        "pinned memory",
        "generator",
        "read",
        "freed",
        "unforked",
        "unjoined",
    ],
)
def test_operations_not_permitted_during_capture(how):
    message = device_error(capture, how)
    expected = {
        "generator": "not registered",
        "read": "no replay has filled",
        "freed": "have been freed",
        "unforked": "does not wait for the capturing stream",
        "unjoined": "unjoined work",
    }.get(how, "not permitted when stream is capturing")
    assert expected in message, message


def capture_next_to_a_thread(mode: str):
    """A loader's thread pins memory while the main thread captures."""
    x, found, g = torch.ones(3, device="cuda"), [], torch.cuda.CUDAGraph()

    def pin():
        try:
            found.append(torch.ones(3).pin_memory().sum().item())
        except RuntimeError as error:
            found.append(str(error))

    with torch.cuda.graph(g, capture_error_mode=mode):
        thread = threading.Thread(target=pin)
        thread.start()
        thread.join()
        x * 2
    return found[0]


def test_capture_rejects_operations_of_other_threads():
    assert on_device(capture_next_to_a_thread, "thread_local") == 3
    assert "not permitted when stream is capturing" in on_device(capture_next_to_a_thread, "global")


@pytest.mark.parametrize("how", ["a registered generator", "forked"])
def test_operations_permitted_during_capture(how):
    on_device(capture, how)


def exchange(rank: int, world_size: int):
    import torch.distributed as dist

    x = torch.full((2,), float(rank), device="cuda")
    dist.all_reduce(x)
    y = torch.empty(2, device="cuda")
    dist.all_to_all_single(y, torch.arange(2.0, device="cuda") + 10 * rank)
    return x.tolist(), y.tolist(), x.device.index


def test_all_reduce_between_ranks_on_two_devices():
    assert on_device(exchange, ranks=2, devices=2) == [([1, 1], [0, 10], 0), ([1, 1], [1, 11], 1)]


def product():
    import emulation
    import triton
    import triton.language as tl

    @triton.jit
    def double(x, y, size, block: tl.constexpr):
        at = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(y + at, 2 * tl.load(x + at, mask=at < size), mask=at < size)

    x, y, g = torch.arange(5.0, device="cuda"), torch.zeros(5, device="cuda"), torch.cuda.CUDAGraph()
    with emulation.Ledger(emulation.DEVICE()) as ledger:
        double[(2,)](x, y, 5, 4)
    once = y.tolist()
    with torch.cuda.graph(g):
        double[(2,)](y, x, 5, 4)
    g.replay()
    return dict(ledger.operators), once, x.tolist()


def test_a_triton_kernel_is_one_launch():
    pytest.importorskip("triton")
    assert on_device(product) == ({"triton::double": 1}, [0, 2, 4, 6, 8], [0, 4, 8, 12, 16])

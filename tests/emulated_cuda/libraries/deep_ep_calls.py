"""What calls of DeepEP 1's and 2's compiled parts share: events, checks of tensors, and the part that runs on the communication stream."""

import torch
import torch.distributed as dist
from emulation import DEVICE


def check(dtype, *tensors):
    """Of tensors that a kernel reads by their address."""
    for tensor in tensors:
        actual = f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        assert tensor.is_cuda and tensor.is_contiguous() and tensor.dtype == dtype, (
            f"a kernel for {dtype} is given {actual}"
        )


def exchange(table, sizes, arriving, group):
    """Send rows; those of one byte as they are."""
    arrived = table.new_empty(sum(arriving), *table.shape[1:])
    kind = torch.uint8 if table.element_size() == 1 else table.dtype
    dist.all_to_all_single(arrived.view(kind), table.contiguous().view(kind), arriving, sizes, group=group)
    return arrived


class Event:
    """The methods of EventHandle."""

    def __init__(self):
        self._event = torch.cuda.current_stream().record_event()

    def current_stream_wait(self):
        torch.cuda.current_stream().wait_event(self._event)


class Work:
    """Run on `stream`, after previous_event or else after the current stream.

    event: of its end, where the call is asynchronous; otherwise the current stream waits.
    """

    def __init__(self, stream, previous_event, async_, make_event, inputs):
        self.stream, self.compute, self.make_event = stream, torch.cuda.current_stream(), make_event
        self.async_, self.tensors, self.event = async_, [tensor for tensor in inputs if tensor is not None], None
        stream.wait_stream(self.compute) if previous_event is None else stream.wait_event(previous_event._event)
        self.context = torch.cuda.stream(stream)

    def made(self, *tensors):
        self.tensors += tensors
        return tensors

    def __enter__(self):
        self.context.__enter__()
        DEVICE().lib.ec_kernel_begin(b"DeepEP", 0)
        return self

    def __exit__(self, *error):
        DEVICE().lib.ec_kernel_end()
        if error[0] is None and self.async_:
            self.event = self.make_event()
            for tensor in self.tensors:
                tensor.record_stream(self.stream)
                tensor.record_stream(self.compute)
        self.context.__exit__(*error)
        if not self.async_:
            self.compute.wait_stream(self.stream)

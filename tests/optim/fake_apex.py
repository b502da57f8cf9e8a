"""A stand-in for NVIDIA's apex: its recorded signatures, its checks, its arithmetic in torch, on any one device."""

import importlib.machinery
import json
import sys
from pathlib import Path
from types import ModuleType

import torch

API = json.loads((Path(__file__).parents[1] / "data" / "apex_api.json").read_text())
CHUNK = 2048 * 32
HALF = (torch.float16, torch.bfloat16)


def is_tensor_lists(value) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, list) and all(isinstance(x, torch.Tensor) for x in each) for each in value
    )


CONVERSIONS = {
    "int": lambda value: type(value) is int,
    "float": lambda value: type(value) in (int, float),
    "tensor": lambda value: isinstance(value, torch.Tensor),
    "tensor lists": is_tensor_lists,
    "bool or None": lambda value: value is None or type(value) is bool,
}


def check_lists(depth: int, flag: torch.Tensor, lists: list) -> None:
    """Check what multi_tensor_apply checks, and what it takes for granted."""
    assert len(lists) == depth and len(lists[0]) > 0
    device = lists[0][0].device
    assert flag.dtype == torch.int32 and flag.device == device
    for each in lists:
        assert len(each) == len(lists[0]), "Size mismatch among tensor lists"
        assert len({x.dtype for x in each}) == 1, "the kernel reads all of a list in the type of its first"
        for x, first in zip(each, lists[0], strict=True):
            assert x.is_contiguous() and x.device == device and x.numel() == first.numel()
            assert x.numel() > 0, "an empty tensor at the end leaves out the launch"


def check_scalar(x: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    assert x.dtype == dtype and x.device == device and x.numel() == 1, "the kernel reads its memory on the device"


def multi_tensor_adam_capturable(chunk, flag, lists, lr, beta1, beta2, eps, step, mode, correct, decay, inverse_scale):
    check_lists(4, flag, lists)
    grads, params, averages, squares = lists
    assert grads[0].dtype == params[0].dtype and averages[0].dtype == squares[0].dtype == torch.float32
    for x, dtype in ((lr, torch.float32), (step, torch.int32), (inverse_scale, torch.float32)):
        check_scalar(x, dtype, grads[0].device)
    assert mode in (0, 1) and correct in (0, 1)
    corrections = [1 - beta ** int(step) if correct else 1.0 for beta in (beta1, beta2)]
    for grad, param, average, square in zip(grads, params, averages, squares, strict=True):
        grad *= inverse_scale.to(grad.dtype)
        g, p = grad.float(), param.float()
        if mode == 0:
            g = g + decay * p
        average.copy_(beta1 * average + (1 - beta1) * g)
        square.copy_(beta2 * square + (1 - beta2) * g * g)
        update = (average / corrections[0]) / ((square / corrections[1]).sqrt() + eps)
        if mode == 1:
            update = update + decay * p
        param.copy_(p - lr * update)


def multi_tensor_l2norm(chunk, flag, lists, per_tensor):
    check_lists(1, flag, lists)
    assert lists[0][0].dtype in (torch.float32, *HALF)
    norms = torch.stack([x.float().norm() for x in lists[0]])
    return norms.norm().view(1), norms if per_tensor else norms.new_empty(0)


def multi_tensor_scale(chunk, flag, lists, scale):
    check_lists(2, flag, lists)
    assert {each[0].dtype for each in lists} <= {torch.float32, *HALF}
    for x, out in zip(*lists, strict=True):
        out.copy_(x.float() * scale)


def check_product(x, grad, total) -> tuple[torch.Tensor, torch.Tensor]:
    """Check what the GEMMs read as rows of memory without looking."""
    assert all(each.is_contiguous() and each.device == total.device for each in (x, grad, total))
    assert x.dtype == grad.dtype and grad.shape[:-1] == x.shape[:-1] and total.shape == (grad.shape[-1], x.shape[-1])
    return x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])


def wgrad_gemm_accum_fp32(x, grad, total):
    rows, grads = check_product(x, grad, total)
    assert total.dtype == torch.float32 and x.dtype in (torch.float32, *HALF)
    total += grads.float().t() @ rows.float()


def wgrad_gemm_accum_fp16(x, grad, total):
    rows, grads = check_product(x, grad, total)
    assert total.dtype == x.dtype and x.dtype in HALF
    total.copy_(total.float() + grads.float().t() @ rows.float())


def apply(kernel, flag, lists, *arguments):
    return kernel(CHUNK, flag, lists, *arguments)


def install(monkeypatch, tmp_path: Path, without: str = "") -> list[str]:
    """Make the modules of apex importable, but for one.

    Returns:
        The names of the functions that are called from now on.
    """
    calls: list[str] = []

    def checked(function, parameters):
        def call(*arguments):
            assert len(arguments) == len(parameters), f"{function.__name__} takes {len(parameters)} arguments"
            for value, (name, kind) in zip(arguments, parameters, strict=True):
                assert CONVERSIONS[kind](value), f"{function.__name__}: {name} must be {kind}, got {type(value)}"
            calls.append(function.__name__)
            return function(*arguments)

        return call

    (tmp_path / "apex" / "multi_tensor_apply").mkdir(parents=True)
    modules = {name: ModuleType(name) for name in ("apex", "apex.multi_tensor_apply", *API) if name != "source"}
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name == "apex")
        for function, parameters in API.get(name, {}).items():
            setattr(module, function, checked(globals()[function], parameters))
        if name != without:
            monkeypatch.setitem(sys.modules, name, module)
    modules["apex"].__spec__.submodule_search_locations = [str(tmp_path / "apex")]
    modules["apex.multi_tensor_apply"].multi_tensor_applier = apply
    return calls

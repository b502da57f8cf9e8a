"""apex's kernels, over a stand-in with its signatures and checks, against torch's; when a run uses them."""

import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from optim import fake_apex
from toy import Toy, build_training, train_step
from training.layouts import FP32, compare, make_argv, train

from arguments.precision import PrecisionArgs
from moe_trainer.ops.main_grad import MainGradSum
from moe_trainer.optim import apex
from moe_trainer.optim.apex import select_fused_library
from moe_trainer.optim.clip import square_sum
from moe_trainer.parallel.state import ParallelState
from moe_trainer.training import setup

CUDA, WORLD = torch.device("cuda"), ParallelState.single().world
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture
def calls(monkeypatch, tmp_path) -> list[str]:
    return fake_apex.install(monkeypatch, tmp_path)


def selected(caplog) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO):
        library = select_fused_library(CUDA, WORLD)
    return f"{None if library is None else library.name}; {' '.join(caplog.messages)}"


def test_apex_is_used_on_cuda_without_transformer_engine(calls, caplog, monkeypatch):
    assert apex.problem() is None and select_fused_library(torch.device("cpu"), WORLD) is None
    assert selected(caplog) == (
        "apex; apex: Adam, scaled gradients and their norm by amp_C; weight gradients by fused_weight_gradient_mlp_cuda "
        "where it can add them"
    )
    engine = ModuleType("transformer_engine")
    engine.__spec__ = ModuleSpec("transformer_engine", None)
    monkeypatch.setitem(sys.modules, "transformer_engine", engine)
    assert selected(caplog) == "None; "


def test_all_ranks_use_the_same_kernels(calls, caplog, monkeypatch):
    missing = "the package apex is not installed"
    monkeypatch.setattr(apex, "all_gather_object", lambda mine, world: [mine, missing])
    assert selected(caplog) == f"None; {missing}; the optimizer uses torch's kernels"


def test_without_apex_the_log_is_silent(caplog):
    assert apex.problem() == "the package apex is not installed" and selected(caplog) == "None; "


def test_apex_without_the_extension_for_weight_gradients(monkeypatch, tmp_path, caplog):
    fake_apex.install(monkeypatch, tmp_path, without="fused_weight_gradient_mlp_cuda")
    assert "apex; " in selected(caplog) and "weight gradients by torch (no fused" in caplog.text


def test_apex_without_cuda_extensions_is_not_used(monkeypatch, tmp_path, caplog):
    fake_apex.install(monkeypatch, tmp_path, without="amp_C")
    assert selected(caplog) == (
        "None; NVIDIA's apex is installed without its CUDA extensions (amp_C); the optimizer uses torch's kernels"
    )


def test_an_old_apex_is_not_used(calls, caplog, monkeypatch):
    monkeypatch.delattr("amp_C.multi_tensor_adam_capturable")
    assert selected(caplog).startswith(
        "None; the installed apex is too old: its amp_C has no multi_tensor_adam_capturable"
    )


def test_another_program_named_apex_is_not_imported(monkeypatch, tmp_path, caplog):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert selected(caplog).startswith("None; the installed apex is another program of that name, the one of the index")


@pytest.mark.parametrize(
    ("options", "precision", "used"),
    [
        ({"optimizer": "adam", "clip_grad": 0.1, "adam_eps": 1e-3}, PrecisionArgs(), {"multi_tensor_adam_capturable"}),
        (
            {"optimizer": "adam", "clip_grad": 0.1, "exp_avg_dtype": "bf16", "use_precision_aware_optimizer": True},
            PrecisionArgs(bf16=True, grad_reduce_in_bf16=True),
            {"multi_tensor_adam_capturable", "multi_tensor_scale"},
        ),
        ({"optimizer": "sgd", "clip_grad": 0.1}, PrecisionArgs(), {"multi_tensor_scale"}),
        ({"optimizer": "lion", "clip_grad": 0.1}, PrecisionArgs(bf16=True), {"multi_tensor_scale"}),
    ],
)
def test_updates_equal_those_of_torch(calls, options, precision, used):
    dtype = torch.bfloat16 if precision.bf16 else torch.float32
    models = [Toy(dtype), Toy(dtype)]
    trainings = [
        build_training(model, precision=precision, library=library, **options)
        for model, library in zip(models, (None, apex.load("cpu")), strict=True)
    ]
    for step in range(3):
        norms = [
            train_step(model, *training, seeds=[step, 9], lr=1e-2).grad_norm
            for model, training in zip(models, trainings, strict=True)
        ]
        assert norms[0] > 0.1 and norms[1] == pytest.approx(norms[0], rel=1e-6)
    assert set(calls) == used | {"multi_tensor_l2norm"}
    (theirs, ours) = ([state.values() for state in optimizer.tensors()] for _, optimizer in trainings)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, **({} if dtype == torch.bfloat16 else CLOSE))


def test_lists_of_the_kernels_count_in_32_bits(calls):
    library = apex.load("meta")
    assert library.takes(torch.empty(2**31 - 1, device="meta")) and not library.takes(torch.empty(2**31, device="meta"))


def test_norms_of_all_kinds_of_tensors(calls):
    flat = torch.randn(9000)
    tensors = [flat, torch.randn(5000).bfloat16(), torch.empty(0), torch.randn(7, dtype=torch.float64)]
    norm = square_sum(tensors, apex.load("cpu"))
    assert calls == ["multi_tensor_l2norm"] * 2  # one list of each dtype; the empty one and fp64 are torch's
    assert float(norm) == pytest.approx(float(square_sum(tensors)), rel=1e-6)
    assert square_sum([], apex.load("cpu")) is None


@pytest.mark.parametrize(
    ("total", "operand", "kernel"),
    [
        (torch.float32, torch.bfloat16, "wgrad_gemm_accum_fp32"),
        (torch.float32, torch.float32, "wgrad_gemm_accum_fp32"),
        (torch.float16, torch.float16, "wgrad_gemm_accum_fp16"),
        (torch.bfloat16, torch.bfloat16, "wgrad_gemm_accum_fp16"),
    ],
)
def test_gemms_add_weight_gradients(calls, total, operand, kernel):
    grad, x, start = torch.randn(6, 3).to(operand), torch.randn(6, 5).to(operand), torch.randn(2, 3, 5).to(total)
    expected = (start[1].double() + grad.double().t() @ x.double()).to(total)
    sums = MainGradSum(start, 1.0, 1.0, apex.load("cpu")).slice(1)
    sums.add(grad.t(), x)
    assert calls == [kernel]
    torch.testing.assert_close(sums.total, expected)


@pytest.mark.parametrize(
    ("beta", "alpha", "strided"), [(0.0, 1.0, False), (1.0, 0.5, False), (1.0, 1.0, True)], ids=str
)
def test_sums_that_apex_cannot_make_are_torch_s(calls, beta, alpha, strided):
    """Its GEMM would read a strided operand as if it were dense, and neither overwrites nor scales."""
    grad, x, total = torch.randn(6, 6), torch.randn(6, 5), torch.randn(3, 5)
    grad = grad[:, ::2] if strided else grad[:, :3].contiguous()
    expected = beta * total + alpha * grad.t() @ x
    MainGradSum(total, beta, alpha, apex.load("cpu")).add(grad.t(), x)
    assert calls == []
    torch.testing.assert_close(total, expected)


def test_a_run_gives_the_library_to_optimizer_and_gradients(calls, monkeypatch):
    argv = make_argv("accumulation")
    plain = train(argv, 0, ParallelState.single())
    assert calls == []
    monkeypatch.setattr(setup, "select_fused_library", lambda device, world: apex.load(device.type))
    borrowed = train(argv, 0, ParallelState.single())
    assert {"multi_tensor_adam_capturable", "multi_tensor_l2norm", "wgrad_gemm_accum_fp32"} <= set(calls)
    assert [str(difference) for difference in compare(plain, borrowed, FP32)] == []


def test_the_stand_in_checks_as_the_extension_does(calls):
    library = apex.load("cpu")
    x = torch.ones(4)
    with pytest.raises(AssertionError, match="lr must be tensor"):
        library.apply(library.kernels.multi_tensor_adam_capturable, x, [[x]] * 4, 1e-3, *[0.9] * 3, x, 1, 1, 0.0, x)
    with pytest.raises(AssertionError, match="takes 4 arguments"):
        library.apply(library.kernels.multi_tensor_l2norm, x.int(), [[x]])
    with pytest.raises(AssertionError, match="leaves out the launch"):
        library.norms([x, torch.empty(0)])

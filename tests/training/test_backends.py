"""Missing optional libraries: fall back to torch, or end the run with an error."""

import ctypes
import logging
import sys
from unittest import mock

import pytest

from arguments import parse_args
from moe_trainer.backends import BackendPolicy, MissingBackendError, import_problem, nccl_problem, nccl_version
from moe_trainer.errors import UserError
from moe_trainer.layers.kernels import select_kernels
from moe_trainer.layers.layer_factory import select_layer_factory
from moe_trainer.moe.dispatch import deepep
from moe_trainer.parallel.state import ParallelState
from tests.arguments.test_tokens import TOY

TYPED = frozenset({"this_flag"})


def use(backends: BackendPolicy, problem: str | None = "the package nowhere is not installed") -> bool:
    return backends.should_use(
        ("this_flag", "old_flag"),
        flag="--this-flag",
        problem=problem,
        remedy="Install it (pip install nowhere)",
        instead="plain torch",
    )


def test_installed_library_is_used(caplog):
    with caplog.at_level(logging.INFO):
        assert use(BackendPolicy("error", TYPED, cuda=True), problem=None)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("backends", "stops"),
    [
        (BackendPolicy(), False),
        (BackendPolicy(cuda=True), False),
        (BackendPolicy(typed=TYPED), False),
        (BackendPolicy(typed=TYPED, cuda=True), True),
        (BackendPolicy(typed=frozenset({"old_flag"}), cuda=True), True),
        (BackendPolicy(typed=frozenset({"another_flag"}), cuda=True), False),
        (BackendPolicy("fallback", TYPED, cuda=True), False),
        (BackendPolicy("error"), True),
    ],
)
def test_missing_backend_is_an_error_only_for_typed_flags_on_cuda(backends, stops, caplog):
    if stops:
        with pytest.raises(MissingBackendError) as error:
            use(backends)
        assert isinstance(error.value, UserError)  # exit code 2 and no traceback
        assert str(error.value) == (
            "--this-flag: the package nowhere is not installed. Install it (pip install nowhere), or add "
            "--on-missing-backend fallback to use plain torch."
        )
        return
    with caplog.at_level(logging.INFO):
        assert not use(backends)
    assert caplog.messages == ["--this-flag: the package nowhere is not installed; using plain torch"]


def test_missing_transformer_engine_falls_back_unless_requested(caplog):
    """Megatron's default falls back and logs it; set on a CUDA machine it is an error with a remedy."""
    ps = ParallelState.single()
    with caplog.at_level(logging.INFO):
        assert select_layer_factory(parse_args(TOY, 1), ps, BackendPolicy(cuda=True)).name == "local"
    assert len(caplog.messages) == 1 and "transformer_engine" in caplog.messages[0]
    with pytest.raises(MissingBackendError, match="--transformer-impl local, or add --on-missing-backend fallback"):
        select_layer_factory(parse_args(TOY, 1), ps, BackendPolicy(typed=frozenset({"transformer_impl"}), cuda=True))
    local = parse_args([*TOY, "--transformer-impl", "local"], 1)
    assert select_layer_factory(local, ps, BackendPolicy("error", cuda=True)).name == "local"


def test_missing_backend_errors_are_raised_together():
    backends = BackendPolicy("error", missing=[])
    backends.check()
    assert not use(backends) and not use(backends, "the package elsewhere is not installed")
    with pytest.raises(MissingBackendError, match="(?s)nowhere.*elsewhere"):
        backends.check()


def test_import_problem_explains_why_a_package_cannot_be_imported(tmp_path, monkeypatch):
    """The package is absent, lacks a dependency, or was built for another torch."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in {
        "full": "",
        "half": "import the_other_half",
        "foreign": "raise OSError('libcudart.so.11: cannot open\\nmore')",
    }.items():
        (tmp_path / f"{name}_package.py").write_text(text)
    assert import_problem("full_package") is None
    assert import_problem("no_such_package") == "the package no_such_package is not installed"
    assert (
        import_problem("half_package")
        == "the installed half_package cannot be imported (ModuleNotFoundError: No module named 'the_other_half')"
    )
    assert (
        import_problem("foreign_package")
        == "the installed foreign_package cannot be imported (OSError: libcudart.so.11: cannot open)"
    )


@pytest.mark.parametrize(("number", "code", "version"), [(22809, 0, (2, 28, 9)), (23004, 0, (2, 30, 4)), (0, 3, None)])
def test_the_version_of_nccl_is_that_of_the_loaded_library(monkeypatch, number, code, version):
    class Library:
        def __init__(self, name):
            assert name == "libnccl.so.2"

        def ncclGetVersion(self, pointer):  # noqa: N802 - the library's name
            pointer._obj.value = number
            return code

    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert nccl_version() == version


def test_without_a_library_the_version_of_nccl_is_unknown(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", mock.Mock(side_effect=OSError("libnccl.so.2: cannot open")))
    assert nccl_version() is None and nccl_problem((2, 30, 4)) is None


@pytest.mark.parametrize("library", ["triton", "deep_ep"])
def test_selected_broken_library_raises_with_the_import_error(library, tmp_path, monkeypatch):
    (tmp_path / f"{library}.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    asked = {
        "triton": lambda: select_kernels(["norm"], BackendPolicy("error", cuda=True)),
        "deep_ep": lambda: BackendPolicy("error").should_use(
            (), flag="flex", problem=deepep.problem(), remedy="", instead=""
        ),
    }
    with pytest.raises(
        MissingBackendError, match=f"the installed {library} cannot be imported .ImportError: undefined symbol: _ZN3c10"
    ):
        asked[library]()

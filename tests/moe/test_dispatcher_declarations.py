"""Declarations of dispatchers: complete, equal to flags and modules; what a new one needs, in a copy of the sources."""

import inspect
import json

import pytest
from moe.linked_sources import link_sources, run_linked
from structure.declared import classes_of, leave_out

from arguments.container import OPTIONS
from arguments.mechanisms import dispatchers
from arguments.mechanisms.dispatchers import ALLTOALL, DISPATCHERS, SELECTABLE, DispatcherCapability, get_dispatcher
from arguments.moe import MoEArgs
from arguments.parse import resolve_command_line
from moe_trainer.declared_module import load_module
from moe_trainer.estimate.hardware import find_hardware
from moe_trainer.estimate.interconnect import NVLINK
from moe_trainer.moe import dispatch
from moe_trainer.moe.dispatch.base import TokenDispatcher

SMALL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope "
    "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --micro-batch-size 1 --lr 1e-4 --train-iters 4 --eval-iters 0 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --bf16 --expert-model-parallel-size 2 --world-size 2 "
    "--moe-token-dispatcher-type toy"
).split()
DECLARATION = """
from arguments.mechanisms.support import Rejected
from arguments.mechanisms.traffic import Traffic

TOY = DispatcherDeclaration(
    name="Toy",
    type="toy",
    backend=None,
    capabilities=dict.fromkeys(DispatcherCapability, Rejected("is a toy")),
    sends_copies=True,
    gathers=False,
    traffic=lambda tokens: Traffic(nvlink=3 * tokens.num_bytes),
    is_measured=False,
    is_upstream=False,
)
DISPATCHERS: tuple[DispatcherDeclaration, ...] = (TOY, """
MODULE = """
import os
from arguments.mechanisms.dispatchers import TOY
from moe_trainer.moe.dispatch.alltoall import AllToAllDispatcher

class ToyDispatcher(AllToAllDispatcher):
    declaration = TOY

def make_dispatcher(settings):
    open(os.environ["TOY_RAN"], "a").close()
    return ToyDispatcher(settings.ps, settings.permutation, settings.mxfp8)
"""
PLAN = """
import json, sys
from arguments import parse_args
from moe_trainer.estimate.hardware import find_hardware
from moe_trainer.estimate.interconnect import Interconnect, exchange_seconds
from moe_trainer.estimate.plan import make_plan
from moe_trainer.estimate.uncertainty import UNTESTED_FEATURES
args, hardware = parse_args(sys.argv[1:], 2), find_hardware("h100")
plan = make_plan(args, 2, hardware)
print(json.dumps({
    "exchange": exchange_seconds(args, Interconnect(hardware), 64, 2),
    "wide": [name for name, has in UNTESTED_FEATURES.items() if "dispatcher" in name and has(plan)],
}))
"""


def test_every_dispatcher_has_a_module_and_a_value_of_the_flags():
    """The choices of both flags, the declarations, and the modules with their classes are the same set."""
    assert OPTIONS[dispatchers.TYPE].choices == dispatchers.TYPES
    assert OPTIONS[dispatchers.BACKEND].choices == tuple(dispatchers.BACKENDS)
    made = {each for each in classes_of(dispatch) if issubclass(each, TokenDispatcher) and each is not TokenDispatcher}
    declared = {each.__module__: each.declaration for each in made}
    assert declared == {load_module(each).__name__: each for each in DISPATCHERS} and len(made) == len(declared)
    for each in DISPATCHERS:
        module = load_module(each)
        assert list(inspect.signature(module.make_dispatcher).parameters) == ["settings"]
        assert all(hasattr(module, name) for name in ("problem", "INSTALL")) or each.package is None, each.key
    for each in SELECTABLE:
        assert get_dispatcher(MoEArgs(**each.selected_by)) is each


def test_capability_that_a_declaration_leaves_out_is_an_error():
    with pytest.raises(TypeError, match="alltoall leaves out NUM_SMS"):
        leave_out(ALLTOALL, DispatcherCapability.NUM_SMS)


def test_refused_padding_names_every_backend_that_pads():
    argv = [
        *SMALL[: SMALL.index("--world-size")],
        "--moe-expert-capacity-factor",
        "1",
        "--moe-pad-expert-input-to-capacity",
    ]
    deepep = ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "deepep"]
    (violation,) = resolve_command_line([*argv, *deepep], 2)[1]
    backends = dispatchers.backends_with(DispatcherCapability.CAPACITY_PADDING)
    assert len(backends) > 1 and all(f" {name}" in violation.message for name in backends)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The sources by links, with a further dispatcher in two files."""
    root = tmp_path_factory.mktemp("tree")
    new = {
        "arguments/mechanisms/dispatchers.py": lambda text: text.replace(
            "\nDISPATCHERS: tuple[DispatcherDeclaration, ...] = (", DECLARATION, 1
        ),
        "moe_trainer/moe/dispatch/toy.py": lambda _text: MODULE,
    }
    link_sources(root, new)
    return root


def run(tree, *words):
    return run_linked(tree, *words, TOY_RAN=str(tree / "ran"))


def test_new_dispatcher_rejects_what_it_does_not_support(tree):
    assert run(tree, "-m", "pretrain_moe", "--validate-only", *SMALL).returncode == 0
    flags = "--moe-dispatch-fwd-dtype mxfp8 --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"
    done = run(
        tree, "-m", "pretrain_moe", "--validate-only", *SMALL, *flags.split(), "--overlap-moe-expert-parallel-comm"
    )
    assert done.returncode == 2
    assert (
        "--moe-dispatch-fwd-dtype mxfp8 cannot be combined with --moe-token-dispatcher-type toy, which is a toy; use "
        "alltoall or flex." in done.stderr + done.stdout
    )
    for part in (
        "--moe-pad-expert-input-to-capacity cannot be combined with",
        "--overlap-moe-expert-parallel-comm needs",
    ):
        assert part in done.stderr + done.stdout


def test_new_dispatcher_is_planned_with_the_cost_of_its_own(tree):
    done = run(tree, "-c", PLAN, *SMALL)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    hardware = find_hardware("h100")
    nvlink = hardware.nvlink_gb_s * 1e9 * NVLINK * hardware.constants.links
    assert found["exchange"] == pytest.approx(3 * 64 * 128 * 2 / nvlink + hardware.constants.latency)
    assert found["wide"] == ["the toy dispatcher"]


def test_new_dispatcher_is_proven(tree):
    done = run(tree, "-m", "moe_trainer", "prove", *SMALL, "--ranks", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 equal one process" in done.stdout
    assert (tree / "ran").exists()

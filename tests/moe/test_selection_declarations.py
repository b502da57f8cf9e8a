"""Declarations of selections: complete, equal to flags and modules; what a new one needs, in a copy of the sources."""

import inspect
import itertools
import json
from dataclasses import replace

import pytest
from moe.layers import build_layer, sections
from moe.linked_sources import link_sources, run_linked
from structure.declared import classes_of, leave_out
from structure.source import source_files

from arguments.container import OPTIONS
from arguments.demands import demands
from arguments.mechanisms import selections as declared
from arguments.mechanisms.selection_kinds.declaration import BALANCING, SelectionCapability
from arguments.mechanisms.selections import HASH, REPLAY, SELECTIONS, SINKHORN, TOPK, get_selection
from arguments.mechanisms.support import NoEffect, Rejected, support_among
from arguments.moe import MoEArgs
from arguments.parse import resolve_command_line
from moe_trainer.declared_module import load_module
from moe_trainer.moe import selections
from moe_trainer.moe.selections.selection import ExpertSelection

IMPORTS = """import ExpertSplit, SelectionCapability, SelectionDeclaration, balancing_kinds
from arguments.mechanisms.support import Rejected
"""
DECLARATION = """
TOY = SelectionDeclaration(
    key="toy",
    name="the toy",
    mention="{moe_router_load_balancing_type:flag} toy",
    asked=lambda moe: balancing_kinds(moe) == ("toy",),
    balancing="toy",
    biases=("toy_bias",),
    capabilities=dict.fromkeys(SelectionCapability, True)
    | {SelectionCapability.LOSSES: Rejected("needs no loss"), SelectionCapability.REPLAY: Rejected("is a toy")},
)
SELECTIONS: tuple[SelectionDeclaration, ...] = (
    TOY,
"""
MODULE = """
import torch
from torch import nn

from arguments.mechanisms.selections import TOY
from moe_trainer.moe.selections.selection import ScoredSelection

class ToySelection(ScoredSelection, nn.Module):
    declaration = TOY

    def __init__(self, context):
        super().__init__(context.moe.moe_router_topk, context.make_scores(False), context.cache_fn)
        self.register_buffer("bias_E", torch.zeros(context.moe.num_experts))

    def choose(self, logits_TE, scores_TE, inputs):
        return (torch.arange(len(logits_TE))[:, None] + torch.arange(self.topk)) % logits_TE.shape[1]

    def state_buffers(self):
        yield "toy_bias", self.bias_E

def make_selection(context):
    return ToySelection(context)
"""
USE = """
import json, sys
import torch
from moe.layers import build_layer, sections
from arguments import parse_args
from arguments.parse import resolve_command_line
from moe_trainer.estimate.hardware import find_hardware
from moe_trainer.estimate.plan import make_plan
argv = sys.argv[1:]
toy = {"moe_router_load_balancing_type": "toy", "moe_aux_loss_coeff": 0.0}
router = build_layer(sections(**toy)).router
_, routing = router(torch.randn(8, 1, 16, dtype=torch.float64))
rejected = resolve_command_line([*argv, "--moe-enable-routing-replay", "--moe-aux-loss-coeff", "0.1"], 1)[1]
print(json.dumps({
    "loads": routing.sum(0).tolist(),
    "saved": [name for name, _ in router.state_buffers()],
    "rejected": sorted(each.message for each in rejected),
    "stages": len(make_plan(parse_args(argv, 1), 1, find_hardware("h100")).memory),
}))
"""
TINY = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope "
    "--num-experts 4 --disable-bias-linear --micro-batch-size 1 --lr 1e-4 --train-iters 4 --eval-iters 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100 --bf16 --moe-router-load-balancing-type toy --moe-aux-loss-coeff 0"
).split()


def test_every_selection_has_a_module_with_a_class_and_a_value_of_its_flag():
    made = {
        each for each in classes_of(selections) if issubclass(each, ExpertSelection) and "declaration" in vars(each)
    }
    found = {each.__module__: each.declaration for each in made}
    assert found == {load_module(each).__name__: each for each in SELECTIONS} and len(made) == len(found)
    assert OPTIONS[BALANCING].choices == declared.BALANCING_KINDS
    for each in SELECTIONS:
        assert list(inspect.signature(load_module(each).make_selection).parameters) == ["context"]
        if each.balancing is not None:
            assert get_selection(MoEArgs(num_experts=8, **{BALANCING: each.balancing})) is each


def test_capability_that_a_declaration_leaves_out_is_an_error():
    with pytest.raises(TypeError, match="top-k leaves out GROUPS"):
        leave_out(TOPK, SelectionCapability.GROUPS)


def test_only_the_first_layers_are_those_of_the_table():
    moe = MoEArgs(num_experts=8, moe_n_hash_layers=2, moe_enable_routing_replay=True)
    assert [get_selection(moe, number) for number in (1, 2, 3, None)] == [HASH, HASH, REPLAY, REPLAY]


@pytest.mark.parametrize("selection", [each for each in SELECTIONS if each.balancing], ids=lambda each: each.key)
def test_declared_biases_are_those_that_a_checkpoint_stores(selection):
    router = build_layer(sections(**{BALANCING: selection.balancing, "moe_aux_loss_coeff": 0.0})).router
    assert router.selection.declaration is selection
    assert tuple(name for name, _ in router.state_buffers()) == selection.biases


ASKING = {
    "hash_routing": "--moe-n-hash-layers 1",
    "replay": "--moe-enable-routing-replay",
    "sparsemixer": "--moe-router-sparsemixer-jitter 0.1",
}


def test_page_of_capabilities_rejects_two_selections_as_the_program_does():
    """Whichever of the two declares it."""
    asked_by_flags = [each for each in SELECTIONS if each.asked_by is not None]
    assert {each.key for each in asked_by_flags} == set(ASKING)
    for one, other in itertools.permutations(asked_by_flags, 2):
        argv = f"--num-experts 8 --moe-router-topk 2 {ASKING[one.key]} {ASKING[other.key]}".split()
        said = any("cannot be combined with" in each.message for each in resolve_command_line(argv, 1)[1])
        is_rejected = isinstance(support_among(SELECTIONS, one, other.asked_by), Rejected)
        assert said == is_rejected, (one.key, other.key)


def test_every_capability_is_demanded():
    """By a flag or by a rule that asks for it; others need no declaration."""
    rules = "".join(path.read_text() for path in source_files("arguments/rules"))
    asked = {each for each in SelectionCapability if f"SelectionCapability.{each.name})" in rules}
    assert {*asked, *demands(SelectionCapability).values()} == set(SelectionCapability)


ASKED = {
    "moe_router_pre_softmax": "--moe-router-pre-softmax",
    "moe_router_topk_scaling_factor": "--moe-router-topk-scaling-factor 2.5",
    "moe_router_num_groups": "--moe-router-num-groups 4",
    "moe_router_group_topk": "--moe-router-group-topk 2",
    "moe_router_group_score_topk": "--moe-router-group-score-topk 1",
    "moe_router_score_function": "--moe-router-score-function sigmoid",
    "moe_router_enable_expert_bias": "--moe-router-enable-expert-bias",
    "moe_router_fusion": "--moe-router-fusion",
}


@pytest.mark.parametrize("selection", SELECTIONS, ids=lambda each: each.key)
def test_flag_without_effect_is_accepted_with_a_note(selection):
    """Where a selection has only some layers, the others read the flag."""
    ignored = {dest for dest, each in demands(SelectionCapability).items() if selection.ignores(each)}
    if selection.num_layers is not None or not ignored:
        return
    assert ignored <= set(ASKED)
    argv = [*TINY[:-4], f"--{BALANCING}".replace("_", "-"), selection.balancing]
    settings, _ = resolve_command_line(argv, 1)
    silent = settings.lines()
    for dest in ignored:
        settings, found = resolve_command_line([*argv, *ASKED[dest].split()], 1)
        assert not [each.message for each in found if selection.balancing in each.message]
        said = [line for line in settings.lines() if line not in silent and line.startswith(ASKED[dest])]
        assert any(": no effect with" in line and selection.balancing in line for line in said), (dest, said)


@pytest.mark.parametrize("support", [True, NoEffect("it balances")])
def test_balancing_that_takes_coefficients_of_losses_is_an_error(support):
    with pytest.raises(TypeError, match="sinkhorn balancing must say why LOSSES are rejected"):
        replace(SINKHORN, capabilities={**SINKHORN.capabilities, SelectionCapability.LOSSES: support})


BY_A_FLAG = """
FLAGGED = SelectionDeclaration(
    key="flagged",
    name="the toy of a flag",
    mention="{moe_router_bias_update_rate}",
    asked=lambda moe: moe.moe_router_bias_update_rate == 0.5,
    capabilities=dict.fromkeys(SelectionCapability, Rejected("it is a toy"))
    | {SelectionCapability.EXPERT_BIAS: NoEffect("it has no bias")}
    | {SelectionCapability.PRE_SOFTMAX: Rejected("as in Megatron-LM")},
)
SELECTIONS: tuple[SelectionDeclaration, ...] = (
    FLAGGED,
"""
RULES = """
import json, sys
from arguments.parse import resolve_command_line
settings, found = resolve_command_line(sys.argv[1:], 1)
kinds = {each.kind for each in found if sys.argv[-1] in each.message}
print(json.dumps([sorted(each.message for each in found), settings.lines(), sorted(kinds)]))
"""
DEMANDING = (
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type aux_loss "
    "--moe-aux-loss-coeff 0.1 --moe-expert-capacity-factor 1.5 --moe-router-score-function sigmoid "
    "--moe-router-pre-softmax --moe-router-num-groups 4 --moe-router-group-topk 2 --triton-kernels router "
    "--use-varlen-dataset --cuda-graph-impl local --cuda-graph-modules moe_router "
    "--moe-router-bias-update-rate 0.5"
).split()


def test_rules_know_a_new_selection_that_a_flag_asks_for(tmp_path):
    """Not a value of --moe-router-load-balancing-type."""
    link_sources(
        tmp_path,
        {
            "arguments/mechanisms/selections.py": lambda text: text.replace(
                "import ExpertSplit, SelectionCapability, SelectionDeclaration\n",
                IMPORTS.replace("import Rejected", "import NoEffect, Rejected"),
                1,
            ).replace("SELECTIONS: tuple[SelectionDeclaration, ...] = (\n", BY_A_FLAG.lstrip(), 1)
        },
    )
    done = run_linked(tmp_path, "-c", RULES, *TINY[:-4], *DEMANDING)
    assert done.returncode == 0, done.stderr
    rejected, notes, kinds = json.loads(done.stdout)
    rate = "--moe-router-bias-update-rate 0.5"
    graphs = "--cuda-graph-impl local cannot capture moe_router with"
    assert [each for each in rejected if rate in each] == [
        f"{graphs} {rate}: it is a toy. Leave one of the two out.",
        f"--moe-aux-loss-coeff 0.1 must be 0 with {rate}: it is a toy.",
        f"--moe-expert-capacity-factor 1.5 cannot be combined with {rate}: it is a toy.",
        f"{rate} cannot be combined with --moe-router-group-topk: it is a toy.",
        f"{rate} cannot be combined with --moe-router-pre-softmax.",
        f"{rate} cannot be combined with --moe-router-score-function sigmoid: it is a toy.",
        f"{rate} is not implemented with packed sequences (--use-varlen-dataset): it is a toy.",
        f"--triton-kernels router cannot be combined with {rate}: it is a toy.",
    ]
    assert f"--moe-router-enable-expert-bias: no effect with {rate}: it has no bias." in notes
    assert kinds == ["rule"]  # as it declares


def test_new_selection_needs_a_declaration_and_a_module(tmp_path):
    """Its value of the flag, what it rejects, its choice, what a checkpoint stores and the estimate."""
    link_sources(
        tmp_path,
        {
            "arguments/mechanisms/selections.py": lambda text: text.replace(
                "import ExpertSplit, SelectionCapability, SelectionDeclaration\n", IMPORTS, 1
            ).replace("SELECTIONS: tuple[SelectionDeclaration, ...] = (\n", DECLARATION.lstrip(), 1),
            "moe_trainer/moe/selections/toy.py": lambda _text: MODULE,
        },
    )
    done = run_linked(tmp_path, "-c", USE, *TINY)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["loads"] == [2] * 8 and found["saved"] == ["toy_bias"] and found["stages"] == 1
    loss, replay = found["rejected"]
    assert loss.endswith("must be 0 with --moe-router-load-balancing-type toy, which needs no loss.")
    assert replay.endswith("cannot be combined with --moe-router-load-balancing-type toy, which is a toy.")

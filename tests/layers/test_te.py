"""TransformerEngine's kit: which calls are made, against the recorded signatures, and whole trainings with a stand-in for the package."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from harness import run_ranks
from layers.te_double import PYTORCH, Double
from moe.deep_ep_double import Signatures
from train.layouts import argv_of, compare, groups_of, train, train_ranks

from arguments import parse_args
from moe_trainer.backends import Backends
from moe_trainer.layers import kit as kits
from moe_trainer.layers import te_layers
from moe_trainer.model import build
from moe_trainer.parallel.state import ParallelState

CUDA = Backends(cuda=True)
TE = "--transformer-impl transformer_engine"
TP2, CP2, PP2 = (f"--{name}-parallel-size 2" for name in ("tensor-model", "context", "pipeline-model"))


def install(monkeypatch, modules: dict) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    for name, made in modules.items():
        monkeypatch.setitem(sys.modules, name, made)


@pytest.fixture
def double(shared, monkeypatch):
    """The stand-in is installed, and models on the CPU are built as they are on CUDA devices."""
    made = Double(Signatures(json.loads((shared / "reference" / "te_api.json").read_text())))
    install(monkeypatch, made.modules())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "a stream")
    choose = kits.choose

    def on_cuda(impl, ps, comm_types, backends, *rest, **more):
        return choose(impl, ps, comm_types, replace(backends, cuda=True), *rest, **more)

    monkeypatch.setattr(build, "choose", on_cuda)
    return made


def with_te(kind: str, flags: str = "") -> list[str]:
    return [*argv_of(kind), *f"{TE} {flags}".split()]


def told(differences) -> list[str]:
    return [str(difference) for difference in differences]


GROUPS = "--group-query-attention --num-query-groups"
PARTS = "--recompute-granularity selective --recompute-modules core_attn layernorm mla_up_proj mlp moe"
SENT = "--fine-grained-activation-offloading --min-offloaded-tensor-size 1 --offload-modules attn_norm qkv_linear core_attn attn_proj"


def short(called: set[str]) -> set[str]:
    """Without the packages that a name is in."""
    return {".".join(part for part in name.split(".") if part[0].isupper() or part.startswith(("forward", "set_"))) for name in called}


@pytest.mark.parametrize(("kind", "model", "flags"), [
    ("deepseek", "", ""), ("deepseek", "", PARTS), ("deepseek", "", SENT),
    ("biases, tied head", "--normalization LayerNorm", ""),
    ("plain", f"--apply-layernorm-1p {GROUPS} 2 --qk-layernorm --window-size 5,0", "--use-distributed-optimizer --overlap-param-gather "
     "--overlap-grad-reduce"),
    ("plain", "--reset-attention-mask --reset-position-ids", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
])
def test_steps_are_those_of_the_local_kit(double, kind, model, flags):
    local = train([*argv_of(kind), *model.split()], 0, ParallelState.single(), 2)
    assert not double.recorded.calls
    fused = train(with_te(kind, f"{model} {flags}"), 0, ParallelState.single(), 2)
    assert told(compare(local, fused)) == []
    norm = {"LayerNorm" if "LayerNorm" in model else "RMSNorm"}
    attends = {"DotProductAttention.forward"} if "reset" not in model else set()
    assert short(double.called()) == {"Linear", "Linear.forward", "DotProductAttention"} | norm | attends


def forked(rank, n, argvs, steps):
    """Trainings on the ranks, and what was called on this one."""
    outcomes = train_ranks(rank, n, argvs, steps)
    return outcomes, short(sys.modules[PYTORCH].double.called())


@pytest.mark.parametrize(("kind", "model", "mapping"), [
    ("deepseek", "", f"{TP2} --sequence-parallel {PARTS}"), ("plain", "", TP2),
    ("biases, tied head", "--normalization LayerNorm", f"{TP2} --sequence-parallel --expert-tensor-parallel-size 1"),
    ("plain", f"{GROUPS} 1", f"{TP2} --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    ("plain", "", f"{PP2} --num-virtual-stages-per-pipeline-rank 2"), ("plain", "", "--use-torch-fsdp2"),
])
def test_two_ranks_are_one_process_with_the_local_kit(double, kind, model, mapping):
    sys.modules[PYTORCH].double = double
    one = train([*argv_of(kind), *model.split()], 0, ParallelState.single(), 2)
    assert not double.recorded.calls
    (outcomes, called), _ = run_ranks(forked, 2, [with_te(kind, f"{model} {mapping}")], 2, timeout=300.0)
    assert told(compare(one, outcomes[0])) == []
    assert {"Linear.forward", "DotProductAttention.forward"} <= called


@pytest.mark.parametrize("kind", ["p2p", "a2a", "allgather"])
def test_context_parallel_attention_is_one_process(double, monkeypatch, kind):
    """In fp32, which the real one has no kernels for."""
    sys.modules[PYTORCH].double = double
    monkeypatch.setattr(te_layers, "attention_problem", lambda *_: None)
    model = f"{GROUPS} 2"
    one = train([*argv_of("plain"), *model.split()], 0, ParallelState.single(), 1)
    (outcomes, called), _ = run_ranks(forked, 2, [with_te("plain", f"{model} {CP2} --cp-comm-type {kind}")], 1, timeout=300.0)
    assert told(compare(one, outcomes[0])) == []
    assert {"DotProductAttention.set_context_parallel_group", "DotProductAttention.forward"} <= called


def exchanges(rank, n, flags):
    """How the library is told to exchange, and which ranks of the world its groups have."""
    ps = groups_of([*argv_of("plain"), "--bf16", *flags.split()], rank, n)
    group, ranks, stream, kind = te_layers.FusedLayers(None, ps, parse_args([*argv_of("plain"), *flags.split()], n).parallel.cp_comm_type)._exchange(1)
    groups = group if isinstance(group, list) else [group]
    return kind, [torch.distributed.get_process_group_ranks(each) for each in groups], ranks, stream


@pytest.mark.parametrize(("flags", "kind", "groups"), [
    ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", "a2a+p2p", [[2, 3], [1, 3]]),
    ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 1 4", "p2p", [[0, 1, 2, 3]]),
    ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 1", "a2a", [[0, 1, 2, 3]]),
    ("--cp-comm-type allgather", "all_gather", [[0, 1, 2, 3]]),
])
def test_groups_that_exchange(flags, kind, groups):
    *_, last = run_ranks(exchanges, 4, f"--context-parallel-size 4 {flags}")
    assert last == (kind, groups, [0, 1, 2, 3], None)

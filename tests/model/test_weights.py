"""Weights by global name over every dimension of the grid, with hand-made parameters: cut, stacked, replicated, tied."""

import pytest
import torch
from harness import run_ranks
from torch import nn

from moe_trainer.model.weights import (
    export_named_weights,
    gather_named_tensors,
    join_shards,
    load_named_weights,
    take_local_shard,
)
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import ParallelState

LAYERS, EXPERTS, HIDDEN, FFN = 4, 4, 8, 12


def full_tensor(name, shape, kind=0):
    """Every element encodes its tensor and its place."""
    number = sum(ord(letter) * (position + 1) for position, letter in enumerate(name)) % 997
    return number + 1000 * kind + torch.arange(torch.Size(shape).numel()).reshape(shape) / 4096


class Chunk(nn.Module):
    """Layers of one (virtual) stage, holding this rank's pieces."""

    def __init__(self, ps: ParallelState, layers, first: bool, last: bool, fill: bool, dtype=torch.float32):
        super().__init__()
        self.ps, self.fill, self.dtype = ps, fill, dtype
        self.state = {}
        if first:
            self.add("embedding.weight", (16, HIDDEN), cut=0, tied=True)
        for layer in layers:
            prefix = f"decoder.layers.{layer}."
            self.add(prefix + "norm.weight", (HIDDEN,))
            self.add(prefix + "linear_fc1.weight", (2 * FFN, HIDDEN), cut=0, parts=2)
            self.add(prefix + "linear_fc2.weight", (HIDDEN, FFN), cut=1)
            self.experts(prefix + "linear_fc1.weight", (2 * FFN, HIDDEN), cut=0, parts=2)
            self.experts(prefix + "linear_fc1.bias", (2 * FFN,), cut=0, parts=2)
            self.experts(prefix + "linear_fc2.weight", (HIDDEN, FFN), cut=1)
            self.experts(prefix + "linear_fc2.bias", (HIDDEN,), cut=None)
            bias = full_tensor(prefix + "expert_bias", (EXPERTS,)) if fill else torch.zeros(EXPERTS)
            self.state[prefix + "expert_bias"] = bias
        if last:
            self.add("final_norm.weight", (HIDDEN,))
            if not first:
                self.add("embedding.weight", (16, HIDDEN), cut=0, tied=True, is_replica=True)

    def add(self, name, shape, cut=None, parts=1, **more):
        tp = self.ps.tp
        info = ParamInfo(
            (name,),
            sharded_dim=cut,
            parts=parts if cut is not None else 1,
            **more,
            **({"shard_rank": tp.rank, "shard_count": tp.size} if cut is not None else {}),
        )
        self.keep(name, take_local_shard(full_tensor(name, shape), info).clone(), info)

    def experts(self, rest, shape, cut, parts=1):
        ep, etp = self.ps.ep, self.ps.etp
        each = EXPERTS // ep.size
        names = tuple(
            rest.replace("linear", f"local_experts.{e}.linear") for e in range(ep.rank * each, (ep.rank + 1) * each)
        )
        info = ParamInfo(
            names,
            kind="expert",
            stacked=True,
            sharded_dim=cut,
            parts=parts if cut is not None else 1,
            **({"shard_rank": etp.rank, "shard_count": etp.size} if cut is not None else {}),
        )
        self.keep(
            "experts_" + rest, torch.stack([take_local_shard(full_tensor(name, shape), info) for name in names]), info
        )

    def keep(self, name, value, info):
        param = nn.Parameter((value if self.fill else torch.zeros_like(value)).to(self.dtype))
        param.info = info
        self.register_parameter(name.replace(".", "/"), param)

    def named_state_buffers(self):
        yield from self.state.items()


def make(ps, vpp=1, fill=True, dtype=torch.float32):
    """This rank's chunks; pp * vpp must divide the layers."""
    stages = ps.pp.size * vpp
    each = LAYERS // stages
    return [
        Chunk(ps, range(stage * each, (stage + 1) * each), stage == 0, stage == stages - 1, fill, dtype)
        for stage in range(ps.pp.rank, stages, ps.pp.size)
    ]


def _states(rank, n, mappings):
    return [(mapping, ParallelState.create(n, rank, **mapping["ps"])) for mapping in mappings]


def _gather(rank, n, mappings):
    """Return the weights this rank exports under every mapping: parameters, tripled parameters, parameters and buffers."""
    found = []
    for mapping, ps in _states(rank, n, mappings):
        chunks = make(ps, mapping.get("vpp", 1))
        three = {
            name: value.clone()
            for name, value in gather_named_tensors(chunks, ps, lambda param: param.data.double() * 3)
        }
        found.append((three, {name: value.clone() for name, value in export_named_weights(chunks, ps)}))
    return found


def _load(rank, n, mappings, weights):
    """Load into zeroed models; return whether each equals the filled one."""
    same = []
    for mapping, ps in _states(rank, n, mappings):
        target, expected = (make(ps, mapping.get("vpp", 1), fill) for fill in (False, True))
        load_named_weights(target, weights, ps)
        same.append(
            all(
                torch.equal(a, b)
                for one, other in zip(target, expected, strict=True)
                for a, b in zip(
                    (*one.parameters(), *one.state.values()), (*other.parameters(), *other.state.values()), strict=True
                )
            )
        )
    return same


MAPPINGS = {
    2: [
        dict(ps=dict(tp=2)),
        dict(ps=dict(pp=2)),
        dict(ps=dict(ep=2)),
        dict(ps=dict(etp=2)),
        dict(ps=dict(cp=2)),
        dict(ps=dict(pp=2), vpp=2),
    ],
    4: [
        dict(ps=dict(tp=2, pp=2)),
        dict(ps=dict(tp=2, ep=2)),
        dict(ps=dict(tp=4, etp=2, ep=2)),
        dict(ps=dict(tp=2, ep=4)),
        dict(ps=dict(pp=2, ep=2), vpp=2),
        dict(ps=dict(tp=2, etp=2, pp=2)),
    ],
    8: [
        dict(ps=dict(tp=2, pp=2, ep=2)),
        dict(ps=dict(tp=2, pp=2, ep=4), vpp=2),
        dict(ps=dict(tp=2, cp=2, pp=2, etp=2, ep=2)),
        dict(ps=dict(tp=2, pp=2, ep=2, order="tp-cp-ep-pp-dp")),
    ],
}


@pytest.mark.parametrize("n", MAPPINGS)
def test_export_under_every_mapping_equals_one_process(n):
    chunk = make(ParallelState.single())[0]
    expected = {name: value for name, value in export_named_weights([chunk], ParallelState.single())}
    assert all(torch.equal(value, full_tensor(name, value.shape)) for name, value in expected.items())
    results = run_ranks(_gather, n, MAPPINGS[n])
    for mapping, (three, weights) in zip(MAPPINGS[n], results[0]):
        assert list(weights) == list(expected), mapping
        assert all(torch.equal(weights[name], expected[name]) for name in expected), mapping
        params = [name for name in expected if "expert_bias" not in name]
        assert list(three) == params and all(
            torch.equal(three[name], expected[name].double() * 3) for name in params
        ), mapping
    for other in results[1:]:
        assert all(three == weights == {} for three, weights in other)


@pytest.mark.parametrize("n", MAPPINGS)
def test_every_mapping_loads_weights_of_one_process(n):
    chunk = make(ParallelState.single())[0]
    weights = {name: value.clone() for name, value in export_named_weights([chunk], ParallelState.single())}
    for same in run_ranks(_load, n, MAPPINGS[n], weights):
        assert same == [True] * len(MAPPINGS[n])


def _load_mismatched(rank, n, weights):
    ps = ParallelState.create(n, rank, tp=2, pp=2)
    messages = []
    for strict in (True, False):
        target = make(ps, fill=False)
        with pytest.raises(ValueError) as error:
            load_named_weights(target, weights, ps, strict=strict)
        messages.append(str(error.value))
        assert not any(param.any() for chunk in target for param in chunk.parameters()), "something was copied"
    return messages


def test_mismatched_weights_are_rejected_on_every_rank():
    chunk = make(ParallelState.single())[0]
    weights = dict(export_named_weights([chunk], ParallelState.single()))
    del weights["decoder.layers.3.local_experts.2.linear_fc2.weight"]
    weights["decoder.layers.0.linear_fc1.weight"] = torch.zeros(FFN, HIDDEN)  # one rank's piece, not the whole
    weights["decoder.layers.9.norm.weight"] = torch.zeros(1)
    results = run_ranks(_load_mismatched, 4, weights)
    assert all(result == results[0] for result in results)
    strict, lenient = results[0]
    for words in (
        "1 missing",
        "layers.3.local_experts.2.linear_fc2.weight",
        "1 unexpected",
        "layers.9.norm",
        "layers.0.linear_fc1.weight: given [12, 8], the model has [24, 8]",
    ):
        assert words in strict
    assert "missing" not in lenient and "unexpected" not in lenient and "given [12, 8]" in lenient


def test_gate_and_up_projection_are_sharded_separately():
    full = torch.arange(12.0).reshape(12, 1)
    infos = [ParamInfo(("x",), sharded_dim=0, shard_rank=rank, shard_count=3, parts=2) for rank in range(3)]
    assert take_local_shard(full, infos[1]).flatten().tolist() == [2, 3, 8, 9]
    assert torch.equal(join_shards([take_local_shard(full, info) for info in infos], infos[0]), full)


def _export_bf16(rank, n):
    ps = ParallelState.create(n, rank, tp=2, pp=2)
    return {name: value.clone() for name, value in export_named_weights(make(ps, dtype=torch.bfloat16), ps)}


def test_exported_tensors_keep_their_dtype():
    found = run_ranks(_export_bf16, 4)[0]
    for name, value in found.items():
        assert value.dtype == (torch.float32 if "expert_bias" in name else torch.bfloat16)
        assert torch.equal(value, full_tensor(name, value.shape).to(value.dtype))

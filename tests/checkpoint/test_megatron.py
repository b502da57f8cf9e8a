"""A checkpoint that Megatron-LM wrote is read: weights, optimizer, counters, random states, args."""

import io
import pickle
import random
from pathlib import Path

import pytest
import torch
from checkpoint.fake import RECORD, FakeModel, FakeOptimizer
from harness import run_ranks

from moe_trainer.checkpoint.archive import load_bytes
from moe_trainer.checkpoint.index import check, read_index
from moe_trainer.checkpoint.manager import LoadOptions, latest_iteration, load, read_saved_args
from moe_trainer.checkpoint.unpickle import SafeUnpickler, UnknownObject, load_pickle, to_builtin
from moe_trainer.model.weights import take_local_shard
from moe_trainer.parallel.state import ParallelState

SINGLE = ParallelState.single()


def legacy_file(shared: Path) -> dict:
    """The same iteration in the legacy format: an independent source of every value."""
    content = (shared / "golden/ckpt/a2_torch/iter_0000005/mp_rank_00/model_optim_rng.pt").read_bytes()
    return load_bytes(content)


def test_golden_checkpoint_weights_and_counters_are_read(shared):
    model = FakeModel(seed=1)
    optimizer = FakeOptimizer(model, SINGLE, seed=1)
    found = load(shared / "golden/ckpt/a2_torch_dist", [model], optimizer, SINGLE, LoadOptions(RECORD))
    assert found.iteration == 5 and found.from_megatron and found.optim_loaded and found.rng_loaded
    assert found.state.consumed_train_samples == 20 and found.state.consumed_valid_samples == 0
    assert found.state.num_floating_point_operations_so_far == 692060160.0
    assert found.state.scheduler["num_steps"] == 20 and optimizer.step == 5
    legacy = legacy_file(shared)
    weights = legacy["model"]
    for param in model.parameters():
        named = param.unbind(0) if param.info.stacked else (param,)
        for name, tensor in zip(param.info.names, named, strict=True):
            assert torch.equal(tensor, weights[name]), name
    assert random.getstate() == legacy["rng_state"][0]["random_rng_state"]
    assert torch.equal(torch.get_rng_state(), legacy["rng_state"][0]["torch_rng_state"])


def test_recorded_padded_vocab_size_gives_no_warning(shared, caplog):
    """Megatron-LM records its padded vocabulary; a command line without it gives no warning."""
    assert read_saved_args(shared / "golden/ckpt/a2_torch_dist")["padded_vocab_size"] == 512
    model = FakeModel(seed=1)
    load(
        shared / "golden/ckpt/a2_torch_dist",
        [model],
        FakeOptimizer(model, SINGLE),
        SINGLE,
        LoadOptions(RECORD | {"padded_vocab_size": None}),
    )
    assert "padded_vocab_size" not in caplog.text


def test_golden_checkpoint_optimizer_moments_are_read(shared):
    model = FakeModel(seed=1)
    optimizer = FakeOptimizer(model, SINGLE, seed=1)
    load(shared / "golden/ckpt/a2_torch_dist", [model], optimizer, SINGLE, LoadOptions(RECORD))
    legacy = legacy_file(shared)
    # Megatron numbers the parameters group by group: decayed ones first, then the norms
    names = [name for name, value in legacy["model"].items() if isinstance(value, torch.Tensor)]
    order = [name for name in names if legacy["model"][name].dim() > 1] + [
        name for name in names if legacy["model"][name].dim() == 1
    ]
    state = {name: legacy["optimizer"]["state"][number] for number, name in enumerate(order)}
    assert len(state) == len(legacy["optimizer"]["state"])
    for held in optimizer.tensors():
        expected = torch.cat([state[name][held.state_name].flatten() for name in held.param.info.names])
        assert torch.equal(held.tensor, expected), held.param.info.names


def _load_golden(rank, size, folder, weights, sizes):
    ps = ParallelState.create(size, rank, **sizes)
    model = FakeModel(seed=1, ps=ps)
    optimizer = FakeOptimizer(model, ps, distributed=True, seed=1)
    found = load(folder, [model], optimizer, ps, LoadOptions(RECORD))
    assert found.iteration == 5 and found.optim_loaded
    for param in model.parameters():
        for name, tensor in zip(param.info.names, param.unbind(0) if param.info.stacked else (param,), strict=True):
            assert torch.equal(tensor, take_local_shard(weights[name], param.info)), name
    return found.rng_loaded


@pytest.mark.parametrize("sizes", [dict(tp=2, pp=2, etp=2), dict(tp=2, cp=2, ep=4), dict(pp=2, ep=2)])
def test_every_mapping_reads_a_golden_checkpoint(shared, sizes):
    """Megatron-LM wrote it with one process; each rank takes its stage, its experts and its piece of every tensor."""
    weights = legacy_file(shared)["model"]
    assert run_ranks(_load_golden, 4, shared / "golden/ckpt/a2_torch_dist", weights, sizes) == [False] * 4


def test_args_of_golden_checkpoint_are_read(shared):
    args = read_saved_args(shared / "golden/ckpt/a2_torch_dist")
    assert {name: args[name] for name in RECORD if name != "quick_geglu"} == {
        name: value for name, value in RECORD.items() if name != "quick_geglu"
    }
    assert args["params_dtype"] == "float32" and args["moe_router_load_balancing_type"] == "aux_loss"
    assert latest_iteration(shared / "golden/ckpt/a2_torch_dist") == 5


def test_a_golden_checkpoint_is_valid(shared):
    folder = shared / "golden/ckpt/a2_torch_dist/iter_0000005"
    assert check(folder) == []
    assert len(read_index(folder).storage_data) > 100


class Trap:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle ran code')",)


def test_pickles_do_not_run_code(tmp_path):
    path = tmp_path / "trap"
    torch.save([{"args": Trap(), "iteration": 5}], path)
    found = load_bytes(path.read_bytes())[0]
    assert isinstance(found["args"], UnknownObject) and found["iteration"] == 5
    content = pickle.dumps({"x": Trap(), "y": (torch.float32, {1})})
    assert to_builtin(load_pickle(content))["y"] == ("float32", [1])
    assert to_builtin(SafeUnpickler(io.BytesIO(content)).load())["y"] == ("float32", [1])

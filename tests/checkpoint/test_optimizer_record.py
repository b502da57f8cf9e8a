"""The optimizer's entry and the random states of a checkpoint have the keys that Megatron-LM's loaders expect."""

import random
from pathlib import Path

import numpy
import pytest
import torch

from moe_trainer.checkpoint import random_state
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.optimizer_record import content_metadata, is_decoupled, optimizer_entry, param_group
from moe_trainer.parallel.state import ParallelState

RECORD = {
    "lr": 1e-3,
    "min_lr": 1e-4,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "optimizer": "adam",
    "transformer_impl": "local",
}
# recorded from Megatron-LM d98e8a64 (torch's AdamW); lr is overwritten by its scheduler
ADAMW = {
    "amsgrad": False,
    "betas": (0.9, 0.95),
    "capturable": False,
    "decoupled_weight_decay": True,
    "default_config": True,
    "differentiable": False,
    "eps": 1e-8,
    "foreach": None,
    "fused": None,
    "is_decoupled_lr": False,
    "is_expert_parallel": False,
    "lr_mult": 1.0,
    "max_lr": 1e-3,
    "maximize": False,
    "min_lr": 1e-4,
    "wd_mult": 1.0,
    "weight_decay": 0.1,
}
TRACKERS = ["data-parallel-rng", "expert-parallel-rng", "model-parallel-rng"]


def scalars(*kinds: tuple[float, bool], **more) -> dict:
    """As Optimizer.scalars(); kinds: (wd_mult, is_expert_parallel) of each group."""
    return {
        "step": 5,
        "optimizer": "adam",
        "grad_scaler": None,
        "param_groups": [
            {"wd_mult": wd, "lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": expert}
            for wd, expert in kinds
        ],
    } | more


def without_lr(group: dict) -> dict:
    return {key: value for key, value in group.items() if key not in ("lr", "bias_correction")}


def test_param_group_has_megatron_identifiers():
    assert without_lr(param_group(RECORD, decayed=True, decoupled=False, experts=False)) == ADAMW
    assert without_lr(param_group(RECORD, decayed=False, decoupled=False, experts=True, step=5)) == ADAMW | {
        "wd_mult": 0.0,
        "weight_decay": 0.0,
        "is_expert_parallel": True,
        "step": 5,
    }
    own = param_group(
        RECORD | {"decoupled_lr": 5e-4, "decoupled_min_lr": None}, decayed=True, decoupled=True, experts=False
    )
    assert without_lr(own) == ADAMW | {
        "default_config": False,
        "max_lr": 5e-4,
    }  # its own bound, and the common lower one
    assert (
        is_decoupled(own)
        and is_decoupled({"is_decoupled_lr": True})
        and not is_decoupled({})
        and not is_decoupled(ADAMW)
    )


def test_mup_param_groups_equal_megatron():
    """As Megatron-LM saves them with --use-mup (recorded from d98e8a64), in its order."""
    record = RECORD | {
        "use_mup": True,
        "hidden_size": 64,
        "mup_base_hidden_size": 16,
        "mup_width_mult": 1.0,
        "adam_eps": 1e-3,
    }
    kinds = [{"wd_mult": 0.0, "lr_mult": 1.0}, {"wd_mult": 1.0, "lr_mult": 0.25}, {"wd_mult": 1.0, "lr_mult": 1.0}]
    both = scalars() | {
        "param_groups": [kind | {"is_decoupled_lr": False, "is_expert_parallel": False} for kind in kinds]
    }
    usual = {"max_lr": 1e-3, "min_lr": 1e-4, "eps": 1e-3, "default_config": True, "wd_mult": 1.0, "lr_mult": 1.0}
    scaled = {
        "max_lr": 2.5e-4,
        "min_lr": 2.5e-5,
        "eps": 2.5e-4,
        "default_config": False,
        "wd_mult": 1.0,
        "lr_mult": 1.0,
    }

    def written_groups(record, both):
        return [
            {key: group[key] for key in usual if key in group}
            for group in optimizer_entry(record, both)["param_groups"]
        ]

    assert written_groups(record, both) == [usual, scaled, usual | {"wd_mult": 0.0}]
    sgd = [{"wd_mult": 0.0, "lr_mult": 4.0}, {"wd_mult": 1.0, "lr_mult": 4.0}, {"wd_mult": 1.0, "lr_mult": 1.0}]
    both["param_groups"] = [kind | {"is_decoupled_lr": False, "is_expert_parallel": False} for kind in sgd]
    usual.pop("eps")
    own = usual | {"max_lr": 4e-3, "min_lr": 4e-4, "default_config": False}
    assert written_groups(record | {"optimizer": "sgd"}, both) == [usual, own, own | {"wd_mult": 0.0}]


def test_param_group_has_betas_of_its_own_optimizer():
    """Megatron-LM continues with those of the checkpoint."""
    lion = param_group(
        RECORD | {"optimizer": "lion", "lion_beta1": 0.91, "lion_beta2": 0.98},
        decayed=True,
        decoupled=False,
        experts=False,
    )
    assert lion["betas"] == (0.91, 0.98) and "eps" not in lion


def test_optimizer_entry_of_every_optimizer():
    both = scalars((1.0, False), (0.0, False))
    entry = optimizer_entry(RECORD, both)
    assert entry.keys() == {"state", "param_groups"} and entry["state"] == {"common_step": torch.tensor(5.0)}
    assert [group["wd_mult"] for group in entry["param_groups"]] == [1.0, 0.0] and "step" not in entry["param_groups"][
        0
    ]
    engine = optimizer_entry(RECORD | {"transformer_impl": "transformer_engine"}, both)
    assert engine["state"] == {} and [group["step"] for group in engine["param_groups"]] == [5, 5]
    half = optimizer_entry(RECORD | {"bf16": True}, both)
    assert half == {"optimizer": entry}
    chain = optimizer_entry(
        RECORD | {"fp16": True}, scalars((1.0, False), (0.0, False), (1.0, True), grad_scaler={"scale": 2.0})
    )
    assert chain.keys() == {0, 1} and [len(one["optimizer"]["param_groups"]) for one in chain.values()] == [2, 1]
    assert all(one["grad_scaler"] == {"scale": 2.0} for one in chain.values())
    distributed = optimizer_entry(RECORD | {"use_distributed_optimizer": True}, both)
    assert distributed.keys() == {"optimizer", "param_state_sharding_type"}
    assert [group["step"] for group in distributed["optimizer"]["param_groups"]] == [5, 5]
    assert (
        content_metadata(RECORD | {"use_distributed_optimizer": True})["distrib_optim_sharding_type"]
        == "fully_reshardable"
    )
    assert content_metadata(RECORD) == {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    assert (
        distributed["optimizer"].keys() == {"param_groups"}
        and distributed["param_state_sharding_type"] == "fully_reshardable"
    )


def test_random_state_has_all_megatron_streams():
    streams = [{"tensor_parallel": torch.Generator().manual_seed(3)}]
    state = random_state.capture_for_checkpoint(streams, ParallelState.single())
    assert {
        "random_rng_state",
        "np_rng_state",
        "torch_rng_state",
        "cuda_rng_state",
        "rng_tracker_states",
    } < state.keys()
    trackers = state["rng_tracker_states"]
    assert sorted(trackers) == TRACKERS and torch.equal(
        trackers["model-parallel-rng"], streams[0]["tensor_parallel"].get_state()
    )
    assert all(
        value.dtype == torch.uint8 and value.shape == state["cuda_rng_state"].shape for value in trackers.values()
    )
    later = random_state.capture_for_checkpoint([], ParallelState.single())["rng_tracker_states"]
    torch.rand(1)
    again = random_state.capture_for_checkpoint([], ParallelState.single())["rng_tracker_states"]
    assert not any(
        torch.equal(later[name], again[name]) for name in TRACKERS
    )  # no stream begins twice at the same place


def test_megatron_random_state_sets_the_tensor_parallel_stream():
    source, target = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    state = random_state.capture_for_checkpoint([{"tensor_parallel": source}], ParallelState.single())
    del state["moe_trainer_streams"]
    random_state.restore(state, [{"tensor_parallel": target}])
    assert torch.equal(source.get_state(), target.get_state())


@pytest.mark.parametrize(
    "broken", [{}, {"random_rng_state": 3}, {"random_rng_state": random.getstate(), "np_rng_state": ("x",)}, None]
)
def test_a_broken_random_state_is_an_error_with_advice(broken):
    before = numpy.random.get_state()
    with pytest.raises(CheckpointError, match="ckpt/iter_3: the random state is damaged .*--no-load-rng"):
        random_state.restore(broken, [], Path("ckpt/iter_3"))
    assert numpy.random.get_state()[1].tolist() == before[1].tolist()

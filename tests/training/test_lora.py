"""--lora-dim: adapters train, everything else is frozen, and layouts equal one process."""

import pytest
import torch
from commands import run
from harness import run_ranks
from safetensors.torch import load_file
from training.agreement import check_cases
from training.forked import pretrain
from training.layouts import create_groups, make_argv, make_run, shallow
from training.resuming import assert_alike, load_and_save, train_and_save

from arguments.lora import is_adapter
from moe_trainer.checkpoint.verify import verify_checkpoint
from moe_trainer.errors import UserError
from moe_trainer.parallel.params import get_param_info
from moe_trainer.parallel.state import ParallelState
from moe_trainer.verification.shrink import as_is

LORA = "--lora-dim 4 --lora-alpha 16 --lr 3e-3".split()
DEEPSEEK = [*shallow(make_argv("deepseek")), *LORA]
PLAIN = [*shallow(make_argv("plain")), "--group-query-attention", "--num-query-groups", "2", *LORA]
BASE = [*shallow(make_argv("deepseek")), "--log-interval", "1", "--save-interval", "2", "--eval-interval", "1000"]
TUNED = [*BASE, *LORA, "--lora-dropout", "0.3", "--train-iters", "4"]
DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-key-head-dim 4 "
    "--linear-value-head-dim 4 --linear-num-key-heads 4 --linear-num-value-heads 8 --norm-epsilon 1e-2"
)
MAMBA = (
    "--hybrid-layer-pattern M*ME --position-embedding-type none --mamba-num-heads 8 --mamba-head-dim 6 "
    "--mamba-num-groups 4 --mamba-state-dim 10"
)
SPARSE = (
    "--experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 8 --dsa-indexer-topk 5 "
    "--mtp-num-layers 0"
).split()
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 300"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TP2, EP2, PP2 = (f"--{name}-model-parallel-size 2" for name in ("tensor", "expert", "pipeline"))
LAYOUTS = {
    "tensor, sequence": (DEEPSEEK, f"{TP2} --sequence-parallel", 2),
    "tensor, experts too": (PLAIN, f"{TP2} --expert-tensor-parallel-size 2 --sequence-parallel", 2),
    "tensor, dense": (shallow([w for w in PLAIN if w != "--moe-grouped-gemm"]), f"{TP2} --moe-layer-freq [0,0]", 2),
    "expert, overlapped optimizer": (PLAIN, f"{EP2} {OVERLAP} --global-batch-size 8", 4),
    "pipeline, recompute": (DEEPSEEK, f"{PP2} {FULL}", 2),
    "context": (PLAIN, "--context-parallel-size 2", 2),
    "linear attention": ([*PLAIN, *DELTA.split()], f"{TP2} --sequence-parallel", 2),
    "mamba": ([*PLAIN, *MAMBA.split()], f"{TP2} --sequence-parallel --context-parallel-size 2", 4),
    "selective recompute": (
        DEEPSEEK,
        f"{EP2} --recompute-granularity selective --recompute-modules core_attn moe_act mla_up_proj layernorm "
        "shared_experts",
        2,
    ),
    "zero bubble": (PLAIN, f"{PP2} --pipeline-schedule zero-bubble", 2),
    "gathered latents": ([*DEEPSEEK, *SPARSE], f"{TP2} --dsa-attention-form gathered", 2),
    "gathered latents, sequence": ([*DEEPSEEK, *SPARSE], f"{TP2} --sequence-parallel --dsa-attention-form gathered", 2),
    "shared expert overlap": (DEEPSEEK, f"{EP2} --moe-shared-expert-overlap --moe-token-dispatcher-type alltoall", 2),
}


def test_layouts_equal_one_process():
    """Losses, gradients, gradient norms and weights of two steps; the gradients of A are zero in the first only."""
    check_cases({
        name: as_is([*argv, "--global-batch-size", "4", *flags.split()], ranks)
        for name, (argv, flags, ranks) in LAYOUTS.items()
    })  # fmt: skip


@pytest.mark.parametrize("flags", ["", "--use-distributed-optimizer --bf16"])
def test_frozen_parameters_have_no_gradients_and_no_optimizer_state(flags):
    run_ = make_run([*DEEPSEEK, *flags.split()], 0, ParallelState.single(), 1)
    adapters, frozen = [], []
    for param in run_.chunks[0].parameters():
        (adapters if is_adapter(get_param_info(param).names[0]) else frozen).append(param)
    assert adapters and all(param.requires_grad and hasattr(param, "main_grad") for param in adapters)
    assert frozen and not any(param.requires_grad or hasattr(param, "main_grad") for param in frozen)
    owners = {id(entry.param) for entry in run_.optimizer.tensors()}
    assert owners == {id(param) for param in adapters}


def test_a_checkpoint_without_state_of_frozen_weights_is_whole(tmp_path):
    train_and_save(0, 1, PLAIN, tmp_path, steps=0)
    assert verify_checkpoint(tmp_path / "iter_0000002").problems == []


@pytest.mark.parametrize(("flags", "world_size"), [("", 1), (f"{TP2} --expert-tensor-parallel-size 2", 2)])
def test_initial_adapters_are_those_of_peft(flags, world_size):
    """A is uniform up to one over the root of all input features, on every rank; B is zero."""
    argv = [*PLAIN, *"--moe-token-dispatcher-type alltoall --hidden-size 64 --lora-dim 64".split(), *flags.split()]
    for found in run_ranks(read_initial_adapters, world_size, argv):
        assert any("local_experts" in name for name in found) and any("linear_proj" in name for name in found)
        for name, (largest, in_features) in found.items():
            if ".lora_B." in name:
                assert largest == 0
            else:
                assert 0.95 < largest * in_features**0.5 <= 1, name


def read_initial_adapters(rank, world_size, argv):
    """Return the largest magnitude and the number of all input features of every adapter."""
    run_ = make_run(argv, rank, create_groups(argv, rank, world_size), 1)
    found = {}
    for param in run_.chunks[0].parameters():
        info = get_param_info(param)
        if is_adapter(info.names[0]):
            dimension = info.sharded_dim if info.sharded_dim is not None else -1
            count = info.shard_count if dimension == 1 else 1
            found[info.names[0]] = param.abs().max().item(), param.shape[-1] * count
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A trained model without adapters: (checkpoints, weights)."""
    folder = tmp_path_factory.mktemp("base")
    _, weights = pretrain([*BASE, "--train-iters", "2", "--save", "saved"], folder)
    return str(folder / "saved"), weights


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """The same with trained adapters: (folder, records, weights)."""
    folder = tmp_path_factory.mktemp("tuned")
    records, weights = pretrain([*TUNED, "--load", base[0], "--finetune", "--save", "saved"], folder)
    return folder, records, weights


def test_only_adapters_change(base, tuned):
    """The expert bias stays too: an exported adapter could not hold it."""
    _, _, after = tuned
    assert {name for name in after if name not in base[1]} == {name for name in after if is_adapter(name)}
    assert all(torch.equal(tensor, after[name]) for name, tensor in base[1].items())
    assert all(tensor.any() for name, tensor in after.items() if ".lora_B." in name)


def test_dropout_resumes_bitwise(base, tuned, tmp_path):
    """Parameters, optimizer and the random numbers of dropout continue where the run stopped."""
    pretrain([*TUNED, "--exit-interval", "2", "--load", base[0], "--finetune", "--save", "saved"], tmp_path)
    records, weights = pretrain([*TUNED, "--load", "saved", "--save", "saved"], tmp_path)
    assert [record["lm loss"] for record in records][-2:] == [record["lm loss"] for record in tuned[1]][-2:]
    assert all(torch.equal(weights[name], tensor) for name, tensor in tuned[2].items())


def test_first_loss_is_that_of_the_base(base, tuned, tmp_path):
    records, _ = pretrain([*BASE, "--train-iters", "1", "--load", base[0], "--finetune"], tmp_path)
    assert records[0]["lm loss"] == tuned[1][0]["lm loss"]


def test_recomputed_dropout_draws_the_same_numbers(base, tuned, tmp_path):
    records, _ = pretrain([*TUNED, *FULL.split(), "--load", base[0], "--finetune"], tmp_path)
    assert [record["lm loss"] for record in records] == [record["lm loss"] for record in tuned[1]]


def test_dropout_acts_in_training_only(base, tuned, tmp_path):
    """The first loss does not depend on it, because B is zero, but the first gradient does."""
    flags = [*TUNED, "--lora-dropout", "0", "--load", base[0], "--finetune"]
    records, _ = pretrain(flags, tmp_path)
    assert records[0]["lm loss"] == tuned[1][0]["lm loss"] and records[1]["lm loss"] != tuned[1][1]["lm loss"]


def test_checkpoints_with_and_without_adapters_are_not_confused(base, tuned, tmp_path):
    ended = run([*TUNED, "--load", base[0]], tmp_path)
    assert ended.returncode == 2 and "has no adapters" in ended.stderr and "--finetune" in ended.stderr
    ended = run([*BASE, "--train-iters", "1", "--load", str(tuned[0] / "saved"), "--finetune"], tmp_path)
    assert ended.returncode == 2 and "has adapters that this run does not have" in ended.stderr
    assert "its run had --lora-dim 4 --lora-target-modules all-linear; " in ended.stderr
    ended = run([*TUNED, "--lora-dim", "3", "--load", str(tuned[0] / "saved")], tmp_path)
    assert ended.returncode == 2 and "its run had --lora-dim 4 " in ended.stderr
    ended = run([*TUNED, "--lora-alpha", "3.5", "--load", str(tuned[0] / "saved")], tmp_path)
    assert ended.returncode == 2 and "--lora-alpha (lora_alpha): 16.0 in the checkpoint, 3.5 here" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_checkpoint_args_bring_the_adapters(tuned, tmp_path):
    """An evaluation of the checkpoint needs no flags of adapters."""
    saved = str(tuned[0] / "saved")
    flags = [*BASE, "--use-checkpoint-args", "--load", saved, "--skip-train", "--export-weights", "all.safetensors"]
    ended = run(flags, tmp_path)
    assert ended.returncode == 0, ended.stderr
    weights = load_file(tmp_path / "all.safetensors")
    assert weights.keys() == tuned[2].keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in tuned[2].items())


def test_targets_are_names_and_patterns(tmp_path):
    ended = run([*BASE, "--lora-dim", "4", "--lora-target-modules", "q_proj", "--validate-only"], tmp_path)
    assert ended.returncode == 2 and "q_proj is no linear that can have an adapter" in ended.stderr

    def names(*targets: str) -> set[str]:
        run_ = make_run([*DEEPSEEK, "--lora-target-modules", *targets], 0, ParallelState.single(), 1)
        trained = [get_param_info(param).names for param in run_.chunks[0].parameters() if param.requires_grad]
        return {name.removeprefix("decoder.layers.") for each in trained for name in each if ".lora_A." in name}

    assert names("linear_proj") == {f"{layer}.self_attention.linear_proj.lora_A.weight" for layer in (0, 1)}
    experts = {f"1.mlp.experts.local_experts.{expert}.linear_fc2.lora_A.weight" for expert in range(8)}
    assert names("*.mlp.experts.linear_fc2") == experts
    with pytest.raises(UserError, match="no linear"):
        names("decoder.layers.7.*")


def test_checkpoint_resumes_under_another_layout(tmp_path):
    """Weights and optimizer states of adapters, of experts too."""
    argv = [*PLAIN, "--use-distributed-optimizer", "--global-batch-size", "4"]
    flags = f"{TP2} --sequence-parallel --expert-tensor-parallel-size 2".split()
    expected = run_ranks(train_and_save, 2, [*argv, *flags], tmp_path / "saved")[0]
    resumed = run_ranks(load_and_save, 1, argv, tmp_path / "saved", tmp_path / "again")[0]
    assert_alike(resumed, expected)

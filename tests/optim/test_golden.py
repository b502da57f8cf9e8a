"""Recorded Megatron-LM runs: parameter groups, learning rates, the first step's gradient norm and update."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from toy import build_training

from arguments.optimizer import OptimizerArgs
from arguments.parallel import ParallelArgs
from arguments.training import TrainingArgs
from moe_trainer.optim.param_groups import get_param_group
from moe_trainer.optim.schedules import build_batch_size_schedule, build_lr_schedule
from moe_trainer.parallel.params import ParamInfo

CASES = (
    "a_mixtral",
    "a_mixtral_bf16",
    "a_capacity_zloss",
    "a2_mixtral",
    "b_deepseek_mtp",
    "c_qwen3moe",
    "d_dense_gpt2",
)
WITH_GRADS = tuple(case for case in CASES if case != "a_mixtral_bf16")


def _meta(shared, case):
    return json.loads((shared / "golden" / case / "meta.json").read_text())


def _value(argv, flag, kind):
    return kind(argv[argv.index(flag) + 1])


class TensorModule(nn.Module):
    """The tensors of a file as parameters, in the file's order of names."""

    def __init__(self, tensors):
        super().__init__()
        self.params = nn.ParameterList()
        for name, tensor in tensors.items():
            param = nn.Parameter(tensor.clone())
            param.info = ParamInfo((name,), kind="expert" if ".local_experts." in name else "dense")
            self.params.append(param)


@pytest.mark.parametrize("case", CASES)
def test_learning_rates_equal_megatron(shared, case):
    meta = _meta(shared, case)
    argv = meta["argv"]
    training = TrainingArgs(
        micro_batch_size=_value(argv, "--micro-batch-size", int),
        global_batch_size=_value(argv, "--global-batch-size", int),
        train_iters=_value(argv, "--train-iters", int),
    )
    settings = OptimizerArgs(
        lr=_value(argv, "--lr", float),
        min_lr=_value(argv, "--min-lr", float),
        lr_decay_style=_value(argv, "--lr-decay-style", str),
        lr_warmup_iters=_value(argv, "--lr-warmup-iters", int),
        lr_decay_iters=_value(argv, "--lr-decay-iters", int),
    )
    batch = build_batch_size_schedule(training, dp_size=1, seq_length=64)
    schedule = build_lr_schedule(settings, training, batch.final_global_batch_size)
    consumed = 0
    for step in meta["steps"]:
        assert batch.num_microbatches(consumed) == step["num_microbatches"]
        assert schedule.lr(consumed) == pytest.approx(step["lr_used"], rel=1e-12)
        consumed += batch.global_batch_size(consumed)
        assert schedule.lr(consumed) == pytest.approx(step["lr_after"], rel=1e-12)


@pytest.mark.parametrize("case", WITH_GRADS)
def test_parameter_groups_equal_megatron(shared, case):
    meta = _meta(shared, case)
    bag = TensorModule(load_file(shared / "golden" / case / "init.safetensors"))
    recorded = {name: group["wd_mult"] for group in meta["param_groups"] for name in group["params"]}
    ours = {param.info.names[0]: get_param_group(param, OptimizerArgs(), False).wd_mult for param in bag.params}
    assert {name: ours[name] for name in recorded} == recorded


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("case", WITH_GRADS)
def test_first_gradient_norm_equals_megatron(shared, case, distributed):
    meta = _meta(shared, case)
    folder = shared / "golden" / case
    gradients = load_file(folder / "grads_step1.safetensors")
    weights = {name: w for name, w in load_file(folder / "init.safetensors").items() if name in gradients}
    bag = TensorModule(weights)
    grads, optimizer = build_training(bag, parallel=ParallelArgs(use_distributed_optimizer=distributed))
    grads.zero()
    sum((param * gradients[param.info.names[0]]).sum() for param in bag.params).backward()
    grads.finish()
    step = meta["steps"][0]
    outcome = optimizer.step(step["lr_after"], 0.1)
    assert outcome.grad_norm == pytest.approx(step["grad_norm"], rel=2e-6)
    # the update by hand: the first Adam step moves by lr * g / (|g| + eps), whatever the clipping, after the decay
    factor = min(1.0, 1.0 / (step["grad_norm"] + 1e-6))
    for param in bag.params:
        name = param.info.names[0]
        g = gradients[name].double() * factor
        decay = 0.1 * get_param_group(param, OptimizerArgs(), False).wd_mult
        expected = weights[name].double() * (1 - step["lr_after"] * decay) - step["lr_after"] * g / (g.abs() + 1e-8)
        torch.testing.assert_close(param.detach().double(), expected, rtol=1e-6, atol=1e-7, msg=name)


def test_golden_schedules_vary_the_learning_rate(shared):
    rates = [step["lr_used"] for step in _meta(shared, "a_mixtral")["steps"]]
    assert len(set(rates)) > 5 and all(math.isfinite(rate) for rate in rates)

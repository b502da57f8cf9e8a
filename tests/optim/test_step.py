"""The step against torch.optim on plain parameters: AdamW and SGD, groups, clipping, precision, skipped steps."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy import Toy, build_training, compute_loss, train_step

from arguments.optimizer import OptimizerArgs
from arguments.precision import PrecisionArgs
from moe_trainer.optim.optimizer import NonFiniteGradientError
from moe_trainer.optim.param_groups import ParamGroup
from moe_trainer.optim.update_rules.build import build_element_rule
from moe_trainer.optim.update_rules.rule import GroupStep
from moe_trainer.parallel.params import ParamInfo

UNDECAYED = ("first.bias", "norm.weight", "norm.bias", "expert_bias")


def torch_optimizer(model, kind, weight_decay, **options):
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if n not in UNDECAYED], "weight_decay": weight_decay},
        {"params": [p for n, p in named.items() if n in UNDECAYED], "weight_decay": 0.0},
    ]
    return kind(groups, **options)


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_step_equals_torch_optimizers(kind, clip):
    ours, plain = Toy(), Toy()
    grads, optimizer = build_training(ours, optimizer=kind, clip_grad=clip, adam_beta2=0.95)
    if kind == "adam":
        reference = torch_optimizer(plain, torch.optim.AdamW, 0.1, lr=0.05, betas=(0.9, 0.95), eps=1e-8)
    else:
        reference = torch_optimizer(plain, torch.optim.SGD, 0.1, lr=0.05, momentum=0.9)
    for step in range(5):
        outcome = train_step(ours, grads, optimizer, [2 * step, 2 * step + 1], lr=0.05)
        reference.zero_grad()
        for seed in (2 * step, 2 * step + 1):
            (compute_loss(plain, seed) / 2).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        if clip:
            for param in plain.parameters():
                param.grad.mul_(min(1.0, clip / (norm.item() + 1e-6)))
        reference.step()
        assert outcome.updated and not outcome.found_inf
        assert outcome.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        for (name, a), b in zip(ours.named_parameters(), plain.parameters()):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7, msg=name)


def test_clipping_needs_no_additional_pass():
    model, passes = Toy(), []
    grads, optimizer = build_training(model, optimizer="adam", clip_grad=1e-3)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            passes.extend(
                [function] if function._schema.name in ("aten::mul", "aten::mul_") and args[0].numel() > 1 else []
            )
            return function(*args, **(kwargs or {}))

    optimizer.zero_grad()
    compute_loss(model, 1).backward()
    grads.finish()
    with Watch():
        outcome = optimizer.step(0.1, 0.1)
    assert outcome.grad_norm > 1e-3 and not passes


def test_vectors_and_biases_have_no_weight_decay():
    model = Toy()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    grads, optimizer = build_training(model)
    optimizer.zero_grad()
    grads.finish()  # no backward at all: gradients are zero, only the decay acts
    optimizer.step(0.1, 0.5)
    for name, param in model.named_parameters():
        expected = before[name] if name in UNDECAYED else before[name] * (1 - 0.1 * 0.5)
        torch.testing.assert_close(param.detach(), expected, rtol=1e-6, atol=0)


def test_apply_wd_to_qk_layernorm_adds_weight_decay():
    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("q_layernorm", "k_layernorm", "kv_layernorm", "input_layernorm"):
                module = nn.LayerNorm(4, bias=False)
                module.weight.info = ParamInfo((f"decoder.layers.0.self_attention.{name}.weight",))
                self.add_module(name, module)

    for apply, decoupled in itertools.product((False, True), (None, 0.01)):
        model = Norms()
        grads, optimizer = build_training(model, apply_wd_to_qk_layernorm=apply, decoupled_lr=decoupled)
        grads.finish()
        optimizer.step(0.1, 1.0)
        shrunk = {name.split(".")[0] for name, p in model.named_parameters() if p[0].item() != 1.0}
        assert shrunk == ({"q_layernorm", "k_layernorm"} if apply else set())


def test_decoupled_lr_moves_only_embedding_and_output():
    model = Toy()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    grads, optimizer = build_training(model, decoupled_lr=1.0)
    train_step(model, grads, optimizer, [0], lr=0.0, weight_decay=0.0, decoupled_lr=0.01)
    moved = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
    assert moved == {"word_embeddings.weight", "output_layer.weight"}


@pytest.mark.parametrize("dtype, flag", [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_low_precision_keeps_fp32_main_parameters(dtype, flag):
    model = Toy(dtype)
    grads, optimizer = build_training(model, precision=PrecisionArgs(**{flag: True}, loss_scale=64.0), clip_grad=0.0)
    main = {s.param: s.tensor for s in optimizer.tensors() if s.state_name == "fp32_param"}
    assert all(torch.equal(tensor.to(dtype), param.detach().flatten()) for param, tensor in main.items())
    for step in range(10):
        outcome = train_step(
            model, grads, optimizer, [step], lr=1e-5, weight_decay=0.0
        )  # far below a bf16 ulp of most weights
        assert outcome.updated
    assert all(tensor.dtype == torch.float32 for tensor in main.values())
    assert all(torch.equal(tensor.to(dtype), param.detach().flatten()) for param, tensor in main.items())
    assert any(not torch.equal(t, t.to(dtype).float()) for t in main.values())  # they hold what the model cannot
    assert all(p.main_grad.dtype == torch.float32 for p in model.parameters())


def test_loss_scale_does_not_change_the_update():
    results = []
    for scale in (1.0, 1024.0):
        model = Toy(torch.bfloat16)
        grads, optimizer = build_training(model, precision=PrecisionArgs(bf16=True, loss_scale=scale))
        outcomes = [train_step(model, grads, optimizer, [s]) for s in range(3)]
        results.append(([o.grad_norm for o in outcomes], [p.detach().clone() for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1]))


def test_fp16_overflow_skips_and_halves():
    model = Toy(torch.float16)
    precision = PrecisionArgs(fp16=True, initial_loss_scale=2.0**32, hysteresis=2, loss_scale_window=2)
    grads, optimizer = build_training(model, precision=precision)
    before = [param.detach().clone() for param in model.parameters()]
    outcome = train_step(model, grads, optimizer, [0])
    assert (outcome.updated, outcome.found_inf, outcome.grad_norm) == (False, True, None)
    assert optimizer.loss_scale == 2.0**32 and optimizer.step_count == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    scales = []
    while not outcome.updated:
        outcome = train_step(model, grads, optimizer, [0], lr=1e-4)
        scales.append(optimizer.loss_scale)
    assert scales[0] == 2.0**31 and scales[-1] < 2.0**32 and optimizer.step_count == 1
    assert all(torch.isfinite(param).all() for param in model.parameters())
    train_step(model, grads, optimizer, [1], lr=1e-4)
    assert optimizer.loss_scale == 2 * scales[-1]  # two clean iterations in a row


def test_a_nan_gradient_is_named_or_skipped():
    for check in (True, False):
        model = Toy()
        before = [param.detach().clone() for param in model.parameters()]
        grads, optimizer = build_training(model, check_for_nan=check)
        optimizer.zero_grad()
        compute_loss(model, 0).backward()
        grads.finish()
        model.first.weight.main_grad[3, 4] = float("nan")
        if check:
            with pytest.raises(NonFiniteGradientError, match="first.weight"):
                optimizer.step(0.1, 0.1)
        else:
            outcome = optimizer.step(0.1, 0.1)
            assert (outcome.updated, outcome.found_inf) == (False, True)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_zeros_in_gradients_and_params_norm():
    model = Toy()
    grads, optimizer = build_training(model, count_zeros=True)
    expected_norm = torch.cat([p.detach().flatten() for p in model.parameters()]).double().norm().item()
    assert optimizer.params_norm() == pytest.approx(expected_norm, rel=1e-6)
    plain = Toy()
    compute_loss(plain, 0).backward()
    expected = sum(int((p.grad == 0).sum()) for p in plain.parameters())
    outcome = train_step(model, grads, optimizer, [0])
    assert expected > 0 and outcome.num_zeros == expected


def test_norm_of_a_large_gradient_is_exact():
    """A single fp32 sum over this many squares is off by more than 1e-5."""
    model = nn.Linear(2048, 1024, bias=False)
    model.weight.info = ParamInfo(("w",))
    grads, optimizer = build_training(model)
    grads.zero()
    model.weight.grad = None
    (model.weight * torch.randn(1024, 2048)).sum().backward()
    grads.finish()
    expected = model.weight.main_grad.double().norm().item()
    assert optimizer.step(0.0, 0.0).grad_norm == pytest.approx(expected, rel=2e-7)


def test_bf16_gradients_are_clipped_in_fp32():
    model = Toy(torch.bfloat16)
    precision = PrecisionArgs(bf16=True, grad_reduce_in_bf16=True)
    grads, optimizer = build_training(model, precision=precision, clip_grad=0.1)
    outcome = train_step(model, grads, optimizer, [0])
    assert model.first.weight.main_grad.dtype == torch.bfloat16
    factor = 0.1 / (outcome.grad_norm + 1e-6)
    moment = next(s for s in optimizer.tensors() if s.param is model.first.weight and s.state_name == "exp_avg")
    torch.testing.assert_close(
        moment.tensor, 0.1 * factor * model.first.weight.main_grad.float().flatten(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize(
    "dtype, precision",
    [
        (torch.float32, PrecisionArgs()),
        (torch.bfloat16, PrecisionArgs(bf16=True)),
        (torch.float16, PrecisionArgs(fp16=True, initial_loss_scale=2.0**12, loss_scale_window=3)),
    ],
)
def test_state_restores_bitwise(kind, dtype, precision):
    """Six steps, or three, save, build again, load, three: the same bits."""

    def fresh():
        model = Toy(dtype)
        return model, *build_training(model, precision=precision, optimizer=kind)

    straight = fresh()
    for step in range(6):
        train_step(*straight, [step], lr=0.01)
    first = fresh()
    for step in range(3):
        train_step(*first, [step], lr=0.01)
    saved = [(s.param.info.names, s.state_name, s.start, s.stop, s.tensor.clone()) for s in first[2].tensors()]
    weights = [p.detach().clone() for p in first[0].parameters()]
    scalars = first[2].scalars()
    second = fresh()
    with torch.no_grad():
        for param, value in zip(second[0].parameters(), weights):
            param.copy_(value)
    for state, (names, name, start, stop, value) in zip(second[2].tensors(), saved, strict=True):
        assert (state.param.info.names, state.state_name, state.start, state.stop) == (names, name, start, stop)
        state.tensor.copy_(value)
    second[2].load_scalars(scalars)
    second[2].after_load(params_changed=True, state_loaded=True)
    for step in range(3, 6):
        train_step(*second, [step], lr=0.01)
    assert all(torch.equal(a, b) for a, b in zip(straight[0].parameters(), second[0].parameters()))
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(straight[2].tensors(), second[2].tensors()))
    assert straight[2].scalars() == second[2].scalars()


def test_weights_loaded_alone_reach_the_main_parameters():
    model = Toy(torch.bfloat16)
    grads, optimizer = build_training(model, precision=PrecisionArgs(bf16=True))
    with torch.no_grad():
        model.first.weight.fill_(3.0)
    optimizer.after_load(params_changed=True, state_loaded=False)
    train_step(model, grads, optimizer, [0], lr=0.0)
    assert torch.equal(model.first.weight, torch.full_like(model.first.weight, 3.0))


def test_scalars_of_another_optimizer_are_refused():
    _, adam = build_training(Toy())
    _, sgd = build_training(Toy(), optimizer="sgd")
    with pytest.raises(ValueError, match="--optimizer sgd"):
        adam.load_scalars(sgd.scalars())


def test_a_parameter_without_info_is_refused():
    model = Toy()
    del model.first.weight.info
    with pytest.raises(ValueError, match="no ParamInfo"):
        build_training(model)


def test_parameters_become_views_without_changing():
    model, plain = Toy(), Toy()
    build_training(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters()))
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == 2  # dense and expert
    assert dataclasses.is_dataclass(model.first.weight.info)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_bf16_gradients_are_widened_in_segments(kind, monkeypatch):
    cut = []

    def steps():
        model = Toy(dtype=torch.bfloat16)
        grads, optimizer = build_training(
            model, optimizer=kind, precision=PrecisionArgs(bf16=True, grad_reduce_in_bf16=True)
        )
        cut.append(
            max(segment.stop - segment.start for state in optimizer._shards for segment in state.update_segments)
        )
        for step in range(3):
            train_step(model, grads, optimizer, [step], lr=0.05, weight_decay=0.1)
        return {
            (held.state_name, held.param.info.names, held.start): held.tensor.clone() for held in optimizer.tensors()
        }

    at_once = steps()
    monkeypatch.setattr("moe_trainer.optim.optimizer_shard.MAX_SEGMENT_NUMEL_CPU", 64)
    in_parts = steps()
    assert cut[0] > 64 and cut[1] == 64
    assert at_once.keys() == in_parts.keys() and all(torch.equal(at_once[key], in_parts[key]) for key in at_once)


def test_sgd_rounding_is_independent_of_shard_boundaries():
    """On CPUs torch's fused kernel does not: its last values, which fill no vector, are rounded otherwise."""
    rule = build_element_rule(OptimizerArgs(optimizer="sgd", sgd_momentum=0.9))
    step = GroupStep(ParamGroup(1.0, 1.0, False, False), 0.1, 0.01, count=1, factor=1.0, library=None)
    full = [torch.randn(1003) for _ in range(3)]

    def stepped(begin, end):
        param, grad, momentum = (values[begin:end].clone() for values in full)
        rule.update([param], [grad], {"momentum_buffer": [momentum]}, step)
        return torch.stack([param, momentum])

    reference = stepped(0, 1003)
    for begin in range(0, 40, 3):
        for end in range(begin + 1, begin + 70):
            assert torch.equal(stepped(begin, end), reference[:, begin:end]), (begin, end)

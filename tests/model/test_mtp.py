"""Multi-token prediction against a plain loop over depths with an explicit total loss."""

from dataclasses import replace

import pytest
import torch

import arguments
from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.model.build import build_chunks
from moe_trainer.model.mtp import MTPLosses, get_mtp_sums, mtp_metrics, reset_mtp_metrics, shift_left
from moe_trainer.parallel.state import Group, ParallelState

BASE = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --kv-channels 8 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 2 --train-iters 1 --lr 1e-3 "
    "--transformer-impl local --mock-data --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 95 "
    "--attention-dropout 0 --hidden-dropout 0 --normalization RMSNorm --swiglu --position-embedding-type rope "
    "--disable-bias-linear --mtp-loss-scaling-factor 0.3"
).split()


def build(*argv):
    (model,) = build_chunks(arguments.parse_args([*BASE, *argv], world_size=1), ParallelState.single(), 96)
    return model


def collect_losses(model):
    """Return the mean losses of the depths since the last call."""
    metrics = mtp_metrics(get_mtp_sums([model]).tolist())
    reset_mtp_metrics([model])
    return metrics


def batch():
    tokens = torch.randint(96, (2, 17))
    mask = (torch.rand(2, 16) > 0.3).float()
    return tokens[:, :-1], torch.arange(16).expand(2, 16), tokens[:, 1:], mask


def explicit_losses(model, tokens, positions, labels, mask, depths, layers, per_token):
    """Main loss per token, list of masked MTP losses over valid tokens, their weights' normalisation."""
    rope = model.rotary.tables(16, tokens.device)
    x = model.embedding(tokens, positions)
    for layer in model.decoder.layers:
        x = layer(x, rope, PassInputs())
    x = model.decoder.final_layernorm(x)
    main = model._lm_loss(model.output_layer, x, labels)
    total, means, original = 0.0, [], mask.sum()
    for depth in range(1, depths + 1):
        ahead = torch.zeros_like(tokens)
        ahead[:, :-depth] = tokens[:, depth:]
        target, valid = torch.zeros_like(labels), torch.zeros_like(mask)
        target[:, :-depth], valid[:, :-depth] = labels[:, depth:], mask[:, depth:]
        layer = layers[depth - 1]
        joined = torch.cat([layer.enorm(model.embedding(ahead, positions)), layer.hnorm(x)], -1)
        x = layer.final_layernorm(layer.mtp_model_layer(layer.eh_proj(joined), rope, PassInputs()))
        summed = (model._lm_loss(model.output_layer, x, target) * valid).sum()
        means.append((summed / valid.sum()).item())
        total = total + 0.3 / depths * summed / valid.sum() * (original if per_token else 1.0)
    return main, total, means


def test_layers_of_a_depth_have_the_positions_of_the_last_decoder_layer():
    model, seen = build("--mtp-num-layers", "2", "--rotary-base-per-layer", "10", "10000"), []
    decoder, depths = list(model.decoder.layers), [layer for depth in model.mtp.layers for layer in depth.inner_layers]
    for layer in (*decoder, *depths):
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1][0]))
    tokens, positions, labels, mask = batch()
    model(tokens, positions, labels, mask)
    first, last, *ahead = seen
    assert not torch.equal(first, last) and len(ahead) == 2 and all(torch.equal(each, last) for each in ahead)


@pytest.mark.parametrize(
    "argv, depths, repeated, per_token",
    [
        (["--mtp-num-layers", "1"], 1, False, False),
        (["--mtp-num-layers", "2"], 2, False, False),
        (["--mtp-num-layers", "3", "--mtp-use-repeated-layer"], 3, True, False),
        (["--mtp-num-layers", "2", "--calculate-per-token-loss"], 2, False, True),
    ],
)
def test_mtp_depths_equal_the_plain_loop(argv, depths, repeated, per_token):
    model = build(*argv)
    data = batch()
    layers = [model.mtp.layers[0]] * depths if repeated else list(model.mtp.layers)
    assert len(model.mtp.layers) == (1 if repeated else depths)
    main, total, means = explicit_losses(model, *data, depths, layers, per_token)
    (main.sum() + 0.25 * total).backward()
    expected = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    loss = model(*data, grad_scale=torch.tensor(0.25))
    torch.testing.assert_close(loss, main)
    loss.sum().backward()
    for name, param in model.named_parameters():
        assert (param.grad - expected[name]).norm() < 1e-5 * expected[name].norm(), name
    metrics = collect_losses(model)
    assert metrics == {f"mtp_{i} loss": pytest.approx(mean, rel=1e-5) for i, mean in enumerate(means, 1)}


def test_passes_of_a_repeated_layer_share_its_balancing_loss():
    """As two layers with the same weights and half the coefficient; their mean is logged."""
    hybrid = (
        "--hybrid-layer-pattern=-/E/E --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss"
    )
    repeated = build(*hybrid.split(), "--moe-aux-loss-coeff", "20", "--mtp-use-repeated-layer")
    both = build(*hybrid.split(), "--moe-aux-loss-coeff", "10")
    state = repeated.state_dict()
    state |= {name.replace("mtp.layers.0", "mtp.layers.1"): value for name, value in state.items() if "mtp." in name}
    both.load_state_dict(state)
    data, found = batch(), []
    for model in (repeated, both):
        model(*data).sum().backward()
        routers = [layer.router for layer in model.moe_layers()]
        found.append(
            (sum(each.weight.grad for each in routers), sum(each.loss_sums for each in routers) / len(routers))
        )
    for one, other in zip(*found):
        assert other.norm() > 0 and (one - other).norm() < 1e-5 * other.norm()


def test_loss_per_token_does_not_depend_on_the_microbatches():
    """Of four sequences, one without a trained token: alone, in pairs and together."""
    model = build(*"--mtp-num-layers 2 --mtp-loss-per-token --calculate-per-token-loss".split())
    data = [torch.cat(pair) for pair in zip(batch(), batch())]
    data[3][1] = 0
    found = []
    for size in (1, 2, 4):
        model.zero_grad()
        for microbatch in zip(*(table.split(size) for table in data)):
            (model(*microbatch) * microbatch[3]).sum().backward()
        found.append(({name: param.grad.clone() for name, param in model.named_parameters()}, collect_losses(model)))
    (expected, metrics), *others = found
    assert len(metrics) == 2
    for grads, other in others:
        assert other == pytest.approx(metrics, rel=1e-6)
        for name, grad in grads.items():
            assert (grad - expected[name]).norm() < 1e-5 * expected[name].norm(), name


@pytest.mark.parametrize(
    "argv",
    [
        ["--mtp-num-layers", "2"],
        ["--mtp-num-layers", "2", "--untie-embeddings-and-output-weights"],
        ["--mtp-num-layers", "3", "--mtp-use-repeated-layer", "--untie-embeddings-and-output-weights"],
        [
            "--mtp-num-layers",
            "1",
            "--recompute-granularity",
            "full",
            "--recompute-method",
            "uniform",
            "--recompute-num-layers",
            "1",
        ],
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_detached_mtp_heads_give_the_main_model_no_gradient(argv, masked):
    full, detached = build(*argv), build(*argv, "--mtp-detach-heads")
    detached.load_state_dict(full.state_dict())
    tokens, positions, labels, mask = batch()
    inputs = (tokens, positions, labels, mask) if masked else (tokens, positions, labels)
    weights = mask if masked else torch.ones_like(mask)
    gradients = []
    for model in (full, detached):
        loss = model(*inputs, grad_scale=torch.tensor(1.0))
        (loss * weights).sum().backward()
        gradients.append({name: param.grad.clone() for name, param in model.named_parameters()})
    alone = build(*[word for word in argv if "untie" in word])
    alone.load_state_dict({name: value for name, value in full.state_dict().items() if name in alone.state_dict()})
    (alone(*inputs) * weights).sum().backward()
    main = {name: param.grad for name, param in alone.named_parameters()}
    for name, gradient in gradients[1].items():
        if name in main:
            assert (gradient - main[name]).norm() <= 1e-5 * main[name].norm(), name
            assert (gradients[0][name] - main[name]).norm() > 1e-4 * main[name].norm(), name
        else:
            assert gradient.abs().max() > 0, name
    first = "mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight"
    torch.testing.assert_close(gradients[1][first], gradients[0][first], rtol=1e-4, atol=1e-7)


def test_metrics_average_microbatches_and_skip_evaluation():
    model = build("--mtp-num-layers", "1")
    with torch.no_grad():
        model.eval()(*batch())
        assert collect_losses(model) == {"mtp_1 loss": 0.0}
        model.train()
        single = []
        for data in (batch(), batch()):
            model(*data)
            single.append(collect_losses(model)["mtp_1 loss"])
            last = data
        model(*last)
        model(*last)
    assert collect_losses(model)["mtp_1 loss"] == pytest.approx(single[1], rel=1e-6)


def test_a_fully_masked_microbatch_adds_no_gradient():
    model = build("--mtp-num-layers", "1")
    tokens, positions, labels, mask = batch()
    (model(tokens, positions, labels, torch.zeros_like(mask)) * 0).sum().backward()
    assert all(torch.count_nonzero(param.grad) == 0 for param in model.parameters())


def test_gradients_of_context_ranks_are_averaged():
    ps = replace(ParallelState.single(), cp=Group("cp", (0, 1), 0, 2))
    losses = MTPLosses(arguments.parse_args([*BASE, "--mtp-num-layers", "1"], 1), ps)
    tokens, loss = torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 8, requires_grad=True)
    losses(torch.zeros(8, 2, 4), [None], tokens, None, lambda *_: loss, 1.0).sum().backward()
    assert loss.grad.sum().item() == pytest.approx(0.3 / 2)


def test_shift_left():
    assert shift_left(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [[2, 3, 0], [5, 6, 0]]


def test_mtp_copies_the_kind_of_the_last_decoder_layer():
    moe = "--mtp-num-layers 2 --num-experts 4 --moe-ffn-hidden-size 24".split()
    for freq, count in (("[0,1]", 3), ("[1,0]", 1), ("1", 4), ("2", 1)):
        model = build(*moe, "--moe-layer-freq", freq)
        assert len(model.moe_layers()) == count, freq
        assert [layer.layer_number for layer in model.moe_layers()][-1] == {3: 4, 1: 1, 4: 4}[count]

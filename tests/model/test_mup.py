"""muP in the model: initial deviations by Megatron-LM's formulas; multipliers equal scaled weights of a model without them."""

import math

import pytest
import torch

import arguments
from moe_trainer.model.build import build_chunks
from moe_trainer.parallel.state import ParallelState

BASE = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --kv-channels 16 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 2 --train-iters 1 --lr 1e-3 "
    "--transformer-impl local --mock-data --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 127 "
    "--attention-dropout 0 --hidden-dropout 0 --normalization RMSNorm --swiglu --num-experts 4 --moe-router-topk 2 --disable-bias-linear "
    "--init-method-std 0.1"
).split()
MUP = ["--use-mup", "--mup-base-hidden-size", "16"]
UNTIED = ["--untie-embeddings-and-output-weights"]


def build(*argv):
    (model,) = build_chunks(arguments.parse_args([*BASE, *argv], world_size=1), ParallelState.single(), 128, "cpu")
    return model


def compute_loss(model):
    tokens = torch.arange(32).view(2, 16) * 7 % 127
    return model(tokens, torch.arange(16).expand(2, 16), tokens.roll(1, 1)).mean()


@pytest.mark.parametrize(("mup", "width"), [(MUP, 4.0), ([], 1.0)], ids=["mup", "plain"])
def test_mup_init_standard_deviations(mup, width):
    params = dict(
        build(
            *mup,
            *UNTIED,
            "--mtp-num-layers",
            "1",
            "--position-embedding-type",
            "rope",
            "--moe-shared-expert-intermediate-size",
            "64",
        ).named_parameters()
    )
    positions = dict(build(*mup, "--position-embedding-type", "learned_absolute").named_parameters())
    params["embedding.position_embeddings.weight"] = positions["embedding.position_embeddings.weight"]
    hidden, residual = 0.1 / math.sqrt(width), 0.1 / (math.sqrt(2 * 2) * math.sqrt(width))
    layer = "decoder.layers.0."
    for name, std in (
        ("embedding.word_embeddings", 0.1),
        ("embedding.position_embeddings", 0.1),
        ("output_layer", 0.1),
        (f"{layer}self_attention.linear_qkv", hidden),
        (f"{layer}self_attention.linear_proj", residual),
        (f"{layer}mlp.experts.linear_fc1", hidden),
        (f"{layer}mlp.experts.linear_fc2", residual),
        (f"{layer}mlp.shared_experts.linear_fc2", residual),
        (f"{layer}mlp.router", hidden),
        ("mtp.layers.0.eh_proj", hidden),
    ):
        assert params[f"{name}.weight"].std().item() == pytest.approx(std, rel=0.1), name


def test_output_layer_is_initialized_like_an_embedding():
    more = [*UNTIED, "--embedding-init-method-std", "0.5"]
    assert build(*MUP, *more).output_layer.weight.std().item() == pytest.approx(0.5, rel=0.05)
    assert build(*more).output_layer.weight.std().item() == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(
    "more",
    [[], UNTIED, [*UNTIED, "--mtp-num-layers", "1", "--position-embedding-type", "rope"]],
    ids=["tied, learned positions", "own head", "MTP"],
)
def test_multipliers_equal_scaled_weights(more):
    scaled = build(*MUP, *more, "--mup-embedding-mult", "3", "--mup-output-mult", "0.7", "--mup-base-head-dim", "8")
    # scores are multiplied by root(8)/16 in the one, by 1/4 in the other
    embedding, head, query = 3.0, 0.7, math.sqrt(8) / 16 * 4
    plain = build(*UNTIED, *(word for word in more if word not in UNTIED))
    theirs = dict(scaled.named_parameters())
    factors = {}
    with torch.no_grad():
        for name, param in plain.named_parameters():
            source = theirs.get(name, theirs["embedding.word_embeddings.weight"])
            factor = torch.ones(param.shape[0] if param.dim() == 2 else 1, 1) if param.dim() < 3 else torch.ones(1)
            if name.startswith("embedding."):
                factor = factor * embedding
            elif name == "output_layer.weight":
                factor = factor * head
            elif name.endswith("linear_qkv.weight"):
                factor.view(4, 3, 16)[:, 0] = query
            factors[name] = factor.view(-1) if param.dim() == 1 else factor
            param.copy_(source * factors[name])
    ours, expected = compute_loss(scaled), compute_loss(plain)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-6)
    ours.backward()
    expected.backward()
    sums = {name: torch.zeros_like(param) for name, param in theirs.items()}
    for name, param in plain.named_parameters():
        sums[name if name in sums else "embedding.word_embeddings.weight"] += param.grad * factors[name]
    for name, grad in sums.items():
        torch.testing.assert_close(theirs[name].grad, grad, rtol=1e-4, atol=1e-6, msg=name)
    scaled.eval(), plain.eval()
    tokens, places = torch.arange(32).view(2, 16), torch.arange(16).expand(2, 16)
    torch.testing.assert_close(scaled(tokens, places), plain(tokens, places), rtol=1e-4, atol=1e-5)

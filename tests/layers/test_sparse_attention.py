"""The indexer of sparse attention: what its scores are made of, and that its loss reaches nothing but it."""

import torch
from train.layouts import argv_of, shallow, train

from arguments import parse_args
from moe_trainer.layers.sparse_attention import INDEXER, Indexer
from moe_trainer.parallel.state import Group, ParallelState

DSA = "--experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 8 --dsa-indexer-topk 5 --seed 2"


def argv(*more):
    return [*shallow(argv_of("deepseek")), *DSA.split(), *more]


def test_weights_of_heads_have_the_factors_of_heads_and_width():
    model = parse_args(argv(), 1).model
    indexer = Indexer(model, Group.single("tp"), name="decoder.layers.0.self_attention.core_attention.indexer", layer_number=0)
    x_SBH, latent_SBC = torch.randn(6, 2, model.hidden_size), torch.randn(6, 2, model.q_lora_rank)
    with torch.no_grad():
        for param in indexer.parameters():
            param.normal_()
        index = indexer(x_SBH, latent_SBC, None)
        expected = x_SBH @ indexer.linear_weights_proj.weight.T / (4 * 8) ** 0.5
    torch.testing.assert_close(index.weights_SBI, expected)


def test_the_indexers_loss_reaches_the_indexers_alone():
    without, small, large = (train(argv("--clip-grad", "0", *more), 0, ParallelState.single(), steps=1).grads
                             for more in ([], ["--dsa-indexer-loss-coeff", "1"], ["--dsa-indexer-loss-coeff", "1000"]))
    names = [name for name in small if INDEXER in name]
    assert names and all(small[name].abs().max() > 0 for name in names if "k_norm.bias" not in name)
    for name, grad in small.items():
        if INDEXER in name:
            torch.testing.assert_close(large[name], 1000 * grad, rtol=1e-4, atol=1e-4 * float(large[name].abs().max()))
        else:
            assert torch.equal(grad, without[name]) and torch.equal(large[name], without[name]), name

"""Hyper-connections against transformers' DeepSeek-V4, and under every mapping against one process."""

import pytest
import torch
from harness import run_ranks
from torch import nn
from training.layouts import compare, make_argv, make_run, shallow, train_one_process, train_ranks
from training.resuming import assert_alike, load_and_save, train_and_save

from arguments import parse_args
from arguments.model import ModelArgs
from moe_trainer.estimate.parameters import count_parameters
from moe_trainer.layers.hyper_connection import HyperConnection, StreamContraction, expand_streams
from moe_trainer.parallel.state import ParallelState

FLAGS = "--enable-hyper-connections --num-residual-streams 3 --mhc-sinkhorn-iterations 4 --mhc-init-gating-factor 0.5"
MODEL = ModelArgs(
    hidden_size=10,
    layernorm_epsilon=1e-5,
    enable_hyper_connections=True,
    num_residual_streams=3,
    mhc_sinkhorn_iterations=4,
)
MAPPINGS = {
    "tensor, sequence": "--tensor-model-parallel-size 2 --sequence-parallel",
    "tensor": "--tensor-model-parallel-size 2",
    "context": "--context-parallel-size 2",
    "experts": "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --use-distributed-optimizer",
    "stages": "--pipeline-model-parallel-size 2",
    "full recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective recompute": "--recompute-granularity selective --recompute-modules layernorm core_attn moe",
}


def make_argv_with_streams():
    return [*shallow(make_argv("plain")), *FLAGS.split()]


def make_reference(name):
    """Return a module of transformers' DeepSeek-V4; skip the test where this version has none."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(hidden_size=10, hc_mult=3, hc_sinkhorn_iters=4, hc_eps=1e-6, rms_norm_eps=1e-5)
    return getattr(modeling, name)(config)


def randomize(module):
    for param in module.parameters():
        nn.init.normal_(param, std=0.5)


def test_hyper_connection_equals_transformers():
    reference, module = make_reference("DeepseekV4HyperConnection"), HyperConnection(MODEL, name="a")
    randomize(module)
    with torch.no_grad():
        reference.fn.copy_(module.mapping_proj.weight)
        reference.base.copy_(module.bias)
        reference.scale.copy_(torch.cat([module.alpha_pre, module.alpha_post, module.alpha_res]))
    x, layer = torch.randn(5, 2, 30, requires_grad=True), nn.Linear(10, 10)
    read, post, mixing = module(x)
    merged = module.mix(x, mixing) + module.spread(layer(read), post)
    merged.square().sum().backward()
    theirs = x.detach().clone().requires_grad_()
    streams = theirs.unflatten(-1, (3, 10))
    post, comb, collapsed = reference(streams)
    expected = post.unsqueeze(-1) * layer(collapsed).unsqueeze(-2) + comb.transpose(-1, -2) @ streams
    expected.square().sum().backward()
    torch.testing.assert_close(read, collapsed)
    torch.testing.assert_close(merged, expected.flatten(2))
    torch.testing.assert_close(x.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(module.mapping_proj.weight.grad, reference.fn.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(module.bias.grad, reference.base.grad, rtol=1e-4, atol=1e-4)
    scales = torch.cat([module.alpha_pre.grad, module.alpha_post.grad, module.alpha_res.grad])
    torch.testing.assert_close(scales, reference.scale.grad, rtol=1e-4, atol=1e-4)


def test_contraction_equals_transformers():
    reference, module = make_reference("DeepseekV4HyperHead"), StreamContraction(MODEL, name="a")
    randomize(module)
    with torch.no_grad():
        for leaf in ("fn", "base", "scale"):
            getattr(reference, f"hc_{leaf}").copy_(getattr(module, leaf))
    x = torch.randn(5, 2, 30)
    torch.testing.assert_close(module(x), reference(x.unflatten(-1, (3, 10))))


def test_weights_of_bf16_streams_are_computed_in_fp32():
    """Only the results are rounded."""
    module = HyperConnection(MODEL, name="a")
    randomize(module)
    x = torch.randn(50, 2, 30).bfloat16()
    _, post, mixing = module.bfloat16()(x)
    _, exact_post, exact_mixing = module.float()(x.float())
    assert torch.equal(post, exact_post.bfloat16()) and torch.equal(mixing, exact_mixing.bfloat16())


def test_streams_of_one_embedding_start_equal_and_mixing_keeps_their_sum():
    module, x = HyperConnection(MODEL, name="a"), torch.randn(4, 1, 10)
    randomize(module)
    streams = expand_streams(x, 3)
    assert torch.equal(streams.view(4, 1, 3, 10), x.unsqueeze(2).expand(4, 1, 3, 10))
    mixed = module.mix(streams, module(streams)[2]).view(4, 1, 3, 10)
    torch.testing.assert_close(mixed.sum(2), 3 * x, rtol=1e-4, atol=1e-4)


def test_parameters_and_their_first_values():
    argv = make_argv_with_streams()
    (chunk,) = make_run(argv, 0, ParallelState.single(), 1).chunks
    named = {name: param for param in chunk.parameters() for name in param.info.names}
    prefix = "decoder.layers.1.mlp_hyper_connection"
    assert named[f"{prefix}.mapping_proj.weight"].shape == (15, 48) and named[f"{prefix}.alpha_res"].item() == 0.5
    assert named["decoder.hc_head_fn"].shape == (3, 48) and named["decoder.hc_head_scale"].item() == 1.0
    count = count_parameters(parse_args(argv, 1), chunk.vocab_size).total
    assert count == sum(param.numel() for param in chunk.parameters())


def test_training_under_every_mapping_equals_one_process():
    base = make_argv_with_streams()
    expected = train_one_process(*base)
    assert compare(train_one_process(*shallow(make_argv("plain"))), expected)
    results = run_ranks(train_ranks, 2, [[*base, *mapping.split()] for mapping in MAPPINGS.values()])
    for index, name in enumerate(MAPPINGS):
        assert not compare(expected, results[0][index]), name


def test_resumes_under_another_mapping(tmp_path):
    argv = make_argv_with_streams()
    steps = run_ranks(train_and_save, 2, [*argv, "--pipeline-model-parallel-size", "2"], tmp_path / "a")[1]
    assert_alike(load_and_save(0, 1, argv, tmp_path / "a", tmp_path / "b"), steps)

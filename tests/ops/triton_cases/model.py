"""A full model with all Triton kernels, in Triton's interpreter, as with --triton-kernels all on a GPU. Run by tests/ops/test_triton.py."""

from dataclasses import replace

import pytest
from training.layouts import make_argv

from arguments import parse_args
from moe_trainer.backends import BackendPolicy
from moe_trainer.layers import kernels
from moe_trainer.model import build
from moe_trainer.parallel.state import ParallelState
from moe_trainer.verification.compare_runs import Tolerances, compare
from moe_trainer.verification.training_trace import train

NEAR = Tolerances(loss=2e-5, norm=5e-5, grad=2e-4, weight=1e-4)
# a program of the interpreter costs as much as a kernel: few tokens, one step
SMALL = "--seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 1".split()
QUERIES = "--group-query-attention --num-query-groups 2 --qk-layernorm"


SPARSE = (
    "--experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 8 --dsa-indexer-topk 5 --dsa-indexer-loss-coeff 1 "
    "--dsa-indexer-use-sparse-loss --dsa-attention-form gathered"
)


def select_cuda_kernels(names, _backends, unfused=()):
    """Select kernels as on a CUDA device; the interpreter accepts CPU tensors."""
    return kernels.select_kernels(names, BackendPolicy("error", cuda=True), unfused)


def recording_kernels(called: set):
    """Select the same kernels, and record every kind of kernel that is called."""

    def spy(name, function):
        def run(*args, **named):
            called.add(name)
            return function(*args, **named)

        return run

    def choose(names, backends, unfused):
        made = select_cuda_kernels(names, backends, unfused)
        return replace(
            made,
            sparse_attention=type(made.sparse_attention)(*(spy("listed", step) for step in made.sparse_attention)),
            rms_norm=spy("norm", made.rms_norm),
            apply_rope=spy("rope", made.apply_rope),
            fused_topk=spy("router", made.fused_topk),
            balancing=type(made.balancing)(*(spy("balancing", step) for step in vars(made.balancing).values())),
            permutation=spy("permute", made.permutation),
            logit_kernels=type(made.logit_kernels)(*(spy("loss", step) for step in made.logit_kernels)),
            grouped_gemms=type(made.grouped_gemms)(*(spy("GEMMs", gemm) for gemm in made.grouped_gemms)),
            activations=tuple(
                (
                    kind,
                    spy("dense", function) if function else None,
                    type(block)(*(spy("experts", way) for way in block)),
                )
                for kind, function, block in made.activations
            ),
        )

    return choose


@pytest.mark.parametrize(
    "kind,more",
    [("plain", QUERIES), ("biases, tied head", ""), ("deepseek", SPARSE)],
    ids=["plain", "gelu", "sparse"],
)
def test_training_with_triton_kernels_equals_torch(kind, more, monkeypatch):
    """gelu: biases, experts one by one."""
    argv = [*make_argv(kind), *more.split(), *SMALL, "--num-layers", "2"]
    argv = [word.replace("[1]*3", "[1]*1") for word in argv]
    if kind.startswith("biases"):
        argv.remove("--swiglu")
        argv.append("--no-bias-gelu-fusion")
    plain = train(parse_args(argv, 1), 0, ParallelState.single(), steps=1)
    called = set()
    monkeypatch.setattr(build, "select_kernels", recording_kernels(called))
    ours = train(parse_args([*argv, "--triton-kernels", "all"], 1), 0, ParallelState.single(), steps=1)
    assert [str(difference) for difference in compare(plain, ours, NEAR)] == []
    missing = {
        "plain": {"dense", "listed"},
        "deepseek": set(),
        "biases, tied head": {"dense", "GEMMs", "listed"},
    }[kind]
    assert {
        "listed",
        "norm",
        "rope",
        "router",
        "balancing",
        "permute",
        "loss",
        "GEMMs",
        "dense",
        "experts",
    } - called == missing


@pytest.mark.parametrize("recipe,blocks", [("blockwise", 2), ("mxfp8", 1), ("delayed", 1)])
def test_quantized_gemms_equal_torch_bitwise(recipe, blocks, monkeypatch):
    argv = [*make_argv("plain"), *SMALL, "--num-layers", "1", *f"--fp8-format hybrid --fp8-recipe {recipe}".split()]
    plain = train(parse_args(argv, 1), 0, ParallelState.single(), steps=1)
    shapes = set()

    def choose(names, backends, unfused):
        made = select_cuda_kernels(names, backends, unfused)

        def quantize(x, scaling, scale=None, generator=None):
            result = made.quantize(x, scaling, scale, generator)
            assert result.values.itemsize == 1
            shapes.add((scaling.rows, scaling.cols))
            return result

        return replace(made, quantize=quantize)

    monkeypatch.setattr(build, "select_kernels", choose)
    ours = train(parse_args([*argv, "--triton-kernels", "quantize"], 1), 0, ParallelState.single(), steps=1)
    exact = Tolerances(loss=0.0, norm=0.0, grad=0.0, weight=0.0, copies=0.0, tiny=0.0)
    assert [str(difference) for difference in compare(plain, ours, exact)] == [] and len(shapes) == blocks


def test_every_kernel_name_enables_its_kernels():
    everything = select_cuda_kernels(["all"], None)
    for name in kernels.NAMES:
        one = select_cuda_kernels([name], None)
        changed = [part for part, value in vars(one).items() if value != getattr(kernels.Kernels(), part)]
        assert changed and all(getattr(one, part) == getattr(everything, part) for part in changed), name
    # of another package, by with_delta_rule
    assert all(
        value != getattr(kernels.Kernels(), part) for part, value in vars(everything).items() if part != "gated_delta"
    )

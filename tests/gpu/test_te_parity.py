"""TransformerEngine's layers with the real package against the local layers, on one GPU, and on two of one machine.

What can be shown without them is in tests/layers/test_te.py; this is the rest: that the library means what the stand-in means.
"""

import os
import tempfile
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from arguments import Arguments, parse_args
from arguments.mechanisms.formats import NAMED_BY_LAYER
from arguments.moe import MoEArgs
from arguments.parallel import ParallelArgs
from moe_trainer.backends import BackendPolicy
from moe_trainer.launch_env import LaunchEnv
from moe_trainer.layers import te, te_layers
from moe_trainer.layers.init import Init
from moe_trainer.layers.layer_factory import LayerFactory, select_layer_factory
from moe_trainer.moe.experts import Experts
from moe_trainer.parallel.rng import init_parameters
from moe_trainer.parallel.state import ParallelState
from moe_trainer.quantization.config import QuantizationConfig, get_recipe
from moe_trainer.quantization.iteration import begin_iteration, find_quantized_gemms
from moe_trainer.training.initialize import make_groups
from moe_trainer.verification.training_trace import train

SEQ, BATCH, HIDDEN = 64, 2, 256
MODEL = (
    f"--num-layers 2 --hidden-size {HIDDEN} --num-attention-heads 8 --ffn-hidden-size 512 --normalization RMSNorm --swiglu --bf16 "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --num-experts 4 --moe-router-topk 2 "
    f"--moe-grouped-gemm --seq-length {SEQ} --max-position-embeddings {SEQ} --micro-batch-size {BATCH} --global-batch-size 4 "
    "--train-iters 3 --lr 1e-3 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0 --mock-data --eval-iters 0 "
    "--tokenizer-type NullTokenizer --vocab-size 250 --on-missing-backend error --triton-kernels none"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 32 --v-head-dim 32 "
    "--qk-layernorm"
)
KINDS = ("local", "transformer_engine")
DEVICE = "cuda"
NEAR = 2e-2  # bf16


@pytest.fixture(autouse=True)
def package():
    if reason := te.problem("", *te_layers.NAMES):
        pytest.skip(reason)


def parse_flags(kind: str, *flags: str, ranks: int = 1) -> Arguments:
    return parse_args(" ".join([MODEL, "--transformer-impl", kind, *flags]).split(), ranks)


def make_factory(kind: str, *flags: str, ps: ParallelState | None = None) -> tuple[LayerFactory, Arguments]:
    args = parse_flags(kind, *flags)
    dense = replace(args, moe=MoEArgs())
    return select_layer_factory(dense, ps or ParallelState.single(), BackendPolicy("error", cuda=True)), args


def make_layer(build) -> nn.Module:
    """Build a layer with initial values in bf16."""
    with torch.device("meta"):
        layer = build()
    replaced = {}
    for module in layer.modules():
        for name, param in module.named_parameters(recurse=False):
            if param not in replaced:
                replaced[param] = nn.Parameter(torch.empty(param.shape, dtype=torch.bfloat16, device=DEVICE))
                replaced[param].info = param.info
                init_parameters([replaced[param]], 3)
            setattr(module, name, replaced[param])
    return layer


def run_layer(layer: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    y = layer(*inputs)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y))
    return [y.detach(), *(x.grad for x in inputs), *(param.grad for param in layer.parameters())]


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


def assert_close_all(ours: list[torch.Tensor], theirs: list[torch.Tensor], allowed: float = NEAR) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape and relative(one, other) <= allowed


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["column_linear", "row_linear", "replicated_linear"])
@pytest.mark.parametrize("bias", [False, True])
def test_te_linears_equal_local_linears(kind, bias):
    options = {"name": "linear", "group": ParallelState.single().tp, "init": Init("normal", 0.05), "bias": bias}
    factories = [make_factory(each)[0] for each in KINDS]
    local, fused = (make_layer(partial(getattr(factory, kind), HIDDEN, 512, **options)) for factory in factories)
    assert type(fused).__name__.startswith("Fused")
    x = random(SEQ, BATCH, HIDDEN)
    assert_close_all(run_layer(fused, x), run_layer(local, x))


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ["", "--normalization LayerNorm", "--apply-layernorm-1p"])
def test_te_norms_equal_local_norms(flags):
    layers = []
    for each in KINDS:
        factory, args = make_factory(each, flags)
        layers.append(make_layer(lambda factory=factory, args=args: factory.norm(HIDDEN, args.model, name="norm")))
    x = random(SEQ, BATCH, HIDDEN)
    assert_close_all(run_layer(layers[1], x), run_layer(layers[0], x))


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ["", "--group-query-attention --num-query-groups 2", "--window-size 9,0", LATENT])
def test_te_attention_equals_local_attention(flags):
    layers = []
    for each in KINDS:
        factory, args = make_factory(each, flags)
        width = 64 if "latent" in flags else args.model.kv_channels
        layers.append(factory.core_attention(args.model, 1, head_dim=width, scale=0.2))
    groups = 8 if "latent" in flags else args.model.query_groups
    values = args.model.v_head_dim if "latent" in flags else width
    inputs = (
        random(SEQ, BATCH, 8, width),
        random(SEQ, BATCH, groups, width, seed=1),
        random(SEQ, BATCH, groups, values, seed=2),
    )
    assert_close_all(run_layer(layers[1], *inputs), run_layer(layers[0], *inputs))


WAYS = {
    "plain": "",
    "latent": LATENT,
    "biases": "--normalization LayerNorm",
    "recompute": "--recompute-granularity selective --recompute-modules core_attn layernorm moe",
    "recompute everything": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "offload": "--fine-grained-activation-offloading --min-offloaded-tensor-size 1 --offload-modules attn_norm qkv_linear core_attn attn_proj",
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", WAYS)
def test_te_models_train_like_local_models(name, monkeypatch):
    """Two steps; gradients of the first one."""
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
    local = parse_flags("local", WAYS[name] if name != "offload" else "")
    one, other = (
        train(args, 0, ParallelState.single(), 2, device=DEVICE)
        for args in (local, parse_flags("transformer_engine", WAYS[name]))
    )
    assert_close_training(one, other)


FEW_BITS = tuple(" ".join(each.words) for each in NAMED_BY_LAYER if each.flags.bits < 8)
RECIPES = (
    "--fp8-format hybrid --fp8-recipe tensorwise",
    "--fp8-format e4m3 --fp8-recipe blockwise",
    "--fp8-format hybrid --fp8-recipe blockwise",
    "--fp8-format e4m3 --fp8-recipe mxfp8",
    *FEW_BITS,
)


@pytest.fixture
def flags(request):
    """Flags of a recipe that the device supports."""
    if reason := te.recipe_problem(get_recipe(parse_flags("transformer_engine", request.param).precision)):
        pytest.skip(reason)
    return request.param


@pytest.mark.gpu
@pytest.mark.parametrize("flags", RECIPES, indirect=True)
def test_te_quantized_linear_equals_the_local_one(flags):
    """One linear layer: both multiply the same values, except gradients with stochastic rounding."""
    layers = []
    for each in KINDS:
        factory, args = make_factory(each, flags)
        factory = factory.for_chunk(
            precision=QuantizationConfig.from_args(args.precision, args.model, 1, ParallelState.single())
        ).for_layer(1)
        layers.append(
            make_layer(
                lambda factory=factory: factory.column_linear(
                    HIDDEN, 512, name="linear", group=ParallelState.single().tp, init=Init("normal", 0.05), bias=False
                )
            )
        )
    begin_iteration([SimpleNamespace(quantized=find_quantized_gemms(layers[0]))], 1)
    x = random(SEQ, BATCH, HIDDEN)
    (ours, *our_grads), (theirs, *their_grads) = (run_layer(layer, x) for layer in layers)
    assert_close_all(
        [theirs], [ours], 2e-2 if flags in FEW_BITS else 5e-3
    )  # of four bits many are ties, which the last bit of a scale turns
    assert_close_all(their_grads, our_grads, 0.3 if flags in FEW_BITS else 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [RECIPES[0], RECIPES[1], *RECIPES[3:]], indirect=True)
def test_te_fp8_training_is_close_to_local_fp8_training(flags):
    """GEMMs of the library and local ones round differently: equal up to the rounding."""
    one, other = (train(parse_flags(kind, flags), 0, ParallelState.single(), 2, device=DEVICE) for kind in KINDS)
    assert_close_training(one, other, 0.4 if flags in FEW_BITS else 0.15)


PIPELINE = "--use-transformer-engine-op-fuser"
INTERLEAVED = "--moe-mlp-glu-interleave-size 32"
MXFP8 = (
    "--fp8-format e4m3 --fp8-recipe mxfp8 --moe-router-padding-for-quantization --moe-token-dispatcher-type alltoall"
)
PIPELINES = {
    "plain": "",
    "plain, interleaved": INTERLEAVED,
    "mxfp8": MXFP8,
    "mxfp8, interleaved": f"{MXFP8} {INTERLEAVED}",
}


def make_experts(flags: str) -> Experts:
    args, ps = parse_flags("transformer_engine", flags), ParallelState.single()
    factory = select_layer_factory(
        args, ps, BackendPolicy("error", cuda=True, capability=torch.cuda.get_device_capability())
    )
    precision = None
    if args.precision.fp8:
        precision = QuantizationConfig.from_args(args.precision, args.model, 1, ps)
    factory = factory.for_chunk(precision=precision).for_layer(1)
    return make_layer(lambda: Experts(args.model, args.moe, ps, "experts", factory))


@pytest.mark.gpu
@pytest.mark.parametrize("name", PIPELINES)
def test_te_pipeline_of_experts_reads_counts_on_the_device(name):
    """Outputs and gradients are those of the library's linears with counts on the host; what follows the counts is undefined."""
    pipeline, linears = (make_experts(f"{PIPELINES[name]} {more}") for more in (PIPELINE, ""))
    assert pipeline.why_host_counts() is None and pipeline.pipeline is not None and pipeline.grouped is None
    counts, total, buffer = [256, 0, 128, 384], 768, 1024
    x, probs = random(buffer, HIDDEN), torch.rand(buffer, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    x[total:] = torch.nan
    on_device = torch.tensor(counts, device=DEVICE)
    grad = random(buffer, HIDDEN, seed=7)
    results = []
    for experts, rows, given in ((pipeline, buffer, on_device), (linears, total, counts)):
        inputs = [each[:rows].clone().requires_grad_() for each in (x, probs)]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if experts is pipeline else "default")
        try:
            y = experts(*inputs, given)
            y.backward(grad[:rows])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append(
            [y[:total].detach(), *(each.grad[:total] for each in inputs), *(p.grad for p in experts.parameters())]
        )
    assert_close_all(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain, interleaved", "mxfp8"])
def test_te_pipeline_trains_like_its_linears(name):
    one, other = (
        train(parse_flags("transformer_engine", PIPELINES[name], more), 0, ParallelState.single(), 2, device=DEVICE)
        for more in ("", PIPELINE)
    )
    assert_close_training(one, other, 0.15 if name == "mxfp8" else 5e-2)


@pytest.mark.gpu
def test_te_pipeline_defers_weight_gradients(monkeypatch):
    """Plain experts that defer weight gradients, with those of the library's own queue."""
    monkeypatch.setattr(ParallelArgs, "has_deferred_wgrad", True)  # as flags do with more stages
    flags = "--on-missing-backend fallback"
    one, other = (
        train(parse_flags("transformer_engine", flags, more), 0, ParallelState.single(), 2, device=DEVICE)
        for more in ("", f"{PIPELINE} --moe-mlp-glu-interleave-size 32")
    )
    assert_close_training(one, other)


def assert_close_training(one, other, allowed: float = 5e-2) -> None:
    """Compare losses and gradients of two trainings; bf16 changes a few expert choices."""
    for mine, theirs in zip(one.losses, other.losses, strict=True):
        assert mine["lm loss"] == pytest.approx(theirs["lm loss"], rel=allowed / 5)
    assert one.grads.keys() == other.grads.keys()
    together = [torch.cat([outcome.grads[name].flatten().float() for name in one.grads]) for outcome in (one, other)]
    assert relative(together[1], together[0]) <= allowed


def one_rank(rank: int, folder: str, flags: str) -> None:
    torch.cuda.set_device(rank)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(f"{folder}/store", 2),
        rank=rank,
        world_size=2,
        device_id=torch.device("cuda", rank),
    )
    outcomes = []
    for kind in KINDS:
        args = parse_flags(kind, flags, ranks=2)
        ps = make_groups(args, LaunchEnv(rank, 2, rank, None, None, "test"), timedelta(seconds=120))
        outcomes.append(train(args, rank, ps, 2, device=f"cuda:{rank}"))
    if rank == 0:
        assert_close_training(*outcomes)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--context-parallel-size 2",
        "--context-parallel-size 2 --cp-comm-type a2a",
        "--context-parallel-size 2 --cp-comm-type all_gather",
    ],
)
def test_te_models_train_like_local_models_on_two_gpus(flags, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(one_rank, args=(folder, flags), nprocs=2)

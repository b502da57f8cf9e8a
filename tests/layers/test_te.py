"""TransformerEngine's layers.

Which calls are made, against the recorded signatures, and full trainings with a stand-in for the package.
"""

import logging
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from harness import run_ranks
from layers.fake_te import PYTORCH, RECIPE, install, install_fake_te, without_packages
from torch.nn.attention import SDPBackend
from training.layouts import compare, create_groups, make_argv, train, train_ranks

from arguments import Arguments, parse_args, te_support
from arguments.moe import MoEArgs
from moe_trainer.backends import BackendPolicy, MissingBackendError
from moe_trainer.layers import layer_factory, te, te_layers
from moe_trainer.layers.core_attention import AttentionMask, CoreAttention
from moe_trainer.layers.init import Init
from moe_trainer.layers.kernels import Kernels
from moe_trainer.layers.linear import ColumnParallelLinear
from moe_trainer.layers.norm import Norm
from moe_trainer.layers.te_layers import FusedNorm
from moe_trainer.layers.tp_overlap import TpOverlap
from moe_trainer.model import build
from moe_trainer.ops.packed_sequences import PackedSequences
from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.parallel.weight_grads import WeightGradQueue
from moe_trainer.quantization.config import get_recipe
from moe_trainer.quantization.gemms import QuantizedGemms

CUDA = BackendPolicy(cuda=True)
TE = "--transformer-impl transformer_engine"
TP2, CP2, PP2 = (f"--{name}-parallel-size 2" for name in ("tensor-model", "context", "pipeline-model"))


@pytest.fixture
def fake_package(shared, monkeypatch):
    return install_fake_te(shared, monkeypatch)


def te_argv(kind: str, flags: str = "") -> list[str]:
    return [*make_argv(kind), *f"{TE} {flags}".split()]


def as_strings(differences) -> list[str]:
    return [str(difference) for difference in differences]


GROUPS = "--group-query-attention --num-query-groups"
PARTS = "--recompute-granularity selective --recompute-modules core_attn layernorm mla_up_proj mlp moe"
SENT = "--fine-grained-activation-offloading --min-offloaded-tensor-size 1 --offload-modules attn_norm qkv_linear core_attn attn_proj"


@pytest.mark.parametrize(
    ("kind", "model", "flags"),
    [
        ("deepseek", "", ""),
        ("deepseek", "", PARTS),
        ("deepseek", "", SENT),
        ("biases, tied head", "--normalization LayerNorm", ""),
        (
            "plain",
            f"--apply-layernorm-1p {GROUPS} 2 --qk-layernorm --window-size 5,0",
            "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce",
        ),
        (
            "plain",
            "--reset-attention-mask --reset-position-ids",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ),
    ],
)
def test_te_training_equals_local_layers(fake_package, kind, model, flags):
    local = train([*make_argv(kind), *model.split()], 0, ParallelState.single(), 2)
    assert not fake_package.recorded.calls
    fused = train(te_argv(kind, f"{model} {flags}"), 0, ParallelState.single(), 2)
    assert as_strings(compare(local, fused)) == []
    norm = {"LayerNorm" if "LayerNorm" in model else "RMSNorm"}
    attends = {"DotProductAttention.forward"} if "reset" not in model else set()
    grouped = {"GroupedLinear", "GroupedLinear.forward"} if "biases" not in kind else set()
    assert (
        without_packages(fake_package.called())
        == {"Linear", "Linear.forward", "DotProductAttention"} | norm | attends | grouped
    )


def test_te_linears_compute_frozen_weights_next_to_adapters(fake_package):
    """Experts with adapters are this program's."""
    lora = "--lora-dim 4 --lr 3e-3"
    local = train([*make_argv("plain"), *lora.split()], 0, ParallelState.single(), 2)
    fused = train(te_argv("plain", lora), 0, ParallelState.single(), 2)
    assert as_strings(compare(local, fused)) == []
    called = without_packages(fake_package.called())
    assert "Linear.forward" in called and "GroupedLinear.forward" not in called


def test_te_leaves_chunks_to_the_local_attention(fake_package):
    args = make_args("--attention-chunk-size 8")
    made = select_factory(args).core_attention(args.model, 1, head_dim=4)
    assert type(made) is CoreAttention and made.chunk == 8


@pytest.mark.parametrize("flags", ["", f"{GROUPS} 2 --window-size 3,0"])
@pytest.mark.parametrize("on_device", [False, True])
def test_te_attention_of_packed_sequences_equals_local_attention(fake_package, flags, on_device):
    """Its kernels for variable lengths are called in half precision only."""
    args = make_args(f"--bf16 {flags}")
    made = select_factory(args).core_attention(args.model, 1, head_dim=4)
    packed = PackedSequences.of((5, 16, 1, 9), 4)
    if on_device:
        packed = packed.on_device(torch.device("cpu"), 6)
    heads, groups = args.model.num_attention_heads, args.model.query_groups
    torch.manual_seed(0)
    found = []
    inputs = [torch.randn(40, 1, count, 4, dtype=torch.bfloat16) for count in (heads, groups, groups)]
    for attention, dtype in ((made, torch.bfloat16), (made.local, torch.float32), (made, torch.float32)):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        y = attention(*leaves, AttentionMask.of(None, None, torch.device("cpu"), packed))
        y.sin().sum().backward()
        found.append([y.detach(), *(x.grad for x in leaves)])
    for fused, local, in_fp32 in zip(*found):
        torch.testing.assert_close(fused.float(), local, rtol=0, atol=0.05)
        torch.testing.assert_close(in_fp32, local)
    calls = [name for name, _ in fake_package.recorded.calls if name.endswith("DotProductAttention.forward")]
    assert len(calls) == 1


@pytest.mark.parametrize("cp_size", [1, 2])
def test_packed_sequences_of_a_group_are_not_the_librarys(fake_package, cp_size):
    """A group of several ranks exchanges keys, which the library was given no group for."""
    args = make_args("--bf16")
    made = select_factory(args).core_attention(args.model, 1, head_dim=4)
    asked = []
    made.local.forward = lambda q, k, v, visible: asked.append(visible.cp_size) or q.flatten(2)
    packed = replace(PackedSequences.of((8, 16), 4), cp_size=cp_size)
    heads, groups = args.model.num_attention_heads, args.model.query_groups
    inputs = [torch.randn(24 // cp_size, 1, count, 4, dtype=torch.bfloat16) for count in (heads, groups, groups)]
    made(*inputs, AttentionMask.of(None, None, torch.device("cpu"), packed))
    assert asked == ([] if cp_size == 1 else [2])


def train_and_list_calls(rank, n, argvs, steps):
    """Train on the ranks; return the outcomes and the calls on this rank."""
    outcomes = train_ranks(rank, n, argvs, steps)
    return outcomes, without_packages(sys.modules[PYTORCH].double.called())


@pytest.mark.parametrize(
    ("kind", "model", "mapping"),
    [
        ("deepseek", "", f"{TP2} --sequence-parallel --tp-comm-overlap {PARTS}"),
        ("plain", "", TP2),
        (
            "biases, tied head",
            "--normalization LayerNorm",
            f"{TP2} --sequence-parallel --expert-tensor-parallel-size 1",
        ),
        (
            "plain",
            f"{GROUPS} 1",
            f"{TP2} --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        ),
        ("plain", "", f"{PP2} --num-virtual-stages-per-pipeline-rank 2"),
        ("plain", "", f"{PP2} --pipeline-schedule zero-bubble"),
        ("plain", "", "--use-torch-fsdp2"),
    ],
)
def test_te_on_two_ranks_equals_one_process_with_local_layers(fake_package, kind, model, mapping):
    sys.modules[PYTORCH].double = fake_package
    one = train([*make_argv(kind), *model.split()], 0, ParallelState.single(), 1)
    assert not fake_package.recorded.calls
    (outcomes, called), _ = run_ranks(train_and_list_calls, 2, [te_argv(kind, f"{model} {mapping}")], 1)
    assert as_strings(compare(one, outcomes[0])) == []
    assert "DotProductAttention.forward" in called and ("Linear.forward" in called) is ("zero-bubble" not in mapping)


@pytest.mark.parametrize("kind", ["p2p", "a2a", "allgather"])
def test_te_context_parallel_attention_equals_one_process(fake_package, monkeypatch, kind):
    """In fp32, for which the real package has no kernels."""
    sys.modules[PYTORCH].double = fake_package
    monkeypatch.setattr(te_support, "attention_problem", lambda *_: None)
    model = f"{GROUPS} 2"
    one = train([*make_argv("plain"), *model.split()], 0, ParallelState.single(), 1)
    (outcomes, called), _ = run_ranks(
        train_and_list_calls, 2, [te_argv("plain", f"{model} {CP2} --cp-comm-type {kind}")], 1
    )
    assert as_strings(compare(one, outcomes[0])) == []
    assert {"DotProductAttention.set_context_parallel_group", "DotProductAttention.forward"} <= called


def get_exchange_groups(rank, n, flags):
    """Return the kind of exchange given to TransformerEngine and the global ranks of its groups."""
    ps = create_groups([*make_argv("plain"), "--bf16", *flags.split()], rank, n)
    group, ranks, stream, kind = te_layers.FusedLayers(
        None, ps, parse_args([*make_argv("plain"), *flags.split()], n).parallel.cp_comm_type
    )._exchange(1)
    groups = group if isinstance(group, list) else [group]
    return kind, [torch.distributed.get_process_group_ranks(each) for each in groups], ranks, stream


@pytest.mark.parametrize(
    ("flags", "kind", "groups"),
    [
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", "a2a+p2p", [[2, 3], [1, 3]]),
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 1 4", "p2p", [[0, 1, 2, 3]]),
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 1", "a2a", [[0, 1, 2, 3]]),
        ("--cp-comm-type allgather", "all_gather", [[0, 1, 2, 3]]),
    ],
)
def test_context_parallel_exchange_groups(flags, kind, groups):
    *_, last = run_ranks(get_exchange_groups, 4, f"--context-parallel-size 4 {flags}")
    assert last == (kind, groups, [0, 1, 2, 3], None)


class FirstLayers:
    """The recipes of the linears of a model with these flags, by layer and weight shape."""

    def __init__(self, fake_package, *flags: str):
        (self.chunk,) = build.build_chunks(
            parse_args([*make_argv("deepseek"), TE_IMPL, "transformer_engine", *" ".join(flags).split()], 1),
            ParallelState.single(),
            64,
        )
        tokens_BS = torch.randint(0, 60, (2, 16))
        fake_package.gemms.clear()
        self.chunk(
            tokens_BS, torch.arange(16).expand(2, 16), tokens_BS, torch.ones_like(tokens_BS), grad_scale=1.0
        ).sum().backward()
        self.recipes = [recipe for _, recipe in fake_package.gemms]
        self.linears = [type(layer.self_attention.linear_proj).__name__ for layer in self.chunk.decoder.layers]
        self.experts = [
            sum(isinstance(part, QuantizedGemms) for part in layer.modules()) for layer in self.chunk.decoder.layers
        ]


TE_IMPL = "--transformer-impl"
FACTORY = "--fp8-format e4m3 --fp8-recipe custom --fp8-quantizer-factory quantization.test_custom_recipe."
MADE = {
    "--fp8-format hybrid --fp8-recipe tensorwise": ("Float8CurrentScaling", {"fp8_format": "HYBRID"}),
    "--fp8-format e4m3 --fp8-recipe blockwise": ("Float8BlockScaling", {"fp8_format": "E4M3"}),
    "--fp8-format e4m3 --fp8-recipe mxfp8": ("MXFP8BlockScaling", {"fp8_format": "E4M3"}),
    "--fp4-format e2m1 --fp4-recipe nvfp4": ("NVFP4BlockScaling", {}),
}


@pytest.mark.parametrize("flags", MADE)
def test_linears_use_the_fp8_recipe(fake_package, flags):
    every = FirstLayers(fake_package, "--bf16", flags)
    assert every.recipes and all(
        recipe == MADE[flags] for recipe in every.recipes
    )  # the factory does not build the head and the router
    assert every.linears == ["FusedRowLinear"] * 4
    assert every.experts[0] == 0 and all(every.experts[1:])  # experts quantize by themselves; the first layer has none


def test_a_factory_of_quantizers_is_the_custom_recipe(fake_package):
    """Also for experts, whose token counts fit every quantizer."""
    fake_package.align = te.CUSTOM_ALIGNMENT
    wide = "--hidden-size 32 --ffn-hidden-size 32"
    every = FirstLayers(fake_package, "--bf16", f"{FACTORY}returns_quantizers {wide}")
    assert every.linears == ["FusedRowLinear"] * 4 and not any(every.experts)
    assert {(kind, *given) for kind, given in every.recipes} == {("CustomRecipe", "qfactory")}
    assert {given["qfactory"].__name__ for _, given in every.recipes} == {"returns_quantizers"}


def test_first_and_last_layers_stay_in_bf16(fake_package):
    ends = FirstLayers(
        fake_package,
        "--bf16 --fp8-format e4m3 --fp8-recipe blockwise --first-last-layers-bf16 --num-layers-at-start-in-bf16 1 "
        "--num-layers-at-end-in-bf16 2",
    )
    found = {
        name: layer.self_attention.linear_proj.context is not nullcontext
        for name, layer in ends.chunk.named_modules()
        if name.count(".") == 2 and name.startswith("decoder.layers.")
    }
    assert list(found.values()) == [False, True, False, False]
    assert {None, MADE["--fp8-format e4m3 --fp8-recipe blockwise"][0]} == {
        recipe and recipe[0] for recipe in ends.recipes
    }


def test_recomputed_linears_use_the_same_recipe(fake_package):
    flags = "--bf16 --fp8-format e4m3 --fp8-recipe blockwise"
    once = FirstLayers(fake_package, flags).recipes
    again = FirstLayers(
        fake_package, flags, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ).recipes
    assert len(again) > 1.5 * len(once) and all(again)


STORED = "--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather"


@pytest.mark.parametrize(
    "flags",
    [
        "--use-distributed-optimizer",
        "--use-torch-fsdp2",
        "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy no_shard",
    ],
)
def test_fp8_param_gather_keeps_the_library_without_a_note(fake_package, caplog, flags):
    with caplog.at_level(logging.INFO):
        fused = FirstLayers(fake_package, "--bf16", f"{STORED} {flags}")
    assert "--fp8-param-gather" not in caplog.text and fused.linears == ["FusedRowLinear"] * 4


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--fp8-format hybrid --fp8-recipe delayed", "updates delayed scales with every microbatch"),
        ("--fp8-format e4m3 --fp8-recipe blockwise --no-fp8-wgrad", "--no-fp8-wgrad"),
        ("--fp4-format e2m1 --fp4-recipe nvfp4", "this device has no nvfp4"),
        (f"{FACTORY}blockwise", "the factory names formats of this program's own layers"),
    ],
)
def test_unsupported_recipes_use_local_linears_with_a_note(fake_package, caplog, flags, reason):
    fake_package.available.discard("nvfp4")
    with caplog.at_level(logging.INFO):
        local = FirstLayers(fake_package, "--bf16", flags)
    logged = [message for message in caplog.messages if reason in message]
    assert len(logged) == 1 and "using the local layers for linears and experts with" in logged[0]
    assert (
        local.linears == ["RowParallelLinear"] * 4
        and all(local.experts)
        and "RMSNorm" in without_packages(fake_package.called())
    )


DEFERS = "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"


def make_args(*flags: str) -> Arguments:
    """Arguments of a model without experts."""
    args = parse_args([*make_argv("plain"), TE_IMPL, "transformer_engine", *" ".join(flags).split()], 2)
    return replace(args, moe=MoEArgs())


def select_factory(
    args: Arguments | None = None,
    backends: BackendPolicy = CUDA,
    ps: ParallelState | None = None,
    kernels: Kernels | None = None,
    overlap: TpOverlap | None = None,
) -> layer_factory.LayerFactory:
    return layer_factory.select_layer_factory(
        args or make_args(), ps or ParallelState.single(), backends, kernels or Kernels(), overlap
    )


CONFIG = {"proj_fprop": {"num_splits": 2}}


def test_tp_comm_overlap_goes_through_userbuffers(fake_package):
    """Linears that have buffers get them; experts and others do not."""
    two = replace(ParallelState.single(), tp=Group("tp", (0, 1), 0, 2))
    factory = select_factory(ps=two, overlap=TpOverlap(scatters=False, bulk_dgrad=False, config=CONFIG))
    options = {"group": two.tp, "init": Init("normal", 1.0), "sequence_parallel": True}
    made = (
        ("column", "linear_qkv"),
        ("row", "linear_proj"),
        ("column", "linear_q_up_proj"),
        ("replicated", "linear_fc1"),
    )
    found = []
    for kind, name in made:
        getattr(factory, f"{kind}_linear")(8, 8, name=f"decoder.layers.0.{name}", **options)
        _, arguments = fake_package.recorded.calls[-1]
        found.append({name.removeprefix("ub_"): value for name, value in arguments.items() if name.startswith("ub_")})
    common = {
        "overlap_ag": True,
        "overlap_rs": False,
        "overlap_rs_dgrad": False,
        "bulk_dgrad": False,
        "bulk_wgrad": True,
    }
    assert found == [{"name": "qkv", **common}, {"name": "proj", **common}, {}, {}]


def test_userbuffers_are_allocated_once_for_both_formats(fake_package, monkeypatch, tmp_path):
    file = tmp_path / "overlap.yaml"
    file.write_text("proj_fprop: {num_splits: 2}")
    flags = (
        f"{TP2} --sequence-parallel --tp-comm-overlap --tp-comm-overlap-cfg {file} --bf16 --fp8-format e4m3 --fp8-recipe "
        "tensorwise --first-last-layers-bf16 --num-layers-at-start-in-bf16 1 --tp-comm-bootstrap-backend gloo"
    )
    args = parse_args(te_argv("plain", flags), 2)
    ps = replace(ParallelState.single(), tp=Group("tp", (0, 1), 0, 2))
    build._initialize_userbuffers(args, ps, torch.bfloat16, TpOverlap.from_args(args.parallel))
    _, call = fake_package.recorded.calls[-1]
    tokens = args.data.seq_length * args.training.micro_batch_size
    assert call == {
        "shape": [tokens, args.model.hidden_size],
        "tp_size": 2,
        "quantization_modes": ["fp8", "none"],
        "dtype": torch.bfloat16,
        "ub_cfgs": CONFIG,
        "bootstrap_backend": "gloo",
    }


def test_deferred_weight_gradients_use_local_linears(fake_package, caplog):
    with caplog.at_level(logging.INFO):
        factory = select_factory(make_args(DEFERS)).for_chunk(WeightGradQueue())
    linear = factory.column_linear(8, 8, name="linear", group=Group.single("tp"), init=Init("normal", 1.0))
    assert type(linear) is ColumnParallelLinear and factory.name == "transformer_engine"
    (message,) = caplog.messages
    assert "as the schedule does; using the local layers for linears" in message
    with pytest.raises(MissingBackendError, match="as the schedule does. Use --transformer-impl local"):
        select_factory(make_args(DEFERS), BackendPolicy("error", cuda=True))


TWO = replace(ParallelState.single(), cp=Group("cp", (0, 1), 0, 2))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("", "attention in fp32"),
        ("--bf16 --window-size 4,0", "--window-size"),
        ("--bf16 --attention-dropout 0.1", "--attention-dropout"),
        (
            "--bf16 --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 4",
            "different widths",
        ),
        ("--bf16", None),
    ],
)
def test_unsupported_context_parallelism_uses_local_attention(fake_package, caplog, flags, reason):
    with caplog.at_level(logging.INFO):
        factory = select_factory(make_args(flags, CP2), ps=TWO)
    assert [reason in message and "local layers for core attention" in message for message in caplog.messages] == [
        True
    ] * bool(reason)
    made = factory.core_attention(make_args(flags, CP2).model, 1, head_dim=4)
    assert type(made).__name__ == ("FusedAttention" if reason is None else "ContextParallelAttention")


@pytest.mark.parametrize(
    ("backend", "kind", "kernel"),
    [
        ("local", "CoreAttention", SDPBackend.MATH),
        ("unfused", "FusedAttention", SDPBackend.MATH),
        ("auto", "FusedAttention", None),
    ],
)
def test_attention_backend_of_packed_documents_and_of_local(fake_package, backend, kind, kernel):
    args = make_args(f"--bf16 --attention-backend {backend}")
    made = select_factory(args, replace(CUDA, typed=frozenset({"attention_backend"}))).core_attention(
        args.model, 1, head_dim=4
    )
    assert type(made).__name__ == kind and getattr(made, "local", made).backend == kernel


def test_a_backend_that_only_the_library_can_run_leaves_documents_to_torch(fake_package):
    args = make_args("--attention-backend flash")  # in fp32
    made = select_factory(args, replace(CUDA, typed=frozenset({"attention_backend"}))).core_attention(
        args.model, 1, head_dim=4
    )
    assert type(made).__name__ == "FusedAttention" and made.local.backend is None


def test_fp32_residual_uses_local_norms(fake_package, caplog):
    with caplog.at_level(logging.INFO):
        factory = select_factory(make_args("--bf16 --fp32-residual-connection"))
    assert "--fp32-residual-connection" in caplog.text and type(factory.norm(8, make_args().model, name="norm")) is Norm
    caplog.clear()
    args = replace(make_args(), model=replace(make_args().model, normalization="RMSNorm"))
    typed = replace(CUDA, typed=frozenset({"triton_kernels"}))
    with caplog.at_level(logging.INFO):
        norm = select_factory(args, typed, kernels=Kernels(rms_norm=print)).norm(8, args.model, name="norm")
    assert type(norm) is Norm
    assert caplog.messages == ["norms are those of --triton-kernels norm, not TransformerEngine's"]
    # the default gives way, and there is no kernel for LayerNorm
    norm = select_factory(args, kernels=Kernels(rms_norm=print)).norm(8, args.model, name="norm")
    assert type(norm) is FusedNorm
    args = replace(args, model=replace(args.model, normalization="LayerNorm"))
    norm = select_factory(args, typed, kernels=Kernels(rms_norm=print)).norm(8, args.model, name="norm")
    assert type(norm) is FusedNorm


def test_documents_and_masks_use_local_attention(fake_package):
    model = make_args().model
    fused = select_factory().core_attention(model, 1, head_dim=4)
    fused.should_save_inputs = True
    q, k, v = (torch.randn(6, 2, 4, 4) for _ in range(3))
    mask = torch.rand(2, 1, 6, 6) < 0.5
    seen = AttentionMask(mask=(mask | torch.eye(6, dtype=torch.bool)).tril())
    documents = AttentionMask.of(None, torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1]]))
    for visible in (seen, documents):
        assert torch.equal(fused(q, k, v, visible), CoreAttention(model, 1, head_dim=4)(q, k, v, visible))
    assert (
        "DotProductAttention.forward" not in without_packages(fake_package.called()) and fused.local.should_save_inputs
    )
    assert torch.allclose(fused(q, k, v), CoreAttention(model, 1, head_dim=4)(q, k, v), atol=1e-6)
    assert "DotProductAttention.forward" in without_packages(fake_package.called())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "raise RuntimeError('Found empty `transformer-engine` meta package.\\nInstall it')",
            "RuntimeError: Found empty",
        ),
        ("raise OSError('libcublas.so.13: cannot open shared object file')", "OSError: libcublas.so.13"),
        ("raise ImportError('undefined symbol: _ZN3c10')", "ImportError: undefined symbol"),
        (
            "assert False, 'Transformer Engine package version mismatch. Found 2.20.2 and 2.9.0'",
            "AssertionError: Transformer Engine package version",
        ),
        ("import a_package_that_does_not_exist", "No module named 'a_package_that_does_not_exist'"),
        ("", "has no transformer_engine.pytorch"),
    ],
)
def test_broken_te_installation_falls_back_to_local_layers(monkeypatch, tmp_path, caplog, text, reason):
    install(monkeypatch, {})
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level(logging.INFO):
        assert select_factory().name == "local"
    (message,) = caplog.messages
    assert reason in message and "\n" not in message and message.endswith("using the local layers (plain torch)")
    assert reason in te.problem("permutation", "moe_unpermute")
    with pytest.raises(MissingBackendError, match="(?s)pip install .*--on-missing-backend fallback"):
        select_factory(backends=BackendPolicy(typed=frozenset({"transformer_impl"}), cuda=True))


def test_te_without_a_needed_class_falls_back_to_local_layers(fake_package, caplog):
    del sys.modules[PYTORCH].DotProductAttention
    with caplog.at_level(logging.INFO):
        assert select_factory().name == "local"
    assert "has no transformer_engine.pytorch.DotProductAttention" in caplog.text


def test_recipe_missing_in_older_te_is_handled(fake_package):
    blockwise = get_recipe(make_args("--bf16 --fp8-format e4m3 --fp8-recipe blockwise").precision)
    assert te.recipe_problem(blockwise) is None
    del sys.modules[RECIPE].Float8BlockScaling
    assert te.recipe_problem(blockwise).endswith("has no transformer_engine.common.recipe.Float8BlockScaling")
    del sys.modules[PYTORCH].autocast
    assert te.recipe_problem(blockwise).endswith("has no transformer_engine.pytorch.autocast")

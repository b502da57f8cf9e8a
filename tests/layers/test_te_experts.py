"""Experts by TransformerEngine's GroupedLinear.

Against the local experts, with a stand-in that checks calls against the recorded signatures.
"""

import logging
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from harness import run_ranks
from layers.fake_te import PYTORCH, install_fake_te, without_packages
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from training.layouts import compare, create_groups, make_argv, train

from arguments import parse_args
from moe_trainer.backends import BackendPolicy, MissingBackendError
from moe_trainer.layers import layer_factory, te, te_experts, te_layers
from moe_trainer.layers.init import Init
from moe_trainer.layers.kernels import Kernels
from moe_trainer.layers.te_experts import FusedGroupedLinear, LibraryGemms, stacked
from moe_trainer.layers.te_layers import FusedColumnLinear
from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.moe.grouped_experts import grouped_expert_mlp
from moe_trainer.moe.receive.padding import TokenPadding
from moe_trainer.ops.expert_mlp import ExpertWeights, expert_mlp, get_activation_fns
from moe_trainer.ops.grouped_gemm import GROUPED_MM
from moe_trainer.ops.pointwise import Activation
from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.parallel.weight_grads import WeightGradQueue
from moe_trainer.quantization.config import get_recipe

COUNTS = (9, 0, 16, 3)
WIDE = (
    "--hidden-size 32 --ffn-hidden-size 32 --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 16"
)
FP8 = "--fp8-format e4m3 --fp8-recipe blockwise"
BUDGET = "--moe-expert-rank-capacity-factor 2 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
GRAPH = "--cuda-graph-impl local --te-rng-tracker --moe-grouped-gemm"
EXPERTS = ((64, 32), (32, 32))


@pytest.fixture
def fake_package(shared, monkeypatch):
    return install_fake_te(shared, monkeypatch)


def make_values(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": (28, 8), "p": (28,), "w1": (4, 12, 8), "w2": (4, 8, 6), "b1": (4, 12), "b2": (4, 8)}
    made = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }
    return {name: Parameter(x.detach()) if name[0] == "w" else x for name, x in made.items()}


def linears(queue=None, pad_multiple=1, save_original_input=False):
    sizes, library = ((8, 12), (6, 8)), sys.modules[PYTORCH]
    return tuple(
        FusedGroupedLinear(
            4,
            *size,
            LibraryGemms(library, pad_multiple=pad_multiple),
            queue=queue,
            save_original_input=save_original_input,
        )
        for size in sizes
    )


def local(v, activation, queue=None, **biases):
    weights = ExpertWeights(v["w1"], v["w2"], **biases)
    return expert_mlp(v["x"], v["p"], weights, COUNTS, activation, allow_grouped=False, queue=queue)


def grouped(v, activation, pair, activations=None, unused=0, counts=COUNTS, **biases):
    return grouped_expert_mlp(
        v["x"],
        v["p"],
        ExpertWeights(v["w1"], v["w2"], **biases),
        counts,
        pair,
        get_activation_fns(activation),
        activations or ActivationPolicy(),
        unused=unused,
    )


def assert_near(one, other):
    for name in one:
        assert (one[name] is None) == (other[name] is None), name
        if one[name] is not None:
            torch.testing.assert_close(one[name], other[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pad_multiple", [1, 16])
@pytest.mark.parametrize("how", ["plain", "biases", "no probabilities", "recomputed activation"])
def test_te_experts_equal_local_experts(fake_package, pad_multiple, how):
    activation, found = Activation("silu", gated=True), []
    for ours in (False, True):
        v = make_values()
        if how == "no probabilities":
            v["p"] = None
        biases = {"b1_eG": v["b1"], "b2_eH": v["b2"]} if how == "biases" else {}
        if ours:
            recomputes = how == "recomputed activation"
            activations = ActivationPolicy(frozenset({"moe_act"}) if recomputes else frozenset(), uses_global_rng=False)
            pair = linears(pad_multiple=pad_multiple, save_original_input=recomputes)
            y = grouped(v, activation, pair, activations, **biases)
            padded = [16, 0, 16, 16] if pad_multiple == 16 else list(COUNTS)
            assert fake_package.rows == [padded, padded] and not any(list(linear.parameters()) for linear in pair)
        else:
            y = local(v, activation, **biases)
        (y.sin() * torch.arange(28 * 8).view(28, 8)).sum().backward()
        found.append({"y": y.detach(), **{name: None if x is None else x.grad for name, x in v.items()}})
    assert_near(*found)
    assert without_packages(fake_package.called()) == {"GroupedLinear", "GroupedLinear.forward"}


@pytest.mark.parametrize("waits", [(True, True), (False, False), (True, False), (False, True)])
def test_deferred_te_weight_gradients_equal_immediate_ones(fake_package, waits):
    """Two microbatches, whose weight gradients are computed immediately or deferred."""
    activation, found = Activation("gelu"), []
    for ours in (False, True):
        queue, v = WeightGradQueue(), make_values()
        v["w1"] = Parameter(v["w1"].detach()[:, :6].clone())
        pair = linears(queue)
        taken = []
        for seed, active in enumerate(waits):
            x = make_values(seed)["x"]
            queue.active = active
            each = {**v, "x": x}
            if ours:
                pair[0].fused.shape = (6, 8)
                y = grouped(each, activation, pair)
            else:
                y = local(each, activation, queue=queue)
            before = None if v["w1"].grad is None else v["w1"].grad.clone()
            y.square().sum().backward()
            if active:
                after = v["w1"].grad
                assert after is None if before is None else torch.equal(after, before), "it was deferred"
            for linear in pair:
                assert not any(total.untyped_storage().nbytes() for total in linear._deferred), (
                    "it waits without memory"
                )
            taken.append(queue.take())
        for pending in taken:
            pending.run()
        assert not any(linear.fused.store for linear in pair)
        found.append({name: v[name].grad for name in ("w1", "w2", "p")})
    assert_near(*found)
    assert {"GroupedLinear.backward_dw"} <= without_packages(fake_package.called())


class CountFills(TorchDispatchMode):
    """Counts fills of whole tensors of weights: of their shapes, by the stand-in's other work there are none."""

    def __init__(self):
        super().__init__()
        self.shapes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.zeros, torch.ops.aten.zero_, torch.ops.aten.fill_):
            self.shapes[tuple(out.shape)] += 1
        return out


@pytest.mark.parametrize("active", [None, False, True], ids=["no queue", "at once", "deferred"])
def test_te_weight_gradients_are_filled_with_zeros_once(fake_package, active):
    queue = None if active is None else WeightGradQueue()
    v, activation = make_values(), Activation("silu", gated=True)
    if queue is not None:
        queue.active = active
    y = grouped(v, activation, linears(queue))
    with CountFills() as fills:
        y.square().sum().backward()
        if active:
            queue.take().run()
    assert {shape: fills.shapes[shape] for shape in ((4, 12, 8), (4, 8, 6))} == {(4, 12, 8): 1, (4, 8, 6): 1}


@pytest.mark.parametrize(
    ("sums", "written"),
    [(None, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)],
)
def test_te_gradients_are_wide_only_if_they_are_added_to_wide_sums(fake_package, sums, written):
    """A gradient in fp32 that is rounded anyway would take twice the memory of the experts' weights for nothing."""
    weight = Parameter(torch.ones(4, 12, 8, dtype=torch.bfloat16))
    if sums is not None:
        weight.main_grad_sum_dtype = sums
    found = te_experts.give_main_grads(list(weight.detach()), weight)
    assert found.dtype == written and not found.any()


def test_contiguous_gradients_are_stacked_without_copy():
    full = torch.arange(24.0).view(4, 2, 3)
    assert stacked(full.unbind(0)).data_ptr() == full.data_ptr() and torch.equal(stacked(full.unbind(0)), full)
    assert torch.equal(stacked([*full[:2], *full[2:].clone()]), full)
    assert torch.equal(stacked([full[1], full[0]]), full[[1, 0]])


def test_te_weights_are_not_offloaded_as_activations(fake_package):
    """Weights that the library saves for backward are not moved to the host with activations."""
    v, seen = make_values(), []
    activations = ActivationPolicy()
    activations._pack = (lambda pack: lambda x: seen.append(pack(x) is x and x.shape) or pack(x))(activations._pack)
    with activations._storing(lambda x: lambda: x):
        grouped(v, Activation("silu", gated=True), linears())
    assert (12, 8) in seen and (8, 6) in seen


def test_token_padding_adds_rows_of_zeros():
    x = torch.arange(1.0, 29.0, requires_grad=True)
    padding = TokenPadding(COUNTS, 8, x.device)
    padded = padding.pad(x)
    assert padding.counts == [16, 0, 16, 8] and padded.tolist() == [
        *range(1, 10),
        *[0] * 7,
        *range(10, 26),
        *range(26, 29),
        *[0] * 5,
    ]
    back = padding.unpad(padded * 2)
    (back * torch.arange(28.0)).sum().backward()
    assert torch.equal(back, x * 2) and torch.equal(x.grad, 2 * torch.arange(28.0))
    even = TokenPadding((8, 0, 16), 8, x.device)
    assert even.pad(x) is x and even.unpad(x) is x


def test_unused_rows_and_wrong_counts(fake_package):
    v = make_values()
    more = {
        **v,
        "x": torch.cat([v["x"], torch.zeros(4, 8, dtype=torch.float64)]),
        "p": torch.cat([v["p"], torch.zeros(4)]),
    }
    activation = Activation("silu", gated=True)
    y = grouped(more, activation, linears(), unused=4)
    assert y.shape == (32, 8)
    torch.testing.assert_close(y[:28], local(v, activation))
    with pytest.raises(ValueError, match="add up to 28, but there are 30"):
        grouped(more, activation, linears(), unused=2)
    with pytest.raises(ValueError, match="needs counts on the host"):
        grouped(v, activation, linears(), counts=torch.tensor(COUNTS))


def te_argv(flags):
    return [*make_argv("plain"), *f"{WIDE} --transformer-impl transformer_engine {flags}".split()]


@pytest.mark.parametrize(
    "flags",
    [
        "",
        BUDGET,
        "--recompute-granularity selective --recompute-modules moe_act",
        "--moe-router-padding-for-quantization --moe-token-dispatcher-type alltoall",
    ],
)
def test_quantized_experts_use_the_fp8_recipe(fake_package, flags):
    """In full trainings; the stand-in does not round, so they are those in fp32."""
    fake_package.align = 32  # more than our own alignment
    one = train([*make_argv("plain"), *f"{WIDE}".split()], 0, ParallelState.single(), 2)
    other = train(te_argv(f"{FP8} {flags}"), 0, ParallelState.single(), 2)
    assert [str(difference) for difference in compare(one, other)] == []
    found = [(shape, recipe) for shape, recipe in fake_package.gemms if shape in EXPERTS]
    assert all(recipe[0] == "Float8BlockScaling" for _, recipe in found) and fake_package.rows
    assert all(count % 32 == 0 for splits in fake_package.rows for count in splits)


def ranks(rank, n, argv):
    outcome = train(argv, rank, create_groups(argv, rank, n), 1)
    return outcome, without_packages(sys.modules[PYTORCH].double.called())


@pytest.mark.parametrize(
    "mapping",
    [
        "--expert-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
        "--use-torch-fsdp2",
    ],
)
def test_te_experts_on_two_ranks_equal_one_process(fake_package, mapping):
    sys.modules[PYTORCH].double = fake_package
    one = train([*make_argv("plain"), *WIDE.split()], 0, ParallelState.single(), 1)
    (outcome, called), _ = run_ranks(ranks, 2, te_argv(mapping))
    assert [str(difference) for difference in compare(one, outcome)] == []
    assert "GroupedLinear.forward" in called and ("GroupedLinear.backward_dw" in called) is ("zero-bubble" in mapping)


CUDA = BackendPolicy(cuda=True)


def select_experts(flags, caplog, backends=CUDA):
    args = parse_args(te_argv(flags), 2)
    with caplog.at_level(logging.INFO):
        factory = layer_factory.select_layer_factory(args, groups(args), backends)
    return factory.grouped_linear(4, 32, 32), [message for message in caplog.messages if "for experts" in message]


def test_kernels_replaced_by_te_are_logged(fake_package, caplog):
    kernels = Kernels(grouped_gemms=GROUPED_MM, quantize=lambda *_: None)
    for flags, logged in ((f"--bf16 {FP8}", ["quantize", "grouped-gemm"]), ("", ["grouped-gemm"]), ("--bf16", [])):
        args = parse_args(te_argv(flags), 1)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            layer_factory.select_layer_factory(args, ParallelState.single(), BackendPolicy(cuda=True), kernels)
        assert [
            message.split()[1].rstrip(":") for message in caplog.messages if message.startswith("--triton-kernels")
        ] == logged


@pytest.mark.parametrize(
    "flags",
    [
        "--fp8-recipe blockwise",
        "--fp8-recipe tensorwise",
        "--fp8-recipe delayed",
        "--fp8-recipe blockwise --no-fp8-wgrad",
        "--fp8-recipe blockwise --fp8-param-gather --use-distributed-optimizer",
        "--fp8-recipe blockwise --fp8-param-gather --use-torch-fsdp2",
        "--fp8-recipe blockwise --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
        f"--fp8-recipe blockwise {BUDGET} --moe-paged-stash",
        "--fp8-recipe blockwise --te-precision-config-file formats.yaml",
    ],
)
def test_memory_plan_predicts_the_choice_of_layers(fake_package, flags):
    """If package, device and widths support everything; memory plans rely on this."""
    args = parse_args(te_argv(f"--bf16 --fp8-format e4m3 {flags}"), 2)
    defers = args.parallel.has_deferred_wgrad
    factory = layer_factory.select_layer_factory(args, ParallelState.single(), BackendPolicy(cuda=True))
    factory = factory.for_chunk(WeightGradQueue() if defers else None)
    factory = replace(factory, **factory._linears(quantize=lambda *_, **__: None))
    linear = factory.column_linear(32, 32, name="linear", group=Group.single("tp"), init=Init("normal", 1.0))
    assert (type(linear) is FusedColumnLinear, factory.grouped_linear(4, 32, 32) is not None) == args.te_quantizes


def groups(args):
    single = ParallelState.single()
    return replace(single, ep=Group("ep", (0, 1), 0, 2)) if args.parallel.expert_model_parallel_size == 2 else single


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--moe-clone-hot-experts 1 --expert-model-parallel-size 2", "--moe-clone-hot-experts"),
        (f"{BUDGET} --moe-paged-stash", "--moe-paged-stash"),
    ],
)
def test_unsupported_experts_stay_local(fake_package, caplog, flags, reason):
    made, logged = select_experts(flags, caplog)
    assert made is None and len(logged) == 1 and reason in logged[0]
    with pytest.raises(MissingBackendError, match="for experts"):
        select_experts(flags, caplog, BackendPolicy("error", cuda=True))


def test_bf16_experts_use_torch_grouped_gemms(fake_package, caplog):
    assert select_experts("--bf16", caplog) == (None, [])
    assert (
        "experts in bf16 are computed by this program's own grouped GEMMs, not by TransformerEngine's"
        in caplog.messages
    )
    made, logged = select_experts("", caplog)
    assert type(made) is FusedGroupedLinear and not logged


def test_bf16_experts_use_te_from_compute_capability_10(fake_package, caplog):
    for capability, made in (((9, 0), type(None)), ((10, 0), FusedGroupedLinear), ((10, 3), FusedGroupedLinear)):
        assert type(select_experts("--bf16", caplog, BackendPolicy(cuda=True, capability=capability))[0]) is made


@pytest.mark.parametrize(
    ("added", "typed", "capability", "made"),
    [
        ("", (), (9, 0), type(None)),
        ("", ("transformer_impl",), (9, 0), FusedGroupedLinear),
        ("", (), (8, 9), FusedGroupedLinear),  # torch has no grouped GEMM that reads counts there
        ("--moe-permute-fusion-into-hybridep", (), (9, 0), FusedGroupedLinear),
        (GRAPH, ("transformer_impl",), (9, 0), type(None)),  # it cannot hold a read on the host
        (f"{GRAPH} --cuda-graph-modules attn", ("transformer_impl",), (9, 0), FusedGroupedLinear),
    ],
)
def test_quantized_experts_with_a_budget_read_counts_on_the_device(
    fake_package, caplog, added, typed, capability, made
):
    policy = BackendPolicy(cuda=True, capability=capability, typed=frozenset(typed))
    args = parse_args(te_argv(f"--bf16 {FP8} {BUDGET} {added}"), 2)
    with caplog.at_level(logging.INFO):
        factory = layer_factory.select_layer_factory(args, ParallelState.single(), policy).for_chunk(None)
    factory = replace(factory, **factory._linears(quantize=lambda *_, **__: None))
    assert type(factory.grouped_linear(4, 32, 32)) is made
    assert (made is FusedGroupedLinear) == (
        capability < (9, 0) or replace(args, typed=frozenset(typed)).te_quantizes[1]
    )
    assert any("which read token counts on the device" in message for message in caplog.messages) == (
        made is type(None)
    )


def test_quantized_experts_staying_local_give_a_warning(fake_package, caplog):
    args = parse_args(te_argv(f"--bf16 {FP8} {BUDGET} --moe-paged-stash"), 2)
    with caplog.at_level(logging.WARNING):
        layer_factory.select_layer_factory(args, ParallelState.single(), BackendPolicy(cuda=True))
    assert ["--moe-paged-stash" in message and "experts with" in message for message in caplog.messages] == [True]


def test_unsupported_expert_widths_are_reported(fake_package, caplog):
    assert te_layers.grouped_linear_problem(
        te.load(), *parse_sections("--ffn-hidden-size 40"), ParallelState.single(), 16
    ).startswith("its kernels need widths in multiples of 16, and these are 32, 32 and 40 over 1 ranks")
    assert (
        te_layers.grouped_linear_problem(te.load(), *parse_sections("--ffn-hidden-size 40"), ParallelState.single(), 1)
        is None
    )
    del sys.modules[PYTORCH].GroupedLinear
    assert "GroupedLinear" in te_layers.grouped_linear_problem(
        te.load(), *parse_sections(""), ParallelState.single(), 1
    )


def parse_sections(flags):
    args = parse_args(te_argv(flags), 1)
    return args.model, args.moe


def test_row_multiple_is_taken_from_te(fake_package):
    recipe = get_recipe(parse_args(te_argv(f"--bf16 {FP8}"), 1).precision)
    fake_package.align = 48
    assert te.pad_multiple(recipe) == 48
    del sys.modules[f"{PYTORCH}.quantization"].get_align_size_for_quantization
    assert te.pad_multiple(recipe) == recipe.alignment == 16

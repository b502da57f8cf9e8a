"""TransformerEngine's own Python over its extension in torch: tests/gpu/test_te_parity.py on an emulated device.

Where TRANSFORMER_ENGINE_CHECKOUT names a git checkout of the recorded version, the record is held against it.
"""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from emulated_cuda import te_package
from emulated_cuda.run import HERE, run_pytest
from emulated_cuda.test_waits import FEW_LAYERS, FEW_MICROBATCHES, count, expected

from arguments.mechanisms.formats import NAMED_BY_LAYER
from moe_trainer.parallel.state import ParallelState

WITHOUT_SMALL_BLOCKS = "".join(f" and not {each.key}" for each in NAMED_BY_LAYER if each.needs_blackwell)


@pytest.mark.parametrize(
    ("capability", "which"),
    [
        ((9, 0), f"not two_gpus{WITHOUT_SMALL_BLOCKS}"),  # which this device has no units for
        ((10, 0), "products or mxfp8 or plain or pipeline"),  # experts in bf16 are the library's here
    ],
    ids=["9.0", "10.0"],
)
def test_parity_with_the_local_layers(capability, which):
    """Linears, norms, attention, full models with recompute and offload, and GEMMs by every recipe."""
    code, output = te_package.on_device(
        run_pytest, [str(HERE.parent / "gpu/test_te_parity.py"), "-k", which], capability
    )
    assert code == 0 and "skipped" not in output.splitlines()[-1], output[-6000:]


FP8 = (
    "--hidden-size 32 --ffn-hidden-size 32 --bf16 --transformer-impl transformer_engine --on-missing-backend error --fp8-format e4m3 "
    "--fp8-recipe tensorwise --moe-token-dispatcher-type alltoall --num-layers 2 --num-experts 4"
)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYERS, EXPERTS = 2, 4


def count_casts(flags: str, once: bool = True) -> tuple[list[int], int, list[dict]]:
    """Casts of weights in each of two iterations of four microbatches and in an evaluation, the number of weights, and the losses.

    once: False: as if weights could change at any time.
    """
    import te_quantizers
    from training.layouts import make_argv

    from arguments import parse_args
    from moe_trainer.layers.te_layers import _FusedLinear
    from moe_trainer.moe.experts import Experts
    from moe_trainer.quantization import iteration
    from moe_trainer.training import step
    from moe_trainer.verification import training_trace

    weights, casts, quantize, run_microbatches = set(), [], te_quantizers.quantize, step.run_microbatches

    def counted(x, *rest):
        casts[-1] += x.data_ptr() in weights
        return quantize(x, *rest)

    def run(context, *rest, **more):
        for chunk in context.chunks:
            for module in chunk.modules():
                if isinstance(module, _FusedLinear):
                    weights.add(module.weight.data_ptr())
                elif isinstance(module, Experts) and module.grouped:
                    weights.update(
                        one.data_ptr()
                        for stack in (module.linear_fc1.weight, module.linear_fc2.weight)
                        for one in stack
                    )
        casts.append(0)
        return run_microbatches(context, *rest, **more)

    if not once:
        iteration.cached_weight_casts = lambda *_: nullcontext()
    te_quantizers.quantize, step.run_microbatches, training_trace.run_microbatches = counted, run, run
    outcome = training_trace.train(
        parse_args([*make_argv("plain"), *FP8.split(), *flags.split()], 1), 0, ParallelState.single(), 2, device="cuda"
    )
    return casts, len(weights), outcome.losses


def train_with(rank: int, n: int, flags: str) -> tuple[list[float], dict, int]:
    """Losses, gradients of the first iteration, and how often the library computed gradients of experts' weights that it had deferred."""
    from training.layouts import create_groups, make_argv

    from arguments import parse_args
    from moe_trainer.layers.te_experts import FusedGroupedLinear
    from moe_trainer.verification import training_trace

    compute, later = FusedGroupedLinear._compute_deferred, []
    FusedGroupedLinear._compute_deferred = lambda *args: later.append(None) or compute(*args)
    argv = [*make_argv("plain"), *FP8.split(), *flags.split()]
    outcome = training_trace.train(parse_args(argv, n), rank, create_groups(argv, rank, n), 2, device="cuda")
    return (
        [losses["lm loss"] for losses in outcome.losses],
        {name: grad.float() for name, grad in outcome.grads.items()},
        len(later),
    )


@pytest.mark.parametrize(
    ("mapping", "waiting"),
    [
        ("--pipeline-model-parallel-size 2", "--pipeline-schedule zero-bubble"),
        ("--expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"),
    ],
)
def test_fp8_expert_weight_gradients_are_deferred(mapping, waiting):
    """Experts still use TransformerEngine; linears, which do not, give equal results."""
    one, other = (
        te_package.on_device(train_with, f"{mapping} {flags}", ranks=2, devices=2)[0]
        for flags in ("", f"{waiting} --on-missing-backend fallback")
    )
    assert one[2] == 0 < other[2] and other[0] == pytest.approx(one[0], rel=1e-3)
    for name, grad in one[1].items():
        assert (other[1][name] - grad).norm() <= 0.05 * grad.norm(), name


def delayed_scaling(algorithm: str) -> list[tuple[list[float], list[float], list[float]]]:
    """Of every step scales of the library's linear and of ours, for what comes next, and how far its results are from ours."""
    import transformer_engine.pytorch as library
    from transformer_engine.common import recipe as te_recipe

    from moe_trainer.quantization.gemms import QuantizedGemms
    from moe_trainer.quantization.recipe import DelayedScaling, make_recipe

    recipe = te_recipe.DelayedScaling(margin=1, amax_history_len=3, amax_compute_algo=algorithm)
    linear = library.Linear(64, 32, bias=False, params_dtype=torch.bfloat16, device="cuda")
    ours = QuantizedGemms(
        make_recipe("delayed", hybrid=True, delayed=DelayedScaling(1, 3, algorithm == "max")), "linear"
    ).cuda()
    generator, steps = torch.Generator().manual_seed(1), []
    weight = torch.randn(32, 64, generator=generator)
    for size in (1.0, 30.0, 0.2, 0.1, 0.05, 0.1, 7.0):
        x, grad = (
            scale * torch.randn(48, width, generator=generator) for scale, width in ((size, 64), (0.01 / size, 32))
        )
        x, grad = x.to("cuda", torch.bfloat16).requires_grad_(), grad.to("cuda", torch.bfloat16)
        with torch.no_grad():
            linear.weight.copy_(weight / size)
        linear.weight.grad = None
        with library.autocast(enabled=True, recipe=recipe):
            y = linear(x)
        y.backward(grad)
        rows, w = x.detach(), linear.weight.detach()
        expected = ours.output(rows, w), ours.input_grad(grad, w), ours.weight_grad(grad, rows)
        ours.advance(ours.recipe.delayed, ours.amax.clone())
        results = zip((y, x.grad, linear.weight.grad), expected, strict=True)
        apart = [((theirs.float() - mine.float()).norm() / mine.float().norm()).item() for theirs, mine in results]
        forward, backward = (linear.fp8_meta[f"scaling_{way}"].scale.tolist() for way in ("fwd", "bwd"))
        steps.append(([*forward[:2], backward[0]], ours.scaling[:, 0].tolist(), apart))
    return steps


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_delayed_scaling_equals_transformer_engine(algorithm):
    """With one microbatch per iteration, because the linears of the library update scales every microbatch."""
    steps = te_package.on_device(delayed_scaling, algorithm)
    assert len({tuple(theirs) for theirs, *_ in steps}) >= 3  # they move
    for theirs, ours, apart in steps:
        assert theirs == ours and max(apart) <= 5e-3


def test_layers_with_delayed_scaling_train_like_local_ones():
    """Their GEMMs are ours; norms and attention are the library's."""
    (losses, grads, _), (fused_losses, fused_grads, _) = (
        te_package.on_device(
            train_with,
            0,
            1,
            f"--fp8-format hybrid --fp8-recipe delayed --on-missing-backend fallback --transformer-impl {kind}",
        )
        for kind in ("local", "transformer_engine")
    )
    assert fused_losses == pytest.approx(losses, rel=0.01) and fused_losses != losses
    one, other = (torch.cat([each[name].flatten() for name in grads]) for each in (grads, fused_grads))
    assert (other - one).norm() <= 0.4 * one.norm()  # the first iteration, whose scales are 1


def stored_weights(recipe: str) -> list[tuple[bool, bool, bool, bool]]:
    """For every matrix of a stack: equal bytes, scales and transposes of the library's own cast, and shared memory."""
    from moe_trainer.layers import te
    from moe_trainer.quantization.fp8_weight import Fp8Weight
    from moe_trainer.quantization.recipe import make_recipe

    values = torch.randn(2, 256, 192, generator=torch.Generator().manual_seed(1)).cuda().bfloat16()
    stored = Fp8Weight(values.shape, make_recipe(recipe).weight, values.dtype, values.device)
    stored.bind(
        torch.zeros(values.numel(), dtype=torch.uint8, device="cuda"), torch.zeros(stored.num_blocks, device="cuda")
    )
    stored.update_amax(values.flatten(), 0)
    stored.compute_scales()
    stored.cast(values.flatten(), 0)
    found, names = [], ("_data", "_scale_inv", "_transpose")
    if recipe == "blockwise":
        names = "_rowwise_data", "_rowwise_scale_inv", "_columnwise_data"
    for index, tensor in enumerate(te.weight_tensors(stored, values.dtype, True)):
        theirs = tensor._quantizer(values[index])
        equal = [torch.equal(getattr(tensor, name), getattr(theirs, name)) for name in names]
        found.append((*equal, getattr(tensor, names[0]).data_ptr() == stored.codes[index].data_ptr()))
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_weights_stored_in_fp8_are_the_tensors_of_the_library(recipe):
    assert te_package.on_device(stored_weights, recipe) == [(True,) * 4] * 2


def train_stored(flags: str) -> tuple[list[float], dict, int, int]:
    """As train_with; then how often a weight's tensors were made for the library."""
    from moe_trainer.layers import te

    make, made = te.weight_tensors, []
    te.weight_tensors = lambda *args: made.append(None) or make(*args)
    return *train_with(0, 1, flags), len(made)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_layers_of_the_library_compute_with_weights_stored_in_fp8(recipe):
    """As with weights that the library casts. In two steps and an evaluation a layer's two linears and two stacks get tensors."""
    flags = f"--use-distributed-optimizer --fp8-recipe {recipe} --hidden-size 128 --ffn-hidden-size 128"
    losses, grads, _, made = te_package.on_device(train_stored, f"{flags} --fp8-param-gather")
    expected, cast, _, none = te_package.on_device(train_stored, flags)
    assert made == 3 * LAYERS * 4 and none == 0
    assert losses[0] == expected[0] and losses == pytest.approx(expected, rel=0.01)
    apart = {name: float((grads[name] - grad).norm() / grad.norm()) for name, grad in cast.items()}
    assert max(apart.values()) <= 1e-3, apart
    recomputed, _, _, made = te_package.on_device(train_stored, f"{flags} --fp8-param-gather {RECOMPUTE}")
    assert recomputed == losses and made == 3 * LAYERS * 4


def test_custom_recipe_of_the_library_trains_like_its_own():
    """A factory of the library's quantizers, given by its path, is the recipe that it mirrors."""
    factory = "transformer_engine.pytorch.custom_recipes.quantization_recipes_base.current_scaling_quantizer_factory"
    custom = f"--fp8-format hybrid --fp8-recipe custom --fp8-quantizer-factory {factory} --hidden-size 128 --ffn-hidden-size 128"
    own = custom.replace("custom ", "tensorwise ", 1).replace(f"--fp8-quantizer-factory {factory} ", "")
    found, expected = (te_package.on_device(train_with, 0, 1, flags) for flags in (custom, own))
    assert found[0] == expected[0] and all(found[1][name].equal(grad) for name, grad in expected[1].items())


def count_waits() -> dict[str, int]:
    return count(0, 1, FP8)


def test_host_waits_equal_the_local_layers():
    assert te_package.on_device(count_waits) == expected("", 1, FEW_MICROBATCHES, FEW_LAYERS)


def test_weights_are_cast_once_per_iteration():
    casts, weights, losses = te_package.on_device(count_casts, "")
    assert weights == LAYERS * 2 * (1 + EXPERTS) and casts == [weights] * 3
    often, _, same = te_package.on_device(count_casts, "", False)
    assert often == [4 * weights] * 3 and same == losses
    recomputed, _, same = te_package.on_device(count_casts, RECOMPUTE)
    assert recomputed == casts and same == losses


@pytest.mark.parametrize(
    "flags",
    [
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion "
        "--ckpt-format fsdp_dtensor"
    ],
)
def test_casts_of_temporary_weights_are_not_cached(flags):
    casts, weights, _ = te_package.on_device(count_casts, flags)
    assert casts == [4 * weights] * 3


def test_recorded_signatures_equal_the_sources():
    checkout = os.environ.get("TRANSFORMER_ENGINE_CHECKOUT")
    if not checkout:
        pytest.skip("TRANSFORMER_ENGINE_CHECKOUT names no git checkout of TransformerEngine")
    recorder = te_package.LIBRARIES / "record_transformer_engine.py"
    done = subprocess.run([sys.executable, str(recorder), checkout], check=True, capture_output=True, text=True)
    assert done.stdout == Path(te_package.LIBRARIES, "transformer_engine_torch.json").read_text()

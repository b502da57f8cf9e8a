"""Selection of quantized layers, scales between iterations and over ranks, and padding of the routing."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness import run_ranks
from training.layouts import create_groups, make_argv, make_run, shallow
from training.tiny import MOCK, TINY

from arguments import parse_args
from arguments.precision import PrecisionArgs
from moe_trainer.model.build import build_chunks
from moe_trainer.moe.receive.padding import pad_routing
from moe_trainer.parallel.rng import StochasticRoundingRNG
from moe_trainer.parallel.state import ParallelState
from moe_trainer.quantization.config import QuantizationConfig, get_recipe
from moe_trainer.quantization.gemms import QuantizedGemms
from moe_trainer.quantization.iteration import begin_iteration, iter_quantized_gemms, scaling_state, update_scales
from moe_trainer.quantization.recipe import DelayedScaling
from moe_trainer.training.rerun import with_rewindable_batches
from moe_trainer.training.run import TrainState
from moe_trainer.training.step import train_step

ONE_MICROBATCH = "--global-batch-size 2"


def make_config(num_layers=6, **flags) -> QuantizationConfig:
    args = parse_args([*TINY, *MOCK, "--train-iters", "1"], 1)
    precision = replace(args.precision, **flags)
    return QuantizationConfig.from_args(
        precision, replace(args.model, num_layers=num_layers), 1, ParallelState.single()
    )


def test_no_quantization_without_the_flags():
    assert get_recipe(PrecisionArgs()) is None and make_config() is None


@pytest.mark.parametrize(
    ("flags", "name", "wgrad"),
    [
        ({"fp8": "hybrid"}, "delayed", True),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_wgrad": False}, "blockwise", False),
        ({"fp4": "e2m1", "fp8_wgrad": False}, "nvfp4", True),
    ],
)
def test_flags_choose_the_recipe(flags, name, wgrad):
    recipe = get_recipe(PrecisionArgs(**flags))
    assert recipe.name == name and recipe.wgrad == wgrad
    assert (recipe.grad.fmt.name == "e5m2") == (flags.get("fp8") == "hybrid")


def test_delayed_scaling_flags():
    flags = {"fp8": "e4m3", "fp8_margin": 2, "fp8_amax_history_len": 7}
    assert get_recipe(PrecisionArgs(**flags, fp8_amax_compute_algo="max")).delayed == DelayedScaling(
        margin=2, history=7, largest=True
    )
    assert get_recipe(PrecisionArgs(**flags, fp8_amax_compute_algo="most_recent")).delayed == DelayedScaling(
        margin=2, history=7, largest=False
    )


def test_first_and_last_layers_are_not_quantized():
    assert all(make_config(fp8="e4m3").is_quantized_layer(number) for number in range(1, 9))
    ends = make_config(
        fp8="e4m3", first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2
    )
    assert [number for number in range(1, 9) if ends.is_quantized_layer(number)] == [2, 3, 4, 7, 8], (
        "7 and 8: multi-token prediction"
    )


def test_quantized_and_unquantized_modules():
    flags = "--fp8-format e4m3 --first-last-layers-bf16 --num-layers-at-end-in-bf16 0 --mtp-num-layers 1".split()
    args = parse_args([*make_argv("deepseek"), *flags], 1)
    chunk = build_chunks(args, ParallelState.single(), 64, "meta")[0]
    names = [gemms.name for gemms in iter_quantized_gemms([chunk])]
    assert names == [module.name for module in chunk.modules() if isinstance(module, QuantizedGemms)]
    assert build_chunks(parse_args(make_argv("deepseek"), 1), ParallelState.single(), 64, "meta")[0].quantized == ()
    assert not any(name.startswith("decoder.layers.0.") for name in names) and len(names) == len(set(names))
    of_layer_1 = {name.removeprefix("decoder.layers.1.") for name in names if name.startswith("decoder.layers.1.")}
    assert of_layer_1 == {
        "self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj", "self_attention.linear_kv_down_proj",
        "self_attention.linear_kv_up_proj", "self_attention.linear_proj", "mlp.experts.linear_fc1", "mlp.experts.linear_fc2",
        "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"}  # fmt: skip
    assert "mtp.layers.0.eh_proj" in names and "mtp.layers.0.mtp_model_layer.self_attention.linear_proj" in names
    assert not any(part in name for name in names for part in ("embedding", "output_layer", "router", "norm"))
    assert [name for name, _ in scaling_state(chunk)] == [f"fp8.{name}.scaling" for name in names]


def test_routing_is_padded_with_the_first_tokens():
    routing = torch.zeros(10, 3, dtype=torch.bool)
    routing[[1, 4, 5], 0] = True
    routing[:8, 1] = True
    padded = pad_routing(routing, 4)
    assert padded.sum(0).tolist() == [4, 8, 0] and padded[0, 0] and bool((padded | routing).equal(padded))
    assert pad_routing(routing, 16).sum(0).tolist() == [10, 10, 0], "there are no more tokens"


def test_routing_padding_changes_no_result():
    """Padding rows do not affect blocks along features or delayed scales, so losses and gradients are unchanged."""
    found = []
    for extra in ([], ["--moe-router-padding-for-fp8"]):
        argv = [*TINY, *MOCK, *"--fp8-format e4m3 --fp8-recipe mxfp8 --no-fp8-wgrad --moe-token-dispatcher-type alltoall".split(),
                "--transformer-impl", "local", "--train-iters", "2", *extra]  # fmt: skip
        run = make_run(argv, 0, ParallelState.single(), 2)
        layer = run.chunks[0].moe_layers()[0]
        seen = []
        layer.experts.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[2]))
        results = [train_step(run, TrainState(iteration=number), 2) for number in range(2)]
        found.append([(result.losses, result.grad_norm) for result in results])
        assert all(count % 32 == 0 for counts in seen for count in counts) == bool(extra)
    for (losses, norm), (others, other) in zip(*found):
        assert losses == pytest.approx(others, rel=1e-6) and norm == pytest.approx(other, rel=1e-5)


def test_rounding_noise_depends_on_iteration_and_draw():
    noise = StochasticRoundingRNG(1, "layer")

    def draw(role="weight"):
        return torch.rand(4, generator=noise.generator(role, torch.device("cpu")))

    noise.begin(3)
    first, second, other = draw(), draw(), draw("input")
    noise.begin(4)
    later = draw()
    noise.begin(3)
    assert torch.equal(first, draw()) and torch.equal(second, draw()) and torch.equal(other, draw("input"))
    assert len({tuple(each.tolist()) for each in (first, second, other, later)}) == 4
    assert not torch.equal(
        torch.rand(4, generator=StochasticRoundingRNG(1, "layer", "tp 1").generator("weight", torch.device("cpu"))),
        first,
    )


def test_rounding_noise_differs_between_data_ranks():
    """Replicas within tp draw the same noise.

    Other data, other parts of a linear, and every holder of experts other noise.
    """

    def noise(cut, expert, **ranks):
        ps = SimpleNamespace(
            **{name: SimpleNamespace(rank=ranks.get(name, 0)) for name in ("dp_cp", "tp", "ep", "etp", "edp")}
        )
        gemms = replace(make_config(fp4="e2m1"), ps=ps).make_gemms("layer", is_sharded=cut, is_expert=expert)
        return tuple(torch.rand(4, generator=gemms.rounding.generator("weight", torch.device("cpu"))).tolist())

    assert noise(False, False) == noise(False, False, tp=1) != noise(False, False, dp_cp=1)
    assert len({noise(True, False), noise(True, False, tp=1), noise(True, False, dp_cp=1)}) == 3
    assert len({noise(True, True), noise(True, True, ep=1), noise(True, True, etp=1), noise(True, True, edp=1)}) == 4


def test_iterations_draw_different_rounding_noise():
    precision = make_config(fp4="e2m1")
    layer, seen = [precision.make_gemms("layer", is_sharded=True), precision.make_gemms("other", is_sharded=True)], []
    for iteration in (3, 4, 3):
        begin_iteration([SimpleNamespace(quantized=layer)], iteration)
        seen.append(
            [
                torch.rand(4, generator=gemms.rounding.generator("weight", torch.device("cpu"))).tolist()
                for gemms in layer
            ]
        )
    assert seen[0] == seen[2] and len({tuple(draw) for draws in seen[:2] for draw in draws}) == 4


def _train_with_delayed_scaling(rank: int, n: int) -> list[float]:
    argv = [*make_argv("plain"), *"--tensor-model-parallel-size 2 --fp8-format e4m3".split()]
    run = make_run(argv, rank, create_groups(argv, rank, n), 1)
    for number, gemms in enumerate(iter_quantized_gemms(run.chunks)):
        gemms.amax.copy_(torch.tensor([1.0 + rank, 2.0, 4.0 * (number == rank)]))
    update_scales(run.chunks, run.ps)
    first = next(iter_quantized_gemms(run.chunks))
    return first.scaling.flatten().tolist()


def test_delayed_scales_use_maxima_of_all_ranks():
    assert run_ranks(_train_with_delayed_scaling, 4) == [[112.0, 4.0, 224.0, 2.0, 112.0, 4.0]] * 4


def _replicated(rank: int, n: int) -> dict[str, list[float]]:
    flags = f"--tensor-model-parallel-size 2 {ONE_MICROBATCH} --fp4-format e2m1"
    argv = [*shallow(make_argv("deepseek")), *flags.split()]
    run = make_run(argv, rank, create_groups(argv, rank, n), 2)
    for number in range(2):
        train_step(run, TrainState(iteration=number), 1)
    weights = {param.info.names[0]: param for chunk in run.chunks for param in chunk.parameters()}
    return {name: weight.flatten().tolist() for name, weight in weights.items() if "down_proj" in name}


def test_tensor_parallel_replicas_round_equally():
    one, other = run_ranks(_replicated, 2)
    assert len(one) == 6 and one == other  # two of each of two layers and of multi-token prediction


@pytest.mark.parametrize(
    "recipe",
    [
        "--fp8-format hybrid --fp8-recipe tensorwise",
        "--fp8-format e4m3 --fp8-recipe mxfp8",
        "--fp4-format e2m1",
    ],
)
def test_nonfinite_gradients_are_detected_with_quantization(recipe):
    argv = [*shallow(make_argv("plain")), *f"{ONE_MICROBATCH} {recipe}".split()]
    run = with_rewindable_batches(make_run(argv, 0, ParallelState.single(), 1))
    with torch.no_grad():
        next(param for param in run.chunks[0].parameters() if "linear_fc2" in param.info.names[0])[0, 0, 0] = torch.inf
    with pytest.raises(FloatingPointError):
        train_step(run, TrainState(), 1)

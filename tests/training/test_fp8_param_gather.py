"""--fp8-param-gather and the like: weights are quantized from fp32 main parameters, gathered and stored in 8 or 4 bits only."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from harness import run_ranks
from training.layouts import create_groups, make_argv, make_run, shallow
from training.resuming import assert_alike, load_and_save, run_steps, train_and_save

from arguments import parse_args
from arguments.mechanisms.format_kinds.declaration import FormatCapability
from arguments.mechanisms.format_kinds.eight_bit import MXFP8
from arguments.mechanisms.formats import BY_KEY, NAMED_BY_LAYER
from moe_trainer.checkpoint.inspect import differences
from moe_trainer.checkpoint.manager import load
from moe_trainer.checkpoint.options import LoadOptions
from moe_trainer.model.weights import export_named_weights
from moe_trainer.optim.loss_scale import DynamicLossScale
from moe_trainer.optim.quantized_params import SingleCopyParams
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import is_quantized_param
from moe_trainer.quantization.quantize import quantize
from moe_trainer.training.run import TrainState
from moe_trainer.training.step import run_microbatches, train_step

GATHER = "--fp8-param-gather"
GATHERS = {
    "nvfp4": "--fp4-param-gather",
    "mxfp8": f"{GATHER} --reuse-grad-buf-for-mxfp8-param-ag",
}
OPTIMIZERS = {
    "blockwise": "--optimizer muon --muon-fp32-matmul-prec high",
    "mxfp8": "--optimizer muon --muon-fp32-matmul-prec high",
}
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
RECIPES = {
    "delayed": "--fp8-format hybrid --fp8-amax-history-len 2 --fp8-amax-compute-algo max",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 0",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "nvfp4": "--fp4-format e2m1",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
}
LAYOUTS = {
    "one rank": (1, "--use-distributed-optimizer"),
    "dp": (2, f"--use-distributed-optimizer --expert-model-parallel-size 2 {OVERLAP}"),
    "tp": (
        4,
        "--use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
}


def argv_with(*flags: str) -> list[str]:
    """One microbatch on each of two data-parallel ranks."""
    small = "--num-experts 4 --global-batch-size 4 --clip-grad 0"
    return [*shallow(make_argv("plain")), *(word for flag in (small, *flags) for word in flag.split())]


def _run(rank, n, argv, steps=4):
    return make_run(argv, rank, create_groups(argv, rank, n), steps)


def _stored(run):
    """(parameter, its GEMMs) of all stored weights."""
    (chunk,) = run.chunks
    found = [
        pair
        for module in chunk.modules()
        for pair in getattr(module, "quantized_weights", tuple)()
        if is_quantized_param(pair[0])
    ]
    assert len(found) == sum(is_quantized_param(param) for param in chunk.parameters())
    return found


@pytest.mark.parametrize(
    ("flags", "keeps"),
    [
        ("--use-distributed-optimizer", True),
        ("--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim", True),
        ("--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy no_shard", False),
        ("--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params", False),
        ("--use-torch-fsdp2", False),
        ("--use-distributed-optimizer --fp8-recipe mxfp8", False),
        ("--use-distributed-optimizer --fp8-recipe mxfp8 --reuse-grad-buf-for-mxfp8-param-ag", True),
    ],
)
def test_flags_determine_whether_weights_are_stored_in_fp8(flags, keeps):
    """One rank follows the flags as many ranks do, although nothing is sharded, so both compute with the same weights."""
    argv = argv_with("--bf16", RECIPES["blockwise"], GATHER, flags)
    assert parse_args(argv, 1).has_quantized_params == keeps
    assert bool(_stored(_run(0, 1, argv))) == keeps


def _losses(rank, n, cases):
    """With the flag and without, of every (command line, flag)."""
    outcomes = []
    for argv, gather in cases:
        kept, plain = _run(rank, n, [*argv, *gather.split()]), _run(rank, n, argv)
        outcomes.append((run_steps(kept, 0, 2), run_steps(plain, 0, 2), len(_stored(kept)), len(_stored(plain))))
    return outcomes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_param_gather_keeps_fp32_training_losses(layout):
    """Main parameters and model weights are the same fp32 values, so quantizing either gives the same result."""
    n, flags = LAYOUTS[layout]
    recipes = [name for name in RECIPES if name != "tensorwise" or n < 4]  # whose scales "delayed" computes later
    cases = [(argv_with(flags, RECIPES[name], OPTIMIZERS.get(name, "")), GATHERS.get(name, GATHER)) for name in recipes]
    for name, (kept, plain, stored, none) in zip(recipes, run_ranks(_losses, n, cases)[0], strict=True):
        assert stored == (1 if name == "tensorwise" else 2) * 4 and none == 0
        # a weight that lies elsewhere in memory gives sums another order now and then
        assert_alike(kept, plain, 1e-5)


def _compare_with_main_params(run):
    """Largest distance of the fp8 weights, and of quantized bf16 weights, from the quantized fp32 main parameters."""
    optimizer, worst, differs = run.optimizer, 0.0, 0.0
    main = {id(held.param): [] for held in optimizer.tensors()}
    for held in optimizer.tensors():
        main[id(held.param)] += [held] if held.state_name == "fp32_param" else []
    for param, gemms in _stored(run):
        group = next(
            shard.layout.group for shard in optimizer._shards if any(slot.param is param for slot in shard.layout.slots)
        )
        full = torch.zeros(param.numel())
        for held in main.get(id(param), ()):
            full[held.start : held.stop] = held.values()
        collectives.all_reduce(full, group)
        assert param.detach().isnan().all() and param.detach().untyped_storage().nbytes() == 2
        for index, matrix in enumerate(full.view(-1, *param.shape[-2:])):
            expected, rounded = (
                quantize(x, gemms.recipe.weight, gemms.weight_scale()).dequantized()
                for x in (matrix, matrix.bfloat16())
            )
            found = gemms.stored_weight[index].operand(gemms.recipe.weight, False, torch.bfloat16).dequantized()
            worst, differs = (
                max(worst, (found - expected).abs().max().item()),
                max(differs, (rounded - expected).abs().max().item()),
            )
    return worst, differs


def _train_and_compare(rank, n, argvs):
    outcomes = []
    for argv in argvs:
        run = _run(rank, n, argv)
        run_steps(run, 0, 1)
        outcomes.append(_compare_with_main_params(run))
    return outcomes


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "mxfp8"])
def test_weights_are_quantized_from_fp32_main_parameters(recipe):
    """With delayed scaling, the current scales apply: they change before the step."""
    mappings = (
        f"--use-distributed-optimizer {OVERLAP}",
        "--use-distributed-optimizer --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall",
        "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 --main-params-dtype fp16",
        "--use-distributed-optimizer --offload-optimizer-states --optimizer-state-offload-fraction 0.5",
        "--use-distributed-optimizer --optimizer muon --muon-fp32-matmul-prec high --optimizer-cpu-offload",
        *(
            (
                "--use-distributed-optimizer --use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
            )
            if BY_KEY[recipe].supports(FormatCapability.HOST_OPTIMIZER)  # other recipes are rejected, as in Megatron-LM
            else ()
        ),
    )
    flags = (RECIPES[recipe], GATHERS.get(recipe, GATHER), "--bf16")
    for outcomes in run_ranks(_train_and_compare, 2, [argv_with(mapping, *flags) for mapping in mappings]):
        for mapping, (worst, differs) in zip(mappings, outcomes):
            assert worst == 0.0 and differs > 1e-3, mapping


def test_ranges_of_update_segments_that_split_a_parameter():
    """As with offloaded parts of the optimizer state: what is cast of a parameter starts where the segment does."""
    parts = [
        SimpleNamespace(slot="a", offset=0, end=10, start=5),
        SimpleNamespace(slot="b", offset=10, end=16, start=0),
    ]
    segments = [
        SimpleNamespace(start=start, stop=stop, state=SimpleNamespace(main=start))
        for start, stop in ((0, 4), (4, 12), (12, 16))
    ]
    params = object.__new__(SingleCopyParams)
    params._shard = SimpleNamespace(param_shards=parts, update_segments=segments)
    params._offsets = [part.offset for part in parts]
    found = list(params._ranges({"a", "b"}))
    assert found == [("a", 0, 0, 4, 5), ("a", 4, 4, 10, 9), ("b", 4, 10, 12, 0), ("b", 12, 12, 16, 2)]


def _mx_trainings(rank, n, argv):
    """Losses of bf16 training with MXFP8 weights and with bf16 weights; bytes of memory that the former allocate."""
    kept, plain = _run(rank, n, [*argv, *GATHERS["mxfp8"].split()]), _run(rank, n, argv)
    buffers = [
        (shard.gather_buffer.untyped_storage().data_ptr(), shard.buffer.flat.untyped_storage().data_ptr())
        for shard in kept.optimizer._shards
        if shard.has_quantized_params
    ]
    assert buffers and all(gathered == gradients for gathered, gradients in buffers)
    outcomes = run_steps(kept, 0, 2), run_steps(plain, 0, 2)
    # alignment gaps, which norms read, are clean again
    assert all(not shard.gather_buffer.any() for shard in kept.optimizer._shards if shard.has_quantized_params)
    return outcomes


@pytest.mark.parametrize("grads", ["", "--grad-reduce-in-bf16"])
def test_mxfp8_weights_gathered_through_gradients_equal_bf16_weights(grads):
    """MXFP8 is made of what a run with bf16 weights would quantize, so the losses are the same."""
    argv = argv_with(
        f"--use-distributed-optimizer --bf16 --expert-model-parallel-size 2 {OVERLAP} {grads}", RECIPES["mxfp8"]
    )
    for kept, plain in run_ranks(_mx_trainings, 2, argv):
        assert_alike(kept, plain, 1e-5)


def _count_gathered_bytes(rank, n, argvs):
    """Of each run: bytes that this rank sends in its all-gathers by dtype, and in its max-reductions; number of fp8 weights."""
    return [_gathered_bytes(_run(rank, n, argv)) for argv in argvs]


def _gathered_bytes(run):
    gathered, maxima = Counter(), []
    gather, reduce = collectives.all_gather_flat, collectives.all_reduce

    def all_gather_flat(out, x, group, async_op=False):
        gathered[x.dtype] += x.numel() * x.element_size()
        return gather(out, x, group, async_op)

    def all_reduce(x, group, op="sum", async_op=False):
        maxima.extend([x.numel() * x.element_size()] if op == "max" else [])
        return reduce(x, group, op, async_op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_gather_flat", all_gather_flat)
        patch.setattr(collectives, "all_reduce", all_reduce)
        run.optimizer._start_param_gather()
        run.optimizer.wait_params()
    return gathered, sum(maxima), sum(param.numel() for param, _ in _stored(run))


def test_param_gather_sends_bytes():
    plain = argv_with("--use-distributed-optimizer --bf16")
    widths = {each.key: each.flags.bits / 8 for each in NAMED_BY_LAYER if each.tokens_per_scale and each is not MXFP8}
    kept = [[*plain, *RECIPES[recipe].split(), GATHERS.get(recipe, GATHER)] for recipe in widths]
    (plain, none, _), *outcomes = run_ranks(_count_gathered_bytes, 2, [plain, *kept])[0]
    assert none == 0 and plain[torch.uint8] == 0
    for width, (kept, maxima, weights) in zip(widths.values(), outcomes, strict=True):
        assert kept[torch.uint8] == pytest.approx(width * weights / 2, rel=0.02) and weights > 0
        assert kept[torch.bfloat16] == pytest.approx(plain[torch.bfloat16] - 2 * weights / 2, rel=0.05)
        assert 0 < maxima < weights / 10


def _skip_overflowing_step(rank, n, argv):
    """Skip a step that overflows; return the error of the fp8 weights, and how many of them changed."""
    run = _run(rank, n, argv)
    run_steps(run, 0, 1)
    assert isinstance(run.optimizer._scaler, DynamicLossScale)
    before = [gemms.stored_weight[0].values_NK.clone().view(torch.uint8) for _, gemms in _stored(run)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.grads, "finish", lambda: [buffer.flat.fill_(torch.inf) for buffer in run.grads.buffers])
        assert not train_step(run, TrainState(iteration=1), 2).updated
    run.optimizer.wait_params()
    moved = sum(
        not torch.equal(old, gemms.stored_weight[0].values_NK.view(torch.uint8))
        for old, (_, gemms) in zip(before, _stored(run))
    )
    return _compare_with_main_params(run)[0], moved


def test_fp8_weights_are_requantized_when_a_step_is_skipped():
    """A checkpoint keeps main parameters and scales: a resumed run casts with these."""
    argv = argv_with(
        "--fp16 --initial-loss-scale 1024 --use-distributed-optimizer",
        RECIPES["delayed"],
        "--fp8-amax-compute-algo most_recent",
        GATHER,
    )
    for worst, moved in run_ranks(_skip_overflowing_step, 2, argv):
        assert worst == 0.0 and moved > 0


EP = "--use-distributed-optimizer --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
TP = "--use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel --moe-token-dispatcher-type alltoall"


def _train_and_convert(rank, n, argv, gather, folder):
    """Train and save; resume under the same mapping, under another, and without the flag. Returns the next iterations of the first two."""
    ep, tp = ([*argv, *gather.split(), *mapping.split()] for mapping in (EP, TP))
    ahead = train_and_save(rank, n, ep, folder / "ep")
    resumed = load_and_save(rank, n, ep, folder / "ep", folder / "again")
    load_and_save(rank, n, tp, folder / "ep", folder / "tp", 0)
    load_and_save(rank, n, [*argv, *EP.split()], folder / "tp", folder / "plain", 0)
    return ahead, resumed


@pytest.mark.parametrize("recipe", RECIPES)
def test_param_gather_resumes_bitwise(recipe, tmp_path):
    argv, gather = argv_with(RECIPES[recipe], "--bf16"), GATHERS.get(recipe, GATHER)
    for ahead, resumed in run_ranks(_train_and_convert, 2, argv, gather, tmp_path):
        if BY_KEY[recipe].rejects(
            FormatCapability.PROOF
        ):  # the resumed run has another seed, and gradients are rounded stochastically
            assert resumed[0][0] == ahead[0][0]
        else:
            assert resumed == ahead
    for name in ("again", "tp", "plain"):
        assert differences(tmp_path / "ep" / "iter_0000002", tmp_path / name / "iter_0000002") == [], name


def _load_weights_only(rank, n, argvs, folder):
    """Of each run that loads only the weights of a checkpoint of the first: exported weights, and the loss of its first step."""
    train_and_save(rank, n, argvs[0], folder)
    found = []
    for argv in argvs:
        run = _run(rank, n, argv, 1)
        load(folder, run.chunks, run.optimizer, run.ps, LoadOptions(run.args.as_dict(), load_rng=False, finetune=True))
        weights = {name: value.clone() for name, value in export_named_weights(run.chunks, run.ps)}
        found.append((weights, run_steps(run, 0, 1)[0][0]["lm loss"]))
    return found


def test_weights_load_between_runs_with_and_without_fp8_param_gather(tmp_path):
    """Checkpoints and exports hold the same bf16 values, not the fp8 ones."""
    argvs = [argv_with(RECIPES["blockwise"], "--bf16", EP, flag) for flag in (GATHER, "")]
    (weights, loss), (others, other_loss) = run_ranks(_load_weights_only, 2, argvs, tmp_path)[0]
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)
    assert weights["decoder.layers.0.self_attention.linear_proj.weight"].isfinite().all()
    assert loss == pytest.approx(other_loss, rel=1e-6), "bf16 main parameters give the same bytes as bf16 weights"


def _train_and_evaluate(rank, n, argvs):
    """Of each run: sums of an evaluation after a step, and the maxima that its stored weights have recorded."""
    found = []
    for argv in argvs:
        run = _run(rank, n, argv, 3)
        run_steps(run, 0, 1)
        for chunk in run.chunks:
            chunk.train(False)
        with torch.no_grad():
            run.optimizer.wait_params()
            sums = run_microbatches(run, run.train_batches, 1, forward_only=True)
        amax = [gemms.amax.tolist() for _, gemms in _stored(run) if gemms.recipe.delayed is not None]
        found.append(([x for pair in sums for x in pair.tolist()], amax))
    return found


def test_evaluation_reads_fp8_weights_and_records_no_amax():
    argv = argv_with(RECIPES["delayed"], f"--use-distributed-optimizer {OVERLAP}")
    (kept, amax), (plain, _) = run_ranks(_train_and_evaluate, 2, [[*argv, GATHER], argv])[0]
    assert kept == pytest.approx(plain, rel=1e-5)
    assert amax and not any(map(any, amax))

"""Tensor and sequence parallelism through full steps of the program: training equals one process, dropout masks agree or differ."""

import functools

import pytest
import torch
from harness import run_ranks
from training.agreement import Row, check_rows
from training.layouts import create_groups, make_argv, make_run, shallow

from moe_trainer.parallel.state import ParallelState

GPT2 = "--normalization LayerNorm --position-embedding-type learned_absolute"
# name: (kind, more flags). Capacities are per sequence shard by definition: test_layouts_agree.py has them.
# With data ranks too: test_optimizer_layouts.py
MODELS = {
    **{kind: (kind, "") for kind in ("deepseek", "biases, tied head", "per-token loss, MTP, distributed optimizer")},
    "gpt2": ("biases, tied head", f"{GPT2} --expert-tensor-parallel-size 1"),
    "one group": ("plain", "--group-query-attention --num-query-groups 1 --qk-layernorm --qk-layernorm-after-rope"),
    "norm of all heads": (
        "plain",
        "--group-query-attention --num-query-groups 4 --qk-layernorm --qk-layernorm-all-heads --apply-layernorm-1p",
    ),
    "other heads in windows": (
        "plain",
        "--group-query-attention --num-query-groups 2 --window-size 5,0 --window-attn-skip-freq 2 --add-qkv-bias "
        "--window-num-query-groups 4 --window-softmax-type learnable --value-channels 2 --attention-value-scale 0.6",
    ),
    "one group in windows": (
        "plain",
        "--group-query-attention --num-query-groups 2 --window-size 5,0 --window-num-query-groups 1 --value-channels 2",
    ),
    "two groups, biases": ("plain", "--group-query-attention --num-query-groups 2 --add-qkv-bias"),
    "expert bias of softmax, multipliers": (
        "plain",
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1 --embedding-multiplier 3 "
        "--residual-multiplier 0.4 --attention-multiplier 0.3 --logits-scaling 1.5",
    ),
    "biases of attention and logits": (
        "plain",
        "--add-qkv-bias --add-attention-output-bias --add-output-layer-bias",
    ),
    "sparsemixer": ("plain", "--moe-router-sparsemixer-jitter 0.2"),
    "bias of tied logits, MTP": ("per-token loss, MTP, distributed optimizer", "--add-output-layer-bias"),
    "deepseek without a query latent": ("deepseek", "--mtp-use-repeated-layer --mtp-num-layers 2"),
}


def _argv(name: str, *more: str) -> list[str]:
    kind, flags = MODELS[name]
    argv = [*make_argv(kind), *flags.split(), *more]
    if kind == "biases, tied head" and "--expert-tensor-parallel-size" not in argv:
        argv += ["--expert-tensor-parallel-size", "1"]
    if "without a query latent" in name:
        at = argv.index("--q-lora-rank")
        del argv[at : at + 2]
    return argv


def _mapping(tp: int, sp: bool) -> list[str]:
    return ["--tensor-model-parallel-size", str(tp), *(["--sequence-parallel"] if sp else [])]


# of these models sequence parallelism changes what is summed, or where
REPLICATED = (
    "deepseek", "biases, tied head", "gpt2", "one group", "norm of all heads", "other heads in windows",
    "two groups, biases", "biases of attention and logits",
)  # fmt: skip


@pytest.mark.parametrize("sp", [True, False], ids=["sequence parallel", "replicated"])
def test_tensor_parallel_training_equals_one_process(sp):
    mapping = " ".join(_mapping(2, sp))
    few = ("--global-batch-size", "4")
    check_rows({name: Row(2, shallow(_argv(name, *few)), mapping) for name in (MODELS if sp else REPLICATED)})


def _masks(rank, n, argv):
    """Which elements every hidden dropout of the first forward pass kept, and the global generator's state after a step."""
    run = make_run(argv, rank, create_groups(argv, rank, n), 1)
    chunk, masks = run.chunks[0], {}

    def keep(name, module, args, output):
        masks.setdefault(name, output.detach() != 0)

    for name, module in chunk.named_modules():
        if name.endswith("dropout"):
            module.register_forward_hook(functools.partial(keep, name))
    batch = next(run.train_batches)
    chunk(batch.tokens_BS, batch.position_ids_BS, batch.labels_BS).sum().backward()
    return masks, torch.get_rng_state(), [generator.get_state() for generator in chunk.generators().values()]


@pytest.mark.parametrize("sp", [False, True], ids=["replicated", "sequence parallel"])
def test_dropout_masks_agree_on_replicated_and_differ_on_sharded_tensors(sp):
    argv = [*_argv("gpt2", *_mapping(2, sp)), "--hidden-dropout", "0.5", "--attention-dropout", "0.5"]
    (masks, state, streams), (other_masks, other_state, other_streams) = run_ranks(_masks, 2, argv)
    assert len(masks) == 5, "the embedding's and those of four blocks"
    for name, mask in masks.items():
        assert 0.4 < mask.float().mean() < 0.6, name
        assert torch.equal(mask, other_masks[name]) != sp, name
    assert torch.equal(state, other_state)
    assert len(streams) == 1 and not torch.equal(streams[0], other_streams[0])


@pytest.mark.parametrize(
    "flags", [(), ("--context-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")], ids=["dp", "cp", "pp"]
)
def test_ranks_draw_different_dropout_masks_for_shards(flags):
    """With data, context or pipeline ranks in addition: each tensor rank has its own stream."""
    argv = [*_argv("gpt2", *_mapping(2, True), *flags), "--hidden-dropout", "0.5"]
    draws = run_ranks(_draws, 4, argv)
    assert len({tuple(first) for first, _ in draws}) == 4
    for first, second in draws:
        assert first != second, "the stream moves"


def _draws(rank, n, argv):
    """Two hidden dropout masks of the first block of this rank's chunk."""
    chunk = make_run(argv, rank, create_groups(argv, rank, n), 1).chunks[0]
    dropout = next(module for name, module in chunk.decoder.layers[0].named_modules() if name.endswith("dropout"))
    return [dropout(torch.ones(64)).bool().tolist() for _ in range(2)]


def test_all_chunks_of_all_ranks_have_different_dropout_seeds():
    argv = [
        *make_argv("plain"),
        *_mapping(2, True),
        "--mtp-num-layers",
        "1",
        "--pipeline-model-parallel-size",
        "2",
        "--pipeline-model-parallel-layout",
        "E|tt|tt|mL",
    ]
    seeds = [seed for rank in run_ranks(_stream_seeds, 4, argv) for seed in rank]
    assert len(seeds) == len(set(seeds)) == 8


def _stream_seeds(rank, n, argv):
    return [
        chunk.stream.generator(chunk.device).initial_seed()
        for chunk in make_run(argv, rank, create_groups(argv, rank, n), 1).chunks
    ]


def test_single_rank_has_no_separate_dropout_generator():
    run = make_run(_argv("gpt2"), 0, ParallelState.single(), 1)
    assert run.chunks[0].generators() == {}

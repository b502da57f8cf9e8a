"""--mlp-chunks-for-training: the same numbers, and no tensor of the full sequence inside feed-forward layers."""

import pytest
import torch
from harness import run_ranks
from memory.one_pass import BATCH, FULL, GROUPED, LATENT, SELECTIVE, batch, build, compute_loss, differences, parsed
from memory.one_pass import run_two_microbatches as run
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training.agreement import Row, check_rows
from training.layouts import assert_equal, make_argv, shallow, train_ranks

from arguments import ArgumentError
from arguments.training import TrainingArgs
from moe_trainer.estimate.dry_run import plan_of_flags
from moe_trainer.estimate.saved_tensor import num_mlp_chunks

DENSE = "--moe-layer-freq ([0]*1+[1]*2)"
MODELS = {
    "dense and experts": f"{GROUPED} {DENSE}",
    "latent, shared experts, MTP": f"{GROUPED} {LATENT}",
    "latent experts, gated shared expert": f"{GROUPED} --moe-shared-expert-intermediate-size 40 "
    "--moe-shared-expert-gate --moe-latent-size 20",
    "drops": f"{GROUPED} --moe-expert-capacity-factor 0.6",
    "biases, one by one": "",
}
HOWS = {
    "saved": "",
    "recomputed": f"{SELECTIVE} mlp moe",
    "with norms and attention": f"{SELECTIVE} mlp moe layernorm core_attn",
    "uniform": f"{FULL} uniform --recompute-num-layers 2",
    "block": f"{FULL} block --recompute-num-layers 2",
}


@pytest.mark.parametrize("model", MODELS)
def test_chunks_equal_the_full_sequence(model):
    """Each way of recomputation with one number of chunks, which differs from model to model."""
    plain, first = run(MODELS[model]), [*MODELS].index(model)
    for turn, chunks in enumerate((3, 8)):  # 16 positions: three chunks are of 6, 6 and 4
        saved = run(MODELS[model], f"--mlp-chunks-for-training {chunks}")
        for name, value in plain.items():
            torch.testing.assert_close(
                saved[name], value, rtol=2e-6, atol=4e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
        for how, flags in [*HOWS.items()][(first + turn) % 2 :: 2]:
            other = run(MODELS[model], flags, f"--mlp-chunks-for-training {chunks}", interleaved=True)
            assert differences(saved, other) == [], how


def test_dropout_outside_chunks_is_replayed():
    flags = f"{GROUPED} {DENSE} --hidden-dropout 0.2 --mlp-chunks-for-training 4"
    plain = run(flags)
    for how in ("recomputed", "uniform"):
        assert differences(plain, run(flags, HOWS[how])) == [], how


class LiveTokens(TorchDispatchMode):
    """The most tokens in all tensors of certain widths that are alive at the same time."""

    def __init__(self, widths):
        super().__init__()
        self.widths, self.most, self.alive = widths, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for x in tree_leaves(outputs):
            if isinstance(x, torch.Tensor) and x.dim() > 1 and x.shape[-1] in self.widths and not x._is_view():
                storage = x.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), x.numel() // x.shape[-1]
        self.alive = {address: entry for address, entry in self.alive.items() if not entry[0].expired()}
        self.most = max(self.most, sum(tokens for _, tokens in self.alive.values()))
        return outputs


@pytest.mark.parametrize("how", ["recomputed", "uniform"])
def test_intermediate_tensors_are_those_of_a_chunk(how):
    """In backward too, where a recomputed layer runs its chunks as nested regions."""
    widths = {160, 224, 144, 80, 112, 72}  # fc1's and fc2's of the dense layer, the routed and the shared experts

    def most(chunks):
        (chunk,) = build(
            parsed(
                GROUPED, DENSE, "--ffn-hidden-size 80 --moe-ffn-hidden-size 112 --moe-shared-expert-intermediate-size 72",
                HOWS[how], f"--mlp-chunks-for-training {chunks} --seq-length 512 --max-position-embeddings 512",
            )
        )  # fmt: skip
        tokens_BS, positions_BS, labels_BS = batch(0, 512)
        with LiveTokens(widths) as live:
            chunk(tokens_BS, positions_BS, labels_BS).sum().backward()
        return live.most

    assert most(1) >= 2 * 512 * BATCH  # top-2
    assert most(8) < most(1) / 2


def test_routers_see_all_tokens_at_once():
    (chunk,) = build(parsed(GROUPED, "--mlp-chunks-for-training 4", HOWS["recomputed"]))
    for layer in chunk.moe_layers():
        layer.router.recorder = []
    compute_loss(chunk, 0).backward()
    for layer in chunk.moe_layers():
        assert len(layer.router.recorder) == 1


def test_padding_for_quantization_pads_every_chunk():
    (chunk,) = build(
        parsed(
            GROUPED, "--hidden-size 32 --moe-ffn-hidden-size 64 --seq-length 128 --max-position-embeddings 128 --bf16 "
            "--fp8-format e4m3 --fp8-recipe mxfp8 --moe-router-padding-for-quantization --moe-token-dispatcher-type alltoall --mlp-chunks-for-training 4",
            HOWS["recomputed"],
        )
    )  # fmt: skip
    counts = []
    for layer in chunk.moe_layers():
        layer.experts.register_forward_pre_hook(lambda _, inputs: counts.append(list(inputs[2])))
    tokens_BS, positions_BS, labels_BS = batch(0, 128)
    chunk(tokens_BS, positions_BS, labels_BS).sum().backward()
    assert len(counts) == 2 * 4 * 3 and sum(map(sum, counts)) >= 2 * 3 * 2 * 128 * BATCH  # forward and backward
    assert all(count % 32 == 0 for each in counts for count in each)


CHUNKS = "--mlp-chunks-for-training 3"
TP2, SP = "--tensor-model-parallel-size 2", "--sequence-parallel"
EP2 = "--expert-model-parallel-size 2 --moe-token-dispatcher-type"
# (kind of model, what is recomputed, mapping)
RANKS = (
    ("deepseek", "recomputed", f"{TP2} {SP}"),
    ("deepseek", "recomputed", f"{EP2} alltoall"),
    ("deepseek", "uniform", f"{TP2} {SP} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"),
    ("plain", "recomputed", TP2),
    ("plain", "recomputed", f"{EP2} allgather"),
    ("plain", "recomputed", "--pipeline-model-parallel-size 2"),
)


def small(kind: str) -> list[str]:
    return [*shallow(make_argv(kind)), "--global-batch-size", "4"]


def test_chunks_on_ranks_equal_one_process_without_chunks():
    check_rows({
        f"{kind}, {mapping}": Row(2, small(kind), f"{HOWS[how]} {CHUNKS} {mapping}")
        for kind, how, mapping in RANKS
    })  # fmt: skip


def test_chunks_of_context_ranks_equal_context_ranks_without_chunks():
    """Their losses by sequence are those of a rank's part."""
    argv = [*small("deepseek"), "--context-parallel-size", "2"]
    chunked = [*argv, *HOWS["recomputed"].split(), *CHUNKS.split()]
    outcome, expected = run_ranks(train_ranks, 2, [chunked, argv])[0]
    assert_equal(outcome, expected)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity", "the capacity of an expert is that of all tokens"),
        ("--moe-shared-expert-intermediate-size 8 --moe-shared-expert-overlap", "shared experts run in separate chunks"),
        ("--moe-clone-hot-experts 1", "exchange the weights of clones again"),
        ("--pipeline-schedule zero-bubble", "deferred weight gradients hold the tensors of all chunks"),
        ("--cuda-graph-impl local --cuda-graph-modules moe_router", "the pool of a graph holds the tensors of all chunks"),
        ("--mlp-chunks-for-training 0", "must be"),
    ],
)  # fmt: skip
def test_what_needs_the_full_sequence_is_rejected(flags, reason):
    with pytest.raises(ArgumentError) as error:
        parsed(GROUPED, "--mlp-chunks-for-training 4", flags)
    assert reason in str(error.value) and "--mlp-chunks-for-training" in str(error.value)


def test_notes_say_what_chunks_change():
    assert any("saved for backward" in note for note in parsed(GROUPED, "--mlp-chunks-for-training 2").notes)
    notes = parsed(GROUPED, HOWS["recomputed"], "--mlp-chunks-for-training 2").notes
    assert any("tokens are routed together" in note for note in notes)
    assert not any("saved for backward" in note for note in notes)
    fp8 = "--bf16 --fp8-format e4m3 --fp8-recipe tensorwise"
    assert any("are those of a chunk" in note for note in parsed(GROUPED, fp8, "--mlp-chunks-for-training 2").notes)


def test_number_of_chunks_is_that_of_torch():
    for length in range(1, 20):
        for chunks in range(1, 22):
            expected = len(torch.empty(length).chunk(chunks))
            assert num_mlp_chunks(TrainingArgs(mlp_chunks_for_training=chunks), length) == expected


def test_plan_needs_less_temporary_memory_and_more_kernels():
    line = (
        "--preset deepseek_v3 --mock-data --bf16 --seq-length 65536 --max-position-embeddings 65536 --num-layers 4 --moe-layer-freq 1 "
        "--context-parallel-size 2 --expert-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 4 "
        "--world-size 8 --hardware h100 --recompute-granularity selective --recompute-modules moe mlp"
    ).split()
    one, eight = plan_of_flags(line), plan_of_flags([*line, "--mlp-chunks-for-training", "8"])
    assert eight.peak.dispatch == pytest.approx(one.peak.dispatch / 8)
    assert eight.peak.working < one.peak.working and eight.time.step > one.time.step
    full = [*line[: line.index("--recompute-granularity")], *FULL.split(), "uniform", "--recompute-num-layers", "1"]
    one, eight = plan_of_flags(full), plan_of_flags([*full, "--mlp-chunks-for-training", "8"])
    assert eight.peak.working < 0.7 * one.peak.working and eight.time.step > one.time.step

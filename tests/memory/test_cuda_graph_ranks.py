"""Graphed training on two ranks, with an emulated device each, equals eager training bit for bit."""

import pytest
import torch
from emulated_cuda.run import on_device
from memory.graphed import full, line, list_differences, local, same_accumulation_flags, train_ranks
from training.layouts import make_argv

ROUTED = local("attn moe_router moe_preprocess")
EP2 = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
SP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
FORCED = "--moe-router-force-load-balancing --recompute-granularity selective"
PP2 = "--pipeline-model-parallel-size 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
DOCUMENTS = "--reset-attention-mask --reset-position-ids"
DROPLESS = (
    "--bf16 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep "
    "--moe-expert-rank-capacity-factor 4"
)
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor"
PADDED_HYBRIDEP = DROPLESS.removesuffix("--moe-expert-rank-capacity-factor 4")
STASH = "--moe-paged-stash --moe-paged-stash-page-size 4"
NVFP4 = "--hidden-size 64 --ffn-hidden-size 128 --num-experts 4 --fp4-format e2m1"
MXFP8 = "--hidden-size 64 --ffn-hidden-size 128 --num-experts 4 --fp8-format e4m3 --fp8-recipe mxfp8"
# name -> (kind of model, mapping, flags of graphs); two ranks each
CASES = {
    "pipeline": ("accumulation", PP2, ROUTED),
    "pipeline, weight gradients that wait": ("accumulation", f"{PP2} --pipeline-schedule zero-bubble", ROUTED),
    "pipeline, virtual stages": ("accumulation", f"{PP2} --num-virtual-stages-per-pipeline-rank 2", ROUTED),
    "tensor parallel, rows cut": ("plain", SP2, ROUTED),
    "tensor parallel": ("deepseek", "--tensor-model-parallel-size 2", local("attn mlp moe_router moe_preprocess")),
    "tensor parallel, forced routing and recompute": (
        "plain",
        f"{SP2} {FORCED} --recompute-modules layernorm moe_act",
        ROUTED,
    ),
    "tensor parallel, forced routing, full iteration": (
        "padded capacity",
        f"{SP2} {FORCED} --recompute-modules moe --expert-tensor-parallel-size 1",
        full(),
    ),
    "context parallel": ("plain", "--context-parallel-size 2", ROUTED),
    "expert parallel": ("accumulation", EP2, ROUTED),
    "expert parallel, all-gather": (
        "plain",
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type allgather",
        ROUTED,
    ),
    "expert parallel, weights kept in 8 bits": (
        "accumulation",
        f"{EP2} --bf16 --use-distributed-optimizer --fp8-param-gather --fp8-format e4m3 --fp8-recipe tensorwise",
        ROUTED,
    ),
    "expert parallel, two passes in turns": (
        "accumulation",
        f"{EP2} --overlap-moe-expert-parallel-comm --bf16",
        ROUTED,
    ),
    "expert parallel, padded, full layers": ("padded capacity", EP2, local()),
    "expert parallel, padded, full iteration": ("padded capacity", EP2, full()),
    "expert parallel, padded, all-gather": (
        "padded capacity",
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type allgather",
        local("moe"),
    ),
    "data parallel, overlapped": ("distributed optimizer, overlap", "", ROUTED),
    "data parallel, full iteration": ("padded capacity", "--use-distributed-optimizer", full()),
    "data parallel, overlapped, full iteration": ("padded capacity", OVERLAP, full()),
    "pipeline, virtual stages, overlapped, full iteration": (
        "padded capacity",
        f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 16 {OVERLAP} "
        "--overlap-p2p-communication-warmup-flush",
        full(),
    ),
    "pipeline, weight gradients that wait, full iteration": (
        "padded capacity",
        f"{PP2} --pipeline-schedule zero-bubble",
        full(),
    ),
    "context parallel, documents, full iteration": (
        "padded capacity",
        f"--context-parallel-size 2 {DOCUMENTS}",
        full(),
    ),
    "documents": ("plain", DOCUMENTS, local("attn")),
    "dropless experts": ("plain", f"{DROPLESS} --moe-shared-expert-intermediate-size 8", local("attn moe")),
    "dropless experts, paged stash": ("plain", f"{DROPLESS} {STASH}", local("attn moe")),
    "dropless, paged stash, full iteration": ("plain", f"{DROPLESS} {STASH}", full()),
    "dropless fp8 experts, paged stash": (
        "plain",
        # few tokens, each expert's padded to a multiple, which take more pages
        f"{DROPLESS} {MXFP8} {STASH} --moe-paged-stash-buffer-size-factor-cuda 4",
        local("attn moe"),
    ),
    "dropless fp4 experts": ("accumulation", f"{DROPLESS} {NVFP4}", local("attn moe")),
    "dropless, fp4, full iteration": ("plain", f"{DROPLESS} {NVFP4}", full()),
    "padded, HybridEP": ("padded capacity", PADDED_HYBRIDEP, local("moe")),
    "padded, HybridEP, full iteration": ("padded capacity", PADDED_HYBRIDEP, full()),
    "fully sharded, full iteration": ("padded capacity", FSDP, full()),
    "fully sharded, dropless, clones, full iteration": (
        "accumulation",
        f"{DROPLESS} {FSDP} --moe-clone-hot-experts 1",
        full(),
    ),
    "dropless, fp8, full iteration": ("plain", f"{DROPLESS} {MXFP8} {OVERLAP}", full()),
    "dropless, clones": ("plain", f"{DROPLESS} --moe-clone-hot-experts 1", local("attn moe")),
    "dropless, clones, full iteration": ("plain", f"{DROPLESS} --moe-clone-hot-experts 1 {OVERLAP}", full()),
    "dropless, full layers": ("plain", f"{DROPLESS} {DOCUMENTS}", local()),
    "dropless, full iteration": ("deepseek", f"{DROPLESS} {OVERLAP}", full()),
    "dropless, recompute, full iteration": (
        "plain",
        f"{DROPLESS} --moe-router-force-load-balancing --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        full(),
    ),
    "dropless, two passes in turns, full iteration": (
        "plain",
        f"{DROPLESS} --overlap-moe-expert-parallel-comm --global-batch-size 16 --delay-wgrad-compute "
        "--transformer-impl transformer_engine --on-missing-backend fallback",
        full(),
    ),
}
PARTS = [list(CASES)[:8], list(CASES)[8:18], list(CASES)[18:]]
ONCE = {"training/step.py": 1, "optim/clip.py": 1, "moe/balancing.py": 1}
"""Waits of an iteration: the losses, the norm, the statistics of the routers."""


TWO_MICROBATCHES = ("pipeline-", "tensor-", "context-", "stash", "overlap-moe")


def make_argvs(kind: str, flags: str, graphs: list[str]) -> tuple[list[str], list[str]]:
    """Return the flags without and with graphs; one microbatch on each of two data ranks unless the case is about more."""
    plain = [*line(kind, flags), *same_accumulation_flags(graphs)]
    if kind != "accumulation" and not any(word in flags for word in TWO_MICROBATCHES):
        plain += ["--global-batch-size", "4"]
    return plain, [*plain, *graphs]


@pytest.mark.parametrize("names", PARTS, ids=["model", "data", "sizes and communication"])
def test_graphed_training_on_two_ranks_equals_eager(names):
    argvs = [argv for name in names for argv in make_argvs(*CASES[name])]
    outcomes = iter(on_device(train_ranks, argvs, 3, ranks=2, devices=2)[0])
    found = {}
    for name in names:
        (eager, _), (graphed, counts) = next(outcomes), next(outcomes)
        found[name] = list_differences(eager, graphed)
        if counts[0]["captures"] or not counts[1]["captures"] or counts[2]["captures"] or not counts[2]["replays"]:
            found[name].append(f"captures {counts}")
        if CASES[name][2] == full():
            assert counts[1]["captures"] == 1, name
            waits = {file: times for file, times in counts[2].items() if file.endswith(".py")}
            if waits != ONCE:
                found[name].append(f"waits {waits}")
    assert {name: differences for name, differences in found.items() if differences} == {}


PACKED = (
    "--use-varlen-dataset --global-batch-size 16 --max-seqlen-per-dp-cp-rank 32 --pad-packed-seq-alignment max "
    "--thd-max-packed-sequences 6"
)
PACKED_CASES = {
    "pipeline": ("plain", PP2, ROUTED),
    "pipeline, virtual stages, full iteration": (
        "padded capacity",
        f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --mtp-num-layers 1",
        full(),
    ),
}


def test_graphs_of_a_pipeline_serve_packed_sequences_of_other_lengths():
    """Equal up to the order of sums, as without a pipeline (test_cuda_graph.py)."""
    argvs = []
    for kind, flags, graphs in PACKED_CASES.values():
        plain = [*line(kind, f"{PACKED} {flags}"), *same_accumulation_flags(graphs)]
        argvs += [plain, [*plain, *graphs]]
    for results in on_device(train_ranks, argvs, 6, ranks=2, devices=2):
        for name, (eager, _), (graphed, counts) in zip(PACKED_CASES, results[::2], results[1::2], strict=True):
            for found, expected in zip(graphed.losses, eager.losses, strict=True):
                torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6, msg=name)
            for weight, expected in eager.weights.items():
                torch.testing.assert_close(graphed.weights[weight], expected, rtol=2e-6, atol=2e-6, msg=name)
            captures = [step["captures"] for step in counts]
            assert sum(captures) > 0 == captures[0] == captures[-1] and counts[-1]["replays"] > 0, (name, captures)


@pytest.mark.parametrize("graphs", [local("attn moe"), full()], ids=["experts", "full iteration"])
def test_graphs_are_captured_again_when_a_buffer_was_too_small(graphs):
    """A replay overflows in the third step: it is repeated without graphs, and the next one captures larger buffers."""
    # counts on the host and on the device are read by different kernels, which add to the main gradient differently
    plain = [*line("plain", DROPLESS), "--no-gradient-accumulation-fusion"]
    tight = [*plain, *graphs, "--moe-expert-rank-capacity-factor", "1.6"]
    for rank, ((eager, _), (graphed, counts)) in enumerate(
        on_device(train_ranks, [plain, tight], 5, 2, ranks=2, devices=2)
    ):
        assert rank or list_differences(eager, graphed) == []
        captures, replays = ([step[what] for step in counts] for what in ("captures", "replays"))
        assert captures[0] == captures[2] == captures[4] == 0 and captures[1] == captures[3] > 0
        assert replays[2] == replays[4] > 0


def test_graphs_are_captured_again_when_the_stash_has_grown():
    """An iteration without graphs, whose counts are on the host, fills the stash of the first rank: it is not repeated."""
    graphs = local("attn moe")
    # counts on the host and on the device are read by different kernels, which add to the main gradient differently
    plain = [*line("plain", DROPLESS), "--no-gradient-accumulation-fusion"]
    outcomes = on_device(train_ranks, [plain, [*plain, *STASH.split(), *graphs]], 5, 2, 2, ranks=2, devices=2)
    assert list_differences(outcomes[0][0][0], outcomes[0][1][0]) == []
    for _, (_, counts) in outcomes:
        captures = [step["captures"] for step in counts]
        assert captures[1] > 0 and captures == [0, captures[1], 0, captures[1], 0], "on all ranks"


# DeepSeek-V3's layout on GB300 in MXFP8: pipeline with virtual stages, experts over ranks, everything overlapped
RECIPE = (
    f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 16 {OVERLAP} {DROPLESS} --moe-router-force-load-balancing "
    "--overlap-moe-expert-parallel-comm --delay-wgrad-compute --transformer-impl transformer_engine --on-missing-backend fallback "
    "--recompute-granularity selective --recompute-modules mla_up_proj "
    "--hidden-size 64 --ffn-hidden-size 128 --moe-ffn-hidden-size 64 --fp8-format e4m3 --fp8-recipe mxfp8"
)


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_deepseek_recipe_is_captured_once_and_waits_for_nothing_inside(times):
    """Shrunk to four ranks: one graph on each, replayed so many times, equal to eager training to the last bit."""
    plain = [*make_argv("deepseek"), *RECIPE.split()]
    outcomes = on_device(train_ranks, [plain, [*plain, *full()]], times + 2, ranks=4, devices=4)
    for rank, ((eager, _), (graphed, counts)) in enumerate(outcomes):
        assert rank or list_differences(eager, graphed) == []
        assert [step["captures"] for step in counts] == [0, 1, *(0,) * times]
        assert [step["replays"] for step in counts] == [0, 0, *(1,) * times]
        assert counts[-1] == {"replays": 1, **ONCE}

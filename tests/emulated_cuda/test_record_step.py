"""A step with shapes only launches the same operators as a computed one, with the same tensors, line, layer and pass."""

from collections import Counter

import pytest
from emulated_cuda.run import on_device
from emulated_cuda.test_kernels import TRITON
from training.layouts import create_groups, make_argv

WIDE = "--hidden-size 32 --ffn-hidden-size 48 --kv-channels 8 --seq-length 32 --max-position-embeddings 32"
# name: model, flags
CASES = {
    "Mixtral": ("plain", "--bf16 --kv-channels 8"),
    "other sizes": (
        "plain",
        f"--bf16 {WIDE} --num-experts 4 --micro-batch-size 1 --global-batch-size 3 --num-layers 3",
    ),
    "fp32, distributed optimizer": ("distributed optimizer, overlap", ""),
    "DeepSeek-V3, recompute": (
        "deepseek",
        "--bf16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 16 "
        "--recompute-granularity selective --recompute-modules core_attn layernorm mla_up_proj moe",
    ),
    "padded to capacity": ("padded capacity", "--bf16 --kv-channels 8"),
    "full recompute": ("plain", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "Triton": (
        "plain",
        f"--bf16 {TRITON} --kv-channels 8 --num-layers 1 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1",
    ),
    "gated DeltaNet": (
        "plain",
        "--bf16 --kv-channels 8 --experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
        "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8",
    ),
}


RANKS = {
    "ep 2": "--bf16 --kv-channels 8 --expert-model-parallel-size 2",
    "tp 2, etp 2": "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2",
    "pp 2, vpp 2": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
}


def count_recorded(
    argv: list[str], routed: list[list[int]] | None, world_size: int = 1
) -> tuple[Counter, list[list[int]]]:
    """Return the count of each event, and the routing counts that the host read."""
    from emulated_cuda.record_step import record

    return count_events(record(argv, 0, world_size, compute=routed is None, routed=routed))


def count_on_ranks(rank: int, world_size: int, argv: list[str]) -> tuple[Counter, list[list[int]]]:
    """Return the same for a rank with peers."""
    from emulated_cuda.record_step import record

    return count_events(record(argv, rank, world_size, compute=True, ps=create_groups(argv, rank, world_size)))


def count_events(found: dict[str, list]) -> tuple[Counter, list[list[int]]]:
    # what is made in addition to the sums means nothing on any device, and has other sizes on each
    texts = [
        text.partition("|o,Long")[0] if text.startswith("aten::_embedding_bag") else text for text in found["texts"]
    ]
    return Counter(
        (kind, texts[text], texts[line], texts[layer], microbatch, texts[action], texts[part])
        for kind, text, line, layer, microbatch, action, part in found["events"]
    ), found["routed"]


@pytest.mark.parametrize("name", CASES)
def test_shapes_only_step_launches_the_same_kernels(name):
    kind, flags = CASES[name]
    argv = [*make_argv(kind), "--moe-token-dispatcher-type", "alltoall", "--clip-grad", "1e9", *flags.split()]
    computed, routed = on_device(count_recorded, argv, None)
    shaped, _ = on_device(count_recorded, argv, routed)
    assert sum(computed.values()) > (200 if name == "Triton" else 500)
    assert [sorted((shaped - computed).items(), key=str), sorted((computed - shaped).items(), key=str)] == [[], []]


@pytest.mark.parametrize("name", RANKS)
def test_rank_without_peers_launches_the_same_kernels(name):
    argv = [*make_argv("plain"), "--moe-token-dispatcher-type", "alltoall", "--clip-grad", "1e9", *RANKS[name].split()]
    computed, routed = on_device(count_on_ranks, argv, ranks=2, devices=2)[0]
    shaped, _ = on_device(count_recorded, argv, routed, 2)
    assert {line.split("|")[0] for _, line, *_ in shaped} & {"all_to_all", "all_gather", "send to rank 1"}
    assert [sorted((shaped - computed).items(), key=str), sorted((computed - shaped).items(), key=str)] == [[], []]


PACKED = (
    "--bf16 --kv-channels 8 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 12 "
    "--use-varlen-dataset --max-seqlen-per-dp-cp-rank 64 --calculate-per-token-loss"
)


@pytest.fixture
def histogram(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("length,count\n65,1\n33,2\n9,7\n")
    return ["--length-histogram", str(path)]


def test_packed_step_launches_the_same_kernels(histogram):
    argv = [*make_argv("plain"), "--moe-token-dispatcher-type", "alltoall", "--clip-grad", "1e9", *PACKED.split()]
    computed, routed = on_device(count_recorded, [*argv, *histogram], None)
    shaped, _ = on_device(count_recorded, [*argv, *histogram], routed)
    assert any("_flash_attention_backward causal" in text for _, text, *_ in shaped)
    assert [sorted((shaped - computed).items(), key=str), sorted((computed - shaped).items(), key=str)] == [[], []]


@pytest.mark.parametrize("flags", ["--context-parallel-size 2", "--dynamic-context-parallel"])
def test_packed_step_of_context_parallel_ranks_can_be_executed(histogram, flags):
    argv = [*make_argv("plain"), "--moe-token-dispatcher-type", "alltoall", *PACKED.split(), *flags.split()]
    argv[argv.index("--max-seqlen-per-dp-cp-rank") + 1] = "32"
    found = on_device(record_even_routing, [*argv, *histogram])
    sizes = {num_ranks for _, num_ranks, _ in found["packs"]}
    assert sizes == ({2} if "dynamic" not in flags else {1, 2} & sizes) and 2 in sizes
    exchanged = {microbatch for kind, text, _, _, microbatch, *_ in found["events"] if "send" in found["texts"][text]}
    shared = {number for number, (_, num_ranks, _) in enumerate(found["packs"], start=1) if num_ranks == 2}
    assert exchanged == shared


def record_even_routing(argv: list[str]) -> dict[str, list]:
    from emulated_cuda.record_step import record

    return record(argv, 0, 2)


GRAPHS = "--bf16 --kv-channels 8 --cuda-graph-impl local --cuda-graph-modules"
# A linear layer computes its output itself and its gradients through `ops/gemms.py`.
LINEAR = {"forward": {"layers/linear.py": "linear"}, "backward": {"ops/gemms.py": "linear"}}
# flags: by part, files whose operators it launches; and of these, those that nothing else launches in a pass
PARTS = {
    f"{GRAPHS} attn moe_router": (
        {
            "attn": {"linear", "ops/attention.py", "ops/rope.py", "ops/pointwise.py"},
            "moe_router": {"moe/router.py", "moe/balancing.py", "ops/pointwise.py"},
        },
        {"ops/attention.py", "ops/rope.py", "moe/router.py"},
    ),
    f"{GRAPHS} moe --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity": (
        {"moe": {"ops/pointwise.py", "moe/router.py", "ops/permute.py", "ops/grouped_gemm.py"}},
        {"moe/router.py", "ops/permute.py", "ops/grouped_gemm.py"},
    ),
}


@pytest.mark.parametrize("flags", PARTS)
def test_operators_of_captured_parts(flags):
    """Forward and backward; nothing outside the passes belongs to a part."""
    launched, only = PARTS[flags]
    events, _ = on_device(
        count_recorded, [*make_argv("plain"), "--moe-token-dispatcher-type", "alltoall", *flags.split()], None
    )
    found = {}
    for _, _, line, _, _, action, part in events:
        found.setdefault((part, action.partition(" ")[0]), set()).add(line.split(":")[0])
    assert set(found) == {
        ("", ""),
        *((part, direction) for part in ("", *launched) for direction in ("forward", "backward")),
    }
    for direction in ("forward", "backward"):
        found["attn", direction] = {LINEAR[direction].get(file, file) for file in found.get(("attn", direction), ())}
        assert {part: files - found[part, direction] for part, files in launched.items()} == dict.fromkeys(
            launched, set()
        )
        assert not only & found["", direction]

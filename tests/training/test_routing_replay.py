"""--moe-enable-routing-replay: a replayed trace is the same run, and given experts are those of every layout."""

import io
import json
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import read_metrics, run
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file
from training.forked import pretrain
from training.tiny import MOCK, TINY

from arguments import parse_args
from moe_trainer.data.build import build_datasets
from moe_trainer.data.loader import Batch
from moe_trainer.data.tokenizer import build_tokenizer
from moe_trainer.errors import UserError
from moe_trainer.model.build import build_chunks
from moe_trainer.ops.packed_sequences import PackedSequences
from moe_trainer.parallel.state import ParallelState
from moe_trainer.training.routing_replay import RoutingReplay, SampleFolder

JOB = [
    *TINY, *MOCK, *"--num-layers 4 --moe-layer-freq ([0]*1+[1]*3) --num-experts 8 --moe-router-topk 3 --train-iters 2".split(),
    *"--moe-token-dispatcher-type alltoall --make-vocab-size-divisible-by 64 --init-method-std 0.2 --adam-eps 1e-5".split(),
]  # fmt: skip
REPLAY = "--moe-enable-routing-replay --moe-routing-replay-path".split()
TRACES = {
    "mtp, expert bias, groups": "--eval-interval 1 --eval-iters 1 --mtp-num-layers 1 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 4",
    "recompute, per token": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--calculate-per-token-loss --moe-router-pre-softmax",
    "tp sp ep": "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 --expert-model-parallel-size 2",
    "pp vpp": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
}


def results(records):
    return [(record["lm loss"], record["load_balancing_loss"], record["grad_norm"]) for record in records if "lm loss" in record]  # fmt: skip


@pytest.mark.parametrize("flags", TRACES.values(), ids=TRACES)
def test_replay_of_its_own_trace_is_bitwise_equal(tmp_path, flags):
    ranks = 2 if "parallel-size" in flags else 1
    job = [*JOB, *flags.split()]
    traced, weights = pretrain([*job, "--moe-routing-trace-path", "trace"], tmp_path, ranks)
    # a second trace: that the experts were used is seen below
    replayed, same = pretrain([*job, *REPLAY, "trace", "--moe-routing-trace-path", "again"], tmp_path, ranks)
    first, second = (results([record for record in each if "grad_norm" in record][-2:]) for each in (traced, replayed))
    assert len(first) == 2 and second == first
    # validation is routed by the routers
    first, second = ([record["lm loss"] for record in each if "validation" in record] for each in (traced, replayed))
    assert second[-len(first) :] == first and bool(first) == ("--eval" in flags)
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    for path in (tmp_path / "trace").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """The trace of a run, and its records."""
    folder = tmp_path_factory.mktemp("traced")
    records, _ = pretrain([*JOB, "--moe-routing-trace-path", "trace"], folder)
    return (folder / "trace" / "router_trace_rank0.jsonl").read_text(), records


def test_shuffled_trace_changes_the_loss_and_is_followed(traced, tmp_path):
    lines = [json.loads(line) for line in traced[0].splitlines()]
    for line in lines:
        line["top_indices"] = [line["top_indices"][n] for n in torch.randperm(64, generator=torch.Generator().manual_seed(0))]  # fmt: skip
    (tmp_path / "trace").mkdir()
    path = tmp_path / "trace" / "router_trace_rank0.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    replayed, _ = pretrain([*JOB, *REPLAY, "trace", "--moe-routing-trace-path", "again"], tmp_path)
    difference = abs(results(traced[1])[0][0] - results(replayed)[0][0])
    assert 1e-5 < difference < 1
    assert [line["top_indices"] for line in read_metrics(tmp_path / "again" / "router_trace_rank0.jsonl")] == [line["top_indices"] for line in lines]  # fmt: skip


def draw_experts(num_tokens, layers, seed, topk=3):
    random = np.random.default_rng(seed)
    return random.permuted(np.tile(np.arange(8), (num_tokens, layers, 1)), axis=-1)[..., :topk].astype(np.int32)


LAYOUTS = {
    "tp sp ep": (2, TRACES["tp sp ep"]),
    "tp": (2, "--tensor-model-parallel-size 2"),
    "pp vpp, ep overlap": (2, TRACES["pp vpp"]),
    "cp, recompute": (
        2,
        "--context-parallel-size 2 --recompute-granularity selective --recompute-modules moe layernorm",
    ),
    "dp": (2, "--use-distributed-optimizer"),
    "chunks of the sequence": (
        1,
        "--mlp-chunks-for-training 2 --recompute-granularity selective --recompute-modules mlp",
    ),
}


@pytest.fixture(scope="module")
def random_experts(tmp_path_factory):
    """Experts that no router would choose: a misplaced token changes the loss. Some files have one layer more, or one row."""
    folder = tmp_path_factory.mktemp("given")
    save_file({str(n): draw_experts(32, 3, n) for n in (0, 1, 2)}, folder / "first.safetensors")
    np.savez(folder / "second.npz", **{str(n): draw_experts(33, 4, n).astype(np.uint8) for n in (3, 4, 5, 6)})
    open_rows = draw_experts(32, 3, 7)
    open_rows[20:] = -1
    save_file({"7": open_rows}, folder / "third.safetensors")
    records, weights = pretrain([*JOB, *REPLAY, str(folder)], tmp_path_factory.mktemp("alone"))
    return folder, results(records), weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_experts_under_every_layout(random_experts, tmp_path, layout):
    ranks, flags = LAYOUTS[layout]
    records, weights = pretrain([*JOB, *REPLAY, str(random_experts[0]), *flags.split()], tmp_path, ranks)
    for found, expected in zip(results(records), random_experts[1], strict=True):
        assert found == pytest.approx(expected, rel=2e-5)
    for name, weight in random_experts[2].items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=2e-5, msg=name)


PACKED = [*JOB, *"--use-varlen-dataset --calculate-per-token-loss --micro-batch-size 1 --train-iters 1".split()]


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """Experts of samples, and the losses with them and without, in packs of one sequence each: no layout, no packing."""
    args = parse_args([*PACKED, "--max-seqlen-per-dp-cp-rank", "70"], 1)
    train = build_datasets(args.data, args.training, build_tokenizer(args.data), (8, 0, 0)).train
    lengths = [train.length(n) for n in range(8)]
    assert len(set(lengths)) > 2
    folder = tmp_path_factory.mktemp("experts")
    np.savez(folder / "all.npz", **{str(n): draw_experts(length, 3, n) for n, length in enumerate(lengths)})
    single = [*PACKED, "--max-seqlen-per-dp-cp-rank", "32"]
    alone, free = (
        pretrain([*single, *flags], tmp_path_factory.mktemp("single"))[0] for flags in ([*REPLAY, str(folder)], [])
    )
    return folder, alone[0]["lm loss"], free[0]["lm loss"]


@pytest.mark.parametrize(
    "flags", ["", "--context-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"]
)
def test_given_experts_of_packed_sequences(packs, tmp_path, flags):
    """Packs differ with the layout; experts belong to samples. Own experts would give another loss."""
    folder, alone, free = packs
    argv = [*PACKED, "--max-seqlen-per-dp-cp-rank", "70", *REPLAY, str(folder), *flags.split()]
    packed, _ = pretrain(argv, tmp_path, 2 if flags else 1)
    assert packed[0]["lm loss"] == pytest.approx(alone, rel=1e-6)
    assert free != pytest.approx(alone, rel=1e-4)


@pytest.fixture(scope="module", params=["", TRACES["recompute, per token"]], ids=["plain", "recompute"])
def model(request):
    args = parse_args([*JOB, *request.param.split(), "--moe-enable-routing-replay"], 1)
    return args, build_chunks(args, ParallelState.single(), 128, torch.device("cpu"))


def test_experts_of_one_forward_pass_in_memory(model):
    args, (chunk,) = model
    chunk.zero_grad()
    replay, routers = RoutingReplay(args, [chunk]), [layer.router for layer in chunk.moe_layers()]
    tokens = torch.arange(16).view(2, 8)
    for router in routers:
        router.recorder = []
    experts = [draw_experts(8, 4, seed) for seed in (0, 1)]  # with the dense layer, and without
    with replay.given(chunk, [experts[0], experts[1][:, 1:]]):
        loss = chunk(tokens, torch.arange(8).expand(2, -1), tokens).sum()
    loss.backward()
    for layer, router in enumerate(routers):
        (record,), router.recorder = router.recorder, None
        chosen = torch.from_numpy(np.stack(experts, 1)[:, :, 1 + layer].reshape(16, 3)).long()
        assert torch.equal(record["map"], torch.zeros(16, 8, dtype=torch.bool).scatter(1, chosen, True))
        expected = record["logits"].gather(1, chosen).softmax(-1)
        if args.moe.moe_router_pre_softmax:
            expected = record["logits"].softmax(-1).gather(1, chosen)
        torch.testing.assert_close(record["probs"].gather(1, chosen), expected)
        assert router.weight.grad.norm() > 0
        assert router.given_TK is None
    for wrong in (experts[:1], [each[:7] for each in experts], [*experts, experts[0]]):
        with pytest.raises(ValueError, match="tokens are given, and 16 tokens are routed"), replay.given(chunk, wrong):
            chunk(tokens, torch.arange(8).expand(2, -1), tokens)
    packed = PackedSequences((3, 5), (3, 5))
    with pytest.raises(UserError, match="experts of 1 of the 2 packed"), replay.given(chunk, experts[:1], packed):
        pass
    with pytest.raises(ValueError, match="--moe-enable-routing-replay"):
        RoutingReplay(parse_args(JOB, 1), [chunk])


def wrong(**changes):
    array = draw_experts(8, 3, 0)
    for index, value in changes.get("at", []):
        array[index] = value
    return array


BAD = {
    "layers": (draw_experts(8, 2, 0), r"sample 0 has the shape \[8, 2, 3\]; \[8 tokens, 3 or 4 layers, 3 experts\]"),
    "top-k": (draw_experts(8, 3, 0, 2), r"the shape \[8, 3, 2\]"),
    "dimensions": (draw_experts(8, 3, 0)[0], r"the shape \[3, 3\]"),
    "range": (wrong(at=[((5, 1, 2), 8)]), "token 5 has the expert 8; experts are 0 to 7"),
    "negative": (wrong(at=[((5, 1, 2), -1)]), "token 5 has the expert -1"),
    "twice": (wrong(at=[((6, 0), (4, 2, 4))]), r"token 6 has an expert twice: \[4, 2, 4\]"),
    "type": (draw_experts(8, 3, 0).astype(np.float32), "is of float32; experts are integers"),
}


@pytest.mark.parametrize("kind", BAD)
def test_wrong_experts_are_named(model, kind):
    args, (chunk,) = model
    array, message = BAD[kind]
    with pytest.raises(UserError, match=message), RoutingReplay(args, [chunk]).given(chunk, [array]):
        pass


def test_wrong_numbers_of_tokens_are_named(model):
    """A sample may have the experts of one more token, which is only predicted."""
    args, (chunk,) = model
    replay, experts = RoutingReplay(args, [chunk]), draw_experts(8, 3, 0)
    with replay.given(chunk, [experts, draw_experts(9, 3, 0)]):
        pass
    for count in (7, 10):
        with (
            pytest.raises(UserError, match=f"sample 1 has the experts of {count} tokens; the sample has 8"),
            replay.given(chunk, [experts, draw_experts(count, 3, 0)]),
        ):
            pass


def test_padded_samples_have_experts_for_their_own_tokens(model):
    """Routers choose for padding."""
    args, (chunk,) = model
    experts = {4: draw_experts(8, 3, 0), 7: draw_experts(5, 3, 1)}
    replay, tokens = RoutingReplay(args, [chunk], experts), torch.zeros(2, 8, dtype=torch.int64)
    replay.begin_microbatch(chunk, 0, Batch(tokens, tokens, tokens, tokens, lengths=(8, 5), sample_numbers=(4, 7)))
    for layer, router in enumerate(layer.router for layer in chunk.moe_layers()):
        given = router.given_TK.unflatten(0, (8, 2))
        assert torch.equal(given[:, 0], torch.from_numpy(experts[4][:, layer]).long())
        assert torch.equal(given[:5, 1], torch.from_numpy(experts[7][:, layer]).long())
        assert (given[5:, 1] == -1).all()
    replay.clear()


def test_routers_of_prediction_layers_choose():
    args = parse_args([*JOB, "--mtp-num-layers", "1", "--moe-enable-routing-replay"], 1)
    (chunk,) = build_chunks(args, ParallelState.single(), 128, torch.device("cpu"))
    with RoutingReplay(args, [chunk]).given(chunk, [draw_experts(8, 4, 0)]):
        given = {layer.router.name.split(".")[0]: layer.router.given_TK for layer in chunk.moe_layers()}
    assert given["decoder"] is not None and given["mtp"] is None


def test_files_of_samples(tmp_path):
    folder = SampleFolder(tmp_path)
    assert not folder
    np.savez(tmp_path / "late.npz", **{"3": draw_experts(2, 1, 0)})
    assert folder[3].shape == (2, 1, 3), "a file that came later"
    with pytest.raises(KeyError):
        folder[4]
    (tmp_path / "bad.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match="bad.safetensors cannot be read"):
        SampleFolder(tmp_path)
    (tmp_path / "bad.safetensors").unlink()
    contents = io.BytesIO()
    np.savez_compressed(contents, **{"5": draw_experts(300, 1, 0)})
    damaged = bytearray(contents.getvalue())
    damaged[200:600:3] = b"x" * len(damaged[200:600:3])
    np.save(tmp_path / "plain.npy", draw_experts(2, 1, 0))
    for content in (b"", (tmp_path / "plain.npy").read_bytes(), bytes(damaged)):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(UserError, match="bad.npz cannot be read"):
            SampleFolder(tmp_path)[5].read()
    np.savez(tmp_path / "bad.npz", **{"07": draw_experts(2, 1, 0)})
    with pytest.raises(UserError, match="'07'; the name must be the sample's number"):
        SampleFolder(tmp_path)
    (tmp_path / "bad.npz").unlink()
    save_torch_file({"6": torch.zeros(2, 1, 3, dtype=torch.bfloat16)}, tmp_path / "float.safetensors")
    with pytest.raises(UserError, match="float.safetensors cannot be read"):
        SampleFolder(tmp_path)[6].read()
    (tmp_path / "float.safetensors").unlink()
    save_file({"3": draw_experts(2, 1, 0)}, tmp_path / "twice.safetensors")
    with pytest.raises(UserError, match="sample 3 is in"):
        SampleFolder(tmp_path)
    save_file({"three": draw_experts(2, 1, 0)}, tmp_path / "twice.safetensors")
    with pytest.raises(UserError, match="'three'; the name must be the sample's number"):
        SampleFolder(tmp_path)


@pytest.mark.parametrize(
    "shape, dtype, problem",
    [
        ((10**12, 3, 3), "<i8", r"sample 0 has the experts of 1000000000000 tokens; the sample has 8"),
        ((8, 3, 10**12), "<i8", r"the shape \[8, 3, 1000000000000\]"),
        ((8, 3, 3), "<U100000000", "huge.npz cannot be read: its array 0 is of <U100000000"),
    ],
)
def test_arrays_of_a_wrong_shape_are_refused_before_they_are_read(model, tmp_path, shape, dtype, problem):
    args, (chunk,) = model
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype, "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        archive.writestr("0.npy", header.getvalue() + bytes(1000))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    replay = RoutingReplay(args, [chunk], SampleFolder(tmp_path))
    with pytest.raises(UserError, match=problem):
        replay.begin_microbatch(chunk, 0, Batch(tokens, tokens, tokens, tokens, sample_numbers=(0,)))


def truncate(path):
    text = path.read_text()
    path.write_text(text[: len(text) - 20])


def drop_layer(path):
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"layer": 2' not in line))


def shorten(path):
    lines = read_metrics(path)
    lines[0]["top_indices"].pop()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def mark_dropped(path):
    path.write_text(path.read_text().replace('"top_indices": [[0,', '"top_indices": [[-1,').replace("[0, ", "[-1, "))


@pytest.mark.parametrize(
    "damage, flags, message",
    [
        (truncate, "", "is no line of a routing trace"),
        (drop_layer, "", "no experts of iteration 1, decoder layer 2, microbatch 1"),
        (shorten, "", "has 63 tokens, and this rank routes 64"),
        (mark_dropped, "", "tokens were dropped"),
        (None, "--train-iters 3", "no experts of iteration 3, decoder layer 1, microbatch 1"),
        (None, "--moe-router-topk 2", "[tokens, 2] is needed"),
        (None, "--num-experts 4", "experts are 0 to 3 (--num-experts 4)"),
        (None, "--micro-batch-size 4", "has 64 tokens, and this rank routes 128"),
    ],
    ids=["truncated", "layer", "tokens", "dropped", "iteration", "top-k", "experts", "microbatch"],
)
def test_wrong_traces_end_with_code_2(traced, tmp_path, damage, flags, message):
    (tmp_path / "trace").mkdir()
    path = tmp_path / "trace" / "router_trace_rank0.jsonl"
    path.write_text(traced[0])
    if damage is not None:
        damage(path)
    finished = run([*JOB, *REPLAY, "trace", *flags.split()], tmp_path)
    assert finished.returncode == 2 and message in finished.stderr and "Traceback" not in finished.stderr


def test_wrong_folders_end_with_code_2(traced, tmp_path):
    (tmp_path / "trace").mkdir()

    def refused(message, *flags):
        finished = run([*JOB, *(flags or (*REPLAY, "trace"))], tmp_path)
        assert finished.returncode == 2 and message in finished.stderr, finished.stderr
        assert "Traceback" not in finished.stderr

    refused("no such directory", *REPLAY, "missing")
    refused("neither router_trace_rank*.jsonl")
    (tmp_path / "trace" / "router_trace_rank1.jsonl").write_text(traced[0])
    refused("is the trace of 2 ranks, and this run has 1")
    np.savez(tmp_path / "trace" / "a.npz", **{"0": draw_experts(32, 3, 0)})
    refused("a routing trace and arrays of samples")
    (tmp_path / "trace" / "router_trace_rank1.jsonl").unlink()
    refused("has no experts of sample 1")
    refused("needs --moe-enable-routing-replay", "--moe-routing-replay-path", "trace")


def test_routers_of_all_virtual_stages_choose_again():
    routers = [SimpleNamespace(given_TK=1), SimpleNamespace(given_TK=1)]
    chunks = [SimpleNamespace(moe_layers=lambda router=router: [SimpleNamespace(router=router)]) for router in routers]
    args = parse_args([*TINY, *MOCK, "--train-iters", "1", "--moe-enable-routing-replay"], world_size=1)
    RoutingReplay(args, chunks, {}).clear()
    assert [router.given_TK for router in routers] == [None, None]

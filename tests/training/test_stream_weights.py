"""--stream-weights-to: transformers loads what a run streams, under every layout, and answers as our model does."""

import json
import os
import shutil
from unittest.mock import Mock

import pytest
import torch
from commands import run
from safetensors.torch import save_file
from training.forked import pretrain
from training.tiny import MOCK, TINY

import arguments
from moe_trainer.model.build import build_chunks
from moe_trainer.model.weights import load_named_weights
from moe_trainer.parallel.state import ParallelState
from moe_trainer.training.stream_weights import SHARED_MEMORY, SnapshotStream, WeightStream, find_folder
from scripts import follow_weights

transformers = pytest.importorskip("transformers")

JOB = [
    *TINY, *MOCK, *"--train-iters 3 --moe-token-dispatcher-type alltoall --make-vocab-size-divisible-by 64".split(),
    *"--init-method-std 0.2 --rotary-base 10000 --attention-backend unfused --no-masked-softmax-fusion".split(),
]  # fmt: skip
STREAM = "--stream-weights-to weights --stream-weights-interval 2".split()
LAYOUTS = {
    "one process": (1, ""),
    "tp pp": (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
    "ep, overlapped optimizer": (2, "--expert-model-parallel-size 2 --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce"),
    "fsdp": (2, "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion"),
}  # fmt: skip


def compute_logits(argv, weights, tokens):
    args = arguments.parse_args(argv, 1)
    (chunk,) = build_chunks(args, ParallelState.single(), 128, torch.device("cpu"))
    load_named_weights([chunk], weights, ParallelState.single())
    with torch.no_grad():
        return chunk.eval()(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transformers_loads_what_a_run_streams(tmp_path, layout):
    ranks, flags = LAYOUTS[layout]
    _, weights = pretrain([*JOB, *STREAM, *flags.split()], tmp_path, ranks)
    folder = tmp_path / "weights"
    assert sorted(path.name for path in folder.iterdir()) == ["latest.json", "weights_0000002", "weights_0000003"]
    tokens = torch.randint(0, 120, (2, 32), generator=torch.Generator().manual_seed(1))
    expected = compute_logits(JOB, weights, tokens)
    iteration, model = next(follow_weights.follow(folder, 1.0))
    with torch.no_grad():
        found = model(tokens).logits
    assert iteration == 3 and expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_streaming_does_not_change_training(tmp_path):
    records, weights = pretrain([*JOB, *STREAM], tmp_path / "with")
    plain, same = pretrain(JOB, tmp_path / "without")
    losses = [[record["lm loss"] for record in each if "lm loss" in record] for each in (records, plain)]
    assert losses[0] == losses[1] and all(torch.equal(weights[name], same[name]) for name in weights)


def test_snapshots_of_an_earlier_run_are_withdrawn(tmp_path):
    (tmp_path / "latest.json").write_text(json.dumps({"iteration": 3, "folder": "weights_0000003"}))
    args = arguments.parse_args(JOB, 1)
    chunks = build_chunks(args, ParallelState.single(), 128, torch.device("cpu"))
    WeightStream(args, chunks, ParallelState.single(), 128)
    assert (tmp_path / "latest.json").exists()
    SnapshotStream(str(tmp_path), args, chunks, ParallelState.single(), 128)
    assert not (tmp_path / "latest.json").exists()


def test_buckets_go_to_a_function(tmp_path):
    args = arguments.parse_args(JOB, 1)
    chunks = build_chunks(args, ParallelState.single(), 128, torch.device("cpu"))
    optimizer = Mock()  # whose gather of parameters may be in flight
    stream = WeightStream(args, chunks, ParallelState.single(), 128, optimizer, bucket_bytes=20_000)
    buckets = []
    stream.send(lambda bucket: buckets.append([(name, tensor.clone()) for name, tensor in bucket]))
    tensors = dict(each for bucket in buckets for each in bucket)
    optimizer.wait_params.assert_called_once()
    assert len(buckets) > 3 and all(sum(tensor.nbytes for _, tensor in bucket) <= 20_000 for bucket in buckets)
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        expected = chunks[0].eval()(tokens, tokens)
    (tmp_path / "config.json").write_text(json.dumps(stream.config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=1e-5)

    def refuse(bucket):
        raise ValueError("no space in the engine")

    with pytest.raises(ValueError, match="no space in the engine"):
        stream.send(refuse)


def test_wrong_use_ends_with_code_2(tmp_path):
    def refused(message, *flags):
        finished = run([*JOB, *flags], tmp_path)
        assert finished.returncode == 2 and message in finished.stderr and "Traceback" not in finished.stderr

    (tmp_path / "file").write_text("")
    refused("--stream-weights-to: file/weights_0000000 cannot be written", *STREAM, "--stream-weights-to", "file")
    refused("'gpt5' cannot be written", *STREAM, "--stream-weights-model-type", "gpt5")
    refused("no Hugging Face model type", *STREAM, "--moe-input-jitter-eps", "0.1", "--normalization", "LayerNorm")
    assert find_folder("shm:run/weights") == SHARED_MEMORY / "run/weights" and find_folder("a:b").name == "a:b"


@pytest.mark.skipif(not os.access(SHARED_MEMORY, os.W_OK), reason="needs a writable /dev/shm")
def test_client_follows_a_run_in_shared_memory(tmp_path, capsys):
    name = f"moe_trainer_test_{os.getpid()}"
    try:
        pretrain([*JOB, *STREAM, "--stream-weights-to", f"shm:{name}/weights"], tmp_path)
        folder = str(find_folder(f"shm:{name}/weights"))
        assert follow_weights.main([folder, "--tokens", "5", "17", "--until", "3"]) == 0
    finally:
        shutil.rmtree(SHARED_MEMORY / name, ignore_errors=True)
    line = json.loads(capsys.readouterr().out)
    assert line["iteration"] == 3 and len(line["next"]) == 3 and line["next"][0][1] >= line["next"][1][1]
    assert follow_weights.main([str(tmp_path / "none"), "--tokens", "5", "--timeout", "0.1"]) == 2
    assert "no new weights within 0.1 s" in capsys.readouterr().err

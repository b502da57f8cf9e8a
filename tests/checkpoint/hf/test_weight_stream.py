"""Weights of a model in memory under Hugging Face names: the tensors of the folder that it was loaded from, bit for bit."""

import json
import resource

import pytest
import torch
from checkpoint.hf.models import MODELS, VOCAB, flags_for, load_ours, make, published_names
from safetensors.torch import load_file

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.weight_stream import HFWeights, SnapshotFolder, split_into_buckets
from moe_trainer.model.weights import export_named_weights
from moe_trainer.parallel.state import ParallelState

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", MODELS)
def test_streamed_tensors_of_every_family(name, tmp_path):
    make(name).save_pretrained(tmp_path, safe_serialization=True)
    source = {key: value for path in tmp_path.glob("*.safetensors") for key, value in load_file(path).items()}
    source, model = published_names(name, source), load_ours(tmp_path)
    kind = json.loads((tmp_path / "config.json").read_text())["model_type"]
    weights = HFWeights(flags_for(tmp_path).as_dict(), VOCAB, None, torch.float32, kind)
    # the order of arrival does not matter: later layers may be on another rank
    native = list(export_named_weights([model], ParallelState.single()))[::-1]
    found = dict(weights.convert(native))
    assert set(found) == set(source)
    for key in source:
        assert torch.equal(found[key], source[key].to(found[key].dtype)), key
    assert weights.config["model_type"] == kind and weights.config["vocab_size"] == VOCAB
    if name == "mixtral":
        check_errors_and_rows(tmp_path, native, source)


def check_errors_and_rows(folder, native, source):
    flags = flags_for(folder).as_dict()
    with pytest.raises(CheckpointError, match="final_layernorm.weight is missing"):
        list(HFWeights(flags, VOCAB, None, torch.float32).convert([each for each in native if "final" not in each[0]]))
    with pytest.raises(CheckpointError, match=r"extra has the shape \[1\]"):
        list(HFWeights(flags, VOCAB, None, torch.float32).convert([("extra", torch.zeros(1)), *native]))
    wrong = [(name, tensor[1:] if "final" in name else tensor) for name, tensor in native]
    with pytest.raises(CheckpointError, match=r"final_layernorm.weight has the shape \[31\]: \[32\]"):
        list(HFWeights(flags, VOCAB, None, torch.float32).convert(wrong))
    weights = HFWeights(flags, VOCAB, 90, torch.float32)
    found = dict(weights.convert(native))
    assert weights.config["vocab_size"] == 90
    for key in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(found[key], source[key][:90])


def test_buckets_have_a_largest_size():
    tensors = [(str(n), torch.zeros(size, dtype=torch.uint8)) for n, size in enumerate((3, 4, 2, 9, 1, 1))]
    names = [[name for name, _ in bucket] for bucket in split_into_buckets(tensors, 7)]
    assert names == [["0", "1"], ["2"], ["3"], ["4", "5"]]


def test_failed_snapshot_leaves_the_last_one(tmp_path):
    folder = SnapshotFolder(tmp_path / "weights")

    def buckets(value, fails=False):
        yield [("a", torch.full((2,), value))]
        assert not list((tmp_path / "weights").glob(f"weights_{int(value):07d}")), "visible before it is complete"
        if fails:
            raise OSError(28, "No space left on device")
        yield [("b", torch.full((2,), value))]

    def published():
        latest = json.loads((tmp_path / "weights" / "latest.json").read_text())
        return latest["iteration"], sorted(path.name for path in (tmp_path / "weights").iterdir())

    for iteration in (1, 2, 3):
        folder.publish(iteration, {}, buckets(float(iteration)))
    expected = 3, ["latest.json", "weights_0000002", "weights_0000003"]
    assert published() == expected
    with pytest.raises(CheckpointError, match="weights_0000004 cannot be written: No space left on device"):
        folder.publish(4, {}, buckets(4.0, fails=True))
    assert published() == expected
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # an error of the safetensors library, as a full disk is
    try:
        with pytest.raises(CheckpointError, match="weights_0000004 cannot be written"):
            folder.publish(4, {}, [[("a", torch.zeros(1000))]])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert published() == expected
    # a restarted run repeats an iteration: a reader of the old snapshot keeps it, and no other takes it for a new one
    folder = SnapshotFolder(tmp_path / "weights")
    folder.withdraw()
    assert not (tmp_path / "weights" / "latest.json").exists()
    again = folder.publish(3, {}, [[("a", torch.zeros(2))]])
    assert again.name == "weights_0000003.1" and published()[1] == [
        "latest.json",
        "weights_0000003",
        "weights_0000003.1",
    ]

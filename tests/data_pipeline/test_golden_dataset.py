"""Every recorded dataset build: the same cache files, samples and masks; caches are exchangeable with Megatron-LM."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from data_pipeline.corpora import FixedTokenizer, attention_mask, data_args, training_args

from arguments.data import DataArgs
from moe_trainer.data import combined as combined_module
from moe_trainer.data import dataset as dataset_module
from moe_trainer.data.build import batch_format, build_datasets
from moe_trainer.data.loader import build_loader, make_batch
from moe_trainer.data.tokenizer import build_tokenizer

CASES = (
    "g1_one_epoch g2_sep_last g3_nosep_last g4_exact g5_none_size b1_weights b2_noweights b3_exhaustive "
    "b4_three f1_flags"
).split()
RECORDED = Path(__file__).parents[1] / "data" / "dataset"


@pytest.fixture(scope="module")
def golden(shared):
    folder = shared / "golden" / "dataset"
    return folder, json.loads((folder / "summary.json").read_text()), np.load(folder / "samples.npz")


def case_args(case, cache) -> DataArgs:
    flags = dict(case["flags"])
    create = flags.pop("create_attention_mask", True)
    return data_args(
        data_path=case["blend"],
        split=case["split"],
        seq_length=case["seq_length"],
        data_cache_path=str(cache),
        create_attention_mask_in_dataloader=create,
        **flags,
    )


def build_case(case, cache):
    data = case_args(case, cache)
    datasets = build_datasets(data, training_args(seed=case["seed"]), FixedTokenizer(), tuple(case["sizes"]))
    return data, {
        "train": datasets.train,
        "valid": datasets.valid[0] if datasets.valid else None,
        "test": datasets.test,
    }


@pytest.mark.parametrize("name", CASES)
def test_dataset_equals_recorded_case(golden, shared, tmp_path, monkeypatch, name):
    folder, summary, samples = golden
    monkeypatch.chdir(shared)  # the recorded paths are relative, and part of the hash
    case = summary[name]
    data, datasets = build_case(case, tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(case["cache_files"])
    for file in case["cache_files"]:
        assert (tmp_path / file).read_bytes() == (folder / "cache" / name / file).read_bytes(), file
    fmt = batch_format(data, FixedTokenizer())
    for split, facts in case["splits"].items():
        if facts is None:
            assert datasets[split] is None
            continue
        assert len(datasets[split]) == facts["len"]
        count = len(samples[f"{name}/{split}/tokens"])
        batch = make_batch(datasets[split], range(count), fmt)
        for field in ("tokens", "labels", "loss_mask", "position_ids"):
            np.testing.assert_array_equal(
                getattr(batch, f"{field}_BS"), samples[f"{name}/{split}/{field}"], err_msg=field
            )
        mask = f"{name}/{split}/attention_mask_first5"
        if mask in samples.files:
            np.testing.assert_array_equal(np.packbits(attention_mask(batch.document_ids_BS[:5].numpy())), samples[mask])
        else:
            assert batch.document_ids_BS is None


@pytest.mark.parametrize("name", ["b1_weights", "g2_sep_last"])
def test_recorded_caches_are_used(golden, shared, monkeypatch, name):
    folder, summary, samples = golden
    monkeypatch.chdir(shared)

    def must_not_build(*args):
        raise AssertionError("the recorded cache was not found")

    monkeypatch.setattr(dataset_module, "build_indices", must_not_build)
    monkeypatch.setattr(combined_module, "build_blend_index", must_not_build)
    _, datasets = build_case(summary[name], folder / "cache" / name)
    expected = samples[f"{name}/train/tokens"]
    got = np.stack([datasets["train"].tokens(i)[:-1] for i in range(len(expected))])
    np.testing.assert_array_equal(got, expected)


def test_training_run_hits_the_cache_and_reads_the_same_batches(golden, shared, monkeypatch):
    """The tokenizer's flags give the recorded hash; microbatches follow the recorded order."""
    monkeypatch.chdir(shared)
    data = data_args(
        data_path=["golden/dataset/A_text_document"],
        split="100,0,0",
        seq_length=64,
        data_cache_path="golden/dataset/train_cache",
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model="golden/dataset/tokenizer",
        create_attention_mask_in_dataloader=False,
    )
    tokenizer = build_tokenizer(data)
    monkeypatch.setattr(dataset_module, "build_indices", None)
    datasets = build_datasets(data, training_args(), tokenizer, (40, 0, 0))
    assert datasets.valid == () and datasets.test is None
    batches = list(build_loader(datasets.train, 2, 0, 1, fmt=batch_format(data, tokenizer, 512)))[:20]
    recorded = np.load(shared / "golden" / "a_mixtral" / "data.npz")
    for field in ("tokens", "labels", "loss_mask", "position_ids"):
        got = np.stack([getattr(batch, f"{field}_BS") for batch in batches])
        np.testing.assert_array_equal(got, recorded[f"batch/{field}"], err_msg=field)


def test_dataset_equals_small_recorded_case(tmp_path, monkeypatch):
    """The part of the test above whose data is in the repository."""
    case = json.loads((RECORDED / "recorded.json").read_text())
    (tmp_path / "golden" / "dataset").mkdir(parents=True)
    for ending in ("bin", "idx"):
        shutil.copy(RECORDED / f"B_text_document.{ending}", tmp_path / "golden" / "dataset")
    monkeypatch.chdir(tmp_path)
    _, datasets = build_case(case | {"blend": ["golden/dataset/B_text_document"], "flags": {}}, "cache")
    digests = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in (tmp_path / "cache").iterdir()}
    assert digests == case["cache_md5"]
    for split, dataset in datasets.items():
        assert len(dataset) == case["lengths"][split]
        assert [dataset.tokens(i)[:-1].tolist() for i in range(2)] == case["first_tokens"][split]

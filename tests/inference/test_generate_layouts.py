"""Caches of latents, indexer keys, states and windows under parallel mappings: the tokens of one process."""

import os

import pytest
from checkpoint.hf.models import MODELS, VOCAB, make
from harness import run_ranks
from inference.models import never_finished

from moe_trainer.inference.generator import GenerationOptions, Generator
from moe_trainer.inference.sampling import SamplingOptions
from moe_trainer.parallel import state
from moe_trainer.training import initialize
from moe_trainer.training.inference import as_model, load_for_inference

pytest.importorskip("transformers")

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2], [8, 9, 7])
LAYOUTS = {
    "tp2 sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"),
    "pp2 ep2": (
        4,
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --expert-model-parallel-size 2",
    ),
}
# every kind of cache is cut over tensor ranks; over stages the sampled tokens travel, and a stage's layers may be of any kind
OVER_STAGES = (
    "deepseek_v4",
    "bailing_hybrid",  # of layers with a recurrence
)
SAMPLING = SamplingOptions(temperature=1.0, seed=5)


def generate(rank, n, folder, flags):
    # the harness has joined the ranks and parts them
    initialize._init_process_group = state.close_groups = lambda *_: None
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    words = (
        f"--tokenizer-type NullTokenizer --vocab-size {VOCAB - 1} --micro-batch-size 1 --transformer-impl local {flags}"
    )
    loaded = load_for_inference(str(folder), words.split())
    generator = Generator(as_model(loaded.run), 2, VOCAB)
    return generator.generate(PROMPTS, GenerationOptions(10, never_finished, SAMPLING))


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v32",
        "deepseek_v4",
        "qwen3_next",
        "bailing_hybrid",
        "kimi_linear",
        "lfm2_moe",
        "gpt_oss",
        "llama4_text",
        "mistral4",
    ],
)
def test_mapping_changes_no_token(name, tmp_path):
    assert name in MODELS
    make(name).save_pretrained(tmp_path, safe_serialization=True)
    (alone,) = run_ranks(generate, 1, tmp_path, "")
    assert len({token for tokens in alone for token in tokens}) > 10
    for layout in ("tp2 sp", "pp2 ep2") if name in OVER_STAGES else ("tp2 sp",):
        world_size, flags = LAYOUTS[layout]
        found = run_ranks(generate, world_size, tmp_path, flags)
        assert found == [alone] * world_size, flags

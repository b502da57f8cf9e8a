"""Tokens that a cache generates, greedily and drawn, are those that logits of transformers give, family by family."""

import numpy as np
import pytest
import torch
from checkpoint.hf.models import MODELS, VOCAB, compute_logits, load_ours, make
from inference.models import make_generator, never_finished

from moe_trainer.inference.generator import GenerationOptions
from moe_trainer.inference.sampling import SamplingOptions, choose_tokens

pytest.importorskip("transformers")

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2], [8, 9, 7])
NEW, SEED = 12, 5


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers_logits(name, tmp_path, record_property):
    theirs = make(name)
    theirs.save_pretrained(tmp_path, safe_serialization=True)
    generator = make_generator(load_ours(tmp_path), VOCAB, batch_size=2)
    ways = (SamplingOptions(), SamplingOptions(temperature=1.0, seed=SEED))
    found = [
        tokens for way in ways for tokens in generator.generate(PROMPTS, GenerationOptions(NEW, never_finished, way))
    ]
    rows = [torch.tensor([*prompt, *tokens]) for prompt, tokens in zip(PROMPTS * 2, found, strict=True)]
    logits = compute_logits(
        theirs, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    )  # none sees what follows it
    for number, (prompt, tokens) in enumerate(zip(PROMPTS * 2, found, strict=True)):
        way, draws = ways[number // len(PROMPTS)], None
        if way.temperature:
            draws = torch.tensor(np.random.default_rng((SEED, number % len(PROMPTS))).random(NEW), dtype=torch.float32)
            assert len(set(tokens)) > NEW // 2
        assert tokens == choose_tokens(logits[number, len(prompt) - 1 :][:NEW], way, draws).tolist()
    record_property("tokens", 2 * NEW * len(PROMPTS))

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
NEW, SEED = 20, 5


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers_logits(name, tmp_path, record_property):
    theirs = make(name)
    theirs.save_pretrained(tmp_path, safe_serialization=True)
    generator = make_generator(load_ours(tmp_path), VOCAB, batch_size=2)
    for sampling in (SamplingOptions(), SamplingOptions(temperature=1.0, seed=SEED)):
        found = generator.generate(PROMPTS, GenerationOptions(NEW, never_finished, sampling))
        for number, (prompt, tokens) in enumerate(zip(PROMPTS, found, strict=True)):
            logits = compute_logits(theirs, torch.tensor([[*prompt, *tokens[:-1]]]))[0, len(prompt) - 1 :]
            draws = None
            if sampling.temperature:
                draws = torch.tensor(np.random.default_rng((SEED, number)).random(NEW), dtype=torch.float32)
                assert len(set(tokens)) > NEW // 2
            assert tokens == choose_tokens(logits, sampling, draws).tolist()
    record_property("tokens", 2 * NEW * len(PROMPTS))

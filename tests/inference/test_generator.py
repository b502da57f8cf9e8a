"""Batches, limits and draws of generation, against logits that are computed without a cache."""

from types import SimpleNamespace

import pytest
import torch
from inference.models import make_generator, never_finished

import arguments
from moe_trainer.errors import UserError
from moe_trainer.inference import generator as module
from moe_trainer.inference.completion import encode_prompts
from moe_trainer.inference.generator import GenerationOptions
from moe_trainer.inference.sampling import SamplingOptions
from moe_trainer.model.build import build_chunks
from moe_trainer.parallel.state import ParallelState

VOCAB, NUM_TOKENS = 96, 90
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --num-experts 4 --moe-router-topk 2 "
    "--moe-grouped-gemm --swiglu --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --lr 1e-3 --train-iters 1 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 90 --init-method-std 0.3"
)
PROMPTS = ((3, 1, 4, 1, 5), (9, 2), (6, 5, 3, 5, 8, 9, 7, 9, 3), (2, 7), (1,))
VARIANTS = {
    "rope": "--position-embedding-type rope",
    "learned positions": "--position-embedding-type learned_absolute",
    "window": "--position-embedding-type rope --window-size 4,0",
    "window and sinks": "--position-embedding-type rope --window-size 4,0 --window-attn-skip-freq 2 --softmax-type learnable "
    "--rotary-base-per-layer 10 50 --window-rotary-percent 0.5 --window-num-query-groups 4 --value-channels 6",
    "off by one": "--position-embedding-type rope --softmax-type off-by-one",
    "gate": "--position-embedding-type rope --attention-output-gate --qk-layernorm",
    "capacity": "--position-embedding-type rope --moe-expert-capacity-factor 4.0",
    "adapters": "--position-embedding-type rope --lora-dim 4",
    "latent, adapters": "--position-embedding-type rope --lora-dim 4 --head-wise-attn-gate --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8",
}


def build(flags="--position-embedding-type rope"):
    torch.manual_seed(3)
    shared = FLAGS.replace("--group-query-attention --num-query-groups 2", "") if "latent" in flags else FLAGS
    args = arguments.parse_args([*shared.split(), *flags.split()], world_size=1)
    (chunk,) = build_chunks(args, ParallelState.single(), VOCAB)
    return chunk


def generator(chunk, batch_size=4, **changes):
    found = make_generator(chunk, VOCAB, batch_size, max_length=32, **changes)
    found.num_tokens = NUM_TOKENS
    return found


def continued_without_cache(chunk, prompt, count):
    chunk.eval()
    text = [*prompt]
    with torch.no_grad():
        for _ in range(count):
            logits = chunk(torch.tensor([text]), torch.arange(len(text)).unsqueeze(0))[0, -1]
            text.append(int(logits[:NUM_TOKENS].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("name", VARIANTS)
def test_cache_changes_no_token(name):
    chunk = build(VARIANTS[name])
    for path, param in chunk.named_parameters():
        if path.endswith("lora_B.weight"):  # zeros have no effect
            param.data = 0.3 * torch.randn(param.shape)
    found = generator(chunk).generate(PROMPTS, GenerationOptions(12, never_finished))
    assert found == [continued_without_cache(chunk, prompt, 12) for prompt in PROMPTS]
    assert len({token for tokens in found for token in tokens}) > 3


@pytest.mark.parametrize("changes", [{"batch_size": 1}, {"batch_size": 3}, {"batch_size": 5, "length_multiple": 4}])
def test_batches_change_no_text(changes):
    chunk = build()
    for sampling in (SamplingOptions(), SamplingOptions(1.0, top_k=20, seed=7)):
        options = GenerationOptions(6, never_finished, sampling)
        assert generator(chunk, **changes).generate(PROMPTS, options) == generator(chunk, 8).generate(PROMPTS, options)


def test_seed_and_number_of_a_text_decide_its_draws():
    chunk = build()

    def drawn(prompts, seed):
        return generator(chunk).generate(prompts, GenerationOptions(8, never_finished, SamplingOptions(2.0, seed=seed)))

    assert drawn(PROMPTS[:1], 1) == drawn(PROMPTS[:1], 1) != drawn(PROMPTS[:1], 2)
    first, second = drawn(PROMPTS[:1] * 2, 1)
    assert first != second and first == drawn(PROMPTS[:1], 1)[0]


def test_texts_end_where_they_are_finished_or_at_the_limit():
    chunk = build()
    whole = generator(chunk).generate(PROMPTS, GenerationOptions(9, never_finished))
    assert [len(tokens) for tokens in whole] == [9] * len(PROMPTS)
    some = generator(chunk).generate(PROMPTS, GenerationOptions(9, lambda tokens: tokens[-1] % 3 == 0))
    ends = [next((at for at, token in enumerate(tokens, 1) if token % 3 == 0), 9) for tokens in whole]
    assert some == [tokens[:end] for tokens, end in zip(whole, ends, strict=True)] and len(set(ends)) > 1
    assert generator(chunk).generate(PROMPTS, GenerationOptions(0, never_finished)) == [[]] * len(PROMPTS)
    assert generator(chunk).generate([], GenerationOptions(3, never_finished)) == []


def test_passes_read_prompts_once_and_then_single_tokens(monkeypatch):
    chunk, shapes = build(), []
    hook = chunk.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    generator(chunk, 2, length_multiple=4).generate(PROMPTS[:3], GenerationOptions(3, never_finished))
    assert shapes == [(4, 12), (1, 4), (1, 4), (4, 4), (1, 4), (1, 4)]
    monkeypatch.setattr(module, "MAX_PREFILL_TOKENS", 10)
    shapes.clear()
    generator(chunk).generate(PROMPTS, GenerationOptions(1, never_finished))
    assert shapes == [(1, 9), (2, 5), (2, 2)]
    hook.remove()


def test_padding_of_the_vocabulary_is_never_chosen():
    chunk = build()
    with torch.no_grad():
        chunk.output_layer.weight[NUM_TOKENS:] *= 50
    for sampling in (SamplingOptions(), SamplingOptions(5.0)):
        found = generator(chunk).generate(PROMPTS, GenerationOptions(8, never_finished, sampling))
        assert max(token for tokens in found for token in tokens) < NUM_TOKENS


def test_mode_of_the_model_is_restored():
    chunk = build().train()
    generator(chunk).generate(PROMPTS[:1], GenerationOptions(1, never_finished))
    assert chunk.training and torch.is_grad_enabled()


def test_padding_is_no_token_and_has_positions_in_the_cache():
    chunk, lengths = build(), []
    hook = chunk.register_forward_pre_hook(
        lambda module, inputs, options: lengths.append(options["borders"].row_lengths), with_kwargs=True
    )
    generator(chunk, 2, length_multiple=4).generate(PROMPTS[:3], GenerationOptions(3, never_finished))
    assert lengths == [(9, 5, 0, 0), (2,), (2,), (2, 0, 0, 0), (1,), (1,)]
    lengths.clear()
    found = generator(chunk, 2, length_multiple=4).generate(PROMPTS[:3], GenerationOptions(1, never_finished))
    hook.remove()
    assert found == [continued_without_cache(chunk, prompt, 1) for prompt in PROMPTS[:3]]
    (tokens,) = generator(chunk).generate(PROMPTS[:1], GenerationOptions(2, never_finished))
    assert len(tokens) == 2  # exactly the limit


def test_a_prompt_may_fill_all_positions_with_its_new_tokens():
    codec = SimpleNamespace(encode=lambda text: [1] * len(text), prefix=0)
    assert encode_prompts(codec, ["abc", ""], 2, 5) == [[1, 1, 1], [0]]
    with pytest.raises(UserError, match="prompt 2 has 4 tokens"):
        encode_prompts(codec, ["abc", "abcd"], 2, 5)

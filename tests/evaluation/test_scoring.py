"""Scores of texts against logits that are computed one text at a time, and how texts become batches."""

import pytest
import torch

import arguments
from moe_trainer.evaluation import scoring
from moe_trainer.evaluation.routing import RoutingCounter
from moe_trainer.evaluation.scoring import Scorer
from moe_trainer.inference.model import Model
from moe_trainer.model.build import build_chunks
from moe_trainer.parallel.state import ParallelState
from moe_trainer.pipeline.orders import ScheduleKind
from moe_trainer.pipeline.schedule import Schedule

VOCAB = 96
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --lr 1e-3 --train-iters 1 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 90 --init-method-std 0.3"
).split()
TEXTS = ((3, 1, 4, 1, 5), (9, 2), (6, 5, 3, 5, 8, 9, 7, 9, 3), (2, 7), (1, 8, 2), (3, 1, 4, 1, 7))
SCORED = (3, 1, 8, 1, 1, 1)


@pytest.fixture(scope="module")
def chunk():
    (chunk,) = build_chunks(arguments.parse_args(FLAGS, world_size=1), ParallelState.single(), VOCAB)
    return chunk


def scorer(chunk, batch_size=4, **changes):
    ps = ParallelState.single()
    model = Model(
        [chunk], Schedule(ScheduleKind(), ps.pp, torch.device("cpu")), ps, torch.device("cpu"), 16, VOCAB, **changes
    )
    return Scorer(model, batch_size)


def logits(chunk, text):
    chunk.eval()
    with torch.no_grad():
        return chunk(torch.tensor([text]), torch.arange(len(text)).unsqueeze(0))[0]


@pytest.mark.parametrize(("batch_size", "multiple"), [(1, 1), (4, 1), (64, 1), (4, 4)])
def test_scores_are_those_of_each_text_alone(chunk, batch_size, multiple):
    found = scorer(chunk, batch_size, length_multiple=multiple).log_probabilities(TEXTS, SCORED)
    for (log_prob, _), text, count in zip(found, TEXTS, SCORED, strict=True):
        log_probs = logits(chunk, text[:-1])[-count:].log_softmax(-1)
        wanted = sum(float(log_probs[at, token]) for at, token in enumerate(text[-count:]))
        assert log_prob == pytest.approx(wanted, abs=1e-4)


def test_padding_takes_no_capacity_of_experts(chunk):
    """The capacity suffices for each text, but not for its padding too."""
    args = arguments.parse_args([*FLAGS, "--moe-expert-capacity-factor", "1"], world_size=1)
    (limited,) = build_chunks(args, ParallelState.single(), VOCAB)
    found, expected = (
        scorer(each, 1, length_multiple=16).log_probabilities(TEXTS, SCORED) for each in (limited, chunk)
    )
    assert [log_prob for log_prob, _ in found] == pytest.approx([log_prob for log_prob, _ in expected], abs=1e-4)


def test_padding_is_not_counted_as_routed(chunk):
    counts = []
    for multiple in (1, 16):
        counter = RoutingCounter([chunk], ParallelState.single())
        with counter.counting("task"):
            scorer(chunk, 1, length_multiple=multiple).log_probabilities(TEXTS, SCORED)
        counts.append(counter.gather()["task"]["tokens_per_expert"])
    assert counts[0] == counts[1] and all(sum(layer) > 0 for layer in counts[0])


def test_greedy_texts_are_recognized(chunk):
    text = [3, 1, 4]
    for _ in range(5):
        text.append(int(logits(chunk, text)[-1].argmax()))
    other = [*text[:-1], (text[-1] + 1) % VOCAB]
    found = scorer(chunk).log_probabilities([text, other], [5, 5])
    assert [is_greedy for _, is_greedy in found] == [True, False]


def test_choices_of_one_token_share_a_pass(chunk):
    lengths = []
    hook = chunk.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape))
    scorer(chunk).log_probabilities([(1, 2, token) for token in range(3, 9)], [1] * 6)
    hook.remove()
    assert lengths == [(1, 2)]


def test_batches_hold_similar_lengths_and_limited_logits(chunk, monkeypatch):
    shapes = []
    hook = chunk.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    found = scorer(chunk, 2, length_multiple=4).log_probabilities(TEXTS, SCORED)
    assert shapes == [(2, 8), (2, 4), (1, 4)]
    monkeypatch.setattr(scoring, "_MAX_LOGITS", 8 * VOCAB)
    monkeypatch.setattr(scoring, "_MAX_MICROBATCHES", 2)
    shapes.clear()
    again = scorer(chunk, 2, length_multiple=4).log_probabilities(TEXTS, SCORED)
    assert [log_prob for log_prob, _ in again] == pytest.approx([log_prob for log_prob, _ in found], abs=1e-4)
    hook.remove()
    assert shapes == [(1, 8), (2, 4), (2, 4)]


def test_mode_of_the_model_is_restored(chunk):
    chunk.train()
    scorer(chunk).log_probabilities(TEXTS, SCORED)
    assert chunk.training
    assert scorer(chunk).log_probabilities([], []) == []

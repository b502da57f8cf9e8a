"""How the next token is drawn: the most probable ones, their limits, and frequencies."""

import pytest
import torch

from moe_trainer.inference.sampling import SMALLEST_TEMPERATURE, SamplingOptions, choose_tokens

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
PROBS = LOGITS.softmax(-1)[0]


def draws(count=20000):
    return torch.rand(count, generator=torch.Generator().manual_seed(1))


def frequencies(options):
    tokens = choose_tokens(LOGITS.expand(20000, -1), options, draws())
    return torch.bincount(tokens, minlength=4) / 20000


def test_without_a_temperature_the_most_probable_token_is_taken():
    assert choose_tokens(LOGITS, SamplingOptions(), None).tolist() == [1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_have_their_probabilities(temperature):
    wanted = (LOGITS[0] / temperature).softmax(-1)
    assert (frequencies(SamplingOptions(temperature)) - wanted).abs().max() < 0.015


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.6}, [1]),  # of 0.64
        ({"top_p": 0.7}, [1, 3]),
        ({"top_p": 0.95}, [1, 2, 3]),
        ({"top_k": 2, "top_p": 0.7}, [1]),  # of 0.73 among the two
    ],
)
def test_limits_keep_the_most_probable_tokens(options, kept):
    wanted = torch.zeros(4)
    wanted[kept] = PROBS[kept] / PROBS[kept].sum()
    found = frequencies(SamplingOptions(1.0, **options))
    assert found[wanted == 0].sum() == 0 and (found - wanted).abs().max() < 0.015


def test_largest_and_smallest_draws_give_tokens_that_are_kept():
    edges = torch.tensor([0.0, 1.0 - 2**-24])
    assert choose_tokens(LOGITS.expand(2, -1), SamplingOptions(1.0, top_k=3), edges).tolist() == [1, 2]


def test_smallest_temperature_takes_the_most_probable_token():
    logits = LOGITS * 1e4
    found = choose_tokens(logits.expand(9, -1), SamplingOptions(SMALLEST_TEMPERATURE), draws(9))
    assert found.tolist() == [1] * 9


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": float("inf")}, "temperature inf"),
        ({"temperature": 1e-40}, "temperature 1e-40"),
        ({"temperature": 1.0, "top_k": -1}, "top-k -1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top-p 0.0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top-p 1.5"),
        ({"temperature": 1.0, "seed": -1}, "seed -1"),
        ({"top_k": 5}, "need a temperature"),
    ],
)
def test_numbers_out_of_range_are_named(values, named):
    with pytest.raises(ValueError, match=named):
        SamplingOptions(**values)

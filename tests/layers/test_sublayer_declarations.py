"""Declarations of sublayers: equal to flags, letters and classes; what a layer is built of."""

import pytest

from arguments.container import OPTIONS
from arguments.layer_flags import layer_letters
from arguments.layer_pattern import letter_flags, mixing_sublayer
from arguments.mechanisms.sublayers import (
    BY_LETTER,
    LATENT_ATTENTION,
    MAMBA,
    OLD_VARIANTS,
    SOFTMAX_ATTENTION,
    SUBLAYERS,
    UNBUILT_VARIANTS,
    VARIANT,
    VARIANTS,
    find_variant,
    relative_of,
    variant_of,
)
from arguments.model import ModelArgs
from arguments.parse import resolve_command_line
from moe_trainer.model.block import load_class

OLD = [old for _, old in OLD_VARIANTS]
NAMED = [each for each in SUBLAYERS if each.variant is not None]
MIXING = [each for each in SUBLAYERS if each.built_by]


def test_flags_letters_and_keys_are_those_of_the_declarations():
    assert OPTIONS[VARIANT].choices == VARIANTS and len(set(VARIANTS)) == len(VARIANTS)
    assert [find_variant(each.variant) for each in NAMED] == NAMED
    assert len(BY_LETTER) == sum(bool(each.letter) for each in SUBLAYERS)
    assert len({each.key for each in SUBLAYERS}) == len(SUBLAYERS)
    own = [dest for each in SUBLAYERS for dest in (each.gate_rank, *dict((*each.toy_sizes, *each.draws))) if dest]
    assert set(own) <= set(OPTIONS)


@pytest.mark.parametrize("value", [None, *UNBUILT_VARIANTS, *OLD, 3, []])
def test_softmax_attention_stands_for_a_value_without_a_sublayer(value):
    assert variant_of({VARIANT: value}) is SOFTMAX_ATTENTION


def test_relative_of_a_variant_that_is_not_built_has_its_rules():
    for each in NAMED:
        assert [relative_of(ModelArgs(**{VARIANT: value})) for value in each.unbuilt_variants] == [each] * len(
            each.unbuilt_variants
        )
        assert relative_of(ModelArgs(**{VARIANT: each.variant})) is each


@pytest.mark.parametrize("sublayer", MIXING, ids=lambda each: each.key)
def test_declared_class_is_in_its_module(sublayer):
    assert load_class(sublayer).__module__ == f"moe_trainer.layers.{sublayer.built_by.partition('.')[0]}"


@pytest.mark.parametrize("sublayer", NAMED, ids=lambda each: each.key)
def test_variant_selects_the_sublayer_of_its_layers(sublayer):
    """Of all layers, or of those that --linear-attention-freq says."""
    for latent, plain in ((False, SOFTMAX_ATTENTION), (True, LATENT_ATTENTION)):
        flags = {VARIANT: sublayer.variant, "multi_latent_attention": latent, "linear_attention_freq": [1, 0, 1]}
        model = ModelArgs(num_layers=3, **flags)
        other = plain if sublayer.in_some_layers else sublayer
        assert [mixing_sublayer(model, number) for number in range(4)] == [sublayer, other, sublayer, sublayer]


def test_letters_select_their_sublayers_and_are_what_a_record_is_read_as():
    for each in NAMED:
        letters = layer_letters({VARIANT: each.variant, "num_layers": 2, "linear_attention_freq": [1, 1]})
        assert letters == 2 * f"{each.letter or '?'}-"
        if each.letter:
            assert letter_flags(f"{each.letter}-", None)[VARIANT] == each.variant
    model = ModelArgs(num_layers=3, hybrid_layer_pattern="M-*")
    assert [mixing_sublayer(model, number) for number in range(3)] == [MAMBA, None, SOFTMAX_ATTENTION]


@pytest.mark.parametrize("old", OLD)
def test_old_name_is_taken_as_the_new_one(old):
    settings, _ = resolve_command_line([f"--{VARIANT.replace('_', '-')}", old], 1)
    assert settings.values[VARIANT] == OLD_VARIANTS[VARIANT, old]

"""Declarations of sublayers: equal to flags, letters and classes; what a layer is built of."""

import pytest
from structure.declared import leave_out
from structure.source import ROOT, source_files

from arguments.container import OPTIONS
from arguments.demands import demands
from arguments.help import help_lines
from arguments.layer_flags import layer_letters
from arguments.layer_pattern import letter_flags, mixing_sublayer
from arguments.mechanisms.sublayer_kinds.declaration import PATTERN, SublayerCapability
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
from arguments.rules.derived_sizes import derive_sizes
from arguments.rules.sublayers import limit_sublayers
from arguments.settings import Settings
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


def test_capability_that_a_declaration_leaves_out_is_an_error():
    with pytest.raises(TypeError, match="latent attention leaves out WINDOW"):
        leave_out(LATENT_ATTENTION, SublayerCapability.WINDOW)


def test_every_capability_is_demanded():
    """By a flag or by a rule that asks for it; others need no declaration."""
    rules = "".join(path.read_text() for path in source_files("arguments/rules"))
    asked = {each for each in SublayerCapability if f"SublayerCapability.{each.name})" in rules}
    assert {*asked, *demands(SublayerCapability).values()} == set(SublayerCapability)


def asking_for(sublayer):
    if sublayer.variant is not None:
        return {VARIANT: sublayer.variant, "multi_latent_attention": sublayer.reads_latents}
    return {sublayer.switch: f"{sublayer.letter}-" if sublayer.switch == PATTERN else True}


@pytest.mark.parametrize("sublayer", [each for each in SUBLAYERS if each.mention], ids=lambda each: each.key)
def test_flag_is_rejected_once_where_the_sublayer_has_not_what_it_demands(sublayer):
    for dest, capability in demands(SublayerCapability).items():
        settings = Settings(OPTIONS)
        for name, value in asking_for(sublayer).items():
            settings.set_given(name, value, "command line", OPTIONS[name].spellings[0])
        sizes = derive_sizes(settings, 1)
        assert not [each for each in limit_sublayers(settings, sizes) if each.applies]
        settings.set_given(dest, "a value", "command line", OPTIONS[dest].spellings[0])
        found = [each for each in limit_sublayers(settings, sizes) if each.applies and each.dests == (dest,)]
        reasons = [sublayer.reason(capability)] if sublayer.rejects(capability) else []
        said = [each.message.rpartition(" cannot be combined with {}: ")[2] for each in found]
        of_latents = [LATENT_ATTENTION.reason(capability)] if LATENT_ATTENTION.rejects(capability) else []
        wanted = [*reasons, *(of_latents if sublayer.reads_latents else [])]
        assert set(said) == {f"{each}." for each in wanted} and len(said) == len(set(said)), (dest, said)


def test_help_messages_and_manual_have_the_letters_of_the_declarations():
    shown = "|".join(help_lines(width=4000, options=frozenset({PATTERN})))
    _, found = resolve_command_line(["--hybrid-layer-pattern", "MX"], 1)
    rejected = next(each.message for each in found if "not 'X'" in each.message)
    for letter, each in BY_LETTER.items():
        assert f"{letter} ({each.name})" in shown and f"{letter} ({each.name})" in rejected
    table = (ROOT / "docs/models.md").read_text().partition("| letter | layer |")[2].partition("\n\n")[0]
    assert sorted(row[3] for row in table.splitlines() if row.startswith("| `")) == sorted(BY_LETTER)

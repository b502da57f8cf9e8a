"""The MoE layer pattern and the padded vocabulary."""

from types import SimpleNamespace

import pytest

from arguments import parse_args
from arguments.layer_pattern import layer_letter, mixing_sublayers, moe_layer_pattern, mtp_is_moe, mtp_layers
from arguments.mtp import num_mtp_depths, without_mtp
from arguments.vocabulary import choose_padded_vocab_size, padded_vocab_size
from tests.arguments.test_tokens import TOY


def test_frequency_as_an_integer():
    assert moe_layer_pattern(4, 8, 1) == (True,) * 4
    assert moe_layer_pattern(5, 8, 2) == (True, False, True, False, True)
    assert moe_layer_pattern(4, 8, 3) == (True, False, False, True)


def test_frequency_as_a_list():
    assert moe_layer_pattern(3, 8, [0, 1, 1]) == (False, True, True)
    with pytest.raises(ValueError, match="lists 2 layers, but --num-layers is 3"):
        moe_layer_pattern(3, 8, [0, 1])
    with pytest.raises(ValueError, match="0 .dense. or 1"):
        moe_layer_pattern(2, 8, [0, 2])
    with pytest.raises(ValueError, match="at least 1"):
        moe_layer_pattern(2, 8, 0)


def test_without_experts_every_layer_is_dense():
    assert moe_layer_pattern(3, None, 1) == (False,) * 3
    assert moe_layer_pattern(3, 0, [1, 1]) == (False,) * 3


def test_mtp_depths_of_recorded_flags():
    for value, depths in ((None, 0), (0, 0), (2, 2), ("2", 2)):
        record = {"mtp_num_layers": value, "num_layers": 4}
        assert num_mtp_depths(record) == depths and num_mtp_depths({}) == 0
        assert without_mtp(record) == {"mtp_num_layers": None, "num_layers": 4}


def test_mtp_copies_the_last_layer():
    assert mtp_is_moe((False, True))
    assert not mtp_is_moe((True, False))
    assert not mtp_is_moe(())


@pytest.mark.parametrize(("flags", "depths", "freq", "layout"), [
    ("--hybrid-layer-pattern ME/*E/*E", 2, [0, 1], None), ("--hybrid-layer-pattern ME/", None, [0, 1], None),
    ("--hybrid-layer-pattern M-/*E --mtp-num-layers 3", 1, [0, 0], None), ("--hybrid-layer-pattern ME --mtp-num-layers 2", 0, [0, 1], None),
    ("--hybrid-layer-pattern ME --mtp-hybrid-override-pattern *E --mtp-num-layers 2", 2, [0, 1], None),
    ("--hybrid-layer-pattern M|E/*E/*E --pipeline-model-parallel-size 2", 2, [0, 1], "Et|tmmL"),
])  # fmt: skip
def test_depths_of_a_hybrid_pattern(flags, depths, freq, layout):
    args = parse_args(
        [
            *TOY,
            *"--position-embedding-type none --num-experts 4 --mamba-num-heads 8 --disable-bias-linear".split(),
            *flags.split(),
        ],
        2,
    )
    model = args.model
    assert (model.mtp_num_layers, args.moe.moe_layer_freq, args.parallel.pipeline_model_parallel_layout) == (
        depths,
        freq,
        layout,
    )
    assert model.mtp_hybrid_override_pattern is None
    record = {"hybrid_layer_pattern": model.hybrid_layer_pattern}
    assert model.num_mtp_depths == num_mtp_depths(record) == (depths or 0)
    assert num_mtp_depths(without_mtp({**record, "mtp_num_layers": depths})) == 0
    layers = mtp_layers(model, (False, True))
    assert layers == (((2, False), (3, True)), ((4, False), (5, True)))[: depths or 0]
    assert "".join(layer_letter(model, number) for depth in layers for number, _ in depth) == "*E" * (depths or 0)
    assert {each.letter for each in mixing_sublayers(model)} == {"M", *("*" if depths else "")}


def test_letters_of_depths_begin_behind_the_decoder():
    model = SimpleNamespace(hybrid_layer_pattern="MM-/*E/*E")
    assert "".join(layer_letter(model, number) for number in range(7)) == "MM-*E*E"


def test_vocabulary_is_padded_to_the_divisor():
    for vocab, divisible_by, tp, padded in (
        (50257, 128, 1, 50304), (50257, 128, 8, 51200), (129280, 3232, 1, 129280), (129280, 3232, 8, 129280), (1, 1, 1, 1),
    ):  # fmt: skip
        assert padded_vocab_size(vocab, divisible_by, tp) == padded


def test_invalid_vocabulary_padding_is_rejected():
    with pytest.raises(ValueError, match="positive"):
        padded_vocab_size(10, 0)


@pytest.mark.parametrize(("saved", "flags", "rows"), [
    ({"a": 384}, "", 384), ({"a": None, "b": 384}, "", 384), ({"a": 99}, "", 128), ({"a": 385}, "--tensor-model-parallel-size 2", 256),
    ({"a": 384}, "--padded-vocab-size 512", 512), ({}, "", 128),
])  # fmt: skip
def test_padded_vocab_size_of_checkpoint_is_kept_if_it_fits(saved, flags, rows):
    line = [*TOY, "--load", "a", "--pretrained-checkpoint", "b", "--disable-bias-linear", *flags.split()]
    assert choose_padded_vocab_size(parse_args(line, 2), 100, saved.get) == rows

"""When sparse attention gathers keys: what prevents it, and where it is cheaper."""

from dataclasses import replace

from arguments import parse_args
from arguments.sparse_attention import (
    gather_unsupported_reason,
    gathered_attention_cost,
    masked_attention_cost,
    use_gathered_keys,
)

PRESET = "--preset deepseek_v3_2 --mock-data --global-batch-size 256"


def parse(flags: str):
    return parse_args(f"{PRESET} {flags}".split(), 256)


def test_when_sparse_attention_gathers_keys():
    for flags, expected in (
        ("", True),  # 131,072 positions
        ("--seq-length 8192", False),
        ("--seq-length 8192 --dsa-attention-form gathered", True),
        ("--dsa-attention-form masked", False),
        ("--tensor-model-parallel-size 64 --seq-length 32768", False),  # two heads share a gathered row
        ("--seq-length 32768", True),
        ("--seq-length 2048 --dsa-attention-form gathered", False),  # no more keys than are chosen
        ("--dsa-indexer-warmup", False),
        ("--attention-dropout 0.1", False),
        ("--fp8-format e4m3 --fp8-recipe blockwise --bf16", False),
        ("--dsa-indexer-loss-coeff 0", True),
        ("--preset deepseek_v3 --seq-length 131072", False),
    ):
        assert use_gathered_keys(parse(flags)) is expected, flags


def test_reason_for_masking_keys_is_given():
    for flags, why in (
        ("--attention-dropout 0.1", "consecutive keys"),
        ("--dsa-indexer-warmup", "dense"),
        ("--seq-length 4096", "too few"),
        ("--dsa-attention-form masked", "--dsa-attention-form masked"),
    ):
        args = parse(flags)
        assert why in gather_unsupported_reason(args.model, 128, args.data.seq_length, quantized=False)


def test_indexer_loss_over_all_keys_requires_masking():
    model = parse("").model
    assert "all keys of every head" in gather_unsupported_reason(
        replace(model, dsa_indexer_use_sparse_loss=False), 128, 131072, quantized=False
    )
    assert gather_unsupported_reason(model, 128, 131072, quantized=False) is None
    assert gather_unsupported_reason(model, 128, 131072, quantized=True) is not None


def test_attention_costs_match_hand_computation():
    model = parse("").model
    assert masked_attention_cost(model, 9999) == 5000 * (4 * 192 + 3 * 128)
    assert gathered_attention_cost(model, 64) == 2048 * (4 * 576 + 4 * 512 + 384 * 9)

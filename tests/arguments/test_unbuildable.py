"""Lines that Megatron-LM's parser accepts and its model builders refuse: parse_args accepts them, no run starts."""

import pytest

import arguments
from arguments.report import run_validate_only

LINE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --num-experts 4 --moe-layer-freq [0]+[1]*2 --seq-length "
    "32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-interval 10 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100"
).split()


def test_parse_args_accepts_an_unbuildable_line():
    args = arguments.parse_args(LINE, 1)
    (violation,) = args.unbuildable
    assert violation.flags == ("--moe-layer-freq", "--num-layers") and "3 layers" in violation.message


def test_unbuildable_line_is_reported_with_all_other_errors():
    with pytest.raises(arguments.ArgumentError) as caught:
        arguments.parse_args([*LINE, "--moe-router-topk", "9"], 1)
    text = str(caught.value)
    assert "--moe-router-topk" in text and "--moe-layer-freq" in text


def test_validate_only_rejects_an_unbuildable_line(capsys):
    assert run_validate_only(["--validate-only", *LINE], lambda args: {}) == 2
    assert "--moe-layer-freq" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "flag"),
    [
        ("", "--load"),
        ("--load dense --ffn-hidden-size 96 --moe-ffn-hidden-size 36", "--moe-ffn-hidden-size"),
        ("--load dense --ffn-hidden-size 96 --moe-ffn-hidden-size 32", "--num-experts"),
    ],
)
def test_upcycling_is_parsed_with_a_folder_to_save_to(more, flag):
    """Megatron-LM looks for the dense model and its sharding only after start-up."""
    line = [*LINE[:8], *LINE[10:], *"--moe-use-upcycling --save out --save-interval 5".split(), *more.split()]
    args = arguments.parse_args(line, 1)
    assert args.output.no_load_optim and args.output.no_load_rng
    assert any(flag in violation.flags for violation in args.unbuildable)

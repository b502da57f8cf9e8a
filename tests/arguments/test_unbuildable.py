"""Lines that Megatron-LM's parser accepts and its model builders refuse: parse_args accepts them, no run starts."""

import pytest

import arguments
from moe_trainer.commands.validate_only import run_validate_only
from tests.arguments.rule_lines import changed

LINE = changed("--moe-layer-freq [0]+[1]*2")


def test_parse_args_accepts_an_unbuildable_line():
    (violation,) = arguments.parse_args(LINE, 8).unbuildable
    assert violation.flags == ("--moe-layer-freq", "--num-layers") and "3 layers" in violation.message


def test_unbuildable_line_is_reported_with_all_other_errors():
    with pytest.raises(arguments.ArgumentError) as caught:
        arguments.parse_args([*LINE, "--moe-router-topk", "9"], 8)
    text = str(caught.value)
    assert "--moe-router-topk" in text and "--moe-layer-freq" in text


def test_validate_only_rejects_an_unbuildable_line(capsys):
    assert run_validate_only(["--validate-only", *LINE]) == 2
    assert "--moe-layer-freq" in capsys.readouterr().err


def test_upcycling_is_parsed_with_a_folder_to_save_to():
    """Megatron-LM looks for the dense model and its sharding only after start-up."""
    args = arguments.parse_args(changed("--moe-use-upcycling --save out --save-interval 5"), 8)
    assert args.output.no_load_optim and args.output.no_load_rng
    assert [violation.flags[-1] for violation in args.unbuildable] == ["--load"]

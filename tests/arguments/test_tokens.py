"""All mistakes of a command line are reported together, by name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arguments import ArgumentError, parse_args
from arguments.container import OPTIONS
from arguments.settings import Settings
from arguments.spelling import to_command_line
from arguments.tokens import FIELDS, drop_flags, is_value, parse_tokens, select_flags

TOY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --train-iters 3 --lr 1e-3 --eval-interval 10 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 100"
).split()


def messages(argv):
    with pytest.raises(ArgumentError) as caught:
        parse_args(argv, world_size=1)
    return [violation.message for violation in caught.value.violations]


def test_a_valid_line_parses():
    args = parse_args(TOY, world_size=1)
    assert args.model.num_layers == 2 and args.data.mock_data and args.optimizer.lr == 1e-3
    assert args.source["num_layers"] == "command line" and args.source["adam_beta1"] == "default"
    assert args.source["ffn_hidden_size"] == "derived" and args.model.ffn_hidden_size == 256
    assert "num_layers" in args.typed and "adam_beta1" not in args.typed
    assert args.as_dict()["hidden_size"] == 64 and set(args.as_dict()) == set(OPTIONS)


def test_sections_are_frozen():
    args = parse_args(TOY, world_size=1)
    with pytest.raises(AttributeError):
        args.model.num_layers = 3


def test_all_mistakes_at_once():
    found = messages(
        [*TOY, "--lr", "fast", "--num-layer", "3", "--normalization", "RMSnorm", "--min-lr", "--clip-grad", "1", "2"]
    )
    assert len(found) == 5
    assert "--lr fast: the value must be a number" in found[0]
    assert "--num-layer: this flag is unknown; did you mean --num-layers" in found[1]
    assert "--normalization RMSnorm: the value must be one of LayerNorm, RMSNorm (did you mean RMSNorm?)" in found[2]
    assert "--min-lr: needs a value" in found[3]
    assert "unexpected argument '2'" in found[4]


def test_a_value_that_begins_with_a_dash_is_joined_to_its_flag():
    (wrong,) = messages([*TOY, "--num-experts", "4", "--hybrid-layer-pattern", "-E"])
    assert wrong.endswith("begins with a dash, as flags do: --hybrid-layer-pattern=-E")
    words = to_command_line({"hybrid_layer_pattern": "-E", "window_size": (-1, 0), "lr": -1.0})
    assert words == ["--window-size=-1,0", "--hybrid-layer-pattern=-E", "--lr", "-1.0"]


def test_a_space_in_the_value_of_a_joined_flag_is_as_in_argparse():
    words = [
        "--save=runs/my run",
        "--save-interval",
        "2",
        "--wandb-exp-name=my = run",
        "--moe-layer-freq=([0]*1 + [1]*1)",
    ]
    args = parse_args([*TOY, "--num-experts", "4", "--disable-bias-linear", *words], 1)
    assert (args.output.save, args.output.wandb_exp_name) == ("runs/my run", "my = run")
    assert args.moe.moe_layer_freq == [0, 1]
    moe = ["--num-experts", "4", "--moe-aux-loss-coeff", "0.01"]
    (wrong,) = messages([*TOY, *moe, "--hybrid-layer-pattern=*E *E"])
    assert wrong.startswith("--hybrid-layer-pattern *E *E must have one letter per layer, not ' ':")
    for value in ("-3 x", "--no-such=a b", "--lr 1", "-- lr=1 2", "--lr 1=2", "--rl-x y=1"):
        assert is_value(value)
    (value,) = parse_tokens(["--wandb-exp-name", "--no-such=a b"]).given
    assert value.value == "--no-such=a b"
    assert drop_flags(["--save", "--lr 1", "--save=a b", "--lr", "1"], {"save"}) == ["--lr", "1"]


def test_an_unknown_joined_flag_with_a_space_is_named():
    words = ["--bf16", "--sav=a b", "--img-h=2 3", "--=a b"]
    unknown, product, stray = (violation.message for violation in parse_tokens(words).violations)
    assert unknown.startswith("--sav: this flag is unknown; did you mean --save")
    assert product.startswith("--img-h: this flag is for vision models") and stray.startswith("unexpected argument")


def test_value_of_a_similar_flag_is_named():
    (wrong,) = messages([*TOY, "--moe-token-dispatcher-type", "hybridep"])
    assert wrong.endswith("alltoall, flex (hybridep is a value of --moe-flex-dispatcher-backend)")


def test_error_has_every_message_and_the_resolved_settings():
    with pytest.raises(ArgumentError) as caught:
        parse_args([*TOY, "--lr", "fast", "--bogus"], world_size=1)
    assert all(violation.message in str(caught.value) for violation in caught.value.violations)
    assert "2 problems" in str(caught.value) and caught.value.settings.hidden_size == 64


def test_long_values_are_cut():
    (word,) = messages([*TOY, "--no-such-flag" + "x" * 100_000])
    assert word.startswith("--no-such-flagxxx") and word.count("x") == 66 and "... (1000" in word
    (words,) = messages([*TOY, "--seq-length", " ".join(["1"] * 10_000)])
    assert len(words) < 4100 and words.endswith("characters)")


def test_flags_in_another_case_are_suggested():
    for typed, meant in (("--LR", "--lr"), ("--Num_Experts", "--num-experts"), ("--train_iters", "--train-iters")):
        (message,) = messages([*TOY, typed, "1"])
        assert message.endswith(f"did you mean {meant}?")


def test_numbers_that_would_become_zero_are_rejected():
    (message,) = messages([*TOY, "--adam-eps", "1e-400"])
    assert "--adam-eps 1e-400: the value must be a number of 64 bits" in message
    assert parse_args([*TOY, "--min-lr", "0e-400", "--weight-decay", "00.0"], 1).optimizer.min_lr == 0.0


def test_switch_values():
    assert parse_args([*TOY, "--bf16", "--bf16=false"], 1).precision.bf16 is False
    assert parse_args([*TOY, "--disable-bias-linear=false"], 1).model.add_bias_linear is True


def test_yaml_like_tokens_are_understood():
    args = parse_args([*TOY, "--manual-gc:", "true", "--manual-gc-interval:", "5"], 1)
    assert args.training.manual_gc is True and args.training.manual_gc_interval == 5
    assert any("--manual-gc: is now --manual-gc" in line for line in args.notes)
    assert parse_args([*TOY, "--manual-gc:", "false"], 1).training.manual_gc is False


def test_quotes_left_by_a_launcher_are_dropped():
    moe = "--num-experts 2 --moe-router-topk 2 --disable-bias-linear --moe-layer-freq '([0]*1+[1]*1)'".split()
    args = parse_args([*TOY, *moe], 1)
    assert args.moe.moe_layer_freq == [0, 1]
    assert any("quotes" in line for line in args.notes)


def test_help_prints_and_ends(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(["--num-layers", "2", "--help"])
    assert caught.value.code == 0 and "--moe-router-topk" in capsys.readouterr().out


def test_unknown_world_size_is_noted():
    args = parse_args([*TOY, "--global-batch-size", "7"], world_size=None)
    assert any("number of ranks" in line for line in args.notes)
    with pytest.raises(ArgumentError, match="--global-batch-size 7"):
        parse_args([*TOY, "--global-batch-size", "7"], world_size=1)


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from([*FIELDS, "1", "-1", "x", "1e-3", "fp32", "--nope", "--fp8", "--lr=", "a b", "-", ""]),
        max_size=12,
    )
)
def test_random_tokens_are_parsed_without_a_crash(tokens):
    reading = parse_tokens(tokens)
    reading.apply(Settings(OPTIONS), "command line")
    for violation in reading.violations:
        assert violation.message and violation.kind in ("unknown", "value", "product", "later")


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_negative_numbers_are_values(number):
    assert is_value(repr(number))


WORDS = ["0", "-1", "1", "3", "64", "1000000000000", "1e-3", "-1e9", "nan", "inf", "x", "", "([0]*1+[1]*1)", "0:8 1B:16",
         "1,1", "99,1,0", "|", "Et*2L", "E|tt|L", "bf16", "none", "true"]  # fmt: skip


@st.composite
def flags_with_values(draw):
    option = draw(st.sampled_from(list(OPTIONS.values())))
    count = option.takes if isinstance(option.takes, int) else draw(st.integers(0, 3))
    words = st.sampled_from([*map(str, option.choices or ()), *WORDS])
    return [draw(st.sampled_from(option.spellings)), *(draw(words) for _ in range(count))]


@settings(deadline=None, max_examples=150)
@given(st.lists(flags_with_values(), max_size=5), st.sampled_from([1, 4, None]))
def test_random_lines_are_accepted_or_rejected_with_messages(extra, world_size):
    argv = [*TOY, "--num-experts", "4", "--disable-bias-linear", *(token for flag in extra for token in flag)]
    try:
        parse_args(argv, world_size)
    except ArgumentError as error:
        assert error.violations and all(violation.message for violation in error.violations)


@pytest.mark.parametrize("switch", ["--fp8-param-gather", "--disable-bias-linear"])
def test_the_error_for_no_switch_names_false(switch):
    name = switch.replace("--", "--no-", 1)
    message = parse_tokens([name]).violations[0].message
    assert message == f"{name}: this flag is unknown; did you mean {switch}=false?"
    assert not parse_tokens([f"{switch}=false"]).violations
    assert "=false" not in parse_tokens(["--no-num-layers"]).violations[0].message  # takes a value


def test_dropped_and_selected_flags_take_their_values_along():
    dests = {"tensor_model_parallel_size", "recompute_modules", "recompute_granularity", "load"}
    line = "--tensor-model-parallel-size=4 --bf16 --recompute-modules moe_act layernorm --load: x --lr 1e-4".split()
    assert drop_flags(line, dests) == "--bf16 --lr 1e-4".split()
    assert select_flags(line, dests) == [word for word in line if word not in "--bf16 --lr 1e-4".split()]
    old = "--checkpoint-num-layers 2 --moe-loss-coeff=1e-2 --bf16"
    assert drop_flags(old.split(), {"recompute_num_layers", "moe_aux_loss_coeff"}) == ["--bf16"]

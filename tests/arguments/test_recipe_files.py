"""Recipes: the public zoo's YAML shape, variables, presets, and the command line on top."""

import pytest

import model_zoo
from arguments import ArgumentError, parse_args
from arguments.parse import understand

FILE = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
  CACHE: ${CACHE_ROOT:-/tmp}/cache
MODEL_ARGS:
  # a comment with ${NOTHING}
  --num-layers: ${LAYERS:-4}
  --hidden-size: 64
  --num-attention-heads: 4
  --seq-length: 32
  --max-position-embeddings: ${SEQ}
  --micro-batch-size: 1
  --train-samples: 100
  --lr-warmup-samples: 10
  --lr: 1e-3
  --eval-interval: 10
  --bf16: true
  --swiglu: ${SWIGLU:-true}
  --squared-relu: false
  --num-experts: 4
  --moe-layer-freq: "'([0]*1+[1]*3)'"
  --disable-bias-linear: true
  --moe-router-load-balancing-type: [aux_loss, seq_aux_loss]
  --moe-aux-loss-coeff: 1e-2 1e-3
  --iterations-to-skip: "[3 5]"
  --mock-data: true
  --tokenizer-type: NullTokenizer
  --vocab-size: 100
"""


@pytest.fixture
def recipe(tmp_path):
    def write(text=FILE, name="recipe.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("SEQ", "64")
    for name in ("LAYERS", "SWIGLU", "CACHE_ROOT", "NOTHING"):
        monkeypatch.delenv(name, raising=False)


def test_a_recipe_is_read(recipe):
    args = parse_args(["--preset", recipe()], world_size=1)
    assert args.model.num_layers == 4 and args.model.max_position_embeddings == 64
    assert args.model.swiglu is True and args.model.squared_relu is False and args.precision.bf16 is True
    assert args.moe.moe_layer_freq == [0, 1, 1, 1]
    assert args.moe.moe_router_load_balancing_type == ["aux_loss", "seq_aux_loss"]
    assert args.moe.moe_aux_loss_coeff == [1e-2, 1e-3]
    assert args.training.iterations_to_skip == [3, 5]
    assert args.recipe_env == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CACHE": "/tmp/cache"}
    assert args.source["num_layers"] == "recipe" and "num_layers" not in args.typed


def test_variables_come_from_the_environment(recipe, monkeypatch):
    monkeypatch.setenv("LAYERS", "4")
    monkeypatch.setenv("SWIGLU", "false")
    args = parse_args(["--preset", recipe()], world_size=1)
    assert args.model.num_layers == 4 and args.model.swiglu is False


def test_the_command_line_wins(recipe):
    args = parse_args(["--hidden-size", "128", "--preset", recipe(), "--lr", "2e-3", "--bf16=false"], world_size=1)
    assert args.model.hidden_size == 128 and args.optimizer.lr == 2e-3 and args.precision.bf16 is False
    assert args.source["hidden_size"] == "command line" and args.source["lr"] == "command line"


def test_the_command_line_wins_over_what_it_excludes(recipe):
    args = parse_args(["--preset", recipe(), "--train-iters", "5"], world_size=1)
    assert args.training.train_iters == 5 and args.training.train_samples is None
    assert args.optimizer.lr_warmup_samples == 0
    assert any("--train-samples" in line for line in args.notes)


def test_an_unset_variable_is_named_with_file_and_line(recipe, monkeypatch):
    monkeypatch.delenv("SEQ")
    path = recipe()
    with pytest.raises(ArgumentError) as caught:
        parse_args(["--preset", path], world_size=1)
    found = [violation for violation in caught.value.violations if violation.kind == "recipe"]
    assert len(found) == 1
    assert "SEQ is not set" in found[0].message and f"{path}, line 11" in found[0].message


def test_mistakes_inside_a_recipe_name_the_file(recipe):
    path = recipe(FILE.replace("--hidden-size: 64", "--hidden-size: wide").replace("--swiglu:", "--swigglu:"))
    with pytest.raises(ArgumentError) as caught:
        parse_args(["--preset", path], world_size=1)
    found = [violation.message for violation in caught.value.violations]
    assert any(path in text and "--hidden-size wide" in text for text in found)
    assert any(path in text and "--swigglu: this flag is unknown; did you mean --swiglu " in text for text in found)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("MODEL_ARGS: [1, 2]", "must be a table"),
        ("just text", "no MODEL_ARGS"),
        ("MODEL_ARGS:\n  --a: [1", "not YAML"),
        ("", "no MODEL_ARGS"),
    ],
)
def test_what_is_no_recipe_is_refused(recipe, text, reason):
    with pytest.raises(ArgumentError, match=reason) as caught:
        parse_args(["--preset", recipe(text)], world_size=1)
    assert len(caught.value.violations) == 1


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="cannot be read"):
        parse_args(["--preset", str(tmp_path / "none.yaml")])


def test_an_unknown_preset_offers_close_ones():
    with pytest.raises(ArgumentError, match="mixtral_8x7b") as caught:
        parse_args(["--preset", "mixtral-8x7"])
    assert [violation.kind for violation in caught.value.violations] == ["recipe"]


@pytest.mark.parametrize("spelling", ["mixtral_tiny", "Mixtral-Tiny", "MIXTRAL.TINY"])
def test_preset_names_are_forgiving(spelling):
    args = parse_args(["--preset", spelling], world_size=1)
    assert args.moe.num_experts and args.source["num_layers"] == "preset"


@pytest.mark.parametrize("name", model_zoo.names())
def test_every_preset_parses_and_sets_its_vocabulary(name):
    settings, violations = understand(["--preset", name], world_size=None)
    assert violations == []
    assert settings.vocab_size is not None or settings.padded_vocab_size is not None


def test_other_tables_of_a_recipe_file_are_left_alone(recipe):
    path = recipe("TEST_TYPE: regular\nMETRICS: [a]\n" + FILE)
    assert parse_args(["--preset", path], world_size=1).model.num_layers == 4

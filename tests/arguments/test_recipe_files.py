"""Recipes: the public zoo's YAML shape, variables, presets, and the command line on top."""

import os
import re

import pytest

import model_zoo
from arguments import ArgumentError, parse_args, tokens
from arguments.parse import resolve_command_line
from moe_trainer.commands import train_process
from moe_trainer.commands.validate_only import run_validate_only

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


def test_exported_variables_override_those_of_a_recipe(recipe, monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    monkeypatch.setattr(train_process, "_train", lambda *rest: 0)
    assert train_process.main(["--preset", recipe()]) == 0
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8" and os.environ["CACHE"] == "/tmp/cache"


def test_command_line_overrides_recipe(recipe):
    args = parse_args(["--hidden-size", "128", "--preset", recipe(), "--lr", "2e-3", "--bf16=false"], world_size=1)
    assert args.model.hidden_size == 128 and args.optimizer.lr == 2e-3 and args.precision.bf16 is False
    assert args.source["hidden_size"] == "command line" and args.source["lr"] == "command line"


def test_none_undoes_choices_and_numbers_of_a_recipe(recipe):
    full = "\n  --recompute-granularity: full\n  --recompute-method: uniform\n  --recompute-num-layers: 1\n"
    plain = parse_args(["--preset", recipe()], 1)
    path = recipe(FILE.replace("MODEL_ARGS:", f"MODEL_ARGS:{full}", 1))
    assert parse_args(["--preset", path], 1).training.recompute_granularity == "full"
    typed = "--recompute-granularity none --recompute-method none --recompute-num-layers none".split()
    args = parse_args(["--preset", path, *typed], 1)
    assert args.training == plain.training and args.notes == plain.notes and args.typed == plain.typed
    again = parse_args(["--preset", path, *typed, *"--recompute-granularity selective".split()], 1)
    assert again.training.recompute_granularity == "selective"
    notes = parse_args(["--preset", path, *typed[:2]], 1).notes
    assert any("--recompute-method uniform has no effect without --recompute-granularity" in note for note in notes)


@pytest.mark.parametrize("flag", ["--normalization", "--lr-decay-style", "--num-layers-at-start-in-bf16", "--seed"])
def test_flags_with_a_default_have_no_value_none(recipe, flag):
    with pytest.raises(ArgumentError, match=f"{flag} none: the value must be"):
        parse_args(["--preset", "mixtral_tiny", "--mock-data", flag, "none"], 1)


def test_command_line_overrides_conflicting_recipe_flags(recipe):
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


@pytest.mark.parametrize("mode", ["--validate-only", "--dry-run"])
def test_unset_variables_in_paths_are_noted_where_no_run_follows(recipe, monkeypatch, mode):
    for name in ("LOAD_PATH", "OUTPUT_PATH"):
        monkeypatch.delenv(name, raising=False)
    file = FILE.replace("CACHE_ROOT:-/tmp", "OUTPUT_PATH") + "  --load: ${LOAD_PATH}\n  --save: $OUTPUT_PATH/a\n"
    path = recipe(f"{file}  --save-interval: 5\n  --dist-ckpt-strictness: log_all\n")
    settings, violations = resolve_command_line(["--preset", path, mode], 1)
    assert violations == [] and settings.load == "${LOAD_PATH}" and settings.save == "$OUTPUT_PATH/a"
    unset = f"{path}: not set, and needed by a run: OUTPUT_PATH (line 4), LOAD_PATH (line 29)."
    assert settings.notes.count(unset) == 1
    assert not any("without --load" in line for line in settings.lines())
    # a run needs them, and a number is needed in any case
    _, violations = resolve_command_line(["--preset", path], 1)
    assert ["LOAD_PATH is not set" in each.message for each in violations] == [False, True, False], violations
    monkeypatch.delenv("SEQ")
    _, violations = resolve_command_line(["--preset", path, mode], 1)
    assert [each.kind for each in violations if "SEQ is not set" in each.message] == ["recipe"]


def test_errors_in_a_recipe_name_the_file(recipe):
    path = recipe(FILE.replace("--hidden-size: 64", "--hidden-size: wide").replace("--swiglu:", "--swigglu:"))
    with pytest.raises(ArgumentError) as caught:
        parse_args(["--preset", path], world_size=1)
    found = [violation.message for violation in caught.value.violations]
    assert any(path in text and "--hidden-size wide" in text for text in found)
    assert any(path in text and "--swigglu: this flag is unknown; did you mean --swiglu " in text for text in found)


TWICE = "ARGS:\n  num_layers: 4\n  hidden_size: 8\n  --num-layers: 2\n"
BROKEN = (
    ("MODEL_ARGS: [1, 2]", "must be a table"),
    ("just text", "no MODEL_ARGS"),
    ("MODEL_ARGS:\n  --a: [1", "not YAML"),
    ("", "no MODEL_ARGS"),
    (FILE + "ARGS:\n  num_layers: 4\n", "both contain flags"),
    ("ARGS:\n  num_layers:\n    deep: 4\n", "ARGS must be a table"),
    (FILE + "MODEL_ARGS:\n  --num-layers: 2\n", "MODEL_ARGS is in line 5 and in line 29"),
    ("ENV_VARS:\n  A: 1\nENV_VARS:\n  B: 2\nARGS:\n  num_layers: 4\n", "ENV_VARS is in line 1 and in line 3"),
    (TWICE, "ARGS: --num-layers is in line 2 and in line 4"),
    ("ENV_VARS:\n  A: 1\n  A: 2\nARGS:\n  num_layers: 4\n", "ENV_VARS: A is in line 2 and in line 3"),
    ("ARGS:\n  num_layers: 4\n  preset: mixtral_tiny\n", "ARGS: preset, line 3: this flag acts on the command line"),
    (
        "MODEL_ARGS:\n  --validate-only: true\n",
        "MODEL_ARGS: --validate-only, line 2: this flag acts on the command line",
    ),
)


def test_invalid_recipe_files_are_rejected(recipe):
    for text, reason in BROKEN:
        with pytest.raises(ArgumentError, match=reason) as caught:
            parse_args(["--preset", recipe(text)], world_size=1)
        assert len(caught.value.violations) == 1, text


@pytest.mark.parametrize(
    "environ, node", [({}, "0"), ({"GROUP_RANK": "2"}, "2"), ({"SLURM_NODEID": "5", "GROUP_RANK": "2"}, "5")]
)
def test_node_id_variable_is_replaced_on_each_node(recipe, monkeypatch, environ, node):
    for name in ("SLURM_NODEID", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    own = "ENV_VARS:\n  TRITON_CACHE_DIR: /tmp/cache_$SLURM_NODEID\n"
    path = recipe(own + FILE[FILE.index("MODEL_ARGS") :])
    assert parse_args(["--preset", path], world_size=1).recipe_env["TRITON_CACHE_DIR"] == f"/tmp/cache_{node}"


def test_suggestion_searches_are_limited(recipe, monkeypatch):
    """Every search reads all flags, and a file may hold a hundred thousand unknown ones."""
    searches, search = [], tokens._close_matches
    monkeypatch.setattr(tokens, "_close_matches", lambda *rest: searches.append(rest) or search(*rest))
    path = recipe("MODEL_ARGS:\n" + "".join(f"  --num-layerz{number}: 1\n" for number in range(200)))
    with pytest.raises(ArgumentError) as caught:
        parse_args(["--preset", path], world_size=1)
    found = [violation.message for violation in caught.value.violations if "is unknown" in violation.message]
    assert len(found) == 200 and len(searches) == tokens.MAX_SUGGESTION_SEARCHES
    assert "did you mean --num-layers" in found[0] and "did you mean" not in found[-1]


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="cannot be read"):
        parse_args(["--preset", str(tmp_path / "none.yaml")])


def test_an_unknown_preset_offers_close_ones():
    with pytest.raises(ArgumentError, match="mixtral_8x7b") as caught:
        parse_args(["--preset", "mixtral-8x7"])
    assert [violation.kind for violation in caught.value.violations] == ["recipe"]


@pytest.mark.parametrize("spelling", ["mixtral_tiny", "Mixtral-Tiny", "MIXTRAL.TINY"])
def test_alternative_preset_spellings_are_accepted(spelling):
    args = parse_args(["--preset", spelling], world_size=1)
    assert args.moe.num_experts and args.source["num_layers"] == "preset"


def test_every_preset_parses_and_sets_its_vocabulary():
    for name in model_zoo.names():
        settings, violations = resolve_command_line(["--preset", name], world_size=None)
        assert violations == [], name
        assert settings.vocab_size is not None or settings.padded_vocab_size is not None, name


def test_other_tables_of_a_recipe_file_are_ignored(recipe):
    path = recipe("TEST_TYPE: regular\nMETRICS: [a]\n" + FILE)
    assert parse_args(["--preset", path], world_size=1).model.num_layers == 4


NAMES = """
DEPENDENCIES:
  pytorch_base_image: example.invalid/pytorch:1
  dockerfile: |
    # ${NOTHING} is replaced in here
    FROM scratch
ENV_VARS:
  NVTE_FUSED_ATTN: '1'
  USE_MNNVL: 1
ARGS:
  # names of flags, as Megatron-LM's own recipes write them
  num_layers: 4
  hidden_size: 64
  num_attention_heads: 4
  seq_length: 32
  max_position_embeddings: ${SEQ}
  micro_batch_size: 1
  global_batch_size: 8
  train_samples: 100
  lr: 3.9e-06
  eval_interval: 10
  bf16: true
  swiglu: true
  finetune: false
  no_check_for_nan_in_loss_and_grad: true
  override_opt_param_scheduler: true
  num_experts: 4
  moe_layer_freq: ([0]*1+[1]*3)
  disable_bias_linear: true
  use_mcore_models: true
  moe_grouped_gemm: true
  moe_router_load_balancing_type: aux_loss
  attention_dropout: 0.0
  hidden_dropout: 0.0
  cuda_graph_impl: local
  cuda_graph_scope:
  - attn
  - moe_router
  recompute_granularity: selective
  recompute_modules: moe_act layernorm
  transformer_impl: transformer_engine
  mock_data: true
  tokenizer_type: NullTokenizer
  vocab_size: 100
"""


def test_megatrons_own_recipes_are_read(recipe):
    args = parse_args(["--preset", recipe(NAMES)], world_size=1)
    assert args.model.num_layers == 4 and args.model.max_position_embeddings == 64 and args.optimizer.lr == 3.9e-06
    assert args.moe.moe_layer_freq == [0, 1, 1, 1]
    assert args.training.cuda_graph_modules == ["attn", "moe_router"]
    assert args.training.recompute_modules == ["moe_act", "layernorm"]
    assert args.output.finetune is False and args.training.check_for_nan_in_loss_and_grad is False
    assert args.source["num_layers"] == "recipe" and args.recipe_env == {"NVTE_FUSED_ATTN": "1", "USE_MNNVL": "1"}
    assert parse_args(["--preset", recipe(NAMES), "--hidden-size", "32"], world_size=1).model.hidden_size == 32


def test_names_with_and_without_dashes_are_equivalent(recipe):
    """`override_opt_param_scheduler` is the flag --override-opt_param-scheduler."""
    named = parse_args(["--preset", recipe(NAMES)], world_size=1)
    dashed = re.sub(
        r"(?m)^  ([a-z]\w+):(?=.*$)",
        lambda found: f"  --{found.group(1).replace('_', '-')}:",
        NAMES.partition("ARGS:")[2],
    )
    dashed = dashed.replace("--override-opt-param-scheduler", "--override-opt_param-scheduler")
    for table in ("ARGS", "MODEL_ARGS"):
        path = recipe(f"{table}:{dashed}", "dashed.yaml")
        assert parse_args(["--preset", path], world_size=1).as_dict() == named.as_dict() | {"preset": path}


def test_unknown_names_without_dashes_are_reported(recipe):
    path = recipe(NAMES.replace("swiglu:", "swigglu:"))
    with pytest.raises(ArgumentError) as caught:
        parse_args(["--preset", path], world_size=1)
    (found,) = (violation.message for violation in caught.value.violations)
    assert path in found and "--swigglu: this flag is unknown; did you mean --swiglu " in found


@pytest.mark.parametrize("table", ["MODEL_ARGS", "ARGS"])
def test_an_incomplete_recipe_is_rejected_without_a_traceback(recipe, table, capsys):
    argv = ["--preset", recipe(f"{table}:\n  num_layers: 4\n"), "--validate-only", "--world-size", "8"]
    assert run_validate_only(argv) == 2
    assert "--hidden-size is missing" in capsys.readouterr().err
    assert run_validate_only([recipe(), *argv[2:]]) == 2


@pytest.mark.parametrize("entry", ["cuda_graph_scope: [attn, moe_router]", "cuda_graph_modules: [attn, moe_router]"])
def test_a_full_iteration_graph_on_the_command_line_drops_the_modules_of_the_recipe(recipe, entry):
    file = recipe(f"{FILE}  --cuda-graph-impl: transformer_engine\n  {entry}\n")
    graph = "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad --num-experts 4".split()
    settings, violations = resolve_command_line(["--preset", file, *graph], 1)
    assert settings.cuda_graph_modules == [] and not any("; drop" in violation.message for violation in violations)
    flag = "--" + entry.partition(":")[0].replace("_", "-")
    assert f"{flag} attn moe_router from the recipe is ignored: --cuda-graph-impl is set." in settings.notes
    # modules that are typed stay, and contradict the full iteration
    _, violations = resolve_command_line(["--preset", file, *graph, "--cuda-graph-modules", "attn"], 1)
    assert any("drop --cuda-graph-modules attn" in violation.message for violation in violations)
    # other graphs keep the recipe's modules
    settings, _ = resolve_command_line(["--preset", file, "--cuda-graph-impl", "local"], 1)
    assert settings.cuda_graph_modules == ["attn", "moe_router"]


@pytest.mark.parametrize(
    "one, other", [("cuda_graph_scope", "--cuda-graph-modules"), ("cuda_graph_modules", "--cuda-graph-scope")]
)
def test_modules_on_the_command_line_replace_the_recipes_in_either_spelling(recipe, one, other):
    file = recipe(f"{FILE}  --cuda-graph-impl: transformer_engine\n  {one}: [attn, moe_router]\n")
    settings, violations = resolve_command_line(["--preset", file, other, "attn"], 1)
    assert settings.cuda_graph_modules == ["attn"]
    assert not any("old form" in violation.message for violation in violations)


def test_an_exported_variable_that_wins_over_the_recipe_is_noted(recipe, monkeypatch):
    path = recipe()
    for value, is_noted in (("32", True), ("1", False)):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
        notes = resolve_command_line(["--preset", path], 1)[0].notes
        wanted = f"CUDA_DEVICE_MAX_CONNECTIONS=1 of {path} has no effect: it is 32 in the environment."
        assert (wanted in notes) == is_noted and any("CONNECTIONS" in note for note in notes) == is_noted


def test_fp4_on_the_command_line_drops_what_belongs_to_the_recipes_fp8(recipe):
    path = recipe(
        FILE + "  fp8_format: e4m3\n  fp8_recipe: mxfp8\n  fp8_param_gather: true\n  cross_entropy_loss_fusion: true\n"
        "  reuse_grad_buf_for_mxfp8_param_ag: true\n  cross_entropy_fusion_impl: te\n"
    )
    settings, violations = resolve_command_line(["--preset", path, "--fp4-format", "e2m1"], 1)
    assert not any("param" in violation.message for violation in violations), violations
    assert "--fp8-param-gather from the recipe is ignored: --fp4-format is set." in settings.notes
    # a flag without effect is not shown with a value that a rule chose
    assert "--cross-entropy-fusion-impl" in [flag for flag, _ in settings.no_effect]
    _, violations = resolve_command_line(["--preset", path, "--fp4-format", "e2m1", "--fp8-param-gather"], 1)
    assert any("--fp8-param-gather needs --fp8-format" in violation.message for violation in violations)

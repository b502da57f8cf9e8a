"""What evaluation does without lm-eval: tables, names of tasks, ids of texts, and the error when it is missing."""

import json
import runpy
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from moe_trainer.commands import evaluate, rank_program
from moe_trainer.data.tokenizer import NullTokenizer
from moe_trainer.errors import UserError
from moe_trainer.evaluation import harness as harness_module
from moe_trainer.evaluation.harness import open_harness
from moe_trainer.evaluation.routing import routing_table
from moe_trainer.inference.text import TextCodec


def test_missing_harness_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"lm_eval is not installed \(pip install lm-eval\)"):
        open_harness()


def test_other_version_of_the_harness_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("moe_trainer.evaluation.lm_eval_model", "lm_eval"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", types.ModuleType("lm_eval"))  # without what is used
    with pytest.raises(UserError, match="too old or incomplete: .*lm_eval"):
        open_harness()


def test_error_of_another_rank_names_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(rank_program, "WAIT_S", 0.0)
    assert evaluate.main(["--table", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.startswith("evaluate.py: rank 3: --table ")


def test_table_of_other_tasks(tmp_path, capsys):
    own = {"alias": "mine", "bits_per_byte,none": 1.25, "bits_per_byte_stderr,none": "N/A"}
    (tmp_path / "a.json").write_text(json.dumps({"results": {"mine": own}}))
    assert evaluate.main(["--table", str(tmp_path / "a.json")]) == 0
    assert capsys.readouterr().out.splitlines() == ["| model | mine |", "|---|---|", "| a | 1.2500 |"]


@pytest.mark.parametrize("text", [None, "[1]", '{"results": 3}', "{"])
def test_table_names_a_file_that_holds_no_results(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "bad.json").write_text(text)
    assert evaluate.main(["--table", str(tmp_path / "bad.json")]) == 2
    assert "bad.json: not a file that evaluate.py --output wrote" in capsys.readouterr().err


class Letters:
    """One id for each character; texts begin with id 1."""

    vocab_size, eod, pad, bos, unique_identifiers = 300, 0, None, 1, {}

    def tokenize(self, text):
        return [1, *(1 if letter == "^" else ord(letter) for letter in text)]

    def plain_text(self, ids):
        return "".join(map(chr, ids))


def test_begin_token_is_added_once_and_left_out_on_demand():
    codec = TextCodec(Letters())
    assert (codec.prefix, codec.eos) == (1, 0)
    assert codec.encode("ab") == [1, 97, 98] == codec.encode("^ab")
    assert codec.encode("ab", False) == [97, 98] and codec.encode("ab", True) == [1, 97, 98]


def test_a_long_prompt_keeps_its_end(monkeypatch):
    """With a stand-in for the harness."""
    modules = "api api.instance api.model evaluator models models.utils tasks tasks.manager utils"
    harness = {name: MagicMock() for name in ("lm_eval", *(f"lm_eval.{name}" for name in modules.split()))}
    for name, module in harness.items():
        monkeypatch.setitem(sys.modules, name, module)
    harness["lm_eval.api.model"].TemplateLM = object
    harness["lm_eval.models.utils"].normalize_gen_kwargs = lambda settings, default: settings
    path = Path(harness_module.__file__).with_name("lm_eval_model.py")
    writer = MagicMock(max_length=32, generate=MagicMock(return_value=[[]]))
    model = runpy.run_path(str(path))["TrainedModel"](writer, writer, TextCodec(Letters()))
    model._generate([types.SimpleNamespace(args=("p" * 30 + "q" * 20, {"until": ["."], "max_gen_toks": 12}))])
    assert writer.generate.call_args.args[0] == [[ord("q")] * 20]


def test_tokenizer_without_text_is_named():
    with pytest.raises(UserError, match="NullTokenizer has no text"):
        TextCodec(NullTokenizer(8))


def test_routing_table_shows_loads_and_the_busiest_experts():
    routing = {"code": {"layers": [2], "tokens_per_expert": [[0, 10, 10, 100]]}, "prose": {"layers": [10], "tokens_per_expert": [[5, 5, 5, 5]]}}  # fmt: skip
    _, code, prose = routing_table(routing).splitlines()
    assert code == "  code   layer  2  | ..@|  3 (83.3%), 1 (8.3%), 2 (8.3%)"
    assert "layer 10  |++++|  0 (25.0%)" in prose and routing_table({}) == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ck", "--tasks NAMES is missing"),
        ("--tasks a", "comes first"),
        ("ck --tasks a --limit 0", "--limit 0 must be above 0"),
        ("ck --tasks a --batch-size -1", "--batch-size -1 must be above 0"),
        ("ck --tasks a --num-fewshot -1", "--num-fewshot -1"),
        ("ck --tasks a --output nowhere/x.json", "--output nowhere/x.json: the file cannot be written"),
        ("ck --table a.json", "takes no model, tasks or flags"),
        ("--table a.json --limit 5", "and no options"),
    ],
)
def test_wrong_options_are_named(words, message, capsys):
    with pytest.raises(SystemExit) as error:
        evaluate.main(words.split())
    assert error.value.code == 2 and message in capsys.readouterr().err

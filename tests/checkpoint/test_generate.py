"""From text to generated text: the quickstart's steps on a small text, export to Hugging Face with the tokenizer, and generate()."""

import json
import subprocess
import sys

import pytest
import torch
from commands import REPOSITORY, environment, read_metrics, run

from moe_trainer.commands import convert
from moe_trainer.data.tokenizer_libraries import SentencePieceTokenizer

transformers = pytest.importorskip("transformers")
pytest.importorskip("sentencepiece")

VOCAB, SEQ = 600, 64
PROMPT = "def main(argv):\n    return "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a short quickstart: text, tokenizer, tokens, and a checkpoint of preset mixtral_tiny."""
    base = tmp_path_factory.mktemp("quickstart")
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(base / "tokenizer.model")]
    for words in (
        ["quickstart_text.py", str(base), "--megabytes", "0.6", "--vocab-size", str(VOCAB)],
        [
            "preprocess_data.py",
            "--input",
            str(base / "text.jsonl"),
            "--output-prefix",
            str(base / "text"),
            *tokenizer,
            "--workers",
            "1",
            "--append-eod",
        ],
    ):
        done = subprocess.run(
            [sys.executable, str(REPOSITORY / "scripts" / words[0]), *words[1:]],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    done = run(
        [
            "--preset",
            "mixtral_tiny",
            "--data-path",
            str(base / "text_text_document"),
            "--split",
            "90,5,5",
            *tokenizer,
            "--micro-batch-size",
            "2",
            "--global-batch-size",
            "4",
            "--seq-length",
            str(SEQ),
            "--train-iters",
            "16",
            "--log-interval",
            "1",
            "--eval-iters",
            "0",
            "--save",
            str(base / "checkpoints"),
            "--save-interval",
            "16",
        ],
        base,
        world_size=2,
    )
    assert done.returncode == 0, done.stderr
    assert convert.main([str(base / "checkpoints"), str(base / "hf"), "--to", "hf"]) == 0
    return base


def test_a_model_of_the_quickstart_generates_text(folder):
    losses = [record["lm loss"] for record in read_metrics(folder / "checkpoints/metrics.jsonl")]
    assert len(losses) == 16 and losses[-1] < losses[0] - 0.3  # a model that has learned something
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
    ours = SentencePieceTokenizer(
        str(folder / "tokenizer.model"), special_tokens=[], legacy=False, ignore_extra_whitespaces=False
    )
    text = json.loads((folder / "text.jsonl").read_text().splitlines()[0])["text"][:2000]
    for each in (PROMPT, text):
        assert tokenizer(each).input_ids == ours.tokenize(each)
        assert tokenizer.decode(tokenizer(each).input_ids) == each
    prompt = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    assert out.shape == (1, prompt.input_ids.shape[1] + 24) and out.max() < VOCAB
    written = tokenizer.decode(out[0])
    assert written.startswith(PROMPT) and len(written) > len(PROMPT) and "\ufffd" not in written
    assert written == ours._model.decode(out[0].tolist())
    # what it would write next follows from the logits, and ours are the same
    tokens = torch.tensor([ours.tokenize(text)[:SEQ]])
    difference, largest = convert.compare_logits(folder / "hf", folder / "checkpoints", tokens_BS=tokens)
    assert difference < 1e-5 < largest
    difference, _ = convert.compare_logits(folder / "hf", folder / "checkpoints", tokens_BS=out)
    assert difference < 1e-5

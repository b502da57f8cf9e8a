"""scripts/generate.py: the same texts as transformers under every mapping, files of prompts, and errors; texts between the iterations of a run."""

import contextlib
import io
import json
import subprocess
import sys

import pytest
import torch
from commands import REPOSITORY, environment, read_metrics, run
from evaluation.trained_model import MODEL, NO_DROPOUT, run_script, train_model

import moe_trainer.training.inference  # noqa: F401 - ranks find it loaded
from moe_trainer.commands import generate
from moe_trainer.errors import UserError

transformers = pytest.importorskip("transformers")

PROMPTS = ["The cat says", "The dog says bark. The", "The owl says hoot. The bee says buzz. The ant says", "A"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = train_model(tmp_path_factory.mktemp("generation"))
    (base / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return base


def generate_on(folder, world_size, source, *flags):
    words = [source, "--prompts-file", "prompts.jsonl", "--max-new-tokens", "16", "--output", "texts.jsonl", *flags]
    assert run_script(generate.main, folder, world_size, words) == [0] * world_size
    return [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(folder):
    return generate_on(folder, 1, "ck")


def test_greedy_texts_are_those_of_transformers(folder, alone):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    for prompt, found in zip(PROMPTS, alone, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs.input_ids.shape[1] :].tolist()
        assert found["tokens"] == tokens and found["prompt"] == prompt
        assert found["text"] == tokenizer.decode(tokens, skip_special_tokens=True)
    assert {each["finish_reason"] for each in alone} == {"length", "eos"} and ".\nThe" in alone[0]["text"]
    assert generate_on(folder, 1, "hf") == alone


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (2, "--tensor-model-parallel-size 2"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --batch-size 3"),
        (4, "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --batch-size 1"),
    ],
)
def test_mapping_changes_no_text(folder, alone, world_size, flags):
    assert generate_on(folder, world_size, "ck", *flags.split()) == alone


def test_mapping_changes_no_drawn_text(folder):
    flags = (
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --sequence-parallel"
    )
    draws = "--temperature 1.0 --top-k 40 --top-p 0.98 --sampling-seed 3 --samples-per-prompt 2".split()
    found = generate_on(folder, 4, "ck", *flags.split(), *draws)
    assert found == generate_on(folder, 1, "ck", *draws)
    assert len(found) == 2 * len(PROMPTS) and len({each["text"] for each in found}) > len(PROMPTS)


def test_texts_end_before_a_stop_text(folder, alone):
    found = generate_on(folder, 1, "ck", "--stop", "!", "\nThe", ".\n")
    assert found[0]["finish_reason"] == "stop" and found[0]["text"] == alone[0]["text"].split(".\n")[0]
    assert alone[0]["tokens"][: len(found[0]["tokens"])] == found[0]["tokens"]


def test_texts_are_printed_after_their_prompts(folder, alone):
    words = ["ck", PROMPTS[0], PROMPTS[1], "--max-new-tokens", "16", "--batch-size", "1"]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts/generate.py"), *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "\n\n".join(each["prompt"] + each["text"] for each in alone[:2]) + "\n"  # and no log
    assert "2 texts, 32 new tokens in" in done.stderr


def test_conversations_are_written_by_the_chat_template(folder):
    turns = [{"role": "user", "content": "The cat says"}]
    (folder / "chats.jsonl").write_text(
        json.dumps({"messages": turns}) + "\n\n" + json.dumps({"prompt": "The cat says"})
    )
    words = [
        "ck",
        "--prompts-file",
        "chats.jsonl",
        "--apply-chat-template",
        "--max-new-tokens",
        "4",
        "--output",
        "chats.out",
    ]
    assert run_script(generate.main, folder, 1, words) == [0]
    first, second = [json.loads(line) for line in (folder / "chats.out").read_text().splitlines()]
    assert first == second and first["prompt"] == "[user] The cat says\n[assistant]"


def main(words):
    """Return exit code and errors of the script."""
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            code = generate.main(words)
        except SystemExit as stopped:
            code = stopped.code
    return code, errors.getvalue()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("nowhere Once", "nowhere: no such checkpoint directory"),
        ("--max-new-tokens 4", "comes first"),
        ("ck", "no prompt"),
        ("ck Once --max-new-tokens 0", "--max-new-tokens 0 must be above 0"),
        ("ck Once --samples-per-prompt 2", "--samples-per-prompt needs a --temperature"),
        ("ck Once --sampling-seed 2", "--sampling-seed needs a --temperature"),
        ("ck Once --top-k 3", "need a temperature"),
        ("ck Once --temperature -1", "temperature -1.0 must be 0, or"),
        ("ck Once --output no/such/file", "--output no/such/file: the file cannot be written"),
        ("ck --prompts-file none.txt", "--prompts-file none.txt: the file cannot be read"),
        ("ck --prompts-file bad.jsonl", "--prompts-file bad.jsonl, line 2: not JSON"),
        ("ck --prompts-file deep.jsonl", "--prompts-file deep.jsonl, line 1: not JSON (nested too deeply)"),
        ("ck --prompts-file number.jsonl", "--prompts-file number.jsonl, line 1: a line must be a string"),
        ("ck --prompts-file chat.jsonl", '"messages" needs --apply-chat-template'),
        ("ck --prompts-file turns.jsonl --apply-chat-template", '"messages" must be a list of objects'),
        ("ck Once\udcff --max-new-tokens 4", "'Once\\udcff': not UTF-8"),
        (
            "ck Once --max-new-tokens 64 --num-workers 4 --exit-interval 9",
            "--exit-interval, --num-workers: no effect here",
        ),
        ("ck Once --max-new-tokens 64", "with 64 new ones it is longer than the model's 64 positions"),
    ],
)
def test_wrong_input_is_named(folder, words, named):
    (folder / "bad.jsonl").write_text('"good"\n{"prompt": \n')
    (folder / "number.jsonl").write_text("3\n")
    (folder / "deep.jsonl").write_text("[" * 100000)
    (folder / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    (folder / "turns.jsonl").write_text('{"messages": ["x"]}\n')
    ((code, message),) = run_script(main, folder, 1, words.split())
    assert code == 2 and named in message and "Traceback" not in message


def test_lines_of_prompts_end_at_line_breaks_only(tmp_path):
    prompt = "a\u2028b\fc"
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(prompt, ensure_ascii=False).encode() + b"\r\n\n" + b'{"prompt": "d"}')
    assert generate.read_prompts(path, False) == [prompt, "d"]
    path = tmp_path / "prompts.txt"
    path.write_bytes(f"{prompt}\r\nd\n".encode())
    assert generate.read_prompts(path, False) == [prompt, "d"]


def test_run_writes_samples_and_keeps_its_losses(folder):
    words = [
        *MODEL,
        *NO_DROPOUT,
        "--train-iters",
        "5",
        "--save",
        "sampled",
        "--save-interval",
        "4",
        "--micro-batch-size",
        "4",
    ]
    samples = ["--sample-prompts", 'The "cat"', "The dog", "--sample-interval", "2", "--sample-max-new-tokens", "5"]
    done = run([*words, *samples], folder, world_size=2)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.count(" sample at iteration ") == 6
        and ' sample at iteration 4 | "The \\"cat\\"" -> ' in done.stdout
    )
    records = read_metrics(folder / "sampled/metrics.jsonl")
    found = [(each["sample"], each["iteration"]) for each in records if "sample" in each]
    assert found == [(prompt, iteration) for iteration in (2, 4, 5) for prompt in ('The "cat"', "The dog")]
    assert all(each["text"] for each in records if "sample" in each)
    plain = run([part if part != "sampled" else "plain" for part in words], folder, world_size=2)
    assert plain.returncode == 0, plain.stderr
    losses = [
        [each["lm loss"] for each in read_metrics(folder / name / "metrics.jsonl") if "lm loss" in each]
        for name in ("sampled", "plain")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 5
    # the texts of iteration 5 come again where the run is continued from iteration 4
    (folder / "sampled/latest_checkpointed_iteration.txt").write_text("4")
    done = run([*words, "--load", "sampled", *samples], folder, world_size=2)
    assert done.returncode == 0, done.stderr
    again = [
        (each["sample"], each["iteration"])
        for each in read_metrics(folder / "sampled/metrics.jsonl")
        if "sample" in each
    ]
    assert again == found


def test_prompt_that_is_too_long_is_named_before_the_first_iteration(folder):
    words = [*MODEL, "--train-iters", "2", "--sample-prompts", "The cat says", "--sample-interval", "1"]
    done = run(words, folder)
    assert (
        done.returncode == 2
        and "--sample-prompts: prompt 1 has" in done.stderr
        and "iteration        1" not in done.stdout
    )


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UserError, match=f"--output: cannot write {tmp_path}: Is a directory"):
        generate._write(tmp_path, [], [])

"""Benchmark tasks of lm-eval on a trained model: equal to its export in transformers, under any mapping, from the command line and between iterations."""

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from commands import read_metrics, run
from evaluation.local_tasks import TASKS, write_tasks
from evaluation.trained_model import MODEL, NO_DROPOUT, run_script, train_model

from moe_trainer.commands import evaluate

pytest.importorskip("lm_eval", reason="lm-eval is not installed (MOE_TRAINER_TEST_WITH=lm-eval)")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a checkpoint, its export, and three tasks."""
    base = train_model(tmp_path_factory.mktemp("evaluation"))
    write_tasks(base / "tasks")
    return base


@pytest.fixture(scope="module")
def alone(folder):
    """Results of one process."""
    return evaluate_on(folder, 1, "ck")


def evaluate_on(folder, world_size, source, *flags):
    words = [source, "--tasks", TASKS, "--include-path", "tasks", "--output", "results.json", *flags]
    assert run_script(evaluate.main, folder, world_size, words) == [0] * world_size
    return json.loads((folder / "results.json").read_text())


def figures(results):
    """Return (task, metric) -> value."""
    return {
        (task, name): value
        for task, entry in results["results"].items()
        for name, value in entry.items()
        if isinstance(value, float) and "stderr" not in name
    }


def harness_model(folder):
    """Return lm-eval's own `hf` model; it imports accelerate, which one process on a CPU does not use."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    absent = types.ModuleType("accelerate"), types.ModuleType("accelerate.utils")
    for name in ("Accelerator", "InitProcessGroupKwargs", "get_max_memory"):
        for module in absent:
            setattr(module, name, None)
    absent[0].find_executable_batch_size = lambda *args, **kwargs: lambda function: function
    with pytest.MonkeyPatch.context() as patch:
        for module in absent:
            patch.setitem(sys.modules, module.__name__, module)
        from lm_eval.models.huggingface import HFLM
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)


@pytest.fixture(scope="module")
def theirs(folder):
    """Return figures of lm-eval's own `hf` model on the exported one, without and with a chat template."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    model = harness_model(folder)
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    return {
        chat: figures(
            simple_evaluate(
                model, tasks=TASKS.split(","), task_manager=manager, bootstrap_iters=0, apply_chat_template=chat
            )
        )
        for chat in (False, True)
    }


def printed(values):
    return {key: f"{value:.4f}" for key, value in values.items()}


def test_figures_equal_those_of_the_exported_model_in_transformers(folder, alone, theirs):
    assert len(theirs[False]) == 6 and {*printed(theirs[False]).values()} - {"0.0000", "1.0000"}
    assert printed(figures(alone)) == printed(theirs[False])
    assert alone["iteration"] == 60 and alone["n-samples"]["sound_choice"]["effective"] == 20


def test_chat_template_is_applied_as_in_transformers(folder, alone, theirs):
    found = evaluate_on(folder, 1, "ck", "--apply-chat-template")
    assert printed(figures(found)) == printed(theirs[True])
    counts = [sum(map(sum, each["routing"]["sound_choice"]["tokens_per_expert"])) for each in (alone, found)]
    assert counts[0] < counts[1]  # of the headers


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2",
        "--tensor-model-parallel-size 2 --sequence-parallel --batch-size 3",
    ],
)
def test_mapping_does_not_change_figures_or_routing(folder, alone, flags):
    found = evaluate_on(folder, 4 if "pipeline" in flags else 2, "ck", *flags.split())
    assert figures(found) == pytest.approx(figures(alone), rel=1e-6)
    assert found["routing"] == alone["routing"]


def test_hugging_face_folder_is_evaluated_directly(folder, alone):
    assert figures(evaluate_on(folder, 1, "hf")) == pytest.approx(figures(alone), rel=1e-6)


def test_routing_of_a_task_counts_its_tokens(folder, alone):
    """Every token goes to two experts, and no padding is counted."""
    from moe_trainer.data.tokenizer_libraries import open_hugging_face

    tokenizer = open_hugging_face(str(folder / "tok"), [], True, False, True)
    texts = [json.loads(line)["text"] for line in (folder / "tasks/sound_text.jsonl").read_text().splitlines()]
    assert all(64 < len(tokenizer.tokenize(text)) <= 128 for text in texts)  # two windows of 64 tokens each
    assert set(alone["routing"]) == set(TASKS.split(","))
    for task, table in alone["routing"].items():
        sums = [sum(counts) for counts in table["tokens_per_expert"]]
        assert (
            table["layers"] == [0, 1]
            and sums[0] == sums[1]
            and (sums[0] == 2 * 128 * len(texts) or task != "sound_text")
        )


def test_limit_and_examples_before_questions(folder):
    few = evaluate_on(folder, 1, "ck", "--limit", "4", "--report-html", "report.html")
    page = (folder / "report.html").read_text()
    assert all(f"Experts that serve {task}" in page for task in TASKS.split(",")) and "|sound_choice|" in page
    assert few["n-samples"]["sound_choice"] == {"original": 20, "effective": 4}
    assert few["n-shot"] == {"sound_choice": 1, "sound_text": 0, "sound_answer": 0}
    without = evaluate_on(folder, 1, "ck", "--limit", "4", "--num-fewshot", "0")
    assert without["n-shot"]["sound_choice"] == 0
    totals = [sum(map(sum, each["routing"]["sound_choice"]["tokens_per_expert"])) for each in (without, few)]
    assert totals[0] < 0.7 * totals[1]


def test_tasks_between_iterations_change_no_loss(folder, alone):
    """With dropout and an expert bias, so that random numbers and router statistics would show."""
    sensitive = "--attention-dropout 0.1 --hidden-dropout 0.1 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    job = [*MODEL, *sensitive.split(), "--train-iters", "5"]
    every = "--eval-tasks sound_choice,sound_text sound_answer --eval-tasks-interval 2 --eval-tasks-path tasks --tensorboard-dir tb"
    for name, more in (("without", []), ("with", [*every.split(), "--save", "looped", "--save-interval", "5"])):
        done = run([*job, *more, "--metrics-file", f"{name}.jsonl"], folder)
        assert done.returncode == 0, done.stderr
    plain, records = read_metrics(folder / "without.jsonl"), read_metrics(folder / "with.jsonl")
    tasks = [record for record in records if "task" in record]
    assert [r["lm loss"] for r in records if "lm loss" in r] == [r["lm loss"] for r in plain]
    assert [r["iteration"] for r in tasks] == [2] * 6 + [4] * 6 + [5] * 6
    assert " tasks at iteration 5 | sound_choice acc: " in done.stdout
    # the last ones are those of the saved model
    last = {(r["task"], f"{r['metric']},none"): r["value"] for r in tasks if r["iteration"] == 5}
    assert last == pytest.approx(figures(evaluate_on(folder, 1, "looped")), rel=1e-6)
    assert last != pytest.approx(figures(alone), rel=1e-3)
    stderr = {r["metric"]: r["stderr"] for r in tasks}
    assert stderr["acc"] > 0 and stderr["bits_per_byte"] is None
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    name = "tasks/sound_text/bits_per_byte"
    assert [event.step for event in events.Scalars(name)] == [2, 4, 5]
    assert events.Scalars(name)[-1].value == pytest.approx(last["sound_text", "bits_per_byte,none"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ck --tasks sound_choic --include-path tasks", "none of this name, nor has your folder of tasks; names like it: sound_choice"),
        ("ck --tasks sound_choice --include-path nowhere", "nowhere: no such folder"),
        ("nowhere --tasks sound_choice --include-path tasks", "nowhere: no such checkpoint directory"),
        ("tasks --tasks sound_choice --include-path tasks", "latest_checkpointed_iteration.txt is missing"),
        ("ck --tasks lost --include-path broken", "task lost: FileNotFoundError: Unable to find"),
        ("ck --tasks long --include-path broken", "answers of 64 tokens (max_gen_toks), the model has 64 positions"),
        ("ck --tasks sampled --include-path broken", "only greedy decoding"),
        ("ck --tasks , --include-path tasks", "no task is named"),
        ("ck --tasks empty --include-path broken", "StopIteration: its data have no rows"),
        ("ck --tasks sound_choice --include-path tasks --tokenizer-model /no/where", "--tokenizer-model /no/where"),
        ("ck --tasks sound_choice --include-path tasks --load=hf", "--load: the model is the first argument, ck"),
        ("ck --tasks sound_choice --include-path tasks --limit 1 --output /dev/full", "--output: cannot write /dev/full: No space left"),
        ("ck --tasks torn --include-path broken", "task torn: "),
        ("ck --tasks sound_choice --include-path tasks --frobnicate", "--frobnicate: this flag is unknown"),
    ],
)  # fmt: skip
def test_wrong_input_is_named(folder, words, message, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    broken = Path("broken")
    if not broken.exists():
        write_tasks(broken)
        (broken / "torn.yaml").write_text("task: torn\noutput_type: nonsense\n")
        choice = (broken / "sound_choice.yaml").read_text()
        (broken / "nothing.jsonl").write_text("")
        (broken / "empty.yaml").write_text(
            choice.replace("task: sound_choice", "task: empty").replace("sound_choice.jsonl", "nothing.jsonl")
        )
        answer = (broken / "sound_answer.yaml").read_text()
        (broken / "lost.yaml").write_text(answer.replace("sound_answer", "lost"))
        answer = answer.replace("task: sound_answer", "task: NAME")
        (broken / "long.yaml").write_text(answer.replace("NAME", "long").replace("max_gen_toks: 8", "max_gen_toks: 64"))
        (broken / "sampled.yaml").write_text(
            answer.replace("NAME", "sampled").replace("max_gen_toks: 8", "do_sample: true\n  temperature: 1.0")
        )
    assert evaluate.main(words.split()) == 2
    printed = capsys.readouterr().err
    assert message in printed and "Traceback" not in printed, printed
    assert Path("/dev/full").is_char_device()


def test_task_files_that_cannot_be_read_are_named(tmp_path):
    from moe_trainer.errors import UserError
    from moe_trainer.evaluation.lm_eval_model import _check_names

    write_tasks(tmp_path / "tasks")
    for name, content in (
        ("own", b"task: own\nfunction: !function a.b\n"),
        ("garbled", b"task: [garbled\n"),
        ("binary", b"\xff\0"),
        ("list", b"- task: list\n"),
    ):
        (tmp_path / f"tasks/{name}.yaml").write_bytes(content)
    with pytest.raises(
        UserError,
        match=r"none of this name.*binary.yaml cannot be read.*garbled.yaml cannot be read.*list.yaml has no table",
    ) as error:
        _check_names(["garbled"], ["own"], str(tmp_path / "tasks"))
    assert "own.yaml" not in str(error.value) and "sound" not in str(error.value)


def test_flag_that_the_checkpoint_overrides_is_named(folder, capsys, caplog, monkeypatch):
    monkeypatch.chdir(folder)
    words = "ck --tasks sound_choice --include-path tasks --limit 1 --num-layers=3"
    with caplog.at_level("INFO"):
        assert evaluate.main(words.split()) == 0
    printed = capsys.readouterr()
    assert "--num-layers 3: overridden by the checkpoint's value 2" in caplog.text + printed.out + printed.err
    assert "--eval-iters" not in caplog.text + printed.out + printed.err  # was not given


def test_missing_tasks_of_a_run_are_an_error_before_it_trains(folder):
    flags = "--train-iters 2 --eval-tasks sound_choice --eval-tasks-interval 1 --eval-tasks-path nowhere"
    done = run([*MODEL, *NO_DROPOUT, *flags.split()], folder)
    assert done.returncode == 2 and "--eval-tasks: nowhere: no such folder" in done.stderr
    assert "iteration        1" not in done.stdout and "Traceback" not in done.stderr


def test_random_generators_are_left_as_they_were():
    """Functions of task files may draw."""
    import random

    import numpy as np

    from moe_trainer.evaluation.lm_eval_model import unchanged_random_state

    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with unchanged_random_state():
        inside = draw()
    assert draw() == inside


def test_answer_ends_before_the_end_token_and_the_first_stop():
    from lm_eval.api.instance import Instance

    from moe_trainer.evaluation.lm_eval_model import TrainedModel
    from moe_trainer.inference.text import TextCodec

    class Codes:
        vocab_size, eod, pad, bos, unique_identifiers = 300, 0, None, None, {}

        def tokenize(self, text):
            return [*map(ord, text)]

        def plain_text(self, ids):
            return "".join(map(chr, ids))

    class Recited:
        """Writes one text whatever is asked."""

        max_length = 32

        def generate(self, prompts, options):
            self.prompts, text, written = prompts, [*b"one.two\0three."], []
            while len(written) < options.max_new_tokens and not (written and options.is_finished(written)):
                written.append(text[len(written)])
            return [written for _ in prompts]

    recited = Recited()
    model = TrainedModel(recited, recited, TextCodec(Codes()))
    settings = ({"until": ["."], "max_gen_toks": 12}, {"until": ["three"], "max_gen_toks": 12}, {"max_gen_toks": 2})
    requests = [Instance("generate_until", {}, ("q" * 40, each), 0, ("t", 0, 1)) for each in settings]
    assert model.generate_until(requests) == ["one", "one.two", "on"]
    assert len(recited.prompts[0]) == 30  # positions for the answer are left
    model.generate_until([Instance("generate_until", {}, ("", settings[0]), 0, ("t", 0, 1))])
    assert recited.prompts == [[0]]  # a text without context begins with the end of another

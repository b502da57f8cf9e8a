"""The study of upcycling: a small one from end to end, what it continues, its statistics and its task."""

import json
import math
import threading
import time
import xml.etree.ElementTree as ElementTree

import commands
import pytest

from moe_trainer.errors import UserError
from scripts import study_data, study_finermoe, study_report
from scripts.study_data import Size
from scripts.study_finermoe import ARMS, FULL, Run

TINY = {
    "SMOKE": Size(0.6, 600, 2, 3, 2, 0.02, 4),
    "MODEL": f"{study_finermoe.MODEL} --num-layers 2 --global-batch-size 4",
    "BATCH": 4,
}
run_script = study_data.run_program


def run_forked(script, words, log):
    """Run training in forks of this process, which has torch imported."""
    if script != "pretrain_moe.py":
        return run_script(script, words, log)
    done = commands.run(list(words), log.parent)
    log.write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stderr
    return None


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A finished study of the least size."""
    folder = tmp_path_factory.mktemp("study") / "out"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (*TINY.items(), ("run_program", run_forked)):
            patch.setattr(study_finermoe, name, value)
        assert study_finermoe.main([str(folder), "--smoke", "--no-task", "--jobs", "1"]) == 0
    return folder


def test_a_study_compares_upcycled_models_with_their_dense_model(study):
    results = json.loads((study / "results.json").read_text())
    assert {(result["arm"], result["seed"]) for result in results} == {
        (arm, seed) for arm in ("start", *ARMS) for seed in (1, 2)
    }
    for seed in (1, 2):
        found = {result["arm"]: result for result in results if result["seed"] == seed}
        dense = found["dense"]
        assert [tokens for tokens, _ in dense["curve"]] == [0, 2 * 4 * 128, 3 * 4 * 128]
        assert dense["loss"] < dense["loss_at_start"] - 0.01
        # copies compute what the dense model does, on the same text
        assert found["copies"]["loss_at_start"] == pytest.approx(dense["loss_at_start"], abs=1e-5)
        assert [len(found[arm]["tokens_per_expert"][0]) for arm in ("copies", "granular", "finermoe")] == [4, 8, 16]
        assert len({found[arm]["loss"] for arm in ARMS}) == 4
    assert results[1]["loss"] != results[6]["loss"]


def test_models_read_text_in_another_order_than_their_dense_model(study):
    flags = {
        name: json.loads((study / "runs" / f"{name}-seed1" / "metrics.jsonl").read_text().splitlines()[0])["run"][
            "settings"
        ]
        for name in ("start", *ARMS)
    }
    assert flags["start"]["seed"] == 1 and {flags[arm]["seed"] for arm in ARMS} == {1001}
    for name in ("train_data_path", "valid_data_path", "lr", "train_iters", "global_batch_size"):
        assert len({str(flags[arm][name]) for arm in ARMS}) == 1


def test_the_report_has_all_models_pairs_and_limits(study):
    text = (study / "report.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    titles = list(ARMS.values())
    assert [row[0] for row in rows].count("| dense, trained on") == 1
    assert sum(row[0].startswith("|") and " - " in row[0] for row in rows) == 6
    assert all(f"| {title}" in text for title in titles) and "cannot" in text
    for name in ("loss", "difference", "routing"):
        picture = ElementTree.fromstring((study / f"{name}.svg").read_text())
        assert f"{name}.svg" in text and len(list(picture.iter())) > 30
    assert (study / "report.html").read_text().count("<svg") == 3


def test_finished_runs_are_not_repeated(study, monkeypatch, capsys):
    """One is missing: only that one is executed."""
    executed = []

    def execute(study, run):
        executed.append(run.name)
        return json.loads(kept)

    path = study / "runs" / "copies-seed2.json"
    kept = path.read_text()
    path.unlink()
    before = (study / "report.md").read_text()
    for name, value in (*TINY.items(), ("execute", execute)):
        monkeypatch.setattr(study_finermoe, name, value)
    assert study_finermoe.main([str(study), "--smoke", "--no-task"]) == 0
    assert executed == ["copies-seed2"]
    assert "9 of 10 runs are finished already" in capsys.readouterr().out
    assert (study / "report.md").read_text() == before


def test_another_study_is_not_continued(study, tmp_path, capsys):
    assert study_finermoe.main([str(study), "--no-task"]) == 2
    assert "has another study (different: " in capsys.readouterr().err
    (tmp_path / "letter.txt").touch()
    assert study_finermoe.main([str(tmp_path)]) == 2
    assert "has no study.json" in capsys.readouterr().err
    for words in (["--seeds", "1"], ["--seeds", "11"], ["--jobs", "0"], ["--seeds", "few"]):
        with pytest.raises(SystemExit) as ended:
            study_finermoe.main([str(tmp_path / "new"), *words])
        assert ended.value.code == 2 and not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_damaged_files_of_a_study_are_named(tmp_path, monkeypatch, capsys, content):
    folder, result = tmp_path / "out", tmp_path / "out/runs/dense-seed1.json"
    monkeypatch.setattr(study_finermoe, "make_data", lambda data, size: result.write_text(content))
    assert study_finermoe.main([str(folder), "--smoke", "--no-task"]) == 1
    assert f"{result} is damaged (" in capsys.readouterr().err
    (folder / "study.json").write_text(content)
    assert study_finermoe.main([str(folder), "--smoke", "--no-task"]) == 2
    assert "study.json is damaged (" in capsys.readouterr().err


def test_a_failed_run_ends_the_study_and_shows_its_output(tmp_path, monkeypatch, capsys):
    """Runs that wait are not started; those of before keep their results."""
    executed, has_failed = [], threading.Event()

    def execute(study, run):
        executed.append(run.name)
        if has_failed.is_set():
            time.sleep(1.5)  # time for the main thread to cancel the others
        if run.arm == "copies":
            has_failed.set()
            raise UserError("pretrain_moe.py ended with exit code 1; the end of log.txt: out of memory")
        return {"arm": run.arm, "seed": run.seed, "seconds": 1.0, "loss": 2.0}

    monkeypatch.setattr(study_finermoe, "execute", execute)
    monkeypatch.setattr(study_finermoe, "make_data", lambda data, size: None)
    assert study_finermoe.main([str(tmp_path / "out"), "--no-task", "--jobs", "1"]) == 1
    assert "out of memory" in capsys.readouterr().err
    failed = next(at for at, name in enumerate(executed) if name.startswith("copies"))
    assert len(executed) - failed <= 2 and not list((tmp_path / "out" / "runs").glob("copies-*.json"))
    assert (tmp_path / "out" / "runs" / "start-seed1.json").exists()


def test_runs_next_to_a_failed_one_are_recorded(tmp_path, monkeypatch):
    """They end after it, so nothing waits for their result."""
    both = threading.Barrier(2)

    def execute(study, run):
        both.wait(60)
        if run.seed == 1:
            raise UserError("out of memory")
        time.sleep(0.3)
        return {"arm": run.arm, "seed": run.seed, "seconds": 1.0, "loss": 2.0}

    monkeypatch.setattr(study_finermoe, "execute", execute)
    monkeypatch.setattr(study_finermoe, "make_data", lambda data, size: None)
    assert study_finermoe.main([str(tmp_path / "out"), "--no-task", "--jobs", "2", "--seeds", "2"]) == 1
    assert [path.name for path in (tmp_path / "out" / "runs").iterdir()] == ["start-seed2.json"]


def test_a_failed_program_is_reported_with_the_end_of_its_log(tmp_path):
    with pytest.raises(UserError, match=r"(?s)exit code 2; the end of .*log.txt.*there is no such file"):
        run_script("scripts/quickstart_text.py", [str(tmp_path), "--text", "absent"], tmp_path / "log.txt")


def test_differences_are_taken_seed_by_seed():
    """Whatever the order of results; the dense models differ by much more than what is compared."""
    results = [
        {"arm": arm, "seed": seed, "curve": [[0, 9.0], [8, 4.0 + seed + shift + noise * seed]]}
        for arm, seeds, shift, noise in (("dense", (3, 1, 2), 0.0, 0.0), ("finermoe", (1, 2, 3), -0.1, 0.01))
        for seed in seeds
    ]
    found = study_report.loss_difference(results, "finermoe", "dense")
    assert found.mean == pytest.approx(-0.08) and found.excludes_zero
    assert found.half == pytest.approx(4.302653 * 0.01 / math.sqrt(3))
    assert study_report.loss_difference(results, "finermoe", "dense", 0).mean == 0.0


def test_routing_summary_of_known_loads():
    entropy, largest, dead = study_report.routing_summary([[4, 4, 4, 4], [8, 8, 0, 0]])
    assert (entropy, largest, dead) == (pytest.approx(0.75), 2.0, 2)


def test_time_left_follows_finished_runs_of_the_kind():
    runs = [Run(arm, seed) for seed in (1, 2) for arm in ("start", *ARMS)]
    everything = study_finermoe.minutes_left(FULL, runs, {}, 2)
    assert 10 < everything < 60
    results = {run: {"seconds": 120.0} for run in runs[:9]}
    assert study_finermoe.minutes_left(FULL, runs, results, 1) == pytest.approx(2.0)
    assert study_finermoe.minutes_left(FULL, runs, results, 2) == pytest.approx(1.0)
    assert study_finermoe.minutes_left(FULL, runs, dict.fromkeys(runs, {"seconds": 1.0}), 1) == 0.0


def test_questions_come_from_the_documents(tmp_path):
    """The answer is the line that follows; the others are as far indented."""
    document = "\n".join(f"{'    ' * (number % 2)}line number {number} of this document" for number in range(60))
    study_data.write_task([document], tmp_path / "tasks", 20)
    rows = [json.loads(line) for line in (tmp_path / "tasks" / "next_line.jsonl").read_text().splitlines()]
    assert len(rows) == 20 and len({row["answer"] for row in rows}) > 1
    for row in rows:
        assert row["before"] + row["choices"][row["answer"]] in document and len(set(row["choices"])) == 4
        assert len({line.startswith(" ") for line in row["choices"]}) == 1


def test_lm_eval_reads_the_task(tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from lm_eval.tasks import TaskManager, get_task_dict

    study_data.write_task(
        ["\n".join(f"a line of text with number {number}" for number in range(30))], tmp_path / "tasks", 5
    )
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    task = get_task_dict(["next_line"], manager)["next_line"]
    rows = list(task.test_docs())
    assert len(rows) == 5 and task.doc_to_target(rows[0]) == rows[0]["answer"]
    assert task.doc_to_choice(rows[0]) == rows[0]["choices"] and task.config.target_delimiter == ""

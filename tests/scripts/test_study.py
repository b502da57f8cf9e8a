"""The study of upcycling: a small one from end to end, what it continues, and its statistics."""

import json
import math

import commands
import pytest

from moe_trainer.errors import UserError
from scripts import study_finermoe
from scripts.study_finermoe import DENSE, START, WAYS, Size

TINY = {
    "SMOKE": Size(0.6, 600, 2, 3, 2),
    "MODEL": f"{study_finermoe.MODEL} --num-layers 2 --micro-batch-size 4 --global-batch-size 4 --log-interval 1",
}
run_script = study_finermoe.run_program


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
        assert study_finermoe.main([str(folder), "--smoke", "--jobs", "1"]) == 0
    return folder


def results_of(study):
    found = [json.loads(path.read_text()) for path in study.glob("runs/*/result.json")]
    return {(result["way"], result["seed"]): result for result in found}


def test_a_study_compares_upcycled_models_with_their_dense_model(study):
    results = results_of(study)
    assert set(results) == {(way, seed) for way in (START, *WAYS) for seed in (1, 2)}
    for seed in (1, 2):
        dense, *upcycled = (results[way, seed] for way in WAYS)
        assert dense["loss"] < dense["loss_at_start"] - 0.01
        # copies compute what the dense model does, on the same text
        assert upcycled[0]["loss_at_start"] == pytest.approx(dense["loss_at_start"], abs=1e-5)
        assert [len(each["tokens_per_expert"][0]) for each in upcycled] == [4, 8, 16]
        assert len({results[way, seed]["loss"] for way in WAYS}) == len(WAYS)
    assert results[START, 1]["loss"] != results[START, 2]["loss"]


def test_models_read_text_in_another_order_than_their_dense_model(study):
    flags = {}
    for path in study.glob("runs/*-seed1/metrics.jsonl"):
        flags[path.parent.name] = json.loads(path.read_text().splitlines()[0])["run"]["settings"]
    start = flags.pop("dense-before-seed1")
    assert start["seed"] == 1 and [each["seed"] for each in flags.values()] == [1001] * len(WAYS)
    for name in ("data_path", "split", "lr", "train_iters", "global_batch_size"):
        assert len({str(each[name]) for each in flags.values()}) == 1


def test_the_report_has_all_ways_pairs_and_runs(study):
    rows = [line.strip("| ").split(" | ") for line in (study / "report.md").read_text().splitlines()]
    names = [row[0] for row in rows]
    assert [names.count(way) for way in WAYS] == [1, 2, 2, 2]  # losses, and routing of those with experts
    assert sum(" - " in name and row[-1] != name for name, row in zip(names, rows, strict=True)) == 6
    assert [row[1] for row in rows if row[0] == "1"] == [f"{results_of(study)[START, 1]['loss']:.4f}"]


def test_finished_runs_are_not_repeated(study, monkeypatch):
    """One is missing: only that one is executed."""
    executed = []

    def run_program(script, words, log):
        executed.append(log.parent.name)
        return run_forked(script, words, log)

    (study / "runs" / "copies-seed2" / "result.json").unlink()
    before = (study / "report.md").read_text()
    for name, value in (*TINY.items(), ("run_program", run_program)):
        monkeypatch.setattr(study_finermoe, name, value)
    assert study_finermoe.main([str(study), "--smoke"]) == 0
    assert executed == ["copies-seed2"] * 2  # the evaluation at its start, and the training
    assert (study / "report.md").read_text() == before


def test_another_study_is_not_continued(study, tmp_path, capsys):
    assert study_finermoe.main([str(study)]) == 2
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
    folder, result = tmp_path / "out", tmp_path / "out/runs/dense-before-seed1/result.json"

    def make_data(data, size):
        result.parent.mkdir()
        result.write_text(content)

    monkeypatch.setattr(study_finermoe, "make_data", make_data)
    assert study_finermoe.main([str(folder), "--smoke"]) == 1
    assert f"{result} is damaged (" in capsys.readouterr().err
    (folder / "study.json").write_text(content)
    assert study_finermoe.main([str(folder), "--smoke"]) == 2
    assert "study.json is damaged (" in capsys.readouterr().err


def test_a_failed_run_ends_the_study(tmp_path, monkeypatch, capsys):
    def execute(folder, size, way, seed):
        if way == DENSE:
            raise UserError("pretrain_moe.py ended with exit code 1; the end of log.txt: out of memory")
        return {"way": way, "seed": seed, "loss": 2.0}

    monkeypatch.setattr(study_finermoe, "execute", execute)
    monkeypatch.setattr(study_finermoe, "make_data", lambda data, size: None)
    assert study_finermoe.main([str(tmp_path / "out"), "--jobs", "1"]) == 1
    assert "out of memory" in capsys.readouterr().err and not (tmp_path / "out" / "report.md").exists()


def test_a_failed_program_is_reported_with_the_end_of_its_log(tmp_path):
    with pytest.raises(UserError, match=r"(?s)exit code 2; the end of .*log.txt.*there is no such file"):
        run_script("scripts/quickstart_text.py", [str(tmp_path), "--text", "absent"], tmp_path / "log.txt")


def test_differences_are_taken_seed_by_seed():
    """Whatever the order of results; the dense models differ by much more than what is compared."""
    shifts = {way: -0.1 * number for number, way in enumerate(WAYS)}
    results = [
        {"way": way, "seed": seed, "loss": 4.0 + seed + shift + (0.01 * seed if shift else 0.0)}
        for way, shift in shifts.items()
        for seed in ((3, 1, 2) if shift else (1, 2, 3))
    ]
    row = study_finermoe.differences_table(results)[2].strip("| ").split(" | ")
    assert row[1:3] == ["-0.0800", f"{4.302653 * 0.01 / math.sqrt(3):.4f}"] and row[3] == "copies is better"


def test_routing_summary_of_known_loads():
    entropy, largest, dead = study_finermoe.routing_summary([[4, 4, 4, 4], [8, 8, 0, 0]])
    assert (entropy, largest, dead) == (pytest.approx(0.75), 2.0, 2)

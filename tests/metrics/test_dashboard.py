"""dashboard.html: its contents, size and write interval; errors never end a run. In a browser: test_dashboard_browser.py."""

import json
import math
import os
import re
import time
from pathlib import Path

import pytest
from commands import read_metrics
from metrics.test_logger import open_log, record

from moe_trainer.drawing.report_page import write_report
from moe_trainer.estimate.hardware import bf16_peak_tflops
from moe_trainer.metrics import dashboard as module
from moe_trainer.metrics import run_data, run_files
from moe_trainer.metrics.dashboard import Dashboard, dashboard_path_for, main, open_dashboard, read_runs
from moe_trainer.metrics.run_data import DownsampledList, RunData
from moe_trainer.metrics.run_state import RunEnd


def read_embedded_data(path):
    """The data in a page."""
    return read_embedded_data_of(path.read_text(encoding="utf-8"))


def read_run(path):
    """The only run of a page."""
    (run,) = read_embedded_data(path)["runs"]
    return run


def read_embedded_data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL).group(1))


def make_dashboard(path, name="run"):
    return Dashboard(path, RunData(name, str(path)))


def routing(iteration, layers=2, experts=4):
    loads = [[iteration + expert for expert in range(experts)] for _ in range(layers)]
    names = ("load_max_over_mean", "load_entropy", "dead_experts", "drop_rate", "bias_drift", "rank_max_over_mean")
    return {
        "layers": list(range(layers)),
        "straggler_cost": 0.1,
        "tokens_per_expert": loads,
        **{name: [1.0] * layers for name in names},
    }


def test_page_links_to_the_reports_in_the_folders_of_its_runs(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"iteration": 1}\n')
    assert main([str(tmp_path / "a")]) == 0  # a page is no report
    assert read_embedded_data(tmp_path / "a/dashboard.html")["reports"] == []
    for path in ("a/x: y#1.html", "b/tasks.html", "both.html", "other.html"):
        write_report(tmp_path / path, f"Title of {path}", "command", [], ["text"])
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "b/page.html")]) == 0
    links = {"x: y#1.html": "../a/x%3A%20y%231.html", "tasks.html": "tasks.html"}
    found = read_embedded_data(tmp_path / "b/page.html")["reports"]
    assert {each["title"].partition("/")[2]: each["url"] for each in found} == links
    open_dashboard(tmp_path / "a/metrics.jsonl").write()
    (found,) = read_embedded_data(tmp_path / "a/dashboard.html")["reports"]
    assert found == {"title": "Title of a/x: y#1.html", "file": "x: y#1.html", "url": "x%3A%20y%231.html"}


def test_every_script_of_the_page_is_in_it():
    page = Path(module.__file__).with_name("page")
    scripts = [path.name for path in page.glob("*.js") if not path.name.startswith("uPlot")]
    assert sorted(scripts) == sorted(module._SCRIPTS)
    assert (module._SCRIPTS[0], module._SCRIPTS[-1]) == ("values.js", "dashboard.js")  # the others in any order


def test_dashboard_is_written_next_to_the_metrics_file(tmp_path):
    head = {"train_iters": 2, "settings": {"lr": 0.1}, "all_settings": {"lr": 0.1, "bf16": True}, "started": 1.0}
    log = open_log(tmp_path / "metrics.jsonl", 2, peak_tflops=30.0, run=head)
    log.record(record(1, 4.0))
    first = read_run(tmp_path / "dashboard.html")
    assert first["records"]["series"]["lm loss"] == [4.0] and first["status"] == "running"
    log.record(record(2, 3.0))
    log.validation("iteration 2", "validation", {"lm loss": 3.5}, 2, 8)
    log.saved(2)
    log.end(RunEnd("finished", 2, 0, "all 2 iterations are done"), [2])
    log.close()
    run, (first, second, _) = read_run(tmp_path / "dashboard.html"), read_metrics(tmp_path / "metrics.jsonl")
    assert run["records"]["iteration"] == [1, 2]
    for name, values in run["records"]["series"].items():
        assert values == pytest.approx([first[name], second[name]], rel=1e-4), name
    assert run["records"]["constants"]["mfu"] == pytest.approx(3.0 / 30.0)
    assert [(each["set"], each["lm loss"]) for each in run["validations"]] == [("validation", 3.5)]
    assert [(each["kind"], each["text"]) for each in run["events"]] == [
        ("save", "saved a checkpoint at iteration 2"),
        ("end", "all 2 iterations are done"),
    ]
    assert run["status"] == "finished" and run["head"]["train_iters"] == 2
    assert run["head"]["settings"] == head["all_settings"] and run["head"]["changed"] == ["lr"]
    assert run["progress"]["wall_s"] == pytest.approx(second["time"] - 1.0, abs=1.0)
    assert first["interval_s"] == second["interval_s"] == 0.5


def test_dashboard_of_a_resumed_run_shows_earlier_iterations(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"iteration": {at}, "lm loss": {6.0 - at}}}\n' for at in (1, 2, 3)) + '{"itera')
    log = open_log(path, start=2)
    log.record(record(3, 2.0))
    log.record(record(4, 2.0))
    log.close()
    run = read_run(tmp_path / "dashboard.html")
    assert run["records"]["iteration"] == [1, 2, 3, 4] and run["records"]["series"]["lm loss"] == [5.0, 4.0, 2.0, 2.0]
    assert [(each["kind"], each["iteration"]) for each in run["events"]] == [("resume", 2)]


def test_dashboard_loads_no_external_resources(tmp_path):
    page = make_dashboard(tmp_path / "dashboard.html").page()
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:|#)|@import|url\(|XMLHttpRequest""", page)
    # only a page of scripts/dashboard.py asks its server
    assert page.count("fetch(") == 1 and page.index("if (data.live) {") < page.index("fetch(")
    assert "live" not in read_embedded_data_of(page)
    assert "uPlot (v1.6.32)" in page and "The MIT License (MIT)" in page and "@@" not in page.replace("@@iterator", "")


def test_dashboard_escapes_text_and_writes_nonfinite_values_as_null(tmp_path):
    nasty = "</script><script>alert(1)</script><!--"
    board = make_dashboard(tmp_path / "dashboard.html", nasty)
    board.add({"iteration": 1, "lm loss": math.nan, "grad_norm": math.inf, "run": {"settings": {nasty: nasty}}})
    assert nasty not in (tmp_path / "dashboard.html").read_text()
    run = read_run(tmp_path / "dashboard.html")
    assert run["head"]["settings"] == {nasty: nasty} and run["name"] == nasty
    assert run["records"]["series"] == {} and run["records"]["iteration"] == [1]  # neither can be drawn
    assert "NaN" not in (tmp_path / "dashboard.html").read_text().partition('id="data">')[2].partition("</script>")[0]


def test_dashboard_write_errors_are_reported_once(tmp_path, caplog):
    board = make_dashboard(tmp_path / "gone" / "dashboard.html")
    for iteration in (1, 2):
        board.take({"iteration": iteration})
        board.write()
    assert caplog.text.count("cannot write the dashboard") == 1
    (tmp_path / "gone").mkdir()
    board.write()
    assert read_run(tmp_path / "gone" / "dashboard.html")["records"]["iteration"] == [1, 2]


def test_full_disk_keeps_the_old_dashboard(tmp_path, monkeypatch, caplog):
    board = make_dashboard(tmp_path / "dashboard.html")
    board.add({"iteration": 1})
    old = (tmp_path / "dashboard.html").read_text()

    def full(self, text, encoding):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.Path, "write_text", full)
    board.take({"iteration": 2})
    board.write()
    assert (tmp_path / "dashboard.html").read_text() == old and "No space left on device" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["dashboard.html"]


def test_dashboard_writes_take_at_most_one_percent_of_the_time(tmp_path, monkeypatch):
    """A page that takes 0.1 s to write is written again after 10 s; a fast one after a second."""
    for taken, wait in ((0.1, 10.0), (0.0001, 1.0)):
        now, written = [0.0], []
        board = make_dashboard(tmp_path / "dashboard.html")
        monkeypatch.setattr(module.time, "monotonic", lambda now=now: now[0])

        def page(now=now, written=written, taken=taken):
            written.append(now[0])
            now[0] += taken
            return ""

        monkeypatch.setattr(board, "page", page)
        for iteration in range(1000):
            now[0] = max(now[0], iteration * 0.05)
            board.add({"iteration": iteration})
        gaps = [after - before for before, after in zip(written, written[1:])]
        assert len(gaps) >= 3 and all(wait - 1e-6 <= gap <= wait + taken + 0.06 for gap in gaps)


def test_downsampled_list_is_even_bounded_and_ends_with_the_newest():
    for length in (0, 1, 5, 9, 10, 11, 100, 1234):
        kept = DownsampledList(10)
        for item in range(length):
            kept.add(item)
        items = kept.items()
        assert len(items) <= 11 and items[:1] == list(range(length))[:1] and items[-1:] == list(range(length))[-1:]
        assert len({after - before for before, after in zip(items[:-1], items[1:-1])}) <= 1
        assert length != 100 or items == [*range(0, 97, 16), 99]
    assert DownsampledList(2).items() == []


def test_dashboard_of_a_long_run_of_a_large_model_stays_small(tmp_path):
    board, large = make_dashboard(tmp_path / "dashboard.html"), routing(1000, 58, 256)
    for iteration in range(1, 3001):
        board.take({"iteration": iteration, "lm loss": 1.23456789, **({} if iteration % 10 else {"routing": large})})
    begin = time.process_time()  # of this process: the machine may be busy
    board.write()
    assert time.process_time() - begin < 20.0
    assert (tmp_path / "dashboard.html").stat().st_size < 6e6
    run = read_run(tmp_path / "dashboard.html")
    for part in (run["routing"], run["routing"]["loads"], run["records"]):
        assert part["iteration"][-1] == 3000


def test_tokens_between_ranks_are_of_the_newest_expert_parallel_size():
    def between(size, value, ranks_per_row=1):
        return {"ranks_per_row": ranks_per_row, "tokens": [[value] * size] * size}

    run = RunData("run", "metrics.jsonl")
    right = [between(2, 1), between(4, 2), between(4, 3), between(4, 4, 2), between(4, 5)]
    wrong = [5, {}, {"tokens": [[1]]}, between(2, None), {"ranks_per_row": 1, "tokens": [[1], [2]]}, between(0, 1)]
    for iteration, found in enumerate([*right, *wrong]):
        run.take({"iteration": iteration, "routing": routing(1) | {"between_ranks": found}})
    page = run.as_page()["routing"]
    tokens = [between(4, value)["tokens"] for value in (2, 3, 5)]
    assert page["between_ranks"] == {"iteration": [1, 2, 4], "ranks_per_row": 1, "tokens": tokens}
    assert len(page["iteration"]) == 11


def test_tokens_between_many_ranks_stay_small():
    run, tokens = RunData("run", "metrics.jsonl"), [[12345] * 64] * 64
    for iteration in range(300):
        found = {"ranks_per_row": 4, "tokens": tokens}
        run.take({"iteration": iteration, "routing": routing(1) | {"between_ranks": found}})
    kept = run.as_page()["routing"]["between_ranks"]
    assert kept["iteration"][-1] == 299 and 10 < len(kept["iteration"]) < 30


def test_dashboard_command_reads_any_metrics_file(tmp_path, capsys):
    foreign = '{"iteration": 1, "routing": 5}\n{"iteration": 2, "routing": {}}\n{"iteration": 3, "lm loss": 4.0}\n'
    for name, text, losses in (
        ("old", '{"iteration": 1, "lm loss": 5.0}\n[1]\n', [5.0]),
        ("foreign", foreign, [None, None, 4.0]),
    ):
        (tmp_path / f"{name}.jsonl").write_text(text)
        assert main([str(tmp_path / f"{name}.jsonl")]) == 0
        assert read_run(tmp_path / f"{name}-dashboard.html")["records"]["series"] == {"lm loss": losses}
    (tmp_path / "foreign-dashboard.html").unlink()
    (tmp_path / "foreign-dashboard.html").mkdir()
    assert main([str(tmp_path / "foreign.jsonl")]) == 2
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_dashboard_command_shows_several_runs_in_one_page(tmp_path):
    folders = [str(tmp_path / name) for name in ("a/run", "b/run", "c")]
    for folder in folders:
        os.makedirs(folder)
        with open(f"{folder}/metrics.jsonl", "w") as file:
            file.write('{"iteration": 1, "lm loss": 5.0}\n')
    assert main([*folders, "-o", str(tmp_path / "all.html")]) == 0
    names = [run["name"] for run in read_embedded_data(tmp_path / "all.html")["runs"]]
    assert names == [folders[0], folders[1], "c"]  # names that are alike are paths
    with pytest.raises(ValueError, match="at most 20"):
        read_runs(folders * 7)


def test_description_of_a_run_has_the_types_that_the_page_reads():
    run = RunData("run", "path")
    run.take({"iteration": 1, "run": {
        "train_iters": 10**400, "mapping": [1], "settings": {"lr": 1e400, "num_experts": None, "tp": {"a": [10**400, 1]}},
        "model": {"seq_length": "many", "topk": 2, "name": None}, "hardware": {"hostnames": "node", "device": "cpu"},
    }})  # fmt: skip
    head = run.as_page()["head"]
    assert "train_iters" not in head and "mapping" not in head and head["hardware"] == {"device": "cpu"}
    assert head["settings"] == {"lr": None, "num_experts": None, "tp": {"a": [None, 1]}}
    assert head["model"] == {"topk": 2, "name": None}


def test_device_files_get_no_dashboard():
    assert open_dashboard("/dev/full") is None and dashboard_path_for("a/metrics.jsonl").name == "dashboard.html"


def test_peak_flops_by_device_name():
    known = {"H200": 989.4, "H100 80GB HBM3": 989.4, "GB200": 2500, "B200": 2250, "A100-SXM4-80GB": 312}
    unknown = dict.fromkeys(("H100 PCIe", "GH200 480GB", "GeForce RTX 4090"))
    for name, peak in {**known, **unknown}.items():
        assert bf16_peak_tflops(f"NVIDIA {name}") == peak, name


def test_dashboard_keeps_events_when_records_are_downsampled(tmp_path, monkeypatch):
    """For a resumed run with skipped iterations; also for a file that is too large to be parsed completely."""
    path = tmp_path / "metrics.jsonl"
    lines = [{"iteration": number} for number in range(1, 6001)]
    lines[3002] |= {"resumed_from": 3002}
    lines[4003] |= {"rejected": [{"iteration": 4001, "samples": [1, 2], "because": "the loss is nan"}]}
    lines.insert(5100, RunEnd("stopped", 5099, 0, "early").as_record())
    lines.insert(500, {"validation": "validation", "iteration": 500, "lm loss": 1.0})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for most, fewest in ((run_files.MAX_PARSED_BYTES, 1000), (10_000, 400)):
        monkeypatch.setattr(run_files, "MAX_PARSED_BYTES", most)
        open_dashboard(path).write()
        run = read_run(tmp_path / "dashboard.html")
        assert [(each["kind"], each["iteration"]) for each in run["events"]] == [
            ("resume", 3002),
            ("skip", 4001),
            ("end", 5099),
        ]
        assert [each["iteration"] for each in run["validations"]] == [500]
        assert fewest <= len(run["records"]["iteration"]) <= run_data.MAX_RECORDS + 1
        assert run["records"]["iteration"][-1] == 6000

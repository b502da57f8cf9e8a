"""scripts/compare.py on made-up runs: groups, figures at equal tokens, differences, errors."""

import json
import re

import pytest
from commands import call_main

from moe_trainer.commands.compare import main
from moe_trainer.comparison.report import comparison_figures
from moe_trainer.comparison.runs import Run, common_end, make_groups, settings_that_differ
from moe_trainer.metrics.dashboard import read_runs
from moe_trainer.metrics.run_state import RunEnd


def write_run(folder, seed=1, lr=1e-3, offset=0.0, iterations=100, parameters=1e6, described=(), **settings):
    folder.mkdir(parents=True)
    settings = {"seed": seed, "lr": lr, "save": str(folder), "ffn_hidden_size": 64, **settings}
    model = {"active_parameters": parameters, "seq_length": 10, "num_experts": 4}
    run = {"started": 1000.0, "train_iters": iterations, "model": model, "settings": settings, **dict(described)}
    with (folder / "metrics.jsonl").open("w") as file:
        for at in range(1, iterations + 1):
            loss = 2 + 3 / at**0.5 + offset + 0.01 * seed
            record = {"iteration": at, "consumed_samples": 10 * at, "lm loss": loss, "tokens_per_s": 100.0 + at}
            record |= {"time": 1000.0 + at, "interval_s": 0.9, "elapsed_ms": 900.0, "max_memory_mb": 2048}
            file.write(json.dumps(record | ({"run": run} if at == 1 else {})) + "\n")
        file.write(json.dumps({"validation": "validation", "iteration": iterations, "lm loss": loss + 0.1}) + "\n")
    return str(folder)


@pytest.fixture
def runs(tmp_path):
    low = [write_run(tmp_path / f"low-{seed}", seed) for seed in (1, 2, 3)]
    return [
        *low,
        *(write_run(tmp_path / f"high-{seed}", seed, lr=2e-3, offset=0.2, iterations=150) for seed in (1, 2, 3)),
    ]


def test_runs_that_differ_in_the_seed_are_one_group(runs):
    groups = make_groups(read_runs(runs))
    assert [(group.name, group.seeds) for group in groups] == [("low-1", (1, 2, 3)), ("high-1", (1, 2, 3))]
    assert settings_that_differ(groups) == [("lr", [1e-3, 2e-3])]
    again = make_groups(read_runs([runs[0], runs[0]]))
    assert len(again) == 2  # a repeated run is no further sample


def test_environments_that_differ_are_named(tmp_path, capsys):
    def described(nodes, version):
        mapping = {"world_size": 8 * nodes, "nodes": nodes}
        return {
            "mapping": mapping,
            "hardware": {"device": "H100"},
            "versions": {"torch": "2.13", "moe_trainer": version},
        }

    first = [write_run(tmp_path / f"a-{seed}", seed, described=described(1, f"0.{seed}")) for seed in (1, 2)]
    second = write_run(tmp_path / "b", lr=2e-3, described=described(2, "0.1"))
    old = write_run(tmp_path / "c", lr=3e-3, described={"mapping": "none"})
    assert main([*first, second, old]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert "| nodes | `1` | `2` | - |" in rows and "| ranks | `8` | `16` | - |" in rows
    assert "| moe-trainer version | `0.1, 0.2` | `0.1` | - |" in rows
    assert main([*first]) == 0  # also within a group
    rows = capsys.readouterr().out.splitlines()
    assert "| moe-trainer version | `0.1, 0.2` |" in rows and not any("torch" in row for row in rows)


def test_losses_are_compared_at_equal_tokens(runs):
    groups = make_groups(read_runs(runs))
    tokens = common_end(groups, "tokens")
    assert tokens == 100 * 10 * 10
    run = groups[1].runs[0]
    expected = sum(2 + 3 / at**0.5 + 0.21 for at in range(96, 101)) / 5
    assert run.loss_at("tokens", tokens) == pytest.approx(expected) and run.loss_at("tokens", 1.0) is None
    assert run.throughput == pytest.approx(100 + 83, abs=1) and run.memory_gib == 2.0


def test_report_names_differences_and_their_intervals(runs, tmp_path, capsys):
    with open(f"{runs[0]}/metrics.jsonl", "a") as file:
        file.write(json.dumps(RunEnd("failed", 100, 3, "another rank is gone").as_record()) + "\n")
    assert main([*runs, "--report-html", str(tmp_path / "report.html")]) == 0
    text = capsys.readouterr().out
    assert "| low-1 | low-1, low-2, low-3 | 1, 2, 3 | failed, running |" in text
    assert "- low-1: the run failed after iteration 100, exit code 3: another rank is gone" in text
    row = next(line for line in text.splitlines() if line.startswith("| training loss at equal tokens"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1].startswith("2.") and " +- " in cells[1] and cells[3] == "0.2000 +- 0.0000 *"
    assert "| `lr` | `0.001` | `0.002` |" in text and "`save`" not in text
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 2 and "million tokens" in page
    assert page.count("<table>") == 4 and "<h2>Settings that differ</h2>" in page and "| `lr` |" not in page
    assert "<td><code>lr</code></td><td><code>0.001</code></td><td><code>0.002</code></td>" in page
    assert "<li>low-1: the run failed after iteration 100" in page and "Text output" not in page
    assert "<td class='number'>0.2000 +- 0.0000 *</td>" in page and page.count("<h1>") == 1
    assert page.count("Comparison of runs</h") == 1 and "<p>Equal tokens: 10,000, which" in page


def add_validations(folder, **losses):
    with open(f"{folder}/metrics.jsonl", "a") as file:
        for name, values in losses.items():
            for at, loss in enumerate(values, 1):
                file.write(
                    json.dumps({"validation": f"validation-{name}", "iteration": 50 * at, "lm loss": loss}) + "\n"
                )


def test_validation_sets_are_compared_one_by_one(tmp_path, capsys):
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", lr=2e-3)
    add_validations(first, code=(3.0, 2.0), prose=(4.0, 3.5))
    add_validations(second, code=(3.0, 2.5))
    report = tmp_path / "report.html"
    assert main([first, second, "--report-html", str(report)]) == 0
    text = capsys.readouterr().out
    assert "| newest validation-code loss | 2 | 2.5000 | 0.5000 |" in text
    assert "| newest validation-prose loss | 3.5000 | - | - |" in text
    headings = re.findall("<h2>([^<]* over [^<]*)</h2>", report.read_text())
    assert headings == [
        "Training loss over million tokens",
        "Training loss over seconds",
        "Validation-code loss over iterations",
        "Validation-prose loss over iterations",
    ]


def lines_of(svg):
    """The lines of a picture, each a list of points."""
    found = re.findall(r'd="M([^"]*)"[^>]*stroke-width="2\.0"', svg)
    return [[tuple(map(float, point.split())) for point in line.split("L")] for line in found]


def test_pause_between_two_starts_is_no_line(tmp_path):
    folder = write_run(tmp_path / "run", iterations=20)
    file = tmp_path / "run/metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records[10:20]:
        record["time"] += 90_000.0
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokens, time = comparison_figures(make_groups(read_runs([folder])))
    assert [len(line) for line in lines_of(tokens.svg)] == [20] and time.heading == "Training loss over hours"
    assert [len(line) for line in lines_of(time.svg)] == [10, 10]


def test_run_that_diverged_leaves_the_others_visible(tmp_path):
    folders = [write_run(tmp_path / "good"), write_run(tmp_path / "bad", lr=9.0, offset=500.0)]
    figure = comparison_figures(make_groups(read_runs(folders)))[0]
    good, bad = lines_of(figure.svg)
    heights = [y for _, y in good[len(good) // 20 :]]
    assert max(heights) - min(heights) > 20 and {y for _, y in bad} == {62.0}  # along the upper edge
    assert re.fullmatch(r"Losses above \d+\.\d+ are drawn along the upper edge\.", figure.caption)


def test_ten_runs_have_ten_colors(tmp_path):
    folders = [write_run(tmp_path / str(number), lr=number + 1.0, iterations=4) for number in range(10)]
    svg = comparison_figures(make_groups(read_runs(folders)))[0].svg
    assert len(set(re.findall(r'stroke="([^"]*)" stroke-width="2.0"', svg))) == 10


def test_runs_without_losses_are_compared_by_what_they_have(runs, tmp_path, capsys):
    """Of one run every loss is NaN, of another some values of ranks are unknown."""
    lines = [json.loads(line) for line in (tmp_path / "low-1/metrics.jsonl").read_text().splitlines()]
    for name, change in (
        ("nan", {"lm loss": None}),
        ("gaps", {"own_time_ms": {"ranks": [1, 1], "memory_mb": [1, None]}}),
    ):
        (tmp_path / name).mkdir()
        kept = [{**line, **change} for line in lines if "validation" not in line]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    folders = [str(tmp_path / name) for name in ("nan", "gaps")]
    assert main([*folders, runs[0], "--report-html", str(tmp_path / "report.html")]) == 0
    text = capsys.readouterr().out
    assert "| training loss at equal tokens | - | 2." in text and "| peak memory in GiB | 2 | 2 |" in text
    assert main([folders[0], folders[0], "--report-html", str(tmp_path / "none.html")]) == 0
    assert (tmp_path / "report.html").read_text().count("<svg") == 2
    assert "<svg" not in (tmp_path / "none.html").read_text()


def test_figures_are_the_newest_and_those_of_the_worst_layer(runs):
    (page,) = read_runs(runs[:1])
    page["routing"] = {
        "metrics": {"load_max_over_mean": [[9.0, 9.0], [1.5, None]], "load_entropy": [[0.1, 0.1], [0.7, 0.8]]}
    }
    run = Run(page)
    assert run.validation_loss == page["validations"][-1]["lm loss"]
    assert run.routing("load_max_over_mean", max) == 1.5 and run.routing("load_entropy", min) == 0.7
    assert run.routing("load_entropy", max) == 0.8 and run.routing("dead_experts", max) is None


def test_differences_of_other_seeds_are_not_taken_seed_by_seed(tmp_path, capsys):
    folders = [write_run(tmp_path / f"low-{seed}", seed) for seed in (1, 2, 3)]
    folders += [write_run(tmp_path / f"high-{seed}", seed, lr=2e-3, offset=0.2) for seed in (4, 5, 6)]
    assert main(folders) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line for line in lines if line.startswith("| training loss at equal tokens"))
    assert row.endswith("| 0.2300 +- 0.0227 * |")  # Welch's, of variances that are equal


def test_runs_of_unknown_seed_are_no_group(tmp_path):
    pages = read_runs([write_run(tmp_path / str(number), seed=1) for number in (1, 2)])
    for page in pages:
        page["head"]["settings"].pop("seed")
    assert [len(group.runs) for group in make_groups(pages)] == [1, 1]


def test_curve_of_a_short_run_has_its_records_and_no_steps(tmp_path):
    (group,) = make_groups(read_runs([write_run(tmp_path / "short", iterations=7)]))
    svg = comparison_figures([group])[0].svg
    (line,) = re.findall(r'd="M([^"]*)"[^>]*stroke-width="2\.0"', svg)
    heights = [point.split()[1] for point in line.split("L")]
    assert len(heights) == len(set(heights)) == 7
    (group,) = make_groups(read_runs([write_run(tmp_path / "long", iterations=500)]))
    (line,) = re.findall(r'd="M([^"]*)"[^>]*stroke-width="2\.0"', comparison_figures([group])[0].svg)
    assert 60 < line.count("L") <= 120


def test_single_runs_have_no_note_on_intervals(tmp_path, capsys):
    assert main([write_run(tmp_path / "a"), write_run(tmp_path / "b", lr=2e-3)]) == 0
    assert "interval excludes zero" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "required: RUN"),
        (["none"], "no such file"),
    ],
)
def test_errors_are_clear(argv, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    done = call_main(main, argv, capsys)
    assert done.returncode == 2 and words in done.stderr

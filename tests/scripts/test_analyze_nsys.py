"""scripts/analyze_nsys.py on small reports with the tables of nsys."""

import json
import sqlite3

import pytest

from scripts import analyze_nsys as script

PROCESS = 77 << 24
MAIN, AUTOGRAD = PROCESS + 1, PROCESS + 2
PUSH_POP, START_END = 59, 60
TABLES = """
CREATE TABLE StringIds (id INTEGER, value TEXT);
CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, globalTid INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, globalPid INTEGER, correlationId INTEGER, shortName INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, globalPid INTEGER, correlationId INTEGER);
"""
# milliseconds: name, start, end, thread
RANGES = (
    ("iteration 7", 0, 100, MAIN, PUSH_POP),
    ("forward microbatch 1 chunk 0", 0, 30, MAIN, PUSH_POP),
    ("decoder.layers.0", 1, 20, MAIN, PUSH_POP),
    ("decoder.layers.0.self_attention", 1, 5, MAIN, PUSH_POP),
    ("dispatch", 6, 7, MAIN, PUSH_POP),
    ("decoder.layers.0.mlp.experts", 8, 12, MAIN, PUSH_POP),
    ("backward microbatch 1 chunk 0", 30, 60, MAIN, PUSH_POP),
    ("backward of decoder.layers.0.mlp.experts", 32, 40, AUTOGRAD, START_END),
    ("backward of dispatch", 39, 45, AUTOGRAD, START_END),
    ("optimizer", 70, 80, MAIN, PUSH_POP),
)
# name, launch, thread, start and end on the device
KERNELS = (
    ("flash_fwd", 2, MAIN, 2, 10),
    ("ncclDevKernel_SendRecv", 6, MAIN, 8, 20),  # 10..20 exposed
    ("gemm", 9, MAIN, 20, 30),
    ("gemm", 33, AUTOGRAD, 33, 50),
    ("deep_ep::internode::dispatch", 41, AUTOGRAD, 42, 48),  # hidden
    ("adam", 71, MAIN, 72, 76),
    (None, 90, MAIN, 90, 91),  # a copy
    ("gemm", 150, MAIN, 150, 160),  # of no iteration
)


def write_report(path, ranges=RANGES, change=""):
    """Write a report, then change it by SQL."""
    report, names = sqlite3.connect(path), {}

    def identify(name):
        if name not in names:
            names[name] = len(names)
            report.execute("INSERT INTO StringIds VALUES (?, ?)", (names[name], name))
        return names[name]

    def ms(*times):
        return [round(time * 1e6) for time in times]

    report.executescript(TABLES)
    for index, (name, start, end, thread, kind) in enumerate(ranges):
        text = (name, None) if index % 2 else (None, identify(name))  # both forms occur
        report.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", (*ms(start, end), kind, *text, thread))
    runtime = "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)"
    for number, (name, launch, thread, start, end) in enumerate(KERNELS):
        call = (*ms(launch, launch + 0.01), thread, number, identify("cudaLaunchKernel_v7000"))
        # the same number in another process is another launch
        report.executemany(runtime, [call, (0, 1, 78 << 24, number, call[4])])
        table, more = ("MEMCPY", ()) if name is None else ("KERNEL", (identify(name),))
        values = (*ms(start, end), PROCESS, number, *more)
        report.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_{table} VALUES ({', '.join('?' * len(values))})", values)
    report.execute(runtime, (*ms(80, 88), MAIN, 99, identify("cudaStreamSynchronize_v3020")))
    report.executescript(change)
    report.commit()
    report.close()
    return path


def test_time_goes_to_phases_and_is_hidden_exposed_or_idle(tmp_path, capsys):
    out = tmp_path / "numbers.json"
    assert script.main([str(write_report(tmp_path / "r.sqlite")), "--json", str(out)]) == 0
    (found,) = json.loads(out.read_text())
    assert found.pop("phases") == {
        "attention": 8.0,
        "dispatch": 12.0,
        "experts": 10.0,
        "experts backward": 17.0,
        "dispatch backward": 6.0,
        "optimizer": 4.0,
        "iteration, rest": 1.0,
    }
    assert found == {
        "name": "iteration 7",
        "span": 89.0,
        "compute": 40.0,
        "communication": 18.0,
        "exposed": 10.0,
        "idle": 39.0,
        "kernels": 7,
        "host_waits": 1,
        "host_wait": 8.0,
    }
    text = capsys.readouterr().out
    assert "experts backward" in text and "29.3 %" in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decoder.layers.12.mlp.shared_experts", "shared experts"),
        ("backward of mtp.layers.0", "layer, rest backward"),
        ("weight gradients microbatch 3 chunk 1", "weight gradients, outside layers"),
        ("backward of combine", "combine backward"),
    ],
)
def test_phases_have_no_numbers(name, expected):
    assert script.phase(name) == expected


def test_unusable_reports_give_a_reason(tmp_path, capsys):
    text = tmp_path / "text.sqlite"
    text.write_text("no database, but long enough to be read as one" * 40)
    empty = tmp_path / "empty.sqlite"
    sqlite3.connect(empty).close()
    damaged = write_report(tmp_path / "damaged.sqlite")
    damaged.write_bytes(damaged.read_bytes()[:4096] + b"\xff" * 8192)
    renamed = "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME COLUMN shortName TO longName"
    for path, reason in (
        (tmp_path / "none.sqlite", "there is no such file"),
        (tmp_path, "this is a directory"),
        (text, "no SQLite file"),
        (empty, "it has no CUPTI_ACTIVITY_KIND_KERNEL"),
        (write_report(tmp_path / "unmarked.sqlite", RANGES[1:]), "no ranges of iterations"),
        (damaged, "malformed"),
        (write_report(tmp_path / "other.sqlite", change=renamed), "no such column: k.shortName"),
    ):
        assert script.main([str(path)]) == 2
        assert reason in capsys.readouterr().err


def test_the_report_is_not_overwritten(tmp_path, capsys):
    path = write_report(tmp_path / "r.sqlite")
    before = path.read_bytes()
    with pytest.raises(SystemExit) as stopped:
        script.main([str(path), "--json", str(tmp_path / "." / "r.sqlite")])
    assert stopped.value.code == 2 and "is the report" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_any_file_name_is_read_and_an_unwritable_output_is_named(tmp_path, capsys):
    path = write_report(tmp_path / "a#b?c%20.sqlite")
    assert script.main([str(path)]) == 0
    assert script.main([str(path), "--json", str(tmp_path)]) == 2
    assert f"--json {tmp_path}: Is a directory" in capsys.readouterr().err


def test_kernels_without_duration_or_end(tmp_path):
    changes = [f"UPDATE CUPTI_ACTIVITY_KIND_{table} SET end = start;" for table in ("KERNEL", "MEMCPY")]
    changes += ["UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = NULL WHERE correlationId = 2"]
    assert script.main([str(write_report(tmp_path / "r.sqlite", change="".join(changes)))]) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("NVTX_EVENTS SET start = 'soon' WHERE end = 7000000", "NVTX_EVENTS has 'soon' where a time"),
        ("NVTX_EVENTS SET start = NULL", "NVTX_EVENTS has None where a time"),
        ("CUPTI_ACTIVITY_KIND_RUNTIME SET start = NULL", "KIND_KERNEL has None where a time"),
        ("CUPTI_ACTIVITY_KIND_RUNTIME SET start = 1.5", "has 1.5 where a time"),
        ("CUPTI_ACTIVITY_KIND_RUNTIME SET end = 'never'", "CUPTI_ACTIVITY_KIND_RUNTIME has 'never'"),
        ("CUPTI_ACTIVITY_KIND_KERNEL SET start = x'ff'", "KIND_KERNEL has b'\\xff'"),
        ("CUPTI_ACTIVITY_KIND_KERNEL SET end = 'x' WHERE correlationId = 1", "KIND_KERNEL has 'x'"),
        ("CUPTI_ACTIVITY_KIND_MEMCPY SET start = x'00'", "KIND_MEMCPY has b'\\x00'"),
        ("StringIds SET value = x'ff'", "has b'\\xff' where a time (an integer) or a name (text) is needed"),
    ],
)
def test_values_of_another_type_are_named(tmp_path, capsys, change, reason):
    path = write_report(tmp_path / "r.sqlite", change=f"UPDATE {change}")
    assert script.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"analyze_nsys.py: {path}: ") and reason in error

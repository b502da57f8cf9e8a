"""scripts/draw_profile.py: intervals of ranks from Chrome traces, and the picture of all ranks on one axis."""

import json
import math
import re

import pytest
from drawing.reading import SVG, assert_texts_are_apart, root

from moe_trainer.drawing.trace_timeline import Lane, merge, trace_timeline
from moe_trainer.metrics.profile_trace import BACKWARD, COMMUNICATION, COMPUTE, COPY, length, read_trace, trace_figure
from scripts import draw_profile

MS = 1000.0


def event(name, start, duration, category="cpu_op", thread=1):
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": thread, "ts": start * MS, "dur": duration * MS}


def write(path, events, rank=None, base_ms=0.0):
    content = {"traceEvents": [{"ph": "M", "name": "process_name"}, *events], "baseTimeNanoseconds": base_ms * 1e6}
    path.write_text(json.dumps(content | ({} if rank is None else {"distributedInfo": {"rank": rank}})))
    return path


CPU = [
    event("aten::linear", 0, 10),
    event("aten::mm", 1, 5),  # inside of the linear
    event("c10d::allreduce_", 10, 1),  # starts it only
    event("gloo:all_reduce", 8, 10, "user_annotation", 2),
    event("aten::copy_", 9, 1, thread=2),  # inside of the collective
    event("gloo:send", 0, 1, "user_annotation", 1),  # asynchronous
    event("autograd::engine::evaluate_function: MmBackward0", 15, 5),
]
GPU = [
    event("aten::linear", 0, 100),  # launches; kernels are what counts
    event("sm90_gemm", 5, 10, "kernel", 7),
    event("ncclDevKernel_AllGather", 10, 10, "kernel", 20),
    event("Memcpy HtoD", 30, 2, "gpu_memcpy", 7),
]


def test_trace_of_a_cpu(tmp_path):
    trace = read_trace(write(tmp_path / "t.json", CPU, rank=3, base_ms=100))
    assert trace.rank == 3
    assert dict(trace.work) == {
        COMPUTE: [(100, 110)],
        COMMUNICATION: [(108, 118), (100, 101)],
        BACKWARD: [(115, 120)],
    }
    assert trace.compute == [(100, 110), (115, 120)] and trace.communicate == [(100, 101), (108, 118)]
    assert trace.exposed == pytest.approx(5)


def test_trace_of_a_gpu(tmp_path):
    trace = read_trace(write(tmp_path / "rank12_iterations4-4.json", GPU))
    assert trace.rank == 12 and trace.exposed == pytest.approx(5)
    assert dict(trace.work) == {COMPUTE: [(5, 15)], COMMUNICATION: [(10, 20)], COPY: [(30, 32)]}


def test_merge_joins_what_overlaps_or_is_near():
    assert merge([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert merge([(0, 1), (1.5, 2), (4, 5)], gap=0.5) == [(0, 2), (4, 5)]
    assert merge([(0, 9), (1, 2)]) == [(0, 9)] and merge([]) == [] and length([(0, 2), (5, 6)]) == 3


def test_picture_has_one_axis_for_all_ranks(tmp_path):
    early, late = (read_trace(write(tmp_path / f"{rank}.json", CPU, rank, 100 + 20 * rank)) for rank in (0, 1))
    svg = trace_figure([early, late]).svg
    starts = {}
    for path in root(svg).findall(f"{SVG}path"):
        tip = path.findtext(f"{SVG}title")
        starts[tip.partition(":")[0]] = float(re.match(r"M([\d.]+)", path.get("d"))[1])
    # 40 ms in all: rank 1 starts 20 ms later; backward 15 ms after the start
    unit = (starts["rank 1, computation"] - starts["rank 0, computation"]) / 20
    assert starts["rank 0, backward"] - starts["rank 0, computation"] == pytest.approx(15 * unit, abs=0.2)
    assert "rank 0, computation: 10 ms, 25.0%" in svg
    assert_texts_are_apart(svg)


def test_long_traces_make_small_pictures():
    steps = tuple((number * 1.0, number + 0.6) for number in range(100_000))
    svg = trace_timeline(
        "t", "h", [("rank 0", [Lane("computes", ((COMPUTE, steps),))])], {COMPUTE: "#112233"}, 1e5, "ms"
    )
    assert len(svg) < 60_000 and f"{0.6 * 1e5:.4g} ms, 60.0%" in svg and math.isfinite(len(svg))


def test_table_and_page(tmp_path, capsys):
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}_iterations2-2.json", CPU, rank)
    write(tmp_path / "chakra_rank0_iterations2-2.json", [])
    page = tmp_path / "page.html"
    assert draw_profile.main([str(tmp_path), "--report-html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "2 ranks, 20.0 ms" in out and "15.0 ( 75%)" in out and "5.0 ( 25%)" in out
    assert out.strip() in page.read_text() and page.read_text().count("<svg ") == 1


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "the file cannot be read"),
        ("not json", "not a Chrome trace"),
        ("[]", "not a Chrome trace"),
        ('{"traceEvents": [{"ph": "X", "ts": "soon", "name": "a"}]}', "not a Chrome trace"),
        ('{"traceEvents": []}', "neither operators nor kernels"),
    ],
)
def test_what_is_no_trace_is_named(content, message, tmp_path, capsys):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    assert draw_profile.main([str(path)]) == 2
    err = capsys.readouterr().err
    assert message in err and str(path) in err


def test_folder_without_traces_and_two_traces_of_a_rank(tmp_path, capsys):
    assert draw_profile.main([str(tmp_path)]) == 2 and "no trace there" in capsys.readouterr().err
    for last in (2, 3):
        write(tmp_path / f"rank0_iterations2-{last}.json", CPU, 0)
    assert draw_profile.main([str(tmp_path)]) == 2
    assert "of rank 0 too; name one trace of each rank" in capsys.readouterr().err
    path = str(tmp_path / "rank0_iterations2-2.json")
    assert draw_profile.main([path, "--report-html", "/no/such/x.html"]) == 2
    assert "--report-html /no/such/x.html: the file cannot be written" in capsys.readouterr().err

"""scripts/dashboard.py: who is answered, what is served, and that it follows a run."""

import json
import os
import shutil
import signal
import socket
import threading
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import pytest
from metrics.sample_runs import write_eight_runs

from moe_trainer.checkpoint.directory import acquire_lock, is_locked
from moe_trainer.commands.dashboard import Runs, main, make_server
from moe_trainer.drawing.report_page import write_report


def write(folder, *records):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def served(tmp_path):
    """The address of a server of two runs, and their folder."""
    folder = tmp_path / "runs"
    for name in ("first", "deep/second"):
        write(folder / name, {"iteration": 1, "lm loss": 5.0, "run": {"train_iters": 3}})
    write(tmp_path / "outside", {"iteration": 1, "lm loss": 7.0})
    (folder / "link").symlink_to(tmp_path / "outside", target_is_directory=True)
    server, address = make_server(folder, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield address, folder
    server.shutdown()
    server.server_close()
    thread.join()


def get(address, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_lists_runs_and_serves_their_pages(served):
    address, _ = served
    data = json.loads(get(address + "data")[1])
    assert {entry["name"] for entry in data["list"]} == {"first", "deep/second"} and data["runs"] == []
    assert all(entry["lm_loss"] == 5.0 and entry["train_iters"] == 3 for entry in data["list"])
    for entry in data["list"]:
        origin = "http://" + urlsplit(address).netloc
        status, page = get(origin + entry["url"])
        assert status == 200 and page.startswith("<!doctype html>") and f'"name":"{entry["name"]}"' in page
    both = json.loads(get(address + "data?run=first&run=deep/second")[1])
    assert [run["name"] for run in both["runs"]] == ["first", "deep/second"]


def test_list_names_the_worst_finding(served):
    address, folder = served
    write(folder / "first", {"iteration": 2, "lm loss": None, "nan_iterations": 1})
    found = {entry["name"]: entry["finding"] for entry in json.loads(get(address + "data")[1])["list"]}
    assert found["deep/second"] is None and found["first"]["text"] == "1 of the newest iterations had a NaN loss"


def test_list_has_validation_loss_throughput_and_the_settings_that_a_run_set(served):
    address, folder = served
    for name, changed in (("first", {"lr": 0.1}), ("deep/second", {"seed": 2})):
        settings = {"lr": 3e-4, "seed": 1, "never_set": 7} | changed
        head = {"settings": changed, "all_settings": settings}
        write(
            folder / name,
            {"iteration": 2, "lm loss": 4.0, "tokens_per_s": 1000.0, "run": head},
            {"iteration": 3, "lm loss": 4.0, "tokens_per_s": 3000.0},
            {"validation": "validation", "iteration": 3, "lm loss": 4.5},
            {"validation": "test", "iteration": 3, "lm loss": 9.0},
        )
    data = json.loads(get(address + "data")[1])
    found = {entry["name"]: entry for entry in data["list"]}
    assert {name: entry["settings"] for name, entry in found.items()} == {
        "first": {"lr": 0.1, "seed": 1},
        "deep/second": {"lr": 3e-4, "seed": 2},
    }
    assert all(entry["validation_loss"] == 4.5 and entry["tokens_per_s"] == 2000.0 for entry in found.values())
    assert data["live"]["max_runs"] == 20 and "seed" in data["uncompared"]


@pytest.fixture
def lock():
    """Lock a folder in another process, which ends with the test or by `kill`."""
    processes = {}

    def start(folder):
        ready, begun = os.pipe()
        ended, end = os.pipe()
        if (process := os.fork()) == 0:
            os.close(end)
            acquire_lock(folder)
            os.write(begun, b"1")
            os.read(ended, 1)
            os._exit(0)
        processes[process] = (ready, begun, ended, end)
        os.read(ready, 1)
        return process

    def kill(process):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        for each in processes.pop(process):
            os.close(each)

    yield start, kill
    for process in list(processes):
        kill(process)


def test_list_alone_tells_eight_runs_apart(tmp_path, lock):
    start, kill = lock
    write_eight_runs(tmp_path)
    for name in ("healthy", "diverged", "stalled", "collapsed-router", "slow-rank"):
        start(tmp_path / name)
    kill(start(tmp_path / "killed"))
    entries = Runs(tmp_path).summaries(Runs(tmp_path).paths(), "")
    found = {each["name"]: (each["status"], (each["finding"] or {}).get("text")) for each in entries}
    routing = "layer 1: 6 of 8 experts (2-7) have received no token since iteration 1; the busiest expert (0) has 4.0"
    expected = {
        "healthy": ("running", ""),
        "diverged": ("running", "the training loss is 104: a uniform guess over 4,096 tokens has 8.32"),
        "nan": ("failed", "the run failed after iteration 2, exit code 16: iteration 3: the gradient norm is nan"),
        "killed": ("killed", "killed, no record since "),
        "stalled": ("stalled", "stalled, no record since "),
        "collapsed-router": ("running", routing),
        "slow-rank": ("running", "rank 2 computes 1.9 times as long as the others since iteration 1; they wait for it"),
        "finished": ("finished", ""),
    }
    assert {name: state for name, (state, _) in found.items()} == {name: state for name, (state, _) in expected.items()}
    for name, (_, text) in expected.items():
        assert (found[name][1] or "").startswith(text) and bool(found[name][1]) == bool(text), found[name]
    assert "its process is gone (kill -9" in found["killed"][1]
    died = [each["text"] for each in Runs(tmp_path).page("nan", 1)["findings"]]
    assert died[1].startswith("the training loss is 588: a uniform guess"), died
    assert found["stalled"][1].endswith("its process runs; it wrote one every 0.4 s before")


def test_lock_of_another_machine_says_nothing(tmp_path, lock):
    """Only the kernel of its machine knows whether a process holds it, but a lock that is held is held."""
    start, kill = lock
    assert is_locked(tmp_path) is None
    process = start(tmp_path)
    file = tmp_path / ".in_use"
    assert [is_locked(tmp_path) for _ in range(2)] == [True, True], "looking does not take or release it"
    file.write_text(file.read_text().replace(socket.gethostname(), "another"))
    assert is_locked(tmp_path) is True
    kill(process)
    assert is_locked(tmp_path) is None
    file.unlink()
    file.symlink_to("/dev/null")
    assert is_locked(tmp_path) is None


def test_reports_are_listed_with_the_runs_of_their_folder_and_served(served):
    address, folder = served
    origin = "http://" + urlsplit(address).netloc
    for path, title in (("all.html", "Laws"), ("first/a b.html", "<Tasks>"), ("deep/second/x.html", "Proof")):
        write_report(folder / path, title, "command", [], ["text"])
    (folder / "first/dashboard.html").write_text("<title>another page</title>")
    write_report(folder.parent / "secret.html", "Secret", "command", [], ["text"])
    (folder / "first/link.html").symlink_to(folder.parent / "secret.html")

    def listed(query):
        return {each["file"]: each for each in json.loads(get(address + query)[1])["reports"]}

    assert listed("data").keys() == {"all.html", "first/a b.html", "deep/second/x.html"}
    found = listed("data?run=first")
    assert {file: each["title"] for file, each in found.items()} == {"all.html": "Laws", "first/a b.html": "<Tasks>"}
    status, page = get(origin + found["first/a b.html"]["url"])
    assert status == 200 and "<title>&lt;Tasks&gt;</title>" in page
    with urllib.request.urlopen(origin + found["all.html"]["url"], timeout=10) as answer:
        policy = answer.headers["Content-Security-Policy"]
    assert "sandbox" in policy and "default-src 'none'" in policy  # it runs no script and loads nothing
    for wrong in ("first/dashboard.html", "first/link.html", "../secret.html", "first/metrics.jsonl", ""):
        assert get(f"{address}report?file={wrong}")[0] == 404, wrong


def test_chosen_runs_have_a_report(served):
    address, folder = served
    (made,) = json.loads(get(address + "data?run=first&run=deep/second")[1])["reports"]
    status, page = get("http://" + urlsplit(address).netloc + made["url"])
    assert status == 200 and "<h1>Comparison of runs</h1>" in page and f"compare.py {folder}/first" in page
    assert get(address + "report?run=first&run=none")[0] == 404
    name = os.fsdecode(b"\xff")
    write(folder / name, {"iteration": 7})
    assert get(address + "report?run=first&run=%FF")[0] == 200


def test_follows_a_run_and_its_torn_last_line(served):
    address, folder = served
    url = address + "data?run=first"

    def losses():
        return json.loads(get(url)[1])["runs"][0]["records"]["series"]["lm loss"]

    assert losses() == [5.0]
    with (folder / "first/metrics.jsonl").open("a") as file:
        file.write('{"iteration": 2, "lm l')
        file.flush()
        assert losses() == [5.0]
        file.write('oss": 4.0}\n')
    assert losses() == [5.0, 4.0] and losses() == [5.0, 4.0]
    (folder / "first/metrics.jsonl").write_text('{"iteration": 1, "lm loss": 6.0}\n')  # begun again
    assert losses() == [6.0]


def test_follows_a_run_that_repeats_iterations_after_a_kill(served):
    """The file is as long as before when it is read again, or longer."""
    address, folder = served
    path = folder / "first/metrics.jsonl"
    for first, last in ((4.0, 3.0), (2.0, 1.0)):
        path.write_text("")
        write(folder / "first", {"iteration": 1, "lm loss": first}, {"iteration": 2, "lm loss": last})
        run = json.loads(get(address + "data?run=first")[1])["runs"][0]
        assert run["records"]["series"]["lm loss"] == [first, last]
        assert run["records"]["iteration"] == [1, 2]


def test_answers_only_who_knows_the_token_and_the_address(served):
    address, _ = served
    origin = "http://" + urlsplit(address).netloc
    for path in ("/", "/data", "/wrong/", "/wrong/data?run=first", address.removeprefix(origin).rstrip("/")):
        assert get(origin + path)[0] == 403, path
    assert get(address, Host="example.org")[0] == 403  # another site that resolves to this machine
    assert get(address + "other")[0] == 404


@pytest.mark.parametrize("path", ["../outside", "first/../../outside", "link", "/etc", "nothing", "first/"])
def test_reads_nothing_but_runs_below_the_folder(served, path):
    address, _ = served
    status, text = get(address + "data?run=" + path)
    assert status == 404 and "7.0" not in text


def test_a_bad_run_or_name_hides_no_other_run(served):
    """A file of another program, numbers without a place in a page, and a name that is not UTF-8."""
    address, folder = served
    write(folder / "huge", {"iteration": 1, "elapsed_ms": 1.0, "run": {"train_iters": 10**400, "model": []}})
    (folder / "binary").mkdir()
    (folder / "binary/metrics.jsonl").write_bytes(bytes(range(256)) * 100)
    (folder / "folder/metrics.jsonl").mkdir(parents=True)
    write(folder / os.fsdecode(b"\xff\xfe"), {"iteration": 7})
    data = json.loads(get(address + "data")[1])
    assert {each["name"] for each in data["list"]} >= {"first", "deep/second", "huge", "binary"}
    (entry,) = (each for each in data["list"] if each["iteration"] == 7)
    assert entry["query"] == "run=%FF%FE"
    for url in (entry["url"], entry["url"].replace("?", "data?")):
        assert get("http://" + urlsplit(address).netloc + url)[0] == 200


def test_run_that_is_deleted_while_it_is_served(served, monkeypatch):
    address, folder = served
    assert get(address + "data?run=first")[0] == 200
    shutil.rmtree(folder / "first")
    assert get(address + "data?run=first")[0] == 404
    assert [each["name"] for each in json.loads(get(address + "data")[1])["list"]] == ["deep/second"]
    scan = os.scandir

    def scan_late(path):
        if str(path).endswith("deep"):
            shutil.rmtree(folder / "deep", ignore_errors=True)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_late)
    assert json.loads(get(address + "data")[1])["list"] == []


def test_request_that_is_no_address_is_answered(served):
    host, _, port = urlsplit(served[0]).netloc.partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(f"GET http://[::1 HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        assert b"400" in connection.recv(100).splitlines()[0]


def test_folder_that_is_missing_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "none")])
    assert ended.value.code == 2 and "not a directory" in capsys.readouterr().err
    assert Runs(tmp_path).paths() == []

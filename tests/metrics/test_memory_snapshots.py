"""Memory snapshots with torch.cuda.memory replaced: which rank writes, where, and what a full disk does."""

import torch

from moe_trainer.metrics.memory_snapshots import MemorySnapshotRecorder


class FakeCudaMemory:
    def __init__(self):
        self.recording, self.dumps = None, 0

    def _record_memory_history(self, max_entries):
        self.recording = max_entries

    def _dump_snapshot(self, path):
        self.dumps += 1
        with open(path, "w") as file:
            file.write(f"snapshot {self.dumps}")


def make_recorder(tmp_path, monkeypatch, rank, name="memory/snapshot.pickle"):
    observers = []
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    memory = FakeCudaMemory()
    recorder = MemorySnapshotRecorder(str(tmp_path / name), rank, writer=3, memory=memory)
    assert memory.recording > 0 and len(observers) == 1
    return recorder, memory, observers[0]


def test_writer_rank_replaces_its_memory_snapshot(tmp_path, monkeypatch):
    recorder, memory, _ = make_recorder(tmp_path, monkeypatch, 3)
    recorder.snapshot()
    recorder.snapshot()
    assert (tmp_path / "memory" / "snapshot.pickle").read_text() == "snapshot 2"
    assert [path.name for path in (tmp_path / "memory").iterdir()] == ["snapshot.pickle"]
    other, memory, _ = make_recorder(tmp_path, monkeypatch, 0)
    other.snapshot()
    assert memory.dumps == 0


def test_out_of_memory_writes_a_snapshot_on_every_rank(tmp_path, monkeypatch):
    _, _, observer = make_recorder(tmp_path, monkeypatch, 1)
    observer(0, 10, 10, 0)
    assert (tmp_path / "memory" / "oom_rank-1_snapshot.pickle").read_text() == "snapshot 1"


def test_failed_memory_snapshot_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    recorder, _, _ = make_recorder(tmp_path, monkeypatch, 3, "file/snapshot.pickle")
    recorder.snapshot()
    assert "--memory-snapshot-path: cannot write" in caplog.text

"""The faults of fault_table.py, as data: what happens to whom and where, and what is expected of the run that meets it.

A new one is a new entry: a `Strike` names the function at whose call something befalls a rank (actions: fault_ranks.ACTIONS), or
`damage` what is done to the files between two starts (fault_table.damage).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from scripts.fault_ranks import FileEdit, RankChange, Strike


@dataclass(frozen=True)
class Fault:
    """A fault and what is expected of the run that meets it.

    codes: a pattern of the exit codes, by rank. says: a pattern of what some rank says; its line stands in the table. again: likewise of
    the second start. on_disk: which outputs lie on the small disk. before: an action before the first start. damage: what is done to the
    files between the starts; healed: an action then. spoils: the newest checkpoint. records: whether metrics.jsonl must be complete at
    the end. edits: what is done to files before the first start, and undone before the second. changes: other variables or flags of the
    first start.
    """

    name: str
    when: str
    strikes: tuple[Strike, ...] = ()
    codes: str = "0 0"
    says: str = ""
    again: str = ""
    world: int = 2
    flags: str = ""
    on_disk: tuple[str, ...] = ()
    disk_size: str = "8m"
    before: str | None = None
    damage: str | None = None
    healed: str | None = None
    spoils: bool = False
    records: bool = True
    auto_resume: bool = True
    hosts: bool = False
    traceback: bool = False
    edits: tuple[FileEdit, ...] = ()
    changes: tuple[RankChange, ...] = ()


FORWARD = "moe_trainer.moe.router:TopKRouter.forward"
PIECE = "moe_trainer.checkpoint.planner:PieceSavePlanner.resolve_data"
LAYER = "moe_trainer.model.block:TransformerLayer.forward"
STEP = "moe_trainer.train:train_step"
SAVING = "moe_trainer.checkpoint.saving"
WRITE, MARK, RECORD = f"{SAVING}:PendingSave.write", f"{SAVING}:flush_file", "moe_trainer.report.metrics:MetricsLogger.record"
GONE = r"rank {}: gives no sign of life"
NO_SPACE = r"cannot save the checkpoint of iteration \d to .*No space left on device"


def killed(name: str, when: str, where: str, rank: int = 1, world: int = 2, **how) -> Fault:
    """kill -9 of a rank: the others end with 3."""
    strike = Strike("kill", where, rank, how.pop("iteration", None), how.pop("call", 1), how.pop("after", False))
    codes = how.pop("codes", " ".join("-9" if each == rank else "3" for each in range(world)))
    # with rank 0 goes the store that the others would ask
    how.setdefault("says", GONE.format(rank) if rank else "the job's store .* is gone|rank 0: gives no sign of life")
    return Fault(f"kill: {name}", when, (strike,), codes, world=world, **how)


def disk_is_full(name: str, when: str, on_disk: str, where: str, rank: int, iteration: int, until: int | None, **how) -> Fault:
    """The disk is full from a call on, until an iteration begins, or (None) for good."""
    strikes = (Strike("fill", where, rank, iteration),)
    strikes += () if until is None else (Strike("free", STEP, rank, until),)
    return Fault(f"full disk: {name}", when, strikes, on_disk=(on_disk,), healed="free" if until is None else None, **how)


def refused_data(name: str, says: str, *edits: FileEdit, codes: str = "2") -> Fault:
    """Token files are not what they should be, and are named."""
    return Fault(f"data: {name}", "before the start", codes=codes, says=says, edits=edits, world=1)


def refused_folder(name: str, flags: str, says: str, *edits: FileEdit) -> Fault:
    """A folder of the command line cannot be used."""
    return Fault(f"folder: {name}", "before the start", codes="2", says=says, edits=edits, world=1, changes=(RankChange(None, flags=flags),),
                 auto_resume=False)


def launched_wrong(name: str, codes: str, says: str, *changes: RankChange) -> Fault:
    """The ranks are not started as one job."""
    return Fault(f"launch: {name}", "before the start", codes=codes, says=says, changes=changes)


def variables(rank: int | None, **env: str) -> RankChange:
    return RankChange(rank, tuple(env.items()))


IDX, BIN, LENGTHS, STARTS = "text.idx", "text.bin", 34, 34 + 4 * 100  # of the hundred sequences of text
DOCUMENTS = STARTS + 8 * 100
LOOP = FileEdit("link", "loop", content=b"loop")

FAULTS = (
    killed("first of four ranks", "forward, iteration 5", FORWARD, 0, 4, iteration=5),
    killed("a middle rank of four", "forward, iteration 5", FORWARD, 1, 4, iteration=5),
    killed("last of four ranks", "forward, iteration 5", FORWARD, 3, 4, iteration=5),
    killed("before the ranks meet", "start-up", "moe_trainer.train:initialize", says=r"clients|[Tt]imed out", codes="[123] -9"),
    killed("start-up", "the model is built", "moe_trainer.train:build_run"),
    killed("data build", "rank 0 builds the index", "moe_trainer.run:build_datasets", 0),
    killed("backward", "backward, iteration 5", "moe_trainer.guard.layer_names:_backward", iteration=5),
    killed("all-reduce", "a reduction, iteration 5", "moe_trainer.parallel.collectives:all_reduce", iteration=5),
    killed("optimizer", "update, iteration 5", "moe_trainer.optim.optimizer:Optimizer.step", iteration=5),
    killed("evaluation", "validation after iteration 4", "moe_trainer.training.evaluation:run_microbatches", iteration=4),
    killed("save, before the shards", "save of iteration 6", WRITE, iteration=6),
    killed("save, in the shards", "save of iteration 6", PIECE, iteration=6, call=9),
    killed("save, before the index", "save of iteration 6", f"{SAVING}:FileSystemWriter.finish", 0, iteration=6),
    killed("save, at the mark", "save of iteration 6", MARK, 0, iteration=6),
    killed("save, before the rename", "save of iteration 6", f"{SAVING}:publish", 0, iteration=6),
    killed("save, before the tracker", "save of iteration 6", "moe_trainer.checkpoint.directory:write_tracker", 0, iteration=6),
    killed("save, after the tracker", "save of iteration 6", "moe_trainer.checkpoint.directory:write_tracker", 0, iteration=6, after=True),
    killed("save in the background", "its thread writes iteration 6", WRITE, iteration=6, flags="--async-save"),
    killed("save in the background, commit", "commit of iteration 3", f"{SAVING}:PendingSave.commit", flags="--async-save"),
    Fault("kill: both ranks at once", "in the shards of iteration 6", tuple(Strike("kill", PIECE, rank, 6, 9) for rank in (0, 1)), "-9 -9"),
    Fault("stop (SIGSTOP): first rank", "forward, iteration 5", (Strike("stop", FORWARD, 0, 5),), "-9 3",
          "rank 0: gives no sign of life|store .* is gone"),
    Fault("stop (SIGSTOP): last rank", "forward, iteration 5", (Strike("stop", FORWARD, 1, 5),), "3 -9", GONE.format(1)),
    Fault("hang: a rank computes for ever", "forward, iteration 5", (Strike("hang", FORWARD, 1, 5),), "3 -9",
          "rank 1: is alive and waits for nobody"),
    Fault("a collective that never completes", "one rank enters another one, iteration 5", (Strike("diverge", FORWARD, 1, 5),), "3 [13]",
          "all_to_all number", traceback=True),
    Fault("a mistake on one rank", "it raises in forward, iteration 5", (Strike("mistake", FORWARD, 1, 5),), "3 1",
          "rank 1: ended: KeyError", traceback=True),
    Fault("NaN at a layer, every time", "planted in a layer's output, iteration 5",
          (Strike("poison", LAYER, 1, 5, 0, after=True),), "16 16", "the loss is nan"),
    Fault("NaN at a layer, once", "planted in a layer's output, iteration 5", (Strike("poison", LAYER, 1, 5, 2, after=True),),
          says="the loss is nan; it is repeated"),
    disk_is_full("shard, for one save", "save of iteration 3", "save", WRITE, 1, 3, 4, says=NO_SPACE),
    disk_is_full("index, for one save", "save of iteration 3", "save", f"{SAVING}:FileSystemWriter.finish", 0, 3, 4, says=NO_SPACE),
    disk_is_full("tracker, for one save", "save of iteration 3", "save", "moe_trainer.checkpoint.directory:write_tracker", 0, 3, 4, says=NO_SPACE),
    disk_is_full("shard in the background, for one save", "save of iteration 3", "save", WRITE, 1, 3, 6, says=NO_SPACE, flags="--async-save"),
    disk_is_full("for good", "from iteration 4 on", "save", STEP, 0, 4, None, codes="2 2", says="This was the last save of the run"),
    disk_is_full("metrics, for a while", "iterations 2 to 6", "metrics", RECORD, 1, 2, 7, says="is written again; nothing is missing",
                 flags="--moe-per-layer-logging"),
    disk_is_full("metrics, for good", "from iteration 2 on", "metrics", RECORD, 1, 2, None, codes="2 2", records=False,
                 flags="--moe-per-layer-logging",
                 says="--metrics-file: cannot write .*No space left"),
    # (three iterations write more than the last page of a file, which is theirs already, has room for)
    disk_is_full("TensorBoard, for a while", "iterations 4 to 6", "tensorboard", RECORD, 1, 4, 7, says="--tensorboard-dir: cannot write",
                 flags="--moe-per-layer-logging", traceback=True),
    Fault("full disk: dashboard", "while it is written", (Strike("fill", "moe_trainer.report.dashboard:Dashboard.write"),
          Strike("free", "moe_trainer.report.dashboard:Dashboard.write", after=True)), says="the dashboard cannot be written", on_disk=("metrics",)),
    Fault("full disk: data cache", "the index is built", (Strike("fill", "moe_trainer.run:build_datasets", 0),
          Strike("free", "moe_trainer.run:build_datasets", 0, after=True)), says="the index cache .* cannot be written", on_disk=("cache",)),
    Fault("full disk: progress.txt", "save of iteration 3", (Strike("fill", f"{SAVING}:append_progress", 0, 3), Strike("free", STEP, 0, 4)),
          says="after saving the checkpoint of iteration 3: .*No space", on_disk=("save",), flags="--log-progress"),
    Fault("read-only: from the start", "before the start", before="read_only", healed="read_write", on_disk=("save",), codes="2 2",
          says="--save disk/ckpt: cannot write there: .*Read-only"),
    Fault("read-only: for one save", "save of iteration 3", (Strike("read_only", STEP, 0, 3), Strike("read_write", STEP, 0, 4)),
          on_disk=("save",), says="cannot save the checkpoint of iteration 3 .*Read-only"),
    Fault("read-only: for good", "from iteration 4 on", (Strike("read_only", STEP, 0, 4),), "2 2", "This was the last save of the run",
          on_disk=("save",), healed="read_write"),
    Fault("read-only: data cache", "from the start", before="read_only", healed="read_write", on_disk=("cache",),
          says="the index cache .* cannot be written"),
    Fault("vanishing mount: for good", "from iteration 4 on", (Strike("vanish", STEP, 0, 4),), "2 2", "no longer mounted",
          on_disk=("save",), healed="come_back"),
    Fault("vanishing mount: for one save", "save of iteration 3", (Strike("vanish", STEP, 0, 3), Strike("come_back", STEP, 0, 5)),
          says="no longer mounted", on_disk=("save",)),
    Fault("vanishing mount: metrics and TensorBoard", "from iteration 4 on", (Strike("vanish", STEP, 1, 4),), healed="come_back",
          on_disk=("metrics", "tensorboard"), says="--tensorboard-dir: cannot write", traceback=True),
    Fault("read-only: metrics and TensorBoard", "iterations 4 and 5", (Strike("read_only", STEP, 1, 4), Strike("read_write", STEP, 1, 6)),
          on_disk=("metrics", "tensorboard"), says="--tensorboard-dir: .* is written again", traceback=True),
    Fault("read-only: metrics, from the start", "before the start", before="read_only", healed="read_write", on_disk=("metrics",), codes="2 2",
          says="--metrics-file: cannot write .*Read-only"),
    Fault("slow disk", "12 s for a file, where a hang is 8 s", (Strike("slow", MARK, 0, 3),)),
    Fault("slow disk in the background", "12 s for the shards", (Strike("slow", WRITE, 1, 3),), flags="--async-save"),
    *(Fault(f"damaged newest checkpoint: {name}", "after iteration 6", damage=damage, spoils=spoils, flags="--exit-interval 6",
            again=r"is passed over|holds .* an iteration number|says \d+; the newest whole")
      for name, damage, spoils in (
          ("a bit of a shard", "flip", True), ("a shard cut off", "cut", True), ("a shard missing", "lose", True),
          ("mark missing", "unmark", True), ("index cut off", "cut_index", True), ("empty tracker", "empty_tracker", False),
          ("garbage in the tracker", "garbage_tracker", False), ("tracker names a missing one", "tracker_ahead", False))),
    Fault("metrics.jsonl with a torn last line", "killed while it was written", (Strike("kill", FORWARD, 1, 5),), "3 -9", GONE.format(1),
          damage="tear"),
    Fault("clock: a year ahead", "iteration 4, --exit-duration-in-mins 60", (Strike("later", STEP, 0, 4),), flags="--exit-duration-in-mins 60"),
    Fault("clock: a year back", "iteration 4, --exit-duration-in-mins 60", (Strike("earlier", STEP, 1, 4),), flags="--exit-duration-in-mins 60"),
    Fault("SIGTERM storm: a hundred at each rank", "save of iteration 3", (Strike("storm", WRITE, 0, 3), Strike("storm", WRITE, 1, 3)),
          "75 75", "exiting program after receiving SIGTERM"),
    Fault("SIGTERM: one rank only", "forward, iteration 5", (Strike("term", FORWARD, 1, 5),), "75 75", "exiting program after receiving SIGTERM"),
    Fault("SIGTERM: one rank, no --auto-resume", "forward, iteration 5", (Strike("term", FORWARD, 1, 5),), "3 -15", GONE.format(1),
          auto_resume=False),
    Fault("network cut between two hosts", "cable unplugged, iteration 5", (Strike("unplug", FORWARD, 1, 5),), "3 3",
          "gives no sign of life|store .* is gone|cannot be asked", hosts=True),
    Fault("out of memory: refused", "an allocation, iteration 5", (Strike("no_memory", FORWARD, 1, 5),), "3 1", "can't allocate memory",
          traceback=True),
    Fault("out of memory: killed", "by the kernel, iteration 5", (Strike("oom", FORWARD, 1, 5),), "3 -9", GONE.format(1)),
    Fault("data file cut off under the run", "iteration 4", (Strike("shorten", STEP, 1, 4),), "(-7|[123]) (-7|[123])", "text.bin|Bus error",
          healed="restore", traceback=True),
    refused_data("a negative length", "text.idx: sequence 0 has a negative length", FileEdit("patch", IDX, LENGTHS, struct.pack("<i", -5))),
    refused_data("a length of 2**31 - 1", "text.idx: sequence 0 ends beyond the file", FileEdit("patch", IDX, LENGTHS, struct.pack("<i", 2**31 - 1))),
    refused_data("a negative offset", "text.idx: sequence 1 begins before the file", FileEdit("patch", IDX, STARTS + 8, struct.pack("<q", -8))),
    refused_data("an odd offset", "text.idx: sequence 1 begins in the middle of a token", FileEdit("patch", IDX, STARTS + 8, struct.pack("<q", 601))),
    refused_data("an offset beyond the file", "text.idx: sequence 1 ends beyond the file", FileEdit("patch", IDX, STARTS + 8, struct.pack("<q", 1 << 40))),
    refused_data("documents that do not ascend", "text.idx: the document array does not ascend", FileEdit("patch", IDX, DOCUMENTS + 8, struct.pack("<q", 90))),
    refused_data("2**63 - 1 sequences", "the index is truncated", FileEdit("patch", IDX, 18, struct.pack("<q", 2**63 - 1))),
    refused_data("2**31 + 5 sequences", "the index is truncated", FileEdit("patch", IDX, 18, struct.pack("<q", 2**31 + 5))),
    refused_data("2**62 documents", "the index is truncated", FileEdit("patch", IDX, 26, struct.pack("<q", 2**62))),
    refused_data("a dtype that does not exist", "unknown dtype code 200", FileEdit("patch", IDX, 17, b"\xc8")),
    refused_data("an index of version 99", "index version 99", FileEdit("patch", IDX, 9, b"\x63")),
    refused_data("another file as index", "not a Megatron index", FileEdit("patch", IDX, 0, b"PK")),
    refused_data("an empty index", "found 0 bytes", FileEdit("cut", IDX)),
    refused_data("an index that is cut off", "the index is truncated", FileEdit("cut", IDX, 600)),
    refused_data("tokens that are cut off", "text.bin: found 1000 bytes", FileEdit("cut", BIN, 1000)),
    refused_data("no index", "text.idx: no such file", FileEdit("remove", IDX)),
    refused_data("no tokens", "text.bin: no such file", FileEdit("remove", BIN)),
    refused_data("tokens are a folder", "text.bin: ", FileEdit("directory", BIN)),
    refused_data("the index is a pipe", "text.idx: found 0 bytes", FileEdit("fifo", IDX)),
    refused_data("the index is a link to itself", "text.idx: cannot be read .*symbolic links", FileEdit("link", IDX, content=b"text.idx")),
    refused_data("the index cannot be read", "text.idx: found 0 bytes", FileEdit("link", IDX, content=b"/proc/self/mem")),
    refused_data("ids beyond the vocabulary", "token id 65535 in text.bin, sequence", *(
        FileEdit("patch", BIN, offset, b"\xff\xff") for offset in range(100, 60_000, 600))),
    refused_folder("--save is a file", "--save text.bin", "--save text.bin: cannot write there"),
    refused_folder("--save in a link to itself", "--save loop/ckpt", "--save loop/ckpt: cannot write there: .*symbolic links", LOOP),
    refused_folder("--save is a link to nothing", "--save gone", "--save gone: cannot write there",
                   FileEdit("link", "gone", content=b"nowhere/at/all")),
    refused_folder("the tracker in --save is a folder", "--save .", "latest_checkpointed_iteration.txt is a folder",
                   FileEdit("directory", "latest_checkpointed_iteration.txt")),
    refused_folder("--load is a link to itself", "--load loop", "--load loop: .*symbolic links", LOOP),
    refused_folder("--tensorboard-dir is a file", "--tensorboard-dir text.bin", "text.bin"),
    refused_folder("--tensorboard-dir in /proc", "--tensorboard-dir /proc/x", "/proc/x"),
    refused_folder("--metrics-file below a file", "--metrics-file text.bin/m.jsonl", "--metrics-file: cannot write text.bin/m.jsonl"),
    launched_wrong("another learning rate on rank 1", "2 2", "--lr: 0.001 on rank 0, 0.002 on rank 1", RankChange(1, flags="--lr 2e-3")),
    launched_wrong("another save interval on rank 1", "2 2", "--save-interval: 3 on rank 0, 2 on rank 1", RankChange(1, flags="--save-interval 2")),
    launched_wrong("both ranks are rank 0", "3 3", "did not all meet|no answer from", variables(1, RANK="0")),
    launched_wrong("rank 1 believes in four ranks", "[23] [23]", "did not all meet|no answer from|problem", variables(1, WORLD_SIZE="4")),
    launched_wrong("a host that does not exist", "3 3", "did not all meet|no answer from", variables(None, MASTER_ADDR="no-such-host.invalid")),
    launched_wrong("another program listens at the port", "3 3", "no answer from 127.0.0.1:.*another program", variables(None, MASTER_PORT="{listener}")),
    launched_wrong("a port that does not exist", "2 2", "MASTER_PORT must be from 1 to 65535", variables(None, MASTER_PORT="99999")),
    launched_wrong("no HOME, no USER, no TMPDIR", "0 0", "", variables(None, HOME="/nonexistent", USER="", TMPDIR="/nonexistent")),
    launched_wrong("a Turkish locale", "0 0", "", variables(None, LC_ALL="tr_TR.UTF-8", LANG="de_DE")),
    Fault("SIGHUP to both ranks", "forward, iteration 5", tuple(Strike("hangup", FORWARD, rank, 5) for rank in (0, 1)), "75 75",
          "exiting program after receiving SIGHUP"),
    Fault("SIGHUP, no --auto-resume", "forward, iteration 5", tuple(Strike("hangup", FORWARD, rank, 5) for rank in (0, 1)), "-1 -1",
          auto_resume=False),
    Fault("SIGUSR1 to one rank", "forward, iteration 5", (Strike("usr1", FORWARD, 0, 5),), "75 75", "exiting program after receiving SIGUSR1"),
    Fault("SIGINT to both ranks", "forward, iteration 5", tuple(Strike("interrupt", FORWARD, rank, 5) for rank in (0, 1)), "130 130", "interrupted"),
    Fault("SIGINT while the model is built", "start-up", (Strike("interrupt", "moe_trainer.train:build_run", 0),), "130", "interrupted", world=1),
    Fault("stop (SIGSTOP) for four seconds", "forward, iteration 5", (Strike("pause", FORWARD, 1, 5),)),
    Fault("standard output on a full disk", "from the start", (Strike("stdout_full", "moe_trainer.train:build_run", 0),), "0", world=1),
    Fault("few open files (ulimit -n)", "from the start", (Strike("few_files", "moe_trainer.train:build_run", 0),), "0", world=1),
    Fault("small files only (ulimit -f)", "save of iteration 3", (Strike("small_files", WRITE, 0, 3),), "2",
          "cannot save the checkpoint of iteration 3 .*File too large", world=1, records=False, traceback=True),
    Fault("out of memory: Python's own", "an allocation, iteration 5", (Strike("python_memory", FORWARD, 1, 5),), "3 2",
          r"out of host memory \(ulimit -v allows \d+ MiB\)"),
    Fault("fp16: every gradient overflows", "from the start", codes="1", says="the last 10 iterations made no update: gradients overflow fp16",
          world=1, changes=(RankChange(None, flags="--fp16 --train-iters 60 --save-interval 100 --initial-loss-scale 1e36 --min-loss-scale 1e36"),), records=False),
    *(Fault(f"damaged newest checkpoint: {name}", "after iteration 6", damage=damage, spoils=spoils, flags="--exit-interval 6", world=1,
            codes="0", again=again)
      for name, damage, spoils, again in (
          ("a tracker of 5000 digits", "tracker_digits", False, ""),
          ("metadata.json nested 100,000 deep", "deep_json", True, ""), ("metadata.json is a list", "list_json", True, ""),
          ("a pickle that runs code as index", "pickle_index", True, ""), ("a pickle that runs code as common.pt", "pickle_common", False, ""),
          ("a folder that contains itself", "link_inside", False, ""), ("the index cannot be read", "unreadable_index", True, ""),
          ("a shard cannot be read", "unreadable_shard", True, ""), ("the tracker cannot be read", "unreadable_tracker", False, ""))),
    Fault("metrics.jsonl: a record cut in the middle", "killed after iteration 5", (Strike("kill", FORWARD, 0, 5),), "-9", damage="tear_inside", world=1,
          again="metrics.jsonl: line 2 is damaged", records=False),
)

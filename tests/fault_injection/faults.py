"""Faults as data: what is injected where, and what the run is expected to do.

An `Injection` names the function call at which an action (ranks.ACTIONS) is applied to a rank; `damage` names a change to the
files between two runs (table.damage).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from fault_injection.ranks import FileEdit, Injection, RankOverride


@dataclass(frozen=True)
class Fault:
    """A fault and the expected behavior of the run.

    Attributes:
        codes: pattern of the exit codes, by rank.
        message: pattern of a line that some rank prints; the line is shown in the table.
        resume_message: the same for the second run.
        on_disk: outputs that are on the small disk.
        before: action before the first run.
        damage: change to the files between the runs.
        repair: action between the runs.
        damages_newest: whether `damage` makes the newest checkpoint unusable.
        records: whether metrics.jsonl must be complete at the end.
        edits: changes to files before the first run, undone before the second one.
        overrides: environment variables or flags of the first run only.
    """

    name: str
    when: str
    injections: tuple[Injection, ...] = ()
    codes: str = "0 0"
    message: str = ""
    resume_message: str = ""
    world: int = 2
    flags: str = ""
    on_disk: tuple[str, ...] = ()
    disk_size: str = "8m"
    before: str | None = None
    damage: str | None = None
    repair: str | None = None
    damages_newest: bool = False
    records: bool = True
    auto_resume: bool = True
    hosts: bool = False
    traceback: bool = False
    edits: tuple[FileEdit, ...] = ()
    overrides: tuple[RankOverride, ...] = ()


FORWARD = "moe_trainer.moe.router:TopKRouter.forward"
PIECE = "moe_trainer.checkpoint.save_planner:ShardSavePlanner.resolve_data"
LAYER = "moe_trainer.model.block:TransformerLayer.forward"
STEP = "moe_trainer.training.loop:train_step"
SAVING = "moe_trainer.checkpoint.saving"
FORMAT_WRITER = "moe_trainer.checkpoint.format_writer"
BACKGROUND = "--async-save --use-persistent-ckpt-worker"
WRITE, MARK, RECORD = (
    f"{SAVING}:PendingSave.write",
    f"{FORMAT_WRITER}:flush_file",
    "moe_trainer.metrics.logger:MetricsLogger.record",
)
GONE = r"rank {}: no heartbeat"
NO_SPACE = r"cannot save the checkpoint of iteration \d to .*No space left on device"


def killed(name: str, when: str, where: str, rank: int = 1, world: int = 2, **how) -> Fault:
    """Return the fault "kill -9 of one rank": the other ranks exit with 3."""
    injection = Injection("kill", where, rank, how.pop("iteration", None), how.pop("call", 1), how.pop("after", False))
    codes = how.pop("codes", " ".join("-9" if each == rank else "3" for each in range(world)))
    # rank 0 hosts the store that the other ranks query
    how.setdefault(
        "message", GONE.format(rank) if rank else "lost connection to the rendezvous store|rank 0: no heartbeat"
    )
    return Fault(f"kill: {name}", when, (injection,), codes, world=world, **how)


def disk_is_full(
    name: str, when: str, on_disk: str, where: str, rank: int, iteration: int, until: int | None, **how
) -> Fault:
    """Return the fault "disk full" from a call until an iteration starts; until None, forever."""
    injections = (Injection("fill", where, rank, iteration),)
    injections += () if until is None else (Injection("free", STEP, rank, until),)
    return Fault(
        f"full disk: {name}", when, injections, on_disk=(on_disk,), repair="free" if until is None else None, **how
    )


def refused_data(name: str, message: str, *edits: FileEdit, codes: str = "2") -> Fault:
    """Return a fault of the token files, which the error must name."""
    return Fault(f"data: {name}", "before the start", codes=codes, message=message, edits=edits, world=1)


def refused_folder(name: str, flags: str, message: str, *edits: FileEdit) -> Fault:
    """Return a fault of a folder on the command line."""
    return Fault(
        f"folder: {name}",
        "before the start",
        codes="2",
        message=message,
        edits=edits,
        world=1,
        overrides=(RankOverride(None, flags=flags),),
        auto_resume=False,
    )


def launched_wrong(name: str, codes: str, message: str, *overrides: RankOverride) -> Fault:
    """Return a fault of the launch: the ranks are not started as one job."""
    return Fault(f"launch: {name}", "before the start", codes=codes, message=message, overrides=overrides)


def variables(rank: int | None, **env: str) -> RankOverride:
    return RankOverride(rank, tuple(env.items()))


IDX, BIN, LENGTHS, STARTS = "text.idx", "text.bin", 34, 34 + 4 * 100  # of the hundred sequences of text
DOCUMENTS = STARTS + 8 * 100
LOOP = FileEdit("link", "loop", content=b"loop")

FAULTS = (
    killed("first of four ranks", "forward, iteration 5", FORWARD, 0, 4, iteration=5),
    killed("a middle rank of four", "forward, iteration 5", FORWARD, 1, 4, iteration=5),
    killed("last of four ranks", "forward, iteration 5", FORWARD, 3, 4, iteration=5),
    killed(
        "before the ranks meet",
        "start-up",
        "moe_trainer.training.pretrain:initialize",
        message=r"clients|[Tt]imed out",
        codes="[123] -9",
    ),
    killed("start-up", "the model is built", "moe_trainer.training.resume:build_run"),
    killed("data build", "rank 0 builds the index", "moe_trainer.training.data_setup:build_datasets", 0),
    killed("backward", "backward, iteration 5", "moe_trainer.resilience.layer_trace:_before_backward", iteration=5),
    killed("all-reduce", "a reduction, iteration 5", "moe_trainer.parallel.collectives:all_reduce", iteration=5),
    killed("optimizer", "update, iteration 5", "moe_trainer.optim.optimizer:Optimizer.step", iteration=5),
    killed("evaluation", "validation after iteration 4", "moe_trainer.training.evaluate:run_microbatches", iteration=4),
    killed("save, before the shards", "save of iteration 6", WRITE, iteration=6),
    killed("save, in the shards", "save of iteration 6", PIECE, iteration=6, call=9),
    killed("save, before the index", "save of iteration 6", f"{SAVING}:FileSystemWriter.finish", 0, iteration=6),
    killed("save, at the mark", "save of iteration 6", MARK, 0, iteration=6),
    killed("save, before the rename", "save of iteration 6", f"{SAVING}:publish", 0, iteration=6),
    killed(
        "save, before the tracker",
        "save of iteration 6",
        "moe_trainer.checkpoint.directory:write_tracker",
        0,
        iteration=6,
    ),
    killed(
        "save, after the tracker",
        "save of iteration 6",
        "moe_trainer.checkpoint.directory:write_tracker",
        0,
        iteration=6,
        after=True,
    ),
    killed("save in the background", "its thread writes iteration 6", WRITE, iteration=6, flags=BACKGROUND),
    killed("save in the background, commit", "commit of iteration 3", f"{SAVING}:PendingSave.commit", flags=BACKGROUND),
    Fault(
        "kill: both ranks at once",
        "in the shards of iteration 6",
        tuple(Injection("kill", PIECE, rank, 6, 9) for rank in (0, 1)),
        "-9 -9",
    ),
    Fault(
        "stop (SIGSTOP): first rank",
        "forward, iteration 5",
        (Injection("stop", FORWARD, 0, 5),),
        "-9 3",
        "rank 0: no heartbeat|lost connection to the rendezvous store",
    ),
    Fault(
        "stop (SIGSTOP): last rank", "forward, iteration 5", (Injection("stop", FORWARD, 1, 5),), "3 -9", GONE.format(1)
    ),
    Fault(
        "hang: a rank computes endlessly",
        "forward, iteration 5",
        (Injection("hang", FORWARD, 1, 5),),
        "3 -9",
        "rank 1: running, not blocked in a collective",
    ),
    Fault(
        "a collective that never completes",
        "one rank enters another one, iteration 5",
        (Injection("diverge", FORWARD, 1, 5),),
        "3 [13]",
        "all_to_all number",
        traceback=True,
    ),
    Fault(
        "a raise_error on one rank",
        "it raises in forward, iteration 5",
        (Injection("raise_error", FORWARD, 1, 5),),
        "3 1",
        "rank 1: run: KeyError",
        traceback=True,
    ),
    Fault(
        "NaN at a layer, every time",
        "planted in a layer's output, iteration 5",
        (Injection("poison", LAYER, 1, 5, 0, after=True),),
        "16 16",
        "the loss is nan",
    ),
    Fault(
        "NaN at a layer, once",
        "planted in a layer's output, iteration 5",
        (Injection("poison", LAYER, 1, 5, 2, after=True),),
        message="the loss is nan; rerunning the iteration",
    ),
    disk_is_full("shard, for one save", "save of iteration 3", "save", WRITE, 1, 3, 4, message=NO_SPACE),
    disk_is_full(
        "index, for one save",
        "save of iteration 3",
        "save",
        f"{SAVING}:FileSystemWriter.finish",
        0,
        3,
        4,
        message=NO_SPACE,
    ),
    disk_is_full(
        "tracker, for one save",
        "save of iteration 3",
        "save",
        "moe_trainer.checkpoint.directory:write_tracker",
        0,
        3,
        4,
        message=NO_SPACE,
    ),
    disk_is_full(
        "shard in the background, for one save",
        "save of iteration 3",
        "save",
        WRITE,
        1,
        3,
        6,
        message=NO_SPACE,
        flags=BACKGROUND,
    ),
    disk_is_full(
        "for good",
        "from iteration 4 on",
        "save",
        STEP,
        0,
        4,
        None,
        codes="2 2",
        message="This was the last save of the run",
    ),
    disk_is_full(
        "metrics, for a while",
        "iterations 2 to 6",
        "metrics",
        RECORD,
        1,
        2,
        7,
        message="again; no record is missing",
        flags="--moe-per-layer-logging",
    ),
    disk_is_full(
        "metrics, for good",
        "from iteration 2 on",
        "metrics",
        RECORD,
        1,
        2,
        None,
        codes="2 2",
        records=False,
        flags="--moe-per-layer-logging",
        message="--metrics-file: cannot write .*No space left",
    ),
    # (three iterations write more than the last page of a file, which is theirs already, can hold)
    disk_is_full(
        "TensorBoard, for a while",
        "iterations 4 to 6",
        "tensorboard",
        RECORD,
        1,
        4,
        7,
        message="--tensorboard-dir: cannot write",
        flags="--moe-per-layer-logging",
    ),
    Fault(
        "full disk: dashboard",
        "while it is written",
        (
            Injection("fill", "moe_trainer.metrics.dashboard:Dashboard.write"),
            Injection("free", "moe_trainer.metrics.dashboard:Dashboard.write", after=True),
        ),
        message="cannot write the dashboard",
        on_disk=("metrics",),
    ),
    Fault(
        "full disk: data cache",
        "the index is built",
        (
            Injection("fill", "moe_trainer.training.data_setup:build_datasets", 0),
            Injection("free", "moe_trainer.training.data_setup:build_datasets", 0, after=True),
        ),
        message="the index cache .* cannot be written",
        on_disk=("cache",),
    ),
    Fault(
        "full disk: progress.txt",
        "save of iteration 3",
        (Injection("fill", f"{SAVING}:append_progress", 0, 3), Injection("free", STEP, 0, 4)),
        message="after saving the checkpoint of iteration 3: .*No space",
        on_disk=("save",),
        flags="--log-progress",
    ),
    Fault(
        "read-only: from the start",
        "before the start",
        before="read_only",
        repair="unmount",
        on_disk=("save",),
        codes="2 2",
        message="--save disk/ckpt: cannot write there: .*Read-only",
    ),
    Fault(
        "read-only: for one save",
        "save of iteration 3",
        (Injection("read_only", STEP, 0, 3), Injection("unmount", STEP, 0, 4)),
        on_disk=("save",),
        message="cannot save the checkpoint of iteration 3 .*Read-only",
    ),
    Fault(
        "read-only: for good",
        "from iteration 4 on",
        (Injection("read_only", STEP, 0, 4),),
        "2 2",
        "This was the last save of the run",
        on_disk=("save",),
        repair="unmount",
    ),
    Fault(
        "read-only: data cache",
        "from the start",
        before="read_only",
        repair="unmount",
        on_disk=("cache",),
        message="the index cache .* cannot be written",
    ),
    Fault(
        "vanishing mount: for good",
        "from iteration 4 on",
        (Injection("unmount", STEP, 0, 4),),
        "2 2",
        "no longer mounted",
        on_disk=("save",),
        repair="come_back",
    ),
    Fault(
        "vanishing mount: for one save",
        "save of iteration 3",
        (Injection("unmount", STEP, 0, 3), Injection("come_back", STEP, 0, 5)),
        message="no longer mounted",
        on_disk=("save",),
    ),
    Fault(
        "vanishing mount: metrics and TensorBoard",
        "from iteration 4 on",
        (Injection("unmount", STEP, 1, 4),),
        repair="come_back",
        on_disk=("metrics", "tensorboard"),
        message="--tensorboard-dir: cannot write",
    ),
    Fault(
        "read-only: metrics and TensorBoard",
        "iterations 4 and 5",
        (Injection("read_only", STEP, 1, 4), Injection("unmount", STEP, 1, 6)),
        on_disk=("metrics", "tensorboard"),
        message="--tensorboard-dir: writing to .* again",
    ),
    Fault(
        "read-only: metrics, from the start",
        "before the start",
        before="read_only",
        repair="unmount",
        on_disk=("metrics",),
        codes="2 2",
        message="--metrics-file: cannot write .*Read-only",
    ),
    Fault("slow disk", "12 s for a file, where a hang is 8 s", (Injection("slow", MARK, 0, 3),)),
    Fault("slow disk in the background", "12 s for the shards", (Injection("slow", WRITE, 1, 3),), flags=BACKGROUND),
    *(
        Fault(
            f"damaged newest checkpoint: {name}",
            "after iteration 6",
            damage=damage,
            damages_newest=damages_newest,
            flags="--exit-interval 6",
            resume_message=r"skipping the checkpoint|skipping the damaged checkpoint|holds .* an iteration number|names iteration \d+; the latest valid",
        )
        for name, damage, damages_newest in (
            ("a bit of a shard", "flip", True),
            ("a shard cut off", "cut", True),
            ("a shard missing", "lose", True),
            ("mark missing", "unmark", True),
            ("index cut off", "cut_index", True),
            ("empty tracker", "empty_tracker", False),
            ("garbage in the tracker", "garbage_tracker", False),
            ("tracker names a missing one", "tracker_ahead", False),
        )
    ),
    Fault(
        "metrics.jsonl with a torn last line",
        "killed while it was written",
        (Injection("kill", FORWARD, 1, 5),),
        "3 -9",
        GONE.format(1),
        damage="tear",
    ),
    Fault(
        "clock: a year ahead",
        "iteration 4, --exit-duration-in-mins 60",
        (Injection("clock_ahead", STEP, 0, 4),),
        flags="--exit-duration-in-mins 60",
    ),
    Fault(
        "clock: a year back",
        "iteration 4, --exit-duration-in-mins 60",
        (Injection("clock_back", STEP, 1, 4),),
        flags="--exit-duration-in-mins 60",
    ),
    Fault(
        "SIGTERM storm: a hundred at each rank",
        "save of iteration 3",
        (Injection("send_many_sigterms", WRITE, 0, 3), Injection("send_many_sigterms", WRITE, 1, 3)),
        "75 75",
        "exiting program after receiving SIGTERM",
    ),
    Fault(
        "SIGTERM: one rank only",
        "forward, iteration 5",
        (Injection("term", FORWARD, 1, 5),),
        "75 75",
        "exiting program after receiving SIGTERM",
    ),
    Fault(
        "SIGTERM: one rank, no --auto-resume",
        "forward, iteration 5",
        (Injection("term", FORWARD, 1, 5),),
        "3 143",
        "rank 1: exited: terminated by a signal",
        auto_resume=False,
    ),
    Fault(
        "network cut between two hosts",
        "cable unplugged, iteration 5",
        (Injection("unplug", FORWARD, 1, 5),),
        "3 3",
        "no heartbeat|lost connection to the rendezvous store",
        hosts=True,
    ),
    Fault(
        "out of memory: refused",
        "an allocation, iteration 5",
        (Injection("no_memory", FORWARD, 1, 5),),
        "3 1",
        "can't allocate memory",
        traceback=True,
    ),
    Fault(
        "out of memory: killed",
        "by the kernel, iteration 5",
        (Injection("oom", FORWARD, 1, 5),),
        "3 -9",
        GONE.format(1),
    ),
    Fault(
        "data file cut off under the run",
        "iteration 4",
        (Injection("shorten", STEP, 1, 4),),
        "(-7|[123]) (-7|[123])",
        "text.bin|Bus error",
        repair="restore",
        traceback=True,
    ),
    refused_data(
        "a negative length",
        "text.idx: sequence 0 has a negative length",
        FileEdit("patch", IDX, LENGTHS, struct.pack("<i", -5)),
    ),
    refused_data(
        "a length of 2**31 - 1",
        "text.idx: sequence 0 ends beyond the file",
        FileEdit("patch", IDX, LENGTHS, struct.pack("<i", 2**31 - 1)),
    ),
    refused_data(
        "a negative offset",
        "text.idx: sequence 1 begins before the file",
        FileEdit("patch", IDX, STARTS + 8, struct.pack("<q", -8)),
    ),
    refused_data(
        "an odd offset",
        "text.idx: sequence 1 begins in the middle of a token",
        FileEdit("patch", IDX, STARTS + 8, struct.pack("<q", 601)),
    ),
    refused_data(
        "an offset beyond the file",
        "text.idx: sequence 1 ends beyond the file",
        FileEdit("patch", IDX, STARTS + 8, struct.pack("<q", 1 << 40)),
    ),
    refused_data(
        "documents that do not ascend",
        "text.idx: the document array does not ascend",
        FileEdit("patch", IDX, DOCUMENTS + 8, struct.pack("<q", 90)),
    ),
    refused_data(
        "2**63 - 1 sequences", "the index is truncated", FileEdit("patch", IDX, 18, struct.pack("<q", 2**63 - 1))
    ),
    refused_data(
        "2**31 + 5 sequences", "the index is truncated", FileEdit("patch", IDX, 18, struct.pack("<q", 2**31 + 5))
    ),
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
    refused_data(
        "the index is a link to itself",
        "text.idx: cannot be read .*symbolic links",
        FileEdit("link", IDX, content=b"text.idx"),
    ),
    refused_data(
        "the index cannot be read", "text.idx: found 0 bytes", FileEdit("link", IDX, content=b"/proc/self/mem")
    ),
    refused_data(
        "ids beyond the vocabulary",
        "token id 65535 in text.bin, sequence",
        *(FileEdit("patch", BIN, offset, b"\xff\xff") for offset in range(100, 60_000, 600)),
    ),
    refused_folder("--save is a file", "--save text.bin", "--save text.bin: cannot write there"),
    refused_folder(
        "--save in a link to itself", "--save loop/ckpt", "--save loop/ckpt: cannot write there: .*symbolic links", LOOP
    ),
    refused_folder(
        "--save is a link to nothing",
        "--save gone",
        "--save gone: cannot write there",
        FileEdit("link", "gone", content=b"nowhere/at/all"),
    ),
    refused_folder(
        "the tracker in --save is a folder",
        "--save .",
        "latest_checkpointed_iteration.txt is a folder",
        FileEdit("directory", "latest_checkpointed_iteration.txt"),
    ),
    refused_folder("--load is a link to itself", "--load loop", "--load loop: .*symbolic links", LOOP),
    refused_folder("--tensorboard-dir is a file", "--tensorboard-dir text.bin", "text.bin"),
    refused_folder("--tensorboard-dir in /proc", "--tensorboard-dir /proc/x", "/proc/x"),
    refused_folder(
        "--metrics-file below a file",
        "--metrics-file text.bin/m.jsonl",
        "--metrics-file: cannot write text.bin/m.jsonl",
    ),
    launched_wrong(
        "another learning rate on rank 1",
        "2 2",
        "--lr: 0.001 on rank 0, 0.002 on rank 1",
        RankOverride(1, flags="--lr 2e-3"),
    ),
    launched_wrong(
        "another save interval on rank 1",
        "2 2",
        "--save-interval: 3 on rank 0, 2 on rank 1",
        RankOverride(1, flags="--save-interval 2"),
    ),
    launched_wrong("both ranks are rank 0", "3 3", "did not all meet|no answer from", variables(1, RANK="0")),
    launched_wrong(
        "rank 1 believes in four ranks",
        "[23] [23]",
        "did not all meet|no answer from|problem",
        variables(1, WORLD_SIZE="4"),
    ),
    launched_wrong(
        "a host that does not exist",
        "3 3",
        "did not all meet|no answer from",
        variables(None, MASTER_ADDR="no-such-host.invalid"),
    ),
    launched_wrong(
        "another program listens at the port",
        "3 3",
        "no answer from 127.0.0.1:.*another program",
        variables(None, MASTER_PORT="{listener}"),
    ),
    launched_wrong(
        "a port that does not exist", "2 2", "MASTER_PORT must be from 1 to 65535", variables(None, MASTER_PORT="99999")
    ),
    launched_wrong(
        "no HOME, no USER, no TMPDIR", "0 0", "", variables(None, HOME="/nonexistent", USER="", TMPDIR="/nonexistent")
    ),
    launched_wrong("a Turkish locale", "0 0", "", variables(None, LC_ALL="tr_TR.UTF-8", LANG="de_DE")),
    Fault(
        "SIGHUP to both ranks",
        "forward, iteration 5",
        tuple(Injection("hangup", FORWARD, rank, 5) for rank in (0, 1)),
        "75 75",
        "exiting program after receiving SIGHUP",
    ),
    Fault(
        "SIGHUP, no --auto-resume",
        "forward, iteration 5",
        tuple(Injection("hangup", FORWARD, rank, 5) for rank in (0, 1)),
        "-1 -1",
        auto_resume=False,
    ),
    Fault(
        "SIGUSR1 to one rank",
        "forward, iteration 5",
        (Injection("usr1", FORWARD, 0, 5),),
        "75 75",
        "exiting program after receiving SIGUSR1",
    ),
    Fault(
        "SIGINT to both ranks",
        "forward, iteration 5",
        tuple(Injection("interrupt", FORWARD, rank, 5) for rank in (0, 1)),
        "130 130",
        "interrupted",
    ),
    Fault(
        "SIGINT while the model is built",
        "start-up",
        (Injection("interrupt", "moe_trainer.training.resume:build_run", 0),),
        "130",
        "interrupted",
        world=1,
    ),
    Fault("stop (SIGSTOP) for four seconds", "forward, iteration 5", (Injection("pause", FORWARD, 1, 5),)),
    Fault(
        "standard output on a full disk",
        "from the start",
        (Injection("stdout_full", "moe_trainer.training.resume:build_run", 0),),
        "0",
        world=1,
    ),
    Fault(
        "few open files (ulimit -n)",
        "from the start",
        (Injection("few_files", "moe_trainer.training.resume:build_run", 0),),
        "0",
        world=1,
    ),
    Fault(
        "small files only (ulimit -f)",
        "save of iteration 3",
        (Injection("small_files", WRITE, 0, 3),),
        "2",
        "cannot save the checkpoint of iteration 3 .*File too large",
        world=1,
        records=False,
        traceback=True,
    ),
    Fault(
        "out of memory: Python's own",
        "an allocation, iteration 5",
        (Injection("python_memory", FORWARD, 1, 5),),
        "3 2",
        r"out of host memory \(ulimit -v allows \d+ MiB\)",
    ),
    Fault(
        "fp16: every gradient overflows",
        "from the start",
        codes="1",
        message="the last 10 iterations made no update: gradients overflow fp16",
        world=1,
        overrides=(
            RankOverride(
                None,
                flags="--fp16 --train-iters 60 --save-interval 100 --initial-loss-scale 1e36 --min-loss-scale 1e36",
            ),
        ),
        records=False,
    ),
    *(
        Fault(
            f"damaged newest checkpoint: {name}",
            "after iteration 6",
            damage=damage,
            damages_newest=damages_newest,
            flags="--exit-interval 6",
            world=1,
            codes="0",
            resume_message=resume_message,
        )
        for name, damage, damages_newest, resume_message in (
            ("a tracker of 5000 digits", "tracker_digits", False, ""),
            ("metadata.json nested 100,000 deep", "deep_json", True, ""),
            ("metadata.json is a list", "list_json", True, ""),
            ("a pickle that runs code as index", "pickle_index", True, ""),
            ("a pickle that runs code as common.pt", "pickle_common", False, ""),
            ("a folder that contains itself", "link_inside", False, ""),
            ("the index cannot be read", "unreadable_index", True, ""),
            ("a shard cannot be read", "unreadable_shard", True, ""),
            ("the tracker cannot be read", "unreadable_tracker", False, ""),
        )
    ),
    Fault(
        "metrics.jsonl: a record cut in the middle",
        "killed after iteration 5",
        (Injection("kill", FORWARD, 0, 5),),
        "-9",
        damage="tear_inside",
        world=1,
        resume_message="metrics.jsonl: line 2 is damaged",
        records=False,
    ),
)

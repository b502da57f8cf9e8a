"""The faults of fault_table.py, as data: what happens to whom and where, and what is expected of the run that meets it.

A new one is a new entry: a `Strike` names the function at whose call something befalls a rank (actions: fault_ranks.ACTIONS), or
`damage` what is done to the files between two starts (fault_table.damage).
"""

from __future__ import annotations

from dataclasses import dataclass

from scripts.fault_ranks import Strike


@dataclass(frozen=True)
class Fault:
    """A fault and what is expected of the run that meets it.

    codes: a pattern of the exit codes, by rank. says: a pattern of what some rank says; its line stands in the table. again: likewise of
    the second start. on_disk: which outputs lie on the small disk. before: an action before the first start. damage: what is done to the
    files between the starts; healed: an action then. spoils: the newest checkpoint. records: whether metrics.jsonl must be complete at
    the end.
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
    killed("evaluation", "validation after iteration 4", "moe_trainer.train:run_microbatches", iteration=4),
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
)

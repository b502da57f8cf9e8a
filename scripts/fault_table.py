"""What a run loses to what goes wrong: faults, each injected into a real run of a tiny model, which is then started again.

    python scripts/fault_table.py                     all of them on this machine (needs no GPU; mounts and namespaces need root)
    python scripts/fault_table.py --only kill         those whose name has the word; --list names them all
    python scripts/fault_table.py --write             and keep the table as scripts/bench_results/faults.md

A case: ranks on CPU train 8 iterations of a small MoE with a checkpoint every 3 and --auto-resume; the fault (scripts/faults.py has the
list) strikes one rank at a named function (scripts/fault_ranks.py), or the files between two starts; the same command line is
started again. Compared with an undisturbed run of the same line: every record of metrics.jsonl (losses, gradient norm, learning rate,
samples, validation) and every byte of the exported weights. Lost are the iterations that were done and are done again; a case
fails when they are more than those since the last good checkpoint, when exit codes or messages are others than stated
in the list, or when one number differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts import fault_ranks, measuring  # noqa: E402
from scripts.fault_ranks import DISK, NotHere  # noqa: E402
from scripts.faults import FAULTS, Fault  # noqa: E402

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --ffn-hidden-size 32 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --num-experts 4 "
    "--moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-3 --lr-decay-style cosine --min-lr 1e-4 --attention-dropout 0.1 --hidden-dropout 0.1 --train-iters 8 "
    "--save-interval 3 --eval-interval 4 --eval-iters 1 --log-interval 1 --data-path text --split 80,20,0 --tokenizer-type NullTokenizer "
    "--vocab-size 120 --distributed-timeout-minutes 1 --distributed-timeout-seconds-after-init 8 --export-weights final.safetensors"
).split()
MAPPINGS = {
    1: [],
    2: "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --use-distributed-optimizer".split(),
    4: ("--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--use-distributed-optimizer").split(),
}
OUTPUTS = {"save": "ckpt", "metrics": "metrics.jsonl", "tensorboard": "tb", "cache": "cache"}
FLAGS = {"save": "--save", "metrics": "--metrics-file", "tensorboard": "--tensorboard-dir", "cache": "--data-cache-path"}


# ---- damage between two starts; the current folder is the case's

def newest(save: Path) -> Path:
    return max(save.glob("iter_???????"))


def damage(kind: str, save: Path) -> None:
    """Do something to the newest checkpoint, the tracker or metrics.jsonl."""
    tracker, shard = save / "latest_checkpointed_iteration.txt", next(newest(save).glob("*.distcp"))
    if kind == "flip":
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif kind == "cut":
        os.truncate(shard, shard.stat().st_size // 2)
    elif kind == "lose":
        shard.unlink()
    elif kind == "unmark":
        (newest(save) / "metadata.json").unlink()
    elif kind == "cut_index":
        os.truncate(newest(save) / ".metadata", 200)
    elif kind in ("empty_tracker", "garbage_tracker", "tracker_ahead"):
        tracker.write_text({"empty_tracker": "", "garbage_tracker": "\x00\x7f??", "tracker_ahead": "900"}[kind])
    elif kind == "tracker_digits":
        tracker.write_text("9" * 5000)
    elif kind in ("deep_json", "list_json"):
        (newest(save) / "metadata.json").write_text("[" * 100_000 if kind == "deep_json" else "[]")
    elif kind in ("pickle_index", "pickle_common"):
        path = newest(save) / {"pickle_index": ".metadata", "pickle_common": "common.pt"}[kind]
        path.write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
    elif kind == "link_inside":
        (newest(save) / "again").symlink_to(".")
    elif kind.startswith("unreadable"):
        path = {"unreadable_index": newest(save) / ".metadata", "unreadable_shard": shard, "unreadable_tracker": tracker}[kind]
        path.unlink()
        path.symlink_to("/proc/self/mem")  # whose first byte gives EIO
    elif kind == "tear_inside":
        lines = Path("metrics.jsonl").read_text().splitlines(keepends=True)
        lines[1] = lines[1][:40] + "\n"
        Path("metrics.jsonl").write_text("".join(lines))
    else:
        assert kind == "tear", kind
        with open("metrics.jsonl", "a") as stream:
            stream.write('{"iteration": 5, "consumed_sam')


# ---- running

@dataclass
class Row:
    """What became of a case. skipped: why it could not be tried here."""

    fault: Fault
    codes: str = ""
    said: str = ""
    done: int = 0
    saved: int = 0
    resumed: int = 0
    same: bool = False
    seconds: float = 0.0
    skipped: str = ""
    problems: list[str] = field(default_factory=list)


def command_line(fault: Fault, first: bool = True) -> list[str]:
    """The same line every time; what made the first run stop or be without --auto-resume is left out in the second."""
    outputs = [part for name, path in OUTPUTS.items()
               for part in (FLAGS[name], f"{DISK}/{path}" if name in fault.on_disk else path)]
    flags = fault.flags.split() if first or "--exit" not in fault.flags else []
    return [*MODEL, *MAPPINGS[fault.world], *outputs, *flags, *(["--auto-resume"] if fault.auto_resume or not first else [])]


def write_text(folder: Path) -> None:
    """Token files of a hundred small documents."""
    import numpy as np

    from moe_trainer.data.indexed import IndexedDatasetBuilder

    random = np.random.default_rng(0)
    with IndexedDatasetBuilder(str(folder / "text"), np.uint16) as builder:
        for _ in range(100):
            builder.add_sequence(random.integers(1, 119, size=300, dtype=np.uint16))
            builder.end_document()


def undisturbed(world: int, folder: Path) -> None:
    """Run the line without any fault. Raises: RuntimeError if that fails."""
    folder.mkdir(parents=True)
    write_text(folder)
    ended = fault_ranks.run_ranks(command_line(Fault("", "", world=world)), folder, world)
    if any(ended.codes):
        raise RuntimeError("the undisturbed run failed:\n" + "\n".join(ended.err))


def records(path: Path) -> list[dict]:
    """What must be the same: everything but times and memory."""
    kept = ("iteration", "consumed_samples", "lm loss", "load_balancing_loss", "grad_norm", "learning_rate", "loss_scale", "validation")
    return [{name: value for name, value in json.loads(text).items() if name in kept} for text in path.read_text().splitlines()]


def last_number(pattern: str, texts: Iterable[str]) -> int:
    return max((int(number) for text in texts for number in re.findall(pattern, text)), default=0)


def run_case(fault: Fault, folder: Path, whole: Path) -> Row:
    """Let it happen and start again; in this process, whose folder and mounts are changed."""
    row, begin = Row(fault), time.monotonic()
    folder.mkdir(parents=True)
    os.chdir(folder)
    hosts = (f"fault{os.getpid()}a", f"fault{os.getpid()}b") if fault.hosts else ()
    try:
        prepare(fault, whole, hosts)
        first = fault_ranks.run_ranks(command_line(fault), folder, fault.world, fault.strikes, hosts, changes=fault.changes)
        judge_first(row, first)
        mend(fault, whole, hosts)
        second = fault_ranks.run_ranks(command_line(fault, first=False), folder, fault.world, hosts=hosts)
        judge_second(row, second, whole)
    except NotHere as error:
        row.skipped = str(error)
    except Exception:  # noqa: BLE001 - a case that cannot be judged has failed, and the others go on
        row.problems.append(traceback.format_exc())
    finally:
        if hosts:
            fault_ranks.remove_hosts(hosts)
        fault_ranks.remove_memory_groups()
    row.seconds = time.monotonic() - begin
    return row


def prepare(fault: Fault, whole: Path, hosts: tuple[str, ...]) -> None:
    for ending in ("bin", "idx"):
        shutil.copy(whole / f"text.{ending}", f"text.{ending}")
    if fault.on_disk:
        fault_ranks.private_mounts()
        fault_ranks.make_disk(fault.disk_size)
    if hosts:
        fault_ranks.make_hosts(hosts)
    if any(strike.action == "oom" for strike in fault.strikes) and not os.access(fault_ranks.MEMORY_GROUPS / "memory.limit_in_bytes", os.R_OK):
        raise NotHere("no control group of memory (version 1) can be made here")
    for edit in fault.edits:
        edit.apply()
    if fault.before is not None:
        fault_ranks.ACTIONS[fault.before](None)


def mend(fault: Fault, whole: Path, hosts: tuple[str, ...]) -> None:
    for edit in reversed(fault.edits):
        edit.undo(whole)
    if fault.damage is not None:
        damage(fault.damage, Path("ckpt"))
    if fault.healed == "restore":
        shutil.copy(whole / "text.bin", "text.bin")
    elif fault.healed is not None:
        fault_ranks.ACTIONS[fault.healed](None)
    if hosts:
        fault_ranks.plug_in(hosts)


def judge_first(row: Row, ended: fault_ranks.Ended) -> None:
    fault, texts = row.fault, [*ended.out, *ended.err]
    row.codes = " ".join(map(str, ended.codes))
    row.done = last_number(r"(?m)^.* iteration +(\d+)/ +8 ", texts)
    row.saved = last_number(r"successfully saved checkpoint from iteration +(\d+)", texts)
    if fault.spoils:
        row.saved -= 3
    hear(row, fault.says, ended)
    if fault.codes and not re.fullmatch(fault.codes, row.codes):
        row.problems.append(f"exit codes {row.codes} instead of {fault.codes}\n" + "\n".join(ended.err))
    if not fault.traceback and any("Traceback" in text for text in ended.err):
        row.problems.append("a traceback\n" + "\n".join(ended.err))


def hear(row: Row, pattern: str, ended: fault_ranks.Ended) -> None:
    """Keep the first line that some rank said of what had to be said."""
    if pattern:
        lines = [line for text in (*ended.err, *ended.out) for line in text.splitlines() if re.search(pattern, line)]
        if lines:
            row.said = re.sub(r"^.*?pretrain_moe.py: |^\[rank \d+\] ", "", lines[0].strip())
        else:
            row.problems.append(f"nobody said {pattern!r}\n" + "\n".join(ended.err))


def judge_second(row: Row, ended: fault_ranks.Ended, whole: Path) -> None:
    hear(row, row.fault.again, ended)
    if any(ended.codes):
        row.problems.append(f"started again, it ended with {ended.codes}\n" + "\n".join(ended.err))
        return
    going_on = [int(number) for number in re.findall(r"going on from iteration (\d+)", ended.err[0])]
    row.resumed = going_on[-1] if going_on else 0
    if row.resumed < row.saved:
        row.problems.append(f"it went on from {row.resumed}, and {row.saved} had been saved\n{ended.err[0]}")
        return
    line_given = command_line(row.fault)
    metrics = Path(line_given[line_given.index("--metrics-file") + 1])
    if Path("executed").exists():
        row.problems.append("a file of the checkpoint was executed")
    row.same = Path("final.safetensors").read_bytes() == (whole / "final.safetensors").read_bytes()
    if row.fault.records:
        row.same = row.same and records(metrics) == records(whole / "metrics.jsonl")
    if not row.same:
        row.problems.append("not the numbers of the undisturbed run")


def run_apart(fault: Fault, folder: Path, whole: Path):
    """Begin a case in a process of its own. Returns: the process and the pipe that its row comes through."""
    here, there = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: there.send(run_case(fault, folder, whole)))
    process.start()
    return process, here


def run_faults(faults: list[Fault], folder: Path, jobs: int = 1, tell=print) -> list[Row]:
    """Run the cases, `jobs` at a time; rows in the order of `faults`."""
    folder = folder.resolve()
    load_program()
    for world in {fault.world for fault in faults}:
        undisturbed(world, folder / f"undisturbed{world}")
    waiting, running, rows = list(enumerate(faults)), {}, {}
    while waiting or running:
        while waiting and len(running) < jobs:
            number, fault = waiting.pop(0)
            running[number] = run_apart(fault, folder / f"case{number}", folder / f"undisturbed{fault.world}")
        for number, (process, pipe) in list(running.items()):
            ended = not process.is_alive()  # asked first: what it sent before its end is in the pipe then
            if pipe.poll(0.05):
                rows[number] = pipe.recv()
            elif ended:
                rows[number] = Row(faults[number], problems=[f"the case died with {process.exitcode}"])
            if number in rows:
                process.join()
                del running[number]
                tell(line(rows[number]))
    return [rows[number] for number in sorted(rows)]


def load_program() -> None:
    """Import what the ranks need, once for all: they are forked from here."""
    import torch

    torch.set_num_threads(1)
    import torch._dynamo  # noqa: F401 - torch would import it at the first optimizer step

    import moe_trainer.train  # noqa: F401
    import pretrain_moe  # noqa: F401


# ---- telling

def verdict(row: Row) -> str:
    return f"skipped: {row.skipped}" if row.skipped else "FAILED" if row.problems else "as documented"


def lost(row: Row) -> str:
    """Iterations that were done and had to be done again."""
    again = row.done - row.resumed
    if not row.fault.records:
        return f"{again}, and records of metrics.jsonl"
    return str(again)


def line(row: Row) -> str:
    return (f"{row.fault.name}: codes {row.codes}; done {row.done}, saved {row.saved}, went on from {row.resumed}; "
            f"{'same' if row.same else 'not the same'}; {row.seconds:.0f} s; {verdict(row)}")


def table(rows: list[Row]) -> str:
    head = ("| fault | when | exit codes | said | iterations done | last good save announced | went on from | iterations lost | then equal, bit for bit |\n"
            "|---|---|---|---|---|---|---|---|---|")
    lines = []
    for row in rows:
        said = row.said.replace("|", "\\|")
        said = said if len(said) <= 160 else f"{said[:157]}..."
        cells = [row.fault.name, row.fault.when, row.codes, said, row.done, row.saved, row.resumed, lost(row), "yes" if row.same else "NO"]
        if row.skipped:
            cells = [row.fault.name, row.fault.when, f"not tried: {row.skipped}", *[""] * 6]
        lines.append("| " + " | ".join(str(cell).encode("ascii", "replace").decode() for cell in cells) + " |")
    return "\n".join([head, *lines])


def summary(rows: list[Row]) -> str:
    """One sentence on all of them."""
    tried = [row for row in rows if not row.skipped]
    good = [row for row in tried if not row.problems]
    behind = [row for row in tried if row.resumed < row.saved]
    other = [row for row in tried if not row.same]
    worst = max((row.done - row.resumed for row in tried), default=0)
    return (f"{len(tried)} faults ({len(rows) - len(tried)} more could not be tried here), {len(good)} as documented. {len(behind)} runs lost more than the "
            f"work since the last good save (at most {worst} iterations: a save every 3, and some of them refused by the disk). Of the runs "
            f"that were started again {len(tried) - len(other)} equal the undisturbed one bit for bit, {len(other)} do not")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="WORD", nargs="+", help="faults whose name has one of these words")
    parser.add_argument("--list", action="store_true", help="name the faults and leave")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time (most of them wait for timeouts now and then)")
    parser.add_argument("--folder", type=Path, help="work there and keep everything; by default a temporary folder")
    parser.add_argument("--write", action="store_true", help="record the table in scripts/bench_results/")
    given = parser.parse_args(argv)
    faults = [fault for fault in FAULTS if given.only is None or any(word in fault.name for word in given.only)]
    if given.list or not faults:
        print("\n".join(fault.name for fault in (FAULTS if given.list else [])) or "--only: no fault has such a name; --list names them all")
        return 0 if given.list else 2
    with tempfile.TemporaryDirectory(prefix="faults") as temporary:
        rows = run_faults(faults, given.folder or Path(temporary), given.jobs, lambda text: print(text, flush=True))
    for row in rows:
        for problem in row.problems:
            print(f"--- {row.fault.name}: {problem}", file=sys.stderr)
    print(f"{table(rows)}\n\n{summary(rows)}")
    if given.write:
        note = ("An iteration under way when the fault struck is not counted among the lost. Where nothing was lost and the exit codes are 0 the "
                "run itself went on; \"then\" is the same command line started again.")
        measuring.record("faults.md", f"# Faults and what they cost\n\n{measuring.stamp()}, {measuring.load()}. What is done: see "
                         f"scripts/fault_table.py.\n\n{summary(rows)}.\n\n{note}\n\n{table(rows)}")
    return 1 if any(row.problems for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

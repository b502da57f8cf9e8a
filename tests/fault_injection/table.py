"""Inject faults into real runs of a tiny model, resume every run, and report what was lost.

    python tests/fault_injection/table.py                     all faults on this machine (mounts and namespaces need root)
    python tests/fault_injection/table.py --only kill         those whose name contains the word; --list prints all names
    python tests/fault_injection/table.py --write             record the table as scripts/bench_results/faults.md

A case: CPU ranks train 8 iterations of a small MoE with a checkpoint every 3 iterations and --auto-resume. The fault
(faults.py) hits one rank at a named function (ranks.py), or the files between two runs. Then the same command line runs
again. Every record of metrics.jsonl (losses, gradient norm, learning rate, samples, validation) and every byte of the
exported weights are compared with a baseline run. A case fails if more iterations are repeated than were done since the
last good checkpoint, if exit codes or messages differ from those in the list, or if one number differs.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fault_injection import ranks
from fault_injection.faults import FAULTS, Fault
from fault_injection.ranks import DISK, UnsupportedHostError

from scripts import provenance

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
    4: (
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--use-distributed-optimizer"
    ).split(),
}
OUTPUTS = {"save": "ckpt", "metrics": "metrics.jsonl", "tensorboard": "tb", "cache": "cache"}
FLAGS = {
    "save": "--save",
    "metrics": "--metrics-file",
    "tensorboard": "--tensorboard-dir",
    "cache": "--data-cache-path",
}


# ---- damage between two runs; the current folder is the case's


def newest(save: Path) -> Path:
    return max(save.glob("iter_???????"))


def damage(kind: str, save: Path) -> None:
    """Damage the newest checkpoint, the tracker or metrics.jsonl."""
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
        path = {
            "unreadable_index": newest(save) / ".metadata",
            "unreadable_shard": shard,
            "unreadable_tracker": tracker,
        }[kind]
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
class FaultResult:
    """Result of a case.

    Attributes:
        message: the first line that matched the expected message.
        done, saved, resumed: last iteration done, saved, and resumed from.
        equal: whether the resumed run equals the baseline bit for bit.
        skipped: why the case cannot run on this machine.
    """

    fault: Fault
    codes: str = ""
    message: str = ""
    done: int = 0
    saved: int = 0
    resumed: int = 0
    equal: bool = False
    seconds: float = 0.0
    skipped: str = ""
    problems: list[str] = field(default_factory=list)


def command_line(fault: Fault, first: bool = True) -> list[str]:
    """Return the command line. The second run has --auto-resume and no --exit flags."""
    outputs = [
        part
        for name, path in OUTPUTS.items()
        for part in (FLAGS[name], f"{DISK}/{path}" if name in fault.on_disk else path)
    ]
    flags = fault.flags.split() if first or "--exit" not in fault.flags else []
    return [
        *MODEL,
        *MAPPINGS[fault.world],
        *outputs,
        *flags,
        *(["--auto-resume"] if fault.auto_resume or not first else []),
    ]


def write_text(folder: Path) -> None:
    """Write token files of 100 small documents."""
    import numpy as np

    from moe_trainer.data.indexed import write_indexed_dataset

    random = np.random.default_rng(0)
    with write_indexed_dataset(str(folder / "text"), np.uint16) as builder:
        for _ in range(100):
            builder.add_document(random.integers(1, 119, size=300, dtype=np.uint16), [300])


def run_baseline(world: int, folder: Path) -> None:
    """Run the command line without a fault.

    Raises:
        RuntimeError: if that fails.
    """
    folder.mkdir(parents=True)
    write_text(folder)
    run = ranks.run_ranks(command_line(Fault("", "", world=world)), folder, world)
    if any(run.codes):
        raise RuntimeError("the baseline run failed:\n" + "\n".join(run.err))


def records(path: Path) -> list[dict]:
    """Return the records that must be equal: everything but times and memory."""
    names = (
        "iteration",
        "consumed_samples",
        "lm loss",
        "load_balancing_loss",
        "grad_norm",
        "learning_rate",
        "loss_scale",
        "validation",
    )
    return [
        {name: value for name, value in json.loads(text).items() if name in names}
        for text in path.read_text().splitlines()
        if not text.startswith('{"ended"')
    ]


def last_number(pattern: str, texts: Iterable[str]) -> int:
    return max((int(number) for text in texts for number in re.findall(pattern, text)), default=0)


def run_case(fault: Fault, folder: Path, baseline: Path) -> FaultResult:
    """Run a case in this process, which changes its folder and mounts."""
    result, begin = FaultResult(fault), time.monotonic()
    folder.mkdir(parents=True)
    os.chdir(folder)
    hosts = (f"fault{os.getpid()}a", f"fault{os.getpid()}b") if fault.hosts else ()
    try:
        prepare(fault, baseline, hosts)
        first = ranks.run_ranks(
            command_line(fault), folder, fault.world, fault.injections, hosts, overrides=fault.overrides
        )
        check_first_run(result, first)
        repair(fault, baseline, hosts)
        second = ranks.run_ranks(command_line(fault, first=False), folder, fault.world, hosts=hosts)
        check_resumed_run(result, second, baseline)
    except UnsupportedHostError as error:
        result.skipped = str(error)
    except Exception:  # noqa: BLE001 - the case failed; the others still run
        result.problems.append(traceback.format_exc())
    finally:
        if hosts:
            ranks.remove_hosts(hosts)
        ranks.remove_memory_groups()
    result.seconds = time.monotonic() - begin
    return result


def prepare(fault: Fault, baseline: Path, hosts: tuple[str, ...]) -> None:
    for ending in ("bin", "idx"):
        shutil.copy(baseline / f"text.{ending}", f"text.{ending}")
    if fault.on_disk:
        ranks.private_mounts()
        ranks.make_disk(fault.disk_size)
    if hosts:
        ranks.make_hosts(hosts)
    if any(injection.action == "oom" for injection in fault.injections) and not os.access(
        ranks.MEMORY_GROUPS / "memory.limit_in_bytes", os.R_OK
    ):
        raise UnsupportedHostError("cannot create a memory control group (version 1)")
    for edit in fault.edits:
        edit.apply()
    if fault.before is not None:
        ranks.ACTIONS[fault.before](None)


def repair(fault: Fault, baseline: Path, hosts: tuple[str, ...]) -> None:
    for edit in reversed(fault.edits):
        edit.undo(baseline)
    if fault.damage is not None:
        damage(fault.damage, Path("ckpt"))
    if fault.repair == "restore":
        shutil.copy(baseline / "text.bin", "text.bin")
    elif fault.repair is not None:
        ranks.ACTIONS[fault.repair](None)
    if hosts:
        ranks.plug_in(hosts)


def check_first_run(result: FaultResult, run: ranks.RunResult) -> None:
    fault, texts = result.fault, [*run.out, *run.err]
    result.codes = " ".join(map(str, run.codes))
    result.done = last_number(r"(?m)^.* iteration +(\d+)/ +8 ", texts)
    result.saved = last_number(r"successfully saved checkpoint from iteration +(\d+)", texts)
    if fault.damages_newest:
        result.saved -= 3
    match_messages(result, fault.message, run)
    if fault.codes and not re.fullmatch(fault.codes, result.codes):
        result.problems.append(f"exit codes {result.codes} instead of {fault.codes}\n" + "\n".join(run.err))
    if not fault.traceback and any("Traceback" in text for text in run.err):
        result.problems.append("a traceback\n" + "\n".join(run.err))


def match_messages(result: FaultResult, pattern: str, run: ranks.RunResult) -> None:
    """Record the first line of any rank that matches the expected message."""
    if pattern:
        lines = [line for text in (*run.err, *run.out) for line in text.splitlines() if re.search(pattern, line)]
        if lines:
            result.message = re.sub(r"^.*?pretrain_moe.py: |^\[rank \d+\] ", "", lines[0].strip())
        else:
            result.problems.append(f"no rank printed {pattern!r}\n" + "\n".join(run.err))


def check_resumed_run(result: FaultResult, run: ranks.RunResult, baseline: Path) -> None:
    match_messages(result, result.fault.resume_message, run)
    if any(run.codes):
        result.problems.append(f"the resumed run exited with {run.codes}\n" + "\n".join(run.err))
        return
    resumed = [int(number) for number in re.findall(r"going on from iteration (\d+)", run.err[0])]
    result.resumed = resumed[-1] if resumed else 0
    if result.resumed < result.saved:
        result.problems.append(f"resumed from {result.resumed}, but {result.saved} was saved\n{run.err[0]}")
        return
    argv = command_line(result.fault)
    metrics = Path(argv[argv.index("--metrics-file") + 1])
    if Path("executed").exists():
        result.problems.append("a file of the checkpoint was executed")
    result.equal = Path("final.safetensors").read_bytes() == (baseline / "final.safetensors").read_bytes()
    if result.fault.records:
        result.equal = result.equal and records(metrics) == records(baseline / "metrics.jsonl")
    if not result.equal:
        result.problems.append("the numbers differ from the baseline run")


def start_case(fault: Fault, folder: Path, baseline: Path):
    """Start a case in a separate process. Returns the process and the pipe that delivers its result."""
    receiver, sender = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: sender.send(run_case(fault, folder, baseline)))
    process.start()
    return process, receiver


def run_faults(faults: list[Fault], folder: Path, jobs: int = 1, report=print) -> list[FaultResult]:
    """Run the cases, `jobs` at a time. Returns the results in the order of `faults`."""
    folder = folder.resolve()
    load_program()
    for world in {fault.world for fault in faults}:
        run_baseline(world, folder / f"baseline{world}")
    pending, running, results = list(enumerate(faults)), {}, {}
    while pending or running:
        while pending and len(running) < jobs:
            number, fault = pending.pop(0)
            running[number] = start_case(fault, folder / f"case{number}", folder / f"baseline{fault.world}")
        for number, (process, pipe) in list(running.items()):
            exited = not process.is_alive()  # checked first: what it sent before it exited is in the pipe then
            if pipe.poll(0.05):
                results[number] = pipe.recv()
            elif exited:
                results[number] = FaultResult(faults[number], problems=[f"the case died with {process.exitcode}"])
            if number in results:
                process.join()
                del running[number]
                report(line(results[number]))
    return [results[number] for number in sorted(results)]


def load_program() -> None:
    """Import what the ranks need once: they are forked from this process."""
    import torch

    torch.set_num_threads(1)
    import torch._dynamo  # noqa: F401 - torch would import it at the first optimizer step

    import moe_trainer.commands.train_process  # noqa: F401
    import moe_trainer.training.pretrain  # noqa: F401


# ---- reporting


def outcome(result: FaultResult) -> str:
    return f"skipped: {result.skipped}" if result.skipped else "FAILED" if result.problems else "as documented"


def lost_iterations(result: FaultResult) -> str:
    """Return how many iterations were repeated."""
    repeated = result.done - result.resumed
    return str(repeated) if result.fault.records else f"{repeated}, and records of metrics.jsonl"


def line(result: FaultResult) -> str:
    return (
        f"{result.fault.name}: codes {result.codes}; done {result.done}, saved {result.saved}, "
        f"resumed from {result.resumed}; {'equal' if result.equal else 'not equal'}; {result.seconds:.0f} s; "
        f"{outcome(result)}"
    )


def table(results: list[FaultResult]) -> str:
    head = (
        "| fault | when | exit codes | message | iterations done | last save reported | resumed from | iterations lost "
        "| resumed run equal, bit for bit |\n|---|---|---|---|---|---|---|---|---|"
    )
    lines = []
    for result in results:
        message = result.message.replace("|", "\\|")
        message = message if len(message) <= 160 else f"{message[:157]}..."
        cells = [
            result.fault.name,
            result.fault.when,
            result.codes,
            message,
            result.done,
            result.saved,
            result.resumed,
            lost_iterations(result),
            "yes" if result.equal else "NO",
        ]
        if result.skipped:
            cells = [result.fault.name, result.fault.when, f"not run: {result.skipped}", *[""] * 6]
        lines.append("| " + " | ".join(str(cell).encode("ascii", "replace").decode() for cell in cells) + " |")
    return "\n".join([head, *lines])


def summary(results: list[FaultResult]) -> str:
    """Return one sentence about all results."""
    run = [result for result in results if not result.skipped]
    as_documented = [result for result in run if not result.problems]
    lost_more = [result for result in run if result.resumed < result.saved]
    equal = [result for result in run if result.equal]
    most = max((result.done - result.resumed for result in run), default=0)
    return (
        f"{len(run)} faults ({len(results) - len(run)} more cannot run on this machine), {len(as_documented)} as "
        f"documented. {len(lost_more)} runs lost more than the work since the last good save (at most {most} iterations: "
        f"a save every 3, and the disk refused some). Of the resumed runs {len(equal)} equal the baseline bit for bit, "
        f"{len(run) - len(equal)} do not"
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="WORD", nargs="+", help="only faults whose name contains one of these words")
    parser.add_argument("--list", action="store_true", help="print the names of the faults and exit")
    parser.add_argument(
        "--jobs", type=int, default=1, help="cases that run at the same time (most of them wait for timeouts)"
    )
    parser.add_argument("--folder", type=Path, help="working folder, kept afterwards; default: a temporary folder")
    parser.add_argument("--write", action="store_true", help="record the table in scripts/bench_results/")
    options = parser.parse_args(argv)
    faults = [fault for fault in FAULTS if options.only is None or any(word in fault.name for word in options.only)]
    if options.list or not faults:
        print(
            "\n".join(fault.name for fault in (FAULTS if options.list else []))
            or "--only: no fault has such a name; --list names them all"
        )
        return 0 if options.list else 2
    with tempfile.TemporaryDirectory(prefix="faults") as temporary:
        results = run_faults(
            faults, options.folder or Path(temporary), options.jobs, lambda text: print(text, flush=True)
        )
    for result in results:
        for problem in result.problems:
            print(f"--- {result.fault.name}: {problem}", file=sys.stderr)
    print(f"{table(results)}\n\n{summary(results)}")
    if options.write:
        note = (
            "An iteration that was running when the fault hit is not counted as lost. Where nothing was lost and the "
            "exit codes are 0, the run itself continued."
        )
        provenance.write_result(
            "faults.md",
            f"# Faults and what they cost\n\n{provenance.provenance_line()}, {provenance.load_line()}. Made by "
            f"tests/fault_injection/table.py.\n\n{summary(results)}.\n\n{note}\n\n{table(results)}",
        )
    return 1 if any(result.problems for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

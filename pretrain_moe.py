"""Pretrain a Mixture-of-Experts language model: `python pretrain_moe.py FLAGS`, with Megatron-LM's flags.

Reads the flags, checks them against this machine and calls `moe_trainer.train.pretrain`; `--validate-only` and `--dry-run` end here,
without torch. What ends a run early becomes a message and an exit code.
Exit codes: docs/exit_codes.md.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while Python imports ends the process without a traceback; _train catches it
    for _name in ("stdout", "stderr"):
        if getattr(sys, _name) is None:  # started with the stream closed
            setattr(sys, _name, open(os.devnull, "w", encoding="utf-8"))
ASK_TO_SAVE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
if __name__ == "__main__" and "--auto-resume" in sys.argv and not {"--validate-only", "--dry-run", "--fake-process-group"} & {*sys.argv}:
    # from the first line on: until somebody listens (guard/signals.py) they wait, instead of killing a run that could save
    signal.pthread_sigmask(signal.SIG_BLOCK, ASK_TO_SAVE)

import json  # noqa: E402
import resource  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Mapping  # noqa: E402
from contextlib import nullcontext  # noqa: E402
from typing import TYPE_CHECKING, NoReturn  # noqa: E402

import arguments  # noqa: E402
from arguments.machine import allocator_environment  # noqa: E402
from moe_trainer.errors import need_packages  # noqa: E402
from moe_trainer.exit_codes import ExitCode  # noqa: E402
from moe_trainer.place import Place, find_place  # noqa: E402

if TYPE_CHECKING:
    from arguments.checkpoint_args import Wanted
    from moe_trainer.guard.signals import ExitSignal


def main(argv: list[str]) -> int:
    """Run one process of a training job; returns its exit code."""
    if not argv:
        from arguments.help import EXAMPLES

        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(EXAMPLES)
        return ExitCode.USER_ERROR
    if "--validate-only" in argv:
        from arguments.report import FilesFound, run_validate_only, world_size_of
        from moe_trainer.parallel.groups import group_table, plan_groups
        from moe_trainer.planner.dry_run import planned_memory
        from moe_trainer.planner.state import state_report
        from moe_trainer.shape.batch_sizes import sizes_that_wait
        from moe_trainer.shape.counts import params_report
        from moe_trainer.shape.layout import mapping_sizes

        def check_files(args: arguments.Arguments) -> FilesFound:
            need_packages("numpy")
            from moe_trainer.training.files import check_files as look

            return look(args)

        def describe_groups(args: arguments.Arguments, world_size: int) -> str:
            return f"groups of {world_size} ranks:\n{group_table(plan_groups(world_size, **mapping_sizes(args)))}"

        try:
            return run_validate_only(argv, params_report, _recorded_flags(argv, world_size_of(argv)[0]), describe_groups, state_report, sizes_that_wait, planned_memory,
                                     check_files)
        except ValueError as error:
            return _refuse(error, "0")
    if "--dry-run" in argv or "--fake-process-group" in argv:
        return _dry_run(argv)
    try:
        place = find_place(os.environ)
    except ValueError as error:
        return _refuse(error, "0")
    try:
        args = arguments.parse_args(argv, place.world_size, _recorded_flags(argv, place.world_size))
        if args.unbuildable:
            raise arguments.ArgumentError(args.unbuildable)
    except ValueError as error:
        return _refuse(error, str(place.rank))
    if args.output.dry_run or args.parallel.fake_process_group:  # a recipe asks for it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASK_TO_SAVE)
        return _dry_run(argv)
    for name, value in args.recipe_env.items():
        os.environ.setdefault(name, value)
    os.environ.update(allocator_environment(args, os.environ))
    try:
        need_packages("torch", "numpy", "safetensors")
    except ValueError as error:
        return _refuse(error, str(place.rank))

    from moe_trainer.guard.signals import exit_signal

    with exit_signal(args.training, args.output) or nullcontext() as listening:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASK_TO_SAVE)
        return _train(args, place, listening)


def _train(args: arguments.Arguments, place: Place, exit_signal: ExitSignal | None) -> int:
    """Train, and turn what ends the run early into a message and an exit code."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return _run(args, place, exit_signal)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends at once what is left
        if place.rank == 0:
            print(f"pretrain_moe.py: interrupted; {_what_is_saved(args.output.save)}", file=sys.stderr, flush=True)
        return ExitCode.INTERRUPTED
    except MemoryError as error:
        return _refuse_memory(error, place.rank)
    except (ImportError, OSError) as error:
        if "failed to map segment" not in str(error) and "Cannot allocate memory" not in str(error):
            raise
        return _refuse_memory(error, place.rank)


def _what_is_saved(folder: str | None) -> str:
    """One clause for a run that was interrupted."""
    if folder is None:
        return "nothing was saved (no --save)"
    try:
        with open(os.path.join(folder, "latest_checkpointed_iteration.txt"), encoding="ascii", errors="replace") as file:
            newest = file.read(20).strip()
    except OSError:
        newest = ""
    return f"the checkpoint of iteration {newest} in {folder} is complete" if newest.isdecimal() else f"there is no checkpoint in {folder} yet"


def _refuse_memory(error: BaseException, rank: int) -> int:
    """Say in one line where the host's memory ran out, and what limits it."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    limited = "" if limit == resource.RLIM_INFINITY else f" (ulimit -v allows {limit >> 20} MiB)"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(os.path.dirname(os.path.abspath(__file__)))]
    where = f"{frames[-1].name} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
    print(f"pretrain_moe.py: rank {rank}: out of host memory{limited} in {where}; give the process more memory, or train a smaller model or on "
          "more ranks", file=sys.stderr, flush=True)
    return ExitCode.USER_ERROR


def _run(args: arguments.Arguments, place: Place, exit_signal: ExitSignal | None) -> int:
    # The store's C++ side tells every lost connection with a stack of frames; guard/watchdog.py tells it in a line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Imported after the flags are known to be good: torch takes seconds, a typo should not.
    from moe_trainer.errors import InputError
    from moe_trainer.guard.rejection import ResultRejected
    from moe_trainer.parallel.trace import CommunicationError
    from moe_trainer.report.stream import Forgiving
    from moe_trainer.train import pretrain

    sys.stdout, sys.stderr = Forgiving(sys.stdout), Forgiving(sys.stderr)
    try:
        return pretrain(args, place, exit_signal)
    except InputError as error:
        if error.told is None and place.rank != 0:
            # the ranks have not met, and the first one may not have this error: one line holds all of it
            error = InputError(f"rank {place.rank}: {'; '.join(line.strip() for line in str(error).splitlines())}")
        return _refuse(error, "another" if error.told else "0")
    except CommunicationError as error:
        _tell_torchrun(f"rank {place.rank}: {error}")
        if not error.told:
            print(f"pretrain_moe.py: rank {place.rank}: {error}", file=sys.stderr, flush=True)
        return ExitCode.COMMUNICATION_FAILED
    except ResultRejected as error:
        # a fact about the run, which all ranks tell in the same words, better than a traceback
        _tell_torchrun(str(error))
        if place.rank == 0:
            print(f"pretrain_moe.py: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except ArithmeticError as error:
        _tell_torchrun(str(error))
        print(f"pretrain_moe.py: {error}", file=sys.stderr, flush=True)
        return 1


def _dry_run(argv: list[str]) -> int:
    """Plan instead of running. Nothing is imported that needs torch. Under a launcher the first rank tells it."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    from arguments.report import world_size_of
    from moe_trainer.planner.dry_run import run_dry_run

    try:
        return run_dry_run(argv, _recorded_flags(argv, world_size_of(argv)[0]))
    except ValueError as error:
        return _refuse(error, "0")


def _recorded_flags(argv: list[str], world_size: int | None) -> Mapping[str, object] | None:
    """With --use-checkpoint-args the flags that the checkpoint recorded (none where this run has yet to write it), else None.

    Raises: ValueError when the checkpoint cannot be read; an ArgumentError where more is wrong with the command line.
    """
    wanted = arguments.checkpoint_wanted(argv)
    if wanted is None:
        return None
    try:
        return _read_flags(wanted)
    except ValueError as error:
        others = arguments.problems_without_checkpoint(argv, world_size)
        if not others:
            raise
        raise arguments.ArgumentError([arguments.Violation(("--use-checkpoint-args",), str(error), "machine"), *others]) from error


def _read_flags(wanted: Wanted) -> Mapping[str, object]:
    from moe_trainer.checkpoint.checkpoint import latest_iteration, read_saved_args
    from moe_trainer.checkpoint.find import newest_in_sight

    if wanted.own is not None:
        newest = newest_in_sight(wanted.own)
        if newest is not None:
            return read_saved_args(wanted.own, newest)
        if wanted.folder is None:
            return {}
    return {} if wanted.may_come and latest_iteration(wanted.folder) is None else read_saved_args(wanted.folder, wanted.step)


def _refuse(error: ValueError, rank: str) -> int:
    _tell_torchrun(str(error))
    if rank == "0":
        print(f"pretrain_moe.py: {error}", file=sys.stderr, flush=True)
        return ExitCode.USER_ERROR
    # torchrun ends all ranks as soon as one has left: that should be the one that says why, however late a busy machine lets it begin.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(ExitCode.USER_ERROR))
    time.sleep(20.0 if "TORCHELASTIC_RUN_ID" in os.environ else 1.0)
    return ExitCode.USER_ERROR


def _tell_torchrun(message: str) -> None:
    """Leave the message where torchrun looks for it, which otherwise ends its own report without a reason."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        text = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"message": text}, file)
        except OSError:
            return  # it has been printed


def leave(code: int) -> NoReturn:
    """End the process; at once where the job has failed, since broken communicators can keep an interpreter from ending."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code == ExitCode.COMMUNICATION_FAILED:
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    if {"--validate-only", "--dry-run", "--help", "-h"} & set(sys.argv):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no failure
    leave(main(sys.argv[1:]))

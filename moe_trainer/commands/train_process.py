"""One process of a training job: parses the flags, checks them against this machine and trains.

`--validate-only` and `--dry-run` end here, without torch. Errors become a message and an exit code
(docs/exit_codes.md).
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import arguments
from arguments.machine import allocator_environment
from arguments.parse import WITHOUT_RUN
from arguments.pasted_line import read_pasted_line
from arguments.program import as_typed, program_name
from arguments.settings import shorten
from arguments.tokens import parse_tokens
from moe_trainer.checkpoint.recorded_flags import read_recorded_flags
from moe_trainer.early_signals import unblock_signals
from moe_trainer.errors import require_packages
from moe_trainer.exit_codes import ExitCode
from moe_trainer.io import command_output
from moe_trainer.launch_env import LaunchEnv, is_first_rank, read_launch_env

if TYPE_CHECKING:
    from moe_trainer.resilience.signals import ExitSignalHandler


def main(argv: list[str]) -> int:
    """Run one process of a training job and return its exit code."""
    if not argv:
        from arguments.help import EXAMPLES

        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(as_typed("train", EXAMPLES))
        return ExitCode.USER_ERROR
    rank = "0"
    try:
        asked = parse_tokens(argv).last
        if any(map(asked, WITHOUT_RUN)):
            unblock_signals()
            if not is_first_rank(os.environ):
                return ExitCode.OK  # the first rank alone answers, and its exit code is that of the job
            argv = argv if argv[0].startswith("-") else read_pasted_line(argv)
            return _validate(argv) if asked("validate_only") else _dry_run(argv)
        launch_env = read_launch_env(os.environ)
        rank = str(launch_env.rank)
        args = arguments.parse_args(argv, launch_env.world_size, read_recorded_flags(argv, launch_env.world_size))
        if args.unbuildable:
            raise arguments.ArgumentError(args.unbuildable)
        if args.output.dry_run or args.parallel.fake_process_group:  # set by a recipe
            unblock_signals()
            return _dry_run(argv) if launch_env.rank == 0 else ExitCode.OK
        for name, value in args.recipe_env.items():
            os.environ.setdefault(name, value)
        os.environ.update(allocator_environment(args, os.environ))
        require_packages("torch", "numpy", "safetensors", "tqdm")
    except ValueError as error:
        return _report_error(error, rank)

    from moe_trainer.resilience.signals import make_exit_signal_handler

    with make_exit_signal_handler(args.training, args.output) or nullcontext() as exit_signal:
        unblock_signals()
        return _train(args, launch_env, exit_signal)


def _train(args: arguments.Arguments, launch_env: LaunchEnv, exit_signal: ExitSignalHandler | None) -> int:
    """Train; turn interrupts and memory errors into a message and an exit code."""
    try:
        if signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.SIG_IGN):  # not with --exit-signal SIGINT
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return _run(args, launch_env, exit_signal)
    except KeyboardInterrupt:
        # A second Ctrl-C ends the process at once; torchrun repeats the first one, and kills after 30 s.
        signal.signal(signal.SIGINT, signal.SIG_IGN if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIG_DFL)
        if launch_env.rank == 0:
            print(
                f"{program_name('train')}: interrupted; {_describe_saved(args.output.save)}",
                file=sys.stderr,
                flush=True,
            )
        return ExitCode.INTERRUPTED
    except (MemoryError, ImportError, OSError) as error:
        signs = ("failed to map segment", "Cannot allocate memory")
        if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in signs):
            raise
        return _report_out_of_memory(error, launch_env.rank)


def _describe_saved(folder: str | None) -> str:
    """Describe the newest checkpoint after an interrupt."""
    if folder is None:
        return "nothing was saved (no --save)"
    try:
        with open(
            os.path.join(folder, "latest_checkpointed_iteration.txt"), encoding="ascii", errors="replace"
        ) as file:
            newest = file.read(20).strip()
    except OSError:
        newest = ""
    return (
        f"the checkpoint of iteration {newest} in {folder} is complete"
        if newest.isdecimal()
        else f"there is no checkpoint in {folder} yet"
    )


def _report_out_of_memory(error: BaseException, rank: int) -> int:
    """Report in one line where the host's memory ran out, and what limits it."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    limited = "" if limit == resource.RLIM_INFINITY else f" (ulimit -v allows {limit >> 20} MiB)"
    folder = Path(__file__).resolve().parents[2]  # of a checkout, or of all installed packages
    ours = tuple(str(folder / name) for name in ("arguments", "moe_trainer"))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(ours)]
    where = f"{frames[-1].name} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
    print(
        f"{program_name('train')}: rank {rank}: out of host memory{limited} in {where}; give the process more "
        "memory, or train a smaller model or on more ranks",
        file=sys.stderr,
        flush=True,
    )
    return ExitCode.USER_ERROR


def _run(args: arguments.Arguments, launch_env: LaunchEnv, exit_signal: ExitSignalHandler | None) -> int:
    # The store logs a C++ stack for every lost connection; resilience/watchdog.py logs one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Imported after the flags are checked: torch takes seconds to import.
    from moe_trainer.errors import UserError
    from moe_trainer.io import BestEffortStream
    from moe_trainer.metrics.tensorboard_writer import report_thread_error
    from moe_trainer.parallel.trace import CommunicationError
    from moe_trainer.resilience.rejection import ResultRejectedError
    from moe_trainer.resilience.weight_hash import WeightsDifferError
    from moe_trainer.training.pretrain import pretrain

    sys.stdout, sys.stderr = BestEffortStream(sys.stdout), BestEffortStream(sys.stderr)
    setattr(threading, "excepthook", report_thread_error)  # noqa: B010 - of this process, like the streams
    try:
        return pretrain(args, launch_env, exit_signal)
    except UserError as error:
        if error.reported_elsewhere is None and launch_env.rank != 0:
            # the ranks have not met, so rank 0 may not have this error: print it in one line
            error = UserError(f"rank {launch_env.rank}: {'; '.join(line.strip() for line in str(error).splitlines())}")
        return _report_error(error, "another" if error.reported_elsewhere else "0")
    except CommunicationError as error:
        _write_torchrun_error(f"rank {launch_env.rank}: {error}")
        if not error.was_reported:
            print(f"{program_name('train')}: rank {launch_env.rank}: {error}", file=sys.stderr, flush=True)
        return ExitCode.COMMUNICATION_FAILED
    except ResultRejectedError as error:
        # all ranks raise it with the same message
        _write_torchrun_error(str(error))
        if launch_env.rank == 0:
            print(f"{program_name('train')}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except (FloatingPointError, WeightsDifferError) as error:
        _write_torchrun_error(str(error))
        print(f"{program_name('train')}: {error}", file=sys.stderr, flush=True)
        return ExitCode.FAILED


def _validate(argv: list[str]) -> int:
    """Check the flags and the files that they name, without torch."""
    from moe_trainer.commands.validate_only import run_validate_only

    return run_validate_only(argv, read_recorded_flags(argv))


def _dry_run(argv: list[str]) -> int:
    """Plan instead of running, without torch."""
    from moe_trainer.estimate.dry_run import run_dry_run

    return run_dry_run(argv, read_recorded_flags(argv))


def _report_error(error: ValueError, rank: str) -> int:
    _write_torchrun_error(shorten(str(error)))
    if rank == "0":
        print(f"{program_name('train')}: {shorten(str(error))}", file=sys.stderr, flush=True)
        return ExitCode.USER_ERROR
    # torchrun ends all ranks as soon as one exits, which should be the rank that reports the reason
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(ExitCode.USER_ERROR))
    time.sleep(20.0 if "TORCHELASTIC_RUN_ID" in os.environ else 1.0)
    return ExitCode.USER_ERROR


def _write_torchrun_error(message: str) -> None:
    """Write the message to the file from which torchrun takes the reason of a failure."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        text = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"message": text}, file)
        except OSError:
            return  # already printed


def run_command(argv: list[str]) -> int:
    """Call main; what ends without training ends where its output cannot be written, too."""
    with command_output() if {"--validate-only", "--dry-run", "--help", "-h"} & set(argv) else nullcontext():
        return main(argv)


def leave(code: int) -> NoReturn:
    """End the process; at once after a communication failure, since broken communicators can block the interpreter."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code == ExitCode.COMMUNICATION_FAILED:
        os._exit(code)
    # A sharded model is part of reference cycles and keeps its process groups alive. One of their threads that drops
    # its last tensor while the interpreter is finalized would abort the process.
    if "torch" in sys.modules:
        gc.collect()
    sys.exit(code)

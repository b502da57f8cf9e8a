"""The console command: `moe-trainer NAME ...`, or `python -m moe_trainer NAME ...` (with torchrun: `-m moe_trainer`).

Every command is a module of moe_trainer/commands, imported when it is asked for.
"""

import difflib
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from types import MappingProxyType

from moe_trainer.errors import UserError, require_packages
from moe_trainer.exit_codes import ExitCode
from moe_trainer.io import command_output
from moe_trainer.version import __version__

COMMANDS = MappingProxyType(
    {
        "train": "pretrain a model, with Megatron-LM's flags (under torchrun: -m moe_trainer train)",
        "plan": "memory and time of a run on hardware that you do not have; search for a mapping",
        "tune": "measure micro-batch sizes on this machine",
        "prove": "compare a parallel mapping with one process, at toy size",
        "convert": "Hugging Face folders to checkpoints, and back",
        "generate": "continue prompts",
        "evaluate": "benchmark tasks of lm-eval",
        "train-tokenizer": "text to a tokenizer",
        "preprocess": "text to token files",
        "inspect": "statistics of token files; ls, verify and diff of checkpoints",
        "dashboard": "serve the dashboards of a folder of runs",
        "compare": "compare runs",
        "compare-megatron": "compare models with Megatron-Core's own modules, on a CPU",
        "doctor": "what this machine has, and what each absence costs",
        "launch": "train with torchrun, with the variables of the Megatron MoE model zoo",
    }
)


def table(start: str) -> str:
    """Return the commands with what each does."""
    width = max(map(len, COMMANDS)) + 2
    rows = [f"  {name:{width}}{text}" for name, text in COMMANDS.items()]
    return "\n".join([f"usage: {start} COMMAND ...", *rows, f"{start} COMMAND --help explains one; --version"])


def main() -> int:
    """Run the command that the command line names. Returns the exit code."""
    start = "python -m moe_trainer" if os.path.basename(sys.argv[0]) == "__main__.py" else "moe-trainer"
    name, *words = sys.argv[1:] or [""]
    if name in ("-h", "--help", "--version"):
        with command_output():
            print(f"moe-trainer {__version__}" if name == "--version" else table(start))
        return ExitCode.OK
    if name not in COMMANDS:
        print(f"{_problem(start, name)}{table(start)}", file=sys.stderr)
        return ExitCode.USER_ERROR
    sys.argv[:2] = [f"{start} {name}"]  # what messages name
    return run(name, words)


def _problem(start: str, name: str) -> str:
    """Return what is wrong with the name of a command, as one line; nothing if there is none."""
    if not name:
        return ""
    from arguments.program import SCRIPTS  # not at the head: the trainer handles signals before it imports its flags

    scripts = {os.path.splitext(os.path.basename(script))[0]: command for command, script in SCRIPTS.items()}
    near = difflib.get_close_matches(os.path.splitext(os.path.basename(name))[0], [*COMMANDS, *scripts], 1)
    meant = "train" if name.startswith("-") else scripts.get(near[0], near[0]) if near else None
    return f"{start}: there is no command {name}{f'; did you mean {start} {meant}?' if meant else ''}\n"


def _name_missing_package(command: str, error: ModuleNotFoundError) -> int:
    """Print which package a command needs; another module that is missing is an error. Returns the exit code."""
    from arguments.program import program_name

    try:
        require_packages((error.name or __package__).partition(".")[0])
    except UserError as problem:
        print(f"{program_name(command)}: {problem}", file=sys.stderr)
        return ExitCode.USER_ERROR
    raise error


def run(name: str, words: Sequence[str]) -> int:
    """Run a command in this process, whose last act it is. Returns the exit code."""
    with nullcontext() if name == "train" else command_output():  # a full disk for its log does not end training
        try:
            code = importlib.import_module(f"moe_trainer.commands.{name.replace('-', '_')}").main(list(words))
        except ModuleNotFoundError as error:
            code = _name_missing_package(name, error)
    gc.collect()  # see commands/train_process.py: leave
    return code


if __name__ == "__main__":
    sys.exit(main())

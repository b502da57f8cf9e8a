"""A pasted command line of a job, such as `NAME=VALUE srun -N 4 torchrun --nproc-per-node 8 pretrain_moe.py FLAGS`.

The tools that plan, explain or check a command line take it as it stands in the user's script: what starts the trainer
is removed, and tells the number of ranks.
"""

import re
import shlex
from collections.abc import Sequence
from math import prod

from arguments.flag_status import is_known_spelling
from arguments.tokens import FIELDS

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_TORCHRUN = ("torchrun", "torchrun.py", "torch.distributed.run", "torch.distributed.launch")
_LAUNCHER = re.compile(
    r"torchrun(\.py)?|srun|salloc|mpirun|mpiexec|python[\d.]*|env|exec|nohup|time|timeout|stdbuf|taskset|numactl|nsys|ncu"
    r"|sudo|docker|podman|singularity|apptainer|enroot|conda|uv"
)
"""First words of a line: launchers, and programs that start them."""
_LAUNCHER_SWITCHES = frozenset(
    "-- --standalone --no-python --run-path --use-env --exclusive --overlap --label --unbuffered".split()
)
"""Options without a value that can stand before the program."""
_PROGRAM = re.compile(r"pretrain_\w+")
"""Name of the trainer, of Megatron-LM's too, as a module; a file has .py after it."""
_ATTACHED = re.compile(r"(-[nN])(\d.*)")
_RANKS = ("--world-size", "--gpus")
"""Options that give the number of ranks; `--gpus` is that of a search."""
_OF_PLANS = frozenset(("world_size", "hardware", "report", "report_html", "length_histogram"))
"""Flags of the trainer that are about a plan, with one value: they can stand before a pasted line."""
_QUOTED_OR_SHELL = re.compile(
    r"""('[^']*'|"(?:\\.|[^"\\])*"|\\.)"""  # kept
    r"|(?:(?<!\S)\d+|&)?[<>]+&?[ \t]*[^\s|&;<>]+|[|&;].*",  # a redirection; the next command
    re.DOTALL,
)


def read_pasted_line(words: Sequence[str]) -> list[str]:
    """Return the flags of a command line that starts the trainer, with the number of its ranks as --world-size.

    The launcher is the first word, after any assignments. Only options of a tool and flags about a plan can stand
    before it; they stay. A number of ranks among them or among the flags takes precedence. Other words are returned as
    they are.

    Raises:
        ValueError: if the launcher's numbers are needed and are no numbers.
    """
    before, start, flags = split_pasted_line(words)
    rest = [*before, *flags]
    if any(word.partition("=")[0] in _RANKS for word in rest):
        return rest
    ranks = _count_ranks(start)
    return rest if ranks is None else ["--world-size", str(ranks), *rest]


def split_pasted_line(words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the words before the launcher, those that start the trainer, and the trainer's flags.

    Without a launcher all words are flags.
    """
    begin = _find_line(words)
    line = [] if begin is None else [*_split_text(words[begin]), *words[begin + 1 :]]
    end = _program_end(line)
    if end is None:
        return [], [], list(words)
    flags = [word for word in line[end:] if word == "" or word.strip("\\ \t\r\n")]
    return list(words[:begin]), line[:end], flags


def _find_line(words: Sequence[str]) -> int | None:
    """Return where a pasted line begins; None if a flag of the trainer or another word comes first."""
    index = 0
    while index < len(words) and words[index].startswith("-"):
        name, equals, _ = words[index].partition("=")
        index += 1
        if name in FIELDS and FIELDS[name].dest in _OF_PLANS:
            index += not equals
        elif name in FIELDS or is_known_spelling(name):
            return None
        else:  # an option of the tool, with its values
            while index < len(words) and not words[index].startswith("-") and not _starts_line(words, index):
                index += 1
    return index if index < len(words) and _starts_line(words, index) else None


def _split_text(word: str) -> list[str]:
    """Return the words of a whole command line in one word, with continued lines; any other word as it is."""
    if not any(map(str.isspace, word)):
        return [word]
    text = re.sub(r"\\[ \t\r]*\n", " ", word)
    try:
        parts = shlex.split(_QUOTED_OR_SHELL.sub(lambda match: match[1] or " ", text))
    except ValueError:  # a quote that is not closed
        return [word]
    return parts if _starts(parts) and _program_end(parts) is not None else [word]


def _name(word: str) -> str:
    return word.rpartition("/")[2]


def _starts_line(words: Sequence[str], index: int) -> bool:
    return _starts([*_split_text(words[index]), *words[index + 1 :]])


def _starts(words: Sequence[str]) -> bool:
    """Return whether a launcher or the program stands here, after any number of assignments."""
    index = next((index for index, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), None)
    if index is None:
        return False
    name = _name(words[index])
    is_file = name.endswith(".py") and _PROGRAM.fullmatch(name.removesuffix(".py")) is not None
    return is_file or name == "moe-trainer" or _LAUNCHER.fullmatch(name) is not None


def _program_end(words: Sequence[str]) -> int | None:
    """Return the position after the program that a launcher starts: a file, a module after -m, or `moe-trainer train`.

    None without one.
    """
    before = ""
    for index, word in enumerate(words):
        is_module = before in ("-m", "--module")
        if word == "moe_trainer" if is_module else _name(word) == "moe-trainer":
            return index + 2 if words[index + 1 : index + 2] == ["train"] else None
        is_value = before.startswith("--") and "=" not in before and before.replace("_", "-") not in _LAUNCHER_SWITCHES
        is_file = word.endswith(".py") and not word.startswith("-") and _name(word) not in _TORCHRUN
        if _PROGRAM.fullmatch(word) if is_module else is_file and not is_value:
            return index + 1
        before = word
    return None


def _count_ranks(words: Sequence[str]) -> int | None:
    """Return how many ranks the words before the program start; None if they do not say."""
    for index in reversed(range(len(words))):
        name, options = _name(words[index]), _options(words[index + 1 :])
        if name in _TORCHRUN:
            counts = [_count(options, "--nproc-per-node"), _count(options, "--nnodes")]
            return prod(count or 1 for count in counts) if any(counts) else None
        if name == "srun":
            nodes, tasks = _count(options, "--nodes", "-N"), _count(options, "--ntasks", "-n")
            if tasks is not None or nodes is None:
                return tasks
            return nodes * (_count(options, "--ntasks-per-node") or 1)
        if name in ("mpirun", "mpiexec"):
            return _count(options, "-np", "--np", "-n")
    return _count([part for word in words for part in word.split("=", 1)], "WORLD_SIZE")


def _options(words: Sequence[str]) -> list[str]:
    """Return options and values as separate words, with dashes instead of underscores in the options' names."""
    split: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        attached = _ATTACHED.fullmatch(word)
        if attached:
            split += attached.groups()
        elif word.startswith("--"):
            split += [name.replace("_", "-"), *([value] if equals else [])]
        else:
            split.append(word)
    return split


def _count(options: Sequence[str], *names: str) -> int | None:
    """Return the number after the last of these options, None without one.

    Raises:
        ValueError: if it is no number above 0.
    """
    index = next((index for index in reversed(range(len(options))) if options[index] in names), None)
    if index is None:
        return None
    value = options[index + 1] if index + 1 < len(options) else ""
    if not value.isdecimal() or int(value) == 0:
        shown = value if value and not value.startswith("-") else "(no value: an unset variable?)"
        raise ValueError(
            f"the launcher's {options[index]} {shown}: a number above 0 is needed to count the ranks, or --world-size N"
        )
    return int(value)

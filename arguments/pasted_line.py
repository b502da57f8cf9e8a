"""A pasted command line of a job, such as `NAME=VALUE srun -N 4 torchrun --nproc-per-node 8 pretrain_moe.py FLAGS`.

The tools that plan, explain or check a command line take it as it stands in the user's script: what starts the trainer
is removed, and tells the number of ranks.
"""

import re
import shlex
from collections.abc import Sequence
from math import prod

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_TORCHRUN = ("torchrun", "torchrun.py", "torch.distributed.run", "torch.distributed.launch")
_LAUNCHER = re.compile(r"torchrun(\.py)?|srun|mpirun|mpiexec|python[\d.]*|env|exec|nohup|numactl|nsys|ncu")
_PROGRAM = re.compile(r"pretrain_\w+")
"""Name of the trainer, of Megatron-LM's too, as a module; a file has .py after it."""
_ATTACHED = re.compile(r"(-[nN])(\d.*)")
_RANKS = ("--world-size", "--gpus")
"""Options that give the number of ranks; `--gpus` is that of a search."""


def read_pasted_line(words: Sequence[str]) -> list[str]:
    """Return the flags of a command line that starts the trainer, with the number of its ranks as --world-size.

    Options before the launcher, which are those of a tool, stay. A number of ranks among them or among the flags takes
    precedence. Words without a launcher or program are returned as they are.

    Raises:
        ValueError: if the launcher's numbers are needed and are no numbers.
    """
    split = [part for word in words for part in _split_text(word)]
    begin = next((index for index in range(len(split)) if _starts(split, index)), None)
    if begin is None:
        return list(words)
    if not split[0].startswith("-"):
        begin = 0  # also a launcher that is not known here
    program = next((index for index in range(begin, len(split)) if _is_program(split, index)), None)
    if program is None:
        return list(words)
    flags = [word for word in split[program + 1 :] if word == "" or word.strip("\\ \t\r\n")]
    rest = [*split[:begin], *flags]
    if any(word.partition("=")[0] in _RANKS for word in rest):
        return rest
    ranks = _count_ranks(split[begin:program])
    return rest if ranks is None else ["--world-size", str(ranks), *rest]


def _split_text(word: str) -> list[str]:
    """Return the words of a whole command line in one word, with continued lines; any other word as it is."""
    if not any(map(str.isspace, word)):
        return [word]
    try:
        parts = shlex.split(re.sub(r"\\[ \t\r]*\n", " ", word))
    except ValueError:  # a quote that is not closed
        return [word]
    is_line = bool(parts) and _starts(parts, 0) and any(_is_program(parts, index) for index in range(len(parts)))
    return parts if is_line else [word]


def _name(word: str) -> str:
    return word.rpartition("/")[2]


def _starts(words: Sequence[str], index: int) -> bool:
    """Return whether a launcher or the program stands here, after any number of assignments."""
    while index < len(words) and _ASSIGNMENT.fullmatch(words[index]):
        index += 1
    if index == len(words):
        return False
    name = _name(words[index])
    return _LAUNCHER.fullmatch(name) is not None or (
        name.endswith(".py") and _PROGRAM.fullmatch(name.removesuffix(".py")) is not None
    )


def _is_program(words: Sequence[str], index: int) -> bool:
    """Return whether this word is the program that the launcher starts: a file, or a module after -m."""
    word = words[index]
    if index > 0 and words[index - 1] == "-m":
        return _PROGRAM.fullmatch(word) is not None
    return word.endswith(".py") and not word.startswith("-") and _name(word) not in _TORCHRUN


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

"""A pasted command line of a job, such as `NAME=VALUE srun -N 4 torchrun --nproc-per-node 8 pretrain_moe.py FLAGS`.

The tools that plan, explain or check a command line take it as it stands in the user's script: what starts the trainer
is removed, and tells the number of ranks. Other shell syntax around it (redirections, pipes, further commands) becomes
no argument: it is read as the shell would, or refused by name.
"""

import re
import shlex
from collections.abc import Sequence
from math import prod

from arguments.container import OPTIONS
from arguments.flag_status import is_known_spelling
from arguments.tokens import FIELDS

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_TORCHRUN = ("torchrun", "torchrun.py", "torch.distributed.run", "torch.distributed.launch")
_LAUNCHER = re.compile(
    r"torchrun(\.py)?|srun|salloc|mpirun|mpiexec|python[\d.]*|env|exec|nohup|time|timeout|stdbuf|taskset|numactl|nsys|ncu"
    r"|sudo|docker|podman|singularity|apptainer|enroot|conda|uv|bash|zsh|sh|do|then|else|[!{$]"
)
"""First words of a line: launchers, programs that start them, the shell's own words and its prompt."""
_LAUNCHER_SWITCHES = frozenset(
    "-- --standalone --no-python --run-path --use-env --exclusive --overlap --label --unbuffered".split()
)
"""Options without a value that can stand before the program."""
_PROGRAM = re.compile(r"pretrain_\w+")
"""Name of the trainer, of Megatron-LM's too, as a module; a file has .py after it."""
_ATTACHED = re.compile(r"(-[nN])(\d.*)")
_RANKS = ("--world-size", "--gpus")
"""Options that give the number of ranks; `--gpus` is that of a search."""
_OF_PLANS = frozenset(
    dest
    for dest, option in OPTIONS.items()
    if any({"dry_run", "fake_process_group"}.issubset(need.split(" or ")) for need in option.needs)
)
"""Flags of the trainer that are about a plan, with one value: they can stand before a pasted line."""
_SUBSTITUTION = r"\$\([^()]*(?:\([^()]*\)[^()]*)*\)|`[^`]*`|\$\{[^}]*\}"
_TOKEN = re.compile(
    rf"""(?P<blank>(?:[ \t\r]|\\[ \t\r]*\n)+|(?<!\S)\#[^\n]*)
    |(?P<redirection>(?:(?<!\S)\d+|&)?(?:>\||[<>]+)&?[ \t]*[^\s|&;<>()]+)
    |(?P<next>\|\||&&|\|&|[|&;()\n])
    |(?P<word>(?:'[^']*'|"(?:\\.|[^"\\])*"|{_SUBSTITUTION}|\\.|[^\s'"\\|&;<>()`])+)""",
    re.DOTALL | re.VERBOSE,
)
"""The next token of a shell's text; a continued line is blank."""
_REDIRECTION = re.compile(r"(?:\d+|&)?(?:>\||[<>]+)&?([^\s|&;<>()]*)")
_NEXT_COMMAND = frozenset(("|", "||", "&&", "|&", "&", ";", "#"))
"""Words after which nothing belongs to the command."""
_SHELLS = ("bash", "sh", "zsh")
_OF_TRAINER = re.compile(r"pretrain_\w|moe[-_]trainer|torchrun")
_LITERAL = re.compile(r"'[^']*'|\\.", re.DOTALL)
_SEVERAL_WORDS = re.compile(r"\$\(|`|\$[@*]|\$\{[^}]*[\[@*]")
"""What a shell replaces by any number of words."""
_VARIABLE = re.compile(r"\$\w+|\$\{\w+\}")


def read_pasted_line(words: Sequence[str]) -> list[str]:
    """Return the flags of a command line that starts the trainer, with the number of its ranks as --world-size.

    The launcher is the first word, after any assignments. Only options of a tool and flags about a plan can stand
    before it; they stay. A number of ranks among them or among the flags takes precedence. Other words are returned as
    they are, up to the next command of a shell and without redirections.

    Raises:
        ValueError: if the launcher's numbers are needed and are no numbers, or only a shell can read the line.
    """
    before, start, flags = split_pasted_line(words)
    rest = [*before, *flags]
    if any(word.partition("=")[0] in _RANKS for word in rest):
        return rest
    ranks = _count_ranks(start)
    return rest if ranks is None else ["--world-size", str(ranks), *rest]


def split_pasted_line(words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the words before the launcher, those that start the trainer, and the trainer's flags.

    Without a launcher all words are flags, up to the next command of a shell and without redirections.

    Raises:
        ValueError: if only a shell can read the line.
    """
    begin = _find_line(words)
    line = [] if begin is None else _read_line(words[begin:])
    end = _program_end(line)
    if end is None:
        return [], [], _first_command(words)
    return list(words[:begin]), line[:end], line[end:]


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


def _read_line(words: Sequence[str]) -> list[str]:
    """Return the words of a line's first command, whether the line is one word or many, without `bash -c` around it."""
    text = _split_text(words[0])
    line = _first_command(words) if text is None else [*text, *_first_command(words[1:])]
    return _unwrap(line) or line


def _unwrap(words: Sequence[str]) -> list[str] | None:
    """Return the words of a command of which a part is the text after `bash -c`, None without one."""
    for index, word in enumerate(words[:-2]):
        if _name(word) in _SHELLS and re.fullmatch(r"-[a-z]*c", words[index + 1]):
            inner = _split_text(words[index + 2])
            return None if inner is None else [*words[:index], *inner]
    return None


def _first_command(words: Sequence[str]) -> list[str]:
    """Return the words before a shell's next command, without redirections.

    They come from an unquoted variable, which the shell splits at blanks only. Values may contain the same characters
    (`Et|tL`, `<eos>`), so only whole words count, and ; or & at the end of one.
    """
    command: list[str] = []
    is_target = False
    for word in words:
        redirection = _REDIRECTION.match(word)
        rest = word[redirection.end() :] if redirection else word
        if is_target:
            is_target = False
        elif redirection and not rest:
            is_target = not redirection[1]
        elif rest in _NEXT_COMMAND or (redirection and rest[0] in "|&;"):
            break
        elif word == "" or word.strip("\\ \t\r\n"):
            command.append(word.rstrip(";&"))
            if word.endswith((";", "&")):
                break
    return command


def _split_text(word: str) -> list[str] | None:
    """Return the words of the command that starts the trainer in a text of one word; None if the word is no such text.

    Assignments of commands before it are put before it.

    Raises:
        ValueError: if several commands start a trainer, a quote is not closed, or only a shell knows the flags.
    """
    if not any(map(str.isspace, word)):
        return None
    commands, place = [list[str]()], 0
    while place < len(word):
        token = _TOKEN.match(word, place)
        if token is None:
            if _OF_TRAINER.search(word) and not word.startswith("-"):
                raise ValueError(f"a quote in the pasted line is not closed: {word[place : place + 40]}")
            return None
        place = token.end()
        if token["next"]:
            commands.append([])
        elif token["word"]:
            commands[-1].append(token["word"])
    read = [[shlex.split(raw)[0] for raw in command] for command in commands]
    unwrapped = [_unwrap(command) for command in read]
    lines = [inner or command for inner, command in zip(unwrapped, read, strict=True)]
    found = [index for index, line in enumerate(lines) if _starts(line) and _program_end(line) is not None]
    if len(found) > 1:  # another program may have prepared its data
        found = [index for index in found if any(map(_OF_TRAINER.search, lines[index]))] or found
    if not found:
        return None
    if len(found) > 1:
        raise ValueError(f"{len(found)} commands of the pasted text start a trainer; paste one of them")
    (index,) = found
    if unwrapped[index] is None:
        _refuse_expansions(commands[index][_program_end(lines[index]) :])
    before = [part for line in lines[:index] for part in line if _ASSIGNMENT.fullmatch(part)]
    return [*before, *lines[index]]


def _refuse_expansions(raw_flags: Sequence[str]) -> None:
    """Refuse what a shell would replace by flags; a variable as a flag's value may stay.

    Raises:
        ValueError: naming it.
    """
    before = "--"
    for raw in raw_flags:
        text = _LITERAL.sub("", raw)
        is_value = before.startswith("-") or before.replace(".", "", 1).isdecimal()
        if _SEVERAL_WORDS.search(text) or (_VARIABLE.fullmatch(text) and not is_value):
            raise ValueError(
                f"{raw}: only your shell knows its words; paste the line without quotes around it, or write them out"
            )
        before = raw


def _name(word: str) -> str:
    return word.rpartition("/")[2]


def _starts_line(words: Sequence[str], index: int) -> bool:
    return _starts(_split_text(words[index]) or words[index:])


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

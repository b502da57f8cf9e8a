"""--help [TOPIC|--flag]: every flag with its meaning, default and status, read from the section files."""

import ast
import difflib
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

from arguments import flag_status
from arguments.container import OPTIONS, SECTIONS
from arguments.mechanisms.captured_modules import CAPTURED_MODULES
from arguments.mechanisms.layer_modules import names_of
from arguments.mechanisms.offloaded_modules import OFFLOADED_MODULES
from arguments.mechanisms.placements import PLACEMENTS
from arguments.mechanisms.recomputed_modules import RECOMPUTED_MODULES
from arguments.mechanisms.sublayers import list_letters
from arguments.program import as_typed, program_name
from arguments.schema import Option, layer_pattern

EXAMPLES = """pretrain_moe.py: no flags were given. For example:
  python pretrain_moe.py --preset mixtral_tiny --mock-data --train-iters 20                  train a small model
  python pretrain_moe.py --preset deepseek_v3 --mock-data --validate-only --world-size 1024  check a command line
  python pretrain_moe.py --use-checkpoint-args --load CHECKPOINTS --skip-train               evaluate a checkpoint
--help lists every flag, --help moe (or --help --moe-router-topk) some of them.
"""

_MODULES = MappingProxyType(
    {each[0].dest: names_of(each) for each in (RECOMPUTED_MODULES, OFFLOADED_MODULES, CAPTURED_MODULES)}
)
"""Destination of a flag that takes names of modules -> what its text lists for {modules}."""

ALIASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    *tuple((each.alias, (each.dest,)) for each in PLACEMENTS if each.alias and each.dest),
    ("sync-free", ("rank-capacity", "paged-stash")),
)
"""Parts of flags by a name of the literature that no flag contains."""

HEAD = """usage: pretrain_moe.py [--preset NAME|FILE.yaml] FLAGS
       pretrain_moe.py --help [TOPIC|--flag]    TOPIC: a section (moe, data, ...), a heading, or part of a flag's name

Pretrain a Mixture-of-Experts language model. The flags are Megatron-LM's, without abbreviations; of several the last
wins. A switch can also be written --switch=true or --switch=false, which undoes one that a preset sets; the value none
undoes a number or a choice without a default (--recompute-granularity none).
[no effect]: accepted, but has no effect here. [not implemented]: rejected until a later version. [renamed]: see the
new name.
"""


def field_docs(section: str) -> dict[str, tuple[str, str]]:
    """Return (heading, help text) of every field of a section, from its source files."""
    found: dict[str, tuple[str, str]] = {}
    for cls in reversed(dict(SECTIONS)[section].__mro__[:-1]):  # those whose fields it inherits come first
        found |= _docs_of(cls)
    return found


def _docs_of(cls: type) -> dict[str, tuple[str, str]]:
    source = Path(str(sys.modules[cls.__module__].__file__)).read_text(encoding="ascii")
    headings = [
        (number, line.removeprefix("    # ---- "))
        for number, line in enumerate(source.splitlines(), 1)
        if line.startswith("    # ---- ")
    ]
    body = next(
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == cls.__name__
    ).body
    docs = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = str(after.value.value).replace("{letters}", list_letters())
                text = text.replace("{modules}", _MODULES.get(node.target.id, ""))
            heading = next(name for number, name in reversed(headings) if number < node.lineno)
            docs[node.target.id] = (heading, " ".join(text.split()))
    return docs


def _value_name(option: Option) -> str:
    if option.takes == 0:
        return ""
    if option.metavar:
        return " " + " ".join(option.metavar)
    name = {"int": "N", "float": "X", "str": "TEXT"}.get(option.type_name, "A,B")
    if option.read is layer_pattern:
        name = "N|PATTERN"
    if option.choices and len(option.choices) <= 8:
        name = "{" + ",".join(map(str, option.choices)) + "}"
    if isinstance(option.takes, int):
        return " " + " ".join([name] * option.takes)
    return f" {name} ..." if option.takes == "+" else f" [{name} ...]"


def _tail(option: Option) -> str:
    """Return the default, long lists of choices, and the status."""
    parts = []
    if option.choices and len(option.choices) > 8:
        parts.append(f"Choices: {', '.join(map(str, option.choices))}.")
    if option.takes != 0 and option.default not in (None, []):
        default = " ".join(map(str, option.default)) if isinstance(option.default, list) else option.default
        parts.append(f"Default: {default}.")
    tag = {"no effect": "[no effect]", "not implemented": "[not implemented]", "renamed": "[renamed]"}.get(
        flag_status.get_flag_status(option.dest)[0]
    )
    return " ".join([*parts, *([tag] if tag else [])])


def help_lines(width: int = 100, options: frozenset[str] | None = None) -> Iterator[str]:
    """Yield the help text, line by line; `options` restricts it to some destinations."""
    if options is None:
        yield from as_typed("train", HEAD).splitlines()
    for section, cls in SECTIONS:
        shown = [option for option in OPTIONS.values() if option.section == section and not option.hidden]
        shown = shown if options is None else [option for option in shown if option.dest in options]
        if not shown:
            continue
        docs, heading = field_docs(section), ""
        yield ""
        yield f"{section.upper()}: {(cls.__doc__ or '').rstrip('.')}"
        for option in shown:
            if docs[option.dest][0] != heading:
                heading = docs[option.dest][0]
                yield ""
                yield f"  {heading}"
            text = docs[option.dest][1]
            if option.off and not option.on:
                text = f"Turn off: {text[:1].lower()}{text[1:]}"
            yield f"    {', '.join(option.shown_spellings)}{_value_name(option)}"
            yield from _paragraph(f"{text} {_tail(option)}".strip(), width)


def about(topic: str) -> frozenset[str]:
    """Return the destinations that a topic names: a flag, a section, a heading, or part of a flag's name.

    Raises:
        ValueError: if there are none, with suggestions.
    """
    word = topic.lower()
    hyphenated = topic.partition("=")[0].replace("_", "-")
    sections = {section for section, _ in SECTIONS}
    if topic.startswith("-"):
        found = {
            option.dest
            for option in OPTIONS.values()
            if hyphenated in (spelling.replace("_", "-") for spelling in option.spellings)
        }
    elif word in sections:
        found = {option.dest for option in OPTIONS.values() if option.section == word}
    else:
        headings = {dest: heading for section in sections for dest, (heading, _) in field_docs(section).items()}
        found = {dest for dest, heading in headings.items() if word.replace("_", " ") in heading.lower()}
        name = word.replace("_", "-")
        parts = [part.replace("_", "-") for part in dict(ALIASES).get(name, (name,))]
        found |= {
            option.dest
            for option in OPTIONS.values()
            if any(part in spelling for spelling in option.spellings for part in parts)
        }
    found = {dest for dest in found if not OPTIONS[dest].hidden}
    if not found:
        near = difflib.get_close_matches(
            hyphenated, [spelling for option in OPTIONS.values() for spelling in option.spellings], 3, 0.6
        )
        advice = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"sections: {', '.join(section for section, _ in SECTIONS)}"
        )
        raise ValueError(f"--help {topic}: there is no such flag or topic; {advice}")
    return frozenset(found)


def _paragraph(text: str, width: int) -> list[str]:
    indent = " " * 8
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def run_help(argv: list[str]) -> int:
    """Print the help text, of the topic after --help or -h if there is one, and return the exit code, 0 or 2."""
    width = min(max(shutil.get_terminal_size().columns, 60), 120)
    rest = argv[min(argv.index(word) for word in ("--help", "-h") if word in argv) + 1 :]
    try:
        options = about(rest[0]) if rest else None
    except ValueError as error:
        print(f"{program_name('train')}: {error}", file=sys.stderr)
        return 2
    sys.stdout.write("\n".join(help_lines(width, options)).lstrip("\n") + "\n")
    return 0

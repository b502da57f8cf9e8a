#!/usr/bin/env python3
"""Generate the flag reference of the manual from `arguments/`.

MkDocs calls this at build time (manual_hooks.py). By hand:

    python scripts/flag_reference.py FOLDER      write the pages as Markdown

Every flag is described by what the program itself uses: meaning, values, default and what it needs from the section
files, status from the tables of flags without effect or not implemented, an example from the presets and the manual's
commands, and what is checked from the messages in `arguments/rules`.
"""

import argparse
import ast
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arguments import flag_status
from arguments.container import OPTIONS, SECTIONS
from arguments.help import field_docs, help_lines
from arguments.needs import FACTS
from arguments.paths import local_path
from arguments.schema import Option

STATUS = {
    "acts": "acts",
    "no effect": "accepted, has no effect",
    "not implemented": "not implemented: rejected by name",
    "renamed": "old name",
    "unsupported": "not supported: rejected by name",
}
CHECKPOINT = {
    "always": "taken from the checkpoint",
    "storage": "taken from the checkpoint",
    "adapters": "taken from a checkpoint with adapters",
    "mapping": "taken from the checkpoint with `--use-mp-args-from-checkpoint-args`",
    "tokenizer": "taken from the checkpoint, unless `--no-use-tokenizer-model-from-checkpoint-args`",
    "tokenizer unless given": "taken from the checkpoint, unless given",
    "unless given": "taken from the checkpoint, unless given",
    "to evaluate": "with `--skip-train` taken from the checkpoint, unless given",
    "capacity": "with `--skip-train` taken from a checkpoint whose run dropped tokens, unless given",
    "data": "with `--skip-train` taken from the checkpoint, unless other data are given",
    "to convert": "with `--ckpt-convert-format` taken from the checkpoint, unless given",
    "must agree": "",
    "never": "",
}
VALUES = {"int": "a whole number", "float": "a number", "str": "text"}


def page_titles() -> dict[str, str]:
    """Return the titles of the pages of sections by file name."""
    return {section: "MoE" if section == "moe" else section.capitalize() for section, _ in SECTIONS}


def pages() -> dict[str, str]:
    """Return the Markdown of every page by file name, without the extension."""
    sections = {section: _section_page(section, cls) for section, cls in SECTIONS}
    return {"index": _index(), **sections, "other": _other_page()}


def anchor(option: Option) -> str:
    """Return the anchor of a flag on the page of its section."""
    return option.dest.replace("_", "-")


@cache
def checks() -> tuple[str, ...]:
    """Return the messages of the rules between flags, each once."""
    found: dict[str, None] = {}
    for path in sorted((ROOT / "arguments" / "rules").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                found |= dict.fromkeys(_messages(node))
    return tuple(found)


@cache
def examples() -> dict[str, str]:
    """Return a flag with its value by destination, of the first preset or command of the manual that has it."""
    words: list[str] = []
    for path in sorted((ROOT / "model_zoo").glob("*.yaml")):
        for spelling, value in yaml.safe_load(path.read_text(encoding="utf-8"))["MODEL_ARGS"].items():
            words += [spelling] if value is True else [spelling, *str(value).split()]
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        blocks = re.findall(r"^```bash[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for line in ("\n".join(blocks)).splitlines() + re.findall(r"`(--[^`|\n]* [^`|\n]*)`", text):
            words += ["", *shlex.split(line, comments=True)] if line.count("'") % 2 == line.count('"') % 2 == 0 else []
    spellings = {spelling: option for option in OPTIONS.values() for spelling in option.spellings}
    found: dict[str, str] = {}
    for number, word in enumerate(words):
        option = spellings.get(word)
        if option is None or option.takes == 0 or option.dest in found:
            continue
        most = option.takes if isinstance(option.takes, int) else 4
        values = words[number + 1 : number + 1 + most]
        values = values[: next((n for n, value in enumerate(values) if not value or value.startswith("--")), most)]
        if values and not any(re.search(r"\.\.\.|\$|^[A-Z][A-Z_]*$", value) for value in values):
            found[option.dest] = f"{word} {' '.join(map(shlex.quote, values))}"
    return found


def _messages(node: ast.FunctionDef) -> Iterator[str]:
    """Yield the texts that a rule can print: strings of more than four words, flags and values filled in by name."""
    docstring = ast.get_docstring(node, clean=False)
    f_strings = [child for child in ast.walk(node) if isinstance(child, ast.JoinedStr)]
    parts = {id(part) for f_string in f_strings for part in ast.walk(f_string) if part is not f_string}
    for child in ast.walk(node):
        if id(child) in parts or not isinstance(child, ast.JoinedStr | ast.Constant):
            continue
        if isinstance(child, ast.JoinedStr):
            text = "".join(map(_part, child.values))
        else:
            text = re.sub(r"\{(\w*)([^}]*)\}", _shown, str(child.value))
        if text != docstring and len(text.split()) > 4:
            yield " ".join(text.split())


def _shown(field: re.Match) -> str:
    """Return a flag by its spelling, and dots for any other value."""
    return OPTIONS[field[1]].spellings[0] if field[1] in OPTIONS and field[2] != ":value" else "..."


def _part(part: ast.expr) -> str:
    """Return one part of an f-string: text as it is, a flag by its spelling, any other value as dots."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    constants = [child.value for child in ast.walk(part) if isinstance(child, ast.Constant) and child.value in OPTIONS]
    return OPTIONS[constants[0]].spellings[0] if constants else "..."


def _code(text: object) -> str:
    return f"`{text}`"


@cache
def _usage() -> dict[str, str]:
    """Return the line of the help text by a flag's first spelling: all spellings and what follows them."""
    return {line.split()[0].rstrip(","): line.strip() for line in help_lines(width=10**6) if line.startswith("    --")}


def _default(option: Option) -> str:
    if option.takes == 0:
        return "not given" if option.off and not option.on else "on" if option.default else "off"
    if option.default is None or option.default == []:
        return "unset"
    return _code(" ".join(map(str, option.default)) if isinstance(option.default, list) else option.default)


def status(option: Option) -> tuple[str, str]:
    """Return status and reason of a flag in the manual's words."""
    kind, reason = flag_status.get_flag_status(option.dest)
    if kind == "renamed":
        return STATUS[kind], f"use `{reason}`"
    return STATUS[kind], reason if kind != "acts" else ""


def _value_notes(option: Option) -> Iterator[str]:
    """Yield the values that are rejected although the flag acts, and what the flag needs to have an effect."""
    dest = option.dest
    feature = flag_status.NOT_IMPLEMENTED.get(dest)
    if feature is not None and feature.values is not None:
        yield f"Not implemented: {', '.join(map(_code, feature.values))} ({feature.what})."
    unsupported = flag_status.UNSUPPORTED.get(dest)
    if unsupported is not None and unsupported.values is not None:
        yield f"Not supported: {', '.join(map(_code, unsupported.values))} ({unsupported.instead})."
    for (name, old), new in flag_status.RENAMED_VALUES.items():
        if name == dest:
            yield f"Old value: `{old}` is read as `{new}`."
    for need in option.needs:
        yield f"Needs: {' or '.join(map(_needed, need.split(' or ')))}. Otherwise it has no effect."


def _needed(alternative: str) -> str:
    dest, _, value = alternative.removeprefix("!").partition("=")
    word = "no " if alternative.startswith("!") else ""
    if dest in FACTS:
        return f"{word}{FACTS[dest]}"
    return f"{word}{_code(f'{OPTIONS[dest].spellings[0]} {value}'.strip())}"


def _section_page(section: str, cls: type) -> str:
    docs, heading = field_docs(section), ""
    lines = [f"# {page_titles()[section]} flags", "", (cls.__doc__ or "").strip(), ""]
    for option in OPTIONS.values():
        if option.section != section or option.hidden:
            continue
        if docs[option.dest][0] != heading:
            heading = docs[option.dest][0]
            lines += [f"## {heading[:1].upper()}{heading[1:]}", ""]
        lines += _entry(option, docs[option.dest][1])
    return "\n".join(lines) + "\n"


def _meaning(option: Option, text: str) -> str:
    text = text.replace("*", "\\*")
    return f"Turn off: {text[:1].lower()}{text[1:]}" if option.off and not option.on else text


def _entry(option: Option, text: str) -> Iterator[str]:
    kind, reason = status(option)
    yield f"### {option.spellings[0]} {{ #{anchor(option)} }}"
    yield ""
    yield _meaning(option, text)
    yield ""
    yield f"- Write: {_code(_usage()[option.spellings[0]])}"
    if option.takes != 0:
        yield f"- Values: {_values(option)}"
    yield f"- Default: {_default(option)}"
    if option.takes != 0 and (example := _example(option)):
        yield f"- Example: {_code(example)}"
    if taken := "; ".join(CHECKPOINT[when] for when in option.restore if CHECKPOINT[when]):
        yield f"- With `--use-checkpoint-args`: {taken}"
    yield f"- Status: {kind}{f' ({reason})' if reason else ''}"
    yield from (f"- {note}" for note in _value_notes(option))
    own = [message for message in checks() if any(re.search(rf"{name}(?![\w-])", message) for name in option.spellings)]
    if own:
        yield ""
        yield '??? info "Checked"'
        yield ""
        yield from (f"    - {_escaped(message)}" for message in own)
    yield ""


def _example(option: Option) -> str:
    """Return the flag with a value: of a preset or command, else a choice that is not the default, else the default."""
    values = [choice for choice in option.choices or () if choice != option.default] or [option.default]
    unknown = option.is_list or values[0] is None
    return examples().get(option.dest, "" if unknown else f"{option.spellings[0]} {values[0]}")


def _values(option: Option) -> str:
    if option.choices:
        return ", ".join(map(_code, option.choices))
    value = (
        "a local path"
        if option.path in ("read", "write", "cache")
        else VALUES.get(option.type_name, "as written above")
    )
    return f"one or more: {value}" if option.takes in ("+", "*") else value


def _escaped(message: str) -> str:
    for mark in ("\\", "`", "*", "_", "<", "[", "]", "|"):
        message = message.replace(mark, "\\" + mark)
    return message


def _index() -> str:
    counts = Counter(status(option)[0] for option in OPTIONS.values())
    lines = [
        "# Flag reference",
        "",
        "The search field finds a flag by either spelling: `--moe-router-topk` or `moe_router_topk`.",
        "On the command line `--help FLAG` and `--help SECTION` print the same.",
        "",
        "| status | flags |",
        "|---|---|",
        *(f"| {kind} | {count} |" for kind, count in counts.items()),
        "",
        "[Flags of Megatron-LM that are not here](other.md): old spellings, removed flags, flags of other products.",
        "",
    ]
    for section, title in page_titles().items():
        lines += [f"## {title}", ""]
        groups: dict[str, list[str]] = {}
        for option in OPTIONS.values():
            if option.section == section and not option.hidden:
                link = f"[`{option.spellings[0]}`]({section}.md#{anchor(option)})"
                groups.setdefault(field_docs(section)[option.dest][0], []).append(link)
        for heading, links in groups.items():
            lines += [f"**{heading[:1].upper()}{heading[1:]}**: {', '.join(links)}", ""]
    return "\n".join(lines)


def _other_page() -> str:
    lines = [
        "# Flags of Megatron-LM that are not here",
        "",
        "Old spellings are read as what they became. Flags of other products are rejected with what to use instead.",
        "[Rejected flags](../refused_flags.md) lists single values and combinations too.",
        "",
    ]
    for title, kind, column in (
        ("Old spellings", "renamed", "read as"),
        ("Old spellings without effect", "no effect", "why"),
        ("Not implemented", "not implemented", "what it requests"),
        ("Removed", "removed", "instead"),
    ):
        lines += [f"## {title}", "", f"| flag | {column} |", "|---|---|"]
        for old in flag_status.OLD_SPELLINGS.values():
            if old.status == kind:
                lines += _old_spelling_rows(old)
        lines.append("")
    lines += ["## Flags of other products", ""]
    for product in flag_status.PRODUCTS:
        lines += [f"### {product.name[:1].upper()}{product.name[1:]}", "", _sentence(product.instead), ""]
        flags = [word.partition("=")[0] for word in product.flags.split()]
        flags += [f"{prefix}*" for prefix in product.prefixes.split()]
        lines += [", ".join(map(_code, flags)), ""]
    return "\n".join(lines)


def _old_spelling_rows(old: flag_status.OldSpelling) -> Iterator[str]:
    if old.status != "renamed":
        yield f"| `{old.spelling}` | {old.text} |"
    for value, becomes in old.becomes:
        written = f"{old.spelling} {value or ''}".strip()
        yield f"| `{written}` | {_code(becomes.replace('{}', 'VALUE')) if becomes else 'nothing: it is the default'} |"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def main() -> int:
    """Write the pages into a folder."""
    parser = argparse.ArgumentParser(description="Write the flag reference of the manual as Markdown pages.")
    parser.add_argument("folder", type=local_path, help="where the pages go; made if it is missing")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Record what TransformerEngine's pybind sources declare of its torch extension, which its wheel does not hold.

python tests/emulated_cuda/libraries/record_transformer_engine.py CHECKOUT >tests/emulated_cuda/libraries/transformer_engine_torch.json
"""

import json
import re
import sys
from pathlib import Path

from pybind import Declarations, bracket, split


def record(checkout: Path) -> dict:
    """Names and values of enumerations, names of classes, arguments of functions as C++ has them (None: a lambda without names)."""
    csrc = checkout / "transformer_engine/pytorch/csrc"
    sources = [checkout / "transformer_engine/common/util/pybind_helper.h", csrc / "extensions/pybind.cpp"]
    declared = Declarations("\n".join(path.read_text().replace("\\\n", "\n") for path in sources))
    headers = Declarations("\n".join(path.read_text() for path in sorted(csrc.glob("*.h")))).text
    enumerations = [declared.enumeration(name) for name in re.findall(r'enum_<[^>]*>\(\s*m,\s*"(\w+)"', declared.text)]
    functions = {}
    for found in re.finditer(r"\bm\.def\(", declared.text):
        name, *parts = split(bracket(declared.text, found.start()))
        functions[name.strip('"')] = _arguments(parts, headers)
    return {
        "version": (checkout / "build_tools/VERSION.txt").read_text().strip(),
        "enumerations": {made.__name__: list(made.__members__) for made in enumerations},
        "classes": sorted(set(re.findall(r'class_<[^;(]*\(\s*m,\s*"(\w+)"', declared.text))),
        "functions": functions,
    }


def _arguments(parts: list[str], headers: str) -> list[str] | None:
    """'type' of each, or 'type name' or 'type name=default' where there are names."""
    named = [part for part in parts[1:] if "arg(" in part]
    found = None if "[" in parts[0] else re.search(rf"\b{parts[0].rsplit('::', 1)[-1].lstrip('&')}\s*\(", headers)
    types = (
        [re.sub(r"\s*=.*", "", part).rsplit(" ", 1)[0] for part in split(bracket(headers, found.start()))]
        if found
        else []
    )
    types = [kind.removeprefix("const ") for kind in types]
    if named and len(types) != len(named):
        types = ["py::object"] * len(named)
    if not (types or named or found):
        return None
    if not named:
        return types
    names = [
        re.sub(
            r'.*arg\("(\w+)"\)\s*(?:=\s*(.*))?',
            lambda match: match[1] + (f"={match[2]}" if match[2] else ""),
            part,
            flags=re.DOTALL,
        )
        for part in named
    ]
    return [f"{kind} {name}" for kind, name in zip(types, names, strict=True)]


def text(recorded: dict) -> str:
    """As JSON, a line for each name."""

    def lines(value):
        return (
            json.dumps(value)
            if not isinstance(value, dict)
            else "{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "}"
        )

    return "{\n" + ",\n".join(f"{json.dumps(key)}: {lines(value)}" for key, value in recorded.items()) + "}\n"


if __name__ == "__main__":
    print(text(record(Path(sys.argv[1]))), end="")

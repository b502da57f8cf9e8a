"""Classes as a library's own pybind sources declare them: their names, attributes and arguments, with the types of C++.

    declared = Declarations.read(folder)                        # of *.cu, *.cuh, *.cpp and *.hpp below it
    Handle = declared.make("HandleImpl")                        # attributes that take what their C++ types take
    Buffer = declared.make("HybridEPBuffer", Implementation)    # methods of Implementation behind checked arguments

What C++ refuses raises TypeError here: None for a number or a tensor, a name that is not declared, an argument too many or missing.
"""

import enum
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SOURCES = (".cu", ".cuh", ".cpp", ".hpp")
NUMBERS = {"int": 0, "int64_t": 0, "size_t": 0, "bool": False, "float": 0.0, "double": 0.0}
OPTIONAL = re.compile(r"(?:std|c10)::optional<(.+)>")
VECTOR = re.compile(r"std::vector<(.+)>")


@dataclass
class Declared:
    """What is said of one class. init, methods: types of arguments, with names and defaults where they are given."""

    attributes: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    methods: dict[str, inspect.Signature] = field(default_factory=dict)


def split(text: str) -> list[str]:
    """Parts between commas that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "(<[{") - (char in ")>]}")
        if char == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()] if text.strip() else []


def bracket(text: str, start: int) -> str:
    """The content of the round bracket that opens at or after start."""
    first = at = text.index("(", start)
    depth = 0
    while True:
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return text[first + 1 : at]
        at += 1


def bare(kind: str) -> str:
    """A type without const and references."""
    return re.sub(r"\bconst\b|&|pybind11::(?!object)|deep_ep::|\s+", " ", kind).strip().replace(" ", "")


class Declarations:
    def __init__(self, text: str = ""):
        self.text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        self.classes: dict[str, type] = {}

    @classmethod
    def read(cls, folder: Path) -> "Declarations":
        return cls(
            "\n".join(path.read_text(errors="replace") for path in sorted(folder.rglob("*")) if path.suffix in SOURCES)
        )

    def enumeration(self, name: str) -> type[enum.IntEnum]:
        body = re.search(rf'enum_<[^>]*>\(\s*m,\s*"{name}"[^)]*\)(.*?);', self.text, re.DOTALL).group(1)
        made = enum.IntEnum(
            name, {value: number for number, value in enumerate(re.findall(r'\.value\(\s*"(\w+)"', body))}
        )
        self.classes[name] = made
        return made

    def make(self, name: str, implementation: type = object) -> type:
        """The class of that name. Methods that implementation lacks raise an error when called."""
        declared = self._declared(name)
        space = {
            "declared": declared,
            "__setattr__": _set(declared, self),
            "__init__": _start(declared, self, implementation),
        }
        for method, signature in declared.methods.items():
            if method != "__init__":
                space[method] = self._checked(name, method, signature, getattr(implementation, method, None))
        made = type(name, (implementation,), space)
        self.classes[name] = made
        return made

    def function(self, name: str, implementation: Callable) -> Callable:
        """The function of that name: implementation behind checked arguments."""
        parts = split(bracket(self.text, re.search(rf'\bm\.def\(\s*"{name}"', self.text).start()))
        signature = make_signature(*_arguments(self.text, parts[1]))

        def call(*args, **kwargs):
            return implementation(*self.bind(name, signature, args, kwargs).args)

        return call

    def takes(self, kind: str, value: Any) -> bool:
        kind = {"MaybeTensor": "std::optional<at::Tensor>"}.get(bare(kind), bare(kind))
        if inner := OPTIONAL.fullmatch(kind):
            return value is None or self.takes(inner.group(1), value)
        if inner := VECTOR.fullmatch(kind):
            return isinstance(value, list | tuple) and all(self.takes(inner.group(1), one) for one in value)
        if kind in ("torch::Tensor", "at::Tensor"):
            return isinstance(value, torch.Tensor)
        if kind == "bool":
            return isinstance(value, bool)
        if kind in ("int", "int64_t", "size_t"):
            return isinstance(value, int)
        if kind in ("float", "double"):
            # pybind converts the value itself, which a tensor of one number allows
            return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if kind == "std::string":
            return isinstance(value, str)
        if kind == "bytearray":
            return isinstance(value, bytearray)
        known = self.classes.get(kind.rsplit("::", 1)[-1])
        if known is not None and issubclass(known, enum.Enum):
            return isinstance(value, enum.IntEnum) and value.name in known.__members__
        return known is None or isinstance(value, known)

    def _declared(self, name: str) -> Declared:
        bound = re.search(
            rf'class_<[^;]*?"{name}"\)(.*?)(?=\bclass_<|\benum_<|\bm\.def|\Z)', self.text, re.DOTALL
        ).group(1)
        body = re.search(rf"(?:struct|class) {name}\s*(?::[^{{]*)?\{{(.*?)\n\}};", self.text, re.DOTALL).group(1)
        made = Declared()
        for attribute in re.findall(r'\.def_readwrite\(\s*"(\w+)"', bound):
            kind, default = re.search(rf"([\w:<>]+)\s+{attribute}\s*(?:=\s*([^;]+))?;", body).groups()
            made.attributes[attribute], made.defaults[attribute] = kind, default or ""
        for found in re.finditer(r'\.def\((?!\s*"\w+"\s*,\s*\[)', bound):
            parts = split(bracket(bound, found.start()))
            if "init<" in parts[0]:
                types, places, method = split(parts[0][parts[0].index("<") + 1 : parts[0].rindex(">")]), (), "__init__"
            else:
                (types, places), method = _arguments(body, parts[1]), parts[0].strip('"')
            made.methods[method] = make_signature(
                types, places, [part for part in parts[1:] if "arg(" in part or "kw_only" in part]
            )
        return made

    def bind(self, where: str, signature: inspect.Signature, args: tuple, kwargs: dict) -> inspect.BoundArguments:
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if not self.takes(signature.parameters[name].annotation, value):
                raise TypeError(
                    f"{where}: {name} is a {signature.parameters[name].annotation}, given {type(value).__name__}"
                )
        bound.apply_defaults()
        return bound

    def _checked(
        self, name: str, method: str, signature: inspect.Signature, implementation: Callable | None
    ) -> Callable:
        def call(this, *args, **kwargs):
            bound = self.bind(f"{name}.{method}", signature, args, kwargs)
            if implementation is None:
                raise NotImplementedError(f"{name}.{method} is not emulated")
            return implementation(this, *bound.args, **bound.kwargs)

        return call


def make_signature(types: Sequence[str], places: Sequence[str] = (), named: Sequence[str] = ()) -> inspect.Signature:
    """named: as pybind gives names and defaults; positional only without, and called as C++ does (places) in errors."""
    kind, parameters = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
    names = [part for part in named if "kw_only" not in part]
    if len(names) < len(named):
        kind = inspect.Parameter.KEYWORD_ONLY
    assert not names or len(names) == len(types), (types, names)
    for number, type_ in enumerate(types):
        if not names:
            name = places[number] if places else f"a{number}"
            parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY, annotation=type_))
            continue
        name, _, default = names[number].partition("=")
        value = inspect.Parameter.empty if not default else _value(default)
        parameters.append(
            inspect.Parameter(re.search(r'"(\w+)"', name).group(1), kind, annotation=type_, default=value)
        )
    return inspect.Signature(parameters)


def _arguments(text: str, function: str) -> tuple[list[str], list[str]]:
    """Types and names of the arguments of &Class::function, which is declared in text."""
    declared = re.search(rf"[\w>&*]\s+{function.rsplit('::', 1)[-1].lstrip('&')}\s*\(", text)
    parts = [re.sub(r"\s*=.*", "", part) for part in split(bracket(text, declared.start()))]
    names = [re.search(r"(\w+)\s*$", part).group(1) for part in parts]
    return [bare(part).removesuffix(name) for part, name in zip(parts, names, strict=True)], names


def _value(text: str) -> Any:
    text = re.sub(r"(?<=\d)f$", "", text.strip())
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d*\.\d*", text) else None


def _set(declared: Declared, declarations: Declarations) -> Callable:
    def set_attribute(this, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(this, name, value)
            return
        if name not in declared.attributes:
            raise AttributeError(f"{type(this).__name__} has no attribute {name}")
        if not declarations.takes(declared.attributes[name], value):
            raise TypeError(
                f"{type(this).__name__}.{name} is a {declared.attributes[name]}, given {type(value).__name__}"
            )
        object.__setattr__(this, name, value)

    return set_attribute


def _start(declared: Declared, declarations: Declarations, implementation: type) -> Callable:
    def start(this, *args, **kwargs) -> None:
        bound = declarations.bind(
            type(this).__name__, declared.methods.get("__init__", inspect.Signature()), args, kwargs
        )
        for name, kind in declared.attributes.items():
            text = declared.defaults[name]
            known = declarations.classes.get(bare(kind))
            value = _value(text) if text else NUMBERS.get(bare(kind))
            if known is not None:
                value = next(iter(known)) if issubclass(known, enum.Enum) else known()
            object.__setattr__(this, name, value)
        if "__init__" in vars(implementation):
            implementation.__init__(this, *bound.args, **bound.kwargs)

    return start

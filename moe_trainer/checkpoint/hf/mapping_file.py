"""Read a mapping file: a family of Hugging Face models as YAML (docs/add_a_family.md describes the format).

A file may start from another family (`like`): its tables are merged into that one's key by key, `null` removes a key,
and lists replace. Everything is checked against the flags, converters and transforms that exist, and an error names the
line.
"""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import yaml

from arguments.container import OPTIONS
from arguments.regular_file import regular_file
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.converters.converter import ConfigConverter
from moe_trainer.checkpoint.hf.converters.registry import CONVERTERS
from moe_trainer.checkpoint.hf.family import NEEDED, Family, Key, TextPart
from moe_trainer.checkpoint.hf.rules import Names, Rule
from moe_trainer.checkpoint.hf.transforms import TRANSFORMS

KEYS = (
    "model_type",
    "like",
    "class_prefix",
    "other_names",
    "text_parts",
    "rename",
    "config",
    "converters",
    "flags",
    "required",
    "ignored",
    "defaults",
    "tensors",
)
SECTIONS = ("model", "layer", "linear", "mamba", "dense", "moe", "mtp", "head")
_PREFIXES = ("layer_prefix", "mtp_prefixes", "mtp_copies", "module_prefixes", "left_out", "native_layers")
_NEEDED_FLAGS = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "layernorm_epsilon")
_PART = re.compile(r"([\w.{}]+)((?: [A-Z0-9]+)+)")
_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        "bool": ((bool,), "true or false"),
        "int": ((int, list), "a whole number"),
        "float": ((int, float), "a number"),
        "str": ((str,), "text"),
    }
)

_Table = dict[str, tuple[yaml.Node, yaml.Node]]
"""The nodes of keys and values."""
_Lookup = Callable[[str], Family | None]


class _Loader(yaml.SafeLoader):
    """YAML, in which 1e-5 is a number: YAML 1.1 has it as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_family(path: Path, get_family: _Lookup) -> Family:
    """Read the family of a mapping file. `get_family` finds the families that it starts from.

    Raises:
        CheckpointError: naming the file, the line, what is there, and what is needed.
    """
    try:
        text = regular_file(path).read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=_Loader)
    except OSError as error:
        raise CheckpointError(f"the mapping file {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(f"the mapping file {path} is not YAML: {' '.join(str(error).split())}") from error
    if root is None:
        raise CheckpointError(f"the mapping file {path} is empty")
    return _Reader(path, get_family).read(root)


class _Reader:
    """Builds a family from the nodes of one file."""

    def __init__(self, path: Path, get_family: _Lookup):
        self._path, self._get_family = path, get_family

    def read(self, root: yaml.Node) -> Family:
        tables = self._table(root, "the file", KEYS)
        if "model_type" not in tables:
            self._fail(root, "model_type is missing: the value that config.json has under this key")
        name = self._text(tables["model_type"][1], "model_type")
        like = self._parent(tables["like"][1]) if "like" in tables else None
        empty = _empty_names()
        keys = {key.name: key for key in like.keys} if like else {}
        family = Family(
            name,
            self._keys(tables, keys),
            self._converters(tables) if "converters" in tables else like.converters if like else (),
            self._flags(tables, like.fixed_flags if like else {}),
            self._required(tables, like.required_values if like else {}),
            self._texts_of(tables, "ignored", like.ignored if like else ()),
            self._values(tables, "defaults", like.defaults if like else {}),
            self._names(tables["tensors"][1], like.names if like else empty)
            if "tensors" in tables
            else like.names
            if like
            else empty,
            self._text(tables["class_prefix"][1], "class_prefix") if "class_prefix" in tables else "",
            self._texts_of(tables, "other_names", ()),
            self._text_parts(tables),
            self._values(tables, "rename", like.renamed if like else {}),
        )
        self._check(root, family)
        return family

    def _check(self, root: yaml.Node, family: Family) -> None:
        """Check what no family can do without, and that no tensor has two rules."""
        dests = {key.dest for key in family.keys} | set(family.fixed_flags)
        for dest in _NEEDED_FLAGS:
            if dest not in dests:
                self._fail(root, f"config has no key for the flag {dest}; every family needs one")
        names = family.names
        for section, rules in (("model", names.model), ("head", names.head), ("layer", names.layer)):
            if not rules:
                self._fail(root, f"tensors has no {section}; every family needs it")
        if not names.dense and not names.moe:
            self._fail(root, "tensors has neither dense nor moe; layers need one of them")
        for rules in (names.model + names.head, names.mtp, *_layer_rules(names)):
            self._check_unique(rules)

    def _check_unique(self, rules: Iterable[Rule]) -> None:
        seen: dict[tuple[str, str], Rule] = {}
        for rule in rules:
            for name in {part.split()[0] for spelling in rule.spellings for part in spelling.split(", ")}:
                other = seen.setdefault((name, rule.needs), rule)
                if other is not rule:
                    raise CheckpointError(
                        f"{rule.origin}: the tensor {name} is read by {rule.native[0]} and by {other.native[0]} "
                        f"({other.origin}); one rule may read it"
                    )

    def _parent(self, node: yaml.Node) -> Family:
        name = self._text(node, "like")
        family = self._get_family(name)
        if family is None:
            self._fail(node, f"like: {name} is no built-in family (docs/families.md lists them)")
        return family

    def _keys(self, tables: _Table, keys: dict[str, Key]) -> tuple[Key, ...]:
        for name, (key_node, node) in self._table_of(tables, "config").items():
            if self._removes(key_node, node, name, keys):
                continue
            default: Any = NEEDED
            if isinstance(node, yaml.MappingNode):
                parts = self._table(node, f"config: {name}", ("flag", "default"))
                if "flag" not in parts:
                    self._fail(key_node, f"config: {name} has no flag; {{flag: NAME, default: VALUE}} is needed")
                node, default_node = parts["flag"][1], parts.get("default")
                dest = self._dest(node, self._text(node, f"config: {name}"))
                if default_node is not None:
                    default = self._flag_value(default_node[1], dest)
            else:
                dest = self._dest(node, self._text(node, f"config: {name}"))
            keys[name] = Key(name, dest, default)
        by_dest: dict[str, Key] = {}
        for key in keys.values():
            other = by_dest.setdefault(key.dest, key)
            if other is not key:
                self._fail(
                    tables["config"][0],
                    f"config: {other.name} and {key.name} both become the flag {key.dest}; remove one of them "
                    f"({other.name}: null)",
                )
        return tuple(keys.values())

    def _converters(self, tables: _Table) -> tuple[ConfigConverter, ...]:
        node = tables["converters"][1]
        if not isinstance(node, yaml.SequenceNode):
            self._fail(node, "converters must be a list of names")
        return tuple(CONVERTERS[self._one_of(each, "converters", CONVERTERS)] for each in node.value)

    def _flags(self, tables: _Table, inherited: Mapping[str, Any]) -> Mapping[str, Any]:
        flags = dict(inherited)
        for name, (key_node, node) in self._table_of(tables, "flags").items():
            if not self._removes(key_node, node, name, flags):
                dest = self._dest(key_node, name)
                flags[dest] = self._flag_value(node, dest)
        return MappingProxyType(flags)

    def _flag_value(self, node: yaml.Node, dest: str) -> Any:
        value, option = self._value(node), OPTIONS[dest]
        types, needed = _TYPES[option.type_name]
        if value is not None and (
            not isinstance(value, types)
            or (isinstance(value, bool) and bool not in types)
            or _is_bad(option.choices, value)
        ):
            choices = f"one of {', '.join(map(str, option.choices))}" if option.choices else needed
            self._fail(node, f"{dest} is {value!r}, and {choices} is needed")
        return value

    def _dest(self, node: yaml.Node, name: str) -> str:
        if name not in OPTIONS:
            dest = name.removeprefix("--").replace("-", "_")
            near = [dest] if dest in OPTIONS else difflib.get_close_matches(dest, OPTIONS, n=3)
            hint = f" (perhaps {' or '.join(near)})" if near else ""
            self._fail(node, f"the flag {name!r} is unknown{hint}; write it without dashes, as in num_layers")
        return name

    def _required(self, tables: _Table, inherited: Mapping[str, tuple[Any, ...]]) -> Mapping[str, tuple[Any, ...]]:
        required = dict(inherited)
        for name, (key_node, node) in self._table_of(tables, "required").items():
            if not self._removes(key_node, node, name, required):
                value = self._value(node)
                if not isinstance(value, list) or not value:
                    self._fail(node, f"required: {name} is {value!r}, and a list of accepted values is needed")
                required[name] = tuple(value)
        return MappingProxyType(required)

    def _values(self, tables: _Table, name: str, inherited: Mapping[str, Any]) -> Mapping[str, Any]:
        values = dict(inherited)
        for key, (key_node, node) in self._table_of(tables, name).items():
            if not self._removes(key_node, node, key, values):
                values[key] = self._value(node)
        return MappingProxyType(values)

    def _text_parts(self, tables: _Table) -> Mapping[str, TextPart]:
        parts = {}
        for name, (_, node) in self._table_of(tables, "text_parts").items():
            what = f"text_parts: {name}"
            table = self._table(node, what, ("prefix", "own_prefix", "others", "config", "defaults"))
            if not {"prefix", "others"} <= table.keys():
                self._fail(node, f"{what} needs prefix, of the language model's tensors, and others, of all others")
            own = self._value(table["own_prefix"][1]) if "own_prefix" in table else "model."
            if not isinstance(own, str):
                self._fail(table["own_prefix"][1], f"{what}: own_prefix is {own!r}, and text is needed")
            place = self._text(table["config"][1], f"{what}: config") if "config" in table else "text_config"
            parts[name] = TextPart(
                self._text(table["prefix"][1], f"{what}: prefix"),
                own,
                self._texts(table["others"][1], f"{what}: others"),
                tuple(place.split(".")),
                self._values(table, "defaults", {}),
            )
        return MappingProxyType(parts)

    def _names(self, node: yaml.Node, inherited: Names) -> Names:
        tables = self._table(node, "tensors", (*SECTIONS, *_PREFIXES))
        rules = {
            section: self._rules(tables[section][1], section, getattr(inherited, section))
            if section in tables
            else getattr(inherited, section)
            for section in SECTIONS
        }
        prefix, mtp_prefixes = inherited.layer_prefix, inherited.mtp_prefixes
        if "layer_prefix" in tables:
            prefix = self._prefix(tables["layer_prefix"][1], "layer_prefix", "{l}")
        if "mtp_prefixes" in tables:
            pair = tables["mtp_prefixes"][1]
            if not isinstance(pair, yaml.SequenceNode) or len(pair.value) != 2:
                self._fail(pair, "mtp_prefixes must be a list of two: of a prediction depth, and of its layer")
            first, second = (self._prefix(each, "mtp_prefixes", "") for each in pair.value)
            mtp_prefixes = first, second
        copies = self._names_of(tables, "mtp_copies", inherited.mtp_copies)
        count = inherited.native_layers
        if "native_layers" in tables:
            count = self._value(tables["native_layers"][1])
            if count not in (1, 2):
                self._fail(tables["native_layers"][1], f"native_layers is {count!r}, and 1 or 2 is needed")
        return Names(
            **rules,
            layer_prefix=prefix,
            mtp_prefixes=mtp_prefixes,
            mtp_copies=copies,
            module_prefixes=self._names_of(tables, "module_prefixes", inherited.module_prefixes),
            left_out=self._texts_of(tables, "left_out", inherited.left_out),
            native_layers=count,
        )

    def _names_of(self, tables: _Table, what: str, inherited: Mapping[str, str]) -> Mapping[str, str]:
        names = dict(inherited)
        for name, (key_node, value) in self._table_of(tables, what).items():
            if not self._removes(key_node, value, name, names):
                names[name] = self._text(value, f"{what}: {name}")
        return MappingProxyType(names)

    def _prefix(self, node: yaml.Node, what: str, needed: str) -> str:
        text = self._text(node, what)
        unknown = _braces(text) - {"{l}", "{d}"}
        if needed not in text or unknown or not text.endswith("."):
            self._fail(node, f"{what} {text!r}: a name that ends with a dot is needed, with {{l}} for the layer")
        return text

    def _rules(self, node: yaml.Node, section: str, inherited: tuple[Rule, ...]) -> tuple[Rule, ...]:
        if _is_null(node):
            return ()
        rules: dict[str, tuple[Rule, ...]] = {}
        table = self._table(node, section, None)
        if "like" in table:
            like = table.pop("like")[1]
            inherited = getattr(self._parent(like).names, section)
        for rule in inherited:
            native = " & ".join(rule.native)
            rules[native] = (*rules.get(native, ()), rule)
        for name, (key_node, value) in table.items():
            native = " & ".join(part.strip() for part in name.split("&"))
            if self._removes(key_node, value, native, rules):
                continue
            if _braces(native) - {"{e}"}:
                self._fail(key_node, f"{native}: only {{e}}, the expert, may be in braces")
            is_list = isinstance(value, yaml.SequenceNode) and isinstance((value.value or [value])[0], yaml.MappingNode)
            rules[native] = tuple(self._rule(key_node, each, native) for each in (value.value if is_list else [value]))
        return tuple(rule for group in rules.values() for rule in group)

    def _rule(self, key_node: yaml.Node, node: yaml.Node, native: str) -> Rule:
        transform_name, needs, spelled = "same", "", node
        if isinstance(node, yaml.MappingNode):
            table = self._table(node, native, ("hf", "transform", "if"))
            if "hf" not in table:
                self._fail(node, f"{native}: hf is missing: the Hugging Face tensors that it is made of")
            spelled = table["hf"][1]
            if "transform" in table:
                known = [name.lower() for name in TRANSFORMS]
                transform_name = self._one_of(table["transform"][1], f"{native}: transform", known)
            if "if" in table:
                condition = self._text(table["if"][1], f"{native}: if")
                dest = self._dest(table["if"][1], condition.removeprefix("not ").strip())
                needs = f"not {dest}" if condition.startswith("not ") else dest
        transform = TRANSFORMS[transform_name.upper()]
        spellings = tuple(self._spelling(spelled, native, text) for text in self._texts(spelled, f"{native}: hf"))
        natives = tuple(native.split(" & "))
        for spelling in spellings:
            count = spelling.count(", ") + 1
            if transform.num_sources and count not in transform.num_sources:
                needed = " or ".join(map(str, transform.num_sources))
                self._fail(
                    spelled,
                    f"{native}: {count} tensors in {spelling!r}, and the transform {transform_name} takes {needed}",
                )
        made = transform.num_natives or spellings[0].count(", ") + 1
        if len(natives) != made:
            self._fail(
                key_node,
                f"{native}: {len(natives)} native tensors, and the transform {transform_name} makes {made}",
            )
        return Rule(natives, spellings, transform, needs, f"{self._path}, line {_line(key_node)}")

    def _spelling(self, node: yaml.Node, native: str, text: str) -> str:
        """Return "NAME LAYOUT, NAME LAYOUT" with one space between words."""
        parts = [" ".join(part.split()) for part in text.split(",")]
        by_expert = "{e}" in native
        for part in parts:
            match = _PART.fullmatch(part)
            if match is None:
                self._fail(
                    node,
                    f"{native}: {part!r} is not a tensor with its layout, as in self_attn.o_proj.weight H Q "
                    "(several are separated by commas)",
                )
            braces = _braces(match[1])
            if braces - {"{e}"}:
                self._fail(node, f"{native}: {match[1]}: only {{e}}, the expert, may be in braces")
            if by_expert and not braces and match[2].split()[0] != "X":
                self._fail(
                    node,
                    f"{native}: {part!r} has neither {{e}} nor, as a stack of all experts, the layout X ...",
                )
            if braces and not by_expert:
                self._fail(node, f"{native}: {match[1]} is of one expert, and {native} is not: it has no {{e}}")
        return ", ".join(parts)

    # ---- nodes

    def _fail(self, node: yaml.Node, message: str) -> NoReturn:
        raise CheckpointError(f"{self._path}, line {_line(node)}: {message}")

    def _table(self, node: yaml.Node, what: str, known: Collection[str] | None) -> _Table:
        """Return the entries of a table; `known` are the keys that it may have, None for any."""
        if not isinstance(node, yaml.MappingNode):
            self._fail(node, f"{what} must be a table of keys and values")
        table: _Table = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or not key.value:
                self._fail(key, f"{what}: a key must be text")
            if key.value in table:
                self._fail(key, f"{what}: {key.value} is in line {_line(table[key.value][0])} already")
            if known is not None:
                self._one_of(key, what, known)
            table[key.value] = key, value
        return table

    def _table_of(self, tables: _Table, name: str) -> _Table:
        return self._table(tables[name][1], name, None) if name in tables else {}

    def _removes(self, key: yaml.Node, node: yaml.Node, name: str, inherited: dict[str, Any]) -> bool:
        """Return whether the value is null, and remove the entry then."""
        if not _is_null(node):
            return False
        if name not in inherited:
            self._fail(key, f"{name}: null removes what the file starts from, which has no {name}")
        del inherited[name]
        return True

    def _value(self, node: yaml.Node) -> Any:
        try:
            return _Loader("").construct_document(node)
        except (yaml.YAMLError, ValueError) as error:
            self._fail(node, f"not a value: {' '.join(str(error).split())}")

    def _text(self, node: yaml.Node, what: str) -> str:
        value = self._value(node)
        if not isinstance(value, str) or not value.strip():
            self._fail(node, f"{what} is {value!r}, and text is needed")
        return value

    def _texts(self, node: yaml.Node, what: str) -> tuple[str, ...]:
        """Return one text, or those of a list."""
        if isinstance(node, yaml.SequenceNode) and node.value:
            return tuple(self._text(each, what) for each in node.value)
        return (self._text(node, what),)

    def _texts_of(self, tables: _Table, name: str, inherited: tuple[str, ...]) -> tuple[str, ...]:
        if name not in tables:
            return inherited
        node = tables[name][1]
        if not isinstance(node, yaml.SequenceNode):
            self._fail(node, f"{name} must be a list")
        return tuple(self._text(each, name) for each in node.value)

    def _one_of(self, node: yaml.Node, what: str, known: Collection[str]) -> str:
        name = self._text(node, what)
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (perhaps {near[0]})" if near else ""
            self._fail(node, f"{what}: {name!r} is unknown{hint}; there are {', '.join(known)}")
        return name


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _braces(text: str) -> set[str]:
    """Return what is in braces, with them, and braces without a partner."""
    return set(re.findall(r"\{.*?\}", text)) | set(re.findall("[{}]", re.sub(r"\{.*?\}", "", text)))


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _is_bad(choices: tuple[Any, ...] | None, value: Any) -> bool:
    return choices is not None and value not in choices


def _empty_names() -> Names:
    nothing: Mapping[str, str] = MappingProxyType({})
    return Names((), (), (), (), (), (), (), (), "model.layers.{l}.", ("", ""), nothing, nothing)


def _layer_rules(names: Names) -> Iterable[tuple[Rule, ...]]:
    if names.mamba and names.native_layers == 1:  # one sublayer per layer
        return (names.layer, names.mamba, names.dense, names.moe)
    mixing = (names.layer, names.linear, names.mamba)
    return (first + second for first in mixing for second in (names.dense, names.moe))

"""Recipes: flags in a YAML file in the shape of the public model zoo or of Megatron-LM's recipes.

    ENV_VARS:                       environment variables that the run sets
      CUDA_DEVICE_MAX_CONNECTIONS: 1
    MODEL_ARGS:                     flags: true -> bare flag, false -> left out, a list -> several values
      --num-layers: ${NUM_LAYERS:-61}

Megatron-LM's recipes (dev branch, examples/moe_recipes) call the table ARGS and omit dashes: num_layers: 61. Both
tables accept both; a file has one. Other tables are ignored. ${VAR} and ${VAR:-default} are replaced from the
environment. A run needs all of them; --validate-only and --dry-run keep those that are not set in paths and names.
The command line takes precedence (rules/precedence.py).
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from arguments.flag_status import OLD_SPELLINGS
from arguments.regular_file import regular_file
from arguments.settings import Violation
from arguments.tokens import FIELDS, ParsedTokens, parse_tokens

if TYPE_CHECKING:
    import yaml

FLAG_TABLES = ("MODEL_ARGS", "ARGS")
"""Names of the table of flags."""

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\$([A-Za-z_][A-Za-z0-9_]*)")


MAX_RECIPE_BYTES = 4 << 20

ON_THE_COMMAND_LINE = ("preset", "validate_only", "check_files", "report", "report_html", "world_size")
"""Flags that say what to do with a recipe, and act only outside of one. Others of plans (--hardware) may be in it."""


@dataclass
class Recipe:
    """One recipe: where it came from, its flags, the environment it asks for, and what is wrong with it."""

    name: str
    source: str
    parsed: ParsedTokens = field(default_factory=ParsedTokens)
    env: dict[str, str] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def load(name: str, environ: Mapping[str, str], is_run: bool = True) -> Recipe:
    """Load a preset by name, or a recipe by file name (something with a slash, or that ends in .yaml or .yml).

    Args:
        name: the preset or file.
        environ: values of its variables.
        is_run: whether a run follows, which needs all variables. Otherwise unset variables in texts are noted.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or "/" in name:
        recipe = Recipe(name, "recipe")
    else:
        import model_zoo

        recipe = Recipe(name, "preset")
        try:
            path = model_zoo.find(name)
        except LookupError as error:
            recipe.violations.append(Violation(("--preset",), f"--preset {name}: {error.args[0]}", "recipe"))
            return recipe
    _read_file(recipe, path, environ, is_run)
    return recipe


def _read_file(recipe: Recipe, path: Path, environ: Mapping[str, str], is_run: bool) -> None:
    def refuse(message: str) -> None:
        recipe.violations.append(Violation(("--preset",), f"--preset {recipe.name}: {message}", "recipe"))

    try:
        import yaml
    except ModuleNotFoundError:
        return refuse(f"reading it needs PyYAML, which {sys.executable} does not have (pip install PyYAML)")
    try:
        with open(regular_file(path), "rb") as file:
            text = file.read(MAX_RECIPE_BYTES + 1)
        if len(text) > MAX_RECIPE_BYTES:
            return refuse(f"the file is larger than {MAX_RECIPE_BYTES >> 20} MiB, so it is no recipe")
        root = yaml.compose(text.decode(), Loader=yaml.SafeLoader)
    except OSError as error:
        return refuse(f"the file cannot be read ({error.strerror})")
    except UnicodeDecodeError:
        return refuse("the file is not text")
    except RecursionError:
        return refuse("the file is nested too deeply")
    except yaml.YAMLError as error:
        return refuse(f"the file is not YAML: {' '.join(str(error).split())}")
    entries = (
        [(key, value) for key, value in root.value if isinstance(key, yaml.ScalarNode)]
        if isinstance(root, yaml.MappingNode)
        else []
    )
    if twice := _twice((key for key, _ in entries if key.value in ("ENV_VARS", *FLAG_TABLES)), str):
        return refuse(f"{twice}; keep one of the tables")
    tables = {key.value: value for key, value in entries}
    for name in ("ENV_VARS", *FLAG_TABLES):
        if isinstance(tables.get(name), yaml.ScalarNode) and tables[name].value in ("", "null", "~"):
            tables[name] = None
        if tables.get(name) is not None and not _is_table(tables[name]):
            return refuse(f"{name} must be a table of names and values (or lists of values)")
    found = [name for name in FLAG_TABLES if name in tables]
    if not found:
        return refuse("the file has no MODEL_ARGS (or ARGS), so it is no recipe (see the files in model_zoo/)")
    if len(found) > 1:
        return refuse(f"the file has {' and '.join(found)}, which both contain flags; keep one of them")
    for name, spelled in (("ENV_VARS", str), (found[0], _flag)):
        if tables.get(name) is not None and (twice := _twice((key for key, _ in tables[name].value), spelled)):
            return refuse(f"{name}: {twice}; keep one of them")
    substitute = _Substitution(path, environ, is_run)
    for key, value in tables["ENV_VARS"].value if tables.get("ENV_VARS") is not None else ():
        recipe.env[key.value] = " ".join(substitute(value, is_text=True))
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key.value) or "\0" in recipe.env[key.value]:
            return refuse(f"ENV_VARS: {key.value!r} is no environment variable, or its value no text")
    tokens: list[str] = []
    for key, value in tables[found[0]].value if tables[found[0]] is not None else ():
        if (option := FIELDS.get(_flag(key.value))) is not None and option.dest in ON_THE_COMMAND_LINE:
            return refuse(
                f"{found[0]}: {key.value}, line {key.start_mark.line + 1}: this flag acts on the command line only; "
                "remove it from the file"
            )
        is_text = option is not None and option.type_name == "str" and option.choices is None
        tokens += _tokens(_flag(key.value), substitute(value, is_text), not isinstance(value, yaml.ScalarNode))
    recipe.violations += substitute.violations
    if substitute.unset:
        names = ", ".join(f"{name} (line {line})" for name, line in substitute.unset.items())
        recipe.notes.append(f"{path}: not set, and needed by a run: {names}.")
    recipe.parsed = parse_tokens(tokens, str(path) if recipe.source == "recipe" else path.name)
    recipe.violations += recipe.parsed.violations


def _by_name() -> dict[str, str]:
    """Return the spellings of fields and old flags by name without leading dashes; the first one wins."""
    known = [*FIELDS, *OLD_SPELLINGS]
    return {spelling[2:].replace("_", "-"): spelling for spelling in reversed(known)}


_BY_NAME = MappingProxyType(_by_name())


def _flag(key: str) -> str:
    """Return the flag that a key names (`--num-layers`, num_layers and num-layers are one); unknown names as flags."""
    if key.startswith("-"):
        return key
    wanted = key.rstrip(":").replace("_", "-")
    return _BY_NAME.get(wanted, f"--{wanted}")


def _twice(keys: Iterable["yaml.ScalarNode"], spelled: Callable[[str], str]) -> str | None:
    """Return a clause about the first duplicate key, or None; YAML would silently use the last one."""
    lines: dict[str, int] = {}
    for key in keys:
        name, line = spelled(key.value), key.start_mark.line + 1
        if name in lines:
            return f"{name} is in line {lines[name]} and in line {line}"
        lines[name] = line
    return None


def _is_table(node) -> bool:
    """Return whether a node maps words to words or lists of words."""
    import yaml

    def holds_words(value: yaml.Node) -> bool:
        return isinstance(value, yaml.ScalarNode) or (
            isinstance(value, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in value.value)
        )

    return isinstance(node, yaml.MappingNode) and all(
        isinstance(key, yaml.ScalarNode) and holds_words(value) for key, value in node.value
    )


def _tokens(flag: str, values: list[str], is_list: bool) -> Iterator[str]:
    """Yield the tokens of one entry of the table of flags."""
    if not is_list and (not values or values[0].lower() in ("false", "", "null", "~")):
        return
    yield flag
    if not is_list and values[0].lower() == "true":
        return
    option = FIELDS.get(flag)
    if not is_list and option is not None and option.is_list:
        text = values[0]
        bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        values = bare.replace(",", " ").split() if bare is not text else bare.split()
    yield from values


class _Substitution:
    """Replace variables in YAML values.

    Attributes:
        violations: one for each variable that is not set.
        unset: line by name of the variables that are not set and stay in a text, if no run follows.
    """

    def __init__(self, path: Path, environ: Mapping[str, str], is_run: bool):
        self.path = path
        self.environ = environ
        self.is_run = is_run
        self.violations: list[Violation] = []
        self.unset: dict[str, int] = {}

    def __call__(self, node, is_text: bool) -> list[str]:
        """Return the texts of a scalar (one), or of a list; `is_text`: any text is a value of the flag."""
        if isinstance(node.value, str):
            line = node.start_mark.line + 1
            return [_VARIABLE.sub(lambda match: self.value(match, line, is_text), node.value)]
        return [text for item in node.value for text in (self(item, is_text) if not isinstance(item, tuple) else ())]

    def value(self, match: re.Match, line: int, is_text: bool) -> str:
        name, fallback = match.group(1) or match.group(3), match.group(2)
        if fallback is not None:
            return self.environ.get(name) or fallback
        if (
            name == "SLURM_NODEID"
        ):  # elsewhere than in a job of SLURM: torchrun's number of this node; where flags are only judged, the first
            return self.environ.get(name) or self.environ.get("GROUP_RANK") or "0"
        if name not in self.environ:
            if is_text and not self.is_run:
                self.unset.setdefault(name, line)
                return match.group(0)
            text = f"{self.path}, line {line}: the variable {name} is not set; export it or write ${{{name}:-default}}"
            self.violations.append(Violation(("--preset",), text, "recipe"))
        return self.environ.get(name, "")

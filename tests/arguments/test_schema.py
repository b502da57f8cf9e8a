"""A dataclass field becomes an option."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args

import pytest

from arguments import schema
from arguments.container import OPTIONS, SECTIONS
from arguments.flag_properties import Bounds, PathUse, Role
from arguments.flag_status import get_flag_status
from arguments.schema import flag, layer_pattern

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Sample:
    plain_number: int = 3
    """A number."""
    ratio: float | None = None
    """A ratio."""
    switch: bool = False
    """A switch."""
    was_on: bool = flag(True, off=("--no-was-on", "--disable-was-on"))
    """On."""
    odd: str = flag("x", "--odd-name", "--other-name")
    """Odd."""
    kind: Literal["a", "b"] | None = None
    """A choice."""
    level: Literal[0, 1, 2] = 0
    """A numeric choice."""
    many: list[int] = flag([])
    """A list."""
    three: list[str] | None = flag(None, nargs=3)
    """Three."""


@pytest.fixture
def options():
    return schema.options([("sample", Sample)])


def test_option_spellings_of_a_field(options):
    assert options["plain_number"].spellings == ("--plain-number",)
    assert options["switch"].on == ("--switch",) and options["switch"].off == ()
    assert options["was_on"].on == () and options["was_on"].off == ("--no-was-on", "--disable-was-on")
    assert options["odd"].on == ("--odd-name", "--other-name")


def test_number_of_values(options):
    takes = {dest: option.takes for dest, option in options.items()}
    assert takes == {
        "plain_number": 1, "ratio": 1, "switch": 0, "was_on": 0, "odd": 1, "kind": 1, "level": 1, "many": "+", "three": 3,
    }  # fmt: skip


def test_values_are_read_by_type(options):
    assert options["plain_number"].convert("-4") == -4
    assert options["ratio"].convert("1e-3") == 1e-3
    assert options["level"].convert("2") == 2 and type(options["level"].convert("2")) is int
    for dest, text, wanted in [("plain_number", "1e6", "integer"), ("ratio", "x", "number"), ("level", "3", "0, 1, 2")]:
        with pytest.raises(ValueError, match=wanted):
            options[dest].convert(text)


def test_list_defaults_are_not_shared():
    first, second = Sample(), Sample()
    first.many.append(1)
    assert second.many == []


def test_a_destination_declared_twice_is_an_error():
    with pytest.raises(ValueError, match="declared twice"):
        schema.options([("one", Sample), ("two", Sample)])


def test_layer_pattern():
    for text, value in {
        "2": 2, "([0]*3+[1]*4)": [0, 0, 0, 1, 1, 1, 1], "[0]+[1]*2": [0, 1, 1], "[0,1]*2": [0, 1, 0, 1],
        "'([0]*1+[1]*1)'": [0, 1], '"[1]"': [1], "3*[1]": [1, 1, 1],
    }.items():  # fmt: skip
        assert layer_pattern(text) == value
    with pytest.raises(ValueError, match="list expression"):
        layer_pattern("")


def test_every_field_has_a_docstring_and_a_heading():
    from arguments.help import field_docs

    for section, cls in SECTIONS:
        docs = field_docs(section)
        assert set(docs) == {field.name for field in dataclasses.fields(cls)}
        for dest, (heading, text) in docs.items():
            assert heading and len(text) > 5 and text.endswith("."), f"{section}.{dest} needs a help text"


def test_no_two_flags_share_a_spelling():
    spellings = [spelling for option in OPTIONS.values() for spelling in option.spellings]
    assert len(spellings) == len(set(spellings))


def test_importing_needs_only_the_standard_library():
    code = (
        "import sys; before = set(sys.modules); import arguments; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'arguments'}))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_largest_value_of_a_count_is_a_count():
    counts = [option for option in OPTIONS.values() if option.type_name == "int" and option.most is not None]
    assert counts and not [option.dest for option in counts if not isinstance(option.most, int)]


def test_every_flag_that_acts_says_what_it_is_for():
    """Proofs, replays, trials and comparisons of runs keep flags by their roles; None would be kept by chance."""
    silent = [dest for dest, option in OPTIONS.items() if option.role is None and get_flag_status(dest)[0] == "acts"]
    assert not silent, f"say flag(..., role=...), one of {get_args(Role)}, of {silent}"


@pytest.mark.parametrize(("name", "words"), [("role", Role), ("path", PathUse), ("bounds", Bounds)])
def test_properties_of_flags_are_known_words_and_each_is_used(name, words):
    assert {getattr(option, name) for option in OPTIONS.values()} - {None} == set(get_args(words))


def test_a_flag_demands_one_capability_of_a_kind_at_most():
    """Rules read one for each flag."""
    kinds = {dest: [type(each) for each in option.demands] for dest, option in OPTIONS.items()}
    assert any(kinds.values()) and not [dest for dest, found in kinds.items() if len(set(found)) < len(found)]

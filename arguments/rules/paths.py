"""What is no path: a URL where files are local, and what the shell should have expanded."""

from collections.abc import Iterator

from arguments.paths import find_path_problem
from arguments.rules.derived_sizes import DerivedSizes, as_list
from arguments.settings import Settings, Violation


def check_local_paths(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    """Check given paths. A plan of a recipe file keeps variables that are not set."""
    for dest, kind in s.path_kinds():
        for text in as_list(s.values[dest]):
            problem = find_path_problem(str(text), may_be_url=kind == "data", may_have_variables=dest not in s.typed)
            if problem is not None:
                yield s.violation("{:flag} {text}: {problem}.", dest, text=text, problem=problem)

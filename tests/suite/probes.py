"""Record which blocks of the product's code a test runs, in its own process and in all that it starts.

An import hook compiles every module of the product with one store into a shared buffer at the start of each block of a
function. The buffer is a mapped file: forked ranks write into it by themselves, new interpreters find it by an
environment variable and a .pth file of the environment (`install_for_interpreters`). After each test its process reads
the buffer and clears it.

coverage.py was not taken: it keeps one data file per process, which ranks that end with os._exit do not write, and its
tracer runs for every line of every rank; this costs a store per block.
"""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import json
import marshal
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType

from structure.source import PACKAGES, ROOT, product_files
from suite.blocks import BUFFER, Prober

VARIABLE = "MOE_TRAINER_TEST_PROBES"
PROBED = (*PACKAGES, "scripts", "pretrain_moe")


def code_path(folder: Path, file: Path) -> Path:
    """Return where a prepared folder has the code of a file of the product."""
    return (folder / file.relative_to(ROOT).as_posix().replace("/", "+")).with_suffix(".code")


def prepare(folder: Path) -> int:
    """Compile the product with probes into the folder, and write its list of blocks; return their number."""
    blocks: list[tuple[str, str, int]] = []
    firsts: dict[str, int] = {}
    for path in product_files():
        relative = path.relative_to(ROOT).as_posix()
        firsts[relative] = len(blocks)
        prober = Prober(len(blocks))
        tree = prober.visit(ast.parse(path.read_text()))
        code = compile(tree, str(path), "exec", dont_inherit=True)
        code_path(folder, path).write_bytes(marshal.dumps(code))
        blocks += [(relative, function, line) for function, line in prober.blocks]
    (folder / "blocks.json").write_text(json.dumps(blocks))
    (folder / "files.json").write_text(json.dumps(firsts))
    return len(blocks)


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from its code with probes."""

    def __init__(self, name: str, path: str, finder: Finder):
        super().__init__(name, path)
        self.finder = finder

    def get_code(self, fullname: str) -> CodeType:
        """Return the prepared code."""
        return marshal.loads(code_path(self.finder.folder, Path(self.path)).read_bytes())


class Finder(importlib.abc.MetaPathFinder):
    """Finds the product's modules of this checkout in a prepared folder."""

    def __init__(self, folder: Path, size: int):
        self.folder, self.size = folder, size
        self.buffer: mmap.mmap

    def use(self, path: Path) -> None:
        """Write into this file from now on."""
        if not path.exists():
            path.write_bytes(bytes(self.size))
        with path.open("r+b") as file:
            self.buffer = mmap.mmap(file.fileno(), self.size)
        setattr(builtins, BUFFER, self.buffer)
        os.environ[VARIABLE] = str(path)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of the product; None for all others, and for those of a changed copy."""
        if name.partition(".")[0] not in PROBED:
            return None
        base = ROOT / name.replace(".", "/")
        files = base.with_suffix(".py"), base / "__init__.py"
        found = importlib.machinery.PathFinder.find_spec(name, path)
        if found is not None and found.origin and Path(found.origin).resolve() not in files:
            return None
        for file in files:
            if code_path(self.folder, file).exists():
                spec = importlib.util.spec_from_file_location(name, file, loader=Loader(name, str(file), self))
                if spec is not None and found is not None:  # a copy may link to the files that it does not change
                    spec.submodule_search_locations = found.submodule_search_locations
                return spec
        return None


def loaded_modules() -> list[str]:
    """Return the modules of the product that this process has imported, of which nothing would be recorded."""
    return [name for name in sys.modules if name.partition(".")[0] in PROBED]


def install(buffer: Path) -> Finder:
    """Load the product with probes from now on, which write into the file `buffer` of a prepared folder."""
    folder = buffer.parent
    finder = Finder(folder, (folder / "size").stat().st_size)
    finder.use(buffer)
    sys.meta_path.insert(0, finder)
    return finder


def install_from_environment() -> None:
    """Install the probes in an interpreter that a test has started; called by the .pth file."""
    buffer = Path(os.environ[VARIABLE])
    finder = install(buffer)
    # The main program is not imported: record at least that it ran.
    for argument in sys.orig_argv[1:4]:
        path = Path(argument)
        if path.suffix == ".py" and path.exists() and path.resolve().is_relative_to(ROOT):
            at = json.loads((finder.folder / "files.json").read_text()).get(path.resolve().relative_to(ROOT).as_posix())
            if at is not None:
                finder.buffer[at] = 1


def install_for_interpreters() -> Path:
    """Write the .pth file that installs the probes in every interpreter of this environment; return its path.

    A sitecustomize module would be hidden by those of tests that have their own.
    """
    import sysconfig

    path = Path(sysconfig.get_path("purelib")) / "moe_trainer_test_probes.pth"
    code = f"import os, sys; {VARIABLE!r} in os.environ and (sys.path.append({str(Path(__file__).parents[1])!r}), __import__('suite.probes').probes.install_from_environment(), sys.path.pop())"
    path.write_text(code + "\n")
    return path

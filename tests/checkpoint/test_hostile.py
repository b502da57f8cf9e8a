"""Malicious files in place of checkpoints: no code in them runs, and each gives one clear error."""

import argparse
import contextlib
import functools
import io
import os
import pickle
import random
import shutil
import struct
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from bad_input import DEEP, RUNS, Call, error_of
from checkpoint.fake import RECORD, FakeModel, FakeOptimizer
from harness import run_ranks
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex

from moe_trainer.checkpoint.archive import load_bytes, load_mapped, verify_checksums
from moe_trainer.checkpoint.common_state import KEY, dump_object
from moe_trainer.checkpoint.folder_format import detect_format
from moe_trainer.checkpoint.index import check, read_index
from moe_trainer.checkpoint.inspect import main as inspect
from moe_trainer.checkpoint.manager import CheckpointError, CheckpointState, LoadOptions, SaveOptions, load, save
from moe_trainer.checkpoint.unpickle import DECODE_ERRORS, UnknownObject, load_pickle, to_builtin
from moe_trainer.parallel.state import ParallelState

SINGLE = ParallelState.single()


class Program(torch.nn.Module):
    """A TorchScript module whose __setstate__ writes a file when torch.jit.load decodes it."""

    def __init__(self, path: str):
        super().__init__()
        self.path = path

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path = state[0]
        written = torch.from_file(state[0], True, 4).fill_(1.0)
        self.training = state[1] and bool(written.sum() > 0)  # what is not used would be left out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> tuple[bytes, Path]:
    """(a TorchScript archive, the file that it overwrites when it is run); the file is empty again."""
    target = tmp_path_factory.mktemp("outside") / "target"
    content = io.BytesIO()
    torch.jit.save(torch.jit.script(Program(str(target))), content)
    target.unlink(missing_ok=True)
    torch.load(io.BytesIO(content.getvalue()), weights_only=False)  # the program works: torch.load alone runs it
    assert target.exists()
    target.unlink()
    return content.getvalue(), target


def rewritten(content: bytes, rename=lambda name: name, drop=(), add=()) -> bytes:
    """The same archive with other names of records, without some, with others."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(out, "w") as target:
        for entry in source.infolist():
            if not entry.filename.endswith(tuple(drop)) or not drop:
                target.writestr(rename(entry.filename), source.read(entry))
        for name, data in add:
            target.writestr(name, data)
    return out.getvalue()


def disguises(content: bytes) -> dict[str, bytes]:
    """The archive, and variants of it that hide constants.pkl from a search by name."""
    return {
        "as it is": content,
        "upper case": rewritten(content, lambda name: name.replace("constants.pkl", "CONSTANTS.PKL")),
        "another folder": rewritten(content, lambda name: name.replace("archive/", "model/")),
        "backslashes": rewritten(content, lambda name: name.replace("/constants", "\\constants")),
        "bytes in front": b"PK\x03\x04" + bytes(60) + content,
        "text in front": b"#!/bin/sh\n" + content,
        "twice": rewritten(content, add=[("archive/data.pkl", b"\x80\x02N.")]),
        "without constants": rewritten(content, drop=["constants.pkl"]),
        "another pickle": rewritten(content, add=[("other/data.pkl", b"\x80\x02N.")]),
        "a comment": content[:-2] + struct.pack("<H", 5) + b"hello",
    }


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    """A checkpoint of each format: the folder that holds `torch_dist` and `torch`."""
    folder = tmp_path_factory.mktemp("whole")
    record = RECORD | {"world_size": 1, "params_dtype": "float32"}
    record |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    for name in ("torch_dist", "torch"):
        model, options = FakeModel(seed=1), SaveOptions(ckpt_format=name)
        save(folder / name, CheckpointState(3, record), [model], FakeOptimizer(model, SINGLE, seed=1), SINGLE, options)
    return folder


def replace_entry(folder: Path, key: str, content: bytes) -> None:
    """Replace the bytes of an entry of a torch_dist folder."""
    index = read_index(folder)
    place = next(each for each in index.storage_data if each.fqn.startswith(key))
    (folder / "foreign.distcp").write_bytes(content)
    index.storage_data[place] = type(index.storage_data[place])("foreign.distcp", 0, len(content))
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def load_error(folder: Path, *words: str, **options) -> str:
    """Return the error of loading the folder's newest checkpoint."""
    model = FakeModel(seed=2)
    optimizer, options = FakeOptimizer(model, SINGLE, seed=2), LoadOptions(RECORD, **options)
    text = error_of(CheckpointError, load, folder, [model], optimizer, SINGLE, options, words=words)
    assert "\n  File" not in text
    return text


def put(folder: Path, where: str, content: bytes) -> None:
    """Put `content` at one place of the checkpoint in a folder."""
    folder = folder / "iter_0000003"
    if where == "legacy":
        (folder / "mp_rank_00/model_optim_rng.pt").write_bytes(content)
    elif where == "common.pt":
        index = read_index(folder)
        index.state_dict_metadata.pop(KEY, None)
        (folder / ".metadata").write_bytes(pickle.dumps(index))
        (folder / "common.pt").write_bytes(content)
    else:
        replace_entry(folder, where, content)


def copied(full: Path, tmp_path: Path, kind: str = "torch_dist") -> Path:
    return Path(shutil.copytree(full / kind, tmp_path / kind))


@pytest.mark.parametrize(
    "where", ["legacy", "common.pt", "common_state", "rng_state", "decoder.final_layernorm.weight", "optimizer.state"]
)
def test_torchscript_in_place_of_a_file_is_never_run(full, program, tmp_path, where, capsys):
    """TorchScript, however it is dressed up: --load, inspect ls and inspect verify refuse it and never run it."""
    content, target = program
    directory = copied(full, tmp_path, "torch" if where == "legacy" else "torch_dist")
    for name, disguised in disguises(content).items():
        if name == "as it is" or where in ("legacy", "common_state"):  # one place for each reader
            put(directory, where, disguised)
            load_error(directory, "iter_0000003")
            assert not target.exists(), f"{name}: the program in {where} ran"
    put(directory, where, content)
    load_error(directory, "iter_0000003", "a program", "nothing in a file is run")
    for command in ("ls", "verify"):
        inspect([command, str(directory)])
    assert "Traceback" not in "".join(capsys.readouterr()) and not target.exists()


def test_disguised_torchscript_is_run_by_no_reader(program, tmp_path):
    content, target = program
    path = tmp_path / "file"
    for name, disguised in disguises(content).items():
        path.write_bytes(disguised)
        for read, source in ((load_mapped, path), (load_bytes, disguised), (verify_checksums, path)):
            with contextlib.suppress(DECODE_ERRORS):
                read(source)
            assert not target.exists(), f"{name}: {read.__name__} ran it"
    path.write_bytes(content)
    error_of(ValueError, verify_checksums, path, words=["a program"])


def test_torch_package_and_exported_program_are_rejected(tmp_path):
    with torch.package.PackageExporter(tmp_path / "package.pt") as package:
        package.save_text("evil", "evil.py", "raise SystemExit(7)")
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), tmp_path / "exported.pt2")
    for path in (tmp_path / "package.pt", tmp_path / "exported.pt2"):
        for read in (load_mapped, lambda path: load_bytes(path.read_bytes())):
            with pytest.raises(ValueError, match="a program"):
                read(path)


def test_reader_equals_torch_load_on_torch_save_files(tmp_path):
    base = torch.arange(24, dtype=torch.float32)
    dtypes = (torch.bfloat16, torch.int64, torch.bool, torch.uint16, torch.complex64)
    value = {
        "a": base.view(4, 6), "part": base[3:9], "turned": base.view(4, 6).t(), "none": torch.zeros(0, 3), "one": torch.tensor(2.5),
        "spread": torch.ones(1).expand(3, 4), "eight": torch.ones(3).to(torch.float8_e4m3fn), "parameter": torch.nn.Parameter(torch.ones(2)),
        **{str(dtype): torch.ones(5, dtype=dtype) for dtype in dtypes},
        "numpy": numpy.random.RandomState(3).get_state(), "scalar": numpy.float64(1.5), "columns": numpy.asfortranarray(numpy.ones((2, 3))),
        "big": numpy.arange(3, dtype=">i4"), "bytes": b"\xff\x00", "namespace": argparse.Namespace(x=1, dtype=torch.float16), "path": Path("a/b"),
    }  # fmt: skip
    for protocol in (2, 4):
        torch.save(value, tmp_path / "file", pickle_protocol=protocol)
        for found in (load_mapped(tmp_path / "file"), load_bytes((tmp_path / "file").read_bytes())):
            assert found.keys() == value.keys()
            for name, one in value.items():
                if isinstance(one, torch.Tensor):
                    read = found[name]
                    assert (read.dtype, read.shape, read.stride()) == (one.dtype, one.shape, one.stride()), name
                    if one.numel() > 1:
                        read, one = (tensor.contiguous().view(torch.uint8) for tensor in (read, one))
                    assert torch.equal(read, one), name
                elif isinstance(one, numpy.ndarray):
                    assert numpy.array_equal(found[name], one), name
            assert found["part"].untyped_storage().data_ptr() == found["a"].untyped_storage().data_ptr()
            assert numpy.array_equal(found["numpy"][1], value["numpy"][1])
            assert (found["scalar"], found["bytes"]) == (1.5, b"\xff\x00")
            numpy.random.RandomState().set_state(found["numpy"])
            assert found["namespace"].x == 1 and str(found["path"]) == "a/b"
    verify_checksums(tmp_path / "file")


PICKLED_CALLS = (
    (os.system, "touch ran"), (exec, "raise SystemExit(7)"), (eval, "1/0"), (open, "ran", "w"), (__import__, "antigravity"),
    (getattr, os, "system"), (torch.load, "x"), (torch.jit.load, "x"), (numpy.load, "x"), (numpy.memmap, "ran", "uint8", "w+", 0, 4),
    (shutil.rmtree, "x"), (pickle.loads, b"N."), (torch.hub.load, "x", "y"), (torch.classes.load_library, "x"),
)  # fmt: skip


def test_pickled_calls_are_never_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    executed = 0
    for function, *args in PICKLED_CALLS:
        file = io.BytesIO()
        try:
            torch.save({"x": Call(function, *args)}, file)
            plain_pickle = pickle.dumps(Call(function, *args))
        except (pickle.PicklingError, AttributeError, TypeError):
            continue  # this one cannot be pickled here
        executed += 1
        assert isinstance(load_bytes(file.getvalue())["x"], UnknownObject), function
        assert isinstance(load_pickle(plain_pickle), UnknownObject), function
        assert os.listdir(tmp_path) == []
    assert executed >= 12


def test_getattr_gives_members_of_enums_only():
    """Python 3.11.0 to 3.11.3 pickle a member of an enum as a call of getattr, torch's index has one."""
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert load_pickle(pickle.dumps(Call(getattr, _MEM_FORMAT_ENCODING, member.name))) is member
    for kind, attribute in ((_MEM_FORMAT_ENCODING, "__init__"), (Metadata, "__init__"), (str, "format")):
        assert isinstance(load_pickle(pickle.dumps(Call(getattr, kind, attribute))), UnknownObject)


def make_pickle(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


SETS = b"N(X\x08\x00\x00\x00__init__X\x01\x00\x00\x00xd\x86b"  # BUILD with the slots {"__init__": "x"}


CLASSES = (
    "argparse Namespace", "torch.distributed.checkpoint.metadata Metadata", "numpy ndarray", "numpy dtype",
    "torch.distributed.checkpoint.metadata MetadataIndex", "torch FloatStorage", "collections OrderedDict",
    "torch.distributed.checkpoint.filesystem _StorageInfo", "pathlib PosixPath", "signal Signals", "torch float32",
)  # fmt: skip


def test_a_pickle_cannot_change_a_class():
    guarded = (argparse.Namespace, Metadata, MetadataIndex, torch.FloatStorage, Path)
    before = {one: dict(vars(one)) for one in guarded}
    for kind in CLASSES:
        module, _, attribute = kind.partition(" ")
        with contextlib.suppress(DECODE_ERRORS):
            load_pickle(make_pickle(name(module, attribute), SETS))
        assert {one: dict(vars(one)) for one in guarded} == before, kind
        assert Metadata({}).state_dict_metadata == {} and argparse.Namespace(x=1).x == 1, kind


def doubled(begin: bytes, step: bytes, *after: bytes) -> bytes:
    """Values that each contain the previous one twice (2^60 in 400 bytes), and `after`, which uses number 60."""
    return make_pickle(begin, *(step % (number, number, number + 1) for number in range(60)), *after)


def doubling_tuples(*after: bytes) -> bytes:
    return doubled(b"()q\x00", b"h%ch%c\x86q%c", b"1", *after)


LISTS = b"](h%ch%ceq%c"
UNBOUNDED = {
    "a key": doubling_tuples(b"}h<Ns"), "keys": doubling_tuples(b"}(h<Nu"), "a frozenset": doubling_tuples(b"cbuiltins\nfrozenset\n]h<a\x85R"),
    "a set": doubling_tuples(b"cbuiltins\nset\n]h<a\x85R"), "a set of protocol 4": doubling_tuples(b"\x8f(h<\x90"), "a slice": doubling_tuples(b"cbuiltins\nslice\nh<NN\x87R"),
    "a deep key": make_pickle(b"})", b"\x85" * 100_000, b"Ns"), "an index": doubling_tuples(
        b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81}X\x03\x00\x00\x00fqnh<sb"),
    "lists in a slice": doubled(b"(]q\x00", LISTS, b"1cbuiltins\nslice\nh<NN\x87R"),
}  # fmt: skip


def _messages(rank, world_size):
    messages = []
    for name, content in UNBOUNDED.items():
        try:
            to_builtin(load_pickle(content))
        except (ValueError, pickle.UnpicklingError) as error:
            messages.append(f"{name}: {error}")
    return messages


def test_unbounded_hashes_and_messages_are_rejected():
    """In a separate process, because the hash of a tuple cannot be interrupted."""
    message = "its values are nested more than 100 deep, or are more than 262144"
    assert run_ranks(_messages, 1, timeout=300) == [[f"{name}: {message}" for name in UNBOUNDED]]


def test_ordinary_tuples_are_read():
    state = {
        "random": random.getstate(),
        "shape": [(1, (2, 3))] * 1000,
        ("a", 1): torch.Size((2, 3)),
        "set": frozenset([(1, 2)]),
    }
    found = load_pickle(pickle.dumps(state, 4))
    assert found == state


LARGE = {
    "deep": make_pickle(b"]" * 100_000 + b"a" * 99_999),
    "doubled": doubled(b"]q\x00", LISTS),
    "in itself": make_pickle(b"]q\x00h\x00a"),
}


def test_exponentially_large_values_are_rejected(full, tmp_path):
    directory = copied(full, tmp_path, "torch")
    for content in LARGE.values():
        error_of(DECODE_ERRORS, lambda content: to_builtin(load_pickle(content)), content)
        data = make_pickle(b"}X\x04\x00\x00\x00args", content[2:-1], b"s")
        put(directory, "legacy", rewritten(dump_object(0), drop=["data.pkl"], add=[("archive/data.pkl", data)]))
        load_error(directory, "model_optim_rng.pt")


def make_archive(data: bytes, storage: bytes = bytes(64), **more) -> bytes:
    """An archive of torch.save with another pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", **more) as target:
        target.writestr("archive/data.pkl", data)
        target.writestr("archive/data/0", storage)
    return out.getvalue()


def tensor(sizes: tuple, strides: tuple, offset: int = 0, key: str = "0") -> bytes:
    """A pickle of a float tensor over the storage `key`."""
    stored = object()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", torch.FloatStorage, key, "cpu", 16) if value is stored else None

    out = io.BytesIO()
    Pickler(out, 2).dump(Call(torch._utils._rebuild_tensor_v2, stored, offset, sizes, strides, False, None))
    return out.getvalue()


OUTSIDE = (
    ((17,), (1,)), ((4,), (5,), 1), ((10**12,), (1,)), ((2,), (-1,), 1), ((-1,), (1,)), ((4,), (1,), -1), ((4,), (1, 1)),
    ((2,), (2**62,)), ((4,), (1,), 0, "1"), ((4,), (1,), 0, "../data.pkl"), ((1.5,), (1,)),
)  # fmt: skip


def test_tensor_outside_its_storage_is_rejected():
    assert load_bytes(make_archive(tensor((4, 4), (4, 1)))).shape == (4, 4)
    for row in OUTSIDE:
        error_of(DECODE_ERRORS, load_bytes, make_archive(tensor(*row)))


def test_compressed_or_overlapping_archive_is_rejected(tmp_path):
    """Compressed records (64 MB of zeros in 64 KB), and a table whose records lie over each other."""
    bomb = make_archive(tensor((4,), (1,)), bytes(1 << 26), compression=zipfile.ZIP_DEFLATED)
    assert len(bomb) < 1 << 17
    content = bytearray(make_archive(tensor((4,), (1,)), bytes(1 << 16)))
    end = content.rindex(b"PK\x05\x06")
    table = content.index(b"PK\x01\x02")
    entries, many = bytes(content[table:end]), 40
    last = entries[entries.rindex(b"PK\x01\x02") :]
    more = b"".join(last.replace(b"archive/data/0", b"archive/data/" + bytes([65 + number])) for number in range(many))
    table_bytes = entries + more
    over = (
        bytes(content[:table])
        + table_bytes
        + b"PK\x05\x06"
        + struct.pack("<HHHHIIH", 0, 0, 2 + many, 2 + many, len(table_bytes), table, 0)
    )
    for path, file, reason in (("bomb", bomb, "compressed"), ("over", over, "longer than the file")):
        (tmp_path / path).write_bytes(file)
        for read in (load_mapped, lambda path: load_bytes(path.read_bytes()), verify_checksums):
            with pytest.raises(ValueError, match=reason):
                read(tmp_path / path)


def test_numpy_object_array_is_rejected():
    """numpy would take bytes as the addresses of objects."""
    reconstruct = numpy.zeros(1).__reduce__()[0]

    class Forged:
        def __reduce__(self):
            return reconstruct, (numpy.ndarray, (0,), b"b"), (1, (1,), numpy.dtype("O"), False, b"\x41" * 8)

    with pytest.raises(DECODE_ERRORS):
        load_bytes(dump_object(Forged()))
    assert not isinstance(load_pickle(pickle.dumps(numpy.zeros(2), 2)), UnknownObject)


STATES = (
    RUNS, None, {}, [], "text", [None], ["text"], [{}], [{"random_rng_state": None}],
    [{"random_rng_state": (3, (1,), None), "np_rng_state": "x", "torch_rng_state": torch.zeros(5)}],
    [{"random_rng_state": RUNS, "np_rng_state": RUNS, "torch_rng_state": RUNS}],
)  # fmt: skip


@pytest.mark.parametrize("kind", ["torch_dist", "torch"])
def test_malicious_random_state_is_rejected(kind, full, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = copied(full, tmp_path, kind)
    path = directory / "iter_0000003/mp_rank_00/model_optim_rng.pt"
    saved = torch.load(path, weights_only=False) if kind == "torch" else None
    read = functools.partial(load, directory, [FakeModel(seed=2)], None, SINGLE)
    for value in STATES:
        if kind == "torch" and value is None:
            continue  # saved without one
        if kind == "torch":
            torch.save(saved | {"rng_state": value}, path)
        else:
            put(directory, "rng_state", dump_object(value))
        state = torch.get_rng_state()
        try:
            read(LoadOptions(RECORD))
        except CheckpointError as error:
            assert "random state" in str(error) and "--no-load-rng" in str(error), value
        else:
            assert torch.equal(torch.get_rng_state(), state) or value in ([], {}), value
        read(LoadOptions(RECORD, load_rng=False))
    assert not (tmp_path / "ran").exists()


EDITS = (
    *({"iteration": value} for value in ("three", float("nan"), -1, [1])),
    *({"args": value} for value in ("text", [1], None)),
    *({"opt_param_scheduler": value} for value in ({"num_steps": "many"}, {"num_steps": -5}, {"max_lr": float("nan")}, "text")),
    *({"moe_trainer": value} for value in ("text", {"extra": "x"}, {"extra": {}, "optimizer": [1]})),
    *({"moe_trainer": {"extra": {}, "optimizer": {"step": value}}} for value in ("many", float("inf"))),
    {"num_floating_point_operations_so_far": "x"},
    *({"args": argparse.Namespace(**RECORD, consumed_train_samples=value)} for value in ("many", -7)),
    {"optimizer": {"param_groups": "x"}, "moe_trainer": None, "args": argparse.Namespace()},
)  # fmt: skip


def test_malicious_values_in_the_common_state_are_rejected(full, tmp_path, capsys):
    directory = copied(full, tmp_path)
    folder = directory / "iter_0000003"
    place = read_index(folder).storage_data[MetadataIndex(KEY)]
    content = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
    common = torch.load(io.BytesIO(content), weights_only=False)[0]
    for edit in EDITS:
        put(directory, KEY, dump_object(common | edit))
        text = load_error(directory)
        assert str(folder) in text or "flags that differ" in text, edit
        inspect(["ls", str(directory)])
        assert "Traceback" not in capsys.readouterr().err, edit


def test_malicious_json_in_the_checkpoint_folder_is_rejected(full, tmp_path):
    directory = copied(full, tmp_path)
    folder = directory / "iter_0000003"
    sound = (folder / "metadata.json").read_bytes()
    for content in (DEEP, b'{"a":' * 100_000, b"NaN", b"[1]", b'{"sharded_backend": 7}', b"\xff\xfe", b"1" * 10_000):
        (folder / "metadata.json").write_bytes(sound)
        (folder / "integrity.json").write_bytes(content)
        assert check(folder, hashes=True), content[:20]
        load_error(directory, "integrity.json", verify_integrity=True)
        (folder / "metadata.json").write_bytes(content)
        assert detect_format(folder) in (None, "7"), content[:20]
        text = load_error(directory)
        assert "metadata.json" in text or "format" in text, content[:20]


def test_files_outside_the_folder_are_not_read(full, tmp_path):
    """integrity.json with a path: the hash of a file elsewhere reveals its content."""
    folder = copied(full, tmp_path) / "iter_0000003"
    (tmp_path / "secret").write_text("secret")
    (folder / "integrity.json").write_text('{"files": {"../../secret": "0", "/etc/passwd": "0"}}')
    (problem,) = check(folder, hashes=True)
    assert "outside" in problem


def test_symlink_loops_and_device_files_are_rejected_by_name(full, tmp_path):
    for kind, name, target in (
        *(("torch_dist", name, name) for name in ("__0_0.distcp", ".metadata", "metadata.json")),
        ("torch", "mp_rank_00/model_optim_rng.pt", "/dev/zero"),
    ):
        directory = copied(full, tmp_path / Path(name).name, kind)
        path = directory / "iter_0000003" / name
        path.unlink()
        path.symlink_to(target)
        load_error(directory, path.name)

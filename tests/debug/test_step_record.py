"""The record of an iteration on disk: traces are independent of the mapping, tokens are joined in order, damage is reported."""

import json
import os

import pytest
import torch

from moe_trainer.debug import step_record
from moe_trainer.debug.step_record import Record
from moe_trainer.parallel.sequence import SequenceShard
from moe_trainer.parallel.state import Group

HEAD = {"samples": 4, "seq_length": 16, "world_size": 1}


def write_record(folder, ranks, head=HEAD):
    staging = step_record.make_staging_dir(folder)
    names = []
    for rank, tensors in enumerate(ranks):
        step_record.write_rank(staging, rank, tensors, {"torch": torch.get_rng_state()})
        names += [step_record.rank_file(rank), step_record.random_file(rank)]
    step_record.finalize_record(staging, folder, {**head, "world_size": len(ranks)}, names)
    return Record.open(folder)


def make_rank_tensors(full_NSK, dp, cp, tp, micro=1):
    """The tensors that the ranks of a mapping write for `full_NSK`, with rows sharded over tp."""
    found = []
    for data in range(dp):
        for context in range(cp):
            for tensor in range(tp):
                group = Group("cp", tuple(range(cp)), context, cp)
                held = SequenceShard(group).positions(full_NSK.shape[1])
                mine = held.chunk(tp)[tensor]
                microbatches = len(full_NSK) // (dp * micro)
                samples = (torch.arange(microbatches)[:, None] * dp + data) * micro + torch.arange(micro)
                passes = [full_NSK[each][:, mine].transpose(0, 1).contiguous() for each in samples]
                found.append(step_record.tensors_of_rank(samples, [held, mine], {"trace/x": passes}, {}))
    return found


@pytest.mark.parametrize(
    ("dp", "cp", "tp", "micro"), [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 2), (1, 1, 2, 4), (2, 2, 2, 2), (4, 4, 2, 1)]
)
def test_tokens_of_any_mapping_are_joined_in_global_order(tmp_path, dp, cp, tp, micro):
    full_NSK = torch.randn(4, 16, 3)
    found = write_record(tmp_path / "r", make_rank_tensors(full_NSK, dp, cp, tp, micro))
    assert torch.equal(found.joined("trace/x"), full_NSK)


def test_missing_or_duplicate_token_is_an_error(tmp_path):
    two = make_rank_tensors(torch.randn(4, 16, 3), 2, 1, 1)
    for name, ranks in (
        ("missing", two[:1]),
        ("twice", [two[0], two[0]]),
        ("absent", [{key: value for key, value in two[0].items() if key != "trace/x"}]),
    ):
        with pytest.raises(ValueError, match=r"trace/x is there (for no token|not exactly once)"):
            write_record(tmp_path / name, ranks).joined("trace/x")


def test_projected_traces_estimate_the_size_of_a_difference():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 64, generator=generator)
    error = 1e-3 * torch.randn(400, 64, generator=generator)
    signs = step_record.random_signs(64)
    apart = (step_record.project_tokens(x + error, signs) - step_record.project_tokens(x, signs)).double()[:, :-1].norm(
        dim=-1
    ) / step_record.SIGNS**0.5
    assert (apart / error.double().norm(dim=-1)).mean() == pytest.approx(1.0, abs=0.05)
    assert torch.allclose(step_record.project_tokens(x, signs)[:, -1], x.norm(dim=-1))


def test_projected_traces_are_independent_of_the_batch_of_rows():
    x = torch.randn(33, 96)
    signs = step_record.random_signs(96)
    assert torch.equal(
        step_record.project_tokens(x, signs), torch.cat([step_record.project_tokens(row[None], signs) for row in x])
    )
    assert torch.equal(step_record.random_signs(96), signs) and set(signs.flatten().tolist()) == {-1.0, 1.0}


def test_older_record_of_the_same_name_is_replaced(tmp_path):
    for value in (1.0, 2.0):
        found = write_record(tmp_path / "r", make_rank_tensors(torch.full((4, 16, 1), value), 1, 1, 1))
    assert found.joined("trace/x").unique().tolist() == [2.0] and [path.name for path in tmp_path.iterdir()] == ["r"]
    assert found.generators(0)["torch"].equal(torch.get_rng_state())


def test_record_gets_its_name_only_when_complete(tmp_path, monkeypatch):
    staging = step_record.make_staging_dir(tmp_path / "r")
    step_record.write_rank(staging, 0, make_rank_tensors(torch.randn(4, 16, 1), 1, 1, 1)[0], {})
    monkeypatch.setattr(os, "fsync", lambda _file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        step_record.finalize_record(staging, tmp_path / "r", HEAD, [step_record.rank_file(0)])
    with pytest.raises(ValueError, match="there is no such folder"):
        Record.open(tmp_path / "r")


def damage(path, how):
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "short":
        path.write_bytes(data[:-10])
    else:
        path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])


@pytest.mark.parametrize("how", ["gone", "short", "changed"])
@pytest.mark.parametrize("name", [step_record.rank_file(0), step_record.random_file(0), step_record.HEAD])
def test_damaged_record_error_names_the_file(tmp_path, name, how):
    write_record(tmp_path / "r", make_rank_tensors(torch.randn(4, 16, 1), 1, 1, 1))
    if (name, how) == (step_record.HEAD, "changed"):
        (tmp_path / "r" / name).write_text(json.dumps({"files": []}))
    else:
        damage(tmp_path / "r" / name, how)
    with pytest.raises(ValueError, match=name):
        Record.open(tmp_path / "r")


def test_record_of_another_version_is_refused(tmp_path):
    write_record(tmp_path / "r", make_rank_tensors(torch.randn(4, 16, 1), 1, 1, 1))
    path = tmp_path / "r" / step_record.HEAD
    path.write_text(path.read_text().replace(f'"format": {step_record.FORMAT}', '"format": 99'))
    with pytest.raises(ValueError, match="format 99, this version reads"):
        Record.open(tmp_path / "r")


def test_changed_record_head_is_reported_as_damaged(tmp_path):
    write_record(tmp_path / "r", make_rank_tensors(torch.randn(4, 16, 1), 1, 1, 1))
    path = tmp_path / "r" / step_record.HEAD
    head = json.loads(path.read_text())
    for changed in ({**head, "world_size": 2}, {name: value for name, value in head.items() if name != "samples"}):
        path.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match="record.json: damaged"):
            Record.open(tmp_path / "r")
    path.write_text(step_record.head_text({name: value for name, value in head.items() if name != "blake2b"}))
    assert Record.open(tmp_path / "r").head["world_size"] == 1

"""Synthetic models over every parallel dimension: which rank writes which tensors, and loading under any other mapping."""

import shutil
from dataclasses import replace

import pytest
import torch
from checkpoint.fake import RECORD, FakeModel, FakeOptimizer, fake_chunks, layer_shapes, moment
from harness import run_ranks

from moe_trainer.checkpoint import ownership, random_state, reading
from moe_trainer.checkpoint.index import read_index
from moe_trainer.checkpoint.inspect import differences
from moe_trainer.checkpoint.manager import (
    AsyncSaver,
    CheckpointError,
    CheckpointState,
    LoadOptions,
    SaveOptions,
    load,
    save,
)
from moe_trainer.checkpoint.options import PlanCache
from moe_trainer.checkpoint.verify import verify_checkpoint
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import ParallelState

LAYERS = [layer_shapes(hidden=16, ffn=8, qkv=32, experts=4) for _ in range(4)]
FLAGS = RECORD | {"num_layers": 4, "hidden_size": 16, "num_experts": 4}
HOW = {"layers": LAYERS, "vocab": 32, "hidden": 16, "expert_bias": True, "tied": True}

# Ranks, sizes of the grid, virtual stages, distributed optimizer. Each reads what the one before has written.
# PP 4 -> EP 4 failed in Megatron-LM (issue 1517); here both ways. So did another EP size with flat optimizer ranges on
# both sides (issue 4200; UniRL 158 lost seven of eight experts): here EP 2 -> 4 and 4 -> 2.
MAPPINGS = (
    (4, dict(tp=2, pp=2, ep=2, etp=1), 1, False),
    (1, dict(), 1, False),
    (2, dict(tp=2, etp=2), 1, True),
    (2, dict(pp=2), 2, False),
    (4, dict(tp=2, pp=2, etp=2), 1, True),
    (4, dict(cp=2, ep=2), 1, True),
    (4, dict(ep=4), 1, True),
    (4, dict(pp=4), 1, False),
    (4, dict(ep=4), 1, True),
    (8, dict(tp=2, cp=2, pp=2, ep=2, etp=2), 2, True),
)


def make(ps, vpp, distributed, seed):
    chunks = fake_chunks(ps, vpp, seed=seed, **HOW)
    return chunks, FakeOptimizer(chunks, ps, distributed, main_params=True, seed=seed)


def write(folder, iteration, chunks, optimizer, ps, options=None):
    save(folder, CheckpointState(iteration, FLAGS), chunks, optimizer, ps, options or SaveOptions())


def _save(rank, n, folder, sizes, vpp, distributed, options):
    ps = ParallelState.create(n, rank, **sizes)
    write(folder, 3, *make(ps, vpp, distributed, seed=1), ps, options)


def _load_and_save(rank, n, source, target, sizes, vpp, distributed):
    """Load into other values, compare with the values that the name alone determines, save again."""
    ps = ParallelState.create(n, rank, **sizes)
    chunks, optimizer = make(ps, vpp, distributed, seed=2)
    load(source, chunks, optimizer, ps, LoadOptions(FLAGS))
    for chunk, expected in zip(chunks, fake_chunks(ps, vpp, seed=1, **HOW), strict=True):
        found = chunk.tensors()
        assert all(torch.equal(found[name], value) for name, value in expected.tensors().items())
    for number, name in enumerate(("exp_avg", "exp_avg_sq", "fp32_param")):
        for held in optimizer.held:
            if held.state_name == name:
                full = moment(held.param, 1000 + number).flatten()
                assert torch.equal(held.tensor, full[held.start : held.stop]), held.param.info.names
    write(target, 3, chunks, optimizer, ps)


def test_checkpoint_of_any_mapping_loads_under_any_other(tmp_path):
    """A chain: each mapping loads the checkpoint of the previous one and saves it again; no value changes."""
    n, sizes, vpp, distributed = MAPPINGS[0]
    source = first = tmp_path / "0"
    run_ranks(_save, n, source, sizes, vpp, distributed, SaveOptions())
    for number, (n, sizes, vpp, distributed) in enumerate(MAPPINGS[1:], 1):
        target = tmp_path / str(number)
        run_ranks(_load_and_save, n, source, target, sizes, vpp, distributed)
        assert verify_checkpoint(target / "iter_0000003").problems == []
        source = target
    # where a mapping had lost or changed something, those after it would have, too
    assert differences(first / "iter_0000003", source / "iter_0000003") == []


def test_flagscale_1188_more_tensor_ranks_than_expert_ranks(tmp_path):
    """TP > EP * ETP lost files (FlagScale 1188): every expert must be saved, with its own values."""
    run_ranks(_save, 4, tmp_path / "tp", dict(tp=4, ep=2, etp=1), 1, True, SaveOptions())
    index = read_index(tmp_path / "tp/iter_0000003")
    stored = {
        tuple(chunk.offsets[:2])
        for chunk in index.state_dict_metadata["decoder.layers.mlp.experts.experts.linear_fc2.weight"].chunks
    }
    assert stored == {(layer, expert) for layer in range(4) for expert in range(4)}
    run_ranks(_load_and_save, 1, tmp_path / "tp", tmp_path / "one", dict(), 1, False)


def _save_wrong_experts(rank, n, folder):
    """Every rank claims the experts of rank 0 (same), or the second rank has none."""
    texts = []
    for same in (True, False):
        ps = ParallelState.create(n, rank, ep=2)
        model = FakeModel(ps=ps, **HOW)
        for param in model.parameters():
            if param.info.stacked and rank == 1:
                names = tuple(
                    name.replace(f"experts.{2 + e}.", f"experts.{e}.") for e, name in enumerate(param.info.names)
                )
                new = {"names": names} if same else {"is_replica": True, "tied": True}
                param.info = replace(param.info, **new)
        with pytest.raises(CheckpointError) as error:
            save(folder, CheckpointState(3, FLAGS), [model], None, ps, SaveOptions())
        texts.append(str(error.value))
    return texts


def test_kempnerforge_202_a_save_without_all_experts_is_refused(tmp_path):
    """KempnerForge 202 saved one rank's experts only and resumed silently wrong."""
    for same, none in run_ranks(_save_wrong_experts, 2, tmp_path):
        assert "mlp.experts.experts.linear_fc1.weight" in same and "both write" in same
        assert "mlp.experts.experts.linear_fc1.weight" in none and "hold 2048 of 4096 elements" in none
    assert list(tmp_path.iterdir()) == []


# ---- who writes what


def _bytes_by_rank(folder, n):
    files = [folder / "iter_0000003" / f"__{rank}_0.distcp" for rank in range(n)]
    return [path.stat().st_size if path.exists() else 0 for path in files]


def _save_with_and_without_replicas(rank, n, folder):
    for name in ("shared", "first"):
        options = SaveOptions(fully_parallel=name == "shared", save_rng=False)
        _save(rank, n, folder / name, dict(ep=2), 1, False, options)


def test_fully_parallel_save_balances_bytes_over_replicas(tmp_path):
    run_ranks(_save_with_and_without_replicas, 4, tmp_path)
    shared, first = (_bytes_by_rank(tmp_path / name, 4) for name in ("shared", "first"))
    assert max(shared) < 1.25 * min(shared)
    assert first[2] == first[3] == 0, "the second replica of everything has nothing to write"
    assert differences(tmp_path / "shared/iter_0000003", tmp_path / "first/iter_0000003") == []


def _count_communicated(rank, n, folder, sizes):
    """Return the group and the size of every object that this rank sent during two saves, which send no tensors."""
    ps = ParallelState.create(n, rank, **sizes)
    made = {distributed: make(ps, 1, distributed, seed=1) for distributed in (False, True)}
    seen = []

    def forbidden(*args, **kwargs):
        raise AssertionError("a save must not communicate tensors")

    original = ownership.collectives.all_gather_object

    def watched(thing, group):
        seen.append((group.name, len(repr(thing))))
        return original(thing, group)

    for name in ("all_gather_flat", "all_reduce", "broadcast", "gather", "send"):
        setattr(ownership.collectives, name, forbidden)
    ownership.collectives.all_gather_object = watched
    for distributed, (chunks, optimizer) in made.items():
        write(folder / str(distributed), 3, chunks, optimizer, ps, SaveOptions(save_rng=False))
    return seen


def test_no_rank_gathers_a_model_or_all_plans(tmp_path):
    for seen in run_ranks(_count_communicated, 8, tmp_path, dict(tp=2, pp=2, ep=2, etp=1)):
        assert seen and all(group in ("dp_cp", "edp") and size < 500 for group, size in seen), seen


def _save_three_times(rank, n, folder):
    """Three saves, at once and in the background; returns how many plans were gathered for each."""
    return [_count_plans(rank, n, folder / name, saver) for name, saver in (("at once", None), ("async", AsyncSaver()))]


def _count_plans(rank, n, folder, saver):
    ps = ParallelState.create(n, rank)
    chunks, optimizer = make(ps, 1, True, seed=1)
    options, count = SaveOptions(plan_cache=PlanCache(), save_rng=False), []
    original = ownership.collectives.all_gather_object
    ownership.collectives.all_gather_object = lambda thing, group: count.append(group.name) or original(thing, group)
    for iteration in (3, 6):
        for chunk in chunks:
            for param in chunk.parameters():
                param.data += 1
        if saver is not None:
            saver.start(folder, CheckpointState(iteration, FLAGS), chunks, optimizer, ps, options)
            saver.finish()
        else:
            write(folder, iteration, chunks, optimizer, ps, options)
    planned = len(count)
    write(folder, 9, chunks, optimizer, ps, SaveOptions(save_rng=False))
    if rank == 1:
        optimizer.held.pop()
    with pytest.raises(CheckpointError, match="rank 1: .*--ckpt-assume-constant-structure"):
        write(folder, 12, chunks, optimizer, ps, options)
    ownership.collectives.all_gather_object = original
    return planned


def test_constant_structure_is_planned_only_once(tmp_path):
    assert run_ranks(_save_three_times, 2, tmp_path) == [[2, 2]] * 2
    for folder in (tmp_path / "at once", tmp_path / "async"):
        assert sorted(path.name for path in folder.glob("iter*")) == ["iter_0000003", "iter_0000006", "iter_0000009"]
        assert differences(folder / "iter_0000006", folder / "iter_0000009") == []
        changed = differences(folder / "iter_0000003", folder / "iter_0000006")
        assert changed and not any("optimizer" in line or "only in" in line for line in changed)


# ---- random states


def _streams(rank, n, sizes, *visits):
    """Save after some draws, or load (iteration 0); returns what every stream would draw next, for every visit."""
    found, flags, ps = [], FLAGS | {"num_layers": 2}, ParallelState.create(n, rank, **sizes)
    for folder, iteration in visits:
        chunks = fake_chunks(ps, seed=1, **HOW | {"layers": LAYERS[:2]})
        layer = 2 * ps.pp.rank // ps.pp.size
        chunks[0].streams = {
            "tensor_parallel": torch.Generator().manual_seed(100 * rank),
            f"decoder.layers.{layer}.mlp.router.bias_stream": torch.Generator().manual_seed(layer),
        }
        torch.manual_seed(5 + 100 * ps.pp.rank + ps.dp_cp.rank)
        loaded = None
        if iteration:
            for generator in (torch.default_generator, *chunks[0].streams.values()):
                torch.rand(3, generator=generator)
            save(folder, CheckpointState(iteration, flags), chunks, None, ps, SaveOptions())
        else:
            loaded = load(folder, chunks, None, ps, LoadOptions(flags | {"seed": 7})).rng_loaded
        numbers = {name: torch.rand(1, generator=generator).item() for name, generator in chunks[0].streams.items()}
        found.append((torch.rand(1).item(), numbers, loaded, (ps.pp.rank, ps.dp_cp.rank, ps.tp.rank)))
    return found


@pytest.mark.parametrize(
    ("n", "sizes"), [(8, dict(tp=2, pp=2, ep=2, etp=1)), (4, dict(cp=2))], ids=["pp2 tp2 dp2", "cp2 dp2"]
)
def test_random_streams_continue_in_the_same_layout(tmp_path, n, sizes):
    for one, other in run_ranks(_streams, n, sizes, (tmp_path, 3), (tmp_path, 0)):
        assert other[:2] == one[:2] and other[2]


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Checkpoints of two stages and two data ranks at iterations 3 and 6."""
    folder = tmp_path_factory.mktemp("stages")
    run_ranks(_streams, 4, dict(pp=2, ep=2), (folder / "3", 3), (folder / "6", 6))
    return folder


@pytest.mark.parametrize("axis", ["dp", "cp", "pp"])
def test_random_streams_restart_in_another_layout(stages, axis):
    sizes = dict(tp=2, etp=2) | ({} if axis == "dp" else {axis: 2})
    three, six, again = zip(*run_ranks(_streams, 4, sizes, *((stages / name, 0) for name in ("3", "6", "3"))))
    assert three == again and not any(loaded for _, _, loaded, _ in three)
    by_place = {place: (number, streams["tensor_parallel"]) for number, streams, _, place in three}
    # tensor-parallel ranks draw the same dropout masks for what they all hold, and others for what they have cut
    for (stage, replica, _), (number, _) in by_place.items():
        assert number == by_place[stage, replica, 0][0]
    assert len({number for number, _ in by_place.values()}) == 2 and len({own for _, own in by_place.values()}) == 4
    for one, other in zip(three, six):
        assert one[0] != other[0] and one[1]["tensor_parallel"] != other[1]["tensor_parallel"], (
            "the masks of another iteration"
        )
    # a forced bias is the same on all ranks, and continues
    for _, streams, _, (stage, _, _) in three:
        expected = torch.Generator().manual_seed(stage)
        torch.rand(3, generator=expected)
        assert streams[f"decoder.layers.{stage}.mlp.router.bias_stream"] == torch.rand(1, generator=expected).item()


def test_virtual_chunks_start_with_distinct_random_streams():
    streams = [{"tensor_parallel": torch.Generator()} for _ in range(2)]
    random_state.reseed(7, 3, ParallelState.single(), streams)
    assert len({chunk["tensor_parallel"].initial_seed() for chunk in streams}) == 2


def test_additional_ranks_draw_different_dropout_masks(tmp_path):
    ((wrote,),) = run_ranks(_streams, 1, dict(), (tmp_path, 3))
    (read,) = zip(*run_ranks(_streams, 2, dict(), (tmp_path, 0)))
    assert read[0][:2] == wrote[:2] and read[0][2] and not read[1][2]
    assert read[1][0] != read[0][0] and read[1][1]["tensor_parallel"] != read[0][1]["tensor_parallel"]


# ---- who reads what


def _read_in_parallel(rank, n, folder, damaged):
    """Load with --ckpt-fully-parallel-load; returns the bytes of tensors that this rank has read from files."""
    read, original, options = {}, reading.decode, LoadOptions(FLAGS, fully_parallel=True)

    def counted(*args):
        found = original(*args)
        read[case] += found.numel() * found.element_size()
        return found

    for tp, distributed in ((1, True), (2, False)):
        reading.decode = counted
        ps = ParallelState.create(n, rank, **(dict(tp=2, ep=2, etp=1) if tp == 2 else {}))
        chunks, optimizer = make(ps, 1, distributed, seed=2)
        case = tp, distributed
        read[case] = 0
        load(folder, chunks, optimizer, ps, options)
        _, expected = make(ps, 1, distributed, seed=1)
        for chunk, other in zip(chunks, fake_chunks(ps, 1, seed=1, **HOW), strict=True):
            found = chunk.tensors()
            assert all(torch.equal(found[name], value) for name, value in other.tensors().items())
        assert all(torch.equal(a, b) for a, b in zip(optimizer.values(), expected.values(), strict=True))
        reading.decode = original
        if tp == 1:
            with pytest.raises(CheckpointError, match="is damaged"):
                load(damaged, chunks, optimizer, ps, options)
    return read


def test_fully_parallel_load_shares_reading_among_replicas(tmp_path):
    good, damaged = tmp_path / "good", tmp_path / "damaged"
    run_ranks(_save, 1, good, dict(), 1, False, SaveOptions())
    shutil.copytree(good, damaged)
    path = damaged / "iter_0000003/__0_0.distcp"
    content = bytearray(path.read_bytes())
    largest = max(read_index(damaged / "iter_0000003").storage_data.values(), key=lambda info: info.length)
    content[largest.offset + largest.length // 2] ^= 0xFF
    path.write_bytes(content)
    counts = run_ranks(_read_in_parallel, 4, good, damaged)  # damage is refused on all ranks, and no rank hangs
    full = sum(_bytes_by_rank(good, 1))
    for case in counts[0]:
        assert max(read[case] for read in counts) < 1.3 * full / 4, "every rank reads its share and no more"


def _load_strictly(rank, n, folder, messages):
    """Only keys that no stage uses, or that a stage misses, are reported, by all ranks alike."""
    ps = ParallelState.create(n, rank, pp=2)
    chunks = fake_chunks(ps, 1, **HOW)
    _save(rank, n, folder, dict(pp=2), 1, False, SaveOptions())
    for strictness in ("raise_all", "raise_unexpected"):
        assert load(folder, chunks, None, ps, LoadOptions(FLAGS, strictness=strictness)).iteration == 3
    if rank == n - 1:
        next(
            param for param in chunks[-1].parameters() if param.info.names == ("decoder.final_layernorm.weight",)
        ).info = ParamInfo(("elsewhere",))
    with pytest.raises(CheckpointError) as refused:
        load(folder, chunks, None, ps, LoadOptions(FLAGS, strictness="raise_all"))
    (messages / str(rank)).write_text(str(refused.value))


def test_strictness_considers_all_pipeline_stages(tmp_path):
    run_ranks(_load_strictly, 2, tmp_path / "saved", tmp_path)
    errors = [(tmp_path / rank).read_text() for rank in "01"]
    assert errors[0] == errors[1] and errors[0].count("another architecture") == 1
    assert "elsewhere is not in the checkpoint" in errors[0]
    assert (
        errors[0].count("of the checkpoint is not in this model") == 1
        and "final_layernorm.weight of the checkpoint" in errors[0]
    )

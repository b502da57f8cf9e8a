"""Optimizer state that Megatron-LM's distributed optimizer has saved flat is read as that of the parameters."""

import argparse
import io
import pickle
import sys
import types

import pytest
import torch
from checkpoint.fake import RECORD, FakeModel, FakeOptimizer, layer_shapes
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_trainer.checkpoint import flat_states, rank_memory
from moe_trainer.checkpoint.common_state import dump_object, read
from moe_trainer.checkpoint.flat_states import FlatStateMetadata
from moe_trainer.checkpoint.index import read_index
from moe_trainer.checkpoint.logical import logical_tensors, read_logical
from moe_trainer.checkpoint.manager import CheckpointError, CheckpointState, LoadOptions, SaveOptions, load, save
from moe_trainer.parallel.state import ParallelState

SINGLE = ParallelState.single()
FLAGS = RECORD | {
    "hidden_size": 16,
    "num_experts": 2,
    "use_distributed_optimizer": True,
    "swiglu": True,
    "transformer_impl": "local",
    "untie_embeddings_and_output_weights": True,
}
STATES = ("exp_avg", "exp_avg_sq")
BUCKETS = "optimizer.distributed.dp_group_idx_0"
# the order of a buffer, last module first; of a layer: projection, linear_qkv with its norm, router, experts one by one
LAYER = [
    "mlp.experts.local_experts.{e}.linear_fc2.weight",
    "mlp.experts.local_experts.{e}.linear_fc1.weight",
    "mlp.router.weight",
    "pre_mlp_layernorm.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "input_layernorm.weight",
]


def small(seed=0, tied=False):
    return FakeModel([layer_shapes(16, 6, 32, experts=2) for _ in range(2)], vocab=24, hidden=16, seed=seed, tied=tied)


def order():
    """Return the names in their order in the buffer."""
    yield "output_layer.weight"
    yield "decoder.final_layernorm.weight"
    for layer in (1, 0):
        for expert in (1, 0):
            yield from (f"decoder.layers.{layer}.{rest.format(e=expert)}" for rest in LAYER[:2])
        yield from (f"decoder.layers.{layer}.{rest}" for rest in LAYER[2:])
    yield "embedding.word_embeddings.weight"


def save_source(tmp_path, flags, tied=False):
    """Save a checkpoint as this program writes it; return its model and optimizer."""
    model = small(tied=tied)
    optimizer = FakeOptimizer(model, SINGLE)
    optimizer.step = 5
    save(tmp_path / "source", CheckpointState(5, FLAGS | flags), [model], optimizer, SINGLE, SaveOptions())
    return tmp_path / "source/iter_0000005", model, optimizer


@pytest.fixture
def source(tmp_path):
    return save_source(tmp_path, {})


class Writer:
    """Writes entries into a folder, as torch's writer does."""

    def __init__(self, folder):
        self.folder, self.index, self.content = folder, Metadata({}), b""
        self.index.storage_data = {}

    def add(self, place, content):
        self.index.storage_data[place] = _StorageInfo("__0_0.distcp", len(self.content), len(content))
        self.content += content

    def object(self, key, value):
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata

        self.index.state_dict_metadata[key] = BytesStorageMetadata()
        self.add(MetadataIndex(key), dump_object(value))

    def tensor(self, key, size, chunks):
        """chunks: {offsets: values}."""
        listed = [ChunkStorageMetadata(torch.Size(at), value.shape) for at, value in chunks.items()]
        dtype = next(iter(chunks.values())).dtype
        self.index.state_dict_metadata[key] = TensorStorageMetadata(
            TensorProperties(dtype=dtype), torch.Size(size), listed
        )
        for at, value in chunks.items():
            stream = io.BytesIO()
            torch.save(value.clone(), stream)
            self.add(MetadataIndex(key, torch.Size(at)), stream.getvalue())

    def close(self):
        self.folder.mkdir(parents=True)
        (self.folder / "__0_0.distcp").write_bytes(self.content)
        (self.folder / ".metadata").write_bytes(pickle.dumps(self.index))
        (self.folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        (self.folder.parent / "latest_checkpointed_iteration.txt").write_text("5")


def write_megatron_checkpoint(source, folder, optimizer, etp=1):
    """A writer that has everything of the source but optimizer state, as Megatron-LM would.

    optimizer: its entry of the common state. etp: ranks among which experts are cut.
    """
    writer, index = Writer(folder), read_index(source)
    common = {key: value for key, value in read(source, index).items() if key != "moe_trainer"}
    writer.object(
        "common_state/shard_0_1", common | {"optimizer": optimizer, "args": argparse.Namespace(**vars(common["args"]))}
    )
    for key, entry in index.state_dict_metadata.items():
        if hasattr(entry, "chunks") and not key.startswith("optimizer."):
            full_tensor = torch.zeros(entry.size)
            for tensor in logical_tensors(index):
                if tensor.key == key:
                    full_tensor[tensor.at] = read_logical(source, index, tensor)
            # gate and up are separate boxes
            dim, pieces = (
                (-2, 2 * etp) if "linear_fc1.weight" in key else (-1, etp if "linear_fc2.weight" in key else 1)
            )
            chunks, size = {}, entry.size[dim] // pieces
            for number, piece in enumerate(full_tensor.chunk(pieces, dim)):
                first = [0] * len(entry.size)
                first[dim] = number * size
                chunks[tuple(first)] = piece
            writer.tensor(key, entry.size, chunks)
    return writer


def values(source, state):
    """{name: values} of an optimizer state of the source."""
    index = read_index(source)
    prefix = f"optimizer.state.{state}."
    return {
        tensor.name.removeprefix(prefix): read_logical(source, index, tensor)
        for tensor in logical_tensors(index)
        if tensor.state == state
    }


def cut(name, value, rank, etp):
    """A rank's piece of an expert's weight: rows of the gate and of the up projection, or columns."""
    if name.endswith("linear_fc1.weight"):
        return torch.cat([part.chunk(etp)[rank] for part in value.chunk(2)])
    return value.chunk(etp, 1)[rank] if name.endswith("linear_fc2.weight") else value


def write_buckets(source, folder, buffers=None, etp=1, ranks=2):
    """The halves of two ranks of every bucket, with the gaps that align parameters.

    buffers: of each, by the beginning of its keys, the rank among the `etp` that cut an expert and the names in its buckets. The copy of tied
    embeddings has other values than these, which must not be read.
    """
    writer = write_megatron_checkpoint(source, folder, {"param_state_sharding_type": "dp_reshardable"}, etp)
    for state in (*STATES, "param"):
        named = values(source, state)
        named.setdefault("output_layer.weight", torch.full_like(named["embedding.word_embeddings.weight"], 7.0))
        for prefix, (rank, buckets) in (buffers or {BUCKETS: (0, [list(order())])}).items():
            for number, names in enumerate(buckets):
                flat = torch.zeros(0)
                for name in names:
                    flat = torch.cat(
                        [flat, torch.full((-len(flat) % 64,), 7.0), cut(name, named[name], rank, etp).flatten()]
                    )
                if number + 1 < len(buckets):  # closed when the next parameter has been given its beginning
                    flat = torch.cat([flat, torch.full((-len(flat) % 64,), 7.0)])
                half = -(-len(flat) // 128) * 128 // ranks
                writer.tensor(
                    f"{prefix}.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_{number}.{state}",
                    [len(flat)],
                    {(first,): flat[first : first + half] for first in range(0, len(flat), half)},
                )
    writer.object(f"{BUCKETS}.optimizer/shard_0_1", {"param_groups": [{"step": 5.0}]})
    writer.close()


def check_loads(folder, model, optimizer, tied=False):
    other = small(seed=1, tied=tied)
    fresh = FakeOptimizer(other, SINGLE, seed=1)
    found = load(
        folder.parent, [other], fresh, SINGLE, LoadOptions(FLAGS | {"untie_embeddings_and_output_weights": not tied})
    )
    assert found.optim_loaded and found.from_megatron and fresh.step == 5
    assert all(torch.equal(a, b) for a, b in zip(fresh.values(), optimizer.values(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def test_dp_reshardable_buckets_are_read(source, tmp_path):
    folder, model, optimizer = source
    write_buckets(folder, tmp_path / "buckets/iter_0000005")
    check_loads(tmp_path / "buckets/iter_0000005", model, optimizer)


def test_buckets_that_do_not_fit_the_flags_are_refused(source, tmp_path, monkeypatch):
    folder, model, _ = source
    write_buckets(folder, tmp_path / "buckets/iter_0000005")
    index = read_index(tmp_path / "buckets/iter_0000005")
    key = next(key for key in index.state_dict_metadata if key.endswith("bucket_idx_0.exp_avg"))
    entry = index.state_dict_metadata[key]
    entry.size = torch.Size([entry.size[0] + 64])
    assert (
        "and the parameters in the order of the modules need"
        in FlatStateMetadata(tmp_path / "buckets/iter_0000005", index).state_problem
    )
    for flag in ({"use_tp_pp_dp_mapping": True}, {"pipeline_model_parallel_layout": ["E", "t"]}):
        other = tmp_path / "-".join(flag)
        save(
            other / "source",
            CheckpointState(5, FLAGS | flag),
            [model],
            FakeOptimizer(model, SINGLE),
            SINGLE,
            SaveOptions(),
        )
        write_buckets(other / "source/iter_0000005", other / "buckets/iter_0000005")
        with pytest.raises(
            CheckpointError,
            match="cannot resume this run: its optimizer state is in buckets of .*dist-ckpt-optim-fully-reshardable",
        ):
            load(other / "buckets", [model], FakeOptimizer(model, SINGLE), SINGLE, LoadOptions(FLAGS))


def test_buckets_of_a_module_without_a_known_place_are_rejected(source, tmp_path, monkeypatch):
    folder, model, _ = source
    write_buckets(folder, tmp_path / "buckets/iter_0000005")
    monkeypatch.setattr(rank_memory, "_ORDER", ("embedding.", "decoder."))
    with pytest.raises(
        CheckpointError, match=r"output_layer\.weight: its place .* is not known; let Megatron-LM save it"
    ):
        load(tmp_path / "buckets", [model], FakeOptimizer(model, SINGLE), SINGLE, LoadOptions(FLAGS))


STAGE = BUCKETS.removesuffix("0")


def stages(tied):
    """The buffers of two pipeline stages. Tied embeddings, which both have, are in their own bucket, at the position of the output layer on the last stage."""
    names = list(order())
    border = names.index(next(name for name in names if ".layers.0." in name))
    last, first = names[:border], names[border:]
    return {
        f"{STAGE}0": (0, [first[:-1], first[-1:]] if tied else [first]),
        f"{STAGE}1": (0, [last[:1], last[1:]] if tied else [last]),
    }


@pytest.mark.parametrize("tied", [False, True])
def test_buckets_of_two_pipeline_stages_are_read(tmp_path, tied):
    """With tied embeddings the last stage has a copy, which fills a bucket and is not taken from there."""
    flags = {"pipeline_model_parallel_size": 2, "world_size": 4, "untie_embeddings_and_output_weights": not tied}
    folder, model, optimizer = save_source(tmp_path, flags, tied)
    write_buckets(folder, tmp_path / "buckets/iter_0000005", stages(tied))
    check_loads(tmp_path / "buckets/iter_0000005", model, optimizer, tied)


def test_buckets_of_one_stage_alone_are_rejected(tmp_path):
    """Those that are there fit; the other stage's layers have no state."""
    folder, model, _ = save_source(tmp_path, {"pipeline_model_parallel_size": 2, "world_size": 4})
    write_buckets(
        folder,
        tmp_path / "buckets/iter_0000005",
        {key: value for key, value in stages(tied=False).items() if key.endswith("0")},
    )
    with pytest.raises(
        CheckpointError,
        match=r"optimizer\.state\..*: the buckets of its optimizer state do not cover the parameter once",
    ):
        load(tmp_path / "buckets", [model], FakeOptimizer(model, SINGLE), SINGLE, LoadOptions(FLAGS))


def test_buckets_of_tensor_parallel_experts_are_read(tmp_path):
    """Places of experts are counted along expert-tensor ranks first, then along expert-parallel ones."""
    flags = {
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "world_size": 4,
    }
    folder, model, optimizer = save_source(tmp_path, flags)
    experts = [[name for name in order() if f".local_experts.{expert}." in name] for expert in (0, 1)]
    dense = [name for name in order() if ".local_experts." not in name]
    write_buckets(
        folder,
        tmp_path / "buckets/iter_0000005",
        {f"chained_0.{STAGE}{tp}": (tp, [dense]) for tp in (0, 1)}
        | {f"chained_1.{STAGE}{tp + 2 * ep}": (tp, [experts[ep]]) for ep in (0, 1) for tp in (0, 1)},
        etp=2,
    )
    check_loads(tmp_path / "buckets/iter_0000005", model, optimizer)


def test_fully_sharded_model_space_grids_are_read(source, tmp_path):
    """As core_v0.13 writes them: pieces of two tensor-parallel ranks in a grid, each flat and cut over data-parallel ranks."""
    folder, model, optimizer = source
    writer, index = (
        write_megatron_checkpoint(
            folder, tmp_path / "grid/iter_0000005", {0: {"optimizer": {"param_groups": [{"step": 5}]}}}
        ),
        read_index(folder),
    )
    for key, entry in index.state_dict_metadata.items():
        if not key.startswith("optimizer.state.") or not hasattr(entry, "chunks"):
            continue
        full_tensor = torch.zeros(entry.size)
        for tensor in logical_tensors(index):
            if tensor.key == key:
                full_tensor[tensor.at] = read_logical(folder, index, tensor)
        leading = ("decoder.layers." in key) + ("experts." in key)
        parts = [
            *entry.size[:leading],
            *(2 if dim == 0 and len(entry.size) - leading == 2 else 1 for dim in range(len(entry.size) - leading)),
        ]
        sizes = [full // part for full, part in zip(entry.size, parts)]
        chunks = {}
        for at in torch.cartesian_prod(*map(torch.arange, parts)).reshape(-1, len(parts)).tolist():
            piece = full_tensor[
                tuple(slice(number * size, (number + 1) * size) for number, size in zip(at, sizes))
            ].reshape(-1)
            for first, end in ((0, 5), (5, len(piece))):
                chunks[(*at, first)] = piece[first:end].view(*(1 for _ in at), -1)
        writer.tensor(
            f"chained_{int('experts.' in key)}.{key.replace('.state.param.', '.state.fp32_param.')}",
            [*parts, len(piece)],
            chunks,
        )
    writer.close()
    check_loads(tmp_path / "grid/iter_0000005", model, optimizer)


def test_index_of_megatron_core_0_15_is_read(source, monkeypatch):
    """Its class is defined by Megatron-LM and has one more field."""
    folder, model, optimizer = source
    module = types.ModuleType("megatron.core.dist_checkpointing.strategies.torch")
    module.MCoreMetadata = type("MCoreMetadata", (Metadata,), {"__module__": module.__name__})
    for end in [at for at, letter in enumerate(module.__name__) if letter == "."]:
        monkeypatch.setitem(sys.modules, module.__name__[:end], types.ModuleType(module.__name__[:end]))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    index = module.MCoreMetadata({})
    vars(index).update(vars(read_index(folder)) | {"mcore_data": {}})
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    other = small(seed=1)
    assert load(folder.parent, [other], FakeOptimizer(other, SINGLE, seed=1), SINGLE, LoadOptions(FLAGS)).optim_loaded
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def test_expert_buffers_are_numbered_by_expert_rank_then_stage(source):
    folder, *_ = source
    record = FLAGS | {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
    layout = flat_states._BufferLayout(read_index(folder), record)
    for group in range(4):
        stage, expert = divmod(group, 2)
        names = {entry.tensor.name for entry in layout.entries_in_buffer(1, group, 0)}
        parts = [f"decoder.layers.{stage}.mlp.experts.local_experts.{expert}.linear_fc{n}.weight" for n in (1, 2)]
        assert names == set(parts)

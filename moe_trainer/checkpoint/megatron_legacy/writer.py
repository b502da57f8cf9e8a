"""Write a legacy checkpoint of Megatron-LM (`--ckpt-format torch`).

The files of that format hold what single ranks of a mapping have; this program's optimizer state may be sharded
differently. So a save first writes its own chunks as always, and then one rank of every (tp, pp, ep) position reads the
content of its file from them as loading does. This temporarily takes twice the disk space. names.py describes the
format.
"""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.nn import Parameter

from arguments.mup import recorded_width_mult
from moe_trainer.checkpoint import common_state, random_state
from moe_trainer.checkpoint.directory import flush_folder
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.folder_format import LEGACY
from moe_trainer.checkpoint.format_writer import FormatWriter, SavedRun
from moe_trainer.checkpoint.layer_spec import has_te_names, te_extra_states
from moe_trainer.checkpoint.megatron_legacy import names as legacy
from moe_trainer.checkpoint.megatron_legacy.reader import STATES
from moe_trainer.checkpoint.native_index import read_native_index
from moe_trainer.checkpoint.optimizer_record import grad_scaler, group_order_key, param_group
from moe_trainer.checkpoint.options import SaveOptions
from moe_trainer.checkpoint.rank_memory import (
    EXPERT,
    LayoutSizes,
    bucketing,
    buffer_offsets,
    layer_number,
    local_name,
    module_order_key,
    to_spec_name,
)
from moe_trainer.checkpoint.reading import fill
from moe_trainer.checkpoint.sharding import KeyScheme, TensorShard, entry_of, make_shards
from moe_trainer.checkpoint.virtual_index import tensor_entry
from moe_trainer.io import flush_file
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import ParamInfo, get_param_info, named_shapes, unique_params
from moe_trainer.parallel.state import ParallelState

_EXTRA = re.compile(r"(^|\.)(linear_\w+|eh_proj|in_proj|out_proj|fc[12]_latent_proj|output_layer)\.weight\d*$")
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class RankTensor:
    """A tensor of this rank: its global name, its name in the file, and its states by name."""

    name: str
    written: str
    value: Tensor
    states: Mapping[str, Tensor]
    trained: bool


class LegacyWriter(FormatWriter):
    """One rank of every (tp, pp, ep) position makes its file from the chunks."""

    name = LEGACY
    keeps_chunks = False

    def __init__(self, folder: Path, run: SavedRun, ps: ParallelState, options: SaveOptions):
        super().__init__(folder, run, ps, options)
        self._run = run
        self._random_states = None
        if options.save_rng:
            mine = random_state.capture_for_checkpoint(random_state.get_streams(run.chunks), ps)
            self._random_states = collectives.all_gather_object(mine, ps.dp_cp)
        places = collectives.all_gather_object((ps.tp.rank, ps.pp.rank, ps.ep.rank), ps.world)
        self._writes_here = places.index(places[ps.world.rank]) == ps.world.rank

    def write(self) -> None:
        """Nothing: all files need the chunks."""

    def convert(self) -> None:
        if not self._writes_here:
            return
        run, ps, source = self._run, self._ps, self.chunks_folder(self._folder)
        index, record = read_native_index(source), run.state.args
        entries = [_entries(source, index, chunk, record, run.scalars is not None, ps) for chunk in run.chunks]
        content = common_state.build(run.state, None)
        del content["content_metadata"]
        for number, chunk in enumerate(entries):
            content["model" if len(entries) == 1 else f"model{number}"] = _model(chunk, KeyScheme.from_record(record))
        buffers = None
        if run.scalars is not None:
            content["moe_trainer"]["optimizer"] = common_state.to_builtin(dict(run.scalars))
            content["optimizer"], buffers = _optimizers(entries, record, run.scalars, ps)
        if self._random_states is not None:
            content["rng_state"] = self._random_states
        folder = self._folder / LayoutSizes.from_record(record).folder(ps.tp.rank, ps.pp.rank, ps.ep.rank)
        folder.mkdir()
        torch.save(content, folder / legacy.MODEL_FILE)
        flush_file(folder / legacy.MODEL_FILE)
        if buffers is not None:
            torch.save(buffers, folder / legacy.STATE_FILE)
            flush_file(folder / legacy.STATE_FILE)
        flush_folder(folder)

    def complete(self) -> None:
        shutil.rmtree(self.chunks_folder(self._folder))


def _entries(
    source: Path, index: Metadata, chunk: Any, record: Mapping[str, Any], with_states: bool, ps: ParallelState
) -> list[RankTensor]:
    """Return everything of a model chunk, read from the stored chunks, in Megatron's order."""
    scheme = KeyScheme.from_record(record)
    wanted: dict[str, list[TensorShard]] = {}
    held: list[tuple[ParamInfo, str, Tensor, dict[str, Tensor], bool]] = []
    for info, shape, trained in _sharded_params(chunk, record, ps):
        runs = scheme.placements(info, shape)

        def ask(prefix: str, runs=runs, shape=shape) -> Tensor:
            empty = torch.empty(shape, dtype=tensor_entry(index, prefix + runs[0].key).properties.dtype)
            for piece in make_shards(runs, empty, 0, empty.numel(), prefix):
                wanted.setdefault(piece.key, []).append(piece)
            return empty

        states = {
            name: ask(f"optimizer.state.{name}.")
            for name in STATES
            if with_states and trained and f"optimizer.state.{name}.{runs[0].key}" in index.state_dict_metadata
        }
        held.append((info, "", ask(""), states, trained))
    fill(source, index, wanted)
    first_layer = min(
        (layer for info, *_ in held for layer in map(layer_number, info.names) if layer is not None),
        default=0,
    )
    first_expert = ps.ep.rank * LayoutSizes.from_record(record).local_experts
    entries = []
    for info, _, value, states, trained in held:
        values = value.unbind(0) if info.stacked else (value,)
        for number, (name, one) in enumerate(zip(info.names, values, strict=True)):
            each = {state: whole.unbind(0)[number] if info.stacked else whole for state, whole in states.items()}
            spellings = entry_of(scheme.norms, scheme.layer_at(name))
            written = to_spec_name(local_name(name, first_layer, first_expert), record, spellings)
            entries += [
                RankTensor(copy or name, copy or written, one, each, trained)
                for copy in (_names_of_copy(held, record) if info.is_replica else (None,))
            ]
    try:
        return sorted(entries, key=lambda entry: module_order_key(entry.name, entry.written))
    except CheckpointError as error:
        raise CheckpointError(f"{error}; save with --ckpt-format torch_dist") from error


def _names_of_copy(
    held: list[tuple[ParamInfo, str, Tensor, dict[str, Tensor], bool]], record: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the names under which Megatron-LM stores the word embeddings on a later stage.

    With prediction layers they are stored as embeddings, and for a tied model also as an output layer that the last
    stage never uses; otherwise as the output layer.
    """
    predicts = any(name.startswith("mtp.layers.") for info, *_ in held for name in info.names)
    if not predicts:
        return ("output_layer.weight",)
    tied = not record.get("untie_embeddings_and_output_weights")
    if tied and record.get("pipeline_model_parallel_layout"):
        raise CheckpointError(
            "tied embeddings and prediction layers under --pipeline-model-parallel-layout have no known form in a "
            "legacy checkpoint; save with --ckpt-format torch_dist"
        )
    return (
        ("embedding.word_embeddings.weight", "output_layer.weight") if tied else ("embedding.word_embeddings.weight",)
    )


def _sharded_params(
    chunk: Any, record: Mapping[str, Any], ps: ParallelState
) -> Iterator[tuple[ParamInfo, tuple[int, ...], bool]]:
    """Yield (info, shape of the shard, whether trained) of parameters and buffers, sharded as in Megatron-LM."""
    for info, shape in _unfused(unique_params(chunk.parameters())):
        group = ps.etp if info.kind == "expert" else ps.tp
        name, named_shape = info.names[0], shape[1:] if info.stacked else shape
        dim, parts = legacy.tp_split(name, named_shape, record, group.size)
        is_known = info.part_names == tuple(legacy.named_parts(name, record))
        if group.size > 1 and name.endswith(legacy.LATENT_DOWN) and not has_te_names(record):
            dim = 0  # replicated here and in Transformer Engine's modules; Megatron-LM's local ones shard it
        if not is_known or (info.shard_count > 1 and (dim, parts) != (info.sharded_dim, info.parts)):
            raise CheckpointError(
                f"{name}: how a legacy checkpoint cuts it is not known; save with --ckpt-format torch_dist"
            )
        if dim is not None and info.shard_count == 1:
            cut = dim + info.stacked
            info = replace(info, sharded_dim=dim, parts=parts, shard_rank=group.rank, shard_count=group.size)
            shape = (*shape[:cut], shape[cut] // group.size, *shape[cut + 1 :])
        yield info, shape, True
    for name, buffer in chunk.named_state_buffers():
        yield ParamInfo((name,)), tuple(buffer.shape), False


def _unfused(params: Iterable[Parameter]) -> Iterator[tuple[ParamInfo, tuple[int, ...]]]:
    """Yield (info, shape); of a parameter that is a concatenation, those of its tensors."""
    for param in params:
        info, shape = get_param_info(param), tuple(param.shape)
        if not info.row_counts:
            yield info, shape
            continue
        for name, named_shape in named_shapes(info, shape):
            yield replace(info, names=(name,), row_counts=()), named_shape


def _model(chunk: list[RankTensor], scheme: KeyScheme) -> dict[str, Tensor | None]:
    """Return the state dict of a model chunk, with the empty `_extra_state` entries that Megatron's loader requires."""
    values: dict[str, Tensor | None] = {}
    for position, entry in enumerate(chunk):
        values[entry.written] = entry.value
        module, _, kind = entry.written.rpartition(".")
        after = chunk[position + 1].written if position + 1 < len(chunk) else ""
        if _EXTRA.search(f"{module}.weight") and not after.startswith(module + "."):
            values[f"{module}._extra_state"] = None
        parts = entry_of(scheme.engine, scheme.layer_at(entry.name))
        values |= dict.fromkeys(te_extra_states(entry.written, parts))
    return values


def _optimizers(
    entries: list[list[RankTensor]], record: Mapping[str, Any], scalars: Mapping[str, Any], ps: ParallelState
) -> tuple[Any, Any]:
    """Return the optimizer entry of the file and the content of the file of flat states, None without one.

    With expert parallelism each is a list: of the dense parameters' optimizer, and of the experts'.
    """
    sizes = LayoutSizes.from_record(record)
    kinds = (False, True) if sizes.ep > 1 else (False,)
    owned = [
        [
            [entry for entry in chunk if entry.trained and (sizes.ep == 1 or (EXPERT in entry.name) is experts)]
            for chunk in entries
        ]
        for experts in kinds
    ]
    chain = [_optimizer(mine, record, scalars, experts) for experts, mine in zip(kinds, owned, strict=True)]
    buffers = None
    if record.get("use_distributed_optimizer"):
        # only the file of the first data-parallel rank has that of the dense parameters
        buffers = [
            _buffers(mine, record, sizes, ps.pp.rank, experts) if experts or ps.dp_cp.rank == 0 else None
            for experts, mine in zip(kinds, owned, strict=True)
        ]
    if sizes.ep > 1:
        return chain, buffers
    return chain[0], None if buffers is None else buffers[0]


def _optimizer(
    chunks: list[list[RankTensor]], record: Mapping[str, Any], scalars: Mapping[str, Any], experts: bool
) -> dict[str, Any]:
    """Return the state dict of one of Megatron's optimizers over all chunks."""
    entries = [entry for chunk in chunks for entry in chunk]
    step, groups, mains = float(scalars.get("step", 0)), [], []
    state: dict[int, dict[str, Any]] = {}
    for kind in _param_groups(record, scalars, experts):
        mine = [entry for entry in entries if legacy.param_group_kind(entry.name, entry.value.dim(), record) == kind]
        mine.sort(key=lambda entry: entry.value.dtype == torch.float32)
        numbers = list(range(len(state), len(state) + len(mine)))
        state |= {
            number: {
                "step": torch.tensor(step),
                **{name: value for name, value in entry.states.items() if name != "fp32_param"},
            }
            for number, entry in zip(numbers, mine, strict=True)
        }
        mains.append([entry.states["fp32_param"] for entry in mine if entry.value.dtype in _HALF])
        groups.append(param_group(record, **kind._asdict(), experts=experts, step=int(step)) | {"params": numbers})
    scaler = grad_scaler(scalars)
    if record.get("use_distributed_optimizer"):
        return {
            "optimizer": {
                "param_groups": [{key: value for key, value in group.items() if key != "params"} for group in groups]
            },
            **scaler,
        }
    inner = {"state": state, "param_groups": groups}
    return {"optimizer": inner, "fp32_from_fp16_params": mains, **scaler} if any(mains) else inner


def _param_groups(record: Mapping[str, Any], scalars: Mapping[str, Any], experts: bool) -> list[legacy.ParamGroupKind]:
    """Return the groups of one of Megatron's optimizers, in its order.

    As there, a group exists if a parameter of any rank belongs to it.
    """
    if recorded_width_mult(record) != 1.0:
        kinds = [
            legacy.ParamGroupKind(group["wd_mult"] != 0.0, group["is_decoupled_lr"], group["lr_mult"] != 1.0)
            for group in scalars["param_groups"]
            if group["is_expert_parallel"] is experts
        ]
    else:  # experts without biases all decay, embeddings do
        kinds = [
            legacy.ParamGroupKind(True, False),
            *([legacy.ParamGroupKind(False, False)] if not experts or record.get("add_bias_linear", True) else []),
            *([legacy.ParamGroupKind(True, True)] if record.get("decoupled_lr") is not None and not experts else []),
        ]
    return sorted(
        kinds, key=lambda kind: group_order_key(record, param_group(record, **kind._asdict(), experts=experts))
    )


def _buffers(
    chunks: list[list[RankTensor]], record: Mapping[str, Any], sizes: LayoutSizes, pp: int, experts: bool
) -> dict:
    """Return the flat states of a distributed optimizer, as its first data-parallel rank saves them."""
    content: dict = {"buckets_coalesced": True}
    for number, chunk in enumerate(chunk for chunk in chunks if chunk):
        by_name = {entry.name: entry for entry in chunk}
        places = list(
            buffer_offsets(
                [(entry.name, entry.value.numel()) for entry in chunk],
                *bucketing(record, sizes, pp, number, experts),
            )
        )
        whole = max(first + numel for _, first, numel in places)
        states = {"param": "fp32_param", **{name: name for name in chunk[0].states if name != "fp32_param"}}
        tensors: dict[str, Any] = {name: torch.zeros(whole) for name in states}
        for name, first, numel in places:
            entry = by_name[name]
            for state, key in states.items():
                tensors[state][first : first + numel] = entry.states.get(key, entry.value).flatten()
        types = {entry.value.dtype for entry in chunk}
        if len(types) > 1:
            raise CheckpointError(
                f"parameters of several types ({', '.join(map(str, types))}) have separate buffers, which is not "
                "written in the legacy format; --ckpt-format torch_dist"
            )
        (dtype,) = types
        gradients = torch.float32 if record.get("accumulate_allreduce_grads_in_fp32") else dtype
        content[number] = {(dtype, gradients): tensors | {"numel_unpadded": whole}}
    return content

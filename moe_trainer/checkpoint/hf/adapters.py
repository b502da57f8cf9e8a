"""Low-rank adapters of a native checkpoint: merged into the weights, or as an adapter folder that PEFT reads.

A native linear may be several Hugging Face ones (queries, keys and values; gate and up). All transforms rearrange
outputs only, so each part of B belongs to a copy of A. PEFT knows two kinds of targets: modules, which are linears, and
parameters. The experts of transformers since release 5 are stacked parameters, gate and up in one; a stack's adapter is
[experts * dim, in] and [out, dim * experts], the rank before the expert. Two parameters of one module are nested: the
second one (down_proj) is the outer one, and the first one's tensors are named after its base_layer. In models with
experts PEFT takes a module named gate_proj, up_proj, down_proj, w1, w2 or w3 for what the experts had before; those of
dense layers and shared experts are therefore named as parameters too, which have the same tensors. So are the output
projections of Mamba layers, whose kernels multiply by the weight and do not call the module; of nemotron_h PEFT rejects
them.
Source: PEFT 0.21 (ParamWrapper, transformers_weight_conversion).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from arguments.lora import LORA_A, LORA_B, is_adapter
from moe_trainer.checkpoint import common_state
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.config import write_config
from moe_trainer.checkpoint.hf.conversion_job import (
    ConversionJob,
    PlannedTensor,
    fingerprint,
    write_safetensors,
    write_text,
)
from moe_trainer.checkpoint.hf.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from moe_trainer.checkpoint.hf.names import HFTensor, TensorMapping, model_sizes, raise_problems, tensor_mappings
from moe_trainer.checkpoint.hf.rules import Names
from moe_trainer.checkpoint.index import read_index
from moe_trainer.checkpoint.logical import LogicalTensor, logical_tensors, read_logical

_EXPERT_LEAVES = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
_STACKS = (".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj")
_MAMBA_OUTPUT = ".mamba.out_proj.weight"
_REJECTED = MappingProxyType({"nemotron_h": ".mixer.out_proj.weight"})
"""What PEFT rejects as a target, by model type."""
_A, _B = f".{LORA_A}.weight", f".{LORA_B}.weight"
Read = Callable[[LogicalTensor], Tensor]


@dataclass(frozen=True)
class NativeAdapters:
    """The adapters of a checkpoint.

    Attributes:
        tensors: A and B by native name.
        dim, alpha: an adapter adds alpha / dim * B A.
    """

    tensors: Mapping[str, LogicalTensor]
    dim: int
    alpha: float

    @classmethod
    def of(cls, tensors: Mapping[str, LogicalTensor], flags: Mapping[str, Any]) -> "NativeAdapters":
        """Select the adapters among all tensors of a checkpoint with these flags.

        Raises:
            CheckpointError: if the flags do not say how strong the adapters are.
        """
        found = {name: tensor for name, tensor in tensors.items() if is_adapter(name)}
        dim, alpha = flags.get("lora_dim"), flags.get("lora_alpha")
        if found and not (dim and alpha):
            raise CheckpointError("the checkpoint has adapters, and its flags have no --lora-dim and --lora-alpha")
        return cls(found, int(dim or 1), float(alpha or 0.0))

    def names(self, native: str) -> tuple[str, str] | None:
        """Return the names of A and B of a native weight; None if it has no adapter."""
        base, _, part = native.partition(".weight")
        names = f"{base}{_A}", f"{base}{_B}{part}"
        return names if names[1] in self.tensors else None

    def merged(self, read: Read) -> Read:
        """Return a function that reads a weight and adds its adapter, in fp32, rounded once."""

        def read_merged(tensor: LogicalTensor) -> Tensor:
            weight, names = read(tensor), self.names(tensor.name)
            if names is None:
                return weight
            down, up = (read(self.tensors[name]).float() for name in names)
            return torch.addmm(weight.float(), up, down, alpha=self.alpha / self.dim).to(weight.dtype)

        return read_merged


@dataclass(frozen=True)
class _Part:
    """An adapted Hugging Face tensor, or an expert's slice of one: `up` makes its part of B, [out, dim]."""

    ref: HFTensor
    is_transposed: bool
    down: str
    up: Callable[[], Tensor]


def plan_peft_folder(
    folder: Path,
    target: Path,
    kind: str | None = None,
    dtype: torch.dtype | None = None,
    base_model: str | None = None,
) -> ConversionJob:
    """Plan the adapters of a native checkpoint folder as a PEFT adapter folder.

    Args:
        kind: model type of the base, by default the first that can express the model.
        dtype: that of the checkpoint by default.
        base_model: name or folder of the base, as `base_model_name_or_path`.

    Raises:
        CheckpointError: if there are no adapters, or no model type expresses the base.
    """
    index = read_index(folder)
    state, _, _ = common_state.parse(common_state.read(folder, index))
    flags = dict(state.args)
    tensors = {tensor.name: tensor for tensor in logical_tensors(index) if tensor.state is None}
    adapters = NativeAdapters.of(tensors, flags)
    if not adapters.tensors:
        raise CheckpointError(f"{folder} has no adapters: it is not of a run with --lora-dim")
    flags["rows"] = tensors["embedding.word_embeddings.weight"].shape[0]
    family, _ = write_config(flags, flags["rows"], kind)
    mappings = module_mappings(family.names, flags, lambda name: name.endswith(_STACKS))
    read = partial(read_logical, folder, index)
    parts = [part for mapping in mappings for part in _parts(mapping, adapters, read, model_sizes(flags))]
    rejected = _REJECTED.get(family.name)
    names = [part.ref.name for part in parts if rejected is not None and part.ref.name.endswith(rejected)]
    if names:
        raise CheckpointError(
            f"{names[0]}: PEFT rejects adapters of the output projections of Mamba layers in models of type "
            f"{family.name}. Merge the adapters (without --to peft), or train without them: --lora-target-modules "
            "in_proj linear_qkv linear_proj linear_fc1 linear_fc2"
        )
    known = {part.down for part in parts}
    raise_problems(
        [
            f"{name}: the other model has no linear of it"
            for name in adapters.tensors
            if _A in name and name not in known
        ]
    )
    stored = next(iter(adapters.tensors.values())).dtype if dtype is None else dtype
    items = _items(parts, adapters, read, stored)
    config = _config(parts, mappings, adapters, bool(flags.get("num_experts")), base_model)
    source = fingerprint(
        sorted(path for path in folder.iterdir() if path.is_file()), to="peft", dtype=stored, config=config
    )

    def finish(staging: Path, _notes: Mapping[str, Any]) -> None:
        write_text(staging / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")

    return ConversionJob(target, source, ((ADAPTER_WEIGHTS, tuple(items)),), write_safetensors, finish)


def module_mappings(names: Names, flags: Mapping[str, Any], present: Callable[[str], bool]) -> list[TensorMapping]:
    """Return `tensor_mappings` with the names that tensors have in the model of transformers."""
    found = tensor_mappings(names, flags, lambda name: () if present(names.module_name(name)) else None)
    return [
        replace(each, sources=tuple(replace(ref, name=names.module_name(ref.name)) for ref in each.sources))
        for each in found
    ]


def is_transposed(mapping: TensorMapping, sizes: Mapping[str, int]) -> bool:
    """Return whether the Hugging Face tensor of a native weight is stored as [in, out]."""
    rows = mapping.shape[0]
    if mapping.siblings or len(mapping.shape) != 2:
        return False
    return mapping.transform.to_hf(torch.empty(rows, rows + 1, device="meta"), sizes)[0].shape[0] == rows + 1


def _parts(mapping: TensorMapping, adapters: NativeAdapters, read: Read, sizes: Mapping[str, int]) -> Iterator[_Part]:
    """Yield the adapted Hugging Face tensors of a native weight, once for all siblings."""
    natives = mapping.siblings or (mapping.native,)
    names = [adapters.names(native) for native in natives]
    if mapping.native != natives[0] or names[0] is None:
        return

    def transform(columns: Sequence[Tensor]) -> Sequence[Tensor]:
        return mapping.transform.to_hf(columns if mapping.siblings else columns[0], sizes)

    is_turned = is_transposed(mapping, sizes)
    for position, ref in enumerate(mapping.sources):

        def up(position: int = position) -> Tensor:
            part = transform([read(adapters.tensors[name[1]]) for name in names if name is not None])[position]
            return part.t() if is_turned else part

        yield _Part(ref, is_turned, names[0][0], up)


def _items(parts: Sequence[_Part], adapters: NativeAdapters, read: Read, dtype: torch.dtype) -> list[PlannedTensor]:
    """Plan A and B of every Hugging Face tensor; the parts of a stack come in the order of the experts."""
    by_name: dict[str, list[_Part]] = {}
    for part in parts:
        by_name.setdefault(part.ref.name, []).append(part)
    outer = {name.rpartition(".")[0]: name for name, found in by_name.items() if found[0].ref.index is not None}
    items = []
    for name, found in by_name.items():
        first, count = found[0], len(found)
        module, path = name.rpartition(".")[0], name.removesuffix(".weight")
        if first.ref.index is not None:
            path = module if outer[module] == name else f"{module}.base_layer"
        rows, columns = first.ref.shape[::-1] if first.is_transposed else first.ref.shape

        def down(found: Sequence[_Part] = found) -> Iterator[Tensor]:
            for part in found:
                yield read(adapters.tensors[part.down]).to(dtype)

        def up(found: Sequence[_Part] = found) -> Iterator[Tensor]:
            yield torch.stack([part.up().to(dtype) for part in found], -1).flatten(1)  # [out, dim * experts]

        prefix = f"base_model.model.{path}"
        items.append(PlannedTensor(f"{prefix}{_A}", dtype, (count * adapters.dim, columns), down))
        items.append(PlannedTensor(f"{prefix}{_B}", dtype, (rows, adapters.dim * count), up))
    return items


def _config(
    parts: Sequence[_Part],
    mappings: Sequence[TensorMapping],
    adapters: NativeAdapters,
    has_experts: bool,
    base_model: str | None,
) -> dict[str, Any]:
    """Return the adapter's configuration, with the targets by their last name where that names no other linear."""
    weights = {ref.name for mapping in mappings for ref in mapping.sources if len(ref.shape) == 2}
    adapted = dict.fromkeys(part.ref.name for part in parts)
    modules, parameters = [], []
    for name in adapted:
        path = name.removesuffix(".weight")
        leaf = path.rpartition(".")[2]
        is_expert = has_experts and leaf in _EXPERT_LEAVES
        if is_expert or not name.endswith(".weight") or name.endswith(_MAMBA_OUTPUT):
            parameters.append(name)
        elif all(other in adapted for other in weights if other.endswith(f".{leaf}.weight")):
            modules.append(leaf)
        else:
            modules.append(path)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapters.dim,
        "lora_alpha": int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": list(dict.fromkeys(modules)),
        "target_parameters": parameters or None,
    }

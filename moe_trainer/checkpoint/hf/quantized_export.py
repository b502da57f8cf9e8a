"""Plan which weights of an exported Hugging Face folder are quantized, and how config.json says so.

| --quantize | weights | stored as | source |
|---|---|---|---|
| fp8-block | attention, MLPs, experts | `weight`, `weight_scale_inv` | DeepSeek-V3 as published |
| mxfp4 | MLPs, experts | gpt-oss: `*_blocks`, `*_scales` | openai/gpt-oss-20b as published |
| | | else `weight_packed`, `weight_scale` | compressed-tensors at ac8e2ba, mxfp4-pack-quantized |
| nvfp4 | MLPs, experts | these and `weight_global_scale` | the same, nvfp4-pack-quantized |

Embeddings, head, norms, routers, gates of shared experts, linear attention and the weights of the indexer's heads stay
in the model's format, as in published models. In fp4 attention stays too (as in gpt-oss), and layers of
multi-token prediction. Both fp4 formats are of weights alone: a scale of activations would have to be calibrated.

Parts that an inference engine multiplies at once (gate and up) get one scale of the tensor in NVFP4, because vLLM and
SGLang keep one. In block fp8 vLLM rejects such parts if one but the last has not full blocks of rows (vLLM,
quantization/utils/fp8_utils.py, validate_fp8_block_shape): they stay in the model's format, but experts cannot, because
an engine has one kernel for all of a layer.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.conversion_job import PlannedTensor, write_safetensors
from moe_trainer.checkpoint.hf.encodings import BLOCK_FP8, BLOCK_SIZE, MXFP4, NVFP4, Encoded, encode
from moe_trainer.checkpoint.hf.files import BLOCK_SCALES, BLOCKS, DIVISOR, GROUP_SCALE, PACKED, SCALE, WEIGHT
from moe_trainer.checkpoint.hf.names import HFTensor, TensorMapping
from moe_trainer.quantization.quantize import Scaling, compute_amax

_STACKED_FAMILY = "gpt_oss"
_MLP = r"\.mlp\.(shared_experts\.|experts\.local_experts\.\d+\.)?linear_fc[12]\.weight$"
_ATTENTION = r"\.self_attention\.(linear_\w+|core_attention\.indexer\.(linear_wq_b|linear_wk))\.weight$"
_EXPERT = ".experts.local_experts."
_BEFORE_ANOTHER = ".linear_q_down_proj.weight"  # vLLM multiplies by it and by linear_kv_down_proj at once
_KEPT_IN_GPT_OSS = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")


class _Format(NamedTuple):
    scaling: Scaling
    pattern: str
    name: str


FORMATS: Mapping[str, _Format] = MappingProxyType(
    {
        "fp8-block": _Format(BLOCK_FP8, rf"({_MLP})|({_ATTENTION})", "float-quantized"),
        "mxfp4": _Format(MXFP4, rf"^decoder.*{_MLP}", "mxfp4-pack-quantized"),
        "nvfp4": _Format(NVFP4, rf"^decoder.*{_MLP}", "nvfp4-pack-quantized"),
    }
)
"""The values of --quantize."""


class PartSource(Protocol):
    """Reads the parts of a native tensor."""

    def part(self, mapping: TensorMapping, position: int) -> Tensor: ...


@dataclass
class QuantizedExport:
    """The quantized weights of one export.

    Attributes:
        natives: names of the native tensors that are quantized.
        config: quantization_config of config.json.
        notes: remarks for the user.
        num_weights: of the model, quantized or not.
    """

    scaling: Scaling
    is_stacked: bool
    natives: frozenset[str]
    config: Mapping[str, Any]
    notes: tuple[str, ...]
    num_weights: int
    _last: tuple[str, Sequence[Encoded]] = ("", ())
    _errors: dict[str, tuple[str, float, float]] = field(default_factory=dict)

    def plan(self, mapping: TensorMapping, source: PartSource) -> Iterator[tuple[HFTensor, PlannedTensor]]:
        """Yield the tensors of a native one: values and scales of each of its parts."""
        for position, ref in enumerate(mapping.sources):
            for name, dtype, shape in self._stored(ref):

                def make(
                    position: int = position, name: str = name, shape: tuple[int, ...] = shape
                ) -> Iterator[Tensor]:
                    encoded = self._encode(mapping, source)[position]
                    yield self._select(encoded, mapping.native, name).view(shape)

                yield HFTensor(name, shape, ref.index, ref.stack), PlannedTensor(name, dtype, shape, make)

    def _stored(self, ref: HFTensor) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Yield name, dtype and shape of what is stored of a weight."""
        if self.is_stacked:
            columns, rows = ref.shape  # the bf16 form multiplies from the right
            groups = columns // self.scaling.cols
            yield ref.name + BLOCKS, torch.uint8, (rows, groups, self.scaling.cols // 2)
            yield ref.name + BLOCK_SCALES, torch.uint8, (rows, groups)
            return
        rows, columns = ref.shape
        module = ref.name.removesuffix(WEIGHT)
        if self.scaling is BLOCK_FP8:
            yield ref.name, torch.float8_e4m3fn, ref.shape
            yield ref.name + SCALE, torch.float32, (-(-rows // BLOCK_SIZE), -(-columns // BLOCK_SIZE))
            return
        is_nvfp4 = self.scaling is NVFP4
        yield module + PACKED, torch.uint8, (rows, columns // 2)
        scale_dtype = torch.float8_e4m3fn if is_nvfp4 else torch.uint8
        yield module + GROUP_SCALE, scale_dtype, (rows, columns // self.scaling.cols)
        if is_nvfp4:
            yield module + DIVISOR, torch.float32, (1,)

    def _encode(self, mapping: TensorMapping, source: PartSource) -> Sequence[Encoded]:
        """Encode all parts of a native tensor; the last one is kept, since values and scales are requested in turn."""
        if self._last[0] != mapping.native:
            parts = [source.part(mapping, position) for position in range(len(mapping.sources))]
            largest = torch.stack([compute_amax(part) for part in parts]).amax()
            try:
                encoded = [encode(part.t() if self.is_stacked else part, self.scaling, largest) for part in parts]
            except ValueError as error:
                raise CheckpointError(f"{mapping.native} cannot be quantized: {error}") from error
            self._last = mapping.native, encoded
        return self._last[1]

    def _select(self, encoded: Encoded, native: str, name: str) -> Tensor:
        """Return what is stored as `name`, and add the error when the values are."""
        if name.endswith(DIVISOR):
            return encoded.factor
        if name.endswith((GROUP_SCALE, SCALE, BLOCK_SCALES)):
            return encoded.scales
        _, error, size = self._errors.get(name, ("", 0.0, 0.0))  # the slices of a stack add up
        self._errors[name] = re.sub(r"\.\d+\.", ".*.", native), error + encoded.error, size + encoded.size
        return encoded.values

    def write(self, path: Path, items: Sequence[PlannedTensor]) -> dict[str, tuple[str, float, float] | None]:
        """Write a safetensors file. Returns the names in it, with kind, squared error and squared size if quantized."""
        return {name: self._errors.pop(name, None) for name in write_safetensors(path, items)}

    def report(self, notes: Mapping[str, Mapping[str, Any]], num_bytes: int) -> list[str]:
        """Return lines on the finished folder from what `write` returned for its files."""
        sums: dict[str, list[float]] = {}
        for kind, error, size in (entry for file in notes.values() for entry in file.values() if entry is not None):
            total = sums.setdefault(kind, [0.0, 0.0, 0])
            total[0], total[1], total[2] = total[0] + error, total[1] + size, total[2] + 1
        lines = [
            f"{kind}: {int(count)} tensors, error {(error / size) ** 0.5 if size else 0.0:.2%} (RMS, relative)"
            for kind, (error, size, count) in sums.items()
        ]
        return [*lines, f"{num_bytes / 1e9:.3f} GB, {8 * num_bytes / self.num_weights:.2f} bits per weight"]


def plan_quantization(name: str, family: str, mappings: Sequence[TensorMapping]) -> QuantizedExport:
    """Plan the export in a format of `FORMATS`.

    Raises:
        CheckpointError: if readers have no such form of the family, or the experts have other sizes than it needs.
    """
    chosen = FORMATS[name]
    matching = [mapping for mapping in mappings if re.search(chosen.pattern, mapping.native)]
    is_stacked = any(ref.index is not None for mapping in matching for ref in mapping.sources)
    if is_stacked and (family, name) != (_STACKED_FAMILY, "mxfp4"):
        raise CheckpointError(
            f"--quantize {name}: {family} has its experts in stacks, of which readers know {_STACKED_FAMILY} in mxfp4 "
            "only"
        )
    problems = {mapping.native: _find_problem(chosen.scaling, mapping, is_stacked) for mapping in matching}
    for native, problem in problems.items():
        if problem is not None and _EXPERT in native:
            raise CheckpointError(f"--quantize {name}: {problem}")
    natives = frozenset(native for native, problem in problems.items() if problem is None)
    notes = tuple(f"{problem}: not quantized" for problem in problems.values() if problem is not None)
    if not natives:
        raise CheckpointError("\n  ".join([f"--quantize {name}: no weight of {family} can be quantized", *notes]))
    kept = [
        ref.name.removesuffix(WEIGHT)
        for mapping in mappings
        if mapping.native not in natives and "embed" not in mapping.native
        for ref in mapping.sources
        if len(ref.shape) == 2 and ref.name.endswith(WEIGHT)
    ]
    config = _config(chosen, is_stacked, list(dict.fromkeys([*kept, "lm_head"])))
    num_weights = sum(math.prod(mapping.shape) for mapping in mappings)
    return QuantizedExport(chosen.scaling, is_stacked, natives, config, notes, num_weights)


def _find_problem(scaling: Scaling, mapping: TensorMapping, is_stacked: bool) -> str | None:
    """Return why readers cannot take a weight, None if they can."""
    for position, ref in enumerate(mapping.sources):
        rows, columns = reversed(ref.shape) if is_stacked else ref.shape
        if scaling is not BLOCK_FP8:
            if columns % scaling.cols:
                return f"{ref.name} has {columns} columns, and a multiple of {scaling.cols} is needed"
            continue
        needs_full_blocks = position < len(mapping.sources) - 1 or mapping.native.endswith(_BEFORE_ANOTHER)
        if rows % BLOCK_SIZE and needs_full_blocks:
            return f"{ref.name} has {rows} rows, and a multiple of {BLOCK_SIZE} is needed"
    return None


def _config(chosen: _Format, is_stacked: bool, kept: Sequence[str]) -> dict[str, Any]:
    """Return quantization_config, with the linear layers that are not quantized."""
    scaling = chosen.scaling
    if is_stacked:
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(_KEPT_IN_GPT_OSS)}
    if scaling is BLOCK_FP8:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [scaling.rows, scaling.cols],
            "modules_to_not_convert": list(kept),
        }
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group" if scaling is NVFP4 else "group",
        "group_size": scaling.cols,
        "symmetric": True,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": chosen.name,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": chosen.name}
        },
        "ignore": list(kept),
    }

"""Read an adapter folder of PEFT into native adapters, to train them further.

PEFT adapts Hugging Face linears one by one. Where a native linear is several of them, its A is theirs one below the
other, and its B has their parts in blocks; if they share one A, as in an adapter that this program wrote, so does the
native linear. All native adapters have the rank of the largest one: smaller ones get further rows of A, as new adapters
have, and zeros in B, so that they compute the same and can learn.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arguments.lora import LINEARS, LORA_A, LORA_B
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.hf.adapters import is_transposed, module_mappings
from moe_trainer.checkpoint.hf.family import Family
from moe_trainer.checkpoint.hf.files import ADAPTER_CONFIG, SafetensorsFolder, read_json
from moe_trainer.checkpoint.hf.names import HFTensor, TensorMapping, model_sizes, raise_problems
from moe_trainer.parallel.rng import named_generator

_PREFIX = "base_model.model."
# settings of PEFT that change what an adapter computes, with the value that this program has
_NEEDED = (
    ("peft_type", "LORA"),
    ("bias", "none"),
    ("use_dora", False),
    ("use_rslora", False),
    ("fan_in_fan_out", False),
    ("lora_bias", False),
    ("modules_to_save", None),
    ("rank_pattern", None),
    ("alpha_pattern", None),
    ("layer_replication", None),
    ("alora_invocation_tokens", None),
    ("use_qalora", False),
    ("use_bdlora", None),
    ("arrow_config", None),
    ("kasa_config", None),
    ("monteclora_config", None),
)
# initializations that change the weights of the base as well, each time that PEFT loads the adapter
_BASE_CHANGING = ("pissa", "corda", "olora", "loftq", "lora_ga")


@dataclass(frozen=True)
class ImportedAdapters:
    """Native adapters.

    Attributes:
        flags: --lora-dim, --lora-alpha and --lora-target-modules by destination.
        tensors: A and B by native name, in fp32.
        files: that were read.
    """

    flags: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    files: tuple[Path, ...]


class _Source:
    """The tensors of an adapter folder, by the Hugging Face tensor that they adapt."""

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        self.files = SafetensorsFolder(folder)
        self.used: set[str] = set()
        targets = [str(name).rpartition(".")[2] for name in config.get("target_parameters") or ()]
        self._rank = config["r"]
        self._stacks = [leaf for leaf in ("gate_up_proj", "up_proj", "down_proj") if leaf in targets]

    def path(self, name: str) -> str:
        """Return the path of a tensor's adapter; the last parameter of a module is the outer one."""
        module, _, leaf = name.rpartition(".")
        if leaf == "weight":
            return _PREFIX + module
        return _PREFIX + (module if self._stacks and leaf == self._stacks[-1] else f"{module}.base_layer")

    def __contains__(self, name: str) -> bool:
        leaf = name.rpartition(".")[2]
        return (leaf == "weight" or leaf in self._stacks) and f"{self.path(name)}.{LORA_A}.weight" in self.files

    def read(self, ref: HFTensor, is_turned: bool) -> tuple[Tensor, Tensor] | None:
        """Return A and B of a tensor, or of an expert's slice; None if it has none.

        Args:
            is_turned: the tensor is stored as [in, out].

        Raises:
            CheckpointError: if they do not fit the tensor.
        """
        if ref.name not in self:
            return None
        names = [f"{self.path(ref.name)}.{leaf}.weight" for leaf in (LORA_A, LORA_B)]
        if names[1] not in self.files:
            raise CheckpointError(f"{names[0]} is there, and {names[1]} is missing")
        self.used.update(names)
        down, up = (self.files.read(name).float() for name in names)
        rows, columns = ref.shape[::-1] if is_turned else ref.shape
        count = 1 if ref.index is None else ref.stack
        ranks = self._rank * count
        if down.shape != (ranks, columns) or up.shape != (rows, ranks):
            raise CheckpointError(
                f"{names[0]} and {LORA_B} have the shapes {list(down.shape)} and {list(up.shape)}, which do not fit "
                f"{ref.name} of {rows} outputs and {columns} inputs with r {self._rank}"
                + ("" if ref.index is None else f" and {count} experts")
            )
        if ref.index is not None:
            down = down.unflatten(0, (ref.stack, -1))[ref.index]
            up = up.unflatten(1, (-1, ref.stack))[:, :, ref.index]
        return down, up


def read_peft_folder(folder: Path, family: Family, flags: Mapping[str, Any]) -> ImportedAdapters:
    """Read the adapters of a base model of this family and with these flags (with "rows", of the embedding).

    Raises:
        CheckpointError: if the adapter has something that this program has not, or does not fit the base.
    """
    config = read_json(folder / ADAPTER_CONFIG)
    differing = [name for name, needed in _NEEDED if (config.get(name) or None) != (needed or None)]
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG}: {name} is {config.get(name)!r}, and {dict(_NEEDED)[name]!r} is needed"
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_BASE_CHANGING):
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG}: init_lora_weights is {start!r}, which changes the weights of the base too; "
            "convert the adapter to a plain one with PEFT (path_initial_model_for_weight_conversion of save_pretrained)"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not (type(rank) is int and rank > 0 and isinstance(alpha, int | float) and 0 < alpha < math.inf):
        raise CheckpointError(f"{folder / ADAPTER_CONFIG}: r is {rank!r} and lora_alpha {alpha!r}; numbers are needed")
    source = _Source(folder, config)
    mappings, sizes = module_mappings(family.names, flags, source.__contains__), model_sizes(flags)
    joined: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
    for mapping in mappings:
        natives = mapping.siblings or (mapping.native,)
        if mapping.native == natives[0] and (adapter := _join(mapping, source, sizes)) is not None:
            joined[mapping.native.partition(".weight")[0]] = adapter
    unused = [name for name in source.files.names if name not in source.used]
    raise_problems([f"{name}: no linear that can have an adapter" for name in unused])
    if not joined:
        raise CheckpointError(f"{folder} has no adapters")
    dim = max(len(down) for down, _ in joined.values())
    tensors: dict[str, Tensor] = {}
    for name, (down, ups) in joined.items():
        more = dim - len(down)
        tensors[f"{name}.{LORA_A}.weight"] = torch.cat([down, _new_rows(name, more, down.shape[1])])
        for native, up in ups.items():
            part = native.partition(".weight")[2]
            tensors[f"{name}.{LORA_B}.weight{part}"] = torch.nn.functional.pad(up, (0, more))
    linears = [mapping.native.partition(".weight")[0] for mapping in mappings if ".weight" in mapping.native]
    targets = list(_targets(joined, linears))
    return ImportedAdapters(
        {"lora_dim": dim, "lora_alpha": alpha / rank * dim, "lora_target_modules": targets},
        tensors,
        (*source.files.files, folder / ADAPTER_CONFIG),
    )


def _join(mapping: TensorMapping, source: _Source, sizes: Mapping[str, int]) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Return A, and B by native name, of the native linear of a mapping; None if no part of it has an adapter."""
    is_turned = is_transposed(mapping, sizes)
    parts = [source.read(ref, is_turned) for ref in mapping.sources]
    downs = [part[0] for part in parts if part is not None]
    if not downs:
        return None
    if mapping.native.partition(".weight")[0].rpartition(".")[2] not in LINEARS:
        raise CheckpointError(f"{mapping.sources[0].name}: {mapping.native} cannot have an adapter here")
    is_shared = len(downs) == len(parts) and all(torch.equal(down, downs[0]) for down in downs)
    down = downs[0] if is_shared else torch.cat(downs)
    ups, start = [], 0
    for ref, part in zip(mapping.sources, parts, strict=True):
        if part is None:
            block = torch.zeros(ref.shape[0], len(down))
        else:
            after = 0 if is_shared else len(down) - start - len(part[0])
            block = torch.nn.functional.pad(part[1], (start, after))
            start += 0 if is_shared else len(part[0])
        ups.append(block.t() if is_turned else block)
    native = mapping.transform.to_native(ups, sizes)
    return down, dict(zip(mapping.siblings, native, strict=True)) if mapping.siblings else {mapping.native: native}


def _new_rows(name: str, count: int, width: int) -> Tensor:
    """Return rows of A as new adapters have (layers/lora.py)."""
    bound = 1.0 / math.sqrt(width)
    return torch.empty(count, width).uniform_(-bound, bound, generator=named_generator(0, name))


def _targets(adapted: Mapping[str, Any], linears: Sequence[str]) -> Iterator[str]:
    """Yield --lora-target-modules: the last parts of names where all linears of that name have one, else names."""

    def target(name: str) -> str:
        before, is_expert, after = name.partition(".local_experts.")
        return f"{before}.{after.partition('.')[2]}" if is_expert else name

    others = {target(name) for name in linears if name.startswith("decoder.")} - {target(name) for name in adapted}
    leaves = {name.rpartition(".")[2] for name in others}
    seen = dict.fromkeys(map(target, adapted))
    yield from dict.fromkeys(leaf if (leaf := name.rpartition(".")[2]) not in leaves else name for name in seen)

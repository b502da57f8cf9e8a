"""What a run was built of, in files: its settings and modules (`--config-logger-dir`), and which parameter belongs to which parameter group
(`--dump-param-to-param-group-map`)."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from moe_trainer.parallel.params import info_of, unique_params
from moe_trainer.parallel.state import ParallelState


def write_configuration(directory: str, settings: Mapping[str, Any], chunks: Sequence[nn.Module], ps: ParallelState) -> None:
    """Write `arguments.json` on rank 0, and `model.rank_R.json` on every rank: its groups, and its modules and parameters by name.

    Raises: OSError when a file cannot be written.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    if ps.world.rank == 0:
        _write(folder / "arguments.json", dict(settings))
    groups = {field.name: getattr(ps, field.name).ranks for field in fields(ps)}
    _write(folder / f"model.rank_{ps.world.rank}.json", {"groups": groups, "chunks": [_describe(chunk) for chunk in chunks]})


def _describe(chunk: nn.Module) -> dict[str, Any]:
    modules = {name or "(chunk)": type(module).__name__ for name, module in chunk.named_modules()}
    parameters = {}
    for name, param in chunk.named_parameters():
        info = info_of(param)
        parameters[name] = {"names": info.names, "shape": tuple(param.shape), "dtype": str(param.dtype).removeprefix("torch."),
                            "kind": info.kind, "sharded_dim": info.sharded_dim, "shard": f"{info.shard_rank} of {info.shard_count}"}
    return {"modules": modules, "parameters": parameters}


def parameter_names(chunks: Iterable[nn.Module]) -> list[tuple[nn.Parameter, str]]:
    """Every parameter of this rank with each of its global names."""
    params = unique_params(param for chunk in chunks for param in chunk.parameters())
    return [(param, name) for param in params for name in info_of(param).names]


def write_group_map(path: str, groups: Mapping[str, Mapping[str, Any]]) -> None:
    """Write which parameter belongs to which group. groups: by the parameter's name, what characterises its group.

    The file has `param_groups`, a list, and `param_to_param_group`, the place in it by name.
    Raises: OSError when it cannot be written.
    """
    kinds = sorted({json.dumps(group, sort_keys=True) for group in groups.values()})
    places = {name: kinds.index(json.dumps(group, sort_keys=True)) for name, group in sorted(groups.items())}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    _write(Path(path), {"param_groups": [json.loads(kind) for kind in kinds], "param_to_param_group": places})


def _write(target: Path, content: Any) -> None:
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    partial.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(partial, target)

"""Files that describe how a run was built (--config-logger-dir, --dump-param-to-param-group-map)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from arguments import Arguments
from moe_trainer.io import atomic_write
from moe_trainer.optim.param_groups import get_param_group
from moe_trainer.parallel import collectives
from moe_trainer.parallel.coordination import raise_on_all_ranks
from moe_trainer.parallel.params import get_param_info, unique_params
from moe_trainer.parallel.state import ParallelState


def write_run_manifest(args: Arguments, chunks: Sequence[nn.Module], ps: ParallelState) -> None:
    """Write the files that the flags request. Collective if there are any.

    Raises:
        UserError: on every rank, if a file cannot be written.
    """
    folder, path = args.output.config_logger_dir, args.optimizer.dump_param_to_param_group_map
    if folder:
        with raise_on_all_ranks(ps.world, f"--config-logger-dir {folder}"):
            write_configuration(folder, args.as_dict(), chunks, ps)
    if path is not None:
        groups = _parameter_groups(args, chunks, ps)
        with raise_on_all_ranks(ps.world, f"--dump-param-to-param-group-map {path}"):
            if ps.world.rank == 0:
                write_group_map(path, groups)


def _parameter_groups(args: Arguments, chunks: Sequence[nn.Module], ps: ParallelState) -> dict[str, dict]:
    """Return the parameter group of every parameter of the model, by name. Collective."""
    params = unique_params(param for chunk in chunks for param in chunk.parameters())
    local = {
        name: asdict(get_param_group(param, args.optimizer, ps.ep.size > 1))
        for param in params
        for name in get_param_info(param).names
    }
    return {name: group for each in collectives.all_gather_object(local, ps.world) for name, group in each.items()}


def write_configuration(
    directory: str, settings: Mapping[str, Any], chunks: Sequence[nn.Module], ps: ParallelState
) -> None:
    """Write `arguments.json` on rank 0, and `model.rank_R.json` (groups, modules, parameters) on every rank."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    if ps.world.rank == 0:
        _write(folder / "arguments.json", dict(settings))
    groups = {name: group.ranks for name, group in ps.groups.items()}
    _write(
        folder / f"model.rank_{ps.world.rank}.json",
        {"groups": groups, "chunks": [_describe(chunk) for chunk in chunks]},
    )


def _describe(chunk: nn.Module) -> dict[str, Any]:
    modules = {name or "(chunk)": type(module).__name__ for name, module in chunk.named_modules()}
    parameters = {}
    for name, param in chunk.named_parameters():
        info = get_param_info(param)
        parameters[name] = {
            "names": info.names,
            "shape": tuple(param.shape),
            "dtype": str(param.dtype).removeprefix("torch."),
            "kind": info.kind,
            "sharded_dim": info.sharded_dim,
            "shard": f"{info.shard_rank} of {info.shard_count}",
        }
    return {"modules": modules, "parameters": parameters}


def write_group_map(path: str, groups: Mapping[str, Mapping[str, Any]]) -> None:
    """Write which parameter belongs to which group.

    `groups` maps parameter names to the settings of their group. The file has the list `param_groups` and, by
    parameter name, the index into it, `param_to_param_group`.
    """
    kinds = sorted({json.dumps(group, sort_keys=True) for group in groups.values()})
    indices = {name: kinds.index(json.dumps(group, sort_keys=True)) for name, group in sorted(groups.items())}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    _write(Path(path), {"param_groups": [json.loads(kind) for kind in kinds], "param_to_param_group": indices})


def _write(target: Path, content: Any) -> None:
    with atomic_write(target) as file:
        file.write(json.dumps(content, indent=1, default=str) + "\n")

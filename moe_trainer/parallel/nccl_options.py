"""Options of NCCL communicators: --nccl-communicator-config-path, and groups that communicate on high-priority streams.

Groups have Megatron-LM's names or those of ParallelState. Groups that share a communicator share its options.
"""

import logging
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
import yaml

from moe_trainer.errors import UserError, as_user_error

logger = logging.getLogger(__name__)

MEGATRON_NAMES = MappingProxyType(
    {
        "ep_dp": "edp",
        "intra_ep_dp": "edp_inner",
        "inter_ep_dp": "edp_outer",
        "intra_dp_cp": "dp_cp_inner",
        "inter_dp_cp": "dp_cp_outer",
        "ep_tp": "tp_ep",
        "tp_ep_mp": "tp_ep",
        "embd": "embedding",
    }
)
"""Names of Megatron-LM's groups that differ from ours."""
_ONLY_MEGATRON = frozenset({"mp", "pos_embd", "tp_dp", "tp_ep_pp", "intra_dist_opt", "hcp"})
HIGH_PRIORITY = "is_high_priority_stream"
_CONFIG = MappingProxyType({"cga_cluster_size": int, "max_ctas": int, "min_ctas": int, "net_name": str})
_KINDS = MappingProxyType({**_CONFIG, HIGH_PRIORITY: bool})

Options = Mapping[str, Mapping[str, Any]]
"""Group name -> option -> value."""


def read_options(path: str | None, high_priority: Collection[str], groups: Collection[str]) -> Options:
    """Return the options of every group that has some.

    Args:
        path: YAML file, or None.
        high_priority: names of groups.
        groups: names in ParallelState.

    Raises:
        UserError: for a file that cannot be read, an unknown option, or an unknown group.
    """
    flag = f"--nccl-communicator-config-path {path}"
    content: Any = {}
    if path is not None:
        with as_user_error(flag), open(path, encoding="utf-8") as file:
            try:
                content = yaml.safe_load(file) or {}
            except yaml.YAMLError as error:
                raise UserError(f"{flag}: not YAML: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(each, dict) for each in content.values()):
        raise UserError(f"{flag}: it must have the name of a group on every line, and its options below")
    for name, options in content.items():
        for key, value in options.items():
            if key not in _KINDS or type(value) is not _KINDS[key]:
                known = ", ".join(f"{key} ({kind.__name__})" for key, kind in _KINDS.items())
                raise UserError(f"{flag}: {name}: {key}: {value!r} is no option of a communicator; known: {known}")
    options_by_group: dict[str, dict[str, Any]] = {}
    for name, options in (*content.items(), *((name, {HIGH_PRIORITY: True}) for name in high_priority)):
        group = MEGATRON_NAMES.get(name, name)
        if group in _ONLY_MEGATRON:
            logger.info("NCCL options of %s: this program has no such communicator", name)
            continue
        if group not in groups:
            named = flag if name in content else f"--high-priority-stream-groups {name}"
            known = ", ".join(sorted({*groups, *MEGATRON_NAMES}))
            raise UserError(f"{named}: there is no group {name}; there are {known}")
        options_by_group.setdefault(group, {}).update(options)
    return options_by_group


def make_options(options: Mapping[str, Any]) -> Any:
    """Return the argument `pg_options` of torch.distributed.new_group for NCCL."""
    made = dist.ProcessGroupNCCL.Options(is_high_priority_stream=options.get(HIGH_PRIORITY, False))
    for key in _CONFIG:
        if key in options:
            setattr(made.config, key, options[key])
    return made

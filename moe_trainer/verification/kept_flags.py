"""Flags of a user's command line that a small command line keeps (shrink.py), by their roles (flag_properties.py).

A flag is kept if it acts and determines what is computed. Sizes are chosen again. Outputs and flags of the machine
compute nothing. Noise and half precision could hide a mistake. NOT_IN_REFERENCE lists what the reference must not have,
so that it computes by other means.
"""

from __future__ import annotations

from typing import Any

from arguments.container import OPTIONS, flags_of
from arguments.flag_status import RENAMED, get_flag_status
from arguments.mechanisms.formats import FLAGS, UNPROVABLE
from arguments.mechanisms.optimizers import OPTIMIZERS
from arguments.settings import Settings
from arguments.tokens import FIELDS

# destinations that shrink.py sets where a small command line needs them
_SET_AGAIN = frozenset(
    "init_method_std embedding_init_method_std dsa_indexer_loss_coeff dsa_attention_form adam_eps recompute_num_layers "
    "cpu_offloading_num_layers min_offloaded_tensor_size".split()
) | frozenset(dest for each in OPTIMIZERS for dest in each.set_again)
# without updates there is nothing to compare; the others name functions, layers or buffers of the full model
_NOT_COMPARED = (
    frozenset(("freeze_all_layers", "te_precision_config_file"))
    | frozenset(dest for flags in FLAGS for dest in (flags.factory, *flags.displaced))
    | frozenset(dest for flags in UNPROVABLE for dest in (flags.recipe, flags.param_gather))
)
# of roles that are left out, but what a pass computes or gathers depends on them
_KEPT_TOO = frozenset(("use_varlen_dataset", "logit_dtype", "ckpt_format"))
_KEPT = (
    flags_of("model", "parallel", "method", "quantization", "update", "mask") - _SET_AGAIN - _NOT_COMPARED | _KEPT_TOO
)
# a checkpoint format and quantized parameters come with a sharding
NOT_IN_REFERENCE = (
    flags_of("method") | frozenset(("bf16", "ckpt_format")) | frozenset(flags.param_gather for flags in FLAGS)
)
NOISE = tuple(dest for dest, option in OPTIONS.items() if option.role == "noise")
"""What makes ranks draw random numbers, unless it is 0, False or unset."""
_SET_BY_OLD_SPELLINGS = frozenset(
    FIELDS[word].dest for text in RENAMED.values() for word in text.split() if word in FIELDS
)


def get_kept_flags(s: Settings) -> dict[str, Any]:
    values = {}
    for dest in OPTIONS:
        derived = dest in _SET_BY_OLD_SPELLINGS and s.source[dest] == "derived"
        if dest not in _KEPT or not (s.given(dest) or derived):
            continue
        if get_flag_status(dest)[0] == "acts" and s.values[dest] != s.default(dest):
            values[dest] = s.values[dest]
    return values

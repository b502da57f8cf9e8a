"""--use-checkpoint-args: the architecture comes from the checkpoint and overrides the command line.

Reading a checkpoint needs torch, which this package does not import. So there are two steps: `find_source` returns the
checkpoint to read, before any rule runs; the caller reads its recorded flags and passes them to `parse_args`.
"""

import filecmp
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from arguments.container import OPTIONS
from arguments.flag_properties import Restore
from arguments.flag_status import RENAMED_VALUES
from arguments.layer_flags import LAYER_FLAGS, by_sublayer, dense_layers, difference
from arguments.layer_pattern import STAGE, letter_flags
from arguments.mechanisms.selections import SELECTING
from arguments.mechanisms.sublayers import VARIANT, always_rotates
from arguments.moe import MoEArgs
from arguments.mtp import without_mtp
from arguments.settings import Settings, Violation


def _restored(*when: Restore) -> tuple[str, ...]:
    return tuple(dest for dest, option in OPTIONS.items() if not set(when).isdisjoint(option.restore))


_EXPERT_FLAGS = frozenset(each.name for each in fields(MoEArgs))
SHAPE = _restored("always", "storage")
"""Flags that define the function of the weights, and how they are stored."""
STORAGE = _restored("storage")
LORA = _restored("adapters")
UNLESS_GIVEN = _restored("unless given")
TO_EVALUATE = _restored("to evaluate")
CAPACITY = _restored("capacity")
DATA = _restored("data")
TOKENIZER = _restored("tokenizer")
MAPPING = _restored("mapping")
MUST_AGREE = _restored("must agree")
"""Flags that make another model although they need not change any shape."""
STAGES = tuple(dest for dest in MAPPING if not dest.endswith("_parallel_size"))
"""Flags that place layers on pipeline stages."""
MUP = tuple(dest for dest in TO_EVALUATE if dest.startswith(("use_mup", "mup_")))
"""Part of the model too, but Megatron-LM takes them from the command line only."""

TOKENIZER_FILES = tuple(
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt "
    "tokenizer.model spiece.model vocab.txt chat_template.jinja".split()
)
"""What makes a folder a tokenizer."""


def _selecting(value: object) -> object:
    kinds = value if isinstance(value, tuple) else (value,)
    return next((kind for kind in kinds if kind in SELECTING), None)


def _without_stages(value: object) -> object:
    return value.replace(STAGE, "") if isinstance(value, str) else value


def _one_for_all(value: object) -> object:
    return 1 if isinstance(value, tuple) and set(value) == {1} else value


_SPELLED_ALIKE: Mapping[str, Callable[[object], object]] = MappingProxyType(
    {
        "moe_router_load_balancing_type": _selecting,
        "hybrid_layer_pattern": _without_stages,
        "moe_layer_freq": _one_for_all,
    }
)
"""What several values of a flag mean alike, of which the command line's stays."""


@dataclass(frozen=True)
class ArgumentGroup:
    """Flags that are taken together.

    Attributes:
        asked: whether the settings ask for them.
        recorded: whether the checkpoint provides them.
        overrides: whether they override the command line.
    """

    dests: tuple[str, ...]
    asked: Callable[[Settings], bool] = lambda settings: True
    recorded: Callable[[Settings, Mapping[str, object]], bool] = lambda settings, recorded: True
    overrides: bool = False


def _evaluates(settings: Settings) -> bool:
    return settings.is_eval_only


def _takes_tokenizer(settings: Settings) -> bool:
    return settings.use_tokenizer_model_from_checkpoint_args


def _keeps_tokenizer(settings: Settings, recorded: Mapping[str, object]) -> bool:
    """Whether a tokenizer of the command line stays."""
    return "tokenizer_type" in settings.typed and (settings.sft or bool(recorded.get("hf_model_type")))


def _no_data_given(settings: Settings, _recorded: Mapping[str, object]) -> bool:
    return not any(settings.given(dest) for dest in DATA)


GROUPS = (
    ArgumentGroup(SHAPE, overrides=True),
    ArgumentGroup(LORA, recorded=lambda settings, recorded: recorded.get("lora_dim") is not None, overrides=True),
    ArgumentGroup(TOKENIZER, _takes_tokenizer, _keeps_tokenizer),
    ArgumentGroup(TOKENIZER, _takes_tokenizer, lambda *both: not _keeps_tokenizer(*both), overrides=True),
    ArgumentGroup(_restored("tokenizer unless given"), _takes_tokenizer),
    ArgumentGroup(MAPPING, lambda settings: settings.use_mp_args_from_checkpoint_args, overrides=True),
    ArgumentGroup(UNLESS_GIVEN),
    ArgumentGroup(_restored("to convert"), lambda settings: settings.ckpt_convert_format is not None),
    ArgumentGroup(TO_EVALUATE, _evaluates),
    ArgumentGroup(
        CAPACITY, _evaluates, lambda settings, recorded: recorded.get("moe_expert_capacity_factor") is not None
    ),
    ArgumentGroup(DATA, _evaluates, _no_data_given),
    # `_for_evaluation` makes one of the other
    ArgumentGroup(("global_batch_size", "eval_global_batch_size"), _evaluates, lambda settings, recorded: False),
)
"""All that a checkpoint may set."""


@dataclass(frozen=True)
class CheckpointArgsSource:
    """Reference to the checkpoint whose flags are used.

    Attributes:
        folder: the checkpoint directory; None with --auto-resume alone.
        may_come: whether the run itself writes it, so that it may not exist at the first start.
        own: with --auto-resume, the directory whose newest complete checkpoint takes precedence.
        hf_mapping: mapping file of the folder's Hugging Face family.
    """

    folder: str | None
    step: int | None
    may_come: bool
    own: str | None = None
    hf_mapping: str | None = None


def find_source(settings: Settings) -> CheckpointArgsSource | None:
    """Return the checkpoint whose flags are used, or None."""
    folder = settings.load if settings.load is not None else settings.pretrained_checkpoint
    resumed = settings.save if settings.auto_resume else None
    if not settings.use_checkpoint_args or (folder is None and resumed is None):
        return None
    if folder is None:
        return CheckpointArgsSource(None, None, True, resumed)
    own = settings.save is not None and os.path.abspath(settings.save) == os.path.abspath(folder)
    may_come = own and settings.ckpt_step is None
    return CheckpointArgsSource(folder, settings.ckpt_step, may_come, resumed, settings.hf_mapping)


def suppliable(settings: Settings) -> frozenset[str]:
    """Return the destinations that a checkpoint may set under these flags."""
    return frozenset(dest for group in GROUPS if group.asked(settings) for dest in group.dests)


def meaning(dest: str, flags: Mapping[str, object]) -> object:
    """Return what a flag means for the function of the weights, equal for different ways to write it.

    Args:
        dest: of the flag.
        flags: the whole record; an unset flag may take its value from another one.
    """
    value = flags.get(dest)
    pattern = flags.get("hybrid_layer_pattern")
    if isinstance(pattern, str):  # Megatron-LM does not record what its letters select
        selected = letter_flags(pattern, flags.get("position_embedding_type"))
        value = selected.get(dest, value) if dest != VARIANT else value or selected.get(dest)
    if dest == "position_embedding_type" and value == "none" and always_rotates(flags):
        value = "rope"
    if dest in ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score_topk"):
        value = _group_limit(dest, flags)
    elif value is None:
        unset = OPTIONS[dest].unset
        value = flags.get(unset) if isinstance(unset, str) else OPTIONS[dest].default if unset is None else unset
    if isinstance(value, list | tuple):
        value = tuple(value)
    return _SPELLED_ALIKE.get(dest, lambda value: value)(value) or None


def _group_limit(dest: str, flags: Mapping[str, object]) -> object:
    """Return what a flag of group-limited routing means; None where the groups are no limit, such as all of them."""
    groups, best, value = flags.get("moe_router_num_groups"), flags.get("moe_router_group_topk"), flags.get(dest)
    if not isinstance(groups, int) or not isinstance(best, int) or not 0 < best < groups:
        return None
    if value is None and dest == "moe_router_group_score_topk":
        topk = flags.get("moe_router_topk")
        return topk // best if isinstance(topk, int) else None
    return value


def same_meaning(dest: str, flags: Mapping[str, object], others: Mapping[str, object]) -> bool:
    """Return whether a flag means the same in two records, or differs only because of another flag."""
    return flags.get(dest) == others.get(dest) or meaning(dest, flags) == meaning(dest, others)


@dataclass(frozen=True)
class Replaced:
    """A flag of the command line whose value is not the checkpoint's, which was taken.

    Attributes:
        shown: the flag and its value as given.
        layers: of a hybrid pattern, how its layers differ from those of a GPT model.
    """

    flag: str
    shown: str
    value: object
    recorded: object
    layers: str | None = None


def apply(settings: Settings, recorded: Mapping[str, object]) -> dict[str, Replaced]:
    """Write the recorded architecture over the settings; return what it replaced of the command line.

    See `conflicts`.
    """
    if not recorded:
        settings.set_derived("use_checkpoint_args", False, "there is no checkpoint yet")
        settings.note("--use-checkpoint-args: there is no checkpoint yet; the command line is used.")
        return {}
    recorded = {dest: _renamed(dest, value) for dest, value in recorded.items()}
    # the checkpoint of --moe-use-upcycling is of a dense model, whose experts the command line describes
    names = [
        dest
        for group in GROUPS
        if group.asked(settings) and group.recorded(settings, recorded)
        for dest in group.dests
        if group.overrides or not settings.given(dest)
    ]
    if settings.moe_use_upcycling:
        names = [dest for dest in names if dest not in _EXPERT_FLAGS]
        if settings.given("hybrid_layer_pattern") and recorded.get("hybrid_layer_pattern"):
            names.remove("hybrid_layer_pattern")
    if _drops_mtp(settings):
        names = [dest for dest in names if not dest.startswith("mtp_")]
        recorded = without_mtp(recorded)
    other_layers = None
    if _writes_pattern(settings, recorded):
        other_layers = _layer_difference(settings, recorded)
        if other_layers is None:
            names = [dest for dest in names if dest not in LAYER_FLAGS]
            recorded |= by_sublayer(recorded)
        else:
            recorded["hybrid_layer_pattern"] = None
    if settings.is_eval_only:
        names = _for_evaluation(settings, recorded, names)
    if _repads(settings, recorded):
        names = [dest for dest in names if dest != "padded_vocab_size"]
    replaced: dict[str, Replaced] = {}
    for dest in names:
        value = recorded.get(dest)
        if dest not in OPTIONS or dest not in recorded or value == settings.values[dest]:
            continue
        if value is None and settings.default(dest) is not None:  # no value of this flag
            continue
        if dest in _SPELLED_ALIKE and same_meaning(dest, recorded, settings.values):
            continue
        if dest in settings.typed:
            layers = other_layers if dest == "hybrid_layer_pattern" else None
            replaced[dest] = Replaced(settings.flag(dest), settings.shown(dest), settings.values[dest], value, layers)
        settings.forget(dest)
        settings.set_derived(dest, value, "from the checkpoint")
    is_fp32 = not settings.bf16 and not settings.fp16  # then everything is, and the flag is refused
    if is_fp32 and settings.source["fp32_residual_connection"] == "derived":
        settings.forget("fp32_residual_connection")
    return replaced


def conflicts(settings: Settings, replaced: Mapping[str, Replaced], alone: Settings) -> Iterator[Violation]:
    """Yield what is another function than the checkpoint's, or another tokenizer; note sizes that are replaced.

    Args:
        settings: resolved, with the checkpoint's flags.
        replaced: the result of `apply`.
        alone: the command line resolved without the checkpoint.
    """
    # what the command line asks for, in which a flag that it leaves out is the checkpoint's
    asked = {**settings.values, **{dest: old.value for dest, old in replaced.items()}}
    for dest, old in replaced.items():
        remedy = "or describe the whole model on the command line, without --use-checkpoint-args"
        if dest in TOKENIZER:
            matters = not _is_same_tokenizer(old.value, old.recorded)
            remedy = "or keep the tokenizer of the command line with --no-use-tokenizer-model-from-checkpoint-args"
        elif dest == "mtp_num_layers" and not old.value:
            matters = bool(old.recorded)
            remedy = "or leave multi-token prediction out of the training with --dist-ckpt-strictness log_unexpected"
        elif dest in ("group_query_attention", "num_query_groups"):
            matters = _query_groups(settings) != _query_groups(alone, settings.num_attention_heads)
        else:
            same = any(meaning(dest, settings.values) == meaning(dest, given) for given in (asked, alone.values))
            matters = dest in (*SHAPE, *LORA) and dest not in STORAGE and not same
        if old.layers is not None:
            yield Violation((old.flag,), f"{old.shown}: the checkpoint is of a GPT model; {old.layers}.")
        elif matters:
            yield Violation(
                (old.flag,),
                f"{old.shown}: the checkpoint has {dest} {old.recorded}, which --use-checkpoint-args takes. Leave "
                f"{old.flag} out, {remedy}.",
            )
        elif dest in (*STORAGE, *MAPPING):
            settings.note(f"{old.shown}: overridden by the checkpoint's value {old.recorded} (--use-checkpoint-args)")


def _query_groups(settings: Settings, heads: int | None = None) -> int | None:
    return settings.num_query_groups if settings.group_query_attention else settings.num_attention_heads or heads


def _is_same_tokenizer(one: object, other: object) -> bool:
    """Return whether two values name the same file or folder, or files or tokenizer folders with the same content."""
    if not isinstance(one, str) or not isinstance(other, str):
        return False
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    if os.path.isdir(one) and os.path.isdir(other):
        present = [
            [name for name in TOKENIZER_FILES if os.path.isfile(os.path.join(each, name))] for each in (one, other)
        ]
        names = present[0]
        return present[1] == names != [] and filecmp.cmpfiles(one, other, names, shallow=False)[0] == names
    return os.path.isfile(one) and os.path.isfile(other) and filecmp.cmp(one, other, shallow=False)


def _drops_mtp(settings: Settings) -> bool:
    """Return whether the command line leaves out multi-token prediction, and its tensors may stay unread."""
    given = {"mtp_num_layers", "dist_ckpt_strictness"} <= settings.typed
    return given and not settings.mtp_num_layers and not settings.dist_ckpt_strictness.startswith("raise_")


def _writes_pattern(settings: Settings, recorded: Mapping[str, object]) -> bool:
    """Return whether the command line writes the layers of the checkpoint's GPT model as a hybrid pattern."""
    written = settings.hybrid_layer_pattern and not recorded.get("hybrid_layer_pattern")
    return bool(written and recorded.get("num_layers"))


def _layer_difference(settings: Settings, recorded: Mapping[str, object]) -> str | None:
    """Return how the layers of the command line's pattern differ from the checkpoint's, None if they do not."""
    here = dense_layers(settings.values) if settings.moe_use_upcycling else settings.values
    try:
        return difference(recorded, here)
    except (TypeError, ValueError) as error:  # values of a damaged record are rejected as they are taken
        return f"its recorded flags are damaged: {error}"


def _repads(settings: Settings, recorded: Mapping[str, object]) -> bool:
    """Return whether the tensor-parallel size needs another vocabulary padding than the checkpoint's."""
    rows, ranks = recorded.get("padded_vocab_size"), settings.tensor_model_parallel_size
    apart = settings.use_mp_args_from_checkpoint_args or "padded_vocab_size" in settings.typed
    return not apart and isinstance(rows, int) and isinstance(ranks, int) and ranks > 0 and rows % ranks != 0


def _for_evaluation(settings: Settings, recorded: Mapping[str, object], names: list[str]) -> list[str]:
    """Return what an evaluation takes; set its batch size, which a run may record under another name."""
    if settings.bf16 or settings.fp16:
        names = [dest for dest in names if dest not in ("bf16", "fp16")]
    size = recorded.get("eval_global_batch_size") or recorded.get("global_batch_size")
    if (
        isinstance(size, int)
        and size > 0
        and not settings.given("global_batch_size")
        and not settings.given("eval_global_batch_size")
    ):
        settings.set_derived("eval_global_batch_size", size, "from the checkpoint")
    if settings.given("data_path") and not settings.given("split"):
        names = [*names, "split"]
    if _no_data_given(settings, recorded):
        taken = [
            f"{OPTIONS[dest].spellings[0]} {_text(recorded[dest])}".strip()
            for dest in DATA
            if recorded.get(dest) and _is_value(dest, recorded[dest])
        ]
        if taken:
            settings.note(f"no data was given: the evaluation takes the checkpoint's, {', '.join(taken)}")
    checked = {*TO_EVALUATE, *CAPACITY, *DATA}
    return [dest for dest in names if dest not in checked or _is_value(dest, recorded.get(dest))]


def _renamed(dest: str, value: object) -> object:
    """Return the value of today for one of an older version."""
    return RENAMED_VALUES.get((dest, value), value) if isinstance(value, str) else value


def _is_value(dest: str, value: object) -> bool:
    """Return whether the flag could have this value; None could not."""
    option = OPTIONS[dest]
    kinds: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "bool": bool}
    kind = kinds.get(option.type_name, str)
    items = value if isinstance(value, list | tuple) else (value,)
    if option.is_list != isinstance(value, list | tuple):
        return False
    return all(isinstance(item, kind) and (option.choices is None or item in option.choices) for item in items)


def _text(value: object) -> str:
    """Return what follows a flag's name on a command line: nothing for a switch, a list separated by spaces."""
    if isinstance(value, bool):
        return ""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

"""The command line takes precedence over a preset or recipe, also where two different flags set the same thing.

With a recipe that counts training in samples and --train-iters 10 on the command line, the user wants 10 iterations.
For each group below, flags on the command line reset the conflicting flags of a preset or recipe, with one note.
Conflicts within the command line are left to the rules.
"""

from arguments.mechanisms.format_kinds.declaration import FormatFlags
from arguments.mechanisms.formats import FLAGS
from arguments.rules.data import SPLIT_PATHS
from arguments.rules.pipeline import ACCOUNT, FIRST, LAST
from arguments.rules.training import ITERATIONS, SAMPLES
from arguments.settings import Settings

_END_STAGES = (FIRST, LAST, *ACCOUNT)
_LAYOUT = ("pipeline_model_parallel_layout",)
_PER_VIRTUAL = ("num_layers_per_virtual_pipeline_stage",)
_VIRTUAL = ("num_virtual_stages_per_pipeline_rank",)
_GRAPH_MODULES = ("cuda_graph_modules",)
_GRAPH_SCOPE = ("cuda_graph_scope_deprecated",)


def _of_other_widths(flags: FormatFlags) -> tuple[str, ...]:
    """Return the destinations of a preset's flags that a format of another width makes void."""
    others = (each for each in FLAGS if each is not flags)
    return tuple(dest for each in others for dest in (each.name, each.param_gather, *each.displaced))


# (flags that take precedence when typed, flags that they override when those were not typed)
GROUPS = (
    (("train_iters",), ("train_samples", *SAMPLES)),
    (("train_samples",), ("train_iters", *ITERATIONS)),
    (("lr_warmup_iters", "lr_warmup_samples"), ("lr_warmup_fraction",)),
    (("lr_warmup_fraction",), ("lr_warmup_iters", "lr_warmup_samples")),
    (("mock_data",), ("data_path", "data_args_path", "per_split_data_args_path", *SPLIT_PATHS)),
    (("data_path",), ("mock_data", "data_args_path", "per_split_data_args_path", *SPLIT_PATHS)),
    (("data_args_path",), ("mock_data", "data_path", "per_split_data_args_path", *SPLIT_PATHS)),
    (("per_split_data_args_path",), ("mock_data", "data_path", "data_args_path", *SPLIT_PATHS, "split")),
    (SPLIT_PATHS, ("mock_data", "data_path", "data_args_path", "per_split_data_args_path", "split")),
    (("bf16",), ("fp16",)),
    (("fp16",), ("bf16",)),
    *tuple(((flags.name,), _of_other_widths(flags)) for flags in FLAGS),
    (_LAYOUT, (*_PER_VIRTUAL, *_VIRTUAL, *_END_STAGES)),
    (_VIRTUAL, (*_PER_VIRTUAL, *_LAYOUT)),
    (_PER_VIRTUAL, (*_VIRTUAL, *_LAYOUT)),
    (_END_STAGES, _LAYOUT),
    (("step_batch_size_schedule",), ("global_batch_size", "rampup_batch_size")),
    (("global_batch_size", "rampup_batch_size"), ("step_batch_size_schedule",)),
    (_GRAPH_MODULES, _GRAPH_SCOPE),
    (_GRAPH_SCOPE, _GRAPH_MODULES),
)
FULL_ITERATION = (("cuda_graph_impl",), (*_GRAPH_MODULES, *_GRAPH_SCOPE))
"""With the value full_iteration only: other graphs keep the modules of the preset."""


def command_line_wins(s: Settings) -> None:
    """Reset flags of a preset or recipe that conflict with the command line."""
    groups = (*GROUPS, FULL_ITERATION) if s.cuda_graph_impl == "full_iteration" else GROUPS
    for preferred, overridden in groups:
        typed = [dest for dest in preferred if dest in s.typed]
        ignored = [dest for dest in overridden if s.source[dest] in ("preset", "recipe")] if typed else []
        for dest in ignored:
            if s.values[dest] == s.default(dest):
                continue
            s.note(f"{s.shown(dest)} from the {s.source[dest]} is ignored: {s.flag(typed[0])} is set.")
            s.forget(dest)

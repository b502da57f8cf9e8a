"""Where the text comes from and how it is split."""

import math
from collections.abc import Iterator

from arguments.data import DEFAULT_SPLIT, parse_transitions, split_weights
from arguments.rules.derived_sizes import DerivedSizes, as_list, positive
from arguments.settings import Limit, Settings, Violation

SPLIT_PATHS = ("train_data_path", "valid_data_path", "test_data_path")
SOURCES = ("mock_data", "data_path", "data_args_path", "per_split_data_args_path")
"""Flags that name the data of all splits."""


# Derived values.


def resolve_split(s: Settings, _f: DerivedSizes) -> None:
    if s.split is None and s.data_path and not s.full_validation and s.dataloader_type != "external":
        s.note(f'--split is not given with {s.flag("data_path")}: taken as "{DEFAULT_SPLIT}".')
        s.set_derived("split", DEFAULT_SPLIT, "the traditional split")


def resolve_tokenizer_and_loader(s: Settings, _f: DerivedSizes) -> None:
    if s.tokenizer_type is None:
        s.set_derived("tokenizer_type", "GPT2BPETokenizer", "the usual tokenizer of GPT pretraining")
    if s.dataloader_type is None:
        s.set_derived("dataloader_type", "single", "the usual loader of GPT pretraining")


# Checks.


def check_one_data_source(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    split_paths = next((dest for dest in SPLIT_PATHS if getattr(s, dest)), None)
    given = [dest for dest in SOURCES if getattr(s, dest)] + ([split_paths] if split_paths else [])
    if len(given) > 1:
        yield s.violation(
            "Use only one source of data: {sources}.", *given, sources=" or ".join(s.flag(dest) for dest in given)
        )


def check_eval_data(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    evaluates = s.is_eval_only and (s.eval_iters > 0 or s.full_validation)
    if evaluates and not any(getattr(s, dest) for dest in (*SOURCES, *SPLIT_PATHS)):
        yield s.violation(
            "{skip_train} needs data to evaluate on: --valid-data-path PREFIX (all of it), {data_path:flag} PREFIX "
            "with --split, or --mock-data.",
            kind="build",
        )


def check_split(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.split is None:
        return
    try:
        train, _, _ = split_weights(s.split)
    except ValueError as error:
        yield s.violation("{split} {error}.", error=error)
        return
    if train == 0 and not s.skip_train:
        yield s.violation("{split} leaves nothing for training: the first number is its share.")


def check_split_needs_one_corpus(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    per_split = [
        dest for dest in (*SPLIT_PATHS, "per_split_data_args_path", "phase_data_args_path") if getattr(s, dest)
    ]
    if per_split and s.given("split"):
        yield s.violation(
            "{split} cannot be combined with {:flag}, which already says what is training text.", per_split[0]
        )


def limit_phases(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    """List what hides which samples a phase reads."""
    has_phases = s.phase_transition_iterations is not None
    for dest in ("rampup_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed"):
        yield Limit(
            has_phases and s.values[dest],
            "{phase_transition_iterations:flag} cannot be combined with {}: phases need a constant global batch size.",
            (dest,),
        )
    yield Limit(
        has_phases and s.dataloader_type == "cyclic",
        "{phase_transition_iterations:flag} cannot be combined with {dataloader_type:flag} cyclic: a phase reads its "
        "samples in the order of its index.",
    )


def check_phases(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    """Check that every phase has its data."""
    transitions, files = "phase_transition_iterations", "phase_data_args_path"
    if getattr(s, transitions) is None or not getattr(s, files):
        return
    iterations = parse_transitions(getattr(s, transitions))
    needed = len(iterations) + 1
    if iterations != tuple(sorted(iterations)):
        yield s.violation(
            "{phase_transition_iterations} must be in increasing order: {phase_data_args_path:flag} names one file for "
            "each phase."
        )
    if len(getattr(s, files)) != needed:
        yield s.violation(
            "{phase_data_args_path} names {given} files; {phase_transition_iterations} divides the run into {needed} "
            "phases.",
            given=len(getattr(s, files)),
            needed=needed,
        )
    for dest in (*SOURCES, "train_data_path"):
        if getattr(s, dest):
            yield s.violation("{phase_data_args_path} cannot be combined with {:flag}: both name training data.", dest)


def note_phases_after_the_end(s: Settings, _f: DerivedSizes) -> None:
    """Say which files of phases are not read; a short run with the flags of a long one is valid."""
    files, last = s.phase_data_args_path, s.train_iters
    if s.phase_transition_iterations is None or not files or not positive(last):
        return
    iterations = sorted(parse_transitions(s.phase_transition_iterations))
    unread = [file for begin, file in zip(iterations, files[1:]) if begin >= last]
    if unread:
        s.note(
            f"{s.flag('phase_data_args_path')}: {', '.join(unread)} will not be read: the run ends with iteration "
            f"{last}, before {s.shown('phase_transition_iterations')} begins that phase."
        )


def check_streamed_text(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.dataloader_type != "external":
        return
    if not any(getattr(s, dest) for dest in (*SOURCES[1:], *SPLIT_PATHS)) or s.mock_data:
        yield s.violation("{dataloader_type} external needs text: {train_data_path:flag} FILES.")


def note_streamed_text_without_validation(s: Settings, _f: DerivedSizes) -> None:
    has_validation = s.valid_data_path or s.per_split_data_args_path
    if s.dataloader_type == "external" and positive(s.eval_iters) and not has_validation:
        s.note(
            f"{s.flag('eval_iters')} {s.eval_iters} with {s.shown('dataloader_type')}: nothing is validated; give "
            f"{s.flag('valid_data_path')} FILES."
        )


STREAM_CONFLICTS = (
    ("full_validation", "the end of streamed text is not known"),
    ("multiple_validation_sets", "streamed text has one validation set"),
    ("phase_transition_iterations", "phases need token files"),
    ("skip_train", "a checkpoint is evaluated on token files"),
)


def note_split_of_streamed_text(s: Settings, _f: DerivedSizes) -> None:
    if s.dataloader_type == "external" and s.given("split") and _is_all_training(s):
        s.note(f"{s.shown('split')}: no effect with {s.shown('dataloader_type')}, whose sets have separate files.")


def _is_all_training(s: Settings) -> bool:
    try:
        return not any(split_weights(s.split)[1:])
    except ValueError:  # check_split reports it
        return True


def limit_streamed_text(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    for dest, why in STREAM_CONFLICTS:
        yield Limit(
            s.dataloader_type == "external" and s.values[dest],
            "{dataloader_type:flag} external cannot be combined with {}: " + why + ".",
            (dest,),
        )
    yield Limit(
        s.dataloader_type == "external" and s.values["split"] and not _is_all_training(s),
        "{dataloader_type:flag} external cannot be combined with {split}, which leaves something for validation or "
        "test: the sets have separate files.",
        ("split",),
    )


def note_unused_object_storage(s: Settings, _f: DerivedSizes) -> None:
    in_files = s.data_args_path or s.per_split_data_args_path or s.phase_data_args_path or s.document_source
    words = [word for dest in ("data_path", *SPLIT_PATHS) for word in as_list(getattr(s, dest))]
    if s.object_storage_cache_path is not None and not in_files and not any("://" in word for word in words):
        s.note_no_effect(s.shown("object_storage_cache_path"), "without data in object storage")


def check_object_storage(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    for dest in ("data_path", *SPLIT_PATHS):
        remote = next((word for word in as_list(getattr(s, dest)) if "://" in word), None)
        if remote is not None and s.object_storage_cache_path is None and s.dataloader_type != "external":
            yield s.violation(
                "{} names data in object storage ({remote}), which needs {object_storage_cache_path:flag} DIR.",
                dest,
                remote=remote,
            )


def check_blends(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    """Check that weights and prefixes alternate, or that there are prefixes only.

    One word with blanks may be a full blend, which is read at start-up.
    """
    for dest in ("data_path", *SPLIT_PATHS):
        words = as_list(getattr(s, dest))
        weights = [_number(word) for word in words]
        if len(words) < 2 or all(weight is None for weight in weights):
            continue
        if len(words) % 2 or None in weights[::2]:
            text = (
                "weights and data prefixes do not alternate; give a weight before every prefix, or none (a prefix that "
                "is a number: ./7)"
            )
            yield s.violation("{}: {text}.", dest, text=text)
        elif not _are_blend_weights([weight for weight in weights[::2] if weight is not None]):
            yield s.violation("{}: weights must be finite, not negative, and not all 0.", dest)


def _are_blend_weights(weights: list[float]) -> bool:
    return all(0 <= weight < math.inf for weight in weights) and sum(weights) > 0


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def check_null_tokenizer(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.tokenizer_type in ("NullTokenizer", "NullMultimodalTokenizer") and s.vocab_size is None:
        yield s.violation("{tokenizer_type} needs {vocab_size:flag}: it has no vocabulary.")


def check_validation_set_names(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    names, paths = as_list(s.validation_set_names), as_list(s.valid_data_path)
    if s.multiple_validation_sets and names and paths and len(names) != len(paths):
        yield s.violation(
            "{validation_set_names} gives {num_names} names for {num_sets} validation sets.",
            "valid_data_path",
            num_names=len(names),
            num_sets=len(paths),
        )


FIM_TOKENIZERS = ("HuggingFaceTokenizer", "GPT2BPETokenizer", "TikTokenizer")


def check_fim(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if not s.fim_data:
        return
    sources = ("data_path", "data_args_path", "per_split_data_args_path", "phase_data_args_path", *SPLIT_PATHS)
    if s.mock_data or not any(getattr(s, source) for source in sources):
        yield s.violation(
            "{fim_data} rearranges text and cannot be combined with mock data ({mock_data:flag}, or no data at all): "
            "give --data-path."
        )
    if s.tokenizer_type not in FIM_TOKENIZERS:
        yield s.violation(
            "{fim_data} needs a tokenizer that separates text from special tokens: {tokenizer_type:flag} {accepted}, "
            "not {tokenizer_type:value}.",
            accepted=", ".join(FIM_TOKENIZERS),
        )
    for rate in ("fim_rate", "fim_spm_rate"):
        if getattr(s, rate) == 0:
            yield s.violation(
                "{} must be above 0, as in Megatron-LM: without {fim_data} no sample is rearranged.", rate
            )
    if s.fim_split_sample and s.fim_fragment_rate is None:
        yield s.violation("{fim_split_sample} needs {fim_fragment_rate:flag}: how often a fragment is rearranged.")


FIM_TOKENS = ("fim_prefix_token", "fim_middle_token", "fim_suffix_token", "fim_pad_token")


def check_fim_tokens(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    """Check that the tokens of the parts of a sample differ."""
    seen: dict[str, str] = {}
    for dest in FIM_TOKENS if s.fim_data else ():
        other = seen.setdefault(getattr(s, dest), dest)
        if other != dest:
            yield s.violation("{} is also {:flag}: the parts of a sample need different tokens.", dest, other)


def note_fim_with_document_masking(s: Settings, _f: DerivedSizes) -> None:
    if s.fim_data and s.dataloader_inter_document_masking:
        s.note(
            f"{s.flag('dataloader_inter_document_masking')} with {s.flag('fim_data')}: a rearranged sample counts as "
            "one document."
        )

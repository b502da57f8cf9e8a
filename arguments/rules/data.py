"""Rules 50-51: where the text comes from and how it is split."""

import math
import re
from collections.abc import Iterator

from arguments.data import DEFAULT_SPLIT
from arguments.rules.facts import Facts, as_list, broken, say
from arguments.settings import Settings, Violation

SPLIT_PATHS = ("train_data_path", "valid_data_path", "test_data_path")


def read_split(text: str) -> tuple[float, float, float]:
    """Read `--split 969,30,1` as three shares that add up to 1; missing ones are 0.

    Raises: ValueError saying what is wrong.
    """
    words = [word for word in re.split(r"[,/\s]+", text.strip().strip("'\"")) if word]
    try:
        weights = [float(word) for word in words]
    except ValueError:
        raise ValueError("needs up to three numbers separated by commas, for example 969,30,1") from None
    if not all(map(math.isfinite, weights)):
        raise ValueError("needs finite numbers")
    if not 1 <= len(weights) <= 3:
        raise ValueError(f"has {len(weights)} numbers; needs one to three: training, validation, test")
    if any(weight < 0 for weight in weights) or sum(weights) <= 0:
        raise ValueError("needs numbers that are not negative and not all 0")
    weights += [0.0] * (3 - len(weights))
    total = sum(weights)
    return (weights[0] / total, weights[1] / total, weights[2] / total)


# Derived and normalised values.


def legacy_split(s: Settings, _f: Facts) -> None:
    if s.split is None and s.data_path and not s.full_validation:
        s.note(f'--split is not given with {s.flag("data_path")}: taken as "{DEFAULT_SPLIT}".')
        s.set_derived("split", DEFAULT_SPLIT, "the traditional split")


def tokenizer_and_loader(s: Settings, _f: Facts) -> None:
    if s.tokenizer_type is None:
        s.set_derived("tokenizer_type", "GPT2BPETokenizer", "the usual tokenizer of GPT pretraining")
    if s.dataloader_type is None:
        s.set_derived("dataloader_type", "single", "the usual loader of GPT pretraining")


# Checks.


def one_source(s: Settings, _f: Facts) -> Iterator[Violation]:
    split_paths = next((dest for dest in SPLIT_PATHS if getattr(s, dest)), None)
    candidates = ["mock_data", "data_path", "data_args_path", "per_split_data_args_path"]
    given = [dest for dest in candidates if getattr(s, dest)] + ([split_paths] if split_paths else [])
    if len(given) > 1:
        yield broken(s, f"Use only one source of data: {' or '.join(s.flag(dest) for dest in given)}.", *given)


def evaluation_has_data(s: Settings, _f: Facts) -> Iterator[Violation]:
    evaluates = s.evaluates_only and (s.eval_iters > 0 or s.full_validation)
    if evaluates and not any(getattr(s, dest) for dest in ("mock_data", "data_path", "data_args_path", "per_split_data_args_path", *SPLIT_PATHS)):
        yield broken(
            s,
            f"{s.flag('skip_train')} needs data to evaluate on: --valid-data-path PREFIX (all of it), --data-path PREFIX with --split, or --mock-data.",
            "skip_train",
            "data_path",
            kind="build",
        )


def split_is_readable(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.split is None:
        return
    try:
        train, _, _ = read_split(s.split)
    except ValueError as error:
        yield broken(s, f"{say(s, 'split')} {error}.", "split")
        return
    if train == 0 and not s.skip_train:
        yield broken(s, f"{say(s, 'split')} leaves nothing for training: the first number is its share.", "split")


def split_needs_one_corpus(s: Settings, _f: Facts) -> Iterator[Violation]:
    per_split = [dest for dest in (*SPLIT_PATHS, "per_split_data_args_path") if getattr(s, dest)]
    if per_split and s.given("split"):
        yield broken(
            s,
            f"{say(s, 'split')} cannot be combined with {s.flag(per_split[0])}, which already says what is training "
            "text.",
            "split",
            per_split[0],
        )


def blends_are_readable(s: Settings, _f: Facts) -> Iterator[Violation]:
    """Numbers and prefixes take turns, or there are prefixes only. One word with blanks may be a whole blend; the start reads it."""
    for dest in ("data_path", *SPLIT_PATHS):
        words = as_list(getattr(s, dest))
        weights = [_number(word) for word in words]
        if len(words) < 2 or all(weight is None for weight in weights):
            continue
        if len(words) % 2 or None in weights[::2]:
            text = "weights and data prefixes do not take turns; give a weight before every prefix, or before none (a prefix that is a number: ./7)"
            yield broken(s, f"{say(s, dest)}: {text}.", dest)
        elif not all(0 <= weight < math.inf for weight in weights[::2]) or sum(weights[::2]) <= 0:
            yield broken(s, f"{say(s, dest)}: weights must be finite, not negative, and not all 0.", dest)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def null_tokenizer_has_a_size(s: Settings, _f: Facts) -> Iterator[Violation]:
    if s.tokenizer_type in ("NullTokenizer", "NullMultimodalTokenizer") and s.vocab_size is None:
        yield broken(s, f"{say(s, 'tokenizer_type')} needs --vocab-size: it has no vocabulary of its own.", "tokenizer_type", "vocab_size")


def validation_names_fit(s: Settings, _f: Facts) -> Iterator[Violation]:
    names, paths = as_list(s.validation_set_names), as_list(s.valid_data_path)
    if s.multiple_validation_sets and names and paths and len(names) != len(paths):
        yield broken(
            s,
            f"{say(s, 'validation_set_names')} gives {len(names)} names for {len(paths)} validation sets.",
            "validation_set_names",
            "valid_data_path",
        )


FIM_TOKENIZERS = ("HuggingFaceTokenizer", "GPT2BPETokenizer", "TikTokenizer")


def fim_fits(s: Settings, _f: Facts) -> Iterator[Violation]:
    if not s.fim_data:
        return
    dest = "fim_data"
    sources = ("data_path", "data_args_path", "per_split_data_args_path", *SPLIT_PATHS)
    if s.mock_data or not any(getattr(s, source) for source in sources):
        yield broken(s, f"{s.flag(dest)} rearranges text and cannot be combined with mock data (--mock-data, or no data at all): give --data-path.", dest, "mock_data")
    if s.tokenizer_type not in FIM_TOKENIZERS:
        yield broken(s, f"{s.flag(dest)} needs a tokenizer that tells text from special tokens: --tokenizer-type "
                     f"{', '.join(FIM_TOKENIZERS)}, not {s.tokenizer_type}.", dest, "tokenizer_type")  # fmt: skip
    for rate in ("fim_rate", "fim_spm_rate"):
        if getattr(s, rate) == 0:
            yield broken(s, f"{say(s, rate)} must be above 0, as in Megatron-LM: without {s.flag(dest)} no sample is rearranged.", rate)
    if s.fim_split_sample and s.fim_fragment_rate is None:
        yield broken(s, f"{say(s, 'fim_split_sample')} needs --fim-fragment-rate: how often a fragment is rearranged.", "fim_fragment_rate",
                     "fim_split_sample")  # fmt: skip


FIM_TOKENS = ("fim_prefix_token", "fim_middle_token", "fim_suffix_token", "fim_pad_token")


def fim_tokens_differ(s: Settings, _f: Facts) -> Iterator[Violation]:
    """A model could not tell the parts of a sample apart."""
    seen: dict[str, str] = {}
    for dest in FIM_TOKENS if s.fim_data else ():
        other = seen.setdefault(getattr(s, dest), dest)
        if other != dest:
            yield broken(s, f"{say(s, dest)} is also {s.flag(other)}: the parts of a sample need tokens of their own.", dest, other)


def fim_samples_are_one_document(s: Settings, _f: Facts) -> None:
    if s.fim_data and s.dataloader_inter_document_masking:
        s.note(f"{s.flag('dataloader_inter_document_masking')} with {s.flag('fim_data')}: a rearranged sample counts as one document.")


RESOLVE = (legacy_split, tokenizer_and_loader, fim_samples_are_one_document)
CHECKS = (one_source, evaluation_has_data, split_is_readable, split_needs_one_corpus, blends_are_readable, null_tokenizer_has_a_size, validation_names_fit, fim_fits, fim_tokens_differ)

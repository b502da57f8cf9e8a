"""From data flags to datasets: which files, which split, how many samples; one barrier between building and reading."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from arguments.blend import (
    SPLIT_NAMES,
    Blend,
    get_blends_per_split,
    get_common_blend,
    get_phase_blends,
    get_stream_blends,
)
from arguments.data import DEFAULT_SPLIT, DataArgs
from arguments.training import TrainingArgs
from moe_trainer.data.blend import normalize
from moe_trainer.data.combined import BlendedDataset, ContinuedDataset, PhasedDataset
from moe_trainer.data.dataset import NO_PAD, DatasetConfig, GPTDataset, MockTokens, SampleSource
from moe_trainer.data.document_sources import open_source
from moe_trainer.data.fim import FillInTheMiddle
from moe_trainer.data.index_build import parse_split, split_range
from moe_trainer.data.index_cache import CachedIndex
from moe_trainer.data.indexed import IndexedDataset, open_token_file
from moe_trainer.data.loader import BatchFormat
from moe_trainer.data.object_storage import make_object_store
from moe_trainer.data.sample_order import keep_order
from moe_trainer.data.sequence_files import SequenceFiles
from moe_trainer.data.sources import domain_names, naming_flag, requested_sizes, source_flag, training_phases
from moe_trainer.data.stream import StreamBlend, StreamedDataset
from moe_trainer.data.streamed_sequences import Streamed, StreamedSequences
from moe_trainer.data.tokenizer import Tokenizer
from moe_trainer.data.tokenizer_record import TokenizerCheck
from moe_trainer.data.varlen import VarlenDataset
from moe_trainer.errors import UserError

logger = logging.getLogger(__name__)

_MOCK_SPLIT = "1,1,1"
_WHOLE = (0.0, 1.0)

TokenFileDataset = GPTDataset | ContinuedDataset | VarlenDataset | BlendedDataset
AnyDataset = TokenFileDataset | PhasedDataset | Streamed
Sizes = tuple[int | None, int | None, int | None]
"""Samples of the train, valid and test splits."""


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run.

    Attributes:
        valid: one entry, or one per file with --multiple-validation-sets.
        valid_names: their log suffixes, "" for one.
        domains: with --skip-train, the prefixes of a blend one by one, for validation and test, by the names of their
            results.
    """

    train: AnyDataset | None
    valid: tuple[AnyDataset, ...]
    valid_names: tuple[str, ...]
    test: AnyDataset | None
    domains: tuple[tuple[str, AnyDataset], ...] = ()


def batch_format(data: DataArgs, tokenizer: Tokenizer, vocab_size: int | None = None) -> BatchFormat:
    """Return how samples become batches under these flags.

    `vocab_size`: ids from here on are an error (the padded size; by default the tokenizer's own).
    """
    pad = tokenizer.pad
    if pad is None or (pad == tokenizer.eod and not data.allow_ambiguous_pad_tokens):
        pad = NO_PAD
    if data.allow_ambiguous_pad_tokens and tokenizer.pad != tokenizer.eod:
        logger.info("--allow-ambiguous-pad-tokens has no effect: end-of-document tokens are not pad tokens")
    return BatchFormat(
        eod=tokenizer.eod,
        pad=pad,
        vocab_size=tokenizer.vocab_size if vocab_size is None else vocab_size,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask and data.create_attention_mask_in_dataloader,
        eod_mask_loss=data.eod_mask_loss,
        separate_documents=data.dataloader_inter_document_masking,
        padded_length=data.seq_length if data.use_varlen_dataset and data.varlen_sbhd_validation else None,
    )


def build_datasets(
    data: DataArgs,
    training: TrainingArgs,
    tokenizer: Tokenizer,
    sizes: Sizes | None = None,
    *,
    consumed: int = 0,
    kept_order: Mapping[str, str] = MappingProxyType({}),
    run_once: Callable[[Callable[[], None]], None] = lambda write: write(),
) -> Datasets:
    """Build the train, validation and test datasets of a run.

    Args:
        data: the flags of data.
        training: the flags of training.
        tokenizer: of the run.
        sizes: samples per split, `requested_sizes` by default; 0 leaves a split out if the data has no part for it,
            None is one full pass.
        consumed: training samples that are consumed already; they tell the phase of --phase-transition-iterations.
        kept_order: the order of the training samples of the run to be continued, from `describe_order`.
        run_once: calls a function, which writes missing index caches, on one rank; the others wait for it and
            raise its error.

    Raises:
        ValueError: for missing or damaged files, contradictory flags, and samples asked of an empty split.
    """
    sizes = requested_sizes(training) if sizes is None else sizes
    builder = _DatasetBuilder(data, training, tokenizer, kept_order)
    if builder.sequences is not None:
        builder.sequences.index_texts(run_once)
    datasets = builder.datasets(sizes, consumed)
    domains = (dataset for _, dataset in datasets.domains)
    candidates = datasets.train, *datasets.valid, datasets.test, *domains
    kinds = CachedIndex | ContinuedDataset | PhasedDataset
    everything = [dataset for dataset in candidates if isinstance(dataset, kinds)]
    try:

        def write_caches() -> None:
            for dataset in everything:
                dataset.write_cache()

        run_once(write_caches)
        for dataset in everything:
            dataset.load()
    except MemoryError as error:
        raise UserError(
            f"the order of {sizes[0]} training samples (--train-iters, --train-samples) does not fit into memory: "
            f"{error}"
        ) from error
    return datasets


def build_streams(data: DataArgs, training: TrainingArgs, tokenizer: Tokenizer, sizes: Sizes | None = None) -> Datasets:
    """Open the text of --dataloader-type external: streamed documents in place of token files.

    Args:
        data: the flags of data; --data-path is training text.
        training: the flags of training.
        tokenizer: of the run.
        sizes: samples per split, `requested_sizes` by default.

    Raises:
        ValueError: for missing files and unusable flags.
    """
    sizes = requested_sizes(training) if sizes is None else sizes

    def stream(number: int, patterns: Sequence[str], size: int) -> StreamedDataset:
        with naming_flag(data, number):
            fim = FillInTheMiddle.from_args(data, tokenizer)
            return StreamedDataset(
                open_source(patterns, data.document_text_key, data.document_source),
                " ".join(patterns),
                size,
                DatasetConfig(data.seq_length, training.seed, tokenizer, fim=fim),
                num_streams=data.document_streams,
                by_document=data.use_varlen_dataset,
                num_threads=data.num_workers,
            )

    def split(number: int, blend: Blend | None) -> Streamed | None:
        size = sizes[number]
        if blend is None or not size:
            return None
        dataset: StreamedDataset | StreamBlend
        if blend.weights is None:
            dataset = stream(number, blend.prefixes, size)
        else:
            datasets = [stream(number, [prefix], size) for prefix in blend.prefixes]
            dataset = StreamBlend(datasets, blend.weights, size)
        return StreamedSequences(dataset) if data.use_varlen_dataset else dataset

    train, valid, test = (split(number, blend) for number, blend in enumerate(get_stream_blends(data)))
    if train is None and sizes[0]:
        raise UserError("--dataloader-type external: there is no training text; give --train-data-path FILES")
    return Datasets(train, () if valid is None else (valid,), ("",), test)


@dataclass(frozen=True)
class _Split:
    """A split that has data.

    Attributes:
        number: 0 train, 1 validation, 2 test.
        share: where it begins and ends in a file.
    """

    number: int
    share: tuple[float, float]

    @property
    def name(self) -> str:
        return SPLIT_NAMES[self.number]


class _DatasetBuilder:
    """Choose the data source and lay out the datasets, without building any index.

    Attributes:
        sequences: of samples of different lengths; None if samples are cut from a token file.
    """

    def __init__(self, data: DataArgs, training: TrainingArgs, tokenizer: Tokenizer, kept_order: Mapping[str, str]):
        self._data, self._training, self._kept_order = data, training, kept_order
        self._opened: dict[str, IndexedDataset] = {}
        self._tokenizer_check = TokenizerCheck(tokenizer)
        self._store = make_object_store(data)
        self._per_split = get_blends_per_split(data)
        self._blend, self._phase_blends = get_common_blend(data), get_phase_blends(data)
        per_split_flags = "--train-data-path / --valid-data-path / --test-data-path / --per-split-data-args-path"
        is_given = {
            "--mock-data": data.mock_data,
            "--data-path / --data-args-path": self._blend is not None,
            per_split_flags: self._per_split is not None,
        }
        sources = [flags for flags, given in is_given.items() if given]
        if len(sources) > 1:
            raise ValueError(f"one data source is needed, given were {' and '.join(sources)}")
        if not sources:
            logger.warning("no data was given (--data-path): training on mock data")
        for number, blend in enumerate((self._blend, *(self._per_split or ()))):
            counts = Counter(() if blend is None else blend.prefixes)
            for prefix, count in counts.items():
                if count > 1:
                    logger.warning(
                        "%s names %s %d times: each of them gives the same samples, as in Megatron-LM",
                        source_flag(data, max(number - 1, 0)),
                        prefix,
                        count,
                    )
        if self._per_split is not None and data.split is not None:
            raise ValueError(
                f'--split "{data.split}" cannot be combined with data paths per split; every file belongs to one '
                "split already"
            )
        split = None
        if self._per_split is None:
            split = _MOCK_SPLIT if self._blend is None else data.split or DEFAULT_SPLIT
        self._config = DatasetConfig(
            sequence_length=data.seq_length,
            seed=training.seed,
            tokenizer=tokenizer,
            split=split,
            split_matrix=None if split is None else parse_split(split),
            cache_path=data.data_cache_path,
            memory_map=data.mmap_bin_files,
            fim=FillInTheMiddle.from_args(data, tokenizer),
        )
        self.sequences: SequenceFiles | None = None
        if data.has_sequences:
            blends = (0, self._blend), *enumerate(self._per_split or ()), *((0, blend) for blend in self._phase_blends)
            self.sequences = SequenceFiles(data, tokenizer, blends, self._open)

    def datasets(self, sizes: Sizes, consumed: int) -> Datasets:
        train = (
            self._phases(consumed)
            if self._data.phase_transitions and sizes[0]
            else self._split(0, sizes[0], self._get_kept(0))
        )
        test = self._split(2, sizes[2])
        valid, names = self._validation(sizes[1])
        domains = tuple(self._domains(sizes)) if self._training.skip_train else ()
        return Datasets(train, valid, names, test, domains)

    def _phases(self, consumed: int) -> PhasedDataset:
        """Return the training samples from the current phase on."""
        phases, split = training_phases(self._data, self._training, consumed), self._find_split(0)
        if split is None:
            raise self._no_training_data(phases[0].end - phases[0].first)
        datasets: list[tuple[int, SampleSource]] = []
        for number, first, end in phases:
            blend = self._phase_blends[number] if self._phase_blends else self._get_blend(0)
            datasets.append((first, self._dataset(split, end - first, blend, self._get_kept(first))))
        return PhasedDataset(datasets, phases[-1].end)

    def _get_kept(self, first: int) -> Sequence[str]:
        """Return the order, in the run to be continued, of the token files of the phase from sample `first` on."""
        return self._kept_order.get(str(first), "").splitlines()

    def _domains(self, sizes: Sizes) -> Iterator[tuple[str, TokenFileDataset]]:
        """Yield each prefix of a blend, in the splits that are evaluated, unless these are several sets already."""
        for number, kind in ((1, "validation"), (2, "test")):
            blend, split = self._get_blend(number), self._find_split(number)
            if blend is None or len(blend.prefixes) < 2 or split is None or sizes[number] == 0:
                continue
            if number == 1 and self._training.multiple_validation_sets:
                continue
            for name, prefix in zip(domain_names(blend.prefixes), blend.prefixes):
                yield f"{kind}-{name}", self._single(prefix, split, sizes[number])

    def _validation(self, size: int | None) -> tuple[tuple[TokenFileDataset, ...], tuple[str, ...]]:
        blend = self._get_blend(1)
        if not self._training.multiple_validation_sets or blend is None:
            dataset = self._split(1, size)
            return ((), ()) if dataset is None else ((dataset,), ("",))
        names = self._training.validation_set_names
        if not names:
            names = [str(i) for i in range(len(blend.prefixes))] if len(blend.prefixes) > 1 else [""]
        if len(names) != len(blend.prefixes):
            raise ValueError(f"--validation-set-names: {len(names)} names for {len(blend.prefixes)} validation sets")
        split = self._find_split(1)
        if split is None or size == 0:
            return (), ()
        return tuple(self._single(prefix, split, size) for prefix in blend.prefixes), tuple(names)

    def _get_blend(self, number: int) -> Blend | None:
        return self._blend if self._per_split is None else self._per_split[number]

    def _find_split(self, number: int) -> _Split | None:
        """Return a split, or None if there is no data for it."""
        matrix = self._config.split_matrix
        share = matrix[number] if matrix is not None else None if self._get_blend(number) is None else _WHOLE
        return None if share is None else _Split(number, share)

    def _split(self, number: int, size: int | None, kept: Sequence[str] = ()) -> TokenFileDataset | None:
        """Return the dataset of split `number`, or None when there is no data for it and none is needed.

        Args:
            number: of the split.
            size: samples.
            kept: the order of its token files in the run to be continued; see sample_order.py.
        """
        split = self._find_split(number)
        if split is not None:
            return None if size == 0 else self._dataset(split, size, self._get_blend(number), kept)
        if size and number == 0:
            raise self._no_training_data(size)
        if size:  # recipes often give the test split no share and still set --eval-iters
            logger.info(
                "there is no data for the %s split (%s): it is not evaluated", SPLIT_NAMES[number], self._origin(number)
            )
        return None

    def _no_training_data(self, size: int) -> UserError:
        return UserError(
            f"{size} samples are asked of the train split, which has no data ({self._origin(0)}); give it a share"
        )

    def _origin(self, number: int) -> str:
        split = self._config.split
        return f'--split "{split}"' if split else f"no --{SPLIT_NAMES[number]}-data-path"

    def _dataset(self, split: _Split, size: int | None, blend: Blend | None, kept: Sequence[str]) -> TokenFileDataset:
        """Return the dataset of a split of a blend, or of mock data; `kept` as for `_split`."""
        if blend is None:
            return self._single(None, split, size, *kept[:1])
        if blend.weights is None and len(blend.prefixes) == 1:
            return self._single(blend.prefixes[0], split, size, *kept[:1])
        if blend.weights is not None and size is not None:
            return self._weighted(blend.prefixes, blend.weights, split, size, kept)
        return self._proportional(blend, split, size)

    def _weighted(
        self, prefixes: Sequence[str], weights: Sequence[float], split: _Split, size: int, kept: Sequence[str]
    ) -> BlendedDataset:
        weights = normalize(weights)
        targets = [math.ceil(size * weight) for weight in weights]
        surplus = 1 + self._data.mid_level_dataset_surplus
        lines = kept if len(kept) == len(prefixes) else [""] * len(prefixes)
        datasets = [
            self._single(prefix, split, math.ceil(target * surplus), line)
            for prefix, target, line in zip(prefixes, targets, lines)
        ]
        return BlendedDataset(datasets, weights, sum(targets), split.name, self._config)

    def _proportional(self, blend: Blend, split: _Split, size: int | None) -> BlendedDataset:
        if blend.weights is not None:
            logger.warning(
                "a full pass over the %s split reads every sample once; blend weights play no part", split.name
            )
        datasets = [self._single(prefix, split, None) for prefix in blend.prefixes]
        lengths = [len(dataset) for dataset in datasets]
        size = None if size is None else min(size, sum(lengths))
        return BlendedDataset(datasets, lengths, size, split.name, self._config)

    def _single(
        self, prefix: str | None, split: _Split, size: int | None, kept: str = ""
    ) -> GPTDataset | ContinuedDataset | VarlenDataset:
        """Return a split of one token file, or of mock data; `kept` is its line in the order to be continued."""
        if self.sequences is not None:
            sequences = self.sequences.open(prefix, split.number)
            begin, end = split_range(split.share, len(sequences))
            return VarlenDataset(sequences, prefix, begin, end, size, split.name, self._config)
        source = (
            self._open(prefix, split.number)
            if prefix is not None
            else MockTokens(self._config.tokenizer.vocab_size, self._config.tokenizer.eod)
        )
        begin, end = split_range(split.share, len(source))

        def make(num_samples: int | None, order: int = 0) -> GPTDataset:
            config = replace(self._config, seed=self._config.seed + order)
            return GPTDataset(source, prefix, begin, end, num_samples, split.name, config)

        return keep_order(make(size), kept, make) if kept else make(size)

    def _open(self, prefix: str, number: int) -> IndexedDataset:
        if prefix not in self._opened:
            with naming_flag(self._data, number):
                self._opened[prefix] = open_token_file(prefix, self._config.memory_map, self._store)
                self._tokenizer_check.check(prefix)
        return self._opened[prefix]

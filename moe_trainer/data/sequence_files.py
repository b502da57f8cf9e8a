"""Which sequences --use-varlen-dataset and --sft read: those of text files, token files and mock data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cached_property

from arguments.blend import Blend
from arguments.data import DataArgs
from arguments.mock_lengths import read_mock_lengths
from moe_trainer.data.indexed import IndexedDataset
from moe_trainer.data.sources import naming_flag
from moe_trainer.data.text_sequences import TextSequences, is_text_file
from moe_trainer.data.tokenizer import Tokenizer
from moe_trainer.data.varlen import FileSequences, MockSequences, Sequences
from moe_trainer.errors import UserError

logger = logging.getLogger(__name__)


class SequenceFiles:
    """The samples of different lengths of --use-varlen-dataset and --sft: of text files, token files or mock data.

    Args:
        data: the flags of data.
        tokenizer: of the run.
        blends: with the number of the split whose flag names them.
        open_tokens: opens the token file of a prefix that a split's flag names.

    Raises:
        UserError: for a missing file, or a tokenizer without end-of-document token.
    """

    def __init__(
        self,
        data: DataArgs,
        tokenizer: Tokenizer,
        blends: Iterable[tuple[int, Blend | None]],
        open_tokens: Callable[[str, int], IndexedDataset],
    ):
        if tokenizer.eod is None:
            raise UserError(
                f"{data.sequences_flag}: samples end with the end-of-document token, and the tokenizer has none"
            )
        self._data, self._eod, self._vocab_size = data, tokenizer.eod, tokenizer.vocab_size
        self._open_tokens = open_tokens
        self._texts: dict[str, TextSequences] = {}
        self._files: dict[str, FileSequences] = {}
        for number, blend in blends:
            for path in () if blend is None else blend.prefixes:
                if path not in self._texts and (data.sft or is_text_file(path)):
                    with naming_flag(data, number):
                        self._texts[path] = TextSequences(path, tokenizer, data.sft, data.data_cache_path)

    def index_texts(self, run_once: Callable[[Callable[[], None]], None]) -> None:
        """Build the missing indices of text files, log how many samples are cut, and load them on every rank.

        Raises:
            UserError: for a file of which no token is trained.
        """
        if not self._texts:
            return
        run_once(self._write_indices)
        for text in self._texts.values():
            text.load()

    def _write_indices(self) -> None:
        longest = self._data.seq_length + 1
        for text in self._texts.values():
            text.write_cache()
            text.load()
            self._warn_of_cut(text.name, text.count_longer(longest), len(text))
            if not (num_untrained := text.count_untrained(longest)):
                continue
            problem = (
                f"{text.name}: {num_untrained} of {len(text)} samples have no trained token: their answers begin after "
                f"--seq-length {longest - 1}"
            )
            if num_untrained == len(text):
                raise UserError(problem)
            logger.warning("%s", problem)

    def _warn_of_cut(self, name: str, num_cut: int, num_sequences: int) -> None:
        if num_cut:
            length = self._data.seq_length
            logger.warning("%s: %d of %d samples are cut to --seq-length %d", name, num_cut, num_sequences, length)

    def open(self, prefix: str | None, number: int) -> Sequences:
        """Return the sequences of a file that a split's flag names; None for those of mock data."""
        if prefix is None:
            return self._mock
        if prefix in self._texts:
            return self._texts[prefix]
        if prefix not in self._files:
            length = self._data.seq_length + 1
            file = FileSequences(self._open_tokens(prefix, number), prefix, self._eod, length)
            self._warn_of_cut(prefix, file.count_longer(length), len(file))
            self._files[prefix] = file
        return self._files[prefix]

    @cached_property
    def _mock(self) -> MockSequences:
        data = self._data
        config = data.sft_mock_dataset_config_json if data.sft else data.varlen_mock_dataset_config_json
        return MockSequences(read_mock_lengths(config, data.seq_length), self._vocab_size, data.seq_length)

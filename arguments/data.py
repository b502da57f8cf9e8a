"""DataArgs: corpora, samples, tokenizer.

A field is a flag: its name is Megatron's destination, its annotation the type and the choices, the string below it
the help text. schema.py turns fields into options.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

from arguments.flag_properties import MAX_SAMPLES, MAX_SIZE, MAX_WORKERS
from arguments.mechanisms.sublayer_kinds.declaration import SublayerCapability
from arguments.schema import Section, flag

DEFAULT_SPLIT = "969, 30, 1"
"""Taken for --split where it is not given."""


def split_weights(text: str) -> tuple[float, float, float]:
    """Parse --split such as 969,30,1 into the shares of training, validation and test; missing ones are 0.

    Raises:
        ValueError: with what is needed.
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
    train, valid, test = weights + [0.0] * (3 - len(weights))
    total = train + valid + test
    return train / total, valid / total, test / total


def parse_transitions(text: str) -> tuple[int, ...]:
    """Parse --phase-transition-iterations such as 1000,1500; return the iterations as they are written.

    Raises:
        ValueError: with what is needed.
    """
    need = "different iterations above 0, separated by commas, for example 1000,1500"
    try:
        iterations = tuple(int(word) for word in text.strip().strip("'\"").split(","))
    except ValueError:
        raise ValueError(need) from None
    if min(iterations) < 1 or len(set(iterations)) < len(iterations):
        raise ValueError(need)
    return iterations


def _checked_transitions(text: str) -> str:
    """Check the iterations and return their text, which checkpoints record as Megatron-LM's do."""
    parse_transitions(text)
    return text


_SENTENCEPIECE = (
    "tokenizer_type=SentencePieceTokenizer or tokenizer_type=GPTSentencePieceTokenizer or "
    "tokenizer_type=Llama2Tokenizer or metadata_path"
)
_HUGGING_FACE = "tokenizer_type=HuggingFaceTokenizer or metadata_path"


@dataclass(frozen=True, repr=False, eq=False)
class DataArgs(Section):
    """Corpora, samples, tokenizer."""

    # ---- corpora
    data_path: list[str] | None = flag(None, nargs="*", path="data", restore="data")
    """Data prefixes: one, several, or weights and prefixes in turn; --split divides them."""
    split: str | None = flag(None, needs="data_path or data_args_path", restore="data")
    """Shares of training, validation and test samples, such as 969,30,1. Unset: 969,30,1."""
    train_data_path: list[str] | None = flag(None, nargs="*", path="data", restore="data")
    """Data prefixes for training, with weights or without."""
    valid_data_path: list[str] | None = flag(None, nargs="*", path="data", restore="data")
    """Data prefixes for validation, with weights or without."""
    test_data_path: list[str] | None = flag(None, nargs="*", path="data", restore="data")
    """Data prefixes for test, with weights or without."""
    data_args_path: str | None = flag(None, path="read", restore="data")
    """File with the words of --data-path."""
    per_split_data_args_path: str | None = flag(None, path="read", restore="data")
    """JSON file with a list of prefixes for each of train, valid and test."""
    per_dataset_sequences_path: str | None = flag(None, restore="never")
    """JSON file with the number of sequences of each dataset."""
    mock_data: bool = flag(False, restore="data")
    """Train on synthetic tokens."""
    use_varlen_dataset: bool = flag(False, restore="never", demands=SublayerCapability.PACKED_SAMPLES)
    """Train on samples of different lengths: a sequence of a token file, or a row of a JSONL or Parquet file, is a
    sample of at most --seq-length tokens."""
    sft: bool = flag(False, restore="never", demands=SublayerCapability.PACKED_SAMPLES)
    """Train on conversations: JSONL or Parquet files of messages, each conversation a sample."""
    varlen_sbhd_validation: bool = flag(False, needs="use_varlen_dataset", restore="never")
    """Pad every sample of --use-varlen-dataset to --seq-length instead of packing them."""
    varlen_mock_dataset_config_json: str | None = flag(
        None, needs=("use_varlen_dataset", "mock_data"), path="read", restore="never"
    )
    """Lengths of samples with --use-varlen-dataset --mock-data: JSON, or a file with it. mode "distribution" needs type
    "lognormal", min_seq_len, max_seq_len, mean_seq_len and lognormal_sigma; "file" needs path, a CSV file with lengths;
    "verification" needs data_path, a data prefix that tokens are taken from. Unset: lognormal up to --seq-length."""
    sft_mock_dataset_config_json: str | None = flag(None, needs=("sft", "mock_data"), path="read", restore="never")
    """Lengths of samples with --sft --mock-data, as in --varlen-mock-dataset-config-json."""
    phase_transition_iterations: str | None = flag(None, parse=_checked_transitions, restore="never")
    """Iterations at which a training phase ends, such as 1000,1500. The run saves and stops there, to be continued with
    another data blend; with --phase-data-args-path it continues with the next one."""
    phase_data_args_path: list[str] | None = flag(
        None, needs="phase_transition_iterations", path="read", restore="never"
    )
    """One file for each training phase with the words of its blend, as in --data-args-path."""
    data_cache_path: str | None = flag(None, path="cache", restore="never")
    """Directory for index files. Unset: a folder next to the data."""

    # ---- samples
    seq_length: int = flag(None, restore="unless given", bounds=">0", most=MAX_SAMPLES, role="size")
    """Length of a sample, in tokens."""
    reset_position_ids: bool = flag(False, restore="to evaluate", role="mask")
    """Restart positions after each end-of-document token."""
    reset_attention_mask: bool = flag(
        False,
        needs="create_attention_mask_in_dataloader",
        restore="to evaluate",
        role="mask",
        demands=SublayerCapability.DOCUMENTS,
    )
    """Do not attend across end-of-document tokens."""
    eod_mask_loss: bool = flag(False, needs=("!use_varlen_dataset", "!sft"), restore="to evaluate", role="mask")
    """Compute no loss on end-of-document tokens."""
    create_attention_mask_in_dataloader: bool = flag(
        True,
        off=("--no-create-attention-mask-in-dataloader",),
        needs="reset_attention_mask",
        restore="to evaluate",
        role="mask",
    )
    """Create the attention mask of --reset-attention-mask in the data loader."""
    dataloader_inter_document_masking: bool = flag(
        False, restore="to evaluate", role="mask", demands=SublayerCapability.DOCUMENTS
    )
    """Do not attend across documents: pass the lengths of documents to the attention."""
    allow_ambiguous_pad_tokens: bool = flag(False, restore="never")
    """Mask pad tokens in the loss even if they are also the end-of-document token."""

    # ---- fill-in-the-middle samples
    fim_data: bool = flag(False, restore="never")
    """Rearrange documents into prefix, suffix and middle (FIM), so that the model learns to fill gaps."""
    fim_rate: float = flag(0.5, needs="fim_data", bounds="[0,1]", restore="never")
    """Fraction of documents that are rearranged, above 0 and at most 1."""
    fim_spm_rate: float = flag(0.5, needs="fim_data", bounds="[0,1]", restore="never")
    """Fraction of rearranged documents with the suffix first (SPM) instead of the prefix (PSM), above 0 and at most
    1."""
    fim_split_sample: str | None = flag(None, needs="fim_data", restore="never")
    """Token that divides a document into fragments, which are rearranged one by one."""
    fim_fragment_rate: float | None = flag(None, needs="fim_split_sample", bounds="[0,1]", restore="never")
    """Fraction of fragments that are rearranged, with --fim-split-sample; from 0 to 1."""
    fim_no_prefix: str | None = flag(None, needs="fim_data", restore="never")
    """Do not rearrange text that begins with these words."""
    fim_prefix_token: str = flag("<fim_prefix>", needs="fim_data", restore="never")
    """Token before the prefix."""
    fim_middle_token: str = flag("<fim_middle>", needs="fim_data", restore="never")
    """Token before the middle."""
    fim_suffix_token: str = flag("<fim_suffix>", needs="fim_data", restore="never")
    """Token before the suffix."""
    fim_pad_token: str = flag("<fim_pad>", needs="fim_data", restore="never")
    """Token that fills a sample that has become shorter."""
    fim_eod_token: str = flag("<|endoftext|>", needs="fim_data", restore="never")
    """Token that ends a document."""

    # ---- reading
    num_workers: int = flag(2, bounds=">=0", most=MAX_WORKERS, restore="never")
    """Number of data-loading processes per rank; 0: load in the training process."""
    mmap_bin_files: bool = flag(True, off=("--no-mmap-bin-files",), needs="!mock_data", restore="never")
    """Map .bin files into memory instead of reading them."""
    num_dataset_builder_threads: int = flag(1, bounds=">0", restore="never")
    """Number of threads per rank that build datasets."""
    mid_level_dataset_surplus: float = flag(0.005, needs="!mock_data", bounds=">=0", restore="never")
    """Fraction by which each dataset of a blend has more samples than its share."""
    dataloader_fast_cache_load: bool = flag(False, restore="never")
    """Trust that index files exist and skip the checks."""
    dataloader_defer_npy_index_mmap: bool = flag(False, restore="never")
    """Map index files on first use."""
    object_storage_cache_path: str | None = flag(None, path="cache", restore="never")
    """Local directory for data in object storage (s3://, gs://, msc://): whole indices, and blocks of .bin files."""
    object_storage_cache_gb: float = flag(16.0, needs="object_storage_cache_path", bounds=">0", restore="never")
    """Bound of the blocks in --object-storage-cache-path, in GiB, over all processes that share the directory."""
    object_storage_read_ahead: int = flag(32, needs="object_storage_cache_path", bounds=">=0", restore="never")
    """Number of microbatches before their turn at which their blocks are read from object storage."""

    # ---- text that is tokenized while it is read (--dataloader-type external)
    document_source: str | None = flag(None, needs="dataloader_type=external", restore="never")
    """MODULE:CALLABLE: a function from a name of --train-data-path to its documents (see the manual). Unset: files
    .jsonl, .parquet and .arrow."""
    document_text_key: str = flag("text", needs="dataloader_type=external", restore="never")
    """Key or column of the text."""
    document_streams: int = flag(16, needs="dataloader_type=external", bounds=">0", restore="never")
    """Number of streams into which the documents are divided, at best a multiple of micro-batch size times
    data-parallel size. It decides which sample comes when, and must not change during a run."""

    # ---- tokenizer
    tokenizer_type: (
        Literal[
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "GPT2BPETokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "HuggingFaceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "MultimodalTokenizer",
            "NullTokenizer",
            "NullMultimodalTokenizer",
            "SFTTokenizer",
        ]
        | None
    ) = flag(None, restore="tokenizer")
    """Kind of tokenizer. Unset: GPT2BPETokenizer."""
    tokenizer_model: str | None = flag(
        None,
        needs=("!tokenizer_type=NullTokenizer", "!tokenizer_type=GPT2BPETokenizer or metadata_path"),
        path="read",
        restore="tokenizer",
    )
    """Model file, directory or hub name of the tokenizer."""
    vocab_file: str | None = flag(
        None, needs="tokenizer_type=GPT2BPETokenizer or metadata_path", path="read", restore="tokenizer"
    )
    """Vocabulary file of the GPT-2 BPE tokenizer."""
    merge_file: str | None = flag(
        None, needs="tokenizer_type=GPT2BPETokenizer or metadata_path", path="read", restore="tokenizer"
    )
    """Merge file of the GPT-2 BPE tokenizer."""
    vocab_size: int | None = flag(None, restore="storage", bounds=">0", most=MAX_SIZE)
    """Vocabulary size before padding. Unset: the tokenizer's."""
    padded_vocab_size: int | None = flag(None, restore="storage", bounds=">0", most=MAX_SIZE)
    """Vocabulary size after padding. Unset: computed from the vocabulary size."""
    pad_vocab_size: bool = flag(True, off=("--no-pad-vocab-size", "--disable-pad-vocab-size"), restore="never")
    """Pad the vocabulary size to a multiple that ranks can shard."""
    metadata_path: str | None = flag(
        None,
        "--tokenizer-metadata",
        needs=("!tokenizer_type=NullTokenizer", "!tokenizer_type=SFTTokenizer"),
        path="read",
        restore="never",
    )
    """File or directory with the tokenizer's metadata."""
    special_tokens: list[str] | None = flag(
        None, "--tokenizer-special-tokens", needs="!tokenizer_type=NullTokenizer", restore="tokenizer"
    )
    """Special tokens to add to the tokenizer."""
    tiktoken_pattern: Literal["v1", "v2"] | None = flag(
        None, needs="tokenizer_type=TikTokenizer or metadata_path", restore="tokenizer"
    )
    """Pre-tokenization pattern of tiktoken."""
    tiktoken_num_special_tokens: int = flag(
        1000, needs="tokenizer_type=TikTokenizer or metadata_path", bounds=">=0", restore="never"
    )
    """Number of special tokens of the tiktoken tokenizer."""
    tokenizer_sentencepiece_legacy: bool = flag(False, needs=_SENTENCEPIECE, restore="never")
    """Use SentencePiece's legacy treatment of special tokens."""
    tokenizer_sentencepiece_ignore_extra_whitespaces: bool = flag(
        True,
        off=(
            "--no-tokenizer-sentencepiece-ignore-extra-whitespaces",
            "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
        ),
        needs=_SENTENCEPIECE,
        restore="never",
    )
    """Let SentencePiece drop repeated blanks."""
    tokenizer_hf_no_use_fast: bool = flag(False, needs=_HUGGING_FACE, restore="never")
    """Use the slow implementation of a Hugging Face tokenizer."""
    tokenizer_hf_no_include_special_tokens: bool = flag(False, needs=_HUGGING_FACE, restore="never")
    """Do not let a Hugging Face tokenizer add special tokens to texts."""
    trust_remote_code: bool = flag(False, needs=_HUGGING_FACE, restore="never")
    """Allow a Hugging Face tokenizer to run code from the hub."""
    null_tokenizer_eod_id: int | None = flag(None, needs="tokenizer_type=NullTokenizer", bounds="any", restore="never")
    """End-of-document token of the null tokenizer, as an id."""
    null_tokenizer_pad_id: int = flag(-1, needs="tokenizer_type=NullTokenizer", bounds="any", restore="never")
    """Pad token of the null tokenizer, as an id."""
    use_gigatoken: bool = flag(False, restore="never")
    """Use the gigatoken library for tokenization."""
    sft_tokenizer_prompt_format: str = flag(
        "nemotron-h-aligned", needs="tokenizer_type=SFTTokenizer", restore="tokenizer unless given"
    )
    """How SFTTokenizer writes a conversation: nemotron-h-aligned, nemotron-nano-v2, identity; default: by the chat
    template of the tokenizer, with loss on all tokens; assistant (not in Megatron-LM): the same with loss on the
    assistant's turns only."""
    chat_template: str | None = flag(None, needs="tokenizer_type=SFTTokenizer", restore="never")
    """Chat template in place of the tokenizer's, as Jinja text or a file with it."""

    @property
    def has_sequences(self) -> bool:
        """Whether samples have different lengths."""
        return self.use_varlen_dataset or self.sft

    @property
    def sequences_flag(self) -> str:
        """The flag that gives samples different lengths."""
        return "--sft" if self.sft else "--use-varlen-dataset"

    @property
    def phase_transitions(self) -> tuple[int, ...]:
        """Iterations after which another training phase begins, ascending."""
        text = self.phase_transition_iterations
        return () if text is None else tuple(sorted(parse_transitions(text)))

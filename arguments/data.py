"""DataArgs: corpora, samples, tokenizer.

A field is a flag: its name is Megatron's destination, its annotation the type and the choices, the string under
it the help text. How a field becomes an option stands in schema.py.
"""

from dataclasses import dataclass
from typing import Literal

from arguments.schema import flag

DEFAULT_SPLIT = "969, 30, 1"
"""Taken for --split where it is not given."""


@dataclass(frozen=True)
class DataArgs:
    """Corpora, samples, tokenizer."""

    # ---- corpora
    data_path: list[str] | None = flag(None, nargs="*")
    """Data prefixes: one, several, or weight and prefix in turn; split by --split."""
    split: str | None = None
    """Shares of training, validation and test samples, such as 969,30,1."""
    train_data_path: list[str] | None = flag(None, nargs="*")
    """Prefixes (with weights) for training."""
    valid_data_path: list[str] | None = flag(None, nargs="*")
    """Prefixes (with weights) for validation."""
    test_data_path: list[str] | None = flag(None, nargs="*")
    """Prefixes (with weights) for test."""
    data_args_path: str | None = None
    """File that holds what --data-path would."""
    per_split_data_args_path: str | None = None
    """JSON file with a list of prefixes for each of train, valid and test."""
    per_dataset_sequences_path: str | None = None
    """JSON file with the number of sequences of each data set."""
    mock_data: bool = False
    """Train on made-up tokens."""
    phase_transition_iterations: str | None = None
    """Iterations at which a phase of training ends: save, stop, go on with another data blend."""
    data_cache_path: str | None = None
    """Folder for index files."""

    # ---- samples
    seq_length: int | None = None
    """Tokens per sample."""
    reset_position_ids: bool = False
    """Start positions anew after each end-of-document token."""
    reset_attention_mask: bool = False
    """Do not attend across end-of-document tokens."""
    eod_mask_loss: bool = False
    """No loss on end-of-document tokens."""
    create_attention_mask_in_dataloader: bool = flag(True, off=("--no-create-attention-mask-in-dataloader",))
    """Make the attention mask in the data loader."""
    dataloader_inter_document_masking: bool = False
    """Mask documents from each other through sequence lengths."""
    allow_ambiguous_pad_tokens: bool = False
    """Accept a pad token that also occurs in the text."""

    # ---- fill-in-the-middle samples
    fim_data: bool = False
    """Rearrange documents into prefix, suffix and middle (FIM), so that the model learns to fill gaps."""
    fim_rate: float = 0.5
    """How often a document is rearranged."""
    fim_spm_rate: float = 0.5
    """How often a rearranged document has its suffix first (SPM) instead of its prefix (PSM)."""
    fim_split_sample: str | None = None
    """Token that divides a document into fragments, which are rearranged one by one."""
    fim_fragment_rate: float | None = None
    """How often a fragment is rearranged, with --fim-split-sample."""
    fim_no_prefix: str | None = None
    """Leave text alone that begins with these words."""
    fim_prefix_token: str = "<fim_prefix>"
    """Token before the prefix."""
    fim_middle_token: str = "<fim_middle>"
    """Token before the middle."""
    fim_suffix_token: str = "<fim_suffix>"
    """Token before the suffix."""
    fim_pad_token: str = "<fim_pad>"
    """Token that fills a sample that has become shorter."""
    fim_eod_token: str = "<|endoftext|>"
    """Token that ends a document."""

    # ---- reading
    num_workers: int = 2
    """Data-loading processes per rank."""
    mmap_bin_files: bool = flag(True, off=("--no-mmap-bin-files",))
    """Map .bin files into memory instead of reading them."""
    num_dataset_builder_threads: int = 1
    """Threads per rank that build data sets."""
    mid_level_dataset_surplus: float = 0.005
    """Extra samples taken of each data set of a blend, as a fraction."""
    dataloader_fast_cache_load: bool = False
    """Trust that index files exist and skip the checks."""
    dataloader_defer_npy_index_mmap: bool = False
    """Map index files on first use."""
    object_storage_cache_path: str | None = None
    """Local folder for index files of data in object storage."""

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
    ) = None
    """Which tokenizer."""
    tokenizer_model: str | None = None
    """Model file, folder or hub name of the tokenizer."""
    vocab_file: str | None = None
    """Vocabulary file of the GPT-2 BPE tokenizer."""
    merge_file: str | None = None
    """Merge file of the GPT-2 BPE tokenizer."""
    vocab_size: int | None = None
    """Vocabulary size before padding, instead of the tokenizer's."""
    padded_vocab_size: int | None = None
    """Vocabulary size after padding, instead of computing it."""
    pad_vocab_size: bool = flag(
        True,
        off=(
            "--no-pad-vocab-size",
            "--disable-pad-vocab-size",
        ),
    )
    """Pad the vocabulary at all."""
    metadata_path: str | None = flag(None, "--tokenizer-metadata")
    """File or folder with the tokenizer's metadata."""
    special_tokens: list[str] | None = flag(None, "--tokenizer-special-tokens")
    """Special tokens to add."""
    tiktoken_pattern: Literal["v1", "v2"] | None = None
    """Pre-tokenisation pattern of tiktoken."""
    tiktoken_num_special_tokens: int = 1000
    """Number of special tokens of tiktoken."""
    tokenizer_sentencepiece_legacy: bool = False
    """SentencePiece's old treatment of special tokens."""
    tokenizer_sentencepiece_ignore_extra_whitespaces: bool = flag(
        True,
        off=(
            "--no-tokenizer-sentencepiece-ignore-extra-whitespaces",
            "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
        ),
    )
    """Let SentencePiece drop repeated blanks."""
    tokenizer_hf_no_use_fast: bool = False
    """Use the slow implementation of a Hugging Face tokenizer."""
    tokenizer_hf_no_include_special_tokens: bool = False
    """Do not add special tokens to texts."""
    trust_remote_code: bool = False
    """Allow a Hugging Face tokenizer to run code from the hub."""
    null_tokenizer_eod_id: int | None = None
    """End-of-document token of the null tokenizer."""
    null_tokenizer_pad_id: int = -1
    """Pad token of the null tokenizer."""
    use_gigatoken: bool = False
    """Use the gigatoken library."""

"""DataArgs: corpora, samples, tokenizer.

A field is a flag: its name is Megatron's destination, its annotation the type and the choices, the string under
it the help text. How a field becomes an option stands in schema.py.
"""

from dataclasses import dataclass
from typing import Literal

from arguments.schema import flag


@dataclass(frozen=True)
class DataArgs:
    """Corpora, samples, tokenizer."""

    # ---- flags
    data_path: list[str] | None = flag(None, nargs="*")
    phase_transition_iterations: str | None = None
    split: str | None = None
    train_data_path: list[str] | None = flag(None, nargs="*")
    valid_data_path: list[str] | None = flag(None, nargs="*")
    test_data_path: list[str] | None = flag(None, nargs="*")
    data_args_path: str | None = None
    per_split_data_args_path: str | None = None
    per_dataset_sequences_path: str | None = None
    dataloader_fast_cache_load: bool = False
    dataloader_defer_npy_index_mmap: bool = False
    data_cache_path: str | None = None
    mmap_bin_files: bool = flag(True, off=("--no-mmap-bin-files",))
    mock_data: bool = False
    seq_length: int | None = None
    num_workers: int = 2
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    dataloader_inter_document_masking: bool = False
    eod_mask_loss: bool = False
    create_attention_mask_in_dataloader: bool = flag(True, off=("--no-create-attention-mask-in-dataloader",))
    num_dataset_builder_threads: int = 1
    object_storage_cache_path: str | None = None
    mid_level_dataset_surplus: float = 0.005
    allow_ambiguous_pad_tokens: bool = False
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    pad_vocab_size: bool = flag(True, off=("--no-pad-vocab-size", "--disable-pad-vocab-size",))
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_type: Literal[
        "BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "SentencePieceTokenizer",
        "GPTSentencePieceTokenizer", "HuggingFaceTokenizer", "Llama2Tokenizer", "TikTokenizer",
        "MultimodalTokenizer", "NullTokenizer", "NullMultimodalTokenizer", "SFTTokenizer",
    ] | None = None
    tokenizer_model: str | None = None
    metadata_path: str | None = flag(None, "--tokenizer-metadata")
    special_tokens: list[str] | None = flag(None, "--tokenizer-special-tokens")
    tiktoken_pattern: Literal["v1", "v2"] | None = None
    tiktoken_num_special_tokens: int = 1000
    tokenizer_sentencepiece_legacy: bool = False
    tokenizer_sentencepiece_ignore_extra_whitespaces: bool = flag(
        True, off=("--no-tokenizer-sentencepiece-ignore-extra-whitespaces", "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces",)
    )
    tokenizer_hf_no_use_fast: bool = False
    tokenizer_hf_no_include_special_tokens: bool = False
    trust_remote_code: bool = False
    null_tokenizer_eod_id: int | None = None
    null_tokenizer_pad_id: int = -1
    use_gigatoken: bool = False

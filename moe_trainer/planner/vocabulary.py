"""How large the vocabulary is, for a plan: as the flags say, or, where a tokenizer would have to be loaded, as its name says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_trainer.shape.vocab import vocab_rows, vocab_rows_from_flags

if TYPE_CHECKING:
    from arguments import Arguments

_BY_NAME = (
    ("deepseek-v3", 129280), ("deepseek-v2", 102400), ("qwen3", 151936), ("qwen2", 151936), ("kimi-k2", 163840), ("moonlight", 163840),
    ("mixtral-8x22b", 32768), ("mixtral", 32000), ("mistral", 32000), ("llama-3", 128256), ("llama3", 128256), ("llama-2", 32000),
)
"""(part of a tokenizer's name, rows of the embedding in the configurations published with it)."""
_BY_TYPE = (("Llama2Tokenizer", 32000), ("GPT2BPETokenizer", 50257))


def planned_vocab_rows(args: Arguments) -> tuple[int | None, str]:
    """Rows of the padded vocabulary, and a note where they follow from a tokenizer's name; None where nothing says it."""
    rows = vocab_rows_from_flags(args)
    if rows is not None:
        return rows, ""
    name = (args.data.tokenizer_model or "").lower()
    size = next((size for part, size in _BY_NAME if part in name), None)
    if size is None:
        size = next((size for kind, size in _BY_TYPE if kind == args.data.tokenizer_type), None)
    if size is None:
        return None, ""
    rows = vocab_rows(args, size)
    said = args.data.tokenizer_model or args.data.tokenizer_type
    return rows, f"vocabulary: {rows:,} rows, taken from the tokenizer's name ({said}); --vocab-size says it exactly"

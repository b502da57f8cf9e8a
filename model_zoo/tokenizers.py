"""Vocabulary sizes of published tokenizers, which the names of their files or repositories tell."""

_SIZES = (
    ("deepseek-v3", 129280),
    ("deepseek-v2", 102400),
    ("qwen3", 151936),
    ("qwen2", 151936),
    ("kimi-k2", 163840),
    ("moonlight", 163840),
    ("mixtral-8x22b", 32768),
    ("mixtral", 32000),
    ("mistral", 32000),
    ("llama-3", 128256),
    ("llama3", 128256),
    ("llama-2", 32000),
)
"""(part of a tokenizer's name, vocabulary size of the configurations published with it)."""


def find_vocab_size(name: str) -> int | None:
    """Return the vocabulary size of a tokenizer by its name or path; None if that does not tell it."""
    return next((size for part, size in _SIZES if part in name.lower()), None)

"""The tokenizer flags of the trainer for scripts that tokenize or read tokens, as argparse options."""

from __future__ import annotations

import argparse
from dataclasses import fields

from arguments.data import DataArgs
from arguments.flag_status import get_flag_status
from arguments.help import field_docs
from arguments.paths import local_prefix
from arguments.schema import make_option

_PADDING = ("padded_vocab_size", "pad_vocab_size")
"""Flags of the model's vocabulary, which token files do not depend on."""


def add_tokenizer_flags(parser: argparse.ArgumentParser, title: str, required: bool) -> argparse._ArgumentGroup:
    """Add a group with the tokenizer flags of DataArgs, and return it.

    Args:
        parser: gets the group.
        title: of the group.
        required: whether there must be a --tokenizer-type.
    """
    group, docs = parser.add_argument_group(title), field_docs("data")
    for field in fields(DataArgs):
        heading, text = docs[field.name]
        acts = get_flag_status(field.name)[0] == "acts"
        if heading != "tokenizer" or field.name in _PADDING or not acts:
            continue
        option = make_option(field, "data")
        if option.takes == 0:
            action = "store_true" if option.on else "store_false"
            help_text = text if option.on else f"Do not {text[0].lower()}{text[1:]}"
            group.add_argument(*option.spellings, dest=field.name, action=action, help=help_text)
            continue
        is_type = field.name == "tokenizer_type"
        group.add_argument(
            *option.on,
            dest=field.name,
            type=local_prefix if option.path == "read" else option.read,
            choices=option.choices,
            nargs=None if option.takes == 1 else option.takes,
            default=option.default,
            required=required and is_type,
            metavar="TYPE" if is_type else None,
            help=f"One of {', '.join(option.choices or ())}." if is_type else text,
        )
    return group


def tokenizer_args(namespace: argparse.Namespace) -> DataArgs:
    """Return the section with the flags that were parsed."""
    names = [field.name for field in fields(DataArgs) if hasattr(namespace, field.name)]
    return DataArgs(**{name: getattr(namespace, name) for name in names})

"""Conversations (--sft), text as samples of different lengths, and samples padded to rows.

The checks follow Megatron-LM's dev branch (commit d48bd6be0a, validate_args and SFTTokenizer).
"""

from collections.abc import Iterator

from arguments.rules.data import SPLIT_PATHS
from arguments.rules.derived_sizes import DerivedSizes, as_list
from arguments.rules.packing import rejected_selections, sequences_flag
from arguments.settings import Limit, Settings, Violation

SFT_TOKENIZER = "SFTTokenizer"
TEMPLATE_FORMATS = ("default", "assistant")
"""Prompt formats of the tokenizer's own chat template."""
PROMPT_FORMATS = ("nemotron-h-aligned", "nemotron-nano-v2", "identity", *TEMPLATE_FORMATS)


def check_one_kind_of_samples(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.use_varlen_dataset and s.sft:
        yield s.violation("{use_varlen_dataset} and {sft} both select the samples: use one.")


def check_conversation_tokenizer(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.sft and not s.mock_data and s.tokenizer_type != SFT_TOKENIZER:
        yield s.violation(
            "{sft} reads conversations, which need {tokenizer_type:flag} {needed}, not {tokenizer_type:value}.",
            needed=SFT_TOKENIZER,
        )


def check_prompt_format(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if s.tokenizer_type != SFT_TOKENIZER:
        return
    if s.sft_tokenizer_prompt_format not in PROMPT_FORMATS:
        yield s.violation("{sft_tokenizer_prompt_format} must be one of {known}.", known=", ".join(PROMPT_FORMATS))
    elif s.chat_template is not None and s.sft_tokenizer_prompt_format not in TEMPLATE_FORMATS:
        yield s.violation(
            "{chat_template:flag} needs {sft_tokenizer_prompt_format:flag} {needed}; "
            "{sft_tokenizer_prompt_format:value} has no template.",
            needed=" or ".join(TEMPLATE_FORMATS),
        )


def limit_text_samples(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    yield Limit(
        bool(
            s.sft and any("://" in word for dest in ("data_path", *SPLIT_PATHS) for word in as_list(getattr(s, dest)))
        ),
        "{sft:flag} reads local files: copy conversations from object storage first.",
        ("sft",),
    )
    for dest, why in (
        ("sft", "streamed rows are text, not conversations"),
        ("varlen_sbhd_validation", "streamed samples are packed"),
    ):
        yield Limit(
            bool(sequences_flag(s) and s.dataloader_type == "external" and getattr(s, dest)),
            f"{{dataloader_type:flag}} external cannot be combined with {{}}: {why}.",
            (dest,),
        )


def limit_padded_rows(s: Settings, _f: DerivedSizes) -> Iterator[Limit]:
    is_padded = s.use_varlen_dataset and s.varlen_sbhd_validation
    for dest, what, is_on, reason in (
        ("cuda_graph_impl", "{}", s.cuda_graph_impl != "none", "a CUDA graph does not know which tokens are padding"),
        ("dsa_indexer_loss_coeff", "{}", bool(s.dsa_indexer_loss_coeff), "the mean of that loss counts padding"),
    ):
        message = f"{what} is not implemented with {{varlen_sbhd_validation:flag}}: {reason}."
        yield Limit(bool(is_padded and is_on), message, (dest,), kind="later")
    yield from rejected_selections(s, is_padded, "{varlen_sbhd_validation:flag}")

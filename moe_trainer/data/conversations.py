"""Rows of text files as texts or conversations, and conversations as token ids with a loss mask.

A row is a JSON object or a row of a table. --use-varlen-dataset takes, by the keys of a row:

* messages: [{"role": ..., "content": ...}, ...];
* conversations: [{"from": ..., "value": ...}, ...] (ShareGPT);
* instruction, prompt, query or question, with output, response, completion or answer, and input or context (Alpaca,
  Dolly);
* text.

--sft takes messages, in which every system message begins another conversation.

Source: Megatron-LM, varlen_dataset.py, sft_dataset.py and sft_tokenizer.py (dev branch, commit d48bd6be0a). There the
columns of a whole file choose the kind of its rows, unknown roles of ShareGPT are users, as here, and labels equal to
the pad token have no loss in --sft, whatever they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from moe_trainer.data.chat_templates import ASSISTANT, ROLES, ChatMessage
from moe_trainer.data.dataset import Sample
from moe_trainer.data.tokenizer_libraries import SFTTokenizer

_QUESTION_KEYS = ("instruction", "prompt", "query", "question")
_ANSWER_KEYS = ("output", "response", "completion", "answer")
_CONTEXT_KEYS = ("input", "context")
_SHAREGPT_ROLES = MappingProxyType(
    {
        **dict.fromkeys(("gpt", "model", "chatgpt", "bing", "bard", ASSISTANT), ASSISTANT),
        **dict.fromkeys(("tool", "function", "observation"), "tool"),
        "system": "system",
    }
)


def read_row(row: Mapping[str, Any]) -> str | list[ChatMessage]:
    """Return the text or the conversation of a row of --use-varlen-dataset; a conversation begins with the system.

    Raises:
        ValueError: saying what is wrong with the row.
    """
    given = _given_keys(row)
    if "messages" in given:
        return _with_system(_read_turns(row["messages"], "messages", "role", "content"))
    if "conversations" in given:
        return _with_system(_read_turns(row["conversations"], "conversations", "from", "value"))
    if _has_other_turns(row):
        context = _first_text(row, _CONTEXT_KEYS)
        question = "\n\n".join([_first_text(row, _QUESTION_KEYS), *([context] if context else [])])
        answer = _first_text(row, _ANSWER_KEYS)
        return _with_system([{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}])
    if "text" in given:
        if not isinstance(row["text"], str):
            raise ValueError(f'the value of "text" must be a text, found {type(row["text"]).__name__}')
        return row["text"]
    raise ValueError(
        'needs "messages", "conversations", "text", or a question and an answer such as "instruction" and "output"; '
        f"found {', '.join(sorted(row)) or 'nothing'}"
    )


def read_conversations(row: Mapping[str, Any]) -> list[list[ChatMessage]]:
    """Return the conversations of a row of --sft.

    Raises:
        ValueError: saying what is wrong with the row.
    """
    if row.get("messages") is None and _has_other_turns(row):
        raise ValueError(
            '"messages" must be a list of turns, found nothing; --use-varlen-dataset in place of --sft reads such rows '
            "(ShareGPT, Alpaca)"
        )
    conversations: list[list[ChatMessage]] = []
    for message in _read_turns(row.get("messages"), "messages", "role", "content"):
        if message["role"] == "system" or not conversations:
            conversations.append([])
        conversations[-1].append(message)
    return conversations


def _given_keys(row: Mapping[str, Any]) -> set[str]:
    return {key for key, value in row.items() if value is not None}


def _has_other_turns(row: Mapping[str, Any]) -> bool:
    """Return whether a row has turns under other keys than messages."""
    given = _given_keys(row)
    return "conversations" in given or bool(given.intersection(_QUESTION_KEYS) and given.intersection(_ANSWER_KEYS))


def _read_turns(value: Any, key: str, role_key: str, content_key: str) -> list[ChatMessage]:
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else "nothing" if value is None else type(value).__name__
        raise ValueError(f'"{key}" must be a list of turns, found {found}')
    turns: list[ChatMessage] = []
    for number, turn in enumerate(value, 1):
        role, content = (turn.get(name) for name in (role_key, content_key)) if isinstance(turn, dict) else (None, None)
        if not isinstance(role, str):
            raise ValueError(f'turn {number} of "{key}" has no "{role_key}"')
        role = role.lower()
        if role_key == "from":
            role = _SHAREGPT_ROLES.get(role, "user")
        if role not in ROLES:
            raise ValueError(f'turn {number} of "{key}" has the role "{role}"; known are {", ".join(ROLES)}')
        if not isinstance(content, str | None):
            raise ValueError(
                f'turn {number} of "{key}": "{content_key}" must be a text, found {type(content).__name__}; images and '
                "other parts are not supported"
            )
        turns.append({"role": role, "content": content or ""})
    return turns


def _with_system(turns: list[ChatMessage]) -> list[ChatMessage]:
    """Begin with an empty system message where there is none."""
    return turns if turns[0]["role"] == "system" else [{"role": "system", "content": ""}, *turns]


def _first_text(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return the first text under these keys that is not empty."""
    for key in keys:
        value = row.get(key)
        if value is not None and not isinstance(value, str):
            raise ValueError(f'the value of "{key}" must be a text, found {type(value).__name__}')
        if value:
            return value
    return ""


def tokenize_conversation(messages: Sequence[ChatMessage], tokenizer: SFTTokenizer) -> Sample:
    """Write a conversation and tokenize it.

    A token is trained if one of its characters is.

    Raises:
        ValueError: for a conversation that teaches nothing, or that the chat template does not take.
    """
    if not tokenizer.format.trains_prompts:
        _check_turns(messages)
    text, trained = tokenizer.format.write(messages)
    ids, offsets = tokenizer.tokenize_with_offsets(text)
    if trained is None:
        return Sample(np.array(ids, dtype=np.int64), None)
    starts, stops = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    starts = np.minimum(starts, stops - 1)  # a token of blanks may have an empty range
    mask = np.zeros(len(ids), dtype=bool)
    for begin, end in trained:
        mask |= (stops > begin) & (starts < end)
    if not mask[1:].any():
        raise ValueError("no token of the conversation would be trained")
    return Sample(np.array(ids, dtype=np.int64), mask)


def _check_turns(messages: Sequence[ChatMessage]) -> None:
    answers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    if not answers:
        raise ValueError("the conversation has no turn of the assistant, so no token would be trained")
    for number in answers:
        if not messages[number]["content"].strip():
            raise ValueError(f"turn {number + 1} of the conversation is of the assistant and empty")
        before = messages[number - 1]["role"] if number else None
        if before not in ("user", "tool"):
            raise ValueError(
                f"turn {number + 1} of the conversation is of the assistant and follows {before or 'nothing'}: it must "
                "answer a user or a tool"
            )

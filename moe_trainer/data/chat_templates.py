"""From a conversation to its text, and which characters of it are trained.

Prompt formats (--sft-tokenizer-prompt-format):

* nemotron-h-aligned, nemotron-nano-v2, identity: written turn by turn; the assistant's turns are trained, without the
  header of a turn where the format has one;
* default: the tokenizer's own Jinja template; every token is trained, as in Megatron-LM;
* assistant: the same text, of which the assistant's turns are trained. Where the template marks them with
  {% generation %}, those marks count. Otherwise a turn is what the text gains by it, after its header.

Templates are rendered by jinja2, which torch requires, with the names and settings that transformers gives them, except
for today's date: text that changes from day to day has no index, and no run could be resumed. template_process.py runs
them under limits.

Source of the formats: Megatron-LM, sft_tokenizer.py (commit d98e8a64).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypedDict

ASSISTANT = "assistant"
ROLES = ("system", "user", "tool", ASSISTANT)
# Unicode has these two characters for internal use; they stand around what a template marks.
_BEGIN, _END = "\ufdd0", "\ufdd1"


class ChatMessage(TypedDict):
    """One turn of a conversation; `role` is one of ROLES."""

    role: str
    content: str


class ChatText(NamedTuple):
    """Text of a conversation.

    Attributes:
        trained: ranges of characters that are trained, ascending; None for all.
    """

    text: str
    trained: tuple[tuple[int, int], ...] | None


class ChatFormat(Protocol):
    """How conversations are written; `trains_prompts` if all tokens are trained."""

    trains_prompts: bool

    def write(self, messages: Sequence[ChatMessage]) -> ChatText:
        """Return the text of a conversation.

        Raises:
            ValueError: saying what the format does not take.
        """
        ...


class _Turn(NamedTuple):
    header: str
    body: str


class TurnFormat:
    """A format whose text is that of the turns, one after another."""

    trains_prompts = False

    def __init__(self, write_turn: Callable[[str, str], _Turn]):
        self._write_turn = write_turn

    def write(self, messages: Sequence[ChatMessage]) -> ChatText:
        text, trained = "", []
        for message in messages:
            header, body = self._write_turn(message["role"], message["content"])
            text += header + body
            if message["role"] == ASSISTANT:
                trained.append((len(text) - len(body), len(text)))
        return ChatText(text, tuple(trained))

    @property
    def special_tokens(self) -> list[str]:
        """Names of the special tokens that the format writes."""
        text = self.write([{"role": role, "content": ""} for role in ROLES]).text
        return sorted(set(re.findall(r"<SPECIAL_\d+>", text)))


def _nemotron_h_aligned(role: str, content: str) -> _Turn:
    content = content.strip()
    if role == "system":
        return _Turn("<SPECIAL_10>System\n", f"{content}\n")
    if role == "user":  # the header of the answer ends the question
        return _Turn("<SPECIAL_11>User\n", f"{content}\n<SPECIAL_11>Assistant\n")
    return _Turn("", f"{content}\n" if role == ASSISTANT else "")


def _nemotron_nano_v2(role: str, content: str) -> _Turn:
    if role == ASSISTANT:
        return _Turn("<SPECIAL_11>Assistant\n", f"{content.strip()}\n<SPECIAL_12>\n")
    headers = {"system": "<SPECIAL_10>System\n", "user": "<SPECIAL_11>User\n"}
    if role not in headers:
        return _Turn("", "")
    return _Turn(headers[role], content.replace("/think", "").replace("/no_think", "").strip() + "\n")


TURN_FORMATS = MappingProxyType(
    {
        # name -> (how a turn is written, pad token)
        "nemotron-h-aligned": (_nemotron_h_aligned, "<SPECIAL_233>"),
        "nemotron-nano-v2": (_nemotron_nano_v2, "<unk>"),
        "identity": (lambda role, content: _Turn("", content), "<unk>"),
    }
)


class TemplateFormat:
    """The format of a Jinja template.

    Args:
        source: the template.
        names: what the template may use besides messages: bos_token, eos_token, ...
        trains_prompts: whether all tokens are trained.

    Raises:
        ValueError: if the template cannot be read, or jinja2 is not installed.
    """

    def __init__(self, source: str, names: Mapping[str, str], trains_prompts: bool):
        self._names: dict[str, Any] = {**names, "tools": None, "documents": None}
        self.trains_prompts = trains_prompts
        self._template = _compile(source)
        self._has_marks = "generation" in source and "endgeneration" in source

    def write(self, messages: Sequence[ChatMessage]) -> ChatText:
        if any(mark in message["content"] for message in messages for mark in (_BEGIN, _END)):
            raise ValueError(
                "a message has U+FDD0 or U+FDD1, which are no characters; trained text is marked with them"
            )
        marked = self._render(messages)
        text, trained = _cut_marks(marked)
        if self.trains_prompts:
            return ChatText(text, None)
        return ChatText(text, trained if self._has_marks else self._find_turns(messages, text))

    def write_prompt(self, messages: Sequence[ChatMessage]) -> str:
        """Return the text of a conversation up to the header of the assistant's next turn. Raises as `write`."""
        return _cut_marks(self._render(messages, add_generation_prompt=True))[0]

    def _find_turns(self, messages: Sequence[ChatMessage], text: str) -> tuple[tuple[int, int], ...]:
        """Return what the text gains by each turn of the assistant, after its header."""
        trained = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._render(messages[:number], add_generation_prompt=True)
            after = self._render(messages[: number + 1])
            if not (text.startswith(after) and after.startswith(before)):
                raise ValueError(
                    f"the chat template does not write turn {number + 1} alike with and without the turns after it, so "
                    "its tokens cannot be found; mark them with {% generation %} (--chat-template)"
                )
            trained.append((len(before), len(after)))
        return tuple(trained)

    def _render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = False) -> str:
        import jinja2

        try:
            return self._template.render(
                self._names | {"messages": messages, "add_generation_prompt": add_generation_prompt}
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template rejects it ({error})") from None
        except MemoryError:
            raise
        except Exception as error:  # a template can do what a program can
            raise ValueError(f"the chat template fails ({type(error).__name__}: {error})") from None


def _cut_marks(marked: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    text, trained = "", []
    first, *others = marked.split(_BEGIN)
    text = first
    for part in others:
        inside, _, after = part.partition(_END)
        trained.append((len(text), len(text) + len(inside)))
        text += inside + after
    return text, tuple(trained)


def _compile(source: str) -> Any:
    try:
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox
    except ImportError:
        raise ValueError("chat templates need the library jinja2: pip install jinja2") from None

    class GenerationTag(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %}: what the assistant says."""

        tags = {"generation"}  # noqa: RUF012 (the name is jinja2's)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            marks = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]).set_lineno(line) for mark in (_BEGIN, _END))
            return [next(marks), *body, next(marks)]

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = fail
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid ({error.message}, line {error.lineno})") from None
    except RecursionError:
        raise ValueError("the chat template is nested too deeply") from None
    except MemoryError:
        raise
    except Exception as error:  # jinja2 computes constant expressions when it compiles
        raise ValueError(f"the chat template is not valid ({type(error).__name__}: {error})") from None

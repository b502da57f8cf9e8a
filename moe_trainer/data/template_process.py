"""A chat template in a separate process, with limits of time and memory.

A template is a program that comes with a tokenizer. jinja2's sandbox keeps it from files and from Python's internals,
not from endless loops, huge texts and huge numbers, not even while it is compiled. The limits are the system's: address
space, and processor time, so that a busy machine changes nothing.

The process speaks JSON, one line for a request and one for its answer. It ends with its input.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_trainer.data.chat_templates import ChatMessage, ChatText, TemplateFormat

_COMMAND = "from moe_trainer.data.template_process import serve; serve()"
_MAX_ERROR = 500  # characters
_ROOT = str(Path(__file__).parents[2])


class TemplateLimits(NamedTuple):
    """What a template may use, far above what those of models do.

    Attributes:
        seconds: of processor time to compile it, and to write a conversation.
        memory: bytes of address space, without those of the empty process.
        characters: of a conversation.
    """

    seconds: int = 20
    memory: int = 2 << 30
    characters: int = 1 << 26


DEFAULT_LIMITS = TemplateLimits()


class LimitedTemplate:
    """The format of a Jinja template (chat_templates.TemplateFormat), computed by another process under limits.

    Args:
        where: the flag and its value, for messages.
        source, names, trains_prompts: see TemplateFormat.

    Raises:
        ValueError: if the template cannot be read, or reaches a limit.
    """

    def __init__(
        self,
        where: str,
        source: str,
        names: Mapping[str, str],
        trains_prompts: bool,
        limits: TemplateLimits = DEFAULT_LIMITS,
    ):
        self.trains_prompts = trains_prompts
        self._where, self._limits, self._begin = where, limits, [source, dict(names), trains_prompts, limits]
        self._lock = threading.Lock()  # the loader's threads share the process
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - not a pipe, which may fill up
        self._owner = 0
        with self._lock:
            self._start()

    def write(self, messages: Sequence[ChatMessage]) -> ChatText:
        """Return the text of a conversation. Raises as TemplateFormat.write, and at a limit."""
        text, trained = self._ask("write", messages)
        return ChatText(text, None if trained is None else tuple((begin, end) for begin, end in trained))

    def write_prompt(self, messages: Sequence[ChatMessage]) -> str:
        """Return the text of a conversation up to the header of the assistant's next turn. Raises as `write`."""
        return self._ask("write_prompt", messages)

    def _ask(self, method: str, messages: Sequence[ChatMessage]) -> Any:
        with self._lock:
            if self._process is None or self._owner != os.getpid():  # it ended, or this process was forked since
                self._start()
            return self._exchange([method, list(messages)])

    def _start(self) -> None:
        path = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            encoding="ascii",
            env={**os.environ, "PYTHONPATH": path},
        )
        self._owner = os.getpid()
        weakref.finalize(self, _end, self._process, self._owner)
        self._exchange(self._begin)

    def _exchange(self, request: list[Any]) -> Any:
        process, self._process = self._process, None  # one whose answer was not awaited is not asked again
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = process.wait()
            ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            self._errors.seek(0)
            last = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2][:_MAX_ERROR]
            problem = (
                f"takes more than {self._limits.seconds} s of processor time"
                if code == -signal.SIGXCPU
                else f"ends its process ({ended})" + (f": {last}" if last else "")
            )
            raise ValueError(f"{self._where}: the chat template {problem}")
        self._process = process
        found = json.loads(answer)
        if "error" in found:
            raise ValueError(f"{self._where}: {found['error']}")
        return found["result"]


def _end(process: subprocess.Popen[str], owner: int) -> None:
    if os.getpid() == owner:  # not in a fork
        process.kill()
        process.wait()


def serve() -> None:
    """Answer the requests on the standard input: the template with its limits, then conversations."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # what the launcher sends to all processes is for the run
    template: TemplateFormat | None = None
    limits = DEFAULT_LIMITS
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if template is None:
                *arguments, given = request
                limits = TemplateLimits(*given)
                _set_limit(resource.RLIMIT_AS, _address_space() + limits.memory)
                _set_limit(resource.RLIMIT_CORE, 0)
                _limit_time(limits)
                template, result = TemplateFormat(*arguments), None
            else:
                method, messages = request
                _limit_time(limits)
                result = getattr(template, method)(messages)
                _check_text(result if isinstance(result, str) else result.text, limits)
            answer = {"result": result}
        except ValueError as error:
            answer = {"error": str(error)}
        except MemoryError:
            answer = {"error": f"the chat template needs more than {limits.memory >> 20} MiB of memory"}
        print(json.dumps(answer), flush=True)


def _address_space() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except OSError:  # only Linux has it
        return 0


def _limit_time(limits: TemplateLimits) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + limits.seconds)


def _set_limit(kind: int, value: int) -> None:
    most = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def _check_text(text: str, limits: TemplateLimits) -> None:
    if len(text) > limits.characters:
        raise ValueError(f"the chat template writes {len(text)} characters; at most {limits.characters} are allowed")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the chat template writes U+{ord(text[error.start]):04X}, half of a surrogate pair, which is no character"
        ) from None

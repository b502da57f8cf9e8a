"""EleutherAI's evaluation harness (lm-eval) on a model of this program. The only file that imports the library.

`TrainedModel` implements its model interface on our forward passes; tasks, few-shot prompts, metrics and standard
errors are the harness's own. It is given to the harness as one model on every rank: all ranks prepare the same
requests, and scoring.py shares them. Its own data parallelism would not know of the other groups.

Tokens are split, cut off and stopped as the harness's `hf` model does, so that figures can be compared.
"""

from __future__ import annotations

import difflib
import io
import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.tasks.manager import TaskDict
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table

from moe_trainer.errors import UserError
from moe_trainer.evaluation.options import TaskOptions
from moe_trainer.evaluation.routing import RoutingCounter
from moe_trainer.evaluation.scoring import Scorer
from moe_trainer.inference.generator import GenerationOptions, Generator
from moe_trainer.inference.text import TextCodec

DEFAULT_NEW_TOKENS = 256  # of the harness's hf model
_SEED = 1234  # of the harness's few-shot sampling
_NUM_NEAR_NAMES = 4
_DATA_HINT = (
    " (data come from files of this machine, with dataset_path: json and data_files, or from the cache of Hugging Face "
    "data sets)"
)

logger = logging.getLogger(__name__)


class TrainedModel(TemplateLM):
    """The harness's interface to a model.

    Args:
        scorer, generator: of the model.
        codec: of its tokenizer.
        counter: counts the tokens of experts by task.
    """

    def __init__(
        self,
        scorer: Scorer,
        generator: Generator,
        codec: TextCodec,
        counter: RoutingCounter | None = None,
    ):
        super().__init__()
        self._scorer, self._generator, self._codec, self._counter = scorer, generator, codec, counter
        self.max_length = scorer.max_length

    @property
    def eot_token_id(self) -> int:
        return self._codec.eos

    @property
    def tokenizer_name(self) -> str:
        return "of the checkpoint"  # a key of the harness's cache of requests, which is not used

    @property
    def prefix_token_id(self) -> int:
        return self._codec.prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._codec.encode(string, add_special_tokens)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return self._by_task(requests, lambda part: super(TrainedModel, self).loglikelihood(part, disable_tqdm=True))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        return self._by_task(requests, self._rolling)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        return self._by_task(requests, self._generate)

    def _by_task(self, requests: list[Instance], run: Callable[[list[Instance]], list]) -> list:
        """Run the requests of one task after the other, so that routing is counted for each."""
        answers: list = []
        for name, group in groupby(requests, key=lambda request: request.task_name):
            part = list(group)
            logger.info("task %s: %s requests (%s)", name, f"{len(part):,}", part[0].request_type)
            with nullcontext() if self._counter is None else self._counter.counting(name or ""):
                answers += run(part)
        return answers

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        # too long: the beginning is cut off, as in the hf model
        sequences = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in requests]
        scored = [min(len(continuation), self.max_length) for _, _, continuation in requests]
        return self._scorer.log_probabilities(sequences, scored)

    def _rolling(self, requests: list[Instance]) -> list[float]:
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(
                token_list=tokens, prefix_token=self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for context, continuation in map(make_disjoint_window, rolling):
                windows.append((None, context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (log_prob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):  # type: ignore[arg-type]
            totals[number] += log_prob
        return totals

    def _generate(self, requests: list[Instance]) -> list[str]:
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        for numbers in groups.values():
            settings = requests[numbers[0]].args[1]
            texts = self._generate_alike([requests[number].args[0] for number in numbers], settings)
            for number, text in zip(numbers, texts, strict=True):
                answers[number] = text
        return answers

    def _generate_alike(self, contexts: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
        """Continue texts with the same settings."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings), DEFAULT_NEW_TOKENS))
        if options.get("do_sample"):
            raise UserError(f"the task samples its answers ({dict(settings)}); only greedy decoding is implemented")
        stops = handle_stop_sequences(options["until"], eos=None)
        max_tokens, eos, decode = options["max_gen_toks"], self._codec.eos, self._codec.decode
        max_context = self.max_length - max_tokens
        if max_context <= 0:
            raise UserError(
                f"the task asks for answers of {max_tokens} tokens (max_gen_toks), the model has {self.max_length} "
                "positions"
            )

        def is_finished(tokens: Sequence[int]) -> bool:
            return tokens[-1] == eos or any(stop in decode(tokens) for stop in stops if stop)

        prompts = [self.tok_encode(context)[-max_context:] or [self.prefix_token_id] for context in contexts]
        written = self._generator.generate(prompts, GenerationOptions(max_tokens, is_finished))
        return [postprocess_generated_text(decode(_until(tokens, eos)), stops, None) for tokens in written]


class ChatModel(TrainedModel):
    """The interface to a model with a chat template; `write_prompt` makes text of a conversation up to the answer."""

    def __init__(self, write_prompt: Callable[[Sequence[Any]], str], *parts: Any):
        super().__init__(*parts)
        self._write_prompt = write_prompt

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not add_generation_prompt:
            raise UserError("the task begins the answers (gen_prefix), which is not implemented with a chat template")
        return self._write_prompt(chat_history)


def _until(tokens: Sequence[int], end: int) -> Sequence[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens


@dataclass(frozen=True)
class TaskRunner:
    """Tasks that were loaded, to be run on a model as often as wanted."""

    options: TaskOptions
    loaded: TaskDict = field(repr=False)

    def run(self, model: TrainedModel) -> dict[str, Any]:
        """Run the tasks and return the harness's results. Collective.

        The random generators of the process are left as they were, and every run has the same prompts.

        Raises:
            UserError: if a task is wrong, or cannot be run with this model.
        """
        # one bar for every task on every rank
        with _name_task_errors(self.options.tasks), unchanged_random_state(), redirect_stderr(_WithoutBars(sys.stderr)):
            for task in self.loaded["tasks"].values():
                task.set_fewshot_seed(_SEED)
            return evaluate(
                model,
                self.loaded,
                limit=self.options.limit,
                bootstrap_iters=self.options.bootstrap_iters,
                log_samples=False,
                confirm_run_unsafe_code=self.options.runs_code,
                apply_chat_template=self.options.uses_chat_template,
                fewshot_as_multiturn=self.options.uses_chat_template,
            )


def find_tasks(options: TaskOptions) -> TaskRunner:
    """Find the tasks in the user's folder, else among those of the harness, and load their data.

    Raises:
        UserError: for an unknown task, with names like it, a folder or file that is missing, and tasks that run code.
    """
    if not options.tasks:
        raise UserError("no task is named")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every default of a task file
    folder = options.include_path
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"{folder}: no such folder; it should hold the YAML files of tasks")
    manager = None
    if folder is not None:  # the harness's own list takes seconds to read
        manager = _make_manager(folder, with_own=False)
    if manager is None or any(name not in manager.task_index for name in options.tasks):
        manager = _make_manager(folder, with_own=True)
    _check_names(options.tasks, list(manager.task_index), folder)
    loaded: TaskDict = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in options.tasks:
        with _name_task_errors([name], _DATA_HINT), unchanged_random_state():
            found = manager.load([name])
        num_fewshot = options.get_num_fewshot(name)
        for task in found["tasks"].values():
            if getattr(task, "UNSAFE_CODE", False) and not options.runs_code:
                raise UserError(
                    f"task {name} runs code that the model writes; where that is safe, evaluate.py "
                    "--confirm-run-unsafe-code (with HF_ALLOW_CODE_EVAL=1) allows it"
                )
            default = task.get_config("num_fewshot")
            if default is None or (default != 0 and num_fewshot is not None):  # 0 in a task file is not to be changed
                task.set_config(key="num_fewshot", value=num_fewshot or 0)
        for part in loaded:
            loaded[part].update(found[part])  # type: ignore[literal-required]
    return TaskRunner(options, loaded)


def _check_names(names: Sequence[str], known: Sequence[str], folder: str | None) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, _NUM_NEAR_NAMES)
            hints = [f"names like it: {', '.join(near)}"] if near else []
            hints += [] if folder is None else _unreadable_files(Path(folder))
            text = "; ".join(["lm-eval has none of this name, nor has your folder of tasks", *hints])
            raise UserError(f"task {name}: {text}")


def _unreadable_files(folder: Path) -> Iterator[str]:
    """Yield why task files cannot be read, which the harness leaves out of its list."""
    for path in sorted(folder.rglob("*.yaml")):
        try:
            if not isinstance(yaml.compose(path.read_bytes()), yaml.MappingNode):  # leaves out the harness's own tags
                yield f"{path} has no table of settings"
        except (OSError, yaml.YAMLError) as error:
            yield f"{path} cannot be read ({' '.join(str(error).split())})"


@contextmanager
def _name_task_errors(names: Sequence[str], hint: str = "") -> Iterator[None]:
    """Turn an error of the harness, its libraries or a task file into a UserError; RuntimeError is of the model."""
    try:
        yield
    except (UserError, RuntimeError):
        raise
    except Exception as error:  # task files are programs
        missing = "its data have no rows" if isinstance(error, StopIteration) else "no reason given"
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), missing)
        raise UserError(f"task {', '.join(names)}: {type(error).__name__}: {reason}{hint}") from error


def _make_manager(folder: str | None, with_own: bool) -> TaskManager:
    try:
        return TaskManager(include_path=folder, include_defaults=with_own)
    except Exception as error:  # a YAML file that cannot be read
        raise UserError(f"{folder}: {str(error).strip().splitlines()[0]}") from error


def results_table(results: Mapping[str, Any]) -> str:
    """Return the harness's table of results."""
    groups = f"\n{make_table(results, 'groups')}" if results.get("groups") else ""
    return f"{make_table(results)}{groups}"


class _WithoutBars(io.TextIOBase):
    """Passes text on to a stream, but not that of progress bars, which begins with a carriage return."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text; an empty line ends a bar."""
        if not text.startswith("\r") and text.strip():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Restore the process's random generators: the harness seeds all of them."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)

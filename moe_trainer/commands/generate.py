"""Continue prompts with a checkpoint or a Hugging Face folder, under any mapping, with a KV cache.

    python scripts/generate.py CHECKPOINT "Once upon a time" "The sea"
    python scripts/generate.py HF_FOLDER --prompts-file prompts.jsonl --output texts.jsonl --temperature 0.8 --top-p 0.9
    torchrun --nproc-per-node 8 scripts/generate.py CHECKPOINT "Once" --expert-model-parallel-size 8

Prompts follow the model, before all options. A file has one prompt per line; in .jsonl a line is a string, or an object
with "prompt" or (with --apply-chat-template) "messages". All other flags are the trainer's: mapping, precision,
--ckpt-step, tokenizer. Without a temperature the most probable token is taken. See docs/generation.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from arguments.paths import local_path
from arguments.program import program_name
from moe_trainer.commands import rank_program
from moe_trainer.commands.command_parser import make_command_parser
from moe_trainer.exit_codes import ExitCode
from moe_trainer.io import cannot_write

Prompt = str | list[dict[str, str]]
"""A text, or a conversation."""


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of this script's own options; all other words are flags of the trainer."""
    parser = make_command_parser(
        "generate",
        __doc__,
        usage=f"{program_name('generate')} CHECKPOINT|HF_FOLDER [PROMPT ...] [options] [FLAGS]",
        epilog="exit codes: 0 done, 2 the model, a prompt or an option is wrong",
    )
    add = parser.add_argument
    add("--prompts-file", type=local_path, metavar="FILE", help="more prompts, one per line (.jsonl: JSON)")
    add(
        "--output",
        type=local_path,
        metavar="FILE",
        help="write prompts, texts and tokens as JSON Lines, instead of text",
    )
    text = "largest number of new tokens of a text (default: %(default)s)"
    add("--max-new-tokens", type=int, default=64, metavar="N", help=text)
    text = "draw tokens by their probability at this temperature (default: 0, the most probable token)"
    add("--temperature", type=float, default=0.0, metavar="T", help=text)
    add("--top-k", type=int, default=0, metavar="N", help="draw from the N most probable tokens only")
    text = "draw from the most probable tokens only that together have this probability"
    add("--top-p", type=float, default=1.0, metavar="P", help=text)
    text = "seed of the draws; each text has its own sequence of them (default: %(default)s)"
    add("--sampling-seed", type=int, default=0, metavar="N", help=text)
    add("--samples-per-prompt", type=int, default=1, metavar="N", help="texts for each prompt (default: %(default)s)")
    add("--stop", nargs="+", default=[], metavar="TEXT", help="end a text before one of these")
    text = "prompts are conversations, or the user's turn of one; written by the chat template of the tokenizer"
    add("--apply-chat-template", action="store_true", help=text)
    add("--batch-size", type=int, default=8, metavar="N", help="texts of a batch on each rank (default: %(default)s)")
    return parser


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    source: str
    prompts: list[Prompt]
    options: argparse.Namespace
    flags: list[str]


def main(words: list[str]) -> int:
    """Run the program. Returns the exit code."""
    parser = make_parser()
    if not words:
        parser.print_help()
        return ExitCode.USER_ERROR
    return rank_program.run(program_name("generate"), lambda: _generate(_parse(parser, words)))


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> Request:
    """Split model and prompts, this script's options, and the trainer's flags."""
    count = next((number for number, word in enumerate(words) if word.startswith("-")), len(words))
    options, flags = parser.parse_known_args(words[count:])
    problems = []
    if count == 0:
        problems.append("the checkpoint directory or Hugging Face folder comes first")
    prompts: list[Prompt] = [*words[1:count]]
    if options.prompts_file is not None:
        prompts += read_prompts(options.prompts_file, options.apply_chat_template)
    if count and not words[0]:
        problems.append("the checkpoint directory or Hugging Face folder is an empty text (an unset variable?)")
    if count and not prompts:
        problems.append("no prompt: give texts after the model, or --prompts-file FILE")
    for name in ("max_new_tokens", "samples_per_prompt", "batch_size"):
        if getattr(options, name) < 1:
            problems.append(f"--{name.replace('_', '-')} {getattr(options, name)} must be above 0")
    if options.samples_per_prompt > 1 and not options.temperature:
        problems.append("--samples-per-prompt needs a --temperature above 0: without one all texts are the same")
    if options.sampling_seed and not options.temperature:
        problems.append("--sampling-seed needs a --temperature above 0: without one nothing is drawn")
    if "" in options.stop:
        problems.append("--stop: a text must not be empty")
    if options.output is not None and cannot_write(options.output):
        problems.append(f"--output {options.output}: the file cannot be written")
    if problems:
        parser.error("; ".join(problems))
    return Request(words[0], prompts, options, flags)


def read_prompts(path: Path, has_conversations: bool) -> list[Prompt]:
    """Read a file of prompts.

    Raises:
        ValueError: if it cannot be read, or a line is wrong; the message has its number.
    """
    try:
        # splitlines would also split at characters that JSON and texts may contain (U+2028, form feed)
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ValueError(f"--prompts-file {path}: the file cannot be read ({reason})") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            prompts.append(line)
            continue
        where = f"--prompts-file {path}, line {number}"
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON ({getattr(error, 'msg', 'nested too deeply')})") from error
        prompts.append(_prompt(value, where, has_conversations))
    return prompts


def _prompt(value: Any, where: str, has_conversations: bool) -> Prompt:
    """Return the prompt of a JSON line."""
    if isinstance(value, dict) and "messages" in value:
        turns = value["messages"]
        is_valid = isinstance(turns, list) and all(
            isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
            for turn in turns
        )
        if not is_valid or not turns:
            raise ValueError(f'{where}: "messages" must be a list of objects with "role" and "content"')
        if not has_conversations:
            raise ValueError(f'{where}: "messages" needs --apply-chat-template')
        return turns
    text = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError(f'{where}: a line must be a string, or an object with "prompt" or "messages"')
    return text


def _generate(request: Request) -> int:
    from moe_trainer.errors import require_packages

    require_packages("torch", "numpy", "safetensors")
    from moe_trainer.inference.sampling import SamplingOptions

    options = request.options
    if not Path(request.source).is_dir():
        raise ValueError(f"{request.source}: no such checkpoint directory or Hugging Face folder")
    sampling = SamplingOptions(options.temperature, options.top_k, options.top_p, options.sampling_seed)

    from moe_trainer.inference.completion import complete, encode_prompts
    from moe_trainer.inference.generator import Generator
    from moe_trainer.inference.text import TextCodec
    from moe_trainer.parallel.state import close_groups
    from moe_trainer.training.inference import as_model, load_for_inference, open_chat_template

    with redirect_stdout(sys.stderr):  # stdout has the texts only
        loaded = load_for_inference(request.source, request.flags)
    run, codec, prompts = loaded.run, TextCodec(loaded.tokenizer), request.prompts
    if options.apply_chat_template:
        template = open_chat_template(run)
        prompts = [
            template.write_prompt([{"role": "user", "content": each}] if isinstance(each, str) else cast(Any, each))
            for each in prompts
        ]
    texts = [str(each) for each in prompts for _ in range(options.samples_per_prompt)]
    model = as_model(run)
    tokens = encode_prompts(codec, texts, options.max_new_tokens, model.max_length)
    generator = Generator(model, options.batch_size, loaded.tokenizer.vocab_size)
    started = time.perf_counter()
    found = complete(generator, codec, tokens, options.max_new_tokens, sampling, options.stop)
    elapsed = time.perf_counter() - started
    if run.ps.world.rank == 0:
        _write(options.output, texts, found)
        count = sum(len(each.tokens) for each in found)
        note = f"{len(found):,} texts, {count:,} new tokens in {elapsed:.1f} s ({count / elapsed:,.1f} tokens/s)"
        print(f"{program_name('generate')}: {note}", file=sys.stderr, flush=True)
    close_groups(run.ps)
    return ExitCode.OK


def _write(output: Path | None, prompts: Sequence[str], found: Sequence[Any]) -> None:
    """Print the texts, or write them to a file."""
    from moe_trainer.errors import name_write_errors
    from moe_trainer.io import atomic_write

    if output is None:
        try:
            print("\n\n".join(f"{prompt}{each.text}" for prompt, each in zip(prompts, found, strict=True)), flush=True)
        except BrokenPipeError:  # ... | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    with name_write_errors("--output", output), atomic_write(output) as file:
        for prompt, each in zip(prompts, found, strict=True):
            record = {"prompt": prompt, "text": each.text, "finish_reason": each.finish_reason, "tokens": each.tokens}
            file.write(f"{json.dumps(record, ensure_ascii=False)}\n")

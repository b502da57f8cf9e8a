"""Evaluate a model on benchmark tasks with EleutherAI's harness (pip install lm-eval), under any mapping.

    python scripts/evaluate.py CHECKPOINT --tasks hellaswag,arc_easy --output results.json
    python scripts/evaluate.py HF_FOLDER --tasks my_task --include-path FOLDER        task files of your own (YAML)
    torchrun --nproc-per-node 8 scripts/evaluate.py CHECKPOINT --tasks gsm8k --expert-model-parallel-size 8
    python scripts/evaluate.py --table A.json B.json                                  one Markdown table of results

--tasks also takes names for the tasks of a paper, whose table --table prints. All other flags are the trainer's:
mapping, precision, --ckpt-step, tokenizer. Tasks are read from this machine only (local files, or the cache of Hugging
Face data sets); HF_HUB_OFFLINE=0 HF_DATASETS_OFFLINE=0 allow downloads. Perplexity of token files, per token and per
byte, of each file separately: `pretrain_moe.py --skip-train` (docs/evaluation.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from arguments.paths import local_path, local_prefix
from arguments.program import command_line, program_name
from moe_trainer.commands import rank_program
from moe_trainer.commands.command_parser import make_command_parser
from moe_trainer.evaluation.task_groups import GROUPS, expand_tasks, results_table
from moe_trainer.exit_codes import ExitCode
from moe_trainer.io import cannot_write


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of this script's own options; all other words are flags of the trainer."""
    name = program_name("evaluate")
    parser = make_command_parser(
        "evaluate",
        __doc__,
        usage=f"{name} CHECKPOINT|HF_FOLDER --tasks NAMES [options] [FLAGS]\n       {name} --table FILE...",
        epilog="exit codes: 0 done, 2 the model, the tasks or an option is wrong",
    )
    add = parser.add_argument
    papers = "".join(f"; {group.name}: {group.what}" for group in GROUPS)
    add("--tasks", metavar="NAMES", help=f"tasks and groups of lm-eval, separated by commas{papers}")
    add("--include-path", type=local_prefix, metavar="FOLDER", help="folder with your own task files (YAML)")
    text = "examples before each question (default: what the task says)"
    add("--num-fewshot", type=int, metavar="N", help=text)
    add("--limit", type=int, metavar="N", help="only the first N questions of each task, to try it")
    add("--batch-size", type=int, default=8, metavar="N", help="texts of a batch on each rank (default: %(default)s)")
    text = "write prompts as conversations, by the chat template of the tokenizer's folder"
    add("--apply-chat-template", action="store_true", help=text)
    text = "run tasks that execute code which the model writes"
    add("--confirm-run-unsafe-code", action="store_true", help=text)
    add("--output", type=local_path, metavar="FILE", help="write figures and routing statistics as JSON")
    add("--report-html", type=local_path, metavar="FILE", help="write a page with the figures and maps of the experts")
    add(
        "--table",
        type=local_path,
        nargs="+",
        metavar="FILE",
        help="print a Markdown table of results that were written",
    )
    return parser


def main(words: list[str]) -> int:
    """Run the program. Returns the exit code."""
    parser = make_parser()
    if not words:
        parser.print_help()
        return ExitCode.USER_ERROR
    options, flags = _parse(parser, words)
    return rank_program.run(
        program_name("evaluate"), lambda: _print_table(options.table) if options.table else _evaluate(options, flags)
    )


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split this script's own options from the trainer's flags; the first word is the model."""
    source = "" if words[0].startswith("-") else words[0]
    options, flags = parser.parse_known_args(words[1:] if source else words)
    problems = []
    if options.table is not None:
        unused = [
            name for name, value in vars(options).items() if name != "table" and value != parser.get_default(name)
        ]
        if source or flags or unused:
            problems.append(
                "--table prints results that were written; it takes no model, tasks or flags, and no options"
            )
    elif not source:
        problems.append("the checkpoint directory or Hugging Face folder comes first")
    elif not options.tasks:
        problems.append("--tasks NAMES is missing")
    for name in ("limit", "batch_size"):
        if (value := getattr(options, name)) is not None and value < 1:
            problems.append(f"--{name.replace('_', '-')} {value} must be above 0")
    if options.num_fewshot is not None and options.num_fewshot < 0:
        problems.append(f"--num-fewshot {options.num_fewshot} must not be below 0")
    for name in ("output", "report_html"):
        path = getattr(options, name)
        if path is not None and cannot_write(path):
            problems.append(f"--{name.replace('_', '-')} {path}: the file cannot be written")
    if problems:
        parser.error("; ".join(problems))
    options.source = source
    return options, flags


def _print_table(files: list[Path]) -> int:
    print(results_table(files))
    return ExitCode.OK


def _evaluate(options: argparse.Namespace, flags: list[str]) -> int:
    from moe_trainer.errors import name_write_errors, require_packages

    require_packages("torch", "numpy", "safetensors")
    from moe_trainer.evaluation.harness import open_harness
    from moe_trainer.evaluation.options import TaskOptions, split_names
    from moe_trainer.io import atomic_write

    if not Path(options.source).is_dir():  # reading the tasks takes longer
        raise ValueError(f"{options.source}: no such checkpoint directory or Hugging Face folder")
    tasks, num_fewshot = expand_tasks(split_names([options.tasks]), options.num_fewshot)
    task_options = TaskOptions(
        tasks,
        options.include_path,
        num_fewshot,
        options.limit,
        runs_code=options.confirm_run_unsafe_code,
        uses_chat_template=options.apply_chat_template,
    )
    harness = open_harness()
    runner = harness.find_tasks(task_options)  # before a large model is loaded

    from moe_trainer.drawing.report_page import write_report
    from moe_trainer.evaluation.routing import RoutingCounter, routing_figures, routing_table
    from moe_trainer.parallel.state import close_groups
    from moe_trainer.training.evaluate_tasks import bind_tasks, run_tasks
    from moe_trainer.training.inference import load_for_inference

    loaded = load_for_inference(options.source, flags)
    run = loaded.run
    counter = RoutingCounter(run.chunks, run.ps)
    results = run_tasks(run, bind_tasks(run, loaded.tokenizer, runner, options.batch_size, counter))
    routing = counter.gather()
    if run.ps.world.rank == 0:
        title = f"{options.source}, iteration {loaded.state.iteration}"
        lines = [title, harness.results_table(results), *([routing_table(routing)] if routing else [])]
        print("\n".join(lines))
        if options.output is not None:
            content = {"model": options.source, "iteration": loaded.state.iteration, **results, "routing": routing}
            with name_write_errors("--output", options.output), atomic_write(options.output) as file:
                json.dump(content, file, indent=1, default=str)
                file.write("\n")
        if options.report_html is not None:
            command = command_line("evaluate", sys.argv[1:])
            write_report(options.report_html, f"Tasks: {title}", command, list(routing_figures(routing)), lines)
    close_groups(run.ps)
    return ExitCode.OK

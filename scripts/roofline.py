#!/usr/bin/env python3
"""The time of a training step from the operators that it launches: every one at the limit of the device that it meets. No GPU.

    python scripts/roofline.py FLAGS --world-size N --hardware H        one command line
    python scripts/roofline.py models [--write]                         seven models of the zoo on H100 and GB200; --write: as
                                                                        scripts/bench_results/roofline.md

FLAGS are the trainer's, with or without --preset NAME; H as for scripts/plan.py (h100). One rank of every kind of pipeline stage is executed on the
emulated CUDA device of tests/emulated_cuda (it needs g++ and torch's headers), with the shapes of the real run and without arithmetic. --report FILE
writes everything as JSON. docs/planning.md explains what is printed.
Exit code: 0; 2 where the flags allow no plan, or the device cannot be built.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arguments import ArgumentError
from moe_trainer.exit_codes import ExitCode
from moe_trainer.planner.dry_run import plan_of_flags
from moe_trainer.planner.plan import Plan
from moe_trainer.planner.published import ROWS
from moe_trainer.planner.roofline import (
    ENOUGH,
    Roofline,
    make_roofline,
    rank_of_stage,
    stages_to_execute,
)
from moe_trainer.planner.roofline_text import roofline_json, roofline_lines, table_lines

DEVICE = ROOT / "tests" / "emulated_cuda"
RECORD = ROOT / "scripts" / "bench_results" / "roofline.md"
NEXT = ("--preset qwen3_next_80b_a3b --mock-data --seq-length 4096 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3 "
        "--expert-model-parallel-size 32 --micro-batch-size 1 --global-batch-size 256 --recompute-granularity selective "
        "--recompute-modules moe_act shared_experts layernorm").split()
PUBLISHED = ("Mixtral-8x22B 128xH100 BF16", "Qwen2-57B 64xH100 BF16", "Moonlight-16B 8xH100 BF16", "Qwen3-30B 16xH100 BF16", "Qwen3-235B 256xH100 BF16",
             "DeepSeek-V3 1024xH100 FP8")
ON_GB200 = ("Qwen3-235B 256xGB200 BF16", "DeepSeek-V3 256xGB200 BF16")
OF_NAME = {row.name: row for row in ROWS}
MODELS = (
    *((OF_NAME[name].model, "h100", OF_NAME[name].gpus, OF_NAME[name].argv()) for name in PUBLISHED),
    ("qwen3_next_80b_a3b", "h100", 128, NEXT),
    *((OF_NAME[name].model, "gb200", OF_NAME[name].gpus, OF_NAME[name].argv()) for name in (*PUBLISHED[:4], *ON_GB200)),
    ("qwen3_next_80b_a3b", "gb200", 128, NEXT),
)
"""Preset, hardware, GPUs and flags: of published runs where there is one on that hardware; on GB200 else those of H100. Qwen3-Next: of the public zoo."""
PROCESSES = 2
"""Stages that are executed at a time."""


class CannotExecute(Exception):
    """Why there is no recording."""


def main(words: list[str]) -> int:
    """Run the program. Returns the exit code."""
    if not words or {"--help", "-h"} & set(words):
        print(__doc__.strip())
        return ExitCode.OK if words else ExitCode.USER_ERROR
    try:
        if words[0] == "models":
            return models(words[1:])
        plan, roofline = roofline_of(words)
        print("\n".join(roofline_lines(plan, roofline)))
        if plan.args.output.report is not None:
            write_report(plan.args.output.report, plan, roofline)
    except CannotExecute as error:
        print(f"roofline.py: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except KeyboardInterrupt:
        return 130
    return ExitCode.OK


def models(words: Sequence[str]) -> int:
    """The table of the zoo's models. Raises: CannotExecute."""
    if set(words) - {"--write"}:
        raise CannotExecute(f"models {' '.join(words)}: there is --write, and nothing else")
    rows, known = [], {}
    for name, hardware, gpus, flags in MODELS:
        words_of = [*flags, "--world-size", str(gpus), "--hardware", hardware]
        print(f"{name} on {gpus} {hardware}: {' '.join(flags)}", file=sys.stderr)
        rows.append((name, *roofline_of(words_of, known)))
    commit = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True).stdout.strip()
    lines = table_lines(rows, commit or "unknown")
    print("\n".join(lines))
    if "--write" in words:
        RECORD.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ExitCode.OK


def write_report(path: str, plan: Plan, roofline: Roofline) -> None:
    """Raises: CannotExecute."""
    try:
        Path(path).write_text(json.dumps(roofline_json(plan, roofline), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CannotExecute(f"--report {path}: the file cannot be written ({error.strerror})") from None


def roofline_of(flags: Sequence[str], known: dict[tuple, dict] | None = None) -> tuple[Plan, Roofline]:
    """Plan a command line and execute it. known: recordings, which are looked up and added; in bf16 those of all hardware are the same.

    Raises: CannotExecute.
    """
    try:
        plan = plan_of_flags(list(flags))
    except ArgumentError as error:
        raise CannotExecute(f"no estimate, since the trainer rejects this: {error}") from None
    except ValueError as error:
        raise CannotExecute(str(error)) from None
    report = plan.args.output.report
    if report is not None and (Path(report).is_dir() or not Path(report).absolute().parent.is_dir()):
        raise CannotExecute(f"--report {report}: the file cannot be written (its folder is missing, or it is one)")
    if plan.hardware.synchronous:
        raise CannotExecute(f"--hardware {plan.hardware.name}: what is executed are CUDA devices' operators; name one of these")
    if plan.args.keeps_weights:
        raise CannotExecute("a roofline is of training steps, and these flags update no weights (--skip-train, --freeze-all-layers, --train-iters 0)")
    known = {} if known is None else known
    key = (plan.width != "bf16" and plan.hardware.name, *(word for word in flags if word != plan.hardware.name))
    if key not in known:
        known[key] = execute(plan, flags)
    return plan, make_roofline(plan, known[key])


def execute(plan: Plan, flags: Sequence[str]) -> dict[int, dict[str, list]]:
    """Record one rank of every kind of stage. Raises: CannotExecute."""
    microbatches = min(ENOUGH, plan.num_microbatches)
    env = environment("10.0" if plan.hardware.is_blackwell else "9.0")

    def run(stage: int, path: Path) -> dict[str, list]:
        rank = rank_of_stage(plan.args, plan.world_size, stage)
        command = [sys.executable, str(DEVICE / "record_step.py"), str(path), str(rank), str(plan.world_size), str(microbatches), *flags]
        done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise CannotExecute(f"the step of pipeline stage {stage} cannot be executed on the emulated device: {reason}")
        return json.loads(path.read_text(encoding="utf-8"))

    stages = stages_to_execute(plan.args)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(PROCESSES) as pool:
        return dict(zip(stages, pool.map(run, stages, [Path(folder, f"{stage}.json") for stage in stages])))


def environment(capability: str) -> dict[str, str]:
    """What a process needs to have the emulated device. Raises: CannotExecute where it cannot be built."""
    if not (DEVICE / "record_step.py").is_file():
        raise CannotExecute(f"{DEVICE} is missing: the emulated device is part of the source tree, and this is none")
    sys.path.insert(0, str(DEVICE.parent))
    try:
        from emulated_cuda import build
    except ImportError as error:
        raise CannotExecute(f"the emulated device needs torch ({error})") from None
    try:
        return build.environment(1) | {"EMULATED_CUDA_CAPABILITY": capability}
    except build.CannotBuild as error:
        raise CannotExecute(str(error)) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

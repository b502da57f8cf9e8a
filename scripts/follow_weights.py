#!/usr/bin/env python3
"""Load the weights that a training run streams, as an inference engine would, and answer with them.

    python pretrain_moe.py ... --stream-weights-to weights --stream-weights-interval 10 &
    python scripts/follow_weights.py weights --tokens 5 17 4 --until 100

An example of the client side of --stream-weights-to: it waits for every new snapshot, loads it with transformers and
prints the most probable next tokens after some token ids. An engine would generate samples here and record the experts
of every token for --moe-routing-replay-path. See docs/reinforcement_learning.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments.paths import local_path
from moe_trainer.errors import UserError, require_packages
from moe_trainer.exit_codes import ExitCode

_POLL_S = 0.2


def follow(folder: Path, timeout_s: float, after: int = -1) -> Iterator[tuple[int, Any]]:
    """Yield (iteration, transformers model) of every snapshot that is found, newest first; some may be skipped.

    Raises:
        UserError: if no new snapshot comes within the timeout.
    """
    import transformers

    deadline, name = time.monotonic() + timeout_s, None
    while True:
        try:
            latest = json.loads((folder / "latest.json").read_text())
        except FileNotFoundError:
            latest = None
        if latest is not None and latest["folder"] != name and latest["iteration"] > after:
            try:
                model = transformers.AutoModelForCausalLM.from_pretrained(folder / latest["folder"])
            except OSError:
                if (folder / latest["folder"]).is_dir():
                    raise
                continue  # the run has replaced it meanwhile
            name = latest["folder"]
            yield latest["iteration"], model.eval()
            deadline = time.monotonic() + timeout_s
        elif time.monotonic() > deadline:
            raise UserError(f"{folder}: no new weights within {timeout_s:g} s; is the training still running?")
        else:
            time.sleep(_POLL_S)


def main(argv: list[str] | None = None) -> int:
    """Follow a folder until an iteration, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="follow_weights.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=local_path, metavar="FOLDER", help="what --stream-weights-to names; /dev/shm/NAME for shm:NAME")
    add("--tokens", type=int, nargs="+", required=True, metavar="ID", help="token ids whose continuation is printed")
    add("--until", type=int, metavar="N", help="end with the weights of iteration N (default: never)")
    add("--timeout", type=float, default=600.0, metavar="S", help="longest wait for new weights (default: %(default)s)")
    options = parser.parse_args(argv)
    try:
        require_packages("transformers")
        for iteration, model in follow(options.folder, options.timeout):
            print(json.dumps({"iteration": iteration, "next": _most_probable(model, options.tokens)}), flush=True)
            if options.until is not None and iteration >= options.until:
                break
    except UserError as error:
        print(f"follow_weights.py: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    return ExitCode.OK


def _most_probable(model: Any, tokens: list[int], count: int = 3) -> list[list[float]]:
    """Return the most probable next tokens with their log probabilities."""
    import torch

    with torch.no_grad():
        best = model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1).topk(count)
    return [[int(token), round(float(value), 6)] for token, value in zip(best.indices, best.values)]


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""What this machine has for training, what each absence costs, and whether its ranks can talk to each other.

    python scripts/doctor.py                                    one machine; two forked gloo ranks are the self-test
    torchrun --nproc-per-node 8 scripts/doctor.py               the ranks present: NCCL where there are GPUs, else gloo
    srun python scripts/doctor.py                               the same inside a SLURM step, over all its nodes
    python scripts/doctor.py --require transformer_engine deepep    these, too, must be there
    python scripts/doctor.py --json                             one JSON object

Exit code: 0, everything that is needed is there and the self-test passed on every rank; 1, something needed is missing, or the self-test
failed; 2, the command line or the ranks' environment is wrong. Needed are torch, numpy, PyYAML, safetensors, gloo, with GPUs NCCL, and what
--require names.

Libraries are judged by the very functions by which a run chooses (layers/te.py, moe/dispatch/deepep.py, hybridep.py), so what is told
here is what a run would do with --on-missing-backend. Every rank looks for itself: a node that lacks what others have is named.
The self-test runs the collectives of moe_trainer/parallel over all ranks and compares every result; it comes first, because forking
after a library has touched the GPU would break. A collective that does not end is named by a timer, not waited for.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_trainer.backends import import_problem
from moe_trainer.exit_codes import ExitCode
from moe_trainer.place import Place, find_place

if TYPE_CHECKING:  # it imports torch, which may be what is missing
    from moe_trainer.guard.self_test import SelfTest

OLDEST_TORCH = (2, 11)
NEEDED = frozenset({"python", "torch", "numpy", "PyYAML", "safetensors", "gloo"})
NAMES = (
    "python", "torch", "numpy", "PyYAML", "safetensors", "gloo", "cuda", "nccl", "transformer_engine", "apex", "deepep", "deepep_v2",
    "hybridep", "triton", "sentencepiece", "tokenizers", "transformers", "tiktoken", "tensorboard", "wandb", "slurm",
)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for. problem: None where it can be used. cost: what its absence means. install: how to get it."""

    name: str
    version: str | None
    problem: str | None
    cost: str
    install: str = ""


# ---- what is here

def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def plain_package(name: str, module: str, cost: str) -> Finding:
    """A package that need only be importable."""
    problem = import_problem(module) if importlib.util.find_spec(module) else "not installed"
    return Finding(name, None if problem == "not installed" else _version(name), problem, cost, f"pip install {name}")


def find_torch() -> list[Finding]:
    """torch with gloo, CUDA and NCCL."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        return [Finding("torch", None, f"cannot be imported ({error})", "nothing runs", "pip install 'torch>=2.11'")]
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    old = None if version >= OLDEST_TORCH else f"older than {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"
    gloo = None if dist.is_available() and dist.is_gloo_available() else "this build of torch has none"
    found = [
        Finding("torch", torch.__version__, old, "nothing runs", "pip install 'torch>=2.11'"),
        Finding("gloo", None, gloo, "no training on several CPU ranks"),
    ]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        device = torch.cuda.get_device_properties(0)
        what = f"{torch.version.cuda}, {count} x {device.name}, {device.total_memory / 2**30:.0f} GiB, capability {device.major}.{device.minor}"
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None
        found += [Finding("cuda", what, None, ""),
                  Finding("nccl", nccl, None if nccl else "this build of torch has none", "GPUs cannot talk to each other")]
    else:
        why = "this torch is a CPU build" if torch.version.cuda is None else "torch sees no device (driver, CUDA_VISIBLE_DEVICES)"
        found += [Finding("cuda", torch.version.cuda, why, "training runs on the CPU, over gloo"),
                  Finding("nccl", None, "needs CUDA devices", "ranks talk over gloo")]
    return found


def find_te() -> Finding:
    """TransformerEngine, as --transformer-impl transformer_engine would find it."""
    from moe_trainer.layers import te

    return Finding("transformer_engine", _version("transformer-engine") or _version("transformer_engine"), te.problem(""),
                   "the local layers run; 8 and 4 bit products are torch's scaled_mm or computed by definition", te.INSTALL)


def find_apex() -> Finding:
    """apex: NVIDIA's library, not the program of that name in the package index. Looked at, not imported."""
    spec, install = importlib.util.find_spec("apex"), "from source: github.com/NVIDIA/apex"
    cost = "nothing: fused Adam and norms are this program's own"
    if spec is None:
        return Finding("apex", None, "not installed", cost, install)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "multi_tensor_apply").exists() for folder in folders):
        return Finding("apex", _version("apex"), "this is another program of the same name (pip install apex), not NVIDIA's",
                       "nothing here; other trainers fail as they import it: pip uninstall apex", install)
    fused = "with" if importlib.util.find_spec("amp_C") else "without"
    return Finding("apex", f"{_version('apex') or ''} {fused} its CUDA extensions".strip(), None, cost)


def find_deep_ep() -> list[Finding]:
    """DeepEP in both versions and HybridEP: three products in one package name."""
    from moe_trainer.moe.dispatch import deepep, hybridep

    cost = "--moe-token-dispatcher-type flex falls back to alltoall, or stops where you typed it (--on-missing-backend)"
    version = _version("deep_ep")
    return [
        Finding("deepep", version, deepep.problem("Buffer"), cost, deepep.INSTALL),
        Finding("deepep_v2", version, deepep.problem("ElasticBuffer"), "version 1, if it is there; else as deepep"),
        Finding("hybridep", version, hybridep.problem(), "as deepep", hybridep.INSTALL),
    ]


def find_slurm() -> Finding:
    """SLURM's commands, and the step this runs in."""
    missing = [name for name in ("sbatch", "srun", "scontrol", "squeue") if shutil.which(name) is None]
    cost = "scripts/sbatch_train.sh cannot submit; torchrun works"
    if missing:
        return Finding("slurm", None, f"no {', '.join(missing)} here", cost, "apt-get install slurm-wlm munge")
    try:
        said = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, timeout=5, check=False).stdout.strip()
        node = subprocess.run(["sinfo", "-h", "-o", "%D"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("slurm", None, f"its commands do not answer ({error})", cost)
    if node.returncode != 0:
        return Finding("slurm", said, "no controller answers (" + (node.stderr.strip().splitlines() or ["no reason given"])[-1] + ")", cost)
    return Finding("slurm", said + (f", in job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""), None, cost)


def look_around() -> list[Finding]:
    """Everything, in the order of NAMES."""
    python = None if sys.version_info >= (3, 10) else "older than 3.10"
    found = [
        Finding("python", platform.python_version(), python, "nothing runs"),
        *find_torch(),
        plain_package("numpy", "numpy", "nothing runs"),
        plain_package("PyYAML", "yaml", "nothing runs: presets and recipes are YAML"),
        plain_package("safetensors", "safetensors", "nothing runs: --init-from and --export-weights are read at start"),
        find_apex(),
        plain_package("triton", "triton", "--triton-kernels falls back to plain torch"),
        plain_package("sentencepiece", "sentencepiece", "no Llama2Tokenizer, SentencePieceTokenizer, GPTSentencePieceTokenizer"),
        plain_package("tokenizers", "tokenizers", "no HuggingFaceTokenizer, GPT2BPETokenizer"),
        plain_package("transformers", "transformers", "no tokenizers with Python code of their own; nothing else needs it"),
        plain_package("tiktoken", "tiktoken", "no TikTokenizer"),
        plain_package("tensorboard", "tensorboard", "no --tensorboard-dir; metrics.jsonl and dashboard.html need nothing"),
        plain_package("wandb", "wandb", "no --wandb-project"),
        find_slurm(),
    ]
    if found[1].problem is None or found[1].version is not None:
        found += [find_te(), *find_deep_ep()]
    return sorted(found, key=lambda finding: NAMES.index(finding.name))


# ---- telling it

def differences(findings: list[Finding], place: Place) -> list[str]:
    """What other ranks have and rank 0 has not, or the other way round, or in another version. Collective; [] but on rank 0."""
    import torch.distributed as dist

    mine = {finding.name: (finding.version, finding.problem) for finding in findings if finding.name != "slurm"}
    everyone: list = [None] * place.world_size
    dist.all_gather_object(everyone, (socket.gethostname(), mine))
    lines, (_, first) = [], everyone[0]
    for rank, (host, other) in enumerate(everyone):
        lines += [f"rank {rank} on {host}: {name} is {other[name][1] or other[name][0] or 'there'}, on rank 0 {first[name][1] or first[name][0] or 'there'}"
                  for name in first if other.get(name) != first[name]]
    return lines if place.rank == 0 else []


def needed_names(findings: list[Finding], asked: list[str]) -> frozenset[str]:
    """What must be there: NEEDED, NCCL where there are GPUs, and what was asked for."""
    gpus = any(finding.name == "cuda" and finding.problem is None for finding in findings)
    return NEEDED | set(asked) | ({"nccl"} if gpus else set())


def as_text(findings: list[Finding], needed: frozenset[str], test: SelfTest | None, differing: list[str]) -> str:
    """One line for what is there; for what is not, what that costs and how to get it."""
    lines = []
    for each in findings:
        if each.problem is None:
            lines.append(f"  ok       {each.name:20s} {each.version or ''}".rstrip())
        else:
            word = "MISSING" if each.name in needed else "absent"
            remedy = f" ({each.install})" if each.install else ""
            lines.append(f"  {word:8s} {each.name:20s} {each.problem}: {each.cost}{remedy}")
    if test is not None:
        lines.append(f"self-test of {test.world_size} ranks over {test.backend}, {test.seconds:.1f} s: "
                     + (f"{', '.join(test.passed)} ok; all-reduce of 8 MB at {test.gb_s:.2f} GB/s" if not test.problems else "FAILED"))
        lines += [f"  {problem}" for problem in test.problems]
    if differing:
        lines += ["the ranks do not have the same:", *(f"  {line}" for line in differing)]
    return "\n".join(lines)


def self_test(place: Place, together: bool) -> SelfTest:
    """Let the ranks that are present talk to each other, two forked ones where there is only this."""
    import torch

    from moe_trainer.guard.self_test import join_and_talk, talk_alone
    from moe_trainer.initialize import device_index

    if not together:
        return talk_alone()
    if not torch.cuda.is_available():
        return join_and_talk(place, torch.device("cpu"))
    device = torch.device("cuda", device_index(place, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return join_and_talk(place, device)


def main(argv: list[str]) -> int:
    """Run the program on this rank. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0], epilog="Exit code 0, 1 or 2: see the head of this file.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--require", nargs="+", default=[], choices=NAMES, metavar="NAME", help=f"also needed: {', '.join(NAMES)}")
    parser.add_argument("--no-self-test", action="store_true", help="only look; ranks do not meet")
    options = parser.parse_args(argv)
    try:
        place = find_place(os.environ)
    except ValueError as error:
        print(f"doctor: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    test, differing, together = None, [], place.world_size > 1 and not options.no_self_test
    if importlib.util.find_spec("torch") is not None and not options.no_self_test:
        test = self_test(place, together)
    findings = look_around()
    if together and test is not None and not test.problems:
        import torch.distributed as dist

        differing = differences(findings, place)
        dist.destroy_process_group()
    needed = needed_names(findings, options.require)
    lacking = [finding.name for finding in findings if finding.name in needed and finding.problem is not None]
    bad = bool(lacking or needed - {finding.name for finding in findings} or (test is not None and test.problems))
    if place.rank == 0 and options.json:
        print(json.dumps({"ok": not bad, "missing": lacking, "findings": [asdict(finding) for finding in findings],
                          "self_test": None if test is None else asdict(test), "differences": differing}, indent=1))
    elif place.rank == 0:
        print(as_text(findings, needed, test, differing))
        failed = "the self-test failed" if bad else "everything that is needed is here"
        print(f"missing: {', '.join(lacking)}" if lacking else failed)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

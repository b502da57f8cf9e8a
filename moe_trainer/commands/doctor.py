"""Check the environment: installed libraries, the effect of each missing one, and communication between ranks.

python scripts/doctor.py                            one machine; the self-test forks two gloo ranks
torchrun --nproc-per-node 8 scripts/doctor.py       the launched ranks, over NCCL with GPUs, else gloo
srun python scripts/doctor.py                       the same in a SLURM step, on all its nodes
python scripts/doctor.py --require transformer_engine deepep
python scripts/doctor.py --json
"""

# Libraries are checked by the functions by which a run chooses them (layers/te.py, optim/apex.py,
# the modules of moe/dispatch), so the result is what a run does with --on-missing-backend. Every rank checks its own
# node.
# The self-test runs the collectives of moe_trainer/parallel on all ranks and compares every result. It comes first,
# because forking after a library has initialized the GPU fails. A collective that hangs is reported by a timer.

from __future__ import annotations

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
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from arguments.mechanisms.dispatchers import DISPATCHERS
from arguments.mechanisms.formats import list_widths
from arguments.program import program_name
from moe_trainer.backends import import_problem, nccl_version
from moe_trainer.commands.command_parser import make_command_parser
from moe_trainer.exit_codes import ExitCode
from moe_trainer.launch_env import LaunchEnv, read_launch_env

if TYPE_CHECKING:  # it imports torch, which may be what is missing
    from moe_trainer.resilience.self_test import SelfTestResult

TESTED = MappingProxyType({"python": ((3, 10), (3, 12)), "torch": ((2, 11), (2, 14)), "triton": ((3, 6), (3, 8))})
"""Oldest and newest release that the test suite was run with: docs/test_suite.md, "Versions"."""
REQUIRED = frozenset({"python", "torch", "numpy", "PyYAML", "safetensors", "tqdm", "gloo"})
LIBRARIES = tuple(dispatcher for dispatcher in DISPATCHERS if dispatcher.package is not None)
"""Dispatchers that need one."""
NAMES = (
    *tuple("python torch numpy PyYAML safetensors tqdm gloo cuda nccl transformer_engine apex".split()),
    *tuple(name for dispatcher in LIBRARIES for name in (dispatcher.key, *dict(dispatcher.classes))),
    *tuple("triton sentencepiece tokenizers transformers tiktoken tensorboard wandb slurm".split()),
)
PACKAGES = (  # distribution, module, effect of its absence
    ("numpy", "numpy", "nothing runs"),
    ("PyYAML", "yaml", "nothing runs: presets and recipes are YAML"),
    ("safetensors", "safetensors", "nothing runs: --init-from and --export-weights are read at start"),
    ("tqdm", "tqdm", "nothing runs: it draws the progress bar"),
    ("triton", "triton", "--triton-kernels falls back to plain torch"),
    ("sentencepiece", "sentencepiece", "no Llama2Tokenizer, SentencePieceTokenizer, GPTSentencePieceTokenizer"),
    ("tokenizers", "tokenizers", "no HuggingFaceTokenizer, GPT2BPETokenizer"),
    ("transformers", "transformers", "no tokenizers with custom Python code; nothing else needs it"),
    ("tiktoken", "tiktoken", "no TikTokenizer"),
    ("tensorboard", "tensorboard", "no --tensorboard-dir; metrics.jsonl and dashboard.html need nothing"),
    ("wandb", "wandb", "no --wandb-project"),
)


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    version: str | None
    problem: str | None
    """Why it cannot be used; None if it can."""
    cost: str
    """Effect of its absence."""
    install: str = ""
    note: str = ""
    """What to know about one that can be used."""


# ---- checks


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_version(name: str, version: str) -> tuple[str | None, str]:
    """Return the problem of a version older than those of TESTED, and a note on one that is newer."""
    oldest, newest = TESTED[name]
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if release < oldest:
        return "older than {}.{}".format(*oldest), ""
    if release > newest:
        return None, "newer than {}.{}, the newest that the test suite was run with".format(*newest)
    return None, ""


def find_package(name: str, module: str, cost: str) -> Finding:
    """Check a package that only has to be importable."""
    problem = import_problem(module) if importlib.util.find_spec(module) else "not installed"
    version = None if problem == "not installed" else _version(name)
    too_old, note = check_version(name, version) if version is not None and name in TESTED else (None, "")
    return Finding(name, version, problem, cost, f"pip install {name}", too_old or note)


def find_torch() -> list[Finding]:
    """Check torch with gloo, CUDA and NCCL."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        return [Finding("torch", None, f"cannot be imported ({error})", "nothing runs", "pip install 'torch>=2.11'")]
    version_problem, note = check_version("torch", torch.__version__)
    gloo_problem = None if dist.is_available() and dist.is_gloo_available() else "not in this build of torch"
    findings = [
        Finding("torch", torch.__version__, version_problem, "nothing runs", "pip install 'torch>=2.11'", note),
        Finding("gloo", None, gloo_problem, "no training on several CPU ranks"),
    ]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        device = torch.cuda.get_device_properties(0)
        memory, capability = f"{device.total_memory / 2**30:.0f} GiB", f"{device.major}.{device.minor}"
        devices = f"{torch.version.cuda}, {count} x {device.name}, {memory}, capability {capability}"
        loaded = nccl_version() or torch.cuda.nccl.version() if dist.is_nccl_available() else ()
        nccl = ".".join(map(str, loaded)) or None
        findings += [
            Finding("cuda", devices, None, ""),
            Finding("nccl", nccl, None if nccl else "not in this build of torch", "no communication between GPUs"),
        ]
    else:
        cuda_problem = "torch sees no device (driver, CUDA_VISIBLE_DEVICES)"
        if torch.version.cuda is None:
            cuda_problem = "this torch is a CPU build"
        findings += [
            Finding("cuda", torch.version.cuda, cuda_problem, "training runs on the CPU, over gloo"),
            Finding("nccl", None, "needs CUDA devices", "ranks communicate over gloo"),
        ]
    return findings


def find_te() -> Finding:
    """Check TransformerEngine as --transformer-impl transformer_engine does."""
    from moe_trainer.layers import te

    return Finding(
        "transformer_engine",
        _version("transformer-engine") or _version("transformer_engine"),
        te.problem(""),
        f"the local layers are used; {list_widths('and')} GEMMs are torch's scaled_mm or emulated",
        te.INSTALL,
    )


def find_apex() -> Finding:
    """Check NVIDIA's apex as a run without TransformerEngine does."""
    from moe_trainer.optim import apex

    cost = "torch's Adam, norms and weight-gradient GEMMs are used, as where TransformerEngine is installed"
    return Finding("apex", _version("apex"), apex.problem(), cost, apex.INSTALL)


def find_dispatch_libraries() -> list[Finding]:
    """Check the libraries of dispatchers, of which several share one package name."""
    from moe_trainer.declared_module import load_module

    cost = "--moe-token-dispatcher-type flex falls back to alltoall, or is an error if given on the command line"
    found: list[Finding] = []
    for dispatcher in LIBRARIES:
        library, version = load_module(dispatcher), _version(str(dispatcher.package))
        loss = f"as {LIBRARIES[0].key}" if found else f"{cost} (--on-missing-backend)"
        found.append(Finding(dispatcher.key, version, library.problem(), loss, library.INSTALL))
        for name, needed in dispatcher.classes:
            other = f"another version is used if it is what is installed; else as {dispatcher.key}"
            found.append(Finding(name, version, library.problem(needed), other))
    return found


def find_slurm() -> Finding:
    """Check the commands of SLURM and its controller."""
    missing = [name for name in ("sbatch", "srun", "scontrol", "squeue") if shutil.which(name) is None]
    cost = "scripts/sbatch_train.sh of a checkout cannot submit; torchrun works"
    if missing:
        return Finding("slurm", None, f"{', '.join(missing)} not found", cost, "apt-get install slurm-wlm munge")
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 5, "check": False}
    try:
        version = subprocess.run(["sbatch", "--version"], **how).stdout.strip()
        sinfo = subprocess.run(["sinfo", "-h", "-o", "%D"], **how)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("slurm", None, f"its commands fail ({error})", cost)
    if sinfo.returncode != 0:
        reason = (sinfo.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Finding("slurm", version, f"the controller does not answer ({reason})", cost)
    job = f", in job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
    return Finding("slurm", version + job, None, cost)


def collect_environment() -> list[Finding]:
    """Run all checks. Returns the findings in the order of NAMES."""
    python_problem, python_note = check_version("python", platform.python_version())
    findings = [
        Finding("python", platform.python_version(), python_problem, "nothing runs", note=python_note),
        *find_torch(),
        *(find_package(*package) for package in PACKAGES),
        find_slurm(),
    ]
    if findings[1].problem is None or findings[1].version is not None:
        findings += [find_te(), find_apex(), *find_dispatch_libraries()]
    return sorted(findings, key=lambda finding: NAMES.index(finding.name))


# ---- report


def compare_ranks(findings: list[Finding], launch: LaunchEnv) -> list[str]:
    """Compare the findings of all ranks with rank 0's. Returns one line per difference on rank 0, [] on other ranks.

    Communication: an all-gather of objects over all ranks.
    """
    import torch.distributed as dist

    local = {
        finding.name: finding.problem or finding.version or "installed"
        for finding in findings
        if finding.name != "slurm"
    }
    all_ranks: list = [None] * launch.world_size
    dist.all_gather_object(all_ranks, (socket.gethostname(), local))

    _, reference = all_ranks[0]
    lines = [
        f"rank {rank} on {host}: {name} is {checked[name]}, on rank 0 {reference[name]}"
        for rank, (host, checked) in enumerate(all_ranks)
        for name in reference
        if checked.get(name) != reference[name]
    ]
    return lines if launch.rank == 0 else []


def get_required_names(findings: list[Finding], requested: list[str]) -> frozenset[str]:
    """Return the names of REQUIRED, of NCCL if there are GPUs, and those of --require."""
    has_gpus = any(finding.name == "cuda" and finding.problem is None for finding in findings)
    return REQUIRED | set(requested) | ({"nccl"} if has_gpus else set())


def format_report(
    findings: list[Finding], required: frozenset[str], test: SelfTestResult | None, differences: list[str]
) -> str:
    """Format one line per finding; for a missing library its cost and how to install it."""
    lines = []
    for finding in findings:
        if finding.problem is None:
            note = f" ({finding.note})" if finding.note else ""
            lines.append(f"  ok       {finding.name:20s} {finding.version or ''}{note}".rstrip())
        else:
            severity = "MISSING" if finding.name in required else "absent"
            install = f" ({finding.install})" if finding.install else ""
            lines.append(f"  {severity:8s} {finding.name:20s} {finding.problem}: {finding.cost}{install}")
    if test is not None:
        result = f"{', '.join(test.passed)} ok; all-reduce of 8 MB at {test.gb_s:.2f} GB/s"
        head = f"self-test of {test.world_size} ranks over {test.backend}, {test.seconds:.1f} s"
        lines.append(f"{head}: {'FAILED' if test.problems else result}")
        lines += [f"  {problem}" for problem in test.problems]
    if differences:
        lines += ["the environments of the ranks differ:", *(f"  {line}" for line in differences)]
    return "\n".join(lines)


def self_test(launch: LaunchEnv, is_distributed: bool) -> SelfTestResult:
    """Run the self-test on the launched ranks, or on two forked ranks if this process is alone."""
    import torch

    from moe_trainer.resilience.self_test import run_distributed_self_test, run_local_self_test
    from moe_trainer.training.initialize import device_index

    if not is_distributed:
        return run_local_self_test()
    if not torch.cuda.is_available():
        return run_distributed_self_test(launch, torch.device("cpu"))
    device = torch.device("cuda", device_index(launch, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return run_distributed_self_test(launch, device)


def main(argv: list[str]) -> int:
    parser = make_command_parser(
        "doctor",
        __doc__,
        epilog="Required are torch, numpy, PyYAML, safetensors, gloo, NCCL if there are GPUs, and the names of\n"
        "--require. Exit code: 0, all required libraries are installed and the self-test passed on every rank;\n"
        "1, a required library is missing, or the self-test failed; 2, the command line or the environment of\n"
        "the ranks is wrong.",
        allow_abbrev=True,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    text = f"additional required libraries, of {', '.join(NAMES)}"
    parser.add_argument("--require", nargs="+", default=[], choices=NAMES, metavar="NAME", help=text)
    parser.add_argument("--no-self-test", action="store_true", help="check libraries only, not communication")
    options = parser.parse_args(argv)
    try:
        launch = read_launch_env(os.environ)
    except ValueError as error:
        print(f"{program_name('doctor')}: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    test, differences, is_distributed = None, [], launch.world_size > 1 and not options.no_self_test
    if importlib.util.find_spec("torch") is not None and not options.no_self_test:
        test = self_test(launch, is_distributed)
    findings = collect_environment()
    if is_distributed and test is not None and not test.problems:
        import torch.distributed as dist

        differences = compare_ranks(findings, launch)
        dist.destroy_process_group()
    required = get_required_names(findings, options.require)
    missing = [finding.name for finding in findings if finding.name in required and finding.problem is not None]
    failed = bool(missing or required - {finding.name for finding in findings} or (test is not None and test.problems))
    if launch.rank == 0 and options.json:
        record = {
            "ok": not failed,
            "missing": missing,
            "findings": [asdict(finding) for finding in findings],
            "self_test": None if test is None else asdict(test),
            "differences": differences,
        }
        print(json.dumps(record, indent=1))
    elif launch.rank == 0:
        print(format_report(findings, required, test, differences))
        result = "the self-test failed" if failed else "all required libraries are installed"
        print(f"missing: {', '.join(missing)}" if missing else result)
    return int(failed)

#!/usr/bin/env python3
"""Which features can be combined: the page docs/combinations.md, and the proof of its entries.

    python scripts/combinations.py FEATURE [FEATURE]     the cell of a feature or pair, its reason and its command line
    python scripts/combinations.py --write               write the page; a test compares it with the program
    python scripts/combinations.py --prove [FEATURE]     compare every accepted pair (with FEATURE) with one process
    python scripts/combinations.py --prove --record      and keep the results for the page

A pair is a small model with the flags of both features. The rules of the program accept it or give a reason. The proof
shrinks its flags as prove_layout.py does and compares losses, gradients and weights. It leaves out what the CPU cannot
run as it is, graphs and libraries; tests/verification/prove_combinations.py compares these on emulated devices.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arguments.mechanisms.dispatchers import HYBRIDEP, SELECTABLE
from arguments.mechanisms.format_kinds.declaration import FormatCapability
from arguments.mechanisms.formats import NAMED_BY_LAYER
from arguments.mechanisms.optimizers import OPTIMIZERS
from arguments.parse import resolve_command_line
from moe_trainer.exit_codes import ExitCode
from scripts.proof_record import ProofRecord

PAGE = ROOT / "docs" / "combinations.md"
PROVEN = ProofRecord(ROOT / "scripts" / "bench_results" / "combinations.json", "flags")
RANKS = 8
MODEL = (
    "--num-layers 4 --hidden-size 128 --ffn-hidden-size 128 --num-attention-heads 4 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --num-experts 8 "
    "--moe-router-topk 2 --moe-grouped-gemm --expert-model-parallel-size 2 --use-distributed-optimizer "
    "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 16 --train-iters 3 "
    "--lr 1e-3 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 250 --bf16"
)


NOISY = frozenset(each.name for each in NAMED_BY_LAYER if each.rejects(FormatCapability.PROOF))
"""Formats whose random rounding the proof leaves out."""


class Feature(NamedTuple):
    """Feature of the table; two of one kind exclude each other."""

    kind: str
    flags: str


DROPLESS = "--moe-expert-rank-capacity-factor 4"
FULL = "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"
FLEX = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend"
DOMAINS = ("--moe-hierarchical-domain-size", "1")
DISPATCHER = re.compile(r"--moe-token-dispatcher-type (flex --moe-flex-dispatcher-backend )?\w+")
FEATURES = MappingProxyType(
    {
        "recompute": Feature("", "--recompute-granularity selective --recompute-modules layernorm moe_act"),
        "offload": Feature("", "--fine-grained-activation-offloading --offload-modules core_attn attn_proj"),
        "stash": Feature("", f"--moe-paged-stash {FLEX} hybridep {DROPLESS}"),
        "clones": Feature("", "--moe-clone-hot-experts 1"),
        "MXFP8": Feature("format", "--fp8-format e4m3 --fp8-recipe mxfp8"),
        "blockwise": Feature("format", "--fp8-format e4m3 --fp8-recipe blockwise"),
        **{each.name: Feature("format", " ".join(each.words)) for each in NAMED_BY_LAYER if each.name in NOISY},
        "EP overlap": Feature("", "--overlap-moe-expert-parallel-comm"),
        "shared overlap": Feature("", "--moe-shared-expert-intermediate-size 128 --moe-shared-expert-overlap"),
        "op fuser": Feature("", "--use-transformer-engine-op-fuser"),
        "local graphs": Feature("graphs", "--cuda-graph-impl local --cuda-graph-modules attn"),
        "TE graphs": Feature(
            "graphs", "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess"
        ),
        "graph, padded": Feature(
            "graphs", f"{FULL} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
        ),
        "graph, dropless": Feature("graphs", f"{FULL} {FLEX} hybridep {DROPLESS}"),
        **{
            each.name: Feature("dispatcher", " ".join([*each.words, *(DOMAINS if each.groups_by_domain else ())]))
            for each in SELECTABLE
        },
        "FSDP": Feature(
            "", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor"
        ),
        "PP": Feature("stages", "--pipeline-model-parallel-size 2"),
        "VPP": Feature("stages", "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
        "CP": Feature("", "--context-parallel-size 2"),
        "MTP": Feature("", "--mtp-num-layers 1"),
        **{each.name: Feature("", f"--optimizer {each.key}") for each in OPTIMIZERS if each.updates_matrices},
    }
)


LIBRARIES = MappingProxyType(
    {"stash": HYBRIDEP.key} | {each.name: each.key for each in SELECTABLE if each.package is not None}
)
"""Features that need a library, and the dispatcher that they have with it."""
WITHOUT_GRAPH = MappingProxyType({"graph, padded": "padded", "graph, dropless": "dropless"})
HIDDEN = MappingProxyType(
    {
        "": Feature("", ""),
        "padded": Feature("", "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"),
        "dropless": Feature("", f"{FLEX} hybridep {DROPLESS}"),
    }
)
"""What remains of a feature without its graph."""


def without_graph(name: str) -> str:
    """Return the name of a feature without its graph."""
    return WITHOUT_GRAPH.get(name, "") if FEATURES[name].kind == "graphs" else name


def needs_device(pair: tuple[str, str]) -> bool:
    """Whether a proof on the CPU leaves something of a pair out."""
    return any(name in LIBRARIES or name in NOISY or FEATURES[name].kind == "graphs" for name in pair)


def record(pair: tuple[str, str], **results: str) -> None:
    """Keep the result of a proof, by "process" or "device"."""
    PROVEN.keep(" + ".join(pair), " ".join(make_argv(*pair)), **results)


def proofs(pair: tuple[str, str]) -> str:
    """Return the cell of an accepted pair."""
    entry = PROVEN.find(" + ".join(pair), " ".join(make_argv(*pair)))
    if any(result.startswith("FAILED") for result in entry.values()):
        return "FAILED"
    marks = ["P"] if "process" in entry and not NOISY.intersection(pair) else []  # which that proof leaves out
    return " ".join([*marks, *(["D"] if "device" in entry else [])]) or "valid"


def make_argv(*names: str) -> list[str]:
    """Return the command line of features, with the all-to-all where none determines the dispatcher."""
    flags = " ".join((FEATURES.get(name) or HIDDEN[name]).flags for name in names)
    default = "" if "--moe-token-dispatcher-type" in flags else FEATURES["alltoall"].flags
    return f"{MODEL} {default} {flags}".split()


def excludes(one: str, other: str) -> bool:
    """Whether two different features are alternatives of each other."""
    (kind, flags), (other_kind, other_flags) = FEATURES[one], FEATURES[other]
    dispatchers = {found[0] for found in (DISPATCHER.search(flags), DISPATCHER.search(other_flags)) if found}
    return len(dispatchers) > 1 or (one != other and kind == other_kind != "")


def reason(one: str, other: str) -> str | None:
    """Return why the program rejects a pair (or a feature with itself: alone); None if it accepts it."""
    names = (one,) if one == other else (one, other)
    violations = resolve_command_line(make_argv(*names), RANKS)[1]
    return violations[0].message if violations else None


def cell(one: str, other: str) -> str:
    """Return the cell of a pair (or of a feature with itself: alone) without the number of its reason."""
    if excludes(one, other):
        return "-"
    if reason(one, other) is not None:
        return "rejected"
    return "yes" if one == other else proofs((one, other))


def describe(names: list[str]) -> Iterator[str]:
    """Yield the cell of one or two features, its reason, and the command to repeat it."""
    first, last = sorted((names[0], names[-1]), key=list(FEATURES).index)
    found = cell(first, last)
    yield f"{first if first == last else f'{first} + {last}'}: {found}"
    if found == "-":
        yield "They are alternatives of each other."
        return
    if found == "rejected":
        yield f"reason: {reason(first, last)}"
    argv = make_argv(first) if first == last else make_argv(first, last)
    yield f"python pretrain_moe.py --validate-only --world-size {RANKS} {' '.join(argv)}"


def page_lines() -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# Combinations"
    yield ""
    yield "Generated by `python scripts/combinations.py --write`; a test compares this page with the program."
    yield ""
    yield (
        "Each pair of features on eight ranks with two expert-parallel ones. *Yes*: valid alone. *-*: alternatives. "
        "A number: rejected, for the reason below."
    )
    yield ""
    yield (
        "*P*: losses, gradients and weights [equal one process](verification.md), without graphs and libraries "
        "(`python scripts/combinations.py --prove`)."
    )
    yield ""
    yield (
        "*D*: run in bf16 on [emulated devices](testing_without_gpu.md), with imitations of the libraries (`python "
        "tests/verification/prove_combinations.py`). Graphs change no bit. Libraries give the all-to-all's losses to "
        "0.5 %; formats with random rounding give those of one device to 2 %. The op fuser falls back to this "
        "program's experts there."
    )
    yield ""
    names = list(FEATURES)
    reasons: dict[str, int] = {}
    rows = []
    for row, one in enumerate(names):
        cells = []
        for other in names[: row + 1]:
            found = cell(other, one)
            if found == "rejected" and (text := reason(one, other)) is not None:
                found = str(reasons.setdefault(text, len(reasons) + 1))
            cells.append(found)
        rows.append(f"| {one} | {' | '.join(cells)} |")
    yield '<div class="matrix" markdown>'
    yield ""
    yield f"| | {' | '.join(names)} |"
    yield f"|---|{'---|' * len(names)}"
    yield from rows
    yield ""
    yield "</div>"
    yield ""
    yield "## Reasons"
    yield ""
    yield from (f"{number}. {text}" for text, number in reasons.items())
    yield ""
    yield "## Flags"
    yield ""
    yield (
        "A feature's flags follow those of the model; without a dispatcher among them it is the all-to-all. "
        '`python scripts/combinations.py "TE graphs" MTP` prints a cell with its reason and command line.'
    )
    yield ""
    yield "```bash"
    yield f"python pretrain_moe.py --validate-only --world-size {RANKS} \\"
    yield from (f"    {line} \\" for line in textwrap.wrap(MODEL, 84, break_long_words=False, break_on_hyphens=False))
    yield f"    {FEATURES['alltoall'].flags}"
    yield "```"
    yield ""
    yield "| feature | flags |"
    yield "|---|---|"
    yield from (f"| {name} | `{feature.flags}` |" for name, feature in FEATURES.items())


def accepted_pairs(feature: str | None = None) -> list[tuple[str, str]]:
    """Return the pairs that the program accepts, with the feature if there is one."""
    return [
        pair
        for pair in itertools.combinations(FEATURES, 2)
        if (feature is None or feature in pair) and not excludes(*pair) and reason(*pair) is None
    ]


def prove(pairs: list[tuple[str, str]], is_recorded: bool) -> int:
    """Compare pairs with one process, print a line for each and record it if asked. Returns the exit code."""
    import torch

    torch.set_num_threads(1)
    from moe_trainer.verification.parity import check_parity
    from moe_trainer.verification.rank_pool import RankPool
    from moe_trainer.verification.shrink import ShrinkError, shrink

    different = 0
    with RankPool(4, 300.0) as pool:
        for one, other in pairs:
            try:
                case = shrink(make_argv(one, other), RANKS, 4).cases[0]
            except ShrinkError as error:
                print(f"{one} + {other}: cannot be checked: {error.reasons[0]}", flush=True)
                continue
            result = check_parity(pool, case)
            different += not result.is_equal
            if is_recorded:
                record((one, other), process=str(case.mapping) if result.is_equal else "FAILED")
            what = "equal" if result.is_equal else f"DIFFERENT {result.failure[-500:]} {result.differences[:2]}"
            print(f"{one} + {other} ({case.mapping}): {what} ({result.seconds:.1f} s)", flush=True)
    return ExitCode.FAILED if different else ExitCode.OK


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="combinations.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--prove", nargs="?", const="", metavar="FEATURE", help="compare pairs with one process")
    parser.add_argument("--record", action="store_true", help="keep the results of --prove for the page")
    parser.add_argument(
        "features", nargs="*", metavar="FEATURE", help="print the cell of a feature, or of two together"
    )
    options = parser.parse_args(words)
    if unknown := [name for name in options.features if name not in FEATURES]:
        parser.error(f"FEATURE {unknown[0]}: one of {', '.join(FEATURES)}")
    if len(options.features) > 2:
        parser.error(f"FEATURE {' '.join(options.features)}: one or two")
    if options.features and (options.write or options.record or options.prove is not None):
        parser.error("FEATURE only prints: leave out --write, --prove and --record (--prove FEATURE proves its pairs)")
    if options.prove and options.prove not in FEATURES:
        parser.error(f"--prove {options.prove}: one of {', '.join(FEATURES)}")
    if options.record and options.prove is None:
        parser.error("--record needs --prove, whose results it keeps")
    if options.write and options.prove is not None:
        parser.error("--write and --prove are two steps: prove with --record, then write")
    if options.prove is not None:
        return prove(accepted_pairs(options.prove or None), options.record)
    if options.features:
        print("\n".join(describe(options.features)))
        return ExitCode.OK
    text = "\n".join(page_lines()) + "\n"
    if options.write:
        PAGE.write_text(text)
    else:
        print(text, end="")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

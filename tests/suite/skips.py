"""Say in three lines which tests were skipped for want of something, and how to include them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

PACKAGES = {
    "triton": "triton",
    "transformer.?engine": "transformer_engine",
    "chrom|selenium|browser": "selenium",
    "mkdocs": "mkdocs mkdocs-material",
    "peft|accelerate": "peft",
    "lm.eval": "lm-eval",
    "xllamacpp": "xllamacpp",
    "megatron.core": "megatron-core",
    "moto|s3fs": "moto[server] s3fs",
    "pyarrow": "pyarrow",
    "gcsfs|gcp": "gcsfs gcp-storage-emulator",
    "multi.?storage": "multi-storage-client",
    "compressed.tensors": "compressed-tensors",
}
"""Pattern of a reason -> what MOE_TRAINER_TEST_WITH installs for it."""
OTHERS = {
    "reference facts|slurm_up": ("the folder of reference facts", "MOE_TRAINER_SHARED=FOLDER"),
    "convert_hf_to_gguf": ("the converter of llama.cpp", "MOE_TRAINER_LLAMA_CPP=FOLDER, see docs/consumers.md"),
    "slurm|munge": ("SLURM", "apt-get install slurm-wlm munge, as root"),
    "CUDA device": ("a GPU", "tests/gpu by itself on a machine with one"),
    "flash-linear": ("flash-linear-attention", "pip install --no-deps flash-linear-attention fla-core einops"),
    "root|tmpfs|mount": ("root and mounts", "run as root"),
}
"""Pattern of a reason -> what is missing, how to have it."""


def summarize(reasons: Iterable[str]) -> list[str]:
    """Return three lines at most: what was missing for how many tests, what to install, what else to do."""
    missing: Counter[str] = Counter()
    install: dict[str, None] = {}
    other: dict[str, None] = {}
    for reason in reasons:
        package = next((name for pattern, name in PACKAGES.items() if re.search(pattern, reason, re.IGNORECASE)), None)
        thing, how = next((pair for pattern, pair in OTHERS.items() if re.search(pattern, reason)), (None, None))
        if "CUDA device" in reason or package is None and thing is not None:
            missing[thing] += 1
            other[how] = None
        elif package is not None:
            missing[package.partition(" ")[0]] += 1
            install[package] = None
            if package == "selenium":
                other["apt-get install chromium chromium-driver"] = None
        else:
            missing["other reasons (-rs)"] += 1
    lines = []
    if missing:
        lines.append("skipped for want of: " + ", ".join(f"{name} {count}" for name, count in missing.most_common()))
    if install:
        lines.append(f'to include them: MOE_TRAINER_TEST_WITH="{" ".join(install)}" bash scripts/test.sh')
    if other:
        lines.append("and: " + "; ".join(other))
    return lines

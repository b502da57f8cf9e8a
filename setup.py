"""Packaging of moe-trainer.

Three packages: `arguments` (the flag surface), `model_zoo` (recipes, with their YAML files) and `moe_trainer` (the
trainer). What a run cannot do without is required; every optional library is an extra named after what it adds. Exact
versions belong to constraints.txt, which only this repository's own scripts use.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

# read, not imported: the build has none of the packages that an import needs
VERSION = re.search('__version__ = "(.+)"', Path(__file__).with_name("moe_trainer").joinpath("version.py").read_text())[
    1
]


def long_description() -> str:
    """Return the README for a package index, where a link to a file of the repository needs the repository's address.

    $MOE_TRAINER_REPOSITORY is that address (https://HOST/OWNER/NAME). Without it such links become plain text.
    """
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    address = os.environ.get("MOE_TRAINER_REPOSITORY", "").rstrip("/")
    image = r"!\[([^\]]*)\]\((?!https?:)([^)]+)\)"
    link = r"\[((?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?!https?:|#)([^)]+)\)"  # also around an image
    if address:
        text = re.sub(image, rf"![\1]({address}/raw/v{VERSION}/\2)", text)
        return re.sub(link, rf"[\1]({address}/blob/v{VERSION}/\2)", text)
    return re.sub(link, r"\1", re.sub(image, "", text))


setup(
    name="moe-trainer",
    version=VERSION,
    description="Mixture-of-experts language-model pretraining with Megatron-LM's command line, on CPU and GPU",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["moe_trainer", "moe_trainer.*", "arguments", "arguments.*", "model_zoo"]),
    package_data={
        "model_zoo": ["*.yaml"],
        "moe_trainer.checkpoint.hf": ["families/*.yaml", "remote_code/*.py"],
        "moe_trainer.launch": ["*.sh", "*.txt"],
        "moe_trainer.metrics": ["page/*"],
    },
    py_modules=["pretrain_moe"],
    entry_points={"console_scripts": ["moe-trainer = moe_trainer.__main__:main"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.11",
        "numpy",
        "PyYAML",
        "safetensors",
        "tokenizers>=0.20",
        "sentencepiece",
        "tensorboard",
        "tqdm",
        "pytest",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]"],
        "deepep": ["deep-ep"],
        "triton": ["triton>=3.6"],
        "logging": ["wandb"],
        "hf": ["transformers", "tiktoken", "zstandard"],
        "s3": ["s3fs"],
        "gs": ["gcsfs"],
        "msc": ["multi-storage-client[fsspec]"],
        "parquet": ["pyarrow"],
        "evaluation": ["lm-eval>=0.4.13", "transformers"],
        "docs": ["mkdocs", "mkdocs-material"],
        "dev": [
            "ruff",
            "mypy",
            "types-PyYAML",
            "hypothesis",
            "selenium",
            "transformers",
            "peft",
            "tiktoken",
            "zstandard",
            "moto[server]",
            "s3fs",
            "gcsfs",
            "gcp-storage-emulator",
            "multi-storage-client[fsspec]",
            "pyarrow",
        ],
    },
)

"""What was recorded of Megatron-LM's parser: every flag, and an argparse parser rebuilt from the records."""

import argparse
import gzip
import json
from pathlib import Path

DATA = Path(__file__).parents[1] / "data"


def load(name: str):
    """Read tests/data/NAME.json.gz."""
    with gzip.open(DATA / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        return json.load(file)


def megatron_flags() -> list[dict]:
    """All recorded flags."""
    return load("megatron_flags")["flags"]


def megatron_parser() -> argparse.ArgumentParser:
    """Megatron's parser, as far as the records go: values of plain types, no abbreviations."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for record in megatron_flags():
        keywords = {"dest": record["dest"], "default": record["default"]}
        if record["action"] == "boolean_optional":
            parser.add_argument(record["flags"][0], action=argparse.BooleanOptionalAction, **keywords)
            continue
        keywords["action"] = record["action"]
        if record["action"] == "store":
            keywords["type"] = {"int": int, "float": float}.get(record["type"], str)
            keywords["choices"] = record["choices"]
            keywords["nargs"] = record["nargs"]
        parser.add_argument(*record["flags"], **keywords)
    return parser

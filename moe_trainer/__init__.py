"""An MoE pretraining program; its Python interface is that of moe_trainer.api, imported when it is first used."""

import importlib
from typing import Any

_API = ("LanguageModel", "build_model", "load_model", "save_checkpoint", "save_hf_folder")


def __getattr__(name: str) -> Any:
    # the command line and the estimates must work without torch, which the interface imports
    if name in _API:
        return getattr(importlib.import_module("moe_trainer.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

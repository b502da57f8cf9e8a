"""Presets: one YAML file per model, in the shape of the public Megatron MoE model zoo (ENV_VARS, MODEL_ARGS).

A file holds an architecture and a training recipe as the flags themselves. The parallel mapping is not among them: the
sections `launch:` and `launch_VARIANT:` hold variables of the launchers, and only these read them. A new file in this
folder is a new preset; nothing else has to change.
"""

import difflib
import re
from pathlib import Path


def names() -> list[str]:
    """Return the names of all presets, sorted."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.yaml"))


def _folded(name: str) -> str:
    """Fold case and the separators '-', '_' and '.', which users type interchangeably."""
    return re.sub(r"[-_.]", "_", name.lower())


def find(name: str) -> Path:
    """Return the YAML file of the preset called name; case, '-', '_' and '.' make no difference.

    Raises: LookupError, with the closest names, when there is no such preset.
    """
    known = {_folded(preset): preset for preset in names()}
    wanted = _folded(name.strip())
    if wanted in known:
        return Path(__file__).parent / f"{known[wanted]}.yaml"
    close = [known[match] for match in difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)]
    hint = f"did you mean {', '.join(close)}?" if close else f"there are {', '.join(names())}"
    raise LookupError(f"no preset is called {name!r}; {hint}")

"""torch's flight recorder: the last communications of a rank that exits because of another one (--flight-recorder-*).

torch keeps the record in each process (NCCL and gloo) if its environment variables ask for it; arguments/machine.py
sets them from the flags. torch itself writes the record only after the communicator's own timeout. The watchdog
(watchdog.py) acts earlier, so it writes the files, one per rank, in the format that torch's `torchfrtrace` reads.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


class FlightRecorder:
    """Writes torch's record to PREFIX<rank>."""

    def __init__(self, prefix: str, rank: int, stacks: bool, only_active: bool):
        self.path = Path(f"{prefix}{rank}")
        self._stacks, self._only_active = stacks, only_active

    def write(self) -> str:
        """Write the file. Return a line for the user, also if it fails, because the job has failed already."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(self._record())
        except (OSError, RuntimeError) as error:
            return f"flight recorder: cannot write {self.path}: {error}"
        return f"flight recorder: {self.path}"

    def _record(self) -> bytes:
        names = ("_dump_nccl_trace", "_dump_fr_trace")
        if dist.is_initialized() and dist.get_backend() == "gloo":
            names = names[::-1]
        for name in names:
            dump = getattr(torch._C._distributed_c10d, name, None)  # torch has no public name for it
            if dump is not None:
                return dump(True, self._stacks, self._only_active)
        raise RuntimeError("this version of torch has no flight recorder")


def make_flight_recorder(env: Mapping[str, str], rank: int) -> FlightRecorder | None:
    """Return the recorder that the environment asks for; None if it asks for none, or not on a timeout."""
    prefix = next((env[name] for name in PREFIXES if env.get(name)), None)
    size = next((env[name] for name in SIZES if name in env), "0")
    if prefix is None or not re.fullmatch(r"[1-9]\d*", size) or not _is_on(env, "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        return None
    stacks, only_active = _is_on(env, "TORCH_INCLUDE_STACK_TRACE"), _is_on(env, "TORCH_INCLUDE_ONLY_ACTIVE")
    return FlightRecorder(prefix, rank, stacks, only_active)


def _is_on(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "").lower() in ("1", "y", "yes", "t", "true")

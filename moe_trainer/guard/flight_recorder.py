"""torch's flight recorder: the last communications of a rank, written to a file when it ends because of others (--flight-recorder-*).

torch keeps the record in each process (NCCL and gloo) and reads from the environment whether to; arguments/machine.py sets that from the
flags. On a hang torch itself would write it only after the communicator's own timeout, which guard/watchdog.py does not wait for,
so the watchdog asks here. The files, one a rank, are what torch's `torchfrtrace` reads.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


class FlightRecorder:
    """Writes what torch has recorded to PREFIX<rank>."""

    def __init__(self, prefix: str, rank: int, stacks: bool, only_active: bool):
        self.path = Path(f"{prefix}{rank}")
        self._stacks, self._only_active = stacks, only_active

    def write(self) -> str:
        """Write the file. Returns: a line for the user, whatever happened: it is called where a job has failed already."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(self._record())
        except (OSError, RuntimeError) as error:
            return f"the flight recorder could not be written to {self.path}: {error}"
        return f"flight recorder: {self.path}"

    def _record(self) -> bytes:
        names = ("_dump_nccl_trace", "_dump_fr_trace")
        if dist.is_initialized() and dist.get_backend() == "gloo":
            names = names[::-1]
        for name in names:
            dump = getattr(torch._C._distributed_c10d, name, None)  # torch has no public name for it
            if dump is not None:
                return dump(True, self._stacks, self._only_active)
        raise RuntimeError("this version of torch keeps none")


def open_recorder(env: Mapping[str, str], rank: int) -> FlightRecorder | None:
    """The recorder that the environment asks for; None when it does not, or not on a timeout."""
    prefix = next((env[name] for name in PREFIXES if env.get(name)), None)
    size = next((env[name] for name in SIZES if name in env), "0")
    if prefix is None or not re.fullmatch(r"[1-9]\d*", size) or not _on(env, "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        return None
    return FlightRecorder(prefix, rank, _on(env, "TORCH_INCLUDE_STACK_TRACE"), _on(env, "TORCH_INCLUDE_ONLY_ACTIVE"))


def _on(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "").lower() in ("1", "y", "yes", "t", "true")

"""Accelerators and their links: what a plan reckons with, each number with its source; or a YAML file of the user's.

Peaks are dense (without structured sparsity), of the data sheets. Memory is what nvidia-smi shows of the product, in GiB. NVLink
and network bandwidths are of one GPU in one direction. A domain is the number of GPUs that NVLink joins; of the 72 of an NVL72 rack 64
count, because jobs are laid out in powers of two.

A YAML file holds the same names: `like: h100` and what is different, or everything.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType


class HardwareError(ValueError):
    """--hardware names nothing that is known, or a file that cannot be used."""


@dataclass(frozen=True)
class Hardware:
    """One kind of accelerator in its usual system.

    memory_gib: of one device. bf16, fp8, fp4: dense TFLOP/s of products; 0: none, products of that format run in bf16.
    hbm_tb_s: of its memory. nvlink_gb_s, domain: one direction of one GPU, and how many GPUs it joins. network_gb_s: of one GPU, one
    direction. host_gb_s: to and from host memory, one direction. num_sms: multiprocessors, of which token exchange may occupy some.
    source: of all this.
    """

    name: str
    memory_gib: float
    bf16: float
    fp8: float
    fp4: float
    hbm_tb_s: float
    nvlink_gb_s: float
    domain: int
    network_gb_s: float
    host_gb_s: float
    num_sms: int
    source: str

    @property
    def is_blackwell(self) -> bool:
        """Has it the tensor cores of Blackwell? (They are the ones with fp4.)"""
        return self.fp4 > 0

    def peak(self, width: str) -> float:
        """Dense FLOP/s of products in "bf16", "fp8" or "fp4", or in the widest format below that it has."""
        found = {"fp4": self.fp4 or self.fp8 or self.bf16, "fp8": self.fp8 or self.bf16}.get(width, self.bf16)
        return found * 1e12


_ROWS = (
    Hardware("a100", 80.0, 312, 0, 0, 2.04, 300, 8, 25, 32, 108,
             "NVIDIA A100 80GB SXM data sheet; DGX A100: one 200 Gb/s adapter a GPU, PCIe 4 x16"),
    Hardware("h100", 79.6, 989.4, 1978.9, 0, 3.35, 450, 8, 50, 64, 132,
             "NVIDIA H100 SXM data sheet; DGX H100: one 400 Gb/s adapter a GPU, PCIe 5 x16"),
    Hardware("h200", 140.4, 989.4, 1978.9, 0, 4.8, 450, 8, 50, 64, 132,
             "NVIDIA H200 SXM data sheet; one 400 Gb/s adapter a GPU, PCIe 5 x16"),
    Hardware("h800", 79.6, 989.4, 1978.9, 0, 3.35, 200, 8, 50, 64, 132,
             "H100 with half the NVLink (DeepSeek-V3 report, 3.1); one 400 Gb/s adapter a GPU"),
    Hardware("b200", 179.1, 2250, 4500, 9000, 8.0, 900, 8, 50, 64, 148,
             "NVIDIA DGX B200 data sheet, an eighth of the system, dense; one 400 Gb/s adapter a GPU"),
    Hardware("b300", 277.5, 2250, 4500, 13500, 8.0, 900, 8, 100, 64, 148,
             "NVIDIA DGX B300 data sheet, an eighth of the system, dense; one 800 Gb/s adapter a GPU"),
    Hardware("gb200", 185.0, 2500, 5000, 10000, 8.0, 900, 64, 50, 225, 148,
             "NVIDIA GB200 NVL72 data sheet, a 72nd of the rack, dense; one 400 Gb/s adapter a GPU; half a Grace link of 450 GB/s"),
    Hardware("gb300", 277.5, 2500, 5000, 15000, 8.0, 900, 64, 100, 225, 148,
             "NVIDIA GB300 NVL72 data sheet, a 72nd of the rack, dense; one 800 Gb/s adapter a GPU; half a Grace link of 450 GB/s"),
)
KNOWN = MappingProxyType({row.name: row for row in _ROWS})


def find_hardware(name: str) -> Hardware:
    """The accelerator of that name, or the one that a YAML file describes.

    Raises: HardwareError that says what there is, or what is wrong with the file.
    """
    if name.lower() in KNOWN:
        return KNOWN[name.lower()]
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return _from_file(Path(name))
    raise HardwareError(f"--hardware {name}: there are {', '.join(KNOWN)}; or give a FILE.yaml with the fields of one of them")


def bf16_peak(device: str) -> float | None:
    """Dense bf16 TFLOP/s of a device by the name that its driver gives it ("NVIDIA H100 80GB HBM3"); None where that is not known."""
    name = device.lower()
    if "pcie" in name or " nvl" in name:  # other chips under the same name
        return None
    found = [row for row in _ROWS if row.name in name]
    return max(found, key=lambda row: len(row.name)).bf16 if found else None


def _from_file(path: Path) -> Hardware:
    import yaml

    where = f"--hardware {path}"
    try:
        table = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HardwareError(f"{where}: the file cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: not UTF-8, or a date or number that there is none of
        raise HardwareError(f"{where}: the file is not YAML ({' '.join(str(error).split())})") from None
    fields = {field.name: field.type for field in dataclasses.fields(Hardware)}
    if not isinstance(table, dict):
        raise HardwareError(f"{where}: the file must be a table with {', '.join(fields)}, or `like` and some of them")
    values = {"name": path.stem, "source": str(path)}
    like = table.pop("like", None)
    if like is not None:
        if not isinstance(like, str) or like not in KNOWN:
            raise HardwareError(f"{where}: like: {like} is none of {', '.join(KNOWN)}")
        values = dataclasses.asdict(KNOWN[like]) | values
    unknown = sorted(map(str, set(table) - set(fields)))
    if unknown:
        raise HardwareError(f"{where}: unknown {', '.join(unknown)}; there are like, {', '.join(fields)}")
    values |= table
    missing = [name for name in fields if name not in values]
    if missing:
        raise HardwareError(f"{where}: {', '.join(missing)} missing (give them, or `like: h100`)")
    may_be_zero = ("fp8", "fp4")
    for name, kind in fields.items():
        if kind == "str":
            values[name] = str(values[name])
            continue
        value = values[name]
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (value == 0 and name not in may_be_zero) or (kind == "int" and value != int(value)):
            raise HardwareError(f"{where}: {name}: {value!r} is not {'a whole number' if kind == 'int' else 'a number'} above 0")
    return Hardware(**values)

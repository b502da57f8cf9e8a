"""Accelerators and links that plans assume, each number with its source, or a YAML file of the user.

Peaks are dense (without structured sparsity), from the data sheets. Memory is what nvidia-smi shows, in GiB. NVLink and
network bandwidths are of one GPU in one direction. A domain is the number of GPUs that NVLink connects; of the 72 GPUs
of an NVL72 rack 64 count, because jobs use powers of two.

A YAML file has the same fields: `like: h100` and what differs, or all of them; `constants`, which no data sheet has and
`scripts/plan.py calibrate --from` fits to runs (local_calibration.py); and under `calibration` the runs they were
fitted to.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from arguments.mechanisms.format_kinds.declaration import FormatDeclaration
from arguments.mechanisms.formats import quantized_format
from arguments.regular_file import regular_file

if TYPE_CHECKING:
    from arguments.precision import PrecisionArgs

GIB = 2.0**30
RESERVED_BYTES = 3 * GIB
"""Bytes of a device that tensors cannot use.

An assumption: about 0.5 GiB for the context, the rest for NCCL's channels and workspaces.
"""


class HardwareError(ValueError):
    """--hardware is unknown, or a file that cannot be used."""


@dataclass(frozen=True)
class Constants:
    """Fitted fractions and times.

    The first four are fitted to published runs (calibrate.py). `launch` is from Moonlight's published comparison of
    recompute (Megatron-Bridge, perf-activation-recompute): recomputing the up-projections of latent attention, some 30
    kernels and little work for the device, takes 24 ms over 27 layers. Qwen3-30B's fastest run is an upper bound: 6.6
    ms for the 200 kernels of a layer.

    Attributes:
        gemm_bf16: fraction of the peak that large bf16 GEMMs reach.
        gemm_fp8: the same in fp8.
        fill: cost of filling and draining the pipeline of an output tile, in elements of the contracted dimension.
            Large GEMMs hardly notice it, narrow experts do.
        iteration: seconds of an iteration in which the device is idle, between microbatches of one and of the next.
        memory: fraction of the memory bandwidth that elementwise kernels reach.
        launch: seconds of the host for one kernel of an eager program, with the Python of its modules and autograd.
        latency: seconds of an empty collective.
        links: bandwidth of communication, as a multiple of the fractions in interconnect.py.
        update: fraction of the memory bandwidth that the optimizer step reaches.
    """

    gemm_bf16: float = 0.70
    gemm_fp8: float = 0.52
    fill: float = 512
    iteration: float = 0.02
    memory: float = 0.8
    launch: float = 30e-6
    latency: float = 20e-6
    links: float = 1.0
    update: float = 0.8


@dataclass(frozen=True)
class CalibrationRun:
    """A run that the constants of a hardware file were fitted to; error bars are derived from it (uncertainty.py).

    Attributes:
        seconds: measured time of an iteration.
        predicted: time with the fitted constants.
        left_out: time with constants fitted to the other runs.
    """

    name: str
    seconds: float
    predicted: float
    left_out: float | None
    world_size: int
    features: tuple[str, ...]
    parameters: float
    sizes: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Hardware:
    """One kind of accelerator in its usual system.

    Attributes:
        memory_gib: of one device.
        bf16: dense TFLOP/s of GEMMs, like fp8 and fp4; 0 if the device lacks the format, whose GEMMs then run in bf16.
        hbm_tb_s: memory bandwidth.
        nvlink_gb_s: of one GPU in one direction.
        domain: number of GPUs that NVLink connects.
        network_gb_s: of one GPU in one direction.
        host_gb_s: to and from host memory, in one direction.
        num_sms: multiprocessors, some of which token exchange may occupy.
        source: of all these numbers.
        node: devices of a node, as a launcher counts them.
        synchronous: kernels run while they are called (CPU), so the host's time adds to the device's.
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
    node: int = 8
    synchronous: bool = False
    constants: Constants = Constants()
    calibration: tuple[CalibrationRun, ...] = ()

    @property
    def is_blackwell(self) -> bool:
        """Whether it has the tensor cores of Blackwell, the ones with fp4."""
        return self.fp4 > 0

    @property
    def is_blackwell_ultra(self) -> bool:
        """Whether it is the later Blackwell, whose fp4 GEMMs are three times as fast as those in fp8."""
        return self.fp4 > 2.5 * self.fp8 > 0

    @property
    def usable_bytes(self) -> float:
        """Memory of a device that tensors can use."""
        return self.memory_gib * GIB - RESERVED_BYTES

    def gemm_width(self, precision: PrecisionArgs) -> str:
        """Return the width of the GEMMs of these flags, one of the fields for rates.

        Quantized GEMMs that the device lacks are computed in bf16.
        """
        fmt = quantized_format(precision)
        return fmt.flags.name if fmt is not None and self.has_gemms(fmt) else "bf16"

    def has_gemms(self, fmt: FormatDeclaration) -> bool:
        """Return whether it has GEMMs in a format: MXFP8 and fewer bits since Blackwell, 8 bits since Hopper."""
        return getattr(self, fmt.flags.name) > 0 and (self.is_blackwell or not fmt.needs_blackwell)

    def has_narrow_gemms(self, width: str) -> bool:
        """Return whether GEMMs of a width are computed in fewer bits than 16."""
        return width != "bf16" and self.fp8 > 0

    def gemm_fraction(self, width: str) -> float:
        """Return the fraction of the peak that GEMMs of a width reach."""
        return self.constants.gemm_fp8 if self.has_narrow_gemms(width) else self.constants.gemm_bf16

    def peak(self, width: str) -> float:
        """Return the dense FLOP/s of GEMMs in "bf16", "fp8" or "fp4", or in the next wider format that it has."""
        found = {"fp4": self.fp4 or self.fp8 or self.bf16, "fp8": self.fp8 or self.bf16}.get(width, self.bf16)
        return found * 1e12


_KNOWN = (
    Hardware(
        "a100",
        *(80.0, 312, 0, 0, 2.04, 300, 8, 25, 32, 108),
        "NVIDIA A100 80GB SXM data sheet; DGX A100: one 200 Gb/s adapter a GPU, PCIe 4 x16",
    ),
    Hardware(
        "h100",
        *(79.6, 989.4, 1978.9, 0, 3.35, 450, 8, 50, 64, 132),
        "NVIDIA H100 SXM data sheet; DGX H100: one 400 Gb/s adapter a GPU, PCIe 5 x16",
    ),
    Hardware(
        "h200",
        *(140.4, 989.4, 1978.9, 0, 4.8, 450, 8, 50, 64, 132),
        "NVIDIA H200 SXM data sheet; one 400 Gb/s adapter a GPU, PCIe 5 x16",
    ),
    Hardware(
        "h800",
        *(79.6, 989.4, 1978.9, 0, 3.35, 200, 8, 50, 64, 132),
        "H100 with half the NVLink (DeepSeek-V3 report, 3.1); one 400 Gb/s adapter a GPU",
    ),
    Hardware(
        "b200",
        *(179.1, 2250, 4500, 9000, 8.0, 900, 8, 50, 64, 148),
        "NVIDIA DGX B200 data sheet, an eighth of the system, dense; one 400 Gb/s adapter a GPU",
    ),
    Hardware(
        "b300",
        *(277.5, 2250, 4500, 13500, 8.0, 900, 8, 100, 64, 148),
        "NVIDIA DGX B300 data sheet, an eighth of the system, dense; one 800 Gb/s adapter a GPU",
    ),
    Hardware(
        "gb200",
        *(185.0, 2500, 5000, 10000, 8.0, 900, 64, 50, 225, 148),
        "NVIDIA GB200 NVL72 data sheet, a 72nd of the rack, dense; one 400 Gb/s adapter a GPU; half a Grace link "
        "of 450 GB/s",
        node=4,
    ),
    Hardware(
        "gb300",
        *(277.5, 2500, 5000, 15000, 8.0, 900, 64, 100, 225, 148),
        "NVIDIA GB300 NVL72 data sheet, a 72nd of the rack, dense; one 800 Gb/s adapter a GPU; half a Grace link "
        "of 450 GB/s",
        node=4,
    ),
    Hardware(
        "cpu",
        *(16.0, 0.1, 0, 0, 0.01, 1.0, 8, 1.0, 10, 64),
        "a core of a server as a rank: round numbers to start `plan.py calibrate --from` with, no measurement",
        synchronous=True,
        constants=Constants(
            gemm_bf16=0.5, fill=16, iteration=0.01, memory=0.5, launch=20e-6, latency=200e-6, update=0.5
        ),
    ),
)
KNOWN_HARDWARE = MappingProxyType({row.name: row for row in _KNOWN})


def find_hardware(name: str) -> Hardware:
    """Return the accelerator of that name, or the one that a YAML file describes.

    Raises:
        HardwareError: if it is unknown or the file is invalid.
    """
    if name.lower() in KNOWN_HARDWARE:
        return KNOWN_HARDWARE[name.lower()]
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return _from_file(Path(name))
    raise HardwareError(
        f"--hardware {name}: there are {', '.join(KNOWN_HARDWARE)}; or give a FILE.yaml with the fields of one of them"
    )


def find_device(driver_name: str) -> Hardware | None:
    """Return the hardware by the name that its driver gives it ("NVIDIA H100 80GB HBM3"), None if unknown."""
    words = re.findall(r"[a-z0-9]+", driver_name.lower())
    if "pcie" in words or "nvl" in words:  # other chips under the same name
        return None
    return next((row for row in _KNOWN if row.name in words), None)


def bf16_peak_tflops(device: str) -> float | None:
    """Return the dense bf16 TFLOP/s by the name that the driver gives the device, None if unknown."""
    found = find_device(device)
    return found.bf16 if found else None


def _from_file(path: Path) -> Hardware:
    import yaml

    where = f"--hardware {path}"
    try:
        table = yaml.safe_load(regular_file(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise HardwareError(f"{where}: the file cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: not UTF-8, or an invalid date or number
        raise HardwareError(f"{where}: the file is not YAML ({' '.join(str(error).split())})") from None
    numbers = {field.name: str(field.type) for field in dataclasses.fields(Hardware)}
    del numbers["constants"], numbers["calibration"]
    if not isinstance(table, dict):
        raise HardwareError(f"{where}: the file must be a table with {', '.join(numbers)}, or `like` and some of them")
    values: dict[str, Any] = {"name": path.stem, "source": str(path)}
    like = table.pop("like", None)
    if like is not None:
        if not isinstance(like, str) or like not in KNOWN_HARDWARE:
            raise HardwareError(f"{where}: like: {like} is none of {', '.join(KNOWN_HARDWARE)}")
        base = KNOWN_HARDWARE[like]
        values = {name: getattr(base, name) for name in (*numbers, "constants")} | values
    unknown = sorted(map(str, set(table) - set(numbers) - {"constants", "calibration"}))
    if unknown:
        raise HardwareError(
            f"{where}: unknown {', '.join(unknown)}; there are like, {', '.join(numbers)}, constants, calibration"
        )
    values |= {name: value for name, value in table.items() if name in numbers}
    optional = {field.name for field in dataclasses.fields(Hardware) if field.default is not dataclasses.MISSING}
    missing = [name for name in numbers if name not in values and name not in optional]
    if missing:
        raise HardwareError(f"{where}: {', '.join(missing)} missing (give them, or `like: h100`)")
    for name, value in values.items():
        if name in numbers:
            values[name] = _checked(where, name, numbers[name], value)
    constants = _read_constants(where, table.get("constants") or {})
    values["constants"] = dataclasses.replace(values.get("constants", Constants()), **constants)
    runs = table.get("calibration") or []
    if not isinstance(runs, list):
        raise HardwareError(f"{where}: calibration: {runs!r} is no list of runs")
    values["calibration"] = tuple(_calibration_run(where, run) for run in runs)
    return Hardware(**values)


MAY_BE_ZERO = ("fp8", "fp4", "fill", "iteration", "launch", "latency")


def _checked(where: str, name: str, kind: str, value: object) -> Any:
    if kind == "str":
        return str(value)
    if kind == "bool":
        if not isinstance(value, bool):
            raise HardwareError(f"{where}: {name}: {value!r} is neither true nor false")
        return value
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not math.isfinite(value)
        or value < 0
        or (value == 0 and name not in MAY_BE_ZERO)
        or (kind == "int" and value != int(value))
    ):
        raise HardwareError(
            f"{where}: {name}: {value!r} is not {'a whole number' if kind == 'int' else 'a number'} above 0"
        )
    return value


def _read_constants(where: str, table: object) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise HardwareError(f"{where}: constants: {table!r} is no table")
    names = [field.name for field in dataclasses.fields(Constants)]
    unknown = sorted(map(str, set(table) - set(names)))
    if unknown:
        raise HardwareError(f"{where}: constants: unknown {', '.join(unknown)}; there are {', '.join(names)}")
    prefixes = {name: "" if name in MAY_BE_ZERO else "constants: " for name in names}
    return {name: _checked(where, f"{prefixes[name]}{name}", "float", value) for name, value in table.items()}


def _calibration_run(where: str, table: object) -> CalibrationRun:
    names = [field.name for field in dataclasses.fields(CalibrationRun)]
    if not isinstance(table, dict) or {str(name) for name in table} != set(names):
        text = f"every run is a table with {', '.join(names)}, as `plan.py calibrate --from` writes them"
        raise HardwareError(f"{where}: calibration: {text}")
    numbers = {name: _checked(where, name, "float", table[name]) for name in ("seconds", "predicted", "parameters")}
    left_out = None if table["left_out"] is None else _checked(where, "left_out", "float", table["left_out"])
    features, sizes = table["features"], table["sizes"]
    if not isinstance(features, list) or not isinstance(sizes, dict):
        raise HardwareError(f"{where}: calibration: features is a list and sizes a table")
    return CalibrationRun(
        name=str(table["name"]),
        left_out=left_out,
        world_size=_checked(where, "world_size", "int", table["world_size"]),
        features=tuple(map(str, features)),
        sizes=tuple((str(name), _checked(where, name, "int", value)) for name, value in sizes.items()),
        **numbers,
    )

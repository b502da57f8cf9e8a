"""Collectives of tensor-parallel linears in chunks, next to their GEMMs (--tp-comm-overlap).

| collective | how | hidden by |
|---|---|---|
| all-gather of rows before a GEMM | ring: each step passes one rank's rows on | the GEMM of the rows before them |
| reduce-scatter of rows after a GEMM | chunks of every rank's rows | the GEMM of the next chunk |

The first GEMM of a ring needs no message, and the last chunk's reduce-scatter is not hidden, unless the caller has
another GEMM to run before it waits. Each GEMM has fewer rows and the same sums over the contracted dimension, and each
chunk is reduced over the same ranks.

Shape letters: s rows of one rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from arguments.parallel import ParallelArgs
from arguments.regular_file import regular_file
from moe_trainer.errors import UserError
from moe_trainer.parallel.collectives import CollectiveWork, reduce_scatter_flat
from moe_trainer.parallel.mappings import rows_per_rank
from moe_trainer.parallel.p2p import Receive, Send, exchange
from moe_trainer.parallel.state import Group

GEMM_NAMES = MappingProxyType({"linear_qkv": "qkv", "linear_proj": "proj", "linear_fc1": "fc1", "linear_fc2": "fc2"})
"""Last part of a layer's name -> TransformerEngine's name of its GEMMs."""

GEMMS = tuple(f"{linear}_{which}" for linear in GEMM_NAMES.values() for which in ("fprop", "dgrad", "wgrad"))

METHODS = ("ring_exchange", "pipeline", "bulk", "external")

SETTINGS = tuple(
    """
    method is_reduce_scatter num_sm cga_size set_sm_margin num_splits aggregate atomic_gemm use_ce fp8_buf
    comm_priority gemm_priority pipeline_rs_overlap_first_gemm
    """.split()
)
"""TransformerEngine's settings of a GEMM."""

DEFAULT_CHUNKS = 4  # TransformerEngine's default of a pipelined reduce-scatter

CONFIG_FLAG = "--tp-comm-overlap-cfg"


class OverlapFileError(UserError):
    """The file of --tp-comm-overlap-cfg is invalid."""


@dataclass(frozen=True)
class LinearOverlap:
    """What one linear overlaps.

    Attributes:
        gathers: the all-gather before a GEMM: of a column linear's input, of a row linear's output gradient.
        output_chunks: of a row linear's reduce-scatter; 1 for one call.
        input_grad_chunks: of the reduce-scatter of a column linear's input gradient; 1 for one call.
    """

    gathers: bool = False
    output_chunks: int = 1
    input_grad_chunks: int = 1


@dataclass(frozen=True)
class TpOverlap:
    """What the linears of a model overlap.

    Attributes:
        gathers: --tp-comm-overlap-ag.
        scatters: --tp-comm-overlap-rs.
        scatters_input_grads: --tp-comm-overlap-rs-dgrad; otherwise one call is hidden by the weight gradient's GEMM.
        bulk_dgrad, bulk_wgrad: flags of TransformerEngine's layers. The local layers start these collectives before the
            GEMMs that hide them in any case.
        config: of --tp-comm-overlap-cfg, by GEMM ("proj_fprop"). The local layers read "method" and "num_splits" of
            reduce-scatters; TransformerEngine's layers read all of it.
    """

    gathers: bool = True
    scatters: bool = True
    scatters_input_grads: bool = False
    bulk_dgrad: bool = True
    bulk_wgrad: bool = True
    config: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    @staticmethod
    def from_args(parallel: ParallelArgs) -> "TpOverlap | None":
        """Return what the flags ask for; None without --tp-comm-overlap.

        Raises:
            OverlapFileError: if the file of --tp-comm-overlap-cfg is invalid.
        """
        if not parallel.tp_comm_overlap:
            return None
        path = parallel.tp_comm_overlap_cfg
        return TpOverlap(
            parallel.tp_comm_overlap_ag,
            parallel.tp_comm_overlap_rs,
            parallel.tp_comm_overlap_rs_dgrad,
            parallel.tp_comm_bulk_dgrad,
            parallel.tp_comm_bulk_wgrad,
            {} if path is None else _read_config(path),
        )

    def for_linear(self, name: str, size: int) -> LinearOverlap:
        """Return what the linear with this global name overlaps, over `size` ranks."""
        gemm = GEMM_NAMES.get(name.rpartition(".")[2], "")
        return LinearOverlap(
            self.gathers,
            self._chunks(f"{gemm}_fprop", size) if self.scatters else 1,
            self._chunks(f"{gemm}_dgrad", size) if self.scatters_input_grads else 1,
        )

    def _chunks(self, gemm: str, size: int) -> int:
        settings = self.config.get(gemm, {})
        chunks = size if settings.get("method") == "ring_exchange" else settings.get("num_splits", DEFAULT_CHUNKS)
        assert isinstance(chunks, int)
        return chunks


def _read_config(path: str) -> dict[str, dict[str, object]]:
    """Read a file of TransformerEngine's settings by GEMM."""
    import yaml

    def refuse(what: str) -> OverlapFileError:
        return OverlapFileError(f"{CONFIG_FLAG} {path}: {what}")

    try:
        root = yaml.safe_load(regular_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise refuse(" ".join(str(error).split())) from None
    root = {} if root is None else root
    if not isinstance(root, dict):
        raise refuse("the file is no table of GEMMs")
    for gemm, settings in root.items():
        if gemm not in GEMMS:
            raise refuse(f"{gemm} is no GEMM; choose from {', '.join(GEMMS)}")
        if not isinstance(settings, dict):
            raise refuse(f"{gemm} is no table of settings")
        for name in settings:
            if name not in SETTINGS:
                raise refuse(f"{gemm}: {name} is no setting; choose from {', '.join(SETTINGS)}")
        method, splits = settings.get("method", METHODS[0]), settings.get("num_splits", 1)
        if method not in METHODS:
            raise refuse(f"{gemm}: method {method} must be one of {', '.join(METHODS)}")
        if type(splits) is not int or splits < 1:
            raise refuse(f"{gemm}: num_splits {splits} must be a whole number of at least 1")
    return root


def gather_and_multiply(
    x: Tensor, weight: Tensor, group: Group, *, transposed: bool = False, keep_rows: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return all_gather(x) @ weight^T (or @ weight if `transposed`), and all_gather(x) if `keep_rows`.

    Shapes: x [s, ..., K] -> [s * size, ..., N].
    Communication: size - 1 messages to the next rank, each while the rows before it are multiplied.
    """
    matrix = weight if transposed else weight.t()
    y = x.new_empty(group.size * x.shape[0], *x.shape[1:-1], matrix.shape[1])
    whole = x.new_empty(group.size * x.shape[0], *x.shape[1:]) if keep_rows else None
    targets = y.view(group.size, -1, matrix.shape[1])
    for source, rows in _ring(x, group, whole):
        torch.mm(rows.view(-1, rows.shape[-1]), matrix, out=targets[source])
    return y, whole


def _ring(x: Tensor, group: Group, whole: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """Yield (group rank, its rows), this rank's first; the next rows are on their way meanwhile."""
    rows = x.contiguous()
    shards = None if whole is None else whole.view(group.size, *x.shape)
    if shards is not None:
        shards[group.rank].copy_(rows)
    for step in range(group.size):
        source, before = (group.rank - step) % group.size, (group.rank - step - 1) % group.size
        if step == group.size - 1:
            yield source, rows
            return
        received = torch.empty_like(rows) if shards is None else shards[before]
        onward, back = Send(rows, (group.rank + 1) % group.size), Receive(received, (group.rank - 1) % group.size)
        work = exchange([onward, back], group)
        yield source, rows
        work.wait()
        rows = received


class PendingChunks:
    """Reduce-scatters that have started, with their operands."""

    def __init__(self) -> None:
        self._started: list[tuple[CollectiveWork, Tensor]] = []

    def add(self, work: CollectiveWork, operand: Tensor) -> None:
        self._started.append((work, operand))

    def wait(self) -> None:
        for work, _ in self._started:
            work.wait()
        self._started.clear()


def multiply_and_scatter(
    x: Tensor, weight: Tensor, group: Group, chunks: int, *, transposed: bool = False
) -> tuple[Tensor, PendingChunks]:
    """Start the reduce-scatter of x @ weight^T (or @ weight if `transposed`) in chunks; return the output and a handle.

    Shapes: x [s * size, ..., K] -> [s, ..., N].
    """
    size = rows_per_rank(x, group)
    matrix = (weight if transposed else weight.t()).expand(group.size, -1, -1)
    ranks = x.reshape(group.size, size, *x.shape[1:])
    out, pending = x.new_empty(size, *x.shape[1:-1], matrix.shape[2]), PendingChunks()
    chunks = max(1, min(chunks, size))
    for target, rows in zip(out.tensor_split(chunks), ranks.tensor_split(chunks, dim=1)):
        # a batch, so that no rows are copied: the chunk has rows of every rank
        partial = torch.bmm(rows.flatten(1, -2), matrix)
        pending.add(reduce_scatter_flat(target.view(-1), partial.view(-1), group, async_op=True), partial)
    return out, pending

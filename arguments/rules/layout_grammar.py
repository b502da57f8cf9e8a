"""The pipeline layout string: which layers are on which pipeline stage.

Grammar of --pipeline-model-parallel-layout: stages separated by `|`; inside a stage the characters E (embedding), t
(decoder layer), m (multi-token prediction layer) and L (loss); commas are ignored; `x*N` repeats one character (also
`|`), `(...)*N` repeats a group. Groups are unfolded first, then single characters; groups do not nest.

Example: `Et*3|(tt|)*6L` is eight stages: Ettt, then six of tt, then L.

The reader is pure arithmetic on strings, so the shape of the model can use the same result as the rules. What a layout
must satisfy for a given model (counts of t and m, stages per rank) is asked with `problems`.

Source: Megatron-LM's documentation of the flag (behaviour only).
"""

import re
from dataclasses import dataclass

EMBEDDING, DECODER, MTP, LOSS = "E", "t", "m", "L"
_MAX_STAGES = 100_000  # a slip such as t*1000000000 must not fill the memory of a login node


@dataclass(frozen=True)
class PipelineLayout:
    """A layout as read: one string over E, t, m, L for each stage, in pipeline order.

    Stage i belongs to pipeline rank i % pp and is that rank's virtual chunk i // pp.
    """

    stages: tuple[str, ...]

    def count(self, kind: str) -> int:
        """How often one kind of layer occurs in all stages."""
        return sum(stage.count(kind) for stage in self.stages)

    def virtual_stages(self, pp: int) -> int | None:
        """Stages per pipeline rank, or None when they do not divide."""
        return len(self.stages) // pp if pp > 0 and len(self.stages) % pp == 0 else None

    def stages_with(self, kind: str) -> list[int]:
        """Indices of the stages that hold at least one layer of this kind."""
        return [index for index, stage in enumerate(self.stages) if kind in stage]

    def mtp_standalone(self, pp: int) -> bool:
        """Return whether the MTP layers are on another pipeline rank than the last one."""
        holders = self.stages_with(MTP)
        return bool(holders) and holders[0] % pp != pp - 1


def read_layout(text: str) -> PipelineLayout:
    """Read a layout string.

    Raises: ValueError saying which part is not understood.
    """
    flat = text.replace(",", "").replace(" ", "").strip("'\"")
    flat = re.sub(r"\(([^()]*)\)\*(\d+)", lambda found: _repeat(found.group(1), found.group(2)), flat)
    flat = re.sub(r"([EtmL|])\*(\d+)", lambda found: _repeat(found.group(1), found.group(2)), flat)
    unknown = sorted(set(flat) - set("EtmL|"))
    if unknown:
        raise ValueError(
            f"{' '.join(unknown)} is not part of a layout (E embedding, t decoder layer, m MTP layer, L loss, | next "
            "stage, x*N and (...)*N repeat, without nesting)"
        )
    return PipelineLayout(tuple(flat.split("|")))


def _repeat(part: str, times: str) -> str:
    if len(times) > 6 or len(part) * int(times) > _MAX_STAGES:
        raise ValueError(f"{part}*{times} is longer than any model")
    return part * int(times)


def problems(layout: PipelineLayout, pp: int, num_layers: int | None, mtp_depths: int) -> list[str]:
    """Everything that keeps a layout from fitting a model, as clauses that can follow the flag and its value."""
    return [
        *_shape_problems(layout, pp),
        *_count_problems(layout, num_layers),
        *_mtp_problems(layout, pp, mtp_depths),
    ]


def _shape_problems(layout: PipelineLayout, pp: int) -> list[str]:
    found = []
    if layout.virtual_stages(pp) is None:
        found.append(f"has {len(layout.stages)} stages, which must be a multiple of the {pp} pipeline ranks")
    if layout.count(EMBEDDING) != 1 or not layout.stages[0].startswith(EMBEDDING):
        found.append("must begin with its only E (embedding)")
    if layout.count(LOSS) != 1 or not layout.stages[-1].endswith(LOSS):
        found.append("must end with its only L (loss)")
    return found


def _count_problems(layout: PipelineLayout, num_layers: int | None) -> list[str]:
    decoders = layout.count(DECODER)
    if num_layers is None or decoders == num_layers:
        return []
    return [f"holds {decoders} decoder layers (t), but the model has --num-layers {num_layers}"]


def _mtp_problems(layout: PipelineLayout, pp: int, mtp_depths: int) -> list[str]:
    count = layout.count(MTP)
    if count != mtp_depths:
        return [f"holds {count} MTP layers (m), but the model has --mtp-num-layers {mtp_depths}"]
    if not count:
        return []
    found = []
    order = "".join(layout.stages)
    if DECODER in order[order.index(MTP) :]:
        found.append("puts a decoder layer (t) after an MTP layer (m)")
    holders = layout.stages_with(MTP)
    if len(holders) > 1:
        found.append("spreads its MTP layers (m) over several stages; all must be in one")
        return found
    chunks = layout.virtual_stages(pp)
    rank, chunk = holders[0] % pp, holders[0] // pp
    if chunks is not None and chunk != chunks - 1:
        found.append("puts its MTP layers (m) into a chunk that is not the last one of its pipeline rank")
    if rank == 0 and pp > 1:
        found.append("puts its MTP layers (m) on pipeline rank 0")
    return found

"""What a rank of Megatron-LM has in memory: the names and order of its parameters, and the buffers that they are in.

Layers and experts are numbered from zero in every model chunk. An optimizer identifies parameters by number, which
follows from their order, as the offsets in a distributed optimizer's buffer do. Checkpoints in which an optimizer's
state lies as in memory need this to be read: the legacy format, and `dp_reshardable` (flat_states.py).
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arguments.mtp import num_mtp_depths
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.layer_spec import FUSED, NormPrefixes, has_te_names

EXPERT = ".experts.local_experts."
LOCAL_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_ANY_LAYER = re.compile(r"^(decoder|mtp)\.layers\.\d+\.(mtp_model_layer\.(layers\.\d+\.)?)?")
_IN_DEPTH = re.compile(r"mtp_model_layer\.(?:layers\.(\d+)\.)?")
_GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
_SINGLE = re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")
# the convolution of a Mamba mixer: the name in other checkpoints, and that of its parameters in the mixer
_CONVOLUTION = (".mixer.conv1d.", ".mixer.conv1d_")
# the order in which the modules of a model and of a layer register their parameters
_ORDER = (
    "embedding.word_embeddings.",
    "embedding.position_embeddings.",
    "decoder.layers.",
    "decoder.final_layernorm.",
    "decoder.final_norm.",
    "mtp.layers.",
    "output_layer.",
)
_IN_LAYER = tuple(
    "enorm. hnorm. eh_proj. mixer.conv1d. mixer.dt_bias mixer.A_log mixer.D mixer.in_proj. mixer.norm. mixer.out_proj. "
    "input_layernorm. self_attention.core_attention.softmax_offset "
    "self_attention.core_attention.indexer.linear_wq_b. self_attention.core_attention.indexer.linear_wk. "
    "self_attention.core_attention.indexer.k_norm. self_attention.core_attention.indexer.linear_weights_proj. "
    "self_attention.linear_proj. self_attention.linear_qkv. self_attention.linear_q_proj. "
    "self_attention.linear_q_down_proj. self_attention.linear_q_up_proj. self_attention.linear_kv_down_proj. "
    "self_attention.linear_kv_up_proj. self_attention.q_layernorm. self_attention.kv_layernorm. "
    "self_attention.k_layernorm. pre_mlp_layernorm. mlp.linear_fc1. mlp.linear_fc2. mlp.router. "
    "mlp.fc1_latent_proj. mlp.fc2_latent_proj. mlp.experts. mlp.shared_experts.gate_weight "
    "mlp.shared_experts.linear_fc1. mlp.shared_experts.linear_fc2. "
    "final_layernorm.".split()
)
_DEFAULT_BUCKET = 40_000_000
_START = 64  # a distributed optimizer's parameters begin at multiples of this
_END = 128  # and its buckets end at common multiples of this and the number of data-parallel ranks


@dataclass(frozen=True)
class LayoutSizes:
    """The mapping that wrote a checkpoint."""

    tp: int
    pp: int
    ep: int
    etp: int
    experts: int

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "LayoutSizes":
        """Derive the sizes from flags by destination."""

        def size(name: str, default: int = 1) -> int:
            return int(record.get(name) or default)

        tp = size("tensor_model_parallel_size")
        return cls(
            tp,
            size("pipeline_model_parallel_size"),
            size("expert_model_parallel_size"),
            size("expert_tensor_parallel_size", tp),
            size("num_experts", 0),
        )

    def folder(self, tp: int, pp: int, ep: int) -> str:
        return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if self.pp > 1 else "") + (f"_{ep:03d}" if self.ep > 1 else "")

    @property
    def local_experts(self) -> int:
        return self.experts // self.ep


def layer_number(name: str) -> int | None:
    """Return the number of the decoder layer that a name belongs to."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def count_layers(names: Sequence[str]) -> int:
    """Return the number of decoder layers of a model chunk, from its local names."""
    return 1 + max((int(match[1]) for match in map(_LAYER.match, names) if match), default=-1)


def global_name(name: str, first_layer: int, first_expert: int) -> str:
    """Return the global name for a name in a file, for local, Transformer Engine and grouped modules."""
    name = _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) + first_layer}.", name)
    name = _GROUPED.sub(lambda match: f"{EXPERT}{match[3]}.{match[1]}.{match[2]}", name)
    name = LOCAL_EXPERT.sub(lambda match: f"{EXPERT}{int(match[1]) + first_expert}.", name)
    for alone, fused in FUSED:
        name = name.replace(f".{fused}", f".{alone}")
    alone, fused = _CONVOLUTION
    name = name.replace(fused, alone)
    return name.replace(".transformer_layer.", ".mtp_model_layer.")


def local_name(name: str, first_layer: int, first_expert: int) -> str:
    """Return the inverse of `global_name`, for local modules and single experts."""
    name = _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) - first_layer}.", name)
    return LOCAL_EXPERT.sub(lambda match: f"{EXPERT}{int(match[1]) - first_expert}.", name)


def to_spec_name(name: str, record: Mapping[str, Any], norms: Sequence[NormPrefixes]) -> str:
    """Return a local name as the modules of the flags write it; `norms`: the fused ones of its layer."""
    if not has_te_names(record):
        return name
    layer = _ANY_LAYER.match(name)
    prefix = layer[0] if layer else ""
    for alone, fused in norms:
        if name.startswith(prefix + alone):  # a Mamba mixer has another norm inside
            name = prefix + fused + name.removeprefix(prefix + alone)
    name = name.replace(*_CONVOLUTION)
    if record.get("moe_grouped_gemm"):
        name = _SINGLE.sub(lambda match: f".experts.{match[2]}.{match[3]}{match[1]}", name)
    return name


def module_order_key(name: str, written: str) -> tuple:
    """Return a key that sorts tensors as Megatron-LM's modules register them, from the global and the written name.

    Raises:
        CheckpointError: for an unknown module.
    """
    unknown = CheckpointError(f"{name}: its place among the parameters of a rank of Megatron-LM is not known")
    block = next((number for number, start in enumerate(_ORDER) if name.startswith(start)), None)
    if block is None:
        raise unknown
    rest, layer, inner = name[len(_ORDER[block]) :], -1, (0, 0)
    if ".layers." in _ORDER[block]:
        text, _, rest = rest.partition(".")
        layer = int(text)
        in_depth = _IN_DEPTH.match(rest)
        if in_depth is not None:  # after what joins its input, before its norm
            rest, inner = rest[in_depth.end() :], (1, int(in_depth[1] or 0))
        elif rest.startswith("final_layernorm."):
            inner = (2, 0)
    if ".layer_norm_" in written:  # fused into the linear layer that follows, before its weight
        rest, _, _ = written.rpartition("layer_norm_")
        rest = _IN_DEPTH.sub("", rest.partition(".layers.")[2].partition(".")[2], count=1)
    inside = next((number for number, start in enumerate(_IN_LAYER) if rest.startswith(start)), None)
    if layer >= 0 and inside is None:
        raise unknown
    expert = LOCAL_EXPERT.search(name)
    number, module = (int(expert[1]), name.rpartition(".")[0][expert.end() :]) if expert else (-1, "")
    # all of fc1 first, or expert by expert
    among = (module, "", number) if _GROUPED.search(written) else ("", f"{number:09d}", module)
    fused = 0 if ".layer_norm_" in written else 1
    return block, layer, inner, -1 if inside is None or layer < 0 else inside, among, fused, name.endswith("bias"), name


def shared_embedding_names(record: Mapping[str, Any], pipeline_size: int) -> frozenset[str]:
    """Return the tensors that two pipeline stages share.

    They have a separate bucket in a distributed optimizer's buffer.
    """
    if pipeline_size == 1:
        return frozenset()
    if num_mtp_depths(record):
        return frozenset({"embedding.word_embeddings.weight"})
    if record.get("untie_embeddings_and_output_weights"):
        return frozenset()
    return frozenset({"embedding.word_embeddings.weight", "output_layer.weight"})


def buffer_offsets(
    numels: Sequence[tuple[str, int]], bucket_size: int | None, ranks: int, alone: frozenset[str], wide: bool
) -> Iterator[tuple[str, int, int]]:
    """Yield the offsets of parameters in a distributed optimizer's saved buffer, which has no bucket padding.

    Args:
        numels: (name, elements) in the order of the modules.
        bucket_size: elements, None for one bucket.
        ranks: data-parallel size.
        alone: names with a separate bucket.
        wide: --ddp-pad-buckets-for-high-nccl-busbw.

    Yields:
        (name, first element, elements); the last one ends where the buffer does.
    """
    end_at = math.lcm(ranks, _END, 2**16) if wide else math.lcm(ranks, _END)
    # at: in the buffer; bucket: where this one begins in it; saved: elements of earlier buckets
    at = bucket = saved = 0

    def close() -> None:
        nonlocal at, bucket, saved
        saved += at - bucket
        at = bucket = math.ceil(at / end_at) * end_at

    for name, numel in reversed(numels):
        at = math.ceil(at / _START) * _START
        if name in alone and at > bucket:
            close()
        yield name, saved + at - bucket, numel
        at += numel
        if name in alone or (bucket_size is not None and at - bucket >= bucket_size):
            close()


def bucketing(
    record: Mapping[str, Any], sizes: LayoutSizes, pp: int, chunk: int, expert: bool
) -> tuple[int | None, int, frozenset[str], bool]:
    """Return bucket size, data-parallel size, names with a separate bucket and padding, for `buffer_offsets`."""
    world = int(record.get("world_size") or sizes.tp * sizes.pp)
    dp_cp = world // (sizes.tp * sizes.pp)
    ranks = world // (sizes.etp * sizes.ep * sizes.pp) if expert else dp_cp
    bucket = None
    if record.get("overlap_grad_reduce") and pp == 0 and chunk == 0:
        data_ranks = max(dp_cp // int(record.get("context_parallel_size") or 1), 1)
        bucket = int(record.get("ddp_bucket_size") or max(_DEFAULT_BUCKET, 1_000_000 * data_ranks))
    return (
        bucket,
        ranks,
        shared_embedding_names(record, sizes.pp),
        bool(record.get("ddp_pad_buckets_for_high_nccl_busbw")),
    )

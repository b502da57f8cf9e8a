"""Estimate the seconds of one layer, one microbatch and one rank: compute, memory traffic, launches, communication.

* GEMM: 2 m n k FLOPs at a fraction of the device's peak, or the time to read and write the matrices if that is longer.
  The second is what makes many small experts slow. Quantization reads and writes the operands once more.
* Core attention: fractions of the peak that grow with the sequence length, measured on cuDNN kernels.
* Everything else is bound by memory bandwidth: saved tensors, gradients of their size, permuted tokens.
* With low-rank adapters (--lora-dim) backward has no weight gradients; the adapters' own GEMMs are not counted.
* A layer takes at least as long as the host needs to launch its kernels.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from arguments.layer_pattern import (
    MAMBA,
    MOE,
    compress_ratio,
    has_attention,
    has_mlp,
    is_linear,
    layer_letter,
    model_of_layer,
    uses_chunks,
    uses_window,
)
from arguments.mechanisms.attention_backends import get_attention_backend
from arguments.mechanisms.dispatchers import get_dispatcher
from arguments.mechanisms.format_kinds.eight_bit import OUTPUT_LAYER
from arguments.mechanisms.formats import TRANSPORT
from arguments.mechanisms.placements import get_placement
from arguments.mechanisms.sublayers import variant_of
from arguments.sparse_attention import is_sparse, use_gathered_keys
from moe_trainer.estimate.flops import core_attention_macs
from moe_trainer.estimate.interconnect import Interconnect, dispatch_combine_seconds
from moe_trainer.estimate.linear_attention import is_short_conv, linear_matrices
from moe_trainer.estimate.memory import ChunkBytes
from moe_trainer.estimate.parameters import compressed_attention_params
from moe_trainer.ops.block_sizes import DELTA_CHUNK

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.model import ModelArgs
    from arguments.parallel import ParallelArgs
    from moe_trainer.estimate.hardware import Hardware

# Memory passes: how often an element of [heads, queries, keys] is read or written in fp32. Counted in the torch code of
# ops/sparse_attention.py, ops/block_attention.py and ops/absorbed_mla.py. The Triton kernels write no scores and have
# not been measured, so these numbers are an upper bound for them.
INDEXER_SCORE_PASSES = 4
INDEXER_LOSS_PASSES = (7, 8)
"""For the heads of the indexer, and for the heads of attention."""
MASKED_ATTENTION_PASSES = (7, 14)
"""Forward and backward of masked attention without a fused kernel."""
GATHERED_ATTENTION_PASSES = (8, 13)
"""Forward and backward of attention to gathered keys, on [heads, queries, selected keys]."""
LATENT_PASSES = (3, 7, 7)
"""Memory passes over a latent for every query that selected it.

Forward, backward in the activation dtype, and backward in fp32, where its gradient is accumulated. Counted in
ops/absorbed_mla.py.
"""
ATTENTION_RATES = ((False, (0.679, 885), (0.574, 1421)), (True, (0.75, 1703), (0.556, 1161)))
"""(is Blackwell, forward, backward) of core attention.

Each pass has the fraction of the bf16 peak that long sequences approach, and the length that reaches half of it. Fitted
to cuDNN's TFLOP/s for 4K and 16K tokens, forward and backward: Hopper 553, 638 and 422, 523; Blackwell 1324, 1698 and
1083, 1298 (arXiv 2603.07685, section 6).
"""
ATTENTION_TILE_KEYS = 128
"""Keys that an attention kernel processes at a time: a window costs full tiles."""
SCORE_PASSES = (2, 4)
"""Forward and backward of attention without a fused kernel: passes over its scores besides those over what it saves."""
ATTENTION_BACKWARD_RATIO = 2.5
"""FLOPs of core attention in backward per FLOP in forward: five GEMMs instead of two, with recomputed scores."""
KERNELS_BY_PART = (
    ("attention", 22),
    ("latent attention", 38),
    ("feed-forward", 8),
    ("experts", 45),
    ("shared experts", 8),
)
"""Kernels launched in forward, by part, with the usual fusions; backward launches twice as many.

Estimates, without a published source.
"""
ROUTER_KERNELS = 12
"""Kernels of `experts` that belong to the router, which a graph may capture. An estimate."""
MLA_QUERY_CHANNELS = 192
"""Channels of a query head of latent attention (DeepSeek-V3: 128 + 64), for context parallelism's all-to-all."""
GRAPH_PARTS = (("attn", "attention"), ("attn", "latent attention"), ("mlp", "feed-forward"), ("moe", "experts"))
"""Parts that a captured module of --cuda-graph-modules covers."""
FP32_BYTES = 4.0
TF32_SLOWDOWN = 2
"""The bf16 peak over the TF32 peak (NVIDIA data sheets)."""


@dataclass(frozen=True)
class PassTime:
    """Seconds of one pass through a layer, by cause.

    Attributes:
        compute: on the device, or of the host if that takes longer.
        exchange: dispatch and combine of tokens between expert ranks.
        tensor: collectives of tensor parallelism.
        context: communication of context parallelism.
    """

    compute: float = 0.0
    exchange: float = 0.0
    tensor: float = 0.0
    context: float = 0.0

    def __add__(self, other: PassTime) -> PassTime:
        return PassTime(*map(operator.add, vars(self).values(), vars(other).values()))

    def scale(self, factor: float) -> PassTime:
        """Return this time multiplied by `factor`."""
        return PassTime(*(factor * part for part in vars(self).values()))

    @property
    def total(self) -> float:
        """Sum of all parts, without overlap."""
        return sum(vars(self).values())


def window_share(model: ModelArgs, length: float, layer_number: int) -> float:
    """Return the share of causal (query, key) pairs that a layer (from 1) scores; a window counts full tiles."""
    if model.attention_chunk_size is not None and uses_chunks(model, layer_number):
        return min(1.0, model.attention_chunk_size / length)
    left = model.window_size[0] if model.window_size is not None and uses_window(model, layer_number) else -1
    return min(1.0, 2.0 * (left + ATTENTION_TILE_KEYS) / length) if left >= 0 else 1.0


def gemm_seconds(hardware: Hardware, m: float, n: float, k: float, width: str = "bf16", size: int = 2) -> float:
    """Return the seconds of a [m, k] x [k, n] GEMM on the tensor cores.

    `width`: of the operands, as of Hardware.gemm_width. `size`: bytes of an element where the format is bf16 or wider.
    """
    narrow = hardware.has_narrow_gemms(width)
    peak = hardware.peak(width if narrow else "bf16") * hardware.gemm_fraction(width)
    if size == 4 and not hardware.synchronous:
        peak /= TF32_SLOWDOWN
    return 2.0 * m * n * (k + hardware.constants.fill) / peak


def cast_bytes(elements: float, size: int) -> float:
    """Return the bytes that a cast to 8 bits moves: it reads an operand and writes it for both directions."""
    return elements * (size + 2)


def hidden_tensor_shares(parallel: ParallelArgs) -> tuple[float, float]:
    """Return the shares of tensor-parallel communication, forward and backward, that --tp-comm-overlap may hide.

    Rings hide all of a gather, four chunks all of a scatter but the last one.
    """
    if not parallel.tp_comm_overlap:
        return 0.0, 0.0
    gathers = 0.5 if parallel.tp_comm_overlap_ag else 0.0
    return gathers + (0.375 if parallel.tp_comm_overlap_rs else 0.0), 2 * gathers


def attention_rates(hardware: Hardware, length: float) -> tuple[float, float]:
    """Return the FLOP/s of core attention, forward and backward, for a rank's sequence length."""
    peak = hardware.peak("bf16")
    if hardware.synchronous:  # a CPU's kernels multiply here as everywhere
        return (peak * hardware.constants.gemm_bf16,) * 2
    _, *both = next(row for row in ATTENTION_RATES if row[0] == hardware.is_blackwell)
    forward, backward = (fraction * peak * length / (length + half) for fraction, half in both)
    return forward, backward


class LayerTime:
    """Times of the layers of one command line.

    Layers with a sliding window or linear attention enter as the mean over the decoder's layers. Sparse attention
    computes dense scores where unselected keys are masked, and reads the latents of selected keys where they are
    gathered (arguments/sparse_attention.py).

    The constants that no data sheet has are fields of `Constants` (hardware.py), fitted to published runs of
    Megatron-LM by `scripts/plan.py calibrate`; the others are module constants with a source. None was measured on this
    program.

    Args:
        sizes: bytes of saved tensors, for the memory traffic.
        attention_length: of the mean token's sequence, if sequences are packed; None for --seq-length.
    """

    def __init__(
        self, args: Arguments, interconnect: Interconnect, sizes: ChunkBytes, attention_length: float | None = None
    ):
        self.args, self.interconnect, self.sizes = args, interconnect, sizes
        self.hardware, self.constants = interconnect.hardware, interconnect.hardware.constants
        model, parallel = args.model, args.parallel
        self.model, self.moe = model, args.moe
        self.tp, self.cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        self.etp, self.ep = parallel.etp_size, parallel.expert_model_parallel_size
        self.tokens, self.size = sizes.tokens, sizes.size
        self.routed_tokens = self.tokens // self.tp
        self.gemm_format = self.hardware.gemm_width(args.precision)
        self.memory_bandwidth = interconnect.hardware.hbm_tb_s * 1e12 * self.constants.memory
        self.recomputed = args.training.recomputed_modules
        self.fc1_factor = 2 if model.swiglu or model.quick_geglu else 1
        self.expert_ffn = (args.moe.moe_ffn_hidden_size or model.ffn_hidden_size) // self.etp
        self.key_width = model.qk_head_dim + model.qk_pos_emb_head_dim  # of latent attention
        self.has_indexer = variant_of(model).selects_keys
        self.is_sparse, self.gathers_keys = is_sparse(model, args.data.seq_length), use_gathered_keys(args)
        self.trains_indexer = self.has_indexer and bool(model.dsa_indexer_loss_coeff)
        self.length = attention_length or args.data.seq_length
        self.pairs = self.tokens * self.length / 2  # pairs of queries and visible keys
        linear = [is_linear(model, number) for number in range(model.num_layers)]
        self.linear_share = sum(linear) / len(linear)  # share of layers with a gated DeltaNet
        numbers, count = range(model.num_layers), model.num_layers
        softmax_layers = [number + 1 for number in numbers if not linear[number] and has_attention(model, number)]
        self.softmax_share = len(softmax_layers) / count
        indexed = [number for number in softmax_layers if variant_of(model_of_layer(model, number)).selects_keys]
        self.indexed_share = len(indexed) / max(1, len(softmax_layers))  # of those
        self.mamba_share = sum(layer_letter(model, number) == MAMBA for number in numbers) / count
        # of the layers without experts, those that have a feed-forward sublayer
        dense = [has_mlp(model, number) for number in numbers if layer_letter(model, number) != MOE]
        self.mlp_share = sum(dense) / max(1, len(dense))
        seen = [window_share(model, self.length, number) for number in softmax_layers]
        groups = [max(1, model_of_layer(model, number).query_groups // self.tp) for number in softmax_layers]
        # of keys and values of a rank, the mean over the layers
        self.key_value_channels = (
            sum(groups) / len(groups) * (model.kv_channels + model.value_width)
            if groups and not model.multi_latent_attention
            else 0.0
        )
        self.visible_share = sum(seen) / len(seen) if seen else 0.0  # share of pairs that softmax attention scores

    def gemm(self, m: float, n: float, k: float, count: int = 1, plain: bool = False) -> float:
        """Return the seconds of `count` GEMMs [m, k] x [k, n].

        `plain`: computed in bf16 regardless of the flags.
        """
        narrow = not plain and self.hardware.has_narrow_gemms(self.gemm_format)
        traffic = (m * k + n * k) * (1 if narrow else self.size) + m * n * self.size
        compute = gemm_seconds(self.hardware, m, n, k, self.gemm_format if narrow else "bf16", self.size)
        seconds = count * max(compute, traffic / self.memory_bandwidth)
        if narrow:  # quantization reads the operand and writes it for both directions
            seconds += cast_bytes(count * m * k, self.size) / self.memory_bandwidth
        return seconds

    def _gathered_attention(self) -> tuple[float, float]:
        """Return forward and backward of attention to gathered keys: one narrow GEMM pair per query."""
        model, heads = self.model, self.model.num_attention_heads // self.tp
        kv_rank, width = model.kv_lora_rank, model.kv_lora_rank + model.qk_pos_emb_head_dim
        selected = self.tokens * model.dsa_indexer_topk
        peak = self.hardware.peak("bf16") * self.constants.gemm_bf16 / (TF32_SLOWDOWN if self.size == 4 else 1)
        fwd = 2.0 * selected * heads * (width + kv_rank) / peak
        bwd = 2.0 * selected * heads * 3 * (width + kv_rank) / peak
        latent_io = (self.size * LATENT_PASSES[0], self.size * LATENT_PASSES[1] + FP32_BYTES * LATENT_PASSES[2])
        io = [
            FP32_BYTES * heads * passes + width * latent for passes, latent in zip(GATHERED_ATTENTION_PASSES, latent_io)
        ]
        fwd += selected * io[0] / self.memory_bandwidth
        bwd += selected * io[1] / self.memory_bandwidth
        # backward projects the queries to latents again, also for the weight gradient
        return fwd, bwd + self.gemm(self.tokens, heads * model.qk_head_dim, kv_rank, plain=True)

    def _core_attention(self) -> tuple[float, float]:
        """Return forward and backward of core attention, averaged over the layers."""
        fwd, bwd = self._softmax_attention()
        delta = self._delta_rule() if self.linear_share and not is_short_conv(self.model) else 0.0
        scanned = self._scan() if self.mamba_share else 0.0
        visible = self.softmax_share * self.visible_share
        fwd, bwd = visible * fwd + self.linear_share * delta, visible * bwd + self.linear_share * 2 * delta
        # backward computes a scan again
        return fwd + self.mamba_share * scanned, bwd + self.mamba_share * 3 * scanned

    def _scan(self) -> float:
        """Return the seconds of a chunked state-space scan in TF32: scores in a chunk, and the state."""
        model, heads = self.model, self.model.mamba_heads // self.tp
        widths = 2 * model.mamba_head_dim * model.mamba_state_dim + DELTA_CHUNK * (
            model.mamba_head_dim + model.mamba_state_dim
        )
        peak = self.hardware.peak("bf16") * self.constants.gemm_bf16 / TF32_SLOWDOWN
        return 2.0 * self.tokens * heads * widths / peak

    def _delta_rule(self) -> float:
        """Return the seconds of a chunked gated delta rule: four GEMMs of each head's state width (flops.py)."""
        heads, width = self.model.linear_num_value_heads // self.tp, self.model.linear_value_head_dim
        return self.gemm(self.tokens, width, width, 4 * heads, plain=True)

    def _softmax_attention(self) -> tuple[float, float]:
        """Return forward and backward of softmax attention, averaged over the layers that have it."""
        if not 0 < self.indexed_share < 1:
            return self._scored_attention(self.has_indexer)
        fwd, bwd = (
            self.indexed_share * sparse + (1 - self.indexed_share) * dense
            for sparse, dense in zip(self._scored_attention(True), self._scored_attention(False))
        )
        return fwd, bwd

    def _scored_attention(self, selects_keys: bool) -> tuple[float, float]:
        if selects_keys and self.gathers_keys:
            return self._gathered_attention()
        model, heads = self.model, self.model.num_attention_heads // self.tp
        latent_widths = self.key_width + model.v_head_dim
        widths = latent_widths if model.multi_latent_attention else model.kv_channels + model.value_width
        operations = self.tokens * self.length * heads * widths
        if variant_of(model).compresses_keys:
            operations = 2.0 * self.tokens * core_attention_macs(self.args, int(self.length)) / self.tp
        rates = attention_rates(self.hardware, self.length / self.cp)
        fwd, bwd = operations / rates[0], ATTENTION_BACKWARD_RATIO * operations / rates[1]
        if get_attention_backend(model).stores_scores and not self.hardware.synchronous:
            # all scores are computed, also those of later keys
            size = self.size if self.sizes.te_attends else FP32_BYTES
            scores = self.tokens * self.length * heads * size / self.memory_bandwidth
            fwd, bwd = (2 * time + count * scores for time, count in zip((fwd, bwd), SCORE_PASSES))
        if selects_keys and self.is_sparse:
            fwd, bwd = (
                time + FP32_BYTES * count * heads * self.pairs / self.memory_bandwidth
                for time, count in zip((fwd, bwd), MASKED_ATTENTION_PASSES)
            )
        return fwd, bwd

    def _indexer(self) -> tuple[float, float]:
        """Return (GEMMs of the indexer, scores, selection and loss), averaged over the layers.

        Both run in forward; scores are fp32 (TF32).
        """
        model = self.model
        if not self.has_indexer:
            return 0.0, 0.0
        index, width = model.dsa_indexer_n_heads, model.dsa_indexer_head_dim
        heads = model.num_attention_heads // self.tp
        matrices = self.gemm(self.tokens, index * width, model.q_lora_rank or model.hidden_size, plain=True)
        matrices += self.gemm(self.tokens, index + width, model.hidden_size, plain=True)
        operations, elements = 2.0 * self.pairs * index * width, self.pairs * index * INDEXER_SCORE_PASSES
        if self.trains_indexer:  # two gradients of the scores, and the target from attention's heads
            keys, wide = self.pairs, self.key_width
            if self.gathers_keys:
                keys, wide = self.tokens * model.dsa_indexer_topk, model.kv_lora_rank + model.qk_pos_emb_head_dim
            operations += 4.0 * self.pairs * index * width + 2.0 * keys * heads * wide
            elements += self.pairs * index * INDEXER_LOSS_PASSES[0] + keys * heads * INDEXER_LOSS_PASSES[1]
        peak = self.hardware.peak("bf16") / TF32_SLOWDOWN * self.constants.gemm_bf16
        scores = operations / peak + FP32_BYTES * elements / self.memory_bandwidth
        share = self.softmax_share * self.indexed_share
        return share * matrices, share * scores

    def _up_projections(self) -> float:
        """Return the seconds of the up-projections of latent attention."""
        model, heads = self.model, self.model.num_attention_heads // self.tp
        seconds = self.gemm(self.tokens, heads * (model.qk_head_dim + model.v_head_dim), model.kv_lora_rank)
        if model.q_lora_rank:
            seconds += self.gemm(self.tokens, heads * self.key_width, model.q_lora_rank)
        return seconds

    def _attention_gemms(self) -> float:
        """Return the forward seconds of the attention's projections, averaged over the layers."""
        seconds = self.softmax_share * self._softmax_projections() + self.mamba_share * self._mamba_projections()
        if not self.linear_share:
            return seconds
        sizes = (matrix.on_rank(self.tp) for matrix in linear_matrices(self.model))
        linear = sum(self.gemm(self.tokens, outputs, inputs) for inputs, outputs in sizes)
        return seconds + self.linear_share * linear

    def _mamba_projections(self) -> float:
        hidden, (into, inner) = self.model.hidden_size, self._mamba_channels()
        return self.gemm(self.tokens, into, hidden) + self.gemm(self.tokens, hidden, inner)

    def _mamba_channels(self) -> tuple[int, int]:
        """Return the channels that a Mamba mixer's projections make and read, of a rank."""
        model = self.model
        heads, groups = model.mamba_heads // self.tp, model.mamba_num_groups // self.tp
        inner = heads * model.mamba_head_dim
        return 2 * inner + 2 * groups * model.mamba_state_dim + heads, inner

    def _softmax_projections(self) -> float:
        model, hidden = self.model, self.model.hidden_size
        heads = model.num_attention_heads // self.tp
        if not model.multi_latent_attention:
            queries = heads * model.kv_channels
            wide = (2 * queries if model.attention_output_gate else queries) + self.key_value_channels
            return self.gemm(self.tokens, wide, hidden) + self.gemm(self.tokens, hidden, heads * model.value_width)
        if variant_of(model).compresses_keys:
            return self._compressed_projections(heads)
        seconds = self._up_projections() + self.gemm(self.tokens, hidden, heads * model.v_head_dim)
        if model.q_lora_rank is None:
            seconds += self.gemm(self.tokens, heads * self.key_width, hidden)
        else:
            seconds += self.gemm(self.sizes.rows, model.q_lora_rank, hidden)
        if model.head_wise_attn_gate:
            seconds += self.gemm(self.sizes.rows, model.num_attention_heads, hidden, plain=True)
        return seconds + self.gemm(self.sizes.rows, model.kv_lora_rank + model.qk_pos_emb_head_dim, hidden)

    def _compressed_projections(self, heads: int) -> float:
        """Return the seconds of the projections of DeepSeek-V4's attention; a compressor is one GEMM."""
        model, hidden = self.model, self.model.hidden_size
        width, latent, groups = model.v_head_dim, model.q_lora_rank or 0, model.o_groups // self.tp
        ratios = [compress_ratio(model, number) for number in range(model.num_layers)]
        matrices = sum(compressed_attention_params(model, ratio, matrices=True) for ratio in ratios) / len(ratios)
        compressors = matrices - compressed_attention_params(model, 0, matrices=True)
        seconds = self.gemm(self.sizes.rows, latent + width, hidden) + self.gemm(self.tokens, heads * width, latent)
        seconds += self.gemm(self.tokens, model.o_lora_rank, heads * width // groups, groups)
        seconds += self.gemm(self.tokens, hidden, groups * model.o_lora_rank)
        return seconds + self.gemm(self.sizes.rows, compressors / hidden, hidden, plain=True)

    def _mlp(self, width: int) -> float:
        hidden = self.model.hidden_size
        chunks = self.sizes.mlp_chunks
        tokens = self.tokens / chunks
        fc1 = self.gemm(tokens, self.fc1_factor * width // self.tp, hidden, chunks)
        return fc1 + self.gemm(tokens, hidden, width // self.tp, chunks)

    def _shared_experts(self) -> float:
        width = self.moe.moe_shared_expert_intermediate_size
        return self._mlp(width) if width else 0.0

    def _routed_experts(self) -> float:
        moe, hidden, num_experts = self.moe, self.model.hidden_size, self.moe.expert_count
        local = num_experts // self.ep
        reads, makes = moe.expert_widths(hidden)
        width = self.expert_ffn
        each, count = self.sizes.received / local / self.sizes.mlp_chunks, local * self.sizes.mlp_chunks
        seconds = self.gemm(each, self.fc1_factor * width, reads, count) + self.gemm(each, makes, width, count)
        if moe.moe_latent_size:
            seconds += self.gemm(self.routed_tokens, reads, hidden) + self.gemm(self.routed_tokens, hidden, reads)
        if moe.output_projection is not None:
            seconds += self.gemm(self.routed_tokens, hidden, hidden)
        return seconds + self.gemm(self.routed_tokens, num_experts, hidden, plain=True)

    def _permute(self) -> float:
        """Return the seconds of permuting tokens by expert and back, before and after the exchange."""
        rows = self.sizes.sent + (self.sizes.received if self.ep * self.etp > 1 else 0)
        return 2.0 * rows * sum(self.moe.expert_widths(self.model.hidden_size)) * self.size / self.memory_bandwidth

    def _page_copies(self, is_moe: bool) -> float:
        """Return the seconds in which a pass copies what the experts save to or from pages."""
        if not is_moe or not self.moe.moe_paged_stash:
            return 0.0
        channels = self.moe.expert_widths(self.model.hidden_size)[0] + self.fc1_factor * self.expert_ffn
        return 2.0 * self.sizes.received * channels * self.size / self.memory_bandwidth

    def _transport_casts(self, is_moe: bool) -> tuple[float, float]:
        """Return the seconds of casts to and from what is sent rounded, forward and backward, by one kernel each."""
        moe = self.moe
        if not is_moe or self.ep == 1:
            return 0.0, 0.0
        reads, makes = moe.expert_widths(self.model.hidden_size)
        sent = self.sizes.sent if get_dispatcher(moe).sends_copies else self.routed_tokens
        rows = (sent + self.sizes.received) * (self.size + TRANSPORT.copy_bytes) / self.memory_bandwidth
        forward = rows * reads if moe.moe_dispatch_fwd_dtype == TRANSPORT.key else 0.0
        return forward, rows * makes if moe.moe_combine_bwd_dtype == TRANSPORT.key else 0.0

    def _host_waits(self, is_moe: bool) -> float:
        """Return the seconds in which the device waits while the host reads the token counts of an MoE layer."""
        moe = self.moe
        is_fixed = moe.moe_expert_rank_capacity_factor is not None or moe.moe_pad_expert_input_to_capacity
        is_whole = self.args.training.cuda_graph_impl == "full_iteration"
        if not is_moe or self.ep == 1 or is_fixed or is_whole or self.hardware.synchronous:
            return 0.0
        return self.constants.latency + self.constants.launch

    def host_seconds(self, is_moe: bool) -> float:
        """Return the seconds in which the host launches the kernels of a forward pass."""
        graphs = self.args.training.captured_modules
        if "layer" in graphs or self.args.training.cuda_graph_impl == "full_iteration":
            return 0.0
        parts = {"latent attention" if self.model.multi_latent_attention else "attention"}
        parts.add("experts" if is_moe else "feed-forward")
        if is_moe and self.moe.moe_shared_expert_intermediate_size:
            parts.add("shared experts")
        parts -= {part for module, part in GRAPH_PARTS if module in graphs}
        count = sum(
            number * (1 if part in ("attention", "latent attention") else self.sizes.mlp_chunks)
            for part, number in KERNELS_BY_PART
            if part in parts
        )
        if "experts" in parts and "moe_router" in graphs:
            count -= ROUTER_KERNELS
        return count * self.constants.launch

    def _placement_seconds(self, is_moe: bool) -> float:
        """Return the seconds in which the host launches the plan of a forward pass for which ranks compute what."""
        if not is_moe or self.args.training.captured_modules & {"moe", "layer", "iteration"}:
            return 0.0
        return get_placement(self.moe, self.ep).plan_kernels(self.moe) * self.constants.launch

    def _tensor_parallel(self, is_moe: bool) -> float:
        """Return the seconds of forward's tensor-parallel all-gathers and reduce-scatters of attention and MLP."""
        if self.tp == 1:
            return 0.0
        hidden, model = self.model.hidden_size, self.model
        latents = model.multi_latent_attention and model.q_lora_rank is not None
        into = (model.q_lora_rank or 0) + model.kv_lora_rank + model.qk_pos_emb_head_dim if latents else hidden
        if variant_of(model).compresses_keys:  # keys, and keys and logits of compressors
            into = (model.q_lora_rank or 0) + 3 * model.v_head_dim
        shared = bool(self.moe.moe_shared_expert_intermediate_size)
        mixing = self.softmax_share + self.linear_share + self.mamba_share
        widths = [mixing * into, mixing * hidden]
        if not is_moe or shared:
            widths += [hidden * (1 if is_moe else self.mlp_share)] * 2
        keys = self.tokens * model.dsa_indexer_topk if self.gathers_keys else int(self.pairs)
        # the indexer's target sums the heads of all ranks
        trained = self.softmax_share * self.indexed_share if self.trains_indexer else 0.0
        target = 2 * trained * self.interconnect.ring(keys * 4, 1, self.tp)
        return target + sum(self.interconnect.ring(self.tokens * width * self.size, 1, self.tp) for width in widths)

    def _context_parallel(self) -> tuple[float, float]:
        """Return (seconds of context-parallel communication in forward, how much of it can overlap attention)."""
        if self.cp == 1:
            return 0.0, 0.0
        model, heads = self.model, self.model.num_attention_heads // self.tp
        if model.multi_latent_attention:
            keys: float = heads * (self.key_width + model.v_head_dim)
            queries = heads * MLA_QUERY_CHANNELS
        else:
            keys, queries = round(self.key_value_channels), heads * (model.kv_channels + model.value_width)
        if self.gathers_keys:
            latents = model.kv_lora_rank + model.qk_pos_emb_head_dim
            keys = latents if self.indexed_share == 1 else keys + self.indexed_share * (latents - keys)
        kind, share = self.args.parallel.cp_comm_type[0], self.softmax_share + self.linear_share
        width = keys + queries if kind == "a2a" else self.cp * keys
        seconds = share * self.interconnect.ring(self.tokens * width * self.size, self.tp, self.cp)
        # Mamba layers exchange positions for heads, whatever the kind is
        exchanged = self.tokens * sum(self._mamba_channels()) * self.size if self.mamba_share else 0.0
        overlapped = seconds if kind in ("p2p", "a2a+p2p") else 0.0
        return seconds + self.mamba_share * self.interconnect.ring(exchanged, self.tp, self.cp), overlapped

    def passes(self, is_moe: bool) -> tuple[PassTime, PassTime]:
        """Return forward and backward of one layer, with recompute; the exchange of tokens is a separate part."""
        chunks = self.sizes.mlp_chunks
        if is_moe:
            exchange, exchange_back = (
                chunks
                * dispatch_combine_seconds(
                    self.args, self.interconnect, self.routed_tokens / chunks, self.size, backward
                )
                for backward in (False, True)
            )
            mlp, permute = self._routed_experts() + self._shared_experts(), self._permute()
        else:
            exchange, exchange_back, mlp, permute = 0.0, 0.0, 0.0, 0.0
            mlp = self.mlp_share * self._mlp(self.model.ffn_hidden_size)
        attention = self._attention_gemms()
        (core, core_back), (matrices, indexer) = self._core_attention(), self._indexer()
        saved = self.sizes.moved_by_layer(is_moe) / self.memory_bandwidth  # seconds to write or read all saved tensors
        host = self.host_seconds(is_moe)
        tp_comm, (cp_comm, overlapped) = self._tensor_parallel(is_moe), self._context_parallel()
        core += matrices + indexer
        pages, (sent, sent_back) = self._page_copies(is_moe), self._transport_casts(is_moe)
        planned = host + self._placement_seconds(is_moe)
        compute = self._elapsed(attention + mlp + core + 2 * saved + permute + pages + sent, planned)
        compute += self._host_waits(is_moe)
        gemms = attention + (0.0 if is_moe else mlp)
        exposed_tp, exposed_tp_back = self._exposed_tensor_parallel(tp_comm, gemms)
        forward = PassTime(compute, exchange, exposed_tp, cp_comm - min(overlapped, core))
        passes = 1 if self.model.lora_dim is not None else 2  # frozen weights have no gradients
        device = passes * (attention + mlp) + core_back + matrices + 3 * saved + 2 * permute + pages + sent_back
        compute = self._elapsed(device, 2 * host)
        cp_comm_back = 2 * cp_comm - min(2 * overlapped, core_back)
        backward = PassTime(compute, exchange_back, exposed_tp_back, cp_comm_back)
        if is_moe:
            forward, backward = self._apply_overlap(forward, backward)
        if "full" in self.recomputed:
            if chunks > 1:  # chunks are regions inside the layer's region, so they run once more
                backward += PassTime(mlp + permute, exchange)
            return forward, backward + forward
        recomputed = PassTime(core if "core_attn" in self.recomputed else 0.0)
        if is_moe and "moe" in self.recomputed:
            recomputed += PassTime(mlp + permute + saved, exchange)
        elif not is_moe and "mlp" in self.recomputed:
            recomputed += PassTime(mlp)
        return forward, backward + recomputed + PassTime(self._recompute_seconds(is_moe))

    def _exposed_tensor_parallel(self, comm: float, gemms: float) -> tuple[float, float]:
        """Return the exposed seconds of tensor-parallel communication in forward and in backward.

        Args:
            comm: all-gathers and reduce-scatters of forward, half each.
            gemms: of the linears that communicate, in forward.
        """
        # backward gathers the input again, and the gradient's collectives overlap the wgrad GEMM
        backward = 1.5 * comm - 0.5 * min(comm, gemms)
        parallel = self.args.parallel
        if not parallel.tp_comm_overlap:
            return comm, backward
        hideable, _ = hidden_tensor_shares(parallel)
        if parallel.tp_comm_overlap_ag:
            backward = 1.5 * comm - min(1.5 * comm, 2 * gemms)
        return comm - min(hideable * comm, gemms), backward

    def _elapsed(self, device: float, host: float) -> float:
        """Return the seconds of kernels that run for `device` and are launched in `host` seconds."""
        return device + host if self.hardware.synchronous else max(device, host)

    def _apply_overlap(self, forward: PassTime, backward: PassTime) -> tuple[PassTime, PassTime]:
        """Subtract the part of the exchange that shared experts and the experts' weight gradients overlap."""
        if self.moe.moe_shared_expert_overlap:
            forward = replace(forward, exchange=forward.exchange - min(forward.exchange, self._shared_experts()))
        if self.args.parallel.overlap_dispatch_backward_with_experts_wgrad:
            backward = replace(
                backward, exchange=backward.exchange - min(backward.exchange / 2, self._routed_experts())
            )
        return forward, backward

    def _recompute_seconds(self, is_moe: bool) -> float:
        """Return the seconds of backward that recompute parts of a layer smaller than its core attention or MLP."""
        seconds = self._up_projections() if "mla_up_proj" in self.recomputed else 0.0
        if "layernorm" in self.recomputed:
            seconds += 4 * self.sizes.rows * self.model.hidden_size * self.size / self.memory_bandwidth
        if is_moe and "shared_experts" in self.recomputed and "moe" not in self.recomputed:
            seconds += self._shared_experts()
        if is_moe and "moe_act" in self.recomputed and "moe" not in self.recomputed and self.sizes.te_experts:
            # reads fc1's output again and writes the activation
            elements = (self.fc1_factor + 1) * self.sizes.received * self.expert_ffn
            seconds += elements * self.size / self.memory_bandwidth
        return seconds

    def head(self) -> tuple[float, float]:
        """Return forward and backward of the output layer and its losses, including those of multi-token prediction."""
        depths, gemm = 1 + self.model.num_mtp_depths, self.head_weight_gradient()
        logits = depths * self.tokens * (self.sizes.vocab_rows // self.tp) * self.size / self.memory_bandwidth
        return gemm + 2 * logits, (1 if self.model.lora_dim is not None else 2) * gemm + 2 * logits

    def head_weight_gradient(self) -> float:
        """Return the part of the output layer's backward that computes its weight gradient; forward takes as long."""
        columns, plain = self.sizes.vocab_rows // self.tp, not getattr(self.args.precision, OUTPUT_LAYER)
        depths = 1 + self.model.num_mtp_depths
        return depths * self.gemm(self.tokens, columns, self.model.hidden_size, plain=plain)

    def mtp_projection(self) -> float:
        """Return the forward seconds of the GEMM that combines hidden state and embedding of one MTP depth."""
        return self.gemm(self.tokens, self.model.hidden_size // self.tp, 2 * self.model.hidden_size)

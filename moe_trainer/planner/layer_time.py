"""Seconds of one layer, one microbatch and one rank: products, attention, traffic of memory, launches; and its communication.

Products: 2 m n k operations at a fraction of the device's peak for their format, or the time to read and write their matrices, whichever
is longer: that is what makes many small experts slow. Attention's core: its own fractions, which grow with the length, of
measured kernels; layers with a window score their window, layers of a gated DeltaNet pass a state on (both as the mean over
the decoder's layers). Everything between products is bound by memory: in forward each kept tensor is written and read, in backward it is read,
and a gradient of its size is written and read; tokens are permuted on their way out and back. Quantisation reads and writes the
operands once more. Sparse attention multiplies as dense attention does where keys that are not chosen are masked, and the latents of chosen ones where
they are gathered (shape/sparse_keys.py); its indexers score every pair of query and key besides. A layer takes at least the time in which the host launches its kernels.

Constants: what no data sheet has. Those of `Constants` (hardware.py) are fitted to published runs (scripts/plan.py calibrate prints the error of each
run, and of each family of models, when it is left out of the fit); the others are measurements with source. None of them was measured
on this program, which has not run on a cluster yet: the published runs are Megatron-LM's.

Shapes: T tokens of this rank (whole over tp), R rows of its experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moe_trainer.planner.links import Links, round_trip_seconds
from moe_trainer.planner.memory import ChunkBytes
from moe_trainer.shape.layers import is_linear, uses_window
from moe_trainer.shape.parts import captured_parts, recomputed_parts
from moe_trainer.shape.sparse_keys import chooses, gathers

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.model import ModelArgs
    from moe_trainer.planner.hardware import Hardware

SCORES, LEARNING, TILES, LISTED = 4, (7, 8), (7, 14), (8, 13)
"""How often an element of [heads, queries, keys] is written or read as fp32, counted in ops/sparse_attention.py and ops/block_attention.py:
by the index' scores; by what it learns, of its own heads and of attention's; by masked attention without a fused kernel, there and back; by
attention to listed keys (ops/latent_attention.py), of [heads, queries, chosen keys]. That is torch; its Triton kernels, whose time nobody has
measured, write no scores, so plans are on the safe side."""
MOVED = (3, 7, 7)
"""How often a row of latents is written or read for every query that chose it: forward, backward in the format of activations, and
there in fp32, where its gradient is widened and added up."""
ATTENTION = ((False, (0.679, 885), (0.574, 1421)), (True, (0.75, 1703), (0.556, 1161)))
"""(Blackwell?, forward, backward) of attention's core: fraction of the bf16 peak at great length, and the length that reaches half of it.
Through cuDNN's TFLOP/s of 4K and 16K tokens, forward and backward: Hopper 553, 638 and 422, 523; Blackwell 1324, 1698 and 1083, 1298
(arXiv 2603.07685, section 6)."""
TILE = 128
"""Keys that a kernel of attention takes at a time: a window costs whole tiles."""
BACKWARD_OF_ATTENTION = 2.5
"""Operations of the core's backward for one of its forward: the scores are computed again."""
KERNELS = (("attention", 22), ("latent attention", 38), ("feed-forward", 8), ("experts", 45), ("shared experts", 8))
"""Kernels that a forward launches, by part, with the usual fusions; backward launches twice as many."""
GRAPHED = (("attn", "attention"), ("attn", "latent attention"), ("mlp", "feed-forward"), ("moe", "experts"))


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass through a layer. exchange: of tokens between expert ranks; compute: on the device, or of the host if longer."""

    compute: float = 0.0
    exchange: float = 0.0
    tensor: float = 0.0
    context: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.compute + other.compute, self.exchange + other.exchange, self.tensor + other.tensor, self.context + other.context)

    def times(self, factor: float) -> Pass:
        """So many of it."""
        return Pass(*(factor * part for part in (self.compute, self.exchange, self.tensor, self.context)))

    @property
    def total(self) -> float:
        """One after the other."""
        return self.compute + self.exchange + self.tensor + self.context


def window_share(model: ModelArgs, length: int, layer_number: int) -> float:
    """Of the pairs of query and key that a causal mask leaves, how many a layer (counted from 1) scores: a window's keys, in whole tiles."""
    left = model.window_size[0] if uses_window(model, layer_number) else -1
    return min(1.0, 2.0 * (left + TILE) / length) if left >= 0 else 1.0


def gemm_seconds(hardware: Hardware, m: float, n: float, k: float, width: str = "bf16", size: int = 2) -> float:
    """Seconds in which the tensor cores multiply [m, k] x [k, n]. width: format of the operands; size: bytes of an element where that is bf16
    or wider."""
    narrow = width != "bf16" and hardware.fp8 > 0
    fraction = hardware.constants.products_fp8 if narrow else hardware.constants.products_bf16
    peak = hardware.peak(width if narrow else "bf16") * fraction
    if size == 4 and not hardware.synchronous:
        peak /= 2  # TF32
    return 2.0 * m * n * (k + hardware.constants.fill) / peak


def attention_rates(hardware: Hardware, length: float) -> tuple[float, float]:
    """FLOP/s of attention's core, forward and backward, of sequences of this length (a rank's part of them)."""
    peak = hardware.peak("bf16")
    if hardware.synchronous:  # a CPU's kernels multiply here as everywhere
        return (peak * hardware.constants.products_bf16,) * 2
    _, *both = next(row for row in ATTENTION if row[0] == hardware.is_blackwell)
    forward, backward = (fraction * peak * length / (length + half) for fraction, half in both)
    return forward, backward


class LayerTime:
    """Times of the layers of one command line. sizes: of what they keep, for the traffic of memory."""

    def __init__(self, args: Arguments, links: Links, sizes: ChunkBytes):
        self.args, self.links, self.hardware, self.sizes, self.constants = args, links, links.hardware, sizes, links.hardware.constants
        model, parallel, precision = args.model, args.parallel, args.precision
        self.model, self.moe = model, args.moe
        self.tp, self.cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        self.etp, self.ep = parallel.expert_tensor_parallel_size or self.tp, parallel.expert_model_parallel_size
        self.tokens, self.size = sizes.tokens, sizes.size
        self.own = self.tokens // self.tp
        self.width = "fp4" if precision.fp4 else "fp8" if precision.fp8 else "bf16"
        self.memory = links.hardware.hbm_tb_s * 1e12 * self.constants.memory
        self.recomputed = recomputed_parts(args.training)
        self.gate = 2 if model.swiglu or model.quick_geglu else 1
        self.sparse = model.experimental_attention_variant == "dsa"
        self.chooses, self.gathers = chooses(model, args.data.seq_length), gathers(args)
        self.learns = self.sparse and bool(model.dsa_indexer_loss_coeff)
        self.pairs = self.tokens * args.data.seq_length / 2  # of queries and visible keys
        linear = [is_linear(model, number) for number in range(model.num_layers)]
        self.linear = sum(linear) / len(linear)  # of the layers, those of a gated DeltaNet
        seen = [window_share(model, args.data.seq_length, number + 1) for number, without in enumerate(linear) if not without]
        self.scored = sum(seen) / len(seen) if seen else 0.0  # of the pairs, by a layer of softmax attention

    def product(self, m: float, n: float, k: float, count: int = 1, plain: bool = False) -> float:
        """Seconds of `count` products [m, k] x [k, n]. plain: in bf16 whatever the flags say."""
        narrow = self.width != "bf16" and not plain and self.hardware.fp8 > 0
        traffic = (m * k + n * k) * (1 if narrow else self.size) + m * n * self.size
        seconds = count * max(gemm_seconds(self.hardware, m, n, k, self.width if narrow else "bf16", self.size), traffic / self.memory)
        if narrow:  # what is quantised is read, and written for both directions
            seconds += count * m * k * (self.size + 2) / self.memory
        return seconds

    def _listed(self) -> tuple[float, float]:
        """Forward and backward of attention to listed keys: products of narrow matrices, one pair per query, at the rate of all products."""
        model, heads = self.model, self.model.num_attention_heads // self.tp
        rank, width = model.kv_lora_rank, model.kv_lora_rank + model.qk_pos_emb_head_dim
        chosen = self.tokens * model.dsa_indexer_topk
        peak = self.hardware.peak("bf16") * self.constants.products_bf16 / (2 if self.size == 4 else 1)
        there, back = 2.0 * chosen * heads * (width + rank) / peak, 2.0 * chosen * heads * 3 * (width + rank) / peak
        there += chosen * (4.0 * heads * LISTED[0] + width * self.size * MOVED[0]) / self.memory
        back += chosen * (4.0 * heads * LISTED[1] + width * (self.size * MOVED[1] + 4.0 * MOVED[2])) / self.memory
        # queries are brought to latents once more, and so is what the weight's gradient needs
        return there, back + self.product(self.tokens, heads * model.qk_head_dim, rank, plain=True)

    def _core(self) -> tuple[float, float]:
        """Forward and backward of what attends, on average over the layers."""
        there, back = self._softmax()
        delta = self._delta() if self.linear else 0.0
        there, back = self.scored * there, self.scored * back
        return there + self.linear * (delta - there), back + self.linear * (2 * delta - back)

    def _delta(self) -> float:
        """The rule of a gated DeltaNet, in chunks: four products of every head as wide as its state (shape/flops.py)."""
        heads, width = self.model.linear_num_value_heads // self.tp, self.model.linear_value_head_dim
        return self.product(self.tokens, width, width, 4 * heads, plain=True)

    def _softmax(self) -> tuple[float, float]:
        if self.gathers:
            return self._listed()
        model, heads = self.model, self.model.num_attention_heads // self.tp
        if model.multi_latent_attention:
            widths = model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim
        else:
            widths = 2 * model.kv_channels
        operations = self.tokens * self.args.data.seq_length * heads * widths
        rates = attention_rates(self.hardware, self.args.data.seq_length / self.cp)
        there, back = operations / rates[0], BACKWARD_OF_ATTENTION * operations / rates[1]
        if self.chooses:
            there, back = (time + 4.0 * count * heads * self.pairs / self.memory for time, count in zip((there, back), TILES))
        return there, back

    def _index(self) -> tuple[float, float]:
        """(matrices of an indexer, everything else that it takes to choose and to learn: all of it in forward). Scores are fp32 (TF32)."""
        model = self.model
        if not self.sparse:
            return 0.0, 0.0
        index, width, heads = model.dsa_indexer_n_heads, model.dsa_indexer_head_dim, model.num_attention_heads // self.tp
        matrices = self.product(self.tokens, index * width, model.q_lora_rank or model.hidden_size, plain=True)
        matrices += self.product(self.tokens, index + width, model.hidden_size, plain=True)
        operations, elements = 2.0 * self.pairs * index * width, self.pairs * index * SCORES
        if self.learns:  # two gradients of the scores, and what attention's heads attend to
            keys, wide = self.pairs, model.qk_head_dim + model.qk_pos_emb_head_dim
            if self.gathers:
                keys, wide = self.tokens * model.dsa_indexer_topk, model.kv_lora_rank + model.qk_pos_emb_head_dim
            operations += 4.0 * self.pairs * index * width + 2.0 * keys * heads * wide
            elements += self.pairs * index * LEARNING[0] + keys * heads * LEARNING[1]
        peak = self.hardware.peak("bf16") / 2 * self.constants.products_bf16
        return matrices, operations / peak + 4.0 * elements / self.memory

    def _up(self) -> float:
        """The products that make heads of latents."""
        model, heads = self.model, self.model.num_attention_heads // self.tp
        key = model.qk_head_dim + model.qk_pos_emb_head_dim
        seconds = self.product(self.tokens, heads * (model.qk_head_dim + model.v_head_dim), model.kv_lora_rank)
        return seconds + (self.product(self.tokens, heads * key, model.q_lora_rank) if model.q_lora_rank else 0.0)

    def _attention(self) -> float:
        """Products of attention, forward, on average over the layers."""
        there = self._projections()
        if not self.linear:
            return there
        model, hidden = self.model, self.model.hidden_size
        values = model.linear_num_value_heads * model.linear_value_head_dim // self.tp
        keys, heads = model.linear_num_key_heads * model.linear_key_head_dim // self.tp, model.linear_num_value_heads // self.tp
        delta = self.product(self.tokens, 2 * (keys + values + heads), hidden) + self.product(self.tokens, hidden, values)
        return there + self.linear * (delta - there)

    def _projections(self) -> float:
        model, hidden = self.model, self.model.hidden_size
        heads = model.num_attention_heads // self.tp
        if not model.multi_latent_attention:
            groups = max(1, model.query_groups // self.tp)
            out = heads * model.kv_channels
            wide = 2 * out if model.attention_output_gate else out
            return self.product(self.tokens, wide + 2 * groups * model.kv_channels, hidden) + self.product(self.tokens, hidden, out)
        seconds = self._up() + self.product(self.tokens, hidden, heads * model.v_head_dim)
        if model.q_lora_rank is None:
            seconds += self.product(self.tokens, heads * (model.qk_head_dim + model.qk_pos_emb_head_dim), hidden)
        else:
            seconds += self.product(self.sizes.rows, model.q_lora_rank, hidden)
        return seconds + self.product(self.sizes.rows, model.kv_lora_rank + model.qk_pos_emb_head_dim, hidden)

    def _feed_forward(self, width: int) -> float:
        return self.product(self.tokens, self.gate * width // self.tp, self.model.hidden_size) + self.product(
            self.tokens, self.model.hidden_size, width // self.tp)

    def _shared(self) -> float:
        width = self.moe.moe_shared_expert_intermediate_size
        return self._feed_forward(width) if width else 0.0

    def _routed(self) -> float:
        moe, hidden, experts = self.moe, self.model.hidden_size, self.moe.num_experts // self.ep
        reads, makes = moe.expert_widths(hidden)
        width = (moe.moe_ffn_hidden_size or self.model.ffn_hidden_size) // self.etp
        each = self.sizes.received / experts
        seconds = self.product(each, self.gate * width, reads, experts) + self.product(each, makes, width, experts)
        if moe.moe_latent_size:
            seconds += self.product(self.own, reads, hidden) + self.product(self.own, hidden, reads)
        return seconds + self.product(self.own, moe.num_experts, hidden, plain=True)

    def _permuting(self) -> float:
        """Tokens to the order of the experts and back: read and written, here and where they arrive."""
        rows = self.sizes.sent + (self.sizes.received if self.ep * self.etp > 1 else 0)
        return 2.0 * rows * sum(self.moe.expert_widths(self.model.hidden_size)) * self.size / self.memory

    def _launches(self, is_moe: bool) -> float:
        """Seconds in which the host launches a forward."""
        parts = {"latent attention" if self.model.multi_latent_attention else "attention"}
        parts |= {"experts"} if is_moe else {"feed-forward"}
        parts |= {"shared experts"} if is_moe and self.moe.moe_shared_expert_intermediate_size else set()
        graphs = captured_parts(self.args.training)
        if "layer" in graphs or self.args.training.cuda_graph_impl == "full_iteration":
            return 0.0
        kernels = dict(KERNELS)
        for module, part in GRAPHED:
            if module in graphs and part in parts:
                parts.discard(part)
        count = sum(kernels[part] for part in parts) - (12 if is_moe and "moe_router" in graphs and "experts" in parts else 0)
        return count * self.constants.launch

    def _tensor(self, is_moe: bool) -> float:
        """Collectives of tensor parallelism in forward: a gather and a scatter round attention, and round a feed-forward."""
        if self.tp == 1:
            return 0.0
        hidden, model = self.model.hidden_size, self.model
        latents = model.multi_latent_attention and model.q_lora_rank is not None
        into = (model.q_lora_rank or 0) + model.kv_lora_rank + model.qk_pos_emb_head_dim if latents else hidden
        shared = bool(self.moe.moe_shared_expert_intermediate_size)
        widths = [into, hidden] + ([hidden, hidden] if not is_moe or shared else [])
        keys = self.tokens * model.dsa_indexer_topk if self.gathers else int(self.pairs)
        target = 2 * self.links.ring(keys * 4, 1, self.tp) if self.learns else 0.0  # of all ranks' heads
        return target + sum(self.links.ring(self.tokens * width * self.size, 1, self.tp) for width in widths)

    def _context(self) -> tuple[float, float]:
        """(what a forward sends to the other parts of the sequence, how much of it may run beside attention)."""
        if self.cp == 1:
            return 0.0, 0.0
        model, heads = self.model, self.model.num_attention_heads // self.tp
        if model.multi_latent_attention:
            keys, queries = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim), heads * 192
        else:
            keys, queries = 2 * max(1, model.query_groups // self.tp) * model.kv_channels, 2 * heads * model.kv_channels
        if self.gathers:
            keys = model.kv_lora_rank + model.qk_pos_emb_head_dim
        kind = self.args.parallel.cp_comm_type[0]
        if kind == "a2a":
            return self.links.ring(self.tokens * (keys + queries) * self.size, self.tp, self.cp), 0.0
        seconds = self.links.ring(self.tokens * self.cp * keys * self.size, self.tp, self.cp)
        return seconds, seconds if kind in ("p2p", "a2a+p2p") else 0.0

    def passes(self, is_moe: bool) -> tuple[Pass, Pass]:
        """Forward and backward of one layer, recompute included, with the exchange of tokens on its own."""
        exchange = round_trip_seconds(self.args, self.links, self.own, self.size) if is_moe else 0.0
        feed = self._routed() + self._shared() if is_moe else self._feed_forward(self.model.ffn_hidden_size)
        attention, (core, core_back), (matrices, choice) = self._attention(), self._core(), self._index()
        kept = self._kept(is_moe)
        moves = self._permuting() if is_moe else 0.0
        tensor, (context, beside) = self._tensor(is_moe), self._context()
        core += matrices + choice
        forward = Pass(self._elapsed(attention + feed + core + 2 * kept + moves, self._launches(is_moe)), exchange, tensor,
                       context - min(beside, core))
        # in backward the gather of the input again; collectives of a gradient run beside the product of the weight's
        hidden_part = min(tensor, attention + (0.0 if is_moe else feed))
        backward = Pass(self._elapsed(2 * (attention + feed) + core_back + matrices + 3 * kept + 2 * moves, 2 * self._launches(is_moe)), exchange,
                        1.5 * tensor - 0.5 * hidden_part, 2 * context - min(2 * beside, core_back))
        if is_moe:
            forward, backward = self._beside_exchange(forward, backward)
        return forward, backward + self._again(is_moe, forward, attention, feed, core, exchange, moves, kept)

    def _elapsed(self, device: float, host: float) -> float:
        """Seconds of kernels that take `device` to run and `host` to launch."""
        return device + host if self.hardware.synchronous else max(device, host)

    def _beside_exchange(self, forward: Pass, backward: Pass) -> tuple[Pass, Pass]:
        """What shared experts and the experts' weight gradients hide of the exchange."""
        if self.moe.moe_shared_expert_overlap:
            forward = replace(forward, exchange=forward.exchange - min(forward.exchange, self._shared()))
        if self.args.parallel.overlap_dispatch_backward_with_experts_wgrad:
            backward = replace(backward, exchange=backward.exchange - min(backward.exchange / 2, self._routed()))
        return forward, backward

    def _kept(self, is_moe: bool) -> float:
        """Seconds to write (or read) what a layer keeps when nothing is recomputed."""
        return self.sizes.bare_layer(is_moe) / self.memory

    def _again(self, is_moe: bool, forward: Pass, attention: float, feed: float, core: float, exchange: float, moves: float,
               kept: float) -> Pass:
        """What recompute adds to backward."""
        if "full" in self.recomputed:
            return forward
        found = 0.0
        found += core if "core_attn" in self.recomputed else 0.0
        found += self._up() if "mla_up_proj" in self.recomputed else 0.0
        small = self.sizes.rows * self.model.hidden_size * self.size / self.memory
        found += 4 * small if "layernorm" in self.recomputed else 0.0
        if is_moe:
            found += self._shared() if "shared_experts" in self.recomputed else 0.0
            if "moe" in self.recomputed:
                return Pass(found + feed + moves + kept, exchange)
            if "moe_act" in self.recomputed and self.sizes.quantized_experts:  # what the first product made is read once more, and the activation written
                width = (self.moe.moe_ffn_hidden_size or self.model.ffn_hidden_size) // self.etp
                found += (self.gate + 1) * self.sizes.received * width * self.size / self.memory
        elif "mlp" in self.recomputed:
            found += feed
        return Pass(found)

    def head(self) -> tuple[float, float]:
        """Forward and backward of the output layer and its losses (of multi-token prediction, too)."""
        columns, depths = self.sizes.vocab_rows // self.tp, 1 + (self.model.mtp_num_layers or 0)
        product = self.product(self.tokens, columns, self.model.hidden_size, plain=not self.args.precision.fp8_output_proj)
        logits = self.tokens * columns * self.size / self.memory
        return depths * (product + 2 * logits), depths * (2 * product + 2 * logits)

    def joining(self) -> float:
        """The product that joins a depth of multi-token prediction with its embedding, forward."""
        return self.product(self.tokens, self.model.hidden_size // self.tp, 2 * self.model.hidden_size)

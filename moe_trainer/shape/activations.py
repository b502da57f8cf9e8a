"""What a forward pass keeps for its backward: every tensor, by name, shape and bytes, from flags alone. Pure arithmetic.

`layer_activations` lists what one transformer layer keeps of one microbatch on one rank, `chunk_activations` what the layers of a chunk
do, those of multi-token prediction included, with recompute and offload as the flags say. tests/memory/test_bytes.py measures what is alive behind a real forward pass and
holds it against these lists. Which parts are recomputed or sent to the host: parts.py.

What is counted: storages, each once, whoever keeps them (autograd's saved tensors, a node's own fields, the record of a recomputed
region); with a view the whole storage behind it. What is not: weights, the batch, tables that a model holds anyway, and what lives
only while an operator runs. Embedding and head are not layers; their logits are counted where the loss is (ops/cross_entropy.py).

Rows that experts receive depend on the routing: without `received` the balanced number is taken.

Attention keeps what its kernel keeps (ops/attention.py, layers/ring_attention.py): on a CPU, without mask and up to
BLOCKED_MAX_LENGTH positions, the probabilities of all blocks; else queries, keys, values, output and log-sum-exp. Attention dropout on a
CPU and explicit masks are not counted, nor the surplus rows of half-precision experts on a CPU (ops/expert_mlp.py).

The layers are this program's own. What TransformerEngine's keep instead (inputs as they were quantised, with their scales; their fused
kernels' maps of rows) is not listed; planner/memory.py takes inputs in 8 bits into account.

Shapes: T tokens of this rank's part of the sequence, `rows` those of them that it holds between blocks (T / tp with sequence
parallelism), `own` those that it routes, R rows of its experts, H hidden, N heads, G key-value heads, D and E widths of key and value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moe_trainer.shape.layers import is_linear, moe_layer_pattern, mtp_is_moe
from moe_trainer.shape.parts import is_offloaded, offloaded_parts, recomputed_parts, recomputed_spans

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.training import TrainingArgs
    from moe_trainer.shape.layout import ChunkLayout

BLOCKED_MAX_LENGTH, QUERY_BLOCK = 512, 64  # as in ops/attention.py
WIDE = 4  # bytes of statistics, which are fp32
INDEX = 8  # bytes of an int64
SEGMENT = 1024  # positions of a segment, as in ops/gated_delta_rule.py


@dataclass(frozen=True)
class Kept:
    """A tensor between forward and backward. part: the part of its layer that saves it, by the names of --offload-modules."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    part: str = ""
    on_host: bool = False

    @property
    def num_bytes(self) -> int:
        """Its storage."""
        return math.prod(self.shape) * self.itemsize


def budget_rows(even: int, factor: float) -> int:
    """Rows of the experts' buffers with --moe-expert-rank-capacity-factor; even: rows when every rank receives as many as it sends."""
    return math.ceil(round(even * factor, 6))  # 100 * 1.1 is a little more than 110


class _Layer:
    """Lists of one layer's tensors. number: from 0; device: "cpu" or "cuda"; received: rows of this rank's experts; packed: documents."""

    def __init__(self, args: Arguments, number: int, *, is_moe: bool, device: str, received: int | None, packed: bool):
        model, parallel, training = args.model, args.parallel, args.training
        self.args, self.model, self.moe, self.is_moe, self.number = args, model, args.moe, is_moe, number
        self.cpu, self.packed = device == "cpu", packed
        self.parts = recomputed_parts(training)
        self.tp, self.cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        self.size = 4 if args.precision.params_dtype_name == "fp32" else 2
        self.residual = 4 if model.fp32_residual_connection else self.size
        self.hidden = model.hidden_size
        self.batch, self.length = training.micro_batch_size, args.data.seq_length // self.cp
        self.tokens = self.batch * self.length
        self.own = self.tokens // self.tp
        self.rows = self.own if parallel.sequence_parallel else self.tokens
        etp = parallel.expert_tensor_parallel_size or self.tp
        self.etp, self.ep = etp, parallel.expert_model_parallel_size
        self.sent = self.own * args.moe.moe_router_topk
        self.received = self.sent * etp if received is None else received

    def all(self) -> Iterator[Kept]:
        """Everything, in the order of forward."""
        discards = "layernorm" in self.parts
        yield from self.norm("attn_norm", "input_layernorm", self.rows, self.hidden, self.residual)
        if not discards:
            yield Kept("normed", (self.rows, self.hidden), self.size, "qkv_linear")
        if is_linear(self.model, self.number):
            yield from self._linear()
        else:
            yield from self._latent() if self.model.multi_latent_attention else self._grouped()
        yield from self._dropout("self_attention")
        yield from self.norm("mlp_norm", "pre_mlp_layernorm", self.rows, self.hidden, self.residual)
        region = "moe" if self.is_moe else "mlp"
        # routed experts read this rank's rows, a copy; all of them are read by shared experts and by a region that runs again
        if not discards and (not self.is_moe or self.own == self.rows or region in self.parts or self.moe.moe_shared_expert_intermediate_size):
            yield Kept("pre_mlp.normed", (self.rows, self.hidden), self.size)
        if region in self.parts:
            yield from self.tape() if self.is_moe else ()
        elif self.is_moe:
            yield from self._experts()
        else:
            yield from self._mlp("mlp", self.model.ffn_hidden_size // self.tp)
        yield from self._dropout("mlp")

    def norm(self, part: str, name: str, rows: int, width: int, itemsize: int) -> Iterator[Kept]:
        """A norm keeps its input and a number or two per row."""
        yield Kept(f"{name}.x", (rows, width), itemsize, part)
        numbers = 2 if self.model.normalization == "LayerNorm" else 1
        yield Kept(f"{name}.statistics", (rows, numbers), WIDE, part)

    def _dropout(self, name: str) -> Iterator[Kept]:
        if self.model.hidden_dropout:
            yield Kept(f"{name}.dropout", (self.rows, self.hidden), self.size if self.cpu else 1)

    def _grouped(self) -> Iterator[Kept]:
        model = self.model
        heads, groups, width = model.num_attention_heads // self.tp, max(1, model.query_groups // self.tp), model.kv_channels
        if model.qk_layernorm or model.qk_l2_norm:
            for name, count in (("q_layernorm", heads), ("k_layernorm", groups)):
                rms = replace(model, normalization="RMSNorm") if model.qk_l2_norm else model
                yield Kept(f"{name}.x", (self.tokens * count, width), self.size)
                yield Kept(f"{name}.statistics", (self.tokens * count, 2 if rms.normalization == "LayerNorm" else 1), WIDE)
        yield from self._core(heads, groups, width, width, discarded=False)
        if model.attention_output_gate:
            yield Kept("gate", (self.tokens, heads * width), self.size, "qkv_linear")
            yield Kept("linear_proj.x", (self.tokens, heads * width), self.size, "attn_proj")

    def _linear(self) -> Iterator[Kept]:
        """A gated DeltaNet (layers/gated_delta_net.py). In its core each of the cp ranks has some of the heads of the whole sequence."""
        model, tokens, part = self.model, self.tokens, "core_attn"
        heads, width = model.linear_num_value_heads // self.tp, model.linear_value_head_dim
        key_channels = model.linear_num_key_heads // self.tp * model.linear_key_head_dim
        yield Kept("in_proj.y", (tokens, 2 * key_channels + 2 * heads * width + 2 * heads), self.size, part)
        later_segments = -(-self.length * self.cp // SEGMENT) - 1
        if later_segments:
            state = (self.batch, heads // self.cp, model.linear_key_head_dim, width)
            yield Kept("states", (later_segments, *state), WIDE, part)
        yield from self.norm(part, "out_norm", tokens * heads, width, self.size)
        yield Kept("out_norm.y", (tokens, heads * width), self.size, part)
        if "gdn_norm_out" not in self.parts:
            yield Kept("out_proj.x", (tokens, heads * width), self.size, "attn_proj")

    def _latent(self) -> Iterator[Kept]:
        model = self.model
        heads = model.num_attention_heads // self.tp
        key = model.qk_head_dim + model.qk_pos_emb_head_dim
        down = model.kv_lora_rank + model.qk_pos_emb_head_dim
        if model.q_lora_rank is not None:
            if model.qk_layernorm:
                yield from self.norm("qkv_linear", "q_layernorm", self.rows, model.q_lora_rank, self.size)
            yield Kept("q_latent", (self.rows, model.q_lora_rank), self.size, "qkv_linear")
        elif "mla_up_proj" in self.parts:
            yield Kept("q_before_rope", (self.tokens, heads, key), self.size, "qkv_linear")
        yield Kept("kv_down", (self.rows, down), self.size, "qkv_linear")
        if model.qk_layernorm:
            numbers = 2 if model.normalization == "LayerNorm" else 1
            yield Kept("kv_layernorm.statistics", (self.rows, numbers), WIDE, "qkv_linear")
            yield Kept("kv_latent", (self.rows, model.kv_lora_rank), self.size, "qkv_linear")
        if model.experimental_attention_variant == "dsa":
            yield from self._choice()
        yield from self._core(heads, heads, key, model.v_head_dim, discarded="mla_up_proj" in self.parts and self._heads_cut() == 1)

    def _choice(self) -> Iterator[Kept]:
        """What sparse attention keeps beside attention's own: the chosen keys, and what its indexer learns from (layers/sparse_attention.py)."""
        model, tokens, part = self.model, self.tokens, "core_attn"
        if part in self.parts:
            return
        if self._is_sparse():
            yield Kept("choice", (self.batch, self.length, -(-self.length * self.cp // 8)), 1, part)
        if not model.dsa_indexer_loss_coeff:
            return
        heads, width = model.dsa_indexer_n_heads, model.dsa_indexer_head_dim
        if self.rows != tokens:
            yield Kept("indexer.x", (tokens, self.hidden), self.size, part)
            yield Kept("indexer.latent", (tokens, model.q_lora_rank or self.hidden), self.size, part)
        yield Kept("indexer.k_norm.x", (tokens, width), self.size, part)
        yield Kept("indexer.k_norm.statistics", (tokens, 2), WIDE, part)
        if model.dsa_indexer_rotate_activation:
            yield Kept("indexer.rotations", (2, width, width), self.size, part)
        narrow = 2 if self.args.precision.params_dtype_name == "bf16" else WIDE
        yield Kept("indexer.q.gradient", (tokens, heads, width), narrow, part)
        yield Kept("indexer.k.gradient", (tokens, width), narrow, part)
        yield Kept("indexer.weights.gradient", (tokens, heads), WIDE, part)

    def _is_sparse(self) -> bool:
        """Are there more keys than are chosen?"""
        model = self.model
        return model.experimental_attention_variant == "dsa" and not model.dsa_indexer_warmup and model.dsa_indexer_topk < self.length * self.cp

    def _core(self, heads: int, groups: int, key: int, value: int, discarded: bool) -> Iterator[Kept]:
        """Core attention and the input of the projection behind it. discarded: queries, keys and values are not kept."""
        part, tokens = "core_attn", self.tokens
        q = Kept("q", (tokens, heads, key), self.size, part)
        k, v = Kept("k", (tokens, groups, key), self.size, part), Kept("v", (tokens, groups, value), self.size, part)
        y = Kept("core_attn.y", (tokens, heads * value), self.size, "attn_proj")
        if "core_attn" in self.parts:
            yield from () if discarded else (q, k, v)
        elif self._blocks():
            yield from () if discarded else (q, k, v)
            yield Kept("log_sum_exp", (self.batch, heads, self.length), WIDE, part)
        elif self.cpu and self.length * self._heads_cut() <= BLOCKED_MAX_LENGTH:
            yield from () if discarded else (q, k, v)
            yield Kept("probs", (self.batch, heads // self._heads_cut(), self._visible(self.length * self._heads_cut())), self.size, part)
        else:
            yield from self._flash(q, k, v, heads, discarded)
        yield y

    def _heads_cut(self) -> int:
        """Ranks that have exchanged heads for positions. What is kept is what they have received."""
        parallel = self.args.parallel
        kind = parallel.cp_comm_type[min(self.number, len(parallel.cp_comm_type) - 1)]
        return {"a2a": self.cp, "a2a+p2p": (parallel.hierarchical_context_parallel_sizes or (1,))[0]}.get(kind, 1)

    def _blocks(self) -> bool:
        """Does attention go block by block (layers/ring_attention.py)?"""
        return self.packed or self.cp > self._heads_cut() or self.model.softmax_type != "vanilla" or self._is_sparse()

    @staticmethod
    def _visible(length: int) -> int:
        """Probabilities of a head that are kept: every block of queries with the keys up to its end."""
        ends = [min(start + QUERY_BLOCK, length) for start in range(0, length, QUERY_BLOCK)]
        return sum((end - start) * end for start, end in zip(range(0, length, QUERY_BLOCK), ends))

    def _flash(self, q: Kept, k: Kept, v: Kept, heads: int, discarded: bool) -> Iterator[Kept]:
        key, value = q.shape[2], v.shape[2]
        padded = value < key
        if self.cpu and k.shape[1] != heads:  # the kernel wants as many keys as queries
            k, v = (replace(x, shape=(self.tokens, heads, x.shape[2])) for x in (k, v))
        if not discarded:
            yield from (q, k, replace(v, shape=(*v.shape[:2], max(key, value))))
        yield Kept("log_sum_exp", (self.batch, heads, self.length), WIDE, "core_attn")
        if padded or self.batch > 1 or self.cp > 1:  # else the projection reads it where it lies
            yield Kept("out", (self.tokens, heads, max(key, value)), self.size, "core_attn")

    def _mlp(self, name: str, ffn: int, part: str = "") -> Iterator[Kept]:
        """What a feed-forward keeps besides its input: what the activation reads, what fc2 reads."""
        yield Kept(f"{name}.linear_fc1.y", (self.tokens, self._gate() * ffn), self.size, part)
        if self.model.squared_relu:
            yield Kept(f"{name}.relu", (self.tokens, ffn), self.size, part)
        yield Kept(f"{name}.linear_fc2.x", (self.tokens, ffn), self.size, part)

    def _gate(self) -> int:
        return 2 if self.model.swiglu or self.model.quick_geglu else 1

    def _experts(self) -> Iterator[Kept]:
        moe = self.moe
        if self.own != self.rows:
            yield Kept("own_rows", (self.own, self.hidden), self.size)
        yield from self._router()
        yield from self._routes()
        kept = self._expert_rows()
        yield Kept("experts.x", (kept, moe.expert_widths(self.hidden)[0]), self.size, "expert_fc1")
        yield Kept("experts.probs", (kept,), self._router_size(), "moe_act")
        ffn = (moe.moe_ffn_hidden_size or self.model.ffn_hidden_size) // self.etp
        yield Kept("experts.linear_fc1.y", (kept, self._gate() * ffn), self.size, "moe_act")
        if self._sorts_arrivals():
            yield Kept("experts.order", (2, self.received), INDEX)
        if moe.moe_latent_size:
            yield Kept("fc2_latent_proj.x", (self.own, moe.moe_latent_size), self.size)
        shared = moe.moe_shared_expert_intermediate_size
        if shared:
            if "shared_experts" not in self.parts:
                yield from self._mlp("shared_experts", shared // self.tp)
                if moe.moe_shared_expert_gate:
                    yield Kept("shared_experts.y", (self.rows, self.hidden), self.size)
                    yield Kept("shared_experts.gate", (self.rows,), self.size)

    def _sorts_arrivals(self) -> bool:
        """Are received rows brought into the order of the experts? One expert's are in order."""
        exchanged = self.moe.moe_token_dispatcher_type != "allgather" and self.etp * self.ep > 1
        return exchanged and self.moe.num_experts > self.ep

    def _expert_rows(self) -> int:
        """Rows of what experts keep: what was received, the budget for it (moe/budget.py), or a layer's part of the
        pool of pages (memory/stash.py), which is smaller where layers leave each other pages."""
        moe, even = self.moe, self.sent * self.etp
        if moe.moe_expert_rank_capacity_factor is None:
            return self.received
        if not moe.moe_paged_stash:
            return max(self.received, budget_rows(even, moe.moe_expert_rank_capacity_factor))
        page = moe.moe_paged_stash_page_size
        return max(-(-self.received // page), math.ceil(moe.moe_paged_stash_buffer_size_factor_cuda * even / page)) * page

    def _router_size(self) -> int:
        """Bytes of a logit."""
        return {"fp32": 4, "fp64": 8}.get(self.moe.moe_router_dtype, self.size)

    def _router(self) -> Iterator[Kept]:
        moe, own, size = self.moe, self.own, self._router_size()
        wide = max(size, WIDE)
        yield from self._losses(wide)
        experts, topk = moe.num_experts, moe.moe_router_topk
        if "sinkhorn" in moe.moe_router_load_balancing_type:
            yield Kept("router.scores", (own, experts), wide)
            yield Kept("router.map", (own, experts), 1)
            return
        yield Kept("router.indices", (own, topk), INDEX)
        if moe.moe_router_score_function == "softmax":
            yield Kept("router.scores", (own, experts if moe.moe_router_pre_softmax else topk), wide)
            if not moe.moe_router_pre_softmax:  # torch's gather keeps what it picks from
                yield Kept("router.logits", (own, experts), size)
        else:
            yield Kept("router.scores", (own, experts), wide)
            if moe.moe_router_score_function == "sqrtsoftplus":
                yield Kept("router.logits", (own, experts), wide)
            if topk > 1:
                yield Kept("router.weights", (own, topk), size)
                yield Kept("router.weight_sums", (own,), size)
        if size < wide and (moe.moe_router_score_function != "softmax" or moe.moe_router_pre_softmax):
            yield Kept("router.rounded_scores", (own, experts), size)
        if moe.moe_expert_capacity_factor is not None and moe.moe_expert_capacity_factor >= 0:
            yield Kept("router.kept", (own, experts), 1)

    def _losses(self, wide: int) -> Iterator[Kept]:
        """The gradient of the auxiliary losses, found in forward."""
        moe = self.moe
        coefficients = moe.moe_aux_loss_coeff if isinstance(moe.moe_aux_loss_coeff, list) else [moe.moe_aux_loss_coeff]
        kinds = moe.moe_router_load_balancing_type
        kinds = kinds if isinstance(kinds, list) else [kinds]
        asked = any(coeff for kind, coeff in zip(kinds, coefficients) if kind.endswith("aux_loss"))
        if asked or moe.moe_z_loss_coeff is not None:
            yield Kept("router.loss_gradient", (self.own, moe.num_experts), wide)

    def _routes(self) -> Iterator[Kept]:
        """Where rows come from and go to (ops/permute.py): of this rank's tokens, or of all that were gathered for its experts."""
        gathered = self.moe.moe_token_dispatcher_type == "allgather" and self.etp * self.ep > 1
        rows, tokens = (self.received, self.own * self.etp * self.ep) if gathered else (self.sent, self.own)
        yield Kept("routes.rows", (4, rows), INDEX)
        yield Kept("routes.offsets", (tokens + 1,), INDEX)
        if self.moe.finermoe is not None:
            yield Kept("routes.slice_rows", (rows,), INDEX)
            yield Kept("routes.slice_offsets", (tokens * self.moe.finermoe.slices + 1,), INDEX)
        yield Kept("routes.counts", (self.moe.num_experts // (self.ep if gathered else 1),), INDEX)

    def tape(self) -> Iterator[Kept]:
        """What a recomputed MoE layer remembers beside its input: the choice, the losses' gradient, and the nodes' own routes."""
        moe = self.moe
        yield from self._losses(max(self._router_size(), WIDE))
        yield Kept("router.indices", (self.own, moe.moe_router_topk), INDEX)
        if moe.moe_expert_capacity_factor is not None and moe.moe_expert_capacity_factor >= 0:
            yield Kept("router.kept", (self.own, moe.num_experts), 1)
        yield from self._routes()
        if self._sorts_arrivals():
            yield Kept("experts.order", (2, self.received), INDEX)


def layer_activations(args: Arguments, *, is_moe: bool, number: int = 0, device: str = "cuda", received: int | None = None,
                      packed: bool = False) -> tuple[Kept, ...]:
    """What one layer keeps of one microbatch, recompute of its parts taken into account; nothing on the host yet.

    number: of the layer, from 0. received: rows of this rank's experts. packed: attention within packed documents.
    """
    return tuple(_Layer(args, number, is_moe=is_moe, device=device, received=received, packed=packed).all())


def chunk_activations(args: Arguments, layout: ChunkLayout, *, device: str = "cuda", received: int | None = None,
                      packed: bool = False) -> tuple[Kept, ...]:
    """What the layers of a chunk keep of one microbatch; names begin with "decoder.layers.<number>." or "mtp.layers.<depth>."."""
    training, model = args.training, args.model
    pattern = moe_layer_pattern(model.num_layers, args.moe.num_experts, args.moe.moe_layer_freq)
    sent = _Sent(training)
    found: list[Kept] = []
    for first, stop, recomputed in recomputed_spans(training, len(layout.layers)):
        for index in range(first, stop):
            number = layout.layers[index]
            layer = _Layer(args, number, is_moe=pattern[number], device=device, received=received, packed=packed)
            if not recomputed:
                entries = sent.of_layer(layer.all(), whole=index < training.cpu_offloading_num_layers)
            else:
                entries = list(_of_a_region(layer, first=index == first))
            found += [replace(entry, name=f"decoder.layers.{number}.{entry.name}") for entry in entries]
    for depth in range(model.mtp_num_layers or 0) if layout.mtp else ():
        layer = _Layer(args, model.num_layers + depth, is_moe=mtp_is_moe(pattern), device=device, received=received, packed=packed)
        found += [replace(entry, name=f"mtp.layers.{depth}.{entry.name}") for entry in _of_mtp(layer, sent)]
    return tuple(found)


def _of_mtp(layer: _Layer, sent: _Sent) -> Iterator[Kept]:
    """One depth of multi-token prediction: two norms, their joining, a layer, a norm."""
    shape = (layer.rows, layer.hidden)
    yield Kept("tokens", (layer.tokens,), INDEX)
    if "mtp" in layer.parts:
        yield Kept("embedded", shape, layer.residual)
        yield Kept("x", shape, layer.size)
        yield from layer.tape() if layer.is_moe else ()
        return
    yield from layer.norm("", "enorm", *shape, layer.residual)
    yield from layer.norm("", "hnorm", *shape, layer.size)
    yield Kept("joined", (layer.rows, 2 * layer.hidden), layer.size)
    for entry in sent.of_layer(layer.all(), whole=False):
        yield replace(entry, name=f"mtp_model_layer.{entry.name}")
    yield from layer.norm("", "final_layernorm", *shape, layer.residual)


def _of_a_region(layer: _Layer, first: bool) -> Iterator[Kept]:
    """A layer that runs again: the region's input, and what must not be decided again."""
    if first:
        share = layer.tp if layer.args.training.distribute_saved_activations else 1
        yield Kept("x", (layer.rows * layer.hidden // share,), layer.residual)
    if layer.is_moe:
        yield from layer.tape()


class _Sent:
    """Which tensors go to the host, as memory/offload.py decides it."""

    def __init__(self, training: TrainingArgs):
        self.parts, self.fraction = offloaded_parts(training), training.activation_offload_fraction
        self.least = max(1, training.min_offloaded_tensor_size) if training.fine_grained_activation_offloading else 1
        self.groups: Counter[str] = Counter()

    def of_layer(self, entries: Iterator[Kept], whole: bool) -> list[Kept]:
        """The entries of the next layer. whole: --cpu-offloading-num-layers sends all that autograd saves of it."""
        found, going = [], {}
        for entry in entries:
            part = "layer" if whole and "layer" in self.parts and not entry.name.startswith("routes.") else entry.part
            if part in self.parts and part not in going:
                number = self.groups[part]
                self.groups[part] += 1
                going[part] = is_offloaded(number, self.fraction)
            large = math.prod(entry.shape) >= self.least
            found.append(replace(entry, on_host=True) if going.get(part) and large else entry)
        return found

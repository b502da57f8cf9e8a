"""DeepSeek sparse attention (--experimental-attention-variant dsa): latent attention to keys chosen by an indexer.

The indexer reads the layer's normalized input and the query latent as constants, and is trained by its own loss only,
the divergence between the attention of all heads and its scores (ops/sparse_attention.py). Warm-up
(--dsa-indexer-warmup) trains only the indexer on dense attention; the sparse stage follows. Its GEMMs are never
quantized, because the choice depends on near ties. Tensor parallelism replicates the indexer; context parallelism
gathers all keys. See docs/design/sparse_attention.md.

Shapes: S local positions, K positions of the full sequence, B sequences, N local attention heads, H hidden, C query
latent width, I indexer heads, F their width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from arguments.layer_pattern import has_attention
from arguments.mechanisms.sublayers import variant_of
from arguments.model import ModelArgs
from arguments.sparse_attention import gather_unsupported_reason
from moe_trainer.layers.absorbed_mla import CompressedKV, gather_latents, latent_attention
from moe_trainer.layers.context_parallel import ContextParallelAttention
from moe_trainer.layers.core_attention import AttentionMask
from moe_trainer.layers.init import hidden_init
from moe_trainer.layers.layer_factory import LayerFactory
from moe_trainer.layers.linear import ReplicatedLinear
from moe_trainer.layers.norm import Norm
from moe_trainer.layers.ring_attention import gathered_attention, position_ranges, ring_attention
from moe_trainer.layers.rotary import Tables, skips_rope
from moe_trainer.ops.absorbed_mla import Latents
from moe_trainer.ops.attach_loss import attach_gradients
from moe_trainer.ops.block_attention import Selection
from moe_trainer.ops.hadamard import rotate
from moe_trainer.ops.rope import apply_rope
from moe_trainer.ops.sparse_attention import (
    DenseAttentionTarget,
    IndexerOutput,
    IndexerTarget,
    LatentAttentionTarget,
    decode_scores,
    select_topk_keys,
    topk_mask,
)
from moe_trainer.ops.transfer import to_device
from moe_trainer.parallel.collectives import all_reduce
from moe_trainer.parallel.mappings import gather_rows, reduce_scatter_rows
from moe_trainer.parallel.params import freeze_all_but
from moe_trainer.parallel.sequence import SequenceShard, sequential_to_zigzag
from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.parallel.weight_grads import WeightGradQueue
from moe_trainer.participant import Participant, StepMetrics

INDEXER = ".core_attention.indexer."
"""In the global names of indexers' parameters, and of no others."""


class Indexer(nn.Module):
    """Projections of the indexer. name: e.g. "decoder.layers.0.self_attention.core_attention.indexer"."""

    def __init__(
        self,
        model: ModelArgs,
        tp: Group,
        *,
        name: str,
        layer_number: int,
        queue: WeightGradQueue | None = None,
        apply_rope: Callable[..., Tensor] = apply_rope,
    ):
        super().__init__()
        self.apply_rope = apply_rope
        self.heads, self.width = model.dsa_indexer_n_heads, model.dsa_indexer_head_dim
        self.rope, self.interleaved = not skips_rope(model, layer_number), model.dsa_indexer_rope_interleaved
        self.rotates = model.dsa_indexer_rotate_activation

        def linear(in_features: int, out_features: int, leaf: str) -> ReplicatedLinear:
            return ReplicatedLinear(
                in_features, out_features, name=f"{name}.{leaf}", group=tp, init=hidden_init(model), queue=queue
            )

        self.linear_wq_b = linear(model.q_lora_rank or model.hidden_size, self.heads * self.width, "linear_wq_b")
        self.linear_wk = linear(model.hidden_size, self.width, "linear_wk")
        epsilon = (
            model.layernorm_epsilon if model.dsa_indexer_k_norm_epsilon is None else model.dsa_indexer_k_norm_epsilon
        )
        self.k_norm = Norm(
            self.width, replace(model, normalization="LayerNorm", layernorm_epsilon=epsilon), name=f"{name}.k_norm"
        )
        self.linear_weights_proj = linear(model.hidden_size, self.heads, "linear_weights_proj")

    def forward(self, x_SBH: Tensor, latent_SBC: Tensor, rope: Tables | None) -> IndexerOutput:
        """Return queries, keys and fp32 head weights of this context rank's positions.

        Args:
            x_SBH, latent_SBC: inputs without gradient.
        """
        q_SBIF = self.linear_wq_b(latent_SBC).unflatten(-1, (self.heads, self.width))
        k_SBIF = self.k_norm(self.linear_wk(x_SBH)).unsqueeze(2)
        if rope is not None and self.rope:
            q_SBIF, k_SBIF = (self.apply_rope(each, *rope, interleaved=self.interleaved) for each in (q_SBIF, k_SBIF))
        if self.rotates:
            q_SBIF, k_SBIF = rotate(q_SBIF), rotate(k_SBIF)
        weights_SBI = self.linear_weights_proj(x_SBH)
        weights_SBI = (
            weights_SBI.to(torch.promote_types(weights_SBI.dtype, torch.float32)) * (self.heads * self.width) ** -0.5
        )
        return IndexerOutput(q_SBIF, k_SBIF.squeeze(2), weights_SBI)


class SparseAttention(ContextParallelAttention):
    """Core attention to selected keys.

    Args:
        name: global name, e.g. "decoder.layers.0.self_attention.core_attention".
        scale: of the scores.
        factory: of the layer.
        sequence_parallel: the indexer's inputs are the local tokens.
        per_token_loss: see balancing_losses.

    Attributes:
        recorder: None, or a list that receives the selection of every pass: a bit per query and key, or key lists.
    """

    indexer_loss: Tensor

    def __init__(
        self,
        model: ModelArgs,
        ps: ParallelState,
        layer_number: int,
        *,
        name: str,
        scale: float,
        factory: LayerFactory,
        sequence_parallel: bool = False,
        per_token_loss: bool = False,
    ):
        super().__init__(
            model,
            layer_number,
            head_dim=model.qk_head_dim + model.qk_pos_emb_head_dim,
            scale=scale,
            heads=None,
            positions=ps.context,
            gathered=True,
        )
        self.tp, self.gathers_rows, self.activations = ps.tp, sequence_parallel and ps.tp.size > 1, factory.activations
        self.model, self.quantized, self.kernels = (
            model,
            factory.precision is not None,
            factory.kernels.sparse_attention,
        )
        self.topk = None if model.dsa_indexer_warmup else model.dsa_indexer_topk
        self.relu, self.selected_only = model.dsa_indexer_scoring_relu, model.dsa_indexer_use_sparse_loss
        self.coeff, self.per_token_loss = model.dsa_indexer_loss_coeff or 0.0, per_token_loss
        self.indexer = Indexer(
            model,
            ps.tp,
            name=f"{name}.indexer",
            layer_number=layer_number,
            queue=factory.queue,
            apply_rope=factory.kernels.apply_rope,
        )
        self.recorder: list[Tensor] | None = None
        # this rank's shares of the losses of passes, and of their number
        self.register_buffer("indexer_loss", torch.zeros(2, dtype=torch.float32), persistent=False)

    def uses_gathered_form(self, length: int, visible: AttentionMask | None) -> bool:
        """Return whether keys must be CompressedKV.

        Args:
            length: number of local positions.
            visible: says which ranks share the microbatch.
        """
        _, group = self.groups(visible)
        heads = self.model.num_attention_heads // self.tp.size
        return gather_unsupported_reason(self.model, heads, length * group.size, self.quantized) is None

    def forward(  # type: ignore[override]  # reads the indexer's inputs too; latent attention alone calls it
        self,
        q_SBND: Tensor,
        keys: tuple[Tensor, Tensor] | CompressedKV,
        visible: AttentionMask | None,
        x_SBH: Tensor,
        latent_SBC: Tensor,
        rope: Tables | None,
        grad_scale: float | Tensor = 1.0,
    ) -> Tensor:
        """Return [S, B, N * E].

        Args:
            keys: k_SBND and v_SBNE, or CompressedKV (`uses_gathered_form`).
            x_SBH, latent_SBC: inputs of the indexer.
            rope: of the local positions.
            grad_scale: factor of the indexer's loss in the gradient.

        Raises:
            ValueError: for an explicit attention mask.
        """
        if visible is not None and visible.mask is not None:
            raise ValueError("sparse attention is not built for explicit attention masks; give document ids")
        _, group = self.groups(visible)
        size, (k_SBND, v_SBNE) = group.size, keys
        topk = self.topk if self.topk is not None and self.topk < q_SBND.shape[0] * size else None
        learns = self.training and self.coeff > 0.0 and torch.is_grad_enabled()
        if topk is None and not learns:
            return super().forward(q_SBND, k_SBND, v_SBNE, visible)
        with torch.set_grad_enabled(learns):
            index = self.index(x_SBH, latent_SBC, rope)
        block_mask, sequence = self.block_mask(visible, q_SBND.device), SequenceShard(group)
        sequence = sequence.of(block_mask.lengths)
        runs = position_ranges(group.rank, size, q_SBND.shape[0], sequence.lengths)
        index_of_all = index._replace(k_KBF=sequence.full(index.k_KBF.detach(), 0))
        latents = None
        if isinstance(keys, CompressedKV):
            latents = gather_latents(*keys, q_SBND.shape[2], self.scale, group, sequence.lengths)
        attention_target = self._teacher(q_SBND, keys, latents, sequence) if learns else None
        counted_S: Tensor | None = None
        num_queries: int | Tensor = q_SBND.shape[0] * size * q_SBND.shape[1]
        if learns and visible is not None and visible.packed is not None:
            num_queries = visible.packed.num_valid
            counted_S = to_device(sequence.local(visible.packed.is_valid(), 0), q_SBND.device)
        choice, indexer_loss_grads = select_topk_keys(
            index_of_all, block_mask, runs, topk, self.relu, attention_target, latents is not None, counted_S
        )
        if self.recorder is not None and choice is not None:
            self.recorder.append(choice.bits_BSC if isinstance(choice, Selection) else choice)
        if isinstance(choice, Selection):
            attend = ring_attention if size == 1 else gathered_attention
            y_SBH = attend(q_SBND, k_SBND, v_SBNE, self.scale, replace(block_mask, selection=choice), group)
        elif choice is not None and latents is not None:
            compressed = CompressedKV(*keys)
            y_SBH = latent_attention(q_SBND, compressed, latents, choice, group, self.kernels, sequence.lengths)
        else:
            y_SBH = super().forward(q_SBND, k_SBND, v_SBNE, visible)
        if indexer_loss_grads is None:
            return y_SBH
        return self._attach(y_SBH, *indexer_loss_grads, index, grad_scale, sequence, num_queries)

    def index(self, x_SBH: Tensor, latent_SBC: Tensor, rope: Tables | None) -> IndexerOutput:
        """Return the indexer's output for all tokens of this context rank."""
        return self.indexer(*(self._all_rows(x) for x in (x_SBH, latent_SBC)), rope)

    def select_in_cache(self, index: IndexerOutput, keys_TKF: Tensor, visible_TK: Tensor) -> Tensor:
        """Return which of the visible positions one query of every sequence attends to.

        Args:
            index: of T sequences with one token each, as one sequence.
            keys_TKF: the indexer's keys of all positions.
        """
        if self.topk is None or self.topk >= keys_TKF.shape[1]:
            return visible_TK
        scores_TK = decode_scores(index, keys_TKF, self.relu).masked_fill_(~visible_TK, float("-inf"))
        return topk_mask(scores_TK.unsqueeze(1), self.topk).squeeze(1)

    def _teacher(
        self,
        q_SBND: Tensor,
        keys: tuple[Tensor, Tensor] | CompressedKV,
        latents: Latents | None,
        sequence: SequenceShard,
    ) -> IndexerTarget:
        def sum_over_ranks(x: Tensor) -> Tensor:
            return all_reduce(x, self.tp)

        q_SBND = q_SBND.detach()
        if latents is not None:
            return LatentAttentionTarget(q_SBND, latents, sum_over_ranks)
        k_KBND = sequence.full(keys[0].detach(), 0)
        return DenseAttentionTarget(q_SBND, k_KBND, self.scale, sum_over_ranks, self.selected_only)

    def _all_rows(self, x: Tensor) -> Tensor:
        """Return all tokens of this context rank, without gradient."""
        return gather_rows(x, self.tp)[0] if self.gathers_rows else x

    def _attach(
        self,
        y_SBH: Tensor,
        loss: Tensor,
        grads: IndexerOutput,
        index: IndexerOutput,
        grad_scale: float | Tensor,
        sequence: SequenceShard,
        num_queries: int | Tensor,
    ) -> Tensor:
        """Record the loss, and attach its gradient to that of y."""
        group, mean = sequence.cp, 1.0 / num_queries

        def note() -> None:
            self.indexer_loss += torch.stack([loss * (mean * self.coeff), torch.full_like(loss, 1.0 / group.size)])

        self.activations.cached_for_recompute(note)
        if group.size > 1:  # of all queries to this rank's keys
            rows = sequential_to_zigzag(grads.k_KBF, group.size, sequence.lengths)
            grads = grads._replace(k_KBF=reduce_scatter_rows(rows, group)[0])
        # without its factors the gradient fits into bf16 as it is; those of fp16 would reach below its smallest numbers
        kept = [grad.to(x.dtype) if x.dtype == torch.bfloat16 else grad for x, grad in zip(index, grads)]
        pairs = [tensor for pair in zip(index, kept) for tensor in pair]
        return attach_gradients(y_SBH, grad_scale * (self.coeff * (1.0 if self.per_token_loss else mean)), *pairs)


def iter_sparse_attentions(chunks: Sequence[nn.Module]) -> Iterator[SparseAttention]:
    """Yield all sparse attentions, those of multi-token prediction included."""
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, SparseAttention))


def freeze_all_but_indexers(chunks: Sequence[nn.Module]) -> None:
    """Freeze all other parameters for the warm-up, so that none has an optimizer state."""
    freeze_all_but(chunks, lambda name: INDEXER in name)


def reset_indexer_loss(chunks: Sequence[nn.Module]) -> None:
    """Reset the indexers' losses of the current iteration."""
    for layer in iter_sparse_attentions(chunks):
        layer.indexer_loss.zero_()


def reduce_indexer_loss(
    chunks: Sequence[nn.Module], ps: ParallelState, model: ModelArgs, device: torch.device
) -> Tensor:
    """Return the input of indexer_metric on every rank.

    Returns:
        fp64 [2] on the device, sum over layers and microbatches and their number, in which layers of a hybrid model
        without indexers count too, as in Megatron-LM; [0] without such a loss.

    Communication: two fp64 values over dp_cp, then over pp.
    """
    if not variant_of(model).selects_keys or not model.dsa_indexer_loss_coeff:
        return torch.zeros(0, dtype=torch.float64, device=device)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for layer in iter_sparse_attentions(chunks):
        total += layer.indexer_loss.double()
    total[1] *= model.num_layers / max(1, sum(has_attention(model, number) for number in range(model.num_layers)))
    all_reduce(total, ps.dp_cp)
    return all_reduce(total, ps.pp)


def indexer_metric(sums: Sequence[float]) -> dict[str, float]:
    """Return {"indexer loss": mean over layers and microbatches since reset_indexer_loss, with coefficient}."""
    return {"indexer loss": sums[0] / max(sums[1], 1.0)} if sums else {}


class IndexerLosses(Participant):
    """The indexers' losses of a model."""

    def __init__(self, chunks: Sequence[nn.Module], ps: ParallelState, model: ModelArgs, device: torch.device):
        self._chunks, self._ps, self._model, self._device = chunks, ps, model, device

    def reduced_sums(self) -> Tensor:
        return reduce_indexer_loss(self._chunks, self._ps, self._model, self._device)

    def end_step(self, sums: Sequence[float], num_microbatches: int) -> StepMetrics:
        self.discard()
        return StepMetrics(indexer_metric(sums))

    def discard(self) -> None:
        reset_indexer_loss(self._chunks)

"""DeepSeek sparse attention (--experimental-attention-variant dsa): latent attention to the keys that a small indexer chooses.

The indexer reads what the attention's own queries are made of - the layer's normalized input and the normalized query latent - as
constants, and learns from a loss of its own: the divergence between what all heads attend to together and its scores
(ops/sparse_attention.py). So the model's loss trains everything but the indexers, and the indexers' loss nothing but them.

Its first --qk-pos-emb-head-dim channels are rotated by the attention's own tables, as halves (interleaved on request); then queries and
keys pass through a Hadamard transform, which leaves products as they are and spreads large channels out. Its products are never
quantised: the choice hangs on near ties.

Two stages of training. Warm-up (--dsa-indexer-warmup): attention stays dense, the indexer learns to imitate it, everything else is frozen.
Then the sparse stage. Where there are no more keys than would be chosen, attention is the dense one too.

The sparse stage has two forms with the same result (shape/sparse_keys.py says which, and why): keys and values of heads, of which those not
chosen are masked, or latents, of which the chosen ones are gathered.

Tensor parallelism: every rank holds the whole indexer and computes the same with it, from rows that are gathered without a gradient
under sequence parallelism; only the target is summed over the ranks' heads. So its gradients agree, and nobody has to sum them.
Context parallelism: keys come to the queries, all at once (--cp-comm-type allgather), those of the indexer too. A rank's loss is its
queries' share of the mean over the sequence, scaled as the balancing losses are (moe/balancing.py).

Source: DeepSeek-V3.2-Exp report; names of Megatron-Core.
Shapes: S positions of this rank, K of the whole sequence, B sequences, N attention heads of this rank, H hidden, C width of the query
latent, I heads of the indexer, F their width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from arguments.model import ModelArgs
from moe_trainer.layers.context_parallel import ContextParallelAttention
from moe_trainer.layers.core_attention import Visible
from moe_trainer.layers.init import hidden_init
from moe_trainer.layers.latent_attention import LatentKeys, latent_attention, latents_of
from moe_trainer.layers.linear import ReplicatedLinear
from moe_trainer.layers.norm import Norm
from moe_trainer.layers.ring_attention import gathered_attention, ring_attention, runs_of
from moe_trainer.layers.rotary import Tables, skips_rope
from moe_trainer.memory.activations import Activations
from moe_trainer.ops.attach_loss import attach_gradients
from moe_trainer.ops.hadamard import rotate
from moe_trainer.ops.latent_attention import PLAIN, Latents, TileSteps
from moe_trainer.ops.rope import apply_rope
from moe_trainer.ops.sparse_attention import HeadTeacher, Index, LatentTeacher, Teacher, choose_keys
from moe_trainer.parallel.collectives import all_reduce
from moe_trainer.parallel.mappings import gather_rows, reduce_scatter_rows
from moe_trainer.parallel.params import info_of
from moe_trainer.parallel.sequence import SequenceShard, rank_order
from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.parallel.weight_grads import WeightGradQueue
from moe_trainer.shape.sparse_keys import why_masked

INDEXER = ".core_attention.indexer."
"""In the global names of indexers' parameters, and of no others."""


class Indexer(nn.Module):
    """What the scores of keys are made of. name: global name, e.g. "decoder.layers.0.self_attention.core_attention.indexer"."""

    def __init__(self, model: ModelArgs, tp: Group, *, name: str, layer_number: int, queue: WeightGradQueue | None = None):
        super().__init__()
        self.heads, self.width = model.dsa_indexer_n_heads, model.dsa_indexer_head_dim
        self.rope, self.interleaved = not skips_rope(model, layer_number), model.dsa_indexer_rope_interleaved
        self.rotates = model.dsa_indexer_rotate_activation

        def linear(in_features: int, out_features: int, leaf: str) -> ReplicatedLinear:
            return ReplicatedLinear(in_features, out_features, name=f"{name}.{leaf}", group=tp, init=hidden_init(model), queue=queue)

        self.linear_wq_b = linear(model.q_lora_rank or model.hidden_size, self.heads * self.width, "linear_wq_b")
        self.linear_wk = linear(model.hidden_size, self.width, "linear_wk")
        epsilon = model.layernorm_epsilon if model.dsa_indexer_k_norm_epsilon is None else model.dsa_indexer_k_norm_epsilon
        self.k_norm = Norm(self.width, replace(model, normalization="LayerNorm", layernorm_epsilon=epsilon), name=f"{name}.k_norm")
        self.linear_weights_proj = linear(model.hidden_size, self.heads, "linear_weights_proj")

    def forward(self, x_SBH: Tensor, latent_SBC: Tensor, rope: Tables | None) -> Index:
        """Both inputs without a gradient, of all this context rank's positions. Returns: keys of these positions; weights in fp32."""
        q_SBIF = self.linear_wq_b(latent_SBC).unflatten(-1, (self.heads, self.width))
        k_SBIF = self.k_norm(self.linear_wk(x_SBH)).unsqueeze(2)
        if rope is not None and self.rope:
            q_SBIF, k_SBIF = (apply_rope(each, *rope, interleaved=self.interleaved) for each in (q_SBIF, k_SBIF))
        if self.rotates:
            q_SBIF, k_SBIF = rotate(q_SBIF), rotate(k_SBIF)
        weights_SBI = self.linear_weights_proj(x_SBH)
        weights_SBI = weights_SBI.to(torch.promote_types(weights_SBI.dtype, torch.float32)) * (self.heads * self.width) ** -0.5
        return Index(q_SBIF, k_SBIF.squeeze(2), weights_SBI)


class SparseAttention(ContextParallelAttention):
    """Core attention to chosen keys. name: global name, e.g. "decoder.layers.0.self_attention.core_attention".

    sequence_parallel: the indexer's inputs are this rank's rows. steps: of attention to listed keys. per_token_loss: see balancing_losses. quantized: linears multiply in fewer
    bits. `recorder`: None, or a list that receives the choice of every pass, a bit per query and key or a list of each query's keys.
    """

    def __init__(self, model: ModelArgs, ps: ParallelState, layer_number: int, *, name: str, head_dim: int, scale: float,
                 activations: Activations, queue: WeightGradQueue | None = None, sequence_parallel: bool = False,
                 per_token_loss: bool = False, quantized: bool = False, steps: TileSteps = PLAIN):
        super().__init__(model, layer_number, head_dim=head_dim, scale=scale, heads=Group.single("no heads travel"), positions=ps.cp,
                         gathered=True)
        self.tp, self.gathers_rows, self.activations = ps.tp, sequence_parallel and ps.tp.size > 1, activations
        self.model, self.quantized, self.steps = model, quantized, steps
        self.topk = None if model.dsa_indexer_warmup else model.dsa_indexer_topk
        self.relu, self.selected_only = model.dsa_indexer_scoring_relu, model.dsa_indexer_use_sparse_loss
        self.coeff, self.per_token_loss = model.dsa_indexer_loss_coeff or 0.0, per_token_loss
        self.indexer = Indexer(model, ps.tp, name=f"{name}.indexer", layer_number=layer_number, queue=queue)
        self.recorder: list[Tensor] | None = None
        # this rank's share of the loss, summed over passes, and the number of passes
        self.register_buffer("indexer_loss", torch.zeros(2, dtype=torch.float32), persistent=False)

    def wants_latents(self, length: int) -> bool:
        """Are keys to be LatentKeys? length: positions of this rank."""
        heads = self.model.num_attention_heads // self.tp.size
        return why_masked(self.model, heads, length * self.positions.size, self.quantized) is None

    def forward(self, q_SBND: Tensor, keys: tuple[Tensor, Tensor] | LatentKeys, visible: Visible | None, x_SBH: Tensor, latent_SBC: Tensor,
                rope: Tables | None, grad_scale: float | Tensor = 1.0) -> Tensor:
        """keys: k_SBND and v_SBNE, or as `wants_latents` says. x, latent: what the indexer reads. rope: of this rank's positions.
        grad_scale: factor of the indexer's loss in the gradient.

        Returns: [S, B, N * E]. Raises: ValueError for an explicit attention mask.
        """
        if visible is not None and visible.mask is not None:
            raise ValueError("sparse attention is not built for explicit attention masks; give document ids")
        size, group, listed = self.positions.size, self.positions, isinstance(keys, LatentKeys)
        topk = self.topk if self.topk is not None and self.topk < q_SBND.shape[0] * size else None
        learns = self.training and self.coeff > 0.0 and torch.is_grad_enabled()
        if topk is None and not learns:
            return super().forward(q_SBND, *keys, visible)
        with torch.set_grad_enabled(learns):
            index = self.indexer(*(self._all_rows(x) for x in (x_SBH, latent_SBC)), rope)
        runs, rule = runs_of(group.rank, size, q_SBND.shape[0]), self.rule(visible, q_SBND.device)
        index_of_all = index._replace(k_KBF=SequenceShard(group).full(index.k_KBF.detach(), 0))
        latents = latents_of(*keys, q_SBND.shape[2], self.scale, group) if listed else None
        teacher = self._teacher(q_SBND, keys, latents) if learns else None
        choice, lesson = choose_keys(index_of_all, rule, runs, topk, self.relu, teacher, listed)
        if self.recorder is not None and choice is not None:
            self.recorder.append(choice if listed else choice.bits_BSC)
        if choice is None:
            y_SBH = super().forward(q_SBND, *keys, visible)
        elif listed:
            y_SBH = latent_attention(q_SBND, keys, latents, choice, group, self.steps)
        else:
            attend = ring_attention if size == 1 else gathered_attention
            y_SBH = attend(q_SBND, *keys, self.scale, replace(rule, selection=choice), group)
        return y_SBH if lesson is None else self._attach(y_SBH, lesson.loss, lesson.grads, index, grad_scale)

    def _teacher(self, q_SBND: Tensor, keys: tuple[Tensor, Tensor] | LatentKeys, latents: Latents | None) -> Teacher:
        def sum_over_ranks(x: Tensor) -> Tensor:
            return all_reduce(x, self.tp)

        q_SBND = q_SBND.detach()
        if latents is not None:
            return LatentTeacher(q_SBND, latents, sum_over_ranks)
        k_KBND = SequenceShard(self.positions).full(keys[0].detach(), 0)
        return HeadTeacher(q_SBND, k_KBND, self.scale, sum_over_ranks, self.selected_only)

    def _all_rows(self, x: Tensor) -> Tensor:
        """Of this context rank. x: without a gradient, as the caller gives it."""
        return gather_rows(x, self.tp)[0] if self.gathers_rows else x

    def _attach(self, y_SBH: Tensor, loss: Tensor, grads: Index, index: Index, grad_scale: float | Tensor) -> Tensor:
        """Let the loss be noted, and its gradient enter with that of y."""
        group = self.positions
        mean = 1.0 / (y_SBH.shape[0] * group.size * y_SBH.shape[1])

        def note() -> None:
            self.indexer_loss += torch.stack([loss * (mean * self.coeff), torch.ones_like(loss)])

        self.activations.once(note)
        if group.size > 1:  # of all queries to this rank's keys
            grads = grads._replace(k_KBF=reduce_scatter_rows(rank_order(grads.k_KBF, group.size), group)[0])
        # without its factors the gradient fits into bf16 as it is; those of fp16 would reach below its smallest numbers
        kept = [grad.to(x.dtype) if x.dtype == torch.bfloat16 else grad for x, grad in zip(index, grads)]
        pairs = [tensor for pair in zip(index, kept) for tensor in pair]
        return attach_gradients(y_SBH, grad_scale * (self.coeff * (1.0 if self.per_token_loss else mean)), *pairs)


def sparse_layers(chunks: Sequence[nn.Module]) -> Iterator[SparseAttention]:
    """Those of multi-token prediction included."""
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, SparseAttention))


def freeze_all_but_indexers(chunks: Sequence[nn.Module]) -> None:
    """For the warm-up: no other parameter gets a gradient, so none has an optimizer state."""
    for chunk in chunks:
        for param in chunk.parameters():
            param.requires_grad_(INDEXER in info_of(param).names[0])


def forget_indexer_loss(chunks: Sequence[nn.Module]) -> None:
    """Forget the indexers' losses of the iteration under way."""
    for layer in sparse_layers(chunks):
        layer.indexer_loss.zero_()


def indexer_sums(chunks: Sequence[nn.Module], ps: ParallelState, model: ModelArgs, device: torch.device) -> Tensor:
    """What indexer_metric takes, over all ranks and known to each: fp64 [2] on the device, sum of the layers' means and number of layers; [0]
    where there is no such loss. Communication: two fp64 values over dp_cp, then over pp."""
    if model.experimental_attention_variant != "dsa" or not model.dsa_indexer_loss_coeff:
        return torch.zeros(0, dtype=torch.float64, device=device)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for layer in sparse_layers(chunks):
        loss, passes = layer.indexer_loss.double()
        total += torch.stack([loss / passes.clamp(min=1.0), torch.ones_like(loss)])
    all_reduce(total, ps.dp_cp)
    total /= ps.dp.size  # the ranks of cp hold shares of one mean
    total[1] /= ps.cp.size
    return all_reduce(total, ps.pp)


def indexer_metric(sums: Sequence[float]) -> dict[str, float]:
    """Mean loss of the indexers since the last forget_indexer_loss, with its coefficient, over layers and microbatches: {"indexer loss": ...}."""
    return {"indexer loss": sums[0] / max(sums[1], 1.0)} if sums else {}

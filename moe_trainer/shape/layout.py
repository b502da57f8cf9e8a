"""Which layers, embedding, loss and multi-token prediction stand on which pipeline rank. Pure arithmetic.

The model is cut into pp * vpp chunks in the order in which data runs through them; chunk number i belongs to pipeline rank
i % pp and is that rank's virtual chunk i // pp (Megatron-LM's order). What the flags decide is how many decoder layers
each chunk holds:

* evenly: num_layers / (pp * vpp) each;
* --account-for-embedding/loss-in-pipeline-split: embedding and loss count as a layer each, so the first and the last chunk
  hold one layer less;
* --decoder-first/last-pipeline-num-layers: those ranks hold that many, the ranks between share the rest;
* --pipeline-model-parallel-layout: as drawn (arguments/rules/layout_grammar.py).

Layers are numbered through in chunk order, so a layer's global number never depends on the cut. A chunk may hold no layer
at all and pass on what it receives. The final norm stands with the loss; with multi-token prediction, which reads the
normed state, it stands with the last decoder layer. The flags were judged by arguments/rules/pipeline.py: what cannot be
divided here is our mistake, not the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arguments.rules.layout_grammar import DECODER, MTP, read_layout

if TYPE_CHECKING:
    from arguments import Arguments
    from arguments.model import ModelArgs
    from arguments.parallel import ParallelArgs


@dataclass(frozen=True)
class ChunkLayout:
    """What one chunk holds, and what reaches it.

    layers: global numbers of its decoder layers, from 0, ascending.
    has_embedding: it begins the pipeline with token ids. has_loss: it ends it with head and loss.
    has_final_norm: the decoder's final norm stands behind its layers. mtp: it holds the multi-token-prediction layers.
    receives_normed: what comes in has passed the final norm (and has the dtype of the weights).
    receives_depths: in training, what comes in is the decoder's state and behind it, along the sequence, the states of this
    many multi-token-prediction depths, which only the loss still waits for.
    """

    layers: tuple[int, ...]
    has_embedding: bool = False
    has_loss: bool = False
    has_final_norm: bool = False
    mtp: bool = False
    receives_normed: bool = False
    receives_depths: int = 0

    @property
    def has_word_embeddings(self) -> bool:
        """Does it look tokens up? (Multi-token prediction does so too.)"""
        return self.has_embedding or self.mtp


def chunk_layouts(model: ModelArgs, parallel: ParallelArgs) -> tuple[tuple[ChunkLayout, ...], ...]:
    """Lay the model out over the pipeline. Returns: chunks by [pipeline rank][virtual chunk]."""
    pp = parallel.pipeline_model_parallel_size
    if parallel.pipeline_model_parallel_layout is not None:
        stages = read_layout(parallel.pipeline_model_parallel_layout).stages
        counts, mtp = [stage.count(DECODER) for stage in stages], [MTP in stage for stage in stages]
    else:
        counts = _counts(model.num_layers, parallel)
        mtp = [False] * (len(counts) - 1) + [bool(model.mtp_num_layers)]
    chunks = _chunks(counts, mtp, model.mtp_num_layers or 0)
    assert len(chunks) % pp == 0, f"{len(chunks)} chunks for {pp} pipeline ranks"
    return tuple(tuple(chunks[rank::pp]) for rank in range(pp))


def _chunks(counts: Sequence[int], mtp: Sequence[bool], depths: int) -> list[ChunkLayout]:
    last = len(counts) - 1
    norm_at = last
    if any(mtp):
        norm_at = max((index for index, count in enumerate(counts) if count), default=0)
    chunks, first = [], 0
    for index, count in enumerate(counts):
        chunks.append(ChunkLayout(
            layers=tuple(range(first, first + count)), has_embedding=index == 0, has_loss=index == last,
            has_final_norm=index == norm_at, mtp=mtp[index], receives_normed=index > norm_at,
            receives_depths=depths if any(mtp[:index]) else 0,
        ))
        first += count
    return chunks


def _virtual(num_layers: int, parallel: ParallelArgs) -> int:
    """Chunks per pipeline rank, without a drawn layout."""
    pp = parallel.pipeline_model_parallel_size
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        return parallel.num_virtual_stages_per_pipeline_rank
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        return _whole(_whole(_split(num_layers, parallel), pp), parallel.num_layers_per_virtual_pipeline_stage)
    return 1


def _split(num_layers: int, parallel: ParallelArgs) -> int:
    """Layers that are spread, with those that the embedding and the loss stand for."""
    return num_layers + parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split


def _counts(num_layers: int, parallel: ParallelArgs) -> list[int]:
    """Decoder layers of every chunk in pipeline order, without a drawn layout."""
    pp, vpp = parallel.pipeline_model_parallel_size, _virtual(num_layers, parallel)
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    ends = [count for count in (first, last) if count is not None]
    if ends:
        middle = pp - len(ends)
        rest = num_layers - sum(ends)
        per_rank = [_whole(rest, middle)] * pp if middle else [0] * pp
        if first is not None:
            per_rank[0] = first
        if last is not None:
            per_rank[-1] = last
    else:
        per_rank = [_whole(_split(num_layers, parallel), pp)] * pp
    counts = [_whole(count, vpp) for count in per_rank] * vpp
    counts[0] -= parallel.account_for_embedding_in_pipeline_split
    counts[-1] -= parallel.account_for_loss_in_pipeline_split
    assert sum(counts) == num_layers and min(counts) >= 0, f"{counts} layers per chunk, {num_layers} in all"
    return counts


def _whole(total: int, parts: int) -> int:
    assert parts > 0 and total % parts == 0, f"{total} layers do not divide into {parts}"
    return total // parts


def embedding_stages(layouts: Sequence[Sequence[ChunkLayout]], tied: bool) -> tuple[int, ...]:
    """Pipeline ranks that hold the word embeddings, ascending: where tokens are looked up, and with a tied head the loss."""
    return tuple(
        rank for rank, chunks in enumerate(layouts)
        if any(chunk.has_word_embeddings or (tied and chunk.has_loss) for chunk in chunks)
    )


def mapping_sizes(args: Arguments) -> dict[str, Any]:
    """What the groups of a run depend on, as parallel/groups.py: plan_groups takes it.

    Raises: ValueError when the flags give no layout.
    """
    parallel = args.parallel
    return dict(
        tp=parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size,
        order="tp-cp-ep-pp-dp" if parallel.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        optimizer_instances=parallel.num_distributed_optimizer_instances,
        embedding_stages=embedding_stages(chunk_layouts(args.model, parallel),
                                          not args.model.untie_embeddings_and_output_weights),
        cp_levels=parallel.hierarchical_context_parallel_sizes,
        second_pipeline=parallel.overlap_p2p_comm,
    )

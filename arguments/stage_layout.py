"""Assignment of layers, embedding, loss and multi-token prediction to pipeline ranks. Pure arithmetic.

The model is divided into pp * vpp chunks in execution order; chunk i is virtual chunk i // pp of pipeline rank i % pp,
as in Megatron-LM. The flags set the layers per chunk: evenly (num_layers / chunks); with
--account-for-embedding/loss-in-pipeline-split, one layer less in the first and last chunk;
--decoder-first/last-pipeline-num-layers; or --pipeline-model-parallel-layout (rules/layout_grammar.py). Layers are
numbered in chunk order, so global numbers do not depend on the division. A chunk may have no layer. The final norm is
next to the loss or, with multi-token prediction, after the last decoder layer. rules/pipeline.py has checked the flags:
an indivisible number here is an internal error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arguments.mechanisms.dispatchers import get_dispatcher
from arguments.rules.layout_grammar import DECODER, MTP, read_layout

if TYPE_CHECKING:
    from arguments.container import Arguments
    from arguments.model import ModelArgs
    from arguments.parallel import ParallelArgs


@dataclass(frozen=True)
class ChunkLayout:
    """Contents of one chunk, and what it receives.

    Attributes:
        layers: global numbers of its decoder layers, from 0, ascending.
        has_embedding: whether the pipeline begins here, with token ids.
        has_loss: whether the pipeline ends here, with output layer and loss.
        has_final_norm: whether the decoder's final norm follows its layers.
        mtp: whether it has the multi-token-prediction layers.
        receives_normed: whether the input has passed the final norm (and has the dtype of the weights).
        receives_depths: in training, the number of multi-token-prediction depths whose states follow the decoder's
        state in the input, along the sequence; only the loss uses them.
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
        """Whether the chunk looks tokens up, as multi-token prediction does too."""
        return self.has_embedding or self.mtp


def chunk_layouts(model: ModelArgs, parallel: ParallelArgs) -> tuple[tuple[ChunkLayout, ...], ...]:
    """Assign the model's layers to the pipeline; return chunks by [pipeline rank][virtual chunk]."""
    pp = parallel.pipeline_model_parallel_size
    if parallel.pipeline_model_parallel_layout is not None:
        stages = read_layout(parallel.pipeline_model_parallel_layout).stages
        counts, mtp = [stage.count(DECODER) for stage in stages], [MTP in stage for stage in stages]
    else:
        counts = _counts(model.num_layers, parallel)
        mtp = [False] * (len(counts) - 1) + [model.num_mtp_depths > 0]
    chunks = _chunks(counts, mtp, model.num_mtp_depths)
    assert len(chunks) % pp == 0, f"{len(chunks)} chunks for {pp} pipeline ranks"
    return tuple(tuple(chunks[rank::pp]) for rank in range(pp))


def _chunks(counts: Sequence[int], mtp: Sequence[bool], depths: int) -> list[ChunkLayout]:
    last = len(counts) - 1
    norm_at = last
    if any(mtp):
        norm_at = max((index for index, count in enumerate(counts) if count), default=0)
    chunks, first = [], 0
    for index, count in enumerate(counts):
        chunks.append(
            ChunkLayout(
                layers=tuple(range(first, first + count)),
                has_embedding=index == 0,
                has_loss=index == last,
                has_final_norm=index == norm_at,
                mtp=mtp[index],
                receives_normed=index > norm_at,
                receives_depths=depths if any(mtp[:index]) else 0,
            )
        )
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
    """Return the number of layers to divide, with those that the embedding and the loss count as."""
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
    """Return the pipeline ranks that hold the word embeddings: those of the lookup and, if tied, of the loss."""
    return tuple(
        rank
        for rank, chunks in enumerate(layouts)
        if any(chunk.has_word_embeddings or (tied and chunk.has_loss) for chunk in chunks)
    )


def grid_sizes(parallel: ParallelArgs) -> dict[str, Any]:
    """Return the arguments of parallel/grid.py: make_layout for a run."""
    return dict(
        tp=parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.etp_size,
        order="tp-cp-ep-pp-dp" if parallel.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )


def group_options(args: Arguments) -> dict[str, Any]:
    """Return the arguments of parallel/groups.py: plan_groups for a run.

    Raises:
        ValueError: if the flags give no layout.
    """
    parallel = args.parallel
    return dict(
        optimizer_instances=parallel.num_distributed_optimizer_instances,
        embedding_stages=embedding_stages(
            chunk_layouts(args.model, parallel), not args.model.untie_embeddings_and_output_weights
        ),
        cp_levels=parallel.hierarchical_context_parallel_sizes,
        second_pipeline=parallel.overlap_p2p_comm,
        ranks_per_node=args.moe.moe_hierarchical_domain_size if get_dispatcher(args.moe).groups_by_domain else None,
        dynamic_cp_sizes=args.dynamic_cp_sizes,
    )


def parallel_sizes(args: Arguments) -> dict[str, Any]:
    """Return both: the arguments of parallel/state.py: ParallelState.create."""
    return grid_sizes(args.parallel) | group_options(args)

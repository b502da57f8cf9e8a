"""Parameters, weights, gradients and optimizer state of every pipeline rank against runs that are built on gloo ranks."""

import pytest
from harness import run_ranks
from training.layouts import create_groups, make_argv, make_run

from arguments import parse_args
from arguments.stage_layout import chunk_layouts
from arguments.vocabulary import padded_vocab_size_from_flags
from moe_trainer.estimate.parameters import LayerParams, ParamsPerRank
from moe_trainer.estimate.static_memory import stage_states
from moe_trainer.parallel.params import get_param_info, unique_params

# every tensor has a multiple of 64 elements, so that little is lost to alignment in buffers
SIZES = "--hidden-size 64 --ffn-hidden-size 128 --kv-channels 64 --vocab-size 250 --make-vocab-size-divisible-by 256"
LATENT = "--q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 64 --v-head-dim 64 --qk-pos-emb-head-dim 64 --moe-shared-expert-intermediate-size 64"
FILL = 4 * 128 * 18  # two buffers a kind of parameters, each filled up to 128 elements, at 18 bytes an element
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
DELTA = (
    "--experimental-attention-variant gdn --linear-attention-freq 3 --linear-num-key-heads 2 --linear-num-value-heads 4 "
    "--linear-key-head-dim 32 --linear-value-head-dim 64"
)
INDEXERS = "--dsa-indexer-n-heads 64 --dsa-indexer-head-dim 64 --dsa-indexer-topk 4"
SPARSE = f"--experimental-attention-variant dsa {INDEXERS}"
CASES = (
    (1, "plain", ""),
    (
        2,
        "biases, tied head",
        "--pipeline-model-parallel-size 2 --normalization LayerNorm --position-embedding-type learned_absolute",
    ),
    (2, "biases, tied head", f"{TP2} --expert-tensor-parallel-size 1 --qk-layernorm"),
    (2, "plain", f"{TP2} --moe-latent-size 64"),
    (2, "deepseek", f"{TP2} --mtp-num-layers 1 --head-wise-attn-gate --lora-dim 64 --bf16 --use-distributed-optimizer"),
    (4, "plain", f"{TP2} --pipeline-model-parallel-size 2 --lora-dim 64 --lora-target-modules linear_qkv *.experts.*"),
    (
        2,
        "plain",
        f"{TP2} --freeze-backbone --qk-layernorm --moe-layer-freq [0,1,1,1] --moe-shared-expert-intermediate-size 64",
    ),
    (2, "plain", "--pipeline-model-parallel-size 2 --freeze-backbone --bf16 --use-distributed-optimizer"),
    (
        2,
        "plain",
        f"{TP2} --freeze-backbone --enable-hyper-connections --num-residual-streams 2 --hybrid-layer-pattern=*E*- "
        "--untie-embeddings-and-output-weights",
    ),
    (2, "deepseek", f"{INDEXERS} --dsa-indexer-loss-coeff 1 --dsa-indexer-warmup --hybrid-layer-pattern +ED-/D+"),
    (2, "plain", f"{TP2} --mtp-num-layers 1 {DELTA}"),
    (2, "plain", f"{TP2} --kda-gate-rank 64 {DELTA.replace('gdn', 'kda')}"),
    (2, "plain", f"{TP2} --experimental-attention-variant short_conv --linear-attention-freq 3"),
    (2, "plain", f"--pipeline-model-parallel-size 2 {DELTA}"),
    (2, "plain", f"{TP2} --group-query-attention --num-query-groups 1 --add-qkv-bias"),
    (2, "plain", f"{TP2} --add-attention-output-bias --add-output-layer-bias"),
    (2, "deepseek", "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tmL"),
    (2, "deepseek", "--expert-model-parallel-size 2 --use-distributed-optimizer --bf16"),
    (2, "deepseek", f"{TP2} {SPARSE} --mtp-num-layers 1"),
    (
        2,
        "deepseek",
        f"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tmL --bf16 --use-distributed-optimizer {SPARSE} "
        "--dsa-indexer-loss-coeff 1 --dsa-indexer-warmup",
    ),
    (
        4,
        "deepseek",
        f"{TP2} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|tt|mL --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --bf16 --use-distributed-optimizer",
    ),
    (
        4,
        "plain",
        f"{TP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 2 --moe-shared-expert-intermediate-size 8 "
        "--moe-shared-expert-gate",
    ),
)


def _argv(kind, flags):
    return [*make_argv(kind), *SIZES.split(), *(LATENT.split() if kind == "deepseek" else ()), *flags.split()]


def _state(run):
    """Bytes of weights, gradients, main parameters and moments that a run has allocated."""
    kept = [
        tensor
        for state in run.optimizer._shards
        for block in state.blocks
        for _, each in block.storages()
        for tensor in each.tensors
    ]
    buffers = [state.gather_buffer for state in run.optimizer._shards] + [buffer.flat for buffer in run.grads.buffers]
    frozen = [param for chunk in run.chunks for param in chunk.parameters() if not param.requires_grad]
    return sum(tensor.untyped_storage().nbytes() for tensor in [*buffers, *kept, *frozen])


def _built(rank, n, cases):
    found = []
    for kind, flags in cases:
        argv = _argv(kind, flags)
        ps = create_groups(argv, rank, n)
        run = make_run(argv, rank, ps, 1)
        params = unique_params(param for chunk in run.chunks for param in chunk.parameters())
        counted = {
            kind: sum(param.numel() for param in params if get_param_info(param).kind == kind)
            for kind in ("dense", "expert")
        }
        found.append((ps.pp.rank, ParamsPerRank(counted["dense"], counted["expert"]), _state(run)))
    return found


@pytest.mark.parametrize("n", [1, 2, 4])
def test_estimated_bytes_of_every_rank_equal_the_built_run(n):
    check_ranks(n, [(kind, flags) for ranks, kind, flags in CASES if ranks == n])


def check_ranks(n, cases):
    for results in run_ranks(_built, n, cases):
        for (kind, flags), (stage, held, state) in zip(cases, results, strict=True):
            args = parse_args(_argv(kind, flags), n)
            params = LayerParams(args, padded_vocab_size_from_flags(args))
            estimated = sum(
                (params.chunk(chunk) for chunk in chunk_layouts(args.model, args.parallel)[stage]), ParamsPerRank(0, 0)
            )
            assert estimated == held, (kind, flags, stage)
            surplus = state - stage_states(args, n, padded_vocab_size_from_flags(args))[stage].total
            assert 0 <= surplus <= FILL, (kind, flags, stage, surplus)

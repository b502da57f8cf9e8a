"""Bytes of weights, gradients and optimizer state: calculated by hand, and measured in runs with every option."""

import pytest
from harness import run_ranks
from training.layouts import create_groups, make_run

from arguments import parse_args
from arguments.stage_layout import chunk_layouts
from moe_trainer.estimate.state_bytes import rank_state_bytes, state_bytes
from moe_trainer.estimate.static_memory import matrices_only, quantized_params_on_rank
from moe_trainer.optim.fsdp_shard import FsdpGrads
from moe_trainer.parallel.params import get_param_info, is_quantized_param, unique_params
from moe_trainer.parallel.shards import local_shards
from moe_trainer.quantization.mx_weight import MxWeight

# every size is a multiple of 64, so that nothing is lost to alignment
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --num-experts 4 --moe-router-topk 2 "
    "--moe-grouped-gemm --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 1 --lr 1e-3 "
    "--mock-data --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 250 --make-vocab-size-divisible-by 256 --transformer-impl local "
    "--attention-dropout 0 --hidden-dropout 0"
).split()
AWARE = "--use-precision-aware-optimizer"
NARROW = f"{AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
ZERO = "--use-distributed-optimizer"
STORED = "--fp8-format e4m3 --fp8-param-gather"
FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy"
CASES = (
    (1, ""),
    (1, "--bf16"),
    (1, "--optimizer sgd --bf16"),
    (1, "--optimizer muon --bf16"),
    (1, "--optimizer lion --bf16"),
    (2, f"--optimizer muon --muon-scalar-optimizer lion --bf16 {ZERO} --overlap-grad-reduce --overlap-param-gather"),
    (2, f"--optimizer muon --bf16 {ZERO} --expert-model-parallel-size 2"),
    (1, f"--bf16 {NARROW} --main-grads-dtype bf16"),
    (1, f"--fp16 {AWARE} --main-params-dtype fp16 --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"),
    (1, f"--bf16 {NARROW} --optimizer-cpu-offload --optimizer-offload-fraction 0.5"),
    (1, f"{NARROW} --optimizer-cpu-offload"),
    (1, f"--bf16 {NARROW} --offload-optimizer-states --optimizer-state-offload-fraction 0.25"),
    (1, "--bf16 --offload-optimizer-states"),
    (1, "--bf16 --grad-reduce-in-bf16 --ddp-param-name-patterns-for-fp32-local-accumulation all"),
    (2, f"--bf16 {ZERO}"),
    (2, f"--bf16 {ZERO} {NARROW} --main-grads-dtype bf16 --expert-model-parallel-size 2"),
    (
        2,
        f"--bf16 {ZERO} {AWARE} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8 --overlap-grad-reduce --overlap-param-gather",
    ),
    (2, f"--bf16 {FSDP} optim_grads_params {NARROW}"),
    (2, f"{FSDP} optim_grads_params --expert-model-parallel-size 2"),
    (2, f"--bf16 {FSDP} optim_grads_params --megatron-fsdp-main-params-dtype auto"),
    (2, f"--bf16 {FSDP} optim --megatron-fsdp-main-params-dtype bf16 --megatron-fsdp-main-grads-dtype bf16"),
    (
        4,
        f"--bf16 {FSDP} optim_grads_params --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim "
        "--expert-model-parallel-size 2",
    ),
    (2, f"--bf16 {FSDP} optim {NARROW}"),
    (2, f"--bf16 {FSDP} optim --megatron-fsdp-main-grads-dtype bf16"),
    (4, f"--bf16 {ZERO} {NARROW} --num-distributed-optimizer-instances 2"),
    (1, f"--bf16 {ZERO} {STORED} --fp8-recipe blockwise --mtp-num-layers 1 --moe-shared-expert-intermediate-size 64"),
    (2, f"--bf16 {ZERO} {STORED} --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 0"),
    (2, f"--bf16 {ZERO} {STORED} --fp8-recipe mxfp8"),
    (2, f"--bf16 {ZERO} {STORED} --fp8-recipe mxfp8 --reuse-grad-buf-for-mxfp8-param-ag --optimizer muon"),
    (2, f"--bf16 {ZERO} {STORED} --optimizer muon --optimizer-cpu-offload"),
    (2, f"--bf16 {ZERO} --fp4-format e2m1 --fp4-param-gather {NARROW}"),
    (2, f"--bf16 {FSDP} optim {STORED}"),
    (2, f"--bf16 {FSDP} optim_grads_params {STORED}"),
    (1, f"{ZERO} {STORED}"),
    (
        1,
        f"--bf16 {ZERO} {STORED} --fp8-recipe tensorwise --hybrid-layer-pattern GM+-E --mamba-num-heads 4 --mamba-head-dim 32 "
        "--mamba-num-groups 2 --mamba-state-dim 32 --q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 16 --qk-pos-emb-head-dim 16 "
        "--v-head-dim 16 --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 32 --linear-value-head-dim 32",
    ),
    (
        4,
        f"--bf16 {ZERO} {STORED} {NARROW} --main-params-dtype fp16 --num-distributed-optimizer-instances 2 --expert-model-parallel-size 2 "
        "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 16 --qk-pos-emb-head-dim 16 --v-head-dim 16 --qk-layernorm "
        "--moe-layer-freq ([0]*1+[1]*1)",
    ),
)


def _measured(rank, n, argvs):
    return [_of_one_run(argv, rank, n) for argv in argvs]


def _of_one_run(argv, rank, n):
    """(bytes by part, (dense elements, elements of experts), those of them that are kept in 8 bits) of a rank."""
    run = make_run(argv, rank, create_groups(argv, rank, n), 1)
    params = unique_params(param for chunk in run.chunks for param in chunk.parameters())
    counted = {
        kind: sum(param.numel() for param in params if get_param_info(param).kind == kind)
        for kind in ("dense", "expert")
    }
    if isinstance(run.grads, FsdpGrads):
        numels = [(param, stop - start) for param in params for _, start, stop in local_shards(param)]
        weights = sum(numel * param.element_size() for param, numel in numels)
        gradients = weights + sum(numel * 4 for _, numel in numels if run.grads._has_sums)
    else:
        in_gradients = {buffer.flat.untyped_storage().data_ptr() for buffer in run.grads.buffers}
        buffers = [state.gather_buffer.untyped_storage() for state in run.optimizer._shards]
        weights = sum(storage.nbytes() for storage in buffers if storage.data_ptr() not in in_gradients)
        for param in params:
            if is_quantized_param(param) and isinstance(param.stored_weight, MxWeight):
                weights += sum(x.numel() * x.element_size() for x in param.stored_weight.tensors().values())
            elif is_quantized_param(param) and not param.stored_weight.scaling.per_tensor:
                stored = param.stored_weight
                scales = (stored.inverse_e, stored._scale_eB, stored.amax_eB)
                weights += sum(x.numel() * x.element_size() for x in scales)
        gradients = sum(buffer.flat.untyped_storage().nbytes() for buffer in run.grads.buffers)
        gradients += sum(
            total.untyped_storage().nbytes() for pending in run.grads._order for total in pending.local.values()
        )
    parts = {"weights": weights, "gradients": gradients, "main_params": 0, "moments": 0, "host": 0}
    for block in (block for state in run.optimizer._shards for block in state.blocks):
        for name, kept in block.storages():
            size = sum(x.untyped_storage().nbytes() for x in kept.tensors)
            parts["main_params" if name == "fp32_param" else "moments"] += size
            parts["host"] += size if block.is_updated_on_host or block.placement.always_copies else 0
    stored = {
        kind: sum(param.numel() for param in params if get_param_info(param).kind == kind and is_quantized_param(param))
        for kind in ("dense", "expert")
    }
    return parts, (counted["dense"], counted["expert"]), (stored["dense"], stored["expert"])


@pytest.mark.parametrize("n", [1, 2, 4])
def test_state_bytes_equal_the_tensors_of_a_run(n, monkeypatch):
    monkeypatch.setattr(
        "moe_trainer.optim.optimizer_shard.MAX_SEGMENT_NUMEL_CPU", 1024
    )  # a share of the state moves in whole segments
    cases = [flags for ranks, flags in CASES if ranks == n]
    argvs = [[*MODEL, *flags.split()] for flags in cases]
    found = run_ranks(_measured, n, argvs)
    for number, (flags, argv) in enumerate(zip(cases, argvs)):
        args = parse_args(argv, n)
        _, (dense, expert), stored = found[0][number]
        everything = rank_state_bytes(args, n, dense, expert, stored, tables=2 * 256 * 64)
        if args.has_quantized_params:
            expected = quantized_params_on_rank(matrices_only(args, 256), chunk_layouts(args.model, args.parallel)[0])
            assert stored == (expected.dense, expected.expert), flags
        else:
            assert stored == (0, 0), flags
        for name in ("weights", "gradients", "main_params", "moments", "host"):
            parts = [rank[number] for rank in found]
            measured = (
                sum(part[name] for part, _, _ in parts) / n
            )  # what ranks share evenly they need not share to the element
            assert measured == pytest.approx(getattr(everything, name), rel=0.02), (flags, name)


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("", (4, 4, 0, 8, 0)),
        ("--bf16", (2, 4, 4, 8, 0)),
        (f"--bf16 {ZERO}", (2, 4, 4 / 8, 1, 0)),
        (f"--bf16 {ZERO} {NARROW}", (2, 4, 2 / 8, 4 / 8, 0)),
        (f"--bf16 {ZERO} {NARROW} --main-grads-dtype bf16", (2, 2, 2 / 8, 4 / 8, 0)),
        (
            f"--bf16 {ZERO} {AWARE} --main-params-dtype fp16 --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8",
            (2, 4, 2 / 8, 2 / 8, 0),
        ),
        (f"--bf16 {ZERO} {NARROW} --optimizer-cpu-offload", (2, 4, 4 / 8, 4 / 8, 1)),
        (f"--fp16 {ZERO} {AWARE}", (2, 4, 4 / 8, 1, 0)),  # an fp16 weight is no half of an fp32 one
        (f"--bf16 {ZERO} --pipeline-model-parallel-size 2", (2, 4, 4 / 4, 2, 0)),
        (f"--bf16 {FSDP} no_shard", (2, 4, 4, 8, 0)),
        (f"--bf16 {ZERO} --optimizer muon", (2, 4, 4 / 8, 4 / 8, 0)),
    ],
)
def test_state_bytes_calculated_by_hand(flags, expected):
    found = state_bytes(parse_args([*MODEL, "--global-batch-size", "8", *flags.split()], 8), 8)
    assert (found.weights, found.gradients, found.main_params, found.moments, found.host) == expected
    assert found.device == found.total - found.host


def test_state_bytes_of_fp8_weights_calculated_by_hand():
    """A bf16 weight costs 2 + 2/d bytes next to a precision-aware optimizer, which needs half of the main parameters, one in 8 bits 1 + 4/d."""
    flags = [*MODEL, "--global-batch-size", "8", *f"--bf16 {ZERO} {NARROW} {STORED} --fp8-recipe tensorwise".split()]
    found = state_bytes(parse_args(flags, 8), 8, stored=True)
    assert (found.weights, found.gradients, found.main_params, found.moments, found.host) == (1, 4, 4 / 8, 4 / 8, 0)


def test_state_bytes_of_other_stored_weights_calculated_by_hand():
    """Of 16 x 16 blocks three fp32 numbers per 256 elements; MXFP8: a byte and a 32nd of one in two directions."""
    for flags, expected in (
        ("--fp4-format e2m1 --fp4-param-gather", 0.5 + 12 / 256),
        (f"{STORED} --fp8-recipe mxfp8 --reuse-grad-buf-for-mxfp8-param-ag", 2.0625),
    ):
        argv = [*MODEL, "--global-batch-size", "8", *f"--bf16 {ZERO} {NARROW} {flags}".split()]
        found = state_bytes(parse_args(argv, 8), 8, stored=True)
        assert (found.weights, found.gradients, found.main_params, found.moments) == (expected, 4, 4 / 8, 4 / 8)


def test_expert_state_is_sharded_over_expert_data_parallel_ranks():
    flags = (
        f"--bf16 {ZERO} --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --global-batch-size 8".split()
    )
    found = state_bytes(parse_args([*MODEL, *flags], 8), 8, "expert")
    assert (found.weights, found.main_params, found.moments) == (2, 4 / 2, 8 / 2)

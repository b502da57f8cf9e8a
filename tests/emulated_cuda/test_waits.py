"""Host waits in a training step, by source line: counts that may only decrease."""

import pytest
import torch
from emulated_cuda.run import on_device
from training.layouts import create_groups, make_argv, shallow

# once per iteration: gradient norm, losses of the iteration, losses and drops of the routers
PER_ITERATION = {"optim/clip.py": 1, "training/step.py": 1, "moe/balancing.py": 1}
LAYERS, MICROBATCHES = 4, 4  # of the same counts in scripts/acceptance_checks.py
FEW_LAYERS, FEW_MICROBATCHES = 2, 2  # of `count`; several ranks share four microbatches


def count(rank: int, world_size: int, flags: str) -> dict[str, int]:
    """Waits of the second iteration of two, and of an evaluation of one iteration's microbatches, by file."""
    import emulation

    from arguments import parse_args
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.verification import training_trace

    sizes = "--moe-token-dispatcher-type alltoall" + " --global-batch-size 4" * (world_size == 1)
    argv = [*shallow(make_argv("plain")), *sizes.split(), *flags.split()]
    ps = ParallelState.single() if world_size == 1 else create_groups(argv, rank, world_size)
    ledgers, step, evaluate = {}, training_trace.train_step, training_trace._evaluate

    def watched(function, name):
        def run(*args):
            with emulation.Ledger(emulation.DEVICE()) as ledgers[name]:
                return function(*args)

        return run

    training_trace.train_step, training_trace._evaluate = watched(step, "train"), watched(evaluate, "evaluate")
    training_trace.train(parse_args(argv, world_size), rank, ps, 2, device="cuda")
    found = {}
    for name, ledger in ledgers.items():
        for (_, line), times in ledger.waits.items():
            key = f"{name} {line.partition(':')[0]}"
            found[key] = found.get(key, 0) + times
    return found


def alone(flags: str) -> dict[str, int]:
    return count(0, 1, flags)


PADDED = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
LATENT = "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 4 --qk-layernorm"
DSA = "--experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 8 --dsa-indexer-topk 5 --dsa-indexer-loss-coeff 2.5"
FEW = "--num-experts 4"  # each GEMM of an expert is many operators
FP8 = f"--bf16 {FEW} --fp8-format e4m3 --fp8-recipe"
RECOMPUTED_EXPERTS = "--recompute-granularity selective --recompute-modules moe"
CASES = {
    "sizes that depend on the routing": ("", 1),
    "in bf16": ("--bf16", 1),
    "recompute reads nothing again": (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        1,
    ),
    "recomputed experts ask nothing again": (RECOMPUTED_EXPERTS, 1),
    "drops": ("--moe-expert-capacity-factor 1.0", 1),
    "drops, recompute": (f"--moe-expert-capacity-factor 1.0 {RECOMPUTED_EXPERTS}", 1),
    "padded to capacity": (PADDED, 0),
    "padded to capacity, recompute": (
        f"{PADDED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        0,
    ),
    "packed documents": ("--reset-attention-mask --reset-position-ids", 1),
    "experts in fp8": (f"{FP8} tensorwise", 1),
    "in fp4, weights too": (f"--bf16 {FEW} --fp4-format e2m1 --fp4-param-gather --use-distributed-optimizer", 1),
    "MXFP8 weights": (
        f"{FP8} mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather",
        1,
    ),
    "Muon": ("--optimizer muon", 1),
    "losses of indexers come with the others": (f"{LATENT} {DSA}", 1),
    "losses of multi-token prediction come with the others": ("--mtp-num-layers 1", 1),
}


def expected_train(flags: str, per_layer: int, microbatches: int, layers: int = LAYERS) -> dict[str, int]:
    """Waits of a training iteration, by file. Multi-token prediction is one MoE layer more, in training alone."""
    layers += "--mtp-num-layers" in flags.split()
    return {**PER_ITERATION, **({"memory/host_read.py": per_layer * layers * microbatches} if per_layer else {})}


def run_acceptance_line(name: str) -> str:
    """Return what a line of the section "waits" of scripts/gpu_acceptance.py prints."""
    from scripts import acceptance_checks

    return dict(acceptance_checks.waits())[name]()


def expected(flags: str, per_layer: int, microbatches: int, layers: int = LAYERS) -> dict[str, int]:
    train = expected_train(flags, per_layer, microbatches, layers)
    counts = {f"train {file}": times for file, times in train.items()}
    counts["evaluate training/step.py"] = 1
    if per_layer:
        counts["evaluate memory/host_read.py"] = per_layer * layers * microbatches
    return counts


def experts(biases: bool) -> tuple[dict, list]:
    """Waits of the experts of bf16 rows whose counts are on the device, and results with these and with counts on the host."""
    import emulation

    from moe_trainer.ops.expert_mlp import ExpertWeights, can_read_counts_on_device, expert_mlp
    from moe_trainer.ops.pointwise import Activation

    torch.manual_seed(1)
    w1, w2, b1, b2 = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        for shape in ((3, 64, 32), (3, 32, 32), (3, 64), (3, 32))
    )
    x, p = torch.randn(40, 32, dtype=torch.bfloat16, device="cuda"), torch.rand(40, device="cuda")
    x[24:], p[24:] = torch.nan, torch.nan
    there, results, waits = torch.tensor([10, 0, 14], device="cuda"), [], []
    assert can_read_counts_on_device(w1, w2, None)
    for counts, rows in ((there, 40), ([10, 0, 14], 24)):
        inputs = [each.clone().requires_grad_() for each in (x[:rows], p[:rows], w1, w2, *((b1, b2) if biases else ()))]
        with emulation.Ledger(emulation.DEVICE()) as ledger:
            y = expert_mlp(*inputs[:2], ExpertWeights(*inputs[2:]), counts, Activation("silu", gated=True))
            y.backward(torch.where(torch.isnan(x[:rows]), x[:rows], 1.0))
        results.append([each[:24].float().cpu().tolist() for each in (y.detach(), *(each.grad for each in inputs))])
        waits.append(dict(ledger.waits))
    return waits[0], results


@pytest.mark.parametrize("biases", [False, True])
def test_experts_read_counts_on_the_device(biases):
    waits, (ours, theirs) = on_device(experts, biases)
    assert not waits
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0.02, atol=0.02)


def test_sinkhorn_reads_convergence_once_per_layer_pass():
    """Sinkhorn balances in training and reads the convergence once in eight rounds of each layer."""
    found = on_device(alone, "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0")
    asked = found.pop("train moe/selections/sinkhorn.py")
    passes = FEW_LAYERS * FEW_MICROBATCHES
    assert passes <= asked <= 2 * passes and found == expected("", 1, FEW_MICROBATCHES, FEW_LAYERS)


@pytest.mark.parametrize("name", CASES)
def test_host_waits_on_one_process(name):
    flags, per_layer = CASES[name]
    assert on_device(alone, flags) == expected(flags, per_layer, FEW_MICROBATCHES, FEW_LAYERS)


ALL_GATHER = "--moe-token-dispatcher-type allgather"


@pytest.mark.parametrize(
    ("flags", "per_layer"),
    [
        ("", 1),
        ("--moe-expert-capacity-factor 1.0", 1),
        (PADDED, 0),
        (ALL_GATHER, 1),
        (f"{ALL_GATHER} {PADDED}", 0),
        (f"{ALL_GATHER} --recompute-granularity selective --recompute-modules moe", 1),
        (f"{FP8} mxfp8 --moe-router-padding-for-quantization", 1),
        ("--moe-clone-hot-experts 1", 1),
    ],
)
def test_host_waits_on_expert_parallel_ranks(flags, per_layer):
    """Each of two ranks runs half of the microbatches. Waits inside gloo's collectives are not counted."""
    flags += " --expert-model-parallel-size 2"
    for found in on_device(count, flags, ranks=2, devices=2):
        found = {key: times for key, times in found.items() if "collectives" not in key}
        assert found == expected(flags, per_layer, MICROBATCHES // 2, FEW_LAYERS)


FSDP = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion "
    "--ckpt-format fsdp_dtensor --num-distributed-optimizer-instances 2 "
    "--outer-dp-sharding-strategy optim"
)
CHUNKED = (
    "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --tp-comm-overlap-rs-dgrad "
    "--expert-tensor-parallel-size 1 --expert-model-parallel-size 2"
)


@pytest.mark.parametrize(("flags", "ranks", "data_ranks"), [(CHUNKED, 2, 1), (FSDP, 4, 4)])
def test_overlapped_and_sharded_communication_adds_no_waits(flags, ranks, data_ranks):
    for found in on_device(count, flags, ranks=ranks, devices=ranks):
        found = {key: times for key, times in found.items() if "collectives" not in key}
        assert found == expected(flags, 1, MICROBATCHES // data_ranks, FEW_LAYERS)


BUDGET = (
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-expert-rank-capacity-factor 3 "
    "--on-missing-backend fallback --bf16 --moe-grouped-gemm"
)
WIDE = "--hidden-size 128 --ffn-hidden-size 128 --num-experts 4"
SYNC_FREE = {
    "bf16": ("--num-experts 4", (9, 0)),
    "bf16, recompute": (f"--num-experts 4 {RECOMPUTED_EXPERTS}", (9, 0)),
    "tensorwise": (f"{WIDE} --fp8-format e4m3 --fp8-recipe tensorwise", (9, 0)),
    "mxfp8": (f"{WIDE} --fp8-format e4m3 --fp8-recipe mxfp8", (10, 0)),
    "mxfp8, rows padded": (
        f"{WIDE} --fp8-format e4m3 --fp8-recipe mxfp8 --moe-router-padding-for-quantization",
        (10, 0),
    ),
    "nvfp4": (f"{WIDE} --fp4-format e2m1", (10, 0)),
}


def count_with_budget(rank: int, world_size: int, flags: str, capability: tuple[int, int]) -> dict[str, int]:
    import emulation
    from emulated_cuda.run import check_races

    check_races()
    emulation.DEVICE().capability = capability
    return count(rank, world_size, f"{BUDGET} {flags}")


@pytest.mark.parametrize("name", SYNC_FREE)
def test_no_host_waits_with_a_budget_without_the_library(name):
    """The all-to-all replaces HybridEP; an evaluation reads the counts, because lost tokens would go unnoticed."""
    flags, capability = SYNC_FREE[name]
    expects = expected("", 0, 0) | {"evaluate memory/host_read.py": FEW_LAYERS * MICROBATCHES // 2}
    flags += " --expert-model-parallel-size 2"
    for found in on_device(count_with_budget, flags, capability, ranks=2, devices=2):
        assert {key: times for key, times in found.items() if "collectives" not in key} == expects


def test_no_host_waits_with_a_budget_on_one_rank():
    expects = expected("", 0, 0) | {"evaluate memory/host_read.py": FEW_LAYERS * FEW_MICROBATCHES}
    assert on_device(count_with_budget_alone, "--num-experts 4") == expects


def count_with_budget_alone(flags: str) -> dict[str, int]:
    return count_with_budget(0, 1, flags, (9, 0))

"""Kernels that a layer launches for one microbatch, forward and backward: counts that may only decrease.

Counted is what another layer adds, in bf16, in plain torch and with Triton: there by shapes alone, for Triton's interpreter takes milliseconds
for each program (test_record_step.py holds that one against the other). A view launches nothing, a GEMM or a fused operator of torch one kernel.
The list by operator and source line: PYTHONPATH=tests:. python tests/emulated_cuda/test_kernels.py NAME
"""

import sys
from collections import Counter

import pytest
from emulated_cuda.run import on_device
from training.layouts import make_argv

from moe_trainer.layers.kernels import DEFAULT, DELTA_RULE

MICROBATCHES = 2
HEADS = "--kv-channels 8"  # flash attention takes multiples of eight
QWEN3 = f"{HEADS} --qk-layernorm --group-query-attention --num-query-groups 2 --moe-router-dtype fp32 --moe-z-loss-coeff None "
QWEN3_NEXT = (
    f"{QWEN3} --kv-channels 32 --rotary-percent 0.25 --apply-layernorm-1p --attention-output-gate --moe-shared-expert-intermediate-size 8 "
    "--moe-shared-expert-gate --experimental-attention-variant gated_delta_net --linear-key-head-dim 8 --linear-value-head-dim 8 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-conv-kernel-dim 4 "
)
TRITON = f" --triton-kernels {' '.join(DEFAULT)} {DELTA_RULE}"  # as on a device that has triton
# name: model, flags, kernels at most. LAYERS is the number of layers
BUDGET = {
    "Mixtral": ("plain", HEADS, 115),
    "Mixtral, padded to capacity": ("padded capacity", HEADS, 127),
    "Qwen3": ("plain", f"{QWEN3} --moe-router-load-balancing-type global_aux_loss", 119),
    "DeepSeek-V3": ("deepseek", "--qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 16", 179),
    "Qwen3-Next, softmax attention": ("plain", f"{QWEN3_NEXT} --linear-attention-freq [0]*LAYERS", 191),
    "Qwen3-Next, gated DeltaNet over one chunk": ("plain", f"{QWEN3_NEXT} --linear-attention-freq [1]*LAYERS", 338),
}
BUDGET |= {
    f"{name}, Triton": (*BUDGET[name][:1], BUDGET[name][1] + TRITON, budget)
    for name, budget in (
        ("Mixtral", 56),
        ("Mixtral, padded to capacity", 68),
        ("Qwen3", 72),
        ("DeepSeek-V3", 92),
        ("Qwen3-Next, softmax attention", 103),
        ("Qwen3-Next, gated DeltaNet over one chunk", 108),
    )
}


def kernels(kind: str, flags: str, layers: int) -> Counter:
    """Kernels of the microbatches of the second iteration, by operator and source line."""
    import emulation
    from emulated_cuda import record_step

    from arguments import parse_args
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.training import step
    from moe_trainer.training.run import TrainState
    from moe_trainer.verification import training_trace

    argv = [
        *make_argv(kind),
        "--bf16",
        "--moe-token-dispatcher-type",
        "alltoall",
        "--global-batch-size",
        str(2 * MICROBATCHES),
    ]
    words = flags.replace("LAYERS", str(layers)).split()
    for flag in (words[at - 1] for at, word in enumerate(words) if word == "None"):
        del argv[argv.index(flag) : argv.index(flag) + 2], words[words.index(flag) : words.index(flag) + 2]
    argv += words
    argv[argv.index("--num-layers") + 1] = str(layers)
    argv = [word.replace("([0]*1+[1]*3)", f"([0]*1+[1]*{layers - 1})") for word in argv]
    run_microbatches, ledgers = step.run_microbatches, []

    def watched(*args, **options):
        with emulation.Ledger(emulation.DEVICE()) as ledger:
            result = run_microbatches(*args, **options)
        ledgers.append(ledger)
        return result

    step.run_microbatches = watched
    args, ps = parse_args(argv, 1), ParallelState.single()
    if "--triton-kernels" in flags:
        record_step.disable_computation()
        record_step.replace_host_reads(
            lambda ask, experts: uneven_routing(record_step.even_counts(args, ps, len(ask()), experts))
        )
    run, state = training_trace.make_run(args, 0, ps, 2, device="cuda"), TrainState()
    for _ in range(2):
        step.train_step(run, state, MICROBATCHES)
        state.iteration += 1
    return ledgers[1].launches


def uneven_routing(rows: list[int]) -> list[int]:
    """Move one row from the last expert to the first: offsets of even routing would be computed on the device."""
    return [rows[0] + 1, *rows[1:-1], rows[-1] - 1]


def added_by_a_layer(name: str) -> dict[tuple[str, str], float]:
    """Kernels of one more layer for one microbatch, by operator and source line."""
    kind, flags, _ = BUDGET[name]
    fewer, more = (on_device(kernels, kind, flags, layers) for layers in (2, 3))
    return {where: (count - fewer[where]) / MICROBATCHES for where, count in more.items() if count != fewer[where]}


def listing(added: dict[tuple[str, str], float]) -> str:
    """One line for each operator and source line."""
    return "\n".join(
        f"{count:6g}  {operator:50}  {line}"
        for (operator, line), count in sorted(added.items(), key=lambda entry: entry[0][::-1])
    )


@pytest.mark.parametrize("name", BUDGET)
def test_kernel_count_of_a_layer(name):
    if TRITON in BUDGET[name][1]:
        pytest.importorskip("triton")
    added = added_by_a_layer(name)
    assert sum(added.values()) <= BUDGET[name][-1], listing(added)


UNSET = "--triton-kernels None"  # the default of a device that has triton
LATENT = "--qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 16"
SPARSE = (
    "--experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 8 --dsa-indexer-topk 5 "
    "--dsa-indexer-loss-coeff 1 --dsa-indexer-use-sparse-loss --dsa-attention-form gathered"
)


@pytest.mark.parametrize(
    ("flag", "in_torch", "in_triton"),
    [
        ("--no-rope-fusion", "ops/rope.py", "ops/triton_rope.py"),
        ("--no-bias-swiglu-fusion", "ops/expert_mlp.py", "ops/triton_pointwise.py"),
    ],
)
def test_flags_switch_off_default_kernels(flag, in_torch, in_triton):
    pytest.importorskip("triton")
    launches = {
        more: [line for _, line in on_device(kernels, "plain", f"{HEADS} {UNSET} {more}", 2)] for more in ("", flag)
    }
    assert any(in_triton in line for line in launches[""]) and not any(in_triton in line for line in launches[flag])
    assert any(in_torch in line for line in launches[flag]) and not any(in_torch in line for line in launches[""])


def test_fused_down_projections_are_one_gemm():
    """Per layer and microbatch one GEMM less in forward and two in backward, of input and weight."""
    separate, fused = (
        sum(count for (name, _), count in on_device(kernels, "deepseek", f"{LATENT} {flag}", 2).items() if "mm" in name)
        for flag in ("", "--mla-down-proj-fusion")
    )
    layers = 3  # with that of multi-token prediction
    assert separate - fused == 3 * layers * MICROBATCHES


def test_an_indexer_rotates_in_triton():
    pytest.importorskip("triton")
    launches = on_device(kernels, "deepseek", f"{UNSET} {LATENT} {SPARSE}", 2)
    assert any("ops/triton_rope.py" in line for _, line in launches)
    assert [where for where in launches if "ops/rope.py" in where[1]] == []


if __name__ == "__main__":
    from emulated_cuda import test_kernels  # by this name, functions reach the process of the devices

    found = test_kernels.added_by_a_layer(sys.argv[1])
    sys.stdout.write(f"{listing(found)}\n{sum(found.values()):6g}\n")

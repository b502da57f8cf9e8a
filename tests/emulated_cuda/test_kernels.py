"""Kernels that a layer launches for one microbatch, forward and backward: numbers that may only fall.

Counted is what another layer adds, in bf16 and plain torch. A view launches nothing, a product or a fused operator
of torch one kernel.
"""

import pytest
from emulated_cuda.run import on_device
from train.layouts import argv_of

MICROBATCHES = 2
HEADS = "--kv-channels 8"  # flash attention takes multiples of eight
# name: model, flags, kernels at most
BUDGET = {
    "Mixtral": ("plain", HEADS, 196),
    "Mixtral, padded to capacity": ("padded capacity", HEADS, 208),
    "DeepSeek-V3": ("deepseek", "--qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 16", 313),
}


def kernels(kind: str, flags: str, layers: int) -> dict[str, int]:
    """Kernels of the microbatches of the second iteration, by operator."""
    import emulation

    from arguments import parse_args
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.proof import observe
    from moe_trainer.training import step

    argv = [*argv_of(kind), "--bf16", "--moe-token-dispatcher-type", "alltoall", "--global-batch-size", str(2 * MICROBATCHES), *flags.split()]
    argv[argv.index("--num-layers") + 1] = str(layers)
    argv = [word.replace("([0]*1+[1]*3)", f"([0]*1+[1]*{layers - 1})") for word in argv]
    run, ledgers = step.run_microbatches, []

    def watched(*args):
        with emulation.Ledger(emulation.DEVICE()) as ledger:
            result = run(*args)
        ledgers.append(ledger)
        return result

    step.run_microbatches = watched
    observe.train(parse_args(argv, 1), 0, ParallelState.single(), 2, device="cuda")
    return dict(ledgers[1].operators)


@pytest.mark.parametrize("name", BUDGET)
def test_kernels_of_a_layer(name):
    kind, flags, budget = BUDGET[name]
    fewer, more = (on_device(kernels, kind, flags, layers) for layers in (2, 3))
    added = {operator: (count - fewer.get(operator, 0)) / MICROBATCHES for operator, count in more.items() if count != fewer.get(operator, 0)}
    assert sum(added.values()) <= budget, sorted(added.items(), key=lambda entry: -entry[1])

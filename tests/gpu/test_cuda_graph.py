"""CUDA graphs on a device give the results of eager execution."""

import pytest
from memory.graphed import full, line, local, same_accumulation_flags, train

from moe_trainer.verification.compare_runs import Tolerances, compare

# kernels that add with atomics need not give the same bits twice
NEAR = Tolerances(loss=2e-6, norm=5e-6, grad=2e-5, weight=2e-5)
ROUTED = "attn moe_router moe_preprocess"
CASES = {
    "dense, full layers": ("dense", "", local()),
    "dense, full iteration": ("dense", "", full()),
    "experts": ("plain", "--moe-shared-expert-intermediate-size 8", local(ROUTED)),
    "latent attention": ("deepseek", "", local(f"mlp {ROUTED}")),
    "recompute": (
        "deepseek",
        "--recompute-granularity selective --recompute-modules core_attn layernorm mla_up_proj",
        local(f"mlp {ROUTED}"),
    ),
    "padded experts": ("padded capacity", "", local("attn moe")),
    "padded, full layers": ("padded capacity", "", local()),
    "padded, full iteration": ("padded capacity", "", full()),
    "a window": ("plain", "--bf16 --window-size 5,0 --kv-channels 8", local("attn")),
    "fp8": ("plain", "--bf16 --fp8-format hybrid --fp8-recipe delayed", local(ROUTED)),
}
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
def test_cuda_graphs_equal_eager_execution_on_a_device(name):
    kind, flags, graphs = CASES[name]
    eager, graphed = (train([*line(kind, flags), *more]) for more in (same_accumulation_flags(graphs), graphs))
    assert [str(difference) for difference in compare(eager, graphed, NEAR)] == []


def test_dropout_masks_differ_in_every_graph_replay():
    """Losses differ in every step, and the last loss is close to that without graphs."""
    argv = line("dense", "--hidden-dropout 0.1 --attention-dropout 0.1")
    eager, graphed = train(argv), train([*argv, *local()])
    assert len({losses["lm loss"] for losses in graphed.losses}) == len(graphed.losses)
    assert graphed.losses[-1]["lm loss"] == pytest.approx(eager.losses[-1]["lm loss"], rel=0.05)

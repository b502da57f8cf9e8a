"""On one CUDA device: activation offload and recompute do not change training, and free the expected memory."""

import pytest
import torch
from training.layouts import make_argv

from arguments import parse_args
from moe_trainer.estimate.activations import chunk_activations
from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.model.build import build_chunks
from moe_trainer.parallel.state import ParallelState
from moe_trainer.verification.compare_runs import Tolerances, compare
from moe_trainer.verification.training_trace import train

OFFLOAD = "--fine-grained-activation-offloading --offload-modules attn_norm qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act"
HOWS = {
    "offload": f"{OFFLOAD} --min-offloaded-tensor-size 1",
    "one copy at a time": f"{OFFLOAD} --min-offloaded-tensor-size 1 --fine-grained-offloading-max-inflight-offloads 1",
    "offload and recompute": f"{OFFLOAD} --min-offloaded-tensor-size 1 --recompute-granularity selective --recompute-modules layernorm mlp",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
}
# both runs by the same layers: offload is for those of TransformerEngine, and where it is not installed for its stand-in
LAYERS = "--transformer-impl transformer_engine --on-missing-backend fallback"
NEAR = Tolerances(loss=1e-6, norm=1e-6, grad=1e-5, weight=1e-5)  # sums by atomics come in any order
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", ["plain", "deepseek"])
def test_offload_and_recompute_do_not_change_training_on_a_device(kind, how):
    def run(flags):
        return train(
            parse_args([*make_argv(kind), *LAYERS.split(), *flags.split()], 1), 0, ParallelState.single(), device="cuda"
        )

    assert [str(difference) for difference in compare(run(""), run(HOWS[how]), NEAR)] == []


@pytest.mark.parametrize("how", ["offload", "recompute"])
def test_offload_and_recompute_free_device_memory(how):
    """At least 80 % of the estimated bytes are freed; the allocator rounds, and kernels keep workspaces."""
    sizes = "--hidden-size 256 --num-attention-heads 8 --ffn-hidden-size 512 --seq-length 1024 --max-position-embeddings 1024 --bf16"

    def kept(flags):
        args = parse_args([*make_argv("plain"), *LAYERS.split(), *sizes.split(), *flags.split()], 1)
        (chunk,) = build_chunks(args, ParallelState.single(), 64, "cuda")
        x_SBH = torch.randn(1024, 2, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        rope = chunk.rotary.tables(1024, x_SBH.device)
        chunk.activations.begin_pass(*rope)
        chunk._layers(x_SBH, PassInputs((rope,) * len(chunk.rotaries))).sum().backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        chunk.activations.begin_pass(*rope)
        y_SBH = chunk._layers(x_SBH, PassInputs((rope,) * len(chunk.rotaries)))
        torch.cuda.synchronize()
        after = torch.cuda.memory_allocated()
        y_SBH.sum().backward()
        listed = chunk_activations(args, chunk.layout, device="cuda")
        return after - before, sum(entry.num_bytes for entry in listed if not entry.on_host)

    (plain, listed_plain), (less, listed_less) = kept(""), kept(HOWS[how])
    assert plain - less > 0.8 * (listed_plain - listed_less) > 0

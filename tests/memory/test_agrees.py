"""Recompute and offload change no result: losses, gradients, counts and random states equal the plain run bit for bit."""

import pytest
from memory.one_pass import EVERYTHING, FULL, GROUPED, LATENT, OFFLOAD, SELECTIVE, differences, run_two_microbatches

NOISE = (
    "--hidden-dropout 0.1 --attention-dropout 0.1 --moe-input-jitter-eps 0.1 --moe-router-force-biased 0.5 "
    "--moe-expert-capacity-factor 0.7"
)
MTP = "--mtp-num-layers 1"
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-load-balancing-type global_aux_loss"
QUANTIZED = "--bf16 --hidden-size 32 --ffn-hidden-size 32 --moe-ffn-hidden-size 32"

HOWS = {
    "uniform": f"{FULL} uniform --recompute-num-layers 1",
    "uniform 2": f"{FULL} uniform --recompute-num-layers 2",
    "block": f"{FULL} block --recompute-num-layers 2",
    "default modules": "--recompute-activations",
    "moe, old spelling": "--moe-layer-recompute",
    "layernorm": f"{SELECTIVE} layernorm",
    "offload everything": f"{OFFLOAD} {EVERYTHING}",
    "offload half, one at a time": (
        f"{OFFLOAD} {EVERYTHING} --activation-offload-fraction 0.5 --fine-grained-offloading-max-inflight-offloads 1"
    ),
    "offload and recompute": f"{OFFLOAD} {EVERYTHING} {SELECTIVE} layernorm core_attn",
    "layers to the host": "--cpu-offloading-num-layers 2",
}
LATENT_HOWS = {
    **{part: f"{SELECTIVE} {part}" for part in ("mla_up_proj", "mlp", "moe", "shared_experts", "moe_act")},
    "all parts": f"{SELECTIVE} core_attn moe_act layernorm mla_up_proj mlp shared_experts",
    "some parts, offload": f"{SELECTIVE} layernorm mla_up_proj {OFFLOAD} {EVERYTHING}",
    **{how: HOWS[how] for how in ("uniform", "block", "offload everything")},
}
CASES = {
    "random numbers and capacity": (f"{GROUPED} {NOISE}", HOWS),
    "expert bias, MTP, LayerNorm": (f"{GROUPED} {BIAS} {MTP} --normalization LayerNorm", HOWS),
    "sinkhorn, biases, bf16": ("--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0 --bf16", HOWS),
    "fp8, delayed scaling": (
        f"{GROUPED} {QUANTIZED} --fp8-format hybrid --fp8-recipe delayed",
        {how: HOWS[how] for how in ("uniform 2", "moe, old spelling", "offload everything")},
    ),
    "fp8, blocks": (
        f"{GROUPED} {QUANTIZED} --fp8-format e4m3 --fp8-recipe blockwise",
        {how: HOWS[how] for how in ("block", "layernorm", "offload and recompute")},
    ),
    "latent, a window": (f"{GROUPED} {LATENT} --window-size 7,0", LATENT_HOWS),
    "latent, random numbers": (f"{GROUPED} {LATENT} {NOISE} --apply-residual-connection-post-layernorm", LATENT_HOWS),
}


@pytest.mark.parametrize("case", CASES)
def test_recompute_and_offload_change_no_result(case):
    """Microbatches one after the other, or interleaved: the ways take turns, and start with the other one in the next case."""
    flags, hows = CASES[case]
    plain = [run_two_microbatches(flags, interleaved=interleaved) for interleaved in (False, True)]
    for number, (name, how) in enumerate(hows.items(), [*CASES].index(case)):
        interleaved = bool(number % 2)
        different = differences(plain[interleaved], run_two_microbatches(flags, how, interleaved=interleaved))
        assert not different, f"{name}{', interleaved' * interleaved}: {different}"

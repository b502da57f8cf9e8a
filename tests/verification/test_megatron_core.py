"""`compare-megatron`: Megatron-Core's own modules against ours, and what the comparison notices."""

import pytest
import torch
from commands import call_main

from moe_trainer.commands import compare_megatron
from moe_trainer.moe.router import TopKRouter
from moe_trainer.verification.megatron_core.compare import ComparedRow, MegatronComparison

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --position-embedding-type rope --normalization RMSNorm "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --num-experts 8 --moe-router-topk 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 2 --tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 8"
).split()
CASES = {
    "mixtral": "--group-query-attention --num-query-groups 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2",
    "qwen3": "--qk-layernorm --kv-channels 12 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2",
    "deepseek_v3": "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 "
    "--qk-layernorm --moe-layer-freq ([0]*1+[1]*1) --moe-shared-expert-intermediate-size 24 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --mtp-num-layers 1",
    "losses": "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 1e-3 --moe-z-loss-coeff 1e-3",
    "dropping": "--moe-expert-capacity-factor 0.5 --moe-router-pre-softmax",
    "dense": "--num-experts 0",
    "sinks": "--softmax-type learnable",
}

EQUAL = (
    "deepseek_moe_16b deepseek_v2_lite deepseek_v3 deepseek_v3_proxy deepseek_v3_tiny dots_llm1 glm_4_5 glm_4_5_air kimi_k2 mixtral_8x22b "
    "mixtral_8x2b mixtral_8x7b mixtral_tiny qwen2_57b_a14b qwen3_235b_a22b qwen3_30b_a3b qwen3_tiny solar_open_100b"
).split()
"""Presets whose model Megatron-Core 0.16.1 builds without CUDA and TransformerEngine."""


@pytest.fixture
def compare(capsys):
    """Runs the command in this process; returns its exit code and what it printed."""

    def run(*words):
        state = torch.random.get_rng_state()
        try:
            return call_main(compare_megatron.main, words, capsys)
        finally:
            torch.random.set_rng_state(state)

    return run


@pytest.mark.parametrize("case", CASES)
def test_models_equal_megatron_core(compare, case):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    done = compare("--as-is", *TINY, *CASES[case].split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr and done.stdout.startswith("model of these flags: ")
    assert "1 of 1 models equal Megatron-Core" in done.stdout and "\n  equal: the largest difference is" in done.stdout


def test_presets_of_the_zoo_equal_megatron_core(compare):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    results = {preset: compare("--preset", preset, "--mock-data") for preset in EQUAL}
    assert not [f"{preset}: {done.stdout}{done.stderr}" for preset, done in results.items() if done.returncode]


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--residual-multiplier", "0.5"], "has no --residual-multiplier"),
        (
            ["--apply-layernorm-1p"],
            "cannot build this model here: zero_centered_gamma not supported by torch LayerNorm",
        ),
        (["--moe-expert-capacity-factor", "1", "--moe-token-drop-policy", "position"], "compare with probs"),
    ],
)
def test_what_megatron_core_does_not_have_is_named(compare, flags, reason):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    done = compare("--as-is", *TINY, *flags)
    assert done.returncode == 2 and reason in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_difference_is_named(compare, monkeypatch):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    forward = TopKRouter.forward

    def scaled(self, *args, **kwargs):
        probs_TE, *rest = forward(self, *args, **kwargs)
        return probs_TE * (1 + 1e-3), *rest

    monkeypatch.setattr(TopKRouter, "forward", scaled)
    done = compare("--as-is", *TINY, *CASES["mixtral"].split())
    assert done.returncode == 1 and "  DIFFERENT: the largest difference is" in done.stdout, done.stdout + done.stderr
    assert "0 of 1 models equal Megatron-Core" in done.stdout


def test_nan_is_a_difference_wherever_it_is():
    rows = [ComparedRow(what, "", "", difference) for what, difference in (("a", 0.0), ("b", float("nan")), ("c", 2.0))]
    for number in range(3):
        comparison = MegatronComparison("1", 1, 1, (*rows[number:], *rows[:number]))
        assert comparison.largest.what == "b" and not comparison.is_equal


def test_the_package_is_needed(compare, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "megatron", None)
    done = compare()
    assert done.returncode == 2 and "cannot import Megatron-Core" in done.stderr
    assert done.stderr.endswith("pip install megatron-core\n") and not done.stdout

"""What layers with FineRMoE's experts save for backward is what the estimate lists."""

import pytest
from memory.one_pass import GROUPED
from memory.test_bytes import CHUNKED, FEW, PLAIN_HOWS, check_list

from moe_trainer.ops import grouped_gemm

FINE = (
    "--G-I 5 --G-O 4 --R-I 1 --R-O 2 --num-experts 40 --moe-router-topk 8 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 80 "
    "--moe-shared-expert-gate"
)
KINDS = {
    "fine experts": (f"{GROUPED} {FINE} --moe-router-load-balancing-type seq_aux_loss", (*FEW, "moe_act", "3 chunks", "4 chunks, moe")),
    "fine experts, concat_proj, expert bias": (
        f"{GROUPED} {FINE} --moe-concat-proj --moe-router-enable-expert-bias", ("all kept", "moe", "layernorm", "3 chunks")),
    "fine experts, frozen backbone": (
        f"{GROUPED} {FINE} --moe-concat-proj --freeze-backbone --moe-layer-freq ([0]*1+[1]*2)", ("all kept", "moe", "layernorm")),
    "fine experts, concat_proj, tensorwise": (
        f"{GROUPED} {FINE} --moe-concat-proj --bf16 --fp8-format e4m3 --fp8-recipe tensorwise", ("all kept",)),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "how"), [(kind, how) for kind, (_, hows) in KINDS.items() for how in hows])
def test_activation_list_equals_retained_tensors(kind, how, monkeypatch):
    monkeypatch.setattr(grouped_gemm, "token_bucket", lambda count: count)  # its surplus depends on the routing
    check_list(f"{KINDS[kind][0]} {(PLAIN_HOWS | CHUNKED)[how]}", kind)

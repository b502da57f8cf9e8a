"""The list of kept tensors (estimate/activations.py) against the memory that is alive after a forward pass."""

import math
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from harness import run_ranks
from memory.measure import CountedCopies, measure_retained
from memory.one_pass import BATCH, EVERYTHING, FULL, GROUPED, LATENT, OFFLOAD, SELECTIVE, SEQ, batch, build, parsed

from moe_trainer.estimate.activations import chunk_activations
from moe_trainer.launch_env import LaunchEnv
from moe_trainer.layers.core_attention import AttentionMask
from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.layers.sparse_attention import freeze_all_but_indexers
from moe_trainer.model.lora import freeze_all_but_adapters
from moe_trainer.model.prepare import freeze_backbone
from moe_trainer.ops import grouped_gemm
from moe_trainer.training.initialize import make_groups

SIZES = "--hidden-size 32 --ffn-hidden-size 80 --moe-ffn-hidden-size 48 --moe-router-dtype fp32"
DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 3 --linear-key-head-dim 8 --linear-value-head-dim 12 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --swiglu"
)
KDA = f"{DELTA.replace('gated_delta_net', 'kda')} --kda-gate-rank 6"
HYBRID = (
    "--hybrid-layer-pattern M*-E --mamba-num-heads 4 --mamba-head-dim 12 --mamba-num-groups 2 --mamba-state-dim 10 "
    "--position-embedding-type none"
)
OTHER_LETTERS = (
    "--hybrid-layer-pattern G+-E --linear-key-head-dim 8 --linear-value-head-dim 12 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --swiglu --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 8 --qk-layernorm"
)
QUERIES = "--group-query-attention --num-query-groups 2"
PLAIN_HOWS = {
    "all kept": "",
    "uniform": f"{FULL} uniform --recompute-num-layers 2",
    "block": f"{FULL} block --recompute-num-layers 1",
    **{part: f"{SELECTIVE} {part}" for part in ("core_attn", "layernorm", "moe", "moe_act")},
    "core_attn layernorm": f"{SELECTIVE} core_attn layernorm",
    **{
        f"offload {part}": f"{OFFLOAD} {part}"
        for part in ("attn_norm", "qkv_linear", "core_attn", "mlp_norm", "expert_fc1", "moe_act")
    },
    "offload everything": f"{OFFLOAD} {EVERYTHING}",
    "offload half": f"{OFFLOAD} {EVERYTHING} --activation-offload-fraction 0.5",
    "offload large": f"{OFFLOAD} {EVERYTHING}".replace("tensor-size 1 ", "tensor-size 2000 "),
    "offload and recompute": f"{OFFLOAD} {EVERYTHING} {SELECTIVE} layernorm core_attn",
}
BUDGET = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-expert-rank-capacity-factor 1.5"
CHUNKED = {
    "3 chunks": "--mlp-chunks-for-training 3",
    "4 chunks, moe": f"--mlp-chunks-for-training 4 {SELECTIVE} moe mlp",
    "3 chunks, moe, layernorm": f"--mlp-chunks-for-training 3 {SELECTIVE} moe mlp layernorm",
    "3 chunks, uniform": f"--mlp-chunks-for-training 3 {FULL} uniform --recompute-num-layers 2",
}
PLAIN_HOWS |= {
    "budget": BUDGET,
    "budget, moe": f"{BUDGET} {SELECTIVE} moe",
    "pages": f"{BUDGET} --moe-paged-stash --moe-paged-stash-buffer-size-factor-cuda 1.0",
    "small pages, layernorm": f"{BUDGET} --moe-paged-stash --moe-paged-stash-page-size 8 {SELECTIVE} layernorm",
}
LATENT_HOWS = {
    "all kept": "",
    **{part: f"{SELECTIVE} {part}" for part in ("mla_up_proj", "mlp", "moe", "shared_experts")},
    "all parts": f"{SELECTIVE} core_attn moe_act layernorm mla_up_proj mlp shared_experts",
    "offload everything": f"{OFFLOAD} {EVERYTHING}",
    "some parts, offload": f"{SELECTIVE} layernorm mla_up_proj {OFFLOAD} {EVERYTHING}",
}
SPARSE = (
    "--experimental-attention-variant dsa --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 8 --dsa-indexer-topk 5 --dsa-indexer-loss-coeff 0.1 "
    "--dsa-indexer-use-sparse-loss"
)
COMPRESSED = (
    "--experimental-attention-variant dsv4_hybrid --multi-latent-attention --qk-layernorm --csa-compress-ratios [0,4,6] --csa-window-size 5 "
    "--q-lora-rank 10 --v-head-dim 12 --qk-pos-emb-head-dim 4 --o-groups 2 --o-lora-rank 6 --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 8 "
    "--dsa-indexer-topk 2"
)
GATHERED = "--dsa-attention-form gathered"
FEW = ("all kept", "layernorm", "moe", "uniform", "offload everything")
KINDS = {
    "heads": (GROUPED, {**PLAIN_HOWS, **CHUNKED}),
    "grouped queries, norms, gated shared expert": (
        f"{GROUPED} {QUERIES} --qk-layernorm --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate "
        "--moe-router-pre-softmax --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity", FEW),
    "LayerNorm, gelu, learned positions, bf16": (
        f"{GROUPED} --bf16 --normalization LayerNorm --position-embedding-type learned_absolute --seq-length 128 "
        "--max-position-embeddings 128", FEW),
    "dense, dropout": ("--disable-bias-linear --moe-layer-freq ([0]*3) --hidden-dropout 0.1", ("all kept", "mlp", "layernorm")),
    "sinks": (f"{GROUPED} {QUERIES} --softmax-type learnable", (*FEW, "core_attn")),
    "other heads in windows": (
        f"{GROUPED} {QUERIES} --window-size 7,0 --window-attn-skip-freq 2 --window-num-query-groups 4 "
        "--window-softmax-type learnable --value-channels 4 --attention-value-scale 0.6", ("all kept", "core_attn")),
    "gated queries": (f"{GROUPED} {QUERIES} --qk-layernorm --attention-output-gate", (*FEW, "core_attn")),
    "hybrid": (f"{GROUPED} {HYBRID}", ("all kept", "uniform", "block")),
    "hybrid, G and latents": (f"{GROUPED} {OTHER_LETTERS}", ("all kept", "uniform")),
    "hybrid, D, G and latents": (
        f"{GROUPED} {OTHER_LETTERS} {SPARSE} --hybrid-layer-pattern DG+E", ("all kept", "core_attn", "uniform")),
    "hybrid, gathered keys and latents": (f"{GROUPED} {OTHER_LETTERS} {SPARSE} {GATHERED} --hybrid-layer-pattern +DE", ("all kept",)),
    "hybrid, hyper-connections": (f"{GROUPED} {HYBRID} --enable-hyper-connections --num-residual-streams 3", ("all kept", "layernorm")),
    "hybrid, frozen backbone": (f"{GROUPED} --hybrid-layer-pattern=*E*- --freeze-backbone", ("all kept",)),
    "gated DeltaNet": (f"{GROUPED} {DELTA}", (*FEW, "gdn_norm_out", "offload and recompute")),
    "short convolutions": (
        f"{GROUPED} --experimental-attention-variant short_conv --linear-attention-freq 3", ("all kept", "layernorm", "uniform")),
    "decays by channel, bf16": (f"{GROUPED} {KDA} --bf16", ("all kept", "gdn_norm_out")),
    "gated DeltaNet, long, bf16": (
        f"{GROUPED} {DELTA} --bf16 --seq-length 1100 --max-position-embeddings 1100 --micro-batch-size 1", ("all kept", "gdn_norm_out")),
    "latent": (f"{GROUPED} {LATENT.replace('--mtp-num-layers 1', '')}", (*LATENT_HOWS, *CHUNKED)),
    "latent, gated": (
        f"{GROUPED} {LATENT.replace('--mtp-num-layers 1', '')} --head-wise-attn-gate",
        ("all kept", "mla_up_proj", "all parts", "offload everything", "core_attn", "uniform")),
    "latent, sparse": (f"{GROUPED} {LATENT.replace('--mtp-num-layers 1', '')} {SPARSE}", (*LATENT_HOWS, "core_attn", "layernorm", "uniform")),
    "latent, warm-up of indexers": (
        f"{GROUPED} {LATENT.replace('--mtp-num-layers 1', '')} {SPARSE.replace('--dsa-indexer-use-sparse-loss', '--dsa-indexer-warmup')}",
        ("all kept", "mla_up_proj", "mlp", "moe", "shared_experts", "core_attn", "layernorm", "uniform", "all parts")),
    "latent, sparse, without a loss": (
        f"{GROUPED} {LATENT.replace('--mtp-num-layers 1', '')} {SPARSE} --dsa-indexer-loss-coeff 0", ("all kept", "all parts")),
    "latent, sparse, bf16, without a rotation": (
        f"{GROUPED} {LATENT.replace('--mtp-num-layers 1', '').replace('--q-lora-rank 12', '')} {SPARSE} --bf16 --no-dsa-indexer-rotate-activation "
        "--moe-layer-freq ([0]*3)",
        ("all kept", "mla_up_proj")),
    "latent, gathered": (f"{GROUPED} {LATENT.replace('--mtp-num-layers 1', '')} {SPARSE} {GATHERED}", (*LATENT_HOWS, "core_attn", "uniform")),
    "latent, gathered, without a loss, bf16": (
        f"{GROUPED} {LATENT.replace('--mtp-num-layers 1', '').replace('--q-lora-rank 12', '')} {SPARSE} {GATHERED} --bf16 --dsa-indexer-loss-coeff 0 "
        "--moe-layer-freq ([0]*3)", ("all kept", "mla_up_proj")),
    "latent, all keys chosen": (
        f"{GROUPED} {LATENT.replace('--mtp-num-layers 1', '')} {SPARSE} --dsa-indexer-topk 16", ("all kept", "all parts")),
    "latent without a query latent, sqrtsoftplus": (
        f"{GROUPED} {LATENT.replace('--mtp-num-layers 1', '').replace('--q-lora-rank 12', '').replace('sigmoid', 'sqrtsoftplus')}",
        ("all kept", "mla_up_proj")),
    "latent experts, shared": (f"{GROUPED} --moe-latent-size 20 --moe-shared-expert-intermediate-size 40 --moe-router-pre-softmax",
                               (*FEW, "moe_act", *CHUNKED)),
    "blockwise": (
        f"{GROUPED} --bf16 --fp8-format e4m3 --fp8-recipe blockwise --moe-shared-expert-intermediate-size 40 --moe-layer-freq ([0]*1+[1]*2)",
        (*FEW, "core_attn", "offload large", "pages")),
    "tensorwise, first and last in bf16": (
        f"{GROUPED} --bf16 --fp8-format e4m3 --fp8-recipe tensorwise --first-last-layers-bf16 {QUERIES} --attention-output-gate", ("all kept",)),
    "latent, mxfp8": (
        f"{GROUPED} {LATENT.replace('--mtp-num-layers 1', '')} --bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --head-wise-attn-gate",
        ("all kept", "mla_up_proj", "shared_experts", "all parts", "offload everything")),
    "gated DeltaNet, nvfp4": (f"{GROUPED} {DELTA} --bf16 --fp4-format e2m1", ("all kept", "gdn_norm_out")),
    "adapters": (f"{GROUPED} {QUERIES} --moe-shared-expert-intermediate-size 40 --lora-dim 4", (*FEW, "moe_act", "core_attn")),
    "dense, adapters of attention": (
        "--disable-bias-linear --moe-layer-freq ([0]*3) --lora-dim 4 --lora-target-modules linear_qkv", ("all kept", "mlp", "layernorm")),
    "adapters of experts": (f"{GROUPED} --lora-dim 4 --lora-target-modules *.experts.*", ("all kept", "moe_act", "offload everything")),
    "hybrid, adapters": (f"{GROUPED} {HYBRID} --lora-dim 4", ("all kept", "uniform")),
    "latent, adapters": (
        f"{GROUPED} {LATENT.replace('--mtp-num-layers 1', '')} --lora-dim 4", ("all kept", "mla_up_proj", "all parts", "offload everything")),
    "hyper-connections": (f"{GROUPED} --enable-hyper-connections --num-residual-streams 3", ("all kept", "layernorm", "uniform")),
    "hyper-connections, bf16": (f"{GROUPED} --bf16 --enable-hyper-connections --moe-layer-freq ([0]*3)", ("all kept",)),
    "norms before and after": (
        f"{GROUPED} --moe-layer-freq ([0]*1+[1]*2) --post-self-attn-layernorm --post-mlp-layernorm", (*FEW, "core_attn", "mlp")),
    "norms after only, bf16": (
        f"{GROUPED} --bf16 --moe-layer-freq ([0]*1+[1]*2) --disable-pre-layernorm --post-self-attn-layernorm --post-mlp-layernorm "
        "--seq-length 128 --max-position-embeddings 128",
        (*FEW, "mlp")),
    "latent, norms after only": (
        f"{GROUPED} {LATENT.replace('--mtp-num-layers 1', '')} --disable-pre-layernorm --post-self-attn-layernorm --post-mlp-layernorm",
        ("all kept", "all parts")),
    "gated DeltaNet, norm after experts": (f"{GROUPED} {DELTA} --post-mlp-layernorm", ("all kept",)),
    "adapters, norms before and after": (
        f"{GROUPED} {QUERIES} --post-self-attn-layernorm --post-mlp-layernorm --moe-shared-expert-intermediate-size 40 --lora-dim 4", ("all kept", "moe")),
    "compressed": (f"{GROUPED} {COMPRESSED}", ("all kept", "core_attn", "layernorm", "uniform")),
    "compressed, bf16": (f"{GROUPED} {COMPRESSED} --bf16 --moe-layer-freq ([0]*3)", ("all kept",)),
    "packed documents": (GROUPED, ("all kept", "core_attn", "layernorm")),
    "latent, long": (
        f"{GROUPED} {LATENT.replace('--mtp-num-layers 1', '')} --seq-length 600 --max-position-embeddings 600", ("all kept", "mla_up_proj")),
    "long": (f"{GROUPED} --seq-length 600 --max-position-embeddings 600 --micro-batch-size 1", ("all kept", "core_attn")),
}  # fmt: skip


def measure_decoder(flags: str, kind: str) -> tuple[object, object, list]:
    """Return the listed and the retained tensors of the decoder's layers."""
    args = parsed(SIZES, flags)
    (chunk,) = build(args)
    copies = CountedCopies()
    if chunk.activations.offload is not None:
        chunk.activations.offload._copies = copies
    length, batch = args.data.seq_length, args.training.micro_batch_size
    warmup = args.model.dsa_indexer_warmup
    if warmup:
        freeze_all_but_indexers([chunk])
    if args.model.lora_dim is not None:
        freeze_all_but_adapters([chunk], args.model)
    if args.optimizer.freeze_backbone:
        freeze_backbone([chunk])
    trains_all = not warmup and args.model.lora_dim is None
    x_SBH = torch.randn(
        length, batch, args.model.hidden_size * chunk.num_streams, dtype=chunk.params_dtype, requires_grad=trains_all
    )
    rope = None if chunk.rotary is None else chunk.rotary.tables(length, torch.device("cpu"))
    packed = kind == "packed documents"
    visible = AttentionMask.of(None, torch.arange(length).expand(batch, length) // 5) if packed else None

    def forward():
        chunk.activations.begin_pass(*(rope or ()))
        return chunk._layers(x_SBH.clone(), PassInputs((rope,) * len(chunk.rotaries), visible))

    forward().sum().backward()
    listed, stash = chunk_activations(args, chunk.layout, device="cpu", packed=packed), chunk.activations.stash
    if stash is None:
        return listed, *measure_retained(forward, copies)
    for _ in range(2):  # pages stay from pass to pass: they are made for the second one
        stash.begin_iteration()
        left, result = measure_retained(forward, copies)
        result.sum().backward()
    return listed, replace(left, device=left.device + stash.num_bytes), result


@pytest.mark.parametrize(("kind", "how"), [(kind, how) for kind, (_, hows) in KINDS.items() for how in hows])
def test_activation_list_equals_retained_tensors(kind, how, monkeypatch):
    monkeypatch.setattr(grouped_gemm, "token_bucket", lambda count: count)  # its surplus depends on the routing
    how_flags = (
        LATENT_HOWS[how]
        if kind.startswith("latent") and not kind.startswith("latent experts") and how in LATENT_HOWS
        else {**PLAIN_HOWS, **CHUNKED, **{part: f"{SELECTIVE} {part}" for part in ("mlp", "gdn_norm_out")}}[how]
    )
    check_list(f"{KINDS[kind][0]} {how_flags}", kind)


def check_list(flags, kind):
    listed, left, _result = measure_decoder(flags, kind)
    device = sum(entry.num_bytes for entry in listed if not entry.on_host)
    host = sum(entry.num_bytes for entry in listed if entry.on_host)
    tensors = "\n".join(f"left {size:6} {shape} {dtype}" for size, shape, dtype in left.tensors)
    assert math.isclose(device, left.device, rel_tol=0.02), (
        f"on the device {device} listed, {left.device} left\n{tensors}"
    )
    assert math.isclose(host, left.host, rel_tol=0.02), f"on the host {host} listed, {left.host} left\n{tensors}"


def measure_mtp(flags: str) -> tuple[object, object]:
    args = parsed(SIZES, GROUPED, flags)
    (chunk,) = build(args)
    tokens_BS, positions_BS, _ = batch(1)
    x_SBH = torch.randn(SEQ, BATCH, args.model.hidden_size, requires_grad=True)
    rotaries = chunk.rotaries[len(chunk.layout.layers) :]
    ropes = [rotary and rotary.tables(SEQ, torch.device("cpu")) for rotary in rotaries]

    def forward():
        chunk.activations.begin_pass(*(table for rope in ropes for table in rope or ()))
        return chunk.mtp(x_SBH.clone(), tokens_BS, positions_BS, chunk.embedding, PassInputs(tuple(ropes)))[-1]

    forward().sum().backward()
    listed = [entry for entry in chunk_activations(args, chunk.layout, device="cpu") if entry.name.startswith("mtp")]
    return listed, measure_retained(forward)[0]


LATENT_DEPTH = f"{LATENT.replace('([0]*1+[1]*2)', '1')} --num-layers 1"
HYBRID_DEPTHS = HYBRID.replace("M*-E", "E/M*E/M*E")


@pytest.mark.parametrize("flags", [
    LATENT_DEPTH, f"{LATENT_DEPTH} {FULL} uniform --recompute-num-layers 1", f"{LATENT_DEPTH} {FULL} block --recompute-num-layers 1",
    f"{LATENT_DEPTH} {SELECTIVE} layernorm mla_up_proj moe", HYBRID_DEPTHS, f"{HYBRID_DEPTHS} {FULL} uniform --recompute-num-layers 1",
])  # fmt: skip
def test_activation_list_of_mtp_equals_retained_tensors(flags):
    listed, left = measure_mtp(flags)
    assert math.isclose(sum(entry.num_bytes for entry in listed), left.device, rel_tol=0.02), (
        left.device,
        left.tensors,
        listed,
    )


RANKS = {
    "tp2 sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "tp2": "--tensor-model-parallel-size 2",
    "ep2": "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    "cp2 ring": "--context-parallel-size 2",
    "cp2 heads": "--context-parallel-size 2 --cp-comm-type a2a",
}


def _on_ranks(rank, n, cases):
    found, groups = [], {}  # groups by mapping: every one has threads
    for model, mapping, how in cases:
        args = parsed(SIZES, GROUPED, model, mapping, how, ranks=n)
        if mapping not in groups:
            launched = LaunchEnv(rank, n, rank, None, None, "test")
            groups[mapping] = make_groups(args, launched, timedelta(seconds=60))
        ps = groups[mapping]
        (chunk,) = build(args, ps)
        rows = SEQ // ps.cp.size // (ps.tp.size if args.parallel.sequence_parallel else 1)
        x_SBH, rope = (
            torch.randn(rows, BATCH, args.model.hidden_size, requires_grad=True),
            chunk.rotary.tables(SEQ, torch.device("cpu")),
        )
        received: dict[int, int] = {}
        for number, layer in enumerate(chunk.moe_layers()):
            layer.experts.register_forward_hook(
                lambda _m, inputs, _y, number=number, received=received: received.update({number: len(inputs[0])})
            )

        def forward(chunk=chunk, x_SBH=x_SBH, rope=rope):
            chunk.activations.begin_pass(*rope)
            return chunk._layers(x_SBH.clone(), PassInputs((rope,) * len(chunk.rotaries)))

        forward().sum().backward()
        left, result = measure_retained(forward)
        mean = sum(received.values()) // len(received)
        listed = chunk_activations(args, chunk.layout, device="cpu", received=mean)
        found.append((sum(entry.num_bytes for entry in listed), left.device, left.tensors, listed))
        result.sum().backward()
    return found


def test_activation_list_on_two_ranks():
    hows = (
        "",
        f"{SELECTIVE} layernorm mla_up_proj moe",
        f"{SELECTIVE} core_attn mlp",
        f"{FULL} uniform --recompute-num-layers 2",
    )
    latent = LATENT.replace("--mtp-num-layers 1", "")
    mappings = list(RANKS.values())
    experts = f"{RANKS['tp2']} --expert-tensor-parallel-size 1 --expert-model-parallel-size 2"
    gathered = f"{RANKS['cp2 ring']} --cp-comm-type allgather"
    cases = [(latent, mapping, how) for i, mapping in enumerate(mappings) for how in (hows[i % 4], hows[(i + 1) % 4])]
    cases.append((latent, RANKS["tp2"], f"{hows[-1]} --distribute-saved-activations"))
    delta, part = f"{DELTA} --moe-shared-expert-intermediate-size 40", f"{SELECTIVE} gdn_norm_out layernorm"
    cases += [(delta, mapping, part if i % 2 else "") for i, mapping in enumerate(mappings)]
    cases += [
        ("", mapping, how) for mapping in (RANKS["tp2"], RANKS["tp2 sp"], experts) for how in ("", f"{SELECTIVE} moe")
    ]
    sparse, rows = f"{latent} {SPARSE}", RANKS["tp2 sp"]
    cases += [(sparse, mapping, "") for mapping in (rows, RANKS["tp2"], gathered)]
    cases += [(sparse, rows, hows[1]), (sparse, gathered, hows[2])]
    cases += [(f"{sparse} {GATHERED}", rows, ""), (f"{sparse} {GATHERED}", gathered, hows[1])]
    for results in run_ranks(_on_ranks, 2, cases):
        for case, (listed, left, tensors, entries) in zip(cases, results, strict=True):
            what = f"{case}: {listed} listed, {left} left"
            assert math.isclose(listed, left, rel_tol=0.02), "\n".join([what, *map(str, tensors), *map(str, entries)])

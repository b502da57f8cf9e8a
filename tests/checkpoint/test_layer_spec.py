"""Stored names follow --transformer-impl as Megatron-Core's layer specs have them, for every kind of layer; reading accepts both.

Local names: recorded in golden/ckpt (test_sharding.py). TransformerEngine's: golden/README.md ("pre_mlp_layernorm.weight"), the rest from
the layer specs themselves (gpt_layer_specs.py, experimental_attention_variant_module_specs.py of Megatron-Core), no recorded file.
"""

import re

import pytest
import torch
from checkpoint.fake import RECORD, FakeModel, FakeOptimizer
from commands import read_metrics, run
from training.tiny import MOCK, TINY

from arguments import parse_args
from moe_trainer.checkpoint.index import read_index
from moe_trainer.checkpoint.inspect import differences, main
from moe_trainer.checkpoint.manager import CheckpointError, CheckpointState, LoadOptions, SaveOptions, load, save
from moe_trainer.checkpoint.megatron_legacy.reader import open_file
from moe_trainer.model.build import build_chunks
from moe_trainer.parallel.state import ParallelState

SINGLE = ParallelState.single()
ENGINE, LOCAL = "transformer_engine", "local"
BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 "
    "--global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 63 "
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--on-missing-backend fallback "
)
MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-grouped-gemm "
MIXED = f"{MOE}--ffn-hidden-size 48 --moe-layer-freq ([0,1]) --moe-shared-expert-intermediate-size 16 "
MLA = (
    "--multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --no-rope-fusion "
    "--attention-dropout 0 --hidden-dropout 0 "
)
GDN = (
    "--experimental-attention-variant gdn --linear-attention-freq 2 --linear-conv-kernel-dim 4 --linear-key-head-dim 8 --linear-value-head-dim 8 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --group-query-attention --num-query-groups 2 --qk-layernorm "
)
DSA = "--experimental-attention-variant dsa --q-lora-rank 8 --qk-layernorm --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 8 --dsa-indexer-topk 4 "
OUTSIDE = ["decoder.final_layernorm.weight"]
MTP = ["mtp.layers.0.enorm.weight", "mtp.layers.0.final_layernorm.weight", "mtp.layers.0.hnorm.weight"]


def inside(prefix, *names):
    return [f"{prefix}{name}" for name in names]


L, L0, L1, M = "decoder.layers.", "decoder.layers.0.", "decoder.layers.1.", "mtp.layers.0.transformer_layer."
QKV, IN_PROJ, FC1 = (
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.in_proj.layer_norm_weight",
    "mlp.linear_fc1.layer_norm_weight",
)
INPUT, PRE_MLP = "input_layernorm.weight", "pre_mlp_layernorm.weight"
HEADS = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
Q, KV = "self_attention.q_layernorm.weight", "self_attention.kv_layernorm.weight"
K, K_BIAS = (f"self_attention.core_attention.indexer.k_norm.{leaf}" for leaf in ("weight", "bias"))
Q_UP, KV_UP = "self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.linear_kv_up_proj.layer_norm_weight"
# flags, the stored norms under TransformerEngine's names, and under local ones
CASES = {
    "experts": (MOE, inside(L, QKV, PRE_MLP), inside(L, QKV, FC1)),
    "dense": ("--ffn-hidden-size 48", inside(L, QKV, FC1), inside(L, QKV, FC1)),
    "dense and experts, shared ones, MTP": (
        f"{MIXED}--mtp-num-layers 1",
        inside(L0, QKV, FC1) + inside(L1, QKV, PRE_MLP) + inside(M, QKV, PRE_MLP) + MTP,
        inside(L0, QKV, FC1) + inside(L1, QKV, FC1) + inside(M, QKV, FC1) + MTP,
    ),
    "experts first, so that MTP is dense": (
        f"{MIXED}--mtp-num-layers 1 --moe-layer-freq ([1,0])",
        inside(L0, QKV, PRE_MLP) + inside(L1, QKV, FC1) + inside(M, QKV, FC1) + MTP,
        inside(L0, QKV, FC1) + inside(L1, QKV, FC1) + inside(M, QKV, FC1) + MTP,
    ),
    "groups of queries, norms of heads": (
        f"{MOE}--group-query-attention --num-query-groups 2 --qk-layernorm",
        inside(L, QKV, PRE_MLP, *HEADS),
        inside(L, QKV, FC1, *HEADS),
    ),
    "latent attention with norms, MTP": (
        f"{MIXED}{MLA}--q-lora-rank 8 --qk-layernorm --mtp-num-layers 1",
        inside(L0, INPUT, Q_UP, KV_UP, FC1)
        + inside(L1, INPUT, Q_UP, KV_UP, PRE_MLP)
        + inside(M, INPUT, Q_UP, KV_UP, PRE_MLP)
        + MTP,
        inside(L0, INPUT, Q, KV, PRE_MLP) + inside(L1, INPUT, Q, KV, PRE_MLP) + inside(M, INPUT, Q, KV, PRE_MLP) + MTP,
    ),
    "latent attention without norms, without a query rank": (
        f"{MOE}{MLA}",
        inside(L, INPUT, PRE_MLP),
        inside(L, INPUT, PRE_MLP),
    ),
    "latent experts": (f"{MOE}--moe-latent-size 16", inside(L, QKV, PRE_MLP), inside(L, QKV, FC1)),
    # of these Megatron-Core has no local spec
    "sparse attention": (
        f"{MIXED}{MLA}{DSA}",
        inside(L0, INPUT, Q, KV, K, K_BIAS, FC1) + inside(L1, INPUT, Q, KV, K, K_BIAS, PRE_MLP),
        inside(L0, INPUT, Q, KV, K, K_BIAS, FC1) + inside(L1, INPUT, Q, KV, K, K_BIAS, PRE_MLP),
    ),
    "gated DeltaNet": (
        f"{MIXED}{GDN}",
        inside(L0, IN_PROJ, "self_attention.out_norm.weight", FC1) + inside(L1, QKV, *HEADS, PRE_MLP),
        inside(L0, IN_PROJ, "self_attention.out_norm.weight", FC1) + inside(L1, QKV, *HEADS, PRE_MLP),
    ),
}


def built(case, impl):
    """(model, record of its flags)."""
    args = parse_args([*BASE.split(), *CASES[case][0].split(), "--transformer-impl", impl], world_size=1)
    return build_chunks(args, SINGLE, 64)[0], args.as_dict()


def stored(folder):
    """(tensors, bases of the objects) of a checkpoint."""
    entries = read_index(folder).state_dict_metadata
    return (
        {key: list(entry.size) for key, entry in entries.items() if hasattr(entry, "chunks")},
        {key.partition("/")[0] for key, entry in entries.items() if not hasattr(entry, "chunks")},
    )


@pytest.mark.parametrize("case", CASES)
def test_norm_names_follow_the_layer_spec(case, tmp_path, capsys):
    found = {}
    for impl, norms in ((ENGINE, CASES[case][1]), (LOCAL, CASES[case][2])):
        model, record = built(case, impl)
        generator = torch.Generator().manual_seed(5)
        for param in model.parameters():
            param.data.normal_(generator=generator)
        save(tmp_path / impl, CheckpointState(5, record), [model], None, SINGLE, SaveOptions())
        tensors, objects = found[impl] = stored(tmp_path / impl / "iter_0000005")
        assert sorted(key for key in tensors if re.search(r"norm[._]", key)) == sorted(norms + OUTSIDE), impl
        # one of these for every weight of a separate norm, and of an attention: TransformerEngine's only
        alone = {key.removesuffix("weight") + "_extra_state" for key in norms + OUTSIDE if key.endswith("norm.weight")}
        attention = {
            key.removesuffix("linear_proj.weight") + "core_attention._extra_state"
            for key in tensors
            if key.endswith("attention.linear_proj.weight")
        }
        expected = (
            alone
            if case == "sparse attention"
            else alone | attention
            if impl == ENGINE or case == "gated DeltaNet"
            else set()
        )
        assert {base for base in objects if "norm." in base or "core_attention._" in base} == expected
        linears = {
            re.sub(r"\.weight(\.\w+)?$", "._extra_state", key)
            for key in tensors
            if re.search(r"\.(linear_\w+|\w+_proj)\.weight", key)
        }
        assert linears <= objects and len(linears) > 3
        assert main(["verify", str(tmp_path / impl)]) == 0, capsys.readouterr()
    names = [
        {key: shape for key, shape in found[impl][0].items() if not re.search(r"norm[._]", key)}
        for impl in (ENGINE, LOCAL)
    ]
    assert names[0] == names[1]
    assert differences(tmp_path / ENGINE / "iter_0000005", tmp_path / LOCAL / "iter_0000005") == []


@pytest.mark.parametrize("saved, here", [(ENGINE, LOCAL), (LOCAL, ENGINE), (ENGINE, ENGINE)])
@pytest.mark.parametrize("ckpt_format", ["torch_dist", "torch"])
def test_a_run_resumes_under_another_transformer_impl(saved, here, ckpt_format, tmp_path):
    """Weights and moments, in both formats; what the second run saves has the names of its own flag."""
    model = FakeModel()
    optimizer = FakeOptimizer(model, SINGLE)
    save(
        tmp_path,
        CheckpointState(5, RECORD | {"transformer_impl": saved}),
        [model],
        optimizer,
        SINGLE,
        SaveOptions(ckpt_format=ckpt_format),
    )
    second = FakeModel(seed=1)
    moments = FakeOptimizer(second, SINGLE, seed=1)
    record = RECORD | {"transformer_impl": here}
    assert load(tmp_path, [second], moments, SINGLE, LoadOptions(record, strictness="raise_all")).optim_loaded
    for (name, one), other in zip(second.tensors().items(), model.tensors().values(), strict=True):
        assert torch.equal(one, other), name
    assert all(torch.equal(*pair) for pair in zip(moments.values(), optimizer.values(), strict=True))
    save(tmp_path, CheckpointState(6, record), [second], moments, SINGLE, SaveOptions())
    norm = PRE_MLP if here == ENGINE else FC1
    tensors, _ = stored(tmp_path / "iter_0000006")
    assert sorted(key for key in tensors if key.endswith((PRE_MLP, FC1))) == sorted(
        f"{prefix}{L}{norm}" for prefix in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
    )


def test_run_resumes_under_other_impl_and_rank_count(tmp_path):
    """The ranges of the distributed optimizer are also read under the other names and by another number of ranks."""
    words = [
        *TINY,
        *MOCK,
        "--train-iters",
        "4",
        "--lr-warmup-iters",
        "0",
        "--save-interval",
        "2",
        "--optimizer",
        "adam",
        "--use-distributed-optimizer",
    ]
    losses = []
    for save_dir, more, ranks in (
        ("whole", ["--transformer-impl", LOCAL], 1),
        ("parts", ["--transformer-impl", ENGINE, "--exit-interval", "2"], 2),
        ("parts", ["--transformer-impl", LOCAL, "--load", str(tmp_path / "parts")], 1),
    ):
        done = run([*words, *more, "--save", str(tmp_path / save_dir)], tmp_path, world_size=ranks)
        assert done.returncode == 0, done.stderr
        losses.append([record["lm loss"] for record in read_metrics(tmp_path / save_dir / "metrics.jsonl")])
    assert len(losses[0]) == len(losses[2]) == 4 and losses[2] == pytest.approx(losses[0], abs=1e-6)
    tensors, _ = stored(tmp_path / "parts/iter_0000002")
    assert {
        f"{prefix}{L}{PRE_MLP}" for prefix in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
    } <= tensors.keys()
    tensors, _ = stored(tmp_path / "parts/iter_0000004")
    assert f"optimizer.state.exp_avg.{L}{FC1}" in tensors and f"{L}{PRE_MLP}" not in tensors


def test_legacy_optimizer_states_match_transformer_engine_names(tmp_path):
    model = FakeModel()
    for impl in (ENGINE, LOCAL):
        save(
            tmp_path / impl,
            CheckpointState(5, RECORD | {"transformer_impl": impl, "moe_grouped_gemm": True}),
            [model],
            FakeOptimizer(model, SINGLE),
            SINGLE,
            SaveOptions(ckpt_format="torch"),
        )
    engine, local = (
        open_file(tmp_path / impl / "iter_0000005/mp_rank_00/model_optim_rng.pt")["model"] for impl in (ENGINE, LOCAL)
    )
    more = {
        f"decoder.layers.{layer}.{module}._extra_state"
        for layer in (0, 1)
        for module in ("pre_mlp_layernorm", "self_attention.core_attention")
    }
    states = [
        {name for name in names if name.endswith("_extra_state") and ".experts." not in name}
        for names in (engine, local)
    ]
    assert states[0] - states[1] == more | {"decoder.final_layernorm._extra_state"} and states[1] < states[0]
    assert all(engine[name] is None for name in states[0])


def test_moe_layer_freq_of_wrong_length_is_a_clear_error(tmp_path):
    model = FakeModel()
    save(tmp_path, CheckpointState(5, RECORD), [model], None, SINGLE, SaveOptions(ckpt_format="torch"))
    path = tmp_path / "iter_0000005/mp_rank_00/model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    content["args"].moe_layer_freq = [1, 1, 1]
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="lists 3 layers"):
        load(tmp_path, [FakeModel(seed=1)], None, SINGLE, LoadOptions(RECORD))

"""Building: names, shapes, values, dtypes; weights in and out by name."""

import math
from types import SimpleNamespace

import pytest
import torch

import arguments
from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.model.build import _dispatch_buffer_spec, build_chunks
from moe_trainer.model.sequence_borders import SequenceBorders
from moe_trainer.model.weights import export_named_weights, load_named_weights
from moe_trainer.ops.packed_sequences import PackedSequences
from moe_trainer.parallel.sequence import SequenceShard
from moe_trainer.parallel.state import Group, ParallelState

BASE = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --kv-channels 8 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 2 --train-iters 1 --lr 1e-3 "
    "--transformer-impl local --mock-data --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 95 "
    "--attention-dropout 0 --hidden-dropout 0 --normalization RMSNorm --swiglu --position-embedding-type rope "
    "--disable-bias-linear"
).split()
MOE = (
    "--num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 2 --moe-shared-expert-intermediate-size 24 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-layer-freq [0,1]"
).split()
LATENT = (
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 8 --qk-layernorm --rope-type rope --no-rope-fusion"
)
LINEAR = (
    "--experimental-attention-variant gdn --linear-attention-freq ([1]*2) --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8"
)
UNTIED = ["--untie-embeddings-and-output-weights"]


def build(*argv, device="cpu"):
    (model,) = build_chunks(arguments.parse_args([*BASE, *argv], world_size=1), ParallelState.single(), 96, device)
    return model


def run(model):
    tokens = torch.arange(32).view(2, 16) % 96
    return model(tokens, torch.arange(16).expand(2, 16), tokens)


def test_module_paths_are_the_global_names():
    model = build(*MOE, *UNTIED)
    for path, param in model.named_parameters():
        if param.info.stacked:
            assert param.info.names[1] == path.replace("experts.linear", "experts.local_experts.1.linear")
        else:
            assert param.info.names == (path,)
    names = [name for name, _ in export_named_weights([model], ParallelState.single())]
    assert len(names) == len(set(names))
    assert "decoder.layers.1.mlp.router.expert_bias" in names and "decoder.layers.0.mlp.linear_fc1.weight" in names


def test_a_shared_expert_is_split_evenly_among_tensor_ranks():
    flags = "--moe-shared-expert-intermediate-size 25 --tensor-model-parallel-size 2 --sequence-parallel"
    with pytest.raises(arguments.ArgumentError, match="--moe-shared-expert-intermediate-size 25 must be a multiple"):
        arguments.parse_args([*BASE, *MOE, *flags.split()], world_size=2)


def test_initial_values_depend_on_seed_and_name_only():
    deep, shallow = build("--seed", "5"), build("--seed", "5", "--num-layers", "4")
    ours, theirs = dict(deep.named_parameters()), dict(shallow.named_parameters())
    qkv = "decoder.layers.1.self_attention.linear_qkv.weight"
    assert torch.equal(ours[qkv], theirs[qkv])
    assert not torch.equal(ours[qkv], ours[qkv.replace("1", "0")])
    assert not torch.equal(ours[qkv], dict(build("--seed", "6").named_parameters())[qkv])


def test_init_standard_deviations():
    params = dict(build("--init-method-std", "0.1", "--embedding-init-method-std", "0.5", *UNTIED).named_parameters())
    for name, std in (
        ("embedding.word_embeddings.weight", 0.5),
        ("output_layer.weight", 0.1),
        ("decoder.layers.0.mlp.linear_fc1.weight", 0.1),
        ("decoder.layers.0.mlp.linear_fc2.weight", 0.1 / math.sqrt(4)),
    ):
        assert params[name].std().item() == pytest.approx(std, rel=0.1), name


def test_xavier_uniform_bounds():
    weight = build("--init-method-xavier-uniform").decoder.layers[0].mlp.linear_fc1.weight
    bound = math.sqrt(6 / (96 + 32))
    assert 0.9 * bound < weight.abs().max().item() <= bound


def test_meta_build_has_shapes_and_no_storage():
    model, meta = build(*MOE), build(*MOE, device="meta")
    shapes = {path: (param.shape, param.dtype, param.info) for path, param in model.named_parameters()}
    assert shapes == {path: (param.shape, param.dtype, param.info) for path, param in meta.named_parameters()}
    assert all(param.is_meta for param in meta.parameters()) and all(buffer.is_meta for buffer in meta.buffers())


def test_bf16_parameters_are_the_rounded_fp32_ones_and_buffers_stay_fp32():
    wide, narrow = build(*MOE), build(*MOE, "--bf16")
    for (path, a), b in zip(wide.named_parameters(), narrow.parameters()):
        assert b.dtype == torch.bfloat16 and torch.equal(a.bfloat16(), b), path
    assert {buffer.dtype for _, buffer in narrow.named_state_buffers()} == {torch.float32}
    loss = run(narrow)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, run(wide), rtol=0.02, atol=0.02)


def test_tied_output_layer_shares_the_embedding_gradient():
    model = build()
    assert "output_layer.weight" not in dict(model.named_parameters())
    weight = model.embedding.word_embeddings.weight
    assert not weight.info.tied  # one process holds it, so there is no copy to sum its gradient with
    run(model).sum().backward()
    assert (weight.grad.abs().sum(1) > 0).all()  # the head reaches rows whose tokens never occur


def test_learned_and_no_position_embeddings():
    learned, absent = build("--position-embedding-type", "learned_absolute"), build("--position-embedding-type", "none")
    assert learned.embedding.position_embeddings.weight.shape == (16, 32)
    assert absent.embedding.position_embeddings is None and absent.rotary is None
    tokens = torch.arange(16).view(1, 16)
    with torch.no_grad():
        order = torch.arange(16).view(1, 16)
        assert not torch.allclose(learned(tokens, order), learned(tokens, order.flip(1)))
        assert torch.equal(absent(tokens, order), absent(tokens, order.flip(1)))


def test_fp32_residual_carries_fp32_between_bf16_layers():
    model = build("--bf16", "--fp32-residual-connection")
    seen = []
    model.decoder.layers[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    run(model).sum().backward()
    assert seen == [torch.float32]
    assert all(param.grad.dtype == torch.bfloat16 for param in model.parameters())


def test_residual_connection_post_layernorm():
    plain, after = build(), build("--apply-residual-connection-post-layernorm")
    layer = after.decoder.layers[0]
    x = torch.randn(16, 2, 32)
    with torch.no_grad():
        normed = layer.input_layernorm(x)
        middle = normed + layer.self_attention(normed, None, None)
        normed = layer.pre_mlp_layernorm(middle)
        torch.testing.assert_close(layer(x, None, PassInputs()), normed + layer.mlp(normed))
        assert not torch.allclose(layer(x, None, PassInputs()), plain.decoder.layers[0](x, None, PassInputs()))


@pytest.mark.parametrize(
    "kind", ["", f"{' '.join(MOE)} --moe-layer-freq 1", LATENT, LINEAR], ids=["dense", "moe", "latent", "linear"]
)
@pytest.mark.parametrize("before", [True, False], ids=["before and after", "after"])
def test_norms_after_sublayers(kind, before):
    after = "--post-self-attn-layernorm --post-mlp-layernorm".split()
    model = build(*kind.split(), *after, *([] if before else ["--disable-pre-layernorm"]))
    layer = model.decoder.layers[0]
    assert [name.split(".")[0] for name, _ in layer.named_parameters() if name.endswith("layernorm.weight")] == [
        *(["input_layernorm"] if before else []),
        *["self_attention"] * sum("_layernorm" in name for name, _ in layer.self_attention.named_parameters()),
        "post_self_attn_layernorm",
        *(["pre_mlp_layernorm"] if before else []),
        "post_mlp_layernorm",
    ]
    with torch.no_grad():
        for param in layer.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)  # no gain is one
        x = torch.randn(16, 2, 32)
        rope = model.rotary.tables(16, x.device) if model.rotary else None
        out = layer.self_attention(layer.input_layernorm(x) if before else x, rope, None)
        middle = x + layer.post_self_attn_layernorm(out)
        out = layer.mlp(layer.pre_mlp_layernorm(middle) if before else middle)
        expected = middle + layer.post_mlp_layernorm(out)
        torch.testing.assert_close(layer(x, rope, PassInputs()), expected)


def test_dropout_is_reproducible_and_off_in_evaluation():
    model = build("--hidden-dropout", "0.2", "--attention-dropout", "0.2")
    torch.manual_seed(3)
    first = run(model)
    assert not torch.equal(first, run(model))
    torch.manual_seed(3)
    assert torch.equal(first, run(model))
    model.eval()
    assert torch.equal(run(model), run(model))


def test_attention_mask_hides_marked_positions():
    model = build().eval()
    tokens, positions = torch.arange(16).view(1, 16), torch.arange(16).view(1, 16)
    causal = ~torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
    separate = causal.clone()
    separate[..., 8:, :8] = True
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, positions, borders=SequenceBorders(causal)), model(tokens, positions))
        masked = model(tokens, positions, borders=SequenceBorders(separate))
        changed = model(torch.cat([tokens[:, :8] + 40, tokens[:, 8:]], 1), positions, borders=SequenceBorders(separate))
    assert torch.equal(masked[:, 8:], changed[:, 8:]) and not torch.equal(masked[:, :8], changed[:, :8])


def test_weights_are_loaded_by_name_across_dtypes():
    source, target = build(*MOE), build(*MOE, "--seed", "9", "--bf16")
    load_named_weights([target], dict(export_named_weights([source], ParallelState.single())), ParallelState.single())
    pairs = zip(
        export_named_weights([source], ParallelState.single()), export_named_weights([target], ParallelState.single())
    )
    for (name, a), (_, b) in pairs:
        assert torch.equal(a.to(b.dtype), b), name


def test_expert_bias_is_optional_on_load():
    model = build(*MOE)
    weights = {
        name: value.clone()
        for name, value in export_named_weights([model], ParallelState.single())
        if "expert_bias" not in name
    }
    load_named_weights([model], weights, ParallelState.single())


def test_mismatched_weights_are_all_listed_and_none_copied():
    model = build(*MOE)
    weights = {name: value.clone() for name, value in export_named_weights([model], ParallelState.single())}
    weights["decoder.final_layernorm.weight"] += 1
    del weights["decoder.layers.0.input_layernorm.weight"]
    weights["decoder.layers.7.extra"] = torch.zeros(1)
    weights["decoder.layers.1.mlp.router.weight"] = torch.zeros(5, 32)
    with pytest.raises(ValueError) as error:
        load_named_weights([model], weights, ParallelState.single())
    for words in (
        "1 missing",
        "decoder.layers.0.input_layernorm.weight",
        "1 unexpected",
        "decoder.layers.7.extra",
        "decoder.layers.1.mlp.router.weight: given [5, 32], the model has [4, 32]",
    ):
        assert words in str(error.value)
    assert torch.equal(model.decoder.final_layernorm.weight, torch.ones(32))
    weights["decoder.layers.1.mlp.router.weight"] = torch.zeros(4, 32)
    load_named_weights([model], weights, ParallelState.single(), strict=False)
    assert torch.equal(model.decoder.final_layernorm.weight, torch.full((32,), 2.0))


def test_dispatch_buffers_hold_the_larger_of_training_and_evaluation_batches():
    args = arguments.parse_args([*BASE, *MOE, "--eval-micro-batch-size", "3", "--eval-global-batch-size", "3"], 1)
    spec = _dispatch_buffer_spec(args, ParallelState.single(), torch.bfloat16, torch.device("cpu"))
    assert spec.max_tokens == 3 * 16


def test_tensor_ranks_of_a_dense_model_may_have_no_token():
    """Five tokens are no multiple of four ranks: packed sequences of dense models are not padded to one."""
    model = build()
    model.sequence = SequenceShard(Group.single("cp"))

    def mask_of(rank, length):
        model.tp = SimpleNamespace(size=4, rank=rank)
        return model._valid_tokens(PackedSequences.of([length])).mask_T

    for length in (1, 2, 5, 8):
        masks = [mask_of(rank, length) for rank in range(4)]
        assert torch.cat(masks).tolist() == [True] * length

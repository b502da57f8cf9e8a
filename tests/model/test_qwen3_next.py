"""Qwen3-Next: logits, loss and gradients of a small random model equal those of Hugging Face transformers."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import arguments
from moe_trainer.model.build import build_chunks
from moe_trainer.model.weights import load_named_weights
from moe_trainer.parallel.params import get_param_info
from moe_trainer.parallel.state import ParallelState

transformers = pytest.importorskip("transformers")

SEQ, VOCAB, LAYERS, EXPERTS = 150, 96, 4, 4  # three chunks of the delta rule
ARGV = (
    f"--num-layers {LAYERS} --hidden-size 32 --ffn-hidden-size 56 --num-attention-heads 4 --seq-length {SEQ} --max-position-embeddings {SEQ} "
    "--micro-batch-size 2 --global-batch-size 2 --train-iters 1 --lr 1e-3 --attention-dropout 0 --hidden-dropout 0 --disable-bias-linear "
    "--transformer-impl local --mock-data --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 95 "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --rotary-base 10000 --rotary-percent 0.25 --normalization RMSNorm "
    "--norm-epsilon 1e-6 --apply-layernorm-1p --swiglu --group-query-attention --num-query-groups 2 --kv-channels 16 --qk-layernorm "
    "--attention-output-gate --experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-conv-kernel-dim 4 "
    "--linear-key-head-dim 8 --linear-value-head-dim 12 --linear-num-key-heads 2 --linear-num-value-heads 4 "
    f"--num-experts {EXPERTS} --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 20 "
    "--moe-shared-expert-gate --moe-grouped-gemm --moe-router-load-balancing-type none"
).split()
KEYS, VALUES, KEY_DIM, VALUE_DIM, GROUPS = 2, 4, 8, 12, 2


def hf_model():
    torch.manual_seed(11)
    model = transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=GROUPS,
            head_dim=16,
            max_position_embeddings=SEQ,
            rms_norm_eps=1e-6,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=KEY_DIM,
            linear_value_head_dim=VALUE_DIM,
            linear_num_key_heads=KEYS,
            linear_num_value_heads=VALUES,
            num_experts=EXPERTS,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=20,
            norm_topk_prob=True,
            initializer_range=0.04,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            attn_implementation="eager",
        )
    )
    generator = torch.Generator().manual_seed(7)
    for name, param in model.named_parameters():
        if param.dim() == 1 or "conv1d" in name:  # constants would not show a swap
            param.data += 0.3 * torch.randn(param.shape, generator=generator)
    return model


def delta_rows(qkvz: Tensor, ba: Tensor) -> Tensor:
    """Theirs: [q, k, v.., z..] of every key head, and [b.., a..]; ours: one projection after the other."""
    per_key = VALUES // KEYS
    q, k, v, z = qkvz.unflatten(0, (KEYS, -1)).split([KEY_DIM, KEY_DIM, per_key * VALUE_DIM, per_key * VALUE_DIM], 1)
    b, a = ba.unflatten(0, (KEYS, -1)).split([per_key, per_key], 1)
    return torch.cat([part.flatten(0, 1) for part in (q, k, v, z, b, a)])


def attention_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Theirs: query and gate of every head; ours: [q.., g.., k, v] of every group."""
    query, gate = q.unflatten(0, (4, 2, 16)).unbind(1)
    parts = [x.unflatten(0, (GROUPS, -1)).flatten(1, -2) for x in (query, gate)]
    return torch.cat([*parts, *(x.unflatten(0, (GROUPS, -1)) for x in (k, v))], 1).flatten(0, 1)


def convert(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face names -> Megatron-Core names; a linear map, so gradients go through it too."""
    out = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }
    for i in range(LAYERS):
        layer = {
            name.removeprefix(f"model.layers.{i}."): value
            for name, value in state.items()
            if name.startswith(f"model.layers.{i}.")
        }
        ours = {
            "input_layernorm.weight": layer["input_layernorm.weight"],
            "pre_mlp_layernorm.weight": layer["post_attention_layernorm.weight"],
            "mlp.router.weight": layer["mlp.gate.weight"],
            "mlp.shared_experts.gate_weight": layer["mlp.shared_expert_gate.weight"],
            "mlp.shared_experts.linear_fc1.weight": torch.cat(
                [layer[f"mlp.shared_expert.{x}_proj.weight"] for x in ("gate", "up")]
            ),
            "mlp.shared_experts.linear_fc2.weight": layer["mlp.shared_expert.down_proj.weight"],
        }
        for expert in range(EXPERTS):
            for leaf, theirs in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
                ours[f"mlp.experts.local_experts.{expert}.{leaf}.weight"] = layer[f"mlp.experts.{theirs}"][expert]
        if "linear_attn.A_log" in layer:
            ours |= {
                f"self_attention.{name}": layer[f"linear_attn.{name}"]
                for name in ("A_log", "dt_bias", "conv1d.weight", "out_proj.weight")
            }
            ours["self_attention.in_proj.weight"] = delta_rows(
                layer["linear_attn.in_proj_qkvz.weight"], layer["linear_attn.in_proj_ba.weight"]
            )
            ours["self_attention.out_norm.weight"] = layer["linear_attn.norm.weight"]
        else:
            ours |= {f"self_attention.{x}_layernorm.weight": layer[f"self_attn.{x}_norm.weight"] for x in "qk"}
            ours["self_attention.linear_qkv.weight"] = attention_rows(
                *(layer[f"self_attn.{x}_proj.weight"] for x in "qkv")
            )
            ours["self_attention.linear_proj.weight"] = layer["self_attn.o_proj.weight"]
        out |= {f"decoder.layers.{i}.{name}": value for name, value in ours.items()}
    return out


def test_part_names_and_sizes_of_fused_weights():
    (ours,) = build_chunks(arguments.parse_args(ARGV, world_size=1), ParallelState.single(), VOCAB, device="meta")
    layer = ours.decoder.layers[0].self_attention
    keys, values = KEYS * KEY_DIM, VALUES * VALUE_DIM
    sizes = {"query": keys, "key": keys, "value": values, "z": values, "beta": VALUES, "alpha": VALUES}
    info = get_param_info(layer.in_proj.weight)
    assert dict(zip(info.part_names, info.part_sizes)) == sizes and list(sizes) == list(info.part_names)
    info = get_param_info(layer.conv1d.weight)
    assert info.names == ("decoder.layers.0.self_attention.conv1d.weight",) and info.part_names == (
        "query",
        "key",
        "value",
    )
    assert info.part_sizes == (keys, keys, values)


def test_logits_loss_and_gradients_equal_transformers():
    theirs = hf_model()
    args = arguments.parse_args(ARGV, world_size=1)
    (ours,) = build_chunks(args, ParallelState.single(), VOCAB)
    weights = {name: value.detach().clone() for name, value in convert(dict(theirs.named_parameters())).items()}
    for name in weights:
        if name.endswith("out_norm.weight"):
            weights[name] -= 1.0  # the one norm that theirs does not centre at zero
    load_named_weights([ours], weights, ParallelState.single())

    tokens = torch.randint(VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(3))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(SEQ).expand(2, SEQ)
    with torch.no_grad():
        expected, found = theirs.eval()(inputs).logits, ours.eval()(inputs, positions)
    assert expected.std() > 0.1
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()

    loss = ours.train()(inputs, positions, labels).mean()
    reference = F.cross_entropy(theirs.train()(inputs).logits.flatten(0, 1), labels.flatten())
    assert loss.item() == pytest.approx(reference.item(), rel=1e-5)
    loss.backward()
    reference.backward()
    gradients = convert({name: param.grad for name, param in theirs.named_parameters()})
    seen = set()
    for param in ours.parameters():
        for name, grad in zip(
            get_param_info(param).names, param.grad.unbind(0) if get_param_info(param).stacked else (param.grad,)
        ):
            assert (grad - gradients[name]).abs().max() <= 1e-4 * gradients[name].abs().max() + 1e-7, name
            seen.add(name)
    assert seen == set(gradients)

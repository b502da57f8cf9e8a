"""Hybrid models (--hybrid-layer-pattern): logits and gradients equal those of Nemotron-H in Hugging Face transformers."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import arguments
from moe_trainer.estimate.parameters import LayerParams, count_parameters
from moe_trainer.layers.kv_cache import KVCache
from moe_trainer.model.build import build_chunks
from moe_trainer.model.sequence_borders import SequenceBorders
from moe_trainer.model.weights import load_named_weights
from moe_trainer.parallel.params import get_param_info
from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.quantization.iteration import find_quantized_gemms

SEQ, VOCAB, PATTERN, EXPERTS, GROUPS = 150, 96, "M*-EME", 6, 2  # three chunks of the scan
ARGV = (
    f"--hybrid-layer-pattern {PATTERN} --hidden-size 40 --ffn-hidden-size 56 --num-attention-heads 4 --kv-channels 12 "
    f"--group-query-attention --num-query-groups {GROUPS} --seq-length {SEQ} --max-position-embeddings {SEQ} --micro-batch-size 2 "
    "--global-batch-size 2 --train-iters 1 --lr 1e-3 --attention-dropout 0 --hidden-dropout 0 --disable-bias-linear "
    "--transformer-impl local --mock-data --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 95 "
    "--make-vocab-size-divisible-by 96 --untie-embeddings-and-output-weights --position-embedding-type none "
    "--normalization RMSNorm --squared-relu --mamba-num-heads 6 --mamba-head-dim 12 --mamba-num-groups 2 "
    f"--mamba-state-dim 20 --num-experts {EXPERTS} --moe-router-topk 3 --moe-ffn-hidden-size 24 --moe-latent-size 16 "
    "--moe-shared-expert-intermediate-size 28 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-topk-scaling-factor 2.5 --moe-grouped-gemm --moe-router-load-balancing-type none"
).split()
KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
SUBLAYERS = {"M": ("norm", "mixer"), "*": ("input_layernorm", "self_attention"), "-": ("pre_mlp_layernorm", "mlp")}


def make_model(*more: str):
    args = arguments.parse_args([*ARGV, *more], 1)
    (chunk,) = build_chunks(args, ParallelState.single(), VOCAB)
    return chunk.double()


def hf_model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(11)
    model = transformers.NemotronHForCausalLM(
        transformers.NemotronHConfig(
            vocab_size=VOCAB,
            hidden_size=40,
            layers_block_type=[KINDS[letter] for letter in PATTERN],
            num_attention_heads=4,
            num_key_value_heads=GROUPS,
            head_dim=12,
            intermediate_size=56,
            ssm_state_size=20,
            mamba_num_heads=6,
            mamba_head_dim=12,
            n_groups=2,
            chunk_size=32,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=28,
            moe_latent_size=16,
            routed_scaling_factor=2.5,
            time_step_min=1e-30,  # theirs is also a lower limit of step sizes, which Megatron-Core's kernels do not have
            time_step_floor=1e-30,
            attn_implementation="eager",
            experts_implementation="eager",
        )
    )
    generator = torch.Generator().manual_seed(7)
    for name, param in model.named_parameters():
        if name.endswith("dt_bias"):
            param.data = torch.randn(param.shape, generator=generator)
        elif param.dim() == 1 or "conv1d" in name:  # constants would not show a swap
            param.data += 0.3 * torch.randn(param.shape, generator=generator)
        else:
            param.data = 0.2 * torch.randn(param.shape, generator=generator)
    return model.double().eval()


def convert(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face names -> Megatron-Core names; a linear map, so gradients go through it too."""
    out = {
        "embedding.word_embeddings.weight": state["model.embeddings.weight"],
        "decoder.final_norm.weight": state["model.norm_f.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }
    for number, letter in enumerate(PATTERN):
        prefix, ours = f"model.layers.{number}.", f"decoder.layers.{number}."
        layer = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        norm, module = SUBLAYERS.get(letter, SUBLAYERS["-"])
        out[f"{ours}{norm}.weight"] = layer.pop("norm.weight")
        inner = {name.removeprefix("mixer."): value for name, value in layer.items()}
        if letter == "*":
            parts = [inner[f"{x}_proj.weight"].unflatten(0, (GROUPS, -1)) for x in "qkv"]
            inner = {
                "linear_qkv.weight": torch.cat(parts, 1).flatten(0, 1),
                "linear_proj.weight": inner["o_proj.weight"],
            }
        elif letter == "-":
            inner = {f"linear_fc{i}.weight": inner[f"{x}_proj.weight"] for i, x in ((1, "up"), (2, "down"))}
        elif letter == "E":
            inner = expert_weights(inner)
        out |= {f"{ours}{module}.{name}": value for name, value in inner.items()}
    return out


def expert_weights(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    ours = {"router.weight": theirs["gate.weight"]}
    for i, x in ((1, "up"), (2, "down")):
        ours[f"fc{i}_latent_proj.weight"] = theirs[f"fc{i}_latent_proj.weight"]
        ours[f"shared_experts.linear_fc{i}.weight"] = theirs[f"shared_experts.{x}_proj.weight"]
        for expert in range(EXPERTS):
            ours[f"experts.local_experts.{expert}.linear_fc{i}.weight"] = theirs[f"experts.{x}_proj"][expert]
    return ours


def test_logits_and_gradients_equal_transformers():
    theirs, ours = hf_model(), make_model()
    state = {name: value for name, value in theirs.state_dict().items() if not name.endswith("correction_bias")}
    weights = {name: value.detach() for name, value in convert(state).items()}
    load_named_weights([ours], weights, ParallelState.single())
    tokens = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(SEQ).expand(2, -1)
    weight = torch.randn(2, SEQ, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    expected = theirs(tokens).logits.double()
    logits = ours(tokens, positions).double()
    # transformers gives logits in fp32
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.1
    (expected * weight).sum().backward()
    (logits * weight).sum().backward()
    params = dict(theirs.named_parameters())
    wanted = convert({name: param.grad for name, param in params.items()})
    for param in ours.parameters():
        info = get_param_info(param)
        for name, grad in zip(info.names, param.grad if info.stacked else [param.grad], strict=True):
            scale = wanted[name].abs().max()
            torch.testing.assert_close(
                grad, wanted[name], rtol=0, atol=2e-5 * scale.item(), msg=lambda x, n=name: n + x
            )


def test_documents_do_not_depend_on_previous_ones():
    model = make_model()
    tokens = torch.randint(0, VOCAB, (1, SEQ), generator=torch.Generator().manual_seed(3))
    ids, start = torch.zeros(1, SEQ, dtype=torch.long), 71
    ids[:, start:] = 1
    packed = model(tokens, torch.arange(SEQ)[None], borders=SequenceBorders(document_ids_BS=ids))
    alone = model(tokens[:, start:], torch.arange(SEQ - start)[None])
    whole = model(tokens, torch.arange(SEQ)[None])
    torch.testing.assert_close(packed[:, start:], alone, rtol=0, atol=1e-10)
    assert (packed - whole)[:, start:].abs().max() > 1e-4


def test_generation_continues_from_the_state():
    """Logits of every further token of two texts of different lengths equal those of the full texts."""
    model = make_model().eval()
    tokens = torch.randint(0, VOCAB, (2, 80), generator=torch.Generator().manual_seed(3))
    lengths = [70, 66]
    with torch.no_grad():
        wanted = [model(tokens[i : i + 1], torch.arange(80)[None])[0] for i in range(2)]
        cache = KVCache(lengths, 80, torch.device("cpu"))
        positions = torch.arange(70).expand(2, -1)
        logits = model(tokens[:, :70], positions, borders=SequenceBorders(row_lengths=tuple(lengths), cache=cache))
        for more in range(5):
            for i, length in enumerate(lengths):
                torch.testing.assert_close(logits[0, i], wanted[i][length + more - 1], rtol=0, atol=1e-10)
            cache.advance()
            following = torch.stack([tokens[i, length + more] for i, length in enumerate(lengths)])[None]
            logits = model(following, cache.last_positions[None], borders=SequenceBorders(cache=cache))


def test_parameters_are_counted_and_initialized_as_in_megatron_core():
    args = arguments.parse_args([*ARGV, "--mamba-num-heads", "512", "--mamba-head-dim", "2"], 1)
    (chunk,) = build_chunks(args, ParallelState.single(), VOCAB)
    assert count_parameters(args, VOCAB).total == sum(param.numel() for param in chunk.parameters())
    halves = arguments.parse_args([*ARGV, "--tensor-model-parallel-size", "2"], 2)
    (half,) = build_chunks(
        halves,
        replace(ParallelState.single(), **{name: Group(name, (0, 1), 0, 2) for name in ("tp", "etp")}),
        VOCAB,
        "meta",
    )
    assert LayerParams(halves, VOCAB).chunk(half.layout).total == sum(param.numel() for param in half.parameters())
    mixer = chunk.decoder.layers[0].mixer
    steps = torch.nn.functional.softplus(mixer.dt_bias)
    assert 1e-3 <= steps.min() < 1.2e-3 and 0.08 < steps.max() <= 0.1001
    assert abs(steps.log().mean() - math.log(1e-2)) < 0.2, "log-uniform"
    assert (mixer.D == 1).all() and (mixer.norm.weight == 1).all()
    assert 0.4 < mixer.conv1d.bias.abs().max() <= 0.5 and 0.4 < mixer.conv1d.weight.abs().max() <= 0.5
    assert mixer.A_log.min() >= 0 and mixer.A_log.max() <= math.log(16)
    std = args.model.init_method_std / math.sqrt(len(PATTERN))
    for weight in (mixer.out_proj.weight, chunk.decoder.layers[2].mlp.linear_fc2.weight):
        assert weight.std().item() == pytest.approx(std, rel=0.05), "one sublayer a layer"


def test_mamba_gemms_are_quantized_as_those_of_transformer_engine():
    args = arguments.parse_args([*ARGV, *"--bf16 --fp8-format e4m3 --fp8-recipe mxfp8".split()], 1)
    (chunk,) = build_chunks(args, ParallelState.single(), VOCAB)
    names = {gemms.name for gemms in find_quantized_gemms(chunk)}
    assert {"decoder.layers.0.mixer.in_proj", "decoder.layers.0.mixer.out_proj"} <= names

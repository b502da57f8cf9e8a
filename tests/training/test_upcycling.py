"""--moe-use-upcycling: from a dense checkpoint to a MoE model, under any layout, saved before it is trained."""

import functools

import pytest
import torch
from checkpoint.hf.models import VOCAB, make
from commands import read_metrics, run
from safetensors.torch import load_file
from training.forked import pretrain
from training.tiny import MOCK

from arguments.mechanisms.selections import SPLITS
from moe_trainer.checkpoint.logical import LogicalTensor
from moe_trainer.checkpoint.upcycling import UpcyclingSpec, tensor_recipes

SHAPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --ffn-hidden-size 48 "
    "--normalization RMSNorm --position-embedding-type rope --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --save-interval 2 "
    "--eval-interval 1000 --eval-iters 2 --init-method-std 0.1"
).split()
UNTIED = "--untie-embeddings-and-output-weights"
GATED = f"--swiglu --disable-bias-linear {UNTIED}"
SQUARED = f"--squared-relu --disable-bias-linear {UNTIED}"
TIED = "--swiglu --disable-bias-linear"
BIASES = UNTIED  # gelu in its tanh form
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-router-dtype fp32 --moe-grouped-gemm"
LAYER = "decoder.layers.1."


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """By activation flags: a trained dense model as (folder, weights, validation loss)."""
    made = {}

    def train(flags):
        if flags not in made:
            folder = tmp_path_factory.mktemp("dense")
            records, weights = pretrain(
                [*SHAPE, *MOCK, *flags.split(), "--train-iters", "2", "--save", "saved"], folder
            )
            made[flags] = str(folder / "saved"), weights, validation(records)
        return made[flags]

    return train


def validation(records):
    return next(record["lm loss"] for record in records if "validation" in record)


@pytest.fixture(scope="module")
def upcycled(dense, tmp_path_factory):
    """By activation and expert flags: (records, weights) of the model that one process makes of the dense one."""
    return functools.cache(
        lambda model, experts: upcycle(dense(model)[0], f"{model} {experts}", tmp_path_factory.mktemp("upcycled"))
    )


def upcycle(source, flags, folder, ranks=1):
    """(records, weights) of the model as it is before its first step."""
    argv = [*SHAPE, *MOCK, *flags.split(), *"--train-iters 2 --skip-train --moe-use-upcycling --save saved".split()]
    return pretrain([*argv, "--load", source], folder, ranks)


@pytest.mark.parametrize(
    ("model", "experts"),
    [
        (GATED, EXPERTS),
        (GATED, f"{EXPERTS} --moe-layer-freq [0,1]"),
        (BIASES, f"{EXPERTS} --num-experts 3"),
        (SQUARED, f"{EXPERTS} --moe-upcycling-granularity 2"),
        (SQUARED, f"{EXPERTS} --moe-ffn-hidden-size 16 --num-experts 12 --moe-router-topk 6"),
        (GATED.replace("--disable-bias-linear", ""), f"{EXPERTS} --moe-router-score-function sigmoid"),
        (f"{GATED} --hybrid-layer-pattern=*-*-", f"{EXPERTS} --hybrid-layer-pattern=*E*-"),
        (GATED, f"{EXPERTS} --hybrid-layer-pattern=*E*E --no-rope-freq [0,0,0,0]"),
    ],
)
def test_upcycled_model_has_the_loss_of_the_dense_model(model, experts, dense, upcycled):
    _, _, expected = dense(model)
    records, weights = upcycled(model, experts)
    assert validation(records) == pytest.approx(expected, rel=1e-6)
    assert weights[f"{LAYER}mlp.router.weight"].std() > 0.05


def test_a_dense_pattern_becomes_a_transformer_with_experts(dense, tmp_path):
    source, old, expected = dense(f"{GATED} --hybrid-layer-pattern=*-*-")
    records, new = upcycle(source, f"{GATED} {EXPERTS}", tmp_path)
    assert validation(records) == pytest.approx(expected, rel=1e-6)
    assert torch.equal(
        new["decoder.layers.1.self_attention.linear_qkv.weight"],
        old["decoder.layers.2.self_attention.linear_qkv.weight"],
    )


def test_granular_gated_experts_are_scaled_with_virtual_router_groups(dense, tmp_path):
    source, old, expected = dense(GATED)
    records, new = upcycle(
        source,
        f"{GATED} --num-experts 6 --moe-router-topk 3 --moe-upcycling-granularity 3 --moe-router-dtype fp32",
        tmp_path,
    )
    fc1, fc2 = old[f"{LAYER}mlp.linear_fc1.weight"], old[f"{LAYER}mlp.linear_fc2.weight"]
    for expert in range(6):
        rows = slice(16 * (expert % 3), 16 * (expert % 3) + 16)
        own = f"{LAYER}mlp.experts.local_experts.{expert}."
        torch.testing.assert_close(
            new[f"{own}linear_fc1.weight"], 3 ** (1 / 3) * torch.cat([fc1[:48][rows], fc1[48:][rows]])
        )
        torch.testing.assert_close(new[f"{own}linear_fc2.weight"], 3 ** (1 / 3) * fc2[:, rows])
    router = new[f"{LAYER}mlp.router.weight"]
    assert torch.equal(router[:3], router[:1].expand(3, -1)) and torch.equal(router[3:], router[3:4].expand(3, -1))
    assert not torch.equal(router[0], router[3]) and not torch.equal(router, new["decoder.layers.0.mlp.router.weight"])
    # silu is not homogeneous: near, not equal
    assert 1e-6 < abs(validation(records) - expected) < 0.05


def test_pre_softmax_routing_has_its_own_weight_scale(dense, tmp_path):
    source, old, _ = dense(SQUARED)
    flags = f"{SQUARED} --num-experts 8 --moe-router-topk 2 --moe-upcycling-granularity 2 --moe-router-pre-softmax --moe-router-dtype fp32"
    _, new = upcycle(source, flags, tmp_path)
    # 4 copies of 2 pieces, 2 chosen: 4 * 2^2 / 2
    torch.testing.assert_close(
        new[f"{LAYER}mlp.experts.local_experts.5.linear_fc1.weight"], 2.0 * old[f"{LAYER}mlp.linear_fc1.weight"][24:]
    )


def test_random_experts_have_no_biases():
    random = UpcyclingSpec.from_args(FORM | {"moe_upcycling_expert_init": "normal"})
    assert random.draw_expert("fc1.bias", (6,)).count_nonzero() == 0
    assert 0.05 < random.draw_expert("fc1.weight", (6, 8)).std() < 0.15


@pytest.mark.parametrize(
    ("model", "experts", "layout"),
    [
        (
            GATED,
            f"{EXPERTS} --moe-router-enable-expert-bias --moe-router-score-function sigmoid",
            "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel",
        ),
        (
            SQUARED,
            f"{EXPERTS} --moe-upcycling-granularity 2",
            "--pipeline-model-parallel-size 2 --expert-tensor-parallel-size 1",
        ),
        (
            GATED,
            f"{EXPERTS} --moe-upcycling-granularity 2",
            "--expert-model-parallel-size 2 --use-distributed-optimizer --ckpt-fully-parallel-load",
        ),
        (
            GATED,
            f"{EXPERTS} --moe-upcycling-granularity 2",
            "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2 --sequence-parallel",
        ),
    ],
)
def test_upcycling_under_every_layout_saves_the_same_model(model, experts, layout, dense, upcycled, tmp_path):
    width = ["--moe-ffn-hidden-size", "24"] if "granularity 2" in experts else []
    check_layout(model, experts, layout, width, dense, upcycled, tmp_path)


def check_layout(model, experts, layout, width, dense, upcycled, tmp_path):
    source, _, _ = dense(model)
    _, full = upcycled(model, experts)
    _, cut = upcycle(source, f"{model} {experts} {layout}", tmp_path / "two", 2)
    argv = [*SHAPE, *MOCK, *model.split(), *experts.split(), *width, *"--train-iters 2 --skip-train".split()]
    argv += ["--load", str(tmp_path / "two" / "saved")]
    _, saved = pretrain(argv, tmp_path / "again")
    assert set(full) == set(cut) == set(saved)
    for name, tensor in full.items():
        assert torch.equal(tensor, cut[name]) and torch.equal(tensor, saved[name]), name


def test_dense_transformers_checkpoint_can_be_upcycled(tmp_path):
    pytest.importorskip("transformers")
    make("qwen2").save_pretrained(tmp_path / "theirs", safe_serialization=True)
    of_dense = ("--num-layers", "--ffn-hidden-size")  # as config.json has them
    argv = [
        *(word for before, word in zip(("", *SHAPE), SHAPE) if word not in of_dense and before not in of_dense),
        "--mock-data",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        str(VOCAB),
        "--no-use-tokenizer-model-from-checkpoint-args",
        "--train-iters",
        "2",
        "--skip-train",
        "--load",
        str(tmp_path / "theirs"),
        "--use-checkpoint-args",
        "--metrics-file",
        "m.jsonl",
    ]
    losses = []
    for flags in ([], [*EXPERTS.split(), "--moe-use-upcycling", "--save", "saved"]):
        (tmp_path / "m.jsonl").unlink(missing_ok=True)
        done = run([*argv, *flags], tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append(validation(read_metrics(tmp_path / "m.jsonl")))
    assert (tmp_path / "saved" / "iter_0000000").is_dir()
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_upcycled_training_starts_at_iteration_1_and_resumes(dense, tmp_path):
    source, _, _ = dense(GATED)
    model = [*SHAPE, *MOCK, *f"{GATED} {EXPERTS} --metrics-file m.jsonl --export-weights w.safetensors".split()]
    start = [*model, "--moe-use-upcycling", "--load", source, "--save", "saved", "--train-iters", "3"]
    straight = run(start, tmp_path)
    assert straight.returncode == 0, straight.stderr
    assert "is saved to saved" in straight.stdout + straight.stderr
    assert [
        record["iteration"]
        for record in read_metrics(tmp_path / "m.jsonl")
        if "grad_norm" in record or "grad norm" in record
    ] == [1, 2, 3]
    weights = load_file(tmp_path / "w.safetensors")
    # from the model that was saved before the first step
    again = run([*model, "--load", "saved", "--ckpt-step", "0", "--train-iters", "3"], tmp_path)
    assert again.returncode == 0, again.stderr
    for name, tensor in load_file(tmp_path / "w.safetensors").items():
        assert torch.equal(tensor, weights[name]), name
    refused = run(start, tmp_path)
    assert refused.returncode == 2 and "has a checkpoint already" in refused.stderr
    resumed = run([*start[:-1], "4", "--auto-resume", "--override-opt-param-scheduler"], tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "at iteration 3" in resumed.stdout + resumed.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{SQUARED} {EXPERTS}", "--squared-relu"),
        (f"{GATED} {EXPERTS} --num-layers 3", "--num-layers"),
        (
            f"{GATED} {EXPERTS} --hybrid-layer-pattern=*E",
            "as --hybrid-layer-pattern its layers are *-*-, and those of this run *-: layer 2 (from 0) is *",
        ),
        (f"{GATED} {EXPERTS} --rotary-base 500000", "(rotary_base): 10000 in the checkpoint, 500000 here"),
        (f"{GATED} {EXPERTS} --qk-layernorm", "(qk_layernorm): False in the checkpoint, True here"),
        (f"{TIED} {EXPERTS}", "output_layer.weight of the checkpoint is not in this model"),
    ],
)
def test_mismatched_dense_model_is_refused(flags, message, dense, tmp_path):
    source, _, _ = dense(GATED)
    argv = [*SHAPE, *MOCK, *flags.split(), *"--train-iters 2 --moe-use-upcycling --save saved --load".split(), source]
    refused = run(argv, tmp_path)
    assert refused.returncode == 2 and message in refused.stderr, refused.stderr
    assert not list((tmp_path / "saved").glob("iter_*"))


def test_upcycling_a_moe_checkpoint_or_a_missing_folder_is_refused(dense, tmp_path):
    source, _, _ = dense(GATED)
    upcycle(source, f"{GATED} {EXPERTS}", tmp_path)
    argv = [*SHAPE, *MOCK, *f"{GATED} {EXPERTS} --train-iters 2 --moe-use-upcycling --save other".split()]
    refused = run([*argv, "--load", "saved"], tmp_path)
    assert refused.returncode == 2 and "has experts already" in refused.stderr
    refused = run([*argv, "--load", "nowhere"], tmp_path)
    assert refused.returncode == 2 and "nowhere" in refused.stderr


FORM = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "swiglu": True,
    "squared_relu": False,
    "ffn_hidden_size": 12,
    "moe_ffn_hidden_size": 6,
    "seed": 5,
    **{split.width_shares: None for split in SPLITS},
    "moe_upcycling_expert_init": "dense",
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "init_method_xavier_uniform": False,
    "init_method_std": 0.1,
}
LAYERS = {
    "num_experts": 4,
    "num_layers": 2,
    "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "add_bias_linear": False,
    "moe_router_enable_expert_bias": False,
    "moe_router_load_balancing_type": "aux_loss",
    "untie_embeddings_and_output_weights": True,
}


@pytest.mark.parametrize(
    ("flags", "root"), [({}, 3), ({"swiglu": False}, 2), ({"swiglu": False, "squared_relu": True}, 3)]
)
def test_granularity_scale_is_split_over_the_weights_of_an_expert(flags, root):
    """Three factors for a gated expert (gate, up, down) and for squared ReLU (up squared, down), two otherwise."""
    form = UpcyclingSpec.from_args(FORM | flags)
    assert (form.how.fc1, form.how.fc2) == pytest.approx([2 ** (1 / root)] * 2)


def test_upcycled_fc2_bias_is_divided_by_the_sum_of_router_weights():
    full = torch.arange(4.0)
    assert torch.equal(UpcyclingSpec.from_args(FORM).make_fc2_bias(0, full), full)  # cut in two, weights add up to 1
    assert (
        UpcyclingSpec.from_args(FORM | {"use_mup": True, "hidden_size": 64, "mup_base_hidden_size": 16}).how.std
        == FORM["init_method_std"] / 2
    )
    early = UpcyclingSpec.from_args(FORM | {"moe_router_pre_softmax": True})
    torch.testing.assert_close(early.make_fc2_bias(0, full), 2.0 * full)  # 2 of 4 equal weights are chosen
    # scores of a sigmoid are divided by their sum, whatever the softmax would do
    assert UpcyclingSpec.from_args(
        FORM | {"moe_router_pre_softmax": True, "moe_router_score_function": "sigmoid"}
    ) == UpcyclingSpec.from_args(FORM)


def test_upcycled_router_follows_seed_and_init_method():
    router = UpcyclingSpec.from_args(FORM).router("router", 64)
    assert torch.equal(router, UpcyclingSpec.from_args(FORM).router("router", 64)) and not torch.equal(
        router, UpcyclingSpec.from_args(FORM | {"seed": 6}).router("router", 64)
    )
    uniform = UpcyclingSpec.from_args(FORM | {"init_method_xavier_uniform": True, "init_method_std": 1.0}).router(
        "router", 64
    )
    bound = (6 / (2 + 64)) ** 0.5  # of two virtual groups
    assert 0.9 * bound < uniform.abs().max() <= bound


def upcycled_names(*names, **flags):
    """Names of the tensors that dense tensors of shape [24, 8] are upcycled to."""
    dense = {name: LogicalTensor(name, None, name, (), (24, 8), torch.float32, []) for name in names}
    return {recipe.name for recipe in tensor_recipes(dense, UpcyclingSpec.from_args(FORM), LAYERS | flags)}


def test_mtp_layer_is_upcycled_like_the_last_layer():
    network = "mtp.layers.0.mtp_model_layer.mlp."
    assert f"{network}experts.local_experts.3.linear_fc1.weight" in upcycled_names(f"{network}linear_fc1.weight")
    assert upcycled_names(f"{network}linear_fc1.weight", moe_layer_freq=[1, 0]) == {f"{network}linear_fc1.weight"}
    hybrid = {"hybrid_layer_pattern": "*-/*-*E", "moe_layer_freq": [0, 0]}
    for number, is_routed in ((1, False), (3, True)):
        name = f"mtp.layers.0.mtp_model_layer.layers.{number}.mlp.linear_fc1.weight"
        assert (name not in upcycled_names(name, **hybrid)) == is_routed


def test_a_shared_expert_has_a_gate_only_when_enabled():
    network = "decoder.layers.0.mlp."
    alone = upcycled_names(f"{network}linear_fc1.weight", moe_shared_expert_intermediate_size=12)
    assert f"{network}shared_experts.linear_fc1.weight" in alone and f"{network}shared_experts.gate_weight" not in alone
    gated = upcycled_names(
        f"{network}linear_fc1.weight", moe_shared_expert_intermediate_size=12, moe_shared_expert_gate=True
    )
    assert gated - alone == {f"{network}shared_experts.gate_weight"}

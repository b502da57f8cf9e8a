"""muP in the optimizer: which learning rates and epsilons are scaled, and by which factor; the step against torch.optim."""

import pytest
import torch
from toy import Toy, build_training, compute_loss, train_step

import arguments
from arguments.optimizer import OptimizerArgs
from moe_trainer.model.build import build_chunks
from moe_trainer.optim.param_groups import ParamGroup, adam_eps, get_param_group
from moe_trainer.optim.schedules import LrSchedule
from moe_trainer.parallel.state import ParallelState

MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --global-batch-size 2 --train-iters 1 --lr 1e-3 --transformer-impl local --mock-data --eval-iters 0 "
    "--tokenizer-type NullTokenizer --vocab-size 95 --swiglu --num-experts 4 --moe-router-topk 2 --untie-embeddings-and-output-weights "
    "--use-mup --mup-base-hidden-size 8"
).split()
PLAIN = [*MODEL, "--position-embedding-type", "learned_absolute"]
DELTA = [
    *MODEL,
    *(
        "--position-embedding-type rope --disable-bias-linear --mtp-num-layers 1 --experimental-attention-variant gdn --linear-attention-freq 2 "
        "--linear-key-head-dim 8 --linear-value-head-dim 8 --linear-num-key-heads 4 --linear-num-value-heads 4"
    ).split(),
]
EMBEDDINGS = {"embedding.word_embeddings.weight", "embedding.position_embeddings.weight", "output_layer.weight"}


def lr_multipliers(argv, *more):
    """lr_mult of every parameter."""
    args = arguments.parse_args([*argv, *more], 1)
    chunks = build_chunks(args, ParallelState.single(), 96, "meta")
    return {
        param.info.names[0]: (param.dim() - param.info.stacked, get_param_group(param, args.optimizer, False).lr_mult)
        for chunk in chunks
        for param in chunk.parameters()
    }


@pytest.mark.parametrize("argv", [PLAIN, DELTA], ids=["learned positions and biases", "linear attention and MTP"])
@pytest.mark.parametrize(
    ("optimizer", "embeddings", "vectors", "matrices", "convolution"),
    [
        ("adam", 1, 1, 0.25, 0.25),
        ("lion", 1, 1, 0.25, 0.25),
        ("sgd", 4, 4, 1, 1),
        ("muon", 1, 1, 1, 0.25),
    ],
)
def test_which_learning_rates_are_scaled(argv, optimizer, embeddings, vectors, matrices, convolution):
    for name, (ndim, mult) in lr_multipliers(argv, "--optimizer", optimizer).items():
        expected = embeddings if name in EMBEDDINGS else {1: vectors, 2: matrices, 3: convolution}[ndim]
        assert mult == expected, name


def test_decoupled_learning_rate_is_not_scaled():
    found = lr_multipliers(PLAIN, "--optimizer", "sgd", "--decoupled-lr", "1e-2")
    assert {name: mult for name, (_, mult) in found.items() if name in EMBEDDINGS} == {
        "embedding.word_embeddings.weight": 1,
        "output_layer.weight": 1,
        "embedding.position_embeddings.weight": 4,
    }
    assert {mult for name, (ndim, mult) in found.items() if ndim == 2 and name not in EMBEDDINGS} == {1}


def test_no_learning_rate_is_scaled_without_mup():
    plain = [word for word in PLAIN if word not in ("--use-mup", "--mup-base-hidden-size", "8")]
    assert {mult for _, mult in lr_multipliers(plain).values()} == {1.0}


def test_epsilon_is_scaled():
    group = ParamGroup(1.0, 0.25, False, False)
    assert adam_eps(OptimizerArgs(adam_eps=1e-3), group) == 2.5e-4


def test_lr_range_is_scaled_but_not_the_warmup_start():
    schedule = LrSchedule("cosine", 1.0, 0.1, 100, 20, init_lr=0.5)
    half = LrSchedule("cosine", 0.25, 0.025, 100, 20, init_lr=0.25)
    assert schedule.lr(0, 0.25) == 0.5 == schedule.lr(0)
    assert [schedule.lr(samples, 0.25) for samples in (20, 60, 100, 200)] == [
        half.lr(samples) for samples in (20, 60, 100, 200)
    ]


@pytest.mark.parametrize(
    "more",
    [{}, {"optimizer_cpu_offload": True}, {"use_precision_aware_optimizer": True}],
    ids=["plain", "offloaded", "aware"],
)
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_mup_step_equals_torch_param_groups(kind, more):
    ours, plain = Toy(), Toy()
    if kind == "sgd" and "use_precision_aware_optimizer" in more:
        pytest.skip("only Adam's states have formats")
    grads, optimizer = build_training(ours, optimizer=kind, mup_width_mult=4.0, adam_eps=0.05, **more)
    embeddings = ("word_embeddings.weight", "output_layer.weight")
    groups = []
    for name, param in plain.named_parameters():
        matrix = param.dim() > 1 and name not in (*embeddings, "expert_bias")
        scaled = matrix if kind == "adam" else not matrix
        decay = 0.1 if matrix or name in embeddings else 0.0
        # the second value is what a warmup from another start than zero leaves of the scaled rate
        groups.append(
            {"params": [param], "lr": 0.03 if scaled else 0.05, "weight_decay": decay}
            | ({"eps": 0.05 / 4 if scaled else 0.05} if kind == "adam" else {})
        )
    reference = torch.optim.AdamW(groups) if kind == "adam" else torch.optim.SGD(groups, momentum=0.9)
    for step in range(4):
        train_step(ours, grads, optimizer, [step], lr=0.05, scaled_lr=0.03)
        reference.zero_grad()
        compute_loss(plain, step).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        for param in plain.parameters():
            param.grad.mul_(min(1.0, 1.0 / (norm.item() + 1e-6)))
        reference.step()
        for (name, a), b in zip(ours.named_parameters(), plain.parameters()):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7, msg=name)
    described = {
        (group["wd_mult"], group["lr_mult"]): group.get("eps") for group in optimizer.scalars()["param_groups"]
    }
    if kind == "adam":
        assert described == {(1.0, 1.0): 0.05, (1.0, 0.25): 0.0125, (0.0, 1.0): 0.05}
    else:
        assert described.keys() == {(1.0, 1.0), (1.0, 4.0), (0.0, 4.0)}

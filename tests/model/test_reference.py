"""The full model against the plain transformer of tests/reference.py, in fp64: loss, balance and every gradient."""

import pytest
import torch
from reference import transformer

import arguments
from moe_trainer.model.build import build_chunks
from moe_trainer.moe.balancing import start_iteration
from moe_trainer.parallel.params import unique_params
from moe_trainer.parallel.state import ParallelState

COMMON = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --ffn-hidden-size 12 "
    "--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --init-method-std 0.3 "
    "--untie-embeddings-and-output-weights --num-experts 4 --moe-router-topk 2 --seq-length 10 --max-position-embeddings 10 "
    "--micro-batch-size 2 --global-batch-size 4 --attention-dropout 0 --hidden-dropout 0 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 31 --train-iters 1 --lr 1e-3 --transformer-impl local --eval-iters 0"
).split()
LATENT = "--multi-latent-attention --kv-lora-rank 8 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 5 --rope-type rope --no-rope-fusion "
KINDS = {
    "aux loss": "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1",
    "several losses, z-loss, drops": "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.2 "
    "--moe-z-loss-coeff 0.01 --moe-expert-capacity-factor 1.0",
    "qk norm, dense layer first, tied head": "--qk-layernorm --moe-layer-freq ([0]*1+[1]*1) --moe-aux-loss-coeff 0.1",
    "pre-softmax, scaled, padded capacity, by position": "--moe-router-pre-softmax --moe-router-topk-scaling-factor 1.5 "
    "--moe-aux-loss-coeff 0.1 --moe-expert-capacity-factor 0.8 --moe-pad-expert-input-to-capacity --moe-token-drop-policy position",
    "latent attention, groups, expert bias": LATENT
    + "--q-lora-rank 12 --qk-layernorm --num-experts 8 --moe-router-num-groups 4 "
    "--moe-router-group-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 --moe-shared-expert-intermediate-size 8",
    "latent attention without a latent of the queries": LATENT + "--moe-aux-loss-coeff 0.1",
    "two further tokens": "--mtp-num-layers 2 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01",
    "latent attention, dense first, a further token, tied head": LATENT
    + "--qk-layernorm --moe-layer-freq ([0]*1+[1]*1) "
    "--mtp-num-layers 1 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 8 "
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1",
    "projected experts, shared": "--moe-latent-size 6 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-aux-loss-coeff 0.1 "
    "--moe-shared-expert-intermediate-size 8",
    "experts of slices, gated shared": "--G-I 2 --G-O 2 --R-I 1 --R-O 2 --num-experts 8 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 0.1 --moe-shared-expert-intermediate-size 12 --moe-shared-expert-gate --mtp-num-layers 1",
    "sigmoid, shared expert": "--moe-router-score-function sigmoid --moe-aux-loss-coeff 0.1 --moe-shared-expert-intermediate-size 8",
}


def command_line(kind: str) -> list[str]:
    without = {"--group-query-attention"} if "latent" in kind else set()
    without |= {"--untie-embeddings-and-output-weights"} if "tied" in kind else set()
    return [word for word in COMMON if word not in without] + KINDS[kind].split()


@pytest.mark.parametrize("kind", KINDS)
def test_model_equals_plain_transformer(kind):
    args = arguments.parse_args(command_line(kind), world_size=1)
    (model,) = build_chunks(args, ParallelState.single(), 32)
    model = model.double()
    params = {}
    for param in unique_params(model.parameters()):
        for name, piece in zip(param.info.names, param.detach().unbind(0) if param.info.stacked else (param.detach(),)):
            params[name] = piece.clone().requires_grad_()
    biases = {}
    for layer in model.moe_layers():
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.uniform_(-0.2, 0.2)
            name = next(iter(layer.router.weight.info.names)).removesuffix(".router.weight")
            biases[name] = layer.router.expert_bias.double()
    start_iteration([model])
    earlier = {}
    for _ in range(2):
        tokens, labels = torch.randint(0, 32, (2, 2, 10))
        mask = (torch.rand(2, 10) < 0.8).double()
        positions = torch.arange(10).expand(2, -1)
        loss = model(tokens, positions, labels, mask, grad_scale=0.5)
        (0.5 * loss.mean()).backward()
        expected, balance = transformer(tokens, labels, params, args, earlier, biases, mask)
        (0.5 * (expected.mean() + balance.total)).backward()
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)  # the loss is fp32
    for param in unique_params(model.parameters()):
        for name, grad in zip(param.info.names, param.grad.unbind(0) if param.info.stacked else (param.grad,)):
            want = params[name].grad
            assert (grad - want).norm() <= 1e-6 * want.norm() + 1e-12, name

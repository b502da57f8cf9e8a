"""A toy model with every kind of parameter, and what trains it; shared by the tests of optim and pipeline."""

import torch
from torch import nn

from arguments import Arguments
from arguments.data import DataArgs
from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from arguments.optimizer import OptimizerArgs
from arguments.output import OutputArgs
from arguments.parallel import ParallelArgs
from arguments.precision import PrecisionArgs
from arguments.training import TrainingArgs
from moe_trainer.optim.buckets import plan_layouts
from moe_trainer.optim.grad_buffer import DataParallelGrads
from moe_trainer.optim.optimizer import Optimizer
from moe_trainer.optim.param_groups import is_matrix
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import ParallelState


class Toy(nn.Module):
    """Embedding, two linears with bias, a norm weight and stacked experts; all sizes are odd."""

    def __init__(self, dtype=torch.float32, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.word_embeddings = nn.Embedding(37, 19)
        self.first = nn.Linear(19, 23)
        self.norm = nn.LayerNorm(23)
        self.experts = nn.Parameter(torch.empty(3, 23, 5))
        self.expert_bias = nn.Parameter(torch.empty(3, 5))
        self.output_layer = nn.Linear(5, 37, bias=False)
        for name, param in self.named_parameters():
            param.data = torch.randn(param.shape, generator=generator).to(dtype)
            if name.startswith("expert"):
                names = tuple(f"{name}.{e}" for e in range(3))
                param.info = ParamInfo(names, kind="expert", stacked=True)
            else:
                param.info = ParamInfo((name,))

    def forward(self, tokens):
        x = self.norm(torch.tanh(self.first(self.word_embeddings(tokens))))
        x = torch.einsum("bh,ehf->bf", x, self.experts) + self.expert_bias.sum(0)
        return self.output_layer(x).float()


class ToyChunk(Toy):
    """The toy as a model chunk that can be checkpointed; without buffers and RNG streams."""

    def named_state_buffers(self):
        return iter(())

    def named_scaling_state(self):
        return iter(())

    def generators(self):
        return {}


def batch(seed, batch_size=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 37, (batch_size,), generator=generator), torch.randint(
        0, 37, (batch_size,), generator=generator
    )


def compute_loss(model, seed, batch_size=8):
    tokens, labels = batch(seed, batch_size)
    return nn.functional.cross_entropy(model(tokens), labels)


def make_arguments(parallel, precision, *, check_for_nan=True, count_zeros=False, **optimizer):
    """Arguments of an optimizer; no rule has checked them."""
    return Arguments(
        ModelArgs(),
        MoEArgs(),
        parallel,
        TrainingArgs(check_for_nan_in_loss_and_grad=check_for_nan),
        OptimizerArgs(**optimizer),
        precision,
        DataArgs(),
        OutputArgs(log_num_zeros_in_grad=count_zeros),
    )


def build_training(
    model,
    *,
    parallel=None,
    precision=None,
    ps=None,
    per_token_loss=False,
    check_for_nan=True,
    count_zeros=False,
    library=None,
    **optimizer,
):
    """Return (grads, optimizer) of a model; sections that are not given have their defaults."""
    parallel, precision, ps = parallel or ParallelArgs(), precision or PrecisionArgs(), ps or ParallelState.single()
    args = make_arguments(parallel, precision, check_for_nan=check_for_nan, count_zeros=count_zeros, **optimizer)
    layouts = plan_layouts(model.parameters(), ps, parallel, lambda param: is_matrix(param, args.optimizer))
    main_grads = args.optimizer.main_grads_dtype
    grads = DataParallelGrads(
        layouts, ps, parallel, precision, per_token_loss=per_token_loss, main_grads=main_grads, library=library
    )
    return grads, Optimizer([model], grads, args, ps, library=library)


def train_step(model, grads, optimizer, seeds, lr=0.1, weight_decay=0.1, decoupled_lr=None, **rates):
    optimizer.zero_grad()
    for index, seed in enumerate(seeds):
        loss = compute_loss(model, seed) * (optimizer.loss_scale / len(seeds))
        if index < len(seeds) - 1:
            with grads.accumulate():
                loss.backward()
        else:
            loss.backward()
    grads.finish()
    return optimizer.step(lr, weight_decay, decoupled_lr, **rates)

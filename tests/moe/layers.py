"""Small MoE layers for tests: sections from keyword arguments, layers in fp64 with weights large enough to matter."""

from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import torch

from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from arguments.parallel import ParallelArgs
from arguments.training import TrainingArgs
from moe_trainer.layers.layer_factory import LOCAL
from moe_trainer.model.build import attach_dispatcher
from moe_trainer.moe.balancing import MoeMetrics, collect_moe_metrics
from moe_trainer.moe.dispatch.select import build_dispatcher
from moe_trainer.moe.layer import MoELayer
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import ParallelState

HIDDEN, FFN, EXPERTS = 16, 24, 8


def sections(**changes) -> SimpleNamespace:
    """model, moe and training sections of a small layer; every change goes to the section that has the field."""
    made = SimpleNamespace(
        model=ModelArgs(num_layers=2, hidden_size=HIDDEN, ffn_hidden_size=FFN, swiglu=True, add_bias_linear=False),
        moe=MoEArgs(num_experts=EXPERTS),
        training=TrainingArgs(),
        parallel=ParallelArgs(),
    )
    for name, value in changes.items():
        section = next(key for key, owner in vars(made).items() if name in {f.name for f in fields(owner)})
        setattr(made, section, replace(getattr(made, section), **{name: value}))
    return made


def build_layer(args, ps=None, dtype=torch.float64, layer_number=1, seed=0) -> MoELayer:
    """A layer with random weights and, if it has one, a random expert bias."""
    ps = ps or ParallelState.single()
    layer = MoELayer(
        args.model,
        args.moe,
        ps,
        name=f"decoder.layers.{layer_number - 1}.mlp",
        layer_number=layer_number,
        factory=LOCAL,
        sequence_parallel=args.parallel.sequence_parallel,
        per_token_loss=args.training.calculate_per_token_loss,
    )
    attach_dispatcher([layer], build_dispatcher(args.moe, ps))
    layer = layer.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.5)
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.copy_(torch.randn(args.moe.num_experts, generator=generator) * 0.2)
    return layer


def by_name(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the parameters under their global names, with gradients on."""
    named = {}
    for param in layer.parameters():
        pieces = param.detach().unbind(0) if param.info.stacked else (param.detach(),)
        for name, piece in zip(param.info.names, pieces):
            named[name] = piece.clone().requires_grad_()
    return named


def cut(full: torch.Tensor, info: ParamInfo) -> torch.Tensor:
    """Return a rank's shard of a named tensor: its shard of every part, concatenated."""
    if info.shard_count == 1:
        return full
    parts = full.chunk(info.parts, info.sharded_dim)
    return torch.cat(
        [part.chunk(info.shard_count, info.sharded_dim)[info.shard_rank] for part in parts], info.sharded_dim
    )


def join(pieces: list[torch.Tensor], info: ParamInfo) -> torch.Tensor:
    """Join the shards of all ranks, in rank order."""
    parts = zip(*(piece.chunk(info.parts, info.sharded_dim) for piece in pieces))
    return torch.cat([piece for part in parts for piece in part], info.sharded_dim)


def build_shard(args, ps: ParallelState, dtype=torch.float64, **which) -> MoELayer:
    """The layer of one rank, with its part of the weights that one process would have."""
    full, layer = build_layer(args, dtype=dtype, **which), build_layer(args, ps, dtype=dtype, **which)
    named = by_name(full)
    with torch.no_grad():
        for param in layer.parameters():
            pieces = param.unbind(0) if param.info.stacked else (param,)
            for name, piece in zip(param.info.names, pieces, strict=True):
                piece.copy_(cut(named[name], param.info))
        if full.router.expert_bias is not None:
            layer.router.expert_bias.copy_(full.router.expert_bias)
    return layer


@dataclass
class RankGrads:
    """The gradients of one rank by global name, with what is needed to put the ranks' together."""

    tp: int
    etp: int
    grads: dict[str, tuple[ParamInfo, torch.Tensor]]

    @staticmethod
    def of(layer: MoELayer, ps: ParallelState) -> "RankGrads":
        found = {}
        for param in layer.parameters():
            pieces = param.grad.unbind(0) if param.info.stacked else (param.grad,)
            found.update({name: (param.info, piece.clone()) for name, piece in zip(param.info.names, pieces)})
        return RankGrads(ps.tp.rank, ps.etp.rank, found)


def total_grads(ranks: list[RankGrads]) -> dict[str, torch.Tensor]:
    """Gradients summed over data, as ParamInfo has them add up over tp (etp for experts)."""
    sums, infos = {}, {}
    for rank in ranks:
        for name, (info, grad) in rank.grads.items():
            shard = rank.etp if info.kind == "expert" else rank.tp
            of_name = sums.setdefault(name, {})
            of_name[shard] = of_name[shard] + grad if shard in of_name else grad
            infos[name] = info
    totals = {}
    for name, of_shard in sums.items():
        info, pieces = infos[name], [of_shard[shard] for shard in sorted(of_shard)]
        if info.shard_count > 1:
            assert len(pieces) == info.shard_count
            totals[name] = join(pieces, info)
        elif info.is_grad_partial:
            totals[name] = sum(pieces)
        else:
            for piece in pieces[1:]:
                torch.testing.assert_close(
                    piece, pieces[0], msg=f"{name} is neither cut nor partial, but differs between ranks"
                )
            totals[name] = pieces[0]
    return totals


class Chunk:
    """The part of a model chunk that balancing.py reads."""

    def __init__(self, *layers: MoELayer):
        self.layers = layers

    def moe_layers(self) -> list[MoELayer]:
        return list(self.layers)


def collect_metrics(args, layers: list[MoELayer], num_microbatches: int, ps: ParallelState | None = None) -> MoeMetrics:
    """What the loop logs of these layers; two layers in the model."""
    return collect_moe_metrics([Chunk(*layers)], ps or ParallelState.single(), num_microbatches, args.moe, 2)

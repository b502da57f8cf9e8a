"""A model of named tensors and synthetic gradients, sharded over ranks by a layout.

Every kind of parameter occurs: cut over tp (with parts), replicated, partial over tp, tied over stages, stacked experts cut over etp,
partial over etp. The gradients are multiples of 1/64, so that their sums are exact in any order and a rank's share of a sum
can be split off without rounding. `one_process` is the full model on one rank with the full gradients.
"""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from toy import build_training

from arguments.parallel import ParallelArgs
from moe_trainer.optim.finalize import finalize_grads
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.rng import named_generator
from moe_trainer.parallel.state import ParallelState

EXPERTS = 4
PLAIN = {}
ZERO1 = {"use_distributed_optimizer": True}
OVERLAPPED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_bucket_size": 150,
}
EAGER = {"overlap_grad_reduce": True, "ddp_bucket_size": 150}
MODES = {"plain": PLAIN, "eager": EAGER, "zero1": ZERO1, "overlapped": OVERLAPPED}
# world size, degrees, virtual stages
LAYOUTS = {
    "tp2": (2, {"tp": 2}, 1),
    "pp2_tied": (2, {"pp": 2}, 1),
    "pp2_vpp2": (2, {"pp": 2}, 2),
    "cp2_dp2": (4, {"cp": 2}, 1),
    "tp2_dp2_ep2_over_dp": (4, {"tp": 2, "etp": 2, "ep": 2}, 1),
    "tp2_dp2_ep4_above_dp": (4, {"tp": 2, "ep": 4}, 1),
    "tp2_dp2_ep1_etp1": (4, {"tp": 2}, 1),
    "tp1_etp2_ep1": (4, {"etp": 2}, 1),
    "tp2_pp2_vpp2_ep2": (4, {"tp": 2, "pp": 2, "ep": 2}, 2),
    "tp1_etp2_ep2": (4, {"etp": 2, "ep": 2}, 1),
}
MICROBATCHES = 2


@dataclass(frozen=True)
class Spec:
    """One tensor of the full model. stages: which of `stage_count` virtual stages hold it, as fractions of the depth."""

    name: str
    shape: tuple[int, ...]
    depths: tuple[float, ...]
    kind: str = "dense"
    dim: int | None = None
    parts: int = 1
    row_blocks: tuple[int, ...] = ()
    partial: bool = False


SPECS = (
    Spec("embedding.word_embeddings.weight", (36, 10), (0.0, 0.99), dim=0),
    *(
        spec
        for layer in range(4)
        for depth in ((layer + 0.5) / 4,)
        for spec in (
            Spec(f"layers.{layer}.norm.weight", (10,), (depth,), partial=True),
            # three query groups: a cut over two ranks goes through one
            Spec(f"layers.{layer}.qkv.weight", (24, 10), (depth,), dim=0, row_blocks=(4, 2, 2)),
            Spec(f"layers.{layer}.proj.weight", (10, 8), (depth,), dim=1),
            Spec(f"layers.{layer}.proj.bias", (10,), (depth,)),
            Spec(f"layers.{layer}.router.weight", (EXPERTS, 10), (depth,), partial=True),
            Spec(f"layers.{layer}.experts.fc1.weight", (12, 10), (depth,), kind="expert", dim=0, parts=2),
            Spec(f"layers.{layer}.experts.fc2.weight", (10, 6), (depth,), kind="expert", dim=1),
            Spec(f"layers.{layer}.experts.fc2.bias", (10,), (depth,), kind="expert", partial=True),
        )
    ),
    Spec("final.norm.weight", (10,), (0.99,), partial=True),
    Spec("output_layer.weight", (36, 10), (0.99,), dim=0),
)


@functools.cache
def values(*name: str | int, shape: tuple[int, ...]) -> Tensor:
    """Multiples of 1/64 below 1/4; one in eight is zero. Not to be written to: the next caller gets the same tensor."""
    full_tensor = torch.randint(-16, 17, shape, generator=named_generator(3, *name))
    return full_tensor.masked_fill_(torch.rand(shape, generator=named_generator(4, *name)) < 0.125, 0).float() / 64


def cut(full: Tensor, dim: int | None, rank: int, count: int, parts: int) -> Tensor:
    """Return this rank's shard of every part of a dimension."""
    if dim is None or count == 1:
        return full
    return torch.cat([part.chunk(count, dim)[rank] for part in full.chunk(parts, dim)], dim)


def full_names(spec: Spec) -> tuple[str, ...]:
    return tuple(f"{spec.name}.{e}" for e in range(EXPERTS)) if spec.kind == "expert" else (spec.name,)


def initial(name: str, shape: tuple[int, ...]) -> Tensor:
    return values("init", name, shape=shape).clone()


def gradient_share(name: str, shape: tuple[int, ...], step: int, microbatch: int, source: int) -> Tensor:
    """Return the gradient contribution of one source: a rank, or a stage and a rank, with its own data."""
    return values("grad", name, step, microbatch, source, shape=shape)


class ShardedChunk(nn.Module):
    """One chunk of one rank: its pieces of the tensors of a virtual stage."""

    def __init__(self, ps: ParallelState, stage: int, stage_count: int, dtype: torch.dtype):
        super().__init__()
        self.held: list[tuple[Spec, nn.Parameter]] = []
        for spec in SPECS:
            stages = sorted({int(depth * stage_count) for depth in spec.depths})
            if stage not in stages:
                continue
            group = ps.etp if spec.kind == "expert" else ps.tp
            names, stacked = full_names(spec), spec.kind == "expert"
            if stacked:
                local = EXPERTS // ps.ep.size
                names = names[ps.ep.rank * local : (ps.ep.rank + 1) * local]
            full = [cut(initial(name, spec.shape), spec.dim, group.rank, group.size, spec.parts) for name in names]
            param = nn.Parameter((torch.stack(full) if stacked else full[0]).to(dtype))
            is_cut = spec.dim is not None
            param.info = ParamInfo(
                names,
                spec.kind,
                spec.dim,
                group.rank if is_cut else 0,
                group.size if is_cut else 1,
                parts=spec.parts,
                row_blocks=spec.row_blocks,
                is_grad_partial=spec.partial and group.size > 1,
                tied=len(stages) > 1,
                is_replica=stage > stages[0],
                stacked=stacked,
            )
            self.register_parameter(f"p{len(self.held)}", param)
            self.held.append((spec, param))
        self.stage = stage
        self.stage_count = stage_count

    def surrogate(self, ps: ParallelState, step: int, microbatch: int, scale: float) -> Tensor:
        """A loss whose gradient is this rank's share of the whole one, times `scale`."""
        total = torch.zeros(())
        for spec, param in self.held:
            pieces = [self._share(ps, spec, name, step, microbatch) for name in param.info.names]
            grad = torch.stack(pieces) if param.info.stacked else pieces[0]
            total = total + (param.float() * grad * scale).sum()
        return total

    def _share(self, ps: ParallelState, spec: Spec, name: str, step: int, microbatch: int) -> Tensor:
        group, data = (ps.etp, ps.edp) if spec.kind == "expert" else (ps.tp, ps.dp_cp)
        stages = sorted({int(depth * self.stage_count) for depth in spec.depths})
        # a source of the whole gradient: (data rank, which of the holding stages, member of the group where it is partial)
        member = group.rank if spec.partial else 0
        source = (data.rank * len(spec.depths) + stages.index(self.stage)) * 8 + member
        mine = gradient_share(name, spec.shape, step, microbatch, source)
        if len(stages) < len(spec.depths):  # one stage does what two may do
            mine = mine + gradient_share(name, spec.shape, step, microbatch, source + 8)
        if spec.partial:  # every member of the larger layouts is a source: the last one takes the rest of eight
            for rest in range(group.size, 8) if group.rank == group.size - 1 else ():
                mine = mine + gradient_share(name, spec.shape, step, microbatch, source - member + rest)
        return cut(mine, spec.dim, group.rank, group.size, spec.parts)


class FullModel(nn.Module):
    """The full model on one rank."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.held: list[tuple[Spec, str, nn.Parameter]] = []
        for spec in SPECS:
            for name in full_names(spec):
                param = nn.Parameter(initial(name, spec.shape).to(dtype))
                param.info = ParamInfo((name,), spec.kind, row_blocks=spec.row_blocks)
                self.register_parameter(f"p{len(self.held)}", param)
                self.held.append((spec, name, param))

    def surrogate(self, dp_cp: int, edp: int, step: int, microbatch: int, scale: float) -> Tensor:
        """A loss whose gradient is the sum of all shares over all ranks, divided by dp_cp."""
        total = torch.zeros(())
        for spec, name, param in self.held:
            data = edp if spec.kind == "expert" else dp_cp
            for source in range(data * len(spec.depths)):
                for member in range(8) if spec.partial else (0,):
                    grad = gradient_share(name, spec.shape, step, microbatch, source * 8 + member)
                    total = total + (param.float() * grad * (scale / dp_cp)).sum()
        return total


@functools.cache
def one_process(dp_cp: int, edp: int, steps: int, dtype=torch.float32, **optimizer):
    """Returns (outcomes, norm of the parameters before each step, {name: weight}). Asked for before ranks are forked it is theirs too."""
    model = FullModel(dtype)
    grads, built = build_training(model, count_zeros=True, **optimizer)
    outcomes, norms = [], []
    for step in range(steps):
        norms.append(built.params_norm())
        built.zero_grad()
        for microbatch in range(MICROBATCHES):
            model.surrogate(dp_cp, edp, step, microbatch, built.loss_scale).backward()
        grads.finish()
        outcomes.append(built.step(0.05, 0.1))
    return outcomes, norms, {name: param.detach() for _, name, param in model.held}


def train_on_ranks(
    ps: ParallelState, parallel: ParallelArgs, steps: int, dtype=torch.float32, vpp: int = 1, **optimizer
):
    """Train this rank's chunks. Returns (outcomes, norms, chunks, optimizer, grads)."""
    stage_count = ps.pp.size * vpp
    chunks = [ShardedChunk(ps, chunk * ps.pp.size + ps.pp.rank, stage_count, dtype) for chunk in range(vpp)]
    grads, built = build_training(nn.ModuleList(chunks), parallel=parallel, ps=ps, count_zeros=True, **optimizer)
    outcomes, norms = [], []
    for step in range(steps):
        built.wait_params()
        norms.append(built.params_norm())
        built.zero_grad()
        for chunk in reversed(chunks):  # as the pipeline finishes them
            for microbatch in range(MICROBATCHES):
                loss = chunk.surrogate(ps, step, microbatch, built.loss_scale)
                if microbatch < MICROBATCHES - 1:
                    with grads.accumulate():
                        loss.backward()
                else:
                    loss.backward()
        grads.finish()
        finalize_grads(grads, ps)
        outcomes.append(built.step(0.05, 0.1))
    built.wait_params()
    return outcomes, norms, chunks, built, grads


def assert_equal(chunks, ps: ParallelState, weights: dict[str, Tensor], tolerance: float) -> None:
    """Assert that every shard on this rank equals that shard of the full model's weight."""
    for chunk in chunks:
        for spec, param in chunk.held:
            group = ps.etp if spec.kind == "expert" else ps.tp
            for name, piece in zip(param.info.names, param.detach() if param.info.stacked else (param.detach(),)):
                expected = cut(weights[name], spec.dim, group.rank, group.size, spec.parts)
                torch.testing.assert_close(
                    piece, expected, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
                )


def with_flags(parallel: ParallelArgs | None = None, **flags) -> ParallelArgs:
    return replace(parallel or ParallelArgs(), **flags)

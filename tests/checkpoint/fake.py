"""A model and an optimizer that consist of named tensors, with the interface that checkpoint/ uses."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_trainer.model.weights import take_local_shard
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import ParallelState

# the flags that the keys follow from
RECORD = {
    "num_layers": 2,
    "num_experts": 8,
    "moe_layer_freq": 1,
    "swiglu": True,
    "quick_geglu": False,
    "multi_latent_attention": False,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "position_embedding_type": "rope",
    "num_query_groups": 2,
}


def layer_shapes(
    hidden: int = 64, ffn: int = 32, qkv: int = 128, qk_norm: int = 0, experts: int = 8
) -> dict[str, list[int]]:
    """Shapes of one MoE layer; those of experts are stacked."""
    shapes = {
        "input_layernorm.weight": [hidden],
        "self_attention.linear_proj.weight": [hidden, qkv // 2],
        "self_attention.linear_qkv.weight": [qkv, hidden],
        "pre_mlp_layernorm.weight": [hidden],
        "mlp.router.weight": [experts, hidden],
        "mlp.experts.linear_fc1.weight": [experts, 2 * ffn, hidden],
        "mlp.experts.linear_fc2.weight": [experts, hidden, ffn],
    }
    if qk_norm:
        shapes |= {"self_attention.q_layernorm.weight": [qk_norm], "self_attention.k_layernorm.weight": [qk_norm]}
    return shapes


# how tensor parallelism cuts a tensor, by the end of its name: (dimension, parts)
CUTS = {
    "linear_qkv.weight": (0, 1),
    "linear_proj.weight": (1, 1),
    "linear_fc1.weight": (0, 2),
    "linear_fc2.weight": (1, 1),
    "word_embeddings.weight": (0, 1),
    "output_layer.weight": (0, 1),
}


class FakeModel(nn.Module):
    """Two Mixtral layers of the size of the golden case a2_mixtral, unless overridden; of them what a rank of `ps` holds.

    stage: (number, count) of this chunk among all virtual stages; by default that of the pipeline rank.
    tied: no output layer; the last stage has a copy of the embedding. wide: parameters with this in their names are fp32, whatever the dtype.
    """

    def __init__(
        self,
        layers: list[dict[str, list[int]]] | None = None,
        vocab: int = 512,
        hidden: int = 64,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        expert_bias: bool = False,
        ps: ParallelState | None = None,
        stage: tuple[int, int] | None = None,
        tied: bool = False,
        wide: str = "",
    ):
        super().__init__()
        self.ps, self.dtype, self.wide = ps or ParallelState.single(), dtype, wide
        self.table: dict[str, nn.Parameter] = {}
        self.buffer_table: dict[str, Tensor] = {}
        self.streams: dict[str, torch.Generator] = {}
        self._random = torch.Generator().manual_seed(seed)
        layers = layers if layers is not None else [layer_shapes(), layer_shapes()]
        number, count = stage or (self.ps.pp.rank, self.ps.pp.size)
        first, last = number == 0, number == count - 1
        # the full model is drawn, so that any part of it holds the same values
        embedding = self._draw([vocab, hidden])
        if first or (tied and last):
            self._add("embedding.word_embeddings.weight", embedding, tied=tied, is_replica=not first)
        for layer, shapes in enumerate(layers):
            mine = layer * count // len(layers) == number
            for rest, shape in shapes.items():
                value = self._draw(shape)
                if mine:
                    self._add(f"decoder.layers.{layer}.{rest}", value)
            if expert_bias:
                value = self._draw(shapes["mlp.router.weight"][:1])
                if mine:
                    self.buffer_table[f"decoder.layers.{layer}.mlp.router.expert_bias"] = value
        final, head = self._draw([hidden]), self._draw([vocab, hidden])
        if last:
            self._add("decoder.final_layernorm.weight", final)
            if not tied:
                self._add("output_layer.weight", head)

    def _draw(self, shape: list[int]) -> Tensor:
        return torch.randn(shape, generator=self._random)

    def _add(self, path: str, value: Tensor, **more: bool) -> None:
        head, expert, tail = path.partition(".mlp.experts.")
        group = self.ps.etp if expert else self.ps.tp
        dim, parts = next((cut for end, cut in CUTS.items() if path.endswith(end)), (None, 1))
        shard = {"shard_rank": group.rank, "shard_count": group.size} if dim is not None else {}
        names, kind = (path,), "dense"
        if expert:
            each, kind = len(value) // self.ps.ep.size, "expert"
            mine = range(self.ps.ep.rank * each, (self.ps.ep.rank + 1) * each)
            names = tuple(f"{head}.mlp.experts.local_experts.{e}.{tail}" for e in mine)
            value = value[mine.start : mine.stop]
        info = ParamInfo(names, kind=kind, stacked=bool(expert), sharded_dim=dim, parts=parts, **shard, **more)
        param = nn.Parameter(cut(value, info).to(torch.float32 if self.wide and self.wide in path else self.dtype))
        param.info = info
        self.table[path] = param
        self.register_parameter(path.replace(".", "/"), param)

    def named_scaling_state(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def named_state_buffers(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.buffer_table.items()

    def generators(self) -> dict[str, torch.Generator]:
        return self.streams

    def tensors(self) -> dict[str, Tensor]:
        """Copies of everything, by path."""
        return {name: value.detach().clone() for name, value in (self.table | self.buffer_table).items()}


def cut(value: Tensor, info: ParamInfo) -> Tensor:
    """Return this rank's shard of a tensor or of a stack of tensors."""
    if info.shard_count == 1:
        return value.clone()
    return (
        torch.stack([take_local_shard(one, info) for one in value])
        if info.stacked
        else take_local_shard(value, info).clone()
    )


def fake_chunks(ps: ParallelState, vpp: int = 1, **how) -> list[FakeModel]:
    """The chunks of a rank of an interleaved pipeline."""
    return [FakeModel(ps=ps, stage=(index * ps.pp.size + ps.pp.rank, vpp * ps.pp.size), **how) for index in range(vpp)]


@dataclass(frozen=True)
class HeldState:
    """The fields of optim's ParamState that checkpoint/ reads."""

    param: nn.Parameter
    state_name: str
    tensor: Tensor
    start: int
    stop: int
    read: None = None


class FakeOptimizer:
    """Adam's state, or SGD's: all that a rank's model needs, or (distributed) flat ranges of the concatenated parameters of a kind.

    Values depend on the names of parameters only.
    """

    def __init__(
        self,
        model: FakeModel | list[FakeModel],
        ps: ParallelState,
        distributed: bool = False,
        main_params: bool = False,
        seed: int = 0,
        sgd: bool = False,
    ):
        self.held: list[HeldState] = []
        self.step = 0
        self.notes: list[tuple[bool, bool]] = []
        params = [param for chunk in (model if isinstance(model, list) else [model]) for param in chunk.parameters()]
        for kind, group in (("dense", ps.dp_cp), ("expert", ps.edp)):
            mine = [param for param in params if param.info.kind == kind]
            total = sum(param.numel() for param in mine)
            share = -(-total // group.size) + 37 * (group.size > 1)  # inside a row
            low, high = (group.rank * share, (group.rank + 1) * share) if distributed else (0, total)
            position = 0
            for param in mine:
                first, last = max(low - position, 0), min(high - position, param.numel())
                position += param.numel()
                main = main_params and not (
                    param.dtype == torch.float32 and any(other.dtype != torch.float32 for other in params)
                )
                moments = ("momentum_buffer",) if sgd else ("exp_avg", "exp_avg_sq")
                for number, name in enumerate((*moments, *(["fp32_param"] if main else []))):
                    if first < last:
                        full = moment(param, 1000 * seed + number).flatten()
                        self.held.append(HeldState(param, name, full[first:last].clone(), first, last))

    def wait_params(self) -> None:
        pass

    def begin_load(self) -> None:
        pass

    def tensors(self) -> Iterator[HeldState]:
        yield from self.held

    def scalars(self) -> dict:
        return {
            "step": self.step,
            "param_groups": [{"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": False}],
        }

    def load_scalars(self, scalars: dict) -> None:
        self.step = scalars["step"]

    def after_load(self, params_changed: bool, state_loaded: bool) -> None:
        self.notes.append((params_changed, state_loaded))

    def values(self) -> list[Tensor]:
        """Copies of all held tensors, in order."""
        return [held.tensor.clone() for held in self.held]


def moment(param: nn.Parameter, seed: int) -> Tensor:
    """Return a random value that depends on the parameter's names only: drawn in full, then sharded."""
    info = param.info
    shape = list(param.shape[1:] if info.stacked else param.shape)
    if info.sharded_dim is not None:
        shape[info.sharded_dim] *= info.shard_count
    drawn = [
        torch.randn(shape, generator=torch.Generator().manual_seed(seed + zlib.crc32(name.encode())))
        for name in info.names
    ]
    return cut(torch.stack(drawn) if info.stacked else drawn[0], info)

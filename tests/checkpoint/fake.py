"""A model and an optimizer that are nothing but named tensors: what checkpoint/ sees of the real ones."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import ParallelState

# the flags that the keys follow from
RECORD = {"num_layers": 2, "num_experts": 8, "moe_layer_freq": 1, "swiglu": True, "quick_geglu": False,
          "multi_latent_attention": False, "hidden_size": 64, "num_attention_heads": 4,
          "position_embedding_type": "rope", "num_query_groups": 2}


def layer_shapes(hidden: int = 64, ffn: int = 32, qkv: int = 128, qk_norm: int = 0, experts: int = 8) -> dict[str, list[int]]:
    """Shapes of one MoE layer; those of experts are stacked."""
    shapes = {"input_layernorm.weight": [hidden], "self_attention.linear_proj.weight": [hidden, qkv // 2],
              "self_attention.linear_qkv.weight": [qkv, hidden], "pre_mlp_layernorm.weight": [hidden],
              "mlp.router.weight": [experts, hidden], "mlp.experts.linear_fc1.weight": [experts, 2 * ffn, hidden],
              "mlp.experts.linear_fc2.weight": [experts, hidden, ffn]}
    if qk_norm:
        shapes |= {"self_attention.q_layernorm.weight": [qk_norm], "self_attention.k_layernorm.weight": [qk_norm]}
    return shapes


class FakeModel(nn.Module):
    """Two Mixtral layers of the size of the golden case a2_mixtral, unless told otherwise."""

    def __init__(self, layers: list[dict[str, list[int]]] | None = None, vocab: int = 512, hidden: int = 64, seed: int = 0,
                 dtype: torch.dtype = torch.float32, expert_bias: bool = False):
        super().__init__()
        self.table: dict[str, nn.Parameter] = {}
        self.buffer_table: dict[str, Tensor] = {}
        generator = torch.Generator().manual_seed(seed)
        self._add("embedding.word_embeddings.weight", [vocab, hidden], generator, dtype)
        for number, shapes in enumerate(layers if layers is not None else [layer_shapes(), layer_shapes()]):
            for rest, shape in shapes.items():
                self._add(f"decoder.layers.{number}.{rest}", shape, generator, dtype)
            if expert_bias:
                self.buffer_table[f"decoder.layers.{number}.mlp.router.expert_bias"] = torch.randn(
                    shapes["mlp.router.weight"][0], generator=generator)
        self._add("decoder.final_layernorm.weight", [hidden], generator, dtype)
        self._add("output_layer.weight", [vocab, hidden], generator, dtype)

    def _add(self, path: str, shape: list[int], generator: torch.Generator, dtype: torch.dtype) -> None:
        param = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        head, expert, tail = path.partition(".mlp.experts.")
        if expert:
            names = tuple(f"{head}.mlp.experts.local_experts.{e}.{tail}" for e in range(shape[0]))
            param.info = ParamInfo(names, kind="expert", stacked=True)
        else:
            param.info = ParamInfo((path,))
        self.table[path] = param
        self.register_parameter(path.replace(".", "/"), param)

    def named_state_buffers(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.buffer_table.items()

    def tensors(self) -> dict[str, Tensor]:
        """Copies of everything, by path."""
        return {name: value.detach().clone() for name, value in (self.table | self.buffer_table).items()}


@dataclass(frozen=True)
class Held:
    """What optim's ParamState looks like from here."""

    param: nn.Parameter
    state_name: str
    tensor: Tensor
    start: int
    stop: int


class FakeOptimizer:
    """Adam's state: whole tensors on every rank, or (distributed) flat ranges of the concatenated parameters."""

    def __init__(self, model: FakeModel, ps: ParallelState, distributed: bool = False, main_params: bool = False, seed: int = 0):
        self.held: list[Held] = []
        self.step = 0
        self.notes: list[tuple[bool, bool]] = []
        names = ("exp_avg", "exp_avg_sq") + (("fp32_param",) if main_params else ())
        params = list(model.parameters())
        total = sum(param.numel() for param in params)
        low = high = None
        if distributed:
            share = -(-total // ps.dp_cp.size)
            low, high = ps.dp_cp.rank * share, min(total, (ps.dp_cp.rank + 1) * share)
        position = 0
        for number, param in enumerate(params):
            first, last = (0, param.numel()) if low is None else (max(low - position, 0), min(high - position, param.numel()))
            position += param.numel()
            for state_number, name in enumerate(names):
                if first < last:
                    # the whole tensor is drawn, so that any cut of it holds the same values
                    generator = torch.Generator().manual_seed(1000 * seed + 10 * number + state_number)
                    whole = torch.randn(param.numel(), generator=generator)
                    self.held.append(Held(param, name, whole[first:last].clone(), first, last))

    def wait_params(self) -> None:
        pass

    def tensors(self) -> Iterator[Held]:
        yield from self.held

    def scalars(self) -> dict:
        return {"step": self.step, "param_groups": [{"lr": 0.25, "weight_decay": 0.1}]}

    def load_scalars(self, scalars: dict) -> None:
        self.step = scalars["step"]

    def after_load(self, params_changed: bool, state_loaded: bool) -> None:
        self.notes.append((params_changed, state_loaded))

    def values(self) -> list[Tensor]:
        """Copies of all held tensors, in order."""
        return [held.tensor.clone() for held in self.held]

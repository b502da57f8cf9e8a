"""A dense checkpoint presented as one of a Mixture-of-Experts model (--moe-use-upcycling).

`UpcycledMetadata` has the keys and chunks of the MoE model; a chunk is made on demand from the one dense tensor it
comes from. So every reader of checkpoints reads it under any mapping, whatever the dense checkpoint is: native,
Megatron-LM's, or a Hugging Face folder. Chunks are ordered by their dense tensors, of which one is in memory at a time.

Each dense MLP is split along its FFN width into g pieces. Expert e is piece e mod g, its weights multiplied by a scale
so that experts which cover all pieces once, with equal weights, add up to the dense output. The router's rows are drawn
for each g consecutive experts (a virtual group) and repeated in it: the experts of a group tie, are chosen together,
and cover all pieces.

At step 0 the model computes what the dense one does

* as copies (g = 1) with weights that add up to 1 (softmax after top-k), for every activation;
* split (g > 1), with softmax after top-k and top-k a multiple of g, for squared ReLU; gelu and swiglu are not
  homogeneous, so scaled weights only approximate the dense output;
* not with softmax before top-k, whose scale holds for equal scores of all experts on average, nor with
  --moe-router-topk-scaling-factor.

With --moe-upcycling-expert-init normal the routed experts are random too; only the rest is the dense model's.

Experts that make slices of the output (arguments/mechanisms/selection_kinds/declaration.py, ExpertSplit) are split
along it too; their declaration says how. The shared expert next to them is the full dense MLP.

Source: arXiv 2410.07524. It does not cover biases: fc1's is split with its weight; fc2's is divided by the sum of the
weights of a token's experts.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from arguments.checkpoint_args import MUP, SHAPE, STORAGE, same_meaning
from arguments.container import OPTIONS
from arguments.layer_flags import TRANSLATED_FLAGS, dense_layers, difference, numbering_difference
from arguments.layer_pattern import STAGE, moe_layer_pattern, mtp_layer_pattern
from arguments.mechanisms.format_kinds.eight_bit import SCALING_PREFIX
from arguments.mechanisms.selection_kinds.declaration import UpcycledExperts
from arguments.mechanisms.selections import SPLITS, of_balancing
from arguments.mup import recorded_width_mult
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.flavors import is_hybrid, is_other_flavor, to_flavor
from moe_trainer.checkpoint.logical import LogicalTensor, logical_tensors, read_logical
from moe_trainer.checkpoint.sharding import KeyScheme
from moe_trainer.checkpoint.virtual_index import VirtualMetadata, add_chunk
from moe_trainer.parallel.rng import named_generator

# not parameters of the model: optimizer states, scales of delayed scaling
_NOT_PARAMETERS = ("optimizer.", "chained_", SCALING_PREFIX)
_MLP = re.compile(r"^((?:decoder|mtp)\.layers\.\d+\.(?:\w+\.(?:layers\.\d+\.)?)?mlp)\.linear_fc([12])\.(weight|bias)$")
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
# a list of what is compared elsewhere: shapes have the heads that share keys, which two ways describe, and whether the
# head is tied, which may be untied; `_check` compares patterns
_NOT_SHARED = frozenset(
    {
        "group_query_attention",
        "num_query_groups",
        "untie_embeddings_and_output_weights",
        "hybrid_layer_pattern",
        *STORAGE,
    }
)
_SHARED = tuple(dest for dest in (*SHAPE, *MUP) if OPTIONS[dest].section != "moe" and dest not in _NOT_SHARED)
"""Flags that the dense model and the MoE model have in common: all that define the function of the dense weights."""


@dataclass(frozen=True)
class TensorRecipe:
    """One tensor of the MoE model: `make` gets the dense tensor `source`.

    It returns `shape`, in `dtype` or what converts to it. `drawn`: it is random and ignores the source.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: LogicalTensor
    make: Callable[[Tensor], Tensor]
    drawn: bool = False


@dataclass(frozen=True)
class UpcyclingSpec:
    """How a dense MLP becomes experts.

    Attributes:
        pieces: parts of the FFN width.
        gated: fc1 has gate and up.
        how: factors, slices of the output, equal rows of the router.
        projection: name of the matrix that multiplies the output of a layer, None without one.
        draws_experts: the routed experts are random too, and their biases zero.
    """

    experts: int
    pieces: int
    gated: bool
    how: UpcycledExperts
    seed: int
    projection: str | None = None
    draws_experts: bool = False

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> "UpcyclingSpec":
        """Derive it from the flags of the MoE model, by destination."""
        experts, topk, gated = args["num_experts"], args["moe_router_topk"], bool(args["swiglu"])
        pieces = args["ffn_hidden_size"] // args["moe_ffn_hidden_size"]
        drawn = {"seed": int(args["seed"]), "draws_experts": args["moe_upcycling_expert_init"] == "normal"}
        split = next((each for each in SPLITS if args[each.width_shares] is not None), None)
        if split is not None:
            name = split.projection_name if args[split.projection] else None
            return cls(experts, pieces, gated, split.upcycle(args, pieces), projection=name, **drawn)
        before = args["moe_router_pre_softmax"] and args["moe_router_score_function"] == "softmax"
        scale = experts / pieces * pieces**2 / topk if before else float(pieces)
        each = scale ** (1 / 3 if gated or args["squared_relu"] else 1 / 2)
        std = None
        if not args["init_method_xavier_uniform"]:
            std = args["init_method_std"] / math.sqrt(recorded_width_mult(args))
        how = UpcycledExperts(repeats=pieces, fc1=each, fc2=each, bias=scale / pieces, std=std)
        return cls(experts, pieces, gated, how, **drawn)

    def make_fc1(self, expert: int, dense: Tensor) -> Tensor:
        """Return an expert's rows of the dense weight or bias; gate and up are split separately."""
        parts = dense.chunk(2 if self.gated else 1)
        return torch.cat([part.chunk(self.pieces)[self._piece(expert)] for part in parts]) * self.how.fc1

    def make_fc2(self, expert: int, dense: Tensor) -> Tensor:
        """Return an expert's columns of the dense weight, and of them the rows of its slice."""
        columns = dense.chunk(self.pieces, 1)[self._piece(expert)]
        return columns.chunk(self.how.slices)[expert // (self.experts // self.how.slices)] * self.how.fc2

    def make_fc2_bias(self, _expert: int, dense: Tensor) -> Tensor:
        """Return the dense bias, scaled so that the sum over a token's experts equals it."""
        return dense * self.how.bias

    def router(self, name: str, hidden: int) -> Tensor:
        """Return the weight [experts, hidden]: one row per virtual group, repeated."""
        repeats = self.how.repeats
        return self.draw(name, self.experts // repeats, hidden).repeat_interleave(repeats, 0)

    def draw_expert(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return random weights of an expert, or biases of zero."""
        return torch.zeros(shape) if name.endswith(".bias") else self.draw(name, *shape)

    def draw(self, name: str, *shape: int) -> Tensor:
        """Return random fp32 numbers that depend on the seed and the name only, whatever the mapping."""
        stream = named_generator(self.seed, "upcycling", name)
        if self.how.std is None:
            return torch.nn.init.xavier_uniform_(torch.empty(shape), generator=stream)
        return torch.empty(shape).normal_(0.0, self.how.std, generator=stream)

    def _piece(self, expert: int) -> int:
        return expert % self.pieces


class UpcycledMetadata(VirtualMetadata):
    """The index of a checkpoint of the MoE model; see the head of this file.

    Raises:
        CheckpointError: if the model is not dense or differs from the flags.
    """

    def __init__(self, folder: Path, dense: Metadata, saved: Mapping[str, Any], args: Mapping[str, Any]):
        """Map every tensor of the MoE model (flags `args`) to one of the dense model (flags `saved`)."""
        super().__init__()
        self._folder, self._dense = folder, dense
        self._held: tuple[LogicalTensor | None, Tensor] = (None, torch.empty(0))
        self._recipes: dict[MetadataIndex, TensorRecipe] = {}
        translates = is_other_flavor(saved, args)
        tensors = {
            to_flavor(tensor.name, is_hybrid(args)) if translates else tensor.name: tensor
            for tensor in logical_tensors(dense)
            if tensor.state is None and not tensor.name.startswith(_NOT_PARAMETERS)
        }
        _check(folder, tensors, saved, args)
        scheme = KeyScheme.from_record(args)
        for recipe in tensor_recipes(tensors, UpcyclingSpec.from_args(args), args):
            place = dense.storage_data[MetadataIndex(recipe.source.key, recipe.source.chunks[0].offsets)]
            where = place.relative_path, place.offset, place.length
            self._recipes[add_chunk(self, scheme.locate(recipe.name), recipe.shape, recipe.dtype, *where)] = recipe

    def read_chunk(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        recipe = self._recipes[MetadataIndex(key, chunk.offsets)]
        if recipe.drawn:
            return recipe.make(torch.empty(0)).view(chunk.sizes)
        if self._held[0] is not recipe.source:
            self._held = (None, torch.empty(0))  # before the next one is read
            self._held = (recipe.source, read_logical(self._folder, self._dense, recipe.source))
        return recipe.make(self._held[1]).view(chunk.sizes)


def tensor_recipes(
    dense: Mapping[str, LogicalTensor], spec: UpcyclingSpec, args: Mapping[str, Any]
) -> Iterator[TensorRecipe]:
    """Yield all tensors of the MoE model, in the order of the dense tensors."""
    for name, tensor in dense.items():
        network = _MLP.match(name)
        if network is None or not _becomes_experts(network[1], args):
            yield _copy(name, tensor)
        else:
            yield from _expand_mlp(network[1], f"fc{network[2]}", network[3], tensor, spec, args)
    if args["untie_embeddings_and_output_weights"] and _HEAD not in dense and _EMBEDDING in dense:
        yield _copy(_HEAD, dense[_EMBEDDING])


def _becomes_experts(mlp: str, args: Mapping[str, Any]) -> bool:
    """Return whether the MoE model has experts in the place of an MLP of the dense one, by its name."""
    pattern = moe_layer_pattern(args["num_layers"], args["num_experts"], args["moe_layer_freq"])
    layer, *in_depth = (int(number) for number in re.findall(r"layers\.(\d+)\.", mlp))
    if mlp.startswith("decoder."):
        return pattern[layer]
    return mtp_layer_pattern(pattern, args.get("hybrid_layer_pattern"))[in_depth[0] if in_depth else 0]


def _dense_pattern(flags: Mapping[str, Any]) -> str:
    """Return the pattern of a hybrid model with an MLP in the place of experts, "" for other models."""
    return (dense_layers(flags).get("hybrid_layer_pattern") or "").replace(STAGE, "")


def _copy(name: str, tensor: LogicalTensor) -> TensorRecipe:
    return TensorRecipe(name, tensor.shape, tensor.dtype, tensor, lambda dense: dense)


def _expand_mlp(
    mlp: str, linear: str, kind: str, tensor: LogicalTensor, spec: UpcyclingSpec, args: Mapping[str, Any]
) -> Iterator[TensorRecipe]:
    """Yield what a weight or bias of a dense MLP becomes; router and gate come with the weight of fc1."""
    make = {
        ("fc1", "weight"): spec.make_fc1,
        ("fc1", "bias"): spec.make_fc1,
        ("fc2", "weight"): spec.make_fc2,
        ("fc2", "bias"): spec.make_fc2_bias,
    }[linear, kind]
    shape = make(0, torch.empty(tensor.shape, device="meta")).shape
    for expert in range(spec.experts):
        name = f"{mlp}.experts.local_experts.{expert}.linear_{linear}.{kind}"
        if spec.draws_experts:
            yield _drawn_tensor(name, tuple(shape), tensor, partial(spec.draw_expert, name, shape), tensor.dtype)
        else:
            yield TensorRecipe(
                name,
                tuple(shape),
                tensor.dtype,
                tensor,
                lambda full, expert=expert: make(expert, full.float()),  # type: ignore[misc]
            )
    shared = args["moe_shared_expert_intermediate_size"] is not None
    if shared and kind == "weight":
        yield _copy(f"{mlp}.shared_experts.linear_{linear}.weight", tensor)
    if (linear, kind) != ("fc1", "weight"):
        return
    hidden, router, gate = tensor.shape[1], f"{mlp}.router", f"{mlp}.shared_experts.gate_weight"
    if spec.projection is not None:
        projection = f"{mlp}.{spec.projection}.weight"
        yield _drawn_tensor(projection, (hidden, hidden), tensor, lambda: spec.draw(projection, hidden, hidden))
    yield _drawn_tensor(
        f"{router}.weight", (spec.experts, hidden), tensor, lambda: spec.router(f"{router}.weight", hidden)
    )
    if shared and args["moe_shared_expert_gate"]:
        yield _drawn_tensor(gate, (1, hidden), tensor, lambda: spec.draw(gate, 1, hidden))
    for leaf, is_present in (
        ("bias", args["add_bias_linear"]),
        ("expert_bias", args["moe_router_enable_expert_bias"]),
        *((name, True) for each in of_balancing([args["moe_router_load_balancing_type"]]) for name in each.biases),
    ):
        if is_present:
            yield _drawn_tensor(f"{router}.{leaf}", (spec.experts,), tensor, lambda: torch.zeros(spec.experts))


def _drawn_tensor(
    name: str,
    shape: tuple[int, ...],
    stored_with: LogicalTensor,
    make: Callable[[], Tensor],
    dtype: torch.dtype = torch.float32,
) -> TensorRecipe:
    """Return a tensor without a dense counterpart; it is read together with `stored_with`."""
    return TensorRecipe(name, shape, dtype, stored_with, lambda _: make(), drawn=True)


def _check(
    folder: Path,
    tensors: Mapping[str, LogicalTensor],
    saved: Mapping[str, Any],
    args: Mapping[str, Any],
) -> None:
    expert = next((name for name in tensors if ".experts." in name or ".router." in name), None)
    if expert is not None:
        raise CheckpointError(
            f"--moe-use-upcycling makes experts of a dense model, and {folder} has experts already ({expert}): "
            "leave the flag out to continue from it"
        )
    translates = is_other_flavor(saved, args)
    translated = TRANSLATED_FLAGS if translates else frozenset()
    differing = [
        f"  {OPTIONS[name].spellings[0]} ({name}): {saved[name]!r} in the checkpoint, {args[name]!r} here"
        for name in _SHARED
        if name not in translated and name in saved and name in args and not same_meaning(name, saved, args)
    ]
    if translates:
        here = dense_layers(args)
        try:
            problem = difference(saved, here) or numbering_difference(saved, here)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{folder}: the recorded flags are damaged: {error}") from error
        if problem is not None:
            differing.append(f"  the layers, with - for E: {problem}")
    elif _dense_pattern(saved) != (pattern := _dense_pattern(args)):
        given = saved.get("hybrid_layer_pattern")
        differing.append(f"  --hybrid-layer-pattern, with - for E: {given!r} in the checkpoint, {pattern!r} here")
    if differing:
        title = f"--moe-use-upcycling: {folder} is of another model than these flags; what is to be the same:"
        raise CheckpointError("\n".join([title, *differing]))

"""The experts of one layer: stacked weights, run on rows sorted by expert.

Weights of all local experts live in one parameter, [e, rows, hidden]; checkpoints and optimizers see one name per expert
(ParamInfo.stacked). --moe-grouped-gemm allows one product for all experts where that is faster; without it experts run one by one.
Both give the same numbers up to rounding.

Expert tensor parallelism cuts every expert's width F over ps.etp: fc1 by rows (gate and up each by itself), fc2 by columns. Each
rank's result is then one part of a sum, which the dispatcher takes over ps.etp on the way back. What is not cut, fc2's bias, enters
that sum on one rank only; the others give it a zero gradient, and its gradient is summed over ps.etp (ParamInfo.partial).

Shape letters: R rows sorted by expert, e local experts, H hidden, F this rank's expert FFN width, G fc1 output width (2F when gated).
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from moe_trainer.layers.init import Init, hidden_init, make_parameter, residual_init
from moe_trainer.layers.kernels import Kernels
from moe_trainer.layers.kit import Kit
from moe_trainer.layers.mlp import MLP, make_activation
from moe_trainer.memory.activations import Activations
from moe_trainer.moe.cloning import CloneTrip
from moe_trainer.moe.grouped_experts import grouped_expert_mlp
from moe_trainer.ops.expert_mlp import choose_block, expert_mlp, reads_counts
from moe_trainer.ops.expert_mlp_quantized import quantized_expert_mlp
from moe_trainer.ops.fp8 import HighPrecision, QuantizedProducts
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.parallel.weight_grads import WeightGradQueue


class _ExpertLinear(nn.Module):
    """Holds the stacked weight and bias of one linear of all local experts; `Experts` does the arithmetic.

    rows, columns: of the whole weight of one expert; dimension `cut` of it is cut over the group, in `parts` by themselves.
    """

    def __init__(self, names: Sequence[str], rows: int, columns: int, bias: bool, init: Init, *, group: Group, cut: int,
                 parts: int = 1):
        super().__init__()
        shape = [rows, columns]
        shape[cut] //= group.size
        place = {"kind": "expert", "stacked": True, "shard_rank": group.rank, "shard_count": group.size}
        self.weight = make_parameter((len(names), *shape), ParamInfo(
            tuple(f"{name}.weight" for name in names), sharded_dim=cut, parts=parts, init=init.kind, init_std=init.std, **place))
        self.bias = None
        if bias:
            names = tuple(f"{name}.bias" for name in names)
            if cut == 0:
                info = ParamInfo(names, sharded_dim=0, parts=parts, init="zeros", **place)
            else:
                info = ParamInfo(names, kind="expert", stacked=True, partial=group.size > 1, init="zeros")
            self.bias = make_parameter((len(names), shape[0]), info)


class Experts(nn.Module):
    """All local experts of one layer.

    queue: where weight gradients wait while it is active; None to compute them in backward always. activations: the chunk's.
    quantize: makes their products in fewer bits, of (name, cut=, expert=). grouped_linear: of the kit; may make None.
    Raises: ValueError when the experts or their width cannot be cut evenly.
    """

    def __init__(self, model: ModelArgs, moe: MoEArgs, ps: ParallelState, name: str, queue: WeightGradQueue | None = None,
                 activations: Activations | None = None, quantize: Callable[..., QuantizedProducts | None] | None = None,
                 kernels: Kernels = Kernels(), grouped_linear: Callable[..., nn.Module | None] | None = None):
        super().__init__()
        ffn = moe.moe_ffn_hidden_size or model.ffn_hidden_size
        if ffn % ps.etp.size:
            raise ValueError(f"experts of width {ffn} (--moe-ffn-hidden-size) cannot be cut over "
                             f"--expert-tensor-parallel-size {ps.etp.size}")
        if moe.num_experts % ps.ep.size:
            raise ValueError(f"--num-experts {moe.num_experts} cannot be spread evenly over --expert-model-parallel-size {ps.ep.size}")
        self.activation = make_activation(model)
        self.block, self.products = kernels.block(self.activation), kernels.products
        self.allow_grouped = moe.moe_grouped_gemm
        self.probs_on_input = moe.moe_apply_probs_on_input
        self.queue, self.activations = queue, activations or Activations()
        self.etp = ps.etp
        num_local = moe.num_experts // ps.ep.size
        first = ps.ep.rank * num_local
        names = [f"{name}.local_experts.{expert}" for expert in range(first, first + num_local)]
        bias = model.add_bias_linear
        reads, makes = moe.expert_widths(model.hidden_size)
        parts = self.activation.in_per_out
        self.linear_fc1 = _ExpertLinear(
            [f"{expert}.linear_fc1" for expert in names], ffn * parts, reads, bias, hidden_init(model), group=ps.etp, cut=0, parts=parts)
        self.linear_fc2 = _ExpertLinear(
            [f"{expert}.linear_fc2" for expert in names], makes, ffn, bias, residual_init(model), group=ps.etp, cut=1)
        self.quantized = None
        self.grouped = self._grouped_linears(grouped_linear)
        if quantize is not None and self.grouped is None:
            made = [quantize(f"{name}.{linear}", cut=True, expert=True) for linear in ("linear_fc1", "linear_fc2")]
            if made != [None, None]:
                self.quantized = nn.ModuleList(HighPrecision() if products is None else products for products in made)

    def forward(self, x_RH: Tensor, probs_R: Tensor, tokens_per_expert_e: Sequence[int] | Tensor, unused: int = 0,
                trip: CloneTrip | None = None) -> Tensor:
        """Run the experts on their rows; the result is multiplied by the probabilities.

        Shapes: x_RH sorted by expert; probs_R floating; tokens_per_expert_e host integers, or where `needs_host_counts` is None (and
        there is no trip) a tensor on the device, behind whose rows anything may stand. unused: zero rows behind them, for which
        what is returned means nothing (not together with a trip). trip: brings clones of other ranks' experts, whose rows stand behind
        those of the local ones.
        Returns: y_RH.
        """
        if self.probs_on_input:
            x_RH = (x_RH * probs_R.unsqueeze(1)).to(x_RH.dtype)
            probs_R = None
        if trip is None:
            return self._run(x_RH, probs_R, tokens_per_expert_e, unused)
        home = self.linear_fc1.weight.shape[0]
        x_RH, cloned = trip.fetch(x_RH, self._tensors())
        at_home, away = tokens_per_expert_e[:home], tokens_per_expert_e[home:home + trip.num_clones]
        if not away:
            return trip.fetch_again(self._run(x_RH, probs_R, at_home, 0))
        rows = sum(at_home)
        probs_of_home, probs_of_clones = (None, None) if probs_R is None else (probs_R[:rows], probs_R[rows:])
        y_RH = self._run(x_RH[:rows], probs_of_home, at_home, 0)
        with trip.dropping(cloned):
            clones_RH = self._run_clones(x_RH[rows:], probs_of_clones, away, cloned)
        return trip.fetch_again(torch.cat([y_RH, clones_RH]))

    def _grouped_linears(self, make: Callable[..., nn.Module | None] | None) -> nn.ModuleList | None:
        """fc1 and fc2 of a library, which share our weights; None where we compute."""
        sizes = [(*linear.weight.shape,) for linear in (self.linear_fc1, self.linear_fc2)]
        made = [make(num, columns, rows, keeps_input=linear == 1 and "moe_act" in self.activations.recomputed)
                for linear, (num, rows, columns) in enumerate(sizes)] if make is not None else [None]
        return None if None in made else nn.ModuleList(made)

    def quantized_weights(self) -> Iterator[tuple[nn.Parameter, QuantizedProducts]]:
        """The stacked weights with their products, if these are quantised."""
        if self.quantized is not None:
            yield from zip((self.linear_fc1.weight, self.linear_fc2.weight), self.quantized)

    def _tensors(self) -> tuple[Tensor, ...]:
        tensors = (self.linear_fc1.weight, self.linear_fc2.weight, self.linear_fc1.bias, self.linear_fc2.bias)
        return tuple(tensor for tensor in tensors if tensor is not None)

    def _run_clones(self, x_RH: Tensor, probs_R: Tensor | None, counts: Sequence[int], cloned: Sequence[Tensor]) -> Tensor:
        w1, w2, b1, b2 = (*cloned, None, None)[:4]
        return expert_mlp(x_RH, probs_R, w1, w2, counts, self.activation, b1_eG=b1, b2_eH=self._own_bias(b2),
                          allow_grouped=self.allow_grouped, block=self.block, products=self.products)

    def needs_host_counts(self) -> str | None:
        """Why the rows of each expert must be known on the host; None if they need not."""
        if self.grouped is not None:
            return "TransformerEngine's GroupedLinear reads them there"
        if self.quantized is not None:
            return "products in 8 and 4 bits are cut there"
        if not self.allow_grouped:
            return "experts run one by one without --moe-grouped-gemm"
        if not reads_counts(self.linear_fc1.weight, self.linear_fc2.weight, self.products):
            return "torch has no grouped product that reads them on this device; --triton-kernels grouped-gemm does"
        return None

    def _run(self, x_RH: Tensor, probs_R: Tensor | None, tokens_per_expert_e: Sequence[int] | Tensor, unused: int) -> Tensor:
        if self.grouped is not None and len(x_RH) > unused:
            return grouped_expert_mlp(
                x_RH, probs_R, self.linear_fc1.weight, self.linear_fc2.weight, tokens_per_expert_e, tuple(self.grouped),
                self.block or choose_block(self.activation), self.activations, row_multiple=self.grouped[0].row_multiple,
                b1_eG=self.linear_fc1.bias, b2_eH=self._own_bias(self.linear_fc2.bias), unused=unused)
        rows = x_RH.untyped_storage().data_ptr()
        with self.activations.offloading("expert_fc1", "moe_act",
                                         which=lambda x: "expert_fc1" if x.untyped_storage().data_ptr() == rows else "moe_act"):
            if self.quantized is not None:
                return quantized_expert_mlp(
                    x_RH, probs_R, self.linear_fc1.weight, self.linear_fc2.weight, tokens_per_expert_e, self.activation,
                    tuple(self.quantized), b1_eG=self.linear_fc1.bias, b2_eH=self._own_bias(self.linear_fc2.bias), queue=self.queue,
                    block=self.block, unused=unused)
            return expert_mlp(
                x_RH, probs_R, self.linear_fc1.weight, self.linear_fc2.weight, tokens_per_expert_e, self.activation,
                b1_eG=self.linear_fc1.bias, b2_eH=self._own_bias(self.linear_fc2.bias), allow_grouped=self.allow_grouped, queue=self.queue,
                block=self.block, products=self.products, unused=unused,
            )

    def _own_bias(self, bias_eH: Tensor | None) -> Tensor | None:
        """fc2's bias on the first rank of etp, zeros with a zero gradient on the others."""
        return bias_eH if bias_eH is None or self.etp.rank == 0 else bias_eH * 0.0


class SharedExperts(MLP):
    """The expert every token takes; with --moe-shared-expert-gate times sigmoid of a learned projection of the token.

    Cut over tp like any dense feed-forward. With sequence parallelism the gate sees this rank's rows only.
    """

    def __init__(self, model: ModelArgs, moe: MoEArgs, ps: ParallelState, name: str, kit: Kit, sequence_parallel: bool = False):
        super().__init__(model, moe.moe_shared_expert_intermediate_size, name=name, group=ps.tp, kit=kit, bias=False,
                         sequence_parallel=sequence_parallel)
        self.gate_weight = None
        if moe.moe_shared_expert_gate:
            init = hidden_init(model)
            self.gate_weight = make_parameter((1, model.hidden_size), ParamInfo(
                (f"{name}.gate_weight",), partial=sequence_parallel and ps.tp.size > 1, init=init.kind, init_std=init.std))

    def forward(self, x_SBH: Tensor) -> Tensor:
        y_SBH = super().forward(x_SBH)
        if self.gate_weight is None:
            return y_SBH
        return y_SBH * torch.sigmoid(F.linear(x_SBH, self.gate_weight))

"""The experts of one layer: stacked weights, run on tokens sorted by expert.

The weights of all local experts are one parameter, [e, rows, hidden]; checkpoints and optimizers see one name per
expert (ParamInfo.stacked). --moe-grouped-gemm allows one GEMM for all experts where that is faster; without it
experts run one by one. Both give the same numbers up to rounding.

Expert tensor parallelism shards every expert's width F over ps.etp: fc1 by rows (gate and up separately), fc2 by
columns. Each rank's result is a partial sum, which the dispatcher sums over ps.etp in combine. fc2's bias is not
sharded: it enters the sum on one rank only; the others give it a zero gradient, and its gradient is summed over
ps.etp (ParamInfo.is_grad_partial).

Shape letters: R routed tokens sorted by expert, e local experts, H hidden, F this rank's expert FFN width, G fc1
output width (2F when gated).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from moe_trainer.layers.init import Init, hidden_init, make_parameter, residual_init
from moe_trainer.layers.layer_factory import LayerFactory
from moe_trainer.layers.mlp import MLP, make_activation
from moe_trainer.moe.expert_lora import ExpertLoRA, GroupedLoRALinear
from moe_trainer.moe.grouped_experts import ExpertPipeline, GroupedLinear, grouped_expert_mlp, pipeline_expert_mlp
from moe_trainer.moe.placement.own import OWN_WEIGHTS, OwnWeights
from moe_trainer.ops.expert_mlp import (
    ExpertMLPKernels,
    ExpertWeights,
    can_read_counts_on_device,
    expert_mlp,
    get_activation_fns,
)
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.quantization.expert_mlp import quantized_expert_mlp
from moe_trainer.quantization.gemms import QuantizedGemms, UnquantizedExpertGemms


class _ExpertLinear(nn.Module):
    """Stacked weight and bias of one linear of all local experts; `Experts` computes.

    The full weight of one expert is [rows, columns]. Its dimension `sharded_dim` is sharded over the group, each of
    `parts` separately.
    """

    def __init__(
        self,
        names: Sequence[str],
        rows: int,
        columns: int,
        bias: bool,
        init: Init,
        *,
        group: Group,
        sharded_dim: int,
        parts: int = 1,
    ):
        super().__init__()
        shape = [rows, columns]
        shape[sharded_dim] //= group.size
        info = ParamInfo(
            tuple(f"{name}.weight" for name in names),
            kind="expert",
            stacked=True,
            sharded_dim=sharded_dim,
            shard_rank=group.rank,
            shard_count=group.size,
            parts=parts,
            init=init.kind,
            init_std=init.std,
        )
        self.weight = make_parameter((len(names), *shape), info)
        self.bias: nn.Parameter | None = None
        if bias:
            names = tuple(f"{name}.bias" for name in names)
            if sharded_dim == 0:
                info = replace(info, names=names, init="zeros", init_std=0.0)
            else:
                info = ParamInfo(names, kind="expert", stacked=True, is_grad_partial=group.size > 1, init="zeros")
            self.bias = make_parameter((len(names), shape[0]), info)


class Experts(nn.Module):
    """All local experts of one layer.

    Attributes:
        quantized: GEMMs of fc1 and fc2; None if neither is quantized.
        pipeline: a library's MLP of all experts; None without.
        grouped: fc1 and fc2 by a library or with adapters; None for our functions.
    """

    quantized: nn.ModuleList | None
    pipeline: ExpertPipeline | None
    grouped: nn.ModuleList | None

    def __init__(self, model: ModelArgs, moe: MoEArgs, ps: ParallelState, name: str, factory: LayerFactory):
        """Build the experts.

        Args:
            model: model section.
            moe: MoE section.
            ps: parallel state.
            name: global name.
            factory: of the layer.

        Raises:
            ValueError: if the experts or their width cannot be divided evenly.
        """
        super().__init__()
        kernels, num_experts = factory.kernels, moe.expert_count
        ffn = moe.moe_ffn_hidden_size or model.ffn_hidden_size
        if ffn % ps.etp.size:
            raise ValueError(
                f"experts of width {ffn} (--moe-ffn-hidden-size) cannot be sharded over "
                f"--expert-tensor-parallel-size {ps.etp.size}"
            )
        if num_experts % ps.ep.size:
            raise ValueError(
                f"--num-experts {num_experts} cannot be divided evenly over --expert-model-parallel-size {ps.ep.size}"
            )
        self.activation = make_activation(model)
        self.kernels = ExpertMLPKernels(
            kernels.expert_activation(self.activation), kernels.grouped_gemms, kernels.add_weight_grad
        )
        self.allow_grouped = moe.moe_grouped_gemm
        self.probs_on_input = moe.moe_apply_probs_on_input
        self.queue, self.activations = factory.queue, factory.activations
        self.etp = ps.etp
        num_local = num_experts // ps.ep.size
        first = ps.ep.rank * num_local
        names = [f"{name}.local_experts.{expert}" for expert in range(first, first + num_local)]
        fc1, fc2 = ([f"{expert}.{linear}" for expert in names] for linear in ("linear_fc1", "linear_fc2"))
        bias, group, parts = model.add_bias_linear, ps.etp, self.activation.in_per_out
        input_size, output_size = moe.expert_widths(model.hidden_size)
        self.linear_fc1 = _ExpertLinear(
            fc1, ffn * parts, input_size, bias, hidden_init(model), group=group, sharded_dim=0, parts=parts
        )
        self.linear_fc2 = _ExpertLinear(fc2, output_size, ffn, bias, residual_init(model), group=group, sharded_dim=1)
        self.quantized = self.pipeline = None
        if factory.expert_mlp is not None:
            sizes = (input_size, ffn // ps.etp.size, output_size)
            self.pipeline = cast("ExpertPipeline | None", factory.expert_mlp(num_local, sizes))
        self.grouped = self._build_grouped_linears(factory.grouped_linear)
        # a library's linears need to know how weights are stored
        quantize = factory.quantize
        if quantize is not None and self.pipeline is None and (self.grouped is None or self.grouped[0].stores):
            gemms = [
                quantize(f"{name}.{linear}", is_sharded=True, is_expert=True) for linear in ("linear_fc1", "linear_fc2")
            ]
            if gemms != [None, None]:
                self.quantized = nn.ModuleList(UnquantizedExpertGemms() if gemm is None else gemm for gemm in gemms)

    def forward(
        self,
        x_RH: Tensor,
        probs_R: Tensor,
        tokens_per_expert_e: Sequence[int] | Tensor,
        unused: int = 0,
        weights: OwnWeights = OWN_WEIGHTS,
    ) -> Tensor:
        """Run the experts on their tokens and multiply the results by the probabilities.

        Args:
            x_RH: tokens, sorted by expert.
            probs_R: probability of each token, floating.
            tokens_per_expert_e: host integers, or a tensor on the device if `why_host_counts` is None; then x_RH may be
                longer, and the rest is undefined. Output of weights.counts.
            unused: zero tokens at the end, whose results are undefined.
            weights: the weights to compute with.
        """
        factor_R: Tensor | None = probs_R
        if self.probs_on_input:
            x_RH = (x_RH * probs_R.unsqueeze(1)).to(x_RH.dtype)
            factor_R = None

        def run(x_RH: Tensor, tensors: Sequence[Tensor]) -> Tensor:
            return self._run(x_RH, factor_R, tokens_per_expert_e, unused, ExpertWeights(*tensors))

        return weights.run(run, x_RH, self._tensors(), self.activations)

    def add_adapters(self, fc1: ExpertLoRA | None, fc2: ExpertLoRA | None) -> None:
        """Add adapters, whose linears compute the experts from then on."""
        options = {
            "allow_grouped": self.allow_grouped,
            "gemms": self.kernels.gemms if self.allow_grouped else None,
            "add_weight_grad": self.kernels.add_weight_grad,
        }
        self.grouped = nn.ModuleList(GroupedLoRALinear(lora, **options) for lora in (fc1, fc2))

    def _build_grouped_linears(self, build: Callable[..., nn.Module | None] | None) -> nn.ModuleList | None:
        """Build fc1 and fc2 of a library, which share our weights; return None if there are none."""
        if build is None:
            return None
        recomputes_activation = "moe_act" in self.activations.recomputed
        linears = nn.ModuleList()
        for index, linear in enumerate((self.linear_fc1, self.linear_fc2)):
            num, rows, columns = linear.weight.shape
            built = build(num, columns, rows, save_original_input=index == 1 and recomputes_activation)
            if built is None:
                return None
            linears.append(built)
        return linears

    def _quantized_gemms(self, gemms: nn.ModuleList) -> tuple[QuantizedGemms, QuantizedGemms]:
        fc1, fc2 = gemms
        return cast(QuantizedGemms, fc1), cast(QuantizedGemms, fc2)

    @property
    def pad_multiple(self) -> int:
        """Multiple to which each expert's tokens are padded where their counts stay on the device."""
        if self.pipeline is not None:
            return self.pipeline.pad_multiple
        if self.quantized is None:
            return 1
        return max(gemms.token_multiple for gemms in self._quantized_gemms(self.quantized))

    def quantized_weights(self) -> Iterator[tuple[nn.Parameter, QuantizedGemms]]:
        """Yield the stacked weights with their GEMMs, if these are quantized."""
        if self.quantized is not None:
            yield from zip((self.linear_fc1.weight, self.linear_fc2.weight), self._quantized_gemms(self.quantized))

    def _tensors(self) -> tuple[Tensor, ...]:
        tensors = (self.linear_fc1.weight, self.linear_fc2.weight, self.linear_fc1.bias, self.linear_fc2.bias)
        return tuple(tensor for tensor in tensors if tensor is not None)

    def why_host_counts(self) -> str | None:
        """Return why the host needs the tokens of each expert; None if it does not."""
        if self.pipeline is not None:
            return self.pipeline.host_problem
        if self.grouped is not None:
            return "adapters and TransformerEngine's GroupedLinear read them there"
        if not self.allow_grouped:
            return "experts run one by one without --moe-grouped-gemm"
        if not can_read_counts_on_device(self.linear_fc1.weight, self.linear_fc2.weight, self.kernels.gemms):
            return "torch has no grouped GEMM that reads them on this device; --triton-kernels grouped-gemm does"
        return None

    def _run(
        self,
        x_RH: Tensor,
        probs_R: Tensor | None,
        tokens_per_expert_e: Sequence[int] | Tensor,
        unused: int,
        weights: ExpertWeights,
    ) -> Tensor:
        weights = weights._replace(b2_eH=self._fc2_bias(weights.b2_eH))
        if self.pipeline is not None and len(x_RH) > unused:
            return pipeline_expert_mlp(
                self.pipeline, x_RH, probs_R, weights[:2], tokens_per_expert_e, self.activations, unused
            )
        if self.grouped is not None and len(x_RH) > unused:
            fc1, fc2 = self.grouped
            return grouped_expert_mlp(
                x_RH,
                probs_R,
                weights,
                tokens_per_expert_e,
                (cast(GroupedLinear, fc1), cast(GroupedLinear, fc2)),
                self.kernels.activation or get_activation_fns(self.activation),
                self.activations,
                unused=unused,
            )
        x_storage = x_RH.untyped_storage().data_ptr()
        with self.activations.offload_scope(
            "expert_fc1",
            "moe_act",
            # quantized tokens are bytes
            which=lambda x: (
                "expert_fc1" if x.dtype == torch.uint8 or x.untyped_storage().data_ptr() == x_storage else "moe_act"
            ),
        ):
            if self.quantized is not None:
                return quantized_expert_mlp(
                    x_RH,
                    probs_R,
                    weights,
                    tokens_per_expert_e,
                    self.activation,
                    self._quantized_gemms(self.quantized),
                    kernels=self.kernels,
                    queue=self.queue,
                    unused=unused,
                    saves_quantized=self.activations.stash is None,  # pages hold rows
                )
            return expert_mlp(
                x_RH,
                probs_R,
                weights,
                tokens_per_expert_e,
                self.activation,
                kernels=self.kernels,
                allow_grouped=self.allow_grouped,
                queue=self.queue,
                unused=unused,
            )

    def _fc2_bias(self, bias_eH: Tensor | None) -> Tensor | None:
        """Return fc2's bias on the first rank of etp, zeros with a zero gradient on the others."""
        return bias_eH if bias_eH is None or self.etp.rank == 0 else bias_eH * 0.0


class SharedExperts(MLP):
    """Expert that every token takes; --moe-shared-expert-gate multiplies it by a learned gate, a sigmoid.

    It is sharded over tp like a dense MLP. With sequence parallelism the gate sees this rank's tokens only.
    """

    def __init__(
        self,
        model: ModelArgs,
        moe: MoEArgs,
        ps: ParallelState,
        name: str,
        factory: LayerFactory,
        sequence_parallel: bool = False,
    ):
        super().__init__(
            model,
            moe.moe_shared_expert_intermediate_size or 0,
            name=name,
            group=ps.tp,
            factory=factory,
            bias=False,
            sequence_parallel=sequence_parallel,
            save_original_input=True,  # the router saves it too
        )
        self.gate_weight = None
        if moe.moe_shared_expert_gate:
            init = hidden_init(model)
            self.gate_weight = make_parameter(
                (1, model.hidden_size),
                ParamInfo(
                    (f"{name}.gate_weight",),
                    is_grad_partial=sequence_parallel and ps.tp.size > 1,
                    init=init.kind,
                    init_std=init.std,
                ),
            )

    def forward(self, x_SBH: Tensor) -> Tensor:
        y_SBH = super().forward(x_SBH)
        if self.gate_weight is None:
            return y_SBH
        return y_SBH * torch.sigmoid(F.linear(x_SBH, self.gate_weight))

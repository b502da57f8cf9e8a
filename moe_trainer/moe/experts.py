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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from moe_trainer.layers.init import Init, hidden_init, make_parameter, residual_init
from moe_trainer.layers.kernels import Kernels
from moe_trainer.layers.layer_factory import LayerFactory
from moe_trainer.layers.mlp import MLP, make_activation
from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.moe.expert_lora import ExpertLoRA, GroupedLoRALinear
from moe_trainer.moe.grouped_experts import grouped_expert_mlp, pipeline_expert_mlp
from moe_trainer.moe.placement.own import OWN_WEIGHTS, OwnWeights
from moe_trainer.ops.expert_mlp import can_read_counts_on_device, expert_mlp, get_activation_fns
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.parallel.weight_grads import WeightGradQueue
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
        shard = {"kind": "expert", "stacked": True, "shard_rank": group.rank, "shard_count": group.size}
        self.weight = make_parameter(
            (len(names), *shape),
            ParamInfo(
                tuple(f"{name}.weight" for name in names),
                sharded_dim=sharded_dim,
                parts=parts,
                init=init.kind,
                init_std=init.std,
                **shard,
            ),
        )
        self.bias = None
        if bias:
            names = tuple(f"{name}.bias" for name in names)
            if sharded_dim == 0:
                info = ParamInfo(names, sharded_dim=0, parts=parts, init="zeros", **shard)
            else:
                info = ParamInfo(names, kind="expert", stacked=True, is_grad_partial=group.size > 1, init="zeros")
            self.bias = make_parameter((len(names), shape[0]), info)


class Experts(nn.Module):
    """All local experts of one layer."""

    def __init__(
        self,
        model: ModelArgs,
        moe: MoEArgs,
        ps: ParallelState,
        name: str,
        *,
        queue: WeightGradQueue | None = None,
        activations: ActivationPolicy | None = None,
        quantize: Callable[..., QuantizedGemms | None] | None = None,
        kernels: Kernels | None = None,
        grouped_linear: Callable[..., nn.Module | None] | None = None,
        expert_mlp: Callable[..., nn.Module | None] | None = None,
    ):
        """Build the experts.

        Args:
            model: model section.
            moe: MoE section.
            ps: parallel state.
            name: global name.
            queue: queue of deferred weight gradients; None computes them in backward.
            activations: recompute and offload policy of the chunk.
            quantize: builds quantized GEMMs from (name, is_sharded=, is_expert=), or returns None.
            kernels: our kernels.
            grouped_linear, expert_mlp: the LayerFactory's, which may return None.

        Raises:
            ValueError: if the experts or their width cannot be divided evenly.
        """
        super().__init__()
        kernels = kernels or Kernels()
        ffn = moe.moe_ffn_hidden_size or model.ffn_hidden_size
        if ffn % ps.etp.size:
            raise ValueError(
                f"experts of width {ffn} (--moe-ffn-hidden-size) cannot be sharded over "
                f"--expert-tensor-parallel-size {ps.etp.size}"
            )
        if moe.num_experts % ps.ep.size:
            raise ValueError(
                f"--num-experts {moe.num_experts} cannot be divided evenly over "
                f"--expert-model-parallel-size {ps.ep.size}"
            )
        self.activation = make_activation(model)
        self.activation_fns, self.gemms = kernels.expert_activation(self.activation), kernels.grouped_gemms
        self.add_weight_grad = kernels.add_weight_grad
        self.allow_grouped = moe.moe_grouped_gemm
        self.probs_on_input = moe.moe_apply_probs_on_input
        self.queue, self.activations = queue, activations or ActivationPolicy()
        self.etp = ps.etp
        num_local = moe.num_experts // ps.ep.size
        first = ps.ep.rank * num_local
        names = [f"{name}.local_experts.{expert}" for expert in range(first, first + num_local)]
        fc1, fc2 = ([f"{expert}.{linear}" for expert in names] for linear in ("linear_fc1", "linear_fc2"))
        bias, group, parts = model.add_bias_linear, ps.etp, self.activation.in_per_out
        input_size, output_size = moe.expert_widths(model.hidden_size)
        self.linear_fc1 = _ExpertLinear(
            fc1, ffn * parts, input_size, bias, hidden_init(model), group=group, sharded_dim=0, parts=parts
        )
        self.linear_fc2 = _ExpertLinear(fc2, output_size, ffn, bias, residual_init(model), group=group, sharded_dim=1)
        self.quantized = None
        self.pipeline = None
        if expert_mlp is not None:
            self.pipeline = expert_mlp(num_local, (input_size, ffn // ps.etp.size, output_size))
        self.grouped = self._build_grouped_linears(grouped_linear)
        # a library's linears need to know how weights are stored
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
        if self.probs_on_input:
            x_RH = (x_RH * probs_R.unsqueeze(1)).to(x_RH.dtype)
            probs_R = None

        def run(x_RH: Tensor, tensors: Sequence[Tensor]) -> Tensor:
            return self._run(x_RH, probs_R, tokens_per_expert_e, unused, tensors)

        return weights.run(run, x_RH, self._tensors(), self.activations)

    def add_adapters(self, fc1: ExpertLoRA | None, fc2: ExpertLoRA | None) -> None:
        """Add adapters, whose linears compute the experts from then on."""
        options = {
            "allow_grouped": self.allow_grouped,
            "gemms": self.gemms if self.allow_grouped else None,
            "add_weight_grad": self.add_weight_grad,
        }
        self.grouped = nn.ModuleList(GroupedLoRALinear(lora, **options) for lora in (fc1, fc2))

    def _build_grouped_linears(self, build: Callable[..., nn.Module | None] | None) -> nn.ModuleList | None:
        """Build fc1 and fc2 of a library, which share our weights; return None if there are none."""
        if build is None:
            return None
        recomputes_activation = "moe_act" in self.activations.recomputed
        linears = []
        for index, linear in enumerate((self.linear_fc1, self.linear_fc2)):
            num, rows, columns = linear.weight.shape
            linears.append(build(num, columns, rows, save_original_input=index == 1 and recomputes_activation))
        return None if None in linears else nn.ModuleList(linears)

    @property
    def pad_multiple(self) -> int:
        """Multiple to which each expert's tokens are padded where their counts stay on the device."""
        if self.pipeline is not None:
            return self.pipeline.pad_multiple
        return 1 if self.quantized is None else max(gemms.token_multiple for gemms in self.quantized)

    def quantized_weights(self) -> Iterator[tuple[nn.Parameter, QuantizedGemms]]:
        """Yield the stacked weights with their GEMMs, if these are quantized."""
        if self.quantized is not None:
            yield from zip((self.linear_fc1.weight, self.linear_fc2.weight), self.quantized)

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
        if not can_read_counts_on_device(self.linear_fc1.weight, self.linear_fc2.weight, self.gemms):
            return "torch has no grouped GEMM that reads them on this device; --triton-kernels grouped-gemm does"
        return None

    def _run(
        self,
        x_RH: Tensor,
        probs_R: Tensor | None,
        tokens_per_expert_e: Sequence[int] | Tensor,
        unused: int,
        tensors: Sequence[Tensor],
    ) -> Tensor:
        w1, w2, b1, b2 = (*tensors, None, None)[:4]
        inputs = x_RH, probs_R, w1, w2, tokens_per_expert_e
        biases = {"b1_eG": b1, "b2_eH": self._fc2_bias(b2)}
        if self.pipeline is not None and len(x_RH) > unused:
            return pipeline_expert_mlp(
                self.pipeline, x_RH, probs_R, (w1, w2), tokens_per_expert_e, self.activations, unused
            )
        if self.grouped is not None and len(x_RH) > unused:
            return grouped_expert_mlp(
                *inputs,
                tuple(self.grouped),
                self.activation_fns or get_activation_fns(self.activation),
                self.activations,
                pad_multiple=self.grouped[0].pad_multiple,
                **biases,
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
            options = {**biases, "queue": self.queue, "activation_fns": self.activation_fns, "unused": unused}
            if self.quantized is not None:
                # pages hold rows
                options["saves_quantized"] = self.activations.stash is None
                options["grouped"] = self.gemms
                return quantized_expert_mlp(*inputs, self.activation, tuple(self.quantized), **options)
            options |= {"allow_grouped": self.allow_grouped, "gemms": self.gemms}
            options["add_weight_grad"] = self.add_weight_grad
            return expert_mlp(*inputs, self.activation, **options)

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
            moe.moe_shared_expert_intermediate_size,
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

"""The router: which experts take each token, and with what weight.

`TopKRouter` owns the weight and the running counts; an `ExpertSelection`, made when the router is built, decides.
Balancing losses have a closed-form gradient (balancing.py): they are computed without autograd and added to the logits'
gradient, scaled by `PassInputs.grad_scale`. The result is dense, `probs_TE` and `routing_TE`, for every dispatcher.
Where the layer is recomputed, all that is decided, drawn or counted goes through
`ActivationPolicy.cached_for_recompute`: the second pass selects the same experts, and no count or loss is taken twice.

Logits are in the activation dtype or --moe-router-dtype, as in Megatron-Core since 0.18.
Shape letters: S sequence, B microbatch, H hidden, T tokens (= S*B, token s*B + b), E experts, K top-k.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arguments.model import ModelArgs
from arguments.moe import MoEArgs
from moe_trainer.layers.dropout import rng_context
from moe_trainer.layers.init import hidden_init, make_parameter
from moe_trainer.layers.pass_inputs import PLAIN_PASS, PassInputs
from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.moe.balancing import LOSS_NAMES, LossSettings, attach_gradient, balancing_losses, loss_coefficients
from moe_trainer.moe.receive.capacity import drop_beyond_capacity, expert_capacity
from moe_trainer.moe.selections.build import build_selection
from moe_trainer.moe.selections.selection import Choice, FusedTopK, RoutingInputs, SelectionContext
from moe_trainer.ops.attach_loss import Balancing
from moe_trainer.ops.main_grad import can_accumulate_in_fp32, get_main_grad_sum
from moe_trainer.ops.packed_sequences import ValidTokens
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.rng import ShardRNG
from moe_trainer.parallel.state import ParallelState

ROUTER_DTYPES = (("fp32", torch.float32), ("fp64", torch.float64))


class _Gate(torch.autograd.Function):
    """x @ w^T in another dtype than that of x and w, without saving converted copies for backward."""

    @staticmethod
    def forward(ctx, x_TH: Tensor, weight_EH: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        ctx.weight = weight_EH
        if dtype == torch.float32 and x_TH.dtype == weight_EH.dtype and can_accumulate_in_fp32(x_TH):
            return torch.mm(x_TH, weight_EH.t(), out_dtype=dtype)  # equal sums, without copies
        return x_TH.to(dtype) @ weight_EH.to(dtype).t()

    @staticmethod
    def backward(ctx, grad_TE: Tensor):
        x_TH, weight_EH = ctx.saved_tensors
        dtype = grad_TE.dtype
        grad_x = (grad_TE @ weight_EH.to(dtype)).to(x_TH.dtype)
        x_TH, total = x_TH.to(dtype), get_main_grad_sum(ctx.weight, grad_TE)
        if total is None:
            return grad_x, (grad_TE.t() @ x_TH).to(weight_EH.dtype), None
        total.add(grad_TE.t(), x_TH)
        return grad_x, None, None


class _StraightThrough(torch.autograd.Function):
    """Return the replacement; send its gradient to the original."""

    @staticmethod
    def forward(ctx, original: Tensor, replacement: Tensor) -> Tensor:
        return replacement

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


def _counted(routing_TE: Tensor, valid: ValidTokens | None) -> Tensor:
    return routing_TE if valid is None else routing_TE & valid.mask_T.unsqueeze(1)


class TopKRouter(nn.Module):
    """Route tokens to experts.

    Buffers: expert_bias [E] fp32 (persistent) and local_tokens_per_expert [E], after drops as in Megatron-Core but
    before them with --moe-pad-expert-input-to-capacity, with --moe-router-enable-expert-bias;
    global_tokens_per_expert [E] and ga_steps with global_aux_loss; tokens_per_expert [E], selected before drops, with
    --moe-per-layer-logging.

    Attributes:
        selection: chooses experts and weighs them.
        recorder: None, or a list that receives the logits, probs and map of every forward pass.
        given_TK: with --moe-enable-routing-replay, experts of the tokens of the next forward pass, instead of those
            that the router would choose; -1 where it chooses. Probabilities and expert bias follow them, balancing
            losses count what the router would choose, as in Megatron-Core. None: the router chooses all.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    expert_bias: Tensor | None
    local_tokens_per_expert: Tensor
    global_tokens_per_expert: Tensor
    ga_steps: Tensor
    tokens_per_expert: Tensor | None
    loss_sums: Tensor
    dropped: Tensor

    def __init__(
        self,
        model: ModelArgs,
        moe: MoEArgs,
        ps: ParallelState,
        name: str,
        layer_number: int,
        *,
        per_token_loss: bool = False,
        stream: ShardRNG | None = None,
        activations: ActivationPolicy | None = None,
    ):
        """Build the router; `stream` is the generator of this rank's tokens, None for torch's global one."""
        super().__init__()
        self.activations = activations or ActivationPolicy()
        self.stream = stream
        self.moe, self.ps, self.name, self.layer_number = moe, ps, name, layer_number
        self.num_experts, self.topk = moe.expert_count, moe.moe_router_topk
        context = SelectionContext(moe, name, layer_number, ps, self.activations.cached_for_recompute)
        self.selection = build_selection(context)
        self.dtype = dict(ROUTER_DTYPES).get(moe.moe_router_dtype or "")
        # the passes of a repeated layer of multi-token prediction share the losses of one
        is_repeated = model.mtp_use_repeated_layer and layer_number > model.num_layers
        self.num_passes = max(model.num_mtp_depths, 1) if is_repeated else 1
        coefficients = {name: coeff / self.num_passes for name, coeff in loss_coefficients(moe).items()}
        self.loss_settings = LossSettings(
            self.topk, moe.moe_router_score_function, coefficients, moe.moe_z_loss_coeff, per_token_loss
        )
        self.recorder: list | None = None
        self.given_TK: Tensor | None = None
        self.balancing: Balancing | None = None
        init, partial = hidden_init(model), ps.tp.size > 1  # every rank of tp routes its own tokens
        self.weight = make_parameter(
            (self.num_experts, model.hidden_size),
            ParamInfo((f"{name}.weight",), is_grad_partial=partial, init=init.kind, init_std=init.std),
        )
        self.bias = (
            make_parameter((self.num_experts,), ParamInfo((f"{name}.bias",), is_grad_partial=partial, init="zeros"))
            if model.add_bias_linear
            else None
        )
        self._make_buffers()

    @property
    def coefficients(self) -> Mapping[str, float]:
        """Coefficients of the balancing losses, by name."""
        return self.loss_settings.coefficients

    def use_kernels(self, fused_topk: FusedTopK | None, balancing: Balancing | None) -> None:
        """Use kernels for selection and balancing losses, None for plain torch; see selections/build.py."""
        self.selection.use_kernel(fused_topk)
        self.balancing = balancing

    def state_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that a checkpoint stores, by name: the expert bias and those of the selection."""
        if self.expert_bias is not None:
            yield "expert_bias", self.expert_bias
        yield from self.selection.state_buffers()

    def _make_buffers(self):
        def counts(buffer_name, persistent=False, shape=(self.num_experts,)):
            self.register_buffer(buffer_name, torch.zeros(shape, dtype=torch.float32), persistent=persistent)

        if self.moe.moe_router_enable_expert_bias and not self.selection.reads_token_ids:
            counts("expert_bias", persistent=True)
            counts("local_tokens_per_expert")
        else:
            self.register_buffer("expert_bias", None)
        if self.coefficients["global_load_balancing_loss"]:
            counts("global_tokens_per_expert")
            counts("ga_steps", shape=())
        if self.moe.moe_per_layer_logging:
            counts("tokens_per_expert")
        else:
            self.register_buffer("tokens_per_expert", None)
        counts("loss_sums", shape=(len(LOSS_NAMES),))
        counts("dropped", shape=())
        self.fixed_bias, self.bias_stream = None, None
        if self.moe.moe_router_force_biased is not None:
            self.bias_stream = torch.Generator(device="cpu").manual_seed(self.layer_number)
            if self.moe.moe_router_force_biased < 0:
                self.fixed_bias = self._draw_bias()

    def _apply(self, fn, recurse=True):
        # counts and biases stay fp32 whatever the model is cast to: bf16 counts stop growing at 256
        super()._apply(fn, recurse)
        for buffer_name, buffer in self.named_buffers(recurse=False):
            setattr(self, buffer_name, buffer.float() if buffer.is_floating_point() else buffer)
        return self

    def draw_forced_logits(self, num_tokens: int, device: torch.device) -> Tensor | None:
        """Draw the logits that replace the router's with --moe-router-force-load-balancing; return None without it.

        Each rank of tp draws for its own tokens. A recomputed region reuses the draw of its first pass.
        """
        if not self.moe.moe_router_force_load_balancing:
            return None
        generator = None if self.stream is None else self.stream.generator(device)
        return self.activations.cached_for_recompute(
            lambda: torch.randn(
                num_tokens, self.num_experts, dtype=self.dtype or self.weight.dtype, device=device, generator=generator
            )
        )

    def forward(self, x_SBH: Tensor, inputs: PassInputs = PLAIN_PASS) -> tuple[Tensor, Tensor]:
        """Route the tokens of one microbatch.

        Args:
            x_SBH: tokens.
            inputs: forced logits are drawn here if they are needed and not given.

        Returns:
            probs_TE in the dtype of the logits and routing_TE bool.

        Communication: E counts over tp_cp (aux_loss, seq_aux_loss: B*E) or tp_dp_cp (global_aux_loss).
        """
        active, valid, forced_TE = self.training and torch.is_grad_enabled(), inputs.valid, inputs.forced_TE
        x_TH = x_SBH.reshape(-1, x_SBH.shape[-1])
        if forced_TE is None:
            forced_TE = self.draw_forced_logits(x_TH.shape[0], x_TH.device)
        logits_TE = self._apply_forced_routing(self._logits(x_TH, active), forced_TE)
        needs_losses = active and (any(self.coefficients.values()) or self.moe.moe_z_loss_coeff is not None)
        raw_logits_TE = logits_TE.detach()
        choice = self.selection.preselect(raw_logits_TE)
        if needs_losses:
            grad_TE = self.activations.cached_for_recompute(
                lambda: self._losses(raw_logits_TE, x_SBH.shape, choice, valid)
            )
            attach = attach_gradient if self.balancing is None else self.balancing.attach
            logits_TE = attach(logits_TE, grad_TE, inputs.grad_scale)
        routed_by = RoutingInputs(self.training, active, self.expert_bias, inputs.token_ids_T, self.given_TK)
        probs_TE, routing_TE = self.selection.route(logits_TE, choice, routed_by)
        if self.tokens_per_expert is not None and active and not self.activations.is_recomputing:
            self.tokens_per_expert += _counted(routing_TE, valid).sum(0)
        chosen_TE = routing_TE
        factor = self.moe.moe_expert_capacity_factor
        if factor is not None and factor >= 0:
            if valid is not None:  # padding takes no capacity from tokens
                valid_T1 = valid.mask_T.unsqueeze(1)
                probs_TE, routing_TE = probs_TE * valid_T1, routing_TE & valid_T1
            probs_TE, routing_TE = self._drop_tokens(probs_TE, routing_TE, factor)
        if not self.activations.is_recomputing:
            if self.expert_bias is not None and active:
                # padded to capacity, all experts have equally many tokens, which says nothing about the choice
                loads_TE = chosen_TE if self.moe.moe_pad_expert_input_to_capacity else routing_TE
                self.local_tokens_per_expert += _counted(loads_TE, valid).sum(0)
            if self.recorder is not None:
                self.recorder.append({"logits": raw_logits_TE, "probs": probs_TE.detach(), "map": routing_TE})
        return probs_TE, routing_TE

    def _logits(self, x_TH: Tensor, active: bool) -> Tensor:
        eps = self.moe.moe_input_jitter_eps
        if eps is not None and active:
            with rng_context(self.stream, x_TH.device):
                x_TH = x_TH * torch.empty_like(x_TH).uniform_(1.0 - eps, 1.0 + eps)
        dtype = self.dtype or self.weight.dtype
        if dtype == x_TH.dtype == self.weight.dtype and not hasattr(self.weight, "main_grad_sum"):
            logits_TE = F.linear(x_TH, self.weight)
        else:
            logits_TE = _Gate.apply(x_TH, self.weight, dtype)
        return logits_TE if self.bias is None else logits_TE + self.bias.to(logits_TE.dtype)

    def _draw_bias(self) -> Tensor:
        spread = abs(self.moe.moe_router_force_biased or 0.0)
        return torch.empty(self.num_experts, device="cpu").normal_(0.0, spread, generator=self.bias_stream)

    def _apply_forced_routing(self, logits_TE: Tensor, forced_TE: Tensor | None) -> Tensor:
        """Apply the benchmark modes: random logits (balanced), or an expert bias of a given spread (unbalanced)."""
        if forced_TE is not None:
            logits_TE = _StraightThrough.apply(logits_TE, forced_TE.to(logits_TE.dtype))
        if self.moe.moe_router_force_biased is not None:
            bias_E = (
                self.activations.cached_for_recompute(self._draw_bias) if self.fixed_bias is None else self.fixed_bias
            )
            logits_TE = logits_TE + bias_E.to(logits_TE)
        return logits_TE

    def margin(self, logits_TE: Tensor) -> Tensor | None:
        """Return the routing margin of tokens; None if selection does not order a token's own scores."""
        return self.selection.margin(logits_TE, self.expert_bias)

    def _losses(
        self, logits_TE: Tensor, shape: torch.Size, choice: Choice | None, valid: ValidTokens | None = None
    ) -> Tensor:
        """Accumulate the losses and return their gradient; `choice` is that of `preselect`."""
        running = None
        if self.coefficients["global_load_balancing_loss"]:
            running = (self.global_tokens_per_expert, self.ga_steps)
        kernels = self.balancing if valid is None and not self.selection.has_own_counts else None
        losses = balancing_losses(
            logits_TE,
            self.loss_settings,
            num_sequences=shape[1],
            running=running,
            ps=self.ps,
            chosen_TE=self.selection.counted(logits_TE, choice) if kernels is None else None,
            kernels=kernels,
            valid=valid,
        )
        self.loss_sums.add_(losses.values, alpha=1 / self.num_passes)
        return losses.grad_TE

    def _drop_tokens(self, probs_TE: Tensor, routing_TE: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        moe = self.moe
        capacity = expert_capacity(routing_TE.shape[0], self.topk, self.num_experts, factor)
        probs_TE, remaining_TE = drop_beyond_capacity(
            probs_TE,
            routing_TE,
            capacity,
            moe.moe_token_drop_policy,
            moe.moe_pad_expert_input_to_capacity,
            cache_fn=self.activations.cached_for_recompute,
        )
        if self.training and torch.is_grad_enabled() and not self.activations.is_recomputing:
            self.dropped += (routing_TE & ~remaining_TE).sum()
        return probs_TE, remaining_TE

"""One transformer layer: an attention sublayer and an MLP sublayer, each norm, module and residual.

The output of a sublayer may have a norm too (--post-self-attn-layernorm, --post-mlp-layernorm), or its output alone
(--disable-pre-layernorm). The residual stream itself is never normalized.

A layer of a hybrid model (--hybrid-layer-pattern) has one of the two, or a Mamba mixer instead of attention.

Shapes: S sequence (this rank's part under sequence parallelism), B microbatch, H hidden.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from arguments import Arguments
from arguments.layer_pattern import has_mlp, mixing_sublayer
from arguments.mechanisms.sublayers import MAMBA, SublayerDeclaration
from moe_trainer.layers.dropout import Dropout
from moe_trainer.layers.hyper_connection import HyperConnection
from moe_trainer.layers.layer_factory import LayerFactory
from moe_trainer.layers.mlp import MLP
from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.layers.rotary import Tables
from moe_trainer.moe.layer import MoELayer, PreprocessedTokens, RoutingOutput
from moe_trainer.parallel.state import ParallelState


def load_class(sublayer: SublayerDeclaration) -> Callable[..., nn.Module]:
    """Import the class of a sublayer that mixes positions."""
    module, name = sublayer.built_by.split(".")
    found: Callable[..., nn.Module] = getattr(importlib.import_module(f"moe_trainer.layers.{module}"), name)
    return found


class TransformerLayer(nn.Module):
    """One transformer layer, dense or MoE."""

    def __init__(
        self, args: Arguments, ps: ParallelState, *, name: str, layer_number: int, is_moe: bool, factory: LayerFactory
    ):
        """Build the layer; `name` is global (decoder.layers.0), `layer_number` counts from 1, MTP layers last."""
        super().__init__()
        model, sp, factory = args.model, args.parallel.sequence_parallel, factory.for_layer(layer_number)
        has_local_tokens = sp and ps.tp.size > 1
        self.name, self.activations, self.graphs = name, factory.activations, factory.graphs
        self.residual_after_norm = model.apply_residual_connection_post_layernorm
        self.residual_multiplier = model.residual_multiplier
        self.fp32_residual = model.fp32_residual_connection
        self.hidden_dropout = Dropout(model.hidden_dropout, factory.stream if has_local_tokens else None)
        number = layer_number - 1
        mixer, self.has_mlp = mixing_sublayer(model, number), has_mlp(model, number)
        self.has_mixer, self.is_mamba = mixer is not None, mixer is MAMBA
        self.is_sparse = mixer is not None and mixer.selects_keys  # with the indexer's loss
        options: dict[str, Any] = {"layer_number": layer_number, "factory": factory, "sequence_parallel": sp}
        norm = partial(factory.norm, model.hidden_size, model, partial=has_local_tokens)
        self.post_self_attn_layernorm = self.post_mlp_layernorm = None
        if mixer is MAMBA:
            self.norm = norm(name=f"{name}.norm")
            self.mixer = load_class(mixer)(model, ps, name=f"{name}.mixer", **options)
        elif mixer is not None:
            self.input_layernorm = norm(name=f"{name}.input_layernorm") if model.pre_layernorm else None
            loss = {"per_token_loss": args.training.calculate_per_token_loss} if self.is_sparse else {}
            make = factory.self_attention or load_class(mixer)
            self.self_attention = make(model, ps, name=f"{name}.self_attention", **options, **loss)
            if model.post_self_attn_layernorm:
                self.post_self_attn_layernorm = norm(name=f"{name}.post_self_attn_layernorm")
        self.mixer_hyper_connection = self.self_attention_hyper_connection = self.mlp_hyper_connection = None
        for sublayer in self.sublayer_names if model.enable_hyper_connections else ():
            leaf = f"{sublayer}_hyper_connection"
            setattr(self, leaf, HyperConnection(model, name=f"{name}.{leaf}", partial=has_local_tokens))
        self.is_moe = is_moe
        self.mlp: Any = None
        if self.has_mlp:
            self.pre_mlp_layernorm = norm(name=f"{name}.pre_mlp_layernorm") if model.pre_layernorm else None
            self.mlp = self._build_mlp(args, ps, layer_number, factory)
            if model.post_mlp_layernorm:
                self.post_mlp_layernorm = norm(name=f"{name}.post_mlp_layernorm")

    def _build_mlp(self, args: Arguments, ps: ParallelState, layer_number: int, factory: LayerFactory) -> nn.Module:
        model, sp, name = args.model, args.parallel.sequence_parallel, f"{self.name}.mlp"
        if self.is_moe:
            return (factory.moe or MoELayer)(
                model,
                args.moe,
                ps,
                name=name,
                layer_number=layer_number,
                factory=factory,
                sequence_parallel=sp,
                per_token_loss=args.training.calculate_per_token_loss,
            )
        return (factory.mlp or MLP)(
            model,
            model.ffn_hidden_size,
            name=name,
            group=ps.tp,
            factory=factory,
            bias=model.add_bias_linear,
            sequence_parallel=sp,
        )

    @property
    def mixing_modules(self) -> tuple[nn.Module | None, nn.Module]:
        """The norm before, and the module that mix positions; only with `has_mixer`."""
        return (self.norm, self.mixer) if self.is_mamba else (self.input_layernorm, self.self_attention)

    @property
    def kind(self) -> str:
        """The classes of its sublayers, for the log."""
        return f"layers of {' and '.join(type(module).__name__ for module in self.sublayers.values())}"

    @property
    def sublayer_names(self) -> list[str]:
        """The names in the layer of the modules that write to the residual stream."""
        return [("mixer" if self.is_mamba else "self_attention")] * self.has_mixer + ["mlp"] * self.has_mlp

    @property
    def sublayers(self) -> dict[str, nn.Module]:
        """The modules that write to the residual stream, by their names in the layer."""
        return {name: getattr(self, name) for name in self.sublayer_names}

    def forward(self, x_SBH: Tensor, rope: Tables | None, inputs: PassInputs) -> Tensor:
        """Run the layer on the previous one's output; `rope` is its cos and sin."""
        inputs = replace(inputs, grad_scale=self.graphs.scale_tensor(inputs.grad_scale))
        forced = self.mlp.draw_forced_logits(x_SBH) if self.is_moe else ()

        def run(x_SBH: Tensor, *forced: Tensor) -> Tensor:
            if self.has_mixer:
                x_SBH = self._attention_sublayer(x_SBH, rope, inputs)
            return self._mlp_sublayer(x_SBH, inputs, forced) if self.has_mlp else x_SBH

        if not self.graphs.is_captured("layer"):
            return run(x_SBH, *forced)
        return self.graphs.run("layer", run, [self], x_SBH, *forced, kind=self.kind)

    # Each sublayer is a function of tensors that graphs.run captures as a part; recompute and offload scopes are
    # inside.

    def _attention_sublayer(self, x_SBH: Tensor, rope: Tables | None, inputs: PassInputs) -> Tensor:
        (norm, attention), post_norm = self.mixing_modules, self.post_self_attn_layernorm
        connection = self.mixer_hyper_connection if self.is_mamba else self.self_attention_hyper_connection

        def run(x_SBH: Tensor) -> Tensor:
            read_SBH, weights = self._read_streams(connection, x_SBH)
            normed, scope = self._normalize("attn_norm", norm, read_SBH)
            with scope:
                y_SBH = attention(normed, rope, inputs.visible, *([inputs.grad_scale] if self.is_sparse else ()))
            return self._add_residual(x_SBH, normed, post_norm, y_SBH, weights)

        part = "mamba" if self.is_mamba else "attn"
        return self.graphs.run(part, run, _present(norm, attention, post_norm), x_SBH, kind=self.kind)

    def _mlp_sublayer(self, x_SBH: Tensor, inputs: PassInputs, forced: tuple[Tensor, ...]) -> Tensor:
        """Run norm, MLP or experts, and residual; `forced` are logits that replace the router's, or nothing."""
        norm, post_norm = self.pre_mlp_layernorm, self.post_mlp_layernorm

        def read(*forced: Tensor) -> PassInputs:
            return replace(inputs, forced_TE=forced[0]) if forced else inputs

        def run(x_SBH: Tensor, *forced: Tensor) -> Tensor:
            read_SBH, weights = self._read_streams(self.mlp_hyper_connection, x_SBH)
            normed, scope = self._normalize("mlp_norm", norm, read_SBH)
            with scope:
                if not self.is_moe:
                    y_SBH = self.activations.run_in_chunks("mlp", self.mlp, normed)
                elif self.activations.mlp_chunks > 1:  # the layer routes all tokens, then runs its experts in chunks
                    y_SBH = self.mlp(normed, read(*forced))
                else:
                    y_SBH = self.activations.recompute_region("moe", lambda x: self.mlp(x, read(*forced)), normed)
            return self._add_residual(x_SBH, normed, post_norm, y_SBH, weights)

        def route(x_SBH: Tensor, *forced: Tensor) -> tuple[Tensor | None, RoutingOutput]:
            normed, scope = self._normalize("mlp_norm", norm, x_SBH)
            with scope:
                routed = self.mlp.route(normed, read(*forced))
            return normed if self.residual_after_norm or self.mlp.overlap_shared else None, routed

        if self.is_moe and self.graphs.is_captured("moe_router"):
            modules = _present(norm, *self.mlp.routing_modules)
            normed, routed = self.graphs.run("moe_router", route, modules, x_SBH, *forced, kind=self.kind)
            self.graphs.record(self.kind, "moe_preprocess", isinstance(routed, PreprocessedTokens))
            self.graphs.record(self.kind, "dispatch and experts", False)
            y_SBH = self.mlp(x_SBH if normed is None else normed, inputs, routed)
            return self._add_residual(x_SBH, normed, post_norm, y_SBH)
        part = "moe" if self.is_moe else "mlp"
        return self.graphs.run(part, run, _present(norm, self.mlp, post_norm), x_SBH, *forced, kind=self.kind)

    def _normalize(
        self, part: str, norm: nn.Module | None, x_SBH: Tensor
    ) -> tuple[Tensor, AbstractContextManager[None]]:
        """Return a sublayer's input, and the scope in which the sublayer reads it."""
        if norm is None:
            return x_SBH, nullcontext()
        with self.activations.offload_scope(part):
            return self.activations.recompute_output("layernorm", norm, x_SBH)

    @staticmethod
    def _read_streams(connection: HyperConnection | None, x_SBH: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return a sublayer's input, and what `_add_residual` needs of the hyper-connection."""
        if connection is None:
            return x_SBH, ()
        x_SBH, *weights = connection(x_SBH)
        return x_SBH, tuple(weights)

    def _add_residual(
        self,
        x_SBH: Tensor,
        normed: Tensor | None,
        post_norm: nn.Module | None,
        y_SBH: Tensor,
        weights: tuple[Tensor, ...] = (),
    ) -> Tensor:
        if weights:
            post_SBN1, mixing_SBNN = weights
            y_SBF = self.hidden_dropout(HyperConnection.spread(y_SBH, post_SBN1))
            return HyperConnection.mix(x_SBH, mixing_SBNN) + y_SBF
        if post_norm is not None:
            y_SBH = post_norm(y_SBH)
        residual = x_SBH
        if self.residual_after_norm:
            assert normed is not None
            residual = normed
        y_SBH = self.hidden_dropout(y_SBH)
        residual = residual.float() if self.fp32_residual else residual
        return torch.add(residual, y_SBH, alpha=self.residual_multiplier)


def _present(*modules: nn.Module | None) -> list[nn.Module]:
    return [module for module in modules if module is not None]

"""Build Megatron-Core's own GPT model on a CPU, with the flags and the weights of a model of this program.

The modules are those of the installed `megatron-core` package. What its code asks of CUDA has stand-ins while the
context of `on_cpu` is open: streams and events do nothing, the device is the CPU. Its plain attention, which knows
one head size, is given the widths of latent attention. Its experts run one after another (`SequentialMLP`), its
tokens take its all-to-all dispatcher over one gloo rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from arguments import Arguments
from arguments.container import OPTIONS
from arguments.mechanisms.dispatchers import ALLTOALL
from moe_trainer.checkpoint.rank_memory import LOCAL_EXPERT, global_name
from moe_trainer.errors import UserError

# fields of Megatron-Core's config whose flag has another name there or here, and those that choose kernels of devices
_WITHOUT_KERNELS = MappingProxyType(
    {
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "moe_grouped_gemm": False,
        **ALLTOALL.selected_by,
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "cuda_graph_impl": "none",
        "attention_backend": None,
    }
)

_RENAMED = frozenset(
    "num_experts swiglu squared_relu group_query_attention yarn_original_max_position_embeddings yarn_beta_fast "
    "yarn_beta_slow max_position_embeddings position_embedding_type rotary_base rotary_percent "
    "untie_embeddings_and_output_weights make_vocab_size_divisible_by".split()
)
"""Flags that are no field of that config under their name, and reach the model another way."""


class _NoStream:
    """A CUDA stream or event of a machine without CUDA: every method does nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any):
        pass

    def __getattr__(self, name: str) -> Callable[..., _NoStream]:
        return lambda *_args, **_kwargs: self

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass


def megatron_core_version() -> str:
    """Import Megatron-Core and return its version.

    Raises:
        UserError: if it is not installed, or cannot be imported.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TransformerEngine and apex are missing
        try:
            import megatron.core.models.gpt
        except ImportError as error:
            raise UserError(
                f"{sys.executable} cannot import Megatron-Core ({error}): pip install megatron-core"
            ) from error
    return megatron.core.__version__


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let Megatron-Core compute on the CPU, as the only rank of a gloo group, while the context is open."""
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TransformerEngine and apex are missing

        def stand_in(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))

        for name in ("Stream", "Event", "current_stream", "default_stream", "stream"):
            stand_in(torch.cuda, name, _NoStream)
        stand_in(torch.cuda, "current_device", lambda: torch.device("cpu"))
        stand_in(Tensor, "cuda", lambda tensor, *_args, **_kwargs: tensor)

        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
        from megatron.core.transformer import multi_latent_attention
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.core.transformer.moe import moe_utils

        # names that these modules have only with TransformerEngine
        if not hasattr(moe_utils, "te_general_gemm"):
            stand_in(moe_utils, "te_general_gemm", None)
        if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
            stand_in(multi_latent_attention, "TELinear", type("TELinear", (), {}))
        # its states are those of CUDA generators; without dropout nothing is drawn
        stand_in(CudaRNGStatesTracker, "fork", lambda *_args: contextlib.nullcontext())
        stand_in(DotProductAttention, "__init__", _with_head_sizes(DotProductAttention.__init__))

        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        stack.callback(dist.destroy_process_group)
        parallel_state.initialize_model_parallel()
        stack.callback(parallel_state.destroy_model_parallel)
        yield


def _with_head_sizes(init: Callable[..., None]) -> Callable[..., None]:
    """Return the attention's `__init__`, which also takes the head sizes of keys and values."""

    def wrapped(self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any):
        init(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return wrapped


def config_fields(args: Arguments, known: Collection[str]) -> dict[str, Any]:
    """Return the fields of Megatron-Core's config by name: flags have the same names, but for those given here.

    Args:
        args: flags of this program.
        known: fields of the config class.
    """
    from megatron.core.activations import squared_relu

    model, moe = args.model, args.moe
    sections = (model, moe, args.parallel, args.training, args.precision)
    flags = {field.name: getattr(section, field.name) for section in sections for field in dataclasses.fields(section)}
    activation = squared_relu if model.squared_relu else F.silu if model.swiglu else F.gelu
    flags |= {
        **_WITHOUT_KERNELS,
        "num_moe_experts": moe.num_experts,
        "gated_linear_unit": model.swiglu,
        "activation_func": activation,
        "num_query_groups": model.num_query_groups if model.group_query_attention else None,
        "original_max_position_embeddings": model.yarn_original_max_position_embeddings,
        "beta_fast": model.yarn_beta_fast,
        "beta_slow": model.yarn_beta_slow,
        "params_dtype": torch.float32,
    }
    unknown = [
        option.spellings[0]
        for dest, option in OPTIONS.items()
        if option.section in ("model", "moe") and not {"never", "unless given"}.intersection(option.restore)
        if dest not in known and dest not in _RENAMED
        if flags[dest] != option.default and flags[dest] is not None
    ]
    if unknown:
        raise ValueError(f"Megatron-Core {megatron_core_version()} has no {', '.join(sorted(unknown))}")
    # None is "not given"; of this field it is a meaning, and not Megatron-Core's default
    return {
        name: value for name, value in flags.items() if name in known and (value is not None or name == "q_lora_rank")
    }


def build_megatron_model(args: Arguments, vocab_size: int) -> nn.Module:
    """Build Megatron-Core's GPTModel for these flags, with initial weights; inside `on_cpu`.

    Args:
        args: flags of this program.
        vocab_size: rows of the embedding, with padding.

    Raises:
        ValueError: if Megatron-Core has no such model, or not without CUDA and TransformerEngine.
    """
    try:
        return _build(args, vocab_size)
    except AssertionError as error:
        raise ValueError(f"Megatron-Core {megatron_core_version()} cannot build this model here: {error}") from error


def _build(args: Arguments, vocab_size: int) -> nn.Module:
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    model = args.model
    config_class = MLATransformerConfig if model.multi_latent_attention else TransformerConfig
    known = {field.name for field in dataclasses.fields(config_class) if field.init}
    config = config_class(**config_fields(args, known))
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, False, normalization=config.normalization)
    mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, False) if config.mtp_num_layers else None
    return GPTModel(
        config,
        spec,
        vocab_size,
        model.max_position_embeddings,
        position_embedding_type=model.position_embedding_type,
        rotary_base=model.rotary_base,
        rotary_percent=model.rotary_percent,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        mtp_block_spec=mtp,
    )


def take(ours: Mapping[str, Tensor], name: str) -> Tensor | None:
    """Return the tensor of this program's model that Megatron-Core calls `name`; of one expert a view."""
    name = global_name(name, 0, 0).replace("core_attention.softmax_offset", "softmax_offset")
    expert = LOCAL_EXPERT.search(name)
    whole = ours.get(LOCAL_EXPERT.sub(".experts.", name))
    return whole[int(expert[1])] if whole is not None and expert else whole


def copy_weights(network: nn.Module, megatron: nn.Module) -> None:
    """Give Megatron-Core's model the weights and expert biases of this program's.

    Raises:
        ValueError: if a tensor of either model has no counterpart.
    """
    ours = dict(network.named_parameters()) | dict(network.named_buffers())
    missing = []
    copied = 0
    with torch.no_grad():
        for name, tensor in megatron.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor):  # extra state
                continue
            source = take(ours, name)
            if source is None or source.shape != tensor.shape:
                missing.append(name)
                continue
            tensor.copy_(source)
            copied += tensor.numel() if isinstance(tensor, nn.Parameter) else 0
    expected = sum(each.numel() for each in network.parameters())
    if missing or copied != expected:
        raise ValueError(
            f"{copied:,} of {expected:,} parameters have a counterpart in Megatron-Core's model"
            + (f"; not found here: {', '.join(missing[:5])}" if missing else "")
        )


def take_logged_losses() -> dict[str, Tensor]:
    """Return the sums over layers of the losses that Megatron-Core has logged, by name, and clear them."""
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    balancing, prediction = get_moe_layer_wise_logging_tracker(), MTPLossLoggingHelper.tracker
    losses = {name: entry["values"].double().sum() for name, entry in balancing.items()}
    if "values" in prediction:
        losses["mtp loss"] = prediction["values"].double().sum()
    balancing.clear()  # both are of the size of the first model
    prediction.clear()
    return losses

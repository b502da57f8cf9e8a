"""Build a model: on the meta device first, then storage and initial values parameter by parameter.

Initialization needs no extra memory and depends on (seed, name) only: every mapping starts from the same weights.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import Parameter

from arguments import Arguments
from arguments.layer_pattern import is_linear
from arguments.mechanisms.formats import list_widths, quantized_format
from arguments.mechanisms.implementations import TRANSFORMER_ENGINE
from arguments.mechanisms.sublayers import variant_of
from arguments.stage_layout import ChunkLayout, chunk_layouts, embedding_stages
from arguments.vocabulary import VOCABULARY_KEYS
from moe_trainer.backends import BackendPolicy
from moe_trainer.errors import UserError
from moe_trainer.layers import te
from moe_trainer.layers.kernels import Kernels, select_kernels, with_delta_rule
from moe_trainer.layers.layer_factory import LayerFactory, select_layer_factory
from moe_trainer.layers.qk_clip import track_max_logits
from moe_trainer.layers.tp_overlap import TpOverlap
from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.memory.cuda_graph import CudaGraphs
from moe_trainer.memory.offload import ActivationOffload
from moe_trainer.memory.paged_stash import PagedStash
from moe_trainer.model.custom_layers import apply_spec
from moe_trainer.model.lora import add_adapters
from moe_trainer.model.transformer import Transformer
from moe_trainer.moe.dispatch.base import TokenDispatcher
from moe_trainer.moe.dispatch.flex import DispatchBufferSpec
from moe_trainer.moe.dispatch.select import build_dispatcher
from moe_trainer.moe.layer import MoELayer
from moe_trainer.moe.selections.build import select_fused_topk
from moe_trainer.ops.attach_loss import Balancing
from moe_trainer.parallel.overlap_threads import AlternatingExecutor
from moe_trainer.parallel.params import get_param_info, set_param_info
from moe_trainer.parallel.rng import ShardRNG, init_parameters
from moe_trainer.parallel.state import ParallelState
from moe_trainer.parallel.weight_grads import WeightGradQueue
from moe_trainer.quantization.config import QuantizationConfig

logger = logging.getLogger(__name__)

# fp64 is for scripts/prove_layout.py
DTYPES = (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp64", torch.float64))


def build_chunks(
    args: Arguments,
    ps: ParallelState,
    padded_vocab_size: int,
    device: torch.device | str = "cpu",
    *,
    will_be_loaded: bool = False,
) -> list[Transformer]:
    """Return this rank's initialized model chunks, one per virtual stage; on device "meta" they have no storage.

    With `will_be_loaded` the weights are zero, since a checkpoint replaces them. Those of the vocabulary are drawn: a
    checkpoint may lack rows of its padding.
    """
    device = torch.device(device)
    dtype = dict(DTYPES)[args.precision.params_dtype_name]
    cuda = device.type == "cuda"
    backends = BackendPolicy(
        args.precision.on_missing_backend,
        args.typed,
        cuda,
        missing=[],
        capability=torch.cuda.get_device_capability(device) if cuda else (0, 0),
    )
    kernels = select_kernels(args.precision.triton_kernels, backends, args.model.unfused_operations)
    if any(is_linear(args.model, number) for number in range(args.model.num_layers)):
        kernels = with_delta_rule(kernels, args.precision.triton_kernels, args.model, dtype, backends)
    factory = _select_factory(args, ps, dtype, device, backends, kernels)
    parallel = args.parallel
    layouts = chunk_layouts(args.model, parallel)
    assert len(layouts) == ps.pp.size, f"the flags define {len(layouts)} pipeline stages, there are {ps.pp.size}"
    shared = len(embedding_stages(layouts, not args.model.untie_embeddings_and_output_weights)) > 1
    overlap_executor = (
        AlternatingExecutor() if parallel.overlap_moe_expert_parallel_comm or parallel.has_wgrad_in_ep_overlap else None
    )
    stash = _make_stash(args, device, kernels)
    chunks = []
    for layout in layouts[ps.pp.rank]:
        has_queue = parallel.has_deferred_wgrad or (parallel.has_deferred_head_wgrad and layout.has_loss)
        queue = WeightGradQueue() if has_queue else None
        stream = _dropout_stream(args.training.seed, ps, layout) if ps.tp.size > 1 else None
        with torch.device("meta"):
            factory_of_chunk = factory.for_chunk(
                queue,
                stream,
                overlap_executor,
                _make_activation_policy(args, ps, device, stash, stream),
                QuantizationConfig.from_args(
                    args.precision, args.model, args.training.seed, ps, args.has_quantized_params
                ),
                CudaGraphs(
                    args.training.captured_modules if cuda else frozenset(),
                    device,
                    warmup=args.training.cuda_graph_warmup_steps,
                    queue=queue,
                ),
            )
            chunk = Transformer(
                args,
                ps,
                padded_vocab_size,
                factory_of_chunk,
                layout,
                shared_embedding=shared,
                params_dtype=dtype,
                device=device,
            )
            add_adapters(chunk, args.model, stream)
        drawn = VOCABULARY_KEYS if will_be_loaded else ("",)
        _materialize(chunk, device, dtype, args.training.seed, drawn)
        chunk.make_hash_tables(device)
        if device.type != "meta" and not will_be_loaded:
            _check_initialized(chunk)
        chunks.append(chunk)
    if args.moe.num_experts and device.type != "meta":
        dispatcher = build_dispatcher(args.moe, ps, _dispatch_buffer_spec(args, ps, dtype, device), backends, kernels)
        layers = [layer for chunk in chunks for layer in chunk.moe_layers()]
        attach_dispatcher(layers, dispatcher, select_fused_topk(args.moe, backends, kernels), kernels.balancing)
    if args.model.qk_clip or args.output.log_max_attention_logit:
        track_max_logits(chunks)
    backends.check()
    _log_model(chunks, device, factory)
    return chunks


def attach_dispatcher(
    layers: Sequence[MoELayer],
    dispatcher: TokenDispatcher,
    fused_topk: Callable | None = None,
    balancing: Balancing | None = None,
) -> None:
    """Set the dispatcher of every MoE layer of a model, and the kernels of its router.

    Raises:
        ValueError: if a CUDA graph holds dropless experts whose token counts cannot stay on the device.
    """
    for layer in layers:
        layer.router.use_kernels(fused_topk, balancing)
    problems = {problem for layer in layers if (problem := layer.set_dispatcher(dispatcher)) is not None}
    dispatcher.set_budgets([budget for layer in layers for budget in layer.receive.budgets])
    for problem in sorted(problems):
        logger.info(
            "--moe-expert-rank-capacity-factor: every MoE layer still synchronizes with the host for token counts: %s",
            problem,
        )


def _dropout_stream(seed: int, ps: ParallelState, layout: ChunkLayout) -> ShardRNG:
    """Return the chunk's random stream, which differs between tensor-parallel ranks."""
    first = layout.layers[:1]
    return ShardRNG(
        seed, "dropout", f"pp {ps.pp.rank}", f"first layer {first}", f"dp_cp {ps.dp_cp.rank}", f"tp {ps.tp.rank}"
    )


def _select_factory(
    args: Arguments,
    ps: ParallelState,
    dtype: torch.dtype,
    device: torch.device,
    backends: BackendPolicy,
    kernels: Kernels,
) -> LayerFactory:
    """Return what makes the layers, and make the buffers that they share."""
    overlap = TpOverlap.from_args(args.parallel)
    factory = select_layer_factory(
        args,
        ps,
        backends,
        kernels,
        overlap,
    )
    if args.training.spec:
        factory = apply_spec(args.training.spec, factory, args)
    if overlap is not None and factory.name == TRANSFORMER_ENGINE.key and device.type != "meta":
        _initialize_userbuffers(args, ps, dtype, overlap)
    if variant_of(args.model).selects_keys and args.model.dsa_kernel_backend != "none":
        backends.should_use(
            ("dsa_kernel_backend",),
            flag=f"--dsa-kernel-backend {args.model.dsa_kernel_backend}",
            problem="this version has no binding to that library",
            remedy="Use --dsa-kernel-backend none",
            instead="torch's own GEMMs",
        )
    return factory


def _log_model(chunks: list[Transformer], device: torch.device, factory: LayerFactory) -> None:
    count = sum(param.numel() for chunk in chunks for param in chunk.parameters())
    logger.info(
        "model: %s parameters on this rank (%s) in %s, %s layers",
        f"{count:,}",
        device,
        str(chunks[0].params_dtype)[6:],
        factory.name,
    )
    if device.type == "cpu" and any(chunk.quantized for chunk in chunks):
        logger.info(
            "%s GEMMs on CPU are computed in fp32 from quantized operands (slower, equal results)", list_widths("and")
        )


def _initialize_userbuffers(args: Arguments, ps: ParallelState, dtype: torch.dtype, overlap: TpOverlap) -> None:
    """Make TransformerEngine's buffers for the linears of a microbatch."""
    precision = args.precision
    of_samples = (args.data.seq_length or 1) * (args.training.micro_batch_size or 1)
    tokens = (args.max_packed_tokens or of_samples) // ps.cp.size
    quantized = quantized_format(precision) is not None
    ends = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    te.initialize_userbuffers(
        (tokens, args.model.hidden_size),
        ps.tp.size,
        dtype,
        quantized=quantized,
        unquantized=not quantized or precision.first_last_layers_bf16 and any(ends),
        config=overlap.config,
        backend=args.parallel.tp_comm_bootstrap_backend,
    )


def _dispatch_buffer_spec(
    args: Arguments, ps: ParallelState, dtype: torch.dtype, device: torch.device
) -> DispatchBufferSpec:
    """Return the largest dispatch of a rank: its tokens of one microbatch, sharded over tp and cp."""
    sequences = max(args.training.micro_batch_size or 1, args.training.eval_micro_batch_size or 1)
    tokens = -(-(args.data.seq_length or 1) // ps.tp_cp.size) * sequences
    if args.max_packed_tokens is not None:
        tokens = -(-args.max_packed_tokens // ps.tp_cp.size)
    return DispatchBufferSpec(
        args.moe.expert_widths(args.model.hidden_size)[0],
        tokens,
        dtype,
        device,
        args.training.deterministic_mode,
        args.parallel.high_priority_a2a_comm_stream,
    )


def _make_stash(args: Arguments, device: torch.device, kernels: Kernels) -> PagedStash | None:
    """Return the stash that the chunks of a rank share."""
    moe = args.moe
    if not moe.moe_paged_stash or device.type == "meta":
        return None
    return PagedStash(
        device,
        moe.moe_paged_stash_page_size,
        moe.moe_paged_stash_buffer_size_factor_cuda,
        moe.moe_paged_stash_buffer_size_factor_cpu,
        kernels.paged_stash,
    )


def _make_activation_policy(
    args: Arguments,
    ps: ParallelState,
    device: torch.device,
    stash: PagedStash | None,
    stream: ShardRNG | None,
) -> ActivationPolicy:
    model, moe, training = args.model, args.moe, args.training
    offload, parts = None, training.offloaded_modules
    if parts and device.type != "meta":
        fine = training.fine_grained_activation_offloading
        offload = ActivationOffload(
            parts,
            device,
            min_numel=training.min_offloaded_tensor_size if fine else 0,
            fraction=training.activation_offload_fraction,
            max_in_flight=training.fine_grained_offloading_max_inflight_offloads,
            skip_bytes=training.delta_offload_bytes_across_pp_ranks * ps.pp.rank,
        )
    # forced logits do not count: they are drawn outside recomputed regions
    uses_global_rng = bool(
        model.hidden_dropout
        or model.attention_dropout
        or moe.moe_input_jitter_eps
        or (model.lora_dim and model.lora_dropout)
    )
    return ActivationPolicy(
        training.recomputed_modules,
        uses_global_rng=uses_global_rng,
        stream=stream if uses_global_rng else None,
        shared_by=ps.tp if training.distribute_saved_activations else None,
        offload=offload,
        stash=stash,
        mlp_chunks=training.mlp_chunks_for_training,
    )


def _materialize(chunk: nn.Module, device: torch.device, dtype: torch.dtype, seed: int, drawn: tuple[str, ...]) -> None:
    """Replace every meta tensor; a parameter shared by two modules stays shared.

    `drawn`: how the names of the parameters begin that get initial values, the others are zero.
    """
    replacements: dict[Parameter, Parameter] = {}
    for module in chunk.modules():
        for name, param in module.named_parameters(recurse=False):
            if param not in replacements:
                replacements[param] = Parameter(_allocate(param, dtype, device))
                set_param_info(replacements[param], get_param_info(param))
            setattr(module, name, replacements[param])
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    is_drawn = {param: get_param_info(param).names[0].startswith(drawn) for param in replacements.values()}
    init_parameters([param for param, draws in is_drawn.items() if draws], seed)
    for param in (param for param, draws in is_drawn.items() if not draws):
        param.data.zero_()


def _allocate(param: Parameter, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(param.shape, dtype=dtype, device=device)
    except RuntimeError as error:
        # the allocator of the host raises a plain RuntimeError
        is_out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if not is_out_of_memory and "memory" not in str(error) and "overflow" not in str(error):
            raise
        raise UserError(
            f"the model does not fit into the memory of this rank: a weight of shape "
            f"{' x '.join(map(str, param.shape))} takes {param.numel() * dtype.itemsize / 1e9:.1f} GB; check "
            "--hidden-size, --ffn-hidden-size, --vocab-size and --num-experts, or shard the model over more ranks "
            "(--dry-run shows what a rank needs)"
        ) from error


@torch.no_grad()
def _check_initialized(chunk: nn.Module) -> None:
    for path, param in chunk.named_parameters():
        info = get_param_info(param)
        assert not param.is_meta, f"{path} has no storage"
        low, high = torch.aminmax(param)
        assert torch.isfinite(low) and torch.isfinite(high), f"{path} is not finite after initialization"
        is_random = info.init == "xavier_uniform" or (info.init == "normal" and info.init_std > 0)
        assert not is_random or param.numel() == 1 or low < high, f"{path} is constant after initialization"

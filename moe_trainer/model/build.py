"""Build a model: shapes on the meta device, then storage, values and dtype, parameter by parameter.

Values are drawn in fp32 in small blocks and rounded into the params dtype, so building costs no more memory than the
model itself. They depend on (seed, name) alone: every layout starts from the same weights.
"""

import functools
import logging

import torch
from torch import nn
from torch.nn import Parameter

from arguments import Arguments
from arguments.layer_pattern import is_linear
from arguments.parallel import ParallelArgs
from arguments.stage_layout import ChunkLayout, chunk_layouts, embedding_stages
from moe_trainer.backends import BackendPolicy
from moe_trainer.errors import UserError
from moe_trainer.layers.kernels import select_kernels, with_delta_rule
from moe_trainer.layers.layer_factory import select_layer_factory
from moe_trainer.layers.qk_clip import track_max_logits
from moe_trainer.memory.activations import ActivationPolicy
from moe_trainer.memory.cuda_graph import CudaGraphs
from moe_trainer.memory.offload import ActivationOffload
from moe_trainer.memory.paged_stash import PagedStash
from moe_trainer.model.transformer import Transformer
from moe_trainer.moe.dispatch.select import DispatchBufferSpec, attach_dispatcher, build_dispatcher, select_fused_topk
from moe_trainer.parallel.overlap_threads import AlternatingExecutor
from moe_trainer.parallel.params import get_param_info
from moe_trainer.parallel.rng import ShardRNG, init_parameter
from moe_trainer.parallel.state import ParallelState
from moe_trainer.parallel.weight_grads import WeightGradQueue

logger = logging.getLogger(__name__)

DTYPES = (
    ("fp32", torch.float32),
    ("bf16", torch.bfloat16),
    ("fp16", torch.float16),
    ("fp64", torch.float64),
)  # fp64: of proofs


def build_chunks(
    args: Arguments, ps: ParallelState, padded_vocab_size: int, device: torch.device | str = "cpu"
) -> list[Transformer]:
    """Return this rank's model chunks (one per virtual stage): initialized, in the params dtype, in training mode.

    device "meta" builds shapes only: nothing is allocated or initialized.
    Buffers start at zero. Raises: ValueError when flags ask for a model that is not built.
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
    kernels = select_kernels(args.precision.triton_kernels, backends)
    if any(is_linear(args.model, number) for number in range(args.model.num_layers)):
        kernels = with_delta_rule(kernels, args.precision.triton_kernels, args.model, dtype, backends)
    factory = select_layer_factory(
        args.precision.transformer_impl,
        ps,
        args.parallel.cp_comm_type,
        backends,
        kernels,
        model=args.model,
        moe=args.moe,
        precision=args.precision,
        defers=args.parallel.has_deferred_wgrad,
        stores=args.has_fp8_params,
    )
    if args.model.experimental_attention_variant == "dsa" and args.model.dsa_kernel_backend != "none":
        backends.should_use(
            ("dsa_kernel_backend",),
            flag=f"--dsa-kernel-backend {args.model.dsa_kernel_backend}",
            problem="this version has no binding to that library",
            remedy="Use --dsa-kernel-backend none",
            instead="torch's own products",
        )
    layouts = chunk_layouts(args.model, args.parallel)
    assert len(layouts) == ps.pp.size, f"flags lay out {len(layouts)} pipeline stages, there are {ps.pp.size}"
    shared = len(embedding_stages(layouts, not args.model.untie_embeddings_and_output_weights)) > 1
    parallel = args.parallel
    overlap_executor = (
        AlternatingExecutor() if parallel.overlap_moe_expert_parallel_comm or parallel.has_wgrad_in_ep_overlap else None
    )
    chunks = []
    for layout in layouts[ps.pp.rank]:
        queue = _queue(layout, parallel)
        with torch.device("meta"):
            chunk = Transformer(
                args,
                ps,
                padded_vocab_size,
                factory,
                layout,
                shared_embedding=shared,
                params_dtype=dtype,
                device=device,
                queue=queue,
                overlap_executor=overlap_executor,
                activations=functools.partial(_activations, args, ps, device),
                graphs=_graphs(args, device, queue),
            )
        _materialize(chunk, device, dtype, args.training.seed)
        if device.type != "meta":
            _check(chunk)
        chunks.append(chunk)
    if args.moe.num_experts and device.type != "meta":
        dispatcher = build_dispatcher(args.moe, ps, _dispatched_rows(args, ps, dtype, device), backends, kernels)
        layers = [layer for chunk in chunks for layer in chunk.moe_layers()]
        attach_dispatcher(layers, dispatcher, select_fused_topk(args.moe, backends, kernels), kernels.balancing)
    if args.model.qk_clip or args.output.log_max_attention_logit:
        track_max_logits(chunks)
    backends.check()
    count = sum(param.numel() for chunk in chunks for param in chunk.parameters())
    logger.info(
        "model: %s parameters on this rank (%s) in %s, %s layers (kit)",
        f"{count:,}",
        device,
        str(dtype)[6:],
        factory.name,
    )
    if device.type == "cpu" and any(chunk.quantized for chunk in chunks):
        logger.info(
            "8 and 4 bits: a CPU has no such products; they are computed in fp32 from quantised operands (slower, the same numbers)"
        )
    return chunks


def _dispatched_rows(
    args: Arguments, ps: ParallelState, dtype: torch.dtype, device: torch.device
) -> DispatchBufferSpec:
    """What a rank dispatches at a time: a microbatch, of which every rank of tp and cp has tokens of its own."""
    sequences = max(args.training.micro_batch_size or 1, args.training.eval_micro_batch_size or 1)
    tokens = -(-(args.data.seq_length or 1) // ps.tp_cp.size) * sequences
    return DispatchBufferSpec(
        args.moe.expert_widths(args.model.hidden_size)[0], tokens, dtype, device, args.training.deterministic_mode
    )


def _activations(args: Arguments, ps: ParallelState, device: torch.device, stream: ShardRNG | None) -> ActivationPolicy:
    """What one chunk recomputes in backward and sends to the host."""
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
    # forced logits are drawn once, whatever is recomputed
    uses_global_rng = bool(model.hidden_dropout or model.attention_dropout or moe.moe_input_jitter_eps)
    shared = ps.tp if training.distribute_saved_activations else None
    stash = None
    if moe.moe_paged_stash and device.type != "meta":
        stash = PagedStash(
            device,
            moe.moe_paged_stash_page_size,
            moe.moe_paged_stash_buffer_size_factor_cuda,
            moe.moe_paged_stash_buffer_size_factor_cpu,
        )
    return ActivationPolicy(
        training.recomputed_modules,
        uses_global_rng=uses_global_rng,
        stream=stream if uses_global_rng else None,
        shared_by=shared,
        offload=offload,
        stash=stash,
    )


def _graphs(args: Arguments, device: torch.device, queue: WeightGradQueue | None) -> CudaGraphs:
    """Which parts of one chunk are captured as CUDA graphs; none on a CPU."""
    parts = args.training.captured_modules if device.type == "cuda" else frozenset()
    return CudaGraphs(parts, device, warmup=args.training.cuda_graph_warmup_steps, queue=queue)


def _queue(layout: ChunkLayout, parallel: ParallelArgs) -> WeightGradQueue | None:
    """Where a chunk's weight gradients can wait, if any of them does."""
    waits = parallel.has_deferred_wgrad or (parallel.has_deferred_head_wgrad and layout.has_loss)
    return WeightGradQueue() if waits else None


def _materialize(chunk: nn.Module, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Replace every meta tensor; a parameter shared by two modules stays shared."""
    made: dict[Parameter, Parameter] = {}
    for module in chunk.modules():
        for name, param in module.named_parameters(recurse=False):
            if param not in made:
                made[param] = _make(param, device, dtype, seed)
            setattr(module, name, made[param])
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)


def _make(param: Parameter, device: torch.device, dtype: torch.dtype, seed: int) -> Parameter:
    info = get_param_info(param)
    if device.type == "meta":
        new = Parameter(param.detach().to(dtype))
    else:
        new = Parameter(_storage(param, dtype, device))
    new.info = info
    init_parameter(new, seed)  # leaves a meta parameter alone
    return new


def _storage(param: Parameter, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Raises: UserError where the memory does not suffice."""
    try:
        return torch.empty(param.shape, dtype=dtype, device=device)
    except RuntimeError as error:  # torch.OutOfMemoryError is one, a host's allocator raises the plain one
        gigabytes = param.numel() * dtype.itemsize / 1e9
        if (
            not isinstance(error, torch.OutOfMemoryError)
            and "memory" not in str(error)
            and "overflow" not in str(error)
        ):
            raise
        raise UserError(
            f"the model does not fit into the memory of this rank: a weight of {' x '.join(map(str, param.shape))} numbers takes {gigabytes:.1f} GB; "
            "look at --hidden-size, --ffn-hidden-size, --vocab-size and --num-experts, or cut the model over more ranks (--dry-run tells what a rank needs)"
        ) from error


@torch.no_grad()
def _check(chunk: nn.Module) -> None:
    """Every parameter is finite, and drawn ones are not constant."""
    for path, param in chunk.named_parameters():
        info = get_param_info(param)
        assert not param.is_meta, f"{path} has no storage"
        low, high = torch.aminmax(param)
        assert torch.isfinite(low) and torch.isfinite(high), f"{path} is not finite after initialization"
        drawn = info.init == "xavier_uniform" or (info.init == "normal" and info.init_std > 0)
        assert not drawn or param.numel() == 1 or low < high, f"{path} is constant after initialization"

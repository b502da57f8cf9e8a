"""Assembly of a run: model, gradient buffers, optimizer, schedules.

`build_run` builds what does not depend on a checkpoint; training/resume.py loads one; training/data_setup.py
continues the data where it stopped.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Parameter

from arguments import Arguments
from arguments.mechanisms.formats import quantized_format
from arguments.mechanisms.sharding_kinds.declaration import ShardingCapability
from arguments.mechanisms.shardings import get_sharding
from arguments.regular_file import regular_file
from arguments.vocabulary import choose_padded_vocab_size, get_padded_vocab_size
from moe_trainer.checkpoint.manager import saved_padded_vocab_size
from moe_trainer.checkpoint.options import SaveOptions
from moe_trainer.data.tokenizer import Tokenizer
from moe_trainer.debug.tensor_dump import Dumps
from moe_trainer.errors import UserError, as_user_error
from moe_trainer.memory.cuda_graph import graph_generators
from moe_trainer.memory.iteration_graph import IterationGraph
from moe_trainer.metrics.nvtx import Ranges, make_ranges
from moe_trainer.metrics.profiler import Profiler
from moe_trainer.metrics.timers import Timers
from moe_trainer.model.build import DTYPES, build_chunks
from moe_trainer.model.module_names import named_transformer_layers
from moe_trainer.model.participants import collect_participants, make_receive_buffers
from moe_trainer.model.prepare import freeze_parameters, store_quantized_weights
from moe_trainer.model.transformer import Transformer
from moe_trainer.model.weights import load_named_weights
from moe_trainer.ops.fused_library import FusedLibrary
from moe_trainer.optim.apex import select_fused_library
from moe_trainer.optim.buckets import plan_layouts
from moe_trainer.optim.fsdp_shard import FsdpGrads
from moe_trainer.optim.grad_buffer import DataParallelGrads
from moe_trainer.optim.optimizer import Optimizer
from moe_trainer.optim.param_groups import is_matrix
from moe_trainer.optim.schedules import build_batch_size_schedule, build_lr_schedule, build_weight_decay_schedule
from moe_trainer.parallel.coordination import run_on_rank0
from moe_trainer.parallel.fsdp import FullSharding
from moe_trainer.parallel.fsdp_overlap import FSDPPassState, reduce_after_weight_grads
from moe_trainer.parallel.state import ParallelState
from moe_trainer.pipeline.batch_sizes import deadlocking_batch_sizes
from moe_trainer.pipeline.orders import ScheduleKind
from moe_trainer.pipeline.schedule import FwdBwdPairRunner, Schedule, run_in_turn
from moe_trainer.resilience.layer_trace import register_layer_trace_hooks
from moe_trainer.training.data_setup import get_tokenizer_files
from moe_trainer.training.initialize import Runtime
from moe_trainer.training.routing_replay import RoutingReplay
from moe_trainer.training.run import BaseRun, FrozenRun, TrainRun, print_rank_0

logger = logging.getLogger(__name__)


def build_run(args: Arguments, runtime: Runtime, tokenizer: Tokenizer, will_be_loaded: bool = False) -> BaseRun:
    """Build the model of a run, and what trains it unless its weights are frozen. Collective.

    `will_be_loaded`: as in build_chunks.
    """
    build = build_frozen_run if args.has_frozen_weights else build_train_run
    return build(args, runtime, tokenizer, will_be_loaded)


def build_train_run(args: Arguments, runtime: Runtime, tokenizer: Tokenizer, will_be_loaded: bool = False) -> TrainRun:
    """Build model, gradient buffers, optimizer and schedules. Collective."""
    ps, vocab, timers = runtime.ps, choose_vocabulary(args, runtime, tokenizer), make_timers(args, runtime)
    with timers("model-and-optimizer-setup"):
        chunks = build_model(args, runtime, vocab, will_be_loaded)
        mark_layers(timers.ranges, chunks)
        library = select_fused_library(runtime.device, ps.world)
        grads = build_grad_buffers(args, runtime, chunks, library)
        optimizer = Optimizer(chunks, grads, args, ps, device=runtime.device, timer=timers, library=library)
    common = _common_fields(args, runtime, vocab, timers, chunks)
    final_batch_size = common["batch_size"].final_global_batch_size
    with as_user_error("schedules"):
        learning_rate = build_lr_schedule(args.optimizer, args.training, final_batch_size)
        weight_decay = build_weight_decay_schedule(args.optimizer, args.training, final_batch_size)
    iteration_graph = _iteration_graph(args, runtime.device, chunks)
    if iteration_graph is not None:
        optimizer.defer_param_gather()
    return TrainRun(
        **common,
        grads=grads,
        optimizer=optimizer,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        iteration_graph=iteration_graph,
    )


def build_frozen_run(
    args: Arguments, runtime: Runtime, tokenizer: Tokenizer, will_be_loaded: bool = False
) -> FrozenRun:
    """Build the model. Collective."""
    vocab, timers = choose_vocabulary(args, runtime, tokenizer), make_timers(args, runtime)
    with timers("model-and-optimizer-setup"):
        chunks = build_model(args, runtime, vocab, will_be_loaded)
        mark_layers(timers.ranges, chunks)
        if args.parallel.has_sharded_params and runtime.ps.dp_cp.size > 1:
            apply_fsdp(args, runtime, chunks)
        if args.has_quantized_params and (fmt := quantized_format(args.precision)) is not None:
            logger.info(
                "--%s-param-gather has no effect: there are no updated weights to gather",
                fmt.flags.name,
            )
    return FrozenRun(**_common_fields(args, runtime, vocab, timers, chunks))


def choose_vocabulary(args: Arguments, runtime: Runtime, tokenizer: Tokenizer) -> int:
    """Return the padded vocabulary size and print it. Collective.

    Raises:
        UserError: if the tokenizer has more tokens.
    """
    size = tokenizer.vocab_size
    vocab = padded_vocabulary(args, runtime.ps, size)
    if vocab < size:
        raise UserError(f"--padded-vocab-size {vocab} is smaller than the tokenizer's vocabulary ({size})")
    print_rank_0(runtime, f" > padded vocab (size: {size}) with {vocab - size} dummy tokens (new size: {vocab})")
    return vocab


def make_timers(args: Arguments, runtime: Runtime) -> Timers:
    """Return the timers of the phases, which mark them for nsys."""
    device = runtime.device
    ranges = make_ranges(args.output.nvtx_ranges, device)
    return Timers(
        args.output.timing_log_level, synchronize=device.type == "cuda", trace=runtime.ps.trace, ranges=ranges
    )


def _common_fields(
    args: Arguments,
    runtime: Runtime,
    vocab: int,
    timers: Timers,
    chunks: list[Transformer],
) -> dict[str, Any]:
    """Return what both kinds of run have. Collective."""
    ps, training, rank = runtime.ps, args.training, runtime.launch_env.rank
    with as_user_error("schedules"):
        batch_size = build_batch_size_schedule(training, ps.dp.size, args.data.seq_length)
        train_iters = 0
        if not args.is_eval_only:
            # --train-samples takes precedence: the derived --train-iters ignores a batch-size schedule
            samples = training.train_samples
            train_iters = batch_size.iterations_for(samples) if samples else training.train_iters or 0
        schedule = build_schedule(args, runtime, chunks)
        if waiting := deadlocking_batch_sizes(args, ps.dp.size):
            raise ValueError("; ".join(waiting))
    if training.cuda_graph_impl != "none" and runtime.device.type != "cuda":
        logger.info(
            "--cuda-graph-impl %s: no CUDA device, so this rank runs without CUDA graphs; the results are the same",
            training.cuda_graph_impl,
        )
    return {
        "args": args,
        "runtime": runtime,
        "padded_vocab_size": vocab,
        "chunks": chunks,
        "participants": collect_participants(chunks, args, ps, runtime.device),
        "buffers": make_receive_buffers(chunks, args, ps, runtime.device),
        "schedule": schedule,
        "batch_size": batch_size,
        "train_iters": train_iters,
        "save_options": SaveOptions.from_args(args.output, get_tokenizer_files(args)),
        "timers": timers,
        "profiler": Profiler(args.output, rank),
        "dumps": Dumps(args.output, args.moe, rank),
        "replay": RoutingReplay.of_folder(args, chunks, rank, ps.world.size),
    }


def build_model(args: Arguments, runtime: Runtime, vocab_size: int, will_be_loaded: bool = False) -> list[Transformer]:
    """Build this rank's chunks of the model with their initial weights. Collective."""
    ps = runtime.ps
    chunks = build_chunks(args, ps, vocab_size, runtime.device, will_be_loaded=will_be_loaded)
    freeze_parameters(chunks, args)
    register_layer_trace_hooks(ps.trace, named_transformer_layers(chunks))
    if args.output.init_from is not None:
        with as_user_error(f"--init-from {args.output.init_from}"):
            load_named_weights(chunks, read_safetensors(args.output.init_from), ps, strict=True)
        logger.info("initial weights from %s", args.output.init_from)
    count = sum(param.numel() for param in parameters(chunks))
    if ps.dp_cp.rank == 0:
        print(
            f" > number of parameters on (tensor, gtp_weight_remat, pipeline) model parallel rank "
            f"({ps.tp.rank}, 0, {ps.pp.rank}): {count}",
            flush=True,
        )
    return chunks


def mark_layers(ranges: Ranges, chunks: list[Transformer]) -> None:
    """Mark layers and the phases of MoE layers for nsys."""
    for name, layer in named_transformer_layers(chunks):
        ranges.mark_module(name, layer)
        for part, module in layer.sublayers.items():
            ranges.mark_module(f"{name}.{part}", module)
        if layer.is_moe:
            for part in ("router", "experts", "shared_experts"):
                if (module := getattr(layer.mlp, part)) is not None:
                    ranges.mark_module(f"{name}.mlp.{part}", module)
    dispatchers = {layer.dispatcher: None for chunk in chunks for layer in chunk.moe_layers()}
    for dispatcher in dispatchers:  # which layers share
        ranges.mark_phases(
            "dispatch",
            dispatcher,
            ("dispatch_preprocess", "start_token_dispatch", "finish_token_dispatch", "dispatch_postprocess"),
        )
        ranges.mark_phases(
            "combine",
            dispatcher,
            ("combine_preprocess", "start_token_combine", "finish_token_combine", "combine_postprocess"),
        )


def _iteration_graph(args: Arguments, device: torch.device, chunks: list[Transformer]) -> IterationGraph | None:
    if args.training.cuda_graph_impl != "full_iteration" or device.type != "cuda":
        return None
    streams = [chunk.stream.generator(device) for chunk in chunks if chunk.stream is not None]
    streams += [generator for chunk in chunks for generator in graph_generators(chunk, device)]
    scopes = [chunk.activations.captured for chunk in chunks]
    return IterationGraph(args.training.cuda_graph_warmup_steps, streams, scopes)


def build_grad_buffers(
    args: Arguments, runtime: Runtime, chunks: list[Transformer], library: FusedLibrary | None = None
) -> DataParallelGrads | FsdpGrads:
    """Build the gradient buffers, or shard the model and build the sharded gradients. Collective."""
    ps, parallel, per_token = runtime.ps, args.parallel, args.training.calculate_per_token_loss
    narrow = parallel.has_bf16_main_grads and args.precision.params_dtype_name != "fp32"
    if parallel.has_sharded_params:
        if ps.dp_cp.size > 1:
            apply_fsdp(args, runtime, chunks)
            return FsdpGrads(
                parameters(chunks),
                ps,
                per_token_loss=per_token,
                sums_in_bf16=narrow,
                shards_outer=parallel.shards_outer,
            )
        logger.info("one data-parallel rank: parameters are not sharded")
    if get_sharding(parallel).ignores(ShardingCapability.PARAM_GATHER_OVERLAP):
        parallel = replace(parallel, overlap_param_gather=False)
    stored, fmt = args.stored_weight_format, quantized_format(args.precision)
    if stored is not None and fmt is not None:
        count = store_quantized_weights(chunks)
        logger.info(
            "--%s-param-gather: %s parameters of this rank are stored in %s",
            fmt.flags.name,
            f"{count:,}",
            f"{stored.name} and gathered {'through the gradient buffer' if stored.is_gathered_wide else 'so'}",
        )
    fused = args.training.gradient_accumulation_fusion
    if fused and not all(chunk.graphs.parts <= {"iteration"} for chunk in chunks):
        fused = False
        logger.info(
            "--gradient-accumulation-fusion has no effect: graphs of layer parts return gradients, which hooks outside "
            "accumulate"
        )
    layouts = plan_layouts(
        parameters(chunks),
        ps,
        parallel,
        lambda param: is_matrix(param, args.optimizer),
        separate=list(chunks[0].parameters()) if parallel.overlap_param_gather_with_optimizer_step else (),
    )
    return DataParallelGrads(
        layouts,
        ps,
        parallel,
        args.precision,
        per_token_loss=per_token,
        main_grads="bf16" if narrow else args.optimizer.main_grads_dtype,
        fused=fused,
        library=library,
    )


def apply_fsdp(args: Arguments, runtime: Runtime, chunks: list[Transformer]) -> None:
    """Shard all parameters over the data-parallel ranks, layer by layer."""
    parallel, precision = args.parallel, args.precision
    reduce_dtype = parallel.grad_comm_dtype
    if reduce_dtype == "auto":
        reduce_dtype = "bf16" if precision.grad_reduce_in_bf16 else "fp32"
    param_dtype = dict(DTYPES)[precision.params_dtype_name]
    has_fp32_shards = parallel.has_fp32_main_params(precision.params_dtype_name)
    sharding = FullSharding(
        runtime.ps,
        runtime.device,
        param_dtype=param_dtype,
        reduce_dtype=dict(DTYPES)[reduce_dtype],
        main_dtype=torch.float32 if has_fp32_shards else param_dtype,
        keep_gathered=parallel.has_gathered_params,
        reduces_outer=not parallel.shards_outer,
    )
    for chunk in chunks:
        # the head reads a tied embedding without calling it, so it is gathered together with the chunk
        apart = [chunk.embedding] if chunk.embedding is not None and not chunk.tied else []
        sharding.shard(chunk, [layer for _, layer in named_transformer_layers([chunk])], apart)
        if chunk.weight_grads is not None:
            reduce_after_weight_grads(chunk, chunk.weight_grads)
    if chunks[0].overlap_executor is not None:
        chunks[0].overlap_executor.pass_state = FSDPPassState(chunks)
    logger.info(
        "parameters, gradients and optimizer state are sharded over %d data-parallel ranks", runtime.ps.dp_cp.size
    )


def parameters(chunks: list[Transformer]) -> list[Parameter]:
    """Return all parameters in order of use."""
    return [param for chunk in chunks for param in chunk.parameters()]


def build_schedule(args: Arguments, runtime: Runtime, chunks: list[Transformer]) -> Schedule:
    kind, executor = ScheduleKind.of_flags(args.parallel, len(chunks)), chunks[0].overlap_executor
    return Schedule(
        kind,
        runtime.ps.pp,
        runtime.device,
        second=runtime.ps.pp_second,
        overlap=args.parallel.overlap_p2p_comm,
        queues={index: chunk.weight_grads for index, chunk in enumerate(chunks) if chunk.weight_grads is not None},
        run_pair=run_in_turn if executor is None else FwdBwdPairRunner(executor, runtime.device).run,
    )


def padded_vocabulary(args: Arguments, ps: ParallelState, vocab_size: int) -> int:
    """Return the padded vocabulary size, of the checkpoint to load if there is one. Collective."""

    def saved_rows(folder: str) -> int | None:
        with as_user_error(f"--load {folder}"):
            output = args.output
            return run_on_rank0(lambda: saved_padded_vocab_size(folder, output.ckpt_step, output.hf_mapping), ps.world)

    rows, from_flags = choose_padded_vocab_size(args, vocab_size, saved_rows), get_padded_vocab_size(args, vocab_size)
    if rows != from_flags:
        logger.info(
            f"keeping the checkpoint's padded vocabulary size {rows}; these flags give {from_flags} "
            "(--padded-vocab-size overrides it)"
        )
    return rows


def read_safetensors(path: str) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        ValueError: if it is missing or damaged.
    """
    if os.path.isdir(path):
        raise ValueError("is a folder; a .safetensors file is needed")
    try:
        return load_file(regular_file(path))
    except FileNotFoundError:
        raise ValueError("there is no such file") from None
    except SafetensorError as error:
        raise ValueError(f"not a readable safetensors file ({error})") from error

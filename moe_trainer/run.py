"""Assembling a run: everything the loop works with, built once from the flags.

Order, as `train.run_job` calls it: `build_run` (model, gradient buffers, optimizer, schedules) -> `training/resume.py` (checkpoint) ->
`open_data` (datasets, and loaders that go on where the checkpoint stopped) -> `training/metrics.py` (what is logged). What results is one frozen
`Run`; the only thing that changes while training is `TrainState`, which is also what a checkpoint carries besides the
model and the optimizer. Learning rate, batch size and data order are functions of it: that is what makes a resumed run
continue bit for bit.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Parameter

from arguments import Arguments
from arguments.regular_file import regular_file
from moe_trainer.checkpoint.checkpoint import AsyncSaver, saved_vocab_rows
from moe_trainer.checkpoint.directory import tokenizer_files
from moe_trainer.checkpoint.options import SaveOptions
from moe_trainer.data.build import AnyDataset, Datasets, batch_format, build_datasets, requested_sizes
from moe_trainer.data.fingerprint import Fingerprint, compare_fingerprints, make_fingerprint
from moe_trainer.data.loader import Batch, BatchFormat, build_loader
from moe_trainer.data.tokenizer import Tokenizer
from moe_trainer.errors import InputError, user_input
from moe_trainer.guard.layer_names import name_layers
from moe_trainer.guard.rejection import History, Spread, Suspicion
from moe_trainer.guard.save_history import SaveHistory
from moe_trainer.initialize import Runtime
from moe_trainer.layers.precision import store_weights
from moe_trainer.layers.sparse_attention import freeze_all_but_indexers
from moe_trainer.memory.iteration_graph import IterationGraph
from moe_trainer.model.block import TransformerLayer
from moe_trainer.model.build import DTYPES, build_chunks
from moe_trainer.model.transformer import Transformer
from moe_trainer.model.weights import load_named_weights
from moe_trainer.optim.build import build_optimizer
from moe_trainer.optim.fully_sharded import ShardedGrads
from moe_trainer.optim.grad_buffer import DataParallelGrads
from moe_trainer.optim.optimizer import Optimizer
from moe_trainer.optim.param_groups import is_matrix
from moe_trainer.optim.schedules import (
    BatchSizeSchedule,
    LrSchedule,
    WeightDecaySchedule,
    build_batch_size_schedule,
    build_lr_schedule,
    build_weight_decay_schedule,
)
from moe_trainer.parallel import collectives
from moe_trainer.parallel.fsdp import FullSharding
from moe_trainer.parallel.fsdp_overlap import FSDPPassState, reduce_after_weight_grads
from moe_trainer.parallel.params import info_of
from moe_trainer.parallel.state import ParallelState
from moe_trainer.pipeline.schedule import Schedule, choose
from moe_trainer.report.dump import Dumps
from moe_trainer.report.metrics import MetricsLogger
from moe_trainer.report.profiler import Profiler
from moe_trainer.report.timers import Timers
from moe_trainer.shape import deferral
from moe_trainer.shape.batch_sizes import sizes_that_wait
from moe_trainer.shape.full_sharding import keeps_gathered, shards_parameters, strategy_of
from moe_trainer.shape.stored_weights import keeps_8_bits
from moe_trainer.shape.vocab import rows_to_build, vocab_rows
from moe_trainer.training.watches import Watches

logger = logging.getLogger(__name__)


@dataclass
class TrainState:
    """How far the run is. Counts are in iterations and samples; `scheduled_samples` drives the learning rate.

    history: what results were, and which were rejected. fingerprint: of the data and the tokenizer, on rank 0. suspicion, spread: of
    this process, not of the checkpoint.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    scheduled_samples: int = 0
    total_flops: float = 0.0
    history: History = field(default_factory=History)
    fingerprint: Fingerprint = field(default_factory=dict)
    suspicion: Suspicion | None = None
    spread: Spread = field(default_factory=Spread)


@dataclass(frozen=True)
class Run:
    """Everything the loop works with, built once by `pretrain`.

    A run that leaves the weights alone (`Arguments.keeps_weights`) has neither gradients, optimizer nor schedules; an evaluation has 0
    iterations to train, too.
    """

    args: Arguments
    runtime: Runtime
    padded_vocab_size: int
    chunks: list[Transformer]
    schedule: Schedule
    grads: DataParallelGrads | ShardedGrads | None
    optimizer: Optimizer | None
    learning_rate: LrSchedule | None
    weight_decay: WeightDecaySchedule | None
    batch_size: BatchSizeSchedule
    train_iters: int
    save_options: SaveOptions
    saver: AsyncSaver
    save_history: SaveHistory
    timers: Timers
    profiler: Profiler
    metrics: MetricsLogger | None = None
    datasets: Datasets | None = None
    batch_format: BatchFormat | None = None
    train_batches: Iterator[Batch] | None = None
    may_lose_rows: bool = False
    whole: IterationGraph | None = None
    dumps: Dumps = field(default_factory=Dumps)
    watches: Watches | None = None

    @property
    def ps(self):
        """The groups of this rank."""
        return self.runtime.ps

    def wait_params(self) -> None:
        """Wait until the parameters hold what the last update made of them."""
        if self.optimizer is not None:
            self.optimizer.wait_params()

    @property
    def saves(self) -> bool:
        """Are checkpoints saved?"""
        return self.args.output.save is not None and not self.args.keeps_weights

    @property
    def per_token(self) -> bool:
        """Is the loss normalised by tokens of the global batch rather than per microbatch?"""
        return self.args.training.calculate_per_token_loss


def print_rank_0(runtime: Runtime, text: str) -> None:
    """Print once per job."""
    if runtime.place.rank == 0:
        print(text, flush=True)


def build_run(args: Arguments, runtime: Runtime, tokenizer: Tokenizer) -> Run:
    """Build model, gradient buffers, optimizer and schedules."""
    ps = runtime.ps
    vocab = padded_vocabulary(args, ps, tokenizer.vocab_size)
    if vocab < tokenizer.vocab_size:
        raise InputError(f"--padded-vocab-size {vocab} is smaller than the tokenizer's vocabulary ({tokenizer.vocab_size})")
    print_rank_0(
        runtime, f" > padded vocab (size: {tokenizer.vocab_size}) with {vocab - tokenizer.vocab_size} dummy tokens (new size: {vocab})"
    )
    timers = Timers(args.output.timing_log_level, synchronize=runtime.device.type == "cuda", trace=ps.trace)
    with timers("model-and-optimizer-setup"):
        chunks = build_chunks(args, ps, vocab, runtime.device)
        if args.model.dsa_indexer_warmup:
            freeze_all_but_indexers(chunks)
        name_layers(ps.trace, layers_of(chunks))
        if args.output.init_from is not None:
            with user_input(f"--init-from {args.output.init_from}"):
                load_named_weights(chunks, read_weights(args.output.init_from), ps, strict=True)
            logger.info("initial weights from %s", args.output.init_from)
        count = sum(param.numel() for chunk in chunks for param in chunk.parameters())
        if ps.dp_cp.rank == 0:
            print(f" > number of parameters on (tensor, gtp_weight_remat, pipeline) model parallel rank "
                  f"({ps.tp.rank}, 0, {ps.pp.rank}): {count}", flush=True)
        grads, optimizer = None, None
        if args.keeps_weights:
            prepare_evaluation(args, runtime, chunks)
        else:
            grads = keep_gradients(args, runtime, chunks)
            optimizer = build_optimizer(
                chunks, grads, args.optimizer, args.precision, args.parallel, ps, device=runtime.device,
                check_for_nan=args.training.check_for_nan_in_loss_and_grad,
                count_zeros=args.output.log_num_zeros_in_grad, timer=timers,
            )
    with user_input("schedules"):
        batch_size = build_batch_size_schedule(args.training, ps.dp.size, args.data.seq_length)
        learning_rate, weight_decay, train_iters = None, None, 0
        if not args.keeps_weights:
            final_batch_size = batch_size.final_global_batch_size
            learning_rate = build_lr_schedule(args.optimizer, args.training, final_batch_size)
            weight_decay = build_weight_decay_schedule(args.optimizer, args.training, final_batch_size)
        if not args.evaluates_only:
            # --train-samples wins: with it, --train-iters is a derived number that knows nothing of a batch-size schedule
            samples = args.training.train_samples
            train_iters = batch_size.iterations_for(samples) if samples else args.training.train_iters
        schedule = build_schedule(args, runtime, chunks)
        if waiting := sizes_that_wait(args, ps.dp.size):
            raise ValueError("; ".join(waiting))
    return Run(
        args=args,
        runtime=runtime,
        padded_vocab_size=vocab,
        chunks=chunks,
        schedule=schedule,
        grads=grads,
        optimizer=optimizer,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        batch_size=batch_size,
        train_iters=train_iters,
        save_options=SaveOptions.from_args(
            args.output, tokenizer_files(args.data.tokenizer_model, args.data.vocab_file, args.data.merge_file)
        ),
        saver=AsyncSaver(),
        save_history=SaveHistory(),
        timers=timers,
        profiler=Profiler(args.output, runtime.place.rank),
        whole=_iteration_graph(args, runtime.device, chunks),
        dumps=Dumps(args.output, args.moe, runtime.place.rank),
    )


def _iteration_graph(args: Arguments, device: torch.device, chunks: list[Transformer]) -> IterationGraph | None:
    impl = args.training.cuda_graph_impl
    if impl != "none" and device.type != "cuda":
        logger.info("--cuda-graph-impl %s: this rank computes without CUDA graphs, for which it would need a CUDA device; the numbers are the same", impl)
    if impl != "full_iteration" or device.type != "cuda":
        return None
    streams = [chunk.stream.generator(device) for chunk in chunks if chunk.stream is not None]
    return IterationGraph(args.training.cuda_graph_warmup_steps, streams)


def prepare_evaluation(args: Arguments, runtime: Runtime, chunks: list[Transformer]) -> None:
    """Shard the model over the data-parallel ranks where the flags say so; nothing else is kept beside the weights. Collective."""
    if shards_parameters(args.parallel) and runtime.ps.dp_cp.size > 1:
        shard_model(args, runtime, chunks)
    if keeps_8_bits(args):
        logger.info("--fp8-param-gather has no effect: there are no updated weights to gather")


def keep_gradients(args: Arguments, runtime: Runtime, chunks: list[Transformer]) -> DataParallelGrads | ShardedGrads:
    """Where the gradients of the model are kept; shards the model first where that is asked for. Collective."""
    ps, parallel, per_token = runtime.ps, args.parallel, args.training.calculate_per_token_loss
    narrow = parallel.use_megatron_fsdp and parallel.megatron_fsdp_main_grads_dtype == "bf16" and args.precision.params_dtype_name != "fp32"
    if shards_parameters(parallel):
        if ps.dp_cp.size > 1:
            shard_model(args, runtime, chunks)
            return ShardedGrads(parameters(chunks), ps, per_token_loss=per_token, narrow=narrow)
        logger.info("one data-parallel rank: there is nothing to shard")
    if strategy_of(parallel) == "no_shard":
        parallel = replace(parallel, use_distributed_optimizer=False, overlap_param_gather=False)
    if keeps_8_bits(args):
        count = store_weights(chunks)
        logger.info("--fp8-param-gather: %s parameters of this rank are kept and gathered in 8 bits", f"{count:,}")
    fused = args.training.gradient_accumulation_fusion
    if fused and not all(chunk.graphs.parts <= {"iteration"} for chunk in chunks):
        fused = False
        logger.info("--gradient-accumulation-fusion has no effect: graphs of parts of layers give gradients back, and hooks outside add them")
    return DataParallelGrads(parameters(chunks), ps, parallel, args.precision, per_token_loss=per_token,
                             main_grads="bf16" if narrow else args.optimizer.main_grads_dtype,
                             whole=lambda param: is_matrix(param, args.optimizer),
                             apart=list(chunks[0].parameters()) if parallel.overlap_param_gather_with_optimizer_step else (),
                             fused=fused)


def shard_model(args: Arguments, runtime: Runtime, chunks: list[Transformer]) -> None:
    """Cut all parameters over the data-parallel ranks, layer by layer."""
    parallel, precision = args.parallel, args.precision
    wire = parallel.megatron_fsdp_grad_comm_dtype if parallel.use_megatron_fsdp else "auto"
    if wire == "auto":
        wire = "bf16" if precision.grad_reduce_in_bf16 else "fp32"
    sharding = FullSharding(
        runtime.ps, runtime.device, param_dtype=dict(DTYPES)[precision.params_dtype_name], reduce_dtype=dict(DTYPES)[wire],
        keep_gathered=keeps_gathered(parallel),
    )
    for chunk in chunks:
        # a tied embedding is read by the head too, without a call of its own: it is gathered with what the chunk itself gathers
        apart = [chunk.embedding] if chunk.embedding is not None and not chunk.tied else []
        sharding.shard(chunk, [*apart, *(layer for _, layer in layers_of([chunk]))])
        if chunk.weight_grads is not None:
            reduce_after_weight_grads(chunk, chunk.weight_grads)
    if chunks[0].baton is not None:
        chunks[0].baton.pass_state = FSDPPassState(chunks)
    logger.info("parameters, gradients and optimizer state are sharded over %d data-parallel ranks", runtime.ps.dp_cp.size)


def parameters(chunks: list[Transformer]) -> list[Parameter]:
    """All parameters in order of use."""
    return [param for chunk in chunks for param in chunk.parameters()]


def layers_of(chunks: list[Transformer]) -> Iterator[tuple[str, TransformerLayer]]:
    """Every transformer layer with its global name, "decoder.layers.3" or "mtp.layers.0"."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TransformerLayer):
                name = info_of(next(module.parameters())).names[0]
                yield ".".join(name.split(".")[:3]), module


def build_schedule(args: Arguments, runtime: Runtime, chunks: list[Transformer]) -> Schedule:
    """The pipeline schedule of these flags."""
    parallel, late_head = args.parallel, deferral.of_the_head(args.parallel)
    return choose(
        parallel.pipeline_schedule, runtime.ps.pp, len(chunks), runtime.device,
        second=runtime.ps.pp_second, group_size=parallel.microbatch_group_size_per_vp_stage, overlap=parallel.overlap_p2p_comm,
        queues=[chunk.weight_grads for chunk in chunks] if deferral.of_all_layers(parallel) or late_head else None,
        head_lag=parallel.wgrad_deferral_limit if late_head else None,
        baton=chunks[0].baton if parallel.overlap_moe_expert_parallel_comm else None,
    )


def as_rank_0_sees_it(look: Callable[[], Any], ps: ParallelState) -> Any:
    """What `look` finds on rank 0, on every rank: nodes may see a shared folder in different states. Collective.

    Raises: ValueError on every rank when it could not look.
    """
    found, problem = None, None
    if ps.world.rank == 0:
        try:
            found = look()
        except (ValueError, OSError) as error:
            problem = str(error)
    found, problem = collectives.broadcast_object((found, problem), ps.world)
    if problem is not None:
        raise ValueError(problem)
    return found


def padded_vocabulary(args: Arguments, ps: ParallelState, vocab_size: int) -> int:
    """Rows of the embedding and the head: those of the checkpoint that is going to be loaded, else what the flags say. Collective."""

    def saved_rows(folder: str) -> int | None:
        with user_input(f"--load {folder}"):
            return as_rank_0_sees_it(lambda: saved_vocab_rows(folder, args.output.ckpt_step), ps)

    rows, from_flags = rows_to_build(args, vocab_size, saved_rows), vocab_rows(args, vocab_size)
    if rows != from_flags:
        logger.info("the checkpoint's vocabulary is padded to %d rows, these flags would pad it to %d: the checkpoint's is kept "
                    "(--padded-vocab-size decides otherwise)", rows, from_flags)
    return rows


def open_data(run: Run, state: TrainState, tokenizer: Tokenizer) -> Run:
    """Build the datasets, and the training batches after the samples that are already consumed."""
    args, ps, rank = run.args, run.ps, run.runtime.place.rank
    train, valid, test = requested_sizes(args.training)
    # a batch-size schedule reads fewer samples than iterations times the final size; Megatron-LM asks for the latter
    print_rank_0(run.runtime, " > datasets target sizes (minimum size):")
    for name, size in (("train", train), ("validation", valid), ("test", test)):
        print_rank_0(run.runtime, f"    {name + ':':11s} {'all' if size is None else size}")
    with run.timers("train/valid/test-data-iterators-setup"), user_input("data"):
        if rank == 0 and not args.training.skip_train:  # other data may be evaluated
            current = make_fingerprint(args.data, tokenizer_files(args.data.tokenizer_model, args.data.vocab_file, args.data.merge_file))
            for warning in compare_fingerprints(state.fingerprint, current):
                logger.warning("WARNING: %s", warning)
            state.fingerprint = current
        datasets = build_datasets(
            args.data, args.training, tokenizer, (train, valid, test),
            is_builder=rank == 0, barrier=lambda: collectives.barrier(ps.world),
        )
        run = replace(run, datasets=datasets, batch_format=batch_format(args.data, tokenizer, run.padded_vocab_size))
        if datasets.train is not None and not args.training.skip_train:
            batches = batches_of(run, datasets.train, args.training.micro_batch_size, state.consumed_train_samples)
            run = replace(run, train_batches=batches)
    return run


def batches_of(run: Run, dataset: AnyDataset, micro_batch_size: int, consumed: int) -> Iterator[Batch]:
    """This rank's batches of a dataset, after `consumed` samples (counted over all ranks)."""
    args, dp = run.args, run.ps.dp
    return iter(
        build_loader(
            dataset, micro_batch_size, dp.rank, dp.size, consumed, args.training.dataloader_type or "single",
            args.data.num_workers, fmt=run.batch_format,
            pin_memory=run.runtime.device.type == "cuda",
        )
    )


def read_weights(path: str) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises: ValueError if it is missing or damaged.
    """
    if os.path.isdir(path):
        raise ValueError("this is a folder; give a .safetensors file")
    try:
        return load_file(regular_file(path))
    except FileNotFoundError:
        raise ValueError("there is no such file") from None
    except SafetensorError as error:
        raise ValueError(f"this is no readable safetensors file ({error})") from error

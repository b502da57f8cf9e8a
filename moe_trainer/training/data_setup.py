"""Data of a run: datasets, and the loaders that continue where a checkpoint stopped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from arguments import Arguments
from arguments.training import TrainingArgs
from moe_trainer.checkpoint.directory import tokenizer_files
from moe_trainer.data.build import AnyDataset, Datasets, batch_format, build_datasets, build_streams
from moe_trainer.data.fingerprint import compare_fingerprints, make_fingerprint, warn_of_training_text
from moe_trainer.data.loader import BatchFormat, BatchLoader, Cycle, Reading, build_loader, build_packed_loader
from moe_trainer.data.packing import PackFormat, PackingPlanner
from moe_trainer.data.sample_order import compare_flags, compare_orders, describe_order, keep_cycle
from moe_trainer.data.sources import requested_sizes, training_phases
from moe_trainer.data.stream import StreamLoader, StreamState, merge_states
from moe_trainer.data.streamed_sequences import Streamed, StreamedSequences
from moe_trainer.data.tokenizer import Tokenizer
from moe_trainer.errors import UserError, as_user_error
from moe_trainer.estimate.flops import training_flops
from moe_trainer.parallel import collectives
from moe_trainer.parallel.coordination import run_on_rank0
from moe_trainer.training.run import BaseRun, Inputs, TrainState, print_rank_0

logger = logging.getLogger(__name__)


def get_tokenizer_files(args: Arguments) -> tuple[Path, ...]:
    """Return the files that the tokenizer consists of."""
    return tokenizer_files(args.data.tokenizer_model, args.data.vocab_file, args.data.merge_file)


def build_inputs(run: BaseRun, state: TrainState, tokenizer: Tokenizer) -> Inputs:
    """Build datasets, and the training batches that follow the consumed samples. Collective."""
    args, ps, rank = run.args, run.ps, run.runtime.launch_env.rank
    train, valid, test = requested_sizes(args.training)
    if args.data.phase_transitions and train:
        train = remaining_phase_samples(args, state)
    # a batch-size schedule reads fewer samples than iterations times the final size; Megatron-LM requests the latter
    print_rank_0(run.runtime, " > datasets target sizes (minimum size):")
    for name, size in (("train", train), ("validation", valid), ("test", test)):
        print_rank_0(run.runtime, f"    {name + ':':11s} {'all' if size is None else size}")
    with run.timers("train/valid/test-data-iterators-setup"), as_user_error("data"):
        is_streamed = args.training.dataloader_type == "external"
        saved_order, saved_flags, warnings = _compare_with_checkpoint(run, state, is_streamed)
        sizes = (train, valid, test)
        consumed = state.consumed_train_samples
        if is_streamed:
            datasets = build_streams(args.data, args.training, tokenizer, sizes)
            load_stream_states(datasets, state, rank)
        else:
            datasets = build_datasets(
                args.data,
                args.training,
                tokenizer,
                sizes,
                consumed=consumed,
                kept_order=saved_order,
                run_once=partial(run_on_rank0, group=ps.world),
            )
        fmt = batch_format(args.data, tokenizer, run.padded_vocab_size)
        if datasets.train is None or args.training.skip_train:
            return Inputs(datasets=datasets, batch_format=fmt, warnings=warnings)
        cycle, micro = None, args.training.micro_batch_size
        if not isinstance(datasets.train, Streamed):
            if args.training.dataloader_type == "cyclic":
                cycle = keep_cycle(saved_order, Cycle(len(datasets.train), micro, ps.dp.size))
            if rank == 0:
                state.fingerprint["order"] = describe_order(datasets.train, cycle)
                difference = compare_orders(saved_order, datasets.train, consumed, cycle)
                if saved_flags and not saved_order:
                    flags = {**args.as_dict(), "data_parallel_size": ps.dp.size}
                    difference = compare_flags(saved_flags, flags, datasets.train, consumed)
                if difference:
                    logger.warning("WARNING: %s", difference)
        packing, get_size = make_packing_planner(run, datasets.train, micro), run.batch_size.global_batch_size
        loader = make_loader(run, datasets.train, micro, consumed, packing, get_size, fmt=fmt, cycle=cycle)
        return Inputs(
            datasets=datasets,
            batch_format=fmt,
            warnings=warnings,
            train_batches=iter(loader),
            cycle=cycle,
            packing=packing,
            text_stream=loader if isinstance(loader, StreamLoader) else None,
            sample_numbers=partial(_sample_numbers, args.training, ps.dp.size, datasets.train, fmt, cycle),
        )


def _sample_numbers(
    training: TrainingArgs,
    num_ranks: int,
    dataset: AnyDataset,
    fmt: BatchFormat,
    cycle: Cycle | None,
    consumed: int,
    num_microbatches: int,
) -> list[int]:
    """Return the numbers of Inputs.sample_numbers."""
    kind, micro = training.dataloader_type or "single", training.micro_batch_size
    by_rank = []
    for rank in range(num_ranks):
        loader = build_loader(dataset, micro, rank, num_ranks, consumed, kind, fmt=fmt, cycle=cycle)
        by_rank.append([batch for batch, _ in zip(loader.indices(), range(num_microbatches))])
    return [int(number) for microbatch in zip(*by_rank) for batch in microbatch for number in batch]


def _compare_with_checkpoint(
    run: BaseRun, state: TrainState, is_streamed: bool
) -> tuple[Mapping[str, str], Mapping[str, Any], tuple[str, ...]]:
    """Compare the data with those of the checkpoint, warn on rank 0, and note the data in `state` there. Collective.

    Returns:
        The order of the samples that the checkpoint records, its flags (on rank 0), and warnings of validation or test
        text that is training text. Order and flags are empty if the data have changed.
    """
    args = run.args
    saved_order: Mapping[str, str] = {}
    saved_flags: Mapping[str, Any] = {}
    data_warnings: list[str] = []
    if run.ps.world.rank == 0 and not args.training.skip_train:  # other data may be evaluated
        current = make_fingerprint(args.data, get_tokenizer_files(args), is_streamed)
        # a new phase has other data
        saved = {} if state.iteration in args.data.phase_transitions else state.fingerprint
        warnings = compare_fingerprints(saved, current)
        data_warnings = warn_of_training_text(args.data, current["data"])
        for warning in (*warnings, *data_warnings):
            logger.warning("WARNING: %s", warning)
        if not warnings:
            saved_order, saved_flags = state.fingerprint.get("order", {}), state.flags
        state.fingerprint = current
    saved_order, data_warnings = collectives.broadcast_object((saved_order, data_warnings), run.ps.world)
    return saved_order, saved_flags, tuple(data_warnings)


def remaining_phase_samples(args: Arguments, state: TrainState) -> int:
    """Return the number of samples of the phases that this run reads.

    Raises:
        UserError: if the consumed samples are not those of the iterations so far.
    """
    consumed, batch_size = state.consumed_train_samples, args.training.global_batch_size
    if consumed != state.iteration * batch_size:
        raise UserError(
            f"--phase-transition-iterations: {consumed} samples are consumed after iteration {state.iteration}; "
            f"--global-batch-size {batch_size} must be that of the checkpoint"
        )
    phases = training_phases(args.data, args.training, consumed)
    return phases[-1].end - phases[0].first


def make_packing_planner(
    run: BaseRun, dataset: AnyDataset, micro_batch_size: int, forward_only: bool = False
) -> PackingPlanner | None:
    """Return the planner of a dataset with samples of different lengths; None without packing.

    An evaluation (`forward_only`) runs any number of microbatches, also with virtual pipeline stages.
    """
    parallel, fmt = run.args.parallel, PackFormat.from_args(run.args)
    if fmt is None:
        return None
    has_groups = len(run.chunks) > 1 and not forward_only
    group_size = (parallel.microbatch_group_size_per_vp_stage or 1) if has_groups else 1
    get_flops = partial(training_flops, run.args, 1, padded_vocab_size=run.padded_vocab_size)
    is_pipelined = run.ps.pp.size > 1
    num_data_ranks, read_ahead = run.ps.dp.size, _count_batches_ahead(run.args)
    return PackingPlanner(
        dataset.length, get_flops, fmt, micro_batch_size, num_data_ranks, group_size, is_pipelined, read_ahead
    )


def _count_batches_ahead(args: Arguments) -> int:
    """Return how many batches the loader asks object storage for, or reads from a stream, before they are used."""
    if args.training.dataloader_type == "external":
        return 2 * args.data.num_workers
    return args.data.object_storage_read_ahead if args.data.object_storage_cache_path else 0


def load_stream_states(datasets: Datasets, state: TrainState, rank: int) -> None:
    """Let streamed datasets continue where the checkpoint was saved.

    One that was saved with token files does not say where: consumed samples are then read to skip them, and rank 0
    says so.
    """
    consumed = {"train": state.consumed_train_samples, "valid": state.consumed_valid_samples}
    for name, dataset in (("train", datasets.train), *(("valid", dataset) for dataset in datasets.valid)):
        if not isinstance(dataset, Streamed):
            continue
        if name in state.text_streams:
            dataset.load_state(state.text_streams[name])
        elif consumed[name] and rank == 0:
            logger.warning(
                "WARNING: --dataloader-type external: the checkpoint was saved without it and does not say where the "
                "text of --%s-data-path continues; the %s samples consumed so far are read and tokenized to skip them, "
                "which can take long (--finetune starts at the first sample)",
                name,
                f"{consumed[name]:,}",
            )


def merged_stream_states(run: BaseRun) -> dict[str, StreamState]:
    """Return where streamed text continues on all ranks, nothing without --dataloader-type external. Collective."""
    if run.inputs.text_stream is None:
        return {}
    local = {"train": run.inputs.text_stream.state}
    for dataset in run.inputs.datasets.valid:
        assert isinstance(dataset, Streamed)
        local["valid"] = dataset.state()
    ranks = collectives.all_gather_object(local, run.ps.world)
    return {name: merge_states([states[name] for states in ranks]) for name in local}


def make_loader(
    run: BaseRun,
    dataset: AnyDataset,
    micro_batch_size: int,
    consumed: int,
    packing: PackingPlanner | None,
    get_batch_size: Callable[[int], int],
    *,
    fmt: BatchFormat,
    cycle: Cycle | None = None,
) -> BatchLoader | StreamLoader:
    """Return the loader of this rank's batches of a dataset after `consumed` samples, counted over all ranks.

    With `packing` a batch is a pack of a global batch, whose size after a number of consumed samples is given. `cycle`:
    see build_loader.
    """
    args, dp = run.args, run.ps.dp
    reading = Reading(
        num_workers=args.data.num_workers,
        read_ahead=_count_batches_ahead(args),
        pin_memory=run.runtime.device.type == "cuda",
        numbered=args.moe.moe_routing_replay_path is not None,
    )
    if packing is not None:
        loader = build_packed_loader(
            dataset,
            packing,
            get_batch_size,
            run.data_rank,
            consumed,
            fmt=fmt,
            forget=dataset.forget if isinstance(dataset, StreamedSequences) else lambda first: None,
            reading=reading,
        )
    else:
        kind = args.training.dataloader_type or "single"
        place = micro_batch_size, dp.rank, dp.size, consumed, kind
        loader = build_loader(dataset, *place, fmt=fmt, cycle=cycle, reading=reading)
    if isinstance(dataset, Streamed):
        return StreamLoader(dataset, loader, reading.read_ahead)
    return loader

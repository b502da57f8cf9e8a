"""The two kinds of run, one that trains and one whose weights are frozen, and the state that changes meanwhile.

Learning rate, batch size and data order are functions of `TrainState`, which is also what a checkpoint stores besides
model and optimizer. That is what makes a resumed run bitwise equal to one that was never interrupted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from arguments import Arguments
from moe_trainer.checkpoint.manager import AsyncSaver
from moe_trainer.checkpoint.options import SaveOptions
from moe_trainer.data.build import Datasets
from moe_trainer.data.fingerprint import Fingerprint
from moe_trainer.data.loader import Batch, BatchFormat, Cycle
from moe_trainer.data.packing import PackingPlanner
from moe_trainer.data.stream import StreamLoader, StreamState
from moe_trainer.debug.tensor_dump import Dumps
from moe_trainer.evaluation.harness import TaskEvaluation
from moe_trainer.inference.completion import PromptCompleter
from moe_trainer.memory.iteration_graph import IterationGraph
from moe_trainer.metrics.logger import MetricsLogger
from moe_trainer.metrics.profiler import Profiler
from moe_trainer.metrics.timers import Timers
from moe_trainer.model.participants import ReceiveBuffers
from moe_trainer.model.transformer import Transformer
from moe_trainer.optim.fsdp_shard import FsdpGrads
from moe_trainer.optim.grad_buffer import DataParallelGrads
from moe_trainer.optim.optimizer import Optimizer
from moe_trainer.optim.schedules import BatchSizeSchedule, LrSchedule, WeightDecaySchedule
from moe_trainer.parallel.state import ParallelState
from moe_trainer.participant import Participants
from moe_trainer.pipeline.schedule import Schedule
from moe_trainer.resilience.rejection import LossHistory, PendingFaultReport, RerunStatistics
from moe_trainer.resilience.save_failures import SaveHistory
from moe_trainer.training.initialize import Runtime
from moe_trainer.training.routing_replay import RoutingReplay

if TYPE_CHECKING:  # it converts to Hugging Face names
    from moe_trainer.training.stream_weights import SnapshotStream


@dataclass
class TrainState:
    """Progress of the run, in iterations and samples.

    Attributes:
        scheduled_samples: samples of updates that were made; they drive the learning rate.
        history: recent losses and gradient norms, and the iterations that were rejected.
        fingerprint: of the data and the tokenizer, on rank 0.
        flags: of the run that saved the checkpoint, by destination.
        text_streams: where the streamed text of "train" and "valid" continues, as loaded.
        pending_fault_report: fault report of an earlier run, until it is resolved. Not part of the checkpoint.
        rerun_statistics: differences of repeated iterations (--rerun-mode report_stats). Not part of the checkpoint.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    scheduled_samples: int = 0
    total_flops: float = 0.0
    history: LossHistory = field(default_factory=LossHistory)
    fingerprint: Fingerprint = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    text_streams: dict[str, StreamState] = field(default_factory=dict)
    pending_fault_report: PendingFaultReport | None = None
    rerun_statistics: RerunStatistics = field(default_factory=RerunStatistics)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Data that a run reads; without arguments none.

    Attributes:
        warnings: validation or test text that is training text.
        train_batches: microbatches of this data rank after the consumed samples.
        cycle: how --dataloader-type cyclic shuffles the training samples.
        packing: plans of the training batches, of samples of different lengths; None for equal ones.
        text_stream: what yields `train_batches` with --dataloader-type external.
        sample_numbers: returns the indices of the training samples that follow a number of consumed ones, in the order
            of the global batch, of a number of microbatches of every rank.
    """

    datasets: Datasets = Datasets(None, (), (), None)
    batch_format: BatchFormat = BatchFormat(eod=None)
    warnings: tuple[str, ...] = ()
    train_batches: Iterator[Batch] = field(default_factory=lambda: iter(()))
    cycle: Cycle | None = None
    packing: PackingPlanner | None = None
    text_stream: StreamLoader | None = None
    sample_numbers: Callable[[int, int], list[int]] = lambda consumed, num_microbatches: []


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a run writes besides checkpoints, as its flags say; without arguments nothing.

    Attributes:
        metrics: on the last rank.
        tasks: of --eval-tasks.
        completer: of --sample-prompts.
        weight_stream: of --stream-weights-to.
    """

    metrics: MetricsLogger | None = None
    tasks: TaskEvaluation | None = None
    completer: PromptCompleter | None = None
    weight_stream: SnapshotStream | None = None


@dataclass(frozen=True, kw_only=True)
class BaseRun(ABC):
    """What a run works with, whether it trains the weights or not; built by training/setup.py and data_setup.py.

    Data and outputs are added once the checkpoint is loaded.

    Attributes:
        participants: what the model's features do in an iteration.
        buffers: of the experts; an iteration for which they are too small is repeated with larger ones.
        replay: gives routers the experts of training batches; None: they choose.
    """

    args: Arguments
    runtime: Runtime
    padded_vocab_size: int
    chunks: list[Transformer]
    participants: Participants
    buffers: ReceiveBuffers
    schedule: Schedule
    batch_size: BatchSizeSchedule
    train_iters: int
    save_options: SaveOptions
    timers: Timers
    profiler: Profiler
    saver: AsyncSaver = field(default_factory=AsyncSaver)
    save_history: SaveHistory = field(default_factory=SaveHistory)
    dumps: Dumps = field(default_factory=Dumps)
    inputs: Inputs = field(default_factory=Inputs)
    outputs: Outputs = field(default_factory=Outputs)
    replay: RoutingReplay | None = None

    @property
    def ps(self) -> ParallelState:
        """Process groups of this rank."""
        return self.runtime.ps

    @property
    def train_batches(self) -> Iterator[Batch]:
        """The next microbatches of training."""
        return self.inputs.train_batches

    @property
    def metrics(self) -> MetricsLogger | None:
        """The metrics of the run, on the last rank."""
        return self.outputs.metrics

    @property
    def data_rank(self) -> int:
        """This rank among those to which plans of packed batches give packs."""
        return self.ps.dp_cp.rank if self.ps.dynamic_cp else self.ps.dp.rank

    @property
    def per_token(self) -> bool:
        """Whether the loss is normalized by the tokens of the global batch instead of per microbatch."""
        return self.args.training.calculate_per_token_loss

    @property
    @abstractmethod
    def save_folder(self) -> str | None:
        """Folder of the checkpoints; None if none are saved."""

    @property
    @abstractmethod
    def loss_scale(self) -> float:
        """Factor of the loss in the gradients."""

    @abstractmethod
    def get_lr(self, samples: int) -> float:
        """Return the learning rate after the updates of this number of samples."""

    @abstractmethod
    def wait_params(self) -> None:
        """Wait until the parameters hold the result of the last update."""

    @abstractmethod
    def accumulate(self) -> AbstractContextManager[None]:
        """Return the scope of backward passes that must not reduce gradients."""

    def drop_graphs(self) -> None:
        """Drop the CUDA graphs: receive buffers were too small, or the paged stash of a rank will have other memory.

        All ranks do so together, because a capture of communication may itself communicate.
        """
        for chunk in self.chunks:
            chunk.graphs.drop()

    def close(self) -> None:
        """Release what libraries hold, before the process groups are destroyed."""
        self.participants.close()


@dataclass(frozen=True, kw_only=True)
class FrozenRun(BaseRun):
    """A run that does not change the weights (`Arguments.has_frozen_weights`): it evaluates, or only writes losses."""

    @property
    def save_folder(self) -> str | None:
        return None

    @property
    def loss_scale(self) -> float:
        return 1.0

    def get_lr(self, samples: int) -> float:
        return 0.0

    def wait_params(self) -> None:
        pass

    def accumulate(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True, kw_only=True)
class TrainRun(BaseRun):
    """A run that trains the weights.

    Attributes:
        iteration_graph: CUDA graph of the full iteration.
    """

    grads: DataParallelGrads | FsdpGrads
    optimizer: Optimizer
    learning_rate: LrSchedule
    weight_decay: WeightDecaySchedule
    iteration_graph: IterationGraph | None

    @property
    def save_folder(self) -> str | None:
        return self.args.output.save

    @property
    def loss_scale(self) -> float:
        return self.optimizer.loss_scale

    def get_lr(self, samples: int) -> float:
        return self.learning_rate.lr(samples)

    def wait_params(self) -> None:
        self.optimizer.wait_params()

    def accumulate(self) -> AbstractContextManager[None]:
        return self.grads.accumulate()

    def drop_graphs(self) -> None:
        if self.iteration_graph is not None:
            self.iteration_graph.drop()
        super().drop_graphs()

    def close(self) -> None:
        super().close()
        self.grads.close()


AnyRun = TypeVar("AnyRun", bound=BaseRun)


def with_batches(run: AnyRun, batches: Iterator[Batch]) -> AnyRun:
    """Return the run with other training batches."""
    return replace(run, inputs=replace(run.inputs, train_batches=batches))


def print_rank_0(runtime: Runtime, text: str) -> None:
    """Print on rank 0 only."""
    if runtime.launch_env.rank == 0:
        print(text, flush=True)

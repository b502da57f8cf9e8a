"""The context of a training run, and the state that changes while it trains.

Learning rate, batch size and data order are functions of `TrainState`, which is also what a checkpoint stores besides
model and optimizer. That is what makes a resumed run bitwise equal to one that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

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
from moe_trainer.model.block import TransformerLayer
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
from moe_trainer.training.monitors import RankMonitors
from moe_trainer.training.routing_replay import RoutingReplay
from moe_trainer.training.stream_weights import WeightStream


@dataclass
class TrainState:
    """Progress of the run, in iterations and samples.

    Attributes:
        scheduled_samples: samples of updates that were made; they drive the learning rate.
        history: recent losses and gradient norms, and the iterations that were rejected.
        fingerprint: of the data and the tokenizer, on rank 0.
        flags: of the run that saved the checkpoint, by destination.
        streams: where the streamed text of "train" and "valid" continues, as loaded.
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
    streams: dict[str, StreamState] = field(default_factory=dict)
    pending_fault_report: PendingFaultReport | None = None
    rerun_statistics: RerunStatistics = field(default_factory=RerunStatistics)


@dataclass(frozen=True)
class TrainContext:
    """Everything the loop works with, built by training/setup.py and data_setup.py.

    A run that does not train the weights (`Arguments.has_frozen_weights`) has no gradients, optimizer or schedules.
    `build_context` fills the fields up to `dumps`; data, metrics and monitors are added once the checkpoint is loaded.

    Attributes:
        participants: what the model's features do in an iteration.
        buffers: of the experts; an iteration for which they are too small is repeated with larger ones.
        iteration_graph: CUDA graph of the full iteration.
        data_warnings: validation or test text that is training text.
        cycle: how --dataloader-type cyclic shuffles the training samples.
        packing: plans of the training batches, of samples of different lengths; None for equal ones.
        tasks: of --eval-tasks.
        samples: of --sample-prompts.
        stream: of --stream-weights-to.
        replay: gives routers the experts of training batches; None: they choose.
        train_stream: what yields `train_batches` with --dataloader-type external.
    """

    args: Arguments
    runtime: Runtime
    padded_vocab_size: int
    chunks: list[Transformer]
    participants: Participants
    buffers: ReceiveBuffers
    schedule: Schedule
    grads: DataParallelGrads | FsdpGrads | None
    optimizer: Optimizer | None
    learning_rate: LrSchedule | None
    weight_decay: WeightDecaySchedule | None
    batch_size: BatchSizeSchedule
    train_iters: int
    save_options: SaveOptions
    timers: Timers
    profiler: Profiler
    saver: AsyncSaver = field(default_factory=AsyncSaver)
    save_history: SaveHistory = field(default_factory=SaveHistory)
    iteration_graph: IterationGraph | None = None
    dumps: Dumps = field(default_factory=Dumps)
    datasets: Datasets | None = None
    batch_format: BatchFormat | None = None
    data_warnings: tuple[str, ...] = ()
    train_batches: Iterator[Batch] | None = None
    cycle: Cycle | None = None
    packing: PackingPlanner | None = None
    train_stream: StreamLoader | None = None
    metrics: MetricsLogger | None = None
    monitors: RankMonitors | None = None
    tasks: TaskEvaluation | None = None
    samples: PromptCompleter | None = None
    replay: RoutingReplay | None = None
    stream: WeightStream | None = None

    @property
    def ps(self) -> ParallelState:
        """Process groups of this rank."""
        return self.runtime.ps

    @property
    def data_rank(self) -> int:
        """This rank among those to which plans of packed batches give packs."""
        return self.ps.dp_cp.rank if self.ps.dynamic_cp else self.ps.dp.rank

    def wait_params(self) -> None:
        """Wait until the parameters hold the result of the last update."""
        if self.optimizer is not None:
            self.optimizer.wait_params()

    @property
    def should_save(self) -> bool:
        """Whether checkpoints are saved."""
        return self.args.output.save is not None and not self.args.has_frozen_weights

    @property
    def per_token(self) -> bool:
        """Whether the loss is normalized by the tokens of the global batch instead of per microbatch."""
        return self.args.training.calculate_per_token_loss


def named_transformer_layers(chunks: list[Transformer]) -> Iterator[tuple[str, TransformerLayer]]:
    """Yield every transformer layer with its global name, "decoder.layers.3" or "mtp.layers.0"."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TransformerLayer):
                yield ".".join(module.name.split(".")[:3]), module


def print_rank_0(runtime: Runtime, text: str) -> None:
    """Print on rank 0 only."""
    if runtime.launch_env.rank == 0:
        print(text, flush=True)

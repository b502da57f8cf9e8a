"""--stream-weights-interval: weights for other programs during training, such as an inference engine's.

Tensors are gathered one by one over TP, PP, EP and FSDP to rank 0, which converts them to Hugging Face names and writes
or passes them on in buckets. No rank holds more of the model than before, plus a bucket.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from arguments import Arguments
from moe_trainer.checkpoint.hf.export import known_vocabulary
from moe_trainer.checkpoint.hf.families import families_with
from moe_trainer.checkpoint.hf.weight_stream import HFWeights, SnapshotFolder, split_into_buckets
from moe_trainer.model.transformer import Transformer
from moe_trainer.model.weights import export_named_weights
from moe_trainer.optim.optimizer import Optimizer
from moe_trainer.parallel.coordination import drain_on_exit, raise_on_all_ranks
from moe_trainer.parallel.state import ParallelState

logger = logging.getLogger(__name__)

BUCKET_BYTES = 2**29
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - what the flag names
Bucket = list[tuple[str, Tensor]]
Result = TypeVar("Result")


class WeightStream:
    """Streams the weights of a run.

    Args:
        args: of the run.
        chunks: of the model on this rank.
        ps: parallel state.
        padded_vocab_size: rows of the embedding; those after --vocab-size are left out.
        optimizer: whose updates the parameters receive; None if nothing is trained.
        bucket_bytes: largest size of a bucket with several tensors.

    Attributes:
        config: the content of config.json.

    Raises:
        CheckpointError: if no Hugging Face model type expresses the model.
    """

    def __init__(
        self,
        args: Arguments,
        chunks: Sequence[Transformer],
        ps: ParallelState,
        padded_vocab_size: int,
        optimizer: Optimizer | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self._chunks, self._ps, self._optimizer, self._bucket_bytes = chunks, ps, optimizer, bucket_bytes
        vocabulary = known_vocabulary(args.as_dict())
        rows = None if vocabulary is None else min(vocabulary, padded_vocab_size)
        kind = args.output.stream_weights_model_type
        families = families_with(args.output.hf_mapping)
        self._weights = HFWeights(args.as_dict(), padded_vocab_size, rows, chunks[0].params_dtype, kind, families)
        self.config = self._weights.config

    def send(self, receive: Callable[[Bucket], None]) -> None:
        """Call `receive` on rank 0 with every bucket of (Hugging Face name, tensor). Collective over the world.

        Tensors are on this rank's device and may be views of parameters: copy what is needed after `receive` returns.
        An error of `receive` is raised on every rank.
        """

        def receive_all(buckets: Iterator[Bucket]) -> None:
            for bucket in buckets:
                receive(bucket)

        self._receive(receive_all)

    def _receive(self, consume: Callable[[Iterator[Bucket]], Result]) -> Result | None:
        if self._optimizer is not None:
            self._optimizer.wait_params()
        weights = export_named_weights(self._chunks, self._ps)
        with raise_on_all_ranks(self._ps.world, "--stream-weights-to"), drain_on_exit(weights):
            if self._ps.world.rank == 0:
                return consume(split_into_buckets(self._weights.convert(weights), self._bucket_bytes))
        return None


class SnapshotStream(WeightStream):
    """Weights that are written to the folder of --stream-weights-to as snapshots.

    Args:
        target: of the flag.
        args, chunks, ps, padded_vocab_size, optimizer: as of WeightStream.
    """

    def __init__(
        self,
        target: str,
        args: Arguments,
        chunks: Sequence[Transformer],
        ps: ParallelState,
        padded_vocab_size: int,
        optimizer: Optimizer | None = None,
    ):
        super().__init__(args, chunks, ps, padded_vocab_size, optimizer)
        self._folder = SnapshotFolder(find_folder(target))
        with raise_on_all_ranks(ps.world, "--stream-weights-to"):
            if ps.world.rank == 0:
                self._folder.withdraw()

    def write(self, iteration: int) -> None:
        """Write a snapshot of the weights after an iteration to the target. Collective over the world.

        Raises:
            UserError: on every rank, if it cannot be written.
        """
        begin = time.perf_counter()
        path = self._receive(lambda buckets: self._folder.publish(iteration, self.config, buckets))
        if path is not None:
            logger.info("weights after iteration %d are in %s (%.1f s)", iteration, path, time.perf_counter() - begin)


def find_folder(target: str) -> Path:
    """Return the folder of --stream-weights-to: "shm:NAME" is a folder in the shared memory of this host."""
    kind, separator, name = target.partition(":")
    return SHARED_MEMORY / name if separator and kind == "shm" else Path(target)

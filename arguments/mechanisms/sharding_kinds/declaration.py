"""What other code may ask of a sharding: how data-parallel ranks share parameters, gradients and optimizer state."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from arguments.mechanisms.support import Mechanism, Support

STRATEGY = "data_parallel_sharding_strategy"


class ShardingCapability(Enum):
    """What flags may demand of a sharding; the value is the text of the manual."""

    PIPELINE = "`--pipeline-model-parallel-size` above 1"
    EXPERT_PARALLEL = "`--expert-model-parallel-size` above 1"
    INSTANCES = "`--num-distributed-optimizer-instances`"
    OUTER = "`--outer-dp-sharding-strategy optim`"
    PARAM_GATHER_OVERLAP = "`--overlap-param-gather`"
    EARLY_GATHER = "`--overlap-param-gather-with-optimizer-step`"
    QUANTIZED_GATHER = "`--fp8-param-gather`, and that of other formats"
    GRAD_BUFFER_REUSE = "`--reuse-grad-buf-for-mxfp8-param-ag`"
    MAIN_FORMATS = "`--main-params-dtype`, `--main-grads-dtype` other than fp32"
    FP32_SUMS = "`--ddp-param-name-patterns-for-fp32-local-accumulation`, `--ddp-reduce-scatter-with-fp32-accumulation`"
    DEFERRED_WGRAD = "a `--pipeline-schedule` that defers weight gradients, `--defer-embedding-wgrad-compute`"
    MODULE_GRAPHS = "`--cuda-graph-impl` other than full_iteration"
    FROZEN = "`--lora-dim`, `--freeze-backbone`, `--dsa-indexer-warmup`"
    QK_CLIP = "`--qk-clip`"
    OUTPUT_BIAS = "`--add-output-layer-bias`"
    COMPRESSED_KEYS = "attention to compressed keys"
    DYNAMIC_CONTEXT = "`--dynamic-context-parallel`"
    REPLICA_HASH = "`--check-weight-hash-across-dp-replicas-interval`"


@dataclass(frozen=True, kw_only=True)
class ShardingDeclaration(Mechanism[ShardingCapability]):
    """Declaration of a sharding.

    Attributes:
        key: unlike that of all others.
        name: name in the manual.
        dest: destination of the flag that asks for it; None if no flag does.
        strategy: value of --data-parallel-sharding-strategy with which the flag does; None if it does with all.
        capabilities: for each whether it acts, or why not.
        shards_flat_state: of flat buffers each rank updates a range, and gathers the parameters of the others.
        shards_params: torch's fully_shard holds a shard of every parameter on each rank; there are no replicas.
        gathers_each_pass: parameters are gathered for every pass, and freed after it. Otherwise they stay.
        reduces_each_microbatch: gradients are reduced after every microbatch, not after the last one alone.
        is_wrapped: another data parallelism than Megatron-LM's default one takes its place.
        has_formats: flags choose the formats of its main parameters, of their gradients and of messages.
        shards_optimizer: without --use-distributed-optimizer, with which it is rejected.
        implies: name of what turns --use-distributed-optimizer on, if it does; else "".
        ckpt_format: the only value of --ckpt-format with which it is accepted; None if all are.
        is_measured: measured times confirm estimates; else plans widen their error.
    """

    key: str
    name: str
    capabilities: Mapping[ShardingCapability, Support]
    dest: str | None = None
    strategy: str | None = None
    shards_flat_state: bool = False
    shards_params: bool = False
    gathers_each_pass: bool = False
    reduces_each_microbatch: bool = False
    is_wrapped: bool = False
    has_formats: bool = False
    shards_optimizer: bool = False
    implies: str = ""
    ckpt_format: str | None = None
    is_measured: bool = True

    def __post_init__(self):
        self.check_declares_all(ShardingCapability)

    @property
    def mention(self) -> str:  # type: ignore[override]  # another attribute, read only
        """The flag that asks for it, as a template of Settings.violation."""
        flag = "" if self.dest is None else f"{{{self.dest}:flag}}"
        return flag if self.strategy is None else f"{flag} {{{STRATEGY}:flag}} {self.strategy}"

    @property
    def selected_by(self) -> dict[str, Any]:
        """Values of the fields of ParallelArgs that select it."""
        flag = {} if self.dest is None else {self.dest: True}
        return flag if self.strategy is None else {**flag, STRATEGY: self.strategy}

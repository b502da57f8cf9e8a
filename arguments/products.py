"""Flags of Megatron-LM that belong to other products: known, read over with their values, and refused by product.

In the lists a bare flag takes no value; `=1` means one value, `=+` one or more, `=*` any number.
"""

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Product:
    """A family of flags: what it is for, and what to do instead here."""

    name: str
    instead: str
    flags: str


PRODUCTS = (
    Product(
        "serving and text generation",
        "train here, serve the exported weights with an inference engine",
        """
        --inference-cuda-graph-scope=1 --flash-decode
        --batch-invariant-mode --batch-invariant-backend=1 --symmetric-ar-type=1 --nccl-all-reduce-for-prefill
        --inference-fuse-tp-communication --inference-disable-triton-nvls-kernels --inference-grouped-gemm-backend=1
        --inference-moe-disable-fused-quant-kernels --inference-moe-token-dispatcher-type=1
        --mlp-chunks-for-prefill=1 --inference-rng-tracker --cache-mla-latents
        --inference-batch-times-seqlen-threshold=1 --max-tokens-to-oom=1 --output-bert-embeddings
        --bert-embedder-type=1 --use-legacy-static-engine --inference-max-requests=1 --inference-max-seq-length=1
        --inference-dynamic-batching --inference-dynamic-batching-buffer-size-gb=1
        --inference-dynamic-batching-paused-buffer-size-gb=1 --inference-dynamic-batching-block-size=1
        --inference-dynamic-batching-max-requests=1 --inference-dynamic-batching-max-tokens=1
        --inference-dynamic-batching-num-cuda-graphs=1 --inference-dynamic-batching-track-paused-request-events
        --inference-dynamic-batching-track-generated-token-events --decode-only-cuda-graphs
        --inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens=1
        --inference-dynamic-batching-unified-memory-level=1 --enable-chunked-prefill --num-speculative-tokens=1
        --inference-dynamic-batching-prefix-caching --no-inference-dynamic-batching-prefix-caching
        --inference-dynamic-batching-prefix-caching-eviction-policy=1
        --inference-dynamic-batching-prefix-caching-coordinator-policy=1
        --inference-dynamic-batching-prefix-caching-routing-alpha=1
        --inference-dynamic-batching-cuda-graph-mixed-prefill-count=1
        --inference-dynamic-batching-cuda-graph-sizing-distribution=1
        --inference-dynamic-batching-sampling-backend=1 --use-same-sampling-seed-across-dp-ranks
        --inference-dynamic-batching-async-sched-mode=1 --inference-dynamic-batching-logprobs-mode=1
        --inference-logging-step-interval=1 --inference-text-gen-server-logging
        --no-inference-text-gen-server-logging --inference-wandb-logging --no-inference-wandb-logging
        --inference-coordinator-port=1 --inference-use-synchronous-zmq-collectives
        --no-inference-use-synchronous-zmq-collectives --inference-disable-ep-consensus
        --no-inference-disable-ep-consensus --inference-shards=1
        """,
    ),
    Product(
        "reinforcement learning",
        "train here, and use a reinforcement-learning framework for the rest",
        """
        --perform-rl-step --rl-prompts-per-eval=1 --grpo-prompts-per-step=1 --grpo-group-size=1
        --rl-generation-lag=1 --rl-max-inflight-requests=1 --rl-submission-granularity=1
        --rl-consumption-granularity=1 --rl-durable-rollout-bank --rl-rollout-bank-dir=1
        --rl-rollout-bank-max-bytes=1 --grpo-iterations=1 --grpo-clamp-eps-lower=1 --grpo-clamp-eps-upper=1
        --grpo-kl-beta=1 --grpo-entropy-term-weight=1 --grpo-filter-groups-with-same-reward --langrl-env-config=1
        --rl-default-temperature=1 --rl-default-top-p=1 --rl-default-top-k=1 --rl-offload-optimizer-during-inference
        --rl-kv-cache-management-mode=1 --rl-persist-cuda-graphs --no-rl-persist-cuda-graphs --rl-partial-rollouts
        --no-rl-partial-rollouts --rl-inference-logprobs-is-correction --no-rl-inference-logprobs-is-correction
        --rl-importance-sampling-truncation-coef=1 --rl-use-sequence-packing --no-rl-use-sequence-packing
        --rl-sequence-packing-max-sequences-per-bin=1 --rl-sequence-packing-algo=1 --rl-training-cuda-graphs
        --no-rl-training-cuda-graphs --rl-inference-tensor-model-parallel-size=1
        --rl-inference-pipeline-model-parallel-size=1 --rl-inference-expert-model-parallel-size=1
        --rl-inference-expert-tensor-model-parallel-size=1 --rl-inference-model-unified-memory-level=1
        --rl-offload-inference-model-weights-when-idle --no-rl-offload-inference-model-weights-when-idle
        --refit-method=1 --rl-verify-model-weights-swap --no-rl-verify-model-weights-swap --rl-skip-bos-token
        --no-rl-skip-bos-token --rl-profile --rl-profile-dir=1 --rl-inference-parsers=*
        """,
    ),
    Product(
        "vision models",
        "this program trains text models",
        """
        --mrope-section=+ --num-classes=1 --img-h=1 --img-w=1 --num-channels=1 --patch-dim=1 --classes-fraction=1
        --data-per-class-fraction=1 --no-data-sharding --head-lr-mult=1 --vision-pretraining
        --vision-pretraining-type=1 --vision-backbone-type=1 --swin-backbone-type=1 --mask-type=1 --mask-factor=1
        --iter-per-epoch=1 --dino-local-img-size=1 --dino-local-crops-number=1 --dino-head-hidden-size=1
        --dino-bottleneck-size=1 --dino-freeze-last-layer=1 --dino-norm-last-layer --dino-teacher-temp=1
        --dino-warmup-teacher-temp=1 --dino-warmup-teacher-temp-epochs=1
        """,
    ),
    Product(
        "BERT, T5 and other encoder models",
        "this program trains decoder-only models",
        """
        --encoder-num-layers=1 --decoder-num-layers=1 --relative-attention-num-buckets=1
        --relative-attention-max-distance=1 --bert-no-binary-head --encoder-seq-length=1 --decoder-seq-length=1
        --sample-rate=1 --mask-prob=1 --short-seq-prob=1 --vocab-extra-ids=1
        """,
    ),
    Product(
        "retrieval and biencoder models",
        "this program trains decoder-only models",
        """
        --ict-head-size=1 --biencoder-projection-dim=1 --biencoder-shared-query-context-model --ict-load=1
        --bert-load=1 --titles-data-path=1 --query-in-block-prob=1 --use-one-sent-docs --evidence-data-path=1
        --retriever-report-topk-accuracies=+ --retriever-score-scaling --block-data-path=1 --embedding-path=1
        --indexer-batch-size=1 --indexer-log-interval=1
        """,
    ),
    Product(
        "hybrid state-space models (Mamba)",
        "this program trains transformers; see --moe-layer-freq for mixed layers",
        """
        --mtp-hybrid-override-pattern=1 --is-hybrid-model --mamba-state-dim=1 --mamba-head-dim=1
        --mamba-num-groups=1 --mamba-num-heads=1 --gdp-num-householder=1 --disable-mamba-mem-eff-path
        --gdp-cutedsl-kernel --gdp-num-chunk-states-to-recompute=1 --mamba-training-ssm-states-dtype=1
        --inference-dynamic-batching-mamba-memory-ratio=1 --inference-dynamic-batching-prefix-caching-mamba-gb=1
        --mamba-inference-conv-states-dtype=1 --mamba-inference-ssm-states-dtype=1 --hybrid-layer-pattern=1
        --hybrid-override-pattern=1
        """,
    ),
    Product(
        "model optimisation: quantisation, pruning, distillation, export",
        "--export-weights writes the trained weights",
        """
        --export-model-type=1 --export-legacy-megatron --export-te-mcore-model --export-default-te-spec
        --export-kv-cache-quant=1 --export-real-quant-cfg=1 --export-quant-cfg=1
        --export-kd-teacher-load=1 --export-kd-teacher-model-config=1 --export-kd-teacher-ckpt-format=1
        --export-kd-cfg=1 --finetune-hf-dataset=1 --finetune-data-split=1 --finetune-data-files=+
        --qad-train-target=1 --freeze-base-for-mtp --export-qk-l2-norm --export-moe-apply-probs-on-input
        --export-offline-model --modelopt-enabled
        """,
    ),
    Product(
        "distillation from logits",
        "this program trains on text",
        """
        --logits-save-top-k=1 --logits-save-top-p=1 --logits-save-top-p-min-k=1 --logits-save-dir=1
        --logits-save-dtype=1 --logits-load-dir=1 --logits-load-decode-threads=1 --logits-load-prefetch-factor=1
        --logits-load-msc-prefetch-depth=1 --logits-load-kd-loss-alpha=1 --logits-load-ignore-errors
        """,
    ),
    Product(
        "hyper-connections",
        "this program has one residual stream",
        """
        --enable-mhc-connections --mhc-num-residual-streams=1 --mhc-sinkhorn-iterations=1 --mhc-init-gating-factor=1
        --mhc-recompute-layer-num=1
        """,
    ),
    Product(
        "weight-sharded tensor parallelism",
        "--use-distributed-optimizer shards the optimizer state",
        """
        --gtp-remat-opt-in-modules=+ --gtp-remat-reduce-scatter-with-fp32-accumulation --gtp-remat-nccl-ub
        --gtp-expert-remat-nccl-ub
        """,
    ),
    Product(
        "heterogeneous layers",
        "--moe-layer-freq says which layers are MoE",
        """
        --heterogeneous-layers-config-path=1 --heterogeneous-layers-config-encoded-json=1
        """,
    ),
    Product(
        "supervised fine-tuning",
        "this program pretrains; --finetune continues from weights",
        """
        --chat-template=1 --sft --sft-tokenizer-prompt-format=1
        """,
    ),
    Product(
        "tracing services",
        "--log-throughput, --tensorboard-dir and --metrics-file report what the run does",
        """
        --otel-enabled --otel-service-name=1 --otel-span-groups=1 --run-workload-inspector-server
        """,
    ),
    Product(
        "cluster services of other packages (restart in process, auto-resume, fault tolerance, remote storage)",
        "--exit-duration-in-mins and --exit-signal-handler save and stop a run",
        """
        --adlr-autoresume --adlr-autoresume-interval=1 --inprocess-restart --inprocess-max-iterations=1
        --inprocess-monitor-thread-interval=1 --inprocess-monitor-process-interval=1
        --inprocess-progress-watchdog-interval=1 --inprocess-heartbeat-interval=1 --inprocess-soft-timeout=1
        --inprocess-hard-timeout=1 --inprocess-heartbeat-timeout=1 --inprocess-barrier-timeout=1
        --inprocess-completion-timeout=1 --inprocess-last-call-wait=1 --inprocess-termination-grace-time=1
        --inprocess-granularity=1 --inprocess-active-world-size=1 --inprocess-empty-cuda-cache --enable-ft-package
        --ft-num-warmup-iters=1 --calc-ft-timeouts --enable-msc
        """,
    ),
    Product(
        "the kitchen quantisation package",
        "--fp8-format names the built-in formats",
        """
        --use-kitchen-attention --kitchen-attention-backend=1 --kitchen-config-file=1 --kitchen-recipe-number=1
        """,
    ),
    Product(
        "fault injection",
        "kill a rank to test a restart",
        """
        --fault-injector-ranks=1 --fault-injector-num-ranks=1 --fault-injector-fault-types=1
        --fault-injector-fault-probabilities=1 --fault-injector-fault-delay=1
        --fault-injector-delay-start-iteration=1 --fault-injector-mtti-seconds=1 --fault-injector-offset-seconds=1
        --fault-injector-seed=1
        """,
    ),
    Product(
        "YAML configuration of Megatron-LM",
        "--preset FILE.yaml reads the zoo's recipe files",
        """
        --yaml-cfg=1
        """,
    ),
    Product(
        "legacy models",
        "drop it",
        """
        --mlp-chunks-for-training=1 --openai-gelu --onnx-safe=1
        """,
    ),
)


def _table() -> dict[str, tuple[Product, int | str]]:
    table: dict[str, tuple[Product, int | str]] = {}
    for product in PRODUCTS:
        for word in product.flags.split():
            spelling, _, takes = word.partition("=")
            table[spelling] = (product, int(takes or 0) if takes not in ("+", "*") else takes)
    return table


BY_SPELLING = MappingProxyType(_table())
"""Every spelling, with its product and how many values follow (0, 1, "+", "*")."""

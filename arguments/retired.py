"""Spellings that are no fields: retired names, names that only Megatron's dev branch has, slips of its documentation.

Each old script that still makes sense should run. RENAMED spellings are read as what they became; IDLE ones meant
nothing that survives, or a habit that is now always on; LATER ones name a feature to come (and pass at a value that
asks for nothing); REFUSED ones lost their meaning, and the text says what to use instead.

With "?", a bare flag has no meaning unless the table says so: --expert-parallel was a switch, today it needs a number.

A record is (spelling, number of values that follow: 0, 1, "?" none or one, "+", "*", then what its table says).
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from arguments.standing import MODELS, PARALLEL

RENAMED = (
    # (spelling, values, what it became; {} stands for the values)
    ("--te-rng-track", 0, "--te-rng-tracker"),
    ("--fake-init-process-group", 0, "--fake-process-group"),
    ("--linear-attention-type", 1, "--experimental-attention-variant {}"),
    ("--activations-checkpoint-method", 1, "--recompute-granularity full --recompute-method {}"),
    ("--checkpoint-num-layers", 1, "--recompute-num-layers {}"),
    ("--moe-loss-coeff", 1, "--moe-aux-loss-coeff {}"),
    ("--moe-frequency", 1, "--moe-layer-freq {}"),
    ("--use-custom-fsdp", 0, "--use-megatron-fsdp"),
    ("--fp8-e4m3", 0, "--fp8-format e4m3"),
    ("--fp8-hybrid", 0, "--fp8-format hybrid"),
    ("--layernorm-epsilon", 1, "--norm-epsilon {}"),
    ("--no-delay-grad-reduce", 0, "--no-align-grad-reduce"),
    ("--s3-cache-path", 1, "--object-storage-cache-path {}"),
    ("--tiktoken-special-tokens", "+", "--tokenizer-special-tokens {}"),
    ("--muon-use-nesterov", 0, "--muon-nesterov"),
    ("--virtual-pipeline-model-parallel-size", 1, "--num-virtual-stages-per-pipeline-rank {}"),
    ("--local_rank", 1, "--local-rank {}"),
    ("--moe-hybridep-pad-variable-tokens", 0, "--moe-hybridep-pad-uneven-dispatch-inputs"),
    ("--dense-grouped-gemm", 0, "--use-grouped-gemm-for-dense-mlp"),
    ("--log-moe-overload-factor", 0, "--moe-per-layer-logging"),
    ("--expert-parallel", "?", "--expert-model-parallel-size {}"),
    ("--activations-checkpoint-num-layers", 1, "--recompute-num-layers {}"),
    ("--distribute-checkpointed-activations", 0, "--distribute-saved-activations"),
    ("--override-lr-scheduler", 0, "--override-opt_param-scheduler"),
    ("--use-checkpoint-lr-scheduler", 0, "--use-checkpoint-opt_param-scheduler"),
    ("--no-scaled-masked-softmax-fusion", 0, "--no-masked-softmax-fusion"),
    ("--fp32-allreduce", 0, "--accumulate-allreduce-grads-in-fp32"),
    ("--min-scale", 1, "--min-loss-scale {}"),
    ("--ub-tp-comm-overlap", 0, "--tp-comm-overlap"),
    ("--ub-tp-comm-overlap-cfg", 1, "--tp-comm-overlap-cfg {}"),
    ("--keep-fp8-transpose-cache-when-using-custom-fsdp", 0, "--keep-fp8-transpose-cache"),
)

RENAMED_BY_VALUE = (
    # (spelling, values, {value: what it became}, what to use for any other value)
    (
        "--moe-router-type",
        1,
        MappingProxyType({
            "sinkhorn": "--moe-router-load-balancing-type sinkhorn",
            "aux_loss": "--moe-router-load-balancing-type aux_loss",
            "top1": "--moe-router-topk 1",
            "top2": "--moe-router-topk 2",
        }),
        "--moe-router-load-balancing-type and --moe-router-topk",
    ),
    (
        "--fp8",
        "?",
        MappingProxyType({"e4m3": "--fp8-format e4m3", "hybrid": "--fp8-format hybrid"}),
        "--fp8-format e4m3 or --fp8-format hybrid, with --fp8-recipe",
    ),
    (
        "--grad-reduce-in-fp32",
        "?",
        MappingProxyType({"false": "--grad-reduce-in-bf16", "true": "", "": ""}),
        "--grad-reduce-in-bf16, or nothing (fp32 is the default with --bf16)",
    ),
)

_ALWAYS = "this is the default"
_ONE_PATH = "there is one way here, and it computes the same"

IDLE = (
    # (spelling, values, reason)
    ("--use-separate-send-recv-groups", 0, "no released Megatron-LM has it"),
    ("--DDP-impl", 1, "--use-distributed-optimizer chooses between the two kinds of data parallelism"),
    ("--use-flashinfer-fused-rope", 0, _ONE_PATH),
    ("--moe-use-legacy-grouped-gemm", 0, _ONE_PATH),
    ("--use-legacy-models", 0, "there is one kind of models"),
    ("--no-async-tensor-model-parallel-allreduce", 0, _ONE_PATH),
    ("--no-scatter-gather-tensors-in-pipeline", 0, _ONE_PATH),
    ("--delay-param-gather", 0, "parameter gathers are aligned by default; --no-align-param-gather turns that off"),
    ("--overlap-p2p-communication", 0, _ALWAYS + " with virtual stages; --no-overlap-p2p-communication turns it off"),
    ("--overlap-p2p-comm", "?", _ALWAYS + " with virtual stages; --no-overlap-p2p-communication turns it off"),
    ("--data-impl", 1, ".bin/.idx files are memory-mapped; --no-mmap-bin-files reads them instead"),
    ("--renormalize-blend-weights", 0, "the weights of a blend are always normalised"),
    ("--legacy-tokenizer", 0, "there is one kind of tokenizers"),
    ("--no-query-key-layer-scaling", 0, _ALWAYS),
    ("--no-contiguous-buffers-in-local-ddp", 0, "gradients always live in contiguous buffers"),
    ("--min-dynamic-context-parallel-size", 1, "no effect without --dynamic-context-parallel"),
    ("--pad-packed-seq-alignment", 1, "no effect without packed sequences"),
    ("--thd-tail-padding-policy", 1, "no effect without packed sequences"),
    ("--thd-max-packed-sequences", 1, "no effect without packed sequences"),
    ("--csa-window-size", 1, "no effect without compressed sparse attention"),
    ("--csa-compress-rotary-base", 1, "no effect without compressed sparse attention"),
    ("--csa-dense-mode", 0, "no effect without compressed sparse attention"),
    ("--no-dsa-kernel-fusion", 0, _ONE_PATH),
    ("--gdn-pre-gated-delta-rule-fusion", 0, _ONE_PATH),
    ("--gdn-conv-pad-alignment", 1, _ONE_PATH),
    ("--linear-cp-mode", 1, "no effect without linear attention under context parallelism"),
    ("--cuda-graph-dynamic-microbatches", 0, "no effect without CUDA graphs"),
    ("--moe-ncclep-static-shape", 0, "no effect without the flex dispatcher"),
    ("--moe-ncclep-use-symm-mem", 0, "no effect without the flex dispatcher"),
    ("--num-residual-streams", 1, "no effect without --enable-hyper-connections"),
    ("--use-fused-mhc", 0, "no effect without --enable-hyper-connections"),
    ("--fallback-to-eager-attn", 0, _ONE_PATH),
    ("--disable-grad-buffers-cpu-backup", 0, "no effect without optimizer offload"),
    ("--disable-param-buffers-cpu-backup", 0, "no effect without optimizer offload"),
    ("--use-layer-wise-param-layout", 0, "no effect without --optimizer muon"),
    ("--megatron-fsdp-prefetch-recompute-forward-weights", 0, "no effect without --use-megatron-fsdp"),
    ("--megatron-fsdp-cache-param-bucket-views", 0, "no effect without --use-megatron-fsdp"),
    ("--varlen-sbhd-validation", 0, "no effect without --use-varlen-dataset"),
    ("--varlen-mock-dataset-config-json", 1, "no effect without --use-varlen-dataset"),
    ("--o-groups", 1, "no effect without compressed sparse attention"),
    ("--o-lora-rank", 1, "no effect without compressed sparse attention"),
    ("--no-one-logger", 0, "nothing is sent to such a service"),
    ("--one-logger-project", 1, "nothing is sent to such a service"),
    ("--one-logger-run-name", 1, "nothing is sent to such a service"),
    ("--one-logger-async", 0, "nothing is sent to such a service"),
    ("--app-tag-run-name", 1, "nothing is sent to such a service"),
    ("--app-tag-run-version", 1, "nothing is sent to such a service"),
    ("--enable-one-logger", 0, "nothing is sent to such a service"),
    ("--deprecated-use-mcore-models", 0, "there is one kind of models"),
    ("--delay-grad-reduce", 0, "gradient reductions are aligned by default; --no-align-grad-reduce turns that off"),
    ("--use-contiguous-buffers-in-ddp", 0, "gradients always live in contiguous buffers"),
    ("--scatter-gather-tensors-in-pipeline", 0, _ONE_PATH),
    ("--gradient-accumulation-fusion", 0, _ALWAYS + "; --no-gradient-accumulation-fusion turns it off"),
    ("--scaled-masked-softmax-fusion", 0, _ALWAYS + "; --no-masked-softmax-fusion turns it off"),
    ("--scaled-upper-triang-masked-softmax-fusion", 0, _ALWAYS + "; --no-masked-softmax-fusion turns it off"),
    ("--log-learning-rate-to-tensorboard", 0, "the learning rate is always logged"),
    ("--no-log-learnig-rate-to-tensorboard", 0, "the learning rate is always logged"),
    ("--no-log-learning-rate-to-tensorboard", 0, "the learning rate is always logged"),
    ("--log-batch-size-to-tensorboard", 0, "the batch size is always logged"),
    ("--moe-pad-experts-for-cuda-graph-inference", 0, "it pads the batches of a server's decode steps; nothing in training reads it"),
    ("--enable-gpt-oss", 0, "it tells Megatron-LM's ModelOpt builder which model to convert; here the architecture's own flags do (--preset gpt_oss_20b has them)"),
    ("--export-force-local-attention", 0, "it chooses an attention module for ModelOpt's exports; every backend computes the same attention here"),
    ("--disable-msc", 0, "remote storage clients are never used"),
)

LATER = (
    # (spelling, values, what it asks for, feature, values that ask for nothing)
    ("--dynamic-context-parallel", 0, "dynamic context parallelism", MODELS, ()),
    ("--sequence-packing-scheduler", 1, "packed sequences", MODELS, ()),
    ("--use-varlen-dataset", 0, "packed sequences", MODELS, ()),
    ("--rotary-base-per-layer", "+", "a rotary base per layer", MODELS, ()),
    ("--head-wise-attn-gate", 0, "gated attention", MODELS, ()),
    ("--csa-compress-ratios", 1, "compressed sparse attention", MODELS, ()),
    ("--moe-n-hash-layers", 1, "hash routing", MODELS, ("0",)),
    ("--enable-hyper-connections", 0, "hyper-connections", MODELS, ()),
    ("--original-max-position-embeddings", 1, "another original context of YaRN with MLA", MODELS, ("4096",)),
    ("--cp-partition-mode", 1, "another split of sequences", PARALLEL, ("zigzag",)),
)

LATER_VALUES = MappingProxyType({
    ("experimental_attention_variant", "dsv4_hybrid"): ("compressed sparse attention", MODELS),
})
"""(destination, value that only Megatron-LM's dev branch has) -> (what it asks for, feature)."""

class Architecture(NamedTuple):
    """Flags that ask for parts of an architecture that is missing as a whole."""

    named_by: tuple[str, ...]
    """Two of these, and the architecture is meant."""
    tuned_by: tuple[str, ...]
    """These have uses elsewhere, or adjust what the others name."""

    @property
    def flags(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.named_by, *self.tuned_by)


ARCHITECTURES = MappingProxyType({
    "the layers of DeepSeek-V4 (compressed sparse attention, hash routing, hyper-connections)": Architecture(
        named_by=(
            "--experimental-attention-variant", "--csa-compress-ratios", "--moe-n-hash-layers", "--enable-hyper-connections", "--enable-mhc-connections",
        ),
        tuned_by=(
            "--mhc-num-residual-streams", "--mhc-sinkhorn-iterations", "--mhc-init-gating-factor", "--mhc-recompute-layer-num",
            "--original-max-position-embeddings", "--recompute-modules",
        ),
    ),
})
"""What is missing as a whole -> its flags."""

_ENCODER = "encoder-decoder models are not trained here: drop it"
_RETRO = "models that retrieve are not trained here: drop it"
_HYBRID = "hybrid models are not trained here; --moe-layer-freq says which layers are MoE"

REFUSED = (
    # (spelling, values, what to use instead)
    ("--moe-extended-tp", 0, "use --expert-tensor-parallel-size N (1 keeps every expert whole)"),
    ("--moe-token-dropping", 0, "use --moe-expert-capacity-factor F; without it no token is dropped"),
    ("--moe-router-topk-limited-devices", 1, "use --moe-router-num-groups G with --moe-router-group-topk"),
    (
        "--standalone-embedding-stage",
        0,
        "use --account-for-embedding-in-pipeline-split or --pipeline-model-parallel-layout",
    ),
    ("--pipeline-model-parallel-split-rank", 1, _ENCODER),
    ("--encoder-tensor-model-parallel-size", 1, _ENCODER),
    ("--encoder-pipeline-model-parallel-size", 1, _ENCODER),
    (
        "--transformer-pipeline-model-parallel-size",
        1,
        "use --pipeline-model-parallel-size N, with --account-for-embedding-in-pipeline-split or --pipeline-model-parallel-layout",
    ),
    ("--retro-project-dir", 1, _RETRO),
    ("--retro-workdir", 1, _RETRO),
    ("--retro-add-retriever", 0, _RETRO),
    ("--retro-cyclic-train-iters", 1, _RETRO),
    ("--retro-encoder-layers", 1, _RETRO),
    ("--retro-encoder-hidden-dropout", 1, _RETRO),
    ("--retro-encoder-attention-dropout", 1, _RETRO),
    ("--retro-num-neighbors", 1, _RETRO),
    ("--retro-num-retrieved-chunks", 1, _RETRO),
    ("--retro-attention-gate", 1, _RETRO),
    ("--retro-no-verify-neighbor-count", 0, _RETRO),
    ("--hybrid-attention-ratio", 1, _HYBRID),
    ("--hybrid-mlp-ratio", 1, _HYBRID),
    ("--mrope-interleaved", 0, "multimodal positions are not trained here"),
    ("--sft-mock-dataset-config-json", 1, "this program pretrains; use --mock-data"),
    ("--inference-dynamic-batching-cuda-graph-max-tokens", 1, "this program trains, it does not serve"),
)


@dataclass(frozen=True)
class Retired:
    """One such spelling. `becomes` pairs a value ("" for none, None for any) with what it became."""

    spelling: str
    takes: int | str
    standing: str
    text: str
    becomes: tuple[tuple[str | None, str], ...] = ()
    feature: str = ""
    harmless: tuple[str, ...] = ()

    def replacement(self, values: list[str]) -> list[str] | None:
        """The tokens to read instead of this spelling with these values; None when it has no meaning today."""
        table = dict(self.becomes)
        key = values[0].lower() if values else ""
        new = table.get(key, table.get(None) if values or self.takes == 0 else None)
        if new is None:
            return None
        return [value for word in new.split() for value in (values if word == "{}" else [word])]


def _table() -> dict[str, Retired]:
    records = [Retired(name, takes, "renamed", new, ((None, new),)) for name, takes, new in RENAMED]
    records += [
        Retired(name, takes, "renamed", other, tuple(values.items())) for name, takes, values, other in RENAMED_BY_VALUE
    ]
    records += [Retired(name, takes, "idle", reason) for name, takes, reason in IDLE]
    records += [
        Retired(name, takes, "later", what, feature=feature, harmless=harmless)
        for name, takes, what, feature, harmless in LATER
    ]
    records += [Retired(name, takes, "refused", instead) for name, takes, instead in REFUSED]
    return {record.spelling: record for record in records}


BY_SPELLING = MappingProxyType(_table())
"""Every retired spelling."""

"""What becomes of every Megatron-LM flag that does not simply act.

A flag that is a field of a section acts unless a table here names it; `tests/arguments/test_no_dead_flags.py` checks
that the program reads every flag that acts. Spellings that are no fields are in SPELLINGS and OUT_OF_SCOPE.
apply_flag_status.py applies the tables to a command line. They are lists of names on purpose: they say what this
program does not have of Megatron-LM's, next to spellings that are no fields, and the test finds what is missing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from arguments.mechanisms.dispatchers import OLD_NAMES
from arguments.mechanisms.implementation_kinds.declaration import IMPLEMENTATION
from arguments.mechanisms.implementations import IMPLEMENTATIONS, UNBUILT
from arguments.mechanisms.layer_modules import unbuilt
from arguments.mechanisms.offloaded_modules import OFFLOADED_MODULES
from arguments.mechanisms.optimizer_kinds.declaration import OPTIMIZER
from arguments.mechanisms.optimizers import OPTIMIZERS
from arguments.mechanisms.recomputed_modules import RECOMPUTED_MODULES
from arguments.mechanisms.sublayers import OLD_VARIANTS, UNBUILT_VARIANTS, VARIANT


def _each(names: str, text: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), text)


# ---- fields that have no effect: accepted with every value, because nothing that is computed or saved depends on them

_SINGLE_GROUP_GEMM = "a grouped GEMM of one group is the GEMM that is run"
_NO_SHARP = "NCCL_COLLNET_ENABLE=1 in the environment lets NCCL reduce in the switches, for all groups"
_STORAGE = "the weights of a rank's experts are always one tensor; checkpoints name every expert"
_INTERLEAVING = (
    "the order of gate and up in memory for a kernel of TransformerEngine; checkpoints hold [gate; up] with and "
    "without it, in Megatron-LM too, and results are the same"
)
_FSDP = (
    "a setting of how Megatron's FSDP communicates; torch's fully_shard communicates layer by layer, and results do "
    "not depend on it"
)
_FSDP_BUFFERS = (
    "torch's fully_shard allocates the buffers of its communication layer by layer, and registers none of them with "
    "NCCL; results do not depend on it"
)
_OVERLAP = "only versions of TransformerEngine before 1.5 read it; --tp-comm-overlap-ag and -rs replace it"
_ASYNC = "the background writer needs no such tuning here"

NO_EFFECT = MappingProxyType(
    {
        # the model and its kernels
        "use_fused_weighted_squared_relu": "the kernel of the experts' activation multiplies by the probability in any "
        "case (--triton-kernels activation)",
        "masked_softmax_fusion": "the kernels of attention mask and normalize the scores",
        "bias_dropout_fusion": "bias, dropout and residual are added one by one; without biases and dropout, as in "
        "most MoE models, nothing is left to fuse",
        "fused_residual_rmsnorm": "residual and norm stay two kernels, because recomputation and offloading treat them "
        "separately",
        "no_persist_layer_norm": "there is one kernel of each norm",
        "use_te_activation_func": "activations have kernels of this program (--triton-kernels activation), or are part "
        "of --use-transformer-engine-op-fuser",
        **_each("use_grouped_gemm_for_shared_expert use_grouped_gemm_for_dense_mlp", _SINGLE_GROUP_GEMM),
        "disable_jit_fuser": "no operations are compiled; --triton-kernels none leaves out the Triton kernels",
        "muon_use_syrk": "Newton-Schulz multiplies with torch's GEMMs, which have no form for symmetric results",
        "dsa_indexer_k_norm_fp32": "norms are computed in fp32, whatever the format of their input",
        "cross_entropy_loss_fusion": "the loss never makes a full fp32 copy of the logits, with or without this flag",
        "cross_entropy_fusion_impl": "there is one implementation of the loss, and both names give the same numbers",
        "fp16_lm_cross_entropy": "the loss reads half-precision logits directly and computes in fp32 block by block, "
        "without copying them",
        "use_torch_optimizer_for_cpu_offload": "host and device always run torch's fused update",
        "flash_attention_version": "TransformerEngine takes the newest version that is installed, torch has its own",
        "use_flash_attn": "every backend computes the same attention; nothing reads this flag any more",
        "accumulate_allreduce_grads_in_fp32": "gradients are always accumulated in fp32, unless --grad-reduce-in-bf16 "
        "or --main-grads-dtype bf16 is set",
        "attention_softmax_in_fp32": "the attention softmax is always computed in fp32",
        "apply_query_key_layer_scaling": "its two factors cancel, and the softmax is always computed in fp32 here",
        "perform_initialization": "weights are always initialized; a checkpoint then replaces them",
        "use_cpu_initialization": "initial weights depend on the seed and the parameter's name, not on the device",
        "deprecated_use_mcore_models": "there is one kind of model",
        "is_hybrid_model": "--hybrid-layer-pattern makes a model hybrid",
        "enable_experimental": "no feature is gated by this flag",
        "te_rng_tracker": "random streams are named and need no tracker",
        "cpu_offloading_retain_pinned_cpu_buffers": "torch always retains pinned host memory for reuse",
        "delay_offload_until_cuda_graph": "offloading starts with the first iteration, inside graphs too",
        "fp8_interval": "delayed scales are updated in every iteration, as in Megatron-LM, which ignores this flag",
        "moe_shared_expert_glu_interleave_size": _INTERLEAVING,
        **_each("moe_use_grouped_tensor moe_single_grouped_weight moe_single_grouped_bias", _STORAGE),
        # communication
        **_each("tp_comm_split_ag tp_comm_split_rs", _OVERLAP),
        "clone_scatter_output_in_embedding": "each rank's part of the embedding output is always a separate tensor",
        "ep_overlap_early_attn_memory_release": "the backward of a layer's attention always runs before the forward of "
        "the other microbatch's next attention",
        "mtp_standalone": "--pipeline-model-parallel-layout places the multi-token-prediction layers",
        "use_ring_exchange_p2p": "stages exchange the same messages by send and receive",
        "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication includes warm-up and flush here",
        "pipeline_model_parallel_comm_backend": "stages communicate over --distributed-backend; results do not depend "
        "on it",
        "use_gloo_process_groups": "gloo groups are created where they are needed",
        "use_layer_wise_param_layout": "parameters that are updated as full matrices are always placed unsharded on "
        "the rank that updates them",
        "align_grad_reduce": "every stage reduces a bucket of gradients as soon as it is complete",
        "align_param_gather": "every stage gathers its parameters right after its optimizer step, in order of use",
        "data_parallel_random_init": "all data-parallel ranks start with the first one's weights, as in Megatron-LM; "
        "dropout differs in any case",
        "local_rank": "the launcher's environment (LOCAL_RANK, SLURM_LOCALID) says which device a rank uses",
        "lazy_mpu_init": "initialization is never delegated to an outer framework",
        **_each("use_sharp sharp_enabled_group", _NO_SHARP),
        # fully sharded data parallelism
        "megatron_fsdp_version": "there is one implementation, torch's fully_shard",
        **_each("suggested_communication_unit_size create_all_gather_group", _FSDP),
        **_each(
            "fsdp_double_buffer megatron_fsdp_max_pool_double_buffer fsdp_db_use_persist_buf_on_alloc_fail nccl_ub "
            "disable_symmetric_registration fsdp_manual_registration",
            _FSDP_BUFFERS,
        ),
        "megatron_fsdp_enable_fine_grained_param_gather": "parameters are gathered layer by layer, experts separately",
        "keep_fp8_transpose_cache": "fully sharded parameters are gathered in the model's format; no transpose is "
        "cached",
        "strict_fsdp_dtensor_load": "--dist-ckpt-strictness determines which keys a checkpoint may lack",
        "init_model_with_meta_device": "a model is always built on the meta device first",
        "gradient_reduce_div_fusion": "the mean is computed in one pass over the reduced shards",
        # the run
        "test_mode": "it adds checks of Megatron-LM's test suite",
        "train_sync_interval": "the host reads the loss of every iteration, which waits for the device",
        "exit_signal_handler_for_training": "it shortens the traceback of a stopped run; --exit-signal-handler saves "
        "first",
        "exit_signal_handler_for_dataloader": "data workers end with their rank",
        "barrier_with_L1_time": "timers never wait for other ranks here",
        # data
        "per_dataset_sequences_path": "the number of sequences is read from the index files, which is fast",
        "num_dataset_builder_threads": "index building is vectorized and needs no threads",
        "dataloader_fast_cache_load": "existing index files are always opened without checking the text they index",
        "dataloader_defer_npy_index_mmap": "index files are memory-mapped and read on first use",
        "use_gigatoken": "the tokenizer's own library is used",
        # checkpoints
        "async_strategy": "there is one background writer",
        **_each(
            "use_persistent_ckpt_worker async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm", _ASYNC
        ),
        **_each(
            """ckpt_fully_parallel_load_exchange_algo ckpt_fully_parallel_load_per_rank_objects
            ckpt_fully_parallel_load_process_group""",
            "reading is planned by the checkpoint library",
        ),
        "ckpt_fully_parallel_save_process_group": "writing is shared by all ranks that hold a tensor",
        "ckpt_load_validate_sharding_integrity": "it is always checked that shards cover each tensor exactly",
        "dist_ckpt_workers": "each rank writes with one thread",
        "dist_ckpt_optim_fully_reshardable": "optimizer states are always stored so that any mapping can load them",
        "ckpt_drop_redundant_extra_state": "the local layers have no extra state",
        **_each("ckpt_pg_tensors_cache_path ckpt_pg_tensors_cache_create", "group tensors are not cached"),
        "distrib_optim_fully_reshardable_mem_efficient": "no rank gathers a full optimizer state",
        "use_dist_ckpt_deprecated": "checkpoints are always distributed",
        "auto_detect_ckpt_format": "the format of a checkpoint is always detected from its files",
        "dist_ckpt_format_deprecated": "--ckpt-format names the format",
        "ckpt_fully_parallel_save_deprecated": "writing is already shared by the ranks",
    }
)
"""Destination -> why the flag has no effect; logged if the flag is given."""


# ---- fields that are not implemented: rejected, except for values that request nothing


@dataclass(frozen=True)
class MissingFeature:
    """What a flag requests, and which values request it.

    Attributes:
        what: the feature.
        values: the rejected values; None for all but the default and the `harmless` ones.
        harmless: further values that request nothing.
    """

    what: str
    values: tuple[str, ...] | None = None
    harmless: tuple[object, ...] = ()

    def requested(self, value: object) -> object:
        """Return the value of the flag, or of a list those that request the feature."""
        if self.values is None or not isinstance(value, list):
            return value
        return [each for each in value if each in self.values]

    def is_requested(self, value: object, default: object) -> bool:
        """Return whether a value of the flag requests the feature."""
        if self.values is not None:
            return any(item in self.values for item in (value if isinstance(value, list) else [value]))
        return value != default and value not in self.harmless


_WEIGHT_SHARDS = MissingFeature("weight-sharded tensor parallelism", harmless=(1,))
_SHARED_SELECTION = MissingFeature("reuse of an earlier layer's key selection")

NOT_IMPLEMENTED = MappingProxyType(
    {
        "tensor_parallel_num_weight_shards": _WEIGHT_SHARDS,
        "expert_tensor_parallel_num_weight_shards": _WEIGHT_SHARDS,
        "megatron_fsdp_main_grads_dtype": MissingFeature("main gradients in fp16", ("fp16",)),
        "optimizer_cuda_graph": MissingFeature(
            "a CUDA graph of the optimizer step (learning rates, step count and the overflow check are on the host)"
        ),
        VARIANT: MissingFeature("gated DeltaNet 2", UNBUILT_VARIANTS),
        "dsa_indexer_topk_freq": _SHARED_SELECTION,
        "dsa_indexer_skip_topk_offset": _SHARED_SELECTION,
        "recompute_modules": MissingFeature("a layer with such a module", unbuilt(RECOMPUTED_MODULES)),
        "offload_modules": MissingFeature("a layer with such a module", unbuilt(OFFLOADED_MODULES)),
        "mtp_hsm": MissingFeature("hidden-state matching"),
        "position_embedding_type": MissingFeature("this kind of position embedding", ("mrope", "relative")),
    }
)

ARCHITECTURE_FLAGS = (VARIANT, "mtp_hsm")
"""Keys of NOT_IMPLEMENTED that would change the number of parameters."""


# ---- fields that are not supported: what to use instead


class Unsupported(NamedTuple):
    """Why a flag is rejected; `values` are the rejected values, None for all but the default."""

    instead: str
    values: tuple[str, ...] | None = None


_NON_PERSISTENT = Unsupported(
    "there is one kind of checkpoint here: complete in the shared directory, or absent. Save more often "
    "(--save-interval, --async-save) and retain fewer checkpoints (--save-retain-interval)"
)


def _relatives_of_optimizers() -> dict[str, Unsupported]:
    texts = [
        f"{' and '.join(each.relatives)} are not supported: their published versions differ, and Megatron-LM has no "
        f"flags that select one. Use --optimizer {each.key}"
        for each in OPTIMIZERS
        if each.relatives
    ]
    values = tuple(name for each in OPTIMIZERS for name in each.relatives)
    return {OPTIMIZER: Unsupported(". ".join(texts), values)} if values else {}


UNSUPPORTED = MappingProxyType(
    {
        "ckpt_format": Unsupported(
            "torch_dcp has no mapping-independent form of a pipeline's layers: use --ckpt-format torch_dist or torch",
            ("torch_dcp",),
        ),
        "ckpt_convert_update_legacy_dist_opt_format": Unsupported(
            "only Megatron-LM reads optimizer buckets stored one by one (before 2024): load and save the checkpoint "
            "there once"
        ),
        "dist_ckpt_save_pre_mcore_014": Unsupported(
            "checkpoints are written as Megatron-Core 0.14 and later do; for an older version use --ckpt-format torch"
        ),
        "non_persistent_save_interval": _NON_PERSISTENT,
        "non_persistent_ckpt_type": _NON_PERSISTENT,
        "non_persistent_global_ckpt_dir": _NON_PERSISTENT,
        "non_persistent_local_ckpt_dir": _NON_PERSISTENT,
        "non_persistent_local_ckpt_algo": _NON_PERSISTENT,
        "replication": _NON_PERSISTENT,
        "replication_jump": _NON_PERSISTENT,
        "replication_factor": _NON_PERSISTENT,
        IMPLEMENTATION: Unsupported(
            f"this program trains: use --transformer-impl {' or '.join(each.key for each in IMPLEMENTATIONS)}", UNBUILT
        ),
        "tokenizer_type": Unsupported(
            "this program reads text: choose another --tokenizer-type",
            (
                "BertWordPieceLowerCase",
                "BertWordPieceCase",
                "MultimodalTokenizer",
                "NullMultimodalTokenizer",
            ),
        ),
        **_relatives_of_optimizers(),
    }
)


# ---- fields that are old spellings, because rules read them

RENAMED = MappingProxyType(
    {
        "use_rotary_position_embeddings": "--position-embedding-type rope",
        "moe_enable_deepep": "--moe-flex-dispatcher-backend deepep",
        "moe_layer_recompute": "--recompute-granularity selective --recompute-modules moe",
        "moe_router_padding_for_fp8": "--moe-router-padding-for-quantization",
        "moe_deepep_num_sms": "--moe-flex-dispatcher-num-sms",
        "moe_hybridep_num_sms": "--moe-flex-dispatcher-num-sms",
        "recompute_activations": "--recompute-granularity selective",
        "checkpoint_activations": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "external_cuda_graph": "--cuda-graph-impl transformer_engine",
        "enable_cuda_graph": "--cuda-graph-impl local",
        "cuda_graph_scope_deprecated": "--cuda-graph-modules",
        "no_weight_decay_cond_type": "--apply-wd-to-qk-layernorm",
        "batch_size": "--micro-batch-size",
        "hybrid_override_pattern": "--hybrid-layer-pattern",
        "model_parallel_size": "--tensor-model-parallel-size",
        "warmup": "--lr-warmup-fraction",
    }
)

RENAMED_VALUES = MappingProxyType(
    {
        **OLD_NAMES,
        ("no_weight_decay_cond_type", "qwen3_next"): "apply_wd_to_qk_layernorm",
        **OLD_VARIANTS,
    }
)
"""(destination, old value) -> its new name."""


# ---- spellings that are no fields: old names, names that only Megatron-LM's dev branch has, misspellings of its manual
#
# A bare spelling takes no value; `=1` means one value, `=?` at most one, `=+` one or more, `=*` any number.

_BECAME = (
    # (spelling, replacement with {} for the values)
    ("--te-rng-track", "--te-rng-tracker"),
    ("--fake-init-process-group", "--fake-process-group"),
    ("--linear-attention-type=1", "--experimental-attention-variant {}"),
    ("--activations-checkpoint-method=1", "--recompute-granularity full --recompute-method {}"),
    ("--checkpoint-num-layers=1", "--recompute-num-layers {}"),
    ("--moe-loss-coeff=1", "--moe-aux-loss-coeff {}"),
    ("--moe-frequency=1", "--moe-layer-freq {}"),
    ("--use-custom-fsdp", "--use-megatron-fsdp"),
    ("--fp8-e4m3", "--fp8-format e4m3"),
    ("--fp8-hybrid", "--fp8-format hybrid"),
    ("--layernorm-epsilon=1", "--norm-epsilon {}"),
    ("--no-delay-grad-reduce", "--no-align-grad-reduce"),
    ("--s3-cache-path=1", "--object-storage-cache-path {}"),
    ("--tiktoken-special-tokens=+", "--tokenizer-special-tokens {}"),
    ("--muon-use-nesterov", "--muon-nesterov"),
    ("--enable-routing-replay", "--moe-enable-routing-replay"),
    ("--max-seqlen-per-cp-rank=1", "--max-seqlen-per-dp-cp-rank {}"),
    ("--disable-ckpt-fully-parallel-save", "--no-ckpt-fully-parallel-save"),
    ("--virtual-pipeline-model-parallel-size=1", "--num-virtual-stages-per-pipeline-rank {}"),
    ("--local_rank=1", "--local-rank {}"),
    ("--moe-hybridep-pad-variable-tokens", "--moe-hybridep-pad-uneven-dispatch-inputs"),
    ("--moe-ncclep-use-symm-mem", "--moe-ncclep-zero-copy"),
    ("--dense-grouped-gemm", "--use-grouped-gemm-for-dense-mlp"),
    ("--log-moe-overload-factor", "--moe-per-layer-logging"),
    ("--expert-parallel=?", "--expert-model-parallel-size {}"),  # it was a switch; today a number is needed
    ("--activations-checkpoint-num-layers=1", "--recompute-num-layers {}"),
    ("--distribute-checkpointed-activations", "--distribute-saved-activations"),
    ("--override-lr-scheduler", "--override-opt_param-scheduler"),
    ("--use-checkpoint-lr-scheduler", "--use-checkpoint-opt_param-scheduler"),
    ("--no-scaled-masked-softmax-fusion", "--no-masked-softmax-fusion"),
    ("--fp32-allreduce", "--accumulate-allreduce-grads-in-fp32"),
    ("--min-scale=1", "--min-loss-scale {}"),
    ("--ub-tp-comm-overlap", "--tp-comm-overlap"),
    ("--ub-tp-comm-overlap-cfg=1", "--tp-comm-overlap-cfg {}"),
    ("--keep-fp8-transpose-cache-when-using-custom-fsdp", "--keep-fp8-transpose-cache"),
)

_BECAME_BY_VALUE = (
    # (spelling, ((value, or "" for none; replacement), ...), what to use for any other value)
    (
        "--moe-router-type=1",
        (
            ("sinkhorn", "--moe-router-load-balancing-type sinkhorn"),
            ("aux_loss", "--moe-router-load-balancing-type aux_loss"),
            ("top1", "--moe-router-topk 1"),
            ("top2", "--moe-router-topk 2"),
        ),
        "--moe-router-load-balancing-type and --moe-router-topk",
    ),
    (
        "--fp8=?",
        (("e4m3", "--fp8-format e4m3"), ("hybrid", "--fp8-format hybrid")),
        "--fp8-format e4m3 or --fp8-format hybrid, with --fp8-recipe",
    ),
    (
        "--grad-reduce-in-fp32=?",
        (("false", "--grad-reduce-in-bf16"), ("true", ""), ("", "")),
        "--grad-reduce-in-bf16, or nothing (fp32 is the default with --bf16)",
    ),
)

_ONE_PATH = "there is one implementation here, and it computes the same"

_WITHOUT_EFFECT = (
    # (spellings, reason)
    ("--use-separate-send-recv-groups", "no released Megatron-LM has it"),
    ("--DDP-impl=1", "--use-distributed-optimizer selects the kind of data parallelism"),
    (
        """--use-flashinfer-fused-rope --moe-use-legacy-grouped-gemm --no-async-tensor-model-parallel-allreduce
        --disable-async-tensor-model-parallel-allreduce
        --no-scatter-gather-tensors-in-pipeline --scatter-gather-tensors-in-pipeline --no-dsa-kernel-fusion
        --gdn-pre-gated-delta-rule-fusion --gdn-conv-pad-alignment=1 --fallback-to-eager-attn""",
        _ONE_PATH,
    ),
    ("--use-legacy-models --deprecated-use-mcore-models", "there is one kind of model"),
    ("--delay-param-gather", "parameter gathers are aligned by default; --no-align-param-gather turns that off"),
    ("--delay-grad-reduce", "gradient reductions are aligned by default; --no-align-grad-reduce turns that off"),
    (
        "--overlap-p2p-communication --overlap-p2p-comm=?",
        "this is the default with virtual stages; --no-overlap-p2p-communication turns it off",
    ),
    ("--data-impl=1", ".bin/.idx files are memory-mapped; --no-mmap-bin-files reads them instead"),
    ("--renormalize-blend-weights", "the weights of a blend are always normalized"),
    ("--legacy-tokenizer", "there is one kind of tokenizer"),
    ("--no-query-key-layer-scaling", "this is the default"),
    (
        "--no-contiguous-buffers-in-local-ddp --use-contiguous-buffers-in-ddp",
        "gradients are always in contiguous buffers",
    ),
    ("--linear-cp-mode=1", "without linear attention under context parallelism"),
    ("--cuda-graph-dynamic-microbatches", "without CUDA graphs"),
    ("--use-fused-mhc", _ONE_PATH),
    ("--disable-grad-buffers-cpu-backup --disable-param-buffers-cpu-backup", "without optimizer offload"),
    ("--use-layer-wise-param-layout", "without --optimizer muon"),
    ("--muon-no-use-nesterov", "this is the default; --muon-nesterov turns it on"),
    ("--tokenizer-hf-use-fast", "this is the default; --tokenizer-hf-no-use-fast turns it off"),
    (
        "--tokenizer-hf-include-special-tokens",
        "this is the default; --tokenizer-hf-no-include-special-tokens turns it off",
    ),
    (
        "--no-stream-ckpt-dequant --disable-stream-ckpt-dequant",
        "tensors of a checkpoint are read and converted one at a time, to the same values",
    ),
    (
        "--megatron-fsdp-prefetch-recompute-forward-weights --megatron-fsdp-cache-param-bucket-views",
        "without --use-megatron-fsdp",
    ),
    (
        """--no-one-logger --one-logger-project=1 --one-logger-run-name=1 --one-logger-async --app-tag-run-name=1
        --app-tag-run-version=1 --enable-one-logger""",
        "nothing is sent to such a service",
    ),
    ("--gradient-accumulation-fusion", "this is the default; --no-gradient-accumulation-fusion turns it off"),
    (
        "--scaled-masked-softmax-fusion --scaled-upper-triang-masked-softmax-fusion",
        "this is the default; --no-masked-softmax-fusion turns it off",
    ),
    (
        """--log-learning-rate-to-tensorboard --no-log-learnig-rate-to-tensorboard
        --no-log-learning-rate-to-tensorboard""",
        "the learning rate is always logged",
    ),
    ("--log-batch-size-to-tensorboard", "the batch size is always logged"),
    (
        "--moe-pad-experts-for-cuda-graph-inference",
        "it pads the batches of a server's decode steps; nothing in training reads it",
    ),
    (
        "--enable-gpt-oss",
        "it tells Megatron-LM's ModelOpt builder which model to convert; here the architecture's flags do",
    ),
    (
        "--export-force-local-attention",
        "it chooses an attention module for ModelOpt's exports; every backend computes the same attention here",
    ),
    ("--disable-msc", "only a data path that begins with msc:// uses this client"),
)

_MISSING = (
    # (spelling, feature, values that request nothing)
    (
        "--enable-mhc-connections --mhc-num-residual-streams=1",
        "Megatron-LM main's form of hyper-connections, without experts and stages (--enable-hyper-connections has "
        "DeepSeek-V4's, and --num-residual-streams the number)",
        (),
    ),
    ("--mhc-recompute-layer-num=1", "recompute of hyper-connections alone", ()),
    ("--original-max-position-embeddings=1", "another original context of YaRN with MLA", ("4096",)),
    ("--cp-partition-mode=1", "another partition of sequences", ("zigzag",)),
)

_REMOVED = (
    # (spellings, what to use instead)
    (
        "--moe-ncclep-static-shape",
        "use --moe-expert-rank-capacity-factor F, which fixes the size of the receive buffer",
    ),
    ("--moe-extended-tp", "use --expert-tensor-parallel-size N (1 does not shard experts)"),
    ("--moe-token-dropping", "use --moe-expert-capacity-factor F; without it no token is dropped"),
    ("--moe-router-topk-limited-devices=1", "use --moe-router-num-groups G with --moe-router-group-topk"),
    (
        "--standalone-embedding-stage",
        "use --account-for-embedding-in-pipeline-split or --pipeline-model-parallel-layout",
    ),
    (
        """--pipeline-model-parallel-split-rank=1 --encoder-tensor-model-parallel-size=1
        --encoder-pipeline-model-parallel-size=1""",
        "encoder-decoder models are not supported: remove the flag",
    ),
    (
        "--transformer-pipeline-model-parallel-size=1",
        "use --pipeline-model-parallel-size N, with --account-for-embedding-in-pipeline-split or "
        "--pipeline-model-parallel-layout",
    ),
    (
        """--retro-project-dir=1 --retro-workdir=1 --retro-add-retriever --retro-cyclic-train-iters=1
        --retro-encoder-layers=1 --retro-encoder-hidden-dropout=1 --retro-encoder-attention-dropout=1
        --retro-num-neighbors=1 --retro-num-retrieved-chunks=1 --retro-attention-gate=1
        --retro-no-verify-neighbor-count""",
        "retrieval models are not supported: remove the flag",
    ),
    (
        "--hybrid-attention-ratio=1 --hybrid-mlp-ratio=1",
        "--hybrid-layer-pattern lists the layers",
    ),
    ("--mrope-interleaved", "multimodal positions are not supported"),
    ("--inference-dynamic-batching-cuda-graph-max-tokens=1", "this program trains, it does not serve"),
)


@dataclass(frozen=True)
class OldSpelling:
    """A spelling that is no field.

    Attributes:
        takes: number of values: 0, 1, "?" (at most one), "+" or "*".
        status: "renamed", "no effect", "not implemented" or "removed".
        text: replacement, reason, missing feature, or what to use instead.
        becomes: pairs of a value ("" for none, None for any) and the flags to read instead.
        harmless: values that request nothing.
    """

    spelling: str
    takes: int | str
    status: str
    text: str
    becomes: tuple[tuple[str | None, str], ...] = ()
    harmless: tuple[str, ...] = ()

    def replacement(self, values: list[str]) -> list[str] | None:
        """Return the tokens to read instead of this spelling with these values, None if it has no meaning today."""
        table = dict(self.becomes)
        key = values[0].lower() if values else ""
        new = table.get(key, table.get(None) if values or self.takes == 0 else None)
        if new is None:
            return None
        return [value for word in new.split() for value in (values if word == "{}" else [word])]


def _spellings(text: str) -> Iterable[tuple[str, int | str]]:
    for word in text.split():
        spelling, _, takes = word.partition("=")
        yield spelling, takes if takes in ("?", "+", "*") else int(takes or 0)


def _old_spellings() -> Iterable[OldSpelling]:
    for text, new in _BECAME:
        for spelling, takes in _spellings(text):
            yield OldSpelling(spelling, takes, "renamed", new, ((None, new),))
    for text, becomes, other in _BECAME_BY_VALUE:
        for spelling, takes in _spellings(text):
            yield OldSpelling(spelling, takes, "renamed", other, becomes)
    for text, what, harmless in _MISSING:
        for spelling, takes in _spellings(text):
            yield OldSpelling(spelling, takes, "not implemented", what, harmless=harmless)
    for status, table in (("no effect", _WITHOUT_EFFECT), ("removed", _REMOVED)):
        for text, why in table:
            for spelling, takes in _spellings(text):
                yield OldSpelling(spelling, takes, status, why)


OLD_SPELLINGS = MappingProxyType({record.spelling: record for record in _old_spellings()})


# ---- flags of other products: their values are skipped, and they are rejected with the name of the product


class Product(NamedTuple):
    """A family of flags: its name, what to do instead, spellings, and prefixes of spellings.

    A flag that only a prefix matches takes all values up to the next flag.
    """

    name: str
    instead: str
    flags: str = ""
    prefixes: str = ""


PRODUCTS = (
    Product(
        "serving and text generation",
        "train here, serve the exported weights with an inference engine",
        """--flash-decode --batch-invariant-mode --batch-invariant-backend=1 --symmetric-ar-type=1
        --nccl-all-reduce-for-prefill --mlp-chunks-for-prefill=1 --cache-mla-latents --max-tokens-to-oom=1
        --output-bert-embeddings --bert-embedder-type=1 --use-legacy-static-engine --decode-only-cuda-graphs
        --enable-chunked-prefill --disable-chunked-prefill --num-speculative-tokens=1
        --use-same-sampling-seed-across-dp-ranks""",
        "--inference- --no-inference-",
    ),
    Product(
        "reinforcement learning",
        "train here, and use a reinforcement-learning framework for the rest",
        "--perform-rl-step --refit-method=1",
        "--rl- --no-rl- --grpo- --langrl-",
    ),
    Product(
        "vision models",
        "this program trains text models",
        """--mrope-section=+ --num-classes=1 --img-h=1 --img-w=1 --num-channels=1 --patch-dim=1 --classes-fraction=1
        --data-per-class-fraction=1 --no-data-sharding --head-lr-mult=1 --mask-type=1 --mask-factor=1
        --iter-per-epoch=1""",
        "--vision- --swin- --dino-",
    ),
    Product(
        "BERT, T5 and other encoder models",
        "this program trains decoder-only models",
        """--encoder-num-layers=1 --decoder-num-layers=1 --relative-attention-num-buckets=1
        --relative-attention-max-distance=1 --bert-no-binary-head --encoder-seq-length=1 --decoder-seq-length=1
        --sample-rate=1 --mask-prob=1 --short-seq-prob=1 --vocab-extra-ids=1""",
    ),
    Product(
        "retrieval and biencoder models",
        "this program trains decoder-only models",
        """--bert-load=1 --titles-data-path=1 --query-in-block-prob=1 --use-one-sent-docs --evidence-data-path=1
        --block-data-path=1 --embedding-path=1 --indexer-batch-size=1 --indexer-log-interval=1""",
        "--ict- --biencoder- --retriever-",
    ),
    Product(
        "options of other state-space kernels",
        "--hybrid-layer-pattern has Mamba-2 layers, with states in fp32",
        """--disable-mamba-mem-eff-path
        --mamba-training-ssm-states-dtype=1 --inference-dynamic-batching-mamba-memory-ratio=1
        --inference-dynamic-batching-prefix-caching-mamba-gb=1""",
        "--mamba-inference- --gdp-",
    ),
    Product(
        "model optimization: quantization, pruning, distillation, export",
        "--export-weights writes the trained weights",
        """--export-model-type=1 --export-legacy-megatron --export-te-mcore-model --export-default-te-spec
        --export-kv-cache-quant=1 --export-real-quant-cfg=1 --export-quant-cfg=1 --finetune-hf-dataset=1
        --finetune-data-split=1 --finetune-data-files=+ --qad-train-target=1 --freeze-base-for-mtp --export-qk-l2-norm
        --export-moe-apply-probs-on-input --export-offline-model --modelopt-enabled --load-model-opt-format
        --teacher-model-config=1""",
        "--export-kd-",
    ),
    Product("distillation from logits", "this program trains on text", prefixes="--logits-save- --logits-load-"),
    Product(
        "weight-sharded tensor parallelism", "--use-distributed-optimizer shards the optimizer state", prefixes="--gtp-"
    ),
    Product(
        "heterogeneous layers", "--moe-layer-freq selects the MoE layers", prefixes="--heterogeneous-layers-config-"
    ),
    Product(
        "tracing services",
        "--log-throughput, --tensorboard-dir and --metrics-file report what the run does",
        "--run-workload-inspector-server",
        "--otel-",
    ),
    Product(
        "cluster services of other packages (restart in process, auto-resume, fault tolerance, remote storage)",
        "--exit-duration-in-mins and --exit-signal-handler save and stop a run",
        "--enable-ft-package --calc-ft-timeouts --enable-msc",
        "--adlr-autoresume --inprocess- --ft-",
    ),
    Product(
        "the kitchen quantization package",
        "--fp8-format names the built-in formats",
        "--use-kitchen-attention",
        "--kitchen-",
    ),
    Product("fault injection", "kill a rank to test a restart", prefixes="--fault-injector-"),
    Product("YAML configuration of Megatron-LM", "--preset FILE.yaml reads the zoo's recipe files", "--yaml-cfg=1"),
    Product("legacy models", "remove it", "--openai-gelu --onnx-safe=1"),
)

_OUT_OF_SCOPE = MappingProxyType(
    {
        spelling: (product, takes)
        for product in PRODUCTS
        for spelling, takes in (*_spellings(product.flags), *((prefix, "*") for prefix in product.prefixes.split()))
    }
)
_PREFIXES = tuple(prefix for product in PRODUCTS for prefix in product.prefixes.split())


def find_out_of_scope(spelling: str) -> tuple[Product, int | str] | None:
    """Return the product that a spelling belongs to and the number of values it takes, or None."""
    if spelling in _OUT_OF_SCOPE:
        return _OUT_OF_SCOPE[spelling]
    prefix = next((prefix for prefix in _PREFIXES if spelling.startswith(prefix)), None)
    return None if prefix is None else _OUT_OF_SCOPE[prefix]


def is_known_spelling(spelling: str) -> bool:
    """Return whether a spelling that is no field is known."""
    return spelling in OLD_SPELLINGS or find_out_of_scope(spelling) is not None


def get_flag_status(dest: str) -> tuple[str, str]:
    """Return the status of a field and the reason; single values may have another status.

    Returns:
        ("acts" | "no effect" | "not implemented" | "renamed" | "unsupported", reason).
    """
    if dest in RENAMED:
        return "renamed", RENAMED[dest]
    if dest in NO_EFFECT:
        return "no effect", NO_EFFECT[dest]
    if dest in NOT_IMPLEMENTED:
        feature = NOT_IMPLEMENTED[dest]
        return ("not implemented" if feature.values is None else "acts"), feature.what
    if dest in UNSUPPORTED and UNSUPPORTED[dest].values is None:
        return "unsupported", UNSUPPORTED[dest].instead
    return "acts", ""

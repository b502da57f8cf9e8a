"""Deliberate differences from Megatron-LM's validation.

MORE_PERMISSIVE lists what runs here and is rejected there; FAILS_EARLIER lists what is rejected here at once and fails
there after minutes of start-up. Both are complete: the test over recorded outcomes of Megatron-LM fails for any other
difference. `cases` names such outcomes.

The functions do the nearest equivalent thing and note it.
"""

from dataclasses import dataclass

from arguments.mechanisms.dispatchers import FLEX, TYPE, get_dispatcher
from arguments.rules.derived_sizes import DerivedSizes, positive, quotient, uneven_ends
from arguments.settings import Settings


@dataclass(frozen=True)
class Difference:
    """One deliberate difference: what Megatron-LM does, what we do, and why."""

    name: str
    megatron: str
    ours: str
    why: str
    cases: tuple[str, ...] = ()


MORE_PERMISSIVE = (
    Difference(
        "te_cross_entropy_fusion",
        "refuses --cross-entropy-loss-fusion with --cross-entropy-fusion-impl te",
        "uses the native fused cross entropy",
        "the numbers are the same and published Qwen3 recipes ask for it; rejected only with --deterministic-mode",
        ("te_ce_fusion",),
    ),
    Difference(
        "tp_comm_overlap_without_tp",
        "refuses --tp-comm-overlap at --tensor-model-parallel-size 1",
        "switches the overlap off: there is no tensor-parallel communication to hide",
        "the public zoo's bf16 launch lines append it for every model",
        ("tp1_tp_comm_overlap",),
    ),
    Difference(
        "layers_per_virtual_stage_with_uneven_ends",
        "refuses --num-layers-per-virtual-pipeline-stage together with first/last stage layer counts",
        "derives the number of virtual stages from the middle stages; rejected only where that does not divide",
        "the wish is clear, and --num-virtual-stages-per-pipeline-rank says the same",
        ("vpp_with_first_last",),
    ),
    Difference(
        "one_virtual_stage_without_pipeline",
        "asks for pipeline parallelism even where the virtual stage flags amount to one stage",
        "takes one virtual stage for no interleaving at any pipeline size",
        "scripts with a VPP variable pass 1 for 'off'",
    ),
    Difference(
        "quoted_layer_frequency",
        "cannot read a layer frequency with literal quotes round it",
        "drops the quotes",
        "launchers that expand their command unquoted leave them there (the zoo's Kimi-K2)",
    ),
    Difference(
        "fake_process_group_with_flex",
        "runs the training loop without a network with --fake-process-group, and refuses --moe-token-dispatcher-type "
        "flex there",
        "prints a plan (--dry-run), which takes any dispatcher",
        "nothing is sent",
    ),
    Difference(
        "old_batch_size",
        "refuses --batch-size",
        "takes it for --micro-batch-size, unless that is given with another value",
        "it always meant the batch of one forward pass",
        ("batch_size_old",),
    ),
    Difference(
        "old_model_parallel_size",
        "refuses --model-parallel-size",
        "takes it for --tensor-model-parallel-size, unless that is given with another value",
        "it always meant tensor parallelism",
        ("model_parallel_size_old",),
    ),
    Difference(
        "old_checkpoint_activations",
        "prints a notice and exits with code 0, which a job scheduler takes for success",
        "recomputes every layer (full, uniform, one layer at a time), unless another recompute flag is given",
        "that is what the flag did",
        ("checkpoint_activations_old",),
    ),
    Difference(
        "local_attention_backend",
        "stops with a TypeError at --attention-backend local without --spec",
        "uses the plain torch attention",
        "it is an accident of that check; no layer spec is needed here",
        ("attn_backend_local_no_spec",),
    ),
    Difference(
        "no_position_embedding_with_none",
        "refuses --no-position-embedding unless rope is selected",
        "accepts it with --position-embedding-type none too",
        "both say the same",
    ),
    Difference(
        "flex_without_expert_ranks",
        "stops at the first forward pass when deepep or ncclep is asked for and there is one expert rank",
        "permutes locally: there is nothing to send",
        "a recipe must be runnable on one GPU for a smoke test",
    ),
    Difference(
        "moe_with_tp_without_sp",
        "stops at the first forward pass of an MoE layer when tensor parallelism runs without --sequence-parallel",
        "runs, with a note that --sequence-parallel saves memory and time",
        "the result is well defined",
        ("model_parallel_size_old",),
    ),
    Difference(
        "attention_environment_with_auto",
        "refuses NVTE_FLASH_ATTN, NVTE_FUSED_ATTN or NVTE_UNFUSED_ATTN set to 0 while --attention-backend is auto",
        "takes the variables for the user's choice",
        "that is what they are for",
    ),
    Difference(
        "expert_bias_of_softmax",
        "refuses --moe-router-enable-expert-bias with --moe-router-score-function softmax",
        "chooses experts by their softmax over all experts plus the bias, and computes weights without it; rejected "
        "only with --moe-router-group-topk",
        "ERNIE-4.5 is trained so",
        ("expert_bias_softmax",),
    ),
    Difference(
        "default_eval_interval",
        "divides by None while sizing the data without --eval-interval",
        "validates every 1000 iterations, the default of the released versions",
        "scripts that were written for that default run unchanged",
    ),
    Difference(
        "conversion_without_training",
        "asks for --lr, --micro-batch-size and the length of training with --ckpt-convert-format too",
        "needs none of them, and takes the schedules from the checkpoint",
        "a conversion trains nothing",
    ),
)

FAILS_EARLIER = (
    Difference(
        "rampup_batch_size",
        "reads --rampup-batch-size and ignores it",
        "ramps the batch size up, so its three numbers must fit",
        "a flag acts or is rejected",
    ),
    Difference(
        "tensors_that_nothing_reads",
        "leaves tensors unread that the checkpoint has and the model has not: --dist-ckpt-strictness is "
        "assume_ok_unexpected unless given",
        "refuses such a checkpoint (raise_unexpected) unless the flag is given, also with Megatron-LM's default",
        "the model would be another one than was trained; to train one with multi-token prediction without it: "
        "--mtp-num-layers 0 --dist-ckpt-strictness log_unexpected",
    ),
    Difference(
        "layer_frequency_length",
        "builds the arguments and fails when the model is built",
        "parses it too, and refuses to start (--validate-only: exit code 2) before anything is built",
        "the command line already contains the error",
    ),
    Difference(
        "expert_world",
        "fails when the process groups are built",
        "parses it too, and refuses to start (--validate-only: exit code 2) before anything is built",
        "the command line already contains the error",
    ),
    Difference(
        "upcycling_at_load_time",
        "parses --moe-use-upcycling with --save alone, and fails when it looks for the dense model or cuts its layers",
        "parses it too, and refuses to start (--validate-only: exit code 2) before anything is built",
        "the command line already contains the error",
    ),
    Difference(
        "router_at_run_time",
        "fails in the first forward pass: a balancing that chooses experts with an aux loss, more choices than experts",
        "refuses",
        "the command line already contains the error",
    ),
    Difference(
        "schedules_at_run_time",
        "fails while building the scheduler or sizing the data: no training length, no --lr, "
        "warmup not shorter than decay, interleaving with too few microbatches",
        "refuses",
        "the command line already contains the error",
    ),
    Difference(
        "sizes_at_build_time",
        "fails while building layers: widths that tensor parallelism or query groups do not divide, biases in shared "
        "experts, sequence length that sequence parallelism does not divide",
        "refuses",
        "the command line already contains the error",
    ),
)


def resolve_old_batch_size(s: Settings, _f: DerivedSizes) -> None:
    _rename(s, "batch_size", "micro_batch_size")


def _rename(s: Settings, old: str, new: str) -> None:
    value = getattr(s, old)
    if not positive(value) or (s.given(new) and getattr(s, new) != value):
        return
    s.note(f"{s.shown(old)}: taken as {s.flag(new)} {value}.")
    s.set_derived(new, value, f"from {s.flag(old)}")
    s.set_derived(old, None, f"replaced by {s.flag(new)}")


def resolve_conversion(s: Settings, _f: DerivedSizes) -> None:
    """Fill in what only training needs; the schedules that are written are the checkpoint's."""
    if s.ckpt_convert_format is None:
        return
    why = "a conversion trains nothing"
    if s.micro_batch_size is None:
        s.set_derived("micro_batch_size", 1, why)
    if s.seq_length is None and s.max_position_embeddings is not None:
        s.set_derived("seq_length", s.max_position_embeddings, why)
    if s.override_opt_param_scheduler:
        return  # then the flags' schedules are written
    s.set_derived("skip_train", True, why)
    s.set_derived("use_checkpoint_opt_param_scheduler", True, why)
    if s.lr is None:
        s.set_derived("lr", max(0.0, s.min_lr, s.lr_warmup_init), why)
    if s.train_iters is None and s.train_samples is None:
        s.set_derived("train_iters", 1 + max(0, s.lr_warmup_iters), why)


def resolve_eval_micro_batch_size(s: Settings, _f: DerivedSizes) -> None:
    """The micro-batch size of an evaluation changes its speed and memory, not its losses."""
    if s.is_eval_only and s.micro_batch_size is None and s.eval_micro_batch_size is None:
        s.set_derived("micro_batch_size", 1, "an evaluation (--skip-train)")


def resolve_old_model_parallel_size(s: Settings, _f: DerivedSizes) -> None:
    _rename(s, "model_parallel_size", "tensor_model_parallel_size")


def resolve_old_checkpoint_activations(s: Settings, _f: DerivedSizes) -> None:
    if not s.checkpoint_activations:
        return
    s.set_derived("checkpoint_activations", False, "replaced by the recompute flags")
    given = [d for d in ("recompute_granularity", "recompute_method", "recompute_num_layers") if s.given(d)]
    if given or s.recompute_activations:
        s.note(f"{s.flag('checkpoint_activations')} (old) adds nothing to the recompute flags that are set.")
        return
    for dest, value in (
        ("recompute_granularity", "full"),
        ("recompute_method", "uniform"),
        ("recompute_num_layers", 1),
    ):
        s.set_derived(dest, value, f"from {s.flag('checkpoint_activations')}")
    s.note(
        f"{s.flag('checkpoint_activations')}: taken as --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1."
    )


def resolve_cross_entropy_impl(s: Settings, _f: DerivedSizes) -> None:
    if s.cross_entropy_loss_fusion and s.cross_entropy_fusion_impl == "te":
        s.note(
            f"{s.flag('cross_entropy_fusion_impl')} te: the native fused cross entropy runs instead (same numbers; "
            "Megatron-LM has switched Transformer Engine's off)."
        )
        s.set_derived("cross_entropy_fusion_impl", "native", "Transformer Engine's fused cross entropy is not used")


def resolve_tp_overlap(s: Settings, f: DerivedSizes) -> None:
    if s.tp_comm_overlap and f.tp == 1:
        s.note(
            f"{s.flag('tp_comm_overlap')} is off: with --tensor-model-parallel-size 1 there is no tensor-parallel "
            "communication to overlap."
        )
        s.set_derived("tp_comm_overlap", False, "no tensor parallelism")


def resolve_uneven_virtual_stages(s: Settings, f: DerivedSizes) -> None:
    """Turn layers per virtual stage into a number of virtual stages where the end stages have their own sizes."""
    per_stage = s.num_layers_per_virtual_pipeline_stage
    if per_stage is None or not uneven_ends(s) or s.num_virtual_stages_per_pipeline_rank is not None:
        return
    middle = middle_layers_per_rank(s, f)
    stages = quotient(middle, per_stage)
    if stages is None:
        return
    s.note(
        f"{s.shown('num_layers_per_virtual_pipeline_stage')} with uneven first or last stages: taken as "
        f"--num-virtual-stages-per-pipeline-rank {stages} ({middle} layers on a middle rank / {per_stage})."
    )
    s.set_derived("num_virtual_stages_per_pipeline_rank", stages, "from the layers per virtual stage of a middle rank")
    s.set_derived("num_layers_per_virtual_pipeline_stage", None, "replaced by the number of virtual stages")


def middle_layers_per_rank(s: Settings, f: DerivedSizes) -> int | None:
    """Return the decoder layers of each pipeline rank between uneven ends; None if unknown or not divisible."""
    ends = [n for n in (s.decoder_first_pipeline_num_layers, s.decoder_last_pipeline_num_layers) if n is not None]
    if f.layers is None or not all(positive(n) for n in ends):
        return None
    return quotient(f.layers - sum(ends), f.pp - len(ends))


def note_flex_without_expert_ranks(s: Settings, f: DerivedSizes) -> None:
    if f.experts and get_dispatcher(s).type == FLEX and f.ep * f.etp == 1:
        s.note(f"{s.shown(TYPE)}: with one expert rank there is nothing to send; tokens are permuted locally.")


def note_experts_without_sequence_parallel(s: Settings, f: DerivedSizes) -> None:
    if f.experts and f.tp > 1 and not s.sequence_parallel:
        s.note(
            f"{s.shown('tensor_model_parallel_size')} with experts runs without --sequence-parallel: every tensor rank "
            "then holds all tokens; --sequence-parallel saves memory and time."
        )


def note_dropout_on_several_ranks(s: Settings, f: DerivedSizes) -> None:
    names = ("attention_dropout", "hidden_dropout")
    on = [f"{s.flag(name)} {getattr(s, name):g}" for name in names if getattr(s, name)]
    if on and (f.world or 1) > 1 and not s.skip_train:
        s.note(
            f"{' and '.join(on)} (0.1 is Megatron-LM's default): ranks draw their own random numbers, so losses depend "
            "on the number of ranks; with 0 they do not."
        )

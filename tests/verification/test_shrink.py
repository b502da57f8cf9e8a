"""Any command line becomes a small legal one that keeps its features: recipes of the public zoo, layouts, patterns, relations."""

import json
from pathlib import Path

import pytest

import arguments
from arguments.container import OPTIONS
from arguments.flag_status import get_flag_status
from arguments.rules.layout_grammar import read_layout
from arguments.settings import Settings
from arguments.spelling import to_command_line
from moe_trainer.verification.kept_flags import get_kept_flags
from moe_trainer.verification.mapping import ParallelMapping
from moe_trainer.verification.shrink import ShrinkError, as_is, shrink
from moe_trainer.verification.sizes import letters

RECIPES = json.loads((Path(__file__).parents[1] / "data" / "recipes.json").read_text())
MODEL = (
    "--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --ffn-hidden-size 18432 --seq-length 4096 --max-position-embeddings 4096 "
    "--num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --swiglu "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --micro-batch-size 1 --lr 1e-5 --train-iters 1000 "
    "--eval-iters 0 --bf16 --data-path /data/text --tokenizer-type HuggingFaceTokenizer --tokenizer-model some/model"
).split()
SPARSE = (
    "--experimental-attention-variant dsa --multi-latent-attention --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 "
    "--dsa-indexer-topk 2048 --dsa-indexer-loss-coeff 0.01"
)


def small(*flags: str, world: int, ranks: int = 8):
    """Return the parsed small command lines of MODEL with these flags, and the result of shrinking."""
    shrunk = shrink([*MODEL, *flags], world, ranks)
    return [arguments.parse_args(list(case.argv), case.world_size) for case in shrunk.cases], shrunk


def test_latent_experts_are_kept():
    (args,), _ = small("--moe-latent-size", "1024", "--expert-model-parallel-size", "64", world=64)
    assert 0 < args.moe.moe_latent_size < args.model.hidden_size


def test_deepseek_on_1024_gpus_keeps_its_features():
    (args,), shrunk = small(
        *"--pipeline-model-parallel-size 16 --decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 1 "
        "--expert-model-parallel-size 64 --moe-layer-freq ([0]*3+[1]*58) --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 "
        "--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-router-topk-scaling-factor 2.5 "
        "--moe-token-dispatcher-type alltoall --global-batch-size 8192 --use-distributed-optimizer --hidden-dropout 0.1".split(),
        world=1024,
    )
    assert shrunk.original == ParallelMapping(pp=16, dp=64, ep=64) and shrunk.cases[0].mapping == ParallelMapping(
        pp=4, dp=2, ep=2
    )
    model, moe, parallel, training = args.model, args.moe, args.parallel, args.training
    assert parallel.decoder_first_pipeline_num_layers > parallel.decoder_last_pipeline_num_layers
    assert (
        moe.moe_layer_freq[0] == 0 and moe.moe_layer_freq[-1] == 1 and len(moe.moe_layer_freq) == model.num_layers < 12
    )
    assert model.multi_latent_attention and model.q_lora_rank and model.hidden_size < 64
    assert (
        moe.moe_router_topk // moe.moe_router_group_topk == 2 and moe.moe_router_group_topk < moe.moe_router_num_groups
    )
    assert moe.num_experts // parallel.expert_model_parallel_size > 1
    assert moe.moe_shared_expert_intermediate_size == moe.moe_ffn_hidden_size < model.ffn_hidden_size
    assert (
        moe.moe_router_enable_expert_bias
        and moe.moe_router_topk_scaling_factor == 2.5
        and moe.moe_aux_loss_coeff == 1e-4
    )
    assert parallel.use_distributed_optimizer
    assert training.global_batch_size // (training.micro_batch_size * 2) >= 4, "more microbatches than stages"
    assert not args.precision.bf16 and model.hidden_dropout == 0 and args.data.mock_data and args.data.data_path is None
    notes = " ".join(shrunk.notes)
    assert "--bf16" in notes and "--hidden-dropout 0.1" in notes and "random tokens" in notes


@pytest.mark.parametrize(
    ("flags", "world", "holds"),
    [
        ("--group-query-attention --num-query-groups 8", 8, lambda a: 1 < a.model.num_query_groups < a.model.num_attention_heads),
        ("--group-query-attention --num-query-groups 1", 8, lambda a: a.model.num_query_groups == 1),
        ("--kv-channels 128", 8, lambda a: a.model.kv_channels * a.model.num_attention_heads != a.model.hidden_size),
        ("--moe-layer-freq 4", 8, lambda a: a.moe.moe_layer_freq > 1 and a.model.num_layers > 2),
        ("--mtp-num-layers 1", 8, lambda a: a.model.mtp_num_layers == 1),
        ("--untie-embeddings-and-output-weights", 8, lambda a: a.model.untie_embeddings_and_output_weights),
        ("--calculate-per-token-loss", 8, lambda a: a.training.calculate_per_token_loss),
        ("--expert-model-parallel-size 256", 256, lambda a: a.moe.num_experts == a.parallel.expert_model_parallel_size),
        ("--moe-expert-capacity-factor 1.25", 8, lambda a: a.moe.moe_expert_capacity_factor == 1.25),
        ("--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 1e-3", 8,
         lambda a: a.moe.moe_aux_loss_coeff == [1e-2, 1e-3]),
        ("--tensor-model-parallel-size 8 --sequence-parallel", 64, lambda a: a.parallel.sequence_parallel),
        ("--tensor-model-parallel-size 8", 64, lambda a: not a.parallel.sequence_parallel),
        ("--context-parallel-size 8 --cp-comm-type a2a", 64, lambda a: a.parallel.cp_comm_type == ["a2a"]),
        ("--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4", 64,
         lambda a: a.parallel.hierarchical_context_parallel_sizes == [2, 2]),
        ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 8, lambda a: a.parallel.overlap_param_gather),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 4", 64,
         lambda a: a.parallel.num_distributed_optimizer_instances == 2),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 4", 8,
         lambda a: (a.training.recompute_method, a.training.recompute_num_layers) == ("uniform", 2)),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 4", 8,
         lambda a: (a.training.recompute_method, a.training.recompute_num_layers) == ("block", 1)),
        ("--checkpoint-activations", 8, lambda a: (a.training.recompute_method, a.training.recompute_num_layers) == ("uniform", 1)),
        ("--moe-layer-recompute", 8, lambda a: a.training.recompute_modules == ["core_attn", "moe"]),
        ("--recompute-granularity selective --recompute-modules layernorm mlp", 8, lambda a: a.training.recompute_modules == ["layernorm", "mlp"]),
        ("--tensor-model-parallel-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
         "--distribute-saved-activations", 8, lambda a: a.training.distribute_saved_activations),
        ("--fine-grained-activation-offloading --offload-modules core_attn expert_fc1 --activation-offload-fraction 0.5", 8,
         lambda a: (a.training.offload_modules, a.training.min_offloaded_tensor_size, a.training.activation_offload_fraction) ==
         (["core_attn", "expert_fc1"], 1, 0.5)),
        ("--cpu-offloading-num-layers 7", 8, lambda a: 0 < a.training.cpu_offloading_num_layers < a.model.num_layers),
        (f"{SPARSE} --dsa-indexer-use-sparse-loss", 8, lambda a: (a.model.dsa_indexer_topk < a.data.seq_length, a.model.dsa_indexer_loss_coeff) ==
         (True, 1.0) and a.model.dsa_indexer_use_sparse_loss and a.model.dsa_indexer_head_dim >= a.model.qk_pos_emb_head_dim),
        (f"{SPARSE} --dsa-indexer-topk 4096 --dsa-indexer-warmup", 8, lambda a: a.model.dsa_indexer_topk >= a.data.seq_length
         and a.model.dsa_indexer_warmup),
        (f"{SPARSE} --dsa-indexer-use-sparse-loss --dsa-indexer-topk 64 --attention-dropout 0", 8, lambda a: a.model.dsa_attention_form == "gathered"),
        (f"{SPARSE} --dsa-indexer-use-sparse-loss --attention-dropout 0 --kv-lora-rank 512", 8, lambda a: a.model.dsa_attention_form == "masked"),
        (f"{SPARSE} --context-parallel-size 8 --cp-comm-type allgather", 64, lambda a: a.parallel.cp_comm_type == ["allgather"]),
        ("--window-size 511,0", 8, lambda a: a.model.window_size == (5, 0)),
        ("--clip-grad 0", 8, lambda a: a.optimizer.clip_grad == 0),
        ("--optimizer sgd --sgd-momentum 0.5", 8, lambda a: a.optimizer.optimizer == "sgd" and a.optimizer.sgd_momentum == 0.5),
        ("--global-batch-size 8", 8, lambda a: a.training.global_batch_size == a.training.micro_batch_size * a.world_size),
    ],
)  # fmt: skip
def test_features_and_relations_are_kept(flags, world, holds):
    found, _ = small(*flags.split(), world=world)
    assert all(holds(args) for args in found)


@pytest.mark.parametrize(
    ("flags", "defined", "plain"),
    [
        ("--moe-router-load-balancing-type global_aux_loss", "global_aux_loss",
         lambda a: a.moe.moe_router_load_balancing_type in ("seq_aux_loss", ["seq_aux_loss"])),
        ("--moe-router-load-balancing-type aux_loss global_aux_loss --moe-aux-loss-coeff 1e-2 1e-3", "global_aux_loss",
         lambda a: a.moe.moe_router_load_balancing_type == ["aux_loss", "seq_aux_loss"] and a.moe.moe_aux_loss_coeff == [1e-2, 1e-3]),
        ("--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0 --tensor-model-parallel-size 2", "sinkhorn",
         lambda a: a.moe.moe_router_load_balancing_type in ("seq_aux_loss", ["seq_aux_loss"])),
        ("--moe-expert-capacity-factor 1 --moe-token-drop-policy position --moe-pad-expert-input-to-capacity --tensor-model-parallel-size 2",
         "expert capacity", lambda a: a.moe.moe_expert_capacity_factor is None and not a.moe.moe_pad_expert_input_to_capacity),
        ("--mtp-num-layers 1 --context-parallel-size 2", "multi-token prediction", lambda a: not a.model.mtp_num_layers),
    ],
)  # fmt: skip
def test_quantities_defined_by_the_mapping_get_a_case_without_them(flags, defined, plain):
    """In that case the reference runs the plain program."""
    found, shrunk = small(*flags.split(), world=16, ranks=4)
    *first, last = shrunk.cases
    assert (
        any(name.startswith(defined) for case in first for name in case.defined_by_mapping)
        and not last.defined_by_mapping
    )
    assert plain(found[-1]) and not plain(found[0]) and last.mapping in [case.mapping for case in first]
    assert any("the reference runs the plain program" in note for note in shrunk.notes)


def test_no_further_case_if_nothing_depends_on_the_mapping():
    found, shrunk = small(
        *"--moe-router-load-balancing-type seq_aux_loss --moe-expert-capacity-factor 1".split(), world=4, ranks=4
    )
    assert len(found) == 1 and not shrunk.cases[0].defined_by_mapping, "one rank's tokens are full sequences"


def test_global_loss_keeps_enough_microbatches_for_its_running_mean():
    found, _ = small(*"--moe-router-load-balancing-type global_aux_loss --global-batch-size 64".split(), world=8)
    training, dp = found[0].training, found[0].world_size
    assert training.global_batch_size // (training.micro_batch_size * dp) == 3


def test_no_small_command_line_writes_where_the_run_writes():
    """Paths of the run are for its own files, in whatever section their flags are."""
    settings = Settings(OPTIONS)
    written = [dest for dest, option in OPTIONS.items() if option.path == "write"]
    for dest in written:
        settings.set_given(dest, "elsewhere", "command line", OPTIONS[dest].on[0])
    assert len(written) > 10 and get_kept_flags(settings) == {}


def test_flags_without_a_case_are_listed():
    _, shrunk = small(
        *"--hidden-dropout 0.1 --moe-input-jitter-eps 0.01 --cuda-graph-impl local --expert-model-parallel-size 4".split(),
        world=8,
    )
    assert {"--bf16", "--hidden-dropout 0.1", "--moe-input-jitter-eps 0.01"} <= set(shrunk.not_compared)
    assert any(name.startswith("--cuda-graph-impl") for name in shrunk.not_compared)


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--max-seqlen-per-dp-cp-rank 8192 --pad-packed-seq-alignment max", {"pad_packed_seq_alignment": "max"}),
        (
            "--max-seqlen-per-dp-cp-rank 65536 --sequence-packing-scheduler cost_balanced "
            "--pad-packed-seq-alignment 128 --thd-tail-padding-policy extend_last --thd-max-packed-sequences 512",
            {
                "sequence_packing_scheduler": "cost_balanced",
                "pad_packed_seq_alignment": "4",
                "thd_tail_padding_policy": "extend_last",
                "thd_max_packed_sequences": 4,
            },
        ),
        ("", {"sequence_packing_scheduler": "dp_balanced", "pad_packed_seq_alignment": None}),
    ],
)
def test_packed_samples_stay_packed(flags, expected):
    (args,), shrunk = small("--use-varlen-dataset", *flags.split(), "--expert-model-parallel-size", "4", world=4)
    assert args.packed_capacity == 2 * args.data.seq_length and "--use-varlen-dataset" not in shrunk.not_compared
    assert {dest: getattr(args.parallel, dest) for dest in expected} == expected


def test_fp8_of_packed_samples_is_not_compared():
    (args,), shrunk = small(
        "--use-varlen-dataset", *"--fp8-format e4m3 --max-seqlen-per-dp-cp-rank 8192".split(),
        *"--pad-packed-seq-alignment max --expert-model-parallel-size 4".split(), world=4,
    )  # fmt: skip
    assert args.packed_capacity and args.precision.fp8 is None and "--fp8-format" in ", ".join(shrunk.not_compared)


def test_dense_model_stays_dense():
    words = MODEL[: MODEL.index("--num-experts")] + MODEL[MODEL.index("--swiglu") :]
    shrunk = shrink([*words, "--tensor-model-parallel-size", "4"], 32)
    args = arguments.parse_args(list(shrunk.cases[0].argv), shrunk.cases[0].world_size)
    assert args.moe.num_experts is None and shrunk.cases[0].mapping == ParallelMapping(tp=2, dp=2, etp=2)


def test_groups_of_mamba_layers_divide_over_tensor_and_context_ranks():
    words = "--preset nemotron_3_tiny --mock-data --mamba-num-groups 4 --context-parallel-size 2 --sequence-parallel"
    (case,) = shrink([*words.split(), "--tensor-model-parallel-size", "2"], 4).cases
    assert case.argv[case.argv.index("--mamba-num-groups") + 1] == "4"


def test_depths_of_a_hybrid_model_keep_a_layer_of_every_kind():
    assert letters("MEM*E" + "/*E*E" * 3, 3) == "ME*/*E/*E" and letters("MEM*E", 3) == "ME*"


def test_pipeline_layout_keeps_its_kinds_of_stages():
    layout = "Ettt|" + "tttt|" * 14 + "ttmL"
    (args,), _ = small(
        "--pipeline-model-parallel-size",
        "16",
        "--pipeline-model-parallel-layout",
        layout,
        "--mtp-num-layers",
        "1",
        *"--moe-layer-freq ([0]*3+[1]*58)".split(),
        world=128,
    )
    stages = read_layout(args.parallel.pipeline_model_parallel_layout).stages
    assert len(stages) == args.parallel.pipeline_model_parallel_size == 4
    assert stages[0].startswith("E") and stages[-1].endswith("mL") and stages[1] == stages[2] == "tt"


def test_uneven_stages_of_a_layout_stay_uneven():
    argv = [
        "--num-layers",
        "61",
        "--pipeline-model-parallel-size",
        "4",
        "--pipeline-model-parallel-layout",
        "Et*13|t*17|t*16|t*15L",
    ]
    (args,), _ = small(*argv, world=4, ranks=4)
    counts = [stage.count("t") for stage in read_layout(args.parallel.pipeline_model_parallel_layout).stages]
    assert len(set(counts)) > 1, counts


def test_a_standalone_mtp_stage_stays_alone():
    layout = "Et*8|" + "t*8|" * 6 + "t*5m|L"
    (args, *_), _ = small(
        "--pipeline-model-parallel-size",
        "9",
        "--pipeline-model-parallel-layout",
        layout,
        "--mtp-num-layers",
        "1",
        world=9,
    )
    assert args.parallel.mtp_standalone


def test_virtual_stages_and_uneven_ends():
    found, _ = small(
        *"--pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 2 --decoder-first-pipeline-num-layers 6 "
        "--decoder-last-pipeline-num-layers 6".split(),
        "--num-layers",
        "60",
        "--global-batch-size",
        "64",
        world=8,
    )
    for args in found:
        parallel = args.parallel
        assert parallel.num_virtual_stages_per_pipeline_rank == 2 and parallel.pipeline_model_parallel_size > 2
        middle = (
            args.model.num_layers
            - parallel.decoder_first_pipeline_num_layers
            - parallel.decoder_last_pipeline_num_layers
        )
        assert parallel.decoder_first_pipeline_num_layers < middle / (parallel.pipeline_model_parallel_size - 2)


@pytest.mark.parametrize("counted", ["embedding", "loss"])
def test_embedding_and_loss_still_count_as_layers(counted):
    flag = f"--account-for-{counted}-in-pipeline-split"
    (args,), _ = small("--pipeline-model-parallel-size", "4", flag, "--num-layers", "63", world=4)
    assert flag.replace("-", "_")[2:] and (args.model.num_layers + 1) % args.parallel.pipeline_model_parallel_size == 0


def test_more_dimensions_than_ranks_give_several_cases_and_a_note():
    found, shrunk = small(
        *"--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --pipeline-model-parallel-size 8 "
        "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1".split(),
        "--num-layers",
        "64",
        world=512,
    )
    assert len(found) > 1 and any("cannot hold all dimensions at once" in note for note in shrunk.notes)


PIPE = "--pipeline-model-parallel-size 4 --num-layers 64 --global-batch-size 512"
VIRTUAL = f"{PIPE} --num-virtual-stages-per-pipeline-rank 2"
OVERLAP = "--expert-model-parallel-size 4 --overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall"
HYBRIDEP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
# flags that have a meaning only with others, and values that fit the others; by hand, since rules ask for more than what
# `needs` of their fields says
UPCYCLING = (
    "~--moe-shared-expert-intermediate-size --moe-ffn-hidden-size 4608 --num-experts 16 --moe-router-topk 4 --moe-use-upcycling "
    "--load dense --save experts --save-interval 10"
)
DELTA = "--experimental-attention-variant gdn --linear-attention-freq 4"
COMPRESSED = (
    "--experimental-attention-variant dsv4_hybrid --multi-latent-attention --qk-layernorm --q-lora-rank 64 --attention-dropout 0 --disable-bias-linear "
    "--csa-compress-ratios ([0,4,128]*30) --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 64 --dsa-indexer-topk 32 --normalization RMSNorm"
)
HYBRID = "--hybrid-layer-pattern M*-EME*E"
LINEAR = {
    "linear_num_key_heads": "8",
    "linear_num_value_heads": "64",
    "linear_key_head_dim": "64",
    "linear_value_head_dim": "64",
    "linear_conv_kernel_dim": "3",
}
INDEXERS = [dest for dest in OPTIONS if dest.startswith("dsa_indexer_")]
REQUIRED_FLAGS = {
    "mup_base_hidden_size": "--use-mup",
    **dict.fromkeys(("lora_alpha", "lora_dropout", "lora_target_modules"), "--lora-dim 8"),
    **dict.fromkeys((*INDEXERS, "dsa_kernel_backend"), SPARSE),
    "dsa_attention_form": f"{SPARSE} --dsa-indexer-use-sparse-loss --attention-dropout 0",
    **dict.fromkeys(
        ("csa_compress_ratios", "csa_window_size", "csa_compress_rotary_base", "csa_dense_mode", "o_groups", "o_lora_rank"), COMPRESSED
    ),
    **dict.fromkeys(("kda_gate_rank", "kda_decay_lower_bound"), DELTA.replace("gdn", "kda")),
    **dict.fromkeys(LINEAR, DELTA), "linear_attention_freq": "--experimental-attention-variant gdn",
    "experimental_attention_variant": "--linear-attention-freq 4",
    "num_query_groups": "--group-query-attention", "sequence_parallel": "--tensor-model-parallel-size 2",
    "tp_comm_overlap": "--tensor-model-parallel-size 2 --sequence-parallel",
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), "--multi-latent-attention"),
    "head_wise_attn_gate": "--multi-latent-attention",
    "attention_latent_norm_epsilon": "--multi-latent-attention --qk-layernorm",
    "mla_down_proj_fusion": "--multi-latent-attention --q-lora-rank 12",
    **dict.fromkeys(("qk_layernorm_all_heads", "qk_layernorm_after_rope"), "--qk-layernorm"),
    "qk_l2_norm_rope_layers_only": "--qk-l2-norm",
    "attn_temperature_tuning": "--no-rope-freq 4", "attn_temperature_floor": "--attn-temperature-tuning mistral4",
    "attn_temperature_scale": "--attn-temperature-tuning mistral4",
    **dict.fromkeys(("window_rotary_percent", "window_rope_unscaled", "window_softmax_type"), "--window-size 8,0"),
    "window_num_query_groups": "--window-size 8,0 --group-query-attention --num-query-groups 8",
    "pre_layernorm": "--post-self-attn-layernorm --post-mlp-layernorm",
    "pipeline_schedule": PIPE, "microbatch_group_size_per_vp_stage": VIRTUAL, "overlap_p2p_comm": VIRTUAL,
    **dict.fromkeys(("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), f"{PIPE} --num-layers 63"),
    **dict.fromkeys(("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"), f"{PIPE} --num-layers 62"),
    "num_layers_per_virtual_pipeline_stage": PIPE, "num_virtual_stages_per_pipeline_rank": PIPE, "pipeline_model_parallel_size": PIPE,
    **dict.fromkeys(("ddp_bucket_size", "overlap_param_gather"), "--use-distributed-optimizer --overlap-grad-reduce"),
    "overlap_param_gather_with_optimizer_step":
        f"{VIRTUAL} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ckpt-format torch",
    "moe_shared_expert_overlap": "--moe-token-dispatcher-type alltoall", "moe_router_group_topk": "--moe-router-num-groups 8",
    "moe_router_group_score_topk": "--moe-router-num-groups 8 --moe-router-group-topk 2",
    "moe_router_enable_expert_bias": "--moe-router-score-function sigmoid",
    "moe_pad_expert_input_to_capacity": "--moe-expert-capacity-factor 2",
    "moe_apply_probs_on_input": "--moe-router-topk 1 --moe-router-pre-softmax",
    "moe_router_sparsemixer_jitter": "--moe-router-topk 2",
    "moe_routing_replay_path": "--moe-enable-routing-replay",
    "moe_expert_rank_capacity_factor": HYBRIDEP,
    "moe_paged_stash": f"{HYBRIDEP} --moe-expert-rank-capacity-factor 1.5",
    **dict.fromkeys(("moe_paged_stash_page_size", "moe_paged_stash_buffer_size_factor_cuda", "moe_paged_stash_buffer_size_factor_cpu"),
                    f"{HYBRIDEP} --moe-expert-rank-capacity-factor 1.5 --moe-paged-stash"),
    **dict.fromkeys(
        ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "mamba_step_size_min", "mamba_step_size_max"), HYBRID
    ),
    "cp_comm_type": "--context-parallel-size 2", "hierarchical_context_parallel_sizes": "--context-parallel-size 4 --cp-comm-type a2a+p2p",
    **dict.fromkeys(("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"), "--moe-token-dispatcher-type alltoall"),
    "moe_router_padding_for_quantization": "--fp8-format e4m3 --moe-token-dispatcher-type alltoall",
    **dict.fromkeys(("moe_use_upcycling", "moe_upcycling_granularity", "moe_upcycling_expert_init"), UPCYCLING),
    **dict.fromkeys(("max_seqlen_per_dp_cp_rank", "sequence_packing_scheduler", "thd_max_packed_sequences"), "--use-varlen-dataset"),
    **dict.fromkeys(
        ("hybrid_context_parallel", "dynamic_context_parallel"), "--use-varlen-dataset --calculate-per-token-loss"
    ),
    "min_dynamic_context_parallel_size": "--use-varlen-dataset --dynamic-context-parallel --calculate-per-token-loss",
    "pad_packed_seq_alignment": "--use-varlen-dataset --max-seqlen-per-dp-cp-rank 8192",
    "thd_tail_padding_policy": "--use-varlen-dataset --max-seqlen-per-dp-cp-rank 8192 --pad-packed-seq-alignment max",
    "overlap_moe_expert_parallel_comm": OVERLAP, "delay_wgrad_compute": OVERLAP, "use_megatron_fsdp": "--ckpt-format fsdp_dtensor",
}  # fmt: skip
VALUES = {
    "hybrid_layer_pattern": "M*-EME*E", "mamba_num_groups": "4", "mamba_head_dim": "32", "mamba_num_heads": "64",
    "max_seqlen_per_dp_cp_rank": "8192",
    **LINEAR, "dsa_indexer_n_heads": "32", "dsa_indexer_head_dim": "256", "dsa_indexer_topk": "512", "dsa_attention_form": "gathered",
    "hidden_size": "14336", "max_position_embeddings": "8192", "num_experts": "128", "cp_comm_type": "a2a",
    "hierarchical_context_parallel_sizes": "2 2", "moe_router_group_topk": "4", "microbatch_group_size_per_vp_stage": "8",
    "pipeline_model_parallel_layout": None,  # has separate tests
    "decoder_first_pipeline_num_layers": "14", "decoder_last_pipeline_num_layers": "14", "pipeline_model_parallel_size": "2",
    "squared_relu": None, "quick_geglu": None,  # excluded by --swiglu
    "rotary_base_per_layer": " ".join(["10000"] * 60 + ["500000"]),
    "kda_decay_lower_bound": "-5",
    "qk_clip_alpha": "0.3", "moe_upcycling_granularity": "4", "lora_target_modules": "linear_qkv",
    "csa_compress_ratios": "([4,0]*50)", "o_groups": "4", "csa_window_size": "64", "o_lora_rank": "32", "csa_compress_rotary_base": "160000",
    "ddp_param_name_patterns_for_fp32_local_accumulation": "all",
}  # fmt: skip
FOUR = dict(zip([dest for dest in OPTIONS if dest.startswith("finermoe_")], "4212"))
REQUIRED_FLAGS |= dict.fromkeys(
    (*FOUR, "moe_concat_proj"),
    "--moe-ffn-hidden-size 4608 --num-experts 16 --moe-router-topk 2 --G-I 4 --G-O 2 --R-I 1 --R-O 2",
)
VALUES |= FOUR
NOTED_AS = {
    "num_layers_per_virtual_pipeline_stage": "num_virtual_stages_per_pipeline_rank",
    "hybrid_context_parallel": "dynamic_context_parallel",  # the deprecated spelling
}
GUESSES = ("2", "4", "0.5", "8,0", "a")


def shrunk_with(option) -> list:
    """Shrink a command line with the first legal value of an option that is not its default.

    `~--flag` among the required flags drops one of MODEL with its value.
    """
    model, required = list(MODEL), []
    for word in REQUIRED_FLAGS.get(option.dest, "").split():
        if word.startswith("~"):
            at = model.index(word[1:])
            del model[at : at + 2]
        else:
            required.append(word)
    if option.takes == 0:
        tries = [[(option.off if option.default else option.on)[0]]]
    else:
        default = option.default if isinstance(option.default, list) else [option.default]
        found = (
            [VALUES[option.dest]]
            if option.dest in VALUES
            else [c for c in option.choices or GUESSES if c not in default]
        )
        tries = [[option.on[0], *str(value).split()] for value in found]
    reasons = []
    for words in tries:
        try:
            return shrink([*model, *required, *words], 64)
        except ShrinkError as error:
            reasons.append(error.reasons[0])
    raise AssertionError(f"{option.dest}: no legal value among {tries}: {reasons}")


ACTING = [
    option
    for dest, option in OPTIONS.items()
    if option.section in ("model", "moe", "parallel")
    and option.role not in ("runtime", "launch", "output")
    and get_flag_status(dest)[0] == "acts"
    and VALUES.get(dest, "") is not None
]


def test_optimizer_state_keeps_formats_and_placement():
    (args,), shrunk = small(
        *"--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16 "
        "--main-params-dtype fp16 --main-grads-dtype bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.4".split(),
        world=8,
    )
    optimizer, notes = args.optimizer, " ".join(shrunk.notes)
    assert (
        optimizer.use_precision_aware_optimizer
        and optimizer.optimizer_cpu_offload
        and optimizer.optimizer_offload_fraction == 0.4
    )
    assert optimizer.exp_avg_dtype == optimizer.exp_avg_sq_dtype == "fp16" and "--exp-avg-dtype fp8: fp16" in notes
    assert "--main-params-dtype" in notes and "--main-grads-dtype" in notes
    reference = arguments.parse_args(list(shrunk.cases[0].reference), 1).optimizer
    assert reference.exp_avg_dtype == "fp16" and not reference.optimizer_cpu_offload


@pytest.mark.parametrize("option", ACTING, ids=lambda option: option.dest)
def test_every_flag_with_effect_is_kept_or_noted(option):
    """What a case leaves out is in its notes."""
    shrunk = shrunk_with(option)
    notes = " ".join([*shrunk.notes, *shrunk.left_out]).replace(",", " ").replace(":", " ").split()
    words = {word for case in shrunk.cases for word in case.argv}
    assert any(word in words or word in notes for word in OPTIONS[NOTED_AS.get(option.dest, option.dest)].spellings)


def test_reference_has_no_parallel_flag():
    case = shrink(
        [*MODEL, *"--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --use-distributed-optimizer".split()],
        64,
    ).cases[0]
    args = arguments.parse_args(list(case.reference), 1)
    assert (
        args.parallel == arguments.parse_args([*case.reference], 1).parallel
        and args.parallel.tensor_model_parallel_size == 1
    )
    assert not args.parallel.use_distributed_optimizer and args.moe.num_experts == 8


MICRO_BATCH_SIZES = [  # of the ranks and of the one process, in a global batch of 8 sequences on two data ranks
    ("2", "--calculate-per-token-loss --moe-aux-loss-coeff 0", 1),
    ("2", "--calculate-per-token-loss --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1", 1),
    ("1", "--calculate-per-token-loss --moe-z-loss-coeff 0.1", 8),
    ("2", "--calculate-per-token-loss --mtp-num-layers 1 --mtp-loss-per-token", 1),
    ("2", "", 2),
    ("2", "--calculate-per-token-loss --moe-aux-loss-coeff 0.1", 2),
    ("2", "--calculate-per-token-loss --moe-expert-capacity-factor 1", 2),
    ("2", "--calculate-per-token-loss --mtp-num-layers 1", 2),
    ("1", "--calculate-per-token-loss --use-varlen-dataset", 1),
]


@pytest.mark.parametrize(("micro", "flags", "expected"), MICRO_BATCH_SIZES)
def test_reference_has_other_microbatches_where_nothing_depends_on_them(micro, flags, expected):
    argv = [
        *MODEL[: MODEL.index("--data-path")],
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "99",
        *flags.split(),
    ]
    case = as_is([*argv, "--mock-data", "--micro-batch-size", micro, "--global-batch-size", "8"], 2)
    of_ranks, of_one = (arguments.parse_args(list(each), n) for each, n in ((case.argv, 2), (case.reference, 1)))
    assert (of_ranks.training.micro_batch_size, of_one.training.micro_batch_size) == (int(micro), expected)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--no-such-flag"], "--no-such-flag: this flag is unknown"),
        (["--num-attention-heads", "7", "--tensor-model-parallel-size", "2"], "must be a multiple of"),
        (["--moe-router-topk", "eight"], "the value must be an integer"),
    ],
)
def test_invalid_flags_raise_the_messages_of_the_trainer(flags, reason):
    with pytest.raises(ShrinkError) as error:
        shrink([*MODEL, *flags], 64)
    assert any(reason in text for text in error.value.reasons)


def test_unknown_world_size_is_one_replica(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (
        shrink(
            [
                *MODEL,
                *"--tensor-model-parallel-size 2 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1".split(),
            ]
        ).original.world
        == 8
    )
    monkeypatch.setenv("WORLD_SIZE", "32")
    assert shrink(MODEL).original.world == 32


@pytest.mark.parametrize(
    "flags", ["", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor"]
)
def test_as_is_returns_the_same_case(flags):
    case = shrink([*MODEL, "--expert-model-parallel-size", "8", *flags.split()], 64).cases[0]
    same = as_is(list(case.argv), case.world_size)
    assert same.mapping == case.mapping and arguments.parse_args(list(same.argv), 4) == arguments.parse_args(
        list(case.argv), 4
    )
    with pytest.raises(ShrinkError, match="--vocab-size is missing"):
        as_is(MODEL, 1)


def test_flags_are_spelled_as_they_are_parsed():
    words = to_command_line(
        {
            "swiglu": True,
            "add_bias_linear": False,
            "moe_layer_freq": [0, 1, 1],
            "window_size": (5, 0),
            "cp_comm_type": ["a2a"],
        }
    )
    args = arguments.parse_args([*MODEL, *words, "--num-layers", "3"], 1)
    assert (
        args.model.swiglu
        and not args.model.add_bias_linear
        and args.moe.moe_layer_freq == [0, 1, 1]
        and args.model.window_size == (5, 0)
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe["name"])
def test_recorded_recipes_can_be_shrunk(recipe):
    assert shrink(recipe["argv"], recipe["world_size"]).cases


def test_every_public_recipe_can_be_shrunk(shared):
    recipes = json.loads((shared / "reference" / "recipes.json").read_text())
    missing = []
    for recipe in recipes:
        try:
            cases = shrink(recipe["argv"], recipe["world_size"]).cases
        except ShrinkError as error:
            missing.append((recipe["name"].rsplit("/", 1)[-1], error.reasons[0]))
        else:
            assert cases and all(case.world_size <= 8 for case in cases), recipe["name"]
    incomplete = [name for name, reason in missing if "--num-layers is missing" in reason]
    assert len(incomplete) == 2, "two recorded lines hold no model at all"
    assert [name for name, _ in missing if name not in incomplete] == []

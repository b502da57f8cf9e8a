"""Hybrid models on ranks: training equals one process, and a stopped run resumes bit for bit, in another layout too."""

import re

import pytest
import torch
from harness import run_ranks
from training.agreement import Row, check_rows
from training.layouts import create_groups, make_argv, make_run, shallow
from training.resuming import assert_alike, load_and_save, run_steps, train_and_save
from training.test_resume import assert_same_end, outputs, run

from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.inspect import differences
from moe_trainer.checkpoint.manager import CheckpointState, SaveOptions, save
from moe_trainer.checkpoint.megatron_legacy.reader import open_file
from moe_trainer.checkpoint.verify import verify_checkpoint
from moe_trainer.model.module_names import named_transformer_layers
from moe_trainer.parallel.state import ParallelState

PATTERN = "ME*M-E"
FLAGS = (
    "--mamba-num-heads 8 --mamba-head-dim 6 --mamba-num-groups 4 --mamba-state-dim 10 --position-embedding-type none "
    "--moe-latent-size 8 --moe-shared-expert-intermediate-size 8 --expert-tensor-parallel-size 1"
).split()

LATENTS = "--q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 4 --qk-layernorm"
INDEXER = "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 8 --dsa-indexer-topk 5 --dsa-indexer-loss-coeff 2.5 --seed 2"
DELTA = (
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8 "
    "--layernorm-epsilon 0.1"
)
FLAGS_OF_ATTENTION = {
    "+E+-": (LATENTS, "--multi-latent-attention"),
    "DED-": (f"{LATENTS} {INDEXER}", "--multi-latent-attention --experimental-attention-variant dsa"),
    "GE*-": (DELTA, "--experimental-attention-variant gdn --linear-attention-freq ([1,0])"),
    "GE+-": (
        f"{DELTA} {LATENTS}",
        "--multi-latent-attention --experimental-attention-variant gdn --linear-attention-freq ([1,0])",
    ),
}
"""By pattern: the sizes of its attention, and the flags that select that attention in transformer layers."""


def argv(pattern=PATTERN, *more):
    words = make_argv("plain")
    at = words.index("--num-layers")
    return [*words[:at], *words[at + 2 :], f"--hybrid-layer-pattern={pattern}", *FLAGS, *more]


def test_ranks_equal_one_process():
    """Uneven stages with tensor ranks: the checkpoint of the next test."""
    tp2, small = "--tensor-model-parallel-size 2 --sequence-parallel", ("--global-batch-size", "4")
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    stages = "--hybrid-layer-pattern=M|E*|M-|E --pipeline-model-parallel-size 2"
    outcomes = check_rows({
        "tp, sp, ep": Row(4, argv(), f"{tp2} --expert-model-parallel-size 2"),
        "cp, tp, sp": Row(4, argv(PATTERN, *small), f"{tp2} --context-parallel-size 2"),
        "muon, mup, tp, sp": Row(
            2, argv(PATTERN, *small, *"--optimizer muon --muon-fp32-matmul-prec high --use-mup --mup-base-hidden-size 8".split()), tp2
        ),
        "mtp, uneven stages, ep": Row(
            4,
            argv("MEM*-E/*E/*E"),
            "--hybrid-layer-pattern=M|EM*-E/*E/*E --pipeline-model-parallel-size 2 --expert-model-parallel-size 2",
        ),
        "mtp of one repeated depth, tp, sp": Row(2, argv("M-/M*E/M*E", "--mtp-use-repeated-layer"), f"{tp2} {full}"),
        "hyper-connections, stages": Row(2, argv("ME*-", "--enable-hyper-connections"), "--hybrid-layer-pattern=ME|*- --pipeline-model-parallel-size 2"),
        "virtual stages, dp": Row(4, argv(), f"{stages} --use-distributed-optimizer {full}"),
    })  # fmt: skip
    for outcome in outcomes.values():
        assert any("mixer.A_log" in key for key in outcome.grads)
    connections = {key for key in outcomes["hyper-connections, stages"].grads if "hyper_connection.alpha_res" in key}
    assert connections == {
        f"decoder.layers.{number}.{sublayer}_hyper_connection.alpha_res"
        for number, sublayer in enumerate(("mixer", "mlp", "self_attention", "mlp"))
    }


def test_ranks_with_other_attention_equal_one_process():
    """Gated DeltaNet with latent attention, sparse attention among Mamba layers, and all three kinds."""
    mixed = argv("GE+-", "--global-batch-size", "4", *DELTA.split(), *LATENTS.split())
    sparse = argv("DME-", "--global-batch-size", "4", *LATENTS.split(), *INDEXER.split())
    every = argv("DG+E", "--global-batch-size", "4", *DELTA.split(), *LATENTS.split(), *INDEXER.split())
    tp2, cp2 = "--tensor-model-parallel-size 2 --sequence-parallel", "--context-parallel-size 2"
    stages = "--pipeline-model-parallel-size 2"
    outcomes = check_rows({
        "G and +, tp, sp": Row(2, mixed, tp2),
        "G and +, cp": Row(2, mixed, cp2),
        "G and +, stages": Row(2, mixed, f"--hybrid-layer-pattern=G|E+- {stages}"),
        "D, tp, sp": Row(2, sparse, tp2),
        "D, cp": Row(2, sparse, f"{cp2} --cp-comm-type allgather"),
        "D, G and +, tp, sp": Row(2, every, tp2),
        "D, G and +, cp": Row(2, every, f"{cp2} --cp-comm-type allgather"),
        "D, G and +, stages, mtp": Row(2, [*every, "--hybrid-layer-pattern=D+E/GE"], f"--hybrid-layer-pattern=D|+E/GE {stages}"),
    })  # fmt: skip
    assert any("indexer" in key for key in outcomes["D, cp"].grads)


def test_a_checkpoint_resumes_under_other_layouts(tmp_path):
    """The stored tensors are bitwise equal, and the next losses are those of the uninterrupted run."""
    source, pattern = tmp_path / "source", "ME*M-E/*E/*E"
    small = "--global-batch-size 4 --calculate-per-token-loss --mtp-loss-per-token".split()
    stages = argv("M|E*M-E/*E/*E", *small, *"--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2".split())
    expected = run_ranks(train_and_save, 4, stages, source)[0]
    experts = "--expert-model-parallel-size 2 --context-parallel-size 2 --use-distributed-optimizer".split()
    for n, words in ((1, argv(pattern, *small)), (2, argv(pattern, *small, *experts))):
        target = tmp_path / str(n)
        assert_alike(run_ranks(load_and_save, n, words, source, target)[0], expected)
        assert differences(source / "iter_0000002", target / "iter_0000002") == []
        assert verify_checkpoint(target / "iter_0000002").problems == []
        source = target


def test_a_resumed_run_equals_one_that_never_stopped(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    flags = [
        "--preset",
        "nemotron_3_tiny",
        "--hybrid-layer-pattern=ME*-M",
        "--mock-data",
        "--seq-length",
        "32",
        "--bf16",
    ]
    flags += "--global-batch-size 2 --eval-iters 0 --log-interval 1 --lr-decay-iters 4".split()
    done = [
        run([*flags, *outputs(whole, "--train-iters", "4")], tmp_path),
        run([*flags, *outputs(parts, "--train-iters", "2")], tmp_path),
        run([*flags, *outputs(parts, "--train-iters", "4")], tmp_path),
    ]
    assert [each.returncode for each in done] == [0, 0, 0], "".join(each.stdout + each.stderr for each in done)
    assert_same_end(whole, parts)
    reader = torch.distributed.checkpoint.FileSystemReader(parts / "ckpt" / "iter_0000004")
    keys = reader.read_metadata().state_dict_metadata
    stored = {f"mixer.in_proj.weight.{part}" for part in ("z", "x", "B", "C", "dt")} | {
        "mixer.in_proj.layer_norm_weight", "mixer.A_log", "mixer.D", "mixer.dt_bias", "mixer.norm.weight", "mixer.out_proj.weight",
        *(f"mixer.conv1d.{name}.{part}" for name in ("weight", "bias") for part in ("x", "B", "C")),
    }  # fmt: skip
    prefix = "decoder.layers.0."
    named = {key.removeprefix(prefix) for key in keys if key.startswith(prefix) and "extra_state" not in key}
    assert named == stored, "as Megatron-Core's hybrid models"
    assert {"decoder.final_norm.weight", "decoder.layers.3.mlp.linear_fc1.layer_norm_weight"} <= set(keys)
    assert {
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
    } <= set(keys)


def test_layers_of_a_depth_have_names_of_their_depth_and_number():
    run = make_run(argv("M-/M*EE/M*EE"), 0, ParallelState.single(), 1)
    names = [name for name, _ in named_transformer_layers(run.chunks)]
    ahead = [f"mtp.layers.{depth}.layers.{number}" for depth in range(2) for number in range(4)]
    assert names == ["decoder.layers.0", "decoder.layers.1", *ahead]


def _save_in_both_formats(rank, n, words, folder):
    run = make_run(words, rank, create_groups(words, rank, n), 1)
    run_steps(run, 0, 1)
    for kind in ("torch_dist", "torch"):
        content, options = CheckpointState(1, run.args.as_dict()), SaveOptions(save_rng=False, ckpt_format=kind)
        save(folder / kind, content, run.chunks, run.optimizer, run.ps, options)


@pytest.mark.parametrize("optimizer", ["--bf16", "--use-distributed-optimizer --bf16"])
def test_legacy_checkpoints_have_the_same_tensors(tmp_path, optimizer):
    """Weights and optimizer states; in a file they have Megatron-LM's names in the order of its modules."""
    mapping = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --expert-model-parallel-size 2"
    words = argv("M|E*M-E", "--global-batch-size", "4", *mapping.split(), *optimizer.split())
    run_ranks(_save_in_both_formats, 4, words, tmp_path)
    folder = tmp_path / "torch" / "iter_0000001"
    assert differences(tmp_path / "torch_dist" / "iter_0000001", folder) == []
    names = list(open_file(folder / "mp_rank_01_000_001" / "model_optim_rng.pt")["model"])
    mixer = (
        "conv1d_weight conv1d_bias dt_bias A_log D in_proj.layer_norm_weight in_proj.weight in_proj._extra_state "
        "norm.weight out_proj.weight out_proj._extra_state"
    )
    assert names == [
        "embedding.word_embeddings.weight",
        *(f"decoder.layers.0.mixer.{name}" for name in mixer.split()),
    ]


def test_legacy_checkpoints_have_latent_and_sparse_attention_and_depths(tmp_path):
    words = argv("D+|E-/+E/+E", "--global-batch-size", "4", *LATENTS.split(), *INDEXER.split())
    ranks = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --bf16 --use-distributed-optimizer"
    run_ranks(_save_in_both_formats, 4, [*words, *ranks.split()], tmp_path)
    folder = tmp_path / "torch" / "iter_0000001"
    assert differences(tmp_path / "torch_dist" / "iter_0000001", folder) == []
    inside = [
        name.removeprefix("mtp.layers.1.")
        for name in open_file(folder / "mp_rank_01_001" / "model_optim_rng.pt")["model"]
        if name.startswith("mtp.layers.1.") and "_extra_state" not in name
    ]
    modules = dict.fromkeys(re.match(r"mtp_model_layer\.layers\.\d+|\w+", name)[0] for name in inside)
    layers = [f"mtp_model_layer.layers.{number}" for number in range(2)]
    assert [*modules] == ["enorm", "hnorm", "eh_proj", *layers, "final_layernorm"]
    assert f"{layers[0]}.self_attention.linear_q_up_proj.layer_norm_weight" in inside
    names = list(open_file(folder / "mp_rank_01_000" / "model_optim_rng.pt")["model"])
    states = [name for name in names if name.endswith("core_attention._extra_state")]
    assert states == ["decoder.layers.1.self_attention.core_attention._extra_state"], "Transformer Engine's attention"
    assert "decoder.layers.1.self_attention.linear_q_up_proj.layer_norm_weight" in names
    assert "decoder.layers.0.self_attention.q_layernorm.weight" in names


def make_both(pattern, flags):
    """The command lines of a transformer, and of the pattern that describes it."""
    sizes, layers = FLAGS_OF_ATTENTION.get(pattern, ("", ""))
    common = [*shallow(make_argv("plain")), *flags.split(), *sizes.split()]
    at = common.index("--num-layers")
    hybrid = [*common[:at], *common[at + 2 :], f"--hybrid-layer-pattern={pattern}"]
    depths = ["--mtp-num-layers", "1"] if "/" in pattern else []
    routed = ",".join(str(int(letter == "E")) for letter in pattern[1:4:2])
    return [*common, *depths, "--moe-layer-freq", f"([{routed}])", *layers.split()], hybrid


def _halved(losses, name):
    """The mean over all layers of the hybrid model, which are twice as many."""
    return {name: losses[name] / 2} if name in losses else {}


SELECTIVE = "--recompute-granularity selective --recompute-modules"
OFFLOAD = "--fine-grained-activation-offloading --offload-modules attn_norm qkv_linear core_attn mlp_norm expert_fc1"
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe"
PLAIN_TRANSFORMERS = {
    f"--optimizer muon --use-mup --mup-base-hidden-size 8 {SELECTIVE} core_attn moe_act layernorm": 1,
    f"{FP8} delayed --post-self-attn-layernorm --post-mlp-layernorm {SELECTIVE} moe --add-attention-output-bias": 1,
    f"--transformer-impl transformer_engine {OFFLOAD} --apply-residual-connection-post-layernorm": 1,
    f"{FP8} tensorwise --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--overlap-moe-expert-parallel-comm": 2,
    "--enable-hyper-connections --num-residual-streams 2 --tensor-model-parallel-size 2 --sequence-parallel": 2,
    "--enable-hyper-connections --freeze-backbone --qk-layernorm --moe-shared-expert-intermediate-size 8": 1,
    "--freeze-backbone --expert-model-parallel-size 2 --use-distributed-optimizer": 2,
}


@pytest.mark.parametrize("flags", PLAIN_TRANSFORMERS)
def test_a_pattern_of_a_transformer_trains_as_the_transformer(flags, tmp_path):
    """From the same weights and optimizer states, bit for bit, with what acts on single sublayers."""
    gpt, ranks = [*shallow(make_argv("plain")), *flags.split()], PLAIN_TRANSFORMERS[flags]
    at = gpt.index("--num-layers")
    hybrid = [*gpt[:at], *gpt[at + 2 :], "--hybrid-layer-pattern=*E*E"]
    expected = run_ranks(train_and_save, ranks, gpt, tmp_path / "gpt")[0]
    assert run_ranks(load_and_save, ranks, hybrid, tmp_path / "gpt", tmp_path / "hybrid")[0] == expected


def test_parts_of_other_attention_act_as_in_the_transformer(tmp_path):
    gpt, hybrid = make_both("GE+-", f"{FP8} tensorwise {SELECTIVE} mla_up_proj layernorm gdn_norm_out")
    expected = run_ranks(train_and_save, 1, gpt, tmp_path / "gpt")[0]
    assert run_ranks(load_and_save, 1, hybrid, tmp_path / "gpt", tmp_path / "hybrid")[0] == expected


def test_recompute_and_offload_of_sublayers_change_no_number(tmp_path):
    """Mamba layers among them; their norm and their GEMMs have parts too."""
    impl = ("--transformer-impl", "transformer_engine")
    expected = run_ranks(train_and_save, 1, argv(PATTERN, *impl), tmp_path / "plain")[0]
    for n, flags in enumerate((f"{SELECTIVE} core_attn moe_act layernorm shared_experts mlp", OFFLOAD)):
        words = argv(PATTERN, *impl, *flags.split())
        assert run_ranks(train_and_save, 1, words, tmp_path / str(n))[0] == expected, flags


@pytest.mark.parametrize("pattern", ["*-*E/*E", *FLAGS_OF_ATTENTION])
def test_gpt_and_hybrid_checkpoints_resume_each_other_bit_for_bit(pattern, tmp_path):
    """GPT -> hybrid -> GPT: weights, optimizer and expert biases; the next losses are those of the uninterrupted run."""
    gpt, hybrid = make_both(pattern, "--moe-router-enable-expert-bias --moe-router-score-function sigmoid")
    expected = run_ranks(train_and_save, 1, gpt, tmp_path / "gpt")[0]
    as_hybrid = [({**losses, **_halved(losses, "indexer loss")}, norm) for losses, norm in expected]
    assert run_ranks(load_and_save, 1, hybrid, tmp_path / "gpt", tmp_path / "hybrid")[0] == as_hybrid
    assert run_ranks(load_and_save, 1, gpt, tmp_path / "hybrid", tmp_path / "back")[0] == expected
    assert differences(tmp_path / "gpt" / "iter_0000002", tmp_path / "back" / "iter_0000002") == []
    others = {
        "layer 1 .from 0. is . in the checkpoint and . here": "".join(pattern[at] for at in (0, 3, 2, 1)) + pattern[4:]
    }
    if "/" in pattern:
        others["of a depth of multi-token prediction are .E, and those of this run .-"] = pattern.replace("/*E", "/*-")
    for message, other in others.items():
        with pytest.raises(CheckpointError, match=message):
            words = [word.replace(pattern, other) for word in hybrid]
            load_and_save(0, 1, words, tmp_path / "gpt", tmp_path / "other")


def test_gpt_and_hybrid_checkpoints_resume_each_other_on_ranks(tmp_path):
    """Tensor-parallel ranks, stages that a bar cuts, expert-parallel ranks; then back to GPT under another layout."""
    gpt, hybrid = make_both("*E*-", "--moe-router-enable-expert-bias --moe-router-score-function sigmoid")
    ranks = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1".split()
    ranks += "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2".split()
    stages = [word.replace("*E*-", "*E|*-") for word in hybrid]
    expected = run_ranks(train_and_save, 4, [*gpt, *ranks], tmp_path / "gpt")[0]
    assert run_ranks(load_and_save, 4, [*stages, *ranks], tmp_path / "gpt", tmp_path / "hybrid")[0] == expected
    sharded = [*gpt, *"--expert-model-parallel-size 2 --use-distributed-optimizer".split()]
    assert_alike(run_ranks(load_and_save, 2, sharded, tmp_path / "hybrid", tmp_path / "back")[0], expected)
    assert differences(tmp_path / "gpt" / "iter_0000002", tmp_path / "back" / "iter_0000002") == []


def test_flags_that_number_layers_must_say_the_same_in_the_other_flavor(tmp_path):
    gpt, hybrid = make_both("*E*E", "--no-rope-freq 2")
    at = hybrid.index("--no-rope-freq") + 1
    alike = [*hybrid[:at], "([0,0,1,1])", *hybrid[at + 1 :]]
    expected = run_ranks(train_and_save, 1, gpt, tmp_path / "gpt")[0]
    assert run_ranks(load_and_save, 1, alike, tmp_path / "gpt", tmp_path / "hybrid")[0] == expected
    with pytest.raises(CheckpointError, match=r"--no-rope-freq numbers .* is \[0, 1\] in the checkpoint, and \[0, 0\]"):
        load_and_save(0, 1, hybrid, tmp_path / "gpt", tmp_path / "other")


def test_letters_of_attention_have_the_names_of_megatron_core(tmp_path):
    """A G layer fuses its norm into in_proj; D and + have it alone, and the norms of latents as in transformer layers.

    Those of a layer do not depend on the others.
    """
    names = {}
    every = " ".join((DELTA, LATENTS, INDEXER))
    for pattern, sizes in [*((pattern, sizes) for pattern, (sizes, _) in FLAGS_OF_ATTENTION.items()), ("DG+E", every)]:
        train_and_save(0, 1, argv(pattern, *sizes.split()), tmp_path / pattern)
        reader = torch.distributed.checkpoint.FileSystemReader(tmp_path / pattern / "iter_0000002")
        keys = reader.read_metadata().state_dict_metadata
        for number, letter in enumerate(pattern if pattern == "DG+E" else pattern[0]):
            prefix = f"decoder.layers.{number}."
            found = {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}
            assert names.setdefault(letter, found) == found
    of_latents = {"self_attention.q_layernorm.weight", "self_attention.kv_layernorm.weight"}
    fused = {f"self_attention.linear_{part}_up_proj.layer_norm_weight" for part in ("q", "kv")}
    core = {name for name in names["+"] if "core_attention._extra_state" in name}
    assert core and not any("core_attention._extra_state" in name for name in names["D"] | names["G"])
    for letter, norms in (("+", fused), ("D", of_latents)):
        assert {"input_layernorm.weight"} | norms <= names[letter]
        assert not names[letter] & ({*fused, *of_latents} - norms)
    assert "self_attention.in_proj.layer_norm_weight" in names["G"] and "input_layernorm.weight" not in names["G"]

"""Complete plans: errors against published runs, and the effect of flags on time."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from arguments import parse_args
from arguments.mechanisms.formats import FLAGS
from moe_trainer.estimate import calibrate
from moe_trainer.estimate.calibrate import Calibration, PredictionError, median_error, plan_published_run
from moe_trainer.estimate.hardware import Constants, find_hardware
from moe_trainer.estimate.holdout_runs import HOLDOUT_RUNS
from moe_trainer.estimate.interconnect import Interconnect
from moe_trainer.estimate.memory import ChunkBytes
from moe_trainer.estimate.plan import PlanError, closest_reference_run, make_plan, validated_args
from moe_trainer.estimate.plan_text import plan_json, plan_lines
from moe_trainer.estimate.published_runs import BILLION_PARAMS, PUBLISHED_RUNS
from moe_trainer.estimate.recipe_runs import RECIPE_RUNS
from moe_trainer.verification.random_layouts import draw_cases


@pytest.fixture(scope="module")
def published():
    """Plans of all published runs, by name."""
    return {run.name: plan_published_run(run) for run in PUBLISHED_RUNS}


def plan(flags, world=64, machine="h100"):
    return make_plan(parse_args(["--mock-data", *flags.split()], world), world, find_hardware(machine))


def test_published_rows_are_the_recorded_ones(shared):
    points = {
        point["tflops"]: point
        for point in json.loads((shared / "reference" / "calibration_points.json").read_text())
        if "tflops" in point
    }
    named = [run for run in PUBLISHED_RUNS if run.tflops in points]
    assert len(named) == len(points)
    for run in named:
        point = points[run.tflops]
        assert (run.model, run.hardware.upper(), run.gpus, run.tp, run.pp, run.ep, run.mbs, run.gbs, run.seq) == tuple(
            point[name] for name in ("model", "hw", "gpus", "tp", "pp", "ep", "mbs", "gbs", "seq")
        ), run.name
        assert run.peak_gib == point.get("peak_gib")
        assert point["dtype"].startswith(run.width[:2]) or point["dtype"].startswith("mx")


@pytest.mark.parametrize("run", [*PUBLISHED_RUNS, *HOLDOUT_RUNS, *RECIPE_RUNS], ids=lambda run: run.name)
def test_published_runs_pass_the_rules_of_the_trainer(run):
    """As they ran: with forced even routing, and with gathered 8-bit weights and padded rows where a recipe of the zoo has them."""
    eight = "--use-distributed-optimizer --fp8-param-gather" if "--fp8-format" in run.flags else ""
    if "--fp8-format" in run.flags and run.dispatcher != "alltoall":
        eight += " --moe-router-padding-for-quantization"
    validated_args([*run.argv(), "--moe-router-force-load-balancing", *eight.split()], run.gpus)


def test_published_models_have_the_estimated_size(published):
    for run in PUBLISHED_RUNS:
        counts = published[run.name].counts
        assert (counts.total + counts.mtp) / 1e9 == pytest.approx(BILLION_PARAMS[run.model], abs=0.1)


def test_calibration_error_leaving_one_run_or_model_out(monkeypatch):
    """Every run predicted by constants fitted to the others, and by constants fitted to other models alone.

    Of the values to try, those near the constants in use.
    """
    near = {name: [value for value in values if abs(value - getattr(Constants(), name)) < 0.05]
            for name, values in calibrate.GEMM_FRACTIONS.items()}  # fmt: skip
    monkeypatch.setattr(calibrate, "GEMM_FRACTIONS", near)
    monkeypatch.setattr(calibrate, "FILLS", calibrate.FILLS[1:])
    calibration = Calibration([run for run in PUBLISHED_RUNS if run.is_fitted])
    alone, family = calibration.leave_one_out(), calibration.leave_family_out()
    assert len(alone) == len(family) == 12 and median_error(alone) < 0.05 and median_error(family) < 0.1
    assert max(abs(error.relative) for error in alone) < 0.15 and max(abs(error.relative) for error in family) < 0.2
    assert any(a.constants != b.constants for a, b in zip(alone, family))
    fitted = calibration.fit(calibration.fitted())
    # the corrections were fitted with the constants in use, from which one step of one constant is as good
    assert replace(fitted, gemm_fp8=Constants().gemm_fp8) == Constants()
    assert fitted.gemm_fp8 == pytest.approx(Constants().gemm_fp8, abs=0.021)


FAR_OFF = {"Moonlight-16B 8xH100 BF16": 0.7}
"""Runs that were bound by the host (published.py)."""


@pytest.mark.parametrize("run", [run for run in PUBLISHED_RUNS if not run.is_fitted], ids=lambda run: run.name)
def test_published_runs_outside_the_fit_are_predicted(run, published):
    assert published[run.name].tflops == pytest.approx(run.tflops, rel=FAR_OFF.get(run.name, 0.3))


def test_median_error_of_runs_outside_the_fit(published):
    assert (
        median_error(
            [
                PredictionError(run, published[run.name].tflops, Constants())
                for run in PUBLISHED_RUNS
                if not run.is_fitted
            ]
        )
        < 0.06
    )


def test_planner_results_page_has_every_run():
    record = (Path(__file__).parents[2] / "scripts" / "bench_results" / "planner.md").read_text(encoding="utf-8")
    assert (
        all(f"| {run.name} | {run.tflops:.1f} |" in record for run in (*PUBLISHED_RUNS, *HOLDOUT_RUNS, *RECIPE_RUNS))
        and f"In use: {Constants()}" in record
    )


def test_tokens_per_second_match_tflops_of_a_published_run(published):
    """Published rows have both: 1412 tokens/s/GPU are 368 TFLOP/s of DeepSeek-V3, counted as Megatron-LM counts."""
    found = published["DeepSeek-V3 1024xH100 FP8"]
    assert found.tokens_per_second / found.tflops == pytest.approx(1412 / 368, rel=0.01)
    assert found.tokens_per_day == pytest.approx(found.batch_size * 4096 / found.time.step * 86400)


MIXTRAL = "--preset mixtral_8x7b --expert-model-parallel-size 8"


@pytest.mark.parametrize(
    "flags, part, less",
    [
        ("--moe-token-dispatcher-type flex", "exchange", True),
        ("--overlap-moe-expert-parallel-comm", "exchange", True),
        ("--moe-token-dispatcher-type allgather", "exchange", False),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "tensor", False),
        ("--context-parallel-size 2 --cp-comm-type a2a", "context", False),
        ("--pipeline-model-parallel-size 4", "bubble", False),
        ("--pipeline-model-parallel-size 4", "pipeline", False),
        ("--fp8-format e4m3 --fp8-recipe blockwise", "compute", True),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "compute", False),
        ("--recompute-granularity selective --recompute-modules moe", "exchange", False),
        ("--grad-reduce-in-bf16", "data", True),
        ("--lora-dim 16", "data", True),
        ("--lora-dim 16", "optimizer", True),
        ("--lora-dim 16", "compute", True),
        ("--use-precision-aware-optimizer --optimizer-cpu-offload", "optimizer", False),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", "optimizer", True),
    ],
)
def test_flag_changes_its_part_of_the_step_time(flags, part, less):
    plain, changed = plan(MIXTRAL), plan(f"{MIXTRAL} {flags}")
    a, b = getattr(plain.time, part), getattr(changed.time, part)
    assert b < a if less else b > a, (a, b)


def test_time_of_reserved_buffers_is_that_of_activation_kernels():
    """They run over the whole buffer (ops/triton_pointwise.py); dispatch and GEMMs move the tokens that arrive."""
    base = (
        "--preset mixtral_8x7b --expert-model-parallel-size 8 --micro-batch-size 4 --global-batch-size 256 "
        "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-expert-rank-capacity-factor"
    )
    stash = "--moe-paged-stash --moe-paged-stash-buffer-size-factor-cuda"
    sizes = [
        ChunkBytes(parse_args(["--mock-data", *f"{base} {factor}".split()], 64), 32000)
        for factor in (1, 4, f"4 {stash} 1")
    ]
    even, large, pages = (each.moved_by_layer(is_moe=True) for each in sizes)
    reserved = sizes[1].buffered - sizes[0].buffered
    fc1_and_probs = 2 * 14336 * 2 + 2
    assert reserved == 3 * 4 * 4096 * 2 and large - even == reserved * fc1_and_probs and pages == large
    few, many = plan(f"{base} 4 {stash} 1"), plan(f"{base} 4 {stash} 4")
    assert few.time.step == many.time.step and few.peak.total < many.peak.total


def test_stored_weights_are_gathered_in_their_own_width(monkeypatch):
    """As many bits of every quantized weight are gathered as it has, instead of 16; all experts are quantized."""
    sent, ring = [], Interconnect.ring
    monkeypatch.setattr(
        Interconnect, "ring", lambda self, nbytes, *group: sent.append(nbytes) or ring(self, nbytes, *group)
    )
    stored = [f"--{each.name}-format {each.values[0]} --{each.name}-param-gather" for each in FLAGS]
    for flags in ("", *stored):
        plan(f"--preset mixtral_8x7b --bf16 --use-distributed-optimizer {flags}")
    dense, experts = (sent[index::4] for index in (1, 3))  # each after the gradients of the same parameters
    assert [x / experts[0] for x in experts] == [1, *(each.bits / 16 for each in FLAGS)]
    assert dense == sorted(dense, reverse=True) and len(set(dense)) == len(dense)
    assert dense[-1] > FLAGS[-1].bits / 16 * dense[0]


@pytest.mark.parametrize(
    "machine, flags, note",
    [
        ("h100", "--fp8-format e4m3 --fp8-recipe mxfp8", "h100 has no mxfp8 GEMMs"),
        ("h100", "--fp4-format e2m1", "h100 has no nvfp4 GEMMs"),
        ("a100", "--fp8-format hybrid", "a100 has no delayed GEMMs"),
        ("h100", "--fp8-format e4m3 --fp8-recipe blockwise", ""),
        ("gb200", "--fp8-format e4m3 --fp8-recipe mxfp8", ""),
    ],
)
def test_formats_that_the_device_lacks_are_planned_in_bf16(machine, flags, note):
    found, plain = (
        plan(f"--preset mixtral_8x7b --mock-data --bf16 --global-batch-size 256 {more}", machine=machine)
        for more in (flags, "")
    )
    assert note in found.note and bool(note) == ("lower bound" in found.note)
    if note:
        assert found.width == "bf16" and found.mfu == pytest.approx(found.tflops * 1e12 / plain.hardware.peak("bf16"))
        assert found.time.compute >= 0.99 * plain.time.compute
    else:
        assert found.width == "fp8" and found.time.compute < plain.time.compute


def test_pipeline_bubbles_of_schedules():
    plain = plan(f"{MIXTRAL} --pipeline-model-parallel-size 8 --global-batch-size 512")
    virtual = plan(
        f"{MIXTRAL} --pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 4 --global-batch-size 512"
    )
    zero = plan(f"{MIXTRAL} --pipeline-model-parallel-size 8 --pipeline-schedule zero-bubble --global-batch-size 512")
    assert virtual.time.bubble < 0.5 * plain.time.bubble and zero.time.bubble < plain.time.bubble
    # (pp - 1) forwards and backwards of a microbatch, in addition to 64 of them
    assert plain.time.bubble == pytest.approx(7 / 64 * (plain.time.compute + plain.time.exchange), rel=0.15)


@pytest.mark.parametrize("schedule", ["--pipeline-schedule zero-bubble", "--defer-embedding-wgrad-compute"])
def test_separate_weight_gradients_are_no_additional_work(schedule):
    line = f"{MIXTRAL} --pipeline-model-parallel-size 4 --untie-embeddings-and-output-weights --global-batch-size 512"
    plain, apart = plan(line).time, plan(f"{line} {schedule}").time
    for name in ("compute", "exchange", "pipeline"):
        assert getattr(apart, name) == pytest.approx(getattr(plain, name), rel=0.02), name
    assert apart.step < 1.001 * plain.step


def test_many_microbatches_are_extrapolated_exactly():
    few, more, most = (
        plan(
            f"{MIXTRAL} --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 4 --global-batch-size {batch}"
        ).time
        for batch in (64 * 16, 128 * 16, 192 * 16)
    )
    assert most.step - more.step == pytest.approx(more.step - few.step, rel=1e-6)
    assert few.bubble == pytest.approx(most.bubble, rel=1e-6)


def test_step_time_on_a_machine_with_twice_the_flops():
    slow, fast = plan(MIXTRAL), plan(MIXTRAL, machine="b200")
    assert 1.5 < slow.time.compute / fast.time.compute < 2.6 and fast.margin > slow.margin


def test_closest_reference_run(published):
    for run in PUBLISHED_RUNS:
        found = closest_reference_run(published[run.name])
        assert found.run is run and found.distance == 0, (run.name, found)
    found = closest_reference_run(plan("--preset qwen3_30b_a3b --expert-model-parallel-size 8", 8))
    assert found.run.model == "qwen3_30b_a3b" and any("GPUs 8 instead of 16" in text for text in found.differs)


def test_plan_text_and_json_agree():
    made = plan(MIXTRAL)
    text, report = "\n".join(plan_lines(made)), plan_json(made)
    assert f"{made.tflops:.1f} TFLOP/s/GPU" in text and "nearest published run" in text and "fits" in text
    for key in ("params", "step_s", "tflops_per_gpu", "tokens_per_s_per_gpu", "mfu", "nearest_published"):
        assert report[key]
    memory = report["memory"]
    for key in ("weights", "grads", "optimizer", "activations", "dispatch", "total"):
        assert memory[f"{key}_gb"] > 0
    parts = sum(memory[f"{key}_gb"] for key in ("weights", "grads", "optimizer", "activations", "dispatch", "working"))
    assert parts == pytest.approx(memory["total_gb"])
    assert sum(report["step"].values()) == pytest.approx(report["step_s"])
    json.dumps(report)


def test_random_valid_layouts_can_be_planned():
    """Every valid layout has a plan with positive times and memory."""
    for case in draw_cases(40, 8, 5):
        made = make_plan(validated_args(list(case.argv), case.world_size), case.world_size, find_hardware("gb300"))
        assert made.time.step > 0 and all(value >= 0 for value in vars(made.time).values()), case.argv
        assert all(
            stage.total > stage.weights > 0 and min(stage.peak_inflight_microbatches) >= 0 for stage in made.memory
        ), case.argv
        assert plan_lines(made)


def test_plan_requires_a_known_vocabulary_size():
    args = parse_args("--preset mixtral_8x7b --mock-data --tokenizer-type NullTokenizer".split(), 8)
    bare = replace(args, data=replace(args.data, vocab_size=None, padded_vocab_size=None))
    named = replace(
        bare,
        data=replace(bare.data, tokenizer_type="HuggingFaceTokenizer", tokenizer_model="Mistralai/Mixtral-8x7B-v0.1"),
    )
    made = make_plan(named, 8, find_hardware("h100"))
    assert made.vocab_rows == 32000 and "tokenizer's name" in made.note and made.counts.total == 46_702_792_704
    with pytest.raises(PlanError, match="--vocab-size"):
        make_plan(bare, 8, find_hardware("h100"))


def test_packed_microbatches_are_planned_as_full():
    flags = (
        "--preset qwen3_tiny --vocab-size 1000 --tokenizer-type NullTokenizer --global-batch-size 256 "
        "--moe-token-dispatcher-type alltoall"
    )
    length = plan(flags).args.data.seq_length
    packed = plan(f"{flags} --use-varlen-dataset --max-seqlen-per-dp-cp-rank {4 * length}")
    equal = plan(f"{flags} --micro-batch-size 4")
    assert packed.memory == equal.memory and packed.time.step == equal.time.step
    assert "full microbatches of 4 x --seq-length tokens" in packed.note and "full microbatches" not in equal.note


def test_step_time_of_dsa_indexers_and_their_training():
    """Masked attention saves no time without a fused kernel; the warm-up selects no keys."""
    flags = "--preset deepseek_v3_2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*30|t*31mL --expert-model-parallel-size 8 --seq-length {}"
    dense = plan(
        "--preset deepseek_v3 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*30|t*31mL --expert-model-parallel-size 8 "
        "--seq-length 32768 --global-batch-size 480",
        32,
    )
    chooses, learns, warms = (
        plan(f"{flags.format(32768)} {more}", 32) for more in ("--dsa-indexer-loss-coeff 0", "", "--dsa-indexer-warmup")
    )
    masked = plan(f"{flags.format(32768)} --dsa-attention-form masked", 32)
    assert learns.time.step < masked.time.step and learns.flops == masked.flops
    assert dense.time.step < chooses.time.step < learns.time.step and warms.time.step < learns.time.step
    assert dense.flops > learns.flops == chooses.flops, "most keys are not chosen"


LONG = "--max-position-embeddings 131072 --expert-model-parallel-size 8 --context-parallel-size 4 --micro-batch-size 1 --global-batch-size 64"


def test_window_and_linear_attention_scale_better_than_full():
    """Full attention grows quadratically with the length; a window of 128 keys and linear attention do not."""

    def compute(flags, length):
        return plan(f"{flags} {LONG} --seq-length {length}").time.compute

    for preset, without in (
        ("gpt_oss_120b", "--window-attn-skip-freq 1"),
        ("llama_4_scout", "--window-attn-skip-freq 1"),
        ("qwen3_next_80b_a3b", "--linear-attention-freq 1"),
    ):
        mixed, full = (f"--preset {preset} {more}" for more in ("", without))
        short, long = (compute(mixed, length) / compute(full, length) for length in (4096, 131072))
        assert long < short and long < 0.75, (preset, short, long)
    every = plan(f"--preset gpt_oss_120b --window-size 65536,0 {LONG} --seq-length 4096").time.compute
    assert every == pytest.approx(
        compute("--preset gpt_oss_120b --window-attn-skip-freq 1", 4096)
    )  # a window that holds all

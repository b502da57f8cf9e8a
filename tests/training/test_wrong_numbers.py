"""Wrong values in full runs: every rank names the location, transient faults differ from model errors, batches are skipped."""

import json
import platform

import pytest
import torch
from commands import read_ends, read_metrics, run
from torch.distributed.checkpoint import FileSystemReader
from training.injected_faults import Fault, train_with
from training.tiny import MOCK, TINY

from moe_trainer.checkpoint.common_state import parse, read
from moe_trainer.resilience import rejection

ARGV = [*TINY, *MOCK, "--lr-decay-iters", "20", "--train-iters"]
EXPERT = "decoder.layers.1.mlp.experts"
# what differs between equal runs
TIMES = "elapsed_ms tokens_per_s tflops_per_gpu mfu max_memory_mb resumed_from run time interval_s saved".split()
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2".split()
SLOW, ATTENTION = pytest.mark.slow, "decoder.layers.1.self_attention.linear_qkv"


def rejected(tmp_path, fault, world_size=1, *flags, **options):
    """The one message of all ranks of a run that is rejected in iteration 3, and its exit code."""
    ended = train_with([*ARGV, "4", *flags], tmp_path, world_size, (fault,), **options)
    (message,), (code,) = {end.message for end in ended}, {end.code for end in ended}
    assert message.startswith("iteration 3: "), ended
    return message, code


PLACES = [
    (Fault("embedding", 3), 1, "", "NaN in the results of embedding, forward pass of microbatch 1, on rank 0"),
    (Fault("decoder.layers.0.self_attention.linear_proj", 3, 2, value=float("inf")), 1, "",
     "Inf in the results of decoder.layers.0.self_attention.linear_proj, forward pass of microbatch 2, on rank 0"),
    (Fault(EXPERT, 3, 2, expert=3), 1, "", f"NaN in the results of {EXPERT} ({EXPERT}.local_experts.3), forward pass of microbatch 2"),
    (Fault(EXPERT, 3, 1, expert=1, backward=True), 1, "", f"{EXPERT}.local_experts.1.linear_fc"),
    (Fault("decoder.layers.0.self_attention.linear_qkv", 3, 2, backward=True), 1, "",
     "NaN in the gradient of decoder.layers.0.self_attention.linear_qkv.weight, backward pass of microbatch 2"),
    pytest.param(Fault(EXPERT, 3, 2, expert=0), 1, "--recompute-granularity selective --recompute-modules moe",
                 f"NaN in the results of {EXPERT} ({EXPERT}.local_experts.0), forward pass of microbatch 2", marks=SLOW),
    (Fault(ATTENTION, 3, 1, rank=1), 2, "--tensor-model-parallel-size 2 --sequence-parallel",
     f"NaN in the results of {ATTENTION}, forward pass of microbatch 1, on rank 1 ("),
    pytest.param(Fault("decoder.layers.0.mlp.experts", 3, 2, expert=1), 2, "--pipeline-model-parallel-size 2",
                 "(decoder.layers.0.mlp.experts.local_experts.1), forward pass of microbatch 2, on rank 0 (", marks=SLOW),
    (Fault(ATTENTION, 3, 2, backward=True), 2, "--pipeline-model-parallel-size 2",
     f"{ATTENTION}.weight, backward pass of microbatch 2, on rank 1 ("),
    (Fault(EXPERT, 3, 1, expert=2), 2, "--expert-model-parallel-size 2",
     f"({EXPERT}.local_experts.2), forward pass of microbatch 1, on rank 1 ("),
    pytest.param(Fault(EXPERT, 3, 1, expert=3, backward=True), 2, "--expert-model-parallel-size 2",
                 f"{EXPERT}.local_experts.3.linear_fc", marks=SLOW),
    pytest.param(Fault(ATTENTION, 3, 2, backward=True), 2, "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble",
                 f"NaN in the gradient that {ATTENTION} passes on, backward pass of microbatch 2, on rank 1 (", marks=SLOW),
    (Fault(EXPERT, 3, 2, expert=3, rank=1), 2, "--use-torch-fsdp2 --global-batch-size 8",
     f"({EXPERT}.local_experts.3), forward pass of microbatch 2, on rank 1 ("),
    (Fault("decoder.layers.0.self_attention", 3, 2, rank=1), 2, "--global-batch-size 8 --use-distributed-optimizer",
     "NaN in the results of decoder.layers.0.self_attention, forward pass of microbatch 2, on rank 1 ("),
]  # fmt: skip


@pytest.mark.parametrize("fault, world_size, flags, place", PLACES)
def test_every_rank_names_the_first_nonfinite_location(tmp_path, fault, world_size, flags, place):
    message, code = rejected(tmp_path, fault, world_size, *flags.split())
    assert f"first place: {place}" in message or place in message.partition("first place: ")[2], message
    assert "reproduced on rerun" in message and code == 17
    # iteration 3 of 4 samples (8 with 2 data ranks that take 2 microbatches): consumed before it, and what this microbatch takes of it
    dp = world_size if "pipeline" not in flags and "tensor" not in flags else 1
    batch = 8 if "--global-batch-size 8" in flags else 4
    rank = int(message.partition(", on rank ")[2].partition(" ")[0]) if dp > 1 else 0
    first = 2 * batch + (fault.microbatch - 1) * 2 * dp + 2 * rank
    assert f"samples {first} to {first + 1} of the run" in message, message


def overflow_main_grad(run):
    finish = run.grads.finish

    def wrong():
        finish()
        run.chunks[0].decoder.layers[1].self_attention.linear_proj.weight.main_grad[0, 0] = float("inf")

    run.grads.finish = wrong


def test_overflowing_sum_of_finite_gradients_is_reported(tmp_path):
    (ended,) = train_with([*ARGV, "2"], tmp_path, change=overflow_main_grad)
    assert (
        "first place: the sum of the gradients of decoder.layers.1.self_attention.linear_proj.weight is not finite, and each of them is, on "
        "rank 0 ("
        in ended.message
        and ended.code == 17
    )


def enlarge_main_grad(run):
    finish = run.grads.finish

    def wrong():
        finish()
        run.chunks[0].decoder.layers[1].self_attention.linear_proj.weight.main_grad[0, :2] = 3e38

    run.grads.finish = wrong


def test_overflowing_norm_of_finite_gradients_names_the_largest(tmp_path):
    (ended,) = train_with([*ARGV, "2"], tmp_path, change=enlarge_main_grad)
    assert ended.code == 17 and (
        "first place: each gradient is finite, and their norm is not; the largest is 3e+38, of "
        "decoder.layers.1.self_attention.linear_proj.weight, on rank 0 (" in ended.message
    )


def set_weight_to_nan(run):
    with torch.no_grad():
        run.chunks[-1].decoder.layers[-1].mlp.experts.linear_fc2.weight[-1, 0, 0] = float("nan")
    run.optimizer.after_load(params_changed=True, state_loaded=False)


def test_nan_weight_before_the_iteration_is_named(tmp_path):
    ended = train_with([*ARGV, "2", "--expert-model-parallel-size", "2"], tmp_path, 2, change=set_weight_to_nan)
    assert {end.code for end in ended} == {17} and len({end.message for end in ended}) == 1
    # the last expert of each rank: of two places in one order the first
    assert (
        f"first place: weight {EXPERT}.local_experts.1.linear_fc2.weight is NaN before the iteration, on rank 0"
        in ended[0].message
    )


@pytest.mark.parametrize(
    "flags",
    [
        ("--mtp-num-layers", "1"),
        ("--tensor-model-parallel-size", "2"),
        ("--global-batch-size", "8"),
        ("--pipeline-model-parallel-size", "2"),
    ],
)
def test_transient_fault_is_reported_and_does_not_change_training(tmp_path, flags):
    world_size, where = (
        (1, "decoder.layers.0.self_attention")
        if "--mtp-num-layers" in flags
        else (2, "decoder.layers.1.self_attention")
    )
    argv = [*ARGV, "4", *flags, *BIAS, "--use-distributed-optimizer"]
    train_with(argv, tmp_path / "sound", world_size)
    ended = train_with(argv, tmp_path / "fault", world_size, (Fault(where, 3, 2, rank=world_size - 1, times=1),))
    assert [end.code for end in ended] == [0] * world_size
    assert "not reproduced on rerun: transient hardware fault" in ended[0].log
    assert (
        f"rank {world_size - 1} (" in ended[0].log.partition("Results differ on ")[2].partition("(what is reduced")[0]
    )
    if "--global-batch-size" in flags:  # what the other data rank has of it came through the reduction
        assert "rank 0 (vm) first in gradients" in ended[0].log.replace(platform.node(), "vm")
    assert_same_records(tmp_path / "sound", tmp_path / "fault")


def same_records(records):
    """What equal runs have in common."""
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records]


def assert_same_records(one, other):
    first, second = (same_records(read_metrics(folder / "metrics.jsonl")) for folder in (one, other))
    assert first == second


def test_different_wrong_results_on_rerun_are_a_hardware_fault(tmp_path):
    def two_kinds(run):
        values = iter([float("nan"), float("inf")])
        grad_norm = run.optimizer.grad_norm

        def wrong(signal_nonfinite=False):
            norm = grad_norm(signal_nonfinite)
            return norm if run.ps.trace.iteration != 3 or signal_nonfinite else current[0]

        current = [0.0]
        zero = run.optimizer.zero_grad

        def begin():
            current[0] = next(values, 0.0) if run.ps.trace.iteration == 3 else 0.0
            zero()

        run.optimizer.grad_norm, run.optimizer.zero_grad = wrong, begin

    (ended,) = train_with([*ARGV, "4"], tmp_path, change=two_kinds)
    assert ended.code == 17 and "the cause is neither the model nor the data" in ended.message


def test_rerun_mode_disabled_reports_no_location(tmp_path):
    message, code = rejected(tmp_path, Fault("embedding", 3), 1, "--rerun-mode", "disabled")
    assert code == 1 and message == (
        "iteration 3: the loss is nan; no checkpoint was saved (no --save). --no-check-for-nan-in-loss-and-grad "
        "disables this check"
    )
    train_with([*ARGV, "4", "--no-check-for-nan-in-loss-and-grad"], tmp_path, 1, (Fault("embedding", 3),))


def test_nan_message_names_an_unusually_high_learning_rate(tmp_path):
    message, _ = rejected(tmp_path, Fault("embedding", 3), 1, "--lr", "10", "--save", "ckpt", "--save-interval", "9")
    assert "; no checkpoint was saved; the learning rate 10 is " in message and "(no --save)" not in message
    assert " times what models of 0." in message and ": --lr may be the cause. --on-nan skip" in message


def resumed(argv, folder, node, faults=()):
    (ended,) = train_with([*argv, "--load", "ckpt"], folder, 1, faults, node=node)
    return ended


def test_rejection_exits_with_16_and_another_machine_decides(tmp_path):
    argv = [*ARGV, "4", "--save", "ckpt", "--save-interval", "2", "--result-rejected-tracker-filename", "rejected.txt"]
    always = (Fault("embedding", 3),)
    (first,) = train_with(argv, tmp_path, 1, always, node="one")
    assert first.code == 16 and "resume on other machines than one (exit code 16)" in first.message
    assert "; the checkpoint of iteration 2 is untouched. --on-nan" in first.message
    (end,) = read_ends(tmp_path / "metrics.jsonl")
    assert (end["ended"], end["iteration"], end["exit_code"]) == ("failed", 2, 16) and end["reason"] == first.message
    note = tmp_path / "ckpt" / "rejected_result.json"
    assert json.loads(note.read_text())["iteration"] == 3
    assert resumed(argv, tmp_path, "one", always).code == 16, "the same machine gives no new information"
    second = resumed(argv, tmp_path, "two", always)
    assert second.code == 17 and "Other machines (one) got the same: it is the model or the data" in second.message
    assert "; the checkpoint that the run continued is untouched. --on-nan" in second.message
    assert not note.exists()
    (tmp_path / "metrics.jsonl").unlink()
    train_with(argv, tmp_path / "other", 1, always, node="one")
    good = resumed(argv, tmp_path / "other", "two")
    assert (
        good.code == 0
        and "was rejected twice on one (the loss is nan" in good.log
        and "that machine produces incorrect results" in good.log
    )
    assert not (tmp_path / "other" / "ckpt" / "rejected_result.json").exists()
    statuses = [
        line.partition("status=")[2].split()[0]
        for line in (tmp_path / "other" / "rejected.txt").read_text().splitlines()
    ]
    assert statuses == ["initial_run", "first_rerun_reproducible", "second_rerun_not_reproducible"]


@pytest.mark.parametrize(
    "kind, codes",
    [
        ("transient_error", (0, 0)),
        pytest.param("correct_result", (16, 17), marks=pytest.mark.slow),
        ("persistent_error", (16, 0)),
    ],
)
def test_injected_errors_end_with_the_expected_exit_codes(tmp_path, kind, codes):
    flags = f"--save ckpt --save-interval 1 --error-injection-rate 1 --error-injection-type {kind} --tensor-model-parallel-size 2"
    argv = [*ARGV, "2", *flags.split()]
    first = train_with(argv, tmp_path, 2, node="one")
    assert {end.code for end in first} == {codes[0]}
    assert sum("iteration 1: injecting a " in end.log for end in first) == 1, "one of the ranks is wrong"
    if kind == "transient_error":
        wrong = next(rank for rank, end in enumerate(first) if "iteration 1: injecting a " in end.log)
        assert f"Results differ on rank {wrong} (one) first in the loss of microbatch 1 (" in first[0].log
        return
    assert "the loss is not finite, and all modules' results are" in first[0].message
    second = train_with([*argv, "--load", "ckpt"], tmp_path, 2, node="two")
    if kind == "correct_result":
        assert {end.code for end in second} == {17}
    else:  # the next one injected is of this machine
        assert "that machine produces incorrect results" in second[0].log


def weights_and_records(argv, folder, faults, world_size=1):
    ended = train_with([*argv, "--export-weights", "final.safetensors"], folder, world_size, faults)
    assert {end.code for end in ended} == {0}, ended
    weights = folder / "final.safetensors"
    return weights.read_bytes() if weights.exists() else None, read_metrics(folder / "metrics.jsonl")


SKIP = [
    *(*ARGV, "8", *BIAS),
    *"--on-nan skip --save ckpt --save-interval 2 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 --bf16".split(),
]


@pytest.mark.parametrize("mode", [pytest.param("validate_results", marks=pytest.mark.slow), "disabled"])
def test_skipped_batches_are_recorded_and_resume_bitwise(tmp_path, mode):
    faults = (
        Fault("decoder.layers.0.self_attention", 3),
        Fault("decoder.layers.1.self_attention", 5, 2, backward=True),
    )
    argv = [*SKIP, "--rerun-mode", mode]
    full, records = weights_and_records(argv, tmp_path / "whole", faults)
    assert [record["skipped_iterations"] for record in records] == [0, 0, 1, 0, 1, 0, 0, 0]
    assert records[2]["rejected"] == [{"iteration": 3, "samples": [8, 12], "because": "the loss is nan"}]
    assert "lm loss" not in records[2] and "lm loss" in records[4]
    assert records[4]["rejected"][0]["samples"] == [16, 20] and "gradient norm" in records[4]["rejected"][0]["because"]
    assert [record["learning_rate"] for record in records][2:4] == [records[3]["learning_rate"]] * 2
    # resumed after the first skipped batch, with the second to come, and after both
    for step in (4, 6) if mode == "disabled" else (4,):
        middle = ["--load", str(tmp_path / "whole" / "ckpt"), "--ckpt-step", str(step), "--exit-on-missing-checkpoint"]
        again, resumed_records = weights_and_records([*argv, *middle], tmp_path / f"after {step}", faults)
        assert again == full
        assert same_records(records)[step:] == same_records(resumed_records)
        assert resumed_records[-1]["consumed_samples"] == 32


def test_skipped_iteration_keeps_weights_bias_and_scales(tmp_path):
    before, _ = weights_and_records([*SKIP, "--train-iters", "2"], tmp_path / "before", ())
    after, records = weights_and_records(
        [*SKIP, "--train-iters", "3"], tmp_path / "after", (Fault("decoder.layers.0.self_attention", 3),)
    )
    assert before == after and records[-1]["iteration"] == 3


def test_skip_history_resumes_under_another_mapping(tmp_path):
    argv = [*ARGV, "6", "--on-nan", "skip", "--save", "ckpt", "--load", "ckpt", "--save-interval", "100"]
    faults = (Fault("decoder.layers.0.self_attention", 3),)
    weights_and_records([*argv, "--exit-interval", "4"], tmp_path, faults)
    _, records = weights_and_records(
        [*argv, "--tensor-model-parallel-size", "2"], tmp_path, (Fault("decoder.layers.0.self_attention", 6),), 2
    )
    assert [record["skipped_iterations"] for record in records] == [0, 0, 1, 0, 0, 1]
    folder = tmp_path / "ckpt" / "iter_0000006"
    state, _, _ = parse(read(folder, FileSystemReader(folder).read_metadata()))
    assert [entry["iteration"] for entry in state.extra["history"]["skipped"]] == [3, 6]


def test_ten_consecutive_skipped_iterations_end_the_run(tmp_path):
    faults = tuple(Fault("embedding", iteration) for iteration in range(2, 14))
    (ended,) = train_with([*ARGV, "14", "--on-nan", "skip", "--rerun-mode", "disabled"], tmp_path, 1, faults)
    assert (
        ended.code == 1 and ended.message.startswith("iteration 11: ") and "10 consecutive iterations" in ended.message
    )


@pytest.mark.parametrize("action, flags", [("report", ()), ("skip", ("--loss-spike-factor", "2")), ("stop", ())])
def test_loss_spike_is_reported_skipped_or_ends_the_run(tmp_path, monkeypatch, action, flags):
    monkeypatch.setattr(rejection, "HISTORY_LENGTH", 8)
    number = 10
    argv = [*ARGV, str(number + 1), "--check-for-spiky-loss", "--on-loss-spike", action, *flags, "--log-interval", "1"]
    (ended,) = train_with(argv, tmp_path, 1, (Fault("decoder.final_layernorm", number, value=1e7),))
    message = ended.message if action == "stop" else ended.log
    assert f"iteration {number}: the loss " in message and "rerun" in message
    assert ("the median" in message) == (action == "skip")
    assert ended.code == (17 if action == "stop" else 0)
    if action != "stop":
        assert [r["iteration"] for r in read_metrics(tmp_path / "metrics.jsonl") if r.get("rejected")] == (
            [number] if action == "skip" else []
        )


GRAPH = (
    "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad --moe-token-dispatcher-type alltoall "
    "--moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity --cuda-graph-warmup-steps 1"
)


@pytest.mark.parametrize(
    "flags", ["--hidden-dropout 0.1 --iterations-to-skip 3", GRAPH, "--fp8-format hybrid --fp8-recipe delayed --bf16"]
)
def test_report_stats_reruns_do_not_change_training(tmp_path, flags):
    argv = [*ARGV, "6", "--log-interval", "2", *BIAS, *flags.split()]
    train_with(argv, tmp_path / "plain")
    (ended,) = train_with([*argv, "--rerun-mode", "report_stats"], tmp_path / "stats")
    assert (
        "repeated iterations: 3, with identical loss and gradient norm: 3; largest relative difference of the loss 0"
        in ended.log
    )
    assert_same_records(tmp_path / "plain", tmp_path / "stats")


def test_dynamic_loss_scale_overflow_is_not_rejected(tmp_path):
    argv = [*ARGV, "6", "--fp16", "--initial-loss-scale", str(2**24), "--hysteresis", "1"]
    train_with(argv, tmp_path / "plain")
    train_with(
        [*argv, "--check-for-spiky-loss", "--check-for-large-grads", "--on-loss-spike", "stop"], tmp_path / "watched"
    )
    assert read_metrics(tmp_path / "plain" / "metrics.jsonl")[0]["skipped_iterations"] == 1
    assert_same_records(tmp_path / "plain", tmp_path / "watched")


def test_command_line_prints_a_rejection_once(tmp_path):
    finished = run([*ARGV, "4", "--lr", "1e38", "--global-batch-size", "8"], tmp_path, 2)
    assert finished.returncode == 17 and "Traceback" not in finished.stderr
    assert finished.stderr.count("pretrain_moe.py: iteration ") == 1 and "first place: " in finished.stderr

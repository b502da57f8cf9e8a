import datetime
import math
from dataclasses import replace

from moe_trainer.metrics.console import LoggedInterval, arguments_block, iteration_line, validation_line
from moe_trainer.metrics.energy import Energy
from moe_trainer.metrics.iteration import IterationRecord, StepResult

NOW = datetime.datetime(2026, 8, 22, 12, 0, 0)


RECORD = IterationRecord(
    StepResult({}),
    iteration=1,
    consumed_samples=8,
    learning_rate=0.0,
    next_learning_rate=0.0,
    loss_scale=4096.0,
    global_batch_size=4,
    skipped=False,
    elapsed_s=1.0,
    tokens=100,
    flops=1e12,
    max_memory_mb=10.0,
)


def test_iteration_line_has_the_fields_and_widths_of_megatron():
    step = StepResult({}, grad_norm=2.345, num_zeros=0)
    record = replace(RECORD, step=step, iteration=3, consumed_samples=384, next_learning_rate=1e-4, loss_scale=1.0)
    record = replace(record, global_batch_size=128, params_norm=123.456)
    losses = {"lm loss": 9.876543, "load_balancing_loss": 1.012345}
    assert iteration_line(record, NOW, 10, LoggedInterval(512.3, losses, throughput=401.2)) == (
        " [2026-08-22 12:00:00.000000] iteration        3/      10 | consumed samples:          384 |"
        " elapsed time per iteration (ms): 512.3 | throughput per GPU (TFLOP/s/GPU): 401.2 |"
        " learning rate: 1.000000E-04 | global batch size:   128 | lm loss: 9.876543E+00 |"
        " load_balancing_loss: 1.012345E+00 | loss scale: 1.0 | grad norm: 2.345 | num zeros: 0 |"
        " params norm: 123.456 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_iteration_line_drops_negative_losses_keeps_zero_and_shows_skipped_samples():
    record, losses = replace(RECORD, skipped_samples=4), {"lm loss": -1.0, "z_loss": 0.0}
    line = iteration_line(record, NOW, 2, LoggedInterval(1.0, losses, skipped_iterations=1, nan_iterations=2))
    assert " z_loss: 0.000000E+00 |" in line
    assert " consumed samples:            8 | skipped samples:            4 | elapsed" in line
    assert not any(absent in line for absent in ("lm loss", "grad norm", "throughput"))
    assert line.endswith(" number of skipped iterations:   1 | number of nan iterations:   2 |")


def test_iteration_line_has_energy_and_overload_factors_in_place():
    record = replace(RECORD, energy=Energy(12.34, 567.89), next_learning_rate=0.5)
    line = iteration_line(record, NOW, 2, LoggedInterval(1.0, {}, throughput=3.0, overload_factors=(1.25, 2.5)))
    assert (
        " throughput per GPU (TFLOP/s/GPU): 3.0 | energy per GPU (J/iter/GPU): 12.3 | power per GPU (W/GPU): 567.9 |"
        " learning rate: " in line
    )
    assert " avg overload factor: 1.250 | max overload factor: 2.500 | number of skipped" in line


def test_validation_line_is_framed_and_caps_the_perplexity():
    first, text, last = validation_line("iteration 200", {"lm loss": 30.0}).splitlines()
    assert text == " validation loss at iteration 200 | lm loss value: 3.000000E+01 | lm loss PPL: 4.851652E+08 | "
    assert first == last == "-" * (len(text) + 1)


def test_printed_arguments_are_sorted_and_padded_to_48_columns():
    lines = arguments_block({"seed": 1, "bf16": True}).splitlines()
    assert lines[0] == "------------------------ arguments ------------------------"
    assert lines[1] == "  bf16 " + "." * 44 + " True"
    assert lines[2].startswith("  seed ....")
    assert lines[-1] == "-------------------- end of arguments ---------------------"


def test_nonfinite_losses_count_as_nan_iterations():
    assert [StepResult({"lm loss": loss}).is_nan for loss in (math.nan, math.inf, 2.0)] == [True, True, False]

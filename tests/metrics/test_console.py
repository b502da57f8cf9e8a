import datetime
import io

from moe_trainer.metrics.console import IterationLine, ProgressBar, arguments_block, validation_line

NOW = datetime.datetime(2026, 8, 22, 12, 0, 0)


def test_iteration_line_has_the_fields_order_and_widths_users_grep_for():
    line = IterationLine(
        iteration=3,
        train_iters=10,
        consumed_samples=384,
        elapsed_ms=512.3,
        throughput=401.2,
        learning_rate=1e-4,
        global_batch_size=128,
        losses={"lm loss": 9.876543, "load_balancing_loss": 1.012345},
        loss_scale=1.0,
        grad_norm=2.345,
        num_zeros=0,
        params_norm=123.456,
        skipped_iterations=0,
        nan_iterations=0,
    )
    assert line.format(NOW) == (
        " [2026-08-22 12:00:00.000000] iteration        3/      10 | consumed samples:          384 |"
        " elapsed time per iteration (ms): 512.3 | throughput per GPU (TFLOP/s/GPU): 401.2 |"
        " learning rate: 1.000000E-04 | global batch size:   128 | lm loss: 9.876543E+00 |"
        " load_balancing_loss: 1.012345E+00 | loss scale: 1.0 | grad norm: 2.345 | num zeros: 0 |"
        " params norm: 123.456 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_iteration_line_drops_negative_losses_keeps_zero_and_shows_skipped_samples():
    line = IterationLine(
        iteration=1,
        train_iters=2,
        consumed_samples=8,
        elapsed_ms=1.0,
        learning_rate=0.0,
        global_batch_size=4,
        losses={"lm loss": -1.0, "z_loss": 0.0},
        loss_scale=4096.0,
        skipped_iterations=1,
        nan_iterations=2,
        skipped_samples=4,
    ).format(NOW)
    assert "lm loss" not in line
    assert " z_loss: 0.000000E+00 |" in line
    assert " consumed samples:            8 | skipped samples:            4 | elapsed" in line
    assert "grad norm" not in line and "throughput" not in line
    assert line.endswith(" number of skipped iterations:   1 | number of nan iterations:   2 |")


def test_validation_line_is_framed_and_caps_the_perplexity():
    first, text, last = validation_line("iteration 200", {"lm loss": 30.0}).splitlines()
    assert text == " validation loss at iteration 200 | lm loss value: 3.000000E+01 | lm loss PPL: 4.851652E+08 | "
    assert first == last == "-" * (len(text) + 1)


def test_arguments_are_sorted_and_padded_to_48_columns():
    lines = arguments_block({"seed": 1, "bf16": True}).splitlines()
    assert lines[0] == "------------------------ arguments ------------------------"
    assert lines[1] == "  bf16 " + "." * 44 + " True"
    assert lines[2].startswith("  seed ....")
    assert lines[-1] == "-------------------- end of arguments ---------------------"


def test_progress_bar_is_silent_without_a_terminal_and_draws_on_one():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    quiet, loud = io.StringIO(), Terminal()
    for stream in (quiet, loud):
        ProgressBar(10, stream).update(5, 2.0, 3.5, tokens=4096)
    assert quiet.getvalue() == ""
    assert "5/10" in loud.getvalue() and "2,048 tokens/s  ETA 0:00:10  loss 3.5000" in loud.getvalue()

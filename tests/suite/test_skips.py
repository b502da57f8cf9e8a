"""Tests of suite/skips.py: what a run says of the tests that it skipped."""

from suite import skips


def test_skips_are_named_in_three_lines():
    reasons = [
        "could not import 'triton': No module named 'triton'",
        "needs a CUDA device (only tests/gpu, run by itself, sees one)",
        "no reference facts at /x; set MOE_TRAINER_SHARED to their folder",
        "sbatch not installed (apt-get install --no-install-recommends slurm-wlm munge)",
        "lm-eval is not installed (MOE_TRAINER_TEST_WITH=lm-eval)",
    ]
    lines = skips.summarize(reasons * 2)
    assert len(lines) == 3 and "triton 2" in lines[0] and "a GPU 2" in lines[0]
    assert 'MOE_TRAINER_TEST_WITH="triton lm-eval"' in lines[1] and "MOE_TRAINER_SHARED" in lines[2]
    assert skips.summarize([]) == []

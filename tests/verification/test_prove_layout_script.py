"""scripts/prove_layout.py as a user meets it: exit codes, messages, the report."""

import pytest
from commands import call_main

from moe_trainer.commands import prove as script

SMALL = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 --position-embedding-type rope "
    "--num-experts 16 --moe-router-topk 2 --disable-bias-linear --micro-batch-size 1 --lr 1e-4 --train-iters 10 --eval-iters 0 --bf16 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 32000"
).split()


@pytest.fixture
def prove_layout(monkeypatch, capsys):
    """Runs the program in this process; returns its exit code and what it printed."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return lambda *words: call_main(script.main, words, capsys)


def test_command_line_is_checked_and_reported(prove_layout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = "--expert-model-parallel-size 16 --world-size 64 --ranks 2 --report r.md --report-html r.html"
    done = prove_layout(*SMALL, *flags.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "your mapping: dp 64 ep 16 on 64 ranks" in done.stdout and "1 of 1 equal one process" in done.stdout
    page = (tmp_path / "r.md").read_text()
    assert (
        page.startswith("# 1 of 1 mappings equal one process")
        and "gradients within" in page
        and "torchrun --nproc-per-node 2" in page
    )
    html = (tmp_path / "r.html").read_text()
    assert all(line.replace("'", "&#x27;").replace(">", "&gt;") in html for line in done.stdout.splitlines())
    assert (
        "dp with ep" not in html and "ep with dp: 1 equal" in html and "<h1>1 of 1 mappings equal one process" in html
    )


def test_output_names_defined_quantities_and_uncompared_flags(prove_layout):
    flags = "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2 --world-size 2 --ranks 2 --hidden-dropout 0.1".split()
    done = prove_layout(*SMALL, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the reference follows the definition for this mapping: global_aux_loss" in done.stdout
    assert (
        "2 of 2 equal one process\nnot compared with one process: --bf16, --hidden-dropout 0.1" in done.stdout
        and "every case has" not in done.stdout
    )


def test_same_seed_draws_same_mappings(prove_layout):
    once, again = (prove_layout("--random", "3", "--ranks", "4", "--seed", "5", "--shrink-only") for _ in range(2))
    assert once.returncode == 0 and once.stdout == again.stdout and once.stdout.count("pretrain_moe.py") == 3
    assert prove_layout("--random", "3", "--ranks", "4", "--seed", "6", "--shrink-only").stdout != once.stdout


def test_yaml_recipe_for_1024_gpus_is_shrunk(prove_layout, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    pairs = [word for flag in " ".join(SMALL).split(" --") for word in [flag.removeprefix("--").partition(" ")]]
    recipe.write_text("MODEL_ARGS:\n" + "".join(f"  --{flag}: {value or 'true'}\n" for flag, _, value in pairs))
    sizes = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4"
    sizes += " --expert-model-parallel-size 16 --expert-tensor-parallel-size 1 --world-size 1024"
    done = prove_layout(str(recipe), *sizes.split(), "--shrink-only")
    assert done.returncode == 0, done.stderr
    assert (
        "your mapping: tp 2 pp 4 dp 128 ep 16 on 1024 ranks" in done.stdout
        and "torchrun --nproc-per-node 8 pretrain_moe.py" in done.stdout
    )


def test_pasted_torchrun_command_is_parsed(prove_layout):
    line = ["torchrun", "--nnodes", "4", "--nproc_per_node=8", "pretrain_gpt.py", *SMALL]
    done = prove_layout(*line, "--expert-model-parallel-size", "4", "--shrink-only")
    assert "your mapping: dp 32 ep 4 on 32 ranks" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--no-such-flag"], "--no-such-flag: this flag is unknown"),
        ([*SMALL, "--expert-model-parallel-size", "3", "--world-size", "9"], "--num-experts 16 must be a multiple of"),
        (["--random", "2", "--ranks", "4", "--swiglu"], "--random draws its own models"),
        (
            ["--random", "0", "--ranks", "-1", "--timeout", "nan"],
            "--ranks -1 must be above 0; --random 0 must be above 0; --timeout nan",
        ),
        (["--random", "1", "--as-is"], "--as-is keeps the flags of a command line"),
        ([*SMALL, "--shrink-only", "--report", "r.md"], "--report is about a comparison"),
        (["--random", "1", "--ranks", "1"], "--random needs at least 2 ranks"),
        (["--random", "1", "--report", "/"], "--report /: the file cannot be written"),
        (["--random", "1", "--report-html", "/no/such/r.html"], "--report-html /no/such/r.html: the file cannot be"),
        ([*SMALL, "--world-size", "0", "--no-such-flag", "--shrink-only"], "--world-size 0 must be above 0"),
        ([*SMALL, "--world-size", "-4", "--as-is", "--shrink-only"], "--world-size -4 must be above 0"),
        (
            ["torchrun", "--nproc-per-node", "gpu", "--nnodes", "4", "pretrain_gpt.py", *SMALL, "--shrink-only"],
            "--nproc-per-node gpu: a number above 0",
        ),
        ([*SMALL, "--ranks", "many"], "invalid int value"),
        ([*SMALL, "--as-is", "--world-size", "16"], "these flags need 16 ranks"),
        (["--preset", "no_such_preset"], "no preset is called"),
        (SMALL, "nothing to prove: these flags describe one process"),
        ([*SMALL, "--as-is"], "nothing to prove: these flags describe one process"),
        ([*SMALL, "--world-size", "2", "--ranks", "1"], "your mapping has 2 ranks, but --ranks 1 leaves one process"),
    ],
)
def test_invalid_input_exits_with_2_without_traceback(prove_layout, words, message):
    done = prove_layout(*words)
    assert done.returncode == 2 and message in done.stderr


def test_unwritable_report_is_rejected_before_the_check(prove_layout):
    done = prove_layout(*SMALL, "--report", "/no/such/folder/r.md")
    assert done.returncode == 2 and "cannot be written" in done.stderr and "case 1" not in done.stdout


def test_help_names_the_exit_codes(prove_layout):
    done = prove_layout("--help")
    assert (
        done.returncode == 0
        and "Exit code: 0 equal, 1 different, 2 the flags are wrong, or there is nothing to" in done.stdout
    )

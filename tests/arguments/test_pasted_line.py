"""Command lines as they stand in users' scripts: what starts the trainer is removed, and tells the number of ranks."""

import pytest

from arguments.pasted_line import read_pasted_line
from moe_trainer.commands import train_process

FLAGS = ["--num-layers", "2", "--tokenizer-model", "a.py", "--save", ""]


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("torchrun --nnodes 4 --nproc_per_node=8 pretrain_gpt.py", 32),
        ("torchrun --nproc-per-node 8 pretrain_moe.py", 8),
        ("torchrun pretrain_moe.py", None),
        ("NCCL_DEBUG=INFO CUDA_DEVICE_MAX_CONNECTIONS=1 /opt/bin/torchrun --nnodes=2 --nproc-per-node=4 a/train.py", 8),
        ("python3.12 -u -m torch.distributed.run --nnodes 2 --nproc-per-node 8 pretrain_moe.py", 16),
        ("python -m torch.distributed.launch --nproc_per_node 8 -m pretrain_moe", 8),
        ("python scripts/torchrun.py --nproc-per-node 2 --no-python bash rank.sh python -u /x/pretrain_moe.py", 2),
        ("srun -N 4 --gpus 32 --ntasks-per-node 1 torchrun --nproc-per-node 8 --nnodes 4 pretrain_moe.py", 32),
        ("srun -N4 --ntasks-per-node=8 --export=ALL,A=1 python pretrain_moe.py", 32),
        ("srun -n16 --container-image=x.sqsh python pretrain_moe.py", 16),
        ("srun --ntasks-per-node 8 python pretrain_moe.py", None),  # how many nodes is sbatch's
        ("mpirun -np 8 -x A=b python pretrain_moe.py", 8),
        ("RANK=0 WORLD_SIZE=64 python pretrain_moe.py", 64),
        ("nsys profile -o out torchrun --nproc-per-node 8 pretrain_moe.py", 8),
        ("docker run image torchrun --nproc-per-node 8 pretrain_moe.py", 8),
        ("python pretrain_moe.py", None),
        ("pretrain_moe.py", None),
        ("torchrun --nproc-per-node 8 --log-dir x.py --no_python pretrain_moe.py", 8),
        ("torchrun --nproc-per-node 8 -m moe_trainer train", 8),
        ("srun -n 4 /opt/bin/moe-trainer train", 4),
        ("moe-trainer train", None),
        ("python -m moe_trainer train", None),
    ],
)
def test_launcher_is_removed_and_its_ranks_are_counted(launcher, ranks):
    count = [] if ranks is None else ["--world-size", str(ranks)]
    assert read_pasted_line([*launcher.split(), *FLAGS]) == [*count, *FLAGS]


def test_given_ranks_take_precedence_and_options_before_the_launcher_stay():
    line = ["torchrun", "--nproc-per-node", "gpu", "pretrain_moe.py", *FLAGS]
    assert read_pasted_line(["--gpus", "64", "--best", "3", *line]) == ["--gpus", "64", "--best", "3", *FLAGS]
    assert read_pasted_line([*line, "--world-size=16"]) == [*FLAGS, "--world-size=16"]


def test_text_of_a_script_with_continued_lines():
    text = 'torchrun \\\n  --nproc-per-node 8 \\ \n  pretrain_moe.py --num-layers 2 \\\n  --save "my runs"\n'
    wanted = ["--world-size", "8", "--num-layers", "2", "--save", "my runs"]
    assert read_pasted_line([text]) == wanted
    assert read_pasted_line(["--hardware", "h100", text]) == [*wanted[:2], "--hardware", "h100", *wanted[2:]]
    layout = "--pipeline-model-parallel-layout 'Et|tL' --save \"a > b\""
    assert read_pasted_line([f"torchrun pretrain_moe.py {layout} &> a 2>&1 --num-layers 2 | tee log"]) == [
        *("--pipeline-model-parallel-layout", "Et|tL", "--save", "a > b", "--num-layers", "2")
    ]
    note = ["--wandb-notes", "python train.py x"]
    assert read_pasted_line(["torchrun", "pretrain_moe.py", *note]) == note
    unquoted = ["torchrun", "\\", "--nproc-per-node", "8", "pretrain_moe.py", "--num-layers", "2", "\\", "\r"]
    assert read_pasted_line(unquoted) == wanted[:4]


@pytest.mark.parametrize(
    "tail",
    [
        "2>&1 | tee log",
        "> out 2>err",
        ">> log 2>&1 < /dev/null &",
        "&>log",
        "2>&1|tee log",
        "|& tee log",
        "&& python next.py --seed 1",
        "|| true",
        "; sleep 5",
        "# a comment; --seed 1",
    ],
)
def test_what_a_shell_reads_after_the_flags_is_no_argument(tail):
    """Also in words, as an unquoted variable gives them; a list of paths would take them silently."""
    line = "torchrun --nproc-per-node 8 pretrain_moe.py --num-layers 2 --data-path 0.5 a"
    wanted = ["--world-size", "8", *"--num-layers 2 --data-path 0.5 a".split()]
    assert read_pasted_line([f"{line} {tail}"]) == wanted
    assert read_pasted_line(f"{line} {tail}".split()) == wanted
    assert read_pasted_line([*wanted, *tail.split()]) == wanted
    if tail[0] in "&;":
        assert read_pasted_line([line + tail]) == wanted
        assert read_pasted_line((line + tail[0]).split()) == wanted


def test_values_with_characters_of_a_shell_stay():
    values = ["--pipeline-model-parallel-layout", "Et|tL", "--special", "<eos>", "a > b", "a;b", "x&y", "--save", "a#b"]
    assert read_pasted_line(["pretrain_moe.py", *values]) == values


@pytest.mark.parametrize(
    "text",
    [
        "cd x && A=1 torchrun --nproc-per-node 8 pretrain_moe.py --seed 2",
        "#!/bin/bash\nset -e\nexport WORLD_SIZE=8; python pretrain_moe.py --seed 2 \\\n\necho done",
        "python prepare.py x; torchrun --nproc-per-node=8 pretrain_moe.py --seed 2 || exit 1",
        "(torchrun --nproc-per-node=8 pretrain_moe.py --seed 2)",
        "$ torchrun --rdzv-endpoint $HOST:$PORT --nproc-per-node=8 pretrain_moe.py --seed 2",
        "bash -c 'torchrun --nproc-per-node=8 pretrain_moe.py --seed 2 2>&1 | tee log'",
        'srun -N 1 bash -lc "torchrun --nproc-per-node=8 pretrain_moe.py --seed 2 > log"',
        "for i in 1 2; do torchrun --nproc-per-node=8 pretrain_moe.py --seed 2; done",
    ],
)
def test_text_of_a_script_is_read_as_the_shell_reads_it(text):
    assert read_pasted_line([text]) == ["--world-size", "8", "--seed", "2"]


def test_a_command_in_a_shell():
    words = ["srun", "-N", "2", "--ntasks-per-node", "4", "bash", "-c", "python pretrain_moe.py --seed 2 &> log"]
    assert read_pasted_line(words) == ["--world-size", "8", "--seed", "2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "torchrun pretrain_moe.py ${MODEL_ARGS[@]} --seed 2",
            r"^\$\{MODEL_ARGS\[@\]\}: only your shell knows its words",
        ),
        ('torchrun pretrain_moe.py --seed 2 --data-path a "$@"', r'^"\$@": only your shell'),
        ("torchrun pretrain_moe.py --data-path a $MOE_ARGS", r"^\$MOE_ARGS: only your shell"),
        ("torchrun pretrain_moe.py $(cat flags.txt)", r"^\$\(cat flags.txt\): only your shell"),
        ("torchrun pretrain_moe.py --save 'x --seed 2", "a quote in the pasted line is not closed: 'x --seed 2"),
        ("torchrun pretrain_moe.py --seed 2\ntorchrun pretrain_moe.py --seed 3", "2 commands of the pasted text start"),
    ],
)
def test_what_only_a_shell_can_read_is_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message):
        read_pasted_line([text])


def test_variables_as_values_stay():
    values = "--save $CKPT --data-path 0.7 $A 0.3 ${B} --num-layers ${L}".split()
    assert read_pasted_line([f"torchrun pretrain_moe.py {' '.join(values)} --exp-name '$X' '$@'"]) == [
        *values,
        *("--exp-name", "$X", "$@"),
    ]


@pytest.mark.parametrize(
    "words",
    [
        [],
        FLAGS,
        ["recipe.yaml", "--world-size", "8"],
        ["--preset", "mixtral_tiny", "--tokenizer-model", "a.py", "--wandb-project", "a b"],
        ["--data-path", "python data", "x=1"],
        ["torchrun", "--nproc-per-node", "8"],
        ["moe-trainer", "plan", "--spec", "specs.py"],
        "--data-path corpora/python --spec specs.py layer --hidden-size 64".split(),
        "--exp-name env --spec specs.py layer".split(),
        "--spec pretrain_layers.py layer".split(),
        "--world-size 8 --save env --spec specs.py layer".split(),
        "--report env --spec specs.py layer".split(),
        "recipe.yaml --save env --spec specs.py layer".split(),
        ["--save", "torchrun train.py", "--spec", "specs.py", "layer"],
    ],
)
def test_other_words_are_unchanged(words):
    assert read_pasted_line(words) == words


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ("torchrun pretrain_moe.py --seed 2 --dry-run", "--seed 2 --dry-run"),
        ("--foo python train.py --dry-run", "--foo python train.py --dry-run"),  # no option of the trainer is a tool's
    ],
)
def test_the_trainer_itself_reads_a_line_that_begins_with_a_launcher(monkeypatch, words, read):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train_process, "_dry_run", lambda argv: argv)
    assert train_process.main(words.split()) == read.split()


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        ("torchrun --nproc-per-node gpu --nnodes 4", "--nproc-per-node gpu: a number above 0"),
        ("torchrun --nnodes 1:4 --nproc-per-node 8", "--nnodes 1:4: a number above 0"),
        ("torchrun --nnodes --nproc-per-node 8", r"--nnodes \(no value: an unset variable\?\)"),
        ("torchrun --nproc-per-node=", r"--nproc-per-node \(no value"),
        ("srun -N 2-4 python", "-N 2-4: a number"),
        ("srun -n 0 python", "-n 0: a number above 0"),
    ],
)
def test_ranks_that_cannot_be_counted_are_an_error(launcher, message):
    with pytest.raises(ValueError, match=message):
        read_pasted_line([*launcher.split(), "pretrain_moe.py", *FLAGS])

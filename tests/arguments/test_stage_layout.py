"""Placement of layers, embedding, loss and multi-token prediction, for every way to set it with flags."""

import itertools

import pytest

import arguments
from arguments.container import freeze
from arguments.rules.layout_grammar import read_layout
from arguments.stage_layout import chunk_layouts, embedding_stages
from tests.arguments.rule_lines import findings, recorded, without

BASE = (
    "--hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --lr "
    "1e-3 --train-iters 1 "
    "--mock-data --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 30 --position-embedding-type rope "
    "--transformer-impl local"
).split()


def make_stage_layouts(layers, pp, *flags, mtp=0):
    argv = [
        *BASE,
        "--num-layers",
        str(layers),
        "--pipeline-model-parallel-size",
        str(pp),
        "--global-batch-size",
        str(4 * pp),
        *flags,
    ]
    args = arguments.parse_args([*argv, *(["--mtp-num-layers", str(mtp)] if mtp else [])], world_size=pp)
    return chunk_layouts(args.model, args.parallel)


def in_pipeline_order(layouts):
    """Return the chunks in the order in which data passes through them."""
    return [chunks[index] for index in range(len(layouts[0])) for chunks in layouts]


def sizes(layouts):
    return [[len(chunk.layers) for chunk in chunks] for chunks in layouts]


def assert_valid_layout(layouts, layers, mtp):
    chunks = in_pipeline_order(layouts)
    assert len({len(rank) for rank in layouts}) == 1
    assert [layer for chunk in chunks for layer in chunk.layers] == list(range(layers))
    assert [chunk.has_embedding for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert [chunk.has_loss for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    norm_at = [chunk.has_final_norm for chunk in chunks].index(True)
    assert sum(chunk.has_final_norm for chunk in chunks) == 1
    assert not any(chunk.layers for chunk in chunks[norm_at + 1 :])
    assert [chunk.receives_normed for chunk in chunks] == [index > norm_at for index in range(len(chunks))]
    holders = [index for index, chunk in enumerate(chunks) if chunk.mtp]
    assert len(holders) == (1 if mtp else 0)
    if mtp:
        assert norm_at <= holders[0]
        assert [chunk.receives_depths for chunk in chunks] == [
            mtp if index > holders[0] else 0 for index in range(len(chunks))
        ]
    else:
        assert norm_at == len(chunks) - 1 and not any(chunk.receives_depths for chunk in chunks)


@pytest.mark.parametrize(
    "pp, vpp, per, mtp",
    [c for c in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2), (0, 2)) if c[0] > 1 or c[1] == 1],
)
def test_even_splits(pp, vpp, per, mtp):
    layers = pp * vpp * per
    for flags in (
        ["--num-virtual-stages-per-pipeline-rank", str(vpp)],
        ["--num-layers-per-virtual-pipeline-stage", str(per)],
    ):
        layouts = make_stage_layouts(layers, pp, *flags, mtp=mtp)
        assert sizes(layouts) == [[per] * vpp] * pp
        assert_valid_layout(layouts, layers, mtp)
    assert layouts[0][0].layers == tuple(range(per))
    if pp > 1 and vpp > 1:  # the second chunk of the first rank follows the first chunk of the last rank
        assert layouts[0][1].layers[0] == layouts[-1][0].layers[-1] + 1


@pytest.mark.parametrize(
    "layers, pp, flags, expected",
    [
        (8, 4, "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1", [[1], [3], [3], [1]]),
        (7, 2, "--decoder-last-pipeline-num-layers 3", [[4], [3]]),
        (7, 3, "--decoder-first-pipeline-num-layers 3", [[3], [2], [2]]),
        (5, 2, "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 3", [[2], [3]]),
        (
            12,
            3,
            "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 4 "
            "--num-virtual-stages-per-pipeline-rank 2",
            [[1, 1], [3, 3], [2, 2]],
        ),
        (
            12,
            3,
            "--decoder-first-pipeline-num-layers 2 --num-layers-per-virtual-pipeline-stage 2 "
            "--decoder-last-pipeline-num-layers 6",
            [[1, 1], [2, 2], [3, 3]],
        ),
        (6, 4, "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", [[1], [2], [2], [1]]),
        (7, 4, "--account-for-embedding-in-pipeline-split", [[1], [2], [2], [2]]),
        (7, 4, "--account-for-loss-in-pipeline-split", [[2], [2], [2], [1]]),
        (2, 2, "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", [[1], [1]]),
        (
            6,
            2,
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
            "--num-virtual-stages-per-pipeline-rank 2",
            [[1, 2], [2, 1]],
        ),
        (
            14,
            4,
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
            "--num-layers-per-virtual-pipeline-stage 1",
            [[0, 1, 1, 1], [1] * 4, [1] * 4, [1, 1, 1, 0]],
        ),
    ],
)
def test_uneven_splits(layers, pp, flags, expected):
    layouts = make_stage_layouts(layers, pp, *flags.split())
    assert sizes(layouts) == expected
    assert_valid_layout(layouts, layers, 0)


@pytest.mark.parametrize(
    "text, layers, pp, mtp",
    [
        ("Et*3|(tt|)*6L", 15, 8, 0),
        ("Et|t|t|t|t|t|t|tL", 8, 4, 0),
        ("E||t|L", 1, 4, 0),
        ("E|tt|tt|m|L", 4, 5, 1),
        ("Ett|tt|mm|L", 4, 4, 2),
        ("Et|t|t|t|t||mm|L", 5, 4, 2),
        ("EttmL", 2, 1, 1),
        ("Et,t|t*2,m*2,L", 4, 2, 2),
        ("E|t|t|t|t|t||mL", 5, 4, 1),
    ],
)
def test_stages_follow_the_layout_string(text, layers, pp, mtp):
    layouts = make_stage_layouts(layers, pp, "--pipeline-model-parallel-layout", text, mtp=mtp)
    stages = read_layout(text).stages
    for index, (stage, chunk) in enumerate(zip(stages, in_pipeline_order(layouts), strict=True)):
        drawn = (
            "E" * chunk.has_embedding + "t" * len(chunk.layers) + "m" * (mtp if chunk.mtp else 0) + "L" * chunk.has_loss
        )
        assert drawn == stage, index
    assert_valid_layout(layouts, layers, mtp)


@pytest.mark.parametrize(
    "text, layers, mtp, tied, expected",
    [
        ("Et|t|t|tL", 4, 0, False, (0,)),
        ("Et|t|t|tL", 4, 0, True, (0, 3)),
        ("Et|t|tt|mL", 4, 1, False, (0, 3)),
        ("Et|tt|tm|L", 4, 1, False, (0, 2)),
        ("Et|tt|tm|L", 4, 1, True, (0, 2, 3)),
    ],
)
def test_embedding_stages_under_four_pipeline_ranks(text, layers, mtp, tied, expected):
    assert (
        embedding_stages(make_stage_layouts(layers, 4, "--pipeline-model-parallel-layout", text, mtp=mtp), tied)
        == expected
    )


def test_embedding_stages_without_pipeline_parallelism():
    assert embedding_stages(make_stage_layouts(2, 1, mtp=1), True) == (0,)


def test_recorded_command_lines_give_the_recorded_chunk_count():
    record, seen = recorded("rule_cases"), 0
    for case in record["cases"]:
        argv = without(record["base"], case["removed"]) + case["added"]
        settings, _ = findings(argv, case["world_size"], case["env"], case["arch"])
        if case["outcome"] != "ok" or settings.pipeline_model_parallel_size == 1:
            continue
        args = freeze(settings, case["world_size"])
        layouts = chunk_layouts(args.model, args.parallel)
        assert_valid_layout(layouts, args.model.num_layers, args.model.mtp_num_layers or 0)
        vpp = case["observed"].get("virtual_pipeline_model_parallel_size")
        if "virtual_pipeline_model_parallel_size" in case["observed"]:
            assert len(layouts[0]) == (vpp or 1), case["name"]
        seen += 1
    assert seen >= 4

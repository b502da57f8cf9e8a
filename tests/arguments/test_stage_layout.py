"""Placement of layers, embedding, loss and multi-token prediction, for every way to set it with flags."""

import itertools
from dataclasses import replace

import arguments
from arguments.checkpoint_args import STAGES
from arguments.container import freeze
from arguments.model import ModelArgs
from arguments.parallel import ParallelArgs
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
    sizes = f"--num-layers {layers} --pipeline-model-parallel-size {pp} --global-batch-size {4 * pp}".split()
    args = arguments.parse_args([*BASE, *sizes, *flags, *(["--mtp-num-layers", str(mtp)] if mtp else [])], pp)
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


def test_even_splits():
    for pp, vpp, per, mtp in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2), (0, 2)):
        if pp == 1 and vpp > 1:
            continue
        for flags in (
            ["--num-virtual-stages-per-pipeline-rank", str(vpp)],
            ["--num-layers-per-virtual-pipeline-stage", str(per)],
        ):
            layouts = make_stage_layouts(pp * vpp * per, pp, *flags, mtp=mtp)
            assert sizes(layouts) == [[per] * vpp] * pp
            assert_valid_layout(layouts, pp * vpp * per, mtp)
        assert layouts[0][0].layers == tuple(range(per))
        if pp > 1 and vpp > 1:  # the second chunk of the first rank follows the first chunk of the last rank
            assert layouts[0][1].layers[0] == layouts[-1][0].layers[-1] + 1


FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
ENDS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank 2"


def test_uneven_splits():
    for layers, pp, flags, expected in (
        (8, 4, f"{FIRST} 1 {LAST} 1", [[1], [3], [3], [1]]),
        (7, 2, f"{LAST} 3", [[4], [3]]),
        (7, 3, f"{FIRST} 3", [[3], [2], [2]]),
        (5, 2, f"{FIRST} 2 {LAST} 3", [[2], [3]]),
        (12, 3, f"{FIRST} 2 {LAST} 4 {VIRTUAL}", [[1, 1], [3, 3], [2, 2]]),
        (12, 3, f"{FIRST} 2 --num-layers-per-virtual-pipeline-stage 2 {LAST} 6", [[1, 1], [2, 2], [3, 3]]),
        (6, 4, ENDS, [[1], [2], [2], [1]]),
        (7, 4, "--account-for-embedding-in-pipeline-split", [[1], [2], [2], [2]]),
        (7, 4, "--account-for-loss-in-pipeline-split", [[2], [2], [2], [1]]),
        (2, 2, ENDS, [[1], [1]]),
        (6, 2, f"{ENDS} {VIRTUAL}", [[1, 2], [2, 1]]),
        (14, 4, f"{ENDS} --num-layers-per-virtual-pipeline-stage 1", [[0, 1, 1, 1], [1] * 4, [1] * 4, [1, 1, 1, 0]]),
    ):
        layouts = make_stage_layouts(layers, pp, *flags.split())
        assert sizes(layouts) == expected, flags
        assert_valid_layout(layouts, layers, 0)


def test_stages_follow_the_layout_string():
    for text, layers, pp, mtp in (
        ("Et*3|(tt|)*6L", 15, 8, 0),
        ("Et|t|t|t|t|t|t|tL", 8, 4, 0),
        ("E||t|L", 1, 4, 0),
        ("E|tt|tt|m|L", 4, 5, 1),
        ("Ett|tt|mm|L", 4, 4, 2),
        ("Et|t|t|t|t||mm|L", 5, 4, 2),
        ("EttmL", 2, 1, 1),
        ("Et,t|t*2,m*2,L", 4, 2, 2),
        ("E|t|t|t|t|t||mL", 5, 4, 1),
    ):
        layouts = make_stage_layouts(layers, pp, "--pipeline-model-parallel-layout", text, mtp=mtp)
        for stage, chunk in zip(read_layout(text).stages, in_pipeline_order(layouts), strict=True):
            drawn = "E" * chunk.has_embedding + "t" * len(chunk.layers)
            assert drawn + "m" * (mtp if chunk.mtp else 0) + "L" * chunk.has_loss == stage, text
        assert_valid_layout(layouts, layers, mtp)


def test_embedding_stages_under_four_pipeline_ranks():
    for text, layers, mtp, tied, expected in (
        ("Et|t|t|tL", 4, 0, False, (0,)),
        ("Et|t|t|tL", 4, 0, True, (0, 3)),
        ("Et|t|tt|mL", 4, 1, False, (0, 3)),
        ("Et|tt|tm|L", 4, 1, False, (0, 2)),
        ("Et|tt|tm|L", 4, 1, True, (0, 2, 3)),
    ):
        layouts = make_stage_layouts(layers, 4, "--pipeline-model-parallel-layout", text, mtp=mtp)
        assert embedding_stages(layouts, tied) == expected, text


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


def test_only_flags_of_stages_place_layers():
    """A checkpoint's buckets are laid out by these flags of its record, and a search replaces them."""
    read = set()

    class Recorder:
        def __init__(self, parallel):
            self._parallel = parallel

        def __getattr__(self, name):
            read.add(name)
            return getattr(self._parallel, name)

    model = ModelArgs(num_layers=8)
    for flags in (
        {},
        {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True, "num_layers": 6},
        {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 6},
        {"num_virtual_stages_per_pipeline_rank": 2},
        {"num_layers_per_virtual_pipeline_stage": 2},
        {"pipeline_model_parallel_layout": "Et*4|t*4L"},
    ):
        layers = flags.pop("num_layers", model.num_layers)
        chunk_layouts(
            replace(model, num_layers=layers), Recorder(ParallelArgs(pipeline_model_parallel_size=2, **flags))
        )
    assert read == {*STAGES, "pipeline_model_parallel_size"}

"""A real run's legacy checkpoint has the form of Megatron-LM's own, file by file, and every key and type that its loaders demand."""

import json
from pathlib import Path

import pytest
from checkpoint.megatron_legacy.legacy_form import describe_forms
from training.forked import pretrain

from moe_trainer.checkpoint.archive import load_mapped
from moe_trainer.checkpoint.megatron_legacy.names import MODEL_FILE

FORMS = json.loads((Path(__file__).parents[2] / "data/legacy_forms.json").read_text())
# what this program writes in addition: Megatron-LM ignores it
OURS = frozenset({"bias_correction", "step", "moe_trainer_streams", "decoupled_weight_decay"})


def compare(theirs, mine, where: str) -> None:
    """Assert that everything that Megatron-LM writes is present with the same structure."""
    if isinstance(theirs, dict):
        assert isinstance(mine, dict) and theirs.keys() <= mine.keys() <= theirs.keys() | OURS, (
            where,
            sorted(theirs.keys() ^ mine.keys()),
        )
        for name, value in theirs.items():
            compare(value, mine[name], f"{where}/{name}")
    elif where.endswith(
        "/rng_state"
    ):  # one state for all data-parallel ranks there, one for each here: its loader takes the first
        for each in mine:
            compare(theirs[0], each, where + "[0]")
    elif isinstance(theirs, list):
        assert isinstance(mine, list) and len(mine) == len(theirs), (where, len(theirs), len(mine))
        for number, (one, other) in enumerate(zip(theirs, mine, strict=True)):
            compare(one, other, f"{where}[{number}]")
    else:
        assert mine == theirs, where


@pytest.mark.parametrize("case", FORMS)
def test_legacy_files_have_the_structure_of_megatron(case, tmp_path):
    """Names, order, shapes, types, identity of parameter groups, buffers, random states and schedules are Megatron-LM's.

    Prediction layers under two pipeline stages; experts under a distributed optimizer; a shared expert with a gate
    under two kinds of tensor parallelism.
    """
    recorded = FORMS[case]
    data = [
        "--mock-data",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "511",
        "--make-vocab-size-divisible-by",
        "128",
    ]
    pretrain(
        [*recorded["flags"], *data, "--train-iters", "1", "--save", str(tmp_path / "saved"), "--save-interval", "1"],
        tmp_path,
        recorded["ranks"],
    )
    mine = describe_forms(tmp_path / "saved/iter_0000001")
    assert mine.keys() == recorded["files"].keys()
    for file, theirs in recorded["files"].items():
        compare(theirs, mine[file], f"{case}/{file}")
    # what is no flag of the command line, and Megatron-LM compares or goes by
    args = load_mapped(tmp_path / "saved/iter_0000001" / next(file for file in mine if file.endswith(MODEL_FILE)))[
        "args"
    ]
    assert args.padded_vocab_size == 512 and args.world_size == recorded["ranks"] and args.async_strategy == "mcore"
    assert (
        args.data_parallel_size * args.tensor_model_parallel_size * args.pipeline_model_parallel_size
        == recorded["ranks"]
    )

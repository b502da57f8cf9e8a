"""The pipeline layout grammar and the batch schedule: parsing, expansion, and mismatches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arguments.data import split_weights
from arguments.rules.layout_grammar import problems, read_layout
from arguments.training import parse_batch_schedule


def test_pipeline_layout_is_parsed():
    for text, stages in {
        "Ettt|ttL": "Ettt ttL",
        "E,t,t|t,L": "Ett tL",
        "Et*3|(tt|)*2L": "Ettt tt tt L",
        "Et*2|(tt|)*5t|tmL": "Ett tt tt tt tt tt t tmL",
        "E|t*2|(t|t)*2|L": "E tt t tt t L",
    }.items():
        assert read_layout(text).stages == tuple(stages.split()), text
    assert read_layout("E|*3L").stages == ("E", "", "", "L")


@given(st.lists(st.integers(0, 5), min_size=2, max_size=8))
def test_repeated_groups_equal_the_expanded_layout(counts):
    written = "E" + "|".join("t" * n for n in counts) + "L"
    short = "E" + "|".join(f"t*{n}" if n else "" for n in counts) + "L"
    layout = read_layout(short)
    assert layout == read_layout(written)
    assert layout.count("t") == sum(counts) and len(layout.stages) == len(counts)
    assert problems(layout, len(counts), sum(counts), 0) == []
    assert problems(layout, len(counts), sum(counts) + 1, 0)


def test_mismatch_of_layout_and_model_is_explained():
    for text, pp, layers, mtp, word in (
        ("Ett|tL", 2, 4, 0, "decoder layers"),
        ("Ett|t|tL", 2, 4, 0, "stages"),
        ("tt|ttL", 2, 4, 0, "E (embedding)"),
        ("EEtt|ttL", 2, 4, 0, "E (embedding)"),
        ("Ett|tt", 2, 4, 0, "L (loss)"),
        ("Ett|ttL|", 3, 4, 0, "L (loss)"),
        ("Ett|ttmL", 2, 4, 2, "MTP layers"),
        ("Ett|tmtL", 2, 4, 1, "after an MTP"),
        ("Ett|t|tm|mL", 4, 4, 2, "several stages"),
        ("Ett|tt|m|L", 2, 4, 1, "pipeline rank 0"),
        ("Ettt|tm|L|", 2, 4, 1, "chunk"),
    ):
        assert any(word in clause for clause in problems(read_layout(text), pp, layers, mtp)), text


def test_standalone_prediction_heads():
    assert read_layout("Etttt|tttt|m|L").mtp_standalone(4)
    assert not read_layout("Etttt|ttttmL").mtp_standalone(2)
    assert not read_layout("Etttt|ttttL").mtp_standalone(2)


def test_batch_schedule_is_parsed():
    assert parse_batch_schedule("0:384 200B:768, 1.5T:1152") == ((0, 384), (200 * 10**9, 768), (1500 * 10**9, 1152))
    assert parse_batch_schedule("0:8 4.1B:16")[1] == (4_100_000_000, 16)
    for text in ("", "1:8", "0:8 5:0", "0:8 9:16 9:32", "0:8 x:16", "0:8 0.5:16", "0:8 1e9:16", "0:8 9:16 5:4"):
        with pytest.raises(ValueError):
            parse_batch_schedule(text)


def test_split_weights_are_normalized():
    assert split_weights("969, 30, 1") == (0.969, 0.03, 0.001)
    assert split_weights("99,1") == (0.99, 0.01, 0.0)
    assert split_weights("1") == (1.0, 0.0, 0.0)
    for text in ("", "0,0,0", "1,2,3,4", "-1,2", "a,b", "nan,1"):
        with pytest.raises(ValueError):
            split_weights(text)

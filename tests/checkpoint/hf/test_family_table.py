"""The page of families has a row for every family that the tests compare with transformers."""

import pytest
from checkpoint.hf.family_table import COLUMNS, PAGE, page_lines, read_junit
from checkpoint.hf.models import MODELS

RESULTS = """<testsuites><testsuite><testcase name="test_a[olmoe]">{more}<properties><property name="logits" value="2e-6" />
</properties></testcase><testcase name="test_b[olmoe-TP2 SP EP2]"><properties><property name="tokens" value="120.0" />
<property name="other" value="1" /></properties></testcase></testsuite></testsuites>"""


def test_page_has_every_family_within_the_bounds_of_the_tests():
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert [row[0].strip("`") for row in rows] == list(MODELS)
    for row in rows:
        values = dict(zip(COLUMNS, row[1:], strict=False))
        assert float(values["logits"]) < 1e-5 and float(values["bf16"]) < 2, row
        assert float(values["loss"]) < 1e-5, row


def test_values_are_those_that_tests_recorded(tmp_path):
    file = tmp_path / "results.xml"
    file.write_text(RESULTS.format(more=""))
    found = read_junit(file)
    assert found == {"olmoe": {"logits": 2e-6, "tokens": 120.0}}
    assert page_lines(found, "5.0")[-1] == "| `olmoe` |  | 2e-06 |  |  |  | 120 |"
    file.write_text(RESULTS.format(more="<failure />"))
    with pytest.raises(ValueError, match="olmoe. failed"):
        read_junit(file)

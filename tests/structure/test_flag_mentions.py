"""Few product files name a flag whose meaning one function or property answers for all others."""

import re

import pytest
from structure.source import ROOT, product_files

LIMITS = {"mtp_num_layers": 20}
"""The most product files that may name a flag; the others ask, here ModelArgs.num_mtp_depths and arguments/mtp.py."""


@pytest.mark.parametrize(("flag", "limit"), LIMITS.items())
def test_few_files_name_a_flag(flag, limit):
    word = re.compile(rf"\b{flag}\b")
    names = [path.relative_to(ROOT) for path in product_files() if word.search(path.read_text(encoding="utf-8"))]
    assert 0 < len(names) <= limit, "\n".join(map(str, names))

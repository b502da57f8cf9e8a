"""The first documents of the mock data, for rooms whose tests run the program in forked ranks: their conftest.py takes the fixture over."""

import pytest

from moe_trainer.data.dataset import MockTokens

DOCUMENTS = 3000


@pytest.fixture(scope="module", autouse=True)
def short_mock_data():
    """Forked ranks would spend more on the order of six million samples than on training; tests/data_pipeline has them all."""
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch.setattr)
        yield


def shorten(set_attribute=setattr) -> None:
    """The same in a process of another parent."""
    whole = MockTokens.__init__

    def short(self, *given):
        whole(self, *given)
        self.sequence_lengths = self.sequence_lengths[:DOCUMENTS]

    set_attribute(MockTokens, "__init__", short)

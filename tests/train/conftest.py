"""The room's mock data: the first documents of the program's."""

import pytest

from moe_trainer.data.dataset import MockTokens

DOCUMENTS = 3000


@pytest.fixture(scope="module", autouse=True)
def short_mock_data():
    """Forked ranks would spend more on the order of two million samples than on training; tests/data_pipeline has them all."""
    whole = MockTokens.__init__

    def short(self, *given):
        whole(self, *given)
        self.sequence_lengths = self.sequence_lengths[:DOCUMENTS]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MockTokens, "__init__", short)
        yield

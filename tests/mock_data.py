"""A fixture that shortens the mock data, imported by conftest.py where tests run the program in forked ranks."""

import pytest

NUM_DOCUMENTS = 3000


@pytest.fixture(scope="module", autouse=True)
def short_mock_data():
    """Keep the first documents only: ranks would spend more time shuffling six million samples than training.

    tests/data_pipeline tests the full mock data.
    """
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch.setattr)
        yield


def shorten(set_attribute=setattr) -> None:
    """Shorten the mock data in this process."""
    # imported here: conftest.py is loaded before a recording begins
    from moe_trainer.data.dataset import MockTokens

    original = MockTokens.__init__

    def short(self, *args):
        original(self, *args)
        self.sequence_lengths = self.sequence_lengths[:NUM_DOCUMENTS]

    set_attribute(MockTokens, "__init__", short)

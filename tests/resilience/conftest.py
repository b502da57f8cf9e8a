"""The room's mock data: the first documents of the program's."""

from mock_data import short_mock_data  # noqa: F401 - a fixture

"""Mock data of these tests: the first documents of the program's mock data."""

from mock_data import short_mock_data  # noqa: F401 - a fixture

"""The fixtures of all tests; what they are made of is in parts.py."""

import pytest

pytest.register_assert_rewrite("parts")

from parts import clock, inside, llama_server, models, serve, stub_engine  # noqa: E402, F401


def pytest_collection_modifyitems(items):
    """The long test of load begins first: none of the workers waits for it at the end."""
    items.sort(key=lambda item: item.path.name != "test_load.py")

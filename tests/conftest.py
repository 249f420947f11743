"""The fixtures of all tests; what they are made of is in parts.py."""

import pytest

pytest.register_assert_rewrite("parts")

from parts import clock, inside, llama_server, models, serve, stub_engine  # noqa: E402, F401


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """The lab's tests take longest and run in one worker: they come first."""
    items.sort(key=lambda item: "/lab/" not in item.nodeid)

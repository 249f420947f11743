"""The fixtures of all tests; what they are made of is in parts.py."""

import pytest

pytest.register_assert_rewrite("parts")

from parts import clock, inside, llama_server, models, serve, stub_engine  # noqa: E402, F401

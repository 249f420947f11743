"""`serve` with a JSON configuration works on every Python that it promises to."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess

import pytest
from parts import PATIENCE, free_port, llama_command

VERSIONS = ["3.9", "3.10", "3.11", "3.12", "3.13", "3.14"]


def python_of(version: str) -> str | None:
    """An interpreter of that version that runs: on PATH, or one of pyenv's."""
    installed = sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python{version}")))
    for path in [*installed, shutil.which(f"python{version}")]:
        if path and subprocess.run([path, "-c", "pass"], capture_output=True).returncode == 0:
            return path
    return None


@pytest.fixture(scope="module")
def pythons() -> dict[str, str]:
    found = {version: path for version in VERSIONS if (path := python_of(version))}
    if len(found) < 2:
        pytest.skip(f"only one Python is here: {found}")
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_serve_starts_an_engine_answers_a_chat_and_stops_on_python(serve, llama_server, models, pythons, version):
    if version not in pythons:
        pytest.skip(f"no Python {version} here")
    small = {"command": llama_command(llama_server, models["small"]), "port": free_port(), "models": ["small"]}
    serving = serve({"hosts": {"here": {"engines": {"small": small}}}}, python=pythons[version])
    body = {"model": "small", "messages": [{"role": "user", "content": "say something"}], "max_tokens": 4}
    reply = serving.ask("POST", "/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    assert reply.json()["usage"]["completion_tokens"] == 4
    stream = serving.stream("/v1/chat/completions", dict(body, stream=True))
    assert stream.whole().endswith(b"data: [DONE]\n\n")
    assert serving.ask("POST", "/api/models/unload/small").status == 200
    assert serving.cli("model", "list").stdout == "small  unloaded\n"
    assert serving.cli("check").returncode == 0
    serving.signal(signal.SIGTERM)
    assert serving.process.wait(PATIENCE) == 0
    assert "Traceback" not in serving.log()

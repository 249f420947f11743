"""Fronts with model servers behind them: one with llama-swap's API, written here, and a real llama-swap where $LLAMA_SWAP names a
binary. Both run tests/modelserver.py on a toy GPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from parts import eventually, free_port

import llmguard

MODELSERVER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "modelserver.py")
MIB = 1 << 20
WEIGHTS = 96 * MIB
SIZES = {"small one": WEIGHTS, "org/b": WEIGHTS // 2}


def text_of(url: str, method: str = "GET", timeout: float = 30.0) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, method=method, data=b"" if method == "POST" else None), timeout=timeout) as reply:
        return reply.read()


class ToyGpu:
    """A GPU that holds one set of the models, and its nvidia-smi on the PATH."""

    def __init__(self, root: Path, patch) -> None:
        self.folder = root / "gpu"
        self.folder.mkdir()
        (self.folder / "total").write_text(str(160 * MIB))
        tools = root / "bin"
        tools.mkdir()
        (tools / "nvidia-smi").write_text(f"#!{sys.executable} -SE\n" + Path(MODELSERVER).read_text())
        (tools / "nvidia-smi").chmod(0o755)
        patch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        patch.setenv("TOY_GPU", str(self.folder))

    def drains(self, on: bool) -> None:
        """While on, what a dead server held is not given back."""
        (self.folder / "drains").touch() if on else (self.folder / "drains").unlink(missing_ok=True)


class Front:
    """llama-swap's API: /running, unload, a reload that stops all, and a request that starts what it needs."""

    kind = "stub"

    def __init__(self, root: Path) -> None:
        self.root, self.port = root, free_port()
        self.models = {}
        for name, size in SIZES.items():
            path = root / (name.replace("/", "-").replace(" ", "-") + ".gguf")
            path.touch()
            os.truncate(path, size)
            self.models[name] = path
        self.config = root / "swap.yaml"
        self.write_config()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self, name: str, port) -> list[str]:
        return [sys.executable, "-SE", MODELSERVER, "--port", str(port), "-m", str(self.models[name]), "--gpu", os.environ["TOY_GPU"], "--name", name]

    def write_config(self, note: str = "") -> None:
        lines = [f"# {note}", "models:"]
        for name in self.models:
            quoted = " ".join(f"'{word}'" for word in self.command(name, "${PORT}"))
            lines += [f"  {json.dumps(name)}:", f"    cmd: {json.dumps(quoted)}", "    ttl: 300"]
        lines += ["groups:", "  all:", "    swap: false", "    exclusive: false", f"    members: {json.dumps(list(self.models))}"]
        self.config.write_text("\n".join(lines) + "\n")

    def ask(self, path: str, method: str = "GET") -> bytes:
        return text_of(self.url + path, method)

    def request(self, model: str) -> None:
        """What a client does: it asks for a model, which starts its server."""
        self.ask(f"/upstream/{urllib.request.quote(model)}/health")

    def running(self) -> dict[str, dict]:
        return {entry["model"]: entry for entry in json.loads(self.ask("/running"))["running"] if entry["state"] == "ready"}

    def server(self, model: str) -> llmguard.Process:
        port = int(self.running()[model]["proxy"].rpartition(":")[2])
        (process,) = llmguard.Box().listening(port)
        return process

    def on_gpu(self, model: str) -> bool:
        return os.path.exists(os.path.join(os.environ["TOY_GPU"], str(self.server(model).pid)))

    def says(self, model: str, word: str) -> None:
        """Have a model's server work, or rest."""
        text_of(self.running()[model]["proxy"] + "/" + word, "POST")

    # ----- this one's own way to do that

    def start(self) -> None:
        front = self
        self.children: dict[str, tuple[subprocess.Popen, int]] = {}
        self.lock = threading.RLock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args) -> None:
                pass

            def reply(self, data: bytes, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                if self.path == "/running":
                    with front.lock:
                        rows = [{"model": name, "state": "ready", "cmd": "", "proxy": f"http://localhost:{port}", "ttl": 300}
                                for name, (_, port) in front.children.items()]
                    self.reply(json.dumps({"running": rows}).encode())
                elif self.path.startswith("/upstream/"):
                    name = next((name for name in front.models if unquote(self.path).startswith(f"/upstream/{name}/")), None)
                    if name is None:
                        self.reply(b'{"error": {"message": "unknown model"}}', 404)
                        return
                    self.reply(text_of(f"http://127.0.0.1:{front.spawn(name)}" + unquote(self.path)[len(f"/upstream/{name}"):]))
                else:
                    self.reply(b"", 404)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.path.startswith("/api/models/unload/"):
                    front.kill(unquote(self.path)[len("/api/models/unload/"):])
                    self.reply(b"OK")
                    return
                if self.path == "/reload":
                    front.reload()
                    self.reply(b"")
                    return
                port = front.spawn(json.loads(body)["model"])
                call = urllib.request.Request(f"http://127.0.0.1:{port}{self.path}", body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(call) as reply:
                    self.send_response(200)
                    self.send_header("Content-Type", "text/event-stream")
                    self.send_header("Connection", "close")
                    self.end_headers()
                    shutil.copyfileobj(reply, self.wfile)
                self.close_connection = True

        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()

    def spawn(self, name: str) -> int:
        with self.lock:
            if name not in self.children:
                port = free_port()
                self.children[name] = subprocess.Popen(self.command(name, port)), port
                eventually(lambda: _serves(port), "the model's server")
            return self.children[name][1]

    def kill(self, name: str) -> None:
        with self.lock:
            child, _ = self.children.pop(name, (None, 0))
            if child:
                child.kill()
                child.wait()

    def reload(self) -> None:
        """A deploy: another configuration, and every server is stopped, changed or not."""
        self.write_config(f"deployed {os.urandom(4).hex()}")
        for name in list(self.children):
            self.kill(name)

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        for name in list(self.children):
            self.kill(name)


def _serves(port: int) -> bool:
    try:
        return bool(text_of(f"http://127.0.0.1:{port}/health"))
    except OSError:
        return False


class LlamaSwap(Front):
    """The real one; a reload by SIGHUP, or by itself when it watches its configuration."""

    kind = "llama-swap"
    watches = False

    def start(self) -> None:
        watch = ["-watch-config"] if self.watches else []
        argv = [os.environ["LLAMA_SWAP"], "-config", self.config.name, "-listen", f"127.0.0.1:{self.port}", *watch]
        with open(self.root / "swap.log", "wb") as output:
            self.process = subprocess.Popen(argv, stdout=output, stderr=output, cwd=self.root)
        eventually(lambda: _serves(self.port), "llama-swap")

    def reload(self) -> None:
        before = {model: self.server(model) for model in self.running()}
        self.write_config(f"deployed {os.urandom(4).hex()}")
        if not self.watches:
            self.process.send_signal(signal.SIGHUP)
        eventually(lambda: not any(llmguard.Box().same(one.pid, one.start) for one in before.values()), "the reload")
        eventually(lambda: _serves(self.port), "llama-swap again")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class LlamaSwapWatching(LlamaSwap):
    kind = "llama-swap -watch-config"
    watches = True

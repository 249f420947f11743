"""The example units on a real systemd: the proxy is ready when it says so, and a restart under load drops nobody."""

import http.client
import json
import threading
from pathlib import Path

from conftest import LLMGUARD
from lab import wait_for

EXAMPLES = LLMGUARD.parent / "examples"
PORT = 8080
CONFIG = """
[proxy]
listen = "127.0.0.1:8080"
[hosts.here.engines.other]
url = "http://127.0.0.1:8082"
models = ["small"]
"""


def stream(address: str) -> tuple:
    """One streamed chat over a connection of its own -> its status, and whether it was whole."""
    connection = http.client.HTTPConnection(address, PORT, timeout=60)
    try:
        body = {"model": "small", "stream": True, "max_tokens": 20, "messages": [{"role": "user", "content": "say something"}]}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Connection": "close"})
        reply = connection.getresponse()
        return reply.status, reply.read().endswith(b"data: [DONE]\n\n")
    finally:
        connection.close()


def test_a_restart_under_load_drops_no_connection(ready):
    root = lambda *argv: ready.exec("root", list(argv)).stdout
    ready.start_engine("llm-engine-other")
    root("useradd", "--system", "--home-dir", "/var/lib/llmguard", "--shell", "/usr/sbin/nologin", "llmguard")
    ready.write("/opt/llmguard/llmguard.py", LLMGUARD.read_text(), user="root")
    ready.write("/etc/llmguard/llmguard.toml", CONFIG, user="root")
    for name in ("llmguard.service", "llmguard.socket"):
        ready.write("/etc/systemd/system/" + name, Path(EXAMPLES, name).read_text(), user="root")
    ready.write("/etc/systemd/system/llmguard.socket.d/port.conf", f"[Socket]\nListenStream=\nListenStream={PORT}\n", user="root")
    ready.write("/etc/systemd/system/llmguard.service.d/watchdog.conf", "[Service]\nWatchdogSec=2\n", user="root")
    ready.systemctl("daemon-reload", user="root")
    ready.systemctl("start", "llmguard.socket", user="root")
    ready.systemctl("start", "llmguard.service", user="root")  # Type=notify: returns when it is ready
    assert stream(ready.address) == (200, True)

    answers, stop = [], threading.Event()

    def load() -> None:
        while not stop.is_set():
            try:
                answers.append(stream(ready.address))
            except OSError as error:
                answers.append(repr(error))

    clients = [threading.Thread(target=load) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        pids = set()
        for _ in range(3):
            seen = len(answers)
            wait_for("requests", lambda seen=seen: len(answers) >= seen + 5, 60)
            ready.systemctl("restart", "llmguard.service", user="root")
            pids.add(ready.systemctl("show", "-P", "MainPID", "llmguard.service", user="root").strip())
        seen = len(answers)
        wait_for("requests", lambda: len(answers) >= seen + 5, 60)
    finally:
        stop.set()
        for client in clients:
            client.join(60)
    assert len(pids) == 3 and set(answers) == {(200, True)}, [answer for answer in answers if answer != (200, True)][:5]
    told = lambda: ready.systemctl("show", "-P", "StatusText", "llmguard.service", user="root").strip()
    wait_for("the watchdog's word", lambda: told() == "1 hosts, 0 requests in flight", 30)
    assert ready.systemctl("is-active", "llmguard.service", user="root") == "active\n"
    journal = root("journalctl", "-u", "llmguard", "-o", "json", "--no-pager")
    priorities = {json.loads(line).get("PRIORITY") for line in journal.splitlines() if "llmguard 0." in line}
    assert priorities == {"6"}, "the log carries its priorities"

"""Mixed traffic on a real engine for minutes: nothing is lost, and nothing grows.

It lasts 15 s, in CI two minutes, and with LLMGUARD_LOAD=1800 as many seconds as that says.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path

from parts import PATIENCE, Serving, ask, eventually, free_port, llama_command

import llmguard

SECONDS = float(os.environ.get("LLMGUARD_LOAD") or (120 if os.environ.get("CI") == "true" else 15))
WARM_UP = max(6.0, SECONDS / 4)  # the memory allocator's own stock takes so long to fill


def chat(model: str, **more) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "say something"}], "max_tokens": 8, "seed": 7, **more}


class Traffic:
    """Clients of every kind, until they are told to stop. What any of them saw that it should not have is in `wrong`."""

    def __init__(self, serving: Serving, seed: int) -> None:
        self.serving, self.seed = serving, seed
        self.over = threading.Event()
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        kinds = [
            self.answers, self.answers, self.kept_alive, self.streams, self.streams, self.cancels, self.leaves_at_once, self.mistakes,
            self.views, self.listens, self.sends_much, self.other_engine,
        ]  # fmt: skip
        self.threads = [threading.Thread(target=self._run, args=(kind, n), daemon=True) for n, kind in enumerate(kinds)]

    def __enter__(self) -> Traffic:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in self.threads), "a client waits for ever"

    def _run(self, kind, number: int) -> None:
        dice = random.Random(self.seed * 100 + number)
        while not self.over.is_set():
            try:
                kind(dice)
                self.done[kind.__name__] += 1
            except Exception as error:
                self.wrong.append(f"{kind.__name__}: {error!r}")
                return

    def _stream(self, model: str, tokens: int) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.serving.port, timeout=PATIENCE)
        connection.request("POST", "/v1/chat/completions", json.dumps(chat(model, stream=True, max_tokens=tokens)))
        response = connection.getresponse()
        assert response.status == 200, (response.status, response.read())
        return response

    def answers(self, dice: random.Random) -> None:
        tokens = dice.randint(1, 12)
        reply = self.serving.ask("POST", "/v1/chat/completions", chat("small", max_tokens=tokens))
        assert reply.status == 200 and reply.json()["usage"]["completion_tokens"] == tokens, (reply.status, reply.body)

    def kept_alive(self, dice: random.Random) -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.serving.port, timeout=PATIENCE)) as connection:
            for _ in range(dice.randint(1, 12)):
                connection.request("POST", "/tokenize", json.dumps({"model": "small", "content": "it was"}))
                response = connection.getresponse()
                assert response.status == 200 and json.loads(response.read())["tokens"]

    def streams(self, dice: random.Random) -> None:
        tokens = dice.randint(1, 60)
        with self._stream("small", tokens) as response:
            body = response.read()
        assert body.endswith(b"data: [DONE]\n\n") and b'"predicted_n":%d,' % tokens in body, body[-300:]

    def cancels(self, dice: random.Random) -> None:
        with self._stream("small", 400) as response:
            for _ in range(dice.randint(1, 4)):
                assert response.readline()

    def leaves_at_once(self, dice: random.Random) -> None:
        body = json.dumps(chat(dice.choice(["small", "nobody"]), stream=dice.random() < 0.5)).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        with socket.create_connection(("127.0.0.1", self.serving.port), PATIENCE) as sock:
            sock.sendall((head + body)[: dice.randint(1, len(head + body))])
        self.over.wait(0.01)

    def mistakes(self, dice: random.Random) -> None:
        method, path, body, status = dice.choice(
            [
                ("POST", "/v1/chat/completions", chat("smal"), 404),
                ("POST", "/v1/chat/completions", b'{"model":', 400),
                ("GET", "/nothing", None, 404),
                ("DELETE", "/status", None, 405),
                ("POST", "/v1/completions", b"x" * (3 << 20), 413),
            ]
        )
        assert self.serving.ask(method, path, body).status == status
        self.over.wait(0.01)

    def views(self, dice: random.Random) -> None:
        for path in ("/status", "/metrics", "/v1/models", "/running", "/health", "/"):
            assert self.serving.ask("GET", path).status == 200
            self.over.wait(0.02)

    def listens(self, dice: random.Random) -> None:
        with socket.create_connection(("127.0.0.1", self.serving.port), PATIENCE) as sock:
            sock.sendall(b"GET /models/sse HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
            self.over.wait(dice.random())

    def sends_much(self, dice: random.Random) -> None:
        text = json.dumps({"content": "it was " * dice.randint(10_000, 100_000), "model": "small"})
        assert self.serving.ask("POST", "/tokenize", text.encode()).status == 200

    def other_engine(self, dice: random.Random) -> None:
        """Now and then the other engine of the host is wanted: everybody else queues, and nobody is cut."""
        reply = self.serving.ask("POST", "/v1/chat/completions", chat("large"))
        assert reply.status == 200 and reply.json()["usage"]["completion_tokens"] == 8, (reply.status, reply.body)
        self.over.wait(5 + 10 * dice.random())


class Size:
    """What a process has of threads, descriptors and memory (MiB)."""

    def __init__(self, pid: int) -> None:
        folder = Path(f"/proc/{pid}")
        self.threads, self.files = len(list((folder / "task").iterdir())), len(list((folder / "fd").iterdir()))
        anonymous = re.search(r"RssAnon:\s+(\d+) kB", (folder / "status").read_text())
        self.memory = int(anonymous.group(1)) / 1024 if anonymous else 0.0

    def __repr__(self) -> str:
        return f"{self.threads} threads, {self.files} descriptors, {self.memory:.1f} MiB"


def settled(serving: Serving) -> Size:
    """Once nobody is connected any more. Threads that served wait a minute for the next connection; engines' connections are
    kept for seconds, and let go at the next request."""
    pid = serving.process.pid
    eventually(lambda: not re.search(r"llmguard_requests_in_flight\{[^}]*\} [1-9]", serving.ask("GET", "/metrics").body.decode()))
    time.sleep(4.5)  # Pool.IDLE, and a bit
    assert serving.ask("POST", "/tokenize", {"model": "small", "content": "it was"}).status == 200
    eventually(lambda: Size(pid).files == min(Size(pid).files for _ in range(20)), "connections are closed")
    return Size(pid)


def test_mixed_traffic_loses_nothing_and_leaves_nothing_behind(serve, llama_server, models, capsys):
    def engine(name: str) -> dict:
        command = llama_command(llama_server, models["small"], "-np", "8", "-c", "8192")
        return {"command": command, "port": free_port(), "models": [name]}

    proxy = {"idle_stop": "never", "max_body": "2MiB", "stream_keepalive": "1s"}
    serving = serve({"proxy": proxy, "hosts": {"here": {"engines": {"one": engine("small"), "two": engine("large")}}}})
    with Traffic(serving, 1) as traffic:
        traffic.over.wait(WARM_UP)
    assert not traffic.wrong, traffic.wrong
    before = settled(serving)
    with Traffic(serving, 2) as traffic:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and not traffic.wrong:
            traffic.over.wait(min(5.0, SECONDS / 4))
            serving.signal(signal.SIGHUP)  # a reload in the midst of it
    assert not traffic.wrong, traffic.wrong
    after = settled(serving)
    with capsys.disabled():
        print(f"\n{sum(traffic.done.values())} in {SECONDS:.0f} s: {dict(traffic.done)}\nbefore: {before}\nafter:  {after}")
    assert len(traffic.done) == 10, traffic.done
    assert max(before.threads, after.threads) < llmguard.Crew.KEPT + 16 and after.files <= before.files + 2, (before, after)
    assert after.memory < before.memory + 8, (before, after)
    log = serving.log()
    assert "Traceback" not in log and "internal error" not in log
    assert serving.ask("GET", "/status").json()["requests"] == []
    assert ask(serving.url + "/health").status == 200

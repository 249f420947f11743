"""Boxes that lose their power, their network, or sleep, behind a proxy that goes on."""

import http.client
import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lab import wait_for

LLMGUARD = Path(__file__).resolve().parents[2] / "llmguard.py"
INSTALLED = ".local/share/llmguard/llmguard.py"
OTHER = "llm-engine-other"
QUICKLY = 30  # seconds: a login that hangs over a dead connection, and one more that gets no answer


class Reader(threading.Thread):
    """Reads a stream in flight to its end. `ended`: "whole", "broken", or None so far."""

    def __init__(self, serving, model, tokens):
        super().__init__(daemon=True)
        body = {"model": model, "prompt": "the", "max_tokens": tokens, "stream": True}
        self.stream, self.ended = serving.stream("/v1/completions", body), None
        wait_for("the first token", lambda: b"data: " in self.stream.first())
        self.start()

    def run(self):
        try:
            self.ended = "whole" if self.stream.whole().endswith(b"data: [DONE]\n\n") else "broken"
        except (http.client.IncompleteRead, ConnectionError):
            self.ended = "broken"


def complete(serving, model):
    return serving.ask("POST", "/v1/completions", {"model": model, "prompt": "the", "max_tokens": 4})


def test_a_box_without_power_and_one_behind_a_cut_link_are_down_and_are_used_again_when_they_are_back(operator, ready, b3090):
    """Nothing tells of either: no RST, no error, no packet. a9's cable is pulled, b3090 loses its power."""
    b3090.write(INSTALLED, LLMGUARD.read_text())
    serving = operator.serve(ready, b3090)
    cut_off, switched_off = Reader(serving, "a9-deep", 500), Reader(serving, "b3090-deep", 8000)
    ready.cut()
    b3090.kill()
    begun = time.monotonic()
    try:
        for box in (ready, b3090):
            reply = complete(serving, box.name + "-small")
            assert reply.status == 502 and reply.error["type"] in ("host_down", "engine_lost")
        for box in (ready, b3090):
            wait_for(box.name + " to be called down", lambda: serving.host(box.name)["state"] == "down", QUICKLY)
            assert serving.host(box.name)["down_since"] and serving.host(box.name)["engine"] is None
        assert "stopping engine" not in serving.log()
        if os.environ.get("LLMGUARD_LONG") == "1":  # a minute without a packet
            time.sleep(max(0.0, begun + 60 - time.monotonic()))
    finally:
        ready.heal()
        b3090.boot()
    # Over new connections: those that ssh kept open are dead.
    wait_for("a9 to be up again", lambda: serving.host("a9")["state"] == "ready", QUICKLY)
    wait_for("b3090 to be up again", lambda: serving.host("b3090")["state"] == "off", QUICKLY)
    assert serving.host("a9")["engine"] == "mainline"
    for name in ("a9", "b3090"):
        assert serving.log().count("host %s: down" % name) == 1 and serving.log().count("host %s: up again" % name) == 1
    wait_for("the end of the broken stream", lambda: switched_off.ended, QUICKLY)
    assert switched_off.ended == "broken"
    assert complete(serving, "b3090-small").status == 200
    wait_for("the end of the other stream", lambda: cut_off.ended, 90)
    assert cut_off.ended == "whole"
    assert complete(serving, "a9-small").status == 200
    assert [serving.host(name)["in_flight"] for name in ("a9", "b3090")] == [0, 0]


def test_a_connection_that_was_kept_open_to_a_box_that_was_started_again_is_replaced(operator, ready):
    """It leads nowhere, and its control socket is still there."""

    def master():
        (path,) = Path(operator.runtime).glob("llmguard-ssh/*")
        done = subprocess.run(["ssh", "-O", "check", "-S", str(path), "a9"], capture_output=True, text=True, timeout=10)
        return done.stderr

    assert operator.run("engine", "status", "a9", box=ready).returncode == 0
    before = master()
    ready.kill()
    ready.boot()
    begun = time.monotonic()
    assert operator.run("engine", "status", "a9", box=ready).returncode == 0
    assert time.monotonic() - begun < QUICKLY
    assert "Master running" in before and "Master running" in master() and master() != before


def test_a_box_that_sleeps_is_woken_once_by_who_asks_for_its_model_and_then_serves_him(operator, ready, tmp_path):
    ready.shut_down()
    awake = threading.Thread(target=ready.boot)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wakes:
            wakes.bind(("127.0.0.1", 0))
            wakes.settimeout(60)
            operator.env["WAKES_PORT"] = str(wakes.getsockname()[1])
            python = tmp_path / "python"
            python.write_text('#!/bin/sh\nexec %s %s "$@"\n' % (sys.executable, Path(__file__).with_name("noting_wakes.py")))
            python.chmod(0o755)
            hosts = {"a9": operator.host(ready, mac=ready.mac)}
            serving = operator.serve(hosts=hosts, python=str(python))
            wait_for("the first look", lambda: serving.host("a9")["state"] == "down")
            assert not select.select([wakes], [], [], 0)[0]  # nobody asked for it so far
            replies = []
            asking = threading.Thread(target=lambda: replies.append(complete(serving, "a9-small")), daemon=True)
            asking.start()
            assert wakes.recv(1024) == b"\xff" * 6 + bytes.fromhex(ready.mac.replace(":", "")) * 16
            assert not replies
            awake.start()
            asking.join(60)
            assert replies[0].status == 200 and ready.unit_pids(OTHER)
            assert not select.select([wakes], [], [], 0)[0]
    finally:
        if awake.ident is None:
            awake.start()
        awake.join()

"""Clients that mean harm: slow ones by the hundred, floods. Good clients are served all the while."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import threading

import pytest
from parts import PATIENCE, Upstream, ask, echo, eventually, missing, url_config

from llmguard import Crew

BODY = json.dumps({"model": "small", "messages": []}).encode()
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
CONNECTIONS = 40  # of max_connections; there are several times as many attackers


@pytest.fixture
def upstream():
    made = Upstream(echo)
    yield made
    made.close()


@pytest.fixture
def serving(serve, upstream):
    return serve(url_config(upstream.port, max_connections=CONNECTIONS))


def good_client(serving) -> int:
    """A request as any client makes it, on a connection of its own -> its status."""
    return ask(serving.url + "/v1/chat/completions", "POST", BODY).status


def summary(output: str) -> dict[str, str]:
    """slowhttptest's last report: {"pending", "connected", "error", "closed", "service available"}."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    return dict(re.findall(r"(?m)^(pending|connected|error|closed|service available):\s+(\S+)", plain))


MODES = {
    "slow headers": ["-H", "-i", "2", "-x", "24"],
    "slow bodies": ["-B", "-i", "2", "-s", "8192", "-x", "10"],
    "ranges": ["-R", "-a", "10", "-b", "3000"],
    "slow reading": ["-X", "-w", "1", "-y", "8", "-n", "2", "-z", "4", "-k", "3"],
}


@pytest.mark.parametrize("mode", MODES)
def test_slowhttptest_keeps_nobody_from_being_served(serving, mode, capsys):
    tool = shutil.which("slowhttptest")
    if not tool:
        missing("no slowhttptest: apt-get install slowhttptest")
    url = serving.url + ("/v1/chat/completions" if mode == "slow bodies" else "/status")
    options = [*MODES[mode], "-c", str(CONNECTIONS * 4), "-r", "100", "-l", "8", "-p", "3", "-u", url]
    attack = subprocess.Popen([tool, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    served = 0
    try:
        while attack.poll() is None:
            assert good_client(serving) == 200
            served += 1
    finally:
        attack.kill()
    seen = summary(attack.stdout.read())
    with capsys.disabled():
        print(f"\n{mode}: {seen}; {served} requests of a good client, all of them answered")
    assert seen["service available"] == "YES"
    assert served > 10 and good_client(serving) == 200
    assert "Traceback" not in serving.log()


def test_a_flood_of_connections_that_ask_nothing_leaves_a_good_client_served(serving):
    with contextlib.ExitStack() as open_sockets:
        for _ in range(CONNECTIONS * 5):
            open_sockets.enter_context(socket.create_connection(("127.0.0.1", serving.port), PATIENCE))
        for _ in range(10):
            assert good_client(serving) == 200
        assert threads(serving) < CONNECTIONS + Crew.KEPT + 16


def test_a_flood_of_requests_that_never_end_leaves_a_good_client_served_and_a_slow_upload_alive(serving, upstream):
    with contextlib.ExitStack() as open_sockets:
        upload = open_sockets.enter_context(socket.create_connection(("127.0.0.1", serving.port), PATIENCE))
        body = json.dumps({"model": "small", "content": "x" * 4_000_000}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        upload.sendall(head + body[:-1000])
        eventually(lambda: unread(serving.port, upload) == 0, "what it has sent is read")
        for _ in range(CONNECTIONS * 5):
            half = open_sockets.enter_context(socket.create_connection(("127.0.0.1", serving.port), PATIENCE))
            half.sendall(REQUEST[:-20])
        for _ in range(10):
            assert good_client(serving) == 200
        upload.sendall(body[-1000:])  # it was slow, but has sent more than those who began after it
        assert upload.recv(4096).startswith(b"HTTP/1.1 200")


def test_where_all_are_at_work_a_flood_is_refused_and_nobody_who_works_is_cut(serve):
    go = threading.Event()

    def waits(request: bytes, sock: socket.socket) -> bool:
        assert go.wait(PATIENCE)
        return echo(request, sock)

    upstream = Upstream(waits)
    serving = serve(url_config(upstream.port, max_connections=3))
    eventually(lambda: not connections(serving.port), "whoever asked whether it listens is gone")
    with contextlib.ExitStack() as open_sockets:
        busy = [open_sockets.enter_context(socket.create_connection(("127.0.0.1", serving.port), PATIENCE)) for _ in range(3)]
        for sock in busy:
            sock.sendall(REQUEST)
        eventually(lambda: len(upstream.requests) == 3, "all are at work")
        for _ in range(50):
            refused = open_sockets.enter_context(socket.create_connection(("127.0.0.1", serving.port), PATIENCE))
            assert refused.recv(4096).startswith(b"HTTP/1.1 503")
        go.set()
        assert all(sock.recv(4096).startswith(b"HTTP/1.1 200") for sock in busy)
    upstream.close()


def test_wrong_keys_at_full_speed_are_all_refused_and_the_right_one_is_served_among_them(serve, upstream):
    serving = serve(url_config(upstream.port, api_keys=["the-right-one"]))
    over, seen = threading.Event(), set()

    def guess(number: int) -> None:
        while not over.is_set():
            headers = {"Authorization": f"Bearer the wrong one {number}"}
            seen.add(ask(serving.url + "/v1/chat/completions", "POST", BODY, headers).status)

    crowd = [threading.Thread(target=guess, args=(number,)) for number in range(8)]
    for thread in crowd:
        thread.start()
    for _ in range(50):
        reply = ask(serving.url + "/v1/chat/completions", "POST", BODY, {"Authorization": "Bearer the-right-one"})
        assert reply.status == 200
    over.set()
    for thread in crowd:
        thread.join(PATIENCE)
    assert seen == {401} and all(b"wrong" not in request for request in upstream.requests)
    assert len(serving.log()) < 20_000, "a guess is not worth a line of the log each"


def connections(port: int) -> list[list[str]]:
    """The rows of /proc/net/tcp of those that are established with a server at a port: first its own, then its clients'."""
    with open("/proc/net/tcp") as file:
        rows = [row for row in map(str.split, file) if row[3] == "01"]
    return [row for end in (1, 2) for row in rows if row[end].endswith(f":{port:04X}")]


def unread(port: int, client: socket.socket) -> int:
    """Bytes from a client that the server at a port has not read yet: in its own queue, and in the client's."""
    mine = f":{client.getsockname()[1]:04X}"
    here, there = [row[4].split(":") for row in connections(port) if row[1].endswith(mine) or row[2].endswith(mine)]
    return int(here[1], 16) + int(there[0], 16)


def threads(serving) -> int:
    with open(f"/proc/{serving.process.pid}/status") as file:
        return int(re.search(r"Threads:\s+(\d+)", file.read()).group(1))

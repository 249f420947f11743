"""What goes wrong around the proxy: descriptors that run out, clients that wait or read nothing, engines, ssh and agents that
misbehave, disks that are full, clocks that jump. Whatever it is, others are served, and all is well again once it is over."""

from __future__ import annotations

import contextlib
import errno
import http.client
import itertools
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from parts import LLMGUARD, PATIENCE, FakeClock, ask, echo, eventually, free_port, raw, replies, url_config
from test_agent import agent_process, alive, folder, sleeper  # noqa: F401
from test_follow import hurried, waits  # noqa: F401
from test_forward import (  # noqa: F401
    CHAT, EVENTS, KEEPALIVE, OK, PLAIN_CHUNKS, STREAM,
    Client, chunk, dechunked, engine, front, gated, get, gone, post, says, shape,
)
from test_host import Bench
from test_release import lane, lines, waited_for  # noqa: F401

import llmguard
from llmguard import Address, AgentError, EngineApi, HostBlocked, HostConfig, HostDown, Remote, StateFile

MIB = 1 << 20
GIB = 1 << 30

# ----- what a process takes


def descriptors(pid: int) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{pid}/fd")}


def settled(serving) -> set[int]:
    """A proxy's descriptors, once none is opened or closed any more."""
    seen: list[set[int]] = []

    def same() -> bool:
        time.sleep(0.05)
        seen.append(descriptors(serving.process.pid))
        return len(seen) > 6 and seen[-6:] == [seen[-1]] * 6

    eventually(same, "nothing is opened or closed")
    return seen[-1]


def spare(serving, count: int | None) -> None:
    """Let a proxy open that many descriptors more, or with None as many as it wants."""
    pid = serving.process.pid
    soft = hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    if count is not None:
        taken = settled(serving)
        free = (number for number in itertools.count() if number not in taken)
        soft = next(itertools.islice(free, count, None))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def memory(pid: int) -> int:
    return llmguard.Box().memory(pid).rss


def cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(autouse=True)
def sound(monkeypatch):
    """No fault of any of these makes an error of our own, and no thread dies of it."""
    real, died = llmguard.Log.__call__, []

    def call(log, text: str, priority: int = llmguard.INFO) -> None:
        real(log, text, priority)
        if "internal error" in text or "Traceback" in text:
            died.append(text)

    monkeypatch.setattr(llmguard.Log, "__call__", call)
    monkeypatch.setattr(threading, "excepthook", lambda args: died.append(repr(args.exc_value)))
    monkeypatch.setattr(sys, "unraisablehook", lambda args: "thread" in str(args.err_msg) and died.append(repr(args.exc_value)))
    yield
    assert died == []


@pytest.fixture
def real(serve):
    """start(config, …) -> a real proxy, whose log has no error of our own and no traceback in the end."""
    started = []

    def start(config: dict, **more):
        started.append(serve(config, **more))
        eventually(lambda: started[-1].host()["last_tick"], "the first look")
        settled(started[-1])  # what is opened from now on has the lowest numbers, and is below any limit
        return started[-1]

    yield start
    for serving in started:
        assert not re.search("internal error|Traceback|Exception", serving.log()), serving.log()


# ----- 1: no descriptor is left


def test_without_descriptors_nobody_is_taken_a_stream_goes_on_and_who_waited_is_served(real, engine):
    answer, tell = gated(EVENTS + chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n") + b"0\r\n\r\n")
    serving = real(url_config(engine(answer).port, tick="1h"))
    pid = serving.process.pid
    with Client(serving, post(STREAM)) as stream:
        stream.until(b"data: 1\n\n")
        spare(serving, 0)
        with Client(serving, get("/health")) as waiting:
            eventually(lambda: "no more connections can be taken: Too many open files" in serving.log(), "it says so")
            before = cpu_seconds(pid)
            assert not select.select([waiting.sock], [], [], 1.0)[0], "he waits"
            assert cpu_seconds(pid) - before < 0.5, "and it does not spin meanwhile"
            tell()
            assert dechunked(stream.rest()) == (b"data: 1\n\ndata: 2\n\n", True)
            assert replies(waiting.rest())[0].status == 200
    assert serving.log().count("no more connections can be taken") == 1 and serving.process.poll() is None


def test_idle_connections_that_hold_the_last_descriptors_make_room(real, engine):
    serving = real(url_config(engine(echo).port, tick="1h"))
    spare(serving, 20)
    idle = [socket.create_connection(("127.0.0.1", serving.port), PATIENCE) for _ in range(40)]
    eventually(lambda: serving.ask("POST", "/v1/chat/completions", CHAT).status == 200, "a good client is served")
    assert idle[0].recv(1) == b"", "the one that was idle for longest is hung up on"
    for sock in idle:
        sock.close()


LARGE = b'{"model":"small","x":"' + b"x" * (llmguard.IN_MEMORY + MIB) + b'"}'


@pytest.mark.parametrize(
    "request_", [post(CHAT), get("/models/sse"), post(LARGE)], ids=["an engine", "events", "a large body"]
)
def test_a_request_that_takes_a_descriptor_too_many_is_503_and_the_next_one_is_served(real, engine, request_):
    upstream = engine(echo)
    serving = real(url_config(upstream.port, tick="1h"))
    if LARGE in request_:
        raw(serving.port, request_)  # where temp files may lie is found out by the first one
    before = len(upstream.requests)
    with Client(serving, get("/health", close=False)) as client:
        client.until(b"ok")
        client.received.clear()
        spare(serving, 0)
        client.sock.sendall(request_)
        (reply,) = replies(client.rest())
    assert (reply.status, reply.error["type"], reply.headers["connection"]) == (503, "unavailable_error", "close")
    assert "too many connections are open" in reply.error["message"] and len(upstream.requests) == before
    assert "a request cannot be served: Too many open files" in serving.log()
    spare(serving, None)
    assert serving.ask("POST", "/v1/chat/completions", CHAT).status == 200
    eventually(lambda: serving.host()["in_flight"] == 0 and serving.status()["requests"] == [], "nothing is left of them")


def one_command(**proxy) -> dict:
    """One engine of our own, which serves files."""
    command = [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]
    return {"proxy": proxy, "hosts": {"here": {"engines": {"e": {"command": command, "port": free_port(), "models": ["small"]}}}}}


def test_an_agent_that_cannot_be_started_is_told_to_who_asks_and_the_next_one_is_served(real):
    serving = real(one_command(tick="1h"))
    with Client(serving, get("/health", close=False)) as client:
        client.until(b"ok")
        client.received.clear()
        spare(serving, 0)
        client.sock.sendall(post(CHAT))
        (reply,) = replies(client.rest())
    assert (reply.status, reply.error["type"]) == (502, "host_down")
    assert reply.error["message"].endswith("host here cannot be used, see /status: the agent cannot be run: Too many open files")
    spare(serving, None)
    assert serving.ask("GET", "/upstream/small/").status == 200
    eventually(lambda: serving.host()["state"] == "ready", "it runs")
    assert serving.host()["failures"] == {}


def test_an_engine_outlives_looks_that_no_descriptor_was_left_for_and_is_still_ours(real):
    serving = real(one_command(tick="200ms", idle_stop="never"))
    assert serving.ask("GET", "/upstream/small/").status == 200
    pid = serving.engine_pid("e")
    soft, hard = resource.prlimit(serving.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(serving.process.pid, resource.RLIMIT_NOFILE, (8, hard))
    eventually(lambda: "host here: blocked: the agent cannot be run: Too many open files" in serving.log(), "it says so")
    resource.prlimit(serving.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
    eventually(lambda: "host here: up again" in serving.log(), "and when it is over")
    assert serving.ask("GET", "/upstream/small/").status == 200
    assert serving.engine_pid("e") == pid and alive(pid) and serving.switches() == ["e"]
    assert serving.log().count("the agent cannot be run") == 1
    assert serving.ask("POST", "/models/unload", {"model": "small"}).status == 200
    eventually(lambda: not alive(pid), "it is stopped like one of its own")


def test_a_follow_line_that_cannot_be_opened_is_opened_once_there_are_descriptors(hurried):
    start, queue = hurried
    serving, pid = start(str(queue.path))
    box = llmguard.Box()
    ours = lambda process: process.parent == serving.process.pid and "--follow" in box.argv(process.pid)
    (follower,) = eventually(lambda: [process for process in box.living() if ours(process)], "the line")
    spare(serving, 0)
    os.kill(follower.pid, signal.SIGKILL)
    eventually(lambda: "the line to its agent cannot be opened: Too many open files" in serving.log(), "it says so")
    spare(serving, None)
    waits(queue, pid)
    eventually(lambda: serving.host()["state"] == "handover", serving.log())
    assert "internal error" not in serving.log() and "Traceback" not in serving.log()


def test_a_reload_and_an_end_need_no_descriptor(real, engine):
    answer, tell = gated(EVENTS + chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n") + b"0\r\n\r\n")
    serving = real(url_config(engine(answer).port, tick="1h"))
    with Client(serving, post(STREAM)) as stream:
        stream.until(b"data: 1\n\n")
        spare(serving, 0)
        serving.signal(signal.SIGHUP)
        eventually(lambda: re.search("not reloaded, the old one stays: .*Too many open files", serving.log()), "it says so")
        serving.signal(signal.SIGTERM)
        eventually(lambda: "stopping" in serving.log(), "it drains")
        tell()
        assert dechunked(stream.rest()) == (b"data: 1\n\ndata: 2\n\n", True)
    assert serving.process.wait(PATIENCE) == 0


def limited(folder: Path, soft: int, hard: int) -> str:
    """A Python that may open so many."""
    script = folder / "limited"
    script.write_text(f'#!/bin/sh\nulimit -Sn {soft}; ulimit -Hn {hard}; exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_as_many_descriptors_are_allowed_as_max_connections_may_take_or_a_warning_is_given(real, engine, tmp_path):
    config = url_config(engine(echo).port, max_connections=500)
    serving = real(config, python=limited(tmp_path, 64, 2000))
    assert resource.prlimit(serving.process.pid, resource.RLIMIT_NOFILE) == (1256, 2000) and "warning" not in serving.log()
    serving = real(config, python=limited(tmp_path, 64, 128))
    assert resource.prlimit(serving.process.pid, resource.RLIMIT_NOFILE) == (128, 128)
    assert "max_connections: 500 may take 1256 descriptors, and only 128 are allowed" in serving.log()


@pytest.mark.parametrize("count", range(5, 10))
def test_an_agent_without_descriptors_starts_an_engine_whole_or_not_at_all(folder, count):
    engines = {"e": {"command": ["sleep", f"600.{os.getpid()}{count}"], "port": free_port()}}
    request = json.dumps({"op": "start", "host": "here", "engines": engines, "engine": "e"}).encode()
    few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))
    done = agent_process(folder, request, preexec_fn=few)
    banner, line = done.stdout.decode().splitlines()
    reply, box = json.loads(line), llmguard.Box()
    running = [process.pid for process in box.living() if box.argv(process.pid) == engines["e"]["command"]]
    if reply["ok"]:
        assert running == [json.loads(Path(folder, "engines", "here.e.json").read_text())["pid"]]
    else:
        assert reply["error"]["type"] == "AgentError" and "Too many open files" in reply["error"]["text"]
        assert running == [] and not Path(folder, "engines", "here.e.json").exists()


# ----- 2: a thousand who ask for nothing


@pytest.fixture
def plenty():
    """As many descriptors for this process as it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def still_open(sock: socket.socket) -> bool:
    try:
        sock.recv(1, socket.MSG_PEEK)  # an end, or a word of refusal
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


def test_of_a_thousand_idle_connections_as_many_stay_as_may_and_good_clients_are_served(real, engine, plenty):
    answer, tell = gated(EVENTS + chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n") + b"0\r\n\r\n")
    upstream = engine(lambda request, sock: answer(request, sock) if b'"stream": true' in request else echo(request, sock))
    serving = real(url_config(upstream.port, tick="1h", max_connections=100))
    pid = serving.process.pid
    assert serving.ask("POST", "/v1/chat/completions", CHAT).status == 200
    before = memory(pid)
    with Client(serving, post(STREAM)) as stream, contextlib.ExitStack() as all_of_them:
        stream.until(b"data: 1\n\n")
        idle = [all_of_them.enter_context(socket.create_connection(("127.0.0.1", serving.port), PATIENCE)) for _ in range(1000)]
        for sock in idle:
            sock.setblocking(False)
        eventually(lambda: sum(map(still_open, idle)) <= 99, "the others are hung up on")
        for _ in range(5):
            assert serving.ask("POST", "/v1/chat/completions", CHAT).status == 200
        assert len(descriptors(pid)) < 150 and threads(pid) < 500 and memory(pid) - before < 64 * MIB
        assert 80 < sum(map(still_open, idle)), "no more of them than must"
        tell()
        assert dechunked(stream.rest()) == (b"data: 1\n\ndata: 2\n\n", True)


# ----- 3: clients that read nothing


def gigabyte(sent: list[int]):
    """An engine's answer of a gigabyte; `sent` has how much of each has been taken."""
    piece = bytes(MIB)

    def answer(request: bytes, sock: socket.socket) -> bool:
        mine = len(sent)
        sent.append(0)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % GIB)
        while sent[mine] < GIB:
            sent[mine] += sock.send(piece[: GIB - sent[mine]])
        return True

    return answer


def stands_still(count) -> bool:
    before = count()
    time.sleep(0.2)
    return count() == before


def test_clients_that_read_nothing_fill_no_memory_and_let_the_engine_go_when_they_leave(real, engine):
    sent: list[int] = []
    offer = gigabyte(sent)
    freed = threading.Semaphore(0)

    def answer(request: bytes, sock: socket.socket) -> bool:
        if b"gigabyte" not in request:
            return echo(request, sock)
        try:
            return offer(request, sock)
        except OSError:
            freed.release()
            return False

    serving = real(url_config(engine(answer).port, tick="1h"))
    assert serving.ask("POST", "/v1/chat/completions", CHAT).status == 200
    before = memory(serving.process.pid)
    clients = [Client(serving, post({"model": "small", "x": "gigabyte"})) for _ in range(8)]
    eventually(lambda: len(sent) == 8 and all(sent) and stands_still(lambda: sum(sent)), "all that the kernel keeps is sent")
    assert serving.ask("POST", "/v1/chat/completions", CHAT).status == 200
    assert memory(serving.process.pid) - before < 32 * MIB and max(sent) < GIB // 4
    for client in clients:
        client.sock.close()
    for _ in clients:
        assert freed.acquire(timeout=PATIENCE)
    eventually(lambda: serving.host()["in_flight"] == 0, "nothing is left of them")


def test_a_client_that_reads_nothing_for_too_long_is_given_up_and_its_engine_is_let_go(front, monkeypatch):
    monkeypatch.setattr(llmguard, "STALL", 0.1)
    freed = threading.Event()

    def answer(request: bytes, sock: socket.socket) -> bool:
        sock.sendall(EVENTS)
        with contextlib.suppress(OSError):
            while True:
                sock.sendall(chunk(b"data: more\n\n" * 1000))
        freed.set()
        return False

    proxy, _ = front(answer)
    with Client(proxy, post(STREAM)):
        assert freed.wait(PATIENCE)
        eventually(lambda: not proxy.counters.running and not proxy._connections, "nothing is left of him")


def test_a_listener_of_events_that_reads_nothing_is_dropped_and_holds_nobody_up(inside, engine):
    proxy = inside(url_config(engine(echo).port))
    with Client(proxy, get("/models/sse")) as deaf, Client(proxy, get("/models/sse")) as other:
        for client in (deaf, other):
            client.until(b": llmguard\n\n")
        heard = 0

        def both() -> bool:
            nonlocal heard
            heard += 1
            proxy.events.publish({"event": "owner", "data": {"host": "here", "n": heard, "x": "x" * 50_000}})
            other.until(b'"n": %d,' % heard)
            other.received.clear()
            return len(proxy.events._listeners) == 1

        eventually(both, "the deaf one is dropped")


# ----- 4: engines


def test_a_gigabyte_passes_in_bounded_memory(real, engine):
    sent: list[int] = []
    serving = real(url_config(engine(gigabyte(sent)).port, tick="1h"))
    before = memory(serving.process.pid)
    peak, space = 0, bytearray(4 * MIB)
    with Client(serving, post(CHAT)) as client:
        head, _, body = client.until(b"\r\n\r\n").partition(b"\r\n\r\n")
        got = len(body)
        while count := client.sock.recv_into(space):
            if got % (64 * MIB) > (got + count) % (64 * MIB):
                peak = max(peak, memory(serving.process.pid))
            got += count
    assert got == GIB and before < peak + MIB and peak - before < 32 * MIB


def endless(*parts: bytes):
    """An engine's answer that goes on with its last part until nobody takes it any more."""

    def answer(request: bytes, sock: socket.socket) -> bool:
        with contextlib.suppress(OSError):
            for part in itertools.chain(parts, itertools.repeat(parts[-1] * 1000)):
                sock.sendall(part)
        answer.over.release()
        return False

    answer.over = threading.Semaphore(0)
    return answer


ENDLESS = {
    "a field": (b"HTTP/1.1 200 OK\r\nA: ", b"x"),
    "fields": (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"),
    "a status line": (b"HTTP/1.1 200 ", b"O"),
    "nonsense": (b"\x00",),
    "empty lines": (b"\r\n",),
    "100 Continue": (b"HTTP/1.1 100 Continue\r\n\r\n",),
    "103 Early Hints": (b"HTTP/1.1 103 Early Hints\r\nLink: </s.css>; rel=preload\r\n\r\n",),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("parts", ENDLESS.values(), ids=ENDLESS)
def test_a_head_that_never_ends_is_502_and_its_engine_is_let_go(front, parts, stream):
    answer = endless(*parts)
    proxy, upstream = front(answer)
    reply = replies(raw(proxy.port, post(STREAM if stream else CHAT)))[0]
    assert (reply.status, reply.error["type"]) == (502, "engine_lost")
    assert answer.over.acquire(timeout=PATIENCE) and len(upstream.requests) == 1


@pytest.mark.parametrize("interim", [b"100 Continue", b"102 Processing", b"103 Early Hints\r\nLink: </s.css>"])
def test_many_interim_answers_are_skipped_and_counted_anew_for_each_request(front, interim):
    many = b"HTTP/1.1 %b\r\n\r\n" % interim * 400
    proxy, upstream = front(says(many + OK, keep=True))
    for _ in range(5):
        assert [reply.body for reply in replies(raw(proxy.port, post(CHAT)))] == [b"ok"]
    assert len(set(upstream.on)) == 1 and 5 * len(many) > 2 * llmguard.MAX_HEAD / 3


def silent_after(*parts: bytes):
    """(an engine's answer that begins so and goes no further, an event: its connection was closed)."""
    closed = threading.Event()

    def answer(request: bytes, sock: socket.socket) -> bool:
        for part in parts:
            sock.sendall(part)
        answer.begun.set()
        if gone(sock):
            closed.set()
        return False

    answer.begun = threading.Event()
    return answer, closed


HALVES = {
    "no byte": b"",
    "half a status line": b"HTTP/1.1 2",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "a head without its empty line": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n",
    "an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n",
    "an interim answer and a half": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 20",
    "a head": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n",
    "half a body": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no",
    "half a chunk": PLAIN_CHUNKS + b"5\r\nab",
    "half of a body until close": b"HTTP/1.1 200 OK\r\n\r\nab",
}


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
def test_an_engine_that_goes_silent_anywhere_is_let_go_when_the_client_leaves(front, half):
    answer, closed = silent_after(half)
    proxy, upstream = front(answer)
    with Client(proxy, post(CHAT)) as client:
        assert answer.begun.wait(PATIENCE) and not closed.is_set()
        client.sock.close()
        assert closed.wait(PATIENCE)
    eventually(lambda: not proxy._connections and not proxy.counters.running, "nothing is left of him")
    assert len(upstream.requests) == 1


@pytest.mark.parametrize("half", ["", "half a status line", "half a head", "an interim answer", "an interim answer and a half"])
def test_a_stream_whose_head_comes_in_two_halves_is_kept_alive_between_them_and_whole(front, half):
    whole = EVENTS + chunk(b"data: 1\n\n") + b"0\r\n\r\n"
    begun = {"half a head": EVENTS[:40], "half a status line": EVENTS[:10]}.get(half, HALVES.get(half, b""))
    rest = whole[len(begun) :] if whole.startswith(begun) else whole
    rest = whole[len(b"HTTP/1.1 20") :] if half.endswith("and a half") else rest
    answer, tell = gated(begun, rest)
    proxy, upstream = front(answer, stream_keepalive="20ms")
    with Client(proxy, post(STREAM)) as client:
        client.until(KEEPALIVE + b"\r\nd\r\n" + KEEPALIVE)
        tell()
        payload, clean = dechunked(client.rest())
    assert clean and payload.replace(KEEPALIVE, b"") == b"data: 1\n\n" and len(upstream.requests) == 1


def test_an_engine_that_has_begun_and_dies_in_its_silence_is_not_asked_again_over_another_connection(front):
    """The interim answer is long past when the end comes, and the connection was a kept one."""
    begun, tell = gated(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    either = lambda request, sock: (begun if b"stream" in request else echo)(request, sock)
    proxy, upstream = front(either, stream_keepalive="20ms")
    assert replies(raw(proxy.port, post(CHAT)))[0].status == 200
    with Client(proxy, post(STREAM)) as client:
        client.until(KEEPALIVE)
        tell()
        payload, clean = dechunked(client.rest())
    assert clean and shape("", payload)["error"]["type"] == "engine_lost"
    assert upstream.on[0] == upstream.on[1] and len(upstream.requests) == 2


WRONG = {  # all of them begin with "ab"
    "a length of 10^17": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999\r\n\r\nab",
    "a chunk of 2^60": PLAIN_CHUNKS + b"fffffffffffffff\r\nab",
    "a negative chunk": PLAIN_CHUNKS + chunk(b"ab") + b"-1\r\nx\r\n",
    "a chunk too long": PLAIN_CHUNKS + b"2\r\nabc\r\n0\r\n\r\n",
    "a chunk without its end": PLAIN_CHUNKS + b"2\r\nab" + b"0\r\n\r\n",
    "a bad trailer": PLAIN_CHUNKS + chunk(b"ab") + b"0\r\nA b\r\n\r\n",
    "zeros": PLAIN_CHUNKS + chunk(b"ab") + b"0" * 5000,
}


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG)
def test_a_length_that_is_wrong_gets_no_clean_end_and_the_next_request_its_own_answer(front, answer):
    bad = says(answer)
    proxy, upstream = front(lambda request, sock: (bad if b"bad" in request else echo)(request, sock))
    data = raw(proxy.port, post({"model": "small", "x": "bad"}))
    if data.startswith(b"HTTP/1.1 502 "):  # nothing had gone out yet
        assert replies(data)[0].error["type"] == "engine_lost"
    elif b"chunked" in data.partition(b"\r\n\r\n")[0]:
        assert dechunked(data) in [(b"ab", False), (b"", False)]
    else:
        with pytest.raises(http.client.IncompleteRead) as cut:
            replies(data)
        assert cut.value.partial == b"ab"
    assert b"POST" in replies(raw(proxy.port, post(CHAT)))[0].body
    assert len(upstream.requests) == 2 and len(set(upstream.on)) == 2


@pytest.mark.parametrize("said", [OK, b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\n\r\n", b"HTTP/1.1 1", b"\x00"])
def test_what_comes_on_a_kept_connection_before_a_request_is_nobodys_answer(front, said):
    kept: list[socket.socket] = []

    def answer(request: bytes, sock: socket.socket) -> bool:
        kept.append(sock)
        return echo(request, sock)

    proxy, upstream = front(answer)
    assert replies(raw(proxy.port, post({"model": "small", "n": 0})))[0].status == 200
    (wire,) = proxy.hosts["here"].api("e0").pool._idle
    kept[0].sendall(said)
    eventually(lambda: not wire.fresh(), "it has come")
    reply = replies(raw(proxy.port, post({"model": "small", "n": 1})))[0]
    assert reply.status == 200 and b'"n": 1' in reply.body
    assert upstream.on[0] != upstream.on[1] and len(upstream.requests) == 2
    eventually(lambda: wire.sock.fileno() == -1, "and it is closed")


def test_an_engine_that_answers_before_it_was_asked_answers_one_request_at_most(inside):
    """As one does that is too busy for a connection. Who gets it can not be told; what came with it is nobody's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken: list[socket.socket] = []

        def serve_all() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(listener.accept()[0])
                    with contextlib.suppress(ConnectionError):
                        taken[-1].sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy" * 2)

        threading.Thread(target=serve_all, daemon=True).start()
        proxy = inside(url_config(listener.getsockname()[1], tick="1h"))
        eventually(lambda: taken, "it was asked for its models")
        for _ in range(3):
            assert [(reply.status, reply.body) for reply in replies(raw(proxy.port, post(CHAT)))] == [(503, b"busy")]
        assert len(taken) == 4, "a connection each"
        for sock in taken:
            sock.close()


@pytest.mark.parametrize("size", [llmguard.IN_MEMORY - 20, llmguard.IN_MEMORY + 20, 4 * llmguard.IN_MEMORY])
def test_a_large_answer_that_is_no_stream_to_one_who_was_kept_waiting_for_a_stream(front, size):
    said = b'{"x":"%b"}' % (b"x" * (size - 8))
    answer, tell = gated(b"", b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(said) + said)
    proxy, _ = front(answer, stream_keepalive="20ms")
    with Client(proxy, post(STREAM)) as client:
        client.until(KEEPALIVE)
        tell()
        payload, clean = dechunked(client.rest())
    event = shape("", payload)
    assert clean and (event == json.loads(said) if size < llmguard.IN_MEMORY else event["error"]["type"] == "engine_lost")


ANSWERS = {
    **{name: silent_after(half)[0] for name, half in HALVES.items()},
    **{"endless: " + name: endless(*parts) for name, parts in ENDLESS.items()},
    "an endless body": endless(b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
    "a body of 10^17 bytes": endless(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999\r\n\r\n", b"x"),
    "endless chunks": endless(PLAIN_CHUNKS, chunk(b"x" * 1000)),
    "garbage chunks": says(PLAIN_CHUNKS + b"nonsense\r\n"),
    "a body cut short": says(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"),
    "invalid UTF-8": says(b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe{"),
    "brackets": says(b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000),
    "odd JSON": says(b'HTTP/1.1 200 OK\r\n\r\n{"data": [5, {"id": 5}, {"id": "x", "status": 5}], "role": 7, "is_sleeping": 1}'),
    "another protocol": says(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "a closed door": says(b""),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_whatever_an_engine_says_to_a_question_of_ours_there_is_an_answer_in_time(stub_engine, monkeypatch, answer):
    monkeypatch.setattr(EngineApi.ask, "__defaults__", (None, 0.2))  # PATIENCE
    api = EngineApi(Address("127.0.0.1", stub_engine(answer).port))
    assert api.ready() in (True, False)
    assert api.in_use() in (True, False, None)
    models = api.models()
    assert models is None or all(isinstance(entry["id"], str) for entry in models)


def test_a_head_without_end_from_one_engine_is_no_unknown_model_of_another(inside, engine):
    """Who asks for a model that nobody knows has all be asked whose models come and go."""
    bad, good = engine(echo), engine(echo)
    bomb = endless(b"HTTP/1.1 200 OK\r\nA: ", b"x")
    bad._serve = lambda sock: (sock.recv(65536), bomb(b"", sock), sock.close())
    config = url_config(bad.port, good.port)
    config["hosts"]["here"]["engines"]["e0"]["models"] = "auto"
    proxy = inside(config)
    reply = replies(raw(proxy.port, post({"model": "nobody's"})))[0]
    assert (reply.status, reply.error["type"]) == (404, "not_found_error")
    assert replies(raw(proxy.port, post({"model": "small1"})))[0].status == 200


# ----- 5: ssh

NO_BOX = "host a9 is down: no answer over ssh in time"
REPLY = {"ok": True, "agent": "0.1.0", "sha256": "abc", "checked": ["gpu"], "foreign": [], "active": None, "state": "off"}
BANNER = "llmguard-agent 1\n"
WHOLE = BANNER + json.dumps(REPLY) + "\n"


class Ssh:
    """An ssh on the PATH that does what a script says (sh; $ask is what it was sent). `pids`: of those that ran."""

    def __init__(self, root: Path, patch) -> None:
        self.root = root
        (root / "bin").mkdir()
        (root / "run").mkdir(mode=0o700)
        self.script = root / "bin" / "ssh"
        patch.setenv("PATH", f"{root / 'bin'}:{os.environ['PATH']}")
        patch.setenv("XDG_RUNTIME_DIR", str(root / "run"))
        self.remote = Remote(HostConfig(name="a9", ssh="me@a9"), str(root / "state"))

    def does(self, script: str) -> None:
        new = self.root / "new"
        new.write_text(f"#!/bin/sh\necho $$ >> {self.root}/pids\n{script}\n")
        new.chmod(0o755)
        os.replace(new, self.script)

    def prints(self, out: str, err: str = "", end: str = "exec sleep 600") -> None:
        (self.root / "out").write_text(out)
        (self.root / "err").write_text(err)
        self.does(f"cat {self.root}/err >&2\ncat {self.root}/out\n{end}")

    def pids(self) -> list[int]:
        pids = self.root / "pids"
        return [int(pid) for pid in pids.read_text().split()] if pids.exists() else []

    def call(self, seconds: float = 1.0) -> dict:
        return self.remote.call({"op": "status"}, seconds)


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    made = Ssh(tmp_path, monkeypatch)
    yield made
    made.remote.close()
    eventually(lambda: not any(map(alive, made.pids())), "each ssh has ended")


HANGS = {  # what it has printed by then
    "it connects": ("", ""),
    "it logs in": ("", "Warning: Permanently added 'a9' (ED25519) to the list of known hosts.\r\n"),
    "the login shell prints": ("Last login: Sun Oct 25\n", ""),
    "the banner is due": ("Last login: Sun Oct 25\n\x1b[2J", "motd\n"),
    "half the banner": (BANNER[:9], ""),
    "the reply is due": (BANNER, ""),
    "half the reply": (WHOLE[:40], ""),
    "all but its end": (WHOLE[:-3], ""),
}


@pytest.mark.parametrize("out, err", HANGS.values(), ids=HANGS)
def test_an_ssh_that_hangs_ends_at_its_deadline_and_its_host_is_down(ssh, out, err):
    ssh.prints(out, err)
    with pytest.raises(HostDown) as down:
        ssh.call(0.3)
    assert str(down.value) == NO_BOX
    assert len(ssh.pids()) < 2


@pytest.mark.parametrize("rest", ["", "bye\n", BANNER + '{"ok": false}\n'])
def test_an_ssh_that_stays_after_the_reply_is_not_waited_for(ssh, monkeypatch, rest):
    """A start file that leaves something in the background keeps the line open for as long as that lives."""
    monkeypatch.setattr(llmguard, "LAST_WORD", 0.1)
    ssh.prints(WHOLE + rest)
    assert ssh.call(600.0) == REPLY


REFUSED = "ssh: connect to host a9 port 22: Connection refused"
CLOSED = "Connection to a9 closed by remote host."
ENDS = {  # what it printed before exit code 255, and what is said then
    "refused": ("", REFUSED, HostDown, "host a9 is down: " + REFUSED),
    "no route": ("", "ssh: connect to host a9 port 22: No route to host", HostDown, "No route to host"),
    "no name": ("", "ssh: Could not resolve hostname a9: Name or service not known", HostDown, "no machine of that name"),
    "no banner": ("", "Connection timed out during banner exchange\nConnection to a9 port 22 timed out", HostDown, "timed out"),
    "closed": ("", "kex_exchange_identification: Connection closed by remote host", HostDown, "Connection closed"),
    "host key": ("", "@@@\nREMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification failed.", HostBlocked, "ssh-keygen -R"),
    "login": ("", "me@a9: Permission denied (publickey).", HostBlocked, "put this machine's key into authorized_keys of me@a9"),
    "keys": ("", "Received disconnect from 10.0.0.9 port 22:2: Too many authentication failures", HostBlocked, "authorized_keys"),
    "shell": ("Last login: Sun\n", CLOSED, HostDown, CLOSED),
    "shell not found": ("", f"llmguard-agent: not found\n{CLOSED}", HostDown, CLOSED),
    "banner": (BANNER, CLOSED, HostDown, CLOSED),
    "half a reply": (WHOLE[:40], "client_loop: send disconnect: Broken pipe", HostDown, "Broken pipe"),
    "silence": ("", "", HostDown, "exit code 255"),
}


@pytest.mark.parametrize("out, err, kind, says", ENDS.values(), ids=ENDS)
def test_an_ssh_that_exits_255_says_whether_the_box_is_down_or_somebody_must_mend_it(ssh, out, err, kind, says):
    ssh.prints(out, err, "exit 255")
    with pytest.raises((HostDown, HostBlocked)) as trouble:
        ssh.call(PATIENCE)
    assert type(trouble.value) is kind and says in str(trouble.value)
    assert len(ssh.pids()) == 1


def test_a_reply_counts_also_when_ssh_exits_255_behind_it(ssh):
    ssh.prints(WHOLE, CLOSED, "exit 255")
    assert ssh.call(PATIENCE) == REPLY


@pytest.fixture
def kept(ssh, monkeypatch):
    """script(…) -> what was asked of an ssh that holds a connection open. Each call to it does what the next of these says."""
    folder = ssh.root / "run" / "llmguard-ssh"
    folder.mkdir(mode=0o700)
    (folder / ("c" * 40)).touch()
    real = llmguard.run

    def script(*steps: str) -> list[str]:
        asked: list[str] = []

        def run(argv, seconds: float, **more):
            step = steps[len(asked)]
            asked.append("drop" if "-O" in argv else "ask")
            ssh.does(step)
            return real(argv, 0.3 if "sleep" in step else PATIENCE, **more)

        monkeypatch.setattr(llmguard, "run", run)
        return asked

    return script


@pytest.mark.parametrize("drops", ["exit 0", "exec sleep 600"], ids=["dropped", "also hangs when it is dropped"])
def test_a_dead_connection_that_was_kept_is_dropped_and_the_box_asked_over_another(ssh, kept, drops):
    (ssh.root / "out").write_text(WHOLE)
    asked = kept("exec sleep 600", drops, f"exec cat {ssh.root}/out")
    assert ssh.call() == REPLY
    assert asked == ["ask", "drop", "ask"]


def test_a_dead_connection_that_stays_dead_is_a_box_that_is_down(ssh, kept):
    asked = kept("exec sleep 600", "exit 0", "exec sleep 600")
    with pytest.raises(HostDown, match=NO_BOX):
        ssh.call()
    assert asked == ["ask", "drop", "ask"]


AGENT = f'exec {sys.executable} -S -E -I {LLMGUARD} --state-dir "$STATE" agent'


@pytest.fixture
def boxed(ssh, inside, monkeypatch, tmp_path):
    """start(script) -> a proxy in this process whose host is behind that ssh, with deadlines of a second; $AGENT is the agent."""
    real = llmguard.run

    def hurried(argv, seconds, **more):
        return real(argv, min(seconds, 1.5), **more)

    monkeypatch.setattr(llmguard, "run", hurried)
    monkeypatch.setenv("STATE", str(tmp_path / "there"))
    started = []

    def start(script: str):
        ssh.does(script)
        engines = {"e": {"command": ["sleep", "600"], "port": free_port(), "models": ["small"]}}
        a9 = {"ssh": "me@a9", "address": "127.0.0.1", "engines": engines}
        proxy = inside({"proxy": {"tick": "100ms"}, "hosts": {"a9": a9}})
        started.append(proxy)
        return proxy

    yield start
    for proxy in started:
        for host in proxy.hosts.values():
            host.close()
        for thread in proxy._host_threads.values():
            thread.join(PATIENCE)
            assert not thread.is_alive(), "its thread ends"
    for record in (tmp_path / "there" / "engines").glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            os.killpg(json.loads(record.read_text())["pid"], signal.SIGKILL)


def view(proxy) -> dict:
    return ask(f"http://127.0.0.1:{proxy.port}/status").json()["hosts"]["a9"]


@pytest.mark.parametrize(
    "script, state, says",
    [
        ("exec sleep 600", "down", None),
        (f"printf '{BANNER[:-1]}\\n'; exec sleep 600", "down", None),
        ("echo 'me@a9: Permission denied (publickey).' >&2; exit 255", "blocked", "put this machine's key into authorized_keys"),
        ("exit 0", "blocked", "the agent on host a9 gave no reply: exit code 0"),
        ("exec yes", "blocked", "the login shell prints more than 64 KiB"),
    ],
    ids=["hangs", "hangs after the banner", "no login", "no word", "endless"],
)
def test_a_box_in_trouble_is_shown_refuses_at_once_and_is_used_again_when_it_is_well(boxed, ssh, script, state, says):
    proxy = boxed(script)
    count = threading.active_count()
    eventually(lambda: (said := view(proxy))["state"] == state and str(says) in str(said["problem"]), "it is shown")
    reply = replies(raw(proxy.port, post(CHAT)))[0]
    assert (reply.status, reply.error["type"]) == (502, "host_down")
    ssh.does(AGENT)
    eventually(lambda: view(proxy)["state"] == "off", "it is well again")
    assert proxy.lives() and threading.active_count() <= count


@pytest.mark.parametrize("out", ["", BANNER, WHOLE[:40]], ids=["no word", "the banner", "half a reply"])
def test_an_ssh_that_hangs_in_the_midst_of_a_switch_refuses_who_waits_for_it(boxed, ssh, out):
    (ssh.root / "half").write_text(out)
    hang = f'cat {ssh.root}/half; exec sleep 600'
    proxy = boxed(f'ask=$(head -n 1)\ncase "$ask" in *\'"op": "start"\'*) {hang};; esac\nprintf "%s\\n" "$ask" | ({AGENT})')
    eventually(lambda: view(proxy)["state"] == "off", "it is there")
    reply = replies(raw(proxy.port, post(CHAT)))[0]
    assert (reply.status, reply.error["type"]) == (502, "host_down")
    assert reply.error["message"] == "model small: host a9 is down"
    eventually(lambda: view(proxy)["state"] == "off", "and is still there")
    assert view(proxy)["failures"] == {}, "that was no failure of the engine"


def followed(remote: Remote) -> list[dict]:
    """What is told on a follow line, which ends."""
    told: list[dict] = []
    line = threading.Thread(target=lambda: remote.follow({"op": "status"}, told.append), daemon=True)
    line.start()
    line.join(PATIENCE)
    assert not line.is_alive(), "it is given up"
    return told


def test_noise_without_end_is_no_sign_of_life_on_a_follow_line(ssh, monkeypatch):
    monkeypatch.setattr(llmguard, "HEARTBEAT", 0.4)
    (ssh.root / "out").write_text(json.dumps(REPLY) + "\n")
    ssh.does(f"cat {ssh.root}/out; exec yes")
    assert followed(ssh.remote) in ([REPLY], []), "a slow machine may not have come that far"


@pytest.mark.parametrize("script", ["", "cat > /dev/null;", f"printf '{BANNER[:-1]}\\n';"])
def test_a_follow_line_over_an_ssh_that_hangs_is_given_up(ssh, monkeypatch, script):
    monkeypatch.setattr(llmguard, "HEARTBEAT", 0.2)
    ssh.does(script + " exec sleep 600")
    assert followed(ssh.remote) == []


def test_a_folder_of_sockets_that_is_open_to_others_is_a_line_in_the_log_for_calls_and_for_the_follow_line(ssh, lines):
    (ssh.root / "run" / "llmguard-ssh").mkdir()
    (ssh.root / "run" / "llmguard-ssh").chmod(0o777)
    with pytest.raises(HostBlocked, match="is open to others"):
        ssh.call()
    config = llmguard.replace(ssh.remote.host, job_queue={"path": "~/jobs"})
    host = llmguard.Host(config, llmguard.ProxyConfig(), ssh.remote, llmguard.Events())
    line = threading.Thread(target=host.follow, daemon=True)
    line.start()
    eventually(lambda: lines, "it says so")
    host.close()
    line.join(PATIENCE)
    assert not line.is_alive() and ssh.pids() == []
    assert re.fullmatch("host a9: the line to its agent cannot be opened: .* is open to others: [^\n]*", lines[0])


TUNNELS = f"""
exec {sys.executable} -S -E -c '
import socket, sys
listeners = []
for word in sys.argv[1:]:
    if ":127.0.0.1:" in word:
        listeners.append(socket.socket(socket.AF_UNIX))
        listeners[-1].bind(word.split(":")[0])
        listeners[-1].listen()
sys.stdin.read()' "$@"
"""


def test_tunnels_that_hang_before_they_are_up_are_opened_again_and_those_that_are_up_are_left_alone(ssh, monkeypatch):
    monkeypatch.setattr(llmguard, "TUNNEL_PATIENCE", 0.3)
    ssh.does("exec sleep 600")
    ssh.remote.open_tunnels([8081])
    eventually(lambda: len(ssh.pids()) == 1, "it hangs")
    ssh.does(TUNNELS)
    monkeypatch.setattr(llmguard, "TUNNEL_PATIENCE", PATIENCE)

    def up() -> bool:
        ssh.remote.open_tunnels(port for port in [8081])
        return os.path.exists(ssh.remote.tunnel(8081))

    eventually(up, "the tunnel")
    eventually(lambda: not alive(ssh.pids()[0]), "the one that hung is gone")
    now = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llmguard.time, "monotonic", lambda: now + 3600.0)
        for _ in range(3):
            ssh.remote.open_tunnels([8081])
    ssh.remote.close()
    eventually(lambda: not any(map(alive, ssh.pids())), "it ends with us")
    assert len(ssh.pids()) == 2


# ----- 6: agents


@pytest.fixture(params=["here", "over ssh"])
def agent(request, tmp_path, monkeypatch):
    """play(script) -> a Remote whose agent is that Python script, on this machine or behind ssh."""

    def play(script: str) -> Remote:
        path = tmp_path / "agent.py"
        path.write_text("import json, os, sys, time\nBANNER = b'llmguard-agent 1\\n'\n" + script)
        if request.param == "here":
            monkeypatch.setattr(llmguard, "__file__", str(path))
            return Remote(HostConfig(name="a9"), str(tmp_path))
        ssh = Ssh(tmp_path, monkeypatch)
        ssh.does(f"exec {sys.executable} -S -E {path}")
        return ssh.remote

    play.over_ssh = request.param != "here"
    return play


def out(*pieces: bytes) -> str:
    return f"os.write(1, {b''.join(pieces)!r})\n"


B, R = BANNER.encode(), json.dumps(REPLY).encode() + b"\n"
NOISE = b"Last login: Sun\r\n\x1b[2J{\"ok\": true}\nllmguard-agent 1 is here\n\xff\xfe\n"
READABLE = {
    "a reply": (B, R),
    "noise before it": (NOISE, B, R),
    "noise behind it": (B, R, NOISE),
    "noise on the banner's line": (b"\x1b[0m$ ", B, R),
    "lines that end as on a terminal": (B.replace(b"\n", b"\r\n"), R.replace(b"\n", b"\r\n")),
    "no end of its line": (B, R[:-1]),
    "two replies": (B, R, B, b'{"ok": false}\n'),
    "a broken reply first": (B, b'{"ok": tr\n', B, R),
    "64 KiB of noise": (b"x" * 65_000 + b"\n", B, R),
}


@pytest.mark.parametrize("pieces", READABLE.values(), ids=READABLE)
def test_an_agents_reply_is_found_whatever_stands_around_it(agent, pieces):
    assert agent(out(*pieces)).call({"op": "status"}, PATIENCE) == REPLY


SILENT = {
    "no word": "",
    "half a reply": out(B, R[:40]),
    "a reply without its banner": out(R),
    "invalid UTF-8": out(B, b'{"ok": "\xff\xfe"}\n'),
    "no object": out(B, b"[1]\n", B, b"null\n", B, b"5\n"),
    "brackets": out(B, b"[" * 50_000, b"\n"),
    "a number of 5,000 digits": out(B, b'{"ok": ' + b"9" * 5000 + b"}\n"),
    "NUL": out(b"\x00" * 5000),
    "exit code 3": "sys.exit(3)",
    "a traceback": "raise ValueError('broken')",
    "a signal": "os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("script", SILENT.values(), ids=SILENT)
def test_an_agent_that_gives_no_reply_is_an_error_that_says_so_in_a_line(agent, script):
    with pytest.raises(AgentError) as error:
        agent(script).call({"op": "status"}, PATIENCE)
    assert "gave no reply: " in str(error.value) and len(str(error.value)) < 2100 and str(error.value).isprintable()


@pytest.mark.parametrize("script", [out(B, b"{", b"x" * 60_000), "sys.stderr.write('x' * 60_000)"], ids=["stdout", "stderr"])
def test_of_a_long_complaint_the_beginning_is_told(agent, script):
    with pytest.raises(AgentError) as error:
        agent(script).call({"op": "status"}, PATIENCE)
    assert "gave no reply: " in str(error.value) and len(str(error.value)) < 1000


FLOODS = {
    "a reply of 100 MB": "os.write(1, BANNER + b'[')\nfor _ in range(100): os.write(1, b'5, ' * 333_333)\nos.write(1, b'5]\\n')",
    "100 MB and no banner": "for _ in range(100): os.write(1, b'x' * 999_999 + b'\\n')",
    "100 MB of complaints": "for _ in range(100): os.write(2, b'x' * 999_999 + b'\\n')",
}


@pytest.mark.parametrize("name", FLOODS)
def test_an_agent_that_prints_a_hundred_megabytes_is_ended_and_its_box_is_not_called_down(agent, name):
    remote = agent(FLOODS[name])
    with pytest.raises((AgentError, HostBlocked)) as error:
        remote.call({"op": "status"}, PATIENCE)
    told = "prints more than 64 KiB" if agent.over_ssh and "complaints" not in name else "printed more than 4 MiB"
    assert told in str(error.value)


def test_a_hundred_megabytes_behind_the_reply_are_not_read(agent):
    script = out(B, R) + "while True: os.write(1, b'x' * 999_999 + b'\\n')"
    assert agent(script).call({"op": "status"}, PATIENCE) == REPLY


ODD = [5, "x", [[]], [5], {"a": 5}]
FIELDS = "ok agent sha256 foreign checked bench_waits active state engine others gpu log error".split()


@pytest.mark.parametrize("field", [*FIELDS, "engine.pids", "engine.evidence", "engine.port", "engine.restarts"])
@pytest.mark.parametrize("op", ["status", "start", "stop"])
def test_a_reply_with_a_field_of_another_kind_is_survived_and_who_waits_gets_an_answer(lines, field, op):
    for value, running in itertools.product(ODD, (False, True)):
        bench = Bench()
        if running:
            bench.serve_one("a")
        true_call = bench.box.call

        def call(ask: dict, seconds: float, value=value, true_call=true_call) -> dict:
            reply = true_call(ask, seconds)
            if ask["op"] == op and "." in field and isinstance(reply.get("engine"), dict):
                reply["engine"] = {**reply["engine"], "verdict": "gpu", field.partition(".")[2]: value}
            elif ask["op"] == op:
                reply.update({field: value, **({"ok": False} if field == "error" else {})})
            return reply

        bench.box.call = call
        bench.host.poke()
        bench.settle()
        client = bench.client("b")
        bench.pass_time(bench.proxy.queue_timeout + 1.0)
        client.join(PATIENCE)
        assert client.lease or isinstance(client.error, llmguard.GuardError), (value, client.error)
        json.dumps(bench.host.view())


# ----- 7: disks and clocks


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.EIO])
@pytest.mark.parametrize("name", ["handover.json", "stop_error.json"])
def test_state_that_cannot_be_written_is_kept_shown_and_written_later(waited_for, monkeypatch, name, number):
    lane = waited_for
    real, broken = os.open, [True]

    def fails(path, *more, **also):
        if broken[0] and name in str(path):
            raise OSError(number, os.strerror(number))
        return real(path, *more, **also)

    monkeypatch.setattr(os, "open", fails)
    lane.site.stuck = name == "stop_error.json"
    lane.look()
    what = name.partition(".")[0]
    assert lane.view[what] and lane.file(name) == {}
    assert name in lane.ledger.problem and os.strerror(number) in lane.ledger.problem
    lane.pass_time(5.0)
    assert len([line for line in lane.lines if "cannot be written" in line]) == 1
    kept = lane.view[what]
    broken[0] = False
    lane.look()
    assert lane.ledger.problem is None and lane.file(name)["a9"] == kept
    lane.restart()
    assert lane.view[what] == kept


def full(monkeypatch, *names: str) -> None:
    """No byte more goes into files whose names hold one of these."""
    paths: dict[int, str] = {}
    true_open, true_write = os.open, os.write

    def opened(path, *more, **also):
        handle = true_open(path, *more, **also)
        paths[handle] = str(path)
        return handle

    def written(handle, data):
        if any(name in paths.get(handle, "") for name in names):
            raise OSError(errno.ENOSPC, "No space left on device")
        return true_write(handle, data)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "write", written)


def test_an_engine_whose_record_finds_no_space_is_not_left_running(folder, monkeypatch):
    engines = {"e": {"command": ["sleep", f"601.{os.getpid()}"], "port": free_port()}}
    full(monkeypatch, "here.e.json")
    agent = llmguard.Agent(folder, llmguard.Box(), run=lambda argv, seconds: (None, "", f"{argv[0]}: not found"))
    reply = agent.answer({"op": "start", "host": "here", "engines": engines, "engine": "e"})
    assert reply["ok"] is False and reply["error"]["type"] == "AgentError" and "cannot be written" in reply["error"]["text"]
    box = llmguard.Box()
    eventually(lambda: not [p for p in box.living() if box.argv(p.pid) == engines["e"]["command"]], "it is gone")
    monkeypatch.undo()
    assert agent.answer({"op": "start", "host": "here", "engines": engines, "engine": "e"})["active"] == "e"


def test_an_engine_whose_log_finds_no_space_is_not_started_and_the_error_says_so(folder, monkeypatch):
    def fails(path, *more, **also):
        if str(path).endswith("here.e.log"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return io_open(path, *more, **also)

    io_open = open
    monkeypatch.setattr("builtins.open", fails)
    agent = llmguard.Agent(folder, llmguard.Box(), run=lambda argv, seconds: (None, "", f"{argv[0]}: not found"))
    reply = agent.answer({"op": "start", "host": "here", "engines": {"e": sleeper()}, "engine": "e"})
    assert reply["ok"] is False and reply["error"]["type"] == "AgentError" and "No space left" in reply["error"]["text"]
    assert not Path(folder, "engines", "here.e.json").exists()


def test_a_new_copy_of_the_agent_that_finds_no_space_leaves_the_old_one(monkeypatch, tmp_path):
    import hashlib

    monkeypatch.setenv("HOME", str(tmp_path))
    old, new = b"print('old')\n", b"print('new')\n"
    installed = tmp_path / llmguard.INSTALLED
    assert llmguard.receive(old, hashlib.sha256(old).hexdigest())["before"] is None
    with pytest.MonkeyPatch.context() as patch:
        full(patch, "llmguard.py")
        with pytest.raises(AgentError, match="llmguard.py cannot be written: No space left on device"):
            llmguard.receive(new, hashlib.sha256(new).hexdigest())
    assert installed.read_bytes() == old and os.listdir(installed.parent) == ["llmguard.py"]


def test_a_body_that_the_disk_has_no_room_for_is_413_and_says_so(front, monkeypatch):
    class Full:
        def write(self, data) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            closed.append(self)

    closed: list[Full] = []
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Full())
    proxy, upstream = front(echo)
    reply = replies(raw(proxy.port, post(LARGE)))[0]
    assert (reply.status, reply.headers["x-should-retry"]) == (413, "false")
    assert reply.error["message"] == "the request's body is larger than what the disk has room for: No space left on device"
    assert upstream.requests == []
    eventually(lambda: len(closed) == 1, "the file is closed")
    assert replies(raw(proxy.port, post(CHAT)))[0].status == 200


@pytest.mark.parametrize("what", ["watch", "probe"])
def test_a_guard_whose_state_finds_no_space_says_so_and_keeps_the_old(tmp_path, monkeypatch, lines, what):
    state = llmguard.GuardState(str(tmp_path), what, Address("127.0.0.1", 1))
    assert state.save({"a": 1}) is True
    with pytest.MonkeyPatch.context() as patch:
        full(patch, what + ".json")
        assert state.save({"a": 2}) is False
    assert state.load() == {"a": 1} and len([line for line in lines if "No space left" in line]) == 1
    assert state.save({"a": 3}) is True and state.load() == {"a": 3}


def test_watch_unloads_nothing_that_it_could_not_remember_to_have_unloaded():
    """From cron each minute it would do so again and again."""
    server = SimpleNamespace(clock=FakeClock(), kind="llama-swap", unload=lambda model: unloaded.append(model) or True)
    entry = llmguard.Loaded("m")
    process = llmguard.Process(7, 5, "llama-server", "S", 7, 0, 1)
    unloaded: list[str] = []
    written = [False]
    for remembers in (False, True):
        known: dict = {}
        watch = llmguard.Watch(server, llmguard.WatchSettings(force=True), known, remember=lambda: written[-1])
        written.append(remembers)
        watch._fallen(llmguard.Seen(entry, [process], ""), {"evidence": ["VmRSS is 16 GiB"]}, "llama-server pid 7")
        ((level, text),) = watch.findings
        assert (unloaded == ["m"]) is remembers is (known["heals"] == {"m": 1})
        assert level == (llmguard.WARNING if remembers else llmguard.CRITICAL)
        assert ("cannot be written down" in text) is not remembers


DAY = 86400.0


def life(jump: float) -> list[tuple]:
    """What a host does, and when, in two hours in which the clock on the wall jumps."""
    bench = Bench(idle_stop=900.0, tick=60.0, queue_timeout=300.0)
    done: list[tuple] = []
    true_call = bench.box.call

    def call(ask: dict, seconds: float) -> dict:
        done.append((bench.clock.monotonic(), ask["op"], ask.get("engine", "")))
        return true_call(ask, seconds)

    bench.box.call = call

    def leap(sign: int = 1) -> None:
        bench.clock._now += sign * jump

    bench.serve_one("a")
    leap()
    bench.pass_time(30.0)
    stream = bench.client("a").granted()
    waiting = bench.client("b")
    leap(-2)
    bench.pass_time(299.0)
    done.append(("waits", waiting.waits()))
    leap()
    bench.pass_time(2.0)
    done.append(("refused", waiting.refused()))
    stream.done()
    bench.box.script["start"] = [{"ok": False, "error": {"type": "EngineFailed", "text": "no"}}] * 2
    for _ in range(2):
        failed = bench.client("c")
        bench.settle()
        done.append(("failed", failed.refused()))
        leap()
        bench.pass_time(21.0)
        leap(-1)
    bench.serve_one("a")
    leap(-1)
    bench.box.script["stop"] = [{"ok": False, "error": {"type": "AgentError", "text": "pid 7 still runs"}}]
    bench.pass_time(1800.0)
    leap(3)
    bench.pass_time(1800.0)
    done.append(("state", bench.state))
    return done


@pytest.mark.parametrize("jump", [DAY, -DAY, 30.0, -30.0])
def test_a_clock_that_jumps_changes_nothing_that_a_host_does_or_when(lines, jump):
    steady = life(0.0)
    assert life(jump) == steady
    assert ("stop", "") in [entry[1:] for entry in steady] and steady[-1] == ("state", "off")


@pytest.mark.parametrize("ahead, probed", [(-30.0, False), (-llmguard.STILL_BAD - 1, True), (DAY, True)])
def test_a_bad_probe_is_asked_again_after_its_hour_also_when_the_clock_was_put_back(tmp_path, monkeypatch, ahead, probed):
    """Else one that is dated tomorrow would stay the last word until then."""
    listed = tmp_path / "swap.yaml"
    listed.write_text("x")
    server = SimpleNamespace(address=Address("10.0.0.9", 1), kind="server", loaded=list, clock=FakeClock(), api=None)
    asked: list[str] = []

    def probe(self, model: str) -> llmguard.Probed:
        asked.append(model)
        return llmguard.Probed(model, llmguard.OK, "healthy", "")

    monkeypatch.setattr(llmguard.Prober, "probe", probe)
    options = llmguard.CommandLine().parser.parse_args(["probe", "m", "--if-changed", str(listed)])
    signs = llmguard.signs_of([str(listed)], server, llmguard.Box(), llmguard.run_tool)
    checked = llmguard.timestamp(time.time() + ahead)
    known = {"runs": {'["m"]': {"signs": signs, "checked": checked, "level": llmguard.CRITICAL, "good": False, "text": "m: cpu"}}}
    report = llmguard._probe_models(options, server, known)
    assert (asked == ["m"]) is probed and (report.level == llmguard.OK) is probed


def test_a_state_file_of_tomorrow_is_a_state_file(tmp_path, lines):
    clock = FakeClock()
    assert StateFile(str(tmp_path), "x.json", clock).save({"since": llmguard.timestamp(clock.now() + DAY)})
    os.utime(tmp_path / "x.json", (clock.now() + DAY,) * 2)
    clock.advance(-DAY)
    file = StateFile(str(tmp_path), "x.json", clock)
    assert file.load()["since"] and file.save({"a": 1}) and file.load() == {"version": 1, "a": 1} and not lines

"""Many at once: the threads that serve connections, and the CPU that they share."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from parts import PATIENCE, Upstream, ask, eventually, free_port, llama_command, url_config

import llmguard
from llmguard import Box, Crew, OneCpu

ALL = frozenset(range(4))


class Work:
    """What a Crew takes for a connection: it says which thread serves it, and lasts until it is told."""

    def __init__(self) -> None:
        self.begun, self.over, self.thread = threading.Event(), threading.Event(), 0

    def serve(self, cpus: frozenset[int]) -> frozenset[int]:
        self.thread, self.cpus = threading.get_ident(), cpus
        self.begun.set()
        assert self.over.wait(60)
        return frozenset([7])

    def finish(self) -> int:
        assert self.begun.wait(60)
        self.over.set()
        return self.thread


def tasks() -> int:
    """The threads of this process, those that threading does not know included."""
    return len(os.listdir("/proc/self/task"))


# ----- threads


def test_each_connection_has_a_thread_and_the_next_one_takes_one_that_is_free():
    crew = Crew()
    first, second = Work(), Work()
    crew.serve(first)
    crew.serve(second)
    threads = {first.finish(), second.finish()}
    assert len(threads) == 2
    eventually(lambda: len(crew._waiting) == 2, "both wait")
    third, fourth, fifth = Work(), Work(), Work()
    for work in (third, fourth, fifth):
        crew.serve(work)
    new = [work.finish() for work in (third, fourth, fifth)]
    assert threads < set(new) and len(set(new)) == 3, "two that waited, one that had to be started"
    left = [work.cpus for work in (third, fourth, fifth) if work.thread in threads]
    assert left == [{7}, {7}] and not first.cpus, "each knows where its last connection left it"


def test_threads_that_wait_for_nothing_end(monkeypatch):
    monkeypatch.setattr(Crew, "PATIENCE", 0.05)
    before, crew = tasks(), Crew()
    works = [Work() for _ in range(20)]
    for work in works:
        crew.serve(work)
    for work in works:
        work.finish()
    eventually(lambda: tasks() <= before and not crew._waiting, "they have ended")


def test_a_connection_handed_to_a_thread_that_loses_its_patience_is_served(monkeypatch):
    """The two meet in the same moment, over and over: each connection is served, each once."""
    monkeypatch.setattr(Crew, "PATIENCE", 0.0)
    served: list[int] = []

    class Quick:
        def __init__(self, number: int) -> None:
            self.number = number

        def serve(self, cpus: frozenset[int]) -> frozenset[int]:
            served.append(self.number)
            return cpus

    before, crew = tasks(), Crew()
    for number in range(3000):
        crew.serve(Quick(number))
    eventually(lambda: len(served) == 3000, "all are served")
    assert sorted(served) == list(range(3000))
    eventually(lambda: tasks() <= before and not crew._waiting, "and nobody is left")


# ----- one after the other


@pytest.fixture
def silent():
    """An engine that reads a request and never answers."""
    engine = Upstream(lambda request, sock: not sock.recv(1))
    yield engine
    engine.close()


def test_the_next_connection_is_served_once_the_one_before_waits_for_whatever(inside, monkeypatch, silent):
    monkeypatch.setattr(llmguard, "TURN", 10 * PATIENCE)
    address = ("127.0.0.1", inside(url_config(silent.port)).port)
    url = "http://%s:%d" % address
    request = b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 17\r\n\r\n{"model":"small"}'
    with socket.create_connection(address), socket.create_connection(address) as busy:
        assert ask(url + "/health").status == 200, "they wait for their clients"
        busy.sendall(request)
        eventually(lambda: silent.requests, "for the engine")
        assert ask(url + "/health").status == 200
        monkeypatch.setattr(llmguard.Host, "_admits", lambda host, engine: False)
        with socket.create_connection(address) as queues:
            queues.sendall(request)
            eventually(lambda: ask(url + "/status").json()["hosts"]["here"]["queued"] == 1, "in the queue")
    assert ask(url + "/health").status == 200, "as it is once the one before has ended"


def test_a_connection_that_neither_waits_nor_ends_holds_nobody_up_for_long(inside, monkeypatch, silent):
    stuck, real = [threading.Event()], llmguard.Connection.serve

    def serve(connection: llmguard.Connection, cpus: frozenset[int]) -> frozenset[int]:
        if stuck:
            assert stuck.pop().wait(PATIENCE)
        return real(connection, cpus)

    event = stuck[0]
    monkeypatch.setattr(llmguard.Connection, "serve", serve)
    port = inside(url_config(silent.port)).port
    with socket.create_connection(("127.0.0.1", port)):
        eventually(lambda: not stuck, "its thread is at work")
        assert ask(f"http://127.0.0.1:{port}/health").status == 200
        event.set()


# ----- one CPU


@pytest.mark.parametrize(
    ("now", "busy", "ours", "then"),
    [
        ({3}, [0.0, 0.0, 0.0, 1.0], 1.0, {3}),  # it is we who work there
        ({3}, [0.9, 0.9, 0.9, 0.6], 0.3, {3}),  # a little of somebody else's
        ({3}, [0.3, 0.1, 0.2, 1.0], 0.5, {1}),  # too much of it: where there is the least
        ({3}, [0.3, 0.3, 0.3, 1.0], 0.5, set(ALL)),  # and nowhere is it quiet
        (set(ALL), [0.3, 0.3, 0.3, 0.3], 1.2, {0}),  # all of that are we
        (set(ALL), [0.5, 0.5, 0.5, 0.5], 0.5, set(ALL)),  # most of it is others
        (set(ALL), [1.0, 0.0, 1.0, 1.0], 0.0, {1}),
        ({3}, [1.0, 0.1, 1.0], 0.5, {1}),  # a CPU that tells nothing is no place to be
        ({3}, [], 0.5, set(ALL)),  # as are all of them where nothing is told
    ],
)
def test_where_the_threads_go_by_who_works_on_which_cpu(now, busy, ours, then):
    assert OneCpu.choose(frozenset(now), ALL, dict(enumerate(busy)), ours) == then


def test_how_long_each_cpu_has_worked_is_read_without_its_idle_time(tmp_path):
    tick = os.sysconf("SC_CLK_TCK")
    (tmp_path / "proc").mkdir()
    lines = ["cpu  9 9 9 9 9 9 9 9 9 9", f"cpu0 {tick} {tick} {tick} 77 77 {tick} {tick} {tick} 55 55", "cpu10 0 0 0 5 0 0 0 0 0 0", "intr 1"]
    (tmp_path / "proc" / "stat").write_text("\n".join(lines) + "\n")
    assert Box(str(tmp_path)).cpu_seconds() == {0: 6.0, 10: 0.0}
    assert Box(str(tmp_path / "nowhere")).cpu_seconds() == {}


def cpus(task: Path) -> set[int]:
    """The CPUs that a thread, or a process, may run on."""
    return os.sched_getaffinity(int(task.name))


def test_those_that_serve_keep_to_one_cpu_and_an_engine_gets_them_all(serve, llama_server, models):
    given = os.sched_getaffinity(0)
    if len(given) < 2:
        pytest.skip("one CPU is here")
    small = {"command": llama_command(llama_server, models["small"]), "port": free_port(), "models": ["small"]}
    serving = serve({"hosts": {"here": {"engines": {"small": small}}}})
    body = {"model": "small", "messages": [{"role": "user", "content": "say something"}], "max_tokens": 4}
    assert serving.ask("POST", "/v1/chat/completions", body).status == 200
    process = Path(f"/proc/{serving.process.pid}")
    places = [cpus(task) for task in (process / "task").iterdir()]
    assert any(len(place) == 1 for place in places) and cpus(process) == given
    engine = Path(f"/proc/{serving.engine_pid('small')}")
    assert all(cpus(task) == given for task in (engine / "task").iterdir())

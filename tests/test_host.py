"""Section 9: the life of a host, with an agent that a test scripts and a clock that it moves by hand."""

from __future__ import annotations

import random
import re
import threading
from types import SimpleNamespace

import pytest
from parts import PATIENCE, FakeClock, eventually

import llmguard
from llmguard import (
    NEVER, AgentError, EngineConfig, EngineFailed, Events, GpuBusy, GuardError, Host, HostConfig, HostDown, ProxyConfig, UnknownModel, replace,
)

GUARDS = ["gpu", "bench_port", "job_queue", "owner_check"]
PORTS = {"a": 8001, "b": 8002, "c": 8003}


def host_config(*engines: str, **more) -> HostConfig:
    made = {name: EngineConfig(name=name, command=(name,), port=PORTS[name], models={f"m-{name}": f"m-{name}"}) for name in engines}
    made["web"] = EngineConfig(name="web", url=llmguard.Address("127.0.0.1", 9000), models={"m-web": "m-web"})
    return HostConfig(name="a9", address="127.0.0.1", engines=made, **more)


class HandClock(FakeClock):
    """Only the test moves it. The thread that drives the host never waits: where it would, it comes back, and `rests_until` says
    until when it would have. While an engine loads, waiting for it moves the time."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = threading.get_ident()
        self.rests_until: float | None = None
        self.loading = False

    def wait(self, condition, seconds: float) -> None:
        if threading.get_ident() != self.driver:
            condition.wait(0.003)
        elif self.loading:
            self.advance(seconds)
        else:
            self.rests_until = self.monotonic() + seconds


class FakeBox:
    """The line to an agent on a box that does what the test says. `calls` holds (op, engine) in order."""

    def __init__(self, clock) -> None:
        self.clock = clock
        self.host: HostConfig | None = None
        self.calls: list[tuple[str, str]] = []
        self.running: str | None = None
        self.port = "ours"
        self.ready_at = 0.0
        self.load_time = 0.0
        self.down: Exception | None = None
        self.owners: list[dict] = []
        self.log = ["loading", "cannot map"]
        self.script: dict[str, list] = {}  # op -> what its next calls do instead: an exception, a reply, or a function
        self.used_by_others: set[str] = set()
        self.mute = False
        self.since: str | None = None  # as the agent tells it of the engine
        self.hooks: list = []  # run at the next call or question

    def call(self, ask: dict, seconds: float) -> dict:
        op, engine = ask["op"], ask.get("engine", "")
        self.calls.append((op, engine))
        if self.down:
            raise self.down
        for scripted in self.script.get(op, [])[:1]:
            self.script[op].pop(0)
            if isinstance(scripted, BaseException):
                raise scripted
            if isinstance(scripted, dict):
                return scripted
            scripted()
        reply: dict = {"ok": True, "agent": "0.1.0", "sha256": "abc", "checked": GUARDS, "foreign": self.owners, "gpu": None}
        if op == "start" and self.owners:
            return {**reply, "ok": False, "error": {"type": "GpuBusy", "text": self.owners[0]["text"]}}
        if op == "start" and self.running != engine:
            self.running, self.ready_at, self.port = engine, self.clock.monotonic() + self.load_time, "ours"
            self.clock.loading = self.load_time > 0
        if op == "stop":
            self.running, self.clock.loading = None, False
        view = {"pids": [4242], "port": self.port, "stranger": "nginx", "since": self.since}
        return {**reply, "active": self.running, "state": "running" if self.running else "off", "log": self.log,
                **({"engine": view} if self.running else {})}

    def ops(self, *wanted: str) -> list[tuple[str, str]]:
        return [call for call in self.calls if call[0] in (wanted or ("start", "stop"))]

    def close(self) -> None:
        pass


class FakeApi:
    """The HTTP side of an engine on the fake box."""

    def __init__(self, box: FakeBox, address, key: str) -> None:
        self.box, self.address, self.key = box, address, key
        self.engine = next((name for name, port in PORTS.items() if port == address.port), "web")

    def ready(self) -> bool:
        ready = self.box.running == self.engine and self.box.clock.monotonic() >= self.box.ready_at and not self.box.mute
        if ready:
            self.box.clock.loading = False
        return ready

    def in_use(self) -> bool:
        if self.box.hooks:
            self.box.hooks.pop(0)()
        return self.engine in self.box.used_by_others

    def models(self):
        return None

    def load(self, model: str) -> bool:
        return False


class GaveUp(Exception):
    pass


class Client(threading.Thread):
    """Somebody who asks for an engine; back from the constructor once he was let in, refused or queued."""

    def __init__(self, host: Host, engine: str) -> None:
        super().__init__(daemon=True)
        self.host, self.engine = host, engine
        self.lease = None
        self.error: BaseException | None = None
        self.glances, self.leaves, self.committed = 0, False, False
        self.start()
        eventually(lambda: self.glances or not self.is_alive(), "let in, refused or queued")

    def run(self) -> None:
        try:
            self.lease = self.host.acquire(self.engine, self._waiting)
        except BaseException as error:
            self.error = error

    def _waiting(self, committed: bool) -> None:
        self.glances += 1
        self.committed = committed
        if self.leaves:
            raise GaveUp

    def granted(self) -> Client:
        self.join(PATIENCE)
        assert self.lease is not None, self.error or "still waits"
        return self

    def refused(self) -> str:
        self.join(PATIENCE)
        assert isinstance(self.error, GuardError), (self.error, self.lease)
        return str(self.error)

    def waits(self) -> bool:
        """True once he has looked around at this very time, and was neither let in nor refused."""
        glances = self.glances
        eventually(lambda: self.glances >= glances + 2 or not self.is_alive())
        return self.is_alive()

    def leave(self) -> None:
        self.leaves = True
        self.join(PATIENCE)
        assert isinstance(self.error, GaveUp)

    def done(self) -> None:
        self.lease.release()


class Bench:
    """A host on a fake box, driven by hand."""

    def __init__(self, config: HostConfig | None = None, **proxy) -> None:
        self.clock = HandClock()
        self.box = FakeBox(self.clock)
        self.events = Events()
        self.told = self.events.subscribe()
        self.proxy = replace(ProxyConfig(), **proxy)
        config = config or host_config("a", "b", "c")
        self.host = Host(config, self.proxy, self.box, self.events, self.clock, lambda address, key: FakeApi(self.box, address, key))

    def settle(self) -> float:
        """Let the host do all that it would do now; the time until which it then rests."""
        for _ in range(200):
            self.clock.rests_until = None
            self.host.turn()
            if self.clock.rests_until is not None:
                return self.clock.rests_until
        raise AssertionError("the host never comes to rest")

    def pass_time(self, seconds: float) -> None:
        """Move the time, with the host awake whenever it wants to be."""
        end = self.clock.monotonic() + seconds
        while True:
            until = self.settle()
            now = self.clock.monotonic()
            if until > end:
                self.clock.advance(end - now)
                self.settle()
                return
            self.clock.advance(max(0.0, until - now))

    def client(self, engine: str = "a") -> Client:
        return Client(self.host, engine)

    def serve_one(self, engine: str = "a") -> None:
        client = self.client(engine)
        self.settle()
        client.granted().done()

    @property
    def state(self) -> str:
        return self.host.view()["state"]


@pytest.fixture
def lines(monkeypatch) -> list[str]:
    """What is logged."""
    logged: list[str] = []
    monkeypatch.setattr(llmguard, "log", lambda text, priority=llmguard.INFO: logged.append(text))
    return logged


# ----- starting and switching


def test_the_first_request_starts_the_engine_and_is_let_in(lines):
    bench = Bench()
    client = bench.client("a")
    assert client.waits()
    bench.settle()
    client.granted()
    assert bench.box.ops() == [("start", "a")]
    assert bench.state == "ready" and bench.host.view()["engine"] == "a" and bench.host.view()["in_flight"] == 1
    assert "host a9: switching to engine a" in lines and "host a9: engine a is ready" in lines


def test_a_request_for_an_engine_that_is_up_goes_straight_in():
    bench = Bench()
    bench.serve_one("a")
    calls = list(bench.box.calls)
    for _ in range(3):
        bench.client("a").granted()
    assert bench.box.calls == calls, "the fast path asks nobody"
    assert bench.host.view()["in_flight"] == 3


def test_what_somebody_else_runs_is_never_started_stopped_or_waited_for():
    bench = Bench()
    bench.box.down = HostDown("host a9 is down")
    bench.client("web").granted()
    assert bench.box.calls == []


def test_requests_for_the_same_engine_share_one_switch():
    bench = Bench()
    clients = [bench.client("a") for _ in range(5)]
    bench.settle()
    for client in clients:
        client.granted()
    assert bench.box.ops() == [("start", "a")]


def test_a_queue_is_served_a_a_b_b_not_a_b_a_b():
    bench = Bench()
    order = "a b a b c a".split()
    clients = [(engine, bench.client(engine)) for engine in order]
    for engine in ("a", "b", "c"):
        bench.settle()
        for name, client in clients:
            if name == engine:
                client.granted().done()
    assert bench.box.ops("start") == [("start", "a"), ("start", "b"), ("start", "c")]


def test_newcomers_for_what_is_up_queue_behind_a_pending_switch():
    bench = Bench()
    first = bench.client("a")
    bench.settle()
    first.granted()
    other = bench.client("b")
    late = bench.client("a")
    bench.settle()
    assert other.waits() and late.waits() and bench.state == "draining"
    first.done()
    bench.settle()
    other.granted()
    assert late.waits()
    other.done()
    bench.settle()
    late.granted()
    assert bench.box.ops("start") == [("start", "a"), ("start", "b"), ("start", "a")]


def test_nothing_is_switched_under_a_request_in_flight():
    bench = Bench()
    streams = [bench.client("a") for _ in range(2)]
    bench.settle()
    other = bench.client("b")
    for stream in streams:
        bench.pass_time(3600)
        assert bench.box.running == "a" and ("start", "b") not in bench.box.calls
        stream.granted().done()
    assert "still in other use" in other.refused(), "he waited for longer than the queue's timeout"
    bench.serve_one("b")
    assert bench.box.running == "b"


def test_a_lease_given_back_twice_counts_once():
    bench = Bench()
    one, two = bench.client("a"), bench.client("a")
    bench.settle()
    one.granted().done()
    one.done()
    bench.client("b")
    bench.settle()
    assert bench.box.running == "a", "the other request still runs"
    two.granted().done()
    bench.settle()
    assert bench.box.running == "b"


def test_an_engine_that_loads_is_waited_for_and_what_waits_is_told_that_it_can_only_fail_now():
    bench = Bench()
    bench.box.load_time = 42.0
    client = bench.client("a")
    begun = bench.clock.monotonic()
    bench.settle()
    client.granted()
    assert 42.0 <= bench.clock.monotonic() - begun < 43.0


def test_loading_returns_once_the_engine_is_started_not_once_it_is_ready():
    bench = Bench()
    returned = threading.Event()
    thread = threading.Thread(target=lambda: (bench.host.load("a", "m-a", lambda committed: None), returned.set()), daemon=True)
    thread.start()
    eventually(lambda: bench.host.view()["queued"])

    def look_at_it() -> None:
        assert returned.wait(PATIENCE), "it does not wait for the engine to be ready"

    bench.box.load_time = 5.0
    bench.box.script["status"] = [lambda: None, look_at_it]  # the look before the start, and the one while it loads
    bench.settle()
    assert returned.is_set() and bench.state == "ready" and bench.host.view()["in_flight"] == 0


@pytest.mark.parametrize("why", ["idle", "unload"])
def test_who_comes_while_the_engine_is_being_stopped_waits_and_finds_it_started_again(why):
    bench = Bench(idle_stop=900.0)
    bench.serve_one("a")
    came: list[Client] = []

    def somebody_comes() -> None:
        came.append(bench.client("a"))
        assert came[0].waits() and bench.state == "stopping"

    bench.box.script["stop"] = [somebody_comes]
    if why == "unload":
        bench.host.unload("a", 0.0)
    bench.pass_time(900 if why == "idle" else 0)
    came[0].granted()
    assert bench.box.ops() == [("start", "a"), ("stop", ""), ("start", "a")]


def test_who_comes_for_the_engine_that_a_switch_is_stopping_waits_for_the_switch_back():
    bench = Bench()
    bench.serve_one("a")
    came: list[Client] = []
    other = bench.client("b")
    bench.box.script["start"] = [lambda: came.append(bench.client("a"))]
    bench.settle()
    other.granted()
    assert came[0].waits()
    other.done()
    bench.settle()
    came[0].granted()
    assert bench.box.ops("start") == [("start", "a"), ("start", "b"), ("start", "a")]


# ----- the queue's end


def test_who_waits_for_too_long_is_refused_at_the_exact_second():
    bench = Bench(queue_timeout=600.0)
    stream = bench.client("a")
    bench.settle()
    stream.granted()
    waiting = bench.client("b")
    bench.pass_time(599.999)
    assert waiting.waits()
    bench.pass_time(0.001)
    assert waiting.refused() == "host a9: GPU is busy: still in other use after 10m0s"
    assert waiting.error.status == 423 and waiting.error.retry is False
    bench.client("a").granted()


def test_a_client_that_gives_up_leaves_the_queue_and_switches_nothing():
    bench = Bench()
    stream = bench.client("a")
    bench.settle()
    other = bench.client("b")
    late = bench.client("a")
    other.leave()
    bench.settle()
    late.granted()
    assert bench.host.view()["queued"] == 0 and bench.box.ops("start") == [("start", "a")]
    stream.done()
    late.done()


def test_a_client_that_gives_up_while_nobody_else_waits_lets_the_next_one_straight_in():
    bench = Bench()
    bench.serve_one("a")
    stream = bench.client("a")
    other = bench.client("b")
    other.leave()
    bench.client("a").granted()
    stream.granted()


def test_a_place_that_is_given_up_in_the_moment_it_is_granted_is_given_back():
    bench = Bench()

    def waiting(committed: bool) -> None:
        bench.settle()  # granted now, and the client leaves before he knows
        raise GaveUp

    with pytest.raises(GaveUp):
        bench.host.acquire("a", waiting)
    assert bench.host.view()["in_flight"] == 0 and bench.box.running == "a"
    bench.client("b")
    bench.settle()
    assert bench.box.running == "b", "nothing holds it up"


# ----- 423 and 500


def test_a_gpu_that_is_held_is_refused_in_the_words_of_the_journal():
    bench = Bench()
    bench.box.owners = [{"kind": "queue", "text": "bench job queue ~/jobs/running changed 34s ago (the runner may start its next job)"}]
    client = bench.client("a")
    bench.settle()
    assert client.refused() == (
        "switching host a9 to engine a failed: host a9: GPU is busy, not switching: "
        "bench job queue ~/jobs/running changed 34s ago (the runner may start its next job)"
    )
    assert client.error.status == 423 and client.error.retry is False
    assert bench.host.view()["owners"] == bench.box.owners


def test_a_refusal_holds_no_pid():
    bench = Bench()
    bench.box.owners = [{"kind": "process", "text": "python3 pid 4242 of user bob holds 9.5 GiB"}]
    client = bench.client("a")
    bench.settle()
    assert "4242" not in client.refused() and "python3" in client.refused()


def test_a_held_gpu_is_asked_about_again_by_the_next_request_without_a_back_off():
    bench = Bench()
    bench.box.owners = [{"kind": "x", "text": "somebody"}]
    client = bench.client("a")
    bench.settle()
    client.refused()
    bench.box.owners = []
    bench.serve_one("a")
    assert bench.box.running == "a"


def test_a_refused_switch_leaves_what_runs_as_it_is():
    bench = Bench()
    bench.serve_one("a")
    bench.box.owners = [{"kind": "x", "text": "somebody"}]
    other = bench.client("b")
    bench.settle()
    other.refused()
    bench.client("a").granted()
    assert bench.box.running == "a" and bench.box.ops() == [("start", "a"), ("start", "b")]


def test_an_agent_that_works_for_somebody_else_is_no_owner_and_no_failure_of_the_engine():
    bench = Bench()
    text = "the agent is busy: agent: stop (pid 7) since 2026-10-25T13:37:34Z"
    bench.box.script["start"] = [{"ok": False, "error": {"type": "GpuBusy", "text": text}}]
    client = bench.client("a")
    bench.settle()
    assert "GPU is busy, not switching: the agent is busy: agent: stop" in client.refused()
    assert bench.host.view()["owners"] == []
    bench.serve_one("a")


def test_an_agent_that_applies_not_every_guard_is_an_owner_and_is_sent_no_start():
    bench = Bench(host_config("a", bench_port=8099))
    old = {"ok": True, "agent": "0.0.1", "active": None, "foreign": [], "checked": ["gpu"]}
    bench.box.script["status"] = [old]
    client = bench.client("a")
    bench.settle()
    assert "the agent on host a9 predates bench_port: run `llmguard.py engine install a9`" in client.refused()
    assert client.error.status == 423 and bench.box.ops() == []


def failed(text: str = "unit is masked") -> dict:
    return {"ok": False, "error": {"type": "AgentError", "text": text}}


def test_a_start_that_fails_is_an_engine_failure_with_the_reason(lines):
    bench = Bench()
    bench.box.script["start"] = [failed("systemctl start x.service: Unit x.service is masked.")]
    client = bench.client("a")
    bench.settle()
    said = "switching host a9 to engine a failed: host a9: systemctl start x.service: Unit x.service is masked."
    assert client.refused() == said and client.error.status == 500 and client.error.retry is False
    assert f"{said}; not tried again for 10s" in lines
    assert bench.host.failure("a") is client.error or str(bench.host.failure("a")) == said


def test_an_engine_that_ends_while_it_loads_fails_with_its_last_lines():
    bench = Bench()
    bench.box.load_time = 100.0
    bench.box.log = ["one", "two", "CUDA error: out of memory"]

    def die() -> None:
        bench.box.running, bench.clock.loading = None, False

    bench.box.script["status"] = [lambda: None, die]
    client = bench.client("a")
    bench.settle()
    assert client.refused() == "host a9: engine a ended while it started; its last lines: one | two | CUDA error: out of memory"
    assert isinstance(client.error, EngineFailed)


def test_a_stranger_on_the_port_is_named_and_nobody_is_sent_there():
    bench = Bench()
    bench.box.script["status"] = [lambda: None, lambda: setattr(bench.box, "port", "stranger")]
    client = bench.client("a")
    bench.settle()
    assert client.refused() == "host a9: the port of engine a is served by nginx, not by it"


def test_an_agent_that_cannot_tell_is_not_reported_as_an_engine_that_ended():
    bench = Bench()
    bench.box.script["status"] = [lambda: None, failed("systemctl show did not end within 20s")]
    client = bench.client("a")
    bench.settle()
    assert "systemctl show did not end within 20s" in client.refused() and "ended while it started" not in client.refused()


def test_an_engine_that_is_not_ready_in_time_is_stopped_and_fails():
    bench = Bench()
    bench.box.load_time = 10_000.0
    client = bench.client("a")
    begun = bench.clock.monotonic()
    bench.settle()
    assert client.refused() == "host a9: engine a: not ready within 10m0s"
    assert 600.0 < bench.clock.monotonic() - begun < 602.0
    assert bench.box.running is None and bench.box.ops() == [("start", "a"), ("stop", "")]


def test_failed_starts_back_off_for_10_20_40_seconds_to_5_minutes_and_are_answered_from_memory_meanwhile():
    bench = Bench(queue_timeout=NEVER)
    for pause in (10, 20, 40, 80, 160, 300, 300):
        bench.box.script["start"] = [failed()]
        asked = bench.client("a")
        bench.settle()
        asked.refused()
        calls = bench.box.ops("start")
        bench.pass_time(pause - 0.001)
        early = bench.client("a")
        bench.settle()
        assert early.refused() == asked.refused() and bench.box.ops("start") == calls, "answered from memory"
        bench.pass_time(0.001)
    bench.serve_one("a")
    bench.serve_one("b")
    bench.box.script["start"] = [failed()]
    again = bench.client("a")
    bench.settle()
    again.refused()
    bench.pass_time(10)
    bench.serve_one("a")


def test_the_failure_of_one_engine_does_not_hold_up_another():
    bench = Bench()
    bench.box.script["start"] = [failed()]
    bad, good = bench.client("a"), bench.client("b")
    bench.settle()
    bad.refused()
    good.granted()


def test_a_failed_switch_does_not_send_anybody_to_an_engine_that_was_stopped_for_it():
    bench = Bench()
    bench.serve_one("a")
    bench.box.script["start"] = [failed()]
    other = bench.client("b")
    host, box = bench.host, bench.box
    box.running = None  # the agent stopped `a`, then could not start `b`
    while ("start", "b") not in box.calls:
        host.turn()
    other.refused()
    late = bench.client("a")
    assert late.waits(), "what was up is looked at first"
    bench.settle()
    late.granted()
    assert box.ops("start") == [("start", "a"), ("start", "b"), ("start", "a")]


def test_an_engine_that_comes_up_by_itself_after_a_failure_is_not_refused_from_memory():
    bench = Bench()
    bench.box.script["start"] = [failed()]
    client = bench.client("a")
    bench.settle()
    client.refused()
    bench.box.running = "a"  # somebody started it by hand
    bench.clock.advance(5)
    bench.host.suspect("a")
    bench.host.reconfigure(bench.host.config, bench.proxy)
    bench.serve_one("a")
    assert bench.box.ops("start") == [("start", "a")]
    assert bench.host.failure("a") is None


# ----- idle


def test_an_idle_engine_is_stopped_15_minutes_after_its_last_request_ended_not_began(lines):
    bench = Bench(idle_stop=900.0)
    stream = bench.client("a")
    bench.settle()
    stream.granted()
    bench.pass_time(3600)
    assert bench.box.running == "a", "a stream is no idleness"
    stream.done()
    bench.pass_time(899.999)
    assert bench.box.running == "a"
    bench.pass_time(0.001)
    assert bench.box.running is None and bench.box.ops("stop") == [("stop", "")]
    assert bench.state == "off" and "host a9: idle for 15m0s: stopping engine a" in lines and "host a9: engine a stopped" in lines


@pytest.mark.parametrize("tick", [30.0, 7200.0, NEVER])
def test_the_idle_stop_comes_at_its_exact_second_however_rarely_the_host_is_looked_at(tick):
    bench = Bench(idle_stop=900.0, tick=tick)
    stream = bench.client("a")
    bench.settle()
    stream.granted()
    bench.pass_time(100)
    stream.done()  # nobody wakes the host's thread for this
    bench.pass_time(899.999)
    assert bench.box.running == "a"
    bench.pass_time(0.001)
    assert bench.box.running is None


def test_each_request_puts_the_idle_stop_off():
    bench = Bench(idle_stop=900.0)
    for _ in range(4):
        bench.serve_one("a")
        bench.pass_time(800)
    assert bench.box.running == "a"
    bench.pass_time(100)
    assert bench.box.running is None


def test_an_engine_that_is_never_stopped_for_idleness_is_not():
    bench = Bench(idle_stop=NEVER)
    bench.serve_one("a")
    bench.pass_time(10 * 86400)
    assert bench.box.running == "a"


def test_a_host_that_was_never_used_is_never_sent_a_stop():
    bench = Bench(idle_stop=900.0)
    bench.pass_time(86400)
    assert bench.box.ops() == [] and len(bench.box.ops("status")) == 86400 // 30 + 1


def test_an_engine_that_runs_already_is_taken_over_and_not_stopped_as_long_as_nobody_asks_for_it(lines):
    bench = Bench(idle_stop=900.0)
    bench.box.running = "a"
    bench.pass_time(86400)
    assert bench.box.running == "a" and bench.box.ops() == []
    assert "host a9: engine a runs already: taken over" in lines
    bench.client("a").granted().done()
    bench.pass_time(900)
    assert bench.box.running is None, "it has served us: then it is ours to stop"


def test_requests_to_another_server_of_the_host_neither_make_an_engine_ours_nor_keep_it_awake():
    bench = Bench(idle_stop=900.0)
    bench.box.running = "a"
    bench.settle()
    bench.client("web").granted().done()
    bench.pass_time(86400)
    assert bench.box.running == "a", "it never served us"
    bench.client("a").granted().done()
    for _ in range(9):
        bench.pass_time(100)
        bench.client("web").granted().done()
    assert bench.box.running is None, "what the other server does is no use of this one"


def test_an_idle_stop_does_not_come_early_because_of_a_request_that_came_and_went_while_it_was_decided():
    bench = Bench(idle_stop=900.0)
    bench.serve_one("a")
    bench.box.hooks = [lambda: bench.host.acquire("a", lambda _: None).release()]  # while the engine is asked whether it is in use
    bench.pass_time(900)
    assert bench.box.running == "a"
    bench.pass_time(900)
    assert bench.box.running is None


def test_a_switch_whose_client_left_while_it_was_decided_is_not_made():
    bench = Bench()
    bench.serve_one("a")
    other = bench.client("b")
    bench.box.hooks = [other.leave]
    bench.settle()
    assert bench.box.ops("start") == [("start", "a")]


def test_a_failed_stop_is_not_called_a_stop(lines):
    bench = Bench(idle_stop=900.0)
    bench.serve_one("a")
    bench.box.script["stop"] = [failed("llama-server pid 4242 of an engine unit still runs after the stop")]
    bench.pass_time(900)
    assert "host a9: engine a stopped" not in lines and any("is not stopped: llama-server pid 4242" in line for line in lines)
    assert bench.host.view()["engine"] == "a"
    bench.client("a").granted().done()
    bench.pass_time(900)
    assert bench.box.running is None


# ----- others beside us


@pytest.mark.parametrize("why", ["idle", "switch", "unload"])
def test_whoever_uses_the_engine_beside_us_holds_its_stop_up(why):
    bench = Bench(idle_stop=900.0, tick=7200.0)
    bench.serve_one("a")
    bench.box.used_by_others = {"a"}
    if why == "switch":
        other = bench.client("b")
    if why == "unload":
        assert bench.host.unload("a", 0.0) is False
    bench.pass_time(900 if why == "idle" else 60)
    assert bench.box.running == "a" and bench.box.ops() == [("start", "a")]
    bench.box.used_by_others = set()
    bench.pass_time(llmguard.IN_USE_PAUSE)
    assert bench.box.running == ("b" if why == "switch" else None)
    if why == "switch":
        other.granted()


def test_after_drain_timeout_the_log_and_the_status_say_what_holds_a_stop_up(lines):
    bench = Bench(drain_timeout=60.0, tick=7200.0)
    bench.serve_one("a")
    bench.box.used_by_others = {"a"}
    assert bench.host.unload("a", 0.0) is False
    bench.pass_time(59)
    assert bench.host.view()["held_up"] is None
    bench.pass_time(60)
    text = "engine a is to stop, and is still in use by somebody beside this proxy"
    assert bench.host.view()["held_up"] == text and bench.box.running == "a"
    assert len([line for line in lines if text in line]) == 1, "one line"
    bench.box.used_by_others = set()
    bench.pass_time(2)
    assert bench.host.view()["held_up"] is None and bench.box.running is None


def test_an_engine_in_use_is_not_asked_again_within_a_second():
    bench = Bench(tick=NEVER)
    bench.serve_one("a")
    bench.box.used_by_others = {"a"}
    asked: list[float] = []
    bench.box.hooks = [lambda: asked.append(bench.clock.monotonic()) for _ in range(100)]
    bench.client("b")
    bench.pass_time(10)
    assert len(asked) == 11 and all(b - a >= 1.0 for a, b in zip(asked, asked[1:]))


def test_a_stream_on_one_engine_outlives_another_that_somebody_started_beside_it():
    """The agent stops every engine of ours in one go, so all that runs on any of them counts."""
    bench = Bench(idle_stop=60.0, tick=30.0)
    bench.serve_one("a")
    streaming = bench.client("a")
    bench.settle()
    streaming.granted()
    beside = {"ok": True, "agent": "0.1.0", "sha256": "abc", "checked": GUARDS, "foreign": [], "active": "b", "state": "running",
              "others": ["a"], "engine": {"pids": [7], "port": "ours"}, "bench_waits": [{"job": "00.job", "since": "now"}]}
    bench.box.script["status"] = [beside] * 40
    bench.pass_time(300)
    assert ("stop", "") not in bench.box.calls
    streaming.done()


def test_a_user_beside_us_on_a_second_engine_holds_the_stop_of_both_up():
    bench = Bench(tick=30.0)
    bench.serve_one("a")
    beside = {"ok": True, "agent": "0.1.0", "sha256": "abc", "checked": GUARDS, "foreign": [], "active": "a", "state": "running",
              "others": ["b"], "engine": {"pids": [4242], "port": "ours"}}
    bench.box.script["status"] = [beside] * 40
    bench.box.used_by_others = {"b"}
    bench.pass_time(30)
    bench.host.unload("a", 0.0)
    bench.pass_time(120)
    assert ("stop", "") not in bench.box.calls
    bench.box.used_by_others = set()
    bench.pass_time(2)
    assert ("stop", "") in bench.box.calls


@pytest.mark.parametrize("tells", [True, False, None])
def test_an_engine_that_does_not_tell_is_asked_about_at_its_box(tells):
    """No /slots, no /metrics: the agent counts who is connected. Our own kept connections are closed first."""
    bench = Bench(tick=7200.0)
    bench.serve_one("a")
    closed: list[bool] = []
    api = bench.host.api("a")
    api.in_use = lambda: None
    api.pool = SimpleNamespace(close=lambda: closed.append(True))
    words = {} if tells is None else {"in_use": tells}
    beside = {"ok": True, "agent": "0.1.0", "sha256": "abc", "checked": GUARDS, "foreign": [], "active": "a", "state": "running",
              "engine": {"pids": [4242], "port": "ours"}, **words}
    bench.box.script["status"] = [beside]
    other = bench.client("b")
    bench.settle()
    assert closed == [True]
    if tells is False:
        other.granted()
    else:
        assert other.waits() and bench.box.running == "a", "an agent that says nothing is no reason to cut anybody"


def test_a_box_that_cannot_be_asked_who_is_connected_does_not_lose_its_engine():
    bench = Bench(tick=7200.0)
    bench.serve_one("a")
    bench.host.api("a").in_use = lambda: None
    bench.host.api("a").pool = SimpleNamespace(close=lambda: None)
    bench.box.script["status"] = [HostDown("host a9 is down")]
    bench.client("b")
    bench.settle()
    assert bench.box.running == "a" and bench.box.ops() == [("start", "a")]


def test_a_second_proxys_stream_is_waited_for_as_in_a_switch(lines):
    """The other proxy switched to b and streams; ours believed the GPU to be free, and its start is answered by the box."""
    bench = Bench(tick=7200.0, queue_timeout=600.0)
    bench.serve_one("a")
    bench.box.running = "b"
    bench.box.script["start"] = [{"ok": False, "error": {"type": "GpuBusy", "text": "engine b is in use"}, "in_use": "b"}]
    bench.host.suspect("a")
    bench.host._look_due = NEVER
    bench.box.used_by_others = {"b"}
    client = bench.client("a")
    bench.pass_time(30)
    assert client.waits() and not client.committed and bench.box.running == "b"
    bench.box.used_by_others = set()
    bench.pass_time(2)
    client.granted()
    assert bench.box.running == "a"
    assert not any("failed" in line for line in lines)


# ----- an engine that crashes as often as systemd starts it again


def crashing(bench: Bench, count: int) -> dict:
    return {"ok": True, "agent": "0.1.0", "sha256": "abc", "checked": GUARDS, "foreign": [], "active": "a", "state": "restarting",
            "engine": {"pids": [], "port": "closed", "restarts": count}, "log": ["CUDA error: out of memory"]}


def test_a_start_that_ends_in_a_crash_loop_is_stopped_and_backs_off(lines):
    bench = Bench(tick=7200.0)
    bench.box.load_time = 1e9
    bench.box.script["status"] = [{**crashing(bench, 0), "active": None}, *(crashing(bench, count) for count in (0, 1, 2, 3))]
    client = bench.client("a")
    bench.settle()
    assert re.fullmatch("host a9: engine a was restarted 3 times in [0-9]+s; its last lines: CUDA error: out of memory", client.refused())
    assert isinstance(client.error, EngineFailed)
    assert bench.box.ops() == [("start", "a"), ("stop", "")], "systemd does not go on trying"
    again = bench.client("a")
    bench.settle()
    assert again.refused() == client.refused() and bench.box.ops() == [("start", "a"), ("stop", "")], "answered from memory"
    assert any("not tried again for 10s" in line for line in lines)


def test_a_crash_loop_shows_as_a_rate_in_the_status_and_once_in_the_log(lines):
    bench = Bench(tick=30.0)
    bench.box.script["status"] = [crashing(bench, count) for count in (100, 101, 102, 103, 104, 104, 104)]
    bench.settle()
    assert bench.host.view()["restarted"] is None, "how long ago the first hundred were is not known"
    bench.pass_time(30)
    assert bench.host.view()["restarted"] == "restarted 1 times in 30s" and not any("restarted" in line for line in lines)
    bench.pass_time(90)
    assert bench.host.view()["restarted"] == "restarted 4 times in 2m0s"
    assert [line for line in lines if "restarted" in line] == ["host a9: engine a was restarted 3 times in 1m30s"]
    bench.box.script["status"] = [crashing(bench, 104) for _ in range(40)]
    bench.pass_time(900)
    assert bench.host.view()["restarted"] is None, "that is over"


# ----- a proxy whose machine slept


def test_a_sleep_of_eight_hours_makes_no_burst_of_ticks_and_no_early_stop():
    """The wall clock jumps, the monotonic clock does not."""
    bench = Bench(idle_stop=900.0, tick=30.0)
    bench.serve_one("a")
    bench.pass_time(660)
    looks = len(bench.box.ops("status"))
    bench.clock._now += 8 * 3600
    bench.settle()
    bench.pass_time(30)
    assert len(bench.box.ops("status")) - looks <= 2
    bench.pass_time(209)
    assert bench.box.running == "a", "the idle stop had four minutes left"
    bench.pass_time(2)
    assert bench.box.running is None


def test_the_host_thread_outlives_a_line_that_died_in_the_sleep(lines):
    bench = Bench(tick=30.0)
    bench.serve_one("a")
    streaming = bench.client("a").granted()
    bench.clock._now += 8 * 3600
    bench.box.script["status"] = [HostDown("host a9 is down: no answer over ssh in time")]
    bench.pass_time(30)
    assert bench.state == "down" and bench.box.ops() == [("start", "a")], "nothing is stopped for that"
    bench.pass_time(30)
    assert bench.state == "ready" and "host a9: up again" in lines
    streaming.done()


# ----- down and up again


def test_a_host_that_does_not_answer_is_down_refuses_at_once_and_recovers(lines):
    bench = Bench()
    bench.box.down = HostDown("host a9 is down: no answer over ssh in time")
    client = bench.client("a")
    bench.settle()
    assert client.refused() == "host a9 is down" and client.error.status == 502
    assert bench.state == "down" and bench.box.ops() == [], "no start is tried on a host that does not even answer"
    bench.pass_time(300)
    assert len([line for line in lines if "down" in line]) == 1, "one line per streak"
    bench.box.down = None
    bench.serve_one("a")
    assert bench.state == "ready" and "host a9: up again" in lines


def test_a_host_that_went_down_is_looked_at_by_the_next_request_not_only_by_the_next_tick():
    bench = Bench(tick=3600.0, idle_stop=NEVER)
    bench.serve_one("a")
    bench.box.down = HostDown("host a9 is down: x")
    bench.pass_time(3600)
    assert bench.state == "down"
    bench.box.down = None
    client = bench.client("a")
    bench.settle()
    client.granted()
    assert bench.box.ops() == [("start", "a")], "and what ran there is still there"


def test_a_host_that_goes_down_in_the_middle_of_a_switch_is_down_and_the_engine_has_not_failed():
    for error in (HostDown("host a9 is down: x"), AgentError("the agent did not answer in time")):
        bench = Bench()
        bench.box.script["start"] = [error]
        client = bench.client("a")
        bench.settle()
        client.refused()
        assert isinstance(client.error, HostDown) and client.error.status == 502 and bench.host.failure("a") is None
        bench.serve_one("a")


def test_a_blocked_host_says_that_somebody_must_mend_it():
    bench = Bench()
    bench.box.down = llmguard.HostBlocked(problem="host a9: ssh is refused: put this machine's key into authorized_keys of me@a9")
    client = bench.client("a")
    bench.settle()
    assert "cannot be used" in client.refused() and client.error.status == 502
    assert bench.state == "blocked" and "authorized_keys" in bench.host.view()["problem"]


def test_an_engine_of_ours_is_still_ours_after_the_host_was_down_for_a_while():
    bench = Bench(idle_stop=900.0)
    bench.serve_one("a")
    bench.box.down = HostDown("host a9 is down: x")
    bench.pass_time(60)
    bench.box.down = None
    bench.pass_time(30 + 900)
    assert bench.box.running is None, "its idle stop comes late, but it comes"


def test_a_host_that_is_down_is_sent_no_stop():
    bench = Bench(idle_stop=900.0)
    bench.serve_one("a")
    bench.box.down = HostDown("host a9 is down: x")
    bench.pass_time(3600)
    assert bench.box.ops("stop") == []


# ----- in doubt


def test_after_a_connection_failed_the_engine_is_looked_at_before_anybody_is_sent_there():
    bench = Bench()
    bench.serve_one("a")
    bench.host.suspect("a")
    calls = len(bench.box.calls)
    client = bench.client("a")
    assert client.waits()
    bench.settle()
    client.granted()
    assert bench.box.calls[calls:] == [("status", "")], "looked at, found alive, not started again"


def test_an_engine_that_died_is_started_again_for_the_next_request(lines):
    bench = Bench()
    bench.serve_one("a")
    bench.box.running = None
    bench.host.suspect("a")
    client = bench.client("a")
    bench.settle()
    client.granted()
    assert bench.box.ops() == [("start", "a"), ("start", "a")]
    assert "host a9: engine a is gone: nobody here stopped it" in lines


def test_a_suspicion_about_another_engine_is_nothing():
    bench = Bench()
    bench.serve_one("a")
    bench.host.suspect("b")
    bench.host.suspect("web")
    bench.client("a").granted()


def test_an_engine_that_is_mute_in_a_long_prefill_is_not_sick():
    bench = Bench()
    bench.serve_one("a")
    bench.box.mute = True
    bench.pass_time(300)
    bench.client("a").granted()
    assert bench.box.ops() == [("start", "a")]


@pytest.mark.parametrize(("since", "stopped"), [("2026-10-25T12:00:00Z", False), ("2026-10-25T18:00:00Z", True), (None, False)])
def test_an_engine_that_a_new_proxy_meets_beside_a_job_goes_when_it_is_the_younger_one(since, stopped):
    """The first look cannot tell who holds the GPU: that decides nothing."""
    bench = Bench()
    bench.box.running, bench.box.since = "a", since
    bench.box.owners = [{"kind": "unknown", "text": "nvidia-smi hangs"}]
    bench.settle()
    bench.box.owners = [{"kind": "job", "text": "bench job 00-test.job is in running", "since": "2026-10-25T16:57:34Z"}]
    bench.pass_time(60)
    assert bool(bench.box.ops("stop")) is stopped


# ----- unload


def test_an_unload_waits_for_what_runs_and_keeps_newcomers_out_until_it_is_done():
    bench = Bench()
    stream = bench.client("a")
    bench.settle()
    stream.granted()
    assert bench.host.unload("a", 0.0) is False
    late = bench.client("a")
    bench.settle()
    assert late.waits() and bench.box.running == "a" and bench.state == "draining"
    stream.done()
    bench.settle()
    late.granted()
    assert bench.box.ops() == [("start", "a"), ("stop", ""), ("start", "a")]


def test_an_unload_says_when_it_is_gone(lines):
    bench = Bench()
    bench.serve_one("a")
    bench.host.unload("a", 0.0)
    bench.settle()
    assert bench.host.unload("a", 0.0) is True and bench.box.running is None
    assert "host a9: asked to unload: stopping engine a" in lines


def test_an_unload_of_what_is_not_up_touches_nothing():
    bench = Bench()
    bench.serve_one("a")
    assert bench.host.unload("b", 0.0) is True
    bench.settle()
    assert bench.box.running == "a"


def test_an_unload_of_what_is_just_loading_ends_its_start_without_a_back_off():
    bench = Bench()
    bench.box.load_time = 500.0
    bench.box.script["status"] = [lambda: None, lambda: bench.host.unload("a", 0.0)]
    client = bench.client("a")
    bench.settle()
    assert client.refused() == "host a9: engine a: it was unloaded"
    assert bench.box.running is None and bench.host.failure("a") is None


def test_an_unload_of_what_seems_to_load_and_has_run_all_along_spares_who_uses_it_beside_us():
    bench = Bench()
    bench.box.load_time = 500.0
    bench.box.used_by_others = {"a"}
    bench.box.script["status"] = [lambda: None, lambda: bench.host.unload("a", 0.0)]
    stops: list[list] = []
    bench.box.hooks = [lambda: stops.append(bench.box.ops("stop"))] * 3 + [bench.box.used_by_others.clear]
    client = bench.client("a")
    bench.settle()
    assert client.refused() == "host a9: engine a: it was unloaded"
    assert stops == [[], [], []] and bench.box.ops("stop") == [("stop", "")] and bench.box.running is None


def test_an_unload_and_a_waiting_switch_take_one_step():
    bench = Bench()
    stream = bench.client("a")
    bench.settle()
    bench.host.unload("a", 0.0)
    other = bench.client("b")
    stream.granted().done()
    bench.settle()
    other.granted()
    assert bench.box.ops() == [("start", "a"), ("start", "b")]


# ----- a new configuration


def test_a_new_configuration_touches_nothing_that_runs():
    bench = Bench(idle_stop=900.0)
    stream = bench.client("a")
    bench.settle()
    stream.granted()
    bench.host.reconfigure(host_config("a", "b"), replace(bench.proxy, idle_stop=60.0))
    bench.settle()
    assert bench.host.view()["in_flight"] == 1 and bench.box.ops() == [("start", "a")]
    bench.client("a").granted().done()
    stream.done()
    bench.pass_time(60)
    assert bench.box.running is None, "the new idle_stop holds, for an engine that was started under the old one"


def test_who_waits_for_an_engine_that_leaves_the_configuration_is_told_so_and_nobody_else_is():
    bench = Bench()
    stream = bench.client("a")
    bench.settle()
    gone, stays = bench.client("c"), bench.client("b")
    bench.host.reconfigure(host_config("a", "b"), bench.proxy)
    assert gone.refused() == "model on engine c of host a9 is not known here: it left the configuration"
    assert gone.error.status == 404 and stays.waits()
    stream.granted().done()
    bench.settle()
    stays.granted()


def test_an_engine_that_leaves_the_configuration_while_it_runs_is_left_alone(lines):
    bench = Bench(idle_stop=900.0)
    bench.serve_one("a")
    bench.host.reconfigure(host_config("b"), bench.proxy)
    bench.pass_time(3600)
    assert bench.box.running == "a" and bench.box.ops("stop") == []
    assert not any("is gone" in line for line in lines), "it is not: it is only no longer ours"
    with pytest.raises(UnknownModel):
        bench.host.acquire("a", lambda _: None)


def test_a_host_that_leaves_the_configuration_lets_go_of_who_waits():
    bench = Bench()
    client = bench.client("a")
    bench.host.close()
    assert "left the configuration" in client.refused()
    with pytest.raises(UnknownModel):
        bench.host.acquire("a", lambda _: None)


# ----- what is told


def test_each_change_is_told_in_llama_cpps_own_words():
    bench = Bench()
    bench.serve_one("a")
    bench.serve_one("b")
    told = [(event["model"], event["data"]["status"]) for event in bench.told.take() if event["event"] == "model_status"]
    assert told == [("m-a", "loading"), ("m-a", "loaded"), ("m-b", "loading"), ("m-a", "unloaded"), ("m-b", "loaded")]


def test_a_failed_start_is_told_as_failed():
    bench = Bench()
    bench.box.script["start"] = [failed()]
    client = bench.client("a")
    bench.settle()
    client.refused()
    assert [event["data"] for event in bench.told.take()][-1] == {"status": "unloaded", "host": "a9", "engine": "a", "failed": True}


def test_the_engine_states_are_llama_cpps():
    bench = Bench()
    states = []
    bench.box.load_time = 5.0
    bench.box.script["status"] = [lambda: None, lambda: states.append(bench.host.engine_state("a"))]
    assert bench.host.engine_state("a") == "unloaded" and bench.host.engine_state("web") == "loaded"
    bench.serve_one("a")
    assert states == ["loading"] and bench.host.engine_state("a") == "loaded" and bench.host.engine_state("b") == "unloaded"


# ----- its thread


def test_an_error_in_the_hosts_thread_is_logged_and_does_not_end_it(lines):
    clock = FakeClock()
    box = FakeBox(clock)
    clock.loading = False
    box.script["status"] = [RuntimeError("surprise"), RuntimeError("again")]
    host = Host(host_config("a"), ProxyConfig(), box, Events(), clock, lambda address, key: FakeApi(box, address, key))
    thread = threading.Thread(target=host.run, daemon=True)
    thread.start()
    client = Client(host, "a").granted()
    client.done()
    host.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert len([line for line in lines if "internal error, going on" in line and "surprise" in line]) == 1


def test_whoever_comes_or_is_done_wakes_the_hosts_thread():
    """It is never looked at by the clock here: what is not told to it does not happen."""
    clock = llmguard.Clock()
    box = FakeBox(clock)
    box.clock.loading = False
    proxy = ProxyConfig(tick=NEVER, idle_stop=NEVER)
    host = Host(host_config("a", "b"), proxy, box, Events(), clock, lambda address, key: FakeApi(box, address, key))
    thread = threading.Thread(target=host.run, daemon=True)
    thread.start()
    stream = Client(host, "a").granted()
    other = Client(host, "b")
    assert other.waits()
    stream.done()
    other.granted().done()
    leaver, late = Client(host, "a"), None
    leaver.granted()
    blocked = Client(host, "b")
    late = Client(host, "a")
    blocked.leave()
    late.granted()
    assert host.unload("a", 0.0) is False
    leaver.done()
    late.done()
    eventually(lambda: box.running is None, "unloaded")
    host.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_hosts_thread_serves_many_clients_at_once():
    """The real thread, the real condition, forty clients on three engines."""
    clock = FakeClock()
    clock.wait = lambda condition, seconds: condition.wait(min(seconds, 0.05))
    box = FakeBox(clock)
    clock.loading = False
    host = Host(host_config("a", "b", "c"), ProxyConfig(), box, Events(), clock, lambda address, key: FakeApi(box, address, key))
    wrong: list[str] = []

    def client(engine: str) -> None:
        for _ in range(3):
            lease = host.acquire(engine, lambda _: None)
            if box.running != engine:
                wrong.append(engine)
            lease.release()

    thread = threading.Thread(target=host.run, daemon=True)
    thread.start()
    crowd = [threading.Thread(target=client, args=(random.Random(n).choice("abc"),), daemon=True) for n in range(40)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join(PATIENCE)
        assert not one.is_alive()
    host.close()
    thread.join(PATIENCE)
    assert not wrong and host.view()["in_flight"] == host.view()["queued"] == 0


# ----- any order of events


class Baton:
    """Real threads of which exactly one runs at a time; who is next is drawn by a seed, so that a schedule can be run again.

    Threads hand the baton on wherever the real ones may be overtaken: while they wait, ask the agent or an engine, or are
    served. Time moves on when it is drawn, or when everybody waits for it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = FakeClock()
        self.parked: dict[str, tuple[threading.Event, object]] = {}  # who -> (his turn, what he waits for: a time or a Condition and a time)
        self.names = threading.local()
        self.trace: list[str] = []
        self.done = threading.Event()
        self.failure: BaseException | None = None
        self.steps = 0

    def start(self, name: str, body) -> None:
        turn = threading.Event()
        self.parked[name] = (turn, 0.0)

        def run() -> None:
            turn.wait(PATIENCE)
            self.names.me = name
            try:
                body()
            except BaseException as error:
                self.failure = self.failure or error
            self.next()

        threading.Thread(target=run, daemon=True).start()

    def pause(self, until: float = 0.0) -> None:
        """Let others go on; come back at any time from `until` on."""
        turn = threading.Event()
        self.parked[self.names.me] = (turn, until)
        self.next()
        turn.wait(PATIENCE)
        if not turn.is_set():
            raise AssertionError("the schedule stands still")

    def next(self) -> None:
        if not self.parked or self.failure or self.steps > 20_000:
            if self.steps > 20_000 and not self.failure:
                self.failure = AssertionError("nothing settles")
            self.done.set()
            return
        self.steps += 1
        now = self.clock.monotonic()
        ready = sorted(name for name, (_, until) in self.parked.items() if until <= now)
        later = sorted(until for _, until in self.parked.values() if until > now)
        if not ready or (later and later[0] - now < 5.0 and self.random.random() < 0.05):
            assert later and later[0] != NEVER, f"a wake-up was forgotten: {sorted(self.parked)}"
            self.clock.advance(later[0] - now)
            ready = sorted(name for name, (_, until) in self.parked.items() if until <= later[0])
        name = self.random.choice(ready)
        turn, _ = self.parked.pop(name)
        turn.set()

    def wake(self, names) -> None:
        for name in names:
            if name in self.parked:
                self.parked[name] = (self.parked[name][0], 0.0)

    def run(self) -> None:
        self.next()
        assert self.done.wait(PATIENCE), "the schedule stands still"


class BatonCondition:
    """A condition whose waiters come back only when they are notified or their time is over, and that says when it is held."""

    def __init__(self, baton: Baton) -> None:
        self.baton = baton
        self.owner: str | None = None
        self.waiting: set[str] = set()

    def __enter__(self) -> None:
        while self.owner is not None:
            self.baton.pause()
        self.owner = self.baton.names.me

    def __exit__(self, *_) -> None:
        self.owner = None

    def notify_all(self) -> None:
        assert self.owner == self.baton.names.me
        self.baton.wake(self.waiting)
        self.waiting.clear()

    def wait_until(self, until: float) -> None:
        me, self.owner = self.owner, None
        self.waiting.add(me)
        self.baton.pause(until)
        self.waiting.discard(me)
        self.__enter__()


class Schedule:
    """Clients, a host and a box that misbehaves, in an order that a seed draws."""

    def __init__(self, seed: int, trouble: bool) -> None:
        self.baton = baton = Baton(seed)
        self.random, self.trouble = baton.random, trouble
        self.clock = baton.clock
        self.clock.wait = lambda condition, seconds: condition.wait_until(self.clock.monotonic() + max(0.0, seconds))
        self.clock.sleep = lambda seconds: baton.pause(self.clock.monotonic() + seconds)
        self.running: str | None = None
        self.ready_at = 0.0
        self.served: dict[str, int] = {}  # engine -> requests that are served there now
        self.outcomes: list[str] = []
        proxy = ProxyConfig(queue_timeout=self.random.choice([60.0, 600.0]), idle_stop=self.random.choice([5.0, 900.0]), tick=self.random.choice([30.0, NEVER]))
        self.lane = Host(host_config("a", "b", "c"), proxy, self, Events(), self.clock, lambda address, key: ScheduleApi(self, address, key))
        self.lane._changed = BatonCondition(baton)

    def note(self, text: str) -> None:
        self.baton.trace.append(f"{self.clock.monotonic() - 1000:8.1f} {self.baton.names.me:>9}: {text}")

    def slow(self, what: str) -> None:
        """Something slow, during which everybody else may go on: never under the host's lock."""
        assert self.lane._changed.owner != self.baton.names.me, f"{what} under the lock"
        self.baton.pause(self.clock.monotonic() + self.random.choice([0.0, 0.0, 0.1, 2.0]))

    def may_stop(self, engine: str | None, why: str) -> None:
        assert not (engine and self.served.get(engine)), f"{why} while {self.served[engine]} requests run on {engine}"

    # the line to the agent

    def close(self) -> None:
        pass

    def call(self, ask: dict, seconds: float) -> dict:
        op, engine = ask["op"], ask.get("engine")
        self.note(f"{op} {engine or ''}")
        if op == "start" and self.running != engine:
            self.may_stop(self.running, "a switch")
        if op == "stop":
            self.may_stop(self.running, "a stop")
        self.slow("a call of the agent")
        draw = self.random.random() if self.trouble else 1.0
        if draw < 0.04:
            raise HostDown("host a9 is down: x")
        if draw < 0.06:
            raise AgentError("the agent did not answer in time")
        reply: dict = {"ok": True, "agent": "0.1.0", "sha256": "abc", "checked": GUARDS, "foreign": []}
        if op == "start" and 0.06 < draw < 0.12:
            return {**reply, "ok": False, "foreign": [{"kind": "x", "text": "somebody"}], "error": {"type": "GpuBusy", "text": "somebody"}}
        if op == "start" and self.running != engine:
            self.may_stop(self.running, "a switch")
            self.running = None
            if 0.12 < draw < 0.18:
                return {**reply, "ok": False, "error": {"type": "EngineFailed", "text": "no"}}
            self.running, self.ready_at = engine, self.clock.monotonic() + self.random.choice([0.0, 1.0, 30.0])
        if op == "stop":
            if 0.06 < draw < 0.2:
                return {**reply, "ok": False, "error": {"type": "AgentError", "text": "pid 1 still runs"}}
            self.may_stop(self.running, "a stop")
            self.running = None
        return {**reply, "active": self.running, "state": "running", "log": [], **({"engine": {"pids": [1], "port": "ours"}} if self.running else {})}

    # who does what

    def host_thread(self) -> None:
        self.lane.run()

    def client(self, engine: str) -> None:
        leaves_after = self.random.choice([None, None, None, 0, 3, 40])
        glances = 0

        def waiting(committed: bool) -> None:
            nonlocal glances
            glances += 1
            if glances == leaves_after:
                raise GaveUp
            self.baton.pause()

        self.baton.pause(self.clock.monotonic() + self.random.choice([0.0, 0.0, 1.0, 5.1, 6.0, 20.0, 100.0]))
        self.note(f"asks for {engine}")
        begun = self.clock.monotonic()
        try:
            lease = self.lane.acquire(engine, waiting)
        except (GuardError, GaveUp) as error:
            self.note(f"goes away: {error}")
            self.outcomes.append(type(error).__name__)
            return
        finally:
            limit = self.lane.proxy.queue_timeout + 600 + 60
            assert self.clock.monotonic() - begun < limit, "he waited for longer than a queue and a start may take"
        self.note(f"runs on {engine}")
        assert self.running == engine and self.clock.monotonic() >= self.ready_at, f"sent to {engine}, but {self.running} runs"
        self.served[engine] = self.served.get(engine, 0) + 1
        self.outcomes.append("served")
        for _ in range(self.random.choice([1, 1, 3])):
            self.baton.pause(self.clock.monotonic() + self.random.choice([0.0, 1.0, 50.0]))
            assert self.running == engine, f"{engine} was stopped under a request"
        self.served[engine] -= 1
        lease.release()

    def operator(self) -> None:
        for _ in range(self.random.choice([0, 1, 3])):
            self.baton.pause(self.clock.monotonic() + self.random.choice([0.0, 5.0, 60.0]))
            what = self.random.choice(["unload", "suspect", "reconfigure"])
            engine = self.random.choice("abc")
            self.note(f"{what} {engine}")
            if what == "unload":
                gone = self.lane.unload(engine, 700.0)
                self.note(f"unload {engine}: {gone}")
            elif what == "suspect":
                self.lane.suspect(engine)
            else:
                self.lane.reconfigure(self.lane.config, self.lane.proxy)

    def run(self) -> None:
        count = self.random.randint(1, 12)
        ended: list[int] = []

        def one(engine: str) -> None:
            self.client(engine)
            ended.append(1)

        def end() -> None:
            while len(ended) < count + 1:
                self.baton.pause(self.clock.monotonic() + 10.0)
            view = self.lane.view()
            assert view["queued"] == 0 and view["in_flight"] == 0, view
            self.baton.pause(self.clock.monotonic() + 2000.0)  # time for whatever is left to do
            view = self.lane.view()
            assert not self.trouble and self.running is None or self.trouble or "served" not in self.outcomes, "an idle engine is stopped in the end"
            self.lane.close()

        def operate() -> None:
            self.operator()
            ended.append(1)

        self.baton.start("host", self.host_thread)
        for n in range(count):
            engine = self.random.choice("aab" if self.random.random() < 0.5 else "abc")
            self.baton.start(f"client {n}", lambda engine=engine: one(engine))
        self.baton.start("operator", operate)
        self.baton.start("end", end)
        self.baton.run()


class ScheduleApi:
    """An engine's HTTP side in a schedule."""

    def __init__(self, schedule: Schedule, address, key: str) -> None:
        self.schedule, self.address, self.key = schedule, address, key
        self.engine = next((name for name, port in PORTS.items() if port == address.port), "web")

    def ready(self) -> bool:
        self.schedule.slow("a question to an engine")
        return self.schedule.running == self.engine and self.schedule.clock.monotonic() >= self.schedule.ready_at

    def in_use(self) -> bool:
        self.schedule.slow("a question to an engine")
        return self.schedule.trouble and self.schedule.random.random() < 0.1

    def models(self):
        self.schedule.slow("a question to an engine")

    def load(self, model: str) -> bool:
        return False


SEEDS = 150


@pytest.mark.parametrize("trouble", [False, True], ids=["calm", "trouble"])
def test_in_any_order_of_events_nobody_is_sent_to_an_engine_that_does_not_run_or_cut_off_and_all_settles(trouble, monkeypatch):
    logged: list[str] = []
    monkeypatch.setattr(llmguard, "log", lambda text, priority=llmguard.INFO: logged.append(text))
    for seed in range(SEEDS):
        logged.clear()
        schedule = Schedule(seed, trouble)
        try:
            schedule.run()
        except AssertionError as error:
            schedule.baton.failure = schedule.baton.failure or error
        errors = [line for line in logged if "internal error" in line]
        if schedule.baton.failure or errors:
            trace = "\n".join(schedule.baton.trace[-60:])
            pytest.fail(f"seed {seed}: {schedule.baton.failure!r} {errors[:1]}\n{trace}")
        if not trouble:
            assert set(schedule.outcomes) <= {"served", "GaveUp", "GpuBusy", "EngineFailed"}, (seed, schedule.outcomes)

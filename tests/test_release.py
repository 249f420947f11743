"""Section 9: a GPU is given back to a waiting job. The real Host and the real Agent on a toy box, a real queue folder, and a clock
that only the test moves."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest
from parts import FakeClock, ask, eventually
from sim import GIB, PORTS, ToyAgent, ToyBox, Unit

import llmguard
from llmguard import AgentError, EngineConfig, Events, GpuBusy, Host, HostBlocked, HostConfig, HostDown, Ledger, ProxyConfig, replace

JOB = "00-gpu-proxy-handback-test.job"
MODEL = "a9-ornith15-35b-q8"


class HandClock(FakeClock):
    """Only the test moves it. Where the host would wait it comes back, and `rests_until` says until when it would have; while an
    engine loads, waiting moves the time."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self.driver = threading.get_ident()
        self.rests_until: float | None = None
        self.host: Host | None = None
        self.asking = False

    def wait(self, condition, seconds: float) -> None:
        if threading.get_ident() != self.driver:
            condition.wait(0.003)
        elif self.host._doing is not None and not self.asking:
            self.advance(seconds)
        else:
            self.rests_until = self.monotonic() + seconds


class Site:
    """The box: its units, its queue, and the line to its agent. `calls` holds the ops that were sent."""

    def __init__(self, root: Path, clock: HandClock) -> None:
        self.clock = clock
        self.box = ToyBox(str(root))
        self.units = {name: Unit(name) for name in PORTS}
        self.agent = ToyAgent(self, str(root / "agent"), self.box, clock)
        self.jobs = root / "home/me/jobs"
        for folder in ("queue", "running", "done", "failed"):
            (self.jobs / folder).mkdir(parents=True)
        self.calls: list[str] = []
        self.trouble: Exception | None = None
        self.start_takes = self.load_takes = 0.0
        self.stuck = False  # what is stopped stays
        self.ready_at = 0.0
        self.next_pid: int | None = None
        self.mute = False
        self.others_use = False
        self.on_stop = self.on_look = lambda: None
        self.touch(clock.now() - 86400.0)

    # the line

    def call(self, request: dict, seconds: float) -> dict:
        self.calls.append(request["op"])
        if self.trouble:
            raise self.trouble
        if request["op"] == "status":
            self.on_look()
        return json.loads(json.dumps(self.agent.answer(json.loads(json.dumps(request)))))

    def close(self) -> None:
        pass

    def in_use(self, engine: str) -> bool:
        return self.others_use

    def sent(self, *ops: str) -> list[str]:
        return [op for op in self.calls if op in (ops or ("start", "stop"))]

    # the units

    def start_unit(self, name: str) -> None:
        self.clock.advance(self.start_takes)
        process = self.units[name].main = self.box.spawn("llama-server", self.next_pid)
        self.next_pid = None
        self.box.ports[PORTS[name]] = process.pid
        self.box.gpu[process.pid] = 36 * GIB
        self.ready_at = self.clock.monotonic() + self.load_takes - self.start_takes

    def stop_unit(self, name: str) -> None:
        self.on_stop()
        unit = self.units[name]
        unit.restarting = False
        process, unit.main = unit.main, None
        if process is None:
            return
        self.box.ports.pop(PORTS[name], None)
        if self.stuck:
            unit.stuck.append(process)
        else:
            self.box.kill(process.pid)

    def dies(self, name: str = "mainline") -> None:
        """What was stuck ends, what ran crashes."""
        unit = self.units[name]
        for process in unit.processes():
            self.box.kill(process.pid)
        unit.main, unit.stuck = None, []

    # the queue

    def touch(self, when: float | None = None) -> None:
        when = self.clock.now() if when is None else when
        os.utime(self.jobs / "running", (when, when))

    def log(self, *words: str) -> None:
        stamp = llmguard.timestamp(self.clock.now() + 3600)[:-1].replace("T", " ")  # the box's clock shows Central European Time
        with open(self.jobs / "runner.log", "a") as log:
            log.write(" ".join((stamp, *words)) + "\n")

    def put(self, job: str = JOB) -> None:
        (self.jobs / "queue" / job).write_text("sleep 5\n")
        self.log("queued", job)

    def waits(self, job: str = JOB, pid: int | None = None, comm: str = "llama-server") -> None:
        pid = pid or self.units["mainline"].main.pid
        self.log("gpu-wait", job, f"pid={pid}", f"comm={comm}")

    def begin(self, job: str = JOB) -> None:
        os.rename(self.jobs / "queue" / job, self.jobs / "running" / job)
        self.touch()
        self.log("start", job, "pid=2530400")

    def end(self, job: str = JOB) -> None:
        os.rename(self.jobs / "running" / job, self.jobs / "done" / job)
        self.touch()
        self.log("done", job, "seconds=10")


class Api:
    def __init__(self, site: Site, address, key: str) -> None:
        self.site, self.address, self.key = site, address, key
        self.engine = {port: name for name, port in PORTS.items()}[address.port]

    def ready(self) -> bool:
        up = self.site.units[self.engine].main is not None
        return up and self.site.clock.monotonic() >= self.site.ready_at and not self.site.mute

    def in_use(self) -> bool:
        return self.site.others_use

    def models(self):
        return None

    def load(self, model: str) -> bool:
        return False


def host_config(**more) -> HostConfig:
    engines = {name: EngineConfig(name=name, unit="llm-engine-" + name, port=port, models={name: name}) for name, port in PORTS.items()}
    engines["mainline"] = replace(engines["mainline"], models={MODEL: MODEL})
    more.setdefault("job_queue", {"path": "~/jobs", "settle": 120.0})
    return HostConfig(name="a9", address="127.0.0.1", engines=engines, **more)


class Lane:
    """A host on that box, driven by hand. `lines` is its log."""

    def __init__(self, tmp_path: Path, lines: list[str], **proxy) -> None:
        self.clock = HandClock(llmguard.parse_timestamp("2026-10-25T15:00:00Z"))
        self.site = Site(tmp_path, self.clock)
        self.state = tmp_path / "state"
        self.proxy = replace(ProxyConfig(), **proxy)
        self.config = host_config()
        self.lines = lines
        self.restart()

    def restart(self, downtime: float = 0.0) -> None:
        """The proxy's process ends, and another one begins."""
        self.clock.advance(downtime)
        self.events = Events()
        self.told = self.events.subscribe()
        self.ledger = Ledger(str(self.state), self.clock)
        api = lambda address, key: Api(self.site, address, key)
        self.host = Host(self.config, self.proxy, self.site, self.events, self.clock, api, self.ledger)
        self.clock.host = self.host

    def settle(self) -> float:
        """Let the host do all that it would do now; until when it then rests."""
        for _ in range(200):
            self.clock.rests_until = None
            self.host.turn()
            if self.clock.rests_until is not None:
                return self.clock.rests_until
        raise AssertionError("the host never comes to rest")

    def pass_time(self, seconds: float) -> None:
        """Move the time, with the host awake whenever it wants to be."""
        end = self.clock.monotonic() + seconds
        while (until := self.settle()) <= end:
            self.clock.advance(max(1e-6, until - self.clock.monotonic()))
        self.clock.advance(max(0.0, end - self.clock.monotonic()))
        self.settle()

    def look(self) -> None:
        """Something changed on the box: a follow event."""
        self.host.poke()
        self.settle()

    def acquire(self, engine: str = "mainline"):
        """A lease, or the refusal; while it queues the host works."""

        def waiting(committed: bool) -> None:
            self.clock.asking = False
            self.settle()
            self.clock.asking = True

        self.clock.asking = True
        try:
            return self.host.acquire(engine, waiting)
        finally:
            self.clock.asking = False

    def refused(self, engine: str = "mainline") -> str:
        with pytest.raises(GpuBusy) as refusal:
            self.acquire(engine)
        assert refusal.value.status == 423 and refusal.value.retry is False
        return str(refusal.value)

    def serve_one(self, engine: str = "mainline") -> None:
        self.acquire(engine).release()

    def running(self, name: str = "mainline") -> bool:
        return self.site.units[name].main is not None

    def kinds(self) -> list[str]:
        """What the listeners of /models/sse were told since the last time, but for what is told of each engine and owner."""
        events = [event for event in self.told.take() if event["event"] not in ("engine_started", "engine_stopped", "owner")]
        return [event["data"].get("status", event["event"]) for event in events]

    @property
    def view(self) -> dict:
        return self.host.view()

    def claims(self) -> list[str]:
        return [line for line in self.lines if line.endswith("engine stopped")]

    def file(self, name: str) -> dict:
        path = self.state / name
        return json.loads(path.read_text())["hosts"] if path.exists() else {}


@pytest.fixture
def lines(monkeypatch) -> list[str]:
    """What is logged."""
    logged: list[str] = []
    monkeypatch.setattr(llmguard, "log", lambda text, priority=llmguard.INFO: logged.append(text))
    monkeypatch.setenv("HOME", "/home/me")
    return logged


@pytest.fixture
def lane(tmp_path, lines) -> Lane:
    return Lane(tmp_path, lines)


@pytest.fixture
def waited_for(lane) -> Lane:
    """An engine of ours is up and idle, and a job's runner has just said that it waits for it. The host did not look yet."""
    lane.serve_one()
    lane.site.put()
    lane.site.waits()
    lane.kinds()
    return lane


# ----- an evening in October, from 16:33:53 to 16:58:28

WAIT = f"host a9: bench job {JOB} waits for the GPU since 2026-10-25 16:57:34 (held by pid 2530256)"
REFUSED = "host a9: GPU is busy, not switching: bench job queue ~/jobs/running changed 34s ago (the runner may start its next job)"

EVENING = [  # (when, who does what, what is then so)
    ("16:33:53", "nothing", {"state": "off", "owners": ["changed 59s ago"]}),
    ("16:33:54", "engine status", ["bench job queue ~/jobs/running changed 1m0s ago (the runner may start its next job)"]),
    ("16:34:53", "engine status", ["bench job queue ~/jobs/running changed 1m59s ago (the runner may start its next job)"]),
    ("16:34:54", "engine status", []),
    ("16:35:08", "engine status", []),
    ("16:56:49", "model load", (200, {"success": True})),
    ("16:57:01", "nothing", {"state": "ready", "engine": "mainline", "handover": None, "waits": []}),
    ("16:57:25", "the job is queued", {"state": "ready", "waits": []}),
    ("16:57:34", "gpu-wait", {"state": "ready", "engine": "mainline"}),
    ("16:57:38", "a tick", {"state": "handover", "engine": None, "stop_error": None}),
    ("16:57:39", "probe", (423, f"model {MODEL}: host a9: GPU is busy: handed to a waiting bench job")),
    ("16:57:44", "start", {"state": "handover", "engine": None}),
    ("16:57:54", "done", {"state": "handover", "engine": None}),
    ("16:58:07", "nothing", {"state": "handover"}),
    ("16:58:08", "nothing", {"state": "off", "handover": None}),
    ("16:58:28", "probe", (423, f"model {MODEL}: switching host a9 to engine mainline failed: {REFUSED}")),
]

JOURNAL = [
    ("16:56:49", "host a9: switching to engine mainline"),
    ("16:57:01", "host a9: engine mainline is ready"),
    ("16:57:38", WAIT + ": refusing new work, the engine stops once idle"),
    ("16:57:38", WAIT + ": engine stopped"),
    ("16:58:28", "host a9: switching to engine mainline"),
]


class Evening:
    """A whole proxy on that box: HTTP comes in by a socket, the host's thread is this one."""

    def __init__(self, tmp_path: Path, patch) -> None:
        self.clock = HandClock(self.at("16:33:53"))
        self.site = site = Site(tmp_path, self.clock)
        self.journal: list[tuple[str, str]] = []
        patch.setattr(llmguard, "log", lambda text, priority=llmguard.INFO: self.journal.append((self.time(), text)))
        patch.setattr(Host, "run", lambda host: None)
        patch.setattr(Host, "follow", lambda host: None)
        patch.setattr(llmguard, "Remote", lambda host, folder: site)
        patch.setattr(llmguard, "Host", lambda *args, **more: Host(*args, api=lambda address, key: Api(site, address, key), **more))
        config = llmguard.Config(ProxyConfig(listen=("127.0.0.1", 0)), {"a9": host_config()})
        self.state = tmp_path / "state"
        self.proxy = llmguard.Proxy(config, str(self.state), llmguard.OWN, self.clock)
        self.port = self.proxy.listener.getsockname()[1]
        self.host = self.clock.host = self.proxy.hosts["a9"]
        self.told = self.proxy.events.subscribe()
        self.proxy.start()
        site.start_takes, site.load_takes, site.next_pid = 2.0, 12.0, 2530256
        site.touch(self.at("16:32:54"))

    @staticmethod
    def at(time: str) -> float:
        return llmguard.parse_timestamp(f"2026-10-25T{int(time[:2]) - 1:02}{time[2:]}Z")  # Central European Time, as of that night

    def time(self) -> str:
        return llmguard.timestamp(self.clock.now() + 3600)[11:19]

    def turns(self) -> None:
        self.clock.rests_until = None
        while self.clock.rests_until is None or self.clock.rests_until <= self.clock.monotonic():
            self.clock.rests_until = None
            self.host.turn()

    def until(self, time: str) -> None:
        """Second by second."""
        while self.clock.now() < self.at(time):
            self.turns()
            if self.clock.now() < self.at(time):
                self.clock.advance(min(1.0, self.at(time) - self.clock.now()))
        self.turns()

    def http(self, method: str, path: str, body: dict | None = None):
        """An answer to a client, with the host working meanwhile."""
        answers: list = []
        url = f"http://127.0.0.1:{self.port}{path}"
        thread = threading.Thread(target=lambda: answers.append(ask(url, method, body)), daemon=True)
        thread.start()

        def answered() -> bool:
            if not answers:
                self.turns()
            return bool(answers)

        eventually(answered)
        return answers[0]

    def do(self, what: str):
        site = self.site
        if what == "engine status":
            return [owner["text"] for owner in self.host.status()["foreign"]]
        if what == "model load":
            reply = self.http("POST", "/models/load", {"model": MODEL})
            self.until("16:57:01")
            return reply.status, reply.json()
        if what == "probe":
            reply = self.http("POST", "/v1/chat/completions", {"model": MODEL, "messages": []})
            error = reply.error
            assert (error["code"], error["type"]) == (423, "gpu_busy") and reply.headers["x-should-retry"] == "false"
            return reply.status, error["message"]
        if what == "the job is queued":
            site.put()
        elif what == "gpu-wait":
            site.waits()
        elif what == "start":
            site.begin()
        elif what == "done":
            site.end()
        elif what == "a tick":
            self.host.poke()
        self.turns()
        view = self.host.view()
        view["owners"] = [owner["text"].split("running ")[-1].split(" (")[0] for owner in view["owners"]]
        return view


def test_the_evening_of_the_hand_back_is_replayed_to_the_second(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    evening = Evening(tmp_path, monkeypatch)
    try:
        for time, what, expected in EVENING:
            evening.until(time)
            got = evening.do(what)
            if isinstance(expected, dict):
                got = {key: got[key] for key in expected}
            assert got == expected, f"{time}, {what}"
            if time == "16:57:39":
                window = {"job": JOB, "since": "2026-10-25T15:57:38Z", "until": "2026-10-25T15:58:08Z"}
                assert json.loads((evening.state / "handover.json").read_text()) == {"version": 1, "hosts": {"a9": window}}
                assert evening.http("GET", "/status").json()["hosts"]["a9"]["handover"] == window
        assert evening.journal == JOURNAL
        assert evening.site.sent() == ["start", "stop", "start"], "and the last one was refused by the agent"
        assert not evening.site.units["mainline"].processes() and evening.site.box.gpu == {}
        events = [event["data"].get("status", event["event"]) for event in evening.told.take() if event["event"] != "owner"]
        events = [event for event in events if not event.startswith("engine_")]
        assert events == ["loading", "loaded", "release", "unloaded", "handover", "loading", "unloaded"]
        assert not (evening.state / "stop_error.json").exists()
    finally:
        evening.proxy.stop_accepting()


# ----- release


def test_a_waiting_job_gets_the_gpu_with_one_line_one_event_and_a_handover(waited_for):
    lane = waited_for
    lane.look()
    assert not lane.running() and lane.site.sent() == ["start", "stop"]
    assert len(lane.claims()) == 1 and lane.kinds() == ["release", "unloaded", "handover"]
    assert lane.view["state"] == "handover" and lane.file("handover.json")["a9"]["job"] == JOB


def test_without_a_follow_line_the_tick_sees_the_wait(waited_for):
    waited_for.pass_time(30.0)
    assert not waited_for.running() and len(waited_for.claims()) == 1


def test_a_stream_in_flight_outlives_a_release_and_new_work_is_refused_meanwhile(lane):
    stream = lane.acquire()
    lane.site.put()
    lane.site.waits()
    lane.look()
    assert lane.view["state"] == "draining" and lane.refused() == "host a9: GPU is busy: a job waits for it"
    assert lane.refused("other") == "host a9: GPU is busy: a job waits for it"
    lane.pass_time(3600.0)
    assert lane.running() and not lane.claims() and lane.view["in_flight"] == 1
    lane.settle()
    before = lane.clock.monotonic()
    woken = []
    real, lane.host._changed.notify_all = lane.host._changed.notify_all, lambda: woken.append(1)
    stream.release()
    lane.host._changed.notify_all = real
    assert woken, "the end of the last stream wakes the host: it does not sleep on to its tick"
    lane.settle()
    assert not lane.running() and len(lane.claims()) == 1 and lane.clock.monotonic() == before


def test_who_streams_from_the_engine_beside_the_proxy_holds_the_release_up(waited_for):
    waited_for.site.others_use = True
    waited_for.pass_time(300.0)
    assert waited_for.running() and not waited_for.site.sent("stop")
    waited_for.site.others_use = False
    waited_for.pass_time(llmguard.IN_USE_PAUSE)
    assert not waited_for.running()


def test_a_stream_on_an_engine_that_went_mute_behind_a_lost_line_is_not_cut(lane):
    """The box was out of reach for a moment; when it is back the engine is in a long prefill and answers nobody."""
    stream = lane.acquire()
    lane.site.trouble = HostDown("host a9 is down: x")
    lane.look()
    lane.site.trouble, lane.site.mute = None, True
    lane.site.put()
    lane.site.waits()
    lane.look()
    lane.pass_time(600.0)
    assert lane.running() and "stop" not in lane.site.calls
    assert "a job waits" in lane.refused("other"), "nor for another engine"
    stream.release()
    lane.settle()
    assert not lane.running() and len(lane.claims()) == 1


def test_a_switch_does_not_cut_a_stream_on_an_engine_that_went_mute_behind_a_lost_line(lane):
    lane.acquire()
    lane.site.trouble = HostDown("host a9 is down: x")
    lane.look()
    lane.site.trouble, lane.site.mute = None, True
    lane.look()
    assert "still in other use" in _refused_in_time(lane, "other")
    assert lane.running() and lane.site.sent() == ["start"]


def _refused_in_time(lane: Lane, engine: str) -> str:
    def waiting(committed: bool) -> None:
        lane.clock.asking = False
        lane.pass_time(30.0)
        lane.clock.asking = True

    lane.clock.asking = True
    with pytest.raises(GpuBusy) as refusal:
        lane.host.acquire(engine, waiting)
    lane.clock.asking = False
    return str(refusal.value)


def test_people_on_a_mute_engine_that_nobody_here_knows_to_be_up_are_not_cut_either(lane):
    lane.site.start_unit("mainline")
    lane.site.mute = lane.site.others_use = True
    lane.site.put()
    lane.site.waits()
    lane.pass_time(120.0)
    assert lane.running() and "stop" not in lane.site.calls


def test_starts_are_refused_as_long_as_a_wait_is_outstanding_also_long_after_the_handover(waited_for):
    waited_for.look()
    waited_for.pass_time(3600.0)
    assert waited_for.view["state"] == "off" and waited_for.refused() == "host a9: GPU is busy: a job waits for it"
    assert waited_for.site.sent() == ["start", "stop"]


def test_the_agent_itself_refuses_a_start_in_front_of_a_waiting_job(lane):
    lane.site.put()
    lane.site.waits(pid=4242)
    reply = lane.site.call({**lane.host._request("start"), "engine": "mainline"}, 1.0)
    assert reply["ok"] is False and reply["error"]["text"].startswith(f"bench job {JOB} waits for the GPU since 2026-10-25 16:00:00")
    assert not lane.running()


def test_a_release_never_repeats_for_an_engine_that_is_gone(waited_for):
    waited_for.look()
    waited_for.pass_time(3600.0)
    assert waited_for.site.sent("stop") == ["stop"] and len(waited_for.claims()) == 1


def test_a_job_that_waits_behind_somebody_elses_process_does_not_take_our_engine_until_that_ends(lane):
    lane.serve_one()
    other = lane.site.box.spawn("python3")
    lane.site.put()
    lane.site.waits(pid=other.pid, comm="python3")
    lane.look()
    lane.serve_one()
    assert lane.running() and lane.view["waits"][0]["foreign"] is True
    lane.site.box.kill(other.pid)
    lane.look()
    assert not lane.running() and len(lane.claims()) == 1, "its runner says nothing new: once per blocker"


def test_a_job_that_was_taken_back_is_not_released_for(waited_for):
    os.unlink(waited_for.site.jobs / "queue" / JOB)
    waited_for.look()
    assert waited_for.running() and not waited_for.site.sent("stop")
    waited_for.serve_one()


# ----- what one job cannot show


def test_a_second_job_that_waited_behind_the_first_still_counts_when_the_first_is_done(waited_for):
    """Its only gpu-wait was logged for an engine that is long gone."""
    lane = waited_for
    lane.site.put("01-next.job")
    lane.site.waits("01-next.job")
    lane.look()
    lane.pass_time(10.0)
    lane.site.begin()
    lane.pass_time(600.0)
    lane.site.end()
    lane.pass_time(600.0)
    assert lane.refused() == "host a9: GPU is busy: a job waits for it", "nothing runs, the settle window is over, no line is new"
    lane.site.begin("01-next.job")
    lane.look()
    assert "bench job 01-next.job is in ~/jobs/running" in lane.refused()
    lane.site.end("01-next.job")
    lane.pass_time(120.0)
    lane.serve_one()
    assert lane.site.sent("stop") == ["stop"]


def test_a_wait_that_was_logged_for_an_earlier_engine_stops_the_one_that_runs_now_under_another_pid(waited_for):
    lane = waited_for
    lane.site.dies()
    lane.site.start_unit("mainline")
    lane.look()
    assert not lane.running() and len(lane.claims()) == 1


def test_a_wait_that_was_logged_before_this_proxy_began_is_heard(waited_for):
    waited_for.restart()
    waited_for.settle()
    assert not waited_for.running() and len(waited_for.claims()) == 1


def test_the_second_job_is_named_when_the_first_waits_for_somebody_else(waited_for):
    lane = waited_for
    other = lane.site.box.spawn("python3")
    lane.site.waits(pid=other.pid, comm="python3")
    lane.site.put("01-next.job")
    lane.site.waits("01-next.job")
    lane.look()
    assert "bench job 01-next.job waits" in lane.claims()[0] and lane.view["handover"]["job"] == "01-next.job"


# ----- handover


def test_a_handover_refuses_to_the_exact_second_though_the_agent_calls_the_gpu_free(waited_for):
    lane = waited_for
    lane.look()
    os.unlink(lane.site.jobs / "queue" / JOB)
    lane.look()
    lane.pass_time(29.99)
    assert lane.refused() == "host a9: GPU is busy: handed to a waiting bench job" and lane.site.sent("start") == ["start"]
    lane.pass_time(0.02)
    lane.serve_one()
    assert lane.running()


@pytest.mark.parametrize("downtime", [0.0, 12.0, 29.0])
def test_a_handover_survives_a_restart_of_the_proxy(waited_for, downtime):
    lane = waited_for
    lane.look()
    os.unlink(lane.site.jobs / "queue" / JOB)
    lane.restart(downtime)
    lane.settle()
    assert lane.view["state"] == "handover" and lane.view["handover"]["job"] == JOB
    assert lane.refused() == "host a9: GPU is busy: handed to a waiting bench job"
    lane.pass_time(30.01 - downtime)
    lane.serve_one()


@pytest.mark.parametrize("jump", [-86400.0, -3.0, 0.0])
def test_a_handover_read_back_is_never_longer_than_it_may_be_whatever_the_clock_did(waited_for, jump):
    lane = waited_for
    lane.look()
    os.unlink(lane.site.jobs / "queue" / JOB)
    lane.clock._now += jump
    lane.site.touch(lane.clock.now() - 86400.0)
    lane.restart()
    assert lane.view["state"] == "handover"
    lane.pass_time(30.01)
    assert lane.view["state"] == "off" and lane.view["handover"] is None
    lane.serve_one()


def test_a_clock_that_jumps_during_a_handover_makes_it_neither_longer_nor_shorter(waited_for):
    lane = waited_for
    lane.look()
    os.unlink(lane.site.jobs / "queue" / JOB)
    for jump in (86400.0, -172800.0):
        lane.clock._now += jump
        lane.look()
        lane.pass_time(10.0)
        assert lane.view["state"] == "handover"
    lane.pass_time(10.01)
    assert lane.view["state"] == "off"


def test_when_a_clock_jumped_past_a_handover_the_box_still_guards_the_waiting_job(waited_for):
    lane = waited_for
    lane.look()
    lane.clock._now += 7200.0
    lane.restart()
    lane.settle()
    assert "a job waits for it" in lane.refused() and lane.site.sent("start") == ["start"]


# ----- a stop that is not proven

STUCK = "llama-server pid 2530256 of an engine unit still runs after the stop"


@pytest.fixture
def stuck(waited_for) -> Lane:
    """A release whose engine does not go away."""
    waited_for.site.stuck = True
    waited_for.look()
    return waited_for


def test_a_stop_that_is_not_proven_claims_nothing_and_is_shown(stuck):
    assert not stuck.claims() and stuck.view["handover"] is None and stuck.file("handover.json") == {}
    assert not {"unloaded", "handover"} & set(stuck.kinds())
    error = stuck.view["stop_error"]
    assert error["error"] == STUCK and error["attempts"] == 1 and error["since"] == error["last"]
    assert stuck.file("stop_error.json") == {"a9": error}
    assert [line for line in stuck.lines if STUCK in line] == [f"host a9: the engine is not stopped: {STUCK}"]
    assert not any("nobody here stopped it" in line for line in stuck.lines)


def test_it_is_retried_once_each_tick_and_logged_once(stuck):
    begun = stuck.clock.monotonic()
    stuck.pass_time(300.0)
    attempts = stuck.view["stop_error"]["attempts"]
    assert attempts == 1 + (stuck.clock.monotonic() - begun) // (30.0 + 10.0), "30 s between two, each with 11 looks"
    assert len([line for line in stuck.lines if STUCK in line]) == 1 and not stuck.claims()
    assert stuck.view["stop_error"]["since"] < stuck.view["stop_error"]["last"] == stuck.file("stop_error.json")["a9"]["last"]


def test_it_is_cleared_by_the_stop_that_succeeds_which_then_claims_what_it_proved(stuck):
    stuck.pass_time(60.0)
    stuck.kinds()
    stuck.site.dies()
    stuck.pass_time(60.0)
    assert stuck.view["stop_error"] is None and stuck.file("stop_error.json") == {}
    assert len(stuck.claims()) == 1 and stuck.view["state"] in ("handover", "off")
    assert stuck.kinds() == ["unloaded", "handover"]
    sent = len(stuck.site.sent("stop"))
    stuck.pass_time(600.0)
    assert len(stuck.site.sent("stop")) == sent and len(stuck.claims()) == 1


def test_it_is_cleared_when_the_host_is_down_and_a_new_streak_is_logged_again(stuck):
    stuck.site.trouble = HostDown("host a9 is down: x")
    sent = len(stuck.site.sent("stop"))
    stuck.pass_time(300.0)
    assert stuck.view["stop_error"] is None and stuck.file("stop_error.json") == {} and stuck.view["state"] == "down"
    assert len(stuck.site.sent("stop")) == sent, "a host that is down is sent no stop"
    stuck.site.trouble = None
    stuck.pass_time(60.0)
    assert stuck.view["stop_error"]["error"] == STUCK and len([line for line in stuck.lines if STUCK in line]) == 2


def test_it_is_kept_while_the_host_is_blocked(stuck):
    stuck.site.trouble = HostBlocked("host a9: its host key is not the known one")
    sent = len(stuck.site.sent("stop"))
    stuck.pass_time(300.0)
    assert stuck.view["state"] == "blocked" and stuck.view["stop_error"]["error"] == STUCK
    assert stuck.file("stop_error.json")["a9"]["error"] == STUCK and len(stuck.site.sent("stop")) == sent
    stuck.site.trouble = None
    stuck.site.dies()
    stuck.pass_time(60.0)
    assert stuck.view["stop_error"] is None and len(stuck.claims()) == 1


def test_it_survives_a_restart_of_the_proxy_and_is_finished_by_the_next_one(stuck):
    stuck.restart(5.0)
    assert stuck.view["stop_error"]["error"] == STUCK
    stuck.settle()
    stuck.site.dies()
    os.unlink(stuck.site.jobs / "queue" / JOB)
    stuck.pass_time(60.0)
    assert stuck.view["stop_error"] is None and stuck.file("stop_error.json") == {}
    assert not stuck.claims() and stuck.lines[-1] == "host a9: nothing of our engines is left"
    assert stuck.view["handover"] is None, "no job waits any more"


@pytest.mark.parametrize("entry", [{"error": "x"}, {}, {"attempts": "many", "since": None}, {"attempts": 7}], ids=str)
def test_an_entry_that_somebody_edited_is_survived(stuck, entry):
    (stuck.state / "stop_error.json").write_text(json.dumps({"version": 1, "hosts": {"a9": entry}}))
    stuck.restart()
    stuck.pass_time(100.0)
    error = stuck.view["stop_error"]
    assert error["error"] == STUCK and error["since"] and error["attempts"] > (7 if entry.get("attempts") == 7 else 0)
    stuck.site.dies()
    stuck.pass_time(100.0)
    assert stuck.view["stop_error"] is None


def test_a_stop_whose_answer_was_lost_is_not_a_proven_one(waited_for):
    lane = waited_for
    real = lane.site.call

    def call(request: dict, seconds: float) -> dict:
        reply = real(request, seconds)
        if request["op"] == "stop":
            lane.site.call = real
            raise AgentError("the agent did not answer in time")
        return reply

    lane.site.call = call
    lane.look()
    assert not lane.running() and not lane.claims() and lane.view["stop_error"]["error"] == "the agent did not answer in time"
    lane.pass_time(30.0)
    assert len(lane.claims()) == 1 and lane.view["stop_error"] is None and lane.view["state"] == "handover"


def test_an_engine_that_something_starts_during_the_stop_is_not_called_stopped(waited_for):
    lane = waited_for
    lane.site.on_stop = lambda: lane.running("other") or lane.site.start_unit("other")
    lane.look()
    assert not lane.claims() and "engine other runs after the stop" in lane.view["stop_error"]["error"]
    lane.site.on_stop = lambda: None
    lane.pass_time(30.0)
    assert len(lane.claims()) == 1 and not lane.running("other")


def test_an_idle_stop_that_is_not_proven_is_retried_too_also_where_idle_engines_are_never_stopped(tmp_path, lines):
    lane = Lane(tmp_path, lines, idle_stop=llmguard.NEVER)
    lane.serve_one()
    lane.site.stuck = True
    lane.host.unload("mainline", 0.0)
    lane.pass_time(100.0)
    assert lane.view["stop_error"]["attempts"] > 1
    lane.site.dies()
    lane.pass_time(60.0)
    assert lane.view["stop_error"] is None


def test_a_stop_that_is_not_wanted_any_more_does_not_hit_the_next_engine(lane):
    """An idle stop that was not proven; then somebody asks for another engine, whose start proves it."""
    lane.serve_one()
    lane.site.stuck = True
    lane.host.unload("mainline", 0.0)
    lane.settle()
    assert lane.view["stop_error"]
    lane.site.stuck = False
    lane.site.dies()
    sent = len(lane.site.sent("stop"))
    lane.serve_one("other")
    assert lane.view["stop_error"] is None and lane.file("stop_error.json") == {}
    lane.pass_time(600.0)
    assert lane.running("other") and len(lane.site.sent("stop")) == sent


# ----- engines that nobody here started, or that come back


def test_an_engine_that_was_started_by_hand_is_released_too(lane):
    lane.site.start_unit("mainline")
    lane.settle()
    lane.site.put()
    lane.site.waits()
    lane.look()
    assert not lane.running() and len(lane.claims()) == 1


def test_so_is_one_that_was_started_by_hand_after_an_idle_stop(lane):
    lane.serve_one()
    lane.pass_time(901.0)
    assert not lane.running()
    lane.site.start_unit("mainline")
    lane.site.put()
    lane.site.waits()
    lane.pass_time(30.0)
    assert not lane.running() and len(lane.claims()) == 1


def test_a_host_that_was_never_used_is_never_sent_a_stop(lane):
    lane.site.put()
    lane.site.waits(pid=4242)
    lane.pass_time(86400.0)
    assert lane.site.sent() == [] and not lane.claims() and lane.view["state"] == "off"


@pytest.mark.parametrize("how", ["seen to be gone", "between two looks", "restarting"])
def test_an_engine_that_comes_back_while_the_job_runs_is_stopped_again_and_reported(waited_for, how):
    lane = waited_for
    lane.look()
    lane.site.begin()
    lane.look()
    for again in (1, 2, 3):
        lane.kinds()
        if how == "restarting":
            lane.site.units["mainline"].restarting = True
        else:
            lane.site.start_unit("mainline")
        lane.look()
        assert not lane.running() and not lane.site.units["mainline"].restarting
        assert len(lane.claims()) == 1 + again and "came back while a bench job runs" in lane.claims()[-1]
        assert [kind for kind in lane.kinds() if kind in ("release", "handover")] == ["release", "handover"]
        lane.pass_time(60.0)
    assert lane.site.sent("stop") == ["stop"] * 4


def test_a_crash_loop_into_a_running_job_is_ended_though_each_look_finds_the_engine_up(lane):
    """A job of the other lane runs beside our engine; then the engine dies, and something starts it over between two looks."""
    lane.serve_one()
    lane.site.put()
    lane.site.begin()
    lane.look()
    assert lane.running(), "it was there first"
    lane.site.dies()
    lane.site.start_unit("mainline")
    lane.look()
    assert not lane.running() and "came back while a bench job runs" in lane.claims()[0]


def test_an_engine_that_was_there_before_the_line_was_lost_did_not_come_back(lane):
    lane.serve_one()
    lane.site.put()
    lane.site.begin()
    lane.look()
    for error in (HostDown("host a9 is down: x"), AgentError("the agent did not answer in time")):
        lane.site.trouble = error
        lane.look()
        lane.site.trouble = None
        lane.look()
    lane.pass_time(60.0)
    assert lane.running() and not lane.site.sent("stop")


def test_one_that_came_back_is_left_alone_once_the_job_is_done(waited_for):
    lane = waited_for
    lane.look()
    lane.site.begin()
    lane.look()
    lane.site.start_unit("mainline")
    lane.site.others_use = True
    lane.pass_time(60.0)
    assert lane.running() and lane.refused().startswith("host a9: GPU is busy: a bench job runs")
    lane.site.end()
    lane.look()
    lane.site.others_use = False
    lane.pass_time(60.0)
    assert lane.running() and lane.site.sent("stop") == ["stop"]


# ----- a job and a start at the same moment


def test_a_wait_that_is_seen_while_an_engine_loads_ends_its_start_and_those_who_wait_for_it_are_refused(lane):
    lane.site.load_takes = 60.0

    def job_comes() -> None:
        if lane.running() and lane.clock.monotonic() > lane.site.ready_at - 30.0 and not (lane.site.jobs / "queue" / JOB).exists():
            lane.site.put()
            lane.site.waits()

    lane.site.on_look = job_comes
    begun = lane.clock.monotonic()
    assert lane.refused() == "host a9: GPU is busy: a job waits for it"
    lane.settle()
    assert not lane.running() and len(lane.claims()) == 1 and lane.clock.monotonic() - begun < 45.0
    assert lane.host.failure("mainline") is None, "the engine has not failed"


def test_a_job_that_starts_while_an_engine_is_not_yet_on_the_gpu_is_given_way(lane):
    """Its runner looked before the engine held any memory. The benchmark comes first."""
    lane.site.load_takes = 60.0

    def job_comes() -> None:
        if lane.running() and not (lane.site.jobs / "done" / JOB).exists() and not os.listdir(lane.site.jobs / "running"):
            lane.site.put()
            lane.site.begin()

    lane.site.on_look = job_comes
    assert "a bench job runs" in lane.refused()
    lane.settle()
    assert not lane.running() and "was started as a bench job was" in lane.claims()[0]


def test_a_job_that_takes_the_gpu_while_another_engine_is_being_stopped_is_not_met(lane):
    lane.serve_one()

    def job_comes() -> None:
        lane.site.put()
        lane.site.begin()

    lane.site.on_stop = job_comes
    assert f"bench job {JOB} is in ~/jobs/running" in lane.refused("other")
    assert not lane.running("other") and not lane.running()


# ----- a disk that is full


def test_a_full_disk_neither_stops_a_release_nor_shortens_its_handover(waited_for, monkeypatch):
    lane = waited_for
    full = [True]
    real = llmguard.StateFile.write

    def write(path: str, data) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(llmguard.StateFile, "write", staticmethod(write))
    lane.look()
    os.unlink(lane.site.jobs / "queue" / JOB)
    assert len(lane.claims()) == 1 and lane.refused() == "host a9: GPU is busy: handed to a waiting bench job"
    assert "No space left" in lane.ledger.problem and lane.file("handover.json") == {}
    lane.pass_time(20.0)
    assert len([line for line in lane.lines if "cannot be written" in line]) == 1
    full[0] = False
    lane.look()
    assert lane.ledger.problem is None and lane.file("handover.json")["a9"]["job"] == JOB
    lane.restart()
    assert lane.view["state"] == "handover"


def test_files_that_a_crash_left_empty_or_torn_are_moved_aside_and_the_job_is_safe_all_the_same(waited_for):
    lane = waited_for
    lane.look()
    (lane.state / "handover.json").write_text("")
    (lane.state / "stop_error.json").write_text('{"version": 1, "hosts": {"a9": {"error": "llama-server pid 42')
    lane.restart()
    lane.settle()
    assert len([name for name in os.listdir(lane.state) if ".broken-" in name]) == 2
    assert len([line for line in lane.lines if "unreadable" in line]) == 2
    assert lane.view["stop_error"] is None and "a job waits" in lane.refused() and not lane.running()

"""Sections 2, 6, 7 and 9: the proxy, its agent or both are killed with SIGKILL at every step of what they do, and started again.

A real `serve` with its real agents, real processes as engines and a real job queue. Proxy and agents run from a launcher that
counts their steps: each call of the agent (before it, and when its answer is there), each system call of a write of a state
file, each thing that an agent does to its box. A first run without a kill tells which steps there are; then each of them is the
last one in turn. Of steps between which nothing changes that any process sees, one stands for all (WRITE, on_box).

The GPU is a file that its holder locks: an engine that finds it locked when it starts notes that, and a job that cannot lock it
did not get the GPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from parts import LLMGUARD, PATIENCE, ROOT, Serving, Stream, eventually, free_port, llama_command

import llmguard

ENGINE = r'''
"""A small model server: NAME PORT FOLDER. It notes in FOLDER/starts who it is and whether the GPU was free; a stream of its lasts
until there is FOLDER/enough."""
import fcntl, json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

name, port, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
gpu = os.open(folder + "/gpu", os.O_RDWR)
try:
    fcntl.flock(gpu, fcntl.LOCK_EX | fcntl.LOCK_NB)
    found = "free"
except BlockingIOError:
    found = "taken"
with open(folder + "/starts", "a") as starts:
    starts.write(f"{name} {found} {os.getpid()}\n")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    busy = 0

    def log_message(self, *args):
        pass

    def answer(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        slots = [{"is_processing": Handler.busy > 0}]
        known = {"/health": {}, "/props": {}, "/slots": slots, "/v1/models": {"data": [{"id": name}]}}
        self.answer(known.get(self.path, {}), 200 if self.path in known else 404)

    def do_POST(self):
        ask = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not ask.get("stream"):
            self.answer({"served by": name})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        Handler.busy += 1
        try:
            while not os.path.exists(folder + "/enough"):
                self.wfile.write(b"data: {}\n\n")
                self.wfile.flush()
                time.sleep(0.01)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            pass
        Handler.busy -= 1
        self.close_connection = True


server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
server.daemon_threads = True
server.serve_forever()
'''

LAUNCHER = r'''
"""llmguard.py, step by step: FOLDER, then its own words. FOLDER/steps, once it is there, gets the name of each step; FOLDER/plan
names one, and who dies at it. An agent that `rests` then goes on when there is FOLDER/go_on. While there is FOLDER/stuck, no
engine can be killed: it is stuck in the kernel."""
import contextlib, json, os, signal, subprocess, sys, threading, time

SELF, FOLDER = os.path.abspath(sys.argv[0]), sys.argv[1]
del sys.argv[1]
sys.path[:1] = [os.environ["LLMGUARD_ROOT"]]
import llmguard

AGENT = os.getpid() if sys.argv[-1] == "agent" else None
PROXY = os.getppid() if AGENT else os.getpid()
saving = threading.local()
kill = os.kill
op = ""


def step(name):
    with contextlib.suppress(FileNotFoundError):
        handle = os.open(FOLDER + "/steps", os.O_WRONLY | os.O_APPEND)
        os.write(handle, name.encode() + b"\n")
        os.close(handle)
    try:
        with open(FOLDER + "/plan") as file:
            plan = json.load(file)
    except FileNotFoundError:
        return
    if plan["step"] != name:
        return
    with open(FOLDER + "/plan", "w") as file:
        file.write(str(AGENT or PROXY))
    os.rename(FOLDER + "/plan", FOLDER + "/done")
    for pid in ([PROXY] if "proxy" in plan["dies"] else []) + ([AGENT] if "agent" in plan["dies"] else []):
        kill(pid, signal.SIGKILL)  # which may be this very process
        while (found := llmguard.Box().process(pid)) and not found.ended:
            time.sleep(0.002)
    while plan["rests"] and not os.path.exists(FOLDER + "/go_on"):
        time.sleep(0.005)


def around(owner, name, before=None, after=None):
    """Steps before and after each call of a function."""
    real = getattr(owner, name)

    def stepping(*args, **more):
        if before:
            step(before(*args))
        result = real(*args, **more)
        if after:
            step(after(*args))
        return result

    setattr(owner, name, stepping)


real_save = llmguard.StateFile.save


def save(file, content):
    name = os.path.basename(file.path).replace("here.a", "an engine").replace("here.b", "an engine")
    saving.name, saving.count = name, 0
    try:
        return real_save(file, content)
    finally:
        saving.name = None
        step(f"{op}{name}: saved")


llmguard.StateFile.save = save
for call in ("open", "write", "fsync", "close", "replace"):
    def stepping(*args, call=call, real=getattr(os, call), **more):
        if getattr(saving, "name", None):
            name, saving.name = saving.name, None  # a step is no part of it
            saving.count += 1
            step(f"{op}{name}: {saving.count} {call}")
            saving.name = name
        return real(*args, **more)
    setattr(os, call, stepping)

if os.path.exists(FOLDER + "/stuck"):
    llmguard.TERM_GRACE, llmguard.STOP_LOOKS = 0.0, 1
    os.kill = lambda pid, number: None

if AGENT:
    def answer(agent, ask, real=llmguard.Agent.answer):
        global op
        op = f"agent {ask['op']}: "
        return real(agent, ask)

    looks = iter(range(1, 99))
    llmguard.Agent.answer = answer
    around(llmguard.Agent, "_lock", lambda *_: op + "begins", lambda *_: op + "has the box's lock")
    around(llmguard.Agent, "_refuse_owners", None, lambda *_: f"{op}found no owner, look {next(looks)}")
    around(llmguard.Agent, "_stop", None, lambda *_: op + "the stop is proven")
    around(llmguard.CommandEngine, "stop", lambda *_: op + "stops an engine")
    around(llmguard.CommandEngine, "start", lambda *_: op + "starts an engine", lambda *_: op + "the engine is started")
    around(subprocess, "Popen", None, lambda argv, **_: op + "spawned " + os.path.basename(argv[0]))
    around(os, "kill", None, lambda pid, number: f"{op}sent {signal.Signals(number).name}")
    around(llmguard.StateFile, "remove", lambda *_: op + "forgets the engine", lambda *_: op + "the engine is forgotten")
    around(llmguard, "_answer", lambda *_: op + "answers", lambda *_: op + "has answered")
else:
    around(llmguard.Remote, "call", lambda _, ask, __: f"asks to {ask['op']}", lambda _, ask, __: f"{ask['op']} is answered")
    llmguard.Remote._agent_here = lambda remote: [
        sys.executable, "-S", "-E", "-s", SELF, FOLDER, "--state-dir", remote.folder, "agent",
    ]
sys.exit(llmguard.main(sys.argv[1:]))
'''


MODELS = ("a", "b")
JOB = "00-test.job"
OVER = "2026-10-25T16:58:08Z"


class Stage(Serving):
    """A host of this machine with the engines a and b, its job queue, and a proxy that dies when it is told to."""

    def __init__(self, folder: Path, **proxy) -> None:
        for name, text in (("engine.py", ENGINE), ("launcher.py", LAUNCHER), ("starts", ""), ("gpu", "")):
            (folder / name).write_text(text)
        self.jobs = folder / "jobs"
        for name in ("queue", "running", "done"):
            (self.jobs / name).mkdir(parents=True)
        engine = [sys.executable, "-S", "-E", str(folder / "engine.py")]
        engines = {
            name: {"command": [*engine, name, "{port}", str(folder)], "port": free_port(), "models": [name]} for name in MODELS
        }
        host = {"engines": engines, "job_queue": {"path": str(self.jobs), "settle": 0}}
        super().__init__({"proxy": proxy, "hosts": {"here": host}}, folder, env={"LLMGUARD_ROOT": str(ROOT)})
        self.known = 0  # so many starts were looked at
        self.gpu: int | None = None  # the job's hold on it

    # ----- the proxy

    def start(self) -> Stage:
        """A proxy that has looked at its host."""
        argv = [sys.executable, "-S", "-E", str(self.folder / "launcher.py"), str(self.folder), "--state-dir", str(self.state)]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen([*argv, "serve", "-c", str(self.config_path)], stderr=log, stdout=log, env=self.env)
        eventually(self._answers, f"serve listens; its log: {self.log()}")
        self.line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        eventually(lambda: self.host()["last_tick"], "it has looked")
        return self

    def status(self) -> dict:
        """On one connection: of each that was closed the agents have to read for a minute."""
        self.line.request("GET", "/status")
        return json.loads(self.line.getresponse().read())

    def steps(self) -> list[str]:
        """The steps since the last time, each once."""
        path = self.folder / "steps"
        found = list(dict.fromkeys(path.read_text().splitlines())) if path.exists() else []
        path.write_text("")
        return found

    def dies_at(self, step: str, *who: str, rests: bool = False) -> None:
        """At its next step of that name "proxy", "agent" or both are killed; an agent that is not may rest until go_on()."""
        for name in ("done", "go_on"):
            (self.folder / name).unlink(missing_ok=True)
        plan = self.folder / "plan"
        plan.with_suffix(".new").write_text(json.dumps({"step": step, "dies": who, "rests": rests}))
        plan.with_suffix(".new").rename(plan)

    def go_on(self) -> None:
        """Let the agent that rests come to its end."""
        (self.folder / "go_on").touch()
        with contextlib.suppress(FileNotFoundError):
            pid = int((self.folder / "done").read_text())
            eventually(lambda: not self.lives(pid, "launcher.py"), "it has ended")

    def died(self) -> None:
        """The kill was done."""
        eventually((self.folder / "done").exists, "the step is reached")

    def proxy_died(self) -> None:
        self.died()
        assert self.process.wait(PATIENCE) == -signal.SIGKILL

    def chat(self, model: str):
        return self.ask("POST", "/v1/chat/completions", {"model": model})

    def served(self, model: str) -> None:
        reply = self.chat(model)
        assert reply.status == 200 and reply.json() == {"served by": model}, (reply.body, self.log())

    def cut(self, model: str) -> None:
        """A request during which the proxy, or its agent, is killed: whatever comes of it."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            self.chat(model)

    # ----- the box

    def starts(self) -> list[str]:
        """Which engines were started since the last time; each found the GPU free."""
        found = (self.folder / "starts").read_text().splitlines()
        new, self.known = found[self.known:], len(found)
        assert all(" free " in line for line in new), new
        return [line.split()[0] for line in new]

    def engines(self) -> list[str]:
        """Those of all that were started which live."""
        started = [line.split() for line in (self.folder / "starts").read_text().splitlines()]
        return [name for name, _, pid in started if self.lives(int(pid), "engine.py")]

    def lives(self, pid: int, script: str) -> bool:
        process = llmguard.Box().process(pid)
        return bool(process and not process.ended) and str(self.folder / script) in llmguard.Box().argv(pid)

    def consistent(self) -> None:
        """What runs is what the proxy says, is known by its record, and is one at most; the state files are whole."""
        engines, up = self.engines(), self.host()["engine"]
        assert engines == ([up] if up else []), self.log()
        assert all(self.lives(self.engine_pid(name), "engine.py") for name in engines)
        files = [path for path in self.state.rglob("*") if path.is_file()]
        assert not [path.name for path in files if ".broken-" in path.name]
        assert all(json.loads(path.read_text())["version"] == 1 for path in files if path.suffix == ".json")

    # ----- the queue

    def note(self, event: str) -> None:
        with open(self.jobs / "runner.log", "a") as log:
            log.write(f"2026-10-25 16:57:34 {event} {JOB}\n")

    def job_waits(self) -> None:
        (self.jobs / "queue" / JOB).touch()
        self.note("queued")
        self.note("gpu-wait")

    def job_begins(self) -> None:
        """It gets the GPU."""
        self.gpu = os.open(self.folder / "gpu", os.O_RDWR)
        fcntl.flock(self.gpu, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (self.jobs / "queue" / JOB).rename(self.jobs / "running" / JOB)
        self.note("start")

    def job_ends(self) -> None:
        os.close(self.gpu)
        (self.jobs / "running" / JOB).rename(self.jobs / "done" / JOB)
        self.note("done")

    def entry(self, kind: str) -> dict | None:
        """What a state file says of the host."""
        path = self.state / f"{kind}.json"
        return json.loads(path.read_text())["hosts"].get("here") if path.exists() else None

    def window_passes(self) -> None:
        """A new proxy, for which a handover has ended meanwhile."""
        self.process.kill()
        self.process.wait(PATIENCE)
        path = self.state / "handover.json"
        if self.entry("handover"):
            path.write_text(path.read_text().replace(self.entry("handover")["until"], OVER))
        self.start()

    # ----- the end

    def stop(self) -> None:
        """End all that was started here; nobody else may be left."""
        self.go_on()
        if self.process:
            self.process.kill()
            self.process.wait(PATIENCE)
        scripts = lambda name: [pid for pid in llmguard.Box().pids() if self.lives(pid, name)]
        eventually(lambda: not scripts("launcher.py"), "the agents of a killed proxy end")
        for pid in scripts("engine.py"):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def stage(tmp_path):
    """make(**proxy's configuration) -> a Stage whose proxy runs."""
    made = []

    def make(**proxy) -> Stage:
        made.append(Stage(tmp_path, **proxy))
        return made[-1].start()

    yield make
    for each in made:
        each.stop()


@contextlib.contextmanager
def killed_at(step: str):
    """What fails in here failed after a kill at that step."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"killed at: {step}")
        raise


# Of the eight system calls of a write and its end these are the ones before which something changed that another process sees.
WRITE = ("1 open", "2 write", "5 replace", "6 open", "saved")


def of_proxy(steps: list[str]) -> list[str]:
    return [step for step in steps if not step.startswith("agent") and (".json: " not in step or step.endswith(WRITE))]


def of_agent(steps: list[str], op: str) -> list[str]:
    return [step for step in steps if step.startswith(f"agent {op}: ") and (".json: " not in step or step.endswith(WRITE))]


def on_box(steps: list[str], op: str) -> list[str]:
    """Of an agent's steps one for each state that it brings its box into."""
    writes = ("2 write", "5 replace", "saved")
    states = ("has the box's lock", "sent SIGTERM", "the engine is forgotten", "starts an engine", *writes, "has answered")
    found = [step for step in steps if step.startswith(f"agent {op}: ") and step.endswith(states)]
    assert len(found) == {"start": 8, "stop": 4}[op], found
    return found


def is_after(rename: str, step: str, steps: list[str]) -> bool:
    """Does that step come after the rename of the state file?"""
    (before,) = (number for number, each in enumerate(steps) if each.endswith(rename) and "agent" not in each)
    return steps.index(step) > before


# ----- a switch


class Switch:
    """A stage on which each request asks for the engine that does not run. `steps` are those of a switch without a kill."""

    def __init__(self, place: Stage) -> None:
        self.place = place
        place.served("a")
        place.steps()
        place.served("b")
        assert place.starts() == ["a", "b"]
        self.steps = place.steps()
        assert {"asks to start", "start is answered", "status is answered"} <= set(self.steps)
        assert {"agent start: sent SIGTERM", "agent start: an engine.json: saved", "agent start: answers"} <= set(self.steps)
        self.wanted = "a"

    def killed(self, step: str, *who: str, rests: bool = False) -> None:
        """A request for the other engine, and the kill in its midst."""
        self.place.dies_at(step, *who, rests=rests)
        self.place.cut(self.wanted)
        self.place.proxy_died() if "proxy" in who else self.place.died()

    def comes_true(self) -> None:
        """The next request for it is served, and over all it was started once, and nothing else was."""
        self.place.served(self.wanted)
        self.place.consistent()
        assert self.place.starts() == [self.wanted], self.place.log()
        self.wanted = "a" if self.wanted == "b" else "b"


@pytest.fixture
def switch(stage) -> Switch:
    return Switch(stage())


def test_a_proxy_that_is_killed_at_any_step_of_a_switch_has_it_finished_by_the_next_one(switch):
    for step in of_proxy(switch.steps):
        with killed_at(step):
            switch.killed(step, "proxy")
            switch.place.start()
            switch.comes_true()


def test_a_proxy_that_starts_while_the_agent_of_a_killed_one_is_in_the_midst_of_a_switch_waits_for_it(switch):
    """The agent rests in each state of its box in turn until the new proxy has looked and was asked, then goes on to its end."""
    for step in on_box(switch.steps, "start"):
        with killed_at(step):
            switch.killed(step, "proxy", rests=True)
            switch.place.start()
            replies: list = []
            client = threading.Thread(target=lambda: replies.append(switch.place.chat(switch.wanted)))
            client.start()
            eventually(lambda: replies or switch.place.host()["queued"], "it is served or waits")
            switch.place.go_on()
            client.join(PATIENCE)
            assert replies[0].status == 200, replies[0].body
            switch.comes_true()


def test_an_agent_that_is_killed_at_any_step_of_a_switch_costs_one_request(switch):
    for step in of_agent(switch.steps, "start"):
        with killed_at(step):
            switch.killed(step, "agent")
            switch.comes_true()


def test_a_proxy_that_is_killed_together_with_its_agent_in_a_switch_has_it_finished_by_the_next_one(switch):
    for step in on_box(switch.steps, "start"):
        with killed_at(step):
            switch.killed(step, "proxy", "agent")
            switch.place.start()
            switch.comes_true()
    switch.comes_true()
    switch.comes_true()
    assert not list(switch.place.state.rglob("*.tmp")), "what killed writers left is gone with the next write"


# ----- a release


class Release:
    """A stage on which a job waits for the GPU that an idle engine holds. `steps` are those of a release without a kill."""

    def __init__(self, place: Stage) -> None:
        self.place = place
        place.served("a")
        place.starts()
        place.steps()
        place.job_waits()
        eventually(lambda: place.host()["state"] == "handover", "the engine makes way")
        self.steps = place.steps()
        self.is_given_way()
        assert {"asks to stop", "stop is answered", "handover.json: 5 replace", "handover.json: saved"} <= set(self.steps)
        assert {"agent stop: sent SIGTERM", "agent stop: the stop is proven", "agent stop: answers"} <= set(self.steps)

    def killed(self, step: str, *who: str, rests: bool = False) -> None:
        place = self.place
        place.served("a")
        place.starts()
        place.dies_at(step, *who, rests=rests)
        place.job_waits()
        place.proxy_died() if "proxy" in who else place.died()

    def is_given_way(self) -> None:
        """The engine goes, nothing of ours was started until the job is done, and then whoever asks is served again."""
        place = self.place
        eventually(lambda: not place.engines(), "the engine makes way")
        eventually(lambda: not place.host()["stop_error"], "which is known")
        self.is_refused()
        place.job_begins()
        self.is_refused()
        place.job_ends()
        assert place.starts() == []
        place.consistent()
        place.window_passes()
        place.served("a")
        assert place.starts() == ["a"]

    def handover(self) -> dict | None:
        """The one that handover.json tells of, unless it is over."""
        entry = self.place.entry("handover")
        return entry if entry and entry["until"] != OVER else None

    def is_refused(self) -> None:
        for model in MODELS:
            reply = self.place.chat(model)
            assert reply.status == 423, (reply.body, self.place.log())


@pytest.fixture
def release(stage):
    """make(**proxy's configuration) -> a Release."""
    return lambda **proxy: Release(stage(**proxy))


def test_a_proxy_that_is_killed_at_any_step_of_a_release_has_it_finished_by_the_next_one_which_knows_of_a_handover(release):
    scene = release()
    for step in of_proxy(scene.steps):
        with killed_at(step):
            scene.killed(step, "proxy")
            handover = scene.handover()
            assert bool(handover) == is_after("5 replace", step, scene.steps), "it stands from its rename on"
            scene.place.start()
            if handover:
                view = scene.place.host()
                assert (view["state"], view["handover"]) == ("handover", handover)
            scene.is_given_way()
    assert not list(scene.place.state.rglob("*.tmp")), "what killed writers left is gone with the next write"


def test_a_proxy_that_is_killed_together_with_its_agent_in_a_release_has_it_finished_by_the_next_one(release):
    scene = release()
    for step in on_box(scene.steps, "stop"):
        with killed_at(step):
            scene.killed(step, "proxy", "agent")
            scene.place.start()
            scene.is_given_way()


def test_a_proxy_that_starts_while_the_agent_of_a_killed_one_is_in_the_midst_of_a_release_waits_for_it(release):
    scene = release()
    for step in on_box(scene.steps, "stop"):
        with killed_at(step):
            scene.killed(step, "proxy", rests=True)
            scene.place.start()
            scene.place.go_on()
            scene.is_given_way()


def test_an_agent_that_is_killed_at_any_step_of_a_release_is_followed_by_another_at_the_next_tick(release):
    """Until then the stop is not proven, and nothing of it is claimed."""
    scene = release(tick="500ms")
    for step in of_agent(scene.steps, "stop"):
        with killed_at(step):
            said = scene.place.log()
            scene.killed(step, "agent")
            eventually(lambda: scene.place.host()["state"] == "handover", "a stop is proven")
            log = scene.place.log()[len(said):]
            assert log.count("engine stopped") == 1
            assert log.count("the engine is not stopped: the agent gave no reply") == (step != "agent stop: has answered")
            assert scene.place.entry("stop_error") is None
            scene.is_given_way()


def test_an_engine_that_something_starts_while_the_proxy_is_dead_and_a_job_runs_is_stopped_by_the_next_one(stage):
    place = stage()
    place.job_waits()
    place.job_begins()
    place.process.kill()
    place.process.wait(PATIENCE)
    os.utime(place.jobs / "running", (1, 1))  # the job began long ago
    ask = {"op": "start", "host": "here", "engine": "a", "engines": place.config["hosts"]["here"]["engines"]}
    argv = [sys.executable, "-I", LLMGUARD, "--state-dir", str(place.state), "agent"]
    assert b'"active": "a"' in subprocess.run(argv, input=json.dumps(ask).encode(), capture_output=True, timeout=PATIENCE).stdout
    eventually(lambda: place.engines() == ["a"], "it runs on the job's GPU")
    place.start()
    eventually(lambda: place.host()["state"] == "handover", "it is stopped")
    assert not place.engines()
    assert place.log().count("host here: engine a came back while a bench job runs: engine stopped") == 1
    assert place.chat("a").status == 423


# ----- a stop that is not proven


class Stuck(Release):
    """Here the engine is stuck, and comes loose in the end."""

    def killed(self, step: str, *who: str, rests: bool = False) -> None:
        self.place.served("a")
        (self.place.folder / "stuck").touch()
        super().killed(step, *who, rests=rests)

    def is_given_way(self) -> None:
        (self.place.folder / "stuck").unlink(missing_ok=True)
        super().is_given_way()
        assert self.place.entry("stop_error") is None


def test_a_proxy_that_is_killed_at_any_step_of_noting_a_stop_that_is_not_proven_has_it_tried_again_by_the_next_one(stage):
    scene = Stuck(stage(tick="500ms"))
    scene.place.steps()
    scene.killed("stop is answered", "nobody")
    eventually(lambda: scene.place.host()["stop_error"], "it is noted")
    scene.is_given_way()
    steps = [step for step in of_proxy(scene.place.steps()) if step.startswith("stop_error.json")]
    assert len(steps) == len(WRITE)
    for step in steps:
        with killed_at(step):
            scene.killed(step, "proxy")
            noted = scene.place.entry("stop_error")
            assert bool(noted) == is_after("5 replace", step, steps), "it stands from its rename on"
            scene.place.start()
            scene.is_refused()
            found = eventually(lambda: scene.place.host()["stop_error"], "the next proxy tries it again")
            if noted:
                found = eventually(lambda: (now := scene.place.host()["stop_error"])["attempts"] > noted["attempts"] and now)
                assert (found["since"], found["error"]) == (noted["since"], noted["error"])
            scene.is_given_way()


# ----- an idle stop


def test_an_idle_stop_survives_every_kill_of_the_proxy_its_agent_or_both(stage):
    """The engine is stopped or runs on; either is known to the next proxy, which serves whoever asks then."""
    place = stage(idle_stop="200ms", tick="500ms")
    place.steps()
    place.served("a")
    eventually(lambda: place.host()["state"] == "off", "it is stopped")
    steps = place.steps()
    assert place.starts() == ["a"]
    own, agents = [step for step in of_proxy(steps) if "stop" in step], on_box(steps, "stop")
    assert own == ["asks to stop", "stop is answered"]
    for who, each in ((("proxy",), own), (("proxy", "agent"), agents), (("agent",), agents)):
        for step in each:
            with killed_at(f"{step}: {who}"):
                runs = place.engines()
                place.dies_at(step, *who)
                place.served("a")
                place.proxy_died() if "proxy" in who else place.died()
                assert place.starts() == ([] if runs else ["a"])
                if "proxy" in who:
                    place.start()
                else:
                    eventually(lambda: place.host()["state"] == "off" and not place.host()["stop_error"], "a stop is proven")
                place.consistent()


# ----- streams


def test_a_stream_that_a_new_proxy_lets_in_is_not_cut_by_what_the_killed_ones_agent_was_about_to_do(stage):
    """The agent rests at each of its steps before it stops the engine: of those its look whom that serves is the last."""
    place = stage()
    enough = place.folder / "enough"
    unload = lambda: place.ask("POST", "/api/models/unload/a")
    switch = lambda: place.chat("b")
    for ask, op in ((unload, "stop"), (switch, "start")):
        place.served("a")
        place.steps()
        ask()
        steps = of_agent(place.steps(), op)
        for step in steps[:steps.index(f"agent {op}: stops an engine")]:
            with killed_at(step):
                place.served("a")
                place.starts()
                place.dies_at(step, "proxy", rests=True)
                with contextlib.suppress(OSError, http.client.HTTPException):
                    ask()
                place.proxy_died()
                place.start()
                stream = place.stream("/v1/chat/completions", {"model": "a", "stream": True})
                stream.first()
                place.go_on()
                enough.touch()
                assert stream.whole().endswith(b"data: [DONE]\n\n")
                enough.unlink()
                assert place.starts() == []
                place.consistent()


def test_a_proxy_that_is_killed_while_a_waiting_job_waits_for_a_stream_cuts_no_other_and_the_next_one_gives_way(
    serve, llama_server, models, tmp_path
):
    """Real engines. What the killed proxy forwards is cut with it; a stream beside it runs on, and the job waits for its end."""
    jobs = tmp_path / "jobs"
    for name in ("queue", "running"):
        (jobs / name).mkdir(parents=True)
    command, port = llama_command(llama_server, models["deep"], "-np", "2"), free_port()
    host = {"engines": {"deep": {"command": command, "port": port, "models": ["deep"]}}, "job_queue": str(jobs)}
    long = {"model": "deep", "prompt": "say something", "max_tokens": 500, "temperature": 0, "ignore_eos": True, "stream": True}
    os.utime(jobs / "running", (0, 0))
    first = serve({"hosts": {"here": host}})
    stream = first.stream("/v1/completions", long)
    stream.first()
    beside = Stream(f"http://127.0.0.1:{port}/v1/completions", long)
    beside.first()
    engine = llmguard.Box().process(first.engine_pid("deep"))
    (jobs / "queue" / JOB).touch()
    (jobs / "runner.log").write_text(f"2026-10-25 16:57:34 gpu-wait {JOB} pid={engine.pid} comm=llama-server\n")
    eventually(lambda: "refusing new work" in first.log(), "the wait is seen")
    first.signal(signal.SIGKILL)
    first.process.wait(PATIENCE)
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        stream.whole()
    second = serve({"hosts": {"here": host}}, state=first.state)
    assert second.ask("POST", "/v1/completions", dict(long, stream=False)).status == 423
    assert beside.whole().endswith(b"data: [DONE]\n\n")
    eventually(lambda: second.host()["state"] == "handover", "the job is given way")
    assert not llmguard.Box().same(engine.pid, engine.start)
    assert second.switches() == [] and second.log().count("engine stopped") == 1
    assert second.ask("POST", "/v1/completions", long).status == 423

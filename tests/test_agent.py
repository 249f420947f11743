"""Sections 6 and 7: the agent as a real process with plain command engines, and systemd units on a scripted box."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from parts import LLMGUARD, PATIENCE, FakeClock, eventually, free_port, missing

import llmguard
from llmguard import Agent, AgentError, Box, CommandEngine, Finished, UnitEngine, unit_of

# A small server: it listens on its port. "deaf" ignores SIGTERM, "parent" has a child that does too.
ENGINE = """
import os, signal, socket, subprocess, sys
mode = sys.argv[2]
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "parent":
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True); time.sleep(600)"
    subprocess.Popen([sys.executable, "-S", "-E", "-c", deaf], stdout=subprocess.PIPE).stdout.readline()
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listener:
    while True:
        listener.accept()[0].close()
"""


def engine(mode: str = "plain", port: int = 0) -> dict:
    return {"command": [sys.executable, "-c", ENGINE, "{port}", mode], "port": port or free_port()}


def sleeper(port: int = 0) -> dict:
    return {"command": ["sleep", "600"], "port": port or free_port()}


@pytest.fixture
def folder(tmp_path):
    """A state folder; whatever engines were started from it are killed in the end."""
    yield str(tmp_path / "state")
    for record in (tmp_path / "state" / "engines").glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            os.killpg(json.loads(record.read_text())["pid"], signal.SIGKILL)


def agent_process(folder: str, data: bytes, **more) -> subprocess.CompletedProcess:
    argv = [sys.executable, "-I", LLMGUARD, "--state-dir", folder, "agent"]
    return subprocess.run(argv, input=data, capture_output=True, timeout=PATIENCE, **more)


def ask(folder: str, op: str, engines: dict | None = None, **more) -> dict:
    """One request to the real agent; its exit code and banner are checked on the way."""
    done = agent_process(folder, json.dumps({"op": op, "host": "here", "engines": engines or {}, **more}).encode())
    assert done.returncode == 0, done.stderr.decode()
    banner, line, rest = done.stdout.decode().split("\n")
    assert banner == "llmguard-agent 1" and rest == ""
    return json.loads(line)


class LookingClock(FakeClock):
    """No time passes between two looks at a stop but what the kernel really needs to end those processes."""

    def __init__(self, pids) -> None:
        super().__init__()
        self.pids = pids

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if seconds >= 1.0:
            eventually(lambda: not any(map(alive, self.pids)), "killed")


def quiet_agent(folder: str, clock=None, root: str = "/") -> Agent:
    """The agent in this process, on a box without GPU tools."""
    return Agent(folder, Box(root), clock or llmguard.Clock(), lambda argv, seconds: (None, "", f"{argv[0]}: not found"))


def record(folder: str, name: str = "e") -> dict:
    return json.loads(Path(folder, "engines", f"here.{name}.json").read_text())


def alive(pid: int) -> bool:
    process = Box().process(pid)
    return process is not None and not process.ended


def listening(port: int) -> bool:
    return bool(Box().listeners(port))


# ----- requests and replies


def test_version_and_status_of_a_box_without_engines(folder):
    version = ask(folder, "version")
    assert version["ok"] and version["agent"] == llmguard.__version__ and version["sha256"] == llmguard.own_hash()
    assert version["python"] == "%d.%d.%d" % sys.version_info[:3]
    status = ask(folder, "status")
    assert status["ok"] and status["active"] is None and status["state"] == "off" and "gpu" in status["checked"]


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"", "no request on stdin"), (b"  \n", "no request on stdin"), (b"{", "is no JSON"), (b"[]\n", "is no JSON object"), (b"null", "is no JSON object"),
     (b"\xff\xfe\x00", "is no JSON"), (b"GET / HTTP/1.1\r\n\r\n", "is no JSON"), (b"[" * 60000, "is no JSON"),
     (b'{"op": "' + b"x" * 65536 + b'"}', "is larger than 64 KiB")],
    ids=lambda value: repr(value[:12]) if isinstance(value, bytes) else "",
)
def test_a_bad_request_gets_a_reply_that_says_why_and_exit_code_64(folder, data, says):
    done = agent_process(folder, data)
    assert done.returncode == 64 and done.stderr == b""
    banner, line = done.stdout.decode().splitlines()
    reply = json.loads(line)
    assert banner == "llmguard-agent 1" and reply["ok"] is False and says in reply["error"]["text"]
    assert reply["error"]["type"] == "BadRequest"


@pytest.mark.parametrize(
    "request_",
    [{}, {"op": "reboot"}, {"op": None}, {"op": []}, {"op": {}}, {"op": "status", "engines": []}, {"op": "status", "engines": {"e": 5}},
     {"op": "status", "engines": {"../e": {"command": ["x"], "port": 1}}}, {"op": "status", "engines": {"e": {"command": ["x"], "port": 0}}},
     {"op": "status", "engines": {"e": {"command": "x", "port": 1}}}, {"op": "status", "engines": {"e": {"unit": "-x", "port": 1}}},
     {"op": "status", "engines": {"e": {"unit": "x", "port": 1, "scope": "root"}}}, {"op": "status", "engines": {"e": {"port": 1}}},
     {"op": "status", "host": "../up", "engines": {"e": {"command": ["x"], "port": 1}}}, {"op": "status", "host": 5, "engines": {"e": {"command": ["x"], "port": 1}}}, {"op": "status", "bench_port": "8099"}, {"op": "status", "gpus": "0"},
     {"op": "status", "owner_min": -1}, {"op": "start"}, {"op": "start", "engine": "x"}, {"op": "start", "engine": ["x"]}],
    ids=repr,
)
def test_a_request_that_makes_no_sense_is_answered_with_bad_request_never_with_a_traceback(folder, request_):
    reply = quiet_agent(folder).answer(request_)
    assert reply["ok"] is False and reply["error"]["type"] == "BadRequest", reply


def test_a_request_that_does_not_come_is_not_waited_for_for_ever(folder, monkeypatch):
    monkeypatch.setattr(llmguard, "REQUEST_PATIENCE", 0.05)
    reader, writer = os.pipe()
    out_reader, out_writer = os.pipe()
    kept = os.dup(0), os.dup(1)
    try:
        os.dup2(reader, 0)
        os.dup2(out_writer, 1)
        code = llmguard.agent_main(folder)
    finally:
        os.dup2(kept[0], 0)
        os.dup2(kept[1], 1)
        for handle in (*kept, reader, writer, out_writer):
            os.close(handle)
    with os.fdopen(out_reader) as out:
        assert code == 64 and "no request on stdin" in out.read()


def test_a_request_needs_no_end_of_stdin_only_the_end_of_its_line(folder):
    argv = [sys.executable, "-I", LLMGUARD, "--state-dir", folder, "agent"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b'{"op": "version"}\n')
        process.stdin.flush()
        assert process.stdout.readline() == b"llmguard-agent 1\n" and json.loads(process.stdout.readline())["ok"]
        assert process.wait(PATIENCE) == 0


def test_a_guard_that_was_not_asked_for_is_not_listed_as_checked(folder):
    assert "bench_port" not in ask(folder, "status")["checked"]
    assert "bench_port" in ask(folder, "status", bench_port=free_port())["checked"]


def test_somebody_on_the_bench_port_is_an_owner_and_nothing_is_started(folder):
    with socket.create_server(("127.0.0.1", 0)) as bench:
        port = bench.getsockname()[1]
        engines = {"e": sleeper()}
        reply = ask(folder, "start", engines, engine="e", bench_port=port)
        assert reply["ok"] is False and reply["error"]["type"] == "GpuBusy"
        assert f"listens on the bench port {port}" in reply["error"]["text"] and reply["foreign"][0]["kind"] == "bench_port"
        assert not os.path.exists(os.path.join(folder, "engines"))
        assert ask(folder, "status", engines, bench_port=port)["foreign"][0]["kind"] == "bench_port"
    assert ask(folder, "start", engines, engine="e", bench_port=port)["ok"]


def test_a_state_folder_that_cannot_be_written_is_answered_not_crashed(tmp_path):
    (tmp_path / "file").write_text("no folder")
    reply = ask(str(tmp_path / "file" / "state"), "start", {"e": sleeper()}, engine="e")
    assert reply["ok"] is False and reply["error"]["type"] == "AgentError" and "Not a directory" in reply["error"]["text"]


# ----- a plain command: start, find again, stop


def test_start_status_stop_of_a_plain_command(folder):
    engines = {"e": engine()}
    started = ask(folder, "start", engines, engine="e")
    assert started["ok"] and started["active"] == "e" and started["state"] == "running"
    pid = record(folder)["pid"]
    assert started["engine"]["pids"] == [pid] and os.getsid(pid) == pid, "in a session of its own"
    eventually(lambda: listening(engines["e"]["port"]))
    status = ask(folder, "status", engines)
    assert status["active"] == "e" and status["engine"]["port"] == "ours" and status["engine"]["rss"] > 0
    stopped = ask(folder, "stop", engines)
    assert stopped["ok"] and stopped["active"] is None and stopped["state"] == "off"
    assert not alive(pid) and not listening(engines["e"]["port"])


def test_starting_what_runs_already_starts_nothing_second(folder):
    engines = {"e": sleeper()}
    first = ask(folder, "start", engines, engine="e")
    assert ask(folder, "start", engines, engine="e")["engine"]["pids"] == first["engine"]["pids"]


def test_starting_one_engine_stops_the_other_first(folder):
    engines = {"e": engine(), "f": engine()}
    ask(folder, "start", engines, engine="e")
    eventually(lambda: listening(engines["e"]["port"]))
    pid = record(folder)["pid"]
    reply = ask(folder, "start", engines, engine="f")
    assert reply["active"] == "f" and not alive(pid) and not listening(engines["e"]["port"])


def test_stopping_when_nothing_runs_is_fine(folder):
    assert ask(folder, "stop", {"e": sleeper()})["ok"]


def test_a_program_that_is_missing_is_an_error_with_its_name(folder):
    reply = ask(folder, "start", {"e": {"command": ["/no/such/llama-server"], "port": free_port()}}, engine="e")
    assert reply["ok"] is False and "/no/such/llama-server cannot be run: No such file" in reply["error"]["text"]


def test_an_engines_output_is_kept_and_told_and_the_run_before_it_too(folder):
    engines = {"e": {"command": ["sh", "-c", "echo one; echo two >&2; exec sleep 600"], "port": free_port()}}
    ask(folder, "start", engines, engine="e")
    eventually(lambda: ask(folder, "status", engines, log="e")["log"] == ["one", "two"])
    ask(folder, "stop", engines)
    ask(folder, "start", {"e": {**engines["e"], "command": ["sh", "-c", "echo three; exec sleep 600"]}}, engine="e")
    eventually(lambda: ask(folder, "status", engines, log="e")["log"] == ["three"])
    assert Path(folder, "engines", "here.e.log.1").read_text() == "one\ntwo\n"


def test_the_port_stands_wherever_the_command_says(folder):
    engines = {"e": {"command": ["sh", "-c", "echo x{port}y --port={port}; exec sleep 600"], "port": 18099}}
    ask(folder, "start", engines, engine="e")
    eventually(lambda: ask(folder, "status", engines, log="e")["log"] == ["x18099y --port=18099"])


def test_an_engine_keeps_no_pipe_of_the_agent_and_no_lock(folder):
    """The call returns although the engine runs on, whatever it does with its output."""
    engines = {"e": {"command": ["sh", "-c", "sleep 600 & exec sleep 600"], "port": free_port()}}
    ask(folder, "start", engines, engine="e")  # returns: nobody holds its stdout
    pid = record(folder)["pid"]
    open_files = {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
    log = os.path.realpath(os.path.join(folder, "engines", "here.e.log"))
    assert open_files == {"/dev/null", log}


def test_an_engine_that_ignores_sigterm_is_killed(folder):
    engines = {"e": engine("deaf")}
    ask(folder, "start", engines, engine="e")
    eventually(lambda: listening(engines["e"]["port"]))
    pid = record(folder)["pid"]
    clock = LookingClock([pid])
    begun = clock.monotonic()
    reply = quiet_agent(folder, clock).answer({"op": "stop", "host": "here", "engines": engines})
    assert reply["ok"], reply
    assert not alive(pid) and clock.monotonic() - begun >= llmguard.TERM_GRACE, "it was given its time"


def test_a_child_of_an_engine_that_outlives_it_is_found_and_killed(folder):
    engines = {"e": engine("parent")}
    ask(folder, "start", engines, engine="e")
    eventually(lambda: listening(engines["e"]["port"]))
    pids = ask(folder, "status", engines)["engine"]["pids"]
    assert len(pids) == 2
    reply = quiet_agent(folder, LookingClock(pids)).answer({"op": "stop", "host": "here", "engines": engines})
    assert reply["ok"] and not any(alive(pid) for pid in pids)


def test_what_a_dead_engine_left_behind_is_cleared_away_before_it_is_started_again(folder):
    """vLLM's workers live on when their parent is killed: no port, but the GPU's memory."""
    engines = {"e": engine("parent")}
    ask(folder, "start", engines, engine="e")
    eventually(lambda: listening(engines["e"]["port"]))
    leader = record(folder)["pid"]
    pids = ask(folder, "status", engines)["engine"]["pids"]
    (child,) = set(pids) - {leader}
    os.kill(leader, signal.SIGKILL)
    eventually(lambda: not alive(leader))
    status = ask(folder, "status", engines)
    assert status["active"] == "e" and status["state"] == "left over" and status["engine"]["pids"] == [child]
    reply = quiet_agent(folder, LookingClock([child])).answer({"op": "start", "host": "here", "engines": engines, "engine": "e"})
    assert reply["ok"] and not alive(child), reply
    assert reply["state"] == "running" and record(folder)["pid"] not in pids


def test_an_engine_that_survives_everything_is_an_error_after_eleven_looks_one_second_apart(folder, monkeypatch):
    engines = {"e": sleeper()}
    ask(folder, "start", engines, engine="e")
    pid = record(folder)["pid"]
    monkeypatch.setattr(llmguard.CommandEngine, "stop", lambda self: None)  # stuck in the kernel: signals do nothing
    clock = FakeClock()
    begun = clock.monotonic()
    reply = quiet_agent(folder, clock).answer({"op": "stop", "host": "here", "engines": engines})
    assert reply["ok"] is False and reply["error"]["type"] == "AgentError"
    assert f"sleep pid {pid} of " in reply["error"]["text"] and reply["error"]["text"].endswith("still runs after the stop")
    assert clock.monotonic() - begun == 10.0, "eleven looks"


def test_a_port_that_stays_open_after_the_stop_is_an_error(folder):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        engines = {"e": sleeper(stranger.getsockname()[1])}
        command = CommandEngine("e", "here.e", engines["e"]["port"], Box(), FakeClock(), command=("sleep", "600"), folder=folder)
        command.start()
        reply = quiet_agent(folder, FakeClock()).answer({"op": "stop", "host": "here", "engines": engines})
        assert reply["ok"] is False and "port" in reply["error"]["text"] and "still open after the stop" in reply["error"]["text"]


def test_a_port_that_a_stranger_has_is_not_started_on_and_names_him(folder):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        engines = {"e": sleeper(stranger.getsockname()[1])}
        reply = ask(folder, "start", engines, engine="e")
        assert reply["ok"] is False and reply["error"]["type"] == "EngineFailed"
        assert reply["error"]["text"] == f"port {engines['e']['port']} is already taken by {Box().process(os.getpid()).comm}"
    assert ask(folder, "start", engines, engine="e")["ok"]


def test_a_stranger_on_the_port_of_a_running_engine_is_told_apart_from_it(folder):
    engines = {"e": sleeper()}
    ask(folder, "start", engines, engine="e")
    assert ask(folder, "status", engines)["engine"]["port"] == "closed"
    with socket.create_server(("127.0.0.1", engines["e"]["port"])):
        view = ask(folder, "status", engines)["engine"]
        assert view["port"] == "stranger" and view["stranger"] == Box().process(os.getpid()).comm


# ----- pids that were given to somebody else


@pytest.fixture
def bystander():
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait(PATIENCE)


def write_record(folder: str, **fields) -> None:
    llmguard.StateFile(os.path.join(folder, "engines"), "here.e.json").save(fields)


def test_a_pid_that_was_reused_is_not_ours_and_is_never_killed(folder, bystander):
    start = Box().process(bystander.pid).start
    write_record(folder, pid=bystander.pid, start=start - 1, boot=Box().boot())
    assert ask(folder, "status", {"e": sleeper()})["active"] is None
    assert ask(folder, "stop", {"e": sleeper()})["ok"]
    assert bystander.poll() is None


def test_a_session_of_another_boot_is_not_ours_although_its_number_is(folder, bystander):
    """After a reboot low numbers come again: a daemon whose own leader has ended has a session without a leader, as ours may."""
    start = Box().process(bystander.pid).start
    write_record(folder, pid=bystander.pid, start=start, boot="another-boot")
    assert ask(folder, "stop", {"e": sleeper()})["ok"]
    assert bystander.poll() is None
    write_record(folder, pid=bystander.pid, start=start, boot=Box().boot())
    assert ask(folder, "status", {"e": sleeper()})["active"] == "e", "of this boot it is"


@pytest.mark.parametrize("text", ["", "{", '{"version": 1}', '{"version": 1, "pid": "1", "start": 1}', '{"version": 1, "pid": 1, "start": null}', '{"version": 1, "pid": -1, "start": 0}'])
def test_a_broken_record_is_no_engine_and_no_error(folder, text):
    Path(folder, "engines").mkdir(parents=True)
    Path(folder, "engines", "here.e.json").write_text(text)
    assert ask(folder, "status", {"e": sleeper()})["active"] is None
    assert ask(folder, "start", {"e": sleeper()}, engine="e")["active"] == "e"


def test_an_engine_that_cannot_be_recorded_is_not_run(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(llmguard.StateFile, "save", lambda self, content: False)
    engines = {"e": {"command": ["touch", str(tmp_path / "it ran")], "port": free_port()}}
    reply = quiet_agent(folder).answer({"op": "start", "host": "here", "engines": engines, "engine": "e"})
    assert reply["ok"] is False and "could not be found again" in reply["error"]["text"]
    assert not (tmp_path / "it ran").exists()


# ----- one op at a time


def test_two_callers_at_once_are_served_one_after_the_other(folder):
    """Both want the box for another engine: one start is whole before the other begins, and one engine runs in the end."""
    engines = {"e": sleeper(), "f": sleeper()}
    replies: dict[str, dict] = {}
    crowd = [threading.Thread(target=lambda name=name: replies.update({name: ask(folder, "start", engines, engine=name)})) for name in "efefef"]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join(PATIENCE)
    assert all(reply["ok"] for reply in replies.values()), replies
    living = [name for name in "ef" if Path(folder, "engines", f"here.{name}.json").exists() and alive(record(folder, name)["pid"])]
    assert len(living) == 1 and ask(folder, "status", engines)["active"] == living[0]


def test_a_caller_that_waited_for_long_enough_is_told_who_holds_the_box(folder):
    with llmguard.Lock(os.path.join(folder, "agent.lock"), "agent: stop"):
        reply = quiet_agent(folder, FakeClock()).answer({"op": "start", "host": "here", "engines": {"e": sleeper()}, "engine": "e"})
    assert reply["ok"] is False and reply["error"]["type"] == "GpuBusy"
    assert reply["error"]["text"].startswith(f"the agent is busy: agent: stop (pid {os.getpid()}) since ")
    assert not os.path.exists(os.path.join(folder, "engines", "here.e.json"))


def test_a_status_waits_for_nobody(folder):
    with llmguard.Lock(os.path.join(folder, "agent.lock"), "agent: start"):
        assert ask(folder, "status", {"e": sleeper()})["ok"]


# ----- which unit a process belongs to


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("/system.slice/llm-engine-a.service", ("system", "llm-engine-a.service")),
        ("/system.slice/system-llm.slice/llm@a.service", ("system", "llm@a.service")),
        ("/system.slice/llm-engine-a.service/worker/0", ("system", "llm-engine-a.service")),
        ("/machine.slice/deep.slice/llm-engine-a.service", ("system", "llm-engine-a.service")),
        ("/system.slice/llm\\x2dengine.service", ("system", "llm\\x2dengine.service")),
        ("/system.slice/docker-abc.scope", ("system", "docker-abc.scope")),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/llm-engine-a.service", ("user", "llm-engine-a.service")),
        ("/user.slice/user-1000.slice/user@1000.service/llm-engine-a.service", ("user", "llm-engine-a.service")),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/app-llm.slice/llm@a.service/sub", ("user", "llm@a.service")),
        ("/user.slice/user-1000.slice/user@1000.service/init.scope", ("user", "init.scope")),
        ("/user.slice/user-1001.slice/user@1001.service/app.slice/llm-engine-a.service", None),
        ("/user.slice/user-10000.slice/user@10000.service/app.slice/llm-engine-a.service", None),
        ("/user.slice/user-1000.slice/session-3.scope", None),
        ("/user.slice/user-1000.slice/session-3.scope/llm-engine-a.service", None),
        ("/user.slice/user-1000.slice", None),
        ("/user.slice", None),
        ("/", None),
        ("", None),
        ("/system.slice", None),
    ],
)
def test_a_cgroup_path_names_the_unit_by_whole_components(cgroup, unit):
    assert unit_of(cgroup, 1000) == unit


def test_a_unit_is_not_found_by_a_part_of_its_name():
    assert unit_of("/system.slice/llm-engine-a.service.d", 1000) == ("system", "llm-engine-a.service.d")
    assert unit_of("/system.slice/my-llm-engine-a.service", 1000) != ("system", "llm-engine-a.service")


# ----- systemd units on a scripted box


class Units:
    """A /proc tree, and a systemctl that answers as scripted."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, []
        (root / "proc" / "net").mkdir(parents=True)
        self.shown: dict[str, str] = {"LoadState": "loaded", "ActiveState": "inactive", "SubState": "dead", "NRestarts": "0"}
        self.answers: dict[str, Finished] = {}
        self.containers = ""
        self.on: dict[str, object] = {}
        self.clock = FakeClock()

    def process(self, pid: int, cgroup: str, comm: str = "llama-server", state: str = "S", start: int = 5) -> None:
        folder = self.root / "proc" / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "stat").write_text(f"{pid} ({comm}) {state} 1 {pid} {pid} " + "0 " * 15 + f"{start} 0 0\n")
        (folder / "cgroup").write_text(cgroup)

    def end(self, pid: int) -> None:
        import shutil

        shutil.rmtree(self.root / "proc" / str(pid))

    def listens(self, port: int) -> None:
        (self.root / "proc" / "net" / "tcp").write_text(f"  sl\n   0: 0100007F:{port:04X} 00000000:0000 0A 0:0 0:0 0 0 0 4242 1\n")

    def run(self, argv: list[str], seconds: float, **more) -> Finished:
        self.calls.append(argv)
        verb = next(word for word in argv if word in ("show", "start", "stop", "reset-failed", "-u"))
        if verb in self.on:
            self.on[verb]()
        if verb in self.answers:
            return self.answers[verb]
        out = "".join(f"{key}={value}\n" for key, value in self.shown.items()) if verb == "show" else ""
        return Finished(0, out.encode(), b"")

    def tool(self, argv: list[str], seconds: float) -> tuple[int | None, str, str]:
        """docker and podman."""
        return (0, self.containers, "") if self.containers else (None, "", f"{argv[0]}: not found")

    def engine(self, scope: str = "system", sudo: bool = False, unit: str = "llm-engine-mainline.service") -> UnitEngine:
        return UnitEngine("mainline", "here.mainline", 8081, Box(str(self.root)), self.clock, self.tool, unit, scope, sudo, self.run)

    def stop(self, engine: UnitEngine) -> str | None:
        """Stop it as the agent does; what is wrong then, or None."""
        before = engine.processes()
        try:
            engine.stop()
            llmguard.prove_stopped([engine], before, engine.box, self.clock)
        except AgentError as error:
            return str(error)
        return None


@pytest.fixture
def units(tmp_path) -> Units:
    return Units(tmp_path)


OURS = "0::/system.slice/llm-engine-mainline.service\n"


def test_a_running_unit_is_running_with_all_its_processes(units):
    units.shown.update(ActiveState="active", SubState="running", UID="[not set]", MemoryCurrent="[not set]", NRestarts="[not set]")
    units.process(115709, OURS)
    units.process(115733, "0::/system.slice/llm-engine-mainline.service/sub\n")
    units.process(1, "0::/init.scope\n", "systemd")
    assert units.engine().state == "running"
    assert sorted(process.pid for process in units.engine().processes()) == [115709, 115733]


def test_the_cgroup_of_version_1_counts_too(units):
    units.process(7, "12:memory:/x\n1:name=systemd:/system.slice/llm-engine-mainline.service\n")
    assert [process.pid for process in units.engine().processes()] == [7]


def test_another_users_unit_of_the_same_name_is_not_ours(units):
    uid = os.getuid()
    other = f"0::/user.slice/user-{uid + 1}.slice/user@{uid + 1}.service/app.slice/llm-engine-mainline.service\n"
    units.process(7, other)
    units.process(8, OURS)
    assert units.engine("user").processes() == []
    units.process(9, f"0::/user.slice/user-{uid}.slice/user@{uid}.service/app.slice/llm-engine-mainline.service\n")
    assert [process.pid for process in units.engine("user").processes()] == [9]


def test_a_unit_that_failed_with_a_stuck_process_is_not_stopped(units):
    """Survived SIGKILL: systemd calls the unit failed, the process keeps its cgroup and the GPU."""
    units.shown.update(ActiveState="failed", SubState="failed", Result="timeout", MainPID="0")
    units.process(1675, OURS, state="D")
    begun = units.clock.monotonic()
    problem = units.stop(units.engine())
    assert problem and "llama-server pid 1675" in problem and "still runs after the stop" in problem
    assert units.clock.monotonic() - begun == 10.0, "eleven looks, one second apart"


def test_a_unit_that_failed_with_nothing_left_is_stopped(units):
    units.shown.update(ActiveState="failed", SubState="failed", Result="timeout")
    assert units.stop(units.engine()) is None


def test_a_zombie_in_the_cgroup_is_nothing(units):
    units.process(1675, OURS, state="Z")
    assert units.engine().state == "off" and units.stop(units.engine()) is None


def test_a_process_that_ends_during_the_looks_is_a_proven_stop(units):
    units.shown.update(ActiveState="deactivating", SubState="stop-sigterm")
    units.process(4242, OURS)
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 3:
            units.end(4242)
            units.shown.update(ActiveState="inactive")

    units.clock.sleep = sleep
    assert units.stop(units.engine()) is None and sleeps == [1.0, 1.0, 1.0]


def test_a_unit_that_is_about_to_be_restarted_counts_as_running_and_its_stop_goes_to_systemd(units):
    units.shown.update(ActiveState="activating", SubState="auto-restart", NRestarts="7")
    engine = units.engine()
    assert engine.look() == ("restarting", 7)
    units.on["stop"] = lambda: units.shown.update(ActiveState="inactive")
    assert units.stop(engine) is None
    assert ["systemctl", "--system", "--no-ask-password", "stop", "llm-engine-mainline.service"] in units.calls


def test_a_unit_that_stays_restarting_is_not_stopped(units):
    units.shown.update(ActiveState="activating", SubState="auto-restart", NRestarts="7")
    assert "unit llm-engine-mainline.service is restarting after the stop" in units.stop(units.engine())


def test_a_unit_that_starts_is_starting(units):
    units.shown.update(ActiveState="activating", SubState="start", NRestarts="[not set]")
    assert units.engine().state == "starting"


def test_check_says_that_a_unit_does_not_exist_with_its_scope(units):
    units.shown.update(LoadState="not-found")
    for scope in ("system", "user"):
        with pytest.raises(AgentError, match=f"there is no {scope} unit llm-engine-mainlne.service"):
            units.engine(scope, unit="llm-engine-mainlne.service").warnings()


def test_a_unit_that_does_not_exist_is_off_and_keeps_nobody_from_stopping_the_others(units):
    units.shown.update(LoadState="not-found")
    assert units.engine().look() == ("off", 0) and units.stop(units.engine()) is None


def test_a_unit_whose_file_was_removed_while_it_runs_still_runs_and_can_be_stopped(units):
    units.shown.update(LoadState="not-found", ActiveState="active", SubState="running")
    units.process(4242, OURS)
    assert units.engine().state == "running"
    units.on["stop"] = lambda: (units.end(4242), units.shown.update(ActiveState="inactive"))
    assert units.stop(units.engine()) is None


@pytest.mark.parametrize(
    ("exec_start", "policy"),
    [("docker run --rm -p 8081:8080 --restart=unless-stopped img", "--restart=unless-stopped"), ("podman run --restart always img", "--restart always"),
     ("docker run --restart=on-failure:3 img", ""), ("docker run --restart=no img", ""), ("llama-server -m always", "")],
)
def test_check_warns_of_a_container_that_its_daemon_starts_again(units, exec_start, policy):
    units.shown.update(ExecStart="{ path=/usr/bin/x ; argv[]=%s ; ignore_errors=no }" % exec_start)
    warnings = units.engine().warnings()
    assert ("is started again by " + policy in warnings[0]) if policy else warnings == []
    command = CommandEngine("e", "here.e", 8081, units.engine().box, units.clock, command=("sh", *exec_start.split()))
    assert (policy in command.warnings()[0]) if policy else command.warnings() == []


def test_an_active_unit_without_a_process_is_off(units):
    units.shown.update(ActiveState="active", SubState="exited")
    assert units.engine().state == "off"


def test_a_port_that_stays_open_is_no_stop_either(units):
    units.listens(8081)
    assert units.stop(units.engine()) == "port 8081 of engine mainline is still open after the stop"


def test_a_process_that_left_its_cgroup_is_still_looked_for(units):
    units.process(4242, OURS)
    units.on["stop"] = lambda: units.process(4242, "0::/system.slice/else.service\n")
    assert "llama-server pid 4242" in units.stop(units.engine())


def test_a_pid_that_is_somebody_elses_by_then_is_not(units):
    units.process(4242, OURS)
    units.on["stop"] = lambda: units.process(4242, "0::/system.slice/else.service\n", "cron", start=99)
    assert units.stop(units.engine()) is None


# ----- a unit that runs `docker run`

CONTAINER = "4c01db0b339c" * 5 + "4242"


@pytest.fixture
def docked(units) -> Units:
    """Its client is in the unit's cgroup, the server in the container's."""
    units.shown.update(ActiveState="active", ExecStart="{ path=/usr/bin/docker ; argv[]=/usr/bin/docker run --rm --name qwen -p 8081:8080 img }")
    units.containers = f"{CONTAINER} qwen 0.0.0.0:8081->8080/tcp\n"
    units.process(50, OURS, "docker")
    (units.root / "proc/50/cmdline").write_text("docker\0run\0--name\0qwen\0img\0")
    units.process(60, f"0::/system.slice/docker-{CONTAINER}.scope\n")
    units.listens(8081)
    return units


def test_what_runs_in_the_container_that_a_unit_started_is_the_units(docked):
    assert [process.pid for process in docked.engine().processes()] == [50, 60]
    docked.process(61, "0::/system.slice/docker-" + "f" * 64 + ".scope\n")
    assert [process.pid for process in docked.engine().processes()] == [50, 60], "another container's is not"


def test_a_container_that_outlives_its_killed_client_is_not_stopped(docked):
    def client_dies() -> None:
        docked.end(50)
        docked.shown.update(ActiveState="failed")

    docked.on["stop"] = client_dies
    assert docked.stop(docked.engine()) == "llama-server pid 60 of an engine unit still runs after the stop"
    assert docked.engine().state == llmguard.LEFT_OVER


def test_a_container_that_ends_with_its_client_is_stopped(docked):
    def both_die() -> None:
        docked.end(50)
        docked.end(60)
        (docked.root / "proc/net/tcp").write_text("  sl\n")
        docked.containers = ""
        docked.shown.update(ActiveState="inactive")

    docked.on["stop"] = both_die
    assert docked.stop(docked.engine()) is None


def test_docker_is_not_asked_about_a_unit_that_has_nothing_to_do_with_it(units):
    units.process(60, f"0::/docker/{CONTAINER}\n")
    units.containers = f"{CONTAINER} other 0.0.0.0:8081->8080/tcp\n"
    units.listens(8081)
    assert units.engine().processes() == [], "another's container on the port is a stranger"


REFUSALS = {
    "no right": (1, "Failed to stop llm-engine-mainline.service: Interactive authentication required.\nSee system logs and 'systemctl status "
                    "llm-engine-mainline.service' for details.\n", "polkit rule"),
    "sudo wants a password": (1, "sudo: a password is required\n", "sudoers line"),
    "no bus": (1, "Failed to connect to bus: No such file or directory\n", "enable-linger"),
    "no bus, newer": (1, "Failed to connect to user scope bus via local transport: $DBUS_SESSION_BUS_ADDRESS and $XDG_RUNTIME_DIR not defined "
                         "(consider using --machine=<user>@.host --user to connect to bus of other user)\n", "enable-linger"),
    "no bus, no device": (1, "Failed to connect to user scope bus via local transport: No such device or address\n", "enable-linger"),
    "no bus, no medium": (1, "Failed to connect to user scope bus via local transport: No medium found\n", "enable-linger"),
    "polkit dead": (1, "Error getting authority: Error initializing authority: Timeout was reached (g-io-error-quark, 24)\n"
                       "Failed to restart llm-engine-mainline.service: Connection timed out\n", "Error getting authority"),
    "unknown unit": (5, "Failed to stop llm-engine-mainlne.service: Unit llm-engine-mainlne.service not loaded.\n", "not loaded"),
}


@pytest.mark.parametrize("why", REFUSALS)
@pytest.mark.parametrize("verb", ["start", "stop"])
def test_what_systemd_refuses_is_an_error_that_says_what_to_do(units, why, verb):
    code, text, says = REFUSALS[why]
    units.answers[verb] = Finished(code, b"", text.encode())
    units.process(4242, OURS)
    with pytest.raises(AgentError) as caught:
        getattr(units.engine(), verb)()
    assert str(caught.value).startswith(f"systemctl {verb} llm-engine-mainline.service: ") and says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_systemctl_that_hangs_is_an_error(units):
    units.answers["stop"] = Finished(None, b"", b"")
    assert units.stop(units.engine()) == "systemctl stop llm-engine-mainline.service did not end within 5m0s"


def test_a_box_without_systemctl_is_an_error(units):
    def missing(argv, seconds, **more):
        raise FileNotFoundError(2, "No such file or directory")

    units.run = missing
    with pytest.raises(AgentError, match="systemctl cannot be run: No such file"):
        units.engine().start()


def test_nobody_is_ever_asked_for_a_password(units):
    for scope, sudo in (("user", False), ("user", True), ("system", False), ("system", True)):
        units.calls.clear()
        engine = units.engine(scope, sudo)
        engine.start()
        engine.stop()
        engine.show()
        for argv in units.calls:
            assert argv[argv.index("systemctl") + 1] == f"--{scope}" and "--no-ask-password" in argv
            assert (argv[:2] == ["sudo", "-n"]) == (sudo and scope == "system" and "show" not in argv)
        assert any("reset-failed" in argv for argv in units.calls), "a unit that hit its start limit is started all the same"


def test_the_user_bus_is_found_without_a_login(units, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(os.path, "isdir", lambda path: True)
    assert units.engine("user")._environment()["XDG_RUNTIME_DIR"] == f"/run/user/{os.getuid()}"
    assert "XDG_RUNTIME_DIR" not in units.engine("system")._environment()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/mine")
    assert units.engine("user")._environment()["XDG_RUNTIME_DIR"] == "/mine"


def test_a_unit_left_over_by_a_failed_stop_is_stopped_before_it_is_started_and_not_started_over_it(units, monkeypatch, folder):
    """systemctl start succeeds over the leftover, and two servers would share the GPU."""
    units.shown.update(ActiveState="failed", SubState="failed", Result="timeout")
    units.process(1675, OURS, state="D")
    monkeypatch.setattr(Agent, "_engine", lambda self, name, entry, ask: units.engine())
    agent = Agent(folder, Box(str(units.root)), units.clock, lambda argv, seconds: (None, "", "not found"))
    reply = agent.answer({"op": "start", "host": "here", "engine": "mainline", "engines": {"mainline": {"unit": "x", "port": 8081}}})
    assert reply["ok"] is False and "pid 1675" in reply["error"]["text"]
    assert not any("start" in argv for argv in units.calls)


# ----- who uses an engine beside us


@pytest.fixture
def line():
    """A listener's port, and both ends of one connection to it."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with server:
            yield listener.getsockname()[1], server, client


def at_work(port: int) -> int | None:
    return llmguard.connections_at_work(Box(), llmguard.run_tool, port)


def test_a_connection_works_while_it_is_not_answered_or_was_a_moment_ago(line, monkeypatch):
    if not any(os.access(os.path.join(folder, "ss"), os.X_OK) for folder in os.environ["PATH"].split(":")):
        missing("ss (Debian: iproute2) is not here")
    port, server, client = line
    assert Box().connections(port) == 1 and at_work(port) == 0, "kept alive, and nothing asked"
    client.send(b"GET /slow")
    eventually(lambda: at_work(port) == 1, "asked, not answered")
    monkeypatch.setattr(llmguard, "CALM", 0.0)
    assert at_work(port) == 1, "a long prefill sends nothing for as long as it likes"
    server.recv(100)
    server.send(b"answer")
    client.recv(100)
    eventually(lambda: at_work(port) == 0, "answered")
    monkeypatch.setattr(llmguard, "CALM", 35.0)
    assert at_work(port) == 1, "a token may follow"
    client.close()
    eventually(lambda: at_work(port) == 0)


@pytest.mark.parametrize("lists", [False, True], ids=["as the kernel picks them", "from its lists"])
def test_the_sockets_of_a_port_are_told_apart_by_their_state(line, monkeypatch, lists):
    if lists:
        monkeypatch.setattr(llmguard, "tcp_sockets", lambda port, state: None)
    port, server, _ = line
    (inode,) = Box().listeners(port)
    assert [process.pid for process in Box().listening(port)] == [os.getpid()]
    with socket.create_server(("::1", port), family=socket.AF_INET6) as six:
        assert sorted(Box().listeners(port)) == sorted([inode, os.fstat(six.fileno()).st_ino])
    assert Box().listeners(port) == [inode] and inode != os.fstat(server.fileno()).st_ino
    assert Box()._sockets(port, Box.TCP_ESTABLISHED) == [os.fstat(server.fileno()).st_ino]
    assert Box().listeners(free_port()) == []


def test_where_the_kernel_can_not_be_asked_for_sockets_its_lists_are_read(line, monkeypatch):
    monkeypatch.delattr(socket, "AF_NETLINK")
    assert llmguard.tcp_sockets(line[0], Box.TCP_LISTEN) is None and len(Box().listeners(line[0])) == 1


def test_connections_that_nobody_can_look_into_are_not_called_idle(line):
    for answer in ((None, "", "ss: not found"), (1, "", "Cannot open netlink socket: Permission denied"), (-9, "", "too slow")):
        assert llmguard.connections_at_work(Box(), lambda argv, seconds, answer=answer: answer, line[0]) is None
    assert llmguard.connections_at_work(Box(), lambda argv, seconds: (None, "", ""), free_port()) == 0, "none are none"


class Says:
    """What an engine says of itself, in place of EngineApi."""

    def __init__(self, in_use) -> None:
        self.says = in_use
        self.pool = llmguard.Pool(llmguard.Address("127.0.0.1", 1))

    def __call__(self, address) -> Says:
        self.address = address
        return self

    def in_use(self):
        return self.says


@pytest.mark.parametrize(("says", "connected", "in_use"), [(True, False, True), (False, True, False), (None, False, False), (None, True, True)])
def test_what_an_engine_does_not_tell_its_connections_do(folder, line, says, connected, in_use):
    port = line[0] if connected else free_port()
    agent = quiet_agent(folder)  # without ss: a connection may be somebody's
    agent.api = Says(says)
    reply = agent.answer({"op": "status", "engines": {"e": {"command": ["e"], "port": port}}, "in_use": "e"})
    assert reply["in_use"] is in_use and agent.api.address.port == port
    assert "in_use" not in agent.answer({"op": "status", "engines": {"e": {"command": ["e"], "port": port}}})


def test_a_start_does_not_stop_another_engine_of_ours_that_somebody_uses(folder):
    """Two proxies have this box in their configuration: the second's start finds the first's engine at work."""
    engines = {"x": sleeper(), "y": sleeper()}
    assert ask(folder, "start", engines, engine="y")["active"] == "y"
    pid = record(folder, "y")["pid"]
    agent = quiet_agent(folder)
    agent.api = Says(True)
    reply = agent.answer({"op": "start", "host": "here", "engine": "x", "engines": engines})
    assert not reply["ok"] and reply["error"] == {"type": "GpuBusy", "text": "engine y works for somebody, or does not answer"} and reply["in_use"] == "y"
    assert alive(pid) and not Path(folder, "engines", "here.x.json").exists()
    agent.api = Says(False)
    assert agent.answer({"op": "start", "host": "here", "engine": "x", "engines": engines})["active"] == "x" and not alive(pid)

"""Sections 7, 8 and 9: the line on which an agent tells what changes on its box."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from parts import PATIENCE, ROOT, FakeClock, eventually, free_port
from sim import PORTS, ToyAgent, ToyBox, Unit

import llmguard
from llmguard import Events, Host, HostConfig, ProxyConfig, Remote, follow, replace

SINCE = "2026-10-25 16:57:34"
JOB = "00-test.job"


class Queue:
    def __init__(self, path: Path) -> None:
        self.path = path
        for folder in ("queue", "running", "done"):
            (path / folder).mkdir(parents=True)

    def put(self, job: str = JOB) -> None:
        (self.path / "queue" / job).write_text("sleep 5\n")

    def log(self, words: str) -> None:
        with open(self.path / "runner.log", "a") as log:
            log.write(f"{SINCE} {words}\n")

    def move(self, before: str, after: str, when: float | None = None) -> None:
        os.rename(self.path / before / JOB, self.path / after / JOB)
        if when is not None:
            os.utime(self.path / "running", (when, when))


# ----- follow() itself, by an injected clock


class Line:
    """A follow line of two simulated minutes and more: `at` says what happens when, `told` is what was written and when."""

    def __init__(self, root: Path) -> None:
        self.clock = FakeClock()
        self.begun = self.clock.monotonic()
        self.queue = Queue(root / "jobs")
        self.settled()
        self.box = ToyBox(str(root))
        self.units = {name: Unit(name) for name in PORTS}
        line = self

        class Counting(ToyAgent):
            def _gpus(self, ask):
                line.gpu_reads += 1
                return super()._gpus(ask)

        self.gpu_reads = 0
        self.agent = Counting(self, str(root), self.box, self.clock)
        engines = {name: {"command": ["x"], "port": port} for name, port in PORTS.items()}
        self.ask = {"engines": engines, "job_queue": {"path": "/jobs", "settle": 120.0}}
        self.at: list[tuple[float, object]] = []
        self.told: list[tuple[float, dict]] = []

    def settled(self) -> None:
        os.utime(self.queue.path / "running", (self.clock.now() - 86400,) * 2)

    def run(self, seconds: float) -> Line:
        todo = sorted(self.at, key=lambda entry: entry[0])

        def gone(pause: float) -> bool:
            self.clock.advance(pause)
            while todo and self.passed >= todo[0][0]:
                todo.pop(0)[1]()
            return self.passed >= seconds

        follow(self.agent, self.ask, lambda message: self.told.append((self.passed, message)), gone)
        return self

    @property
    def passed(self) -> float:
        return self.clock.monotonic() - self.begun

    def statuses(self) -> list[float]:
        return [when for when, message in self.told if "checked" in message]

    def beats(self) -> list[float]:
        return [when for when, message in self.told if "heartbeat" in message]

    def kinds(self) -> list[list[str]]:
        return [[owner["kind"] for owner in message["foreign"]] for _, message in self.told if "checked" in message]


@pytest.fixture
def line(tmp_path) -> Line:
    return Line(tmp_path)


def test_the_first_status_comes_at_once(line):
    line.run(0.5)
    assert line.statuses() == [0.0] and line.told[0][1]["ok"] and line.told[0][1]["active"] is None


def test_nothing_is_told_while_nothing_changes_but_a_heartbeat_every_10_seconds_and_the_gpu_is_left_alone(line):
    line.run(600.0)
    assert line.statuses() == [0.0] and line.beats() == [10.0 * n for n in range(1, 60)] and line.gpu_reads == 1


def test_each_change_of_the_queue_is_told_at_the_next_look_and_a_change_without_meaning_is_not(line):
    queue = line.queue
    line.at = [
        (5.0, queue.put),
        (6.0, lambda: queue.log(f"queued {JOB}")),
        (7.0, lambda: queue.log(f"gpu-wait {JOB} pid=4242 comm=llama-server")),
        (8.0, lambda: queue.log("queued 01-other.job")),
        (9.0, lambda: (queue.move("queue", "running", line.clock.now()), queue.log(f"start {JOB} pid=5"))),
        (20.0, lambda: (queue.move("running", "done", line.clock.now()), queue.log(f"done {JOB}"))),
    ]
    line.run(160.0)
    assert line.statuses() == [0.0, 7.0, 9.0, 20.0, 140.0]
    assert line.kinds() == [[], ["wait"], ["job", "settle"], ["settle"], []], "and the end of the settle window, to the look"
    assert [len(message["bench_waits"]) for _, message in line.told if "checked" in message] == [0, 1, 0, 0, 0]
    assert line.gpu_reads <= 8


def test_a_status_is_a_sign_of_life_too(line):
    line.at = [(9.0, lambda: (line.queue.put(), line.queue.log(f"gpu-wait {JOB}")))]
    line.run(30.0)
    assert line.statuses() == [0.0, 9.0] and line.beats() == [19.0, 29.0]


def test_an_engine_that_ends_is_told(line):
    engine = line.units["mainline"]
    engine.main = line.box.spawn("llama-server")

    def ends() -> None:
        line.box.kill(engine.main.pid)
        engine.main = None

    line.at = [(3.0, ends)]
    line.run(5.0)
    assert [message["active"] for _, message in line.told] == ["mainline", None] and line.statuses() == [0.0, 3.0]


def test_an_engine_that_is_started_over_under_another_pid_is_looked_at_again(line):
    engine = line.units["mainline"]
    engine.main = line.box.spawn("llama-server")

    def again() -> None:
        line.box.kill(engine.main.pid)
        engine.main = line.box.spawn("llama-server")

    line.at = [(3.0, again)]
    line.run(5.0)
    assert line.gpu_reads == 2


def test_a_queue_that_cannot_be_read_is_told_and_so_is_its_return(line):
    path = line.queue.path
    line.at = [(2.0, lambda: os.rename(path, f"{path}.away")), (4.0, lambda: os.rename(f"{path}.away", path))]
    line.run(5.0)
    assert line.kinds() == [[], ["unknown"], []] and line.statuses() == [0.0, 2.0, 4.0]


def test_a_change_dated_in_the_future_does_not_make_it_look_all_the_time(line):
    ahead = line.clock.now() + 86400
    os.utime(line.queue.path / "running", (ahead, ahead))
    line.run(300.0)
    assert line.kinds() == [["settle"]] and line.gpu_reads == 1


def test_rotation_of_the_log_is_noticed_and_forgets_nothing(line):
    queue = line.queue
    queue.put()
    queue.log(f"gpu-wait {JOB} pid=4242 comm=llama-server")
    line.at = [
        (2.0, lambda: os.rename(queue.path / "runner.log", queue.path / "runner.log.1")),
        (4.0, lambda: queue.log("queued 01-other.job")),
        (6.0, lambda: queue.log(f"failed {JOB}")),
    ]
    line.run(8.0)
    assert line.statuses() == [0.0, 6.0] and line.kinds() == [["wait"], []]


def test_a_log_that_was_truncated_and_grew_beyond_its_old_size_within_one_look_is_read_anew(line):
    queue = line.queue
    queue.put()
    queue.log("queued " + JOB)

    def rewritten() -> None:
        os.truncate(queue.path / "runner.log", 0)
        queue.log("queued 01-other.job")
        queue.log(f"gpu-wait {JOB} pid=4242 comm=llama-server")

    line.at = [(2.0, rewritten)]
    line.run(3.0)
    assert line.statuses() == [0.0, 2.0] and line.kinds()[-1] == ["wait"]


# ----- `agent --follow`, a real process


class Follower:
    """`llmguard.py agent --follow` with a queue of its own. `beat`: seconds between its heartbeats."""

    def __init__(self, folder: Path, beat: float = 10.0, request: dict | None = None, **env) -> None:
        self.queue = Queue(folder / "jobs")
        program = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); import llmguard; llmguard.HEARTBEAT = {beat}; "
            f"sys.exit(llmguard.main(['--state-dir', {str(folder / 'state')!r}, 'agent', *sys.argv[1:]]))"
        )
        mode = [] if "SSH_ORIGINAL_COMMAND" in env else ["--follow"]
        argv = [sys.executable, "-c", program, *mode]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **env})
        request = request or {"engines": {}, "job_queue": {"path": str(folder / "jobs"), "settle": 0}}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def line(self) -> str:
        return self.process.stdout.readline().decode().rstrip("\n")

    def status(self) -> dict:
        """The next status, heartbeats passed over."""
        while "heartbeat" in (message := json.loads(self.line())):
            pass
        return message

    def cpu(self) -> float:
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> int:
        self.process.stdin.close()
        return self.process.wait(PATIENCE)


@pytest.fixture
def follower(tmp_path):
    """start(…) -> Follower"""
    made: list[Follower] = []

    def start(**more) -> Follower:
        made.append(Follower(tmp_path / str(len(made)), **more))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait(PATIENCE)
        one.process.stdout.close()


def test_a_real_follow_line_says_its_banner_a_status_each_change_and_ends_with_its_stdin(follower):
    one = follower()
    assert one.line() == "llmguard-agent 1"
    first = one.status()
    assert first["ok"] and first["bench_waits"] == [] and "job_queue" in first["checked"]
    one.queue.put()
    one.queue.log(f"gpu-wait {JOB} pid=4242 comm=llama-server")
    assert [wait["job"] for wait in one.status()["bench_waits"]] == [JOB]
    one.queue.log(f"start {JOB}")
    assert one.status()["bench_waits"] == []
    assert one.end() == 0 and one.process.stdout.read() == b"", "nothing that did not change was told"


def test_heartbeats_come_and_cost_next_to_nothing(follower):
    one = follower(beat=1.0)
    one.line(), one.line()
    assert "heartbeat" in json.loads(one.line())
    before = one.cpu()
    beats = [json.loads(one.line()) for _ in range(3)]
    assert all(set(beat) == {"heartbeat"} for beat in beats)
    print(f"agent --follow: {(one.cpu() - before) / 3 * 1000:.1f} ms of processor time a second")


def test_a_follow_line_whose_reader_is_gone_ends(follower):
    one = follower(beat=0.05)
    one.line(), one.line()
    one.process.stdout.close()
    assert one.process.wait(PATIENCE) == 0


def test_a_forced_command_may_follow(follower):
    one = follower(SSH_ORIGINAL_COMMAND="python3 .local/share/llmguard/llmguard.py agent --follow")
    assert one.line() == "llmguard-agent 1" and one.status()["ok"]
    assert one.end() == 0


@pytest.mark.parametrize("request_", [{"job_queue": 5}, {"job_queue": {"path": "/x", "pattern": "("}}, {"job_queue": {"unknown": 1}}])
def test_a_follow_request_that_makes_no_sense_is_answered_and_ends_with_64(follower, request_):
    one = follower(request=request_)
    assert one.line() == "llmguard-agent 1"
    reply = json.loads(one.line())
    assert reply["ok"] is False and reply["error"]["type"] == "BadRequest" and one.process.wait(PATIENCE) == 64


def test_a_follow_request_that_only_an_op_can_find_bad_is_told_once_not_ended(follower):
    one = follower(request={"engines": [], "job_queue": None})
    one.line()
    assert one.status()["error"]["type"] == "BadRequest"
    assert one.end() == 0


# ----- Remote.follow, this machine's agent


@pytest.fixture
def child(tmp_path, monkeypatch):
    """play(script) -> a Remote whose agent is that script."""

    def play(script: str) -> Remote:
        path = tmp_path / "agent.py"
        path.write_text("import json, os, sys, time\n" + script)
        monkeypatch.setattr(llmguard, "__file__", str(path))
        return Remote(HostConfig(name="here"), str(tmp_path))

    return play


STATUS = '{"ok": true, "checked": ["gpu"], "n": %d}'


def told_by(remote: Remote, request: dict | None = None) -> list[dict]:
    told: list[dict] = []
    remote.follow(request or {"op": "status"}, told.append)
    return told


def test_each_status_is_told_and_everything_else_on_the_line_is_noise(child):
    noise = ["Last login: Sun", "{", "[1]", "5", '{"heartbeat": "2026-10-25T15:57:34Z"}', "llmguard-agent 1", '{"checked', "\\x1b[2J", "[" * 9999]
    lines = [noise[0], STATUS % 1, *noise, STATUS % 2, "", STATUS % 3]
    remote = child("for line in %r: print(line, flush=True)\n" % lines)
    assert [status["n"] for status in told_by(remote)] == [1, 2, 3]


def test_a_status_that_comes_in_pieces_is_one(child):
    remote = child(f"for c in {STATUS % 7!r}: os.write(1, c.encode())\nos.write(1, b'\\n')\n")
    assert [status["n"] for status in told_by(remote)] == [7]


def test_the_request_is_sent_on_one_line_and_stdin_stays_open(child):
    remote = child("ask = json.loads(sys.stdin.readline())\nask['checked'] = []\nprint(json.dumps(ask), flush=True)\n")
    (told,) = told_by(remote, {"op": "status", "host": "größe", "job_queue": {"path": "~/jobs"}})
    assert told["host"] == "größe" and told["job_queue"] == {"path": "~/jobs"}


@pytest.mark.parametrize("script", ["", "sys.exit(3)", "os.kill(os.getpid(), 9)", "sys.stdin.close()", "raise OSError"])
def test_a_line_that_is_lost_returns(child, script):
    assert told_by(child(script)) == []


def test_silence_for_longer_than_the_heartbeat_ends_the_line_and_its_process(child, tmp_path, monkeypatch):
    remote = child(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nprint({STATUS % 1!r}, flush=True)\ntime.sleep(600)\n")
    monkeypatch.setattr(llmguard, "HEARTBEAT", 2.0)
    assert [status["n"] for status in told_by(remote)] == [1]
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_heartbeats_keep_a_quiet_line(child, monkeypatch):
    monkeypatch.setattr(llmguard, "HEARTBEAT", 2.0)
    beats = "for _ in range(30):\n    print('{\"heartbeat\": 1}', flush=True)\n    time.sleep(0.2)\n"
    assert [status["n"] for status in told_by(child(beats + f"print({STATUS % 1!r}, flush=True)\n"))] == [1]


def test_a_line_that_never_ends_is_given_up(child, monkeypatch):
    monkeypatch.setattr(llmguard, "MAX_FILE", 1 << 20)
    assert told_by(child("while True: os.write(1, b'x' * 65536)\n")) == []


def test_closing_the_remote_ends_its_line(child):
    remote = child(f"print({STATUS % 1!r}, flush=True)\ntime.sleep(600)\n")
    heard = threading.Event()
    thread = threading.Thread(target=lambda: remote.follow({}, lambda status: heard.set()), daemon=True)
    thread.start()
    assert heard.wait(PATIENCE)
    remote.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_the_real_agent_of_this_machine_tells_a_change(tmp_path):
    queue = Queue(tmp_path / "jobs")
    remote = Remote(HostConfig(name="here"), str(tmp_path / "state"))
    told: list[dict] = []
    request = {"engines": {}, "job_queue": {"path": str(queue.path), "settle": 0}}
    thread = threading.Thread(target=lambda: remote.follow(request, told.append), daemon=True)
    thread.start()
    eventually(lambda: len(told) == 1)
    queue.put()
    queue.log(f"gpu-wait {JOB}")
    eventually(lambda: len(told) == 2)
    assert told[1]["bench_waits"][0]["job"] == JOB
    remote.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()


# ----- the host that listens


class Impatient(FakeClock):
    """Whoever waits is woken early, as by every request that comes."""

    def wait(self, condition, seconds: float) -> None:
        self.advance(min(seconds, 0.7))


class Lost:
    """A line that is lost after so many seconds each time; the proxy ends after the last."""

    def __init__(self, clock, *lasts: float) -> None:
        self.clock, self.lasts = clock, list(lasts)
        self.opened: list[float] = []
        self.host: Host | None = None

    def follow(self, ask: dict, told) -> None:
        self.opened.append(self.clock.monotonic())
        assert ask["op"] == "status" and ask["job_queue"] == {"path": "~/jobs"}
        self.clock.advance(self.lasts.pop(0))
        if not self.lasts:
            self.host.close()

    def close(self) -> None:
        pass


def pauses(*lasts: float) -> list[float]:
    clock = Impatient()
    line = Lost(clock, *lasts)
    line.host = Host(HostConfig(name="a9", job_queue={"path": "~/jobs"}), ProxyConfig(), line, Events(), clock)
    line.host.follow()
    return [round(after - before - last, 3) for before, after, last in zip(line.opened, line.opened[1:], lasts)]


def test_a_line_that_is_lost_at_once_is_opened_again_ever_more_rarely_however_busy_the_proxy_is():
    assert pauses(*[0.0] * 9) == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_a_line_that_held_for_a_while_is_opened_again_soon():
    assert pauses(0.0, 0.0, 0.0, 61.0, 0.0, 0.0) == [1.0, 2.0, 4.0, 1.0, 2.0]


def test_each_status_on_the_line_makes_the_host_look_at_once():
    class Tells(Lost):
        def follow(self, ask: dict, told) -> None:
            self.host._look_due = 1e9
            told({"checked": []})
            self.looks = self.host._look_due
            self.host.close()

    line = Tells(FakeClock())
    line.host = Host(HostConfig(name="a9", job_queue={"path": "~/jobs"}), replace(ProxyConfig(), tick=3600.0), line, Events(), line.clock)
    line.host.follow()
    assert line.looks <= line.clock.monotonic()


@pytest.fixture
def hurried(serve, tmp_path):
    """A real proxy whose tick is an hour, with an engine that is up: what it notices, it heard on its follow line."""
    queue = Queue(tmp_path / "jobs")
    os.utime(queue.path / "running", (0, 0))
    engine = {"command": [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"], "port": free_port(), "models": ["m"]}

    def start(job_queue: str | None):
        here = {"engines": {"e": engine}, **({"job_queue": job_queue} if job_queue else {})}
        serving = serve({"proxy": {"tick": "1h"}, "hosts": {"here": here}})
        assert serving.ask("POST", "/models/load", {"model": "m"}).status == 200
        eventually(lambda: serving.host()["state"] == "ready")
        return serving, serving.engine_pid("e")

    return start, queue


def waits(queue: Queue, pid: int) -> None:
    queue.put()
    queue.log(f"gpu-wait {JOB} pid={pid} comm=python3")


def test_a_real_proxy_gives_way_by_its_follow_line_alone(hurried):
    start, queue = hurried
    serving, pid = start(str(queue.path))
    waits(queue, pid)
    eventually(lambda: serving.host()["state"] == "handover", serving.log())
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()
    said = f"host here: bench job {JOB} waits for the GPU since {SINCE} (held by pid {pid}): "
    assert [line.split(said)[1] for line in serving.log().splitlines() if said in line] == [
        "refusing new work, the engine stops once idle", "engine stopped",
    ]
    refusal = serving.ask("POST", "/v1/chat/completions", {"model": "m"})
    assert refusal.status == 423 and refusal.error["message"] == "model m: host here: GPU is busy: handed to a waiting bench job"
    assert refusal.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("before", ["none", "another"])
def test_a_queue_that_a_reload_brings_is_followed_from_then_on(hurried, tmp_path, before):
    start, queue = hurried
    other = Queue(tmp_path / "other")
    os.utime(other.path / "running", (0, 0))
    serving, pid = start(None if before == "none" else str(other.path))
    serving.config["hosts"]["here"]["job_queue"] = str(queue.path)
    serving.write_config()
    serving.signal(signal.SIGHUP)
    eventually(lambda: "configuration reloaded" in serving.log())
    waits(queue, pid)
    eventually(lambda: serving.host()["state"] == "handover", serving.log())

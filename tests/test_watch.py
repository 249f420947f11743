"""Section 13: watch. Real processes behind a llama-swap-shaped front (and a real llama-swap where $LLAMA_SWAP names one), on a toy GPU;
only the age of a process is the test's to say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from parts import LLMGUARD, PATIENCE, FakeClock, ask, eventually, free_port
from swap import MIB, Front, LlamaSwap, LlamaSwapWatching, ToyGpu, text_of
from test_verdict import DOCKER_PS, ID, Servers

import llmguard
from llmguard import CRITICAL, OK, UNKNOWN, WARNING, Address, Box, ModelServer, UsageError, Watch, WatchSettings

A, B = "small one", "org/b"
CASES = Path(__file__).parent / "cases"


class Aged(Box):
    """A box on which everything is older than it is."""

    older = 0.0

    def age(self, process) -> float:
        return super().age(process) + self.older


class DrainClock(FakeClock):
    """Memory drains after some seconds of waiting."""

    def __init__(self, gpu: ToyGpu) -> None:
        super().__init__()
        self.gpu, self.drained_after = gpu, 5

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if seconds == 1.0:
            self.drained_after -= 1
            if self.drained_after == 0:
                self.gpu.drains(False)


class Site:
    """A front, a toy GPU, and the passes of `watch` over them."""

    def __init__(self, kind, root: Path, patch) -> None:
        self.gpu = ToyGpu(root, patch)
        self.front = kind(root)
        self.box, self.clock = Aged(), DrainClock(self.gpu)
        self.known: dict = {}
        self.watch = self.watching()

    def watching(self, **settings) -> Watch:
        settings.setdefault("vram_low", 8 * MIB)
        if self.front.kind == "stub":  # the real one's is on its command line
            settings.setdefault("config", str(self.front.config))
        server = ModelServer(Address("127.0.0.1", self.front.port), clock=self.clock)
        return Watch(server, WatchSettings(**settings), self.known, self.box)

    def look(self, older: float | None = None) -> llmguard.Report:
        if older is not None:
            self.box.older = older
        report = self.watch.one_pass()
        json.dumps(self.known)  # what a state file could not hold would be lost
        return report

    def incident(self) -> None:
        """The document's: a reload kills the running server, and a client has it spawned while its memory still drains."""
        self.front.request(A)
        assert self.front.on_gpu(A)
        self.gpu.drains(True)
        self.front.reload()
        self.front.request(A)
        assert not self.front.on_gpu(A)


FRONTS = [Front, LlamaSwap, LlamaSwapWatching]


@pytest.fixture(params=FRONTS, ids=lambda kind: kind.kind)
def site(request, tmp_path, monkeypatch):
    if request.param is not Front and not os.environ.get("LLAMA_SWAP"):
        pytest.skip("$LLAMA_SWAP names no binary")
    monkeypatch.setattr(llmguard, "RESPAWN_SECONDS", PATIENCE)
    made = Site(request.param, tmp_path, monkeypatch)
    yield made
    made.front.close()


@pytest.fixture
def stub(tmp_path, monkeypatch):
    made = Site(Front, tmp_path, monkeypatch)
    yield made
    made.front.close()


# ----- the incident


def test_the_documents_incident_is_seen_at_20_seconds_healed_and_the_next_spawn_is_healthy(site):
    site.incident()
    site.gpu.drains(False)
    young = site.look(10.0)
    assert young.level == OK and "too young to be judged" in young.text
    report = site.look(20.0)
    assert report.level == WARNING and f"{A}: cpu" in report.text and "the next request spawns it anew" in report.text
    assert "VmRSS is" in report.text and "its GPU memory is 0 B" in report.text and "the model is 96 MiB" in report.text
    assert site.front.running() == {}
    site.front.request(A)
    assert site.front.on_gpu(A)
    healthy = site.look(20.0)
    assert healthy.level == OK and f"{A}: gpu (" in healthy.text and "the GPU holds the weights" in healthy.text


def test_a_reload_is_won_by_loading_again_once_the_memory_has_drained(site):
    for model in (A, B):
        site.front.request(model)
    assert site.look(0.0).level == OK
    site.gpu.drains(True)
    site.front.reload()
    report = site.look()
    assert site.clock.drained_after == 0, "it waited"
    told = [report.text, *report.lines]
    assert any("a reload stopped all servers: org/b, small one to be loaded again" in line for line in told), told
    assert sum("loaded again after the reload" in line for line in told) == 1 and report.text.count("loaded again after the reload") == 2
    assert site.front.on_gpu(A) and site.front.on_gpu(B)
    assert site.look(20.0).text.count(": gpu (") == 2


def test_where_a_client_was_first_nothing_is_loaded_beside_it(site):
    """llama-swap's default is one model at a time: to load another would evict the client's."""
    for model in (A, B):
        site.front.request(model)
    site.look(0.0)
    site.front.reload()
    site.front.request(A)
    report = site.look()
    assert "loaded again" not in report.text and set(site.front.running()) == {A}


def test_a_client_that_comes_while_the_memory_drains_is_seen(stub):
    stub.front.request(A)
    stub.look(0.0)
    stub.gpu.drains(True)
    stub.front.reload()
    real = stub.watch._await_drain

    def meanwhile() -> str:
        stub.front.request(A)
        return real()

    stub.watch._await_drain = meanwhile
    assert f"{A}: loaded by a client, so nothing more is loaded again" in stub.look().text and stub.known["lost"] == {}


def test_without_waiting_the_reload_would_have_been_lost(stub):
    """The race that the wait wins."""
    stub.front.request(A)
    stub.look(0.0)
    stub.gpu.drains(True)
    stub.front.reload()
    stub.watch._await_drain = lambda: ""
    stub.look()
    assert not stub.front.on_gpu(A)
    assert stub.look(20.0).level == WARNING, "and the next look heals it"


# ----- when it looks


def test_a_server_is_judged_twice_by_its_own_age_also_when_cron_comes_late(stub):
    stub.front.request(A)
    judged: list[float] = []
    real = stub.watch._judge
    stub.watch._judge = lambda *args: (judged.append(stub.box.older), real(*args))[1]
    for older in (0.0, 10.0, 19.0, 21.0, 30.0, 80.0, 95.0, 155.0, 1000.0):
        assert stub.look(older).level == OK
    assert judged == [21.0, 95.0]
    stub.front.kill(A)
    stub.front.request(A)
    stub.look(400.0)
    stub.look(460.0)
    assert judged == [21.0, 95.0, 400.0], "come late: both looks are due, and one judges"
    assert f"{A}: gpu" in stub.look(500.0).text, "what was found is still told"


def test_the_state_outlives_the_process(stub):
    stub.front.request(A)
    stub.look(25.0)
    stub.watch = stub.watching()
    stub.watch._judge = lambda *args: pytest.fail("it was judged already")
    assert f"{A}: gpu" in stub.look(30.0).text


def test_after_a_reboot_nothing_that_was_known_counts(stub, monkeypatch):
    stub.front.request(A)
    stub.front.request(B)
    stub.look(25.0)
    stub.known["heals"][A] = 1
    monkeypatch.setattr(Aged, "boot", lambda box: "another boot")
    stub.front.reload()
    report = stub.look()
    assert report.text == "no model is loaded" and stub.known["heals"] == {} and stub.known["boot"] == "another boot"


# ----- healing, and when not


def fallen(stub) -> None:
    stub.incident()
    stub.look(0.0)


def test_one_that_falls_back_again_after_an_unload_is_left_and_stays_critical(stub):
    fallen(stub)
    assert stub.look(20.0).level == WARNING
    stub.front.request(A)
    report = stub.look(20.0)
    assert report.level == CRITICAL and "also after an unload, so it is left as it is" in report.text
    assert A in stub.front.running() and stub.look(95.0).level == stub.look(5000.0).level == CRITICAL
    stub.gpu.drains(False)
    stub.front.kill(A)
    stub.front.request(A)
    assert stub.look(20.0).level == OK and stub.known["heals"] == {}, "healthy again: it may be healed another time"


def test_one_that_is_in_use_is_unloaded_when_it_is_not(stub):
    fallen(stub)
    stub.front.says(A, "busy")
    report = stub.look(20.0)
    assert report.level == CRITICAL and "in use, so it is unloaded at a later pass" in report.text and A in stub.front.running()
    assert stub.look(45.0).level == CRITICAL
    stub.front.says(A, "idle")
    assert stub.look(50.0).level == WARNING and stub.front.running() == {}


def test_force_unloads_what_is_in_use(stub):
    fallen(stub)
    stub.front.says(A, "busy")
    stub.watch = stub.watching(force=True)
    report = stub.look(20.0)
    assert report.level == WARNING and "what ran on it was cut" in report.text


def test_a_dry_run_changes_nothing(stub):
    fallen(stub)
    stub.watch = stub.watching(dry_run=True)
    report = stub.look(20.0)
    assert report.level == CRITICAL and "would be unloaded (--dry-run)" in report.text and A in stub.front.running()
    stub.front.request(B)
    stub.look(20.0)
    stub.front.reload()
    assert "would be loaded again (--dry-run)" in stub.look().text and stub.front.running() == {}


def test_an_own_limit_for_a_model_that_is_meant_to_be_in_memory(stub):
    fallen(stub)
    stub.watch = stub.watching(max_rss={A: 1 << 40})
    report = stub.look(25.0)
    assert report.level == OK and f"{A}: unknown" in report.text and "than its own limit of 1024 GiB" in report.text and A in stub.front.running()


def test_one_that_shows_its_weights_late_is_unloaded_once_too(stub, monkeypatch):
    """Mapped, and not touched before +90 s: "no sign" at +20 s is no health."""
    verdicts = {20.0: "unknown", 95.0: "cpu"}
    monkeypatch.setattr(
        llmguard, "judge_processes",
        lambda *args: (llmguard.Evidence(llmguard.Memory(1, 1, 0, 0), 1.0), llmguard.Verdict(verdicts[stub.box.older], ("figures",), "no sign")),
    )
    stub.front.request(A)
    assert stub.look(20.0).level == OK and stub.look(95.0).level == WARNING
    for _ in range(3):
        stub.front.request(A)
        assert stub.look(20.0).level == OK
        assert stub.look(95.0).level == CRITICAL and A in stub.front.running()
        stub.front.kill(A)


def test_an_unload_that_a_client_undoes_at_once_was_one(stub):
    fallen(stub)
    stub.gpu.drains(False)
    real = stub.front.kill

    def kill(name: str) -> None:
        real(name)
        stub.front.spawn(name)

    stub.front.kill = kill
    report = stub.look(20.0)
    assert report.level == WARNING and "unloaded" in report.text and stub.front.on_gpu(A)
    stub.front.kill = real


def test_a_verdict_that_was_held_up_is_taken_again_before_it_is_carried_out(stub):
    fallen(stub)
    stub.front.says(A, "busy")
    assert stub.look(20.0).level == CRITICAL
    (Path(stub.gpu.folder) / str(stub.front.server(A).pid)).write_text(str(96 * MIB))
    stub.front.says(A, "idle")
    assert stub.look(50.0).level == OK and A in stub.front.running(), "its memory was counted late"


# ----- reloads, and what is none


def test_a_single_server_that_goes_by_itself_is_no_reload(stub):
    stub.front.request(A)
    stub.look(0.0)
    stub.front.kill(A)
    assert stub.look().text == "no model is loaded" and stub.front.running() == {}


def test_two_that_go_by_themselves_or_by_hand_are_no_reload(stub):
    for _ in range(3):
        for model in (A, B):
            stub.front.request(model)
        stub.look(0.0)
        for model in (A, B):
            stub.front.kill(model)
        assert stub.look().text == "no model is loaded" and stub.front.running() == {}


def test_where_the_configuration_can_not_be_seen_two_that_never_go_by_themselves_are_one(stub):
    stub.watch = stub.watching(config="/nowhere/swap.yaml")
    for ttl, reload in ((300, False), (0, True)):
        for model in (A, B):
            stub.front.request(model)
        stub.look(0.0)
        for known in stub.watch.servers.values():
            known["ttl"] = ttl
        for model in (A, B):
            stub.front.kill(model)
        assert ("loaded again after the reload" in stub.look().text) is reload


def test_what_was_lost_long_ago_is_not_loaded_any_more(stub):
    stub.front.request(A)
    stub.look(0.0)
    stub.front.reload()
    stub.watch = stub.watching(respawn=False)
    stub.look()
    assert stub.known["lost"] == {A: 0}
    stub.clock.advance(llmguard.RESPAWN_WITHIN + 1)
    stub.watch = stub.watching()
    stub.look()
    assert stub.known["lost"] == {} and stub.front.running() == {}


def test_a_front_that_was_away_at_a_pass_still_gets_back_what_it_had_loaded(stub):
    """`systemctl restart llama-swap`, and cron in the midst of it."""
    stub.front.request(A)
    assert cli(stub, "watch", "--url", stub.front.url).returncode == 0
    stub.front.kill(A)
    stub.front.http.shutdown()
    stub.front.http.server_close()
    assert cli(stub, "watch", "--url", stub.front.url).returncode == 2
    state = json.loads((stub.front.root / "state/watch.json").read_text())["servers"][stub.front.url]
    assert state["kind"] == "llama-swap" and set(state["servers"]) == {A}
    stub.front.start()
    stub.known.update(state, front="1:1")  # the restarted one has another pid
    stub.watch = stub.watching()
    assert f"{A}: loaded again after the reload" in stub.look().text and stub.front.on_gpu(A)


def test_another_program_at_the_url_inherits_nothing(stub):
    dead = {"id": "1:1", "ttl": 0}
    stub.known.update(front="1:1", kind="llmguard", boot=Box().boot(), servers={A: dead, B: dead}, lost={A: 0}, heals={A: 1})
    stub.watch = stub.watching()
    stub.watch.server._kind = "llmguard"
    report = stub.look()
    assert report.text == "no model is loaded" and stub.watch.server.kind == "llama-swap"
    assert stub.known["servers"] == stub.known["lost"] == stub.known["heals"] == {}


def test_one_of_two_that_goes_is_no_reload(stub):
    stub.front.request(A)
    stub.front.request(B)
    stub.look(0.0)
    stub.front.kill(A)
    assert "reload" not in stub.look().text and set(stub.front.running()) == {B}


def test_a_configuration_that_changed_before_the_reload_came(stub):
    """llama-swap looks at its file every two seconds."""
    stub.front.request(A)
    stub.look(0.0)
    stub.front.write_config("deployed")
    assert "reload" not in stub.look().text
    stub.clock.advance(30.0)
    stub.front.kill(A)
    assert "loaded again after the reload" in stub.look().text and stub.front.on_gpu(A)


def test_loading_again_is_tried_three_times(stub):
    stub.front.request(A)
    stub.front.request(B)
    stub.look(0.0)
    stub.front.reload()
    del stub.front.models[A], stub.front.models[B]
    reports = [stub.look() for _ in range(3)]
    assert [report.level for report in reports] == [WARNING] * 3
    assert f"{A}: not loaded again yet: unknown model" in reports[0].text
    assert f"{A}: not loaded again after 3 tries: unknown model" in reports[2].text
    assert "not loaded" not in stub.look().text and stub.known["lost"] == {}


def reading(used: int, held: dict[int, int] | None = None) -> llmguard.GpuReading:
    rows = tuple(llmguard.GpuProcess(pid, "0", count * MIB) for pid, count in (held or {}).items())
    return llmguard.GpuReading("nvidia", (llmguard.Device(0, "0", "card", 1000 * MIB, used * MIB),), rows)


DEAD = 2**22 + 1  # no pid is that large


@pytest.mark.parametrize(
    ("looks", "says", "waits"),
    [
        ([reading(900, {DEAD: 850}), reading(400), reading(5)], "", 2),  # the driver may list the dead for a while
        ([reading(900, {os.getpid(): 895})], "", 0),  # all of it is a living process's: a desktop's
        ([reading(900, {os.getpid(): 500}), reading(500, {os.getpid(): 500})], "", 1),
        ([reading(300)] * 12, "", 11),  # stands still, and nobody knows whose it is
        ([reading(900 - n) for n in range(31)], "870 MiB of GPU memory is in use by nobody who lives", 30),
        ([llmguard.GpuReading("amd", problem="unreadable")] * 31, "", 30),  # can't be read: it is given its time
        ([llmguard.GpuReading()], "", 0),  # no GPU
    ],
)
def test_what_a_respawn_waits_for(stub, monkeypatch, looks, says, waits):
    left = list(looks)
    monkeypatch.setattr(llmguard, "read_gpus", lambda box, tool: left.pop(0))
    begun = stub.clock.monotonic()
    assert stub.watch._await_drain() == says and stub.clock.monotonic() - begun == waits and not left


# ----- whom it looks at


class Says:
    """A server that answers /running with what the test says."""

    def __init__(self, stub_engine, content) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()

        def answer(request: bytes, sock) -> bool:
            path = request.split(b" ", 2)[1]
            status, body = (b"200 OK", data) if path == b"/running" else (b"404 Not Found", b"{}")
            sock.sendall(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
            return True

        self.port = stub_engine(answer).port

    def watch(self, box: Box | None = None, tool=lambda argv, seconds: (None, "", "")) -> Watch:
        return Watch(ModelServer(Address("127.0.0.1", self.port), clock=FakeClock()), WatchSettings(), {}, box, tool)


def running_case(name: str) -> dict:
    return json.loads((CASES / "watch-running.json").read_text())[name]


def test_an_old_llama_swap_that_tells_no_port_is_not_judged_by_a_name(stub_engine):
    with pytest.raises(UsageError, match="too old to tell the port of its servers: watch needs v186 or later"):
        Says(stub_engine, running_case("old")).watch().one_pass()


def test_nothing_loaded_is_all_right(stub_engine):
    report = Says(stub_engine, running_case("none")).watch().one_pass()
    assert (report.level, report.text) == (OK, "no model is loaded")


def test_the_port_is_the_one_of_proxy_and_states_are_left_alone(stub_engine, tmp_path):
    """Commands over several lines, ids with blanks and slashes; starting, ready and stopping."""
    servers = Servers(tmp_path)
    lines = ["  sl"]
    for pid, port in ((10, 5801), (11, 5802), (12, 5803)):
        servers.spawn(pid, f"llama-server --port {port}", age=15.0)
        lines.append(f"   0: 0100007F:{port:04X} 00000000:0000 0A 0:0 0:0 0 0 0 {pid}00 1")
        os.makedirs(tmp_path / f"proc/{pid}/fd")
        os.symlink(f"socket:[{pid}00]", tmp_path / f"proc/{pid}/fd/5")
    servers.write("proc/net/tcp", "\n".join(lines) + "\n")
    report = Says(stub_engine, running_case("new")).watch(servers.box).one_pass()
    assert report.level == OK
    assert "unsloth/Qwen3.6-27B:Q4_K_M: llama-server pid 10 is too young to be judged (15s)" in report.text
    assert "embed small: starting (llama-server pid 11)" in report.text and "old one: stopping" in report.text


@pytest.mark.parametrize("front", sorted(llmguard.PORT_FRONTS))
def test_a_containers_front_is_not_taken_for_a_healthy_server(stub_engine, tmp_path, front):
    """4 MB of RSS, on the port that the server is published at: the container's own process counts, or nobody."""
    servers = Servers(tmp_path)
    servers.spawn(10, front, memory=llmguard.Memory(4 << 20, 4 << 20, 0, 0))
    servers.spawn(42, "llama-server -m /models/q.gguf", cgroup=f"0::/system.slice/docker-{ID}.scope\n", memory=llmguard.Memory(16 << 30, 16 << 30, 0, 0))
    servers.write("proc/net/tcp", f"  sl\n   0: 0100007F:{9797:04X} 00000000:0000 0A 0:0 0:0 0 0 0 1000 1\n")
    os.makedirs(tmp_path / "proc/10/fd")
    os.symlink("socket:[1000]", tmp_path / "proc/10/fd/5")
    says = Says(stub_engine, running_case("docker"))
    report = says.watch(servers.box).one_pass()
    assert report.level == UNKNOWN and f"port 9797 is served by {front}" in report.text
    tool = lambda argv, seconds: (0, DOCKER_PS, "") if argv[0] == "docker" else (None, "", "")
    watch = says.watch(servers.box, tool)
    watch.settings = WatchSettings(dry_run=True)
    report = watch.one_pass()
    assert "no GPU" in report.text and "llama-server pid 42" in report.text, "the container's own process was found, and judged"


def test_a_pid_that_died_between_two_reads_is_gone_never_without_a_gpu(stub, monkeypatch):
    stub.front.request(A)
    real = llmguard.judge_processes

    def dies(*args):
        found = real(*args)
        stub.front.kill(A)
        return found

    monkeypatch.setattr(llmguard, "judge_processes", dies)
    report = stub.look(25.0)
    assert (report.level, report.text) == (OK, f"{A}: gone")


def test_a_server_on_another_machine_is_not_looked_for_here(stub_engine):
    rows = {"running": [{"model": "m", "state": "ready", "proxy": "http://10.0.0.9:8081"}]}
    report = Says(stub_engine, rows).watch().one_pass()
    assert report.level == UNKNOWN and "m: it runs on another machine (10.0.0.9)" in report.text


@pytest.mark.parametrize("answer", [b"<html>", {"running": {}}, {"running": None}, [], {"other": 1}])
def test_what_is_no_llama_swap_is_not_watched(stub_engine, answer):
    with pytest.raises(UsageError, match="no llama-swap and no llmguard"):
        Says(stub_engine, answer).watch().one_pass()


def test_junk_in_the_list_is_left_out(stub_engine):
    rows = {"running": [None, 5, {}, {"model": 7}, {"model": "m", "state": None, "proxy": "ftp://x"}, {"model": "n", "proxy": "http://127.0.0.1:1", "ttl": "x"}]}
    report = Says(stub_engine, rows).watch().one_pass()
    assert "m: its server does not tell a port" in report.text


def test_a_server_that_is_ready_and_not_to_be_seen_is_not_called_gone_for_ever(stub_engine):
    rows = {"running": [{"model": "m", "state": "ready", "proxy": f"http://127.0.0.1:{free_port()}"}]}
    watch = Says(stub_engine, rows).watch()
    assert watch.one_pass().text == "m: gone"
    report = watch.one_pass()
    assert report.level == UNKNOWN and report.text == "m: nobody is seen on its port"


@pytest.mark.parametrize("servers", [[1], {A: 5}, {A: {}}, {A: {"id": "1:²", "looks": "x"}}, {A: {"id": "x"}, B: {"id": 5, "ttl": "x"}}])
def test_junk_in_the_state_file_is_treated_as_nothing(stub, servers):
    stub.known.update(servers=servers, heals="x", lost=5, front=7, config=3, changed=[], boot=Box().boot())
    stub.watch = stub.watching()
    stub.front.request(A)
    assert stub.look(25.0).level == OK


# ----- the command


def cli(stub, *argv: str, **env) -> subprocess.CompletedProcess:
    words = [sys.executable, "-I", LLMGUARD, "--state-dir", str(stub.front.root / "state"), *argv]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, "HOME": str(stub.front.root), **env}, cwd=stub.front.root)


def test_one_pass_from_cron_prints_one_nagios_line_and_keeps_its_state(stub):
    stub.front.request(A)
    done = cli(stub, "watch", "--url", stub.front.url)
    assert done.returncode == 0 and done.stdout.startswith(f"OK - {A}: python") and "is too young to be judged" in done.stdout, done
    assert done.stdout.count("\n") == 1 and done.stderr == ""
    state = json.loads((stub.front.root / "state/watch.json").read_text())
    assert state["version"] == 1 and set(state["servers"][stub.front.url]["servers"]) == {A} and state["servers"][stub.front.url]["level"] == 0
    quiet = cli(stub, "watch", "--url", stub.front.url, "--quiet")
    assert (quiet.returncode, quiet.stdout) == (0, "")


def test_two_never_overlap(stub):
    with llmguard.GuardState(str(stub.front.root / "state"), "watch", Address("127.0.0.1", stub.front.port)).lock:
        done = cli(stub, "watch", "--url", stub.front.url)
        quiet = cli(stub, "watch", "--url", stub.front.url, "--quiet", "--textfile", "watch.prom")
    assert not (stub.front.root / "watch.prom").exists(), "whose result it is, he tells"
    assert done.returncode == 0 and "OK - another watch runs: watch (pid" in done.stdout and quiet.stdout == ""


def test_nobody_there_is_critical_and_a_key_that_is_missing_is_unknown_with_a_hint(stub, stub_engine):
    done = cli(stub, "watch", "--url", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 2 and done.stdout.startswith("CRITICAL - no server answers on http://127.0.0.1:")

    def locked(request: bytes, sock) -> bool:
        sock.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
        return True

    done = cli(stub, "watch", "--url", f"http://127.0.0.1:{stub_engine(locked).port}")
    assert done.returncode == 3 and "wants an API key: give it by --key or $LLMGUARD_API_KEY" in done.stdout


def test_a_loop_prints_what_changed_and_for_says_how_long(stub):
    stub.front.request(A)
    done = cli(stub, "watch", "--url", stub.front.url, "--for", "400ms", "--every", "50ms")
    assert done.returncode == 0 and done.stdout.count("\n") == 1, done.stdout


def test_a_minute_of_cron_is_six_looks_however_long_each_takes(monkeypatch, tmp_path):
    looked: list[float] = []

    class Time:
        """The time module, with hands of its own."""

        at = 1000.0

        def __getattr__(self, name):
            return getattr(time, name)

        def monotonic(self):
            return self.at

        def sleep(self, seconds):
            self.at += seconds

    def one_pass(self):
        looked.append(hands.at - 1000)
        hands.at += {2: 0.7, 3: 12.0}.get(len(looked), 0.01)
        return llmguard.Report(llmguard.OK, "fine")

    hands = Time()
    monkeypatch.setattr(llmguard, "time", hands)
    monkeypatch.setattr(llmguard.Watch, "one_pass", one_pass)
    monkeypatch.setattr(ModelServer, "kind", "llama-swap")
    words = ["--state-dir", str(tmp_path), "watch", "--url", "http://127.0.0.1:9", "--quiet", "--for", "50s"]
    assert llmguard.main(words) == 0
    assert looked == [0, 10, 20, 32, 42], "one that took longer than ten seconds is followed at once"
    looked.clear()
    hands.at = 1000.0
    monkeypatch.setattr(llmguard.Watch, "one_pass", lambda self: looked.append(hands.at - 1000) or llmguard.Report(0, "fine"))
    assert llmguard.main(words) == 0
    assert looked == [0, 10, 20, 30, 40, 50]


def test_a_report_goes_where_the_options_say(stub, stub_engine):
    told: list[bytes] = []

    def answer(request: bytes, sock) -> bool:
        told.append(request.split(b" ", 2)[1])
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        return False

    ping = f"http://127.0.0.1:{stub_engine(answer).port}/uuid"
    textfile, alert = stub.front.root / "watch.prom", stub.front.root / "alert"
    script = stub.front.root / "alert.sh"
    script.write_text(f"#!/bin/sh\n(echo \"$LLMGUARD_STATUS\"; cat) > {alert}\n")
    script.chmod(0o755)
    options = ("--textfile", str(textfile), "--on-alert", str(script), "--ping", ping)
    nobody = f"http://127.0.0.1:{free_port()}"
    assert cli(stub, "watch", "--url", nobody, *options).returncode == 2
    assert told == [b"/uuid/fail"] and alert.read_text().startswith("CRITICAL\nCRITICAL - no server answers")
    alert.unlink()
    assert cli(stub, "watch", "--url", nobody, *options).returncode == 2 and not alert.exists(), "it was told"
    assert cli(stub, "watch", "--url", stub.front.url, *options).returncode == 0 and told[-1] == b"/uuid"
    metrics = textfile.read_text()
    assert "# TYPE llmguard_watch_status gauge\nllmguard_watch_status 0\n" in metrics and oct(textfile.stat().st_mode)[-3:] == "644"


def test_what_can_not_be_told_anywhere_does_not_change_the_result(stub):
    stub.front.request(A)
    options = ("--textfile", "/nowhere/x.prom", "--on-alert", "/no/such/command", "--ping", "http://127.0.0.1:1/x")
    done = cli(stub, "watch", "--url", stub.front.url, *options)
    assert done.returncode == 0 and "--textfile /nowhere/x.prom cannot be written" in done.stderr and "--ping" in done.stderr


def test_a_usage_error_is_3(stub):
    for wrong in (("--max-rss", "much"), ("--for", "soon"), ("--nothing",)):
        done = cli(stub, "watch", *wrong)
        assert done.returncode == 3 and "--help)" in done.stderr


def test_it_watches_an_llmguard_as_well(serve, stub):
    """Its /running speaks llama-swap's language, and its unload waits for what runs."""
    port = free_port()
    command = stub.front.command(A, "{port}")
    serving = serve({"hosts": {"here": {"engines": {"e": {"command": command, "port": port, "models": [A], "on_cpu": "warn"}}}}})
    assert ask(f"{serving.url}/models/load", "POST", {"model": A}).status == 200
    eventually(lambda: [row["state"] for row in ask(serving.url + "/running").json()["running"]] == ["ready"])
    watch = Watch(ModelServer(Address("127.0.0.1", int(serving.url.rpartition(":")[2])), clock=stub.clock), WatchSettings(), {}, stub.box)
    stub.box.older = 25.0
    report = watch.one_pass()
    assert report.level == OK and watch.server.kind == "llmguard" and f"{A}: gpu" in report.text, report.text
    text_of(f"{serving.url}/api/models/unload/{A.replace(' ', '%20')}", "POST")
    assert watch.one_pass().text in ("no model is loaded", f"{A}: gone")

"""Section 11 and what a service is expected to do: metrics, events, the log, systemd's notifications and sockets, help, completion."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading

import pytest
from parts import LLMGUARD, PATIENCE, ask, eventually, free_port, llama_command, missing, url_config

import llmguard
from llmguard import Histogram, prometheus_sample, reported

STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in (
        b'data: {"choices":[{"delta":{"content":"\\"completion_tokens\\": 999"}}]}\n\n',
        b'data: {"choices":[],"usage":{"completion_tokens":12,"prompt_tokens":30,"total_tokens":42},'
        b'"timings":{"prompt_n":5,"predicted_n":12,"predicted_per_second":37.5}}\n\n',
        b"data: [DONE]\n\n",
    )) + b"0\r\n\r\n"
)


def streamer(request: bytes, sock) -> bool:
    sock.sendall(STREAM)
    return True


# ----- /metrics


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (b"", {}),
        (STREAM[-400:], {"prompt": 30, "generated": 12, "rate": 37.5}),
        (b'{"usage":{"prompt_tokens":30,"completion_tokens":7}}', {"prompt": 30, "generated": 7}),
        (b'data: {"type":"message_delta","usage":{"output_tokens": 9}}\n\n', {"generated": 9}),
        (rb'data: {"text":"\"completion_tokens\": 999"}', {}),
        (b'"completion_tokens":1,"completion_tokens":2', {"generated": 2}),
    ],
)
def test_what_the_end_of_an_answer_reports(end, expected):
    assert reported(end) == expected


def test_a_histogram_counts_into_the_right_buckets():
    histogram = Histogram()
    for seconds in (0.0, 0.05, 0.06, 300.0, 301.0):
        histogram.add(seconds)
    assert histogram.counts == [2, 1, 0, 0, 0, 0, 1, 1] and histogram.total == pytest.approx(601.11)


def test_a_label_can_hold_anything():
    from prometheus_client.parser import text_string_to_metric_families

    value = 'a "b" \\ \n{}é'
    (family,) = text_string_to_metric_families("# TYPE x gauge\n" + prometheus_sample("x", {"model": value}, 1.5) + "\n")
    assert family.samples[0].labels == {"model": value} and family.samples[0].value == 1.5


def families(proxy_url: str) -> dict:
    from prometheus_client.parser import text_string_to_metric_families

    return {family.name: family for family in text_string_to_metric_families(ask(proxy_url + "/metrics").body.decode())}


def sample(found: dict, family: str, name: str = "", **labels: str) -> float | None:
    samples = found[family].samples
    return next((s.value for s in samples if s.name == (name or s.name) and labels.items() <= s.labels.items()), None)


def test_metrics_are_prometheus_own_format_and_count_what_happened(inside, stub_engine):
    proxy = inside(url_config(stub_engine(streamer).port))
    url = f"http://127.0.0.1:{proxy.port}"
    body = {"model": "small", "stream": True, "messages": []}
    for _ in range(2):
        assert ask(url + "/v1/chat/completions", "POST", body).status == 200
    assert ask(url + "/v1/chat/completions", "POST", {"model": "nobody"}).status == 404
    eventually(lambda: sample(families(url), "llmguard_requests_in_flight", model="small") == 0.0)
    found = families(url)
    assert sample(found, "llmguard_requests", model="small", status="200") == 2
    assert sample(found, "llmguard_tokens", model="small", kind="generated") == 24 and sample(found, "llmguard_tokens", model="small", kind="prompt") == 60
    assert sample(found, "llmguard_refusals", type="not_found_error") == 1
    for name in ("request_seconds", "queue_seconds", "first_byte_seconds"):
        family = found["llmguard_" + name]
        assert family.type == "histogram" and sample(found, family.name, family.name + "_count", model="small") == 2
        buckets = [s.value for s in family.samples if s.name.endswith("_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == 2
    assert sample(found, "llmguard_info", version=llmguard.__version__) == 1
    assert sample(found, "llmguard_host_up", host="here") == 1 and sample(found, "llmguard_degraded", host="here") == 0
    for family in found.values():
        assert family.name.startswith("llmguard_") and family.documentation and family.type != "unknown"
        assert family.type != "counter" or all(s.name.endswith("_total") for s in family.samples)
    rates = ask(url + "/status").json()["history"]["rates"]
    assert [(rate["model"], rate["rate"]) for rate in rates] == [("small", 37.5)] * 2


def test_status_tells_each_request_that_runs(inside, stub_engine):
    go = threading.Event()

    def slow(request: bytes, sock) -> bool:
        sock.sendall(STREAM[:STREAM.rindex(b"e\r\ndata: [DONE]")])
        go.wait(PATIENCE)
        sock.close()
        return False

    proxy = inside(url_config(stub_engine(slow).port))
    url = f"http://127.0.0.1:{proxy.port}"
    body = {"model": "small", "stream": True, "messages": []}

    def asks() -> None:
        with contextlib.suppress(http.client.IncompleteRead):  # the engine breaks off in the end
            ask(url + "/v1/chat/completions", "POST", body)

    client = threading.Thread(target=asks, daemon=True)
    client.start()
    (one,) = eventually(lambda: [each for each in ask(url + "/status").json()["requests"] if each["tokens"] == 2])
    assert one["model"] == "small" and one["host"] == "here" and one["path"] == "/v1/chat/completions" and one["age"] >= 0 and one["queued"] is False
    go.set()
    client.join(PATIENCE)
    eventually(lambda: ask(url + "/status").json()["requests"] == [])


# ----- events


def test_what_happens_to_a_host_is_told_to_everybody_who_listens(serve, llama_server, models):
    engine = {"command": llama_command(llama_server, models["small"]), "port": free_port(), "models": ["small"]}
    serving = serve({"hosts": {"here": {"engines": {"e": engine}}}})
    with socket.create_connection(("127.0.0.1", int(serving.url.rpartition(":")[2])), PATIENCE) as sock:
        sock.sendall(b"GET /models/sse HTTP/1.1\r\nHost: x\r\n\r\n")
        stream = sock.makefile("rb")
        while stream.readline() != b": llmguard\n":
            pass
        assert ask(serving.url + "/models/load", "POST", {"model": "small"}).status == 200
        told = []
        while not told or told[-1].get("event") != "engine_stopped":
            line = stream.readline()
            assert line, told
            if line.startswith(b"data: "):
                told.append(json.loads(line[6:]))
                if told[-1]["event"] == "engine_started":
                    threading.Thread(target=ask, args=(serving.url + "/models/unload", "POST", {"model": "small"}), daemon=True).start()
    statuses = [event["data"]["status"] for event in told if event["event"] == "model_status"]
    assert statuses[:2] == ["loading", "loaded"] and all(event["data"]["host"] == "here" for event in told)
    assert all(event["model"] == "small" for event in told if event["event"] == "model_status")


def test_an_owner_is_told_when_it_is_somebody_else_not_when_his_text_counts(monkeypatch):
    from test_host import Bench

    bench = Bench()
    for owners in ([{"kind": "settle", "text": "changed 1s ago"}], [{"kind": "settle", "text": "changed 31s ago"}], [{"kind": "process", "pid": 7, "text": "x"}], []):
        bench.box.owners = owners
        bench.host.poke()
        bench.settle()
    told = [[owner["kind"] for owner in event["data"]["owners"]] for event in bench.told.take() if event["event"] == "owner"]
    assert told == [["settle"], ["process"], []]


# ----- the log


def run_cli(*argv: str, env: dict | None = None, **more) -> subprocess.CompletedProcess:
    words = [sys.executable, "-I", LLMGUARD, *argv]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, **(env or {})}, **more)


def test_log_lines_are_json_where_that_is_asked_for_and_carry_priorities_for_journald(capfd, monkeypatch):
    log = llmguard.Log()
    log.journal = False
    log("one\x1b[2J")
    log.journal = True
    log("two", llmguard.WARN)
    log("three", llmguard.ERROR)
    log.json = True
    log('fo"ur\n', llmguard.WARN)
    lines = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d one\\x1b\[2J", lines[0])
    assert lines[1:3] == ["<4>two", "<3>three"]
    four = json.loads(lines[3])
    assert four["text"] == 'fo"ur\n' and four["priority"] == "warning" and llmguard.parse_timestamp(four["time"]) > 0


# ----- a service of systemd's


class Service:
    """`serve` as systemd starts it: told where to notify, given a socket that listens."""

    def __init__(self, folder, engine_port: int, listener: socket.socket | None = None, watchdog: float = 0.0) -> None:
        config = folder / "llmguard.json"
        config.write_text(json.dumps({"proxy": {"listen": f"127.0.0.1:{free_port()}"}, "hosts": {"h": {"engines": {"e": {"url": f"http://127.0.0.1:{engine_port}", "models": ["small"]}}}}}))
        self.notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = str(folder / "notify")
        if os.path.exists(path):
            os.unlink(path)
        self.notified.bind(path)
        self.notified.settimeout(PATIENCE)
        env = {**os.environ, "NOTIFY_SOCKET": path, "LLMGUARD_STATE_DIR": str(folder / "state")}
        if watchdog:
            env["WATCHDOG_USEC"] = str(int(watchdog * 1e6))
        argv = [sys.executable, "-I", LLMGUARD, "serve", "-c", str(config)]
        if listener is not None:  # as descriptor 3 of a process that keeps its pid
            become = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1'); os.execv(sys.argv[2], sys.argv[2:])"
            argv = [sys.executable, "-c", become, str(listener.fileno()), *argv]
        self.process = subprocess.Popen(argv, env=env, pass_fds=[listener.fileno()] if listener else [], stderr=subprocess.PIPE)

    def told(self, what: str) -> str:
        while True:
            text = self.notified.recv(4096).decode()
            if what in text:
                return text

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.stderr.read()
        code = self.process.wait(PATIENCE)
        self.notified.close()
        return code


def test_systemd_is_told_when_it_is_ready_alive_and_stopping(tmp_path, stub_engine):
    service = Service(tmp_path, stub_engine(streamer).port, watchdog=0.2)
    assert service.told("READY=1").splitlines() == ["READY=1", "STATUS=1 hosts"]
    assert "STATUS=1 hosts, 0 requests in flight" in service.told("WATCHDOG=1")
    service.process.send_signal(signal.SIGTERM)
    assert service.told("STOPPING=1") and service.process.wait(PATIENCE) == 0
    service.process.stderr.close()
    service.notified.close()


def test_a_restart_under_load_drops_no_connection_when_systemd_holds_the_socket(tmp_path, stub_engine):
    engine = stub_engine(streamer).port
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        first = Service(tmp_path, engine, listener)
        first.told("READY=1")
        stop, answers = threading.Event(), []

        def load() -> None:
            while not stop.is_set():
                answers.append(ask(url + "/v1/chat/completions", "POST", {"model": "small", "stream": True}, {"Connection": "close"}).status)

        clients = [threading.Thread(target=load, daemon=True) for _ in range(4)]
        for client in clients:
            client.start()
        eventually(lambda: len(answers) > 20)
        assert first.end() == 0
        seen = len(answers)
        second = Service(tmp_path, engine, listener)
        second.told("READY=1")
        eventually(lambda: len(answers) > seen + 20)
        stop.set()
        for client in clients:
            client.join(PATIENCE)
        assert second.end() == 0
        assert set(answers) == {200}


def test_a_notify_socket_that_is_gone_stops_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "none"))
    llmguard.notify("READY=1")
    assert "systemd cannot be told" in capfd.readouterr().err
    monkeypatch.setenv("NOTIFY_SOCKET", "@llmguard-test-abstract")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract:
        abstract.bind("\0llmguard-test-abstract")
        llmguard.notify("READY=1")
        assert abstract.recv(100) == b"READY=1"


def test_a_socket_that_was_given_to_somebody_else_is_not_taken(monkeypatch):
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    assert llmguard.given_listener() is None
    monkeypatch.delenv("LISTEN_PID")
    assert llmguard.given_listener() is None


# ----- the command line


def commands() -> list[list[str]]:
    verbs = [["model", verb] for verb in ("list", "load", "unload")] + [["engine", verb] for verb in ("install", "status", "start", "stop")]
    return [[], ["serve"], ["check"], ["status"], ["probe"], ["watch"], ["model"], ["engine"], ["agent"], ["completion"], *verbs]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_each_help_fits_a_screen_and_shows_an_example(command):
    said = run_cli(*command, "--help", env={"COLUMNS": "80"})
    lines = said.stdout.splitlines()
    assert said.returncode == 0 and len(lines) <= 32 and max(map(len, lines)) <= 80, (len(lines), max(lines, key=len))
    if command and command not in (["model"], ["engine"], ["agent"]):
        assert f"  llmguard.py {' '.join(command)}" in said.stdout


COMPLETIONS = [(["en"], "engine"), (["engine", "st"], "status start stop"), (["watch", "--lo"], "--loop"), (["completion", "z"], "zsh"), (["model", "u"], "unload")]


@pytest.mark.parametrize(("words", "expected"), COMPLETIONS, ids=str)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_the_words(shell, words, expected, tmp_path):
    if not shutil.which(shell):
        missing(f"{shell} is not here")
    script = tmp_path / "completion"
    script.write_text(run_cli("completion", shell).stdout)
    typed = " ".join(["llmguard.py", *words])
    if shell == "bash":
        test = f'source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _llmguard; echo "${{COMPREPLY[@]}}"'
    elif shell == "fish":
        test = f"source {script}; complete -C '{typed}' | string split -f1 \\t"
    else:
        test = (
            f"autoload -Uz compinit; compinit -u -d {tmp_path}/dump; compadd() {{ shift; for w in $@; do [[ $w == {words[-1]}* ]] && print -r -- $w; done }};"
            f" _files() {{ }}; source {script}; words=({typed}); CURRENT={len(words) + 1}; _llmguard"
        )
    said = subprocess.run([shell, "-c", test], capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, "HOME": str(tmp_path)})
    assert sorted(said.stdout.split()) == sorted(expected.split()), said


def test_status_is_coloured_on_a_terminal_only_and_never_with_no_color(serve, stub_engine):
    import pty

    serving = serve(url_config(stub_engine(streamer).port))

    def on_a_terminal(**env: str) -> str:
        pid, fd = pty.fork()
        if pid == 0:
            os.execve(sys.executable, [sys.executable, "-I", LLMGUARD, "status", "--url", serving.url], {**os.environ, "TERM": "xterm", **env})
        text = b""
        while True:
            try:
                piece = os.read(fd, 4096)
            except OSError:
                break
            if not piece:
                break
            text += piece
        os.close(fd)
        os.waitpid(pid, 0)
        return text.decode()

    clean = {"NO_COLOR": ""}
    assert "\x1b[32mOK\x1b[0m - 1 hosts" in on_a_terminal(**clean)
    assert "\x1b" not in on_a_terminal(NO_COLOR="1") and "\x1b" not in on_a_terminal(TERM="dumb", **clean)
    assert "\x1b" not in run_cli("status", "--url", serving.url).stdout



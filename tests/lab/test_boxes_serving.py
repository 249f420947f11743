"""The proxy in front of real boxes: it switches their engines, and takes no GPU that somebody else holds."""

import http.client
import json
import re
import subprocess
import threading
from pathlib import Path

import pytest
from lab import wait_for

MAINLINE, OTHER = "llm-engine-mainline", "llm-engine-other"
OLDER_AGENT = Path(__file__).with_name("older_agent.py")
INSTALLED = ".local/share/llmguard/llmguard.py"


def complete(serving, model, tokens=4, **more):
    return serving.ask("POST", "/v1/completions", {"model": model, "prompt": "the", "max_tokens": tokens}, **more)


def stream(serving, model, tokens):
    """A stream in flight."""
    body = {"model": model, "prompt": "the", "max_tokens": tokens, "stream": True}
    flowing = serving.stream("/v1/completions", body)
    assert flowing.status == 200
    wait_for("the first token", lambda: b"data: " in flowing.first())
    return flowing


class Later(threading.Thread):
    """A request whose reply is looked at later."""

    def __init__(self, serving, model):
        super().__init__(daemon=True)
        self.serving, self.model, self.reply = serving, model, None
        self.start()

    def run(self):
        self.reply = complete(self.serving, self.model)


def refused(serving, model):
    """Ask for a model; the refusal's text, once it is the one that a client should get: 423, and no number of a process."""
    reply = complete(serving, model)
    assert reply.status == 423 and reply.error["type"] == "gpu_busy"
    assert reply.headers["x-should-retry"] == "false"
    assert "pid" not in reply.error["message"]
    return reply.error["message"]


# -------------------------------------------------------------------------------------------------------------- engines


def test_a_switch_waits_for_the_stream_that_runs_and_the_stream_ends_whole(operator, ready):
    serving = operator.serve(ready)
    flowing = stream(serving, "a9-deep", 300)
    other = Later(serving, "a9-small")
    wait_for("the other request to queue", lambda: serving.host("a9")["queued"] == 1)
    assert serving.host("a9")["state"] == "draining"
    assert other.reply is None and not ready.unit_pids(OTHER)
    assert flowing.whole().count(b"data: ") >= 300 and flowing.seen.endswith(b"data: [DONE]\n\n")
    other.join(60)
    assert other.reply.status == 200 and other.reply.json()["model"] == "a9-small"
    assert serving.switches() == ["mainline", "other"]
    assert ready.unit_pids(OTHER) and not ready.unit_pids(MAINLINE)
    host = serving.host("a9")
    assert (host["state"], host["engine"], host["in_flight"]) == ("ready", "other", 0)


def test_an_engine_that_was_started_by_hand_is_adopted_when_it_is_asked_for(operator, ready):
    serving = operator.serve(ready)
    wait_for("the first look", lambda: serving.host("a9")["last_tick"])
    ready.start_engine(MAINLINE)
    pids = ready.unit_pids(MAINLINE)
    assert complete(serving, "a9-deep").status == 200
    assert ready.unit_pids(MAINLINE) == pids
    assert serving.host("a9")["engine"] == "mainline"


def test_an_engine_that_runs_on_beside_the_proxy_is_stopped_only_when_nobody_uses_it(operator, ready):
    """Somebody streams straight from an engine that was started by hand; a client of the proxy wants another one."""
    port = ready.start_engine(MAINLINE)
    serving = operator.serve(ready)
    wait_for("the engine to be taken over", lambda: serving.host("a9")["engine"] == "mainline")
    beside = http.client.HTTPConnection(ready.address, port, timeout=60)
    beside.request("POST", "/completion", json.dumps({"prompt": "the", "n_predict": 300, "stream": True}))
    answer = beside.getresponse()
    answer.read1()
    other = Later(serving, "a9-small")
    assert b'"stop":true' in answer.read()  # IncompleteRead when it was cut
    other.join(60)
    assert other.reply.status == 200 and not ready.unit_pids(MAINLINE)


def test_a_failed_start_tells_the_units_last_words_and_is_answered_from_memory(operator, ready):
    # It lives on for a moment: journald learns whose words they are from the process that said them.
    ready.write(".config/systemd/user/%s.service.d/lab.conf" % OTHER,
                "[Service]\nExecStart=\nExecStart=/bin/sh -c 'echo no such layer >&2; sleep 0.5; exit 3'\n")
    ready.systemctl("daemon-reload")
    serving = operator.serve(ready)
    for _ in range(2):
        reply = complete(serving, "a9-small")
        assert reply.status == 500 and reply.error["type"] == "engine_failed"
        assert "no such layer" in reply.error["message"]
    assert serving.switches() == ["other"]


def test_an_idle_engine_is_stopped(operator, ready):
    serving = operator.serve(ready, idle_stop="1s")
    assert complete(serving, "a9-small").status == 200
    wait_for("the stop", lambda: serving.host("a9")["state"] == "off")
    assert not ready.unit_pids(OTHER) and "engine other stopped" in serving.log()


def test_status_shows_the_agents_version_and_hash_and_the_tick(operator, ready):
    serving = operator.serve(ready)
    host = wait_for("the first look", lambda: serving.host("a9") if serving.host("a9")["agent"] else None)
    assert host["state"] == "off" and host["engine"] is None and host["owners"] == []
    assert host["agent"]["sha256"] == serving.status()["sha256"] and host["agent"]["version"]
    assert host["last_tick"].endswith("Z") and host["down_since"] is None
    assert host["gpu"]["devices"][0]["name"] == "NVIDIA A9 96GB"


def test_engines_behind_a_tunnel_are_reached_although_they_listen_on_the_boxs_loopback_alone(operator, ready):
    for unit, port in ((MAINLINE, 8081), (OTHER, 8082)):
        path = ".config/systemd/user/%s.service" % unit
        ready.write(path, ready.read(path).replace("0.0.0.0", "127.0.0.1"))
    ready.systemctl("daemon-reload")
    host = operator.host(ready, tunnel=True)
    del host["address"]
    serving = operator.serve(hosts={"a9": host})
    assert complete(serving, "a9-small").status == 200
    assert ready.http_status(8082, "/health") is None
    flowing = stream(serving, "a9-deep", 50)
    assert flowing.whole().endswith(b"data: [DONE]\n\n")
    serving.signal(15)
    serving.process.wait(30)
    tunnel = ["pgrep", "-f", operator.runtime + "/llmguard-ssh/a9-8081:"]
    wait_for("the end of its tunnel", lambda: subprocess.run(tunnel, stdout=subprocess.DEVNULL).returncode == 1)


# --------------------------------------------------------------------------------------------------- who holds the GPU


def test_a_foreign_process_is_a_423_that_names_it_and_since_when_and_nothing_is_started(operator, ready, nothing_started):
    ready.hold_gpu(mib=7000, comm="bench")
    serving = operator.serve(ready)
    text = refused(serving, "a9-small")
    assert re.search(r"^model a9-small: switching host a9 to engine other failed: host a9: GPU is busy, not switching: "
                     r"bench of guest holds 6\.8 GiB of GPU memory since 20\d\d-\d\d-\d\dT", text)
    owner, = serving.host("a9")["owners"]
    assert owner["kind"] == "process" and owner["comm"] == "bench" and owner["user"] == "guest" and owner["since"]
    assert nothing_started(ready)


def test_another_users_engine_of_the_same_name_is_a_foreign_process(operator, ready, nothing_started):
    ready.start_engine(MAINLINE, user="guest")
    serving = operator.serve(ready)
    assert "llama-server of guest holds 17.6 GiB" in refused(serving, "a9-deep")
    assert nothing_started(ready) and ready.unit_pids(MAINLINE, "guest")


def test_a_listener_on_the_bench_port_holds_the_gpu(operator, ready, nothing_started):
    pid = ready.spawn(["/usr/bin/python3", "-c", "import socket, time; s = socket.create_server(('127.0.0.1', 8099)); time.sleep(3600)"])
    wait_for("the listener", lambda: ":1FA3 " in ready.exec("root", ["cat", "/proc/net/tcp"]).stdout)
    serving = operator.serve(hosts={"a9": operator.host(ready, bench_port=8099)})
    assert "listens on the bench port 8099" in refused(serving, "a9-small")
    assert [owner["kind"] for owner in serving.host("a9")["owners"]] == ["bench_port"] and nothing_started(ready)
    ready.end(pid)
    assert complete(serving, "a9-small").status == 200


def test_a_driver_that_fails_is_unknown_and_unknown_is_never_free(operator, ready, nothing_started):
    ready.gpu(mode="mismatch")
    serving = operator.serve(ready)
    assert "the GPU could not be read: nvidia-smi failed" in refused(serving, "a9-small")
    assert serving.host("a9")["owners"][0]["kind"] == "unknown" and nothing_started(ready)
    ready.gpu()
    assert complete(serving, "a9-small").status == 200


def test_a_driver_that_hangs_is_unknown_and_unknown_is_never_free(operator, ready, nothing_started):
    ready.gpu(mode="hang")
    serving = operator.serve(ready)
    assert "the GPU could not be read: nvidia-smi" in refused(serving, "a9-small")
    assert serving.host("a9")["owners"][0]["kind"] == "unknown" and nothing_started(ready)


def test_memory_that_nobody_explains_is_an_owner_unless_it_is_to_be_ignored(operator, ready, nothing_started):
    ready.gpu(unlisted=6000)
    serving = operator.serve(ready)
    assert "that no listed process explains" in refused(serving, "a9-small") and nothing_started(ready)
    ignoring = operator.serve(hosts={"a9": operator.host(ready, unexplained="ignore")})
    assert complete(ignoring, "a9-small").status == 200


# ---------------------------------------------------------------------------------------------------- an older agent


@pytest.mark.parametrize("guard, value", [("job_queue", "~/jobs"), ("bench_port", 8099), ("gpu", None)])
def test_an_older_agent_that_drops_what_it_is_asked_fails_closed_and_is_sent_no_start(operator, a9, guard, value):
    a9.write(INSTALLED, OLDER_AGENT.read_text())
    more = {guard: value} if value else {}
    serving = operator.serve(hosts={"a9": operator.host(a9, **more)})
    sentence = "the agent on host a9 predates %s: run `llmguard.py engine install a9`" % guard
    assert "the agent on host a9 predates " in refused(serving, "a9-small")
    assert sentence in [owner["text"] for owner in serving.host("a9")["owners"]]
    done = operator.run("engine", "start", "a9", "other", box=a9, **more)
    assert done.returncode == 75 and "predates" in done.stderr
    assert sentence in operator.run("engine", "status", "a9", box=a9, **more).stdout
    assert a9.exec("llm", ["test", "-e", "starts"], check=False).returncode == 1
    assert "replaces" in operator.install(a9)
    if guard != "job_queue":
        wait_for("the new agent's answer", lambda: not serving.host("a9")["owners"])
        assert complete(serving, "a9-small").status == 200

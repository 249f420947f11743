"""A real `serve` in front of real llama-servers: what passes through is unchanged, nothing in flight is cut, and engines come
and go as the design says."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from parts import PATIENCE, Serving, Stream, ask, eventually, free_port, llama_command

LONG = 400  # tokens of the deep model: a stream of some seconds


def chat(model: str, tokens: int = 8, **more) -> dict:
    """A chat whose answer is the same every time."""
    messages = [{"role": "user", "content": "say something"}]
    fixed = {"temperature": 0, "seed": 7, "cache_prompt": False, "ignore_eos": True}
    return {"model": model, "messages": messages, "max_tokens": tokens, **fixed, **more}


def long_chat(model: str = "deep", tokens: int = LONG) -> dict:
    return chat(model, tokens, stream=True)


def text_of(reply) -> str:
    assert reply.status == 200, reply.body
    return reply.json()["choices"][0]["message"]["content"]


def assert_whole(body: bytes, tokens: int) -> None:
    """A streamed chat with all its tokens and its own end."""
    assert body.endswith(b"data: [DONE]\n\n"), body[-300:]
    assert b'"predicted_n":%d,' % tokens in body


def engine(llama_server: str, model: str, name: str, *more: str) -> dict:
    return {"command": llama_command(llama_server, model, *more), "port": free_port(), "models": [name]}


@pytest.fixture(scope="session")
def engines(llama_server, models):
    """make(name, …) -> engines by name, each on a port of its own."""

    def make(*names: str) -> dict:
        return {name: dict(all_engines(llama_server, models)[name]) for name in names}

    return make


def all_engines(llama_server, models) -> dict:
    return {
        "small": engine(llama_server, models["small"], "small", "-np", "4", "-c", "8192"),
        "deep": engine(llama_server, models["deep"], "deep", "-np", "2"),
        "vectors": engine(llama_server, models["small"], "vectors", "--embeddings", "--pooling", "mean"),
    }


@pytest.fixture(scope="module")
def shared(engines, tmp_path_factory):
    """One `serve` for all tests that leave it as they found it: engines of one host that are never stopped for being idle."""
    config = {"proxy": {"idle_stop": "never"}, "hosts": {"here": {"engines": engines("small", "deep", "vectors")}}}
    serving = Serving(config, tmp_path_factory.mktemp("shared"))
    yield serving.start()
    serving.stop()


def direct(serving: Serving, name: str) -> str:
    """Where an engine answers those who pass by the proxy."""
    return "http://127.0.0.1:{}".format(serving.config["hosts"]["here"]["engines"][name]["port"])


def busy_slots(serving: Serving, name: str) -> list[dict]:
    return [slot for slot in ask(direct(serving, name) + "/slots").json() if slot["is_processing"]]


@contextlib.contextmanager
def in_background(function, *args):
    """Do it in a thread; yields its future, and waits for it at the end."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(function, *args)


# ----- what passes through

PASSING = re.compile(
    rb'"(?:id|created|created_at|completed_at|item_id)":(?:"[^"]*"|\d+)|"timings":\{[^}]*\}'  # differ from answer to answer
    rb'|"(?:cache_read_input_tokens|input_tokens|cached_tokens)":\d+'  # /v1/messages drops cache_prompt: what a slot still knows
)

PROMPT = {"temperature": 0, "seed": 7, "cache_prompt": False}
MESSAGES = [{"role": "user", "content": "say something"}]
EXCHANGES = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 12, **PROMPT},
    "/v1/completions": {"prompt": "it was", "max_tokens": 12, **PROMPT},
    "/completion": {"prompt": "it was", "n_predict": 12, **PROMPT},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 12, **PROMPT},
    "/v1/responses": {"input": "say something", "max_output_tokens": 12, **PROMPT},
    "/v1/messages/count_tokens": {"messages": MESSAGES, "max_tokens": 12},
    "/tokenize": {"content": "it was"},
    "/v1/embeddings": {"input": ["it was", "he is"]},
}
STREAMED = ["/v1/chat/completions", "/v1/completions", "/completion", "/v1/messages", "/v1/responses"]


@pytest.mark.parametrize(("path", "stream"), [(path, False) for path in EXCHANGES] + [(path, True) for path in STREAMED])
def test_an_answer_through_the_proxy_is_the_engines_own(shared, path, stream):
    name = "vectors" if path == "/v1/embeddings" else "small"
    body = {"model": name, "stream": stream, **EXCHANGES[path]}
    through = shared.ask("POST", path, body)
    from_engine = ask(direct(shared, name) + path, "POST", body)
    assert through.status == from_engine.status == 200, through.body
    assert through.headers["Content-Type"] == from_engine.headers["Content-Type"]
    assert PASSING.sub(b"", through.body) == PASSING.sub(b"", from_engine.body)


def test_an_error_of_the_engine_arrives_as_it_is(shared):
    body = chat("small", messages="not a list")
    through = shared.ask("POST", "/v1/chat/completions", body)
    from_engine = ask(direct(shared, "small") + "/v1/chat/completions", "POST", body)
    assert (through.status, through.body) == (from_engine.status, from_engine.body)
    assert through.status == 400


def test_a_public_name_is_rewritten_to_the_upstream_name_and_nothing_else_is(serve, shared):
    text_of(shared.ask("POST", "/v1/chat/completions", chat("small")))
    renamed = {"url": direct(shared, "small"), "models": {"my-model": "small"}}
    serving = serve({"hosts": {"there": {"engines": {"e": renamed}}}})
    through = serving.ask("POST", "/v1/chat/completions", chat("my-model"))
    from_engine = ask(direct(shared, "small") + "/v1/chat/completions", "POST", chat("small"))
    assert PASSING.sub(b"", through.body) == PASSING.sub(b"", from_engine.body)


def test_the_first_byte_of_a_stream_comes_while_the_engine_still_generates(shared):
    stream = shared.stream("/v1/chat/completions", long_chat())
    assert stream.first()
    assert busy_slots(shared, "deep")
    assert_whole(stream.whole(), LONG)


def test_fifty_streams_at_once_all_end_whole_and_unmixed(shared):
    text_of(shared.ask("POST", "/v1/chat/completions", chat("small")))  # the engine is up: nothing but streams is measured
    start = threading.Barrier(50)

    def one(number: int) -> bytes:
        start.wait(PATIENCE)
        return shared.stream("/v1/chat/completions", long_chat("small", 20 + number)).whole()

    with ThreadPoolExecutor(50) as pool:
        bodies = list(pool.map(one, range(50)))
    for number, body in enumerate(bodies):
        assert_whole(body, 20 + number)
        assert body.count(b"data: {") >= 20 + number
        assert len(set(re.findall(rb'"id":"([^"]+)"', body))) == 1, "pieces of another stream"
    eventually(lambda: shared.host()["in_flight"] == 0, "all are counted out")


def test_a_client_killed_in_the_midst_of_a_stream_frees_its_slot(shared):
    program = (
        "import sys, urllib.request as u; r = u.urlopen(u.Request(sys.argv[1], sys.argv[2].encode()));"
        "r.read1(); print('in flight', flush=True); r.read()"
    )
    body = json.dumps(long_chat("deep", 8000))
    client = subprocess.Popen([sys.executable, "-c", program, shared.url + "/v1/chat/completions", body], stdout=subprocess.PIPE)
    with client:
        assert client.stdout.readline() == b"in flight\n"
        (slot,) = busy_slots(shared, "deep")
        client.kill()
    eventually(lambda: not busy_slots(shared, "deep"), "the slot is idle", 20)
    (after,) = [s for s in ask(direct(shared, "deep") + "/slots").json() if s["id"] == slot["id"]]
    assert after["next_token"][0]["n_remain"] > 0, "it was not cut: it ran to its end"
    eventually(lambda: shared.host()["in_flight"] == 0, "the request is counted out")


def test_a_client_that_leaves_while_the_engine_is_silent_frees_its_slot(shared):
    client = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=PATIENCE)
    client.request("POST", "/v1/chat/completions", json.dumps(chat("deep", 8000)))  # not streamed: silent until the end
    eventually(lambda: shared.host()["in_flight"] == 1 and shared.host()["engine"] == "deep", "the request is with the engine")
    client.close()
    eventually(lambda: shared.host()["in_flight"] == 0, "the request is counted out", 20)


# ----- two engines of one host


def test_a_b_a_b_a_b_from_six_clients_is_answered_rightly_with_at_most_two_switches_a_pair(shared):
    right = {name: text_of(shared.ask("POST", "/v1/chat/completions", chat(name))) for name in ("small", "deep")}
    assert right["small"] != right["deep"]
    before = len(shared.switches())
    start = threading.Barrier(6)

    def one(name: str) -> tuple[str, str]:
        start.wait(PATIENCE)
        return name, text_of(shared.ask("POST", "/v1/chat/completions", chat(name)))

    with ThreadPoolExecutor(6) as pool:
        for name, text in pool.map(one, ["small", "deep"] * 3):
            assert text == right[name]
    assert len(shared.switches()) - before <= 6


def test_requests_that_queue_are_served_a_a_a_b_b_b(shared):
    stream = shared.stream("/v1/chat/completions", long_chat())
    stream.first()
    before = len(shared.switches())
    with ThreadPoolExecutor(6) as pool:
        futures = []
        for number, name in enumerate(["small", "deep", "small", "deep", "small", "deep"], 1):
            futures.append((name, pool.submit(shared.ask, "POST", "/v1/chat/completions", chat(name))))
            eventually(lambda n=number: shared.host()["queued"] == n, f"{number} are queued")
        assert_whole(stream.whole(), LONG)
        for _, future in futures:
            text_of(future.result(PATIENCE))
    assert shared.switches()[before:] == ["small", "deep"]


def test_a_stream_in_flight_outlives_a_switch(shared):
    stream = shared.stream("/v1/chat/completions", long_chat())
    stream.first()
    with in_background(shared.ask, "POST", "/v1/chat/completions", chat("small")) as other:
        eventually(lambda: shared.host()["queued"] == 1, "the other request is queued")
        assert shared.host()["state"] == "draining"
        assert not other.done()
        assert_whole(stream.whole(), LONG)
        text_of(other.result(PATIENCE))
    assert shared.host()["engine"] == "small"


def test_a_client_that_leaves_the_queue_causes_no_switch(shared):
    stream = shared.stream("/v1/chat/completions", long_chat())
    stream.first()
    before = len(shared.switches())
    client = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=PATIENCE)
    client.request("POST", "/v1/chat/completions", json.dumps(chat("small")))
    eventually(lambda: shared.host()["queued"] == 1, "it is queued")
    client.close()
    eventually(lambda: shared.host()["queued"] == 0, "it is dropped from the queue")
    assert_whole(stream.whole(), LONG)
    text_of(shared.ask("POST", "/v1/chat/completions", chat("deep")))
    assert shared.switches()[before:] == []


def test_an_outside_client_that_streams_from_the_engine_holds_up_a_switch(shared):
    text_of(shared.ask("POST", "/v1/chat/completions", chat("deep", 1)))
    outside = Stream(direct(shared, "deep") + "/v1/chat/completions", long_chat())
    outside.first()
    with in_background(shared.ask, "POST", "/v1/chat/completions", chat("small")) as other:
        eventually(lambda: shared.host()["queued"] == 1, "the other request is queued")
        assert_whole(outside.whole(), LONG)
        text_of(other.result(PATIENCE))


def test_an_unload_waits_for_the_stream_that_runs(shared):
    stream = shared.stream("/v1/chat/completions", long_chat())
    stream.first()
    with in_background(shared.ask, "POST", "/api/models/unload/deep") as unload:
        eventually(lambda: shared.host()["state"] == "draining", "the engine drains")
        assert not unload.done()
        assert_whole(stream.whole(), LONG)
        assert unload.result(PATIENCE).body == b"OK"
    assert (shared.host()["state"], shared.host()["engine"]) == ("off", None)


def test_a_request_that_comes_during_an_unload_starts_the_engine_again(shared):
    stream = shared.stream("/v1/chat/completions", long_chat())
    stream.first()
    before = len(shared.switches())
    assert shared.ask("POST", "/models/unload", {"model": "deep"}).json() == {"success": True}
    with in_background(shared.ask, "POST", "/v1/chat/completions", chat("deep")) as late:
        eventually(lambda: shared.host()["queued"] == 1, "the late request is queued")
        assert_whole(stream.whole(), LONG)
        text_of(late.result(PATIENCE))
    assert shared.switches()[before:] == ["deep"]


def test_a_request_that_waits_too_long_for_a_switch_is_refused_with_423(serve, engines):
    serving = serve({"hosts": {"here": {"engines": engines("small", "deep")}}})
    stream = streaming(serving)
    serving.config["proxy"]["queue_timeout"] = "200ms"
    serving.write_config()
    serving.signal(signal.SIGHUP)
    eventually(lambda: "configuration reloaded" in serving.log(), "the short wait is read")
    refused = serving.ask("POST", "/v1/chat/completions", chat("small"))
    assert refused.status == 423
    assert refused.error["type"] == "gpu_busy"
    assert refused.error["message"].startswith("model small: host here: GPU is busy: ")
    assert refused.headers["x-should-retry"] == "false"
    assert_whole(stream.whole(), LONG)
    assert serving.switches() == ["deep"]


def streaming(serving: Serving) -> Stream:
    """A long stream of the deep model in flight."""
    stream = serving.stream("/v1/chat/completions", long_chat())
    assert stream.status == 200
    stream.first()
    return stream


# ----- engines that die, sleep, idle


def test_an_engine_killed_in_the_midst_of_a_stream_breaks_it_and_is_started_by_the_next_request(shared):
    stream = shared.stream("/v1/chat/completions", long_chat())
    stream.first()
    os.kill(shared.engine_pid("deep"), signal.SIGKILL)
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        stream.whole()
    eventually(lambda: is_closed(shared, "deep"), "the dead engine's port is closed")
    before = len(shared.switches())
    text_of(shared.ask("POST", "/v1/chat/completions", chat("deep")))
    assert shared.switches()[before:] == ["deep"]


def test_an_engine_killed_while_idle_is_started_by_the_next_request(shared):
    text_of(shared.ask("POST", "/v1/chat/completions", chat("small")))
    os.kill(shared.engine_pid("small"), signal.SIGKILL)
    eventually(lambda: is_closed(shared, "small"), "the dead engine's port is closed")
    text_of(shared.ask("POST", "/v1/chat/completions", chat("small")))


def test_an_idle_engine_is_stopped_after_its_last_request_ended_and_never_under_a_stream(serve, engines):
    serving = serve({"proxy": {"idle_stop": "200ms", "tick": "1s"}, "hosts": {"here": {"engines": engines("deep")}}})
    stream = streaming(serving)
    assert_whole(stream.whole(), LONG)  # it lasted far longer than idle_stop, and many ticks
    eventually(lambda: serving.host()["state"] == "off", "it is stopped")
    assert serving.log().count("idle for 0s: stopping engine deep") == 1
    assert ask_or_none(direct(serving, "deep") + "/health") is None
    text_of(serving.ask("POST", "/v1/chat/completions", chat("deep")))


def test_an_outside_client_that_streams_from_the_engine_holds_up_the_idle_stop(serve, engines):
    serving = serve({"proxy": {"idle_stop": "200ms", "tick": "1s"}, "hosts": {"here": {"engines": engines("deep")}}})
    through = streaming(serving)
    outside = Stream(direct(serving, "deep") + "/v1/chat/completions", long_chat())
    outside.first()
    through.close()
    assert_whole(outside.whole(), LONG)
    eventually(lambda: serving.host()["state"] == "off", "it is stopped")


def test_an_engine_that_the_proxy_never_used_is_left_alone(serve, engines, tmp_path):
    """Adopted, and idle for ever so long: whoever started it decides."""
    hosts = {"here": {"engines": engines("small")}}
    first = serve({"proxy": {"idle_stop": "never"}, "hosts": hosts})
    text_of(first.ask("POST", "/v1/chat/completions", chat("small")))
    first.process.kill()
    first.process.wait()
    second = serve({"proxy": {"idle_stop": "100ms", "tick": "1s"}, "hosts": hosts}, state=first.state)
    ticks = set()
    eventually(lambda: ticks.add(second.host()["last_tick"]) or len(ticks) > 2, "ticks pass")
    assert second.host()["state"] == "ready"
    assert "stopping engine" not in second.log()


def test_a_sleeping_engine_is_not_woken_to_be_asked_whether_it_is_in_use(serve, llama_server, models):
    sleeper = engine(llama_server, models["small"], "sleeper", "--sleep-idle-seconds", "1")
    serving = serve({"proxy": {"tick": "1s"}, "hosts": {"here": {"engines": {"sleeper": sleeper}}}})
    text_of(serving.ask("POST", "/v1/chat/completions", chat("sleeper")))
    eventually(lambda: ask(direct(serving, "sleeper") + "/props").json()["is_sleeping"], "it sleeps")
    seen = {serving.host()["last_tick"]}
    eventually(lambda: seen.add(serving.host()["last_tick"]) or len(seen) > 2, "ticks pass while it sleeps")
    assert serving.ask("POST", "/api/models/unload/sleeper").status == 200
    assert serving.host()["state"] == "off"
    log = serving.engine_log("sleeper")
    assert "entering sleeping state" in log and "exiting sleeping state" not in log


def is_closed(serving: Serving, name: str) -> bool:
    """Is an engine's port closed? While a killed process dies, connections to it still succeed, and are then reset."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", serving.config["hosts"]["here"]["engines"][name]["port"])) == errno.ECONNREFUSED


def ask_or_none(url: str):
    """None when nobody answers."""
    try:
        return ask(url)
    except (OSError, http.client.HTTPException):
        return None


# ----- engines that do not start


def test_a_start_that_fails_is_500_with_the_logs_last_lines_and_is_answered_from_memory_for_a_while(serve, llama_server, models):
    broken = engine(llama_server, models["small"], "broken", "--no-such-flag")
    serving = serve({"hosts": {"here": {"engines": {"broken": broken}}}})
    for _ in range(2):
        refused = serving.ask("POST", "/v1/chat/completions", chat("broken"))
        assert refused.status == 500
        assert refused.error["type"] == "engine_failed"
        assert "no-such-flag" in refused.error["message"]
        assert refused.headers["x-should-retry"] == "false"
    assert serving.switches() == ["broken"]
    assert "not tried again for 10s" in serving.log()
    (listed,) = serving.ask("GET", "/v1/models").json()["data"]
    assert listed["status"]["value"] == "unloaded" and listed["status"]["failed"] is True


def test_a_model_file_that_is_no_model_fails_the_start_in_the_engines_own_words(serve, llama_server, tmp_path):
    (tmp_path / "no.gguf").write_text("this is no model")
    serving = serve({"hosts": {"here": {"engines": {"bad": engine(llama_server, str(tmp_path / "no.gguf"), "bad")}}}})
    refused = serving.ask("POST", "/v1/chat/completions", chat("bad"))
    assert (refused.status, refused.error["type"]) == (500, "engine_failed")
    assert "ended while it started" in refused.error["message"] and "no.gguf" in refused.error["message"]


def test_a_program_that_is_not_there_fails_the_start_and_is_named(serve):
    missing = {"command": ["/nowhere/llama-server", "--port", "{port}"], "port": free_port(), "models": ["missing"]}
    refused = serve({"hosts": {"here": {"engines": {"missing": missing}}}}).ask("POST", "/v1/chat/completions", chat("missing"))
    assert (refused.status, refused.error["type"]) == (500, "engine_failed")
    assert "/nowhere/llama-server" in refused.error["message"]


def test_a_port_that_a_stranger_listens_on_fails_the_start_and_the_stranger_is_named(serve, llama_server, models):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = dict(engine(llama_server, models["small"], "taken"), port=stranger.getsockname()[1])
        serving = serve({"hosts": {"here": {"engines": {"taken": taken}}}})
        refused = serving.ask("POST", "/v1/chat/completions", chat("taken"))
    assert (refused.status, refused.error["type"]) == (500, "engine_failed")
    name = open(f"/proc/{os.getpid()}/comm").read().strip()
    assert f"already taken by {name}" in refused.error["message"]


def test_a_failed_start_leaves_the_other_engine_usable(serve, llama_server, models, engines):
    broken = engine(llama_server, models["small"], "broken", "--no-such-flag")
    serving = serve({"hosts": {"here": {"engines": {"broken": broken, **engines("small")}}}})
    text_of(serving.ask("POST", "/v1/chat/completions", chat("small")))
    assert serving.ask("POST", "/v1/chat/completions", chat("broken")).status == 500
    text_of(serving.ask("POST", "/v1/chat/completions", chat("small")))


def test_a_bench_port_that_is_taken_refuses_with_423_and_starts_nothing(serve, engines):
    with socket.create_server(("127.0.0.1", 0)) as bench:
        here = {"bench_port": bench.getsockname()[1], "engines": engines("small")}
        serving = serve({"hosts": {"here": here}})
        refused = serving.ask("POST", "/v1/chat/completions", chat("small"))
        assert refused.status == 423
        assert "switching host here to engine small failed: host here: GPU is busy, not switching: " in refused.error["message"]
        assert refused.headers["x-should-retry"] == "false"
        assert serving.host()["owners"][0]["kind"] == "bench_port"
    assert not (serving.state / "engines").exists()
    text_of(serving.ask("POST", "/v1/chat/completions", chat("small")))  # given back: no back-off holds it up


# ----- the proxy's own paths


def test_load_and_unload_say_what_llama_cpps_router_says(shared):
    shared.ask("POST", "/api/models/unload")
    unloaded = shared.ask("POST", "/models/unload", {"model": "small"})
    assert (unloaded.status, unloaded.error["message"]) == (400, "model is not running")
    assert shared.ask("POST", "/models/load", {"model": "small"}).json() == {"success": True}
    eventually(lambda: status_of(shared, "small") == "loaded", "it is loaded")
    loaded = shared.ask("POST", "/models/load", {"model": "small"})
    assert (loaded.status, loaded.error["message"]) == (400, "model is already running")
    assert shared.ask("POST", "/models/unload", {"model": "small"}).json() == {"success": True}
    eventually(lambda: status_of(shared, "small") == "unloaded", "it is unloaded")
    unknown = shared.ask("POST", "/models/load", {"model": "smal"})
    assert unknown.status == 404 and "did you mean small?" in unknown.error["message"]


def status_of(serving: Serving, model: str) -> str:
    listed = {entry["id"]: entry for entry in serving.ask("GET", "/v1/models").json()["data"]}
    assert serving.ask("GET", "/models").json().keys() == {"object", "data"}
    return listed[model]["status"]["value"]


def test_running_tells_as_llama_swap_does_what_is_loaded(shared):
    text_of(shared.ask("POST", "/v1/chat/completions", chat("small")))
    eventually(lambda: shared.host()["state"] == "ready", "its models are known, which its first answer does not wait for")
    (running,) = shared.ask("GET", "/running").json()["running"]
    assert (running["model"], running["state"], running["proxy"]) == ("small", "ready", direct(shared, "small"))
    assert "--port" in running["cmd"]
    assert ask(running["proxy"] + "/health").json() == {"status": "ok"}
    assert shared.ask("POST", "/api/models/unload").json() == {"msg": "ok"}
    assert shared.ask("GET", "/running").json() == {"running": []}
    assert ask_or_none(direct(shared, "small") + "/health") is None


def test_unload_by_llama_swaps_path_is_ok_for_a_model_that_does_not_run_and_404_for_one_unknown(shared):
    shared.ask("POST", "/api/models/unload")
    assert shared.ask("POST", "/api/models/unload/small").body == b"OK"
    assert shared.ask("POST", "/api/models/unload/nothing").status == 404


def test_upstream_paths_start_the_engine_and_reach_it(shared):
    shared.ask("POST", "/api/models/unload")
    assert shared.ask("GET", "/upstream/small/health").json() == {"status": "ok"}
    assert shared.host()["engine"] == "small"
    assert shared.ask("GET", "/upstream/small/props").json()["model_path"].endswith("small.gguf")
    assert shared.ask("POST", "/upstream/small/tokenize", {"content": "it was"}).json()["tokens"]
    assert shared.ask("GET", "/upstream/nothing/health").status == 404


def test_v1_models_lists_every_model_with_the_state_of_its_engine(shared):
    text_of(shared.ask("POST", "/v1/chat/completions", chat("small")))
    listed = shared.ask("GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert {entry["id"]: entry["status"]["value"] for entry in listed["data"]} == {
        "small": "loaded", "deep": "unloaded", "vectors": "unloaded",
    }
    small = eventually(lambda: meta_of(shared.ask("GET", "/v1/models/small").json()), "the engine is asked about its model")
    assert small["meta"]["n_params"] > 0
    assert small in shared.ask("GET", "/v1/models").json()["data"]
    assert shared.ask("GET", "/v1/models/nothing").status == 404


def meta_of(entry: dict) -> dict | None:
    """The entry, once it says what the engine itself says of its model."""
    return entry if "meta" in entry else None


def test_status_tells_what_every_host_does(shared):
    stream = shared.stream("/v1/chat/completions", long_chat())
    stream.first()
    status = shared.status()
    here = status["hosts"]["here"]
    assert (here["state"], here["engine"], here["in_flight"], here["queued"]) == ("ready", "deep", 1, 0)
    assert here["owners"] == [] and here["stop_error"] is None and here["down_since"] is None
    assert here["agent"]["sha256"] == status["sha256"]
    assert status["models"]["deep"] == {"host": "here", "engine": "deep", "state": "loaded"}
    assert status["models"]["small"] == {"host": "here", "engine": "small", "state": "unloaded"}
    assert_whole(stream.whole(), LONG)
    eventually(lambda: shared.host()["in_flight"] == 0, "it is counted out")


def test_metrics_count_requests_by_model_and_status(serve, shared):
    text_of(shared.ask("POST", "/v1/chat/completions", chat("small")))
    serving = serve({"hosts": {"there": {"engines": {"e": {"url": direct(shared, "small"), "models": ["small"]}}}}})
    for tokens in (1, 2, 3):
        text_of(serving.ask("POST", "/v1/chat/completions", chat("small", tokens)))
    assert serving.ask("POST", "/v1/chat/completions", chat("small", messages=0)).status == 400
    refused = serving.ask("POST", "/v1/chat/completions", chat("smoll"))
    assert refused.status == 404

    def metrics() -> str:
        return serving.ask("GET", "/metrics").body.decode()

    eventually(lambda: 'llmguard_requests_in_flight{model="small"} 0\n' in metrics(), "all are counted")
    assert 'llmguard_requests_total{model="small",status="200"} 3\n' in metrics()
    assert 'llmguard_requests_total{model="small",status="400"} 1\n' in metrics()
    assert "smoll" not in metrics(), "a client could fill it with names"


def test_health_and_the_page_need_no_key_and_everything_else_does(serve):
    url = {"url": "http://127.0.0.1:1", "models": ["m"]}
    serving = serve({"proxy": {"api_keys": ["sesame"]}, "hosts": {"there": {"engines": {"e": url}}}})
    assert serving.ask("GET", "/health").json() == {"status": "ok"}
    page = serving.ask("GET", "/")
    assert page.status == 200 and page.headers["Content-Type"] == "text/html; charset=utf-8"
    for path in ("/status", "/metrics", "/v1/models", "/running", "/models/sse"):
        assert serving.ask("GET", path).status == 401
    for headers in ({"Authorization": "Bearer sesame"}, {"x-api-key": "sesame"}):
        assert serving.ask("GET", "/status", headers=headers).status == 200


def test_models_sse_tells_of_loads_and_unloads_as_they_happen(shared):
    shared.ask("POST", "/api/models/unload")
    listener = http.client.HTTPConnection("127.0.0.1", shared.port, timeout=PATIENCE)
    listener.request("GET", "/models/sse")
    events = listener.getresponse()
    assert events.getheader("Content-Type") == "text/event-stream"
    assert events.readline() == b": llmguard\n"
    shared.ask("POST", "/models/load", {"model": "small"})
    seen = []
    while seen[-1:] != ["unloaded"]:
        line = events.readline()
        assert line, "the stream of events ended"
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if event["event"] != "model_status":
                continue  # what is told of hosts
            assert event["model"] == "small"
            seen.append(event["data"]["status"])
            if seen[-1] == "loaded":
                shared.ask("POST", "/models/unload", {"model": "small"})
    events.close()
    listener.close()
    assert seen == ["loading", "loaded", "unloaded"]


def test_an_unknown_model_is_404_with_the_nearest_name_and_no_model_is_400(shared):
    unknown = shared.ask("POST", "/v1/chat/completions", chat("smoll"))
    assert unknown.status == 404 and unknown.error["type"] == "not_found_error"
    assert "did you mean small?" in unknown.error["message"]
    unnamed = shared.ask("POST", "/v1/chat/completions", {"messages": MESSAGES})
    assert unnamed.status == 400 and unnamed.error["type"] == "invalid_request_error"

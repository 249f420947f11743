"""The process `llmguard.py serve`, as its service manager sees it: signals, restarts, a second one; and the command line."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest
from parts import LLMGUARD, PATIENCE, Serving, StubEngine, ask, eventually, free_port, llama_command

import llmguard

LONG = 400  # tokens of the deep model: a stream of some seconds


def chat(model: str, tokens: int = 4, **more) -> dict:
    messages = [{"role": "user", "content": "say something"}]
    return {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def text_of(reply) -> str:
    assert reply.status == 200, reply.body
    return reply.json()["choices"][0]["message"]["content"]


def assert_whole(body: bytes) -> None:
    assert body.endswith(b"data: [DONE]\n\n"), body[-300:]
    assert b'"predicted_n":%d,' % LONG in body


@pytest.fixture
def config(llama_server, models):
    """One host with two engines."""
    engines = {
        name: {"command": llama_command(llama_server, models[name], "-np", "2"), "port": free_port(), "models": [name]}
        for name in ("small", "deep")
    }
    return {"proxy": {"tick": "1s"}, "hosts": {"here": {"engines": engines}}}


def streaming(serving: Serving):
    """A long stream in flight."""
    stream = serving.stream("/v1/chat/completions", chat("deep", LONG, stream=True))
    assert stream.status == 200
    stream.first()
    return stream


def refuses(port: int) -> bool:
    """Are new connections refused?"""
    try:
        socket.create_connection(("127.0.0.1", port), PATIENCE).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        pass  # it was in the listener's backlog when that closed
    return False


def reload(serving: Serving) -> None:
    """SIGHUP, and what it says was done."""
    before = serving.log().count("reloaded")
    serving.signal(signal.SIGHUP)

    def told() -> bool:
        assert serving.process.poll() is None, serving.log()
        return serving.log().count("reloaded") > before

    eventually(told, "it says what became of the reload")


def alive(pid: int) -> bool:
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


# ----- the end


def test_sigterm_lets_a_stream_end_whole_takes_no_new_connection_and_exits_0(serve, config):
    serving = serve(config)
    stream = streaming(serving)
    serving.signal(signal.SIGTERM)
    eventually(lambda: refuses(serving.port), "new connections are refused")
    assert serving.process.poll() is None
    assert_whole(stream.whole())
    assert serving.process.wait(PATIENCE) == 0
    assert alive(serving.engine_pid("deep")), "engines run on"


def test_sigterm_hangs_up_on_idle_connections_and_listeners_of_events(serve, stub_engine):
    serving = serve(one_url(stub_engine))
    idle = socket.create_connection(("127.0.0.1", serving.port), PATIENCE)
    idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert idle.recv(4096).startswith(b"HTTP/1.1 200 ")
    events = socket.create_connection(("127.0.0.1", serving.port), PATIENCE)
    events.sendall(b"GET /models/sse HTTP/1.1\r\nHost: x\r\n\r\n")
    assert events.recv(4096).startswith(b"HTTP/1.1 200 ")
    serving.signal(signal.SIGTERM)
    assert serving.process.wait(PATIENCE) == 0
    assert idle.recv(4096) == b""
    rest = b""
    while piece := events.recv(4096):
        rest += piece
    assert rest.endswith(b"0\r\n\r\n"), "the stream of events ends well"
    idle.close()
    events.close()


def saying(stub_engine, body: bytes) -> StubEngine:
    """An engine that says the same to everybody."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    return stub_engine(lambda request, sock: sock.sendall(answer))


def one_url(stub_engine, **proxy) -> dict:
    """A configuration with one engine that nothing is asked of."""
    url = f"http://127.0.0.1:{saying(stub_engine, b'').port}"
    return {"proxy": proxy, "hosts": {"here": {"engines": {"e": {"url": url, "models": ["m"]}}}}}


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(serve, config, second):
    serving = serve(config)
    stream = serving.stream("/v1/chat/completions", chat("deep", 7000, stream=True))
    stream.first()
    serving.signal(signal.SIGTERM)
    eventually(lambda: "a second signal ends it at once" in serving.log() and refuses(serving.port), "it drains")
    serving.signal(second)
    assert serving.process.wait(PATIENCE) == 128 + second
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        stream.whole()


def test_a_drain_that_takes_too_long_is_cut(serve, config):
    config["proxy"]["drain_timeout"] = "500ms"
    serving = serve(config)
    stream = serving.stream("/v1/chat/completions", chat("deep", 7000, stream=True))
    stream.first()
    serving.signal(signal.SIGTERM)
    assert serving.process.wait(PATIENCE) == 0
    assert "not everything ended within 0s: cut" in serving.log()
    stream.close()


# ----- reload


def test_sighup_leaves_a_stream_in_flight_and_its_engine_alone_and_a_new_host_is_usable(serve, config, llama_server, models):
    serving = serve(config)
    stream = streaming(serving)
    pid = serving.engine_pid("deep")
    more = {"command": llama_command(llama_server, models["small"]), "port": free_port(), "models": ["more"]}
    serving.config["hosts"]["there"] = {"engines": {"more": more}}
    serving.write_config()
    reload(serving)
    text_of(serving.ask("POST", "/v1/chat/completions", chat("more")))
    assert_whole(stream.whole())
    assert serving.engine_pid("deep") == pid and alive(pid)
    text_of(serving.ask("POST", "/v1/chat/completions", chat("deep")))
    assert serving.switches() == ["deep", "more"]


@pytest.mark.parametrize("text", ["{", '{"hosts": {"here": {"engins": {}}}}', '{"proxy": {"api_keys_file": "/nowhere"}}'])
def test_sighup_with_a_broken_file_keeps_the_old_configuration(serve, stub_engine, text):
    serving = serve(one_url(stub_engine))
    serving.config_path.write_text(text)
    reload(serving)
    assert "the configuration is not reloaded, the old one stays: " in serving.log()
    assert list(serving.status()["hosts"]) == ["here"]


def test_sighup_with_a_file_that_is_gone_keeps_the_old_configuration(serve, stub_engine):
    serving = serve(one_url(stub_engine))
    serving.config_path.unlink()
    reload(serving)
    assert list(serving.status()["models"]) == ["m"]


def test_a_stream_outlives_a_reload_that_takes_its_host_away(serve, config, stub_engine):
    serving = serve(config)
    stream = streaming(serving)
    serving.config["hosts"] = {"there": one_url(stub_engine)["hosts"]["here"]}
    serving.write_config()
    reload(serving)
    assert serving.ask("POST", "/v1/chat/completions", chat("deep")).status == 404
    assert_whole(stream.whole())


def test_a_request_that_queues_outlives_a_reload(serve, config):
    serving = serve(config)
    stream = streaming(serving)
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(serving.ask("POST", "/v1/chat/completions", chat("small"))))
    waiter.start()
    eventually(lambda: serving.host()["queued"] == 1, "it is queued")
    reload(serving)
    assert_whole(stream.whole())
    waiter.join(PATIENCE)
    text_of(answers[0])


def test_sighup_reads_new_keys(serve, stub_engine):
    serving = serve(one_url(stub_engine, api_keys=["old"]))
    serving.config["proxy"]["api_keys"] = ["new"]
    serving.write_config()
    reload(serving)
    assert serving.ask("GET", "/status", headers={"Authorization": "Bearer old"}).status == 401
    assert serving.ask("GET", "/status", headers={"Authorization": "Bearer new"}).status == 200


# ----- restart


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_new_proxy_takes_over_the_engine_that_runs(serve, config, how):
    first = serve(config)
    text_of(first.ask("POST", "/v1/chat/completions", chat("small")))
    pid = first.engine_pid("small")
    first.signal(how)
    first.process.wait(PATIENCE)
    second = serve(config, state=first.state)
    eventually(lambda: second.host()["engine"] == "small", "it is taken over")
    text_of(second.ask("POST", "/v1/chat/completions", chat("small")))
    assert second.engine_pid("small") == pid and alive(pid)
    assert second.switches() == []
    assert "engine small runs already: taken over" in second.log()
    text_of(second.ask("POST", "/v1/chat/completions", chat("deep")))  # and it is stopped like one of its own
    assert not alive(pid)


def test_a_second_serve_on_the_same_state_folder_refuses_and_names_the_first(serve, stub_engine):
    first = serve(one_url(stub_engine))
    second = first.cli("serve", "--listen", "127.0.0.1:0")
    assert second.returncode == 75
    assert f"(pid {first.process.pid})" in second.stderr and str(first.state) in second.stderr
    first.process.kill()
    first.process.wait()
    third = subprocess.Popen(
        [sys.executable, LLMGUARD, "--state-dir", str(first.state), "serve", "-c", str(first.config_path)], stderr=subprocess.PIPE
    )
    with third:
        assert b"listens on" in third.stderr.readline()  # the lock died with its holder
        third.terminate()


def test_an_address_that_is_taken_is_said_and_exits_78(serve, stub_engine, tmp_path):
    first = serve(one_url(stub_engine))
    argv = [sys.executable, LLMGUARD, "--state-dir", str(tmp_path / "other"), "serve", "-c", str(first.config_path)]
    second = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE)
    assert second.returncode == 78
    assert f"127.0.0.1:{first.port} cannot be listened on: Address already in use" in second.stderr


def test_an_engine_keeps_none_of_the_proxys_descriptors(serve, config):
    serving = serve(config)
    idle = socket.create_connection(("127.0.0.1", serving.port), PATIENCE)
    text_of(serving.ask("POST", "/v1/chat/completions", chat("small")))
    engine = descriptors(serving.engine_pid("small"))
    shared = descriptors(serving.process.pid) & engine
    assert not [name for name in shared if not name.startswith("/dev/")], "shared with the proxy"
    assert not [name for name in engine if "lock" in name or name == str(serving.log_path)]
    assert f"{serving.state}/engines/here.small.log" in engine
    idle.close()


def descriptors(pid: int) -> set[str]:
    """What a process holds open, by name: files by path, sockets and pipes by inode."""
    names = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return names - {"anon_inode:[eventpoll]", "anon_inode:[eventfd]"}


def test_the_state_folder_is_for_its_owner_alone(serve, config):
    serving = serve(config)
    text_of(serving.ask("POST", "/v1/chat/completions", chat("small")))
    record = serving.state / "engines" / "here.small.json"
    assert record.stat().st_mode & 0o077 == 0
    assert serving.state.stat().st_mode & 0o077 == 0
    assert json.loads(record.read_text())["version"] == 1


# ----- no configuration


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """A machine without a configuration, whose usual ports are the given ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("LLMGUARD_CONFIG", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    if any(os.path.exists(f"/etc/llmguard/{name}") for name in llmguard.CONFIG_NAMES):
        pytest.skip("this machine has a configuration in /etc/llmguard")

    def ports(*numbers: int) -> None:
        monkeypatch.setattr(llmguard, "USUAL_PORTS", tuple((number, "llama-server") for number in numbers))

    return ports


def test_without_a_configuration_what_answers_on_the_usual_ports_is_fronted(nowhere, stub_engine, capfd):
    body = json.dumps({"object": "list", "data": [{"id": "found-model", "object": "model"}]}).encode()
    engine = saying(stub_engine, body)
    nowhere(free_port(), engine.port)
    config = llmguard.the_config(llmguard.CommandLine().parser.parse_args(["serve"]))
    (host,) = config.hosts.values()
    (found,) = host.engines.values()
    assert (found.url.port, found.models, found.managed) == (engine.port, "auto", False)
    assert config.proxy.listen == ("127.0.0.1", 8080)
    assert f"found llama-server on http://127.0.0.1:{engine.port}" in capfd.readouterr().err


def test_without_a_configuration_and_with_nothing_found_serve_says_what_to_do_and_exits_78(nowhere, capfd):
    nowhere(free_port())
    assert llmguard.main(["serve"]) == 78
    said = capfd.readouterr().err
    assert "no configuration was found" in said and "-c" in said


def test_a_server_on_our_own_usual_port_makes_us_listen_on_another(nowhere, monkeypatch):
    nowhere(8080)
    monkeypatch.setattr(llmguard.EngineApi, "models", lambda self: [{"id": "m"}] if self.address.port == 8080 else None)
    assert llmguard.found_config().proxy.listen == ("127.0.0.1", 8088)


# ----- the command line


def run(*argv: str, **more) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, LLMGUARD, *argv], capture_output=True, text=True, timeout=PATIENCE, **more)


def test_version_is_a_version_and_the_hash_of_the_file():
    said = run("--version")
    digest = hashlib.sha256(open(LLMGUARD, "rb").read()).hexdigest()
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout == f"llmguard {llmguard.__version__} {digest[:12]}\n"


def test_no_command_prints_the_help_and_exits_64():
    said = run()
    assert said.returncode == 64 and "serve" in said.stdout


def test_a_reader_that_has_left_ends_the_command_without_a_word():
    reader, writer = os.pipe()
    os.close(reader)
    said = subprocess.run([sys.executable, LLMGUARD, "--version"], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
    os.close(writer)
    assert (said.returncode, said.stderr) == (128 + signal.SIGPIPE, "")


def test_a_reader_that_has_left_is_no_error_to_those_that_start_it_as_a_module():
    """They flush once more what could not be written."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-S", "-E", "-c", llmguard.start_words(LLMGUARD), "--version"]
    said = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, timeout=PATIENCE)
    os.close(writer)
    assert (said.returncode, said.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_closed_stdout_is_no_error():
    said = subprocess.run(["sh", "-c", 'exec "$0" "$1" --version >&-', sys.executable, LLMGUARD], stderr=subprocess.PIPE, timeout=PATIENCE)
    assert (said.returncode, said.stderr) == (0, b"")


@pytest.mark.parametrize(("error", "code"), [("llmguard.HostDown('x')", 3), ("KeyboardInterrupt", 130)])
def test_what_was_said_before_it_failed_is_not_lost(error, code):
    """As each command leaves: with os._exit, which writes nothing out."""
    program = f"""
import os, sys
sys.path[:1] = [{os.path.dirname(LLMGUARD)!r}]
import llmguard
def half(options):
    print("half of it")
    raise {error}
llmguard.status_command = half
os._exit(llmguard.main(["status"]))
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    said = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=PATIENCE, env=environment)
    assert (said.returncode, said.stdout) == (code, b"half of it\n")


def test_what_a_copy_of_another_version_printed_is_not_lost(tmp_path):
    copy = tmp_path / "llmguard.py"
    copy.write_text("def main():\n    print('llmguard-agent 1')\n    return 7\n")
    words = [sys.executable, "-S", "-E", "-c", llmguard.start_words(str(copy))]
    said = subprocess.run(words, stdout=subprocess.PIPE, timeout=PATIENCE)
    assert (said.returncode, said.stdout) == (7, b"llmguard-agent 1\n")


def test_check_says_what_each_host_is_and_exits_0(serve, config):
    serving = serve(config)
    text_of(serving.ask("POST", "/v1/chat/completions", chat("small")))
    said = serving.cli("check")
    assert said.returncode == 0, said.stdout + said.stderr
    assert re.search(r"(?m)^here: ok.*engine small runs", said.stdout)
    assert said.stdout.rstrip().endswith("all is well")


def test_check_exits_1_with_a_warning(tmp_path, stub_engine):
    body = b'{"object": "list", "data": []}'
    engine = saying(stub_engine, body)
    engines = {"e": {"url": f"http://127.0.0.1:{engine.port}", "models": ["m"]}}
    (tmp_path / "c.json").write_text(json.dumps({"proxy": {"listen": "0.0.0.0:8080"}, "hosts": {"here": {"engines": engines}}}))
    said = run("--state-dir", str(tmp_path / "state"), "check", "-c", str(tmp_path / "c.json"))
    assert said.returncode == 1, said.stdout
    assert "warning: proxy.listen: 0.0.0.0:8080 is open to the network" in said.stdout


def test_check_exits_2_with_every_mistake_of_the_file_by_its_key_path(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"proxy": {"tik": "1s"}, "hosts": {"here": {"engines": {"e": {"url": "http://x", "models": 5}}}}}))
    said = run("check", "-c", str(path))
    assert said.returncode == 2
    assert f"{path}: proxy.tik: unknown key, did you mean tick?" in said.stdout
    assert f"{path}: hosts.here.engines.e.models: " in said.stdout


def test_serve_exits_78_for_a_broken_configuration_and_for_one_that_is_not_there(tmp_path):
    path = tmp_path / "c.json"
    assert run("serve", "-c", str(path)).returncode == 78
    path.write_text('{"hosts": {}}')
    said = run("serve", "-c", str(path))
    assert said.returncode == 78 and "hosts: missing: at least one host" in said.stderr


def test_model_list_load_and_unload_say_what_they_did(serve, config):
    serving = serve(config)
    listed = serving.cli("model", "list")
    assert (listed.returncode, sorted(listed.stdout.splitlines())) == (0, ["deep   unloaded", "small  unloaded"])
    loaded = serving.cli("model", "load", "small")
    assert (loaded.returncode, loaded.stderr) == (0, "")
    assert re.fullmatch(r"small: loaded after \d+s\n", loaded.stdout)
    again = serving.cli("model", "load", "small")
    assert again.returncode == 0 and again.stdout.startswith("small: loaded")
    assert "small  loaded" in serving.cli("model", "list").stdout
    unloaded = serving.cli("model", "unload", "small")
    assert (unloaded.returncode, unloaded.stdout, unloaded.stderr) == (0, "small: unloaded\n", "")
    assert "small  unloaded" in serving.cli("model", "list").stdout


def test_status_is_one_screen_and_one_nagios_line(serve, config):
    serving = serve(config)
    said = serving.cli("status")
    assert (said.returncode, said.stderr) == (0, "")
    first, second = said.stdout.splitlines()
    assert first == "OK - 1 hosts, 2 models" and second.startswith("here: off; 0 in flight, 0 queued")
    assert json.loads(serving.cli("status", "--json").stdout)["hosts"]["here"]["state"] == "off"
    serving.stop()
    gone = serving.cli("status")
    assert gone.returncode == 3 and gone.stdout.startswith("UNKNOWN - no proxy answers on http://127.0.0.1:")


QUIET = {"state": "off", "engine": None, "in_flight": 0, "queued": 0, "owners": [], "waits": [], "handover": None, "stop_error": None}
QUIET.update(degraded=False, down_since=None, problem=None, held_up=None)
WAIT = {"job": "00-test.job", "since": "2026-10-25 16:57:34"}


@pytest.mark.parametrize(
    "more, level, says",
    [
        ({"state": "handover", "handover": {"job": "00-test.job", "until": "2026-10-25T15:58:08Z"}}, 0, "handed to 00-test.job until"),
        ({"waits": [WAIT]}, 0, "00-test.job waits for the GPU since 2026-10-25 16:57:34"),
        ({"stop_error": {"error": "pid 7 still runs", "since": "x", "attempts": 3}}, 2, "3 attempts: pid 7 still runs"),
        ({"state": "down", "down_since": "2026-10-25T15:58:08Z"}, 2, "since 2026-10-25T15:58:08Z"),
        ({"state": "blocked", "down_since": "x", "problem": "no python3 on it"}, 2, "no python3 on it"),
        ({"owners": [{"kind": "process", "text": "python holds 4 GiB"}]}, 0, "held: python holds 4 GiB"),
        ({"held_up": "engine a is in use"}, 1, "engine a is in use"),
        ({"restarted": "restarted 3 times in 40s"}, 1, "restarted 3 times in 40s"),
        ({"degraded": True, "verdict": {"value": "cpu", "evidence": ["VmRSS is 16 GiB"]}}, 2, "serves from the CPU: VmRSS is 16 GiB"),
    ],
)
def test_status_tells_what_a_host_is_about_and_how_bad_that_is(more, level, says):
    found, facts = llmguard._host_facts({**QUIET, **more})
    assert found == level and any(says in fact for fact in facts)


def test_model_load_of_an_unknown_model_names_the_nearest_and_exits_64(serve, config):
    said = serve(config).cli("model", "load", "smal")
    assert said.returncode == 64 and "did you mean small?" in said.stderr


def test_model_load_of_an_engine_that_does_not_start_says_why_and_exits_69(serve, llama_server, models):
    command = llama_command(llama_server, models["small"], "--no-such-flag")
    broken = {"command": command, "port": free_port(), "models": ["broken"]}
    said = serve({"hosts": {"here": {"engines": {"broken": broken}}}}).cli("model", "load", "broken")
    assert said.returncode == 69, said.stderr
    assert "no-such-flag" in said.stderr


def test_model_load_while_the_gpu_is_held_says_by_whom_and_exits_75(serve, config):
    with socket.create_server(("127.0.0.1", 0)) as bench:
        config["hosts"]["here"]["bench_port"] = bench.getsockname()[1]
        said = serve(config).cli("model", "load", "small")
    assert said.returncode == 75
    assert "GPU is busy" in said.stderr


def test_model_commands_without_a_proxy_say_so_and_exit_69():
    said = run("model", "list", "--url", f"http://127.0.0.1:{free_port()}")
    assert said.returncode == 69 and "no proxy answers on" in said.stderr


def test_model_commands_take_the_key_from_the_configuration_and_say_when_another_is_wrong(serve, config):
    config["proxy"]["api_keys"] = ["sesame"]
    serving = serve(config)
    assert serving.cli("model", "list").returncode == 0
    refused = serving.cli("model", "list", "--key", "wrong")
    assert refused.returncode == 77 and "API key" in refused.stderr
    assert ask(serving.url + "/status").status == 401


# ----- what somebody tried who knew the README alone


def test_a_bare_model_server_can_be_listed_and_is_no_proxy(serve, stub_engine):
    def answer(request: bytes, sock) -> bool:
        body = b'{"data":[{"id":"/tmp/a.gguf"}]}' if b" /v1/models " in request else b'{"error":"File Not Found"}'
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body))
        return False

    url = f"127.0.0.1:{stub_engine(answer).port}"
    listed = serve_cli("model", "list", "--url", url)
    assert (listed.returncode, listed.stdout) == (0, "/tmp/a.gguf  loaded\n")
    status = serve_cli("status", "--url", url)
    assert status.returncode == 3 and "no llmguard answers there" in status.stdout


def serve_cli(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-I", LLMGUARD, *argv], capture_output=True, text=True, timeout=PATIENCE)


def test_a_model_whose_name_is_a_path_can_be_unloaded(serve, llama_server, models):
    engine = {"command": llama_command(llama_server, models["small"]), "port": free_port(), "models": {"/tmp/a.gguf": "small"}}
    serving = serve({"hosts": {"here": {"engines": {"e": engine}}}})
    assert serving.cli("model", "load", "/tmp/a.gguf").returncode == 0
    unloaded = serving.cli("model", "unload", "/tmp/a.gguf")
    assert (unloaded.returncode, unloaded.stdout) == (0, "/tmp/a.gguf: unloaded\n") and serving.host()["engine"] is None


def test_a_key_that_is_good_but_no_admin_key_is_told_apart(serve, config):
    serving = serve({**config, "proxy": {"api_keys": ["user-key"], "admin_keys": ["boss"]}})
    refused = serving.ask("POST", "/models/load", {"model": "small"}, headers={"x-api-key": "user-key"})
    assert refused.status == 401 and refused.error["message"].startswith("one of the admin_keys is needed")
    said = serving.cli("model", "unload", "small", "--key", "user-key")
    assert said.returncode == 77 and "one of the admin_keys is needed: give it by --key or $LLMGUARD_API_KEY" in said.stderr


def test_check_warns_of_a_queue_that_can_not_be_read(tmp_path):
    engine = {"command": ["sleep", "{port}"], "port": free_port(), "models": ["m"]}
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"hosts": {"here": {"job_queue": str(tmp_path / "none"), "engines": {"e": engine}}}}))
    done = serve_cli("--state-dir", str(tmp_path / "state"), "check", "-c", str(path))
    assert done.returncode == 1 and "warning: held: the job queue" in done.stdout and "cannot be read" in done.stdout


def test_status_is_a_warning_after_a_start_that_failed(serve, llama_server, models):
    engine = {"command": llama_command(llama_server, models["small"], "--no-such-flag"), "port": free_port(), "models": ["broken"]}
    serving = serve({"hosts": {"here": {"engines": {"e": engine}}}})
    assert serving.ask("POST", "/v1/completions", {"model": "broken", "prompt": "x"}).status == 500
    status = serving.cli("status")
    assert status.returncode == 1 and "the last start failed: host here: engine e ended while it started" in status.stdout

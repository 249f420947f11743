"""Engines that are routers themselves (llama-server without a model): what the proxy passes on to them, and what it tells
apart."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from parts import PATIENCE, Serving, Stream, ask, eventually, free_port

LONG = 400  # tokens of the deep model: a stream of some seconds


def chat(model: str, tokens: int = 4, **more) -> dict:
    messages = [{"role": "user", "content": "say something"}]
    return {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def text_of(reply) -> str:
    assert reply.status == 200, reply.body
    return reply.json()["choices"][0]["message"]["content"]


def state_of(url: str, model: str) -> str:
    """A model's state as /v1/models of the proxy, or of the router itself, lists it."""
    return {entry["id"]: entry["status"]["value"] for entry in ask(url + "/v1/models").json()["data"]}[model]


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory) -> str:
    """A --models-dir with both models."""
    path = tmp_path_factory.mktemp("router")
    for name, file in models.items():
        shutil.copy(file, path / f"{name}.gguf")
    return str(path)


def router_command(llama_server: str, folder: str) -> list[str]:
    return [llama_server, "--models-dir", folder, "--host", "127.0.0.1", "--port", "{port}", "-t", "1", "--no-webui"]


@pytest.fixture(scope="module")
def router(llama_server, folder):
    """A router that somebody else started; its URL."""
    port = free_port()
    argv = [word.replace("{port}", str(port)) for word in router_command(llama_server, folder)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: answers(url), "the router answers")
        yield url
        process.terminate()


def answers(url: str) -> bool:
    try:
        return ask(url + "/health").status == 200
    except OSError:
        return False


@pytest.fixture
def fronted(serve, router):
    """A `serve` in front of that router, none of whose models is loaded."""
    for name in ("small", "deep"):
        ask(router + "/models/unload", "POST", {"model": name})
        eventually(lambda name=name: state_of(router, name) == "unloaded", f"{name} is unloaded")
    return serve({"proxy": {"tick": "1s"}, "hosts": {"here": {"engines": {"router": {"url": router, "models": "auto"}}}}})


@pytest.fixture
def managed(serve, llama_server, folder):
    """A `serve` that starts a router by itself, when it must."""
    engine = {"command": router_command(llama_server, folder), "port": free_port(), "models": ["small", "deep"]}
    return serve({"hosts": {"here": {"engines": {"router": engine}}}})


def address(serving: Serving) -> str:
    return "http://127.0.0.1:{}".format(serving.config["hosts"]["here"]["engines"]["router"]["port"])


# ----- somebody else's router


def test_a_routers_models_are_listed_by_the_names_it_gives(fronted):
    listed = fronted.ask("GET", "/v1/models").json()["data"]
    assert {entry["id"]: entry["status"]["value"] for entry in listed} == {"small": "unloaded", "deep": "unloaded"}


def test_the_first_request_for_a_routers_model_loads_it(fronted):
    assert text_of(fronted.ask("POST", "/v1/chat/completions", chat("small")))
    eventually(lambda: state_of(fronted.url, "small") == "loaded", "it is listed as loaded")
    assert state_of(fronted.url, "deep") == "unloaded"


def test_load_and_unload_go_on_to_the_router(fronted, router):
    assert fronted.ask("POST", "/models/load", {"model": "small"}).json() == {"success": True}
    eventually(lambda: state_of(router, "small") == "loaded", "the router loaded it")
    eventually(lambda: state_of(fronted.url, "small") == "loaded", "the proxy says so")
    assert fronted.ask("POST", "/models/unload", {"model": "small"}).json() == {"success": True}
    eventually(lambda: state_of(router, "small") == "unloaded", "the router unloaded it")
    eventually(lambda: state_of(fronted.url, "small") == "unloaded", "the proxy says so")


def test_status_tells_the_routers_state_and_its_models_apart(fronted):
    text_of(fronted.ask("POST", "/v1/chat/completions", chat("small")))
    states = eventually(lambda: loaded_models(fronted), "the loaded model is told")
    assert states == {"small": "loaded", "deep": "unloaded"}
    assert fronted.host()["state"] == "ready"


def loaded_models(serving: Serving) -> dict | None:
    """The models' states in /status, once one of them is loaded."""
    states = {name: model["state"] for name, model in serving.status()["models"].items()}
    return states if "loaded" in states.values() else None


def test_an_unknown_model_is_refused_by_the_proxy_with_the_routers_names(fronted):
    refused = fronted.ask("POST", "/v1/chat/completions", chat("smal"))
    assert refused.status == 404 and "did you mean small?" in refused.error["message"]


def test_the_command_line_loads_and_unloads_a_routers_model(fronted, router):
    loaded = fronted.cli("model", "load", "small")
    assert (loaded.returncode, loaded.stderr) == (0, "") and loaded.stdout.startswith("small: loaded after ")
    assert state_of(router, "small") == "loaded"
    assert "small  loaded" in fronted.cli("model", "list").stdout
    unloaded = fronted.cli("model", "unload", "small")
    assert (unloaded.returncode, unloaded.stdout) == (0, "small: unloaded\n")
    eventually(lambda: state_of(router, "small") == "unloaded", "the router unloaded it")


def test_an_unload_does_not_cut_a_stream_of_that_model(fronted, router):
    stream = fronted.stream("/v1/chat/completions", chat("deep", LONG, stream=True))
    stream.first()
    assert fronted.ask("POST", "/models/unload", {"model": "deep"}).json() == {"success": True}
    body = stream.whole()
    assert body.endswith(b"data: [DONE]\n\n") and b'"predicted_n":%d,' % LONG in body
    eventually(lambda: state_of(router, "deep") == "unloaded", "it is unloaded afterwards")


# ----- our own router


def test_the_first_request_starts_the_router_and_loads_the_model(managed):
    assert managed.host()["state"] == "off"
    assert text_of(managed.ask("POST", "/v1/chat/completions", chat("small")))
    assert (managed.host()["state"], managed.host()["engine"]) == ("ready", "router")
    eventually(lambda: state_of(managed.url, "small") == "loaded", "its model is listed as loaded")
    assert state_of(managed.url, "deep") == "unloaded"
    text_of(managed.ask("POST", "/v1/chat/completions", chat("deep")))
    assert managed.switches() == ["router"]


def test_a_load_starts_the_router_and_loads_the_model_in_it(managed):
    loaded = managed.cli("model", "load", "small")
    assert (loaded.returncode, loaded.stderr) == (0, "")
    assert state_of(address(managed), "small") == "loaded"
    assert state_of(address(managed), "deep") == "unloaded"


def test_an_unload_of_a_model_leaves_the_router_and_its_other_models_alone(managed):
    for name in ("small", "deep"):
        text_of(managed.ask("POST", "/v1/chat/completions", chat(name)))
    eventually(lambda: state_of(managed.url, "small") == "loaded", "it is listed as loaded")
    assert managed.ask("POST", "/models/unload", {"model": "small"}).json() == {"success": True}
    eventually(lambda: state_of(managed.url, "small") == "unloaded", "it is unloaded")
    assert state_of(managed.url, "deep") == "loaded"
    assert managed.host()["state"] == "ready"


def test_unloading_everything_stops_the_router_and_its_children(managed):
    text_of(managed.ask("POST", "/v1/chat/completions", chat("small")))
    assert managed.ask("POST", "/api/models/unload").json() == {"msg": "ok"}
    assert managed.host()["state"] == "off"
    assert state_of(managed.url, "small") == "unloaded"
    assert not answers(address(managed))


def test_an_outside_client_of_a_routers_model_holds_up_the_stop_of_the_router(managed):
    text_of(managed.ask("POST", "/v1/chat/completions", chat("deep", 1)))
    outside = Stream(address(managed) + "/v1/chat/completions", chat("deep", LONG, stream=True))
    outside.first()
    with ThreadPoolExecutor(1) as pool:
        unload = pool.submit(managed.ask, "POST", "/api/models/unload")
        eventually(lambda: managed.host()["state"] == "draining", "the router drains")
        body = outside.whole()
        assert body.endswith(b"data: [DONE]\n\n") and b'"predicted_n":%d,' % LONG in body
        assert unload.result(PATIENCE).json() == {"msg": "ok"}
    assert managed.host()["state"] == "off"


def test_a_killed_child_of_the_router_is_loaded_again_by_the_next_request(managed):
    text_of(managed.ask("POST", "/v1/chat/completions", chat("small")))
    leader = managed.engine_pid("router")
    children = subprocess.run(["pgrep", "-P", str(leader)], capture_output=True, text=True).stdout.split()
    assert len(children) == 1
    subprocess.run(["kill", "-9", *children], check=True)
    eventually(lambda: state_of(address(managed), "small") == "unloaded", "the router saw it")
    text_of(managed.ask("POST", "/v1/chat/completions", chat("small")))
    assert managed.engine_pid("router") == leader

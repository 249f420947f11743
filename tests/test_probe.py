"""Section 12: probe. The pure verdict; model servers of each kind, on a toy GPU; and a real llama-server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from parts import LLMGUARD, PATIENCE, FakeClock, eventually, free_port, llama_command
from swap import Front, LlamaSwap, ToyGpu, text_of

import llmguard
from llmguard import CRITICAL, OK, UNKNOWN, WARNING, Address, Loaded, ModelServer, Prober, ProbeSettings, Timing, judge, replace

A, B = "small one", "org/b"
CASES = Path(__file__).parent / "cases"


# ----- the verdict, as a pure function

GOOD = Timing(9.8, 200, 7.0, 105.0, 99.0)
BAD = Timing(61.0, 200, 5.0, 3.6, 3.6)


@pytest.mark.parametrize(
    ("timing", "baseline", "max_wall", "value", "says"),
    [
        (GOOD, None, None, "ok", "9.8 s for 200 tokens"),
        (replace(GOOD, wall=12.0), None, None, "ok", "12.0 s"),  # the document's: 9 to 12 s
        (BAD, None, None, "bad", "61.0 s for 200 tokens, more than 40 s"),
        (replace(GOOD, wall=40.0), None, None, "ok", ""),
        (replace(GOOD, wall=40.1), None, None, "bad", "more than 40 s"),
        (BAD, None, 90.0, "ok", ""),  # somebody knows that it is slow
        (BAD, 105.0, None, "bad", "3.6 tokens/s, 0.03 times its baseline of 105.0"),
        (replace(GOOD, rate=34.9), 105.0, None, "bad", "0.33 times"),
        (replace(GOOD, rate=35.1), 105.0, None, "slow", "0.33 times"),
        (replace(GOOD, rate=52.0), 105.0, None, "slow", "0.50 times"),
        (replace(GOOD, rate=53.0), 105.0, None, "ok", ""),
        (BAD, 3.5, None, "ok", "61.0 s"),  # slow by nature: its own baseline counts, not 40 s
        (replace(GOOD, wall=70.0), 105.0, None, "ok", "70.0 s"),  # a slow disk, and fast once it is loaded
        (replace(GOOD, wall=70.0), 105.0, 60.0, "bad", "more than 60 s"),
        (replace(GOOD, rate=None, seen=10.0), 105.0, None, "bad", "10.0 tokens/s"),
        (replace(GOOD, rate=None, seen=None), 105.0, None, "ok", ""),
        (Timing(120.0, 57, 3.0, None, 0.5, whole=False), None, None, "bad", "cut off after 120.0 s for 57 tokens"),
        (Timing(0.3, 0), None, None, "unknown", "is it a model for text?"),
        (Timing(0.3, status=501, error="This server does not support completions"), None, None, "unknown", "does not support"),
        (Timing(0.3, status=404, error="no such model"), 105.0, None, "unknown", "no such model"),
        (Timing(0.3, status=423, error="GPU is busy"), None, None, "unknown", "GPU is busy"),
        (Timing(0.3, status=500, error="failed to start"), None, None, "error", "failed to start"),
        (Timing(0.3, status=502, error="the connection broke"), None, None, "error", "broke"),
        (Timing(0.3, status=503, error="Loading model"), None, None, "unknown", "Loading"),
        (Timing(0.3, status=429, error="too many"), 105.0, None, "unknown", "too many"),
        (Timing(600.0, 0, whole=False), None, None, "unknown", "no token came within 10m0s"),
    ],
)
def test_a_timing_is_judged(timing, baseline, max_wall, value, says):
    found = judge(timing, baseline, max_wall)
    assert found.value == value and says in found.why


def ollama(name: str) -> Loaded:
    return ModelServer._of_ollama(json.loads((CASES / "probe-ollama-ps.json").read_text())[name]["models"][0])


def test_what_an_ollama_says_is_a_claim_and_no_proof():
    """Real answers: size_vram left out, equal and wrong, a small part by choice, and a size that counts the file twice."""
    nothing, claimed, partial, doubled = (ollama(name) for name in "abcd")
    assert nothing.share == 0 and claimed.share == 1 and 0.1 < partial.share < 0.25 and doubled.share == pytest.approx(0.5, abs=0.01)
    found = judge(replace(GOOD, wall=30.0), None, None, nothing)
    assert found.value == "bad" and nothing.claim in found.why and nothing.claim.startswith("0 B of")
    assert judge(GOOD, 105.0, None, nothing).value == "ok", "its own baseline knows better"
    assert judge(BAD, 32.0, None, claimed).value == "bad", "it claims all of it, and the driver lost the GPU"
    found = judge(replace(BAD, wall=300.0), None, None, partial)
    assert found.value == "unknown" and partial.claim in found.why and "--max-wall" in found.why
    assert judge(replace(BAD, wall=300.0), 3.4, None, partial).value == "ok"
    assert judge(GOOD, None, None, doubled).value == "ok"


@pytest.mark.parametrize("entry", [{}, {"size": "x"}, {"size": 0, "size_vram": 0}, {"size": 5, "size_vram": None}])
def test_an_ollama_that_says_nothing_of_use(entry):
    assert ModelServer._of_ollama({"name": "m", **entry}).share is None


# ----- each kind of server, as far as it is asked


class Api:
    """A server that answers paths with what the test says; a value may be a function of the request."""

    def __init__(self, stub_engine, paths: dict) -> None:
        self.paths, self.asked = paths, []

        def answer(request: bytes, sock) -> bool:
            method, path = request.split(b" ", 2)[:2]
            self.asked.append((method + b" " + path).decode())
            found = self.paths.get(self.asked[-1], self.paths.get(path.decode()))
            found = found(request) if callable(found) else found
            status, content = found if isinstance(found, tuple) else (404 if found is None else 200, found)
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            sock.sendall(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(body), body))
            return False

        self.server = ModelServer(Address("127.0.0.1", stub_engine(answer).port), clock=FakeClock())


STREAM = b"".join(b'data: {"choices":[{"text":"w"}]}\n\n' for _ in range(3)) + b'data: {"choices":[],"timings":{"predicted_n":200,"predicted_per_second":%b,"prompt_n":5}}\n\ndata: [DONE]\n\n'


def kinds() -> dict[str, dict]:
    return {
        "llama-swap": {"/running": {"running": [{"model": "m", "state": "ready", "proxy": "http://localhost:5801", "ttl": 0}]}},
        "llmguard": {"/running": {"running": []}, "/status": {"sha256": "x", "hosts": {}, "models": {}}},
        "Ollama": {"/api/ps": {"models": [{"model": "m", "size": 10, "size_vram": 10}]}},
        "router": {"/props": {"role": "router"}, "/v1/models": {"data": [{"id": "m", "status": {"value": "loaded"}}, {"id": "n", "status": {"value": "unloaded"}}, {"id": "o", "status": {"value": "loading"}}]}},
        "server": {"/props": {"role": "model"}, "/v1/models": {"data": [{"id": "m"}]}},
    }


@pytest.mark.parametrize("kind", sorted(kinds()))
def test_the_kind_of_a_server_is_found_by_asking(stub_engine, kind):
    api = Api(stub_engine, kinds()[kind])
    assert api.server.kind == kind
    expected = {"llmguard": [], "router": [("m", "ready"), ("o", "starting")]}.get(kind, [("m", "ready")])
    assert [(entry.model, entry.state) for entry in api.server.loaded()] == expected


@pytest.mark.parametrize(
    ("kind", "path"),
    [("llama-swap", "POST /api/models/unload/org/a%20b"), ("llmguard", "POST /api/models/unload/org/a%20b"), ("router", "POST /models/unload"), ("Ollama", "POST /api/generate")],
)
def test_unloading_goes_by_the_servers_own_way_and_is_waited_for(stub_engine, kind, path):
    api = Api(stub_engine, kinds()[kind])
    assert api.server.kind == kind
    left = [3]

    def loaded():
        left[0] -= 1
        return [Loaded("org/a b")] if left[0] > 0 else []

    api.server.loaded = loaded
    api.paths[path] = {}
    assert api.server.unload("org/a b") and path in api.asked
    assert (left[0] == 3) is (kind in ("llama-swap", "llmguard")), "those answer when it is gone, and a client may have it back by then"
    api.paths[path] = (500, {})
    assert api.server.unload("org/a b") is False


def test_a_server_of_one_model_unloads_nothing(stub_engine):
    api = Api(stub_engine, {**kinds()["server"], "/v1/completions": STREAM % b"2.0"})
    known = {"m": {"plain": [100.0]}}
    result = Prober(api.server, ProbeSettings(), known, lambda text: None).probe("m")
    assert result.level == CRITICAL and "this kind of server unloads nothing" in result.why and not any("unload" in path for path in api.asked)


def test_a_stale_aborted_right_after_an_unload_is_asked_once_more(stub_engine):
    answers = [(500, {"error": {"message": "process was aborted"}}), STREAM % b"99.0"]
    api = Api(stub_engine, {**kinds()["server"], "/v1/completions": lambda request: answers.pop(0)})
    result = Prober(api.server, ProbeSettings(), {}, lambda text: None).probe("m")
    assert result.level == OK and answers == []
    answers[:] = [(500, {"error": "out of memory"}), STREAM % b"99.0"]
    result = Prober(api.server, ProbeSettings(), {}, lambda text: None).probe("m")
    assert result.level == CRITICAL and "out of memory" in result.why and len(answers) == 1, "another error is one"


def test_an_error_in_the_stream_is_an_error(stub_engine):
    body = b'data: {"choices":[{"text":"w"}]}\n\ndata: {"error":{"message":"slot died","code":500}}\n\n'
    api = Api(stub_engine, {**kinds()["server"], "/v1/completions": body})
    result = Prober(api.server, ProbeSettings(), {}, lambda text: None).probe("m")
    assert result.level == CRITICAL and "slot died" in result.why


def test_a_server_that_does_not_stream_is_measured_by_its_whole_answer(stub_engine):
    whole = {"choices": [{"text": "one two"}], "usage": {"completion_tokens": 200}}
    api = Api(stub_engine, {**kinds()["server"], "/v1/completions": whole})
    result = Prober(api.server, ProbeSettings(), {}, lambda text: None).probe("m")
    assert result.level == OK and result.timing.tokens == 200 and result.timing.rate is None


def test_the_request_is_the_same_each_time_and_nothing_is_cached(stub_engine):
    sent = []
    api = Api(stub_engine, {**kinds()["server"], "/v1/completions": lambda request: (sent.append(request), STREAM % b"99")[1]})
    for _ in range(2):
        Prober(api.server, ProbeSettings(), {}, lambda text: None).probe("m")
    bodies = [json.loads(request.partition(b"\r\n\r\n")[2]) for request in sent]
    assert bodies[0] == bodies[1] and bodies[0]["n_predict"] == bodies[0]["max_tokens"] == 200
    assert (bodies[0]["temperature"], bodies[0]["ignore_eos"], bodies[0]["cache_prompt"], bodies[0]["stream"]) == (0, True, False, True)


def test_drafting_is_noted_and_compared_with_drafting_only(stub_engine):
    drafts = (STREAM % b"90.0").replace(b'"prompt_n"', b'"draft_n":50,"prompt_n"')
    api = Api(stub_engine, {**kinds()["server"], "/v1/completions": drafts})
    known = {"m": {"plain": [400.0]}}
    result = Prober(api.server, ProbeSettings(), known, lambda text: None).probe("m")
    assert result.level == OK and result.timing.drafted and "(drafting)" in result.line
    assert known["m"] == {"plain": [400.0], "drafted": [90.0]}


# ----- a model that people use


def used(answers: list):
    return lambda entry: answers.pop(0) if len(answers) > 1 else answers[0]


def test_a_model_in_use_is_waited_for_then_reported_as_unknown(stub_engine):
    api = Api(stub_engine, {**kinds()["router"], "/v1/completions": STREAM % b"99.0"})
    api.server.in_use = used([True, True, False])
    assert Prober(api.server, ProbeSettings(wait=60.0), {}, lambda text: None).probe("m").level == OK
    api.server.in_use = used([True])
    begun = api.server.clock.monotonic()
    result = Prober(api.server, ProbeSettings(wait=60.0), {}, lambda text: None).probe("m")
    assert result.level == UNKNOWN and result.why == "m is in use, for 1m0s now" and api.server.clock.monotonic() - begun == 60.0


def test_what_others_use_is_not_evicted_by_a_probe_of_something_else(stub_engine):
    api = Api(stub_engine, {**kinds()["router"], "/v1/completions": STREAM % b"99.0"})
    api.server.in_use = lambda entry: entry.model == "m"
    result = Prober(api.server, ProbeSettings(wait=0.0), {}, lambda text: None).probe("n")
    assert result.level == UNKNOWN and result.why == "m is in use" and "POST /v1/completions" not in api.asked
    api.server.in_use = lambda entry: None
    result = Prober(api.server, ProbeSettings(wait=0.0), {}, lambda text: None).probe("n")
    assert result.level == UNKNOWN and "can't be told whether m is in use" in result.why
    assert Prober(api.server, ProbeSettings(wait=0.0, force=True), {}, lambda text: None).probe("n").level == OK


def test_a_model_that_is_taken_into_use_while_it_is_probed_is_not_unloaded(stub_engine):
    api = Api(stub_engine, {**kinds()["router"], "/v1/completions": STREAM % b"2.0"})
    api.server.in_use = used([False, True])
    result = Prober(api.server, ProbeSettings(wait=0.0), {"m": {"plain": [99.0]}}, lambda text: None).probe("m")
    assert result.level == CRITICAL and "not unloaded: m is in use" in result.why and "POST /models/unload" not in api.asked


# ----- the incident, end to end


@pytest.fixture(params=[Front, LlamaSwap], ids=lambda kind: kind.kind)
def front(request, tmp_path, monkeypatch):
    if request.param is not Front and not os.environ.get("LLAMA_SWAP"):
        pytest.skip("$LLAMA_SWAP names no binary")
    gpu = ToyGpu(tmp_path, monkeypatch)
    made = request.param(tmp_path)
    made.gpu = gpu
    yield made
    made.close()


def cli(front, *argv: str) -> subprocess.CompletedProcess:
    words = [sys.executable, "-I", LLMGUARD, "--state-dir", str(front.root / "state"), "probe", "--url", front.url, *argv]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, "HOME": str(front.root)}, cwd=front.root)


def state(front) -> dict:
    return json.loads((front.root / "state/probe.json").read_text())["servers"][front.url]


# What a review found: healthy models that were unloaded, and fallen ones that passed.


def test_one_that_was_slow_because_somebody_else_worked_is_measured_again_and_not_unloaded(stub_engine):
    answers = [STREAM % b"2.0", STREAM % b"99.0"]
    api = Api(stub_engine, {**kinds()["router"], "/v1/completions": lambda request: answers.pop(0)})
    api.server.in_use = used([False, True, False])
    result = Prober(api.server, ProbeSettings(), {"m": {"plain": [99.0]}}, lambda text: None).probe("m")
    assert result.level == OK and answers == [] and "POST /models/unload" not in api.asked


def test_what_can_not_be_told_is_not_unloaded(stub_engine):
    api = Api(stub_engine, {**kinds()["router"], "/v1/completions": STREAM % b"2.0"})
    api.server.in_use = lambda entry: None
    result = Prober(api.server, ProbeSettings(), {"m": {"plain": [99.0]}}, lambda text: None).probe("m")
    assert result.level == CRITICAL and "not unloaded: it can't be told whether m is in use" in result.why
    assert "POST /models/unload" not in api.asked


def test_a_full_queue_is_no_fallback(stub_engine):
    for status in (429, 503):
        api = Api(stub_engine, {**kinds()["router"], "/v1/completions": (status, {"error": {"message": "busy"}})})
        api.server.in_use = lambda entry: False
        result = Prober(api.server, ProbeSettings(), {}, lambda text: None).probe("m")
        assert result.level == UNKNOWN and "POST /models/unload" not in api.asked


def test_an_unload_that_did_not_help_is_not_repeated_within_the_hour(stub_engine):
    api = Api(stub_engine, {**kinds()["router"], "/v1/completions": STREAM % b"2.0", "POST /models/unload": {}})
    api.server.in_use = lambda entry: False
    api.server.loaded = lambda: []
    models: dict = {"m": {"plain": [99.0]}}
    for times in (1, 1):
        result = Prober(api.server, ProbeSettings(), models, lambda text: None).probe("m")
        assert result.level == CRITICAL and api.asked.count("POST /models/unload") == times
    assert "did not help, so it is left as it is" in result.why
    api.server.clock.advance(llmguard.HEAL_AGAIN)
    Prober(api.server, ProbeSettings(), models, lambda text: None).probe("m")
    assert api.asked.count("POST /models/unload") == 2


def test_a_slow_models_own_baseline_gives_it_the_time_that_it_needs(stub_engine, monkeypatch):
    asked: list[float] = []
    monkeypatch.setattr(llmguard, "measure", lambda address, key, model, seconds, progress: (asked.append(seconds), Timing(133.0, 200, 3.0, 1.5))[1])
    api = Api(stub_engine, kinds()["server"])
    assert Prober(api.server, ProbeSettings(), {"m": {"plain": [1.5]}}, lambda text: None).probe("m").level == OK
    assert asked == [1.5 * 200 / (1.5 / 3)]
    Prober(api.server, ProbeSettings(), {}, lambda text: None).probe("m")
    assert asked[1] == 120.0


def test_a_stream_that_somebody_kept_back_says_nothing_by_our_clock(stub_engine):
    body = b"".join(b'data: {"choices":[{"text":"w"}]}\n\n' for _ in range(200)) + b"data: [DONE]\n\n"
    api = Api(stub_engine, {**kinds()["server"], "/v1/completions": body})
    models: dict = {}
    result = Prober(api.server, ProbeSettings(), models, lambda text: None).probe("m")
    assert result.level == OK and result.timing.speed is None and models == {}


@pytest.mark.parametrize(
    "chunk",
    [b'{"choices":[{"text":"w"}],"timings":{"predicted_n":"x","predicted_per_second":"fast"}}', b'{"choices":[{"text":"w"}],"timings":[1]}',
     b'{"choices":[{"text":"w"}],"timings":{"predicted_n":1e400,"predicted_per_second":-1}}', b'{"choices":["w"],"error":null}', b"[" * 5000, b"5"],
)
def test_odd_streams_are_survived(stub_engine, chunk):
    api = Api(stub_engine, {**kinds()["server"], "/v1/completions": b"data: " + chunk + b"\n\n" + STREAM % b"99.0"})
    assert Prober(api.server, ProbeSettings(), {"m": {"plain": ["x", None, True]}, "n": 5}, lambda text: None).probe("m").level == OK


def test_a_fallback_is_found_unloaded_once_and_healthy_again(front):
    healthy = cli(front, A, B)
    assert healthy.returncode == 0 and healthy.stdout.startswith("OK - 2 of 2 models are healthy | 'small one wall'="), healthy
    assert f"{A}: healthy: " in healthy.stdout and "105.0 tokens/s by the server" in healthy.stdout
    assert state(front)["models"] == {A: {"plain": [105.0]}, B: {"plain": [105.0]}}
    front.gpu.drains(True)
    front.reload()
    front.request(A)
    assert not front.on_gpu(A)
    front.gpu.drains(False)
    healed = cli(front, A)
    assert healed.returncode == 1 and healed.stdout.startswith(f"WARNING - {A}: healed: "), healed
    assert "after an unload, 3.6 tokens/s, 0.03 times its baseline of 105.0 before" in healed.stdout
    assert front.on_gpu(A) and state(front)["models"][A] == {"plain": [105.0, 105.0]}, "the CPU spawn is no baseline"
    assert cli(front).returncode == 0


def test_a_fallback_that_stays_is_critical_and_not_tried_over_and_over(front):
    assert cli(front, A).returncode == 0
    front.gpu.drains(True)
    front.reload()
    front.request(A)
    pid = front.server(A).pid
    dry = cli(front, A, "--dry-run")
    assert dry.returncode == 2 and "not unloaded, as asked" in dry.stdout and front.server(A).pid == pid
    assert cli(front, A, "--no-heal").returncode == 2 and front.server(A).pid == pid
    bad = cli(front, A, "--if-changed", "swap.yaml")
    assert bad.returncode == 2 and "also after an unload" in bad.stdout and front.server(A).pid != pid
    pid = front.server(A).pid
    again = cli(front, A, "--if-changed", "swap.yaml")
    assert again.returncode == 2 and ", asked again in " in again.stdout and front.server(A).pid == pid, "from memory"
    assert cli(front, A).returncode == 2 and front.server(A).pid == pid, "asked again, and not unloaded again"
    assert state(front)["models"][A]["plain"] == [105.0]


def test_a_first_probe_of_a_small_model_on_the_cpu_is_no_baseline(front):
    """It is quick enough for 40 s; its processes tell."""
    front.gpu.drains(True)
    (front.gpu.folder / str(os.getpid())).write_text(str(160 << 20))
    front.request(A)
    assert not front.on_gpu(A)
    found = cli(front, A, "--no-heal")
    assert found.returncode == 2 and "but its weights are in the box's memory" in found.stdout
    assert A not in state(front)["models"]


def test_if_changed_probes_after_a_change_only(front):
    assert cli(front, A, "--if-changed", "swap.yaml").stdout.startswith("OK - 1 of 1 models are healthy")
    assert cli(front, A, "--if-changed", "swap.yaml").stdout.startswith("OK - nothing changed since the last good probe at 2")
    front.write_config("deployed")
    assert cli(front, A, "--if-changed", "swap.yaml").stdout.startswith("OK - 1 of 1")
    os.utime(front.config)
    assert cli(front, A, "--if-changed", "swap.yaml").stdout.startswith("OK - nothing changed"), "a date alone is no change"
    text_of(f"{front.url}/api/models/unload/{A.replace(' ', '%20')}", "POST")
    assert cli(front, A, "--if-changed", "swap.yaml").stdout.startswith("OK - nothing changed"), "nor is one that is not loaded"
    assert front.running() == {}
    front.request(A)
    assert cli(front, A, "--if-changed", "swap.yaml").stdout.startswith("OK - 1 of 1"), "a new process is one"
    gone = cli(front, A, "--if-changed", "no.yaml")
    assert gone.returncode == 3 and gone.stdout.startswith("UNKNOWN - --if-changed no.yaml: No such file")


def test_without_a_name_what_is_loaded_is_probed_and_nothing_loaded_is_all_right(front):
    for _ in range(2):
        nothing = cli(front, "--if-changed", "swap.yaml")
        assert (nothing.returncode, nothing.stdout) == (0, "OK - no model is loaded: nothing to probe\n"), "that is no good probe"
    front.request(B)
    assert f"{B}: healthy" in cli(front).stdout


def test_a_model_in_use_on_the_front_is_left_alone(front):
    front.request(A)
    front.says(A, "busy")
    held = cli(front, A, "--wait", "0s")
    assert held.returncode == 3 and f"{A}: unknown: {A} is in use" in held.stdout
    other = cli(front, B, "--wait", "0s")
    assert other.returncode == 3 and f"{B}: unknown: {A} is in use" in other.stdout


def test_two_servers_probed_at_once_do_not_lose_each_others_memory(front):
    other = llmguard.GuardState(str(front.root / "state"), "probe", Address("127.0.0.1", 1))
    mine = llmguard.GuardState(str(front.root / "state"), "probe", Address("127.0.0.1", 2))
    known = mine.load()
    other.save({"models": {"theirs": {}}})
    mine.save({**known, "models": {"ours": {}}})
    assert set(other.load()["models"]) == {"theirs"} and set(mine.load()["models"]) == {"ours"}
    assert other.lock.path != mine.lock.path


def test_a_state_folder_that_can_not_be_written_is_unknown_and_never_healed(front):
    (front.root / "state").write_text("a file")
    done = cli(front, A)
    assert done.returncode == 3 and done.stdout.startswith("UNKNOWN - ") and "Traceback" not in done.stderr, done


def test_json_and_textfile(front):
    done = cli(front, A, "--json", "--textfile", "probe.prom")
    content = json.loads(done.stdout)
    assert content["status"] == "OK" and content["server"] == "llama-swap" and content["url"] == front.url
    assert content["models"][A]["verdict"] == "healthy" and content["models"][A]["timing"]["tokens"] == 200
    metrics = (front.root / "probe.prom").read_text()
    assert 'llmguard_probe_wall_seconds{model="small one"} ' in metrics and "llmguard_probe_status 0\n" in metrics
    for _ in range(2):
        assert cli(front, A, "--if-changed", "swap.yaml", "--textfile", "again.prom").returncode == 0
        assert 'llmguard_probe_wall_seconds{model="small one"} ' in (front.root / "again.prom").read_text(), "also when nothing changed"


def test_nobody_there_is_critical(front, stub_engine):
    done = subprocess.run(
        [sys.executable, "-I", LLMGUARD, "--state-dir", str(front.root / "state"), "probe", "--url", f"http://127.0.0.1:{free_port()}", "m"],
        capture_output=True, text=True, timeout=PATIENCE,
    )
    assert done.returncode == 2 and done.stdout.startswith("CRITICAL - no server answers on")


# ----- real servers


def test_a_real_llama_server_and_cpu_weights_on_purpose_are_no_alarm(llama_server, models, tmp_path):
    port = free_port()
    command = [word.replace("{port}", str(port)) for word in llama_command(llama_server, models["small"], "-ngl", "0")]
    with open(tmp_path / "log", "wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as child:
        try:
            server = ModelServer(Address("127.0.0.1", port))
            eventually(server.api.ready, "llama-server")
            known: dict = {}
            (entry,) = server.loaded()
            prober = Prober(server, ProbeSettings(), known, lambda text: None)
            first, second = prober.probe(entry.model), prober.probe(entry.model)
            assert server.kind == "server" and first.level == second.level == OK
            assert first.timing.tokens == 200 and first.timing.rate > 0 and first.timing.first <= first.timing.wall
            assert known[entry.model]["plain"] == [round(first.timing.rate, 2), round(second.timing.rate, 2)]
            assert second.baseline == round(first.timing.rate, 2)
            box = llmguard.Box()
            processes = box.family({child.pid})
            facts = llmguard.evidence_of(box, llmguard.GpuReading("nvidia", (llmguard.Device(0, "0", "c", 24 << 30, 0),)), processes)
            assert facts.model == os.stat(models["small"]).st_size and facts.meant_for_cpu == "-ngl 0"
            assert llmguard.verdict(facts).because == "meant"
        finally:
            child.terminate()


def test_a_real_router_unloads_by_its_own_api(llama_server, models, tmp_path):
    port = free_port()
    folder = tmp_path / "models"
    folder.mkdir()
    os.symlink(models["small"], folder / "small.gguf")
    command = [llama_server, "--models-dir", str(folder), "--port", str(port), "--host", "127.0.0.1", "-c", "512"]
    with open(tmp_path / "log", "wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as child:
        try:
            server = ModelServer(Address("127.0.0.1", port))
            eventually(server.api.ready, "llama-server")
            eventually(lambda: server.kind == "router")
            known: dict = {"small": {"plain": [1e9]}}
            result = Prober(server, ProbeSettings(), known, lambda text: None).probe("small")
            assert result.level == CRITICAL and "also after an unload" in result.why and result.before is not None
        finally:
            child.terminate()


def test_an_llmguard_is_probed_through_its_own_api(serve, llama_server, models):
    serving = serve({"hosts": {"here": {"engines": {"e": {"command": llama_command(llama_server, models["small"]), "port": free_port(), "models": ["small"]}}}}})
    server = ModelServer(Address("127.0.0.1", int(serving.url.rpartition(":")[2])))
    known: dict = {}
    result = Prober(server, ProbeSettings(), known, lambda text: None).probe("small")
    assert server.kind == "llmguard" and result.level == OK, result
    known["small"]["plain"] = [1e9]
    before = serving.engine_pid("e")
    result = Prober(server, ProbeSettings(), known, lambda text: None).probe("small")
    assert result.level == CRITICAL and "also after an unload" in result.why and serving.engine_pid("e") != before
    assert result.level != WARNING

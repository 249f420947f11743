"""The verdict: what is known of a model server's processes, and what a host does when its engine serves from the CPU."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from parts import FakeClock, eventually, free_port
from swap import MODELSERVER, ToyGpu
from test_host import GUARDS, Bench, host_config

import llmguard
from llmguard import Address, Box, EngineApi, GpuProcess, GpuReading, Memory, Process, Told, told, replace

GIB = 1 << 30
HZ = os.sysconf("SC_CLK_TCK")


# ----- what an engine was told


@pytest.mark.parametrize(
    ("argv", "environment", "expected"),
    [
        ("llama-server -m /m/a.gguf -ngl 99", {}, Told("/m/a.gguf", layers=99)),
        ("llama-server --model /m/a.gguf --gpu-layers all", {}, Told("/m/a.gguf")),
        ("llama-server -m a.gguf -ngl 0", {}, Told("a.gguf", "-ngl 0", layers=0)),
        ("llama-server -m a.gguf --n-gpu-layers 20", {}, Told("a.gguf", "", "--n-gpu-layers 20", 20)),
        ("llama-server -m a.gguf -ngl auto -dev none", {}, Told("a.gguf", "-dev none")),
        ("llama-server -m a.gguf --n-cpu-moe 12", {}, Told("a.gguf", "", "--n-cpu-moe 12")),
        ("llama-server -m a.gguf --n-cpu-moe 0", {}, Told("a.gguf")),
        ("llama-server -cmoe -m a.gguf", {}, Told("a.gguf", "", "-cmoe")),
        ("llama-server -ot exps=CPU -m a.gguf", {}, Told("a.gguf", "", "-ot exps=CPU")),
        ("llama-server -ot exps=CUDA1 -m a.gguf", {}, Told("a.gguf")),
        ("llama-server -ot a=CPU -ot b=CUDA1 -m a.gguf", {}, Told("a.gguf", "", "-ot a=CPU")),
        ("llama-server -m a.gguf -nkvo", {}, Told("a.gguf", "", "-nkvo")),
        ("llama-server", {"LLAMA_ARG_MODEL": "/m/b.gguf", "LLAMA_ARG_N_GPU_LAYERS": "0"}, Told("/m/b.gguf", "LLAMA_ARG_N_GPU_LAYERS=0", layers=0)),
        ("llama-server -ngl 99", {"LLAMA_ARG_N_GPU_LAYERS": "0"}, Told(layers=99)),  # the command line wins
        ("llama-server", {"LLAMA_ARG_KV_OFFLOAD": "0"}, Told("", "", "LLAMA_ARG_KV_OFFLOAD=0")),
        ("llama-server", {"LLAMA_ARG_CPU_MOE": "0", "PATH": "/bin"}, Told()),
        ("llama-server -m", {}, Told()),
        ("llama-server -ngl", {}, Told()),
        ("llama-server --models-dir /m", {}, Told()),
        ("", {}, Told()),
    ],
    ids=str,
)
def test_what_a_server_was_told(argv, environment, expected):
    assert told(argv.split(), environment) == expected


# ----- a box with model servers on it


class Servers:
    """A /proc tree. Sizes in bytes."""

    def __init__(self, root: Path) -> None:
        self.root, self.box = root, Box(str(root))
        self.write("proc/uptime", "1000.00 900.00\n")
        self.write("proc/stat", "btime 1790000000\n")
        self.write("proc/net/tcp", "  sl\n")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def spawn(self, pid: int, argv: str = "llama-server", age: float = 25.0, parent: int = 1, memory: Memory | None = None, cgroup: str = "0::/x\n") -> Process:
        start = int((1000 - age) * HZ)
        comm = argv.split()[0]
        self.write(f"proc/{pid}/stat", f"{pid} ({comm}) S {parent} {pid} {pid} " + "0 " * 15 + f"{start} 0 0\n")
        self.write(f"proc/{pid}/cmdline", "\0".join([*argv.split(), ""]))
        self.write(f"proc/{pid}/cgroup", cgroup)
        m = memory or Memory(GIB, GIB, 0, 0)
        lines = {"VmRSS": m.rss, "RssAnon": m.anon, "RssFile": m.file, "VmSwap": m.swap}
        self.write(f"proc/{pid}/status", "".join(f"{key}:\t{count // 1024} kB\n" for key, count in lines.items()))
        return self.box.process(pid)

    def model(self, path: str, size: int) -> None:
        self.write(path, "")
        os.truncate(self.root / path, size)  # as large as that, and takes no room

    def listens(self, port: int) -> None:
        self.write("proc/net/tcp", f"  sl\n   0: 0100007F:{port:04X} 00000000:0000 0A 0:0 0:0 0 0 0 4242 1\n")

    def evidence(self, *processes: Process, gpu: dict[int, int] | None = None, **more):
        rows = tuple(GpuProcess(pid, "0", held) for pid, held in (gpu or {}).items())
        device = llmguard.Device("0", "0", "card", total=24 * GIB, used=sum((gpu or {}).values()))
        return llmguard.evidence_of(self.box, GpuReading("nvidia", (device,), rows), processes, **more)


@pytest.fixture
def servers(tmp_path) -> Servers:
    return Servers(tmp_path)


def test_the_evidence_is_taken_of_all_processes_together(servers):
    """A router and its child: the memory of both, the age of the younger, the file that the child maps."""
    servers.model("models/a.gguf", 16 * GIB)
    router = servers.spawn(10, "llama-server --models-dir /models", age=500.0, memory=Memory(200 << 20, 200 << 20, 0, 0))
    child = servers.spawn(11, "llama-server --model /models/a.gguf --alias a", age=25.0, parent=10, memory=Memory(2 * GIB, GIB, GIB, 1 << 20))
    assert servers.box.family({10}) == [router, child]
    facts = servers.evidence(router, child, gpu={11: 15 * GIB})
    assert facts.memory == Memory((200 << 20) + 2 * GIB, (200 << 20) + GIB, GIB, 1 << 20)
    assert 24.9 <= facts.age <= 25.1 and facts.model == 16 * GIB and facts.gpu == 15 * GIB
    assert llmguard.verdict(facts).value == "gpu"
    assert llmguard.verdict(servers.evidence(router, replace(child), gpu={})).value != "gpu"


def test_the_parts_of_a_split_model_are_summed_and_a_file_counts_once(servers):
    for part in (1, 2, 3):
        servers.model(f"srv/big-{part:05d}-of-00003.gguf", part * GIB)
    os.makedirs(servers.root / "srv", exist_ok=True)
    one = servers.spawn(10, "llama-server -m big-00001-of-00003.gguf")
    os.symlink("/srv", servers.root / "proc/10/cwd")
    two = servers.spawn(11, "llama-server -m /srv/big-00001-of-00003.gguf")
    assert servers.evidence(one, two).model == 6 * GIB
    os.remove(servers.root / "srv/big-00002-of-00003.gguf")
    assert servers.evidence(two).model is None, "a part that can't be seen: the size is not known"
    assert servers.evidence(two, model=7 * GIB).model == 7 * GIB, "but for what the server says itself"


def test_a_server_without_any_memory_is_gone(servers):
    process = servers.spawn(10)
    servers.write("proc/10/status", "Name:\tllama-server\nState:\tZ (zombie)\n")
    assert llmguard.verdict(servers.evidence(process)).because == "gone"
    assert llmguard.verdict(servers.evidence()).because == "gone"


def test_a_server_that_was_told_to_use_the_cpu_is_judged_by_its_own_limit_or_not_at_all(servers):
    process = servers.spawn(10, "llama-server -m a.gguf -ngl 0", memory=Memory(20 * GIB, 20 * GIB, 0, 0))
    found = llmguard.verdict(servers.evidence(process))
    assert (found.value, found.because) == ("unknown", "meant") and "it is meant to be in the box's memory: -ngl 0" in found.evidence
    assert llmguard.verdict(servers.evidence(process, max_rss=30 * GIB)).value == "unknown"
    found = llmguard.verdict(servers.evidence(process, max_rss=16 * GIB))
    assert found.value == "cpu" and "more is in the box's memory than its own limit of 16 GiB" in found.evidence
    old = servers.spawn(10, "llama-server -m a.gguf -ngl 0", age=1000.0, memory=Memory(20 * GIB, 20 * GIB, 0, 0))
    assert llmguard.verdict(servers.evidence(old, max_rss=16 * GIB)).value == "unknown"


@pytest.mark.parametrize("layers", [30, 60])
def test_more_layers_than_the_model_has_are_all_of_them(servers, layers):
    """-ngl 60 of 48 is the whole model, and its fallback one; -ngl 30 means a part of it."""
    servers.model("m/a.gguf", 16 * GIB)
    with open(servers.root / "m/a.gguf", "r+b") as file:
        file.write(b"GGUF" + b"\0" * 40 + b"qwen3.block_count\x04\0\0\0" + (48).to_bytes(4, "little"))
    process = servers.spawn(10, f"llama-server -m /m/a.gguf -ngl {layers}", memory=Memory(16 * GIB, 16 * GIB, 0, 0))
    context = llmguard.verdict(servers.evidence(process, gpu={10: 300 << 20}))
    assert (context.value, context.because) == (("cpu", "") if layers == 60 else ("unknown", "meant"))
    nothing = llmguard.verdict(servers.evidence(process, gpu={10: 0}))
    assert nothing.value == "cpu", "not even a context: it never came to the GPU"
    assert llmguard.verdict(servers.evidence(process, gpu={10: 15 * GIB})).value == "gpu"


def test_an_own_limit_comes_before_the_gpus_figures(servers):
    process = servers.spawn(10, "whisper-server -m /m/none", memory=Memory(5 * GIB, 5 * GIB, 0, 0))
    assert llmguard.verdict(servers.evidence(process, model=4 * GIB, gpu={})).value == "cpu"
    assert llmguard.verdict(servers.evidence(process, model=4 * GIB, gpu={}, max_rss=30 * GIB)).because == "meant"
    assert llmguard.verdict(servers.evidence(process, model=4 * GIB, gpu={10: 4 * GIB}, max_rss=30 * GIB)).value == "gpu"


def test_a_model_that_is_a_folder_has_no_size(servers):
    os.makedirs(servers.root / "hf/model")
    assert servers.evidence(servers.spawn(10, "vllm serve --model /hf/model")).model is None


@pytest.mark.parametrize("asleep", [False, True])
def test_the_idle_figures_of_a_card_that_sleeps_are_no_evidence(servers, asleep):
    """amdgpu's counters fall to nothing when the card is idle: a healthy server whose mapped file is resident, too, would pass for
    a fallen one. What is anonymous still tells."""
    servers.model("m/a.gguf", 16 * GIB)
    device = llmguard.Device(0, "0000:03:00.0", "card", 24 * GIB, 20 << 20, asleep=asleep)
    judge = lambda process: llmguard.verdict(llmguard.evidence_of(servers.box, GpuReading("amd", (device,), (GpuProcess(10, "0000:03:00.0", 0),)), [process]))
    mapped = servers.spawn(10, "llama-server -m /m/a.gguf -ngl 99", memory=Memory(14 * GIB, GIB, 13 * GIB, 0))
    assert judge(mapped).value == ("unknown" if asleep else "cpu")
    anonymous = servers.spawn(10, "llama-server -m /m/a.gguf -ngl 99 --no-mmap", memory=Memory(16 * GIB, 16 * GIB, 0, 0))
    assert judge(anonymous).value == "cpu"


def test_the_seeds_figures(servers):
    """0.9 to 1.3 GiB when all is well, 16 GiB fallen back, and no more known than that."""
    for rss, value in ((0.9, "unknown"), (1.3, "unknown"), (16.0, "cpu")):
        process = servers.spawn(10, memory=Memory(int(rss * GIB), int(rss * GIB), 0, 0))
        reading = GpuReading("amd", problem="its memory can't be read")
        assert llmguard.verdict(llmguard.evidence_of(servers.box, reading, [process])).value == value


def test_a_healthy_server_with_nine_gib_of_prompt_cache_after_a_day_is_no_fallback(servers):
    servers.model("m/a.gguf", 16 * GIB)
    process = servers.spawn(10, "llama-server -m /m/a.gguf", age=25.0, memory=Memory(10 * GIB, 9 * GIB, GIB, 0))
    servers.write("proc/uptime", "91000.00 1.00\n")
    assert llmguard.verdict(servers.evidence(process, gpu={10: 17 * GIB})).value == "gpu"
    assert llmguard.verdict(llmguard.evidence_of(servers.box, GpuReading("amd", problem="unreadable"), [process])).value == "unknown"


# ----- containers

ID = "4c01db0b339c4c01db0b339c4c01db0b339c4c01db0b339c4c01db0b339c4242"
DOCKER_PS = f"{'f' * 64} other 0.0.0.0:80->80/tcp\n{ID} swap-qwen 0.0.0.0:9797->8080/tcp, [::]:9797->8080/tcp\n{'e' * 64} quiet\n"


@pytest.mark.parametrize(
    ("listed", "port", "name", "found"),
    [(DOCKER_PS, 9797, "", True), (DOCKER_PS, 8080, "", False), (DOCKER_PS, 1, "swap-qwen", True), (DOCKER_PS, 1, "", False),
     (f"{ID} ranged 127.0.0.1:9790-9799->9790-9799/tcp", 9797, "", True), ("", 9797, "", False), ("garbage", 9797, "", False)],
)
def test_what_runs_in_a_container_is_found_by_its_id_in_the_cgroup(servers, listed, port, name, found):
    servers.spawn(10, cgroup="0::/system.slice/docker.service\n")
    for pid, cgroup in ((42, f"0::/system.slice/docker-{ID}.scope\n"), (43, f"1:name=systemd:/docker/{ID}\n")):
        servers.spawn(pid, cgroup=cgroup)
    asked = []

    def run(argv, seconds):
        asked.append(argv)
        return 0, listed, ""

    inside = llmguard.container_processes(servers.box, run, "docker", port, name)
    assert [process.pid for process in inside] == ([42, 43] if found else []) and asked[0][:3] == ["docker", "ps", "--no-trunc"]


def test_a_container_that_nobody_may_ask_about_is_not_found(servers):
    servers.spawn(42, cgroup=f"0::/docker/{ID}\n")
    for answer in ((None, "", "docker: not found"), (1, "", "permission denied"), (-9, DOCKER_PS, "too slow")):
        assert llmguard.container_processes(servers.box, lambda argv, seconds, answer=answer: answer, "docker", 9797) == []


# ----- what a host does about it


def serving(verdict: str, engine: str = "a", evidence: tuple[str, ...] = ("VmRSS is 16 GiB",)) -> dict:
    return {"ok": True, "agent": "0.1.0", "sha256": "abc", "checked": GUARDS, "foreign": [], "active": engine, "state": "running",
            "engine": {"pids": [4242], "port": "ours", "verdict": verdict, "evidence": list(evidence)}}


@pytest.fixture
def lines(monkeypatch) -> list[str]:
    logged: list[str] = []
    monkeypatch.setattr(llmguard, "log", lambda text, priority=llmguard.INFO: logged.append(text))
    return logged


class Judged(Bench):
    """A host whose engine's verdict is what `says` says, by the number of its start."""

    def __init__(self, *says: str, **more) -> None:
        config = host_config("a", "b", "c")
        engines = {name: replace(engine, on_cpu=more.get("on_cpu", "restart")) if engine.managed else engine for name, engine in config.engines.items()}
        super().__init__(replace(config, engines=engines), tick=more.get("tick", 7200.0))
        answer = self.box.call

        def call(ask: dict, seconds: float) -> dict:
            reply = answer(ask, seconds)
            if reply.get("engine") and "verdict" not in reply["engine"]:
                count = len(self.box.ops("start"))
                reply["engine"].update(verdict=says[min(count, len(says)) - 1] if count else says[0], evidence=["VmRSS is 16 GiB"])
            return reply

        self.box.call = call

    def fallbacks(self) -> list[dict]:
        return [event["data"] for event in self.told.take() if event["event"] == "cpu_fallback"]


def test_the_verdict_is_taken_when_ready_after_20_and_after_90_seconds_whatever_the_tick():
    bench = Judged("gpu")
    bench.serve_one("a")
    begun = bench.clock.monotonic()
    looks: list[float] = []
    answer = bench.box.call

    def call(ask: dict, seconds: float) -> dict:
        if ask["op"] == "status":
            looks.append(bench.clock.monotonic() - begun)
        return answer(ask, seconds)

    bench.box.call = call
    assert bench.host.view()["verdict"] == {"value": "gpu", "evidence": ["VmRSS is 16 GiB"]}
    bench.pass_time(3600)
    assert looks == [20.0, 90.0] and bench.host.view()["degraded"] is False and bench.fallbacks() == []


def test_a_fallback_is_started_once_more_and_the_healthy_spawn_is_served(lines):
    bench = Judged("cpu", "gpu")
    bench.serve_one("a")
    bench.pass_time(19)
    assert bench.box.ops() == [("start", "a")] and bench.host.view()["verdict"]["value"] == "cpu", "one look may be a spike"
    bench.pass_time(1)
    assert bench.box.ops() == [("start", "a"), ("stop", ""), ("start", "a")], "by +20 s it is mended, though nobody asked for it again"
    assert bench.host.view()["verdict"]["value"] == "gpu" and bench.state == "ready" and not bench.host.view()["degraded"]
    text = "host a9: engine a serves from the CPU: it starts once more as soon as nothing runs on it (VmRSS is 16 GiB)"
    assert lines.count(text) == 1 and "host a9: it fell back to the CPU: stopping engine a" in lines
    assert [data["degraded"] for data in bench.fallbacks()] == [False] and bench.host.counts["cpu_fallbacks"] == 1
    bench.pass_time(600)
    assert len(bench.box.ops("start")) == 2


def test_a_stream_on_the_cpu_is_not_cut_and_newcomers_wait_for_the_new_start():
    bench = Judged("cpu", "gpu")
    bench.serve_one("a")
    stream = bench.client("a").granted()
    bench.pass_time(300)
    assert bench.box.ops() == [("start", "a")] and bench.state == "draining"
    newcomer = bench.client("a")
    bench.pass_time(10)
    assert newcomer.waits()
    stream.done()
    bench.settle()
    newcomer.granted()
    assert bench.box.ops() == [("start", "a"), ("stop", ""), ("start", "a")]


def test_a_fallback_that_stays_one_is_degraded_served_on_and_not_tried_again_until_the_next_start(lines):
    bench = Judged("cpu", "cpu", "gpu", tick=30.0)
    bench.serve_one("a")
    bench.pass_time(600)
    assert bench.box.ops() == [("start", "a"), ("stop", ""), ("start", "a")]
    assert bench.host.view()["degraded"] is True and bench.state == "ready"
    bench.client("a").granted().done()
    assert len([line for line in lines if "degraded, and served on as it is" in line]) == 1
    assert [data["degraded"] for data in bench.fallbacks()] == [False, True]
    bench.host.unload("a", 0.0)
    bench.settle()
    bench.serve_one("a")
    bench.pass_time(60)
    assert bench.host.view()["degraded"] is False and bench.host.view()["verdict"]["value"] == "gpu"


def test_on_cpu_warn_only_says_so():
    bench = Judged("cpu", on_cpu="warn")
    bench.serve_one("a")
    bench.pass_time(3600 * 0.2)
    assert bench.box.ops() == [("start", "a")] and bench.host.view()["degraded"] is True
    assert [data["degraded"] for data in bench.fallbacks()] == [True]


def test_one_that_somebody_else_started_and_nobody_asked_us_for_is_only_reported_until_somebody_does():
    bench = Judged("cpu", "gpu", tick=30.0)
    bench.box.running = "a"
    bench.pass_time(120)
    assert bench.box.ops() == [] and bench.host.view()["degraded"] is True
    bench.client("a").granted().done()
    bench.pass_time(30)
    assert bench.box.ops() == [("stop", ""), ("start", "a")]


def test_a_waiting_job_comes_before_a_new_start():
    bench = Judged("cpu", "gpu", tick=30.0)
    bench.serve_one("a")
    stream = bench.client("a").granted()
    bench.pass_time(25)
    waits = {**serving("cpu"), "bench_waits": [{"job": "00.job", "since": "now"}]}
    bench.box.script["status"] = [waits]
    bench.host.poke()
    bench.settle()
    stream.done()
    bench.pass_time(120)
    assert bench.box.ops() == [("start", "a"), ("stop", "")], "handed over, and nothing is started in front of the job"


def test_a_request_for_another_engine_makes_the_new_start_needless():
    bench = Judged("cpu", "gpu")
    bench.serve_one("a")
    stream = bench.client("a").granted()
    bench.pass_time(25)
    other = bench.client("b")
    stream.done()
    bench.settle()
    other.granted()
    bench.pass_time(120)
    assert bench.box.ops() == [("start", "a"), ("start", "b")]


def test_a_host_that_was_down_for_a_moment_is_not_started_anew_for_that():
    bench = Judged("cpu", tick=30.0)
    bench.serve_one("a")
    bench.pass_time(120)
    assert bench.host.view()["degraded"] is True and len(bench.box.ops("start")) == 2
    for _ in range(3):
        bench.box.down = llmguard.HostDown("host a9 is down")
        bench.pass_time(60)
        bench.box.down = None
        bench.pass_time(120)
    assert bench.host.view()["degraded"] is True and len(bench.box.ops("start")) == 2


def test_two_looks_at_once_are_one():
    """A change on the box has it looked at again within the second."""
    bench = Judged("cpu", "gpu", tick=30.0)
    bench.serve_one("a")
    for _ in range(5):
        bench.host.poke()
        bench.settle()
    assert bench.box.ops() == [("start", "a")]


def test_one_that_turns_out_to_be_on_the_gpu_is_not_started_anew():
    bench = Judged("cpu", "gpu", tick=30.0)
    bench.serve_one("a")
    stream = bench.client("a").granted()
    bench.pass_time(25)
    newcomer = bench.client("a")
    assert newcomer.waits()
    bench.box.script["status"] = [serving("gpu")]
    bench.host.poke()
    bench.settle()
    newcomer.granted()
    stream.done()
    newcomer.done()
    bench.settle()
    assert bench.box.ops("start", "stop") == [("start", "a")]


def test_unknown_and_one_look_between_two_others_are_no_fallback():
    bench = Bench(tick=30.0)
    bench.serve_one("a")
    bench.box.script["status"] = [serving(value) for value in ("cpu", "unknown", "cpu", "gpu", "cpu", "unknown") * 5]
    bench.pass_time(880)
    assert bench.box.ops("start", "stop") == [("start", "a")] and bench.host.counts["cpu_fallbacks"] == 0


def test_the_agent_is_told_the_models_size_and_the_engines_own_limit():
    bench = Bench()
    bench.host._learned["a"] = {
        "one": {"id": "one", "status": {"value": "loaded"}, "meta": {"size": 5}},
        "two": {"id": "two", "status": {"value": "unloaded"}, "meta": {"size": 7}},
        "odd": {"id": "odd", "meta": None},
    }
    assert bench.host._request("status")["engines"]["a"]["model_bytes"] == 5
    assert bench.host._request("status")["engines"]["b"]["model_bytes"] is None


# ----- the race: a kill, and a start into memory that still drains


def plain(engine: str, port: int, model: str, gpu: str) -> dict:
    command = [sys.executable, "-SE", MODELSERVER, "--port", "{port}", "-m", model, "--gpu", gpu, "--name", engine]
    return {"command": command, "port": port}


@pytest.mark.parametrize("waits", [True, False], ids=["as it is", "without waiting for the memory"])
def test_a_start_into_draining_memory_falls_back_unless_it_is_waited_for(tmp_path, monkeypatch, waits):
    """The start op as it is, and without its wait: the document's kill and respawn, on a toy GPU."""
    gpu = ToyGpu(tmp_path, monkeypatch)
    (gpu.folder / "times").write_text("200")
    (gpu.folder / "total").write_text(str(24 * GIB))
    model = tmp_path / "model.gguf"
    model.touch()
    os.truncate(model, 96 << 20)
    looked: list[float] = []

    class Clock(FakeClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            time.sleep(seconds / 20)  # the engines are real: a process that is killed takes its moment to close its port
            looked.append(seconds)
            if looked.count(1.0) == 4:
                gpu.drains(False)

    agent = llmguard.Agent(str(tmp_path / "state"), Box(), Clock())
    ask = {"host": "here", "engines": {name: plain(name, free_port(), str(model), str(gpu.folder)) for name in ("a", "b")}}
    try:
        assert agent.answer({"op": "start", "engine": "a", **ask})["ok"]
        eventually(lambda: EngineApi(Address("127.0.0.1", ask["engines"]["a"]["port"])).ready())
        gpu.drains(True)
        if not waits:
            monkeypatch.setattr(llmguard.Agent, "_await_memory", lambda *args: None)
            monkeypatch.setattr(llmguard.Agent, "_refuse_owners", lambda *args: None)
        started = agent.answer({"op": "start", "engine": "b", **ask})
        assert started["ok"], started
        eventually(lambda: EngineApi(Address("127.0.0.1", ask["engines"]["b"]["port"])).ready())
        gpu.drains(False)  # while it drains, the card's memory might be anybody's: by +20 s it is told
        status = agent.answer({"op": "status", **ask})
        assert status["active"] == "b" and status["engine"]["verdict"] == ("gpu" if waits else "cpu"), status["engine"]
    finally:
        agent.answer({"op": "stop", **ask})

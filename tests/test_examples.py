"""What the examples promise: each is run, or read by the program that it is for."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
from parts import LLMGUARD, PATIENCE, Stream, ask, eventually, free_port, missing, url_config
from swap import Front, ToyGpu

import llmguard

ROOT = Path(LLMGUARD).parent
EXAMPLES = ROOT / "examples"
MODEL = "small one"


@pytest.fixture
def front(tmp_path, monkeypatch):
    gpu = ToyGpu(tmp_path, monkeypatch)
    made = Front(tmp_path)
    made.gpu = gpu
    yield made
    made.close()


def shell(front, command: str, *words: str, **env: str) -> subprocess.CompletedProcess:
    home = {"HOME": str(front.root), "LLMGUARD_STATE_DIR": str(front.root / "state")}
    return subprocess.run(["sh", *(["-c", command] if command else []), *words], capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, **home, **env})


def cron_lines() -> list[str]:
    lines = (EXAMPLES / "crontab").read_text().splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("line", cron_lines(), ids=lambda line: re.search(r"llmguard (\w+)", line)[1])
def test_a_cron_line_runs_and_prints_nothing_while_all_is_well(front, line):
    front.request(MODEL)
    assert re.match(r"(\S+ ){5}", line) and "%" not in line, "five fields; cron makes a newline of %"
    command = line.split(None, 5)[5].replace("/opt/llmguard", str(ROOT)).replace("http://127.0.0.1:8080", front.url)
    command = command.replace("/etc/llama-swap/config.yaml", str(front.config)).replace("qwen3.6-27b", f"'{MODEL}'").replace("50s", "1s")
    done = shell(front, command)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done


@pytest.mark.parametrize("unit", sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".service", ".socket", ".timer")))
def test_systemd_takes_a_unit(unit):
    if not shutil.which("systemd-analyze"):
        missing("systemd-analyze (Debian: systemd) is not here")
    done = subprocess.run(["systemd-analyze", "verify", str(EXAMPLES / unit)], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "llmguard" in line]
    assert done.returncode == 0 and not ours, done.stderr


def test_the_service_waits_for_what_runs():
    unit = dict(line.split("=", 1) for line in (EXAMPLES / "llmguard.service").read_text().splitlines() if re.match(r"\w+=", line))
    assert llmguard.duration(unit["TimeoutStopSec"].replace("min", "m")) > llmguard.ProxyConfig().drain_timeout
    assert unit["Type"] == "notify" and int(unit["WatchdogSec"]) > 0


# ----- the deploy script


@pytest.fixture
def box(front):
    """rsync, ssh and the service manager of a box that is this one."""
    tools = front.root / "bin"
    reload = front.root / "reload.py"
    reload.write_text(f"import urllib.request\nurllib.request.urlopen('{front.url}/reload', b'')\n")
    for name, text in (("rsync", 'cp "$2" "${3#*:}"'), ("ssh", 'exec sh -c "$2"'), ("ctl", f"exec {sys.executable} {reload}")):
        (tools / name).write_text("#!/bin/sh\n" + text + "\n")
        (tools / name).chmod(0o755)
    return front


def deploy(front, *models: str, **env: str) -> subprocess.CompletedProcess:
    new = front.root / "new.yaml"
    new.write_text("# deployed\n")
    there = {"CONFIG_THERE": str(front.config), "SERVICE_CTL": str(front.root / "bin/ctl"), "URL": front.url, "LLMGUARD": LLMGUARD, "SETTLE": "0"}
    return shell(front, "", str(EXAMPLES / "deploy.sh"), "me@box", str(new), *models, **{**there, **env})


def test_a_deploy_that_ends_healthy(box):
    done = deploy(box, MODEL, "org/b")
    assert done.returncode == 0 and "OK - 2 of 2 models are healthy" in done.stdout, done
    assert box.config.read_text().startswith("# deployed")


def test_a_deploy_into_draining_memory_is_not_relied_upon(box):
    assert deploy(box, MODEL).returncode == 0
    box.gpu.drains(True)
    done = deploy(box, MODEL)
    assert done.returncode == 2 and "CRITICAL" in done.stdout and "also after an unload" in done.stdout, done


def test_a_deploy_that_can_not_be_told_is_no_success(box):
    assert deploy(box, MODEL, LLMGUARD="/no/such/file").returncode not in (0, 1)
    (box.root / "bin/ssh").write_text("#!/bin/sh\ncase $2 in *probe*) exit 255;; esac\n")
    assert deploy(box, MODEL).returncode == 3
    (box.root / "bin/rsync").write_text("#!/bin/sh\nexit 12\n")
    assert deploy(box, MODEL).returncode == 2
    assert shell(box, "", str(EXAMPLES / "deploy.sh"), "me@box").returncode == 3


def test_a_models_name_is_no_shell(box):
    done = deploy(box, "a'b; touch owned $(touch owned2)")
    assert done.returncode != 0 and not list(box.root.glob("owned*")) and not list(Path.cwd().glob("owned*"))


# ----- configurations


def merge(into: dict, more: dict) -> dict:
    """A configuration with more lines in it."""
    for key, value in more.items():
        into[key] = merge(into.get(key, {}), value) if isinstance(value, dict) else value
    return into


def test_the_smallest_configuration_is_right_in_both_languages(tmp_path):
    found = [llmguard.load_config(str(EXAMPLES / ("minimal." + kind))) for kind in ("toml", "json")]
    assert found[0].hosts == found[1].hosts and found[0].proxy == found[1].proxy and not found[0].warnings
    for kind in ("toml", "json"):
        argv = [sys.executable, LLMGUARD, "--state-dir", str(tmp_path), "check", "-c", str(EXAMPLES / ("minimal." + kind))]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode in (0, 1) and done.stdout.startswith("here: "), done  # 1: what this machine lacks


def test_the_whole_configuration_loads():
    assert not llmguard.load_config(str(EXAMPLES / "llmguard.toml")).warnings


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", document.read_text())


@pytest.mark.parametrize("document", [ROOT / "README.md", EXAMPLES / "two-boxes.md"], ids=lambda path: path.name)
def test_what_a_document_shows_is_shell_and_configuration(document):
    assert blocks(document, "sh") and blocks(document, "toml")
    for text in blocks(document, "sh"):
        done = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), text
    whole: dict = {}
    for text in blocks(document, "toml"):
        table = tomllib.loads(text)
        if any("engines" in host for host in table.get("hosts", {}).values()):
            whole = table
        llmguard.parse_config(merge(copy.deepcopy(whole), table))  # a few lines belong into what stands above them


# ----- what Prometheus is told

ALERTS = EXAMPLES / "prometheus-alerts.yml"
DASHBOARD = EXAMPLES / "grafana-dashboard.json"
PROMETHEUS_ADDS = {"instance", "job"}


def panels() -> list[dict]:
    return json.loads(DASHBOARD.read_text())["panels"]


def queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_the_dashboard_can_be_imported():
    board = json.loads(DASHBOARD.read_text())
    assert board["title"] and board["schemaVersion"] >= 39 and "uid" not in board and "id" not in board
    (source,) = board["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert set(re.findall(r'"uid": "([^"]*)"', DASHBOARD.read_text())) == {"${datasource}"}
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids) >= 8
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["w"] > 0 and at["h"] > 0 and at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        assert panel["targets"] and all(target["expr"].strip() and target["legendFormat"] for target in panel["targets"])
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) and panel["title"] and panel["type"]


SAMPLE = re.compile(r"(?m)^(llmguard_\w+)(?:\{(.*)\})? \S+$")
NAME = re.compile(r"\bllmguard_[a-z0-9_]+\b")


@pytest.fixture
def exported(inside, stub_engine, front) -> dict[str, set[str]]:
    """The name of each metric that llmguard exports -> its labels: a proxy's /metrics and what watch and probe write."""
    usage = b'{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}'

    def answer(request: bytes, sock) -> bool:
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(usage), usage))
        return True

    proxy = inside(url_config(stub_engine(answer).port))
    url = f"http://127.0.0.1:{proxy.port}"
    assert ask(url + "/v1/chat/completions", "POST", {"model": "small"}).status == 200
    assert ask(url + "/v1/chat/completions", "POST", {"model": "nobody"}).status == 404
    eventually(lambda: proxy.counters.requests)
    real = proxy.hosts["here"]
    host = llmguard.Host(real.config, proxy.config, llmguard.Remote(real.config, proxy.folder), llmguard.Events())
    host._up, host.verdict, host.owners = "e0", {"value": "cpu"}, [{"kind": "wait", "text": ""}]
    host.gpu = {"devices": [{"index": 0, "used": 1, "total": 2}]}
    host.handbacks.append({"seconds": 1.0})
    proxy.hosts = {"here": host}  # one that has had a life
    try:
        text = ask(url + "/metrics").body.decode()
    finally:
        proxy.hosts = {"here": real}
    front.request(MODEL)
    for guard, *models in (("watch",), ("probe", MODEL)):
        path = front.root / f"{guard}.prom"
        argv = [sys.executable, LLMGUARD, "--state-dir", str(front.root / "state"), guard, "--url", front.url, "--textfile", str(path), *models]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done
        text += path.read_text()
    found: dict[str, set[str]] = {}
    for name, labels in SAMPLE.findall(text):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def test_the_rules_and_the_dashboard_name_metrics_that_there_are(exported):
    rules = re.sub(r"(?m)(^| )#.*", "", ALERTS.read_text())
    scenarios = [series for bad in SCENARIOS for series in {**HEALTHY, **bad[1]}]
    for text in (rules, *queries(), *scenarios):
        assert set(NAME.findall(text)) <= set(exported), text
        for name, labels in re.findall(r"\b(llmguard_\w+)\{([^}]*)\}", text):
            assert set(re.findall(r"(\w+)=", labels)) <= exported[name] | PROMETHEUS_ADDS, text
    for panel in panels():
        for target in panel["targets"]:
            grouped = {label for some in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in some.split(", ")}
            for name in NAME.findall(target["expr"]):
                assert grouped <= exported[name], target
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= grouped, target


# Series of two hours, a value a minute: all is well; and for each alert, what makes it fire and no other.
HEALTHY = {
    'up{job="llmguard",instance="p"}': "1x120",
    'llmguard_start_time_seconds{job="llmguard",instance="p"}': "7x120",
    'llmguard_host_up{instance="p",host="a9"}': "1x120",
    'llmguard_stop_error{instance="p",host="a9"}': "0x120",
    'llmguard_degraded{instance="p",host="a9"}': "0x120",
    'llmguard_verdict{instance="p",host="a9",value="gpu"}': "1x120",
    'llmguard_cpu_fallbacks_total{instance="p",host="a9"}': "1x120",
    'llmguard_engine_up{instance="p",host="a9",engine="mainline"}': "1x120",
    'llmguard_owner{instance="p",host="a9",kind="settle"}': "1x120",
    'llmguard_owner{instance="p",host="b",kind="wait"}': "1x120",  # for somebody else: no engine of ours is up there
    'llmguard_handback_seconds{instance="p",host="a9"}': "12x120",
    'llmguard_releases_total{instance="p",host="a9"}': "0+1x120",
    'llmguard_refusals_total{instance="p",type="engine_failed"}': "3x120",
    'llmguard_refusals_total{instance="p",type="gpu_busy"}': "0+9x120",
    'llmguard_watch_status{instance="a9"}': "0x120",
    'llmguard_probe_status{instance="a9"}': "1x120",  # healed
    'llmguard_watch_last_run_timestamp_seconds{instance="a9"}': "0+60x120",
    'llmguard_probe_last_run_timestamp_seconds{instance="a9"}': "0+60x120",
}
SCENARIOS = [
    ("LlmguardGone", {'up{job="llmguard",instance="p"}': "0x120"}),
    ("LlmguardGone", {'up{job="llmguard",instance="p"}': None}),
    ("LlmguardRestartsOften", {'llmguard_start_time_seconds{job="llmguard",instance="p"}': "0+300x120"}),
    ("LlmguardHostDown", {'llmguard_host_up{instance="p",host="a9"}': "0x120"}),
    ("LlmguardStopNotProven", {'llmguard_stop_error{instance="p",host="a9"}': "1x120"}),
    ("LlmguardServesFromCpu", {'llmguard_degraded{instance="p",host="a9"}': "1x120", 'llmguard_verdict{instance="p",host="a9",value="cpu"}': "1x120"}),
    ("LlmguardServesFromCpu", {'llmguard_verdict{instance="p",host="a9",value="cpu"}': "1x120"}),
    ("LlmguardFallsBackOften", {'llmguard_cpu_fallbacks_total{instance="p",host="a9"}': "0+1x120"}),
    ("LlmguardJobStillWaits", {'llmguard_owner{instance="p",host="a9",kind="wait"}': "1x120"}),
    ("LlmguardHandbackSlow", {'llmguard_handback_seconds{instance="p",host="a9"}': "900x120"}),
    ("LlmguardEngineFails", {'llmguard_refusals_total{instance="p",type="engine_failed"}': "0+2x120"}),
    ("LlmguardWatchCritical", {'llmguard_watch_status{instance="a9"}': "2x120"}),
    ("LlmguardProbeCritical", {'llmguard_probe_status{instance="a9"}': "2x120"}),
    ("LlmguardGuardCannotTell", {'llmguard_watch_status{instance="a9"}': "3x120"}),
    ("LlmguardGuardCannotTell", {'llmguard_probe_status{instance="a9"}': "3x120"}),
    ("LlmguardGuardStale", {'llmguard_watch_last_run_timestamp_seconds{instance="a9"}': "0x120"}),
    ("LlmguardGuardStale", {'llmguard_probe_last_run_timestamp_seconds{instance="a9"}': "0x120"}),
]


def promtool(*words: str) -> None:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


def firing(alert: str, bad: dict) -> dict:
    """A test of promtool's: with these series this alert fires, and no other does."""
    series = {name: values for name, values in {**HEALTHY, **bad}.items() if values}
    expected = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else []
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": "110m", "exp_samples": expected}],
    }


def test_each_alert_fires_for_what_it_says_and_is_quiet_when_all_is_well(tmp_path):
    named = re.findall(r"- alert: (\w+)", ALERTS.read_text())
    assert set(named) == {alert for alert, _ in SCENARIOS} and len(set(named)) == len(named)
    if not shutil.which("promtool"):
        if importlib.util.find_spec("yaml") is None:
            missing("promtool (Debian: prometheus) is not here")
        groups = importlib.import_module("yaml").safe_load(ALERTS.read_text())["groups"]
        assert all({"alert", "expr", "labels", "annotations"} <= set(rule) for group in groups for rule in group["rules"])
        return
    promtool("check", "rules", str(ALERTS))
    path = tmp_path / "tests.yml"  # JSON is YAML
    tests = [firing(alert, bad) for alert, bad in [("", {}), *SCENARIOS]]
    path.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", str(path))


def test_prometheus_takes_the_queries_of_the_dashboard(tmp_path):
    if not shutil.which("promtool"):
        missing("promtool (Debian: prometheus) is not here")
    rules = [{"record": f"query:{n}", "expr": query.replace("$__rate_interval", "5m")} for n, query in enumerate(queries())]
    (tmp_path / "queries.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(tmp_path / "queries.yml"))


# ----- other proxies in front of it

BESIDE = {"nginx": EXAMPLES / "nginx.conf", "caddy": EXAMPLES / "Caddyfile"}


def test_what_stands_in_front_has_our_limits():
    ours = llmguard.ProxyConfig()
    nginx, caddy = (path.read_text() for path in BESIDE.values())
    bodies = re.search(r"client_max_body_size (\d+)m;", nginx)[1], re.search(r"max_size (\d+)MB", caddy)[1]
    assert {int(size) << 20 for size in bodies} == {ours.max_body}
    idle = re.search(r"keepalive_timeout (\d+)s;", nginx)[1], re.search(r"keepalive (\d+)s", caddy)[1]
    assert max(map(int, idle)) < llmguard.IDLE_PATIENCE
    code = re.sub(r"#.*", "", caddy)
    assert code.count("{") == code.count("}") > 0


@pytest.fixture(params=BESIDE)
def beside(request, tmp_path):
    """start(port of llmguard) -> the url of a real nginx or Caddy in front of it, as the example says."""
    kind, running = request.param, []
    if not shutil.which(kind):
        (pytest.skip if kind == "caddy" else missing)(f"{kind} is not here")  # the other one shows the same

    def start(port: int) -> str:
        folder, mine = tmp_path / kind, free_port()
        folder.mkdir()
        text = BESIDE[kind].read_text().replace("127.0.0.1:8080", f"127.0.0.1:{port}")
        if kind == "nginx":
            temps = "".join(f"{what}_temp_path {folder}/{what};" for what in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
            text = text.replace("listen 80;", f"listen 127.0.0.1:{mine};").replace("http {", "http { access_log off; " + temps)
            text = text.replace("worker_processes auto;", f"worker_processes 1; pid {folder}/pid; error_log stderr;")
            text = ("user root; " if os.geteuid() == 0 else "") + text
            argv = [kind, "-p", str(folder), "-c", str(folder / "conf")]
            check, run = [*argv, "-t"], [*argv, "-g", "daemon off;"]
        else:
            text = "{\n\tadmin off\n}\n" + text.replace(":80 {", f":{mine} {{")
            argv = ["--adapter", "caddyfile", "--config", str(folder / "conf")]
            check, run = [kind, "validate", *argv], [kind, "run", *argv]
        (folder / "conf").write_text(text)
        env = {**os.environ, "HOME": str(folder)}
        done = subprocess.run(check, capture_output=True, text=True, timeout=PATIENCE, env=env)
        assert done.returncode == 0 and "warn" not in done.stderr, done.stderr
        with open(folder / "log", "wb") as log:
            running.append(subprocess.Popen(run, stdout=log, stderr=log, env=env))

        def answers() -> bool:
            assert running[-1].poll() is None, (folder / "log").read_text()
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", mine), 1).close()
                return True
            return False

        eventually(answers, kind)
        return f"http://127.0.0.1:{mine}"

    yield start
    for process in running:
        process.terminate()
        process.wait(PATIENCE)


CHAT = "/v1/chat/completions"
EVENTS = [b'data: "one"\n\n', b"data: [DONE]\n\n"]
FIRST, LAST = (b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS)


def test_a_stream_is_not_held_up_in_front_of_us(beside, inside, stub_engine):
    go, left = threading.Event(), threading.Event()

    def answer(request: bytes, sock) -> bool:
        if request.startswith(b"GET "):
            sock.sendall(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
            return True
        if b'"stream"' not in request:
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return True
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + FIRST)
        if b"for ever" in request:
            if not sock.recv(1):
                left.set()
            return False
        go.wait(PATIENCE)
        sock.sendall(LAST + b"0\r\n\r\n")
        return True

    url = beside(inside(url_config(stub_engine(answer).port)).port)
    stream = Stream(url + CHAT, {"model": "small", "stream": True})
    assert stream.status == 200 and b'"one"' in stream.first() and not go.is_set(), "the engine has not sent the last event yet"
    go.set()
    assert stream.whole() == b"".join(EVENTS)
    stream.close()
    large = {"model": "small", "messages": [{"role": "user", "content": "x" * (3 << 20)}]}
    assert ask(url + CHAT, "POST", large).json() == {}
    stream = Stream(url + CHAT, {"model": "small", "stream": True, "user": "for ever"})
    assert b'"one"' in stream.first()
    stream.close()
    assert left.wait(PATIENCE), "the engine works on for a client that has left"


def test_no_example_needs_the_files_exec_bit():
    """A copy without --perms loses it, and a unit that executes the file crash-loops: it is always python3 that runs it."""
    found = []
    for path in EXAMPLES.iterdir():
        if path.suffix in (".service", ".sh", ".md") or path.name in ("crontab", "authorized_keys"):
            found += re.findall(r"(\S+ )?\S*/llmguard\.py (?:serve|watch|probe|agent|check|status|engine)", path.read_text())
    assert found and all(before.strip().endswith("python3") for before in found)

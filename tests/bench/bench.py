#!/usr/bin/env python3
"""The benchmark of the proxy's hot path: contenders side by side in one run, never a timed test.

`make bench`, or `python3 tests/bench/bench.py [--quick] [--only streams64,body] [--contenders nginx,llmguard]`.

One stub engine (engine.py) stands behind every contender:
    direct      no proxy at all: what engine and client cost by themselves, the floor below every figure
    nginx       from PATH; one worker, no response buffering, kept-alive connections to the engine
    naive       naive.py: ThreadingHTTPServer and http.client
    llmguard    ../../llmguard.py serve, and what its cron jobs cost
    litellm     from PATH or $LITELLM (PyPI: litellm[proxy])
    llama-swap  when $LLAMA_SWAP names a binary
Each scenario runs in rounds, each round asks every contender once, in an order that rotates. A figure is the median of
its rounds, a ratio the median of the rounds' ratios: what disturbs a round disturbs all contenders in it. Only the
ratios mean something elsewhere. The summary judges llmguard by the two columns that it has to meet: "must" and "aim".

Memory is that of a contender's largest process plus the anonymous memory of its others (nginx's two share the rest).
CPU is that of all its processes, between the first and the last token that is measured.
"""
import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LLMGUARD = HERE.parent.parent / "llmguard.py"
CHAT = b'{"model":"stub","messages":[{"role":"user","content":"hi"}]}'
START_TIMEOUT = {"litellm": 60}     # seconds; its imports alone take more than ten
RUN_TIMEOUT = 60                    # one scenario of one contender in one round


# ------------------------------------------------------------------------------------------------------------------
# Contenders
# ------------------------------------------------------------------------------------------------------------------

class Missing(Exception):
    """This contender can't take part; the text says why."""


class Contender:
    """A started server: its port, and the process to measure (None for direct)."""

    def __init__(self, name, port, process=None):
        self.name, self.port, self.process = name, port, process

    def pids(self):
        return tree(self.process.pid) if self.process else []


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Stage:
    """Starts the engine and the contenders in one temporary folder, and ends them all."""

    def __init__(self, folder, python):
        self.folder, self.python = Path(folder), python
        self.processes = []
        self.engine = self.own_server(sys.executable, HERE / "engine.py")

    def start(self, name):
        begin = getattr(self, "start_" + name.replace("-", "_"))
        contender = begin()
        if contender.process:
            self.wait_until_it_answers(contender)
        return contender

    def spawn(self, name, command, **more):
        with open(self.folder / (name + ".log"), "wb") as log:
            process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log,
                                       stdin=subprocess.DEVNULL, cwd=self.folder, **more)
        self.processes.append(process)
        return process

    def own_server(self, *command):
        """engine.py and naive.py: print their port, end when their stdin does."""
        process = subprocess.Popen([str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.processes.append(process)
        return Contender("", int(process.stdout.readline()), process)

    def wait_until_it_answers(self, contender):
        deadline = time.monotonic() + START_TIMEOUT.get(contender.name, 15)
        while not answers(contender.port):
            if contender.process.poll() is not None or time.monotonic() > deadline:
                raise Missing("does not serve: %s" % self.last_words(contender.name))
            time.sleep(0.1)

    def last_words(self, name):
        log = self.folder / (name + ".log")
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return lines[-1] if lines else "it says nothing"

    def close(self):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start_direct(self):
        return Contender("direct", self.engine.port)

    def start_nginx(self):
        nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
        if not nginx:
            raise Missing("not on PATH")
        port = free_port()
        config = self.folder / "nginx.conf"
        config.write_text(NGINX.format(user="user root;" if os.geteuid() == 0 else "", folder=self.folder, port=port,
                                       engine=self.engine.port))
        return Contender("nginx", port, self.spawn("nginx", [nginx, "-e", "stderr", "-p", self.folder, "-c", config]))

    def start_naive(self):
        naive = self.own_server(self.python, HERE / "naive.py", self.engine.port)
        return Contender("naive", naive.port, naive.process)

    def start_llmguard(self):
        if not LLMGUARD.exists():
            raise Missing("no %s" % LLMGUARD)
        port = free_port()
        config = self.folder / "llmguard.json"
        engine = {"url": "http://127.0.0.1:%d" % self.engine.port, "models": ["stub"]}
        config.write_text(json.dumps({"proxy": {"listen": "127.0.0.1:%d" % port},
                                      "hosts": {"here": {"engines": {"stub": engine}}}}))
        environment = dict(os.environ, LLMGUARD_STATE_DIR=str(self.folder / "state"))
        return Contender("llmguard", port, self.spawn("llmguard", [self.python, LLMGUARD, "serve", "-c", config],
                                                      env=environment))

    def start_litellm(self):
        litellm = shutil.which(os.environ.get("LITELLM", "litellm"))
        if not litellm:
            raise Missing("not on PATH, and $LITELLM names none (PyPI: litellm[proxy])")
        port = free_port()
        config = self.folder / "litellm.json"       # JSON is YAML
        parameters = {"model": "openai/stub", "api_key": "none",
                      "api_base": "http://127.0.0.1:%d/v1" % self.engine.port}
        config.write_text(json.dumps({
            "model_list": [{"model_name": "stub", "litellm_params": parameters}],
            "general_settings": {"dangerously_permit_weak_or_unset_master_key": True}}))    # loopback only
        environment = dict(os.environ, LITELLM_TELEMETRY="False", LITELLM_LOCAL_MODEL_COST_MAP="True")
        return Contender("litellm", port, self.spawn(
            "litellm", [litellm, "--config", config, "--host", "127.0.0.1", "--port", port], env=environment))

    def start_llama_swap(self):
        binary = os.environ.get("LLAMA_SWAP")
        if not binary:
            raise Missing("$LLAMA_SWAP names no binary")
        port = free_port()
        config = self.folder / "llama-swap.json"
        model = {"cmd": "sleep 100000", "proxy": "http://127.0.0.1:%d" % self.engine.port,
                 "concurrencyLimit": 10000}         # its default, 10, answers 429 to the rest
        config.write_text(json.dumps({"models": {"stub": model}}))
        return Contender("llama-swap", port, self.spawn(
            "llama-swap", [binary, "-config", config, "-listen", "127.0.0.1:%d" % port]))


NGINX = """
{user}
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr crit;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_max_body_size 0;
    client_body_temp_path {folder}/nginx-body;
    proxy_temp_path {folder}/nginx-proxy;
    fastcgi_temp_path {folder}/nginx-fastcgi;
    uwsgi_temp_path {folder}/nginx-uwsgi;
    scgi_temp_path {folder}/nginx-scgi;
    keepalive_requests 100000000;
    upstream engine {{ server 127.0.0.1:{engine}; keepalive 300; keepalive_requests 100000000; }}
    server {{
        listen 127.0.0.1:{port} backlog=1024;
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 600s;
        }}
    }}
}}
"""


def answers(port):
    import http.client
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("POST", "/v1/chat/completions", CHAT,
                           {"Content-Type": "application/json", "Authorization": "Bearer bench"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


# ------------------------------------------------------------------------------------------------------------------
# What the kernel tells about a contender's processes
# ------------------------------------------------------------------------------------------------------------------

def tree(pid):
    """The process and all its descendants."""
    pids = [pid]
    for parent in pids:
        with contextlib.suppress(OSError):
            for task in Path("/proc/%d/task" % parent).iterdir():
                pids += [int(child) for child in (task / "children").read_text().split()]
    return pids


def cpu_ns(pid):
    return time.clock_gettime_ns((~pid << 3) | 2)       # as in client.py


def status(path):
    """The numbers of a /proc/.../status file; sizes in it are in KiB."""
    fields = (line.split() for line in Path(path).read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) for line in fields if len(line) > 1 and line[1].isdigit()}


def memory(contender, field):
    """MiB; field is VmRSS (now) or VmHWM (the peak since forget_peak)."""
    found = [status("/proc/%d/status" % pid) for pid in contender.pids()]
    largest = max(found, key=lambda one: one[field])
    return (largest[field] + sum(one["RssAnon"] for one in found if one is not largest)) / 1024


def forget_peak(contender):
    for pid in contender.pids():
        Path("/proc/%d/clear_refs" % pid).write_text("5")


def switches(contender):
    """How often the contender's threads went to sleep, and so were woken."""
    tasks = [task for pid in contender.pids() for task in Path("/proc/%d/task" % pid).iterdir()]
    return sum(status(task / "status")["voluntary_ctxt_switches"] for task in tasks)


# ------------------------------------------------------------------------------------------------------------------
# Scenarios: each gives the figures of one contender in one round
# ------------------------------------------------------------------------------------------------------------------

class Scenarios:
    def __init__(self, engine_port, quick):
        self.engine_port, self.quick = engine_port, quick

    def client(self, contender, scenario, **options):
        command = [sys.executable, str(HERE / "client.py"), scenario, "--port", str(contender.port), "--engine",
                   str(self.engine_port), "--pids", ",".join(map(str, contender.pids()))]
        for name, value in options.items():
            command += ["--" + name, str(value)] if value is not True else ["--" + name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT)
        if done.returncode:
            raise Failed(done.stderr.strip().splitlines()[-1])
        return json.loads(done.stdout)

    def rps(self, contender):
        seen = self.client(contender, "rps", connections=16, seconds=0.7 if self.quick else 1.5)
        return {"rps": seen["rps"], "rps_cpu": seen["cpu"]}

    def series(self, contender):
        seen = self.client(contender, "series", seconds=0.5 if self.quick else 1)
        return {"series": seen["median"], "series_p99": seen["p99"]}

    def streams64(self, contender):
        seen = self.client(contender, "streams", connections=64, interval=33, tokens=30 if self.quick else 75,
                           timeout=25)
        return {"s64": seen["median"], "s64_p99": seen["p99"], "s64_cpu": seen["cpu"]}

    def streams256(self, contender):
        if contender.process:
            forget_peak(contender)
        seen = self.client(contender, "streams", connections=256, interval=50, tokens=40 if self.quick else 60,
                           timeout=25)
        figures = {"s256": seen["median"], "s256_p99": seen["p99"], "s256_cpu": seen["cpu"]}
        if contender.process:
            figures["s256_peak"] = memory(contender, "VmHWM")
        return figures

    def burst64(self, contender):
        seen = self.client(contender, "streams", connections=64, interval=33, tokens=30 if self.quick else 75,
                           timeout=25, burst=True)
        return {"b64": seen["median"], "b64_p99": seen["p99"], "b64_cpu": seen["cpu"]}

    def ttfb(self, contender):
        seen = self.client(contender, "ttfb", connections=64, repeat=4 if self.quick else 8)
        return {"ttfb": seen["median"] / 1e3, "ttfb_p99": seen["p99"] / 1e3}

    def body(self, contender):
        before = memory(contender, "VmRSS") if contender.process else 0
        if contender.process:
            forget_peak(contender)
        seen = self.client(contender, "body", bytes=32 << 20, repeat=2 if self.quick else 4, timeout=30)
        figures = {"body": seen["median"] / 1e3}
        if contender.process:
            figures["body_peak"] = memory(contender, "VmHWM")
            time.sleep(0.3)
            figures["body_kept"] = memory(contender, "VmRSS") - before
        return figures

    def cancel(self, contender):
        seen = self.client(contender, "cancel", repeat=10 if self.quick else 20, timeout=2)
        return {"cancel": seen["median"] / 1e3, "cancel_p99": seen["p99"] / 1e3}

    def cancel_silent(self, contender):
        seen = self.client(contender, "cancel", repeat=10 if self.quick else 20, silence=5000, timeout=2)
        return {"silent": seen["median"] / 1e3, "silent_p99": seen["p99"] / 1e3}


class Failed(Exception):
    """The client got wrong answers, or none."""


def cron(python, contender, quick):
    """What a box pays every minute: the CPU of an agent call as the proxy makes it for four engines, of a watch that looks
    once, and of each pass of one that looks six times, as examples/crontab has it; in times of an interpreter that does
    nothing, one round each. And that of an agent that follows those engines, in percent of a core."""
    sys.path[:0] = [str(LLMGUARD.parent)]
    from llmguard import start_words
    llmguard = [python, "-S", "-E", "-c", start_words(str(LLMGUARD))]
    engines = {"e%d" % n: {"command": ["llama-server", "-m", "%d.gguf" % n], "port": 1 + n} for n in range(4)}
    ask = json.dumps({"op": "status", "engines": engines}).encode() + b"\n"
    watch = [python, "-m", "llmguard", "watch", "--url", "http://127.0.0.1:%d" % contender.port]
    commands = {"agent": (llmguard + ["agent"], ask), "once": (watch, b""),
                "watch": (watch + ["--for", "500ms", "--every", "100ms"], b"")}
    passes = {"watch": 6}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        environment = dict(os.environ, LLMGUARD_STATE_DIR=folder)
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        commands = {key: run for key, run in commands.items() if offered(run[0], environment)}
        for _ in range(3 if quick else 10):
            nothing = cpu_of([python, "-c", "pass"], b"", environment)
            yield {"cron_" + key: cpu_of(*run, environment) / nothing / passes.get(key, 1) for key, run in commands.items()}
        yield {"cron_follow": following(llmguard, ask, environment, 2 if quick else 5)}


def offered(command, environment):
    return subprocess.run(command + ["--help"], env=environment, cwd=LLMGUARD.parent, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL).returncode == 0


def cpu_of(command, data, environment):
    """Milliseconds of user and system time, its children included."""
    process = subprocess.Popen(command, env=environment, cwd=LLMGUARD.parent, stdin=subprocess.PIPE,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with process.stdin:
        process.stdin.write(data)
    _, process.returncode, usage = os.wait4(process.pid, 0)
    return (usage.ru_utime + usage.ru_stime) * 1e3


def following(llmguard, ask, environment, seconds):
    process = subprocess.Popen(llmguard + ["agent", "--follow"], env=environment, stdin=subprocess.PIPE,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(ask)
            process.stdin.flush()
        time.sleep(1.5)
        before = cpu_ns(process.pid)
        time.sleep(seconds)
        if process.poll() is not None:
            return None
        return (cpu_ns(process.pid) - before) / 1e9 / seconds * 100
    finally:
        process.kill()
        process.wait()
        process.stdin.close()


def settle(contender):
    """What it still works off, or cleans up, is not the next one's business."""
    for _ in range(40):
        before = sum(map(cpu_ns, contender.pids()))
        time.sleep(0.05)
        if sum(map(cpu_ns, contender.pids())) - before < 2e6:
            return


def idle(contenders, seconds):
    """Before anything else and for all at once: memory and wakeups of servers that have seen one request."""
    served = [contender for contender in contenders if contender.process]
    time.sleep(1)
    before = {contender.name: switches(contender) for contender in served}
    time.sleep(seconds)
    return {contender.name: {"idle_rss": memory(contender, "VmRSS"),
                             "idle_wakeups": (switches(contender) - before[contender.name]) / seconds}
            for contender in served}


# ------------------------------------------------------------------------------------------------------------------
# Figures, and what llmguard's have to be
# ------------------------------------------------------------------------------------------------------------------

class Figure:
    """One measured quantity. must and aim are (other contender, factor), or (None, absolute limit)."""

    def __init__(self, key, title, unit, must=None, aim=None, more_is_better=False, compared=True):
        self.key, self.title, self.unit, self.must, self.aim = key, title, unit, must, aim
        self.more_is_better, self.compared = more_is_better, compared


NAIVE, NGINX_ = "naive", "nginx"
SCENARIOS = {
    "idle": ("idle, after one request", [
        Figure("idle_rss", "memory", "MiB", must=(None, 30)),
        Figure("idle_wakeups", "wakeups", "/s", must=(None, 1))]),
    "rps": ("small requests on 16 kept-alive connections", [
        Figure("rps", "requests", "/s", must=(NAIVE, 2.5), aim=(NGINX_, 0.5), more_is_better=True),
        Figure("rps_cpu", "CPU a request", "µs")]),
    "series": ("one connection, one request after the other", [
        Figure("series", "median", "µs", must=(NAIVE, 1), aim=(NGINX_, 1.4)),
        Figure("series_p99", "p99", "µs")]),
    "streams64": ("64 streams of 30 tokens/s: a token's delay", [
        Figure("s64", "median", "µs", must=(NGINX_, 2), aim=(NGINX_, 1.4)),
        Figure("s64_p99", "p99", "µs", must=(NGINX_, 3), aim=(NGINX_, 1.5)),
        Figure("s64_cpu", "CPU a chunk", "µs", must=(NAIVE, 1), aim=(NGINX_, 1.5))]),
    "streams256": ("256 streams of 20 tokens/s: a token's delay", [
        Figure("s256", "median", "µs", must=(NGINX_, 2), aim=(NGINX_, 1.4)),
        Figure("s256_p99", "p99", "µs", must=(NGINX_, 3), aim=(NGINX_, 1.5)),
        Figure("s256_cpu", "CPU a chunk", "µs", must=(NAIVE, 1), aim=(NGINX_, 1.5)),
        Figure("s256_peak", "peak memory", "MiB", must=(NGINX_, 5), aim=(NGINX_, 2))]),
    "burst64": ("64 streams in step, as one batching llama-server sends them: a token's delay", [
        Figure("b64", "median", "µs"),
        Figure("b64_p99", "p99", "µs"),
        Figure("b64_cpu", "CPU a chunk", "µs")]),
    "ttfb": ("64 new connections at once: time to the first byte", [
        Figure("ttfb", "median", "ms", must=(NAIVE, 0.4), aim=(NGINX_, 3)),
        Figure("ttfb_p99", "p99", "ms")]),
    "body": ("32 MiB body, the model's name last in it", [
        Figure("body", "answered", "ms", must=(NGINX_, 3.5), aim=(NGINX_, 1.5)),
        Figure("body_peak", "peak memory", "MiB"),
        Figure("body_kept", "kept after", "MiB", must=(None, 8), compared=False)]),
    "cancel": ("cancel of a running stream, until the engine sees it", [
        Figure("cancel", "median", "ms", must=(None, 3), aim=(NGINX_, 3)),
        Figure("cancel_p99", "p99", "ms")]),
    "cancel_silent": ("cancel with a silent engine, until the engine sees it", [
        Figure("silent", "median", "ms", must=(None, 3), aim=(NGINX_, 3)),
        Figure("silent_p99", "p99", "ms")]),
    "cron": ("CPU of one run, in times of `python -c pass`; of an agent that follows, in % of a core", [
        Figure("cron_agent", "agent status", "×", must=(None, 3), compared=False),
        Figure("cron_watch", "watch pass, of six", "×", must=(None, 3), compared=False),
        Figure("cron_once", "watch, once", "×", compared=False),
        Figure("cron_follow", "follow", "%", must=(None, 0.2), compared=False)]),
}


class Results:
    """rounds[contender][figure] = one value a round (None where it failed)."""

    def __init__(self):
        self.rounds, self.errors = {}, {}

    def add(self, name, round_number, figures):
        mine = self.rounds.setdefault(name, {})
        for key, value in figures.items():
            values = mine.setdefault(key, [])
            values += [None] * (round_number - len(values)) + [value]

    def values(self, name, key):
        return [value for value in self.rounds.get(name, {}).get(key, []) if value is not None]

    def median(self, name, key):
        values = self.values(name, key)
        return statistics.median(values) if values else None

    def ratio(self, name, other, key):
        """The median of the rounds' ratios."""
        pairs = zip(self.rounds.get(name, {}).get(key, []), self.rounds.get(other, {}).get(key, []))
        ratios = [ratio(mine, theirs) for mine, theirs in pairs if mine is not None and theirs]
        return statistics.median(ratios) if ratios else None


def ratio(mine, theirs):
    """Infinite is what never came."""
    if theirs == float("inf"):
        return 1 if mine == theirs else 0
    return mine / theirs


def number(value, unit=""):
    if value is None:
        return "-"
    if value == float("inf"):
        return "never"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 or not value else 3
    return "%.*f%s" % (digits, value, unit)


def table(scenario, names, results):
    title, figures = SCENARIOS[scenario]
    print("\n%s: %s" % (scenario, title))
    print("  %-11s" % "" + "".join("%31s" % ("%s (%s)" % (figure.title, figure.unit)) for figure in figures))
    print("  %-11s" % "" + "       median  ×nginx  ×naive  " * len(figures))
    for name in (name for name in names if any(results.values(name, figure.key) for figure in figures)):
        cells = ""
        for figure in figures:
            ratios = [results.ratio(name, other, figure.key) if figure.compared else None for other in (NGINX_, NAIVE)]
            cells += "%13s%8s%8s  " % (number(results.median(name, figure.key)), *map(number, ratios))
        print(("  %-11s%s" % (name, cells)).rstrip())
    for name in names:
        for error in results.errors.get((name, scenario), []):
            print("  %s failed: %s" % (name, error))


def judge(results, figure, limit):
    """("0.7× nginx (≤ 1.4)", met or None when it can't be told)."""
    if limit is None:
        return "", None
    other, bound = limit
    sign = "≥" if figure.more_is_better else "≤"
    if other is None:
        value = results.median("llmguard", figure.key)
        text = "%s %s (%s %s)" % (number(value), figure.unit, sign, number(bound))
    else:
        value = results.ratio("llmguard", other, figure.key)
        text = "%s× %s (%s %s)" % (number(value), other, sign, number(bound))
    if value is None:
        return text, None
    return text, value >= bound if figure.more_is_better else value <= bound


def summary(scenarios, results):
    words = {True: "ok", False: "MISSED", None: "not measured"}
    print("\nllmguard against what it must be, and aims to be")
    verdicts = []
    for scenario in scenarios:
        for figure in SCENARIOS[scenario][1]:
            if figure.must or figure.aim:
                must, must_met = judge(results, figure, figure.must)
                if results.errors.get(("llmguard", scenario)):
                    must, must_met = must + ", and it failed", False
                aim, aim_met = judge(results, figure, figure.aim)
                verdicts.append(words[must_met])
                print(("  %-26s must %-32s %-13s %s" % (
                    scenario + " " + figure.title, must, words[must_met],
                    "aim %-28s %s" % (aim, words[aim_met]) if figure.aim else "")).rstrip())
    print("  must: " + ", ".join("%d %s" % (verdicts.count(word), word) for word in words.values()))
    for rival, demands in RIVALS.items():
        against(rival, demands, scenarios, results)


# For each rival: the worst factor allowed in every row, and the rows with a factor of their own
RIVALS = {
    "litellm": (1, {"rps": 50}),
    "llama-swap": (2, {"s64_p99": 1, "s256_p99": 1, "cancel": 1, "silent": 1}),
}
ROWS = {"rps", "series", "s64", "s64_p99", "s64_cpu", "s256", "s256_p99", "s256_cpu", "s256_peak", "ttfb", "body",
        "cancel", "silent"}


def against(rival, demands, scenarios, results):
    everywhere, special = demands
    for scenario in scenarios:
        for figure in SCENARIOS[scenario][1]:
            ratio = results.ratio("llmguard", rival, figure.key) if figure.key in ROWS else None
            if ratio is None:
                continue
            if figure.more_is_better:
                good = ratio >= special.get(figure.key, 1 / everywhere)
            else:
                good = ratio <= special.get(figure.key, everywhere)
            print("  %-26s %s× %s %s" % (scenario + " " + figure.title, number(ratio), rival,
                                         "ok" if good else "MISSED"))


# ------------------------------------------------------------------------------------------------------------------
# The run
# ------------------------------------------------------------------------------------------------------------------

CONTENDERS = ["direct", "nginx", "naive", "llmguard", "litellm", "llama-swap"]


def names(text):
    return [name for name in text.split(",") if name]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="default 3, quick 1")
    parser.add_argument("--only", type=names, default=list(SCENARIOS), metavar="SCENARIO,…",
                        help="of: " + " ".join(SCENARIOS))
    parser.add_argument("--contenders", type=names, metavar="NAME,…", default=CONTENDERS)
    parser.add_argument("--quick", action="store_true", help="one short round: does it all work?")
    parser.add_argument("--python", default=sys.executable, metavar="EXE", help="runs llmguard and naive")
    parser.add_argument("--json", metavar="FILE", help="every round's figures, for a closer look")
    options = parser.parse_args()
    for given, known in ((options.only, SCENARIOS), (options.contenders, CONTENDERS)):
        for name in set(given) - set(known):
            parser.error("%s is none of: %s" % (name, " ".join(known)))
    options.only = [name for name in SCENARIOS if name in options.only]     # idle comes before all work
    return options


def measure(scenario, contenders, options, scenarios, results):
    if scenario == "idle":
        for name, figures in idle(contenders, 2 if options.quick else 5).items():
            results.add(name, 0, figures)
    elif scenario == "cron":
        for contender in contenders:
            if contender.name == "llmguard":
                for round_number, figures in enumerate(cron(options.python, contender, options.quick)):
                    results.add(contender.name, round_number, figures)
    else:
        for round_number in range(options.rounds or (1 if options.quick else 3)):
            turn = round_number % len(contenders)
            for contender in contenders[turn:] + contenders[:turn]:
                measure_one(getattr(scenarios, scenario), contender, round_number, results)


def measure_one(scenario, contender, round_number, results):
    try:
        results.add(contender.name, round_number, scenario(contender))
    except (Failed, OSError, subprocess.TimeoutExpired) as error:
        results.errors.setdefault((contender.name, scenario.__name__), []).append(str(error))
    settle(contender)


def cpu_seconds():
    """(what this machine's CPUs have worked, what of it was for this process and its ended children)."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    ours = os.times()
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK"), sum(ours[:4])


def run(options, folder):
    begin, (all_before, ours_before) = time.monotonic(), cpu_seconds()
    results = Results()
    stage = Stage(folder, options.python)
    try:
        contenders = start_all(stage, options.contenders)
        taking_part = [contender.name for contender in contenders]
        scenarios = Scenarios(stage.engine.port, options.quick)
        for scenario in options.only:
            measure(scenario, contenders, options, scenarios, results)
            table(scenario, taking_part, results)
            sys.stdout.flush()
    finally:
        stage.close()
    if "llmguard" in taking_part:
        summary(options.only, results)
    seconds, (all_after, ours_after) = time.monotonic() - begin, cpu_seconds()
    others = (all_after - all_before - (ours_after - ours_before)) / seconds / os.cpu_count()
    print("\n%.0f s, Python %s, %d CPUs; somebody else used %.0f %% of them meanwhile%s" % (
        seconds, version_of(options.python), os.cpu_count(), 100 * max(0, others),
        ": not quiet, p99 figures mean little" if others > 0.05 else ""))
    if options.json:
        Path(options.json).write_text(json.dumps(results.rounds, indent=1))


def start_all(stage, wanted):
    contenders = []
    for name in wanted:
        try:
            contenders.append(stage.start(name))
        except Missing as reason:
            print("%s does not take part: %s" % (name, reason))
    return contenders


def version_of(python):
    return subprocess.run([python, "-c", "import sys; print(sys.version.split()[0])"], stdout=subprocess.PIPE,
                          text=True).stdout.strip()


if __name__ == "__main__":
    chosen = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # so that what was started is ended
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        run(chosen, temporary)

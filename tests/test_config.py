"""Section 4: the configuration file, and every mistake in it with its key path."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path

import pytest
from parts import ROOT
from hypothesis import HealthCheck, given, settings, strategies as st

import llmguard
from llmguard import NEVER, Address, Config, ConfigError, ProxyConfig, config_path, host_port, is_loopback, load_config, parse_config

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="TOML needs Python 3.11")

EVERY_KEY_TOML = """
[proxy]
listen = "127.0.0.1:8080"
api_keys = ["k1"]
admin_keys = ["boss"]
idle_stop = "15m"
tick = "30s"
handover = "30s"
queue_timeout = "10m"
stream_keepalive = "15s"
max_body = "256MiB"
max_connections = 512
drain_timeout = "10m"
refusal_status = { codex = 400 }

[hosts.a9]
ssh = "me@a9"
address = "10.0.0.9"
job_queue = "~/jobs"
bench_port = 8099
gpus = [0]
ignore = ["Xorg", "gnome-shell"]
owner_min = "512MiB"
unexplained = "owner"
python = "python3"
sudo = true
mac = "AA-bb:cc:dd:ee:ff"

[hosts.a9.engines.mainline]
unit = "llm-engine-mainline"
scope = "system"
port = 8081
start_timeout = "10m"
vram = "22GiB"
api_key = "engine-key"
on_cpu = "warn"
models = ["a9-ornith15-35b-q8", { fast = "upstream/fast" }]

[hosts.here.engines.small]
command = ["llama-server", "-m", "/models/small.gguf", "--port", "{port}"]
port = 8082
models = { small = "small.gguf" }

[hosts.here.engines.ollama]
url = "http://127.0.0.1:11434/base/"
models = "auto"
"""

EVERY_KEY = {
    "proxy": {
        "listen": "127.0.0.1:8080", "api_keys": ["k1"], "admin_keys": ["boss"], "idle_stop": "15m", "tick": "30s", "handover": "30s",
        "queue_timeout": "10m", "stream_keepalive": "15s", "max_body": "256MiB", "max_connections": 512, "drain_timeout": "10m",
        "refusal_status": {"codex": 400},
    },
    "hosts": {
        "a9": {
            "ssh": "me@a9", "address": "10.0.0.9", "job_queue": "~/jobs", "bench_port": 8099, "gpus": [0], "ignore": ["Xorg", "gnome-shell"],
            "owner_min": "512MiB", "unexplained": "owner", "python": "python3", "sudo": True, "mac": "AA-bb:cc:dd:ee:ff",
            "engines": {
                "mainline": {
                    "unit": "llm-engine-mainline", "scope": "system", "port": 8081, "start_timeout": "10m", "vram": "22GiB",
                    "api_key": "engine-key", "on_cpu": "warn", "models": ["a9-ornith15-35b-q8", {"fast": "upstream/fast"}],
                },
            },
        },
        "here": {
            "engines": {
                "small": {
                    "command": ["llama-server", "-m", "/models/small.gguf", "--port", "{port}"], "port": 8082,
                    "models": {"small": "small.gguf"},
                },
                "ollama": {"url": "http://127.0.0.1:11434/base/", "models": "auto"},
            },
        },
    },
}

MINIMAL = {"hosts": {"here": {"engines": {"e": {"command": ["x", "{port}"], "port": 8081, "models": ["m"]}}}}}


def changed(path: str, value, base=None) -> dict:
    """MINIMAL with one more key, by its path; the value `...` takes it away."""
    data = copy.deepcopy(MINIMAL if base is None else base)
    *folders, last = path.split(".")
    table = data
    for folder in folders:
        table = table.setdefault(folder, {})
    if value is ...:
        del table[last]
    else:
        table[last] = value
    return data


def problems(data) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    assert caught.value.exit_code == 78
    return str(caught.value).split("\n")


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# ----- what is read


@needs_toml
def test_toml_and_json_give_the_same_configuration(tmp_path):
    toml = load_config(write(tmp_path / "a.toml", EVERY_KEY_TOML))
    as_json = load_config(write(tmp_path / "a.json", json.dumps(EVERY_KEY)))
    assert toml.proxy == as_json.proxy and toml.hosts == as_json.hosts and toml.warnings == as_json.warnings


def test_every_key_arrives_as_a_value_of_its_kind():
    config = parse_config(EVERY_KEY)
    proxy, a9, here = config.proxy, config.hosts["a9"], config.hosts["here"]
    assert proxy.listen == ("127.0.0.1", 8080) and proxy.api_keys == ("k1",) and proxy.admin_keys == ("boss",)
    assert (proxy.idle_stop, proxy.tick, proxy.handover, proxy.queue_timeout) == (900, 30, 30, 600)
    assert (proxy.stream_keepalive, proxy.max_body, proxy.max_connections, proxy.drain_timeout) == (15, 256 << 20, 512, 600)
    assert proxy.refusal_status == {"codex": 400}
    assert (a9.name, a9.ssh, a9.address, a9.bench_port, a9.gpus) == ("a9", "me@a9", "10.0.0.9", 8099, (0,))
    assert a9.job_queue == {"path": "~/jobs", "settle": 120}
    assert (a9.ignore, a9.owner_min, a9.unexplained, a9.python) == (("Xorg", "gnome-shell"), 512 << 20, "owner", "python3")
    assert a9.sudo is True and a9.mac == "aa:bb:cc:dd:ee:ff" and a9.tunnel is False
    mainline = a9.engines["mainline"]
    assert (mainline.unit, mainline.scope, mainline.port, mainline.start_timeout) == ("llm-engine-mainline.service", "system", 8081, 600)
    assert (mainline.vram, mainline.api_key, mainline.on_cpu, mainline.managed) == (22 << 30, "engine-key", "warn", True)
    assert mainline.models == {"a9-ornith15-35b-q8": "a9-ornith15-35b-q8", "fast": "upstream/fast"}
    small, ollama = here.engines["small"], here.engines["ollama"]
    assert here.ssh is None and here.address == "127.0.0.1"
    assert small.command == ("llama-server", "-m", "/models/small.gguf", "--port", "{port}") and small.unit is None
    assert small.models == {"small": "small.gguf"}
    assert ollama.url == Address("127.0.0.1", 11434, "/base") and ollama.models == "auto" and not ollama.managed


def test_what_is_not_given_has_the_documented_default():
    assert parse_config(MINIMAL).proxy == ProxyConfig()
    proxy = ProxyConfig()
    assert proxy.listen == ("127.0.0.1", 8080) and proxy.api_keys == () and proxy.refusal_status == {"codex": 400}
    assert (proxy.idle_stop, proxy.tick, proxy.handover, proxy.queue_timeout) == (900, 30, 30, 600)
    assert (proxy.stream_keepalive, proxy.max_body, proxy.max_connections, proxy.drain_timeout) == (15, 256 << 20, 512, 600)
    host = parse_config(MINIMAL).hosts["here"]
    assert (host.owner_min, host.unexplained, host.python, host.gpus, host.bench_port) == (512 << 20, "owner", "python3", None, None)
    assert host.engines["e"].start_timeout == 600 and host.engines["e"].on_cpu == "restart"


def test_an_engine_without_a_kind_is_the_unit_of_its_name():
    engine = {"port": 8081, "models": ["m"]}
    config = parse_config({"hosts": {"h": {"engines": {"big": engine}}}})
    assert config.hosts["h"].engines["big"].unit == "llm-engine-big.service"
    assert config.hosts["h"].engines["big"].scope == "user"


def test_a_job_queue_is_a_folder_or_a_table():
    table = {"path": "/q", "running": "run", "waiting": "wait", "log": "r.log", "settle": "5s", "pattern": "(?P<event>x) (?P<job>y)"}
    read = parse_config(changed("hosts.here.job_queue", table)).hosts["here"].job_queue
    assert {key: read[key] for key in table} == {**table, "settle": 5}


def test_durations_may_be_never_or_seconds():
    config = parse_config({**MINIMAL, "proxy": {"idle_stop": "never", "tick": 20}})
    assert config.proxy.idle_stop == NEVER and config.proxy.tick == 20


# ----- what is wrong

E = "hosts.here.engines.e"


@pytest.mark.parametrize(
    ("path", "value", "where", "says"),
    [
        # the file
        ("extra", 1, "extra", "unknown key"),
        ("host", {}, "host", "unknown key, did you mean hosts?"),
        ("proxy", 5, "proxy", "a table is due"),
        ("proxy", None, "proxy", "a table is due"),
        ("hosts", [], "hosts", "a table is due"),
        ("hosts", {}, "hosts", "missing: at least one host"),
        # proxy
        ("proxy.idle_stopp", "1m", "proxy.idle_stopp", "unknown key, did you mean idle_stop?"),
        ("proxy.zzzzzz", 1, "proxy.zzzzzz", "unknown key"),
        ("proxy.listen", "8080", "proxy.listen", "looks like 127.0.0.1:8080"),
        ("proxy.listen", "::1:8080", "proxy.listen", "looks like 127.0.0.1:8080"),
        ("proxy.listen", "127.0.0.1:65536", "proxy.listen", "looks like 127.0.0.1:8080"),
        ("proxy.listen", "[zz]:80", "proxy.listen", "looks like 127.0.0.1:8080"),
        ("proxy.listen", "a b:80", "proxy.listen", "looks like 127.0.0.1:8080"),
        ("proxy.listen", 8080, "proxy.listen", "looks like 127.0.0.1:8080"),
        ("proxy.api_keys", "k", "proxy.api_keys", "a list of keys is due"),
        ("proxy.api_keys", [""], "proxy.api_keys", "an empty key would let everybody in"),
        ("proxy.api_keys", ["a b"], "proxy.api_keys", "printable ASCII without blanks"),
        ("proxy.api_keys", ["ключ"], "proxy.api_keys", "printable ASCII without blanks"),
        ("proxy.admin_keys", [1], "proxy.admin_keys", "printable ASCII without blanks"),
        ("proxy.api_keys_file", "/no/such/file", "proxy.api_keys_file", "cannot be read"),
        ("proxy.api_keys_file", "/", "proxy.api_keys_file", "cannot be read"),
        ("proxy.api_keys_file", "/dev/null", "proxy.api_keys_file", "no key in it"),
        ("proxy.idle_stop", "15", "proxy.idle_stop", "a duration looks like"),
        ("proxy.idle_stop", True, "proxy.idle_stop", "a duration looks like"),
        ("proxy.idle_stop", 10 ** 400, "proxy.idle_stop", "a duration looks like"),
        ("proxy.idle_stop", "99999999999d", "proxy.idle_stop", "write never"),
        ("proxy.tick", 0, "proxy.tick", "at least"),
        ("proxy.stream_keepalive", "0s", "proxy.stream_keepalive", "at least"),
        ("proxy.max_body", "256 mb", "proxy.max_body", "a size looks like"),
        ("proxy.max_connections", 0, "proxy.max_connections", "a number from 1 is due"),
        ("proxy.max_connections", True, "proxy.max_connections", "a number from 1 is due"),
        ("proxy.max_connections", 1.5, "proxy.max_connections", "a number from 1 is due"),
        ("proxy.refusal_status", {"codex": 200}, "proxy.refusal_status", "status from 400 to 599"),
        ("proxy.refusal_status", {"codex": "400"}, "proxy.refusal_status", "status from 400 to 599"),
        ("proxy.refusal_status", 400, "proxy.refusal_status", "status from 400 to 599"),
        # host
        ("hosts.here", "x", "hosts.here", "a table is due"),
        ("hosts.bad name", copy.deepcopy(MINIMAL["hosts"]["here"]), "hosts.bad name", "a name has letters"),
        ("hosts.here.name", "x", "hosts.here.name", "unknown key"),
        ("hosts.here.bench-port", 1, "hosts.here.bench-port", "unknown key, did you mean bench_port?"),
        ("hosts.here.engine", {}, "hosts.here.engine", "unknown key, did you mean engines?"),
        ("hosts.here.ssh", "", "hosts.here.ssh", "a text is due"),
        ("hosts.here.ssh", "a\nb", "hosts.here.ssh", "a text is due"),
        ("hosts.here.ssh", "me@a9", "hosts.here.address", "missing: where the engines of me@a9 answer"),
        ("hosts.here.address", "fd00::9:8081", "hosts.here.address", "is ambiguous: write [fd00::9:8081]"),
        ("hosts.here.address", "a9:8081", "hosts.here.address", "the port goes to the engine"),
        ("hosts.here.address", "[fd00::9]:8081", "hosts.here.address", "the port goes to the engine"),
        ("hosts.here.address", "a9/x", "hosts.here.address", "a host name or an IP address is due"),
        ("hosts.here.address", "", "hosts.here.address", "a text is due"),
        ("hosts.here.tunnel", 1, "hosts.here.tunnel", "true or false is due"),
        ("hosts.here.sudo", "yes", "hosts.here.sudo", "true or false is due"),
        ("hosts.here.job_queue", 5, "hosts.here.job_queue", "a folder is due"),
        ("hosts.here.job_queue", {"running": "x"}, "hosts.here.job_queue", "a folder is due"),
        ("hosts.here.job_queue", {"path": "x", "wait": "y"}, "hosts.here.job_queue", "a table with path, running"),
        ("hosts.here.job_queue", {"path": "x", "settle": "soon"}, "hosts.here.job_queue", "a duration looks like"),
        ("hosts.here.job_queue", {"path": "x", "log": 5}, "hosts.here.job_queue", "a text is due"),
        ("hosts.here.bench_port", 0, "hosts.here.bench_port", "a port from 1 to 65535"),
        ("hosts.here.bench_port", 8081, E + ".port", "is the bench_port of this host"),
        ("hosts.here.gpus", 0, "hosts.here.gpus", "a list of GPU numbers"),
        ("hosts.here.gpus", [True], "hosts.here.gpus", "a list of GPU numbers"),
        ("hosts.here.gpus", [-1], "hosts.here.gpus", "a list of GPU numbers"),
        ("hosts.here.ignore", "Xorg", "hosts.here.ignore", "a list of texts is due"),
        ("hosts.here.owner_min", "big", "hosts.here.owner_min", "a size looks like"),
        ("hosts.here.unexplained", "maybe", "hosts.here.unexplained", "one of owner, ignore is due"),
        ("hosts.here.mac", "aa:bb", "hosts.here.mac", "a MAC address looks like"),
        ("hosts.here.engines", ..., "hosts.here.engines", "missing: a host needs at least one engine"),
        ("hosts.here.engines", [], "hosts.here.engines", "a table is due"),
        # engine
        ("hosts.here.engines.-x", {"port": 1, "models": []}, "hosts.here.engines.-x", "a name has letters"),
        (E, 5, E, "a table is due"),
        (E + ".modles", [], E + ".modles", "unknown key, did you mean models?"),
        (E + ".unit", "x", E, "only one of unit, command and url is possible, not unit and command"),
        (E + ".url", "http://x", E, "only one of unit, command and url is possible, not command and url"),
        (E + ".unit", "a b", E + ".unit", "a systemd unit's name is due"),
        (E + ".unit", "-x", E + ".unit", "a systemd unit's name is due"),
        (E + ".scope", "root", E + ".scope", "one of user, system is due"),
        (E + ".command", "llama-server --port 1", E + ".command", "a list of words is due"),
        (E + ".command", [], E + ".command", "the command is empty"),
        (E + ".command", ["x", 1], E + ".command", "a list of words is due"),
        (E + ".command", ["x\0"], E + ".command", "a list of words is due"),
        (E + ".command", 5, E + ".command", "a list of words is due"),
        (E + ".command", ["", "x"], E + ".command", "the command is empty"),
        (E + ".command", ["sh", "-c", "one\ntwo\t", ""], None, None),
        (E + ".url", "https://x", E + ".url", "an address looks like"),
        (E + ".url", "http://", E + ".url", "an address looks like"),
        (E + ".url", "http://u:p@x", E + ".url", "an address looks like"),
        (E + ".url", "http://x:99999", E + ".url", "out of range"),
        (E + ".url", "http://[::1", E + ".url", "an address looks like"),
        (E + ".url", "http://a b/", E + ".url", "an address looks like"),
        (E + ".url", 5, E + ".url", "a text is due"),
        (E + ".url", ["http://x"], E + ".url", "a text is due"),
        (E + ".port", ..., E + ".port", "missing: the port that the engine listens on"),
        (E + ".port", "8081", E + ".port", "a port from 1 to 65535"),
        (E + ".port", 65536, E + ".port", "a port from 1 to 65535"),
        (E + ".start_timeout", "-1s", E + ".start_timeout", "a duration looks like"),
        (E + ".vram", "22", None, None),
        (E + ".vram", -1, E + ".vram", "a size looks like"),
        (E + ".api_key", "a b", E + ".api_key", "printable ASCII"),
        (E + ".on_cpu", "panic", E + ".on_cpu", "one of restart, warn is due"),
        (E + ".models", ..., E + ".models", "missing: the names that clients ask for"),
        (E + ".models", "m", E + ".models", 'or "auto" is due'),
        (E + ".models", 5, E + ".models", 'or "auto" is due'),
        (E + ".models", [5], E + ".models", "a text is due"),
        (E + ".models", [""], E + ".models", "a text is due"),
        (E + ".models", {"m": ""}, E + ".models", "a text is due"),
        (E + ".models", ["m", "m"], E + ".models", "m is named twice"),
        (E + ".models", ["m", {"m": "x"}], E + ".models", "m is named twice"),
    ],
)
def test_a_mistake_is_reported_with_its_key_path(path, value, where, says):
    data = changed(path, value)
    if where is None:
        parse_config(data)
        return
    found = [line for line in problems(data) if line.startswith(where + ": ")]
    assert found and any(says in line for line in found), problems(data)


def test_several_mistakes_are_reported_at_once_each_on_its_own_line():
    data = {
        "proxy": {"listen": "nowhere", "tick": "soon", "idle_stopp": 1},
        "hosts": {"a9": {"ssh": "me@a9", "mac": "x", "engines": {"e": {"command": "x"}}}},
    }
    assert {line.split(": ")[0] for line in problems(data)} == {
        "proxy.listen", "proxy.tick", "proxy.idle_stopp", "hosts.a9.mac", "hosts.a9.address", "hosts.a9.engines.e.command",
        "hosts.a9.engines.e.port", "hosts.a9.engines.e.models",
    }


def test_a_mistaken_file_is_named_in_each_line(tmp_path):
    path = write(tmp_path / "a.json", json.dumps({"proxy": {"tick": 0, "tock": 1}}))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = str(caught.value).split("\n")
    assert len(lines) == 3 and all(line.startswith(path + ": ") for line in lines)


@pytest.mark.parametrize("key", ["a\nb", "a\x1b[31m", "a\ud800"])
def test_a_key_with_control_characters_stays_one_printable_line(key):
    (line,) = problems({**MINIMAL, key: 1})
    assert line.encode("utf-8").decode().isprintable()


@pytest.mark.parametrize("key", [f.name for f in llmguard.dataclass_fields(ProxyConfig)])
def test_a_proxy_key_with_one_letter_missing_names_the_right_one(key):
    (line,) = problems({**MINIMAL, "proxy": {key[:-1]: 1}})
    assert line == f"proxy.{key[:-1]}: unknown key, did you mean {key}?"


def test_a_model_is_on_one_engine_only():
    data = changed("hosts.other", {"engines": {"f": {"url": "http://x", "models": {"m": "up"}}}})
    assert problems(data) == ["hosts.other.engines.f.models: m is a model of hosts.here.engines.e.models already"]


def test_a_port_is_taken_once_a_host():
    data = changed("hosts.here.engines.f", {"command": ["y"], "port": 8081, "models": ["n"]})
    assert problems(data) == ["hosts.here.engines.f.port: taken by engine e"]


def test_a_port_is_taken_once_a_box_also_when_the_box_has_two_hosts():
    """Two GPUs of one box are two hosts, but they share its ports."""
    other = {"engines": {"f": {"command": ["y"], "port": 8081, "models": ["n"]}}}
    assert problems(changed("hosts.gpu1", other)) == ["hosts.gpu1.engines.f.port: taken by engine e of host here, on the same box"]
    far = {"ssh": "me@a9", "address": "a9", **other}
    parse_config(changed("hosts.a9", far))
    twice = changed("hosts.a9-gpu1", {**copy.deepcopy(far), "engines": {"g": {"command": ["y"], "port": 8081, "models": ["o"]}}},
                    changed("hosts.a9", far))
    assert problems(twice) == ["hosts.a9-gpu1.engines.g.port: taken by engine f of host a9, on the same box"]


def test_two_url_engines_may_share_what_somebody_else_runs():
    two = {"a": {"url": "http://x:1", "models": ["m"]}, "b": {"url": "http://x:1", "models": ["n"]}}
    parse_config({"hosts": {"here": {"engines": two}}})


# ----- addresses


@pytest.mark.parametrize(
    ("written", "meant"),
    [("fd00::9", "fd00::9"), ("[fd00::9]", "fd00::9"), ("fe80::1%eth0", "fe80::1%eth0"), ("[fe80::1%eth0]", "fe80::1%eth0"),
     ("[fd00::9:8081]", "fd00::9:8081"), ("::1", "::1"), ("fd00:1:2:3:4:5:6:8081", "fd00:1:2:3:4:5:6:8081"), ("fd00::9:81", "fd00::9:81"),
     ("a9", "a9"), ("a9.lan.", "a9.lan."), ("10.0.0.9", "10.0.0.9")],
)
def test_brackets_around_an_address_mean_the_same_and_zones_survive(written, meant):
    host = parse_config(changed("hosts.here.address", written)).hosts["here"]
    assert host.address == meant


@pytest.mark.parametrize(
    ("host", "authority"), [("fd00::9", "[fd00::9]:81"), ("fe80::1%eth0", "[fe80::1%eth0]:81"), ("a9", "a9:81"), ("10.0.0.9", "10.0.0.9:81")]
)
def test_an_address_and_a_port_are_put_together_with_brackets(host, authority):
    assert Address(host, 81).authority == authority


@pytest.mark.parametrize(
    ("text", "pair"),
    [("127.0.0.1:8080", ("127.0.0.1", 8080)), ("[::]:8080", ("::", 8080)), ("[::1]:0", ("::1", 0)), ("localhost:1", ("localhost", 1)),
     (":8080", ("0.0.0.0", 8080)), ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80))],
)
def test_a_listen_address_has_a_port(text, pair):
    assert host_port(text) == pair


@pytest.mark.parametrize("text", ["", "x", "x:", "x:y", "1:2:3", "[::1]", "[::1]:", "[]:80", "x:-1", "x:+1", "x:1_0", "x:８０", "x:70000", None, 80, [], "a\n:1"])
def test_what_is_no_listen_address_is_a_value_error(text):
    with pytest.raises(ValueError):
        host_port(text)


def test_loopback_is_known_in_all_its_forms():
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost", "::ffff:127.0.0.1"):
        assert is_loopback(host), host
    for host in ("0.0.0.0", "::", "10.0.0.1", "a9", "fe80::1%lo", "", "::ffff:10.0.0.1", "128.0.0.1"):
        assert not is_loopback(host), host


# ----- warnings


@pytest.mark.parametrize("listen", ["0.0.0.0:8080", "[::]:8080", ":8080", "10.0.0.1:80", "a9:80", "[fd00::5]:80"])
def test_an_open_listen_without_keys_warns(listen, tmp_path):
    (warning,) = parse_config({**MINIMAL, "proxy": {"listen": listen}}).warnings
    assert warning.startswith("proxy.listen: ") and "no api_keys" in warning
    assert not parse_config({**MINIMAL, "proxy": {"listen": listen, "api_keys": ["k"]}}).warnings
    keys = write(tmp_path / "keys", "k\n")
    assert not parse_config({**MINIMAL, "proxy": {"listen": listen, "api_keys_file": keys}}).warnings
    assert parse_config({**MINIMAL, "proxy": {"listen": listen, "admin_keys": ["k"]}}).warnings, "admin keys guard load and unload only"


@pytest.mark.parametrize("listen", ["127.0.0.1:8080", "[::1]:8080", "localhost:80", "127.1.2.3:80"])
def test_a_loopback_listen_does_not_warn(listen):
    assert parse_config({**MINIMAL, "proxy": {"listen": listen}}).warnings == ()


# ----- the keys file


def test_a_keys_file_has_a_key_a_line(tmp_path):
    path = write(tmp_path / "keys", "# laptops\nk1\n\n  k2  \r\n# end\n")
    config = parse_config({**MINIMAL, "proxy": {"api_keys": ["k0"], "api_keys_file": path}})
    assert config.proxy.api_keys == ("k0", "k1", "k2")


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "no key in it"), (b"# none\n\n", "no key in it"), (b"a b\n", "printable ASCII"), ("schlüssel\n".encode(), "printable ASCII"), (b"\xff\xfe\n", "")]
)
def test_a_keys_file_that_would_let_nobody_in_is_a_mistake(tmp_path, content, says):
    path = tmp_path / "keys"
    path.write_bytes(content)
    (line,) = problems({**MINIMAL, "proxy": {"api_keys_file": str(path)}})
    assert line.startswith("proxy.api_keys_file: ") and says in line and "a b" not in line, "keys are not printed"


def test_a_keys_file_may_lie_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "keys", "k1\n")
    assert parse_config({**MINIMAL, "proxy": {"api_keys_file": "~/keys"}}).proxy.api_keys == ("k1",)


# ----- which file


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Nothing configured: an empty current folder, home and environment."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LLMGUARD_CONFIG", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


def test_the_file_is_looked_for_in_the_documented_order(folders, monkeypatch):
    if Path("/etc/llmguard").exists():
        pytest.skip("this machine has a configuration")
    assert config_path() is None
    home = folders / "home" / ".config" / "llmguard"
    home.mkdir(parents=True)
    write(home / "llmguard.json", "{}")
    assert config_path() == str(home / "llmguard.json")
    write(home / "llmguard.toml", "")
    assert config_path() == str(home / "llmguard.toml")
    xdg = folders / "xdg" / "llmguard"
    xdg.mkdir(parents=True)
    write(xdg / "llmguard.json", "{}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folders / "xdg"))
    assert config_path() == str(xdg / "llmguard.json")
    write(folders / "cwd" / "llmguard.json", "{}")
    assert Path(config_path()).resolve() == folders / "cwd" / "llmguard.json"
    monkeypatch.setenv("LLMGUARD_CONFIG", "/some/where.toml")
    assert config_path() == "/some/where.toml"
    assert config_path("chosen.json") == "chosen.json"


def test_a_chosen_file_that_is_missing_is_an_error_not_a_reason_to_look_elsewhere(folders):
    write(folders / "cwd" / "llmguard.json", json.dumps(MINIMAL))
    with pytest.raises(ConfigError, match="other.json: No such file"):
        load_config(config_path("other.json"))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [("a.json", "{", "a.json: "), ("a.json", '{"a": 1, "a": 2}', "a stands twice"), ("a.json", '{"hosts": {"h": {}, "h": {}}}', "h stands twice"),
     ("a.json", "[" * 100_000, "a.json: "), ("a.json", "[]", "a table is due"), ("a.yaml", "", "must end in .toml or .json"),
     pytest.param("a.toml", "x = ", "a.toml: ", marks=needs_toml), pytest.param("a.toml", "a = 1\na = 2", "a.toml: ", marks=needs_toml)],
)
def test_a_file_that_cannot_be_parsed_is_named(tmp_path, name, text, says):
    with pytest.raises(ConfigError, match=says):
        load_config(write(tmp_path / name, text))


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"{\"a\": \"\xc3\x28\"}"])
def test_a_file_that_is_no_utf8_is_named(tmp_path, raw):
    (tmp_path / "a.json").write_bytes(raw)
    with pytest.raises(ConfigError, match="a.json: "):
        load_config(str(tmp_path / "a.json"))


def test_a_folder_is_no_configuration(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(ConfigError, match="a.json: Is a directory"):
        load_config(str(tmp_path / "a.json"))


def test_toml_on_an_old_python_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tomllib", None)
    with pytest.raises(ConfigError, match="TOML needs Python 3.11 or later.*same keys as JSON"):
        load_config(write(tmp_path / "a.toml", ""))


@pytest.mark.parametrize("kind", [llmguard.ProxyConfig, llmguard.HostConfig, llmguard.EngineConfig], ids=lambda kind: kind.__name__)
def test_the_full_example_shows_every_key(kind):
    text = (ROOT / "examples/llmguard.toml").read_text()
    keys = [one.name for one in llmguard.dataclass_fields(kind) if "read" in one.metadata]
    assert keys and [key for key in keys if not re.search(rf"\b{key} = ", text)] == []


@pytest.mark.parametrize("path", sorted([*ROOT.glob("examples/*.toml"), ROOT / "examples/minimal.json"]), ids=lambda path: path.name)
def test_the_examples_load(path):
    if path.suffix == ".toml" and sys.version_info < (3, 11):
        pytest.skip("TOML needs Python 3.11")
    assert load_config(str(path)).hosts


# ----- anything at all

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()), max_size=12)
KNOWN = [f.name for kind in (ProxyConfig, llmguard.HostConfig, llmguard.EngineConfig) for f in llmguard.dataclass_fields(kind)]
WORDS = st.sampled_from(["auto", "never", "15m", "8GiB", "[::]:80", "fd00::9", "/", ".", "http://x", "http://[", "user", "x.service", "~", "~nobody/x"])
ANYTHING = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["path", "settle", "codex", "m", *KNOWN]) | st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def table_of(kind, inner):
    keys = [f.name for f in llmguard.dataclass_fields(kind) if f.name not in ("name", "engines")]
    return st.dictionaries(st.sampled_from(keys) | st.text(max_size=4), inner, max_size=5)


ENGINES = st.dictionaries(st.text(max_size=4) | st.just("e"), table_of(llmguard.EngineConfig, ANYTHING) | ANYTHING, max_size=3)
HOSTS = st.dictionaries(
    st.text(max_size=4) | st.just("h"),
    st.tuples(table_of(llmguard.HostConfig, ANYTHING), ENGINES).map(lambda pair: {**pair[0], "engines": pair[1]}) | ANYTHING,
    max_size=3,
)
FILES = st.fixed_dictionaries({}, optional={"proxy": table_of(ProxyConfig, ANYTHING) | ANYTHING, "hosts": HOSTS | ANYTHING})


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(FILES | ANYTHING)
def test_any_structure_gives_a_configuration_or_a_configuration_error(data):
    try:
        config = parse_config(data)
    except ConfigError as error:
        assert str(error)
        str(error).encode("utf-8")
        return
    assert isinstance(config, Config) and config.hosts


def test_a_command_that_is_not_told_its_port_warns():
    for words, warns in ((["x"], True), (["x", "--port", "9999"], True), (["x", "--port={port}"], False), (["x", "8081"], False)):
        found = parse_config(changed("hosts.here.engines.e.command", words)).warnings
        assert any("neither {port} nor 8081 is in it" in warning for warning in found) is warns

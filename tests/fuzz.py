#!/usr/bin/env python3
"""Coverage-guided fuzzing (atheris) of what reads bytes from outside; `make fuzz SECONDS=60`, or one reader by its name:

    python tests/fuzz.py TARGET [libFuzzer's options, -max_total_time=60 say]

A target takes any bytes. It fails by any exception that is not the reader's own kind of refusal, and where another way to
read the same bytes is at hand (the json module, the whole at once instead of in pieces), by another result.
tests/test_fuzz.py runs every target on damaged samples, without atheris.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

try:
    import atheris
except ImportError:
    atheris = None
if __name__ == "__main__" and atheris and len(sys.argv) > 1:
    with atheris.instrument_imports(include=["llmguard"]):
        import llmguard as guard
else:
    import llmguard as guard

FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-"))
CONFIG = guard.parse_config({"hosts": {"here": {"engines": {"e": {"url": "http://127.0.0.1:9", "models": ["small"]}}}}})


class NoProxy:
    """As much of a Proxy as reading a request needs."""

    config = CONFIG
    own = guard.OWN
    find = guard.Proxy.find


class Bytes:
    """A wire on which bytes come, in pieces of a size, and then an end."""

    broken, interim = False, 0

    def __init__(self, data: bytes, piece: int) -> None:
        self.buffer, self.rest, self.piece, self.waits_since = b"", data, piece, 0.0

    def read(self, *_) -> bytes:
        piece, self.rest = self.rest[: self.piece], self.rest[self.piece :]
        return piece

    fill, head = guard.Wire.fill, guard.Wire.head


# ----- HTTP


def request(data: bytes) -> None:
    """A client's header block, and what its path, keys and framing are taken for."""
    block = data.decode("latin-1")
    exchange = guard.Exchange(NoProxy(), Bytes(b"", 1), block)
    try:
        exchange.parse()
        exchange.proxy.find(exchange.method, exchange.path)
        list(exchange._keys_sent())
        guard.body_decoder(exchange.fields.get("content-encoding"), 100)
        sent = guard.request_head(exchange.method, "/", exchange.fields.end_to_end(guard._NOT_FORWARDED))
    except guard.GuardError:
        return
    again = guard.Fields(sent.decode("latin-1").partition("\r\n")[2][:-2])  # what is forwarded is one header, and no more
    assert not again.has_token("transfer-encoding", "chunked") and "content-length" not in again
    assert sent.count(b"\r\n\r\n") == 1 and sent.endswith(b"\r\n\r\n")


def response(data: bytes) -> None:
    """An engine's answer: the same however it is cut."""
    results = []
    for piece in (1, 7, 1 << 20):
        wire = Bytes(data, piece)
        try:
            head = guard.Response(wire, "GET", guard.NEVER)
            results.append((head.status, head.fields.items, head.reusable, head.body.all(guard.NEVER, 1 << 20)))
        except guard.GuardError as error:
            results.append(type(error))
    assert results[0] == results[1] == results[2], results


def chunks(data: bytes) -> None:
    """The chunked coding: the same however it is cut."""
    results = []
    for piece in (1, 5, 1 << 20):
        decoder, payload, wire = guard.Chunked(), b"", Bytes(data, piece)
        try:
            while not decoder.done and wire.rest:
                payload += decoder.feed(wire.read())
            results.append((decoder.done, payload, decoder.rest + wire.rest if decoder.done else b""))
        except guard.ProtocolError:
            results.append(("refused",))
    assert results[0] == results[1] == results[2], results


def body(data: bytes) -> None:
    """A request's JSON body: the model that a whole parser finds, or a refusal."""
    try:
        whole = json.loads(data, object_pairs_hook=Pairs)
    except (ValueError, RecursionError):
        whole = None
    try:
        asked = guard.asked_in_json(data)
    except guard.BadRequest:
        return
    if isinstance(whole, Pairs):
        models = [value for key, value in whole if key == "model"]
        streams = [value for key, value in whole if key == "stream"]
        assert all(model == asked.model for model in models) and bool(models) == bool(asked.spans), (models, asked)
        assert asked.stream == bool(streams and streams[-1] is True)
    assert all(json.loads(data[start:end]) == asked.model for start, end in asked.spans)


class Pairs(list):
    """A JSON object, all of its keys."""


def form(data: bytes) -> None:
    """A request's multipart body."""
    try:
        asked = guard.asked_in_form(data, "multipart/form-data; boundary=b")
    except guard.BadRequest:
        return
    assert all(data[start:end].decode("utf-8", "replace") == asked.model for start, end in asked.spans)


# ----- files and programs


def config(data: bytes) -> None:
    """A configuration, in JSON."""
    try:
        guard.parse_config(json.loads(data))
    except (ValueError, RecursionError):
        return
    except guard.ConfigError as error:
        str(error).encode()


def toml(data: bytes) -> None:
    """A configuration's file, in TOML."""
    path = FOLDER / "llmguard.toml"
    path.write_bytes(data)
    try:
        guard.load_config(str(path))
    except guard.ConfigError as error:
        str(error).encode()


def agent_request(data: bytes) -> None:
    """What an agent is asked, as far as it only looks."""
    agent = guard.Agent(str(FOLDER), guard.Box(str(FOLDER)), run=lambda argv, seconds: (None, "", "not found"))
    try:
        ask = guard.parse_request(data)
        guard.queue_settings(ask)
    except guard.BadRequest as error:
        str(error).encode()
        return
    if ask.get("op") in ("start", "stop"):
        ask["op"] = "status"
    for table in ask.get("engines", {}).values() if isinstance(ask.get("engines"), dict) else ():
        if isinstance(table, dict) and "port" in table:
            table["port"] = 9  # nobody listens there, and nobody is asked
    if not isinstance(ask.get("job_queue"), dict):
        ask.pop("bench_port", None)
        json.dumps(agent.answer(ask))


def reply(data: bytes) -> None:
    """What an agent, or whatever runs in its place, has answered."""
    found, noise = guard.read_reply(data)
    assert found is None or isinstance(found, dict)
    assert 0 <= noise <= len(data)


def runner_log(data: bytes) -> None:
    """The log of the job queue."""
    root = FOLDER / "queue"
    for name in ("waiting", "running", "done", "failed"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "waiting" / "00-night.job").write_bytes(b"")
    (root / "runner.log").write_bytes(data)
    reading = guard.read_queue(guard.Box(str(FOLDER)), guard.QueueSettings(str(root)))
    json.dumps([vars(wait) for wait in reading.waits])


def fdinfo(data: bytes) -> None:
    """/proc/PID/fdinfo/FD of a DRM client."""
    client = guard.parse_fdinfo(data.decode("utf-8", "replace"))
    assert client is None or all(count is None or count >= 0 for count in (client.own, client.host))


def nvidia_xml(data: bytes) -> None:
    """`nvidia-smi -q -x`."""
    try:
        reading = guard.parse_nvidia_xml(data.decode("utf-8", "replace"))
    except ValueError:
        return
    guard.gpu_owners(reading, {1})


def nvidia_csv(data: bytes) -> None:
    """`nvidia-smi --query-gpu` and `--query-compute-apps`."""
    cards, _, apps = data.decode("utf-8", "replace").partition("\0")
    try:
        reading = guard.parse_nvidia_csv(cards, apps)
    except ValueError:
        return
    guard.gpu_owners(reading, {1})


TARGETS = {
    target.__name__: target
    for target in (
        request, response, chunks, body, form, config, toml, agent_request, reply, runner_log, fdinfo, nvidia_xml, nvidia_csv
    )
}  # fmt: skip

SAMPLES = {
    "request": [
        b"POST /v1/chat/completions?model=a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nConnection: close, x-a\r\nX-A: b\r\n",
        b"GET http://h//upstream/a/%2e%2e/b HTTP/1.0\r\nAuthorization: Basic YTpi\r\nContent-Encoding: gzip\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n",
    ],
    "response": [
        b"HTTP/1.1 103 Early\r\nA: b\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nT: x\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: x\n\n",
        b"HTTP/1.1 404 No\r\nContent-Length: 3\r\n\r\nno.",
    ],
    "chunks": [b"5\r\nhello\r\n1a;x=\"y\"\r\nabcdefghijklmnopqrstuvwxyz\r\n000\r\nTrailer: x\r\n\r\nrest"],
    "body": [
        b'{"model":"small","messages":[{"role":"user","content":"a \\"b\\" \\\\ \\u00e9 {["}],"stream":true}',
        b'\xef\xbb\xbf { "mod\\u0065l" : "a" , "x":[1,-2.5e3,null,{}], "model":"a"}',
    ],
    "form": [b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nsmall\r\n--b\r\ncontent-disposition: form-data; '
             b'name=file; filename="a\\"b"\r\n\r\nx\r\n--b--\r\n'],
    "config": [b'{"proxy":{"listen":"[::1]:80","api_keys":["k"],"idle_stop":"5m"},"hosts":{"a":{"ssh":"u@h","job_queue":{"root":"/q"},'
               b'"engines":{"e":{"unit":"x","port":1,"models":{"a":"b"},"scope":"user"}}}}}'],
    "toml": [b'[proxy]\nlisten = "127.0.0.1:80"\n[hosts.a.engines.e]\ncommand = ["x", "{port}"]\nport = 8081\nmodels = ["m"]\n'],
    "agent_request": [
        b'{"op":"status","host":"a","engines":{"e":{"kind":"command","command":["x"],"port":1},"u":{"kind":"unit","unit":"u",'
        b'"port":2,"scope":"user"}},"job_queue":{"root":"/q","gpu_pattern":"x"},"ignore":["Xorg"],"gpus":[0]}',
        b'{"op":"version"}',
    ],
    "reply": [b'motd\nllmguard-agent 1\n{"ok": true, "active": null}\n', b'\x1b[0mllmguard-agent 1\r\n{"ok": false}\r\n'],
    "runner_log": [b"2026-10-25T02:00:00+0100 gpu-wait 00-night.job by pid=12 comm=python\n2026-10-25 start 00-night.job\n"],
    "fdinfo": [b"pos:\t0\ndrm-driver:\tamdgpu\ndrm-client-id:\t7\ndrm-pdev:\t0000:03:00.0\ndrm-memory-vram:\t12 KiB\ndrm-total-gtt:\t3 MiB\n"],
    "nvidia_xml": [b"<?xml version='1.0'?><nvidia_smi_log><gpu id='0'><fb_memory_usage><total>10 MiB</total><used>N/A</used>"
                   b"</fb_memory_usage><processes><process_info><pid>4</pid><type>C</type><used_memory>1 MiB</used_memory>"
                   b"</process_info></processes></gpu></nvidia_smi_log>"],
    "nvidia_csv": [b"0, GPU-a, NVIDIA X, 100 MiB, 5 MiB\n1, [N/A], Y, [N/A], 5\n\x00GPU-a, 12, python, 3 MiB\n"],
}  # fmt: skip


def main() -> int:
    if atheris is None:
        sys.exit("atheris is not here: pip install atheris")
    if sys.argv[1:] and sys.argv[1] in TARGETS:
        target = TARGETS[sys.argv.pop(1)]
        corpus = FOLDER / "corpus"
        corpus.mkdir()
        for number, sample in enumerate(SAMPLES[target.__name__]):
            (corpus / str(number)).write_bytes(sample)
        guard.log = lambda *_: None
        atheris.Setup([*sys.argv, str(corpus), f"-artifact_prefix={os.getcwd()}/"], target)
        atheris.Fuzz()
    failed = []
    for name in TARGETS:
        print(f"{name}: {TARGETS[name].__doc__}", flush=True)
        done = subprocess.run([sys.executable, __file__, name, *sys.argv[1:]], stderr=subprocess.PIPE, text=True)
        print("  " + "\n  ".join(done.stderr.splitlines()[-2:] if not done.returncode else done.stderr.splitlines()[-25:]), flush=True)
        if done.returncode:
            failed.append(name)
    print("failed: " + ", ".join(failed) if failed else "nothing was found")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Forwarding: what an engine gets, what a client gets back, and who is let go when."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import socket
import struct
import sys
import threading

import pytest
from parts import PATIENCE, Sent, Upstream, echo, eventually, free_port, raw, replies, url_config

import llmguard

NEVER = llmguard.NEVER
CHAT = {"model": "small", "messages": []}
STREAM = {"model": "small", "stream": True, "messages": []}


@pytest.fixture
def engine():
    """make(answer) -> Upstream."""
    made: list[Upstream] = []

    def make(answer) -> Upstream:
        made.append(Upstream(answer))
        return made[-1]

    yield make
    for upstream in made:
        upstream.close()


@pytest.fixture
def front(engine, inside):
    """start(answer, models, **settings) -> (a proxy in this process, the engine behind it)."""

    def start(answer, models=("small",), **proxy) -> tuple[llmguard.Proxy, Upstream]:
        upstream = engine(answer)
        config = url_config(upstream.port, models=["small"], **proxy)
        config["hosts"]["here"]["engines"]["e0"]["models"] = list(models) if not isinstance(models, dict) else models
        return inside(config), upstream

    return start


def post(body, *fields: str, path: str = "/v1/chat/completions", version: str = "1.1", close: bool = True) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/{version}",
        "Host: x",
        *fields,
        *(["Connection: close"] if close else []),
        f"Content-Length: {len(data)}",
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data


def get(path: str, *fields: str, method: str = "GET", close: bool = True) -> bytes:
    return "\r\n".join(
        [f"{method} {path} HTTP/1.1", "Host: x", *fields, *(["Connection: close"] if close else []), "", ""]
    ).encode("latin-1")


def says(data: bytes, keep: bool = False):
    """An engine's answer that is always the same bytes."""

    def answer(request: bytes, sock: socket.socket) -> bool:
        sock.sendall(data)
        return keep

    return answer


def gated(*parts: bytes):
    """(an engine's answer that sends each part but the first only when it is told to, tell())."""
    gate = threading.Semaphore(0)

    def answer(request: bytes, sock: socket.socket) -> bool:
        sock.sendall(parts[0])
        for part in parts[1:]:
            assert gate.acquire(timeout=PATIENCE)
            sock.sendall(part)
        return parts[-1].endswith(b"0\r\n\r\n")

    return answer, gate.release


def reset(sock: socket.socket) -> None:
    """End with a RST, as a crashed process's kernel may."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def gone(sock: socket.socket) -> bool:
    """Wait until the other side has closed."""
    sock.settimeout(PATIENCE)
    with contextlib.suppress(ConnectionError):
        return sock.recv(1) == b""
    return True


class Client:
    """A client that reads as far as a test wants."""

    def __init__(self, proxy, data: bytes) -> None:
        self.sock = socket.create_connection(("127.0.0.1", proxy.port), PATIENCE)
        self.received = bytearray()
        self.sock.sendall(data)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_) -> None:
        self.sock.close()

    def until(self, mark: bytes) -> bytes:
        """What has come, once it holds `mark`."""
        while mark not in self.received:
            piece = self.sock.recv(65536)
            assert piece, f"closed without {mark!r}: {self.received!r}"
            self.received += piece
        return bytes(self.received)

    def rest(self) -> bytes:
        """All of it."""
        with contextlib.suppress(ConnectionResetError):
            while piece := self.sock.recv(65536):
                self.received += piece
        return bytes(self.received)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def dechunked(data: bytes) -> tuple[bytes, bool]:
    """(the payload of a chunked response, has it a clean end?)."""
    head, _, coded = data.partition(b"\r\n\r\n")
    assert b"\r\ntransfer-encoding: chunked" in head.lower()
    chunks = llmguard.Chunked()
    payload = chunks.feed(coded)
    assert chunks.rest == b""
    return payload, chunks.done


EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PLAIN_CHUNKS = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
KEEPALIVE = b": keepalive\n\n"

# ----- how an engine may answer


@pytest.mark.parametrize(
    "answer, body",
    [
        (b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{"text":"hi"}', b'{"text":"hi"}'),
        (b"HTTP/1.0 200 OK\r\nKeep-Alive: timeout=2, max=100\r\nConnection: Keep-Alive\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b""),
    ],
)
def test_an_answer_until_close_gets_a_clean_end_and_its_connection_is_not_used_again(front, answer, body):
    proxy, engine = front(says(answer))
    for _ in range(2):
        assert dechunked(raw(proxy.port, post(CHAT))) == (body, True)
    data = raw(proxy.port, post(CHAT, version="1.0"))
    head, _, got = data.partition(b"\r\n\r\n")
    assert got == body and b"transfer-encoding" not in head.lower() and b"Connection: close" in head
    assert len(set(engine.on)) == 3


@pytest.mark.parametrize(
    "interim",
    [
        b"HTTP/1.1 103 Early Hints\r\nLink: </s.css>; rel=preload\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 P\r\n\r\nHTTP/1.1 103 E\r\n\r\n",
    ],
)
def test_interim_answers_are_skipped_and_the_next_request_gets_its_own_answer(front, interim):
    def answer(request: bytes, sock: socket.socket) -> bool:
        body = Sent(request).body
        sock.sendall(interim + b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        return True

    proxy, engine = front(answer)
    asked = [{"model": "small", "n": n} for n in range(3)]
    answers = replies(raw(proxy.port, b"".join(post(body, close=body == asked[-1]) for body in asked)))
    assert [(reply.status, reply.json()) for reply in answers] == [(200, body) for body in asked]
    assert len(set(engine.on)) == 1


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
@pytest.mark.parametrize("framing", [b"Content-Length: 12\r\nConnection: keep-alive\r\n", b"Transfer-Encoding: chunked\r\n", b""])
def test_no_body_is_waited_for_where_the_rule_says_that_there_is_none(front, status, framing):
    proxy, engine = front(says(b"HTTP/1.1 " + status + b"\r\n" + framing + b"\r\n", keep=True))
    answers = replies(raw(proxy.port, post(CHAT, close=False) + post(CHAT)))
    assert [reply.status for reply in answers] == [int(status[:3])] * 2
    assert len(set(engine.on)) == 1


def test_the_answer_to_a_head_has_the_length_but_no_body(front):
    proxy, engine = front(echo)
    data = raw(proxy.port, get("/props", method="HEAD", close=False) + get("/props", close=False) + get("/props", method="HEAD"))
    answers = replies(data, "HEAD", "GET", "HEAD")
    assert [reply.status for reply in answers] == [200, 200, 200]
    assert answers[0].headers["content-length"] == str(len(engine.requests[0]))
    assert answers[1].body == engine.requests[1]
    assert len(set(engine.on)) == 1


@pytest.mark.parametrize("framing", [b"Transfer-Encoding: chunked\r\n", b""])
def test_a_head_answered_without_a_length_gets_no_framing(front, framing):
    proxy, _ = front(says(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n"))
    head, end, body = raw(proxy.port, get("/props", method="HEAD")).partition(b"\r\n\r\n")
    assert end and not body and b"content-length" not in head.lower()


def test_a_body_cut_short_leaves_the_client_short_too_and_is_not_asked_for_again(front):
    proxy, engine = front(says(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n" + b"x" * 300))
    with pytest.raises(http.client.IncompleteRead) as cut:
        replies(raw(proxy.port, post(CHAT, close=False)))
    assert cut.value.partial == b"x" * 300
    assert len(engine.requests) == 1


@pytest.mark.parametrize("end", [b"", b"5", b"5\r\nab", b"5\r\nabcde", b"0\r\n", b"nonsense\r\n"])
def test_chunks_that_break_off_get_no_clean_end(front, end):
    answer, tell = gated(PLAIN_CHUNKS + chunk(b"hello"), end)
    proxy, engine = front(answer)
    with Client(proxy, post(CHAT, close=False)) as client:
        client.until(b"hello")
        tell()
        assert dechunked(client.rest()) == (b"hello" + end[3:] * (b"ab" in end), False)
    assert len(engine.requests) == 1


def test_a_client_of_http_1_0_can_tell_a_broken_answer_by_a_reset(front):
    answer, tell = gated(PLAIN_CHUNKS + chunk(b"hello"), b"")
    proxy, _ = front(answer)
    with Client(proxy, post(CHAT, version="1.0")) as client:
        assert client.until(b"hello").endswith(b"\r\n\r\nhello")
        tell()
        with pytest.raises(ConnectionResetError):
            client.sock.recv(1)


def test_chunks_that_are_malformed_from_the_first_byte_are_502(front):
    proxy, engine = front(says(PLAIN_CHUNKS + b"nonsense\r\n"))
    reply = replies(raw(proxy.port, post(CHAT)))[0]
    assert (reply.status, reply.error["type"]) == (502, "engine_lost")
    assert len(engine.requests) == 1


def test_an_answer_until_close_that_ends_in_a_reset_gets_no_clean_end(front):
    told = threading.Event()

    def answer(request: bytes, sock: socket.socket) -> bool:
        sock.sendall(b"HTTP/1.1 200 OK\r\n\r\nhello")
        told.wait(PATIENCE)
        reset(sock)
        return False

    proxy, _ = front(answer)
    with Client(proxy, post(CHAT)) as client:
        client.until(b"hello")
        told.set()
        assert dechunked(client.rest()) == (b"hello", False)


MALFORMED = {
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok!",
    "both lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "length with a sign": b"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok",
    "unknown coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nok",
    "bare CR in a value": b"HTTP/1.1 200 OK\r\nA: b\rSet-Cookie: c=d\r\nContent-Length: 2\r\n\r\nok",
    "bare LF in a value": b"HTTP/1.1 200 OK\r\nA: b\nSet-Cookie: c=d\r\nContent-Length: 2\r\n\r\nok",
    "NUL in a value": b"HTTP/1.1 200 OK\r\nA: \x00\r\nContent-Length: 2\r\n\r\nok",
    "folded": b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\nContent-Length: 2\r\n\r\nok",
    "blank before the colon": b"HTTP/1.1 200 OK\r\nContent-Length : 2\r\n\r\nok",
    "bare CR in the reason": b"HTTP/1.1 200 O\rK\r\nContent-Length: 2\r\n\r\nok",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "HTTP/2": b"HTTP/2.0 200 OK\r\n\r\n",
    "a switch that nobody asked for": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "an endless head": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000,
    "a head cut short": b"HTTP/1.1 200 OK\r\nContent-Le",
    "half a status line": b"HTT",
    "an interim answer and no other": b"HTTP/1.1 100 Continue\r\n\r\n",
}


@pytest.mark.parametrize("kept", [False, True], ids=["on a fresh connection", "on a kept connection"])
@pytest.mark.parametrize("answer", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_answer_is_502_without_its_words_and_nothing_is_asked_twice(front, answer, kept):
    bad = says(answer)
    proxy, engine = front(lambda request, sock: bad(request, sock) if b"bad" in request else echo(request, sock))
    if kept:
        raw(proxy.port, post(CHAT))
    reply = replies(raw(proxy.port, post({"model": "small", "x": "bad"})))[0]
    assert (reply.status, reply.error["type"]) == (502, "engine_lost")
    assert not re.search(r"\d|SSH|Set-Cookie", reply.error["message"])
    assert len(engine.requests) == 1 + kept
    assert replies(raw(proxy.port, post(CHAT)))[0].status == 200
    assert engine.on[-1] != engine.on[-2]


def test_an_engine_that_is_not_there_is_502_without_a_word_that_clients_retry_on(inside):
    port = free_port()
    reply = replies(raw(inside(url_config(port)).port, post(CHAT)))[0]
    assert (reply.status, reply.error["type"]) == (502, "engine_lost")
    assert str(port) not in reply.error["message"] and not re.search(r"(?i)refused|timeout|reset|\d", reply.error["message"])


# ----- bytes as they come


@pytest.mark.parametrize("framing", ["length", "chunks", "close"])
@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 3_000_000])
def test_an_answer_arrives_byte_for_byte(front, framing, size):
    body = random.Random(size).randbytes(size)
    sizes = random.Random(size)

    def answer(request: bytes, sock: socket.socket) -> bool:
        if framing == "chunks":
            sock.sendall(PLAIN_CHUNKS)
            at = 0
            while at < size:
                piece = body[at : at + sizes.choice([1, 1000, 65_536, 200_000])]
                sock.sendall(chunk(piece))
                at += len(piece)
            sock.sendall(b"0\r\n\r\n")
        else:
            sock.sendall(
                b"HTTP/1.1 200 OK\r\n" + (b"Content-Length: %d\r\n" % size if framing == "length" else b"") + b"\r\n" + body
            )
        return framing != "close"

    proxy, _ = front(answer)
    assert [reply.body for reply in replies(raw(proxy.port, post(CHAT, close=False) + post(CHAT)))] == [body, body]


@pytest.mark.parametrize("size", [100, 65_400, 65_536, 70_000, 3_000_000, 9_000_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_reaches_the_engine_byte_for_byte_in_memory_or_through_a_file(front, size, chunked):
    filler = json.dumps(os.urandom(size // 2).hex() + 'é"\\')
    body = b' {\t"messages" : [ 1.0, 1e5, "\\u00e9\xc3\xa9" ] ,"x":' + filler.encode() + b', "model":\n"small" }\r\n'
    proxy, engine = front(echo)
    if chunked:
        coded = b"".join(chunk(body[at : at + 50_000]) for at in range(0, len(body), 50_000)) + b"0\r\nX-Trailer: y\r\n\r\n"
        data = post(b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"") + coded
    else:
        data = post(body)
    assert replies(raw(proxy.port, data))[0].status == 200
    sent = Sent(engine.requests[0])
    assert sent.body == body and sent.get("content-length") == [str(len(body))] and "transfer-encoding" not in sent.names


def test_the_first_event_arrives_while_the_engine_still_generates(front):
    told = threading.Event()

    def answer(request: bytes, sock: socket.socket) -> bool:
        sock.sendall(EVENTS + chunk(b"data: 1\n\n"))
        assert told.wait(PATIENCE)
        sock.sendall(chunk(b"data: 2\n\n") + b"0\r\n\r\n")
        return True

    proxy, _ = front(answer)
    with Client(proxy, post(STREAM)) as client:
        head = client.until(b"data: 1\n\n").partition(b"\r\n\r\n")[0]
        told.set()
        assert dechunked(client.rest()) == (b"data: 1\n\ndata: 2\n\n", True)
    assert b"\r\nX-Accel-Buffering: no" in head


def test_the_head_arrives_before_the_first_of_the_body(front):
    told = threading.Event()

    def answer(request: bytes, sock: socket.socket) -> bool:
        sock.sendall(EVENTS)
        assert told.wait(PATIENCE)
        sock.sendall(b"0\r\n\r\n")
        return True

    proxy, _ = front(answer)
    with Client(proxy, post(STREAM)) as client:
        client.until(b"\r\n\r\n")
        told.set()
        assert dechunked(client.rest()) == (b"", True)


def test_http_1_0_clients_get_a_stream_without_chunks(front):
    proxy, _ = front(says(EVENTS + chunk(b"data: 1\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", keep=True))
    assert raw(proxy.port, post(STREAM, version="1.0")).partition(b"\r\n\r\n")[2] == b"data: 1\n\ndata: [DONE]\n\n"


# ----- header fields


def test_a_request_keeps_its_own_fields_and_loses_the_ones_that_are_not_the_engines(front):
    kept = [
        "Accept: */*",
        "X-Custom:  two  words ",
        "x-custom: again",
        "Content-Type: application/json",
        "User-Agent: Codex/1 \xe9",
        "Origin: http://ui",
        "X-Empty:",
        "Accept-Encoding: gzip",
    ]
    lost = [
        "Cookie: a=b", "Authorization: Bearer client-key", "x-api-key: client-key", "X-Conversation-Id: 7", "TE: trailers",
        "Keep-Alive: timeout=5", "Trailer: X", "Proxy-Authorization: Basic eDp5", "Proxy-Connection: keep-alive", "Upgrade: h2c",
        "HTTP2-Settings: AAMA", "X-Named: by Connection", "Connection: keep-alive, X-Named , upgrade", "Expect: 100-continue",
        "Content-Encoding: identity",
    ]  # fmt: skip
    mixed = [field for pair in zip(lost, kept + [""] * len(lost), strict=False) for field in pair if field]
    proxy, engine = front(echo)
    assert b"200 OK" in raw(proxy.port, post(CHAT, *mixed))
    body = json.dumps(CHAT).encode()
    wanted = [tuple(part.strip(" ") for part in field.split(":", 1)) for field in kept]
    sent = Sent(engine.requests[0])
    assert [tuple(field) for field in sent.fields] == [
        ("Host", f"127.0.0.1:{engine.port}"),
        *wanted,
        ("Content-Length", str(len(body))),
    ]
    assert b"client-key" not in engine.requests[0]


def test_an_answer_keeps_its_own_fields_and_loses_the_ones_of_its_connection(front):
    kept = [
        ("Server", "llama.cpp"),
        ("Set-Cookie", "a=1"),
        ("set-cookie", "b=2"),
        ("X-Odd", "é \t x"),
        ("Content-Encoding", "gzip"),
        ("Content-Type", "text/plain"),
    ]
    lost = [
        "Keep-Alive: timeout=5, max=100",
        "Proxy-Authenticate: Basic",
        "Upgrade: h2c",
        "X-Named: y",
        "Connection: X-Named, keep-alive",
        "Trailer: X",
    ]
    head = "\r\n".join(["HTTP/1.1 201 Made it", *(f"{name}: {value}" for name, value in kept), *lost, "Content-Length: 2"])
    proxy, engine = front(says(head.encode("latin-1") + b"\r\n\r\nok", keep=True))
    data = raw(proxy.port, post(CHAT, close=False) + post(CHAT, close=False) + get("/health"))
    got, _, rest = data.partition(b"\r\n\r\n")
    line, *fields = got.decode("latin-1").split("\r\n")
    assert line == "HTTP/1.1 201 Made it" and rest.startswith(b"ok")
    assert fields == [f"{name}: {value}" for name, value in kept] + ["Content-Length: 2"]


def test_an_engine_gets_its_own_key_and_never_the_clients(engine, inside):
    upstream = engine(echo)
    config = url_config(upstream.port, api_keys=["client-key"])
    config["hosts"]["here"]["engines"]["e0"]["api_key"] = "engine-key"
    raw(inside(config).port, post(CHAT, "Authorization: Bearer client-key", "x-api-key: client-key"))
    sent = Sent(upstream.requests[0])
    assert sent.get("authorization") == ["Bearer engine-key"] and "x-api-key" not in sent.names


# ----- another name upstream

NAMES = {"small": 'tiny/"é', "same": "same"}


def test_a_name_is_rewritten_in_place_and_nothing_else_is(front):
    proxy, engine = front(echo, models=NAMES)
    body = b'{ "model" : "small",\t"x":{"model":"small"}, "messages":["small"] , "mod\\u0065l":"sm\\u0061ll"}'
    raw(proxy.port, post(body))
    name = json.dumps(NAMES["small"]).encode()
    sent = Sent(engine.requests[0])
    assert sent.body == b'{ "model" : ' + name + b',\t"x":{"model":"small"}, "messages":["small"] , "mod\\u0065l":' + name + b"}"
    assert sent.get("content-length") == [str(len(sent.body))]


def test_a_name_that_is_the_same_upstream_leaves_even_its_spelling(front):
    proxy, engine = front(echo, models=NAMES)
    body = b'{"model":"s\\u0061me"}'
    raw(proxy.port, post(body))
    assert Sent(engine.requests[0]).body == body


def test_a_name_is_rewritten_in_a_large_body_too(front):
    proxy, engine = front(echo, models=NAMES)
    filler = b'"' + b"QUJD" * 2_500_000 + b'"'
    raw(proxy.port, post(b'{"x":' + filler + b',"model":"small","y":1}'))
    assert Sent(engine.requests[0]).body == b'{"x":' + filler + b',"model":' + json.dumps(NAMES["small"]).encode() + b',"y":1}'


def test_a_name_is_rewritten_in_a_form(front):
    proxy, engine = front(echo, models=NAMES)
    part = b'--XX\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    file = part % (b"file", b'; filename="small"', b"RIFF small \x00\xff")
    body = part % (b"model", b"", b"small") + file + b"--XX--\r\n"
    raw(proxy.port, post(body, "Content-Type: multipart/form-data; boundary=XX", path="/v1/audio/transcriptions"))
    assert Sent(engine.requests[0]).body == part % (b"model", b"", NAMES["small"].encode()) + file + b"--XX--\r\n"


@pytest.mark.parametrize("query", ["x=small&model=small&y", "x=small&mod%65l=sm%61ll&y", "x=small&model=small&model=small&y"])
def test_a_name_is_rewritten_in_a_query(front, query):
    proxy, engine = front(echo, models=NAMES)
    raw(proxy.port, get("/props?" + query))
    name = "model=tiny%2F%22%C3%A9"
    wanted = "x=small&" + "&".join([name] * query.lower().count("mod")) + "&y"
    assert Sent(engine.requests[0]).line == f"GET /props?{wanted} HTTP/1.1"


# ----- connections to the engine


def test_connections_to_an_engine_are_kept_and_used_again(front):
    proxy, engine = front(echo)
    for _ in range(5):
        assert b" 200 OK" in raw(proxy.port, post(CHAT))
    assert len(set(engine.on)) == 1


@pytest.mark.parametrize("end", [lambda sock: None, reset])
def test_a_kept_connection_that_dies_before_the_first_byte_is_replaced_once(front, end):
    def answer(request: bytes, sock: socket.socket) -> bool:
        if len(engine.requests) != 2:
            return echo(request, sock)
        end(sock)
        return False

    proxy, engine = front(answer)
    for n in range(2):
        reply = replies(raw(proxy.port, post({"model": "small", "n": n})))[0]
        assert reply.status == 200 and Sent(reply.body).body == b'{"model": "small", "n": %d}' % n
    assert engine.on[0] == engine.on[1] != engine.on[2]
    assert engine.requests[1] == engine.requests[2]


def test_a_large_body_is_sent_again_whole_when_the_kept_connection_was_stale(front):
    def answer(request: bytes, sock: socket.socket) -> bool:
        return len(engine.requests) != 2 and echo(request, sock)

    body = b'{"model":"small","x":"' + os.urandom(5_000_000).hex().encode() + b'"}'
    proxy, engine = front(answer)
    raw(proxy.port, post(CHAT))
    assert replies(raw(proxy.port, post(body)))[0].status == 200
    assert Sent(engine.requests[2]).body == body


def test_a_kept_connection_that_was_closed_meanwhile_costs_no_request(front):
    def answer(request: bytes, sock: socket.socket) -> bool:
        echo(request, sock)
        return False

    proxy, engine = front(answer)
    for _ in range(3):
        assert b" 200 OK" in raw(proxy.port, post(CHAT))
    assert len(engine.requests) == 3


def test_a_fresh_connection_that_dies_is_not_replaced(front):
    proxy, engine = front(lambda request, sock: len(engine.requests) == 1 and echo(request, sock))
    raw(proxy.port, post(CHAT))
    reply = replies(raw(proxy.port, post(CHAT)))[0]
    assert (reply.status, reply.error["type"]) == (502, "engine_lost")
    assert len(engine.requests) == 3  # the first, the one on the kept connection, the one on a fresh connection
    assert replies(raw(proxy.port, post(CHAT)))[0].status == 502
    assert len(engine.requests) == 4


def test_what_an_engine_sends_unasked_behind_its_answer_reaches_nobody(front):
    proxy, engine = front(says(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", keep=True))
    for _ in range(3):
        assert [reply.body for reply in replies(raw(proxy.port, post(CHAT)))] == [b"ok"]
    assert len(set(engine.on)) == 3


# ----- a body that the engine does not want


@pytest.mark.parametrize("then", ["hold", "close"])
def test_an_engine_that_answers_before_it_has_read_all_is_heard_and_its_connection_not_used_again(inside, then):
    body = b'{"model":"small","x":"' + b"x" * (32 << 20) + b'"}'
    listener = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def engine() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                if sock.recv(10).startswith(b"GET"):
                    sock.close()
                    continue
                held.append(sock)
                sock.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
                if then == "close":
                    sock.shutdown(socket.SHUT_WR)

    threading.Thread(target=engine, daemon=True).start()
    proxy = inside(url_config(listener.getsockname()[1]))
    for _ in range(2):
        reply = replies(raw(proxy.port, post(body)))[0]
        assert (reply.status, reply.body) == (413, b"big")
    assert len(held) == 2
    listener.close()
    for sock in held:
        sock.close()


# ----- clients that leave


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["FIN", "RST"])
def test_a_client_that_leaves_while_the_engine_is_silent_frees_the_engine_at_once(front, body, leave):
    asked, freed = threading.Event(), threading.Event()

    def answer(request: bytes, sock: socket.socket) -> bool:
        asked.set()
        if gone(sock):
            freed.set()
        return False

    proxy, _ = front(answer)
    with Client(proxy, post(body)) as client:
        assert asked.wait(PATIENCE)
        assert not freed.is_set()
        leave(client.sock)
        assert freed.wait(PATIENCE)


@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["FIN", "RST"])
@pytest.mark.parametrize("going_on", [False, True], ids=["engine pauses", "engine goes on"])
def test_a_client_that_leaves_while_it_streams_frees_the_engine_at_once(front, leave, going_on):
    freed = threading.Event()

    def answer(request: bytes, sock: socket.socket) -> bool:
        sock.sendall(EVENTS + chunk(b"data: 1\n\n"))
        try:
            while going_on:
                sock.sendall(chunk(b"data: more\n\n"))
        except OSError:
            freed.set()
            return False
        if gone(sock):
            freed.set()
        return False

    proxy, _ = front(answer)
    with Client(proxy, post(STREAM)) as client:
        client.until(b"data: 1\n\n")
        leave(client.sock)
        assert freed.wait(PATIENCE)


def test_a_client_that_sends_its_next_request_ahead_has_not_left(front):
    asked, told = threading.Event(), threading.Event()

    def answer(request: bytes, sock: socket.socket) -> bool:
        asked.set()
        return told.wait(PATIENCE) and echo(request, sock)

    proxy, engine = front(answer)
    with Client(proxy, post(CHAT, close=False)) as client:
        assert asked.wait(PATIENCE)
        client.sock.sendall(post({"model": "small", "n": 2}))
        told.set()
        assert [reply.status for reply in replies(client.rest())] == [200, 200]
    assert len(engine.requests) == 2


# ----- an engine of our own that is slow to start: queued, kept alive, failed


def waiting_engine(folder) -> dict:
    """A configuration whose engine starts by waiting for the file `go`, and then ends."""
    script = folder / "engine.py"
    script.write_text(
        f"import os, time\nwhile not os.path.exists({str(folder / 'go')!r}):\n    time.sleep(0.01)\nraise SystemExit(3)\n"
    )
    engine = {"command": [sys.executable, str(script)], "port": free_port(), "models": ["small"]}
    return {"proxy": {"stream_keepalive": "50ms"}, "hosts": {"here": {"engines": {"slow": engine}}}}


def test_a_client_that_leaves_while_it_is_queued_leaves_the_queue(serve, tmp_path):
    serving = serve(waiting_engine(tmp_path))
    with (
        socket.create_connection(("127.0.0.1", serving.port)) as one,
        socket.create_connection(("127.0.0.1", serving.port)) as other,
    ):
        for sock in (one, other):
            sock.sendall(post(CHAT))
        eventually(lambda: serving.host()["queued"] == 2, "both are queued")
        one.close()
        eventually(lambda: serving.host()["queued"] == 1, "one has left")
        other.close()
        eventually(lambda: serving.host()["queued"] == 0, "the other has left")


@pytest.mark.parametrize(
    "path, event", [("/v1/chat/completions", b""), ("/v1/messages", b"event: error\n"), ("/v1/responses", b"event: error\n")]
)
def test_a_stream_is_kept_alive_while_its_engine_loads_and_a_failure_arrives_as_an_event(serve, tmp_path, path, event):
    serving = serve(waiting_engine(tmp_path))
    with Client(serving, post(STREAM, path=path)) as client:
        head = client.until(KEEPALIVE).partition(b"\r\n\r\n")[0]
        assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        (tmp_path / "go").touch()
        payload, clean = dechunked(client.rest())
    assert clean and payload.startswith(KEEPALIVE)
    name, _, data = payload.replace(KEEPALIVE, b"").partition(b"data: ")
    assert name == event and data.endswith(b"}\n\n")
    assert json.loads(data)["error"]["type"] == "engine_failed"


# ----- silence on a stream


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_silence_before_the_first_byte_is_filled_with_comments(front, path):
    answer, tell = gated(b"", EVENTS + chunk(b"data: 1\n\n") + b"0\r\n\r\n")
    proxy, engine = front(answer, stream_keepalive="20ms")
    with Client(proxy, post(STREAM, path=path)) as client:
        head = client.until(KEEPALIVE + b"\r\nd\r\n" + KEEPALIVE).partition(b"\r\n\r\n")[0]
        assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n") and b"X-Accel-Buffering: no" in head
        tell()
        payload, clean = dechunked(client.rest())
    assert clean and payload.replace(KEEPALIVE, b"") == b"data: 1\n\n" and payload.endswith(b"data: 1\n\n")
    assert len(engine.requests) == 1


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_silence_between_events_is_filled_with_comments(front, end):
    answer, tell = gated(EVENTS, chunk(b"data: 1" + end), chunk(b"data: 2" + end) + b"0\r\n\r\n")
    proxy, _ = front(answer, stream_keepalive="20ms")
    with Client(proxy, post(STREAM)) as client:
        client.until(KEEPALIVE)
        tell()
        client.until(b"data: 1" + end)
        client.until(b"data: 1" + end + b"\r\n" + b"d\r\n" + KEEPALIVE)
        tell()
        payload, clean = dechunked(client.rest())
    assert clean and payload.replace(KEEPALIVE, b"") == b"data: 1" + end + b"data: 2" + end


@pytest.mark.parametrize("half", [b"data: he", b"data: 1\n", b"data: 1\r\n", b"data: 1\r\n\r", b"event: x\ndata: 1\n", b":"])
def test_silence_inside_an_event_is_left_alone(front, monkeypatch, half):
    chances = threading.Semaphore(0)
    keep_alive = llmguard.Exchange.keep_alive

    def counted(exchange) -> None:
        keep_alive(exchange)
        if exchange._relayed:
            chances.release()

    monkeypatch.setattr(llmguard.Exchange, "keep_alive", counted)
    answer, tell = gated(EVENTS + chunk(half), chunk(b"\n\n") + b"0\r\n\r\n")
    proxy, _ = front(answer, stream_keepalive="20ms")
    with Client(proxy, post(STREAM)) as client:
        for _ in range(3):
            assert chances.acquire(timeout=PATIENCE)
        tell()
        payload, clean = dechunked(client.rest())
    assert clean and payload.replace(KEEPALIVE, b"") == half + b"\n\n"
    assert KEEPALIVE not in payload[payload.find(half) :]


@pytest.fixture
def deadlines(monkeypatch):
    """Until when the proxy waits for each piece of an engine's answer; NEVER means that no silence is filled."""
    found = []
    read = llmguard.Wire.read

    def recorded(wire, deadline, watched=None):
        if watched is not None:
            found.append(deadline)
        return read(wire, deadline, watched)

    monkeypatch.setattr(llmguard.Wire, "read", recorded)
    return found


@pytest.mark.parametrize("stream", [False, None, "true", 1])
def test_silence_is_nobodys_business_when_no_stream_was_asked_for(front, deadlines, stream):
    answer, tell = gated(b"", EVENTS, chunk(b"data: 1\n\n") + b"0\r\n\r\n")
    proxy, _ = front(answer, stream_keepalive="20ms")
    with Client(proxy, post(dict(CHAT, stream=stream))) as client:
        tell()
        client.until(b"\r\n\r\n")
        tell()
        assert dechunked(client.rest()) == (b"data: 1\n\n", True)
    assert set(deadlines) == {NEVER}


@pytest.mark.parametrize(
    "head, body",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(b"{}") + b"0\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9\r\n\r\n", b"data: 1\n\n"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n",
            chunk(b"\x1f\x8b\x08") + b"0\r\n\r\n",
        ),
    ],
    ids=["not events", "of a fixed length", "compressed"],
)
def test_no_comment_is_put_into_an_answer_that_it_would_break(front, deadlines, head, body):
    answer, tell = gated(head, body)
    proxy, _ = front(answer, stream_keepalive="1h")
    with Client(proxy, post(STREAM)) as client:
        client.until(b"\r\n\r\n")
        tell()
        got_head, _, got = client.rest().partition(b"\r\n\r\n")
    assert got == body
    assert deadlines[-1] == NEVER


def test_a_stream_is_not_asked_for_in_a_coding_that_no_comment_fits_into(front):
    proxy, engine = front(echo)
    raw(proxy.port, post(STREAM, "Accept-Encoding: gzip"))
    raw(proxy.port, post(CHAT, "Accept-Encoding: gzip"))
    assert [Sent(request).get("accept-encoding") for request in engine.requests] == [[], ["gzip"]]


# ----- errors on a stream that has begun


def shape(path: str, payload: bytes) -> dict:
    """The last event's content, which must have that path's shape of an error."""
    *_, last = payload.removesuffix(b"\n\n").split(b"\n\n")
    name, _, data = last.rpartition(b"data: ")
    content = json.loads(data)
    if "/messages" in path:
        assert name == b"event: error\n" and content["type"] == "error"
    elif "/responses" in path:
        assert name == b"event: error\n" and content["type"] == "error" and content["message"]
    else:
        assert name == b""
    return content


PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/messages", "/v1/responses", "/responses"]


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_that_dies_in_its_silence_is_told_as_an_event(front, path):
    answer, tell = gated(b"", b"")
    proxy, _ = front(answer, stream_keepalive="20ms")
    with Client(proxy, post(STREAM, path=path)) as client:
        client.until(KEEPALIVE)
        tell()
        payload, clean = dechunked(client.rest())
    content = shape(path, payload)
    assert clean and content["error"]["type"] == "engine_lost" and content["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_that_refuses_after_its_silence_is_told_as_an_event(front, path):
    said = b'{\n "error": {"type": "exceed_context_size_error",\r\n "message": "too  long"}}\n'
    answer, tell = gated(
        b"", b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said)
    )
    proxy, _ = front(answer, stream_keepalive="20ms")
    with Client(proxy, post(STREAM, path=path)) as client:
        client.until(KEEPALIVE)
        tell()
        payload, clean = dechunked(client.rest())
    *_, last = payload.removesuffix(b"\n\n").split(b"\n\n")
    name, _, data = last.rpartition(b"data: ")
    assert clean and name == (b"event: error\n" if re.search("messages|responses", path) else b"")
    assert json.loads(data) == json.loads(said)


@pytest.mark.parametrize("said", [b"", b"<html>502</html>", b"[1]", b"\xff"])
def test_an_engine_that_answers_a_stream_with_something_else_after_its_silence_is_told_as_an_event(front, said):
    answer, tell = gated(b"", b"HTTP/1.1 500 Oops\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said))
    proxy, _ = front(answer, stream_keepalive="20ms")
    with Client(proxy, post(STREAM)) as client:
        client.until(KEEPALIVE)
        tell()
        payload, clean = dechunked(client.rest())
    assert clean and shape("", payload)["error"]["type"] == "engine_lost"


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_breaks_between_events_gets_an_error_event_and_no_clean_end(front, path):
    proxy, engine = front(says(EVENTS + chunk(b'data: {"choices":[{"a":1}]}\n\n')))
    payload, clean = dechunked(raw(proxy.port, post(STREAM, path=path, close=False)))
    assert payload.startswith(b'data: {"choices":[{"a":1}]}\n\n') and not clean
    assert shape(path, payload)["error"]["type"] == "engine_lost"
    assert len(engine.requests) == 1


@pytest.mark.parametrize("half", [b'data: {"choices":[', b"data: 1\n", b"data: 1\r\n"])
def test_a_stream_that_breaks_inside_an_event_gets_nothing_added(front, half):
    proxy, engine = front(says(EVENTS + chunk(b"data: 0\n\n") + chunk(half)))
    assert dechunked(raw(proxy.port, post(STREAM, close=False))) == (b"data: 0\n\n" + half, False)
    assert len(engine.requests) == 1


def test_an_event_stream_of_a_fixed_length_that_breaks_gets_nothing_added(front):
    proxy, _ = front(says(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 5000\r\n\r\ndata: 0\n\n"))
    assert raw(proxy.port, post(STREAM)).partition(b"\r\n\r\n")[2] == b"data: 0\n\n"


# ----- many at once


def test_a_client_that_reads_slowly_delays_nobody_else(front):
    sent = threading.Event()

    def answer(request: bytes, sock: socket.socket) -> bool:
        if b"big" not in request:
            return echo(request, sock)
        with contextlib.suppress(OSError):
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (64 << 20) + b"x" * (64 << 20))
            sent.set()
        return True

    proxy, _ = front(answer)
    with Client(proxy, post({"model": "small", "x": "big"})) as slow:
        slow.until(b"\r\n\r\n")
        for _ in range(5):
            assert replies(raw(proxy.port, post(CHAT)))[0].status == 200
        assert not sent.is_set()
        assert len(slow.rest().partition(b"\r\n\r\n")[2]) == 64 << 20


def test_many_streams_at_once_are_all_complete_and_their_own(front):
    count = 40
    together = threading.Barrier(count)

    def answer(request: bytes, sock: socket.socket) -> bool:
        number = json.loads(Sent(request).body)["n"]
        together.wait(PATIENCE)
        sock.sendall(EVENTS)
        for token in range(30):
            sock.sendall(chunk(b"data: %d-%d\n\n" % (number, token)))
        sock.sendall(b"0\r\n\r\n")
        return True

    proxy, engine = front(answer)
    clients = [Client(proxy, post(dict(STREAM, n=n))) for n in range(count)]
    for number, client in enumerate(clients):
        with client:
            assert dechunked(client.rest()) == (b"".join(b"data: %d-%d\n\n" % (number, token) for token in range(30)), True)
    assert len(set(engine.on)) == count


# ----- /upstream/MODEL/…


@pytest.mark.parametrize(
    "path, target",
    [
        ("/upstream/small/props", "/props"),
        ("/upstream/small/", "/"),
        ("/upstream/small", "/"),
        ("/upstream/small/a//b/%2F%c3%a9;x=1/?q=%20+&&model=y", "/a//b/%2F%c3%a9;x=1/?q=%20+&&model=y"),
        ("/upstream/org/model:7b/v1/models", "/v1/models"),
        ("/upstream/org%2Fmodel:7b/v1/models?", "/v1/models"),
        ("http://box/upstream/small/x", "/x"),
        ("//upstream/small/x", "/x"),
    ],
)
def test_below_upstream_the_rest_of_the_path_reaches_the_engine_byte_for_byte(front, path, target):
    proxy, engine = front(echo, models=["small", "org/model:7b"])
    assert b" 200 OK" in raw(proxy.port, get(path))
    assert Sent(engine.requests[0]).line == f"GET {target} HTTP/1.1"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("body", [b"", b'{"model":"other", "stream":true}', b"{not json", b"\x00\xff" * 100])
def test_below_upstream_any_method_and_any_body_passes_as_it_is(front, method, body):
    proxy, engine = front(echo, models=["small", "other"])
    reply = replies(raw(proxy.port, post(body, path="/upstream/small/x").replace(b"POST", method.encode(), 1)))[0]
    assert reply.status == 200
    assert Sent(engine.requests[0]).line == f"{method} /x HTTP/1.1" and Sent(engine.requests[0]).body == body


def test_below_upstream_an_unknown_model_is_404(front):
    proxy, engine = front(echo)
    reply = replies(raw(proxy.port, get("/upstream/smal/props")))[0]
    assert (reply.status, reply.error["type"]) == (404, "not_found_error") and engine.requests == []


def test_a_base_path_of_an_engine_is_put_before_every_path(engine, inside):
    upstream = engine(echo)
    config = url_config(upstream.port)
    config["hosts"]["here"]["engines"]["e0"]["url"] += "/base/"
    proxy = inside(config)
    raw(proxy.port, post(CHAT))
    raw(proxy.port, get("/upstream/small/props"))
    assert [Sent(request).line for request in upstream.requests] == [
        "POST /base/v1/chat/completions HTTP/1.1",
        "GET /base/props HTTP/1.1",
    ]


def test_localhost_works_for_engines_on_either_family(inside, engine, monkeypatch):
    upstream = engine(echo)

    def resolve(host, port, *_, **__):
        return [
            (family, socket.SOCK_STREAM, 6, "", (ip, port))
            for family, ip in ((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1"))
        ]

    config = url_config(upstream.port)
    config["hosts"]["here"]["engines"]["e0"]["url"] = f"http://localhost:{upstream.port}"
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    proxy = inside(config)
    assert replies(raw(proxy.port, post(CHAT)))[0].status == 200
    assert Sent(upstream.requests[0]).get("host") == [f"localhost:{upstream.port}"]


def test_nothing_is_left_over_when_all_is_done(front):
    """Threads, leases and connections of ended exchanges are given back, however they ended."""

    def answer(request: bytes, sock: socket.socket) -> bool:
        if b"cut" in request:
            return says(EVENTS + chunk(b"data: 1\n\n"))(request, sock)
        return echo(request, sock)

    proxy, _ = front(answer)
    for body in (CHAT, {"model": "small", "x": "cut"}, {"model": "unknown"}):
        raw(proxy.port, post(body))
    with Client(proxy, post(CHAT, close=False)):
        pass
    eventually(lambda: not proxy._connections, "all connections are let go")
    assert proxy.counters.in_flight() == {"small": 0} and not proxy.counters.running

"""Section 3 by itself: header fields, body lengths, the chunked coding, wires, bodies, responses, the pool."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import socket
import struct
import threading
import time
from collections import deque

import pytest
from parts import PATIENCE, eventually, free_port
from hypothesis import given, settings
from hypothesis import strategies as st

import llmguard
from llmguard import (
    CHUNKED,
    NEVER,
    UNTIL_CLOSE,
    Address,
    Body,
    BodyTooLarge,
    Chunked,
    ClientGone,
    DeadlinePassed,
    EngineLost,
    Fields,
    HeadTooLarge,
    PeerGone,
    Pool,
    ProtocolError,
    Response,
    Wire,
    body_length,
)

EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "150"))
SAME_EVERY_TIME = settings(
    deadline=None, derandomize="HYPOTHESIS_EXAMPLES" not in os.environ, database=None, max_examples=EXAMPLES
)


def soon() -> float:
    """A deadline that only a hanging test meets."""
    return time.monotonic() + PATIENCE


@pytest.fixture
def pair():
    """(a wire, the plain socket at its other end) over TCP, as both sides of the proxy are."""
    made = []

    def make() -> tuple[Wire, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        theirs.settimeout(PATIENCE)
        made.extend([ours, theirs])
        return Wire(ours), theirs

    yield make
    for sock in made:
        sock.close()


def reset(sock: socket.socket) -> None:
    """Close with a RST, as a crashed peer's kernel does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def arrived(wire: Wire, count: int) -> None:
    """Wait until that many bytes stand in the wire's kernel buffer."""
    eventually(lambda: len(_peek(wire.sock)) >= count, "bytes arrive")


def _peek(sock: socket.socket) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return sock.recv(1 << 16, socket.MSG_PEEK)
    return b""


# ----- header fields

TOKEN_CHARS = "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
NAMES = st.text(TOKEN_CHARS, min_size=1, max_size=12)
VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=30).map(
    lambda v: v.strip(" ")
)
ONCE = {"host", "content-length", "transfer-encoding"}


@SAME_EVERY_TIME
@given(st.lists(st.tuples(NAMES, VALUES, st.sampled_from(["", " ", "\t", " \t "]))))
def test_every_valid_block_gives_its_fields_back_in_order(items):
    block = "".join(f"{name}:{blank}{value}{blank}\r\n" for name, value, blank in items)
    names = [name.lower() for name, _, _ in items]
    if any(names.count(name) > 1 for name in ONCE):
        with pytest.raises(ProtocolError):
            Fields(block)
        return
    fields = Fields(block)
    assert fields.items == [(name, value) for name, value, _ in items]
    for name in names:
        assert fields.get(name) == ", ".join(value for other, value, _ in items if other.lower() == name)


@SAME_EVERY_TIME
@given(st.text(st.sampled_from("Aa1:: \t\r\n\r\n\x00\x7f\x0b-é"), max_size=40))
def test_no_block_is_read_in_another_way_than_line_by_line(block):
    lines = re.split("\r\n", block)
    well_formed = lines.pop() == "" and all(re.fullmatch(r"[A-Za-z0-9-]+:[^\x00-\x08\x0a-\x1f\x7f]*", line) for line in lines)
    if not well_formed:
        with pytest.raises(ProtocolError):
            Fields(block)
        return
    assert Fields(block).items == [(line.partition(":")[0], line.partition(":")[2].strip(" \t")) for line in lines]


@pytest.mark.parametrize(
    "block",
    [
        "A: b\r\n folded\r\n",
        "A: b\r\n\tfolded\r\n",
        " A: b\r\n",
        "A : b\r\n",
        "A\t: b\r\n",
        ": b\r\n",
        "no colon\r\n",
        "A: b\x00\r\n",
        "A: b\rc\r\n",
        "A: b\nC: d\r\n",
        "A: b\r\r\n",
        "A: b\x0bc\r\n",
        "A: b",
        "A: b\n",
        "A(b): c\r\n",
        "É: c\r\n",
        "\r\n",
        "A: b\r\n\r\nC: d\r\n",
    ],
)
def test_a_malformed_field_is_refused(block):
    with pytest.raises(ProtocolError):
        Fields(block)


@pytest.mark.parametrize("name", ["Host", "Content-Length", "Transfer-Encoding"])
@pytest.mark.parametrize("second", ["1", "2", ""])
def test_a_repeated_framing_field_is_refused_even_when_both_say_the_same(name, second):
    with pytest.raises(ProtocolError):
        Fields(f"{name}: 1\r\nAccept: x\r\n{name.lower()}: {second}\r\n")


def test_fields_are_looked_up_in_lower_case_and_joined():
    fields = Fields("X-A: 1\r\nOther: \r\nx-a: 2\r\n")
    assert fields.get("x-a") == "1, 2"
    assert fields.get("absent") == "" and "absent" not in fields
    assert fields.get("other") == "" and "other" in fields


def test_a_token_is_a_whole_word_in_any_case():
    fields = Fields("Connection: Keep-Alive ,upgrade\r\nConnection: x-close\r\n")
    assert fields.has_token("connection", "keep-alive")
    assert fields.has_token("connection", "upgrade")
    assert not fields.has_token("connection", "close")
    assert not fields.has_token("upgrade", "websocket")


def test_hop_by_hop_fields_and_those_that_connection_names_do_not_travel_on():
    hop = "".join(f"{name.title()}: x\r\n" for name in sorted(llmguard.HOP_BY_HOP - {"connection", "transfer-encoding"}))
    fields = Fields(f"{hop}Connection: close, X-Mine\r\nX-Mine: 1\r\nX-Yours: 2\r\nCookie: c\r\nx-yours: 3\r\n")
    assert fields.end_to_end(frozenset(["cookie"]) | llmguard.HOP_BY_HOP) == [("X-Yours", "2"), ("x-yours", "3")]


# ----- how long a body is


@pytest.mark.parametrize(
    "block, length",
    [
        ("", UNTIL_CLOSE),
        ("Content-Length: 0\r\n", 0),
        ("Content-Length: 007\r\n", 7),
        ("Content-Length:  42 \r\n", 42),
        ("Transfer-Encoding: chunked\r\n", CHUNKED),
        ("transfer-encoding: Chunked\r\n", CHUNKED),
    ],
)
def test_a_body_is_as_long_as_its_fields_say(block, length):
    assert body_length(Fields(block), UNTIL_CLOSE) == length


SMUGGLED = [
    "Content-Length: +5\r\n",
    "Content-Length: -5\r\n",
    "Content-Length: 1_0\r\n",
    "Content-Length: 0x5\r\n",
    "Content-Length: 5 5\r\n",
    "Content-Length: 5, 5\r\n",
    "Content-Length: 5.0\r\n",
    "Content-Length: \r\n",
    "Content-Length: \xb2\r\n",
    "Content-Length: 1000000000000000000000\r\n",
    "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
    "Transfer-Encoding: identity\r\n",
    "Transfer-Encoding: \r\n",
    "Transfer-Encoding: xchunked\r\n",
    "Transfer-Encoding: chunked, identity\r\n",
    "Transfer-Encoding: chunked, chunked\r\n",
    "Transfer-Encoding: gzip, chunked\r\n",
    'Transfer-Encoding: "chunked"\r\n',
]


@pytest.mark.parametrize("block", SMUGGLED)
def test_a_length_that_could_be_read_in_two_ways_is_refused(block):
    with pytest.raises(ProtocolError):
        body_length(Fields(block), 0)


def test_http_1_0_has_no_chunks():
    with pytest.raises(ProtocolError):
        body_length(Fields("Transfer-Encoding: chunked\r\n"), 0, 0)


# ----- the chunked coding

EXTENSIONS = st.sampled_from(["", ";a", ";a=b", ' ;a="x y"', "\t;\xe9"])


@st.composite
def chunked_bodies(draw):
    """(the coding of a body, its payload)."""
    coded, payload = b"", b""
    for piece in draw(st.lists(st.binary(min_size=1, max_size=40))):
        number = draw(st.sampled_from(["%x", "%X", "000%x"])) % len(piece)
        coded += (number + draw(EXTENSIONS)).encode("latin-1") + b"\r\n" + piece + b"\r\n"
        payload += piece
    trailer = "".join(f"{name}: {value}\r\n" for name, value in draw(st.lists(st.tuples(NAMES, VALUES), max_size=2)))
    return coded + b"0" + draw(EXTENSIONS).encode("latin-1") + b"\r\n" + trailer.encode("latin-1") + b"\r\n", payload


def cut(data: bytes, places) -> list[bytes]:
    """The same bytes in pieces; a cut may fall anywhere, also twice in one place."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def decode(pieces) -> tuple[bytes, bool, bytes, bool]:
    """(payload, complete, what came after it, refused)."""
    chunks, payload, after = Chunked(), b"", b""
    try:
        for piece in pieces:
            if chunks.done:
                after += piece
            else:
                payload += chunks.feed(piece)
    except ProtocolError:
        return payload, False, b"", True
    return payload, chunks.done, chunks.rest + after, False


@SAME_EVERY_TIME
@given(chunked_bodies(), st.lists(st.integers(0, 1 << 16)), st.binary(max_size=20))
def test_any_payload_in_any_chunks_and_any_cuts_comes_back(body, places, after):
    coded, payload = body
    assert decode(cut(coded + after, places)) == (payload, True, after, False)
    assert decode(bytes([byte]) for byte in coded + after) == (payload, True, after, False)


@SAME_EVERY_TIME
@given(chunked_bodies(), st.integers(0, 1 << 16))
def test_a_body_that_was_cut_short_is_never_complete(body, place):
    coded, payload = body
    got, complete, after, refused = decode([coded[: place % len(coded)]])
    assert payload.startswith(got) and not complete and not after and not refused


def reference(data: bytes) -> tuple[bytes, bool, bytes, bool]:
    """The chunked coding read in the plainest way, by RFC 9112, 7.1: whole lines of a whole body."""
    payload, at = b"", 0
    while True:
        line, end, rest = data[at:].partition(b"\n")
        if not end:
            return payload, False, b"", False
        match = re.fullmatch(rb"([0-9A-Fa-f]{1,15})([ \t]*;[\t\x20-\x7e\x80-\xff]*)?\r", line)
        if not match:
            return payload, False, b"", True
        size = int(match[1], 16)
        if not size:
            break
        piece, crlf = rest[:size], rest[size : size + 2]
        payload += piece
        if not b"\r\n".startswith(crlf):
            return payload, False, b"", True
        if len(crlf) < 2:
            return payload, False, b"", False
        at = len(data) - len(rest) + size + 2
    while True:
        line, end, rest = rest.partition(b"\n")
        if not end:
            return payload, False, b"", False
        if line == b"\r":
            return payload, True, rest, False
        if not re.fullmatch(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*\r", line):
            return payload, False, b"", True


GARBAGE = st.one_of(
    st.binary(max_size=40),
    st.text(st.sampled_from("0123aF;:=x+_- \t\r\n\r\n\x00é"), max_size=40).map(lambda t: t.encode("latin-1")),
)


@SAME_EVERY_TIME
@given(
    st.one_of(GARBAGE, st.tuples(chunked_bodies(), GARBAGE).map(lambda both: both[1].join(cut(both[0][0], [7])))),
    st.lists(st.integers(0, 99)),
)
def test_garbage_gives_what_the_rules_give_however_it_is_cut(data, places):
    wanted = reference(data)
    for pieces in ([data], cut(data, places), [bytes([byte]) for byte in data]):
        payload, complete, after, refused = decode(pieces)
        assert (complete, after, refused) == wanted[1:]
        assert wanted[0].startswith(payload) and (refused or payload == wanted[0])


BAD_SIZES = ["+5", "-5", "0x5", "1_0", "", " 5", "5 ", "5\t", "g", "5;a\rb", "5\x00", "\xb2", "1" * 16]


@pytest.mark.parametrize("size", BAD_SIZES)
def test_a_chunk_size_is_nothing_but_hex_digits(size):
    with pytest.raises(ProtocolError):
        Chunked().feed(size.encode("latin-1") + b"\r\nhello\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    "coded",
    [
        b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhello!\r\n0\r\n\r\n",
        b"0\r\n\n",
        b"0\r\nA b\r\n\r\n",
        b"0\r\n folded: x\r\n\r\n",
    ],
)
def test_a_line_that_ends_otherwise_is_refused(coded):
    with pytest.raises(ProtocolError):
        Chunked().feed(coded)


@pytest.mark.parametrize("prefix", [b"5;", b"0\r\nA: "])
@pytest.mark.parametrize("piece", [1, 1000, 1 << 20])
def test_an_endless_line_is_refused_however_it_comes(prefix, piece):
    data = prefix + b"a" * (2 * Chunked.MAX_LINE) + b"\r\n\r\n"
    assert decode(data[at : at + piece] for at in range(0, len(data), piece))[3]


def test_endless_trailers_are_refused():
    with pytest.raises(ProtocolError):
        Chunked().feed(b"0\r\n" + b"A: b\r\n" * llmguard.MAX_HEAD)


# ----- wires


def test_a_head_is_found_however_it_trickles_and_what_follows_is_kept(pair):
    wire, peer = pair()
    text = b"GET / HTTP/1.1\r\nA: b\r\n\r\nbody and more"

    def trickle() -> None:
        for byte in text:
            peer.sendall(bytes([byte]))
        peer.close()

    threading.Thread(target=trickle, daemon=True).start()
    assert wire.head(soon()) == "GET / HTTP/1.1\r\nA: b\r\n"
    while wire.fill(soon()):
        pass
    assert wire.buffer == b"body and more"


def test_a_head_is_empty_when_the_peer_closed_before_a_byte_and_an_error_after_one(pair):
    wire, peer = pair()
    peer.close()
    assert wire.head(soon()) == ""
    wire, peer = pair()
    peer.sendall(b"GET / HT")
    peer.close()
    with pytest.raises(PeerGone):
        wire.head(soon())


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
def test_an_endless_head_is_refused(pair, end):
    wire, peer = pair()
    threading.Thread(target=lambda: peer.sendall(b"A: b\r\n" * (llmguard.MAX_HEAD // 6 + 1) + end), daemon=True).start()
    with pytest.raises(HeadTooLarge):
        wire.head(soon())


def test_a_deadline_that_is_over_ends_a_wait_at_once_but_not_what_has_come(pair):
    wire, peer = pair()
    with pytest.raises(DeadlinePassed):
        wire.read(time.monotonic() - 1)
    peer.sendall(b"x")
    arrived(wire, 1)
    assert wire.read(time.monotonic() - 1) == b"x"


def test_a_reset_reads_as_an_end(pair):
    wire, peer = pair()
    reset(peer)
    assert wire.read(soon()) == b""


def test_a_large_write_arrives_whole_at_a_reader_that_comes_late(pair):
    wire, peer = pair()
    data = os.urandom(1 << 20) * 8
    received = bytearray()

    def read() -> None:
        while piece := peer.recv(1 << 16):
            received.extend(piece)

    writer = threading.Thread(target=lambda: (wire.write(data), wire.close()), daemon=True)
    writer.start()
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(PATIENCE)
    assert bytes(received) == data


def test_a_write_ends_when_the_peer_goes_takes_nothing_or_answers_instead(pair):
    data = b"x" * (64 << 20)
    wire, peer = pair()
    with pytest.raises(PeerGone):
        wire.write(data, stall=0.01)
    wire, peer = pair()
    peer.sendall(b"HTTP/1.1 413 No\r\n\r\n")
    arrived(wire, 1)
    with pytest.raises(PeerGone):
        wire.write(data, heed=True)
    assert wire.read(soon()) == b"HTTP/1.1 413 No\r\n\r\n"
    wire, peer = pair()
    threading.Thread(target=lambda: (peer.recv(1), reset(peer)), daemon=True).start()
    with pytest.raises(PeerGone):
        wire.write(data)


@pytest.mark.parametrize("leave", [socket.socket.close, reset, lambda sock: sock.shutdown(socket.SHUT_WR)])
def test_a_watched_client_that_leaves_ends_the_wait_for_a_silent_engine(pair, leave):
    engine, _ = pair()
    client, person = pair()
    leave(person)
    with pytest.raises(ClientGone):
        engine.read(NEVER, client)


def test_what_a_watched_client_sends_ahead_is_kept_and_ends_no_wait(pair):
    engine, answering = pair()
    client, person = pair()
    person.sendall(b"next request")
    arrived(client, 12)
    with pytest.raises(DeadlinePassed):
        engine.read(time.monotonic() + 0.01, client)
    assert client.buffer == b"next request"
    answering.sendall(b"answer")
    assert engine.read(soon(), client) == b"answer"


def test_a_watched_client_that_floods_is_read_up_to_a_bound_and_still_missed_when_it_is_gone(pair):
    engine, answering = pair()
    client, person = pair()
    person.setblocking(False)
    looks = 0

    def flood() -> None:
        with contextlib.suppress(BlockingIOError):
            person.send(b"x" * (1 << 20))

    flood()
    while True:
        looks += 1
        before = len(client.buffer)
        with pytest.raises(DeadlinePassed):
            engine.read(time.monotonic() + 0.01, client)
        flood()
        if len(client.buffer) == before:
            break
    assert len(client.buffer) <= 3 * llmguard.PIECE
    reset(person)
    with pytest.raises(ClientGone):
        engine.read(NEVER, client)


def test_an_idle_connection_is_fresh_until_anything_comes_on_it(pair):
    wire, peer = pair()
    assert wire.fresh()
    peer.sendall(b"HTTP/1.1 408 Late\r\n\r\n")
    arrived(wire, 1)
    assert not wire.fresh()
    wire, peer = pair()
    peer.close()
    eventually(lambda: not wire.fresh(), "the end is seen")
    wire, peer = pair()
    reset(peer)
    eventually(lambda: not wire.fresh(), "the reset is seen")


# ----- bodies

FRAMINGS = {
    "length": (11, b"hello world"),
    "chunked": (CHUNKED, b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"),
    "close": (UNTIL_CLOSE, b"hello world"),
}


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("piece", [1, 4, 100])
def test_a_body_is_whole_in_each_framing_and_what_follows_is_left(pair, framing, piece):
    length, coded = FRAMINGS[framing]
    after = b"" if framing == "close" else b"HTTP/1.1 next"
    wire, peer = pair()

    def send() -> None:
        for at in range(0, len(coded + after), piece):
            peer.sendall((coded + after)[at : at + piece])
        peer.close()

    threading.Thread(target=send, daemon=True).start()
    body = Body(wire, length)
    assert body.all(soon(), 100) == b"hello world"
    assert body.complete and body.read(soon()) == b""
    while wire.fill(soon()):
        pass
    assert wire.buffer == after


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("end", [socket.socket.close, reset])
def test_a_body_that_is_cut_short_is_an_error(pair, framing, end):
    length, coded = FRAMINGS[framing]
    for count in range(len(coded)):
        wire, peer = pair()
        peer.sendall(coded[:count])
        arrived(wire, count)
        end(peer)
        body = Body(wire, length)
        with pytest.raises(PeerGone):
            body.all(soon(), 100)
        assert not body.complete


def test_a_body_until_close_that_ends_in_a_reset_is_cut_short_too(pair):
    wire, peer = pair()
    peer.sendall(b"hello")
    body = Body(wire, UNTIL_CLOSE)
    assert body.read(soon()) == b"hello"
    reset(peer)
    with pytest.raises(PeerGone):
        body.read(soon())
    assert not body.complete


def test_a_body_of_no_length_is_complete_before_a_byte_is_read(pair):
    wire, _ = pair()
    body = Body(wire, 0)
    assert body.complete and body.read(time.monotonic() - 1) == b""


def test_a_body_above_the_limit_is_refused_and_one_of_just_that_size_is_not(pair):
    for limit in (10, 11):
        wire, peer = pair()
        peer.sendall(b"hello world")
        with pytest.raises(BodyTooLarge) if limit < 11 else contextlib.nullcontext():
            assert Body(wire, 11).all(soon(), limit) == b"hello world"


# ----- responses


def responded(pair, data: bytes, method: str = "GET") -> Response:
    wire, peer = pair()
    peer.sendall(data)
    peer.close()
    return Response(wire, method, soon())


def test_interim_answers_are_skipped_all_of_them(pair):
    wire, peer = pair()
    peer.sendall(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </s.css>\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 404 Next\r\n\r\n"
    )
    response = Response(wire, "GET", soon())
    assert (response.status, response.reason, response.body.all(soon(), 10)) == (200, "OK", b"ok")
    assert response.fields.items == [("Content-Length", "2")]
    assert Response(wire, "GET", soon()).status == 404


def test_an_interim_answer_alone_is_no_answer_and_no_silence_either(pair):
    with pytest.raises(ProtocolError):  # not PeerGone: the engine has begun, so its request is not sent once more
        responded(pair, b"HTTP/1.1 100 Continue\r\n\r\n")
    with pytest.raises(PeerGone):
        responded(pair, b"")


@pytest.mark.parametrize(
    "status, method", [("204 No Content", "GET"), ("304 Not Modified", "GET"), ("200 OK", "HEAD"), ("404 No", "HEAD")]
)
@pytest.mark.parametrize("framing", ["Content-Length: 12", "Transfer-Encoding: chunked", "X: y"])
def test_some_answers_have_no_body_whatever_their_fields_say(pair, status, method, framing):
    wire, peer = pair()
    peer.sendall(f"HTTP/1.1 {status}\r\n{framing}\r\n\r\n".encode())
    response = Response(wire, method, soon())
    assert response.body.complete and response.reusable


@pytest.mark.parametrize(
    "head, reusable",
    [
        ("HTTP/1.1 200 OK\r\nContent-Length: 2", True),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", True),
        ("HTTP/1.1 200\r\nContent-Length: 2", True),
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: Close", False),
        ("HTTP/1.1 200 OK\r\nX: no length", False),
        ("HTTP/1.0 200 OK\r\nContent-Length: 2\r\nConnection: Keep-Alive", False),
        ("HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nKeep-Alive: timeout=2, max=100", False),
    ],
)
def test_only_a_connection_whose_answer_has_a_clear_end_is_used_again(pair, head, reusable):
    assert responded(pair, head.encode() + b"\r\n\r\nok").reusable is reusable


@pytest.mark.parametrize(
    "head",
    [
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked",
        "HTTP/1.1 200 OK\r\nContent-Length: +2",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip",
        "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked",
        "HTTP/1.1 200 OK\r\nA: b\rSet-Cookie: c",
        "HTTP/1.1 200 OK\r\nA: b\n folded",
        "HTTP/1.1 200 OK\r\nA: b\r\n folded",
        "HTTP/1.1 200 OK\r\nA : b",
        "HTTP/1.1 200 O\rK",
        "HTTP/1.1 99 OK",
        "HTTP/1.1 2000 OK",
        "HTTP/1.1  200 OK",
        "HTTP/2.0 200 OK",
        "http/1.1 200 OK",
        "ICY 200 OK",
        "SSH-2.0-OpenSSH_9.2",
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket",
    ],
)
def test_a_malformed_answer_is_refused(pair, head):
    with pytest.raises(ProtocolError):
        responded(pair, head.encode() + b"\r\n\r\nok")


@pytest.mark.parametrize(
    "kind, is_stream",
    [
        ("text/event-stream", True),
        ("Text/Event-Stream; charset=utf-8", True),
        ("application/json", False),
        ("text/event-streams", False),
    ],
)
def test_an_event_stream_is_known_by_its_type(pair, kind, is_stream):
    assert responded(pair, f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\n".encode()).is_event_stream is is_stream


# ----- addresses and the pool


@pytest.mark.parametrize(
    "url, address, authority",
    [
        ("http://127.0.0.1:8080", Address("127.0.0.1", 8080), "127.0.0.1:8080"),
        ("http://localhost:5801/base/", Address("localhost", 5801, "/base"), "localhost:5801"),
        ("http://[::1]:5802/", Address("::1", 5802), "[::1]:5802"),
        ("http://box", Address("box", 80), "box:80"),
    ],
)
def test_an_engines_url_is_an_address(url, address, authority):
    assert Address.of_url(url) == address and address.authority == authority


@pytest.mark.parametrize(
    "url", ["https://box", "box:8080", "http://", "http://u:p@box", "http://box?x=1", "http://box:99999", "ftp://box"]
)
def test_what_is_no_plain_http_url_is_refused(url):
    with pytest.raises(ValueError):
        Address.of_url(url)


@pytest.fixture
def listener():
    """listen(address) -> a listening socket whose connections nobody accepts."""
    made = []

    def listen(host: str = "127.0.0.1", port: int = 0, backlog: int = 10) -> socket.socket:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(backlog)
        made.append(sock)
        return sock

    yield listen
    for sock in made:
        sock.close()


def address_of(sock: socket.socket) -> Address:
    return Address(*sock.getsockname()[:2])


def test_a_kept_connection_is_used_again_while_it_is_good(listener):
    pool = Pool(address_of(listener()))
    assert pool.take() is None
    wire = pool.connect(soon())
    pool.give(wire)
    assert pool.take() is wire
    pool.give(wire)
    wire.idle_since -= Pool.IDLE + 1
    assert pool.take() is None


def test_a_kept_connection_that_the_engine_closed_is_not_used_again(listener):
    listening = listener()
    pool = Pool(address_of(listening))
    wire = pool.connect(soon())
    listening.accept()[0].close()
    eventually(lambda: not wire.fresh(), "the close arrives")
    pool.give(wire)
    assert pool.take() is None


def test_kept_connections_are_bounded_in_number_and_age(listener, monkeypatch):
    monkeypatch.setattr(Pool, "KEPT", 2)
    pool = Pool(address_of(listener()))
    wires = [pool.connect(soon()) for _ in range(4)]
    pool.give(wires[0])
    wires[0].idle_since -= Pool.IDLE + 1
    pool.give(wires[1])
    assert wires[0].sock.fileno() == -1
    pool.give(wires[2])
    pool.give(wires[3])
    assert wires[1].sock.fileno() == -1
    assert [pool.take(), pool.take(), pool.take()] == [wires[3], wires[2], None]


def test_giving_a_connection_back_survives_another_thread_that_takes_the_last_one(listener):
    class Raced(deque):
        def __getitem__(self, index):
            self.clear()  # between the look and the act
            return super().__getitem__(index)

    pool = Pool(address_of(listener()))
    pool._idle = Raced()
    pool.give(pool.connect(soon()))
    assert pool.take() is None


def resolved_to(monkeypatch, *addresses: tuple[str, int]) -> list[bytes]:
    """Names resolve to these addresses; returns the list of the names that were asked for."""
    asked = []

    def resolve(host, port, type):
        asked.append(host)
        return [(socket.AF_INET6 if ":" in ip else socket.AF_INET, type, 6, "", (ip, number)) for ip, number in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return asked


@pytest.mark.parametrize("family", ["127.0.0.1", "::1"])
def test_localhost_works_whichever_of_its_addresses_the_engine_listens_on(listener, monkeypatch, family):
    with contextlib.suppress(OSError):
        listening = listener(family)
        port = listening.getsockname()[1]
        resolved_to(monkeypatch, ("::1", port), ("127.0.0.1", port))
        Pool(Address("localhost", port)).connect(soon()).close()
        assert listening.accept()[1][0] == family


def test_the_address_that_worked_is_tried_first_and_the_resolver_is_not_asked_each_time(listener, monkeypatch):
    port, nobody = listener().getsockname()[1], free_port()
    asked = resolved_to(monkeypatch, ("127.0.0.1", nobody), ("127.0.0.1", port))
    tried = []
    connect = llmguard._connect
    monkeypatch.setattr(llmguard, "_connect", lambda sock, where, *rest: (tried.append(where[1]), connect(sock, where, *rest)))
    pool = Pool(Address("box", 1))
    pool.connect(soon())
    pool.connect(soon())
    assert (tried, asked) == ([nobody, port, port], [b"box"])


def test_a_name_whose_address_changed_is_found_again(listener, monkeypatch):
    nobody = free_port()
    asked = resolved_to(monkeypatch, ("127.0.0.1", nobody))
    pool = Pool(Address("box", 1))
    with pytest.raises(EngineLost):
        pool.connect(soon())
    resolved_to(monkeypatch, ("127.0.0.1", listener().getsockname()[1]))
    pool.connect(soon())  # a failure forgets what was believed
    assert asked == [b"box"]
    now = time.monotonic()
    asked = resolved_to(monkeypatch, ("127.0.0.1", listener().getsockname()[1]))
    monkeypatch.setattr(llmguard.time, "monotonic", lambda: now + Pool.REMEMBERED + 1)
    pool.connect(now + 2 * PATIENCE + Pool.REMEMBERED)
    assert asked == [b"box"]


def test_when_nobody_listens_the_error_says_so(monkeypatch):
    port = free_port()
    with pytest.raises(EngineLost) as lost:
        Pool(Address("127.0.0.1", port)).connect(soon())
    assert lost.value.fields["refused"] is True
    assert str(port) in lost.value.fields["detail"] and str(port) not in str(lost.value)


@pytest.fixture
def swallowing(listener):
    """An address that swallows the SYN: a listener whose queue is full."""
    listening = listener(backlog=0)
    fillers = []
    while True:
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(listening.getsockname())
        fillers.append(filler)
        if len(fillers) > 4:
            break
    yield listening.getsockname()
    for filler in fillers:
        filler.close()


def test_an_address_that_swallows_the_syn_is_given_up_for_the_next_one(swallowing, listener, monkeypatch):
    monkeypatch.setattr(Pool, "PER_ADDRESS", 0.05)
    good = listener()
    resolved_to(monkeypatch, swallowing, good.getsockname())
    Pool(Address("box", 1)).connect(soon())
    good.accept()


def test_a_swallowed_syn_is_no_refusal(swallowing, monkeypatch):
    monkeypatch.setattr(Pool, "PER_ADDRESS", 0.05)
    with pytest.raises(EngineLost) as lost:
        Pool(Address(*swallowing)).connect(soon())
    assert lost.value.fields["refused"] is False


def test_a_client_that_leaves_ends_the_wait_for_a_connection(swallowing, pair):
    client, person = pair()
    person.close()
    with pytest.raises(ClientGone):
        Pool(Address(*swallowing)).connect(soon(), client)


def test_an_unknown_name_is_a_lost_engine(monkeypatch):
    def fail(*_, **__):
        raise socket.gaierror(errno.ENOENT, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(EngineLost):
        Pool(Address("nowhere", 1)).connect(soon())


# ----- a whole exchange


def test_a_request_sends_json_and_the_key_and_closes(stub_engine):
    engine = stub_engine(lambda request, sock: sock.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"ok":true}'))
    reply = llmguard.request(Pool(Address("127.0.0.1", engine.port, "/base")), "POST", "/path", body={"a": 1}, key="secret")
    assert (reply.status, reply.json()) == (200, {"ok": True})
    head, _, body = engine.requests[0].partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /base/path HTTP/1.1"
    assert {"Connection: close", "Authorization: Bearer secret", "Content-Length: 8", "Content-Type: application/json"} <= set(
        lines
    )
    assert json.loads(body) == {"a": 1}


def test_a_request_to_a_mute_server_ends_at_its_deadline(listener):
    with pytest.raises(DeadlinePassed):
        llmguard.request(Pool(address_of(listener())), "GET", "/", seconds=0.05)


def test_a_reply_above_the_limit_is_not_kept(stub_engine):
    engine = stub_engine(lambda request, sock: sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100_000))
    with pytest.raises(BodyTooLarge):
        llmguard.request(Pool(Address("127.0.0.1", engine.port)), "GET", "/", limit=1000)


@pytest.mark.parametrize("body", [b"", b"no", b"\xff", b"[" * 100_000])
def test_a_reply_that_is_no_json_reads_as_none(body):
    assert llmguard.Reply(200, Fields(""), body).json() is None

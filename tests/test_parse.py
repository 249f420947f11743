"""What a request may look like: bodies, the request line, fields, paths, keys; and every refusal of the HTTP front."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import json
import mmap
import os
import random
import re
import socket
import tempfile
import threading
from pathlib import Path

import pytest
from parts import PATIENCE, Sent, Serving, Upstream, echo, eventually, raw, replies, url_config
from hypothesis import given, settings
from hypothesis import strategies as st

import llmguard
from llmguard import BadRequest, UnsupportedCoding, asked_in_form, asked_in_json, body_decoder

EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "120"))
SAME_EVERY_TIME = settings(
    deadline=None, derandomize="HYPOTHESIS_EXAMPLES" not in os.environ, database=None, max_examples=EXAMPLES
)

# ----- the model and `stream` in a JSON body


@st.composite
def json_texts(draw, value) -> str:
    """`value` in one of the ways that JSON has to write it; a list of pairs is an object, so that keys may repeat."""
    gap = draw(st.sampled_from(["", "", " ", "\n", " \t\r\n"]))
    if isinstance(value, tuple):
        pairs = [gap + draw(json_texts(key)) + gap + ":" + gap + draw(json_texts(item)) + gap for key, item in value]
        return "{" + (",".join(pairs) or gap) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gap + draw(json_texts(item)) + gap for item in value) + "]"
    if isinstance(value, str):
        how = draw(st.sampled_from(["ascii", "plain", "escaped"]))
        if how == "escaped":
            return '"' + "".join("\\u%04x" % unit for unit in _utf16(value)) + '"'
        return json.dumps(value, ensure_ascii=how == "ascii" or any("\ud800" <= sign <= "\udfff" for sign in value))
    return json.dumps(value)


def _utf16(text: str) -> list[int]:
    data = text.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2)]


TEXTS = st.one_of(st.text(max_size=8), st.text(st.sampled_from('"\\/{}[]:, model'), max_size=12))
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS)
KEYS = st.one_of(st.sampled_from(["model", "stream", "messages", "Model", "model "]), TEXTS)
VALUES = st.recursive(
    st.one_of(PLAIN, st.sampled_from(["small", "large", True])),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.lists(st.tuples(KEYS, inner), max_size=4).map(tuple)),
    max_leaves=12,
)
OBJECTS = st.lists(st.tuples(KEYS, VALUES), max_size=6).map(tuple)


def read_whole(data: bytes):
    """(model, stream) as a parser of the whole body reads them; None when it is to be refused."""
    pairs = json.loads(data, object_pairs_hook=lambda pairs: tuple(pairs))
    assert isinstance(pairs, tuple)
    models = [value for key, value in pairs if key == "model"]
    streams = [value for key, value in pairs if key == "stream"]
    if any(model is not None and not isinstance(model, str) for model in models) or any(model != models[0] for model in models):
        return None
    return (models[0] if models else None), bool(streams) and streams[-1] is True


def agrees(data, whole) -> None:
    if whole is None:
        with pytest.raises(BadRequest):
            asked_in_json(data)
        return
    asked = asked_in_json(data)
    assert (asked.model, asked.stream) == whole
    assert all(json.loads(bytes(data[start:end])) == asked.model for start, end in asked.spans)


def mapped(data: bytes) -> mmap.mmap:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@SAME_EVERY_TIME
@given(OBJECTS.flatmap(json_texts), st.sampled_from([b"", b"\xef\xbb\xbf"]), st.booleans())
def test_any_json_object_is_read_as_a_whole_parser_reads_it(text, mark, large):
    data = mark + text.encode()
    agrees(mapped(data) if large else data, read_whole(data))


@SAME_EVERY_TIME
@given(
    OBJECTS.flatmap(json_texts),
    st.integers(0, 1 << 16),
    st.integers(0, 2),
    st.sampled_from([b"", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"x", b"\xff", b"\x00", b"1"]),
)
def test_a_damaged_object_is_refused_or_read_as_a_whole_parser_reads_it(text, place, cut, put):
    data = text.encode()
    place %= len(data) + 1
    data = data[:place] + put + data[place + cut :]
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, dict):
        agrees(data, read_whole(data))
        return
    try:  # what stands inside a value is the engine's to refuse, but then the proxy has not guessed a model from it
        asked = asked_in_json(data)
    except BadRequest:
        return
    assert asked.model is None or json.dumps(asked.model) in json.dumps([json.loads(data[a:b]) for a, b in asked.spans])


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4094, 4095, 4096, 4097, 4098, 8192, 8193, 50_000])
def test_a_quote_is_escaped_by_an_odd_number_of_backslashes_only(count):
    inside = '"model":"wrong",' if count % 2 else ""
    body = '{"x":"' + "\\" * count + ('"' + inside.replace('"', '\\"') + '"' if count % 2 else '"') + ',"model":"small"}'
    assert json.loads(body)["model"] == "small"
    for data in (body.encode(), mapped(body.encode())):
        assert asked_in_json(data).model == "small"


def test_the_model_behind_megabytes_of_base64_and_of_escapes_is_found():
    for filler in ('"' + "QUJD" * (1 << 20) + '"', json.dumps('"\\' * (1 << 17)), "[" + "1," * (1 << 19) + "1]"):
        body = f'{{"messages":{filler},"model":"small","stream":true}}'.encode()
        for data in (body, mapped(body)):
            asked = asked_in_json(data)
            assert (asked.model, asked.stream) == ("small", True)
            assert [data[slice(*span)] for span in asked.spans] == [b'"small"']


@SAME_EVERY_TIME
@given(st.lists(st.tuples(st.integers(0, 450), st.sampled_from(['"', "\\", "\n", "[", "}", 'é"', '","model":"wrong'])), max_size=600))
def test_code_in_a_prompt_is_skipped_whatever_is_escaped_in_it(pieces):
    text = "".join("x" * length + sign for length, sign in pieces)
    for value in (text, [text, {"content": text, text[-1:]: [1]}]):
        body = json.dumps({"messages": value, "model": "small"}).encode()
        agrees(body, ("small", False))


@pytest.mark.parametrize("stream", ['"true"', '"false"', "1", "0", "null", "false", "{}", "[true]", "True"])
def test_nothing_but_true_is_a_stream(stream):
    assert asked_in_json(f'{{"model":"small","stream":{stream}}}'.encode()).stream is False


AMBIGUOUS = [
    '{"model":"small","messages":[],"model":"a9-ornith15-35b-q8"}',
    '{"model":"small","mod\\u0065l":"a9-ornith15-35b-q8"}',
    '{"model":null,"model":"small"}',
    '{"model":7,"messages":[]}',
    '{"model":true}',
    '{"model":["small"],"messages":[]}',
    '{"model":{"id":"small"}}',
    '{"model":"small","messages":[]} trailing',
    '{"model":"small"}{}',
    '[{"model":"small"}]',
    '"small"',
    "null",
    "",
    "{",
    "{}}",
    '{"model":"small"',
    '{"model":"small',
    '{"model":"small",}',
    '{,"model":"small"}',
    '{"x":1,,"model":"small"}',
    '{"model":}',
    '{"model"}',
    '{model:"small"}',
    "{'model':'small'}",
    '{"model":"small","x":[}',
    '{"model":"sm\nall"}',
    '{"model":"sm\\xall"}',
    '{"x":' + "[" * 10_000 + "]" * 10_000 + ',"model":"small"}',
    "[" * 100_000,
    '{"a":' * 10_000,
    '{"model":"small"}'.encode("utf-16"),
    '{"model":"small"}'.encode("utf-16-le"),
    b'{"mod\xffel":"small"}',
    b'{"model":"sm\xffall"}',
    b'\x28\xb5\x2f\xfd {"model":"small"}',
    b"\xef\xbb\xbf",
]


@pytest.mark.parametrize("body", AMBIGUOUS, ids=lambda body: repr(body[:40]))
def test_what_could_be_read_in_two_ways_or_not_at_all_is_a_bad_request(body):
    with pytest.raises(BadRequest):
        asked_in_json(body.encode() if isinstance(body, str) else body)


@pytest.mark.parametrize(
    "body, model",
    [
        ('{"model":"small","messages":[],"model":"small"}', "small"),
        ('{"messages":[{"content":"{\\"model\\":\\"x\\"}"}],"metadata":{"model":"x"},"model":"small"}', "small"),
        ('{"model":null,"messages":[]}', None),
        ('{"messages":[]}', None),
        ('{"model":""}', ""),
        ('{"model":" small "}', " small "),
        ('{"mod\\u0065l":"small"}', "small"),
        ('{"model":"sm\\u0061ll"}', "small"),
        ('{"model":"small","temperature":NaN}', "small"),
        ('\ufeff{"model":"small"}', "small"),
        (' \r\n{"model":"small"}\n', "small"),
    ],
)
def test_what_can_be_read_in_one_way_only_is_read(body, model):
    assert asked_in_json(body.encode()).model == model


# ----- the model in a form


def form(*parts: tuple[str, bytes], boundary: str = "XX", preamble: bytes = b"") -> bytes:
    lines = b"".join(
        b"--%b\r\nContent-Disposition: %b\r\n\r\n%b\r\n" % (boundary.encode(), head.encode(), body) for head, body in parts
    )
    return preamble + lines + b"--" + boundary.encode() + b"--\r\n"


FILE = ('form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav', b"RIFF\r\n\r\n\x00\xff--X\r\n--Y")


@pytest.mark.parametrize(
    "name", ['form-data; name="model"', "form-data; name=model", 'Form-Data;name="model"', 'form-data; charset=x; name="model"']
)
@pytest.mark.parametrize(
    "kind",
    [
        "multipart/form-data; boundary=XX",
        'multipart/form-data; boundary="XX"',
        "Multipart/Form-Data; charset=utf-8; boundary=XX; x=y",
    ],
)
def test_a_forms_model_is_found_whatever_stands_around_it(name, kind):
    for parts in ([(name, b"small"), FILE], [FILE, (name, b"small")]):
        data = form(*parts)
        for body in (data, mapped(data), b"preamble\r\n" + data):
            asked = asked_in_form(body, kind)
            assert (asked.model, asked.stream) == ("small", False)
            assert [bytes(body[slice(*span)]) for span in asked.spans] == [b"small"]


@pytest.mark.parametrize(
    "head",
    [
        'form-data; name="file"; filename="x; name=model"',
        'form-data; name="x"; filename="a\\"; name=model"',
        'form-data; name="models"',
        'form-data; name="submodel"',
        'form-data; filename="model"; name="x"',
    ],
)
def test_another_fields_words_are_no_model(head):
    assert (
        asked_in_form(form((head, b"wrong"), ('form-data; name="model"', b"small")), "multipart/form-data; boundary=XX").model
        == "small"
    )
    assert asked_in_form(form((head, b"wrong")), "multipart/form-data; boundary=XX").model is None


def test_a_form_of_two_models_or_without_a_boundary_is_a_bad_request():
    two = form(('form-data; name="model"', b"small"), ('form-data; name="model"', b"large"))
    with pytest.raises(BadRequest):
        asked_in_form(two, "multipart/form-data; boundary=XX")
    with pytest.raises(BadRequest):
        asked_in_form(two, "multipart/form-data")
    same = form(('form-data; name="model"', b"small"), ('form-data; name="model"', b"small"))
    assert asked_in_form(same, "multipart/form-data; boundary=XX").model == "small"


def test_a_field_without_an_end_of_its_head_has_no_value():
    head = b'--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\n'
    body = head + head + b"small\r\n--XX--"
    asked = asked_in_form(body, "multipart/form-data; boundary=XX")
    assert asked.model == "small" and [body[slice(*span)] for span in asked.spans] == [b"small"]


def test_a_form_of_a_million_boundaries_is_read_in_one_pass():
    assert asked_in_form(b"--b" + b"\r\n--b" * (1 << 20) + b"\r\n\r\n", "multipart/form-data; boundary=b").model is None


@SAME_EVERY_TIME
@given(
    st.binary(max_size=60),
    st.lists(
        st.sampled_from([b"--XX", b"\r\n", b"\r\n\r\n", b'Content-Disposition: form-data; name="model"', b"--"]), max_size=8
    ),
)
def test_a_damaged_form_never_fails_otherwise_than_as_a_bad_request(noise, pieces):
    try:
        asked = asked_in_form(noise.join(pieces), "multipart/form-data; boundary=XX")
    except BadRequest:
        return
    assert asked.model is None or asked.spans


# ----- codings of a request's body

PACK = {"gzip": gzip.compress}
with contextlib.suppress(ImportError):
    from compression import zstd  # Python 3.14

    PACK["zstd"] = zstd.compress


def decoded(coding: str, pieces, limit: int = 1 << 30) -> bytes:
    upload = llmguard.Upload(limit, body_decoder(coding, limit))
    try:
        for piece in pieces:
            upload.add(piece)
        upload.finish()
        return bytes(upload.data)
    finally:
        upload.close()


@SAME_EVERY_TIME
@given(st.binary(max_size=2000), st.integers(1, 50), st.sampled_from(["gzip", "x-gzip", "GZIP", " gzip ", *PACK]))
def test_any_packed_body_in_any_cuts_is_decoded(payload, piece, coding):
    data = PACK.get(coding, gzip.compress)(payload * 3)
    assert decoded(coding, (data[at : at + piece] for at in range(0, len(data), piece))) == payload * 3


@pytest.mark.parametrize("coding", PACK)
def test_a_large_packed_body_is_decoded_whole(coding):
    payload = random.Random(1).randbytes(1 << 20) + bytes(10 << 20)
    assert decoded(coding, [PACK[coding](payload, 1)]) == payload


@pytest.mark.parametrize("coding", PACK)
@pytest.mark.parametrize("count", range(1, 25))
def test_a_packed_body_that_is_cut_short_is_refused(count, coding):
    with pytest.raises(BadRequest):
        decoded(coding, [PACK[coding](b'{"model":"small"}')[:-count]])


@pytest.mark.parametrize("coding", PACK)
@pytest.mark.parametrize("damage", [lambda one: [b"plain"], lambda one: [one + b"rest"], lambda one: [one, b"rest"]])
def test_what_is_no_single_packed_member_is_refused(damage, coding):
    with pytest.raises(BadRequest):
        decoded(coding, damage(PACK[coding](b"a")))


def test_a_gzip_member_whose_sum_is_wrong_is_refused():
    with pytest.raises(BadRequest):
        decoded("gzip", [gzip.compress(b"a")[:-1] + b"\x07"])


@pytest.mark.parametrize("coding", PACK)
def test_a_bomb_ends_at_the_limit_of_decoded_bytes(coding):
    bomb = PACK[coding](b" " * (64 << 20))
    assert len(bomb) < 100_000
    upload = llmguard.Upload(1 << 20, body_decoder(coding, 1 << 20))
    with pytest.raises(llmguard.BodyTooLarge):
        upload.add(bomb)
    assert upload.size <= (1 << 20) + 4 * llmguard.PIECE


@pytest.mark.parametrize("coding", ["br", "deflate", "compress", "gzip, gzip", "gzip,identity", "nonsense", "*"])
def test_another_coding_is_refused(coding):
    with pytest.raises(UnsupportedCoding):
        body_decoder(coding, 100)


@pytest.mark.parametrize("coding", ["", "identity", "Identity"])
def test_identity_is_no_coding(coding):
    assert body_decoder(coding, 100) is None


# ----- through a real proxy


@pytest.fixture(scope="module")
def engine():
    made = Upstream(echo)
    yield made
    made.close()


@pytest.fixture(scope="module")
def proxies(engine, tmp_path_factory):
    """make(NAME, models, **settings of the proxy): one real `serve` a configuration, in front of `engine`."""
    running: dict[str, Serving] = {}

    def make(name: str, models, **proxy) -> Serving:
        if name not in running:
            running[name] = Serving(url_config(engine.port, models=models, **proxy), tmp_path_factory.mktemp(name)).start()
        return running[name]

    yield make
    for serving in running.values():
        serving.stop()


@pytest.fixture
def one(proxies) -> Serving:
    """A proxy with a single model, `small`, and no keys."""
    return proxies("one", ["small"], max_body="16MiB", refusal_status={"codex": 400, "odd-agent": 499})


@pytest.fixture
def two(proxies) -> Serving:
    """A proxy with two models and no keys."""
    return proxies("two", ["small", "a9-ornith15-35b-q8"])


@pytest.fixture
def locked(proxies) -> Serving:
    """A proxy with keys."""
    return proxies("locked", ["small"], api_keys=["test-key"], admin_keys=["admin-key"], max_body="16MiB")


@pytest.fixture(autouse=True)
def forget(engine):
    engine.requests.clear()


CHAT = b'{"model":"small","messages":[]}'


def post(
    path: str = "/v1/chat/completions", body: bytes = CHAT, *fields: str, version: str = "1.1", length: bool = True
) -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: x", "Content-Type: application/json", *fields]
    lines += [f"Content-Length: {len(body)}"] if length else []
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def get(path: str = "/health", *fields: str, method: str = "GET", version: str = "1.1", host: str = "Host: x") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", *([host] if host else []), *fields, "", ""]).encode("latin-1")


CLOSE = "Connection: close"


def only(serving: Serving, data: bytes, method: str = "GET"):
    """The one response to these bytes, after which the proxy must close."""
    answers = replies(raw(serving.port, data), method)
    assert len(answers) == 1, answers
    return answers[0]


# ----- the request line and the fields

MALFORMED = {
    "two blanks": b"GET  /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "HTTP/0.9": b"GET /health HTTP/0.9\r\nHost: x\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "lower-case version": b"GET /health http/1.1\r\nHost: x\r\n\r\n",
    "three digits": b"GET /health HTTP/1.10\r\nHost: x\r\n\r\n",
    "blank at the end": b"GET /health HTTP/1.1 \r\nHost: x\r\n\r\n",
    "blank at the front": b" GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "tab": b"GET\t/health\tHTTP/1.1\r\nHost: x\r\n\r\n",
    "method of signs": b"G(T /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "fragment": b"GET /health#x HTTP/1.1\r\nHost: x\r\n\r\n",
    "not a path": b"GET health HTTP/1.1\r\nHost: x\r\n\r\n",
    "another scheme": b"GET ftp://x/health HTTP/1.1\r\nHost: x\r\n\r\n",
    "star": b"GET * HTTP/1.1\r\nHost: x\r\n\r\n",
    "not ascii": "GET /é HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
    "NUL in the path": b"GET /he\x00alth HTTP/1.1\r\nHost: x\r\n\r\n",
    "bare CR in the line": b"GET /health\rX HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: x\r\nhost: x\r\n\r\n",
    "folded": b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    "folded first": b"GET /health HTTP/1.1\r\n A: b\r\nHost: x\r\n\r\n",
    "NUL": b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\x00\r\n\r\n",
    "bare CR": b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\rC: d\r\n\r\n",
    "bare LF": b"GET /health HTTP/1.1\r\nHost: x\nA: b\r\n\r\n",
    "blank before the colon": b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
    "no colon": b"GET /health HTTP/1.1\r\nHost: x\r\nA\r\n\r\n",
    "no name": b"GET /health HTTP/1.1\r\nHost: x\r\n: a\r\n\r\n",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_head_is_refused_and_the_connection_closed(one, data):
    reply = only(one, data + get())
    assert (reply.status, reply.error["type"], reply.headers["x-should-retry"]) == (400, "invalid_request_error", "false")
    assert reply.headers["connection"] == "close"


NEXT = get("/v1/models?smuggled=1")
SMUGGLED = {
    "both lengths": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "both lengths, turned": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 0\r\nContent-Length: 31\r\n\r\n" + CHAT,
    "two equal lengths": b"Content-Length: 31\r\nContent-Length: 31\r\n\r\n" + CHAT,
    "lengths in a list": b"Content-Length: 31, 31\r\n\r\n" + CHAT,
    "two codings": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "codings in a list": b"Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n",
    "coding misspelt": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "coding with a tab in it": b"Transfer-Encoding: chun\tked\r\n\r\n0\r\n\r\n",
    "coding with a VT": b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "coding with a blank before the colon": b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "coding behind a bare LF": b"A: b\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "folded coding": b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "plus": b"Content-Length: +31\r\n\r\n" + CHAT,
    "minus": b"Content-Length: -1\r\n\r\n",
    "underscore": b"Content-Length: 3_1\r\n\r\n" + CHAT,
    "hex": b"Content-Length: 0x1f\r\n\r\n" + CHAT,
    "empty": b"Content-Length:\r\n\r\n",
    "chunk of plus": b"Transfer-Encoding: chunked\r\n\r\n+1f\r\n" + CHAT + b"\r\n0\r\n\r\n",
    "chunk of 0x": b"Transfer-Encoding: chunked\r\n\r\n0x1f\r\n" + CHAT + b"\r\n0\r\n\r\n",
    "chunk of underscores": b"Transfer-Encoding: chunked\r\n\r\n1_f\r\n" + CHAT + b"\r\n0\r\n\r\n",
    "chunk with a bare LF": b"Transfer-Encoding: chunked\r\n\r\n1f\n" + CHAT + b"\r\n0\r\n\r\n",
    "chunk too short": b"Transfer-Encoding: chunked\r\n\r\n1e\r\n" + CHAT + b"\r\n0\r\n\r\n",
    "chunk too long": b"Transfer-Encoding: chunked\r\n\r\n20\r\n" + CHAT + b"\r\n0\r\n\r\n",
    "chunk of no size": b"Transfer-Encoding: chunked\r\n\r\n\r\n" + CHAT + b"\r\n0\r\n\r\n",
    "trailer of nonsense": b"Transfer-Encoding: chunked\r\n\r\n1f\r\n" + CHAT + b"\r\n0\r\nno colon\r\n\r\n",
}


@pytest.mark.parametrize("rest", SMUGGLED.values(), ids=SMUGGLED)
def test_framing_that_two_servers_could_read_differently_is_refused_and_nothing_after_it_is_served(one, engine, rest):
    reply = only(one, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + rest + NEXT)
    assert (reply.status, reply.error["type"], reply.headers["connection"]) == (400, "invalid_request_error", "close")
    assert engine.requests == []


def test_http_1_0_with_a_transfer_coding_is_refused(one):
    assert only(one, b"POST /v1/chat/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n").status == 400


def test_requests_may_be_sent_ahead_and_are_answered_in_order(one):
    data = get() + b"\r\n" + post(body=CHAT) + get("/nowhere") + get("/health", CLOSE)
    assert [reply.status for reply in replies(raw(one.port, data))] == [200, 200, 404, 200]


@pytest.mark.parametrize(
    "data", [get(version="1.0"), get(version="1.0", host=""), get("/health", CLOSE), get("/health", "Connection: x, Close")]
)
def test_a_connection_that_is_not_to_be_kept_is_closed_after_the_answer(one, data):
    reply = only(one, data + get())
    assert (reply.status, reply.headers["connection"]) == (200, "close")


def test_a_head_may_come_byte_by_byte_and_a_host_may_have_brackets(one):
    with socket.create_connection(("127.0.0.1", one.port), PATIENCE) as sock:
        for byte in get("/health", CLOSE, host="Host: [fd00::5]:8080"):
            sock.sendall(bytes([byte]))
        received = b""
        while piece := sock.recv(4096):
            received += piece
    assert replies(received)[0].status == 200


@pytest.mark.parametrize(
    "data", [get("/health", "A: " + "b" * 70_000), get("/" + "a" * 70_000), get("/health", *["A: b"] * 15_000), b"A" * 70_000]
)
def test_a_head_that_is_too_large_is_431(one, data):
    reply = only(one, data)
    assert (reply.status, reply.headers["x-should-retry"], reply.headers["connection"]) == (431, "false", "close")


@pytest.mark.parametrize(
    "head, status",
    [
        (b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 11534336\r\n\r\n", 404),
        (b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 11534336\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Encoding: br\r\nContent-Length: 11534336\r\n\r\n", 415),
        (b"", 431),
    ],
)
def test_a_refused_client_can_send_all_it_wants_and_then_read_the_answer(one, head, status):
    with socket.create_connection(("127.0.0.1", one.port), PATIENCE) as sock:
        sock.sendall(head + b"x" * (11 << 20))  # not reset on its way
        received = b""
        while piece := sock.recv(65536):
            received += piece
    assert [reply.status for reply in replies(received)] == [status]


# ----- paths


@pytest.mark.parametrize(
    "path",
    [
        "//v1//models",
        "/v1/models/",
        "/v1/models?",
        "/v1/models?x=1",
        "/models",
        "/v1/%6dodels",
        "http://10.0.0.5:8080/v1/models",
        "http://example.com/v1/models",
        "HTTP://[fd00::1]:8080//v1/models/",
    ],
)
def test_a_path_as_people_type_it_is_ours(one, path):
    reply = only(one, get(path, CLOSE))
    assert (reply.status, [entry["id"] for entry in reply.json()["data"]]) == (200, ["small"])


@pytest.mark.parametrize(
    "path, hint",
    [
        ("/v1/v1/models", "/v1/models"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
    ],
)
def test_a_path_that_is_nearly_right_is_404_with_the_right_one(one, path, hint):
    reply = only(one, get(path, CLOSE))
    assert (reply.status, reply.error["type"], reply.headers["x-should-retry"]) == (404, "not_found_error", "false")
    assert f"did you mean {hint}?" in reply.error["message"]


@pytest.mark.parametrize(
    "path",
    [
        "/V1/models",
        "/v1/models;x=1",
        "/status/x",
        "/nowhere",
        "/v1",
        "/v1/../status",
        "/v1/%2e%2e/status",
        "//example.com/v1/models",
    ],
)
def test_another_path_is_404(one, path):
    assert only(one, get(path, CLOSE)).status == 404


@pytest.mark.parametrize(
    "path",
    ["/chat/completions", "/responses", "/messages", "/audio/transcriptions", "/images/generations", "/responses/resp_1/cancel"],
)
def test_a_base_url_without_v1_works_for_every_path_of_the_api(one, engine, path):
    assert only(one, post(path, CHAT, CLOSE)).status == 200
    assert Sent(engine.requests[0]).line == f"POST /v1{path} HTTP/1.1"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/rerank", "/v1/audio/speech",
        "/v1/images/edits",
        "/v1/messages", "/v1/messages/count_tokens", "/completion", "/infill", "/tokenize", "/apply-template", "/slots/0",
    ],
)  # fmt: skip
def test_every_spoken_path_reaches_the_engine_by_the_same_name(one, engine, path):
    assert only(one, post(path, CHAT, CLOSE)).status == 200
    assert Sent(engine.requests[0]).line == f"POST {path} HTTP/1.1"


HOSTILE = [
    "%0d%0aX-Injected:%20y",
    "a%20HTTP/1.1%0d%0a%0d%0aGET%20/slots",
    "%00",
    "%e2%82%ac",
    "a%3Fmodel=x",
    "%2520",
    "a;b=c,d@e",
    "%ff",
]


@pytest.mark.parametrize("rest", HOSTILE)
@pytest.mark.parametrize(
    "folder",
    [
        "/v1/audio/",
        "/v1/images/",
        "/v1/responses/",
        "/slots/",
        "/audio/",
        "//upstream/small/",
        "/%75pstream/small/",
        "/upstream/small/",
    ],
)
def test_no_escape_in_a_path_becomes_anything_else_in_the_request_line_to_the_engine(one, engine, folder, rest):
    reply = only(one, post(folder + rest, CHAT, CLOSE))
    assert reply.status in (200, 400, 404)
    assert len(engine.requests) == (reply.status == 200)
    for request in engine.requests:
        sent = Sent(request)
        method, target, version = sent.line.split(" ")
        assert (method, version) == ("POST", "HTTP/1.1") and re.fullmatch(r"[\x21-\x7e]+", target)
        assert "?" not in target and "x-injected" not in sent.names
        assert sent.body == CHAT


CLIMBING = [
    "../props",
    "..%2f..%2fstatus",
    "%2e%2e/x",
    "x/../../models/unload",
    "x/%2E%2e%2fy",
    "..%5cx",
    "./x",
    "x/.",
    "%252e%252e/x",
    "x/..",
    "..",
]


@pytest.mark.parametrize("rest", CLIMBING)
@pytest.mark.parametrize("folder", ["/upstream/small/", "//upstream//small/", "/v1/responses/", "/v1/audio/", "/slots/"])
def test_no_path_climbs_out_of_what_it_names(one, engine, folder, rest):
    assert only(one, post(folder + rest, CHAT, CLOSE)).status in (400, 404)
    assert engine.requests == []


@pytest.mark.parametrize("target", ["example.com:443", "/health", "*"])
def test_connect_is_405(one, target):
    reply = only(one, get(target, method="CONNECT") + get())
    assert (reply.status, reply.headers["x-should-retry"], reply.headers["connection"]) == (405, "false", "close")


@pytest.mark.parametrize(
    "method, path",
    [
        ("TRACE", "/v1/chat/completions"),
        ("TRACE", "/health"),
        ("DELETE", "/status"),
        ("POST", "/v1/models"),
        ("GET", "/models/load"),
        ("get", "/health"),
    ],
)
def test_a_method_that_is_not_possible_is_405(one, engine, method, path):
    assert only(one, get(path, CLOSE, method=method)).status == 405
    assert engine.requests == []


# ----- OPTIONS and HEAD


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/status", "/models/load", "/upstream/small/x", "/nowhere", "*"])
def test_options_is_204_with_cors_and_needs_no_key(locked, engine, path):
    fields = [
        "Origin: http://ui:3000",
        "Access-Control-Request-Method: POST",
        "Access-Control-Request-Headers: authorization,x-stainless-os",
    ]
    reply = only(locked, get(path, CLOSE, *fields, method="OPTIONS"))
    assert (reply.status, reply.body) == (204, b"") and reply.headers["content-length"] is None
    assert reply.headers["access-control-allow-origin"] == "http://ui:3000"
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    assert engine.requests == []


def test_a_page_of_another_origin_can_read_our_answers_and_refusals(one):
    for path in ("/v1/models", "/nowhere"):
        assert only(one, get(path, CLOSE, "Origin: http://ui:3000")).headers["access-control-allow-origin"] == "http://ui:3000"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/status", "/", "/metrics", "/running", "/models/sse", "/nowhere"])
def test_head_is_get_without_a_body(one, path):
    data = raw(one.port, get(path, CLOSE, method="HEAD"))
    head, end, body = data.partition(b"\r\n\r\n")
    assert end and body == b""
    assert head.split(b" ")[1] == (b"404" if path == "/nowhere" else b"200")


def test_a_connection_goes_on_after_a_head(one):
    data = get("/v1/models", method="HEAD") + get("/props", method="HEAD") + get("/health", CLOSE)
    assert [reply.status for reply in replies(raw(one.port, data), "HEAD", "HEAD", "GET")] == [200, 200, 200]


# ----- keys


def basic(text: str) -> str:
    return "Authorization: Basic " + base64.b64encode(text.encode()).decode()


GOOD_KEYS = [
    ["Authorization: Bearer test-key"],
    ["Authorization: bearer test-key"],
    ["Authorization: BEARER  test-key  "],
    ["x-api-key: test-key"],
    ["x-api-key: test-key "],
    ["X-Api-Key: test-key", "Authorization: undefined"],
    ["x-api-key: wrong", "Authorization: Bearer test-key"],
    ["x-api-key: test-key", "Authorization: Bearer test-key"],
    [basic("anybody:test-key")],
    [basic(":test-key")],
    ["Authorization: Bearer admin-key"],
]
BAD_KEYS = [
    [],
    ["Authorization: undefined"],
    ["Authorization: Bearer"],
    ["Authorization: Bearer null"],
    ["Authorization: null"],
    ["Authorization: test-key"],
    ["Authorization: Bearer test-key2"],
    ["Authorization: Bearer test-ke"],
    ["Authorization: Bearer TEST-KEY"],
    ["Authorization: Bearertest-key"],
    ["Authorization: Bearer test-key, Bearer test-key"],
    ["Authorization: Bearer wrong", "Authorization: Bearer test-key"],
    ["Authorization: Basic test-key"],
    ["Authorization: Basic !!!"],
    ["Authorization: Basic \xe9"],
    [basic("test-key:")],
    [basic("test-key")],
    ["x-api-key:"],
    ["x-api-key: wrong"],
    ["Authorization: Bearer \xff\xfe"],
    ["Cookie: key=test-key"],
]


@pytest.mark.parametrize("fields", GOOD_KEYS)
def test_a_good_key_is_accepted_wherever_it_stands_and_not_passed_on(locked, engine, fields):
    reply = only(locked, post("/v1/chat/completions", CHAT, CLOSE, *fields))
    assert reply.status == 200
    assert not {"authorization", "x-api-key"} & set(Sent(engine.requests[0]).names)


@pytest.mark.parametrize("fields", BAD_KEYS)
@pytest.mark.parametrize("model", ["small", "unknown"])
def test_a_bad_key_is_401_and_does_not_tell_whether_the_model_exists(locked, engine, fields, model):
    reply = only(locked, post("/v1/chat/completions", json.dumps({"model": model}).encode(), CLOSE, *fields))
    assert (reply.status, reply.error["type"], reply.headers["x-should-retry"]) == (401, "authentication_error", "false")
    assert model not in reply.error["message"] and "www-authenticate" in reply.headers
    assert engine.requests == []


@pytest.mark.parametrize(
    "path, status",
    [
        ("/health", 200),
        ("/", 200),
        ("/status", 401),
        ("/metrics", 401),
        ("/v1/models", 401),
        ("/running", 401),
        ("/upstream/small/x", 401),
        ("/nowhere", 401),
    ],
)
def test_only_the_page_and_health_need_no_key(locked, path, status):
    assert only(locked, get(path, CLOSE)).status == status


ADMIN_PATHS = ["/models/load", "/models/unload", "/api/models/unload", "/api/models/unload/small"]


@pytest.mark.parametrize("path", [*ADMIN_PATHS, *("/upstream/small" + path for path in ADMIN_PATHS), "/upstream/small//models/unload/"])
def test_load_and_unload_need_an_admin_key(locked, path):
    assert only(locked, post(path, b'{"model":"unknown"}', CLOSE, "x-api-key: test-key")).status == 401
    assert only(locked, post(path, b'{"model":"unknown"}', CLOSE, "x-api-key: admin-key")).status != 401


def readme_rights() -> list[tuple[str, str, bool]]:
    """(METHOD /path, whose key, may he?) of each cell of README's table."""
    text = (Path(llmguard.__file__).parent / "README.md").read_text()
    rows = text.partition("| once both are set |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [
        (what, who, may == "yes")
        for first, *may_they in cells
        for what in re.findall("`([^`]+)`", first)
        for who, may in zip(("no key", "test-key", "admin-key"), may_they)
    ]


@pytest.mark.parametrize(("what", "who", "may"), readme_rights())
def test_readmes_table_of_rights_is_true(locked, what, who, may):
    method, path = what.split()
    fields = [] if who == "no key" else [f"x-api-key: {who}"]
    body = b'{"model":"unknown"}' if method == "POST" else b""
    request = b"%b %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%bContent-Length: %d\r\n\r\n%b" % (
        method.encode(), path.encode(), "".join(field + "\r\n" for field in fields).encode(), len(body), body,
    )  # fmt: skip
    with socket.create_connection(("127.0.0.1", locked.port), PATIENCE) as sock:
        sock.sendall(request)
        status = int(sock.makefile("rb").readline().split()[1])
    assert (status != 401) is may


@pytest.mark.parametrize("fields", [["Authorization: undefined"], ["Authorization: Bearer"], ["Authorization: Basic !!!"], []])
def test_without_configured_keys_any_authorization_is_ignored(one, engine, fields):
    page = b'{"messages":[{"role":"user","content":"good evening"}],"stream":true,"samplers":"kpmt","max_tokens":-1}'
    assert only(one, post("/v1/chat/completions", page, CLOSE, "Origin: http://127.0.0.1:8080", *fields)).status == 200
    assert Sent(engine.requests[0]).body == page


# ----- which model


def test_a_single_configured_model_is_taken_when_none_is_named(one, engine):
    for data in (
        post("/v1/chat/completions", b'{"messages":[]}', CLOSE),
        post("/v1/chat/completions", b'{"model":null}', CLOSE),
        get("/props", CLOSE),
        get("/slots", CLOSE),
        post("/tokenize", b"{}", CLOSE),
    ):
        assert only(one, data).status == 200
    assert len(engine.requests) == 5


@pytest.mark.parametrize(
    "data",
    [
        post("/v1/chat/completions", b'{"messages":[]}', CLOSE),
        post("/v1/chat/completions", b'{"model":null}', CLOSE),
        get("/props", CLOSE),
        get("/slots", CLOSE),
        post("/tokenize", b"{}", CLOSE),
    ],
)
def test_of_several_models_none_is_guessed_and_all_are_named(two, engine, data):
    reply = only(two, data)
    assert (reply.status, reply.error["type"], reply.headers["x-should-retry"]) == (400, "invalid_request_error", "false")
    assert "small" in reply.error["message"] and "a9-ornith15-35b-q8" in reply.error["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    "data",
    [
        get("/props?model=small", CLOSE),
        get("/props?x=1&model=small&y", CLOSE),
        get("/metrics?model=small", CLOSE),
        post("/v1/audio/transcriptions?model=small", b"", CLOSE),
        post("/v1/chat/completions?model=small", CHAT, CLOSE),
    ],
)
def test_a_model_is_named_in_the_query_or_the_body(two, engine, data):
    assert only(two, data).status == 200
    assert len(engine.requests) == 1


def test_a_query_and_a_body_that_name_two_models_are_refused(two, engine):
    reply = only(two, post("/v1/chat/completions?model=other", CHAT, CLOSE))
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert engine.requests == []


def test_two_models_in_a_query_are_a_bad_request(two, engine):
    assert only(two, get("/props?model=small&model=a9-ornith15-35b-q8", CLOSE)).status == 400
    assert engine.requests == []
    assert only(two, get("/props?model=small&model=small", CLOSE)).status == 200


@pytest.mark.parametrize(
    "model, near", [("smal", "small"), ("a9-ornith15-35b", "a9-ornith15-35b-q8"), ("Small", "small"), (" small ", "small")]
)
def test_an_unknown_model_is_404_with_the_nearest_names(two, engine, model, near):
    reply = only(two, post("/v1/chat/completions", json.dumps({"model": model}).encode(), CLOSE))
    assert (reply.status, reply.error["type"], reply.headers["x-should-retry"]) == (404, "not_found_error", "false")
    assert f"did you mean {near}" in reply.error["message"]
    assert engine.requests == []


@pytest.mark.parametrize("model", ["", "\ud800", "a\r\nb\x1b[2J", "x" * 10_000, "../small", "€"])
def test_an_odd_model_name_is_404_too(two, engine, model):
    reply = only(two, post("/v1/chat/completions", json.dumps({"model": model}).encode(), CLOSE))
    assert reply.status == 404 and len(reply.error["message"]) < 1000
    assert not re.search(r"[\x00-\x1f]", reply.error["message"])


@pytest.mark.parametrize("body", AMBIGUOUS, ids=lambda body: repr(body[:40]))
def test_an_ambiguous_body_is_400_and_reaches_no_engine(two, engine, body):
    reply = only(two, post("/v1/chat/completions", body.encode() if isinstance(body, str) else body, CLOSE))
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert engine.requests == []


@pytest.mark.parametrize("stream", ['"true"', '"false"', "1", "null"])
def test_an_odd_stream_is_the_engines_to_refuse(two, engine, stream):
    body = f'{{"model":"small","stream":{stream},"messages":[]}}'.encode()
    assert only(two, post("/v1/chat/completions", body, CLOSE)).status == 200
    assert Sent(engine.requests[0]).body == body


# ----- bodies


def frame(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def test_a_chunked_body_is_read_and_sent_on_with_a_length(one, engine):
    data = post(
        "/v1/chat/completions", frame(CHAT[:3], CHAT[3:]), "Transfer-Encoding: chunked", "Trailer: X", CLOSE, length=False
    )
    assert only(one, data).status == 200
    sent = Sent(engine.requests[0])
    assert sent.body == CHAT and sent.get("content-length") == [str(len(CHAT))]
    assert not {"transfer-encoding", "trailer"} & set(sent.names)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/messages"])
def test_a_post_without_a_body_is_400(two, path):
    assert only(two, post(path, b"", CLOSE)).status == 400


def test_a_gzip_body_is_forwarded_plain(one, engine):
    reply = only(one, post("/v1/chat/completions", gzip.compress(CHAT), "Content-Encoding: gzip", CLOSE))
    assert reply.status == 200
    sent = Sent(engine.requests[0])
    assert sent.body == CHAT and sent.get("content-length") == [str(len(CHAT))] and "content-encoding" not in sent.names


def test_a_bomb_is_413(one, engine):
    reply = only(one, post("/v1/chat/completions", gzip.compress(b" " * (64 << 20)), "Content-Encoding: gzip"))
    assert (reply.status, reply.headers["x-should-retry"]) == (413, "false")
    assert engine.requests == []


SMALL_ZSTD = b'\x28\xb5\x2f\xfd\x20\x39\xc9\x01\x00{"model":"small","input":"hi","stream":true}'


@pytest.mark.skipif("zstd" in PACK, reason="this Python decodes zstd")
@pytest.mark.parametrize(
    "agent, status", [("curl/8", 415), ("codex_cli_rs/0.155.0", 400), ("Codex/1", 400), ("odd-agent/2", 499)]
)
def test_a_zstd_body_is_refused_with_a_status_that_stops_its_client(one, engine, agent, status):
    reply = only(one, post("/v1/responses", SMALL_ZSTD, "Content-Encoding: zstd", f"User-Agent: {agent}"))
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (status, status, "false")
    assert (
        reply.error["message"]
        == "request bodies in zstd are not supported here; in Codex set features.enable_request_compression = false"
    )
    assert engine.requests == []


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "deflate"])
def test_an_unknown_coding_is_415(one, engine, coding):
    assert only(one, post("/v1/chat/completions", CHAT, f"Content-Encoding: {coding}")).status == 415
    assert engine.requests == []


def test_a_body_above_max_body_is_413_by_its_length_and_by_its_chunks(one, engine):
    big = b'{"model":"small","x":"' + b"x" * (17 << 20) + b'"}'
    for data in (
        post("/v1/chat/completions", big),
        post(
            "/v1/chat/completions",
            frame(*[big[at : at + 100_000] for at in range(0, len(big), 100_000)]),
            "Transfer-Encoding: chunked",
            length=False,
        ),
    ):
        reply = only(one, data)
        assert (reply.status, reply.headers["x-should-retry"], reply.headers["connection"]) == (413, "false", "close")
    assert engine.requests == []


def expecting(port: int, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    """(what came before the body was sent, what came after): the body waits for the first bytes, as curl's does."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as sock:
        sock.sendall(head)
        first = sock.recv(65536)
        if first.startswith(b"HTTP/1.1 100 "):
            sock.sendall(body)
        rest = b""
        while piece := sock.recv(65536):
            rest += piece
        return first, rest


def test_a_client_that_expects_100_gets_it_once_and_is_served(locked, engine):
    body = b'{"model":"small","messages":["' + b"QUJD" * 2_900_000 + b'"]}'
    head = post("/v1/messages", body, "x-api-key: test-key", "Expect: 100-continue", CLOSE)[: -len(body)]
    first, rest = expecting(locked.port, head, body)
    assert first == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert rest.startswith(b"HTTP/1.1 200 OK\r\n")
    sent = Sent(engine.requests[0])
    assert sent.body == body and "expect" not in sent.names


@pytest.mark.parametrize(
    "fields, length, status",
    [
        (["x-api-key: wrong", "Expect: 100-continue"], "1000", 401),
        (["x-api-key: test-key", "Expect: 100-continue"], "99999999999", 413),
        (["x-api-key: test-key", "Expect: 200-ok"], "1000", 417),
        (["x-api-key: test-key", "Expect: 100-continue", "Content-Encoding: br"], "1000", 415),
    ],
)
def test_a_refusal_comes_before_any_body_and_closes(locked, fields, length, status):
    data = post("/v1/messages", b"", *fields, f"Content-Length: {length}", length=False)
    answers = replies(raw(locked.port, data))
    assert [reply.status for reply in answers] == [status] and answers[0].headers["connection"] == "close"
    assert answers[0].json()["type"] == "error"


@pytest.mark.parametrize(
    "version, fields",
    [
        ("1.1", ["Expect: 100-continue"]),
        ("1.0", ["Expect: 100-continue"]),
        ("1.0", ["Expect: nonsense"]),
        ("1.1", ["Expect: 100-Continue"]),
    ],
)
def test_a_body_that_comes_at_once_is_read_whatever_is_expected(one, version, fields):
    data = raw(one.port, post("/v1/chat/completions", CHAT, CLOSE, *fields, version=version))
    assert [reply.status for reply in replies(data)] == [200] and not data.startswith(b"HTTP/1.1 100")


# ----- upgrades

WEBSOCKET = [
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
]


@pytest.mark.parametrize("path", ["/v1/responses", "/upstream/small/ws", "/nowhere"])
@pytest.mark.parametrize("agent", ["codex_cli_rs/0.155.0", "Mozilla/5.0"])
def test_an_upgrade_to_websocket_is_426_at_once_for_everybody(two, engine, path, agent):
    reply = only(two, get(path, *WEBSOCKET, f"User-Agent: {agent}"))
    assert (reply.status, reply.error["code"], reply.headers["connection"], reply.headers["x-should-retry"]) == (
        426,
        426,
        "close",
        "false",
    )
    assert engine.requests == []


def test_an_upgrade_with_a_bad_key_is_401(locked):
    assert only(locked, get("/v1/responses", *WEBSOCKET, "x-api-key: wrong", CLOSE)).status == 401


def test_an_upgrade_to_h2c_is_ignored_and_not_forwarded(one, engine):
    fields = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"]
    with socket.create_connection(("127.0.0.1", one.port), PATIENCE) as sock:
        sock.sendall(post("/v1/chat/completions", CHAT, *fields))
        response = http.client.HTTPResponse(sock)
        response.begin()
        assert response.status == 200
    assert not {"upgrade", "http2-settings", "connection"} & set(Sent(engine.requests[0]).names)


# ----- the shape of a refusal


def test_a_refusal_has_openais_shape(two):
    reply = only(two, post("/v1/chat/completions", b'{"model":"unknown"}', CLOSE))
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.json() == {"error": {"code": 404, "message": reply.error["message"], "type": "not_found_error", "param": None}}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/messages", "//v1/messages/"])
def test_a_refusal_has_anthropics_shape_on_anthropics_paths(two, path):
    content = only(two, post(path, b'{"model":"unknown"}', CLOSE)).json()
    assert content["type"] == "error"
    assert content["error"]["type"] == "not_found_error" and "unknown" in content["error"]["message"]


# ----- with the proxy in this process, where a constant or a part of it must be another


@pytest.mark.parametrize("data", [b"G", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r"])
def test_a_head_that_does_not_come_in_time_is_408_and_closed(inside, engine, monkeypatch, data):
    monkeypatch.setattr(llmguard, "HEAD_PATIENCE", 0.05)
    reply = only(inside(url_config(engine.port)), data)
    assert (reply.status, reply.headers["connection"]) == (408, "close")


def test_a_connection_that_asks_for_nothing_is_closed_without_a_word(inside, engine, monkeypatch):
    monkeypatch.setattr(llmguard, "IDLE_PATIENCE", 0.05)
    assert raw(inside(url_config(engine.port)).port, b"") == b""


def test_a_body_that_does_not_come_in_time_is_refused_and_closed(inside, engine, monkeypatch):
    monkeypatch.setattr(llmguard, "BODY_PATIENCE", 0.05)
    reply = only(inside(url_config(engine.port)), post("/v1/chat/completions", CHAT)[:-1])
    assert reply.headers["connection"] == "close" and reply.error["type"] == "invalid_request_error"
    assert engine.requests == []


@pytest.mark.parametrize("error, status, kind, retry", [
    (llmguard.GpuBusy("host here: GPU is busy: handed to a waiting bench job"), 423, "gpu_busy", "false"),
    (llmguard.EngineFailed("host here: engine e0 ended while it started"), 500, "engine_failed", "false"),
    (llmguard.HostDown("host here is down"), 502, "host_down", None),
])  # fmt: skip
def test_what_the_host_refuses_is_told_with_its_status(inside, engine, monkeypatch, error, status, kind, retry):
    def refuse(*_):
        raise error

    monkeypatch.setattr(llmguard.Host, "acquire", refuse)
    proxy = inside(url_config(engine.port))
    for _ in range(2):  # the same error may answer many
        reply = only(proxy, post("/v1/chat/completions", CHAT, CLOSE))
        assert (reply.status, reply.headers["x-should-retry"]) == (status, retry)
        assert reply.error == {"code": status, "message": f"model small: {error}", "type": kind, "param": None}
    content = only(proxy, post("/v1/messages", CHAT, CLOSE)).json()
    assert (content["type"], content["error"]["type"]) == ("error", kind)
    assert only(proxy, post("/v1/responses", CHAT, CLOSE, "User-Agent: codex_cli_rs/1")).status == (
        400 if status == 423 else status
    )


def test_above_max_connections_an_idle_one_makes_room_and_a_busy_one_does_not(inside, stub_engine):
    go = threading.Event()

    def answer(request: bytes, sock: socket.socket) -> bool:
        if b"wait" in request:
            go.wait(PATIENCE)
        return echo(request, sock)

    slow = stub_engine(answer)
    proxy = inside(url_config(slow.port, max_connections=2))
    with (
        socket.create_connection(("127.0.0.1", proxy.port), PATIENCE) as busy,
        socket.create_connection(("127.0.0.1", proxy.port), PATIENCE) as idle,
    ):
        busy.sendall(post("/v1/chat/completions", b'{"model":"small","x":"wait"}', CLOSE))
        eventually(lambda: any(b"wait" in request for request in slow.requests), "the engine has it")
        idle.sendall(get())
        assert idle.recv(65536).startswith(b"HTTP/1.1 200")
        eventually(lambda: any(connection.idle_since for connection in proxy._connections), "one is idle")
        with socket.create_connection(("127.0.0.1", proxy.port), PATIENCE) as another:
            assert idle.recv(1) == b""
            eventually(lambda: len(proxy._connections) == 2, "the idle one is gone")
            another.sendall(post("/v1/chat/completions", b'{"model":"small","x":"wait"}', CLOSE))
            eventually(lambda: sum(b"wait" in request for request in slow.requests) == 2, "the engine has it")
            reply = replies(raw(proxy.port, b""))[0]
            assert (reply.status, reply.error["type"], reply.headers["connection"]) == (503, "unavailable_error", "close")
            go.set()
            for sock in (busy, another):
                received = b""
                while piece := sock.recv(65536):
                    received += piece
                assert replies(received)[0].status == 200


def test_an_error_of_ours_closes_one_connection_and_is_logged(inside, engine, monkeypatch, capfd):
    proxy = inside(url_config(engine.port))

    def fail(exchange) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setitem(llmguard.OWN, "/bug", {"GET": (fail, False)})
    raw(proxy.port, get("/bug"))
    assert only(proxy, get("/health", CLOSE)).status == 200
    assert "RuntimeError" in capfd.readouterr().err

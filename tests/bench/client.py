#!/usr/bin/env python3
"""The load client: one scenario against one port, the result as one line of JSON. Raw sockets and epoll, so that it
costs less than what it measures. bench.py runs it in a process of its own; by hand:

    client.py rps --port 8080 --connections 16 --seconds 2

Scenarios:
    rps      small requests on kept-alive connections: requests a second, and the proxy's CPU for one
    series   one kept-alive connection, one request after the other: latency
    streams  many streams at once: each token's delay from the engine's send() to here, and the proxy's CPU for one
    ttfb     new connections, all at once, each asks for a stream: connect() to the first byte of the answer
    body     a big body with the model's name at its very end, on a kept-alive connection: time to the answer
    cancel   a stream's client goes away: time until the engine notices

Times are in microseconds. With --pids the CPU of those processes is read at the edges of the measured time, so that
neither setting up nor ending counts. Every wait ends by --timeout.
"""
import argparse
import gc
import itertools
import json
import os
import re
import select
import socket
import sys
import time

TOKEN = re.compile(rb"@(\d{20})")
PARTIAL = 21                # a token's length; so many bytes of the last read may be the start of one
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.I)
NEVER = float("inf")
FIRST_TOKEN_PAUSE = 0.1     # from a stream's begin (or a silent request's sending) to its cancel

now = time.monotonic_ns
numbers = itertools.count()


class Failed(Exception):
    """The server answered wrongly, or not in time."""


def connect(port):
    sock = socket.create_connection(("127.0.0.1", port), timeout=OPTIONS.timeout)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def chat(text="hi", stream=False):
    body = {"model": "stub", "messages": [{"role": "user", "content": text}]}
    if stream:
        body["stream"] = True
    return post(json.dumps(body).encode())


def post(body):
    head = (b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: bench\r\nAccept: */*\r\n"
            b"Authorization: Bearer bench\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n")
    return head % len(body) + body


def stream_of(**wishes):
    return chat("[stub %s]" % " ".join("%s=%s" % wish for wish in wishes.items()), stream=True)


def is_whole(reply):
    """Is a short answer complete? Raises for one that isn't a 200."""
    end = reply.find(b"\r\n\r\n")
    if end < 0:
        return False
    if not reply.startswith(b"HTTP/1.1 200"):
        raise Failed(reply[:300].decode("latin-1"))
    length = LENGTH.search(reply, 0, end + 2)
    if length:
        return len(reply) >= end + 4 + int(length.group(1))
    return reply.endswith(b"0\r\n\r\n")


def ask(sock, request):
    """One short request and its whole answer, on a blocking socket."""
    sock.sendall(request)
    reply = sock.recv(65536)
    while not is_whole(reply):
        more = sock.recv(65536)
        if not more:
            raise Failed("the connection ended within an answer")
        reply += more
    return reply


def cpu_ns():
    """CPU time that the processes used, all their threads, dead ones too; /proc would count it in steps of 10 ms."""
    return sum(time.clock_gettime_ns((~pid << 3) | 2) for pid in OPTIONS.pids)     # Linux: clock_getcpuclockid(3)


def each(nanoseconds, count):
    return nanoseconds / 1e3 / count if OPTIONS.pids else None


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * share))] if values else NEVER


def spread(nanoseconds):
    return {"median": percentile(nanoseconds, 0.5) / 1e3, "p99": percentile(nanoseconds, 0.99) / 1e3,
            "samples": len(nanoseconds)}


def rps():
    request = chat()
    poll = select.epoll()
    socks, replies = {}, {}
    for _ in range(OPTIONS.connections):
        sock = connect(OPTIONS.port)
        ask(sock, request)
        sock.setblocking(False)
        socks[sock.fileno()], replies[sock.fileno()] = sock, b""
        poll.register(sock, select.EPOLLIN)
    for sock in socks.values():
        sock.send(request)
    begin = now() + int(0.3e9)          # warm up
    end = begin + int(OPTIONS.seconds * 1e9)
    count, cpu, started, last = 0, 0, 0, now()
    while last < end:
        ready = poll.poll(OPTIONS.timeout)
        last = now()
        if not ready:
            raise Failed("no answer came")
        if not started and last >= begin:
            count, cpu, started = 0, cpu_ns(), last
        for fd, _ in ready:
            data = socks[fd].recv(65536)
            if not data:
                raise Failed("the connection was closed")
            reply = replies[fd] + data
            if is_whole(reply):
                replies[fd] = b""
                socks[fd].send(request)
                count += 1
            else:
                replies[fd] = reply
    return {"rps": count / ((last - started) / 1e9), "cpu": each(cpu_ns() - cpu, count)}


def series():
    request = chat()
    sock = connect(OPTIONS.port)
    for _ in range(50):
        ask(sock, request)
    times = []
    end = now() + int(OPTIONS.seconds * 1e9)
    while now() < end:
        begin = now()
        ask(sock, request)
        times.append(now() - begin)
    return spread(times)


def streams():
    return Streams().run()


class Streams:
    """Many streams at once. Tokens count from when every stream has begun until the first one has ended; behind a
    server that is too slow for that, where some end before others have begun, they all count."""

    OPENING, ALL_RUN, OVER = "opening", "all run", "over"

    def __init__(self):
        self.poll = select.epoll()
        self.socks = {}         # by fd: the streams that run
        self.tails = {}         # by fd: the end of the last read, which may be the start of a token
        self.silent = set()     # fds of streams that nothing came on so far
        self.opened = self.ended = self.tokens = 0
        self.delays, self.cpu, self.cpu_end = [], cpu_ns(), None
        self.phase = self.OPENING
        wishes = {"tokens": OPTIONS.tokens, "interval": OPTIONS.interval}
        if OPTIONS.burst:
            wishes["burst"] = 1
        self.request = stream_of(**wishes)

    def run(self):
        deadline = now() + int((OPTIONS.tokens * OPTIONS.interval / 1e3 + OPTIONS.timeout) * 1e9)
        while self.ended < OPTIONS.connections:
            while self.opened < OPTIONS.connections and len(self.silent) < 16:     # no burst: ttfb is for that
                self.open()
            ready = self.poll.poll(1)
            arrived = now()
            if arrived > deadline:
                raise Failed("%d streams did not end" % len(self.socks))
            for fd, _ in ready:
                self.read(fd, arrived)
            if self.phase == self.OPENING and self.opened == OPTIONS.connections and not (self.silent or self.ended):
                self.phase, self.delays, self.cpu = self.ALL_RUN, [], cpu_ns()
        expected = OPTIONS.connections * OPTIONS.tokens
        if self.tokens != expected:
            raise Failed("%d of %d tokens came" % (self.tokens, expected))
        return dict(spread(self.delays), cpu=each((self.cpu_end or cpu_ns()) - self.cpu, len(self.delays)))

    def open(self):
        sock = connect(OPTIONS.port)
        sock.setblocking(False)
        sock.send(self.request)
        self.poll.register(sock, select.EPOLLIN)
        fd = sock.fileno()
        self.socks[fd], self.tails[fd] = sock, b""
        self.silent.add(fd)
        self.opened += 1

    def read(self, fd, arrived):
        data = self.socks[fd].recv(65536)
        if fd in self.silent and data and not data.startswith(b"HTTP/1.1 200"):
            raise Failed(data[:300].decode("latin-1"))
        text = self.tails[fd] + data
        position = 0
        for token in TOKEN.finditer(text):
            position = token.end()
            self.tokens += 1
            if self.phase != self.OVER:
                # it was readable when poll returned; what was sent later than that is timed now
                sent = int(token.group(1))
                self.delays.append((arrived if arrived > sent else now()) - sent)
        self.tails[fd] = text[max(position, len(text) - PARTIAL):]
        self.silent.discard(fd)
        if not data or b"[DONE]" in text:
            self.end(fd)

    def end(self, fd):
        if self.phase == self.ALL_RUN:
            self.phase, self.cpu_end = self.OVER, cpu_ns()
        self.ended += 1
        self.silent.discard(fd)
        self.poll.unregister(fd)
        self.socks.pop(fd).close()


def ttfb():
    times = []
    for _ in range(OPTIONS.repeat):
        times += burst_of_connections(stream_of(tokens=1, interval=1))
        time.sleep(0.05)
    return spread(times)


def burst_of_connections(request):
    """Each stream is read to its end: to leave at the first byte would be a cancel, whose price the next burst would pay."""
    poll = select.epoll()
    socks, begun, replies, times = {}, {}, {}, []
    for _ in range(OPTIONS.connections):
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begun[sock.fileno()], socks[sock.fileno()] = now(), sock
        sock.connect_ex(("127.0.0.1", OPTIONS.port))
        poll.register(sock, select.EPOLLOUT)
    while socks:
        ready = poll.poll(OPTIONS.timeout)
        arrived = now()
        if not ready:
            raise Failed("%d of %d new connections got no answer" % (len(socks), OPTIONS.connections))
        for fd, events in ready:
            if events & select.EPOLLOUT:
                socks[fd].send(request)
                poll.modify(fd, select.EPOLLIN)
                continue
            if fd not in replies:
                times.append(arrived - begun[fd])
            data = socks[fd].recv(65536)
            replies[fd] = replies.get(fd, b"") + data
            if not data and not is_whole(replies[fd]):
                raise Failed("a new connection was closed")
            if is_whole(replies[fd]):
                poll.unregister(fd)
                socks.pop(fd).close()
                del replies[fd]
    return times


def body():
    request = post(b'{"messages":[{"role":"user","content":"%s"}],"model":"stub"}' % (b"QUJD" * (OPTIONS.bytes // 4)))
    sock = connect(OPTIONS.port)
    ask(sock, chat())
    times = []
    for _ in range(OPTIONS.repeat):
        begin = now()
        ask(sock, request)
        times.append(now() - begin)
    return spread(times)


def cancel():
    """All open at once, cancelled one by one."""
    opened = {}
    silence = OPTIONS.silence
    for _ in range(OPTIONS.repeat):
        number = "%d-%d" % (os.getpid(), next(numbers))
        sock = connect(OPTIONS.port)
        sock.sendall(stream_of(tokens=1000, interval=50, silence=silence, id=number))
        if not silence and not sock.recv(65536).startswith(b"HTTP/1.1 200"):
            raise Failed("no stream began")
        opened[number] = sock
    time.sleep(FIRST_TOKEN_PAUSE)
    closed = {}
    for number, sock in opened.items():
        sock.setblocking(False)
        try:
            while sock.recv(65536):     # close() with unread bytes would be a reset, not an end
                pass
        except BlockingIOError:
            pass
        closed[number] = now()
        sock.close()
        time.sleep(0.01)
    return spread(seen_by_the_engine(closed))


def seen_by_the_engine(closed):
    deadline = time.monotonic() + OPTIONS.timeout
    request = b"GET /stub/cancels HTTP/1.1\r\nHost: engine\r\n\r\n"
    with connect(OPTIONS.engine) as engine:
        while True:
            seen = json.loads(ask(engine, request).partition(b"\r\n\r\n")[2])
            if time.monotonic() > deadline or all(number in seen for number in closed):
                return [seen.get(number, NEVER) - begin for number, begin in closed.items()]
            time.sleep(0.02)


SCENARIOS = {function.__name__: function for function in (rps, series, streams, ttfb, body, cancel)}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine", type=int, help="the engine's own port (cancel)")
    parser.add_argument("--pids", type=lambda text: [int(pid) for pid in text.split(",") if pid], default=[])
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--interval", type=float, default=50, help="milliseconds from token to token")
    parser.add_argument("--burst", action="store_true", help="the tokens of all streams come together")
    parser.add_argument("--silence", type=float, default=0, help="milliseconds before the engine sends anything")
    parser.add_argument("--bytes", type=int, default=32 << 20)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = arguments()
    gc.freeze()
    gc.disable()
    try:
        print(json.dumps(SCENARIOS[OPTIONS.scenario]()))
    except (Failed, OSError) as error:
        sys.exit("%s: %s" % (OPTIONS.scenario, error))

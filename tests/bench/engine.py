#!/usr/bin/env python3
"""A stub model server that costs so little that it never hides what a proxy in front of it costs.

It answers as llama-server does: `/health`, `/v1/models`, and any POST as a chat completion, in JSON or, with
`"stream": true`, as server-sent events in HTTP chunks. What a stream looks like is asked for in the text of the
message, because that is the one thing which every proxy hands on, those that re-encode requests included:

    [stub tokens=20 interval=50 silence=0 id=7]      (interval and silence in milliseconds)

`silence` passes before anything at all is sent, the status line included, as in a long prefill. Each token's text
is `@` and the time.monotonic_ns() of its sending: on one machine a client reads a token's delay from it. Streams
are spread evenly over the interval; `burst=1` sends the tokens of all streams together, as one llama-server does.

A connection that is closed in the middle of a stream is a cancel: `/stub/cancels` is a JSON object of id → when it
was noticed, in the same nanoseconds. One epoll loop, one process. Prints its port, and ends when stdin does.
"""
import gc
import heapq
import itertools
import json
import re
import select
import socket
import sys
import time

HEAD = b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n"
EVENTS = HEAD + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = (b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":" @%020d"}}],"created":1700000000,'
         b'"id":"chatcmpl-7Qm0yN3bq8TzXHJrV1c5aLfWd2sKpUeG","model":"stub","system_fingerprint":"b1-stub",'
         b'"object":"chat.completion.chunk"}\n\n')
TOKEN_CHUNK = b"%x\r\n%s\r\n" % (len(TOKEN % 0), TOKEN)
DONE = b"data: [DONE]\n\n"
END = b"%x\r\n%s\r\n0\r\n\r\n" % (len(DONE), DONE)
COMPLETION = (b'{"choices":[{"finish_reason":"stop","index":0,"message":{"role":"assistant","content":"ok"}}],'
              b'"created":1700000000,"id":"chatcmpl-7Qm0yN3bq8TzXHJrV1c5aLfWd2sKpUeG","model":"stub",'
              b'"object":"chat.completion","usage":{"completion_tokens":1,"prompt_tokens":1,"total_tokens":2}}')

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.I)
CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.I)
STREAM = re.compile(rb'"stream" ?: ?true')
WISHES = re.compile(rb"\[stub ([^]]*)\]")
READ = 1 << 20
GOLDEN = 0.6180339887      # multiples of it, modulo 1, are spread evenly however many there are


def json_reply(body, status=b"200 OK"):
    return (HEAD.replace(b"200 OK", status)
            + b"Content-Type: application/json; charset=utf-8\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


ANSWERS = {
    b"/health": json_reply(b'{"status":"ok"}'),
    b"/v1/models": json_reply(b'{"object":"list","data":[{"id":"stub","object":"model","owned_by":"llamacpp"}]}'),
}
COMPLETION_REPLY = json_reply(COMPLETION)
NOT_FOUND = json_reply(b'{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}', b"404 Not Found")


class Stream:
    """What is left to send of one streamed answer; all times in nanoseconds of the monotonic clock."""
    __slots__ = ("left", "interval", "id", "due", "begun", "place")

    def __init__(self, wishes, number):
        self.left = int(wishes.get("tokens", 4))
        self.interval = int(float(wishes.get("interval", 10)) * 1e6)
        self.id = wishes.get("id")
        self.begun = False
        self.due = time.monotonic_ns() + int(float(wishes.get("silence", 0)) * 1e6)
        self.place = 0 if "burst" in wishes else int(number * GOLDEN % 1 * self.interval)

    def sent(self):
        """The second token puts a stream in its place within the interval; from there its pace is even."""
        self.left -= 1
        if self.begun:
            self.due += self.interval
        else:
            self.due += self.interval - self.due % self.interval + self.place
        self.begun = True


class Connection:
    __slots__ = ("sock", "data", "drain", "stream")

    def __init__(self, sock):
        self.sock = sock
        self.data = b""         # of the request that is being read; of a big body only the start is kept
        self.drain = 0          # bytes of a big body that are still to come
        self.stream = None


class Engine:
    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.listener.setblocking(False)
        self.poll = select.epoll()
        self.poll.register(self.listener, select.EPOLLIN)
        self.poll.register(sys.stdin, select.EPOLLIN | select.EPOLLHUP)
        self.connections = {}
        self.timers = []        # heap of (due, tie, connection, stream)
        self.ties = itertools.count()
        self.streams = itertools.count()
        self.cancels = {}
        self.scratch = bytearray(READ)

    def serve(self):
        while True:
            self.wait()
            for fd, _ in self.poll.poll(0):
                connection = self.connections.get(fd)
                if connection:
                    self.read(connection)
                elif fd == self.listener.fileno():
                    self.accept()
                else:
                    return
            self.send_due()

    def wait(self):
        """Until there is something to read or a token is due: select() keeps microseconds, epoll's timeout doesn't."""
        timeout = None
        if self.timers:
            timeout = max(0.0, (self.timers[0][0] - time.monotonic_ns()) / 1e9)
        select.select([self.poll], [], [], timeout)

    def accept(self):
        try:
            while True:
                sock, _ = self.listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.connections[sock.fileno()] = Connection(sock)
                self.poll.register(sock, select.EPOLLIN | select.EPOLLRDHUP)
        except BlockingIOError:
            pass

    def close(self, connection):
        if connection.stream:
            self.cancels[connection.stream.id] = time.monotonic_ns()
            connection.stream = None
        del self.connections[connection.sock.fileno()]
        connection.sock.close()

    def read(self, connection):
        try:
            if connection.drain:
                count = connection.sock.recv_into(self.scratch)
                connection.drain -= count
                whole = connection.drain <= 0
            else:
                data = connection.sock.recv(READ)
                count = len(data)
                connection.data = connection.data + data if connection.data else data
                whole = self.is_whole(connection)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self.close(connection)
        elif whole:
            request, connection.data = connection.data, b""
            self.answer(connection, request)

    def is_whole(self, connection):
        data = connection.data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return False
        length = LENGTH.search(data, 0, end + 2)
        if not length:
            return not CHUNKED.search(data, 0, end + 2) or data.endswith(b"0\r\n\r\n")
        missing = end + 4 + int(length.group(1)) - len(data)
        if missing > READ:
            connection.drain = missing      # a big body: the rest is read and thrown away
        return missing <= 0

    def answer(self, connection, request):
        if not request.startswith(b"POST "):
            path = request.split(b" ", 2)[1].partition(b"?")[0]
            if path == b"/stub/cancels":
                reply = json_reply(json.dumps(self.cancels).encode())
            else:
                reply = ANSWERS.get(path, NOT_FOUND)
            connection.sock.send(reply)
        elif STREAM.search(request, 0, 65536):
            wishes = WISHES.search(request)
            wishes = dict(pair.split("=") for pair in wishes.group(1).decode().split()) if wishes else {}
            connection.stream = Stream(wishes, next(self.streams))
            self.schedule(connection)
        else:
            connection.sock.send(COMPLETION_REPLY)

    def schedule(self, connection):
        heapq.heappush(self.timers, (connection.stream.due, next(self.ties), connection, connection.stream))

    def send_due(self):
        while self.timers and self.timers[0][0] <= time.monotonic_ns():
            _, _, connection, stream = heapq.heappop(self.timers)
            if connection.stream is stream:
                self.send_token(connection, stream)

    def send_token(self, connection, stream):
        try:
            if not stream.left:
                connection.stream = None
                connection.sock.send(END)
                return
            start = b"" if stream.begun else EVENTS
            connection.sock.send(start + TOKEN_CHUNK % time.monotonic_ns())
        except BlockingIOError:     # nobody reads: try again, with a new timestamp
            stream.due += 1000000
        except OSError:
            connection.stream = stream
            self.close(connection)
            return
        else:
            stream.sent()
        self.schedule(connection)


if __name__ == "__main__":
    engine = Engine()
    print(engine.listener.getsockname()[1], flush=True)
    gc.freeze()
    gc.disable()
    engine.serve()

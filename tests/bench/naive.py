#!/usr/bin/env python3
"""The proxy that a person would write in twenty minutes, to measure a better one against.

ThreadingHTTPServer towards the clients, one http.client connection for each request towards the engine. Two
defaults that would make a straw man of it are corrected: Nagle's algorithm is off (else every answer on a
kept-alive connection waits 40 ms for an ACK) and the listen backlog is 128, not 5 (else a burst of new connections
waits a second for its SYNs). Usage: naive.py ENGINE_PORT; prints its own port, and ends when stdin does.
"""
import http.client
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host"}


class Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def forward(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        upstream = http.client.HTTPConnection("127.0.0.1", ENGINE_PORT)
        try:
            upstream.request(self.command, self.path, body, headers)
            self.copy(upstream.getresponse())
        except OSError:
            self.close_connection = True
        finally:
            upstream.close()

    do_GET = do_POST = forward

    def copy(self, response):
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        if response.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while True:
            data = response.read1(65536)
            if response.chunked:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            else:
                self.wfile.write(data)
            self.wfile.flush()
            if not data:
                return

    def log_message(self, format, *args):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        pass                    # a client that went away


if __name__ == "__main__":
    ENGINE_PORT = int(sys.argv[1])
    server = Server(("127.0.0.1", 0), Proxy)
    print(server.server_address[1], flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()

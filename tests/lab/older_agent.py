#!/usr/bin/env python3
"""An agent as it was before guards were told by name: it decodes the request, drops the fields that it doesn't know and
answers as if nothing had been asked. `starts` in its home counts the starts that it was sent."""

import json
import os
import sys

request = json.loads(sys.stdin.readline())
if request.get("op") == "start":
    with open(os.path.expanduser("~/starts"), "a") as file:
        file.write(request["engine"] + "\n")
reply = {"ok": True, "agent": "0.0.9", "active": None, "state": "off", "foreign": [], "bench_waits": []}
print("llmguard-agent 1")
print(json.dumps(reply))


def main():
    return 0

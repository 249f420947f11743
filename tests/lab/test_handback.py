"""Twenty jobs in a row that wait behind the proxy's engine, under traffic, half of them behind a running stream as well."""

import threading
import time
from pathlib import Path

import pytest

from lab import wait_for
from test_boxes_serving import MAINLINE, complete, stream

RUNNER = Path(__file__).resolve().parents[2] / "examples" / "jobrunner.py"
ROUNDS = 20
JOB = """#!/bin/sh
pgrep -x llama-server && echo an engine runs as the job begins
on-gpu sleep 0.2
pgrep -x llama-server && echo an engine runs as the job ends
true
"""


class Traffic(threading.Thread):
    """A coding agent that asks for the model again and again; the statuses that it got."""

    def __init__(self, serving):
        super().__init__(daemon=True)
        self.serving, self.statuses, self.ended = serving, [], threading.Event()
        self.start()

    def run(self):
        while not self.ended.wait(0.05):
            self.statuses.append(complete(self.serving, "a9-deep").status)


def moment(what, check):
    """When that came true, to about ten milliseconds."""
    wait_for(what, check, 60.0, every=0.01)
    return time.monotonic()


def test_twenty_hand_backs_under_traffic_cut_no_stream_and_start_nothing_in_front_of_a_job(operator, ready):
    box = ready
    box.write("jobrunner.py", RUNNER.read_text())
    box.exec("root", ["systemd-run", "--quiet", "--collect", "--unit=jobrunner", "--uid=llm", "--setenv=HOME=/home/llm",
                      "python3", "/home/llm/jobrunner.py", "--jobs", "/home/llm/jobs", "--every", "0.25"])
    queue = {"path": "~/jobs", "settle": "500ms"}
    serving = operator.serve(hosts={"a9": operator.host(box, job_queue=queue)}, handover="1s", tick="30s")
    traffic = Traffic(serving)
    rows = []
    for number in range(ROUNDS):
        wait_for("the engine to be up", lambda: serving.host("a9")["state"] == "ready", 60.0)
        flowing = stream(serving, "a9-deep", 600) if number % 2 else None
        job = f"{number:02}-test.job"
        box.write("jobs/queue/" + job, JOB)
        waits = moment("the job to wait", lambda job=job: f"gpu-wait {job}" in box.read("jobs/runner.log"))
        streamed = 0.0
        if flowing:
            assert flowing.whole().endswith(b"data: [DONE]\n\n")  # a cut stream raises
            streamed = time.monotonic()
        gone = moment("the engine's end", lambda: not box.unit_pids(MAINLINE))
        wait_for("the job's end", lambda job=job: f"done {job}" in box.read("jobs/runner.log"), 60.0)
        assert box.read(f"jobs/output/{job}.out") == ""
        rows.append((job, gone - waits, gone - streamed if flowing else None))
    traffic.ended.set()
    traffic.join(60)
    assert set(traffic.statuses) == {200, 423}
    assert serving.log().count(": engine stopped") == ROUNDS
    assert serving.host("a9")["stop_error"] is None
    print("\njob           gpu-wait to engine's end   stream's end to engine's end")
    for job, after_wait, after_stream in rows:
        print(f"{job}   {after_wait:10.2f} s   " + (f"{after_stream:25.2f} s" if after_stream is not None else ""))
    assert all(after_wait < 15 for _, after_wait, after_stream in rows if after_stream is None)
    assert all(after_stream < 15 for _, _, after_stream in rows if after_stream is not None)

#!/usr/bin/env python3
"""A small job queue for one GPU box, in the words that llmguard reads (`job_queue = "~/jobs"`).

    jobrunner.py [--jobs ~/jobs] [--every 10] [--once]

A job is a shell script in ~/jobs/queue; it moves to running/, then to done/ or failed/; its output is output/NAME.out. Jobs
start in the order of their names, one at a time per lane: `gpu`, unless a line `# lane: cpu` stands in the script. A gpu job
waits while nvidia-smi lists any process on the GPU; that is logged once per blocker, and llmguard stops its engine for it. Where
nvidia-smi can't be asked (`gpu-unknown`) it waits, too: for another vendor's GPU put your own question into `gpu_processes`.

runner.log has one event a line, in local time:

    2026-10-25 16:57:34 queued 00-test.job
    2026-10-25 16:57:34 gpu-wait 00-test.job pid=2530256 comm=llama-server
    2026-10-25 16:57:44 start 00-test.job pid=2530400
    2026-10-25 16:57:54 done 00-test.job seconds=10

A crash leaves nothing ambiguous: a file moves by rename only, and a job holds a lock on its own script for as long as any of its
processes lives. A runner that starts anew therefore knows which jobs of running/ still run (they are waited for) and which died
with the last runner (they go to failed/).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import time
from pathlib import Path

FOLDERS = ("queue", "running", "done", "failed", "output")  # running/ holds scripts alone: each file there is a job


def gpu_processes() -> list[tuple[int, str]]:
    """(pid, comm) of who is on the GPU; OSError or CalledProcessError when nobody can tell."""
    argv = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader,nounits"]
    output = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True).stdout
    found = []
    for line in output.split():
        try:
            found.append((int(line), Path(f"/proc/{line}/comm").read_text().strip()))
        except OSError:
            found.append((int(line), "?"))
    return found


def is_running(script: Path) -> bool:
    """Does any process of this job live? They all share a lock on its script."""
    with open(script) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Runner:
    def __init__(self, jobs: Path) -> None:
        self.jobs = jobs
        self.started: dict[str, tuple[subprocess.Popen, float]] = {}
        self.said: set[tuple[str, ...]] = set()  # what is in the log already
        for folder in FOLDERS:
            (jobs / folder).mkdir(parents=True, exist_ok=True)

    def look(self) -> None:
        """One round: what ended, what may start."""
        for script in self.scripts("running"):
            if not is_running(script):
                self.finish(script)
        busy = {self.lane(script) for script in self.scripts("running")}
        for script in self.scripts("queue"):
            self.log_once("queued", script.name)
            lane = self.lane(script)
            if lane not in busy and (lane == "cpu" or self.gpu_is_free(script.name)):
                self.start(script)
                busy.add(lane)

    def scripts(self, folder: str) -> list[Path]:
        return sorted(path for path in (self.jobs / folder).iterdir() if path.suffix == ".job")

    @staticmethod
    def lane(script: Path) -> str:
        return "cpu" if "# lane: cpu" in script.read_text(errors="replace") else "gpu"

    def gpu_is_free(self, name: str) -> bool:
        try:
            blockers = gpu_processes()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self.log_once("gpu-unknown", name, type(error).__name__)
            return False
        for pid, comm in blockers[:1]:
            self.log_once("gpu-wait", name, f"pid={pid}", f"comm={comm}")
        return not blockers

    def start(self, script: Path) -> None:
        running = self.jobs / "running" / script.name
        os.rename(script, running)
        with open(running) as lock, open(self.jobs / "output" / f"{script.name}.out", "wb") as output:
            fcntl.flock(lock, fcntl.LOCK_EX)
            argv = ["/bin/sh", str(running)]
            null = subprocess.DEVNULL
            job = subprocess.Popen(argv, stdin=null, stdout=output, stderr=output, pass_fds=[lock.fileno()], start_new_session=True)
        self.started[script.name] = job, time.monotonic()
        self.log("start", script.name, f"pid={job.pid}")

    def finish(self, script: Path) -> None:
        job, begun = self.started.pop(script.name, (None, 0.0))
        code = job.wait() if job else None
        event = "done" if code == 0 else "failed"
        os.rename(script, self.jobs / event / script.name)
        self.said = {words for words in self.said if words[1] != script.name}
        how = f"seconds={time.monotonic() - begun:.0f}" if job else "reason=the-runner-died"
        self.log(event, script.name, how)

    def log_once(self, *words: str) -> None:
        if words not in self.said:
            self.said.add(words)
            self.log(*words)

    def log(self, *words: str) -> None:
        with open(self.jobs / "runner.log", "a") as log:
            log.write(" ".join((time.strftime("%Y-%m-%d %H:%M:%S"), *words)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--jobs", type=Path, default=Path("~/jobs").expanduser())
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="one look only")
    options = parser.parse_args()
    runner = Runner(options.jobs)
    while True:
        begun = time.monotonic()
        runner.look()
        if options.once:
            return
        time.sleep(max(0.1, options.every - (time.monotonic() - begun)))


if __name__ == "__main__":
    main()

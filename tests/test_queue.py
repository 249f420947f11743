"""Section 5, the job queue: what its folders and its runner's log say. And examples/jobrunner.py, whose log that is."""

from __future__ import annotations

import contextlib
import errno
import gzip
import importlib.util
import os
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from parts import PATIENCE, ROOT, FakeClock, eventually
from hypothesis import given, settings
from hypothesis import strategies as st
from sim import PORTS, ToyAgent, ToyBox, Unit

import llmguard
from llmguard import Box, QueueReading, QueueSettings, Wait, age, queue_owners, queue_signs, read_queue

SINCE = "2026-10-25 16:57:34"
NIGHT = Wait("00-night.job", SINCE, 4242, "llama-server")
WAIT_LINE = f"{SINCE} gpu-wait 00-night.job pid=4242 comm=llama-server\n"


class Queue:
    """A queue's folder below a root; `read` is one look at it."""

    def __init__(self, root: Path, *folders: str) -> None:
        self.root, self.path = root, root / "jobs"
        for folder in folders or ("waiting", "running", "done", "failed"):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        self.now = 1_793_000_000.0

    def put(self, name: str, folder: str = "waiting") -> None:
        (self.path / folder / name).write_text("sleep 5\n")

    def log(self, content: str | bytes, name: str = "runner.log", age: float = 0.0) -> Path:
        """A log as it stands, last written `age` seconds ago."""
        path = self.path / name
        data = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        os.utime(path, (self.now - age, self.now - age))
        return path

    def changed(self, seconds_ago: float) -> None:
        os.utime(self.path / "running", (self.now - seconds_ago,) * 2)

    def read(self, **more) -> QueueReading:
        return read_queue(Box(str(self.root)), QueueSettings("/jobs", **more))

    def owners(self, **more) -> list[tuple[str, str]]:
        found = queue_owners(self.read(**more), QueueSettings("/jobs", **more), self.now)
        return [(owner.kind, owner.text) for owner in found]


@pytest.fixture
def queue(tmp_path) -> Queue:
    made = Queue(tmp_path)
    made.changed(86400)
    return made


@pytest.fixture
def night(queue) -> Queue:
    """One job waits."""
    queue.put("00-night.job")
    return queue


# ----- folders


def test_an_empty_queue_has_no_owners_though_its_log_does_not_exist(queue):
    reading = queue.read()
    assert (reading.jobs, reading.waits, reading.problem, reading.note) == ((), (), None, None) and queue.owners() == []


def test_a_job_in_running_is_an_owner_with_the_time_since_when(queue):
    queue.put("01-bench.job", "running")
    queue.changed(3600)
    (owner,) = queue_owners(queue.read(), QueueSettings("/jobs"), queue.now)
    assert (owner.kind, owner.text) == ("job", "bench job 01-bench.job is in /jobs/running")
    assert owner.since == llmguard.timestamp(queue.now - 3600)


def test_a_file_that_a_crashed_runner_left_in_running_stays_the_benchmarks_whatever_its_log_says(queue):
    queue.put("01-bench.job", "running")
    queue.log(f"{SINCE} start 01-bench.job pid=1\n{SINCE} failed 01-bench.job\n")
    queue.changed(7 * 86400)
    assert [kind for kind, _ in queue.owners()] == ["job"]


def test_hidden_files_are_no_jobs(queue):
    queue.put(".gitkeep", "running")
    queue.put(".gitkeep")
    queue.changed(86400)
    assert queue.owners() == [] and queue.read().jobs == ()


@pytest.mark.parametrize("folders", [("waiting",), ("queue",), ("waiting", "queue")])
def test_jobs_wait_in_waiting_or_in_queue_or_in_both(tmp_path, folders):
    queue = Queue(tmp_path, "running", *folders)
    for folder in folders:
        queue.put(f"{folder}.job", folder)
    queue.log("".join(f"{SINCE} gpu-wait {folder}.job\n" for folder in folders))
    assert [wait.job for wait in queue.read().waits] == sorted(f"{folder}.job" for folder in folders)


def test_folders_and_the_log_may_be_named_otherwise_and_lie_elsewhere(tmp_path):
    queue = Queue(tmp_path, "active", "todo")
    queue.put("x.job", "todo")
    queue.put("y.job", "active")
    (tmp_path / "var").mkdir()
    (tmp_path / "var/bench.log").write_text(f"{SINCE} gpu-wait x.job\n")
    reading = queue.read(running="active", waiting="todo", log="../var/bench.log")
    assert reading.jobs == ("y.job",) and [wait.job for wait in reading.waits] == ["x.job"]


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (lambda path: os.rmdir(path / "running"), "No such file or directory"),
        (lambda path: os.rmdir(path / "waiting"), "there is no waiting/ or queue/"),
        (lambda path: (os.rmdir(path / "running"), (path / "running").write_text("")), "Not a directory"),
        (lambda path: os.rename(path, path.parent / "elsewhere"), "No such file or directory"),
    ],
)
def test_a_queue_that_cannot_be_read_is_unknown_and_unknown_is_an_owner(queue, broken, says):
    broken(queue.path)
    ((kind, text),) = queue.owners()
    assert kind == "unknown" and text.startswith("the job queue /jobs cannot be read: ") and says in text


def test_a_log_that_cannot_be_read_is_unknown_while_jobs_wait_and_of_no_interest_otherwise(night):
    (night.path / "runner.log").mkdir()
    assert night.owners() == [("unknown", "the log of job queue /jobs cannot be read: Is a directory")]
    (night.path / "waiting/00-night.job").unlink()
    assert night.owners() == []


def test_a_read_error_in_the_middle_of_the_log_is_unknown(night, monkeypatch):
    def fails(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(llmguard, "_last_lines", fails)
    night.log(WAIT_LINE)
    assert night.owners() == [("unknown", "the log of job queue /jobs cannot be read: Input/output error")]


# ----- settle


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (34, "34s"), (60, "1m0s"), (119.5, "1m59s"), (119.999, "1m59s"), (120, None), (120.001, None), (86400, None)],
)
def test_a_running_that_changed_less_than_settle_ago_is_an_owner_to_the_second(queue, seconds, text):
    queue.changed(seconds)
    says = f"bench job queue /jobs/running changed {text} ago (the runner may start its next job)"
    assert queue.owners() == ([("settle", says)] if text else [])


def test_settle_is_as_long_as_configured(queue):
    queue.changed(34)
    assert queue.owners(settle=34.0) == [] and len(queue.owners(settle=35.0)) == 1


@pytest.mark.parametrize("ahead", [1, 3600, 86400 * 365])
def test_a_change_in_the_future_counts_as_just_now(queue, ahead):
    queue.changed(-ahead)
    assert queue.owners() == [("settle", "bench job queue /jobs/running changed 0s ago (the runner may start its next job)")]


def test_a_job_that_has_just_left_and_one_that_runs_and_one_that_waits_are_each_named(night):
    night.put("01-bench.job", "running")
    night.log(WAIT_LINE)
    night.changed(5)
    assert [kind for kind, _ in night.owners()] == ["job", "settle", "wait"]
    assert night.owners()[2][1] == f"bench job 00-night.job waits for the GPU since {SINCE}"


# ----- the last word of the log


@pytest.mark.parametrize(
    ("promise", "log", "waits"),
    [
        ("a wait is outstanding", WAIT_LINE, [NIGHT]),
        ("nothing was said of it yet", "", []),
        ("it was only queued", f"{SINCE} queued 00-night.job\n", []),
        ("it was queued, then it waited", f"{SINCE} queued 00-night.job\n" + WAIT_LINE, [NIGHT]),
        ("a start ended the wait", WAIT_LINE + f"{SINCE} start 00-night.job pid=5\n", []),
        ("a done ended the wait", WAIT_LINE + f"{SINCE} done 00-night.job\n", []),
        ("a failed ended the wait", WAIT_LINE + f"{SINCE} failed 00-night.job\n", []),
        ("it ran yesterday and waits anew", f"{SINCE} start 00-night.job\n{SINCE} done 00-night.job\n" + WAIT_LINE, [NIGHT]),
        ("queued again after it was done: not a wait yet", WAIT_LINE + f"{SINCE} done 00-night.job\n{SINCE} queued 00-night.job\n", []),
        ("the last blocker counts", f"{SINCE} gpu-wait 00-night.job pid=1 comm=x\n" + WAIT_LINE, [NIGHT]),
        ("what others did since is nothing to it", WAIT_LINE + f"{SINCE} start 01-cpu.job\n{SINCE} done 01-cpu.job\n" * 500, [NIGHT]),
        ("a job of a longer name is another one", WAIT_LINE + f"{SINCE} start 00-night.job2\n{SINCE} done 00-night.job.old\n", [NIGHT]),
        ("a runner that cannot see the GPU does not end a wait", WAIT_LINE + f"{SINCE} gpu-unknown 00-night.job OSError\n", [NIGHT]),
        ("other lines are skipped", "Traceback (most recent call last):\n\n" + WAIT_LINE + "  File x\n=====\n", [NIGHT]),
        ("no blocker is named", f"{SINCE} gpu-wait 00-night.job\n", [Wait("00-night.job", SINCE)]),
        ("a blocker without a name", f"{SINCE} gpu-wait 00-night.job pid=7\n", [Wait("00-night.job", SINCE, 7)]),
        ("more words", f"{SINCE} gpu-wait 00-night.job on gpu 0, held: pid=7 user=me comm=x mem=1\n", [Wait("00-night.job", SINCE, 7, "x")]),
        ("a blocker of an impossible pid", f"{SINCE} gpu-wait 00-night.job pid={'9' * 5000} comm=x\n", [Wait("00-night.job", SINCE, None, "x")]),
        ("CRLF", WAIT_LINE.replace("\n", "\r\n"), [NIGHT]),
        ("blanks and tabs", f"  {SINCE}\tgpu-wait   00-night.job   pid=4242  comm=llama-server  \n", [NIGHT]),
    ],
    ids=lambda value: value if isinstance(value, str) and "\n" not in value and value else "",
)
def test_the_last_word_of_the_log_on_a_job_counts(night, promise, log, waits):
    night.log(log)
    assert list(night.read().waits) == waits, promise


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("2026-10-25 02:59:50", "2026-10-25 02:00:10"),  # the hour that comes twice
        ("2026-03-29 01:59:50", "2026-03-29 03:00:10"),
        ("2027-01-01 00:00:00", "2026-01-01 00:00:00"),  # the clock was set
        (SINCE, SINCE),
    ],
)
def test_the_order_of_the_lines_counts_not_their_clocks(night, first, second):
    night.log(f"{first} start 00-night.job\n{second} gpu-wait 00-night.job\n")
    assert [wait.since for wait in night.read().waits] == [second]
    night.log(f"{first} gpu-wait 00-night.job\n{second} start 00-night.job\n")
    assert night.read().waits == ()


@pytest.mark.parametrize(
    "since",
    ["2026-10-25 16:57:34", "2026-10-25T16:57:34", "2026-10-25T15:57:34Z", "2026-10-25T16:57:34+01:00", "2026-10-25T16:57:34.123456+0100",
     "2026-10-25 16:57:34.5"],
)
def test_times_are_local_or_iso_with_an_offset_and_told_as_the_runner_wrote_them(night, since):
    night.log(f"{since} gpu-wait 00-night.job pid=4242 comm=llama-server\n")
    assert night.read().waits == (Wait("00-night.job", since, 4242, "llama-server"),)


def test_two_jobs_that_wait_are_both_told_though_the_second_only_ever_waited_behind_the_first(night):
    night.put("01-next.job")
    night.log(WAIT_LINE + f"{SINCE} queued 01-next.job\n{SINCE} gpu-wait 01-next.job pid=4242 comm=llama-server\n")
    assert [wait.job for wait in night.read().waits] == ["00-night.job", "01-next.job"]
    os.rename(night.path / "waiting/00-night.job", night.path / "done/00-night.job")
    with open(night.path / "runner.log", "a") as log:
        log.write(f"{SINCE} start 00-night.job\n{SINCE} done 00-night.job\n")
    assert [wait.job for wait in night.read().waits] == ["01-next.job"]


def test_a_job_that_was_taken_out_of_the_queue_waits_no_more(night):
    night.log(WAIT_LINE)
    (night.path / "waiting/00-night.job").unlink()
    assert night.read().waits == () and night.owners() == []


def test_a_line_that_is_still_being_written_is_read_when_its_newline_comes(night):
    night.log(WAIT_LINE[:-1])
    assert night.read().waits == ()
    night.log(WAIT_LINE + f"{SINCE} star")
    assert night.read().waits == (NIGHT,)
    night.log(WAIT_LINE + f"{SINCE} start 00-night.job")
    assert night.read().waits == (NIGHT,), "the whole line may yet say something else"
    night.log(WAIT_LINE + f"{SINCE} start 00-night.job\n")
    assert night.read().waits == ()


# ----- rotation


@pytest.mark.parametrize("rotated", ["runner.log.1", "runner.log-20261123", "runner.log.1.gz", "runner.log-20261123.gz"])
def test_the_only_gpu_wait_line_stands_in_the_rotated_log_and_the_new_one_begins_with_nul_bytes(night, rotated):
    night.log(f"{SINCE} queued 00-night.job\n" + WAIT_LINE, rotated, age=600)
    night.log(b"\0" * 420 + f"{SINCE} queued 01-cpu.job\n{SINCE} start 01-cpu.job\n2026-11-23 00:05:15".encode())
    assert night.read().waits == (NIGHT,) and night.read().note is None


def test_the_line_right_after_nul_bytes_counts(night):
    night.log(WAIT_LINE, "runner.log.1", age=600)
    night.log(b"\0" * 420 + f"{SINCE} start 00-night.job\n".encode())
    assert night.read().waits == ()


def test_older_logs_are_read_newest_first_whatever_their_names(night):
    night.log(f"{SINCE} start 00-night.job\n", "runner.log-20261121", age=9000)
    night.log(WAIT_LINE, "runner.log.2.gz", age=600)
    night.log(f"{SINCE} failed 00-night.job\n", "runner.log.1", age=9999)
    night.log("")
    assert night.read().waits == (NIGHT,)
    night.log(f"{SINCE} done 00-night.job\n", "runner.log.9", age=60)
    assert night.read().waits == ()


def test_between_the_rename_of_a_log_and_the_first_line_of_the_next_nothing_is_forgotten(night):
    night.log(WAIT_LINE, "runner.log.1", age=1)
    assert night.read().waits == (NIGHT,) and night.read().problem is None


def test_other_files_beside_the_log_are_no_logs(night):
    night.log(WAIT_LINE, "other.log.1")
    night.log(WAIT_LINE, "xrunner.log")
    night.log("")
    assert night.read().waits == ()


@pytest.mark.parametrize(
    "broken",
    [lambda data: data[:-10], lambda data: data[:30], lambda data: b"no gzip at all", lambda data: data[:10] + b"\xff" * 20 + data[30:], lambda data: b""],
)
def test_an_older_log_that_cannot_be_read_is_noted_and_does_no_harm(night, broken):
    path = night.log(WAIT_LINE * 3, "runner.log.1.gz", age=600)
    path.write_bytes(broken(path.read_bytes()))
    night.log(f"{SINCE} queued 00-night.job\n")
    assert night.read().problem is None
    night.log("")
    reading = night.read()
    assert reading.problem is None and (reading.note == "runner.log.1.gz cannot be read" or path.read_bytes() == b"")


def test_of_a_log_of_3_gb_only_the_tail_is_read_and_that_is_said_when_it_matters(night):
    with open(night.path / "runner.log", "wb") as log:
        log.write(WAIT_LINE.encode())
        log.truncate(3 << 30)  # sparse: as after copytruncate under a writing runner
        log.seek(0, os.SEEK_END)
        log.write(f"\n{SINCE} queued 01-cpu.job\n".encode())
    tracemalloc.start()
    reading = night.read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    assert reading.waits == () and reading.note == "only the last 8 MiB of runner.log were read"
    with open(night.path / "runner.log", "ab") as log:
        log.write(WAIT_LINE.encode())
    assert night.read().waits == (NIGHT,) and night.read().note is None


def test_a_packed_log_that_unpacks_to_much_more_is_read_in_bounded_memory(night):
    night.log(WAIT_LINE + "x" * 99 + "\n", "runner.log.1.gz", age=600)
    with gzip.open(night.path / "runner.log.1.gz", "wb", compresslevel=1) as packed:
        for _ in range(160):
            packed.write(b"\0" * (1 << 20))
        packed.write(b"\n" + WAIT_LINE.encode())
    tracemalloc.start()
    reading = night.read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 << 20 and reading.waits == (NIGHT,), "its end counts, as of any log"
    with gzip.open(night.path / "runner.log.1.gz", "wb", compresslevel=1) as packed:
        for _ in range(300):
            packed.write(b"\0" * (1 << 20))
    assert night.read().waits == () and night.read().note == "runner.log.1.gz cannot be read", "a bomb is not unpacked to its end"


# ----- other runners, odd names


OTHER = r"\[(?P<time>[^\]]+)\] (?P<event>\S+): (?P<job>\S+)(?: behind (?P<comm>\w+)/(?P<pid>\w+))?"


def test_the_lines_of_another_runner_are_read_with_a_configured_regex(night):
    night.log("[Sun 16:57] gpu-wait: 00-night.job behind python3/77\n")
    assert night.read(pattern=OTHER).waits == (Wait("00-night.job", "Sun 16:57", 77, "python3"),)
    night.log("[Sun 16:57] gpu-wait: 00-night.job behind python3/unknown\n")
    assert night.read(pattern=OTHER).waits == (Wait("00-night.job", "Sun 16:57", None, "python3"),)
    night.log("[Sun 16:57] gpu-wait: 00-night.job\n[Sun 16:58] start: 00-night.job\n")
    assert night.read(pattern=OTHER).waits == ()


def test_a_regex_with_only_event_and_job_is_enough(night):
    night.log("gpu-wait 00-night.job\n")
    assert night.read(pattern=r"(?P<event>\S+) (?P<job>\S+)").waits == (Wait("00-night.job", ""),)


def test_names_with_control_characters_are_shown_not_sent(queue):
    queue.put("x\x1b[2J\ny.job", "running")
    queue.changed(86400)
    assert queue.owners() == [("job", "bench job x\\x1b[2J\\x0ay.job is in /jobs/running")]


def test_a_name_that_is_no_text_is_read_and_can_be_told(queue):
    with contextlib.suppress(OSError), open(os.fsencode(str(queue.path / "running")) + b"/\xff\xfe.job", "w"):
        queue.changed(86400)
        ((kind, text),) = queue.owners()
        assert kind == "job" and text.encode() and text.isprintable()


@settings(max_examples=400, deadline=None)
@given(
    st.binary(max_size=400) | st.lists(st.sampled_from([WAIT_LINE.encode(), b"\0", b"\xff", b"pid=", b"9" * 40, b"\n", SINCE.encode(), b" start ", b"00-night.job"])).map(b"".join),
    st.sampled_from(["runner.log", "runner.log.1", "runner.log.1.gz"]),
    st.booleans(),
)
def test_whatever_stands_in_a_log_it_is_read_without_an_error(data, name, packed):
    with tempfile.TemporaryDirectory() as folder:
        queue = Queue(Path(folder))
        queue.put("00-night.job")
        (queue.path / name).write_bytes(gzip.compress(data) if packed else data)
        reading = queue.read()
        assert reading.problem is None and all(wait.job == "00-night.job" for wait in reading.waits)
        assert all(kind in ("wait", "settle") for kind, _ in queue.owners())


@given(st.floats(-1e9, 1e9))
def test_any_age_can_be_told(seconds):
    assert age(seconds)[-1] in "sm"


# ----- the blocker that a wait names


@pytest.fixture
def agent(night):
    """An agent on a toy box with this queue, where our engine runs as pid 2530256 and somebody's python3 as 7000."""
    box = ToyBox(str(night.root))
    box.spawn("python3", 7000)

    class Site:
        units = {name: Unit(name) for name in PORTS}

    Site.units["mainline"].main = box.spawn("llama-server")
    engines = {name: {"command": ["x"], "port": port} for name, port in PORTS.items()}

    def status(**more) -> dict:
        reply = ToyAgent(Site, str(night.root), box, FakeClock(night.now)).answer({"op": "status", "engines": engines, "job_queue": "/jobs", **more})
        assert reply["ok"] and reply["queue_checked"] and "job_queue" in reply["checked"], reply
        return reply

    return status


@pytest.mark.parametrize(
    ("promise", "blocker", "foreign"),
    [
        ("our own engine", "pid=2530256 comm=llama-server", False),
        ("an engine of ours that is long gone: it was ours under another pid", "pid=4242 comm=llama-server", False),
        ("somebody else's process that lives", "pid=7000 comm=python3", True),
        ("somebody else's, named without a comm", "pid=7000", True),
        ("a pid that was given to another program since", "pid=7000 comm=llama-server", False),
        ("no pid at all", "comm=llama-server", False),
        ("nobody", "", False),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)
def test_a_wait_is_for_somebody_elses_end_only_when_its_blocker_lives_and_is_not_ours(night, agent, promise, blocker, foreign):
    night.log(f"{SINCE} gpu-wait 00-night.job {blocker}\n")
    (wait,) = agent()["bench_waits"]
    assert wait["job"] == "00-night.job" and wait["since"] == SINCE and bool(wait.get("foreign")) is foreign, promise
    assert [owner["kind"] for owner in agent()["foreign"]] == ["wait"], "either way nothing is started in front of it"


def test_a_queue_that_was_not_asked_for_is_not_said_to_be_checked(agent):
    with pytest.raises(AssertionError):
        agent(job_queue=None)


# ----- noticing a change without reading


def test_each_change_of_the_queue_shows_in_its_signs_and_nothing_else_does(night):
    settings_ = QueueSettings("/jobs")
    box = Box(str(night.root))
    seen = [queue_signs(box, settings_)]

    def changed() -> bool:
        seen.append(queue_signs(box, settings_))
        return seen[-1] != seen[-2]

    assert not changed()
    night.log(WAIT_LINE)
    assert changed()
    with open(night.path / "runner.log", "a") as log:
        log.write("x")
    assert changed()
    os.rename(night.path / "runner.log", night.path / "runner.log.1")
    assert changed()
    night.log(WAIT_LINE + "x")
    assert changed(), "as large as the one before, but another file"
    night.log(WAIT_LINE + "y", "new")
    os.replace(night.path / "new", night.path / "runner.log")
    assert changed(), "as large and as old as the one before, in its very place"
    os.truncate(night.path / "runner.log", 0)
    assert changed()
    night.put("01.job", "running")
    assert changed()
    night.put("02.job")
    assert changed()
    night.put("03.job", "done")
    assert not changed()


# ----- examples/jobrunner.py

RUNNER = ROOT / "examples" / "jobrunner.py"


class Jobs:
    """A real runner on a queue of its own; who is on the GPU stands in a file that a stub nvidia-smi prints."""

    def __init__(self, folder: Path) -> None:
        self.path, self.bin = folder / "jobs", folder / "bin"
        self.gpu, self.looks = folder / "gpu", folder / "looks"
        self.bin.mkdir()
        self.looks.write_text("")
        self.on_gpu()
        stub = self.bin / "nvidia-smi"
        stub.write_text(f"#!/bin/sh\necho look >> {self.looks}\ncat {self.gpu}\n")
        stub.chmod(0o755)
        (self.path / "queue").mkdir(parents=True)
        self.process: subprocess.Popen | None = None
        self.held: list[subprocess.Popen] = []

    def start(self) -> None:
        env = dict(os.environ, PATH=f"{self.bin}:{os.environ['PATH']}")
        argv = [sys.executable, str(RUNNER), "--jobs", str(self.path), "--every", "0.1"]
        self.process = subprocess.Popen(argv, env=env, start_new_session=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def put(self, name: str, script: str) -> None:
        """As a user does: whole, by a rename."""
        part = self.path / (name + ".part")
        part.write_text(script)
        os.rename(part, self.path / "queue" / name)

    def on_gpu(self, *pids: int) -> None:
        part = self.gpu.with_suffix(".part")
        part.write_text("".join(f"{pid}\n" for pid in pids))
        os.rename(part, self.gpu)

    def blocker(self) -> int:
        self.held.append(subprocess.Popen(["sleep", "600"]))
        return self.held[-1].pid

    def looked(self, times: int = 3) -> None:
        """Once it has asked for the GPU so many times more."""
        before = len(self.looks.read_text().splitlines())
        eventually(lambda: len(self.looks.read_text().splitlines()) >= before + times, "the runner looks")

    def log(self) -> list[str]:
        path = self.path / "runner.log"
        return [line.split(" ", 2)[2] for line in path.read_text().splitlines()] if path.exists() else []

    def said(self, words: str) -> int:
        return sum(line.startswith(words) for line in self.log())

    def at(self, folder: str) -> list[str]:
        return sorted(path.name for path in (self.path / folder).iterdir() if path.suffix == ".job")

    def gate(self) -> Path:
        """A file that a job waits for, opened by the test."""
        path = self.path.parent / f"gate{len(self.held)}{len(os.listdir(self.path.parent))}"
        os.mkfifo(path)
        return path

    def read(self) -> QueueReading:
        return read_queue(Box(), QueueSettings(str(self.path)))

    def stop(self) -> None:
        for process in [self.process, *self.held]:
            if process and process.poll() is None:
                process.kill()
                process.wait(PATIENCE)


@pytest.fixture
def jobs(tmp_path):
    made = Jobs(tmp_path)
    yield made
    made.stop()


def test_a_gpu_job_waits_while_anybody_is_on_the_gpu_says_so_once_per_blocker_and_runs_then(jobs):
    first, second = jobs.blocker(), jobs.blocker()
    jobs.on_gpu(first)
    jobs.put("00-test.job", "echo hello\n")
    jobs.start()
    eventually(lambda: jobs.said("gpu-wait"))
    jobs.looked()
    assert jobs.log() == ["queued 00-test.job", f"gpu-wait 00-test.job pid={first} comm=sleep"]
    (wait,) = jobs.read().waits
    assert (wait.job, wait.pid, wait.comm) == ("00-test.job", first, "sleep")
    jobs.on_gpu(second, first)
    eventually(lambda: jobs.said("gpu-wait") == 2)
    jobs.looked()
    assert jobs.log()[2:] == [f"gpu-wait 00-test.job pid={second} comm=sleep"]
    jobs.on_gpu()
    eventually(lambda: jobs.said("done"))
    assert jobs.at("done") == ["00-test.job"] and (jobs.path / "output/00-test.job.out").read_text() == "hello\n"
    assert jobs.read().waits == () and [line.split()[0] for line in jobs.log()[3:]] == ["start", "done"]


def test_a_cpu_job_runs_beside_whoever_is_on_the_gpu_and_one_job_at_a_time_per_lane(jobs):
    gate, other = jobs.gate(), jobs.blocker()
    jobs.on_gpu(other)
    jobs.put("00-gpu.job", "true\n")
    jobs.put("01-cpu.job", f"# lane: cpu\ncat {gate}\n")
    jobs.put("02-cpu.job", "# lane: cpu\ntrue\n")
    jobs.start()
    eventually(lambda: jobs.said("start 01-cpu.job"))
    jobs.looked()
    assert jobs.at("queue") == ["00-gpu.job", "02-cpu.job"] and jobs.said("gpu-wait 00-gpu.job") == 1
    jobs.on_gpu()
    eventually(lambda: jobs.said("done 00-gpu.job"), "the gpu lane does not wait for the cpu lane")
    assert jobs.at("running") == ["01-cpu.job"]
    gate.write_text("")
    eventually(lambda: jobs.said("done 02-cpu.job"))
    assert jobs.log().index(next(line for line in jobs.log() if line.startswith("start 02"))) > jobs.log().index(
        next(line for line in jobs.log() if line.startswith("done 01"))
    )


def test_jobs_start_in_the_order_of_their_names_and_one_that_fails_goes_to_failed(jobs):
    for name, script in (("02.job", "true\n"), ("00.job", "exit 3\n"), ("01.job", "true\n")):
        jobs.put(name, script)
    jobs.start()
    eventually(lambda: jobs.said("done 02.job"))
    assert [line.split()[1] for line in jobs.log() if line.startswith("start")] == ["00.job", "01.job", "02.job"]
    assert jobs.at("failed") == ["00.job"] and jobs.at("done") == ["01.job", "02.job"] and jobs.at("running") == []


def test_when_nobody_can_tell_who_is_on_the_gpu_nothing_starts_and_a_wait_stays_one(jobs):
    jobs.on_gpu(jobs.blocker())
    jobs.put("00.job", "true\n")
    jobs.start()
    eventually(lambda: jobs.said("gpu-wait"))
    jobs.gpu.unlink()
    eventually(lambda: jobs.said("gpu-unknown"))
    jobs.looked()
    assert jobs.said("gpu-unknown") == 1 and jobs.at("queue") == ["00.job"] and len(jobs.read().waits) == 1
    jobs.on_gpu()
    eventually(lambda: jobs.said("done"))


def test_a_runner_that_is_killed_leaves_its_job_running_and_the_next_one_waits_for_it(jobs):
    gate = jobs.gate()
    jobs.put("00.job", f"cat {gate}\n")
    jobs.put("01.job", "true\n")
    jobs.start()
    eventually(lambda: jobs.said("start 00.job"))
    jobs.kill()
    jobs.start()
    eventually(lambda: jobs.said("queued 01.job") == 2, "the new one has looked around")
    assert jobs.at("running") == ["00.job"] and jobs.at("queue") == ["01.job"] and jobs.said("start") == 1
    gate.write_text("")
    eventually(lambda: jobs.said("done 01.job"))
    assert jobs.at("failed") == ["00.job"] and jobs.said("failed 00.job reason=the-runner-died") == 1
    assert jobs.at("running") == [] and jobs.at("queue") == []


def test_a_runner_that_is_killed_while_a_job_waits_says_so_again_and_the_wait_is_never_in_doubt(jobs):
    jobs.on_gpu(jobs.blocker())
    jobs.put("00.job", "true\n")
    jobs.start()
    eventually(lambda: jobs.said("gpu-wait"))
    jobs.kill()
    assert len(jobs.read().waits) == 1
    jobs.start()
    eventually(lambda: jobs.said("gpu-wait") == 2)
    assert len(jobs.read().waits) == 1
    jobs.on_gpu()
    eventually(lambda: jobs.said("done"))
    assert jobs.read().waits == ()


class Killed(BaseException):
    pass


@pytest.fixture
def runner(jobs, monkeypatch):
    """make() -> a Runner of that module in this process, whose crash a test can place between any two of its steps."""
    spec = importlib.util.spec_from_file_location("jobrunner", RUNNER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("PATH", f"{jobs.bin}:{os.environ['PATH']}")
    return lambda: module.Runner(jobs.path)


def steps_of(jobs: Jobs, runner, monkeypatch, kill_at: int) -> int:
    """Run one job through its life, and crash at that step; the steps made."""
    steps = 0

    def step(real):
        def wrapped(*args, **more):
            nonlocal steps
            if steps == kill_at:
                raise Killed
            steps += 1
            return real(*args, **more)

        return wrapped

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        one = runner()
        patch.setattr(os, "rename", step(os.rename))
        patch.setattr(subprocess, "Popen", step(subprocess.Popen))
        patch.setattr(type(one), "log", step(type(one).log))
        while not (jobs.at("done") or jobs.at("failed")):
            one.look()
        one.look()
    return steps


@pytest.mark.parametrize("kill_at", range(9))
def test_a_crash_between_any_two_steps_of_the_runner_leaves_every_job_in_one_place_and_none_for_ever(jobs, runner, monkeypatch, kill_at):
    jobs.put("00.job", "true\n")
    steps = steps_of(jobs, runner, monkeypatch, kill_at)
    assert steps == kill_at or kill_at >= steps > 5, "there is such a step"
    places = [folder for folder in ("queue", "running", "done", "failed") if (jobs.path / folder / "00.job").exists()]
    assert len(places) == 1
    second = runner()

    def over() -> bool:
        second.look()
        return not jobs.at("queue") and not jobs.at("running")

    eventually(over)
    assert len(jobs.at("done") + jobs.at("failed")) == 1 and jobs.said("start") <= 1


def test_a_crash_of_the_runner_leaves_nothing_in_running_that_would_hold_the_gpu_for_ever(jobs, runner, monkeypatch):
    for kill_at in range(9):
        jobs.put("00.job", "true\n")
        steps_of(jobs, runner, monkeypatch, kill_at)
        second = runner()

        def over(second=second) -> bool:
            second.look()
            return not jobs.at("queue") and not jobs.at("running")

        eventually(over)
        assert jobs.read().jobs == (), f"killed at step {kill_at}"
        for folder in ("done", "failed"):
            for name in jobs.at(folder):
                (jobs.path / folder / name).unlink()


def test_a_running_job_is_one_owner_not_two(jobs):
    gate = jobs.gate()
    jobs.put("00.job", f"cat {gate}\n")
    jobs.start()
    eventually(lambda: jobs.said("start"))
    found = jobs.read().jobs
    gate.write_text("")
    assert found == ("00.job",)




# ----- the owner command, for other queues


def owners_by(tmp_path, *argv: str) -> tuple[list[tuple[str, str]], list[str]]:
    """What a status says of the owners that a command names: (kind, text) of each, and the guards applied."""
    box = llmguard.Box(str(tmp_path))
    (tmp_path / "proc").mkdir(exist_ok=True)
    reply = llmguard.Agent(str(tmp_path / "state"), box).answer({"op": "status", "engines": {}, "owner_check": list(argv)})
    return [(owner["kind"], owner["text"]) for owner in reply["foreign"]], reply["checked"]


def test_each_line_of_the_owner_command_is_an_owner(tmp_path):
    said, checked = owners_by(tmp_path, "printf", "slurm job 7 of ann\\n\\nslurm job 8 of \\033[1mbob\\n")
    assert said == [("check", "slurm job 7 of ann"), ("check", "slurm job 8 of \\x1b[1mbob")]
    assert "owner_check" in checked


def test_an_owner_command_that_prints_nothing_names_nobody(tmp_path):
    assert owners_by(tmp_path, "true")[0] == []


@pytest.mark.parametrize("argv", [["false"], ["sh", "-c", "echo fine; echo down >&2; exit 3"], ["no-such-program-here"]])
def test_an_owner_command_that_fails_is_unknown_and_unknown_is_an_owner(tmp_path, argv):
    said, checked = owners_by(tmp_path, *argv)
    assert [kind for kind, _ in said] == ["unknown"] and "owner_check" in said[0][1] and "owner_check" in checked

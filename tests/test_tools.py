"""Section 2: durations, sizes, text for logs and clients, other programs, locks, the log."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from parts import PATIENCE, ROOT, FakeClock, eventually
from hypothesis import given, strategies as st

import llmguard
from llmguard import NEVER, AlreadyHeld, Lock, age, client_safe, duration, printable, run, size, size_text

# ----- durations


def test_a_duration_reads_as_people_write_it():
    assert duration("30s") == 30
    assert duration("15m") == 900
    assert duration("1h30m") == 5400
    assert duration("2d") == 172800
    assert duration("500ms") == 0.5
    assert duration("1.5h") == 5400
    assert duration("never") == NEVER
    assert duration(20) == 20.0
    assert duration(0.25) == 0.25
    assert duration("0s") == 0


@pytest.mark.parametrize(
    "wrong",
    ["", " ", "15", "15 m", "m", "-5s", "+5s", "15M", "15min", "1_0s", "1e3s", "30s ", " 30s", "30s\n", ".5s", "5.s", "Never", "inf",
     "nan", "٣s", "３０s", "1h garbage 30m", None, True, False, -1, float("nan"), float("inf"), float("-inf"), [], {}, b"30s",
     10 ** 400, "9" * 400 + "s", "999999999999d"],
)
def test_what_is_no_duration_is_a_value_error(wrong):
    with pytest.raises(ValueError):
        duration(wrong)


@given(st.integers(0, 999), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59), st.integers(0, 999))
def test_a_duration_written_in_parts_is_their_sum(d, h, m, s, ms):
    assert duration(f"{d}d{h}h{m}m{s}s{ms}ms") == pytest.approx(d * 86400 + h * 3600 + m * 60 + s + ms / 1000)


@given(st.text() | st.none() | st.integers() | st.floats() | st.lists(st.integers()))
def test_any_duration_is_seconds_or_a_value_error(anything):
    try:
        seconds = duration(anything)
    except ValueError:
        return
    assert isinstance(seconds, float) and seconds >= 0


# ----- ages


def test_an_age_reads_as_in_the_log():
    assert [age(n) for n in (0, 34, 34.9, 59)] == ["0s", "34s", "34s", "59s"]
    assert [age(n) for n in (60, 61, 600, 3599)] == ["1m0s", "1m1s", "10m0s", "59m59s"]
    assert [age(n) for n in (3600, 7500, 86400, 90000)] == ["1h0m", "2h5m", "24h0m", "25h0m"]
    assert age(-5) == "0s", "a clock that was set back is no reason for a negative age"


@given(st.integers(0, 10 ** 6))
def test_an_age_reads_back_as_a_duration_to_its_own_precision(seconds):
    back = duration(age(seconds))
    assert seconds - 60 < back <= seconds
    assert back == seconds or seconds >= 3600


# ----- sizes


def test_a_size_reads_as_people_write_it():
    assert size("512MiB") == 512 << 20
    assert size("512 MiB") == 512 << 20
    assert size("8GiB") == 8 << 30
    assert size("1.5KiB") == 1536
    assert size("10MB") == 10_000_000
    assert size("1TiB") == 1 << 40
    assert size("7") == size("7B") == size(7) == 7


@pytest.mark.parametrize(
    "wrong",
    ["", "GiB", "-1GiB", "8gib", "8G", "8iB", "8 GiB ", "1_0B", "8  GiB", "0x10", "٨GiB", None, True, -1, 1.5, [], "8GiB\n",
     "9" * 400 + "GiB", "inf"],
)
def test_what_is_no_size_is_a_value_error(wrong):
    with pytest.raises(ValueError):
        size(wrong)


@given(st.integers(0, 1023), st.sampled_from(["", "B", "KiB", "MiB", "GiB", "TiB"]))
def test_a_size_is_its_number_times_its_unit(number, unit):
    power = ["B", "KiB", "MiB", "GiB", "TiB"].index(unit or "B")
    assert size(f"{number}{unit}") == number * 1024 ** power


@given(st.text() | st.none() | st.integers() | st.floats() | st.booleans())
def test_any_size_is_bytes_or_a_value_error(anything):
    try:
        count = size(anything)
    except ValueError:
        return
    assert isinstance(count, int) and count >= 0


def test_bytes_read_as_people_say_them():
    assert size_text(0) == "0 B"
    assert size_text(512 << 20) == "512 MiB"
    assert size_text(int(22.5 * 1024 ** 3)) == "22.5 GiB"
    assert size_text(4096 << 30) == "4096 GiB"


@given(st.integers(0, 1 << 50))
def test_bytes_as_said_read_back_within_a_tenth_of_the_unit(count):
    said = size_text(count)
    assert abs(size(said) - count) <= 0.051 * size("1 " + said.split(" ")[1]) + 1


# ----- text for logs and clients


ANY_TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates too: JSON can hold them


@given(ANY_TEXT)
def test_printable_text_is_one_line_that_utf8_can_hold_and_no_terminal_obeys(text):
    shown = printable(text)
    assert len(shown.splitlines()) <= 1
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in shown)
    shown.encode("utf-8")
    assert printable(shown) == shown


def test_ordinary_text_stays_as_it_is():
    assert printable("host a9: größer — 模型 🦙 'x' \\n") == "host a9: größer — 模型 🦙 'x' \\n"
    assert printable("a\nb\x1b[31m\x00") == "a\\x0ab\\x1b[31m\\x00"


@pytest.mark.parametrize(
    "bait",
    ["status 502", "429", "got 500 from it", "pid 4242", "timeout", "timed out", "time-out", "Timeout was reached", "connection refused",
     "Connection reset by peer", "model is overloaded", "terminated", "rate limit", "rate_limit_exceeded", "Too Many Requests"],
)
def test_a_client_sees_nothing_that_its_retry_pattern_looks_for(bait):
    """The words and numbers that coding agents are known to search error texts for."""
    import re

    for text in (bait, f"before {bait} after", f"({bait})"):
        safe = client_safe(text).lower()
        assert not re.search(r"\b[1-5]\d\d\b|pid \d|time.?out|timed.?out|connection (refused|reset)|overloaded|terminated", safe), safe
        assert not re.search(r"rate.?limit|too many requests", safe), safe


@pytest.mark.parametrize(
    "sentence",
    ["GPU is busy, not switching: bench job queue ~/jobs/running changed 34s ago (the runner may start its next job)",
     "engine a9-ornith15-35b-q8 on port 8081: not ready within 10m0s", "held by llama-server since 2h5m"],
)
def test_a_sentence_without_bait_reaches_the_client_as_it_is(sentence):
    assert client_safe(sentence) == sentence


@given(ANY_TEXT)
def test_client_safe_is_stable(text):
    assert client_safe(client_safe(text)) == client_safe(text)


def test_a_timestamp_is_utc_with_a_z():
    assert llmguard.timestamp(1_761_407_854.9) == "2025-10-25T15:57:34Z"
    assert llmguard.timestamp(0) == "1970-01-01T00:00:00Z"
    assert llmguard.timestamp(None) is None


# ----- other programs


def python(code: str, *argv: str) -> list[str]:
    return [sys.executable, "-S", "-E", "-c", code, *argv]


def ended(pid: int) -> bool:
    """A zombie that init has not collected yet is gone as well."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_run_gives_output_complaint_and_code():
    done = run(python("import sys; sys.stdout.write('out'); sys.stderr.write('first\\n last \\n'); sys.exit(3)"), PATIENCE)
    assert (done.code, done.out, done.complaint) == (3, b"out", "last")


def test_run_says_the_exit_code_when_the_program_says_nothing():
    assert run(python("import sys; sys.exit(7)"), PATIENCE).complaint == "exit code 7"


def test_run_feeds_stdin_and_closes_it():
    data = os.urandom(1 << 20)
    done = run(python("import sys, shutil; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)"), PATIENCE, data=data, limit=2 << 20)
    assert done.code == 0 and done.out == data
    assert run(python("import sys; print(len(sys.stdin.read()))"), PATIENCE).out == b"0\n"


def test_run_ends_a_child_that_prints_more_than_the_limit_and_says_so():
    for stream in ("stdout", "stderr"):
        done = run(python(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)"), PATIENCE, limit=5000)
        assert done.code is None and "printed more than" in done.problem
        assert max(len(done.out), len(done.err)) == 5000


def test_run_ends_the_childs_own_children_with_it():
    done = run(["sh", "-c", "sleep 600 & echo $!; wait"], 1.0)
    assert done.code is None and done.problem
    eventually(lambda: ended(int(done.out)), "the grandchild is gone, too")


def test_run_does_not_hang_on_a_child_that_never_reads_its_stdin():
    done = run(python("print('deaf')"), PATIENCE, data=b"z" * (4 << 20))
    assert (done.code, done.out) == (0, b"deaf\n")


def test_run_ends_a_child_that_ignores_sigterm_at_the_deadline_and_says_so(tmp_path):
    ready = tmp_path / "pid"
    code = "import os, signal, sys, time; signal.signal(15, signal.SIG_IGN); open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    done = run(python(code, str(ready)), 1.5)
    assert done.code is None, "not ended in time"
    if ready.exists() and ready.read_text():  # a slow machine may not have come that far
        assert ended(int(ready.read_text()))


def test_run_keeps_what_was_printed_before_the_deadline():
    done = run(["sh", "-c", "echo early; exec sleep 600"], 1.0)
    assert (done.code, done.out) == (None, b"early\n")


def test_run_comes_back_with_its_child_although_a_grandchild_keeps_the_pipes():
    """An ssh that leaves a ControlMaster behind, a program that daemonises badly: the answer is complete."""
    done = run(["sh", "-c", "sleep 20 & echo $!; echo done"], PATIENCE)
    pid, word = done.out.split()
    os.kill(int(pid), signal.SIGKILL)  # ProcessLookupError: it waited for the grandchild
    assert (done.code, word) == (0, b"done")


def test_a_program_that_is_missing_is_file_not_found():
    with pytest.raises(FileNotFoundError):
        run(["/no/such/program"], PATIENCE)


def test_run_gives_the_child_that_environment_and_no_shell():
    done = run(python("import os, sys; print(os.environ['A'], sys.argv[1:])", "$A; true", "*"), PATIENCE, env={"A": "b c"})
    assert done.out == b"b c ['$A; true', '*']\n"


def test_run_leaks_no_descriptor():
    def descriptors() -> list[str]:
        return os.listdir("/proc/self/fd")

    run(python("pass"), PATIENCE)
    before = len(descriptors())
    for _ in range(3):
        run(python("print(1)"), PATIENCE, data=b"x")
        run(["sleep", "600"], 0.05)
    assert len(descriptors()) == before


# ----- locks, with real processes

HOLD = """
import sys, time
sys.path.insert(0, sys.argv[2])
import llmguard
lock = llmguard.Lock(sys.argv[1], "the oven")
lock.acquire(30)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """start() -> a process that holds the lock of tmp_path until its stdin is closed or it dies."""
    started: list[subprocess.Popen] = []

    def start() -> subprocess.Popen:
        argv = [sys.executable, "-c", HOLD, str(tmp_path / "x.lock"), str(ROOT)]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(PATIENCE)
        process.stdin.close()
        process.stdout.close()


def test_a_lock_names_its_holder(tmp_path, holder):
    process = holder()
    with pytest.raises(AlreadyHeld) as caught:
        Lock(str(tmp_path / "x.lock"), "the oven").acquire()
    text = str(caught.value)
    assert text.startswith(f"the oven is held by the oven (pid {process.pid}) since 20") and text.endswith("Z")
    assert caught.value.exit_code == 75


def test_a_lock_dies_with_its_holder(tmp_path, holder):
    process = holder()
    process.kill()
    process.wait(PATIENCE)
    assert str(process.pid) in (tmp_path / "x.lock").read_text(), "the name is stale by now"
    with Lock(str(tmp_path / "x.lock"), "the oven"):
        assert json.loads((tmp_path / "x.lock").read_text())["pid"] == os.getpid()


def test_a_lock_is_waited_for(tmp_path, holder):
    process = holder()
    taken = threading.Event()

    def wait_for_it() -> None:
        with_it = Lock(str(tmp_path / "x.lock"), "the oven")
        with_it.acquire(PATIENCE)
        taken.set()
        with_it.release()

    thread = threading.Thread(target=wait_for_it)
    thread.start()
    assert not taken.wait(0.2)
    process.stdin.close()
    assert taken.wait(PATIENCE)
    thread.join(PATIENCE)


def test_waiting_for_a_lock_ends_at_its_own_deadline(tmp_path, holder):
    holder()
    clock = FakeClock()
    begun = clock.monotonic()
    with pytest.raises(AlreadyHeld):
        Lock(str(tmp_path / "x.lock"), "the oven", clock).acquire(60.0)
    assert 60.0 <= clock.monotonic() - begun < 60.1


@pytest.mark.parametrize("text", ["", "garbage", "[1, 2]", '{"pid": "x"}', '{"pid": 1}', '{"pid": 2210, "what": "agent", "since": "long ago"}', "\xff" * 9000])
def test_an_empty_or_stale_text_in_a_lock_file_is_harmless(tmp_path, text):
    path = tmp_path / "x.lock"
    path.write_text(text)
    with Lock(str(path), "the oven"):
        assert json.loads(path.read_text())["pid"] == os.getpid()
        path.write_text(text)  # and while it is held
        with pytest.raises(AlreadyHeld, match="the oven is held by "):
            Lock(str(path), "the oven").acquire()


def test_a_lock_file_that_was_deleted_while_held_does_not_let_two_in_by_the_new_file(tmp_path):
    """Whoever waited on the deleted file must not believe in it: the file at the path counts."""
    path = str(tmp_path / "x.lock")
    first = Lock(path, "the oven")
    first.acquire()
    os.unlink(path)
    second = Lock(path, "the oven")
    second.acquire()  # a new file: nobody can know of the first any more
    third = Lock(path, "the oven", FakeClock())
    with pytest.raises(AlreadyHeld, match=r"pid %d" % os.getpid()):
        third.acquire(5.0)
    first.release()
    with pytest.raises(AlreadyHeld):
        third.acquire(5.0)
    second.release()
    third.acquire()
    third.release()


def test_a_waiter_finds_out_that_the_file_it_waited_on_was_replaced(tmp_path):
    """The old file is free, but it is no longer the one at the path: taking it would be taking nothing."""
    path = str(tmp_path / "x.lock")
    held = Lock(path, "the oven")
    held.acquire()
    replaced = Lock(path, "the oven")

    class Meddling(FakeClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if not os.path.exists(path + ".moved"):
                os.rename(path, path + ".moved")
                replaced.acquire()
                held.release()

    waiter = Lock(path, "the oven", Meddling())
    with pytest.raises(AlreadyHeld):
        waiter.acquire(3.0)
    replaced.release()


def test_a_lock_is_not_inherited_by_a_child(tmp_path):
    path = str(tmp_path / "x.lock")
    lock = Lock(path, "the oven")
    lock.acquire()
    child = subprocess.Popen(["sleep", "600"], close_fds=False)
    try:
        lock.release()
        Lock(path, "the oven").acquire()
    finally:
        child.kill()
        child.wait(PATIENCE)


def test_releasing_twice_or_never_acquired_is_harmless(tmp_path):
    lock = Lock(str(tmp_path / "x.lock"), "the oven")
    lock.release()
    lock.acquire()
    lock.release()
    lock.release()
    lock.acquire()
    lock.release()


def test_a_lock_whose_name_cannot_be_written_still_locks(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    path = str(tmp_path / "x.lock")
    with Lock(path, "the oven"), pytest.raises(AlreadyHeld, match="held by another process"):
        Lock(path, "the oven").acquire()


def test_a_refused_lock_leaks_no_descriptor(tmp_path):
    path = str(tmp_path / "x.lock")
    with Lock(path, "the oven"):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(AlreadyHeld):
                Lock(path, "the oven", FakeClock()).acquire(1.0)
        assert len(os.listdir("/proc/self/fd")) == before


def test_many_processes_never_hold_a_lock_together(tmp_path):
    code = """
import os, sys
sys.path.insert(0, sys.argv[2])
import llmguard
for _ in range(20):
    lock = llmguard.Lock(sys.argv[1], "the oven")
    lock.acquire(60)
    os.mkdir(sys.argv[1] + ".inside")   # fails when somebody else is in
    os.rmdir(sys.argv[1] + ".inside")
    lock.release()
"""
    argv = [sys.executable, "-c", code, str(tmp_path / "x.lock"), str(ROOT)]
    crowd = [subprocess.Popen(argv, stderr=subprocess.PIPE) for _ in range(4)]
    for process in crowd:
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err.decode()


# ----- the log


def logging(code: str, stderr, **env: str) -> subprocess.CompletedProcess:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import llmguard; from llmguard import log; " + code
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr, env={**os.environ, **env}, timeout=PATIENCE)


def test_the_log_survives_a_full_disk():
    with open("/dev/full", "wb") as full:
        done = logging("log('a'); log('b' * 100000); print('on')", full)
    assert (done.returncode, done.stdout) == (0, b"on\n")


def test_the_log_survives_a_reader_that_went_away():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as broken:
        done = logging("log('a'); log('b'); print('on')", broken)
    assert (done.returncode, done.stdout) == (0, b"on\n")


def test_the_log_survives_a_closed_stderr():
    done = logging("import os; os.close(2); log('a'); print('on')", subprocess.PIPE)
    assert (done.returncode, done.stdout) == (0, b"on\n")


def test_an_event_is_one_stamped_line_whatever_is_in_it(tmp_path):
    done = logging(r"log('a\nb \ud800 \x1b[2J gr\xf6\xdfe')", subprocess.PIPE, PYTHONUTF8="0", LC_ALL="C")
    lines = done.stderr.decode("utf-8").splitlines()
    assert len(lines) == 1
    stamp, text = lines[0][:20], lines[0][20:]
    time.strptime(stamp, "%Y/%m/%d %H:%M:%S ")
    assert text.startswith("a\\x0ab ") and "\x1b" not in text and text.endswith("größe")


def test_journald_stamps_by_itself():
    assert logging("log('a')", subprocess.PIPE, JOURNAL_STREAM="8:1").stderr == b"<6>a\n", "and reads the priority"


def test_debug_lines_come_only_when_asked_for():
    assert logging("log.debug('a')", subprocess.PIPE).stderr == b""
    assert logging("log.verbose = True; log.debug('a')", subprocess.PIPE).stderr.endswith(b"a\n")


# ----- this very file


def test_the_own_hash_is_the_sha256_of_the_file():
    import hashlib

    assert llmguard.own_hash() == hashlib.sha256(Path(llmguard.__file__).read_bytes()).hexdigest()

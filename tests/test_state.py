"""Section 2: state files survive kills, full disks, broken content and newer versions of llmguard."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from parts import PATIENCE, ROOT, FakeClock, missing
from hypothesis import given, settings, strategies as st

import llmguard
from llmguard import StateFile

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
CONTENT = st.dictionaries(st.text(max_size=8).filter(lambda key: key != "version"), JSON, max_size=5)


@pytest.fixture
def lines(monkeypatch) -> list[str]:
    """What is logged."""
    logged: list[str] = []
    monkeypatch.setattr(llmguard, "log", lambda text, priority=llmguard.INFO: logged.append(text))
    return logged


def content(folder: Path | str, name: str = "x.json") -> dict:
    """What a process that starts now would read."""
    return StateFile(str(folder), name).load()


def test_what_was_saved_is_loaded(tmp_path):
    assert StateFile(str(tmp_path), "x.json").save({"hosts": {"a9": {"job": "größe.job"}}})
    assert content(tmp_path) == {"version": 1, "hosts": {"a9": {"job": "größe.job"}}}


@settings(max_examples=40, deadline=None)
@given(CONTENT)
def test_any_json_object_is_loaded_as_it_was_saved(saved):
    with tempfile.TemporaryDirectory() as folder:
        assert StateFile(folder, "x.json").save(saved)
        assert content(folder) == {**saved, "version": 1}


def test_a_file_that_is_not_there_is_empty_and_no_problem(tmp_path, lines):
    file = StateFile(str(tmp_path / "not" / "made"), "x.json")
    assert file.load() == {} and file.problem is None and not lines
    file.remove()


def test_the_folder_is_made_for_its_owner_alone(tmp_path):
    folder = tmp_path / "deep" / "down"
    assert StateFile(str(folder), "x.json").save({})
    assert (folder / "x.json").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_file_is_sorted_indented_and_carries_a_version(tmp_path):
    StateFile(str(tmp_path), "x.json").save({"b": 1, "a": {"d": 2, "c": 3}})
    text = (tmp_path / "x.json").read_text()
    assert text == '{\n "a": {\n  "c": 3,\n  "d": 2\n },\n "b": 1,\n "version": 1\n}\n'


def test_remove_takes_it_away(tmp_path):
    file = StateFile(str(tmp_path), "x.json")
    file.save({"a": 1})
    file.remove()
    file.remove()
    assert content(tmp_path) == {} and os.listdir(tmp_path) == []


# ----- kills


class Killed(BaseException):
    """The process ends here: nothing after it runs but what the kernel does by itself."""


@contextlib.contextmanager
def killed_at(step: int, short: int = 1 << 30):
    """Count the calls that change a disk and stop at one of them, before it is done; `short` bounds each write. Yields the
    list of calls made so far."""
    calls: list[str] = []
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "replace", "rename", "unlink", "mkdir")}
    paths: dict[int, str] = {}

    def wrap(name: str):
        def call(*args, **more):
            if name == "write":
                args = (args[0], bytes(args[1])[:short])
            what = paths.get(args[0], "?") if name in ("write", "fsync") else os.path.basename(str(args[0]))
            if len(calls) == step:
                raise Killed
            calls.append(f"{name} {what}")
            result = None if name == "fsync" else real[name](*args, **more)
            if name == "open":
                paths[result] = os.path.basename(str(args[0]))
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in real:
            patch.setattr(os, name, wrap(name))
        yield calls


def killed_save(folder: str, saved: dict, step: int, short: int) -> bool:
    """Save, killed at that step; True when it came to its end before."""
    with killed_at(step, short), contextlib.suppress(Killed):
        StateFile(folder, "x.json").save(saved)
        return True
    return False


@settings(max_examples=25, deadline=None)
@given(st.none() | CONTENT, CONTENT, st.integers(1, 40))
def test_a_kill_between_any_two_steps_loses_nothing(old, new, short):
    """After a kill at every single step the next process reads the old content or the new one, never less."""
    before = {} if old is None else {**old, "version": 1}
    after = {**new, "version": 1}
    step, done = 0, False
    while not done:
        with tempfile.TemporaryDirectory() as folder:
            if old is not None:
                killed_save(folder, old, 10 ** 6, short)
            done = killed_save(folder, new, step, short)
            found = content(folder)
            assert found in ((after,) if done else (before, after))
            assert not [name for name in os.listdir(folder) if "broken" in name], "a torn file became visible"
            assert killed_save(folder, new, 10 ** 6, short) and content(folder) == after, "what a kill leaves behind is in nobody's way"
        step += 1
    assert step > 4, "the kills hit the steps of a save"


def test_content_is_on_the_disk_before_its_name_is_and_the_name_before_save_returns(tmp_path):
    """A power cut keeps only what was synced: write, sync the file, rename, sync the folder, in this order."""
    with killed_at(10 ** 6) as calls:
        assert StateFile(str(tmp_path), "x.json").save({"a": 1})
    temp = f"x.json.{os.getpid()}.tmp"
    assert [call for call in calls if not call.startswith(("mkdir", "open"))] == [
        f"write {temp}", f"fsync {temp}", f"replace {temp}", f"fsync {tmp_path.name}",
    ]


@settings(max_examples=20, deadline=None)
@given(CONTENT, st.integers(0, 30))
def test_a_kill_while_a_broken_file_is_moved_aside_loses_nothing_either(new, step):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "x.json").write_text('{"version": 1, "hosts": {"a9": {"error": "llama-ser')
        with killed_at(step), contextlib.suppress(Killed):
            file = StateFile(folder, "x.json")
            file.load()
            file.save(new)
        texts = [Path(folder, name).read_text() for name in os.listdir(folder)]
        assert any("llama-ser" in text for text in texts), "the broken content is kept for whoever can read it"
        assert content(folder) in ({}, {**new, "version": 1})


def test_two_processes_that_save_at_once_leave_one_whole_file(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import llmguard\n"
        "for n in range(20):\n"
        "    assert llmguard.StateFile(sys.argv[2], 'x.json').save({'who': sys.argv[3], 'n': n, 'more': 'x' * 5000})\n"
    )
    crowd = [subprocess.Popen([sys.executable, "-c", code, str(ROOT), str(tmp_path), who]) for who in "ab"]
    while any(process.poll() is None for process in crowd):
        found = content(tmp_path)
        assert found == {} or (found["more"] == "x" * 5000 and found["who"] in "ab")
    assert [process.wait(PATIENCE) for process in crowd] == [0, 0]
    assert os.listdir(tmp_path) == ["x.json"]


# ----- broken and newer files


@pytest.mark.parametrize(
    "broken",
    [b"", b"{", b'{"version": 1, "hosts": {"a9": {"error": "llama-server pid 42', b"[]", b"null", b"5", b'"x"', b"{}", b'{"version": "1"}',
     b'{"version": null}', b"\xff\xfe{", b"\x00" * 4096, b'{"version": 1} trailing', b"[" * 100_000, b'{"version": ' + b"9" * 5000 + b"}"],
    ids=lambda broken: repr(broken[:30]),
)
def test_a_broken_file_is_moved_aside_with_a_dated_name_logged_once_and_empty(tmp_path, lines, broken):
    (tmp_path / "x.json").write_bytes(broken)
    file = StateFile(str(tmp_path), "x.json", FakeClock(1_761_407_854.0))
    assert file.load() == {}
    assert os.listdir(tmp_path) == ["x.json.broken-20251025T155734Z"]
    assert (tmp_path / "x.json.broken-20251025T155734Z").read_bytes() == broken
    assert len(lines) == 1 and "x.json.broken-20251025T155734Z" in lines[0] and str(tmp_path / "x.json") in lines[0]
    assert file.problem and file.load() == {} and len(lines) == 1
    assert file.save({"a": 1}) and file.problem is None and content(tmp_path) == {"version": 1, "a": 1}


def test_files_that_break_one_after_the_other_are_all_kept(tmp_path):
    clock = FakeClock()
    for n in range(3):
        (tmp_path / "x.json").write_text(f"broken {n}")
        StateFile(str(tmp_path), "x.json", clock).load()
        clock.advance(0.2)
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["broken 0", "broken 1", "broken 2"]


def test_a_folder_in_the_place_of_the_file_is_moved_aside_too(tmp_path):
    (tmp_path / "x.json").mkdir()
    file = StateFile(str(tmp_path), "x.json")
    assert file.load() == {} and file.save({"a": 1}) and content(tmp_path) == {"version": 1, "a": 1}


def test_the_file_of_a_newer_llmguard_is_left_untouched_and_never_overwritten(tmp_path, lines):
    newer = '{"version": 99, "pids": {}}'
    (tmp_path / "x.json").write_text(newer)
    file = StateFile(str(tmp_path), "x.json")
    assert file.load() == {} and "newer" in file.problem
    assert file.save({"a": 1}) is False
    assert file.save({"a": 2}) is False
    assert StateFile(str(tmp_path), "x.json").save({"a": 3}) is False, "also by one who never looked at it"
    assert os.listdir(tmp_path) == ["x.json"] and (tmp_path / "x.json").read_text() == newer
    assert len([line for line in lines if "newer" in line]) <= 2


def test_too_many_open_files_is_no_reason_to_move_a_good_file_away(tmp_path, lines, monkeypatch):
    """What fails for a reason of our own says nothing about the file."""
    StateFile(str(tmp_path), "x.json").save({"a": 1})
    real = open

    def out_of_descriptors(path, *more, **also):
        if str(path).endswith("x.json"):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *more, **also)

    file = StateFile(str(tmp_path), "x.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.open", out_of_descriptors)
        assert file.load() == {} and "Too many open files" in file.problem
    assert os.listdir(tmp_path) == ["x.json"] and file.load() == {"version": 1, "a": 1}


# ----- full disks


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("step", ["open", "write", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_temp_file_and_says_so_once(tmp_path, lines, monkeypatch, number, step):
    file = StateFile(str(tmp_path), "x.json")
    assert file.save({"a": 1})
    real = getattr(os, step)

    def fails(path, *more, **also):
        if step == "open" and not str(path).endswith(".tmp"):
            return real(path, *more, **also)
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, step, fails)
        assert file.save({"a": 2}) is False and file.save({"a": 3}) is False
    assert os.strerror(number) in file.problem
    assert content(tmp_path) == {"version": 1, "a": 1} and os.listdir(tmp_path) == ["x.json"]
    assert len(lines) == 1 and os.strerror(number) in lines[0], "one line per failing streak"
    assert file.save({"a": 4}) and file.problem is None and content(tmp_path)["a"] == 4
    assert len(lines) == 2, "and one when it is written again"


def test_a_folder_that_cannot_be_made_is_a_failed_write(tmp_path, lines):
    (tmp_path / "file").write_text("not a folder")
    file = StateFile(str(tmp_path / "file" / "state"), "x.json")
    assert file.save({"a": 1}) is False and file.problem and len(lines) == 1
    assert file.load() == {}


FULL_DISK = r"""
import errno, json, os, sys
sys.path.insert(0, sys.argv[1])
import llmguard
folder, logged, seen = sys.argv[2], [], {}
llmguard.log = lambda text, priority=6: logged.append(text)
file = llmguard.StateFile(folder, "handover.json")
broken = llmguard.StateFile(folder, "stop_error.json")
seen["before"] = file.save({"a": 1})
with open(folder + "/stop_error.json", "w") as f:
    f.write('{"version": 1, "hosts": {"a9": {"err')
filler = os.open(folder + "/filler", os.O_WRONLY | os.O_CREAT)
try:
    while True:
        os.write(filler, b"x" * 512)
except OSError as error:
    seen["full"] = errno.errorcode[error.errno]
seen["while_full"] = [file.save({"a": "y" * 9000}), file.save({"a": "z" * 9000})]
seen["problem"] = file.problem
seen["old"] = llmguard.StateFile(folder, "handover.json").load()
seen["broken"] = broken.load()
seen["files"] = sorted(os.listdir(folder))
seen["lines"] = len(logged)
os.unlink(folder + "/filler"); os.close(filler)
seen["after"] = [file.save({"a": 2}), file.problem, llmguard.StateFile(folder, "handover.json").load()]
os.system("mount -o remount,ro " + folder)
seen["read_only"] = [file.save({"a": 3}), file.problem, llmguard.StateFile(folder, "handover.json").load()]
os.system("mount -o remount,rw " + folder)
seen["writable"] = [file.save({"a": 4}), file.problem]
print(json.dumps(seen))
"""


def test_a_real_full_disk_and_a_real_read_only_one(tmp_path):
    unshare = shutil.which("unshare")
    user = [] if os.getuid() == 0 else ["--map-root-user"]
    mount = f"mount -t tmpfs -o size=64k none {tmp_path}"
    if not unshare or subprocess.run([unshare, "--mount", *user, "sh", "-c", mount], capture_output=True).returncode:
        missing("a tmpfs cannot be mounted in a mount namespace of its own here")
    script = tmp_path.parent / f"{tmp_path.name}.py"
    script.write_text(FULL_DISK)
    inner = f'{mount} && exec "$0" "$1" "$2" "$3"'
    argv = [unshare, "--mount", *user, "sh", "-c", inner, sys.executable, str(script), str(ROOT), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["before"] is True and seen["full"] == "ENOSPC"
    assert seen["while_full"] == [False, False] and "No space left" in seen["problem"]
    assert seen["old"] == {"version": 1, "a": 1}, "the old content stands"
    assert seen["broken"] == {} and [n for n in seen["files"] if n.startswith("stop_error.json.broken-")], "a rename needs no space"
    assert len(seen["files"]) == 3, "no temp file is left"
    assert seen["lines"] == 2, "one line for the full disk, one for the broken file"
    assert seen["after"] == [True, None, {"version": 1, "a": 2}], "written as soon as there is space again"
    assert seen["read_only"][0] is False and "Read-only" in seen["read_only"][1] and seen["read_only"][2]["a"] == 2
    assert seen["writable"] == [True, None]


# ----- where they are kept


def test_the_folder_is_the_chosen_one_then_ours_then_systemds_then_the_users(monkeypatch, tmp_path):
    for name in ("LLMGUARD_STATE_DIR", "STATE_DIRECTORY", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    found = llmguard.state_folder
    assert found() == "/home/me/.local/state/llmguard"
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert found() == "/xdg/llmguard"
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/llmguard:/var/lib/other")
    assert found() == "/var/lib/llmguard"
    monkeypatch.setenv("LLMGUARD_STATE_DIR", "/ours")
    assert found() == "/ours"
    assert found("here") == str(tmp_path / "here"), "an agent runs elsewhere: the path is absolute"

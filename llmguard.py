#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""llmguard: one file that keeps local LLM boxes honest.

    llmguard.py serve             a proxy in front of your GPU boxes: it starts and stops engines, never takes a
                                  GPU that somebody else holds, never cuts a stream
    llmguard.py check             read the configuration, reach every host, one line each
    llmguard.py status            what it does now, as one screen and one Nagios line
    llmguard.py model list        what can be asked for, and what is loaded
    llmguard.py model load NAME   start the engine of a model; `unload` stops it once nothing runs on it
    llmguard.py probe             after a deploy: is each model still on the GPU? time it, heal what fell back
    llmguard.py watch             every minute by cron, on the box: did a fresh server fall back? have it unloaded
    llmguard.py completion bash   for a shell (zsh, fish)

Standard library only, Python 3.9 or later. Copy this one file to every box.

The file reads downward; each section uses only sections above it:

     1  Errors and exit codes   one class per kind of failure: message, HTTP status, exit code
     2  Small tools             durations, sizes, time, the log, JSON state files, locks that name their holder
     3  HTTP client             HTTP/1.1 syntax and one small keep-alive client on sockets
     4  Configuration           dataclasses; loading and checking, every error with its key path
     5  The box                 reads only: processes, sockets, GPUs, the job queue, all under a root; the verdict
     6  Engines                 starts and stops them, and proves that they are gone
     7  Agent                   one JSON request in, one JSON reply out; --follow stays on the line
     8  Remote                  runs the agent for a host, over ssh or here; deadlines; install
     9  Host                    the state machine of one GPU: acquire, drain, switch, release, handover, idle stop, ticks
    10  Proxy                   the HTTP server: parse, authorise, route, forward, stream
    11  Views                   /status, /metrics, /v1/models, /models/sse, the page at /
    12  Probe                   one timed request for each model, its verdict, the healing
    13  Watch                   fresh spawns, reloads and what is loaded again after them
    14  Command line            argparse, exit codes, main(argv)
"""

from __future__ import annotations

import _thread
import errno
import gc
import json
import os
import re
import select
import socket
import stat
import sys
import threading
import time
from collections import deque

TYPE_CHECKING = False  # typing itself costs more start-up time than a cron job should pay
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from dataclasses import MISSING, dataclass, field, replace
    from dataclasses import fields as dataclass_fields
    from typing import Any

    Run = Callable[[list[str], float], tuple[int | None, str, str]]

__version__ = "0.1.0"

if sys.version_info < (3, 9):
    sys.exit("llmguard needs Python 3.9 or later, this is %d.%d" % sys.version_info[:2])

# ======================================================================================================================
# 1  Errors and exit codes
# ======================================================================================================================
# A class per kind of failure. The first line of its docstring is the message's template; `status` and `type` are what an
# HTTP client sees, `exit_code` what a shell sees (sysexits.h). `retry` becomes `x-should-retry`, which the OpenAI and
# Anthropic SDKs obey on any status. Errors are raised where they are known and turned into a response in one place
# (Exchange.refuse) and into an exit code in another (main).


class GuardError(Exception):
    """{problem}"""

    status = 500
    type = "server_error"
    exit_code = 70
    retry: bool | None = None

    def __init__(self, problem: str = "", **fields: Any) -> None:
        self.fields = dict(fields, problem=problem)
        template = (self.__doc__ or "{problem}").split("\n", 1)[0]
        super().__init__(template.format(**self.fields))


class UsageError(GuardError):
    """{problem}"""

    exit_code = 64


class ConfigError(GuardError):
    """{problem}"""

    exit_code = 78


class AlreadyHeld(GuardError):
    """{what} is held by {holder}"""

    status = 423
    type = "gpu_busy"
    exit_code = 75


class BadRequest(GuardError):
    """{problem}"""

    status = 400
    type = "invalid_request_error"
    exit_code = 64
    retry = False


class Unauthorised(GuardError):
    """{what} is needed: Authorization: Bearer KEY, x-api-key: KEY, or the key as a Basic password"""

    status = 401
    type = "authentication_error"
    exit_code = 77
    retry = False


class UnknownPath(GuardError):
    """no such path: {path}{hint}"""

    status = 404
    type = "not_found_error"
    exit_code = 64
    retry = False


class UnknownModel(GuardError):
    """model {model} is not known here{hint}"""

    status = 404
    type = "not_found_error"
    exit_code = 64
    retry = False


class MethodNotAllowed(GuardError):
    """{method} is not possible here"""

    status = 405
    type = "invalid_request_error"
    retry = False


class RequestTimeout(GuardError):
    """the request's {part} did not arrive in time"""

    status = 408
    type = "invalid_request_error"


class BodyTooLarge(GuardError):
    """the request's body is larger than {limit}{hint}"""

    status = 413
    type = "invalid_request_error"
    retry = False


class UnsupportedCoding(GuardError):
    """request bodies in {coding} are not supported here{hint}"""

    status = 415
    type = "invalid_request_error"
    retry = False


class ExpectationFailed(GuardError):
    """only 'Expect: 100-continue' can be met"""

    status = 417
    type = "invalid_request_error"
    retry = False


class GpuBusy(GuardError):
    """{problem}

    Somebody else holds the GPU, or a switch did not come in time. Never a 5xx or 429: to a coding agent those mean "try again".
    """

    status = 423
    type = "gpu_busy"
    exit_code = 75
    retry = False


class UpgradeRefused(GuardError):
    """only plain HTTP/1.1 is spoken here

    426 is the one answer that makes Codex turn from WebSocket to HTTP in the same turn.
    """

    status = 426
    type = "invalid_request_error"
    retry = False


class HeadTooLarge(GuardError):
    """the request's header is larger than {limit}"""

    status = 431
    type = "invalid_request_error"
    retry = False


class EngineFailed(GuardError):
    """{problem}"""

    status = 500
    type = "engine_failed"
    exit_code = 69
    retry = False


class HostDown(GuardError):
    """{problem}"""

    status = 502
    type = "host_down"
    exit_code = 69


class HostBlocked(GuardError):
    """{problem}

    The box answers, but refuses: a changed host key, no permission, no Python. It is not woken and not called down; somebody
    has to mend something, and the text says what.
    """

    status = 502
    type = "host_down"
    exit_code = 77


class EngineLost(GuardError):
    """{problem}"""

    status = 502
    type = "engine_lost"
    exit_code = 69


class TooManyConnections(GuardError):
    """too many connections are open"""

    status = 503
    type = "unavailable_error"


class AgentError(GuardError):
    """{problem}

    The agent on a box replied with an error, or did not reply.
    """

    exit_code = 69


class ProtocolError(GuardError):
    """{problem}

    The other side broke HTTP: never shown to a client as it stands, since the text may name addresses.
    """


class PeerGone(GuardError):
    """the other side closed the connection"""


class ClientGone(GuardError):
    """the client went away

    Raised wherever its request is at that moment: queued, waiting for a silent engine, or streaming.
    """


class DeadlinePassed(GuardError):
    """{problem}"""


# ======================================================================================================================
# 2  Small tools
# ======================================================================================================================

# ----- records

if not TYPE_CHECKING:  # for a type checker this is the standard library's dataclasses, and so it is to a reader
    # The module itself takes 40 ms of every start, four times a whole `python3 -c pass`: it imports inspect, and compiles up to
    # six methods for each class. An agent, and a watch from cron, live for less.

    MISSING = object()

    class field:
        def __init__(self, *, default=MISSING, default_factory=MISSING, metadata=None):
            self.name, self.default, self.make, self.metadata = "", default, default_factory, metadata or {}

    def dataclass(kind=None, *, frozen=False):
        """__init__, ==, repr and, where it is frozen, a hash, of the attributes that have an annotation. That a frozen one is
        not changed is left to the type checker."""
        if kind is None:
            return lambda kind: dataclass(kind, frozen=frozen)
        known = dict(getattr(kind, "__fields__", {}))
        own = vars(kind).get("__annotations__", {}) if sys.version_info < (3, 14) else kind.__annotations__
        for name in own:
            value = vars(kind).get(name, MISSING)
            known[name] = value if isinstance(value, field) else field(default=value)
            known[name].name = name
            if known[name].default is not MISSING:
                setattr(kind, name, known[name].default)
            elif value is not MISSING:
                delattr(kind, name)
        defaults = {name: one.default for name, one in known.items() if one.default is not MISSING}
        makers = {name: one.make for name, one in known.items() if one.make is not MISSING}

        def __init__(self, *args, **given):
            if len(args) == len(known) and not given:
                self.__dict__.update(zip(known, args))
                return
            values = {**defaults, **dict(zip(known, args)), **given}
            for name, make in makers.items():
                if name not in values:
                    values[name] = make()
            if values.keys() != known.keys() or len(args) > len(known):
                wrong = ", ".join(sorted(values.keys() ^ known.keys())) or "too many"
                raise TypeError(f"{kind.__name__}: missing or unknown: {wrong}")
            self.__dict__.update(values)

        def values_of(self):
            return tuple([self.__dict__[name] for name in known])

        def __eq__(self, other):
            return values_of(self) == values_of(other) if other.__class__ is self.__class__ else NotImplemented

        def __repr__(self):
            return f"{kind.__name__}({', '.join(f'{name}={self.__dict__[name]!r}' for name in known)})"

        kind.__fields__, kind.__init__, kind.__eq__, kind.__repr__ = known, __init__, __eq__, __repr__
        kind.__hash__ = (lambda self: hash(values_of(self))) if frozen else None
        return kind

    def replace(record, **changes):
        """A copy with some of its attributes changed."""
        return type(record)(**{**{name: record.__dict__[name] for name in record.__fields__}, **changes})

    def dataclass_fields(kind):
        return kind.__fields__.values()


# ----- patterns and hashes


class Pattern:
    """A regular expression that is compiled when it is first used: all of them would take each start 6 ms."""

    def __init__(self, text: str | bytes) -> None:
        self._text = text

    def __getattr__(self, name: str) -> Any:
        method = getattr(re.compile(self._text), name)
        setattr(self, name, method)  # from now on it costs nothing
        return method


def digest(data: bytes) -> str:
    """Its sha256 in hex."""
    import hashlib  # which loads OpenSSL: not for who hashes nothing

    return hashlib.sha256(data).hexdigest()


# ----- durations and sizes

NEVER = float("inf")
_DURATION_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = Pattern(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_LONGEST = 1e9  # seconds, 31 years: the system's own waits take no number much larger
_SIZE_UNITS = {"": 1, "B": 1}
_SIZE_UNITS.update({p + "iB": 1024 ** n for n, p in enumerate("KMGT", 1)})
_SIZE_UNITS.update({p + "B": 1000 ** n for n, p in enumerate("KMGT", 1)})
_SIZE = Pattern(r"([0-9]{1,15}(?:\.[0-9]+)?) ?([KMGT]?i?B?)")


def duration(text: str | int | float) -> float:
    """'15m', '1h30m', '500ms', 'never' or a number of seconds -> seconds; ValueError for anything else."""
    if isinstance(text, (int, float)) and not isinstance(text, bool) and 0 <= text <= _LONGEST:
        return float(text)
    if text == "never":
        return NEVER
    parts = _DURATION.findall(text) if isinstance(text, str) else []
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError("a duration looks like 30s, 15m, 1h30m or never")
    seconds = sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)
    if seconds > _LONGEST:
        raise ValueError("that is too long for a duration: write never")
    return seconds


def age(seconds: float) -> str:
    """Seconds as people read them in a log: 34s, 1m0s, 2h5m."""
    whole = max(0, int(seconds))
    if whole < 60:
        return "%ds" % whole
    if whole < 3600:
        return "%dm%ds" % divmod(whole, 60)
    return "%dh%dm" % divmod(whole // 60, 60)


def size(text: str | int) -> int:
    """'8GiB', '512 MiB', '10MB' or a number of bytes -> bytes; ValueError for anything else."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if not match or match.group(2) not in _SIZE_UNITS:
        raise ValueError("a size looks like 512MiB or 8GiB")
    return int(float(match.group(1)) * _SIZE_UNITS[match.group(2)])


def size_text(count: float) -> str:
    """Bytes as people read them: 512 MiB, 22.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return (f"{count:.1f}").replace(".0", "") + " " + unit
        count /= 1024
    raise AssertionError("not reached")


# ----- time


class Clock:
    """The time, as everything below sees it; tests inject one that they move by hand."""

    def now(self) -> float:
        """Seconds since the epoch, for people and files."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never jump, for every window and deadline."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """Wait, holding `condition`, until it is notified or the time is over."""
        condition.wait(None if seconds == NEVER else max(0.0, seconds))


_TIMESTAMP = Pattern(r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{2}):([0-9]{2}):([0-9]{2})Z")


def timestamp(seconds: float | None) -> str | None:
    """Seconds since the epoch -> '2026-10-25T16:57:34Z'."""
    return None if seconds is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def parse_timestamp(text: Any) -> float:
    """The other way round; 0.0 for anything else."""
    match = _TIMESTAMP.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return 0.0
    import datetime  # which is there four times as soon as time.strptime

    try:
        year, month, day, hour, minute, second = map(int, match.groups())
        return datetime.datetime(year, month, day, hour, minute, second, tzinfo=datetime.timezone.utc).timestamp()
    except ValueError:
        return 0.0


# ----- the log

_CONTROL = Pattern(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def printable(text: str) -> str:
    """Text from outside made safe for one line of a log or a terminal: control characters are shown, not sent."""
    return text if text.isprintable() else str(_CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text))


_RETRY_BAIT = Pattern(
    r"(?i)\b[1-5]\d\d\b|time(?:d )?-?out|connection (?:refused|reset)|overloaded|terminated|rate.?limit|too many requests"
)


def client_safe(text: str) -> str:
    """A text without what clients' retry patterns look for: bare status numbers and words such as "timeout" make some
    coding agents try again for ever. The log keeps the original."""
    return str(_RETRY_BAIT.sub("…", re.sub(r",? ?\(?\bpid \d+\)?", "", printable(text))))


ERROR, WARN, INFO, DEBUG = 3, 4, 6, 7  # syslog's priorities


class Log:
    """One line per event on stderr. Nothing that happens to stderr (a full disk, a closed pipe) may stop the proxy.

    On a terminal or in a file each line is dated; journald dates them itself, and reads a priority off each (sd-daemon(3)).
    `json`: an object a line instead, {"time", "priority", "text"}, for whatever collects them.
    """

    def __init__(self) -> None:
        self.verbose = self.json = False
        self.journal = "JOURNAL_STREAM" in os.environ

    def __call__(self, text: str, priority: int = INFO) -> None:
        words = {ERROR: "error", WARN: "warning", INFO: "info", DEBUG: "debug"}
        if self.json:
            line = json.dumps({"time": timestamp(time.time()), "priority": words[priority], "text": text})
        elif self.journal:
            line = f"<{priority}>{printable(text)}"
        else:
            line = time.strftime("%Y/%m/%d %H:%M:%S ") + printable(text)
        try:
            os.write(2, (line + "\n").encode("utf-8", "backslashreplace"))
        except OSError:
            pass

    def debug(self, text: str) -> None:
        if self.verbose:
            self(text, DEBUG)


log = Log()


# ----- this very file


def own_hash() -> str:
    """The sha256 of this file's content, in hex: tells which boxes run which copy."""
    with open(os.path.abspath(__file__), "rb") as file:
        return digest(file.read())


# ----- state files


def state_folder(chosen: str | None = None) -> str:
    """The folder of the state files: as chosen, or where the system says. It need not exist yet."""
    env = os.environ.get
    systemd = env("STATE_DIRECTORY", "").split(":")[0]
    user = os.path.join(env("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "llmguard")
    return os.path.abspath(chosen or env("LLMGUARD_STATE_DIR") or systemd or user)


OUR_OWN_LACK = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # what fails for these says nothing about the file or the peer


class StateFile:
    """One JSON object on disk, `{"version": 1, …}`, that survives crashes, full disks and older or newer copies of llmguard.

    A write goes to a temp file beside it, is synced, renamed over the old one, and the folder synced: a reader finds the
    old content or the new one, never a mix. `problem` says why the last read or write failed, for /status.
    """

    VERSION = 1

    def __init__(self, folder: str, name: str, clock: Clock | None = None) -> None:
        self.path = os.path.join(folder, name)
        self.problem: str | None = None
        self._clock = clock or Clock()
        self._foreign = False  # written by a newer llmguard: read as empty, never overwritten
        self._known = False  # what stands there was read, or is known not to be there: it may be overwritten

    def load(self) -> dict[str, Any]:
        """The content; {} when there is none. A broken file is moved aside with a dated name, so that nothing is lost."""
        try:
            with open(self.path, "rb") as file:
                content = json.loads(file.read().decode("utf-8"))
            if not isinstance(content, dict) or not isinstance(content.get("version"), int):
                raise ValueError("not an object with a version")
        except (FileNotFoundError, NotADirectoryError):
            self._known = True
            return {}
        except (OSError, ValueError, RecursionError) as error:
            if getattr(error, "errno", None) in OUR_OWN_LACK:
                self._fail(f"cannot be read now ({error})")
                return {}
            self._known = True
            self._move_aside(error)
            return {}
        self._known = True
        if content["version"] > self.VERSION:
            self._foreign = True
            self._fail("version %d is of a newer llmguard: left alone" % content["version"])
            return {}
        return content

    def save(self, content: dict[str, Any]) -> bool:
        """Write it all, or leave the old file as it is, say why in `problem` (logged once per streak) and return False."""
        if not self._known:
            self.load()
        if self._foreign or not self._known:
            return False
        text = json.dumps(dict(content, version=self.VERSION), indent=1, sort_keys=True) + "\n"
        temp = "%s.%d.tmp" % (self.path, os.getpid())
        try:
            os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
            self._sweep()
            try:
                self.write(temp, text.encode())
                os.replace(temp, self.path)
            except OSError:
                remove_file(temp)
                raise
            sync_folder(os.path.dirname(self.path))
        except OSError as error:
            self._fail(f"cannot be written: {error.strerror}")
            return False
        if self.problem:
            log(f"{self.path}: written again")
        self.problem = None
        return True

    def remove(self) -> None:
        remove_file(self.path)

    @staticmethod
    def write(path: str, data: bytes) -> None:
        """A new file, synced."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            while data:
                data = data[os.write(handle, data):]
            os.fsync(handle)
        finally:
            os.close(handle)

    def _sweep(self) -> None:
        """Take away the temp files of writers that were killed."""
        folder, name = os.path.split(self.path)
        for entry in os.listdir(folder) if os.path.exists("/proc/self") else ():
            pid = entry[len(name) + 1:-len(".tmp")]
            if pid.isdigit() and entry == f"{name}.{pid}.tmp" and not os.path.exists("/proc/" + pid):
                remove_file(os.path.join(folder, entry))

    def _move_aside(self, error: Exception) -> None:
        dated = "{}.broken-{}".format(self.path, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._clock.now())))
        aside, count = dated, 1
        while os.path.lexists(aside):
            count += 1
            aside = f"{dated}-{count}"
        try:
            os.rename(self.path, aside)
            self._fail(f"unreadable ({error}): moved to {os.path.basename(aside)}, treated as empty")
        except OSError:
            self._fail(f"unreadable ({error}), treated as empty")

    def _fail(self, problem: str) -> None:
        if self.problem != problem:
            log(f"{self.path}: {problem}", WARN)
        self.problem = problem


def remove_file(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def sync_folder(path: str) -> None:
    """So that a rename in it outlives a crash; where a file system cannot do that, it is not an error."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


class Lock:
    """A kernel lock (flock) on a file. It dies with its holder; the text in the file only *names* the holder.

    A stale, empty or foreign text is harmless. After waiting it is checked that the locked file is still the one at
    that path, since somebody may have removed it meanwhile.
    """

    def __init__(self, path: str, what: str, clock: Clock | None = None) -> None:
        self.path, self.what = path, what
        self._clock = clock or Clock()
        self._handle = -1

    def acquire(self, seconds: float = 0.0) -> None:
        """Take it within `seconds`; AlreadyHeld names who has it."""
        import fcntl

        deadline = self._clock.monotonic() + seconds
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._still_there(handle):
                    self._handle = handle
                    self._sign()
                    return
            except BlockingIOError:
                if self._clock.monotonic() >= deadline:
                    holder = self._holder(handle)
                    os.close(handle)
                    raise AlreadyHeld(what=self.what, holder=holder) from None
            os.close(handle)
            self._clock.sleep(0.05)

    def release(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Lock:
        if self._handle < 0:
            self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _still_there(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _sign(self) -> None:
        text = json.dumps({"pid": os.getpid(), "what": self.what, "since": timestamp(self._clock.now())})
        try:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, text.encode(), 0)
        except OSError:
            pass  # the name is a courtesy: a full disk does not unlock anything

    @staticmethod
    def _holder(handle: int) -> str:
        try:
            holder = json.loads(os.pread(handle, 4096, 0))
            return "%s (pid %d) since %s" % (holder["what"], holder["pid"], holder["since"])
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"


# ----- other programs

PIECE = 64 * 1024  # bytes read at once, from pipes and sockets


@dataclass(frozen=True)
class Finished:
    """How another program ended. `code` is None when it was killed or abandoned; `problem` then says why."""

    code: int | None
    out: bytes
    err: bytes
    problem: str = ""

    @property
    def complaint(self) -> str:
        """The last line that it said about itself, for people."""
        lines = (self.err or self.out).decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip()[:500] if lines else f"exit code {self.code}"


LAST_WORD = 2.0  # seconds that a program may run on after all that was wanted of it has been said


def run(
    argv: Iterable[str], seconds: float, *, data: bytes = b"", env: dict[str, str] | None = None, limit: int = 1 << 20,
    whole: Callable[[bytes], bool] = lambda out: False,
) -> Finished:
    """Run a program without a shell, `data` on its stdin, in a session of its own. FileNotFoundError.

    It is killed after `seconds`, when it has printed more than `limit` bytes, or a moment after its output was `whole`. Not
    subprocess.run(timeout=): that kills and then waits, for ever when the child is stuck in the kernel (a driver that hangs).
    Here such a child is left behind.
    """
    import subprocess

    pipe = subprocess.PIPE
    child = subprocess.Popen(list(argv), stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True)
    deadline = time.monotonic() + seconds
    out, err, problem = _converse(child, data, deadline, limit, whole)
    if not problem and not _ended(child, min(deadline, time.monotonic() + LAST_WORD) if whole(out) else deadline):
        problem = "did not end in time"
    if problem:
        return Finished(None, out, err, _kill(child, problem))
    return Finished(child.returncode, out, err)


def _converse(
    child: Any, data: bytes, deadline: float, limit: int, whole: Callable[[bytes], bool]
) -> tuple[bytes, bytes, str]:
    """Feed and read a child until its pipes close, it ends, all was said or the time is over -> stdout, stderr, what went wrong
    or ''."""
    import selectors

    outputs: dict[Any, bytearray] = {child.stdout: bytearray(), child.stderr: bytearray()}
    stream: Any
    left, problem = memoryview(data), ""
    with selectors.PollSelector() as waiting:  # takes no descriptor of its own
        for stream in outputs:
            waiting.register(stream, selectors.EVENT_READ)
        os.set_blocking(child.stdin.fileno(), False)
        waiting.register(child.stdin, selectors.EVENT_WRITE)
        while waiting.get_map() and not problem:
            if time.monotonic() >= deadline:
                problem = "did not answer in time"
            ended = child.poll() is not None
            ready = waiting.select(0 if ended else max(0.0, min(0.1, deadline - time.monotonic())))
            if ended and not any(key.fileobj in outputs for key, _ in ready):
                break  # what still holds the pipes is a process that it left behind, such as ssh's ControlMaster
            for key, _ in ready:
                stream = key.fileobj
                if stream is child.stdin:
                    left = _feed(stream, left)
                    done = not left
                else:
                    piece = os.read(key.fd, PIECE)
                    outputs[stream] += piece
                    done = not piece
                if done:
                    waiting.unregister(stream)
                    stream.close()
            if sum(map(len, outputs.values())) > limit:
                problem = f"printed more than {size_text(limit)}"
            if ready and whole(bytes(outputs[child.stdout])):
                break
    for stream in (child.stdin, *outputs):
        stream.close()
    out, err = (bytes(output[:limit]) for output in outputs.values())
    return out, err, problem


def _feed(stream: Any, data: memoryview) -> memoryview:
    """Write what the pipe takes; a child that does not read is its own problem."""
    try:
        return data[os.write(stream.fileno(), data):]
    except BlockingIOError:
        return data
    except OSError:
        return memoryview(b"")


def _ended(child: Any, deadline: float) -> bool:
    while child.poll() is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def _kill(child: Any, problem: str) -> str:
    """SIGKILL for the child's whole session; says so when it didn't help within half a second."""
    try:
        os.killpg(child.pid, 9)
    except OSError:
        pass
    if not _ended(child, time.monotonic() + 0.5):
        child.returncode = -9  # else its destructor warns, and the next Popen would look for it
        return f"{problem} and can't be killed: pid {child.pid} was left behind"
    return problem


# ======================================================================================================================
# 3  HTTP client
# ======================================================================================================================
# HTTP/1.1 syntax by RFC 9112, strict in both directions and used by both sides, and one small keep-alive client.
# Sockets are non-blocking and every wait is a poll with a deadline: no thread can hang on a silent peer, and a second
# connection can be watched meanwhile (the client that left while its engine still thinks).

MAX_HEAD = 64 * 1024  # bytes of a header block, request or response
STALL = 600.0  # seconds that a peer may take no byte at all before it counts as gone
PROBE_PAUSE, PROBES = 15, 5  # seconds; an engine's machine that lost its power is known to be gone after 90, once back at once

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_FIELD = Pattern(rf"({_TOKEN}):([^\x00-\x08\x0a-\x1f\x7f]*)\r\n")
_UNRESERVED = Pattern(r"[0-9A-Za-z_.~-]*")
_URL = Pattern(r"(?i:http)://(?:\[([^][/?#@\s]+)\]|([^][/?#@:\s]+))(?::([0-9]{1,5}))?((?:/[^?#\s]*)?)")
_DIGITS = Pattern(r"[0-9]{1,18}")  # not int(): that takes 1_0, +5 and blanks
_CHUNK_SIZE = Pattern(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_CHUNK_START = Pattern(rb"([0-9A-Fa-f]{1,15})\r\n")
_STATUS_LINE = Pattern(r"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: ([^\x00-\x08\x0a-\x1f\x7f]*))?")

HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade "
    "http2-settings".split()
)


class Fields:
    """The header fields of one message, in order and as sent; looked up in lower case."""

    __slots__ = ("items", "_by_name")

    def __init__(self, block: str) -> None:
        """`block`: lines that each end in CRLF, without the empty one. ProtocolError for anything RFC 9112 rules out:
        folded lines, blanks before the colon, bare CR or LF, NUL."""
        found = _FIELD.findall(block)
        if len("".join(map("".join, found))) + 3 * len(found) != len(block):
            raise ProtocolError("malformed header field")
        self.items: list[tuple[str, str]] = [(name, value.strip(" \t")) for name, value in found]
        self._by_name = {name.lower(): value for name, value in self.items}
        if len(self._by_name) < len(self.items):
            self._join_repeated()

    def _join_repeated(self) -> None:
        by_name: dict[str, list[str]] = {}
        for name, value in self.items:
            by_name.setdefault(name.lower(), []).append(value)
        for name in ("host", "content-length", "transfer-encoding"):
            if len(by_name.get(name, ())) > 1:
                raise ProtocolError(f"repeated {name}")
        self._by_name = {name: ", ".join(values) for name, values in by_name.items()}

    def get(self, name: str) -> str:
        """The value ("" when absent); repeated fields are joined with a comma."""
        return self._by_name.get(name, "")

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def has_token(self, name: str, token: str) -> bool:
        """Is `token` one of the comma-separated words of that field?"""
        value = self._by_name.get(name)
        return value is not None and token in [word.strip().lower() for word in value.split(",")]

    def end_to_end(self, without: frozenset[str]) -> list[tuple[str, str]]:
        """What may travel on: not hop-by-hop, not named by Connection, not in `without` (lower case)."""
        named = self._by_name.get("connection")
        if named:
            without = without.union(word.strip().lower() for word in named.split(","))
        return [item for item in self.items if item[0].lower() not in without]


CHUNKED = -1  # as a body's length: chunked
UNTIL_CLOSE = -2  # as a body's length: whatever comes until the peer closes


def body_length(fields: Fields, default: int, version: int = 1) -> int:
    """How long a message's body is: bytes, CHUNKED, or `default` when nothing says. ProtocolError for what could be read
    in two ways (request smuggling), or a coding other than chunked. `version` is the minor one: HTTP/1.0 has no chunks."""
    if "transfer-encoding" in fields:
        if "content-length" in fields:
            raise ProtocolError("both Content-Length and Transfer-Encoding")
        if fields.get("transfer-encoding").lower() != "chunked" or version == 0:
            raise ProtocolError("transfer coding other than chunked")
        return CHUNKED
    if "content-length" not in fields:
        return default
    length = fields.get("content-length")
    if not _DIGITS.fullmatch(length):
        raise ProtocolError("malformed Content-Length")
    return int(length)


class Chunked:
    """An incremental decoder of the chunked coding: bytes in, payload out, whatever the cuts."""

    __slots__ = ("done", "rest", "_pending", "_left", "_trailer")
    MAX_LINE = 4096

    def __init__(self) -> None:
        self.done = False
        self.rest = b""  # once done: what came after the body
        self._pending = b""  # an unfinished line
        self._left = 0  # bytes of the current chunk still to come, its CRLF included; 0: a size line is due
        self._trailer = -1  # bytes of trailer fields seen; -1: the last chunk has not come

    def feed(self, data: bytes) -> bytes:
        """The payload in `data`; ProtocolError when it is not the chunked coding."""
        if self._pending:
            data = self._pending + data
            self._pending = b""
        payload = []
        at, end = 0, len(data)
        while at < end:
            if self._left > 2:  # inside a chunk
                take = min(self._left - 2, end - at)
                payload.append(data[at:at + take])
                at += take
                self._left -= take
            elif self._left:  # the CRLF after a chunk
                if data[at] != (13 if self._left == 2 else 10):
                    raise ProtocolError("a chunk is longer than its size says")
                at += 1
                self._left -= 1
            else:
                begin = _CHUNK_START.match(data, at) if self._trailer < 0 else None
                if begin:  # a whole chunk, as most tokens come
                    start, stop = begin.end(), begin.end() + int(begin.group(1), 16)
                    if stop > start and data[stop:stop + 2] == b"\r\n":
                        payload.append(data[start:stop])
                        at = stop + 2
                        continue
                line_end = data.find(b"\n", at)
                if (end if line_end < 0 else line_end) - at > self.MAX_LINE:
                    raise ProtocolError("an endless line in a chunked body")
                if line_end < 0:
                    self._pending = data[at:]
                    break
                if line_end == at or data[line_end - 1] != 13:
                    raise ProtocolError("a bare LF in a chunked body")
                self._line(data[at:line_end - 1])
                at = line_end + 1
                if self.done:
                    self.rest = data[at:]
                    break
        return payload[0] if len(payload) == 1 else b"".join(payload)

    def _line(self, line: bytes) -> None:
        if self._trailer >= 0:
            if not line:
                self.done = True
            elif self._trailer + len(line) > MAX_HEAD or not _FIELD.fullmatch(line.decode("latin-1") + "\r\n"):
                raise ProtocolError("malformed trailer")
            self._trailer += len(line)
            return
        match = _CHUNK_SIZE.fullmatch(line)
        if not match:
            raise ProtocolError("malformed chunk size")
        count = int(match.group(1), 16)
        if count:
            self._left = count + 2
        else:
            self._trailer = 0


class Wire:
    """A connected, non-blocking socket with a read buffer. Every wait has a deadline (monotonic seconds)."""

    __slots__ = ("sock", "buffer", "broken", "idle_since", "waits_since", "turn", "interim", "_poll", "_watching", "_pair")

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            pass  # a Unix socket; elsewhere than on Linux also one whose peer has left
        self.sock = sock
        self.buffer = b""
        self.broken = False  # did it end in a reset? That is no end that a body may have
        self.idle_since = 0.0
        self.waits_since = 0.0  # since when a client is waited for, to ask or to send all of what it asks; 0.0: it is not
        self.turn: Any = None  # a lock that is held until end_turn
        self.interim = 0  # bytes of interim answers since the last answer
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._watching: Wire | None = None
        self._pair: Any = None

    def fill(self, deadline: float, watched: Wire | None = None) -> bool:
        """Read once into the buffer; False at the end of the stream. DeadlinePassed at the deadline; ClientGone when the
        watched connection closes first."""
        data = self.read(deadline, watched)
        self.buffer = self.buffer + data if self.buffer else data
        return bool(data)

    def read(self, deadline: float, watched: Wire | None = None) -> bytes:
        """What has come, at most PIECE bytes, waiting for the first; b"" at the end of the stream or a reset."""
        while True:
            try:
                self.wait(deadline, watched)
                return self.sock.recv(PIECE)
            except BlockingIOError:
                continue
            except OSError:
                self.broken = True
                return b""

    def wait(self, deadline: float, watched: Wire | None = None) -> None:
        """Until there is something to read. While waiting, what the watched client sends ahead goes to its buffer."""
        (watched or self).end_turn()
        if watched is None:
            if not self._poll.poll(_poll_time(deadline)):
                raise DeadlinePassed("no answer in time")
            return
        if self._watching is not watched:
            self._watching, self._pair = watched, select.poll()
            self._pair.register(self.sock, select.POLLIN)
            self._pair.register(watched.sock, select.POLLIN)
        mine = self.sock.fileno()
        while True:
            ready = self._pair.poll(_poll_time(deadline))
            if not ready:
                raise DeadlinePassed("no answer in time")
            for number, _ in ready:
                if number != mine and not watched.look(self._pair):
                    raise ClientGone()
            if len(ready) > 1 or ready[0][0] == mine:
                return

    def end_turn(self) -> None:
        """Nothing is to be done for this client just now: others may come."""
        if self.turn:
            self.turn.release()
            self.turn = None

    def look(self, poller: Any = None) -> bool:
        """Is the peer still there? What it sent ahead is kept; past a bound it is left in the kernel, unwatched."""
        try:
            data = self.sock.recv(PIECE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.buffer += data
        if len(self.buffer) > PIECE and poller is not None:
            poller.modify(self.sock, 0)  # only hang-ups from here on
        return bool(data)

    def fresh(self) -> bool:
        """May this idle connection carry another exchange? Nothing may have come on it, least of all an end."""
        return not self._poll.poll(0)

    def write(self, data: Any, stall: float = STALL, heed: bool = False) -> None:
        """Send it all (bytes or a memoryview); PeerGone when the peer is gone or takes nothing for `stall` seconds, and with
        `heed` also when it answers instead of taking more."""
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            raise PeerGone() from None
        if sent < len(data):
            self._write_rest(memoryview(data)[sent:], stall, heed)

    def _write_rest(self, data: memoryview, stall: float, heed: bool) -> None:
        self.end_turn()
        room = select.poll()
        room.register(self.sock, select.POLLOUT | (select.POLLIN if heed else 0))
        try:
            while data:
                ready = room.poll(stall * 1000)
                if not ready or not ready[0][1] & select.POLLOUT:
                    raise PeerGone()
                try:
                    data = data[self.sock.send(data):]
                except BlockingIOError:
                    pass
        except OSError:
            raise PeerGone() from None

    def head(self, deadline: float, watched: Wire | None = None) -> str:
        """The next header block with its start line, without the empty line; "" when the peer closed before a byte came.
        HeadTooLarge, PeerGone (closed in the midst), DeadlinePassed."""
        while True:
            end = self.buffer.find(b"\r\n\r\n")
            if end >= 0:
                block = self.buffer[:end + 2].decode("latin-1")
                self.buffer = self.buffer[end + 4:]
                if len(block) > MAX_HEAD:
                    raise HeadTooLarge(limit=size_text(MAX_HEAD))
                return block
            if len(self.buffer) > MAX_HEAD:
                raise HeadTooLarge(limit=size_text(MAX_HEAD))
            if not self.fill(deadline, watched):
                if self.buffer:
                    raise PeerGone()
                return ""

    def forget(self) -> None:
        """Let go of the client that was watched."""
        self._watching = self._pair = None

    def close(self) -> None:
        self.end_turn()
        try:
            self.sock.close()
        except OSError:
            pass


def _poll_time(deadline: float) -> float | None:
    """A deadline as poll's timeout in milliseconds; rounded up, so that it is over when poll returns empty-handed."""
    return None if deadline == NEVER else max(0.0, (deadline - time.monotonic()) * 1000)


class Body:
    """Reads one message's body from a wire, piece by piece, in whichever of the three framings it comes."""

    __slots__ = ("wire", "length", "left", "chunks", "complete")

    def __init__(self, wire: Wire, length: int) -> None:
        self.wire, self.length = wire, length
        self.left = length
        self.chunks = Chunked() if length == CHUNKED else None
        self.complete = length == 0

    def read(self, deadline: float, watched: Wire | None = None) -> bytes:
        """Some of the payload; b"" once, and only once, it is `complete`. PeerGone when it was cut short."""
        wire = self.wire
        while not self.complete:
            if wire.buffer:
                data, wire.buffer = wire.buffer, b""
            else:
                data = wire.read(deadline, watched)
                if not data:
                    if self.length != UNTIL_CLOSE or wire.broken:
                        raise PeerGone()
                    self.complete = True
                    return b""
            if self.chunks is not None:
                data = self.chunks.feed(data)
                if self.chunks.done:
                    self.complete = True
                    wire.buffer = self.chunks.rest
            elif self.length >= 0:
                if len(data) > self.left:
                    data, wire.buffer = data[:self.left], data[self.left:]
                self.left -= len(data)
                self.complete = not self.left
            if data:
                return data
        return b""

    def all(self, deadline: float, limit: int, watched: Wire | None = None) -> bytes:
        """The whole payload, at most `limit` bytes of it."""
        pieces: list[bytes] = []
        total = 0
        while total <= limit:
            data = self.read(deadline, watched)
            if not data:
                return b"".join(pieces)
            pieces.append(data)
            total += len(data)
        raise BodyTooLarge(limit=size_text(limit), hint="")


def quote(text: str, safe: str = "/") -> str:
    """Percent-encoded, as urllib.parse does it; that takes 4 ms to import, and seldom has something to do."""
    if _UNRESERVED.fullmatch(text.replace("/", "") if "/" in safe else text):
        return text
    import urllib.parse

    return urllib.parse.quote(text, safe)


def unquote(text: str) -> str:
    """The other way round."""
    if "%" not in text:
        return text
    import urllib.parse

    return urllib.parse.unquote(text)


def query_values(query: str, name: str) -> list[str]:
    """What a URL's query says of a name."""
    if name not in query and "%" not in query:
        return []
    import urllib.parse

    return [value for key, value in urllib.parse.parse_qsl(query) if key == name]


@dataclass(frozen=True)
class Address:
    """Where an engine answers. `base` is put before every path."""

    host: str  # a path (/…) stands for a local socket
    port: int
    base: str = ""

    @property
    def authority(self) -> str:
        if self.host.startswith("/"):
            return "localhost"
        return ("[%s]:%d" if ":" in self.host else "%s:%d") % (self.host, self.port)

    @classmethod
    def of_url(cls, url: str) -> Address:
        """'http://[::1]:8080/base' -> Address; ValueError says what is wrong with it."""
        match = _URL.fullmatch(url)
        if not match:
            raise ValueError("an address looks like http://127.0.0.1:8080")
        port = int(match.group(3) or 80)
        if not 0 < port < 65536:
            raise ValueError(f"port {port} is out of range")
        return cls((match.group(1) or match.group(2)).lower(), port, match.group(4).rstrip("/"))


class Pool:
    """Connections to one engine. Idle ones are kept: llama-server closes them after 5 s and after 100 exchanges."""

    IDLE = 4.0
    KEPT = 128
    PER_ADDRESS = 3.0  # seconds before an address that swallows the SYN is given up for the next one
    REMEMBERED = 30.0  # seconds that the name's resolution, and the address that worked, are believed

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: deque[Wire] = deque()
        self._found: list[Any] = []
        self._found_until = 0.0

    def take(self) -> Wire | None:
        """A kept connection that is still good, or None."""
        while True:
            try:
                wire = self._idle.pop()
            except IndexError:
                return None
            if time.monotonic() - wire.idle_since < self.IDLE and wire.fresh():
                return wire
            wire.close()

    def give(self, wire: Wire) -> None:
        """Take back a connection whose exchange is complete."""
        now = wire.idle_since = time.monotonic()
        wire.forget()
        self._idle.append(wire)
        try:
            while len(self._idle) > self.KEPT or now - self._idle[0].idle_since > self.IDLE:
                self._idle.popleft().close()
        except IndexError:
            pass  # none is left: other threads take at the same time

    def connect(self, deadline: float, watched: Wire | None = None) -> Wire:
        """A new connection; all resolved addresses are tried in order (localhost may be ::1 first). EngineLost when none
        answers: its `refused` tells that nobody listens there."""
        refused, last = True, "name not found"
        for entry in self._resolve():
            family, kind, proto, _, where = entry
            sock = socket.socket(family, kind, proto)
            try:
                _connect(sock, where, min(deadline, time.monotonic() + self.PER_ADDRESS), watched)
            except OSError as problem:
                sock.close()
                refused = refused and isinstance(problem, ConnectionRefusedError)
                last = problem.strerror or "no answer"
                continue
            except BaseException:
                sock.close()
                raise
            if family != getattr(socket, "AF_UNIX", None):
                _probe_when_silent(sock)
            if self._found[0] is not entry:
                self._found = [entry] + [other for other in self._found if other is not entry]
            return Wire(sock)
        self._found_until = 0.0
        error = EngineLost("the engine does not answer")
        error.fields.update(refused=refused and bool(self._found), detail=f"{self.address.authority}: {last}")
        raise error

    def _resolve(self) -> list[Any]:
        now = time.monotonic()
        if self.address.host.startswith("/"):
            self._found = self._found or [(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", self.address.host)]
        elif now >= self._found_until:
            try:
                host = self.address.host
                name = host.encode() if host.isascii() else host  # a text would go through the idna codec, 2 ms to import
                self._found = socket.getaddrinfo(name, self.address.port, type=socket.SOCK_STREAM)
            except OSError:
                return []
            self._found_until = now + self.REMEMBERED
        return self._found

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _probe_when_silent(sock: socket.socket) -> None:
    """Have the kernel ask a silent peer whether it is still there: a machine without power, or one that was started again,
    closes nothing. An engine that only thinks answers."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    silence = PROBE_PAUSE * (PROBES + 1)
    options = {"KEEPIDLE": PROBE_PAUSE, "KEEPINTVL": PROBE_PAUSE, "KEEPCNT": PROBES, "USER_TIMEOUT": silence * 1000}
    for name, value in options.items():
        if hasattr(socket, "TCP_" + name):  # Linux has them all
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, "TCP_" + name), value)


def _connect(sock: socket.socket, where: Any, deadline: float, watched: Wire | None) -> None:
    """Connect within the deadline; OSError says why not, ClientGone when the watched client left meanwhile."""
    sock.setblocking(False)
    try:
        sock.connect(where)
        return
    except BlockingIOError:
        pass
    poller = select.poll()
    poller.register(sock, select.POLLOUT)
    if watched is not None:
        watched.end_turn()
        poller.register(watched.sock, select.POLLIN)
    while True:
        ready = poller.poll(_poll_time(deadline))
        if not ready:
            raise TimeoutError(errno.ETIMEDOUT, "no answer")
        for number, _ in ready:
            if number != sock.fileno() and watched is not None and not watched.look(poller):
                raise ClientGone()
            if number == sock.fileno():
                error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error == errno.ECONNREFUSED:
                    raise ConnectionRefusedError(error, "connection refused")
                if error:
                    raise OSError(error, os.strerror(error))
                return


class Response:
    """The head of one response, read from a wire, and the body behind it."""

    __slots__ = ("status", "reason", "fields", "body", "reusable")

    def __init__(self, wire: Wire, method: str, deadline: float, watched: Wire | None = None) -> None:
        """Interim answers (1xx) are skipped, up to a bound: taking a 103 for the answer would be off by one ever after.
        PeerGone when the connection ends before a whole head."""
        while True:
            block = wire.head(deadline, watched)
            line, _, rest = block.partition("\r\n")
            if not line and wire.interim:
                raise ProtocolError("an end after an interim answer")
            if not line:
                raise PeerGone()
            match = _STATUS_LINE.fullmatch(line)
            if not match:
                raise ProtocolError("malformed status line")
            self.status = int(match.group(2))
            if self.status >= 200:
                wire.interim = 0
                break
            if self.status == 101:
                raise ProtocolError("protocol switch that nobody asked for")
            wire.interim += len(block)  # on the wire: a deadline may pass before the answer comes, which is then read on
            if wire.interim > MAX_HEAD:
                raise ProtocolError("endless interim answers")
        self.reason = match.group(3) or ""
        self.fields = Fields(rest)
        minor = int(match.group(1))
        length = body_length(self.fields, UNTIL_CLOSE, minor)
        if method == "HEAD" or self.status in (204, 304):
            length = 0
        self.body = Body(wire, length)
        self.reusable = minor == 1 and length != UNTIL_CLOSE and not self.fields.has_token("connection", "close")

    @property
    def is_event_stream(self) -> bool:
        return self.fields.get("content-type").split(";")[0].strip().lower() == "text/event-stream"


@dataclass(frozen=True)
class Reply:
    """A whole response, for callers that need no stream."""

    status: int
    fields: Fields
    body: bytes

    def json(self) -> Any:
        """The body as JSON, None when it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


def request_head(method: str, target: str, fields: Iterable[tuple[str, str]]) -> bytes:
    """A request's header block. The names and values must have come from Fields, or be our own."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in fields])
    return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")


def request(
    pool: Pool, method: str, path: str, *, body: Any = None, key: str = "", seconds: float = 10.0, limit: int = 16 << 20
) -> Reply:
    """One exchange on a fresh connection that is closed after it; `body` is sent as JSON.

    EngineLost when nobody answers, DeadlinePassed, ProtocolError, PeerGone, BodyTooLarge above `limit` bytes.
    """
    data = b"" if body is None else json.dumps(body).encode()
    fields = [("Host", pool.address.authority), ("Connection", "close"), ("Accept", "*/*")]
    if data:
        fields += [("Content-Type", "application/json")]
    if data or method == "POST":
        fields += [("Content-Length", str(len(data)))]
    if key:
        fields += [("Authorization", "Bearer " + key)]
    deadline = time.monotonic() + seconds
    wire = pool.connect(deadline)
    try:
        wire.write(request_head(method, pool.address.base + path, fields) + data, seconds)
        response = Response(wire, method, deadline)
        return Reply(response.status, response.fields, response.body.all(deadline, limit))
    finally:
        wire.close()


# ======================================================================================================================
# 4  Configuration
# ======================================================================================================================
# One table describes each kind of section: a dataclass whose fields carry a reader. Reading collects every problem with
# its key path before it gives up, so that a file is mended in one go.

CONFIG_NAMES = ("llmguard.toml", "llmguard.json")
_NAME = Pattern(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def _key(read: Callable[[Any], Any], default: Any = MISSING, make: Any = MISSING) -> Any:
    """A field of a configuration section; `read` turns the file's value into ours, ValueError says what is wrong."""
    if make is not MISSING:
        return field(default_factory=make, metadata={"read": read})
    return field(default=default, metadata={"read": read})


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or _CONTROL.search(value):
        raise ValueError("a text is due")
    return value


def _secret(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[\x21-\x7e]*", value):
        raise ValueError("a key is printable ASCII without blanks")
    return value


def _secrets(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("a list of keys is due")
    for entry in value:
        if not _secret(entry):
            raise ValueError("an empty key would let everybody in: remove it")
    return tuple(value)


def _key_file(value: Any) -> str:
    path = os.path.expanduser(_text(value))
    keys_in(path)
    return path


def keys_in(path: str) -> tuple[str, ...]:
    """The API keys of a file: one a line, # begins a comment line; ValueError says what is wrong with it."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    keys = tuple(_secret(line) for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError("no key in it")
    return keys


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false is due")
    return value


def _pause(value: Any) -> float:
    """What is done again and again, pauses: zero would be a busy loop."""
    seconds = duration(value)
    if seconds < 0.01:
        raise ValueError("at least 10ms is due")
    return seconds


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("a number from 1 is due")
    return value


def _port(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 65536:
        raise ValueError("a port from 1 to 65535 is due")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("a list of texts is due")
    return tuple(_text(entry) for entry in value)


_NOT_A_WORD = Pattern(r"[\x00\ud800-\udfff]")  # a script for `sh -c` may have many lines


def _command(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise ValueError('a list of words is due, as in ["llama-server", "--port", "{port}"]: no shell reads it')
    if not isinstance(value, list) or not all(isinstance(word, str) and not _NOT_A_WORD.search(word) for word in value):
        raise ValueError("a list of words is due")
    if not value or not value[0]:
        raise ValueError("the command is empty")
    return tuple(value)


def _one_of(*words: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in words:
            raise ValueError("one of {} is due".format(", ".join(words)))
        return str(value)

    return read


def _gpus(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value):
        raise ValueError("a list of GPU numbers is due, as in [0]")
    return tuple(value)


def _mac(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"(?:[0-9a-fA-F]{2}[:-]){5}[0-9a-fA-F]{2}", value):
        raise ValueError("a MAC address looks like aa:bb:cc:dd:ee:ff")
    return value.replace("-", ":").lower()


def _unit(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9:_.@\\-]+", value) or value.startswith("-"):
        raise ValueError("a systemd unit's name is due")
    return value if value.endswith(".service") else value + ".service"


def _is_ipv6(text: str) -> bool:
    import ipaddress

    try:
        return bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False


def host_port(value: Any) -> tuple[str, int]:
    """'127.0.0.1:8080', '[::]:8080', 'localhost:0' -> (host, port); ValueError for a bare IPv6 address."""
    match = re.fullmatch(r"(?:\[(.*)\]|([A-Za-z0-9._-]*)):([0-9]{1,5})", value) if isinstance(value, str) else None
    if not match or int(match.group(3)) > 65535 or (match.group(1) is not None and not _is_ipv6(match.group(1))):
        raise ValueError("an address with a port looks like 127.0.0.1:8080 or [::1]:8080")
    return match.group(1) or match.group(2) or "0.0.0.0", int(match.group(3))


def _url(value: Any) -> Address:
    if re.search(r"[\s\\]", _text(value)):
        raise ValueError("an address looks like http://127.0.0.1:8080")
    return Address.of_url(value)


def _address(value: Any) -> str:
    """A host without a port; brackets around an IPv6 address are taken off, a zone (%eth0) is kept."""
    text = _text(value)
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" in bare:
        if not _is_ipv6(bare):
            raise ValueError(f"{text} is no address without a port: the port goes to the engine")
        groups = bare.split("%")[0].split(":")
        if bare == text and "::" in bare and re.fullmatch(r"\d{4,5}", groups[-1]) and int(groups[-1]) >= 1024:
            raise ValueError(f"{text} is ambiguous: write [{text}], and put a port to the engine")
    elif not re.fullmatch(r"[A-Za-z0-9._-]+", bare):
        raise ValueError("a host name or an IP address is due")
    return bare


def _refusals(value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or not all(isinstance(n, int) and 400 <= n < 600 for n in value.values()):
        raise ValueError("a table is due: User-Agent prefix = status from 400 to 599")
    return dict(value)


def _models(value: Any) -> str | dict[str, str]:
    """'auto', a list of names, or a table public = upstream -> 'auto' or {public: upstream}."""
    if value == "auto":
        return "auto"
    if isinstance(value, dict):
        return {_text(public): _text(upstream) for public, upstream in value.items()}
    if isinstance(value, list):
        names: dict[str, str] = {}
        for entry in value:
            for public, upstream in entry.items() if isinstance(entry, dict) else [(entry, entry)]:
                if _text(public) in names:
                    raise ValueError(f"{public} is named twice")
                names[public] = _text(upstream)
        return names
    raise ValueError('a list of names, a table public = "upstream" or "auto" is due')


@dataclass(frozen=True)
class EngineConfig:
    """A model server that a host can run: exactly one of `unit`, `command` and `url`."""

    name: str = ""
    unit: str | None = _key(_unit, None)
    scope: str = _key(_one_of("user", "system"), "user")
    command: tuple[str, ...] | None = _key(_command, None)
    url: Address | None = _key(_url, None)
    port: int | None = _key(_port, None)
    start_timeout: float = _key(duration, 600.0)
    vram: int | None = _key(size, None)
    api_key: str = _key(_secret, "")
    on_cpu: str = _key(_one_of("restart", "warn"), "restart")
    max_rss: int | None = _key(size, None)
    models: str | dict[str, str] = _key(_models, make=dict)

    @property
    def managed(self) -> bool:
        """Do we start and stop it?"""
        return self.url is None


def _queue(value: Any) -> dict[str, Any]:
    """A folder, or a table: path, running, waiting, log, settle, pattern -> that table, as the agent takes it."""
    names = ("path", "running", "waiting", "log", "settle", "pattern")
    table = {"path": value} if isinstance(value, str) else value
    if not isinstance(table, dict) or not isinstance(table.get("path"), str) or not set(table) <= set(names):
        raise ValueError(f"a folder is due, or a table with {', '.join(names)}")
    for name in names[:4]:
        if name in table:
            _text(table[name])
    table = dict(table, settle=duration(table.get("settle", "2m")))
    if "pattern" in table:
        try:
            groups = re.compile(_text(table["pattern"])).groupindex
        except re.error as error:
            raise ValueError(f"pattern is no regular expression: {error}") from None
        if not {"event", "job"} <= set(groups):
            raise ValueError("pattern needs the named groups event and job (and may have time, pid, comm)")
    return table


@dataclass(frozen=True)
class HostConfig:
    """One GPU lane on one box."""

    name: str = ""
    ssh: str | None = _key(_text, None)
    address: str = _key(_address, "")
    tunnel: bool = _key(_flag, False)
    job_queue: dict[str, Any] | None = _key(_queue, None)
    owner_check: tuple[str, ...] | None = _key(_command, None)
    bench_port: int | None = _key(_port, None)
    gpus: tuple[int, ...] | None = _key(_gpus, None)
    ignore: tuple[str, ...] = _key(_texts, ())
    owner_min: int = _key(size, 512 << 20)
    unexplained: str = _key(_one_of("owner", "ignore"), "owner")
    python: str = _key(_text, "python3")
    sudo: bool = _key(_flag, False)
    mac: str | None = _key(_mac, None)
    engines: dict[str, EngineConfig] = field(default_factory=dict)


@dataclass(frozen=True)
class ProxyConfig:
    listen: tuple[str, int] = _key(host_port, ("127.0.0.1", 8080))
    api_keys: tuple[str, ...] = _key(_secrets, ())
    api_keys_file: str | None = _key(_key_file, None)
    admin_keys: tuple[str, ...] = _key(_secrets, ())
    idle_stop: float = _key(duration, 900.0)
    tick: float = _key(_pause, 30.0)
    handover: float = _key(duration, 30.0)
    queue_timeout: float = _key(duration, 600.0)
    stream_keepalive: float = _key(_pause, 15.0)
    max_body: int = _key(size, 256 << 20)
    max_connections: int = _key(_number, 512)
    drain_timeout: float = _key(duration, 600.0)
    refusal_status: dict[str, int] = _key(_refusals, make=lambda: {"codex": 400})


@dataclass(frozen=True)
class Config:
    """All of it. `path` is None when there is no file."""

    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    hosts: dict[str, HostConfig] = field(default_factory=dict)
    path: str | None = None
    warnings: tuple[str, ...] = ()


class _Problems(list):  # type: ignore[type-arg]
    """What is wrong with a file, one line each."""

    def add(self, path: str, problem: str) -> None:
        self.append(f"{path}: {problem}")

    def unknown(self, path: str, wrong: str, known: Iterable[str]) -> None:
        self.add(path, f"unknown key{did_you_mean(wrong, known)}")


def did_you_mean(wrong: str, known: Iterable[str], count: int = 1) -> str:
    """', did you mean X?' with the nearest of the known words, or ''."""
    import difflib

    near = difflib.get_close_matches(wrong, list(known), count, 0.5)
    return ", did you mean {}?".format(" or ".join(near)) if near else ""


def _section(kind: Any, table: Any, path: str, problems: _Problems, **given: Any) -> Any:
    """A table of the file -> a value of that dataclass; what is wrong is added to the problems."""
    readers = {f.name: f.metadata["read"] for f in dataclass_fields(kind) if "read" in f.metadata}
    values = dict(given)
    for key, value in table.items():
        if key == "engines" and "engines" in given:
            continue
        if key not in readers:
            problems.unknown(f"{path}.{key}", key, [*readers, *(name for name in given if name != "name")])
            continue
        try:
            values[key] = readers[key](value)
        except ValueError as error:
            problems.add(f"{path}.{key}", str(error))
    return kind(**values)


def _table(value: Any, path: str, problems: _Problems) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    problems.add(path, "a table is due")
    return {}


def _engine(name: str, table: dict[str, Any], path: str, problems: _Problems) -> EngineConfig:
    engine: EngineConfig = _section(EngineConfig, dict(table), path, problems, name=name)
    kinds = [kind for kind in ("unit", "command", "url") if kind in table]
    if len(kinds) > 1:
        problems.add(path, "only one of unit, command and url is possible, not {}".format(" and ".join(kinds)))
    if not kinds:
        engine = replace(engine, unit=f"llm-engine-{name}.service")
    if engine.url is None and "url" not in table and engine.port is None and "port" not in table:
        problems.add(path + ".port", "missing: the port that the engine listens on")
    if "models" not in table:
        problems.add(path + ".models", 'missing: the names that clients ask for, or "auto"')
    return engine


def _host(name: str, table: dict[str, Any], path: str, problems: _Problems) -> HostConfig:
    engines = {}
    for engine, entry in _table(table.get("engines", {}), path + ".engines", problems).items():
        where = f"{path}.engines.{engine}"
        if not _NAME.fullmatch(engine):
            problems.add(where, "a name has letters, digits, '.', '_' and '-'")
        engines[engine] = _engine(engine, _table(entry, where, problems), where, problems)
    host: HostConfig = _section(HostConfig, table, path, problems, name=name, engines=engines)
    if not engines:
        problems.add(path + ".engines", "missing: a host needs at least one engine")
    if not host.address:
        if host.ssh and not host.tunnel and "address" not in table:
            problems.add(path + ".address", f"missing: where the engines of {host.ssh} answer (or tunnel = true)")
        host = replace(host, address="127.0.0.1")
    ports: dict[int, str] = {}
    for engine_name, config in engines.items():
        if config.managed and config.port:
            if config.port in ports:
                problems.add(f"{path}.engines.{engine_name}.port", f"taken by engine {ports[config.port]}")
            elif config.port == host.bench_port:
                problems.add(f"{path}.engines.{engine_name}.port", "is the bench_port of this host")
            ports[config.port] = engine_name
    return host


def _shared_ports(hosts: Iterable[HostConfig], problems: _Problems) -> None:
    """Two hosts may be two GPUs of one box: then they share its ports."""
    taken: dict[tuple[str | None, int], tuple[str, str]] = {}
    for host in hosts:
        for engine in host.engines.values():
            if engine.managed and engine.port:
                first_host, first = taken.setdefault((host.ssh, engine.port), (host.name, engine.name))
                if first_host != host.name:
                    where = f"hosts.{host.name}.engines.{engine.name}.port"
                    problems.add(where, f"taken by engine {first} of host {first_host}, on the same box")


def parse_config(data: Any, path: str | None = None) -> Config:
    """A whole configuration as parsed from TOML or JSON -> Config; ConfigError lists everything that is wrong with it."""
    problems = _Problems()
    top = _table(data, "the file", problems)
    for key in top:
        if key not in ("proxy", "hosts"):
            problems.unknown(key, key, ("proxy", "hosts"))
    proxy: ProxyConfig = _section(ProxyConfig, _table(top.get("proxy", {}), "proxy", problems), "proxy", problems)
    hosts = {}
    for name, table in _table(top.get("hosts", {}), "hosts", problems).items():
        where = f"hosts.{name}"
        if not _NAME.fullmatch(name):
            problems.add(where, "a name has letters, digits, '.', '_' and '-'")
        hosts[name] = _host(name, _table(table, where, problems), where, problems)
    if not hosts:
        problems.add("hosts", "missing: at least one host, as in [hosts.here]")
    seen: dict[str, str] = {}
    for host in hosts.values():
        for engine in host.engines.values():
            for model in engine.models if isinstance(engine.models, dict) else ():
                where = f"hosts.{host.name}.engines.{engine.name}.models"
                if model in seen:
                    problems.add(where, f"{model} is a model of {seen[model]} already")
                seen[model] = where
    _shared_ports(hosts.values(), problems)
    if proxy.api_keys_file:
        proxy = replace(proxy, api_keys=proxy.api_keys + keys_in(proxy.api_keys_file))
    if problems:
        where_file = f"{path}: " if path else ""
        raise ConfigError("\n".join(where_file + printable(problem) for problem in problems))
    return Config(proxy, hosts, path, tuple(_warnings(proxy, hosts)))


def _warnings(proxy: ProxyConfig, hosts: dict[str, HostConfig]) -> Iterator[str]:
    if not is_loopback(proxy.listen[0]) and not proxy.api_keys:
        where = Address(*proxy.listen).authority
        yield f"proxy.listen: {where} is open to the network and there are no api_keys: whoever reaches it can use it"
    for host in hosts.values():
        for engine in host.engines.values():
            if engine.managed and engine.models == "auto":
                where = f"hosts.{host.name}.engines.{engine.name}.models"
                yield f'{where}: "auto" on an engine that llmguard starts: its names are known only once it runs'
            if engine.command and not any("{port}" in word or str(engine.port) in word for word in engine.command):
                where = f"hosts.{host.name}.engines.{engine.name}.command"
                yield f"{where}: neither {{port}} nor {engine.port} is in it: will it listen there?"


def is_loopback(host: str) -> bool:
    """127/8, ::1 (v4-mapped too) and localhost."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            packed = socket.inet_pton(family, host.split("%")[0])
        except (OSError, ValueError):
            continue
        mapped = packed[-4:] if packed.startswith(bytes(10) + b"\xff\xff") or len(packed) == 4 else b""
        return mapped[:1] == b"\x7f" or packed == bytes(15) + b"\x01"
    return host == "localhost"


def config_path(chosen: str | None = None) -> str | None:
    """The configuration file: as chosen, or the first found where the design says; None when there is none."""
    if chosen or os.environ.get("LLMGUARD_CONFIG"):
        return chosen or os.environ["LLMGUARD_CONFIG"]
    user = os.path.join(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "llmguard")
    for folder in (".", user, "/etc/llmguard"):
        for name in CONFIG_NAMES:
            if os.path.exists(os.path.join(folder, name)):
                return os.path.join(folder, name)
    return None


def load_config(path: str) -> Config:
    """Read a .toml or .json file. ConfigError names the file, and the key or the line of each mistake."""
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        if path.endswith(".toml"):
            return parse_config(_toml(raw.decode("utf-8")), path)
        if path.endswith(".json"):
            return parse_config(json.loads(raw.decode("utf-8"), object_pairs_hook=_no_twins), path)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    raise ConfigError(f"{path}: the name must end in .toml or .json")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON keeps the last of two equal keys without a word: half of a host would be gone. TOML refuses them by itself."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [key for key, _ in pairs]
        twin = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"{twin} stands twice in one table")
    return table


def _toml(text: str) -> Any:
    try:
        import tomllib
    except ModuleNotFoundError:
        raise ValueError(
            "TOML needs Python 3.11 or later, this is %d.%d: write the same keys as JSON" % sys.version_info[:2]
        ) from None
    return tomllib.loads(text)


# ======================================================================================================================
# 5  The box
# ======================================================================================================================
# Reads only, and all below one root, so that a test lays a tree of files. A process may vanish between two reads at any
# time: that is an ordinary outcome (None), never an error and never "it holds nothing".


@dataclass(frozen=True)
class Process:
    """One process. `start` (clock ticks since boot, field 22 of stat) with the pid tells it from a later one."""

    pid: int
    start: int
    comm: str
    state: str
    session: int
    uid: int
    parent: int = 0

    @property
    def ended(self) -> bool:
        """A zombie holds nothing any more: no memory, no GPU, no socket."""
        return self.state in "ZX"


@dataclass(frozen=True)
class Memory:
    """/proc/PID/status, in bytes: what is resident, and how much of that is anonymous, and what went to swap."""

    rss: int
    anon: int
    file: int
    swap: int


class Box:
    """The machine that this process runs on, read through /proc and /sys below `root`."""

    TCP_ESTABLISHED, TCP_LISTEN = 1, 10  # include/net/tcp_states.h

    def __init__(self, root: str = "/") -> None:
        self.root = root

    def read(self, path: str) -> str | None:
        """A small file of the box; None when it is not there or not ours to read."""
        try:
            with open(os.path.join(self.root, path), "rb") as file:
                return file.read().decode("utf-8", "replace")
        except OSError:
            return None

    def cpu_seconds(self) -> dict[int, float]:
        """How long each CPU has worked since the boot, for whomever (proc(5), /proc/stat; what a hypervisor took counts)."""
        lines = re.findall(r"(?m)^cpu(\d+) (.*)$", self.read("proc/stat") or "")
        times = {int(cpu): list(map(int, ticks.split())) for cpu, ticks in lines}
        return {cpu: (sum(t[:3]) + sum(t[5:8])) / os.sysconf("SC_CLK_TCK") for cpu, t in times.items()}

    def boot(self) -> str | None:
        """Which boot of the machine this is: pids and start times mean nothing in another one."""
        return (self.read("proc/sys/kernel/random/boot_id") or "").strip() or None

    # ----- processes

    def pids(self) -> list[int]:
        return [int(name) for name in os.listdir(os.path.join(self.root, "proc")) if name.isdigit()]

    def process(self, pid: int) -> Process | None:
        """proc(5), /proc/PID/stat: the name stands in brackets and may itself hold blanks and brackets."""
        text = self.read("proc/%d/stat" % pid)
        if not text:
            return None
        try:
            uid = os.stat(os.path.join(self.root, "proc/%d" % pid)).st_uid
        except OSError:
            return None
        before, _, after = text.rpartition(")")
        words = after.split()
        return Process(pid, int(words[19]), before.partition("(")[2], words[0], int(words[3]), uid, int(words[1]))

    def same(self, pid: int, start: int) -> Process | None:
        """That very process, if it still runs."""
        process = self.process(pid)
        return process if process and process.start == start and not process.ended else None

    def memory(self, pid: int) -> Memory | None:
        """None when it is gone or a zombie (no Vm lines at all)."""
        status = self.read("proc/%d/status" % pid) or ""
        values = {key: int(kib) * 1024 for key, kib in re.findall(r"(?m)^(VmRSS|RssAnon|RssFile|VmSwap):\s+(\d+) kB$", status)}
        if "VmRSS" not in values:
            return None
        return Memory(values["VmRSS"], values.get("RssAnon", 0), values.get("RssFile", 0), values.get("VmSwap", 0))

    def living(self) -> list[Process]:
        found = (self.process(pid) for pid in self.pids())
        return [process for process in found if process and not process.ended]

    def session(self, leader: int) -> list[Process]:
        """The living processes of a session, whoever started them in it."""
        return [process for process in self.living() if process.session == leader]

    def family(self, roots: Collection[int]) -> list[Process]:
        """The living ones among some processes, and all that descend from those."""
        living = self.living()
        found: list[Process] = []
        known: set[int] = set()
        while True:
            more = [p for p in living if p.pid not in known and (p.pid in roots or p.parent in known)]
            if not more:
                return found
            found += more
            known.update(process.pid for process in more)

    def argv(self, pid: int) -> list[str]:
        """/proc/PID/cmdline; [] when it is gone."""
        return (self.read(f"proc/{pid}/cmdline") or "").split("\0")[:-1]

    def environment(self, pid: int) -> dict[str, str]:
        """/proc/PID/environ, as the process was started; {} where it may not be read."""
        pairs = (self.read(f"proc/{pid}/environ") or "").split("\0")
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)

    def age(self, process: Process) -> float:
        """Seconds that a process lives, by the box's own uptime: no clock that somebody sets has a say."""
        uptime = (self.read("proc/uptime") or "0").split()[0]
        return max(0.0, float(uptime) - process.start / os.sysconf("SC_CLK_TCK"))

    def cgroup(self, pid: int) -> str | None:
        """The cgroup by which systemd knows the process: the `0::` line, which is "/" where systemd keeps to v1, and then the
        `name=systemd` line. By key, not by place: a container may show nine more lines."""
        lines = [line.split(":", 2) for line in (self.read(f"proc/{pid}/cgroup") or "").splitlines()]
        paths = {line[1]: line[2] for line in lines if len(line) == 3 and line[1] in ("", "name=systemd")}
        unified = paths.get("")
        return unified if unified and unified != "/" else paths.get("name=systemd", unified)

    # ----- listening sockets

    def listeners(self, port: int) -> list[int]:
        """The inodes of the sockets that listen on a TCP port, IPv4 and IPv6."""
        return self._sockets(port, self.TCP_LISTEN)

    def connections(self, port: int) -> int:
        """How many connections to a TCP port of this box stand."""
        return len(self._sockets(port, self.TCP_ESTABLISHED))

    def _sockets(self, port: int, state: int) -> list[int]:
        """The inodes of the TCP sockets of a local port that are in a state, IPv4 and IPv6: proc(5), /proc/net/tcp, where the
        kernel can't be asked for just them."""
        told = tcp_sockets(port, state) if self.root == "/" else None
        if told is not None:
            return told
        inodes, mark = [], f":{port:04X} "
        for table in ("proc/net/tcp", "proc/net/tcp6"):
            for line in (self.read(table) or "").splitlines():
                words = line.split() if mark in line else []
                if words and words[1].endswith(mark[:-1]) and int(words[3], 16) == state:
                    inodes.append(int(words[9]))
        return inodes

    def listening(self, port: int, guess: int = 0) -> list[Process]:
        """The processes that listen on a port, as far as they may be looked at: another user's stay unknown. `guess`: the pid
        that did so the last time, which spares a look at all the others while it still does."""
        wanted = {"socket:[%d]" % inode for inode in self.listeners(port)}
        if guess and wanted:
            found = self._holding(wanted, [guess])
            if found:
                return found
        return self._holding(wanted, self.pids()) if wanted else []

    def _holding(self, wanted: set[str], pids: Iterable[int]) -> list[Process]:
        """Which of these processes have such a descriptor."""
        found = []
        for pid in pids:
            folder = os.path.join(self.root, "proc/%d/fd" % pid)
            try:
                holds = any(_link(os.path.join(folder, name)) in wanted for name in os.listdir(folder))
            except OSError:
                continue
            process = self.process(pid) if holds else None
            if process:
                found.append(process)
        return found


def tcp_sockets(port: int, state: int) -> list[int] | None:
    """The inodes of this machine's TCP sockets of a local port that are in a state, as the kernel picks them (sock_diag(7),
    linux/inet_diag.h); None where it does not. To have all listed in /proc/net/tcp takes it milliseconds, and tens of them
    where many connections ended a moment ago."""
    import struct

    inodes: list[int] = []
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4) as kernel:  # NETLINK_SOCK_DIAG
            kernel.settimeout(1.0)
            for family in (socket.AF_INET, socket.AF_INET6):
                # nlmsghdr: 72 bytes, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP; then inet_diag_req_v2
                kernel.send(struct.pack("=IHHII", 72, 20, 0x301, 0, 0)
                            + struct.pack("=BBxxI", family, socket.IPPROTO_TCP, 1 << state) + struct.pack("!H46x", port))
                kind = 0
                while kind != 3:  # NLMSG_DONE
                    data, at = kernel.recv(1 << 16), 0
                    while at < len(data):
                        length, kind = struct.unpack_from("=IH", data, at)
                        if kind == 20:
                            inodes.append(struct.unpack_from("=I", data, at + 16 + 68)[0])  # inet_diag_msg: idiag_inode
                        elif kind == 2:  # NLMSG_ERROR: it has no such module
                            return None
                        at += (length + 3) & ~3
    except (OSError, AttributeError, struct.error):
        return None
    return inodes


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


# ----- tools of the box

TOOL_LIMIT = 8 << 20  # `nvidia-smi -q -x` of a box with eight cards in slices prints under 1 MiB
KILLED = -9
_TOOL_FOLDERS = ("/usr/bin", "/usr/sbin", "/usr/lib/wsl/lib", "/run/current-system/sw/bin")  # what ssh's PATH may lack


def run_tool(argv: list[str], seconds: float) -> tuple[int | None, str, str]:
    """Run a program of the box -> its exit code, stdout, stderr. None as the code: it isn't there or can't be run. KILLED: too
    slow or too much, stderr then says so in one line."""
    folders = [*os.environ.get("PATH", "").split(":"), *_TOOL_FOLDERS]
    found = next((path for path in (os.path.join(f, argv[0]) for f in folders if f) if os.access(path, os.X_OK)), None)
    if not found:
        return None, "", f"{argv[0]}: not found"
    try:
        done = run([found, *argv[1:]], seconds, env=dict(os.environ, LC_ALL="C"), limit=TOOL_LIMIT)
    except OSError as error:
        return None, "", f"{found}: {error.strerror}"
    out, err = done.out.decode("utf-8", "replace"), done.err.decode("utf-8", "replace")
    if done.code is None:
        return KILLED, out, f"{argv[0]} {done.problem} ({age(seconds)})"
    return done.code, out, err


def container_processes(box: Box, run: Run, tool: str, port: int, name: str = "") -> list[Process]:
    """What runs in the container that publishes a port, or has that name. Its processes are the daemon's, neither in the session
    nor in the cgroup of whoever asked for it: the container's id in their cgroup tells them. `tool`: docker or podman."""
    code, out, _ = run([tool, "ps", "--no-trunc", "--format", "{{.ID}} {{.Names}} {{.Ports}}"], 5.0)
    ids = []
    for words in (line.split(maxsplit=2) for line in out.splitlines()) if code == 0 else ():
        ranges = re.findall(r":(\d+)(?:-(\d+))?->", words[2]) if len(words) == 3 else ()
        if (len(words) > 1 and words[1] == name) or any(int(low) <= port <= int(high or low) for low, high in ranges):
            ids.append(words[0])
    return [process for process in box.living() if any(found in (box.cgroup(process.pid) or "") for found in ids)] if ids else []


CALM = 35.0  # seconds of silence after which a connection is idle: llama-server's pings on a silent stream come every 30


def connections_at_work(box: Box, run: Run, port: int) -> int | None:
    """Connections to a port at whose other end somebody waits: they carried something a moment ago, or what came in last is not
    answered yet (a long prefill). None: there are connections, and what they do can't be told.

    By iproute2's ss, whose `lastsnd:MS` and `lastrcv:MS` are left out when 0.
    """
    if not box.connections(port):
        return 0
    code, out, _ = run(["ss", "-Htin", "state", "established", f"( sport = :{port} )"], 5.0)
    if code != 0:
        return None
    busy = 0
    for line in out.splitlines():
        if line[:1].isspace():  # what is known of the socket in the line above
            since = {key: int(ms) for key, ms in re.findall(r"\b(lastsnd|lastrcv):(\d+)", line)}
            sent, received = since.get("lastsnd", 0), since.get("lastrcv", 0)
            busy += received < sent or ("bytes_acked:" in line and sent < 1000 * CALM)
    return busy


def _left_behind(box: Box, name: str, seconds: float) -> Process | None:
    """A `name` that run_tool left behind: leader of its own session, in state D, older than its deadline.

    A second one beside it would hang in the same place, and the box would fill up with them.
    """
    uptime = re.match(r"[0-9]{1,18}", box.read("proc/uptime") or "")
    for pid in _pids(box) or ():
        if (box.read("proc/%d/comm" % pid) or "").strip() != name:
            continue
        process = box.process(pid)
        lived = int(uptime.group()) - process.start / os.sysconf("SC_CLK_TCK") if uptime and process else 0
        if process and process.state == "D" and process.session == pid and lived > seconds:
            return process
    return None


# ----- GPUs: what is there, who uses it
#
# NVIDIA: one `nvidia-smi -q -x`, since it is the only output that lists graphics and mixed processes too, and MIG slices.
# AMD and Intel: sysfs for what is there, /proc/PID/fdinfo and KFD for who uses it. What can't be read is unknown (None, or
# a `problem`), never 0 and never "free". All sizes are bytes.


@dataclass(frozen=True)
class Device:
    """A GPU. `index` counts in the order of PCI addresses, as nvidia-smi does."""

    index: int
    key: str  # the uuid (NVIDIA) or the PCI address
    name: str
    total: int | None = None
    used: int | None = None
    free: int | None = None  # less than total - used where the driver reserves some
    unified: bool = False  # its memory is the box's memory
    listed: bool = True  # the driver lists the processes that use it
    asleep: bool = False  # idle, and powered down: its counters fall to next to nothing, whatever it holds when it works


@dataclass(frozen=True)
class GpuProcess:
    """A process on a device, or on one slice of it: one may have several. `bytes` None: it uses it, unknown how much."""

    pid: int
    device: str
    bytes: int | None
    kind: str = ""  # NVIDIA: C, G, C+G, M+C
    program: str = ""  # its name as the driver tells it
    comm: str = ""
    user: str | None = None
    since: float | None = None  # when it started, in seconds since the epoch
    known: bool = True  # /proc knows it too


@dataclass(frozen=True)
class GpuReading:
    """One look at the GPUs. `vendor` None without a `problem`: this box has no GPU. A `problem`: nothing is known."""

    vendor: str | None = None
    devices: tuple[Device, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    problem: str | None = None
    unreadable: tuple[tuple[int, str], ...] = ()  # (pid, comm) of those that may use a GPU and may not be looked into
    compute_only: bool = False  # graphics processes are not in the list

    def on(self, device: Device) -> list[GpuProcess]:
        return [process for process in self.processes if process.device == device.key]

    @property
    def unified(self) -> bool:
        return any(device.unified for device in cards_of(self.devices))


def cards_of(devices: Collection[Device]) -> list[Device]:
    """The devices that engines run on: those with memory of their own, else all. Next to a card, a processor's small
    GPU only drives the screen."""
    return [device for device in devices if not device.unified] or list(devices)


def read_gpus(box: Box, run: Run = run_tool, gpus: Collection[int] | None = None, seconds: float = 10.0) -> GpuReading:
    """Look at the GPUs of the box, or at those with the indexes `gpus` alone.

    A process that the driver lists and /proc doesn't know may just have ended: such a list is read twice. One that is still
    in it holds memory from the grave, or from another pid namespace.
    """
    reading = _read_gpus(box, run, seconds)
    if not all(process.known for process in reading.processes):
        reading = _read_gpus(box, run, seconds)
    return reading if gpus is None else _only(reading, gpus)


def _read_gpus(box: Box, run: Run, seconds: float) -> GpuReading:
    vendors = _gpu_vendors(box)
    if "nvidia" in vendors:
        return _read_nvidia(box, run, seconds, expected=True)
    for vendor in ("amd", "intel"):
        if vendor in vendors:
            return _read_drm(box, vendor)
    # Nothing on the bus: a tool that answers all the same is right (Jetson), one that complains is installed in vain.
    return _read_nvidia(box, run, seconds, expected=False)


def _only(reading: GpuReading, gpus: Collection[int]) -> GpuReading:
    """What concerns some of the devices. A process on a device that isn't in the list might be on one of them: it stays."""
    chosen = tuple(device for device in reading.devices if device.index in gpus)
    missing = sorted(set(gpus) - {device.index for device in chosen})
    if missing and not reading.problem:
        problem = "there is no GPU %d here, only %d in all" % (missing[0], len(reading.devices))
        return replace(reading, devices=chosen, problem=problem)
    others = {device.key for device in reading.devices} - {device.key for device in chosen}
    here = tuple(process for process in reading.processes if process.device not in others)
    return replace(reading, devices=chosen, processes=here)


_PCI_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
_DRM_VENDORS = {"nvidia": "nvidia", "nouveau": "nvidia", "amdgpu": "amd", "radeon": "amd", "i915": "intel", "xe": "intel"}
_NVIDIA_SIGNS = ("dev/nvidiactl", "proc/driver/nvidia/version", "usr/lib/wsl/lib/nvidia-smi")  # not on the bus: Jetson, WSL


def _gpu_vendors(box: Box) -> set[str]:
    """Whose GPUs this box has, by its PCI bus and its DRM cards. A card that a virtual machine has been given (vfio-pci) is
    not this box's, and an Intel one without a driver is no GPU for anybody."""
    found = {_DRM_VENDORS[card.driver] for card in _drm_cards(box) if card.driver in _DRM_VENDORS}
    for name in _names(box, "sys/bus/pci/devices") or ():
        folder = f"sys/bus/pci/devices/{name}"
        vendor = _PCI_VENDORS.get((box.read(folder + "/vendor") or "").strip())
        display = vendor and (box.read(folder + "/class") or "0x03").startswith("0x03")
        if display and not _link(os.path.join(box.root, folder, "driver")).endswith("/vfio-pci"):
            found.add(str(vendor))
    if any(os.path.exists(os.path.join(box.root, path)) for path in _NVIDIA_SIGNS):
        found.add("nvidia")
    return found


def _names(box: Box, path: str) -> list[str] | None:
    """What is in a folder of the box, in order; None when it can't be listed."""
    try:
        return sorted(os.listdir(os.path.join(box.root, path)))
    except OSError:
        return None


def _pids(box: Box) -> list[int] | None:
    names = _names(box, "proc")
    return None if names is None else sorted(int(name) for name in names if _DIGITS.fullmatch(name))


def _identify(box: Box, row: GpuProcess) -> GpuProcess:
    """The same row with what /proc tells of its process."""
    if not os.path.isdir(os.path.join(box.root, "proc/%d" % row.pid)):
        return replace(row, known=False)
    process = box.process(row.pid)
    comm = (box.read("proc/%d/comm" % row.pid) or "").rstrip("\n") or (process.comm if process else "")
    if not process:
        return replace(row, comm=comm)
    return replace(row, comm=comm, user=user_name(process.uid), since=started(box, process))


def started(box: Box, process: Process) -> float | None:
    """When a process started, in seconds since the epoch: proc(5), `btime` of /proc/stat."""
    booted = re.search(r"(?m)^btime (\d+)$", box.read("proc/stat") or "")
    return int(booted.group(1)) + process.start / os.sysconf("SC_CLK_TCK") if booted else None


def user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# ----- NVIDIA

_COMPLETE = (0, 14)  # 14: the whole answer, and a warning that some card's infoROM is corrupted (nvidia-smi(1))
_SIZE_WORDS = {"": 1 << 20, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_NVIDIA_SIZE = Pattern(r"([0-9]{1,15})(?: (B|KiB|MiB|GiB))?")
_UNIFIED = ("N/A", "[N/A]", "Not Supported", "[Not Supported]")  # the totals of GB10 and Jetson
_GPU_QUERY = "index,uuid,memory.total,memory.used,memory.free,name"


def _read_nvidia(box: Box, run: Run, seconds: float, expected: bool) -> GpuReading:
    stuck = _left_behind(box, "nvidia-smi", seconds)
    if stuck:
        since = timestamp(started(box, stuck)) or "a while ago"
        return GpuReading("nvidia", problem="an earlier nvidia-smi, pid %d of %s, hangs in the driver" % (stuck.pid, since))
    code, out, err = run(["nvidia-smi", "-q", "-x"], seconds)
    try:
        reading = parse_nvidia_xml(_complete(code, out, err))
    except ValueError as error:
        failed = GpuReading("nvidia", problem=str(error))
        if code == KILLED:  # asking again might hang again
            return failed
        if not expected:
            return GpuReading()
        try:
            reading = _read_nvidia_csv(run, seconds) if code is not None else failed
        except ValueError:
            return failed
    return replace(reading, processes=tuple(_identify(box, row) for row in reading.processes))


def _complete(code: int | None, out: str, err: str) -> str:
    """What nvidia-smi printed; ValueError with its own words when it failed. They may come on either stream."""
    if code in _COMPLETE:
        return out
    lines = [line.strip() for line in (out + "\n" + err).splitlines() if line.strip() and line.lstrip()[0] != "<"]
    said = printable(lines[0][:200]) if lines else "nothing was said"
    if code == KILLED:
        raise ValueError(said)
    if code is None:
        raise ValueError(f"there is an NVIDIA GPU, and nvidia-smi can't be run: {said}")
    how = "exit code" if code > 0 else "signal"
    raise ValueError("nvidia-smi failed with %s %d: %s" % (how, abs(code), said))


def parse_nvidia_xml(text: str) -> GpuReading:
    """The output of `nvidia-smi -q -x`; ValueError says why it is none.

    The DOCTYPE names a DTD that nobody needs: expat fetches nothing. Warnings may stand before and after the document.
    """
    from xml.etree import ElementTree

    start, end = text.find("<?xml"), text.rfind("</nvidia_smi_log>")
    if start < 0 or end < 0 or "<!ENTITY" in text:
        line = next((line for line in text.splitlines() if line.strip()), "nothing")
        raise ValueError(printable(f"nvidia-smi printed no whole document: {line.strip()[:200]}"))
    try:
        root = ElementTree.fromstring(text[start:end] + "</nvidia_smi_log>")
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise ValueError(f"nvidia-smi printed broken XML: {error}") from None
    cards = root.findall("gpu")
    if not cards or root.findtext("attached_gpus", str(len(cards))).strip() != str(len(cards)):
        raise ValueError("nvidia-smi lists %d of %s GPUs" % (len(cards), printable(root.findtext("attached_gpus", "no"))))
    devices = tuple(_xml_device(index, card) for index, card in enumerate(cards))
    for device in devices:
        if not device.listed and device.used is None:
            raise ValueError("nvidia-smi tells neither the processes nor the memory of GPU %d" % device.index)
    rows = []
    for device, card in zip(devices, cards):
        rows += [_xml_process(device, info) for info in card.findall("processes/process_info")]
    return GpuReading("nvidia", devices, tuple(rows))


def _xml_device(index: int, card: Any) -> Device:
    def memory(key: str) -> str:
        return str(card.findtext("fb_memory_usage/" + key, "")).strip()

    key = (card.findtext("uuid") or card.get("id") or "GPU %d" % index).strip()
    sliced = card.findtext("mig_mode/current_mig", "").strip() == "Enabled"
    processes = card.find("processes")
    listed = processes is not None and (len(processes) > 0 or not (processes.text or "").strip())
    total, used, free = (_nvidia_size(memory(name)) for name in ("total", "used", "free"))
    unified = memory("total") in _UNIFIED and not sliced
    return Device(index, key, card.findtext("product_name", "").strip(), total, used, free, unified, listed)


def _xml_process(device: Device, info: Any) -> GpuProcess:
    pid = (info.findtext("pid") or "").strip()
    if not _DIGITS.fullmatch(pid):
        raise ValueError("nvidia-smi lists a process without a pid on GPU %d" % device.index)
    words = (info.findtext("process_name") or "").split()  # newer drivers print the whole command line
    program = os.path.basename(words[0]) if words and not words[0].startswith("[") else ""  # [Not Found]
    held = _nvidia_size((info.findtext("used_memory") or "").strip())
    return GpuProcess(int(pid), device.key, held, (info.findtext("type") or "").strip(), program)


def _nvidia_size(text: str) -> int | None:
    """'11200 MiB', or in csv '11200' -> bytes; None for [N/A], Insufficient Permissions, GPU is lost and the like."""
    match = _NVIDIA_SIZE.fullmatch(text)
    return int(match.group(1)) * _SIZE_WORDS[match.group(2) or ""] if match else None


def _read_nvidia_csv(run: Run, seconds: float) -> GpuReading:
    """The second way, for when a process's name breaks the XML. It knows nothing of graphics processes."""
    cards = _complete(*run(["nvidia-smi", "--query-gpu=" + _GPU_QUERY, "--format=csv"], seconds))
    apps = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits"]
    return parse_nvidia_csv(cards, _complete(*run(apps, seconds)))


def parse_nvidia_csv(cards: str, apps: str) -> GpuReading:
    """`--query-gpu` with its header and any columns, and `--query-compute-apps=pid,gpu_uuid,used_memory` without one."""
    header, *lines = [line.strip().split(", ") for line in cards.splitlines() if line.strip()] or [[]]
    columns = [column.partition(" [")[0] for column in header]
    if not {"index", "memory.total", "memory.used"} <= set(columns) or not lines:
        raise ValueError("nvidia-smi printed no table of GPUs")
    devices = []
    for line in lines:
        row = dict(zip(columns, line))
        if len(line) != len(columns) or not _DIGITS.fullmatch(row["index"]):
            raise ValueError("nvidia-smi printed a broken table of GPUs")
        total, used, free = (_nvidia_size(row.get("memory." + name, "")) for name in ("total", "used", "free"))
        key = row.get("uuid") or "GPU {}".format(row["index"])
        unified = row["memory.total"] in _UNIFIED
        devices.append(Device(int(row["index"]), key, row.get("name", ""), total, used, free, unified))
    rows = [_csv_process(line) for line in apps.splitlines() if line.strip()]
    if len(devices) == 1 and "uuid" not in columns:
        rows = [replace(row, device=devices[0].key) for row in rows]
    return GpuReading("nvidia", tuple(devices), tuple(rows), compute_only=True)


def _csv_process(line: str) -> GpuProcess:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 3 or not _DIGITS.fullmatch(cells[0]):
        raise ValueError("nvidia-smi printed a broken table of processes")
    return GpuProcess(int(cells[0]), cells[1], _nvidia_size(cells[2]), "C")


# ----- AMD and Intel: the DRM drivers amdgpu, xe and i915


@dataclass(frozen=True)
class _DrmCard:
    folder: str
    driver: str
    pci: str
    name: str


def _drm_cards(box: Box) -> list[_DrmCard]:
    """/sys/class/drm/cardN (not card1-DP-1, a connector), by PCI address: the N changes from boot to boot."""
    cards = {}
    for name in _names(box, "sys/class/drm") or ():
        folder = "sys/class/drm/" + name
        if re.fullmatch(r"card[0-9]+", name):
            facts = dict(line.partition("=")[::2] for line in (box.read(folder + "/device/uevent") or "").splitlines())
            pci = facts.get("PCI_SLOT_NAME", "").lower()
            driver = facts.get("DRIVER", "")
            cards[pci or name] = _DrmCard(folder, driver, pci, ("{} {}".format(driver, facts.get("PCI_ID", ""))).strip())
    return [cards[key] for key in sorted(cards)]


def _read_drm(box: Box, vendor: str) -> GpuReading:
    cards = [card for card in _drm_cards(box) if _DRM_VENDORS.get(card.driver) == vendor]
    read = _amd_device if vendor == "amd" else _intel_device
    devices = {card.pci: read(box, index, card) for index, card in enumerate(cards)}
    if not devices:
        return GpuReading(vendor, problem="there is an AMD card, and the driver amdgpu has not taken it")
    pids = _pids(box)
    if pids is None:
        return GpuReading(vendor, tuple(devices.values()), problem="/proc can't be listed")
    holdings, unreadable = _drm_holdings(box, pids, devices)
    for place, held in _kfd_holdings(box, devices).items():
        # Two witnesses: fdinfo may miss what ROCm took and KFD what Vulkan took. The larger one counts.
        holdings[place] = max((each for each in (held, holdings.get(place)) if each is not None), default=None)
    rows = (_identify(box, GpuProcess(pid, key, held)) for (pid, key), held in sorted(holdings.items()))
    return GpuReading(vendor, tuple(devices.values()), tuple(rows), unreadable=tuple(unreadable))


def _count_in(box: Box, path: str) -> int | None:
    text = (box.read(path) or "").strip()
    return int(text) if _DIGITS.fullmatch(text) else None


def _plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _minus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(0, one - other)


def _amd_device(box: Box, index: int, card: _DrmCard) -> Device:
    """mem_info_* of amdgpu, in bytes. A GPU in the processor has a small carve-out as its vram and lives in the gtt.

    A card may have less vram than gtt too (its gtt is half of the box's memory), but its memory chips have a maker, which
    mem_info_vram_vendor names; for a processor's GPU that file says "unknown" or isn't there.
    """
    names = ("vram_total", "vram_used", "gtt_total", "gtt_used")
    vram, used, gtt, gtt_used = (_count_in(box, f"{card.folder}/device/mem_info_{name}") for name in names)
    maker = (box.read(card.folder + "/device/mem_info_vram_vendor") or "unknown").strip()
    unified = vram is not None and gtt is not None and gtt > vram and maker == "unknown"
    if unified:
        vram, used = _plus(vram, gtt), _plus(used, gtt_used)
    asleep = (box.read(card.folder + "/device/power/runtime_status") or "").strip() == "suspended"
    return Device(index, card.pci, card.name, vram, used, _minus(vram, used), unified, asleep=asleep)


def _intel_device(box: Box, index: int, card: _DrmCard) -> Device:
    """Mainline tells a total at best (xe: physical_vram_size_bytes of each tile), Intel's own i915 the rest (lmem_*)."""
    total = _count_in(box, card.folder + "/lmem_total_bytes")
    free = _count_in(box, card.folder + "/lmem_avail_bytes")
    tiles = [name for name in _names(box, card.folder + "/device") or () if re.fullmatch(r"tile[0-9]+", name)]
    sizes = [_count_in(box, f"{card.folder}/device/{tile}/physical_vram_size_bytes") or 0 for tile in tiles]
    total = total or sum(sizes) or None
    unified = card.pci.startswith("0000:00:")  # the one in the processor is 0000:00:02.0; a card sits behind a bridge
    return Device(index, card.pci, card.name, total, _minus(total, free), free, unified)


@dataclass(frozen=True)
class DrmClient:
    """One open DRM file as its fdinfo tells it. `own` is device memory, `host` the box's; None: the kernel doesn't tell."""

    pci: str
    number: str
    own: int | None
    host: int | None


_FDINFO = Pattern(r"(?m)^(drm-pdev|drm-client-id|pdev|pasid):[ \t]*(\S+)[ \t]*$")
_FDINFO_SIZE = Pattern(
    r"(?m)^(?:drm-(resident|memory|total)-([a-z]+[0-9]*)|(vram|gtt) mem):[ \t]*([0-9]{1,18})(?: (kB|KiB|MiB|GiB))?[ \t]*$"
)
_FDINFO_UNITS = {"": 1, "kB": 1 << 10, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_fdinfo(text: str) -> DrmClient | None:
    """/proc/PID/fdinfo/FD -> what that client has resident; None when it is no DRM file, or doesn't say which.

    Linux's drm-usage-stats.rst: `drm-KIND-REGION: N [KiB|MiB]`, no unit = bytes. KIND: resident, which amdgpu repeats as
    memory (before 6.13 there was that alone); total counts what is not there yet. REGION: vram and gtt (amdgpu), vram0, gtt
    and system (xe), local0 and system0 (i915). amdgpu of 5.14 to 5.18: `pdev`, `pasid`, `vram mem: N kB`.
    """
    facts = dict(_FDINFO.findall(text))
    pci = facts.get("drm-pdev") or facts.get("pdev")
    number = facts.get("drm-client-id") or facts.get("pasid")
    if not pci or not number:
        return None
    regions: dict[str, dict[str, int]] = {}
    for kind, region, old, count, unit in _FDINFO_SIZE.findall(text):
        regions.setdefault(region or old, {})[kind or "memory"] = int(count) * _FDINFO_UNITS[unit]
    sums: dict[str, int] = {}
    for region, kinds in regions.items():
        place = {"vram": "own", "local": "own", "gtt": "host", "system": "host"}.get(region.rstrip("0123456789"))
        if place:
            first = next(kinds[kind] for kind in ("resident", "memory", "total") if kind in kinds)
            sums[place] = sums.get(place, 0) + first
    pci = pci.lower() if pci.count(":") == 2 else "0000:" + pci.lower()
    return DrmClient(pci, number, sums.get("own"), sums.get("host"))


# They open the files of a desktop for it, or keep them for a restart: the memory is the other holder's.
_BROKERS = ("systemd", "systemd-logind", "elogind", "elogind-daemon", "seatd", "dbus-daemon", "dbus-broker")


def _drm_holdings(
    box: Box, pids: list[int], devices: dict[str, Device]
) -> tuple[dict[tuple[int, str], int | None], list[tuple[int, str]]]:
    """(pid, device) -> bytes, and who could not be looked into.

    One client may be open in many descriptors and, inherited or handed over, in many processes: it counts once, for the
    process that started first, which opened it.
    """
    clients: dict[tuple[str, str], int] = {}
    holders: dict[tuple[str, str], set[int]] = {}
    unreadable: list[tuple[int, str]] = []
    for pid in pids:
        found, whole = _drm_clients(box, pid)
        if not whole:
            unreadable.extend(_suspect(box, pid))
        for client in found:
            device = devices.get(client.pci)
            held = _held(client, device) if device else None
            if held is not None:
                place = (client.pci, client.number)
                clients[place] = max(held, clients.get(place, 0))
                holders.setdefault(place, set()).add(pid)
    holdings: dict[tuple[int, str], int | None] = {}
    for (pci, number), held in clients.items():
        pid = min(holders[pci, number], key=lambda each: _precedence(box, each))
        holdings[pid, pci] = (holdings.get((pid, pci)) or 0) + held
    return holdings, unreadable


def _held(client: DrmClient, device: Device) -> int | None:
    """What a client holds of a device: a card's gtt is the box's memory and blocks nobody; a processor's GPU lives in it."""
    if not device.unified:
        return client.own
    return None if client.own is None and client.host is None else (client.own or 0) + (client.host or 0)


def _precedence(box: Box, pid: int) -> tuple[bool, int, int]:
    process = box.process(pid)
    comm = (box.read("proc/%d/comm" % pid) or "").strip()
    return comm in _BROKERS, process.start if process else 0, pid


def _drm_clients(box: Box, pid: int) -> tuple[list[DrmClient], bool]:
    """The DRM clients of a process, and whether it could be looked into. One that is gone holds nothing any more."""
    descriptors = _names(box, "proc/%d/fd" % pid)
    if descriptors is None:
        return [], not os.path.isdir(os.path.join(box.root, "proc/%d" % pid))
    found, whole = [], True
    for name in descriptors:
        path = "proc/%d/fd/%s" % (pid, name)
        target = _link(os.path.join(box.root, path))
        if target and not target.startswith("/dev/dri/"):
            continue
        text = box.read("proc/%d/fdinfo/%s" % (pid, name))
        client = parse_fdinfo(text or "")
        if client:
            found.append(client)
        if (target or "drm-driver" in (text or "")) and (not client or client.own is client.host is None):
            whole = whole and not os.path.lexists(os.path.join(box.root, path))  # else closed between two looks
    return found, whole


def _suspect(box: Box, pid: int) -> Iterator[tuple[int, str]]:
    """(pid, comm), unless it is a kernel thread (flag 0x200000 in field 9 of stat) or a zombie: neither has open files."""
    before, _, after = (box.read("proc/%d/stat" % pid) or "").rpartition(")")
    words = after.split()
    if len(words) > 6 and _DIGITS.fullmatch(words[6]) and (words[0] in "ZX" or int(words[6]) & 0x200000):
        return
    yield pid, before.partition("(")[2] or (box.read("proc/%d/comm" % pid) or "").strip()


def _kfd_holdings(box: Box, devices: dict[str, Device]) -> dict[tuple[int, str], int | None]:
    """(pid, device) -> bytes that ROCm processes hold: /sys/class/kfd/kfd/proc/PID/vram_GPUID, which everybody may read."""
    places = _kfd_places(box)
    only = next(iter(devices)) if len(devices) == 1 else None
    holdings: dict[tuple[int, str], int | None] = {}
    for name in _names(box, "sys/class/kfd/kfd/proc") or ():
        for file in _names(box, "sys/class/kfd/kfd/proc/" + name) or ():
            word, _, gpu = file.partition("vram_")
            if word or not gpu or not _DIGITS.fullmatch(name):
                continue
            place = int(name), places.get(gpu) or only or "kfd " + gpu
            held = _count_in(box, f"sys/class/kfd/kfd/proc/{name}/{file}")
            holdings[place] = _plus(held, holdings.get(place, 0))
    return holdings


def _kfd_places(box: Box) -> dict[str, str]:
    """KFD's number of a GPU -> its PCI address: `location_id` is bus and function, as in amdkfd's kfd_topology.c."""
    places = {}
    for node in _names(box, "sys/class/kfd/kfd/topology/nodes") or ():
        folder = "sys/class/kfd/kfd/topology/nodes/" + node
        facts = dict(re.findall(r"(?m)^(domain|location_id) ([0-9]{1,18})$", box.read(folder + "/properties") or ""))
        gpu, where = (box.read(folder + "/gpu_id") or "").strip(), int(facts.get("location_id", 0))
        if gpu and where:
            address = int(facts.get("domain", 0)), where >> 8 & 0xFF, where >> 3 & 0x1F, where & 7
            places[gpu] = "{:04x}:{:02x}:{:02x}.{:x}".format(*address)
    return places


# ----- who holds the GPU


@dataclass(frozen=True)
class Owner:
    """Somebody else who holds the GPU. `kind`: "process", "memory" (that no process explains) or "unknown" (unreadable).

    `text` is for the log and /status; it names pids and numbers, so it isn't for clients.
    """

    kind: str
    text: str
    pid: int | None = None
    comm: str | None = None
    user: str | None = None
    bytes: int | None = None
    since: str | None = None


def unexplained_memory(reading: GpuReading, device: Device) -> int | None:
    """Memory of a device in use that no listed process explains; None when the device doesn't tell what is in use."""
    return _minus(device.used, _explained(reading, device))


def _explained(reading: GpuReading, device: Device) -> int:
    return sum(process.bytes or 0 for process in reading.on(device))


def gpu_owners(
    reading: GpuReading,
    ours: Collection[int] = (),
    *,
    ignore: Collection[str] = (),
    owner_min: int = 512 << 20,
    unexplained: str = "owner",
) -> list[Owner]:
    """Who holds the GPU besides the processes `ours`: the largest first, none when it is free.

    `ignore` names processes that never count, `owner_min` is how much a process, or memory without one, must hold to count,
    and unexplained="ignore" passes over memory without a process and over devices that can't tell.
    """
    if reading.problem:
        return [Owner("unknown", "the GPU could not be read: " + reading.problem)]
    owners = []
    for rows in _by_pid(reading).values():
        if rows[0].pid not in ours and not any(_is_named(row, ignore) for row in rows) and _counts(rows, owner_min):
            owners.append(_process_owner(reading, rows))
    owners.sort(key=lambda owner: -(owner.bytes or 0))
    if unexplained == "owner":
        owners.extend(owner for device in reading.devices for owner in _memory_owner(reading, device, ours, owner_min))
    return owners


def _by_pid(reading: GpuReading) -> dict[int, list[GpuProcess]]:
    found: dict[int, list[GpuProcess]] = {}
    for row in reading.processes:
        found.setdefault(row.pid, []).append(row)
    return found


def _is_named(row: GpuProcess, names: Collection[str]) -> bool:
    """The kernel cuts a comm after 15 bytes."""
    cut = len(row.comm.encode()) == 15
    return any(name in (row.comm, row.program) or (cut and name.startswith(row.comm)) for name in names)


def _total(rows: Iterable[GpuProcess]) -> int | None:
    held = [row.bytes for row in rows]
    return None if None in held else sum(each or 0 for each in held)


def _counts(rows: list[GpuProcess], owner_min: int) -> bool:
    """Whether a process holds enough to be an owner: unknown may be much, and only the driver ends a dead one."""
    held = _total(rows)
    return held is None or held >= owner_min or (held > 0 and not all(row.known for row in rows))


def _process_owner(reading: GpuReading, rows: list[GpuProcess]) -> Owner:
    first, held = rows[0], _total(rows)
    name = first.comm or first.program
    who = "%s pid %d" % (name, first.pid) if name else "pid %d" % first.pid
    if first.user:
        who += f" of {first.user}"
    if not first.known:
        who += ", which /proc doesn't know,"
    what = "uses GPU memory, unknown how much" if held is None else f"holds {size_text(held)} of GPU memory"
    if len(reading.devices) > 1:
        places = {row.device for row in rows}
        what += " ({})".format(", ".join("GPU %d" % device.index for device in reading.devices if device.key in places))
    since = timestamp(first.since)
    return Owner("process", printable(f"{who} {what}"), first.pid, name or None, first.user, held, since)


def _memory_owner(reading: GpuReading, device: Device, ours: Collection[int], owner_min: int) -> Iterator[Owner]:
    """Memory that nobody explains. Where somebody on the list may well be its holder, he is asked for it first: another's
    process of unknown size is an owner already, and with one of ours it will show when ours has stopped."""
    if any(row.bytes is None for row in reading.on(device)) or any(pid in ours for pid, _ in reading.unreadable):
        return
    hidden = _some_names(reading.unreadable)
    left = unexplained_memory(reading, device)
    if left is not None and left > owner_min:
        text = f"{size_text(left)} of GPU memory on {device.key} that no listed process explains"
        yield Owner("memory", printable(text + hidden), bytes=left)
    elif left is None and hidden and not (device.unified and device.total is None):
        # A processor's Intel GPU is the exception: it never tells, and its memory is the box's, where everybody sees it.
        yield Owner("unknown", printable(f"{device.key} doesn't tell how much of its memory is in use{hidden}"))


def _some_names(processes: Collection[tuple[int, str]]) -> str:
    if not processes:
        return ""
    names = ["%s pid %d" % (comm, pid) for pid, comm in list(processes)[:3]]
    more = " and %d more" % (len(processes) - 3) if len(processes) > 3 else ""
    return " (not allowed to look into {}{})".format(", ".join(names), more)


# ----- how much is free


def available_memory(box: Box) -> int | None:
    """MemAvailable of /proc/meminfo, in bytes: what the box itself can still give."""
    match = re.search(r"(?m)^MemAvailable:\s+([0-9]{1,18}) kB$", box.read("proc/meminfo") or "")
    return int(match.group(1)) * 1024 if match else None


def vram_free(reading: GpuReading, available: int | None) -> int | None:
    """GPU memory that an engine could take now, over all its devices; None when it can't be told.

    On a unified device this is at most what the box itself has `available`, and less by what its processes hold beyond
    what its counter shows (with ROCm, the gtt counter of a processor's GPU stands still).
    """
    if reading.problem or not reading.devices:
        return None
    free = 0
    for device in cards_of(reading.devices):
        left = device.free
        if device.unified and left is not None:
            left = max(0, left - max(0, _explained(reading, device) - (device.used or 0)))
        if device.unified and available is not None:
            left = available if left is None else min(left, available)
        if left is None:
            return None
        free += left
    return free


def drained(reading: GpuReading, pids: Collection[int], rest: int = 1 << 30) -> bool | None:
    """Whether the memory of processes that ended has been given back; None when it can't be told.

    The driver lists none of `pids` any more, and where it tells the memory in use, no more than `rest` is unexplained.
    """
    if reading.problem:
        return None
    if any(process.pid in pids for process in reading.processes):
        return False
    return all((unexplained_memory(reading, device) or 0) <= rest for device in cards_of(reading.devices))


def gpu_bytes(reading: GpuReading, pids: Collection[int]) -> int | None:
    """GPU memory of some living processes; None when it can't be told, which a process that isn't listed may be, too."""
    if reading.problem:
        return None
    rows = [process for process in reading.processes if process.pid in pids]
    listed = {row.pid for row in rows}
    if any(pid in pids and pid not in listed for pid, _ in reading.unreadable):
        return None
    hidden = reading.compute_only or not all(device.listed for device in reading.devices)
    if not rows and (hidden or not drained(reading, ())):
        return None
    return _total(rows)


def card_used(reading: GpuReading, pids: Collection[int]) -> int | None:
    """Memory in use on the devices, less what processes other than `pids` hold: what those can hold at most."""
    cards = cards_of(reading.devices)
    if reading.problem or not cards or any(card.used is None for card in cards):
        return None
    others = sum(row.bytes or 0 for card in cards for row in reading.on(card) if row.pid not in pids)
    return max(0, sum(card.used or 0 for card in cards) - others)


# ----- the verdict: are an engine's weights on the GPU?

MAX_RSS = 8 << 30  # the seed's box: 0.9 to 1.3 GiB when all is well, 16 GiB fallen back
FRESH = 900.0  # a longer start isn't waited for; later the prompt cache (--cache-ram, 8 GiB) looks like weights
CONTEXT = 512 << 20  # what a GPU context takes without any weights
NO_CONTEXT = 64 << 20  # less than any takes


@dataclass(frozen=True)
class Evidence:
    """What is known of an engine's processes together, in bytes; None: it can't be read."""

    memory: Memory | None  # None: they are gone (a zombie, too)
    age: float  # of the youngest, in seconds
    gpu: int | None = None  # GPU memory that they hold: gpu_bytes()
    card_used: int | None = None  # the most that they can hold: card_used()
    model: int | None = None  # the weights, as a file
    unified: bool = False
    meant_for_cpu: str = ""  # the option that told it to use the CPU alone, or "no GPU"
    partly: str = ""  # the option that keeps a part of it, how much can't be told, off the GPU
    asleep: bool = False  # its weights are nowhere
    max_rss: int | None = None  # host memory that is normal for it; None: MAX_RSS, or less for a smaller model


@dataclass(frozen=True)
class Verdict:
    """`value` is gpu, cpu or unknown; `because` says which unknown: gone, meant, asleep, old, partial, unreadable, or
    "no sign" (of a fallback, nor of the GPU)."""

    value: str
    evidence: tuple[str, ...]
    because: str = ""


def evidence_of(box: Box, reading: GpuReading, processes: Iterable[Process], **more: Any) -> Evidence:
    """The Evidence on an engine by all its processes, a router's children among them. `more`: model (the weights in bytes, where
    no command line names a file), asleep, max_rss."""
    processes = list(processes)
    memories = [memory for memory in (box.memory(process.pid) for process in processes) if memory]
    total = Memory(*(sum(counts) for counts in zip(*((m.rss, m.anon, m.file, m.swap) for m in memories)))) if memories else None
    files, meant, partly = set(), "", ""
    for process in processes:
        words = told(box.argv(process.pid), box.environment(process.pid))
        parts = weights(box, process.pid, words.model)
        files.update(parts)
        meant = meant or words.cpu
        enough = words.layers is not None and parts and words.layers > (layers(box, parts[0][0]) or NEVER)
        partly = partly or ("" if enough else words.partly)
    if reading.vendor is None and not reading.problem:
        meant = "no GPU"
    sizes = sum(size for _, size in files)
    pids = {process.pid for process in processes}
    gpu, card = gpu_bytes(reading, pids), card_used(reading, pids)
    if any(device.asleep for device in reading.devices):  # next to nothing is then no evidence
        gpu, card = gpu or None, None
    return Evidence(
        total,
        min((box.age(process) for process in processes), default=0.0),
        gpu,
        card,
        unified=reading.unified,
        meant_for_cpu=meant,
        partly=partly,
        **{**more, "model": sizes or more.get("model")},
    )


@dataclass(frozen=True)
class Told:
    """What a llama-server was told of its weights. `cpu`, `partly`: the option that keeps all, or some, of what the GPU could
    hold off it; `layers`: how many go there, where -ngl says so."""

    model: str = ""
    cpu: str = ""
    partly: str = ""
    layers: int | None = None


_OFF = ("0", "false", "off", "disabled")
_TO_CPU: dict[str, Callable[[str], bool]] = {  # LLAMA_ARG_… -> does this value keep all off the GPU?
    "N_GPU_LAYERS": lambda value: value == "0",
    "DEVICE": lambda value: value.strip() == "none",
}
_PARTLY: dict[str, Callable[[str], bool]] = {  # … or some?
    "N_GPU_LAYERS": lambda value: value.isdecimal() and 0 < int(value) < 99,  # 99 is what people write for all
    "N_CPU_MOE": lambda value: value.isdecimal() and int(value) > 0,
    "CPU_MOE": lambda value: value not in _OFF,
    "OVERRIDE_TENSOR": lambda value: "=CPU" in value,
    "KV_OFFLOAD": lambda value: value in _OFF,
    "NO_KV_OFFLOAD": lambda value: True,
}
_OPTIONS = {  # llama-server --help
    "-m": "MODEL", "--model": "MODEL",
    "-ngl": "N_GPU_LAYERS", "--gpu-layers": "N_GPU_LAYERS", "--n-gpu-layers": "N_GPU_LAYERS",
    "-dev": "DEVICE", "--device": "DEVICE",
    "-ncmoe": "N_CPU_MOE", "--n-cpu-moe": "N_CPU_MOE", "-cmoe": "CPU_MOE", "--cpu-moe": "CPU_MOE",
    "-ot": "OVERRIDE_TENSOR", "--override-tensor": "OVERRIDE_TENSOR",
    "-nkvo": "NO_KV_OFFLOAD", "--no-kv-offload": "NO_KV_OFFLOAD",
}  # fmt: skip
_SWITCHES = ("CPU_MOE", "NO_KV_OFFLOAD")  # have no value


def told(argv: list[str], environment: dict[str, str]) -> Told:
    """What its command line says, and where that is silent the LLAMA_ARG_ variables."""
    variables = {key[10:]: (value, f"{key}={value}") for key, value in environment.items() if key.startswith("LLAMA_ARG_")}
    given: dict[str, tuple[str, str]] = {}
    words = iter(argv)
    for word in words:
        option, _, value = word.partition("=")
        key = _OPTIONS.get(option, "")
        if key in _SWITCHES:
            given[key] = "", option
        elif key:
            value = value or next(words, "")
            several = key == "OVERRIDE_TENSOR" and key in given  # each one holds
            given[key] = (f"{given[key][0]},{value}", given[key][1]) if several else (value, f"{option} {value}")
    given = {**variables, **given}

    def said(of: dict[str, Callable[[str], bool]]) -> str:
        return next((text for key, (value, text) in given.items() if key in of and of[key](value)), "")

    count = given.get("N_GPU_LAYERS", ("", ""))[0]
    return Told(given.get("MODEL", ("", ""))[0], said(_TO_CPU), said(_PARTLY), int(count) if count.isdecimal() else None)


def layers(box: Box, path: str) -> int | None:
    """How many layers the model in a GGUF file has, by `ARCHITECTURE.block_count` (a uint32) near its beginning."""
    try:
        with open(os.path.join(box.root, path), "rb") as file:
            found = re.search(rb"\.block_count\x04\x00\x00\x00(.{4})", file.read(PIECE), re.DOTALL)
    except OSError:
        return None
    return int.from_bytes(found[1], "little") if found else None


def weights(box: Box, pid: int, model: str) -> list[tuple[str, int]]:
    """(path below the root, bytes) of a model's file as a process names it, of all the parts of one that is split
    (NAME-00001-of-00003.gguf); none where they can't be seen (in a container)."""
    path = os.path.join(_link(os.path.join(box.root, f"proc/{pid}/cwd")) or "/", model).lstrip("/")
    split = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path)
    paths = [f"{split[1]}-{part:05d}-of-{split[2]}.gguf" for part in range(1, int(split[2]) + 1)] if split else [path]
    try:
        found = [(part, os.stat(os.path.join(box.root, part))) for part in paths] if model else []
    except OSError:
        return []
    return [(part, info.st_size) for part, info in found if stat.S_ISREG(info.st_mode)]


def verdict(facts: Evidence) -> Verdict:
    """Where an engine's weights are. The GPU memory of its processes counts first, then anonymous and swapped memory, then
    what is resident of mapped files together with the memory that the card has in use."""
    for judge in (_not_judged, _by_gpu_memory, _by_host_memory):
        found = judge(facts)
        if found:
            value, because, reason = found
            return Verdict(value, (*_figures(facts), reason), because)
    raise AssertionError("not reached")


def _figures(facts: Evidence) -> Iterator[str]:
    memory = facts.memory
    if memory:
        yield f"{age(facts.age)} old"
        yield "VmRSS is {}: {} anonymous, {} of files".format(*tuple(map(size_text, (memory.rss, memory.anon, memory.file))))
        if memory.swap:
            yield f"VmSwap is {size_text(memory.swap)}"
    counts = {"its GPU memory": facts.gpu, "the card's used memory": facts.card_used, "the model": facts.model}
    for name, count in counts.items():
        if count is not None:
            yield f"{name} is {size_text(count)}"


def _not_judged(facts: Evidence) -> tuple[str, str, str] | None:
    if not facts.memory:
        return "unknown", "gone", "the process is gone"
    if facts.asleep:
        return "unknown", "asleep", "it sleeps: its weights are nowhere"
    if facts.max_rss is not None and (facts.meant_for_cpu or facts.partly or not _on_gpu(facts)):
        limit = f"than its own limit of {size_text(facts.max_rss)}"  # somebody set it, and knows better than any rule
        if facts.memory.rss + facts.memory.swap <= facts.max_rss:
            return "unknown", "meant", f"no more is in the box's memory {limit}"
        if facts.age <= FRESH and (facts.meant_for_cpu or facts.partly):
            return "cpu", "", f"more is in the box's memory {limit}"
    if facts.meant_for_cpu:
        return "unknown", "meant", f"it is meant to be in the box's memory: {facts.meant_for_cpu}"
    if facts.partly and not _on_gpu(facts) and not (facts.gpu is not None and facts.gpu <= NO_CONTEXT and _in_memory(facts)):
        return "unknown", "meant", f"some of it is meant to be in the box's memory: {facts.partly}"
    return None


def _on_gpu(facts: Evidence) -> bool:
    return facts.gpu is not None and bool(facts.model) and facts.gpu >= 0.7 * (facts.model or 0)


def _in_memory(facts: Evidence) -> bool:
    """Are the weights in the box's memory? While it is fresh what is resident tells; later there is a prompt cache, which is
    private, so only much of that, or the mapped file itself, does."""
    memory, model = facts.memory or Memory(0, 0, 0, 0), facts.model
    private = memory.anon + memory.swap
    if not model:
        return facts.age <= FRESH and memory.rss + memory.swap > _normal(facts)
    if facts.age <= FRESH:
        return memory.rss + memory.swap >= 0.5 * model
    return memory.file >= 0.5 * model or private >= 0.9 * model


def _by_gpu_memory(facts: Evidence) -> tuple[str, str, str] | None:
    if facts.gpu is None or not facts.memory:
        return None
    if not facts.model:
        return _without_model(facts, facts.gpu, facts.memory)
    if _on_gpu(facts):
        return "gpu", "", "the GPU holds the weights"
    # On a unified device managed memory is nobody's GPU memory: only a process without any context is surely on the CPU.
    if facts.gpu > (0 if facts.unified else max(CONTEXT, 0.1 * facts.model)):
        return "unknown", "partial", "the GPU holds a part of the weights at most"
    if _in_memory(facts):
        return "cpu", "", "the weights are in the box's memory, not on the GPU"
    return "unknown", "no sign", "the weights are neither on the GPU nor in the box's memory"


def _without_model(facts: Evidence, gpu: int, memory: Memory) -> tuple[str, str, str]:
    limit, fresh = _normal(facts), facts.age <= FRESH
    if gpu >= 1 << 30 and not (fresh and memory.anon + memory.swap > limit):
        return "gpu", "", "the GPU holds much, and the box's memory no weights"
    if fresh and memory.rss + memory.swap > limit and gpu <= (0 if facts.unified else CONTEXT):
        return "cpu", "", f"more than {size_text(limit)} in the box's memory, and no weights on the GPU"
    if gpu > CONTEXT:
        return "unknown", "partial", "how much of the weights the GPU holds can't be told without the model's size"
    return "unknown", "no sign", "no weights on the GPU, and not many in the box's memory"


def _by_host_memory(facts: Evidence) -> tuple[str, str, str] | None:
    memory, limit, fresh = facts.memory or Memory(0, 0, 0, 0), _normal(facts), facts.age <= FRESH
    private = memory.anon + memory.swap
    above = f"more than {size_text(limit)}"
    if facts.model and facts.card_used is not None and facts.card_used >= 0.7 * facts.model:
        if fresh and private > limit and not facts.unified:
            return "unknown", "unreadable", f"the card is in use, yet {above} is anonymous memory: whose is the card's?"
        return "gpu", "", "the card's used memory holds the weights"
    if facts.unified:
        return "unknown", "unreadable", "on unified memory the box's figures don't tell"
    if not fresh:
        return "unknown", "old", f"not judged: after {age(FRESH)} the box's memory tells nothing any more"
    if private > limit:
        return "cpu", "", f"{above} is anonymous memory: the weights"
    empty = facts.card_used is not None and facts.card_used <= max(1 << 30, 0.1 * (facts.model or 0))
    if memory.rss + memory.swap <= limit:
        return "unknown", "no sign", "no sign of weights in the box's memory, and its GPU memory can't be read"
    if empty:
        return "cpu", "", f"{above} is resident, and the card holds next to nothing"
    return "unknown", "unreadable", f"{above} is resident, but of mapped files, which a healthy engine may have as well"


def _normal(facts: Evidence) -> int:
    """Host memory above which the weights are in it. A small model's weights would never reach the common limit."""
    if facts.max_rss is not None:
        return facts.max_rss
    return min(MAX_RSS, max(2 << 30, int(0.7 * facts.model))) if facts.model else MAX_RSS


# ----- the job queue
#
# A folder: waiting/ or queue/, running/, and runner.log with one event a line, `2026-10-25 16:57:34 gpu-wait 00-test.job
# pid=2530256 comm=llama-server` (queued, start, gpu-wait, done, failed). A runner logs a wait once per blocker, perhaps long ago
# and in a log rotated since; so the log is read backwards until the last event of every waiting job is known.

LOG_TAIL = 8 << 20  # bytes of each log that are read back, at most
LOG_FILES = 8  # the log and its rotated ones
JUNK = "\0 \t\r\n"  # copytruncate under a writing runner leaves NUL bytes
RUNNER_LINE = (
    r"(?P<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?)\s+(?P<event>[\w-]+)\s+(?P<job>\S+)"
    r"(?:.*?\bpid=(?P<pid>\d+))?(?:.*?\bcomm=(?P<comm>\S+))?"
)


@dataclass(frozen=True)
class QueueSettings:
    """Where a queue is, in the words of the configuration. Relative names are below `path`."""

    path: str
    running: str = "running"
    waiting: str = ""  # "" stands for waiting/ and queue/, whichever there is
    log: str = "runner.log"
    settle: float = 120.0  # seconds after a change of running/ in which the runner may start its next job
    pattern: str = RUNNER_LINE


@dataclass(frozen=True)
class Wait:
    """A queued job of which its runner said that it waits for the GPU. `since` as the runner wrote it."""

    job: str
    since: str
    pid: int | None = None
    comm: str | None = None


@dataclass(frozen=True)
class QueueReading:
    """One look at the queue. A `problem`: what it says could not be read, so the GPU may be the benchmark's."""

    jobs: tuple[str, ...] = ()  # in running/
    changed: float | None = None  # seconds since the epoch of the last change of running/
    waits: tuple[Wait, ...] = ()
    problem: str | None = None
    note: str | None = None  # what was left out, where that does no harm


def read_queue(box: Box, settings: QueueSettings) -> QueueReading:
    """Look at the queue's folders and, when jobs wait, at the runner's log."""
    root = os.path.join(box.root, os.path.expanduser(settings.path).lstrip("/"))
    running = os.path.join(root, os.path.expanduser(settings.running))
    try:
        jobs = _jobs_in(running)
        changed = os.stat(running).st_mtime
        usual = [name for name in ("waiting", "queue") if os.path.isdir(os.path.join(root, name))]
        folders = [settings.waiting] if settings.waiting else usual
        if not folders:
            raise FileNotFoundError(errno.ENOENT, "there is no waiting/ or queue/")
        waiting = {job for folder in folders for job in _jobs_in(os.path.join(root, os.path.expanduser(folder)))}
    except OSError as error:
        return QueueReading(problem=f"the job queue {settings.path} cannot be read: {error.strerror}")
    if not waiting:
        return QueueReading(tuple(jobs), changed)
    try:
        waits, note = _outstanding(os.path.join(root, os.path.expanduser(settings.log)), waiting, re.compile(settings.pattern))
    except OSError as error:
        problem = f"the log of job queue {settings.path} cannot be read: {error.strerror}"
        return QueueReading(tuple(jobs), changed, problem=problem)
    return QueueReading(tuple(jobs), changed, tuple(waits), note=note)


def queue_signs(box: Box, settings: QueueSettings) -> tuple[Any, ...]:
    """(inode, size, mtime) of the queue's folders and log: when none of them changed, neither did the queue."""
    root = os.path.join(box.root, os.path.expanduser(settings.path).lstrip("/"))
    signs: list[Any] = []
    for name in (settings.running, settings.waiting or "waiting", "queue", settings.log):
        try:
            found = os.stat(os.path.join(root, os.path.expanduser(name)))
            signs.append((found.st_ino, found.st_size, found.st_mtime_ns))
        except OSError:
            signs.append(None)
    return tuple(signs)


def _jobs_in(folder: str) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def _outstanding(log_path: str, waiting: set[str], pattern: re.Pattern[str]) -> tuple[list[Wait], str | None]:
    """The last word of the log on each waiting job: a gpu-wait is outstanding, a start, done or failed ended it. The order of
    the lines counts, not their clocks (DST, jumps)."""
    unknown, waits = set(waiting), []
    note: str | None = None
    for path in _logs(log_path):
        try:
            lines, cut = _last_lines(path)
        except (OSError, EOFError) as error:
            if path == log_path and not isinstance(error, FileNotFoundError):
                raise
            note = f"{os.path.basename(path)} cannot be read"
            continue
        for line in reversed(lines):
            match = pattern.match(line.strip(JUNK))
            if not match or match["job"] not in unknown or match["event"] == "gpu-unknown":
                continue
            unknown.discard(match["job"])
            if match["event"] == "gpu-wait":
                found = match.groupdict()
                pid = found.get("pid") or ""
                known = int(pid) if pid.isdecimal() and len(pid) < 10 else None
                waits.append(Wait(match["job"], found.get("time") or "", known, found.get("comm")))
            if not unknown:
                return sorted(waits, key=lambda wait: wait.job), note
        if cut:
            note = f"only the last {size_text(LOG_TAIL)} of {os.path.basename(path)} were read"
            break
    return sorted(waits, key=lambda wait: wait.job), note


def _logs(path: str) -> list[str]:
    """The log and its rotated ones (runner.log.1, runner.log-20261123, runner.log.2.gz), newest first."""
    folder, name = os.path.split(path)
    rotated = []
    for other in os.listdir(folder):
        if re.fullmatch(re.escape(name) + r"[.-][\w.-]+", other):
            try:
                rotated.append((-os.stat(os.path.join(folder, other)).st_mtime, other))
            except OSError:
                continue
    return [path, *(os.path.join(folder, other) for _, other in sorted(rotated))][:LOG_FILES]


def _last_lines(path: str) -> tuple[list[str], bool]:
    """The whole lines in the last LOG_TAIL bytes, and whether there was more. One that is still being written has no end."""
    if path.endswith(".gz"):
        data, cut = _unpacked_tail(path)
    else:
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            file.seek(max(0, length - LOG_TAIL))
            data, cut = file.read(LOG_TAIL), length > LOG_TAIL
    lines = data.decode("utf-8", "replace").split("\n")
    return lines[1 if cut else 0:-1], cut


def _unpacked_tail(path: str) -> tuple[bytes, bool]:
    import gzip
    import zlib

    data, length = b"", 0
    try:
        with gzip.open(path) as packed:
            while length < 32 * LOG_TAIL:
                piece = packed.read(LOG_TAIL)
                if not piece:
                    return data, length > LOG_TAIL
                data, length = (data + piece)[-LOG_TAIL:], length + len(piece)
    except zlib.error as error:
        raise OSError(errno.EIO, f"damaged: {error}") from None
    raise OSError(errno.EFBIG, "it unpacks to too much")


def queue_owners(reading: QueueReading, settings: QueueSettings, now: float) -> list[Owner]:
    """Why the benchmark holds the GPU: a job runs, one ran a moment ago, one waits, or nobody can tell."""
    folder = os.path.join(settings.path, settings.running)
    if reading.problem:
        return [Owner("unknown", printable(reading.problem))]
    since = timestamp(reading.changed)
    owners = [Owner("job", printable(f"bench job {job} is in {folder}"), since=since) for job in reading.jobs]
    quiet = now - (reading.changed or 0.0)
    if quiet < settings.settle:  # a change "in the future" counts as just now
        text = f"bench job queue {folder} changed {age(quiet)} ago (the runner may start its next job)"
        owners.append(Owner("settle", printable(text)))
    for wait in reading.waits:
        owners.append(Owner("wait", printable(f"bench job {wait.job} waits for the GPU since {wait.since}")))
    return owners


# ======================================================================================================================
# 6  Engines
# ======================================================================================================================
# Acts on the box: starts and stops model servers, and proves that a stopped one is gone. A systemd unit is started and
# stopped through systemd, which also cancels its Restart=; a plain command runs in a session of its own, so that it
# outlives whoever started it and is found again.

STOP_LOOKS = 11  # one second apart: a GPU process that survives that is an error
TERM_GRACE = 10.0  # seconds between SIGTERM and SIGKILL for a plain command
RUNNING = "running"
LEFT_OVER = "left over"  # the state of an engine whose main process ended and left others behind, which may hold the GPU


@dataclass
class Engine:
    """A model server that this box can run. `key` is unique on the box: HOST.NAME."""

    name: str
    key: str
    port: int
    box: Box
    clock: Clock
    tool: Run = run_tool

    noun = "an engine"

    def processes(self) -> list[Process]:
        """Everything of it that lives: its children, leftovers, and what runs in the container that it started."""
        own = self._own_processes()
        tool, name = self._container(own)
        known = {process.pid for process in own}
        inside = container_processes(self.box, self.tool, tool, self.port, name) if tool else []
        return own + [process for process in inside if process.pid not in known]

    def _own_processes(self) -> list[Process]:
        raise AssertionError("each kind of engine tells its own")

    def _container(self, own: list[Process]) -> tuple[str, str]:
        """("docker" or "podman", the container's name if it was given one) of an engine that is started in a container. It
        outlives the client that started it: then only the open port is left to tell."""
        clients = [process for process in own if process.comm in ("docker", "podman")]
        if clients:
            return clients[0].comm, container_name(self.box.argv(clients[0].pid))
        if own or not self.box.listeners(self.port):
            return "", ""
        words = self._start_words()
        tool = next((tool for tool in ("docker", "podman") if any(os.path.basename(word) == tool for word in words)), "")
        return tool, container_name(words)

    def _start_words(self) -> list[str]:
        """The words of the command by which it is started."""
        raise AssertionError("each kind of engine starts in its own way")

    def start(self) -> None:
        raise AssertionError("each kind of engine starts in its own way")

    def stop(self) -> None:
        raise AssertionError("each kind of engine stops in its own way")

    def log_tail(self, lines: int = 10) -> list[str]:
        raise AssertionError("each kind of engine keeps its log in its own place")

    def warnings(self) -> list[str]:
        """What about it is not as it should be, before anybody asks for it."""
        return []

    @property
    def comes_back(self) -> str:
        """What may start it again after a stop, beside us; "" when nothing is known to."""
        return ""

    @property
    def is_back(self) -> bool:
        """Was it started again since its stop returned?"""
        return False

    @property
    def state(self) -> str:
        """'off' or RUNNING; a unit tells more."""
        return RUNNING if self.processes() else "off"

    def look(self) -> tuple[str, int]:
        """Its state, and how often it was started again by itself since somebody started it."""
        return self.state, 0

    def remains(self) -> str | None:
        """What is still there after a stop, as a sentence; None when all of it is gone."""
        for process in self.processes():
            return f"{process.comm} pid {process.pid} of {self.noun} still runs after the stop"
        if self.box.listeners(self.port):
            return "port %d of engine %s is still open after the stop" % (self.port, self.name)
        return None


@dataclass
class CommandEngine(Engine):
    """A plain command, supervised by nobody but us: a file tells its pid and start time, a log keeps what it prints."""

    command: tuple[str, ...] = ()
    folder: str = ""

    @property
    def _record(self) -> StateFile:
        return StateFile(os.path.join(self.folder, "engines"), self.key + ".json", self.clock)

    @property
    def _log_path(self) -> str:
        return os.path.join(self.folder, "engines", self.key + ".log")

    def _start_words(self) -> list[str]:
        return list(self.command)

    def _own_processes(self) -> list[Process]:
        """Its leader and all that share its session; the session of a leader that died is still its session, unless the
        pid was given to somebody else since."""
        record = self._record.load()
        pid, start = record.get("pid"), record.get("start")
        if not isinstance(pid, int) or not isinstance(start, int):
            return []
        leader = self.box.process(pid)
        if leader and leader.start != start or record.get("boot") != self.box.boot():
            return []
        return self.box.session(pid)

    @property
    def state(self) -> str:
        """A leader that died while its children live (a model server's workers) serves nobody, and may hold the GPU."""
        processes = self.processes()
        if not processes:
            return "off"
        leads = any(process.pid == process.session for process in processes)
        return RUNNING if leads or self.box.listeners(self.port) else LEFT_OVER

    def start(self) -> None:
        """AgentError when the program cannot be run at all; whether it then serves is not known here."""
        import subprocess

        argv = [word.replace("{port}", str(self.port)) for word in self.command]
        argv[0] = os.path.expanduser(argv[0])
        os.makedirs(os.path.dirname(self._log_path), mode=0o700, exist_ok=True)
        if os.path.exists(self._log_path):
            os.replace(self._log_path, self._log_path + ".1")
        ours = ("NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID")
        env = {name: value for name, value in os.environ.items() if name not in ours}
        silent = subprocess.DEVNULL
        with open(self._log_path, "ab") as output:
            try:
                subprocess.Popen(
                    argv, stdin=silent, stdout=output, stderr=output, start_new_session=True, env=env,
                    preexec_fn=lambda: self._sign(argv),  # whoever starts engines has a single thread
                )
            except subprocess.SubprocessError:
                text = f"the engine was not started: {self._record.path} cannot be written, so it could not be found again"
                raise AgentError(text) from None
            except OSError as error:
                self._record.remove()
                raise AgentError(f"{argv[0]} cannot be run: {error.strerror}") from None

    def _sign(self, argv: list[str]) -> None:
        """Write the record of this very process, which is about to become the engine. It does that itself: were it done by who
        starts it, and he killed before, it would run unknown to everybody, on a GPU that it never gives back."""
        process = self.box.process(os.getpid())
        started = timestamp(self.clock.now())
        record = {"pid": os.getpid(), "start": process.start if process else 0, "command": argv, "started": started}
        record["boot"] = self.box.boot()  # after a reboot a session of somebody else's may have this very number
        if not self._record.save(record):
            raise AgentError("an engine without a record is not started")

    def stop(self) -> None:
        """SIGTERM to its session, SIGKILL to what is left after TERM_GRACE."""
        import signal

        self._signal(signal.SIGTERM)
        patience = self.clock.monotonic() + TERM_GRACE
        while self.processes() and self.clock.monotonic() < patience:
            self.clock.sleep(0.1)
        self._signal(signal.SIGKILL)
        if not self.processes():
            self._record.remove()

    def warnings(self) -> list[str]:
        import shutil

        if not shutil.which(os.path.expanduser(self.command[0])):
            return [f"engine {self.name}: there is no program {self.command[0]} here"]
        by = restart_policy(self.command)
        return [f"engine {self.name}: docker starts it again by {by}, also onto a GPU that was given away"] if by else []

    def _signal(self, number: int) -> None:
        for process in self._own_processes():
            if self.box.same(process.pid, process.start):
                try:
                    os.kill(process.pid, number)
                except OSError:
                    pass  # it ended by itself, or is stuck: the looks afterwards tell

    def log_tail(self, lines: int = 10) -> list[str]:
        try:
            with open(self._log_path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 16384))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-lines:]


def container_name(argv: Iterable[str]) -> str:
    """The name that a `docker run` gives its container; "" where it gives none."""
    found = re.search(r" --name[= ](\S+)", " ".join(argv))
    return found[1] if found else ""


def restart_policy(argv: Iterable[str]) -> str:
    """The option of a `docker run` or `podman run` that has the container started again after it ended or the machine
    started; "" where there is none."""
    found = re.search(r"--restart[= ](always|unless-stopped)\b", " ".join(argv))
    return found[0] if found else ""


def unit_of(cgroup: str, uid: int) -> tuple[str, str] | None:
    """The unit that a cgroup path belongs to: ("system", unit) or, of that user's own manager, ("user", unit); else None.

    Whole components are compared: another user's unit of the same name lies below another user@UID.service.
    """
    parts = [part for part in cgroup.split("/") if part]
    scope = "system"
    if parts[:1] == ["user.slice"]:
        if parts[1:3] != ["user-%d.slice" % uid, "user@%d.service" % uid]:
            return None
        scope, parts = "user", parts[3:]
    for part in parts:
        if not part.endswith(".slice"):
            return scope, part
    return None


@dataclass
class UnitEngine(Engine):
    """A systemd service, of this user or of the system."""

    unit: str = ""
    scope: str = "user"
    sudo: bool = False
    run: Callable[..., Finished] = run

    noun = "an engine unit"
    TIMEOUT = 300.0  # a stop may take three times TimeoutStopSec, 90 s each by default

    def _start_words(self) -> list[str]:
        return self.show().get("ExecStart", "").split()

    def _own_processes(self) -> list[Process]:
        """Whatever sits in the unit's cgroup, also when systemd calls the unit failed or does not list it."""
        found = []
        uid = os.getuid()
        for pid in self.box.pids():
            cgroup = self.box.cgroup(pid)
            if cgroup and unit_of(cgroup, uid) == (self.scope, self.unit):
                process = self.box.process(pid)
                if process and not process.ended:
                    found.append(process)
        return found

    def show(self) -> dict[str, str]:
        """systemctl show: LoadState, ActiveState, SubState, NRestarts, Result, Restart, TriggeredBy, ExecStart."""
        names = "LoadState,ActiveState,SubState,NRestarts,Result,Restart,TriggeredBy,ExecStart"
        done = self._systemctl("show", "-p", names, self.unit, seconds=20.0)
        return dict(line.split("=", 1) for line in done.out.decode("utf-8", "replace").splitlines() if "=" in line)

    @property
    def state(self) -> str:
        return self.look()[0]

    def look(self) -> tuple[str, int]:
        """A unit that is about to be restarted counts as running: it takes the GPU in a moment. One that does not exist is off,
        and no reason to know nothing of the others."""
        show = self.show()
        active, restarts = show.get("ActiveState", "unknown"), show.get("NRestarts", "")
        count = int(restarts) if restarts.isdigit() else 0
        if self.processes():
            return LEFT_OVER if active in ("failed", "inactive") else RUNNING, count
        if active == "activating":
            return "restarting" if count else "starting", count
        return "stopping" if active == "deactivating" else "off", count

    def warnings(self) -> list[str]:
        """What is started again by itself comes back onto a GPU that was given away. AgentError when there is no such unit."""
        show = self.show()
        if show.get("LoadState") == "not-found":
            raise AgentError(f"there is no {self.scope} unit {self.unit} on this box")
        by = ", ".join(filter(None, (self._restarters(show), restart_policy(show.get("ExecStart", "").split()))))
        bites = f"{self.unit} is started again by {by}: it may come back onto a GPU that was given away"
        return [f"engine {self.name}: {bites}"] if by else []

    @property
    def comes_back(self) -> str:
        return self._restarters(self.show())

    @staticmethod
    def _restarters(show: dict[str, str]) -> str:
        restart = show.get("Restart", "no")
        by = [] if restart in ("no", "on-failure", "") else ["Restart=" + restart]
        return ", ".join(by + show.get("TriggeredBy", "").split())

    @property
    def is_back(self) -> bool:
        """`systemctl stop` returns when the unit is down."""
        return self.show().get("ActiveState") in ("active", "activating")

    def start(self) -> None:
        self._systemctl("reset-failed", self.unit, seconds=20.0, check=False)
        self._systemctl("start", self.unit, seconds=self.TIMEOUT)

    def stop(self) -> None:
        self._systemctl("stop", self.unit, seconds=self.TIMEOUT)

    def log_tail(self, lines: int = 10) -> list[str]:
        scope = ["--user"] if self.scope == "user" else []
        argv = ["journalctl", *scope, "-u", self.unit, "-n", str(lines), "-o", "cat", "--no-pager"]
        try:
            return self.run(argv, 10.0, env=self._environment()).out.decode("utf-8", "replace").splitlines()[-lines:]
        except OSError:
            return []

    def remains(self) -> str | None:
        if self.state != "off" and not self.processes():
            return f"unit {self.unit} is {self.state} after the stop"
        return super().remains()

    def _systemctl(self, verb: str, *words: str, seconds: float, check: bool = True) -> Finished:
        """systemctl, never asking anybody for a password. AgentError with what systemd says when it refuses."""
        sudo = ["sudo", "-n"] if self.sudo and self.scope == "system" and verb in ("start", "stop", "reset-failed") else []
        argv = [*sudo, "systemctl", "--" + self.scope, "--no-ask-password", verb, *words]
        try:
            done = self.run(argv, seconds, env=self._environment())
        except OSError as error:
            raise AgentError(f"{argv[0]} cannot be run: {error.strerror}") from None
        if done.code is None:
            raise AgentError(f"systemctl {verb} {self.unit} did not end within {age(seconds)}")
        if check and done.code:
            said = next(iter((done.err or done.out).decode("utf-8", "replace").strip().splitlines()), "") or done.complaint
            raise AgentError(f"systemctl {verb} {self.unit}: {printable(said)}{self._advice(done)}")
        return done

    def _advice(self, done: Finished) -> str:
        text = (done.err + done.out).decode("utf-8", "replace")
        if "Failed to connect to" in text or "XDG_RUNTIME_DIR" in text:
            return " (user services run without a login only after `loginctl enable-linger`)"
        if re.search("authentication required|Access denied|a password is required", text):
            return f" (allow it by a polkit rule or, with sudo = true, a sudoers line for `systemctl start|stop {self.unit}`)"
        return ""

    def _environment(self) -> dict[str, str]:
        """A command over ssh often lacks XDG_RUNTIME_DIR, and systemctl --user then finds no bus."""
        env = dict(os.environ)
        runtime = "/run/user/%d" % os.getuid()
        if self.scope == "user" and "XDG_RUNTIME_DIR" not in env and os.path.isdir(runtime):
            env["XDG_RUNTIME_DIR"] = runtime
        return env


def prove_stopped(engines: Iterable[Engine], before: Iterable[Process], box: Box, clock: Clock) -> None:
    """Look until nothing is left of these engines, nor of the processes that they had `before` the stop (one may have left
    its cgroup), at most STOP_LOOKS times; AgentError names what survived.

    One that something may start again (Restart=always, a timer, a path) must still be gone one look later.
    """
    engines, before = list(engines), list(before)
    gone = 0
    for look in range(STOP_LOOKS + 1):
        if look == STOP_LOOKS and not gone:
            break
        if look:
            clock.sleep(1.0)
        left = next(filter(None, (engine.remains() for engine in engines)), None) or _survivor(before, box)
        if left is None:
            gone += 1
            if gone > any(engine.comes_back for engine in engines):
                return
        elif gone or any(engine.is_back for engine in engines):
            known = ", ".join(filter(None, (engine.comes_back for engine in engines)))
            raise AgentError(f"{left}: something started it again" + (f" ({known})" if known else ""))
    raise AgentError(left or "")


def _survivor(before: Iterable[Process], box: Box) -> str | None:
    for process in before:
        if box.same(process.pid, process.start):
            return f"{process.comm} pid {process.pid} of an engine still runs after the stop"
    return None


# ----- what a running one can be asked

_AT_WORK = Pattern(  # llama.cpp's and vLLM's gauges
    r"(?m)^\w+[:_](?:num_)?requests_(?:processing|deferred|running|waiting)(?:\{.*\})? ([0-9.]+)"
)


class EngineApi:
    """What a running model server can be asked over HTTP, whichever server it is."""

    PATIENCE = 3.0

    def __init__(self, address: Address, key: str = "") -> None:
        self.address, self.key = address, key
        self.pool = Pool(address)

    def ask(self, method: str, path: str, body: Any = None, seconds: float = PATIENCE) -> Reply | None:
        """None when nobody answers."""
        try:
            return request(self.pool, method, path, body=body, key=self.key, seconds=seconds)
        except EngineLost as error:
            if not error.fields.get("refused"):  # a line that is cut says nothing about who works there
                raise DeadlinePassed("it cannot be reached") from None
            return None
        except (PeerGone, ProtocolError, BodyTooLarge, HeadTooLarge):
            return None

    def ready(self) -> bool:
        """Does it serve? 503 is llama-server loading; a server without /health (404) serves. A mute one may be busy."""
        try:
            reply = self.ask("GET", "/health")
        except (DeadlinePassed, OSError):  # OSError: no descriptor is left to ask with
            return False
        return reply is not None and reply.status not in (500, 502, 503, 504)

    def in_use(self, model: str | None = None) -> bool | None:
        """Does it work for anybody, us or others beside us? None: it does not tell. A server that sleeps is not woken by the
        question; one that gives no answer in time is busy (a long prefill), not idle. A router is asked for each model that it
        has loaded, or for `model` alone."""
        try:
            props = self.ask("GET", "/props")
            if props is None or props.status == 503:  # 503: llama-server loads, and serves nobody yet
                return False
            state = props.json() if props.status == 200 else None
            if not isinstance(state, dict):
                state = {}
            if state.get("is_sleeping") is True:
                return False
            if state.get("role") != "router":
                return self._works("")
            values = {entry["id"]: (entry.get("status") or {}).get("value") for entry in self.models() or ()}
            loaded = [name for name, value in values.items() if value == "loaded" and model in (None, name)]
            works = {self._works("?model=" + quote(name, "")) for name in loaded}
            return True if True in works else None if None in works else False
        except (DeadlinePassed, OSError):
            return True

    def _works(self, query: str) -> bool | None:
        """Is a slot at work, or a request in its metrics? None where it has neither."""
        slots = self.ask("GET", "/slots" + query)
        listed = slots.json() if slots and slots.status == 200 else None
        if isinstance(listed, list):
            return any(isinstance(slot, dict) and (slot.get("is_processing") or slot.get("state") == 1) for slot in listed)
        metrics = self.ask("GET", "/metrics" + query)
        counts = _AT_WORK.findall(metrics.body.decode("utf-8", "replace")) if metrics and metrics.status == 200 else ()
        return any(float(count) > 0 for count in counts) if counts else None

    def models(self) -> list[dict[str, Any]] | None:
        """data[] of /v1/models; None when it does not say."""
        try:
            reply = self.ask("GET", "/v1/models")
        except (DeadlinePassed, OSError):
            return None
        content = reply.json() if reply and reply.status == 200 else None
        data = content.get("data") if isinstance(content, dict) else None
        if not isinstance(data, list):
            return None
        return [entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)]

    def load(self, model: str) -> bool:
        """Ask a router (llama.cpp's) to load one of its models; False when this server is no router."""
        try:
            reply = self.ask("POST", "/models/load", {"model": model}, 30.0)
        except (DeadlinePassed, OSError):
            return False
        return reply is not None and reply.status in (200, 400)  # 400: it runs already

    def unload(self, model: str) -> bool:
        """Ask a router (llama.cpp's, llama-swap, Ollama) to unload one of its models; False when this server is none."""
        for path, body in (
            ("/models/unload", {"model": model}),
            ("/api/models/unload/" + quote(model), None),
            ("/api/generate", {"model": model, "keep_alive": 0}),
        ):
            reply = self.ask("POST", path, body, 60.0)
            if reply is not None and reply.status in (200, 400):
                return True
        return False


# ======================================================================================================================
# 7  Agent
# ======================================================================================================================
# Runs on the box: one JSON request on stdin, the banner line and one JSON reply on stdout. Whatever a login shell prints
# before the banner is skipped by the other side. The reply lists in `checked` every guard that was applied: one that was
# asked for and is not listed counts as an owner there, so an older copy of this file fails closed.

BANNER = "llmguard-agent 1"
MAX_REQUEST = 64 * 1024  # bytes
DRAIN_LOOKS = 60  # one second apart, until GPU memory is given back
SETTLE_LOOKS = 5  # the same where nothing of ours was stopped: who else holds it may do so for long
MAX_FILE = 4 << 20  # bytes of a copy of this file
REQUEST_PATIENCE = 5.0  # seconds
NO_REQUEST = "no request on stdin"
DAMAGED = "the file arrived damaged"
INSTALLED = ".local/share/llmguard/llmguard.py"  # below the home directory, where an ssh command starts
PORT_FRONTS = frozenset(  # they listen for a container's process
    "docker-proxy dockerd rootlesskit rootlessport pasta conmon slirp4netns".split()
)
LOCK_PATIENCE = 60.0  # seconds that one caller waits for another's op on the same box


@dataclass
class Agent:
    """Answers requests about this box."""

    folder: str
    box: Box = field(default_factory=Box)
    clock: Clock = field(default_factory=Clock)
    run: Run = run_tool
    api: Callable[[Address], EngineApi] = EngineApi

    def answer(self, ask: dict[str, Any]) -> dict[str, Any]:
        """One request -> one reply; what goes wrong becomes {"ok": false, "error": {"type", "text"}}."""
        ops = {"version": self.version, "status": self.status, "start": self.start, "stop": self.stop}
        reply: dict[str, Any] = {"ok": True, "agent": __version__, "sha256": own_hash()}
        try:
            op = ops.get(str(ask.get("op")))
            if op is None:
                raise BadRequest("unknown op {!r}: one of {} is due".format(ask.get("op"), ", ".join(ops)))
            reply.update(op(ask))
        except GuardError as error:
            reply.update(ok=False, error={"type": type(error).__name__, "text": str(error)})
            reply.update(error.fields.get("reply", {}))
        except OSError as error:  # a state folder that cannot be written, a descriptor too few
            reply.update(ok=False, error={"type": "AgentError", "text": f"on the box: {error}"})
        return reply

    def version(self, ask: dict[str, Any]) -> dict[str, Any]:
        """What the box is like, and what about its engines will bite one day."""
        warnings = [warning for engine in self._engines(ask).values() for warning in engine.warnings()]
        return {"python": "%d.%d.%d" % sys.version_info[:3], "time": self.clock.now(), "warnings": warnings}

    def status(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Which engine of ours runs, and who else holds the GPU."""
        engines = self._engines(ask)
        running = [(engine, *engine.look(), engine.processes()) for engine in engines.values()]
        running = [entry for entry in running if entry[1] != "off"]
        ours = {process.pid for *_, processes in running for process in processes}
        reading, queue = self._gpus(ask), self.read_queue(ask)
        foreign, checked = self._owners(ask, reading, queue, ours)
        reply: dict[str, Any] = {"active": None, "state": "off", "foreign": foreign, "checked": checked}
        reply["bench_waits"] = [self._wait_view(wait, ours) for wait in queue.waits]
        reply["queue_checked"] = "job_queue" in checked
        if running:
            engine, state, restarts, processes = running[0]
            view = self._engine_view(engine, processes, reading, ask["engines"][engine.name])
            reply.update(active=engine.name, state=state, engine=view)
            reply["engine"]["restarts"] = restarts
            reply["others"] = [other.name for other, *_ in running[1:]]
        reply["gpu"] = self._gpu_view(reading)
        wanted = engines.get(str(ask.get("log")))
        if wanted:
            reply["log"] = wanted.log_tail()
        asked = engines.get(str(ask.get("in_use")))
        if asked:
            reply["in_use"] = self._in_use(asked, ask)
        return reply

    def _in_use(self, engine: Engine, ask: dict[str, Any]) -> bool:
        """Does it work for anybody? What it does not tell itself, its connections do; and what nobody can tell counts as yes."""
        api = self.api(Address(_ask_for(ask, "address", _text, "127.0.0.1"), engine.port))
        known = api.in_use()
        if known is None:
            api.pool.close()  # our own question is no use
            known = connections_at_work(self.box, self.run, engine.port) != 0
        return known

    def _wait_view(self, wait: Wait, ours: set[int]) -> dict[str, Any]:
        """A wait for /status. It is for somebody else's end when the blocker that it names lives and is not ours; a blocker
        that is dead, or ours under another pid, leaves the job waiting for us."""
        view = {key: value for key, value in wait.__dict__.items() if value is not None}
        blocker = self.box.process(wait.pid) if wait.pid is not None else None
        if blocker is not None and not blocker.ended and blocker.pid not in ours and wait.comm in (None, blocker.comm):
            view["foreign"] = True
        return view

    def _engine_view(
        self, engine: Engine, processes: list[Process], reading: GpuReading, entry: dict[str, Any]
    ) -> dict[str, Any]:
        """What is known of an engine that runs; `entry`: the request's words on it."""
        known = {"model": _ask_for(entry, "model_bytes", size, None), "max_rss": _ask_for(entry, "max_rss", size, None)}
        found = verdict(evidence_of(self.box, reading, processes, **known))
        pids = sorted(process.pid for process in processes)
        memories = [memory for memory in map(self.box.memory, pids) if memory]
        since = min(filter(None, (started(self.box, process) for process in processes)), default=None)
        return {
            "pids": pids,
            "since": timestamp(since),
            "rss": sum(memory.rss for memory in memories),
            "rss_anon": sum(memory.anon for memory in memories),
            "rss_file": sum(memory.file for memory in memories),
            "swap": sum(memory.swap for memory in memories),
            "gpu_bytes": gpu_bytes(reading, pids),
            **self._port(engine, processes),
            "verdict": found.value,
            "evidence": list(found.evidence),
        }

    @staticmethod
    def _gpu_view(reading: GpuReading) -> dict[str, Any]:
        devices = [
            {"index": device.index, "name": device.name, "total": device.total, "used": device.used, "unified": device.unified}
            for device in reading.devices
        ]
        return {"vendor": reading.vendor, "devices": devices, "problem": reading.problem}

    def _port(self, engine: Engine, processes: list[Process]) -> dict[str, Any]:
        """Who answers on an engine's port: 'ours', 'closed', 'stranger' with its name, or 'unknown' (a container's front,
        or a process that we may not look into)."""
        if not self.box.listeners(engine.port):
            return {"port": "closed"}
        at_port = self.box.listening(engine.port)
        ours = {process.pid for process in processes}
        if any(process.pid in ours for process in at_port):
            return {"port": "ours"}
        strangers = sorted({process.comm for process in at_port if process.comm not in PORT_FRONTS})
        return {"port": "stranger", "stranger": ", ".join(strangers)} if strangers else {"port": "unknown"}

    def start(self, ask: dict[str, Any]) -> dict[str, Any]:
        """All in one locked call, so that no gap lets another in: owners, or another engine of ours that works for somebody (a
        second proxy's)? -> refuse; stop every other engine of ours; prove; start."""
        engines = self._engines(ask)
        wanted = engines.get(str(ask.get("engine")))
        if wanted is None:
            raise BadRequest("engine {!r} is not among the engines of this request".format(ask.get("engine")))
        with self._lock("start", ask):
            ours = {process.pid for engine in engines.values() for process in engine.processes()}
            self._refuse_owners(ask, ours)
            state = wanted.state
            self._spare_users([engine for engine in engines.values() if engine is not wanted], ask)
            self._stop([engine for engine in engines.values() if engine is not wanted or state == LEFT_OVER])
            if state in ("off", LEFT_OVER):
                taken = self.box.listeners(wanted.port)
                if taken:
                    names = ", ".join(process.comm for process in self.box.listening(wanted.port)) or "somebody"
                    raise EngineFailed(f"port {wanted.port} is already taken by {names}")
                self._await_memory(ask, _ask_for(_dict(ask, "engines")[wanted.name], "vram", size, None), ours)
                self._refuse_owners(ask, ours)  # a job may have taken what another engine of ours gave back
                wanted.start()
            return self.status(ask)

    def _refuse_owners(self, ask: dict[str, Any], ours: set[int]) -> None:
        foreign, checked = self._owners(ask, self._gpus(ask), self.read_queue(ask), ours)
        if foreign:
            first = foreign[0]
            since = f" since {first['since']}" if "since" in first else ""
            raise GpuBusy(first["text"] + since, reply={"foreign": foreign, "checked": checked})

    def _await_memory(self, ask: dict[str, Any], vram: int | None, stopped: set[int]) -> None:
        """Until what was stopped has given its GPU memory back, `vram` bytes are free, and the reading stands still: an engine
        that starts into memory that still drains falls back to the CPU, silently and for good."""
        ignored = ask.get("unexplained") == "ignore"
        rest = sys.maxsize if ignored else max(1 << 30, _ask_for(ask, "owner_min", size, 0))
        before: GpuReading | None = None
        for look in range(DRAIN_LOOKS if stopped else SETTLE_LOOKS):
            if look:
                self.clock.sleep(1.0)
            reading = self._gpus(ask)
            if (reading.vendor is None and not reading.problem) or not (stopped or vram):
                return
            free = vram_free(reading, available_memory(self.box))
            enough = vram is None or free is None or free >= vram
            still = before is not None and [d.used for d in reading.devices] == [d.used for d in before.devices]
            if enough and drained(reading, stopped, rest) and (still or not stopped):
                return
            before = reading
        if vram is not None and not enough:
            raise GpuBusy(f"only {size_text(free or 0)} of GPU memory is free, {size_text(vram)} is wanted")
        raise GpuBusy(f"the memory of a stopped engine is not given back after {age(DRAIN_LOOKS)}")

    def stop(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Stop every running engine of ours, and prove that it is gone. With `spare` none that works for somebody: whoever asked
        may have been killed since, and his successor have let others in."""
        engines = self._engines(ask).values()
        with self._lock("stop", ask):
            if ask.get("spare"):
                self._spare_users(engines, ask)
            self._stop(engines)
            return self.status(ask)

    def _spare_users(self, engines: Iterable[Engine], ask: dict[str, Any]) -> None:
        for engine in engines:
            if engine.state == RUNNING and self._in_use(engine, ask):
                raise GpuBusy(f"engine {engine.name} works for somebody, or does not answer", reply={"in_use": engine.name})

    def _stop(self, engines: Iterable[Engine]) -> None:
        """Stop those that run, or of which something is left (a unit that failed with a stuck process), and prove it."""
        engines = list(engines)
        before = [process for engine in engines for process in engine.processes()]
        running = [engine for engine in engines if engine.state != "off"]
        for engine in running:
            engine.stop()
        prove_stopped(running, before, self.box, self.clock)

    def _lock(self, op: str, ask: dict[str, Any]) -> Lock:
        """One op at a time on the box, whoever asks; a second caller waits for as long as it says."""
        lock = Lock(os.path.join(self.folder, "agent.lock"), f"agent: {op}", self.clock)
        try:
            lock.acquire(_ask_for(ask, "patience", duration, LOCK_PATIENCE))
        except AlreadyHeld as held:
            raise GpuBusy(f"the agent is busy: {held.fields['holder']}") from None
        return lock

    def _engines(self, ask: dict[str, Any]) -> dict[str, Engine]:
        engines = {}
        for name, entry in _dict(ask, "engines").items():
            if not _NAME.fullmatch(name) or not isinstance(entry, dict):
                raise BadRequest("engines: a table of tables is due")
            engines[name] = self._engine(name, entry, ask)
        return engines

    def _engine(self, name: str, entry: dict[str, Any], ask: dict[str, Any]) -> Engine:
        host = ask.get("host", "host")
        if not isinstance(host, str) or not _NAME.fullmatch(host):
            raise BadRequest("host: a name is due")
        try:
            port = _port(entry.get("port"))
            common = (name, f"{host}.{name}", port, self.box, self.clock, self.run)
            if "command" in entry:
                return CommandEngine(*common, command=_command(entry["command"]), folder=self.folder)
            scope = _one_of("user", "system")(entry.get("scope", "user"))
            return UnitEngine(*common, unit=_unit(entry.get("unit")), scope=scope, sudo=bool(ask.get("sudo")))
        except ValueError as error:
            raise BadRequest(f"engines.{name}: {error}") from None

    def _gpus(self, ask: dict[str, Any]) -> GpuReading:
        return read_gpus(self.box, self.run, _ask_for(ask, "gpus", _gpus, None))

    def _owners(
        self, ask: dict[str, Any], reading: GpuReading, queue: QueueReading, ours: set[int]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Who else holds the GPU, and which guards were applied to find that out."""
        owners = gpu_owners(
            reading,
            ours,
            ignore=_ask_for(ask, "ignore", _texts, ()),
            owner_min=_ask_for(ask, "owner_min", size, 512 << 20),
            unexplained=_ask_for(ask, "unexplained", _one_of("owner", "ignore"), "owner"),
        )
        checked = ["gpu"]
        if ask.get("bench_port") is not None:
            owners += self._bench_owner(_ask_for(ask, "bench_port", _port, 0))
            checked.append("bench_port")
        settings = queue_settings(ask)
        if settings:
            owners += queue_owners(queue, settings, self.clock.now())
            checked.append("job_queue")
        if ask.get("owner_check") is not None:
            owners += self._command_owners(_ask_for(ask, "owner_check", _command, ()))
            checked.append("owner_check")
        return [{key: value for key, value in owner.__dict__.items() if value is not None} for owner in owners], checked

    def signs(self, ask: dict[str, Any]) -> tuple[Any, ...]:
        """By which a change of the queue is noticed without reading it: its folders' and its log's stat."""
        settings = queue_settings(ask)
        return queue_signs(self.box, settings) if settings else ()

    def settle(self, ask: dict[str, Any]) -> float:
        """Seconds after which a running/ that just changed may have settled; looked at again then."""
        settings = queue_settings(ask)
        if not settings:
            return NEVER
        return max(FOLLOW_PAUSE, settings.settle - (self.clock.now() - (read_queue(self.box, settings).changed or 0.0)))

    def read_queue(self, ask: dict[str, Any]) -> QueueReading:
        """The job queue of this request; an empty reading when it has none."""
        settings = queue_settings(ask)
        return read_queue(self.box, settings) if settings else QueueReading()

    def _command_owners(self, argv: tuple[str, ...]) -> Iterator[Owner]:
        """The owner command: each line that it prints is an owner; one that fails tells nothing, and that is unknown."""
        code, out, err = self.run(list(argv), 10.0)
        if code != 0:
            yield Owner("unknown", printable(f"owner_check {argv[0]} failed: {(err or out).strip()[:200] or code}"))
        for line in out.splitlines() if code == 0 else ():
            if line.strip():
                yield Owner("check", printable(line.strip()[:500]))

    def _bench_owner(self, port: int) -> Iterator[Owner]:
        """Whoever listens on the bench port; who that is can be seen only of our own processes, that he is there of all."""
        if self.box.listeners(port):
            found = self.box.listening(port)
            who = ", ".join(f"{process.comm} pid {process.pid}" for process in found) or "somebody"
            since = timestamp(min(filter(None, (started(self.box, process) for process in found)), default=None))
            yield Owner("bench_port", f"{who} listens on the bench port {port}", since=since)


def queue_settings(ask: dict[str, Any]) -> QueueSettings | None:
    table = _ask_for(ask, "job_queue", _queue, None)
    return QueueSettings(**table) if table else None


def _ask_for(table: Any, key: str, read: Callable[[Any], Any], default: Any) -> Any:
    """A value of a request, checked as the configuration checks its own; BadRequest."""
    if not isinstance(table, dict):
        raise BadRequest("a table is due")
    if table.get(key) is None:
        return default
    try:
        return read(table[key])
    except ValueError as error:
        raise BadRequest(f"{key}: {error}") from None


def _dict(table: dict[str, Any], key: str) -> dict[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise BadRequest(f"{key}: a table is due")
    return value


FOLLOW_PAUSE = 0.5  # seconds between two looks at the queue: a few calls of stat
HEARTBEAT = 10.0  # seconds between two signs of life


def follow(agent: Agent, ask: dict[str, Any], write: Callable[[dict[str, Any]], None], gone: Callable[[float], bool]) -> None:
    """`llmguard.py agent --follow`: a status whenever owners, waits or the active engine change, and a heartbeat.

    Between two looks only stat is called; the GPU is read when the queue or an engine's processes changed, or when a running/
    that was changed settles. `gone(seconds)` waits that long and tells whether the other side left.
    """
    seen: Any = None  # what the last look at the files saw
    told: Any = None  # what the last status said
    settles = beat = 0.0
    pids: list[int] = []
    while True:
        now = agent.clock.monotonic()
        signs = agent.signs(ask), [pid for pid in pids if agent.box.process(pid)]
        if signs != seen or 0 < settles <= now:
            reply = agent.answer({**ask, "op": "status"})
            pids = (reply.get("engine") or {}).get("pids", [])
            seen = signs[0], [pid for pid in pids if agent.box.process(pid)]
            settling = next((owner for owner in reply.get("foreign", ()) if owner["kind"] == "settle"), None)
            settles = now + agent.settle(ask) if settling else 0.0
            owners = reply.get("foreign", ())
            essence = [(owner["kind"], owner.get("pid"), owner["kind"] != "settle" and owner["text"]) for owner in owners]
            if (essence, reply.get("bench_waits"), reply.get("active"), reply["ok"]) != told:
                told = essence, reply.get("bench_waits"), reply.get("active"), reply["ok"]
                write(reply)
                beat = now
        if now - beat >= HEARTBEAT:
            write({"heartbeat": timestamp(agent.clock.now())})
            beat = now
        if gone(FOLLOW_PAUSE):
            return


def receive(data: bytes, wanted: str) -> dict[str, Any]:
    """Put a copy of this file where the agent is run from: temp name, checked, synced, renamed. Starts nothing.

    It is always run as `python3 FILE`, so a lost exec bit cannot matter; the mode is set all the same.
    """
    path = os.path.join(os.path.expanduser("~"), INSTALLED)
    found = digest(data)
    if found != wanted:
        raise AgentError(f"{DAMAGED}: its sha256 is {found[:12]}…, not {wanted[:12]}…")
    before = None
    try:
        with open(path, "rb") as file:
            before = digest(file.read())
    except OSError:
        pass
    temp = f"{path}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        StateFile.write(temp, data)
        os.chmod(temp, 0o755)
        os.replace(temp, path)
        sync_folder(os.path.dirname(path))
    except OSError as error:
        remove_file(temp)
        raise AgentError(f"{path} cannot be written: {error.strerror}") from None
    return {"path": path, "before": before, "sha256": wanted, "agent": __version__}


def receive_main(read: Callable[[], bytes]) -> int:
    """`llmguard.py agent --receive`: a line of JSON, {"sha256", "size"}, then the file itself."""
    reply: dict[str, Any] = {"ok": True}
    try:
        header, _, data = read().partition(b"\n")
        if not header:
            raise BadRequest(NO_REQUEST)
        try:
            sha256 = str(json.loads(header)["sha256"])
        except (ValueError, KeyError, TypeError):
            raise BadRequest("a line with the file's sha256 is due") from None
        reply.update(receive(data, sha256))
    except GuardError as error:
        reply = {"ok": False, "error": {"type": type(error).__name__, "text": str(error)}}
    _answer(reply)
    return 0


def read_stdin(seconds: float, limit: int, line: bool) -> bytes:
    """What comes on stdin until its end (or, with `line`, the end of a line), at most `limit` + 1 bytes and `seconds`."""
    deadline = time.monotonic() + seconds
    data = bytearray()
    while len(data) <= limit:
        ready, _, _ = select.select([0], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(0, PIECE) if ready else b""
        data += piece
        if not piece or (line and b"\n" in piece and _is_whole(data)):
            break
    return bytes(data)


def _is_whole(data: bytes | bytearray) -> bool:
    """Has all of a request come? It may stand on several lines."""
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def agent_main(folder: str, mode: str = "") -> int:
    """`llmguard.py agent`, `agent --follow`, `agent --receive`: exit code 0 when a reply was given, even one that says no;
    64 for no or a bad request. Never 255, which is ssh's own.

    Under a forced command in authorized_keys this is what runs, whatever was asked for: that stands in SSH_ORIGINAL_COMMAND.
    """
    asked = os.environ.get("SSH_ORIGINAL_COMMAND", "")
    mode = mode or next((mode for mode in ("follow", "receive") if asked.endswith("agent --" + mode)), "")
    if mode == "receive":
        return receive_main(lambda: read_stdin(60.0, MAX_FILE, line=False))
    data = read_stdin(REQUEST_PATIENCE, MAX_REQUEST, line=True)
    try:
        ask = parse_request(data)
        queue_settings(ask)
    except BadRequest as error:
        _answer({"ok": False, "agent": __version__, "error": {"type": "BadRequest", "text": str(error)}})
        return 64
    agent = Agent(folder)
    if mode == "follow":
        gc.enable()
        os.write(1, BANNER.encode() + b"\n")
        try:
            follow(agent, ask, lambda reply: _write_line(json.dumps(reply)), _stdin_ended)
        except OSError:
            pass  # nobody reads any more
    else:
        _answer(agent.answer(ask))
    return 0


def parse_request(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_REQUEST:
        raise BadRequest(f"the request is larger than {size_text(MAX_REQUEST)}")
    if not data.strip():
        raise BadRequest(NO_REQUEST)
    try:
        ask = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is no JSON: {error}") from None
    if not isinstance(ask, dict):
        raise BadRequest("the request is no JSON object")
    return ask


def _answer(reply: dict[str, Any]) -> None:
    _write_line(f"{BANNER}\n{json.dumps(reply)}")


def _write_line(text: str) -> None:
    data = memoryview(text.encode() + b"\n")
    while data:
        data = data[os.write(1, data):]


def _stdin_ended(seconds: float) -> bool:
    ready, _, _ = select.select([0], [], [], seconds)
    return bool(ready) and not os.read(0, PIECE)


# ======================================================================================================================
# 8  Remote
# ======================================================================================================================
# Runs the agent for a host and knows nothing of what the ops mean: over ssh, or on this machine as a child process, since the
# box's readers and nvidia-smi may hang in the kernel, and the proxy may not. The command line is constant and takes no
# quoting, so that any login shell reads it (sh, fish, tcsh, nushell); everything variable travels on stdin.

MAX_NOISE = 64 * 1024  # bytes that a login shell may print before the agent's answer
MAX_REPLY = 4 << 20  # bytes of that and the answer
TUNNEL_PATIENCE = 30.0  # seconds until tunnels are up
SSH_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "5",
    "ServerAliveInterval": "5",  # Debian sets 300 under BatchMode
    "ServerAliveCountMax": "2",
    "ControlMaster": "auto",
    "ControlPersist": "10m",
    "ClearAllForwardings": "yes",
}


def start_words(path: str) -> str:
    """The Python program, for `python3 -c`, that runs the copy of llmguard at that path. An imported file is compiled once; one
    that is run by its name each time, which takes more than all the rest. It has no character that any login shell minds
    between double quotes, and the folder takes the place of the current one in sys.path: no json.py that lies about there
    is ours. An agent's call is short: to collect the garbage that a start makes takes 2 ms, to take the interpreter apart at
    the end 6 ms, a fifth of it all. So the one is off (`main` turns it on again), and the other left out; a copy of another
    version may have printed what is not written yet."""
    folder, name = os.path.split(path)
    begin = f"import gc, os, sys; gc.disable(); sys.path[:1] = [{folder!r}]; import {name[:-3]} as copy"
    return begin + "; code = copy.main(); print(end='', flush=True); os._exit(code)"


def importable(path: str) -> bool:
    """Has it a module's name? Somebody may have given it another."""
    return re.fullmatch(r"[a-z_]+\.py", os.path.basename(path)) is not None


def interpreter() -> list[str]:
    """This very Python, with the options that it was started with."""
    import subprocess

    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]


class Remote:
    """The line to one host's agent."""

    def __init__(self, host: HostConfig, folder: str) -> None:
        self.host, self.folder = host, folder
        self.noise = 0  # bytes that the login shell printed before the last answer
        self._tunnels: Any = None
        self._tunnels_due = 0.0  # monotonic: when they have to be up
        self._following: Any = None

    def call(self, ask: dict[str, Any], seconds: float) -> dict[str, Any]:
        """One op. HostDown when the box cannot be reached, HostBlocked when it answers but somebody has to mend something,
        AgentError when the agent itself fails. A dead master connection is dropped and the call repeated once."""
        data = json.dumps(ask).encode() + b"\n"
        if self.host.ssh is None:
            return self._reply(self._run(self._agent_here(), seconds, data))
        had_master = self._has_master()
        try:
            return self._reply(self.ssh("agent", seconds, data))
        except HostDown:
            if not had_master:
                raise
            self.drop_master()
            return self._reply(self.ssh("agent", seconds, data))

    def follow(self, ask: dict[str, Any], told: Callable[[dict[str, Any]], None]) -> None:
        """Stay on the line: `told` gets each status that the agent sends. Returns when the line is lost: it ended, was silent
        for longer than its heartbeat allows, or `close` was called. Lines that are no JSON are noise."""
        import subprocess

        if self.host.ssh is None:
            argv = [*self._agent_here(), "--follow"]
        else:  # over a connection of its own: a dead master must not hold it up
            own = ["ControlPath=none" if word.startswith("ControlPath=") else word for word in self._ssh_argv()]
            argv = [*own, self._agent_there("agent --follow")]
        pipe = subprocess.PIPE
        try:
            line = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            log(f"host {self.host.name}: the line to its agent cannot be opened: {error.strerror}", WARN)
            return
        assert line.stdin and line.stdout
        self._following = line
        try:
            line.stdin.write(json.dumps(ask).encode() + b"\n")
            line.stdin.flush()
            self._read_lines(line.stdout.fileno(), told)
        except OSError:
            pass
        finally:
            _kill(line, "")
            try:
                line.stdin.close()  # flushes what the other side did not take
            except OSError:
                pass
            line.stdout.close()

    def _read_lines(self, stream: int, told: Callable[[dict[str, Any]], None]) -> None:
        pending = b""
        poller = select.poll()  # select() takes no descriptor above 1023
        poller.register(stream, select.POLLIN)
        lost = time.monotonic() + HEARTBEAT * 2.5
        while time.monotonic() < lost and poller.poll(_poll_time(lost)):
            piece = os.read(stream, PIECE)
            if not piece or len(pending) > MAX_FILE:
                return
            *lines, pending = (pending + piece).split(b"\n")
            for text in lines:
                try:
                    reply = json.loads(text)
                except (ValueError, RecursionError):
                    continue
                if isinstance(reply, dict):
                    lost = time.monotonic() + HEARTBEAT * 2.5
                    if "checked" in reply:
                        told(reply)

    def ssh(self, command: str, seconds: float, data: bytes) -> Finished:
        """Run a command of llmguard.py on the box; "-" runs the Python program in `data`."""
        there = f"{self.host.python} -" if command == "-" else self._agent_there(command)
        return self._run([*self._ssh_argv(), there], seconds, data)

    def _run(self, argv: list[str], seconds: float, data: bytes) -> Finished:
        try:
            return run(argv, seconds, data=data, limit=MAX_REPLY, whole=_has_reply)
        except OSError as error:
            if self.host.ssh is not None and isinstance(error, FileNotFoundError):
                told = f"host {self.host.name}: there is no ssh on this machine: install openssh-client"
                raise HostBlocked(problem=told) from None
            raise AgentError(f"the agent cannot be run: {error.strerror}") from None

    def _agent_here(self) -> list[str]:
        path = os.path.abspath(__file__)
        program = ("-S", "-E", "-s", "-c", start_words(path)) if importable(path) else ("-I", path)
        return [sys.executable, *program, "--state-dir", self.folder, "agent"]

    def _agent_there(self, command: str) -> str:
        return f'{self.host.python} -S -E -c "{start_words(INSTALLED)}" {command}'

    def _ssh_argv(self) -> list[str]:
        options = dict(SSH_OPTIONS, ControlPath=os.path.join(_socket_folder(), "%C"))
        words = [word for option in options.items() for word in ("-o", "=".join(option))]
        return ["ssh", "-T", *words, "--", self.host.ssh or ""]

    def install(self) -> dict[str, Any]:
        """Copy this very file to the box -> the reply of `receive`. An agent that is there takes it (also under a forced
        command); where there is none yet, the box's Python runs the new file from stdin, which then stores itself."""
        import base64

        with open(os.path.abspath(__file__), "rb") as file:
            data = file.read()
        sha256 = digest(data)
        header = json.dumps({"sha256": sha256, "size": len(data)}).encode() + b"\n"
        done = self.ssh("agent --receive", 60.0, header + data)
        reply, _ = read_reply(done.out)
        refused = reply is not None and (reply.get("error") or {}).get("type") == AgentError.__name__
        if reply is None or not (reply.get("sha256") == sha256 or refused):  # an older agent may say ok to whatever it is told
            program = _BOOTSTRAP.format(data=base64.b64encode(data).decode(), sha256=sha256, damaged=DAMAGED)
            done = self.ssh("-", 60.0, program.encode())
            if done.code == 0 and read_reply(done.out)[0] is None:
                raise self._swallowed()  # Python found no program on stdin
            reply = self._reply(done)
        if not reply.get("ok"):
            raise AgentError(str((reply.get("error") or {}).get("text", "the box did not take the file")))
        return reply

    def tunnel(self, port: int) -> str:
        """The local socket that leads to a port on the box's own loopback, once `open_tunnels` has been called."""
        return os.path.join(_socket_folder(), f"{self.host.name}-{port}")

    def open_tunnels(self, ports: Iterable[int]) -> None:
        """One ssh that forwards all these ports, unless it runs. It reads our pipe, so that it ends when we do. One that hangs
        before it forwards anything (ssh has no deadline for a login) makes room for another."""
        import subprocess

        ports = list(ports)
        sockets = [self.tunnel(port) for port in ports]
        if self._tunnels is not None and self._tunnels.poll() is None:
            if time.monotonic() < self._tunnels_due or all(map(os.path.exists, sockets)):
                return
            log(f"host {self.host.name}: its tunnels do not come up: trying again", WARN)
            self._tunnels.kill()
        for path in sockets:
            remove_file(path)  # what an ended one left behind is no sign of the next
        self._tunnels_due = time.monotonic() + TUNNEL_PATIENCE
        options = {**SSH_OPTIONS, "ExitOnForwardFailure": "yes", "StreamLocalBindUnlink": "yes", "ControlPath": "none"}
        del options["ClearAllForwardings"], options["ControlMaster"], options["ControlPersist"]
        words = [word for option in options.items() for word in ("-o", "=".join(option))]
        words += [word for port in ports for word in ("-L", f"{self.tunnel(port)}:127.0.0.1:{port}")]
        argv = ["ssh", "-T", *words, "--", self.host.ssh or "", "cat"]
        silent = subprocess.DEVNULL
        try:
            self._tunnels = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=silent, stderr=silent)
        except OSError as error:
            raise HostBlocked(problem=f"host {self.host.name}: ssh cannot be run: {error.strerror}") from None

    def close(self) -> None:
        """Let go of the box: the tunnels and the line to it end, what runs there runs on."""
        self.hang_up()
        if self._tunnels is not None:
            self._tunnels.terminate()

    def hang_up(self) -> None:
        """End the follow line."""
        if self._following is not None:
            self._following.terminate()

    def _has_master(self) -> bool:
        try:
            return any(name for name in os.listdir(_socket_folder()) if len(name) == 40)
        except OSError:  # no descriptor is left
            return False

    def drop_master(self) -> None:
        """Over a dead master every call hangs, whatever ConnectTimeout says."""
        argv = self._ssh_argv()
        try:
            run([*argv[:1], "-O", "exit", *argv[2:]], 3.0)
        except OSError:
            pass

    def _reply(self, done: Finished) -> dict[str, Any]:
        reply, self.noise = read_reply(done.out)
        if reply is not None:
            if self.noise:
                log.debug(f"host {self.host.name}: a login shell printed {self.noise} bytes before the agent's answer")
            if (reply.get("error") or {}).get("text") == NO_REQUEST:
                raise self._swallowed()
            return reply
        raise self._failure(done, self.noise)

    def _swallowed(self) -> HostBlocked:
        """What was sent did not arrive: a `read` or `cat` in a start file took it."""
        who = "a start file of the login shell (~/.bashrc)"
        text = f"what is sent to its agent is read by {who}: have it leave where there is no terminal"
        return HostBlocked(problem=f"host {self.host.name}: {text}")

    def _failure(self, done: Finished, noise: int) -> GuardError:
        """Why there was no reply, in words that say what to do."""
        name = self.host.name
        errors = done.err.decode("utf-8", "replace")
        what = printable(done.complaint)
        if self.host.ssh is None:
            return AgentError(f"the agent {done.problem}" if done.code is None else f"the agent gave no reply: {what}")
        said_by_ssh = done.code in (None, 255)  # then it was no shell over there that said "not found"
        for pattern, advice in _SSH_TROUBLES[:-1] if said_by_ssh else _SSH_TROUBLES:
            if re.search(pattern, errors):
                told = advice.format(ssh=self.host.ssh, host=name, python=self.host.python)
                return HostBlocked(problem=f"host {name}: {told}")
        if done.code is None and len(done.out) + len(done.err) < MAX_REPLY:
            return HostDown(f"host {name} is down: no answer over ssh in time")
        if done.code == 255:
            if "Could not resolve hostname" in errors:
                what = f"no machine of that name is known here: correct ssh = … or ~/.ssh/config ({what})"
            return HostDown(f"host {name} is down: {what}")
        if noise > MAX_NOISE:
            begins = printable(done.out[:200].decode("utf-8", "replace"))
            log(f"host {name}: what its login shell prints begins with: {begins}", WARN)
            return HostBlocked(problem=f"host {name}: the login shell prints more than 64 KiB before the agent's answer")
        return AgentError(f"the agent on host {name} gave no reply: {done.problem or what}")


_BOOTSTRAP = """\
import base64, hashlib, sys, types
data = base64.b64decode("{data}")
if hashlib.sha256(data).hexdigest() != "{sha256}":
    sys.exit("{damaged}")
sys.modules["llmguard"] = module = types.ModuleType("llmguard")
module.__file__ = "llmguard.py"
exec(compile(data, "llmguard.py", "exec"), module.__dict__)
sys.exit(module.receive_main(lambda: b'{{"sha256": "{sha256}"}}\\n' + data))
"""

_SSH_TROUBLES = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key verification failed",
     "its host key is not the known one: when that is right, `ssh-keygen -R` it and log in once by hand (ssh {ssh})"),
    (r"Permission denied|Too many authentication failures",
     "ssh is refused: put this machine's key into authorized_keys of {ssh}"),
    (r"can't open file|No such file or directory: '.*llmguard\.py'|No module named .?llmguard",
     "the agent is not installed on {host}: run `llmguard.py engine install {host}`"),
    (r"needs Python 3\.9|future feature annotations is not defined|SyntaxError: invalid syntax",
     "{python} on it is too old: name a Python 3.9 or later (python = …)"),
    (r"(?i)not found|unknown command|no such file", "there is no {python} on it: install one, or name it (python = …)"),
)


def _socket_folder() -> str:
    """A private folder for ssh's control sockets, short, since a socket's path ends at 108 bytes. Without a runtime folder it
    lies right in /tmp, whose sticky bit keeps others from renaming it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = os.path.join(runtime, "llmguard-ssh") if runtime else f"/tmp/llmguard-ssh-{os.getuid()}"
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.lstat(folder)  # a link shows as open to all
    except OSError as error:
        raise HostBlocked(problem=f"{folder} cannot be used for ssh's control sockets: {error.strerror}") from None
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise HostBlocked(problem=f"{folder} is open to others: ssh's control sockets cannot be kept there")
    return folder


def read_reply(output: bytes) -> tuple[dict[str, Any] | None, int]:
    """(the agent's reply, bytes of noise before it). The reply is the line after the banner, which is the last thing on a line
    of its own, whatever control codes stand before it; (None, all of it) when there is none."""
    for match in re.finditer(re.escape(BANNER.encode()) + rb"\r?\n([^\n]+)", output):
        try:
            reply = json.loads(match.group(1))
        except (ValueError, RecursionError):
            continue
        if isinstance(reply, dict) and match.start() <= MAX_NOISE:
            return reply, match.start()
    return None, len(output)


def _has_reply(output: bytes) -> bool:
    return output[-1:] == b"\n" and read_reply(output)[0] is not None


# ======================================================================================================================
# 9  Host
# ======================================================================================================================
# The state machine of one GPU. One lock guards all its state, one thread does all its slow work outside that lock. What
# should happen next is decided by `plan`, a pure function of the situation; `Host` carries it out.

IN_USE_PAUSE = 1.0  # seconds between two questions whether an engine is still in use: asking more often delays its cancels
BACKOFF_FIRST, BACKOFF_LAST = 10.0, 300.0  # seconds after failed starts
WAKE_PAUSE = 5.0  # seconds between two looks at a box that is being woken
CRASH_LOOP, CRASH_WINDOW = 3, 600.0  # restarts by systemd within so many seconds that make a crash loop
VERDICT_LOOKS = (20.0, 90.0)  # seconds after an engine is ready: memory that grows for a moment while a model loads is over
VERDICT_STANDS = 10.0  # seconds for which each look has to say "cpu"
LEARN_PAUSE = 1.0  # seconds between two questions for the models of an engine
GLANCE = 0.2  # seconds between two looks at a waiting client


class Events:
    """What happens, told to everybody who listens; a listener that does not keep up is dropped, never waited for."""

    BACKLOG = 256

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Subscription] = []

    def publish(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._listeners = [listener for listener in self._listeners if listener.put(event)]

    def close(self) -> None:
        """Nothing more will happen: everybody who listens is told the end."""
        with self._lock:
            for listener in self._listeners:
                listener.close()
            self._listeners = []

    def subscribe(self) -> Subscription:
        listener = Subscription()
        with self._lock:
            self._listeners.append(listener)
        return listener


class Subscription:
    """One listener's queue. Readable through a socket, so that its thread can watch its client at the same time."""

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair()
        self.wire = Wire(ours)
        self._theirs.setblocking(False)
        self._events: deque[dict[str, Any]] = deque()
        self.lost = False

    def put(self, event: dict[str, Any]) -> bool:
        if len(self._events) >= Events.BACKLOG or self.lost:
            self.close()
            return False
        self._events.append(event)
        try:
            self._theirs.send(b".")
        except BlockingIOError:
            pass  # it has not read the last ones yet, and will find this one with them
        except OSError:
            return False
        return True

    def take(self) -> list[dict[str, Any]]:
        taken = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def close(self) -> None:
        self.lost = True
        self._theirs.close()


def send_magic_packet(mac: str) -> None:
    """Wake-on-LAN: six bytes of 0xFF and the address sixteen times, as a UDP broadcast to port 9."""
    packet = b"\xff" * 6 + bytes.fromhex(mac.replace(":", "")) * 16
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            sock.sendto(packet, ("255.255.255.255", 9))
    except OSError as error:
        log(f"no magic packet could be sent: {error.strerror}", WARN)


@dataclass(frozen=True)
class Situation:
    """All that decides what a host does next. Times are monotonic seconds."""

    now: float
    up: str | None = None  # the engine that is ready
    running: str | None = None  # the engine of ours that runs, ready or not
    in_flight: int = 0  # requests on `up`, or on `running` when nothing is known to be ready
    queue: tuple[str, ...] = ()  # engines that requests wait for, oldest first
    look_due: float = NEVER  # when to ask the agent next
    waking: bool = False  # the box sleeps, and was sent a magic packet
    release: bool = False  # a job waits for the GPU that we hold, or runs while an engine came back
    handover_until: float = 0.0  # the GPU was handed to a waiting job
    unload: bool = False  # somebody asked that what is up be stopped, or it is to start anew
    anew: str = ""  # the engine that fell back to the CPU, and is to start once more
    unfinished: bool = False  # a stop was not proven, and is tried again
    retry_due: float = 0.0  # but not before
    idle_due: float = NEVER  # when `up` has been idle for long enough
    in_use_until: float = 0.0  # others beside us use `up`: not to be asked again before
    backoff: tuple[tuple[str, float], ...] = ()  # engines that failed to start, and until when they are not tried


@dataclass(frozen=True)
class Step:
    """What to do next: look, hold (refuse all that queue: the GPU is a job's), refuse, grant, switch, release, stop, or rest
    until something happens or `until`."""

    kind: str
    engine: str = ""
    until: float = NEVER


def plan(now: Situation) -> Step:
    """What should happen now. Requests for one engine share a switch, and newcomers for the engine that is up queue behind
    a request for another one: A A B B, not A B A B, and nobody starves. A waiting job comes before all of them."""
    if now.now >= now.look_due:
        return Step("look")
    handing = now.release or now.now < now.handover_until
    if now.queue and handing:
        return Step("hold")
    for engine, until in now.backoff:
        if engine in now.queue and now.now < until:
            return Step("refuse", engine)
    wanted = now.queue[0] if now.queue else now.anew if not handing and now.anew != now.up else ""
    if wanted and wanted == now.up and not now.unload:
        return Step("grant", wanted)
    must_go = (now.release and (now.up or now.running or now.unfinished)) or (now.unfinished and not wanted)
    other = now.running if wanted != now.running else None  # it is mute: who knows whom it serves
    may_go = (now.up and (wanted or now.unload or now.now >= now.idle_due)) or (wanted and other)
    if must_go or may_go:
        return _make_way(now, wanted)
    if wanted and not now.waking:
        return Step("switch", wanted)
    return Step("rest", until=min(now.look_due, now.idle_due if now.up else NEVER))


def _make_way(now: Situation, wanted: str) -> Step:
    """What runs has to go, as soon as nobody uses it."""
    if now.in_flight:
        return Step("rest", until=now.look_due)
    if now.now < now.in_use_until:
        return Step("rest", until=min(now.look_due, now.in_use_until))
    if wanted and wanted != now.up and not now.release:
        return Step("switch", wanted)
    if now.now < now.retry_due:
        return Step("rest", until=min(now.look_due, now.retry_due))
    if now.release:
        return Step("release", now.up or now.running or "")
    return Step("stop", now.up or now.running or "")


class Ticket:
    """A request's place in the queue for an engine. `committed`: the engine was started, so that nothing can be refused any
    more, only fail."""

    __slots__ = ("engine", "deadline", "committed", "granted", "error")

    def __init__(self, engine: str, deadline: float) -> None:
        self.engine, self.deadline = engine, deadline
        self.committed = False
        self.granted = False
        self.error: GuardError | None = None


class _Committed(Exception):
    """Raised by one who only wanted an engine started: it does, he need not wait."""


class _InUse(Exception):
    """The agent found that engine at work for somebody, and left it alone."""


class Lease:
    """The right to send one request to an engine; while it is held the engine is not stopped."""

    __slots__ = ("host", "engine", "_held")

    def __init__(self, host: Host, engine: str) -> None:
        self.host, self.engine, self._held = host, engine, True

    def release(self) -> None:
        if self._held:
            self._held = False
            self.host.ended(self.engine)


class Ledger:
    """What a restart of the proxy must not forget: handover.json and stop_error.json, an entry per host in each.

    A write that fails leaves the entry in memory, and is tried again at the next tick.
    """

    KINDS = ("handover", "stop_error")

    def __init__(self, folder: str, clock: Clock) -> None:
        self._lock = threading.Lock()
        self._files = {kind: StateFile(folder, kind + ".json", clock) for kind in self.KINDS}
        self._entries: dict[str, dict[str, Any]] = {}
        self._unsaved: set[str] = set()
        for kind, file in self._files.items():
            hosts = file.load().get("hosts")
            self._entries[kind] = hosts if isinstance(hosts, dict) else {}

    def get(self, kind: str, host: str) -> dict[str, Any] | None:
        entry = self._entries[kind].get(host)
        return entry if isinstance(entry, dict) else None

    def put(self, kind: str, host: str, entry: dict[str, Any] | None) -> None:
        with self._lock:
            if self._entries[kind].get(host) == entry:
                return
            if entry is None:
                del self._entries[kind][host]
            else:
                self._entries[kind][host] = entry
            self._unsaved.add(kind)
        self.flush()

    def flush(self) -> None:
        """Write what is not written yet."""
        with self._lock:
            for kind in sorted(self._unsaved):
                if self._files[kind].save({"hosts": self._entries[kind]}):
                    self._unsaved.discard(kind)

    @property
    def problem(self) -> str | None:
        """Why the state cannot be kept on disk, for /status."""
        return next((f"{file.path}: {file.problem}" for file in self._files.values() if file.problem), None)


_REPLY_FIELDS = {"error": dict, "engine": dict, "active": str, "foreign": list, "checked": list, "bench_waits": list}
_REPLY_LISTS = {"others": str, "log": str, "pids": int, "evidence": str}


def odd_field(reply: dict[str, Any]) -> str | None:
    """The first field of an agent's reply that is of another kind than it should be; None when there is none."""
    found = {**(reply["engine"] if isinstance(reply.get("engine"), dict) else {}), **reply}
    for name, kind in (*_REPLY_FIELDS.items(), *dict.fromkeys(_REPLY_LISTS, list).items()):
        if not isinstance(found.get(name), (kind, type(None))):
            return name
    lists = ((name, kind) for name, kind in _REPLY_LISTS.items() if found.get(name))
    return next((name for name, kind in lists if not all(isinstance(one, kind) for one in found[name])), None)


def stop_problem(reply: dict[str, Any]) -> str | None:
    """What an agent's answer to `stop` leaves unproven; None when nothing of ours is left."""
    if not reply.get("ok"):
        return str((reply.get("error") or {}).get("text", "the agent refused"))
    return f"engine {reply['active']} runs after the stop: something started it" if reply.get("active") else None


@dataclass
class Failure:
    """A start that failed, and how long it is answered from memory."""

    error: GuardError
    pause: float
    until: float


class Host:
    """One GPU lane: its engines, who waits for them, and the one thread that switches between them."""

    def __init__(
        self,
        config: HostConfig,
        proxy: ProxyConfig,
        remote: Remote,
        events: Events,
        clock: Clock | None = None,
        api: Callable[[Address, str], EngineApi] = EngineApi,
        ledger: Ledger | None = None,
    ) -> None:
        self.config, self.proxy = config, proxy
        self._remote, self._events, self._new_api = remote, events, api
        self._clock = clock or Clock()
        self._changed = threading.Condition()
        self._apis: dict[str, tuple[HostConfig, EngineApi]] = {}  # made for that configuration
        self._queue: list[Ticket] = []
        self._in_flight: dict[str, int] = {}
        self._up: str | None = None
        self._doing: tuple[str, str] | None = None  # ("starting" | "stopping", engine) while it is done
        self._trusted = False  # has `_up` been seen since it was last in doubt?
        self._look_due = 0.0
        self._unload: str | None = None
        self._used: str | None = None  # the engine that served a request or was started by us; outlives a host that was down
        self._last_ended = 0.0  # monotonic
        self._in_use_until = 0.0
        self._active: str | None = None  # the engine that the agent saw running, ready or not
        self._heard = False  # is `_pids` what an agent told this proxy?
        self._others: list[str] = []  # engines of ours that run beside `_active`
        self._waits: list[dict[str, Any]] = []  # jobs that wait for the GPU, as the agent told
        self._pids: set[tuple[str, int]] = set()  # of it: one that died and came back between two looks has others
        self._meets_job = ""  # how `_active` came to run although a job does; "" when it does not, or was there first
        self._announced = ""  # the release that is in the log
        self._ledger = ledger
        self._handover: dict[str, Any] | None = None
        self._handover_until = 0.0  # monotonic
        self.stop_error: dict[str, Any] | None = None
        self._untold = ""  # the engine that is gone, but whose stop was not proven: nobody was told
        self._retry_due = 0.0
        self._wake_until = 0.0  # while the box is being woken: until when that is waited for
        self._failures: dict[str, Failure] = {}
        self._learned: dict[str, dict[str, dict[str, Any]]] = {}  # engine -> model -> what it says of it
        self._learn_due: dict[str, float] = {}
        self._learning = threading.Lock()
        self._load_then: dict[str, set[str]] = {}  # engine -> what it is to load once it is ready, should it be a router
        self.unloading: set[str] = set()  # what a router is to unload once nothing runs on it
        self._closed = False
        self.since = self._clock.now()
        self.last_tick: float | None = None
        self.last_request: float | None = None
        self.down_since: float | None = None
        self._in_use_since = 0.0  # since when somebody beside us holds up what is to be done
        self.held_up: str | None = None  # what holds things up for longer than drain_timeout
        self.verdict: dict[str, Any] | None = None  # {"value", "evidence"}: where the weights of `_up` are
        self.degraded = False  # it serves from the CPU, and was started anew for that already, or is not to be
        self.counts = dict.fromkeys(("switches", "releases", "stop_errors", "cpu_fallbacks"), 0)
        self.handbacks: deque[dict[str, Any]] = deque(maxlen=20)  # {"host", "job", "time", "seconds"}
        self._asked_back = 0.0  # monotonic: when the wait was first seen that is now released
        self._verdict_due: tuple[float, ...] = ()  # monotonic
        self._judged: frozenset[int] = frozenset()  # the pids that verdict, degraded and _restarted are about
        self._cpu_since = NEVER  # monotonic: since when each look says "cpu"
        self._anew = ""  # the engine that fell back, until it is started once more
        self._restarted = False  # was `_up` started anew for that?
        self.unit_state: str | None = None  # of the engine that runs, as the agent says: "running", "restarting"
        self._restarts: deque[tuple[float, int]] = deque()  # (monotonic, count) of it, as seen within CRASH_WINDOW
        self.blocked: str | None = None  # why the box, which answers, cannot be used
        self.owners: list[dict[str, Any]] = []
        self.agent: dict[str, Any] | None = None
        self.gpu: dict[str, Any] | None = None
        self._managed = any(engine.managed for engine in config.engines.values())
        self._remember()

    def _remember(self) -> None:
        """Take up what an earlier proxy left. A window read back is never longer than the configuration allows (clocks
        jump), and runs on the monotonic clock from here."""
        if self._ledger is None:
            return
        self.stop_error = self._ledger.get("stop_error", self.config.name)
        entry = self._ledger.get("handover", self.config.name)
        left = parse_timestamp(entry.get("until")) - self._clock.now() if entry else 0.0
        if entry and left > 0:
            self._handover = entry
            self._handover_until = self._clock.monotonic() + min(left, self.proxy.handover)

    # ----- what the proxy calls

    def acquire(self, engine: str, waiting: Callable[[bool], None]) -> Lease:
        """The right to use an engine, started first where it must be. While it queues, `waiting(committed)` is called a few
        times a second; it may raise to give the place up. GpuBusy, EngineFailed, HostDown."""
        with self._changed:
            if self._closed or engine not in self.config.engines:
                raise self._left(engine)
            if self._admits(engine):
                return self._lease(engine)
            ticket = Ticket(engine, self._clock.monotonic() + self.proxy.queue_timeout)
            self._queue.append(ticket)
            if not self._trusted:  # down, blocked or in doubt: a short look comes before a long start
                self._look_due = 0.0
            self._changed.notify_all()
        try:
            waiting(False)
            while not self._settled(ticket):
                waiting(ticket.committed)
        except BaseException:
            self._give_up(ticket)
            raise
        if ticket.error:
            raise ticket.error
        return Lease(self, engine)

    def ended(self, engine: str) -> None:
        """A lease was given back."""
        with self._changed:
            self._in_flight[engine] -= 1
            if engine == self._up:
                self._last_ended = self._clock.monotonic()
            if not self._in_flight[engine] and (self._queue or self._unload or self.stop_error or self._releasing()):
                self._changed.notify_all()

    def suspect(self, engine: str) -> None:
        """A connection to it failed: it is looked at before anybody is sent there again."""
        with self._changed:
            if engine == self._up and not self._doing:
                self._trusted = False
                self._look_due = 0.0
                self._changed.notify_all()

    def load(self, engine: str, upstream: str, waiting: Callable[[bool], None]) -> None:
        """Have it started, and a router load that model; returns once nothing can be refused any more. GpuBusy, EngineFailed,
        HostDown."""

        def until_committed(committed: bool) -> None:
            waiting(False)
            if committed:
                raise _Committed

        with self._changed:
            self._load_then.setdefault(engine, set()).add(upstream)
        try:
            self.acquire(engine, until_committed).release()
            self._load_in_router(engine)
        except _Committed:
            pass
        except BaseException:
            with self._changed:
                self._load_then.get(engine, set()).discard(upstream)
            raise

    def _load_in_router(self, engine: str) -> None:
        with self._changed:
            wanted = self._load_then.pop(engine, set())
        for upstream in wanted:
            if "status" in self._learned.get(engine, {}).get(upstream, {}) and self.api(engine).load(upstream):
                self.forget_models(engine)

    def unload(self, engine: str, seconds: float) -> bool:
        """Have it stopped once nothing runs on it; True when it is gone within `seconds`."""
        deadline = self._clock.monotonic() + seconds
        with self._changed:
            while True:
                if engine != self._up and self._doing != ("stopping", engine) and self._doing != ("starting", engine):
                    return True
                if self._unload != engine:
                    self._unload = engine
                    self._changed.notify_all()
                left = deadline - self._clock.monotonic()
                if left <= 0:
                    return False
                self._clock.wait(self._changed, min(left, 1.0))

    def address(self, engine: str) -> Address:
        config = self.config.engines[engine]
        if config.url is None and self.config.tunnel and self.config.ssh:
            return Address(self._remote.tunnel(config.port or 0), 0)
        return config.url or Address(self.config.address, config.port or 0)

    def api(self, engine: str) -> EngineApi:
        """The engine's HTTP side, its kept connections included."""
        config, (made_for, known) = self.config, self._apis.get(engine, (None, None))
        if known is None or made_for is not config:
            address, key = self.address(engine), config.engines[engine].api_key
            if known is None or known.address != address or known.key != key:
                known = self._new_api(address, key)
            self._apis[engine] = config, known
        return known

    def find(self, model: str) -> tuple[str, str] | None:
        """(engine, upstream name) of a model that this host serves."""
        for engine in self.config.engines.values():
            if isinstance(engine.models, dict):
                if model in engine.models:
                    return engine.name, engine.models[model]
            elif model in self._learned.get(engine.name, ()):
                return engine.name, model
        return None

    def models(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Every model of this host -> (engine, what the engine itself says of it)."""
        found: dict[str, tuple[str, dict[str, Any]]] = {}
        for engine in self.config.engines.values():
            learned = self._learned.get(engine.name, {})
            if isinstance(engine.models, dict):
                only = next(iter(learned.values())) if len(learned) == 1 else {}
                only = {} if "status" in only else only  # a server of one model answers to every name, a router does not
                found.update({public: (engine.name, learned.get(up, only)) for public, up in engine.models.items()})
            else:
                found.update({name: (engine.name, said) for name, said in learned.items()})
        return found

    def learn(self, engine: str) -> None:
        """Ask an engine that runs for its models; at most every LEARN_PAUSE seconds. Who comes while it is asked waits for the
        answer, or the first request of all would find no model."""
        with self._learning:
            now = self._clock.monotonic()
            if now < self._learn_due.get(engine, 0.0):
                return
            data = self.api(engine).models()
            self._learn_due[engine] = self._clock.monotonic() + LEARN_PAUSE  # whoever waited meanwhile has this answer
            if data is not None:
                self._learned[engine] = {entry["id"]: entry for entry in data}

    def learn_running(self) -> None:
        """Ask the engines whose models come and go without us: those that somebody else runs, and routers."""
        for engine in self.config.engines.values():
            router = any("status" in said for said in self._learned.get(engine.name, {}).values())
            if self._up == engine.name and router or not engine.managed and (router or engine.models == "auto"):
                self.learn(engine.name)

    def forget_models(self, engine: str) -> None:
        """What it said of its models has just changed: whoever wants to know asks it again."""
        self._learn_due.pop(engine, None)

    def engine_state(self, engine: str) -> str:
        """In llama.cpp's words: unloaded, loading, loaded."""
        if not self.config.engines[engine].managed:
            return "loaded"
        doing = self._doing
        if doing and doing[1] == engine:
            return "loading" if doing[0] == "starting" else "loaded"
        return "loaded" if self._up == engine else "unloaded"

    @property
    def up(self) -> str | None:
        """The engine that is ready."""
        return self._up

    def failure(self, engine: str) -> GuardError | None:
        known = self._failures.get(engine)
        return known.error if known else None

    @property
    def state(self) -> str:
        if self.down_since is not None:
            return "blocked" if self.blocked else "down"
        if self._doing:
            return self._doing[0]
        if not self._up:
            return "handover" if self._handing_over() else "off"
        other = any(ticket.engine != self._up for ticket in list(self._queue))
        return "draining" if other or self._unload or self._anew or self._releasing() else "ready"

    def status(self) -> dict[str, Any]:
        """What the agent says now; HostDown, HostBlocked, AgentError."""
        reply = self._ask("status", 30.0)
        if not reply.get("ok"):
            raise AgentError(str((reply.get("error") or {}).get("text", "the agent refused")))
        return reply

    def version(self) -> dict[str, Any]:
        """What the box is like: python, time (seconds since the epoch), warnings; HostDown, HostBlocked, AgentError."""
        reply = self._ask("version", 30.0)
        if not reply.get("ok"):
            raise AgentError(str((reply.get("error") or {}).get("text", "the agent refused")))
        return reply

    def start(self, engine: str) -> None:
        """Have the agent start an engine, without anybody waiting for it; GpuBusy, EngineFailed, HostDown, HostBlocked."""
        self.owners = self.foreign(self.status())
        self._refuse_old_agent(engine)
        self._started(engine, self._ask("start", 900.0, engine=engine), None)

    def stop(self) -> None:
        """Have the agent stop every engine of ours; AgentError names what survived."""
        problem = stop_problem(self._ask("stop", 900.0))
        if problem is not None:
            raise AgentError(problem)

    def install(self) -> dict[str, Any]:
        """Put this very file on the box."""
        return self._remote.install()

    @property
    def noise(self) -> int:
        """Bytes that the box's login shell printed before the last answer."""
        return self._remote.noise

    def view(self) -> dict[str, Any]:
        """This host's part of /status."""
        with self._changed:
            doing = self._doing
            return {
                "state": self.state if self._managed else "ready",
                "engine": doing[1] if doing else self._up,
                "since": timestamp(self.since),
                "in_flight": sum(self._in_flight.values()),
                "queued": len(self._queue),
                "owners": self.owners,
                "waits": self._waits,
                "handover": self._handover if self._handing_over() else None,
                "stop_error": self.stop_error,
                "verdict": self.verdict,
                "degraded": self.degraded,
                "agent": self.agent,
                "last_tick": timestamp(self.last_tick),
                "down_since": timestamp(self.down_since),
                "problem": self.blocked,
                "held_up": self.held_up,
                "unit_state": self.unit_state,
                "restarted": self.restarted(),
                "failures": {name: str(failure.error) for name, failure in self._failures.items()},
                "gpu": self.gpu,
                "last_request": timestamp(self.last_request),
            }

    def reconfigure(self, config: HostConfig, proxy: ProxyConfig) -> None:
        """Take a new configuration; what runs is not touched."""
        with self._changed:
            followed = self.config.job_queue, self.config.engines
            if self.config.job_queue is not None and followed != (config.job_queue, config.engines):
                self._remote.hang_up()  # the next line asks for what is now configured
            self.config, self.proxy = config, proxy
            self._remote.host = config
            self._managed = any(engine.managed for engine in config.engines.values())
            for ticket in list(self._queue):
                if ticket.engine not in config.engines:
                    self._settle([ticket], self._left(ticket.engine))
            if self._up and self._up not in config.engines:
                left = f"engine {self._up} left the configuration: it runs on, nobody here stops it any more"
                log(f"host {config.name}: {left}", WARN)
                self._up = None
            self._failures = {}
            self._look_due = 0.0
            self._changed.notify_all()

    # ----- under the lock

    def _admits(self, engine: str) -> bool:
        if not self.config.engines[engine].managed:
            return True
        if self._up != engine or self._queue or self._doing or self._unload or self._anew or not self._trusted:
            return False
        return not self._releasing() and not self._handing_over()

    def _releasing(self) -> bool:
        """Does a job wait for us? One whose blocker lives and is somebody else's waits for him."""
        return bool(self._meets_job) or any(not wait.get("foreign") for wait in self._waits)

    def _handing_over(self) -> bool:
        if self._handover is not None and self._clock.monotonic() >= self._handover_until:
            self._handover = None
        return self._handover is not None

    def _left(self, engine: str) -> UnknownModel:
        return UnknownModel(model=f"on engine {engine} of host {self.config.name}", hint=": it left the configuration")

    def _lease(self, engine: str) -> Lease:
        self._count(engine)
        return Lease(self, engine)

    def _count(self, engine: str) -> None:
        self._in_flight[engine] = self._in_flight.get(engine, 0) + 1
        if engine == self._up:
            self._used = engine
        self.last_request = self._clock.now()

    def _settled(self, ticket: Ticket) -> bool:
        """Wait a moment for this ticket; True when it is granted or refused."""
        with self._changed:
            if not (ticket.granted or ticket.error):
                self._clock.wait(self._changed, GLANCE)
            if ticket.granted or ticket.error:
                return True
            if not (ticket.committed or self._wake_until) and self._clock.monotonic() >= ticket.deadline:
                text = f"still in other use after {age(self.proxy.queue_timeout)}"
                self._settle([ticket], GpuBusy(f"host {self.config.name}: GPU is busy: {text}"))
                return True
        return False

    def _give_up(self, ticket: Ticket) -> None:
        with self._changed:
            if ticket in self._queue:
                self._queue.remove(ticket)
                self._changed.notify_all()
        if ticket.granted:
            self.ended(ticket.engine)

    def _settle(self, tickets: Iterable[Ticket], error: GuardError | None = None) -> None:
        """Grant these tickets, or refuse them."""
        for ticket in list(tickets):
            self._queue.remove(ticket)
            if error is None:
                ticket.granted = True
                self._count(ticket.engine)
            else:
                ticket.error = error
        self._changed.notify_all()

    def _waiting_for(self, engine: str) -> list[Ticket]:
        return [ticket for ticket in self._queue if ticket.engine == engine]

    def _situation(self) -> Situation:
        engines = self.config.engines  # a stop stops them all: one that is mute, or runs beside `_up`, may serve all the same
        in_flight = sum(count for name, count in self._in_flight.items() if name in engines and engines[name].managed)
        now = self._clock.monotonic()
        idle_since = now if in_flight else self._last_ended  # in flight: it cannot be idle for long enough before then
        return Situation(
            now=now,
            up=self._up,
            in_flight=in_flight,
            queue=tuple(ticket.engine for ticket in self._queue),
            look_due=self._look_due,
            running=self._active,
            waking=self._wake_until > 0.0,
            release=self._releasing(),
            handover_until=self._handover_until if self._handing_over() else 0.0,
            unfinished=self.stop_error is not None and self.down_since is None,
            retry_due=self._retry_due,
            unload=self._up is not None and self._up in (self._unload, self._anew),
            anew=self._anew,
            idle_due=idle_since + self.proxy.idle_stop if self._up and self._used == self._up else NEVER,
            in_use_until=self._in_use_until,
            backoff=tuple((engine, failure.until) for engine, failure in self._failures.items()),
        )

    # ----- the one thread

    def run(self) -> None:
        """Do what is due, for ever: the body of the host's thread."""
        while not self._closed:
            try:
                self.turn()
            except Exception:
                import traceback

                log(f"host {self.config.name}: internal error, going on: {traceback.format_exc()}", ERROR)
                self._clock.sleep(1.0)

    def close(self) -> None:
        """End the thread; what runs on the box runs on."""
        with self._changed:
            self._closed = True
            for ticket in list(self._queue):
                self._settle([ticket], self._left(ticket.engine))
            self._changed.notify_all()
        self._remote.close()

    def turn(self) -> None:
        """One step of the plan, or a rest until something changes."""
        with self._changed:
            step = plan(self._situation())
            if step.kind == "rest":
                if not self._closed:
                    self._clock.wait(self._changed, step.until - self._clock.monotonic())
            elif step.kind == "grant":
                self._settle(self._waiting_for(step.engine))
            elif step.kind == "refuse":
                self._settle(self._waiting_for(step.engine), self._failures[step.engine].error)
            elif step.kind == "hold":
                self._settle(self._queue, self._held())
        if step.kind == "look":
            self._look()
        elif step.kind in ("switch", "stop", "release"):
            self._change(step)

    def _held(self) -> GpuBusy:
        why = "a job waits for it" if self._waits else "a bench job runs"
        if self._handing_over():
            why = "handed to a waiting bench job"
        return GpuBusy(f"host {self.config.name}: GPU is busy: {why}")

    def _ask(self, op: str, seconds: float, **more: Any) -> dict[str, Any]:
        """One op of the agent about this host's engines."""
        reply = self._remote.call({**self._request(op), **more}, seconds)
        odd = odd_field(reply)
        if odd:
            raise AgentError(f"the agent on host {self.config.name} gave a reply that makes no sense: {odd}")
        return reply

    def _request(self, op: str) -> dict[str, Any]:
        engines: dict[str, Any] = {}
        for engine in self.config.engines.values():
            if engine.managed:
                kind = {"command": engine.command} if engine.command else {"unit": engine.unit, "scope": engine.scope}
                facts = {"max_rss": engine.max_rss, "model_bytes": self._model_bytes(engine.name)}
                engines[engine.name] = {"port": engine.port, "vram": engine.vram, **facts, **kind}
        config = self.config
        ask: dict[str, Any] = {"op": op, "host": config.name, "engines": engines, "sudo": config.sudo}
        ask["address"] = "127.0.0.1" if config.tunnel else config.address
        for guard in ("bench_port", "job_queue", "owner_check", "gpus", "ignore", "owner_min", "unexplained"):
            ask[guard] = getattr(config, guard)
        return ask

    def _model_bytes(self, engine: str) -> int | None:
        """The weights of what an engine has loaded, as it says itself (llama-server: data[].meta.size of /v1/models)."""
        said = self._learned.get(engine, {}).values()
        loaded = [entry for entry in said if (entry.get("status") or {}).get("value", "loaded") == "loaded"]
        sizes = [(entry.get("meta") or {}).get("size") for entry in loaded]
        return sum(count for count in sizes if isinstance(count, int)) or None

    def _look(self) -> None:
        """The tick: what runs there, and who else holds the GPU?"""
        reply: dict[str, Any] = {}
        trouble = None
        try:
            if self.config.tunnel and self.config.ssh:
                self._remote.open_tunnels(engine.port or 0 for engine in self.config.engines.values() if engine.managed)
            reply = self.status() if self._managed else {}
        except (HostDown, HostBlocked, AgentError) as error:
            trouble = error
        active = reply.get("active")
        known = active if active in self.config.engines else None
        if known is not None and known == self._up:  # health gates readiness only: a mute engine in a long prefill isn't sick
            ready = (reply.get("engine") or {}).get("port") != "closed"
        else:
            ready = known is not None and self.api(known).ready()
        with self._changed:
            if trouble:
                self._trouble(trouble)
            else:
                self._seen(reply, known if ready else None)
            self._changed.notify_all()
        if self._ledger is not None:
            self._keep_stop_error()
            self._ledger.flush()
        for engine in self.config.engines.values():
            if engine.name == self._up or not engine.managed:
                self.learn(engine.name)

    def follow(self) -> None:
        """Stay on the line with the box's agent, so that a waiting job is seen at once and not at the next tick: the body of a
        thread of its own. A host without a job queue has no line, until it is given one. The tick stays as the net below."""
        pause = 1.0
        while not self._closed:
            if self.config.job_queue is None:
                with self._changed:
                    while self.config.job_queue is None and not self._closed:
                        self._clock.wait(self._changed, NEVER)
                continue
            begun = self._clock.monotonic()
            try:
                self._remote.follow(self._request("status"), lambda reply: self.poke())
            except GuardError as error:  # no folder for ssh's sockets
                log(f"host {self.config.name}: the line to its agent cannot be opened: {error}", WARN)
            except Exception:
                import traceback

                log(f"host {self.config.name}: the line to its agent failed, trying again: {traceback.format_exc()}", ERROR)
            if self._clock.monotonic() - begun > 60.0:
                pause = 1.0
            until = self._clock.monotonic() + pause
            with self._changed:
                while not self._closed and self._clock.monotonic() < until:
                    self._clock.wait(self._changed, until - self._clock.monotonic())
            pause = min(60.0, pause * 2)

    def poke(self) -> None:
        """Something changed on the box: look now."""
        with self._changed:
            self._look_due = 0.0
            self._changed.notify_all()

    def _trouble(self, error: GuardError) -> None:
        """The box does not answer (down), or answers and refuses (blocked); under the lock. One log line per streak."""
        name = self.config.name
        blocked = None if isinstance(error, HostDown) else str(error)
        if self.down_since is None or blocked != self.blocked:
            log(f"host {name}: {'blocked' if blocked else 'down'}: {error}", WARN)
        self.down_since = self.down_since or self._clock.now()
        self.blocked = blocked
        self._active = None
        if blocked is None:
            self.stop_error, self._retry_due = None, 0.0  # whatever survived a stop, it went down with the box
        self._looked()
        if not self._queue:
            self._wake_until = 0.0  # nobody waits for it any more
        if blocked is None and self._queue and self._wake():
            return
        told = f"host {name} is down" if blocked is None else f"host {name} cannot be used, see /status: {client_safe(blocked)}"
        self._settle(self._queue, HostDown(told))
        self._up, self._trusted = None, False

    def _wake(self) -> bool:
        """A box that sleeps is sent a magic packet once, by who asks for one of its models; who asked then waits for it."""
        now = self._clock.monotonic()
        if self.config.mac is None or (self._wake_until and now >= self._wake_until):
            self._wake_until = 0.0
            return False
        if not self._wake_until:
            log(f"host {self.config.name}: asked for while down: waking {self.config.mac}")
            send_magic_packet(self.config.mac)
            self._wake_until = now + self.proxy.queue_timeout
        self._look_due = now + WAKE_PAUSE
        self._up, self._trusted = None, False
        return True

    def _looked(self) -> None:
        now = self._clock.monotonic()
        self._verdict_due = tuple(due for due in self._verdict_due if due > now)
        self._look_due = min((now + self.proxy.tick, *self._verdict_due))
        self.last_tick = self._clock.now()

    def _seen(self, reply: dict[str, Any], ready: str | None) -> None:
        """Take in what a look found; under the lock."""
        name = self.config.name
        if self.down_since is not None:
            log(f"host {name}: up again")
        self.down_since = self.blocked = None
        self._wake_until = 0.0
        self._looked()
        if reply:
            self._take_owners(self.foreign(reply))
            self.agent = {"version": reply.get("agent"), "sha256": reply.get("sha256")}
            self.gpu = reply.get("gpu")
            self.unit_state = reply.get("state")
            self._take_waits(reply)
        self._trusted = True
        if ready != self._up:
            before = self._up or ""
            if before and self.stop_error is None:
                log(f"host {name}: engine {before} is gone: nobody here stopped it", WARN)
                self._tell(before, "unloaded")
            if ready:
                log(f"host {name}: engine {ready} runs already: taken over")
                self._tell(ready, "loaded")
            self._now_up(ready, used=False)
            if self.stop_error is not None:
                self._untold = before  # until it is proven
        if reply:
            self._take_active(reply)
            self._take_verdict(reply)

    def _take_waits(self, reply: dict[str, Any]) -> None:
        waits = [wait for wait in reply.get("bench_waits") or () if isinstance(wait, dict) and "job" in wait and "since" in wait]
        self._waits = sorted(waits, key=lambda wait: bool(wait.get("foreign")))

    def _take_active(self, reply: dict[str, Any]) -> None:
        """Which engine of ours runs. One that nobody here started, and that appears while a job runs, came back by itself
        (Restart=always, a timer): it is stopped again. One that was there before a line was lost is still the same; the first
        look of a new proxy tells by its age."""
        active = reply.get("active") if reply.get("active") in self.config.engines else None
        before, heard = self._pids, self._heard
        if active is None or not any(owner.get("kind") == "unknown" for owner in self.owners):
            self._take_pids(reply)  # else whether a job runs cannot be told: the next look decides
            self._heard = True
        if active is None:
            self._announced = ""
        if active is None or not self._job_runs():
            self._meets_job = ""
        elif (not self._pids & before) if heard else self._younger_than_job(reply):
            self._meets_job = "came back while a bench job runs"
        self._take_restarts(reply)
        self._active = active
        self._others = [name for name in reply.get("others") or () if name in self.config.engines]
        text = self._release_text() if active and self._releasing() else ""
        if text and text != self._announced:
            self._announced = text
            log(f"{text}: refusing new work, the engine stops once idle")
            self._asked_back = self._clock.monotonic()
            self._event("release", engine=active, job=self._waits[0]["job"] if self._waits else None)

    def _take_pids(self, reply: dict[str, Any]) -> None:
        self._pids = {(str(reply.get("active")), pid) for pid in (reply.get("engine") or {}).get("pids") or ()}

    def _take_verdict(self, reply: dict[str, Any]) -> None:
        """Where the weights of what is up are. Looks that say "cpu" for VERDICT_STANDS make a fallback: it is started once more
        as soon as nothing runs on it; one that falls back again, or that nobody has asked us for, is served on as it is."""
        view, engine, now = reply.get("engine") or {}, self._up, self._clock.monotonic()
        if engine is None or reply.get("active") != engine or "verdict" not in view:
            return
        pids = frozenset(view.get("pids") or ())
        if not pids & self._judged:  # another spawn: what was known of the last one does not hold
            self.degraded = self._restarted = False
            self._cpu_since = NEVER
        self._judged = pids
        self.verdict = {"value": view["verdict"], "evidence": view.get("evidence") or []}
        self._cpu_since = min(self._cpu_since, now) if view["verdict"] == "cpu" else NEVER
        if view["verdict"] == "gpu":
            self.degraded, self._anew = False, ""
        if now - self._cpu_since < VERDICT_STANDS or self._anew:
            return
        again = self.config.engines[engine].on_cpu == "restart" and not self._restarted and self._used == engine
        if self.degraded and not again:
            return
        self._anew, self.degraded = (engine, False) if again else ("", True)
        self.counts["cpu_fallbacks"] += 1
        then = "it starts once more as soon as nothing runs on it" if again else "degraded, and served on as it is"
        log(f"host {self.config.name}: engine {engine} serves from the CPU: {then} ({'; '.join(self.verdict['evidence'])})", WARN)
        self._event("cpu_fallback", engine=engine, degraded=self.degraded, evidence=self.verdict["evidence"])

    def _take_restarts(self, reply: dict[str, Any]) -> None:
        """A crash loop shows in the rate at which systemd starts the engine again, not in the count."""
        count, now = (reply.get("engine") or {}).get("restarts"), self._clock.monotonic()
        looped = self._crash_loops()
        anew = not isinstance(count, int) or bool(self._restarts) and count < self._restarts[-1][1]
        if anew or reply.get("active") != self._active:
            self._restarts.clear()  # another engine, or started anew by somebody
        if isinstance(count, int):
            self._restarts.append((now, count))
        while len(self._restarts) > 1 and self._restarts[1][0] <= now - CRASH_WINDOW:
            self._restarts.popleft()
        if self._crash_loops() and not looped:
            log(f"host {self.config.name}: engine {reply.get('active')} was {self.restarted()}", WARN)

    def restarted(self) -> str | None:
        """How often systemd started the engine again lately: "restarted 3 times in 1m30s"."""
        first, last = (self._restarts[0], self._restarts[-1]) if self._restarts else ((0.0, 0), (0.0, 0))
        times = last[1] - first[1]
        return f"restarted {times} times in {age(last[0] - first[0])}" if times else None

    def _crash_loops(self) -> bool:
        return bool(self._restarts) and self._restarts[-1][1] - self._restarts[0][1] >= CRASH_LOOP

    def _job_runs(self) -> bool:
        return any(owner.get("kind") == "job" for owner in self.owners)

    def _younger_than_job(self, reply: dict[str, Any]) -> bool:
        """Was the engine started after the job that runs? Then something did that while no proxy lived to see it."""
        job = next(owner for owner in self.owners if owner.get("kind") == "job")
        return 0 < parse_timestamp(job.get("since")) < parse_timestamp((reply.get("engine") or {}).get("since"))

    def foreign(self, reply: dict[str, Any]) -> list[dict[str, Any]]:
        """The owners that a reply names, and one for each guard that was asked for and not applied: an older agent drops a
        field that it does not know, and answers as if nothing had been asked."""
        owners = [owner for owner in reply.get("foreign") or [] if isinstance(owner, dict) and "text" in owner]
        for guard in self._guards():
            if guard not in (reply.get("checked") or []):
                name = self.config.name
                text = f"the agent on host {name} predates {guard}: run `llmguard.py engine install {name}`"
                owners.append({"kind": "agent", "text": text})
        return owners

    def _guards(self) -> list[str]:
        """What the agent must look at before a GPU counts as free."""
        asked = ("bench_port", "job_queue", "owner_check")
        return ["gpu", *(guard for guard in asked if getattr(self.config, guard) is not None)]

    def _now_up(self, engine: str | None, used: bool) -> None:
        self._up, self._trusted = engine, True
        if used or engine != self._used:
            self._used = engine if used else None
        self._failures.pop(engine or "", None)
        self._active = engine
        if engine is None or self._unload != engine:
            self._unload = None  # one that was asked for while it started still holds
        now = self._clock.monotonic()
        self._last_ended = now
        self._in_use_until, self._untold = 0.0, ""
        self.since = self._clock.now()
        self.verdict, self._cpu_since = None, NEVER
        if engine is None:
            self.degraded = self._restarted = False
        self._verdict_due = tuple(now + due for due in VERDICT_LOOKS) if engine else ()
        self._look_due = min((self._look_due, *self._verdict_due))

    def _event(self, event: str, **data: Any) -> None:
        """Something that happened to this host: release, handover, owner, stop_error, cpu_fallback, engine_started,
        engine_stopped."""
        self._events.publish({"event": event, "data": {"host": self.config.name, **data}})

    def _take_owners(self, owners: list[dict[str, Any]]) -> None:
        """Who else holds the GPU; told when it is somebody else than before, not when his text counts seconds."""
        now, before = (
            [(owner.get("kind"), owner.get("pid"), owner.get("since")) for owner in each] for each in (owners, self.owners)
        )
        if now != before:
            self._event("owner", owners=owners)
        self.owners = owners

    def _tell(self, engine: str, status: str, **more: Any) -> None:
        """llama.cpp's own event for each model of an engine, and ours for the engine."""
        host_event = {"loaded": "engine_started", "unloaded": "engine_stopped"}.get(status)
        if host_event:
            self._event(host_event, engine=engine, **more)
        for model, (its_engine, _) in self.models().items():
            if its_engine == engine:
                data = {"status": status, "host": self.config.name, "engine": engine, **more}
                self._events.publish({"model": model, "event": "model_status", "data": data})

    def _change(self, step: Step) -> None:
        """Stop what is up, start what is wanted; first make sure that nobody beside us uses what is up."""
        goes = self._up or self._active  # also one that is mute
        if goes == step.engine and step.kind == "switch":
            goes = None  # it is waited for, not stopped
        for engine in dict.fromkeys(filter(None, (goes, *self._others))):
            if (engine != step.engine or step.kind != "switch") and self._in_use(engine):
                self._used_beside_us(engine)
                return
        with self._changed:
            self._in_use_since, self.held_up = 0.0, None
            if plan(replace(self._situation(), look_due=NEVER)) != step:
                return  # somebody was let in meanwhile, or gave up
            self._doing = ("starting" if step.kind == "switch" else "stopping", step.engine)
            self.since = self._clock.now()
        try:
            if step.kind == "switch":
                self._switch(step.engine)
            elif step.kind == "release":
                self._release(step.engine)
            else:
                self._stop(step.engine)
        except _InUse as found:
            self._used_beside_us(str(found))
            self.poke()
        finally:
            with self._changed:
                self._doing = None
                self._changed.notify_all()

    def _in_use(self, engine: str) -> bool:
        """Does it work for anybody beside us? One that does not tell is asked about at its box, by its connections."""
        api = self.api(engine)
        known = api.in_use()
        if known is not None:
            return known
        api.pool.close()  # our own kept connections are no use
        try:
            return bool(self._ask("status", 30.0, in_use=engine).get("in_use", True))
        except (HostDown, HostBlocked, AgentError):
            return True  # the next look tells what is the matter there

    def _used_beside_us(self, engine: str) -> None:
        """Somebody works on an engine that is to go, and not through us: that is waited for, since to cut him is not ours to
        decide; after drain_timeout the log and /status say what holds things up."""
        with self._changed:
            now = self._clock.monotonic()
            if now > self._in_use_until + 10 * IN_USE_PAUSE:  # it was not asked for a while: another time
                self._in_use_since, self.held_up = 0.0, None
            self._in_use_until = now + IN_USE_PAUSE
            self._in_use_since = self._in_use_since or now
            waited = now - self._in_use_since
            if waited < self.proxy.drain_timeout or self.held_up:
                return
            self.held_up = f"engine {engine} is to stop, and is still in use by somebody beside this proxy"
        log(f"host {self.config.name}: {self.held_up}, for {age(waited)} now", WARN)

    def _switch(self, engine: str) -> None:
        name, before = self.config.name, self._up
        anew, self._anew = self._anew == engine, ""
        log(f"host {name}: switching to engine {engine}")
        self._tell(engine, "loading")
        try:
            self._refuse_old_agent(engine)
            reply = self._ask("start", 900.0, engine=engine)
            if reply.get("in_use"):  # somebody, another proxy perhaps, has one of ours at work: those who queue wait for it
                self._tell(engine, "unloaded")
                raise _InUse(reply["in_use"])
            self._started(engine, reply, before)
            reply = self._await_ready(engine)
        except GpuBusy as error:
            self._tell(engine, "unloaded")
            with self._changed:
                self._trusted = False
                self._look_due = 0.0
                self._settle(self._waiting_for(engine), error)
        except (HostDown, HostBlocked, AgentError) as error:
            self._tell(engine, "unloaded")
            with self._changed:
                self._trouble(error)
        except GuardError as error:
            self._start_failed(engine, error)
        else:
            log(f"host {name}: engine {engine} is ready")
            self.counts["switches"] += 1
            self._note_stop(None)  # a stop that was not proven is not wanted any more, or was done by this start
            self._tell(engine, "loaded")
            with self._changed:
                self._now_up(engine, used=True)
                self._judged = frozenset()
                self._take_verdict(reply)
                self._restarted = anew
                self._settle(self._waiting_for(engine))
            self.forget_models(engine)
            self.learn(engine)
            self._load_in_router(engine)

    def _refuse_old_agent(self, engine: str) -> None:
        """A box whose agent does not apply a guard that is asked for is not sent a start at all."""
        old = next((owner for owner in self.owners if owner.get("kind") == "agent"), None)
        if old is not None:
            raise GpuBusy(self._switch_failed(engine) + "GPU is busy, not switching: " + old["text"])

    def _switch_failed(self, engine: str) -> str:
        name = self.config.name
        return f"switching host {name} to engine {engine} failed: host {name}: "

    def _started(self, engine: str, reply: dict[str, Any], before: str | None) -> None:
        """Take in the agent's answer to `start`: from here on nothing is refused."""
        prefix = self._switch_failed(engine)
        if not reply.get("ok"):
            error = reply.get("error") or {}
            if error.get("type") == "GpuBusy":
                if "foreign" in reply:  # it was an owner, not a busy agent or memory that drains
                    self._take_owners(self.foreign(reply))
                raise GpuBusy(prefix + "GPU is busy, not switching: {}".format(client_safe(str(error.get("text")))))
            raise EngineFailed(prefix + str(error.get("text", "no reason given")))
        if before and before != engine:
            log(f"host {self.config.name}: engine {before} stopped")
            self._tell(before, "unloaded")
        with self._changed:
            self._up, self._active = None, engine
            self._take_pids(reply)
            for ticket in self._waiting_for(engine):
                ticket.committed = True
            self._changed.notify_all()

    def _await_ready(self, engine: str) -> dict[str, Any]:
        """Until the engine's own process serves -> what the agent says of it then; EngineFailed when it ended, or when that takes
        too long."""
        reply: dict[str, Any] = {}
        timeout = self.config.engines[engine].start_timeout
        begun = self._clock.monotonic()
        asked, pause = begun, 0.5
        while True:
            ready = self.api(engine).ready()
            now = self._clock.monotonic()
            if ready or now - asked >= pause or now >= self._look_due:
                asked, pause = now, min(10.0, pause * 1.5)
                reply = self._check_process(engine, ready)
            if ready:
                return reply
            late, unload = now - begun > timeout, self._unload == engine
            if (late or unload and now >= self._in_use_until) and not self._in_flight.get(engine):
                if self._gives_up(engine, spare=not late):
                    closed = ", and nothing listens on its port" if (reply.get("engine") or {}).get("port") == "closed" else ""
                    why = "it was unloaded" if unload else f"not ready within {age(timeout)}{closed}"
                    raise EngineFailed(f"engine {engine}: {why}")
                self._used_beside_us(engine)
            with self._changed:
                for ticket in self._waiting_for(engine):
                    ticket.committed = True
                self._clock.wait(self._changed, 0.1)

    def _gives_up(self, engine: str, spare: bool) -> bool:
        """Stop what starts. With `spare` not while somebody uses it beside us, since it may have run all along: False then."""
        if spare and self._in_use(engine):
            return False
        reply = self._ask("stop", 300.0, spare=spare)
        if reply.get("in_use"):  # by somebody who came in since
            return False
        self._note_stop(stop_problem(reply))
        return True

    def _check_process(self, engine: str, ready: bool) -> dict[str, Any]:
        """The one that answers must be the one that was started -> the agent's reply."""
        reply = self._ask("status", 30.0, log=engine)
        if not reply.get("ok"):
            text = (reply.get("error") or {}).get("text", "no reason given")
            raise EngineFailed(f"whether engine {engine} still runs cannot be told: {text}")
        with self._changed:
            self._looked()
            self._take_owners(self.foreign(reply))
            self._take_waits(reply)
            self._take_pids(reply)
            self._take_restarts(reply)
            if self._job_runs():  # its runner saw nothing on the GPU yet
                self._meets_job = "was started as a bench job was"
            if self._releasing():  # it is released once the plan sees it: those who wait for it come after the job
                raise self._held()
        if reply.get("active") != engine or reply.get("state") == LEFT_OVER:
            lines = reply.get("log") or ["(it printed nothing)"]
            raise EngineFailed("engine {} ended while it started; its last lines: {}".format(engine, " | ".join(lines[-5:])))
        if self._crash_loops() and not ready:
            self._note_stop(stop_problem(self._ask("stop", 300.0)))
            lines = reply.get("log") or ["(it printed nothing)"]
            raise EngineFailed(f"engine {engine} was {self.restarted()}; its last lines: {' | '.join(lines[-5:])}")
        if (reply.get("engine") or {}).get("port") == "stranger":
            raise EngineFailed("the port of engine {} is served by {}, not by it".format(engine, reply["engine"].get("stranger")))
        return reply

    def _start_failed(self, engine: str, error: GuardError) -> None:
        name = self.config.name
        text = str(error) if str(error).startswith("switching") else f"host {name}: {error}"
        with self._changed:
            unloaded = self._unload == engine
            known = self._failures.get(engine)
            pause = min(BACKOFF_LAST, known.pause * 2 if known else BACKOFF_FIRST)
            failed = EngineFailed(client_safe(text))
            if not unloaded:
                self._failures[engine] = Failure(failed, pause, self._clock.monotonic() + pause)
            self._trusted = False  # what was up before may have been stopped for it
            self._look_due = 0.0
            self._unload = None
            self._load_then.pop(engine, None)
            self._settle(self._waiting_for(engine), failed)
        log("{}{}".format(text, "" if unloaded else f"; not tried again for {age(pause)}"), INFO if unloaded else WARN)
        self._tell(engine, "unloaded", **({} if unloaded else {"failed": True}))

    def _stop(self, engine: str) -> None:
        name = self.config.name
        if self.stop_error is None:
            why = "asked to unload" if self._unload else f"idle for {age(self.proxy.idle_stop)}"
            why = "it fell back to the CPU" if self._anew == engine else why
            log(f"host {name}: {why}: stopping engine {engine}")
        problem = self._stop_and_prove(engine)
        if problem is None:
            log(f"host {name}: engine {engine} stopped" if engine else f"host {name}: nothing of our engines is left")
        self._note_stop(problem)

    def _release(self, engine: str) -> None:
        """For a waiting job: stop, prove, and keep everybody off until its runner has looked again. Without proof none of
        that is claimed."""
        name, text = self.config.name, self._release_text()
        self._anew = ""  # the job comes first; whoever asks afterwards starts it
        problem = self._stop_and_prove(engine)
        if problem is None:
            log(f"{text}: engine stopped")
            now = self._clock.now()
            job = self._waits[0]["job"] if self._waits else None
            entry = {"job": job, "since": timestamp(now), "until": timestamp(now + self.proxy.handover)}
            with self._changed:
                self._handover, self._handover_until = entry, self._clock.monotonic() + self.proxy.handover
                self._meets_job = self._announced = ""
            if self._ledger is not None:
                self._ledger.put("handover", name, entry)
            seconds = round(self._clock.monotonic() - self._asked_back, 3)
            self.counts["releases"] += 1
            self.handbacks.append({"host": name, "job": job, "time": timestamp(now), "seconds": seconds})
            self._event("handover", engine=engine, seconds=seconds, **entry)
        self._note_stop(problem)

    def _release_text(self) -> str:
        """What the log says of this release, as in the seed's journal."""
        name = self.config.name
        if not self._waits:
            return f"host {name}: engine {self._active} {self._meets_job}"
        wait = self._waits[0]
        held = f" (held by pid {wait['pid']})" if wait.get("pid") else ""
        return f"host {name}: bench job {wait['job']} waits for the GPU since {wait['since']}{held}"

    def _stop_and_prove(self, engine: str) -> str | None:
        """Have the agent stop all of ours; what was left, or None when it is proven that nothing is."""
        try:
            reply = self._ask("stop", 900.0, spare=True)
            if reply.get("in_use"):  # by somebody who came in since we looked, beside us
                raise _InUse(reply["in_use"])
            problem = stop_problem(reply)
        except (HostDown, HostBlocked, AgentError) as error:
            problem = str(error)
        with self._changed:
            self._unload = None
            gone = {engine, self._untold} - {""}
            if problem is None:
                self._now_up(None, used=False)
                self._pids = set()
            else:
                self._trusted = False
                self._look_due = 0.0
                self._last_ended = self._clock.monotonic()
        for each in sorted(gone) if problem is None else ():
            self._tell(each, "unloaded")
        return problem

    def _note_stop(self, problem: str | None) -> None:
        """Remember a stop that was not proven, until one is or the box is down; one log line per failing streak."""
        name, now = self.config.name, timestamp(self._clock.now())
        with self._changed:
            before, entry = self.stop_error, None
            if problem is not None:
                attempts = (before or {}).get("attempts")
                entry = {"error": problem, "since": (before or {}).get("since") or now, "last": now}
                entry["attempts"] = attempts + 1 if isinstance(attempts, int) else 1
            self.stop_error = entry
            self._retry_due = self._clock.monotonic() + self.proxy.tick if entry else 0.0
        if problem is not None and before is None:
            log(f"host {name}: the engine is not stopped: {problem}", ERROR)
            self.counts["stop_errors"] += 1
            self._event("stop_error", **(entry or {}))
        self._keep_stop_error()

    def _keep_stop_error(self) -> None:
        if self._ledger is not None:
            self._ledger.put("stop_error", self.config.name, self.stop_error)


# ======================================================================================================================
# 10  Proxy
# ======================================================================================================================
# The HTTP server: a thread per connection as in http.server, with a parser and a relay of its own, since
# BaseHTTPRequestHandler is lax where a proxy must be strict, and slow. One request is one Exchange: parse,
# authorise, read the body, route, acquire, forward. Errors become a response in one place, Exchange.refuse.

HEAD_PATIENCE = 10.0  # seconds for a whole header block, however it trickles
FIRST_REQUEST = 2.0  # seconds that a proxy which drains gives a connection for its first request
IDLE_PATIENCE = 120.0  # seconds that a connection may wait for its next request
BODY_PATIENCE, BODY_RATE = 30.0, 16 * 1024  # a body may take that many seconds, and one more per BODY_RATE bytes
IN_MEMORY = 8 << 20  # bytes of a request body kept in memory; larger ones go to a temp file
MAX_DEPTH = 200  # of nested JSON in a request
OWN_STALL = 10.0  # seconds that a client may take nothing of an answer which is our own
TURN = 0.005  # seconds after which the next new connection is served, though the last one still works on its first request
LINGER = 2.0  # seconds to read on after a refusal, so that a reset does not destroy the answer on its way
SEND_PIECE = 1 << 20
_LAST_CHUNK = b"0\r\n\r\n"

_EMPTY_LINES = Pattern(rb"\A(?:\r\n)+")
_METHODS = frozenset("GET HEAD POST PUT PATCH DELETE OPTIONS".split())
_REQUEST_LINE = Pattern(rf"({_TOKEN}) ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])")
_NOT_FORWARDED = HOP_BY_HOP | frozenset(
    # x-conversation-id makes llama-server go on after its client left; keys are ours, never the engine's
    "host content-length content-encoding expect cookie authorization x-api-key x-conversation-id".split()
)
_NOT_RETURNED = HOP_BY_HOP | frozenset(["content-length"])
_OPEN_PATHS = frozenset(["/", "/health"])  # no key needed

_API_PATHS = frozenset(
    "/v1/chat/completions /v1/completions /v1/embeddings /v1/responses /v1/rerank /v1/reranking /v1/messages "
    "/v1/messages/count_tokens".split()
)
_API_FOLDERS = ("/v1/audio/", "/v1/images/", "/v1/responses/")
_LLAMA_PATHS = frozenset(
    "/completion /completions /infill /tokenize /detokenize /apply-template /embedding /embeddings /rerank /reranking "
    "/props /slots /lora-adapters".split()
)
_KNOWN_PATHS = sorted(_API_PATHS | _LLAMA_PATHS | {"/v1/models", "/models/load", "/models/unload", "/status", "/metrics"})


def is_engine_path(path: str) -> bool:
    """Is it one that engines answer?"""
    return path in _API_PATHS or path in _LLAMA_PATHS or path.startswith(_API_FOLDERS) or path.startswith("/slots/")


# ----- what a request's body says


@dataclass(frozen=True)
class Asked:
    """What routing needs to know of a body. `spans`: where the model's name stands in it, as (start, end) of the raw value."""

    model: str | None = None
    stream: bool = False
    spans: tuple[tuple[int, int], ...] = ()
    quoted: bool = True  # is the raw value a JSON string, or plain text (multipart)?


_JSON_GAP = Pattern(rb"[ \t\r\n]*")
_JSON_KEY = Pattern(rb'"([!#-\[\]-~]*)"[ \t\r\n]*:[ \t\r\n]*')  # of plain ASCII
_JSON_END = Pattern(rb"}[ \t\r\n]*\Z")
_JSON_NEXT = Pattern(rb"[ \t\r\n]*(,[ \t\r\n]*|}[ \t\r\n]*\Z)")
# the next bracket, or quote; short strings on the way to it are skipped, a long one is found faster by its end
_JSON_STRUCTURE = Pattern(rb'(?:[^"\[\]{}]{0,200}"[^"\\]{0,200}"){0,16}[^"\[\]{}]*(["\[\]{}])')
_JSON_ESCAPES = Pattern(rb'(?s:(?:[^"\\]{0,200}\\.){0,200})[^"\\]{0,200}("?)')  # where one is, as in code, there are more
_JSON_PLAIN = Pattern(rb"[-+.0-9A-Za-z]+")


def _string_end(data: Any, start: int) -> int:
    """The index behind the JSON string whose opening quote is at `start`."""
    at = start
    while True:
        at = data.find(b'"', at + 1)
        if at < 0:
            raise BadRequest("the request's body is no JSON: an unfinished string")
        if data[at - 1] != 92 or (data[at - 2] == 92 and not _is_escaped(data, start, at)):
            return int(at) + 1
        crowd = _JSON_ESCAPES.match(data, at + 1)
        if crowd.group(1):
            return int(crowd.end())
        at = crowd.end() - 1


def _is_escaped(data: Any, start: int, at: int) -> bool:
    """Is the quote at `at` escaped, by an odd number of backslashes before it?"""
    count, end = 0, at
    while True:
        piece = bytes(data[max(start + 1, end - 4096):end])
        kept = piece.rstrip(b"\\")
        count += len(piece) - len(kept)
        if kept or end - 4096 <= start + 1:
            return count % 2 == 1
        end -= 4096


def _value_end(data: Any, start: int) -> int:
    """The index behind the JSON value that begins at `start`; what is inside it is the engine's to judge."""
    first = data[start:start + 1]
    if first == b'"':
        return _string_end(data, start)
    if first not in (b"{", b"["):
        match = _JSON_PLAIN.match(data, start)
        if not match:
            raise BadRequest("the request's body is no JSON: a value is missing")
        return int(match.end())
    depth, at = 0, start
    while True:
        match = _JSON_STRUCTURE.match(data, at)
        if not match:
            raise BadRequest("the request's body is no JSON: an unfinished object or list")
        sign, at = match.group(1), match.end()
        if sign == b'"':
            at = _string_end(data, at - 1)
        elif sign in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise BadRequest("the request's body is nested too deeply")
        else:
            depth -= 1
            if not depth:
                return int(at)


def asked_in_json(data: Any) -> Asked:
    """The top-level `model` and `stream` of a JSON object, without decoding what surrounds them: a body may be 200 MB.

    `data` is bytes or an mmap. BadRequest for anything but one object, a model that is no text, and two different models:
    the proxy and an engine might each believe another one.
    """
    at = _JSON_GAP.match(data, 3 if data[:3] == b"\xef\xbb\xbf" else 0).end()
    if data[at:at + 1] != b"{":
        raise BadRequest("the request's body is no JSON object")
    at = _JSON_GAP.match(data, at + 1).end()
    found: dict[bytes, list[tuple[int, int]]] = {b"model": [], b"stream": []}
    more = not _JSON_END.match(data, at)
    while more:
        key, at = _json_key(data, at)
        end = _value_end(data, at)
        if key in found:
            found[key].append((at, end))
        sign = _JSON_NEXT.match(data, end)
        if not sign:
            raise BadRequest("the request's body is no JSON: a comma is due, or something follows the object")
        at, more = sign.end(), sign.group(1)[:1] == b","
    models = [_json_value(data, *span) for span in found[b"model"]]
    for model in models:
        if model is not None and not isinstance(model, str):
            raise BadRequest("model must be a text")
        if model != models[0]:
            raise BadRequest("the request names two different models")
    stream = found[b"stream"] and bytes(data[slice(*found[b"stream"][-1])]) == b"true"
    return Asked(models[0] if models else None, bool(stream), tuple(found[b"model"]), True)


def _json_key(data: Any, at: int) -> tuple[bytes, int]:
    """(the key that begins at `at`, where its value begins)."""
    plain = _JSON_KEY.match(data, at)
    if plain:
        return plain.group(1), plain.end()
    if data[at:at + 1] != b'"':
        raise BadRequest("the request's body is no JSON: a key is due")
    end = _string_end(data, at)
    colon = _JSON_GAP.match(data, end).end()
    if data[colon:colon + 1] != b":":
        raise BadRequest("the request's body is no JSON: a colon is due")
    key: str = _json_value(data, at, end)
    return key.encode("utf-8", "surrogatepass"), _JSON_GAP.match(data, colon + 1).end()


def _json_value(data: Any, start: int, end: int) -> Any:
    try:
        return json.loads(str(data[start:end], "utf-8"))
    except (ValueError, RecursionError):
        raise BadRequest("the request's body is no JSON") from None


_DISPOSITION = Pattern(r"(?im)^content-disposition:[ \t]*form-data[ \t]*(.*?)\r?$")
_PARAMETER = Pattern(r';[ \t]*([^\s=;"]+)=("(?:[^"\\]|\\.)*"|[^\s;"]*)[ \t]*')


def _field_name(head: str) -> str:
    """The name of a form's field, from the header of its part; what a quoted file name holds is no parameter."""
    line = _DISPOSITION.search(head)
    parameters: list[tuple[str, str]] = _PARAMETER.findall(line.group(1)) if line else []
    return next((value.strip('"') for name, value in parameters if name.lower() == "name"), "")


def asked_in_form(data: Any, content_type: str) -> Asked:
    """The `model` field of a multipart/form-data body (RFC 7578), as audio and image requests send it."""
    match = re.search(r'boundary=(?:"([^"\r\n]{1,70})"|([^\s;,"]{1,70}))', content_type)
    if not match:
        raise BadRequest("multipart without a boundary")
    mark = b"--" + (match.group(1) or match.group(2)).encode("latin-1")
    found: list[tuple[int, int]] = []
    at = data.find(mark)
    while at >= 0:
        head_start = at + len(mark)
        following = data.find(b"\r\n" + mark, head_start)
        if following < 0:
            break
        head_end = data.find(b"\r\n\r\n", head_start, following)
        if head_end >= 0:
            head = bytes(data[head_start:min(head_end, head_start + 8192)]).decode("latin-1")
            if _field_name(head) == "model":
                found.append((head_end + 4, following))
        at = following + 2
    models = {bytes(data[start:end]).decode("utf-8", "replace") for start, end in found}
    if len(models) > 1:
        raise BadRequest("the request names two different models")
    return Asked(models.pop() if models else None, False, tuple(found), quoted=False)


class Upload:
    """A request's body: in memory, or in a temp file when it is large."""

    def __init__(self, limit: int, decoder: Callable[[bytes], Iterator[bytes]] | None = None) -> None:
        self.size = 0
        self.data: Any = b""
        self._limit, self._decoder = limit, decoder
        self._pieces: list[bytes] = []
        self._file: Any = None

    def add(self, data: bytes) -> None:
        for piece in self._decoder(data) if self._decoder else (data,):
            self.size += len(piece)
            if self.size > self._limit:
                raise BodyTooLarge(limit=size_text(self._limit), hint="")
            if self._file is None and self.size > IN_MEMORY:
                self._spill()
            if self._file is None:
                self._pieces.append(piece)
            else:
                self._store(piece)

    def _spill(self) -> None:
        import tempfile

        try:
            self._file = tempfile.TemporaryFile(buffering=0)
        except OSError as error:
            if error.errno in OUR_OWN_LACK:
                raise
            raise BodyTooLarge(limit="what can be kept", hint=f": {error.strerror}") from None
        for piece in self._pieces:
            self._store(piece)
        self._pieces = []

    def _store(self, piece: bytes) -> None:
        view = memoryview(piece)
        try:
            while view:
                view = view[self._file.write(view):]
        except OSError as error:
            raise BodyTooLarge(limit="what the disk has room for", hint=f": {error.strerror}") from None

    def finish(self) -> None:
        """All has come: `data` is readable now, as bytes or as a map of the file."""
        if self._decoder:
            self.add(b"")
        if self._file is None:
            self.data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces = []
        else:
            import mmap

            self.data = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def send(self, wire: Wire, start: int, end: int) -> None:
        """A part of it to a wire."""
        view = memoryview(self.data)
        for at in range(start, end, SEND_PIECE):
            wire.write(view[at:min(at + SEND_PIECE, end)], heed=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()  # the map goes with its last view


def body_decoder(coding: str, limit: int) -> Callable[[bytes], Iterator[bytes]] | None:
    """A decoder for a request's Content-Encoding, None for identity. Engines decode none of them. UnsupportedCoding."""
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return None
    if coding in ("gzip", "x-gzip"):
        import zlib

        unzip: Any = zlib.decompressobj(31)
        broken: Any = zlib.error
    elif coding == "zstd":
        try:
            from compression import zstd  # type: ignore[import-not-found,unused-ignore]  # Python 3.14
        except ImportError:
            hint = "; in Codex set features.enable_request_compression = false"
            raise UnsupportedCoding(coding="zstd", hint=hint) from None
        unzip, broken = zstd.ZstdDecompressor(), zstd.ZstdError
    else:
        raise UnsupportedCoding(coding=client_safe(coding[:40]), hint=": send it plain or in gzip")

    def decode(data: bytes) -> Iterator[bytes]:
        """Pieces of bounded size, so that a bomb ends at the body's limit; b"" says that nothing more comes."""
        if not data and not unzip.eof:
            raise BadRequest(f"the request's body in {coding} is cut short")
        try:
            more = bool(data)
            while more and not unzip.eof:
                yield unzip.decompress(data, PIECE * 4)
                data = getattr(unzip, "unconsumed_tail", b"")  # zstd keeps what it has not decoded yet
                more = bool(data) or not getattr(unzip, "needs_input", True)
        except broken:
            raise BadRequest(f"the request's body is no valid {coding}") from None
        if data or unzip.unused_data:
            raise BadRequest(f"something follows the request's body in {coding}")

    return decode


# ----- one request


@dataclass(frozen=True)
class Route:
    """Where a model lives."""

    model: str
    host: Host
    engine: str
    upstream: str


class Exchange:
    """One request and its response on a client's connection."""

    method = path = query = ""
    minor = 1
    keep = False  # may the connection carry another request after this one?
    fields = Fields("")
    length = 0  # of the request's body
    read_on = True  # may unread body stand in the connection?
    upload: Upload | None = None
    asked = Asked()
    route: Route | None = None  # once it is on its way to an engine
    queued = 0.0  # seconds until its engine took it
    status = 0  # of the response; 0: none was begun
    first_byte = 0.0  # seconds until the response began
    events = 0  # of a stream, so far: about a token each
    _chunked = False  # is the response's body sent in chunks?
    _events = False  # is it an event stream?
    _opened = False  # was it begun by us, in the engine's silence?
    _relayed = False  # has a byte of the engine's body gone out?
    _last = (b"", b"")  # the last two pieces of it: there an engine reports its tokens
    _pending = b""  # the response's header block, until it can travel with the first of its body
    _tail = b"\n\n"  # the last bytes of an event stream: a comment may stand only between events

    def __init__(self, proxy: Proxy, client: Wire, head: str) -> None:
        self.proxy, self.client, self._head = proxy, client, head
        self.started = self.last_write = time.monotonic()

    def run(self) -> None:
        """Answer it, whatever comes. ClientGone when nobody is there to be answered."""
        try:
            self.parse()
            handler, admin = self.proxy.find(self.method, self.path)
            self.authorise(admin)
            if self.method == "OPTIONS":
                self.reply(204, b"", self._preflight())
            elif self.fields.has_token("connection", "upgrade") and self.fields.has_token("upgrade", "websocket"):
                self.keep = False
                raise UpgradeRefused()
            else:
                if handler is None:
                    raise self.unknown_path()
                self.receive()
                handler(self)
        except ClientGone:
            raise
        except GuardError as error:
            self.refuse(error)
        except OSError as error:
            if error.errno not in OUR_OWN_LACK:
                raise
            log(f"a request cannot be served: {error.strerror}", WARN)
            self.client.waits_since = 0.0  # we owe it an answer
            self.proxy.make_room()  # for the next one
            self.keep = False
            self.refuse(TooManyConnections())
        finally:
            if self.route:
                self.proxy.counters.end(self, reported(b"".join(self._last)[-8192:]))
            if self.upload:
                self.upload.close()

    # ----- parse

    def parse(self) -> None:
        """The request line and the fields, strictly: BadRequest closes the connection, since where the next request begins
        is then unknown."""
        line, _, block = self._head.partition("\r\n")
        match = _REQUEST_LINE.fullmatch(line)
        if not match:
            raise BadRequest("malformed request line")
        self.method, target, major, minor = match.groups()
        if major != "1":
            raise BadRequest("only HTTP/1.1 is spoken here")
        self.minor = min(1, int(minor))
        try:
            self.fields = Fields(block)
            self.length = body_length(self.fields, 0, self.minor)
        except ProtocolError as error:
            raise BadRequest(str(error)) from None
        self.read_on = self.length != 0
        if self.minor and "host" not in self.fields:
            raise BadRequest("a Host field is due")
        self._split(target)
        self.keep = self.minor == 1 and not self.fields.has_token("connection", "close")

    def _split(self, target: str) -> None:
        """origin-form, or absolute-form whose authority is dropped: this is no forward proxy, nothing is ever dialled."""
        if self.method not in _METHODS:
            raise MethodNotAllowed(method=self.method[:20])
        if not target.startswith("/"):
            match = re.fullmatch(r"(?i)https?://[^/?#]*([/?].*)?", target)
            if match:
                target = match.group(1) or "/"
            elif target != "*" or self.method != "OPTIONS":
                raise BadRequest("malformed request target")
        if "#" in target:
            raise BadRequest("malformed request target")
        path, _, self.query = target.partition("?")
        if path.startswith("//"):
            path = "/" + path.lstrip("/")
        self.path = path if path.startswith("/upstream/") else tidy_path(path)
        if self.path.startswith("/upstream/") and self.path != path:
            raise self.unknown_path()  # what is below it travels as it was sent, so it has to be spelt out

    def authorise(self, admin: bool) -> None:
        """Unauthorised unless one of the keys that were sent is good; whether a model exists is not told."""
        proxy = self.proxy.config.proxy
        wanted = proxy.admin_keys if admin and proxy.admin_keys else proxy.api_keys + proxy.admin_keys if proxy.api_keys else ()
        if not wanted or self.method == "OPTIONS" or self.path in _OPEN_PATHS:
            return
        import hmac

        good = False
        for sent in self._keys_sent():
            for key in wanted:
                good |= hmac.compare_digest(sent.encode("latin-1", "replace"), key.encode())
        if not good:
            raise Unauthorised(what="one of the admin_keys" if admin and proxy.admin_keys else "a valid API key")

    def _keys_sent(self) -> Iterator[str]:
        scheme, _, word = self.fields.get("authorization").partition(" ")
        word = word.strip()
        if scheme.lower() == "bearer" and word:
            yield word
        elif scheme.lower() == "basic":
            import base64

            try:
                yield base64.b64decode(word, validate=True).decode("latin-1").partition(":")[2]
            except ValueError:
                pass
        if self.fields.get("x-api-key"):
            yield self.fields.get("x-api-key")

    def unknown_path(self) -> GuardError:
        path = self.path
        if path.startswith("/v1/v1/"):
            return UnknownPath(path=printable(path), hint=f", did you mean {path[3:]}?")
        return UnknownPath(path=printable(path), hint=did_you_mean(path, _KNOWN_PATHS))

    def receive(self) -> None:
        """Read the body."""
        limit = self.proxy.config.proxy.max_body
        expects = self.fields.get("expect").lower() if self.minor else ""
        if expects not in ("", "100-continue"):
            raise ExpectationFailed()
        if self.length > limit:
            raise BodyTooLarge(limit=size_text(limit), hint="")
        decoder = body_decoder(self.fields.get("content-encoding"), limit) if self.length else None
        if not self.length:
            return
        if expects and not self.client.buffer:  # a client that has begun to send needs no leave
            self.client.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.upload = Upload(limit, decoder)
        body = Body(self.client, self.length)
        begun, received = time.monotonic(), 0
        try:
            while True:
                self.client.waits_since = begun + received / BODY_RATE
                data = body.read(self.client.waits_since + BODY_PATIENCE)
                if not data:
                    break
                received += len(data)
                self.upload.add(data)
        except ProtocolError as error:
            self.keep = False
            raise BadRequest(str(error)) from None
        except DeadlinePassed:
            raise RequestTimeout(part="body") from None
        except PeerGone:
            raise ClientGone() from None
        self.read_on, self.client.waits_since = False, 0.0
        self.upload.finish()

    # ----- route and forward

    def forward(self, path: str) -> None:
        """To the engine of the model that the request names."""
        content_type = self.fields.get("content-type")
        if leaves(path):
            raise BadRequest("the path leaves its engine")
        named = set(query_values(self.query, "model"))
        if len(named) > 1:
            raise BadRequest("the request names two different models")
        query_model = named.pop() if named else None
        if self.upload is not None and content_type.lower().startswith("multipart/"):
            self.asked = asked_in_form(self.upload.data, content_type)
        elif self.upload is not None and self.upload.size:
            self.asked = asked_in_json(self.upload.data)
        elif self.method == "POST" and query_model is None:
            raise BadRequest("the request has no body")
        if None not in (query_model, self.asked.model) and query_model != self.asked.model:
            raise BadRequest("the request names two different models")
        route = self.proxy.route(self.asked.model if self.asked.model is not None else query_model)
        query = self.query
        if query_model is not None and route.upstream != route.model:
            renamed = "model=" + quote(route.upstream, "")
            query = "&".join(renamed if unquote(part.partition("=")[0]) == "model" else part for part in query.split("&"))
        # the path was decoded: an escaped CRLF in it must not become one in the engine's request line
        self.forward_to(route, quote(path, "/:@!$&'()*+,;=") + ("?" + query if query else ""))

    def forward_to(self, route: Route, target: str) -> None:
        """Start the engine where it must be, send the request, relay the answer. An engine that died since it was last seen
        is started again once, as long as nothing was sent to it."""
        self.route = route
        self.proxy.counters.begin(self)
        for last in (False, True):
            lease = route.host.acquire(route.engine, self.waiting)
            self.queued = self.queued or time.monotonic() - self.started
            try:
                self._send_and_relay(route, target)
                return
            except EngineLost as error:
                log(f"host {route.host.config.name}: engine {route.engine}: {error.fields.get('detail', error)}", WARN)
                route.host.suspect(route.engine)
                if last or not error.fields.get("refused") or not route.host.config.engines[route.engine].managed:
                    raise
            finally:
                lease.release()

    def waiting(self, committed: bool) -> None:
        """Called while this request queues for its engine."""
        self.client.end_turn()
        if len(self.client.buffer) <= PIECE and not self.client.look():
            raise ClientGone()
        if committed and self.asked.stream and time.monotonic() - self.last_write >= self.proxy.config.proxy.stream_keepalive:
            self.keep_alive()

    def _send_and_relay(self, route: Route, target: str) -> None:
        api = route.host.api(route.engine)
        head, parts = self._request(route, api, target)
        wire = api.pool.take()
        response = None
        if wire is not None:
            response = self._exchange(wire, head, parts)  # None: the kept connection had gone stale
        if response is None:
            try:
                wire = api.pool.connect(time.monotonic() + 10.0, self.client)
            except DeadlinePassed:
                raise EngineLost("the engine does not answer") from None
            response = self._exchange(wire, head, parts)
        if response is None:
            raise EngineLost("the engine closed the connection before it answered")
        assert wire is not None
        done = False
        try:
            self.relay(response)
            done = response.reusable and response.body.complete and not wire.buffer
        finally:
            if done:
                api.pool.give(wire)
            else:
                wire.close()

    def _request(self, route: Route, api: EngineApi, target: str) -> tuple[bytes, list[Any]]:
        """The header block for the engine, and the body as (start, end) parts of the upload and bytes between them."""
        parts: list[Any] = []
        length = 0
        if self.upload is not None:
            at = 0
            name = json.dumps(route.upstream).encode() if self.asked.quoted else route.upstream.encode()
            for start, end in self.asked.spans if route.upstream != route.model else ():
                parts += [(at, start), name]
                at = end
            parts.append((at, self.upload.size))
            length = sum(len(part) if isinstance(part, bytes) else part[1] - part[0] for part in parts)
        without = _NOT_FORWARDED | {"accept-encoding"} if self.asked.stream else _NOT_FORWARDED
        fields = [("Host", api.address.authority), *self.fields.end_to_end(without)]
        if api.key:
            fields.append(("Authorization", "Bearer " + api.key))
        if self.upload is not None or self.method in ("POST", "PUT", "PATCH"):
            fields.append(("Content-Length", str(length)))
        return request_head(self.method, api.address.base + target, fields), parts

    def _exchange(self, wire: Wire, head: bytes, parts: list[Any]) -> Response | None:
        """Send a request, wait for the head of its answer; None when the connection ended before a byte of it came."""
        keep = self.proxy.config.proxy.stream_keepalive if self.asked.stream else NEVER
        sent_all = True
        try:
            try:
                self._send(wire, head, parts)
            except PeerGone:
                sent_all = False  # it may have answered before it had read all: that answer counts
            while True:
                try:
                    response = Response(wire, self.method, time.monotonic() + keep, self.client)
                    response.reusable &= sent_all
                    return response
                except DeadlinePassed:
                    self.keep_alive()
        except PeerGone:
            wire.close()
            if wire.buffer:
                raise EngineLost("the engine closed the connection in the midst of its answer") from None
            return None
        except ProtocolError as error:
            wire.close()
            raise EngineLost("the engine's answer is malformed", detail=f"malformed answer: {error}") from None
        except HeadTooLarge:
            wire.close()
            raise EngineLost("the engine's answer is malformed", detail="endless header") from None
        except BaseException:
            wire.close()
            raise

    def _send(self, wire: Wire, head: bytes, parts: list[Any]) -> None:
        upload = self.upload
        if upload is not None and upload.size <= PIECE:
            body = [part if isinstance(part, bytes) else upload.data[slice(*part)] for part in parts]
            wire.write(b"".join([head, *body]))
            return
        wire.write(head)
        for part in parts:
            if isinstance(part, bytes):
                wire.write(part)
            elif upload is not None:
                upload.send(wire, *part)

    # ----- answer

    def relay(self, response: Response) -> None:
        """The engine's answer to the client: bytes as they come. One that breaks off never gets a clean end: EngineLost."""
        body = response.body
        try:
            if self._opened and not (response.status == 200 and response.is_event_stream):
                self._late_answer(response)
            else:
                self._begin_relay(response)
                self._copy(body)
        except (PeerGone, ProtocolError, DeadlinePassed) as error:
            detail = f"its answer broke off: {error}"
            raise EngineLost("the engine's answer broke off", detail=detail) from None
        self.finish()

    def _late_answer(self, response: Response) -> None:
        """An answer that is no stream, for a client that was already sent the beginning of one: it becomes an event."""
        try:
            whole = response.body.all(time.monotonic() + BODY_PATIENCE, IN_MEMORY, self.client)
            if not isinstance(json.loads(whole), dict):
                raise ValueError
        except (ValueError, RecursionError, BodyTooLarge):
            raise EngineLost("the engine did not answer with a stream") from None
        event = b"event: error\n" if response.status >= 400 and not self._chat_events() else b""
        self.payload(b"%bdata: %b\n\n" % (event, b" ".join(whole.splitlines())))

    def _begin_relay(self, response: Response) -> None:
        if self._opened:
            return
        fields, event_stream = response.fields.end_to_end(_NOT_RETURNED), response.is_event_stream
        length: int | str = response.body.length
        if self.method == "HEAD":
            length = response.fields.get("content-length")
        elif response.status in (204, 304):
            length = ""
        # a comment of ours may stand neither in a body of a fixed length nor in a compressed one
        self._events = event_stream and response.body.length < 0 and "content-encoding" not in response.fields
        if event_stream and "x-accel-buffering" not in response.fields:
            fields.append(("X-Accel-Buffering", "no"))
        self.begin(response.status, response.reason, fields, length)

    def _copy(self, body: Body) -> None:
        silence = self.proxy.config.proxy.stream_keepalive if self.asked.stream and self._events else NEVER
        if not body.wire.buffer:
            self._flush()
        while not body.complete:
            try:
                data = body.read(NEVER if silence == NEVER else time.monotonic() + silence, self.client)
            except DeadlinePassed:
                self.keep_alive()
                continue
            if data:
                self._relayed = True
                self._last = self._last[1], data
                if self._events:
                    self.events += data.count(b"\n\n")
                self.payload(data, body.complete)

    def begin(self, status: int, reason: str, fields: Iterable[tuple[str, str]], length: int | str) -> None:
        """Start the response. `length`: bytes, "" for no body at all, or negative when nobody knows: chunks then, or until
        the connection closes for HTTP/1.0. It goes out with the first of the body, or with _flush."""
        lines = [f"{name}: {value}\r\n" for name, value in fields]
        if isinstance(length, str):
            if length:
                lines.append(f"Content-Length: {length}\r\n")
        elif length >= 0:
            lines.append("Content-Length: %d\r\n" % length)
        elif self.method == "HEAD":
            pass
        elif self.minor:
            self._chunked = True
            lines.append("Transfer-Encoding: chunked\r\n")
        else:
            self.keep = False
        if not self.keep or self.read_on or self.proxy.draining:
            self.keep = False
            lines.append("Connection: close\r\n")
        self.status = status
        self.first_byte = time.monotonic() - self.started
        self._pending = ("HTTP/1.1 %d %s\r\n%s\r\n" % (status, reason, "".join(lines))).encode("latin-1", "replace")

    def payload(self, data: bytes, last: bool = False) -> None:
        """Some of the response's body; the `last` of it goes out together with what ends it."""
        self._tail = data if len(data) > 3 else (self._tail + data)[-4:]
        if self._chunked:
            data = b"%b%x\r\n%b\r\n%b" % (self._pending, len(data), data, _LAST_CHUNK if last else b"")
            self._chunked = not last
        elif self._pending:
            data = self._pending + data
        self._pending = b""
        self.write(data)

    def finish(self) -> None:
        """The response is complete."""
        if self._chunked:
            self.write(self._pending + _LAST_CHUNK)
            self._pending = b""
        self._flush()

    def _flush(self) -> None:
        if self._pending:
            data, self._pending = self._pending, b""
            self.write(data)

    def write(self, data: bytes) -> None:
        try:
            self.client.write(data, STALL if self.route else OWN_STALL)
        except PeerGone:
            raise ClientGone() from None

    def keep_alive(self) -> None:
        """A comment on a silent event stream, between events only: clients give up after 300 s without a header or a byte.
        When the engine has not answered yet the response begins here, and a later error arrives as an event."""
        if not self.status:
            self._opened = self._events = True
            self.begin(200, "OK", [("Content-Type", "text/event-stream"), *_STREAM_FIELDS, *self._cors()], -1)
        if self._tail.endswith((b"\n\n", b"\r\n\r\n")):
            self.payload(b": keepalive\n\n")
        self.last_write = time.monotonic()

    def reply(self, status: int, body: bytes, fields: Iterable[tuple[str, str]] = (), content_type: str = "") -> None:
        """A whole response of our own."""
        from http import HTTPStatus

        typed = [("Content-Type", content_type)] if content_type else []
        phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else "Refused"  # refusal_status may be any
        self.begin(status, phrase, [*typed, *fields, *self._cors()], "" if status == 204 else len(body))
        if body and self.method != "HEAD":
            self.payload(body)
        self.finish()

    def json(self, content: Any, status: int = 200, fields: Iterable[tuple[str, str]] = ()) -> None:
        self.reply(status, json.dumps(content).encode(), fields, "application/json; charset=utf-8")

    def refuse(self, error: GuardError) -> None:
        """An error becomes a response: the one place where that happens."""
        if isinstance(error, (BadRequest, MethodNotAllowed)) and not self.upload:
            self.keep = self.keep and not self.read_on
        if self._pending:  # nothing of the response that was begun has gone out: it can still be another one
            self._pending, self.status, self._chunked, self._events = b"", 0, False, False
        if self.status:
            self._break_off(error)
            return
        status = self._status_of(error)
        self.proxy.counters.refused(error.type)
        more = [("x-should-retry", str(error.retry).lower())] if error.retry is not None else []
        if isinstance(error, Unauthorised):
            more.append(("WWW-Authenticate", "Bearer"))
        self.json(self._error(error, status), status, more)
        if self.read_on:
            self.linger()

    def _break_off(self, error: GuardError) -> None:
        """An error after the response began: an event where the client can read one. What the engine left unfinished gets no
        clean end, so that nobody takes it for whole."""
        self.keep = False
        if self._events and self._tail.endswith((b"\n\n", b"\r\n\r\n")):
            event = "" if self._chat_events() else "event: error\n"
            self.payload((f"{event}data: {json.dumps(self._error(error, error.status))}\n\n").encode())
            if not self._relayed:
                self.finish()
        elif not self.minor:  # a body until close is broken by nothing but a reset
            linger = (1).to_bytes(4, sys.byteorder) + bytes(4)
            self.client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def _chat_events(self) -> bool:
        """Are events of this path unnamed (OpenAI chat, llama.cpp), or named (Anthropic, /v1/responses)?"""
        return not (self._speaks("messages") or self._speaks("responses"))

    def _speaks(self, name: str) -> bool:
        """Is it a path of that API, with or without /v1, or below /upstream/MODEL?"""
        return "/" + name + "/" in self.path + "/"

    def _status_of(self, error: GuardError) -> int:
        """The error's status, or for a client that would retry one it does not know, the status that stops it."""
        if error.status in (413, 415, 417, 423, 431):
            agent = self.fields.get("user-agent").lower()
            for prefix, status in self.proxy.config.proxy.refusal_status.items():
                if agent.startswith(prefix.lower()):
                    return status
        return error.status

    def _error(self, error: GuardError, status: int) -> dict[str, Any]:
        """The body of a refusal, in Anthropic's shape on Anthropic's paths."""
        text = f"model {printable(self.route.model)}: {error}" if self.route else str(error)
        if self._speaks("messages"):
            return {"type": "error", "error": {"type": error.type, "message": text, "code": status}}
        content: dict[str, Any] = {"error": {"code": status, "message": text, "type": error.type, "param": None}}
        if self.status and self._speaks("responses"):
            content.update(type="error", code=error.type, message=text, param=None)
        return content

    def linger(self) -> None:
        """Read on for a moment what a refused client still sends: closing at once would reset the connection, and destroy
        the answer before it is read."""
        self._flush()
        deadline = time.monotonic() + LINGER
        try:
            self.client.sock.shutdown(socket.SHUT_WR)
            while self.client.read(deadline):
                pass
        except (OSError, DeadlinePassed):
            pass

    def _cors(self) -> list[tuple[str, str]]:
        origin = self.fields.get("origin")
        return [("Access-Control-Allow-Origin", origin)] if origin else []

    def _preflight(self) -> list[tuple[str, str]]:
        wanted = self.fields.get("access-control-request-headers") or "authorization, content-type, x-api-key"
        return [
            ("Access-Control-Allow-Methods", "GET, POST, OPTIONS"),
            ("Access-Control-Allow-Headers", wanted),
            ("Access-Control-Max-Age", "86400"),
        ]


_STREAM_FIELDS = (("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))


def leaves(path: str) -> bool:
    """Would a path climb out of its folder, when an engine decodes it and resolves the dots?"""
    path = unquote(unquote(path))
    return "." in path and any(segment in (".", "..") for segment in re.split(r"[/\\]", path))


def tidy_path(path: str) -> str:
    """Our own and the API's paths as people type them: runs of slashes are one, a last slash is none, escapes are decoded."""
    path = unquote(path)
    if "//" in path:
        path = re.sub("//+", "/", path)
    return path[:-1] if path.endswith("/") and path != "/" else path


# ----- the server


_REPORTED = Pattern(
    rb'"((?:prompt|completion|input|output)_tokens|prompt_n|predicted_n|predicted_per_second)":\s*(\d+(?:\.\d+)?)'
)


_REPORT_WORDS = (  # the later one of a kind counts
    (b"prompt_n", "prompt"), (b"input_tokens", "prompt"), (b"prompt_tokens", "prompt"),
    (b"predicted_n", "generated"), (b"output_tokens", "generated"), (b"completion_tokens", "generated"),
    (b"predicted_per_second", "rate"),
)


def reported(end: bytes) -> dict[str, float]:
    """What the end of an answer reports: {"prompt", "generated"} in tokens, {"rate"} in tokens a second. By `usage` (OpenAI's,
    Anthropic's) and llama-server's `timings`; in a text the quotes of such a word are escaped, so it is no report."""
    found = dict(_REPORTED.findall(end))
    return {word: float(found[name]) for name, word in _REPORT_WORDS if name in found} if found else {}


class Histogram:
    """How long things took, in seconds, as Prometheus counts them."""

    BOUNDS = (0.05, 0.2, 1.0, 5.0, 15.0, 60.0, 300.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.BOUNDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        at = 0
        while at < len(self.BOUNDS) and seconds > self.BOUNDS[at]:
            at += 1
        self.counts[at] += 1
        self.total += seconds


class Counters:
    """What requests did, by model; read by /metrics and /status."""

    RATES = 120  # of the last answers that reported one

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: dict[Exchange, None] = {}  # those that are on their way to an engine, oldest first
        self.requests: dict[tuple[str, int], int] = {}
        self.times: dict[str, tuple[Histogram, Histogram, Histogram]] = {}  # of the whole, of its queue, to its first byte
        self.tokens: dict[tuple[str, str], float] = {}  # (model, "prompt" or "generated")
        self.rates: deque[tuple[str, float, float]] = deque(maxlen=self.RATES)  # (model, when, tokens a second)
        self.refusals: dict[str, int] = {}  # by type

    def begin(self, exchange: Exchange) -> None:
        with self.lock:
            self.running[exchange] = None

    def end(self, exchange: Exchange, report: dict[str, float]) -> None:
        assert exchange.route
        model, key = exchange.route.model, (exchange.route.model, exchange.status)
        with self.lock:
            del self.running[exchange]
            self.requests[key] = self.requests.get(key, 0) + 1
            if model not in self.times:
                self.times[model] = (Histogram(), Histogram(), Histogram())
            whole, queue, first_byte = self.times[model]
            whole.add(time.monotonic() - exchange.started)
            queue.add(exchange.queued)
            first_byte.add(exchange.first_byte)
            for word in report.keys() & {"prompt", "generated"}:
                self.tokens[model, word] = self.tokens.get((model, word), 0.0) + report[word]
            if report.get("rate"):
                self.rates.append((model, time.time(), report["rate"]))

    def refused(self, kind: str) -> None:
        with self.lock:
            self.refusals[kind] = self.refusals.get(kind, 0) + 1

    def in_flight(self) -> dict[str, int]:
        """By model, those that ended included, as 0: a gauge that vanishes tells nothing."""
        with self.lock:
            counts = {model: 0 for model, _ in self.requests}
            for exchange in self.running:
                if exchange.route:
                    counts[exchange.route.model] = counts.get(exchange.route.model, 0) + 1
        return counts


class Connection:
    """One client's connection, served by one thread."""

    __slots__ = ("proxy", "wire", "idle_since", "used", "_cpus")

    def __init__(self, proxy: Proxy, sock: socket.socket, turn: Any = None) -> None:
        self.proxy = proxy
        self.wire = Wire(sock)
        self.wire.waits_since, self.wire.turn = time.monotonic(), turn
        self.idle_since: float | None = None  # None: at work
        self.used = False  # has it carried a request?
        self._cpus: frozenset[int] = frozenset()  # of the thread that serves it

    def may_go(self) -> bool:
        """Is it idle, and may it be hung up while the proxy drains? Who has just connected has not asked yet."""
        return self.idle_since is not None and (self.used or time.monotonic() - self.idle_since > FIRST_REQUEST)

    def serve(self, cpus: frozenset[int]) -> frozenset[int]:
        """All its requests, by a thread that is on these CPUs -> those that it is on then."""
        self._cpus = cpus
        try:
            while self._one():
                pass
        finally:
            self.proxy.gone(self)
            self.wire.close()
        return self._cpus

    def _one(self) -> bool:
        """One request; False when it was the last one."""
        head = self._head()
        if not head:
            return False
        self.used = True
        self.wire.waits_since = 0.0
        self._cpus = self.proxy.one_cpu.join(self._cpus)
        exchange = Exchange(self.proxy, self.wire, head)
        try:
            exchange.run()
        except ClientGone:
            return False
        except Exception:
            import traceback

            log(f"internal error, this connection is closed: {traceback.format_exc()}", ERROR)
            exchange.keep = False
            self._refuse(exchange, GuardError("internal error, see the proxy's log"))
        return exchange.keep

    @staticmethod
    def _refuse(exchange: Exchange, error: GuardError) -> None:
        try:
            exchange.refuse(error)
        except ClientGone:
            pass

    def _head(self) -> str:
        """The next header block; "" when there is none, or when it was refused."""
        wire = self.wire
        try:
            if not wire.buffer:
                self.idle_since = wire.waits_since = time.monotonic()
                if self.proxy.draining and self.used:
                    return ""
                if not self.used:
                    wire.look()  # a request mostly comes with its connection
                if not wire.buffer and not wire.fill(self.idle_since + IDLE_PATIENCE):
                    return ""
                self.idle_since = None
            wire.waits_since = time.monotonic()
            deadline = wire.waits_since + HEAD_PATIENCE
            while wire.buffer[:2] in (b"\r\n", b"\r", b""):  # an empty line before a request is harmless (RFC 9112, 2.2)
                wire.buffer = _EMPTY_LINES.sub(b"", wire.buffer, 1)
                if len(wire.buffer) < 2 and not wire.fill(deadline):
                    return ""
        except (DeadlinePassed, PeerGone):
            return ""
        try:
            return wire.head(deadline)
        except PeerGone:
            return ""
        except DeadlinePassed:
            error: GuardError = RequestTimeout(part="header")
        except HeadTooLarge as large:
            error = large
        self._refuse(Exchange(self.proxy, wire, ""), error)
        return ""


class Crew:
    """The threads that serve connections. To start one costs more than many a request, so when its connection has ended each
    waits for another one for a while; who waits for the shortest time is called first, and the others may go."""

    PATIENCE = 60.0  # seconds
    KEPT = 64  # threads that may wait

    class Seat:
        """Where a thread waits, for the bell."""

        __slots__ = ("bell", "connection")

        def __init__(self, connection: Connection) -> None:
            self.connection: Connection | None = connection
            self.bell = threading.Lock()
            self.bell.acquire()  # released, it rings

    def __init__(self) -> None:
        self._waiting: list[Crew.Seat] = []
        self._lock = threading.Lock()

    def serve(self, connection: Connection) -> None:
        """Have it served. RuntimeError when there can be no more threads."""
        with self._lock:
            seat = self._waiting.pop() if self._waiting else None
        if seat is None:
            _thread.start_new_thread(self._run, (self.Seat(connection),))  # threading's would wait for it to begin
        else:
            seat.connection = connection
            seat.bell.release()

    def _run(self, seat: Seat) -> None:
        cpus: frozenset[int] = frozenset()
        while seat.connection:
            cpus = seat.connection.serve(cpus)
            seat.connection = None
            with self._lock:
                if len(self._waiting) >= self.KEPT:
                    return
                self._waiting.append(seat)
            if not seat.bell.acquire(timeout=self.PATIENCE):
                with self._lock:
                    if seat in self._waiting:
                        self._waiting.remove(seat)
                        return
                seat.bell.acquire()  # it was called in this moment


class OneCpu:
    """The CPU that the threads which serve connections keep to, as long as others leave it to them.

    They take turns at the interpreter anyway, and to hand it from one CPU to another costs more than most of what they do with
    it. Threads that start processes are no part of this: an engine gets all the CPUs that the proxy was given.
    """

    PAUSE = 1.0  # seconds from look to look, and a look comes with a request
    OTHERS = 0.4  # of a CPU's time: where others take more than that, the scheduler places us better

    def __init__(self, box: Box) -> None:
        self._box = box
        several = hasattr(os, "sched_setaffinity") and getattr(sys, "_is_gil_enabled", lambda: True)()
        self._given = frozenset(os.sched_getaffinity(0)) if several else frozenset()
        self.cpus = frozenset([max(self._given)]) if len(self._given) > 1 else self._given
        self._seen: tuple[float, float, dict[int, float]] = (0.0, 0.0, {})
        self._look_due = 0.0

    def join(self, cpus: frozenset[int]) -> frozenset[int]:
        """Go where the others are; the calling thread was left on `cpus`, and is on those that are returned."""
        if len(self._given) < 2:
            return cpus
        if time.monotonic() >= self._look_due:
            self._look()
        if self.cpus is not cpus:
            try:
                os.sched_setaffinity(0, self.cpus)
            except OSError:
                pass  # the CPU was taken from us: the next look will tell
        return self.cpus

    def _look(self) -> None:
        now, spent, busy = time.monotonic(), time.process_time(), self._box.cpu_seconds()
        (then, spent_then, busy_then), self._seen = self._seen, (now, spent, busy)
        self._look_due = now + self.PAUSE
        seconds = now - then
        if self.PAUSE / 2 < seconds < self.PAUSE * 1.25:  # a look that comes late has seen a time without much work for us
            shares = {cpu: (busy[cpu] - busy_then[cpu]) / seconds for cpu in self._given & busy.keys() & busy_then.keys()}
            self.cpus = self.choose(self.cpus, self._given, shares, (spent - spent_then) / seconds)

    @classmethod
    def choose(cls, cpus: frozenset[int], given: frozenset[int], busy: dict[int, float], ours: float) -> frozenset[int]:
        """Where to go from `cpus`: one CPU, or all that were given. `busy`: which share of its time each worked; `ours`: for us,
        on all of them together."""
        part = min(1.0, ours / (sum(busy[cpu] for cpu in cpus & busy.keys()) or 1.0))
        others = {cpu: share * (1 - part) if cpu in cpus else share for cpu, share in busy.items()}
        if len(cpus) == 1 and all(others.get(cpu, 1.0) <= cls.OTHERS for cpu in cpus):
            return cpus
        best = min(others, key=lambda cpu: others[cpu], default=None)
        return frozenset([best]) if best is not None and others[best] <= cls.OTHERS / 2 else given


# What answers a path by itself: path -> method -> (handler, does it take an admin key). A path that ends in "*" stands for
# all below it.
if TYPE_CHECKING:
    Routes = dict[str, dict[str, tuple[Callable[["Exchange"], None], bool]]]


def listens_on(listener: socket.socket) -> str:
    name = listener.getsockname()
    return f"http://{Address(*name[:2]).authority}" if isinstance(name, tuple) else f"the socket {name!r}"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; on [::] to IPv4 too. OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if ":" in host:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


class Proxy:
    """The server, its hosts and its routes. `own` holds the paths that it answers by itself (section 11)."""

    def __init__(
        self, config: Config, folder: str, own: Routes, clock: Clock | None = None, listener: socket.socket | None = None
    ) -> None:
        """`listener`: a socket that listens already (systemd's), instead of proxy.listen."""
        self.config, self.folder, self.own = config, folder, own
        self.clock = clock or Clock()
        self.events, self.counters, self.ledger = Events(), Counters(), Ledger(folder, self.clock)
        self.started, self.sha256 = self.clock.now(), own_hash()
        self.draining = False
        self.hosts: dict[str, Host] = {}
        self._connections: set[Connection] = set()
        self._host_threads: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()
        self._crew, self.one_cpu = Crew(), OneCpu(Box())
        self._full_told = -60.0  # monotonic: when it was last said that no more connections can be taken
        self._given = listener is not None
        self.listener = listener or listen(*config.proxy.listen)
        self._accepter = threading.Thread(target=self._accept, name="accept", daemon=True)
        self._accepting = True
        self._set_hosts(config)

    # ----- connections

    def start(self) -> None:
        """Accept connections from now on, in a thread."""
        self._accepter.start()

    def _accept(self) -> None:
        cpus: frozenset[int] = frozenset()  # of this thread
        somebody = select.poll()  # accept takes a descriptor before it waits, and fails without one though nobody is there
        somebody.register(self.listener, select.POLLIN)
        turn = threading.Lock()  # of the connection before
        while somebody.poll() and self._accepting:
            try:
                sock, _ = self.listener.accept()
            except OSError as error:
                if error.errno in (errno.ENOBUFS, *OUR_OWN_LACK) and self._accepting:
                    self._none_left(error)
                continue
            try:
                cpus = self.one_cpu.join(cpus)
                if len(self._connections) < self.config.proxy.max_connections or self.make_room():
                    turn.acquire(timeout=TURN)  # when all that come at once begin at once, the first answer comes late
                    turn = threading.Lock()
                    turn.acquire()
                    self._serve(Connection(self, sock, turn))
                else:
                    self._turn_away(sock)
            except Exception as error:  # this thread is needed by all the others
                log(f"a connection ended badly: {error!r}", WARN)
                sock.close()

    def _none_left(self, error: OSError) -> None:
        """No descriptor, or no memory, for one more: it waits in the kernel for what another connection's end gives back."""
        if time.monotonic() >= self._full_told + 60.0:
            self._full_told = time.monotonic()
            log(f"no more connections can be taken: {error.strerror}", WARN)
        self.make_room()
        time.sleep(0.1)  # who could not be accepted is there at once again: do not spin

    @staticmethod
    def _turn_away(sock: socket.socket) -> None:
        body = json.dumps({"error": {"code": 503, "message": str(TooManyConnections()), "type": "unavailable_error"}})
        try:
            sock.setblocking(False)
            sock.send(
                ("HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
                 "Connection: close\r\n\r\n%s" % (len(body), body)).encode()
            )
        except OSError:
            pass
        _hang_up(sock)
        sock.close()

    def make_room(self) -> bool:
        """Hang up on the connection whose client has been waited for longest: it is idle, or takes its time to send what it
        began. False when we owe every one an answer."""
        with self._lock:
            waiting = [(c.wire.waits_since, c) for c in self._connections if c.wire.waits_since]
            if not waiting:
                return False
            _, goes = min(waiting, key=lambda entry: entry[0])
            self._connections.discard(goes)  # its thread takes a moment to see it
        _hang_up(goes.wire.sock)
        return True

    def _serve(self, connection: Connection) -> None:
        with self._lock:
            self._connections.add(connection)
        try:
            self._crew.serve(connection)
        except RuntimeError as error:  # no more threads
            self.gone(connection)
            log(f"a connection cannot be served: {error}", WARN)
            connection.wire.close()

    def gone(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)

    # ----- hosts and routes

    def _set_hosts(self, config: Config) -> None:
        """Take these hosts: known ones are told, new ones get their thread, gone ones are let go as they are."""
        hosts: dict[str, Host] = {}
        for name, host_config in config.hosts.items():
            known = self.hosts.get(name)
            if known is not None and known.config.ssh == host_config.ssh:
                known.reconfigure(host_config, config.proxy)
                hosts[name] = known
                continue
            remote = Remote(host_config, self.folder)
            hosts[name] = host = Host(host_config, config.proxy, remote, self.events, self.clock, ledger=self.ledger)
            self._host_threads[name] = threading.Thread(target=host.run, name="host " + name, daemon=True)
            self._host_threads[name].start()
            threading.Thread(target=host.follow, name="follow " + name, daemon=True).start()
        for name, host in self.hosts.items():
            if hosts.get(name) is not host:
                host.close()
        self.config, self.hosts = config, hosts

    def lives(self) -> bool:
        """Do the threads that it cannot do without?"""
        return all(self._host_threads[name].is_alive() for name in self.hosts)

    def reload(self, config: Config) -> None:
        """A new configuration; nothing that is still in it is stopped or cut."""
        if config.proxy.listen != self.config.proxy.listen:
            log("proxy.listen changed: that takes a restart")
        self._set_hosts(config)
        log("configuration reloaded: {}".format(", ".join(config.hosts)))

    def find(self, method: str, path: str) -> tuple[Callable[[Exchange], None] | None, bool]:
        """(what answers this path, does it take an admin key). MethodNotAllowed; (None, False) for an unknown path."""
        entry = self.own.get(path)
        if entry is None and not is_engine_path(path) and is_engine_path("/v1" + path):
            path = "/v1" + path  # a base URL typed without /v1
        if entry is None and is_engine_path(path):
            return (lambda exchange: exchange.forward(path)), False
        if entry is None:
            entry = next((own for name, own in self.own.items() if name[-1] == "*" and path.startswith(name[:-1])), None)
        if entry is None or method == "OPTIONS":
            return None, False
        found: tuple[Callable[[Exchange], None], bool] | None
        found = entry.get("GET" if method == "HEAD" else method) or entry.get("*")
        if found is None:
            raise MethodNotAllowed(method=method)
        return found

    def route(self, model: str | None) -> Route:
        """Where that model lives; without a name the single configured one. UnknownModel, BadRequest."""
        if model is None:
            names = [name for host in self.hosts.values() for name in host.models()]
            if len(names) != 1:
                some = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
                raise BadRequest(f"no model is named; there are {some}" if names else "no model is named, and none is known")
            model = names[0]
        found = self.known(model)
        if found is None:
            for host in self.hosts.values():
                host.learn_running()
            found = self.known(model)
        if found is not None:
            return found
        names = [name for host in self.hosts.values() for name in host.models()]
        raise UnknownModel(model=printable(model[:200]), hint=did_you_mean(model, names, 3))

    def needs_admin(self, path: str) -> bool:
        """Would that path, were it ours, take an admin key?"""
        entries = [entry for name, entry in self.own.items() if name == path or (name[-1] == "*" and path.startswith(name[:-1]))]
        return any(admin for entry in entries for _, admin in entry.values())

    def known(self, model: str) -> Route | None:
        """Where a model lives, by what is known of it now."""
        for host in self.hosts.values():
            found = host.find(model)
            if found:
                return Route(model, host, *found)
        return None

    # ----- the end

    def stop_accepting(self) -> None:
        """Take no more connections; who is about to connect to a listener of systemd's waits there for the next proxy. To shut
        down a listener is to wake who waits for it, on Linux. The others get a last connection, from here."""
        self._accepting = False
        if not self._given:
            _hang_up(self.listener)
        while self._accepter.is_alive():
            try:
                with socket.socket(self.listener.family, socket.SOCK_STREAM) as knock:
                    knock.setblocking(False)
                    knock.connect_ex(self.listener.getsockname())
            except OSError:
                self.make_room()  # it takes a descriptor
            self._accepter.join(0.05)
        self.listener.close()

    def drain(self) -> bool:
        """Stop accepting, let what runs end by itself; False when drain_timeout came first."""
        self.draining = True
        self.events.close()
        self.stop_accepting()
        deadline = time.monotonic() + self.config.proxy.drain_timeout
        while time.monotonic() < deadline:
            with self._lock:
                connections = list(self._connections)
            for connection in connections:
                if connection.may_go():
                    _hang_up(connection.wire.sock)
            if not connections:
                return True
            time.sleep(0.05)
        return False


def _hang_up(sock: socket.socket) -> None:
    """Wake whoever reads this socket, with an end of stream."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


# ======================================================================================================================
# 11  Views
# ======================================================================================================================
# The paths that the proxy answers by itself, in the words of llama.cpp's router and of llama-swap where those have them.

OWN: Routes = {}
SSE_PING = 15.0  # seconds of silence before a comment


def own(method: str, path: str, admin: bool = False) -> Callable[[Any], Any]:
    """Register what answers a path."""

    def register(handler: Any) -> Any:
        OWN.setdefault(path, {})[method] = (handler, admin)
        return handler

    return register


def model_status(host: Host, engine: str, said: dict[str, Any]) -> dict[str, Any]:
    """The state of a model's engine; when that is itself a router, the model's own, as the router says."""
    state = host.engine_state(engine)
    status: dict[str, Any] = {"value": state}
    failure = host.failure(engine)
    if failure and state == "unloaded":
        status.update(failed=True, error=str(failure))
    if state == "loaded" and isinstance(said.get("status"), dict):
        status.update((key, said["status"][key]) for key in ("value", "failed", "exit_code") if key in said["status"])
    return status


def model_entry(host: Host, model: str, engine: str, said: dict[str, Any], created: float) -> dict[str, Any]:
    """One model as llama.cpp's router lists it."""
    status = model_status(host, engine, said)
    entry = {"id": model, "object": "model", "created": int(created), "owned_by": "llmguard", "status": status}
    if isinstance(said.get("meta"), dict):
        entry["meta"] = said["meta"]
    return entry


def model_list(proxy: Proxy) -> list[dict[str, Any]]:
    return [
        model_entry(host, model, engine, said, proxy.started)
        for host in proxy.hosts.values()
        for model, (engine, said) in host.models().items()
    ]


@own("GET", "/health")
def health_view(exchange: Exchange) -> None:
    exchange.json({"status": "ok"})


@own("GET", "/v1/models")
@own("GET", "/models")
def models_view(exchange: Exchange) -> None:
    for host in exchange.proxy.hosts.values():
        host.learn_running()
    exchange.json({"object": "list", "data": model_list(exchange.proxy)})


@own("GET", "/v1/models/*")
def model_view(exchange: Exchange) -> None:
    name = exchange.path[len("/v1/models/"):]
    route = exchange.proxy.route(name)
    said = route.host.models().get(name, (route.engine, {}))[1]
    exchange.json(model_entry(route.host, name, route.engine, said, exchange.proxy.started))


def _model_of_body(exchange: Exchange) -> Route:
    asked = asked_in_json(exchange.upload.data) if exchange.upload and exchange.upload.size else Asked()
    return exchange.proxy.route(asked.model)


def _is_router(route: Route) -> bool:
    """Does the engine load and unload its models by itself? A router tells each one's status."""
    said = route.host.models().get(route.model, (route.engine, {}))[1]
    return isinstance(said.get("status"), dict)


@own("POST", "/models/load", admin=True)
def load_view(exchange: Exchange) -> None:
    """llama.cpp's: answers at once, the model loads meanwhile; here a held GPU is refused first."""
    route = _model_of_body(exchange)
    managed = route.host.config.engines[route.engine].managed
    if managed and route.host.engine_state(route.engine) != "loaded":
        route.host.load(route.engine, route.upstream, exchange.waiting)
    elif not _is_router(route):
        raise BadRequest("model is already running")
    elif not route.host.api(route.engine).load(route.upstream):
        raise EngineLost(f"model {printable(route.model)}: the engine did not load it")
    else:
        route.host.forget_models(route.engine)
    exchange.json({"success": True})


@own("POST", "/models/unload", admin=True)
def unload_view(exchange: Exchange) -> None:
    """llama.cpp's: answers at once; the engine stops as soon as nothing runs on it."""
    if not unload(exchange.proxy, _model_of_body(exchange), 0.0):
        raise BadRequest("model is not running")
    exchange.json({"success": True})


def unload(proxy: Proxy, route: Route, seconds: float) -> bool:
    """Unload a model, waiting that long for its end; False when it does not run."""
    if not route.host.config.engines[route.engine].managed or _is_router(route):
        return _unload_in_router(proxy, route, seconds)
    if route.host.engine_state(route.engine) == "unloaded":
        return False
    route.host.unload(route.engine, seconds)
    return True


def _unload_in_router(proxy: Proxy, route: Route, seconds: float) -> bool:
    """A router that is asked to unload a model cuts what runs on it (llama.cpp's after 10 s): it is asked once nothing does.
    What takes longer than `seconds` goes on in the background."""
    api, deadline = route.host.api(route.engine), time.monotonic() + seconds
    while proxy.counters.in_flight().get(route.model) or api.in_use(route.upstream):
        if time.monotonic() >= deadline:
            if route.model not in route.host.unloading:
                route.host.unloading.add(route.model)
                threading.Thread(target=_unload_later, args=(proxy, route), daemon=True).start()
            return True
        time.sleep(IN_USE_PAUSE)
    done = api.unload(route.upstream)
    route.host.forget_models(route.engine)
    return done


def _unload_later(proxy: Proxy, route: Route) -> None:
    try:
        _unload_in_router(proxy, route, NEVER)
    except GuardError as error:
        log(f"host {route.host.config.name}: model {route.model} is not unloaded: {error}", WARN)
    finally:
        route.host.unloading.discard(route.model)


@own("POST", "/api/models/unload/*", admin=True)
def swap_unload_view(exchange: Exchange) -> None:
    """llama-swap's: answers when the engine is gone; what runs on it ends by itself first."""
    route = exchange.proxy.route(exchange.path[len("/api/models/unload/"):])
    unload(exchange.proxy, route, exchange.proxy.config.proxy.queue_timeout)
    exchange.reply(200, b"OK", content_type="text/plain; charset=utf-8")


@own("POST", "/api/models/unload", admin=True)
@own("GET", "/unload", admin=True)
def swap_unload_all_view(exchange: Exchange) -> None:
    for host in exchange.proxy.hosts.values():
        engines = {engine for engine, _ in host.models().values() if host.config.engines[engine].managed}
        for engine in engines:
            if host.engine_state(engine) != "unloaded":
                host.unload(engine, exchange.proxy.config.proxy.queue_timeout)
    exchange.json({"msg": "ok"})


@own("GET", "/running")
def running_view(exchange: Exchange) -> None:
    """llama-swap's list of what is loaded."""
    words = {"loading": "starting", "loaded": "ready"}
    running = []
    for host in exchange.proxy.hosts.values():
        for model, (engine, _) in host.models().items():
            state = host.engine_state(engine)
            if state in words:
                config = host.config.engines[engine]
                address = host.address(engine)
                running.append({
                    "model": model,
                    "state": "stopping" if host.state == "stopping" else words[state],
                    "cmd": " ".join(config.command or ()).replace("{port}", str(config.port)),
                    "proxy": f"http://{address.authority}{address.base}",
                    "ttl": 0 if host.proxy.idle_stop == NEVER else int(host.proxy.idle_stop),
                    "name": model,
                    "description": f"engine {engine} of host {host.config.name}",
                })
    exchange.json({"running": running})


@own("*", "/upstream/*")
def upstream_view(exchange: Exchange) -> None:
    """/upstream/MODEL/REST: the rest of the path goes to the engine byte for byte, but cannot climb out of it."""
    raw = exchange.path[len("/upstream/"):]
    parts = raw.split("/")
    counts = range(len(parts), 0, -1)  # the longest name that is known: a model may be called org/name
    count = next((n for n in counts if exchange.proxy.known(unquote("/".join(parts[:n])))), 1)
    route = exchange.proxy.route(unquote("/".join(parts[:count])))
    rest = "/" + "/".join(parts[count:])
    if leaves(rest):
        raise BadRequest("the path leaves its engine")
    if exchange.proxy.needs_admin(tidy_path(rest)):
        exchange.authorise(True)  # an engine that is a router knows the same words
    if exchange.upload and exchange.upload.data[:1] == b"{":
        try:
            exchange.asked = replace(asked_in_json(exchange.upload.data), spans=())
        except BadRequest:
            pass  # the engine's to judge
    exchange.forward_to(route, rest + ("?" + exchange.query if exchange.query else ""))


def _requests(proxy: Proxy) -> list[dict[str, Any]]:
    """What is queued or runs, oldest first. `tokens`: events of a stream, about one each; `rate`: those a second."""
    with proxy.counters.lock:
        running = [(exchange, exchange.route) for exchange in proxy.counters.running]
    now, found = time.monotonic(), []
    for exchange, route in running:
        if route:
            seconds = now - exchange.started
            flowing = seconds - exchange.first_byte
            rate = round(exchange.events / flowing, 1) if exchange.events > 1 and flowing > 0 else None
            one = {"model": route.model, "host": route.host.config.name, "path": exchange.path, "age": round(seconds, 1)}
            found.append({**one, "queued": not exchange.queued, "tokens": exchange.events, "rate": rate})
    return found


@own("GET", "/status")
def status_view(exchange: Exchange) -> None:
    proxy = exchange.proxy
    exchange.json({
        "version": __version__,
        "sha256": proxy.sha256,
        "started": timestamp(proxy.started),
        "state_error": proxy.ledger.problem,
        "hosts": {name: host.view() for name, host in proxy.hosts.items()},
        "requests": _requests(proxy),
        "history": {
            "rates": [{"model": m, "time": timestamp(when), "rate": rate} for m, when, rate in tuple(proxy.counters.rates)],
            "handbacks": [one for host in proxy.hosts.values() for one in tuple(host.handbacks)],
        },
        "models": {
            model: {"host": host.config.name, "engine": engine, "state": model_status(host, engine, said)["value"]}
            for host in proxy.hosts.values()
            for model, (engine, said) in host.models().items()
        },
    })


@own("GET", "/models/sse")
def events_view(exchange: Exchange) -> None:
    """llama.cpp's event stream, for as long as the client listens; no history."""
    listener = exchange.proxy.events.subscribe()
    try:
        exchange.begin(200, "OK", [("Content-Type", "text/event-stream"), *_STREAM_FIELDS, *exchange._cors()], -1)
        if exchange.method == "HEAD":
            exchange.finish()
            return
        exchange.payload(b": llmguard\n\n")
        while not (listener.lost or exchange.proxy.draining):
            try:
                if not listener.wire.read(time.monotonic() + SSE_PING, exchange.client):
                    break
            except DeadlinePassed:
                exchange.payload(b": ping\n\n")
            for event in listener.take():
                exchange.payload(b"data: %b\n\n" % json.dumps(event).encode())
        exchange.finish()
    finally:
        listener.close()
        listener.wire.close()


def prometheus_sample(name: str, labels: dict[str, str], value: float) -> str:
    """One line of Prometheus' text format."""
    escaped = str.maketrans({"\\": r"\\", '"': r'\"', "\n": r"\n"})
    quoted = ",".join(f'{key}="{text.translate(escaped)}"' for key, text in labels.items())
    return f"{name}{{{quoted}}} {value:.10g}" if quoted else f"{name} {value:.10g}"


if TYPE_CHECKING:
    Samples = list[tuple[str, dict[str, str], float]]  # (what is added to the family's name, labels, value)


def _families(proxy: Proxy) -> Iterator[tuple[str, str, str, Samples]]:
    """(name without "llmguard_", type, help, samples) of every metric. A label's values are names from the configuration, HTTP
    statuses and our own words: nothing that a client makes up."""
    counters, hosts = proxy.counters, proxy.hosts
    with counters.lock:  # a thread that ends a request meanwhile would grow what is read here
        requests, tokens, refusals = dict(counters.requests), dict(counters.tokens), dict(counters.refusals)
        times = dict(counters.times)

    def per_host(value: Callable[[Host], Any]) -> Samples:
        return [("", {"host": name}, value(host)) for name, host in sorted(hosts.items()) if value(host) is not None]

    def histograms(which: int) -> Samples:
        samples: Samples = []
        for model, all_three in sorted(times.items()):
            histogram, total = all_three[which], 0
            for bound, count in zip((*Histogram.BOUNDS, NEVER), histogram.counts):
                total += count
                samples.append(("_bucket", {"model": model, "le": "+Inf" if bound == NEVER else f"{bound:g}"}, total))
            samples += [("_count", {"model": model}, total), ("_sum", {"model": model}, histogram.total)]
        return samples

    yield "info", "gauge", "This copy.", [("", {"version": __version__, "sha256": proxy.sha256}, 1)]
    yield "start_time_seconds", "gauge", "When the proxy was started.", [("", {}, proxy.started)]
    yield "requests_total", "counter", "Requests that were on their way to a model's engine, by the status that they got.", [
        ("", {"model": model, "status": str(status)}, count) for (model, status), count in sorted(requests.items())
    ]
    yield "requests_in_flight", "gauge", "Requests queued for an engine, or on it.", [
        ("", {"model": model}, count) for model, count in sorted(counters.in_flight().items())
    ]
    yield "request_seconds", "histogram", "From a request's header to the end of its answer.", histograms(0)
    yield "queue_seconds", "histogram", "Until its engine took it: a switch, a start.", histograms(1)
    yield "first_byte_seconds", "histogram", "From a request's header to its answer's first byte.", histograms(2)
    yield "tokens_total", "counter", "Tokens, as far as engines report them.", [
        ("", {"model": model, "kind": kind}, count) for (model, kind), count in sorted(tokens.items())
    ]
    yield "refusals_total", "counter", "Answers that were an error of the proxy's own, by its type.", [
        ("", {"type": kind}, count) for kind, count in sorted(refusals.items())
    ]
    for name, about in (
        ("switches", "Engines started for a request."),
        ("releases", "Engines stopped for a waiting job, and proven to be gone."),
        ("stop_errors", "Stops that were not proven: streaks, not attempts."),
        ("cpu_fallbacks", "Engines that were found to serve from the CPU."),
    ):
        yield name + "_total", "counter", about, per_host(lambda host, name=name: host.counts[name])  # type: ignore[misc]
    yield "handback_seconds", "gauge", "The last release: from the first sight of the wait to the proven stop.", per_host(
        lambda host: host.handbacks[-1]["seconds"] if host.handbacks else None
    )
    yield "host_up", "gauge", "Does its box answer?", per_host(lambda host: host.down_since is None)
    yield "engine_up", "gauge", "The engine that is ready.", [
        ("", {"host": name, "engine": host.up}, 1) for name, host in sorted(hosts.items()) if host.up
    ]
    yield "stop_error", "gauge", "Is there a stop that is not proven?", per_host(lambda host: host.stop_error is not None)
    yield "degraded", "gauge", "Does its engine serve from the CPU, for want of a better?", per_host(lambda host: host.degraded)
    yield "verdict", "gauge", "Where its engine's weights are.", [
        ("", {"host": name, "value": str(host.verdict["value"])}, 1) for name, host in sorted(hosts.items()) if host.verdict
    ]
    owners = {(name, str(owner.get("kind"))) for name, host in hosts.items() for owner in host.owners}
    yield "owner", "gauge", "Somebody else holds the GPU.", [
        ("", {"host": name, "kind": kind}, 1) for name, kind in sorted(owners)
    ]
    for word in ("used", "total"):
        yield f"gpu_memory_{word}_bytes", "gauge", f"GPU memory, {word}, as the driver tells.", [
            ("", {"host": name, "gpu": str(device["index"])}, device[word])
            for name, host in sorted(hosts.items())
            for device in (host.gpu or {}).get("devices", ())
            if device[word] is not None
        ]


@own("GET", "/metrics")
def metrics_view(exchange: Exchange) -> None:
    """Prometheus' text format. With ?model= it is the engine's own."""
    if query_values(exchange.query, "model"):
        exchange.forward("/metrics")
        return
    lines = []
    for name, kind, about, samples in _families(exchange.proxy):
        lines += [f"# HELP llmguard_{name} {about}", f"# TYPE llmguard_{name} {kind}"]
        lines += [prometheus_sample(f"llmguard_{name}{suffix}", labels, value) for suffix, labels, value in samples]
    exchange.reply(200, ("\n".join(lines) + "\n").encode(), content_type="text/plain; version=0.0.4; charset=utf-8")


PAGE = r"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>llmguard</title>
<style>
  :root {
    --page: #f4f5f6; --card: #fff; --line: #dde1e4; --ink: #191d21; --dim: #59626b; --focus: #1a5fd0;
    --ok: #16703f; --busy: #1f5fbf; --warn: #8a5600; --bad: #b92525;
  }
  @media (prefers-color-scheme: dark) {
    :root {
      --page: #0f1113; --card: #16191c; --line: #2a2f34; --ink: #e4e7ea; --dim: #98a2ab; --focus: #7fb2ff;
      --ok: #58c98b; --busy: #7fb2ff; --warn: #e2b04f; --bad: #ff857b;
    }
  }
  /* Colour tells state and nothing else. */
  .idle { --tone: var(--dim) } .ok { --tone: var(--ok) } .busy { --tone: var(--busy) } .warn { --tone: var(--warn) }
  .bad { --tone: var(--bad) }

  * { box-sizing: border-box; margin: 0; padding: 0 }
  [hidden] { display: none !important }
  body { font: .875rem/1.45 system-ui, sans-serif; font-variant-numeric: tabular-nums; overflow-wrap: anywhere;
         max-width: 84rem; margin: auto; padding: 1rem clamp(.75rem, 2.5vw, 2rem) 3rem;
         color: var(--ink); background: var(--page) }
  :focus-visible { outline: 2px solid var(--focus); outline-offset: 2px }
  h1 { font-size: 1.5rem; line-height: 1.2; letter-spacing: -.01em; margin-top: 1rem }
  h2 { font: 600 .75rem/1.45 system-ui, sans-serif; letter-spacing: .06em; text-transform: uppercase; margin: 2rem 0 .5rem }
  h2, small, dt, summary { color: var(--dim) }
  h3 { font-size: 1.0625rem; line-height: 1.3; font-weight: 600 } small { font-size: .8125rem }
  ul { list-style: none } time { white-space: nowrap }
  a { color: inherit; text-underline-offset: .2em; text-decoration-color: var(--tone, currentColor) }
  summary { cursor: pointer; width: fit-content }
  .state { color: var(--tone); font-weight: 500; white-space: nowrap }
  .state::before { content: ""; display: inline-block; width: .5em; height: .5em; margin-right: .4em; vertical-align: .08em;
                   border-radius: 50%; background: var(--tone) }
  h1.state { color: inherit; font-weight: 600; white-space: normal }
  .error { color: var(--bad) }
  .number { text-align: right; white-space: nowrap }
  .spread { display: flex; flex-wrap: wrap; gap: .25rem .75rem; justify-content: space-between; align-items: baseline }
  .spread.tight { flex-wrap: nowrap }
  .panel { background: var(--card); border: 1px solid var(--line); border-radius: 6px }
  .stale main { opacity: .55 }

  #problems { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin-top: .5rem }
  #key { padding: 1rem 1rem .5rem; margin-top: 1.5rem }
  #key div { display: flex; flex-wrap: wrap; gap: .5rem; margin: .5rem 0 }
  input, button { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line); border-radius: 4px;
                  padding: .2rem .7rem; min-height: 2rem }
  input { flex: 1 1 14rem; max-width: 26rem; border-color: var(--dim) }
  button { min-width: 5.5rem; cursor: pointer } button:hover { border-color: var(--dim) }
  button[aria-disabled=true] { color: var(--dim); cursor: progress; border-style: dashed }

  #hosts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); gap: .75rem }
  .host { padding: .8rem 1rem; display: flex; flex-direction: column; gap: .7rem; scroll-margin-top: 1rem }
  .host.bad, .host.warn { border-color: color-mix(in srgb, var(--tone) 55%, var(--line)) }
  .host footer { margin-top: auto; padding-top: .5rem; border-top: 1px solid var(--line) }
  .alerts { display: grid; gap: .4rem } .alerts:empty { display: none }
  .alerts > li { border-left: 3px solid var(--tone); border-radius: 0 4px 4px 0; padding: .4rem .65rem;
                 background: color-mix(in srgb, var(--tone) 9%, transparent) }
  .alerts strong { color: var(--tone); font-weight: 600; display: inline-block }
  .alerts strong::first-letter { text-transform: uppercase }
  .alerts ul { display: flex; flex-wrap: wrap; gap: 0 1rem }
  .alerts .busy time { color: var(--tone); font-weight: 600 }
  dl { display: grid; gap: .3rem }
  dl > div { display: grid; grid-template-columns: 5rem minmax(0, 1fr) }
  dd li + li { margin-top: .2rem }
  .bar { height: 4px; border-radius: 2px; background: var(--line); overflow: hidden; margin: .2rem 0 .15rem }
  .bar i { display: block; height: 100%; background: var(--dim) }

  .columns { display: grid; column-gap: 1.5rem; grid-template-columns: minmax(0, 1fr) }
  .lines > li { padding: .4rem 1rem; display: grid; gap: 0 .75rem; align-items: center }
  .lines > li + li { border-top: 1px solid var(--line) }
  .lines:empty::after { content: attr(data-empty); display: block; padding: .6rem 1rem; color: var(--dim) }
  .lines > .group { padding-top: .6rem } .group h3 { font-size: inherit }
  .lines > .request, .lines > .model, .lines > .rate, .lines > .handback { grid-template-columns: minmax(0, 1fr) auto }
  .lines > .event { grid-template-columns: 4rem minmax(0, 1fr); align-items: baseline }
  .event .bad { color: var(--tone) }
  .model button { grid-area: 1 / 2 / span 2 } .model .error, .rate svg { grid-column: 1 / -1 }
  #events { max-height: 24rem; overflow: auto }
  svg { width: 100%; height: 1.6rem; margin: .3rem 0; overflow: visible; fill: none; stroke: var(--dim); stroke-linejoin: round }
  svg * { vector-effect: non-scaling-stroke; stroke-width: 1.25 }
  svg .last { stroke: var(--ink); stroke-width: 5; stroke-linecap: round }
  @media (min-width: 40rem) {
    .lines > .model { grid-template-columns: minmax(0, 1fr) 6.5rem auto }
    .lines > .rate { grid-template-columns: minmax(0, 1fr) 7rem 6rem }
    .model button { grid-area: 1 / 3 } .rate svg { grid-area: 1 / 2; margin: 0 }
  }
  @media (min-width: 60rem) { .columns { grid-template-columns: minmax(0, 3fr) minmax(0, 2fr) } }
  @media (pointer: coarse) { input, button { min-height: 2.5rem } summary { padding: .3rem 0 } }
</style>

<header>
  <div class="spread"><strong>llmguard</strong> <small><span id="about"></span> <time id="started"></time></small></div>
  <div role="status"><h1 id="condition" class="state idle">Asking the proxy…</h1></div>
  <small id="summary"></small>
  <ul id="problems" aria-label="What needs a look"></ul>
  <noscript>This page needs JavaScript. The same facts are at <a href="status">status</a>.</noscript>
</header>
<form id="key" class="panel" hidden>
  <label for="key-text" id="key-label"></label>
  <div>
    <input id="key-text" type="password" required pattern="[!-~]+" title="a key, without spaces" autocomplete="off"
           aria-describedby="key-error">
    <button>Use this key</button>
    <button type="button" id="key-cancel">Cancel</button>
  </div>
  <p id="key-error" class="error" role="alert"></p>
</form>
<main hidden>
  <h2>Hosts</h2>
  <div id="hosts" class="lines" data-empty="No host is configured."></div>
  <div class="columns">
    <div>
      <section>
        <h2>Requests in flight</h2>
        <ul id="requests" class="panel lines" data-empty="None."></ul>
      </section>
      <h2>Models</h2>
      <ul id="models" class="panel lines" data-empty="No model is configured."></ul>
    </div>
    <div>
      <div class="spread">
        <h2 id="events-title">Events</h2> <small id="line" class="state busy" role="status">connecting</small>
      </div>
      <ul id="events" class="panel lines" role="log" aria-labelledby="events-title" tabindex="0"
          data-empty="Nothing has happened since this page was opened."></ul>
      <section>
        <h2>Speed by model</h2>
        <ul id="rates" class="panel lines" data-empty="No answer has been measured yet."></ul>
        <h2>GPUs handed back</h2>
        <ul id="handbacks" class="panel lines" data-empty="No job has waited for a GPU yet."></ul>
      </section>
    </div>
  </div>
</main>

<template id="host">
  <article class="panel host" tabindex="-1">
    <header>
      <div class="spread tight"><h3 data-part="name"></h3> <span class="state" data-part="state"></span></div>
      <small><span data-part="engine"></span> <time data-part="since"></time></small>
    </header>
    <ul class="alerts" data-part="alerts"></ul>
    <dl>
      <div><dt>Requests</dt><dd><span data-part="load"></span> <small><time data-part="used"></time></small></dd></div>
      <div><dt>Held by</dt><dd><ul data-part="owners"></ul></dd></div>
      <div><dt>Waiting</dt><dd><ul data-part="waits"></ul></dd></div>
      <div><dt>Weights</dt><dd><span data-part="verdict"></span>
        <details><summary>evidence</summary><ul data-part="evidence"></ul></details></dd></div>
      <div><dt>Memory</dt><dd><ul data-part="devices"></ul></dd></div>
    </dl>
    <footer class="spread"><small data-part="agent"></small> <small><time data-part="tick"></time></small></footer>
  </article>
</template>
<template id="problem"><li><a data-part="link"></a></li></template>
<template id="alert">
  <li><strong data-part="title"></strong> <span data-part="text"></span><ul data-part="times"></ul></li>
</template>
<template id="text"><li><span data-part="text"></span> <small><time data-part="since"></time></small></li></template>
<template id="device">
  <li><div class="spread tight"><span data-part="name"></span> <span class="number" data-part="text"></span></div>
    <div class="bar" role="meter" aria-valuemin="0" data-part="bar"><i data-part="fill"></i></div></li>
</template>
<template id="request">
  <li class="request"><div><div data-part="model"></div><small data-part="where"></small></div>
    <div class="number"><div data-part="rate"></div><small data-part="spent"></small></div></li>
</template>
<template id="group"><li class="group"><h3 data-part="name"></h3></li></template>
<template id="model">
  <li class="model"><div><span data-part="name"></span> <small data-part="engine"></small></div>
    <span class="state" data-part="state"></span> <button type="button" data-part="button"></button>
    <div class="error" role="alert" data-part="error"></div></li>
</template>
<template id="event"><li class="event"><small data-part="time"></small> <span data-part="text"></span></li></template>
<template id="rate">
  <li class="rate"><span data-part="model"></span> <span class="number" data-part="text"></span>
    <svg viewBox="0 0 100 24" preserveAspectRatio="none" role="img" data-part="svg">
      <polyline data-part="curve"/><path class="last" data-part="last"/></svg></li>
</template>
<template id="handback">
  <li class="handback"><span data-part="job"></span> <span class="number" data-part="text"></span></li>
</template>

<script>
"use strict";
// ---- The document. It is updated in place, never rebuilt: focus, scroll and what is unfolded outlive a refresh.

const TONES = {
  ready: "ok", loaded: "ok", starting: "busy", loading: "busy", draining: "busy", stopping: "busy", handover: "busy",
  down: "bad", blocked: "bad", failed: "bad",
};

const $ = id => document.getElementById(id);

function put(node, text) {
  text = String(text ?? "");
  if (node.textContent !== text) node.textContent = text;
}

const show = (node, visible) => { node.hidden = !visible; };

// The dot before it and its colour only repeat what the word says.
function state(node, word, tone = TONES[word] || "idle") {
  put(node, word);
  node.className = `state ${tone}`;
}

// A copy of a template; `parts` are its elements by their data-part.
function stamp(template) {
  const node = $(template).content.firstElementChild.cloneNode(true);
  node.parts = Object.fromEntries(Array.from(node.querySelectorAll("[data-part]"), part => [part.dataset.part, part]));
  return node;
}

// Gives `parent` one child for each item: update(parts, item, child). A child whose key is still there stays where it is.
function list(parent, items, template, update, keyOf = (item, index) => index) {
  const had = new Map(Array.from(parent.children, node => [node.key, node]));
  const nodes = items.map((item, index) => {
    const key = keyOf(item, index), node = had.get(key) || Object.assign(stamp(item.template || template), {key});
    had.delete(key);
    update(node.parts, item, node);
    return node;
  });
  had.forEach(node => node.remove());
  let at = parent.firstElementChild;
  for (const node of nodes) {
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
  }
}

function texts(parent, items) {
  list(parent, items, "text", (parts, item) => {
    put(parts.text, item.text);
    clock(parts.since, item.since, item.form);
  });
}

// ---- Time, by the proxy's clock. Each <time data-form> is told anew every second.

let skew = 0;
const moment = text => Date.parse(text.replace(" ", "T"));
const local = text => new Date(moment(text)).toLocaleString();

function age(seconds) {
  const s = Math.max(0, Math.floor(seconds)), m = Math.floor(s / 60), h = Math.floor(m / 60);
  return m < 1 ? `${s}s` : h < 1 ? `${m}m${s % 60}s` : h < 48 ? `${h}h${m % 60}m` : `${Math.floor(h / 24)}d${h % 24}h`;
}

// `form` says how: {} is the time since then or, before "left", until then.
function clock(node, then, form = "{} ago") {
  show(node, then);
  if (!then || (node.dateTime === then && node.dataset.form === form)) return;
  node.dateTime = then;
  node.dataset.form = form;
  node.title = local(then);
  tell(node);
}

function tell(node) {
  const form = node.dataset.form, seconds = (Date.now() + skew - moment(node.dateTime)) / 1000;
  put(node, form.replace("{}", age(form.endsWith("left") ? Math.ceil(-seconds) : seconds)));
}

// ---- The proxy. Whoever is refused with 401 waits here until a key is given, then asks again.

const keys = {user: sessionStorage.getItem("llmguard-user"), admin: sessionStorage.getItem("llmguard-admin")};
let asking = null;

async function ask(path, {role = "user", limit, ...options} = {}) {
  for (;;) {
    const key = keys[role] || keys.user;
    const headers = key ? {...options.headers, Authorization: `Bearer ${key}`} : options.headers;
    const signal = limit ? AbortSignal.timeout(limit) : options.signal;
    const reply = await fetch(path, {cache: "no-store", ...options, headers, signal});
    if (reply.ok) return reply;
    const body = await reply.json().catch(() => null);
    if (reply.status !== 401) throw new Error(body?.error?.message || `the proxy answered ${reply.status}`);
    if (key === (keys[role] || keys.user)) await (asking ||= anotherKey(role));
  }
}

async function anotherKey(role) {
  const form = $("key"), text = $("key-text"), admin = role === "admin", before = document.activeElement;
  if (!admin) condition("A key is needed", "idle");
  put($("key-label"), admin ? "Loading and unloading needs an admin key" : "This proxy needs an API key");
  put($("key-error"), keys[role] ? "That key was not accepted." : "");
  show($("key-cancel"), admin);
  show(form, true);
  text.focus();
  const given = await new Promise(resolve => {
    form.onsubmit = event => { event.preventDefault(); resolve(text.value); };
    form.onkeydown = event => { if (event.key === "Escape" && admin) resolve(null); };
    $("key-cancel").onclick = () => resolve(null);
  });
  text.value = "";
  show(form, false);
  before.focus();
  asking = null;
  if (!given) throw new Error("no key was given");
  keys[role] = given;
  sessionStorage.setItem(`llmguard-${role}`, given);
}

// ---- What is to be said of a host, once for the top of the page and for its own card.

const moves = thing => TONES[thing.state] === "busy" || thing.in_flight || thing.queued || thing.handover;

function alerts(host) {
  const found = [], say = (tone, title, text, ...times) => found.push({tone, title, text, times});
  const {stop_error: stop, handover, verdict} = host;
  if (stop) {
    const attempts = stop.attempts === 1 ? "1 attempt" : `${stop.attempts} attempts`;
    const times = [{text: attempts, since: stop.since, form: "in {}"}, {text: "last", since: stop.last}];
    say("bad", "stop not proven", stop.error, ...times);
  }
  if (host.state === "blocked") say("bad", "blocked", host.problem);
  else if (host.state === "down") say("bad", "down", host.problem, {since: host.down_since, form: "for {}"});
  else if (host.problem) say("warn", "problem", host.problem);
  if (host.degraded) say("bad", "degraded", "The engine serves from the CPU, and is not started again for that.");
  else if (verdict?.value === "cpu") say("bad", "on the CPU", "The engine's weights are not on the GPU.");
  if (host.gpu?.problem) say("warn", "GPU not readable", host.gpu.problem);
  if (host.held_up) say("warn", "held up", host.held_up);
  if (host.restarted) say("warn", "unsteady", host.restarted);
  if (handover) say("busy", "handed over", `to ${handover.job || "a waiting job"}`, {since: handover.until, form: "{} left"});
  return found;
}

// ---- The parts of the page.

function condition(text, tone) {
  state($("condition"), text, tone);
  document.title = `${text} · llmguard`;
}

function drawTop(view) {
  const hosts = Object.values(view.hosts), sum = key => hosts.reduce((total, host) => total + host[key], 0);
  const found = Object.entries(view.hosts).flatMap(([name, host]) => alerts(host).map(each => ({...each, name})));
  if (view.state_error) found.push({tone: "warn", name: "state files", title: view.state_error});
  const problems = ["bad", "warn"].flatMap(tone => found.filter(each => each.tone === tone));
  const more = problems.length > 1 ? `, and ${problems.length - 1} more` : "";
  if (problems.length) condition(`${problems[0].name}: ${problems[0].title}${more}`, problems[0].tone);
  else if (hosts.length) condition("All is well", "ok");
  else condition("No host is configured", "idle");
  list($("problems"), more ? problems : [], "problem", (parts, each, node) => {
    node.className = each.tone;
    put(parts.link, `${each.name}: ${each.title}`);
    if (each.name in view.hosts) parts.link.href = "#" + encodeURIComponent(`host-${each.name}`);
  }, each => `${each.name} ${each.title}`);
  const ready = hosts.filter(host => host.state === "ready").length;
  put($("summary"), `${ready} of ${hosts.length} hosts ready, ${sum("in_flight")} in flight, ${sum("queued")} queued`);
  put($("about"), `${view.version} · ${view.sha256.slice(0, 7)} ·`);
  clock($("started"), view.started, "running for {}");
}

function drawHost(parts, {name, host, proxy}, card) {
  const {agent, verdict, waits} = host, told = alerts(host), devices = host.gpu?.devices || [];
  card.id = `host-${name}`;
  card.className = `panel host ${told.find(each => each.tone !== "busy")?.tone || ""}`;
  put(parts.name, name);
  state(parts.state, host.state);
  const unit = host.unit_state && host.unit_state !== "running" ? `, unit ${host.unit_state}` : "";
  put(parts.engine, (host.engine || "no engine") + unit);
  clock(parts.since, host.since, "· for {}");
  list(parts.alerts, told, "alert", (parts, each, node) => {
    node.className = each.tone;
    put(parts.title, each.title);
    put(parts.text, each.text);
    texts(parts.times, each.times);
  }, each => each.title);

  const row = (part, visible) => show(part.closest("dl > div"), visible);
  put(parts.load, host.in_flight || host.queued ? `${host.in_flight} in flight, ${host.queued} queued` : "none");
  clock(parts.used, host.last_request, "(last {} ago)");
  const owners = host.owners.filter(owner => owner.kind !== "wait" || !waits.length);
  const nobody = TONES[host.state] === "bad" ? "not known" : host.engine ? `${host.engine}, ours` : "nobody";
  texts(parts.owners, owners.length ? owners.map(({text, since}) => ({text, since, form: "for {}"})) : [{text: nobody}]);
  row(parts.waits, waits.length);
  texts(parts.waits, waits.map(({job, since, pid, comm}) => (
    {text: job + (pid ? `, behind ${comm || "a process"} pid ${pid}` : ""), since, form: "for {}"})));
  row(parts.verdict, verdict);
  put(parts.verdict, {gpu: "on the GPU", cpu: "on the CPU"}[verdict?.value] || "not known where");
  show(parts.evidence.parentNode, verdict?.evidence?.length);
  texts(parts.evidence, (verdict?.evidence || []).map(text => ({text})));
  row(parts.devices, devices.length);
  list(parts.devices, devices.map(device => ({...device, host: name, several: devices.length > 1})), "device", drawDevice);
  const copy = agent && agent.sha256 !== proxy ? ", not the proxy's copy" : "";
  put(parts.agent, agent ? `agent ${agent.version} · ${(agent.sha256 || "").slice(0, 7)}${copy}` : "no agent has answered");
  clock(parts.tick, host.last_tick, "looked at {} ago");
}

function drawDevice(parts, {index, name, total, used, unified, host, several}) {
  const GiB = bytes => (bytes / 2 ** 30).toFixed(1), known = total && used != null;
  const text = known ? `${GiB(used)} of ${GiB(total)} GiB` : used == null ? "not reported" : `${GiB(used)} GiB used`;
  put(parts.name, (several ? `${index} ` : "") + (name || "GPU") + (unified ? " (unified)" : ""));
  put(parts.text, text);
  show(parts.bar, known);
  if (!known) return;
  const aria = {label: `Memory of GPU ${index} of ${host}`, valuemax: total, valuenow: used, valuetext: text};
  for (const [name, value] of Object.entries(aria)) parts.bar.setAttribute(`aria-${name}`, value);
  parts.fill.style.width = `${Math.min(100, 100 * used / total)}%`;
}

function drawRequest(parts, one) {
  put(parts.model, one.model);
  put(parts.where, `${one.host} · ${one.path}`);
  put(parts.rate, one.rate == null ? (one.queued ? "queued" : "waiting") : `${one.rate.toFixed(1)} tok/s`);
  put(parts.spent, (one.tokens ? `${one.tokens.toLocaleString()} tokens · ` : "") + age(one.age));
}

const busy = new Set(), refusals = new Map();  // by model: a click is under way; why the last one failed

function drawModels(models) {
  const all = Object.entries(models).map(([name, model]) => ({name, ...model})).sort((a, b) => a.name.localeCompare(b.name));
  const hosts = [...new Set(all.map(model => model.host))].sort();
  const rows = hosts.flatMap(host => [{name: host, template: "group"}, ...all.filter(model => model.host === host)]);
  list($("models"), rows, "model", drawModel, row => `${row.template} ${row.name}`);
}

function drawModel(parts, model) {
  const {name} = model, {button} = parts, waits = Boolean(busy.has(name) || moves(model));
  const verb = ["unloaded", "loading", "failed"].includes(model.state) ? "Load" : "Unload";
  put(parts.name, name);
  if (model.template === "group") return;
  put(parts.engine, model.engine);
  state(parts.state, model.state);
  put(parts.error, refusals.get(name));
  put(button, waits ? `${verb}ing…` : verb);
  button.setAttribute("aria-label", `${button.textContent} ${name}`);
  button.setAttribute("aria-disabled", waits);  // `disabled` would lose the focus
  button.onclick = () => waits || change(verb.toLowerCase(), name);
}

function drawHistory({rates, handbacks}) {
  const models = [...new Set(rates.map(one => one.model))].sort();
  list($("rates"), models, "rate", (parts, model) => {
    const values = rates.filter(one => one.model === model).map(one => one.rate), last = values.at(-1);
    const low = Math.min(...values).toFixed(1), top = Math.max(...values, 1), step = 100 / Math.max(1, values.length - 1);
    const points = values.map((rate, n) => [100 - step * (values.length - 1 - n), 23 - 22 * rate / top]);
    put(parts.model, model);
    put(parts.text, `${last.toFixed(1)} tok/s`);
    parts.curve.setAttribute("points", points.join(" "));
    parts.last.setAttribute("d", `M${points.at(-1)}h0`);
    parts.svg.setAttribute("aria-label", `the last ${values.length} answers, from ${low} to ${top.toFixed(1)} tokens per second`);
  }, model => model);
  list($("handbacks"), handbacks.slice(-10).reverse(), "handback", (parts, {host, job, time, seconds}) => {
    put(parts.job, `${host}: ${job || "a waiting job"}`);
    put(parts.text, `after ${seconds < 60 ? `${seconds.toFixed(1)}s` : age(seconds)}`);
    parts.text.title = local(time);
  });
}

function draw(view) {
  const {requests, history} = view, hosts = Object.entries(view.hosts).sort(([a], [b]) => a.localeCompare(b));
  document.body.classList.remove("stale");
  show(document.querySelector("main"), true);
  drawTop(view);
  list($("hosts"), hosts.map(([name, host]) => ({name, host, proxy: view.sha256})), "host", drawHost, ({name}) => name);
  drawModels(view.models);
  show($("requests").parentNode, requests);
  show($("rates").parentNode, history);
  if (requests) list($("requests"), requests, "request", drawRequest);
  if (history) drawHistory(history);
}

// ---- Looking: every five seconds, every second while something moves, never while nobody sees it.

let shown = null, timer, looking = false, again = false;

async function refresh() {
  clearTimeout(timer);
  again = looking;
  if (looking || document.hidden) return;
  looking = true;
  try {
    const reply = await ask("status", {limit: 10000});
    const view = await reply.json(), off = Date.parse(reply.headers.get("Date")) - Date.now();
    if (Math.abs(off - skew) > 2000) skew = off;  // the header knows only whole seconds
    draw(view);
    shown = view;
  } catch (error) {
    condition("The proxy does not answer", "bad");
    put($("summary"), `${error.message}. ${shown ? "Below is the last that it said." : ""}`);
    document.body.classList.add("stale");
  }
  looking = false;
  const lively = busy.size || (shown && [...Object.values(shown.hosts), ...Object.values(shown.models)].some(moves));
  timer = setTimeout(refresh, again ? 0 : lively ? 1000 : 5000);
}

async function change(verb, model) {
  busy.add(model);
  drawModels(shown.models);
  try {
    const headers = {"Content-Type": "application/json"};
    await ask(`models/${verb}`, {role: "admin", method: "POST", headers, body: JSON.stringify({model})});
    refusals.delete(model);
  } catch (error) {
    refusals.set(model, error.message);
  }
  busy.delete(model);
  drawModels(shown.models);
  refresh();
}

// ---- Events. Read by fetch, because EventSource can't send a key.

const SAY = {
  model_status: (data, model) => `${model} is ${data.status}`,
  engine_started: data => `engine ${data.engine} is up`,
  engine_stopped: data => `engine ${data.engine} ${data.failed ? "failed" : "stopped"}`,
  release: data => `engine ${data.engine} is released for ${data.job || "a waiting job"}`,
  handover: data => `the GPU is handed to ${data.job || "a waiting job"}`,
  owner: data => data.owners?.length ? `held: ${data.owners.map(owner => owner.text).join("; ")}` : "nobody else holds the GPU",
  stop_error: data => data.error ? `stop not proven: ${data.error}` : "no stop is unproven any more",
  cpu_fallback: data => `engine ${data.engine} runs on the CPU${data.degraded ? ", still after a restart" : ""}`,
};
const happened = [];

function take({event, model, data = {}}) {
  const said = SAY[event]?.(data, model) || [model, String(event).replaceAll("_", " "), data.status || data.text].join(" ");
  const text = data.host && !model ? `${data.host}: ${said}` : said;
  const tone = data.error || data.failed || event === "cpu_fallback" ? "bad" : "";
  happened.unshift({text, tone, time: new Date(), key: (happened[0]?.key || 0) + 1});
  happened.splice(50);
  list($("events"), happened, "event", (parts, each) => {
    put(parts.time, each.time.toLocaleTimeString([], {hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23"}));
    put(parts.text, each.text);
    parts.text.className = each.tone;
  }, each => each.key);
}

// Takes events until the stream ends. The proxy pings, so a minute of silence is a dead connection.
async function listen(onLife) {
  const stop = new AbortController();
  const reply = await ask("models/sse", {headers: {Accept: "text/event-stream"}, signal: stop.signal});
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  state($("line"), "live", "ok");
  refresh();
  for (let rest = "", data = [];;) {
    const silence = setTimeout(() => stop.abort(), 60000);
    const {value, done} = await reader.read().finally(() => clearTimeout(silence));
    if (done) return;
    onLife();
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.map(each => each.trimEnd())) {
      if (line.startsWith("data:")) data.push(line.slice(5));
      else if (!line && data.length) {
        take(JSON.parse(data.splice(0).join("\n")));
        refresh();
      }
    }
  }
}

async function follow() {
  for (let pause = 1; ; pause = Math.min(2 * pause, 30)) {
    await listen(() => { pause = 1; }).catch(() => {});
    state($("line"), "not live, trying again", "warn");
    await new Promise(resolve => setTimeout(resolve, 1000 * pause));
  }
}

document.addEventListener("visibilitychange", refresh);
setInterval(() => document.querySelectorAll("time[data-form]").forEach(tell), 1000);
refresh().then(follow);
</script>
</html>
"""


@own("GET", "/")
def page_view(exchange: Exchange) -> None:
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    exchange.reply(200, PAGE.encode(), [("Content-Security-Policy", policy)], "text/html; charset=utf-8")


# ======================================================================================================================
# 12  Probe
# ======================================================================================================================
# One timed request for each model, after a deploy: a server that fell back to the CPU answers right, and six to ten times
# slower. What it takes from start to end of a fixed number of tokens is the speed test that can't be fooled.

OK, WARNING, CRITICAL, UNKNOWN = range(4)  # exit codes, as Nagios has them
WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
PROBE_TOKENS = 200
PROBE_PROMPT = "Count from one to two hundred, in words, and separate them by commas: one, two, three,"
MAX_WALL = 40.0  # seconds; the seed's box: 9 to 12 with a cold start
BASELINE_OF = 5  # healthy probes whose median is a model's baseline
SLOW, TOO_SLOW = 1 / 2, 1 / 3  # of the baseline: no healthy probe any more, and a fallback
LOAD_PATIENCE = 600.0  # seconds until the first token of a cold start
HEAL_AGAIN = 3600.0  # seconds in which a model that an unload did not mend is not unloaded again
HEAL_PAUSE = 5.0  # seconds between an unload and the next request: what was unloaded gives its memory back
ASK_AGAIN = 2.0  # seconds between two questions whether a model is still in use: asking more often delays its cancels
STILL_BAD = 600.0  # seconds in which `--if-changed` repeats a bad result from memory


@dataclass
class Report:
    """What a guard found, for a person, a monitor and a script. `lines`: more than fits the first one."""

    level: int
    text: str
    lines: list[str] = field(default_factory=list)
    perfdata: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)  # for --json
    metrics: list[tuple[str, dict[str, str], float]] = field(default_factory=list)  # for --textfile: name, labels, value

    @property
    def first_line(self) -> str:
        """The one line that a Nagios plugin prints: https://nagios-plugins.org/doc/guidelines.html."""
        return printable(f"{WORDS[self.level]} - {self.text}") + (" | " + " ".join(self.perfdata) if self.perfdata else "")


def worst(levels: Iterable[int]) -> int:
    """Critical is worse than unknown, which is worse than a warning."""
    return max(levels, key=(OK, WARNING, UNKNOWN, CRITICAL).index, default=OK)


def perfdatum(label: str, value: float | None, unit: str = "", limits: str = "") -> list[str]:
    """'label'=value[unit][;warn;crit]; nothing for what is not known."""
    quoted = re.sub(r"['=|]", "_", printable(label))
    return [] if value is None else [f"'{quoted}'={value:.10g}{unit}{limits}"]


class Tell:
    """Where a guard's report goes: stdout, and whatever the options name. Nothing that fails there changes the result."""

    def __init__(self, options: Any, what: str) -> None:
        self.options, self.what = options, what

    def __call__(self, report: Report, before: int | None, news: bool = True) -> None:
        """`before`: the level of the last report, None when there was none: an alert is for what changed. Without `news`
        nothing is printed."""
        options = self.options
        if news:
            self.say(report)
        if options.textfile:
            self._textfile(options.textfile, report)
        if options.on_alert and report.level != (before or OK):
            self._alert(options.on_alert, report)
        if options.ping:
            self._ping(options.ping, report)

    def say(self, report: Report) -> None:
        """On stdout alone."""
        if self.options.json:
            print(json.dumps({"status": WORDS[report.level], "text": report.text, **report.data}, indent=1))
        elif not (self.options.quiet and report.level == OK):
            print("\n".join([report.first_line, *map(printable, report.lines)]))
        print(end="", flush=True)

    def _textfile(self, path: str, report: Report) -> None:
        """For the node_exporter's textfile collector: renamed into place, since it may read at any time."""
        samples = [*report.metrics, ("status", {}, float(report.level)), ("last_run_timestamp_seconds", {}, time.time())]
        lines = []
        for name in dict.fromkeys(name for name, _, _ in samples):
            lines.append(f"# TYPE llmguard_{self.what}_{name} gauge")
            same = [(labels, value) for other, labels, value in samples if other == name]
            lines += [prometheus_sample(f"llmguard_{self.what}_{name}", labels, value) for labels, value in same]
        try:
            StateFile.write(path + ".tmp", ("\n".join(lines) + "\n").encode())
            os.chmod(path + ".tmp", 0o644)
            os.replace(path + ".tmp", path)
        except OSError as error:
            log(f"--textfile {path} cannot be written: {error.strerror}", WARN)

    def _alert(self, command: str, report: Report) -> None:
        import shlex

        env = dict(os.environ, LLMGUARD_STATUS=WORDS[report.level], LLMGUARD_TEXT=printable(report.text))
        try:
            text = "\n".join([report.first_line, *report.lines]) + "\n"
            done = run(shlex.split(command), 60.0, data=text.encode(), env=env)
            problem = done.problem or (done.complaint if done.code else "")
        except (OSError, ValueError) as error:
            problem = str(error)
        if problem:
            log(f"--on-alert {command}: {problem}", WARN)

    def _ping(self, url: str, report: Report) -> None:
        """healthchecks.io and its like: GET URL when all is well (healed, too), URL/fail when it is not."""
        import urllib.error
        import urllib.request

        try:
            with urllib.request.urlopen(url if report.level in (OK, WARNING) else url.rstrip("/") + "/fail", timeout=10):
                pass
        except (OSError, ValueError) as error:
            log(f"--ping: {error}", WARN)


# ----- the server that is guarded


@dataclass(frozen=True)
class Loaded:
    """A model that a server has loaded. `state` in llama-swap's words: starting, ready, stopping."""

    model: str
    state: str = "ready"
    address: Address | None = None  # of the process that serves it, where the server tells
    ttl: float = 0.0  # seconds of idleness after which it is unloaded; 0 or less: never
    share: float | None = None  # of it on the GPU, as Ollama claims
    claim: str = ""  # the same for people: "0 B of 4 GiB in VRAM"


class ModelServer:
    """A server with models behind it, whichever it is: "llmguard", "llama-swap", a llama.cpp "router", "Ollama", or a "server" of
    one model, which can unload nothing. HostDown when nobody answers, UsageError when it wants a key."""

    UNLOADED = 120.0  # seconds that an unload may take: llama-swap waits for the process

    def __init__(self, address: Address, key: str = "", clock: Clock | None = None, kind: str = "") -> None:
        self.api, self.clock = EngineApi(address, key), clock or Clock()
        self.address = address
        self._kind = kind

    def get(self, path: str) -> Any:
        """The JSON at a path; None when it has no such path."""
        try:
            reply = self.api.ask("GET", path, seconds=10.0)
        except DeadlinePassed:
            reply = None
        if reply is None:
            raise HostDown(f"no server answers on http://{self.address.authority}")
        if reply.status in (401, 403):
            raise UsageError(f"http://{self.address.authority} wants an API key: give it by --key or $LLMGUARD_API_KEY")
        return reply.json() if reply.status == 200 else None

    @property
    def kind(self) -> str:
        """Found by asking, from what only one of them answers."""
        if not self._kind:
            if self._has("/running", "running"):
                self._kind = "llmguard" if self._has("/status", "sha256") else "llama-swap"
            elif self._has("/api/ps", "models"):
                self._kind = "Ollama"
            else:
                props = self.get("/props")
                self._kind = "router" if isinstance(props, dict) and props.get("role") == "router" else "server"
        return self._kind

    def asked_again(self) -> str:
        """Its kind by a new question: another program may answer there by now."""
        self._kind = ""
        return self.kind

    def _has(self, path: str, name: str) -> bool:
        content = self.get(path)
        return isinstance(content, dict) and name in content

    def _list(self, path: str, name: str) -> list[dict[str, Any]]:
        content = self.get(path)
        listed = content.get(name) if isinstance(content, dict) else None
        return [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []

    def loaded(self) -> list[Loaded]:
        """What it has loaded now."""
        if self.kind in ("llmguard", "llama-swap"):
            content = self.get("/running")
            if not isinstance(content, dict) or not isinstance(content.get("running"), list):
                self._kind = ""
                raise UsageError(f"http://{self.address.authority} is no llama-swap and no llmguard any more")
            return self._running(content["running"])
        if self.kind == "Ollama":
            return [self._of_ollama(entry) for entry in self._list("/api/ps", "models")]
        data = [entry for entry in self._list("/v1/models", "data") if "id" in entry]
        states = {"loaded": "ready", "loading": "starting"}
        words = [(str(entry["id"]), _dict_of(entry, "status").get("value", "loaded")) for entry in data]
        return [Loaded(name, states[word]) for name, word in words if word in states]

    @staticmethod
    def _running(entries: list[Any]) -> list[Loaded]:
        """llama-swap's /running; versions before v186 do not tell `proxy`, the address of each."""
        found = []
        for entry in entries:
            if not isinstance(entry, dict) or not isinstance(entry.get("model"), str):
                continue
            try:
                address = Address.of_url(str(entry["proxy"])) if entry.get("proxy") else None
            except ValueError:
                address = None
            ttl = entry.get("ttl")
            found.append(Loaded(entry["model"], str(entry.get("state")), address, ttl if isinstance(ttl, (int, float)) else 0.0))
        return found

    @staticmethod
    def _of_ollama(entry: dict[str, Any]) -> Loaded:
        """/api/ps: `size_vram` left out is 0; and it may claim all of it after the driver lost the GPU."""
        whole, held = entry.get("size"), entry.get("size_vram", 0)
        name = str(entry.get("model") or entry.get("name"))
        if not isinstance(whole, (int, float)) or not isinstance(held, (int, float)) or whole <= 0:
            return Loaded(name)
        return Loaded(name, share=held / whole, claim=f"{size_text(held)} of {size_text(whole)} in VRAM")

    def in_use(self, entry: Loaded) -> bool | None:
        """Does a loaded model work for anybody? None: it can't be told."""
        if self.kind == "llmguard":
            status = self.get("/status") or {}
            model = (status.get("models") or {}).get(entry.model) or {}
            return bool(((status.get("hosts") or {}).get(model.get("host")) or {}).get("in_flight"))
        if self.kind == "llama-swap":  # through it: the address that it tells is its own machine's
            base = f"{self.address.base}/upstream/{quote(entry.model)}"
            return EngineApi(Address(self.address.host, self.address.port, base), self.api.key).in_use()
        return None if self.kind == "Ollama" else self.api.in_use(entry.model if self.kind == "router" else None)

    def unload(self, model: str) -> bool:
        """Have it unloaded, and wait until it is; False when it can't or does not."""
        path, body = {
            "router": ("/models/unload", {"model": model}),
            "Ollama": ("/api/generate", {"model": model, "keep_alive": 0}),
            "server": ("", None),
        }.get(self.kind, ("/api/models/unload/" + quote(model), None))
        try:
            reply = self.api.ask("POST", path, body, self.UNLOADED) if path else None
        except DeadlinePassed:
            return False
        if reply is None or reply.status != 200:
            return False
        if self.kind in ("llama-swap", "llmguard"):
            return True  # they answer when it is gone; by now a client may have had it loaded again
        until = self.clock.monotonic() + self.UNLOADED
        while any(entry.model == model for entry in self.loaded()):
            if self.clock.monotonic() >= until:
                return False
            self.clock.sleep(0.5)
        return True

    def load(self, model: str, seconds: float) -> str:
        """Have a model loaded, without asking it anything -> "" or what is wrong. It goes on when the time is over."""
        swap = self.kind == "llama-swap"
        method, path = ("GET", f"/upstream/{quote(model)}/health") if swap else ("POST", "/models/load")
        try:
            reply = self.api.ask(method, path, None if swap else {"model": model}, seconds)
        except DeadlinePassed:
            return ""
        if reply is None:
            return "the server does not answer"
        running = b"already running" in reply.body
        return "" if reply.status < 400 or running else _error_text(reply.status, reply.body)


def _error_text(status: int, body: bytes) -> str:
    """What a server says is wrong, in its own words."""
    try:
        error = json.loads(body).get("error")
        text = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        text = body.decode("utf-8", "replace")
    return printable(str(text or "")).strip()[:200] or f"status {status}, and not a word"


# ----- its processes, where it is this box's


def server_processes(entry: Loaded, box: Box, tool: Run, guess: int = 0) -> tuple[list[Process], str]:
    """(the processes that serve a loaded model, why they can't be told), found by the port that it listens on: a name pattern
    sees the wrong process, or none. ([], ""): nobody listens there. `guess`: as in Box.listening."""
    if entry.address is None:
        return [], "its server does not tell a port"
    if not is_loopback(entry.address.host):
        return [], f"it runs on another machine ({entry.address.host})"
    port = entry.address.port
    at_port = box.listening(port, guess)
    front = next((process.comm for process in at_port if process.comm in PORT_FRONTS), "")
    if not front and (at_port or not box.listeners(port)):
        return at_port, ""
    for name in ("docker", "podman"):
        inside = container_processes(box, tool, name, port)
        if inside:
            return sorted(inside, key=lambda process: process.start), ""
    if front:
        return [], f"port {port} is served by {front}, for a container that can't be looked into"
    return [], f"port {port} is served by a process that this user may not look into"


def judge_processes(
    entry: Loaded, processes: list[Process], box: Box, tool: Run, key: str, max_rss: int | None = None
) -> tuple[Evidence, Verdict]:
    """Where the weights of a loaded model are, by its server's processes and all that descend from them."""
    reading = read_gpus(box, tool)
    facts = evidence_of(box, reading, box.family({process.pid for process in processes}), max_rss=max_rss)
    if facts.model is None and entry.address is not None:  # no file on its command line: what it says itself
        sizes = [_figure((_dict_of(said, "meta")).get("size")) for said in EngineApi(entry.address, key).models() or ()]
        facts = replace(facts, model=next((int(count) for count in sizes if count), None))
    return facts, verdict(facts)


def _dict_of(table: dict[str, Any], key: str) -> dict[str, Any]:
    """A part of what another program wrote, which may be anything."""
    part = table.get(key)
    return part if isinstance(part, dict) else {}


def _figure(value: Any) -> float | None:
    """A number of what another program wrote."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e18
    return float(value) if good else None


# ----- one timed request


@dataclass(frozen=True)
class Timing:
    """How a probe went. Times in seconds from the request's first byte; rates in tokens a second."""

    wall: float
    tokens: int = 0
    first: float | None = None  # to the first token
    rate: float | None = None  # as the server reports it
    seen: float | None = None  # from the first token to the last, by our clock
    drafted: bool = False  # it speculates, which inflates its rate
    status: int = 200
    error: str = ""
    whole: bool = True  # False: cut off at the deadline

    @property
    def speed(self) -> float | None:
        return self.rate if self.rate is not None else self.seen


def measure(address: Address, key: str, model: str, seconds: float, progress: Callable[[Timing], None]) -> Timing:
    """Ask a model for PROBE_TOKENS tokens, streamed, and time it; `seconds`: from the first token on. An error is a Timing too.

    `n_predict`, `ignore_eos` and `cache_prompt` are llama-server's: as many tokens each time, and none remembered.
    """
    body = {
        "model": model, "prompt": PROBE_PROMPT, "max_tokens": PROBE_TOKENS, "n_predict": PROBE_TOKENS, "temperature": 0,
        "ignore_eos": True, "cache_prompt": False, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    data = json.dumps(body).encode()
    fields = [("Host", address.authority), ("Connection", "close"), ("Content-Length", str(len(data)))]
    fields += [("Content-Type", "application/json"), *([("Authorization", "Bearer " + key)] if key else [])]
    begun = time.monotonic()
    deadline = begun + LOAD_PATIENCE
    timing, wire = Timing(0.0), None
    try:
        wire = Pool(address).connect(begun + 10.0)
        wire.write(request_head("POST", address.base + "/v1/completions", fields) + data, 30.0)
        response = Response(wire, "POST", deadline)
        if response.status != 200:
            text = _error_text(response.status, response.body.all(deadline, 1 << 20))
            return Timing(time.monotonic() - begun, status=response.status, error=text)
        stream = _Stream(begun)
        while True:
            piece = response.body.read(deadline)
            stream.feed(piece)
            timing = stream.timing()
            if timing.first is not None:
                deadline = begun + timing.first + seconds
            progress(timing)
            if stream.error:
                return replace(timing, status=500, error=stream.error)
            if not piece:
                return timing
    except DeadlinePassed:
        return replace(timing, wall=time.monotonic() - begun, whole=False)
    except (EngineLost, PeerGone, ProtocolError, BodyTooLarge, HeadTooLarge) as error:
        return replace(timing, wall=time.monotonic() - begun, status=502, error=str(error) or "the connection broke")
    finally:
        if wire is not None:
            wire.close()


class _Stream:
    """What comes of a streamed answer, line by line ("data: {…}"); a server that does not stream sends one line."""

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.error = ""
        self._rest = b""
        self._moments: list[float] = []  # at which pieces with text came
        self._events = 0  # with text
        self._last: dict[str, Any] = {}  # what the server said of itself

    def feed(self, piece: bytes) -> None:
        lines = (self._rest + piece).split(b"\n") if piece else [self._rest, b""]
        self._rest = lines.pop()
        before = self._events
        for line in lines:
            try:
                chunk = json.loads(line[5:] if line.startswith(b"data:") else line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(chunk, dict):
                continue
            if chunk.get("error"):
                self.error = _error_text(500, json.dumps(chunk).encode())
            choices = chunk.get("choices")
            first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
            self._events += bool(first.get("text"))
            self._last.update({key: chunk[key] for key in ("timings", "usage") if isinstance(chunk.get(key), dict)})
        if self._events > before:
            self._moments.append(time.monotonic() - self.begun)

    def timing(self) -> Timing:
        timings, usage = _dict_of(self._last, "timings"), _dict_of(self._last, "usage")
        tokens = int(_figure(timings.get("predicted_n")) or _figure(usage.get("completion_tokens")) or self._events)
        moments = self._moments
        spent = moments[-1] - moments[0] if moments else 0.0
        flowed = spent > 0 and 10 * len(moments) > tokens > 1  # else somebody on the way kept it back: our clock tells nothing
        return Timing(
            time.monotonic() - self.begun,
            tokens,
            moments[0] if moments else None,
            _figure(timings.get("predicted_per_second")) or None,
            (tokens - 1) / spent if flowed else None,
            bool(timings.get("draft_n")),
        )


# ----- its verdict


@dataclass(frozen=True)
class Judged:
    """A probe's verdict: ok, slow (nothing to heal, and no baseline either), bad (a fallback), error, unknown; and why."""

    value: str
    why: str


def judge(timing: Timing, baseline: float | None, max_wall: float | None, entry: Loaded | None = None) -> Judged:
    """Is this model on the GPU? By its own healthy baseline where there is one, else by the wall time; a `max_wall` that
    somebody gave counts in any case. `entry`: what an Ollama claims, which is a hint and no proof."""
    if timing.error:  # 503: it loads, or its queue is full; 501: no model for text
        return Judged("unknown" if timing.status < 500 or timing.status in (501, 503) else "error", timing.error)
    wall, speed = f"{timing.wall:.1f} s for {timing.tokens} tokens", timing.speed
    limit = max_wall or (MAX_WALL if baseline is None else None)
    claim = entry.claim if entry and entry.share is not None else ""
    if not timing.whole and not timing.tokens:
        return Judged("unknown", f"no token came within {age(timing.wall)}")
    if not timing.whole:
        return Judged("bad", f"cut off after {wall}")
    if not timing.tokens:
        return Judged("unknown", "the answer has no tokens: is it a model for text?")
    if baseline is not None and speed is not None:
        times = f"{speed:.1f} tokens/s, {speed / baseline:.2f} times its baseline of {baseline:.1f}"
        if speed < TOO_SLOW * baseline:
            return Judged("bad", times)
        if speed < SLOW * baseline:
            return Judged("slow", times)
    if limit is not None and timing.wall > limit:
        if claim and entry and 0 < (entry.share or 0) < 0.95:
            return Judged("unknown", f"{wall}, but it is meant to be on the CPU in part ({claim}): give its own --max-wall")
        return Judged("bad", f"{wall}, more than {limit:.0f} s" + (f" ({claim})" if claim else ""))
    if claim and entry and entry.share == 0 and baseline is None:
        return Judged("bad", f"{wall}, and {claim}")
    return Judged("ok", wall)


def baseline_of(rates: list[float]) -> float | None:
    """The median of what healthy probes measured."""
    return sorted(rates)[len(rates) // 2] if rates else None


@dataclass
class Probed:
    """All that is told of one model."""

    model: str
    level: int
    verdict: str
    why: str
    timing: Timing | None = None
    baseline: float | None = None
    before: Timing | None = None  # the first request, where it was healed

    @property
    def line(self) -> str:
        timing = self.timing
        if timing is None or not timing.tokens:
            return f"{self.model}: {self.verdict}: {self.why}"
        rates = ", ".join(
            f"{rate:.1f} tokens/s {by}"
            for rate, by in ((timing.rate, "by the server"), (timing.seen, "as seen"))
            if rate is not None
        )
        first = f", first token after {timing.first:.1f} s" if timing.first is not None else ""
        notes = (" (drafting)" if timing.drafted else "") + (f", baseline {self.baseline:.1f}" if self.baseline else "")
        return f"{self.model}: {self.verdict}: {self.why}{first}, {rates}{notes}"


@dataclass(frozen=True)
class ProbeSettings:
    """How to probe. Times in seconds."""

    max_wall: float | None = None
    wait: float = 120.0  # for a model in use
    dry_run: bool = False
    force: bool = False  # also when it can't be told whether what would be evicted is in use
    heal: bool = True


class Prober:
    """Probes the models of one server; `models` is what probe.json knows of them, by name: {"plain", "drafted": rates,
    "unloaded": when an unload did not help}."""

    def __init__(
        self,
        server: ModelServer,
        settings: ProbeSettings,
        models: dict[str, Any],
        progress: Callable[[str], None],
        box: Box | None = None,
        tool: Run = run_tool,
    ) -> None:
        self.server, self.settings, self.progress = server, settings, progress
        self.clock, self.box, self.tool = server.clock, box or Box(), tool
        self.models = models

    def probe(self, model: str) -> Probed:
        """One model: wait until nobody uses it, time it, and heal it once when it fell back."""
        held, _ = self._await_calm(model)
        if held:
            return Probed(model, UNKNOWN, "unknown", held)
        timing, judged, baseline = self._measure(model)
        if judged.value not in ("bad", "error"):
            return self._probed(model, judged, timing, baseline)
        bad = Probed(model, CRITICAL, "cpu" if judged.value == "bad" else "error", judged.why, timing, baseline)
        reason = self._not_healed(model)
        if not reason:
            held, waited = self._await_calm(model, healing=True)
            if waited and not held:  # somebody else's work may have made it slow
                timing, judged, baseline = self._measure(model)
                if judged.value not in ("bad", "error"):
                    return self._probed(model, judged, timing, baseline)
                bad.timing, bad.why = timing, judged.why
            reason = f"not unloaded: {held}" if held else ""
        if reason:
            bad.why += f"; {reason}"
            return bad
        self.progress(f"{model}: {judged.why}: unloading it")
        if not self.server.unload(model):
            bad.why += "; the server did not unload it"
            return bad
        self.clock.sleep(HEAL_PAUSE)
        again, judged_again, baseline = self._measure(model)
        if judged_again.value == "ok":
            healed = self._probed(model, judged_again, again, baseline)
            healed.level, healed.verdict, healed.before = WARNING, "healed", timing
            healed.why = f"{judged_again.why} after an unload, {judged.why} before"
            return healed
        self.models[model] = {**self._known(model), "unloaded": timestamp(self.clock.now())}
        return replace(bad, why=f"{judged_again.why} also after an unload", timing=again, before=timing)

    def _not_healed(self, model: str) -> str:
        """Why a bad one is not unloaded; "" when it may be."""
        if not self.settings.heal or self.settings.dry_run:
            return "not unloaded, as asked"
        if self.server.kind == "server":
            return "this kind of server unloads nothing"
        since = self._known(model).get("unloaded")
        if 0 <= self.clock.now() - parse_timestamp(since) < HEAL_AGAIN and not self.settings.force:
            return f"an unload at {since} did not help, so it is left as it is (--force tries again)"
        return ""

    def _probed(self, model: str, judged: Judged, timing: Timing, baseline: float | None) -> Probed:
        """What is not bad; a healthy rate joins the model's baseline."""
        levels = {"ok": OK, "slow": WARNING}
        words = {"ok": "healthy", "slow": "slow"}
        if judged.value == "ok" and timing.speed is not None and timing.whole and not self.settings.dry_run:
            rates = [*self._rates(model, timing.drafted), round(timing.speed, 2)][-BASELINE_OF:]
            known = {key: value for key, value in self._known(model).items() if key != "unloaded"}
            self.models[model] = {**known, "drafted" if timing.drafted else "plain": rates}
        value = judged.value
        return Probed(model, levels.get(value, UNKNOWN), words.get(value, "unknown"), judged.why, timing, baseline)

    def _known(self, model: str) -> dict[str, Any]:
        return _dict_of(self.models, model)

    def _rates(self, model: str, drafted: bool) -> list[float]:
        """Like with like: a model that drafts is faster than itself."""
        rates = self._known(model).get("drafted" if drafted else "plain")
        return [float(rate) for rate in rates if _figure(rate)] if isinstance(rates, list) else []

    def _measure(self, model: str) -> tuple[Timing, Judged, float | None]:
        """(how it went, its verdict, the baseline that it was held against)."""
        baseline = max(filter(None, (baseline_of(self._rates(model, drafted)) for drafted in (False, True))), default=None)
        slowest = PROBE_TOKENS / (TOO_SLOW * baseline) if baseline else 0.0
        timing = self._ask(model, max(3 * (self.settings.max_wall or MAX_WALL), 1.5 * slowest))
        baseline = baseline_of(self._rates(model, timing.drafted))
        entry = next((entry for entry in self.server.loaded() if entry.model == model), None)
        judged = judge(timing, baseline, self.settings.max_wall, entry)
        said, why = self._where(model, entry) if judged.value == "ok" else ("", "")
        if said == "cpu":
            return timing, Judged("bad", f"{judged.why}, but its weights are in the box's memory ({why})"), baseline
        return timing, judged, baseline

    def _where(self, model: str, entry: Loaded | None) -> tuple[str, str]:
        """The verdict by the server's processes, from llmguard's own or, where the server is this box's, from a look at them:
        else a small model on the CPU would pass as healthy, and become the baseline."""
        if self.server.kind == "llmguard":
            status = self.server.get("/status") or {}
            host = _dict_of(_dict_of(status, "hosts"), str(_dict_of(_dict_of(status, "models"), model).get("host")))
            found = _dict_of(host, "verdict")
            return str(found.get("value")), "; ".join(map(str, found.get("evidence") or ()))
        if entry is None or not is_loopback(self.server.address.host):
            return "", ""
        processes, _ = server_processes(entry, self.box, self.tool)
        if not processes:
            return "", ""
        _, found_here = judge_processes(entry, processes, self.box, self.tool, self.server.api.key)
        return found_here.value, "; ".join(found_here.evidence)

    def _ask(self, model: str, seconds: float) -> Timing:
        """Once more where a request that came right after an unload got the old server's last word."""

        def show(timing: Timing) -> None:
            self.progress(f"{model}: {timing.tokens} tokens, {age(timing.wall)}")

        self.progress(f"{model}: asked for {PROBE_TOKENS} tokens")
        timing = measure(self.server.address, self.server.api.key, model, seconds, show)
        if timing.status == 502 or (timing.status == 500 and "abort" in timing.error.lower()):
            self.clock.sleep(1.0)
            timing = measure(self.server.address, self.server.api.key, model, seconds, show)
        return timing

    def _await_calm(self, model: str, healing: bool = False) -> tuple[str, bool]:
        """Wait until a request for a model, or its unload, disturbs nobody -> ("" or why it would, was it waited for). What is
        in use is neither timed nor evicted; nor is what may be, without --force. (Ollama, which does not tell, lets what runs
        end before it unloads.)"""
        until, waited = self.clock.monotonic() + self.settings.wait, False
        while True:
            loaded = self.server.loaded()
            own = [entry for entry in loaded if entry.model == model]
            uses = {entry.model: self.server.in_use(entry) for entry in (own or loaded) if entry.state == "ready"}
            busy = next((name for name, used in uses.items() if used), "")
            unsure = next((name for name, used in uses.items() if used is None and (healing or not own)), "")
            if not busy:
                if unsure and self.server.kind != "Ollama" and not self.settings.force:
                    return f"it can't be told whether {unsure} is in use (--force does it all the same)", waited
                return "", waited
            if self.clock.monotonic() >= until:
                return f"{busy} is in use" + (f", for {age(self.settings.wait)} now" if self.settings.wait else ""), waited
            self.progress(f"{model}: waiting, {busy} is in use")
            waited = True
            self.clock.sleep(ASK_AGAIN)


def probe_report(server: ModelServer, results: list[Probed]) -> Report:
    """All models of a probe in one report."""
    level = worst(result.level for result in results)
    bad = [result for result in results if result.level == level and level]
    text = "; ".join(result.line for result in bad) if bad else f"{len(results)} of {len(results)} models are healthy"
    rest = [result.line for result in results if result not in bad]
    report = Report(level, text if results else "no model is loaded: nothing to probe", rest)
    names = {"wall": ("wall_seconds", "s"), "first": ("first_token_seconds", "s"), "speed": ("tokens_per_second", "")}
    for result in results:
        labels = {"model": result.model}
        report.metrics.append(("model_status", labels, float(result.level)))
        for name, (metric, unit) in names.items():
            value = getattr(result.timing, name) if result.timing else None
            report.perfdata += perfdatum(f"{result.model} {name}", value if value is None else round(value, 3), unit)
            report.metrics += [(metric, labels, value)] if value is not None else []
    models: dict[str, Any] = {}
    for result in results:
        timings = {"timing": result.timing and vars(result.timing), "before": result.before and vars(result.before)}
        models[result.model] = {**vars(result), **timings}
    report.data = {"url": f"http://{server.address.authority}{server.address.base}", "server": server.kind, "models": models}
    return report


def signs_of(files: Iterable[str], server: ModelServer, box: Box, tool: Run) -> dict[str, Any]:
    """What `--if-changed` compares: the files' contents, when the front was started (another machine's only llmguard tells), and
    which processes serve the models that are loaded, where they can be seen. UsageError for a file that can't be read."""
    signs: dict[str, Any] = {}
    for path in files:
        try:
            with open(path, "rb") as file:
                signs[os.path.abspath(path)] = digest(file.read())
        except OSError as error:
            raise UsageError(f"--if-changed {path}: {error.strerror}") from None
    here = is_loopback(server.address.host)
    local = box.listening(server.address.port) if here else []
    if local:
        signs["started"] = sorted(f"{process.pid}:{process.start}" for process in local)
    elif server.kind == "llmguard":
        signs["started"] = (server.get("/status") or {}).get("started")
    servers = {entry.model: server_processes(entry, box, tool)[0] for entry in server.loaded()} if here else {}
    signs["servers"] = {model: f"{found[0].pid}:{found[0].start}" for model, found in servers.items() if found}
    return signs


def same_signs(now: dict[str, Any], before: dict[str, Any], models: Iterable[str]) -> bool:
    """Did nothing change? A model that is not loaded now is no change, or a probe every minute would keep all loaded."""
    if {**now, "servers": 0} != {**before, "servers": 0}:
        return False
    servers, known = now["servers"], _dict_of(before, "servers")
    return all(servers[model] == known.get(model) for model in models if model in servers)


# ======================================================================================================================
# 13  Watch
# ======================================================================================================================
# On the box, from cron or as a service: judges each freshly spawned server twice, has one unloaded that fell back to the CPU,
# and after a reload of llama-swap's configuration loads what was loaded before once the memory has drained, before a client
# does it too early.

LOOK_AT = (20.0, 90.0)  # seconds of a process's own age
EVERY = 10.0  # seconds between two passes of --loop and --for
VRAM_LOW = 1 << 30  # bytes: drained
DRAIN_PATIENCE = 30.0  # seconds that a pass waits for that
STANDS_STILL = 12  # looks one second apart: what nobody explains then is no dead server's any more
RELOAD_WITHIN = 120.0  # seconds between a change of the configuration and the reload that it causes
RESPAWN_TRIES = 3
RESPAWN_WITHIN = 300.0  # seconds after a reload: later nobody wants it any more
RESPAWN_SECONDS = 60.0


@dataclass(frozen=True)
class WatchSettings:
    """`max_rss`: host memory that is normal, in bytes; for all models under "", or by a model's name."""

    max_rss: dict[str, int] = field(default_factory=dict)
    vram_low: int = VRAM_LOW
    config: str | None = None  # llama-swap's; None: as its command line says
    force: bool = False
    dry_run: bool = False
    respawn: bool = True


@dataclass
class Seen:
    """A server as one pass finds it."""

    entry: Loaded
    processes: list[Process]
    trouble: str  # why they can't be told

    @property
    def id(self) -> str:
        """The listening process, and not a later one with its pid."""
        return f"{self.processes[0].pid}:{self.processes[0].start}"


class Watch:
    """The passes over one server's models; `known` is its part of watch.json."""

    def __init__(
        self,
        server: ModelServer,
        settings: WatchSettings,
        known: dict[str, Any],
        box: Box | None = None,
        tool: Run = run_tool,
        remember: Callable[[], bool] = lambda: True,
    ) -> None:
        """`remember` writes `known` down, before something is done that is to be done once."""
        self.server, self.settings = server, settings
        self.clock, self.box, self.tool = server.clock, box or Box(), tool
        self.known, self.remember = known, remember
        self.servers: dict[str, dict[str, Any]] = self._part("servers")  # model -> what was seen of the one that served it
        self.heals: dict[str, Any] = self._part("heals")  # model -> unloads since it was last not on the CPU
        self.lost: dict[str, Any] = self._part("lost")  # model -> how often it was loaded again after a reload
        self.findings: list[tuple[int, str]] = []
        self.report = Report(OK, "")

    def _part(self, name: str) -> dict[str, Any]:
        part = self.known.get(name)
        self.known[name] = part if isinstance(part, dict) else {}
        return self.known[name]  # type: ignore[no-any-return]  # it is one by now

    def one_pass(self) -> Report:
        """Look at everything once. HostDown when the server does not answer; UsageError when it can't be watched."""
        if self.server.kind not in ("llmguard", "llama-swap"):
            where = self.server.address.authority
            raise UsageError(f"http://{where} is no llama-swap and no llmguard: it has no /running to watch")
        self.findings, self.report = [], Report(OK, "")
        entries = self.server.loaded()
        if entries and not any(entry.address for entry in entries):
            raise UsageError("this llama-swap is too old to tell the port of its servers: watch needs v186 or later")
        if self.known.get("boot") != self.box.boot():
            for part in (self.servers, self.heals, self.lost, self.known):
                part.clear()  # pids mean nothing any more, and nothing drains
            self.known.update(boot=self.box.boot(), servers=self.servers, heals=self.heals, lost=self.lost)
        seen = [self._find(entry) for entry in entries]
        self._reloaded(bool(seen))
        for one in seen:
            self._look(one)
        for model in [model for model in self.servers if model not in {entry.model for entry in entries}]:
            del self.servers[model]
        if self.lost and self.settings.respawn:
            self._respawn()
        report = self.report
        report.level = worst(level for level, _ in self.findings)
        told = [text for level, text in self.findings if level == report.level or not report.level]
        report.text = "; ".join(told) if told else "no model is loaded"
        report.lines = [text for level, text in self.findings if text not in told]
        return report

    def _say(self, level: int, text: str) -> None:
        self.findings.append((level, text))

    # ----- whose processes they are

    def _find(self, entry: Loaded) -> Seen:
        guess = self._pid(_dict_of(self.servers, entry.model).get("id"))
        return Seen(entry, *server_processes(entry, self.box, self.tool, guess))

    @staticmethod
    def _pid(name: Any) -> int:
        pid = str(name).partition(":")[0]
        return int(pid) if pid.isdecimal() and len(pid) < 10 else 0

    # ----- fresh spawns

    def _look(self, one: Seen) -> None:
        model, state = one.entry.model, one.entry.state
        known = _dict_of(self.servers, model)
        if one.trouble:
            address = one.entry.address
            if self.server.kind == "llmguard" and address is not None and not is_loopback(address.host):
                self._say(OK, f"{model}: {one.trouble}, where its agent judges it")
            else:
                self._say(UNKNOWN, f"{model}: {one.trouble}")
            return
        if not one.processes:
            if state == "ready":  # it ended a moment ago; or it is there, and not to be seen
                self.servers[model] = {"missing": True}
                missing = bool(known.get("missing"))
                self._say(UNKNOWN if missing else OK, f"{model}: " + ("nobody is seen on its port" if missing else "gone"))
            return
        if known.get("id") != one.id:
            known = {"id": one.id, "looks": [], "ttl": one.entry.ttl}
        self.servers[model] = known
        process = one.processes[0]
        named, seconds = f"{process.comm} pid {process.pid}", self.box.age(process)
        if state != "ready":
            self._say(OK, f"{model}: {state} ({named})")
            return
        looks = known["looks"] if isinstance(known.get("looks"), list) else []
        due = [at for at in LOOK_AT if seconds >= at and at not in looks]
        if (due or known.get("verdict") == "cpu") and not self._judge(one, known, [*looks, *due]):
            return
        if "verdict" not in known:
            self._say(OK, f"{model}: {named} is too young to be judged ({age(seconds)})")
        elif known["verdict"] == "cpu":
            self._fallen(one, known, named)
        else:
            if known["verdict"] == "gpu" or LOOK_AT[-1] in due:
                self.heals.pop(model, None)
            told = (known.get("evidence") or [""])[-1]
            level = WARNING if known.get("because") == "unreadable" else OK
            self._say(level, f"{model}: {known['verdict']} ({named}, {age(seconds)} old: {told})")

    def _judge(self, one: Seen, known: dict[str, Any], looks: list[float]) -> bool:
        """Take its verdict; False when it ended between two reads: then what was read of it says nothing. One that was "cpu" when
        it was fresh is judged again at each pass; it stays so where the box's memory no longer tells."""
        limits, model, process = self.settings.max_rss, one.entry.model, one.processes[0]
        limit = limits.get(model, limits.get(""))
        facts, found = judge_processes(one.entry, one.processes, self.box, self.tool, self.server.api.key, limit)
        if not self.box.same(process.pid, process.start):
            self._say(OK, f"{model}: gone")
            return False
        known["looks"] = looks
        if known.get("verdict") != "cpu" or found.because != "old":
            known.update(verdict=found.value, because=found.because, evidence=list(found.evidence))
        for name, value in (("rss", facts.memory.rss if facts.memory else None), ("gpu", facts.gpu)):
            self.report.perfdata += perfdatum(f"{model} {name}", value, "B")
            self.report.metrics += [(name + "_bytes", {"model": model}, float(value))] if value is not None else []
        return True

    def _fallen(self, one: Seen, known: dict[str, Any], named: str) -> None:
        """It serves from the CPU: have it unloaded, once, while it is fresh, and not while somebody uses it."""
        model, why = one.entry.model, "; ".join(known["evidence"])
        text = f"{model}: cpu ({named}: {why})"
        if self.heals.get(model):
            self._say(CRITICAL, f"{text}: also after an unload, so it is left as it is")
        elif self.settings.dry_run:
            self._say(CRITICAL, f"{text}: would be unloaded (--dry-run)")
        elif not self.settings.force and self._in_use(one):
            self._say(CRITICAL, f"{text}: in use, so it is unloaded at a later pass (--force does it at once)")
        else:
            self.heals[model] = 1
            if not self.remember():  # the next pass would unload it again, and so on
                del self.heals[model]
                self._say(CRITICAL, f"{text}: not unloaded, since that cannot be written down")
            elif self.server.unload(model):
                self.servers.pop(model, None)
                self._say(WARNING, f"{text}: unloaded (what ran on it was cut), the next request spawns it anew")
            else:
                self._say(CRITICAL, f"{text}: the server did not unload it")

    def _in_use(self, one: Seen) -> bool:
        if one.entry.address is None:
            return False
        api = EngineApi(one.entry.address, self.server.api.key)
        known = api.in_use()
        return known if known is not None else connections_at_work(self.box, self.tool, one.entry.address.port) != 0

    # ----- reloads

    def _front(self) -> Process | None:
        """The process that answers at the url, when it is one of this box that we may look at."""
        if not is_loopback(self.server.address.host):
            return None
        at_port = self.box.listening(self.server.address.port, self._pid(self.known.get("front")))
        return at_port[0] if at_port else None

    def _config_hash(self, front: Process | None) -> str | None:
        """Of llama-swap's configuration: the file that was named, or the one on its command line."""
        path = self.settings.config
        if path is None and front is not None:
            words = iter(self.box.argv(front.pid)[1:])
            for word in words:
                option, _, value = word.partition("=")
                if option.lstrip("-") == "config":
                    path = os.path.join(_link(os.path.join(self.box.root, f"proc/{front.pid}/cwd")), value or next(words, ""))
        content = self.box.read(path.lstrip("/")) if path else None
        return digest(content.encode()) if content is not None else None

    def _reloaded(self, running: bool) -> None:
        """Was llama-swap's configuration reloaded since the last pass? Then its servers are all gone, none is there yet, and the
        file has changed, or the front is a new process. Where the file can't be seen: two or more are gone at once that never
        go by themselves. A proxy of llmguard's stops its engines for reasons of its own."""
        front = self._front()
        now, front_id = self.clock.now(), f"{front.pid}:{front.start}" if front else None
        new_front = front_id is not None and self.known.get("front") not in (None, front_id)
        if new_front and self.server.asked_again() != self.known.get("kind"):
            for part in (self.servers, self.heals, self.lost):
                part.clear()  # another program answers here now
        found, before = self._config_hash(front), self.known.get("config")
        if found is not None and before is not None and found != before:
            self.known["changed"] = timestamp(now)
        fresh = 0 <= now - parse_timestamp(self.known.get("changed")) <= RELOAD_WITHIN
        self.known.update(front=front_id or self.known.get("front"), config=found or before)
        gone = {model: known for model, known in self.servers.items() if isinstance(known, dict) and known.get("id")}
        if self.lost and (running or not 0 <= now - parse_timestamp(self.known.get("reloaded")) <= RESPAWN_WITHIN):
            self.lost.clear()  # a client was first, or it is too late
        if not gone or running or any(self._alive(str(known["id"])) for known in gone.values()):
            return
        unseen = found is None and len(gone) > 1 and all((_figure(known.get("ttl")) or 0.0) <= 0 for known in gone.values())
        if self.server.kind == "llama-swap" and (fresh or new_front or unseen):
            self.known.update(changed=None, reloaded=timestamp(now))
            self.lost.update(dict.fromkeys(gone, 0))
            self._say(OK, f"a reload stopped all servers: {', '.join(sorted(gone))} to be loaded again")

    def _alive(self, name: str) -> bool:
        start = name.partition(":")[2]
        return start.isdecimal() and self.box.same(self._pid(name), int(start)) is not None

    def _respawn(self) -> None:
        """Load what a reload stopped, once what it held is given back."""
        if self.settings.dry_run:
            self._say(WARNING, f"{', '.join(sorted(self.lost))}: would be loaded again (--dry-run)")
            return
        held = self._await_drain()
        if held:
            self._say(WARNING, f"{', '.join(sorted(self.lost))}: not loaded again yet: {held}")
            return
        ours: set[str] = set()
        for model in sorted(self.lost):
            others = {entry.model for entry in self.server.loaded()} - ours
            if others:  # to load ours now might evict what a client uses
                self._say(OK, f"{', '.join(sorted(others))}: loaded by a client, so nothing more is loaded again")
                self.lost.clear()
                return
            ours.add(model)
            tries = self.lost[model] + 1 if isinstance(self.lost[model], int) else 1
            problem = self.server.load(model, RESPAWN_SECONDS)
            if not problem:
                del self.lost[model]
                self._say(OK, f"{model}: loaded again after the reload")
            elif tries >= RESPAWN_TRIES:
                del self.lost[model]
                self._say(WARNING, f"{model}: not loaded again after {tries} tries: {problem}")
            else:
                self.lost[model] = tries
                self._say(WARNING, f"{model}: not loaded again yet: {problem}")

    def _await_drain(self) -> str:
        """Until next to no GPU memory is in use that no living process explains, or that stands still -> "" or what is still
        held. Where it can't be read: until the looks are over, which gives what drains its time."""
        until = self.clock.monotonic() + DRAIN_PATIENCE
        looks: list[int | None] = []
        while True:
            looks.append(self._unexplained())
            left = looks[-1]
            still = len(looks) >= STANDS_STILL and len({*looks[-STANDS_STILL:]}) == 1
            if left is not None and (still or left < self.settings.vram_low):
                return ""
            if self.clock.monotonic() >= until:
                return f"{size_text(left)} of GPU memory is in use by nobody who lives" if left is not None else ""
            self.clock.sleep(1.0)

    def _unexplained(self) -> int | None:
        """GPU memory that is in use, but by no living process."""
        reading = read_gpus(self.box, self.tool)
        cards = cards_of(reading.devices)
        if reading.vendor is None and not reading.problem:
            return 0  # no GPU, no memory of one
        if reading.problem or not cards or any(card.used is None for card in cards):
            return None
        rows = [row for card in cards for row in reading.on(card)]
        living = {process.pid for process in self.box.living()}
        return max(0, sum(card.used or 0 for card in cards) - sum(row.bytes or 0 for row in rows if row.pid in living))


# ======================================================================================================================
# 14  Command line
# ======================================================================================================================

USUAL_PORTS = (
    (8080, "llama-server or llama-swap"),
    (9931, "llama-server"),
    (11434, "Ollama"),
    (1234, "LM Studio"),
    (8000, "vLLM"),
)
OTHER_LISTEN = ("127.0.0.1", 8088)  # when one of those has our usual port


def found_config() -> Config:
    """A configuration of what answers on this machine's usual ports; ConfigError when nothing does."""
    engines = {}
    for port, kind in USUAL_PORTS:
        address = Address("127.0.0.1", port)
        if EngineApi(address).models() is not None:
            name = re.sub(r"[^a-z0-9]+", "-", kind.lower())
            name = name if name not in engines else "%s-%d" % (name, port)
            engines[name] = EngineConfig(name=name, url=address, models="auto")
            log(f"found {kind} on http://{address.authority}")
    if not engines:
        raise ConfigError(
            "no configuration was found, and nothing answers on this machine's usual ports ({}): start a model server, or "
            "write a configuration (examples/llmguard.toml) and name it with -c".format(", ".join(str(p) for p, _ in USUAL_PORTS))
        )
    taken = any(engine.url and engine.url.port == 8080 for engine in engines.values())
    proxy = ProxyConfig(listen=OTHER_LISTEN) if taken else ProxyConfig()
    return Config(proxy, {"here": HostConfig(name="here", address="127.0.0.1", engines=engines)})


def the_config(options: Any) -> Config:
    path = config_path(options.config)
    return load_config(path) if path else found_config()


# ----- serve


def serve(options: Any) -> int:
    """The proxy, until SIGTERM or Ctrl-C; SIGHUP reads the configuration again."""
    import importlib
    import signal

    for name in "base64 difflib hmac http mmap selectors subprocess tempfile traceback zlib".split():
        importlib.import_module(name)  # now: when no descriptor is left they could not be
    config = the_config(options)
    want_descriptors(config.proxy.max_connections)
    share_heap()
    if options.listen:
        config = replace(config, proxy=replace(config.proxy, listen=_listen_option(options.listen)))
    folder = state_folder(options.state_dir)
    lock = Lock(os.path.join(folder, "serve.lock"), "another serve")
    try:
        lock.acquire()
    except AlreadyHeld as held:
        raise AlreadyHeld(what=f"the state folder {folder} (--state-dir names another)", holder=held.fields["holder"]) from None
    with lock:
        signals, wake = socket.socketpair()
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno())  # a byte per signal: a wait for a lock may sleep through one
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # before anybody can see that it listens
            signal.signal(number, lambda number, _: None)
        try:
            proxy = Proxy(config, folder, OWN, listener=given_listener())
        except OSError as error:
            where = Address(*config.proxy.listen).authority
            raise ConfigError(f"proxy.listen: {where} cannot be listened on: {error.strerror}") from None
        for warning in config.warnings:
            log("warning: " + warning, WARN)
        proxy.start()
        log(f"llmguard {__version__} listens on {listens_on(proxy.listener)}")
        notify(f"READY=1\nSTATUS={len(proxy.hosts)} hosts")
        while _await_signal(signals, proxy) == signal.SIGHUP:
            _reload(proxy, options)
        notify("STOPPING=1\nSTATUS=waiting for what runs")
        log("stopping: no new connections, waiting for what runs (a second signal ends it at once)")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: os._exit(128 + number))
        if not proxy.drain():
            log(f"not everything ended within {age(proxy.config.proxy.drain_timeout)}: cut", WARN)
    return 0


def share_heap() -> None:
    """One heap for all threads, which take turns anyway (mallopt(3), M_ARENA_MAX). Of glibc's own, eight for each CPU, each keeps
    what the largest body on one of its threads took."""
    try:
        import ctypes

        ctypes.CDLL(None).mallopt(-8, 1)
    except (ImportError, OSError, AttributeError):
        pass  # a Python without ctypes, or another C library


def want_descriptors(connections: int) -> None:
    """A request takes two descriptors, an agent's start eight. The usual limit, 1024, is for programs that use select(), and
    may be raised up to the hard one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + 256
    room = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
    except (OSError, ValueError):
        room = soft
    if room < wanted:
        log(f"warning: proxy.max_connections: {connections} may take {wanted} descriptors, and only {room} are allowed", WARN)


def notify(text: str) -> None:
    """Tell systemd how the service does: sd_notify(3), a datagram to $NOTIFY_SOCKET ("@" stands for NUL)."""
    where = os.environ.get("NOTIFY_SOCKET")
    if where:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.sendto(text.encode(), "\0" + where[1:] if where[0] == "@" else where)
        except OSError as error:
            log(f"systemd cannot be told how this does: {error.strerror}", WARN)


def given_listener() -> socket.socket | None:
    """The socket that systemd listens on for us (sd_listen_fds(3), the first one); it stays open while we are restarted."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS", "0") == "0":
        return None
    listener = socket.socket(fileno=3)
    listener.set_inheritable(False)
    listener.setblocking(True)
    return listener


def _await_signal(signals: socket.socket, proxy: Proxy) -> int:
    """The next signal. Meanwhile systemd's watchdog, where it has one, hears that we live as long as each host's thread does."""
    pause = int(os.environ.get("WATCHDOG_USEC") or 0) / 2e6
    if not pause or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return signals.recv(1)[0]
    poller = select.poll()
    poller.register(signals, select.POLLIN)
    while not poller.poll(pause * 1000):
        if proxy.lives():
            running = len(proxy.counters.running)
            notify(f"WATCHDOG=1\nSTATUS={len(proxy.hosts)} hosts, {running} requests in flight")
    return signals.recv(1)[0]


def _listen_option(text: str) -> tuple[str, int]:
    try:
        return host_port(text)
    except ValueError as error:
        raise UsageError(f"--listen: {error}") from None


def _reload(proxy: Proxy, options: Any) -> None:
    if config_path(options.config) is None:  # looking at the usual ports again would find this proxy
        log("there is no configuration file to read again: what was found at the start stays")
        return
    try:
        config = the_config(options)
    except ConfigError as error:
        log(f"the configuration is not reloaded, the old one stays: {error}", WARN)
        return
    if options.listen:
        config = replace(config, proxy=replace(config.proxy, listen=proxy.config.proxy.listen))
    proxy.reload(config)


# ----- check


def check(options: Any) -> int:
    """One line a host; 0 when all is well, 1 with warnings, 2 when something is wrong."""
    try:
        config = the_config(options)
    except ConfigError as error:
        print(error)
        return 2
    worst = 0
    for warning in config.warnings:
        print("warning: " + warning)
        worst = 1
    for host_config in config.hosts.values():
        host = Host(host_config, config.proxy, Remote(host_config, state_folder(options.state_dir)), Events())
        level, text = _check_host(host)
        print(f"{host_config.name}: {text}")
        worst = max(worst, level)
    if config.path:
        print("{}: {}".format(config.path, ("all is well", "see the warnings", "something is wrong")[worst]))
    return worst


def _check_host(host: Host) -> tuple[int, str]:
    """(0, 1 or 2, what there is to say about it)."""
    warnings = [
        f"engine {engine.name} does not answer on http://{host.address(engine.name).authority}"
        for engine in host.config.engines.values()
        if not engine.managed and host.api(engine.name).models() is None
    ]
    facts = []
    if any(engine.managed for engine in host.config.engines.values()):
        try:
            asked = time.time()
            box = host.version()
            offset = box.get("time", asked) - (asked + time.time()) / 2
            reply = host.status()
        except (HostDown, HostBlocked, AgentError) as error:
            return 2, str(error)
        warnings += box.get("warnings", [])
        if host.noise:
            bound = size_text(MAX_NOISE)
            warnings.append(f"the login shell prints {host.noise} bytes before the agent's answer (up to {bound} are skipped)")
        facts.append(f"engine {reply['active']} runs" if reply.get("active") else "no engine of ours runs")
        for owner in host.foreign(reply):  # what can't be read keeps every engine off
            (warnings if owner.get("kind") == "unknown" else facts).append("held: " + printable(owner["text"]))
        if host.config.ssh is not None:
            same = "the same as here" if reply.get("sha256") == own_hash() else "NOT the same as here"
            facts.append(f"agent {reply.get('agent')} {str(reply.get('sha256'))[:12]}, {same}, Python {box.get('python')}")
            facts.append(f"clock {offset:+.1f} s")
            if "NOT" in same:
                warnings.append(f"another copy of llmguard is there: `llmguard.py engine install {host.config.name}`")
    return (1 if warnings else 0), "; ".join([*(["ok"] if not warnings else []), *facts, *("warning: " + w for w in warnings)])


# ----- model


class ProxyClient:
    """The proxy as its own command line asks it."""

    def __init__(self, options: Any) -> None:
        path = config_path(options.config)
        config = load_config(path) if path else Config()
        host, port = config.proxy.listen
        here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        try:
            url = options.url if not options.url or "://" in options.url else "http://" + options.url
            self.address = Address.of_url(url) if url else Address(here, port)
        except ValueError as error:
            raise UsageError(f"--url: {error}") from None
        keys = config.proxy.admin_keys + config.proxy.api_keys
        self.key = options.key or os.environ.get("LLMGUARD_API_KEY") or (keys[0] if keys else "")

    def ask(self, method: str, path: str, body: Any = None, seconds: float = 30.0) -> Any:
        """The reply's JSON; GuardError with the proxy's own words when it says no."""
        try:
            reply = request(Pool(self.address), method, path, body=body, key=self.key, seconds=seconds)
        except (EngineLost, PeerGone, DeadlinePassed):
            where = self.address.authority
            hint = "is `llmguard.py serve` running there? --url names another"
            raise HostDown(f"no proxy answers on http://{where} ({hint})") from None
        content = reply.json()
        if reply.status == 200:
            return content
        error = _dict_of(content, "error") if isinstance(content, dict) else {}
        if reply.status == 401:
            error["message"] = f"{str(error.get('message')).partition(':')[0]}: give it by --key or $LLMGUARD_API_KEY"
        kinds = {kind.status: kind for kind in (GpuBusy, Unauthorised, BadRequest, EngineFailed, HostDown)}
        raised = GuardError(str(error.get("message", "status %d" % reply.status)))
        raised.status = reply.status
        raised.exit_code = kinds.get(reply.status, BadRequest).exit_code
        raise raised

    def models(self) -> list[dict[str, Any]]:
        data: list[dict[str, Any]] = self.ask("GET", "/v1/models")["data"]
        return data


def status_command(options: Any) -> int:
    """One screen, its first line for Nagios: 0 all is well, 1 worth a look, 2 something is wrong, 3 nobody answers."""
    try:
        status = ProxyClient(options).ask("GET", "/status")
        if not isinstance(status, dict) or not isinstance(status.get("hosts"), dict):
            raise UsageError("no llmguard answers there")
    except GuardError as error:
        print(f"UNKNOWN - {error}")
        return 3
    if options.json:
        print(json.dumps(status, indent=1))
    lines, highest = [], OK
    reasons: list[str] = []
    for name, host in status["hosts"].items():
        level, facts = _host_facts(host)
        text = printable("; ".join(facts))
        lines.append(f"{coloured(name, level)}: {text}")
        if level >= highest and level:
            reasons[:0] = [f"{name}: {text}"] if level > highest else []
        highest = max(highest, level)
    counts = f"{len(status['hosts'])} hosts, {len(status['models'])} models"
    if not options.json:
        print(f"{coloured(WORDS[highest], highest)} - {reasons[0] if reasons else counts}")
        print("\n".join(lines))
    return highest


def coloured(text: str, level: int) -> str:
    """In the colour of a level on a terminal, unless $NO_COLOR (https://no-color.org) says not to."""
    plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return printable(text) if plain else f"\x1b[{(32, 33, 31, 35)[level]}m{printable(text)}\x1b[0m"


def _host_facts(host: dict[str, Any]) -> tuple[int, list[str]]:
    """(level, what there is to say) of one host of /status."""
    facts = [host["state"] + (f", engine {host['engine']}" if host["engine"] else "")]
    facts.append(f"{host['in_flight']} in flight, {host['queued']} queued")
    level = 2 if host["state"] in ("down", "blocked") or host["stop_error"] or host["degraded"] else 0
    if host["down_since"]:
        facts.append(f"since {host['down_since']}" + (f": {host['problem']}" if host["problem"] else ""))
    if host["stop_error"]:
        error = host["stop_error"]
        facts.append(f"a stop is not proven since {error.get('since')}, {error.get('attempts')} attempts: {error.get('error')}")
    if host["handover"]:
        facts.append(f"handed to {host['handover'].get('job') or 'a bench job'} until {host['handover'].get('until')}")
    facts += [f"{wait['job']} waits for the GPU since {wait['since']}" for wait in host["waits"]]
    facts += ["held: " + owner["text"] for owner in host["owners"] if owner.get("kind") != "wait"]
    if host["degraded"]:
        facts.append(f"it serves from the CPU: {'; '.join((host['verdict'] or {}).get('evidence', ()))}")
    if host.get("failures"):
        facts += [f"the last start failed: {text}" for text in host["failures"].values()]
        level = max(level, WARNING)
    for worth_a_look in ("held_up", "restarted"):
        if host.get(worth_a_look):
            facts.append(host[worth_a_look])
            level = max(level, 1)
    return level, facts


def model_list_command(options: Any) -> int:
    models = ProxyClient(options).models()
    width = max([len(model["id"]) for model in models] or [0])
    for model in models:
        status = _dict_of(model, "status")  # a bare model server's list has none: what it lists it serves
        failed = ", its last start failed" if status.get("failed") else ""
        print(f"{printable(model['id']):<{width}}  {status.get('value', 'loaded')}{failed}")
    return 0


def model_load_command(options: Any) -> int:
    """Returns when it is loaded; a progress line on a terminal."""
    proxy = ProxyClient(options)
    try:
        proxy.ask("POST", "/models/load", {"model": options.name}, 900.0)
    except GuardError as error:
        if str(error) != "model is already running":
            raise
    status, spent = _await_model(proxy, options.name, ("loading",))
    if status.get("value") != "loaded":
        raise EngineFailed(str(status.get("error", "{} is {}".format(options.name, status.get("value")))))
    print(f"{printable(options.name)}: loaded after {age(spent)}")
    return 0


def model_unload_command(options: Any) -> int:
    """Returns when it is unloaded, which may wait for what runs on it."""
    proxy = ProxyClient(options)
    try:
        proxy.ask("POST", "/models/unload", {"model": options.name}, 900.0)
    except GuardError as error:
        if str(error) != "model is not running":
            raise
    _await_model(proxy, options.name, ("loaded", "loading"))
    print(f"{printable(options.name)}: unloaded")
    return 0


def _await_model(proxy: ProxyClient, name: str, states: Collection[Any]) -> tuple[dict[str, Any], float]:
    """Wait while a model is in one of these states, with a progress line on a terminal -> (its status then, seconds)."""
    begun = time.monotonic()
    while True:
        status: dict[str, Any] = next((_dict_of(model, "status") for model in proxy.models() if model["id"] == name), {})
        spent = time.monotonic() - begun
        going = status.get("value") in states
        if sys.stderr.isatty():
            text = f"{printable(name)}: {status.get('value')}, {age(spent)} " if going else ""
            sys.stderr.write(f"\r{text}\x1b[K")
            sys.stderr.flush()
        if not going:
            return status, spent
        time.sleep(0.25)


# ----- engine


def _host_of(options: Any) -> Host:
    """The host that a command names, talked to directly, without the proxy."""
    config = the_config(options)
    host = config.hosts.get(options.host)
    if host is None:
        raise UsageError(f"there is no host {printable(options.host)}{did_you_mean(options.host, config.hosts)}")
    return Host(host, config.proxy, Remote(host, state_folder(options.state_dir)), Events())


def engine_install_command(options: Any) -> int:
    """Copy this file to a box; starts nothing."""
    host = _host_of(options)
    if host.config.ssh is None:
        raise UsageError(f"host {host.config.name} is this machine: there is nothing to install")
    reply = host.install()
    was = reply.get("before")
    before = "nothing was there" if not was else "the same was there" if was == reply["sha256"] else f"replaces {was[:12]}"
    copy = f"llmguard {__version__} {reply['sha256'][:12]}"
    print(f"{host.config.name}: {copy} is at {reply['path']} ({before}); nothing was started")
    return 0


def engine_status_command(options: Any) -> int:
    """What the box itself says."""
    host = _host_of(options)
    reply = host.status()
    name = host.config.name
    engine = reply.get("engine") or {}
    if reply.get("active"):
        held = size_text(engine["gpu_bytes"]) if engine.get("gpu_bytes") is not None else "unknown"
        pids = ", ".join(map(str, engine.get("pids", [])))
        memory = f"GPU memory {held}, RSS {size_text(engine.get('rss', 0))}"
        print(f"{name}: engine {reply['active']} is {reply['state']} (pid {pids}), {memory}")
    else:
        print(f"{name}: no engine of ours runs")
    for owner in host.foreign(reply):
        since = f" (since {owner['since']})" if owner.get("since") else ""
        print(f"{name}: held: {printable(owner['text'])}{since}")
    for device in (reply.get("gpu") or {}).get("devices", []):
        used, total = (size_text(device[key]) if device[key] is not None else "not reported" for key in ("used", "total"))
        print(f"{name}: GPU {device['index']} {printable(device['name'])}: {used} of {total} used")
    if not (reply.get("gpu") or {}).get("devices"):
        print(f"{name}: no GPU")
    print(f"{name}: agent {reply.get('agent')} {str(reply.get('sha256'))[:12]}")
    return 0


def engine_start_command(options: Any) -> int:
    host = _host_of(options)
    if options.engine not in host.config.engines:
        hint = did_you_mean(options.engine, host.config.engines)
        raise UsageError(f"host {host.config.name} has no engine {printable(options.engine)}{hint}")
    host.start(options.engine)
    print(f"{host.config.name}: engine {options.engine} is started; it serves once it has loaded")
    return 0


def engine_stop_command(options: Any) -> int:
    host = _host_of(options)
    host.stop()
    print(f"{host.config.name}: stopped, and nothing of our engines is left")
    return 0


# ----- probe and watch


class GuardState:
    """What a guard remembers of one server: its part of probe.json or watch.json, {"version": 1, "servers": {URL: …}}. Two runs
    for one server never overlap."""

    def __init__(self, folder: str, what: str, address: Address) -> None:
        import zlib

        self.url = f"http://{address.authority}{address.base}"
        self._file = StateFile(folder, what + ".json")
        self._file_lock = os.path.join(folder, what + ".json.lock")
        self.lock = Lock(os.path.join(folder, f"{what}-{zlib.crc32(self.url.encode()):08x}.lock"), what)

    def load(self) -> dict[str, Any]:
        return dict(_dict_of(_dict_of(self._file.load(), "servers"), self.url))

    def save(self, known: dict[str, Any]) -> bool:
        """Ours alone: another run may have written another server's meanwhile. False when it cannot be written."""
        lock = Lock(self._file_lock, self._file.path)
        lock.acquire(10.0)
        with lock:
            content = self._file.load()
            return self._file.save({**content, "servers": {**_dict_of(content, "servers"), self.url: known}})


def _guard(options: Any, what: str, wait: float, act: Callable[[ModelServer, GuardState, Tell], int]) -> int:
    """Run a guard, alone for its server. Whatever goes wrong is a report: an exit code of 1 means "healed"."""
    tell = Tell(options, what)
    try:
        client = ProxyClient(options)
        state = GuardState(state_folder(options.state_dir), what, client.address)
        try:
            state.lock.acquire(wait)
        except AlreadyHeld as held:
            tell.say(Report(OK, f"another {what} runs: {held.fields['holder']}"))  # whose result it is, he tells
            return OK
        with state.lock:
            return act(ModelServer(client.address, client.key), state, tell)
    except Exception as error:
        report = _failed(error)
        tell(report, None)
        return report.level


def _failed(error: Exception) -> Report:
    """A server that does not answer is critical; what can't be found out for another reason is unknown."""
    if isinstance(error, GuardError):
        return Report(CRITICAL if isinstance(error, HostDown) else UNKNOWN, str(error))
    if isinstance(error, OSError):
        return Report(UNKNOWN, f"{error.filename or 'this box'}: {error.strerror}")
    import traceback

    log(f"internal error: {traceback.format_exc()}", ERROR)
    return Report(UNKNOWN, f"internal error, please report it: {error!r}")


def probe_command(options: Any) -> int:
    """Time a request to each model, heal what fell back."""
    return _guard(options, "probe", options.wait, lambda server, state, tell: _probe(options, server, state, tell))


def _probe(options: Any, server: ModelServer, state: GuardState, tell: Tell) -> int:
    known = state.load()
    before = known.get("told")
    try:
        report = _probe_models(options, server, known)
    except Exception as error:
        report = _failed(error)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    known["told"] = report.level
    if not options.dry_run:
        state.save(known)
    tell(report, before)
    return report.level


def _probe_models(options: Any, server: ModelServer, known: dict[str, Any]) -> Report:
    box, runs = Box(), _dict_of(known, "runs")
    names = options.models or [entry.model for entry in server.loaded() if entry.state == "ready"]
    asked_for = json.dumps(sorted(options.models))
    last, now = _dict_of(runs, asked_for), time.time()
    signs = signs_of(options.if_changed or (), server, box, run_tool)
    if options.if_changed and last and same_signs(signs, _dict_of(last, "signs"), names):
        since, again = last.get("checked"), parse_timestamp(last.get("checked")) + STILL_BAD - now
        metrics = [(str(name), dict(labels), float(value)) for name, labels, value in last.get("metrics") or ()]
        if last.get("good"):
            return Report(OK, f"nothing changed since the last good probe at {since}", metrics=metrics)
        if last.get("level") == CRITICAL and 0 < again <= STILL_BAD:  # more: a clock was put back
            return Report(CRITICAL, f"at {since}, asked again in {age(again)}: {last.get('text')}", metrics=metrics)

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{printable(text)}\x1b[K")
            sys.stderr.flush()

    settings = ProbeSettings(options.max_wall, options.wait, options.dry_run, options.force, not options.no_heal)
    models = dict(_dict_of(known, "models"))
    prober = Prober(server, settings, models, progress, box)
    results = [prober.probe(model) for model in names]
    report = probe_report(server, results)
    if results and not options.dry_run:
        signs = signs_of(options.if_changed or (), server, box, run_tool)  # the servers that were probed
        good = all(result.verdict in ("healthy", "healed") for result in results)
        run_now: dict[str, Any] = {"signs": signs, "checked": timestamp(now), "level": report.level, "good": good}
        run_now.update(text=report.text, metrics=report.metrics)  # a collector's series must not come and go
        known.update(models=models, runs={**runs, asked_for: run_now})
    return report


def watch_command(options: Any) -> int:
    """One pass, or passes for as long as it says -> the worst of their levels."""
    return _guard(options, "watch", 0.0, lambda server, state, tell: _watch(options, server, state, tell))


def _watch(options: Any, server: ModelServer, state: GuardState, tell: Tell) -> int:
    limits, config = dict(options.max_rss or ()), options.llama_swap_config
    settings = WatchSettings(limits, options.vram_low, config, options.force, options.dry_run, not options.no_respawn)
    known = state.load()
    server = ModelServer(server.address, server.api.key, kind=str(known.get("kind") or ""))  # spares a question each minute
    watch = Watch(server, settings, known, remember=lambda: state.save(known))
    due = time.monotonic()
    until = due + (NEVER if options.loop else options.seconds)
    level, said = OK, ""
    while True:
        before = known.get("level")
        try:
            report = watch.one_pass()
            known["kind"] = server.kind
        except Exception as error:
            report = _failed(error)  # a front that is just restarted: what it had loaded is still known at the next pass
        level = worst((level, report.level))
        known["level"] = report.level
        if not options.dry_run:
            state.save(known)
        words = re.sub(r"\d[\d.]*", "", report.text)  # an age grows from pass to pass, and that alone is no news
        tell(report, before, news=words != said or report.level != before)
        said = words
        now = time.monotonic()
        due = max(due + options.every, now)
        if due > until:
            return level
        time.sleep(due - now)


# ----- main


GUARDS = ("check", "status", "probe", "watch")  # speak Nagios


def _seconds(text: str) -> float:
    return float(_argument(duration, text))


def _bytes(text: str) -> int:
    return int(_argument(size, text))


def _model_size(text: str) -> tuple[str, int]:
    name, _, count = text.rpartition("=")
    return name, _bytes(count)


def _argument(read: Callable[[str], Any], text: str) -> Any:
    import argparse

    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class CommandLine:
    """`parser`: the whole command line, or only those commands of it that are among `words`: to build all of it takes longer
    than a pass of `watch`. Each command's help fits a screen, and ends with an example."""

    def __init__(self, words: Collection[str] = ()) -> None:
        import argparse

        try:  # argparse would ask anew for each option
            width = int(os.environ.get("COLUMNS") or os.get_terminal_size().columns) - 2
        except (ValueError, OSError):
            width = 78
        shape = {"width": width, "max_help_position": 26}

        class Parser(argparse.ArgumentParser):
            def __init__(self, *args: Any, examples: Iterable[str] = (), **more: Any) -> None:
                more["formatter_class"] = lambda prog: argparse.RawDescriptionHelpFormatter(prog, **shape)
                if examples:
                    more["epilog"] = "\n".join(["examples:", *(f"  llmguard.py {example}" for example in examples)])
                super().__init__(*args, **more)

            def error(self, message: str) -> Any:
                raise UsageError(f"{message} (see {self.prog} --help)")

        self._new = Parser
        self.parser = parser = Parser(
            prog="llmguard.py",
            description="Keeps local LLM boxes honest.",
            epilog="Exit codes: check, status, probe, watch 0 OK, 1 warning or healed, 2 critical, 3\n"
            "unknown; the others sysexits.",
        )
        parser.add_argument("--version", action="store_true", help="version and the hash of this very file")
        parser.add_argument("--state-dir", metavar="DIR", help="where state files are kept")
        parser.add_argument("--log-format", choices=("text", "json"), default="text", help="of the log on stderr (text)")
        parser.add_argument("-v", "--verbose", action="store_true", help="log more")
        # without a prog argparse would format the usage once, only to have it
        self._commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog="llmguard.py")
        self._common = self._parent()
        self._common.add_argument("-c", "--config", metavar="FILE", help="configuration, .toml or .json")
        self._asking = self._parent(self._common)
        self._asking.add_argument("--url", help="http://HOST:PORT (default: proxy.listen)")
        self._asking.add_argument("--key", help="API key (or $LLMGUARD_API_KEY, the configuration's)")
        commands = {
            "serve": self._serve, "check": self._check, "status": self._status, "probe": self._probe, "watch": self._watch,
            "model": self._model, "engine": self._engine, "agent": self._agent, "completion": self._completion,
        }  # fmt: skip
        for name in [name for name in commands if name in words] or commands:
            commands[name]()

    def _parent(self, *parents: Any) -> Any:
        return self._new(add_help=False, parents=parents)

    def _add(
        self, name: str, run: Callable[[Any], int], about: str, *examples: str, parents: Iterable[Any] = (), to: Any = None
    ) -> Any:
        sentence = about[:1].upper() + about[1:] + "."
        made = (to or self._commands).add_parser(name, help=about, description=sentence, parents=parents, examples=examples)
        made.set_defaults(run=run)
        return made

    def _serve(self) -> None:
        made = self._add("serve", serve, "the proxy", "serve -c llmguard.toml", parents=[self._common])
        made.add_argument("--listen", metavar="HOST:PORT", help="instead of proxy.listen")

    def _check(self) -> None:
        about = "read the configuration, reach every host"
        self._add("check", check, about, "check -c llmguard.toml", parents=[self._common])

    def _status(self) -> None:
        about = "what the proxy does now; a Nagios line and exit code"
        examples = "status", "status --json --url http://box:8080"
        made = self._add("status", status_command, about, *examples, parents=[self._asking])
        made.add_argument("--json", action="store_true", help="all of /status")

    def _telling(self) -> Any:
        """What probe and watch have in common."""
        telling = self._parent(self._asking)
        telling.add_argument("--json", action="store_true", help="print all of it as JSON")
        telling.add_argument("-q", "--quiet", action="store_true", help="print nothing while all is well")
        telling.add_argument("--dry-run", action="store_true", help="look and tell, change nothing")
        telling.add_argument("--force", action="store_true", help="also where somebody may use the model")
        telling.add_argument("--textfile", metavar="FILE", help="FILE.prom for the node_exporter")
        telling.add_argument("--on-alert", metavar="COMMAND", help="run when the result changed, report on stdin")
        telling.add_argument("--ping", metavar="URL", help="healthchecks.io and its like: URL, URL/fail")
        return telling

    def _probe(self) -> None:
        made = self._add(
            "probe", probe_command, "time each model, heal what fell back to the CPU",
            "probe --url http://box:8080 qwen3.6-27b",
            "probe --url http://box:8080 --if-changed config.yaml qwen3.6-27b",
            parents=[self._telling()],
        )  # fmt: skip
        made.usage = "llmguard.py probe [options] [MODEL ...]"
        made.add_argument("models", nargs="*", metavar="MODEL", help="default: what is loaded now")
        made.add_argument("--max-wall", type=_seconds, metavar="TIME", help="longest healthy time (40s, or a baseline)")
        made.add_argument("--wait", type=_seconds, default=120.0, metavar="TIME", help="for a model in use (2m)")
        made.add_argument("--if-changed", action="append", metavar="FILE", help="only when it, or the server, changed")
        made.add_argument("--no-heal", action="store_true", help="unload nothing")

    def _watch(self) -> None:
        made = self._add(
            "watch", watch_command, "judge fresh servers of llama-swap or llmguard on this box",
            "watch --url http://127.0.0.1:8080 --for 50s --quiet   # cron",
            "watch --url http://127.0.0.1:8080 --loop              # a service",
            parents=[self._telling()],
        )  # fmt: skip
        made.usage = "llmguard.py watch [options]"
        made.add_argument("--for", dest="seconds", type=_seconds, default=0.0, metavar="TIME", help="go on for so long")
        made.add_argument("--loop", action="store_true", help="go on for ever")
        made.add_argument("--every", type=_seconds, default=EVERY, metavar="TIME", help="between two passes (10s)")
        limit = {"type": _model_size, "action": "append", "metavar": "[M=]SIZE"}
        made.add_argument("--max-rss", **limit, help="healthy VmRSS (8GiB; M: of that model)")
        made.add_argument("--vram-low", type=_bytes, default=VRAM_LOW, metavar="SIZE", help="in use when drained (1GiB)")
        made.add_argument("--llama-swap-config", metavar="FILE", help="default: by its command line")
        made.add_argument("--no-respawn", action="store_true", help="load nothing again after a reload")

    def _model(self) -> None:
        made = self._commands.add_parser("model", help="list, load and unload models")
        verbs = made.add_subparsers(dest="verb", metavar="list|load|unload", required=True)
        self._add("list", model_list_command, "all models and their state", "model list", parents=[self._asking], to=verbs)
        for verb, run, about in (
            ("load", model_load_command, "start the engine of a model, and wait until it serves"),
            ("unload", model_unload_command, "stop it once nothing runs on it"),
        ):
            one = self._add(verb, run, about, f"model {verb} small", parents=[self._asking], to=verbs)
            one.add_argument("name", metavar="NAME")

    def _engine(self) -> None:
        made = self._commands.add_parser("engine", help="install, status, start, stop on one host, without the proxy")
        verbs = made.add_subparsers(dest="verb", metavar="install|status|start|stop", required=True)
        for verb, run, about in (
            ("install", engine_install_command, "copy this file to the box; starts nothing"),
            ("status", engine_status_command, "what runs there, and who holds the GPU"),
            ("start", engine_start_command, "start an engine, unless somebody else holds the GPU"),
            ("stop", engine_stop_command, "stop every engine of ours, and prove that it is gone"),
        ):
            more = " mainline" if verb == "start" else ""
            one = self._add(verb, run, about, f"engine {verb} a9{more}", parents=[self._common], to=verbs)
            one.add_argument("host", metavar="HOST")
            if more:
                one.add_argument("engine", metavar="ENGINE")

    def _agent(self) -> None:
        run = lambda options: agent_main(state_folder(options.state_dir), options.mode or "")
        made = self._add("agent", run, "answer one request about this box (started by the proxy)")
        modes = made.add_mutually_exclusive_group()
        modes.add_argument("--follow", dest="mode", action="store_const", const="follow", help="stay, and tell each change")
        modes.add_argument("--receive", dest="mode", action="store_const", const="receive", help="take a new copy of this file")

    def _completion(self) -> None:
        run = lambda options: print(completion(CommandLine().parser, options.shell)) or OK
        about = "print what makes a shell complete these words"
        made = self._add("completion", run, about, "completion bash >> ~/.bashrc")
        made.add_argument("shell", choices=sorted(_COMPLETION))


# ----- completion

_COMPLETION = {  # shell -> (before, a line for each place, after); a place is the words before the one that is completed
    "bash": (
        """_llmguard() {
  local at="${COMP_WORDS[*]:1:COMP_CWORD-1}" words="" word=${COMP_WORDS[COMP_CWORD]}
  case "$at" in""",
        '    "%(place)s"*) words="%(words)s" ;;',
        """  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [ ${#COMPREPLY[@]} -gt 0 ] || COMPREPLY=($(compgen -f -- "$word"))
}
complete -o filenames -F _llmguard llmguard.py llmguard""",
    ),
    "zsh": (
        """#compdef llmguard.py llmguard
_llmguard() {
  local at="${words[2,CURRENT-1]}"
  case "$at" in""",
        '    "%(place)s"*) compadd -- %(words)s; _files ;;',
        """  esac
}
compdef _llmguard llmguard.py llmguard""",
    ),
    "fish": (
        """function __llmguard_at
  set -l words (commandline -opc)
  for place in %(places)s
    string match -q -- "$place*" "$words[2..]"; and break
  end
  test "$place" = "$argv[1]"
end""",
        "complete -c llmguard.py -n '__llmguard_at \"%(place)s\"' -a '%(words)s'",
        "complete -c llmguard -w llmguard.py",
    ),
}


def completion(parser: Any, shell: str) -> str:
    """A completion script, made from the parser itself. The longest place comes first."""

    def places(of: Any, place: str) -> Iterator[tuple[str, list[str]]]:
        words = []
        for action in of._actions:  # argparse tells them in no other way
            words += [option for option in action.option_strings if option.startswith("--")]
            for name, below in (action.choices.items() if isinstance(action.choices, dict) else ()):
                words.append(name)
                yield from places(below, f"{place} {name}".strip())
            if not isinstance(action.choices, dict):
                words += [str(choice) for choice in action.choices or () if not action.option_strings]
        yield place, words

    before, line, after = _COMPLETION[shell]
    found = sorted(places(parser, ""), key=lambda entry: -len(entry[0]))
    begin = before % {"places": " ".join(f"'{place}'" for place, _ in found)}
    return "\n".join([begin, *(line % {"place": place, "words": " ".join(words)} for place, words in found), after])


def main(argv: list[str] | None = None) -> int:
    """The command line -> exit code. What it printed is written by then, so that the caller may leave with os._exit."""
    words = sys.argv[1:] if argv is None else argv
    if words[-1:] == ["agent"] and words[:-1] in ([], ["--state-dir", *words[1:2]]):
        return agent_main(state_folder(words[1] if words[1:] else None))  # each tick on each box: without argparse
    gc.enable()
    parser = CommandLine(words).parser
    try:
        options = parser.parse_args(words)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return UNKNOWN if any(word in GUARDS for word in words) else error.exit_code
    log.verbose, log.json = options.verbose, options.log_format == "json"
    code = 0
    try:
        try:
            if options.version:
                print(f"llmguard {__version__} {own_hash()[:12]}")
            elif not options.command:
                parser.print_help()
                code = 64
            else:
                code = options.run(options)
        except GuardError as error:
            sys.stderr.write(f"llmguard.py: {error}\n")
            code = UNKNOWN if options.command in GUARDS else error.exit_code
        except KeyboardInterrupt:
            code = 128 + 2
        print(end="", flush=True)
    except BrokenPipeError:
        code = 128 + 13  # who read it has left, as `| head` does: what SIGPIPE would have said
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still in the buffer
    return code


def stays(words: list[str]) -> bool:
    """Is this a command that runs for long?"""
    return "serve" in words or "--loop" in words


def become_imported() -> None:
    """Start again, in this very process, from the compiled file: to compile it takes 25 MiB that are never given back."""
    import importlib.util
    import py_compile

    path = os.path.abspath(__file__)
    compiled = importlib.util.cache_from_source(path)
    try:
        if not os.path.exists(compiled) or os.path.getmtime(compiled) < os.path.getmtime(path):
            py_compile.compile(path, quiet=2)
    except OSError:
        return  # there is no place for it
    os.execv(sys.executable, [*interpreter(), "-c", start_words(path) + "  # llmguard.py", *sys.argv[1:]])


if __name__ == "__main__":
    if stays(sys.argv[1:]) and importable(__file__):
        become_imported()
    os._exit(main())

"""A model of the whole hand-back: proxy, agent, runner, engine and clients, in an order that a seed draws.

    sim.py N [SEED]     N schedules, beginning with that seed; prints the seeds that fail, exit code 1 when any does
    sim.py -v 1 SEED    that one schedule, told step by step

What is real: `Host` with `plan` and `Ledger` (driven by turn()), `Agent` with its owners, its locked start and its proof of a
stop. What is played: the box (processes, ports, a GPU), the engines, the line to the agent, the clients, and the runner, which does
what examples/jobrunner.py does. Each of them may be slow, fail, crash and start again between any two of its steps. Everything
runs in one thread on a clock that jumps from event to event.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import multiprocessing
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import llmguard  # noqa: E402
from llmguard import (  # noqa: E402
    NEVER,
    Agent,
    AgentError,
    Box,
    Device,
    Engine,
    EngineConfig,
    Events,
    GpuProcess,
    GpuReading,
    GuardError,
    Host,
    HostConfig,
    HostDown,
    Lease,
    Ledger,
    Process,
    ProxyConfig,
    QueueReading,
    Ticket,
    Wait, dataclass, field,
)

GIB = 1 << 30
PORTS = {"mainline": 8081, "other": 8082}
STOPPED = ("engine stopped", "nothing of our engines is left")


# ----- a box in memory


class ToyBox(Box):
    """A machine with processes, listening ports and one GPU in memory; what is read as a file is below `root`."""

    def __init__(self, root: str = "/nowhere") -> None:
        super().__init__(root)
        self.alive: dict[int, Process] = {}
        self.ports: dict[int, int] = {}  # port -> pid
        self.gpu: dict[int, int] = {}  # pid -> bytes
        self.pid_numbers = itertools.count(2530256)

    def spawn(self, comm: str, pid: int | None = None) -> Process:
        pid = pid or next(self.pid_numbers)
        self.alive[pid] = Process(pid, pid, comm, "S", pid, 1000)
        return self.alive[pid]

    def kill(self, pid: int) -> None:
        self.alive.pop(pid, None)
        self.gpu.pop(pid, None)
        self.ports = {port: other for port, other in self.ports.items() if other != pid}

    def pids(self) -> list[int]:
        return list(self.alive)

    def process(self, pid: int) -> Process | None:
        return self.alive.get(pid)

    def memory(self, pid: int):
        return None

    def read(self, path: str) -> str | None:
        return None

    def listeners(self, port: int) -> list[int]:
        return [self.ports[port]] if port in self.ports else []

    def listening(self, port: int) -> list[Process]:
        return [self.alive[pid] for pid in self.listeners(port)]

    def reading(self) -> GpuReading:
        rows = tuple(GpuProcess(pid, "GPU-0", held, comm=self.alive[pid].comm) for pid, held in self.gpu.items())
        used = sum(self.gpu.values())
        return GpuReading("nvidia", (Device(0, "GPU-0", "toy", 80 * GIB, used, 80 * GIB - used),), rows)


@dataclass
class Unit:
    """One engine unit of the box, as systemd keeps it."""

    name: str
    main: Process | None = None
    stuck: list[Process] = field(default_factory=list)  # what survived a stop
    escaped: list[Process] = field(default_factory=list)  # the same, and left the unit's cgroup
    restarting: bool = False  # Restart=always, in its pause
    always: bool = False
    by_us: bool = False
    ready_at: float = NEVER
    visible_at: float = NEVER  # when it shows on the GPU

    def processes(self) -> list[Process]:
        return [*([self.main] if self.main else []), *self.stuck]


@dataclass
class ToyEngine(Engine):
    """The agent's side of a unit. `site` starts and stops it."""

    site: object = None

    noun = "an engine unit"

    @property
    def unit(self) -> Unit:
        return self.site.units[self.name]

    def processes(self) -> list[Process]:
        return self.unit.processes()

    @property
    def state(self) -> str:
        if self.unit.main:
            return "running"
        if self.unit.stuck:
            return llmguard.LEFT_OVER
        return "restarting" if self.unit.restarting else "off"

    @property
    def comes_back(self) -> str:
        return "Restart=always" if self.unit.always else ""

    @property
    def is_back(self) -> bool:
        return self.unit.main is not None or self.unit.restarting

    def start(self) -> None:
        self.site.start_unit(self.name)

    def stop(self) -> None:
        self.site.stop_unit(self.name)

    def log_tail(self, lines: int = 10) -> list[str]:
        return ["loading"]


class ToyAgent(Agent):
    """The real agent on a toy box."""

    def __init__(self, site, folder: str, box: ToyBox, clock) -> None:
        super().__init__(folder, box, clock)
        self.site = site

    def _in_use(self, engine: Engine, ask: dict) -> bool:
        return self.site.in_use(engine.name)

    def _engine(self, name: str, entry: dict, ask: dict) -> ToyEngine:
        return ToyEngine(name, name, entry["port"], self.box, self.clock, site=self.site)

    def _gpus(self, ask: dict) -> GpuReading:
        return self.box.reading()


# ----- the parts of the model


class ProxyCrash(BaseException):
    """The proxy's process ends here."""


class Broken(AssertionError):
    """A promise was not kept."""


class SimClock(llmguard.Clock):
    def __init__(self, world: World) -> None:
        self.world = world

    def now(self) -> float:
        return 1_793_000_000.0 + self.world.mono + self.world.jump

    def monotonic(self) -> float:
        return self.world.mono

    def sleep(self, seconds: float) -> None:
        self.world.run_until(self.world.mono + seconds)

    def wait(self, condition: SimCondition, seconds: float) -> None:
        self.world.waits(condition, seconds)


class SimCondition:
    """The host's lock: says when it is held, and wakes the host."""

    def __init__(self, world: World) -> None:
        self.world, self.depth = world, 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_) -> None:
        self.depth -= 1

    def notify_all(self) -> None:
        assert self.depth
        self.world.host_due = self.world.mono


class BoxClock(SimClock):
    """The box's own clock does not jump."""

    def now(self) -> float:
        return 1_793_000_000.0 + self.world.mono


class MemoryFile:
    """A state file on a disk that may be full."""

    path = "memory"

    def __init__(self, world: World) -> None:
        self.world, self.content, self.problem = world, {}, None

    def save(self, content: dict) -> bool:
        if self.world.chance(0.05):
            self.problem = "full"
            return False
        self.content = {"hosts": dict(content["hosts"])}
        self.problem = None
        return True


class SimAgent(ToyAgent):
    """The agent, whose queue is in memory too, and whose readings may fail."""

    @contextlib.contextmanager
    def _lock(self, op: str, ask: dict):
        yield

    def _gpus(self, ask: dict) -> GpuReading:
        if self.site.chance(0.01):
            return GpuReading(problem="nvidia-smi hangs")
        return self.box.reading()

    def read_queue(self, ask: dict) -> QueueReading:
        return self.site.queue.read(self.site.chance(0.01))

    def signs(self, ask: dict) -> tuple:
        return (self.site.queue.version,)


class Queue:
    """The job queue's folder and log."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.waiting: dict[str, dict] = {}
        self.running: dict[str, dict] = {}
        self.done: list[str] = []
        self.log: list[tuple] = []
        self.changed = world.box_clock.now() - 1000.0
        self.version = 0

    def write(self, event: str, job: str, blocker: Process | None = None) -> None:
        self.log.append((event, job, f"t={self.world.mono:.1f}", blocker))
        self.touch()
        self.world.note(f"log: {event} {job} {blocker.pid if blocker else ''}")

    def touch(self) -> None:
        self.version += 1
        self.world.queue_changed()

    def outstanding(self) -> list[Wait]:
        """By the order of the lines: the last word on each job that still waits."""
        waits = []
        for job in self.waiting:
            last = next((entry for entry in reversed(self.log) if entry[1] == job), None)
            if last and last[0] == "gpu-wait":
                waits.append(Wait(job, last[2], last[3].pid, last[3].comm))
        return waits

    def read(self, fails: bool) -> QueueReading:
        if fails:
            return QueueReading(problem="the job queue cannot be read")
        return QueueReading(tuple(sorted(self.running)), self.changed, tuple(self.outstanding()))


class Runner:
    """What examples/jobrunner.py does. `look` yields how long it takes to its next step; a crash may come at each."""

    def __init__(self, world: World, queue: Queue) -> None:
        self.world, self.queue = world, queue
        self.every = world.random.choice([5.0, 10.0])
        self.said: set[tuple] = set()
        self.steps = None

    def pause(self) -> float:
        return self.world.random.choice([0.0, 0.0, 0.02, 0.3])

    def step(self) -> None:
        world = self.world
        if world.chance(0.01):
            world.note("the runner crashes")
            self.steps, self.said = None, set()
            world.after(world.random.choice([0.5, 5.0, 20.0]), self.step)
            return
        if self.steps is None:
            self.steps = self.look()
        pause = next(self.steps, None)
        if pause is None:
            self.steps = None
            slow = world.random.choice([0.0, 0.0, 0.0, 3.0]) if world.trouble else 0.0
            world.after(self.every + slow, self.step)
        else:
            world.after(pause, self.step)

    def look(self):
        queue, world = self.queue, self.world
        for name, job in sorted(queue.running.items()):
            if job["process"] is None or job["process"].pid not in world.box.alive:
                yield self.pause()
                del queue.running[name]
                queue.changed = world.box_clock.now()
                queue.done.append(name)
                self.said = {words for words in self.said if words[1] != name}
                queue.touch()
                yield self.pause()
                queue.write("done", name)
        busy = {job["lane"] for job in queue.running.values()}
        for name, job in sorted(queue.waiting.items()):
            self.once("queued", name)
            if job["lane"] in busy:
                continue
            blockers = sorted(world.box.gpu) if job["lane"] == "gpu" else []
            if blockers:
                self.once("gpu-wait", name, world.box.alive[blockers[0]])
                yield self.pause()
                continue
            checked = world.mono
            yield self.pause()
            if name not in queue.waiting:
                continue  # somebody took it back
            queue.running[name] = queue.waiting.pop(name)
            job["process"] = None
            queue.changed = world.box_clock.now()
            queue.touch()
            yield self.pause()
            self.start(name, job, checked)
            busy.add(job["lane"])
            yield self.pause()
            queue.write("start", name)

    def start(self, name: str, job: dict, checked: float) -> None:
        process = self.world.box.spawn("sh" if job["lane"] == "cpu" else "bench")
        job["process"] = process
        self.world.note(f"job {name} runs, pid {process.pid}")
        if job["lane"] == "gpu":
            self.world.box.gpu[process.pid] = 20 * GIB
            self.world.job_started(process, checked)
        self.world.after(job["seconds"], lambda: self.world.box.kill(process.pid))

    def once(self, event: str, name: str, blocker: Process | None = None) -> None:
        words = (event, name, blocker and blocker.pid)
        if words not in self.said:
            self.said.add(words)
            self.queue.write(event, name, blocker)


class SimClient:
    """Somebody who asks for an engine and streams from it. It queues as Host.acquire does, without a thread of its own."""

    def __init__(self, world: World, engine: str) -> None:
        self.world, self.engine = world, engine
        self.seconds = world.random.choice([0.5, 3.0, 20.0, 60.0])
        self.lease: Lease | None = None
        self.ticket: Ticket | None = None
        self.answer: object = None

    def arrive(self) -> None:
        host = self.world.host
        if host is None:
            self.answer = "no proxy"
            return
        with host._changed:
            if host._admits(self.engine):
                self.lease = host._lease(self.engine)
            else:
                self.ticket = Ticket(self.engine, host._clock.monotonic() + host.proxy.queue_timeout)
                host._queue.append(self.ticket)
                if not host._trusted:
                    host._look_due = 0.0
                host._changed.notify_all()
        if self.lease:
            self.stream()
        else:
            self.world.queued.append(self)

    def poll(self) -> bool:
        """True when it no longer queues."""
        if not self.world.host._settled(self.ticket):
            return False
        if self.ticket.error:
            self.answer = self.ticket.error
            self.world.note(f"refused: {self.ticket.error}")
        else:
            self.lease = Lease(self.world.host, self.engine)
            self.stream()
        return True

    def stream(self) -> None:
        world = self.world
        unit = world.units[self.engine]
        world.used.add(self.engine)
        if unit.main is None or world.mono < unit.ready_at:
            self.answer = "engine lost"
            world.host.suspect(self.engine)
            self.lease.release()
            return
        world.note(f"a stream of {self.seconds} s on {self.engine}")
        world.streams[self] = self.engine
        world.after(self.seconds, self.end)

    def end(self) -> None:
        if self in self.world.streams:
            del self.world.streams[self]
            self.answer = "served"
            self.lease.release()

    def lose(self) -> None:
        """The engine died under it."""
        del self.world.streams[self]
        self.answer = "lost"
        self.world.host.suspect(self.engine)
        self.lease.release()


class SimApi:
    def __init__(self, world: World, engine: str, address, key: str) -> None:
        self.world, self.engine, self.address, self.key = world, engine, address, key

    @property
    def unit(self) -> Unit:
        return self.world.units[self.engine]

    def _mute(self) -> bool:
        """In a long prefill it answers nobody."""
        return self.engine in self.world.busy_engines() and self.world.chance(0.3)

    def ready(self) -> bool:
        self.world.unlocked("a question to an engine")
        return self.unit.main is not None and self.world.mono >= self.unit.ready_at and not self._mute()

    def in_use(self) -> bool:
        self.world.unlocked("a question to an engine")
        return self.world.in_use(self.engine)

    def models(self):
        return None

    def load(self, model: str) -> bool:
        return False


class World:
    """Everything, and the promises that are checked at each step."""

    SETTLE = 20.0

    def __init__(self, seed: int, verbose: bool = False) -> None:
        self.random = random.Random(seed)
        self.verbose = verbose
        self.mono, self.jump = 1000.0, 0.0
        self.events_due: list[tuple] = []
        self.order = itertools.count()
        self.clock, self.box_clock = SimClock(self), BoxClock(self)
        self.trouble = True
        draw = self.random.choice
        self.faults = draw([0.0, 0.02, 0.1])  # how often a call of the agent fails
        self.follows = draw([True, True, False])
        self.proxy = ProxyConfig(
            tick=draw([10.0, 30.0]), handover=draw([10.0, 30.0]), idle_stop=draw([15.0, 60.0, NEVER]), queue_timeout=60.0
        )
        engines = {
            name: EngineConfig(name=name, command=(name,), port=port, models={name: name}, start_timeout=40.0)
            for name, port in PORTS.items()
        }
        self.config = HostConfig(name="a9", address="127.0.0.1", engines=engines, job_queue={"path": "~/jobs", "settle": self.SETTLE})
        self.box = ToyBox()
        self.units = {name: Unit(name, always=self.chance(0.2)) for name in PORTS}
        self.agent = SimAgent(self, "/nowhere", self.box, self.box_clock)
        self.ledger_files = {kind: MemoryFile(self) for kind in Ledger.KINDS}
        self.queue = Queue(self)
        self.runner = Runner(self, self.queue)
        self.host: Host | None = None
        self.host_due = 0.0
        self.rests = False
        self.noise, self.last_turn = 0, 0.0
        self.streams: dict[SimClient, str] = {}
        self.others: dict[object, tuple[str, float]] = {}  # streams beside the proxy: (engine, since)
        self.queued: list[SimClient] = []
        self.clients: list[SimClient] = []
        self.used: set[str] = set()  # engines that this proxy used or started
        self.unload_asked = False
        self.ours_seen = -NEVER  # when an engine of ours was last there
        self.told_at = -NEVER  # when the proxy last heard what is there
        self.disturbed = -NEVER
        self.reason_until = -NEVER  # until when a release is right: a job waits or ran a moment ago
        self.down_until = 0.0
        self.overlaps: list[tuple] = []
        self.handed_until = -NEVER
        self.left: list[Process] = []  # of our engines, when the last call ended
        self.stop_failed_at = -NEVER
        self.stats: dict[str, int] = {}

    # ----- tools

    def chance(self, p: float) -> bool:
        return self.trouble and self.random.random() < p

    def note(self, text: str) -> None:
        if self.verbose:
            print(f"{self.mono - 1000:8.2f} {text}")

    def fail(self, text: str) -> None:
        raise Broken(f"{self.mono - 1000:.2f}: {text}")

    def count(self, what: str) -> None:
        self.stats[what] = self.stats.get(what, 0) + 1

    def after(self, seconds: float, do) -> None:
        heapq.heappush(self.events_due, (self.mono + seconds, next(self.order), do))

    def run_until(self, until: float) -> None:
        """Let everybody but the proxy act until then."""
        while self.events_due and self.events_due[0][0] <= until:
            due, _, do = heapq.heappop(self.events_due)
            self.mono = max(self.mono, due)
            do()
        self.mono = max(self.mono, until)

    def unlocked(self, what: str) -> None:
        if self.host is not None and self.host._changed.depth:
            self.fail(f"{what} under the lock")

    def waits(self, condition: SimCondition, seconds: float) -> None:
        if self.polling:
            return
        if self.host._doing is None:
            self.rests = True
            self.host_due = self.mono + max(1e-6, seconds)
            return
        depth, condition.depth = condition.depth, 0
        self.run_until(self.mono + max(seconds, self.random.choice([0.1, 1.0, 2.0])))
        self.poll_clients()
        condition.depth = depth

    polling = False

    def poll_clients(self) -> None:
        self.polling = True
        for client in list(self.queued):
            if client.poll():
                self.queued.remove(client)
        self.polling = False

    def busy_engines(self) -> set[str]:
        return {*self.streams.values(), *(engine for engine, _ in self.others.values())}

    def in_use(self, engine: str) -> bool:
        return engine in self.busy_engines()

    def log(self, text: str, priority: int = llmguard.INFO) -> None:
        self.note("proxy: " + text)
        if text.endswith(STOPPED) and self.left:
            self.fail(f"it says {text!r} while {self.left} was there when the stop ended")
        if text.endswith("engine stopped"):
            self.count("releases")
        if "internal error" in text:
            self.fail(text)

    # ----- the engines of the box

    def start_unit(self, name: str, by_us: bool = True) -> None:
        unit = self.units[name]
        if unit.main is not None:
            return
        if by_us:
            self._check_start()
        elapsed = self.random.choice([0.0, 1.0, 3.0])
        unit.restarting, unit.by_us = False, by_us
        unit.main = self.box.spawn("llama-server")
        unit.visible_at = self.mono + elapsed
        unit.ready_at = unit.visible_at + self.random.choice([0.0, 2.0, 10.0, 10.0])
        if self.chance(0.03):
            unit.ready_at = NEVER
        process = unit.main
        self.note(f"engine {name} starts, pid {process.pid}{'' if by_us else ', not by us'}")
        self.after(elapsed, lambda: self._appears(unit, process))
        self.after(unit.ready_at - self.mono, lambda: self._listens(unit, process))
        if by_us:
            self.used.add(name)
            self.count("starts")
        else:
            for job in self.queue.running.values():
                if job["lane"] == "gpu" and job["process"] and job["process"].pid in self.box.alive:
                    self._watch_overlap(unit, process, job["process"])

    def _appears(self, unit: Unit, process: Process) -> None:
        if unit.main is process:
            self.box.gpu[process.pid] = 30 * GIB

    def _listens(self, unit: Unit, process: Process) -> None:
        if unit.main is process:
            self.box.ports[PORTS[unit.name]] = process.pid

    def _check_start(self) -> None:
        """Our start never happens while a job runs or waits, or in its settle window, or in a handover."""
        on_gpu = [self.box.alive[pid].comm for pid in self.box.gpu if self.box.alive[pid].comm != "llama-server"]
        if on_gpu or self.queue.running:
            self.fail(f"an engine is started beside {on_gpu} {list(self.queue.running)}")
        if self.queue.outstanding():
            self.fail(f"an engine is started in front of a waiting job: {self.queue.outstanding()}")
        if self.box_clock.now() - self.queue.changed < self.SETTLE:
            self.fail("an engine is started in the settle window")
        if self.mono < self.handed_until:
            self.fail("an engine is started in the handover")

    def stop_unit(self, name: str) -> None:
        unit = self.units[name]
        unit.restarting = False
        self._check_cut(name)
        self.box_clock.sleep(self.random.choice([0.0, 0.1, 3.0]))
        self._check_cut(name)
        if unit.main is not None:
            process, unit.main = unit.main, None
            self.note(f"engine {name} is stopped")
            if self.chance(0.15):
                self.note(f"pid {process.pid} is stuck")
                self.disturbed = self.mono
                kept = self.random.choice([unit.stuck, unit.escaped])
                kept.append(process)
                self.box.ports.pop(PORTS[name], None)
                self.after(self.random.choice([2.0, 15.0, 50.0]), lambda: self._unstick(kept, process))
            else:
                self.box.kill(process.pid)
            self._lose(name)

    def _unstick(self, kept: list[Process], process: Process) -> None:
        kept.remove(process)
        self.box.kill(process.pid)

    def _check_cut(self, name: str) -> None:
        if name in self.streams.values():
            self.fail(f"a stop of {name} cuts a stream")
        for engine, since in self.others.values():
            if engine == name and self.mono - since > 8.0:
                self.fail(f"a stop of {name} cuts somebody beside the proxy")

    def _lose(self, name: str) -> None:
        for client, engine in list(self.streams.items()):
            if engine == name:
                client.lose()
        self.others = {key: entry for key, entry in self.others.items() if entry[0] != name}

    def crash_engine(self) -> None:
        for unit in self.units.values():
            if unit.main is not None:
                self.note(f"engine {unit.name} crashes")
                process, unit.main = unit.main, None
                self.box.kill(process.pid)
                self._lose(unit.name)
                if unit.always:
                    unit.restarting = True
                    self.after(5.0, lambda unit=unit: unit.restarting and self.start_unit(unit.name, by_us=False))
                return

    def start_by_hand(self) -> None:
        if not any(unit.processes() or unit.restarting for unit in self.units.values()):
            self.start_unit(self.random.choice(list(PORTS)), by_us=False)

    # ----- jobs and our engines at once

    def job_started(self, job: Process, checked: float) -> None:
        for unit in self.units.values():
            if unit.main is not None and unit.visible_at <= checked:
                self.fail("the runner broke its own rule")
            if unit.main is not None and unit.by_us and unit.ready_at > self.mono:
                self._watch_overlap(unit, unit.main, job)

    def _watch_overlap(self, unit: Unit, engine: Process, job: Process) -> None:
        """The two met without our doing: the engine has to go, soon."""
        self.count("overlaps")
        self.note(f"engine {engine.pid} and job {job.pid} meet")
        begun, patience = self.mono, 2 * self.proxy.tick + 30.0

        def look() -> None:
            quiet = self.disturbed < begun - 60.0 and self.mono - self.down_until > patience
            served = unit.name in self.busy_engines()
            if quiet and not served and unit.main is engine and job.pid in self.box.alive and self.faults == 0.0:
                self.fail(f"engine {engine.pid} stays beside job {job.pid}")

        self.after(patience, look)

    # ----- the line to the agent

    def close(self) -> None:
        pass

    def call(self, ask: dict, seconds: float) -> dict:
        op = ask["op"]
        self.unlocked("a call of the agent")
        self.note(f"call: {op} {ask.get('engine', '')}")
        if op == "stop":
            self._check_stop()
        if op == "start" or self.mono < self.down_until:
            self.stop_failed_at = -NEVER
        if op == "start" and self.mono < self.handed_until:
            self.fail("a start is sent in the handover")
        self.run_until(self.mono + self.random.choice([0.0, 0.0, 0.2, 2.0]))
        self._fault("before")
        if self.mono < self.down_until:
            self.run_until(self.mono + 5.0)
            raise HostDown("host a9 is down: no answer over ssh in time")
        self.look_at_ours()
        begun = self.mono
        if self._job_holds():
            self.reason_until = self.mono + self.proxy.tick + 20.0
        before = [process for unit in self.units.values() for process in unit.processes()]
        reply = self.agent.answer(dict(ask, ignore=list(ask["ignore"])))
        self.look_at_ours()
        self.left = [process for process in before if process.pid in self.box.alive]
        self.left += [process for unit in self.units.values() for process in unit.processes()]
        self._fault("after")
        if op == "stop":
            refused = "in_use" in reply  # nothing was stopped
            self.stop_failed_at = -NEVER if reply["ok"] or refused else self.mono
        self.told_at = begun
        self.run_until(self.mono + self.random.choice([0.0, 0.0, 0.2, 2.0]))
        self.note(f"reply: {reply.get('active')} {reply.get('error', '')} waits {[w['job'] for w in reply.get('bench_waits', ())]}")
        return reply

    def _fault(self, when: str) -> None:
        if self.chance(self.faults):
            self.disturbed, self.stop_failed_at = self.mono, -NEVER
            kind = self.random.choice(["crash", "down", "broken"])
            self.note(f"{kind} {when} it was done")
            if kind == "crash":
                raise ProxyCrash
            raise HostDown("host a9 is down: x") if kind == "down" else AgentError("the agent did not answer in time")

    def look_at_ours(self) -> None:
        if any(unit.processes() or unit.restarting for unit in self.units.values()):
            self.ours_seen = self.mono

    def _check_stop(self) -> None:
        """A stop is sent for an engine of ours that was there at the last look, and for a reason."""
        self.look_at_ours()
        if self.mono < self.stop_failed_at + self.proxy.tick:
            self.fail("a stop that was not proven is tried again before the next tick")
        if self.host.stop_error is not None or self.host._doing and self.host._doing[0] == "starting":
            return
        if self.ours_seen < self.told_at:
            self.fail("a stop is sent to a host without an engine of ours")
        if not (self.used or self.unload_asked or self.mono < self.reason_until or self._job_holds()):
            self.fail("an engine that this proxy neither started nor used is stopped, and no job waits")

    def _job_holds(self) -> bool:
        return bool(self.queue.running or self.queue.outstanding())

    # ----- the proxy

    def queue_changed(self) -> None:
        if self._job_holds():
            self.reason_until = self.mono + self.proxy.tick + 20.0
        if self.follows and self.host is not None and self.random.random() < 0.9:
            self.after(self.random.choice([0.5, 1.0]), lambda: self.host is not None and self.host.poke())

    def start_proxy(self) -> None:
        if self.host is not None:
            return
        self.note("the proxy starts")
        if self.jump:
            self.handed_until = -NEVER  # what it reads back is of another time: tests of its own
        ledger = Ledger("/nowhere", self.clock)
        ledger._files = self.ledger_files
        ledger._entries = {kind: dict(file.content.get("hosts", {})) for kind, file in self.ledger_files.items()}
        self.used, self.unload_asked = set(), False
        names = {port: name for name, port in PORTS.items()}
        api = lambda address, key: SimApi(self, names[address.port], address, key)
        self.host = Host(self.config, self.proxy, self, Events(), self.clock, api, ledger)
        self.host._changed = SimCondition(self)
        self.host_due = self.mono

    def drop_proxy(self) -> None:
        """Its process is gone, and its connections with it; the engines run on."""
        if self.host is None:
            return
        self.note("the proxy is gone")
        self.count("proxy crashes")
        self.disturbed = self.mono
        self.stop_failed_at = -NEVER
        saved = self.ledger_files["handover"].content.get("hosts", {}).get("a9")
        until = llmguard.parse_timestamp(saved["until"]) - self.box_clock.now() if saved and not self.jump else 0.0
        self.handed_until = min(self.handed_until, self.mono + until)  # what could not be written ends with the process
        self.host = None
        for client in self.clients:
            if client.answer is None:
                client.answer = "cut by a crash"
        self.streams.clear()
        self.queued.clear()
        self.after(self.random.choice([0.1, 3.0, 20.0]), self.start_proxy)

    def turn(self) -> None:
        self.noise = self.noise + 1 if self.mono == self.last_turn else 0
        if self.noise > 60:
            self.fail("the host never comes to rest")
        self.rests, self.last_turn = False, self.mono
        self.host_due = NEVER
        try:
            self.host.turn()
        except ProxyCrash:
            self.drop_proxy()
            return
        if self.host._handover is not None:
            self.handed_until = self.host._handover_until
        self.poll_clients()
        if not self.rests:
            self.host_due = self.mono

    # ----- a schedule

    def plan(self) -> None:
        """What will happen, and when."""
        draw, uniform = self.random.choice, self.random.uniform
        horizon = 150.0
        self.after(0.0, self.start_proxy)
        self.after(uniform(0.0, 5.0), self.runner.step)
        for n in range(draw([1, 1, 2, 3])):
            lane = "cpu" if self.random.random() < 0.2 else "gpu"
            job = {"lane": lane, "seconds": draw([0.5, 5.0, 20.0, 80.0]), "process": None}
            self.after(uniform(0.0, horizon), lambda n=n, job=job: self.put(f"{n:02}.job", job))
        favourite = draw(list(PORTS))
        for _ in range(draw([1, 2, 4, 8])):
            client = SimClient(self, favourite if self.random.random() < 0.7 else draw(list(PORTS)))
            self.clients.append(client)
            self.after(uniform(0.0, horizon), client.arrive)
        for p, do in (
            (0.3, self.crash_engine), (0.3, self.start_by_hand), (0.3, self.drop_proxy), (0.3, self.somebody_beside),
            (0.2, self.foreign_process), (0.2, self.box_sleeps), (0.2, self.clock_jumps), (0.2, self.take_back), (0.1, self.unload),
        ):
            if self.random.random() < p:
                self.after(uniform(0.0, horizon), do if do != self.drop_proxy else self.drop_between_turns)
        self.after(horizon, self.calm)

    def put(self, name: str, job: dict) -> None:
        self.note(f"{name} ({job['lane']}, {job['seconds']} s) is queued")
        self.queue.waiting[name] = job
        self.queue.touch()

    def take_back(self) -> None:
        for name in list(self.queue.waiting)[:1]:
            self.note(f"{name} is taken back")
            del self.queue.waiting[name]
            self.queue.done.append(name)
            self.queue.touch()

    drop_wanted = False

    def drop_between_turns(self) -> None:
        self.drop_wanted = True

    def somebody_beside(self) -> None:
        for unit in self.units.values():
            if unit.main is not None and self.mono >= unit.ready_at:
                key = object()
                end = lambda key=key: self.others.pop(key, None)
                self.note(f"somebody streams from {unit.name} beside the proxy")
                self.others[key] = (unit.name, self.mono)
                self.after(self.random.choice([5.0, 60.0]), end)
                return

    def foreign_process(self) -> None:
        if self.box.gpu:
            return
        process = self.box.spawn("python3")
        self.box.gpu[process.pid] = 10 * GIB
        self.after(self.random.choice([5.0, 60.0]), lambda: self.box.kill(process.pid))

    def box_sleeps(self) -> None:
        self.note("the box does not answer")
        self.disturbed = self.mono
        self.down_until = self.mono + self.random.choice([5.0, 60.0])

    def clock_jumps(self) -> None:
        self.jump += self.random.choice([-28800.0, -20.0, 20.0, 28800.0])

    def unload(self) -> None:
        if self.host is not None and self.host._up:
            self.unload_asked = True
            self.host.unload(self.host._up, 0.0)

    def calm(self) -> None:
        self.note("from here on nothing goes wrong")
        self.trouble = False

    def run(self) -> World:
        self.plan()
        end = self.mono + 150.0 + 300.0
        while self.mono < end:
            if self.drop_wanted:
                self.drop_wanted = False
                self.drop_proxy()
            if self.host is not None and self.host_due <= self.mono:
                self.turn()
                continue
            due = min(self.events_due[0][0] if self.events_due else end, self.host_due if self.host else NEVER, end)
            self.run_until(due)
            if self.queued:
                self.poll_clients()
            if self.trouble is False and self.settled():
                break
        self._check_end()
        return self

    def settled(self) -> bool:
        return self.host is not None and not (self.queue.waiting or self.queue.running or self.queued or self.streams or self.others) and self.mono > 1000 + 150

    def _check_end(self) -> None:
        if self.queue.waiting:
            self.fail(f"jobs still wait: {list(self.queue.waiting)}")
        left = [client for client in self.clients if client.answer is None]
        if left:
            self.fail(f"{len(left)} clients never had an answer")
        for client in self.clients:
            answer = client.answer
            self.count(type(answer).__name__ if isinstance(answer, GuardError) else str(answer))
        if sum(self.host._in_flight.values()) and not self.streams:
            self.fail(f"leases are lost: {self.host._in_flight}")


@contextlib.contextmanager
def logged_by(world: World):
    """What the code under test logs goes to this world; the hash of the file is not asked of the disk each time."""
    kept = llmguard.log, llmguard.own_hash
    log = world.log
    log.__func__.debug = lambda text: None
    llmguard.log, llmguard.own_hash = log, lambda: "toy"
    try:
        yield
    finally:
        llmguard.log, llmguard.own_hash = kept


def schedule(seed: int, verbose: bool = False) -> World:
    """One schedule; Broken tells which promise was not kept."""
    world = World(seed, verbose)
    with logged_by(world):
        return world.run()


def failures(first: int, count: int, most: int = 5) -> tuple[list[tuple[int, str]], dict[str, int]]:
    """(seed, what went wrong) of the schedules that fail, and what happened in all the others."""
    found: list[tuple[int, str]] = []
    total: dict[str, int] = {}
    for seed in range(first, first + count):
        try:
            stats = schedule(seed).stats
        except Exception as error:
            found.append((seed, f"{type(error).__name__}: {error}"))
            if len(found) >= most:
                break
            continue
        for what, number in stats.items():
            total[what] = total.get(what, 0) + number
    return found, total


def _chunk(part: tuple[int, int]) -> tuple[list[tuple[int, str]], dict[str, int]]:
    return failures(*part)


def run_all(first: int, count: int) -> tuple[list[tuple[int, str]], dict[str, int]]:
    """The same on every processor at once."""
    size = 250
    parts = [(seed, min(size, first + count - seed)) for seed in range(first, first + count, size)]
    found: list[tuple[int, str]] = []
    total: dict[str, int] = {}
    with multiprocessing.get_context("fork").Pool() as pool:
        for failed, stats in pool.imap(_chunk, parts):
            found += failed
            for what, number in stats.items():
                total[what] = total.get(what, 0) + number
    return found, total


def main(argv: list[str]) -> int:
    numbers = [int(word) for word in argv if word != "-v"]
    count, first = (numbers + [20_000, 0][len(numbers):])[:2]
    if "-v" in argv:
        schedule(first, True)
        return 0
    begun = time.monotonic()
    found, total = run_all(first, count)
    for seed, error in found:
        print(f"seed {seed}: {error}")
    seconds = time.monotonic() - begun
    print(f"{count} schedules from seed {first} in {seconds:.1f} s ({count / seconds:.0f} a second), {len(found)} failed")
    print(", ".join(f"{what}: {number}" for what, number in sorted(total.items())))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

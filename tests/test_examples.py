"""What the examples promise: each is run, or read by the program that it is for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from parts import LLMGUARD, PATIENCE, missing
from swap import Front, ToyGpu

ROOT = Path(LLMGUARD).parent
EXAMPLES = ROOT / "examples"
MODEL = "small one"


@pytest.fixture
def front(tmp_path, monkeypatch):
    gpu = ToyGpu(tmp_path, monkeypatch)
    made = Front(tmp_path)
    made.gpu = gpu
    yield made
    made.close()


def shell(front, command: str, *words: str, **env: str) -> subprocess.CompletedProcess:
    home = {"HOME": str(front.root), "LLMGUARD_STATE_DIR": str(front.root / "state")}
    return subprocess.run(["sh", *(["-c", command] if command else []), *words], capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, **home, **env})


def cron_lines() -> list[str]:
    lines = (EXAMPLES / "crontab").read_text().splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("line", cron_lines(), ids=lambda line: re.search(r"llmguard (\w+)", line)[1])
def test_a_cron_line_runs_and_prints_nothing_while_all_is_well(front, line):
    front.request(MODEL)
    assert re.match(r"(\S+ ){5}", line) and "%" not in line, "five fields; cron makes a newline of %"
    command = line.split(None, 5)[5].replace("/opt/llmguard", str(ROOT)).replace("http://127.0.0.1:8080", front.url)
    command = command.replace("/etc/llama-swap/config.yaml", str(front.config)).replace("qwen3.6-27b", f"'{MODEL}'").replace("50s", "1s")
    done = shell(front, command)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done


@pytest.mark.parametrize("unit", sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".service", ".timer")))
def test_systemd_takes_a_unit(unit):
    if not shutil.which("systemd-analyze"):
        missing("systemd-analyze (Debian: systemd) is not here")
    done = subprocess.run(["systemd-analyze", "verify", str(EXAMPLES / unit)], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "llmguard" in line]
    assert done.returncode == 0 and not ours, done.stderr


# ----- the deploy script


@pytest.fixture
def box(front):
    """rsync, ssh and the service manager of a box that is this one."""
    tools = front.root / "bin"
    reload = front.root / "reload.py"
    reload.write_text(f"import urllib.request\nurllib.request.urlopen('{front.url}/reload', b'')\n")
    for name, text in (("rsync", 'cp "$2" "${3#*:}"'), ("ssh", 'exec sh -c "$2"'), ("ctl", f"exec {sys.executable} {reload}")):
        (tools / name).write_text("#!/bin/sh\n" + text + "\n")
        (tools / name).chmod(0o755)
    return front


def deploy(front, *models: str, **env: str) -> subprocess.CompletedProcess:
    new = front.root / "new.yaml"
    new.write_text("# deployed\n")
    there = {"CONFIG_THERE": str(front.config), "SERVICE_CTL": str(front.root / "bin/ctl"), "URL": front.url, "LLMGUARD": LLMGUARD, "SETTLE": "0"}
    return shell(front, "", str(EXAMPLES / "deploy.sh"), "me@box", str(new), *models, **{**there, **env})


def test_a_deploy_that_ends_healthy(box):
    done = deploy(box, MODEL, "org/b")
    assert done.returncode == 0 and "OK - 2 of 2 models are healthy" in done.stdout, done
    assert box.config.read_text().startswith("# deployed")


def test_a_deploy_into_draining_memory_is_not_relied_upon(box):
    assert deploy(box, MODEL).returncode == 0
    box.gpu.drains(True)
    done = deploy(box, MODEL)
    assert done.returncode == 2 and "CRITICAL" in done.stdout and "also after an unload" in done.stdout, done


def test_a_deploy_that_can_not_be_told_is_no_success(box):
    assert deploy(box, MODEL, LLMGUARD="/no/such/file").returncode not in (0, 1)
    (box.root / "bin/ssh").write_text("#!/bin/sh\ncase $2 in *probe*) exit 255;; esac\n")
    assert deploy(box, MODEL).returncode == 3
    (box.root / "bin/rsync").write_text("#!/bin/sh\nexit 12\n")
    assert deploy(box, MODEL).returncode == 2
    assert shell(box, "", str(EXAMPLES / "deploy.sh"), "me@box").returncode == 3


def test_a_models_name_is_no_shell(box):
    done = deploy(box, "a'b; touch owned $(touch owned2)")
    assert done.returncode != 0 and not list(box.root.glob("owned*")) and not list(Path.cwd().glob("owned*"))

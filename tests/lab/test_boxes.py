"""The agent on real boxes: who holds the GPU, starts, and stops that are proven. No proxy: `engine …` and `check`."""

import re

import pytest
from lab import wait_for

MAINLINE, OTHER = "llm-engine-mainline", "llm-engine-other"


def drop_in(box, unit, text, user="llm"):
    """Change a unit, as its owner does."""
    box.write(".config/systemd/user/%s.service.d/lab.conf" % unit, text, user=user)
    box.systemctl("daemon-reload", user=user)


def serves(box, port):
    wait_for("the engine on port %d" % port, lambda: box.http_status(port, "/health") == 200, 30)


# --------------------------------------------------------------------------------------------------------------- status


def test_status_tells_the_engine_its_pid_and_memory_and_the_agents_version(operator, ready):
    ready.start_engine(MAINLINE)
    (pid,) = ready.unit_pids(MAINLINE)
    done = operator.run("engine", "status", "a9", box=ready)
    print(done.stdout)
    assert done.returncode == 0
    assert "a9: engine mainline is running (pid %d), GPU memory 17.6 GiB" % pid in done.stdout
    assert "a9: GPU 0 NVIDIA A9 96GB: 17.6 GiB of 96 GiB used" in done.stdout
    assert "held:" not in done.stdout
    assert re.search(r"a9: agent \S+ [0-9a-f]{12}\n", done.stdout)


def test_status_names_a_foreign_process_its_user_its_memory_and_since_when(operator, ready):
    pid = ready.hold_gpu(mib=7000, comm="bench")
    done = operator.run("engine", "status", "a9", box=ready)
    print(done.stdout)
    assert "a9: no engine of ours runs" in done.stdout
    assert re.search(r"held: bench pid %d of guest holds 6\.8 GiB of GPU memory \(since 20\d\d-.*Z\)" % pid, done.stdout)


def test_status_says_what_could_not_be_read(operator, ready):
    ready.gpu(mode="mismatch")
    done = operator.run("engine", "status", "a9", box=ready)
    assert "held: the GPU could not be read: nvidia-smi failed" in done.stdout
    assert "Driver/library version mismatch" in done.stdout


def test_a_process_that_is_to_be_ignored_or_holds_little_is_no_owner(operator, ready):
    ready.hold_gpu(mib=800, comm="Xorg", kind="G")
    ready.hold_gpu(mib=300, comm="bench")
    assert "held: Xorg" in operator.run("engine", "status", "a9", box=ready).stdout
    assert "held:" not in operator.run("engine", "status", "a9", box=ready, ignore=["Xorg"]).stdout


# ---------------------------------------------------------------------------------------------------------------- check


def test_check_tells_versions_hashes_and_the_clock_and_warns_of_what_will_bite(operator, ready):
    good = operator.run("check", box=ready)
    print(good.stdout)
    assert good.returncode == 0
    assert re.search(r"a9: ok; .*agent \S+ [0-9a-f]{12}, the same as here, Python 3\.\d+\.\d+; clock [+-]0\.\d s", good.stdout)

    ready.write(".local/share/llmguard/llmguard.py", ready.read(".local/share/llmguard/llmguard.py") + "# older\n")
    drop_in(ready, MAINLINE, "[Service]\nRestart=always\n")
    bad = operator.run("check", box=ready)
    assert bad.returncode == 1
    assert "NOT the same as here" in bad.stdout and "`llmguard.py engine install a9`" in bad.stdout
    assert "engine mainline" in bad.stdout and "Restart=" in bad.stdout and "engine other" not in bad.stdout

    gone = operator.run("check", box=ready, other={"unit": "llm-engine-othr"})
    assert gone.returncode == 2 and "there is no user unit llm-engine-othr.service" in gone.stdout


def test_check_reports_every_box_one_line_each(operator, ready, b3090):
    hosts = {box.name: operator.host(box) for box in (ready, b3090)}
    done = operator.run("check", hosts=hosts)
    assert done.returncode == 2
    assert done.stdout.startswith("a9: ok; ") and "\nb3090: " in done.stdout
    assert "run `llmguard.py engine install b3090`" in done.stdout


# ---------------------------------------------------------------------------------------------------------------- start


def test_start_and_stop_do_what_they_say(operator, ready):
    done = operator.run("engine", "start", "a9", "other", box=ready)
    assert (done.returncode, done.stdout) == (0, "a9: engine other is started; it serves once it has loaded\n")
    serves(ready, 8082)
    done = operator.run("engine", "stop", "a9", box=ready)
    assert (done.returncode, done.stdout) == (0, "a9: stopped, and nothing of our engines is left\n")
    assert ready.unit_pids(OTHER) == [] and ready.gpu_pids() == set() and ready.http_status(8082, "/health") is None
    assert operator.run("engine", "stop", "a9", box=ready).returncode == 0


def test_start_of_another_engine_stops_the_first(operator, ready):
    ready.start_engine(MAINLINE)
    assert operator.run("engine", "start", "a9", "other", box=ready).returncode == 0
    assert ready.unit_pids(MAINLINE) == [] and ready.unit_pids(OTHER)


def test_start_of_an_engine_that_runs_leaves_it_alone_and_stops_another_one_beside_it(operator, ready):
    """Two were started by hand: one engine at a time is the rule."""
    for unit in (MAINLINE, OTHER):
        ready.start_engine(unit)
    pids = ready.unit_pids(OTHER)
    done = operator.run("engine", "start", "a9", "other", box=ready)
    assert done.returncode == 0
    assert ready.unit_pids(OTHER) == pids and ready.unit_pids(MAINLINE) == []


def test_start_is_refused_while_a_stranger_holds_the_gpu_and_what_runs_goes_on(operator, ready):
    ready.start_engine(MAINLINE)
    ready.hold_gpu(comm="bench")
    done = operator.run("engine", "start", "a9", "other", box=ready)
    assert done.returncode == 75 and "GPU is busy, not switching: bench of guest holds 4 GiB" in done.stderr
    assert ready.unit_pids(MAINLINE) and not ready.unit_pids(OTHER)


def test_a_start_waits_until_the_stopped_engine_has_given_its_memory_back(operator, ready):
    """An engine that starts into memory that still drains falls back to the CPU."""
    drop_in(ready, OTHER, "[Service]\nExecStartPre=/bin/sh -c 'nvidia-smi --query-gpu=memory.used "
            "--format=csv,noheader,nounits >%h/used-at-start'\n")
    ready.gpu(drain=3)
    ready.start_engine(MAINLINE)
    assert operator.run("engine", "start", "a9", "other", box=ready).returncode == 0
    assert ready.read("used-at-start") == "17\n"  # what an idle card has in use


def test_a_start_is_refused_when_less_memory_is_free_than_the_engine_wants(operator, ready, nothing_started):
    ready.hold_gpu(mib=10240, comm="bench")
    more = {"owner_min": "12GiB", "other": {"vram": "90GiB"}}
    done = operator.run("engine", "start", "a9", "other", box=ready, **more)
    assert done.returncode == 75 and "only 86 GiB of GPU memory is free, 90 GiB is wanted" in done.stderr
    assert nothing_started(ready)
    more["other"] = {"vram": "80GiB"}
    assert operator.run("engine", "start", "a9", "other", box=ready, **more).returncode == 0


def test_an_engine_that_can_not_be_started_tells_what_systemd_says(operator, ready):
    drop_in(ready, OTHER, "[Service]\nExecStart=\nExecStart=/nowhere/llama-server\nType=exec\n")
    done = operator.run("engine", "start", "a9", "other", box=ready)
    assert done.returncode == 69 and "systemctl start llm-engine-other.service" in done.stderr


def test_without_linger_the_message_names_it(operator, ready):
    """No login of that user, no user services: what systemctl says then tells nobody what to do."""
    ready.exec("root", ["loginctl", "disable-linger", "llm"])
    ready.exec("root", ["sh", "-c", "echo UsePAM no >/etc/ssh/sshd_config.d/00.conf; systemctl restart ssh"])
    ready.exec("root", ["systemctl", "stop", "user@1000.service", "user-runtime-dir@1000.service"])
    wait_for("ssh", ready.ssh_answers)
    operator.close_masters()
    done = operator.run("engine", "status", "a9", box=ready)
    assert done.returncode == 69 and "loginctl enable-linger" in done.stderr


def test_a_system_unit_without_the_right_to_start_it_tells_how_to_give_it(operator, ready):
    ready.write("/etc/systemd/system/llm-engine-system.service", "[Service]\nExecStart=/bin/sleep 3600\n", user="root")
    ready.systemctl("daemon-reload", user="root")
    more = {"other": {"unit": "llm-engine-system", "scope": "system"}}
    done = operator.run("engine", "start", "a9", "other", box=ready, **more)
    assert done.returncode == 69 and "polkit rule" in done.stderr and "sudoers" in done.stderr
    assert ready.systemctl("is-active", "llm-engine-system", user="root", check=False) == "inactive\n"


# ----------------------------------------------------------------------------------------------------------------- stop


def test_another_users_unit_of_the_same_name_is_an_owner_and_no_stop_touches_it(operator, ready):
    ready.start_engine(MAINLINE, user="guest")
    (theirs,) = ready.unit_pids(MAINLINE, "guest")
    said = operator.run("engine", "status", "a9", box=ready).stdout
    assert "no engine of ours runs" in said and "held: llama-server pid %d of guest" % theirs in said
    assert operator.run("engine", "start", "a9", "mainline", box=ready).returncode == 75
    assert operator.run("engine", "stop", "a9", box=ready).returncode == 0
    assert ready.unit_pids(MAINLINE, "guest") == [theirs] and ready.http_status(8091, "/health") == 200


def test_a_stop_that_a_process_survives_is_not_called_a_stop_and_a_later_one_succeeds(operator, ready):
    drop_in(ready, OTHER, "[Service]\nKillMode=process\n")
    serving = operator.serve(ready)
    assert serving.ask("POST", "/v1/completions", {"model": "a9-small", "prompt": "the", "max_tokens": 4}).status == 200
    pid = ready.hold_gpu(user="llm", comm="worker")
    ready.join_unit(pid, OTHER)
    serving.ask("POST", "/models/unload", {"model": "a9-small"})
    said = "worker pid %d of an engine unit still runs after the stop" % pid
    error = wait_for("the end of the stop", lambda: serving.host("a9")["stop_error"], 60)
    assert error["error"] == said and "is not stopped: " + said in serving.log()
    assert "engine other stopped" not in serving.log() and ready.gpu_pids() == {pid}
    assert "engine other is " in operator.run("engine", "status", "a9", box=ready).stdout
    ready.end(pid)
    wait_for("a stop that succeeds", lambda: serving.host("a9")["stop_error"] is None, 60)
    assert operator.run("engine", "stop", "a9", box=ready).returncode == 0


def test_a_stop_that_restart_always_would_undo_holds(operator, ready):
    drop_in(ready, OTHER, "[Service]\nRestart=always\nRestartSec=100ms\n")
    ready.start_engine(OTHER)
    assert operator.run("engine", "stop", "a9", box=ready).returncode == 0
    assert ready.systemctl("is-active", OTHER, check=False) == "inactive\n"


def test_nothing_is_started_over_a_process_that_is_stuck_in_a_failed_unit(operator, ready):
    """SIGKILL does not end it, as one that is stuck in the driver: systemd calls the unit failed, and it holds the GPU."""
    if not ready.can_stick:
        pytest.skip("no cgroup v1 freezer on this machine")
    drop_in(ready, OTHER, "[Service]\nTimeoutStopSec=1\n")
    ready.start_engine(OTHER)
    (pid,) = ready.unit_pids(OTHER)
    ready.stick(pid)
    mute = operator.run("engine", "start", "a9", "mainline", box=ready)
    assert mute.returncode == 75 and "engine other works for somebody, or does not answer" in mute.stderr
    for command in (("stop", "a9"), ("start", "a9", "mainline")):
        done = operator.run("engine", *command, box=ready)
        assert done.returncode == 69
        assert "llama-server pid %d of an engine unit still runs after the stop" % pid in done.stderr
    assert ready.systemctl("is-failed", OTHER, check=False) == "failed\n" and ready.unit_pids(OTHER) == [pid]
    assert not ready.unit_pids(MAINLINE)
    assert "engine other is " in operator.run("engine", "status", "a9", box=ready).stdout
    ready.unstick()
    wait_for("its end", lambda: not ready.unit_pids(OTHER))
    assert operator.run("engine", "start", "a9", "mainline", box=ready).returncode == 0


def test_a_unit_between_two_restarts_counts_as_running_and_is_stopped(operator, ready):
    drop_in(ready, OTHER, "[Service]\nExecStart=\nExecStart=/bin/false\nRestart=always\nRestartSec=1h\n")
    ready.systemctl("start", OTHER)
    wait_for("the pause", lambda: "auto-restart" in ready.systemctl("show", "-P", "SubState", OTHER))
    assert "engine other is " in operator.run("engine", "status", "a9", box=ready).stdout
    assert operator.run("engine", "stop", "a9", box=ready).returncode == 0
    assert ready.systemctl("is-active", OTHER, check=False) in ("inactive\n", "failed\n")


AGAIN = {
    "at once": (".path", "[Path]\nPathExists=/etc/hostname\n"),
    "a moment later": (".timer", "[Timer]\nOnUnitInactiveSec=300ms\nAccuracySec=1ms\n"),
}


@pytest.mark.parametrize("when", AGAIN)
def test_a_stop_that_something_undoes_is_an_error_that_says_so(operator, ready, when):
    kind, text = AGAIN[when]
    ready.write(".config/systemd/user/%s%s" % (OTHER, kind), "[Unit]\nDescription=starts it again\n" + text)
    ready.systemctl("daemon-reload")
    ready.start_engine(OTHER)
    ready.systemctl("start", OTHER + kind)
    done = operator.run("engine", "stop", "a9", box=ready)
    assert done.returncode == 69 and "something started it again" in done.stderr
    assert OTHER + kind in done.stderr


# ------------------------------------------------------------------------------------------------------ several callers


def test_two_starts_at_once_are_one_after_the_other_and_one_engine_runs(operator, ready):
    starts = {name: operator.start("engine", "start", "a9", name, box=ready) for name in ("mainline", "other")}
    for started in starts.values():
        assert started.communicate(timeout=120) and started.returncode == 0
    running = [unit for unit in (MAINLINE, OTHER) if ready.unit_pids(unit)]
    assert len(running) == 1
    # One stopped the other's, once: no start, stop, start, stop.
    for unit in (MAINLINE, OTHER):
        journal = ready.exec("llm", ["journalctl", "--user", "-u", unit, "-o", "cat"]).stdout
        assert journal.count("Started ") == 1 and journal.count("Stopped ") == (unit not in running)


def test_a_caller_who_waits_in_vain_is_told_who_holds_the_box(operator, ready):
    drop_in(ready, OTHER, "[Service]\nExecStartPre=/bin/sh -c 'while [ ! -e %h/go ]; do sleep 0.1; done'\n")
    first = operator.start("engine", "start", "a9", "other", box=ready)
    wait_for("the start", lambda: "start-pre" in ready.systemctl("show", "-P", "SubState", OTHER))
    engines = {"other": {"unit": OTHER + ".service", "port": 8082}}
    reply = operator.agent(ready, {"op": "stop", "engines": engines, "patience": "300ms"})
    assert reply["ok"] is False
    found = re.search(r"agent.* is busy: agent: start \(pid (\d+)\) since 20\d\d-", reply["error"]["text"])
    assert ready.comm(int(found.group(1))).startswith("python3")
    assert operator.run("engine", "status", "a9", box=ready).returncode == 0  # who only looks need not wait
    ready.write("go", "")
    first.communicate(timeout=60)
    assert first.returncode == 0
    assert operator.agent(ready, {"op": "stop", "engines": engines, "patience": "300ms"})["ok"] is True

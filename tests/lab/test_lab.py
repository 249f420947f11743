"""The lab itself: what the other tests here take for granted."""

import http.client
import json
import subprocess
import threading
import time

import pytest
from lab import USERS, LabError, wait_for

MAINLINE, OTHER = "llm-engine-mainline", "llm-engine-other"


def complete(box, port, tokens=8):
    """A completion by the engine on that port, asked over the box's link -> the reply."""
    connection = http.client.HTTPConnection(box.address, port, timeout=30)
    connection.request("POST", "/completion", json.dumps({"prompt": "the", "n_predict": tokens}))
    return json.loads(connection.getresponse().read())


class Stream(threading.Thread):
    """A streamed completion, read in a thread. `ended` says how it ended: "whole", "cut", "error", or None so far."""

    def __init__(self, box, port, tokens):
        super().__init__(daemon=True)
        self.connection = http.client.HTTPConnection(box.address, port, timeout=60)
        self.body = json.dumps({"prompt": "the", "n_predict": tokens, "stream": True})
        self.events, self.ended = 0, None
        self.start()
        wait_for("the first token", lambda: self.events)

    def run(self):
        try:
            self.connection.request("POST", "/completion", self.body)
            for line in self.connection.getresponse():
                self.events += line.startswith(b"data:")
                if b'"stop":true' in line:
                    self.ended = "whole"
            self.ended = self.ended or "cut"
        except OSError:
            self.ended = "error"


def smi(box, query, user="llm"):
    """-> the rows of an nvidia-smi query, as lists of cells."""
    done = box.exec(user, ["nvidia-smi", query, "--format=csv,noheader,nounits"])
    return [line.split(", ") for line in done.stdout.splitlines()]


def memory_used(box):
    return int(smi(box, "--query-gpu=memory.used")[0][0])


# ------------------------------------------------------------------------------------------------------------ the boxes


def test_ssh_lets_llm_and_guest_in_and_b3090_talks_first(lab, a9, b3090):
    assert lab.ssh(a9, "whoami").stdout == "llm\n"
    assert lab.ssh(a9, "whoami", user="guest").stdout == "guest\n"
    noise = lab.ssh(b3090, "whoami").stdout.splitlines()
    assert noise[-1] == "llm" and json.loads(noise[-2])["ok"] is True
    assert lab.ssh(a9, "whoami", user="root").returncode == 255


def test_a_program_that_takes_no_ssh_options_finds_the_boxes_by_PATH(lab, a9):
    done = subprocess.run(["ssh", "a9", "hostname"], env=lab.environment, stdout=subprocess.PIPE, text=True, timeout=30)
    assert done.stdout == "a9\n"


def test_the_boxes_differ_as_promised(lab, a9, b3090):
    assert lab.ssh(a9, "date +%Z; ls jobs").stdout.split()[1:] == ["done", "failed", "queue", "runner.log", "running"]
    assert lab.ssh(a9, "date +%Z").stdout.strip() in ("CET", "CEST")
    assert lab.ssh(a9, "echo $XDG_RUNTIME_DIR").stdout.strip() == "/run/user/1000"
    assert lab.ssh(b3090, "echo dir=$XDG_RUNTIME_DIR; date +%Z; ls").stdout.splitlines()[-2:] == ["dir=", "UTC"]


def test_a_write_lands_in_the_home_of_its_user(a9):
    a9.write("jobs/queue/00-test.job", "sleep 1\n")
    assert a9.exec("llm", ["stat", "-c", "%U %a %s", "jobs/queue/00-test.job"]).stdout == "llm 644 8\n"
    assert a9.read("jobs/queue/00-test.job") == "sleep 1\n"


def test_a_command_that_takes_too_long_is_killed_in_the_box(a9):
    assert a9.exec("llm", ["sleep", "4242"], timeout=1, check=False).returncode == -9
    assert "4242" not in a9.exec("root", ["ps", "ax"]).stdout
    with pytest.raises(LabError, match="exit 1"):
        a9.exec("llm", ["false"])


def test_a_renewed_box_has_nothing_of_what_was_done(a9):
    a9.start_engine(OTHER)
    a9.hold_gpu()
    a9.gpu(mode="hang")
    a9.write("jobs/running/00-test.job", "")
    a9.renew()
    assert a9.gpu_pids() == set() and a9.unit_pids(OTHER) == []
    assert a9.exec("llm", ["find", "jobs", "-name", "*.job"]).stdout == ""


# ---------------------------------------------------------------------------------------------------------- the engines


@pytest.mark.parametrize("name", ["a9", "b3090"])
def test_a_started_unit_answers_over_the_link_and_is_on_the_gpu(name, request):
    box = request.getfixturevalue(name)
    assert box.http_status(8081, "/health") is None
    port = box.start_engine(MAINLINE)
    assert port == 8081 and complete(box, port)["tokens_predicted"] == 8
    (pid,) = box.unit_pids(MAINLINE)
    ((listed, uuid, mib),) = smi(box, "--query-compute-apps=pid,gpu_uuid,used_memory")
    assert (int(listed), int(mib)) == (pid, 18000)
    assert smi(box, "--query-gpu=index,uuid,memory.total,memory.used") == [["0", uuid, str(box.gpu_mib), "18017"]]
    box.systemctl("stop", MAINLINE)
    assert box.gpu_pids() == set() and memory_used(box) == 17


def test_guests_unit_of_the_same_name_is_another_cgroup(a9):
    a9.start_engine(MAINLINE)
    port = a9.start_engine(MAINLINE, user="guest")
    (ours,), (theirs,) = a9.unit_pids(MAINLINE), a9.unit_pids(MAINLINE, "guest")
    assert port == 8091 and a9.gpu_pids() == {ours, theirs}
    for pid, user in ((ours, "llm"), (theirs, "guest")):
        lines = a9.exec("root", ["cat", "/proc/%d/cgroup" % pid]).stdout.splitlines()
        assert "0::" + a9.unit_cgroup(MAINLINE, user) in lines
        assert str(USERS[user]) in a9.unit_cgroup(MAINLINE, user)
    a9.systemctl("stop", MAINLINE)
    assert a9.gpu_pids() == {theirs} and a9.http_status(8091, "/health") == 200


def test_a_process_that_joined_a_unit_outlives_its_stop_with_KillMode_process(a9):
    a9.write(".config/systemd/user/%s.service.d/kill.conf" % OTHER, "[Service]\nKillMode=process\n")
    a9.systemctl("daemon-reload")
    a9.start_engine(OTHER)
    pid = a9.hold_gpu(user="llm")
    a9.join_unit(pid, OTHER)
    a9.systemctl("stop", OTHER)
    assert a9.unit_pids(OTHER) == [pid] and a9.gpu_pids() == {pid}


def test_a_stuck_process_outlives_SIGKILL(a9):
    if not a9.can_stick:
        pytest.skip("no cgroup v1 freezer on this machine")
    pid = a9.hold_gpu()
    a9.stick(pid)
    a9.exec("root", ["kill", "-KILL", str(pid)])
    time.sleep(0.2)
    assert a9.gpu_pids() == {pid}
    a9.unstick()
    wait_for("its end", lambda: not a9.gpu_pids())


# -------------------------------------------------------------------------------------------------------------- the GPU


def test_everybody_sees_everybodys_processes_on_the_gpu(a9):
    pid = a9.hold_gpu(mib=800, user="guest", comm="llama-server")
    for user in ("llm", "guest", "root"):
        assert smi(a9, "--query-compute-apps=used_memory,pid", user) == [["800", str(pid)]]
    assert a9.exec("llm", ["cat", "/proc/%d/comm" % pid]).stdout == "llama-server\n"
    assert a9.exec("llm", ["ls", "/proc/%d/fd" % pid], check=False).returncode != 0
    a9.end(pid)
    assert a9.gpu_pids() == set()


def test_graphics_processes_are_in_the_xml_only(a9):
    pid = a9.hold_gpu(mib=811, comm="Xorg", kind="G")
    assert smi(a9, "--query-compute-apps=pid") == [] and a9.gpu_pids() == {pid}
    document = a9.exec("llm", ["nvidia-smi", "-q", "-x"]).stdout
    assert "<type>G</type>" in document and "<used_memory>811 MiB</used_memory>" in document


def test_nvidia_smi_hangs_fails_and_lacks_figures_when_told_to(a9):
    a9.gpu(mode="hang")
    assert a9.exec("llm", ["timeout", "-k", "0.3", "0.3", "nvidia-smi", "-L"], check=False).returncode == -9
    a9.gpu(mode="mismatch")
    done = a9.exec("llm", ["nvidia-smi", "-q", "-x"], check=False)
    assert done.returncode == 18
    assert done.stdout.startswith("Failed to initialize NVML: Driver/library version mismatch\n")
    a9.gpu(na=1)
    assert smi(a9, "--query-gpu=memory.total,memory.used") == [["[N/A]", "[N/A]"]]
    a9.gpu(ghost="99999:7000", unlisted=300)
    assert smi(a9, "--query-compute-apps=pid,used_memory") == [["99999", "7000"]] and memory_used(a9) == 7317
    a9.gpu()
    assert smi(a9, "--query-compute-apps=pid") == [] and memory_used(a9) == 17


def test_memory_drains_slowly_when_told_to(a9):
    a9.gpu(drain=1)
    pid = a9.hold_gpu(mib=5000)
    assert memory_used(a9) == 5017
    a9.end(pid)
    assert a9.gpu_pids() == set() and memory_used(a9) == 5017
    wait_for("the memory to drain", lambda: memory_used(a9) == 17, 3)


# ---------------------------------------------------------------------------------------------------- network and power


def test_a_cut_link_is_silent_and_a_stream_goes_on_when_it_heals(a9):
    port = a9.start_engine(MAINLINE)
    stream = Stream(a9, port, 100)
    a9.cut()
    assert a9.http_status(port, "/health") is None  # two seconds, in which what was under way has been read
    seen = stream.events
    assert a9.exec("llm", ["whoami"]).stdout == "llm\n"
    time.sleep(0.5)
    assert stream.events == seen and stream.ended is None
    a9.heal()
    wait_for("the stream's end", lambda: stream.ended, 20)
    assert stream.ended == "whole"
    assert a9.http_status(port, "/health") == 200


def test_a_killed_box_says_nothing_and_keeps_its_disk(a9):
    port = a9.start_engine(MAINLINE)
    a9.write("kept", "still here\n")
    stream = Stream(a9, port, 5000)
    a9.kill()
    assert a9.init is None and stream.ended is None
    with pytest.raises(LabError, match="not up"):
        a9.exec("llm", ["true"])
    a9.boot()
    assert a9.read("kept") == "still here\n" and a9.unit_pids(MAINLINE) == []
    assert a9.start_engine(MAINLINE) == port


def test_a_box_that_is_shut_down_closes_its_connections(a9):
    stream = Stream(a9, a9.start_engine(MAINLINE), 5000)
    a9.shut_down()
    wait_for("the end of the stream", lambda: stream.ended)
    assert stream.ended in ("cut", "error")
    a9.boot()

"""Getting llmguard.py onto a box and talking to it there: install, login shells, and everything that may be wrong."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from lab import wait_for

LLMGUARD = Path(__file__).resolve().parents[2] / "llmguard.py"
INSTALLED = ".local/share/llmguard/llmguard.py"


def own_hash():
    return hashlib.sha256(LLMGUARD.read_bytes()).hexdigest()


def sha256_there(box):
    return box.exec("llm", ["sha256sum", INSTALLED]).stdout.split()[0]


ONE_LETTER_ELSE = ("import sys; data = bytearray(sys.stdin.buffer.read()); at = 100000; "
                   "data[at:at + 1] = b'QR'[data[at] == 81:][:1]; sys.stdout.buffer.write(data)")  # plain or in base64


def shim(operator, tmp_path, script):
    """Put a program in front of `ssh` for this operator; the real one is "$SSH"."""
    real = subprocess.run(["sh", "-c", "command -v ssh"], env=operator.env, capture_output=True, text=True).stdout.strip()
    folder = tmp_path / "shim"
    folder.mkdir()
    (folder / "ssh").write_text('#!/bin/sh\nSSH=%s\n%s\n' % (real, script))
    (folder / "ssh").chmod(0o755)
    operator.env["PATH"] = "%s:%s" % (folder, operator.env["PATH"])


# -------------------------------------------------------------------------------------------------------------- install


def test_install_copies_this_very_file_and_starts_nothing(operator, a9, nothing_started):
    said = operator.install(a9)
    assert own_hash()[:12] in said and "nothing was there" in said and "nothing was started" in said
    assert sha256_there(a9) == own_hash()
    assert "llmguard" not in a9.exec("root", ["ps", "axww"]).stdout
    assert nothing_started(a9)


def test_install_again_says_that_the_same_was_there(operator, a9):
    operator.install(a9)
    assert "the same was there" in operator.install(a9)
    assert sha256_there(a9) == own_hash()


def test_install_over_an_older_file_names_it_and_leaves_nothing_beside_the_new_one(operator, a9):
    older = LLMGUARD.read_text() + "\n# an older copy\n"
    a9.write(INSTALLED, older)
    assert "replaces " + hashlib.sha256(older.encode()).hexdigest()[:12] in operator.install(a9)
    assert sha256_there(a9) == own_hash()
    there = a9.exec("llm", ["ls", str(Path(INSTALLED).parent)]).stdout.split()
    assert there in (["llmguard.py"], ["__pycache__", "llmguard.py"]), "and what Python keeps of it"


def test_install_over_a_file_that_is_no_agent_at_all(operator, a9):
    a9.write(INSTALLED, "this is not Python\n")
    operator.install(a9)
    assert sha256_there(a9) == own_hash()


def test_the_installed_file_needs_no_exec_bit(operator, ready):
    ready.exec("llm", ["chmod", "644", INSTALLED])
    done = operator.run("engine", "status", "a9", box=ready)
    assert done.returncode == 0 and "no engine of ours runs" in done.stdout


@pytest.mark.parametrize("before", ["nothing", "an agent"])
def test_a_file_that_arrives_damaged_is_not_put_in_place(operator, a9, tmp_path, before):
    if before == "an agent":
        operator.install(a9)
        older = LLMGUARD.read_text() + "\n# an older copy\n"
        a9.write(INSTALLED, older)
    shim(operator, tmp_path, 'python3 -c "%s" | "$SSH" "$@"' % ONE_LETTER_ELSE)
    done = operator.run("engine", "install", "a9", box=a9)
    assert done.returncode not in (0, 255) and "arrived damaged" in done.stderr
    if before == "nothing":
        assert a9.exec("llm", ["test", "-e", INSTALLED], check=False).returncode == 1
    else:
        assert sha256_there(a9) == hashlib.sha256(older.encode()).hexdigest()


@pytest.mark.parametrize("before", ["nothing", "an agent"])
def test_a_home_that_can_not_be_written_is_named(operator, a9, before):
    if before == "an agent":
        operator.install(a9)
    a9.exec("root", ["mount", "--bind", "-o", "ro", "/home/llm", "/home/llm"])
    done = operator.run("engine", "install", "a9", box=a9)
    assert done.returncode not in (0, 255)
    assert "/home/llm/" + INSTALLED in done.stderr and "Read-only file system" in done.stderr


# --------------------------------------------------------------------------------------------------------- login shells


NOISY = "echo hello; echo '{\"ok\": true}'; echo 'llmguard-agent 1 is here'; printf '\\033[2J'\n"


def prepend(box, path, text):
    """Put lines in front of a start file, before Debian's .bashrc leaves when nobody is there to read."""
    box.write(path, text + box.exec("llm", ["cat", path], check=False).stdout)


def test_the_awkward_box_which_prints_first_and_has_no_runtime_folder_is_used_like_any_other(operator, b3090):
    operator.install(b3090)
    assert operator.run("engine", "start", "b3090", "other", box=b3090).returncode == 0
    wait_for("the engine", lambda: b3090.http_status(8082, "/health") == 200)
    done = operator.run("engine", "status", "b3090", box=b3090)
    assert "engine other is running" in done.stdout
    assert operator.run("engine", "stop", "b3090", box=b3090).returncode == 0
    assert b3090.unit_pids("llm-engine-other") == []


@pytest.mark.parametrize("shell, start_file", [
    ("/bin/bash", ".bashrc"),
    ("/bin/sh", None),
    ("/bin/tcsh", ".tcshrc"),
    ("/usr/bin/fish", ".config/fish/config.fish"),
])
def test_any_login_shell_takes_the_command_and_may_print_first(operator, a9, shell, start_file):
    a9.exec("root", ["usermod", "--shell", shell, "llm"])
    if start_file:
        prepend(a9, start_file, NOISY)
    missing = operator.run("engine", "status", "a9", box=a9)
    assert "the agent is not installed on a9: run `llmguard.py engine install a9`" in missing.stderr
    operator.install(a9)
    assert operator.run("engine", "start", "a9", "other", box=a9).returncode == 0
    done = operator.run("engine", "status", "a9", box=a9)
    assert done.returncode == 0 and "engine other is running" in done.stdout
    no_python = operator.run("engine", "status", "a9", box=a9, python="python3.99")
    assert no_python.returncode == 77 and "there is no python3.99 on it" in no_python.stderr


def test_check_warns_of_a_shell_that_prints(operator, a9, b3090):
    for box in (a9, b3090):
        operator.install(box)
    quiet = operator.run("check", box=a9)
    assert quiet.returncode == 0 and "login shell" not in quiet.stdout
    noisy = operator.run("check", box=b3090)
    assert noisy.returncode == 1 and "login shell" in noisy.stdout


# ------------------------------------------------------------------------------------------------ what may be wrong


def nothing(box):
    pass


def without_python(box):
    box.exec("root", ["mv", "/usr/bin/python3", "/usr/bin/python3.off"])


def with_an_old_python(box):
    """A program that behaves as Python 3.8 does: llmguard.py needs 3.9."""
    box.write("/usr/local/bin/old-python", "#!/usr/bin/python3\nimport sys\nsys.version_info = (3, 8, 10, 'final', 0)\n"
              "exec(sys.argv[sys.argv.index('-c') + 1])\n", user="root", mode="755")


def with_another_host_key(box):
    box.exec("root", ["sh", "-c", "rm /etc/ssh/ssh_host_* && ssh-keygen -q -A && systemctl restart ssh"])
    wait_for("ssh", box.ssh_answers)


def without_our_key(box):
    box.exec("llm", ["mv", ".ssh/authorized_keys", ".ssh/off"])


def with_a_start_file_that_reads_stdin(box):
    prepend(box, ".bashrc", "cat >/dev/null\n")


def with_a_start_file_that_never_ends_to_print(box):
    prepend(box, ".bashrc", "head -c 200000 /dev/zero | tr '\\0' x; echo\n")


TROUBLES = [  # what was done to the box, what of its configuration differs, what is said, what /status calls it
    (without_python, {}, "there is no python3 on it: install one, or name it", "blocked"),
    (with_an_old_python, {"python": "old-python"}, "old-python on it is too old: name a Python 3.9 or later", "blocked"),
    (with_another_host_key, {}, "its host key is not the known one: when that is right, `ssh-keygen -R` it", "blocked"),
    (without_our_key, {}, "ssh is refused: put this machine's key into authorized_keys", "blocked"),
    (with_a_start_file_that_reads_stdin, {}, "a start file of the login shell", "blocked"),
    (with_a_start_file_that_never_ends_to_print, {}, "the login shell prints more than 64 KiB", "blocked"),
    (nothing, {"ssh": "a9.invalid"}, "no machine of that name is known", "down"),
]


@pytest.mark.parametrize("damage, more, text, state", TROUBLES, ids=lambda value: getattr(value, "__name__", ""))
def test_each_trouble_has_a_message_of_its_own_that_says_what_to_do(operator, ready, damage, more, text, state):
    damage(ready)
    done = operator.run("engine", "status", "a9", box=ready, **more)
    assert text in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert done.returncode == {"blocked": 77, "down": 69}[state]
    serving = operator.serve(hosts={"a9": operator.host(ready, **more)})
    host = wait_for("the first look", lambda: serving.host("a9") if serving.host("a9")["down_since"] else None)
    assert host["state"] == state
    assert (text in (host["problem"] or "")) == (state == "blocked")
    reply = serving.ask("POST", "/v1/chat/completions", {"model": "a9-small", "messages": []})
    assert reply.status == 502 and reply.error["type"] == "host_down"


@pytest.mark.parametrize("before", ["nothing", "an agent"])
def test_install_says_so_when_a_start_file_reads_what_it_sends(operator, a9, before):
    if before == "an agent":
        operator.install(a9)
    with_a_start_file_that_reads_stdin(a9)
    operator.close_masters()
    done = operator.run("engine", "install", "a9", box=a9)
    assert done.returncode == 77 and "a start file of the login shell" in done.stderr


def test_an_agent_that_is_not_installed_blocks_its_host_until_it_is_installed(operator, a9):
    serving = operator.serve(a9)
    wait_for("the first look", lambda: serving.host("a9")["state"] == "blocked")
    assert serving.host("a9")["problem"].endswith("run `llmguard.py engine install a9`")
    operator.install(a9)
    wait_for("the next look", lambda: serving.host("a9")["state"] == "off")
    assert serving.host("a9")["agent"]["sha256"] == own_hash()
    assert serving.log().count("host a9: blocked") == 1


def test_a_box_that_is_off_is_down(operator, a9):
    a9.shut_down()
    try:
        serving = operator.serve(a9)
        wait_for("the first look", lambda: serving.host("a9")["state"] == "down")
        reply = serving.ask("POST", "/v1/chat/completions", {"model": "a9-small", "messages": []})
        assert reply.status == 502 and "host a9 is down" in reply.error["message"]
        done = operator.run("engine", "status", "a9", box=a9)
        assert done.returncode == 69 and "host a9 is down" in done.stderr
        a9.boot()
        operator.install(a9)
        wait_for("the next look", lambda: serving.host("a9")["state"] == "off")
    finally:
        if not a9.init:
            a9.boot()


# -------------------------------------------------------------------------------------------------------- forced command


def force_the_agent(box):
    key = box.read(".ssh/authorized_keys")
    box.write(".ssh/authorized_keys", 'restrict,command="python3 %s agent" %s' % (INSTALLED, key), mode="600")


def test_under_a_forced_command_the_agent_answers_and_takes_a_new_copy_and_nothing_else_runs(operator, ready):
    ready.write(INSTALLED, LLMGUARD.read_text() + "\n# an older copy\n")
    force_the_agent(ready)
    operator.close_masters()
    assert "replaces " in operator.install(ready)
    assert sha256_there(ready) == own_hash()
    assert operator.run("engine", "start", "a9", "other", box=ready).returncode == 0
    assert "engine other is running" in operator.run("engine", "status", "a9", box=ready).stdout
    assert operator.run("engine", "stop", "a9", box=ready).returncode == 0
    done = operator.lab.ssh(ready, "touch", "was-here")
    assert done.returncode == 64 and json.loads(done.stdout.splitlines()[1])["ok"] is False
    assert ready.exec("llm", ["test", "-e", "was-here"], check=False).returncode == 1


def test_a_box_with_a_forced_command_serves_through_the_proxy(operator, ready):
    force_the_agent(ready)
    operator.close_masters()
    serving = operator.serve(ready)
    reply = serving.ask("POST", "/v1/completions", {"model": "a9-small", "prompt": "the", "max_tokens": 4})
    assert reply.status == 200 and ready.unit_pids("llm-engine-other")


def test_a_refused_install_under_a_forced_command_says_why(operator, ready):
    force_the_agent(ready)
    operator.close_masters()
    ready.exec("root", ["mount", "--bind", "-o", "ro", "/home/llm", "/home/llm"])
    done = operator.run("engine", "install", "a9", box=ready)
    assert done.returncode not in (0, 255) and "Read-only file system" in done.stderr

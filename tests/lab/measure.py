#!/usr/bin/env python3
"""What asking a box costs: a status of the agent over ssh, cold and warm, and its CPU time beside `python3 -c pass`.

Needs what the lab needs; lab.py tells. Prints medians.
"""

import json
import statistics
import sys
import time

from conftest import INSTALLED, LLMGUARD, Operator
from lab import Lab, LabError

ROUNDS = 15
ASK = {"op": "status", "host": "a9", "engines": {"mainline": {"unit": "llm-engine-mainline.service", "port": 8081},
                                                 "other": {"unit": "llm-engine-other.service", "port": 8082}}}


def over_ssh(operator, box):
    """Seconds that one status over ssh takes, with the proxy's own options."""
    sys.path.insert(0, str(LLMGUARD.parent))
    import llmguard

    remote = llmguard.Remote(llmguard.HostConfig(name=box.name, ssh=box.name), operator.runtime)
    begun = time.monotonic()
    assert remote.call(ASK, 30.0)["ok"]
    return time.monotonic() - begun


def cpu_in_the_box(box, *argv):
    """User and system seconds of a program in the box, its children included, with the request on stdin."""
    measure = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], stdin=sys.stdin, stdout=subprocess.DEVNULL); "
               "used = resource.getrusage(resource.RUSAGE_CHILDREN); print(used.ru_utime + used.ru_stime)")
    return float(box.exec("llm", ["python3", "-c", measure, *argv], input=json.dumps(ASK) + "\n").stdout)


def median(figure, before=lambda: None):
    figures = []
    for _ in range(ROUNDS):
        before()
        figures.append(figure())
    return statistics.median(figures)


def main():
    lab = Lab()
    with lab.alone():
        lab.up()
        try:
            measure(lab)
        finally:
            lab.down()


def measure(lab):
    import os
    import tempfile
    from pathlib import Path

    box = lab.a9
    box.write(INSTALLED, LLMGUARD.read_text())
    with tempfile.TemporaryDirectory() as folder:
        operator = Operator(lab, Path(folder), None)
        os.environ.update(PATH=operator.env["PATH"], XDG_RUNTIME_DIR=operator.runtime)
        try:
            cold = median(lambda: over_ssh(operator, box), operator.close_masters)
            warm = median(lambda: over_ssh(operator, box))
        finally:
            operator.close()
    nothing = median(lambda: cpu_in_the_box(box, "python3", "-c", "pass"))
    import llmguard

    status = median(lambda: cpu_in_the_box(box, "python3", "-S", "-E", "-c", llmguard.start_words(INSTALLED), "agent"))
    smi = median(lambda: cpu_in_the_box(box, "nvidia-smi", "-q", "-x"))
    print("a status over ssh, a new login:          %4.0f ms" % (cold * 1000))
    print("a status over ssh, a kept connection:    %4.0f ms" % (warm * 1000))
    print("CPU time of `python3 -c pass`:           %4.0f ms" % (nothing * 1000))
    print("CPU time of the stand-in nvidia-smi:     %4.0f ms" % (smi * 1000))
    print("CPU time of the agent's status:          %4.0f ms, with systemctl and nvidia-smi: %.1f times `pass`"
          % (status * 1000, status / nothing))


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit("lab: %s" % error)

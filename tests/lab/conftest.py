"""The lab's fixtures. Without root or the tools its tests are skipped, with the reason; in CI they fail instead."""

import os

import pytest
from lab import Lab, missing_parts

OTHER_RUN = 15 * 60  # seconds to wait for another test run on this machine, which uses the same names and addresses


@pytest.fixture(scope="session")
def lab():
    """The two boxes, up; powered off at the end of the run. A test that needs a box as new asks for `a9` or `b3090`."""
    missing = missing_parts()
    if missing:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("; ".join(missing))
    lab = Lab()
    with lab.alone(OTHER_RUN):
        lab.down()  # what a run that was killed has left
        try:
            lab.up()
            yield lab
        finally:
            lab.down()


@pytest.fixture
def a9(lab):
    """The tidy box, just booted from a new disk: no engine, no job, no GPU switch, nothing that another test did."""
    lab.a9.renew()
    return lab.a9


@pytest.fixture
def b3090(lab):
    """The awkward box, just booted from a new disk."""
    lab.b3090.renew()
    return lab.b3090

"""Stops that come at awkward moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from narrowgauge_lab.stopping import StopRequest


def test_a_stop_from_before_the_row_began_reaches_it() -> None:
    """It came between the look whether to go on and the fork: the row would run to its end."""
    stop = StopRequest()
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleep) as child, stop.listening():
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
        stop.child_began(child.pid)
        assert child.wait(50) == -signal.SIGTERM  # SIGKILL would come after the grace
        stop.child_ended()

"""A Ctrl-C while a server is asked ends the sweep at once, and nothing is asked of the server afterwards."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fake_engine import FakeEngine

SWEEP = """
import sys, mtplab
from mtplab.engines import Attach, Limits
engine = Attach(addresses=(sys.argv[2],), limits=Limits(concurrency=1))
try:
    mtplab.sweep(sys.argv[1], [[1, 2], [3], [4]], depths=[3], max_new_tokens=9, results=sys.argv[3], engine=engine)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_script_that_is_interrupted_ends_at_once(bundled, tmp_path):
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with FakeEngine(3) as engine:
        engine.delay = 30.0
        command = [sys.executable, "-c", SWEEP, str(bundled), engine.url, str(tmp_path / "r")]
        sweep = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths})
        try:
            deadline = time.monotonic() + 60
            while not engine.begun and time.monotonic() < deadline:
                time.sleep(0.05)
            began = time.monotonic()
            sweep.send_signal(signal.SIGINT)
            said, _ = sweep.communicate(timeout=20)
        finally:
            sweep.kill()
        assert said == "interrupted\n" and time.monotonic() - began < 5
        looks = engine.metrics_read
        time.sleep(0.3)
        assert (engine.begun, engine.metrics_read) == (1, looks)

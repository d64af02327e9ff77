"""Sweeps of the bundled model, killed at random moments, and two at once: nothing is lost, doubled or spoilt."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

CELLS = 3 * 2 * 2 * 4  # caches, draft's caches, temperatures, depths


def seen(repo, bundled, folder, *arguments) -> dict:
    environment = {**os.environ, "PYTHONPATH": str(repo), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, str(repo / "tests" / "sweep_killer.py"), str(bundled), str(folder), *map(str, arguments)]
    done = subprocess.run(script, capture_output=True, text=True, env=environment, timeout=570)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def survives(found: dict, times: int, method: str) -> None:
    assert (found["lost"], found["wrong"]) == (0, 0), found
    assert found["ended"] < times / 2, f"too few were killed in time to say anything: {found}"
    assert found["kept"] and found["same"], found
    assert (found["computed"], found["reused"]) == (CELLS - found["kept"], found["kept"]), found
    assert found["traces"] == (CELLS // 4 if method == "trace" else 0)


def test_killed_at_twenty_moments_it_resumes_and_loses_nothing(repo, bundled, tmp_path):
    survives(seen(repo, bundled, tmp_path / "k", "kill", 20, 11, "trace"), 20, "trace")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["trace", "run"])
def test_killed_at_fifty_moments(repo, bundled, tmp_path, method):
    survives(seen(repo, bundled, tmp_path / "k", "kill", 50, 12, method), 50, method)


def test_two_at_once_share_the_work(repo, bundled, tmp_path):
    found = seen(repo, bundled, tmp_path / "p", "pair", 0, 0, "trace")
    assert found["codes"] == [0, 0] and found["same"]
    (mine, my_reused, failed), (theirs, their_reused, also) = found["counts"]
    assert failed == also == 0 and mine + theirs == CELLS
    assert mine + my_reused == theirs + their_reused == CELLS

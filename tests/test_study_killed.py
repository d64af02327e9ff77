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


def survives(found: dict, method: str) -> None:
    assert (found["lost"], found["wrong"], found["same"]) == (0, 0, True), found
    assert (found["computed"], found["reused"]) == (CELLS - found["kept"], found["kept"]), found
    assert found["kept"] or found["laps"], f"no child came far enough to leave anything: {found}"
    assert found["traces"] == (CELLS // 4 if method == "trace" else 0)


def test_killed_at_twenty_moments_it_resumes_and_loses_nothing(repo, bundled, tmp_path):
    survives(seen(repo, bundled, tmp_path / "k", "kill", 20, 11, "trace"), "trace")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "times"), [("trace", 40), ("run", 20)])
def test_killed_at_more_moments(repo, bundled, tmp_path, method, times):
    survives(seen(repo, bundled, tmp_path / "k", "kill", times, 12, method), method)


def test_two_at_once_share_the_work(repo, bundled, tmp_path):
    found = seen(repo, bundled, tmp_path / "p", "pair", 0, 0, "trace")
    assert found["codes"] == [0, 0] and found["same"]
    (mine, my_reused, failed), (theirs, their_reused, also) = found["counts"]
    assert failed == also == 0 and mine + theirs == CELLS
    assert mine + my_reused == theirs + their_reused == CELLS

"""An engine's life under its guardian: started, answering, gone with all that it started, in whatever way it ends.

The engine is `misbehaving_engine.py`'s; what is left of it is looked for in /proc. What it is started with is
`test_engine_launch.py`'s.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mtplab.engines import Launch, ServerSlot
from mtplab.engines.guardian import processes
from mtplab.engines.installed import launch_version
from mtplab.engines.launch import launched
from mtplab.engines.process import EngineProcess
from mtplab.errors import ConfigError, MtplabError
from tests.misbehaving_engine import KEY, Fake, fake, measure, opened, wanted

__all__ = ["fake"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is left behind is looked for in /proc")

PARENT = """
import sys, threading, time
from mtplab.engines.launch import launched
from mtplab.engines.settings import Launch
from mtplab.engines.engine import Wanted
command = (sys.executable, *sys.argv[1:4])
settings = Launch(engine="vllm", command=command, stop=float(sys.argv[4]))
running = launched(settings, Wanted("m", None, 0, "none", "none", 32)).open(threading.Event())
print(running._process._guardian.pid, flush=True)
time.sleep(600)
"""


# a life


def test_it_is_started_answers_and_is_gone(fake, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # which would answer nothing
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    running = opened(fake.settings(arguments=("--max-model-len", "64")))
    assert running.alive() and fake.alive() == {"engine"}
    facts = running._server.facts
    assert facts["start_seconds"] > 0 and facts["version"] == "9.9" and not facts["attached"]
    words = json.loads(fake.noted("words"))
    assert words[0] == "m" and words[-2:] == ["--max-model-len", "64"]
    started = time.monotonic()
    running.close()
    assert time.monotonic() - started < 5 and fake.gone(0) and not running.alive()
    assert fake.noted("asked") == "yes"  # by SIGTERM, before anything was killed
    running.close()


def test_a_slot_shares_one_server_between_points_that_can(fake):
    settings = fake.settings()
    first, second = (launched(settings, wanted(checkpoint="m")) for _ in range(2))
    slot = ServerSlot()
    try:
        one, _ = slot.get(first, threading.Event())
        pid = fake.pids()
        assert slot.get(second, threading.Event()) == (one, 0.0) and fake.pids() == pid
        slot.get(launched(settings, wanted(depth=2)), threading.Event())
        assert fake.pids() != pid and not one.alive()
    finally:
        slot.close()


@pytest.mark.parametrize("how", ["deaf", "deaf,child,away,orphan", "child,away,orphan"])
def test_stopping_takes_everything_within_its_time(fake, how):
    running = opened(fake.settings(how, stop=0.5))
    assert fake.alive() == set(fake.pids()) >= set(how.split(",")) - {"deaf"}
    started = time.monotonic()
    running.close()
    assert fake.gone(0) and time.monotonic() - started < 4


@pytest.mark.parametrize("how", ["child,away,orphan", "deaf,child"])
def test_a_parent_that_is_killed_leaves_nothing(fake, how, tmp_path):
    parent, guardian = start_parent(fake, how)
    with parent:
        assert fake.alive() == set(fake.pids()) >= {"engine", "child"}
        parent.kill()
        parent.wait()
        assert fake.gone()
    assert_gone(guardian)


def test_a_guardian_that_is_killed_takes_the_engine_along(fake):
    parent, guardian = start_parent(fake, "deaf")
    with parent:
        os.kill(guardian, signal.SIGKILL)
        assert fake.gone()
        parent.kill()


def test_what_a_killed_guardian_left_is_found_by_its_parent(fake):
    running = opened(fake.settings("child"))
    os.kill(running._process._guardian.pid, signal.SIGKILL)
    running._process._guardian.wait()
    assert not running.alive() and fake.gone()


def test_a_guardian_ends_on_a_signal(fake):
    parent, guardian = start_parent(fake, "child")
    with parent:
        os.kill(guardian, signal.SIGTERM)
        assert fake.gone()
        parent.kill()
    assert fake.noted("asked") == "yes"


def start_parent(fake: Fake, how: str):
    """(a process that holds a running engine, the guardian's number)."""
    command = [sys.executable, "-c", PARENT, str(fake.script), str(fake.notes), how, "0.5"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    return parent, int(parent.stdout.readline())


def assert_gone(pid: int) -> None:
    ends = time.monotonic() + 5
    while any(each.pid == pid and not each.ended for each in processes()):
        assert time.monotonic() < ends, f"{pid} is still there"
        time.sleep(0.02)


def test_the_guardian_needs_nothing_of_the_package():
    path = Path(__file__).parent.parent / "mtplab" / "engines" / "guardian.py"
    told = "print([name for name in sys.modules if name.startswith(('mtplab', 'torch'))])"
    code = f"import runpy, sys; runpy.run_path({str(path)!r}); {told}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# a process by itself


def process(code: str, secrets=(), stop=2.0) -> EngineProcess:
    return EngineProcess([sys.executable, "-c", code], os.environ, stop, secrets)


@pytest.mark.parametrize("code", [0, 5])
def test_its_exit_code(code):
    ran = process(f"raise SystemExit({code})")
    assert ran.wait(10) == code == ran.poll() == ran.stop()


def test_the_signal_that_ended_it():
    ran = process("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert ran.wait(10) == -signal.SIGSEGV


def test_one_that_not_even_a_kill_ends_is_no_exit_code_0(tmp_path, monkeypatch):
    (tmp_path / "guardian.py").write_text("print('started 4999999', flush=True); input(); print('stuck')")
    monkeypatch.setattr("mtplab.engines.process.__file__", str(tmp_path / "process.py"))
    ran = process("pass")
    assert (ran.poll(), ran.stuck, ran.ending()) == (None, False, "runs")
    assert ran.stop(0.1) == -signal.SIGKILL
    assert ran.stuck and "is left behind" in ran.ending()


def test_its_last_lines_are_bounded_shown_and_without_secrets():
    ran = process(f"print('x' * 70000 + '{KEY}'); print('y' * 70000 + ' {KEY}'); print('\\x1b]0;a\\x07b {KEY}')", [KEY])
    assert ran.wait(10) == 0
    assert ran.tail() == ["\\x1b]0;a\\x07b …"]


def test_a_log_that_grows_is_cut():
    lines = "for i in range(9000): print(i, 'z' * 8000)"
    ran = process(f"import time\n{lines}\nprint('whole', flush=True)\ntime.sleep(1.5)\nprint('more', flush=True)")
    size, ends = 0, time.monotonic() + 20
    while (size < 8000 or ran.tail(1) != ["more"]) and ran.poll() is None and time.monotonic() < ends:
        size = os.fstat(ran._log.fileno()).st_size if not ran._log.closed else size
        time.sleep(0.02)
    assert ran.wait(10) == 0
    assert 8000 < size < 2 << 20 and ran.tail(2) == ["whole", "more"]


# what cannot be started


def test_no_such_program():
    settings = Launch(engine="vllm", command=("vllm-that-is-not-there", "serve"))
    with pytest.raises(MtplabError, match=r"vllm-that-is-not-there is not there.*command=") as found:
        opened(settings)
    assert "vLLM" in str(found.value) and launch_version(settings) is None


def test_a_program_that_cannot_be_run(tmp_path):
    program = tmp_path / "vllm"
    program.write_bytes(b"\x7fELF nothing")
    program.chmod(0o755)
    with pytest.raises(MtplabError, match=r"cannot be started \(Exec format error\)"):
        opened(Launch(engine="vllm", command=(str(program),)))


def test_it_ends_before_it_answers(fake, monkeypatch):
    monkeypatch.setenv("MTPLAB_API_KEY", KEY)
    with pytest.raises(MtplabError, match=r"exit code 3 before it answered") as found:
        opened(fake.settings("early,child"))
    said = str(found.value)
    # what went wrong first, and what it said last
    assert "RuntimeError: no such\\x07 device" in said and said.endswith("trace 28 | trace 29")
    assert KEY not in said and fake.gone(0)


@pytest.mark.parametrize("how", ["never", "silent,deaf", "never,child"])
def test_it_does_not_get_ready(fake, how):
    began = time.monotonic()
    with pytest.raises(MtplabError, match=r"not ready within 1 s"):
        opened(fake.settings(how, start=1.0, stop=0.5))
    assert fake.gone(0) and time.monotonic() - began < 6


def test_waiting_is_given_up_when_the_sweep_is(fake):
    cancel = threading.Event()
    threading.Timer(0.5, cancel.set).start()
    with pytest.raises(MtplabError, match="stopped before it answered"):
        launched(fake.settings("never", stop=0.5), wanted()).open(cancel)
    assert fake.gone(0)


def test_another_server_on_its_port_is_not_taken_for_it(fake):
    with pytest.raises(MtplabError, match="another server answers there"):
        opened(fake.settings("stranger"))
    assert fake.gone(0)
    # the next one has a port of its own
    running = opened(fake.settings("stranger-once"))
    running.close()
    assert (fake.notes / "taken").exists()


def test_a_server_that_is_not_what_was_asked_for(fake):
    opened(fake.settings("shallow"), depth=1).close()
    with pytest.raises(MtplabError, match="vLLM was started for depth 3, and says that it drafts 1 a round"):
        opened(fake.settings("shallow"), depth=3)
    assert fake.gone(0)


def test_a_host_that_is_not_ours(fake):
    with pytest.raises(ConfigError, match="host '…' of a Launch: nothing can listen there"):
        opened(fake.settings(host="192.0.2.1"))


def test_it_dies_while_it_is_measured(fake, monkeypatch):
    monkeypatch.setenv("MTPLAB_API_KEY", KEY)
    running = opened(fake.settings("dies,child"))
    try:
        with pytest.raises(
            MtplabError, match="exit code 7 while it was measured.*fatal: it broke here with …"
        ) as found:
            measure(running)
        assert KEY not in str(found.value) and found.value.__cause__ is None and not running.alive()
        assert fake.gone(0)
    finally:
        running.close()

"""A fake engine: a few lines of `http.server` that can be told to behave badly, and what is left of it in /proc.

Knows nothing of what is tested; `fake` is the fixture of those who start it.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtplab.config import SamplingConfig
from mtplab.engines import Launch
from mtplab.engines.engine import Wanted
from mtplab.engines.guardian import processes
from mtplab.engines.launch import launched

KEY = "sk-fake-93f1c7"

FAKE = """
import json, os, signal, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

notes, how = Path(sys.argv[1]), set(sys.argv[2].split(","))
words = sys.argv[3:]

def told(flag):
    return words[words.index(flag) + 1]

def left(code, name):
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=name == "away")
    (notes / name).write_text(str(child.pid))

(notes / "engine").write_text(str(os.getpid()))
(notes / "words").write_text(json.dumps(words))
(notes / "key").write_text(os.environ.get("VLLM_API_KEY", "none"))
(notes / "others").write_text(json.dumps([k for k, v in os.environ.items() if v == os.environ.get("VLLM_API_KEY")]))
print("the key is", os.environ.get("VLLM_API_KEY"), flush=True)
deaf = "import signal, time\\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\\ntime.sleep(600)"
if "child" in how:
    left(deaf, "child")
if "away" in how:
    left(deaf, "away")
if "orphan" in how:  # its parent ends at once, in a session of its own
    orphan = "import os, sys, subprocess\\nfrom pathlib import Path\\n" \\
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\\n" \\
        f"Path({str(notes / 'orphan')!r}).write_text(str(p.pid))"
    subprocess.run([sys.executable, "-c", orphan], start_new_session=True, check=True)
if "deaf" in how:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: ((notes / "asked").write_text("yes"), os._exit(0)))
if "tells" in how:
    print("serving", words[0], "with", words[-2:], file=sys.stderr)
    print("at http://127.0.0.1:" + told("--port"), "for 10.9.8.7:1 in", notes, "of", Path.home(), file=sys.stderr)
    sys.exit(4)
if "early" in how:
    print("RuntimeError: \\x1b[31mno such\\x07 device\\x1b[0m", file=sys.stderr)
    for i in range(30):
        print("trace", i, file=sys.stderr)
    sys.exit(3)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if "drips" in how:
            self.send_response(200)
            self.end_headers()
            for _ in range(200):
                self.wfile.write(b"x")
                time.sleep(0.1)
        if self.path == "/health":
            return self.send(503 if "never" in how else 200, {})
        if self.path == "/metrics":
            text = "# TYPE vllm:num_requests_running gauge\\nvllm:num_requests_running 0\\n"
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            text += f"# TYPE {name} counter\\n" + f'{name}_total{{position="0"}} 0\\n' * ("shallow" in how)
            text += "vllm:prompt_tokens_total 1e+06\\n" * ("full" in how)
            return self.send(200, text)
        if self.path == "/version":
            return self.send(200, {"version": "9.9"})
        name = told("--served-model-name")
        if "stranger" in how or ("stranger-once" in how and not (notes / "taken").exists()):
            name = "somebody-else"
            (notes / "taken").touch()
        self.send(200, {"data": [{"id": name}]})

    def do_POST(self):
        if "dies" in how:
            print("fatal: it broke here with", os.environ.get("VLLM_API_KEY"), flush=True)
            os._exit(7)
        self.send(500, {"error": "out of memory"})

    def send(self, status, body):
        raw = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_):
        pass

if "silent" in how or os.environ.get("SILENT_PORT") == told("--port"):
    time.sleep(600)
HTTPServer((told("--host"), int(told("--port"))), Handler).serve_forever()
"""


def wanted(depth=0, cache="none", draft_cache=None, checkpoint="m", converted=None, longest=32) -> Wanted:
    return Wanted(str(checkpoint), converted, depth, cache, draft_cache or cache, longest)


class Fake:
    """The fake engine, and what it noted of itself."""

    def __init__(self, folder: Path):
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.script = folder / "fake engine.py"
        self.script.write_text(FAKE)

    def settings(self, how: str = "well", **more) -> Launch:
        return Launch(engine="vllm", command=(sys.executable, str(self.script), str(self.notes), how), **more)

    def noted(self, name: str) -> str:
        return (self.notes / name).read_text()

    def pids(self) -> dict[str, int]:
        names = [name for name in ("engine", "child", "away", "orphan") if (self.notes / name).exists()]
        return {name: int(self.noted(name)) for name in names}

    def alive(self) -> set[str]:
        there = {each.pid for each in processes() if not each.ended}
        return {name for name, pid in self.pids().items() if pid in there}

    def gone(self, seconds: float = 5.0) -> bool:
        ends = time.monotonic() + seconds
        while self.alive() and time.monotonic() < ends:
            time.sleep(0.02)
        return not self.alive()


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Iterator[Fake]:
    monkeypatch.delenv("MTPLAB_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    fake = Fake(tmp_path)
    yield fake
    left = fake.alive()
    for pid in fake.pids().values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left


def opened(settings: Launch, **asked):
    return launched(settings, wanted(**asked)).open(threading.Event())


def measure(running):
    return running.measure([[1, 2]], ["all"], 0, SamplingConfig(max_new_tokens=2), threading.Event(), None)

"""`mtplab serve`: options, the one line, and an end on a signal in the middle of a request."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mtplab.cli import main
from tests.server_client import LONG, ask, until


def test_what_is_refused_before_a_model_is_loaded(bundled, monkeypatch, capsys):
    def loaded(*arguments, **options):
        raise AssertionError("it was loaded")

    monkeypatch.setattr("mtplab.models.load_model", loaded)
    monkeypatch.setenv("BLANK_KEY", " ")
    monkeypatch.setenv("ODD_KEY", "s3cret\n")
    taken = socket.create_server(("127.0.0.1", 0))
    for arguments, says in (
        (["--port", str(taken.getsockname()[1])], "cannot be listened on: Address already in use"),
        (["--port", "70000"], "port is 70000"),
        (["--api-key-env", "NO_SUCH_KEY"], "'NO_SUCH_KEY': that variable is not set, or empty"),
        (["--api-key-env", "BLANK_KEY"], "'BLANK_KEY'"),
        (["--api-key-env", "ODD_KEY"], "holds characters that no header carries"),
        (["--exclude", "a,,b"], "--exclude 'a,,b': an empty name"),
    ):
        assert main(["serve", str(bundled), *arguments]) == 2
        out, err = capsys.readouterr()
        assert says in err and "s3cret" not in err and out == ""
    taken.close()


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGTERM, ["--exclude", "mtp.*", "--depth", "2", "--served-model-name", "study"]),
        (signal.SIGINT, ["--no-exact", "--quant-policy", "int8", "--draft-quant-policy", "none"]),
    ],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_the_command_serves_and_ends_on_a_signal_in_the_middle_of_a_request(repo, number, options):
    arguments = ["serve", "data/tiny-qwen3_5", "--port", "0", "--api-key-env", "KEY", *options]
    child = subprocess.Popen(
        [sys.executable, "-m", "mtplab.cli", *arguments], cwd=repo, text=True,
        env={**os.environ, "KEY": "s3cret"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        line = child.stdout.readline()
        name, url, what = re.fullmatch(r"serving (\S+) at (http://127\.0\.0\.1:\d+) \((.*)\)\n", line).groups()
        info = ask(url, "/server_info").json
        if number == signal.SIGTERM:
            assert what == "depth 2, cache none, exclusions mtp.*, float32 on cpu, exact"
            assert (name, info["model"], info["model_format"], info["depth"]) == ("study", "study", "fp8", 2)
        else:
            assert what == "depth 3, cache int8, draft's none, exclusions as stored, float32 on cpu, not exact"
            assert (name, info["exact"], info["model_format"]) == ("tiny-qwen3_5", False, None)
        key = {"Authorization": "Bearer s3cret"}
        ask(url, "/v1/completions", LONG).refused(401, "key")
        assert ask(url, "/v1/completions", {"prompt": "The", "max_tokens": 3}, **key).json["choices"][0]["text"]
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(ask, url, "/v1/completions", LONG, **key)
            until(lambda: b"mtplab:num_requests_running 2.0" in ask(url, "/metrics").raw)
            began = time.monotonic()
            child.send_signal(number)
            out, err = child.communicate(timeout=20)
            took = time.monotonic() - began
            pending.result(timeout=10).refused(503, "stopping")
        assert (child.returncode, out, err) == (0, "", "") and took < 5, took
    finally:
        child.kill()
        child.communicate()

"""A start has an end, gives its key to nobody else, and a failed one is a row without a word of this machine."""

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import mtplab
from mtplab.engines import Launch, starting
from mtplab.errors import MtplabError
from tests.misbehaving_engine import KEY, fake, opened

__all__ = ["fake"]

HOME = "/".join(("", "home", "alice"))

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is left behind is looked for in /proc")


@pytest.mark.parametrize("how", ["drips", "drips,deaf"])
def test_a_server_that_drips_does_not_stop_the_clock(fake, how):
    began = time.monotonic()
    with pytest.raises(MtplabError, match=r"not ready within 1 s"):
        opened(fake.settings(how, start=1.0, stop=0.3))
    assert time.monotonic() - began < 4 and fake.gone(0)


def test_a_start_that_drips_is_given_up_with_the_sweep(fake):
    from mtplab.engines.launch import launched
    from tests.misbehaving_engine import wanted

    cancel, began = threading.Event(), time.monotonic()
    threading.Timer(1.0, cancel.set).start()
    with pytest.raises(MtplabError, match="stopped before it answered"):
        launched(fake.settings("drips", stop=0.3), wanted()).open(cancel)
    assert time.monotonic() - began < 4 and fake.gone(0)


class Stranger(ThreadingHTTPServer):
    """Somebody else's server on the port; `seen` are the keys that it was sent."""

    daemon_threads = True

    def __init__(self, status: int):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.seen, self.asked = status, [], 0
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def __exit__(self, *problem):
        self.shutdown()
        super().__exit__(*problem)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked += 1
        self.server.seen += self.headers.get_all("Authorization") or []
        self.send_response(200 if self.path == "/health" else self.server.status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *words):
        pass


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("status", [200, 401, 500])
def test_a_stranger_on_the_port_gets_no_key_and_is_not_taken_for_it(fake, status, key, monkeypatch):
    if key is not None:
        monkeypatch.setenv("MTPLAB_API_KEY", key)
    free, found = starting._free_port, []
    with Stranger(status) as stranger:
        # the first time, it gets there between the port's choice and its use

        def port(host: str) -> int:
            found.append(host)
            return stranger.server_address[1] if len(found) == 1 else free(host)

        monkeypatch.setattr(starting, "_free_port", port)
        monkeypatch.setenv("SILENT_PORT", str(stranger.server_address[1]))
        if status == 500 and key is None:  # which may be one that is not ready yet
            with pytest.raises(MtplabError, match="not ready within 2 s|exit code 1"):
                opened(fake.settings("silent", start=2.0, stop=0.3))
        else:
            running = opened(fake.settings(start=30.0, stop=0.3))
            running.close()
            assert len(found) == 2
        assert stranger.asked and stranger.seen == []


def test_a_row_of_a_failed_start_says_nothing_of_this_machine(fake, bundled, tmp_path, monkeypatch):
    monkeypatch.setenv("MTPLAB_API_KEY", KEY)
    settings = fake.settings("tells", arguments=("--chat-template", f"{HOME}/t.jinja"))
    told = {"depths": [0], "max_new_tokens": 4, "results": tmp_path / "r"}
    (row,) = mtplab.sweep(bundled, [[1, 2]], engine=settings, **told).rows
    assert "exit code 4 before it answered" in row.error and "…/t.jinja" in row.error and bundled.name in row.error
    assert "at … for … in …/notes of …" in row.error
    for secret in (str(bundled.parent), str(tmp_path), "alice", "127.0.0.1", "10.9.8.7", KEY):
        assert secret not in row.error


def test_a_row_of_a_server_that_died_says_nothing_of_this_machine(fake, bundled, tmp_path):
    settings = Launch(**{**fake.settings("dies").model_dump(), "limits": {"attempts": 1}})
    told = {"depths": [0], "max_new_tokens": 4, "results": tmp_path / "r"}
    (row,) = mtplab.sweep(bundled, [[1, 2]], engine=settings, **told).rows
    assert "exit code 7 while it was measured" in row.error
    for secret in (str(bundled.parent), str(tmp_path), "127.0.0.1"):
        assert secret not in row.error

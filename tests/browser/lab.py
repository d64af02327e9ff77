"""A JupyterLab server for one test: its own settings, its own port, stopped whatever happens.

Knows nothing of the notebooks in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def jupyter_lab(folder: Path, state: Path, python_path: Path, timeout: float = 90) -> Iterator[str]:
    """Serves `folder`; yields the address of the application with its token. `state` takes settings and the log."""
    names = ("config", "settings", "workspaces", "ipython", "runtime")
    places = {name: state / name for name in names}
    for place in places.values():
        place.mkdir(parents=True)
    # a prompt for news would lie over the page, and the server would ask the network for them
    settings = places["settings"] / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
    port, token = _free_port(), secrets.token_hex(16)
    environment = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(places["config"]),
        "JUPYTERLAB_SETTINGS_DIR": str(places["settings"]),
        "JUPYTERLAB_WORKSPACES_DIR": str(places["workspaces"]),
        "JUPYTER_RUNTIME_DIR": str(places["runtime"]),
        "IPYTHONDIR": str(places["ipython"]),
        "PYTHONPATH": str(python_path),
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--port-retries=0"]
    command += ["--ip=127.0.0.1", f"--ServerApp.root_dir={folder}", f"--IdentityProvider.token={token}"]
    log = (state / "server.log").open("w")
    server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder)
    try:
        _wait(f"http://127.0.0.1:{port}/api?token={token}", server, state / "server.log", timeout)
        yield f"http://127.0.0.1:{port}/lab/tree/{{path}}?token={token}"
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(20)
        log.close()


def _wait(url: str, server: subprocess.Popen, log: Path, timeout: float) -> None:
    give_up = time.monotonic() + timeout
    while time.monotonic() < give_up:
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended with {server.returncode}:\n{log.read_text()[-3000:]}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not answer within {timeout:.0f} s:\n{log.read_text()[-3000:]}")

"""Set-up that every test shares: one thread per worker, fixed seeds, no network, and the bundled checkpoints.

Knows nothing of what is tested; a fixture that only one room needs lives in that room's own test file.
"""

import os

# before torch is loaded: workers run side by side, and threads beyond the cores only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
# child processes (notebook kernels, the CLI) must not ask a hub either
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# kernels run in Triton's interpreter, which is chosen when triton is first imported; only a test that asks for
# `interpreted_kernels` uses any
os.environ["TRITON_INTERPRET"] = "1"

import ipaddress
import random
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

# nbformat's jsonschema loads it to check addresses, which no notebook's schema has, and it takes a second to put its
# grammar together; without it jsonschema leaves that out
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

REPO = Path(__file__).resolve().parent.parent
MARKERS = {
    "slow": "takes more than a few seconds; left out of `make test-fast`",
    "browser": "drives a real Chromium; one after another, left out of `make test-fast`",
    "serial": "measures time or wants the machine's ports: shares one worker with the browser tests",
}

# the same call gives the same result: examples come from a fixed seed, and a loaded machine is no failure
hypothesis.settings.register_profile("mtplab", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("mtplab")


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # first, so that xdist, which reads the group afterwards, keeps them on one worker
        if item.get_closest_marker("browser") or item.get_closest_marker("serial"):
            item.add_marker(pytest.mark.xdist_group("one-at-a-time"))


def _is_local(host: str | bytes | None) -> bool:
    """Loopback, or an unset host (which means this machine)."""
    if isinstance(host, bytes):
        host = host.decode()
    if host in (None, "", "localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Refuses connections and name look-ups that leave this machine, and fails the test that tried.

    The attempt is also kept, because a library may swallow the error and carry on. Yields the attempts.
    """
    attempts: list[str] = []

    def refuse(host: object) -> None:
        attempts.append(str(host))
        raise OSError(f"tests use no network, and this one asked for {host}")

    def guarded(method):
        def call(self: socket.socket, address, *rest):
            if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(address[0]):
                refuse(address[0])
            return method(self, address, *rest)

        return call

    look_up = socket.getaddrinfo

    def getaddrinfo(host, *rest, **options):
        if not _is_local(host):
            refuse(host)
        return look_up(host, *rest, **options)

    monkeypatch.setattr(socket.socket, "connect", guarded(socket.socket.connect))
    monkeypatch.setattr(socket.socket, "connect_ex", guarded(socket.socket.connect_ex))
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield attempts
    if attempts:
        pytest.fail(f"this test tried to reach {', '.join(sorted(set(attempts)))}; tests use no network")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def repo() -> Path:
    """The checkout's root."""
    return REPO


def _checkpoint(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        pytest.fail(f"{folder.relative_to(REPO)}/config.json is missing; data/README.md says how it is made")
    return folder


@pytest.fixture(scope="session")
def bundled() -> Path:
    """The bundled BF16 checkpoint's folder."""
    return _checkpoint(REPO / "data" / "tiny-qwen3_5")


@pytest.fixture(scope="session")
def bundled_fp8() -> Path:
    """The bundled checkpoint in the published Qwen FP8 layout."""
    return _checkpoint(REPO / "data" / "tiny-qwen3_5-fp8")


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of Chromium. Missing: a skip that says what to install, and in CI a failure."""
    path = shutil.which("chromium")
    if path is None:
        what = "browser tests need chromium on PATH; on Debian: apt-get install chromium fonts-liberation"
        if os.environ.get("CI"):
            pytest.fail(what)
        pytest.skip(what)
    return path


@pytest.fixture
def interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers take Triton's kernels on a CPU, in the interpreter."""
    monkeypatch.setenv("MTPLAB_KERNELS", "triton")

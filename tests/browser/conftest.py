"""A real Chromium for the tests in this folder, driven by Playwright, and a watch over what pages ask and say.

Playwright's own browsers are not downloaded: Debian's `chromium` is used (`chromium` fixture in ../conftest.py
says what to install when it is missing, and fails in CI). Knows nothing of reports or of JupyterLab.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

# what works headless, as root, on a closed network
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# a loaded machine is no failure; nothing waits this long when it works
expect.set_options(timeout=30_000)
ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts" / "browser"


@dataclass
class Watched:
    """A page, and everything it asked for or complained about."""

    page: Page
    console: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def complaints(self) -> list[str]:
        return [*self.console, *self.errors, *self.outside, *self.failed, *self.dialogs]


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()


def watch(context: BrowserContext) -> Watched:
    """A new page of `context` that is listened to; nothing but this machine can be reached from it."""
    page = context.new_page()
    watched = Watched(page)

    def console(message):
        if message.type == "error":
            watched.console.append(message.text)

    def dialog(shown):
        watched.dialogs.append(shown.message)
        shown.dismiss()

    def request(asked):
        parts = urlsplit(asked.url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname not in ("127.0.0.1", "localhost"):
            watched.outside.append(asked.url)

    page.on("console", console)
    page.on("pageerror", lambda error: watched.errors.append(str(error)))
    page.on("request", request)
    page.on("requestfailed", lambda asked: watched.failed.append(f"{asked.url[:120]} {asked.failure}"))
    page.on("dialog", dialog)
    return watched


@pytest.fixture
def visit(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Callable[..., Watched]]:
    """`visit(width=…, scheme=…, offline=…)` gives a watched, empty page; a failing test leaves a screenshot."""
    contexts: list[tuple[BrowserContext, Watched]] = []

    def open_page(width: int = 1440, height: int = 1000, scheme: str = "light", offline: bool = True) -> Watched:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, offline=offline, accept_downloads=True
        )
        context.set_default_timeout(30_000)
        watched = watch(context)
        contexts.append((context, watched))
        return watched

    yield open_page
    failed = getattr(request.node, "failed_call", False)
    for number, (context, watched) in enumerate(contexts):
        if failed:
            screenshot(watched.page, f"failed-{request.node.name}-{number}")
        context.close()


def screenshot(page: Page, name: str) -> Path:
    """Keeps a picture of the page under artifacts/browser."""
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    path = ARTIFACTS / f"{name.replace(os.sep, '-')}.png"
    page.screenshot(path=path)
    return path


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if report.when == "call":
        item.failed_call = report.failed
    return report

"""What axe-core finds wrong in a page and in each of its frames.

The script comes with `axe-playwright-python`; none of it is in this repository. A frame of a report is sandboxed and
has an origin of its own, so that axe cannot reach into it from the page: each frame is looked at by itself. Knows
nothing of what the page shows.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import axe_playwright_python
from playwright.sync_api import Page

__all__ = ["HARMFUL", "findings"]

HARMFUL = ("serious", "critical")
_RUN = "() => axe.run(document, { iframes: false, resultTypes: ['violations'] })"


@cache
def _script() -> str:
    return files(axe_playwright_python).joinpath("axe.min.js").read_text(encoding="utf-8")


def findings(page: Page, impacts: tuple[str, ...] = HARMFUL) -> list[str]:
    """One line per rule and frame that is broken with one of these impacts. Opens what is folded away."""
    found = []
    for frame in page.frames:
        frame.evaluate(_script())
        frame.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        for broken in frame.evaluate(_RUN)["violations"]:
            if broken["impact"] in impacts:
                where = "; ".join(node["html"][:160] for node in broken["nodes"][:3])
                said = f"{broken['impact']}: {broken['id']}: {broken['help']}"
                found.append(f"{said} ({len(broken['nodes'])} ×): {where}")
    return found

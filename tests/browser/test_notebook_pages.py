"""Reports of notebooks, as `mtplab report` makes them, in a real browser: nothing asked for, nobody shut out.

Two notebooks stand for all: one of figures and tables, one of charts and panels. Parameters are turned down.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mtplab.report import render_report
from tests.browser.axe import findings
from tests.browser.conftest import screenshot

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SMALL = {
    "06_what_the_cache_costs": {"policies": ["none", "int8", "turboquant"], "text_tokens": 72},
    "07_where_drafts_fail": {"temperatures": [0.0, 1.0], "max_depth": 3},
}


@pytest.mark.parametrize("name", SMALL)
def test_the_report_of_a_notebook(name, visit, tmp_path):
    asked = {"prompts_per_domain": 1, "max_new_tokens": 12, **SMALL[name]}
    report = render_report(NOTEBOOKS / f"{name}.ipynb", asked, tmp_path / "page.html", on_progress=lambda *told: None)
    for width, scheme in ((1440, "light"), (800, "dark")):
        watched = visit(width=width, scheme=scheme)
        page = watched.page
        page.goto(report.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out sideways"
        assert "in the files)" in page.locator("pre.stream").first.inner_text()
        assert all(image.get_attribute("alt") for image in page.locator("img").all())
        page.set_viewport_size({"width": width, "height": page.evaluate("document.documentElement.scrollHeight")})
        screenshot(page, f"{name}-{width}-{scheme}")
        assert findings(page) == []
        assert watched.complaints() == []

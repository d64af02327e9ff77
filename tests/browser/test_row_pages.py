"""Pages made of rows, without a notebook, in a real browser with the network off: results and comparisons."""

from __future__ import annotations

import json

import pytest

import mtplab
from mtplab.report.comparison_page import comparison_page
from mtplab.report.page import Page
from mtplab.report.results_page import results_page
from mtplab.study.result import SweepResult
from tests.browser.axe import findings
from tests.browser.conftest import screenshot
from tests.browser.test_report_page import Explorer
from tests.report_fakes import row, rows

pytestmark = pytest.mark.browser

HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>\"'&`*_[a](b)\u202etxet\x1b[31m"


def results():
    failed = row(2, "int4").model_copy(update={"error": f"no memory {HOSTILE}", "acceptance_length": None})
    study = [*rows(depths=range(5)), *rows(depths=range(5), temperatures=(0.7,)), failed]
    hostile = [each.model_copy(update={"checkpoint": HOSTILE, "prompt_set": HOSTILE}) for each in rows(depths=range(3))]
    return results_page([*study, *hostile], HOSTILE)


def comparison():
    base = rows(depths=range(5), policies=("none", "int8"))
    facts = {"cpu": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    other = [
        each.model_copy(update={"checkpoint": HOSTILE, "remark": HOSTILE, "provenance": facts})
        for each in rows(depths=range(5), policies=("int8", "none", "fp8_e4m3"))
    ]
    broken = other[-1].model_copy(update={"error": HOSTILE, "acceptance_length": None})
    return comparison_page(mtplab.compare(base, [*other[:-1], broken], names=["base", HOSTILE]))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name, text in (("results", results()), ("comparison", comparison())):
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("width", [1440, 800])
@pytest.mark.parametrize("name", ["results", "comparison"])
def test_the_page_fits_asks_for_nothing_and_obeys_nothing(visit, pages, name, width):
    scheme = "dark" if width == 800 else "light"
    watched = visit(width=width, scheme=scheme)
    page = watched.page
    page.goto((pages / f"{name}.html").as_uri())
    explorer = Explorer(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out sideways"
    explorer("#toggle").click()
    everything = page.locator("body").inner_text() + explorer("body").inner_text()
    assert "\u202e" not in everything and "\x1b" not in everything and "<img src=x" in everything
    assert page.title() != "broken" and "<script>" in page.title()
    assert page.locator("main img:not([src^='data:'])").count() == 0 and explorer("img").count() == 0
    assert all(image.get_attribute("alt") for image in page.locator("main img").all())
    page.set_viewport_size({"width": width, "height": page.evaluate("document.documentElement.scrollHeight")})
    screenshot(page, f"{name}-{width}-{scheme}")
    assert page.pdf().startswith(b"%PDF")
    assert findings(page) == []
    assert watched.complaints() == []


def test_lines_of_two_files_stand_side_by_side_in_the_explorer(visit, tmp_path):
    study = rows(depths=range(3), policies=("none", "int8", "int4"))
    path = tmp_path / "page.html"
    path.write_text(comparison_page(mtplab.compare(study, study, names=["old", "new"])), encoding="utf-8")
    watched = visit()
    watched.page.goto(path.as_uri())
    explorer = Explorer(watched.page)
    labels = [each.inner_text() for each in explorer("#weights label").all()]
    assert labels == ["old · all BF16", "new · all BF16", "old · published", "new · published"]
    assert explorer.lines == 6, "too many for one look: the first set of each file is ticked"
    with watched.page.expect_download() as started:
        explorer.frame.get_by_role("button", name="Download").click()
    started.value.save_as(tmp_path / "rows.json")
    taken = json.loads((tmp_path / "rows.json").read_text())
    assert [each.pop("source") for each in taken].count("old") == len(study)
    given = [json.loads(each.to_json()) for each in study]
    assert len(taken) == 2 * len(given) and all(taken.count(each) == 2 for each in given)
    contents = watched.page.get_by_role("navigation", name="Contents")
    contents.get_by_text("What changed").click()
    assert watched.page.url.endswith("#against-1")
    assert watched.complaints() == []


CUT = """() => [...document.querySelectorAll("main [role=region]")].filter((box) => box.scrollWidth > box.clientWidth)
  .map((box) => `${box.getAttribute("aria-label")}: ${box.scrollWidth} in ${box.clientWidth}`)"""


@pytest.mark.parametrize(("width", "depths"), [(1440, 9), (800, 7)])
def test_no_table_of_a_usual_study_is_cut(visit, tmp_path, width, depths):
    """Nine depths, KL of an int8 cache and perplexity fit a desktop's page, seven a narrow one's; more is scrolled."""
    judged = {"kl": 0.0000108, "kl_error": 0.0000019, "top1_agreement": 0.996, "perplexity": 20.3}
    judged |= {"reference_perplexity": 20.3, "quality_text": "own:1"}
    study = rows(depths=range(depths), policies=("none", "int8", "fp8_e4m3"))
    study = [each.model_copy(update=judged) for each in study]
    page = Page("Tables")
    page.show(SweepResult(study))
    path = tmp_path / "page.html"
    for text in (page.render(""), results_page(study, "x")):
        path.write_text(text, encoding="utf-8")
        watched = visit(width=width)
        watched.page.goto(path.as_uri())
        assert watched.page.locator("main [role=region]").count() >= 1 and watched.page.evaluate(CUT) == []
        watched.page.evaluate("document.querySelector('main [role=region] table').style.minWidth = '3000px'")
        assert len(watched.page.evaluate(CUT)) == 1, "what is cut is found"

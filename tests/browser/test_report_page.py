"""The exported page in a real browser with the network off: by mouse, by keyboard, in light and dark."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest

import mtplab
from mtplab.report import Conclusion, RoundsView, SweepExplorer, acceptance_by_depth, checkpoint_map
from mtplab.report.html import to_html
from mtplab.report.table import html_table
from mtplab.study.interval import length_error
from tests.browser.axe import findings
from tests.browser.conftest import screenshot
from tests.report_fakes import module, plan, row, rows

pytestmark = pytest.mark.browser

HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>\"'&\u202etxet\x1b[31m"
POLICIES, EXCLUDES = ("none", "int8", "int4"), ("published", "*")


def shown(*objects):
    """An executed notebook that shows `objects`, made without a kernel."""
    book = nbformat.v4.new_notebook()
    book.cells.append(nbformat.v4.new_markdown_cell("# A report\n\nSome text.\n\n## First\n\nMore."))
    for number, each in enumerate(objects):
        book.cells.append(nbformat.v4.new_markdown_cell(f"## Part {number}"))
        bundle = getattr(each, "_repr_mimebundle_", None)
        data = bundle() if bundle else {"text/html": each._repr_html_(), "text/plain": repr(each)}
        data, metadata = data if isinstance(data, tuple) else (data, {})
        data = {kind: _text(value) for kind, value in data.items()}
        output = nbformat.v4.new_output("display_data", data=data, metadata=metadata)
        book.cells.append(nbformat.v4.new_code_cell("", outputs=[output]))
    return to_html(book, {"Commit": "0123abc", "Parameters": "depth = 8"})


def _text(value):
    import base64

    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


@pytest.fixture(scope="module")
def study():
    return rows(depths=range(9), policies=POLICIES, excludes=EXCLUDES, temperatures=(0.0, 0.7))


@pytest.fixture(scope="module")
def report(study, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    parts = (checkpoint_map(plan()), acceptance_by_depth(study), SweepExplorer(study), Conclusion(study))
    path.write_text(shown(*parts), encoding="utf-8")
    return path


class Explorer:
    """The explorer inside a page, as a user meets it."""

    def __init__(self, page):
        page.locator("iframe.mtplab-explorer").scroll_into_view_if_needed()
        self.page = page
        self.frame = page.frame_locator("iframe.mtplab-explorer")
        self.frame.locator("path.dot").first.wait_for()

    def __call__(self, selector):
        return self.frame.locator(selector)

    @property
    def lines(self):
        return self("path.series").count()

    @property
    def summary(self):
        return self("#summary").inner_text()

    @property
    def tip(self):
        return self("#tip").inner_text() if self("#tip").is_visible() else ""


@pytest.fixture
def explorer(visit, report):
    watched = visit()
    watched.page.goto(report.as_uri())
    yield Explorer(watched.page)
    assert watched.complaints() == []


def test_every_line_is_drawn_and_choices_take_lines_away(explorer):
    assert explorer.lines == len(POLICIES) * len(EXCLUDES)
    explorer.frame.get_by_label("int8").uncheck()
    assert explorer.lines == 4
    explorer.frame.get_by_label("all BF16").uncheck()
    assert explorer.lines == 2
    explorer.frame.get_by_label("published", exact=True).uncheck()
    assert explorer.lines == 0 and "No rows" in explorer("#chart").text_content()
    assert "No rows at depth 8" in explorer.summary


def test_the_depth_slider_by_mouse(explorer):
    best = row(depth=8).acceptance_length
    assert (
        f"At depth 8, 6 settings: from {row(depth=8, policy='int4').acceptance_length:.2f} to {best:.2f}"
        in explorer.summary
    )
    box = explorer("#depth").bounding_box()
    y = box["y"] + box["height"] / 2
    explorer.page.mouse.move(box["x"] + box["width"] - 8, y)
    explorer.page.mouse.down()
    explorer.page.mouse.move(box["x"] + box["width"] / 2, y, steps=5)
    explorer.page.mouse.up()
    depth = int(explorer("#depth-value").inner_text())
    assert 3 <= depth <= 5
    assert f"At depth {depth}" in explorer.summary and f"{row(depth=depth).acceptance_length:.2f}" in explorer.summary


def test_temperature_domain_and_view(explorer, study):
    explorer.frame.get_by_label("Temperature").select_option("0.7")
    assert f"to {row(depth=8, temperature=0.7).acceptance_length:.2f} tokens" in explorer.summary
    explorer.frame.get_by_label("Temperature").select_option("0")
    explorer.frame.get_by_label("Domain").select_option("python")
    assert f"to {row(depth=8).by_domain['python'].acceptance_length:.2f} tokens" in explorer.summary
    explorer.frame.get_by_label("Domain").select_option(label="all prompts")
    explorer("#view").select_option("per_position")
    assert "Share of rounds (%)" in explorer("#chart").text_content()
    assert explorer("path.dot").count() == 6 * 8
    explorer("#view").select_option("speed")
    assert "Tokens per second" in explorer("#chart").text_content() and explorer("path.dot").count() == 6 * 9
    explorer("path.dot").first.hover()
    assert f"{row(depth=0).tokens_per_second:.0f} tokens per second" in explorer.tip
    assert "tokens per second" in explorer.summary and "tokens per round" not in explorer.summary


def test_rows_of_traces_have_no_speed_to_show(visit, study, tmp_path):
    traced = [one.model_copy(update={"method": "trace", "seconds": None, "tokens_per_second": None}) for one in study]
    (tmp_path / "report.html").write_text(shown(SweepExplorer(traced)), encoding="utf-8")
    watched = visit()
    watched.page.goto((tmp_path / "report.html").as_uri())
    explorer = Explorer(watched.page)
    views = explorer("#view option").evaluate_all("options => options.map(option => option.value)")
    assert views == ["depth", "per_position", "conditional"] and explorer.lines == len(POLICIES) * len(EXCLUDES)
    assert watched.complaints() == []


def test_numbers_stand_beside_the_name_of_their_axis_and_not_on_it(visit, study, tmp_path):
    path = tmp_path / "fast.html"
    fast = [each.model_copy(update={"tokens_per_second": 123456.0 + each.depth}) for each in study]
    path.write_text(shown(SweepExplorer(fast)), encoding="utf-8")
    watched = visit()
    watched.page.goto(path.as_uri())
    explorer = Explorer(watched.page)
    for view in ("depth", "speed", "conditional"):
        explorer("#view").select_option(view)
        name = explorer("#chart text[transform]").bounding_box()
        marks = [each.bounding_box() for each in explorer('#chart text[text-anchor="end"]').all()]
        assert marks and all(mark["x"] >= name["x"] + name["width"] for mark in marks), view


def test_more_lines_than_can_be_told_apart_start_with_the_first_exclusion_set(visit, tmp_path):
    study = rows(depths=range(3), policies=("none", "int8", "int4", "fp8_e4m3"), excludes=("published", "*", "none"))
    odd = [each.model_copy(update={"seconds": 40.0}) if at == 4 else each for at, each in enumerate(study)]
    path = tmp_path / "many.html"
    path.write_text(shown(SweepExplorer(odd)), encoding="utf-8")
    watched = visit()
    watched.page.goto(path.as_uri())
    explorer = Explorer(watched.page)
    assert explorer.lines == 4 and "Tick more above to add lines." in explorer.summary
    assert len({each.get_attribute("d") for each in explorer("path.dot").all()}) == 1, "one marker: one exclusion set"
    explorer.frame.get_by_label("all FP8").check()
    assert explorer.lines == 8
    assert len({each.get_attribute("d") for each in explorer("path.dot").all()}) == 2
    # a machine that was busy: the point is hollow, the line above says so, and the tooltip how far off it is
    explorer("#view").select_option("speed")
    assert explorer("path.dot.doubtful").count() == 1
    assert "1 hollow points" in explorer.summary and "the machine was busy" in explorer.summary
    explorer("path.dot.doubtful").hover()
    assert "not to be believed" in explorer.tip
    assert watched.complaints() == []


def test_hovering_a_point_shows_its_values(explorer):
    for name in ("int8", "int4", "all BF16"):
        explorer.frame.get_by_label(name).uncheck()
    assert explorer.tip == ""
    explorer("path.dot").nth(3).hover()
    there = row(depth=3)
    assert "published · unquantised cache" in explorer.tip
    assert f"depth 3: {there.acceptance_length:.2f} ± {length_error(there):.2f} tokens per round" in explorer.tip
    assert f"{there.accepted} of {there.drafted} drafts accepted in {there.rounds} rounds" in explorer.tip


def test_the_table_holds_the_same_numbers(explorer):
    explorer.frame.get_by_role("button", name="Table").click()
    assert explorer("#table").is_visible() and not explorer("#chart").is_visible()
    assert explorer("tbody tr").count() == 6 * 9
    chosen = explorer("tr.chosen").first.inner_text()
    there = row(depth=8)
    assert f"{there.acceptance_length:.2f} ± {length_error(there):.2f}" in chosen
    explorer.frame.get_by_label("int4").uncheck()
    assert explorer("tbody tr").count() == 4 * 9
    explorer.frame.get_by_role("button", name="Table").click()
    assert explorer.lines == 4 and explorer("#chart").is_visible()


def test_the_rows_can_be_taken_home(explorer, study, tmp_path):
    with explorer.page.expect_download() as started:
        explorer.frame.get_by_role("button", name="Download").click()
    started.value.save_as(tmp_path / "rows.json")
    taken = json.loads((tmp_path / "rows.json").read_text())
    assert started.value.suggested_filename == "rows.json"
    assert taken == [json.loads(each.to_json()) for each in study]


def test_everything_works_from_the_keyboard(explorer):
    keys = explorer.page.keyboard
    explorer.frame.get_by_label("published", exact=True).focus()
    keys.press("Space")
    assert explorer.lines == 3
    keys.press("Space")
    reached = []
    for _ in range(16):
        reached.append(explorer.frame.locator(":focus").evaluate("e => e.id || e.parentElement.innerText.trim()"))
        if reached[-1] == "download":
            break
        keys.press("Tab")
    for stop in ("int8", "view", "temperature", "domain", "depth", "chart", "toggle", "download"):
        assert stop in reached, f"Tab does not reach {stop}: {reached}"
    explorer("#depth").focus()
    keys.press("ArrowLeft")
    keys.press("ArrowLeft")
    assert explorer("#depth-value").inner_text() == "6" and "At depth 6" in explorer.summary
    explorer("#chart").focus()
    keys.press("ArrowRight")
    assert "depth 0: 1.00 tokens per round" in explorer.tip
    keys.press("ArrowRight")
    keys.press("ArrowRight")
    assert "published · unquantised cache" in explorer.tip and "depth 2" in explorer.tip
    before = explorer.tip
    keys.press("ArrowDown")
    assert explorer.tip != before and "depth 2" in explorer.tip
    keys.press("Escape")
    assert explorer.tip == ""
    explorer("#toggle").focus()
    keys.press("Enter")
    assert explorer("#table").is_visible()


def test_controls_and_pictures_have_names(explorer, report):
    for box in explorer("input, select, button").all():
        name = box.evaluate("e => (e.labels && e.labels[0] ? e.labels[0].innerText : e.innerText).trim()")
        assert name, box.evaluate("e => e.outerHTML")
    assert (
        explorer("#chart").get_attribute("aria-label") and explorer("#summary").get_attribute("aria-live") == "polite"
    )
    assert all(image.get_attribute("alt") for image in explorer.page.locator("img").all())
    assert explorer.page.locator("html").get_attribute("lang") == "en"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 800])
def test_the_page_fits_and_follows_the_scheme(visit, report, width, scheme):
    watched = visit(width=width, scheme=scheme)
    page = watched.page
    page.goto(report.as_uri())
    explorer = Explorer(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out sideways"
    assert explorer("body").evaluate("e => e.scrollWidth <= e.clientWidth && e.scrollHeight <= e.clientHeight + 1")

    def darkness(locator):
        colour = locator.evaluate("e => getComputedStyle(e).backgroundColor")
        return sum(int(part) for part in colour[4:-1].split(",")[:3])

    for body in (page.locator("body"), explorer("body")):
        assert (darkness(body) < 150) == (scheme == "dark")
    page.set_viewport_size({"width": width, "height": page.evaluate("document.documentElement.scrollHeight")})
    explorer("path.dot").first.wait_for()
    page.wait_for_function("() => true", polling="raf")
    screenshot(page, f"report-{width}-{scheme}")
    assert findings(page) == []
    assert watched.complaints() == []


def test_the_chart_has_its_size_on_paper_too(visit, report):
    """A frame below the fold is laid out late; what was drawn before it had a size must not be printed."""
    watched = visit(height=300)
    watched.page.goto(report.as_uri())
    frame = watched.page.frame_locator("iframe.mtplab-explorer")
    frame.locator("path.dot").first.wait_for(state="attached")
    assert watched.page.pdf().startswith(b"%PDF")
    assert frame.locator("#chart").evaluate("e => e.viewBox.baseVal.width") > 500
    assert watched.complaints() == []


def test_axe_finds_what_is_planted_in_the_page_and_in_its_frame(visit, report):
    watched = visit()
    page = watched.page
    page.goto(report.as_uri())
    page.evaluate("document.querySelector('main').insertAdjacentHTML('beforeend', '<button></button>')")
    page.frames[1].evaluate("document.querySelector('#toggle').textContent = ''")
    page.frames[1].evaluate("document.querySelector('#hint').style.color = '#999'")
    rules = [line.split(": ")[1] for line in findings(page)]
    assert rules == ["button-name", "button-name", "color-contrast"]


class Long:
    """A table that scrolls on a screen."""

    def _repr_html_(self):
        return html_table(["Row", "What"], [[number, "a cell"] for number in range(60)], "A long table", height="8em")


def test_on_paper_nothing_is_left_to_scroll(visit, study, bundled, tmp_path):
    path = tmp_path / "long.html"
    path.write_text(shown(Long(), mtplab.open_checkpoint(bundled).plan(), SweepExplorer(study)), encoding="utf-8")
    watched = visit(width=900)
    page = watched.page
    page.goto(path.as_uri())
    boxes = page.locator("main .html [role=region]")
    scrolls = "e => e.scrollHeight > e.clientHeight + 1"
    assert boxes.count() == 2 and all(box.evaluate(scrolls) for box in boxes.all())
    page.emulate_media(media="print")
    assert not any(box.evaluate(scrolls) for box in boxes.all())
    assert not page.get_by_role("navigation", name="Contents").is_visible()
    screenshot(page, "report-print")
    assert watched.complaints() == []


def test_contents_lead_to_their_sections(visit, report):
    watched = visit(height=500)
    watched.page.goto(report.as_uri())
    watched.page.get_by_role("navigation", name="Contents").get_by_text("Part 3").click()
    heading = watched.page.get_by_role("heading", name="Part 3")
    watched.page.wait_for_function("e => e.getBoundingClientRect().top < 500", arg=heading.element_handle())
    assert watched.complaints() == []


class Run:
    """What `RoundsView` reads."""

    tokens = ([0, 1, 2],)
    rounds = (type("Round", (), {"prompt": 0, "accepted": 1, "emitted": 2})(),)


def test_hostile_text_is_shown_and_not_obeyed(visit, tmp_path):
    study = [row(depth, exclude=HOSTILE, prompt_set=HOSTILE) for depth in range(3)]
    part = study[0].by_domain["letters"]
    study += [row(depth, by_domain={HOSTILE: part, "plain": part}) for depth in range(3)]
    text = shown(
        checkpoint_map(plan(module(f"model.layers.0.{HOSTILE}"))),
        SweepExplorer(study),
        RoundsView(Run, lambda ids: HOSTILE * len(ids), prompt=HOSTILE),
        Conclusion(study),
    )
    path = tmp_path / "hostile.html"
    path.write_text(text, encoding="utf-8")
    watched = visit()
    watched.page.goto(path.as_uri())
    explorer = Explorer(watched.page)
    assert explorer("#weights label").first.inner_text().startswith("</script><script>document.title")
    explorer("path.dot").nth(1).hover()  # at depth 0 all lines meet
    assert "<img src=x" in explorer.tip
    explorer.frame.get_by_label("Domain").select_option(index=1)
    explorer("#toggle").click()
    everything = watched.page.locator("body").inner_text() + explorer("body").inner_text()
    assert "\u202e" not in everything and "\x1b" not in everything
    assert watched.page.title() == "A report"
    assert explorer("img").count() == 0 and watched.page.locator("main img").count() == 1
    assert watched.complaints() == []


def test_a_script_that_is_not_the_explorers_cannot_run(visit, tmp_path):
    """Should some text slip through all escaping one day, the page's policy still stops it."""
    path = tmp_path / "slipped.html"
    text = shown(Conclusion([])).replace("</main>", "<script>document.title='broken'</script></main>")
    path.write_text(text, encoding="utf-8")
    watched = visit()
    watched.page.goto(path.as_uri())
    assert watched.page.title() == "A report"
    assert any("Content Security Policy" in said for said in watched.console)

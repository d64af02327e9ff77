"""The main notebook in a real JupyterLab: run all cells, drag the depth slider, tick a module, choose another cache,
run, cancel, run again."""

from __future__ import annotations

import time
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import expect

from tests.browser.conftest import screenshot
from tests.browser.lab import jupyter_lab

pytestmark = pytest.mark.browser

REPO = Path(__file__).resolve().parents[2]
NOTEBOOK = REPO / "notebooks" / "01_fp8_to_speculation.ipynb"
PATIENCE = 100_000  # ms; nothing waits that long when it works

# the panel's sweep waits at a gate that the test opens, so that Cancel meets a run that is surely under way
GATE = """
import time
from pathlib import Path

def gated(checkpoint, *, cancel, on_progress, **options):
    while not Path({gate!r}).exists() and not cancel.is_set():
        time.sleep(0.02)
    return mtplab.sweep(checkpoint, cancel=cancel, on_progress=on_progress, **options)

panel._sweep = gated
print("the gate stands")
"""


@pytest.fixture
def workplace(tmp_path):
    """A folder with a copy of the notebook that asks for little; (folder, gate file)."""
    folder, gate = tmp_path / "work", tmp_path / "open"
    folder.mkdir()
    book = nbformat.read(NOTEBOOK, as_version=4)
    for cell in book.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell.source += "\nprompts_per_domain, max_new_tokens, max_depth = 1, 8, 1"
            cell.source += f"\npolicies, exclusions, results = ['none'], ['published'], {str(tmp_path / 'results')!r}"
            for name in ("checkpoint", "original", "prompts"):
                cell.source += f"\n{name} = {str(REPO)!r} + '/' + {name}"
    book.cells.append(nbformat.v4.new_code_cell(GATE.format(gate=str(gate))))
    nbformat.write(book, folder / NOTEBOOK.name)
    return folder, gate


def settle(locator, still=1.0, timeout=30.0):
    """Scrolls to an element and waits until it has kept its place: a notebook moves while its outputs are laid out."""
    give_up = time.monotonic() + timeout
    since, place = time.monotonic(), None
    while time.monotonic() < give_up:
        locator.scroll_into_view_if_needed()
        now = locator.bounding_box()
        if now != place:
            since, place = time.monotonic(), now
        elif time.monotonic() - since > still:
            return
        time.sleep(0.05)
    raise AssertionError(f"the page does not come to rest: {place}")


def test_run_all_slide_run_cancel_and_run_again(workplace, visit, tmp_path):
    folder, gate = workplace
    watched = visit(offline=False)
    page = watched.page
    with jupyter_lab(folder, tmp_path / "state", REPO) as address:
        page.goto(address.format(path=NOTEBOOK.name))
        # the indicator says idle before there is a kernel; the status bar does not
        page.get_by_text("ipykernel) | Idle").wait_for(timeout=PATIENCE)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        page.get_by_text("the gate stands", exact=True).wait_for(timeout=PATIENCE)

        frame = page.frame_locator("iframe.mtplab-explorer")
        frame.locator("path.dot").first.wait_for(state="attached")
        assert frame.locator("path.series").count() == 1

        panel = page.locator(".jp-OutputArea-output", has_text="Draft depths")
        run = panel.locator("button.widget-button", has_text="Run sweep")
        cancel = panel.locator("button.widget-button", has_text="Cancel")
        run.scroll_into_view_if_needed()
        depths = panel.locator(".widget-hslider", has_text="Draft depths")
        expect(depths.locator(".widget-readout")).to_have_text("0 – 6")
        handle = depths.locator(".noUi-handle-upper")
        settle(handle)
        handle.hover()
        page.mouse.down()
        track = depths.locator(".noUi-target").bounding_box()
        page.mouse.move(track["x"] + track["width"] * 2 / 16, track["y"] + track["height"] / 2, steps=8)
        page.mouse.up()
        expect(depths.locator(".widget-readout")).to_have_text("0 – 2")
        # a module of the tree beside the preset that is ticked, and another cache
        assert panel.get_by_label("published", exact=True).is_checked()
        panel.get_by_title("open draft / mtp").click()
        panel.get_by_label("fc", exact=True).check()
        panel.get_by_text("1 of 39 linear modules kept out of FP8").wait_for()
        panel.get_by_label("Target KV cache").select_option("int8")
        screenshot(page, "lab-panel")

        assert cancel.is_disabled()
        run.click()
        # the gate is shut: the run is under way, and the kernel answers all the same
        expect(run).to_be_disabled()
        expect(cancel).to_be_enabled()
        cancel.click()
        panel.get_by_text("Cancelled after").wait_for()
        expect(run).to_be_enabled()
        expect(cancel).to_be_disabled()

        gate.touch()
        run.click()
        panel.get_by_text("Done in").wait_for(timeout=PATIENCE)
        figure = panel.locator(".widget-html img")
        figure.scroll_into_view_if_needed()
        assert figure.evaluate("e => e.naturalWidth") > 500
        assert "at depth 2" in figure.get_attribute("alt")
        table = panel.locator(".mtplab-table", has_text="by draft depth").first
        assert table.locator("tbody tr").count() == 2
        assert all(word in table.inner_text() for word in ("published", "mtp.fc", "int8"))
        screenshot(page, "lab-done")
        assert run.is_enabled()
    assert watched.errors == [] and watched.dialogs == [] and watched.outside == []

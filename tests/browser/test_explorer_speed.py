"""Every control of the explorer redraws in less than 100 ms in a real Chromium, of a usual and of a large study."""

from __future__ import annotations

import statistics

import pytest
from playwright.sync_api import expect

from mtplab.report import SweepExplorer
from tests.report_fakes import row, rows

pytestmark = [pytest.mark.browser, pytest.mark.serial]

LIMIT, MOVES = 100, 5  # milliseconds; moves of each control, of which the median counts

# Each control is moved as a user moves it, by an event, and the page is laid out before the clock is read.
MEASURE = """(moves) => {
  const took = {}, time = (name, act) => {
    const began = performance.now();
    act();
    document.body.getBoundingClientRect();
    document.getElementById("chart").getBoundingClientRect();
    document.getElementById("table").getBoundingClientRect();
    (took[name] ||= []).push(performance.now() - began);
  };
  const fire = (control, kind) => control.dispatchEvent(new Event(kind, { bubbles: true }));
  const every = () => {
    for (let move = 0; move < moves; move++) {
      document.querySelectorAll("#controls input[type=checkbox]").forEach((box, at) => {
        time(`box ${at}`, () => box.click());
        box.click();
      });
      for (const list of document.querySelectorAll("#controls select")) {
        if (list.options.length < 2) continue;
        const next = (list.selectedIndex + 1) % list.options.length;
        time(list.id, () => { list.selectedIndex = next; fire(list, "change"); });
      }
      const slider = document.getElementById("depth");
      time("depth", () => { slider.value = (+slider.value + 1) % (+slider.max + 1); fire(slider, "input"); });
    }
  };
  document.querySelectorAll("#controls input[type=checkbox]").forEach((box) => { if (!box.checked) box.click(); });
  every();
  for (let move = 0; move < moves; move++) time("toggle", () => document.getElementById("toggle").click());
  if (document.getElementById("table").hidden) document.getElementById("toggle").click();
  const chart = { ...took };
  for (const key of Object.keys(took)) delete took[key];
  every();
  return { chart, table: took };
}"""


def large():
    """20 settings × 17 depths × 10 domains."""
    excludes = [f"model.layers.{n}.*" for n in range(4)]
    found = []
    for exclude in excludes:
        for policy in ("none", "int8", "int4", "fp8_e4m3", "fp8_e5m2"):
            for depth in range(17):
                made = row(depth, policy, exclude)
                part = made.by_domain["letters"]
                found.append(made.model_copy(update={"by_domain": {f"domain {n}": part for n in range(10)}}))
    return found


def usual():
    return rows(depths=range(9), temperatures=(0.0, 0.7))


@pytest.mark.parametrize("study", [usual, large])
def test_every_control_redraws_at_once(visit, study, tmp_path):
    watched = visit()
    made = study()
    page = tmp_path / "explorer.html"
    page.write_text(SweepExplorer(made).document(), encoding="utf-8")
    watched.page.goto(page.as_uri())
    watched.page.locator("path.dot").first.wait_for()
    found = watched.page.evaluate(MEASURE, MOVES)
    at_one_temperature = len(made) // len({each.temperature for each in made})
    expect(watched.page.locator("tbody tr")).to_have_count(at_one_temperature)
    medians = {
        (kind, name): statistics.median(took) for kind, controls in found.items() for name, took in controls.items()
    }
    print({" ".join(name): round(value, 1) for name, value in medians.items()})
    for kind in ("chart", "table"):
        assert {"depth", "view", "domain", "box 0"} <= {name for each, name in medians if each == kind}
    assert {name: value for name, value in medians.items() if value >= LIMIT} == {}
    assert watched.complaints() == []

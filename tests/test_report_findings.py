"""What a page concludes: a list that can be read line by line, and nothing in it is markup."""

from __future__ import annotations

from mtplab.report import Conclusion, Finding, Findings
from tests.report_fakes import rows

HOSTILE = "<script>alert(1)</script>\x1b[31m"


def test_a_finding_is_a_line_its_cases_are_lines_below_it():
    cases = Finding("Caches at 8", "Cost", ("int8 −0.02", "int4 −0.30"), "The rest is state.")
    found = Findings(["First.", "", None, cases])
    assert found.sentences == ["First.", "Caches at 8: int8 −0.02; int4 −0.30. The rest is state."]
    assert repr(found) == " ".join(found.sentences)
    html = found._repr_html_()
    assert html.startswith('<ul class="finding"') and html.count("<li>") == 4 and "<br>" not in html
    assert "<li><b>Cost.</b> Caches at 8:<ul><li>int8 −0.02</li><li>int4 −0.30</li></ul><div>The rest is" in html
    assert Findings([])._repr_html_().count("<li>") == 1 and repr(Findings([], "None yet.")) == "None yet."


def test_numbers_keep_their_signs_and_nothing_is_obeyed():
    hostile = Finding(HOSTILE, HOSTILE, (HOSTILE,), HOSTILE)
    html = Findings([f"2.80 ± 0.13 of 73 × 32, 94 % {HOSTILE}", hostile])._repr_html_()
    assert "2.80\u00a0±\u00a00.13 of 73\u00a0×\u00a032, 94\u00a0% " in html
    assert "<script" not in html and "\x1b" not in html and html.count("&lt;script&gt;") == 5


def test_a_conclusion_is_one_finding_a_topic():
    said = Conclusion(rows(depths=range(5), policies=("none", "int8", "int4"), excludes=("published", "*")))
    topics = [each.topic for each in said.found]
    assert topics[:2] == ["Depth", "Time at batch 4"] and topics[-1] == "Reading ±"
    assert {"KV caches", "Exclusions"} < set(topics)
    caches = next(each for each in said.found if each.topic == "KV caches")
    assert [item.split()[0] for item in caches.items] == ["int8", "int4"]
    assert said._repr_html_().count("<b>") == len(topics)
    assert "<li>There are no finished rows yet.</li>" in Conclusion([])._repr_html_()

"""The explorer as a document: what it carries and that nothing in it can break out. tests/browser/ operates it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser

from mtplab.report.explorer import ROWS_MIME, SweepExplorer
from mtplab.study.row import ResultRow
from tests.report_fakes import row, rows

HOSTILE = "</script><script>alert(1)</script>' onload='alert(2)\" & \u202eabc"


class Document(HTMLParser):
    """Scripts and outside references of a page, read as a browser's parser would."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self._into = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self._into = (dict(attrs).get("type", ""), [])

    def handle_endtag(self, tag):
        if tag == "script" and self._into:
            self.scripts.append((self._into[0], "".join(self._into[1])))
            self._into = None

    def handle_data(self, data):
        if self._into:
            self._into[1].append(data)


def framed(explorer):
    """The document inside the frame, as the browser gets it from the attribute."""
    frame = Document(explorer._repr_html_())
    assert [tag for tag, _ in frame.tags] == ["iframe"]
    return frame.tags[0][1]


def test_the_frame_is_sandboxed_and_carries_the_page():
    explorer = SweepExplorer(rows())
    attributes = framed(explorer)
    assert attributes["sandbox"] == "allow-scripts allow-downloads" and attributes["title"]
    assert attributes["srcdoc"] == explorer.document()


def test_the_rows_come_back_from_the_page_exactly():
    study = rows(depths=range(4), policies=("none", "fp8_e4m3"))
    page = Document(SweepExplorer(study).document())
    data = json.loads(next(text for kind, text in page.scripts if kind == "application/json"))
    merged = [{**each, "provenance": merge(data["provenance"], each["provenance"])} for each in data["rows"]]
    plain = [{key: value for key, value in each.items() if key not in data["labels"]} for each in merged]
    assert [ResultRow.model_validate(each) for each in plain] == study
    assert SweepExplorer(study).rows == plain


def merge(shared, own):
    out = dict(shared)
    for key, value in own.items():
        out[key] = merge(shared[key], value) if isinstance(value, dict) and isinstance(shared.get(key), dict) else value
    return out


def test_what_all_rows_share_is_written_once():
    long = {"versions": {"torch": "2.13" * 50}}
    study = [row(depth, provenance=long) for depth in range(9)]
    assert SweepExplorer(study).document().count("2.13" * 50) == 1


def test_no_text_can_break_out():
    study = [row(exclude=HOSTILE, prompt_set=HOSTILE, by_domain={HOSTILE: row().by_domain["letters"].model_dump()})]
    explorer = SweepExplorer(study)
    attributes = framed(explorer)
    assert set(attributes) == {"class", "title", "sandbox", "style", "srcdoc"}
    page = Document(attributes["srcdoc"])
    assert [kind for kind, _ in page.scripts] == ["application/json", ""]
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert "\u202e" not in attributes["srcdoc"]
    assert json.loads(page.scripts[0][1])["rows"][0]["exclude_label"] == HOSTILE


def test_the_page_asks_for_nothing_and_lets_only_its_own_script_run():
    document = SweepExplorer(rows()).document()
    page = Document(document)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", document)
    assert not any({"src", "href"} & set(attrs) for _, attrs in page.tags)
    policy = next(attrs["content"] for tag, attrs in page.tags if "http-equiv" in attrs)
    digest = base64.b64encode(hashlib.sha256(page.scripts[1][1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert html.unescape(policy) == policy


def test_the_notebook_also_gets_text_and_rows():
    bundle = SweepExplorer(rows(policies=("none",), excludes=("published",)))._repr_mimebundle_()
    assert bundle["text/plain"] == "SweepExplorer(5 rows: 1 settings × 5 depths)"
    assert ResultRow.model_validate(bundle[ROWS_MIME]["rows"][2]) == row(depth=2)


def test_a_study_of_the_default_size_stays_small():
    study = rows(depths=range(9), policies=("none", "int8", "int4"), excludes=("published", "*", "none"))
    assert len(SweepExplorer(study)._repr_html_()) < 300_000


def test_no_rows_make_a_page_too():
    assert '"rows":[]' in SweepExplorer([]).document()

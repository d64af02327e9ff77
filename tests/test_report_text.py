"""Untrusted text, tables, conclusions and paths of the report."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from mtplab.errors import ConfigError
from mtplab.report import Conclusion, RoundsView, acceptance_table, plan_summary, resolve_path
from mtplab.report.conclusion import length_error
from mtplab.report.progress import Clock
from mtplab.report.rows import as_records
from mtplab.report.tables import html_table, plan_table
from mtplab.report.text import escape, human_bytes, json_island, plain
from mtplab.study.progress import duration
from tests.report_fakes import module, plan, row, rows

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202eabc\x1b[31m\x07"


class Tags(HTMLParser):
    """Every tag that a browser would open, and all text."""

    def __init__(self, text):
        super().__init__()
        self.opened, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.opened.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def inert(text):
    found = Tags(text)
    assert not {"script", "img"} & {tag for tag, _ in found.opened}
    assert not any(name.startswith("on") for _, attrs in found.opened for name in attrs)
    assert not set("\u202e\x1b\x07") & set(text)
    return found


def test_escape_shows_what_it_cannot_obey():
    assert inert(f"<p title='{escape(HOSTILE)}'>{escape(HOSTILE)}</p>").text.count("alert(1)") == 1
    assert plain("a\u202eb\x1b") == "a\\u202eb\\x1b"
    assert plain("tab\tand\nline") == "tab\tand\nline"


def test_json_island_survives_a_script_element():
    text = json_island({"name": HOSTILE, "nan": math.nan, "inf": [math.inf]})
    assert not set("<>&\u202e") & set(text)
    assert json.loads(text) == {"name": HOSTILE, "nan": None, "inf": [None]}


def test_tables_are_inert():
    inert(html_table((HOSTILE,), [(HOSTILE,)], HOSTILE))
    inert(plan_table([module(HOSTILE)], HOSTILE))
    inert(plan_summary(plan(module(HOSTILE))))
    inert(acceptance_table([row(exclude=HOSTILE), row(policy=HOSTILE, error=HOSTILE)]))


def test_acceptance_table_has_a_line_per_setting_and_a_column_per_depth():
    found = Tags(acceptance_table(rows(depths=(0, 2), policies=("none", "int8"), excludes=("published",))))
    heads = [tag for tag, _ in found.opened].count("th")
    assert heads == 4 and [tag for tag, _ in found.opened].count("tr") == 3
    assert f"{row(depth=2, policy='int8').acceptance_length:.2f}" in found.text


def test_a_long_plan_is_cut_and_says_so():
    assert "and 7 more" in plan_table([module(f"m{i}") for i in range(12)], limit=5)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (2_620_000, "2.62 MB"), (3.2e12, "3.2 TB"), (None, "–")],
)
def test_bytes_have_units(count, text):
    assert human_bytes(count) == text


def test_rows_come_from_models_dicts_and_results_alike():
    one = row()
    as_dict = json.loads(one.to_json())
    found = [as_records(given)[0] for given in ([one], [as_dict], SimpleNamespace(rows=[one]))]
    assert found[0] == found[1] == found[2]
    with pytest.raises(ConfigError, match=r"row 0 is a int without `depth`"):
        as_records([7])


def test_labels_tell_a_draft_that_differs_and_checkpoints_that_mix():
    study = [row(draft_quant_policy="none", policy="int8"), row(checkpoint="other", draft_exclude=["mtp.fc"])]
    first, second = as_records(study)
    assert first["policy_label"] == "int8 (draft none)"
    assert second["weights_label"] == "other as fp8: published (draft: mtp.fc)"


# conclusions


def test_conclusion_takes_its_numbers_from_the_rows():
    study = rows(depths=range(9), excludes=("published", "*"))
    said = repr(Conclusion(study))
    useful = row(depth=8)
    assert f"{row(depth=8).acceptance_length:.2f} tokens at depth 8" in said
    assert "Other KV caches at that depth: int8 −" in said and "for 53 % of the bytes a token" in said
    change = row(depth=8, policy="int4").acceptance_length - useful.acceptance_length
    assert f"{change:+.2f}".replace("-", "−") in said
    assert "everything in BF16 ±0.00 for 175 % of the weight bytes" in said


def test_conclusion_stops_where_a_draft_no_longer_pays():
    study = [row(depth=0), row(depth=1), row(depth=2)]
    flat = study[-1].model_dump(by_alias=True) | {"depth": 3, "acceptance_length": study[-1].acceptance_length + 0.01}
    said = repr(Conclusion([*study, flat]))
    assert f"{study[-1].acceptance_length:.2f} tokens at depth 2" in said and "adds less than 0.05" in said


def test_conclusion_says_when_chance_explains_a_difference():
    few = rows(depths=(0, 2), policies=("none", "int8"), excludes=("published",))
    assert "(within chance)" in repr(Conclusion(few))
    many = [row(depth, policy, rounds=100_000) for policy in ("none", "int4") for depth in (0, 2)]
    assert "chance" not in repr(Conclusion(many))
    assert repr(Conclusion(few)).count("Within chance:") == 1


def test_conclusion_of_nothing():
    failed = row(error="no", acceptance_length=None)
    for study in ([], [failed]):
        assert repr(Conclusion(study)) == "There are no finished rows yet."
    inert(Conclusion([row(depth=d, exclude=HOSTILE) for d in (0, 1)])._repr_html_())


def test_length_error_is_that_of_a_mean():
    """Against the plain formula on the drawn counts: a = 0, 1, 2 in 20, 30 and 50 of 100 rounds."""
    counts = [0] * 20 + [1] * 30 + [2] * 50
    mean = sum(counts) / 100
    expected = math.sqrt(sum((c - mean) ** 2 for c in counts) / 100 / 100)
    assert length_error({"per_position": [0.8, 0.5], "rounds": 100}) == pytest.approx(expected)
    assert math.isnan(length_error({"per_position": [], "rounds": 0}))


# rounds


def generation(tokens, records):
    rounds = [SimpleNamespace(prompt=p, accepted=a, emitted=e) for p, a, e in records]
    return SimpleNamespace(tokens=tokens, rounds=rounds)


def test_rounds_mark_accepted_drafts_and_the_tokens_between():
    run = generation([[0, 1, 2, 3, 4, 5], [9]], [(0, 2, 3), (1, 0, 1), (0, 1, 2)])
    view = RoundsView(run, lambda ids: "".join("abcdefghij"[i] for i in ids))
    assert view.kinds == ["target", "draft", "draft", "target", "draft", "target"]
    assert view.starts == [1, 4] and view.pieces == list("abcdef")
    assert "3 of 6 tokens" in view._repr_html_()


def test_rounds_join_characters_that_two_tokens_share():
    run = generation([[0, 1, 2]], [(0, 1, 2)])
    parts = [b"x", b"\xc3", b"\xa9"]
    view = RoundsView(run, lambda ids: b"".join(parts[i] for i in ids).decode(errors="replace"))
    assert view.pieces == ["x", "", "é"]


def test_rounds_are_inert():
    run = generation([[0, 1]], [(0, 1, 1)])
    inert(RoundsView(run, lambda ids: HOSTILE * len(ids), prompt=HOSTILE)._repr_html_())


# progress and paths


def test_time_to_go():
    clock = Clock()
    clock.start -= 10
    assert clock.to_go(0, 4) is None
    assert clock.to_go(1, 4) == pytest.approx(30, abs=0.5)
    assert clock.sentence(1, 4, "int8") == "1 of 4 · int8 · 10 s spent, 30 s to go"
    assert clock.sentence(1, 4, "", 65) == "1 of 4 · 10 s spent, 1 min 05 s to go"
    assert [duration(s) for s in (0.4, 125, 4320)] == ["0 s", "2 min 05 s", "1 h 12 min"]


def test_paths_mean_the_same_wherever_one_stands(repo, tmp_path, monkeypatch):
    for folder in (repo, repo / "notebooks"):
        monkeypatch.chdir(folder)
        assert resolve_path("data/prompts") == repo / "data" / "prompts"
        assert resolve_path("results/new", must_exist=False) == repo / "results" / "new"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert resolve_path("mine") == tmp_path / "mine"
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_path("nowhere/at/all")

"""Untrusted text, tables, conclusions and paths of the report."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from mtplab.errors import ConfigError
from mtplab.report import Conclusion, RoundsView, acceptance_table, plan_summary, resolve_path
from mtplab.report.conclusion import PAYS
from mtplab.report.plan_tables import plan_table
from mtplab.report.progress import Clock
from mtplab.report.rows import as_records
from mtplab.report.table import html_table
from mtplab.report.text import escape, human_bytes, json_island, plain
from mtplab.study.hint import faint_draft
from mtplab.study.interval import change_error, length_error
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
    [
        *[(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_700, "1,000 kB"), (2_620_000, "2.62 MB")],
        *[(3.2e12, "3.2 TB"), (None, "–")],
    ],
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
    assert first["policy_label"] == "int8 (draft unquantised)"
    assert second["weights_label"] == "other: published (draft: mtp.fc)"


# conclusions


def timed(found, slope=0.9):
    """The rows with seconds that follow the depth: a round costs 1 + slope · k times one at depth 0."""
    return [
        r.model_copy(
            update={"seconds": r.rounds * (1 + slope * r.depth) / 1000, "tokens_per_second": 1000.0 / (1 + r.depth)}
        )
        for r in found
    ]


def test_conclusion_takes_its_numbers_from_the_rows():
    study = rows(depths=range(9), excludes=("published", "*"))
    said = repr(Conclusion(study))
    base, other = row(depth=8), row(depth=8, policy="int4")
    error = change_error(other, base)[0]
    assert f"a round at depth 8 gives {base.acceptance_length:.2f} ± {length_error(base):.2f} tokens" in said
    assert "(4 prompts × 32 tokens, 200 rounds)" in said
    change = f"{other.acceptance_length - base.acceptance_length:+.2f}".replace("-", "−")
    share = "52 % of the KV bytes as deployed (57 % of all that 100 tokens hold)"
    assert f"int4 {change} ± {error:.2f} for {share}" in said
    assert "The rest is the recurrent state, 4.1 kB a sequence, which no policy touches." in said
    assert re.search(r"everything in BF16 \+0.00 ± 0.\d\d \(within chance\) for 175 % of the weight bytes", said)


def test_conclusion_weighs_tokens_against_time():
    """What a round gives over what it takes, at each depth: by hand from the rows."""
    length = {d: row(depth=d).acceptance_length for d in range(9)}
    dear = repr(Conclusion(timed(rows(depths=range(9), excludes=("published",)))))
    assert "a round at depth 8 takes 8.2 times as long as one at depth 0 (median of 3 settings): to break even" in dear
    assert f"to give as many tokens, and it gives {length[8]:.2f}. Speed against plain decoding" in dear
    assert f"(1000 tokens per second): {length[1] / 1.9:.2f} at 1" in dear and "Here no depth pays." in dear
    cheap = repr(Conclusion(timed(rows(depths=range(9), excludes=("published",)), 0.1)))
    speed = {d: length[d] / (1 + 0.1 * d) for d in length}
    fast = [str(d) for d in speed if speed[d] * PAYS > max(speed.values())]
    assert "0" not in fast and f"Here depth {' or '.join(fast)} pays most." in cheap


def test_conclusion_of_traces_speaks_of_no_time():
    ran = rows(depths=range(9), excludes=("published",))
    traced = [r.model_copy(update={"method": "trace", "seconds": None, "tokens_per_second": None}) for r in ran]
    said = repr(Conclusion(traced))
    assert "a round at depth 8 gives" in said
    assert not any(word in said for word in ("takes", "tokens per second", "pays", "busy"))


def test_conclusion_weighs_another_batch_with_the_same_acceptance():
    study = timed(rows(depths=range(5), excludes=("published",)))
    alone = [r.model_copy(update={"n_prompts": 1}) for r in timed(rows(depths=range(5), excludes=("published",)), 0.1)]
    said = repr(Conclusion(study, timed=alone))
    assert "at batch 4, a round at depth 4 takes 4.6 times" in said
    assert "at batch 1, a round at depth 4 takes 1.4 times" in said
    assert said.count(f"it gives {row(depth=4).acceptance_length:.2f}") == 2


def test_conclusion_says_which_timings_it_does_not_believe():
    study = timed(rows(depths=range(9), excludes=("published",)))
    before = Conclusion(study).sentences[1]
    study[12] = study[12].model_copy(update={"seconds": study[12].seconds * 25})
    found = Conclusion(study)
    assert found.sentences[1] == before
    assert "1 of 27 rows have seconds per round more than 3 times off" in repr(found)
    assert f"{as_records(study)[12]['series']}, depth {study[12].depth}: 2" in repr(found)


def test_conclusion_says_where_acceptance_no_longer_grows():
    study = [row(depth=d, rounds=100_000) for d in (0, 1, 2, 4)]
    assert "and still grows there (+" in repr(Conclusion(study))
    flat = study[-1].model_copy(update={"depth": 6})
    said = repr(Conclusion([*study, flat]))
    assert "; past depth 4 (" in said and "adds nothing beyond chance" in said


def test_conclusion_says_when_chance_explains_a_difference():
    few = rows(depths=(0, 2), policies=("none", "int8"), excludes=("published",))
    assert "(within chance)" in repr(Conclusion(few))
    many = [row(depth, policy, rounds=100_000) for policy in ("none", "int4") for depth in (0, 2)]
    assert "chance" not in repr(Conclusion(many))
    assert repr(Conclusion(few)).count("Within chance:") == 1


def test_conclusion_of_rows_without_counts_by_prompt_has_no_intervals():
    old = [r.model_copy(update={"by_domain": {}}) for r in rows(depths=(0, 2), excludes=("published",))]
    said = repr(Conclusion(old))
    assert "±" not in said and "chance" not in said and f"{row(depth=2).acceptance_length:.2f} tokens" in said


def test_conclusion_of_a_head_that_is_never_right_says_what_to_check():
    broken = [row(depth, rounds=1000).model_dump(by_alias=True) for depth in (0, 2)]
    broken[1]["per_position"] = [0.004, 0.0]
    said = repr(Conclusion(broken))
    assert said.startswith("The first draft was right in 0.4 % of 1000 rounds") and "compare_hidden" in said
    assert "first draft was right" not in repr(Conclusion(rows()))
    assert faint_draft([0.0], 49) == faint_draft([0.06], 5000) == faint_draft([], 100) == faint_draft([None], 0) == ""


def test_conclusion_of_nothing():
    failed = row(error="no", acceptance_length=None)
    for study in ([], [failed]):
        assert repr(Conclusion(study)) == "There are no finished rows yet."
    inert(Conclusion([row(depth=d, exclude=HOSTILE) for d in (0, 1)])._repr_html_())


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


def test_rows_that_lack_what_others_have_make_a_conclusion_all_the_same():
    """Files of rows come from anywhere: seconds without tokens per second, KL without top-1 agreement."""
    study = [each.model_copy(update={"tokens_per_second": None, "kl": 0.01, "perplexity": 8.0}) for each in rows()]
    said = repr(Conclusion(study))
    assert "Speed against plain decoding: " in said and "None" not in said
    assert "KL from the unquantised one: 0.0100 nats per token" in said


def _of(checkpoint, content, **changes):
    about = {"config": {"checkpoint": content}}
    return [row(depth, policy, checkpoint=checkpoint, provenance=about, **changes)
            for policy in ("none", "int4") for depth in (0, 2, 4)]  # fmt: skip


@pytest.mark.parametrize(
    "others",
    [
        _of("other", "full:2"),
        _of("tiny", "full:2"),
        _of("tiny", "full:1", max_new_tokens=64),
        _of("tiny", "full:1", prompt_set="mine"),
    ],
    ids=["checkpoint", "content", "tokens", "prompts"],
)
def test_a_conclusion_compares_within_one_checkpoint_and_set_of_prompts(others):
    """Exclusions and caches of the same names, of another checkpoint or other prompts, are not the reference's lines:
    what is said of depths and caches is what is said without them."""
    mine = _of("tiny", "full:1")
    worse = [r.model_copy(update={"acceptance_length": 1.0, "tokens": r.rounds}) for r in others if r.depth]
    for study in (mine + worse, [mine[0], *worse, *mine[1:]]):
        said = Conclusion(study).sentences
        assert f"{len(worse)} rows of another checkpoint, other prompts" in said[0]
        assert "compared within tiny, prompts, run; " in said[0]
        assert said[1:] == Conclusion(mine).sentences
    assert len({record["series"] for record in as_records(mine + others)}) == 4, "two lines each, drawn apart"
    reference = ("published", "4")
    assert Conclusion(mine + worse, reference).sentences[1:] == Conclusion(mine, reference).sentences


def test_what_else_tells_two_lines_apart_is_in_their_names():
    """A way of running that rows keep in their provenance: else both are one line with each point twice."""
    facts = [{"config": {"draft_hidden": stage, "draft_sampling": "greedy"}} for stage in ("post_norm", "pre_norm")]
    found = as_records([row(depth, provenance=about) for about in facts for depth in (1, 2)])
    assert {record["weights_label"] for record in found} == {
        "published · draft_hidden post_norm", "published · draft_hidden pre_norm"}  # fmt: skip
    drawn = {"config": {"draft_sampling": "sampled"}}
    mixed = as_records([row(provenance=facts[0]), row(temperature=1.0, provenance=drawn)])
    assert {record["weights_label"] for record in mixed} == {"published"}, "at temperature 0 nothing looks at it"

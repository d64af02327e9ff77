"""When a target counts as broken, and how that is said."""

from __future__ import annotations

import math

import pytest

from mtplab.report import Conclusion, acceptance_table
from mtplab.report.rows import as_records
from mtplab.study import SweepResult
from mtplab.study.soundness import faults, quality_cells, quality_notes, sentences
from tests.report_fakes import row

OWN, PROMPTS = "own:0123456789ab", "prompts:0123456789ab"


def judged(kl, depth=2, **changes):
    reference = changes.pop("reference_perplexity", 10.0)
    fields = {"kl": kl, "kl_error": kl / 10, "top1_agreement": 1 / (1 + kl), "perplexity": reference * math.exp(kl)}
    return row(depth, quality_text=OWN, reference_perplexity=reference, **{**fields, **changes})


def alone(perplexity, text=PROMPTS, **changes):
    return row(quality_text=text, perplexity=perplexity, quality_note="no unquantised reference: …", **changes)


@pytest.mark.parametrize(("kl", "is_broken"), [(0.0, False), (0.1, False), (0.405, False), (0.406, True), (9.0, True)])
def test_broken_is_perplexity_up_by_half(kl, is_broken):
    assert (faults([judged(kl)])[0] is not None) == is_broken


def test_without_a_reference_the_best_target_over_the_same_text_is_the_measure():
    rows = [alone(20.0), alone(29.9, policy="int8"), alone(30.1, policy="int4"), alone(90.0, text="prompts:ffff")]
    assert [fault is not None for fault in faults(rows)] == [False, False, True, False]
    assert "1.5 times that of the best target here" in faults(rows)[2]
    # another checkpoint's perplexity says nothing of this one's
    assert faults([alone(20.0), alone(90.0, checkpoint="other")]) == [None, None]
    assert faults([row(), alone(20.0)]) == [None, None]


def test_the_sentence_sets_the_acceptance_beside_a_sound_one():
    good = [judged(0.005, depth) for depth in (1, 2)]
    bad = [judged(1.0, depth, policy="int4") for depth in (1, 2)]
    (said,) = sentences([*good, *bad])
    lengths = [f"{one[1].acceptance_length:.2f}" for one in (bad, good)]
    assert "⚠ published · int4 cache: the target is broken (KL of 1.00 nats per token" in said
    assert "perplexity 2.7 times as high" in said and "top-1 agreement 50.0 %" in said
    assert f"at depth 2, {lengths[0]} ({lengths[1]} with published · unquantised cache)" in said
    assert sentences(good) == [] and "broken" not in " ".join(quality_notes(good))
    many = [judged(1.0, exclude=f"set {at}") for at in range(5)]
    assert len(sentences(many)) == 4 and "2 more broken targets" in sentences(many)[-1]


def test_every_view_marks_it_and_only_it():
    rows = [judged(0.005), judged(1.0, policy="int4")]
    marks = [
        [cells[0].startswith("⚠") for cells in quality_cells(rows)],
        [r["target_fault"] is not None for r in as_records(rows)],
    ]
    assert marks == [[False, True]] * 2
    assert quality_cells(rows)[0] == ("0.00500 ±0.00050", "99.5 %", "10.1 ×1.005")
    table = SweepResult(rows).to_table()
    lines = {line.split("  ")[1].strip(): line for line in table.splitlines() if line.startswith("published")}
    assert ["⚠" in lines[name] for name in ("unquantised", "int4")] == [False, True]
    for page in (SweepResult(rows)._repr_html_(), acceptance_table(rows)):
        assert page.replace("<br>±", " ±").count("⚠ 1.00 ±0.10") == 1  # beside its number, or below it
        assert "the target is broken" in page and ">top-1<" in page
    said = " ".join(Conclusion(rows).sentences)
    assert said.startswith("⚠ published · int4 cache: the target is broken")
    assert "0.00500 ± 0.00050 nats per token" in said


def test_what_was_not_judged_has_no_columns_and_a_domain_has_none():
    assert quality_cells([row()]) is None and "perplexity" not in SweepResult([row()]).to_table()
    by_domain = SweepResult([judged(1.0)]).to_table(by_domain=True)
    assert "top-1  " not in by_domain.splitlines()[2] and "the target is broken" in by_domain
    assert "are over what" in SweepResult([judged(1.0)]).to_table() and "are over what" not in by_domain
    failed = row(error="no such kernel")
    assert quality_notes([failed]) == [] and faults([failed]) == [None]


def test_missing_numbers_say_why_and_texts_are_not_mixed_up():
    rows = [alone(20.0), judged(0.005, policy="int4")]
    notes = quality_notes(rows)
    assert "no unquantised reference: …" in notes
    assert "over the prompts or what the unquantised target writes" in notes[-1] and "do not compare" in notes[-1]
    assert quality_cells(rows)[0] == ("–", "–", "20.0")


def test_checkpoints_of_one_study_are_told_apart():
    rows = [judged(0.005, checkpoint="good"), judged(1.0, checkpoint="bad")]
    (said,) = sentences(rows)
    assert "⚠ bad: published" in said and "with good: published" in said
    lines = SweepResult(rows).to_table().splitlines()
    assert lines[2].split()[0] == "checkpoint" and [line.split()[0] for line in lines[4:6]] == ["good", "bad"]
    assert lines[0].startswith("acceptance length by depth · temperature 0")
    assert "checkpoint" not in SweepResult(rows[:1]).to_table()

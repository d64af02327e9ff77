"""Rows and the counts behind them: definitions, strictness, exact round trip."""

from __future__ import annotations

import json
import math
import random

import pytest
from pydantic import ValidationError

from mtplab.decode import AcceptanceStats
from mtplab.errors import ConfigError
from mtplab.study import DomainStats, ResultRow
from mtplab.study.row import counts_of

SETTINGS = {
    "point": "ab" * 32,
    "method": "run",
    "checkpoint": "tiny",
    "depth": 2,
    "temperature": 0.7,
    "top_k": 0,
    "top_p": 0.9,
    "seed": 1,
    "quant_policy": "int8",
    "draft_quant_policy": "none",
    "exclude_label": "mtp.*",
    "exclude": ["mtp.*"],
    "draft_exclude": None,
    "model_format": "fp8",
    "prompt_set": "bundled",
    "n_prompts": 3,
    "max_new_tokens": 16,
}


STATS = AcceptanceStats(2, rounds=10, drafted=20, accepted=12, emitted=22, accepted_per_position=(8, 4))


def a_row(**changes) -> ResultRow:
    numbers = {**counts_of(STATS), "conditional": STATS.conditional}
    return ResultRow(**{**SETTINGS, **numbers, **changes})


def test_a_row_without_rounds_has_no_shares():
    """Nothing to divide by: null in JSON, never 0, in the row and in its domains."""
    none = AcceptanceStats(2, 0, 0, 0, 0, (0, 0))
    part = DomainStats.of([none])
    row = a_row(**counts_of(none), conditional=none.conditional, by_domain={"given": part})
    assert ResultRow.from_json(row.to_json()) == row
    written = json.loads(row.to_json())
    for found in (written, written["by_domain"]["given"]):
        assert (found["rounds"], found["acceptance_length"], found["per_position"]) == (0, None, [None, None])
    for wrong in ({"per_position": [0.0, 0.0]}, {"acceptance_length": 0.0}):
        with pytest.raises(ConfigError, match="0 rounds"):
            ResultRow.from_json(json.dumps({**written, **wrong}))


def test_round_trip_is_exact():
    draw = random.Random(4)
    for _ in range(300):
        rounds = draw.randint(1, 10**6)
        tokens = draw.uniform(rounds, 3 * rounds) if draw.random() < 0.5 else draw.randint(rounds, 3 * rounds)
        row = a_row(
            rounds=rounds,
            tokens=tokens,
            acceptance_length=tokens / rounds,
            per_position=[draw.random(), draw.random() * 1e-300],
            kl=draw.lognormvariate(0, 40),
            temperature=math.ulp(draw.random()),
            seconds=draw.random(),
            provenance={"commit": None, "threads": 2, "cpu": "ümlaut\x1b", "list": [1, 2.5]},
        )
        again = ResultRow.from_json(row.to_json())
        assert again == row
        assert type(again.tokens) is type(row.tokens)
        assert again.to_json() == row.to_json()


def test_json_carries_the_schema():
    assert json.loads(a_row().to_json())["schema"] == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 4}, "schema"),
        ({"depth": "2"}, "depth"),
        ({"depth": 17}, "depth"),
        ({"method": "guess"}, "method"),
        ({"kl": "NaN"}, "kl"),
        ({"surprise": 1}, "surprise"),
        ({"per_position": [0.8]}, "per_position has 1"),
        ({"acceptance_length": 2.3}, "acceptance_length is 2.3, but there are 22 tokens in 10 rounds"),
        ({"per_position": [0.8, None]}, "per_position is .*10 rounds"),
        ({"tokens": None}, "needs tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_a_row_is_refused(change, says):
    text = json.dumps({**json.loads(a_row().to_json()), **change})
    with pytest.raises(ConfigError, match=says):
        ResultRow.from_json(text)


def test_frozen():
    with pytest.raises(ValidationError):
        a_row().depth = 3


def test_an_error_row_needs_no_numbers():
    row = ResultRow(**SETTINGS, error="no such kernel")
    assert row.acceptance_length is None
    assert ResultRow.from_json(row.to_json()) == row


def test_labels_are_all_that_relabelling_changes():
    row = a_row()
    assert row.relabelled(exclude_label="x").model_dump() == {**row.model_dump(), "exclude_label": "x"}
    with pytest.raises(AssertionError):
        row.relabelled(depth=1)


def test_counts_of_each_prompt_stand_in_their_domain():
    parts = [AcceptanceStats(2, r, 2 * r, a, r + a, (a, 0)) for r, a in ((10, 4), (3, 2))]
    found = DomainStats.of(parts)
    assert (found.prompt_rounds, found.prompt_tokens, found.prompt_accepted) == ([10, 3], [14, 5], [4, 2])
    assert (found.rounds, found.tokens, found.accepted) == (13, 19, 6)
    written = json.loads(a_row(by_domain={"given": found}).to_json())
    assert ResultRow.from_json(json.dumps(written)).by_domain["given"] == found
    for name, wrong in (("prompt_rounds", [10, 4]), ("prompt_tokens", [19]), ("prompt_accepted", [])):
        changed = {**written["by_domain"]["given"], name: wrong}
        with pytest.raises(ConfigError, match=f"{name} has {len(wrong)} counts"):
            ResultRow.from_json(json.dumps({**written, "by_domain": {"given": changed}}))


def test_a_row_from_before_prompts_were_counted_still_reads():
    part = {key: value for key, value in dict(DomainStats.of([STATS])).items() if not key.startswith("prompt_")}
    row = ResultRow.from_json(json.dumps({**json.loads(a_row().to_json()), "by_domain": {"given": part}}))
    assert row.by_domain["given"].prompt_rounds == []


def test_a_row_from_before_targets_were_judged_still_reads():
    """As schema 1 wrote it: three fields of quality, none of them ever measured."""
    written = json.loads(a_row().to_json())
    for name in ("kl_error", "reference_perplexity", "quality_text", "quality_note"):
        del written[name]
    old = ResultRow.from_json(json.dumps({**written, "schema": 1}))
    assert (old.kl, old.quality_text, old.schema_version) == (None, None, 1)
    judged = old.with_quality({"kl": 0.5, "quality_text": "own:1"}, {"key": "k"})
    assert (judged.kl, judged.schema_version, judged.provenance["quality"]) == (0.5, 3, {"key": "k"})
    assert ResultRow.from_json(judged.to_json()) == judged
    assert judged.without_quality().model_dump() == {**old.model_dump(), "schema_version": 3}

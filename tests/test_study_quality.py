"""Targets judged beside acceptance: the numbers, who shares them, what is kept, what a broken target looks like."""

from __future__ import annotations

import json
import math
import shutil
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from mtplab.checkpoint import open_checkpoint
from mtplab.errors import ConfigError
from mtplab.models import load_model
from mtplab.report import Conclusion
from mtplab.study import quality as measuring
from mtplab.study import read_rows, sweep, target_quality
from mtplab.study.row import QUALITY_FIELDS
from mtplab.study.soundness import faults

PROMPTS = ["Once upon a time there was", "def add(a, b):\n    return"]
SETTINGS = {"prompts": PROMPTS, "max_new_tokens": 12, "depths": (0, 2)}


def told(rows):
    return [tuple(getattr(row, name) for name in QUALITY_FIELDS) for row in rows]


def files(folder, kind="quality"):
    return sorted(path.name for path in (folder / kind).glob("*.json"))


@pytest.fixture
def counted(monkeypatch):
    """How often a reference wrote texts and read them, and how often a target was judged."""
    calls = {"own_texts": 0, "read": 0, "quality": 0}

    def counting(name):
        real = getattr(measuring, name)

        def call(*arguments, **settings):
            calls[name] += 1
            return real(*arguments, **settings)

        return call

    for name in calls:
        monkeypatch.setattr(measuring, name, counting(name))
    return calls


def test_rows_hold_what_quality_measures(bundled, tmp_path):
    """Against `mtplab.study.quality` called by hand, for a run and a trace."""
    reference, quantised = load_model(bundled), load_model(bundled, exclude="published", model_format="fp8")
    texts = measuring.own_texts(reference, PROMPTS, 12, seed=0)
    skip = [len(reference.encode(prompt)) - 1 for prompt in PROMPTS]
    for method in ("run", "trace"):
        settings = {"exclude": (None, "published"), "quant_policy": ("none", "int4"), "method": method, **SETTINGS}
        found = sweep(bundled, results=tmp_path / method, **{**settings, "depths": (1,)})
        for row in found:
            target = quantised if row.exclude_label == "published" else reference
            mine = measuring.quality(target, texts, reference, quant_policy=row.quant_policy, skip=skip, exact=True)
            assert (row.kl, row.kl_error) == (mine.mean_kl, mine.kl_interval())
            assert (row.top1_agreement, row.perplexity) == (mine.top1_agreement, mine.perplexity)
            assert row.reference_perplexity == mine.reference_perplexity
            assert row.quality_text.startswith("own:") and row.quality_note is None
            assert row.provenance["quality"]["tokens"] == 24
        first = found.rows[0]
        assert (first.kl, first.top1_agreement, first.perplexity) == (0.0, 1.0, first.reference_perplexity)
        assert all(row.kl > 0 for row in found.rows[1:])
    assert told(read_rows(tmp_path / "run")) and len({row.quality_text for row in read_rows(tmp_path / "run")}) == 1


def test_what_does_not_change_the_target_is_not_measured_again(bundled, tmp_path, counted):
    settings = {**SETTINGS, "results": tmp_path, "exclude": "published", "quant_policy": ("none", "int8")}
    drafts = {"draft_exclude": ("published", "none"), "draft_quant_policy": ("none", "int4"), "temperature": (0, 0.7)}
    found = sweep(bundled, **settings, **drafts)
    assert len({row.point for row in found}) == 16 and not found.failed
    assert counted == {"own_texts": 1, "read": 1, "quality": 2}
    assert len(files(tmp_path)) == 2 and len(files(tmp_path, "texts")) == 1
    assert len(set(told(found))) == 2
    # neither do a deeper depth and another seed
    sweep(bundled, **{**settings, "depths": (3,)}, temperature=0.7, seed=5)
    assert counted["quality"] == 2
    # another text does, and so does another target
    sweep(bundled, **{**settings, "max_new_tokens": 13, "quant_policy": "none"})
    sweep(bundled, **{**settings, "exclude": "none", "quant_policy": "none"})
    assert counted["quality"] == 4 and len(files(tmp_path, "texts")) == 2


def test_a_stored_fp8_checkpoint_needs_a_reference(bundled, bundled_fp8, tmp_path):
    settings = {**SETTINGS, "results": tmp_path, "quant_policy": ("none", "int4")}
    alone = sweep(bundled_fp8, **settings)
    model = load_model(bundled_fp8)
    for row in alone:
        mine = measuring.quality(model, PROMPTS, quant_policy=row.quant_policy, exact=True)
        assert (row.kl, row.kl_error, row.top1_agreement, row.reference_perplexity) == (None,) * 4
        assert row.perplexity == mine.perplexity and row.quality_text.startswith("prompts:")
        assert "no unquantised reference: give the BF16 checkpoint (--reference PATH" in row.quality_note
    assert alone.rows[0].quality_note in alone.to_table() and "over the prompts" in alone.to_table()
    beside = sweep(bundled_fp8, reference=bundled, **settings)
    assert (beside.computed, beside.reused, beside.judged) == (0, 4, 4), "acceptance is not computed again"
    texts = measuring.own_texts(load_model(bundled), PROMPTS, 12, seed=0)
    skip = [len(model.encode(prompt)) - 1 for prompt in PROMPTS]
    mine = measuring.quality(model, texts, load_model(bundled), quant_policy="int4", skip=skip, exact=True)
    assert (beside.rows[-1].kl, beside.rows[-1].perplexity) == (mine.mean_kl, mine.perplexity)
    assert told(read_rows(tmp_path)) != told(alone)
    # and back: each is what was asked for, from what is kept
    assert told(sweep(bundled_fp8, **settings)) == told(alone)
    assert told(sweep(bundled_fp8, reference=load_model(bundled), **settings)) == told(beside)


def test_a_bf16_checkpoint_can_be_held_against_another(bundled, tmp_path):
    """The reference given is the one taken, also where the swept checkpoint could be its own."""
    other = broken(bundled, tmp_path / "other")
    own, given = (
        sweep(other, results=tmp_path / "r", reference=reference, **SETTINGS).rows[0] for reference in (None, bundled)
    )
    assert own.kl == 0 and given.kl > 0.4


@pytest.mark.parametrize("what", ["quantised", "another", "no", "off"])
def test_what_is_no_reference_is_refused(bundled, bundled_fp8, tmp_path, what):
    from tests.tiny import write_tiny

    if what == "another":
        write_tiny(tmp_path / "tiny")
    asked, says = {
        "quantised": ({"reference": bundled_fp8}, "is quantised; expected the checkpoint in BF16"),
        "another": ({"reference": tmp_path / "tiny"}, "has vocab_size .* expected the same model"),
        "no": ({"reference": 3}, "the reference is a int; expected a checkpoint's folder"),
        "off": ({"reference": bundled, "quality": False}, "quality is False and a reference is given"),
    }[what]
    with pytest.raises(ConfigError, match=says):
        sweep(bundled_fp8, results=tmp_path / "r", **SETTINGS, **asked)
    assert not (tmp_path / "r").exists()


def test_left_out_it_costs_nothing_and_shows_nothing(bundled, tmp_path, counted):
    plain = sweep(bundled, results=tmp_path, quality=False, **SETTINGS)
    assert counted == {"own_texts": 0, "read": 0, "quality": 0} and not (tmp_path / "quality").exists()
    assert "perplexity" not in plain.to_table() and "perplexity" not in plain._repr_html_()
    judged = sweep(bundled, results=tmp_path, **SETTINGS)
    assert (judged.computed, judged.reused) == (0, 2) and judged.rows[0].kl == 0.0
    assert "read back 2 (of 2 of them the target's quality was not there, and was measured)" in judged.summary()
    assert sweep(bundled, results=tmp_path, quality=False, **SETTINGS).rows[0].kl is None


def test_results_of_an_older_mtplab_are_read_and_completed(bundled, tmp_path):
    """Files of schema 1 as they were written: nothing of them is computed again, and nothing is lost."""
    made = sweep(bundled, results=tmp_path, **SETTINGS)
    for path in tmp_path.glob("*.json"):
        content = json.loads(path.read_bytes())
        content["schema"] = 1
        for row in content["rows"]:
            row["schema"] = 1
            for name in ("kl_error", "reference_perplexity", "quality_text", "quality_note"):
                del row[name]
            row |= {"kl": None, "top1_agreement": None, "perplexity": None}
            del row["provenance"]["quality"]
        path.write_text(json.dumps(content))
    shutil.rmtree(tmp_path / "quality")
    old = read_rows(tmp_path)
    assert [row.schema_version for row in old] == [1, 1] and {row.kl for row in old} == {None}
    assert [row.schema_version for row in sweep(bundled, results=tmp_path, quality=False, **SETTINGS)] == [1, 1]
    again = sweep(bundled, results=tmp_path, **SETTINGS)
    assert (again.computed, again.reused) == (0, 2)
    untold = {"provenance"}
    assert [row.model_dump(exclude=untold) for row in again] == [row.model_dump(exclude=untold) for row in made]
    assert told(read_rows(tmp_path)) == told(made)


@pytest.mark.parametrize("content", [b"", b"{", b'{"quality_schema": 1}', b"[]"])
def test_a_spoilt_file_is_measured_again(bundled, tmp_path, content):
    made = sweep(bundled, results=tmp_path, **SETTINGS)
    for kind in ("quality", "texts"):
        (path,) = (tmp_path / kind).glob("*.json")
        path.write_bytes(content)
        path.with_name(f".{path.name}.tmp").write_bytes(b"half of wha")
    for path in tmp_path.glob("*.json"):
        path.unlink()
    assert told(sweep(bundled, results=tmp_path, **SETTINGS)) == told(made)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_reference_that_is_too_large_to_keep_is_read_beside_each_target(bundled, tmp_path, counted, monkeypatch):
    settings = {**SETTINGS, "exclude": ("published", None), "quant_policy": ("none", "int8")}
    kept = sweep(bundled, results=tmp_path / "kept", **settings)
    assert counted == {"own_texts": 1, "read": 1, "quality": 4}
    monkeypatch.setattr(target_quality, "KEPT_BYTES", 1000)
    assert told(sweep(bundled, results=tmp_path / "streamed", **settings)) == told(kept)
    assert counted == {"own_texts": 2, "read": 1, "quality": 8}


def test_what_is_kept_of_references_is_bounded(bundled, tmp_path, counted, monkeypatch):
    """Two prompt sets of which one fits: the one used last stays, and the numbers are the same."""
    vocabulary = open_checkpoint(bundled).config["vocab_size"]
    sets = {"one": PROMPTS[:1], "two": PROMPTS[1:]}
    settings = {**SETTINGS, "prompts": sets, "quant_policy": ("none", "int8"), "temperature": (0, 0.5)}
    free = sweep(bundled, results=tmp_path / "free", **settings)
    monkeypatch.setattr(target_quality, "KEPT_BYTES", 30 * vocabulary * 4)
    meters = []
    real = target_quality.QualityMeter.of

    def watched(meter, *arguments):
        found = real(meter, *arguments)
        meters.append(sum(one.nbytes for one in meter._read.values()))
        return found

    monkeypatch.setattr(target_quality.QualityMeter, "of", watched)
    assert told(sweep(bundled, results=tmp_path / "bound", **settings)) == told(free)
    assert 0 < max(meters) <= 30 * vocabulary * 4


def test_what_cannot_be_measured_says_so_and_is_tried_again(bundled, tmp_path, monkeypatch):
    def fails(*arguments, **settings):
        raise RuntimeError("no more memory")

    with monkeypatch.context() as patch:
        patch.setattr(measuring, "quality", fails)
        found = sweep(bundled, results=tmp_path, **SETTINGS)
    assert not found.failed and found.rows[1].acceptance_length > 1
    note = "the target's quality could not be measured: RuntimeError: no more memory"
    assert {row.quality_note for row in found} == {note} and note in found.to_table()
    again = sweep(bundled, results=tmp_path, **SETTINGS)
    assert (again.reused, again.rows[0].kl, again.rows[0].quality_note) == (2, 0.0, None)
    # a failure does not take the place of what is there
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "quality", fails)
        other = sweep(bundled, results=tmp_path, reference=broken(bundled, tmp_path / "other"), **SETTINGS)
    assert other.rows[0].quality_note == note and told(read_rows(tmp_path)) == told(again)


def test_numbers_that_are_none_are_broken(bundled, tmp_path, monkeypatch):
    real = measuring.quality

    def poisoned(*arguments, **settings):
        found = real(*arguments, **settings)
        found.nll[3] = found.kl[3] = math.nan
        return found

    monkeypatch.setattr(measuring, "quality", poisoned)
    found = sweep(bundled, results=tmp_path, **SETTINGS)
    assert (found.rows[0].kl, found.rows[0].perplexity, found.failed) == (None, None, [])
    assert "not finite numbers" in found.rows[0].quality_note and faults(found)[0] == "no finite probabilities"


def test_a_cancel_stops_it_between_two_texts(bundled, tmp_path, monkeypatch):
    cancel, real = threading.Event(), measuring._until

    def stopping(given, parts):
        for number, part in enumerate(real(given, parts)):
            if number == 1:
                cancel.set()
            yield part

    with monkeypatch.context() as patch:
        patch.setattr(measuring, "_until", stopping)
        found = sweep(bundled, results=tmp_path, cancel=cancel, **SETTINGS)
    assert (found.cancelled, len(found), found.failed) == (True, 0, []) and not files(tmp_path)
    assert sweep(bundled, results=tmp_path, **SETTINGS).rows[0].kl == 0.0


def test_a_pools_worker_measures_the_same_and_takes_no_model_for_another(bundled, tmp_path):
    """It keeps a model and what a reference said from one sweep to the next: here of other weights, all else alike."""
    settings = {**SETTINGS, "depths": (1,), "max_new_tokens": 6}
    other = broken(bundled, tmp_path / "other")
    untold = {"provenance"}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for number, (path, reference) in enumerate([(bundled, None), (other, bundled)]):
            here, there = (
                sweep(path, results=tmp_path / f"{number}-{name}", reference=reference, executor=executor, **settings)
                for name, executor in (("here", None), ("there", pool))
            )
            dumps = [[row.model_dump(exclude=untold) for row in found] for found in (here, there)]
            assert dumps[0] == dumps[1] and (here.rows[0].kl == 0) == (reference is None)
            assert files(tmp_path / f"{number}-there") == files(tmp_path / f"{number}-here")


def test_a_folder_that_can_only_be_read_gives_its_rows(bundled, tmp_path, monkeypatch):
    sweep(bundled, results=tmp_path, quality=False, **SETTINGS)
    monkeypatch.setattr("mtplab.study.store.PointStore.writable", lambda store: False)
    found = sweep(bundled, results=tmp_path, **SETTINGS)
    assert found.reused == 2 and "cannot be written" in found.rows[0].quality_note


def broken(checkpoint, folder):
    """The same checkpoint whose shared head gives tokens 128 to 255 three times their logits, as if the scale of their
    block were lost: it goes on saying the same few words, which its draft, with the same head, guesses easily."""
    shutil.copytree(checkpoint, folder)
    info = open_checkpoint(folder).tensors["model.embed_tokens.weight"]
    raw = bytearray(info.file.read_bytes())
    values = torch.frombuffer(raw[info.start : info.end], dtype=torch.bfloat16).view(info.shape).clone()
    values[128:256] *= 3
    raw[info.start : info.end] = values.view(torch.uint8).numpy().tobytes()
    info.file.write_bytes(raw)
    return folder


def test_high_acceptance_over_a_broken_target_is_marked(bundled, bundled_fp8, tmp_path):
    """Acceptance alone prefers the broken model; beside it stands why nobody should."""
    settings = {"limit": 3, "depths": (0, 4), "max_new_tokens": 32, "reference": bundled}
    good = sweep(bundled_fp8, results=tmp_path / "good", **settings)
    bad = sweep(broken(bundled_fp8, tmp_path / "bad"), results=tmp_path / "r", **settings)
    assert bad.rows[1].acceptance_length > good.rows[1].acceptance_length
    assert bad.rows[1].kl > 1 and bad.rows[1].top1_agreement < 0.6
    assert bad.rows[1].perplexity > 4 * bad.rows[1].reference_perplexity
    assert faults(good) == [None, None] and None not in faults(bad)
    both = good + bad
    line = next(line for line in both.to_table().splitlines() if line.startswith("bad ") and "⚠" in line)
    assert f"⚠ {bad.rows[1].kl:.2f} ±" in line and f"{bad.rows[1].acceptance_length:.2f}" in line
    lengths = [f"{row.acceptance_length:.2f}" for row in (bad.rows[1], good.rows[1])]
    says = f"Its acceptance length at depth 4, {lengths[0]} ({lengths[1]} with "
    for text in (both.to_table(), both._repr_html_(), " ".join(Conclusion(both).sentences)):
        assert "the target is broken (KL of" in text and says in text and "ln 1.5 = 0.405 nats" in text
    assert "⚠" not in good.to_table() and "broken" not in " ".join(Conclusion(good).sentences)


def test_a_calibrated_caches_scales_are_those_of_the_sweeps_texts(bundled, tmp_path):
    settings = {**SETTINGS, "results": tmp_path, "quant_policy": "fp8_e4m3:calibrated"}
    one, other = (sweep(bundled, calibration=texts, **settings).rows[0] for texts in (PROMPTS[:1], PROMPTS[1:]))
    reference = load_model(bundled)
    texts = measuring.own_texts(reference, PROMPTS, 12, seed=0)
    skip = [len(reference.encode(prompt)) - 1 for prompt in PROMPTS]
    by_hand = {"quant_policy": one.quant_policy, "skip": skip, "exact": True, "calibration": PROMPTS[1:]}
    assert other.kl == measuring.quality(reference, texts, reference, **by_hand).mean_kl
    assert len(files(tmp_path)) == 2 and len(files(tmp_path, "texts")) == 1 and one.quality_text == other.quality_text

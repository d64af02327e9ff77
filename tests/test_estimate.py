"""Estimates by gradients: what finite differences and enumeration give where there are those, and near measurement."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import mtplab
from mtplab.checkpoint.planted import plant
from mtplab.cli import main
from mtplab.decode.reading import read_texts
from mtplab.errors import ConfigError
from mtplab.models.probed import probed
from mtplab.models.variant import exchanged
from mtplab.quant.linear import LinearWeight, PackedLinear
from mtplab.quant.policy import resolve_policy
from mtplab.report import estimate_table, sensitivity_table
from mtplab.study.draft_divergence import draft_divergence
from mtplab.study.estimate import Estimate, estimate_texts, estimated, fisher_vector
from mtplab.study.estimate_check import check_estimates
from mtplab.study.estimate_ranking import check_together
from mtplab.study.exclusion_meter import ExclusionMeter
from mtplab.study.quality import quality
from mtplab.study.sensitivity import Sensitivity, SensitivityRow
from mtplab.study.text_batches import text_batches
from tests.tiny import write_tiny

# ragged, and one longer than a chunk of the delta rule
TEXTS = [
    np.random.default_rng(seed).integers(0, 16, size).tolist() for seed, size in enumerate((9, 21, 12, 15))
]  # fmt: skip
SKIPS = [2, 3, 0, 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return mtplab.load_model(write_tiny(tmp_path_factory.mktemp("tiny") / "bf16"))


@pytest.fixture(scope="module")
def coarse(model):
    """All in FP8, inputs as they are: e is then linear in a change of weights, and can be made small."""
    loaded = mtplab.load_model(model.checkpoint.path, model_format="fp8", exclude="none", activation_rounding=False)
    return {
        name: weight for packed in linears(loaded) for name, weight in zip(packed.names, packed.weights(), strict=True)
    }


def linears(model):
    return [*model.target.linears(), *model.draft.linears()]


def moved(model, coarse, scale, names=None):
    """The model with its weights moved by `scale` of their way to FP8, in these modules or in all."""

    def swap(packed):
        chosen = [name for name in packed.names if names is None or name in names]
        if not chosen:
            return packed
        values = [
            weight + (scale if name in chosen else 0.0) * (coarse[name] - weight)
            for name, weight in zip(packed.names, packed.weights(), strict=True)
        ]
        made = [LinearWeight(n, v.clone(), rounded=False) for n, v in zip(packed.names, values, strict=True)]
        return PackedLinear(made, model.dtype, model.device)

    target, draft = exchanged(model, swap)
    return replace(model, target=target, draft=draft)


def judged_logits(model):
    """Of every text: the logits at its judged rows, in float64."""
    parts = [logits for _, _, logits in read_texts(model, TEXTS, resolve_policy("none"))]
    return [x[skip : len(text) - 1].double() for x, text, skip in zip(parts, TEXTS, SKIPS, strict=True)]


def directions(model, coarse, names, step=0.2):
    """J e by text: central differences of the logits by the share of an error that is added."""
    ahead, behind = (judged_logits(moved(model, coarse, sign * step, names)) for sign in (1, -1))
    return [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]


def quadratic(model, found):
    """½ Σ_t dᵀ F d by text."""
    out = []
    for logits, d in zip(judged_logits(model), found, strict=True):
        p = logits.softmax(-1)
        mean = (p * d).sum(-1, keepdim=True)
        out.append(float(0.5 * (p * (d - mean) ** 2).sum()))
    return np.array(out)


def target_names(model):
    return [name for packed in model.target.linears() for name in packed.names]


def test_signs_have_the_fisher_information_for_a_covariance():
    """All 16 signs of a vocabulary of four, enumerated."""
    p = torch.tensor([0.7, 0.2, 0.1, 0.0], dtype=torch.float64)
    signs = torch.tensor(list(itertools.product((False, True), repeat=4)))
    z = fisher_vector(p.expand(16, 4), signs)
    torch.testing.assert_close(z.mean(0), torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(z.T @ z / 16, p.diag() - p.outer(p))


def test_the_differentiable_model_is_the_model(model):
    target, draft, recorder = probed(model, model)
    (batch,) = text_batches(model, TEXTS, SKIPS, 1)
    recorder.owner = batch.owner
    hidden = batch.target(target)
    found = target.logits(target.normed(hidden[batch.judged]))
    torch.testing.assert_close(found.detach().double(), torch.cat(judged_logits(model)), atol=1e-5, rtol=1e-5)
    assert found.requires_grad and draft is not None
    assert len(batch.slots) == len(batch.judged) - len(TEXTS)


def test_one_backward_pass_is_every_modules_finite_difference(model, coarse):
    """⟨gradient, e⟩ of Σ zᵀ logits for any z, every module of the target at once, text by text."""
    target, _, recorder = probed(model, moved(model, coarse, 1.0))
    (batch,) = text_batches(model, TEXTS, SKIPS, 1)
    recorder.owner = batch.owner
    normed = target.normed(batch.target(target)[batch.judged])
    recorder.owner = batch.owner[batch.judged]
    logits = target.logits(normed)
    z = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    logits.backward(z)
    found = recorder.take()
    assert set(found) == set(target_names(model)) and recorder.take() == {}
    by_text = z.double().split([len(text) - 1 - skip for text, skip in zip(TEXTS, SKIPS, strict=True)])
    for name in found:
        expected = [float((a * d).sum()) for a, d in zip(by_text, directions(model, coarse, [name]), strict=True)]
        assert found[name].numpy() == pytest.approx(expected, rel=0.01, abs=0.01 * np.abs(expected).max()), name


def test_the_mean_over_draws_is_the_quadratic_form_of_any_set(model, coarse):
    """Without bias: 600 draws lie within 4 standard errors of the exact form, for modules and for sets of them, whose
    cross terms count."""
    found = estimate_texts(model, moved(model, coarse, 1.0), TEXTS, SKIPS, draws=600)
    names = target_names(model)
    for chosen in ([names[0]], ["model.layers.0.mlp.down_proj"], ["lm_head"], names[:4], names):
        exact = quadratic(model, directions(model, coarse, chosen))
        error = found.noise(chosen) / 1.96
        assert found.kl(chosen).value == pytest.approx(exact.sum() / sum(found.judged), abs=4 * error), chosen
        # what the docstring promises of the error, with texts that weigh differently
        weight = np.sqrt(2 * (exact**2).sum()) / exact.sum()
        assert error / found.kl(chosen).value == pytest.approx(weight / 600**0.5, rel=0.35)
    assert found.kl(["mtp.fc"]).value == 0


def test_it_is_the_limit_of_measured_kl(model, coarse):
    """KL of a small error, over its square, is the form that is estimated: an independent way from weights to KL."""
    names = target_names(model)
    exact = quadratic(model, directions(model, coarse, names))
    for scale in (0.2, 0.1):
        told = quality(moved(model, coarse, scale, names), TEXTS, model, skip=SKIPS)
        kl = np.bincount(told.text, told.kl)
        assert kl / scale**2 == pytest.approx(exact, rel=0.5 * scale)


def test_a_drafts_estimate_is_its_measured_change_to_second_order(model, coarse):
    """One module moved, alone: the midpoint's error is of third order, where the first-order term's is of second."""
    before = draft_divergence(model, TEXTS, SKIPS)
    for name in [name for packed in model.draft.linears() for name in packed.names]:
        variant = moved(model, coarse, 0.5, [name])
        found = estimate_texts(model, variant, TEXTS, SKIPS, draws=1)
        after = draft_divergence(variant, TEXTS, SKIPS)
        change = after.kl - before.kl
        assert found.slots == before.slots and name in found.draft
        assert found.draft_kl_by_text([name]) == pytest.approx(change, abs=2e-3 * np.abs(change).max()), name
        # Σ min(p, q) has kinks where p = q
        accepted = after.accepted - before.accepted
        assert found.accepted[name] == pytest.approx(accepted, abs=0.2 * np.abs(accepted).max()), name


def test_texts_do_not_mix_and_batches_do_not_matter(model):
    whole = draft_divergence(model, TEXTS, SKIPS)
    for number, (text, skip) in enumerate(zip(TEXTS, SKIPS, strict=True)):
        alone = draft_divergence(model, [text], [skip])
        assert (alone.kl[0], alone.accepted[0]) == pytest.approx(
            (whole.kl[number], whole.accepted[number]), rel=1e-5
        )  # fmt: skip
    sizes = [batch.run.batch for batch in text_batches(model, TEXTS, SKIPS, 1, room=45)]
    assert sizes == [2, 2]
    assert [batch.run.batch for batch in text_batches(model, TEXTS, SKIPS, 100, room=45)] == [1, 1, 1, 1]


@pytest.fixture(scope="module")
def meter(bundled):
    return ExclusionMeter(bundled, "kind", max_new_tokens=24)


@pytest.fixture(scope="module")
def estimate(meter):
    return estimated(meter)


@pytest.fixture(scope="module")
def check(meter, estimate):
    return check_estimates(meter, estimate)


def test_estimates_are_what_is_measured_on_the_bundled_model(check, meter, estimate):
    assert len(check.of("target")) == 12 and len(check.of("draft")) == 8 and check.draws == 16
    assert all(row.local for row in check.rows) and all(row.sound for row in check.of("draft"))
    # at 95 %, one of 12 may lie outside its interval by chance
    assert sum(row.sound for row in check.of("target")) >= 11
    assert min(check.rank("target"), check.rank("draft")) > 0.9
    assert check.ratio("target") == pytest.approx(1, abs=0.25) and check.ratio("draft") == pytest.approx(1, abs=0.15)
    guess, measured, ratio = check_together(meter, estimate)
    assert ratio.value == pytest.approx(measured.value / guess.value) and abs(ratio.value - 1) < ratio.error + 0.1
    assert "ranks correlate by" in check.sentence() and "not sound" not in check.sentence().partition("draft")[2]
    table = estimate_table(check)
    assert table.count("<tr>") == 21 and table.count(">yes<") == sum(row.sound for row in check.rows)


def test_the_table_has_a_column_where_there_is_an_estimate(check, estimate):
    zero = check.rows[0].measured
    plain = Sensitivity(tuple(SensitivityRow(row.group, *[zero] * 4) for row in check.rows), None, 3)
    assert "Estimated" not in sensitivity_table(plain) and "estimated" not in plain.to_records()[0]
    told = plain.with_estimate(estimate)
    assert "Estimated" in sensitivity_table(told)
    assert [record["estimated"] for record in told.to_records()] == [row.estimated.value for row in check.rows]


def test_a_planted_error_is_beyond_an_expansion_and_still_first(bundled, tmp_path):
    """Where an estimate cannot hold it is said, and which module it is stays right."""
    weak = plant(bundled, tmp_path / "weak", modules=["model.layers.1.mlp.gate_proj", "mtp.fc"], spread=40)
    globs = ["model.layers.1.mlp.[gu]*", "model.layers.0.mlp.*", "model.layers.2.mlp.*", "mtp.fc", "mtp.layers.0.mlp.*"]
    meter = ExclusionMeter(weak.path, globs, max_new_tokens=24)
    check = check_estimates(meter, estimated(meter))
    assert [row.group.name for row in check.rows if not row.local] == [globs[0], globs[3]]
    assert not any(row.sound for row in check.rows if not row.local) and "beyond 0.2 nats" in check.sentence()
    for part, first in (("target", globs[0]), ("draft", globs[3])):
        assert max(check.of(part), key=lambda row: abs(row.estimated.value)).group.name == first
    # the same group, measured: the estimate is too large by more than its error, as the flag says
    row = check.rows[[row.group.name for row in check.rows].index(globs[0])]
    assert row.estimated.value > 1.5 * row.measured.value and not row.off.within_chance


def test_errors_by_hand():
    """Two draws, three texts: the mean square's halves, its jackknife, and what the draws alone leave open."""
    scores = np.array([[1.0, 2.0, 0.0], [3.0, 0.0, 1.0]])
    made = Estimate({"a": scores, "b": -scores}, {}, {}, (10, 10, 10), (9, 9, 9), 2, 0.0)
    assert made.kl_by_text(["a"]) == pytest.approx([2.5, 1.0, 0.25])
    left = np.array([1.25, 2.75, 3.5]) / 20
    error = 4.3027 * np.sqrt(2 / 3 * ((left - left.mean()) ** 2).sum())
    assert made.kl(["a"]) == pytest.approx((3.75 / 30, error))
    assert made.noise(["a"]) == pytest.approx(12.7062 * np.std([2.5, 5.0], ddof=1) / 2**0.5 / 30)
    assert made.kl(["a", "b"]) == (0.0, 0.0)  # errors that cancel
    assert made.kl([SimpleNamespace(modules=("a", "not there"))]) == made.kl(["a"])


@pytest.mark.parametrize("draws", [0, -1, 1.5, True])
def test_draws_that_are_none(model, draws):
    with pytest.raises(ConfigError, match="draws"):
        estimate_texts(model, model, TEXTS, SKIPS, draws=draws)


def test_a_text_without_a_slot_is_refused(model):
    for refuse in (lambda: estimate_texts(model, model, [[1, 2, 3]], [1]), lambda: draft_divergence(model, [[1]], [0])):
        with pytest.raises(ConfigError, match="expected 3 after those"):
            refuse()


def test_the_command_ranks_without_a_search(bundled, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["exclude", str(bundled), "--estimate", "--groups", "layer", "--limit", "1", "--max-new-tokens", "8"]
    assert main(options) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "KL estimated" in lines[0] and lines[5].startswith("mtp.") and "Acceptance length is not estimated" in out
    assert "All of it in FP8: KL estimated" in out
    rates = [float(line.rsplit(None, 1)[1]) for line in lines[1:5]]
    assert rates == sorted(rates, reverse=True)
    assert main([*options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["groups"]) == len(lines[1:]) - 3 and told["together"]["ratio"] > 0 and told["texts"] == 4

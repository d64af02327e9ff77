"""The vLLM lens on planted exclusion mistakes against what vLLM made of them: `tests/peers/vllm_loads.json`, by
`python -m tests.vllm_loads --record`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mtplab.checkpoint.lenses import Verdict
from mtplab.checkpoint.lenses.base import LOAD_ERROR, SILENT
from planted_loads import CASES, write
from vllm_loads import RIGHT, Said, answer_of, control_of, differences, digest_of, record, recorded, said_of

KEPT = recorded()
DID = {name: answer_of(kept, KEPT[control_of(name)]) for name, kept in KEPT.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_lens_says_what_vllm_does(tmp_path: Path, name: str) -> None:
    """Whether it loads, whether it goes on silently wrong, and how each module is built under which name."""
    folder = write(name, tmp_path)
    assert digest_of(folder) == KEPT[name]["digest"], "the checkpoint is another: record vLLM's answers anew"
    assert not list(differences(said_of(folder), DID[name], DID[control_of(name)], CASES[name].beyond))


def test_what_vllm_did_is_told_apart_by_a_wide_margin() -> None:
    """Texts and drafts are the control's or nothing like them: no outcome hangs on where the line is drawn."""
    for name, did in DID.items():
        control = DID[control_of(name)]
        if did.error is not None:
            continue
        kept, alike = did.acceptance / control.acceptance, did.alike(control)
        if did.outcome(control) == RIGHT:
            assert kept > 0.9 and alike > 0.5 and not did.unloaded, name
        else:
            assert kept < 0.2 or alike < 0.1, name
    assert all(DID[name].acceptance > 0.5 for name in ("sound", "ct-sound"))
    counts = Counter(did.outcome(DID[control_of(name)]) for name, did in DID.items())
    assert min(counts[outcome] for outcome in (RIGHT, SILENT, LOAD_ERROR)) > 8 and set(KEPT) == set(CASES)


def test_a_broken_target_may_accept_every_draft() -> None:
    """Acceptance alone shows no damage where target and head agree on nonsense: the texts do."""
    did, control = DID["o-next"], DID["sound"]
    assert did.acceptance == 1 and did.alike(control) < 0.1 and did.outcome(control) == SILENT


def test_a_lens_that_is_wrong_is_seen(tmp_path: Path) -> None:
    """Each thing compared can fail: outcome, how a module is built, its name, and a module left out."""
    said, did, control = said_of(write("sound", tmp_path)), DID["sound"], DID["sound"]
    assert next(differences(said, DID["fc-listed"], control)) == "said right, was load error"
    assert "said right, was silent" in list(differences(said, DID["fc-unlisted"], control))
    assert "mtp.fc: said plain, was Fp8LinearMethod" in list(differences(said, DID["fc-unlisted"], control))
    verdicts = said.look.verdicts
    other = tuple(v._replace(runtime_name=f"model.{v.runtime_name}") for v in verdicts if v.module == "mtp.fc")
    rest = tuple(v for v in verdicts if v.module != "mtp.fc")

    def with_verdicts(changed: tuple[Verdict, ...]) -> Said:
        return replace(said, look=replace(said.look, verdicts=changed))

    found = list(differences(with_verdicts((*rest, *other)), did, control))
    assert found == ["mtp.fc: said None, was UnquantizedLinearMethod", "model.mtp.fc: said plain, was not built"]
    assert list(differences(with_verdicts(rest), did, control)) == found[:1]
    # what the audit tells beside the lens excuses a refusal that it tells of, and nothing else
    refused = DID["blocks"]
    assert list(differences(said, refused, control, "fused-blocks"))
    told = replace(said, findings=frozenset({"fused-blocks"}))
    assert not list(differences(told, refused, control, "fused-blocks"))
    assert list(differences(told, DID["scale-missing"], control, "fused-blocks"))


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    whole = {name: {**kept, "texts": [list(text) for text in DID[name].texts]} for name, kept in KEPT.items()}
    record(tmp_path / "kept.json", whole)
    again = recorded(tmp_path / "kept.json")
    assert again == KEPT and again["root"]["texts"] == "control"

"""Every advice that names a command or entries of a list is followed, and the finding is gone."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mtplab.checkpoint import open_checkpoint
from mtplab.checkpoint.audit import Audit, Finding
from mtplab.cli import main
from tests.audit_checkpoints import BLOCK, H, Made, make
from tests.checkpoint_builders import CHECKPOINTS
from tests.test_audit_faults import HEADERS, SCALE, both, drop, listing, plain, whole_tensor

LIST = "modules_to_not_convert"
ATTENTION = "model.layers.3.self_attn"


def stacked_scales(made: Made) -> None:
    """As transformers writes experts: weights one by one, scales stacked."""
    for layer in ("model.layers.0", "model.layers.1"):
        experts = f"{layer}.mlp.experts"
        drop(*(f"{experts}.{i}.{name}_proj{SCALE}" for i in range(3) for name in ("gate", "up", "down")))(made)
        made.tensors[f"{experts}.gate_up_proj_scale_inv"] = torch.full((3, 2, H // BLOCK), 0.001)
        made.tensors[f"{experts}.down_proj_scale_inv"] = torch.full((3, H // BLOCK, 1), 0.001)


def of_fault(name: str) -> tuple[str, Callable[[Made], None]]:
    return HEADERS[name][0], HEADERS[name][1]


# what is planted, and the kinds whose advice is followed, at least
CASES: dict[str, tuple[str, Callable[[Made], None], set[str]]] = {
    "no list": ("qwen3.5", lambda made: made.quantization.update({LIST: []}), {"unlisted-plain", "engine-silent"}),
    "fc unlisted": (*of_fault("fc-unlisted"), {"unlisted-plain", "engine-silent"}),
    "head in part": (*of_fault("partial-list"), {"partial-draft-list", "unlisted-plain", "engine-silent"}),
    "listed though FP8": (*of_fault("listed-though-fp8"), {"listed-fp8", "engine-refuses"}),
    "whole head listed": (*of_fault("whole-head-listed"), {"listed-fp8"}),
    "no module": (*of_fault("entry-of-no-module"), {"unmatched-entry"}),
    "bad pattern": (*of_fault("bad-pattern"), {"bad-pattern"}),
    "other root": (*of_fault("other-root"), {"other-root"}),
    "untileable": (*of_fault("untileable"), {"untileable"}),
    "fused in part": (*of_fault("fused-in-part"), {"fused-split", "engine-refuses"}),
    "fused in part, and no list": (
        "qwen3.5", both(plain(f"{ATTENTION}.k_proj"), lambda made: made.quantization.update({LIST: []})),
        {"fused-split", "engine-silent"}),
    "no activation_scheme": ("qwen3.5", lambda made: made.quantization.pop("activation_scheme"), {"engine-refuses"}),
    "scales stacked": ("qwen3-next", stacked_scales, {"stacked-scales"}),
    "suffix": (*of_fault("suffix-against-block"), {"scale-suffix"}),
    "bare suffix": (*of_fault("bare-scale"), {"scale-suffix"}),
    "two suffixes": (*of_fault("two-suffixes"), {"scale-suffix", "mixed-suffixes"}),
    "integers": (*of_fault("bytes-as-int8"), {"bytes-as-integers"}),
    "scales as integers": (*of_fault("scale-as-integers"), {"integer-scales"}),
    "FNUZ": (*of_fault("fnuz-codes"), {"fnuz"}),
    "a scale of a plain weight": (*of_fault("junk-scale"), {"engine-refuses"}),
    "a tensor's scale by another name": ("qwen3.5", whole_tensor, {"engine-refuses"}),
    "FP8 head": (*of_fault("quantised-lm-head"), {"quantised-head"}),
    "FP8 shared head": (*of_fault("quantised-shared-head"), {"quantised-head"}),
    "FP8 fusion": (*of_fault("quantised-fusion"), {"fp8-fusion", "engine-silent"}),
    "a short entry": ("qwen3.5", listing("in_proj_a", without=("model.layers.0.linear_attn.in_proj_a",)),
                      {"engine-refuses"}),
}  # fmt: skip


def same(finding: Finding, other: Finding) -> bool:
    """Whether a finding is still there: of its kind, of the same engine, and about some of the same tensors."""
    if finding.kind != other.kind or (finding.kind.startswith("engine-") and finding.why != other.why):
        return False
    return not finding.tensors or not set(finding.tensors).isdisjoint(other.tensors)


def followed(finding: Finding, folder: Path, new: Path) -> bool:
    """Do what the advice says, writing `new`; False where it names neither a command nor entries."""
    command = re.search(r"`(mtplab quantize [^`]+)`", finding.fix)
    if command is not None:
        words = shlex.split(command[1])
        assert words[2:4] == [str(folder), "NEW"]
        assert main(["quantize", str(folder), str(new), *words[4:]]) == 0
        return True
    shutil.copytree(folder, new)
    content = json.loads((new / "config.json").read_text())
    if "quantization_config" not in content or not re.search(rf"{LIST}|the entr|on disk: ", finding.fix):
        return False
    entries = content["quantization_config"].get(LIST, [])
    named = re.findall(r"'([^']+)'", finding.fix)
    if re.match(r"Add them|List the others", finding.fix):
        entries = [*entries, *finding.tensors, *named]
    elif re.match("Correct or remove the entr|Correct the names to those on disk, or remove the entr", finding.fix):
        entries = [entry for entry in entries if entry not in finding.tensors]
    elif finding.fix.startswith("Write them as they stand on disk: "):
        entries = [e.replace("model.language_model.", "model.") if e in finding.tensors else e for e in entries]
        assert set(named) <= set(entries)
    else:
        return False
    content["quantization_config"][LIST] = entries
    (new / "config.json").write_text(json.dumps(content))
    return True


def follow_all(folder: Path, found: Audit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    done = set()
    for number, finding in enumerate(found.findings):
        new = tmp_path / f"new{number}"
        if followed(finding, folder, new):
            after = open_checkpoint(new, lenient=True).audit()
            assert not [other for other in after.findings if same(finding, other)], finding
            done.add(finding.kind)
    capsys.readouterr()
    return done


@pytest.mark.parametrize("case", CASES)
def test_advice_that_is_followed_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    family, change, kinds = CASES[case]
    made = make(family)
    change(made)
    folder = made.write(tmp_path / "x")
    done = follow_all(folder, open_checkpoint(folder, lenient=True).audit(), tmp_path, capsys)
    assert kinds <= done, done


@pytest.mark.parametrize("name", ["tf-fp8-qwen3_5-b128", "mo-fp8-pb-wo-ragged", "llmc-fp8-static-kv",
                                  "hand-fbgemm_fp8", "ar-fp8-static-autoround", "torchao-fp8-wo"])  # fmt: skip
def test_advice_on_real_checkpoints_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    folder = CHECKPOINTS / name / "ckpt"
    done = follow_all(folder, open_checkpoint(folder, lenient=True).audit(), tmp_path, capsys)
    assert any(kind.startswith("engine-") for kind in done)


def test_what_an_engine_builds_in_bf16_is_to_be_kept_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bundled: Path
) -> None:
    """No list makes SGLang build mtp.fc in FP8, nor lmdeploy in_proj_ba: the file has to hold them in BF16."""
    assert main(["quantize", str(bundled), str(tmp_path / "x"), "--exclude", "none"]) == 0
    found = open_checkpoint(tmp_path / "x").audit()
    asked = [f for f in found.findings if f.kind in ("engine-silent", "engine-refuses")]
    assert {engine for f in asked for engine in ("SGLang", "lmdeploy") if engine in f.why} == {"SGLang", "lmdeploy"}
    assert all(followed(f, tmp_path / "x", tmp_path / "new" / str(i)) for i, f in enumerate(asked))
    assert follow_all(tmp_path / "x", found, tmp_path, capsys) >= {"engine-silent", "engine-refuses"}


def test_where_nothing_helps_it_is_said() -> None:
    """lmdeploy builds eh_proj quantised whatever the list says."""
    found = open_checkpoint(CHECKPOINTS / "ds-v3-ragged-mtp" / "ckpt").audit()
    said = [f.fix for f in found.findings if f.kind.startswith("engine-") and "lmdeploy" in f.why]
    assert len(said) == 1 and said[0].startswith("No list and no layout written here"), said


def test_a_part_of_the_head_is_to_be_listed_by_full_names(tmp_path: Path) -> None:
    """`mtp*` is a full name to vLLM, and covers nothing there."""
    family, change = of_fault("partial-list")
    made = make(family)
    change(made)
    folder = made.write(tmp_path)
    (finding,) = (f for f in open_checkpoint(folder).audit().findings if f.kind == "partial-draft-list")
    assert "full name" in finding.fix and "mtp*" not in finding.fix

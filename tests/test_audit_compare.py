"""A checkpoint beside its source: what cannot be compared is said, the bar reaches its end, no pair is searched for.

What is found where all can be compared is in `test_audit_real.py`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from mtplab.checkpoint import open_checkpoint
from mtplab.checkpoint.audit import Audit, Finding
from mtplab.checkpoint.audit.compare import compare
from mtplab.checkpoint.audit.subject import Subject
from tests.audit_checkpoints import make
from tests.checkpoint_builders import entry, raw_file, write_checkpoint

UP = "model.layers.0.mlp.up_proj"


def not_compared(audit: Audit) -> list[Finding]:
    return [finding for finding in audit.findings if finding.kind == "not-compared"]


def test_a_source_that_is_cut_off_after_it_was_opened(tmp_path: Path) -> None:
    folder = make("qwen3.5", plain=True).write(tmp_path / "source")
    ckpt, source = open_checkpoint(make("qwen3.5").write(tmp_path / "x")), open_checkpoint(folder)
    os.truncate(folder / "model.safetensors", 100)
    (finding,) = not_compared(ckpt.audit(deep=True, source=source))
    shared = [module.name for module in ckpt.look().modules if module.shape]
    assert finding.severity == "warning" and sorted(finding.tensors) == sorted(shared)
    assert f"{len(shared)} weights were not compared" in finding.message and "model.safetensors" in finding.message


def test_a_source_with_nan(tmp_path: Path) -> None:
    source = make("qwen3.5", plain=True)
    source.tensors[f"{UP}.weight"][0, 0] = float("nan")
    ckpt = open_checkpoint(make("qwen3.5").write(tmp_path / "x"))
    (finding,) = not_compared(ckpt.audit(deep=True, source=source.write(tmp_path / "source")))
    assert finding.tensors == (UP,) and "1 weights" in finding.message and "NaN" in finding.message


def test_experts_stacked_here_and_one_by_one_there(tmp_path: Path) -> None:
    source = make("qwen3-next", plain=True).write(tmp_path / "source")
    made = make("qwen3-next", plain=True)
    place = "model.layers.1.mlp.experts"
    made.drop(*(f"{place}.{i}." for i in range(3)))
    made.tensors[f"{place}.gate_up_proj"] = torch.ones(3, 64, 64).bfloat16()
    made.tensors[f"{place}.down_proj"] = torch.ones(3, 64, 32).bfloat16()
    (finding,) = not_compared(open_checkpoint(made.write(tmp_path / "x")).audit(deep=True, source=source))
    assert finding.severity == "note" and "stacked in one" in finding.message
    assert set(finding.tensors) == {f"{place}.gate_up_proj", f"{place}.down_proj"}


def test_all_of_a_sound_pair_is_compared(tmp_path: Path) -> None:
    source = make("qwen3.5", plain=True).write(tmp_path / "source")
    assert not not_compared(open_checkpoint(make("qwen3.5").write(tmp_path / "x")).audit(deep=True, source=source))


@pytest.mark.parametrize("dropped", [(), ("mtp.",), ("model.layers.2.",)])
def test_the_bar_reaches_its_end_and_no_further(tmp_path: Path, dropped: tuple[str, ...]) -> None:
    source, made = make("qwen3.5", plain=True), make("qwen3.5")
    source.tensors["model.visual.merger.weight"] = torch.ones(4, 4).bfloat16()
    made.tensors["model.layers.3.self_attn.k_scale"] = torch.tensor(0.5)
    made.drop(*dropped) if dropped else None
    told: list[tuple[int, int]] = []
    ckpt = open_checkpoint(made.write(tmp_path / "x"))
    ckpt.audit(deep=True, source=source.write(tmp_path / "source"), progress=lambda *step: told.append(step))
    assert len({total for _, total in told}) == 1 and told[-1][0] == told[-1][1]
    assert told == sorted(told)


def test_a_copy_that_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    """The draft layer's own embedding: reading it again for the comparison ends in no error of its own."""
    folder = make("deepseek-v3").write(tmp_path)
    ckpt = open_checkpoint(folder)
    os.truncate(folder / "model.safetensors", 100)
    assert {"unreadable"} <= {finding.kind for finding in ckpt.audit(deep=True).findings}


@pytest.mark.serial
def test_many_lost_experts_are_found_in_time(tmp_path: Path) -> None:
    """Half of DeepSeek-V3's experts lost: 22 272 modules, each of which once was looked for among all others."""

    def written(folder: Path, experts: range) -> Subject:
        names = [f"model.layers.{layer}.mlp.experts.{e}.{part}_proj.weight" for layer in range(58) for e in experts
                 for part in ("gate", "up", "down")]  # fmt: skip
        header = {name: entry("BF16", [1, 1], 2 * i, 2 * i + 2) for i, name in enumerate(names)}
        write_checkpoint(folder, {}, config={"model_type": "deepseek_v3", "num_hidden_layers": 58})
        raw_file(folder / "model.safetensors", header, bytes(2 * len(names)))
        return Subject(open_checkpoint(folder))

    here, there = written(tmp_path / "x", range(0, 256, 2)), written(tmp_path / "source", range(256))
    _ = here.modules, there.modules
    begun = time.process_time()
    (lost,) = (finding for finding in compare(here, there) if finding.kind == "lost-target")
    assert len(lost.tensors) == 58 * 128 * 3
    assert time.process_time() - begun < 5


def test_a_pattern_that_is_no_fault_where_it_is_matched_to_anywhere(tmp_path: Path) -> None:
    """compressed-tensors' patterns need not end at a dot: one that would take for ever to get there takes no time."""
    long = f"model.{'a' * 60}_b"
    tensors = {f"{long}.weight": torch.ones(4, 4).bfloat16(), "model.norm.weight": torch.ones(4).bfloat16()}
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    content = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
               "ignore": ["re:(unclosed", "re:model.(?:a|aa)*?"]}  # fmt: skip
    found = open_checkpoint(write_checkpoint(tmp_path, tensors, content), lenient=True).audit()
    (finding,) = (f for f in found.findings if f.kind == "bad-pattern")
    assert finding.tensors == ("re:(unclosed",)

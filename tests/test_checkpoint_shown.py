"""A checkpoint shows itself, in a notebook and in a terminal: what is there, what is wrong, every name escaped."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from mtplab.checkpoint import open_checkpoint
from tests.checkpoint_builders import E4M3, FP8_CONFIG, write_checkpoint


def on_disk(folder: Path) -> tuple[Counter, Counter]:
    """(tensors by dtype, bytes by dtype) as the files' own headers have them."""
    count, size = Counter(), Counter()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, info in header.items():
            if name != "__metadata__":
                begin, end = info["data_offsets"]
                count[info["dtype"]] += 1
                size[info["dtype"]] += end - begin
    return count, size


def test_tensors_and_bytes_by_dtype_are_those_of_the_headers(bundled_fp8: Path) -> None:
    ckpt = open_checkpoint(bundled_fp8)
    count, size = on_disk(bundled_fp8)
    path, model, quantised, header, *lines = str(ckpt).splitlines()
    assert path == str(bundled_fp8) and model.startswith(f"qwen3_5_text: {sum(count.values())} tensors in 1 file, ")
    assert quantised == f"quantised: fp8, {len(ckpt.quantization.exclusions)} entries in modules_to_not_convert"
    assert header.split() == ["stored", "as", "tensors", "bytes"]
    assert [line.split() for line in lines] == [
        [dtype, f"{count[dtype]:,}", f"{nbytes:,}"] for dtype, nbytes in size.most_common()
    ]
    page = ckpt._repr_html_()
    for text in (f"{size['F8_E4M3']:,}", quantised, f"<strong>{bundled_fp8.name}</strong>"):
        assert text in page
    assert str(bundled_fp8.parent) not in page, "where a folder lies is nobody's who reads a page"


def test_a_plain_checkpoint_says_that_it_is_not_quantised(bundled: Path) -> None:
    assert "\nnot quantised\n" in str(open_checkpoint(bundled))
    assert repr(open_checkpoint(bundled)) == f"<Checkpoint {bundled}: 70 tensors, 1 files, not quantised>"


def test_what_is_wrong_is_said_and_cut(tmp_path: Path) -> None:
    tensors = {f"model.layers.0.mlp.m{i}.weight": torch.zeros(4, 4).to(E4M3) for i in range(8)}
    broken = open_checkpoint(write_checkpoint(tmp_path / "broken", tensors, FP8_CONFIG))
    problems = broken.problems
    assert len(problems) > 5
    for shown in (str(broken), broken._repr_html_()):
        assert shown.count("error: ") == 5 and f"{len(problems) - 5} problems more" in shown


@pytest.mark.parametrize("lenient", [False, True])
def test_names_are_escaped(tmp_path: Path, lenient: bool) -> None:
    evil = "<script>alert(1)</script>&\x1b[31m\u202e"
    folder = write_checkpoint(tmp_path / "<b>folder\x1b[31m", {f"{evil}.weight": torch.ones(2, 2).bfloat16()})
    content = json.loads((folder / "config.json").read_text()) | {"model_type": evil}
    if lenient:  # a method that is not read is quoted
        content["quantization_config"] = {"quant_method": evil}
    (folder / "config.json").write_text(json.dumps(content))
    ckpt = open_checkpoint(folder, lenient=lenient)
    text, page = str(ckpt), ckpt._repr_html_()
    assert ("in a way that is not read" in text) == lenient
    assert "<script" not in page and "<b>" not in page and "&lt;script&gt;" in page
    assert not set("\x1b\u202e") & set(text + page)

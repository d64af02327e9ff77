"""`mtplab audit`: tables, JSON, exit codes, names nobody vouches for, what cannot be read, and what is not imported."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtplab.checkpoint import open_checkpoint
from mtplab.checkpoint.audit import SEVERITIES
from mtplab.cli import main
from tests.audit_checkpoints import make
from tests.checkpoint_builders import CHECKPOINTS, E4M3, FP8_CONFIG, entry, raw_file, tensor_file, write_checkpoint

BUNDLED = str(CHECKPOINTS.parents[1] / "data" / "tiny-qwen3_5-fp8")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["audit", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, BUNDLED)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{BUNDLED}: quant_method fp8, 102 tensors in 1 file, 4.56 MB"
    assert lines[2].split() == ["part", "BF16", "F32", "F8_E4M3", "bytes"]
    assert [line.split()[0] for line in lines[3:7]] == ["embedding", "target", "draft", "all"]
    assert "MTP head: Qwen3-Next, Qwen3.5 and later: 1 layer, linear weights 7 FP8, 1 BF16, complete" in " ".join(
        out.split()
    )
    assert "0 errors, 0 warnings, 2 notes; headers read, values not (--deep reads them)" in out
    assert "NOTE tensor-parallel: " in out and "  why: " in out and "  fix: " in out
    assert "mtp.layers.0.mlp.up_proj" not in out
    code, out, _ = run(capsys, BUNDLED, "--deep", "--modules")
    rows = [line for line in out.splitlines() if line.startswith("mtp.layers.0.mlp.up_proj ")]
    assert code == 0 and len(rows) == 1 and "512x256" in rows[0] and "F32 per 128x128" in rows[0]
    assert "headers and values read" in out


KEYS = {"path", "method", "files", "tensors", "deep", "bytes", "head", "findings", "engines"}
HEAD_KEYS = {"family", "layers", "promised", "complete", "missing", "shared_with_target", "linear_weights"}
MODULE_KEYS = {"name", "part", "kind", "shape", "stored", "weight", "scale", "scale_dtype", "block", "bytes", "rule"}


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, BUNDLED, "--json")
    found = json.loads(out)
    assert (code, err, set(found), set(found["head"])) == (0, "", KEYS, HEAD_KEYS)
    assert [set(each) for each in found["findings"]] == [{"severity", "kind", "message", "why", "fix", "tensors"}] * 2
    with_modules = json.loads(run(capsys, BUNDLED, "--json", "--modules", "--deep")[1])
    assert set(with_modules) == KEYS | {"modules"} and with_modules["deep"] is True
    assert all(set(module) == MODULE_KEYS for module in with_modules["modules"])
    assert sum(module["bytes"] for module in with_modules["modules"]) == sum(
        count for row in found["bytes"].values() for count in row.values()
    )


@pytest.mark.parametrize(
    ("worst", "codes"),
    [("error", (1, 1, 1, 0)), ("warning", (0, 1, 1, 0)), ("note", (0, 0, 1, 0)), (None, (0, 0, 0, 0))],
)
def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str], worst: str | None, codes: tuple[int]) -> None:
    made = make("qwen3.5", plain=True)
    if worst == "error":
        made.drop("mtp.fc")
    elif worst == "warning":
        made.config["num_nextn_predict_layers"] = 3
    elif worst == "note":
        made.config["tie_word_embeddings"] = True
    folder = made.write(tmp_path)
    for level, code in zip((*SEVERITIES, "never"), codes, strict=True):
        assert run(capsys, folder, "--fail-on", level)[0] == code, level
    assert run(capsys, folder)[0] == codes[0]  # errors, where nothing is said


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, BUNDLED, "--fail-on", "errors")
    assert (code, out) == (2, "") and "error, warning, note or never" in err
    code, out, err = run(capsys, BUNDLED, "--source", "nowhere")
    assert (code, out) == (2, "") and "nowhere" in err


def test_compared_with_its_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, made = make("qwen3.5", plain=True), make("qwen3.5")
    made.drop("mtp.")
    made.config["mtp_num_hidden_layers"] = 0
    folder, origin = made.write(tmp_path / "x"), source.write(tmp_path / "source")
    code, out, _ = run(capsys, folder, "--source", origin, "--deep")
    assert code == 1 and "ERROR lost-draft: 15 modules of the draft head" in out
    assert run(capsys, folder)[0] == 0


HOSTILE = "\x1b[2J\u202e<script>alert(1)</script>\r\n"


def test_hostile_names_reach_no_terminal_and_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In names of tensors, entries, methods and dtypes: shown, never obeyed."""
    made = make("qwen3.5")
    made.tensors[f"model.layers.0.{HOSTILE}.weight"] = torch.ones(32, 32).to(E4M3)
    made.tensors[f"mtp.layers.0.{HOSTILE}.weight"] = torch.ones(64, 64).bfloat16()
    made.quantization["modules_to_not_convert"].append(f"model.{HOSTILE}.x")  # type: ignore[index]
    folder = made.write(tmp_path / "x")
    code, out, _ = run(capsys, folder, "--modules", "--deep")
    assert code == 1 and "\\x1b[2J" in out and "script" in out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", out)
    page = open_checkpoint(folder, lenient=True).audit(deep=True)._repr_html_()
    assert "<script" not in page and "&lt;script" in page
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e]", page)
    json.loads(run(capsys, folder, "--json", "--modules")[1])
    other = write_checkpoint(tmp_path / "y", make("qwen3.5", plain=True).tensors, {"quant_method": HOSTILE})
    code, out, _ = run(capsys, other)
    page = open_checkpoint(other, lenient=True).audit()._repr_html_()
    assert code == 1 and not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", out) and "<script" not in page
    assert "\u202e" not in page and "\x1b" not in page


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "of tomorrow", None])
def test_a_method_that_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str | None) -> None:
    folder = write_checkpoint(tmp_path, make("qwen3.5", plain=True).tensors, {"quant_method": method, "bits": 4})
    code, out, err = run(capsys, folder)
    assert (code, err) == (1, "") and "ERROR not-read" in out and "fix: " in out
    assert "complete" in out and re.search(r"^draft +[0-9.]+ kB", out, re.MULTILINE)
    assert run(capsys, folder, "--fail-on", "never")[0] == 0


def test_nvfp4(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, CHECKPOINTS / "ct-nvfp4-reject" / "ckpt", "--deep")
    assert code == 1 and "ERROR not-read" in out and "nvfp4" in out and re.search(r"^all +", out, re.MULTILINE)


def broken(folder: Path, how: str) -> Path:
    made = make("mimo-7b")
    folder = made.write(folder, shards=3)
    shard = folder / "model-00002-of-00003.safetensors"
    if how == "a missing shard":
        shard.unlink()
    elif how == "a truncated shard":
        shard.write_bytes(shard.read_bytes()[:-10])
    elif how == "no config":
        (folder / "config.json").unlink()
    elif how == "an index that is none":
        (folder / "model.safetensors.index.json").write_text("[")
    elif how == "an empty folder":
        shutil.rmtree(folder)
        folder.mkdir()
    elif how == "pickles":
        for file in folder.glob("model*"):
            file.unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    return folder


@pytest.mark.parametrize("how", ["a missing shard", "a truncated shard", "no config", "an index that is none",
                                 "an empty folder", "pickles"])  # fmt: skip
def test_what_cannot_be_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    folder = broken(tmp_path / "x", how)
    for options in ((), ("--json",), ("--deep",)):
        code, out, err = run(capsys, folder, *options)
        assert (code, out) == (2, ""), how
        assert err.startswith("mtplab: ") and str(folder) in err and "Traceback" not in err and err.count("\n") == 1


def test_a_single_file_without_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make("qwen3.5")
    file = tensor_file(tmp_path / "one.safetensors", made.tensors)
    code, out, _ = run(capsys, file)
    assert code == 1 and "ERROR unexplained-fp8" in out and "not quantised" in out
    plain = tensor_file(tmp_path / "two.safetensors", make("qwen3.5", plain=True).tensors)
    code, out, _ = run(capsys, plain, "--deep")
    assert code == 0 and "complete" in out


@pytest.mark.parametrize(("deep", "imported"), [(False, "False"), (True, "True")])
def test_headers_are_read_without_torch(repo: Path, deep: bool, imported: str) -> None:
    code = "import sys\nfrom mtplab.cli import main\nmain(sys.argv[1:])\nprint('torch' in sys.modules)"
    options = ["--deep"] if deep else ["--modules", "--source", "data/tiny-qwen3_5"]
    done = subprocess.run([sys.executable, "-c", code, "audit", BUNDLED, *options], capture_output=True, text=True,
                          cwd=repo, check=True)  # fmt: skip
    assert done.stdout.splitlines()[-1] == imported and "tensor-parallel" in done.stdout


def test_reading_values_takes_no_more_memory_than_a_band(tmp_path: Path) -> None:
    """Peak memory of a process that reads 256 MB of holes, against that of one that reads 2 MB of them."""
    code = (
        "import resource, sys\nfrom mtplab.checkpoint import open_checkpoint\n"
        "audit = open_checkpoint(sys.argv[1]).audit(deep=True, source=sys.argv[1])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for rows in (256, 32768):
        header, at = {}, 0
        for name, dtype, width in (("mlp.up_proj.weight", "F8_E4M3", 1), ("self_attn.q_proj.weight", "BF16", 2)):
            header[f"model.layers.0.{name}"] = entry(dtype, [rows, 2730], at, at + rows * 2730 * width)
            at += rows * 2730 * width
        grid = [rows // 128, 22]
        header["model.layers.0.mlp.up_proj.weight_scale_inv"] = entry("F32", grid, at, at + 4 * grid[0] * grid[1])
        folder = write_checkpoint(tmp_path / str(rows), {}, FP8_CONFIG)
        file = raw_file(folder / "model.safetensors", header)
        with open(file, "r+b") as opened:
            opened.truncate(file.stat().st_size + at + 4 * grid[0] * grid[1])
        done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) * 1024)
    assert peaks[1] - peaks[0] < 48e6, peaks  # the largest weight has 179 MB


def test_a_huge_header_is_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2,000 layers of exclusions and as many modules: no check compares every pair of them."""
    tensors = {f"model.layers.{i}.mlp.{name}.weight": torch.ones(1, 1).bfloat16()
               for i in range(2000) for name in ("gate_proj", "up_proj", "down_proj")}  # fmt: skip
    listed = [f"model.layers.{i}.self_attn.{name}" for i in range(2000) for name in ("q_proj", "k_proj")]
    folder = write_checkpoint(tmp_path, tensors, {**FP8_CONFIG, "modules_to_not_convert": listed})
    done = subprocess.run([sys.executable, "-m", "mtplab.cli", "audit", str(folder)], capture_output=True, text=True,
                          timeout=20)  # fmt: skip
    assert "4000 entries of modules_to_not_convert name no module" in " ".join(done.stdout.split())


def test_a_page_does_not_say_where_a_folder_lies(bundled_fp8):
    """What a notebook shows goes into reports that are published; a terminal names the path it was given."""
    opened = open_checkpoint(bundled_fp8.resolve())
    for shown in (opened, opened.audit()):
        page = shown._repr_html_()
        assert str(bundled_fp8.resolve().parent) not in page and bundled_fp8.name in page
        assert str(bundled_fp8.resolve()) in str(shown)

"""`mtplab generate`: text, acceptance, memory, what to check, and nothing that commands a terminal."""

from __future__ import annotations

import json
import re
import shutil

from mtplab import cli_generate
from mtplab.checkpoint import open_checkpoint, write_safetensors
from mtplab.cli import main


def test_generate_prints_text_acceptance_and_memory(bundled, capsys):
    assert main(["generate", str(bundled), "--prompt", "Once upon", "--depth", "2", "--max-new-tokens", "8"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "prompt 1 of 1, " in out
    assert "Once upon" in out
    assert re.search(r"acceptance length \d\.\d{3} · depth 2 · \d+ rounds · \d+ of \d+ drafts accepted", out)
    assert re.search(r"all up to draft j +1: [\d.]+ % +2: [\d.]+ %", out)
    assert re.search(r"weights: target with embedding and head [\d.]+ MB, draft [\d.]+ MB", out)
    assert re.search(r"KV cache as deployed: unquantised \d+ B a token", out)
    assert "far below" not in out


def test_generate_json_is_pure_and_says_what_ran(bundled, capsys):
    arguments = ["--prompt", "a", "--prompt", "b", "--depth", "3", "--max-new-tokens", "6", "--exclude", "mtp.*"]
    assert main(["generate", str(bundled), *arguments, "--quant-policy", "fp8", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [item["prompt"] for item in document["prompts"]] == ["a", "b"]
    found = document["acceptance"]
    assert (found["num_drafts"], found["num_accepted_tokens"]) == (found["rounds"], found["accepted"])
    assert found["acceptance_length"] == found["tokens"] / found["rounds"]
    assert document["memory"]["quant_policy"] == document["memory"]["draft_quant_policy"] == "fp8_e4m3"
    # an exclusion asks for FP8 around it
    assert document["settings"]["spec"]["model_format"] == "fp8"


def test_generate_without_a_round_has_nothing_to_divide_by(bundled, capsys):
    """One new token is the prompt's own: no round, so no length, no shares and no speed, rather than 0."""
    arguments = ["generate", str(bundled), "--prompt", "The", "--depth", "2", "--max-new-tokens", "1"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["acceptance"]
    assert (found["rounds"], found["acceptance_length"]) == (0, None)
    assert found["per_position"] == found["conditional"] == [None, None]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "acceptance length – · depth 2 · 0 rounds" in out
    assert "tokens/s" not in out
    assert re.search(r"all up to draft j +1: –  2: –\n +draft j given 1…j-1 1: –  2: –\n", out)


def test_generate_notes_what_excluding_cannot_do_on_a_stored_fp8_checkpoint(bundled_fp8, capsys):
    arguments = ["generate", str(bundled_fp8), "--prompt", "The", "--max-new-tokens", "3"]
    assert main([*arguments, "--exclude", "*.down_proj", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["prompts"]
    assert err.startswith("mtplab: the checkpoint is stored in FP8: ") and "start from the BF16 checkpoint" in err
    assert main(arguments) == 0
    assert capsys.readouterr().err == ""


def test_generate_says_what_to_check_when_no_draft_is_right(bundled, tmp_path, capsys):
    """A head whose fc has lost its order: the text is the target's all the same, only acceptance tells."""
    broken = broken_head(bundled, tmp_path / "broken")
    assert main(["generate", str(broken), "--prompt", "In the beginning", "--max-new-tokens", "96"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"The first draft was right in [0-4]\.\d % of \d+ rounds, far below", out)
    assert "compare_hidden" in out and "plan()" in out


def broken_head(bundled, path):
    shutil.copytree(bundled, path)
    source = open_checkpoint(bundled)
    tensors = {name: source.read(name) for name in source.tensors}
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].flip(1).contiguous()
    write_safetensors(path / "model.safetensors", tensors, {"format": "pt"})
    return path


def test_generate_depths_agree(bundled, capsys):
    texts = []
    for depth in ("0", "5"):
        main(["generate", str(bundled), "--prompt", "The", "--depth", depth, "--max-new-tokens", "16", "--json"])
        texts.append(json.loads(capsys.readouterr().out)["prompts"][0]["tokens"])
    assert texts[0] == texts[1]


def test_text_of_a_model_cannot_command_a_terminal(capsys):
    document = {
        "prompts": [{"prompt": "\x1b]0;title\x07", "text": "\x9b31m\u202eabc\r", "tokens": [1]}],
        "acceptance": {
            "depth": 0,
            "rounds": 1,
            "accepted": 0,
            "drafted": 0,
            "acceptance_length": 1.0,
            "per_position": [],
        },
        "memory": {
            "target_weight_bytes": 1,
            "draft_weight_bytes": 1,
            "quant_policy": "none",
            "draft_quant_policy": "none",
            "kv_bytes_per_token": 1,
            "draft_kv_bytes_per_token": 1,
            "state_bytes": 1,
            "layers": [1],
        },
        "seconds": 1.0,
        "prefill_seconds": 0.0,
        "tokens_per_second": None,
    }
    cli_generate._print(document)
    out = capsys.readouterr().out
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out)
    assert "\\x1b]0;title\\x07\\x9b31m\\u202eabc\\x0d" in out

"""Prompts from files, folders, strings and ids; errors name file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtplab.errors import CheckpointError, ConfigError
from mtplab.study.prompts import load_prompts, tokenizer_encoder


def write(path: Path, *items) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path


def test_a_folder_is_read_by_domain_in_a_fixed_order(tmp_path):
    write(tmp_path / "b.jsonl", {"id": "b1", "domain": "code", "text": "def f"})
    write(tmp_path / "a.jsonl", {"text": "once"}, {"text": "upon"})
    (tmp_path / "notes.md").write_text("not a prompt")
    found = load_prompts(str(tmp_path))
    assert [(p.id, p.domain, p.text) for p in found.prompts] == [
        ("a-1", "a", "once"),
        ("a-2", "a", "upon"),
        ("b1", "code", "def f"),
    ]
    assert found.domains == ["a", "code"]


def test_narrowed_by_domain_and_limit(tmp_path):
    prompts = load_prompts(write(tmp_path / "a.jsonl", *({"domain": d, "text": d} for d in "xxyyy")))
    assert [p.domain for p in prompts.narrowed(["y"], 2).prompts] == ["y", "y"]
    assert [p.domain for p in prompts.narrowed(limit=1).prompts] == ["x", "y"]
    assert prompts.narrowed(["y"]).label != prompts.label
    with pytest.raises(ConfigError, match=r"'z'.*it has x, y"):
        prompts.narrowed(["z"])
    with pytest.raises(ConfigError, match="limit of 0"):
        prompts.narrowed(limit=0)


def test_strings_and_ids():
    assert [p.text for p in load_prompts("just this").prompts] == ["just this"]
    mixed = load_prompts(["one", [5, 6]])
    assert mixed.encoded(lambda text: [len(text)]) == ((3,), (5, 6))


def test_a_text_file_is_one_prompt(tmp_path):
    (tmp_path / "story.txt").write_text("two\nlines", encoding="utf-8")
    assert [p.text for p in load_prompts(tmp_path / "story.txt").prompts] == ["two\nlines"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "a"', "line 2: not JSON"),
        (b'["a"]', "line 2: a JSON list"),
        (b'{"txt": "a"}', "line 2: text is missing"),
        (b'{"text": ""}', 'line 2: text is ""'),
        (b'{"text": 3}', "line 2: text is 3"),
        (b'{"text": "a", "domain": null}', "line 2: domain is null"),
        (b'{"text": "\xff"}', "line 2: not UTF-8"),
        (b'{"text": "\\ud800"}', "line 2: half a surrogate pair"),
        (b"[" * 100_000, "line 2: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, says):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=f"bad.jsonl, {says}"):
        load_prompts(path)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("missing.jsonl", "missing.jsonl: no such file"),
        ([], "empty"),
        ([""], "prompt 0 is an empty string"),
        ([[]], "prompt 0"),
        ([[1, -1]], "prompt 0"),
        ([[True]], "prompt 0"),
        (3, "prompts are int"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused(source, says):
    with pytest.raises(ConfigError, match=says):
        load_prompts(source)


def test_empty_files_and_folders(tmp_path):
    with pytest.raises(ConfigError, match=r"no \.jsonl file"):
        load_prompts(tmp_path)
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match="no prompt in this file"):
        load_prompts(tmp_path)


def test_a_broken_tokenizer_is_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match="no tokenizer"):
        tokenizer_encoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        tokenizer_encoder(tmp_path)

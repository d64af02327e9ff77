"""Names on the Hugging Face hub: from a cache laid out as its client does it, and what is said where there is none."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

import mtplab
from mtplab import CheckpointError, ConfigError, open_checkpoint
from mtplab.checkpoint.hub import is_hub_name, resolve_hub
from mtplab.cli import main
from mtplab.report import resolve_path

COMMIT, OLD = "0123456789abcdef0123456789abcdef01234567", "fedcba9876543210fedcba9876543210fedcba98"


@pytest.fixture
def cache(tmp_path, monkeypatch, bundled):
    """`hub` with one model: blobs, links to them, and refs, as huggingface_hub writes them."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    model = tmp_path / "hf" / "hub" / "models--someone--tiny"
    (model / "blobs").mkdir(parents=True)
    for commit in (COMMIT, OLD):
        (model / "snapshots" / commit).mkdir(parents=True)
        for number, name in enumerate(("config.json", "model.safetensors", "tokenizer.json")):
            shutil.copy(bundled / name, model / "blobs" / str(number))
            (model / "snapshots" / commit / name).symlink_to(f"../../blobs/{number}")
    (model / "refs" / "release").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    (model / "refs" / "release" / "1").write_text(OLD)
    return model


def test_a_model_of_the_cache_is_used_as_it_is(cache, bundled, capsys):
    here = cache / "snapshots" / COMMIT
    for name in ("hf://someone/tiny", "hf://someone/tiny/", f"hf://someone/tiny@{COMMIT}"):
        assert resolve_hub(name) == here == resolve_path(name)
    assert resolve_hub("hf://someone/tiny@release/1") == cache / "snapshots" / OLD
    assert open_checkpoint("hf://someone/tiny").path == here
    assert open_checkpoint("hf://someone/tiny").plan() == open_checkpoint(bundled).plan()
    assert mtplab.load_model("hf://someone/tiny").tokenizer is not None
    assert main(["audit", "hf://someone/tiny"]) == 0
    assert main(["doctor", "hf://someone/tiny"]) == 0
    assert str(here) in capsys.readouterr().out


def test_where_the_cache_lies(cache, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "xdg").mkdir()
    (tmp_path / "xdg" / "huggingface").symlink_to(tmp_path / "hf")
    assert resolve_hub("hf://someone/tiny").name == COMMIT
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").symlink_to(tmp_path / "hf" / "hub")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert resolve_hub("hf://someone/tiny").parent.parent == tmp_path / "elsewhere" / "models--someone--tiny"


def test_what_is_not_there_is_fetched_by_the_hubs_own_client(cache, monkeypatch):
    asked = []

    def download(name, **options):
        asked.append((name, options["revision"], options["cache_dir"]))
        assert "*.safetensors" in options["allow_patterns"] and "*.bin" not in options["allow_patterns"]
        return str(cache / "snapshots" / COMMIT)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_hub("hf://someone/tiny") and asked == []
    resolve_hub("hf://someone/other@v2")
    (cache / "blobs" / "1").unlink()  # a download that was broken off
    resolve_hub("hf://someone/tiny")
    hub = cache.parent
    assert asked == [("someone/other", "v2", hub), ("someone/tiny", "main", hub)]
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    snapshot = cache / "snapshots" / OLD
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-1.safetensors").write_bytes(b"")
    resolve_hub(f"hf://someone/tiny@{OLD}")
    assert len(asked) == 3
    (snapshot / "model-2.safetensors").write_bytes(b"")
    assert resolve_hub(f"hf://someone/tiny@{OLD}") == snapshot and len(asked) == 3


def test_without_network_or_client_it_says_what_to_do(cache, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(CheckpointError) as missing:
            resolve_hub("hf://someone/other")
    for part in ("hf://someone/other: ", "has no snapshot", "pip install 'mtplab[hub]'", "hf download someone/other"):
        assert part in str(missing.value)

    def offline(*args, **options):
        raise OSError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    assert main(["audit", "hf://someone/other"]) == 2
    said = capsys.readouterr().err
    assert "the hub gave none (OSError: no route to host)" in said and "copy the folder here" in " ".join(said.split())


def test_a_plain_name_is_a_path_and_the_prefix_is_suggested(cache, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)  # nothing asks the hub
    assert main(["audit", "someone/tiny"]) == 2
    assert "no such path. For the model of that name on the Hugging Face hub write hf://someone/tiny." in (
        capsys.readouterr().err
    )
    with pytest.raises(ConfigError, match="write hf://someone/tiny"):
        resolve_path("someone/tiny")
    with pytest.raises(CheckpointError, match="no such path.$"):
        open_checkpoint("a/longer/path")


@pytest.mark.parametrize("name", ["hf://tiny", "hf://a/b/c", "hf://a/..", "hf://a/b@", "hf://../b", "hf://a/b@../../c"])
def test_names_of_another_form_are_refused(cache, name):
    assert is_hub_name(name)
    with pytest.raises(ConfigError, match="expected hf://organisation/name"):
        resolve_hub(name)

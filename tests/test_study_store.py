"""Point files: hashes, identity, atomic writes, locks, wrecks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import pytest

from mtplab.config import EngineConfig, SamplingConfig, SpecConfig
from mtplab.errors import ConfigError
from mtplab.study import ResultRow, read_rows
from mtplab.study.grid import Settings, build_units
from mtplab.study.identity import checkpoint_identity
from mtplab.study.producer import error_row
from mtplab.study.prompts import load_prompts
from mtplab.study.store import PointStore, write_atomically
from study_fakes import make_checkpoint


def settings(engine=None, spec=None, sampling=None) -> Settings:
    return Settings(
        EngineConfig.of(**engine or {}),
        SpecConfig.of(**spec or {}),
        SamplingConfig.of(**{"max_new_tokens": 8, **(sampling or {})}),
    )


def one_unit(checkpoint, given=None, **changes):
    axes = {
        "depths": (0, 1),
        "sets": [load_prompts([[1, 2], [3]])],
        "exclude": (None,),
        "draft_exclude": None,
        "quant_policy": ("none",),
        "draft_quant_policy": None,
        "temperature": (0.0,),
        **changes,
    }
    (unit,) = build_units(checkpoint, given or settings(), **axes)
    return unit


def row_of(unit, depth=0) -> ResultRow:
    return error_row(unit.config, depth, unit.labels, "made for a test")


def test_the_hash_changes_with_everything_that_matters(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "m")
    hashes = [one_unit(checkpoint).point]
    for change in (
        {"exclude": ("none",)},
        {"exclude": (["mtp.*"],)},
        {"exclude": ("published",), "draft_exclude": ("none",)},
        {"quant_policy": ("int8",)},
        {"draft_quant_policy": ("int8",)},
        {"temperature": (0.5,)},
        {"sets": [load_prompts([[1, 2], [4]])]},
    ):
        hashes.append(one_unit(checkpoint, **change).point)
    for change in (
        {"sampling": {"max_new_tokens": 9}},
        {"sampling": {"ignore_eos": True}},
        {"engine": {"exact": False}},
        {"engine": {"device": "cuda"}},
        {"engine": {"dtype": "bfloat16"}},
        {"spec": {"target_hidden": "pre_norm"}},
        {"spec": {"draft_hidden": "pre_norm"}},
    ):
        hashes.append(one_unit(checkpoint, settings(**change)).point)
    for change in (
        {"sampling": {"seed": 1}},
        {"sampling": {"top_k": 5}},
        {"sampling": {"top_p": 0.5}},
        {"spec": {"draft_sampling": "sampled"}},
    ):
        hashes.append(one_unit(checkpoint, settings(**change), temperature=(0.5,)).point)
    unrounded = settings(engine={"activation_rounding": False})
    hashes.append(one_unit(checkpoint, unrounded, exclude=("none",)).point)
    hashes.append(one_unit(make_checkpoint(tmp_path / "other", b"v" + b"w" * 63)).point)
    assert len(set(hashes)) == len(hashes)


def test_the_hash_is_that_of_the_run(tmp_path):
    """Two ways to ask for one and the same run are one point."""
    checkpoint = make_checkpoint(tmp_path / "m")
    greedy = one_unit(checkpoint)
    for change in (
        {"sampling": {"seed": 1}},
        {"sampling": {"top_k": 5, "top_p": 0.5}},
        {"spec": {"draft_sampling": "sampled"}},
        {"engine": {"dtype": "float32"}},
        {"engine": {"activation_rounding": False}},  # of a plan that rounds nothing
    ):
        assert one_unit(checkpoint, settings(**change)).config == greedy.config, change
    assert (greedy.config.dtype, greedy.config.exact) == ("float32", True)
    for ways in (
        [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "exact": False}],  # only float32 on a CPU can be exact
        [{"device": "cuda"}, {"device": "cuda", "exact": False}, {"device": "cuda:1", "dtype": "bfloat16"}],
    ):
        assert len({one_unit(checkpoint, settings(engine=way)).point for way in ways}) == 1, ways
    checkpoint.config["dtype"] = "float16"
    half = one_unit(checkpoint, settings(engine={"device": "cuda"}))
    assert half.config.dtype == "float16"
    assert half.point == one_unit(checkpoint, settings(engine={"device": "cuda", "dtype": "float16"})).point
    checkpoint.quantization = object()
    stored, asked = one_unit(checkpoint), one_unit(checkpoint, settings(engine={"model_format": "fp8"}))
    assert stored.config.model_format is asked.config.model_format is None


def test_the_hash_ignores_labels_paths_depths_and_device_index(tmp_path):
    first = one_unit(make_checkpoint(tmp_path / "m"))
    moved = one_unit(make_checkpoint(tmp_path / "elsewhere"), depths=(3,))
    assert moved.point == first.point
    # two ways to say one set of modules
    spelled = {"exclude": (["lm_head", "mtp.fc"],)}
    preset = {"exclude": ("published",)}
    checkpoint = make_checkpoint(tmp_path / "m")
    assert one_unit(checkpoint, **spelled).point == one_unit(checkpoint, **preset).point
    cuda = [one_unit(checkpoint, settings({"device": name})).point for name in ("cuda:0", "cuda:1")]
    assert cuda[0] == cuda[1]


def test_the_config_names_excluded_modules_by_part(tmp_path):
    config = one_unit(make_checkpoint(tmp_path / "m"), exclude=("published",)).config
    assert config.model_format == "fp8"  # a BF16 file with exclusions asked for
    assert config.excluded == ("lm_head",)
    assert config.draft_excluded == ("mtp.fc",)


def test_the_hash_is_the_same_in_another_process(tmp_path, repo):
    here = one_unit(make_checkpoint(tmp_path / "m")).point
    code = (
        "import sys; from pathlib import Path; import study_fakes, test_study_store as t\n"
        "print(t.one_unit(study_fakes.make_checkpoint(Path(sys.argv[1]))).point)"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "m")]
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": f"{repo / 'tests'}{os.pathsep}{repo}"}
    there = subprocess.run(arguments, capture_output=True, text=True, env=env, check=True).stdout.strip()
    assert there == here


def test_identity_changes_with_weights_config_and_tokenizer_only(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "m")
    first = checkpoint_identity(checkpoint)
    assert first.startswith("full:")
    os.utime(tmp_path / "m" / "model.safetensors", (1, 1))
    assert checkpoint_identity(checkpoint) == first
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    with_tokenizer = checkpoint_identity(checkpoint)
    (tmp_path / "m" / "config.json").write_text("{}")
    assert len({first, with_tokenizer, checkpoint_identity(checkpoint)}) == 3


def test_a_large_checkpoint_is_sampled_inside_every_tensor(tmp_path):
    weights = bytes(100_000)
    at = [0, 50_000, 99_999]  # start, middle and end of the one tensor
    found = {checkpoint_identity(make_checkpoint(tmp_path / "m", weights), full_below=1000)}
    for place in at:
        changed = bytearray(weights)
        changed[place] = 1
        found.add(checkpoint_identity(make_checkpoint(tmp_path / "m", bytes(changed)), full_below=1000))
    assert len(found) == 1 + len(at)
    assert all(identity.startswith("sampled:") for identity in found)


def test_rows_come_back_equal_and_the_export_follows(tmp_path):
    unit = one_unit(make_checkpoint(tmp_path / "m"))
    store = PointStore(tmp_path / "r")
    rows = [row_of(unit, depth) for depth in (1, 0)]
    store.write(unit.config, rows)
    assert store.rows(unit.point) == {0: rows[1], 1: rows[0]}
    exported = store.export()
    assert [ResultRow.from_json(line).depth for line in exported.read_text().splitlines()] == [0, 1]
    exported.unlink()
    assert store.export().read_text().count("\n") == 2
    assert read_rows(tmp_path / "r") == [rows[1], rows[0]]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "wreck",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "[" * 100_000,
        lambda text: text.replace('"seed": 0', '"seed": 1', 1),
        lambda text: text.replace('"schema": 3, "hash"', '"schema": 0, "hash"'),
        lambda text: json.dumps({**json.loads(text), "rows": [{}]}),
        lambda text: json.dumps({**json.loads(text), "rows": json.loads(text)["rows"] * 2}),
        lambda text: text.replace('"rows"', '"raws"'),
    ],
    ids=["cut", "empty", "list", "deep", "config", "schema", "row", "twice", "key"],
)
def test_a_wreck_is_set_aside_not_believed(tmp_path, wreck):
    unit = one_unit(make_checkpoint(tmp_path / "m"))
    store = PointStore(tmp_path / "r")
    store.write(unit.config, [row_of(unit)])
    path = store.path(unit.point)
    good = path.read_text()
    bad = wreck(good)
    assert bad != good
    path.write_text(bad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.rows(unit.point) == {}  # a look without the lock touches nothing
    assert path.exists()
    with pytest.warns(UserWarning, match="left out"):
        assert read_rows(tmp_path / "r") == []
    with pytest.warns(UserWarning, match="set aside as"):
        assert store.rows(unit.point, "set aside") == {}
    assert not path.exists()
    (aside,) = path.parent.glob("*.corrupt-*")
    assert aside.read_text() == bad


def test_a_newer_file_is_left_alone(tmp_path):
    unit = one_unit(make_checkpoint(tmp_path / "m"))
    store = PointStore(tmp_path / "r")
    store.write(unit.config, [row_of(unit)])
    path = store.path(unit.point)
    path.write_text(path.read_text().replace('"schema": 3, "hash"', '"schema": 4, "hash"'))
    with pytest.raises(ConfigError, match="newer mtplab"):
        store.rows(unit.point, "set aside")
    assert path.exists()


def test_one_owner_at_a_time_and_a_dead_one_is_none(tmp_path, repo):
    store = PointStore(tmp_path / "r")
    code = (
        "import sys, time; from mtplab.study.store import PointStore\n"
        "with PointStore(sys.argv[1]).lock('p') as held:\n"
        "    print(held, flush=True); time.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": str(repo)}
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(store.folder)], stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        assert other.stdout.readline().strip() == "True"
        with store.lock("p") as held, store.lock("q") as free:
            assert (held, free) == (False, True)
    finally:
        other.kill()
        other.communicate()
    with store.lock("p") as held:
        assert held


def test_a_file_in_the_folders_place(tmp_path):
    (tmp_path / "r").write_text("")
    with pytest.raises(ConfigError, match="results folder"):
        PointStore(tmp_path / "r")
    with pytest.raises(ConfigError, match="no such results folder"):
        read_rows(tmp_path / "none")

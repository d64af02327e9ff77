"""Arguments of `sweep` that cannot be: refused before anything runs, in words."""

from __future__ import annotations

import json

import pytest

import study_fakes as fakes
from mtplab import ConfigError
from mtplab.study.store import PointStore, read_rows
from mtplab.study.sweep import sweep

NOTHING_TO_CALL = [3, "x", [len], {"a": 1}, True]


def run(folder, **changes):
    settings = {
        "prompts": [[1, 2]],
        "depths": [1],
        "max_new_tokens": 4,
        "results": folder / "results",
        "load_model": fakes.load_model,
        "generate": fakes.generate,
        **changes,
    }
    return sweep(fakes.make_checkpoint(folder / "checkpoint"), **settings)


@pytest.mark.parametrize(
    "name, value, says",
    [
        *[(name, value, f"{name} is .*; expected something to call, or None")
          for name in ("on_row", "on_progress", "load_model", "generate") for value in NOTHING_TO_CALL],
        *[("cancel", value, "cancel is .*; expected a threading.Event") for value in (0, "", False, [], object())],
        *[("executor", value, "executor is .*; expected a concurrent.futures.Executor") for value in (4, "", (), dict)],
        *[("results", value, "results is .*; expected a folder") for value in (3, True, b"x", [], ("a",), object())],
        *[("results", value, "no file system takes this name") for value in ("a\0b", "\ud800")],
        *[("domains", value, "domains is .*; expected names such as given") for value in (3, 0.5, True, [None], b"x")],
        *[("limit", value, "a limit of .* prompts a domain") for value in (0, "3", 1.5, True)],
        *[(name, value, "half a surrogate pair")
          for name in ("exclude", "draft_exclude") for value in ("\ud800", ["\ud800"])],
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_runs(tmp_path, name, value, says):
    with pytest.raises(ConfigError, match=says):
        run(tmp_path, **{name: value})
    assert not (tmp_path / "results").exists()
    assert fakes.calls(tmp_path / "checkpoint", "load") == []


def test_none_is_what_is_left_out(tmp_path):
    hooks = dict.fromkeys(("on_row", "on_progress", "cancel", "executor", "domains", "limit"))
    assert run(tmp_path, **hooks).computed == 1


@pytest.mark.parametrize("folder", [3, None, b"x", "", "a\0b"])
def test_results_are_read_from_a_folder(folder):
    for call in (read_rows, PointStore):
        with pytest.raises(ConfigError, match="results"):
            call(folder)


def test_everything_excluded_is_the_checkpoint_as_stored(tmp_path):
    """One run, under two labels: nothing is quantised, whatever the format that nothing is quantised to."""
    out = run(tmp_path, exclude=(None, ["*"], "none"))
    stored, excluded, quantised = out.rows
    assert stored.point == excluded.point != quantised.point
    assert (stored.exclude_label, excluded.exclude_label) == ("as stored", "*")
    assert (stored.model_format, excluded.model_format, quantised.model_format) == (None, None, "fp8")
    assert out.computed == 2 and len(fakes.calls(tmp_path / "checkpoint", "load")) == 2
    point = json.loads((tmp_path / "results" / f"{stored.point}.json").read_text())
    assert point["config"]["model_format"] is None

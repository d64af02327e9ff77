"""Arguments that several public functions take have one default: said in each signature, and the same in all."""

from __future__ import annotations

import inspect

import pytest

from mtplab import generate, load_model, memory, trace
from mtplab.decode.settings import resolve_run
from mtplab.models.asked import load_settings


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [(generate, resolve_run, 17), (generate, trace, 17), (load_model, load_settings, 9), (load_model, memory, 7)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_shared_arguments_have_one_default(one, other, shared):
    mine, theirs = (inspect.signature(function).parameters for function in (one, other))
    given = [name for name in mine if name in theirs and mine[name].default is not inspect.Parameter.empty]
    both = [name for name in given if theirs[name].default is not inspect.Parameter.empty]
    assert len(both) >= shared
    assert {name: mine[name].default for name in both} == {name: theirs[name].default for name in both}

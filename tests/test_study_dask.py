"""A sweep on a Dask cluster of two worker processes, through the cluster's own executor."""

from __future__ import annotations

import threading

import pytest

from mtplab.study import sweep

distributed = pytest.importorskip("distributed")

SETTINGS = {
    "prompts": ["Once upon a time", "def add(a, b):", "In the"],
    "depths": (0, 1, 3),
    "quant_policy": ("none", "int8"),
    "exclude": (None, "none"),
    "max_new_tokens": 10,
}


@pytest.fixture(scope="module")
def client():
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", host="127.0.0.1"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.mark.slow
def test_its_workers_give_the_rows_of_this_process(client, bundled, tmp_path):
    there = sweep(bundled, results=tmp_path / "there", executor=client.get_executor(), **SETTINGS)
    here = sweep(bundled, results=tmp_path / "here", **SETTINGS)
    assert (there.computed, there.failed, there.notes) == (12, [], [])
    told = {"provenance"}
    assert [row.model_dump(exclude=told) for row in there] == [row.model_dump(exclude=told) for row in here]
    # both workers wrote into the one folder, whose rows and traces this process reads
    assert there.trace(there.rows[0]).acceptance().to_records() == here.trace(here.rows[0]).acceptance().to_records()
    assert sweep(bundled, results=tmp_path / "there", executor=client.get_executor(), **SETTINGS).reused == 12


def broken_at_int8(model, prompts, quant_policy, **rest):
    from mtplab.decode import generate

    if quant_policy == "int8":
        raise RuntimeError("no kernel for int8")
    return generate(model, prompts, quant_policy=quant_policy, **rest)


@pytest.mark.slow
def test_its_failures_and_cancels(client, bundled, tmp_path):
    found = sweep(
        bundled, results=tmp_path / "f", executor=client.get_executor(), generate=broken_at_int8, **SETTINGS
    )
    assert [(row.quant_policy, row.error) for row in found.failed] == 2 * [("int8", "RuntimeError: no kernel for int8")]
    assert sum(row.error is None for row in found) == 6
    cancel = threading.Event()
    stopped = sweep(
        bundled,
        results=tmp_path / "c",
        executor=client.get_executor(),
        cancel=cancel,
        on_row=lambda row: cancel.set(),
        **{**SETTINGS, "quant_policy": ("none", "int8", "int4", "fp8", "fp8_e5m2")},
    )
    assert stopped.cancelled and 0 < stopped.computed < 30 and not stopped.failed

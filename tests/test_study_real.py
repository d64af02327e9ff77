"""The study on the bundled model: rows are what the runner counted, and reading back needs no model."""

from __future__ import annotations

import shutil
import subprocess
import sys

from mtplab.checkpoint import open_checkpoint
from mtplab.decode import generate
from mtplab.models import load_model
from mtplab.study import sweep
from mtplab.study.prompts import load_prompts, tokenizer_encoder

PROMPTS = ["Once upon a time there was", "def add(a, b):\n    return"]
SETTINGS = {"prompts": PROMPTS, "max_new_tokens": 12}


def test_rows_are_what_the_runner_counted(bundled, tmp_path):
    result = sweep(
        bundled,
        depths=(0, 1, 4),
        quant_policy=("none", "int8"),
        draft_quant_policy=("int4",),
        exclude=(None, ["mtp.*"]),
        results=tmp_path,
        **SETTINGS,
    )
    assert (result.computed, result.failed, result.notes) == (12, [], [])
    for exclude, model_format in ((None, None), (["mtp.*"], "fp8")):
        model = load_model(bundled, exclude=exclude, model_format=model_format)
        for row in (r for r in result if r.exclude == exclude):
            run = generate(
                model,
                PROMPTS,
                depth=row.depth,
                max_new_tokens=12,
                quant_policy=row.quant_policy,
                draft_quant_policy="int4",
            )
            stats = run.stats
            assert (row.rounds, row.drafted, row.accepted) == (stats.rounds, stats.drafted, stats.accepted)
            assert row.acceptance_length == stats.acceptance_length
            assert row.per_position == stats.per_position
            assert row.kv_bytes_per_token == run.memory["kv_bytes_per_token"]
            assert row.draft_kv_bytes_per_token == run.memory["draft_kv_bytes_per_token"]
            assert row.state_bytes == model.state_bytes()
            if row.depth == 0:
                assert row.acceptance_length == 1.0
                assert row.rounds == sum(len(tokens) - 1 for tokens in run.tokens)


def test_exclusions_show_in_the_bytes(bundled, tmp_path):
    rows = sweep(bundled, depths=[1], exclude=(None, "none", "published", ["mtp.*"]), results=tmp_path, **SETTINGS).rows
    stored, nothing, published, no_draft = rows
    assert stored.model_format is None
    assert {row.model_format for row in rows[1:]} == {"fp8"}
    assert nothing.target_weight_bytes < published.target_weight_bytes < stored.target_weight_bytes
    assert nothing.draft_weight_bytes < published.draft_weight_bytes < no_draft.draft_weight_bytes
    assert no_draft.draft_weight_bytes == stored.draft_weight_bytes


def test_a_stored_fp8_checkpoint_says_what_excluding_cannot_do(bundled_fp8, tmp_path):
    result = sweep(bundled_fp8, depths=[1], exclude=(None, "none", ["*.down_proj"]), results=tmp_path, **SETTINGS)
    stored, nothing, excluded = result.rows
    assert stored.remark is None
    assert nothing.point == stored.point
    count = sum(m.name.endswith(".down_proj") for m in open_checkpoint(bundled_fp8).plan().modules)
    assert f"{count} excluded linear modules keep their FP8 weights" in excluded.remark
    assert excluded.target_weight_bytes == stored.target_weight_bytes
    assert f"*.down_proj: {excluded.remark}" in result.to_table()
    # another sweep may call it something else: the remark belongs to the asking, not to the file
    assert sweep(bundled_fp8, depths=[1], results=tmp_path, **SETTINGS).rows[0].remark is None


def test_a_loaded_model_and_its_folder_are_one_point(bundled_fp8, tmp_path):
    from_folder = sweep(bundled_fp8, depths=[2], results=tmp_path, **SETTINGS)
    from_model = sweep(load_model(bundled_fp8), depths=[2], results=tmp_path, **SETTINGS)
    assert (from_folder.computed, from_model.computed, from_model.reused) == (1, 0, 1)
    # the preset says what the file says already
    assert sweep(bundled_fp8, depths=[2], exclude="published", results=tmp_path, **SETTINGS).reused == 1


def test_everything_excluded_is_the_checkpoint_as_stored(bundled, tmp_path):
    out = sweep(bundled, depths=[1], exclude=(None, ["*"]), results=tmp_path, **SETTINGS)
    stored, excluded = out.rows
    assert out.computed == 1 and stored.point == excluded.point and excluded.exclude_label == "*"


def test_a_changed_weight_is_another_point(bundled, tmp_path):
    copy = shutil.copytree(bundled, tmp_path / "copy")
    settings = {**SETTINGS, "depths": [1], "results": tmp_path / "results"}
    assert sweep(bundled, **settings).computed == 1
    assert sweep(copy, **settings).reused == 1
    info = max(open_checkpoint(copy).tensors.values(), key=lambda t: t.nbytes)
    raw = bytearray(info.file.read_bytes())
    raw[info.start] ^= 1
    info.file.write_bytes(raw)
    assert sweep(copy, **settings).computed == 1


def test_sampled_points_repeat_and_differ_by_seed(bundled, tmp_path):
    settings = {**SETTINGS, "depths": [2], "temperature": 0.8, "draft_sampling": "sampled"}
    first = sweep(bundled, results=tmp_path / "a", **settings).rows[0]
    again = sweep(bundled, results=tmp_path / "b", **settings).rows[0]
    other = sweep(bundled, results=tmp_path / "b", seed=1, **settings).rows[0]
    assert again.output_hash == first.output_hash
    assert other.output_hash != first.output_hash


def test_ids_are_the_models(bundled):
    model = load_model(bundled)
    for prompt in (*PROMPTS, "naïve ☃\n\ttab", "<|endoftext|>"):
        assert tokenizer_encoder(bundled)(prompt) == model.encode(prompt)


def test_the_bundled_prompts_are_read_and_fit_the_model(bundled):
    prompts = load_prompts()
    assert len(prompts.domains) >= 2
    assert all(prompts.encoded(tokenizer_encoder(bundled)))


def cancels_itself(model, prompts, depth, cancel, **rest):
    if depth == 2:
        cancel.set()
    return generate(model, prompts, depth=depth, cancel=cancel, **rest)


def test_the_runners_way_of_stopping_is_no_failure(bundled, tmp_path):
    result = sweep(bundled, depths=(1, 2, 3), results=tmp_path, generate=cancels_itself, **SETTINGS)
    assert (result.cancelled, result.failed, [row.depth for row in result]) == (True, [], [1])


def test_reading_back_imports_no_torch(bundled, repo, tmp_path):
    sweep(bundled, depths=(0, 1), results=tmp_path, **SETTINGS)
    code = (
        "import sys; from mtplab.study import sweep\n"
        "r = sweep(sys.argv[1], prompts=sys.argv[3:], depths=(0, 1), results=sys.argv[2], max_new_tokens=12)\n"
        "print(r.computed, r.reused, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(bundled), str(tmp_path), *PROMPTS],
        capture_output=True,
        text=True,
        check=True,
        cwd=repo,
    )
    assert done.stdout.split() == ["0", "2", "False"]

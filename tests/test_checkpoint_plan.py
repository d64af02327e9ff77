"""The plan: what becomes of each module, which rule decided, and what exclusions match."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch

from mtplab.checkpoint import Plan, open_checkpoint
from mtplab.errors import CheckpointError, ConfigError
from mtplab.models import load_model
from tests.checkpoint_builders import (
    CHECKPOINTS,
    E4M3,
    FP8_CONFIG,
    LISTED,
    qwen_fp8,
    qwen_tensors,
    tensor_file,
    write_checkpoint,
)

UP, DOWN, Q = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "mtp.layers.0.self_attn.q_proj"
IN_A = "model.layers.0.linear_attn.in_proj_a"


def rewrapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors under the multimodal wrapper's names."""
    return {name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
            for name, tensor in tensors.items()}  # fmt: skip


def bf16(folder: Path, wrapped: bool = False) -> Path:
    tensors = {name: t.bfloat16() for name, t in qwen_tensors().items() if not name.endswith("_inv")}
    return write_checkpoint(folder, rewrapped(tensors) if wrapped else tensors)


def treatment(plan: Plan) -> dict[str, tuple[str, str]]:
    return {module.name: (module.weight, module.activation) for module in plan.modules}


FP8, KEPT, W8A16 = ("fp8", "fp8"), ("bf16", "none"), ("fp8", "none")
PUBLISHED = {
    "model.embed_tokens": KEPT, "model.layers.0.input_layernorm": KEPT, IN_A: KEPT, UP: FP8, DOWN: FP8,
    "model.norm": KEPT, "lm_head": KEPT, "mtp.fc": KEPT, Q: FP8, "mtp.norm": KEPT,
}  # fmt: skip


# a stored FP8 checkpoint


@pytest.mark.parametrize("exclude", [None, "published", ["published"], "none"])
def test_as_published(tmp_path: Path, exclude: object) -> None:
    plan = open_checkpoint(qwen_fp8(tmp_path / "x")).plan(exclude=exclude)  # type: ignore[arg-type]
    assert treatment(plan) == PUBLISHED
    assert plan.warnings == ()
    up = plan.by_name[UP]
    assert (up.part, up.kind, up.stored, up.shape, up.block) == ("target", "linear", "F8_E4M3", (130, 160), (128, 128))
    assert up.scale is not None and up.scale.name == f"{UP}.weight_scale_inv"
    assert up.nbytes == 130 * 160 + 4 * 4 == up.loaded_nbytes
    assert {m.name: m.part for m in plan.modules if m.part != "target"} == {
        "model.embed_tokens": "embedding", "lm_head": "head", "mtp.fc": "draft", Q: "draft", "mtp.norm": "draft",
    }  # fmt: skip


def test_parts_add_up_to_the_file(tmp_path: Path) -> None:
    ckpt = open_checkpoint(qwen_fp8(tmp_path / "x"))
    plan = ckpt.plan()
    parts = [plan.nbytes(part) for part in ("target", "draft", "embedding", "head", "unused")]
    assert sum(parts) == plan.nbytes() == sum(info.nbytes for info in ckpt.tensors.values())
    assert plan.nbytes("embedding") == 32 * 160 * 2
    with pytest.raises(ConfigError, match="part='drat'"):
        plan.nbytes("drat")


def test_an_exclusion_of_stored_fp8_switches_the_activations_off_and_says_so(tmp_path: Path) -> None:
    plan = open_checkpoint(qwen_fp8(tmp_path / "x")).plan(exclude=["*.down_proj"])
    assert treatment(plan) == {**PUBLISHED, DOWN: W8A16}
    assert "'*.down_proj'" in plan.by_name[DOWN].rule and "cannot be brought back" in plan.by_name[DOWN].rule


def test_mtp_fc_follows_the_checkpoint(tmp_path: Path) -> None:
    listed = open_checkpoint(qwen_fp8(tmp_path / "listed")).plan().by_name["mtp.fc"]
    assert (listed.weight, listed.rule) == ("bf16", "modules_to_not_convert lists 'mtp.fc': kept in BF16 as stored")
    unlisted = open_checkpoint(qwen_fp8(tmp_path / "unlisted", modules_to_not_convert=LISTED[:-1])).plan()
    assert unlisted.by_name["mtp.fc"].weight == "bf16"
    assert "does not list it" in unlisted.by_name["mtp.fc"].rule
    folder = shutil.copytree(CHECKPOINTS / "hf-qwen3_5-dense-mtpfc-fp8" / "ckpt", tmp_path / "stored")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "mtp_num_hidden_layers": 1}))  # transformers drops it
    stored = open_checkpoint(folder).plan().by_name["mtp.fc"]
    assert (stored.weight, stored.activation) == FP8 and "used as FP8" in stored.rule
    tensors = {**qwen_tensors(), "mtp.fc.weight": torch.randn(160, 320).to(E4M3),
               "mtp.fc.weight_scale_inv": torch.ones(2, 3)}  # fmt: skip
    config = {**FP8_CONFIG, "modules_to_not_convert": LISTED}
    both = open_checkpoint(write_checkpoint(tmp_path / "both", tensors, config)).plan()
    assert (both.by_name["mtp.fc"].weight, both.by_name["mtp.fc"].activation) == FP8
    assert "although modules_to_not_convert lists 'mtp.fc'" in both.by_name["mtp.fc"].rule
    assert "lists 1 modules that are stored as FP8" in both.warnings[0] and "'mtp.fc'" in both.warnings[0]


def test_model_format_changes_nothing_on_fp8_and_says_so(tmp_path: Path) -> None:
    plan = open_checkpoint(qwen_fp8(tmp_path / "x")).plan(model_format="fp8")
    assert treatment(plan) == PUBLISHED
    assert "model_format='fp8' changes nothing" in plan.by_name[UP].rule
    assert "model_format='fp8' does not quantise" in plan.by_name["mtp.fc"].rule


@pytest.mark.parametrize("entry", ["in_proj_a", "linear_attn.in_proj_a", "model.layers.0.linear_attn",
                                   "model.language_model.layers.0.linear_attn.in_proj_a", "re:.*in_proj_[ab]",
                                   r"model\.layers\.\d+\.linear_attn\.in_proj_a", "*in_proj_a"])  # fmt: skip
def test_what_a_published_entry_covers(tmp_path: Path, entry: str) -> None:
    ckpt = open_checkpoint(qwen_fp8(tmp_path / "x", modules_to_not_convert=[entry]))
    plan = ckpt.plan()
    assert f"lists {entry!r}" in plan.by_name[IN_A].rule
    assert "lists" not in plan.by_name[UP].rule and plan.warnings == ()


@pytest.mark.parametrize("entry", ["proj_a", "in_proj", "layers.0.linear_attn.in_proj", "linear_attn.in_proj_aa"])
def test_an_entry_ends_at_a_dot_and_one_that_covers_nothing_is_reported(tmp_path: Path, entry: str) -> None:
    plan = open_checkpoint(qwen_fp8(tmp_path / "x", modules_to_not_convert=["mtp.fc", entry])).plan()
    assert "does not list it" in plan.by_name[IN_A].rule
    (warning,) = plan.warnings
    assert "1 entries of modules_to_not_convert name no module" in warning and repr(entry) in warning


@pytest.mark.parametrize("second", ["in_proj_a", "re:.*in_proj_[ab]", "*in_proj_a"])
def test_a_shadowed_entry_is_not_reported(tmp_path: Path, second: str) -> None:
    plan = open_checkpoint(qwen_fp8(tmp_path / "x", modules_to_not_convert=[IN_A, second, "lm_head"])).plan()
    assert plan.warnings == ()


@pytest.mark.parametrize("entry", ["(a|aa)+[xyz]", "([.a-z0-9]|[.a-z0-9]{2})*[XYZ]"])
def test_a_catastrophic_pattern_ends_in_an_error_within_a_second(tmp_path: Path, entry: str) -> None:
    name = "a" * 60
    tensors = {**qwen_tensors(), f"{name}.weight": torch.ones(2, 2).bfloat16()}
    config = {**FP8_CONFIG, "modules_to_not_convert": [entry]}
    ckpt = open_checkpoint(write_checkpoint(tmp_path / "x", tensors, config))
    begun = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        ckpt.plan()
    assert time.process_time() - begun < 1
    assert "config.json" in str(caught.value) and repr(entry) in str(caught.value)
    assert "takes more than" in str(caught.value)


@pytest.mark.parametrize("entry", ["(unclosed", "[z-a]", "x" * 3000 + "*+", "(a{65535}){65535}", "(" * 900 + ")" * 900])
def test_a_pattern_that_is_none_is_an_error(tmp_path: Path, entry: str) -> None:
    ckpt = open_checkpoint(qwen_fp8(tmp_path / "x", modules_to_not_convert=[entry]))
    with pytest.raises(CheckpointError, match="neither a module name nor a regular expression"):
        ckpt.plan()


# a BF16 checkpoint


def test_a_plain_checkpoint_is_used_as_stored(tmp_path: Path) -> None:
    plan = open_checkpoint(bf16(tmp_path / "x")).plan()
    assert set(treatment(plan).values()) == {KEPT}
    assert plan.loaded_nbytes() == plan.nbytes()
    assert "not quantised: used as stored" in plan.by_name[UP].rule


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("exclude", [None, "published"])
def test_model_format_quantises_what_qwens_releases_quantise(
    tmp_path: Path, exclude: str | None, wrapped: bool
) -> None:
    plan = open_checkpoint(bf16(tmp_path / "x", wrapped)).plan(exclude=exclude, model_format="fp8")
    assert {name.replace("language_model.", ""): how for name, how in treatment(plan).items()} == PUBLISHED
    assert "'mtp.fc' of the published preset" in plan.by_name["mtp.fc"].rule
    up = next(module for module in plan.modules if module.name.endswith("up_proj"))
    assert (up.stored, up.scale, up.block) == ("BF16", None, (128, 128))
    assert (up.nbytes, up.loaded_nbytes) == (130 * 160 * 2, 130 * 160 + 4 * 4)


def test_exclude_none_quantises_every_linear_mtp_fc_too(tmp_path: Path) -> None:
    plan = open_checkpoint(bf16(tmp_path / "x")).plan(exclude="none", model_format="fp8")
    assert treatment(plan) == {**PUBLISHED, IN_A: FP8, "lm_head": FP8, "mtp.fc": FP8}


def test_a_list_replaces_the_published_one_unless_it_names_it(tmp_path: Path) -> None:
    ckpt = open_checkpoint(bf16(tmp_path / "x"))
    alone = treatment(ckpt.plan(exclude=["*.down_proj"], model_format="fp8"))
    assert alone == {**PUBLISHED, IN_A: FP8, "lm_head": FP8, "mtp.fc": FP8, DOWN: KEPT}
    added = treatment(ckpt.plan(exclude=["published", "*.down_proj"], model_format="fp8"))
    assert added == {**PUBLISHED, DOWN: KEPT}


def test_the_draft_may_differ(tmp_path: Path) -> None:
    ckpt = open_checkpoint(bf16(tmp_path / "x"))
    same = ckpt.plan(exclude=["mtp.*"], model_format="fp8")
    assert treatment(same)[Q] == KEPT and treatment(same)[UP] == FP8
    other = ckpt.plan(exclude="published", draft_exclude="none", model_format="fp8")
    assert treatment(other) == {**PUBLISHED, "mtp.fc": FP8}
    other = ckpt.plan(exclude="none", draft_exclude=["mtp.*"], model_format="fp8")
    assert treatment(other)["mtp.fc"] == treatment(other)[Q] == KEPT and treatment(other)["lm_head"] == FP8


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("pattern", ["model.layers.*.up_proj", "model.language_model.layers.*.up_proj",
                                     "model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj.weight"])  # fmt: skip
def test_either_root_matches(tmp_path: Path, pattern: str, wrapped: bool) -> None:
    plan = open_checkpoint(bf16(tmp_path / "x", wrapped)).plan(exclude=[pattern], model_format="fp8")
    kept = {m.name.replace("language_model.", "") for m in plan.modules if m.weight != "fp8" and m.kind == "linear"}
    assert kept == {UP}


@pytest.mark.parametrize("option", ["exclude", "draft_exclude"])
def test_a_pattern_that_matches_nothing_names_its_neighbours(tmp_path: Path, option: str) -> None:
    ckpt = open_checkpoint(bf16(tmp_path / "x"))
    with pytest.raises(ConfigError) as caught:
        ckpt.plan(**{option: ["mtp.fcc"]})
    assert str(caught.value).startswith(f"{option}: 'mtp.fcc' matches no module")
    assert "'mtp.fc'" in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [{"exclude": 7}, {"exclude": [7]}, {"exclude": [""]}, {"exclude": ["none", "mtp.*"]}, {"draft_exclude": {"a": 1}},
     {"model_format": "fp4"}, {"model_format": ""}],
)  # fmt: skip
def test_settings_that_are_none(tmp_path: Path, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        open_checkpoint(bf16(tmp_path / "x")).plan(**settings)  # type: ignore[arg-type]


def test_a_single_glob_and_a_set_will_do(tmp_path: Path) -> None:
    ckpt = open_checkpoint(bf16(tmp_path / "x"))
    expected = treatment(ckpt.plan(exclude=["mtp.*"], model_format="fp8"))
    assert treatment(ckpt.plan(exclude="mtp.*", model_format="fp8")) == expected
    assert treatment(ckpt.plan(exclude={"mtp.*"}, model_format="fp8")) == expected  # type: ignore[arg-type]


def test_biases_belong_to_their_module(tmp_path: Path) -> None:
    tensors = {"model.layers.0.self_attn.q_proj.bias": torch.ones(4).bfloat16(),
               "model.layers.0.self_attn.q_proj.weight": torch.ones(4, 4).bfloat16()}  # fmt: skip
    (module,) = open_checkpoint(write_checkpoint(tmp_path / "x", tensors)).plan().modules
    assert (module.name, module.shape, module.nbytes) == ("model.layers.0.self_attn.q_proj", (4, 4), 40)


def test_other_families_draft_heads_are_found() -> None:
    plan = open_checkpoint(CHECKPOINTS / "ds-v3-ragged-mtp" / "ckpt").plan()
    draft = {module.name for module in plan.modules if module.part == "draft"}
    assert "model.layers.1.eh_proj" in draft and "model.layers.1.shared_head.head" in draft
    assert not any(name.startswith("model.layers.0.") for name in draft)
    eh_proj = plan.by_name["model.layers.1.eh_proj"]
    assert eh_proj.weight == "bf16" and "does not list it" in eh_proj.rule


def test_layers_stand_in_their_order(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": torch.ones(1, 1).bfloat16() for i in (10, 2, 0, 1)}
    tensors["mtp.norm.weight"] = tensors["model.embed_tokens.weight"] = torch.ones(1, 1).bfloat16()
    plan = open_checkpoint(write_checkpoint(tmp_path / "x", tensors, config={"num_hidden_layers": 11})).plan()
    assert [module.name.split(".")[2] for module in plan.modules if "layers" in module.name] == ["0", "1", "2", "10"]
    assert plan.modules[0].name == "model.embed_tokens" and plan.modules[-1].name == "mtp.norm"


# what no run loads


def test_layers_that_config_json_does_not_count_are_unused(tmp_path: Path) -> None:
    plain = qwen_tensors()
    more = {
        **plain,
        "model.layers.1.mlp.up_proj.weight": torch.ones(8, 16).bfloat16(),
        "model.layers.2.A_log": torch.ones(4),
        "mtp.layers.1.self_attn.q_proj.weight": torch.ones(16, 16).bfloat16(),
        "model.visual.blocks.0.attn.qkv.weight": torch.ones(8, 8).bfloat16(),
    }
    ckpt = open_checkpoint(write_checkpoint(tmp_path / "x", more, FP8_CONFIG))
    plan, fewer = ckpt.plan(), open_checkpoint(write_checkpoint(tmp_path / "y", plain, FP8_CONFIG)).plan()
    unused = {module.name: module for module in plan.modules if module.part == "unused"}
    assert {f"{name}.weight" if name[-1] != "g" else name for name in unused} == more.keys() - plain.keys()
    assert plan.loaded_nbytes() == fewer.loaded_nbytes() == fewer.nbytes()
    assert plan.nbytes("unused") == 8 * 16 * 2 + 4 * 4 + 16 * 16 * 2 + 8 * 8 * 2 == plan.nbytes() - fewer.nbytes()
    assert "behind the last layer that config.json counts (1, by num_hidden_layers)" in plan.by_name[
        "model.layers.1.mlp.up_proj"].rule  # fmt: skip
    assert "vision tower" in unused["model.visual.blocks.0.attn.qkv"].rule
    said = [text for text in plan.warnings if "not loaded" in text]
    assert len(said) == 2 and all(text.startswith(f"{tmp_path / 'x' / 'config.json'}: ") for text in said)
    assert "2 tensors ('model.layers.1.mlp.up_proj.weight' first)" in said[0] and "mtp_num_hidden_layers" in said[1]
    assert "unused 912" in str(plan)


def test_what_is_unused_is_neither_quantised_nor_a_reason_to_warn_of_the_list(tmp_path: Path) -> None:
    extra = {"model.layers.1.mlp.up_proj.weight": torch.ones(128, 128).bfloat16()}
    tensors = {name: t.bfloat16() for name, t in qwen_tensors().items() if not name.endswith("_inv")} | extra
    ckpt = open_checkpoint(write_checkpoint(tmp_path / "x", tensors))
    module = ckpt.plan(exclude="none", model_format="fp8").by_name["model.layers.1.mlp.up_proj"]
    assert (module.weight, module.activation, module.block, module.loaded_nbytes) == ("bf16", "none", None, 0)
    listed = {**FP8_CONFIG, "modules_to_not_convert": [*LISTED, r"re:.*layers\.1\..*"]}
    plan = open_checkpoint(write_checkpoint(tmp_path / "y", {**qwen_tensors(), **extra}, listed)).plan()
    assert plan.by_name["model.layers.1.mlp.up_proj"].part == "unused"
    assert not [text for text in plan.warnings if "name no module" in text]


@pytest.mark.parametrize("head", [0, None])
def test_a_head_that_config_json_does_not_count_is_unused(tmp_path: Path, head: int | None) -> None:
    folder = write_checkpoint(tmp_path / "x", qwen_tensors(), FP8_CONFIG, config={"mtp_num_hidden_layers": head})
    plan = open_checkpoint(folder).plan()
    assert plan.nbytes("draft") == 0 and plan.by_name["mtp.fc"].part == "unused"
    assert any("of which config.json counts 0 (mtp_num_hidden_layers)" in text for text in plan.warnings)


def test_a_head_that_is_promised_and_missing_is_a_warning(tmp_path: Path) -> None:
    tensors = {name: t for name, t in qwen_tensors().items() if not name.startswith("mtp.")}
    (said,) = open_checkpoint(write_checkpoint(tmp_path / "x", tensors, FP8_CONFIG)).plan().warnings
    assert said.startswith(f"{tmp_path / 'x' / 'config.json'}: mtp_num_hidden_layers is 1") and "Set it to 0" in said


# how it is shown


def test_the_text_table_is_aligned_and_complete(tmp_path: Path) -> None:
    plan = open_checkpoint(qwen_fp8(tmp_path / "x")).plan()
    lines = str(plan).splitlines()
    assert len(lines) == 1 + len(plan.modules) + 1
    start = lines[0].index("rule")
    for line, module in zip(lines[1:], plan.modules, strict=False):
        assert line[start:] == module.rule and line.startswith(module.name)
    assert lines[-1].startswith("10 modules, 3 in FP8; ")


def test_names_are_escaped_and_long_plans_are_cut(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>&\x1b[31m"
    names = {f"{evil}{i}.weight": torch.ones(1, 1).bfloat16() for i in range(450)}
    plan = open_checkpoint(write_checkpoint(tmp_path / "x", names)).plan()
    html, text = plan._repr_html_(), str(plan)
    assert "<script" not in html and "&lt;script&gt;" in html
    assert "\x1b" not in html and "\x1b" not in text
    assert text.count("\n") < 410 and "and 50 modules more" in text and "50 modules more" in html
    assert open_checkpoint(tmp_path / "x").plan(exclude=["<script>*"], model_format="fp8").modules


def test_a_warning_reaches_both(tmp_path: Path) -> None:
    plan = open_checkpoint(qwen_fp8(tmp_path / "x", modules_to_not_convert=["<b>nothing</b>"])).plan()
    assert "warning: " in str(plan) and "<b>" not in plan._repr_html_()


def test_bytes_are_those_of_a_run_and_stored_ones_are_named_so(tmp_path: Path) -> None:
    plan = open_checkpoint(bf16(tmp_path / "x")).plan(exclude="none", model_format="fp8")
    header, *lines = str(plan).splitlines()
    assert header.split()[-4:-1] == ["bytes", "stored", "bytes"]
    up = plan.by_name["model.layers.0.mlp.up_proj"]
    line = next(line for line in lines if line.startswith(up.name + " "))
    assert f"{up.loaded_nbytes:,}  " in line and f"  {up.nbytes:,}  " in line
    assert f"{plan.loaded_nbytes():,} bytes as planned (" in str(plan) and f"{plan.nbytes():,} as stored" in str(plan)


def test_a_plan_in_a_line(tmp_path: Path) -> None:
    plan = open_checkpoint(bf16(tmp_path / "x")).plan(exclude="none", model_format="fp8")
    fp8 = sum(module.weight == "fp8" for module in plan.modules)
    start = f"Plan({len(plan.modules)} modules, {fp8} in FP8, {plan.loaded_nbytes():,} bytes as planned"
    assert repr(plan).startswith(start) and len(repr(plan)) < 120 and "\n" not in repr(plan)
    warned = open_checkpoint(qwen_fp8(tmp_path / "y", modules_to_not_convert=["nothing"])).plan()
    assert repr(warned).endswith(f", {len(warned.warnings)} warning)")


@pytest.mark.parametrize("setting", [{"exclude": "none"}, {"exclude": ["mtp.*"]}, {"draft_exclude": "none"}], ids=str)
def test_excluding_where_nothing_is_fp8_is_refused_by_the_plan_and_by_loading(bundled: Path, setting: dict) -> None:
    """`none` would not mean all FP8 there, and a list would keep nothing out: said alike in both places."""
    for ask in (open_checkpoint(bundled).plan, lambda **how: load_model(bundled, **how)):
        with pytest.raises(ConfigError, match="not quantised and nothing would be kept from FP8.*model_format='fp8'"):
            ask(**setting)
        ask(**setting, model_format="fp8")
    assert open_checkpoint(bundled).plan(exclude="published").modules


# size


def test_thousands_of_tensors_open_and_plan_quickly(tmp_path: Path) -> None:
    weight_map: dict[str, str] = {}
    for shard in range(15):
        header, offset = {}, 0
        for expert in range(1000):
            stem = f"model.layers.{shard}.mlp.experts.{expert}.up_proj.weight"
            for name, dtype, shape, size in ((stem, "F8_E4M3", [2048, 7168], 2048 * 7168),
                                             (f"{stem}_scale_inv", "F32", [16, 56], 16 * 56 * 4)):  # fmt: skip
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
                offset += size
        file = f"model-{shard:05d}.safetensors"
        text = json.dumps(header).encode()
        with open(tmp_path / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + offset)  # sparse: nothing of it is on disk
        weight_map |= dict.fromkeys(header, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    listed = [f"model.layers.{i}.mlp.gate" for i in range(900)]
    config = {"quantization_config": {**FP8_CONFIG, "modules_to_not_convert": listed}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    begun = time.process_time()
    plan = open_checkpoint(tmp_path).plan()
    assert len(plan.modules) == 15_000 and "900 entries" in plan.warnings[0]
    # quadratic work over 30 000 tensors would take minutes
    assert time.process_time() - begun < 10


def test_plans_need_no_more_than_headers(tmp_path: Path) -> None:
    folder = qwen_fp8(tmp_path / "x")
    before = treatment(open_checkpoint(folder).plan())
    zeros = {name: torch.zeros_like(tensor) for name, tensor in qwen_tensors().items()}
    tensor_file(folder / "model.safetensors", zeros)  # scales of zero would be refused if they were read
    assert treatment(open_checkpoint(folder).plan()) == before

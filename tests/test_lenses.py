"""What engines make of a checkpoint and its exclusion list, on published layouts and on faults that were reported."""

import json
import random
import time
from dataclasses import replace

import pytest

from lens_models import (
    CT,
    DEEPSEEK,
    FP8,
    LLAMA,
    MODELOPT,
    QUARK,
    QWEN,
    QWEN_NEXT,
    QWEN_PLAIN,
    QWEN_TEXT,
    deepseek,
    llama,
    qwen,
    views,
)
from mtplab.checkpoint import open_checkpoint
from mtplab.checkpoint.audit import Finding
from mtplab.checkpoint.lenses import Look, View, lenses, look, recommended_exclusions

ENGINES = [engine.name for engine in lenses()]


def fp8(entries=None, key="modules_to_not_convert", **more):
    return {**FP8, **({} if entries is None else {key: entries}), **more}


def built(found: Look, module: str) -> str:
    return {verdict.module: verdict.built for verdict in found.verdicts}[module]


def plain_names(modules):
    return [view.name for view in modules if not view.stored_fp8]


# published layouts, and the list under which all agree


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize(
    ("method", "content", "key"),
    [
        ("fp8", FP8, "modules_to_not_convert"),
        ("fp8", FP8, "ignored_layers"),
        ("compressed-tensors", CT, "ignore"),
        ("modelopt", MODELOPT, "ignore"),
        ("quark", QUARK, "exclude"),
    ],
)
def test_under_the_recommended_list_all_engines_agree(method, content, key, moe):
    modules = qwen(moe=moe)
    found = look(modules, method, {**content, key: recommended_exclusions(modules, method)}, QWEN)
    expected = {name: "right" for name in ENGINES}
    if method != "fp8":
        expected["lmdeploy"] = "load error"  # reads no other method of 8 bits
    if method == "modelopt":
        expected["transformers"] = "silent"  # does not know the method, and goes on with raw codes
    if method == "quark":
        expected |= {"TensorRT-LLM": "not known", "transformers": "not known"}
    assert {item.engine: item.worst for item in found.looks} == expected, str(found)


def test_the_recommended_list_holds_when_the_model_is_loaded_as_text_only():
    modules = qwen()
    entries = recommended_exclusions(modules, "fp8")
    assert "model.language_model.layers.0.linear_attn.in_proj_a" in entries
    assert "model.layers.0.linear_attn.in_proj_a" in entries and "lm_head" in entries
    found = look(modules, "fp8", fp8(entries), QWEN_TEXT)
    assert all(item.worst == "right" for item in found.looks), str(found)


def test_a_tied_head_is_recommended_too_and_a_quantised_one_is_not():
    """transformers quantises the head that a list leaves out, whether it has a tensor of its own or not."""
    tied = [view for view in llama() if view.name != "lm_head"]
    assert recommended_exclusions(tied, "fp8") == ["lm_head"]
    assert recommended_exclusions([*tied, View("lm_head", "linear", "head", True, True)], "fp8") == []


@pytest.mark.parametrize("method", ["fp8", "modelopt"])
def test_tensorrt_llm_writes_qwens_lists_anew(method):
    """modeling_qwen3_5.py: in_proj_a alone keeps in_proj_ba plain, in_proj_z alone in_proj_qkvz."""
    modules, root = qwen(), "model.language_model.layers.0.linear_attn."
    content = fp8() if method == "fp8" else dict(MODELOPT)
    content["modules_to_not_convert" if method == "fp8" else "ignore"] = [f"{root}in_proj_a", f"{root}in_proj_z"]
    found = look(modules, method, content, QWEN)["TensorRT-LLM"]
    assert built(found, f"{root}in_proj_b") == "plain"
    # an HF fp8 file's qkvz is multiplied out at load, and so is right whatever the list says
    assert built(found, f"{root}in_proj_qkv") == ("fp8" if method == "fp8" else "plain")


def test_what_no_list_can_save_is_said():
    """A plain projection that lmdeploy builds without a name, and a fused module stored in part quantised."""
    modules = qwen(plain=(*QWEN_PLAIN, "layers.0.linear_attn.out_proj"))
    found = look(modules, "fp8", fp8(recommended_exclusions(modules, "fp8")), QWEN)
    assert {item.engine for item in found.looks if item.worst != "right"} == {"lmdeploy"}
    assert found["lmdeploy"].worst == "lossy" and "without a name" in found["lmdeploy"].disagreements[0].cause

    modules = qwen(plain=(*QWEN_PLAIN, "self_attn.k_proj"))
    found = look(modules, "fp8", fp8(recommended_exclusions(modules, "fp8")), QWEN)
    assert found["vLLM"].worst == found["SGLang"].worst == "load error"
    assert found["transformers"].worst == "right"  # keeps q, k and v apart


def test_published_deepseek_has_no_list_and_loads():
    """eh_proj and routers are plain and named nowhere (DeepSeek-V3's config.json)."""
    found = look(deepseek(experts=2), "fp8", fp8(), DEEPSEEK)
    outcomes = {item.engine: item.worst for item in found.looks}
    assert outcomes == {**{name: "right" for name in ENGINES}, "lmdeploy": "lossy"}
    only = found["lmdeploy"].disagreements
    assert [item.modules for item in only] == [("model.layers.61.eh_proj",)]  # lmdeploy pull 4945, for GLM


# what was reported


def test_wrapper_root_in_the_list_and_the_text_model_loaded():
    """transformers issue 48349: the list says model.language_model., the text model model.; fixed for fp8 since."""
    modules = qwen()
    entries = [name for name in plain_names(modules) if name != "lm_head"] + ["lm_head"]
    found = look(modules, "fp8", fp8(entries), QWEN_TEXT)["transformers"]
    assert found.worst == "right" and any("48349" in note for note in found.notes)
    # compressed-tensors' own reader renames nothing
    other = look(modules, "compressed-tensors", {**CT, "ignore": entries}, QWEN_TEXT)["transformers"]
    assert built(other, "model.language_model.layers.0.linear_attn.in_proj_a") == "fp8"
    assert "asks for 'model.layers.0.linear_attn.in_proj_a'" in other.disagreements[0].sentence


def test_text_root_in_the_list_and_the_wrapper_loaded():
    modules = qwen()
    entries = [name.replace("model.language_model.", "model.") for name in plain_names(modules)]
    found = look(modules, "fp8", fp8(entries), QWEN)
    outcomes = {item.engine: item.worst for item in found.looks}
    assert outcomes.pop("vLLM") == "silent"
    # SGLang finds `layers.0…` anywhere; to transformers `…language_model.layers.0…` ends with `model.layers.0…`
    assert set(outcomes.values()) == {"right"}


def test_mtp_fc_unlisted_is_wrong_where_it_is_not_plain_by_construction():
    """vLLM pull 38650: plain on disk, unlisted; worked around for NVFP4 only."""
    modules = qwen()
    entries = [name for name in plain_names(modules) if name != "mtp.fc"]
    found = look(modules, "fp8", fp8(entries), QWEN)
    assert {item.engine: built(item, "mtp.fc") for item in found.looks} == {
        "vLLM": "fp8",
        "SGLang": "plain",
        "lmdeploy": "plain",
        "TensorRT-LLM": "unknown",
        "transformers": "ignored",
    }
    assert found["vLLM"].worst == "silent"
    for algorithm, expected in (("NVFP4", "plain"), ("FP8", "fp8")):
        content = {"quantization": {"quant_algo": algorithm, "exclude_modules": [*entries, "mtp.layers.0*"]}}
        assert built(look(modules, "modelopt", content, QWEN)["vLLM"], "mtp.fc") == expected


def test_a_plain_mtp_head_that_is_not_listed():
    """vLLM pull 37667: built quantised, stored in BF16, 0 % accepted."""
    drafts = tuple(view.name for view in qwen() if view.part == "draft")
    modules = qwen(plain=(*QWEN_PLAIN, *drafts))
    listed = [name for name in plain_names(modules) if not name.startswith("mtp.")]
    found = look(modules, "fp8", fp8(listed), QWEN)
    assert found["vLLM"].worst == found["SGLang"].worst == "silent"
    assert found["lmdeploy"].worst == "lossy"  # quantised at load
    assert found["transformers"].worst == "right"  # never loads it
    names = {name for item in found["vLLM"].disagreements for name in item.modules}
    assert names == set(drafts)
    # `mtp` covers what lies below it in one engine only
    short = look(modules, "fp8", fp8([*listed, "mtp"]), QWEN)
    assert (short["vLLM"].worst, short["SGLang"].worst, short["lmdeploy"].worst) == ("silent", "right", "lossy")
    assert "'mtp'" in short["vLLM"].disagreements[0].sentence


def test_bare_names_are_read_by_some_engines_only():
    """MiniMax-M2.7 lists `gate`; vLLM pull 44628: short names never match full ones."""
    modules = qwen()
    found = look(modules, "fp8", fp8(["in_proj_a", "in_proj_b", "lm_head", "mtp.fc"]), QWEN)
    outcomes = {item.engine: item.worst for item in found.looks}
    assert outcomes == {
        "vLLM": "silent",
        "SGLang": "right",
        "lmdeploy": "right",
        "TensorRT-LLM": "not known",
        "transformers": "right",
    }
    assert found.sentence.startswith("Loads right in SGLang, lmdeploy and transformers; silently wrong in vLLM: it ")
    assert "so the entry 'in_proj_a' does not cover it" in found["vLLM"].disagreements[0].sentence


def test_a_fused_module_listed_in_part():
    """vLLM and SGLang stop; lmdeploy goes by q_proj, TensorRT-LLM by any member."""
    for listed, lmdeploy in (("q_proj", "plain"), ("k_proj", "fp8")):
        name = f"model.layers.0.self_attn.{listed}"
        found = look(llama(), "fp8", fp8([name, "lm_head"]), LLAMA)
        states = {item.engine: built(item, "model.layers.0.self_attn.v_proj") for item in found.looks}
        assert states["vLLM"] == states["SGLang"] == "error"
        assert states["lmdeploy"] == lmdeploy and states["TensorRT-LLM"] == "plain" and states["transformers"] == "fp8"
        first = found["vLLM"].disagreements[0]
        assert (
            first.outcome == "load error" and len(first.modules) == 3 and "qkv_proj is built as one" in first.sentence
        )


def test_modelopt_layers_of_the_mtp_head_without_its_fc():
    """Qwen3.5-397B-NVFP4: exclude_modules has mtp.layers.0*, not mtp.fc."""
    drafts = tuple(view.name for view in qwen() if view.part == "draft")
    modules = qwen(plain=(*QWEN_PLAIN, *drafts))
    listed = [name for name in plain_names(modules) if not name.startswith("mtp.")]
    content = {"quantization": {"quant_algo": "FP8", "exclude_modules": [*listed, "mtp.layers.0*"]}}
    found = look(modules, "modelopt", content, QWEN)
    assert [item.modules for item in found["vLLM"].disagreements] == [("mtp.fc",)]
    assert found["SGLang"].worst == "right"
    wider = {"quantization": {"quant_algo": "FP8", "exclude_modules": [*listed, "mtp*"]}}
    assert look(modules, "modelopt", wider, QWEN)["vLLM"].worst == "right"


def test_vllm_takes_modelopts_first_key_that_is_there():
    """modelopt.py: config.get("ignore", config.get("exclude_modules", [])), an empty list too."""
    kept = ["model.layers.0.self_attn.o_proj", "lm_head"]
    modules = views([view.name for view in llama()], kept, LLAMA)
    for content, worst in (
        ({"exclude_modules": kept}, "right"),
        ({"ignore": kept, "exclude_modules": []}, "right"),
        ({"ignore": [], "exclude_modules": kept}, "silent"),
    ):
        assert look(modules, "modelopt", {**MODELOPT, **content}, LLAMA)["vLLM"].worst == worst, content


def test_vllm_takes_modelopts_own_object_alone():
    """modelopt.py: with a "quantization" object no key beside it is asked for."""
    kept = ["model.layers.0.self_attn.o_proj", "lm_head"]
    modules = views([view.name for view in llama()], kept, LLAMA)
    inner = {"quant_algo": "FP8"}
    for content, worst in (
        ({"quantization": {**inner, "exclude_modules": kept}, "ignore": []}, "right"),
        ({"quantization": inner, "ignore": kept}, "silent"),
        ({"quantization": {}, "quant_algo": "FP8", "ignore": kept}, "load error"),
        ({"quantization": {**inner, "exclude_modules": None}, "ignore": kept}, "load error"),
    ):
        assert look(modules, "modelopt", content, LLAMA)["vLLM"].worst == worst, content


def test_a_regular_expression_for_the_router_takes_gate_proj_too():
    """`re:.*gate` is matched from the start, not to the end (compressed-tensors)."""
    modules = llama()
    found = look(modules, "compressed-tensors", {**CT, "ignore": ["lm_head", "re:.*gate"]}, LLAMA)
    assert built(found["transformers"], "model.layers.0.mlp.gate_proj") == "plain"
    assert found["transformers"].worst == "silent"
    # vLLM meets it in the fused name itself, SGLang in one member of two
    assert built(found["vLLM"], "model.layers.0.mlp.up_proj") == "plain"
    assert found["SGLang"].disagreements[0].outcome == "load error"
    closed = look(modules, "compressed-tensors", {**CT, "ignore": ["lm_head", "re:.*gate$"]}, LLAMA)
    assert closed["transformers"].worst == closed["vLLM"].worst == "right"


def test_one_expert_in_the_list_keeps_all_of_a_layers_experts_out():
    modules = qwen(moe=True)
    listed = [*plain_names(modules), "model.language_model.layers.1.mlp.experts.0.down_proj"]
    found = look(modules, "fp8", fp8(listed), QWEN)
    for engine in ("vLLM", "SGLang", "lmdeploy"):
        assert built(found[engine], "model.language_model.layers.1.mlp.experts.1.gate_proj") == "plain", engine
    assert found["vLLM"].worst == found["lmdeploy"].worst == "load error"
    assert built(found["transformers"], "model.language_model.layers.1.mlp.experts.1.gate_proj") == "fp8"


def test_lmdeploy_builds_deepseek_without_names():
    """models/deepseek_v2.py passes no prefix: `experts` is inside any entry about any expert."""
    modules = deepseek(layers=5, experts=2)
    config = {**DEEPSEEK, "num_hidden_layers": 5}
    found = look(modules, "fp8", fp8(["lm_head", "model.layers.3.mlp.shared_experts.down_proj"]), config)["lmdeploy"]
    verdicts = {verdict.module: verdict for verdict in found.verdicts}
    routed = verdicts["model.layers.4.mlp.experts.1.up_proj"]
    assert (routed.runtime_name, routed.built) == ("experts", "plain")
    assert verdicts["model.layers.4.mlp.shared_experts.gate_proj"].runtime_name == "shared_experts.gate_up_proj"
    assert verdicts["model.layers.4.self_attn.q_a_proj"].built == "fp8"


def test_sglang_asks_for_qwen_nexts_draft_as_the_first_layer():
    """models/qwen3_next_mtp.py builds it under `model`: its own entries do not count, the target's do."""
    names = [f"{root}.{end}" for root in ("model.layers.0", "mtp.layers.0") for end in ("self_attn.o_proj",)]
    modules = views(names, ("mtp.layers.0.self_attn.o_proj",), QWEN_NEXT)
    found = look(modules, "fp8", fp8(["lm_head", "mtp.layers.0.self_attn.o_proj"]), QWEN_NEXT)
    assert found["vLLM"].worst == "right" and found["SGLang"].worst == "silent"
    assert found["SGLang"].disagreements[0].modules == ("mtp.layers.0.self_attn.o_proj",)


def test_an_empty_list_and_none_differ_for_the_head():
    """transformers keeps lm_head plain by itself only where there is no list at all (quantizers/base.py)."""
    for entries, expected in ((None, "plain"), ([], "fp8"), (["mtp.fc"], "fp8"), (["lm_head"], "plain")):
        assert built(look(llama(), "fp8", fp8(entries), LLAMA)["transformers"], "lm_head") == expected


def test_a_stored_scale_decides_how_loudly_it_fails():
    modules = [View("model.layers.0.mlp.down_proj", "linear", "target", True, scale) for scale in (True, False)]
    content = fp8(["model.layers.0.mlp.down_proj"])
    assert [look([view], "fp8", content, LLAMA)["vLLM"].worst for view in modules] == ["load error", "silent"]


# methods that an engine does not read


@pytest.mark.parametrize(
    ("method", "content", "refused", "unknown"),
    [
        ("fbgemm_fp8", {"activation_scale_ub": 1200.0}, {"SGLang", "lmdeploy"}, {"TensorRT-LLM"}),
        ("torchao", {"quant_type": {}}, {"SGLang", "lmdeploy"}, {"TensorRT-LLM", "transformers"}),
        ("quark", QUARK, {"lmdeploy"}, {"TensorRT-LLM", "transformers"}),
        (
            "auto-round",
            {"data_type": "fp", "group_size": -1, "packing_format": "auto_round:fp8_static"},
            {"vLLM", "SGLang", "lmdeploy"},
            {"TensorRT-LLM", "transformers"},
        ),
        ("mxfp8", FP8, {"lmdeploy"}, set()),
        ("compressed-tensors", CT, {"lmdeploy"}, set()),
        ("modelopt", {"quant_algo": "MIXED_PRECISION"}, {"lmdeploy"}, {"vLLM", "SGLang", "TensorRT-LLM"}),
        ("nonsense", {}, {"vLLM", "SGLang", "lmdeploy", "TensorRT-LLM"}, set()),
    ],
)
def test_methods_that_are_not_read_are_said(method, content, refused, unknown):
    found = look(llama(), method, content, LLAMA)
    assert {item.engine for item in found.looks if item.status == "refused"} == refused
    assert {item.engine for item in found.looks if item.status == "not known"} == unknown
    assert all(item.engine in found.sentence for item in found.looks)


def test_auto_round_in_vllm_goes_by_blocks_and_extra_config():
    modules = qwen(root="model.")
    content = {
        "quant_method": "auto-round",
        "data_type": "fp",
        "bits": 8,
        "group_size": [128, 128],
        "packing_format": "auto_round:fp8",
        "block_name_to_quantize": "model.layers",
        "extra_config": {r".*in_proj_[ab]": {"bits": 16}, "model.layers.3.mlp.up_proj": {"bits": 8}},
    }
    found = look(modules, "auto-round", content, QWEN_TEXT)["vLLM"]
    assert built(found, "model.layers.0.linear_attn.in_proj_a") == "plain"
    assert built(found, "model.layers.3.mlp.up_proj") == "fp8"
    assert built(found, "mtp.layers.0.mlp.up_proj") == "plain"  # beside the blocks
    assert found.worst == "load error"


def test_targets_of_compressed_tensors():
    content = json.loads(json.dumps(CT))
    content["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    found = look(llama(), "compressed-tensors", {**content, "ignore": ["lm_head"]}, LLAMA)
    name = "model.layers.0.mlp.down_proj"
    states = {item.engine: built(item, name) for item in found.looks if item.status == "judged"}
    assert states["vLLM"] == states["transformers"] == "plain" and states["SGLang"] == "error"


# what comes out


def test_sixty_layers_are_one_disagreement_and_all_names_are_kept():
    names = [f"model.layers.{i}.self_attn.o_proj" for i in range(60)]
    found = look(views(names, names, LLAMA), "fp8", fp8(["lm_head"]), LLAMA)["vLLM"]
    assert len(found.disagreements) == 1 and list(found.disagreements[0].modules) == names
    assert "60 modules ('model.layers.0.self_attn.o_proj' first)" in found.disagreements[0].sentence


def test_looks_can_be_read_and_stored():
    found = look(qwen(), "fp8", fp8(["in_proj_a"]), QWEN)
    stored = json.loads(json.dumps(found.to_dict(verdicts=True)))
    assert [item["engine"] for item in stored["engines"]] == ENGINES
    assert all(item["sources"] and item["version"] for item in stored["engines"])
    first = stored["engines"][0]
    assert sum(first["counts"].values()) == len(first["verdicts"]) == len(qwen())
    assert first["disagreements"][0].keys() == {"modules", "built", "stored", "outcome", "cause", "sentence"}
    table = str(found).splitlines()
    assert " ".join(table[0].split()) == "engine version by its list FP8 plain differ not judged not loaded MTP head"
    assert found.sentence in table and all(any(line.startswith(name) for line in table) for name in ENGINES)


@pytest.mark.parametrize("method", ["fp8", "mxfp8", "modelopt", "compressed-tensors", "quark", "auto-round", "torchao"])
def test_configs_of_any_shape_end_in_a_look(method):
    """Nothing in a config that nobody vouches for escapes as another error."""
    keys = "ignore ignored_layers modules_to_not_convert exclude exclude_modules quantization config_groups targets "
    keys += "extra_config block_name_to_quantize weight_block_size activation_scheme quant_algo export fmt quant_type "
    keys += "default _data module_fqn_to_config weights strategy num_bits bits group_size packing_format data_type"
    values = [None, 0, -1, 1.5, True, "", "fp8", "FP8", "re:.*(", "*", [], {}, ["lm_head"], [None], [["x"]], "static"]
    source = random.Random(method)

    def made(depth):
        if depth == 0 or source.random() < 0.5:
            return source.choice([*values, ["re:[", "*a", "", "(?i)x", "re:.*", "mtp", "a{99999}"]])
        return {key: made(depth - 1) for key in source.sample(keys.split(), 6)}

    for _ in range(150):
        content = {key: made(3) for key in source.sample(keys.split(), 12)}
        config = source.choice(
            [QWEN, QWEN_TEXT, DEEPSEEK, QWEN_NEXT, LLAMA, {}, {"architectures": 3, "text_config": []}]
        )
        found = look(llama(), method, content, config)
        assert len(found.looks) == len(ENGINES)
        json.dumps(found.to_dict(verdicts=True))
        assert str(found)


def test_lmdeploy_takes_every_block_for_128():
    """nn/linear/blocked_fp8.py sets it; weight_block_size is not asked for."""
    found = look(llama(), "fp8", fp8(["lm_head"], weight_block_size=[64, 64]), LLAMA)
    assert found["lmdeploy"].status == "not known" and "128x128" in found["lmdeploy"].summary
    static = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    assert look(llama(), "fp8", static, LLAMA)["lmdeploy"].worst == "right"


@pytest.mark.serial
def test_deepseeks_modules_take_less_than_a_second_and_a_half():
    modules = deepseek()
    assert len(modules) > 45_000
    content = fp8(plain_names(modules))
    begun = time.process_time()
    look(modules, "fp8", content, DEEPSEEK)
    assert time.process_time() - begun < 1.5


def test_what_right_does_not_say_is_said(bundled_fp8):
    audit = open_checkpoint(bundled_fp8).audit()
    assert audit.looks is not None
    heads = {item.engine: audit.looks.head_in(item) for item in audit.looks.looks}
    assert heads["vLLM"] == heads["lmdeploy"] == "as stored"
    assert (heads["transformers"], heads["TensorRT-LLM"]) == ("not loaded", "not judged")
    caveats = audit.looks.caveats()
    assert "transformers does not load the MTP head." in caveats and caveats[0].startswith("Judged by names")
    assert all(text in str(audit).replace("\n  ", " ") for text in caveats)
    assert audit.reading == f"By names and lists: {audit.looks.sentence}"
    wrong = replace(audit, findings=(Finding("error", "x", "y"), *audit.findings))
    assert wrong.reading.endswith("But the error found holds all the same.")

"""The transformers lens against transformers: the same names and entries, and a model's modules as it replaces them."""

import re

import pytest
import torch
from transformers import (
    FineGrainedFP8Config,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)
from transformers.integrations.finegrained_fp8 import FP8Linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from lens_models import FP8, QWEN, QWEN_TEXT, qwen_names, views
from mtplab.checkpoint.lenses import look
from mtplab.checkpoint.lenses.matching import RULES, Unit

NAMES = [
    f"{root}{end}"
    for root in ("model.layers.1.", "model.layers.11.", "model.language_model.layers.1.", "model.visual.blocks.1.")
    for end in (
        "self_attn.q_proj",
        "mlp.gate",
        "mlp.gate_proj",
        "mlp.my_gate",
        "mlp.experts",
        "mlp.shared_expert_gate",
        "linear_attn.in_proj_a",
    )
] + ["lm_head", "model.lm_head", "gate"]
ENTRIES = [
    *NAMES,
    "gate",
    "mlp.gate",
    "_gate",
    "in_proj_a",
    "a",
    "model.layers.1",
    "model.layers.1.",
    "model.layers",
    "model.lay",
    "model",
    "layers.1",
    "proj",
    "model.*",
    ".*gate",
    ".*gate$",
    ".*mlp",
    "model.layers.*.mlp.gate",
    "model.layers.[0-9]+.mlp",
    "(model|gate)",
    "model.layers.1|lm_head",
    "model.visual.*",
    r"model\.layers\.\d\.mlp",
    ".*",
    "re:.*gate",
]

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "tie_word_embeddings": False,
}
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}


@pytest.mark.parametrize("entry", ENTRIES)
def test_each_entry_is_read_as_transformers_reads_it(entry):
    rule = RULES["regex or end"]([entry], "test")
    read = {name: rule.answer(Unit(name, (name,))).excluded for name in NAMES}
    assert read == {name: not should_convert_module(name, [entry]) for name in NAMES}


def test_all_entries_together_and_none():
    for entries in (ENTRIES[3:9], ENTRIES[-14:-1], []):
        rule = RULES["regex or end"](entries, "test")
        for name in NAMES:
            assert rule.answer(Unit(name, (name,))).excluded is not should_convert_module(name, entries), (
                name,
                entries,
            )


def fp8_modules(model, entries):
    """Names of the modules that transformers builds in FP8 under this list, as its quantiser replaces them."""
    config = FineGrainedFP8Config(modules_to_not_convert=None if entries is None else list(entries))
    quantizer = FineGrainedFP8HfQuantizer(config, pre_quantized=True)
    quantizer._process_model_before_weight_loading(model)
    return {name for name, module in model.named_modules() if isinstance(module, FP8Linear)}


def build(text):
    with torch.device("meta"):
        if text:
            return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TINY))
        return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=TINY, vision_config=VISION))


WRAPPED = "model.language_model.layers.0.linear_attn.in_proj_"
LISTS = [
    None,
    [],
    ["lm_head"],
    [f"{WRAPPED}a", f"{WRAPPED}b", "lm_head", "mtp.fc"],
    ["model.layers.0.linear_attn.in_proj_a", "lm_head"],
    ["in_proj_a", "gate"],
    ["model.language_model.layers.1", "model.layers.2"],
    [r".*layers\.\d\.mlp", "lm_head"],
    ["language_model.model.layers.0.mlp.gate_proj"],
]


@pytest.mark.parametrize("text", [True, False], ids=["text", "wrapper"])
@pytest.mark.parametrize("entries", LISTS, ids=[str(index) for index in range(len(LISTS))])
def test_the_lens_builds_what_transformers_builds(entries, text):
    """Names on disk under the wrapper's root, as Qwen3.5 is published, loaded either way."""
    modules = [view for view in views(qwen_names(), (), QWEN) if view.part != "draft"]
    content = {**FP8, **({} if entries is None else {"modules_to_not_convert": entries})}
    found = look(modules, "fp8", content, QWEN_TEXT if text else QWEN)["transformers"]
    read = {verdict.runtime_name for verdict in found.verdicts if verdict.built == "fp8"}
    model = build(text)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {verdict.runtime_name for verdict in found.verdicts} == {n for n in linear if "visual" not in n}
    assert read == {name for name in fp8_modules(model, entries) if "visual" not in name}


def test_transformers_drops_the_mtp_head():
    for kind in (Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration):
        patterns = kind._keys_to_ignore_on_load_unexpected or []
        if kind is Qwen3_5ForCausalLM:
            assert any(re.search(pattern, "mtp.layers.0.mlp.up_proj.weight") for pattern in patterns)
        model = build(kind is Qwen3_5ForCausalLM)
        assert not [name for name, _ in model.named_modules() if name.split(".")[0] == "mtp"]
    found = look(views(qwen_names(), (), QWEN), "fp8", FP8, QWEN)["transformers"]
    assert {v.built for v in found.verdicts if v.module.startswith("mtp.")} == {"ignored"}

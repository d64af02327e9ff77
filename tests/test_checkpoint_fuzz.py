"""Mutated configs and indexes: opening, planning and reading raise CheckpointError, or nothing."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtplab.checkpoint import open_checkpoint
from mtplab.errors import CheckpointError
from tests.checkpoint_builders import FP8_CONFIG, LISTED, qwen_tensors, write_checkpoint

EXAMPLES = int(os.environ.get("MTPLAB_FUZZ_EXAMPLES", "60"))
WORDS = [
    "fp8", "e4m3", "dynamic", "static", "modelopt", "mtp.fc", "mtp.*", "re:.*", "(a+)+$", "[", "../x", "/etc/passwd",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.layers.0", "lm_head", "",
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.sampled_from(WORDS) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=6), inner,
                                                                max_size=3),
    max_leaves=8,
)  # fmt: skip
CONFIG_KEYS = [
    "quantization_config", "text_config", "llm_config", "compression_config", "num_hidden_layers",
    "num_nextn_predict_layers", "model_type",
]  # fmt: skip
QUANTIZATION_KEYS = [*FP8_CONFIG, "fmt", "modules_to_not_convert", "ignored_layers", "scale_fmt"]


def use(folder: Path) -> None:
    """Everything a reader does with a checkpoint; whatever is wrong has to end in a CheckpointError."""
    try:
        ckpt = open_checkpoint(folder)
        repr(ckpt)
        assert all(problem.message for problem in ckpt.problems)
    except CheckpointError as error:
        str(error).encode()
        return
    try:
        plan = ckpt.plan()
        assert str(plan).encode() and plan._repr_html_().encode()
    except CheckpointError as error:
        str(error).encode()
    for name in ckpt.tensors:
        try:
            assert ckpt.dequantize(name).dtype == torch.float32
        except CheckpointError as error:
            str(error).encode()


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_configs_raise_nothing_else(tmp_path: Path, data: st.DataObject) -> None:
    quantization: dict[str, Any] = {**FP8_CONFIG, "modules_to_not_convert": list(LISTED)}
    config: dict[str, Any] = {"num_hidden_layers": 1, "quantization_config": quantization}
    for _ in range(data.draw(st.integers(1, 3))):
        inner = data.draw(st.booleans())
        key = data.draw(st.sampled_from(QUANTIZATION_KEYS if inner else CONFIG_KEYS))
        (quantization if inner else config)[key] = data.draw(VALUES)
    if not (tmp_path / "model.safetensors").exists():
        write_checkpoint(tmp_path, qwen_tensors())
    (tmp_path / "config.json").write_text(json.dumps(config))
    use(tmp_path)


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_indexes_raise_nothing_else(tmp_path: Path, data: st.DataObject) -> None:
    index = tmp_path / "model.safetensors.index.json"
    if not (tmp_path / "kept").exists():
        write_checkpoint(tmp_path, qwen_tensors(), FP8_CONFIG, shards=2)
        (tmp_path / "kept").write_text(index.read_text())
    content = json.loads((tmp_path / "kept").read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.sampled_from(["weight_map", "entry", "new", "text"]))
        if where == "weight_map":
            content["weight_map"] = data.draw(VALUES)
        elif where in ("entry", "new") and isinstance(content["weight_map"], dict):
            names = st.sampled_from(sorted(content["weight_map"]) or ["x"]) if where == "entry" else st.text(max_size=9)
            content["weight_map"][data.draw(names)] = data.draw(VALUES)
    text = json.dumps(content)
    cut = data.draw(st.integers(0, len(text)))
    index.write_text(text[:cut] if data.draw(st.integers(0, 4)) == 0 else text)
    use(tmp_path)

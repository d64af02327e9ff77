"""Whatever stands in config.json, an audit says what is there or ends in a CheckpointError, never in a traceback."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtplab.checkpoint import open_checkpoint
from mtplab.errors import CheckpointError
from tests.audit_checkpoints import make
from tests.test_checkpoint_fuzz import CONFIG_KEYS, QUANTIZATION_KEYS, VALUES

MORE = ["mtp_num_hidden_layers", "num_mtp_modules", "tie_word_embeddings", "architectures", "num_experts"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_configs_are_audited(tmp_path: Path, data: st.DataObject) -> None:
    made = make("qwen3.5")
    assert made.quantization is not None
    made.config["quantization_config"] = made.quantization
    for _ in range(data.draw(st.integers(1, 3))):
        inner = data.draw(st.booleans())
        key = data.draw(st.sampled_from(QUANTIZATION_KEYS if inner else [*CONFIG_KEYS, *MORE]))
        (made.quantization if inner else made.config)[key] = data.draw(VALUES)
    if not (tmp_path / "model.safetensors").exists():
        make("qwen3.5").write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(made.config))
    try:
        audit = open_checkpoint(tmp_path, lenient=True).audit(deep=data.draw(st.integers(0, 9)) == 0, source=tmp_path)
    except CheckpointError as error:
        str(error).encode()
        return
    assert str(audit).encode() and audit._repr_html_().encode()
    assert json.dumps(audit.to_dict(), allow_nan=False)

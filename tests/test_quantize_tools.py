"""What is written loads with equal values in the tools the layouts come from, and engines agree on its list."""

import json
from pathlib import Path

import pytest
import torch

from mtplab.checkpoint import open_checkpoint, write_safetensors
from mtplab.checkpoint.convert import quantize_checkpoint
from mtplab.checkpoint.lenses import look, views_of


@pytest.fixture(scope="module")
def text_model(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint under the text model's own names, which is what transformers loads it by."""
    source = open_checkpoint(bundled)
    folder = tmp_path_factory.mktemp("text") / "src"
    folder.mkdir()
    tensors = {name.replace("model.language_model.", "model."): source.read(name) for name in source.tensors}
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(source.config))
    return folder


def compare(model: torch.nn.Module, folder: Path) -> None:
    ours = open_checkpoint(folder)
    fp8 = {f"{module.name}.weight" for module in ours.plan().modules if module.weight == "fp8"}
    theirs = {name: values for name, values in model.state_dict().items() if name in ours.tensors}
    assert len(fp8 & theirs.keys()) >= 20 and len(theirs) >= 50
    for name, values in theirs.items():
        if not name.endswith("scale"):
            assert values.dtype != torch.float8_e4m3fn
            assert torch.equal(values.float(), ours.dequantize(name)), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "scales", "block"),
    [("fp8-block", "ue8m0", None), ("fp8-block", "float", (64, 32)), ("fp8-tensor", "float", None)],
)
def test_transformers_reads_the_hf_layout(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, scales: str, block
) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    # all it checks is that accelerate is installed, which loading on a CPU does not use
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **options: None)
    quantize_checkpoint(text_model, tmp_path / "dst", format=format, scales=scales, block=block)
    said = FineGrainedFP8Config(dequantize=True, weight_block_size=list(block or (128, 128)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dst", quantization_config=said, dtype=torch.float32)
    compare(model, tmp_path / "dst")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # of which `dequantize` is what is taken
@pytest.mark.parametrize("format", ["fp8-block", "fp8-channel", "fp8-tensor"])
def test_compressed_tensors_reads_its_layout(text_model: Path, tmp_path: Path, format: str) -> None:
    """Its own decompressor, as transformers runs it while loading."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    quantize_checkpoint(text_model, tmp_path / "dst", format=format, layout="compressed-tensors")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dst", quantization_config=CompressedTensorsConfig(dequantize=True), dtype=torch.float32
    )
    compare(model, tmp_path / "dst")


def test_a_setting_under_which_engines_disagree_is_told(bundled: Path, tmp_path: Path) -> None:
    written = quantize_checkpoint(bundled, tmp_path / "a")
    assert written.engines.startswith("Loads right in vLLM, SGLang, lmdeploy and transformers")
    written = quantize_checkpoint(bundled, tmp_path / "b", exclude=["published", "*.q_proj"])
    assert "refused by vLLM" in written.engines and "q_proj" in written.engines
    assert quantize_checkpoint(tmp_path / "a", tmp_path / "c", format="bf16").engines == ""


@pytest.mark.parametrize("wrapped", [False, True], ids=["text", "wrapped"])
@pytest.mark.parametrize("draft", ["like-target", "bf16"])
@pytest.mark.parametrize(
    ("format", "layout"),
    [
        ("fp8-block", "hf"),
        ("fp8-channel", "compressed-tensors"),
        ("fp8-block", "modelopt"),
        ("fp8-channel", "modelopt"),
    ],
)
def test_engines_agree_on_what_is_kept_out(
    bundled: Path, text_model: Path, tmp_path: Path, format: str, layout: str, draft: str, wrapped: bool
) -> None:
    source = bundled if wrapped else text_model
    quantize_checkpoint(source, tmp_path / "dst", format=format, layout=layout, draft=draft)
    made = open_checkpoint(tmp_path / "dst")
    found = look(views_of(made.plan().modules), made.quantization.method, made.found.content, made.config)
    # an engine that reads no file of the method reads none under any list
    readers = [item for item in found.looks if item.status == "judged"]
    readers = [item for item in readers if (item.engine, layout) != ("transformers", "modelopt")]
    assert {"vLLM", "TensorRT-LLM"} <= {item.engine for item in readers}
    for item in readers:
        assert item.worst == "right" and not item.disagreements, (item.engine, item.disagreements)


@pytest.mark.parametrize(
    ("format", "layout", "scales"),
    [
        ("fp8-block", "hf", "float"),
        ("fp8-tensor", "hf", "ue8m0"),
        ("fp8-channel", "compressed-tensors", "ue8m0"),
        ("fp8-block", "modelopt", "float"),
    ],
)
def test_an_audit_of_values_finds_nothing(
    bundled: Path, tmp_path: Path, format: str, layout: str, scales: str
) -> None:
    quantize_checkpoint(bundled, tmp_path / "dst", format=format, layout=layout, scales=scales)
    audit = open_checkpoint(tmp_path / "dst").audit(deep=True, source=bundled)
    # SGLang's ModelOpt class reads no blocks, and vLLM looks for another name of a tensor's scale
    expected = ["engine-refuses"] if layout == "modelopt" or (format, layout) == ("fp8-tensor", "hf") else []
    assert [finding.kind for finding in audit.at_least("warning")] == expected and audit.deep

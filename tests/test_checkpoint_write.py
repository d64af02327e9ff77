"""Writing: safetensors files whole or not at all, and BF16 checkpoints as the published block-FP8 layout.

Every other format and layout: tests/test_quantize_*.py.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mtplab.checkpoint import SafetensorsWriter, open_checkpoint, write_safetensors
from mtplab.checkpoint.convert import quantize_checkpoint
from mtplab.checkpoint.header import read_header
from mtplab.errors import CheckpointError, ConfigError
from mtplab.quant.block import quantize_block
from tests.checkpoint_builders import qwen_fp8, qwen_tensors, write_checkpoint

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# one file


def test_what_is_written_reads_back_everywhere(tmp_path: Path) -> None:
    tensors = {
        "w": torch.randn(5, 7).to(torch.float8_e4m3fn),
        "scale": torch.rand(1, 1),
        "bf16": torch.randn(3).bfloat16(),
        "half": torch.randn(2, 2, 2).half(),
        "scalar": torch.tensor(5),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False, True]),
        "e8m0": torch.tensor([1.0, 2.0]).to(torch.float8_e8m0fnu),
        "turned": torch.randn(4, 6).t(),
        "naïve/名": torch.ones(1),
    }
    path = tmp_path / "x.safetensors"
    write_safetensors(path, tensors, {"format": "pt"})
    theirs = load_file(path)
    assert theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert theirs[name].dtype == tensor.dtype and torch.equal(theirs[name].float(), tensor.float())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    for info in read_header(path).tensors:
        # widest first, so every tensor is aligned to its own size
        assert info.start % max(1, tensors[info.name].element_size()) == 0
    assert left_behind(tmp_path) == ["x.safetensors"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": torch.ones(2)})
    before = path.read_bytes()
    layout = {"a": ("F32", (2,)), "b": ("F32", (3,))}
    with pytest.raises(ConfigError, match="1 tensors were never put: 'b'"):
        with SafetensorsWriter(path, layout) as file:
            file.put("a", torch.zeros(2))
    with pytest.raises(KeyboardInterrupt):
        with SafetensorsWriter(path, layout) as file:
            file.put("b", torch.zeros(3))
            raise KeyboardInterrupt
    assert path.read_bytes() == before and left_behind(tmp_path) == ["x.safetensors"]


@pytest.mark.parametrize(("name", "tensor"), [
    ("c", torch.zeros(2)), ("a", torch.zeros(3)), ("a", torch.zeros(2).half()), ("done", torch.zeros(1)),
])  # fmt: skip
def test_what_does_not_fit_the_layout_is_refused(tmp_path: Path, name: str, tensor: torch.Tensor) -> None:
    with SafetensorsWriter(tmp_path / "x.safetensors", {"a": ("F32", (2,)), "done": ("F32", (1,))}) as file:
        file.put("done", torch.zeros(1))
        with pytest.raises(ConfigError, match=f"tensor '{name}'"):
            file.put(name, tensor)
        file.put("a", torch.zeros(2))


def test_what_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_safetensors(tmp_path / "none" / "x.safetensors", {"a": torch.ones(1)})
    with pytest.raises(ConfigError, match="complex128"):
        write_safetensors(tmp_path / "x.safetensors", {"a": torch.ones(1, dtype=torch.complex128)})
    with pytest.raises(ConfigError, match="unknown dtype 'F9'"):
        SafetensorsWriter(tmp_path / "x.safetensors", {"a": ("F9", (1,))})
    with pytest.raises(ConfigError, match="__metadata__"):
        SafetensorsWriter(tmp_path / "x.safetensors", {"__metadata__": ("F32", (1,))})
    assert left_behind(tmp_path) == []


# a checkpoint


def bf16(folder: Path, shards: int = 1) -> Path:
    tensors = {name: t.float().bfloat16() for name, t in qwen_tensors().items() if not name.endswith("_inv")}
    tensors["model.layers.0.linear_attn.A_log"] = torch.randn(4)
    write_checkpoint(folder, tensors, shards=shards, config={"tie_word_embeddings": False})
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_the_published_layout_is_written(tmp_path: Path, shards: int) -> None:
    source = open_checkpoint(bf16(tmp_path / "src", shards))
    steps: list[tuple[int, int]] = []
    plan = quantize_checkpoint(tmp_path / "src", tmp_path / "dst", progress=lambda *step: steps.append(step)).plan
    made = open_checkpoint(tmp_path / "dst")
    quantised = {module.name for module in plan.modules if module.weight == "fp8"}
    assert quantised == {UP, DOWN, "mtp.layers.0.self_attn.q_proj"}
    for name in source.tensors:
        if name.removesuffix(".weight") in quantised:
            expected = quantize_block(source.read(name))
            found = made.scaled(name)
            assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
            assert torch.equal(found.scale, expected.scale) and found.block == expected.block
            assert made.tensors[f"{name}_scale_inv"].dtype == "F32"
        else:
            assert made.tensors[name].dtype == source.tensors[name].dtype
            assert torch.equal(made.read(name), source.read(name))
    assert len(made.tensors) == len(source.tensors) + len(quantised)
    assert made.config == {**source.config, "quantization_config": made.config["quantization_config"]}
    assert made.config["quantization_config"] == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            "model.layers.0.linear_attn.in_proj_a", "lm_head", "mtp.fc", "model.embed_tokens",
        ],
    }  # fmt: skip
    assert [file.name for file in made.files.shards] == [file.name for file in source.files.shards]
    assert (made.files.index is None) == (shards == 1)
    copied = set(left_behind(tmp_path / "dst"))
    assert {"tokenizer.json", "generation_config.json"} <= copied
    assert not {"modeling_evil.py", "pytorch_model.bin"} & copied
    assert left_behind(tmp_path) == ["dst", "src"]
    total = sum(info.nbytes for info in source.tensors.values())
    assert steps[-1] == (total, total) and steps == sorted(steps) and len(steps) == len(source.tensors)


def test_the_file_says_what_loading_would_have_computed(tmp_path: Path) -> None:
    source = open_checkpoint(bf16(tmp_path / "src"))
    exclude = ["published", "*.down_proj"]
    quantize_checkpoint(tmp_path / "src", tmp_path / "dst", exclude=exclude, draft_exclude="none")
    loaded = source.plan(exclude=exclude, draft_exclude="none", model_format="fp8")
    written = open_checkpoint(tmp_path / "dst").plan()
    assert written.warnings == ()
    for module in loaded.modules:
        stored = written.by_name[module.name]
        assert (stored.weight, stored.activation) == (module.weight, module.activation)
        assert stored.nbytes == module.loaded_nbytes
    assert written.by_name["mtp.fc"].weight == "fp8" and written.by_name[DOWN].weight == "bf16"


def test_a_tied_head_is_listed_all_the_same(tmp_path: Path) -> None:
    tensors = {name: t.bfloat16() for name, t in qwen_tensors().items() if not name.endswith("_inv")}
    del tensors["lm_head.weight"]
    write_checkpoint(tmp_path / "src", tensors)
    quantize_checkpoint(tmp_path / "src", tmp_path / "dst")
    made = open_checkpoint(tmp_path / "dst")
    assert made.quantization is not None and "lm_head" in made.quantization.exclusions
    assert made.plan().warnings == ()


def test_the_bundled_checkpoint_round_trips(bundled: Path, bundled_fp8: Path, tmp_path: Path) -> None:
    quantize_checkpoint(bundled, tmp_path / "dst")
    made, shipped = open_checkpoint(tmp_path / "dst"), open_checkpoint(bundled_fp8)
    assert made.tensors.keys() == shipped.tensors.keys()
    for name, info in shipped.tensors.items():
        assert (made.tensors[name].dtype, made.tensors[name].shape) == (info.dtype, info.shape)
    assert [m[:6] for m in map(_summary, made.plan().modules)] == [m[:6] for m in map(_summary, shipped.plan().modules)]


def _summary(module: object) -> tuple[object, ...]:
    return tuple(getattr(module, key) for key in ("name", "part", "kind", "stored", "weight", "activation"))


def test_what_is_not_to_be_quantised_is_refused(tmp_path: Path) -> None:
    qwen_fp8(tmp_path / "fp8")
    source = bf16(tmp_path / "src")
    with pytest.raises(ConfigError, match="does not exist yet"):
        quantize_checkpoint(source, tmp_path / "fp8")
    with pytest.raises(ConfigError, match=r"'mtp\.x' matches no module"):
        quantize_checkpoint(source, tmp_path / "dst", exclude=["mtp.x"])
    tensors = {f"{UP}.weight": torch.full((4, 4), float("nan")).bfloat16()}
    broken = write_checkpoint(tmp_path / "broken", tensors)
    with pytest.raises(CheckpointError) as caught:
        quantize_checkpoint(broken, tmp_path / "dst")
    assert f"model.safetensors: tensor '{UP}.weight': 16 of 16 values are NaN" in str(caught.value)
    assert left_behind(tmp_path) == ["broken", "fp8", "src"]


def test_a_run_that_is_stopped_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    source = bf16(tmp_path / "src", shards=3)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "dst", progress=stop)
    assert left_behind(tmp_path) == ["src"]
    index = json.loads((source / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3  # and the source is as it was


@pytest.mark.slow
def test_transformers_loads_the_written_file_with_equal_values(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    # all it checks is that accelerate is installed, which loading on a CPU does not use
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **options: None)
    source = open_checkpoint(bundled)
    tensors = {name.replace("model.language_model.", "model."): source.read(name) for name in source.tensors}
    (tmp_path / "src").mkdir()
    write_safetensors(tmp_path / "src" / "model.safetensors", tensors, {"format": "pt"})
    (tmp_path / "src" / "config.json").write_text(json.dumps(source.config))
    quantize_checkpoint(tmp_path / "src", tmp_path / "dst")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dst",
        quantization_config=FineGrainedFP8Config(dequantize=True, weight_block_size=[128, 128]),
        dtype=torch.float32,
    )
    ours = open_checkpoint(tmp_path / "dst")
    theirs = {name: values for name, values in model.state_dict().items() if name in ours.tensors}
    assert len(theirs) >= 50 and any(ours.tensors[name].dtype == "F8_E4M3" for name in theirs)
    for name, values in theirs.items():
        assert torch.equal(values.float(), ours.dequantize(name)), name

"""The target and its head against transformers' own layers, on the bundled weights."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import create_causal_mask
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from mtplab import CheckpointError, ConfigError, generate, load_model, quantize_checkpoint
from mtplab.checkpoint.write import write_safetensors
from mtplab.config import EngineConfig, SpecConfig
from mtplab.decode.peek import next_logits
from mtplab.models.config import parse_config
from mtplab.models.model import load_configured
from mtplab.models.passes import PassMaker
from mtplab.quant.policy import resolve_policy
from oracle import oracle, oracle_config, oracle_greedy, oracle_hidden
from tiny import DEFAULTS, tiny_tensors, write_tiny

TOLERANCE = 1e-4  # on logits of about ±20, float32
NONE = resolve_policy("none")


@pytest.fixture(scope="module", params=["bundled", "bundled_fp8"])
def pair(request):
    """(our model without activation rounding, transformers' model) of each bundled checkpoint."""
    path = request.getfixturevalue(request.param)
    return load_model(path, activation_rounding=False), oracle(path)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(1, 2048, (150,), generator=generator).tolist()


def run_passes(model, ids: list[int], splits: list[int], exact: bool):
    """Hidden after the final norm [t, h] of one sequence: a prompt pass over the first split, decode passes after."""
    passes = PassMaker(model.config, 512, model.dtype, model.device)
    caches = model.target_caches(1, 512, NONE)
    out, at = [], 0
    with torch.inference_mode():
        for n in splits:
            tokens = torch.tensor([ids[at : at + n]])
            valid, width = None, n
            if at == 0:  # the prompt: padded to whole chunks
                width = -(-n // 64) * 64
                tokens, valid = torch.nn.functional.pad(tokens, (0, width - n)), torch.tensor([n])
            positions = torch.arange(at, at + width)[None]
            run = passes.make(positions, at + width, exact, valid)
            hidden = model.target(tokens, run, caches)[:n]
            for cache in caches:
                if hasattr(cache, "commit"):
                    cache.commit(torch.tensor([n]), n)
            out.append(model.target.normed(hidden))
            at += n
    return torch.cat(out)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("splits", [[150], [100] + [1] * 50, [64, 5, 1, 9, 71]], ids=["prefill", "decode", "mixed"])
def test_target_equals_transformers(pair, ids, splits, exact):
    model, reference = pair
    hidden, logits = oracle_hidden(reference, ids)
    mine = run_passes(model, ids, splits, exact)
    assert (mine - hidden).abs().max() < TOLERANCE
    with torch.inference_mode():
        assert (model.target.logits(mine) - logits).abs().max() < TOLERANCE


def transformers_head(path, reference, hidden: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """The head's hidden after mtp.norm [t, h], from transformers' layers: slot t holds (hidden t, token t+1)."""
    checkpoint, config = load_model(path).checkpoint, oracle_config(path)
    config._attn_implementation = "eager"
    config.layer_types = ["full_attention"]
    layer = Qwen3_5DecoderLayer(config, 0).float().eval()
    weights = {n: checkpoint.dequantize(n) for n in checkpoint.tensors if n.startswith("mtp.") and "_scale" not in n}
    prefix = "mtp.layers.0."
    layer.load_state_dict({n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)})

    def norm(name: str) -> Qwen3_5RMSNorm:
        module = Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)
        module.load_state_dict({"weight": weights[f"mtp.{name}.weight"]})
        return module

    with torch.no_grad():
        embedded = reference.model.embed_tokens(torch.tensor([ids[1:]]))
        both = torch.cat([norm("pre_fc_norm_embedding")(embedded), norm("pre_fc_norm_hidden")(hidden[None, :-1])], -1)
        x = both @ weights["mtp.fc.weight"].t()
        positions = torch.arange(x.shape[1])[None]
        rotary = Qwen3_5TextRotaryEmbedding(config)(x, positions)
        mask = create_causal_mask(config, x, None, None, position_ids=positions)
        x = layer(x, position_embeddings=rotary, attention_mask=mask, position_ids=positions)
        return norm("norm")(x if isinstance(x, torch.Tensor) else x[0])[0]


def test_head_equals_transformers_layers(pair, ids):
    model, reference = pair
    hidden, _ = oracle_hidden(reference, ids)
    expected = transformers_head(model.checkpoint.path, reference, hidden, ids)
    passes = PassMaker(model.config, 256, model.dtype, model.device)
    with torch.inference_mode():
        n = len(ids) - 1
        run = passes.make(torch.arange(n)[None], n, False)
        embedded = model.target.embedding[torch.tensor(ids[1:])]
        mine = model.draft.normed(model.draft(embedded, hidden[:-1], run, *model.draft_caches(1, 1, 256, NONE)))
    assert (mine - expected).abs().max() < TOLERANCE


def test_online_fp8_reaches_the_head(bundled):
    """model_format="fp8" quantises the draft too, as lmdeploy #4572 made it; mtp.fc stays BF16."""
    plan = load_model(bundled, model_format="fp8").plan.by_name
    assert plan["mtp.layers.0.mlp.down_proj"].weight == "fp8"
    assert plan["mtp.layers.0.self_attn.q_proj"].activation == "fp8"
    assert plan["mtp.fc"].weight == "bf16"


def test_online_fp8_equals_the_stored_fp8(bundled, tmp_path):
    """Quantising the BF16 file as it is loaded gives the weights of the FP8 file that is made from it."""
    quantize_checkpoint(bundled, tmp_path / "fp8")
    online, stored = load_model(bundled, model_format="fp8"), load_model(tmp_path / "fp8")
    for mine, theirs in zip(online.target.layers, stored.target.layers, strict=True):
        a, b = mine.mlp.gate_up, theirs.mlp.gate_up
        assert all(a.rounded) and all(b.rounded)
        assert all(map(torch.equal, a.weights(), b.weights())), a.names


def test_spec_config_follows_the_target_unless_told():
    engine = EngineConfig(model_format="fp8", quant_policy="int8", exclude=["*.mlp.*"])
    spec = SpecConfig.from_target(engine)
    assert (spec.model_format, spec.quant_policy, spec.exclude) == ("fp8", None, ("*.mlp.*",))
    assert SpecConfig.from_target(engine, quant_policy="none", exclude="none").exclude == "none"


@pytest.mark.parametrize("target, draft", [(None, "fp8"), ("fp8", None)])
def test_draft_weight_format_can_differ(bundled, target, draft):
    model = load_configured(bundled, EngineConfig(model_format=target), SpecConfig(model_format=draft))
    kinds = {True: set(), False: set()}
    for module in model.plan.modules:
        if module.name.endswith("_proj"):
            kinds[module.name.startswith("mtp.")].add(module.weight)
    assert ("fp8" in kinds[False]) == (target == "fp8")
    assert ("fp8" in kinds[True]) == (draft == "fp8")


def test_unknown_architecture_is_named(bundled):
    config = {**load_model(bundled).checkpoint.config, "model_type": "llama"}
    with pytest.raises(CheckpointError, match=r"model_type is 'llama'.*qwen3_5_text"):
        parse_config(config)


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("num_hidden_layers", 5, r"layer_types has 4 entries.*expected 5 entries"),
        ("head_dim", -1, r"head_dim is -1; expected a positive"),
        ("layer_types", 5, r"layer_types is 5; expected a JSON list"),
        ("rope_parameters", 7, r"rope_parameters is 7; expected a JSON dict"),
        ("eos_token_id", {}, r"eos_token_id is \{\}; expected an id"),
        ("mtp_num_hidden_layers", 17, r"mtp_num_hidden_layers is 17; expected a whole number from 0 to 16"),
        ("num_hidden_layers", 10**12, r"expected a positive int of at most 10000"),
        ("hidden_size", None, r"hidden_size is None|hidden_size is missing"),
        ("num_key_value_heads", 3, r"num_attention_heads is 4; expected a multiple of 3"),
        ("rope_parameters", {"rope_type": "yarn"}, r"rope_type is 'yarn'"),
        ("attention_bias", True, r"attention_bias is true"),
        ("attn_output_gate", False, r"attn_output_gate is false; expected true"),
        ("mtp_use_dedicated_embeddings", True, r"mtp_use_dedicated_embeddings is true; expected false"),
        ("tie_word_embeddings", "no", r"tie_word_embeddings is 'no'; expected true or false"),
        ("eos_token_id", 99999, r"eos_token_id is 99999; expected an id from 0 to 2047"),
        ("dtype", "float64", r"config.json: dtype is 'float64'; expected one of bfloat16"),
    ],
)
def test_config_faults_are_named(bundled, key, value, said):
    config = {**load_model(bundled).checkpoint.config, key: value}
    with pytest.raises(CheckpointError, match=said) as caught:
        parse_config(config, file="folder/config.json")
    assert str(caught.value).startswith("folder/config.json: ")


def test_config_faults_name_the_file(tmp_path):
    write_tiny(tmp_path, hidden_act="gelu")
    with pytest.raises(CheckpointError, match="hidden_act is 'gelu'") as caught:
        load_model(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    write_tiny(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": -1}')
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'generation_config.json'}: eos_token_id is -1")


def test_a_head_that_is_promised_and_missing_says_what_to_do(tmp_path):
    write_tiny(tmp_path, mtp_num_hidden_layers=0)
    assert generate(load_model(tmp_path), [[1, 2]], depth=0, max_new_tokens=3).tokens
    config = json.loads((tmp_path / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="mtp_num_hidden_layers is 1, but no tensor.*Set it to 0") as caught:
        load_model(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=300)
@given(data=st.data())
def test_any_value_in_any_key_of_the_config(data):
    """Whatever a config holds, only CheckpointError comes out."""
    key = data.draw(st.sampled_from(sorted(DEFAULTS) + ["text_config", "attention_bias", "full_attention_interval"]))
    config = DEFAULTS | {key: data.draw(JSON)}
    if data.draw(st.booleans()):
        config.pop("layer_types", None)
    try:
        parse_config(config)
    except CheckpointError as error:
        assert "config.json" in str(error)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"device": "cuda:0"}, "no GPU") if not torch.cuda.is_available() else ({"device": "cuda:99"}, "torch sees"),
        ({"device": "nowhere"}, "device is 'nowhere': expected 'cpu', 'cuda' or 'cuda:N'"),
        ({"device": "cpu:7"}, "device is 'cpu:7': expected 'cpu'"),
        ({"dtype": "int8"}, "expected one of bfloat16"),
        ({"quant_policy": "int3"}, "unknown quant_policy 'int3'"),
        ({"model_format": "awq"}, "model_format is 'awq'"),
        ({"device": "meta"}, "device is 'meta': expected 'cpu'"),
        ({"exclude": ["*mlp*"]}, "nothing would be kept from FP8"),
    ],
)
def test_settings_faults_are_named(bundled, arguments, said):
    with pytest.raises(ConfigError, match=said):
        load_model(bundled, **arguments)


OTHER_SHAPES = {
    "two KV heads, two attention layers": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
    },
    "wide heads, no grouping, tied": {
        "num_key_value_heads": 2,
        "head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "tie_word_embeddings": True,
        "hidden_size": 48,
    },
    "attention first, odd vocabulary": {"layer_types": ["full_attention", "linear_attention"], "vocab_size": 131},
}


@pytest.mark.parametrize("shape", list(OTHER_SHAPES))
def test_other_shapes_equal_transformers_and_stay_lossless(tmp_path, shape):
    """Random checkpoints of other shapes: logits, greedy tokens of ragged batches, drafts under a quantised cache."""
    path = write_tiny(tmp_path, seed=2, spread=2.0, **OTHER_SHAPES[shape])
    model, reference = load_model(path), oracle(path)
    prompts = [[(7 * i + j) % 15 + 1 for j in range(n)] for i, n in enumerate((1, 15, 16, 17, 40))]
    for ids in prompts:
        assert (next_logits(model, ids) - oracle_hidden(reference, ids)[1][-1]).abs().max() < TOLERANCE
    expected = [oracle_greedy(reference, ids, 20) for ids in prompts]
    for depth in (0, 1, 5):
        assert generate(model, prompts, depth=depth, max_new_tokens=20).tokens == expected
    plain = generate(model, prompts, depth=0, max_new_tokens=20, quant_policy="int4").tokens
    assert generate(model, prompts, depth=3, max_new_tokens=20, quant_policy="int4").tokens == plain


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(bundled, dtype):
    """BF16 and FP16 compute, as on a GPU: close to float32, and a speculative run goes through."""
    half, full = load_model(bundled, dtype=dtype), load_model(bundled)
    ids = full.encode("import os\nimport sys\n")
    mine, exact = next_logits(half, ids).float(), next_logits(full, ids)
    assert mine.argmax() == exact.argmax()
    assert torch.nn.functional.cosine_similarity(mine, exact, dim=0) > 0.99
    out = generate(half, [ids], depth=2, max_new_tokens=12, quant_policy="int8")
    assert len(out.tokens[0]) == 12


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.linear_attn.A_log", "mtp.fc.weight"])
def test_a_nan_in_any_weight_is_named(tmp_path, name):
    """One NaN would make every token id 0 (often EOS), or acceptance 0 %, without a word."""
    tensors = tiny_tensors(DEFAULTS)
    tensors[name].view(-1)[3 % tensors[name].numel()] = float("nan")
    write_tiny(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=rf"{name}: 1 of \d+ values are NaN"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "name, dtype, said",
    [
        ("model.embed_tokens.weight", "I64", r"is I64 \[.*integers, with no scale"),
        ("mtp.fc.weight", "U8", r"is U8 \[.*integers, with no scale"),
        ("model.norm.weight", "I64", "is stored as I64; expected BF16"),
    ],
)
def test_integers_are_not_read_as_numbers(tmp_path, name, dtype, said):
    tensors = tiny_tensors(DEFAULTS)
    tensors[name] = tensors[name].to(torch.int64 if dtype == "I64" else torch.uint8)
    write_tiny(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=f"{name}'? {said}"):
        load_model(tmp_path)


@pytest.mark.parametrize("content, said", [("[" * 200_000, "generation_config.json"), ('{"eos_token_id": "x"}', "'x'")])
def test_generation_config_faults_name_that_file(tmp_path, content, said):
    (write_tiny(tmp_path) / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"generation_config.json.*{said}|{said}"):
        load_model(tmp_path)

"""What each serving engine is started with, word for word, and what is refused before it is.

How processes live and die is in `test_engine_launch.py`.
"""

import json

import pytest

from mtplab.engines.engine import Wanted, check
from mtplab.engines.launch import launched
from mtplab.engines.registry import ENGINES
from mtplab.engines.settings import LAUNCHED, Launch, Limits
from mtplab.errors import CheckpointError, ConfigError

BY_DEFAULT = {"sglang": {}, "vllm": {}, "lmdeploy": {}, "llamacpp": {"served": "m.gguf"}, "mtplab": {}}


@pytest.fixture
def checkpoint(tmp_path):
    """Makes a folder with a config.json that says no more than of which family it is."""

    def make(family: str = "qwen3_5", **more):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **more}))
        return str(tmp_path)

    return make


def wanted(folder: str, depth: int = 0, cache: str = "none", draft: str | None = None, longest: int = 500) -> Wanted:
    return Wanted(folder, None, depth, cache, draft or cache, longest)


def words(engine: str, asked: Wanted, **more) -> list[str]:
    settings = Launch(engine=engine, **BY_DEFAULT[engine], **more)
    check(ENGINES[engine], asked, settings)
    return ENGINES[engine].arguments(asked, settings, "name", 81)


VLLM = ["--served-model-name", "name", "--host", "127.0.0.1", "--port", "81", "--no-enable-prefix-caching"]
VLLM += ["--generation-config", "vllm", "--max-model-len", "2048"]
PER_REQUEST = ["--per-request-spec-decode-metrics", "detailed"]


def test_vllm(checkpoint):
    m = checkpoint()
    assert words("vllm", wanted(m)) == [m, *VLLM]
    deep = '{"method": "mtp", "num_speculative_tokens": 3}'
    assert words("vllm", wanted(m, 3)) == [m, *VLLM, "--speculative-config", deep, *PER_REQUEST]
    other = '{"method": "mtp", "num_speculative_tokens": 3, "kv_cache_dtype": "auto"}'
    more = ["--tensor-parallel-size", "4", "--data-parallel-size", "2", "--enable-expert-parallel"]
    assert words("vllm", wanted(m, 3, "int8", "none"), tp=4, dp=2, ep=8) == [
        *(m, *VLLM, "--kv-cache-dtype", "int8_per_token_head", "--speculative-config", other, *PER_REQUEST, *more)
    ]


SGLANG = ["--served-model-name", "name", "--host", "127.0.0.1", "--port", "81", "--disable-radix-cache"]
SGLANG += ["--enable-metrics"]


def test_sglang(checkpoint):
    m = checkpoint()
    assert words("sglang", wanted(m)) == ["--model-path", m, *SGLANG]
    deep = ["--speculative-algorithm", "NEXTN", "--speculative-draft-model-path", m, "--speculative-num-steps", "3"]
    deep += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
    fp8 = ["--kv-cache-dtype", "fp8_e5m2"]
    assert words("sglang", wanted(m, 3, "fp8_e5m2")) == ["--model-path", m, *SGLANG, *fp8, *deep]
    draft = ["--speculative-draft-kv-cache-dtype", "bfloat16"]
    degrees = ["--tp-size", "8", "--ep-size", "4", "--dp-size", "2"]
    assert words("sglang", wanted(m, 3, "fp8_e5m2", "none"), tp=8, ep=4, dp=2) == [
        *("--model-path", m, *SGLANG, *fp8, *deep, *draft, *degrees)
    ]


def test_lmdeploy(checkpoint):
    m = checkpoint()
    plain = ["--backend", "pytorch", "--model-name", "name", "--server-name", "127.0.0.1", "--server-port", "81"]
    plain += ["--generation-config", "lmdeploy", "--quant-policy"]
    assert words("lmdeploy", wanted(m, 0, "turboquant")) == [m, *plain, "42"]
    numbers = {"none": "0", "int4": "4", "int8": "8", "fp8_e4m3": "16", "fp8_e5m2": "17"}
    for policy, number in numbers.items():
        assert words("lmdeploy", wanted(m, 0, policy))[-1] == number

    def deep(algorithm: str) -> list[str]:
        return ["--speculative-algorithm", algorithm, "--speculative-num-draft-tokens", "3"]

    assert words("lmdeploy", wanted(m, 3), tp=8) == [m, *plain, "0", *deep("qwen3_5_mtp"), "--tp", "8"]
    assert words("lmdeploy", wanted(checkpoint("deepseek_v3"), 3))[-4:] == deep("deepseek_mtp")
    nested = checkpoint("any", text_config={"model_type": "qwen3_5_moe_text"})
    assert words("lmdeploy", wanted(nested, 3))[-4:] == deep("qwen3_5_mtp")
    sparse = words("lmdeploy", wanted(checkpoint("deepseek_v32"), 3, "fp8_e4m3"))
    assert sparse[sparse.index("--quant-policy") + 1] == "16" and sparse[-4:] == deep("deepseek_mtp")


def test_llamacpp(checkpoint):
    m = checkpoint()
    plain = ["-m", "m.gguf", "--alias", "name", "--host", "127.0.0.1", "--port", "81", "-np", "2", "-c", "4096"]
    plain += ["--metrics", "--no-cache-prompt", "-cram", "0"]
    two = Limits(concurrency=2)
    assert words("llamacpp", wanted(m), limits=two) == plain
    deep = ["--spec-type", "draft-mtp", "--spec-draft-n-max", "3", "--spec-draft-n-min", "0", "--spec-draft-p-min", "0"]
    assert words("llamacpp", wanted(m, 3), limits=two) == [*plain, *deep]
    caches = ["-ctk", "q8_0", "-ctv", "q8_0"]
    drafts = ["-ctkd", "q4_0", "-ctvd", "q4_0"]
    assert words("llamacpp", wanted(m, 3, "int8", "int4"), limits=two) == [*plain, *caches, *deep, *drafts]
    assert words("llamacpp", wanted(m, 0, "int8", "int4"), limits=two) == [*plain, *caches]


@pytest.mark.parametrize("engine", LAUNCHED)
def test_a_longer_text_gets_room_and_a_short_one_shares(engine, checkpoint):
    folder = checkpoint()
    same = [words(engine, wanted(folder, longest=longest)) for longest in (1, 1984)]
    assert same[0] == same[1]
    longer = words(engine, wanted(folder, longest=1985))
    assert (longer != same[0]) == (engine in ("vllm", "llamacpp"))
    assert ENGINES[engine].program and ENGINES[engine].metrics_flag != ""


REFUSED = [
    ("vllm", {}, ("qwen3_5", 3, "turboquant"), "quant_policy turboquant.*other widths.*lmdeploy, at depth 0"),
    ("vllm", {}, ("qwen3_5", 3, "none", "turboquant"), "draft_quant_policy turboquant"),
    ("vllm", {}, ("qwen3_5", 0, "fp8_e4m3:calibrated"), "has no such cache; it has none"),
    ("vllm", {"tp": 2, "dp": 2, "ep": 2}, ("qwen3_5",), "ep 2.*tp × dp = 4"),
    ("sglang", {}, ("qwen3_5", 0, "int8"), "quant_policy int8: SGLang 0.5.23 has no such cache"),
    ("sglang", {}, ("qwen3_5", 3, "none", "int4"), "draft_quant_policy int4"),
    ("sglang", {"tp": 4, "ep": 8}, ("qwen3_5",), "ep 8.*tp = 4"),
    ("lmdeploy", {"dp": 2}, ("qwen3_5",), "dp 2.*a server for every rank"),
    ("lmdeploy", {"tp": 2, "ep": 2}, ("qwen3_5",), "ep 2"),
    ("lmdeploy", {}, ("mimo", 1), "depth 1.*no MTP head of model_type 'mimo'"),
    ("lmdeploy", {}, ("qwen3_5", 1, "int8"), "quant_policy int8 at depth 1.*unquantised cache only"),
    ("lmdeploy", {}, ("qwen3_5", 1, "turboquant"), "quant_policy turboquant at depth 1"),
    ("lmdeploy", {}, ("qwen3_5", 1, "none", "int8"), "keeps its draft's cache as the target's"),
    ("lmdeploy", {}, ("deepseek_v3", 0, "int8"), "quant_policy int8: .*no such cache for deepseek_v3"),
    ("lmdeploy", {}, ("deepseek_v32", 0, "int4"), "no such cache for deepseek_v32"),
    ("lmdeploy", {}, ("qwen3_5", 0, "int8/int4"), "has no such cache"),
    ("llamacpp", {"served": "m.gguf", "tp": 2}, ("qwen3_5",), "tp 2.*--split-mode"),
    ("llamacpp", {}, ("qwen3_5",), "no checkpoint but a GGUF"),
    ("llamacpp", {"served": "m.gguf"}, ("qwen3_5", 0, "fp8_e4m3"), "has no such cache; it has none, int8, int4"),
    ("llamacpp", {"served": "m.gguf", "arguments": ("-ctk", "q8_0")}, ("qwen3_5",), "-ctk q8_0 and quant_policy"),
    ("llamacpp", {"served": "m.gguf", "arguments": ("-ctv", "f32")}, ("qwen3_5", 0, "int8"), "-ctv f32"),
    ("llamacpp", {"served": "m.gguf", "arguments": ("-ctk=q8_0",)}, ("qwen3_5",), "-ctk q8_0"),
    ("llamacpp", {"served": "m.gguf", "arguments": ("-ctkd",)}, ("qwen3_5", 3), "-ctkd None and draft_quant_policy"),
    ("llamacpp", {"served": "m.gguf", "arguments": ("--spec-synth-len", "3")}, ("qwen3_5", 3), "--spec-synth-len"),
    ("sglang", {"arguments": ("--speculative-eagle-topk", "4")}, ("qwen3_5", 3), "--speculative-eagle-topk"),
    ("lmdeploy", {"arguments": ("--backend", "turbomind")}, ("qwen3_5", 3), "--backend"),
    ("lmdeploy", {"arguments": ("--speculative-alg", "eagle")}, ("qwen3_5",), "--speculative-alg"),
]


@pytest.mark.parametrize(("engine", "settings", "asked", "said"), REFUSED)
def test_what_an_engine_cannot_do_is_refused_before_a_start(engine, settings, asked, said, checkpoint):
    family, *rest = asked
    with pytest.raises(ConfigError, match=f"engine {engine}: .*{said}"):
        launched(Launch(engine=engine, **settings), wanted(checkpoint(family), *rest))


def test_heads_that_turboquant_cannot_rotate(checkpoint):
    with pytest.raises(ConfigError, match="head_dim is 96"):
        launched(Launch(engine="lmdeploy"), wanted(checkpoint("qwen3_5", head_dim=96), 0, "turboquant"))
    launched(Launch(engine="lmdeploy"), wanted(checkpoint("qwen3_5", head_dim=128), 0, "turboquant"))


def test_a_family_is_read_of_the_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        launched(Launch(engine="lmdeploy"), wanted(str(tmp_path), 3))


def test_tensorrt_llm_is_not_started(checkpoint):
    with pytest.raises(ValueError, match="engine"):
        Launch(engine="tensorrt_llm")
    assert "give its address" in ENGINES["tensorrt_llm"].refusal(wanted(checkpoint()), Launch(engine="vllm"))
    assert "tensorrt_llm" not in LAUNCHED and not ENGINES["tensorrt_llm"].program


def test_an_unquantised_cache_may_be_of_another_dtype(checkpoint):
    more = ("-ctk", "f32", "-ctv", "f32", "-ctkd", "bf16")
    made = launched(Launch(engine="llamacpp", served="m.gguf", arguments=more), wanted(checkpoint(), 3))
    assert tuple(made.command("name", 81)[-6:]) == more


def test_what_must_be_said_of_a_setting(checkpoint):
    folder = checkpoint()

    def remark(engine: str, *asked) -> str | None:
        return ENGINES[engine].remark(wanted(folder, *asked))

    assert remark("vllm", 3, "fp8_e4m3") is None and "symmetric" in remark("vllm", 3, "none", "int8")
    assert remark("sglang", 3, "fp8_e4m3") is None and "BF16" in remark("sglang", 3, "fp8_e4m3", "none")
    assert remark("lmdeploy", 0) is None and "3 at most" in remark("lmdeploy", 3)
    assert remark("llamacpp", 0, "none", "int4") is None and "blocks of 32" in remark("llamacpp", 3, "none", "int4")


def test_options_in_the_environment_are_not_inherited(monkeypatch):
    from mtplab.engines.starting import _environment

    for name in ("LLAMA_ARG_SPEC_TYPE", "LLAMA_API_KEY", "OTHER"):
        monkeypatch.setenv(name, "x")
    found = _environment(ENGINES["llamacpp"], Launch(engine="llamacpp"), None, "127.0.0.1")
    assert "LLAMA_ARG_SPEC_TYPE" not in found and "LLAMA_API_KEY" not in found and found["OTHER"] == "x"
    assert "LLAMA_ARG_SPEC_TYPE" in _environment(ENGINES["vllm"], Launch(engine="vllm"), None, "127.0.0.1")
